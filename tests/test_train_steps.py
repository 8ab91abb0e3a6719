"One step: which rows, which rate, which optimiser, and that guesses are compared with the right places."
import pytest
import torch

from helpers_training import CPU, V, make_data, make_target, settings
from specdec.loading import load_model
from specdec.train.data import read_rows
from specdec.train.loop import Training, distillation_loss, evaluate, learning_rate_at, make_optimizers, rows_of_step

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder): return load_model(folder, CPU, torch.float32)


@pytest.fixture(scope="module")
def data(target, tmp_path_factory): return make_data(target, tmp_path_factory.mktemp("data"))
def test_every_row_once_per_epoch():
    seen = [i for step in range(5) for i in rows_of_step(step, 4, 10, seed=0)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10)) and seen[:10] != seen[10:]
    assert rows_of_step(3, 4, 10, 0) == seen[12:16] and rows_of_step(3, 4, 10, 1) != seen[12:16]


def test_schedules():
    for kind in ("trapezoid", "cosine"):
        rates = [learning_rate_at(s, 100, 5, kind) for s in range(100)]
        assert rates[0] == pytest.approx(0.2, abs=0.01) and max(rates) <= 1 and rates[4] > 0.98 and 0 < rates[-1] < 0.06
        assert rates[5:] == sorted(rates[5:], reverse=True)
    assert learning_rate_at(79, 100, 5, "trapezoid") == 1 > learning_rate_at(79, 100, 5, "cosine")
    # a longer run begins the same
    assert [learning_rate_at(s, 100, 5, "trapezoid") for s in range(80)] == [
        learning_rate_at(s, 200, 5, "trapezoid") for s in range(80)
    ]


def test_muon_gets_the_matrices_inside(folder, data, tmp_path, target):
    run = Training(settings(folder, data, tmp_path), target, read_rows(data, V))
    names = {id(p): n for n, p in run.student.module.named_parameters()}
    muon = {names[id(p)] for g in run.optimizers["muon"].param_groups for p in g["params"]}
    adamw = {names[id(p)] for g in run.optimizers["adamw"].param_groups for p in g["params"]}
    assert "lm_head.weight" in adamw and "fc.weight" in muon and len(muon) == 8
    assert muon | adamw == {n for n, p in run.student.module.named_parameters() if p.requires_grad} and not muon & adamw
    assert list(make_optimizers(run.student.module, settings(folder, data, tmp_path, optimizer="adamw"))) == ["adamw"]


def test_a_step_is_compared_with_the_right_position(folder, data, tmp_path, target):
    "A student that says what the target says at each position has loss 0 and α 1; shifted by one place it has not."
    rows = read_rows(data, V)
    run = Training(settings(folder, data, tmp_path, vocab=0), target, rows)
    ids, states = run.states([0, 1, 2])

    class Oracle:
        steps = 3
        def __init__(self, shift): self.shift = shift
        def predictions(self, ids, features, steps, start, where):
            logits = torch.cat([target.forward(row[None], target.new_cache(32)) for row in ids]).roll(self.shift, 1)
            for _ in range(steps): yield logits[:, start:][where]

    for shift, right in ((0, True), (1, False)):
        loss = distillation_loss(
            Oracle(shift), run.teacher, ids, states, run.config, run.start, run.counts[:3, run.start :]
        ).item()
        found = evaluate(Oracle(shift), run.teacher, run.held, run.start)
        assert (abs(loss) < 1e-4) == right and (abs(found["tau"] - 6) < 1e-3) == right
        assert all((abs(a - 1) < 1e-4) == right for a in found["alpha"] + found["greedy"])
