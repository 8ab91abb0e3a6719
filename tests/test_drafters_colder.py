"Drawing colder than the target: lossless, reported as it is drawn, and nothing changes for greedy text."
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from helpers_drafters import packable_llama
from specdec.drafters.base import Draft, NoDrafter
from specdec.drafters.choose import HybridDrafter
from specdec.drafters.colder import TemperatureScaledDrafter, TemperatureScaledState
from specdec.drafters.lookup import NGramDrafter, SuffixDrafter
from specdec.drafters.model import ModelDrafter
from specdec.errors import InputError
from specdec.loop import speculate
from specdec.lossless.proof import ExactModel, Language, language_pairs, loop_error
from specdec.sampling import SamplingParams, SeededRandom


@pytest.fixture(scope="module")
def tiny(): return packable_llama()


class Likelier(TemperatureScaledDrafter):
    "As if it were colder, in fractions: of the two likeliest tokens, each with the same chance."
    def scaled(self, sampling):
        def even(row):
            best = row.topk(min(2, len(row)))
            kept = (best.values > 0).float()
            return torch.zeros_like(row).index_copy_(-1, best.indices, kept / kept.sum())
        return SimpleNamespace(probs=even, temperature=1.0)


class Unreporting(TemperatureScaledState):
    "Wrong: draws colder, and reports the q that it would otherwise have drawn from."
    def propose(self, K, sampling, rng):
        text, drawn = self.inner.tokens[1:], super().propose(K, sampling, rng)
        model = self.inner.model
        rows = [model.language((*text, *drawn.tokens[:i])).astype(float) for i in range(len(drawn.tokens))]
        return Draft(drawn.tokens, torch.tensor(np.stack(rows), dtype=torch.float32))


class Unreported(Likelier):
    def wrap(self, inner, tokens, eos_ids): return Unreporting(inner, self.scaled)


@pytest.mark.parametrize("K, V", [(1, 2), (1, 3), (2, 2), (2, 3), (3, 2)])
def test_a_colder_draft_is_lossless(K, V):
    for case, p, q in language_pairs(V, f"colder {K}", most=max(2, 5 - K), halves=True):
        width = V - 1 if case == "smaller draft vocabulary" else V
        def colder(): return Likelier(ModelDrafter(ExactModel(q, width), V))
        for make in (colder, lambda: HybridDrafter(SuffixDrafter(), colder())):
            assert loop_error(speculate, make, p, K, V, case).error == 0, case


def test_drawing_colder_without_saying_so_is_caught():
    errors = []
    for seed in range(4):
        p, q = Language(3, f"p{seed}", halves=True), Language(3, f"q{seed}", halves=True)
        errors.append(loop_error(speculate, lambda: Unreported(ModelDrafter(ExactModel(q, 3), 3)), p, 1, 3, "").error)
    assert max(errors) > 0


def test_only_the_draft_gets_colder(tiny):
    "q is the draft's softmax at the lower temperature, and greedy text has the same rounds as without."
    prompt, sampling = [1, 2, 3], SamplingParams(0.8, top_k=20)
    drafter = TemperatureScaledDrafter(ModelDrafter(tiny, 96), 0.5)
    draft = drafter.start(prompt, None, 20).propose(2, sampling, SeededRandom(0))
    logits = tiny.forward(torch.tensor([prompt + draft.tokens[:1]]), tiny.new_cache(9), last=2)[0]
    assert torch.allclose(draft.q, SamplingParams(0.4, top_k=20).probs(logits), atol=1e-5) and not torch.allclose(
        draft.q, sampling.probs(logits), atol=1e-2
    )
    greedy = [
        list(speculate(tiny, make(), prompt, SamplingParams(), SeededRandom(0), 3, 20))
        for make in (lambda: TemperatureScaledDrafter(ModelDrafter(tiny, 96)), lambda: ModelDrafter(tiny, 96))
    ]
    assert greedy[0] == greedy[1]


def test_colder_than_the_largest_number():
    assert TemperatureScaledDrafter(NoDrafter()).scaled(SamplingParams(10**400)).temperature > 1e299


@pytest.mark.parametrize(
    "factor", [0, -1, float("inf"), float("nan"), "1", True],
    ids=["zero", "negative", "infinite", "nan", "text", "True"],
)
def test_a_temperature_that_cannot_be(factor):
    with pytest.raises(InputError, match="positive and finite"): TemperatureScaledDrafter(NGramDrafter(), factor)
