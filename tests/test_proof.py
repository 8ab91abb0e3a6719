"""The machinery of the executed proof: laws computed by hand, merging against no merging, and decoders that are broken
on purpose.

The proof itself, of the rule and of the loop in all sizes, runs here as well."""
import random
from collections import deque
from fractions import Fraction
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from specdec.drafters.base import Draft, NoDrafter
from specdec.drafters.lookup import NGramDrafter
from specdec.drafters.model import ModelDrafter, ModelState
from specdec.engine.batch import speculate_batch
from specdec.errors import InputError
from specdec.loop import speculate
from specdec.lossless.candidates import draw_distinct, draw_independent, recursive_rejection, take_likeliest
from specdec.lossless.enumerate import exact_distribution
from specdec.lossless.proof import (
    SIZES,
    AsIs,
    Branches,
    ExactDecoder,
    ExactModel,
    ExactRows,
    Language,
    Pages,
    Proven,
    Sure,
    _text_of,
    completed,
    distance,
    distribution_of_rounds,
    language_pairs,
    loop_error,
    memory_of,
    one_round,
    prove_batches,
    prove_candidates,
    prove_loop,
    prove_rule,
    prove_trees,
    round_error,
    sampled,
    sure,
    target_distribution,
)
from specdec.models.batch import keep_rows, read_tree
from specdec.result import Round
from specdec.sampling import SamplingParams, SeededRandom
from specdec.verify import residual, speculative_sampling

HALF = Fraction(1, 2)


def constant(*weights): return lambda text: np.array([Fraction(w) for w in weights], dtype=object)


# --- Laws by hand -----------------------------------------------------------------------------------------------------

def test_distributions_of_small_programs_by_hand():
    assert exact_distribution(lambda s: s.bernoulli(Fraction(1, 3))) == {True: Fraction(1, 3), False: Fraction(2, 3)}
    assert exact_distribution(lambda s: s.categorical([1, 2, 0]) + s.categorical([1, 1])) == {
        0: Fraction(1, 6), 1: HALF, 2: Fraction(1, 3),
    }
    until_tails = exact_distribution(lambda s: next((n for n in range(3) if s.bernoulli(HALF)), 3))
    assert until_tails == {0: HALF, 1: HALF ** 2, 2: HALF ** 3, 3: HALF ** 3}


def test_one_round_by_hand():
    "p = (3/4, 1/4), q = (1/2, 1/2): token 1 is rejected half the time, and then it becomes 0."
    distribution = exact_distribution(lambda s: one_round(speculative_sampling, constant("3/4", "1/4"),
                                                          constant(HALF, HALF), 1, s))
    assert distribution == {
        (0,): Fraction(1, 4), (0, 0): Fraction(3, 8), (0, 1): Fraction(1, 8), (1, 0): Fraction(3, 16),
        (1, 1): Fraction(1, 16),
    }
    assert completed(distribution, constant("3/4", "1/4"), 1) == {(0,): Fraction(3, 4), (1,): Fraction(1, 4)}
    sure_distribution = exact_distribution(
        lambda s: one_round(speculative_sampling, constant("3/4", "1/4"), constant("1/4", "3/4"), 1, s, sure)
    )
    assert sure_distribution == {(0,): Fraction(3, 4), (1, 0): Fraction(3, 16), (1, 1): Fraction(1, 16)}


def test_no_draft_is_a_plain_step():
    p = Language(3, "p")
    for draft in (sampled, sure):
        assert exact_distribution(lambda s: one_round(speculative_sampling, p, p, 0, s,
                                                      draft)) == target_distribution(p, 1)


def test_target_distribution_by_hand():
    p = constant("1/4", "3/4")
    assert target_distribution(p, 2) == {
        (0, 0): Fraction(1, 16), (0, 1): Fraction(3, 16), (1, 0): Fraction(3, 16), (1, 1): Fraction(9, 16),
    }
    assert target_distribution(p, 3, frozenset({1})) == {
        (1,): Fraction(3, 4), (0, 1): Fraction(3, 16), (0, 0, 1): Fraction(3, 64), (0, 0, 0): Fraction(1, 64),
    }
    assert target_distribution(constant(0, 1), 3) == {(1, 1, 1): 1} and target_distribution(p, 0) == {(): 1}


some_languages = st.builds(Language, st.integers(2, 4), st.integers(0, 10 ** 6), halves=st.booleans())


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(some_languages, st.integers(0, 4))
def test_target_distribution_is_a_distribution_and_completing_is_consistent(p, length):
    distribution = target_distribution(p, length)
    assert sum(distribution.values()) == 1 and min(distribution.values()) > 0 and {len(text)
                                                                                   for text in distribution} == {length}
    assert sum(target_distribution(p, length, frozenset({0})).values()) == 1
    assert completed(distribution, p, length) == distribution      # full texts stay as they are
    assert completed(distribution, p, length + 1) == target_distribution(p, length + 1)
    assert completed(target_distribution(p, length + 1), p, length) == distribution  # longer ones are cut
    assert distance(distribution, distribution) == 0


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(
    st.integers(1, 5).flatmap(
        lambda n: st.tuples(*[st.lists(st.integers(0, 9), min_size=n, max_size=n).filter(any)] * 2)
    )
)
def test_distance_is_the_largest_gap_of_an_event(pair):
    a, b = ({(i,): Fraction(w, sum(row)) for i, w in enumerate(row) if w} for row in pair)
    outcomes = sorted(a.keys() | b.keys())
    gaps = [
        sum(a.get(x, 0) - b.get(x, 0) for x, chosen in zip(outcomes, event) if chosen)
        for event in product([0, 1], repeat=len(outcomes))
    ]
    assert distance(a, b) == distance(b, a) == max(gaps)


# --- Languages --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("V", [1, 2, 4, 7])
def test_languages_are_distributions_with_denominators_that_floats_hold(V, halves):
    language = Language(V, "test", halves=halves)
    rows = [language(text) for n in range(4) for text in product(range(min(V, 3)), repeat=n)]
    for row in rows:
        assert sum(row) == 1 and min(row) >= 0 and len(row) == V
        assert all(w.denominator & (w.denominator - 1) == 0 for w in row)
        if halves: assert all(w.numerator <= 1 for w in row)
    again = Language(V, "test", halves=halves)
    # in another order
    assert [list(again(text)) for text in [(1, 1), (), (0,)]] == [list(language(text)) for text in [(1, 1), (), (0,)]]
    if V > 2: assert any(0 in row for row in rows) and any(0 not in row for row in rows)


def test_languages_look_at_the_whole_text():
    rows = {tuple(Language(4, 0)((first, 1, 2, 3))) for first in range(4)}
    assert len(rows) > 1


def test_language_pairs_are_what_they_say():
    for V in (2, 3, 4):
        pairs = {case: (p, q) for case, p, q in language_pairs(V, 5, halves=True)}
        for text in [(), (0,), (1, 0)]:
            def rows(case): return [language(text) for language in pairs[case]]
            assert list(rows("p = q")[0]) == list(rows("p = q")[1])
            assert not (rows("nothing in common")[0] * rows("nothing in common")[1]).any()
            assert rows("smaller draft vocabulary")[1][V - 1] == 0
        assert any(
            list(p(text)) != list(q(text)) for p, q in [pairs["p and q differ"]] for text in [(), (0,), (1,), (0, 1)]
        )


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Language(2, tokens=[2]), "at least one"), (lambda: Language(2, tokens=[]), "at least one"),
        (lambda: Language(4, tokens=[0, 0, 1]), "once"), (lambda: distribution_of_rounds(None, 0), "length"),
        (lambda: Language(17), "sixteenths"), (lambda: Language(3, most=0), "sixteenths"),
        (lambda: list(language_pairs(1)), "at least 2"),
    ],
)
def test_sizes_that_do_not_fit_are_errors(make, words):
    with pytest.raises(InputError, match=words): make()


# --- The exact model --------------------------------------------------------------------------------------------------

def test_exact_model_gives_the_row_of_what_its_cache_holds():
    language = Language(4, 3)
    model = ExactModel(language, 4)
    cache = model.new_cache(9)
    rows = model.forward(torch.tensor([[0, 3, 1]]), cache)
    assert rows.shape == (1, 3, 4) and rows[0].tolist() == [
        [float(w) for w in language(text)] for text in [(), (3,), (3, 1)]
    ]
    cache.rollback(2)
    assert model.forward(torch.tensor([[2, 2]]), cache, last=1)[0].tolist() == [[float(w) for w in language((3, 2, 2))]]
    assert cache.length == 4 and model.caches == [cache]


def test_exact_model_refuses_what_it_cannot_do_exactly():
    model = ExactModel(constant("1/3", "2/3"), 2)
    with pytest.raises(InputError, match="without rounding"): model.forward(torch.tensor([[0]]), model.new_cache(3))
    with pytest.raises(InputError, match="no layers"):
        model.forward(torch.tensor([[0]]), model.new_cache(3), layers=(1,))


def test_rounding_is_an_error_that_the_walk_sees():
    "p/q with q = 3/16 has no end in binary; with a power of two it is exact."
    def on_tensors(p, q, tokens, rng):
        return speculative_sampling(
            torch.tensor(p.astype(float)).float(), torch.tensor(q.astype(float)).float(), tokens, rng
        )

    p = constant("1/16", "15/16")
    assert 0 < round_error(on_tensors, p, constant("3/16", "13/16"), 1, 2, "").error < 1e-7
    assert round_error(on_tensors, p, constant(HALF, HALF), 1, 2, "").error == 0


# --- Memory and merging -----------------------------------------------------------------------------------------------

def test_memory_tells_states_apart():
    p, q = Language(2, "p"), Language(2, "q")
    def state(tokens=(), drafted=(), seen=()):
        target, drafter = ExactModel(p, 2), ModelDrafter(ExactModel(q, 2), 2).start([0, 1], None, 9)
        target.new_cache(9).tokens += tokens
        drafter.cache.tokens += drafted
        drafter.features = torch.tensor(seen)
        return memory_of(target), memory_of(drafter)
    assert state() == state() and hash(state()) == hash(state())
    assert state((0, 1), (0,), (1.,)) == state((0, 1), (0,), (1.,))
    assert (
        len({
            state(), state((0,)), state((1,)), state((0, 1)), state((), (0,)), state((), (1,)), state((), (), (1.0,)),
            state((), (), (2.0,)), state((), (), ((1.0,),)),
        })
        == 9
    )


class Slotted:
    __slots__ = ("value",)

class Named(list):
    def __init__(self, name): self.name = name


def test_memory_never_takes_different_things_for_equal():
    "What it can't look into equals nothing else; that costs merging, not correctness."
    things = [
        1, "1", (1,), [1], {1: 1}, {1: 2}, {1}, np.array([1]), np.array([[1]]), torch.ones(1), torch.ones(1, 1),
        torch.ones(1, dtype=torch.float64), Pages(1), Pages(2), Slotted(), Slotted(), torch.Generator(),
        torch.Generator(), iter([1]), len, lambda: 1, lambda: 1, {2}, deque([1]), deque([2]), random.Random(1),
        random.Random(2), partial(max, 1), partial(max, 2), Pages(1).rollback, Pages(1).rollback, Named("a"),
        Named("b"), Language(2), Language(2), ExactModel(Language(2), 2), None,
    ]
    for i, a in enumerate(things):
        for b in things[:i]:
            assert memory_of(a) != memory_of(b) and hash(memory_of(a)) is not None, (a, b)
    assert memory_of({"a": 1, "b": [2]}) == memory_of({"b": [2], "a": 1})
    assert memory_of(NGramDrafter()) == memory_of(NGramDrafter())


def starting(p, q, V, K, limit=30, model=ExactModel, drafter=None, remembers=True, loop=speculate, eos_ids=frozenset()):
    def start(rng):
        target, drafting = model(p, V), drafter() if drafter else ModelDrafter(ExactModel(q, V), V)
        rounds = loop(target, drafting, [0], AsIs(), rng, K, limit, eos_ids)
        return rounds, lambda: (memory_of(target), memory_of(drafting)) if remembers else None
    return start


def plain_distribution(start, length):
    "The law of the whole loop, every path by itself, without the machinery."
    def program(rng):
        rounds, _ = start(rng)
        text = []
        for r in rounds:
            text += r.emitted
            if len(text) >= length: break
        return tuple(text[:length])
    return exact_distribution(program)


@pytest.mark.parametrize("K, V, length", [(1, 2, 5), (2, 2, 5), (3, 2, 4), (1, 3, 4), (2, 3, 3)])
@pytest.mark.parametrize("kind", ["sampled", "sure", "n-gram"])
def test_merging_changes_nothing(kind, K, V, length):
    for _case, p, q in language_pairs(V, "merge", halves=True):
        drafter = {"sampled": None, "sure": lambda: Sure(q), "n-gram": NGramDrafter}[kind]
        for options in ({}, {"limit": 3}, {"eos_ids": frozenset({1})}):
            start = starting(p, q, V, K, drafter=drafter, **options)
            expected = plain_distribution(start, length)
            assert sum(expected.values()) == 1
            assert distribution_of_rounds(start, length) == distribution_of_rounds(start, length,
                                                                                   merge=False) == expected


class KeepsOne(ExactModel):
    "Rolls back one token too little."
    class Pages(Pages):
        def rollback(self, length): super().rollback(length + 1)
    def new_cache(self, capacity):
        self.caches.append(self.Pages(capacity))
        return self.caches[-1]


class DropsOne(KeepsOne):
    "Rolls back one token too much."
    class Pages(Pages):
        def rollback(self, length): super().rollback(length - 1)


class KeepsAll(KeepsOne):
    "Never rolls back."
    class Pages(Pages):
        def rollback(self, length): pass


class KeepsFirstRejection(KeepsOne):
    "Keeps the rejected token of every second rollback."
    class Pages(Pages):
        times = 0
        def rollback(self, length):
            self.times += 1
            super().rollback(length + self.times % 2)


@pytest.mark.parametrize("model", [KeepsOne, DropsOne, KeepsAll, KeepsFirstRejection])
def test_merging_keeps_the_distribution_of_broken_caches(model):
    for seed in range(8):
        start = starting(Language(2, f"p{seed}"), Language(2, f"q{seed}", halves=True), 2, 1, model=model)
        assert distribution_of_rounds(start, 4) == plain_distribution(start, 4)


def test_merging_by_text_alone_would_hide_a_broken_cache():
    p, q = Language(2, "p14"), Language(2, "q14", halves=True)
    def error(remembers):
        return distance(distribution_of_rounds(starting(p, q, 2, 1, model=KeepsOne, remembers=remembers), 4),
                        target_distribution(p, 4))

    assert error(remembers=False) == 0 < error(remembers=True)


def test_randomness_from_elsewhere_and_rounds_without_tokens_are_errors():
    other = SeededRandom(0)
    class Elsewhere(NoDrafter):
        def propose(self, K, sampling, rng): return Draft([other.categorical(torch.ones(3))])
    class Nothing(NoDrafter): pass
    def silent(*arguments):
        yield Round([], 0, [1])
        while True: yield Round([], 0, [])
    p = Language(3, "p")
    with pytest.raises(InputError, match="doesn't come from its .rng"):
        loop_error(speculate, Elsewhere, constant("1/4", "1/2", "1/4"), 2, 3, "")
    with pytest.raises(InputError, match="added no token"): loop_error(silent, Nothing, p, 1, 3, "")


# --- The loop, broken on purpose --------------------------------------------------------------------------------------

P, Q = Language(3, "p12"), Language(3, "q12", halves=True)
K, V = 2, 3
END = frozenset({1})


def drafter(): return ModelDrafter(ExactModel(Q, V), V)


def drops_bonus(*arguments):
    for i, r in enumerate(speculate(*arguments)):
        yield Round(r.drafted, r.accepted, r.emitted[:-1] if i and r.accepted == len(r.drafted) > 0 else r.emitted)


def repeats_bonus(*arguments):
    for i, r in enumerate(speculate(*arguments)):
        yield Round(
            r.drafted, r.accepted, [*r.emitted, r.emitted[-1]] if i and r.accepted == len(r.drafted) > 0 else r.emitted
        )


def reports_drafts(*arguments):
    "Emits a rejected token in place of its replacement."
    for r in speculate(*arguments):
        yield Round(
            r.drafted, r.accepted,
            [*r.drafted[: r.accepted], r.drafted[r.accepted]] if r.accepted < len(r.drafted) else r.emitted,
        )


def runs_on(target, drafter, prompt, sampling, rng, K, limit, eos_ids):
    return speculate(target, drafter, prompt, sampling, rng, K, limit)


def overlooks_end_in_draft(target, drafter, prompt, sampling, rng, K, limit, eos_ids):
    "Ends only where a round ends."
    for r in speculate(target, drafter, prompt, sampling, rng, K, limit):
        yield r
        if r.emitted[-1] in eos_ids: return


def drops_end(*arguments):
    "Leaves the end-of-sequence token out of the text."
    for r in speculate(*arguments):
        if emitted := [token for token in r.emitted if token not in arguments[-1]]:
            yield Round(r.drafted, r.accepted, emitted)


def one_more(target, drafter, prompt, sampling, rng, K, limit, eos_ids):
    return speculate(target, drafter, prompt, sampling, rng, K, limit + 1, eos_ids)


def one_less(target, drafter, prompt, sampling, rng, K, limit, eos_ids):
    return speculate(target, drafter, prompt, sampling, rng, K, limit - 1, eos_ids)


def with_rule(verify):

    def loop(target, drafter, prompt, sampling, rng, K, limit, eos_ids):
        return speculate(target, drafter, prompt, sampling, rng, K, limit, eos_ids, verify)

    return loop


def from_p(p, q, tokens, rng):
    num_accepted, next_token = speculative_sampling(p, q, tokens, rng)
    return num_accepted, rng.categorical(p[num_accepted]) if num_accepted < len(tokens) else next_token


def first_only(p, q, tokens, rng):
    "Believes the second token if the first was right."
    num_accepted, next_token = speculative_sampling(p[:2], None if q is None else q[:1], tokens[:1], rng)
    return (len(tokens), rng.categorical(p[len(tokens)])) if num_accepted else (0, next_token)


def all_of_it(p, q, tokens, rng): return len(tokens), int(p[-1].argmax())


class MisreportsState(ModelState):
    "Draws from q², reports q."
    class Sharpened:
        def __init__(self, rng): self.rng = rng
        def categorical(self, weights): return self.rng.categorical(weights ** 2)
    def propose(self, K, sampling, rng): return super().propose(K, sampling, self.Sharpened(rng))

class Misreports(ModelDrafter): State = MisreportsState


BROKEN = {
    "bonus dropped": dict(loop=drops_bonus),
    "bonus twice": dict(loop=repeats_bonus),
    "rejected token emitted": dict(loop=reports_drafts),
    "runs on after the end": dict(loop=runs_on, eos_ids=END),
    "overlooks the end in a draft": dict(loop=overlooks_end_in_draft, eos_ids=END),
    "drops the end": dict(loop=drops_end, eos_ids=END),
    "one token too many": dict(loop=one_more, max_new_tokens=K + 2),
    "one token too few": dict(loop=one_less, max_new_tokens=K + 2),
    "never more than one": dict(loop=one_less, max_new_tokens=2),
    "resamples from p": dict(loop=with_rule(from_p)),
    "verifies the first only": dict(loop=with_rule(first_only)),
    "greedy, accepts all": dict(loop=with_rule(all_of_it), greedy=True),
    "misreports q": dict(drafter=lambda: Misreports(ExactModel(Q, V), V)),
    "keeps a token": dict(model=KeepsOne),
    "drops a token": dict(model=DropsOne),
    "never rolls back": dict(model=KeepsAll),
    "keeps some": dict(model=KeepsFirstRejection),
    "keeps a token, greedy": dict(model=KeepsOne, greedy=True),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_loops_have_an_error(name):
    options = dict(loop=speculate, drafter=drafter) | BROKEN[name]
    broken = loop_error(p=P, K=K, V=V, case=name, **options)
    assert 0 < broken.error <= 1
    right = loop_error(
        p=P, K=K, V=V, case=name, **{**options, "loop": speculate, "drafter": drafter, "model": ExactModel}
    )
    assert right.error == 0 and right.case == name and right.what == "speculate, ModelDrafter"


def test_greedy_distribution_is_the_likeliest_text():
    "Against a search that knows nothing of laws."
    text = ()
    for _ in range(K + 3): text += (int(P(text).argmax()),)
    def start(rng):
        target, drafting = ExactModel(P, V), drafter()
        return speculate(target, drafting, [0], SamplingParams(), rng, K, 20), lambda: (
            memory_of(target), memory_of(drafting),
        )
    assert distribution_of_rounds(start, K + 3) == {text: 1}


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6), size=st.sampled_from([(1, 2), (1, 3), (2, 2)]), limit=st.sampled_from([None, 1, 2, 3]),
    ends=st.sampled_from([(), (0,), (1,), (0, 1)]), greedy=st.booleans(),
)
def test_any_language_any_end(seed, size, limit, ends, greedy):
    K, V = size
    for case, p, q in language_pairs(V, seed, halves=True):
        for kind in (lambda: ModelDrafter(ExactModel(q, V), V), lambda: Sure(q), NGramDrafter, NoDrafter):
            assert (
                loop_error(
                    speculate, kind, p, K, V, case, max_new_tokens=limit, eos_ids=frozenset(ends), greedy=greedy
                ).error
                == 0
            )


# --- Trees and batches ------------------------------------------------------------------------------------------------

def test_an_exact_decoder_sees_what_masks_positions_and_caches_let_it_see():
    def after(text): return p(tuple(text)).astype(float).tolist()
    p, V = Language(3, "p", halves=True), 3
    for model in (ExactDecoder(p, V), ExactRows(p, V)):
        cache = model.new_cache(20)
        rows = model.forward(torch.tensor([[0, 2, 1]]), cache)
        assert rows[0].tolist() == [after(()), after([2]), after([2, 1])]
        assert model.forward(torch.tensor([[0]]), cache, last=1)[0].tolist() == [after([2, 1, 0])]
        cache.rollback(2)
        assert model.forward(torch.tensor([[1, 1]]), cache)[0].tolist() == [after([2, 1]), after([2, 1, 1])]
        logits, _ = read_tree(model, 0, Draft([1, 2, 2, 0], parents=[-1, -1, 0, 1]), cache)
        known = [2, 1, 1, 0]
        assert logits.tolist() == [after([*known, *way]) for way in ([], [1], [2], [1, 2], [2, 0])]
        keep_rows(cache, 4, [0, 2, 4])
        assert model.forward(torch.tensor([[1]]), cache)[0, 0].tolist() == after([*known, 2, 0, 1])
        with pytest.raises(InputError, match="can't be shown"): model.forward(torch.tensor([[1]]), layers=(0,))


def test_a_text_with_a_gap_or_two_tokens_in_one_place_is_none():
    seen = torch.tensor([[1, 0], [0, 1], [1, 0], [0, 0]], dtype=torch.bool)
    assert _text_of(seen) == (1, 0)
    gap, two = seen.clone(), seen.clone()
    gap[1, 1], two[1, 0] = False, True
    assert _text_of(gap) == ((0, 0), (2, 0)) and _text_of(two) == ((0, 0), (1, 0), (1, 1), (2, 0))


def test_a_drafter_of_trees_takes_the_likeliest_paths():
    weights = {(): (HALF, Fraction(1, 4), Fraction(1, 4)), (0,): (Fraction(1, 8), Fraction(7, 8), 0)}
    drafter = Branches(lambda text: np.array(weights.get(text, (1, 0, 0)), dtype=object))
    state = drafter.start([0], None, 9)
    tree = state.propose(3, AsIs(), None)  # 1/2, then 1/2 · 7/8, then 1/2 · 7/8 · 1
    assert (tree.tokens, tree.parents) == ([0, 1, 0], [-1, 0, 1])
    state.commit([0, 1], None)
    assert state.propose(1, AsIs(), None).tokens == [0]


def test_trees_are_proven():
    "The walk has seen trees that fail at once, and others later; and a path of three."
    seen = set()
    def watched(*arguments):
        for i, r in enumerate(speculate(*arguments)):
            if i: seen.add((arguments[5], r.accepted, len(r.drafted) - r.accepted))
            yield r
    lines = list(prove_trees(watched, sizes=[(3, 3), (5, 2)]))
    assert {line.error for line in lines} == {0} and len(lines) > 20
    assert {"the end inside", "the limit inside a round", "p = q, greedy"} <= {line.case for line in lines}
    assert {(3, n, failed) for n in (0, 1) for failed in (0, 1)} <= seen and any(n >= 3 for _, n, _ in seen)


def test_batches_are_proven():
    "Texts share a forward, and one joins when another has left."
    shared = []
    def watched(target, texts, size):
        order = []
        for i, r in speculate_batch(target, texts, size):
            order.append(i)
            yield i, r
        shared.append(order)
    assert {line.error for line in prove_batches(watched, ModelDrafter, sizes=[(2, 2)])} == {0}
    assert any(order[:2] == [0, 1] and 1 in order[order.index(2):] for order in shared)


class PassesOneTooMany:
    "A loop that takes the first guess that wasn't right for right."
    def __call__(self, *arguments):
        for r in speculate(*arguments):
            wrong = r.drafted[r.accepted:][:1]
            yield Round(r.drafted, r.accepted, [*r.emitted[:r.accepted], *wrong] if wrong else r.emitted)


def swapped(target, texts, size):
    "Tells the rounds of one text as another's."
    for i, r in speculate_batch(target, texts, size): yield {0: 1, 1: 0}.get(i, i), r


def one_source_for_all(target, texts, size):
    "A batch in which every text is drawn by the same numbers as the first: the second repeats what the first says."
    for i, r in speculate_batch(target, texts, size):
        if i == 0: said = r
        yield i, said if i == 1 else r


def test_wrong_trees_and_batches_are_not_proven():
    assert any(line.error for line in prove_trees(PassesOneTooMany(), sizes=[(2, 3)]))
    for wrong in (swapped, one_source_for_all):
        assert any(line.error for line in prove_batches(wrong, ModelDrafter, sizes=[(1, 2)]))


# --- The proof --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("K, V", SIZES)
def test_the_rule_is_proven(K, V):
    lines = list(prove_rule(speculative_sampling, seeds=4, sizes=[(K, V)]))
    assert len(lines) == 4 * 4 * 2 and {(line.what, line.K, line.V, line.error) for line in lines} == {
        ("speculative_sampling", K, V, 0)
    }


@pytest.mark.parametrize("draw", [draw_independent, draw_distinct, take_likeliest])
def test_candidates_are_proven(draw):
    lines = list(prove_candidates(recursive_rejection, draw, seeds=1))
    assert {line.error for line in lines} == {0} and {(line.K, line.V) for line in lines} == {*SIZES}
    assert len(lines) == 4 * len(SIZES) and {line.what for line in lines} == {"recursive_rejection"}
    assert {line.case for line in lines} == {f"{case}, {draw.__name__}" for case, *_ in language_pairs(2)}


def test_wrong_verdicts_on_candidates_are_not_proven():
    "A law that is wrong, and a right one with the wrong branch."
    def again(p, q, tokens, rng):
        which, token = recursive_rejection(p, q, tokens, rng)
        return which, rng.categorical(p) if which == len(tokens) else token
    def another(p, q, tokens, rng):
        which, token = recursive_rejection(p, q, tokens, rng)
        return (which + 1) % len(tokens) if which < len(tokens) else which, token
    for wrong in (again, another):
        assert any(line.error for line in prove_candidates(wrong, draw_distinct, seeds=1, sizes=[(2, 3)]))


def epsilon(p, q, tokens, rng):
    "The least that a rule can be wrong by: 1e-9 in the residual."
    for i, token in enumerate(tokens):
        if not rng.bernoulli(min(p[i][token] / (1 if q is None else q[i][token]), 1)):
            return i, rng.categorical(
                (residual(p[i], q[i]) if q is not None else p[i] * [j != token for j in range(len(p[i]))])
                + Fraction(1, 10**9)
            )
    return len(tokens), rng.categorical(p[len(tokens)])


@pytest.mark.parametrize("wrong", [from_p, epsilon])
def test_wrong_rules_are_not_proven(wrong):
    lines = list(prove_rule(wrong, seeds=2, sizes=[(1, 2), (2, 3)]))
    assert any(line.error for line in lines) and all(isinstance(line, Proven) for line in lines)


@pytest.mark.parametrize("K, V", SIZES)
def test_the_loop_is_proven(K, V):
    "Also: the walk has seen a rejection at every position, full acceptance, and a round after that."
    seen = set()
    def watched(*arguments):
        count = 0
        for r in speculate(*arguments):
            count += len(r.emitted)
            seen.add((len(r.drafted), r.accepted, count < K + 3))
            yield r
    lines = list(prove_loop(watched, ModelDrafter, NGramDrafter, sizes=[(K, V)]))
    assert {line.error for line in lines} == {0}
    cases = " | ".join(line.case for line in lines)
    for kind in (
        "greedy", "sure drafts", "n-gram drafts", "p = q", "nothing in common", "smaller draft vocabulary",
        "the end inside", "the limit inside a round",
    ):
        assert kind in cases
    assert (K, K, True) in seen
    assert {(K, accepted) for accepted in range(K)} <= {(drafted, accepted) for drafted, accepted, _ in seen}


def test_a_broken_loop_is_not_proven():
    assert any(line.error for line in prove_loop(drops_bonus, ModelDrafter, NGramDrafter, sizes=[(1, 2)]))
    assert any(line.error for line in prove_loop(runs_on, ModelDrafter, NGramDrafter, sizes=[(1, 2)]))
    assert any(line.error for line in prove_loop(one_more, ModelDrafter, NGramDrafter, sizes=[(1, 2)]))
