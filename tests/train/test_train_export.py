"Whole runs: they help, they resume after kill -9, two processes train as one, and what can not be is told before."
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import on_a_disk_of
from helpers_training import CPU, V, make_data, make_target, settings, weights
from specdec.drafters.block import BlockDrafter, load_block
from specdec.drafters.head import load_head
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.model import ModelDrafter, NarrowLM
from specdec.errors import InputError, ModelError
from specdec.loop import speculate
from specdec.models.loading import load, load_model
from specdec.sampling import SamplingParams, SeededRandom
from specdec.train import export
from specdec.train.data import read_rows
from specdec.train.export import check_run, distill
from specdec.train.loop import Training, training_tensors
from specdec.train.student import DistillConfig

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder): return load_model(folder, CPU, torch.float32)


@pytest.fixture(scope="module")
def data(target, tmp_path_factory): return make_data(target, tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("kind", ["head", "block", "lm"])
def test_training_helps_and_the_drafter_loads(folder, data, tmp_path, target, kind):
    out = distill(settings(folder, data, tmp_path / "d", kind=kind, tokens=80 * 4 * 32, lr=3e-3))
    lines = [json.loads(line) for line in (out / "training" / "log.jsonl").read_text().splitlines()]
    assert lines[0]["tokens"] == 0 and lines[-1]["tokens"] == 80 * 4 * 32
    assert lines[-1]["loss"] < lines[1]["loss"] / 2
    if kind == "head": drafter = HeadDrafter(load_head(out, target), target)
    elif kind == "block": drafter = BlockDrafter(load_block(out, target), target)
    else:
        draft = load_model(out, CPU, torch.float32, use="draft")
        assert isinstance(draft, NarrowLM) and draft.vocab_size == V
        assert torch.isfinite(draft.forward(torch.tensor([[0, 49]]), draft.new_cache(4))).sum(-1).tolist() == [[30, 30]]
        drafter = ModelDrafter(draft, V)
    rounds = list(speculate(target, drafter, [0, 3], SamplingParams(0.0), SeededRandom(0), 3, 20, frozenset()))
    text = [t for r in rounds for t in r.emitted]
    plain = [0, 3]
    for _ in range(20): plain.append(int(target.forward(torch.tensor([plain]), target.new_cache(30), last=1).argmax()))
    assert text == plain[2:]


def test_a_whole_vocabulary_is_an_ordinary_checkpoint(folder, data, tmp_path):
    out = distill(settings(folder, data, tmp_path / "d", kind="lm", vocab=0, tokens=4 * 32))
    assert load(str(out), "cpu", "float32").vocab_size == V and not (out / "draft_tokens.safetensors").exists()


SCRIPT = """
import json, sys, torch
torch.set_num_threads(1)
from specdec.train.export import distill
from specdec.train.student import DistillConfig
distill(DistillConfig(**json.loads(sys.argv[1])))
"""


def test_resumes_after_kill_9_with_the_same_weights(folder, data, tmp_path):
    whole, killed = (
        settings(folder, data, tmp_path / name, tokens=40 * 4 * 32, keep_states=str(tmp_path / "states" / name))
        for name in ("whole", "killed")
    )
    distill(whole)
    log = tmp_path / "killed" / "training" / "log.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(killed.__dict__)], stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 3): time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was done before it could be killed"
    with open(log, "a") as file: file.write('{"step": 39, "half a li')  # what a kill can leave behind
    assert weights(killed.out).keys() == weights(whole.out).keys()
    # it was really interrupted
    assert any(not torch.equal(a, weights(whole.out)[name]) for name, a in weights(killed.out).items())
    distill(killed)
    assert all(torch.equal(a, weights(whole.out)[name]) for name, a in weights(killed.out).items())
    logs = [
        [
            {k: v for k, v in json.loads(line).items() if k not in ("seconds", "loss")}
            for line in (Path(c.out) / "training" / "log.jsonl").read_text().splitlines()
        ]
        for c in (whole, killed)
    ]
    assert logs[0] == logs[1]
    drafters = [load_file(Path(c.out) / "model.safetensors") for c in (whole, killed)]
    assert all(torch.equal(a, drafters[1][name]) for name, a in drafters[0].items())


def test_a_finished_run_can_go_on_and_a_changed_one_cannot(folder, data, tmp_path):
    config = settings(folder, data, tmp_path / "d")
    distill(config)
    before = weights(config.out)
    distill(config)  # nothing left to do
    assert all(torch.equal(a, before[name]) for name, a in weights(config.out).items())
    distill(DistillConfig(**config.__dict__ | dict(tokens=15 * 4 * 32)))
    assert any(not torch.equal(a, before[name]) for name, a in weights(config.out).items())
    with pytest.raises(InputError, match="loss was 'kl' and is 'tv'"):
        distill(DistillConfig(**config.__dict__ | dict(loss="tv")))
    (tmp_path / "d" / "training" / "checkpoint.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match="can't be resumed"): distill(config)


def test_a_run_that_has_begun_keeps_its_texts(folder, data, tmp_path, monkeypatch):
    "More tokens to train on don't mean other rows to train on."
    asked = []
    def written(config, rank, count, target):
        asked.append(config.tokens)
        return shutil.copytree(data, config.out)
    monkeypatch.setattr(export, "sample", written)
    config = DistillConfig(**settings(folder, data, tmp_path / "d").__dict__ | dict(data=None))
    distill(config)
    distill(DistillConfig(**config.__dict__ | dict(tokens=15 * 4 * 32)))
    assert asked == [config.tokens // 2]  # each is read twice


def test_a_run_that_was_killed_early_begins_its_log_again(folder, data, tmp_path, target):
    config = settings(folder, data, tmp_path / "d")
    distill(config)
    for file in (tmp_path / "d").glob("*.*"): file.unlink()
    (tmp_path / "d" / "training" / "checkpoint.safetensors").unlink()  # none was written yet
    (tmp_path / "d" / "training" / "log.jsonl").write_text('{"step": 0}\n{"step": 3, "al')
    distill(config)
    steps = [json.loads(line)["step"] for line in (tmp_path / "d" / "training" / "log.jsonl").read_text().splitlines()]
    assert steps == [0, 3, 6, 9, 12]


@pytest.fixture
def no_texts(monkeypatch):
    "Fail where the target would write its texts."
    def refuse(*arguments): raise AssertionError("texts were written")
    monkeypatch.setattr(export, "sample", refuse)


@pytest.mark.parametrize(
    "more, error, says",
    [
        (dict(vocab=V + 1), InputError, "draft vocabulary"),
        (dict(kind="lm", vocab=V + 1), InputError, "draft vocabulary"),
        (dict(kind="lm", hidden=128), InputError, "wider"), (dict(weights="target"), ModelError, "EAGLE-3"),
        (dict(out="file"), InputError, "holds something else"),
        (dict(keep_states="file/states"), InputError, "can't be made"),
        (dict(out="taken"), InputError, "taken holds something else"),
    ],
    ids=["vocab", "small vocab", "hidden", "weights", "out", "states", "training"],
)
def test_what_cannot_be_trained_is_told_before_texts_are_written(folder, data, tmp_path, no_texts, more, error, says):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "training").write_text("in the way")
    paths = {
        name: str(folder if more[name] == "target" else tmp_path / more[name])
        for name in more.keys() & {"out", "weights", "keep_states"}
    }
    with pytest.raises(error, match=says):
        distill(replace(settings(folder, None, tmp_path / "new"), **more | paths, data=None))


def test_a_target_of_another_family_is_told_before_texts_are_written(tmp_path, no_texts):
    from transformers import GPT2Config, GPT2LMHeadModel
    GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=32, n_layer=3, n_head=2, n_positions=64)).save_pretrained(
        tmp_path / "other"
    )
    with pytest.raises(InputError, match="our own decoder"):
        distill(replace(settings(tmp_path / "other", None, tmp_path / "new"), data=None))


def test_a_batch_is_shared_out_evenly(folder, data, tmp_path, target):
    with pytest.raises(InputError, match="evenly among 3 processes"):
        check_run(settings(folder, data, tmp_path / "new"), target, 3)
    check_run(settings(folder, data, tmp_path / "new"), target, 2)


def test_damaged_records_are_told(folder, data, tmp_path):
    config = settings(folder, data, tmp_path / "d")
    distill(config)
    training = tmp_path / "d" / "training"
    second = "log.jsonl, line 2 is not a measurement"
    for name, damage, says in (
        ("log.jsonl", b'{"step": 0}\n{"st\n', second), ("log.jsonl", b'{"step": 0}\n5\n', second),
        ("log.jsonl", b'{"step": 0}\n{"alpha": [0.5]}\n', second), ("log.jsonl", b'{"step": 0}\n\xff\n', second),
        ("log.jsonl", b'{"step": 0}\n{"step": "3"}\n', second), ("log.jsonl", b'{"step": 0}\n\n', second),
        ("config.json", b"{", "can't be read"), ("config.json", b"3", "can't be read"),
    ):
        (training / name).write_bytes(damage)
        with pytest.raises(ModelError, match=says): distill(config)
        assert (training / name).read_bytes() == damage


def test_the_seed_decides(folder, data, tmp_path):
    found = []
    for i, seed in enumerate((0, 0, 1)):
        distill(settings(folder, data, tmp_path / str(i), seed=seed, tokens=2 * 4 * 32, evaluate_every=2))
        found.append(weights(tmp_path / str(i)))
    same = lambda a, b: all(torch.equal(t, b[name]) for name, t in a.items())
    assert same(found[0], found[1]) and not same(found[0], found[2])


@pytest.mark.parametrize("launcher", [
    "--multi_gpu",
    pytest.param("--use_deepspeed", marks=[pytest.mark.slow, pytest.mark.deepspeed, pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason='needs pip install -e ".[deepspeed]"')]),
])
def test_two_processes_train_as_one(launcher, folder, data, tmp_path, target):
    """Started by accelerate's launcher on two CPU processes: equal weights on both, and the same as one process makes
    of the same batches."""
    one, two = (
        settings(folder, data, tmp_path / name, tokens=6 * 4 * 32, evaluate_every=6, checkpoint_every=6)
        for name in ("one", "two")
    )
    distill(one)
    script = tmp_path / "run.py"
    script.write_text("""
import json, os, sys, torch
torch.set_num_threads(1)
import specdec.train.export as d
from specdec.train.loop import training_tensors
from safetensors.torch import save_file
config, train = d.DistillConfig(**json.loads(sys.argv[1])), d.train
def watched(training):
    yield from train(training)
    save_file(training_tensors(training.student.module, {}), f"{config.out}-rank{os.environ['RANK']}.safetensors")
d.train = watched
d.distill(config)
""")
    subprocess.run(
        [
            sys.executable, "-m", "accelerate.commands.launch", launcher, "--num_processes", "2", "--num_machines",
            "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", str(script),
            json.dumps(two.__dict__),
        ],
        check=True,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    ranks = [load_file(f"{two.out}-rank{r}.safetensors") for r in (0, 1)]
    alone, begun = weights(one.out), training_tensors(Training(one, target, read_rows(data, V)).student.module, {})
    for name, a in ranks[0].items():
        assert torch.isfinite(a).all() and torch.equal(a, ranks[1][name])
        # sums in another order, and Muon's products may be in bfloat16
        assert (a - alone[name]).norm() < 0.25 * (begun[name] - alone[name]).norm()


# A run that is not alone, and a disk that is full
def test_one_run_at_a_time(folder, data, tmp_path):
    "The second says so, and changes nothing; when the first is killed, the folder is free again."
    config = settings(folder, data, tmp_path / "d", tokens=4000 * 4 * 32)
    first = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(config.__dict__)], stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    log = tmp_path / "d" / "training" / "log.jsonl"
    try:
        while first.poll() is None and not log.exists(): time.sleep(0.01)
        with pytest.raises(InputError, match="Another run is writing to"): distill(replace(config, tokens=4 * 32))
    finally: first.kill()
    assert first.wait() == -signal.SIGKILL
    (log.parent / "checkpoint.safetensors.123.partial").write_bytes(b"half")
    (tmp_path / "d" / ".partial-x7q2").mkdir()
    distill(replace(config, tokens=4 * 32))
    left = [path.name for path in (tmp_path / "d").rglob("*") if "partial" in path.name]
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert left == [] and steps == sorted(set(steps))


def whole_files(folder):
    "The files of a run, none of which is half of something."
    found = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for path, data in found.items():
        assert "partial" not in str(path)
        if path.suffix == ".safetensors": load_file(path)
        if path.suffix == ".json": json.loads(data)
        if path.suffix == ".jsonl": assert [json.loads(line) for line in data.splitlines()] and data.endswith(b"\n")
    return found


@pytest.mark.parametrize("kind", ["head", "block", "lm"])
@pytest.mark.parametrize("limit, what", [(100, "config.json"), (3000, "checkpoint.safetensors")], ids=["soon", "late"])
def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(folder, data, tmp_path, kind, limit, what):
    "The same command goes on when there is room; where only the drafter doesn't fit, the one before stays."
    config = settings(folder, data, tmp_path / "d", kind=kind, tokens=4 * 32, optimizer="adamw")
    with on_a_disk_of(limit):
        with pytest.raises(ModelError, match=f"{what} can't be written"): distill(config)
    whole_files(tmp_path / "d")
    distill(config)
    before = whole_files(tmp_path / "d")
    assert tmp_path / "d" / "model.safetensors" in before
    with on_a_disk_of(3000):
        with pytest.raises(ModelError, match="Nothing was written to"): distill(config)
    assert whole_files(tmp_path / "d") == before


def test_truncated_states_are_not_trained_on(folder, data, tmp_path):
    "Zeros in the place of states are easy to learn, and wrong: the drafter must be the one of whole states."
    runs = [settings(folder, data, tmp_path / name, keep_states=str(tmp_path / f"{name}-states")) for name in "ab"]
    distill(runs[0])
    distill(runs[1])
    (states,) = (tmp_path / "b-states").glob("*.states")
    os.truncate(states, states.stat().st_size // 3)
    shutil.rmtree(tmp_path / "b")
    distill(runs[1])
    losses = [
        [json.loads(line)["loss"] for line in (Path(run.out) / "training" / "log.jsonl").read_text().splitlines()][1:]
        for run in runs
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
