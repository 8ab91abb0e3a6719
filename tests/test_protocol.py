"What every model promises besides its logits: to be read without a cache; and copies of caches."
import pytest
import torch

from families import FAMILIES, OTHERS, random_model, stored, tokens
from specdec.cache import KVCache
from specdec.errors import InputError
from specdec.models.protocol import truncate_cache


@pytest.mark.parametrize("name", ["tinyllama", "mistral-window", "gpt2"])
def test_without_a_cache_a_text_is_read_once(name, tmp_path):
    model, ids = stored(random_model((FAMILIES | OTHERS)[name]), tmp_path), tokens(40)
    logits, states = model.forward(ids, layers=(1,))
    cached, wanted = model.forward(ids, model.new_cache(40), layers=(1,))
    assert torch.equal(logits, cached) and torch.equal(states, wanted)
    assert torch.equal(model.forward(ids, last=2), logits[:, -2:])
    assert torch.equal(model.forward(ids[:, :3]), model.forward(ids[:, :3]))  # nothing was kept


@pytest.mark.parametrize("name", ["tinyllama", "mistral-window", "gpt2"])
def test_a_truncated_copy_goes_its_own_way(name, tmp_path):
    "Both go on from where they are, as if the other weren't there; a rollback afterwards is no copy's business."
    model, ids, other = stored(random_model((FAMILIES | OTHERS)[name]), tmp_path), tokens(40), tokens(40).flip(1)
    cache = model.new_cache(64)
    model.forward(ids[:, :20], cache)
    copied = truncate_cache(cache, 12)
    assert (cache.length, copied.length, copied.capacity, copied.multiple) == (20, 12, 64, cache.multiple)
    changed = model.forward(other[:, :20], copied)
    assert torch.allclose(changed, model.forward(torch.cat((ids[:, :12], other[:, :20]), 1))[:, 12:], atol=1e-4)
    assert torch.allclose(model.forward(ids[:, 20:], cache), model.forward(ids)[:, 20:], atol=1e-4)
    cache.rollback(3)
    assert copied.length == 32
    assert all(torch.equal(a[:, :, :3], b[:, :, :3]) for a, b in zip(cache.keys, copied.keys))


def test_copies_of_empty_caches_and_impossible_lengths():
    empty = truncate_cache(KVCache(2, 8, multiple=4), 0)
    assert empty.length == 0 and empty.keys == [None, None] and empty.nbytes == 0
    cache = KVCache(1, 8)
    cache.append(0, torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 5))
    assert truncate_cache(cache, 3).values[0].shape == (1, 2, 8, 5)
    wider = truncate_cache(cache, 2, 20)
    assert (wider.capacity, wider.values[0].shape) == (20, (1, 2, 20, 5)) and cache.capacity == 8
    for wrong in (-1, 4, 1.5, None):
        with pytest.raises(InputError, match="length to keep"): truncate_cache(cache, wrong)
    with pytest.raises(InputError, match="The copy's capacity"): truncate_cache(cache, 3, 2)
