"Files that are whole or absent, folders that remember, checkpoints that hold everything."
import pytest
import torch

from specdec.core import InputError
from specdec.train.config import DistillConfig
from specdec.train.resume import claim, load_checkpoint, save_checkpoint, training_tensors, written_whole
from specdec.train.steps import make_optimizers


def test_files_are_whole_or_absent(tmp_path):
    with pytest.raises(ZeroDivisionError):
        with written_whole(tmp_path / "a") as path:
            path.write_text("half")
            1 / 0
    assert not (tmp_path / "a").exists()
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
