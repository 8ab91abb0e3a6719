"""candidates: exact laws for every way to draw, the optimum against all sets and against a flow, and mutants that these
tests catch."""
from fractions import Fraction as F
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from specdec.errors import InputError
from specdec.lossless.candidates import (
    best_acceptance,
    draw_distinct,
    draw_independent,
    recursive_rejection,
    take_likeliest,
)
from specdec.lossless.enumerate import Enumerator, exact_distribution
from specdec.lossless.proof import language_pairs
from specdec.sampling import SeededRandom
from specdec.verify import acceptance_probability, residual, speculative_sampling

DRAWS = {"independent": draw_independent, "distinct": draw_distinct, "likeliest": take_likeliest}
# p, q, and a number of candidates: with zeros, without, equal, apart
PAIRS = [(p(()), q(()), n) for V, n, seed in product((2, 3, 4), (1, 2, 3), range(4))
         for _, p, q in language_pairs(V, seed)]


def outcome(rule, draw, p, q, n): # exact
    "How often a candidate is accepted, and the law [V] of the token."
    def program(rng):
        tokens, rows = draw(q, n, rng)
        which, token = rule(p, rows, tokens, rng)
        assert which == len(tokens) or tokens[which] == token
        return which < len(tokens), token
    joint = exact_distribution(program)
    distribution = [joint.get((True, x), 0) + joint.get((False, x), 0) for x in range(len(p))]
    return sum(w for (accepted, _), w in joint.items() if accepted), distribution


def worst(rule, draw): # total variation
    return max(sum(abs(np.array(outcome(rule, draw, p, q, n)[1]) - p)) / 2 for p, q, n in PAIRS)


# --- The rule

@pytest.mark.parametrize("draw", DRAWS)
def test_the_token_has_the_distribution_of_the_target(draw): assert worst(recursive_rejection, DRAWS[draw]) == 0


def test_one_candidate_is_the_ratio_test():
    for p, q, _ in PAIRS:
        for token in np.flatnonzero(q):
            given = [int(token)]
            ours = exact_distribution(lambda rng: recursive_rejection(p, q[None], given, rng)[0])
            theirs = exact_distribution(lambda rng: speculative_sampling(np.stack([p, p]), q[None], given, rng)[0])
            assert ours.get(0, 0) == theirs.get(1, 0)


def test_no_candidate_is_a_draw_from_p():
    p = PAIRS[0][0]
    assert exact_distribution(lambda rng: recursive_rejection(p, None, [], rng)) == {
        (0, x): w for x, w in enumerate(p) if w}


def test_certain_candidates_are_accepted_with_the_sum_of_their_p():
    for p, q, n in PAIRS:
        assert outcome(recursive_rejection, take_likeliest, p, q, n)[0] == p[take_likeliest(q, n)[0]].sum()


def forgets_the_residual(p, q, tokens, rng):
    for i, token in enumerate(tokens):
        if rng.bernoulli(min(p[token] / (1 if q is None else q[i][token]), 1)): return i, token
    return len(tokens), rng.categorical(residual(p, q[0]))


def best_first(p, q, tokens, rng):
    order = sorted(range(len(tokens)), key=lambda i: -p[tokens[i]])
    which, token = recursive_rejection(p, q[order], [tokens[i] for i in order], rng)
    return (order[which] if which < len(tokens) else which), token


def not_normalised(p, q, tokens, rng):
    for i, token in enumerate(tokens):
        if rng.bernoulli(min(p[token] / q[i][token], 1)): return i, token
        p = residual(p, q[i])
    return len(tokens), rng.categorical(p)


def rest_from_p(p, q, tokens, rng):
    which, token = recursive_rejection(p, q, tokens, rng)
    return which, rng.categorical(p) if which == len(tokens) else token


def first_row_for_all(p, q, tokens, rng):
    return recursive_rejection(p, q[:1][[0] * len(tokens)], tokens, rng)


MUTANTS = {
    "each against p": (forgets_the_residual, "independent"),
    "the best first": (best_first, "independent"),
    "the best of different ones first": (best_first, "distinct"),
    "a residual that is not a distribution": (not_normalised, "independent"),
    "the rest from p": (rest_from_p, "distinct"),
    "different ones, reported as independent": (first_row_for_all, "distinct"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    rule, draw = MUTANTS[name]
    assert worst(rule, DRAWS[draw]) > 0


# --- Drawing

def test_what_is_drawn():
    q = np.array([F(1, 2), F(0), F(1, 3), F(1, 6)], dtype=object)
    assert exact_distribution(lambda rng: tuple(draw_independent(q, 2, rng)[0])) == {
        (a, b): q[a] * q[b] for a, b in product(range(4), repeat=2) if q[a] * q[b]}
    pairs = exact_distribution(lambda rng: tuple(draw_distinct(q, 2, rng)[0]))
    assert pairs == {(a, b): q[a] * q[b] / (1 - q[a]) for a, b in product(range(4), repeat=2) if a != b and q[a] * q[b]}
    tokens, rows = draw_distinct(q, 9, Enumerator())
    assert tokens == [0, 2, 3] and [row.sum() for row in rows] == [1, 1, 1]  # fewer, where q has fewer
    assert list(q) == [F(1, 2), 0, F(1, 3), F(1, 6)]                        # and q is as it was
    assert take_likeliest(q, 3) == ([0, 2, 3], None)


def test_tensors_are_drawn_and_decided_as_well():
    "In float32: the law of the token by counting, 2,000 times; and one step aside, which is seen."
    p, q = torch.tensor([.5, .2, .2, .1]), torch.tensor([.1, .2, .3, .4])
    for draw in (draw_independent, draw_distinct):
        rng = SeededRandom(0)
        counts = torch.zeros(4)
        for _ in range(2000):
            tokens, rows = draw(q, 2, rng)
            assert rows.shape == (2, 4) and torch.allclose(rows.sum(-1), torch.ones(2))
            counts[recursive_rejection(p, rows, tokens, rng)[1]] += 1
        squared = ((counts - 2000 * p) ** 2 / (2000 * p)).sum()  # chi-squared with 3 degrees of freedom
        aside = 2000 * torch.tensor([.4, .3, .2, .1])
        assert squared < 30 < ((counts - aside) ** 2 / aside).sum()
    assert take_likeliest(q, 2) == ([3, 2], None) and take_likeliest(q, 9)[0] == [3, 2, 1, 0]


# --- The optimum

def over_all_sets(p, q, n):
    sets = [list(chosen) for chosen in product([False, True], repeat=len(p))]
    return 1 + min(p[chosen].sum() - q[chosen].sum() ** n for chosen in sets)


def by_flow(p, q, n): # a float
    "The largest share of drawn candidates and texts that can be matched."
    drawn = list(product(range(len(q)), repeat=n))
    edges = [(i, x) for i, tokens in enumerate(drawn) for x in set(tokens)]
    from_drawn = [[i == j for i, _ in edges] for j in range(len(drawn))]
    to_text = [[x == y for _, x in edges] for y in range(len(p))]
    limits = [float(np.prod(q[[*tokens]])) for tokens in drawn] + [float(w) for w in p]
    return -linprog([-1] * len(edges), A_ub=np.array(from_drawn + to_text, float), b_ub=limits).fun


def test_the_optimum_is_that_of_all_sets_and_of_the_flow():
    for p, q, n in PAIRS:
        best = best_acceptance(p, q, n)
        assert best == over_all_sets(p, q, n) and outcome(recursive_rejection, draw_independent, p, q, n)[0] <= best
        assert n > 1 or best == acceptance_probability(p, q)
    for p, q, n in PAIRS[::9]: assert by_flow(p, q, n) == pytest.approx(float(best_acceptance(p, q, n)), abs=1e-7)


def sorted_the_other_way(p, q, n):
    order = (q / (p + F(1, 10**6))).argsort()
    return 1 + min((p[order].cumsum(0) - q[order].cumsum(0) ** n).min(), 0)


def times_instead_of_power(p, q, n):
    order = (p / (q + F(1, 10**6))).argsort()
    return 1 + min((p[order].cumsum(0) - q[order].cumsum(0) / n).min(), 0)


@pytest.mark.parametrize("wrong", [sorted_the_other_way, times_instead_of_power])
def test_another_formula_is_caught(wrong):
    assert any(wrong(p, q, n) != over_all_sets(p, q, n) for p, q, n in PAIRS)


def test_the_optimum_on_tensors():
    for p, q, n in PAIRS[::5]:
        tensors = (torch.tensor(x.astype(float)) for x in (p, q))
        assert float(best_acceptance(*tensors, n)) == pytest.approx(float(best_acceptance(p, q, n)), abs=1e-12)


# --- Bad input

@pytest.mark.parametrize("call", [
    partial(draw_independent, rng=SeededRandom(0)), partial(draw_distinct, rng=SeededRandom(0)), take_likeliest,
    lambda q, n: best_acceptance(q, q, n),
], ids=["independent", "distinct", "likeliest", "optimum"])
@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2"], ids=repr)
def test_a_number_of_candidates_that_is_none(call, n):
    with pytest.raises(InputError, match="n, the candidates,.*at least 1"): call(torch.tensor([.5, .5]), n)


@pytest.mark.parametrize("q, tokens, words", [
    (torch.tensor([[1., 0, 0]]), [1], "probability 0 in the q"),
    (torch.tensor([[.5, .5, 0]]), [3], "outside the target's vocabulary"),
    (None, [-1], "outside the target's vocabulary"),
], ids=["not drawn from q", "outside", "outside, sure"])
def test_a_candidate_that_can_not_be(q, tokens, words):
    with pytest.raises(InputError, match=words):
        recursive_rejection(torch.full((3,), 1 / 3), q, tokens, SeededRandom(0))
