"""Weights as their GGUF file has them: whole numbers that add up exactly, whatever the processor, and a row that knows
nothing of the rows beside it."""
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize

from families import CPU, FAMILIES, LOOKALIKES, random_model, stored
from helpers import examples, ids_of
from helpers_hub import write_gguf
from specdec.drafters.base import NoDrafter
from specdec.drafters.lookup import NGramDrafter
from specdec.drafters.model import ModelDrafter, plain_weight, quantised
from specdec.errors import InputError, ModelError
from specdec.loop import speculate
from specdec.models import devices, kernel
from specdec.models.devices import FILE, STORED, pick_dtype
from specdec.models.files import sha256
from specdec.models.hub import prompts
from specdec.models.kernel import KINDS, FileLinear, kernel_missing, packed_tiles
from specdec.models.loading import load, load_model, memory_needed
from specdec.pair import Pair, load_pair
from specdec.sampling import SamplingParams, SeededRandom
from specdec.verify import sample_and_match

native = pytest.mark.skipif(bool(kernel_missing()), reason=f"no kernel here: {kernel_missing()}")
SMALL = [kind for kind, (weights, _) in KINDS.items() if weights == 32]


def random_blocks(kind, outputs, inputs, seed=0):
    "Blocks in which every bit counts: random bytes, but for steps, which are numbers of a usual size."
    generator = np.random.default_rng(seed)
    weights, nbytes = KINDS[kind]
    blocks = generator.integers(0, 256, (outputs, inputs // weights, nbytes), dtype=np.uint8)
    places = {"Q6_K": [208], "Q4_0": [0], "Q5_0": [0], "Q8_0": [0]}.get(kind, [0, 2])
    for place in places:
        steps = generator.normal(0, .01, blocks.shape[:2]).astype(np.float16)
        blocks[..., place:place + 2] = steps.view(np.uint8).reshape(*blocks.shape[:2], 2)
    return torch.from_numpy(blocks.reshape(outputs, -1))


def numbers(blocks, kind):
    return torch.from_numpy(dequantize(blocks.numpy(), GGMLQuantizationType[kind])).double()


def eight_bits(x):
    "What the kernel makes of activations: 255 levels for each row and 32 columns."
    blocks = x.unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    levels = (blocks * (127 / largest.clamp_min(1e-30))).round()
    return levels.double().mul((largest / 127).double()).flatten(-2)


@native
@pytest.mark.parametrize("shape", [(64, 512), (41, 256), (1, 1536), (200, 8960)])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_file(kind, shape):
    "Held to float64, each output: what is left is the rounding of a sum in float32."
    torch.manual_seed(0)
    blocks, bias = random_blocks(kind, *shape), torch.randn(shape[0])
    x = torch.randn(3, 7, shape[1]) * torch.logspace(-3, 3, 21).view(3, 7, 1)
    x[0, 3, 64:96] = 0
    layer, weight = FileLinear([packed_tiles(blocks, kind)], bias), numbers(blocks, kind)
    exact, size = eight_bits(x) @ weight.T, x.double().abs() @ weight.abs().T
    assert ((layer(x).double() - exact - bias.double()).abs() <= 3e-6 * size + 1e-6 * bias.abs()).all()
    assert (layer(x) - bias - x.double() @ weight.T).norm() <= .01 * size.norm()
    assert (layer.plain().double() - weight).abs().max() <= 1e-6 * weight.abs().max()
    assert torch.equal(plain_weight(layer), layer.plain())


@native
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_others(kind, threads):
    torch.manual_seed(0)
    layer, x = FileLinear([packed_tiles(random_blocks(kind, 200, 768), kind)]), torch.randn(40, 768)
    x[3] *= 1e3
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        alone = torch.cat([layer(row[None]) for row in x])
        assert torch.equal(layer(x[0]), alone[0]) and torch.equal(layer(x.view(2, 20, -1)), alone.view(2, 20, -1))
        for n in (*range(1, 18), 23, 40):
            assert torch.equal(layer(x[:n]), alone[:n]) and torch.equal(layer(x[-n:]), alone[-n:])
    finally: torch.set_num_threads(before)


@native
def test_the_largest_levels_do_not_overflow():
    "Sums of sixteen bits hold what is added up in them, where a processor has no better: every level at its largest."
    for kind, level in {"Q4_0": 15 - 8, "Q4_1": 15, "Q5_0": 31 - 16, "Q5_1": 31, "Q8_0": -128, "Q6_K": 31}.items():
        weights, nbytes = KINDS[kind]
        block = np.full(nbytes, 128 if kind == "Q8_0" else 255, np.uint8)
        one = np.float16(1).view(np.uint16).astype("<u2").tobytes()
        for place in [208] if kind == "Q6_K" else [0]: block[place:place + 2] = list(one)
        if kind in ("Q4_1", "Q5_1"): block[2:4] = 0
        if kind == "Q6_K": block[192:208] = 127
        blocks = torch.from_numpy(np.tile(block, (16, 1)))
        x = torch.cat((torch.full((1, weights), 127.), torch.full((1, weights), -127.)))
        whole = weights * 127 * level * (127 if kind == "Q6_K" else 1)
        assert FileLinear([packed_tiles(blocks, kind)])(x).tolist() == [[whole] * 16, [-whole] * 16], kind


@native
def test_several_matrices_are_one_layer():
    "Of different formats, and of rows that fill no tile."
    torch.manual_seed(0)
    some = {"Q4_K": 33, "Q6_K": 16, "Q5_K": 7, "Q8_0": 100}
    blocks = {kind: random_blocks(kind, rows, 512) for kind, rows in some.items()}
    bias, x = torch.randn(sum(some.values())), torch.randn(9, 512)
    layer = FileLinear([packed_tiles(blocks[kind], kind) for kind in some], bias)
    each = torch.cat([FileLinear([packed_tiles(blocks[kind], kind)])(x) for kind in some], -1)
    assert layer.outputs == 156 and torch.equal(layer(x), each + bias)
    assert layer(x.bfloat16()).dtype == torch.bfloat16 and layer(torch.empty(0, 512)).shape == (0, 156)


@native
def test_norm_gate_and_residual_are_taken_in():
    "Held to PyTorch's own in float64; a row is the same alone."
    torch.manual_seed(0)
    blocks = random_blocks("Q8_0", 48, 96)
    layer, weight = FileLinear([packed_tiles(blocks, "Q8_0")], torch.randn(48)), numbers(blocks, "Q8_0")
    x, norm, rest = torch.randn(2, 9, 96) * 3, torch.rand(96) + .5, torch.randn(2, 9, 48)
    wanted = torch.nn.functional.rms_norm(x.double(), (96,), norm.double(), 1e-5)
    wide = torch.randn(2, 9, 192) * 6
    wide[0, 0, :96] = torch.linspace(-200, 200, 96)
    gate, up = wide.double().chunk(2, -1)
    for found, inside in ((lambda rows: layer(x[:, rows], norm, 1e-5, rest=rest[:, rows]), wanted),
                          (lambda rows: layer(wide[:, rows], gated=True, rest=rest[:, rows]),
                           torch.nn.functional.silu(gate) * up)):
        whole = found(slice(None))
        exact = inside @ weight.T + layer.bias.double() + rest.double()
        assert (whole - exact).norm() <= .01 * exact.norm()
        # rounded from the same numbers, but for a level here and there that lay between two
        assert (whole - (eight_bits(inside.float()) @ weight.T + layer.bias + rest)).norm() <= 1e-3 * exact.norm()
        assert all(torch.equal(found(slice(n, n + 1)), whole[:, n:n + 1]) for n in range(9))


@native
@pytest.mark.parametrize("heads, kv_heads, size", [(9, 3, 64), (12, 2, 128), (4, 4, 16), (10, 1, 80)])
def test_attention_is_that_of_the_places_seen(heads, kv_heads, size):
    """As float64 has it; and, to the bit, what the token gets alone, by any number of threads, and where the places
    that it doesn't see aren't there: so a tree's branch gets what a row gets."""
    generator = torch.Generator().manual_seed(size)
    q = torch.randn(1, heads, 7, size, generator=generator)
    k, v = torch.randn(2, 1, kv_heads, 70, size, generator=generator)
    seen = torch.rand(7, 60, generator=generator) < .4
    seen[:, 0] = True
    mask = torch.zeros(7, 1, 1, 60).masked_fill_(~seen[:, None, None], -torch.inf)
    found = kernel.kernel_attention(q, k, v, mask)
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k[:, :, :60].double(), v[:, :, :60].double(), mask.double()[:, 0, 0], enable_gqa=True)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=3e-6)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(kernel.kernel_attention(q, k, v, mask), found)
    finally: torch.set_num_threads(threads)
    k[:, :, 60:], v[:, :, 60:] = torch.nan, torch.nan  # nothing past the mask is read
    for i, row in enumerate(seen):
        some = (t[:, :, :60][:, :, row] for t in (k, v))
        alone = kernel.kernel_attention(q[:, :, i:i + 1], *some, torch.zeros(1, 1, 1, int(row.sum())))
        assert torch.equal(alone, found[:, :, i:i + 1])
    texts = kernel.kernel_attention(q.transpose(0, 2), k.expand(7, -1, -1, -1), v.expand(7, -1, -1, -1), mask)
    assert torch.equal(texts.transpose(0, 2), found)  # a token each of seven texts


@native
def test_attention_checks_its_arguments():
    q, k = torch.zeros(1, 4, 2, 16), torch.zeros(1, 2, 8, 16)
    mask = torch.zeros(2, 1, 1, 8)
    assert kernel.kernel_attention(q, k, k, mask).shape == q.shape
    for wrong in [(q.double(), k, k, mask), (q, k.bfloat16(), k, mask), (q, k[..., :8], k[..., :8], mask),
                  (q, k, k[:, :, :4], mask), (q, k[:, :, :4], k[:, :, :4], mask), (q, k, k, mask[:1]),
                  (q[:, :3], k, k, mask), (q.expand(2, -1, -1, -1), k, k, mask),
                  (q[..., :8], k[..., :8], k[..., :8], mask),
                  (q, k.expand(3, -1, -1, -1), k.expand(3, -1, -1, -1), mask)]:
        with pytest.raises(InputError, match="isn't for this kernel"): kernel.kernel_attention(*wrong)


@native
def test_what_is_no_number_stays_none():
    layer = FileLinear([packed_tiles(random_blocks("Q4_1", 48, 96), "Q4_1")])
    x = torch.randn(3, 96)
    x[1, 40], x[2, 50] = torch.nan, torch.inf
    y = layer(x)
    assert y[0].isfinite().all() and y[1].isnan().all() and not y[2].isfinite().any()
    assert torch.equal(y[:1], layer(x[:1]))
    assert not layer(torch.zeros(2, 96)).any()


@native
def test_arguments_are_checked():
    tiles, narrow = (packed_tiles(random_blocks("Q4_1", *shape), "Q4_1") for shape in ((48, 96), (16, 32)))
    layer = FileLinear([tiles])
    for wrong, message in (
            (lambda: layer(torch.randn(2, 95)), "reads 96 numbers on the CPU, not 95"),
            (lambda: layer(torch.empty(2, 96, device="meta")), "reads 96 numbers on the CPU, not 96 on meta"),
            (lambda: layer(torch.randn(2, 96), gated=True), "reads 192 numbers on the CPU, not 96"),
            (lambda: layer(torch.randn(2, 96), torch.ones(95)), "A norm has 96 weights in float32"),
            (lambda: layer(torch.randn(2, 96), rest=torch.ones(2, 47)), r"added has the shape \[2, 48\]"),
            (lambda: FileLinear([tiles, narrow]), r"have one width, not \[96, 32\]"),
            (lambda: FileLinear([tiles], torch.zeros(47)), r"A bias for 48 outputs is needed, not \[47\]"),
            (lambda: packed_tiles(torch.zeros(4, 19, dtype=torch.uint8), "Q4_1"), "whole blocks of 20 bytes"),
            (lambda: packed_tiles(torch.zeros(4, 20), "Q4_1"), "whole blocks of 20 bytes"),
            (lambda: packed_tiles(torch.zeros(0, 20, dtype=torch.uint8), "Q4_1"), "multiple of 32 weights, not 0 × 32"),
            (lambda: packed_tiles(torch.zeros(4, 20, dtype=torch.uint8), "Q2_K"), "multiplies by .*, not by Q2_K"),
            (lambda: kernel.Tiles("Q4_1", 48, 96, tiles.data[:-1]), "in Q4_1 takes 2,880 bytes on the CPU"),
            (lambda: kernel.tiles_bytes("Q4_K", 16, 96), "multiple of 256 weights, not 16 × 96")):
        with pytest.raises(InputError, match=message): wrong()


# --- models

@pytest.fixture(scope="module")
def model(): return load("smollm2", "cpu", "file")


@native
def test_logits_of_the_default_model_do_not_depend_on_how_many_are_read(model):
    "Nor on what was rejected: where attention goes over to more keys, too."
    ids = torch.randint(model.vocab_size, (1, 532), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(532)
    for start in (183, 500):
        model.forward(ids[:, cache.length:start], cache, last=1)
        alone, states = zip(*(model.forward(ids[:, i:i + 1], cache, layers=(1, 30)) for i in range(start, start + 32)))
        for sizes in ([9, 9, 9, 5], [2, 3, 4, 5, 6, 7, 5]):
            cache.rollback(start)
            together, theirs = zip(*(model.forward(piece, cache, layers=(1, 30))
                                     for piece in ids[:, start:start + 32].split(sizes, 1)))
            assert torch.equal(torch.cat(together, 1), torch.cat(alone, 1)), f"{sizes} at once after {start}"
            assert torch.equal(torch.cat(theirs, 1), torch.cat(states, 1)), f"{sizes} at once after {start}"
        cache.rollback(start)


@native
def test_it_says_what_float32_says(model):
    "The weights are float32's; eight-bit activations cost half a per cent of perplexity, less than eight-bit weights."
    exact, found = load("smollm2", "cpu", "float32"), {}
    for one in (exact, model):
        lost = []
        for prompt in prompts():
            ids = torch.tensor([one.tokenizer(prompt.text)["input_ids"]])
            lost.append(one.forward(ids)[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]))
        found[one.precision] = torch.cat(lost).mean().neg().exp().item()
    assert found["file"] == pytest.approx(found["float32"], rel=.01), found


@native
@pytest.mark.parametrize("name", ["smollm2-head", pytest.param("smollm2-ngram", marks=pytest.mark.slow)])
def test_a_pair_as_its_file_has_it(name):
    "Token for token what plain decoding writes, also in a batch, and at temperature 1 with the same seed."
    pair = load_pair(name, "cpu", "file")
    assert pair.target.file and pair.target.precision == pair.target.kept_as == "file"
    assert pair.target.batch_invariant and pair.target.dtype == torch.float32
    asked = [[{"role": "user", "content": text}] for text in ("How do bees make honey?", "What is 2+2?")]
    for T in (0.0, 1.0):
        how = dict(max_new_tokens=20, ignore_eos=True, temperature=T, same_text=True)
        plain = [pair.generate(text, method="plain", seed=i, **how).generated_ids for i, text in enumerate(asked)]
        for i, (text, ids) in enumerate(zip(asked, plain)):
            result = pair.generate(text, K=3, seed=i, **how)
            assert result.generated_ids == ids and len(ids) == 20 and result.num_drafted and result.same_text_as_plain
        assert [result.generated_ids for result in pair.generate(asked, K=3, seed=0, **how)] == plain


@native
def test_the_same_seed_writes_the_same_text(model):
    "However many tokens the clock lets it draft: a draft that is certain changes no draw."
    pair = Pair(model, NGramDrafter())
    how = dict(temperature=1.0, seed=7, max_new_tokens=24, ignore_eos=True)
    plain = pair.generate("red green blue red green", method="plain", **how)
    for K in (1, 2, 5, "adaptive"):
        result = pair.generate("red green blue red green", K=K, verify=sample_and_match, **how)
        assert result.generated_ids == plain.generated_ids


@native
@pytest.mark.parametrize("kinds", [{"": "Q4_1"}, {"attn_v": "Q6_K", "token_embd": "Q6_K", "": "Q4_K"},
                                   {"attn_q": "F16", "ffn_down": "Q8_0", "": "Q5_0"}],
                         ids=["one format", "three in a layer", "plain numbers among them"])
def test_a_gguf_file(kinds, tmp_path, monkeypatch):
    "Logits within what eight bits lose, the same bits for any number of tokens, and the memory that was told."
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    file = tmp_path / "m.gguf"
    write_gguf(file, kinds, (256, 512), kv_heads=2)
    exact, model = (load(str(file), "cpu", dtype) for dtype in ("float32", "file"))
    ids = torch.randint(model.vocab_size, (1, 30), generator=torch.Generator().manual_seed(0))
    wanted, found = exact.forward(ids), model.forward(ids)
    assert 0 < (found - wanted).norm() <= .03 * wanted.norm()
    cache = model.new_cache(30)
    assert torch.equal(torch.cat([model.forward(some, cache) for some in ids.split(7, 1)], 1), torch.cat([
        model.forward(ids[:, :n], last=1) for n in range(1, 31)], 1))
    needed = memory_needed(str(file), "cpu", "file")
    assert model.memory_footprint_mb == pytest.approx(needed.weights_mb, rel=.01)
    assert load(str(file), "cpu").precision == "file" and memory_needed(str(file), "cpu") == needed  # if nobody says
    monkeypatch.setattr("specdec.models.loading.kernel_missing", lambda: "no compiler")
    assert load(str(file), "cpu").precision in ("float32", "bfloat16")
    light = quantised(model)
    assert light.precision == "int4" and model.skip([0]).precision == "file"
    drafters = ModelDrafter(model.skip([1]), model.vocab_size), ModelDrafter(light, model.vocab_size)
    def said(drafter):
        return ids_of(speculate(model, drafter, [3, 4, 5], SamplingParams(0.0), SeededRandom(0), K=4,
                                max_new_tokens=24))
    assert all(said(drafter) == said(NoDrafter()) for drafter in drafters)


@native
@pytest.mark.parametrize("damage", ["a byte", "cut off", "another's digest", "no digest"])
def test_damaged_tiles_are_written_anew(damage, tmp_path, monkeypatch):
    "What lies beside the model is noticed too; what has not changed is read once."
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    file, later, ids = tmp_path / "m.gguf", time.time_ns() + 3600 * 10**9, torch.arange(9)[None]
    write_gguf(file, {"": "Q4_K"}, (256, 512), kv_heads=2)
    wanted = load(str(file), "cpu", "file").forward(ids)
    monkeypatch.setattr(time, "time_ns", lambda: later)
    read = []
    monkeypatch.setattr("specdec.models.checkpoint.sha256", lambda path: read.append(path) or sha256(path))
    for _ in range(3): assert torch.equal(load(str(file), "cpu", "file").forward(ids), wanted)
    assert len(read) == 1
    tiles, = (tmp_path / "home").rglob(".tiles-????????????")
    if damage == "a byte": tiles.write_bytes(tiles.read_bytes()[:-1] + bytes([1 ^ tiles.read_bytes()[-1]]))
    if damage == "cut off": tiles.write_bytes(tiles.read_bytes()[:-64])
    digest = tiles.with_name(f"{tiles.name}.sha256")
    if damage == "another's digest": digest.write_text("0" * 64)
    if damage == "no digest": digest.unlink()
    assert torch.equal(load(str(file), "cpu", "file").forward(ids), wanted)
    assert digest.read_text() == sha256(tiles)


@native
def test_models_without_such_weights_are_refused(tmp_path):
    stored(random_model(FAMILIES["tinyllama"]), tmp_path / "own")
    for ask in (lambda: load_model(tmp_path / "own", CPU, FILE),
                lambda: memory_needed(tmp_path / "own", "cpu", "file")):
        with pytest.raises(ModelError, match="^dtype=file is for models out of a GGUF file that is quantised"): ask()
    stored(random_model(LOOKALIKES["gelu"]), tmp_path / "other")
    with pytest.raises(ModelError, match="^file is for models that specdec computes itself"):
        load_model(tmp_path / "other", CPU, FILE)


# --- how it is built

def compiled(tmp_path, *flags, compiler=None):
    "The source, compiled with other flags; None where the compiler won't."
    made = tmp_path / "kernel.so"
    whole = [*(compiler or kernel.compilers()[0]), *kernel.FLAGS, *flags, "-o", str(made), str(kernel.source())]
    done = subprocess.run(whole, capture_output=True, text=True)
    return made if not done.returncode else None


# Instructions that this processor may lack, as their makers define them, for a compiler that reads this file first.
LACKING = r"""
#include <immintrin.h>
#include <stdint.h>
typedef int32_t i16 __attribute__((vector_size(64))); typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint16_t h32 __attribute__((vector_size(64))); typedef int8_t b16 __attribute__((vector_size(16)));
typedef uint8_t c16 __attribute__((vector_size(16)));
static inline __m512i products(__m512i s, __m512i w, __m512i x, int lanes) { // four of bytes, without and with a sign
  union { __m512i v; int32_t i[16]; uint8_t u[64]; int8_t b[64]; } to = {s}, a = {w}, c = {x};
  for (int i = 0; i < 4 * lanes; i++) to.i[i / 4] += a.u[i] * c.b[i];
  return to.v;
}
#ifdef WIDE // AVX-512
static inline __m512 rounded_once(__m512 a, __m512 b, __m512 c) {
  for (int i = 0; i < 16; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
static inline __m512 of_halves(__m256i a) {
  union { __m512 v; __m256 half[2]; } to;
  to.half[0] = _mm256_cvtph_ps(_mm256_extracti128_si256(a, 0));
  to.half[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1));
  return to.v;
}
#define __AVX512VNNI__ 1
#define __AVX512BW__ 1
#define _mm512_loadu_si512(p) (*(const __m512i_u *)(p))
#define _mm512_loadu_ps(p) (*(const __m512_u *)(p))
#define _mm512_storeu_ps(p, a) (*(__m512_u *)(p) = (a))
#define _mm512_setzero_si512() ((__m512i){0})
#define _mm512_set1_epi32(n) ((__m512i)((i16){0} + (int32_t)(n)))
#define _mm512_set1_epi8(n) _mm512_set1_epi32((uint8_t)(n) * 0x01010101u)
#define _mm512_set1_ps(x) ((__m512){0} + (float)(x))
#define _mm512_and_si512(a, b) ((a) & (b))
#define _mm512_or_si512(a, b) ((a) | (b))
#define _mm512_xor_si512(a, b) ((a) ^ (b))
#define _mm512_slli_epi16(a, n) ((__m512i)((h32)(a) << (n)))
#define _mm512_srli_epi16(a, n) ((__m512i)((h32)(a) >> (n)))
#define _mm512_slli_epi32(a, n) ((__m512i)((u16)(a) << (n)))
#define _mm512_add_epi32(a, b) ((__m512i)((u16)(a) + (u16)(b)))
#define _mm512_sub_epi32(a, b) ((__m512i)((u16)(a) - (u16)(b)))
#define _mm512_mullo_epi32(a, b) ((__m512i)((u16)(a) * (u16)(b)))
#define _mm512_cvtepu8_epi32(a) ((__m512i)__builtin_convertvector((c16)(a), i16))
#define _mm512_cvtepi8_epi32(a) ((__m512i)__builtin_convertvector((b16)(a), i16))
#define _mm512_cvtepi32_ps(a) __builtin_convertvector((i16)(a), __m512)
#define _mm512_cvtph_ps(a) of_halves(a)
#define _mm512_mul_ps(a, b) ((a) * (b))
#define _mm512_fmadd_ps(a, b, c) rounded_once(a, b, c)
#define _mm512_dpbusd_epi32(s, w, x) products(s, w, x, 16)
#else // AVX-VNNI
static inline __m256i products_of_half(__m256i s, __m256i w, __m256i x) {
  union { __m512i v; __m256i half[2]; } to = {.half = {s}}, a = {.half = {w}}, c = {.half = {x}};
  to.v = products(to.v, a.v, c.v, 8);
  return to.half[0];
}
#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32(s, w, x) products_of_half(s, w, x)
#endif
"""

@native
@pytest.mark.parametrize("flags, name", [
    ((), ""), (("-mfma",), ""), ((*kernel.AVX2, "-DWIDE", "-include", "LACKING"), "AVX-512 VNNI"),
    ((*kernel.AVX2, "-include", "LACKING"), "AVX-VNNI")],
    ids=["plain C", "plain C, FMA", "AVX-512 VNNI, in C", "AVX-VNNI, in C"])
def test_all_branches_agree(flags, name, tmp_path, monkeypatch):
    "Where products and sums are rounded once (FMA), bit for bit; else to the rounding of a sum."
    needed = {flag for flag in flags if flag.startswith("-m")}
    if not needed <= set(kernel.instructions()): pytest.skip(f"this processor has no {needed}")
    (tmp_path / "lacking.h").write_text(LACKING)
    flags = [str(tmp_path / "lacking.h") if flag == "LACKING" else flag for flag in flags]
    torch.manual_seed(0)
    layers, x = [FileLinear([packed_tiles(random_blocks(kind, 40, 768), kind)]) for kind in KINDS], torch.randn(6, 768)
    usual = [layer(x) for layer in layers]
    made = compiled(tmp_path, *flags)
    monkeypatch.setattr(kernel, "built", lambda: made)
    kernel.kernel.cache_clear()
    try:
        assert name in kernel.kernel_name()
        other = [FileLinear([packed_tiles(random_blocks(kind, 40, 768), kind)])(x) for kind in KINDS]
    finally:
        monkeypatch.undo()
        kernel.kernel.cache_clear()
    for kind, ours, theirs in zip(KINDS, usual, other):
        if flags: assert torch.equal(ours, theirs), kind
        else: assert (ours - theirs).norm() <= 1e-6 * ours.norm(), kind


@native
@pytest.mark.parametrize("flags, name", [
    ((*kernel.AVX2, *kernel.VNNI), "AVX-512 VNNI"), ((*kernel.AVX2, "-mavxvnni"), "AVX-VNNI"),
    (("-target", "aarch64-linux-gnu", "-mcpu=generic+dotprod"), "NEON with dot product"),
    (("-target", "aarch64-macos"), "NEON with dot product")])
def test_other_processors_have_a_branch_that_compiles(flags, name, tmp_path):
    "Not run here: what is compiled names itself."
    compiler = [sys.executable, "-m", "ziglang", "cc"]
    if subprocess.run([*compiler, "--version"], capture_output=True).returncode: pytest.skip("no ziglang here")
    made = compiled(tmp_path, *flags, compiler=compiler)
    assert made and name.encode() in made.read_bytes()


ALONE = r"""
#include <stdio.h>
#include <stdlib.h>
int main(void) {
  int64_t ask[5]; // format, inputs, outputs, bytes of the matrix, rows
  while (fread(ask, 8, 5, stdin) == 5) {
    byte *blocks = malloc(ask[3]), *tiles = malloc(packed_bytes(ask[0], ask[1], ask[2]));
    float *x = malloc(4 * ask[4] * ask[1]), *y = malloc(4 * ask[4] * ask[2]);
    if (fread(blocks, 1, ask[3], stdin) != ask[3] || !fread(x, 4 * ask[1], ask[4], stdin)) return 1;
    pack(ask[0], blocks, ask[1], ask[2], tiles);
    Part part = {tiles, ask[0], ask[2]};
    linear(&part, 1, x, ask[4], ask[1], 0, 0, 0, 0, 0, y, malloc(scratch_bytes(ask[4], ask[1])), 0, 1);
    fwrite(y, 4 * ask[2], ask[4], stdout);
  }
}
"""

@native
def test_an_arm_processor_multiplies_to_the_same_bits(tmp_path):
    "NEON with its product of bytes, run by an emulator: equal to this processor's branch, for one row and for six."
    emulator, zig = shutil.which("qemu-aarch64"), [sys.executable, "-m", "ziglang", "cc"]
    if not kernel.instructions(): pytest.skip("what is compared with rounds a product and a sum twice")
    if not emulator: pytest.skip("no qemu-aarch64 here (Debian's qemu-user has it)")
    if subprocess.run([*zig, "--version"], capture_output=True).returncode: pytest.skip("no ziglang here")
    flags = [flag for flag in kernel.FLAGS if flag not in ("-shared", "-fPIC")]
    (tmp_path / "alone.c").write_text(kernel.source().read_text() + ALONE)
    target = "-target", "aarch64-linux-musl", "-mcpu=generic+dotprod", "-static"
    subprocess.run([*zig, *flags, *target, "-o", tmp_path / "alone", tmp_path / "alone.c"], check=True)
    assert b"NEON with dot product" in (tmp_path / "alone").read_bytes()
    torch.manual_seed(0)
    matrices, x = [random_blocks(kind, 40, 768) for kind in KINDS], torch.randn(6, 768)
    asks = [np.array([i, 768, 40, blocks.numel(), n]).tobytes() + blocks.numpy().tobytes() + x[:n].numpy().tobytes()
            for i, blocks in enumerate(matrices) for n in (1, 6)]
    said = subprocess.run([emulator, tmp_path / "alone"], input=b"".join(asks), capture_output=True, check=True).stdout
    there = torch.frombuffer(bytearray(said), dtype=torch.float32).view(len(KINDS), 7, 40)
    for kind, blocks, theirs in zip(KINDS, matrices, there):
        ours = FileLinear([packed_tiles(blocks, kind)])(x)
        assert torch.equal(theirs[0], theirs[1]), kind
        assert torch.equal(ours, theirs[1:]), kind


def test_it_is_built_once(tmp_path, monkeypatch):
    "And kept by source and flags: this compiler writes down what it was asked for."
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    write = "import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w').write(' '.join(sys.argv))"
    monkeypatch.setattr(kernel, "compilers", lambda: [[sys.executable, "-c", write]])
    made = kernel.built()
    assert made.parent == tmp_path / "kernel" and [*made.parent.glob("*.so")] == [made]
    said = made.read_text()
    assert str(kernel.source()) in said and all(flag in said for flag in (*kernel.FLAGS, *kernel.instructions()))
    state = made.stat()
    assert kernel.built() == made and made.stat().st_mtime_ns == state.st_mtime_ns
    monkeypatch.setattr(kernel, "FLAGS", (*kernel.FLAGS, "-DOTHER"))
    assert kernel.built() != made


@pytest.mark.parametrize("found, why", [
    ([], "no C compiler here: `pip install ziglang`"),
    ([[sys.executable, "-c", "import sys; sys.exit('it is broken')"]], "it is broken")])
def test_without_a_compiler_it_is_refused_and_all_else_works(found, why, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    monkeypatch.setattr(kernel, "compilers", lambda: found)
    for cached in (kernel.kernel, kernel_missing): cached.cache_clear()
    try:
        with pytest.raises(ModelError, match=f"^dtype=file can't be had: .*{why}"): pick_dtype("file", CPU, STORED)
        assert pick_dtype("auto", CPU, STORED) in devices.DTYPES.values()
    finally:
        monkeypatch.undo()
        for cached in (kernel.kernel, kernel_missing): cached.cache_clear()


def test_other_devices_are_refused():
    with pytest.raises(InputError, match="is for the CPU, not for cuda"):
        pick_dtype("file", torch.device("cuda"), STORED)


SANITIZED = """
import ctypes, random, sys
library = ctypes.CDLL(sys.argv[1])
number, pointer = ctypes.c_int64, ctypes.c_void_p
for name in ("packed_bytes", "scratch_bytes"): getattr(library, name).restype = number
library.packed_bytes.argtypes, library.scratch_bytes.argtypes = [ctypes.c_int, number, number], [number, number]
library.pack.argtypes = [ctypes.c_int, pointer, number, number, pointer]
library.linear.argtypes = [pointer, number, pointer, number, number, pointer, ctypes.c_float, ctypes.c_int, pointer,
                           pointer, pointer, pointer, pointer, ctypes.c_int]
library.attention.argtypes = [*[pointer] * 7, ctypes.c_float, pointer, ctypes.c_int]
kinds = [(32, 18), (32, 20), (32, 22), (32, 24), (32, 34), (256, 144), (256, 176), (256, 210)]
random.seed(0)
def room(size, filled=False): # of its own, so that what lies outside is noticed
    found = libc.malloc(max(size, 1))
    ctypes.memmove(found, random.randbytes(size) if filled else bytes(size), size)
    return found
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = pointer, [ctypes.c_size_t], [pointer]
for _ in range(int(sys.argv[2])):
    n, inputs, held, parts, out = random.randint(0, 19), 256 * random.randint(1, 3), [], [], 0
    for kind in random.sample(range(8), random.randint(1, 3)):
        weights, nbytes = kinds[kind]
        rows = random.randint(1, 40)
        size = library.packed_bytes(kind, inputs, rows)
        blocks, tiles = room(rows * inputs // weights * nbytes, True), room(size)
        library.pack(kind, blocks, inputs, rows, tiles)
        held += [blocks, tiles]
        parts += [tiles, kind, rows]
        out += rows
    gated = random.randint(0, 1)
    sizes = n * inputs * (1 + gated), n * out, out, n * out, inputs
    x, y, bias, rest, norm = (room(4 * size, True) for size in sizes)
    scratch = room(library.scratch_bytes(n, inputs))
    library.linear((number * len(parts))(*parts), len(parts) // 3, x, n, inputs, None if gated else norm, .1, gated,
                   bias, rest, y, scratch, None, 1)
    for one in (x, y, bias, rest, norm, scratch, *held): libc.free(one)
    kv_heads, each, head, places = (random.randint(1, most) for most in (3, 9, 5, 40))
    heads, head = kv_heads * each, 16 * head
    asks, text = n * heads * head, kv_heads * places * head
    steps = heads * head, head, 0, places * head, 0, places * head, places
    sizes = (number * 12)(n, heads, kv_heads, head, places, *steps)
    sizes_of = asks, text, text, n * places, asks, n * (heads + kv_heads) * places
    buffers = [room(4 * size, i < 3) for i, size in enumerate(sizes_of)]
    mask = (ctypes.c_float * (n * places)).from_address(buffers[3])
    for i in range(n * places): mask[i] = -random.randint(0, i % places)  # of each token, a place at least
    library.attention(*buffers, sizes, .1, None, 1)
    for one in buffers: libc.free(one)
print("whole")
"""

@native
@pytest.mark.parametrize("flags", [(), kernel.AVX2], ids=["plain C", "AVX2"])
def test_nothing_is_read_or_written_outside(flags, tmp_path):
    "Any bytes, any shape: sanitizers of the compiler, which end the process at the first access that is wrong."
    compiler = shutil.which("gcc") or shutil.which("clang")
    if not compiler: pytest.skip("no gcc or clang here, whose sanitizers this takes")
    if flags and not set(flags) <= set(kernel.instructions()): pytest.skip(f"this processor has no {flags}")
    made = compiled(tmp_path, *flags, "-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
                    compiler=[compiler])
    asan = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not made or not os.path.isabs(asan): pytest.skip("this compiler has no sanitizers")
    env = os.environ | {"LD_PRELOAD": asan, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([sys.executable, "-c", SANITIZED, str(made), str(examples(120))], env=env,
                          capture_output=True, text=True)
    assert done.stdout == "whole\n", done.stderr[-3000:]
