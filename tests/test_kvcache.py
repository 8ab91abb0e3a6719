"""After any sequence of appends and rollbacks the logits equal those of a forward without a cache: for the library's
Llama and for ours, and for architectures with other positions, windows and head sizes. Caches with a bug are caught by
the same property."""
import sys

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from helpers import examples
from specdec.cache import CacheFullError, KVCache, cache_bytes
from specdec.errors import InputError, SpecdecError
from specdec.models.llama import Llama
from specdec.models.loading import load_model
from specdec.models.transformers import TransformersLM

V, CAPACITY = 61, 24
SMALL = dict(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
             max_position_embeddings=64, initializer_range=.2)
GROUPED = SMALL | dict(num_key_value_heads=2, head_dim=8)
FAMILIES = {
    "gpt2": dict(vocab_size=V, n_embd=32, n_layer=3, n_head=4, n_positions=64, initializer_range=.2),
    "gpt_neox": SMALL,
    "bloom": dict(vocab_size=V, hidden_size=32, n_layer=3, n_head=4, initializer_range=.2),
    "gemma2": GROUPED | dict(sliding_window=5),
    "mistral": GROUPED | dict(sliding_window=5),
    "qwen2": GROUPED | dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "deepseek_v3": SMALL | dict(  # keys of 16, values of 12 numbers
        num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, n_group=2, topk_group=1,
        num_experts_per_tok=2, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12),
}


def build(kind, attention="sdpa", **config):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **config)
    try: return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    except ValueError:  # this one has no other
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def llama(): return build("llama", **GROUPED)


@pytest.fixture(scope="module", params=["transformers", "native"])
def model(request, llama, tmp_path_factory):
    "A tiny random float32 Llama, run by transformers or by ours from the same weights."
    if request.param == "transformers": return TransformersLM(llama)
    folder = tmp_path_factory.mktemp("llama")
    llama.save_pretrained(folder)
    native = load_model(folder, torch.device("cpu"), torch.float32)
    assert isinstance(native, Llama)
    return native


APPENDS = st.tuples(st.just("append"), st.integers(1, 6))
ROLLBACKS = st.tuples(st.just("rollback"), st.floats(0, 1))
OPERATIONS = st.lists(st.one_of(APPENDS, ROLLBACKS), min_size=2, max_size=12)
QUICK = dict(deadline=None, database=None, derandomize=True, report_multiple_bugs=False)


@torch.inference_mode()
def follow(model, reference, cache, batch, operations, seed):
    "Do the operations; compare the logits of each append with `reference` on the whole text, without a cache."
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(batch, 0, dtype=torch.long)
    for operation, amount in operations:
        if operation == "rollback":
            keep = round(amount * ids.shape[1])
            cache.rollback(keep)
            ids = ids[:, :keep]
        elif ids.shape[1] + amount <= CAPACITY:
            new = torch.randint(0, V, (batch, amount), generator=generator)
            ids = torch.cat([ids, new], 1)
            logits = model.forward(new, cache)
            expected = reference(input_ids=ids, use_cache=False).logits[:, -amount:]
            assert logits.shape == expected.shape
            assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()  # false for NaN as well
        assert cache.length == ids.shape[1]


def check_property(model, reference, make_cache=KVCache, most=150, **more):
    layers = len(model.new_cache(1).keys)

    @settings(max_examples=most, **QUICK, **more)
    @given(st.integers(1, 3), OPERATIONS, st.integers(0, 9))
    def run(batch, operations, seed): follow(model, reference, make_cache(layers, CAPACITY), batch, operations, seed)
    run()


def test_cached_equals_uncached(model, llama): check_property(model, llama, most=examples(150))


def test_cached_equals_uncached_with_eager_attention():
    module = build("llama", "eager", **GROUPED)
    check_property(TransformersLM(module), module, most=examples(20))


@pytest.mark.parametrize("kind", FAMILIES)
def test_cached_equals_uncached_in_other_families(kind):
    module = build(kind, **FAMILIES[kind])
    check_property(TransformersLM(module), module, most=examples(40))


class ForgetsToRollBack(KVCache):
    def rollback(self, length): pass


class RollsBackOneTooFew(KVCache):
    def rollback(self, length): self.length = min(length + 1, self.length)


class EveryLayerMoves(KVCache):
    def append(self, layer, keys, values):
        result = super().append(layer, keys, values)
        self.length = result[0].shape[2]
        return result


class WritesAtTheWrongOffset(KVCache):
    def append(self, layer, keys, values):
        start = self.length
        result = super().append(layer, keys, values)
        if start: self.keys[layer][:, :, start - 1:start - 1 + keys.shape[2]] = keys  # one too early: over the last key
        return result


class SharesTheFirstSequence(KVCache):
    def append(self, layer, keys, values): return super().append(layer, keys[:1].expand_as(keys), values)


MUTANTS = [ForgetsToRollBack, RollsBackOneTooFew, EveryLayerMoves, WritesAtTheWrongOffset, SharesTheFirstSequence]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_wrong_caches_are_caught(model, llama, mutant):
    with pytest.raises((AssertionError, RuntimeError, SpecdecError)):
        check_property(model, llama, mutant, phases=[Phase.generate])


def snapshot(cache): return [None if t is None else t[:, :, :cache.length].clone() for t in cache.keys + cache.values]


def same(before, after): return all(torch.equal(a, b) for a, b in zip(before, after))


def test_full_cache_is_an_error_and_unchanged(model):
    ids = torch.randint(0, V, (2, 8))
    cache = KVCache(3, 8)
    with pytest.raises(CacheFullError, match="room for 8"): model.forward(torch.randint(0, V, (2, 9)), cache)
    assert cache.length == 0 and cache.nbytes == 0                 # nothing was even allocated
    model.forward(ids[:, :6], cache)
    whole_buffers = [t.clone() for t in cache.keys + cache.values]
    with pytest.raises(CacheFullError, match="6 positions held, 3 more"): model.forward(ids[:, :3], cache)
    assert cache.length == 6
    for now, then in zip(cache.keys + cache.values, whole_buffers):
        assert torch.equal(now.nan_to_num(), then.nan_to_num())  # all of it, not only what counts
    model.forward(ids[:, 6:], cache)
    assert cache.length == 8


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_interrupted_forward_leaves_no_trace(model, llama, layer):
    class Interrupted(KVCache):
        at = None
        def append(self, i, keys, values):
            if i == self.at: raise KeyboardInterrupt
            return super().append(i, keys, values)

    cache, ids = Interrupted(3, 16), torch.randint(0, V, (2, 9))
    model.forward(ids[:, :5], cache)
    before, cache.at = snapshot(cache), layer
    with pytest.raises(KeyboardInterrupt): model.forward(ids[:, :3], cache)
    assert cache.length == 5 and same(before, snapshot(cache))
    cache.at = None
    with torch.inference_mode():
        expected = llama(input_ids=ids, use_cache=False).logits[:, 5:]
        assert (model.forward(ids[:, 5:], cache) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_rollback_copies_nothing(model):
    cache = KVCache(3, 16)
    model.forward(torch.randint(0, V, (1, 9)), cache)
    places, before = [t.data_ptr() for t in cache.keys], snapshot(cache)
    cache.rollback(4)
    assert [t.data_ptr() for t in cache.keys] == places and cache.nbytes == cache_bytes(3, 2, 8, 16, torch.float32)
    cache.length = 9  # what was rolled back is still there until it's written over: only the pointer had moved
    assert same(before, snapshot(cache))


@pytest.mark.parametrize("length", [-1, 4, 2.0, None, "2", True, np.bool_(True), np.int64(4)], ids=repr)
def test_rollback_to_a_length_it_does_not_hold(length):
    cache = KVCache(1, 8)
    cache.append(0, torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4))
    with pytest.raises(InputError, match="roll back"): cache.rollback(length)
    assert cache.length == 3


FITS = torch.zeros(3, 2, 1, 4)
MISFITS = {
    "batch": (FITS[:1], FITS[:1]),
    "heads": (FITS[:, :1], FITS[:, :1]),
    "dtype": (FITS.bfloat16(), FITS.bfloat16()),
    "batch of the values": (FITS, FITS[:1]),
    "more keys than values": (FITS.expand(3, 2, 2, 4), FITS),
    "head size of the keys": (FITS[..., :1], FITS),
    "head size of the values": (FITS, FITS[..., :2]),
}


@pytest.mark.parametrize("keys, values", MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_the_buffer(keys, values):
    "PyTorch would broadcast or round each of these without a word."
    cache = KVCache(1, 8)
    cache.append(0, FITS, FITS)
    with pytest.raises(InputError, match="don't fit"): cache.append(0, keys, values)
    assert cache.length == 1


def test_a_refused_first_append_leaves_no_buffers():
    fits = torch.full((1, 2, 1, 4), 1 / 3)
    for keys, values in ((fits, fits.bfloat16()), (fits, fits.expand(3, 2, 1, 4)), (fits, fits.expand(1, 2, 2, 4))):
        cache = KVCache(1, 8)
        with pytest.raises(InputError, match="don't fit"): cache.append(0, keys, values)
        assert cache.nbytes == 0
        assert torch.equal(cache.append(0, fits, fits)[1], fits)


@pytest.mark.parametrize("name", ["layers", "capacity", "multiple"])
@pytest.mark.parametrize("value", [0, -1, 1.5, None, "2", True, np.float64(2)])
def test_sizes_that_are_no_whole_numbers(name, value):
    with pytest.raises(InputError, match=name): KVCache(**{"layers": 1, "capacity": 8, name: value})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_memory(dtype, batch):
    cache = KVCache(2, 10)
    assert cache.nbytes == 0
    for layer in range(2): cache.append(layer, *torch.zeros(2, batch, 3, 1, 4, dtype=dtype))
    expected = 2 * 2 * batch * 3 * 10 * 4 * dtype.itemsize
    assert cache.nbytes == expected
    assert cache_bytes(layers=2, kv_heads=3, head_dim=4, length=10, dtype=dtype, batch=batch) == expected


def test_views_end_at_the_text(llama):
    cache = KVCache(1, 8)
    for T in (3, 2):
        keys, values = cache.append(0, torch.full((1, 1, T, 4), float(T)), torch.zeros(1, 1, T, 4))
        assert keys.shape == values.shape == (1, 1, cache.length, 4)
        assert keys.data_ptr() == cache.keys[0].data_ptr()
    assert keys[0, 0, :, 0].tolist() == [3, 3, 3, 2, 2]


@pytest.mark.parametrize("capacity,multiple", [(20, 8), (16, 16), (5, 16), (9, 1)])
def test_views_reach_to_a_multiple_and_are_finite_there(capacity, multiple):
    "The text's own part is what was appended, behind it zeros or what was rolled back; capacity is what was asked."
    cache, text = KVCache(2, capacity, multiple), []
    for n in (3, 1, capacity - 4):
        new = torch.randn(1, 2, n, 4)
        text.append(new)
        for layer in range(2): keys, values = cache.append(layer, new, -new)
        end = cache.length
        span, so_far = cache.span(end), torch.cat(text, 2)
        assert keys.shape[2] == values.shape[2] == span and 0 <= span - end < multiple and span % multiple == 0
        assert torch.equal(keys[:, :, :end], so_far) and torch.equal(values[:, :, :end], -so_far)
        assert (keys[:, :, end:] == 0).all() and (values[:, :, end:] == 0).all()
    with pytest.raises(CacheFullError): cache.append(0, torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))
    last = keys[:, :, capacity - 1].clone()
    cache.rollback(capacity - 2)
    keys, _ = cache.append(0, torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    if cache.span(capacity - 1) >= capacity: assert torch.equal(keys[:, :, capacity - 1], last)


@pytest.mark.parametrize("form", [np.int64, torch.tensor], ids=["NumPy", "torch"])
def test_sizes_of_numpy_and_torch_become_plain_ones(form):
    cache = KVCache(form(1), form(8), form(4))
    cache.append(0, torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4))
    cache.rollback(form(2))
    assert [cache.capacity, cache.multiple, cache.length] == [8, 4, 2]
    assert {type(n) for n in (cache.capacity, cache.multiple, cache.length)} == {int}


@pytest.mark.parametrize("capacity", [10 ** 12, 2 ** 62, sys.maxsize, 10 ** 30], ids=["10¹²", "2⁶²", "maxsize", "10³⁰"])
def test_no_memory_for_a_capacity_is_said(capacity):
    cache, new = KVCache(2, capacity), torch.zeros(1, 8, 3, 64)
    with pytest.raises(CacheFullError, match=f"no memory for a cache of {capacity} positions.*fewer new tokens"):
        cache.append(0, new, new)
    assert cache.length == 0 and cache.nbytes == 0
