"Text under a grammar: the exact law of the loop, masks that follow rollbacks, schemas on a model that talks nonsense."
import copy
import json
import random
import re
import sys
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch

from helpers import Untouchable, assert_same_text, tiny
from helpers_text import talker
from specdec.drafters.base import Draft, NoDrafter
from specdec.drafters.lookup import NGramDrafter
from specdec.drafters.model import ModelDrafter
from specdec.engine.block import block_verification
from specdec.engine.constraints import GrammarDrafter, GrammarLM, JSONSchema, Regex
from specdec.errors import InputError, ModelError
from specdec.loop import speculate
from specdec.lossless.proof import (
    ExactModel,
    Language,
    distance,
    distribution_of_rounds,
    memory_of,
    target_distribution,
)
from specdec.pair import Pair
from specdec.sampling import SamplingParams, SeededRandom

END = frozenset({2})
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["kind", "n"],
    "properties": {"kind": {"enum": ["cat", "dog"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
}


@dataclass(frozen=True)
class Left:
    "At most so many zeros, then a one for each of them, then the end: 0ⁿ1ⁿ. It is its own grammar."
    zeros: int = 2
    ones: int = 0
    open: bool = True  # whether a zero may follow
    def start(self, model): return self
    def allowed(self): return torch.tensor([self.open and self.zeros > 0, self.ones > 0, self.ones == 0, False])
    def after(self, token):
        if token == 0: return Left(self.zeros - 1, self.ones + 1)
        if token == 2: raise AssertionError("asked after the end")
        return Left(self.zeros, self.ones - 1, False)
    def forced(self): return [1] * self.ones if not (self.open and self.zeros) else []


def state_after(text):
    state = Left()
    for token in text:
        if token == 2 or not state.allowed()[token]: return None
        state = state.after(token)
    return state


def talks(text): # [4] of Fraction; what is allowed has a half, a quarter, …, so that a mask leaves exact numbers
    state, rng = state_after(text), random.Random(f"p {text}")
    may = [True] * 4 if state is None else state.allowed().tolist()
    row = np.full(4, Fraction(0), dtype=object)
    for part in (True, False):
        ids = [i for i in range(4) if may[i] == part]
        rng.shuffle(ids)
        for n, i in enumerate(ids, 1): row[i] = Fraction(1, 2 ** (n + (n < len(ids))))
    return row


def masked(text): # [4] of Fraction: the definition
    row = talks(text) * np.array(state_after(text).allowed().tolist())
    return row / row.sum()


class Shares:
    "The transform of rows of probabilities, where minus infinity stands for 0."
    temperature = 1.0
    def probs(self, rows): return rows.clip(min=0) / rows.clip(min=0).sum(-1, keepdim=True)


def distribution(K, length, wrap=lambda drafter: drafter, model=GrammarLM, verify=None):
    "Of the production loop, with a draft that knows no grammar."
    def start(rng):
        exact, drafter = ExactModel(talks, 4), wrap(ModelDrafter(ExactModel(guesses, 4), 4))
        exact.eos_ids = END
        target = model(exact, Left())
        rounds = speculate(target, drafter, [0], Shares(), rng, K, 2 * length, END, verify)
        return rounds, lambda: (memory_of(target), memory_of(drafter))
    guesses = Language(4, "q", halves=True)
    return distribution_of_rounds(start, length)


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: NoDrafter(), lambda d: NGramDrafter(),
                                  lambda d: GrammarDrafter(d, Left())],
                         ids=["sampled", "none", "looked up", "forced, else sampled"])
@pytest.mark.parametrize("K", [1, 2, 3])
def test_the_distribution_is_the_masked_targets(K, wrap):
    assert distance(distribution(K, 5, wrap), target_distribution(masked, 5, END)) == 0


@pytest.mark.parametrize("K", [2, 3])
def test_the_distribution_is_theirs_by_the_rule_of_a_pair(K):
    "Up to float32's thirds: this rule divides."
    found = distribution(K, 5, lambda d: GrammarDrafter(d, Left()), verify=block_verification)
    assert distance(found, target_distribution(masked, 5, END)) < 1e-7


class OneMask(GrammarLM):
    "The mask of the round's first row, for all its rows."
    def follow(self, tokens, before):
        states = super().follow(tokens, before)
        return [states[0]] * len(states)


class NoRollback(GrammarLM):
    "Goes on from where the last round's guesses ended."
    def follow(self, tokens, before):
        return super().follow(tokens, before and self.prompt + len(self.states) - 1)


@pytest.mark.parametrize("model", [OneMask, NoRollback], ids=lambda model: model.__name__)
def test_wrong_masks_are_seen(model):
    "The negative control."
    try: found = distribution(2, 5, model=model)
    except (ModelError, InputError, ArithmeticError): return  # no law at all
    assert distance(found, target_distribution(masked, 5, END)) > 0.01


def test_rows_are_those_of_a_model_that_never_rolled_back():
    model = tiny(vocab=4)
    under, cache = GrammarLM(model, Left()), model.new_cache(16)
    under.forward(torch.tensor([[3, 1, 3]]), cache, last=1)  # a prompt that is outside of the grammar
    under.forward(torch.tensor([[0, 0, 1]]), cache)
    cache.rollback(4)
    rows = under.forward(torch.tensor([[1, 3]]), cache)
    fresh = GrammarLM(model, Left())
    other = model.new_cache(16)
    fresh.forward(torch.tensor([[3, 1, 3]]), other, last=1)
    wanted = fresh.forward(torch.tensor([[0, 1, 3]]), other)[:, 1:]
    assert torch.equal(rows.isinf(), wanted.isinf())
    assert torch.allclose(rows.exp(), wanted.exp(), atol=1e-5)
    assert rows[0, 0].isinf().tolist() == [True, True, False, True]
    again = model.new_cache(16)
    assert fresh.forward(torch.tensor([[3]]), again).isinf()[0, 0].tolist() == [False, True, False, True]  # a new text


def test_rows_that_nobody_looks_at_stay_as_they_are():
    model = tiny(vocab=4)
    under, cache = GrammarLM(model, Left()), model.new_cache(16)
    under.forward(torch.tensor([[3]]), cache)
    rows, features = under.forward(torch.tensor([[0, 3, 0]]), cache, layers=(1,))
    other = model.new_cache(16)
    plain, wanted = model.forward(torch.tensor([[3, 0, 3, 0]]), other, layers=(1,))
    assert torch.allclose(features, wanted[:, 1:], atol=1e-5) and features.shape == wanted[:, 1:].shape
    assert rows[0, 0].isinf().any() and torch.allclose(rows[0, 1:], plain[0, 2:], atol=1e-5)
    prompt = torch.tensor([[3, 3, 3]])
    inside, after = GrammarLM(model, Left()).forward(prompt, model.new_cache(16))[0].split([2, 1])
    assert torch.isfinite(inside).all() and after[0].isinf().tolist() == [False, True, False, True]
    last = GrammarLM(model, Left()).forward(prompt, model.new_cache(16), last=1)[0]
    assert torch.equal(last.isinf(), after.isinf())


@pytest.mark.parametrize("settings", [
    {}, dict(temperature=1.0, top_k=5, top_p=0.9), dict(temperature=1.0, min_p=.05)], ids=["greedy", "cut", "min-p"])
def test_a_model_that_talks_nonsense_writes_json(settings):
    target, kinds = talker(eos=frozenset({2})), set()
    pair = Pair(target, target.skip([1]))
    for seed in range(3 if settings else 1):
        result = pair.generate("Hello", max_new_tokens=60, seed=seed, grammar=JSONSchema(SCHEMA), **settings)
        found = json.loads(result.text)
        assert result.finish_reason == "eos" and json.dumps(found) == result.text
        assert found["kind"] in ("cat", "dog") and 0 <= found["n"] <= 99
        kinds.add(result.text)
    assert len(kinds) > 1 or not settings


def test_greedy_text_is_that_of_plain_decoding():
    target = talker(eos=frozenset({2}))
    pair, grammar = Pair(target, target.skip([1])), Regex("[a-z ]{6,9}[.]")
    texts = [pair.generate("Hello", max_new_tokens=40, grammar=grammar, method=method)
             for method in ("plain", "speculative")]
    assert_same_text(target, texts[0].prompt_ids, *(text.generated_ids for text in texts))
    assert re.fullmatch(r"[a-z ]{6,9}[.]", texts[0].text) and texts[1].num_accepted > 0


def test_logprobs_are_those_under_the_mask():
    target = talker(eos=frozenset({2}))
    result = Pair(target).generate("Hello", grammar=Regex("ab"), logprobs=2, max_new_tokens=8)
    forced = [odds[token] for token, odds in zip(result.generated_ids, result.logprobs, strict=True)]
    assert result.text == "ab" and forced == pytest.approx([0.0] * len(forced), abs=1e-6)


def test_a_mask_depends_on_the_text_alone():
    "Not on which masks were asked for on the way, nor on copies: the law needs that."
    target = talker(eos=frozenset({2}))
    first, rng = JSONSchema(SCHEMA).start(target), random.Random(0)
    for _ in range(3):
        state, text = first, []
        while len(text) < 8 and not (text and text[-1] == 2):
            token = rng.choice(state.allowed().nonzero()[:, 0].tolist())
            text.append(token)
            state = state.after(token)
            other = JSONSchema(SCHEMA).start(target)
            for token in text: other = other.after(token)
            assert torch.equal(other.allowed(), state.allowed())


def test_what_is_forced_is_proposed_and_accepted():
    target = talker(eos=frozenset({2}))
    grammar = Regex("the only sentence there is")
    result = Pair(target, NoDrafter()).generate("Hello", grammar=grammar, K=4, max_new_tokens=20)
    assert result.text == "the only sentence there is"
    assert result.num_drafted == result.num_accepted > 0 and max(len(r.drafted) for r in result.rounds) == 4


def test_where_nothing_is_forced_the_drafter_is_asked():
    class Fixed(NoDrafter):
        def propose(self, K, sampling, rng): return Draft([0] * K)
    drafter = GrammarDrafter(Fixed(), Left())
    state = drafter.start([3, 3, 0], None, 10)
    assert state.propose(2, SamplingParams(), SeededRandom(0)).tokens == [0, 0]
    state.commit([0], None)
    assert state.propose(1, SamplingParams(), SeededRandom(0)).tokens == [1]
    assert state.propose(5, SamplingParams(), SeededRandom(0)).tokens == [1, 1]
    assert drafter.start([3, 0], None, 10).propose(3, SamplingParams(), SeededRandom(0)).tokens == [0, 0, 0]


WRONG = [
    (lambda: JSONSchema({"type": "integer", "minimum": 5, "maximum": 3}), "No text can fit this schema.*minimum"),
    (lambda: JSONSchema({"enum": []}), "No text can fit this schema"),
    (lambda: JSONSchema({"type": "banana"}), "banana"),
    (lambda: JSONSchema('{"type": "string"}'), "a dict"),
    (lambda: Regex("("), "No text can fit the pattern"),
    (lambda: Regex(3), "A pattern is text"),
]

@pytest.mark.parametrize("make, words", WRONG, ids=["no number", "no choice", "no type", "text", "open", "no text"])
def test_a_grammar_that_nothing_fits_is_refused_without_a_model(make, words):
    with pytest.raises(InputError, match=words): make()


def quick(**more): return dict(grammar=JSONSchema(SCHEMA)) | more

@pytest.mark.parametrize("target, settings, words", [
    (Untouchable, quick, "ignore_eos"),
    (lambda: talker(eos=frozenset({2})), lambda: quick(ignore_eos=True), "ignore_eos"),
    (lambda: talker(eos=frozenset({2})), lambda: quick(grammar=Regex("[a&&b]")), "no first token"),
    (lambda: talker(eos=frozenset({2})), lambda: quick(loop="device"), "grammars"),
    (lambda: talker(eos=frozenset({2})), lambda: quick(grammar="json"), "A grammar is"),
    (lambda: talker(eos=frozenset({2}), tokenizer=False), quick, "a tokenizer"),
], ids=["no end", "no end wanted", "a pattern that nothing matches", "device", "a word", "no tokenizer"])
def test_what_cannot_be_is_refused_before_any_model_runs(target, settings, words, monkeypatch):
    pair = Pair(target())
    def run(*arguments, **more): raise AssertionError("a model ran")
    monkeypatch.setattr(pair, "target", copy.copy(pair.target))
    monkeypatch.setattr(pair.target, "forward", run)
    with pytest.raises(InputError, match=words): pair.generate([1, 2], **settings())


def test_without_a_cache_there_is_no_prompt():
    with pytest.raises(InputError, match="needs a cache"): GrammarLM(tiny(vocab=4), Left()).forward(torch.tensor([[1]]))


def test_a_dead_end_is_told():
    class Dead(Left):
        def allowed(self): return super().allowed() & torch.tensor([True, False, False, False])
        def after(self, token): return Dead(0, 0)
    target = tiny(vocab=4)
    under, cache = GrammarLM(target, Dead()), target.new_cache(8)
    under.forward(torch.tensor([[1]]), cache)
    with pytest.raises(ModelError, match="allows no token here"): under.forward(torch.tensor([[0]]), cache)


@pytest.mark.parametrize("make", [lambda: JSONSchema(SCHEMA), lambda: Regex("a")], ids=["schema", "pattern"])
def test_without_the_library_the_command_is_told(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(ModelError, match=r"pip install -e \"\.\[grammars\]\""): make()


def test_a_result_says_its_grammar_and_a_file_cannot_hold_it():
    pair = Pair(talker(eos=frozenset({2})))
    result = pair.generate("Hello", max_new_tokens=2, grammar=Regex("a+"))
    assert result.settings["grammar"] == "Regex(pattern='a+')" and result.finish_reason == "length"
    assert "grammar" not in pair.generate("Hello", max_new_tokens=2).settings
    from specdec.app.config import decoding_of
    with pytest.raises(InputError, match="grammar can't be kept in a file"): decoding_of(result.settings)
