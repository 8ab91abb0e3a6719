"""The speed-up formulas against exact fractions and the papers' tables; the estimator of α by simulation, each check with a negative control.

Every random test has a fixed seed; the false-alarm rate is what it would be under a fresh one."""
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from scipy.stats import binom, chi2

import specdec.speedup as speedup
from specdec.core import InputError, Round, RoundStatistics
from specdec.speedup import (AlphaEstimate, alpha_by_position, alpha_from, best_K, design_effect, draft_cost, estimate_alpha, forward_seconds, operations_factor,
                             speedup_of_rounds, tokens_from_positions, tokens_per_round, verification_cost, walltime_factor, wilson_interval)

probabilities, costs, drafts = st.floats(0, 1), st.floats(0, 2), st.integers(1, 40)


class Result(RoundStatistics):
    "Nothing but rounds."
    def __init__(self, rounds): self.rounds = rounds


def make_round(accepted, drafted): return Round([0] * drafted, int(accepted), [0] * (int(accepted) + 1))


def toss(alpha, K, shape, rng):
    "Accepted drafts of rounds whose acceptances are independent, one uniform number a draft: nothing in common with the formulas."
    return (rng.random((*shape, K)) < np.asarray(alpha)[..., None]).cumprod(-1).sum(-1)


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


TABLE_1 = [(.6, 2, 1.53, 1.96), (.7, 3, 1.58, 2.53), (.8, 2, 1.23, 2.44), (.8, 5, 1.63, 3.69), (.9, 2, 1.11, 2.71), (.9, 10, 1.60, 6.86)]
TABLE_2 = [(7, .75, .02, 3.2), (7, .80, .04, 3.3), (7, .82, .11, 2.5), (7, .62, .02, 2.3), (5, .68, .04, 2.4), (3, .71, .11, 2.0),
           (5, .65, .02, 2.4), (5, .73, .04, 2.6), (3, .74, .11, 2.0), (5, .53, .02, 1.9), (3, .55, .04, 1.8), (3, .56, .11, 1.6)]


@pytest.mark.parametrize("alpha, K, operations, speed", TABLE_1)
def test_table_1_of_leviathan(alpha, K, operations, speed):
    assert f"{operations_factor(alpha, K, 0):.2f}" == f"{operations:.2f}" and f"{walltime_factor(alpha, K, 0):.2f}" == f"{speed:.2f}"


@pytest.mark.parametrize("K, alpha, c, expected", TABLE_2)
def test_table_2_of_leviathan(K, alpha, c, expected):
    assert abs(walltime_factor(alpha, K, c) - expected) <= .07
    assert walltime_factor(alpha - .005, K, c + .005) - .05 <= expected <= walltime_factor(alpha + .005, K, c - .005) + .05


def test_table_2_would_notice_a_wrong_formula():
    "Without the bonus token, or with K + 1 draft steps, the table does not come out."
    def off(formula): return sum(abs(formula(alpha, K, c) - expected) > .07 for K, alpha, c, expected in TABLE_2)
    assert off(walltime_factor) == 0
    assert off(lambda alpha, K, c: (tokens_per_round(alpha, K) - 1) / (1 + K * c)) == len(TABLE_2)
    assert off(lambda alpha, K, c: tokens_per_round(alpha, K) / (1 + (K + 1) * c)) >= 8


@pytest.mark.parametrize("alpha", [.3, .7, .95])
def test_simulated_rounds_give_the_formula(alpha, count=40_000, K=6):
    "A z-test of the mean, false alarms 1e-9. The control, the formula for one draft fewer, must fail it (at α = .3 the sixth draft hardly matters)."
    accepted = toss(np.full(count, alpha), K, (count,), np.random.default_rng(0))
    error = accepted.std() / count**.5
    limit = NormalDist().inv_cdf(1 - 1e-9 / 2)
    assert abs(accepted.mean() + 1 - tokens_per_round(alpha, K)) < limit * error
    if alpha > .5: assert abs(accepted.mean() + 1 - tokens_per_round(alpha, K - 1)) > limit * error


# --- The best K -------------------------------------------------------------------------------------------------------

def test_best_K_of_known_cases():
    assert best_K([.7, .8, .9], .1).tolist() == [4, 6, 10] and best_K([.7, .8, .9], .02).tolist() == [8, 11, 19]
    assert best_K(.3, .3) == 0 and best_K(.31, .3) == 1 and best_K(1, .9, K_max=7) == 7 and type(best_K(.5, .1)) is int
    assert best_K(.8, .0, v=[1, 9, 9]  , K_max=3) == 1 and best_K(.8, 0, v=[2, 2, 9], K_max=3) == 2   # the measured v decides
    assert best_K(.2, 0, v=1.3) == 0                                                                   # free drafts, dear verification
    assert best_K(np.array([[.5], [.9]]), np.array([0, .1, .6])).shape == (2, 3)


@settings(deadline=None)
@given(probabilities, costs)
def test_improvement_if_and_only_if_alpha_exceeds_c(alpha, c):
    "Leviathan et al. 2023, corollary 3.9, away from the rounding at α = c."
    K = best_K(alpha, c)
    if abs(alpha - c) > 1e-6: assert (K > 0) == (alpha > c)
    if K: assert walltime_factor(alpha, K, c) >= (1 + alpha) / (1 + c) - 1e-9


@settings(max_examples=25, deadline=None)
@given(st.floats(.05, .95), st.floats(.02, 1))
def test_best_K_beats_every_other(alpha, c):
    "Against the exact sum, term by term."
    speeds = [1.0, *(float(sum(Fraction(alpha)**i for i in range(K + 1)) / (1 + K * Fraction(c))) for K in range(1, 65))]
    assert speeds[best_K(alpha, c)] == pytest.approx(max(speeds), abs=1e-9)


@settings(deadline=None)
@given(probabilities, drafts)
def test_alpha_from_is_the_inverse(alpha, K):
    tau = tokens_per_round(alpha, K)
    assert tokens_per_round(alpha_from(tau, K), K) == pytest.approx(tau, rel=1e-12)


def test_alpha_from_arrays_and_ends():
    np.testing.assert_allclose(alpha_from([1, 2, 3], 2), [0, (5**.5 - 1) / 2, 1], atol=1e-12)   # 1 + α + α² = 2: the golden ratio
    assert isinstance(alpha_from(1.5, 1), float) and alpha_from([[2.0]], [1, 2, 3]).shape == (1, 3)


# --- Estimating α -----------------------------------------------------------------------------------------------------

def coverage(interval, alpha, K=5, count=40, runs=3000, seed=0):
    "Share of runs whose interval holds α."
    accepted = toss(np.full((runs, count), alpha), K, (runs, count), np.random.default_rng(seed))
    low, high = interval(accepted, K)
    return ((low <= alpha) & (alpha <= high)).mean()


def right(accepted, K): return wilson_interval(accepted.sum(-1), np.minimum(accepted + 1, K).sum(-1))
def naive(accepted, K): return wilson_interval(accepted.sum(-1), np.full(len(accepted), K * accepted.shape[1]))


@pytest.mark.parametrize("alpha", [.2, .5, .8, .9, .95])
def test_wilson_interval_covers(alpha, runs=3000):
    "At least 93 % of intervals hold α: of 3,000 runs that promise 95 %, chance gives fewer about once in a million. The naive estimate must fail."
    assert binom.cdf(int(.93 * runs), runs, .95) < 2e-6
    assert coverage(right, alpha) > .93
    assert coverage(naive, alpha) < .5


def test_the_estimate_is_the_maximum_of_the_likelihood():
    rounds = [make_round(a, n) for a, n in [(0, 3), (3, 3), (1, 4), (2, 2), (0, 1), (1, 1)]] + [Round([], 0, [5])]
    def likelihood(alpha): return np.prod([alpha**r.accepted * (1 - alpha)**(r.accepted < len(r.drafted)) for r in rounds], axis=0)
    grid = np.linspace(0, 1, 100_001)
    assert estimate_alpha(rounds).alpha == pytest.approx(grid[np.argmax(likelihood(grid))], abs=1e-5) == pytest.approx(.7, abs=1e-5)


@settings(deadline=None)
@given(st.lists(st.integers(1, 6).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), min_size=1))
@example([(13, 13)])  # Wilson's upper bound is rounded to just below 1
def test_agrees_with_the_statistics_of_a_result(pairs):
    rounds = [make_round(a, n) for a, n in pairs]
    estimate = estimate_alpha(rounds)
    assert estimate.alpha == Result(rounds).alpha >= Result(rounds).acceptance_rate
    assert 0 <= estimate.low <= estimate.alpha <= estimate.high <= 1
    by_position, tried = alpha_by_position(rounds)
    assert estimate.tried == tried.sum() and estimate.accepted == round((by_position * tried).sum())


def test_estimate_as_an_object():
    estimate = estimate_alpha([make_round(1, 3), make_round(1, 1), Round([], 0, [4])], confidence=.9, design_effect=2)
    assert (estimate.accepted, estimate.tried, estimate.confidence, estimate.design_effect) == (2, 3, .9, 2)
    assert (estimate.low, estimate.high) == tuple(map(float, wilson_interval(1, 1.5, .9)))
    assert "α = 0.667" in str(estimate) and "2 of 3" in str(estimate) and "90%" in str(estimate)
    plain = estimate_alpha([make_round(1, 3)])
    assert estimate_alpha([make_round(1, 3)], design_effect=.5) == plain and (plain.low, plain.high, plain.design_effect) == (*map(float, wilson_interval(1, 2)), 1)
    assert estimate == AlphaEstimate(**vars(estimate))


def test_wilson_known_values():
    low, high = wilson_interval(8, 10)                     # Wilson 1927 by hand: (p + z²/2n ± z √(pq/n + z²/4n²)) / (1 + z²/n)
    assert (float(low), float(high)) == (pytest.approx(.490162, abs=1e-6), pytest.approx(.943318, abs=1e-6))
    for confidence in (.5, .95, .999):
        low, high = wilson_interval(np.arange(0, 11), np.full(11, 10), confidence)
        np.testing.assert_allclose(low, 1 - high[::-1], atol=1e-12)
        assert (np.diff(low) > 0).all() and low[0] == 0 and high[-1] == 1


def test_design_effect():
    rng = np.random.default_rng(0)
    independent = [[make_round(a, 6)] for a in toss(np.full(4000, .8), 6, (4000,), rng)]
    assert design_effect(independent) == pytest.approx(1, abs=.12)
    assert design_effect(independent * 3) == pytest.approx(design_effect(independent), rel=1e-3)          # as many again, but no more alike
    assert design_effect([group * 5 for group in independent]) == pytest.approx(5 * design_effect(independent), rel=1e-3)  # everything said five times
    assert design_effect([[make_round(2, 2)], [make_round(1, 1)], []]) == design_effect([[make_round(0, 2)], [make_round(0, 1)]]) == 1.0  # nothing varies
    by_hand = [[make_round(2, 2)], [make_round(0, 2)], [make_round(2, 3)]]     # accepted 2, 0, 2 of 2, 1, 3 tried: α = 2/3, residuals 2/3, −2/3, 0
    assert design_effect(by_hand) == pytest.approx((4 / 9 + 4 / 9) * 3 / 2 / (6 * 2 / 9))
    for groups in [[], [[make_round(1, 2)]], [[make_round(1, 2)], [Round([], 0, [1])]]]:
        with pytest.raises(InputError, match="at least two groups"): design_effect(groups)


def test_design_effect_restores_the_promise(texts=25, rounds=12, K=4, runs=250):
    "Texts with an α of their own: grouped by text at least 87 % of 95 % intervals hold the truth, as independent tries less than 80 %."
    rng = np.random.default_rng(1)
    many = toss(rng.beta(4, 2, (40_000, 1)).repeat(rounds, 1), K, (40_000, rounds), rng)
    truth = many.sum() / np.minimum(many + 1, K).sum()
    held = np.zeros(2)
    for _ in range(runs):
        accepted = toss(rng.beta(4, 2, (texts, 1)).repeat(rounds, 1), K, (texts, rounds), rng)
        groups = [[make_round(a, K) for a in text] for text in accepted]
        flat = sum(groups, [])
        estimates = estimate_alpha(flat), estimate_alpha(flat, design_effect=design_effect(groups))
        held += [e.low <= truth <= e.high for e in estimates]
    assert held[0] / runs < .8 and held[1] / runs > .87


def test_positions_are_exact_without_independence():
    "Rounds with any law at all: τ follows from α by position, not from one α."
    rounds = [make_round(a, 4) for a in [0, 0, 0, 4, 4, 4, 4, 1, 3]]
    by_position, tried = alpha_by_position(rounds)
    assert tried.tolist() == [9, 6, 5, 5] and by_position.tolist() == [6 / 9, 5 / 6, 1.0, 4 / 5]
    tau = [np.mean([min(r.accepted, K) + 1 for r in rounds]) for K in range(1, 5)]
    np.testing.assert_allclose(tokens_from_positions(by_position), tau)
    assert abs(tokens_per_round(estimate_alpha(rounds).alpha, 4) - tau[-1]) > .1        # negative control
    assert alpha_by_position([])[0].size == alpha_by_position([Round([], 0, [1])])[0].size == 0
    np.testing.assert_allclose(tokens_from_positions([.6] * 5), tokens_per_round(.6, range(1, 6)))


def test_positions_survive_censoring(K=8, count=30_000, alpha=.75):
    "Rounds of random lengths: each position's share is binomial given its tries (chi-squared, false alarms 1e-9); the share of all rounds is not."
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, K + 1, count)
    accepted = np.minimum(toss(np.full(count, alpha), K, (count,), rng), lengths)
    by_position, tried = alpha_by_position([make_round(a, n) for a, n in zip(accepted, lengths)])
    statistic = lambda share, n: (n * (share - alpha)**2 / (alpha * (1 - alpha))).sum()
    limit = chi2.isf(1e-9, K)
    assert statistic(by_position, tried) < limit
    drafted = (lengths[:, None] > np.arange(K)).sum(0)
    assert statistic(by_position * tried / drafted, drafted) > limit


@pytest.mark.parametrize("easy, hard", [(.95, .35), (.8, .6), (1, 0)])
def test_mixed_contexts(easy, hard):
    "Jensen by rounds and by tokens, and the pooled estimate above them both."
    for K in range(2, 12):
        tau = (tokens_per_round(easy, K) + tokens_per_round(hard, K)) / 2
        tried = [(tokens_per_round(alpha, K) - alpha**K) for alpha in (easy, hard)]
        pooled = sum((tokens_per_round(alpha, K) - 1) for alpha in (easy, hard)) / sum(tried)
        by_text = 2 / (1 / tokens_per_round(easy, K) + 1 / tokens_per_round(hard, K))
        assert by_text < tokens_per_round((easy + hard) / 2, K) < tau < tokens_per_round(pooled, K) + 1e-12


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
    assert draft_cost(draft, target, held=5) == pytest.approx(.2)
    assert forward_seconds([(target, 2), (draft, 2)], held=7, repeats=3).tolist() == [[11, 3]] * 3


def test_forwards_take_turns_from_the_same_cache(clock):
    target = Pretender(clock, 9)
    forward_seconds([(target, 1), (target, 4)], held=7, repeats=2)
    assert target.forwards == [(0, 7), (0, 7), *[(7, 1), (7, 4)] * 3]


def test_speedup_of_rounds():
    rounds = [Round([7, 8], 1, [7, 9]), Round([], 0, [3]), Round([4, 4], 2, [4, 4, 6])]
    assert speedup_of_rounds(rounds, .25, [1, 5, 1.5]) == 6 / (2 + 1 + 2)
    assert speedup_of_rounds(iter(rounds), 0, [1, 1, 1]) == 2 == Result(rounds).tokens_per_step
    accepted = toss(np.full(40_000, .8), 5, (40_000,), np.random.default_rng(3))
    assert speedup_of_rounds([make_round(a, 5) for a in accepted], .1, np.linspace(1, 2, 6)) == pytest.approx(walltime_factor(.8, 5, .1, v=2), rel=.02)


# --- Bad input --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("call, words", [
    (lambda: tokens_per_round(-.1, 2), "α must be a number from 0 to 1"), (lambda: tokens_per_round([.5, 1.1], 2), "α must be"),
    (lambda: tokens_per_round(float("nan"), 2), "α must be"), (lambda: tokens_per_round("much", 2), "α must be"), (lambda: tokens_per_round(None, 2), "α must be"),
    (lambda: tokens_per_round(.5, 0), "K must be a whole number of at least 1"), (lambda: tokens_per_round(.5, 1.5), "K must be"), (lambda: tokens_per_round(.5, float("inf")), "K must be"),
    (lambda: walltime_factor(.5, 2, -1), "c must be a number of at least 0"), (lambda: walltime_factor(.5, 2, 0, v=0), "v must be"), (lambda: walltime_factor(.5, -2, 0), "K must be"),
    (lambda: operations_factor(.5, 2, -1), "ĉ must be"), (lambda: operations_factor(.5, "two", 0), "K must be"),
    (lambda: best_K(2, .1), "α must be"), (lambda: best_K(.5, -.1), "c must be"), (lambda: best_K(.5, .1, K_max=0), "K_max must be"), (lambda: best_K(.5, .1, v=[1, 2]), "K_max = 64"),
    (lambda: alpha_from(.5, 2), "τ must be a number of at least 1"), (lambda: alpha_from(3.5, 2), "at most K"), (lambda: alpha_from(2, 0), "K must be"),
    (lambda: wilson_interval(3, 2), "More were accepted"), (lambda: wilson_interval(-1, 2), "accepted must be"), (lambda: wilson_interval(0, 0), "tried must be"),
    (lambda: wilson_interval(1, 2, confidence=1), "confidence must be"), (lambda: wilson_interval(1, 2, confidence=95), "confidence must be"),
    (lambda: estimate_alpha([]), "No draft token was tried"), (lambda: estimate_alpha([Round([], 0, [1])]), "No draft token was tried"),
    (lambda: estimate_alpha([make_round(1, 2)], design_effect=-1), "design effect must be"), (lambda: tokens_from_positions([.5, 2]), "α must be"),
    (lambda: speedup_of_rounds([], 0, [1]), "no rounds"), (lambda: speedup_of_rounds([make_round(1, 2)], 0, [1, 1]), "0 to 2 drafts"),
    (lambda: speedup_of_rounds([make_round(1, 2)], -1, [1, 1, 1]), "c must be"), (lambda: speedup_of_rounds([make_round(1, 2)], 0, 1), "v must be a list"),
    (lambda: forward_seconds([(Pretender(Clock(), 1), 1)], held=100), "context of 100"), (lambda: forward_seconds([(Pretender(Clock(), 1), 0)]), "new tokens must be"),
    (lambda: forward_seconds([], held=0), "held and repeats"), (lambda: forward_seconds([], repeats=0), "held and repeats"),
    (lambda: forward_seconds([], repeats=1.5), "held and repeats"),
])
def test_bad_input_is_named(call, words):
    with pytest.raises(InputError, match=words): call()
