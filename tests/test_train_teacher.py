"What the teacher said is kept, and not computed again."
import pytest
import torch

from helpers_training import CPU, V, make_data, make_target
from specdec.loading import load_model
from specdec.train.rows import read_rows
from specdec.train.teacher import States, Teacher

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder): return load_model(folder, CPU, torch.float32)


@pytest.fixture(scope="module")
def data(target, tmp_path_factory): return make_data(target, tmp_path_factory.mktemp("data"))
def test_kept_states_are_the_same_states(folder, data, tmp_path, target):
    rows = read_rows(data, V)
    teacher = Teacher(target, torch.arange(30), (1, 2))
    kept, plain = States(teacher, rows, tmp_path), States(teacher, rows, None)
    for _ in range(2):
        for a, b in zip(kept([3, 1]), plain([3, 1])): assert torch.equal(a, b)
    assert kept.done.sum() == 2
    expected = plain([3, 1])[1]
    teacher.read = None  # what is kept isn't computed again
    assert torch.equal(States(teacher, rows, tmp_path)([1, 3])[1], expected.flip(0))
