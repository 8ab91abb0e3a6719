"What every model promises besides its logits: to be read without a cache; and copies of caches."
import pytest
import torch

from families import FAMILIES, OTHERS, random_model, stored, tokens
from helpers import tiny
from specdec.cache import KVCache
from specdec.engine.prefix import prefill
from specdec.errors import InputError
from specdec.models.protocol import CausalLM, CopyingCache, get_cache_length, truncate_cache
from specdec.pair import Pair


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


# A cache that has nothing in common with ours

class TokenCache:
    "Keeps the tokens, which are read again each time."
    def __init__(self, capacity): self.tokens, self.capacity, self.copied = [], capacity, 0
    @property
    def length(self): return len(self.tokens)
    def rollback(self, length): del self.tokens[length:]
    def copy_from(self, source, length): self.tokens, self.copied = source.tokens[:length], length


class Counted:
    "As little as the loop asks for: it can't be copied."
    def __init__(self, capacity): self.tokens, self.capacity = [], capacity
    length = property(lambda self: len(self.tokens))
    def rollback(self, length): del self.tokens[length:]


class Rereader(CausalLM):
    "A model without keys and values: around another one, which reads the whole text in each forward."
    def __init__(self, model, kind=TokenCache):
        self.model, self.kind, self.made = model, kind, []
        self.vocab_size, self.context_length = model.vocab_size, model.context_length
        self.device, self.dtype = model.device, model.dtype
    def new_cache(self, capacity):
        self.made.append(self.kind(capacity))
        return self.made[-1]
    def forward(self, ids, cache=None, last=None, layers=()):
        cache = self.kind(ids.shape[1]) if cache is None else cache
        cache.tokens += ids[0].tolist()
        return self.model.forward(torch.tensor([cache.tokens]), last=last or ids.shape[1])


@pytest.mark.parametrize("kind", [TokenCache, Counted])
def test_a_foreign_cache_is_not_truncated_by_ours(kind):
    with pytest.raises(InputError, match=rf"a KVCache, not a {kind.__name__}: make a new_cache .* copy_from"):
        truncate_cache(kind(8), 0)


@pytest.mark.parametrize("kind", [TokenCache, Counted])
@pytest.mark.parametrize(
    "how", [dict(), dict(temperature=1.0, seed=3), dict(K="adaptive"), dict(method="plain")], ids=str)
def test_a_foreign_cache_decodes_what_ours_does(how, kind):
    "As target's and as draft's; alone, in a list and streamed; rejections roll it back."
    how, prompts = dict(max_new_tokens=20, same_text=None if how.get("method") else True) | how, [[1, 5, 2], [7, 7]]
    draft = tiny(seed=1)
    pair = Pair(Rereader(tiny(), kind), Rereader(draft, kind))
    due = [r.generated_ids for r in Pair(tiny(), draft).generate(prompts, **how)]
    assert [r.generated_ids for r in pair.generate(prompts, **how)] == due
    alone = pair.generate(prompts[0], **how)
    assert alone.generated_ids == due[0] and (alone.method == "plain" or "K" in how or alone.num_rejected > 0)
    assert all(not issubclass(type(cache), KVCache) and get_cache_length(cache) > 20 for cache in pair.target.made)


def test_a_foreign_cache_is_read_once_and_continued_often():
    "Nothing of the prompt is read again, and one text is nothing to the other."
    target = Rereader(tiny())
    pair, prompt = Pair(target, tiny(seed=1)), [1, 5, 2, 9, 4]
    due = [pair.generate([*prompt, *more], max_new_tokens=12).generated_ids for more in ([], [3], [8, 8])]
    known = pair.prefill(prompt)
    assert isinstance(known.cache, CopyingCache) and known.nbytes == known.logits.nbytes
    for _ in range(2):
        found = [pair.generate([*prompt, *more], max_new_tokens=12, prefilled=known) for more in ([], [3], [8, 8])]
        assert [r.generated_ids for r in found] == due and [r.prompt_reused for r in found] == [5, 5, 5]
    assert known.cache.length == 5 and known.fork(3).copied == 5
    with pytest.raises(InputError, match=r"Rereader can't be copied: .* copy_from\(source, length\) of Counted"):
        prefill(Rereader(tiny(), Counted), prompt)
