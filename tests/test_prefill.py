"""A prompt read once and continued: the very rounds that it has without, whatever drafts, whoever else continues it;
what is read then, and what can't be continued."""
import copy
from itertools import zip_longest
from tempfile import TemporaryDirectory

import pytest
import torch

from families import STATES, random_model
from helpers import CPU, greedy, ids_of, tiny
from helpers_drafters import Noting, random_head, random_target
from helpers_text import talker
from specdec.cache import CacheFullError
from specdec.drafters.adaptive import AdaptiveDrafter, AdaptiveLookahead
from specdec.drafters.base import BLOCK, DraftPrefix, NoDrafter
from specdec.drafters.choose import HybridDrafter
from specdec.drafters.colder import TemperatureScaledDrafter
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.lookup import NGramDrafter, SuffixDrafter
from specdec.drafters.model import ModelDrafter, quantised
from specdec.drafters.tree import TreeDrafter
from specdec.engine.batch import speculate_batch
from specdec.engine.constraints import GrammarLM
from specdec.engine.logprobs import WatchedLM
from specdec.engine.prefix import prefill, score
from specdec.engine.profiling import PhaseTimer
from specdec.engine.request import Request
from specdec.errors import InputError
from specdec.loop import serve, speculate
from specdec.models.linear import can_be_batch_invariant
from specdec.models.transformers import TransformersLM
from specdec.pair import Pair
from specdec.sampling import SamplingParams, SeededRandom

exact_rows = pytest.mark.skipif(not can_be_batch_invariant(CPU, torch.float32),
                                reason="rows depend on their number here")
V = 40
TARGET = tiny(vocab=V, hidden=32, layers=4, context=512)
HEAD = random_head(TARGET, torch.tensor([0, 3, 4, 9, 10, 15, 20, 23]))
DRAFTERS = {
    "nothing": NoDrafter(), "lookup": NGramDrafter(), "model": ModelDrafter(TARGET.skip([1]), V),
    "head": HeadDrafter(HEAD, TARGET),
    "hybrid": HybridDrafter(SuffixDrafter(), HeadDrafter(HEAD, TARGET)),
}
LONG = torch.randint(V, (400,), generator=torch.Generator().manual_seed(0)).tolist()
OLD = LONG[:300]  # what is prefilled
PROMPTS = {
    "the same": OLD, "one more": LONG[:301], "going on": LONG, "its beginning": LONG[:290], "two blocks": LONG[:256],
    "parted inside": [*LONG[:200], (LONG[200] + 1) % V, *LONG[:150]], "parted early": [*LONG[:5], (LONG[5] + 1) % V],
}
REUSED = {"the same": 300, "one more": 256, "going on": 256, "its beginning": 256, "two blocks": 128,
          "parted inside": 128, "parted early": 0}


def decoded(prompt, drafter=DRAFTERS["nothing"], temperature=0.0, seed=0, target=TARGET, count=12, **more):
    return speculate(target, drafter, prompt, SamplingParams(temperature), SeededRandom(seed), 4, count, **more)


class Counting:
    "A target that notes how many tokens each of its forwards reads."
    def __init__(self, monkeypatch, target=TARGET):
        self.sizes, real = [], type(target).compute
        def compute(model, ids, *rest):
            self.sizes.append(ids.shape[1])
            return real(model, ids, *rest)
        monkeypatch.setattr(type(target), "compute", compute)


# The same rounds


@exact_rows
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_rounds_are_those_without_it(name, temperature):
    drafter = DRAFTERS[name]
    states = prefill(TARGET, OLD, drafter=drafter), prefill(TARGET, OLD, drafter.layers)
    for prompt in PROMPTS.values():
        alone = list(decoded(prompt, drafter, temperature))
        for state in (*states, states[0]):
            assert list(decoded(prompt, drafter, temperature, prefilled=state)) == alone
    assert any(r.drafted for r in alone) or name == "nothing"


@exact_rows
@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_bit_is_that_without_it(prompt):
    "Logits, keys, values and features; a state of a state too."
    layers, prompt = (4, 0), PROMPTS[prompt]
    alone, again = prefill(TARGET, prompt, layers), prefill(TARGET, prompt, layers, prefill(TARGET, OLD, (4, 0, 2)))
    assert torch.equal(alone.logits, again.logits) and torch.equal(alone.features, again.features)
    assert alone.cache.length == again.cache.length == len(prompt)
    for name in ("keys", "values"):
        for one, other in zip(getattr(alone.cache, name), getattr(again.cache, name), strict=True):
            assert torch.equal(one, other)


@exact_rows
def test_two_streams_in_turns_leave_the_state_as_it_is():
    drafter = DRAFTERS["head"]
    state = prefill(TARGET, OLD, drafter.layers)
    before = [held.clone() for held in state.cache.keys + state.cache.values]
    streams = [decoded(OLD, drafter, 1.0, seed, prefilled=state) for seed in range(2)]
    rounds = [[r for r in one if r] for one in zip(*zip_longest(*streams), strict=True)]
    assert rounds == [list(decoded(OLD, drafter, 1.0, seed)) for seed in range(2)] and rounds[0] != rounds[1]
    assert all(torch.equal(*pair) for pair in zip(before, state.cache.keys + state.cache.values, strict=True))


@exact_rows
def test_a_tree_goes_on_too():
    drafter = TreeDrafter(HEAD, TARGET)
    state = prefill(TARGET, OLD, drafter=drafter)
    assert list(decoded(LONG, drafter, prefilled=state)) == list(decoded(LONG, drafter)) and len(state.drafting) == 1


@pytest.mark.parametrize("name, bound", [("filled", 1e-5), ("transformers", 1e-5), ("bfloat16", 0.05)])
def test_elsewhere_every_shared_token_is_reused_and_the_logits_are_close(name, bound):
    "Where bits depend on how many rows are read, a prompt is read at once, and a state may end anywhere."
    target = copy.copy(TARGET)
    target.batch_invariant = False
    if name == "transformers": target = adapter()
    if name == "bfloat16": target = half()
    alone, state = prefill(target, LONG), prefill(target, OLD)
    again = prefill(target, LONG, prefilled=state)
    assert state.shared_with(LONG, target) == 300 and state.shared_with(LONG[:300], target) == 300
    assert (alone.logits - again.logits).abs().max() < bound * alone.logits.abs().max()
    if name == "bfloat16": return
    assert ids_of(decoded(LONG, target=target, prefilled=state)) == greedy(target, LONG, 12)


def adapter() -> TransformersLM:
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    return TransformersLM(LlamaForCausalLM(LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=512, initializer_range=0.3)))


def half():
    "The target in bfloat16."
    with TemporaryDirectory() as folder:
        return random_target(folder, V, 2, torch.bfloat16, max_position_embeddings=512)


# What is read


@exact_rows
@pytest.mark.parametrize("prompt", PROMPTS)
def test_only_what_is_new_is_read(prompt, monkeypatch):
    state, counted, expected = prefill(TARGET, OLD), Counting(monkeypatch), REUSED[prompt]
    prompt = PROMPTS[prompt]
    request = Request(TARGET, prompt, NoDrafter(), SamplingParams(), SeededRandom(0), max_new_tokens=1, prefilled=state)
    list(serve(TARGET, request, PhaseTimer()))
    assert request.reused == expected == state.shared_with(prompt, TARGET)
    assert sum(counted.sizes) == len(prompt) - expected and max(counted.sizes, default=0) <= BLOCK


@exact_rows
def test_a_list_reads_what_its_prompts_share_once(monkeypatch):
    "And then gives what each gives alone. Prompts that are all the same are read once, whole."
    drafter = DRAFTERS["hybrid"]
    def requests(prompts, **more): return [
        Request(TARGET, prompt, drafter, SamplingParams(float(i % 2)), SeededRandom(i), 4, 8, **more)
        for i, prompt in enumerate(prompts)]
    cases = [([LONG[:300], LONG[:290], [*LONG[:280], 1, 2]], 256, 44 + 34 + 26), ([LONG[:50]] * 3, 50, 0),
             ([LONG[:50], LONG[:60]], 0, 110), ([LONG[:128], LONG[:140]], 0, 268),
             ([LONG[:140], LONG[:150]], 128, 12 + 22)]
    for prompts, shared, others in cases:
        alone = [list(serve(TARGET, request, PhaseTimer())) for request in requests(prompts)]
        asked, found = requests(prompts), {}
        with monkeypatch.context() as patch:
            counted, timer = Counting(patch), PhaseTimer()
            for i, r in speculate_batch(TARGET, asked, 2, timer):
                found.setdefault(i, []).append(r)
            read = sum(size for size in counted.sizes if size > 2 * 5)  # not a step of two
        assert [found[i] for i in range(len(prompts))] == alone
        assert read == shared + others and [request.reused for request in asked] == [shared] * len(prompts)


# What the drafter has read


class NotingHead:
    "Likewise, a head."
    def __init__(self, head): self.head, self.sizes = head, []
    def __getattr__(self, name): return getattr(self.head, name)
    def step(self, tokens, *rest):
        self.sizes.append(len(tokens))
        return self.head.step(tokens, *rest)


def noting(kind, model=None):
    "A drafter, and what notes what its model or its head reads."
    if kind == "head":
        drafter = HeadDrafter(HEAD, TARGET)
        drafter.head = NotingHead(drafter.head)
        return drafter, drafter.head
    note = Noting(model or TARGET.skip([1]))
    return ModelDrafter(note, V), note


WRAPS = {
    "model": lambda inner: inner, "head": lambda inner: inner,
    "a colder model": TemperatureScaledDrafter,
    "a model in a hybrid": lambda inner: HybridDrafter(SuffixDrafter(), inner),
    "a model under a controller": lambda inner: AdaptiveDrafter(inner, AdaptiveLookahead()),
}


def first_draft(drafter, prompt, **more):
    "The rounds as far as the first draft."
    rounds = decoded(prompt, drafter, 1.0, **more)
    return [next(rounds), next(rounds)]


@exact_rows
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kind", ["model", "head"])
def test_the_drafter_reads_what_is_new(kind, prompt):
    "In blocks; a head reads no first token, for it has no feature before it."
    drafter, note = noting(kind)
    state, prompt = prefill(TARGET, OLD, drafter=drafter), PROMPTS[prompt]
    first = int(kind == "head")
    assert note.sizes == [BLOCK - first, BLOCK] and state.drafting[0].cache.length == 2 * BLOCK - first
    shared = next((i for i, pair in enumerate(zip(OLD, prompt)) if pair[0] != pair[1]), min(len(OLD), len(prompt)))
    note.sizes.clear()
    alone = first_draft(drafter, prompt)
    assert sum(note.sizes[:-len(alone[1].drafted) + 1 or None]) == len(prompt) + 1 - first
    whole, note.sizes = note.sizes, []
    assert first_draft(drafter, prompt, prefilled=state) == alone
    blocks = shared // BLOCK
    assert note.sizes == whole[blocks:] and max(whole) <= BLOCK
    assert sum(whole[:blocks]) == max(blocks * BLOCK - first, 0)


@exact_rows
@pytest.mark.parametrize("name", WRAPS)
def test_a_drafter_is_found_in_others(name):
    inner, note = noting("head" if name == "head" else "model")
    drafter = WRAPS[name](inner)
    alone = list(decoded(LONG, drafter, 1.0))
    whole, note.sizes = sum(note.sizes), []
    state = prefill(TARGET, OLD, drafter=drafter)
    kept = sum(note.sizes)
    assert kept == 2 * BLOCK - (name == "head") and len(state.drafting) == 1
    note.sizes.clear()
    assert list(decoded(LONG, drafter, 1.0, prefilled=state)) == alone and whole - sum(note.sizes) == kept
    assert list(decoded(LONG, inner, 1.0, prefilled=state)) == list(decoded(LONG, inner, 1.0))  # the same model inside


@exact_rows
@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_list_lets_its_drafter_read_what_is_shared_once(kind):
    drafter, note = noting(kind)
    def requests(): return [Request(TARGET, [*OLD[:280], i], drafter, SamplingParams(1.0), SeededRandom(i), 4, 8)
                            for i in range(3)]
    alone = [list(serve(TARGET, request, PhaseTimer())) for request in requests()]
    whole, note.sizes, found = sum(note.sizes), [], {}
    for i, r in speculate_batch(TARGET, requests(), 2): found.setdefault(i, []).append(r)
    assert [found[i] for i in range(3)] == alone
    assert whole - sum(note.sizes) == 2 * (2 * BLOCK - (kind == "head"))


@exact_rows
@pytest.mark.parametrize("name", ["bfloat16", "int4", "transformers", "recurrent", "a short context"])
def test_other_drafts_beside_an_exact_target(name):
    "The target's bits are promised, so those of the draft must not depend on what was read before."
    draft = {"bfloat16": half, "int4": lambda: quantised(tiny(vocab=V, hidden=64, layers=2, context=512)),
             "transformers": adapter, "recurrent": recurrent,
             "a short context": lambda: tiny(vocab=V, context=200)}[name]()
    drafter, note = noting("model", draft)
    state = prefill(TARGET, OLD, drafter=drafter)
    kept = BLOCK if name == "a short context" else 2 * BLOCK
    assert sum(note.sizes) == kept
    for prompt in ("going on", "the same", "parted inside", "its beginning"):
        alone = list(decoded(PROMPTS[prompt], drafter, 1.0))
        note.sizes.clear()
        assert list(decoded(PROMPTS[prompt], drafter, 1.0, prefilled=state)) == alone
        assert max(note.sizes, default=0) <= BLOCK and (name == "a short context" or note.sizes)


def recurrent():
    "A draft whose cache can't be cut anywhere."
    return TransformersLM(random_model(STATES["mamba2"]))


@exact_rows
def test_a_second_turn_copies_and_reads_on():
    "What a state of a state holds is what reading it all holds, bit for bit, and what is new is read."
    drafter, note = noting("model")
    first = prefill(TARGET, OLD, drafter=drafter)
    note.sizes.clear()
    second, alone = prefill(TARGET, LONG, (), first, drafter), prefill(TARGET, LONG, drafter=drafter)
    assert note.sizes == [BLOCK] + 3 * [BLOCK]
    for one, other in zip(second.drafting[0].cache.keys, alone.drafting[0].cache.keys, strict=True):
        assert torch.equal(one[:, :, :3 * BLOCK], other[:, :, :3 * BLOCK])


@exact_rows
@pytest.mark.parametrize("kind", ["model", "head"])
def test_what_another_model_has_read_is_left_alone(kind):
    "Of the same shape, so that its cache would fit; also where one drafter has two models."
    drafter, note = noting(kind)
    other = {"model": lambda: ModelDrafter(TARGET.skip([2]), V),
             "head": lambda: HeadDrafter(random_head(TARGET, HEAD.draft_tokens, seed=2), TARGET)}[kind]()
    state = prefill(TARGET, OLD, drafter=other)
    kept, = state.drafting
    alone, whole = list(decoded(LONG, drafter, 1.0)), sum(note.sizes)
    note.sizes.clear()
    assert kept.cache.length >= 2 * BLOCK - 1
    assert list(decoded(LONG, drafter, 1.0, prefilled=state)) == alone and sum(note.sizes) == whole
    both = HybridDrafter(other, drafter)
    known = prefill(TARGET, OLD, drafter=both)
    assert [prefix.model for prefix in known.drafting] == [kept.model, note]
    note.sizes.clear()
    assert list(decoded(LONG, drafter, 1.0, prefilled=known)) == alone
    assert sum(note.sizes) == whole - known.drafting[1].cache.length


@exact_rows
@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_copy_of_another_text_would_be_seen(kind, monkeypatch):
    "The negative control: what the rounds are, if more is copied than is shared."
    drafter = DRAFTERS[kind]
    state, prompt = prefill(TARGET, OLD, drafter=drafter), PROMPTS["parted inside"]
    def rounds(**more): return [list(decoded(prompt, drafter, 1.0, seed, count=40, **more)) for seed in range(4)]
    alone = rounds()
    assert rounds(prefilled=state) == alone
    module = {"model": "model", "head": "head_drafter"}[kind]
    monkeypatch.setattr(f"specdec.drafters.{module}.common_length", lambda a, b: min(len(a), len(b)))
    assert rounds(prefilled=state) != alone


def test_what_is_read_is_copied_and_stays():
    drafter = DRAFTERS["model"]
    state = prefill(TARGET, OLD, drafter=drafter)
    kept, = state.drafting
    before = [held.clone() for held in kept.cache.keys + kept.cache.values]
    for seed in range(2): list(decoded(OLD, drafter, 1.0, seed, prefilled=state))
    assert all(torch.equal(*pair) for pair in zip(before, kept.cache.keys + kept.cache.values, strict=True))
    assert kept.cache.length == 2 * BLOCK and state.nbytes > prefill(TARGET, OLD).nbytes + kept.cache.nbytes - 1


def test_a_drafter_that_keeps_nothing_is_served():
    "A cache of another kind can't be copied; below a block there is nothing to keep, and nothing is started."
    class Own(NoDrafter):
        def keep(self, tokens): return DraftPrefix(self, tokens, object())
        def resume(self, prefix, tokens): raise AssertionError("nothing was kept")
    class Unstarted(NoDrafter):
        def start(self, *about): raise AssertionError("nothing to read")
    state = prefill(TARGET, OLD, drafter=Own())
    assert state.drafting == () and len(list(decoded(LONG, Own(), prefilled=state))) == 12
    assert prefill(TARGET, OLD[:BLOCK - 1], drafter=Unstarted()).drafting == ()


# Scores, and what was drafted


@exact_rows
def test_a_round_by_hand_is_the_loops():
    "`prefill`, a draft, `score`, the rule: the distributions of `step`."
    state = prefill(TARGET, LONG)
    cache = state.fork(4)
    rows = torch.cat((state.logits[None], score(TARGET, [1, 2, 3], cache)))
    whole = TARGET.forward(torch.tensor([[*LONG, 1, 2, 3]]))[0, -4:]
    assert rows.shape == (4, V) and (rows - whole).abs().max() < 1e-5 * whole.abs().max()
    cache.rollback(len(LONG) + 1)
    assert torch.equal(score(TARGET, [2, 3], cache), rows[2:]) and state.cache.length == len(LONG)
    assert torch.equal(score(TARGET, [1, 2]), TARGET.forward(torch.tensor([[1, 2]]))[0])
    with pytest.raises(CacheFullError): score(TARGET, [1, 2], cache)
    with pytest.raises(InputError, match=r"0…39"): score(TARGET, [V])
    with pytest.raises(InputError): score(TARGET, [])


@pytest.mark.parametrize("name, sampled", [("model", True), ("head", True), ("lookup", False)])
def test_what_a_drafter_drew_from_is_there_after_each_step(name, sampled):
    request = Request(TARGET, OLD[:40] * 2, DRAFTERS[name], SamplingParams(0.8, top_k=5), SeededRandom(0), 3, 20)
    assert request.draft is None
    drawn = []
    for r in serve(TARGET, request, PhaseTimer()):
        if request.draft is not None: check_draft(r, request.draft)
        if r.drafted: drawn.append(request.draft.q is not None)
    assert len(drawn) > 3 and set(drawn) == {sampled}


def check_draft(r, draft) -> None:
    "That the draft is the round's, and each token could be drawn from its row."
    assert r.drafted == draft.tokens
    if draft.q is not None and draft.tokens:
        assert draft.q.shape == (len(draft.tokens), V) and (draft.q > 0).sum(-1).max() <= 5
        assert (draft.q[range(len(draft.tokens)), draft.tokens] > 0).all()
        assert torch.allclose(draft.q.sum(-1), torch.ones(len(draft.tokens)))


# The pair


class Even:
    "A grammar of even tokens, as many as there are."
    def start(self, model): return self
    def allowed(self): return torch.arange(V) % 2 == 0
    def after(self, token): return self
    def forced(self): return []


def pair_of(drafter="hybrid", eos=frozenset()) -> Pair:
    target = copy.copy(TARGET)
    target.eos_ids = eos
    head = HeadDrafter(HEAD, target)
    return Pair(target, {"hybrid": HybridDrafter(SuffixDrafter(), head), "head": head}[drafter])


def made(result):
    "The tokens; and the rounds, unless they went by the clock."
    return result.generated_ids, (result.costs or {}).get("origin") == "clock" or result.rounds


@exact_rows
@pytest.mark.parametrize("settings", [
    {}, {"temperature": 1.0}, {"method": "plain"}, {"logprobs": 2}, {"grammar": Even()}, {"K": "adaptive"},
    {"grammar": Even(), "logprobs": 1, "temperature": 1.0},
], ids=["greedy", "sampled", "plain", "log-probabilities", "grammar", "adaptive", "all"])
def test_a_pair_continues_a_prompt(settings):
    "Also where something looks at each round's logits: then the last block is read again."
    pair = pair_of(eos={1})
    state = pair.prefill(OLD)
    settings = {"max_new_tokens": 10, "seed": 3, "ignore_eos": "grammar" not in settings} | settings
    for prompt in (OLD, LONG):
        alone, again = (pair.generate(prompt, **settings, **more) for more in ({}, {"prefilled": state}))
        assert made(again) == made(alone)
        assert again.logprobs == alone.logprobs and again.settings == alone.settings
        wrapped = "logprobs" in settings or "grammar" in settings
        assert alone.prompt_reused == 0 and again.prompt_reused == (300 if prompt is OLD and not wrapped else 256)
        if "grammar" in settings: assert all(token % 2 == 0 for token in again.generated_ids)
    *_, end = pair.stream(OLD, **settings, prefilled=state)
    # drawn drafts of a batch go by a batch's prices, and may be others: with certain ones the texts are equal
    listed = settings | {"same_text": True} if "temperature" in settings else settings
    found = dict(pair.results([OLD, LONG], **listed, prefilled=state))
    assert end.result.generated_ids == pair.generate(OLD, **settings).generated_ids
    assert [found[i].generated_ids for i in (0, 1)] == [
        pair.generate(prompt, **listed | {"seed": 3 + i}).generated_ids for i, prompt in enumerate((OLD, LONG))]


@exact_rows
def test_a_list_of_a_pair_says_what_it_reused():
    pair, prompts = pair_of(), [LONG[:300], LONG[:310], LONG[:270]]
    results = pair.generate(prompts, max_new_tokens=6)
    assert [r.prompt_reused for r in results] == [256] * 3
    assert [made(r) for r in results] == [made(pair.generate(prompt, max_new_tokens=6)) for prompt in prompts]
    assert [r.prompt_reused for r in pair.generate([[1, 2], [1, 3]], max_new_tokens=2)] == [0, 0]


@exact_rows
def test_a_chats_second_turn_reads_what_is_new():
    pair = Pair(talker(context=512), NGramDrafter())
    chat = [{"role": "user", "content": "one two three " * 60}]
    state = pair.prefill(chat)
    said = pair.generate(chat, prefilled=state, max_new_tokens=5)
    assert said.prompt_reused == len(said.prompt_ids) > BLOCK
    chat = [*chat, {"role": "assistant", "content": said.text}, {"role": "user", "content": "four"}]
    again, alone = pair.generate(chat, prefilled=state, max_new_tokens=5), pair.generate(chat, max_new_tokens=5)
    assert again.generated_ids == alone.generated_ids and again.text == alone.text
    assert again.prompt_reused == len(said.prompt_ids) // BLOCK * BLOCK
    later = pair.prefill(chat, state)
    assert pair.generate(chat, prefilled=later, max_new_tokens=5).generated_ids == alone.generated_ids


@pytest.mark.parametrize("wrap", [lambda model: GrammarLM(model, Even()),
                                  lambda model: WatchedLM(GrammarLM(model, Even()), SamplingParams(), 1)])
def test_a_grammar_begins_after_a_prompt_of_several_blocks(wrap):
    "Also the second time, and with a cache that was filled before."
    target, state = wrap(TARGET), prefill(TARGET, OLD)
    for more in ({}, {"prefilled": state}, {}):
        tokens = ids_of(decoded(LONG, NGramDrafter(), target=target, **more))
        assert len(tokens) == 12 and all(token % 2 == 0 for token in tokens)
    inner = target if isinstance(target, GrammarLM) else target.model
    assert inner.prompt == 400 and inner.coming is None


# What can't be continued


def test_what_cannot_be_continued_is_said_before_anything_runs():
    state, other = prefill(TARGET, OLD), tiny(vocab=V, hidden=32, layers=4, context=512, seed=1)
    def refused(match, make):
        with pytest.raises(InputError, match=match): make()
    refused("by another target", lambda: decoded(OLD, target=other, prefilled=state))
    refused("by another target", lambda: decoded(OLD, target=TARGET.skip([0]), prefilled=state))
    refused("by another target", lambda: decoded(OLD, target=copy.copy(TARGET), prefilled=state))
    refused("differ from the first token on", lambda: decoded([(OLD[0] + 1) % V, *OLD[1:]], prefilled=state))
    refused("not a list", lambda: decoded(OLD, prefilled=OLD))
    refused(r"after layers \[.*were not kept", lambda: decoded(OLD, DRAFTERS["head"], prefilled=state))
    refused("prompt is empty", lambda: prefill(TARGET, []))
    refused("another tokenizer", lambda: prefill(TARGET, [V]))
    refused("context", lambda: prefill(TARGET, [1] * 512))
    refused("prefill with the model inside", lambda: prefill(GrammarLM(TARGET, Even()), OLD))
    refused("room", lambda: state.fork(0))
    score(TARGET, OLD[:1], prefill(TARGET, OLD).fork(1))  # a fork may be written into
    state.cache.rollback(5)
    refused("prefilled, and its cache now holds 5", lambda: decoded(OLD, prefilled=state))


def test_a_prompt_is_not_read_on_from_what_does_not_fit():
    "Neither from another beginning, nor without the hidden states that are wanted, nor from something else."
    known = prefill(TARGET, OLD)
    with pytest.raises(InputError, match="from the first token on"):
        prefill(TARGET, [(OLD[0] + 1) % V, *OLD], prefilled=known)
    with pytest.raises(InputError, match=r"after layers \[1\]"): prefill(TARGET, LONG, (1,), prefilled=known)
    with pytest.raises(InputError, match="not a dict"): prefill(TARGET, LONG, prefilled={})


def test_what_a_pair_cannot_continue():
    pair = pair_of("head")
    state = pair.prefill(OLD)
    with pytest.raises(InputError, match="by another target"): pair_of().generate(OLD, prefilled=state)
    with pytest.raises(InputError, match="prefill reads one prompt"): pair.prefill([OLD, LONG])
    with pytest.raises(InputError, match="continued on the host"): pair.generate(OLD, prefilled=state, loop="device")
    with pytest.raises(InputError, match="Prompt 2 of 2: .* first token"):
        pair.generate([OLD, [(OLD[0] + 1) % V]], prefilled=state)
    with pytest.raises(InputError, match="not a dict"): pair.stream(OLD, prefilled={})


def test_it_says_what_it_is():
    state = prefill(TARGET, OLD, (0, 4))
    assert state.nbytes == state.cache.nbytes + 4 * (V + 300 * 64)
    assert repr(state) == f"<Prefilled: 300 tokens, {state.nbytes / 1e6:,.1f} MB>"


@exact_rows
def test_a_list_with_a_state_that_was_given_keeps_to_it():
    known = prefill(TARGET, OLD)
    def request(prompt, **more):
        return Request(TARGET, prompt, NoDrafter(), SamplingParams(), SeededRandom(0), max_new_tokens=2, **more)
    requests = [request(LONG, prefilled=known), request(OLD)]
    list(speculate_batch(TARGET, requests, 2))
    assert requests[0].prefilled is known and requests[1].prefilled is None


def test_a_cache_that_cant_be_copied_is_refused():
    class Odd(type(TARGET)):
        def new_cache(self, capacity): return object()
    target = copy.copy(TARGET)
    target.__class__ = Odd
    with pytest.raises(InputError, match="caches of a Odd can't be copied"): prefill(target, [1, 2])
