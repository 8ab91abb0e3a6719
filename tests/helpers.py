"What several test files share: tiny random models, what they say without speculation, and fakes that fail."
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from specdec.transformer import Llama, load_model

CPU = torch.device("cpu")


@lru_cache
def tiny(vocab=24, hidden=16, layers=3, seed=0, context=48, noise=0.0) -> Llama:
    "A random Llama with uneven logits; with noise, a relative of the one without."
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=context,
                         tie_word_embeddings=False, initializer_range=0.3)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for w in model.parameters(): w += noise * torch.randn_like(w)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_model(Path(folder), CPU, torch.float32)


def ids_of(rounds) -> list[int]:
    "All tokens of a text."
    return [token for r in rounds for token in r.emitted]


def greedy(target, prompt, count) -> list[int]:
    "Plain greedy decoding without a cache: the independent reference."
    ids = list(prompt)
    for _ in range(count):
        logits = target.forward(torch.tensor([ids]), target.new_cache(len(ids)))
        ids.append(logits[0, -1].argmax().item())
    return ids[len(prompt):]


class Failing:
    "A model whose logits are broken from some length on."
    def __init__(self, model, at, value=float("nan")): self.model, self.at, self.value = model, at, value
    def __getattr__(self, name): return getattr(self.model, name)
    def forward(self, ids, cache, **options):
        logits = self.model.forward(ids, cache, **options)
        return torch.full_like(logits, self.value) if cache.length >= self.at else logits


class Untouchable:
    "A target that must not run."
    vocab_size, context_length, device = 24, 16, CPU
    def new_cache(self, capacity): raise AssertionError("work before validation")
