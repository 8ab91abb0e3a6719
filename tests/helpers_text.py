"Tiny random models that speak real tokens."
import copy
from functools import lru_cache

from helpers import tiny
from specdec.models.hub import fetch, load_tokenizer

TOKENIZER = load_tokenizer(fetch())
V = len(TOKENIZER)


def talker(seed=0, vocab=V, eos=frozenset(), tokenizer=True, **shape):
    """A tiny random Llama that speaks real tokens, nonsense with every kind of byte in it. Weights are made once; each
    call has an object of its own over them, so that no test changes another's."""
    return copy.copy(made(seed, vocab, eos, tokenizer, **shape))


@lru_cache
def made(seed, vocab, eos, tokenizer, **shape):
    model = copy.copy(tiny(vocab=vocab, hidden=16, seed=seed, context=shape.pop("context", 96), **shape))
    if tokenizer: model.tokenizer = TOKENIZER
    model.eos_ids = eos
    return model
