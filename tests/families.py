"Tiny random models of every family, and what a model must keep to: what tests of the decoder and its parts share."
import copy
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig

from specdec.errors import InputError
from specdec.models.hub import auto_class
from specdec.models.llama import Llama, rms_norm
from specdec.models.loading import load_model

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
CPU, V = torch.device("cpu"), 100
SMALL = dict(
    vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)


def rope(kind, **extra):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=10000.0, **extra))


FAMILIES = {
    "llama2": LlamaConfig(**SMALL | dict(num_key_value_heads=4)),
    "llama3": LlamaConfig(
        **SMALL,
        **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
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
    "longrope": transformers.Phi3Config(
        **SMALL, original_max_position_embeddings=32,
        **rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=32),
    ),
    "granite": transformers.GraniteConfig(
        **SMALL, residual_multiplier=0.5, logits_scaling=2.0, embedding_multiplier=3.0
    ),
    "gemma2": transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=8),
}
OTHERS = {
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=V),
    "gpt-neox": transformers.GPTNeoXConfig(**SMALL),
    "opt": transformers.OPTConfig(ffn_dim=64, word_embed_proj_dim=32, **SMALL),
    "bloom": transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=V),
    "gemma3-window": transformers.Gemma3TextConfig(**SMALL | dict(num_hidden_layers=6), head_dim=8, sliding_window=8),
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "mla": transformers.DeepseekV3Config(
        **SMALL | dict(num_key_value_heads=4), q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
}


VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4,
)
IMAGE = V - 2 # the token that stands for an image; another one for a video
GEMMA = SMALL | dict(num_hidden_layers=6, head_dim=8, sliding_window=8)
# read images and write text
MULTIMODAL = {
    "gemma3": transformers.Gemma3Config(
        text_config=GEMMA, vision_config=VISION, mm_tokens_per_image=4, image_token_index=IMAGE, image_token_id=IMAGE),
    "gemma4": transformers.Gemma4Config(
        text_config=GEMMA | dict(global_head_dim=16, hidden_size_per_layer_input=0), vision_config=VISION,
        audio_config=None, image_token_id=IMAGE, video_token_id=V - 1),
    "gemma4-e2b": transformers.Gemma4Config(  # its last layers read keys and values of earlier ones
        text_config=GEMMA | dict(
            global_head_dim=16, hidden_size_per_layer_input=8, vocab_size_per_layer_input=V, num_hidden_layers=8,
            num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 4),
        vision_config=VISION, audio_config=None, image_token_id=IMAGE, video_token_id=V - 1),
    "qwen2.5-vl": transformers.Qwen2_5_VLConfig(
        text_config=SMALL | rope("default", mrope_section=[1, 1, 2]),
        vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, patch_size=4,
                           window_size=8, fullatt_block_indexes=[0]),
        image_token_id=IMAGE, video_token_id=V - 1),
    "mistral3": transformers.Mistral3Config(
        text_config=dict(model_type="mistral", **SMALL), vision_config=dict(model_type="pixtral", **VISION),
        image_token_index=IMAGE),
    "llava": transformers.LlavaConfig(
        text_config=dict(model_type="llama", **SMALL), vision_config=dict(model_type="clip_vision_model", **VISION),
        image_token_index=IMAGE),
}


MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8)
# remember more than keys and values: states of Mamba-2 and of gated delta rules, alone and beside attention; windows
# of convolutions
STATES = {
    "mamba2": transformers.Mamba2Config(
        vocab_size=V, hidden_size=32, num_hidden_layers=2, state_size=4, num_heads=8, head_dim=8, n_groups=1,
        chunk_size=8,
    ),
    "granite-hybrid": transformers.GraniteMoeHybridConfig(
        **SMALL, **MAMBA, layer_types=["mamba", "attention", "mamba"], num_local_experts=2, num_experts_per_tok=1,
        shared_intermediate_size=32,
    ),
    "falcon-h1": transformers.FalconH1Config(**SMALL, **MAMBA, mamba_d_ssm=64),
    "lfm2": transformers.Lfm2Config(**SMALL, full_attn_idxs=[1]),
}


def random_model(config):
    "Random weights, norms and biases included."
    torch.manual_seed(0)
    module = auto_class(config).from_config(copy.deepcopy(config)).eval().requires_grad_(False)
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
    top = len(states) - 2 # the library's last one has been through the final norm
    logits, features = model.forward(ids, model.new_cache(64), last=1, layers=(top, 0, 1))
    assert logits.shape == (2, 1, V)
    assert difference(features, torch.cat([states[i] for i in (top, 0, 1)], -1)) <= 1e-5
    if isinstance(model, Llama):
        top += 1
        state = model.forward(ids, model.new_cache(64), layers=(top,))[1]
        assert difference(rms_norm(state, model.norm, model.config.rms_norm_eps), states[top]) <= 1e-5
        assert difference(state, states[top]) > 0.1
    with pytest.raises(InputError, match="numbered"):
        model.forward(ids, model.new_cache(64), layers=(top + 1,))


def edit_config(remove=(), **fields):
    def change(folder):
        path = folder / "config.json"
        config = {k: v for k, v in json.loads(path.read_text()).items() if k not in remove} | fields
        path.write_text(json.dumps(config))
    return change


def in_two_threads(work) -> list:
    "What both of two threads return, which change places as often as can be."
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool: return list(pool.map(work, range(2)))
    finally: sys.setswitchinterval(interval)
