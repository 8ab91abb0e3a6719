"Measured on held-out rows: what a decoder would accept, inside answers alone."
from fractions import Fraction

import numpy as np
import pytest
import torch

from helpers_training import CPU, V, make_data, make_target, settings
from specdec.core import InputError, TorchSource
from specdec.drafters.head import HeadDrafter
from specdec.loading import load_model
from specdec.sampling import Transform
from specdec.train.data import read_rows, split_rows
from specdec.train.loop import HeldOut, Training, distillation_loss, evaluate, rows_of_step, tokens_of_round

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder): return load_model(folder, CPU, torch.float32)


@pytest.fixture(scope="module")
def data(target, tmp_path_factory): return make_data(target, tmp_path_factory.mktemp("data"))
def test_tau_is_the_expected_length_of_a_round():
    a = [Fraction(1, 2), Fraction(1, 3), Fraction(3, 4)]
    expected = 1 + a[0] + a[0] * a[1] + a[0] * a[1] * a[2]
    found = tokens_of_round(torch.tensor([float(x) for x in a], dtype=torch.float64))
    assert found.item() == pytest.approx(float(expected))


def test_measured_alpha_is_what_the_decoder_accepts(folder, data, tmp_path, target):
    "Σ min(p, q) with the whole p, on a draft vocabulary that lacks tokens."
    run = Training(settings(folder, data, tmp_path), target, read_rows(data, V))
    found, by_hand = run.evaluate(), []
    drafter = HeadDrafter(run.student.head, target)
    ids = run.held.ids[0].tolist()
    for L in range(run.start + 1, 32):
        logits, features = target.forward(torch.tensor([ids[:L]]), target.new_cache(32), layers=run.student.layers)
        q = drafter.start(ids[:L], features[0, :-1], 40).propose(1, Transform(1.0), TorchSource(0)).q[0]
        by_hand.append(torch.minimum(logits[0, -1].softmax(-1), q).sum().item())
    # the last position's prediction exists only in the batch
    one = HeldOut(*(getattr(run.held, name)[:1, :31] for name in ("ids", "states", "normalisers", "choices", "counts")))
    alpha = evaluate(run.student, run.teacher, one, run.start, 5)["alpha"][0]
    assert alpha == pytest.approx(np.mean(by_hand), abs=1e-4) and 0 < found["tau"] - 1 < 5


def test_answers_alone_are_learned_and_measured(folder, data, tmp_path, target):
    "What stands outside of answers changes neither the loss nor its gradient; α and τ are those of the places inside."
    rows = read_rows(data, V) % 40
    rows[:, 9], rows[:, 25] = 48, 49
    run = Training(settings(folder, data, tmp_path), target, rows, marks=([48], 49))
    assert run.counts.sum(1).tolist() == [16] * len(run.counts)  # from the opening to the last token before the end
    ids, states = run.states([0, 1])
    loss = lambda states, where: distillation_loss(run.student, run.teacher, ids, states, run.config, run.start, where)
    where = run.counts[:2, run.start:]
    other = states.clone()
    other[:, 26:] = 7 * torch.randn_like(other[:, 26:])  # the target says something else after the answer
    assert loss(other, where).item() == loss(states, where).item()
    assert loss(other, torch.ones_like(where)).item() != loss(states, torch.ones_like(where)).item()
    assert loss(states, torch.zeros_like(where)).item() == 0
    each = [
        distillation_loss(
            run.student, run.teacher, ids[i : i + 1], states[i : i + 1], run.config, run.start, where[i : i + 1]
        ).item()
        for i in range(2)
    ]
    assert loss(states, where).item() == pytest.approx(np.mean(each), rel=1e-5)
    mine = rows_of_step(0, 4, len(run.counts), 0)
    ids, states = run.states(mine)
    asked = loss(states, run.counts[mine, run.start:]).item()
    assert run.take_step() == pytest.approx(asked, rel=1e-6) and asked != pytest.approx(
        loss(states, torch.ones_like(run.counts[mine, run.start :])).item(), rel=1e-3
    )
    # four places of an answer
    with pytest.raises(InputError, match="nothing to measure on"):
        Training(settings(folder, data, tmp_path), target, rows[:, :13], marks=([48], 49))
    (answers, held_answers), (plain, held_plain) = split_rows(rows, 6), split_rows(read_rows(data, V) % 40, 6)
    for train, held, error in (
        (answers, held_plain, "nothing to measure on"), (plain, held_answers, "nothing to learn from"),
    ):
        with pytest.raises(InputError, match=error):
            Training(settings(folder, data, tmp_path), target, np.concatenate((train, held)), marks=([48], 49))
    held = run.held
    assert held.counts.sum(1).tolist() == [16] * len(held.counts)
    held.counts[1:] = False
    inside = evaluate(run.student, run.teacher, held, run.start)
    alone = HeldOut(*(getattr(held, name)[:1, :26] for name in ("ids", "states", "normalisers", "choices", "counts")))
    found = evaluate(run.student, run.teacher, alone, run.start)  # the same text cut off where its answer ends
    assert inside["tau"] == pytest.approx(found["tau"], abs=1e-4) and inside["alpha"] == pytest.approx(
        found["alpha"], abs=1e-4
    )
