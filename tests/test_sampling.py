"""The sampling transform equals transformers' own logits processors, also where ties, rounding and extreme settings
make that hard, and wrong versions of it are caught."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from helpers import examples
from specdec.errors import InputError, NumericalError
from specdec.sampling import (
    SamplingParams,
    apply_min_p,
    apply_temperature,
    apply_top_k,
    apply_top_p,
    check_logits,
    likeliest,
    nucleus,
    probabilities,
)

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(300, 7), (300, 50), (200, 1000), (6, 49152)]


def random_logits(shape, dtype=torch.float32, ties=False, seed=0):
    logits = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (logits.round() if ties else logits).to(dtype)


def kept(logits): return logits > -INF


def by_sorting(logits, top_p):
    "The nucleus from its definition: a stable sort of everything, in float64."
    falling, order = logits.double().sort(descending=True, stable=True)
    before = falling.softmax(-1).cumsum(-1).roll(1, -1)
    before[..., 0] = 0
    return torch.zeros_like(kept(logits)).scatter(-1, order, before < top_p)


def near_edge(logits, top_p):
    "Rows where the covered probability comes so near to top_p that rounding decides."
    covered = logits.double().sort(descending=True).values.softmax(-1).cumsum(-1)
    return ((covered - top_p).abs() < 1e-6).any(-1)


cases = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
tied = pytest.mark.parametrize("ties", [False, True], ids=["smooth", "ties"])


@cases
@dtypes
@pytest.mark.parametrize("temperature", [.05, .7, 1., 2., 50.])
def test_temperature_equals_transformers(shape, dtype, temperature):
    logits = random_logits(shape, dtype)
    expected = TemperatureLogitsWarper(temperature)(None, logits.double()).softmax(-1)
    torch.testing.assert_close(SamplingParams(temperature).probs(logits).double(), expected, rtol=0, atol=1e-6)


@cases
@dtypes
@tied
@pytest.mark.parametrize("k", [1, 2, 40, 10**6])
def test_top_k_equals_transformers(shape, dtype, ties, k):
    logits = random_logits(shape, dtype, ties)
    assert torch.equal(apply_top_k(logits, k), TopKLogitsWarper(k)(None, logits))


@cases
@dtypes
@tied
@pytest.mark.parametrize("top_p", [1e-9, .1, .5, .9, .99])
def test_top_p_equals_transformers(shape, dtype, ties, top_p):
    logits = random_logits(shape, dtype, ties)
    ours, theirs = apply_top_p(logits, top_p), TopPLogitsWarper(top_p)(None, logits.float())
    decided = ~near_edge(logits, top_p)
    assert decided.float().mean() > .5 or shape[-1] > 1000
    same = ours.float().sort().values == theirs.sort().values  # the same numbers stay, whichever of equals
    assert same[decided].all()
    if not ties and dtype == torch.float32: assert torch.equal(kept(ours)[decided], kept(theirs)[decided])
    assert torch.equal(kept(ours)[decided], by_sorting(logits, top_p)[decided])             # of ties, the lower ids


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.floats(1e-6, 1), st.integers(1, 12))
@settings(max_examples=examples(300), deadline=None)
def test_top_p_is_the_smallest_set(levels, top_p, look):
    logits = torch.tensor(levels).float()
    inside = kept(apply_top_p(logits, top_p))
    p = logits.double().softmax(-1)
    assert inside[logits.argmax()]
    assert p[inside].sum() >= top_p - 1e-6                        # it reaches top_p,
    if inside.sum() > 1 and top_p < 1: assert p[inside].sum() - p[inside].min() < top_p + 1e-6  # and not with one fewer
    assert not (~inside).any() or p[inside].min() >= p[~inside].max()  # likeliest first
    assert nucleus(logits, top_p, look)[1] == nucleus(logits, top_p)[1]  # however far it looks first


@pytest.mark.parametrize("top_p, count", [(1e-9, 1), (.5, 1), (.51, 2), (.75, 2), (.8, 3), (.875, 3), (.9, 4), (1, 4)])
def test_top_p_at_exact_boundaries(top_p, count):
    logits = torch.tensor([.25, .5, .125, .125]).log()
    assert kept(apply_top_p(logits, top_p)).sum() == count
    assert kept(TopPLogitsWarper(top_p)(None, logits[None])).sum() == count


def chain(logits, temperature, top_k, top_p, min_p):
    logits = logits.double()
    for processor in (TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p),
                      MinPLogitsWarper(min_p)):
        logits = processor(None, logits)
    return logits.softmax(-1)


@dtypes
@pytest.mark.parametrize("temperature", [.5, 1., 2.])
@pytest.mark.parametrize("top_k, top_p, min_p", [
    (1, .5, 1e-9), (5, .9, 1e-9), (50, .9, 1e-9), (1000, .99, 1e-9), (1000, 1., .2), (50, .9, .1), (1000, .99, .01)])
def test_transform_equals_the_chain_of_transformers(dtype, temperature, top_k, top_p, min_p):
    logits = random_logits((200, 1000), seed=1).to(dtype)
    if dtype != torch.float32: logits = logits[:, :40]  # few enough that hardly any two are equal
    decided = (logits.float().sort().values.diff() != 0).all(-1)
    assert decided.sum() > 10
    ours = SamplingParams(temperature, top_k, top_p, min_p).probs(logits)
    expected = chain(logits, temperature, top_k, top_p, min_p)
    torch.testing.assert_close(ours[decided].double(), expected[decided], rtol=0, atol=1e-6)


def wrong_order(logits): return apply_temperature(apply_top_p(logits, .9), 2.).softmax(-1)
def low_precision(logits): return SamplingParams(2., 1000, .9).probs(logits).bfloat16().float()


def test_wrong_versions_are_caught():
    logits, expected = random_logits((50, 1000)), chain(random_logits((50, 1000)), 2., 1000, .9, 1e-9)
    assert torch.allclose(SamplingParams(2., 1000, .9).probs(logits).double(), expected, rtol=0, atol=1e-6)
    for wrong in (wrong_order, low_precision):
        assert not torch.allclose(wrong(logits).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-320, 1e-46, 1e-40, 1e-10, 1e10, 1e39, 1e308, 10**400])
def test_extreme_temperatures(temperature):
    logits = torch.tensor([[3., 5., -INF, 1.], [0., 0., -1e30, 65504.]])
    p = SamplingParams(temperature).probs(logits)
    assert p.isfinite().all() and p[0, 2] == 0 and torch.allclose(p.sum(-1), torch.ones(2))
    if temperature < 1: assert p.argmax(-1).tolist() == [1, 3] and p.max() == 1
    else: assert torch.allclose(p[0, [0, 1, 3]], torch.tensor(1 / 3))


def test_forbidden_tokens_stay_forbidden():
    logits = random_logits((20, 300))
    logits[:, ::3] = -INF
    settings = [(0.,), (.7,), (1., 250), (2., None, .999), (1., 280, .9)]
    for sampling in (SamplingParams(*setting) for setting in settings):
        assert (sampling.probs(logits)[:, ::3] == 0).all()


@dtypes
def test_probabilities_sum_to_one(dtype):
    logits = random_logits((3, 150_000), dtype)
    sums = probabilities(logits).double().sum(-1)
    assert (sums - 1).abs().max() < 1e-6
    if dtype != torch.float32: assert (logits.softmax(-1).double().sum(-1) - 1).abs().max() > 1e-6  # the mutant


@dtypes
def test_probabilities_are_as_exact_as_float32(dtype):
    logits = random_logits((3, 49152), dtype)
    exact = logits.double().softmax(-1)
    def error(p): return ((p.double() - exact) / exact).abs().max()
    assert error(probabilities(logits)) < 2e-6
    if dtype != torch.float32: assert error(logits.softmax(-1)) > 1e-4  # the softmax in the logits' dtype is caught


def keeps_what_fits(logits, top_p):
    "Wrong: stops before the token that crosses the line."
    falling, order = logits.sort(descending=True)
    outside = falling.softmax(-1).cumsum(-1) > top_p
    return logits.masked_fill(outside.scatter(-1, order, outside), -INF)


@pytest.mark.parametrize("top_p", [1e-30, 1e-9, .01])
def test_the_likeliest_token_always_stays(top_p):
    logits = random_logits((20, 1000))
    best = logits.argmax(-1, keepdim=True)
    assert kept(apply_top_p(logits, top_p)).gather(-1, best).all()
    assert not kept(keeps_what_fits(logits, top_p)).any()  # the tempting version is caught


@pytest.mark.parametrize("top_p", [.2, .9, .9999])
def test_nucleus_is_the_same_however_far_it_looks_first(top_p):
    logits = random_logits((6, 49152))
    found = [nucleus(logits, top_p, look)[1] for look in (1, 256, 49152)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])


def test_rounding_excuses_hardly_any_row():
    "Where top-p and transformers' may differ is where rounding decides: in rows of a thousand logits, next to never."
    rows = [near_edge(random_logits((200, 1000), dtype, ties), top_p)
            for dtype in DTYPES for ties in (False, True) for top_p in (.1, .5, .9, .99)]
    assert torch.stack(rows).float().mean() < .01


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_likeliest_is_argmax(dtype):
    logits = torch.randn(3, 2, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(likeliest(logits), logits.argmax(-1))
    assert likeliest(torch.tensor([1., 3., 3.], dtype=dtype)).item() == 1  # of ties, the lowest id
    assert torch.equal(SamplingParams().probs(logits).argmax(-1), likeliest(logits))


def test_greedy_is_the_limit_of_small_temperatures():
    logits = random_logits((20, 300))
    assert torch.equal(SamplingParams(1e-40).probs(logits), SamplingParams().probs(logits))


def test_survivors_of_a_cut_grow_by_the_same_factor():
    logits = random_logits((300,))
    survivors = logits.topk(5).indices
    factors = SamplingParams(1., top_k=5).probs(logits)[survivors] / SamplingParams(1.).probs(logits)[survivors]
    assert torch.allclose(factors, factors[0].expand(5))


def test_rows_are_independent():
    "A row's distribution does not depend on the rows beside it: one token and K tokens at once give the same p."
    logits = random_logits((6, 49152), torch.bfloat16)
    for sampling in (SamplingParams(), SamplingParams(.8), SamplingParams(.8, 50), SamplingParams(.8, None, .9),
                     SamplingParams(2., 1000, .95), SamplingParams(1.5, min_p=.1)):
        alone = torch.stack([sampling.probs(row) for row in logits])
        together = sampling.probs(logits)
        assert torch.allclose(together, alone, rtol=1e-5, atol=0) and torch.equal(together > 0, alone > 0)


@pytest.mark.parametrize("arguments", [
    dict(temperature=-.1), dict(temperature=NAN), dict(temperature=INF), dict(temperature=None), dict(temperature="1"),
    dict(temperature=True), dict(top_k=0), dict(top_k=-1), dict(top_k=2.0), dict(top_k=True), dict(top_k="5"),
    dict(top_k=NAN), dict(top_p=0), dict(top_p=0.), dict(top_p=1.0001), dict(top_p=-1), dict(top_p=NAN),
    dict(top_p=True), dict(top_p=False), dict(top_p="0.9"), dict(top_p=[.9]), dict(temperature=np.bool_(True)),
    dict(temperature=torch.tensor(True)), dict(top_k=np.float64(2)), dict(top_p=np.array([.9])),
    dict(min_p=0), dict(min_p=1.5), dict(min_p=NAN), dict(min_p=True), dict(min_p="0.1")], ids=str)
def test_bad_settings(arguments):
    (name, value), = arguments.items()
    with pytest.raises(InputError, match=name) as error: SamplingParams(**dict(temperature=1.) | arguments)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("step, values", [
    (apply_temperature, [0, -1, NAN, True, "1"]), (apply_top_k, [0, -1, True, 1.5]), (apply_top_p, [0, -1, NAN, True]),
    (apply_min_p, [0, -1, 1.5, NAN, True])], ids=["temperature", "top_k", "top_p", "min_p"])
def test_steps_refuse_what_keeps_nothing(step, values):
    for value in values:
        with pytest.raises(InputError, match=str(value)): step(torch.zeros(4), value)


@pytest.mark.parametrize("row", [[1., NAN], [NAN, NAN], [1., INF], [-INF, -INF]], ids=str)
def test_logits_that_are_no_distribution(row):
    logits = torch.tensor([[1., 2.], row])
    with pytest.raises(NumericalError, match="step 3"): check_logits(logits, "The model, at step 3")
    check_logits(torch.tensor([[1., -INF]]), "a forbidden token is fine")


@pytest.mark.parametrize(
    "form", [np.array, torch.tensor, lambda n: np.asarray(n).dtype.type(n)], ids=["array", "tensor", "scalar"]
)
def test_numbers_of_numpy_and_torch_become_plain_ones(form):
    given, plain = SamplingParams(form(0.5), form(7), form(0.75)), SamplingParams(0.5, 7, 0.75)
    assert given == plain and hash(given) == hash(plain)
    assert [type(n) for n in (given.temperature, given.top_k, given.top_p)] == [float, int, float]
    assert repr(SamplingParams(np.int64(1))) == repr(SamplingParams(1))
