"""Intervals over prompts: against slow resampling, against exact laws, and against the tempting wrong unit."""
import numpy as np
import pytest
from scipy.stats import binom

from specdec.bench.bootstrap import band, estimate, median, ratio, resamples
from specdec.errors import InputError


@pytest.mark.parametrize("n", [1, 2, 5, 6, 15])
def test_the_median_of_every_draw_is_that_of_numpy(n):
    values = np.random.default_rng(n).normal(size=n)
    slow = [np.median(np.repeat(values, row.astype(int))) for row in resamples(n)]
    np.testing.assert_allclose(median(resamples(n), values), slow)


def test_the_ratio_of_every_draw_is_that_of_what_was_drawn():
    above, below = np.array([3., 1, 4, 1, 5]), np.array([2., 7, 1, 8, 2])
    slow = [np.repeat(above, row.astype(int)).sum() / np.repeat(below, row.astype(int)).sum() for row in resamples(5)]
    np.testing.assert_allclose(ratio(resamples(5), above, below), slow)


def test_draws_are_of_as_many_prompts_and_the_same_at_every_call():
    assert (resamples(7).sum(1) == 7).all() and resamples(7) is resamples(7)
    assert abs(resamples(7).mean(0) - 1).max() < .1  # no prompt is favoured


@pytest.mark.parametrize("n", [7, 15])
def test_the_interval_of_a_median_has_the_ends_that_its_exact_law_gives(n):
    """The bootstrap's median is at most the k-th smallest value if more than half of n draws are among the k smallest
    ones, a binomial: its quantiles are known. Two thousand draws may be a value off where the law's step is close."""
    values = np.sort(np.random.default_rng(0).normal(size=n))
    law = np.array([binom.sf((n - 1) // 2, n, k / n) for k in range(1, n + 1)])  # P(median ≤ k-th)
    found = estimate(median, values)
    for end, share in ((found.low, .025), (found.high, .975)):
        place, exact = int(np.argmin(abs(values - end))), int(np.argmax(law >= share))
        assert abs(place - exact) <= (abs(law[exact] - share) < .02 or abs(law[exact - 1] - share) < .02)


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
