"A model as the drafter: behind the target's ids, with layers left out, in four bits."
from types import SimpleNamespace

import gguf
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from helpers_drafters import CPU, packable_llama
from specdec.drafters.base import NoDrafter
from specdec.drafters.model import (
    TOKENS_FILE,
    ModelDrafter,
    NarrowLM,
    narrow_ids,
    quantised,
)
from specdec.errors import InputError, ModelError
from specdec.loop import speculate
from specdec.models.linear import PIECE, Int4Linear, Linear, four_bits, pack_levels
from specdec.models.loading import load_model
from specdec.sampling import SamplingParams, SeededRandom


def test_narrow_ids_say_where_each_token_stands():
    assert narrow_ids(torch.tensor([1, 3]), 5).tolist() == [2, 0, 2, 1, 2]


def test_what_it_says_is_what_the_model_says_elsewhere_nothing():
    "Ids are translated on the way in, logits on the way out; all unknown ids are one."
    model, tokens = packable_llama(), torch.arange(5, 100)  # 95 tokens, and one place for all others
    narrow = NarrowLM(model, tokens, 200)
    logits = narrow.forward(torch.tensor([[5, 99, 150, 0]]), narrow.new_cache(8))
    expected = model.forward(torch.tensor([[0, 94, 95, 95]]), model.new_cache(8))
    assert logits.shape == (1, 4, 200) and torch.equal(logits[..., tokens], expected[..., :95])
    assert torch.isinf(logits).sum(-1).tolist() == [[105] * 4]


def test_what_cannot_be_narrow():
    model = packable_llama()
    with pytest.raises(InputError, match="stands for the others"): NarrowLM(model, torch.arange(96), 200)
    narrow = NarrowLM(model, torch.arange(95), 200)
    with pytest.raises(InputError, match="no hidden states"):
        narrow.forward(torch.tensor([[1]]), narrow.new_cache(2), layers=(1,))


@pytest.mark.parametrize("damage", ["nonsense", "no size", "no tokens"])
def test_a_damaged_list_of_tokens_is_told(tmp_path, damage):
    sizes = dict(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )
    LlamaForCausalLM(LlamaConfig(vocab_size=9, **sizes)).save_pretrained(tmp_path)
    assert load_model(tmp_path, CPU, torch.float32, use="draft").vocab_size == 9  # without a list: an ordinary model
    file, tokens = tmp_path / TOKENS_FILE, torch.arange(8, dtype=torch.int32)
    save_file({"tokens": tokens}, file, {"vocab_size": "20"})
    assert load_model(tmp_path, CPU, torch.float32, use="draft").vocab_size == 20
    if damage == "nonsense":file.write_bytes(b"nonsense")
    elif damage == "no size":save_file({"tokens": tokens}, file)
    else: save_file({"others": tokens}, file, {"vocab_size": "20"})
    with pytest.raises(ModelError, match="can't be read"): load_model(tmp_path, CPU, torch.float32, use="draft")


@pytest.fixture(scope="module")
def tiny(): return packable_llama()


def sixteen_levels(weight):
    "The nearest of 16 evenly spaced levels between the smallest and the largest of 32 weights."
    parts = weight.double().unflatten(-1, (-1, 32))
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    step = (high - low) / 15
    return (low + ((parts - low) / step).round() * step).flatten(-2)


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 0.01), (torch.bfloat16, 0.05)], ids=["float32", "bfloat16"])
def test_four_bits_are_sixteen_levels_in_each_group(dtype, limit):
    torch.manual_seed(0)
    weight, x, bias = torch.randn(48, 128).to(dtype), torch.randn(2, 3, 128).to(dtype), torch.randn(48).to(dtype)
    y = Int4Linear(weight, bias)(x)
    wanted = x.double() @ sixteen_levels(weight).T + bias.double()
    assert y.dtype == dtype and y.shape == (2, 3, 48)
    assert (y.double() - wanted).norm() / wanted.norm() < limit
    exact = x.double() @ weight.double().T + bias.double()
    assert (y.double() - exact).norm() / exact.norm() > 0.06  # it did quantise


def product_bound(x, weight):
    """How far a product may be from the exact one when its numbers are exact in bfloat16: entry by entry.

    Input: x, the weights, and each group's scale and zero have few enough bits, so that turning them into bfloat16
    rounds nothing. Accumulation: n products are added up in float32 (unit roundoff u = 2^-24), which errs by at most
    γ Σ |w x| with γ = n u / (1 - n u), in any order (Higham 2002, section 3.1). Output: the sum, itself off by that
    much, is rounded to nearest in bfloat16, which has 8 bits of significand: a relative 2^-8 at most."""
    n, u, v = weight.shape[1], 2.0 ** -24, 2.0 ** -8
    accumulated = n * u / (1 - n * u) * (x.abs() @ weight.abs().T)
    return v * (x @ weight.T).abs() + (1 + v) * accumulated


def test_weights_on_sixteen_levels_are_kept():
    torch.manual_seed(0)
    levels = torch.randint(0, 16, (32, 2, 32)).double()  # two groups in each row
    levels[..., 0], levels[..., 1] = 0, 15  # both ends occur in each group, so the levels are the weight's own
    scale = 2.0 ** -torch.randint(2, 5, (32, 2, 1))  # another for each group; levels -4, … 11 times that
    weight = ((levels - 4) * scale).flatten(1)
    x = torch.randn(5, 64).bfloat16().double()
    y = Int4Linear(weight.float())(x.float())
    error, bound = (y.double() - x @ weight.T).abs(), product_bound(x, weight)
    assert (error <= bound).all(), f"{(error / bound).max():.2f} times the bound"
    assert (error / bound).max() > 0.5  # the bound is not a loose one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_levels_are_those_of_the_library(dtype):
    "Its own numbers for Q4_1, but for the rounding of each group's step and zero to bfloat16."
    torch.manual_seed(0)
    weight = (torch.randn(48, 96) * torch.rand(48, 1)).to(dtype).requires_grad_()
    kind = gguf.GGMLQuantizationType.Q4_1
    theirs = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.detach().float().numpy(), kind), kind))
    levels, scales = four_bits(weight)
    assert levels.dtype == torch.int8 and scales.shape == (3, 48, 2) and scales.dtype == torch.bfloat16
    step, zero = scales.float().repeat_interleave(32, 0).unbind(-1)
    largest = theirs.unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1)
    # up to eight steps and the zero are each rounded by 2^-9 of themselves; together at most 2.5 of the largest
    assert (((levels - 8) * step.T + zero.T - theirs).abs() <= 2.5 * 2**-9 * largest).all()


def test_a_quantised_model_is_another_draft_and_leaves_the_target_alone(tiny):
    ids = torch.tensor([[1, 2, 3, 4]])
    before = tiny.forward(ids, tiny.new_cache(8))
    light = quantised(tiny)
    after = light.forward(ids, light.new_cache(8))
    assert torch.equal(before, tiny.forward(ids, tiny.new_cache(8)))
    # random weights: far from any sixteen levels
    assert not torch.allclose(before, after) and torch.nn.functional.cosine_similarity(before, after, -1).mean() > 0.5
    for before, after in zip(tiny.layers, light.layers, strict=True):
        for part, name in [("attention", "qkv"), ("attention", "out"), ("mlp", "gate_up"), ("mlp", "down")]:
            assert isinstance(getattr(getattr(after, part), name), Int4Linear)
            assert isinstance(getattr(getattr(before, part), name), Linear)
    assert light.head is tiny.head and light.int4 and not tiny.int4
    said = [
        t
        for r in speculate(tiny, ModelDrafter(light, 96), [1, 2, 3], SamplingParams(), SeededRandom(0), 3, 20)
        for t in r.emitted
    ]
    plain = [t for r in speculate(tiny, NoDrafter(), [1, 2, 3], SamplingParams(), SeededRandom(0), 3, 20)
             for t in r.emitted]
    assert said == plain


def test_a_row_does_not_depend_on_the_others_and_a_large_weight_is_packed_in_pieces():
    torch.manual_seed(0)
    weight, x = torch.randn(PIECE + 48, 64), torch.randn(16, 64)
    layer = Int4Linear(weight)
    y, plain = layer(x), layer.plain()
    assert all(torch.equal(layer(x[i:i + n]), y[i:i + n]) for i in range(16) for n in (1, 2, 5))
    assert layer(x.view(2, 8, 64)).shape == (2, 8, PIECE + 48)
    levels, scales = four_bits(weight)
    step, zero = scales.float().repeat_interleave(32, 0).unbind(-1)
    assert torch.equal(((levels - 8) * step.T + zero.T).bfloat16(), plain)
    assert 5 * weight.numel() == 8 * (layer.weight.nbytes + layer.scales.nbytes)


@pytest.mark.parametrize("columns, tiles", [(96, 2), (576, 4), (4096, 8)])
def test_what_a_gpu_is_given_has_the_shape_it_asks_for(columns, tiles):
    "By PyTorch's own description of the packing; no number is computed here."
    packed = pack_levels(torch.zeros(64, columns, dtype=torch.int32, device="meta"))
    assert packed.shape == (8, columns // (16 * tiles), 32, tiles // 2)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("columns", [96, 576, 4096])
def test_a_gpu_multiplies_by_the_same_weights(columns):
    torch.manual_seed(0)
    weight, x = torch.randn(64, columns), torch.randn(5, columns)
    here, there = Int4Linear(weight), Int4Linear(weight.cuda())
    assert torch.equal(there.plain().cpu(), here.plain())
    y = here(x)
    assert (there(x.cuda()).cpu() - y).norm() / y.norm() < .01


def test_equal_weights_and_zeros_are_kept():
    weight = torch.tensor([0., 1., -3.]).repeat_interleave(32).repeat(16, 1)
    assert torch.equal(Int4Linear(weight).plain().float(), weight)


def test_what_cannot_be_quantised():
    with pytest.raises(InputError, match="Only a Llama"): quantised(SimpleNamespace())
    for shape in [(16, 48), (24, 64)]:
        with pytest.raises(InputError, match="can't be packed"): Int4Linear(torch.ones(shape))
