"""Eight bits by eight: exact sums of whole numbers, a step for each row, and a row that knows nothing of the rows
beside it."""
import time

import pytest
import torch

from families import CPU, FAMILIES, LOOKALIKES, V, random_model, stored, tokens
from helpers import ids_of
from specdec.drafters.base import NoDrafter
from specdec.drafters.model import ModelDrafter, plain_weight, quantised
from specdec.errors import InputError, ModelError
from specdec.loop import speculate
from specdec.lossless.black_box import check_decoder
from specdec.models import devices
from specdec.models.devices import INT8, STORED, has_int8, pick_dtype
from specdec.models.hub import fetch
from specdec.models.int8 import BLOCK, Int8Linear, hadamard, turned
from specdec.models.loading import load, load_model, memory_needed
from specdec.pair import load_pair
from specdec.sampling import SamplingParams, SeededRandom

eight_bits = pytest.mark.skipif(not has_int8(CPU), reason="no exact product of eight bits on this processor")


@eight_bits
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (48, 33), (100, 8), (7, 64), (32, 8960)])
def test_a_row_does_not_depend_on_the_others(shape, threads):
    "Alone or among others, loud ones too; and it is the product of its own numbers, in float64."
    torch.manual_seed(0)
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(2, 40, shape[1])
    x[0, 3] *= 1e3
    x[:, :, 0] *= 50
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for b in (None, bias):
            layer = Int8Linear(weight, b)
            alone = torch.cat([layer(row[None, None]) for row in x.flatten(0, 1)]).view(2, 40, -1)
            assert torch.equal(layer(x[0, 0]), alone[0, 0])
            for n in (*range(1, 10), 16, 40):
                assert torch.equal(layer(x[:, :n]), alone[:, :n]) and torch.equal(layer(x[1:, -n:]), alone[1:, -n:])
    finally: torch.set_num_threads(before)
    block = layer.block
    rows = turned(x, block)
    steps = rows.abs().amax(-1, keepdim=True) / 127
    whole = (rows / steps).round().double()
    own = turned(layer.plain(), block).double()  # levels times steps
    expected = whole @ own.T * steps.double() + bias.double()
    assert (alone.flatten(0, 1) - expected).norm() <= 1e-6 * expected.norm()


@eight_bits
def test_weights_are_rounded_once_for_each_row():
    torch.manual_seed(0)
    weight = torch.randn(64, 192) * torch.logspace(-6, 6, 64)[:, None]
    weight[5] = 0
    layer = Int8Linear(weight)
    exact, kept = (turned(w, layer.block) for w in (weight, layer.plain()))
    step = exact.abs().amax(1, keepdim=True) / 127
    assert ((kept - exact).abs() <= .501 * step + 1e-30).all() and not layer.plain()[5].any()
    assert torch.equal(plain_weight(layer), layer.plain())
    assert torch.equal(layer(torch.zeros(2, 192)), torch.zeros(2, 64))
    assert layer(torch.full((1, 192), torch.nan)).isnan().all()


def test_turning():
    for n in (1, 2, 8, 16, BLOCK): assert torch.allclose(hadamard(n) @ hadamard(n), torch.eye(n), atol=1e-6)
    x = torch.randn(3, 5, 192, generator=torch.Generator().manual_seed(0))
    one, exact = turned(x, BLOCK), x.reshape(-1, BLOCK).double() @ hadamard(BLOCK).double()
    assert one.shape == (15, 192) and torch.allclose(one.double(), exact.view(15, 192), atol=1e-5)
    assert torch.allclose(turned(one, BLOCK), x.flatten(0, 1), atol=1e-5)
    loud = torch.zeros(1, BLOCK)
    loud[0, 7] = 8
    assert turned(loud, BLOCK).abs().unique().tolist() == [1]


@eight_bits
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_do_not_depend_on_how_many_are_read(name, tmp_path):
    "To the end of a cache, with rejected tokens left behind the end; and near to float32's."
    module = random_model(FAMILIES[name])
    exact, model = stored(module, tmp_path), load_model(tmp_path, CPU, INT8)
    ids = tokens(59, B=1)

    def read(sizes):
        cache, logits, at = model.new_cache(59), [], 0
        while at < 59:
            n = min(sizes[len(logits) % len(sizes)], 59 - at)
            logits.append(model.forward(ids[:, at:at + n], cache))
            at += n
            if at < 59:
                model.forward(ids.flip(1)[:, :min(4, 59 - at)], cache)
                cache.rollback(at)
        return torch.cat(logits, 1)

    alone = read([1])
    for sizes in ([2], [5, 1, 9, 3], [7, 1, 4, 8, 6]): assert torch.equal(read(sizes), alone)
    wanted = exact.forward(ids)
    assert (alone - wanted).norm() <= .05 * wanted.norm()


@eight_bits
def test_logits_of_the_default_model_do_not_depend_on_how_many_are_read():
    "Where attention goes over to more keys, too."
    model = load_model(fetch(), CPU, INT8)
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


@eight_bits
@pytest.mark.parametrize("K", [1, 8])
def test_greedy_texts_are_equal(K, tmp_path):
    stored(random_model(FAMILIES["tinyllama"]), tmp_path)
    model = load_model(tmp_path, CPU, INT8)
    drafters = ModelDrafter(model.skip([1]), V), ModelDrafter(quantised(load_model(tmp_path, CPU, INT8)), V)
    def said(drafter, prompt):
        return ids_of(speculate(model, drafter, prompt, SamplingParams(0.0), SeededRandom(0), K=K, max_new_tokens=24))
    for prompt in ([3], list(range(10, 24))):
        plain = said(NoDrafter(), prompt)
        for drafter in drafters: assert said(drafter, prompt) == plain


@eight_bits
@pytest.mark.parametrize("name", ["smollm2-head", pytest.param("smollm2-ngram", marks=pytest.mark.slow)])
def test_a_pair_in_eight_bits(name):
    "Token for token what plain decoding writes, also in a batch, and at temperature 1; the head drafts in float32."
    pair = load_pair(name, "cpu", "int8")
    assert pair.target.int8 and pair.target.precision == pair.target.kept_as == "int8"
    assert pair.target.batch_invariant and pair.target.dtype == torch.float32
    asked = [[{"role": "user", "content": text}] for text in ("How do bees make honey?", "What is 2+2?")]
    for T in (0.0, 1.0):
        how = dict(max_new_tokens=20, ignore_eos=True, temperature=T, same_text=True)
        plain = [pair.generate(text, method="plain", seed=i, **how).generated_ids for i, text in enumerate(asked)]
        for i, (text, ids) in enumerate(zip(asked, plain)):
            result = pair.generate(text, K=3, seed=i, **how)
            assert result.generated_ids == ids and len(ids) == 20 and result.num_drafted and result.same_text_as_plain
        assert [result.generated_ids for result in pair.generate(asked, K=3, seed=0, **how)] == plain


# --- the distribution, and the operator that spoils it

class OneStepForAll(Int8Linear):
    "What `quantized.linear_dynamic` does: the largest number of all rows decides how each is rounded."
    def __call__(self, x):
        rows = turned(x, self.block)
        step = rows.abs().amax() / 127
        y = (self.product(rows / step) * step).view(*x.shape[:-1], self.outputs)
        return y if self.bias is None else y + self.bias


def checked(model, samples=300):
    "Texts at temperature 1, held against the target as plain decoding computes it: token by token."
    draft, sampling = ModelDrafter(model.skip([0, 1]), V), SamplingParams(1.0, top_k=2)
    def generate(prompt, length, seed):
        return ids_of(speculate(model, draft, prompt, sampling, SeededRandom(seed), K=2, max_new_tokens=length))
    def target(ids):
        cache = model.new_cache(len(ids))
        return [model.forward(torch.tensor([[token]]), cache) for token in ids][-1][0, -1]
    return check_decoder(generate, target, [19], sampling, samples=samples, length=3, width=2, distance=.2, weak=True,
                         progress=False)


def build(tmp_path, monkeypatch, kind):
    "A model whose activations are a thousand times as large for every other token."
    module = random_model(FAMILIES["tinyllama"])
    module.model.embed_tokens.weight[:, 0] = 20.0 * (torch.arange(V) % 2 == 0)
    for layer in module.model.layers:
        for part in (layer.mlp.gate_proj, layer.mlp.up_proj): part.weight[:, 0] *= 30
        layer.mlp.down_proj.weight *= 8
    module.lm_head.weight *= 2
    stored(module, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("specdec.models.checkpoint.Int8Linear", kind)
        return load_model(tmp_path, CPU, INT8)


@eight_bits
def test_sampled_texts_have_the_distribution_of_the_target(tmp_path, monkeypatch):
    assert not checked(build(tmp_path, monkeypatch, Int8Linear)).rejected


@eight_bits
def test_one_step_for_all_rows_is_caught(tmp_path, monkeypatch):
    model = build(tmp_path, monkeypatch, OneStepForAll)
    report = checked(model)
    assert report.rejected and report.counts.sum() < 200
    ids = torch.tensor([[3, 5, 8, 9]])
    cache = model.new_cache(4)
    alone = torch.cat([model.forward(token, cache) for token in ids.split(1, 1)], 1)
    assert (model.forward(ids) - alone).abs().max() > .1


# --- where it is refused

@pytest.fixture
def forget_form():
    "What this processor multiplies by is found out again, before and after."
    devices.int8_form.cache_clear()
    yield
    devices.int8_form.cache_clear()


def saturating(x, product, steps):
    "What the instructions before VNNI make of `unsigned`: they keep the sum of two products in 16 bits."
    levels = product(torch.eye(x.shape[1]), torch.uint8, 0, torch.ones_like(steps)).T
    pairs = ((x + 128)[:, None] * levels).unflatten(-1, (-1, 2)).sum(-1).clamp(-2**15, 2**15 - 1)
    return (pairs.sum(-1) - 128 * levels.sum(-1)) * steps


@eight_bits
def test_where_sums_saturate_rows_are_multiplied_in_halves(monkeypatch, forget_form):
    "On any processor with AVX2: exactly, with bits that don't depend on other rows, and the same as in another form."
    assert not devices.adds_up(saturating, 64) and devices.adds_up(devices.halves, 512)
    found = devices.int8_form()
    torch.manual_seed(0)
    weight, x = torch.randn(96, 1536), torch.randn(40, 1536)
    usual = Int8Linear(weight)(x)
    for form in ("unsigned", "signed"): monkeypatch.setattr(devices, form, saturating)
    devices.int8_form.cache_clear()
    assert devices.int8_form() is devices.halves
    layer = Int8Linear(weight)
    rows = layer(x)
    assert torch.equal(rows, usual), f"{found.__name__} has other bits than halves"
    assert all(torch.equal(layer(x[:n]), rows[:n]) for n in (1, 2, 3, 7, 16))


@eight_bits
@pytest.mark.parametrize("slow", ["unsigned", "signed"])
def test_the_clock_chooses_among_exact_forms(slow, monkeypatch, forget_form):
    "Signed numbers take minutes a token without AMX: a form that is slow here is not taken."
    def exact(x, product, steps): return devices.halves(x, product, steps)
    def slowly(x, product, steps):
        time.sleep(.02)
        return devices.halves(x, product, steps)
    for form in ("unsigned", "signed"): monkeypatch.setattr(devices, form, slowly if form == slow else exact)
    assert devices.int8_form() is exact


def test_a_processor_where_no_sum_is_right_is_refused(monkeypatch, forget_form, tmp_path):
    monkeypatch.setattr(devices, "adds_up", lambda form, length: False)
    assert not has_int8(CPU)
    stored(random_model(FAMILIES["tinyllama"]), tmp_path)
    for ask in (lambda: load("smollm2", "cpu", "int8"), lambda: memory_needed("smollm2", "cpu", "int8"),
                lambda: load_pair("smollm2", "cpu", "int8"), lambda: pick_dtype("int8", CPU, STORED)):
        with pytest.raises(InputError, match="int8 has no exact kernel on cpu.*AVX2.*Take float32"): ask()


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_other_devices_are_refused(device):
    with pytest.raises(InputError, match=f"no exact kernel on {device}: it needs an x86 CPU"):
        pick_dtype("int8", torch.device(device), STORED)


@eight_bits
def test_a_model_of_transformers_is_refused(tmp_path):
    stored(random_model(LOOKALIKES["gelu"]), tmp_path)
    for ask in (lambda: load_model(tmp_path, CPU, INT8), lambda: memory_needed(LOOKALIKES["gelu"], CPU, "int8")):
        with pytest.raises(ModelError, match="^int8 is for models .*computed by transformers: take bfloat16"): ask()


@eight_bits
def test_what_it_says_of_itself():
    "One byte a weight; the rows of tokens stay in their file."
    model = load("smollm2", "cpu", "int8")
    assert model.memory_footprint_mb == pytest.approx(memory_needed("smollm2", "cpu", "int8").weights_mb, rel=.01)
    assert 134 < model.memory_footprint_mb < 137 and "in int8 on cpu" in repr(model)
    assert not model.int4 and model.four_bits().share == 0 and model.skip([3]).int8
    light = quantised(model)
    assert light.precision == "int4" and model.precision == "int8"
