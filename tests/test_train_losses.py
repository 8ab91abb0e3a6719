"The losses in fractions, and their gradients against autograd."
from fractions import Fraction

import numpy as np
import pytest
import torch

from specdec.train.student import LOSSES, entropies, hard_label, kl, step_weights, total_variation


def fractions(*values): return [Fraction(v) for v in values]
def test_losses_are_exact():
    p, q = fractions("1/2", "1/4", "1/4"), fractions("1/4", "1/2", "1/4")
    tensors = lambda x: torch.tensor([float(v) for v in x], dtype=torch.float64)
    P, log_q, label = tensors(p), tensors(q).log(), torch.tensor(1)
    assert kl(P, log_q, label).item() == pytest.approx(0.25 * np.log(2), abs=1e-12)  # ½ log 2 − ¼ log 2
    assert kl(P, log_q, label, floor=entropies(P)).item() == kl(P, log_q, label).item()
    assert (
        Fraction(total_variation(P, log_q, label).item()).limit_denominator(1000)
        == 1 - sum(map(min, p, q))
        == Fraction(1, 4)
    )
    assert hard_label(P, log_q, label).item() == pytest.approx(np.log(2))
    assert hard_label(P, log_q, torch.tensor(-1)).item() == 0
    for name in ("kl", "tv"): assert LOSSES[name](P, P.log(), label).item() == pytest.approx(0, abs=1e-12)
    assert kl(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]).log(), label[None]).isfinite()  # 0 log 0 is 0


def test_gradients_agree_with_torch():
    torch.manual_seed(0)
    logits, p = torch.randn(4, 9, dtype=torch.float64, requires_grad=True), torch.randn(
        4, 9, dtype=torch.float64
    ).softmax(-1)
    labels = torch.tensor([0, 3, 8, -1])
    ours, = torch.autograd.grad(kl(p, logits.log_softmax(-1), labels).sum(), logits)
    torch.testing.assert_close(ours, logits.softmax(-1) - p)
    ours, = torch.autograd.grad(hard_label(p, logits.log_softmax(-1), labels).sum(), logits)
    (theirs,) = torch.autograd.grad(
        torch.nn.functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum"), logits
    )
    torch.testing.assert_close(ours, theirs)
    for loss in LOSSES.values(): assert torch.autograd.gradcheck(lambda l: loss(p, l.log_softmax(-1), labels), logits)


def test_weights_of_steps_sum_to_one():
    assert step_weights(3, 0.5) == [4 / 7, 2 / 7, 1 / 7]
