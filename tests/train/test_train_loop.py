"One step, what is measured on held-out rows, and checkpoints that hold everything."
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from helpers import on_a_disk_of
from helpers_training import CPU, V, make_data, make_target, settings
from specdec.drafters.head_drafter import HeadDrafter
from specdec.errors import InputError, ModelError
from specdec.models.files import written_whole
from specdec.models.loading import load_model
from specdec.sampling import SamplingParams, SeededRandom
from specdec.train.data import claim, read_rows, split_rows
from specdec.train.loop import (
    HeldOut,
    Muon,
    Training,
    _Loss,
    distillation_loss,
    evaluate,
    learning_rate_at,
    load_checkpoint,
    make_optimizers,
    rows_of_step,
    save_checkpoint,
    tokens_of_round,
    training_tensors,
)
from specdec.train.student import LOSSES, DistillConfig, step_weights

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


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16)], ids=str)
def test_muon_is_pytorchs_in_either_precision(shape):
    "To the bit in bfloat16; in float32 the same direction, and a step that is not turned would be seen."
    generator = torch.Generator().manual_seed(0)
    begin, *gradients = torch.randn(4, *shape, generator=generator)
    ends = {}
    for name, dtype in {"theirs": None, "bits": torch.bfloat16, "float32": torch.float32}.items():
        w = torch.nn.Parameter(begin.clone())
        optimizer = Muon([w], lr=.02) if dtype else torch.optim.Muon([w], lr=.02, weight_decay=0)
        if dtype: optimizer.dtype = dtype
        for gradient in gradients:
            w.grad = gradient.clone()
            optimizer.step()
        ends[name] = w.detach()
    moved = (ends["theirs"] - begin).norm()
    assert torch.equal(ends["bits"], ends["theirs"])
    assert 0 < (ends["float32"] - ends["theirs"]).norm() < .05 * moved
    assert (begin - .02 * sum(gradients) - ends["theirs"]).norm() > moved


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


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_loss_in_pieces_is_the_loss_at_once(loss, temperature):
    "The weighted mean over places and steps, and what it asks of each logit, as autograd finds it without pieces."
    draws, n, D = torch.Generator().manual_seed(0), 150, 9  # two whole pieces and a part of one
    config = DistillConfig(loss=loss, temperature=temperature, decay=0.5)
    said, labels = 3 * torch.randn(n, D, generator=draws), torch.randint(-1, D, (n,), generator=draws)
    logits = [torch.randn(n, D, generator=draws).requires_grad_() for _ in range(3)]
    p = (said / temperature).softmax(-1)
    each = [LOSSES[loss](p, z.log_softmax(-1), labels).mean() for z in logits]
    parts = [weight * part for weight, part in zip((4 / 7, 2 / 7, 1 / 7), each)]
    found, alpha = _Loss.apply(config, said, labels, step_weights(3, .5), *logits)
    torch.testing.assert_close(found, sum(parts))
    torch.testing.assert_close(alpha, torch.minimum(p, logits[-1].softmax(-1)).sum(-1))
    asked, expected = torch.autograd.grad(3 * found, logits), torch.autograd.grad(3 * sum(parts), logits)
    torch.testing.assert_close(asked, expected)
    assert all(grad.abs().sum() > 0 for grad in asked)
    assert not torch.allclose(asked[0], asked[1], atol=1e-3)  # each step has its own


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
        q = drafter.start(ids[:L], features[0, :-1], 40).propose(1, SamplingParams(1.0), SeededRandom(0)).q[0]
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


def test_files_are_whole_or_absent(tmp_path):
    with pytest.raises(ZeroDivisionError):
        with written_whole(tmp_path / "a") as path:
            path.write_text("half")
            1 / 0
    assert list(tmp_path.iterdir()) == []
    claim(tmp_path / "b", {"x": 1})
    claim(tmp_path / "b", {"x": 1})
    with pytest.raises(InputError, match="x was 1 and is 2"): claim(tmp_path / "b", {"x": 2})


def test_checkpoint_holds_everything(tmp_path):
    def fresh():
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        return module, make_optimizers(module, DistillConfig())
    def step(module, optimizers, i):
        (module(torch.full((1, 4), float(i))) ** 2).sum().backward()
        for optimizer in optimizers.values(): optimizer.step(); optimizer.zero_grad()
    module, optimizers = fresh()
    for i in range(3): step(module, optimizers, i)
    save_checkpoint(tmp_path / "c", module, optimizers, {"step": 3})
    other, others = fresh()
    assert load_checkpoint(tmp_path / "c", other, others) == {"step": 3}
    for i in range(3, 5): step(module, optimizers, i); step(other, others, i)
    for name, tensor in training_tensors(module, optimizers).items():
        assert torch.equal(tensor, training_tensors(other, others)[name]), name


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("os error 28")], ids=repr)
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, error):
    with pytest.raises(ModelError, match="a can't be written"):
        with written_whole(tmp_path / "a") as path:
            path.write_text("half")
            raise error
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(tmp_path):
    module = torch.nn.Linear(100, 100)
    optimizers = make_optimizers(module, DistillConfig())
    save_checkpoint(tmp_path / "c", module, optimizers, {"step": 3})
    before = (tmp_path / "c").read_bytes()
    with on_a_disk_of(5000):
        with pytest.raises(ModelError, match="c can't be written"):
            save_checkpoint(tmp_path / "c", module, optimizers, {"step": 4})
    assert [file.name for file in tmp_path.iterdir()] == ["c"] and (tmp_path / "c").read_bytes() == before


@pytest.mark.parametrize("state", ["5", "{}", '{"step": "3"}', '{"step": -1}', "[3]", "nonsense"])
def test_a_checkpoint_that_does_not_say_which_step_it_is(tmp_path, state):
    module = torch.nn.Linear(2, 2)
    optimizers = make_optimizers(module, DistillConfig())
    save_file({"weight.weight": torch.zeros(2, 2), "weight.bias": torch.zeros(2)}, tmp_path / "c", {"state": state})
    with pytest.raises(ModelError, match="c can't be resumed"): load_checkpoint(tmp_path / "c", module, optimizers)


def test_a_checkpoint_with_memories_of_something_else(tmp_path):
    module = torch.nn.Linear(2, 2)
    optimizers = make_optimizers(module, DistillConfig(optimizer="adamw"))
    tensors = {"weight.weight": torch.zeros(2, 2), "weight.bias": torch.zeros(2), "adamw.first.step": torch.zeros(1)}
    save_file(tensors, tmp_path / "c", {"state": '{"step": 3}'})
    with pytest.raises(ModelError, match="c can't be resumed"): load_checkpoint(tmp_path / "c", module, optimizers)


@pytest.mark.parametrize("text", ["5", "null", '[["x", 1]]', "[[1, 2]]", "[" * 10**5, "\xff"], ids=lambda t: t[:12])
def test_settings_that_are_valid_json_and_no_settings(tmp_path, text):
    (tmp_path / "b").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match="can't be read"): claim(tmp_path / "b", {"x": 1})


def test_two_that_write_one_file_do_not_mix(tmp_path):
    with written_whole(tmp_path / "a") as one, written_whole(tmp_path / "a") as other:
        assert one != other
        one.write_text("one")
        other.write_text("other")
    assert (tmp_path / "a").read_text() == "one" and [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_link_stays_one_and_what_is_no_file_is_left_alone(tmp_path):
    (tmp_path / "a").write_text("before")
    (tmp_path / "a").chmod(0o640)
    (tmp_path / "link").symlink_to("a")
    with written_whole(tmp_path / "link") as path: path.write_text("after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "a").read_text() == "after"
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
    with pytest.raises(ModelError, match="/dev/null can't be written .*it is not a file"):
        with written_whole(Path("/dev/null")): raise AssertionError("never")
