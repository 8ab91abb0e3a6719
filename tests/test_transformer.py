"The native decoder and the wrapper against transformers, on tiny random models of every family."
import copy
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from specdec import transformer
from specdec.autoregressive import Transform
from specdec.core import InputError, ModelError, TorchSource
from specdec.kvcache import CacheFullError, KVCache
from specdec.models import fetch, load_transformers
from specdec.speculative import ModelDrafter, NGramDrafter, NoDrafter, speculate
from specdec.adapter import TransformersLM, is_native
from specdec.checkpoint import StoredRows
from specdec.layouts import FEW, Linear, attention_apart, has_same_rows
from specdec.loading import load_model
from specdec.transformer import Llama, positions

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
CPU, V = torch.device("cpu"), 100
SMALL = dict(vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def rope(kind, **extra):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=10000.0, **extra))


FAMILIES = {
    "llama2": LlamaConfig(**SMALL | dict(num_key_value_heads=4)),
    "llama3": LlamaConfig(**SMALL, **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)),
    "linear": LlamaConfig(**SMALL, **rope("linear", factor=4.0)),
    "yarn": LlamaConfig(**SMALL, **rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "tinyllama": LlamaConfig(**SMALL),
    "smollm2-tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "one-kv-head": LlamaConfig(**SMALL | dict(num_key_value_heads=1)),
    "wide-heads": LlamaConfig(**SMALL, head_dim=16),
    "attention-bias": LlamaConfig(**SMALL, attention_bias=True),
    "mlp-bias": LlamaConfig(**SMALL, mlp_bias=True),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=None),
    "mistral-window": transformers.MistralConfig(**SMALL, sliding_window=32),
    "qwen2": transformers.Qwen2Config(**SMALL),
    "qwen2-tied": transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2-window": transformers.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=32, max_window_layers=1),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=16),
    "qwen3-bias": transformers.Qwen3Config(**SMALL, head_dim=8, attention_bias=True),
    "phi3": transformers.Phi3Config(**SMALL),
    "phi3-partial": transformers.Phi3Config(**SMALL, **rope("default", partial_rotary_factor=0.5)),
}
LOOKALIKES = {
    "gelu": LlamaConfig(**SMALL, hidden_act="gelu"),
    "dynamic": LlamaConfig(**SMALL, **rope("dynamic", factor=4.0)),
    "longrope": transformers.Phi3Config(**SMALL, original_max_position_embeddings=32, **rope(
        "longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=32)),
    "granite": transformers.GraniteConfig(**SMALL, residual_multiplier=0.5, logits_scaling=2.0, embedding_multiplier=3.0),
    "gemma2": transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=8),
}
OTHERS = {
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=V),
    "gpt-neox": transformers.GPTNeoXConfig(**SMALL),
    "opt": transformers.OPTConfig(ffn_dim=64, word_embed_proj_dim=32, **SMALL),
    "bloom": transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=V),
    "gemma3-window": transformers.Gemma3TextConfig(**SMALL | dict(num_hidden_layers=6), head_dim=8, sliding_window=8),
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "mla": transformers.DeepseekV3Config(**SMALL | dict(num_key_value_heads=4), q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
                                         v_head_dim=8, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16,
                                         first_k_dense_replace=1),
}


def random_model(config):
    "Random weights, norms and biases included."
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return module


def stored(module, folder, dtype=torch.float32, change=lambda folder: None):
    module.save_pretrained(folder)
    change(Path(folder))
    return load_model(Path(folder), CPU, dtype)


def difference(ours, theirs):
    return ((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()).item()


def tokens(T, B=2):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))


def in_pieces(model, ids, pieces, wrong=4):
    "Logits read piece by piece, with `wrong` tokens read and taken back after each."
    cache, logits = model.new_cache(ids.shape[1] + wrong), []
    for piece in ids.split(pieces, 1):
        logits.append(model.forward(piece, cache))
        model.forward(ids.flip(1)[:, :wrong], cache)
        cache.rollback(cache.length - wrong)
    assert cache.length == ids.shape[1]
    return torch.cat(logits, 1)


def check_interface(model, module, ids):
    "Everything a `CausalLM` promises, against the bare module without a cache."
    output = module(ids, use_cache=False, output_hidden_states=True)
    want, states = output.logits, output.hidden_states
    assert model.vocab_size == V == want.shape[-1]
    assert difference(model.forward(ids, model.new_cache(ids.shape[1])), want) <= 1e-5
    T = ids.shape[1]
    for pieces in ([9, 1, 1, T - 11], [1] * T, [T - 2, 2]):
        assert difference(in_pieces(model, ids, pieces), want) <= 1e-5
    last = model.forward(ids, model.new_cache(64), last=3)
    assert last.shape == (2, 3, V) and difference(last, want[:, -3:]) <= 1e-5
    depth = len(states) - 1
    logits, features = model.forward(ids, model.new_cache(64), last=1, layers=(depth, 0, 1))
    assert logits.shape == (2, 1, V)
    assert difference(features, torch.cat([states[i] for i in (depth, 0, 1)], -1)) <= 1e-5
    with pytest.raises(InputError, match="numbered"):
        model.forward(ids, model.new_cache(64), layers=(depth + 1,))


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_native_and_equal(name, tmp_path):
    module = random_model(FAMILIES[name])
    model = stored(module, tmp_path)
    assert isinstance(model, Llama)
    check_interface(model, module, tokens(24))


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalike_goes_to_transformers(name, tmp_path):
    module = random_model(LOOKALIKES[name])
    model = stored(module, tmp_path)
    assert isinstance(model, TransformersLM)
    check_interface(model, module, tokens(24))


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures(name):
    module = random_model(OTHERS[name])
    check_interface(TransformersLM(module), module, tokens(24))


@pytest.mark.parametrize("name", FAMILIES)
def test_native_agrees_with_the_wrapper_in_bfloat16(name, tmp_path):
    module = random_model(FAMILIES[name]).to(torch.bfloat16)
    native, wrapped, ids = stored(module, tmp_path, torch.bfloat16), TransformersLM(module), tokens(24)
    exact = TransformersLM(random_model(FAMILIES[name]).to(torch.bfloat16).float()).forward(ids, wrapped.new_cache(24))
    for pieces in ([24], [9, 1, 2, 12], [1] * 24):
        ours, theirs = in_pieces(native, ids, pieces), in_pieces(wrapped, ids, pieces)
        assert difference(ours, exact) <= 2 * difference(theirs, exact) + 1e-3


@pytest.mark.parametrize("config, reason", [
    (transformers.MambaConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2, state_size=4), "recurrent"),
    (transformers.Mamba2Config(vocab_size=V, hidden_size=32, num_hidden_layers=2, state_size=4, num_heads=8, head_dim=8, n_groups=1), "recurrent"),
    (transformers.JambaConfig(**SMALL, num_experts=2, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False), "recurrent"),
    (transformers.Lfm2Config(**SMALL, full_attn_idxs=[1]), "conv"),
    (transformers.OpenAIGPTConfig(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=V), "no keys"),
], ids=["mamba", "mamba2", "jamba", "lfm2", "gpt1"])
def test_what_cannot_roll_back_is_refused(config, reason):
    with pytest.raises(ModelError, match=f"can't be rolled back.*{reason}"):
        TransformersLM(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("config", [
    LlamaConfig(**SMALL, hidden_act="relu"),
    LlamaConfig(**SMALL, quantization_config=dict(quant_method="gptq", bits=4)),
    LlamaConfig(**SMALL, **rope("default", partial_rotary_factor=0.5)),
    transformers.MixtralConfig(**SMALL),
    transformers.GPT2Config(),
], ids=["relu", "quantised", "partial rotary llama", "mixtral", "gpt2"])
def test_not_native(config):
    assert not is_native(config)


def test_pretraining_tp_changes_nothing(tmp_path):
    module = random_model(LlamaConfig(**SMALL, pretraining_tp=2))
    check_interface(stored(module, tmp_path), module, tokens(24))


def edit_config(remove=(), **fields):
    def change(folder):
        path = folder / "config.json"
        config = {k: v for k, v in json.loads(path.read_text()).items() if k not in remove} | fields
        path.write_text(json.dumps(config))
    return change


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_old_style_config(kind, tmp_path):
    "As published before rope_parameters: rope_theta and rope_scaling at the top, no head_dim, torch_dtype."
    scaling = {"default": None, "linear": dict(type="linear", factor=2.0), "llama3": dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)}[kind]
    plain = {k: v for k, v in (scaling or {}).items() if k != "type"}
    new = dict(rope_parameters=dict(rope_theta=5000.0, rope_type=kind) | plain)
    module = random_model(LlamaConfig(**SMALL, **new))
    model = stored(module, tmp_path, change=edit_config(
        remove=("rope_parameters", "head_dim", "dtype"),
        rope_theta=5000.0, rope_scaling=scaling, torch_dtype="float32"))
    assert isinstance(model, Llama)
    check_interface(model, module, tokens(24))


def test_missing_kv_heads_means_no_groups(tmp_path):
    module = random_model(FAMILIES["llama2"])
    check_interface(stored(module, tmp_path, change=edit_config(remove=("num_key_value_heads",))), module, tokens(24))


def edit_tensors(edit):
    def change(folder):
        from safetensors.torch import load_file
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
    "missing tensor": (edit_tensors(lambda t: t.pop("model.layers.1.mlp.down_proj.weight")), "no tensor 'model.layers.1.mlp.down_proj.weight'"),
    "unknown tensor": (edit_tensors(lambda t: t.update({"model.layers.1.mlp.down_proj.bias": torch.zeros(32)})), "doesn't use"),
    "missing head": (edit_tensors(lambda t: t.pop("lm_head.weight")), "lm_head"),
    "truncated": (truncate, "not a whole safetensors file"),
    "corrupt header": (corrupt, "not a whole safetensors file"),
    "empty file": (empty, "not a whole safetensors file"),
    "no weights": (lambda folder: file_of(folder).unlink(), "no tensor"),
    "bytes": (edit_tensors(lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"].to(torch.int8)})), "is stored as int8"),
    "eight bits": (edit_tensors(lambda t: t.update({"model.layers.0.mlp.up_proj.weight": t["model.layers.0.mlp.up_proj.weight"].to(torch.float8_e4m3fn)})), "is stored as float8"),
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
    save_file({"tok_embeddings.weight": torch.zeros(2, 2)}, tmp_path / "consolidated.safetensors")  # as Mistral publishes
    check_interface(load_model(tmp_path, CPU, torch.float32), module, tokens(24))


def test_a_packed_model_outlives_its_folder(tmp_path):
    module = random_model(FAMILIES["smollm2-tied"])
    model = stored(module, tmp_path, torch.bfloat16)
    before = model.forward(tokens(5), model.new_cache(5))
    file_of(tmp_path).unlink()
    assert torch.equal(model.forward(tokens(5), model.new_cache(5)), before)


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window"])
def test_beyond_the_window_is_an_error_and_leaves_no_trace(name, tmp_path):
    module = random_model(FAMILIES[name])
    model, ids = stored(module, tmp_path), tokens(33)
    cache = model.new_cache(64)
    assert difference(model.forward(ids[:, :32], cache), module(ids[:, :32], use_cache=False).logits) <= 1e-5
    with pytest.raises(ModelError, match="sliding window of 32"):
        model.forward(ids[:, 32:], cache)
    assert cache.length == 32


@pytest.mark.parametrize("name", ["mistral", "phi3"])
def test_the_context_ends_with_the_window(name, tmp_path):
    "A text ends there, as at the last position, and a draft stops drafting."
    config = copy.deepcopy(FAMILIES[name])
    config.sliding_window = 12
    windowed, target = stored(random_model(config), tmp_path), TransformersLM(random_model(OTHERS["gpt2"]))
    assert windowed.context_length == 12
    rounds = list(speculate(windowed, NGramDrafter(), [1, 2, 3], Transform(), TorchSource(0), 4, 40))
    assert sum(len(r.emitted) for r in rounds) == 9
    drafted = list(speculate(target, ModelDrafter(windowed, V), [1, 2, 3], Transform(), TorchSource(0), 4, 30))
    plain = list(speculate(target, NoDrafter(), [1, 2, 3], Transform(), TorchSource(0), 4, 30))
    assert [t for r in drafted for t in r.emitted] == [t for r in plain for t in r.emitted]


def test_a_checkpoint_with_more_layers_than_its_config(tmp_path):
    random_model(OTHERS["gpt2"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": config["n_layer"] - 1}))
    with pytest.raises(ModelError, match="more layers"): load_model(tmp_path, CPU, torch.float32)


def test_a_model_that_attends_both_ways_is_refused():
    from transformers import BertConfig, BertLMHeadModel
    config = BertConfig(vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(ModelError, match="attend to later"): TransformersLM(BertLMHeadModel(config))


def test_a_model_that_was_trained_just_now_drops_nothing_out():
    model = TransformersLM(random_model(OTHERS["gpt2"]).train())
    a, b = (model.forward(tokens(8), model.new_cache(8)) for _ in range(2))
    assert torch.equal(a, b)


def test_window_that_is_switched_off(tmp_path):
    module = random_model(transformers.Qwen2Config(**SMALL, use_sliding_window=False, sliding_window=16))
    check_interface(stored(module, tmp_path), module, tokens(40))


def test_bad_ids(tmp_path):
    native = stored(random_model(FAMILIES["tinyllama"]), tmp_path)
    for model in (native, TransformersLM(random_model(OTHERS["gpt2"]))):
        for ids in (torch.tensor([[3, V]]), torch.tensor([[-1]]), torch.empty(1, 0, dtype=torch.long), torch.tensor([3])):
            cache = model.new_cache(8)
            with pytest.raises(InputError, match="Token ids"):
                model.forward(ids, cache)
            assert cache.length == 0
        for last in (0, -3):
            with pytest.raises(InputError, match="last"): model.forward(torch.tensor([[3, 4]]), model.new_cache(8), last=last)


def test_full_cache_and_end_of_positions(tmp_path):
    native, wrapped = stored(random_model(FAMILIES["tinyllama"]), tmp_path), TransformersLM(random_model(OTHERS["gpt2"]))
    for model in (native, wrapped):
        with pytest.raises(CacheFullError):
            model.forward(tokens(9), model.new_cache(8))
    with pytest.raises(ModelError, match="end at 64"):
        wrapped.forward(tokens(65), wrapped.new_cache(80))


def test_longrope_ends_where_its_frequencies_change():
    model = TransformersLM(random_model(LOOKALIKES["longrope"]))
    assert model.context_length == 32
    with pytest.raises(ModelError, match="end at 32"):
        model.forward(tokens(33), model.new_cache(40))


def test_skip(tmp_path):
    module = random_model(FAMILIES["tinyllama"])
    model, ids = stored(module, tmp_path), tokens(24)
    light = model.skip([1])
    assert light.layers[0] is model.layers[0] and len(model.layers) == 3
    del module.model.layers[1]
    module.config.num_hidden_layers = 2
    for i, layer in enumerate(module.model.layers): layer.self_attn.layer_idx = i
    check_interface(light, module, ids)
    for wrong in (range(3), [3], [-1]):
        with pytest.raises(InputError, match="Layers to skip"):
            model.skip(wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_views_are_masked(dtype, tmp_path):
    "Whatever the text's length and however many tokens are read, the padding behind it isn't seen."
    model, ids = stored(random_model(FAMILIES["tinyllama"]), tmp_path, dtype), tokens(20)
    narrow, wide = KVCache(len(model.layers), 40), KVCache(len(model.layers), 40, multiple=16)
    for cache in (narrow, wide):  # what is rolled back stands behind the text, and isn't zero
        model.forward((tokens(20) + 1) % V, cache)
        cache.rollback(0)
    for some in ids.split([1, 5, 1, 12, 1], 1):
        assert torch.allclose(model.forward(some, narrow), model.forward(some, wide), atol=1e-4 if dtype == torch.float32 else .05)


@pytest.mark.parametrize("T", [1, 2, 5, 16, 17])
def test_mask_and_fold(T):
    "In bfloat16 a few tokens are folded, in float32 never; the mask is the shifted triangle, once per folded head."
    for dtype in (torch.bfloat16, torch.float32):
        for start in (0, 7):
            where = positions(torch.ones(4), 1.0, start, T, 3, dtype)
            assert where.fold == (3 if dtype == torch.bfloat16 and T <= 16 else 1)
            triangle = torch.ones(T, start + T, dtype=torch.bool).tril(start).repeat(where.fold, 1)
            if where.mask is None: assert T == 1 or start == 0
            else: assert torch.equal(where.mask == 0, triangle) and torch.equal(where.mask == float("-inf"), ~triangle)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_linear_is_close_to_plain_in_bfloat16(rows, pack):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(48, 32).bfloat16(), torch.randn(48).bfloat16(), torch.randn(1, rows, 32).bfloat16()
    for b in (None, bias):
        y = Linear(weight, b, pack)(x)
        assert y.shape == (1, rows, 48) and y.dtype == torch.bfloat16
        assert difference(y, torch.nn.functional.linear(x.float(), weight.float(), None if b is None else b.float())) <= 0.01


def test_one_row_is_multiplied_without_onednn_and_nothing_else_is():
    "Whoever asks sees oneDNN on again, even after an error, or off if it was off before."
    seen = []
    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.nn.functional.linear: seen.append(torch.backends.mkldnn.enabled)
            return function(*args, **(kwargs or {}))

    layer, exact = Linear(torch.randn(8, 4).bfloat16(), pack=False), Linear(torch.randn(8, 4))
    with Spy():
        for rows in (1, 2, 1): layer(torch.randn(1, rows, 4).bfloat16())
        exact(torch.randn(1, 1, 4))
    assert seen == ([False, True, False] if layer.half else [True] * 3) + [True] * (not exact.same_rows)  # a packed product is another function
    with pytest.raises(RuntimeError): layer(torch.randn(1, 1, 5).bfloat16())
    assert torch.backends.mkldnn.enabled
    with torch.backends.mkldnn.flags(enabled=False):
        layer(torch.randn(1, 1, 4).bfloat16())
        assert not torch.backends.mkldnn.enabled


def in_two_threads(work) -> list:
    "What both of two threads return, which change places as often as can be."
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool: return list(pool.map(work, range(2)))
    finally: sys.setswitchinterval(interval)


def test_threads_leave_onednn_on():
    layer, x = Linear(torch.randn(8, 4).bfloat16(), pack=False), torch.randn(1, 1, 4).bfloat16()
    for _ in range(10):
        in_two_threads(lambda _: [layer(x) for _ in range(300)])
        assert torch.backends.mkldnn.enabled


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


def test_both_layouts_are_the_same_model(tmp_path, monkeypatch):
    "Packed for a few rows or left for one: the same weights, so logits within bfloat16's spread of each other, and each keeps its weights once."
    monkeypatch.setattr(transformer, "has_tiles", lambda: False)
    module = random_model(FAMILIES["smollm2-tied"])
    packed = stored(module, tmp_path, torch.bfloat16)
    plain = load_model(tmp_path, CPU, torch.bfloat16, verifies=False)
    ids = tokens(9)
    for pieces in ([9], [1] * 9, [5, 1, 3]):
        logits = []
        for model in (packed, plain):
            cache = model.new_cache(9)
            logits.append(torch.cat([model.forward(piece, cache) for piece in ids.split(pieces, 1)], 1))
        assert difference(logits[0].float(), logits[1].float()) <= 0.05
    assert not plain.head.packed and plain.layers[0].mlp.down.weight.dtype == torch.bfloat16
    if plain.head.half: assert packed.head.packed
    monkeypatch.setattr(transformer, "has_tiles", lambda: True)  # a processor on which packed weights are no slower for one row
    assert load_model(tmp_path, CPU, torch.bfloat16, verifies=False).head.packed == plain.head.half


def test_default_model_equals_transformers():
    "The whole text and pieces with rollbacks, float32."
    folder = fetch()
    reference, model = load_transformers(folder, CPU, torch.float32), load_model(folder, CPU, torch.float32)
    ids = torch.randint(1000, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        output = reference(ids, output_hidden_states=True)
    logits, features = model.forward(ids, model.new_cache(40), layers=(7, 18, 30))
    assert difference(logits, output.logits) <= 1e-5
    assert difference(features, torch.cat([output.hidden_states[i] for i in (7, 18, 30)], -1)) <= 1e-5
    assert difference(in_pieces(model, ids, [20, 1, 1, 6, 12]), output.logits) <= 1e-5


# In float32 on an x86 processor, what is computed for a token does not depend on how many are read at once: bit for bit.

def onednn_keeps_rows():
    "Whether this processor's oneDNN does what we rely on; asked of the library itself, apart from our code."
    if not has_same_rows(CPU, torch.float32): return False
    def keeps(outputs, inputs):
        weight, x = torch.ops.mkldnn._reorder_linear_weight(torch.randn(outputs, inputs), FEW), torch.randn(64, inputs)
        def product(rows): return torch.ops.mkldnn._linear_pointwise.default(rows, weight, None, "none", [], "")
        pairs = torch.cat([product(pair) for pair in x.split(2)])
        return all(torch.equal(product(x[:n]), pairs[:n]) for n in range(2, 65))
    return all(keeps(*shape) for shape in [(960, 576), (576, 1536), (48, 33), (96, 64), (144, 32)])


same_rows = pytest.mark.skipif(not onednn_keeps_rows(), reason="no oneDNN here whose rows stay the same")


@same_rows
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (300, 4096), (7, 33), (100, 1)])
def test_a_row_does_not_depend_on_the_others(shape):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(2, 100, shape[1])
    for b in (None, bias):
        layer = Linear(weight, b)
        alone = torch.cat([layer(row[None, None]) for row in x.flatten(0, 1)])
        assert torch.equal(layer(x[0, 0]), alone[0, 0])  # without leading sizes
        for n in (1, 2, 3, 7, FEW, 100):
            y = layer(x[:, :n])
            assert y.shape == (2, n, shape[0]) and torch.equal(y, alone.view(2, 100, -1)[:, :n])
        assert difference(layer(x), torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())) <= 2e-6
        assert torch.equal(layer(x[:, ::2]), layer(x)[:, ::2])  # rows that don't lie next to each other


@pytest.mark.parametrize("B,T", [(1, 1), (1, 5), (3, 1)])
@pytest.mark.parametrize("groups", [1, 3])
def test_attention_apart_is_attention(B, T, groups):
    "Against the formula in float64; what the mask hides may be anything finite."
    torch.manual_seed(0)
    q, k, v = torch.randn(B, 2 * groups, T, 8), torch.randn(B, 2, 32, 8), torch.randn(B, 2, 32, 8)
    where = positions(torch.ones(4), 1.0, 20, T, groups, torch.float32, span=32, apart=True)
    assert where.mask.shape == (T, 1, 1, 32)
    hidden = torch.arange(32) > 20 + torch.arange(T)[:, None]
    scores = (q.double() @ k.double().repeat_interleave(groups, 1).mT / 8 ** .5).masked_fill(hidden, float("-inf"))
    expected = scores.softmax(-1) @ v.double().repeat_interleave(groups, 1)
    assert difference(attention_apart(q, k, v, where.mask), expected) <= 1e-6
    k[:, :, 20 + T:], v[:, :, 20 + T:] = 1e6, -1e6
    assert difference(attention_apart(q, k, v, where.mask), expected) <= 1e-6


@same_rows
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("heads,kv_heads,size", [(9, 3, 64), (4, 4, 8), (16, 16, 80), (7, 1, 64)])
def test_attention_apart_does_not_depend_on_the_thread(heads, kv_heads, size, threads):
    "The same head of the same token, with fewer or more tokens beside it: with several threads it falls to another one."
    torch.manual_seed(0)
    before = torch.get_num_threads()
    q, k, v = torch.randn(1, heads, FEW, size), torch.randn(1, kv_heads, 32, size), torch.randn(1, kv_heads, 32, size)
    mask = torch.zeros(FEW, 1, 1, 32)
    try:
        torch.set_num_threads(threads)
        alone = torch.cat([attention_apart(q[:, :, i:i + 1], k, v, mask[:1]) for i in range(FEW)], 2)
        for n in range(2, FEW + 1): assert torch.equal(attention_apart(q[:, :, :n], k, v, mask[:n]), alone[:, :, :n])
    finally: torch.set_num_threads(before)


@same_rows
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_do_not_depend_on_how_many_are_read(name, tmp_path):
    "To the end of a cache whose capacity is no multiple of 16, with rejected tokens left behind the end."
    model = stored(random_model(FAMILIES[name]), tmp_path)
    ids, T = tokens(31 if model.window else 59, B=1), 31 if model.window else 59

    def read(sizes):
        cache, logits, at = model.new_cache(T), [], 0
        while at < T:
            n = min(sizes[len(logits) % len(sizes)], T - at)
            logits.append(model.forward(ids[:, at:at + n], cache))
            at += n
            if at < T:
                model.forward(ids.flip(1)[:, :min(4, T - at)], cache)
                cache.rollback(at)
        return torch.cat(logits, 1)

    alone = read([1])
    for sizes in ([2], [5, 1, 16, 3], [16], [1, 7]): assert torch.equal(read(sizes), alone)


@same_rows
def test_logits_of_the_default_model_do_not_depend_on_how_many_are_read():
    "Across the places where attention goes over to another block of keys (512) and the cache to another multiple."
    model = load_model(fetch(), CPU, torch.float32)
    ids = torch.randint(1000, (1, 540), generator=torch.Generator().manual_seed(0))
    for start in (1, 15, 140, 500):
        cache = model.new_cache(540)
        model.forward(ids[:, :start], cache)
        alone, states = zip(*(model.forward(ids[:, i:i + 1], cache, layers=(1, 30)) for i in range(start, start + 32)))
        for sizes in ([16, 16], [5, 5, 1, 6, 15]):
            cache.rollback(start)
            together, theirs = zip(*(model.forward(piece, cache, layers=(1, 30)) for piece in ids[:, start:start + 32].split(sizes, 1)))
            assert torch.equal(torch.cat(together, 1), torch.cat(alone, 1)) and torch.equal(torch.cat(theirs, 1), torch.cat(states, 1))


def test_batches_in_float32(tmp_path):
    "Several texts at once, one token or several at a time, are what each is alone up to rounding; a plain cache serves as well."
    model = stored(random_model(FAMILIES["smollm2-tied"]), tmp_path)
    ids = tokens(20, B=3)
    alone = torch.cat([model.forward(row[None], model.new_cache(20)) for row in ids])
    for sizes in ([20], [1] * 20, [5, 1, 14]):
        for cache in (model.new_cache(20), KVCache(len(model.layers), 20)):
            assert difference(torch.cat([model.forward(piece, cache) for piece in ids.split(sizes, 1)], 1), alone) <= 1e-5
