"The drafter's side of the seam: what the loop accepts from it, lookup against a slow search, a model against itself."
import inspect
import pkgutil
import sys
from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specdec.drafters
from helpers import Failing, greedy, ids_of, tiny
from specdec.device.ops import DeviceSequence, NothingOnDevice
from specdec.drafters.base import (
    Draft,
    DrafterBase,
    NoDrafter,
    NotStarted,
    WrapperDrafter,
    WrapperState,
    apply_rule,
    ask,
    check_state,
)
from specdec.drafters.colder import TemperatureScaledDrafter
from specdec.drafters.lookup import NGramDrafter
from specdec.drafters.model import ModelDrafter, ModelState
from specdec.errors import InputError, ModelError, NumericalError
from specdec.loop import speculate
from specdec.panel.playground import LiveDrafter
from specdec.sampling import SamplingParams, SeededRandom


def decode(target, drafter, prompt, temperature=0.0, K=3, max_new_tokens=20, **options):
    "All rounds of a text."
    return list(
        speculate(target, drafter, prompt, SamplingParams(temperature), SeededRandom(0), K, max_new_tokens, **options)
    )


class Answering(NoDrafter):
    "A drafter that proposes what it is told to."
    def __init__(self, draft): self.draft = draft
    def propose(self, K, sampling, rng): return self.draft


class Told(NoDrafter):
    "Remembers what it is told and asked."
    layers = (3, 1)
    def __init__(self): self.heard = []
    def start(self, *text):
        self.heard.append(text)
        return self
    def commit(self, *news): self.heard.append(news)
    def propose(self, *asked):
        self.heard.append(asked)
        return Draft([4])


class Wrapped(WrapperDrafter):
    def wrap(self, inner, tokens, eos_ids): return WrapperState(inner)


@pytest.mark.parametrize("kind", [WrapperDrafter, Wrapped, TemperatureScaledDrafter])
def test_a_drafter_around_a_drafter_passes_everything_on(kind):
    told, direct = Told(), Told()
    around, features, rng = kind(told), torch.ones(1, 8), SeededRandom(0)
    for drafter in (around, direct):
        state = drafter.start([1, 2], features, 20, {7})
        assert state.propose(3, SamplingParams(), rng) == Draft([4])  # nothing gets colder than greedy
        state.commit([4, 5], features)
    assert told.heard == direct.heard and len(told.heard) == 3 and around.layers == told.layers


def test_what_wraps_a_state_hears_of_its_sequence():
    class Noting(WrapperDrafter):
        def wrap(self, *told): return told
    told = Told()
    assert Noting(told).start([1, 2], None, 20, {7}) == (told, [1, 2], {7})


def test_a_drafter_of_nothing_has_nothing_to_remember():
    drafter = NoDrafter()
    assert drafter.start([1], None, 9) is drafter and vars(drafter) == {}
    assert drafter.propose(5, SamplingParams(), SeededRandom(0)) == Draft([])


# What a drafter says that is asked before its start

def drafter_classes() -> set[type]:
    "All classes of the package that start states, but for the protocol, and the two that are their own state."
    for module in pkgutil.iter_modules(specdec.drafters.__path__, "specdec.drafters."): import_module(module.name)
    for name in ("engine.constraints", "app.generate", "panel.playground"): import_module(f"specdec.{name}")
    modules = [module for name, module in sys.modules.items() if name.startswith("specdec.")]
    found = {thing for module in modules for thing in vars(module).values()
             if inspect.isclass(thing) and thing.__module__.startswith("specdec.") and "start" in vars(thing)
             and {"tokens", "limit"} <= set(inspect.signature(thing.start).parameters)}
    return {kind for kind in found if not getattr(kind, "_is_protocol", False)} - {NoDrafter, LiveDrafter}


def test_every_drafter_of_ours_says_what_is_missing_before_its_start():
    ours = "specdec.lossless.proof", "specdec.drafters.costs"
    inside = {kind for kind in drafter_classes() if kind.__module__ in ours}
    kinds = drafter_classes() - inside  # the others are for users
    assert {"ModelDrafter", "HeadDrafter", "TreeHybrid", "CandidateDrafter"} <= {kind.__name__ for kind in kinds}
    assert {kind for kind in kinds if not issubclass(kind, DrafterBase)} == set() and len(kinds) >= 9


OURS = sorted((kind for kind in drafter_classes() if issubclass(kind, DrafterBase)), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("method", ["propose", "commit"])
def test_a_drafter_before_its_start_says_so(kind, method):
    "Its class as well; and it has no such method, so that nobody takes it for a state."
    for asked in (kind, object.__new__(kind)):
        with pytest.raises(NotStarted) as told: getattr(asked, method)
        assert str(told.value).startswith(f"{kind.__name__} has no {method} before its start: ")
        assert f"state = drafter.start(tokens, features, limit), then state.{method}(…)" in str(told.value)
        assert "\n" not in str(told.value) and not hasattr(asked, method)


def test_once_it_is_started_its_state_drafts():
    drafter = ModelDrafter(tiny(), 24)
    with pytest.raises(AttributeError, match="before its start"): drafter.propose(2, SamplingParams(), SeededRandom(0))
    state = drafter.start([1, 2], None, 9)
    assert len(state.propose(2, SamplingParams(), SeededRandom(0)).tokens) == 2
    with pytest.raises(AttributeError, match="no attribute 'proposed'"): _ = drafter.proposed


# What the loop takes from a drafter

@pytest.mark.parametrize("draft, words", [
    pytest.param(None, "expected a Draft", id="nothing"),
    pytest.param([1, 2], "expected a Draft", id="a list"),
    pytest.param(Draft([1.0]), "whole numbers", id="a float token"),
    pytest.param(Draft(["a"]), "whole numbers", id="a text token"),
    pytest.param(Draft([1], [[0.5]]), "shape", id="q as a list"),
    pytest.param(Draft([1], torch.ones(1, 23)), "shape", id="q too narrow"),
    pytest.param(Draft([1], torch.ones(2, 24)), "shape", id="a row too many"),
    pytest.param(Draft([1], torch.full((1, 24), 2 / 24)), "sum to 1", id="q sums to 2"),
    pytest.param(Draft([1], torch.full((1, 24), float("nan"))), "sum to 1", id="q is NaN"),
    pytest.param(Draft([1, 2, 3, 4]), "at most 3", id="more than asked"),
    pytest.param(Draft([24]), r"outside the target's 0…23", id="id outside"),
    pytest.param(Draft([-1]), "outside", id="negative id"),
    pytest.param(Draft([True]), "whole numbers", id="a truth for a token"),
    pytest.param(Draft(3), "whole numbers", id="a number for tokens"),
    pytest.param(Draft([1], torch.tensor([[1.5, -0.5, *[0.0] * 22]])), "negative", id="a negative q"),
])
def test_drafters_that_break_the_protocol_are_named(draft, words):
    with pytest.raises(ModelError, match=f"Answering .*{words}"):
        ask(Answering(draft), 3, SamplingParams(1.0), SeededRandom(0), 24)
    with pytest.raises(ModelError, match=words): decode(tiny(), Answering(draft), [1, 2, 3], temperature=1.0)


def test_a_right_draft_passes_as_it_is():
    q = torch.full((2, 24), 1 / 24)
    draft = ask(Answering(Draft([0, 23], q)), 2, SamplingParams(1.0), SeededRandom(0), 24)
    assert draft.tokens == [0, 23] and draft.q is q
    assert ask(Answering(Draft([])), 2, SamplingParams(), SeededRandom(0), 24) == Draft([])


def test_likeliest_tokens_are_certain_where_they_were_asked_for():
    "A one-hot q at temperature 0 says no more than the tokens do; above, and where it isn't one-hot, it is kept."
    one_hot, other = torch.eye(24)[[3, 5]], torch.full((2, 24), 1 / 24)
    def q_of(q, temperature):
        return ask(Answering(Draft([3, 5], q)), 2, SamplingParams(temperature), SeededRandom(0), 24).q
    assert q_of(one_hot, 0) is None
    assert q_of(one_hot, 1.0) is one_hot and q_of(other, 0) is other and q_of(other, 1.0) is other


def test_the_beginning_of_a_chain_and_of_its_q():
    q = torch.rand(3, 24)
    short = Draft([3, 5, 7], q).up_to(2)
    assert short.tokens == [3, 5] and torch.equal(short.q, q[:2]) and short.parents is None
    assert Draft([3, 5, 7]).up_to(1) == Draft([3])


def test_a_drafter_that_need_not_draft_is_not_asked():
    assert ask(Answering("nonsense"), 0, SamplingParams(), SeededRandom(0), 24) == Draft([])


@pytest.mark.parametrize("form", [torch.tensor, np.array, lambda tokens: list(torch.tensor(tokens))],
                         ids=["tensor", "array", "list of tensors"])
def test_tokens_in_any_form_end_a_text(form):
    expected = decode(tiny(), NoDrafter(), [1, 2, 3])
    end = expected[3].emitted[0]
    draft = Draft(form([r.emitted[0] for r in expected[1:4]]))
    emitted = ids_of(decode(tiny(), Answering(draft), [1, 2, 3], eos_ids={end}))
    assert emitted == ids_of(decode(tiny(), NoDrafter(), [1, 2, 3], eos_ids={end}))
    assert all(type(t) is int for t in emitted)


@pytest.mark.parametrize("given", [None, 5, NGramDrafter()], ids=["nothing", "a number", "a drafter"])
def test_what_start_gives_must_be_a_state(given):
    class Stateless(NoDrafter):
        def start(self, *told): return given
    with pytest.raises(ModelError, match="Stateless.start gave .*expected the state of a sequence"):
        decode(tiny(), Stateless(), [1, 2, 3])


def test_errors_of_a_drafter_reach_the_caller():
    class Angry(NoDrafter):
        def propose(self, K, sampling, rng): raise ZeroDivisionError("mine")
    with pytest.raises(ZeroDivisionError, match="mine"): decode(tiny(), Angry(), [1])


# N-gram lookup against a slow search

@pytest.mark.parametrize("longest", [0, -1, 1.5, "3", None, True, np.bool_(True)])
def test_the_longest_ending_is_checked(longest):
    with pytest.raises(InputError, match="whole number of at least 1"): NGramDrafter(longest)
    assert NGramDrafter().longest == 3 == NGramDrafter(np.int64(3)).longest


def slow_lookup(tokens, K, longest):
    "What came after the newest of the earlier places where the longest ending stood."
    for n in range(min(longest, len(tokens)), 0, -1):
        for start in range(len(tokens) - 1, n - 1, -1):
            if tokens[start - n:start] == tokens[-n:]: return tokens[start:start + K]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=25), st.integers(1, 6), st.integers(1, 4), st.integers(0, 24))
def test_ngram_lookup_equals_a_slow_search(tokens, K, longest, split):
    split = max(split, 1)
    state = NGramDrafter(longest).start(tokens[:split], None, 100)
    if tokens[split:]: state.commit(tokens[split:], None)
    assert state.propose(K, SamplingParams(), SeededRandom(0)) == Draft(slow_lookup(tokens, K, longest))


@pytest.mark.parametrize("form", [tuple, np.array, torch.tensor], ids=["tuple", "array", "tensor"])
def test_prompts_in_any_form_draft_alike(form):
    prompt = [1, 2, 3, 1, 2]
    expected = decode(tiny(), NGramDrafter(), prompt, K=3)
    assert decode(tiny(), NGramDrafter(), form(prompt), K=np.int64(3)) == expected


# A model as the drafter

def test_a_model_says_what_uncached_sampling_says():
    draft, text, K = tiny(noise=0.05), [1, 2, 3, 4], 4
    drafter, sampling, rng = ModelDrafter(draft, 24), SamplingParams(1.0), SeededRandom(6)
    said, rows = [], []
    for _ in range(K):
        ids = torch.tensor([[*text, *said]])
        rows.append(sampling.probs(draft.forward(ids, draft.new_cache(ids.shape[1]))[0, -1]))
        said.append(rng.categorical(rows[-1]))
    guess = drafter.start(text, None, 20).propose(K, sampling, SeededRandom(6))
    assert guess.tokens == said and torch.allclose(guess.q, torch.stack(rows), atol=1e-5)


def test_draft_distributions_after_any_round_equal_uncached_ones():
    target, draft = tiny(), tiny(noise=0.05)
    class Checked(ModelState):
        def propose(self, K, sampling, rng):
            guess = super().propose(K, sampling, rng)
            text = [*self.tokens, *guess.tokens]
            p = sampling.probs(draft.forward(torch.tensor([text]), draft.new_cache(len(text)))[0])
            assert torch.allclose(guess.q, p[len(self.tokens) - 1:-1], atol=1e-5)
            checked.append(len(guess.tokens))
            return guess
    class Checking(ModelDrafter): State = Checked
    checked = []
    decode(target, Checking(draft, 24), [1, 2, 3], 1.0, 4, 40)
    assert sum(checked) > 20


@pytest.mark.parametrize("guessed", [1, 2, 4])
def test_a_draft_stops_at_the_end_of_the_text_and_keeps_it(guessed):
    def proposed(eos_ids):
        state = ModelDrafter(tiny(noise=0.05), 24).start([1, 2, 3, 4], None, 40, eos_ids)
        return state.propose(6, SamplingParams(1.0), SeededRandom(6))
    whole = proposed(frozenset())
    end = whole.tokens[guessed - 1]
    n = whole.tokens.index(end) + 1
    draft = proposed({end})
    assert draft.tokens == whole.tokens[:n] and torch.equal(draft.q, whole.q[:n]) and n < len(whole.tokens) == 6


@pytest.mark.parametrize("length, given", [(8, 5), (10, 3), (12, 1), (13, 0), (20, 0)])
def test_a_draft_with_a_short_context_fills_it_to_the_last_place(length, given):
    "The last token of a draft needs no place in the draft's own cache, since nothing is drafted after it."
    drafter = ModelDrafter(tiny(noise=0.05, context=12), 24)
    state = drafter.start([1 + i % 20 for i in range(length)], None, 40)
    draft = state.propose(6, SamplingParams(), SeededRandom(0))
    assert len(draft.tokens) == given and (draft.q is None if given == 0 else draft.q.shape == (given, 24))


@pytest.mark.parametrize("width", [18, 24, 40], ids=["narrower", "as wide", "wider"])
def test_padded_vocabularies(width):
    target = tiny()
    drafter = ModelDrafter(tiny(vocab=width, seed=3), 24)
    said = ids_of(decode(target, drafter, [1, 23, 3], K=3, max_new_tokens=30))
    assert said == greedy(target, [1, 23, 3], 30)
    draft = drafter.start([1, 23, 3], None, 40).propose(3, SamplingParams(1.0), SeededRandom(0))
    assert draft.q.shape == (3, 24) and not draft.q[:, width:].any()
    assert torch.allclose(draft.q.sum(-1), torch.ones(3))
    decode(target, drafter, [1, 23, 3], 1.0, K=3, max_new_tokens=30)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_broken_logits_of_a_draft_name_the_step(value):
    with pytest.raises(NumericalError, match="The draft, after 4 tokens"):
        decode(tiny(), ModelDrafter(Failing(tiny(), 4, value), 24), [1, 2, 3])


# What the loop takes from a verify rule

@pytest.mark.parametrize("answer", [
    None, 2, "ab", (), (1,), (1, 2, 3), (3, 5), (-1, 5), (0, 24), (0, -1), (0.5, 5), (True, 5), (0, 5.0), (0, None),
], ids=repr)
def test_a_verdict_that_is_none(answer):
    def theirs(p, q, tokens, rng): return answer
    with pytest.raises(ModelError, match="The verify rule theirs returned .*2 draft tokens.* 0…23"):
        apply_rule(theirs, torch.full((3, 24), 1 / 24), None, [1, 2], SeededRandom(0))


@pytest.mark.parametrize(
    "answer", [(2, 23), [0, 0], np.array([1, 5]), torch.tensor([1, 5]), (torch.tensor([1]), 5)], ids=repr
)
def test_a_verdict_becomes_plain_numbers(answer):
    given = []
    def theirs(*arguments):
        given.extend(arguments)
        return answer
    p, q, tokens, rng = torch.full((3, 24), 1 / 24), torch.full((2, 24), 1 / 24), [1, 2], SeededRandom(0)
    found = apply_rule(theirs, p, q, tokens, rng)
    assert found == tuple(int(n) for n in answer) and {type(n) for n in found} == {int}
    assert all(a is b for a, b in zip(given, (p, q, tokens, rng)))


# What a state may propose: trees

class Proposes:
    "A state that proposes what it was given."
    def __init__(self, draft): self.draft = draft
    def propose(self, K, sampling, rng): return self.draft
    def commit(self, tokens, features): pass


def proposed(draft, branches):
    return ask(Proposes(draft), 4, SamplingParams(), SeededRandom(0), 8, branches)


def test_a_tree_needs_a_drafter_that_says_how_large_it_is_and_tokens_that_are_certain():
    tree, chain, q = [-1, -1, 0], [-1, 0, 1], torch.eye(8)[:3]
    assert proposed(Draft([1, 2, 3], None, tree), branches=True).parents == tree
    assert proposed(Draft([1, 2, 3], q, chain), branches=False).tokens == [1, 2, 3]
    for no_tree in ([-1, 0], [-1, 0, 1, 2], [-1, 1, 0], [-2, 0, 1]):  # too few, too many, before its parent, nowhere
        with pytest.raises(ModelError, match="expected 3 numbers"): proposed(Draft([1, 2, 3], None, no_tree), True)
    with pytest.raises(ModelError, match=r"no `max_nodes\(K\)`"): proposed(Draft([1, 2, 3], None, tree), False)
    with pytest.raises(ModelError, match="drawn from q"): proposed(Draft([1, 2, 3], q, tree), branches=True)


def test_a_q_of_another_shape_is_named_with_the_one_that_was_expected():
    with pytest.raises(ModelError, match=r"q of shape \(2, 8\) for 3 tokens: expected \(3, 8\)"):
        proposed(Draft([1, 2, 3], torch.eye(8)[:2]), branches=False)


def test_a_child_in_a_chain_is_the_next_token():
    draft = Draft([5, 6, 5])
    assert [draft.child(-1, 5), draft.child(0, 6), draft.child(1, 5)] == [0, 1, 2]
    assert [draft.child(-1, 6), draft.child(0, 5), draft.child(2, 5)] == [None] * 3


@pytest.mark.parametrize("has", ["propose", "commit"])
def test_half_a_state_is_none(has):
    half = type("Half", (), {has: lambda self, *given: None})()
    with pytest.raises(ModelError, match="expected the state of a sequence"): check_state(half, NoDrafter())


def test_nothing_has_a_form_on_the_device():
    form, sequence = NoDrafter().on_device(None, 3, 9), DeviceSequence(torch.arange(9), torch.tensor([4]))
    draft = form.propose(sequence, 3, SamplingParams(), None)
    assert isinstance(form, NothingOnDevice) and len(draft.tokens) == 3 and draft.count.tolist() == [0]
