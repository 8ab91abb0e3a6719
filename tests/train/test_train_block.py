"A block in training: what its rows are about, which places are drawn, what its two heads learn, and what a slip costs."
import json

import numpy as np
import pytest
import torch

from helpers_training import CPU, V, make_data, make_target, settings, weights
from specdec.drafters.block import BlockDrafter, BlockState, load_block
from specdec.errors import InputError
from specdec.models.loading import load_model
from specdec.sampling import SamplingParams, SeededRandom
from specdec.train.data import read_rows
from specdec.train.export import distill
from specdec.train.loop import Training, distillation_loss
from specdec.train.student import step_weights

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder): return load_model(folder, CPU, torch.float32)


@pytest.fixture(scope="module")
def data(target, tmp_path_factory): return make_data(target, tmp_path_factory.mktemp("data"))


def begun(folder, data, target, out, marks=None, rows=None, **more):
    config = settings(folder, data, out, kind="block", **dict(block=4, markov=8, anchors=8) | more)
    return Training(config, target, read_rows(data, V) if rows is None else rows, marks=marks)


def shaken(run):
    "No weight as it was at the start, where the bias is 0; the weights that two runs share are shaken alike."
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in run.student.module.parameters():
            if p.requires_grad: p.add_(.1 * torch.randn(p.shape, generator=generator))
    return run


@pytest.mark.parametrize("markov", [0, 8])
def test_predictions_are_the_rows_of_blocks(folder, data, target, tmp_path, markov):
    "Step s at a place is row s of the block that began s places before, told the text's token there."
    run = shaken(begun(folder, data, target, tmp_path, markov=markov))
    ids, states = run.states([0, 1])
    features, block = run.teacher.features(states), run.student.block
    where = torch.rand(2, 32 - 6, generator=torch.Generator().manual_seed(0)) < .6
    with torch.no_grad():
        for step, said in enumerate(run.student.predictions(ids, features, 5, 6, where)):
            for logits, (row, place) in zip(said, where.nonzero().tolist()):
                anchor = torch.tensor([place + 6 - step])
                state = block.states(ids, features, torch.tensor([row]), anchor, 5)[0, step]
                torch.testing.assert_close(logits, block.logits(state, ids[row, place + 6]), atol=1e-4, rtol=1e-4)


def test_anchors_are_drawn_in_answers_and_what_lies_behind_them_does_not_count(folder, data, target, tmp_path):
    rows = read_rows(data, V) % 40
    rows[:, 9], rows[:, 25] = 48, 49
    run = shaken(begun(folder, data, target, tmp_path, marks=([48], 49), rows=rows, confidence=False))
    ids, states = run.states([0, 1])
    where = run.counts[:2, run.start:]

    def lesson(seed):
        generator = torch.Generator().manual_seed(seed)
        return run.student.drawn_lesson(ids, run.teacher.features(states), run.start, where, generator)
    one = lesson(0)
    assert torch.equal(one.at, lesson(0).at) and not torch.equal(one.at, lesson(1).at)
    at, weight = one.at.view(-1, 4), one.weights[0].view(-1, 4)
    assert len(at) == 16 and len(set(at[:, 0].tolist())) == 16
    assert set((at[:, 0] % 32).tolist()) <= set(range(9, 25))
    inside = (at % 32 < 25) & (at % 32 >= 9)
    expected = 4 * torch.tensor(step_weights(4, run.config.decay)) * inside
    torch.testing.assert_close(weight, expected)
    assert not inside.all()

    def loss(states):
        return distillation_loss(run.student, run.teacher, ids, states, run.config, run.start, where,
                                 torch.Generator().manual_seed(0)).item()
    other = states.clone()
    other[:, 26:] = 7 * torch.randn_like(other[:, 26:])  # the target says something else after the answer
    assert loss(other) == loss(states)
    other[:, 20:] = 7 * torch.randn_like(other[:, 20:])
    assert loss(other) != loss(states)


def test_a_step_whose_rows_hold_no_answer_teaches_nothing(folder, data, target, tmp_path):
    run = shaken(begun(folder, data, target, tmp_path))
    ids, states = run.states([0, 1])
    where = torch.zeros(2, 32 - run.start, dtype=torch.bool)
    loss = distillation_loss(run.student, run.teacher, ids, states, run.config, run.start, where,
                             torch.Generator().manual_seed(0))
    loss.backward()
    assert loss.item() == 0 and not any(p.grad.any() for p in run.parameters if p.grad is not None)
    run.counts = torch.zeros_like(run.counts)
    assert run.take_step() == 0
    run.check_finite()


def test_the_end_of_a_row_is_no_place(folder, data, target, tmp_path):
    run = begun(folder, data, target, tmp_path, anchors=1000)
    ids, states = run.states([0])
    where = torch.ones(1, 32 - run.start, dtype=torch.bool)
    lesson = run.student.drawn_lesson(ids, run.teacher.features(states), run.start, where, None)
    weight = lesson.weights[0].view(-1, 4)
    assert len(weight) == 32 - run.start and int((weight == 0).sum()) == 3 + 2 + 1


def test_the_confidence_head_is_a_probe_and_the_bias_is_not(folder, data, target, tmp_path):
    "The rows are pulled at alike with it or without; it is pulled at itself, and so is the bias."
    found = []
    for name, trust in (("a", True), ("b", False)):
        run = shaken(begun(folder, data, target, tmp_path / name, confidence=trust))
        ids, states = run.states([0, 1])
        where, draws = run.counts[:2, run.start:], torch.Generator().manual_seed(0)
        distillation_loss(run.student, run.teacher, ids, states, run.config, run.start, where, draws).backward()
        found.append({name: p.grad for name, p in run.student.module.named_parameters() if p.requires_grad})
    one, other = found
    assert {name for name in one if name not in other} == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    same = [name for name in other if torch.allclose(one[name], other[name], atol=1e-6, rtol=1e-4)]
    assert same == list(other) and all(grad.abs().sum() > 0 for grad in one.values())


def test_interrupted_and_resumed_it_is_the_same_to_the_bit(folder, data, target, tmp_path):
    short = dict(kind="block", block=4, markov=8, anchors=8)
    distill(settings(folder, data, tmp_path / "whole", **short))
    part = settings(folder, data, tmp_path / "parts", **short)
    run = Training(part, target, read_rows(data, V))
    from specdec.train.loop import train
    for line in train(run):
        if line["step"] == 6: break
    distill(part)
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert one.keys() == other.keys()
    for name, tensor in one.items(): assert torch.equal(tensor, other[name]), name


class OneRowOff(BlockState):
    "Wrong: the anchor stands a row early, on the place of the token before it, and the masks behind it."
    def propose(self, K, sampling, rng):
        self.read_on(sum(map(len, self.features)))
        self.cache.rollback(self.cache.length - 1)
        try: return super().propose(K, sampling, rng)
        finally: self.cache.length += 1


class KeepsRejected(BlockState):
    "Wrong: what the block said of rejected places stays as context, and the text's features behind it."
    def propose(self, K, sampling, rng):
        draft = super().propose(K, sampling, rng)
        if self.cache.length + 8 < self.cache.capacity: self.cache.length += len(draft.tokens)
        return draft


def test_what_no_distribution_shows_alpha_does(folder, data, target, tmp_path):
    "After a real training: a row off by one, or rejected places left as context, cost acceptance."
    out = distill(settings(folder, data, tmp_path / "d", kind="block", block=4, markov=8, tokens=150 * 4 * 32, lr=3e-3))
    lines = [json.loads(line) for line in (out / "training" / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["alpha"][0] > lines[0]["alpha"][0] + .05
    block, rows = load_block(out, target), torch.from_numpy(read_rows(data, V))[:12].long()

    def alpha(State):
        drafter, found = BlockDrafter(block, target), []
        drafter.State = State
        for ids in rows:
            logits, features = target.forward(ids[None], target.new_cache(32), layers=drafter.layers)
            p, state = logits[0].softmax(-1), drafter.start(ids[:6].tolist(), features[0, :5], 60)
            for place in range(6, 28):
                q = state.propose(2, SamplingParams(1.0), SeededRandom(place)).q[0]
                found.append(torch.minimum(p[place - 1], q).sum().item())
                state.commit(ids[place:place + 1].tolist(), features[0, place - 1:place])
        return np.mean(found)
    right = alpha(BlockState)
    assert right > alpha(OneRowOff) + .02 and right > alpha(KeepsRejected) + .02


@pytest.mark.parametrize("wrong", [dict(block=0), dict(anchors=0), dict(markov=-1)], ids=str)
def test_settings_are_checked(wrong):
    from specdec.train.student import DistillConfig
    with pytest.raises(InputError, match=next(iter(wrong))): DistillConfig(**wrong)


def test_a_rank_beyond_the_target_is_refused(folder, data, target, tmp_path):
    with pytest.raises(InputError, match="markov"): begun(folder, data, target, tmp_path, markov=65)
