"""The sampling transform equals transformers' own logits processors, also where ties, rounding and extreme settings make that
hard, and wrong versions of it are caught; the plain loop gives the tokens of `generate`."""
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdec.autoregressive import (Transform, apply_temperature, apply_top_k, apply_top_p, check_logits, generate_uncached,
                                    nucleus, probabilities)
from specdec.core import InputError, NumericalError, TorchSource

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
    torch.testing.assert_close(Transform(temperature)(logits).double(), expected, rtol=0, atol=1e-6)


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
    assert torch.equal(ours.float().sort().values[decided], theirs.sort().values[decided])  # the same numbers stay, whichever of equals
    if not ties and dtype == torch.float32: assert torch.equal(kept(ours)[decided], kept(theirs)[decided])
    assert torch.equal(kept(ours)[decided], by_sorting(logits, top_p)[decided])             # of ties, the lower ids


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.floats(1e-6, 1), st.integers(1, 12))
@settings(max_examples=300, deadline=None)
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


def chain(logits, temperature, top_k, top_p):
    logits = logits.double()
    for processor in (TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)):
        logits = processor(None, logits)
    return logits.softmax(-1)


@dtypes
@pytest.mark.parametrize("temperature", [.5, 1., 2.])
@pytest.mark.parametrize("top_k, top_p", [(1, .5), (5, .9), (50, .9), (1000, .99)])
def test_transform_equals_the_chain_of_transformers(dtype, temperature, top_k, top_p):
    logits = random_logits((200, 1000), seed=1).to(dtype)
    if dtype != torch.float32: logits = logits[:, :40]  # few enough that hardly any two are equal
    decided = (logits.float().sort().values.diff() != 0).all(-1)
    assert decided.sum() > 10
    ours = Transform(temperature, top_k, top_p)(logits)
    torch.testing.assert_close(ours[decided].double(), chain(logits, temperature, top_k, top_p)[decided], rtol=0, atol=1e-6)


def wrong_order(logits): return apply_temperature(apply_top_p(logits, .9), 2.).softmax(-1)
def low_precision(logits): return Transform(2., 1000, .9)(logits).bfloat16().float()


def test_wrong_versions_are_caught():
    logits, expected = random_logits((50, 1000)), chain(random_logits((50, 1000)), 2., 1000, .9)
    assert torch.allclose(Transform(2., 1000, .9)(logits).double(), expected, rtol=0, atol=1e-6)
    for wrong in (wrong_order, low_precision): assert not torch.allclose(wrong(logits).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-320, 1e-46, 1e-40, 1e-10, 1e10, 1e39, 1e308, 10**400])
def test_extreme_temperatures(temperature):
    logits = torch.tensor([[3., 5., -INF, 1.], [0., 0., -1e30, 65504.]])
    p = Transform(temperature)(logits)
    assert p.isfinite().all() and p[0, 2] == 0 and torch.allclose(p.sum(-1), torch.ones(2))
    if temperature < 1: assert p.argmax(-1).tolist() == [1, 3] and p.max() == 1
    else: assert torch.allclose(p[0, [0, 1, 3]], torch.tensor(1 / 3))


def test_forbidden_tokens_stay_forbidden():
    logits = random_logits((20, 300))
    logits[:, ::3] = -INF
    for transform in (Transform(), Transform(.7), Transform(1., top_k=250), Transform(2., top_p=.999), Transform(1., 280, .9)):
        assert (transform(logits)[:, ::3] == 0).all()


@dtypes
def test_probabilities_sum_to_one(dtype):
    logits = random_logits((3, 150_000), dtype)
    sums = probabilities(logits).double().sum(-1)
    assert (sums - 1).abs().max() < 1e-6
    if dtype != torch.float32: assert (logits.softmax(-1).double().sum(-1) - 1).abs().max() > 1e-6  # the mutant


def test_rows_are_independent():
    "A row's distribution does not depend on the rows beside it: one token and K tokens at once give the same p."
    logits = random_logits((6, 49152), torch.bfloat16)
    for transform in (Transform(), Transform(.8), Transform(.8, 50), Transform(.8, None, .9), Transform(2., 1000, .95)):
        alone = torch.stack([transform(row) for row in logits])
        assert torch.allclose(transform(logits), alone, rtol=1e-5, atol=0) and torch.equal(transform(logits) > 0, alone > 0)


@pytest.mark.parametrize("arguments", [
    dict(temperature=-.1), dict(temperature=NAN), dict(temperature=INF), dict(temperature=None), dict(temperature="1"), dict(temperature=True),
    dict(top_k=0), dict(top_k=-1), dict(top_k=2.0), dict(top_k=True), dict(top_k="5"), dict(top_k=NAN),
    dict(top_p=0), dict(top_p=0.), dict(top_p=1.0001), dict(top_p=-1), dict(top_p=NAN), dict(top_p=True), dict(top_p=False), dict(top_p="0.9"), dict(top_p=[.9])], ids=str)
def test_bad_settings(arguments):
    (name, value), = arguments.items()
    with pytest.raises(InputError, match=name) as error: Transform(1., **arguments) if name != "temperature" else Transform(**arguments)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("step,values", [(apply_temperature, [0, -1, NAN]), (apply_top_k, [0, -1]), (apply_top_p, [0, -1, NAN])], ids=lambda x: getattr(x, "__name__", ""))
def test_steps_refuse_what_keeps_nothing(step, values):
    for value in values:
        with pytest.raises(InputError, match=str(value)): step(torch.zeros(4), value)


@pytest.mark.parametrize("row", [[1., NAN], [NAN, NAN], [1., INF], [-INF, -INF]], ids=str)
def test_logits_that_are_no_distribution(row):
    with pytest.raises(NumericalError, match="step 3"): check_logits(torch.tensor([[1., 2.], row]), "The model, at step 3")
    check_logits(torch.tensor([[1., -INF]]), "a forbidden token is fine")


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=101, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                                        num_key_value_heads=2, initializer_range=.3)).eval()


def test_greedy_tokens_equal_generate(tiny):
    for seed in range(5):
        prompt = torch.randint(0, 101, (1, 4), generator=torch.Generator().manual_seed(seed))
        expected = tiny.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20, eos_token_id=None, pad_token_id=0)
        found = generate_uncached(lambda ids: tiny(ids).logits, prompt[0].tolist(), Transform(), TorchSource(0), 20)
        assert list(found) == expected[0, 4:].tolist()


def test_loop_feeds_the_whole_text_and_stops():
    fed = []
    def counting(ids):
        fed.append(ids.tolist())
        return torch.nn.functional.one_hot((ids + 1) % 10, 10).float() * 100
    assert list(generate_uncached(counting, [3], Transform(), TorchSource(0), 3)) == [4, 5, 6]
    assert fed == [[[3]], [[3, 4]], [[3, 4, 5]]]
    assert list(generate_uncached(counting, [3], Transform(1.), TorchSource(0), 9, frozenset({5}))) == [4, 5]


def test_loop_refuses_at_the_call(tiny):
    with pytest.raises(InputError, match="empty"): generate_uncached(tiny, [], Transform(), TorchSource(0), 3)
    for n in (0, -1, 2.5, True, None):
        with pytest.raises(InputError, match="max_new_tokens"): generate_uncached(tiny, [1], Transform(), TorchSource(0), n)


def test_loop_names_the_step_of_a_nan():
    def model(ids): return torch.full((1, ids.shape[1], 10), NAN if ids.shape[1] == 4 else 0.)
    tokens = generate_uncached(model, [1, 2], Transform(1.), TorchSource(0), 9)
    assert len([next(tokens), next(tokens)]) == 2
    with pytest.raises(NumericalError, match="step 2"): next(tokens)
