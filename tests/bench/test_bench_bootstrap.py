"""Intervals over prompts: against slow resampling, against exact laws, and against the tempting wrong unit."""
import numpy as np
import pytest
from scipy.stats import binom, bootstrap

from specdec.bench.report import band, estimate, median, ratio, weights_of
from specdec.errors import InputError


def draws(n): return np.random.default_rng(n).integers(0, n, (500, n))


@pytest.mark.parametrize("n", [1, 2, 5, 6, 15])
def test_the_median_of_every_draw_is_that_of_numpy(n):
    values, drawn = np.random.default_rng(n).normal(size=n), draws(n)
    np.testing.assert_allclose(median(weights_of(drawn), values), np.median(values[drawn], axis=1))


def test_the_ratio_of_every_draw_is_that_of_what_was_drawn():
    above, below, drawn = np.array([3., 1, 4, 1, 5]), np.array([2., 7, 1, 8, 2]), draws(5)
    slow = above[drawn].sum(1) / below[drawn].sum(1)
    np.testing.assert_allclose(ratio(weights_of(drawn), above, below), slow)


def test_draws_are_counted_each_by_itself():
    drawn = draws(7)
    for row, counts in zip(drawn, weights_of(drawn)): assert [*counts] == [*np.bincount(row, minlength=7)]


def test_an_interval_is_scipys_and_the_same_at_every_call():
    values = np.random.default_rng(0).normal(size=9)
    found = bootstrap((values,), np.median, n_resamples=2000, method="percentile",
                      random_state=np.random.default_rng(0)).confidence_interval
    for _ in range(2):
        known = estimate(median, values)
        assert (known.low, known.high) == pytest.approx((found.low, found.high))


@pytest.mark.parametrize("n", [7, 15])
def test_the_interval_of_a_median_has_the_ends_that_its_exact_distribution_gives(n):
    """The bootstrap's median is at most the k-th smallest value if more than half of n draws are among the k smallest
    ones, a binomial: its quantiles are known. Two thousand draws may be a value off where the law's step is close."""
    values = np.sort(np.random.default_rng(0).normal(size=n))
    distribution = np.array([binom.sf((n - 1) // 2, n, k / n) for k in range(1, n + 1)])  # P(median ≤ k-th)
    found = estimate(median, values)
    for end, share in ((found.low, .025), (found.high, .975)):
        place, exact = int(np.argmin(abs(values - end))), int(np.argmax(distribution >= share))
        assert abs(place - exact) <= (abs(distribution[exact] - share) < .02
                                      or abs(distribution[exact - 1] - share) < .02)


def test_intervals_over_prompts_hold_and_over_runs_do_not():
    """150 measurements of 15 prompts with five alike runs each. At 88 % or less, an interval that keeps 93 % would be
    seen once in a hundred; the seed is fixed."""
    rng, by_prompt, by_run = np.random.default_rng(3), 0, 0
    for _ in range(150):
        speedups = np.exp(.3 * rng.standard_normal((15, 1)) + .02 * rng.standard_normal((15, 5)))
        for found, right in (
            (estimate(median, np.median(speedups, 1)), True), (estimate(median, speedups.ravel()), False),
        ):
            held = found.low <= 1 <= found.high
            by_prompt, by_run = by_prompt + (held and right), by_run + (held and not right)
    assert by_prompt / 150 > .88 > .75 > by_run / 150


@pytest.mark.parametrize("n, known", [(1, False), (4, False), (5, True)])
def test_too_few_prompts_have_a_figure_and_no_interval(n, known):
    found = estimate(median, np.arange(n) + 1.0)
    assert (found.low is not None) == known == ("to" in str(found)) and found.prompts == n
    assert found.excludes(0) == known and not found.excludes(found.value)


def test_nothing_gives_nothing():
    assert estimate(median, np.array([])) is None
    assert estimate(ratio, np.zeros(6), np.zeros(6)) is None


def test_draws_without_anything_to_divide_by_are_left_out():
    found = estimate(ratio, np.array([0, 0, 0, 0, 3.]), np.array([0, 0, 0, 0, 4.]))
    assert (found.value, found.low, found.high) == (.75, .75, .75)


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(InputError, match="each of the 5 prompts"): estimate(ratio, np.ones(5), np.ones(4))


def test_a_band_is_the_interval_at_each_point():
    rng = np.random.default_rng(0)
    above, below = rng.integers(0, 20, (8, 3)), np.full((8, 3), 20)
    for i, point in enumerate(zip(*band(above, below))):
        found = estimate(ratio, above[:, i], below[:, i])
        np.testing.assert_allclose(point, (found.value, found.low, found.high))
    value, low, high = band(above[:4], below[:4])
    assert (low == value).all() and (high == value).all()
