"Small random targets and heads, for the tests of drafters."
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec.core import TorchSource
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.heads import init_from_target
from specdec.loading import load_model
from specdec.sampling import Transform

CPU = torch.device("cpu")
V = 24  # tokens of a head's target
DRAFT = torch.tensor([0, 3, 4, 9, 10, 15, 20, 23])
OPTIONS = {
    "paper": {}, "two layers": dict(num_layers=2, norm_before_residual=True),
    "norm before fc": dict(norm_before_fc=True), "norms": dict(num_layers=2, fc_norm=True, norm_output=True),
}


def packable_llama(dtype=torch.float32, layers=4, seed=0):
    "A random Llama with 96 tokens whose matrices can be packed in fours."
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.2,
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        return load_model(Path(folder), CPU, dtype)


def random_target(folder, V=V, depth=5, dtype=torch.float32, **sizes):
    "A random Llama for a head to read, saved in the folder and loaded."
    torch.manual_seed(0)
    sizes = (
        dict(
            hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64,
        )
        | sizes
    )
    config = LlamaConfig(vocab_size=V, num_hidden_layers=depth, initializer_range=.3, tie_word_embeddings=True, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load_model(Path(folder), CPU, dtype)


def random_head(target, tokens=DRAFT, **options):
    "Every weight random, norms too: a norm of ones would hide that it is left out."
    head = init_from_target(target, tokens, **{"dtype": target.dtype, **options})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + .3 * noise if "norm" in name else noise / parameter.shape[-1] ** .5)
    return head


def read(target, tokens, layers):
    "The target's features at each of the tokens, [B, T, F]."
    return target.forward(tokens, target.new_cache(tokens.shape[1]), layers=layers)[1]


def difference(a, b):
    "The largest difference, relative to the largest number."
    return ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()


def proposals(drafter, K=3, transform=Transform(1.0), seed=0):
    "What a drafter proposes with that seed."
    return drafter.propose(K, transform, TorchSource(seed))


def fresh(head, target, text):
    "A head's drafter that has read the text at once."
    drafter = HeadDrafter(head, target)
    drafter.prefill(text, read(target, torch.tensor([text]), head.config.layers)[0, :-1], 40)
    return drafter


def started(drafter, tokens):
    "A drafter that begins with that text."
    drafter.prefill(tokens, None, 10 ** 6)
    return drafter
