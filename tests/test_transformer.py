"The native decoder against transformers, on tiny random models of every family."
import pytest
import torch
import transformers
from transformers import LlamaConfig

from families import (
    CPU,
    FAMILIES,
    OTHERS,
    SMALL,
    V,
    check_interface,
    difference,
    edit_config,
    in_pieces,
    random_model,
    stored,
    tokens,
)
from helpers import assert_same_text
from specdec.cache import CacheFullError, KVCache
from specdec.drafters.base import NoDrafter
from specdec.drafters.lookup import NGramDrafter
from specdec.drafters.model import ModelDrafter
from specdec.errors import InputError, ModelError
from specdec.loop import speculate
from specdec.models.hub import fetch, load_transformers
from specdec.models.llama import Llama, rms_norm
from specdec.models.loading import load_model
from specdec.models.transformers import TransformersLM
from specdec.sampling import SamplingParams, SeededRandom


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_native_and_equal(name, tmp_path):
    module = random_model(FAMILIES[name])
    model = stored(module, tmp_path)
    assert isinstance(model, Llama)
    check_interface(model, module, tokens(24))


@pytest.mark.parametrize("name", FAMILIES)
def test_native_agrees_with_the_wrapper_in_bfloat16(name, tmp_path):
    module = random_model(FAMILIES[name]).to(torch.bfloat16)
    native, wrapped, ids = stored(module, tmp_path, torch.bfloat16), TransformersLM(module), tokens(24)
    exact = TransformersLM(random_model(FAMILIES[name]).to(torch.bfloat16).float()).forward(ids, wrapped.new_cache(24))
    for pieces in ([24], [9, 1, 2, 12], [1] * 24):
        ours, theirs = in_pieces(native, ids, pieces), in_pieces(wrapped, ids, pieces)
        assert difference(ours, exact) <= 2 * difference(theirs, exact) + 1e-3


def test_pretraining_tp_changes_nothing(tmp_path):
    module = random_model(LlamaConfig(**SMALL, pretraining_tp=2))
    check_interface(stored(module, tmp_path), module, tokens(24))


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_old_style_config(kind, tmp_path):
    "As published before rope_parameters: rope_theta and rope_scaling at the top, no head_dim, torch_dtype."
    scaling = {
        "default": None,
        "linear": dict(type="linear", factor=2.0),
        "llama3": dict(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    }[kind]
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


WINDOWED = {
    "mistral": transformers.MistralConfig(**SMALL | dict(max_position_embeddings=700), sliding_window=12),
    "phi3": transformers.Phi3Config(**SMALL | dict(max_position_embeddings=700), sliding_window=12),
    "qwen2": transformers.Qwen2Config(
        **SMALL | dict(max_position_embeddings=700), use_sliding_window=True, sliding_window=12, max_window_layers=1
    ),
    "qwen3": transformers.Qwen3Config(
        **SMALL | dict(max_position_embeddings=700), use_sliding_window=True, sliding_window=16, head_dim=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_past_the_window(name, tmp_path):
    """Everything a model promises, at the window's edge, past it, and where whole blocks of 512 keys have left it; a
    token that has left no longer counts."""
    module = random_model(WINDOWED[name])
    model = stored(module, tmp_path)
    assert isinstance(model, Llama) and model.context_length == 700
    for T in (13, 29): check_interface(model, module, tokens(T))
    ids = tokens(620)
    want, cache = module(ids, use_cache=False).logits, model.new_cache(640)
    assert difference(model.forward(ids[:, :600], cache), want[:, :600]) <= 1e-5
    for piece, at in ((1, 600), (5, 601), (14, 606)):
        model.forward((ids[:, :18] + 1) % V, cache)
        cache.rollback(at)
        assert difference(model.forward(ids[:, at:at + piece], cache), want[:, at:at + piece]) <= 1e-5
    half = load_model(tmp_path, CPU, torch.bfloat16)  # whose heads are folded
    assert difference(in_pieces(half, ids[:, :40], [20, 5, 1, 14]), want[:, :40]) <= 0.1


@pytest.mark.parametrize("name", WINDOWED)
def test_greedy_text_past_the_window(name, tmp_path):
    "What transformers generates; with drafts of a windowed model, too, which are all accepted."
    module = random_model(WINDOWED[name])
    model, prompt = stored(module, tmp_path), tokens(9, B=1)
    wanted = module.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None)[0, 9:].tolist()
    for drafter in (NoDrafter(), NGramDrafter(), ModelDrafter(model, V)):
        rounds = list(speculate(model, drafter, prompt[0].tolist(), SamplingParams(), SeededRandom(0), 4, 40))
        assert_same_text(model, prompt[0].tolist(), [t for r in rounds for t in r.emitted], wanted)
    assert all(r.accepted == len(r.drafted) for r in rounds)


def test_layers_without_a_window_see_everything(tmp_path):
    "Left out with `skip`, a layer takes its window along."
    module = random_model(WINDOWED["qwen3"])
    model, ids = stored(module, tmp_path), tokens(60, B=1)
    other = ids.clone()
    other[0, 3] = (other[0, 3] + 1) % V
    def notices(model):
        a, b = (model.forward(some, model.new_cache(60), last=1) for some in (ids, other))
        return not torch.equal(a, b)
    assert notices(model) and not notices(model.skip([1])) and notices(model.skip([0, 2]))


def test_window_that_is_switched_off(tmp_path):
    module = random_model(transformers.Qwen2Config(**SMALL, use_sliding_window=False, sliding_window=16))
    check_interface(stored(module, tmp_path), module, tokens(40))


def test_bad_ids(tmp_path):
    native = stored(random_model(FAMILIES["tinyllama"]), tmp_path)
    for model in (native, TransformersLM(random_model(OTHERS["gpt2"]))):
        for ids in (
            torch.tensor([[3, V]]), torch.tensor([[-1]]), torch.empty(1, 0, dtype=torch.long), torch.tensor([3]),
        ):
            cache = model.new_cache(8)
            with pytest.raises(InputError, match="Token ids"):
                model.forward(ids, cache)
            assert cache.length == 0
        for last in (0, -3):
            with pytest.raises(InputError, match="last"):
                model.forward(torch.tensor([[3, 4]]), model.new_cache(8), last=last)


def test_full_cache_and_end_of_positions(tmp_path):
    native, wrapped = stored(random_model(FAMILIES["tinyllama"]), tmp_path), TransformersLM(
        random_model(OTHERS["gpt2"])
    )
    for model in (native, wrapped):
        with pytest.raises(CacheFullError):
            model.forward(tokens(9), model.new_cache(8))
    with pytest.raises(ModelError, match="end at 64"):
        wrapped.forward(tokens(65), wrapped.new_cache(80))


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
        assert torch.allclose(
            model.forward(some, narrow), model.forward(some, wide), atol=1e-4 if dtype == torch.float32 else 0.05
        )


def test_default_model_equals_transformers():
    "The whole text and pieces with rollbacks, float32."
    folder = fetch()
    reference, model = load_transformers(folder, CPU, torch.float32), load_model(folder, CPU, torch.float32)
    ids = torch.randint(1000, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        output = reference(ids, output_hidden_states=True)
    logits, features = model.forward(ids, model.new_cache(40), layers=(7, 18, 30))
    assert difference(logits, output.logits) <= 1e-5
    *inner, last = features.chunk(3, -1)  # transformers hands out the last state behind the final norm, we before it
    features = torch.cat([*inner, rms_norm(last, model.norm, model.config.rms_norm_eps)], -1)
    assert difference(features, torch.cat([output.hidden_states[i] for i in (7, 18, 30)], -1)) <= 1e-5
    assert difference(in_pieces(model, ids, [20, 1, 1, 6, 12]), output.logits) <= 1e-5


def test_batches_in_float32(tmp_path):
    """Several texts at once, one token or several at a time, are what each is alone up to rounding; a plain cache
    serves as well."""
    model = stored(random_model(FAMILIES["smollm2-tied"]), tmp_path)
    ids = tokens(20, B=3)
    alone = torch.cat([model.forward(row[None], model.new_cache(20)) for row in ids])
    for sizes in ([20], [1] * 20, [5, 1, 14]):
        for cache in (model.new_cache(20), KVCache(len(model.layers), 20)):
            assert (
                difference(torch.cat([model.forward(piece, cache) for piece in ids.split(sizes, 1)], 1), alone) <= 1e-5
            )
