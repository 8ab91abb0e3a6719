"""NaN and infinities in what a model computes, put anywhere: every loop ends in a NumericalError, or the numbers meant
nothing and the text is plain decoding's. Never another text."""
import copy
import math

import pytest
import torch

from helpers import ids_of, tiny
from helpers_drafters import random_head
from specdec.device.loop import DeviceDecoder
from specdec.drafters.base import Draft
from specdec.drafters.colder import TemperatureScaledDrafter
from specdec.drafters.head_drafter import HeadDrafter, fast_head
from specdec.drafters.lookup import NGramDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.tree import TreeDrafter
from specdec.engine.batch import speculate_batch
from specdec.engine.block import block_verification
from specdec.engine.request import Request
from specdec.errors import InputError, NumericalError
from specdec.loop import speculate
from specdec.sampling import SamplingParams, SeededRandom
from specdec.verify import greedy_match, sample_and_match, speculative_sampling

PROMPT, V, NEW = [1, 5, 2, 7, 1, 5, 2, 7, 1, 5], 24, 8
VALUES = {"NaN": math.nan, "+inf": math.inf, "nothing but -inf": -math.inf}


class Damaged:
    "The product that gives logits; in call `at` it damages row `row`, all of it or one number."
    def __init__(self, product, at, row, value, token=3):
        self.product, self.at, self.row, self.value, self.token = product, at, row, value, token
        self.calls, self.hit = 0, False
    def __getattr__(self, name): return getattr(self.product, name)
    def __call__(self, x):
        y, call, self.calls = self.product(x), self.calls, self.calls + 1
        if call != self.at or self.row >= y.shape[-2]: return y
        y, self.hit = y.clone(), True
        if self.value == -math.inf: y[..., self.row, :] = self.value
        else: y[..., self.row, self.token] = self.value
        return y


def damaged(model, *where):
    "The model with such a product: it shares everything else."
    other = copy.copy(model)
    other.head = Damaged(model.head, *where)
    return other


class Wrong:
    "Drafts what the target doesn't say: each draft is rejected at its first token. With `trees`, as trees."
    layers = ()
    def __init__(self, trees):
        self.trees = trees
        if trees: self.max_nodes = lambda K: K
    def start(self, tokens, features, limit, eos_ids=frozenset()):
        state = copy.copy(self)
        state.said = len(tokens) - len(PROMPT)
        return state
    def propose(self, K, sampling, rng):
        return Draft([(PLAIN[self.said] + 1) % V] * min(K, 3), None, [-1, 0, 1][:K] if self.trees else None)
    def commit(self, new, features): self.said += len(new)


TARGET = tiny()
PLAIN = ids_of(speculate(TARGET, NGramDrafter(), PROMPT, SamplingParams(), SeededRandom(0), 3, NEW))


def alone(target, drafter, sampling, rule=None):
    return ids_of(speculate(target, drafter, PROMPT, sampling, SeededRandom(0), 3, NEW, verify=rule))


def batch(target, drafter, sampling, rule=None):
    texts = [Request(target, PROMPT, drafter, sampling, SeededRandom(0), 3, NEW, verify=rule) for _ in range(2)]
    found = list(speculate_batch(target, texts, 2))
    return ids_of(r for i, r in found if i == 0)


def device(target, drafter, sampling, rule=None):
    return ids_of(DeviceDecoder(target, drafter).speculate(PROMPT, sampling, 0, 3, NEW, verify=rule))


LOOPS = {"alone": alone, "batch": batch, "device": device}
COLD, WARM = SamplingParams(), SamplingParams(1.0)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("trees", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("loop", [alone, batch])
def test_a_row_behind_a_rejected_token_is_an_error_too(loop, trees, value):
    "As `VerifyRule` says, with any rule. Each draft is rejected at once, so plain decoding comes to row 0 only."
    for row in range(4):
        for rule in [None] if trees else [None, greedy_match, speculative_sampling, block_verification]:
            target = damaged(TARGET, 3, row, value)
            with pytest.raises(NumericalError, match="The target, after"): loop(target, Wrong(trees), COLD, rule)
            assert target.head.hit
    assert loop(TARGET, Wrong(trees), COLD) == PLAIN


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("sampling", [COLD, WARM, SamplingParams(1.0, top_k=5, top_p=.9)], ids=["cold", "warm", "cut"])
@pytest.mark.parametrize("loop", LOOPS)
def test_damage_in_the_target_is_an_error_wherever_it_is(loop, sampling, value):
    "In any forward, in any row, with any rule that the loop knows; also of a tree of a head."
    rules = [None, greedy_match, speculative_sampling, block_verification] + [sample_and_match] * (loop != "device")
    for at in (0, 1, 3):
        for row in (0, 1, 3):
            for rule in rules if at == row == 1 else [None]:
                target = damaged(TARGET, at, row, value)
                try: LOOPS[loop](target, NGramDrafter(), sampling, rule)
                except NumericalError as error: assert "The target" in str(error)
                else: assert not target.head.hit  # the forward had fewer rows
    head = random_head(TARGET, torch.arange(3, 19))
    for at, row in ((1, 0), (1, 2), (2, 3)):
        target = damaged(TARGET, at, row, value)
        with pytest.raises(NumericalError): LOOPS[loop](target, TreeDrafter(head, target), sampling)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("sampling", [COLD, WARM], ids=["cold", "warm"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", ["model", "colder", "head", "tree"])
def test_damage_in_a_draft_is_an_error_wherever_it_is(kind, loop, sampling, value):
    "A draft model's logits, and a head's, in any of its forwards; or it is a row that nothing is drafted from."
    head = fast_head(random_head(TARGET, torch.arange(3, 19)), TARGET)
    for at in range(4):
        if kind in ("model", "colder"):
            draft = damaged(tiny(noise=.05), at, 0, value)
            drafter, product = ModelDrafter(draft, V), draft.head
            if kind == "colder": drafter = TemperatureScaledDrafter(drafter)
        else:
            other = copy.copy(head)
            product = other.lm_head = Damaged(head.lm_head, at, 0, value)
            drafter = HeadDrafter(other, TARGET) if kind == "head" else TreeDrafter(other, TARGET)
        try: found = LOOPS[loop](TARGET, drafter, sampling)
        except NumericalError: assert product.hit
        else:  # a row that isn't asked for: the text is that of a whole draft
            product.at = -1
            assert found == LOOPS[loop](TARGET, drafter, sampling) and (sampling == WARM or found == PLAIN)


@pytest.mark.parametrize("loop", LOOPS)
def test_numbers_that_are_only_far_apart_are_no_damage(loop):
    "The negative control: the number that would be NaN is very small, and the text is plain decoding's."
    token = next(token for token in range(V) if token not in PLAIN)
    for row in range(3):
        for value in (-1e30, -3e38):
            target = damaged(TARGET, 2, row, value, token)
            assert LOOPS[loop](target, NGramDrafter(), COLD) == PLAIN and target.head.calls > 2


@pytest.mark.parametrize("factor", [.85, 2.0, 1e300, 10**400])
@pytest.mark.parametrize("temperature", [1e-320, 1.0, 1e308, 10**400])
def test_a_temperature_beyond_every_number_never_ends_a_text(factor, temperature):
    "The product is a number that can be served, so nothing raises in mid-text; and a factor that can't be, at once."
    drafter = TemperatureScaledDrafter(ModelDrafter(tiny(noise=.05), V), factor)
    assert 0 <= drafter.scaled(SamplingParams(temperature)).temperature < math.inf
    assert len(alone(TARGET, drafter, SamplingParams(temperature))) == NEW
    with pytest.raises(InputError, match="positive and finite"): TemperatureScaledDrafter(drafter, math.inf)
