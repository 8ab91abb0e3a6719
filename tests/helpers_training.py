"A small target with a tokenizer, texts of its own, and the settings of a short run, for the tests of training."
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.train.data import sample_rows, write_shard
from specdec.train.student import DistillConfig

V, CPU = 50, torch.device("cpu")


def make_target(folder):
    "A target of four layers with random weights, and its tokenizer."
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    for p in model.parameters(): p.data.add_(torch.randn_like(p) * 0.1)
    model.model.norm.weight.data.mul_(4)  # it has opinions
    model.save_pretrained(folder)
    words = ["<user>", "<end>", "[UNK]"] + [f"w{i}" for i in range(V - 3)]
    plain = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="[UNK]", eos_token="<end>", additional_special_tokens=["<user>"]
    )
    tokenizer.chat_template = "{% for m in messages %}<user> {{ m['content'] }} <end>{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def make_data(target, folder):
    "Two shards of the target's own words."
    rows = sample_rows(target, [[0]] * 48, 32, 1.0, torch.Generator().manual_seed(1))
    write_shard(folder / "a.npy", rows[:24].numpy(), V)
    write_shard(folder / "b.npy", rows[24:].numpy(), V)
    return folder


def settings(folder, data, out, **more):
    "A run of twelve steps."
    short = dict(
        tokens=12 * 4 * 32, batch=4, vocab=30, held_out=6, evaluate_rows=4, evaluate_every=3, checkpoint_every=3,
        warmup=2, hidden=64, dtype="float32", device="cpu",
    )
    return DistillConfig(**dict(target=str(folder), data=str(data), out=str(out), **short) | more)


def weights(out):
    "What a run's checkpoint holds."
    return load_file(Path(out) / "training" / "checkpoint.safetensors")
