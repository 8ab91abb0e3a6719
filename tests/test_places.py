"""What a command writes to may hold something that was not made by it: each refuses it before any work, and takes an
empty path for the mistake that it is."""
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from helpers_training import CPU, V, make_data, make_target, settings
from specdec.app import cli
from specdec.app.cli import ExitCode
from specdec.errors import InputError, ModelError, NumericalError
from specdec.models import hub
from specdec.models.files import place_for
from specdec.models.loading import load_model
from specdec.train import export
from specdec.train.data import read_rows
from specdec.train.export import distill
from specdec.train.loop import load_checkpoint, make_optimizers
from specdec.train.student import DistillConfig

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder): return load_model(folder, CPU, torch.float32)


@pytest.fixture(scope="module")
def data(target, tmp_path_factory): return make_data(target, tmp_path_factory.mktemp("data"))


def run(*words):
    "A command in this process."
    return CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)


def everything(folder):
    "Each file below it, and its bytes."
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file() and not file.name.startswith(".")}


# The one question

def test_only_nothing_and_what_is_ours_is_replaced(tmp_path):
    "Nothing there, nothing in it, or ours; what can't be read is not ours."
    ours = lambda path: path.read_text() == "ours"
    for name, text in (("empty", ""), ("ours", "ours"), ("mine", "mine"), ("bytes", "\xff")):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / ".hidden.lock").write_text("x")
    for name in ("absent", "empty", "ours", "folder"): assert place_for(tmp_path / name, "x", ours) == tmp_path / name
    for name in ("mine", "bytes", ""):
        with pytest.raises(InputError, match="holds something else than a thing"):
            place_for(tmp_path / name, "a thing", ours)
    for path in ("", "~nobody-here/x"):
        with pytest.raises(InputError): place_for(path, "x", ours)
    with pytest.raises(InputError, match="isn't a file or a folder"): place_for("/dev/null", "x", ours)


# distill

@pytest.fixture
def no_work(monkeypatch):
    "Fail where a model would be looked for."
    def refuse(*arguments, **more): raise AssertionError("work was begun")
    monkeypatch.setattr(export, "find_model", refuse)


def places(folder, tmp_path):
    "Where no drafter may go: the target's folder, another model's, a project with files of its own."
    yield folder
    yield shutil.copytree(folder, tmp_path / "other")
    for name, files in (("weights", ["model.safetensors"]), ("project", ["training/train.py"]), ("notes", ["a.txt"]),
                        ("log", ["training/log.jsonl"]), ("config", ["training/config.json"]), ("file", [])):
        for file in files:
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text('{"lr": 1}')
        if not files: (tmp_path / name).write_text("a file")
        yield tmp_path / name
    both = shutil.copytree(folder, tmp_path / "both")  # a run of ours, and a model that isn't
    (both / "training").mkdir()
    (both / "training" / "config.json").write_text('{"kind": "head", "rows": "0", "processes": 1}')
    yield both


@pytest.mark.parametrize("which", range(9), ids=["target", "other", "weights", "project", "notes", "log", "config",
                                                 "file", "both"])
def test_a_drafter_never_replaces_anything_else(folder, tmp_path, no_work, which):
    place = [*places(folder, tmp_path)][which]
    before = everything(place) if place.is_dir() else place.read_bytes()
    done = run("distill", "--out", place, "--target", folder, "--tokens", 1000)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (ExitCode.BAD_INPUT, "", 1), done.stderr
    assert "would be lost" in done.stderr or "would be overwritten" in done.stderr
    assert before == (everything(place) if place.is_dir() else place.read_bytes())


def test_a_run_goes_on_where_it_was_stopped_and_a_drafter_alone_is_not_replaced(folder, data, tmp_path):
    config = settings(folder, data, tmp_path / "d", tokens=2 * 4 * 32)
    distill(config)
    assert distill(config) == tmp_path / "d"  # with its run
    (tmp_path / "d" / "config.json").unlink()  # as a kill leaves it, between two files
    assert distill(config) == tmp_path / "d" and (tmp_path / "d" / "config.json").exists()
    (tmp_path / "early" / "training" / "samples").mkdir(parents=True)
    assert distill(DistillConfig(**config.__dict__ | dict(out=str(tmp_path / "early")))) == tmp_path / "early"
    shutil.rmtree(tmp_path / "d" / "training")
    before = everything(tmp_path / "d")
    with pytest.raises(InputError, match="would be lost"): distill(config)
    assert everything(tmp_path / "d") == before


@pytest.mark.parametrize("name", ["out", "target", "data", "prompts", "weights", "keep_states"])
def test_an_empty_path_is_no_path(name):
    with pytest.raises(InputError, match=f"{name} must not be empty"): DistillConfig(**{name: ""})


@pytest.mark.parametrize("more, error", [
    (dict(layers=20_000), "deeper|at most 4"), (dict(batch=10**12), "whole training")])
@pytest.mark.parametrize("kind", ["head", "block", "lm"])
def test_sizes_are_held_against_the_target(folder, tmp_path, monkeypatch, more, error, kind):
    monkeypatch.setattr(export, "sample", None)
    config = settings(folder, None, tmp_path / "d", kind=kind).__dict__ | dict(data=None) | more
    with pytest.raises(InputError, match=error): distill(DistillConfig(**config))


def test_a_step_has_no_more_rows_than_there_are(folder, data, tmp_path):
    with pytest.raises(InputError, match="more than there are to train on"):
        distill(settings(folder, data, tmp_path / "d", batch=10**6, tokens=10**9))


# Shards

def header(shape, kind="<u2"):
    "The beginning of a NumPy file."
    words = repr({"descr": kind, "fortran_order": False, "shape": shape}).encode()
    words += b" " * (118 - len(words)) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(words).to_bytes(2, "little") + words


def test_a_shard_is_held_against_its_size(tmp_path):
    file = tmp_path / "a.npy"
    for content in (header((10**13, 32)) + b"\0" * 64, header((2**32, 2**32)) + b"\0" * 64, header((2**63, 4)),
                    header((10**13, 32), "<U0"), header((10**13, 0)), header((-1, 4)), header((4, 4))[:50],
                    b"\x93NUMPY",
                    b"\x93NUMPY\x01\x00\x76\x00" + b"(" * 118, b"", b"PK\x03\x04 a packed file"):
        file.write_bytes(content)
        with pytest.raises(InputError): read_rows(tmp_path, V)
    with open(file, "wb") as large:  # it really is as long as it says, and takes no room on the disk
        large.write(header((10**10, 32)))
        large.truncate(len(header((10**10, 32))) + 64 * 10**10)
    with pytest.raises(InputError, match="GB, which aren't free"): read_rows(tmp_path, V)
    file.unlink()
    np.savez(tmp_path / "b.npz", np.zeros((2, 5), np.uint16))
    (tmp_path / "b.npz").rename(file)
    with pytest.raises(InputError, match="no NumPy array"): read_rows(tmp_path, V)


# What can't be learned from

def test_training_ends_at_the_first_step_that_diverges(folder, data, tmp_path):
    config = settings(folder, data, tmp_path / "d", lr=1e30, checkpoint_every=1)
    with pytest.raises(NumericalError, match=r"at step \d+ the loss is|after step \d+ a weight"): distill(config)
    assert not (tmp_path / "d" / "model.safetensors").exists()
    for file in (tmp_path / "d" / "training").glob("checkpoint.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(file).values())


def test_a_checkpoint_is_kept_where_training_diverges_after_it(folder, data, tmp_path, monkeypatch):
    from specdec.train import loop
    right, done = loop.distillation_loss, []
    def broken(*arguments):
        done.append(1)
        return right(*arguments) * (float("nan") if len(done) > 4 else 1)
    monkeypatch.setattr(loop, "distillation_loss", broken)
    config = settings(folder, data, tmp_path / "d")
    with pytest.raises(NumericalError, match="at step 5 the loss is nan"): distill(config)
    monkeypatch.setattr(loop, "distillation_loss", right)
    distill(config)  # from the checkpoint of step 3


def damaged(tensors, name):
    "Checkpoints that fit a drafter no longer."
    p = "weight.1.weight"
    memory = next(key for key in tensors if key.startswith("muon.1."))
    average = next(key for key in tensors if key.endswith("exp_avg"))
    return tensors | {
        "one number": {p: tensors[p][:1, :1]}, "a row": {p: tensors[p][0]}, "turned": {p: tensors[p].T.contiguous()},
        "NaN": {p: tensors[p] * float("nan")}, "integers": {p: tensors[p].int()},
        "memory": {memory: tensors[memory][:1]}, "average": {average: torch.tensor(1.0)},
        "infinite memory": {memory: tensors[memory] / 0}, "of another": {"sgd.0.momentum": torch.zeros(3)},
        "one more": {"adamw.7.exp_avg": torch.zeros(3)},
    }[name]


@pytest.mark.parametrize("name", ["one number", "a row", "turned", "NaN", "integers", "memory", "average",
                                  "infinite memory", "of another", "one more", "fewer"])
def test_a_checkpoint_that_does_not_fit_is_not_resumed(tmp_path, name):
    from specdec.train.loop import save_checkpoint, training_tensors
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizers = make_optimizers(module, DistillConfig())
    module(torch.ones(1, 4)).sum().backward()
    for optimizer in optimizers.values(): optimizer.step()
    save_checkpoint(tmp_path / "c", module, optimizers, {"step": 1})
    load_checkpoint(tmp_path / "c", module, optimizers)
    before = {key: tensor.clone() for key, tensor in training_tensors(module, optimizers).items()}
    tensors = load_file(tmp_path / "c")
    if name == "fewer": del tensors["adamw.0.exp_avg"]
    else: tensors = damaged(tensors, name)
    save_file(tensors, tmp_path / "c", {"state": '{"step": 1}'})
    with pytest.raises(ModelError, match="c can't be resumed"): load_checkpoint(tmp_path / "c", module, optimizers)
    after = training_tensors(module, optimizers)
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())


# The other commands

def answers(place): return ["generate", "--prompts", place.parent / "questions", "--out", place]
def grid(place): return ["bench", "run", place.parent / "grid.yaml", "--out", place]
def peers(place): return ["bench", "peers", "--count", 1, "--out", place]
def drafters(place): return ["bench", "drafters", "--out", place]
def report(place): return ["bench", "report", place.parent / "results", "--out", place.parent]
def compared(place): return ["bench", "report", "--compare", place, place, "--out", place.parent]
def exported(place): return ["export", "smollm2", "--out", place]
def head(place): return ["export", "smollm2-head", "--out", place]
def copied(place): return ["export", "smollm2", "--dtype", "int4", "--out", place]
def prompts(place): return ["prompts", "--out", place]
def audited(place): return ["audit", "dummy", "--out", place]


WRITERS = {  # `bench target` keeps its records as `bench peers` does
    answers: "a.jsonl", grid: "a.jsonl", peers: "a.jsonl", drafters: "a.jsonl", report: "report.md",
    compared: "report.html", exported: "a.gguf", head: "a.gguf", copied: "a.gguf", prompts: "a.jsonl",
    audited: "a.json",
}
MINE = b'{"text": "a line of mine"}\nand another\n'


@pytest.fixture
def no_model_read(monkeypatch):
    "Fail where weights would be read."
    from specdec import pair
    from specdec.models import loading
    def refuse(*arguments, **more): raise AssertionError("a model was read")
    for module, name in ((loading, "load_model"), (loading, "load"), (pair, "load_pair"), (hub, "load_tokenizer")):
        monkeypatch.setattr(module, name, refuse)


@pytest.mark.parametrize("command", WRITERS, ids=lambda command: command.__name__)
def test_no_command_replaces_what_it_did_not_write(command, tmp_path, no_model_read):
    (tmp_path / "questions").write_text("Why?\n")
    (tmp_path / "grid.yaml").write_text("pairs: [smollm2]\n")
    place = tmp_path / WRITERS[command]
    place.write_bytes(MINE)
    done = run(*command(place))
    assert done.exit_code == ExitCode.BAD_INPUT and done.stdout == "", done.stdout
    assert f"\n{done.stderr}".count("\nError") == 1 and str(place) in done.stderr, done.stderr
    assert place.read_bytes() == MINE and not list(tmp_path.glob("*.partial"))


EMPTY = [
    ["generate", "Hi", "--out", ""], ["bench", "run", "grid.yaml", "--out", ""], ["bench", "peers", "--out", ""],
    ["bench", "target", "--out", ""], ["bench", "drafters", "--out", ""], ["bench", "report", "r", "--out", ""],
    ["export", "smollm2", "--out", ""], ["prompts", "--out", ""], ["audit", "--out", ""],
    ["distill", "--out", ""], *(["distill", "--out", "d", f"--{name}", ""] for name in (
        "target", "data", "prompts", "from", "keep-states")), ["export", "", "--out", "a.gguf"], ["load", ""],
    ["follow", ""], ["follow", "smollm2-head", "--served", ""], ["generate", "Hi", "--target", ""],
    ["generate", "Hi", "--drafter", ""], ["generate", "Hi", "--config", ""], ["explain", ""], ["bench", "run", ""],
    ["bench", "report", ""], ["bench", "report", "--compare", "", "b"], ["prompts", "--source", ""],
    ["prompts", "--target", ""], ["generate", "Hi", "--target", "smollm2", "--draft", ""],
    ["generate", "Hi", "--pair="], ["generate", "Hi", "--target", "smollm2", "--revision", ""],
    ["ollama", "--model", ""], ["ollama", "--url", ""], ["pairs", ""], ["compare", "Hi", "--target", ""],
    ["audit", ""],
    ["bench", "drafters", "--only", ""], ["check-server", "x", "--prompt", "a", "--model", ""],
]


@pytest.mark.parametrize("words", EMPTY, ids=lambda words: " ".join(map(str, words[:2])))
def test_an_empty_value_is_no_path(words, tmp_path, monkeypatch, no_model_read):
    monkeypatch.chdir(tmp_path)
    done = run(*words)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (ExitCode.BAD_INPUT, "", 1)
    assert "is empty" in done.stderr and not list(tmp_path.iterdir())


def test_what_a_command_wrote_it_may_write_again(tmp_path, monkeypatch):
    from specdec.app.config import Config, save_config
    from specdec.bench.prompts import is_saved
    from specdec.bench.report import Section, write_report
    from specdec.models.gguf import gguf_path
    for _ in range(2): write_report("a", [Section("b", ["c"])], tmp_path)
    for _ in range(2): assert run("prompts", "--source", "quick", "--out", tmp_path / "p.jsonl").exit_code == 0
    assert is_saved(tmp_path / "p.jsonl")
    for _ in range(2): save_config(Config(), tmp_path / "a.yaml")
    (tmp_path / "mine.yaml").write_text("steps: [one, two]\n")
    with pytest.raises(InputError, match="would be lost"): save_config(Config(), tmp_path / "mine.yaml")
    (tmp_path / "original.gguf").write_bytes(b"GGUF of another")
    shutil.copy(tmp_path / "original.gguf", tmp_path / "copy.gguf")
    assert gguf_path(tmp_path / "copy.gguf", tmp_path / "original.gguf")
    with pytest.raises(InputError, match="would be lost"): gguf_path(tmp_path / "copy.gguf")


def test_only_a_converted_model_is_rebuilt(tmp_path, monkeypatch):
    "A folder of the same name, in a folder that SPECDEC_HOME names, may be someone's own model."
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    monkeypatch.setattr(hub, "convert_gguf", lambda gguf, folder: (folder / "new").touch())
    monkeypatch.setattr(hub, "check_gguf", lambda gguf: gguf)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "model.safetensors").write_bytes(b"mine")
    done = run("fetch", "--rebuild")
    assert done.exit_code == ExitCode.BAD_INPUT and "would be lost" in done.stderr
    assert everything(tmp_path) == {tmp_path / "smollm2" / "model.safetensors": b"mine"}
    (tmp_path / "smollm2" / hub.MANIFEST).write_text("damaged")
    assert hub.fetch(rebuild=True) == tmp_path / "smollm2" and (tmp_path / "smollm2" / "new").exists()
