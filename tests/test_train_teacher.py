"What the teacher said is kept, and not computed again."
import os

import pytest
import torch

from helpers import on_a_disk_of
from helpers_training import CPU, V, make_data, make_target
from specdec.core import ModelError
from specdec.loading import load_model
from specdec.train.data import States, Teacher, read_rows

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
    assert [i for i in range(len(rows)) if kept.kept.read(i)] == [1, 3]
    expected = plain([3, 1])[1]
    teacher.read = None  # what is kept isn't computed again
    assert torch.equal(States(teacher, rows, tmp_path)([1, 3])[1], expected.flip(0))


def shorter(file): os.truncate(file, file.stat().st_size - 1)
def longer(file): os.truncate(file, file.stat().st_size + 1)
def much_shorter(file): os.truncate(file, 10)
def zeros(file):
    shorter(file)
    longer(file)
def flipped(file):
    data = bytearray(file.read_bytes())
    data[-40] ^= 1
    file.write_bytes(data)
def other_place(file): file.write_bytes(b"!" + file.read_bytes())


@pytest.mark.parametrize("damage", [shorter, longer, much_shorter, zeros, flipped, other_place])
def test_damaged_states_are_never_trained_on(data, tmp_path, target, damage):
    """Cut off, filled up with zeros, one bit changed: what isn't as it was written counts as not kept, and the target
    is asked again."""
    rows, teacher = read_rows(data, V), Teacher(target, torch.arange(30), (1, 2))
    expected = States(teacher, rows, tmp_path)([0, 5])[1]
    (file,) = tmp_path.glob("*.states")
    damage(file)
    again = States(teacher, rows, tmp_path)
    assert torch.equal(again([0, 5])[1], expected)
    teacher.read = None
    assert torch.equal(again([0, 5])[1], expected)  # and they are kept again


def test_a_file_that_is_cut_off_while_it_is_used(data, tmp_path, target):
    "Mapped into memory it would be a bus error."
    rows, teacher = read_rows(data, V), Teacher(target, torch.arange(30), (1, 2))
    states = States(teacher, rows, tmp_path)
    expected = states([0, 5])[1]
    (file,) = tmp_path.glob("*.states")
    os.truncate(file, 0)
    assert torch.equal(states([0, 5])[1], expected)


def test_a_full_disk_is_told_and_what_was_kept_stays(data, tmp_path, target):
    rows, teacher = read_rows(data, V), Teacher(target, torch.arange(30), (1, 2))
    states = States(teacher, rows, tmp_path)
    expected = states([0])[1]
    (file,) = tmp_path.glob("*.states")
    with on_a_disk_of(file.stat().st_size + 100):
        with pytest.raises(ModelError, match="--keep-states"): states([1])
    assert states.kept.read(0) and not states.kept.read(1)
    teacher.read = None
    assert torch.equal(States(teacher, rows, tmp_path)([0])[1], expected)
