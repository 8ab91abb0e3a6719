"The loop on tiny random models in float32: exact equality, exact laws, caches, ends, features, and mutants that must be caught."
import copy
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from specdec.autoregressive import Transform
from specdec.core import InputError, ModelError, NumericalError, Round, TorchSource, exact_law
from specdec.kvcache import KVCache
from specdec.rejection import speculative_sampling
from specdec.speculative import Draft, ModelDrafter, NGramDrafter, NoDrafter, check_request, speculate
from specdec.loading import load_model
from specdec.protocol import CausalLM
from specdec.transformer import Llama

CPU = torch.device("cpu")


@lru_cache
def tiny(vocab=24, hidden=16, layers=3, seed=0, context=48, noise=0.0) -> Llama:
    "A random Llama with uneven logits; with noise, a relative of the one without."
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=context, tie_word_embeddings=False, initializer_range=0.3)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for w in model.parameters(): w += noise * torch.randn_like(w)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_model(Path(folder), CPU, torch.float32)


def ids_of(rounds) -> list[int]: return [token for r in rounds for token in r.emitted]


def decode(target, drafter, prompt, temperature=0.0, K=3, max_new_tokens=20, seed=0, **options) -> list[Round]:
    return list(speculate(target, drafter, prompt, Transform(temperature), TorchSource(seed), K, max_new_tokens, **options))


def greedy(target, prompt, count) -> list[int]:
    "Plain greedy decoding without a cache: the independent reference."
    ids = list(prompt)
    for _ in range(count): ids.append(target.forward(torch.tensor([ids]), target.new_cache(len(ids)))[0, -1].argmax().item())
    return ids[len(prompt):]


def drafters(target, seed):
    "One of each kind, from hopeless to perfect."
    return {"none": NoDrafter(), "n-gram": NGramDrafter(), "itself": ModelDrafter(target, target.vocab_size), "skip": ModelDrafter(target.skip([1]), target.vocab_size),
            "noisy": ModelDrafter(tiny(target.vocab_size, seed=seed, noise=0.05), target.vocab_size),
            "smaller": ModelDrafter(tiny(target.vocab_size, hidden=8, layers=1, seed=seed + 1), target.vocab_size),
            "short memory": ModelDrafter(tiny(target.vocab_size, seed=seed, context=12), target.vocab_size)}


class Recording:
    "Passes everything on, and checks on the way what the loop promises to a drafter."
    def __init__(self, inner, layers=()): self.inner, self.layers, self.tokens, self.features, self.asked = inner, layers, [], [], []
    def prefill(self, tokens, features, limit):
        self.tokens, self.features, self.limit = list(tokens), [] if features is None else [features], limit
        self.inner.prefill(tokens, features, limit)
    def commit(self, tokens, features):
        assert len(tokens) > 0
        self.tokens += tokens
        if features is not None: self.features.append(features)
        assert len(self.tokens) <= self.limit
        self.inner.commit(tokens, features)
    def propose(self, K, transform, source):
        assert K >= 1
        self.asked.append(K)
        return self.inner.propose(K, transform, source)


# Greedy text

@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), K=st.integers(1, 7), length=st.integers(1, 12), count=st.integers(1, 24), vocab=st.sampled_from([16, 33, 64]))
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
        seen |= {(len(r.drafted) > 0, r.accepted == len(r.drafted), r.accepted > 0) for r in decode(target, drafter, [1, 2, 3, 1, 2], max_new_tokens=40)}
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

def plain_law(target, prompt, transform, count) -> dict:
    "Joint law of the first tokens, from uncached forwards in float64."
    law = {(): 1.0}
    for _ in range(count):
        grown = {}
        for prefix, weight in law.items():
            ids = torch.tensor([[*prompt, *prefix]])
            p = transform(target.forward(ids, target.new_cache(ids.shape[1]))[0, -1]).double()
            grown |= {(*prefix, token): weight * w for token, w in enumerate((p / p.sum()).tolist()) if w > 0}
        law = grown
    return law


def speculative_law(target, drafter, prompt, transform, count, K, verify=None) -> dict:
    def run(source):
        tokens = []
        for r in speculate(target, drafter, prompt, transform, source, K, max_new_tokens=count + 1, verify=verify):
            tokens += r.emitted
            if len(tokens) >= count: return tuple(tokens[:count])
    return exact_law(run)


def distance(a, b) -> float: # total variation
    return sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys()) / 2


SMALL = dict(vocab=4, hidden=8, layers=2, seed=8)
PROMPT, WARM = [1, 2, 1], Transform(1.0, top_k=3)


def relative(target, noise=0.2): return tiny(**SMALL, noise=noise)


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("kind", ["model", "n-gram"])
def test_joint_law_of_three_tokens_is_exactly_the_targets(K, kind):
    target = tiny(**SMALL)
    drafter = ModelDrafter(relative(target), 4) if kind == "model" else NGramDrafter()
    assert distance(speculative_law(target, drafter, PROMPT, WARM, 3, K), plain_law(target, PROMPT, WARM, 3)) < 1e-6


def test_a_drafter_may_use_any_q_that_it_reports():
    class Bold(ModelDrafter):
        def propose(self, K, transform, source): return super().propose(K, Transform(0.5), source)
    target = tiny(**SMALL)
    assert distance(speculative_law(target, Bold(relative(target), 4), PROMPT, WARM, 3, 2), plain_law(target, PROMPT, WARM, 3)) < 1e-6


# Mutants: each is a mistake of a real project, and each check must see it

class Sharpened:
    def __init__(self, source): self.source = source
    def categorical(self, weights): return self.source.categorical(weights ** 2)


class Misreporting(ModelDrafter):
    "Trap 1: draws at temperature ½, reports q at temperature 1."
    def propose(self, K, transform, source): return super().propose(K, transform, Sharpened(source))


class GreedyDraftSoftQ(ModelDrafter):
    "Trap 6: takes the likeliest token, reports the softmax."
    class Likeliest:
        def categorical(self, weights): return weights.argmax().item()
    def propose(self, K, transform, source): return super().propose(K, transform, self.Likeliest())


class EndsEarly(ModelDrafter):
    "Trap 7: ends the draft at an unlikely token, and throws that token away."
    def propose(self, K, transform, source):
        draft = super().propose(K, transform, source)
        keep = next((i for i, t in enumerate(draft.tokens) if draft.q[i][t] < 0.4), len(draft.tokens))
        return Draft(draft.tokens[:keep], draft.q[:keep])


def drops_bonus(p, q, tokens, source):
    "Trap 5: the bonus token from the residual of the last draft position."
    accepted, own = speculative_sampling(p, q, tokens, source)
    return (accepted, source.categorical((p[accepted - 1] - q[accepted - 1]).clip(min=0) + 1e-30)) if accepted == len(tokens) > 0 else (accepted, own)


@pytest.mark.parametrize("mutant", [Misreporting, GreedyDraftSoftQ, EndsEarly])
def test_the_law_catches_drafters_that_misreport(mutant):
    target = tiny(**SMALL)
    assert distance(speculative_law(target, mutant(relative(target), 4), PROMPT, WARM, 3, 2), plain_law(target, PROMPT, WARM, 3)) > 0.01


def test_the_law_catches_a_wrong_bonus():
    target = tiny(**SMALL)
    assert distance(speculative_law(target, ModelDrafter(relative(target), 4), PROMPT, WARM, 3, 1, drops_bonus), plain_law(target, PROMPT, WARM, 3)) > 0.01


class WrongRollback(KVCache):
    "Keeps one token too few, one too many, or everything."
    def rollback(self, length):
        super().rollback({"short": length - 1, "long": min(self.length, length + 1), "never": self.length}[self.mistake])


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
    def __init__(self, target): self.target, self.vocab_size, self.context_length, self.device = target, target.vocab_size, target.context_length, CPU
    def new_cache(self, capacity):
        self.expected = None
        return self.target.new_cache(capacity + 200)
    def forward(self, ids, cache, **options):
        if self.expected == cache.length: self.target.forward(ids[:, :1], cache)  # nothing was rolled back: all was accepted
        logits = self.target.forward(ids, cache, **options)
        self.expected = cache.length if ids.shape[1] > 1 and options.get("last") is None else None
        return logits


def caught(wrong, target) -> bool:
    "Whether greedy equality with some drafter notices."
    for name, drafter in drafters(target, 0).items():
        if name == "none": continue
        if ids_of(decode(wrong, drafter, [1, 2, 3, 1, 2], max_new_tokens=24)) != greedy(target, [1, 2, 3, 1, 2], 24): return True
    return False


@pytest.mark.parametrize("mistake", ["short", "long", "never"])
def test_greedy_equality_catches_a_wrong_rollback(mistake):
    assert caught(with_wrong_rollback(tiny(), mistake), tiny())


def test_greedy_equality_catches_a_bonus_that_is_read_twice():
    assert caught(BonusTwice(tiny()), tiny())
    assert not caught(tiny(), tiny())


class OneShort(ModelDrafter):
    "Trap 5: overlooks that after full acceptance two tokens are unread."
    def distribution(self, unread, transform): return super().distribution(unread[-1:] if self.cache.length else unread, transform)


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
        drafter, length = ModelDrafter(draft, 24), 3
        for i, r in enumerate(speculate(watched, drafter, [1, 2, 3], Transform(), TorchSource(0), K, 30)):
            length += len(r.emitted)
            assert caches[-1].length == length - 1
            if not r.drafted: continue  # the prompt's token, or a last round with room for one
            assert length - drafter.cache.length == (2 if r.accepted == len(r.drafted) else 1)
            full += r.accepted == len(r.drafted)
    assert full > 0


def test_draft_distributions_after_any_round_equal_uncached_ones():
    target, draft = tiny(), tiny(noise=0.05)
    drafter = ModelDrafter(draft, 24)
    class Checked(ModelDrafter):
        def propose(self, K, transform, source):
            guess = super().propose(K, transform, source)
            text = [*self.tokens, *guess.tokens]
            p = transform(draft.forward(torch.tensor([text]), draft.new_cache(len(text)))[0])
            assert torch.allclose(guess.q, p[len(self.tokens) - 1:-1], atol=1e-5)
            return guess
    decode(target, Checked(draft, 24), [1, 2, 3], 1.0, 4, 40)


# Where a text ends

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
        for count in (1, 2, 3, 7, 13): assert ids_of(decode(target, drafter, [1, 2, 3], K=K, max_new_tokens=count)) == expected[:count]
        for count in (14, 1000): assert ids_of(decode(target, drafter, [1, 2, 3], K=K, max_new_tokens=count)) == expected
    assert ids_of(decode(target, NoDrafter(), [1] * 15, max_new_tokens=5)) == greedy(target, [1] * 15, 1)


def test_a_drafter_is_never_asked_for_more_than_fits():
    target = tiny(context=16)
    recording = Recording(ModelDrafter(target, 24))
    decode(target, recording, [1, 2, 3], K=4, max_new_tokens=100)
    assert recording.asked == [4, 4, 1] and recording.limit == 16


def test_a_draft_with_a_short_context_fills_it_to_the_last_place():
    "The last token of a draft needs no place in the draft's own cache, since nothing is drafted after it."
    target = tiny()
    drafter = ModelDrafter(tiny(noise=0.05, context=12), 24)
    for length, given in ((8, 5), (10, 3), (12, 1), (13, 0), (20, 0)):
        drafter.prefill([1 + i % 20 for i in range(length)], None, 40)
        draft = drafter.propose(6, Transform(), TorchSource(0))
        assert len(draft.tokens) == given and (draft.q is None if given == 0 else draft.q.shape == (given, 24))


# Features

def test_features_align_with_the_tokens_they_predict():
    target = tiny()
    recording = Recording(ModelDrafter(tiny(noise=0.05), 24), layers=(1, 3))
    rounds = decode(target, recording, [1, 2, 3, 4], K=3, max_new_tokens=25)
    assert recording.tokens == [1, 2, 3, 4, *ids_of(rounds)]
    assert [len(f) for f in recording.features] == [4] + [len(r.emitted) for r in rounds[1:]]
    ids = torch.tensor([recording.tokens[:-1]])
    logits, features = target.forward(ids, target.new_cache(64), layers=(1, 3))
    assert torch.allclose(torch.cat(recording.features), features[0], atol=1e-5)      # row i is at the position before token i + 1 …
    assert logits[0, 3:].argmax(-1).tolist() == recording.tokens[4:]                   # … and that position predicts it


# Vocabularies of different widths

@pytest.mark.parametrize("width", [18, 24, 40])
def test_padded_vocabularies(width):
    target = tiny()
    drafter = ModelDrafter(tiny(vocab=width, seed=3), 24)
    assert ids_of(decode(target, drafter, [1, 23, 3], K=3, max_new_tokens=30)) == greedy(target, [1, 23, 3], 30)
    drafter.prefill([1, 23, 3], None, 40)
    draft = drafter.propose(3, Transform(1.0), TorchSource(0))
    assert draft.q.shape == (3, 24) and torch.allclose(draft.q.sum(-1), torch.ones(3)) and not draft.q[:, width:].any()
    decode(target, drafter, [1, 23, 3], 1.0, K=3, max_new_tokens=30)


# Errors

class Failing:
    "A model whose logits are broken from some length on."
    def __init__(self, model, at, value=float("nan")): self.model, self.at, self.value = model, at, value
    def __getattr__(self, name): return getattr(self.model, name)
    def forward(self, ids, cache, **options):
        logits = self.model.forward(ids, cache, **options)
        return torch.full_like(logits, self.value) if cache.length >= self.at else logits


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_broken_logits_name_the_step(value):
    with pytest.raises(NumericalError, match="The target, after the prompt"): decode(Failing(tiny(), 0, value), NoDrafter(), [1, 2, 3])
    with pytest.raises(NumericalError, match="The target, after 6 tokens"): decode(Failing(tiny(), 6, value), NoDrafter(), [1, 2, 3])
    with pytest.raises(NumericalError, match="The draft, after 4 tokens"): decode(tiny(), ModelDrafter(Failing(tiny(), 4, value), 24), [1, 2, 3])


class Untouchable(CausalLM):
    "A target that must not run."
    vocab_size, context_length, device = 24, 16, CPU
    def new_cache(self, capacity): raise AssertionError("work before validation")


@pytest.mark.parametrize("change, words", [
    (dict(prompt=[]), "empty"), (dict(prompt=[24]), "outside 0…23"), (dict(prompt=[30]), "outside 0…23"), (dict(prompt=[-1]), "outside"), (dict(prompt=[1] * 16), "nothing could be added"),
    (dict(K=0), "K, the number"), (dict(K=1.5), "whole number"), (dict(max_new_tokens=0), "max_new_tokens"), (dict(max_new_tokens=2.0), "whole number")])
def test_requests_are_checked_before_any_work(change, words):
    request = dict(prompt=[1], K=2, max_new_tokens=4) | change
    with pytest.raises(InputError, match=words): check_request(Untouchable(), **request)
    with pytest.raises(InputError, match=words): speculate(Untouchable(), NoDrafter(), request.pop("prompt"), Transform(), TorchSource(0), **request)


class Answering:
    "A drafter that proposes what it is told to."
    layers = ()
    def __init__(self, draft): self.draft = draft
    def prefill(self, tokens, features, limit): pass
    def commit(self, tokens, features): pass
    def propose(self, K, transform, source): return self.draft


@pytest.mark.parametrize("draft, words", [(None, "expected a Draft"), ([1, 2], "expected a Draft"), (Draft([1.0]), "whole numbers"), (Draft(["a"]), "whole numbers"), (Draft([1], [[0.5]]), "shape"),
                                          (Draft([1], torch.full((1, 24), 2 / 24)), "sum to 1"), (Draft([1], torch.full((1, 24), float("nan"))), "sum to 1")])
def test_drafts_that_are_none(draft, words):
    with pytest.raises(ModelError, match=words): decode(tiny(), Answering(draft), [1, 2, 3], temperature=1.0)


@pytest.mark.parametrize("form", [torch.tensor, np.array, lambda tokens: list(torch.tensor(tokens))])
def test_tokens_in_any_form_end_a_text(form):
    expected = decode(tiny(), NoDrafter(), [1, 2, 3])
    end = expected[3].emitted[0]
    found = decode(tiny(), Answering(Draft(form([r.emitted[0] for r in expected[1:4]]))), [1, 2, 3], eos_ids={end})
    emitted = [t for r in found for t in r.emitted]
    assert emitted == [t for r in decode(tiny(), NoDrafter(), [1, 2, 3], eos_ids={end}) for t in r.emitted] and all(type(t) is int for t in emitted)


@pytest.mark.parametrize("prompt", [[0.5, 1.7], torch.tensor([[1, 2]]), torch.tensor([1.0]), "12", [[1]], None, 3])
def test_prompts_that_are_no_token_ids(prompt):
    with pytest.raises(InputError, match="flat list of token ids"): speculate(Untouchable(), NoDrafter(), prompt, Transform(), TorchSource(0))


@pytest.mark.parametrize("eos_ids", [2, None])
def test_ends_that_are_no_set(eos_ids):
    with pytest.raises(InputError, match="eos_ids"): speculate(Untouchable(), NoDrafter(), [1], Transform(), TorchSource(0), eos_ids=eos_ids)


@pytest.mark.parametrize("form", [tuple, np.array, torch.tensor])
def test_prompts_in_any_form_draft_alike(form):
    prompt = [1, 2, 3, 1, 2]
    assert decode(tiny(), NGramDrafter(), form(prompt), K=np.int64(3)) == decode(tiny(), NGramDrafter(), prompt, K=3)


@pytest.mark.parametrize("draft, words", [(Draft([1, 2, 3, 4]), "at most 3"), (Draft([24]), "outside the target's 0…23"), (Draft([-1]), "outside"), (Draft([1], torch.ones(1, 23)), "shape"),
                                          (Draft([1], torch.ones(2, 24)), "shape")])
def test_drafters_that_break_the_protocol_are_named(draft, words):
    class Broken(NoDrafter):
        def propose(self, K, transform, source): return draft
    with pytest.raises(ModelError, match=words): decode(tiny(), Broken(), [1])


def test_errors_of_a_drafter_reach_the_caller():
    class Angry(NoDrafter):
        def propose(self, K, transform, source): raise ZeroDivisionError("mine")
    with pytest.raises(ZeroDivisionError, match="mine"): decode(tiny(), Angry(), [1])


# N-gram lookup against a slow search

@pytest.mark.parametrize("longest", [0, -1, 1.5, "3", None])
def test_the_longest_ending_is_checked(longest):
    with pytest.raises(InputError, match="whole number of at least 1"): NGramDrafter(longest)
    assert NGramDrafter().longest == 3

@given(st.lists(st.integers(0, 3), min_size=1, max_size=25), st.integers(1, 6), st.integers(1, 4), st.integers(0, 24))
def test_ngram_lookup_equals_a_slow_search(tokens, K, longest, split):
    def slow():
        for n in range(min(longest, len(tokens)), 0, -1):
            for start in range(len(tokens) - 1, n - 1, -1):
                if tokens[start - n:start] == tokens[-n:]: return tokens[start:start + K]
        return []
    drafter = NGramDrafter(longest)
    drafter.prefill(tokens[:max(split, 1)], None, 100)
    if tokens[max(split, 1):]: drafter.commit(tokens[max(split, 1):], None)
    assert drafter.propose(K, Transform(), TorchSource(0)).tokens == slow()
