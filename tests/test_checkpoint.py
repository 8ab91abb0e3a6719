"Weights from files: what is damaged or left over is a clear error, and rows are read from where they lie."
import json
import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from families import (
    CPU,
    FAMILIES,
    OTHERS,
    V,
    check_interface,
    edit_config,
    in_two_threads,
    random_model,
    stored,
    tokens,
)
from helpers import on_a_disk_of
from specdec.app.cli import export_original
from specdec.errors import ModelError
from specdec.models.checkpoint import Checkpoint, StoredRows, finer_numbers
from specdec.models.convert import GRID
from specdec.models.devices import INT4
from specdec.models.gguf import planned
from specdec.models.loading import end_tokens, load_model


def edit_tensors(edit):
    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return change


def file_of(folder): return folder / "model.safetensors"
def truncate(folder): file_of(folder).write_bytes(file_of(folder).read_bytes()[:-100])
def corrupt(folder): file_of(folder).write_bytes(b"\xff" * 8 + file_of(folder).read_bytes()[8:])
def empty(folder): file_of(folder).write_bytes(b"")
def break_config(folder): (folder / "config.json").write_text("{")


DAMAGE = {
    "missing tensor": (
        edit_tensors(lambda t: t.pop("model.layers.1.mlp.down_proj.weight")),
        "no tensor 'model.layers.1.mlp.down_proj.weight'",
    ),
    "unknown tensor": (
        edit_tensors(lambda t: t.update({"model.layers.1.mlp.down_proj.bias": torch.zeros(32)})), "doesn't use",
    ),
    "missing head": (edit_tensors(lambda t: t.pop("lm_head.weight")), "lm_head"),
    "truncated": (truncate, "not a whole safetensors file"),
    "corrupt header": (corrupt, "not a whole safetensors file"),
    "empty file": (empty, "not a whole safetensors file"),
    "no weights": (lambda folder: file_of(folder).unlink(), "no tensor"),
    "bytes": (
        edit_tensors(lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"].to(torch.int8)})),
        "is stored as int8",
    ),
    "eight bits": (
        edit_tensors(
            lambda t: t.update(
                {"model.layers.0.mlp.up_proj.weight": t["model.layers.0.mlp.up_proj.weight"].to(torch.float8_e4m3fn)}
            )
        ),
        "is stored as float8",
    ),
    "hidden size": (edit_config(hidden_size=64), "shape"),
    "vocabulary": (edit_config(vocab_size=V + 1), "shape"),
    "groups": (edit_config(num_key_value_heads=4), "shape"),
    "too many layers": (edit_config(num_hidden_layers=4), "no tensor"),
    "too few layers": (edit_config(num_hidden_layers=2), "doesn't use"),
    "biases promised": (edit_config(attention_bias=True), "bias"),
    "unknown architecture": (edit_config(model_type="no-such-model"), "config.json"),
    "broken config": (break_config, "config.json"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_checkpoint_is_a_clear_error(what, tmp_path):
    change, words = DAMAGE[what]
    with pytest.raises(ModelError, match=words):
        stored(random_model(FAMILIES["tinyllama"]), tmp_path, change=change)


def test_truncated_file_of_another_architecture(tmp_path):
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        stored(random_model(OTHERS["gpt2"]), tmp_path, change=truncate)


def test_old_frequencies_in_the_file_are_ignored(tmp_path):
    module = random_model(FAMILIES["tinyllama"])
    change = edit_tensors(lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    check_interface(stored(module, tmp_path, change=change), module, tokens(24))


def test_tied_config_with_another_head_in_the_file(tmp_path):
    "The stored head counts, as in transformers."
    module = random_model(FAMILIES["tinyllama"])
    check_interface(stored(module, tmp_path, change=edit_config(tie_word_embeddings=True)), module, tokens(24))


def test_sharded_checkpoint_and_a_second_format_beside_it(tmp_path):
    module = random_model(FAMILIES["tinyllama"])
    module.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    # as Mistral publishes
    save_file({"tok_embeddings.weight": torch.zeros(2, 2)}, tmp_path / "consolidated.safetensors")
    check_interface(load_model(tmp_path, CPU, torch.float32), module, tokens(24))


def test_a_packed_model_outlives_its_folder(tmp_path):
    module = random_model(FAMILIES["smollm2-tied"])
    model = stored(module, tmp_path, torch.bfloat16)
    before = model.forward(tokens(5), model.new_cache(5))
    file_of(tmp_path).unlink()
    assert torch.equal(model.forward(tokens(5), model.new_cache(5)), before)


def test_a_checkpoint_with_more_layers_than_its_config(tmp_path):
    random_model(OTHERS["gpt2"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": config["n_layer"] - 1}))
    with pytest.raises(ModelError, match="more layers"): load_model(tmp_path, CPU, torch.float32)


def test_threads_read_their_own_rows(tmp_path):
    rows = torch.randn(500, 8)
    save_file({"rows": rows}, tmp_path / "rows.safetensors")
    stored_rows = StoredRows(tmp_path / "rows.safetensors", "rows", torch.float32)
    def look_up(seed):
        lookups = torch.randint(500, (500, 6), generator=torch.Generator().manual_seed(seed))
        return sum(not torch.equal(stored_rows(ids), rows[ids]) for ids in lookups)
    assert in_two_threads(look_up) == [0, 0]


@pytest.mark.skipif(not hasattr(os, "pread"), reason="this system has no pread")
def test_a_file_that_is_read_has_no_position(tmp_path):
    "Forked processes share it."
    save_file({"rows": torch.randn(5, 8)}, tmp_path / "rows.safetensors")
    rows = StoredRows(tmp_path / "rows.safetensors", "rows", torch.float32)
    before = rows.file.tell()
    rows(torch.tensor([3, 1]))
    assert rows.file.tell() == before


# Levels in four bits that belong to another model, ends nested too deeply, exports

@pytest.mark.parametrize("kinds, blocks", [
    ({"gone.weight": "Q8_0"}, {}), ({"gone.weight": "Q4_0"}, {"gone.weight": torch.zeros(1)}),
    ({"model.norm.weight": "Q9_9"}, {"model.norm.weight": torch.zeros(1)}), ({}, {"model.norm.weight": torch.zeros(1)}),
], ids=["an unknown weight", "levels of one", "an unknown format", "no format"])
def test_levels_that_do_not_belong_to_the_model_are_a_clear_error(kinds, blocks, tmp_path):
    stored(random_model(FAMILIES["qwen2"]), tmp_path)
    save_file(blocks, tmp_path / GRID, kinds)
    with pytest.raises(ModelError, match="grid.tensors tells of .*don't belong together. Delete that folder"):
        load_model(tmp_path, CPU, INT4)
    with pytest.raises(ModelError, match="don't belong together"): finer_numbers(tmp_path, 10)


@pytest.mark.parametrize("blocks", [torch.zeros(4), torch.zeros(8, 7, dtype=torch.uint8), torch.zeros(8, 36),
                                    torch.zeros(7, 36, dtype=torch.uint8)], ids=repr)
def test_levels_in_another_shape_than_their_weight_are_a_clear_error(blocks, tmp_path):
    save_file({"a": torch.ones(8, 64)}, tmp_path / "model.safetensors")
    save_file({"a": blocks}, tmp_path / GRID, {"a": "Q4_0"})
    with pytest.raises(ModelError, match="levels of 'a' .*have the shape"):
        Checkpoint(tmp_path, INT4, CPU).linear({"a": 8}, 64)


def test_ends_that_are_nested_too_deeply_are_a_clear_error(tmp_path):
    (tmp_path / "generation_config.json").write_text("[" * 10**5)
    with pytest.raises(ModelError, match="Where texts end can't be read from .*generation_config.json"):
        end_tokens(tmp_path, SimpleNamespace(eos_token_id=None))


def test_two_exports_to_one_path_do_not_mix(tmp_path):
    "Each writes a file of its own; the one that ends last counts, whole."
    file = tmp_path / "m.gguf"
    with planned(file, "llama", torch.float32) as one, planned(file, "llama", torch.bfloat16) as other:
        for plan in (one, other): plan.add("a", (4, 4), lambda: torch.ones(4, 4))
    from gguf import GGUFReader
    [tensor] = GGUFReader(file).tensors
    assert tensor.tensor_type.name == "F32" and [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_full_disk_leaves_the_export_before(tmp_path):
    file, source = tmp_path / "m.gguf", tmp_path / "source.gguf"
    with planned(file, "llama", torch.float32) as plan: plan.add("a", (4, 4), lambda: torch.ones(4, 4))
    before = file.read_bytes()
    source.write_bytes(bytes(9000))
    with on_a_disk_of(5000):
        with pytest.raises(ModelError, match="m.gguf can't be written .File too large"): export_original(source, file)
        with pytest.raises(ModelError, match="m.gguf can't be written"):
            with planned(file, "llama", torch.float32) as plan: plan.add("a", (64, 64), lambda: torch.ones(64, 64))
    assert file.read_bytes() == before and {path.name for path in tmp_path.iterdir()} == {"m.gguf", "source.gguf"}
