"""torch's random functions followed exactly: known laws, agreement with the real generators, real verify functions, and
what must be refused.

Each check of a law is also run on something broken, which it must reject."""
import math
import random
from fractions import Fraction as F

import numpy as np
import pytest
import torch

from specdec.errors import InputError, NumericalError
from specdec.lossless.enumerate import exact_distribution
from specdec.lossless.proof import completed, distance, language_pairs, one_round, target_distribution
from specdec.lossless.symbolic import uniform_distribution
from specdec.lossless.torch_rng import SymbolicTensor, drawn_from, torch_distribution
from specdec.sampling import SeededRandom

HALF, QUARTER = F(1, 2), F(1, 4)
W = torch.tensor([.5, .25, .25])
DISTRIBUTION = {0: HALF, 1: QUARTER, 2: QUARTER}


def chance(event, **options): return torch_distribution(lambda: bool(event()), **options).get(True, F(0))


# --- One number -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        lambda: torch.rand(()) < 0.25, lambda: torch.rand(1) <= 0.25, lambda: 0.25 > torch.rand(()),
        lambda: 0.25 >= torch.rand(()), lambda: torch.rand(()) > 0.75, lambda: torch.rand(()) >= 0.75,
        lambda: torch.tensor(0.25) > torch.rand(()), lambda: torch.lt(torch.rand(2, 3)[1, 2], 0.25),
        lambda: torch.rand(3)[2].item() < 0.25, lambda: torch.rand((2,)).tolist()[1] < 0.25,
        lambda: torch.rand(size=(2,))[-1:].lt(0.25), lambda: torch.rand_like(torch.ones(2, 2)).flatten()[3] < 0.25,
        lambda: torch.empty(3).uniform_()[1] < 0.25, lambda: torch.empty(3).uniform_(1, 3)[1] < 1.5,
        lambda: torch.empty(3).uniform_(to=4.0)[1] < 1, lambda: torch.rand(()) * 0.5 < 0.125,
        lambda: 0.5 * torch.rand(()) < torch.tensor(0.125), lambda: torch.rand(()) / 2 < 0.125,
        lambda: 1 - torch.rand(()) < 0.25, lambda: -torch.rand(()) > -0.25, lambda: torch.rand(()) - 1 < -0.75,
        lambda: 1 / torch.rand(()) > 4, lambda: torch.rand(()).double() < 0.25,
        lambda: torch.rand(()).clamp(min=0.1, max=0.5) < 0.25, lambda: torch.rand(()).clamp_max(0.75) >= 0.75,
        lambda: torch.rand(4, 1).squeeze(1).unsqueeze(0).view(2, 2).T[0, 1] < 0.25,
        lambda: torch.rand(5).gather(0, torch.tensor([3])) < 0.25,
        lambda: torch.stack([torch.rand(2), torch.rand(2)])[1, 1] < 0.25,
        lambda: torch.cat([torch.rand(2), torch.rand(1)])[2] < 0.25,
        lambda: torch.rand((), dtype=torch.float64, generator=torch.Generator()) < 0.25,
        lambda: torch.rand(2).chunk(2)[1] < 0.25, lambda: torch.bernoulli(torch.tensor(0.25)),
        lambda: torch.empty(()).bernoulli_(0.25), lambda: torch.empty(2).bernoulli_(torch.tensor([1.0, 0.25]))[1],
        lambda: torch.tensor([1.0, 0.25]).bernoulli()[1], lambda: torch.where(torch.rand(()) < 0.25, 1, 0),
        lambda: torch.distributions.Bernoulli(0.25).sample(),
        lambda: torch.distributions.Uniform(1.0, 3.0).sample() < 1.5,
    ],
)
def test_a_quarter(event):
    assert chance(event) == QUARTER


@pytest.mark.parametrize(
    "event, expected",
    [
        (lambda: torch.rand(()).log() < math.log(0.25), 0.25), (lambda: (1.5 - torch.rand(())).log() < 0, 0.5),
        (lambda: 1 / (torch.rand(()) + 1) < 0.75, 2 / 3), (lambda: torch.log1p(-torch.rand(())) < math.log(0.25), 0.25),
        (lambda: torch.empty(()).exponential_(2.0) < 1, 1 - math.exp(-2)),
        (lambda: -torch.log(torch.rand(())) > 1, math.exp(-1)), (lambda: torch.rand(()).log().exp() < 0.3, 0.3),
    ],
)
def test_logarithms(event, expected):
    assert float(chance(event)) == pytest.approx(expected, abs=1e-7)


def test_one_number_asked_twice():
    def asked():
        u = torch.rand(())
        return bool(u < .5), bool(u < .25)
    assert torch_distribution(asked) == {(True, True): QUARTER, (True, False): QUARTER, (False, False): HALF}
    def through_a_copy_and_a_view():
        u = torch.rand(2)
        return bool(u[0] < .5), bool(u.clone()[0] < .5), bool(u.view(2, 1)[0, 0] * 2 < 1), (u < .5).tolist()[0]
    assert torch_distribution(through_a_copy_and_a_view) == {(True,) * 4: HALF, (False,) * 4: HALF}


def test_outside_the_unit_interval_nothing_is_decided():
    assert torch_distribution(
        lambda: (
            bool(torch.rand(()) < 1), bool(torch.rand(()) < 0), bool(torch.rand(()) > math.nan),
            bool(torch.rand(()) < math.inf),
        )
    ) == {(True, False, False, True): 1}


def test_the_grid_of_float32():
    assert chance(lambda: torch.rand(()) <= 0) == 0
    assert chance(lambda: torch.rand(()) <= 0, grid=True) == F(1, 2 ** 24)
    assert chance(lambda: torch.rand(()) < 0, grid=True) == 0
    assert chance(lambda: torch.rand((), dtype=torch.float64) <= 0, grid=True) == F(1, 2 ** 53)
    u = torch.rand(100_000, generator=torch.Generator()).double() * 2 ** 24
    assert (u == u.round()).all()


# --- An index ---------------------------------------------------------------------------------------------------------

def gumbel(): return -torch.log(-torch.log(torch.rand(3)))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.multinomial(W, 1), lambda: torch.multinomial(3 * W[None], num_samples=1)[0, 0],
        lambda: W.multinomial(1, generator=torch.Generator()), lambda: torch.distributions.Categorical(W).sample(),
        lambda: torch.searchsorted(W.cumsum(0), torch.rand(1)),
        lambda: torch.searchsorted(W.cumsum(0), torch.rand(()), right=True),
        lambda: torch.bucketize(torch.rand(()), W.cumsum(0)), lambda: (torch.rand(1) < W.cumsum(0)).int().argmax(),
        lambda: (W.cumsum(0) > torch.rand(1)).nonzero()[0], lambda: (torch.rand(1) >= W.cumsum(0)).sum(),
        lambda: (W / torch.empty_like(W).exponential_(1)).argmax(-1),
        lambda: (torch.empty(3).exponential_() / W).argmin(),
        lambda: W.clone().div_(torch.empty(3).exponential_()).argmax(dim=0),
        lambda: (W[None] / torch.empty(1, 3).exponential_()).max(-1, keepdim=True)[1][0, 0],
        lambda: (W / -torch.log(torch.rand(3))).argmax(), lambda: (W / -torch.log(1 - torch.rand(3))).argmax(),
    ],
)
def test_a_categorical(draw):
    assert torch_distribution(lambda: draw().item()) == DISTRIBUTION


@pytest.mark.parametrize(
    "draw",
    [
        lambda: (W.log() + gumbel()).argmax(), lambda: (W.log() - torch.empty(3).exponential_().log()).argmax(),
        lambda: torch.distributions.Gumbel(W.log(), 1.0).sample().argmax(),
        lambda: (2 * (W.log() + gumbel()) + 1).argmax(), lambda: torch.log(W / torch.empty(3).exponential_()).argmax(),
        lambda: (W.log() + gumbel()).exp().argmax(),
        lambda: (W.log() - torch.log(-torch.log(torch.rand(3) + 1e-20) + 1e-20)).argmax(),
        lambda: (W.log() - torch.log(-torch.log(torch.rand(3).clamp(min=1e-10)))).argmax(),
    ],
)
def test_gumbel_noise(draw):
    distribution = torch_distribution(lambda: draw().item())
    assert distribution.keys() == DISTRIBUTION.keys() and all(float(distribution[x])
                                                              == pytest.approx(float(DISTRIBUTION[x]), abs=1e-7)
                                                              for x in distribution)


def test_zero_weights_never_win():
    p = torch.tensor([0., .5, .5])
    for draw in (
        lambda: (p / torch.empty(3).exponential_()).argmax(), lambda: (p.log() + gumbel()).argmax(),
        lambda: torch.multinomial(p, 1), lambda: (torch.empty(3).exponential_() / p).argmin(),
    ):
        assert torch_distribution(lambda: draw().item()) == {1: HALF, 2: HALF}


def test_rows_and_samples_without_replacement():
    assert torch_distribution(lambda: tuple(torch.multinomial(torch.stack([W, W.flip(0)]), 1)[:, 0].tolist()))[
        0, 2] == QUARTER
    distribution = torch_distribution(lambda: tuple(torch.multinomial(W, 2).tolist()))
    assert distribution == {
        (0, 1): QUARTER, (0, 2): QUARTER, (1, 0): F(1, 6), (2, 0): F(1, 6), (1, 2): F(1, 12), (2, 1): F(1, 12),
    }
    assert torch_distribution(lambda: tuple(torch.multinomial(W, 2, True).tolist()))[1, 1] == F(1, 16)
    assert (
        torch_distribution(lambda: tuple((torch.stack([W, W]) / torch.empty(2,
                                                                            3).exponential_()).argmax(-1).tolist()))[
                                                                                0, 0]
        == QUARTER
    )


def test_the_same_race_has_the_same_winner():
    def twice():
        x = W / torch.empty(3).exponential_()
        return x.argmax().item(), x.max(-1).indices.item()
    assert torch_distribution(twice) == {(i, i): w for i, w in DISTRIBUTION.items()}


# --- Buffers ----------------------------------------------------------------------------------------------------------

def test_numbers_written_into_a_buffer():
    def rows():  # one row drawn again, as for a request with its own generator
        e = torch.empty(2, 3)
        e.exponential_()
        e[1].exponential_(generator=torch.Generator())
        return tuple((torch.stack([W, W]) / e).argmax(-1).tolist())
    assert torch_distribution(rows)[0, 0] == QUARTER
    def part():
        x = torch.full((2, 2), .25)
        x[0].uniform_()
        return tuple((x < .5).flatten().tolist())
    assert torch_distribution(part) == {(a, b, True, True): QUARTER for a in (True, False) for b in (True, False)}
    def through_a_view():
        p = torch.stack([W, W]).view(-1, 3)[:, :]
        return p.div_(torch.empty_like(p).exponential_())[0].argmax().item()
    assert torch_distribution(through_a_view) == DISTRIBUTION


def test_inference_mode_changes_nothing():
    @torch.inference_mode()
    def row_by_row():
        e = torch.empty(2, 3)
        for row in e: row.exponential_()
        return tuple((torch.stack([W, W]) / e).argmax(-1).tolist())
    assert torch_distribution(row_by_row) == {(a, b): DISTRIBUTION[a] * DISTRIBUTION[b] for a in DISTRIBUTION
                                              for b in DISTRIBUTION}
    @torch.inference_mode()
    def entry_by_entry():
        u = torch.empty(2)
        for i in range(2): u[i].uniform_()
        return tuple((u < .5).tolist())
    assert torch_distribution(entry_by_entry) == {(a, b): QUARTER for a in (True, False) for b in (True, False)}
    with torch.inference_mode():
        before = torch.empty(2)
        with pytest.raises(InputError, match="beforehand"): torch_distribution(lambda: bool(before[0].uniform_() < .5))


def test_a_buffer_of_the_caller_is_a_tensor_again():
    buffer = torch.zeros(2)
    assert torch_distribution(lambda: tuple((buffer.uniform_() < .5).tolist()))[True, True] == QUARTER
    assert type(buffer) is torch.Tensor and buffer.isnan().all()
    torch_distribution(lambda: bool(torch.rand(()) < .5))
    assert type(torch.rand(2)) is torch.Tensor


# --- Few bits ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_bits_as_the_generator_gives_them(dtype):
    N = 200_000
    u, v = (torch.rand(N, dtype=dtype, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    c = torch.rand(N, generator=torch.Generator().manual_seed(2)).to(dtype)
    def close(count, exact): return abs(count.double().mean().item() - float(exact)) < 6 * math.sqrt(.25 / N)
    for t in torch.tensor([0., .004, .1, .3, .5, .75, .997, 1.], dtype=dtype):
        assert close(u < t, chance(lambda: torch.rand((), dtype=dtype) < t))
        assert close(u <= t, chance(lambda: torch.rand((), dtype=dtype) <= t))
        assert close(u * 0.37 < t, chance(lambda: torch.rand((), dtype=dtype) * 0.37 < t))
        assert close(1 - v <= t, chance(lambda: 1 - torch.rand((), dtype=dtype) <= t))
        assert close(c >= t, chance(lambda: torch.rand(()).to(dtype) >= t))
    zero = chance(lambda: torch.rand((), dtype=dtype) <= 0)
    assert close(u == 0, zero) and zero >= F(1, 4096) and not chance(lambda: torch.rand((), dtype=dtype) < 0)
    assert uniform_distribution(dtype) in ("grid", "rounded")
    assert uniform_distribution(dtype, "cuda") == "rounded"
    assert uniform_distribution(torch.float32) == "continuous"


# --- Verify functions -------------------------------------------------------------------------------------------------

def error(rule, dtype=torch.float32, K=2):
    def verify(p, q, tokens, rng):
        p, q = (torch.tensor(rows.astype(float)).to(dtype) for rows in (p, q))
        with drawn_from(rng): return rule(p, q, tokens)

    def one(p, q):
        found = completed(exact_distribution(lambda rng: one_round(verify, p, q, K, rng)), p, K + 1)
        return float(distance(found, target_distribution(p, K + 1)))

    return max(one(p, q) for seed in range(3) for _, p, q in language_pairs(3, seed))


def transformers_rule(p, q, tokens):
    from transformers.generation.utils import _speculative_sampling
    valid, accepted = _speculative_sampling(torch.tensor([tokens]), q.log()[None], len(tokens), p.log()[None])
    return accepted.item(), valid[0, -1].item()

def plain(p, q, tokens, reuse=False, dtype=None):
    for i, token in enumerate(tokens):
        u = torch.rand((), dtype=dtype)
        if u >= p[i, token] / q[i, token]:
            ends = (p[i] - q[i]).clamp(min=0).cumsum(0)
            return i, torch.searchsorted(ends, (u if reuse else torch.rand(())) * ends[-1], right=True).item()
    return len(tokens), torch.multinomial(p[-1], 1).item()

def racing(p, q, tokens, one=False, shared=False):
    n = len(tokens)
    at = torch.arange(n), torch.tensor(tokens)
    kept = (torch.rand(1 if shared else n) * q[at] < p[at]).int().cumprod(0).sum().item()
    weights = (p[kept] - q[kept]).clamp(min=0) if kept < n else p[n]
    return kept, (weights / torch.empty(1 if one else len(weights)).exponential_(1)).argmax(-1).item()

@pytest.mark.parametrize("rule", [transformers_rule, plain, racing])
@pytest.mark.parametrize("K", [1, 2])
def test_lossless_functions(rule, K): assert error(rule, K=K) <= 1e-7


@pytest.mark.parametrize(
    "rule",
    [
        lambda *a: plain(*a, reuse=True), lambda *a: plain(*a, dtype=torch.bfloat16), lambda *a: racing(*a, one=True),
        lambda *a: racing(*a, shared=True),
    ],
)
def test_broken_functions(rule):
    assert error(rule) > 1e-4


def test_a_bfloat16_verdict_accepts_the_impossible(): assert error(transformers_rule, dtype=torch.bfloat16, K=1) > 1e-3

def test_the_empty_residual_of_transformers():
    from transformers.generation.utils import _speculative_sampling
    found = 0
    for seed in range(60):
        logits = torch.randn(1, 3, generator=torch.Generator().manual_seed(seed))
        p, q = logits.softmax(-1), (logits + 1).softmax(-1)
        if not ((p <= q).all() and (p / q).min() < 1 - 2 ** -24): continue
        found += 1
        def once():
            try:
                return _speculative_sampling(
                    torch.tensor([[(p / q).argmin().item()]]), logits[None] + 1, 1, torch.cat([logits, logits])[None]
                )[1].item()
            except NumericalError:
                return "stops"
        assert 0 < torch_distribution(once)["stops"] < F(1, 2 ** 20)
    assert found


# --- What is refused --------------------------------------------------------------------------------------------------

def raced_twice():
    e = torch.empty(3).exponential_()
    return (W / e).argmax().item(), (W.flip(0) / e).argmax().item()

def compared_then_raced():
    e = torch.empty(3).exponential_()
    return bool(e[0] < 1), (W / e).argmax().item()

def seeded():
    generator = torch.Generator()
    generator.manual_seed(0)
    return bool(torch.rand((), generator=generator) < .5)


@pytest.mark.parametrize(
    "function, named",
    [
        (lambda: float(torch.rand(())), "float"), (lambda: bool(torch.rand(())), "probability"),
        (lambda: int(torch.rand(())), "probability"), (lambda: torch.rand(3).sum().item(), "sum"),
        (lambda: torch.rand(3).sort()[1][0].item(), "sort"), (lambda: torch.rand(3).numpy(), "numpy"),
        (lambda: np.asarray(torch.rand(3)), "can't be followed"),
        (lambda: bool(torch.rand(()) < torch.rand(())), "Two random"), (lambda: torch.rand(3).argmax().item(), "race"),
        (lambda: torch.tensor(torch.rand(())), "copy"), (lambda: torch.cat([torch.rand(2), torch.ones(2)]), "cat"),
        (lambda: W[(torch.rand(1) * 3).long()], "long"), (lambda: torch.rand(()), "tensor"),
        (lambda: [torch.rand(2)][0], "tensor"), (lambda: torch.randn(2), "randn"),
        (lambda: torch.randint(3, (1,)), "randint"), (lambda: torch.randperm(3), "randperm"),
        (lambda: torch.empty(2).normal_(), "normal_"),
        (lambda: torch.nn.functional.dropout(torch.ones(9)).sum().item(), "own generator"),
        (lambda: torch.nn.init.uniform_(torch.empty(2)), "uniform_"),
        (lambda: torch.empty(2, dtype=torch.bfloat16).uniform_(0, 2), "from 0 to 1"),
        (lambda: torch.rand(2).to(torch.int64), "integer"),
        (lambda: torch.nn.functional.gumbel_softmax(torch.zeros(3)), "gumbel_softmax"), (raced_twice, "raced already"),
        (compared_then_raced, "raced already"), (seeded, "seeds inside"),
        (lambda: torch.manual_seed(0), "seeds inside"), (lambda: random.seed(0), "seeds inside"),
        (lambda: random.random() < 0.5, "Python's"), (lambda: random.choice([1, 2]), "Python's"),
        (lambda: np.random.rand() < 0.5, "numpy"), (lambda: np.random.seed(0), "numpy"),
        (lambda: (W.bfloat16() / torch.empty(3, dtype=torch.bfloat16).exponential_()).argmax().item(), "rounded"),
        (lambda: (W / torch.empty(3).exponential_().half()).argmax().item(), "rounded"),
        (lambda: (W / -torch.rand(3, dtype=torch.float16).float().log()).argmax().item(), "drawn"),
        (lambda: bool(torch.rand(()) * math.nan < 0.5), "NaN"),
        (lambda: bool(torch.rand(2) + torch.tensor([0.0, math.nan]) < 0.5), "NaN"),
        (lambda: bool(1 / (torch.rand(()) - 0.5) < 1), "negative"),
        (lambda: bool(1 / -torch.rand(()) < -2), "negative"),
        (lambda: bool((torch.rand(()) - 0.5).log() < 0), "negative"),
        (lambda: bool((torch.rand(()) - 1.5).log1p() < 0), "negative"),
        (lambda: bool(1 / torch.rand(()).log() < -1), "negative"),
        (lambda: torch.stack(tensors=[torch.rand(2)] * 2), "by position"),
        (lambda: torch.squeeze(input=torch.rand(2)), "by position"),
        (lambda: torch.gather(input=torch.rand(2), dim=0, index=torch.tensor([0])), "by position"),
        (lambda: [1], "outcome"), (lambda: ([1], 2), "outcome"),
    ],
)
def test_refused(function, named):
    with pytest.raises(InputError, match=named): torch_distribution(function)
    # and nothing is left behind
    assert torch_distribution(lambda: bool(torch.rand(()) < .5)) == {True: HALF, False: HALF}


def test_refused_weights():
    for function in (
        lambda: torch.multinomial(torch.zeros(3), 1), lambda: torch.multinomial(torch.tensor([1.0, math.nan]), 1),
        lambda: torch.multinomial(torch.tensor([1.0, -1.0]), 1), lambda: torch.bernoulli(torch.tensor(1.5)),
    ):
        with pytest.raises(NumericalError): torch_distribution(function)
        with pytest.raises(RuntimeError): function()  # so does torch


def test_a_seed_outside_is_fine():
    generator = torch.Generator()
    generator.manual_seed(0)
    assert chance(lambda: torch.rand((), generator=generator) < .25) == QUARTER
    before = torch.get_rng_state()
    torch_distribution(lambda: (torch.rand(3) < .5).sum().item())
    assert torch.equal(before, torch.get_rng_state())


def test_a_seeded_source_draws():
    def draws(seed):
        with drawn_from(SeededRandom(seed)):
            return (torch.rand(2000) < 0.3).float().mean().item(), (
                torch.ones(20) / torch.empty(20).exponential_()
            ).argmax().item()
    assert draws(1) == draws(1) != draws(2)
    assert abs(draws(1)[0] - .3) < .06


def test_it_says_what_it_is():
    with drawn_from(SeededRandom(0)):
        u = torch.rand(2, 3)
        assert isinstance(u, SymbolicTensor) and (u.shape, u.dtype, u.device, u.dim(), len(u), u.numel()) == (
            (2, 3), torch.float32, torch.device("cpu"), 2, 2, 6,
        )
        assert "not decided" in repr(u) and "not decided" in f"{u[0]}"
