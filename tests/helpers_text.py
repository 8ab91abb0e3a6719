"Tiny random models that speak real tokens."
import copy
from functools import lru_cache

from helpers import tiny
from specdec.models.hub import fetch, load_tokenizer

TOKENIZER = load_tokenizer(fetch())
V = len(TOKENIZER)


@lru_cache
def talker(seed=0, vocab=V, eos=frozenset(), tokenizer=True, **shape):
    "A tiny random Llama that speaks real tokens, nonsense with every kind of byte in it."
    model = copy.copy(tiny(vocab=vocab, hidden=16, seed=seed, context=shape.pop("context", 96), **shape))
    if tokenizer: model.tokenizer = TOKENIZER
    model.eos_ids = eos
    return model
