"""The loop on the device. On a CPU its functions run step by step: exact laws, equality with the other loop, fixed
shapes, and that no step asks for a number. Tests marked cuda need a GPU."""
import copy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from itertools import islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import assert_same_text, examples
from helpers_cuda import FakeCuda
from specdec.cache import CacheFullError
from specdec.device import loop as device_loop
from specdec.device import ops
from specdec.device.graphs import Outbox, count_synchronisations, host_synchronisations
from specdec.device.loop import (
    LONGEST_DRAFT,
    DeviceDecoder,
    DeviceLoop,
    ancestors,
    as_report,
    as_round,
    commit,
    decide,
    draft,
    play_round,
    unsupported_reason,
    walk_on_device,
)
from specdec.device.ops import (
    Decided,
    StaticCache,
    as_llama,
    block_on_device,
    bucket,
    device_residual,
    device_weights,
    emitted_tokens,
    exponential_sample,
    match_on_device,
    read_at,
    static_positions,
    verify_on_device,
)
from specdec.drafters.base import NoDrafter
from specdec.drafters.block import Block, BlockDrafter, block_config
from specdec.drafters.choose import HybridDrafter
from specdec.drafters.colder import TemperatureScaledDrafter
from specdec.drafters.head import Head, head_config
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.lookup import NGramDrafter, SuffixDrafter, lookup_on_device
from specdec.drafters.model import ModelDrafter, NarrowLM
from specdec.drafters.tree import TreeDrafter, best_tree, tree_positions
from specdec.engine import plan
from specdec.engine.block import block_verification, block_weights
from specdec.engine.profiling import PhaseTimer
from specdec.errors import InputError, ModelError, NumericalError, SpecdecError
from specdec.loop import speculate
from specdec.lossless.check import check_verify
from specdec.lossless.enumerate import exact_distribution
from specdec.lossless.proof import (
    AsIs,
    ExactModel,
    Language,
    distance,
    distribution_of_rounds,
    memory_of,
    target_distribution,
)
from specdec.lossless.torch_rng import drawn_from, torch_distribution
from specdec.models.checkpoint import Checkpoint
from specdec.models.hub import encode, fetch, load_tokenizer
from specdec.models.llama import Positions
from specdec.models.loading import load_model
from specdec.options import Options
from specdec.pair import Pair
from specdec.result import Round
from specdec.sampling import SamplingParams, SeededRandom
from specdec.verify import greedy_match, sample_and_match, speculative_sampling

CPU, ALARM = torch.device("cpu"), 1e-9  # the false-alarm rate of every statistical test here
cuda = pytest.mark.cuda
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: nothing is captured into graphs on this machine"
)
PROMPT = [1, 2, 3, 1, 2]


@lru_cache
def tiny(vocab=24, hidden=16, layers=3, seed=0, context=48, noise=0.0, device="cpu", dtype=torch.float32):
    "A random Llama with uneven logits; with noise, a relative of the one without."
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=context, tie_word_embeddings=False,
        initializer_range=0.3,
    )
    if device == "meta":
        with torch.device("meta"): return as_llama(LlamaForCausalLM(config))
    model = LlamaForCausalLM(config).requires_grad_(False)
    for w in model.parameters(): w += noise * torch.randn_like(w)
    return as_llama(model.to(device, dtype))


def my_rule(p, q, tokens, rng): return speculative_sampling(p, q, tokens, rng)


def tokens_of(rounds) -> list[int]: return [token for r in rounds for token in r.emitted]


def decode(
    target, drafter, prompt=PROMPT, sampling=SamplingParams(), seed=0, K=3, room=20, ends=frozenset(), **options,
) -> list[Round]:
    made = DeviceLoop(target, drafter, sampling, K, 256, **options)
    return list(made.rounds(prompt, seed, room, ends, PhaseTimer(target.device)))


def on_device(target, drafter, *asked, **more) -> list[Round]:
    "All rounds of one sequence, by a decoder of its own."
    return list(DeviceDecoder(target, drafter).speculate(*asked, **more))


def reference(
    target, drafter, prompt=PROMPT, sampling=SamplingParams(), seed=0, K=3, room=20, ends=frozenset()
) -> list[Round]:
    loop = speculate
    return list(loop(target, drafter, prompt, sampling, SeededRandom(seed), K, room, ends))


def random_head(target, seed=0, context=48, window=None):
    "A head with random weights, over 16 of the target's tokens."
    torch.manual_seed(seed)
    config = head_config(target, 16, layers=(1, 2))
    if window: config.decoder.layer_types, config.decoder.sliding_window = ["sliding_attention"], window
    head = Head(config, torch.arange(3, 19))
    for w in head.parameters(): torch.nn.init.normal_(w, std=0.4)
    head.config.decoder.max_position_embeddings = context
    return head.to(target.device, target.dtype)


def head_drafter(target, *how, **more): return HeadDrafter(random_head(target, *how, **more), target)


def block_drafter(target, seed=0, context=48, **options):
    "A block with random weights, over 16 of the target's tokens."
    torch.manual_seed(seed)
    more = dict(layers=(1, 2), mask_token_id=0, block_size=4) | options
    block = Block(block_config(target, 16, **more), torch.arange(3, 19))
    for w in block.parameters(): torch.nn.init.normal_(w, std=.4)
    block.config.decoder.max_position_embeddings = context
    return BlockDrafter(block.to(target.device, target.dtype), target)


SHAPE = best_tree([[.5, .3], [.4, .3]], 9)


def tree_drafter(target, seed=0, context=48, **options):
    return TreeDrafter(random_head(target, seed, context), target, **options)


def drafters(target, seed=0):
    "One of each kind, and of each kind's corner cases."
    V, there = target.vocab_size, dict(device=target.device.type)
    def relative(): return tiny(V, seed=seed, noise=0.05, **there)
    narrow = NarrowLM(tiny(9, seed=seed, **there), torch.arange(2, 18, 2), V)
    def hybrid(*members): return HybridDrafter(*members, c=(0, 0), verify=0)
    return {
        "none": NoDrafter(), "n-gram": NGramDrafter(), "suffix": SuffixDrafter(), "eager suffix": SuffixDrafter(0.6),
        "n-gram of two": NGramDrafter(shortest=2),
        "itself": ModelDrafter(target, V), "skip": ModelDrafter(target.skip([1]), V),
        "noisy": ModelDrafter(relative(), V), "narrow": ModelDrafter(narrow, V),
        "smaller": ModelDrafter(tiny(V - 3, hidden=8, layers=1, seed=seed + 1, **there), V),
        "wider": ModelDrafter(tiny(V + 5, seed=seed, noise=0.05, **there), V),
        "short memory": ModelDrafter(tiny(V, seed=seed, context=12, **there), V),
        "head": head_drafter(target, seed), "head, short memory": head_drafter(target, seed, context=10),
        "head with a window": head_drafter(target, seed, window=5),
        "block": block_drafter(target, seed, num_layers=2),
        "block, a chain": block_drafter(target, seed, markov_rank=4),
        "block, short memory": block_drafter(target, seed, context=10),
        "block, row 0 is the anchor": block_drafter(target, seed, sample_from_anchor=False),
        "colder": TemperatureScaledDrafter(ModelDrafter(relative(), V)),
        "colder head": TemperatureScaledDrafter(head_drafter(target)),
        "hybrid": hybrid(SuffixDrafter(), TemperatureScaledDrafter(head_drafter(target, seed))),
        "hybrid of models": hybrid(ModelDrafter(relative(), V), NGramDrafter()),
        "tree": tree_drafter(target, seed, width=3, depth=3), "tree of one shape": tree_drafter(target, shape=SHAPE),
        "tree, short memory": tree_drafter(target, seed, context=12, width=2),
        "tree of a few nodes": tree_drafter(target, seed, width=2, depth=1),
    }


# Draws

@pytest.mark.parametrize("settings, same", [
    (dict(method="plain", temperature=1.0), True), (dict(temperature=1.0), True),
    (dict(temperature=1.0, same_text=False), True), (dict(verify=block_verification), True),
    (dict(verify=speculative_sampling), True), (dict(temperature=1.0, verify=speculative_sampling), False),
    (dict(temperature=1.0, verify=sample_and_match), True), (dict(verify=greedy_match), True)],
    ids=lambda value: str(value) if isinstance(value, bool) else ", ".join(
        getattr(each, "__name__", str(each)) for each in value.values()))
def test_a_result_says_the_same_of_its_text_on_the_device_as_on_the_host(settings, same):
    "Lookup's drafts have no q, whatever was asked; a plain step drafts nothing."
    pair = Pair(tiny(), NGramDrafter())
    texts = [pair.generate([1, 2, 3, 1, 2, 3, 1], seed=2, max_new_tokens=16, loop=loop, ignore_eos=True, **settings)
             for loop in ("host", "device")]
    assert [result.same_text_as_plain for result in texts] == [same, same]
    assert all(result.num_drafted for result in texts) or settings.get("method") == "plain"
    due = pair.generate([1, 2, 3, 1, 2, 3, 1], seed=2, max_new_tokens=16, ignore_eos=True, method="plain",
                        temperature=settings.get("temperature", 0.0))
    if same: assert texts[0].generated_ids == texts[1].generated_ids == due.generated_ids


def test_an_exponential_sample_draws_in_proportion():
    weights = torch.tensor([3.0, 0, 1, 4])
    distribution = {0: Fraction(3, 8), 2: Fraction(1, 8), 3: Fraction(1, 2)}
    assert torch_distribution(lambda: exponential_sample(weights).item()) == distribution
    drawn = exponential_sample(weights.expand(40_000, -1), torch.Generator().manual_seed(0))
    counts = drawn.bincount(minlength=4).numpy()
    expected = np.array([3, 0, 1, 4]) / 8 * 40_000
    def chance(expected): return stats.chi2.sf(((counts - expected)[[0, 2, 3]] ** 2 / expected[[0, 2, 3]]).sum(), 2)
    assert counts[1] == 0 and chance(expected) > ALARM
    assert chance(np.array([2, 0, 2, 4]) / 8 * 40_000) < ALARM  # negative control


def test_an_exponential_sample_is_drawn_in_float64():
    """Float32 exponentials come in steps of 2⁻²⁴, and then tokens rarer than that are hardly ever drawn (the notebook
    shows by how much)."""
    seen = []
    class Dtypes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "exponential" in str(function): seen.append(args[0].dtype)
            return function(*args, **(kwargs or {}))
    with Dtypes(): exponential_sample(torch.ones(5))
    assert seen == [torch.float64]


# The verdict: exact laws, and mistakes that must be caught

def as_rule(verify):
    def rule(p, q, tokens, rng): return tuple(x.item() for x in verify(p, q, torch.tensor(tokens, dtype=torch.long)))
    return rule


VERDICTS = pytest.mark.parametrize("verify", [verify_on_device, block_on_device])


@VERDICTS
def test_the_verdict_is_lossless(verify): check_verify(as_rule(verify), none=True).raise_if_lossy()


def behind(verify):
    "The verdict on a draft with two places behind it that hold no guess."
    def with_debris(p, q, tokens):
        p, count = torch.cat((p, p[-1:].roll(1, -1), p[-1:])), torch.tensor([len(tokens)])
        if q is not None: q = torch.cat((q, p[:1], torch.zeros_like(p[:1])))
        return verify(p, q, F.pad(tokens, (0, 2)), count=count)
    return with_debris


@VERDICTS
def test_the_verdict_is_lossless_where_places_hold_no_guess(verify):
    check_verify(as_rule(behind(verify)), none=True, sizes=[(2, 3)]).raise_if_lossy()


def drawn_rows(seed, K, V=3):
    "Distributions and tokens drawn from q; some words have probability 0."
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, K + 1, V, generator=generator)
    never = torch.rand(logits.shape, generator=generator) < 0.3
    never.scatter_(-1, logits.argmax(-1, keepdim=True), False)
    p, q = logits.masked_fill(never, float("-inf")).softmax(-1)
    return p, q[:K], exponential_sample(q[:K], generator)


@pytest.mark.parametrize("form", [lambda verify: verify, behind], ids=["full", "places without a guess"])
def test_drafts_are_judged_as_on_the_host(form):
    "Lossless is not enough: for each draft the law of what stays and what follows is that of the host's rule."
    other = 0
    for seed in range(24):
        p, q, tokens = drawn_rows(seed, K=1 + seed % 4)
        def distribution(verify): return torch_distribution(lambda: tuple(x.item() for x in form(verify)(p, q, tokens)))
        expected = exact_distribution(lambda rng: block_verification(p, q, tokens.tolist(), rng))
        assert distance(distribution(block_on_device), expected) < 1e-6
        other += distance(distribution(verify_on_device), expected) > 1e-3
    assert other > 4  # negative control: token by token is another law


def test_one_token_and_sure_drafts_are_judged_token_by_token():
    for seed in range(20):
        p, q, tokens = drawn_rows(seed, K=4)
        for asked in ((p[:2], q[:1], tokens[:1]), (p, None, tokens), (p[:1], q[:0], tokens[:0])):
            one, other = (judge(*asked, torch.Generator().manual_seed(seed)) for judge in
                          (block_on_device, verify_on_device))
            assert [x.tolist() for x in one] == [x.tolist() for x in other]


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 10**6), K=st.integers(1, 6))
def test_the_weights_are_the_hosts(seed, K):
    p, q, tokens = drawn_rows(seed, K)
    ratios = (p[:K].double() / q).gather(1, tokens[:, None])[:, 0]
    expected = [float(w) for w in block_weights(p.double(), q.double(), tokens.tolist())]
    assert np.allclose(device_weights(ratios), expected, atol=1e-12, rtol=1e-9)


def chances(p, q, tokens): return [rows.gather(1, tokens[:, None])[:, 0] for rows in (q, p[:len(tokens)])]


def uniforms(tokens): return torch.rand(len(tokens), dtype=torch.float64)


def row_at(p, at): return p.index_select(0, at.clamp(0, len(p) - 1))


def conclude(p, q, accepted, residual=device_residual):
    taken = row_at(q, accepted) * (accepted < len(q))
    return accepted, exponential_sample(residual(row_at(p, accepted), taken))


def sums(p, q, tokens):
    "Goes on counting after a rejection."
    q_tokens, p_tokens = chances(p, q, tokens)
    return conclude(p, q, (uniforms(tokens) * q_tokens < p_tokens).long().sum(0, keepdim=True))


def one_uniform(p, q, tokens):
    q_tokens, p_tokens = chances(p, q, tokens)
    u = torch.rand(1, dtype=torch.float64)
    return conclude(p, q, torch.stack([(u < x)[0] for x in p_tokens / q_tokens]).long().cumprod(0).sum(0, keepdim=True))


def at_most(p, q, tokens):
    q_tokens, p_tokens = chances(p, q, tokens)
    return conclude(p, q, (uniforms(tokens) * p_tokens < q_tokens).long().cumprod(0).sum(0, keepdim=True))


def bonus_from_residual(p, q, tokens):
    accepted, _ = verify_on_device(p, q, tokens)
    return accepted, exponential_sample(device_residual(row_at(p, accepted), row_at(q, accepted)))


def no_residual(p, q, tokens): return conclude(p, q, verify_on_device(p, q, tokens)[0], lambda p, q: p)


def epsilon(p, q, tokens):
    return conclude(p, q, verify_on_device(p, q, tokens)[0], lambda p, q: (p - q).clip(min=0) + 1e-3)


def row_too_early(p, q, tokens):
    accepted, _ = verify_on_device(p, q, tokens)
    taken = row_at(q, accepted) * (accepted < len(q))
    return accepted, exponential_sample(device_residual(row_at(p, accepted - 1), taken))


@pytest.mark.parametrize(
    "wrong", [sums, one_uniform, at_most, bonus_from_residual, no_residual, epsilon, row_too_early]
)
def test_a_wrong_verdict_is_caught(wrong):
    assert not check_verify(as_rule(wrong), sizes=[(2, 3)], seeds=2).lossless


@VERDICTS
def test_the_verdict_where_p_is_q_and_where_they_share_nothing(verify):
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        p = torch.randn(5, 7, generator=generator).softmax(-1)
        assert verify(p, p[:4], exponential_sample(p[:4], generator), generator)[0].item() == 4
        apart = p * torch.tensor([1, 1, 1, 0, 0, 0, 0.0])
        q = (p * torch.tensor([0, 0, 0, 1, 1, 1, 1.0]))[:4]
        num_accepted, next_token = verify(apart, q, exponential_sample(q, generator), generator)
        assert num_accepted.item() == 0 and next_token.item() < 3
    same = torch.tensor([0.25, 0.75])
    assert torch.equal(device_residual(same, same), same)  # all zero: p itself


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 10**6), K=st.integers(0, 5))
def test_greedy_match_is_the_verdict_on_deltas(seed, K):
    generator = torch.Generator().manual_seed(seed)
    logits, tokens = torch.randn(K + 1, 3, generator=generator), torch.randint(3, (K,), generator=generator)
    found, expected = match_on_device(logits, tokens), verify_on_device(SamplingParams().probs(logits), None, tokens,
                                                                        generator)
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]


# Fixed shapes

@torch.inference_mode()
def rollback_error(model, seed, capacity=64, dirty=False):
    rng, text, worst, cache = np.random.default_rng(seed), [], 0.0, StaticCache(model, capacity)
    if dirty:
        for buffer in cache.keys + cache.values: buffer.normal_()
    for _ in range(25):
        if rng.random() < .5: text = text[:rng.integers(len(text) + 1)]
        piece = rng.integers(model.vocab_size, size=min(rng.integers(1, 20), 44 - len(text))).tolist()
        if not piece: continue
        logits, _ = read_at(model, torch.tensor(piece), len(text) + torch.arange(len(piece)), cache)
        text += piece
        expected = model.forward(torch.tensor([text]), model.new_cache(64), last=len(piece))[0]
        worst = np.maximum(worst, ((logits - expected).abs().max() / expected.abs().max()).item())
    return worst


@torch.inference_mode()
def test_hidden_states_are_those_of_the_forward():
    model, ids = tiny(), torch.tensor([3, 1, 4, 1, 5])
    logits, features = read_at(model, ids, torch.arange(5), StaticCache(model, 64), layers=(1, 2))
    expected = model.forward(ids[None], model.new_cache(8), layers=(1, 2))
    for found, due in zip((logits, features), expected): torch.testing.assert_close(found, due[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_logits_after_any_rollback_are_those_without_a_cache(seed):
    assert rollback_error(tiny(seed=seed), seed) < 1e-5
    assert rollback_error(tiny(seed=seed), seed, dirty=True) < 1e-5  # what lies behind the text must not matter


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_mask_that_is_off_by_one_is_caught(shift, monkeypatch):
    def shifted(model, at, capacity):
        right = static_positions(model, at, capacity)
        other = static_positions(model, (at + shift).clamp(min=0), capacity)
        return Positions(right.cos, right.sin, other.mask, right.fold)
    monkeypatch.setattr(ops, "static_positions", shifted)
    assert rollback_error(tiny(), 0, dirty=True) > 1e-3


@settings(max_examples=examples(100), deadline=None)
@given(
    said=st.lists(st.integers(0, 3), min_size=1, max_size=24), K=st.integers(1, 6), longest=st.integers(1, 4),
    seed=st.integers(0, 100),
)
def test_lookup_is_that_of_the_n_gram_drafter(said, K, longest, seed):
    drafter = NGramDrafter(longest).start(said, None, 64)
    tokens = torch.randint(4, (32,), generator=torch.Generator().manual_seed(seed))  # debris behind the text
    tokens[:len(said)] = torch.tensor(said)
    guesses, match = lookup_on_device(tokens, torch.tensor([len(said)]), K, longest)
    found, expected = guesses.tolist(), drafter.propose(K, None, None).tokens
    assert found[:len(expected)] == expected and len(found) == K and set(found) <= set(said)  # never debris
    assert (match.item() > 0) == bool(expected) and match.item() <= longest


# The loop: greedy text

def with_room_for(K, rounds, room):
    "The rounds that could be as long as any."
    left = room - np.cumsum([0, *(len(r.emitted) for r in rounds)])
    return [r for r, n in zip(rounds, left) if n > K]


@settings(max_examples=examples(8), deadline=None)
@given(
    seed=st.integers(0, 1000), K=st.integers(1, 7), length=st.integers(1, 12), room=st.integers(1, 24),
    ends=st.sets(st.integers(0, 23), max_size=3),
)
def test_greedy_text_is_that_of_the_other_loop(seed, K, length, room, ends):
    target = tiny(seed=seed)
    prompt = torch.randint(24, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    for name, drafter in drafters(target, seed).items():
        found, expected = (run(target, drafter, prompt, K=K, room=room, ends=ends) for run in (decode, reference))
        assert tokens_of(found) == tokens_of(expected), name
        past_the_end = any(ends & set(r.drafted) for r in found)  # the other loop's drafters stop there
        # where the text ends, the host's n-gram lookup goes on
        goes_on = name in ("n-gram", "n-gram of two", "hybrid of models")
        if name == "hybrid":  # at the end of its room, the host's chooses among shorter drafts
            found, expected = (with_room_for(K, rounds, room) for rounds in (found, expected))
        if not goes_on and not past_the_end: assert found == expected, name
        for r in found[1:]:
            assert r.emitted[: r.accepted] == r.drafted[: len(r.emitted)][: r.accepted] and len(r.emitted) <= room

def paths(tokens, parents): # 0: the text, i + 1: guess i
    "What each node of a tree says, from the text on."
    found = [()]
    for token, parent in zip(tokens, parents): found.append((*found[parent], token))
    return sorted(found)


BUSH = [(0,), (1,), (0, 0), (1, 0), (1, 1), (0, 0, 0), (1, 0, 0), (1, 0, 1), (1, 1, 0)]  # also behind second choices

@pytest.mark.parametrize("shape", [None, SHAPE, BUSH], ids=["believed", "first choices", "second choices"])
def test_both_loops_grow_the_same_trees(shape):
    "All of their nodes, not only the path that was passed."
    levels = Counter()
    for seed in range(6):
        target, grown = tiny(seed=seed), {"host": [], "device": []}
        drafter = tree_drafter(target, seed, shape=shape, width=3, depth=4)
        loop = DeviceLoop(target, drafter, SamplingParams(), len(BUSH), 256)
        def noting(where, propose):
            return lambda *asked: grown[where].append(propose(*asked)) or grown[where][-1]
        grower = loop.state.drafter
        grower.propose = noting("device", grower.propose)
        list(loop.rounds(PROMPT, 0, 24, frozenset(), PhaseTimer(target.device)))
        start = drafter.start
        def started(*text):
            state = start(*text)
            state.propose = noting("host", state.propose)
            return state
        drafter.start = started
        reference(target, drafter, K=len(BUSH), room=24)
        host = [paths(tree.tokens, [parent + 1 for parent in tree.parents]) for tree in grown["host"]]
        device = [paths(tree.tokens.tolist(), tree.parents.tolist()) for tree in grown["device"]]
        whole = [tree for tree in host if len(tree) == len(BUSH) + 1]  # near its end the host grows smaller ones
        assert len(whole) > 4 and whole == device[:len(whole)]
        levels.update(len(path) for tree in whole for path in tree)
    assert levels[3] > 10


@pytest.mark.parametrize("K", range(1, 20))
def test_ancestors_reach_back_to_the_text(K):
    "However deep the tree."
    assert torch.equal(ancestors(torch.arange(K)), torch.ones(K + 1, K + 1).tril() > 0)
    assert torch.equal(ancestors(torch.zeros(K, dtype=torch.long)).sum(1), torch.tensor([1, *[2] * K]))


def test_those_hypotheses_reach_every_kind_of_round():
    seen, said = set(), tokens_of(decode(tiny(), NoDrafter()))
    # rounds of K = 3 that are all accepted: 1, then 4, 4, …
    inside = {next(token for i, token in enumerate(said) if i % 4 == 2 and token not in said[:i])}
    for drafter in drafters(tiny()).values():
        for ends in (frozenset(), inside):
            seen |= {
                (len(r.drafted) > 0, r.accepted == len(r.drafted), r.accepted > 0, len(r.emitted) <= r.accepted)
                for r in decode(tiny(), drafter, room=40, ends=ends)
            }
    assert {
        (True, True, True, False), (True, False, True, False), (True, False, False, False), (True, True, True, True),
    } <= seen


def test_memory_is_bounded_however_large_K_is():
    "Each place costs rows of logits and of q, used or not."
    target = tiny(context=400)
    for drafter in (NGramDrafter(), ModelDrafter(tiny(context=400, noise=.05), 24)):
        decoder = DeviceDecoder(target, drafter)
        found = tokens_of(decoder.speculate(PROMPT, SamplingParams(), 0, K=10 ** 6, max_new_tokens=30))
        assert found == tokens_of(reference(target, drafter, K=40, room=30))
        assert [loop.state.K for loop in decoder.loops.values()] == [LONGEST_DRAFT]


@pytest.mark.parametrize("verify", [None, speculative_sampling, block_verification, my_rule])
def test_a_decoder_takes_the_rules_that_the_device_has(verify):
    decoder = DeviceDecoder(tiny(), ModelDrafter(tiny(noise=.05), 24))
    def text(rule): return list(decoder.speculate(PROMPT, SamplingParams(1.0), 3, K=4, max_new_tokens=40, verify=rule))
    if verify is my_rule:
        with pytest.raises(InputError, match="rule of one's own"): text(verify)
        return
    assert len(tokens_of(text(verify))) > 30
    assert (text(verify) == text(None)) == (verify is not block_verification)


def test_the_context_fills_up():
    target = tiny(context=40)
    for name, drafter in drafters(target).items():
        found = on_device(target, drafter, PROMPT, SamplingParams(), 0, K=6, max_new_tokens=500)
        assert tokens_of(found) == tokens_of(reference(target, drafter, K=6, room=500)) and len(tokens_of(found)) == 35


class MyLookup(NGramDrafter):
    "One that may do something else than what it inherits from."


def test_a_loop_refuses_a_drafter_of_the_host():
    for own in (object(), MyLookup(), TemperatureScaledDrafter(MyLookup()), HybridDrafter(MyLookup(), NoDrafter())):
        assert "works on the host" in unsupported_reason(tiny(), own)
        with pytest.raises(InputError, match="works on the host"): DeviceDecoder(tiny(), own)
    with pytest.raises(InputError, match="works on the host"): DeviceLoop(tiny(), object(), SamplingParams(), 3, 256)


def test_a_call_on_a_cpu_asks_nothing_of_the_device(monkeypatch):
    monkeypatch.setattr(plan, "unsupported_reason", lambda *_: pytest.fail("asked whether the device could"))
    assert plan.chosen_loop(Options(), tiny(), NGramDrafter()) == "host"


def test_a_model_with_a_sliding_window_decodes_past_it(monkeypatch):
    from transformers import MistralConfig, MistralForCausalLM
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, sliding_window=8, initializer_range=0.3, head_dim=4)
    target = as_llama(MistralForCausalLM(config))
    draft = ModelDrafter(target.skip([1]), 24)
    expected = reference(target, draft, room=40)
    assert decode(target, draft, room=40) == expected
    assert "a tree is read over all of the text" in unsupported_reason(target, tree_drafter(target))
    monkeypatch.setattr(target, "window", None)  # the mask that hides nothing
    assert decode(target, draft, room=40) != expected


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_rounds_that_run_ahead_stay_inside_the_buffers(ahead):
    target = tiny(context=400)
    decoder = DeviceDecoder(target, ModelDrafter(target, 24), ahead=ahead)
    # an index out of range would raise
    assert len(tokens_of(decoder.speculate(PROMPT, SamplingParams(1.0), 0, K=9,
                                           max_new_tokens=256 - len(PROMPT)))) == 251


DRAWN = [SamplingParams(0.6), SamplingParams(1.0), SamplingParams(1.0, top_k=5), SamplingParams(0.8, top_p=0.9),
         SamplingParams(1.2, min_p=0.3)]

@pytest.mark.parametrize("sampling", DRAWN, ids=str)
def test_a_target_that_drafts_for_itself_accepts_everything(sampling):
    for seed in range(3):
        rounds = decode(
            tiny(seed=seed), ModelDrafter(tiny(seed=seed), 24), sampling=sampling, seed=seed, K=4, room=40
        )
        assert sum(r.accepted for r in rounds) == sum(len(r.drafted) for r in rounds) > 20


def test_same_seed_same_tokens_and_being_ahead_changes_nothing():
    first, again, ahead, other = (
        decode(tiny(), ModelDrafter(tiny(noise=0.05), 24), sampling=SamplingParams(1.0), seed=seed, ahead=n)
        for seed, n in ((3, 0), (3, 0), (3, 2), (4, 0))
    )
    assert first == again == ahead != other


# The loop's law, exactly: every branch is walked

class LanguageLM:
    """A language in the place of a Llama: its keys are the tokens themselves, and it answers to those that the mask
    lets through."""
    device, dtype, context_length, window, rope_scale, groups = CPU, torch.float32, 10 ** 6, None, 1.0, 1
    packed, int4, int4_share, target_digest = False, False, 0.0, None
    frequencies, layers = torch.ones(1), [None]
    config = type("Config", (), dict(num_key_value_heads=1, head_dim=1))
    def __init__(self, language, V): self.language, self.vocab_size = language, V
    def forward(self, ids, cache, last=None, layers=()):
        where = static_positions(self, torch.arange(ids.shape[1]), cache.capacity)
        return self.compute(ids, where, cache, last, layers)

    def compute(self, ids, where, cache, last=None, layers=()):
        new = ids.float()[None, ..., None]
        keys = cache.append(0, new, new)[0][0, 0, :, 0]
        texts = [keys[row[:len(keys)] == 0].long().tolist() for row in where.mask]
        if last: texts = texts[-last:]
        rows = [self.language(tuple(text[1:])).astype(float) for text in texts]
        logits = torch.tensor(np.array(rows), dtype=torch.float32)[None]
        return (logits, ids.float()[..., None]) if layers else logits  # the feature of a token is the token


class LanguageHead:
    "A language in the place of a head: its keys are the tokens, and a state is the row that it answers with."
    device, dtype, layers, frequencies, rope_scale, groups = CPU, torch.float32, [None], torch.ones(1), 1.0, 1
    window, config = None, type("Config", (), dict(decoder=LanguageLM.config))
    def __init__(self, language, V):
        self.language, self.where, self.norm, self.tokens = language, self, torch.zeros(V), torch.arange(V)

    def fuse(self, features): return features[None]

    def read(self, ids, x, where, cache):
        new = ids.float()[None, None, :, None]
        keys = cache.append(0, new, new)[0][0, 0, :, 0]
        rows = [self.language(tuple(keys[row[:len(keys)] == 0].long().tolist())).astype(float) for row in where.mask]
        return torch.tensor(np.array(rows), dtype=torch.float32)[None]

    def say(self, state): return state[0, 0], state

    def say_all(self, states): return states[0], states


def head_of(language, V, kind=HeadDrafter):
    made = kind.__new__(kind)
    made.head, made.layers, made.vocab_size, made.context_length = LanguageHead(language, V), (1,), V, 10 ** 6
    return made


def tree_of(language, V, shape=None):
    made = head_of(language, V, TreeDrafter)
    made.width, made.depth, made.shape = 2, 2, shape
    return made


@dataclass(frozen=True)
class Exactly:
    "Rows as they are; colder than that, all on the likeliest token."
    temperature: float = 1.0
    def probs(self, rows):
        if self.temperature == 1: return rows
        return torch.zeros_like(rows).scatter_(-1, rows.argmax(-1, keepdim=True), 1.0)


def loop_distribution(p, drafter, V, K, length, loop=None, room=12, ends=frozenset(), sampling=Exactly()):
    def start(rng):
        guesses = drafter()
        made = (loop or DeviceLoop)(LanguageLM(p, V), guesses, sampling, K, 24)
        inner = made.rounds([0], None, room, ends, PhaseTimer())
        def rounds():
            while True:
                with drawn_from(rng):
                    made.state.uniforms.uniform_()  # the seed's: each round draws its own, as the walk goes by rounds
                    r = next(inner, None)
                if r is None: return
                yield r
        state = made.state
        parts = state.sequence.tokens, state.sequence.length, state.cache.keys, remembered(state.drafter)
        return rounds(), lambda: memory_of(parts)
    return distribution_of_rounds(start, length)


def remembered(drafter):
    "The places on the device in which a drafter keeps what it knows."
    drafter = getattr(drafter, "reader", drafter)  # a tree's head
    own = [x for x in vars(drafter).values() if isinstance(x, torch.Tensor)]
    if hasattr(drafter, "cache"): own.append(drafter.cache.keys)
    if hasattr(drafter, "estimates"): own += [drafter.estimates.accepted, drafter.estimates.tried]
    inner = [*getattr(drafter, "members", []), *filter(None, [getattr(drafter, "inner", None)])]
    return [own, *map(remembered, inner)]


def languages(V, seed, most=None): return (Language(V, f"{name}{seed}", most=most, halves=True) for name in "pq")


@pytest.mark.parametrize("K, V, length", [(1, 3, 4), (2, 2, 4), (0, 3, 3)])
@pytest.mark.parametrize("seed", [0, 2])
def test_the_joint_distribution_is_the_targets(K, V, length, seed):
    p, q = languages(V, seed)
    drafter = (lambda: ModelDrafter(LanguageLM(q, V), V)) if K else NoDrafter
    assert distance(loop_distribution(p, drafter, V, max(K, 1), length), target_distribution(p, length)) == 0


def exact_drafters(q, V): # functions that make one of each kind
    def hybrid(): return HybridDrafter(SuffixDrafter(), head_of(q, V), c=(0, 0), verify=0)
    return {
        "n-gram": NGramDrafter, "suffix": SuffixDrafter, "model": lambda: ModelDrafter(LanguageLM(q, V), V),
        "narrow model": lambda: ModelDrafter(NarrowLM(LanguageLM(q, V + 1), torch.arange(V), V), V),
        "head": lambda: head_of(q, V), "colder": lambda: TemperatureScaledDrafter(head_of(q, V)), "hybrid": hybrid,
        "tree": lambda: tree_of(q, V), "tree of one shape": lambda: tree_of(q, V, [(0,), (1,), (1, 0)]),
    }


@pytest.mark.parametrize("K", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", exact_drafters(None, 2))
def test_the_joint_distribution_with_every_drafter(kind, K):
    for seed in (0, 2):
        p, q = languages(2, seed)
        assert distance(loop_distribution(p, exact_drafters(q, 2)[kind], 2, K, 4), target_distribution(p, 4)) == 0


def test_the_joint_distribution_with_n_gram_drafts_an_end_and_a_limit():
    p, q = languages(2, 1)
    assert distance(loop_distribution(p, NGramDrafter, 2, 2, 4), target_distribution(p, 4)) == 0
    for drafter in (NGramDrafter, lambda: ModelDrafter(LanguageLM(q, 2), 2)):
        for end in (0, 1):
            ends = frozenset({end})
            assert distance(loop_distribution(p, drafter, 2, 2, 4, ends=ends, room=4),
                            target_distribution(p, 4, ends)) == 0
        # one more would show
        assert distance(loop_distribution(p, drafter, 2, 2, 5, room=3), target_distribution(p, 3)) == 0


RULES = {None: speculative_sampling, speculative_sampling: speculative_sampling, block_verification: block_verification}


@pytest.mark.parametrize("rule", RULES, ids=["default", "speculative sampling", "block verification"])
def test_rounds_are_those_of_the_host(rule):
    "Drafted, accepted and emitted of the first round: the same law, so that all that is counted means the same."
    same = RULES[rule]
    another = block_verification if same is speculative_sampling else speculative_sampling
    K, V, others = 2, 3, 0
    def first_round(rounds):
        def second(rng):
            with drawn_from(rng): _, r = islice(rounds(rng), 2)
            return tuple(r.drafted), r.accepted, tuple(r.emitted)
        return exact_distribution(second)

    for seed in range(3):
        p, q = languages(V, seed)
        def on_host(rng, verify=rule):
            drafter = ModelDrafter(ExactModel(q, V), V)
            return speculate(ExactModel(p, V), drafter, [0], AsIs(), rng, K, 8, verify=verify)
        def on_device(rng):
            loop = DeviceLoop(LanguageLM(p, V), ModelDrafter(LanguageLM(q, V), V), Exactly(), K, 24, rule)
            return loop.rounds([0], None, 8, frozenset(), PhaseTimer())
        found = first_round(on_device)
        assert distance(found, first_round(on_host)) == 0
        others += distance(found, first_round(lambda rng: on_host(rng, another))) > 0.01
    assert others  # negative control: the other rule


def with_steps(**wrong):
    "Makes a loop with other steps: name → function of the state and of what the step is given."
    def make(*given, **options):
        loop = DeviceLoop(*given, **options)
        loop.steps = replace(loop.steps, **{name: partial(step, loop.state) for name, step in wrong.items()})
        return loop
    return make


def deciding(wrong):
    "A loop that is wrong in `decide`, where there is a draft: `wrong` says what is accepted and what follows."
    def decide_wrongly(state, draft, logits):
        right = decide(state, draft, logits)
        if len(draft.tokens) == 0: return right
        accepted, following = wrong(state.sampling.probs(logits), draft, right.num_accepted)
        emitted = emitted_tokens(draft.tokens, accepted, following)
        return Decided(accepted, following, emitted, as_report(draft, accepted, following, logits))
    return with_steps(decide=decide_wrongly)


@deciding
def wrong_bonus(p, draft, accepted):
    return accepted, exponential_sample(device_residual(row_at(p, accepted), row_at(draft.q, accepted)))


def lacks_the_bonus(state, draft, decided, features):
    "The sequence on the device lacks the token that was emitted after a full draft."
    commit(state, draft, decided, features)
    if len(draft.tokens): state.sequence.length -= (decided.num_accepted == draft.count).long()


@deciding
def generous(p, draft, accepted):
    at_least_one = accepted.clamp(min=1)
    return at_least_one, exponential_sample(row_at(p, at_least_one))


def reads_too_late(state, draft):
    "The verification's positions are off by one: the last token is never read."
    last, at = state.sequence.ending(1)
    unread, at = torch.cat((last, draft.tokens)), at + 1 + torch.arange(state.K + 1)
    return read_at(state.target, unread, at, state.cache)


def cut(state):
    "A draft whose last place holds something else than what was drawn for it, and isn't counted."
    made = draft(state)
    tokens = torch.cat((made.tokens[:1], made.q[1:].argmax(-1)))
    return replace(made, tokens=tokens, count=torch.ones(1, dtype=torch.long))


def cut_and_counted(state):
    "Wrong: tries the places that hold no draft token, too."
    return replace(cut(state), count=torch.full((1,), state.K))


def test_places_that_hold_no_guess_are_no_guesses():
    "Where q is not what they were drawn from: a suffix drafter's debris happens to be harmless, a hybrid's is not."
    p, q = languages(2, 0)
    def drafter(): return ModelDrafter(LanguageLM(q, 2), 2)
    assert distance(loop_distribution(p, drafter, 2, 2, 4, with_steps(draft=cut)), target_distribution(p, 4)) == 0
    assert distance(loop_distribution(p, drafter, 2, 2, 4, with_steps(draft=cut_and_counted)),
                    target_distribution(p, 4)) > 0.01


def speaks_too_early(state, draft, logits):
    "What the target says behind a row is taken for what it says behind the next."
    says = exponential_sample(logits, state.generator).roll(1)
    return walk_on_device(draft, ancestors(draft.parents), says, logits)


def sees_all(state, draft):
    "A node looks at its siblings, too."
    last, start = state.sequence.ending(1)
    state.cache.at = start + torch.arange(state.K + 1)
    sees = torch.ones(state.K + 1, state.K + 1, dtype=torch.bool).tril()
    where = tree_positions(state.target, start, sees, state.cache.capacity)
    ids = torch.cat((last, draft.tokens))[None]
    logits, features = state.target.compute(ids, where, state.cache, None, state.drafter.layers)
    return logits[0], features[0]


def stays_scattered(state, draft, decided, features):
    "The path's keys stay where they were written."
    commit(state, draft, replace(decided, path=None), features.index_select(0, decided.path))


@pytest.mark.parametrize("part, wrong", [
    ("decide", speaks_too_early), ("verify", sees_all), ("commit", stays_scattered)])
def test_a_wrong_tree_has_another_distribution(part, wrong):
    errors = []
    for seed in (0, 2):
        p, q = languages(2, seed)
        found = loop_distribution(p, lambda: tree_of(q, 2), 2, 3, 4, with_steps(**{part: wrong}))
        errors.append(distance(found, target_distribution(p, 4)))
    assert max(errors) > 0.01


@pytest.mark.parametrize("wrong", [
    wrong_bonus, with_steps(commit=lacks_the_bonus), generous, with_steps(verify=reads_too_late),
], ids=["wrong bonus", "no bonus", "generous", "reads too late"])
def test_a_wrong_loop_has_another_distribution(wrong):
    errors = []
    for seed in (0, 2):
        p, q = languages(3, seed)
        found = loop_distribution(p, lambda: ModelDrafter(LanguageLM(q, 3), 3), 3, 1, 4, wrong)
        errors.append(distance(found, target_distribution(p, 4)))
    assert max(errors) > 0.01


def chi_squared(loop, device="cpu", N=1500, V=3, seed=2):
    "Pearson's statistic of the first three tokens with real draws, its false-alarm probability, and the expected law."
    p, q = languages(V, seed)
    distribution = {text: float(w) for text, w in target_distribution(p, 3).items()}
    made = loop(LanguageLM(p, V), ModelDrafter(LanguageLM(q, V), V), AsIs(), 1, 16)
    counts = Counter(tuple(tokens_of(made.rounds([0], seed, 3, frozenset(), PhaseTimer()))) for seed in range(N))
    assert set(counts) <= set(distribution)
    statistic = sum((counts[text] - N * w) ** 2 / (N * w) for text, w in distribution.items())
    return statistic, stats.chi2.sf(statistic, len(distribution) - 1), distribution


def test_the_distribution_with_real_draws():
    assert chi_squared(DeviceLoop)[1] > ALARM


def test_the_negative_control_is_caught_with_the_power_that_is_stated():
    p, q = languages(3, 2)
    wrong = loop_distribution(p, lambda: ModelDrafter(LanguageLM(q, 3), 3), 3, 1, 3, wrong_bonus)
    distribution, N = target_distribution(p, 3), 1500
    # of the statistic's law
    shift = N * sum(float((wrong.get(text, 0) - w) ** 2 / w) for text, w in distribution.items())
    power = stats.ncx2.sf(stats.chi2.isf(ALARM, len(distribution) - 1), len(distribution) - 1, shift)
    assert power > 0.999
    try: alarm = chi_squared(wrong_bonus)[1]
    except AssertionError: alarm = 0  # a text that the target can't say
    assert alarm < ALARM


# Nothing asks

class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                raise AssertionError(f"{function} happened on the {x.device.type}")
        return out


@torch.inference_mode()
def round_on_meta(drafter, sampling, K=4, change=None, rule=None):
    loop = DeviceLoop(tiny(device="meta"), drafter, sampling, K, 256, rule)
    if change: change(loop)
    with Watching(): play_round(loop.steps, PhaseTimer())


SAMPLINGS = [SamplingParams(), SamplingParams(1.0), SamplingParams(0.8, top_k=5), SamplingParams(0.8, top_p=0.9),
             SamplingParams(0.8, 5, 0.9, 0.1)]


@pytest.mark.parametrize("rule", [None, block_verification])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_no_round_asks_for_a_number(sampling, rule):
    for drafter in drafters(tiny(device="meta")).values(): round_on_meta(drafter, sampling, rule=rule)


ASKS = {  # what a careless line does → what is said about it
    "a number": (lambda x: x.max().item(), "meta"),
    "a decision": (lambda x: bool((x > 0).any()), "meta"),
    "a length": (lambda x: x[x > 0], "meta"),
    "all numbers": (lambda x: torch.multinomial(x.softmax(-1), 1).tolist(), "meta"),
    "a number of the host's": (lambda x: x + torch.tensor(1.0), "happened on the cpu"),
}

@pytest.mark.parametrize("line, said", ASKS.values(), ids=ASKS)
def test_a_round_that_asks_is_caught(line, said):
    def change(loop):
        right = loop.steps.decide
        def asking(draft, logits):
            line(logits)
            return right(draft, logits)
        loop.steps.decide = asking
    with pytest.raises((RuntimeError, AssertionError), match=said):
        round_on_meta(NGramDrafter(), SamplingParams(1.0), change=change)


# Errors, and use over many texts

def broken(model):
    "The model with a NaN in its last norm."
    other = copy.copy(model)
    other.norm = model.norm.clone()
    other.norm[0] = float("nan")
    return other


def test_nan_is_reported_with_its_place():
    for temperature in (0.0, 1.0):
        with pytest.raises(NumericalError, match="The target, after 5 tokens"):
            decode(broken(tiny()), NGramDrafter(), sampling=SamplingParams(temperature))
        with pytest.raises(NumericalError, match="The draft, after 6 tokens"):
            decode(tiny(), ModelDrafter(broken(tiny()), 24), sampling=SamplingParams(temperature))


@torch.inference_mode()
def test_a_new_text_does_not_see_what_an_earlier_one_left():
    loop = DeviceLoop(tiny(), ModelDrafter(tiny(noise=.05), 24), SamplingParams(), 3, 256)
    expected = list(loop.rounds(PROMPT, 0, 20, frozenset(), PhaseTimer()))
    for cache in (loop.state.cache, loop.state.drafter.cache):
        for buffer in cache.keys + cache.values: buffer.fill_(float("nan"))
    assert list(loop.rounds(PROMPT, 0, 20, frozenset(), PhaseTimer())) == expected


def test_a_decoder_keeps_its_loops_and_serves_one_text_at_a_time():
    decoder = DeviceDecoder(tiny(), NGramDrafter(), keep=2)
    for temperature in (0.0, 0.0, 1.0, 0.0):
        list(decoder.speculate(PROMPT, SamplingParams(temperature), 0, max_new_tokens=5))
    assert [key[0].temperature for key in decoder.loops] == [1.0, 0.0]
    list(decoder.speculate(PROMPT, SamplingParams(0.5), 0, max_new_tokens=5))
    assert [key[0].temperature for key in decoder.loops] == [0.0, 0.5]
    one, two = (decoder.speculate(PROMPT, SamplingParams(), 0) for _ in range(2))
    next(one), next(two)
    with pytest.raises(SpecdecError, match="Another text"): next(one)
    assert len(tokens_of(two)) > 0


@pytest.mark.parametrize("form", [np.int64, torch.tensor], ids=["NumPy", "torch"])
def test_numbers_of_numpy_and_torch_are_as_good_as_plain_ones(form):
    plain, given = (
        list(DeviceDecoder(tiny(), NGramDrafter(), keep=f(2), ahead=f(1)).speculate(
            PROMPT, SamplingParams(f(1)), f(3), K=f(3), max_new_tokens=f(12), eos_ids={f(9)}))
        for f in (lambda n: n, form)
    )
    assert plain == given and {type(token) for token in tokens_of(given)} == {int}


@pytest.mark.parametrize("wrong", [dict(K=True), dict(K=0), dict(K=1.5), dict(capacity=True), dict(capacity=0),
                                   dict(ahead=-1), dict(ahead=True), dict(ahead=0.5)], ids=str)
def test_a_loop_refuses_what_is_no_number(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        DeviceLoop(tiny(), NGramDrafter(), SamplingParams(), **dict(K=3, capacity=256) | wrong)
    with pytest.raises(InputError, match="keep"): DeviceDecoder(tiny(), NGramDrafter(), keep=True)


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_text_that_does_not_fit_the_buffers_is_refused(ahead):
    needed = len(PROMPT) + 20 + (ahead + 1) * 4
    for capacity in (needed - 1, needed):
        loop = DeviceLoop(tiny(), ModelDrafter(tiny(), 24), SamplingParams(), 3, capacity, ahead=ahead)
        if capacity == needed: assert len(tokens_of(loop.rounds(PROMPT, 0, 20, frozenset(), PhaseTimer()))) == 20
        else:
            with pytest.raises(InputError, match=f"capacity of {needed}, and the buffers have {capacity}"):
                loop.rounds(PROMPT, 0, 20, frozenset(), PhaseTimer())
    for wrong in (dict(prompt=[]), dict(prompt=[99]), dict(room=0), dict(room=True), dict(seed="x"), dict(eos_ids=2)):
        given = dict(prompt=PROMPT, seed=0, room=4, eos_ids=frozenset(), timer=PhaseTimer()) | wrong
        with pytest.raises(InputError): loop.rounds(**given)


def test_no_memory_for_the_buffers_is_said():
    with pytest.raises(CacheFullError, match="no memory"): DeviceLoop(tiny(), NoDrafter(), SamplingParams(), 3,
                                                                      10 ** 14)


def test_threads_on_the_same_buffers_never_mix_two_texts():
    "A thread's text goes on until another begins one, and then it is told; no token of the other's is in it."
    decoder = DeviceDecoder(tiny(context=400), ModelDrafter(tiny(context=400, noise=.05), 24))
    prompts = [[1, 2, 3], [7, 5, 9, 2], [4, 4], [11, 3, 8]]
    def text(prompt): return decoder.speculate(prompt, SamplingParams(1.0), 5, max_new_tokens=40)
    whole = {tuple(prompt): tokens_of(text(prompt)) for prompt in prompts}
    def attempt(prompt):
        said = []
        try:
            for r in text(prompt): said += r.emitted
        except SpecdecError as error: assert "Another text" in str(error)
        else: assert len(said) == 40
        return prompt, said
    with ThreadPoolExecutor(4) as pool: found = list(pool.map(attempt, prompts * 6))
    assert all(said == whole[tuple(prompt)][:len(said)] for prompt, said in found)
    assert any(len(said) < 40 for _, said in found)  # or nothing was shown


def test_numbers_that_another_text_wrote_are_not_given_out(monkeypatch):
    "Another thread begins a text after a round was started, and before its report is read."
    loop = DeviceLoop(tiny(), NGramDrafter(), SamplingParams(), 3, 256)
    one, start_round = loop.rounds(PROMPT, 0, 20, frozenset(), PhaseTimer()), loop.round
    next(one)
    def overtaken(timer):
        receive = start_round(timer)
        def late():
            next(loop.rounds([4, 4], 0, 20, frozenset(), PhaseTimer()))
            return receive()
        return late
    monkeypatch.setattr(loop, "round", overtaken)
    with pytest.raises(SpecdecError, match="Another text"): next(one)


def test_bad_requests_are_refused_before_anything_runs():
    decoder = DeviceDecoder(tiny(), NGramDrafter())
    right = dict(prompt=PROMPT, sampling=SamplingParams(), seed=0)
    prompts = dict(prompt=[]), dict(prompt=[99]), dict(prompt=[1] * 48)
    for wrong in (*prompts, dict(K=0), dict(max_new_tokens=0), dict(seed="x")):
        with pytest.raises(InputError): decoder.speculate(**{**right, **wrong})
    assert not decoder.loops
    language, meta = ModelDrafter(LanguageLM(None, 24), 24), ModelDrafter(tiny(device="meta"), 24)
    refused = (LanguageLM(None, 2), NoDrafter()), (tiny(), language), (tiny(), object()), (tiny(), meta)
    for target, drafter in refused:
        assert unsupported_reason(target, drafter)
        with pytest.raises(InputError, match="fixed shapes"): DeviceDecoder(target, drafter)
    elsewhere = copy.copy(tiny())
    elsewhere.device = torch.device("mps")
    assert "mps" in unsupported_reason(elsewhere, NoDrafter())


def test_the_timer_gets_its_phases():
    timer = PhaseTimer()
    on_device(tiny(), NGramDrafter(), PROMPT, SamplingParams(), 0, timer=timer)
    assert all(timer.seconds(phase) > 0 for phase in ("prefill", "draft", "verify", "sample"))


def test_reports_become_rounds():
    assert as_round([5, 6, 7, 3, 2, 9, 0, 0], 10, set(), "") == Round([5, 6, 7], 2, [5, 6, 9])
    assert as_round([5, 6, 7, 3, 3, 9, 0, 0], 10, {6}, "") == Round([5, 6, 7], 3, [5, 6])
    assert as_round([5, 6, 7, 3, 1, 9, 0, 0], 10, {6}, "") == Round([5, 6, 7], 1, [5, 9])  # an end that was rejected
    assert as_round([5, 6, 7, 3, 3, 9, 0, 0], 2, set(), "") == Round([5], 1, [5, 6])
    assert as_round([5, 6, 7, 3, 0, 9, 0, 0], 1, set(), "") == Round([], 0, [9])
    assert as_round([5, 6, 7, 1, 1, 9, 0, 0], 10, set(), "") == Round([5], 1, [5, 9])  # two places without a guess
    assert as_round([5, 6, 7, 0, 0, 9, 0, 0], 10, set(), "") == Round([], 0, [9])
    assert [bucket(n) for n in (1, 256, 257, 5000)] == [256, 256, 512, 8192]


def test_an_outbox_sends_what_was_there():
    outbox, received = Outbox(torch.zeros(2, dtype=torch.long), 2), []
    for i in range(6):
        outbox.report.fill_(i)
        sent = outbox.send()
        received.append(sent())
    assert received == [[i, i] for i in range(6)]


# Recorded, with a double in the place of CUDA

@pytest.fixture
def fake(monkeypatch): return FakeCuda().install(monkeypatch)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0), SamplingParams(0.8, 5, 0.9)], ids=str)
@pytest.mark.parametrize("kind", drafters(tiny()))
def test_captured_is_step_by_step_with_the_double(fake, kind, sampling, recwarn):
    drafter, given = drafters(tiny())[kind], dict(sampling=sampling, seed=3, K=2, room=12)
    found = decode(tiny(), drafter, **given)
    assert len(fake.graphs) == (3 if kind == "none" else 4) and not recwarn.list  # all parts, and no way out
    assert found == decode(tiny(), drafter, graphs=False, **given)


def reachable(thing, seen):
    "All tensors that an object holds, to the bottom."
    if id(thing) in seen or isinstance(thing, (type, torch.nn.Module)): return []
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor): return [thing] if thing.layout == torch.strided else []
    if isinstance(thing, dict): inside = thing.values()
    elif isinstance(thing, (list, tuple)): inside = thing
    else:  # `at` of a cache belongs to one forward, and each begins by setting it
        inside = [value for name, value in getattr(thing, "__dict__", {}).items() if name != "at"]
    return [x for one in inside for x in reachable(one, seen)]


@pytest.mark.parametrize("kind", ["n-gram", "noisy", "colder head", "hybrid", "tree", "tree of one shape"])
def test_what_a_loop_keeps_was_there_before_the_capture(fake, kind):
    "Memory that is taken inside a recording is the recording's: another one may write to it."
    drafter = drafters(tiny())[kind]
    loop = DeviceLoop(tiny(), drafter, SamplingParams(1.0), 3, 256)
    taken = {x.untyped_storage().data_ptr() for graph in fake.graphs for x in graph.fresh() if x.numel()}
    kept = {x.untyped_storage().data_ptr() for x in reachable([loop.state, loop.outbox], set()) if x.numel()}
    assert loop.is_captured and taken and not taken & kept


ASKING = {
    "a wait": lambda loop, x: torch.cuda.synchronize(),
    "a number": lambda loop, x: x.max().item(),
    "a choice": lambda loop, x: x[x > 0],
    "a number of the host's": lambda loop, x: x + torch.tensor([1.0]),
    "an allocation": lambda loop, x: Outbox(torch.zeros(2), 1),
}


@pytest.mark.parametrize("part", ["draft", "verify", "decide", "commit"])
@pytest.mark.parametrize("asks", ASKING.values(), ids=ASKING)
def test_what_a_gpu_forbids_in_a_capture_is_caught_and_the_steps_go_on(fake, asks, part, monkeypatch):
    expected = decode(tiny(), NGramDrafter(), graphs=False)
    right = getattr(device_loop, part)
    def asking(state, *given):
        if fake.recording: asks(state, torch.ones(3))
        return right(state, *given)
    monkeypatch.setattr(device_loop, part, asking)
    with pytest.warns(UserWarning, match="can't be captured on this machine .*CUDA error"):
        assert decode(tiny(), NGramDrafter()) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_driver_that_captures_nothing_loses_no_token_and_is_asked_once(fake, temperature, recwarn):
    fake.fails = "CUDA error: no kernel image"
    decoder = DeviceDecoder(tiny(), head_drafter(tiny()))
    for K in (3, 2):
        found = list(decoder.speculate(PROMPT, SamplingParams(temperature), 3, K=K, max_new_tokens=20))
        expected = dict(sampling=SamplingParams(temperature), seed=3, K=K, graphs=False)
        assert found == decode(tiny(), head_drafter(tiny()), **expected)
    assert [str(warning.message).count("no kernel image") for warning in recwarn.list] == [1]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_one_event_is_waited_for_in_each_round(fake, ahead):
    loop = DeviceLoop(tiny(), ModelDrafter(tiny(noise=.05), 24), SamplingParams(1.0), 3, 256, ahead=ahead)
    rounds = list(loop.rounds(PROMPT, 3, 20, frozenset(), PhaseTimer()))
    log = list(fake.log)
    assert rounds == decode(tiny(), ModelDrafter(tiny(noise=.05), 24), sampling=SamplingParams(1.0), seed=3,
                            graphs=False)
    assert log.count("waited") == len(rounds) and log.count("sent") - len(rounds) in range(ahead + 1)
    under_way = np.cumsum([1 if event == "sent" else -1 for event in log])
    # a place is never written while its report is unread
    assert under_way.max() == ahead + 1 == len(loop.outbox.places)


def test_synchronisations_are_counted_inside_the_range_only():
    class Event:
        def __init__(self, name, start, end, device_type="DeviceType.CPU"):
            self.name, self.device_type = name, device_type
            self.time_range = type("Range", (), dict(start=start, end=end))
    events = [
        Event("mine", 10, 90), Event("mine", 10, 200, "DeviceType.CUDA"), Event("cudaEventSynchronize", 20, 30),
        Event("cudaMemcpyAsync", 31, 32), Event("cudaStreamSynchronize", 95, 96),
    ]
    assert host_synchronisations(events, "mine") == Counter(cudaEventSynchronize=1)
    with pytest.raises(InputError, match="no range"): host_synchronisations(events, "other")
    rounds = DeviceDecoder(tiny(), NGramDrafter()).speculate(PROMPT, SamplingParams(), 0)
    if not torch.cuda.is_available(): assert count_synchronisations(rounds, 3) == (Counter(), 3)


def test_weights_in_memory_are_checked():
    with pytest.raises(ModelError, match="no tensor"): Checkpoint({}, torch.float32, CPU)("model.norm.weight", 4)
    with pytest.raises(ModelError, match="shape"): Checkpoint({"a": torch.ones(3)}, torch.float32, CPU)("a", 4)
    from transformers import LlamaConfig, LlamaForCausalLM
    for tied in (True, False):
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                             num_attention_heads=2, tie_word_embeddings=tied)
        model = LlamaForCausalLM(config).eval()
        ids = torch.tensor([[1, 2, 3]])
        ours = as_llama(model)
        assert torch.allclose(ours.forward(ids, ours.new_cache(4)), model(ids).logits, atol=1e-5)


# A pair picks its loop

def pair_of(drafter=None): return Pair(tiny(context=400), drafter or head_drafter(tiny(context=400)))


def test_a_pair_says_which_loop_ran_and_on_a_cpu_the_hosts_does():
    for method in ("speculative", "plain"):
        by_host, by_device = (pair_of().generate(PROMPT, max_new_tokens=12, method=method, **more)
                              for more in ({}, dict(loop="device")))
        assert (by_host.loop, by_device.loop) == ("host", "device") and by_host.device == by_device.device == "cpu"
        assert by_host.generated_ids == by_device.generated_ids
        assert by_device.draft_time_total_ms is None if method == "plain" else by_device.draft_time_total_ms >= 0
    assert type(by_device).from_json(by_device.to_json()) == by_device


def test_on_a_gpu_a_pair_takes_the_devices_loop_where_it_can(fake, monkeypatch, recwarn):
    monkeypatch.setattr(plan, "is_capturable", lambda device: True)
    pair = pair_of()
    found = {name: pair.generate(PROMPT, seed=1, temperature=1.0, max_new_tokens=20, **more) for name, more in {
        "usual": {}, "again": {}, "plain": dict(method="plain"), "host": dict(loop="host"),
        "rule": dict(verify=block_verification), "mine": dict(verify=my_rule)}.items()}
    loops = {name: result.loop for name, result in found.items()}
    assert loops == dict(usual="device", again="device", plain="device", host="host", rule="device", mine="host")
    assert found["usual"].rounds == found["again"].rounds
    loops = [loop for decoders in pair.decoders.values() for decoder in decoders for loop in decoder.loops.values()]
    drafting = sum(loop.state.K > 0 for loop in loops)  # one loop for each method and rule, captured once
    assert 2 <= len(loops) <= 3 and drafting == len(loops) - 1
    assert len(fake.graphs) == 4 * drafting + 3 and not recwarn.list
    assert pair_of(MyLookup()).generate(PROMPT, max_new_tokens=4).loop == "host"


def test_a_loop_that_cannot_be_is_refused_before_anything_runs():
    rule = dict(verify=my_rule, loop="device")
    for pair, wrong, said in (
        (pair_of(), dict(loop="gpu"), "must be"), (pair_of(), rule, "rule of one's own"),
        (pair_of(), dict(loop="device", K="adaptive"), "CUDA graph for each"),
        (pair_of(MyLookup()), dict(loop="device"), r"\(MyLookup\) works on the host"),
    ):
        with pytest.raises(InputError, match=said): pair.generate(PROMPT, **wrong)
        assert not pair.decoders


def test_a_stream_of_the_devices_loop_may_be_left_and_the_pair_used_again():
    pair = pair_of()
    whole = pair.generate(PROMPT, max_new_tokens=20, loop="device")
    for event in pair.stream(PROMPT, max_new_tokens=20, loop="device"):
        if event.token is not None: break
    for _ in pair.stream(PROMPT, max_new_tokens=20, loop="device"):
        beside = pair.generate(PROMPT, max_new_tokens=20, loop="device")
        assert beside.rounds == whole.rounds
        break
    assert pair.generate(PROMPT, max_new_tokens=20, loop="device").rounds == whole.rounds


def test_threads_share_a_pair_with_the_devices_loop():
    pair = pair_of()
    def text(seed): return pair.generate(PROMPT, seed=seed, temperature=1.0, max_new_tokens=20, loop="device").rounds
    alone = [text(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool: assert list(pool.map(text, range(4))) == alone


# The default model

def test_greedy_text_of_the_default_model():
    model, tokenizer = load_model(fetch(), CPU, torch.float32), load_tokenizer(fetch())
    prompt = encode(tokenizer, "Monday, Tuesday, Wednesday,")
    expected = tokens_of(reference(model, NoDrafter(), prompt, room=16))
    for drafter in (NGramDrafter(), ModelDrafter(model.skip((3, 5, 9, 14, 25, 26)), model.vocab_size)):
        found = tokens_of(on_device(model, drafter, prompt, SamplingParams(), 0, 4, 16))
        assert_same_text(model, prompt, found, expected)


# On a GPU

@pytest.fixture
def exact():
    "Without TF32."
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def on_gpu(**options): return tiny(device="cuda", **options)


@cuda
@needs_gpu
@pytest.mark.parametrize("K", [1, 4])
def test_captured_is_step_by_step(exact, K):
    for drafter in drafters(on_gpu()).values():
        assert decode(on_gpu(), drafter, K=K, room=40) == decode(on_gpu(), drafter, K=K, room=40, graphs=False, ahead=0)
        for sampling in SAMPLINGS[1:]:
            first, again, other = (
                decode(on_gpu(), drafter, sampling=sampling, seed=seed, K=K, room=40) for seed in (1, 1, 2)
            )
            assert first == again != other


@cuda
@needs_gpu
def test_greedy_text_is_the_cpus(exact):
    for K in (1, 3, 6):
        for ends in (frozenset(), frozenset({3, 5})):
            for drafter in drafters(on_gpu()).values():
                found = tokens_of(on_device(on_gpu(), drafter, PROMPT, SamplingParams(), 0, K, 40, ends))
                expected = tokens_of(reference(tiny(), NoDrafter(), K=K, room=40, ends=ends))
                assert_same_text(tiny(), PROMPT, found, expected)


@cuda
@needs_gpu
def test_greedy_text_of_the_default_model_is_the_cpus(exact):
    try: fetch()
    except ModelError as error: pytest.skip(f"the default model is not on this machine: {error}")
    model, tokenizer = load_model(fetch(), CPU, torch.float32), load_tokenizer(fetch())
    there = load_model(fetch(), exact, torch.float32)
    prompt = encode(tokenizer, "Monday, Tuesday, Wednesday,")
    expected = tokens_of(reference(model, NoDrafter(), prompt, room=48))
    for drafter in (NoDrafter(), NGramDrafter(), ModelDrafter(there.skip((3, 5, 9, 14, 25, 26)), there.vocab_size)):
        found = tokens_of(on_device(there, drafter, prompt, SamplingParams(), 0, 4, 48))
        assert_same_text(model, prompt, found, expected)


@cuda
@needs_gpu
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_host_waits_once_a_round(ahead, temperature):
    target = on_gpu(context=400)
    for drafter in drafters(target).values():
        rounds = DeviceDecoder(target, drafter, ahead=ahead).speculate(
            PROMPT, SamplingParams(temperature), 0, K=3, max_new_tokens=300
        )
        for _ in range(5): next(rounds)
        waits, seen = count_synchronisations(rounds, 20)
        assert seen == 20 and waits == Counter(cudaEventSynchronize=20)


@cuda
@needs_gpu
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_no_step_synchronises_by_torchs_own_check(sampling):
    loop = DeviceLoop(on_gpu(), ModelDrafter(on_gpu(noise=.05), 24), sampling, 3, 256, graphs=False)
    with torch.inference_mode():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3): play_round(loop.steps, PhaseTimer())
        finally: torch.cuda.set_sync_debug_mode("default")


@cuda
@needs_gpu
def test_memory_does_not_grow_with_the_rounds():
    decoder = DeviceDecoder(on_gpu(context=600), ModelDrafter(on_gpu(noise=.05, context=600), 24))
    list(decoder.speculate(PROMPT, SamplingParams(1.0), 0, K=3, max_new_tokens=500))
    rounds = decoder.speculate(PROMPT, SamplingParams(1.0), 0, K=3, max_new_tokens=500)
    for _ in range(5): next(rounds)
    before = torch.cuda.memory_allocated()
    for _ in rounds: assert torch.cuda.memory_allocated() <= before


@cuda
@needs_gpu
def test_the_distribution_on_a_gpu(exact):
    """The first two tokens of a tiny model at temperature 1, 3,000 texts; the expected law from float64 softmaxes on
    the CPU."""
    V, N, target, prompt = 6, 3000, tiny(6), [1, 2, 3]
    there, draft = on_gpu(vocab=6), on_gpu(vocab=6, noise=.2)
    def row(text):
        logits = target.forward(torch.tensor([[*prompt, *text]]), target.new_cache(8), last=1)[0, 0]
        return logits.double().softmax(-1).numpy()
    distribution = {(a, b): row([])[a] * row([a])[b] for a in range(V) for b in range(V)}
    decoder = DeviceDecoder(there, ModelDrafter(draft, V))
    def begins(seed):
        return tuple(tokens_of(decoder.speculate(prompt, SamplingParams(1.0), seed, K=1, max_new_tokens=3))[:2])
    counts = Counter(begins(seed) for seed in range(N))
    small = [text for text, w in distribution.items() if w * N < 5]
    cells = [(counts[text], N * w) for text, w in distribution.items() if text not in small]
    cells += [(sum(counts[t] for t in small), N * sum(distribution[t] for t in small) + 1e-9)]
    statistic = sum((found - expected) ** 2 / expected for found, expected in cells)
    assert stats.chi2.sf(statistic, len(cells) - 1) > ALARM
