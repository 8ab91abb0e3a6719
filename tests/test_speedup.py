"""The speed-up formulas against exact fractions and the papers' tables; measured costs on a clock held in our hands.

Every random test has a fixed seed; the false-alarm rate is what it would be under a fresh one."""
from fractions import Fraction
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec.speedup as speedup
from helpers import calls, examples, toss
from specdec.errors import InputError
from specdec.speedup import (
    best_K,
    draft_cost,
    forward_seconds,
    in_range,
    operations_factor,
    tokens_per_round,
    verification_cost,
    walltime_factor,
)

probabilities, costs, drafts = st.floats(0, 1), st.floats(0, 2), st.integers(1, 40)


# --- Formulas ---------------------------------------------------------------------------------------------------------

@settings(deadline=None)
@given(probabilities, drafts)
def test_tokens_per_round_is_the_sum_of_powers(alpha, K):
    exact = float(sum(Fraction(alpha)**i for i in range(K + 1)))
    assert tokens_per_round(alpha, K) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("alpha", [1 - 1e-15, 1 - 1e-9, 1.0, 0.0, 5e-324])
def test_tokens_per_round_has_no_hole_at_the_ends(alpha):
    assert tokens_per_round(alpha, 7) == pytest.approx(float(sum(Fraction(alpha)**i for i in range(8))), rel=1e-13)


def test_limits():
    assert tokens_per_round(.8, 10_000) == pytest.approx(5)             # K → ∞: 1 / (1 − α)
    assert walltime_factor(.8, 10_000, .1) < .01                        # … and the cost goes on growing
    assert walltime_factor(0, 4, .1) == pytest.approx(1 / 1.4)
    assert walltime_factor(1, 4, .1) == pytest.approx(5 / 1.4)
    assert walltime_factor(.8, 4, 0) == tokens_per_round(.8, 4)
    assert walltime_factor(.8, 4, .1, v=1.6) == pytest.approx(tokens_per_round(.8, 4) / 2)
    assert operations_factor(1, 4, 0) == 1 and operations_factor(0, 4, .25) == 6


def test_arrays_and_scalars():
    alpha, K = np.array([0, .5, 1]), np.array([[1], [2]])
    assert isinstance(tokens_per_round(.5, 1), float)
    np.testing.assert_allclose(tokens_per_round(alpha, K), [[1, 1.5, 2], [1, 1.75, 3]])
    np.testing.assert_allclose(walltime_factor(alpha, K, .5), tokens_per_round(alpha, K) / [[1.5], [2]])
    np.testing.assert_allclose(walltime_factor(alpha, K, .5, v=[[1.5], [2]]), tokens_per_round(alpha, K) / [[2], [3]])
    np.testing.assert_allclose(operations_factor(alpha, K, .5), [[2.5], [4]] / tokens_per_round(alpha, K))
    assert walltime_factor([.5], [2], [.1]).shape == operations_factor([.5], [2], [.1]).shape == (1,)
    assert operations_factor(.5, [2, 4], [.1, 0]).shape == (2,)          # plain lists too
    assert walltime_factor(.5, [2, 4], [.1, 0]).shape == (2,)


TABLE_1 = [  # α, K, operations, speed
    (.6, 2, 1.53, 1.96), (.7, 3, 1.58, 2.53), (.8, 2, 1.23, 2.44),
    (.8, 5, 1.63, 3.69), (.9, 2, 1.11, 2.71), (.9, 10, 1.60, 6.86),
]
TABLE_2 = [  # K, α, c, expected speed
    (7, .75, .02, 3.2), (7, .80, .04, 3.3), (7, .82, .11, 2.5),
    (7, .62, .02, 2.3), (5, .68, .04, 2.4), (3, .71, .11, 2.0),
    (5, .65, .02, 2.4), (5, .73, .04, 2.6), (3, .74, .11, 2.0),
    (5, .53, .02, 1.9), (3, .55, .04, 1.8), (3, .56, .11, 1.6),
]


@pytest.mark.parametrize("alpha, K, operations, speed", TABLE_1)
def test_table_1_of_leviathan(alpha, K, operations, speed):
    assert f"{operations_factor(alpha, K, 0):.2f}" == f"{operations:.2f}"
    assert f"{walltime_factor(alpha, K, 0):.2f}" == f"{speed:.2f}"


@pytest.mark.parametrize("K, alpha, c, expected", TABLE_2)
def test_table_2_of_leviathan(K, alpha, c, expected):
    "Some α and c that round to the printed ones give the printed speed-up."
    assert abs(walltime_factor(alpha, K, c) - expected) <= .07
    worst, best = walltime_factor(alpha - .005, K, c + .005), walltime_factor(alpha + .005, K, c - .005)
    assert worst - .05 <= expected <= best + .05


def test_table_2_would_notice_a_wrong_formula():
    "Without the bonus token, or with K + 1 draft steps, the table does not come out."
    def off(formula): return sum(abs(formula(alpha, K, c) - expected) > .07 for K, alpha, c, expected in TABLE_2)
    assert off(walltime_factor) == 0
    assert off(lambda alpha, K, c: (tokens_per_round(alpha, K) - 1) / (1 + K * c)) == len(TABLE_2)
    assert off(lambda alpha, K, c: tokens_per_round(alpha, K) / (1 + (K + 1) * c)) >= 8


@pytest.mark.parametrize("alpha", [.3, .7, .95])
def test_simulated_rounds_give_the_formula(alpha, count=40_000, K=6):
    """A z-test of the mean, false alarms 1e-9. The control, the formula for one draft fewer, must fail it (at α = .3
    the sixth draft hardly matters)."""
    accepted = toss(np.full(count, alpha), K, (count,), np.random.default_rng(0))
    error = accepted.std() / count**.5
    limit = NormalDist().inv_cdf(1 - 1e-9 / 2)
    assert abs(accepted.mean() + 1 - tokens_per_round(alpha, K)) < limit * error
    if alpha > .5: assert abs(accepted.mean() + 1 - tokens_per_round(alpha, K - 1)) > limit * error


# --- The best K -------------------------------------------------------------------------------------------------------

def test_best_K_of_known_cases():
    assert best_K([.7, .8, .9], .1).tolist() == [4, 6, 10]
    assert best_K([.7, .8, .9], .02).tolist() == [8, 11, 19]
    assert best_K(.3, .3) == 0 and best_K(.31, .3) == 1 and best_K(1, .5) == 64
    assert best_K(1, .9, K_max=7) == 7 and type(best_K(.5, .1)) is int
    assert best_K(.8, 0, v=[1, 9, 9], K_max=3) == 1  # the measured v decides
    assert best_K(.8, 0, v=[2, 2, 9], K_max=3) == 2
    assert best_K(.2, 0, v=1.3) == 0                 # free drafts, dear verification
    assert best_K(np.array([[.5], [.9]]), np.array([0, .1, .6])).shape == (2, 3)


@settings(deadline=None)
@given(probabilities, costs)
def test_improvement_if_and_only_if_alpha_exceeds_c(alpha, c):
    "Leviathan et al. 2023, corollary 3.9, away from the rounding at α = c."
    K = best_K(alpha, c)
    if abs(alpha - c) > 1e-6: assert (K > 0) == (alpha > c)
    if K: assert walltime_factor(alpha, K, c) >= (1 + alpha) / (1 + c) - 1e-9


@settings(max_examples=examples(25), deadline=None)
@given(st.floats(.05, .95), st.floats(.02, 1))
def test_best_K_beats_every_other(alpha, c):
    "Against the exact sum, term by term."
    def speed(K): return float(sum(Fraction(alpha)**i for i in range(K + 1)) / (1 + K * Fraction(c)))
    speeds = [speed(K) for K in range(65)]
    assert speeds[best_K(alpha, c)] == pytest.approx(max(speeds), abs=1e-9)


@pytest.mark.parametrize("alpha", [.15, .4, .7, .9])
@pytest.mark.parametrize("b", [.1, .3, .5])
def test_what_a_draft_adds_to_the_verification_acts_like_c(alpha, b, c=.05):
    "With v(K) = 1 + K b, drafting pays if and only if α > b + c, and the best K is that of b + c."
    v = 1 + b * np.arange(1, 65)
    assert (best_K(alpha, c, v) > 0) == (alpha > b + c)
    assert best_K(alpha, c, v) == best_K(alpha, b + c)


@settings(deadline=None)
@given(probabilities, costs, st.floats(1, 3))
def test_one_draft_pays_if_alpha_exceeds_c_and_what_v_adds(alpha, c, v):
    if abs(alpha - (c + v - 1)) > 1e-9: assert (walltime_factor(alpha, 1, c, v) > 1) == (alpha > c + v - 1)


# --- Measured costs ---------------------------------------------------------------------------------------------------

class Clock:
    "Moves only when told to."
    now = 0.0
    def perf_counter(self): return self.now


class Pretender:
    "A forward over n tokens takes base + n seconds, and twice that in every slow turn."
    vocab_size, context_length = 8, 100
    def __init__(self, clock, base): self.clock, self.base, self.length, self.forwards = clock, base, 0, []
    def new_cache(self, capacity): return Held(capacity)
    def forward(self, ids, cache, last=None):
        assert ids.max() < self.vocab_size and cache.length + ids.shape[1] <= cache.capacity
        self.forwards.append((cache.length, ids.shape[1]))
        cache.length += ids.shape[1]
        self.clock.now += self.base + ids.shape[1]
        return torch.zeros(1, last or ids.shape[1], self.vocab_size)


class Held:
    def __init__(self, capacity): self.capacity, self.length = capacity, 0
    def rollback(self, length): self.length = length


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(speedup, "time", clock)
    return clock


def test_costs_are_ratios_of_forwards(clock):
    target, draft = Pretender(clock, 9), Pretender(clock, 1)
    np.testing.assert_allclose(verification_cost(target, [1, 3, 10], repeats=4), [1.1, 1.3, 2.0])
    np.testing.assert_allclose(verification_cost(target, [0, 1], repeats=4, plain=Pretender(clock, 4)), [2.0, 2.2])
    assert forward_seconds([(target, 2), (draft, 2)], held=7, repeats=3).tolist() == [[11, 3]] * 3


def test_drafting_is_counted_per_drafted_token_in_plain_steps():
    one = SimpleNamespace(draft_time_total_ms=60.0, num_drafted=2)
    other = SimpleNamespace(draft_time_total_ms=20.0, num_drafted=6)
    assert draft_cost(iter([one, other]), step=.05) == pytest.approx(.2)  # 80 ms for 8 tokens: 10 ms each, of 50 ms
    assert draft_cost([SimpleNamespace(draft_time_total_ms=3.0, num_drafted=0)], step=.05) == 0 == draft_cost([], .05)


def test_forwards_take_turns_from_the_same_cache(clock):
    target = Pretender(clock, 9)
    forward_seconds([(target, 1), (target, 4)], held=7, repeats=2)
    assert target.forwards == [(0, 7), (0, 7), *[(7, 1), (7, 4)] * 3]


# --- Bad input --------------------------------------------------------------------------------------------------------

def test_in_range_passes_what_is_in_range():
    np.testing.assert_array_equal(in_range([1, 2], "K", 1, whole=True), [1.0, 2.0])
    assert in_range(0, "α", 0, 1) == 0 and in_range(1, "α", 0, 1) == 1


@pytest.mark.parametrize("wrong", [0, 2.5, float("nan"), float("inf"), "four", None, [1, 0], True], ids=repr)
def test_in_range_refuses_what_is_no_whole_number(wrong):
    with pytest.raises(InputError, match="K must be a whole number of at least 1, not"):
        in_range(wrong, "K", 1, whole=True)


@pytest.mark.parametrize("limits, words", [
    (dict(low=0, high=1, strict=True), "between 0 and 1"), (dict(low=0, high=1), "from 0 to 1"),
    (dict(low=0, strict=True), "above 0"), (dict(low=0), "of at least 0"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_in_range_names_the_range(limits, words):
    with pytest.raises(InputError, match=f"confidence must be a number {words}, not -1"):
        in_range(-1, "confidence", **limits)


def timed(n, held=64):
    "Time one forward over n tokens of a model with a context of 100."
    return forward_seconds([(Pretender(Clock(), 1), n)], held=held)


@pytest.mark.parametrize("call, words", calls(
    (tokens_per_round, (-.1, 2), "α must be a number from 0 to 1"),
    (tokens_per_round, ([.5, 1.1], 2), "α must be"),
    (tokens_per_round, (float("nan"), 2), "α must be"),
    (tokens_per_round, ("much", 2), "α must be"),
    (tokens_per_round, (None, 2), "α must be"),
    (tokens_per_round, (.5, 0), "K must be a whole number of at least 1"),
    (tokens_per_round, (.5, 1.5), "K must be"),
    (tokens_per_round, (.5, float("inf")), "K must be"),
    (walltime_factor, (.5, 2, -1), "c must be a number of at least 0"),
    (walltime_factor, (.5, 2, 0, 0), "v must be"),
    (walltime_factor, (.5, -2, 0), "K must be"),
    (operations_factor, (.5, 2, -1), "ĉ must be"),
    (operations_factor, (.5, "two", 0), "K must be"),
    (best_K, (2, .1), "α must be"),
    (best_K, (.5, -.1), "c must be"),
    (best_K, (.5, .1, 1, 0), "K_max must be"),
    (best_K, (.5, .1, [1, 2]), "K_max = 64"),
    (draft_cost, ([], 0), "The time of a step must be a number above 0"),
    (timed, (1, 100), "context of 100"),
    (timed, (0,), "new tokens must be"),
    (forward_seconds, ([], 0), "held and repeats"),
    (forward_seconds, ([], 64, 0), "held and repeats"),
    (forward_seconds, ([], 64, 1.5), "held and repeats"),
))
def test_bad_input_is_named(call, words):
    with pytest.raises(InputError, match=words): call()
