"Sizes that a file only claims: they are held against its tensors before anything is built or waited for."
import json
import os
import signal
import socket
import struct
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from families import CPU
from helpers import examples
from helpers_drafters import random_head, random_target
from helpers_hub import write_gguf
from specdec.drafters.head import load_head, save_head
from specdec.drafters.load import load_drafter
from specdec.errors import InputError, ModelError
from specdec.models import hub
from specdec.models.checkpoint import Checkpoint
from specdec.models.convert import check_gguf_sizes
from specdec.models.files import locked
from specdec.models.hub import all_or_nothing, find_model, load_transformers, sweep
from specdec.models.loading import load_model, memory_needed

HUGE = (10**5, 10**8, 2**32, 10**12, 2**63, 10**400)


@contextmanager
def within(seconds: int):
    "Fail where the block takes longer: what is to be refused must not be begun."
    def late(*_): raise AssertionError(f"it took more than {seconds} seconds")
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try: yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# config.json

SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
             pad_token_id=0, bos_token_id=1, eos_token_id=2)
MORE = dict(intermediate_size=48, num_key_value_heads=2)
KINDS = {
    "llama": MORE, "qwen2": MORE, "phi3": MORE, "gemma2": MORE | dict(head_dim=8), "gpt2": {}, "gpt_neox": MORE,
    "bloom": {}, "mixtral": MORE | dict(num_local_experts=2), "gptj": dict(rotary_dim=4),
    "qwen3_moe": MORE | dict(num_experts=2, num_experts_per_tok=2, moe_intermediate_size=16),
}


def sizes_of(config: dict) -> list[str]:
    "The keys of a config that say how large something is."
    return [key for key, value in config.items() if type(value) is int and not key.endswith("_token_id")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    "A model of each kind."
    found = {}
    for kind, more in KINDS.items():
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **more))
        found[kind] = tmp_path_factory.mktemp(kind)
        module.save_pretrained(found[kind])
    return found


def test_honest_sizes_load(folders):
    for kind, folder in folders.items(): assert load_model(folder, CPU, torch.float32).vocab_size == 64, kind


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_a_config_only_claims(kind, folders):
    folder = folders[kind]
    honest = json.loads((folder / "config.json").read_text())
    try:
        for key in sizes_of(honest):
            for size in HUGE:
                (folder / "config.json").write_text(json.dumps(honest | {key: size}) if size < 10**300
                                                    else json.dumps(honest | {key: 0}).replace(": 0", f": {size}", 1))
                with within(4):
                    try: load_model(folder, CPU, torch.float32)
                    except ModelError as error: assert "\n" not in str(error)[:40] and len(str(error)) < 2000
    finally: (folder / "config.json").write_text(json.dumps(honest))


@pytest.mark.parametrize("key, kind", [
    ("num_hidden_layers", "llama"), ("num_hidden_layers", "qwen2"), ("n_layer", "gpt2"), ("n_layer", "bloom"),
    ("num_hidden_layers", "mixtral")])
@pytest.mark.parametrize("size", [10**5, 10**8])
def test_layers_that_no_tensor_stands_for(key, kind, size, folders):
    folder = folders[kind]
    honest = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(json.loads(honest) | {key: size}))
    try:
        for use in (lambda: load_model(folder, CPU, torch.float32), lambda: find_model(folder),
                    lambda: load_transformers(folder, CPU, torch.float32), lambda: hub.load_tokenizer(folder),
                    lambda: memory_needed(folder)):
            with within(3), pytest.raises(ModelError, match=f"{key} {size}, which no model has"): use()
        from specdec.app.cli import app
        done = CliRunner().invoke(app, ["generate", "Hi", "--target", str(folder)])
        assert done.exit_code == 2 and key in done.output and "Traceback" not in done.output
    finally: (folder / "config.json").write_text(honest)


def test_without_weights_beside_it_a_config_is_bounded_too(tmp_path):
    for key, size in (("num_hidden_layers", 10**6), ("vocab_size", 10**15), ("num_local_experts", 10**9)):
        (tmp_path / "config.json").write_text(json.dumps(dict(model_type="mixtral", **SMALL) | {key: size}))
        with within(3), pytest.raises(ModelError, match=f"{key} {size}, which no model has"): memory_needed_at(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="llama", **SMALL, **MORE) | dict(
        num_hidden_layers=126, hidden_size=16384, vocab_size=128256, max_position_embeddings=10_485_760)))
    assert memory_needed_at(tmp_path).param_count > 10**9  # the largest that are published aren't refused


def memory_needed_at(folder):
    "What a model needs by its config alone, as one on the hub is looked at."
    from specdec.models.loading import _needed, read_config
    return _needed(read_config(folder)[0], CPU, torch.float32, "target", folder=folder)


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_any_config_is_one_or_is_refused(folders, data):
    folder = folders[data.draw(st.sampled_from(sorted(KINDS)))]
    honest = json.loads((folder / "config.json").read_text())
    values = st.one_of(st.none(), st.booleans(), st.integers(-10, 10**10), st.floats(), st.text(max_size=3),
                       st.sampled_from(HUGE[:-1]), st.lists(st.integers(0, 10**6), max_size=2),
                       st.dictionaries(st.sampled_from(["num_hidden_layers", "a"]), st.integers(0, 10**9), max_size=1))
    wrong = data.draw(st.dictionaries(st.sampled_from(sorted(honest)), values, min_size=1, max_size=2))
    try:
        (folder / "config.json").write_text(json.dumps(honest | wrong))
        with within(10):
            try: load_model(folder, CPU, torch.float32)
            except (ModelError, InputError): pass
    finally: (folder / "config.json").write_text(json.dumps(honest))


def test_a_tensor_is_looked_at_before_there_is_room_for_it(tmp_path):
    tensors = Checkpoint({"w": torch.zeros(4, 4)}, torch.float32, CPU)
    for ask in (lambda: tensors("w", 2**40, 2**40), lambda: tensors.stacked({"w": 2**40}, 2**20)):
        with pytest.raises(ModelError, match=r"has the shape \[4, 4\]"): ask()


# heads

@pytest.mark.parametrize("place, key, size", [
    ("transformer_layer_config", "num_hidden_layers", 10**6), ("transformer_layer_config", "num_hidden_layers", 200),
    ("transformer_layer_config", "intermediate_size", 2**20), ("transformer_layer_config", "head_dim", 10**9),
    ("transformer_layer_config", "num_attention_heads", 10**8), ("", "target_hidden_size", 10**10),
    ("", "draft_vocab_size", 10**9)])
def test_a_head_that_claims_sizes(place, key, size, tmp_path):
    random_target(tmp_path)
    target = load_model(tmp_path, CPU, torch.float32)
    save_head(random_head(target), tmp_path / "head", target)
    file = tmp_path / "head" / "config.json"
    config = json.loads(file.read_text())
    (config[place] if place else config)[key] = size
    file.write_text(json.dumps(config))
    for use in (lambda: load_head(tmp_path / "head", target), lambda: load_drafter(tmp_path / "head", target)):
        with within(5), pytest.raises(ModelError): use()


# GGUF

def patched(file, key: str, value: int):
    "The file with another number behind that key; its kind stays."
    content = bytearray(file.read_bytes())
    at = content.index(key.encode()) + len(key)
    (kind,) = struct.unpack_from("<I", content, at)
    assert kind == 4  # uint32
    struct.pack_into("<I", content, at + 4, value)
    other = file.with_name("patched.gguf")
    other.write_bytes(content)
    return other


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(file, {"": "Q8_0"})
    return file


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "feed_forward_length", "attention.head_count",
                                 "attention.head_count_kv", "attention.key_length", "vocab_size"])
@pytest.mark.parametrize("size", [10**5, 2**31, 2**32 - 1])
def test_a_gguf_file_that_claims_sizes(key, size, gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    if size == 10**5 and key != "block_count": return  # larger than it is, and smaller than many a model
    with within(5), pytest.raises(ModelError, match=f"its metadata says .* {size}, which no model has"):
        find_model(patched(gguf, f"llama.{key}", size))
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_counts_that_lie_behind_the_end_of_a_file(gguf, tmp_path):
    content = gguf.read_bytes()
    check_gguf_sizes(gguf)
    at = content.index(b"tokenizer.ggml.tokens") + 21 + 8  # behind the kinds of value and of list
    places = {"tensors": 8, "values": 16, "key": 24, "tokens": at, "token": at + 8}
    for name, place in places.items():
        for count in (2**20, 2**60, 2**64 - 1):
            (tmp_path / "m.gguf").write_bytes(content[:place] + struct.pack("<Q", count) + content[place + 8:])
            with within(3), pytest.raises(ModelError, match="it (says|has|ends)"): check_gguf_sizes(tmp_path / "m.gguf")
    for end in (3, 10, 23, 30, at, at + 100):
        (tmp_path / "m.gguf").write_bytes(content[:end])
        with pytest.raises(ModelError, match="it "): check_gguf_sizes(tmp_path / "m.gguf")


def test_the_largest_honest_lists_of_a_gguf_file(tmp_path):
    numbers = {}
    def fill(writer):
        writer.add_array("some.scores", [0.5] * 5000)
        writer.add_array("llama.feed_forward_lengths", [96, 96])
        numbers["done"] = True
    write_gguf(tmp_path / "m.gguf", {}, fill=fill)
    check_gguf_sizes(tmp_path / "m.gguf")


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_any_gguf_metadata_is_read_or_refused(gguf, data):
    content = bytearray(gguf.read_bytes())
    end = content.index(b"tokenizer.ggml.merges") + 60
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(4, end))
        new = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from(
            [b"\xff" * 8, b"\xff\xff\xff\x7f", b"\0" * 8, b"\x09\0\0\0", b"\x08\0\0\0"])))
        content[place:place + len(new)] = new
    folder = gguf.parent / "fuzz"
    folder.mkdir(exist_ok=True)
    (folder / "m.gguf").write_bytes(content)
    with within(20):
        try: hub.convert_gguf(folder / "m.gguf", folder / "out")
        except ModelError as error: assert "could not be converted" in str(error)


# what a killed conversion left

def test_leftovers_of_any_conversion_are_swept_but_not_one_that_is_being_made(gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    for name in ("gguf-0123456789abcdef.partial-x1", "smollm2.partial-x2", "gguf-fedcba9876543210.partial-x3"):
        (tmp_path / name / "new").mkdir(parents=True)
    (tmp_path / "gguf-0123456789abcdef").mkdir()  # a model
    with locked(tmp_path / "gguf-fedcba9876543210"):
        find_model(gguf)
        assert [path.name for path in tmp_path.glob("*partial*")] == ["gguf-fedcba9876543210.partial-x3"]
        assert (tmp_path / "gguf-0123456789abcdef").exists()
    sweep(tmp_path)
    assert not [*tmp_path.glob("*partial*")]
    with locked(tmp_path / "model"), all_or_nothing(tmp_path / "model") as new:
        sweep(tmp_path)
        assert new.exists()


# pipes

@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
@pytest.mark.parametrize("name", [
    "config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "notes.bin",
    "draft_tokens.safetensors", "socket"])
def test_a_pipe_or_a_socket_beside_the_weights_is_refused(name, folders, tmp_path, monkeypatch):
    for file in folders["llama"].iterdir(): (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).unlink(missing_ok=True)
    if name == "socket":
        with socket.socket(socket.AF_UNIX) as opened:
            monkeypatch.chdir(tmp_path)  # a socket's path is short
            opened.bind("socket")
    else: os.mkfifo(tmp_path / name)
    uses = [lambda: load_model(tmp_path, CPU, torch.float32), lambda: hub.load_tokenizer(tmp_path),
            lambda: load_transformers(tmp_path, CPU, torch.float32), lambda: find_model(tmp_path),
            lambda: Checkpoint(tmp_path, torch.float32, CPU), lambda: hub.digests(tmp_path),
            lambda: load_head(tmp_path, SimpleNamespace(dtype=torch.float32, digest=None))]
    for use in uses:
        began = time.monotonic()
        with within(3), pytest.raises(ModelError, match=f"{name} is a pipe, a socket or a device|no config.json"): use()
        assert time.monotonic() - began < 2
