"""How a CPU multiplies. In float32 on an x86 processor, what is computed for a token does not depend on how many are
read at once: bit for bit."""
import copy
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen2Config

from families import CPU, FAMILIES, V, difference, in_two_threads, random_model, stored, tokens
from helpers import NIGHTLY, examples, ids_of, tool, workers_kept
from helpers_drafters import random_head
from specdec.bench import methods
from specdec.drafters.adaptive import AdaptiveLookahead
from specdec.drafters.base import NoDrafter
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.lookup import NGramDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.tree import TreeDrafter
from specdec.errors import InputError
from specdec.loop import speculate
from specdec.models import llama, loading
from specdec.models.hub import fetch
from specdec.models.linear import (
    FEW,
    VECTOR,
    Linear,
    attention_plan,
    can_be_batch_invariant,
    grouped_attention,
    has_layouts,
    processor_kind,
    release_workers,
)
from specdec.models.llama import positions
from specdec.models.loading import (
    LayoutTable,
    fits_plain,
    layer_numbers,
    layout_table,
    layouts_used,
    load_model,
    one_row_layout,
    packed_to_plain,
)
from specdec.models.transformers import TransformersLM
from specdec.pair import Pair
from specdec.sampling import SamplingParams, SeededRandom
from specdec.verify import greedy_match, sample_and_match


@pytest.mark.parametrize("T", [1, 2, 5, 16, 17])
def test_mask_and_fold(T):
    "In bfloat16 a few tokens are folded, in float32 never; the mask is the shifted triangle, once per folded head."
    for dtype in (torch.bfloat16, torch.float32):
        for start in (0, 7):
            where = positions(torch.ones(4), 1.0, start, T, 3, dtype)
            assert where.fold == (3 if dtype == torch.bfloat16 and T <= 16 else 1)
            triangle = torch.ones(T, start + T, dtype=torch.bool).tril(start).repeat(where.fold, 1)
            if where.mask is None: assert T == 1 or start == 0
            else: assert torch.equal(where.mask == 0, triangle) and torch.equal(where.mask == float("-inf"), ~triangle)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_linear_is_close_to_plain_in_bfloat16(rows, pack):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(48, 32).bfloat16(), torch.randn(48).bfloat16(), torch.randn(1, rows, 32).bfloat16()
    for b in (None, bias):
        y = Linear(weight, b, pack)(x)
        assert y.shape == (1, rows, 48) and y.dtype == torch.bfloat16
        assert (
            difference(y, torch.nn.functional.linear(x.float(), weight.float(), None if b is None else b.float()))
            <= 0.01
        )


def test_one_row_is_multiplied_without_onednn_and_nothing_else_is():
    "Whoever asks sees oneDNN on again, even after an error, or off if it was off before."
    seen = []
    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.nn.functional.linear: seen.append(torch.backends.mkldnn.enabled)
            return function(*args, **(kwargs or {}))

    layer, exact = Linear(torch.randn(8, 4).bfloat16(), pack=False), Linear(torch.randn(8, 4))
    with Spy():
        for rows in (1, 2, 1): layer(torch.randn(1, rows, 4).bfloat16())
        exact(torch.randn(1, 1, 4))
    # a packed product is another function
    assert seen == ([False, True, False] if layer.half else [True] * 3) + [True] * (not exact.batch_invariant)
    with pytest.raises(RuntimeError): layer(torch.randn(1, 1, 5).bfloat16())
    assert torch.backends.mkldnn.enabled
    with torch.backends.mkldnn.flags(enabled=False):
        layer(torch.randn(1, 1, 4).bfloat16())
        assert not torch.backends.mkldnn.enabled


def test_threads_leave_onednn_on():
    layer, x = Linear(torch.randn(8, 4).bfloat16(), pack=False), torch.randn(1, 1, 4).bfloat16()
    for _ in range(10):
        in_two_threads(lambda _: [layer(x) for _ in range(300)])
        assert torch.backends.mkldnn.enabled


def test_both_layouts_are_the_same_model(tmp_path, monkeypatch):
    """Packed for a few rows or left for one: the same weights, so logits within bfloat16's spread of each other, and
    each keeps its weights once."""
    monkeypatch.setattr(loading, "layout_table", lambda: (LayoutTable(kinds={}), "a test"))
    monkeypatch.setattr(loading, "processor_kind", lambda: "other")
    module = random_model(FAMILIES["smollm2-tied"])
    packed = stored(module, tmp_path, torch.bfloat16)
    plain = load_model(tmp_path, CPU, torch.bfloat16, use="plain")
    ids = tokens(9)
    for pieces in ([9], [1] * 9, [5, 1, 3]):
        logits = []
        for model in (packed, plain):
            cache = model.new_cache(9)
            logits.append(torch.cat([model.forward(piece, cache) for piece in ids.split(pieces, 1)], 1))
        assert difference(logits[0].float(), logits[1].float()) <= 0.05
    assert not plain.head.packed and plain.layers[0].mlp.down.weight.dtype == torch.bfloat16
    if plain.head.half: assert packed.head.packed
    # a processor on which packed weights are no slower for one row
    monkeypatch.setattr(loading, "processor_kind", lambda: "amx")
    assert load_model(tmp_path, CPU, torch.bfloat16, use="plain").head.packed == plain.head.half


def test_many_sequences_are_each_what_they_are_alone(tmp_path, monkeypatch):
    "Of more than a few sequences the heads aren't folded; each one's logits are, within bfloat16's spread, its own."
    model, folds = stored(random_model(FAMILIES["smollm2-tied"]), tmp_path, torch.bfloat16), []
    attend = lambda q, k, v, mask, fold, *rest: folds.append(fold) or grouped_attention(q, k, v, mask, fold, *rest)
    monkeypatch.setattr(llama, "grouped_attention", attend)
    ids = torch.randint(0, V, (FEW + 1, 9), generator=torch.Generator().manual_seed(0))
    def read(rows):
        cache = model.new_cache(9)
        return torch.cat([model.forward(piece, cache) for piece in rows.split([5, 1, 3], 1)], 1).float()
    together = read(ids)
    assert set(folds) == {1}
    folds.clear()
    few = read(ids[:FEW])
    assert set(folds) == {model.groups} and model.groups > 1
    for i in range(FEW):
        assert difference(together[i : i + 1], read(ids[i : i + 1])) <= 0.05
        assert difference(few[i : i + 1], together[i : i + 1]) <= 0.05
    assert difference(together[:1], together[1:2]) > 0.05  # another sequence's are others


SMOLLM2 = LlamaConfig(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3,
                      num_hidden_layers=30, vocab_size=49152)
QWEN = Qwen2Config(hidden_size=1536, intermediate_size=8960, num_attention_heads=12, num_key_value_heads=2,
                   num_hidden_layers=28, vocab_size=151936, tie_word_embeddings=False)


def test_the_layout_of_plain_decoding_follows_shapes():
    "By the table that is shipped: small matrices as they are, large ones packed, on one processor."
    table, source = layout_table()
    assert source == "the shipped table" and len(table.kinds["avx512_bf16"].bfloat16) > 2
    layers = [layer_numbers(config) for config in (SMOLLM2, QWEN)]
    assert layers == [3_538_944, 46_792_704]
    small, large = (one_row_layout(layer, "avx512_bf16", table) for layer in layers)
    assert not small.packed and large.packed and small.slower == large.slower == 1
    assert str(small).startswith("as they are (by the shipped table, avx512_bf16: ") and "takes 0." in str(large)


def test_between_measured_shapes_lies_a_line():
    table = LayoutTable.model_validate({"kinds": {"k": {"bfloat16": [
        {"layer": 10_000, "packed_to_plain": .8}, {"layer": 100, "packed_to_plain": 1.4}]}}})
    found = [packed_to_plain(layer, "k", table) for layer in (1, 100, 1000, 10_000, 10**9)]
    assert found == pytest.approx([1.4, 1.4, 1.1, .8, .8])
    assert [one_row_layout(layer, "k", table).packed for layer in (1000, 5000)] == [False, True]
    assert packed_to_plain(100, "other", table) is None
    assert [one_row_layout(100, kind, table).packed for kind in ("amx", "other")] == [True, False]


@pytest.mark.parametrize("ratio", [.7, 1.25])
def test_a_loader_follows_the_table(ratio, tmp_path, monkeypatch):
    "And plain decoding is measured with a model of its own only where its layout is another."
    table = LayoutTable.model_validate({"kinds": {"k": {"bfloat16": [{"layer": 1, "packed_to_plain": ratio}]}}})
    monkeypatch.setattr(loading, "layout_table", lambda: (table, "a test"))
    monkeypatch.setattr(loading, "processor_kind", lambda: "k")
    monkeypatch.setattr(loading, "has_layouts", lambda device, dtype: dtype == torch.bfloat16)
    target = stored(random_model(FAMILIES["smollm2-tied"]), tmp_path, torch.bfloat16)
    assert target.plain_factor == max(1, ratio) and target.layout == "packed (for several tokens at once)"
    again = []
    monkeypatch.setattr(methods, "load", lambda *given, use: again.append(use) or "another")
    for use in ("plain", "draft"):
        model = load_model(tmp_path, CPU, torch.bfloat16, use)
        assert model.plain_factor == 1 and fits_plain(model)
        assert model.layout.startswith("packed (" if ratio < 1 else "as they are (") and f"{ratio:.2f}" in model.layout
        if model.head.half: assert model.packed == model.head.packed == (ratio < 1)
    if target.packed:
        assert fits_plain(target) == (ratio < 1)
        assert methods.for_plain_decoding(target, "name", "cpu", "bfloat16") == (target if ratio < 1 else "another")
        assert again == ["plain"] * (ratio > 1)


def test_a_calibration_replaces_the_table(tmp_path, monkeypatch):
    "Only where the environment names it, and whoever asks is told."
    shipped, source = layout_table()
    assert "the shipped table" in layouts_used()
    mine = tmp_path / "mine.json"
    mine.write_text('{"kinds": {"k": {"bfloat16": [{"layer": 5, "packed_to_plain": 0.5}]}}, "more": 1}')
    monkeypatch.setenv("SPECDEC_LAYOUTS", str(mine))
    monkeypatch.setattr(loading, "processor_kind", lambda: "k")
    table, source = layout_table()
    assert source == str(mine) and list(table.kinds) == ["k"] and layouts_used() == f"{mine}, k: 1 shapes"
    monkeypatch.setenv("SPECDEC_LAYOUTS", str(tmp_path))
    with pytest.raises(InputError, match="There is no table of layouts.*without SPECDEC_LAYOUTS"): layout_table()
    monkeypatch.setenv("SPECDEC_LAYOUTS", "")
    assert layout_table() == (shipped, "the shipped table")


FIELDS = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3), lambda inner:
                      st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
                          ["kinds", "k", "bfloat16", "layer", "packed_to_plain"]), inner, max_size=3), max_leaves=8)


@settings(max_examples=examples(50), deadline=None)
@given(st.one_of(st.binary(max_size=60), FIELDS.map(lambda value: json.dumps(value).encode()), st.sampled_from([
    b"[" * 100_000, b'{"kinds": ' * 5000, b" " * 1_100_000, b'{"kinds": {"k": {"bfloat16": []}}}',
    b'{"kinds": {"k": {"bfloat16": [{"layer": 1e999, "packed_to_plain": 1}]}}}',
    b'{"kinds": {"k": {"bfloat16": [{"layer": 0, "packed_to_plain": 1}]}}}',
    b'{"kinds": {"k": {"bfloat16": [{"layer": 1, "packed_to_plain": NaN}]}}}'])))
def test_any_other_file_is_an_input_error(content):
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = Path(folder) / "table.json"
        file.write_bytes(content)
        patch.setenv("SPECDEC_LAYOUTS", str(file))
        try: table, _ = layout_table()
        except InputError as error: assert "table of layouts" in str(error) and "\n" not in str(error)
        else: assert all(steps.bfloat16 for steps in table.kinds.values())


def test_the_tool_writes_what_the_loader_reads(tmp_path, monkeypatch):
    "A made shape, two steps; entries of other processors stay."
    made = tool("layouts")
    if not has_layouts(CPU, torch.bfloat16): pytest.skip("this processor multiplies no bfloat16")
    monkeypatch.setattr(made, "SHAPES", {"tiny": (32, 64, 4, 2, 3, 128, True), "untied": (64, 64, 4, 2, 2, 128, False)})
    out = tmp_path / "table.json"
    out.write_text('{"kinds": {"other": {"bfloat16": [{"layer": 5, "packed_to_plain": 0.5}]}}}')
    monkeypatch.setattr("sys.argv", ["layouts.py", "--out", str(out), "--repeats", "2", "--only", "untied", "tiny"])
    made.main()
    monkeypatch.setenv("SPECDEC_LAYOUTS", str(out))
    table, _ = layout_table()
    assert table.kinds.keys() == {"other", processor_kind()}
    assert [step.layer for step in table.kinds[processor_kind()].bfloat16] == [9_216, 24_576]
    config, part = made.config_of((512, 1024, 8, 4, 20, 50_000, True), room=10_000_000)
    assert part < .3 and config.num_hidden_layers == round(20 * part) and config.vocab_size <= 50_000 * part


def onednn_keeps_rows():
    "Whether this processor's oneDNN does what we rely on; asked of the library itself, apart from our code."
    if not can_be_batch_invariant(CPU, torch.float32): return False
    def keeps(outputs, inputs):
        weight, x = torch.ops.mkldnn._reorder_linear_weight(torch.randn(outputs, inputs), FEW), torch.randn(64, inputs)
        def product(rows): return torch.ops.mkldnn._linear_pointwise.default(rows, weight, None, "none", [], "")
        pairs = torch.cat([product(pair) for pair in x.split(2)])
        return all(torch.equal(product(x[:n]), pairs[:n]) for n in range(2, 65))
    return all(keeps(*shape) for shape in [(960, 576), (576, 1536), (48, 33), (96, 64), (144, 32)])


batch_invariant = pytest.mark.skipif(not onednn_keeps_rows(), reason="no oneDNN here whose rows stay the same")


@batch_invariant
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (300, 4096), (7, 33), (100, 1)])
def test_a_row_does_not_depend_on_the_others(shape):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(2, 100, shape[1])
    for b in (None, bias):
        layer = Linear(weight, b)
        alone = torch.cat([layer(row[None, None]) for row in x.flatten(0, 1)])
        assert torch.equal(layer(x[0, 0]), alone[0, 0])  # without leading sizes
        for n in (1, 2, 3, 7, FEW, 100):
            y = layer(x[:, :n])
            assert y.shape == (2, n, shape[0]) and torch.equal(y, alone.view(2, 100, -1)[:, :n])
        assert (
            difference(
                layer(x), torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
            )
            <= 2e-6
        )
        assert torch.equal(layer(x[:, ::2]), layer(x)[:, ::2])  # rows that don't lie next to each other


@pytest.mark.parametrize("start", [20, 29])
@pytest.mark.parametrize("B,T", [(1, 1), (1, 5), (3, 1)])
@pytest.mark.parametrize("groups", [1, 3])
def test_attention_apart_is_attention(B, T, groups, start):
    "Against the formula in float64, also across a multiple of 16; what the masks hide may be anything finite."
    torch.manual_seed(0)
    q, k, v = torch.randn(B, 2 * groups, T, 8), torch.randn(B, 2, 48, 8), torch.randn(B, 2, 48, 8)
    where = positions(torch.ones(4), 1.0, start, T, groups, torch.float32, span=48, apart=True)
    pieces = [(3, 32), (2, 48)] if start + T > 32 else [(T, 32)]
    assert where.mask is None and [(len(m), m.shape[-1]) for m in where.apart] == pieces
    hidden = torch.arange(48) > start + torch.arange(T)[:, None]
    scores = (q.double() @ k.double().repeat_interleave(groups, 1).mT / 8 ** .5).masked_fill(hidden, float("-inf"))
    expected = scores.softmax(-1) @ v.double().repeat_interleave(groups, 1)
    assert difference(grouped_attention(q, k, v, None, 1, where.apart), expected) <= 1e-6
    k[:, :, start + T:], v[:, :, start + T:] = 1e6, -1e6
    assert difference(grouped_attention(q, k, v, None, 1, where.apart), expected) <= 1e-6


def read_apart(q, k, v, start: int, sizes: list[int]):
    "What tokens from `start` on get from attention, read in pieces of these sizes."
    parts = []
    for part in q[:, :, :sum(sizes)].split(sizes, 2):
        end = start + part.shape[2]
        span = -(-end // VECTOR) * VECTOR  # as the cache's views
        plan = attention_plan(start, part.shape[2], span, q.shape[1] // k.shape[1], torch.float32, CPU, apart=True)
        parts.append(grouped_attention(part, k[:, :, :span], v[:, :, :span], *plan))
        start = end
    return torch.cat(parts, 2)


@batch_invariant
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("heads,kv_heads,size", [(9, 3, 64), (4, 4, 8), (16, 16, 80), (7, 1, 64)])
def test_attention_apart_does_not_depend_on_the_others(heads, kv_heads, size, threads):
    """The same head of the same token, with fewer or more tokens beside it: with several threads it falls to another
    one, and past a multiple of 16 the others sum over more keys. Lengths up to the default model's context."""
    generator = torch.Generator().manual_seed(threads)
    k, v = torch.randn(2, 1, kv_heads, 8192, size, generator=generator)
    q = torch.randn(1, heads, FEW, size, generator=generator)
    starts = [0, 15, 183, 190, 703, 1214, *torch.randint(8176, (6,), generator=generator).tolist(), 8176]
    if not NIGHTLY: starts = [*starts[1:6:2], starts[6], starts[-1]]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for start in starts:
            alone = read_apart(q, k, v, start, [1] * FEW)
            for n in range(2, FEW + 1) if NIGHTLY else (2, 3, 5, 8, FEW):
                together = read_apart(q, k, v, start, [n])
                assert torch.equal(together, alone[:, :, :n]), f"{n} tokens at once after {start}"
    finally: torch.set_num_threads(before)


@batch_invariant
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_do_not_depend_on_how_many_are_read(name, tmp_path):
    "To the end of a cache whose capacity is no multiple of 16, with rejected tokens left behind the end."
    model = stored(random_model(FAMILIES[name]), tmp_path)
    ids, T = tokens(59, B=1), 59  # past the window, if there is one

    def read(sizes):
        cache, logits, at = model.new_cache(T), [], 0
        while at < T:
            n = min(sizes[len(logits) % len(sizes)], T - at)
            logits.append(model.forward(ids[:, at:at + n], cache))
            at += n
            if at < T:
                model.forward(ids.flip(1)[:, :min(4, T - at)], cache)
                cache.rollback(at)
        return torch.cat(logits, 1)

    alone = read([1])
    for sizes in ([2], [5, 1, 16, 3], [16], [1, 7]): assert torch.equal(read(sizes), alone)


@batch_invariant
def test_logits_of_the_default_model_do_not_depend_on_how_many_are_read():
    "Across the places where sums are cut into other blocks, and where attention goes over to more keys (512)."
    model = load_model(fetch(), CPU, torch.float32)
    ids = torch.randint(model.vocab_size, (1, 1242), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(1242)
    for start in (1, 15, 140, 183, 250, 500, 703, 1210) if NIGHTLY else (15, 183, 500):
        model.forward(ids[:, cache.length:start], cache, last=1)
        alone, states = zip(*(model.forward(ids[:, i:i + 1], cache, layers=(1, 30)) for i in range(start, start + 32)))
        for sizes in ([16, 16], [5, 5, 1, 6, 15]):
            cache.rollback(start)
            pieces = ids[:, start:start + 32].split(sizes, 1)
            together, theirs = zip(*(model.forward(piece, cache, layers=(1, 30)) for piece in pieces))
            assert torch.equal(torch.cat(together, 1), torch.cat(alone, 1)), f"{sizes} at once after {start}"
            assert torch.equal(torch.cat(theirs, 1), torch.cat(states, 1)), f"{sizes} at once after {start}"
        cache.rollback(start)


def torn(folder):
    """A model whose text a single bit decides: each token of the vocabulary has a twin whose row of the head is one
    rounding away."""
    config = copy.deepcopy(FAMILIES["tinyllama"])
    config.max_position_embeddings, config.head_dim = 1024, 64
    model = random_model(config)
    head = model.lm_head.weight
    head[1::2] = torch.nextafter(head[::2], torch.tensor(torch.inf))
    return stored(model, folder)


def long_prompt(length): return torch.randint(V, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@batch_invariant
@pytest.mark.parametrize("K, rule", [(3, None), (15, None), (20, None), (20, greedy_match)])
def test_greedy_texts_are_equal_where_logits_nearly_tie(K, rule, tmp_path):
    """Past 190 positions, where attention cuts its sums; a longer chain than keeps its bits is cut, whatever the rule.
    From 180 on each text ends where the next begins."""
    model = torn(tmp_path)

    def said(drafter, prompt):
        return ids_of(speculate(model, drafter, prompt, SamplingParams(0.0), SeededRandom(0), K, 64, verify=rule))

    for length in range(180, 390, 30 if NIGHTLY else 60):
        prompt = long_prompt(length)
        assert said(ModelDrafter(model, V), prompt) == said(NoDrafter(), prompt), f"after {length} tokens"


WAYS = {
    "a rule": dict(verify=greedy_match), "sample_and_match": dict(verify=sample_and_match),
    "a rule of one's own": dict(verify=lambda *given: greedy_match(*given)), "logprobs": dict(logprobs=1),
    "adaptive": dict(K="adaptive", verify=greedy_match),
    "a controller": dict(K=AdaptiveLookahead(initial=20, min=20, max=64), verify=greedy_match),
}


@batch_invariant
@pytest.mark.parametrize("way", WAYS)
def test_no_argument_asks_for_more_rows_than_keep_their_bits(way, tmp_path):
    "Alone, in a batch and as a stream; the result says that it is plain decoding's text, and the K that was asked for."
    model, prompts = torn(tmp_path), [long_prompt(180), long_prompt(210)]
    pair = Pair(model, ModelDrafter(model, V))
    settings = dict(K=20, max_new_tokens=64, ignore_eos=True) | WAYS[way]
    plain = [pair.generate(p, method="plain", max_new_tokens=64, ignore_eos=True).generated_ids for p in prompts]
    *_, streamed = pair.stream(prompts[0], **settings)
    results = [*pair.generate(prompts, **settings), pair.generate(prompts[1], **settings), streamed.result]
    assert [r.generated_ids for r in results] == [*plain, plain[1], plain[0]]
    assert all(r.batch_invariant and r.settings["K"] in (20, "adaptive", "AdaptiveLookahead") for r in results)
    if way != "adaptive": assert max(len(round.drafted) for r in results for round in r.rounds) == FEW - 1


@batch_invariant
def test_a_result_says_where_a_near_tie_may_fall_otherwise(tmp_path):
    "A tree, the device's loop, a model of transformers, and fewer bits promise no bits, at any K."
    model, prompt = torn(tmp_path), long_prompt(20)
    head = random_head(model)
    def told(target, drafter, **own):
        return Pair(target, drafter).generate(prompt, max_new_tokens=8, **own).batch_invariant
    assert told(model, HeadDrafter(head, model)) and told(model, NGramDrafter()) and told(model, None, method="plain")
    assert not told(model, TreeDrafter(head, model), K=4) and not told(model, NGramDrafter(), loop="device")
    assert not told(TransformersLM(random_model(FAMILIES["tinyllama"])), NGramDrafter())
    assert not told(stored(random_model(FAMILIES["tinyllama"]), tmp_path, torch.bfloat16), NGramDrafter())
    several = Pair(model, TreeDrafter(head, model)).generate([prompt, prompt], max_new_tokens=8, K=20)
    assert [r.batch_invariant for r in several] == [False, False]


def test_a_thread_lets_its_workers_go():
    "What it calculates afterwards is shared out again."
    kept = workers_kept(lambda: None)
    if not kept: pytest.skip("no libgomp here, or it has one core: no thread keeps workers")
    assert workers_kept(release_workers) == 0
    def again():
        release_workers()
        torch.ones(2 * 10**6).add(1)
    assert workers_kept(again) == kept
