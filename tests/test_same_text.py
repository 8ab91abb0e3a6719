"""The text belongs to the seed: where draft tokens were certain, speculative decoding writes plain decoding's tokens,
at any temperature, with any drafter, K, batch, stream, prefix and loop."""
from functools import cache
from itertools import product

import pytest
import torch

from helpers import NIGHTLY, ids_of, real
from helpers_drafters import random_head, random_target
from helpers_text import talker
from specdec.drafters.adaptive import AdaptiveLookahead
from specdec.drafters.base import Draft, DrafterBase, NoDrafter, WrapperDrafter, WrapperState
from specdec.drafters.choose import HybridDrafter
from specdec.drafters.colder import TemperatureScaledDrafter
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.lookup import NGramDrafter, SuffixDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.translate import TokenIntersectionDrafter
from specdec.drafters.tree import TreeDrafter
from specdec.engine.batch import speculate_batch
from specdec.engine.request import Request
from specdec.errors import InputError
from specdec.loop import speculate
from specdec.models.hub import encode
from specdec.models.loading import load
from specdec.models.protocol import read_tokens
from specdec.pair import Pair
from specdec.sampling import SamplingParams, SeededRandom
from specdec.verify import sample_and_match, speculative_sampling

PROMPT, OTHERS = [1, 5, 2, 7, 1, 5, 2], [[3, 1, 3, 1], [7, 7, 2, 7, 7], [5, 2, 4, 5, 2, 4, 5], [1, 5, 2, 8]]
LIKELIEST = SamplingParams()
WARM = {"T = .7": SamplingParams(.7), "T = 1": SamplingParams(1.0), "hot, all cuts": SamplingParams(1.6, 12, .9, .02)}


@cache
def head_target():
    import tempfile
    with tempfile.TemporaryDirectory() as folder: return random_target(folder)


@cache
def drafters():
    "Of the head's target: each kind, and what is put together of them."
    target = head_target()
    head = random_head(target)
    noisy = talker(seed=4, vocab=target.vocab_size, tokenizer=False)
    return {
        "n-gram": NGramDrafter(), "suffix": SuffixDrafter(), "head": HeadDrafter(head, target),
        "head that stops": HeadDrafter(head, target, .2), "colder": TemperatureScaledDrafter(HeadDrafter(head, target)),
        "itself": ModelDrafter(target, target.vocab_size), "model": ModelDrafter(noisy, target.vocab_size),
        "hybrid": HybridDrafter(SuffixDrafter(), HeadDrafter(head, target), c=(0, 0), verify=0),
        "tree": TreeDrafter(head, target), "tree of one shape": TreeDrafter(head, target, shape=[(0,), (1,), (0, 0)]),
    }


def text_of(drafter, sampling=WARM["T = 1"], seed=0, K=4, count=24, prompt=PROMPT, target=None, **more):
    target = target or head_target()
    more = dict(draft_sampling=LIKELIEST) | more
    return ids_of(speculate(target, drafter, prompt, sampling, SeededRandom(seed), K, count, **more))[:count]


@cache
def plain(sampling, seed, prompt=tuple(PROMPT)): return text_of(NoDrafter(), sampling, seed, prompt=list(prompt))


@pytest.mark.parametrize("sampling", WARM)
@pytest.mark.parametrize("name", ["n-gram", "suffix", "head", "head that stops", "colder", "itself", "model", "hybrid"])
def test_the_tokens_are_those_of_plain_decoding(name, sampling):
    "Eight of the 24 combinations in `make test`: 72 texts. Nightly all of them, with 8 seeds: 576."
    sampling, accepted = WARM[sampling], 0
    for seed, K in product(range(8 if NIGHTLY else 3), (1, 4, 15)):
        found = list(speculate(head_target(), drafters()[name], PROMPT, sampling, SeededRandom(seed), K, 24,
                               draft_sampling=LIKELIEST))
        assert ids_of(found)[:24] == plain(sampling, seed)
        accepted += sum(r.accepted for r in found)
    assert accepted  # else nothing was tried


@pytest.mark.parametrize("name", ["tree", "tree of one shape"])
def test_so_are_those_of_a_tree(name):
    "Rows of a tree keep no bits, but no near-tie is among these."
    target = head_target()
    rounds = 0
    for seed, K in product(range(6), (1, 3, 8)):
        due = plain(WARM["T = 1"], seed)
        found = list(speculate(target, drafters()[name], PROMPT, WARM["T = 1"], SeededRandom(seed), K, 24))
        assert ids_of(found)[:24] == due
        rounds += sum(r.accepted > 0 for r in found)
    assert rounds > 20


def test_a_K_that_changes_and_a_batch_and_a_prefix_change_nothing():
    pair = Pair(head_target(), drafters()["hybrid"])
    settings = dict(temperature=1.0, max_new_tokens=16, ignore_eos=True, seed=11, same_text=True)
    alone = [pair.generate(prompt, method="plain", **settings | dict(seed=11 + i)) for i, prompt in enumerate(OTHERS)]
    due = [result.generated_ids for result in alone]
    for K in (2, 5, "adaptive", AdaptiveLookahead(3, 1, 6, cooldown_steps=1)):
        for size in (1, 2, 4):
            found = pair.generate(OTHERS, K=K, batch_size=size, **settings)
            assert [result.generated_ids for result in found] == due
            assert all(result.same_text_as_plain for result in (*found, *alone))
        *_, end = pair.stream(OTHERS[0], K=K, **settings)
        assert end.result.generated_ids == due[0]
        known = pair.prefill(OTHERS[3][:3])
        assert pair.generate(OTHERS[3], K=K, prefilled=known, **settings | dict(seed=14)).generated_ids == due[3]


@pytest.mark.parametrize("name", ["n-gram", "suffix", "head", "model", "hybrid", "tree", "tree of one shape"])
def test_the_devices_loop_writes_the_hosts_text(name):
    pair, rounds = Pair(head_target(), drafters()[name]), 0
    for n, (seed, temperature) in enumerate(product(range(4), (.7, 1.0))):
        if n >= 4 and rounds and not NIGHTLY: break  # half of them, and all where nothing was accepted so far
        settings = dict(temperature=temperature, seed=seed, max_new_tokens=24, ignore_eos=True, same_text=True)
        due = pair.generate(PROMPT, method="plain", **{**settings, "same_text": None})
        for loop in ("host", "device"):
            found = pair.generate(PROMPT, loop=loop, **settings)
            assert found.generated_ids == due.generated_ids and found.same_text_as_plain
            rounds += found.num_accepted > 0
    assert rounds


def test_the_device_draws_the_hosts_uniform_numbers():
    both = SeededRandom(5), SeededRandom(5)
    together = torch.rand(700, generator=both[0].generator, dtype=torch.float64)
    assert together.tolist() == [both[1].uniform() for _ in range(700)]


def test_a_draft_model_of_another_vocabulary_drafts_the_same_text():
    target, draft = talker(), talker(seed=3, vocab=talker().vocab_size)
    pair = Pair(target, TokenIntersectionDrafter(target, draft))
    settings = dict(temperature=1.0, max_new_tokens=20, ignore_eos=True)
    for seed in range(6):
        due = pair.generate("red green blue red", method="plain", seed=seed, **settings)
        found = pair.generate("red green blue red", same_text=True, seed=seed, **settings)
        assert found.generated_ids == due.generated_ids and found.text == due.text and found.same_text_as_plain


# What a result says, and the switch

def test_a_result_says_which_it_was():
    target = head_target()
    def told(drafter, **settings):
        result = Pair(target, drafter).generate(PROMPT, max_new_tokens=20, ignore_eos=True, seed=1, **settings)
        assert type(result).from_json(result.to_json()).same_text_as_plain == result.same_text_as_plain
        return result.same_text_as_plain
    model, head = drafters()["model"], drafters()["colder"]
    assert told(model) is told(head) is told(NGramDrafter(), temperature=1.0) is True
    assert told(model, temperature=1.0, method="plain") is told(model, temperature=1.0, same_text=True) is True
    assert told(model, temperature=1.0, same_text=False) is told(head, temperature=1.0, same_text=False) is False
    assert told(head, temperature=1.0) is told(model, temperature=1.0) is False  # drawn ones are accepted more often
    assert told(head, temperature=1.0, verify=speculative_sampling) is False
    assert told(model, temperature=1.0, verify=sample_and_match) is True  # whatever was drafted
    for name in ("model", "head"):
        for same in (True, False):
            assert told(drafters()[name], temperature=1.0, same_text=same, loop="device") is same


def test_the_switch_takes_true_and_false_and_no_other_rule_beside_it():
    pair = Pair(head_target(), NGramDrafter())
    with pytest.raises(InputError, match="same_text must be True or False"): pair.generate(PROMPT, same_text="yes")
    with pytest.raises(InputError, match="this verify rule would decide"):
        pair.generate(PROMPT, same_text=True, verify=speculative_sampling, temperature=1.0)


class Stubborn(WrapperDrafter):
    "Draws its tokens whatever it is asked for, as a drafter of one's own may."
    def wrap(self, inner, tokens, eos_ids):
        class State(WrapperState):
            def propose(self, K, sampling, rng): return self.inner.propose(K, WARM["T = 1"], rng)
        return State(inner)


def test_with_the_switch_a_drafter_that_draws_all_the_same_changes_nothing():
    pair = Pair(head_target(), Stubborn(drafters()["model"]))
    settings = dict(temperature=1.0, max_new_tokens=30, ignore_eos=True)
    drawn = 0
    for seed in range(5):
        due = pair.generate(PROMPT, method="plain", seed=seed, **settings).generated_ids
        assert pair.generate(PROMPT, same_text=True, seed=seed, **settings).generated_ids == due
        drawn += pair.generate(PROMPT, seed=seed, **settings).generated_ids != due
    assert drawn  # its q is reported, so rejection sampling judges it


# Negative controls: what would break it is caught

def parts(text): return any(text(seed) != plain(WARM["T = 1"], seed) for seed in range(5))


def test_a_rule_that_takes_two_numbers_a_token_is_caught():
    def wasteful(p, q, tokens, rng):
        rng.uniform()
        return sample_and_match(p, q, tokens, rng)
    assert parts(lambda seed: text_of(drafters()["head"], seed=seed, verify=wasteful))
    assert parts(lambda seed: text_of(drafters()["head"], seed=seed, verify=speculative_sampling))
    assert not parts(lambda seed: text_of(drafters()["head"], seed=seed, verify=sample_and_match))


class Thief(DrafterBase):
    "Wrong: drafts a certain token, and takes a number of the target's for it."
    layers = ()
    def __init__(self, rng): self.rng = rng
    def start(self, *told, **more): return self
    def propose(self, K, sampling, rng):
        self.rng.uniform()
        return Draft([1])
    def commit(self, tokens, features): pass


def test_a_drafter_that_takes_one_of_the_targets_numbers_is_caught():
    def robbed(seed, own):
        rng = SeededRandom(seed)
        thief = Thief(rng.spawn() if own else rng)
        return ids_of(speculate(head_target(), thief, PROMPT, WARM["T = 1"], rng, 4, 24))[:24]
    assert parts(lambda seed: robbed(seed, own=False)) and not parts(lambda seed: robbed(seed, own=True))


def test_a_batch_that_shares_a_stream_is_caught():
    target, sampling = head_target(), WARM["T = 1"]
    def batch(sources):
        requests = [Request(target, prompt, drafters()["head"], sampling, rng, 4, 30, draft_sampling=LIKELIEST)
                    for prompt, rng in zip(OTHERS, sources)]
        list(speculate_batch(target, requests, 4))
        return [request.tokens[len(prompt):][:30] for request, prompt in zip(requests, OTHERS)]
    due = [ids_of(speculate(target, NoDrafter(), prompt, sampling, SeededRandom(i), 1, 30))
           for i, prompt in enumerate(OTHERS)]
    shared = SeededRandom(0)
    assert batch(map(SeededRandom, range(4))) == due != batch([shared] * 4)


def test_a_drawn_draft_has_a_stream_of_its_own():
    "Else what it draws and what the target draws hang together; and the target's first token is plain decoding's."
    rng = SeededRandom(3)
    child, again = rng.spawn(), SeededRandom(3).spawn()
    numbers = [child.uniform() for _ in range(50)]
    assert numbers == [again.uniform() for _ in range(50)]
    assert not set(numbers) & {rng.uniform() for _ in range(5000)}
    another = rng.spawn()  # of a second sequence that has the same source: else both draft with the same numbers
    assert not {another.uniform() for _ in range(50)} & set(numbers)
    assert SeededRandom(-1).spawn().uniform() != SeededRandom(1).spawn().uniform()
    for seed in range(5):
        drawn = text_of(drafters()["model"], seed=seed, draft_sampling=None)
        assert drawn[0] == plain(WARM["T = 1"], seed)[0]


# The real model

@pytest.mark.parametrize("loop", ["host", pytest.param("device", marks=pytest.mark.slow)])
def test_the_default_pair_writes_plain_decodings_text(loop):
    target = real()
    default = Pair(target)
    alone = Pair(target, default.drafter.members[1])
    asked = "Repeat this: one two three one two three.", "Count from one to twenty."
    chats = [encode(target.tokenizer, [{"role": "user", "content": text}]) for text in asked]
    for seed, temperature in ((1, .7), (2, 1.0)):
        settings = dict(temperature=temperature, seed=seed, max_new_tokens=12, same_text=True)
        due = [default.generate(ids, method="plain", **settings | dict(seed=seed + i)) for i, ids in enumerate(chats)]
        for pair, more in product((default, alone), (dict(K=5), dict(K="adaptive"), dict(K=3, batch_size=2))):
            if loop == "device" and more["K"] == "adaptive": continue
            found = pair.generate(chats, loop=loop, **settings, **more)
            assert [one.generated_ids for one in found] == [one.generated_ids for one in due]
            assert all(one.same_text_as_plain for one in found)
            # beside other work a clock may find that nothing pays, with any K at most; the head alone has a fixed K
            assert pair is default or more["K"] == "adaptive" or any(one.num_accepted for one in found)


# Where a row's bits depend on the rows beside it

def distance_from_a_tie(target, prompt, ids, sampling, seed, other) -> float: # of probability
    "How far the uniform number of the next token lies from the other token's share of [0, 1)."
    cache = target.new_cache(len(prompt) + len(ids) + 1)
    logits, _ = read_tokens(target, prompt, cache, (), 1)
    for token in ids: logits, _ = read_tokens(target, [token], cache, ())
    p = sampling.probs(logits)[-1].double()
    rng = SeededRandom(seed)
    u = [rng.uniform() for _ in range(len(ids) + 1)][-1] * p.sum()
    end = p.cumsum(-1)[other]
    return float(max(u - end, end - p[other] - u, 0.0))


@pytest.mark.parametrize("dtype", ["int4", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_elsewhere_a_text_parts_at_a_near_tie_only(dtype):
    "Rounding moves a token's share of [0, 1) by so little; a rule that takes two numbers parts anywhere."
    target, sampling = load("smollm2", "cpu", dtype), WARM["T = 1"]
    prompt = encode(target.tokenizer, [{"role": "user", "content": "Repeat this twice: one two three four five six."}])
    def parted(rule):
        far, tried = [], 0
        for seed in range(4):
            due = text_of(NoDrafter(), sampling, seed, prompt=prompt, target=target)
            rounds = list(speculate(target, SuffixDrafter(), prompt, sampling, SeededRandom(seed), 5, 24, verify=rule))
            found, tried = ids_of(rounds)[:24], tried + sum(r.tried for r in rounds)
            same = next((i for i, (a, b) in enumerate(zip(due, found)) if a != b), None)
            if same is None: continue
            far.append(distance_from_a_tie(target, prompt, due[:same], sampling, seed, found[same]))
        assert tried > 20
        return far
    def wasteful(p, q, tokens, rng):
        rng.uniform()
        return sample_and_match(p, q, tokens, rng)
    assert max(parted(sample_and_match), default=0.0) < .02 and max(parted(wasteful)) > .1
