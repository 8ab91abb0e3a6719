"""The estimator of α by simulation and by its likelihood, and its intervals; each check with a negative control.

Every random test has a fixed seed; the false-alarm rate is what it would be under a fresh one."""
import functools
import operator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import binom, chi2

from helpers import calls, make_round, result_of, toss
from specdec.bench.alpha import (
    AlphaEstimate,
    alpha_by_position,
    alpha_from,
    design_effect,
    estimate_alpha,
    tokens_from_positions,
    wilson_interval,
)
from specdec.errors import InputError
from specdec.result import Round
from specdec.speedup import tokens_per_round

probabilities, drafts = st.floats(0, 1), st.integers(1, 40)


def coverage(interval, alpha, K=5, count=40, runs=3000, seed=0):
    "Share of runs whose interval holds α."
    accepted = toss(np.full((runs, count), alpha), K, (runs, count), np.random.default_rng(seed))
    low, high = interval(accepted, K)
    return ((low <= alpha) & (alpha <= high)).mean()


def tried_only(accepted, K):
    "Only drafts that were tried count."
    return wilson_interval(accepted.sum(-1), np.minimum(accepted + 1, K).sum(-1))


def all_drafted(accepted, K):
    "The tempting wrong interval."
    return wilson_interval(accepted.sum(-1), np.full(len(accepted), K * accepted.shape[1]))


@pytest.mark.parametrize("alpha", [.2, .5, .8, .9, .95])
def test_wilson_interval_covers(alpha, runs=3000):
    """At least 93 % of intervals hold α: of 3,000 runs that promise 95 %, chance gives fewer about once in a million.
    The naive estimate must fail."""
    assert binom.cdf(int(.93 * runs), runs, .95) < 2e-6
    assert coverage(tried_only, alpha) > .93
    assert coverage(all_drafted, alpha) < .5


def test_the_estimate_is_the_maximum_of_the_likelihood():
    rounds = [make_round(a, n) for a, n in [(0, 3), (3, 3), (1, 4), (2, 2), (0, 1), (1, 1)]] + [Round([], 0, [5])]
    grid, likelihood = np.linspace(0, 1, 100_001), 1.0
    for r in rounds:
        rejected = r.accepted < len(r.drafted)
        likelihood = likelihood * grid**r.accepted * (1 - grid)**rejected
    best = grid[np.argmax(likelihood)]
    assert estimate_alpha(rounds).alpha == pytest.approx(best, abs=1e-5) == pytest.approx(.7, abs=1e-5)


@settings(deadline=None)
@given(st.lists(st.integers(1, 6).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), min_size=1))
@example([(13, 13)])  # Wilson's upper bound is rounded to just below 1
def test_agrees_with_the_statistics_of_a_result(pairs):
    rounds = [make_round(a, n) for a, n in pairs]
    estimate = estimate_alpha(rounds)
    assert estimate.alpha == result_of(rounds).alpha >= result_of(rounds).acceptance_rate
    assert 0 <= estimate.low <= estimate.alpha <= estimate.high <= 1
    by_position, tried = alpha_by_position(rounds)
    assert estimate.tried == tried.sum() and estimate.accepted == round((by_position * tried).sum())


def test_estimate_as_an_object():
    rounds = [make_round(1, 3), make_round(1, 1), Round([], 0, [4])]
    estimate = estimate_alpha(rounds, confidence=.9, design_effect=2)
    assert (estimate.accepted, estimate.tried, estimate.confidence, estimate.design_effect) == (2, 3, .9, 2)
    assert (estimate.low, estimate.high) == tuple(map(float, wilson_interval(1, 1.5, .9)))
    assert "α = 0.667" in str(estimate) and "2 of 3" in str(estimate) and "90%" in str(estimate)
    plain = estimate_alpha([make_round(1, 3)])
    assert estimate_alpha([make_round(1, 3)], design_effect=.5) == plain
    assert (plain.low, plain.high) == tuple(map(float, wilson_interval(1, 2))) and plain.design_effect == 1
    assert estimate == AlphaEstimate(**vars(estimate))


def test_wilson_known_values():
    "Wilson 1927 by hand: (p + z²/2n ± z √(pq/n + z²/4n²)) / (1 + z²/n)."
    low, high = wilson_interval(8, 10)
    assert (float(low), float(high)) == (pytest.approx(.490162, abs=1e-6), pytest.approx(.943318, abs=1e-6))
    for confidence in (.5, .95, .999):
        low, high = wilson_interval(np.arange(0, 11), np.full(11, 10), confidence)
        np.testing.assert_allclose(low, 1 - high[::-1], atol=1e-12)
        assert (np.diff(low) > 0).all() and low[0] == 0 and high[-1] == 1


def test_design_effect_of_independent_tries_is_one():
    rng = np.random.default_rng(0)
    independent = [[make_round(a, 6)] for a in toss(np.full(4000, .8), 6, (4000,), rng)]
    once = design_effect(independent)
    assert once == pytest.approx(1, abs=.12)
    assert design_effect(independent * 3) == pytest.approx(once, rel=1e-3)  # as many again, but no more alike
    five_times = [group * 5 for group in independent]
    assert design_effect(five_times) == pytest.approx(5 * once, rel=1e-3)   # everything said five times


def test_design_effect_by_hand():
    "Accepted 2, 0, 2 of 2, 1, 3 tried: α = 2/3, and the residuals are 2/3, −2/3, 0."
    groups = [[make_round(2, 2)], [make_round(0, 2)], [make_round(2, 3)]]
    assert design_effect(groups) == pytest.approx((4 / 9 + 4 / 9) * 3 / 2 / (6 * 2 / 9))


@pytest.mark.parametrize("groups", [
    pytest.param([[make_round(2, 2)], [make_round(1, 1)], []], id="all accepted"),
    pytest.param([[make_round(0, 2)], [make_round(0, 1)]], id="all rejected"),
])
def test_design_effect_is_one_where_nothing_varies(groups):
    assert design_effect(groups) == 1.0


@pytest.mark.parametrize("groups", [
    pytest.param([], id="none"),
    pytest.param([[make_round(1, 2)]], id="one"),
    pytest.param([[make_round(1, 2)], [Round([], 0, [1])]], id="one with drafts"),
])
def test_design_effect_needs_two_groups(groups):
    with pytest.raises(InputError, match="at least two groups"): design_effect(groups)


def test_design_effect_restores_the_promise(texts=25, rounds=12, K=4, runs=250):
    """Texts with an α of their own: grouped by text at least 87 % of 95 % intervals hold the truth; as independent
    tries less than 80 %."""
    rng = np.random.default_rng(1)
    many = toss(rng.beta(4, 2, (40_000, 1)).repeat(rounds, 1), K, (40_000, rounds), rng)
    truth = many.sum() / np.minimum(many + 1, K).sum()
    held = np.zeros(2)
    for _ in range(runs):
        accepted = toss(rng.beta(4, 2, (texts, 1)).repeat(rounds, 1), K, (texts, rounds), rng)
        groups = [[make_round(a, K) for a in text] for text in accepted]
        flat = functools.reduce(operator.iadd, groups, [])
        estimates = estimate_alpha(flat), estimate_alpha(flat, design_effect=design_effect(groups))
        held += [e.low <= truth <= e.high for e in estimates]
    assert held[0] / runs < .8 and held[1] / runs > .87


def test_positions_are_exact_without_independence():
    "result_of with any law at all: τ follows from α by position, not from one α."
    rounds = [make_round(a, 4) for a in [0, 0, 0, 4, 4, 4, 4, 1, 3]]
    by_position, tried = alpha_by_position(rounds)
    assert tried.tolist() == [9, 6, 5, 5] and by_position.tolist() == [6 / 9, 5 / 6, 1.0, 4 / 5]
    tau = [np.mean([min(r.accepted, K) + 1 for r in rounds]) for K in range(1, 5)]
    np.testing.assert_allclose(tokens_from_positions(by_position), tau)
    assert abs(tokens_per_round(estimate_alpha(rounds).alpha, 4) - tau[-1]) > .1        # negative control
    assert alpha_by_position([])[0].size == alpha_by_position([Round([], 0, [1])])[0].size == 0
    np.testing.assert_allclose(tokens_from_positions([.6] * 5), tokens_per_round(.6, range(1, 6)))


def test_positions_survive_censoring(K=8, count=30_000, alpha=.75):
    """Rounds of random lengths: each position's share is binomial given its tries (chi-squared, false alarms 1e-9); the
    share of all rounds is not."""
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, K + 1, count)
    accepted = np.minimum(toss(np.full(count, alpha), K, (count,), rng), lengths)
    by_position, tried = alpha_by_position([make_round(a, n) for a, n in zip(accepted, lengths)])
    def statistic(share, n): return (n * (share - alpha)**2 / (alpha * (1 - alpha))).sum()
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


@settings(deadline=None)
@given(probabilities, drafts)
def test_alpha_from_is_the_inverse(alpha, K):
    tau = tokens_per_round(alpha, K)
    assert tokens_per_round(alpha_from(tau, K), K) == pytest.approx(tau, rel=1e-12)


def test_alpha_from_arrays_and_ends():
    golden = (5**.5 - 1) / 2  # 1 + α + α² = 2
    np.testing.assert_allclose(alpha_from([1, 2, 3], 2), [0, golden, 1], atol=1e-12)
    assert isinstance(alpha_from(1.5, 1), float) and alpha_from([[2.0]], [1, 2, 3]).shape == (1, 3)


@pytest.mark.parametrize("K", range(1, 33))
def test_tokens_and_rounds_per_token_are_convex_in_alpha(K):
    "What Jensen's inequality needs, of τ and of 1/τ."
    tau = tokens_per_round(np.linspace(0, 1, 401), K)
    assert np.diff(tau, 2).min() > -1e-9 and np.diff(1 / tau, 2).min() > -1e-9


# --- Bad input --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("call, words", calls(
    (alpha_from, (.5, 2), "τ must be a number of at least 1"),
    (alpha_from, (3.5, 2), "at most K"),
    (alpha_from, (2, 0), "K must be"),
    (wilson_interval, (3, 2), "More were accepted"),
    (wilson_interval, (-1, 2), "accepted must be"),
    (wilson_interval, (0, 0), "tried must be"),
    (wilson_interval, (1, 2, 1), "confidence must be"),
    (wilson_interval, (1, 2, 95), "confidence must be"),
    (estimate_alpha, ([],), "No draft token was tried"),
    (estimate_alpha, ([Round([], 0, [1])],), "No draft token was tried"),
    (estimate_alpha, ([make_round(1, 2)], .95, -1), "design effect must be"),
    (tokens_from_positions, ([.5, 2],), "α must be"),
))
def test_bad_input_is_named(call, words):
    with pytest.raises(InputError, match=words): call()
