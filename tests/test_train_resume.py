"Files that are whole or absent, folders that remember, checkpoints that hold everything."
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from helpers import on_a_disk_of
from specdec.core import InputError, ModelError
from specdec.models import written_whole
from specdec.train.data import claim
from specdec.train.loop import load_checkpoint, make_optimizers, save_checkpoint, training_tensors
from specdec.train.student import DistillConfig


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
