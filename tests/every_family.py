"A small random model of every causal class that transformers ships, as far as its config can be shrunk."
import copy

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NAMES = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MOST = 3_000_000  # parameters


def _each(value, *names): return dict.fromkeys(names, value)


# sizes by the names that configs have for them; a config takes those that it knows
SIZES = {
    **_each(100, "vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "decoder_vocab_size",
            "ngram_vocab_size_base"),
    **_each(32, "hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "embedding_size", "word_embed_proj_dim",
            "input_embedding_size", "output_embedding_size", "attention_hidden_size", "lru_width", "ple_embed_dim",
            "backbone_hidden_size"),
    **_each(64, "intermediate_size", "d_inner", "dff", "dim_ff", "ffn_dim", "ffn_hidden_size", "encoder_ffn_dim",
            "decoder_ffn_dim", "feed_forward_size", "intermediate_size_mlp", "dense_intermediate_size", "mamba_d_ssm",
            "keep_window_size"),
    **_each(16, "moe_intermediate_size", "shared_intermediate_size", "shared_expert_intermediate_size",
            "shared_experts_intermediate_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size",
            "qk_head_dim", "index_head_dim", "shape_vocab_size", "pronunciation_vocab_size", "router_hidden_size",
            "num_centroids", "rel_extent", "max_source_positions"),
    **_each(4, "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_attention_heads", "n_head", "n_heads",
            "num_heads", "encoder_attention_heads", "decoder_attention_heads", "attention_heads",
            "num_encoder_attention_heads", "num_decoder_attention_heads", "swa_num_attention_heads", "num_experts",
            "n_routed_experts", "num_local_experts", "moe_num_experts", "state_size", "mamba_dt_rank", "time_step_rank",
            "linear_num_value_heads", "linear_num_heads", "d_rel", "gated_norm_rank", "prompt_length",
            "centroid_intermediate_top_k"),
    **_each(3, "encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
    **_each(2, "num_blocks", "num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_experts_per_tok",
            "num_experts_per_token", "moe_topk", "moe_k", "n_group", "num_expert_group", "index_n_heads", "o_groups",
            "linear_num_key_heads", "n_recurrent_layers"),
    **_each(1, "topk_group", "n_shared_experts", "first_k_dense_replace", "moe_num_shared_experts",
            "num_shared_experts", "num_dense_layers", "mamba_n_groups", "n_groups", "mamba_ngroups", "n_input_layers",
            "n_output_layers", "max_window_layers"),
    **_each(8, "head_dim", "swa_head_dim", "dim_head", "d_head", "kv_channels", "qk_rope_head_dim", "qk_nope_head_dim",
            "v_head_dim", "kv_lora_rank", "q_lora_rank", "o_lora_rank", "index_topk", "mamba_d_state", "mamba_n_heads",
            "mamba_d_head", "mamba_chunk_size", "chunk_size", "ssm_state_size", "mamba_num_heads", "mamba_head_dim",
            "mamba_headdim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "rotary_dim",
            "pronunciation_embed_dim", "shape_embed_dim", "attention_head_size", "adapter_rank", "laurel_rank",
            "hidden_size_per_layer_input", "loop_gate_rank", "hc_lowrank", "prompt_mid_dim"),
    # windows far shorter than a test's texts
    **_each(8, "sliding_window", "sliding_window_size", "window_size", "local_attention", "attention_window_size",
            "attention_chunk_size"),
    **_each(128, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions",
            "model_max_length"),
    "num_kv_shared_layers": 0, "encoder_hash_byte_group_vocab": 50, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 3, "mask_token_id": 4,
}
ROPE = dict(rope_type="default", rope_theta=10000.0)
ALTERNATE = ["linear_attention", "full_attention"] * 2
# what else a config needs, where sizes of different names must fit
OTHERWISE = {
    **{name: dict(is_decoder=True) for name in (
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
        "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl")},
    **{name: dict(num_key_value_heads=4) for name in (
        "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash",
        "minicpm3", "sarvam_mla", "youtu")},
    **{name: dict(head_dim=8) for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "bamba": dict(attn_layer_indices=[1, 3]),
    "cohere_compass_text": dict(
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters=dict.fromkeys(("full_attention", "sliding_attention"), ROPE | dict(mrope_section=[2, 1, 1]))),
    "dots1": dict(num_local_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_routed_experts=4),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]]),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"] * 2, shared_intermediate_size=32),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "kimi_linear": dict(layer_types=ALTERNATE, num_key_value_heads=4),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2),
    "mamba2": dict(head_dim=8, num_heads=8),
    "nemotron": dict(num_key_value_heads=2, head_dim=8),
    "qwen4_exp_text": dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8,
                           indexer_compress_ratio=2),
    "reformer": dict(is_decoder=True, attn_layers=["local", "lsh"] * 2, axial_pos_shape=(8, 16),
                     axial_pos_embds_dim=(16, 16), num_buckets=4, lsh_attn_chunk_length=8, local_attn_chunk_length=8),
    "xmod": dict(is_decoder=True, default_language="en_XX"),
    "zamba": dict(layers_block_type=["linear_attention", "linear_attention", "hybrid", "hybrid"],
                  attention_hidden_size=64, attention_head_dim=16),
    "zamba2": dict(layers_block_type=["linear_attention", "hybrid"] * 2, attention_hidden_size=64),
    "zaya": dict(num_experts_per_tok=1),
}
OTHERWISE["deepseek_v2"] |= dict(num_experts_per_tok=2)
OTHERWISE["bailing_hybrid"] = dict(layer_types=ALTERNATE, num_key_value_heads=4)
# classes that are made from a part of the config that stands for them
PARTS = {"musicgen": "musicgen_decoder", "musicgen_melody": "musicgen_melody_decoder"}


def small_config(kind):
    "The config of a class, with all sizes that it knows made small."
    sizes = {}
    for name, value in vars(kind()).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"): sizes[name] = small_config(type(value))
        elif name in SIZES and value is not None: sizes[name] = SIZES[name]
    ends = {name: SIZES[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    return kind(**sizes | ends | OTHERWISE.get(kind.model_type, {}))


def small_model(name):
    "A model of this type with random weights; raises whatever the library does if it can't be built small."
    torch.manual_seed(0)
    config = small_config(CONFIG_MAPPING[PARTS.get(name, name)])
    if name == "dbrx":
        config.attn_config.rope_theta, config.attn_config.clip_qkv = 10000.0, 8.0
    with torch.device("meta"): size = sum(p.numel() for p in make(name, copy.deepcopy(config)).parameters())
    if size > MOST: raise ValueError(f"{size} parameters")
    module = make(name, config).eval().requires_grad_(False)
    for parameter in module.parameters():
        if parameter.is_floating_point(): parameter.add_(torch.randn_like(parameter) * 0.1)
    return module


def make(name, config):
    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    return kind(config) if name in PARTS else AutoModelForCausalLM.from_config(config)
