"The loop on tiny random models in float32: equal texts, exact laws, caches, ends, features, mutants to be caught."
import copy
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import CPU, Failing, examples, greedy, ids_of, tiny
from specdec.cache import CacheFullError, KVCache
from specdec.drafters.base import Draft, NoDrafter
from specdec.drafters.lookup import NGramDrafter
from specdec.drafters.model import ModelDrafter, ModelState
from specdec.errors import InputError, ModelError, NumericalError
from specdec.loop import speculate, up_to_end
from specdec.lossless.enumerate import exact_distribution
from specdec.lossless.proof import Remembering
from specdec.models.transformers import TransformersLM
from specdec.result import Round
from specdec.sampling import SamplingParams, SeededRandom
from specdec.verify import speculative_sampling


def decode(target, drafter, prompt, temperature=0.0, K=3, max_new_tokens=20, seed=0, **options) -> list[Round]:
    sampling, rng = SamplingParams(temperature), SeededRandom(seed)
    return list(speculate(target, drafter, prompt, sampling, rng, K, max_new_tokens, **options))


def drafters(target, seed):
    "One of each kind, from hopeless to perfect."
    V = target.vocab_size
    return {"none": NoDrafter(),
            "n-gram": NGramDrafter(),
            "itself": ModelDrafter(target, V),
            "skip": ModelDrafter(target.skip([1]), V),
            "noisy": ModelDrafter(tiny(V, seed=seed, noise=0.05), V),
            "smaller": ModelDrafter(tiny(V, hidden=8, layers=1, seed=seed + 1), V),
            "short memory": ModelDrafter(tiny(V, seed=seed, context=12), V)}


class Recording:
    "Passes everything on, and checks on the way what the loop promises to a drafter."
    def __init__(self, inner, layers=()):
        self.inner, self.layers, self.tokens, self.features, self.asked = inner, layers, [], [], []

    def start(self, tokens, features, limit, eos_ids):
        self.ends = eos_ids
        self.tokens, self.features, self.limit = list(tokens), [] if features is None else [features], limit
        self.state = self.inner.start(tokens, features, limit, eos_ids)
        return self
    def commit(self, tokens, features):
        assert len(tokens) > 0
        self.tokens += tokens
        if features is not None: self.features.append(features)
        assert len(self.tokens) <= self.limit
        self.state.commit(tokens, features)
    def propose(self, K, sampling, rng):
        assert K >= 1
        self.asked.append(K)
        return self.state.propose(K, sampling, rng)


# Greedy text


@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 10**6), K=st.integers(1, 7), length=st.integers(1, 12), count=st.integers(1, 24),
       vocab=st.sampled_from([16, 33, 64]))
def test_greedy_text_is_that_of_plain_decoding(seed, K, length, count, vocab):
    target = tiny(vocab, seed=seed)
    prompt = torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    expected = greedy(target, prompt, count)
    for name, drafter in drafters(target, seed).items():
        rounds = decode(target, drafter, prompt, K=K, max_new_tokens=count)
        assert ids_of(rounds) == expected, name
        assert rounds[0].drafted == [] and len(rounds[0].emitted) == 1
        for r in rounds[1:]:
            assert len(r.drafted) <= K and 0 <= r.accepted <= len(r.drafted) and len(r.emitted) == r.accepted + 1
            assert r.emitted[:-1] == r.drafted[:r.accepted]
        if name == "itself": assert all(r.accepted == len(r.drafted) for r in rounds)


def test_the_hypotheses_above_reach_rejections_and_full_acceptance():
    target, seen = tiny(seed=4), set()
    for drafter in drafters(target, 4).values():
        for r in decode(target, drafter, [1, 2, 3, 1, 2], max_new_tokens=40):
            seen.add((len(r.drafted) > 0, r.accepted == len(r.drafted), r.accepted > 0))
    assert {(True, True, True), (True, False, True), (True, False, False), (False, True, False)} <= seen


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("K", [1, 2, 5])
def test_a_target_that_drafts_for_itself_accepts_everything(temperature, K):
    for seed in range(4):
        target = tiny(seed=seed)
        rounds = decode(target, ModelDrafter(target, target.vocab_size), [1, 2, 3], temperature, K, 40, seed)
        assert sum(len(r.drafted) for r in rounds) == sum(r.accepted for r in rounds) > 0


def test_same_seed_same_tokens():
    target = tiny()
    for drafter in drafters(target, 0).values():
        first, again, other = (decode(target, drafter, [1, 2], 1.0, seed=seed) for seed in (3, 3, 4))
        assert first == again != other


# The exact law: every branch of the randomness is walked, with its weight

def plain_distribution(target, prompt, sampling, count) -> dict:
    "Joint law of the first tokens, from uncached forwards in float64."
    distribution = {(): 1.0}
    for _ in range(count):
        grown = {}
        for prefix, weight in distribution.items():
            ids = torch.tensor([[*prompt, *prefix]])
            p = sampling.probs(target.forward(ids, target.new_cache(ids.shape[1]))[0, -1]).double()
            grown |= {(*prefix, token): weight * w for token, w in enumerate((p / p.sum()).tolist()) if w > 0}
        distribution = grown
    return distribution


def speculative_distribution(target, drafter, prompt, sampling, count, K, verify=None) -> dict:
    def run(rng):
        tokens = []
        for r in speculate(target, drafter, prompt, sampling, rng, K, max_new_tokens=count + 1, verify=verify):
            tokens += r.emitted
            if len(tokens) >= count: return tuple(tokens[:count])
    return exact_distribution(run)


def distance(a, b) -> float: # total variation
    return sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys()) / 2


SMALL = dict(vocab=4, hidden=8, layers=2, seed=8)
PROMPT, WARM = [1, 2, 1], SamplingParams(1.0, top_k=3)


def relative(): return tiny(**SMALL, noise=0.2)


def error(drafter, K, verify=None) -> float: # total variation
    "How far the law of three tokens is from the target's."
    target = tiny(**SMALL)
    distribution = speculative_distribution(target, drafter, PROMPT, WARM, 3, K, verify)
    return distance(distribution, plain_distribution(target, PROMPT, WARM, 3))


class DropsTheEndState(ModelState):
    "Wrong: leaves out the end that it drew."
    def propose(self, K, sampling, rng):
        draft = super().propose(K, sampling, rng)
        n = len(draft.tokens) - (draft.tokens[-1] in self.eos_ids)
        return Draft(draft.tokens[:n], draft.q[:n] if n else None)

class DropsTheEnd(ModelDrafter): State = DropsTheEndState


@pytest.mark.parametrize("kind, exact", [(ModelDrafter, True), (DropsTheEnd, False)], ids=["kept", "dropped"])
def test_the_distribution_of_texts_that_end_in_a_draft(kind, exact):
    target, ends = tiny(**SMALL), {0}

    def text(rng):
        rounds = speculate(target, kind(relative(), 4), PROMPT, WARM, rng, 2, 3, ends)
        return tuple(ids_of(rounds))
    expected = {}
    for tokens, weight in plain_distribution(target, PROMPT, WARM, 3).items():
        ended = tuple(up_to_end(list(tokens), ends))
        expected[ended] = expected.get(ended, 0) + weight
    assert (distance(exact_distribution(text), expected) < 1e-6) == exact and any(len(ended) < 3 for ended in expected)


def test_a_drafter_is_told_where_texts_end():
    drafter = Recording(NGramDrafter())
    decode(tiny(), drafter, [1, 2, 3], eos_ids=[4, 5])
    assert drafter.ends == {4, 5}


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("kind", ["model", "n-gram"])
def test_joint_distribution_of_three_tokens_is_exactly_the_targets(K, kind):
    drafter = ModelDrafter(relative(), 4) if kind == "model" else NGramDrafter()
    assert error(drafter, K) < 1e-6


def test_a_drafter_may_use_any_q_that_it_reports():
    class BoldState(ModelState):
        def propose(self, K, sampling, rng): return super().propose(K, SamplingParams(0.5), rng)
    class Bold(ModelDrafter): State = BoldState
    assert error(Bold(relative(), 4), 2) < 1e-6


# Mutants: each is a mistake of a real project, and each check must see it

class Sharpened:
    def __init__(self, rng): self.rng = rng
    def categorical(self, weights): return self.rng.categorical(weights ** 2)


class MisreportingState(ModelState):
    "Trap 1: draws at temperature ½, reports q at temperature 1."
    def propose(self, K, sampling, rng): return super().propose(K, sampling, Sharpened(rng))

class Misreporting(ModelDrafter): State = MisreportingState


class GreedyDraftSoftQState(ModelState):
    "Trap 6: takes the likeliest token, reports the softmax."
    class Likeliest:
        def categorical(self, weights): return weights.argmax().item()
    def propose(self, K, sampling, rng): return super().propose(K, sampling, self.Likeliest())

class GreedyDraftSoftQ(ModelDrafter): State = GreedyDraftSoftQState


class EndsEarlyState(ModelState):
    "Trap 7: ends the draft at an unlikely token, and throws that token away."
    def propose(self, K, sampling, rng):
        draft = super().propose(K, sampling, rng)
        keep = next((i for i, t in enumerate(draft.tokens) if draft.q[i][t] < 0.4), len(draft.tokens))
        return Draft(draft.tokens[:keep], draft.q[:keep])

class EndsEarly(ModelDrafter): State = EndsEarlyState


def drops_bonus(p, q, tokens, rng):
    "Trap 5: the bonus token from the residual of the last draft position."
    num_accepted, next_token = speculative_sampling(p, q, tokens, rng)
    if not num_accepted == len(tokens) > 0: return num_accepted, next_token
    return num_accepted, rng.categorical((p[num_accepted - 1] - q[num_accepted - 1]).clip(min=0) + 1e-30)


@pytest.mark.parametrize("mutant", [Misreporting, GreedyDraftSoftQ, EndsEarly])
def test_the_distribution_catches_drafters_that_misreport(mutant): assert error(mutant(relative(), 4), 2) > 0.01


def test_the_distribution_catches_a_wrong_bonus(): assert error(ModelDrafter(relative(), 4), 1, drops_bonus) > 0.01


class WrongRollback(KVCache):
    "Keeps one token too few, one too many, or everything."
    def rollback(self, length):
        kept = {"short": length - 1, "long": min(self.length, length + 1), "never": self.length}
        super().rollback(kept[self.mistake])


def with_wrong_rollback(target, mistake):
    def new_cache(capacity):
        cache = WrongRollback(len(target.layers), capacity + 200)
        cache.mistake = mistake
        return cache
    wrong = copy.copy(target)
    wrong.new_cache = new_cache
    return wrong


class BonusTwice:
    "A target that reads the bonus token when it is made, and again in the next round."
    def __init__(self, target): self.target = target
    def __getattr__(self, name): return getattr(self.target, name)
    def new_cache(self, capacity):
        self.expected = None
        return self.target.new_cache(capacity + 200)
    def forward(self, ids, cache, **options):
        all_accepted = self.expected == cache.length  # nothing was rolled back
        if all_accepted: self.target.forward(ids[:, :1], cache)
        logits = self.target.forward(ids, cache, **options)
        self.expected = cache.length if ids.shape[1] > 1 and options.get("last") is None else None
        return logits


def caught(wrong, target) -> bool:
    "Whether greedy equality with some drafter notices."
    prompt = [1, 2, 3, 1, 2]
    expected = greedy(target, prompt, 24)
    for name, drafter in drafters(target, 0).items():
        if name != "none" and ids_of(decode(wrong, drafter, prompt, max_new_tokens=24)) != expected: return True
    return False


@pytest.mark.parametrize("mistake", ["short", "long", "never"])
def test_greedy_equality_catches_a_wrong_rollback(mistake):
    assert caught(with_wrong_rollback(tiny(), mistake), tiny())


def test_greedy_equality_catches_a_bonus_that_is_read_twice():
    assert caught(BonusTwice(tiny()), tiny())
    assert not caught(tiny(), tiny())


class OneShortState(ModelState):
    "Trap 5: overlooks that after full acceptance two tokens are unread."
    def distribution(self, unread, sampling):
        if self.cache.length: unread = unread[-1:]
        return super().distribution(unread, sampling)

class OneShort(ModelDrafter): State = OneShortState


def test_self_drafting_catches_a_draft_cache_with_a_hole():
    target = tiny()
    rounds = decode(target, OneShort(target, 24), [1, 2, 3], 1.0, 3, 40)
    assert sum(r.accepted for r in rounds) < sum(len(r.drafted) for r in rounds)


# Caches

@pytest.mark.parametrize("K", [1, 3, 6])
def test_both_caches_follow_the_text(K):
    target, caches = tiny(), []
    watched = copy.copy(target)
    watched.new_cache = lambda capacity: caches.append(target.new_cache(capacity)) or caches[-1]
    full = 0
    for draft in (tiny(noise=0.05), target.skip([1]), target):
        drafter, length = Remembering(ModelDrafter(draft, 24)), 3
        for _i, r in enumerate(speculate(watched, drafter, [1, 2, 3], SamplingParams(), SeededRandom(0), K, 30)):
            length += len(r.emitted)
            assert caches[-1].length == length - 1
            if not r.drafted: continue  # the prompt's token, or a last round with room for one
            assert length - drafter.state.cache.length == (2 if r.accepted == len(r.drafted) else 1)
            full += r.accepted == len(r.drafted)
    assert full > 0


# Where a text ends

class Recital:
    "A target that recites one text, with a context of 12."
    vocab_size, context_length, device = 50, 12, CPU
    def __init__(self, text): self.text = torch.tensor(text)
    def new_cache(self, capacity): return KVCache(1, capacity)
    def forward(self, ids, cache, last=None, layers=()):
        at, nothing = cache.length, torch.zeros(1, 1, ids.shape[1], 1)
        cache.append(0, nothing, nothing)
        logits = 9.0 * F.one_hot(self.text[at + 1:cache.length + 1], self.vocab_size)
        return logits[None, -last:] if last else logits[None]


class Cheat(NoDrafter):
    "A drafter that knows the whole text, and gets a share of it wrong."
    def __init__(self, text, mistakes=0.0): self.text, self.mistakes, self.random = text, mistakes, Random(0)
    def start(self, tokens, features, limit, eos_ids):  # for one text: its own state
        self.at = len(tokens)
        return self
    def commit(self, tokens, features): self.at += len(tokens)
    def propose(self, K, sampling, rng):
        known = self.text[self.at:self.at + K]
        return Draft([token ^ 1 if self.random.random() < self.mistakes else token for token in known])


TEXT = list(range(20, 40))


def recite(K, mistakes=0.0, **limits):
    "The rounds of a target that recites after two tokens of the text."
    return decode(Recital(TEXT), Cheat(TEXT, mistakes), TEXT[:2], K=K, **({"max_new_tokens": 128} | limits))


@pytest.mark.parametrize("end, expected", [
    pytest.param(25, [22, 23, 24, 25], id="inside a draft that was accepted"),
    pytest.param(22, [22], id="the first token"),
    pytest.param(23, [22, 23], id="the first of a draft"),
    pytest.param(27, [22, 23, 24, 25, 26, 27], id="the bonus token"),
    pytest.param(19, list(range(22, 32)), id="never said"),
])
def test_a_recital_stops_at_its_end(end, expected): assert ids_of(recite(4, eos_ids={end})) == expected


def test_a_recital_is_as_long_as_asked():
    for count in range(1, 10): assert ids_of(recite(4, max_new_tokens=count)) == TEXT[2:2 + count]


@pytest.mark.parametrize("mistakes", [0.0, 1 / 3, 1.0])
def test_a_recital_fills_its_context_to_the_last_place(mistakes):
    for K in range(1, 12): assert ids_of(recite(K, mistakes)) == TEXT[2:12]


def test_the_last_round_drafts_only_what_fits(): assert [len(r.drafted) for r in recite(4)] == [0, 4, 3]


def test_a_prompt_that_fills_the_context_is_refused():
    with pytest.raises(InputError, match="nothing could be added"): decode(Recital(TEXT), NoDrafter(), TEXT[:12])


@pytest.mark.parametrize("tokens, expected", [([5, 6, 7, 8], [5, 6, 7]), ([5, 6], [5, 6]), ([7, 7], [7]), ([], [])])
def test_tokens_up_to_an_end(tokens, expected): assert up_to_end(tokens, {7}) == expected


def test_end_of_sequence_inside_a_draft():
    target = tiny(seed=4)
    expected = greedy(target, [1, 2, 3], 24)
    for at, end in enumerate(expected):
        if end in expected[:at]: continue  # only first occurrences end a text
        rounds = decode(target, ModelDrafter(target, 24), [1, 2, 3], K=5, max_new_tokens=24, eos_ids={end})
        assert ids_of(rounds) == expected[:at + 1]


@pytest.mark.parametrize("K", [1, 4, 50])
def test_max_new_tokens_inside_a_round_and_a_full_context(K):
    target = tiny(context=16)
    expected = greedy(target, [1, 2, 3], 13)
    for drafter in (NGramDrafter(), ModelDrafter(target, 24), NoDrafter()):
        for count in (1, 2, 3, 7, 13):
            assert ids_of(decode(target, drafter, [1, 2, 3], K=K, max_new_tokens=count)) == expected[:count]
        for count in (14, 1000):
            assert ids_of(decode(target, drafter, [1, 2, 3], K=K, max_new_tokens=count)) == expected
    assert ids_of(decode(target, NoDrafter(), [1] * 15, max_new_tokens=5)) == greedy(target, [1] * 15, 1)


def test_a_drafter_is_never_asked_for_more_than_fits():
    target = tiny(context=16)
    recording = Recording(ModelDrafter(target, 24))
    decode(target, recording, [1, 2, 3], K=4, max_new_tokens=100)
    assert recording.asked == [4, 4, 1] and recording.limit == 16


# Features

def test_features_align_with_the_tokens_they_predict():
    target = tiny()
    recording = Recording(ModelDrafter(tiny(noise=0.05), 24), layers=(1, 3))
    rounds = decode(target, recording, [1, 2, 3, 4], K=3, max_new_tokens=25)
    assert recording.tokens == [1, 2, 3, 4, *ids_of(rounds)]
    assert [len(f) for f in recording.features] == [4] + [len(r.emitted) for r in rounds[1:]]
    ids = torch.tensor([recording.tokens[:-1]])
    logits, features = target.forward(ids, target.new_cache(64), layers=(1, 3))
    # row i is at the position before token i + 1 …
    assert torch.allclose(torch.cat(recording.features), features[0], atol=1e-5)
    assert logits[0, 3:].argmax(-1).tolist() == recording.tokens[4:]                   # … and that position predicts it


# Errors

@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_broken_logits_name_the_step(value):
    with pytest.raises(NumericalError, match="The target, after the prompt"):
        decode(Failing(tiny(), 0, value), NoDrafter(), [1, 2, 3])
    with pytest.raises(NumericalError, match="The target, after 6 tokens"):
        decode(Failing(tiny(), 6, value), NoDrafter(), [1, 2, 3])


# What else comes from outside

def test_a_rule_that_answers_rubbish_is_named_and_ends_the_text():
    said = []
    def rubbish(p, q, tokens, rng): return len(tokens) + 1, 0
    with pytest.raises(ModelError, match="verify rule rubbish returned"):
        said.extend(speculate(tiny(), NGramDrafter(), [1, 2, 1, 2], SamplingParams(1.0), SeededRandom(0),
                              verify=rubbish))


def test_more_tokens_than_memory_is_said_in_words():
    "A model without a position limit serves any number, as far as there is memory for its cache."
    from transformers import BloomConfig, BloomForCausalLM
    module = BloomForCausalLM(BloomConfig(vocab_size=24, hidden_size=64, n_layer=1, n_head=2)).float()
    model = TransformersLM(module)
    with pytest.raises(CacheFullError, match="no memory for a cache of 10000000000002 positions"):
        list(speculate(model, NoDrafter(), [1, 2], SamplingParams(), SeededRandom(0), max_new_tokens=10 ** 13))
    assert len(ids_of(speculate(model, NoDrafter(), [1, 2], SamplingParams(), SeededRandom(0), max_new_tokens=3))) == 3


@pytest.mark.parametrize("form", [np.array, torch.tensor], ids=["NumPy", "torch"])
def test_numbers_of_numpy_and_torch_are_as_good_as_plain_ones(form):
    plain, given = (
        list(speculate(
            tiny(), NGramDrafter(), f([1, 2, 1, 2]), SamplingParams(f(1)), SeededRandom(f(3)), f(3), f(20),
            eos_ids=[f(9)],
        ))
        for f in (lambda n: n, form)
    )
    assert plain == given and {type(token) for token in ids_of(given)} == {int}


def test_a_text_has_128_tokens_unless_you_say_otherwise():
    rounds = speculate(tiny(context=160), NoDrafter(), [1, 2], SamplingParams(), SeededRandom(0))
    assert len(ids_of(rounds)) == 128
