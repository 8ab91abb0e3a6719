"""rules: the exact law of each, in fractions; what they decide on tensors; what they call themselves; and mutants that
these tests catch."""
import json
import math
from fractions import Fraction as F
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from fastcore.test import test_eq as same
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from helpers import examples
from specdec.engine.lossy import LossyLenience, LossyTypical, distribution_of_token, entropy
from specdec.errors import InputError, NumericalError
from specdec.lossless.check import check_verify
from specdec.lossless.enumerate import exact_distribution
from specdec.lossless.proof import language_pairs, one_round, round_error, sampled, sure
from specdec.sampling import SamplingParams, SeededRandom
from specdec.verify import (
    acceptance_probability,
    default_rule,
    delta,
    greedy_match,
    is_promised,
    promises,
    residual,
    sample_and_match,
    speculative_sampling,
)

LOSSY = [LossyLenience(F(1, 2)), LossyLenience(0.25), LossyTypical(0.3, 0.5), LossyTypical(F(1, 4), F(1, 2))]
LENIENCES = (F(1), F(3, 4), F(1, 2), F(1, 10))


def row(*numbers) -> np.ndarray: # [V] of Fraction
    return np.array([F(n, sum(numbers)) for n in numbers], dtype=object)

def tv(a, b): return abs(a - b).sum() / 2

P, Q = row(1, 1, 3, 11, 4), row(3, 2, 6, 6, 3)
SOME = [
    (P, Q), (Q, P), (P, P), (row(1, 0, 0), row(0, 1, 1)), (row(1, 2, 1), row(0, 0, 1)), (row(0, 0, 1), row(1, 2, 1)),
    (row(8, 4, 2, 1, 1), row(1, 1, 2, 4, 8)),
]


def enumerated(rule, p, q, draft=True): # acceptance, and the law [V] of the first token
    "Every branch of one draft token tried by the rule; a sure draft where `draft` is a token."
    def program(rng):
        token = rng.categorical(q) if draft is True else draft
        num_accepted, next_token = rule(np.stack([p, p]), q[None] if draft is True else None, [token], rng)
        return num_accepted, token if num_accepted else next_token
    joint = exact_distribution(program)
    distribution = np.array([joint.get((0, x), F(0)) + joint.get((1, x), F(0)) for x in range(len(p))], dtype=object)
    return sum((w for (accepted, _), w in joint.items() if accepted), F(0)), distribution


# --- sample and match

def errors(rule, draft=sampled): # of many small cases
    return [
        round_error(rule, p, q, K, V, case, draft).error
        for K, V, seed in ((1, 2, 0), (1, 4, 1), (2, 3, 2), (3, 2, 3))
        for case, p, q in language_pairs(V, seed)
    ]

@pytest.mark.parametrize("draft", [sampled, sure])
def test_sample_and_match_is_lossless(draft):
    found = errors(sample_and_match, draft)
    assert len(found) == 16 and all(error == 0 and isinstance(error, F) for error in found)

def test_sample_and_match_accepts_the_product():
    for p, q in SOME:
        accepted, distribution = enumerated(sample_and_match, p, q)
        assert accepted == (p * q).sum() <= acceptance_probability(p, q) and (distribution == p).all()
        for token in range(len(p)):
            accepted, distribution = enumerated(sample_and_match, p, q, draft=token)
            assert accepted == p[token] and (distribution == p).all()

def draws_again(p, q, tokens, rng):
    for i, token in enumerate(tokens):
        if rng.categorical(p[i]) != token: return i, rng.categorical(p[i])
    return len(tokens), rng.categorical(p[len(tokens)])

def forgets_the_bonus_row(p, q, tokens, rng):
    for i, token in enumerate(tokens):
        own = rng.categorical(p[i])
        if own != token: return i, own
    return len(tokens), rng.categorical(p[len(tokens) - 1])

def compares_with_the_last_row(p, q, tokens, rng):
    for i, token in enumerate(tokens):
        own = rng.categorical(p[-1])
        if own != token: return i, own
    return len(tokens), rng.categorical(p[len(tokens)])

@pytest.mark.parametrize("mutant", [draws_again, forgets_the_bonus_row, compares_with_the_last_row])
def test_mutants_of_sample_and_match_are_caught(mutant):
    assert max(errors(mutant)) > 0


# --- drafts that share the target's noise

class Noise:
    "The n-th draw takes the noise of the n-th place of the text, by the target or by a drafter that starts at `place`."
    def __init__(self, seed, place=0): self.seed, self.place = seed, place
    def categorical(self, weights):
        self.place += 1
        noise = np.random.default_rng([self.seed, self.place]).exponential(size=len(weights))
        return int((weights.astype(float) / noise).argmax())

def written(rule, p, q, K, seed, shared=True, length=12):
    "The text of the loop; every round's draft is drawn with the target's noise, or with noise of its own."
    text, rng = (), Noise(seed)
    while len(text) < length:
        drawing, tokens = Noise(seed if shared else seed + 1, len(text)), []
        for _ in range(K): tokens.append(drawing.categorical(q((*text, *tokens))))
        rows = np.stack([p((*text, *tokens[:i])) for i in range(K + 1)])
        accepted, following = rule(rows, None, tokens, rng)
        text = (*text, *tokens[:accepted], following)
        if rule is sample_and_match: assert rng.place == len(text)  # one number of the stream for each token
    return text[:length]

def test_whatever_drafts_the_text_is_what_the_targets_own_draws_make_it():
    caught = 0
    for seed, (_, p, q) in enumerate(language_pairs(3, 1)):
        plain = written(sample_and_match, p, q, 0, seed)
        for K, drafter, shared in product((1, 2, 5), (p, q, lambda text: row(1, 1, 1)), (True, False)):
            assert written(sample_and_match, p, drafter, K, seed, shared) == plain
            caught += written(draws_again, p, drafter, K, seed, shared) != plain  # two numbers where it rejects
    assert caught > 10

PAGE = Path(__file__).parents[1] / "nbs" / "lossless" / "03_rules.ipynb"

def page(ids, mutate=("", "")):
    "What those cells of the page define, run with their own checks, a piece of their text replaced."
    sources = {cell["id"]: "".join(cell["source"]) for cell in json.loads(PAGE.read_text(encoding="utf-8"))["cells"]}
    source = "\n".join(sources[name] for name in ids)
    assert mutate[0] in source
    space = dict(np=np, Fraction=F, language_pairs=language_pairs, tv=tv, test_eq=same, p=P, q=Q)
    exec(source.replace(*mutate), space)
    return space

GUMBEL = ["6a1f0c04", "6a1f0c06"]

@pytest.fixture(scope="module")
def gumbel(): return page(GUMBEL)

weights = st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any)

@settings(max_examples=examples(100), deadline=None)
@given(p=weights, q=weights)
def test_how_often_gumbel_coupled_draws_agree(gumbel, p, q):
    "The sum of the paper, the exact table of both draws, the sorted sums on fractions and on tensors, and the bounds."
    p, q = row(*p), row(*q)
    joint, found, far = gumbel["shared_draws"](p, q), gumbel["gumbel_agreement"](p, q), tv(p, q)
    assert (joint >= 0).all() and (joint.sum(1) == p).all() and (joint.sum(0) == q).all()
    said = [v for v in range(4) if p[v] * q[v]]
    assert found == joint.trace() == sum(1 / sum(max(p[x] / p[v], q[x] / q[v]) for x in range(4)) for v in said)
    assert max((1 - far) / (1 + far), (p * q).sum()) <= found <= acceptance_probability(p, q) == 1 - far
    tensors = (torch.from_numpy(x.astype(float)) for x in (p, q))
    assert gumbel["gumbel_agreement"](*tensors).item() == pytest.approx(float(found), abs=1e-12)
    assert gumbel["gumbel_agreement"](p, p) == 1

def test_the_table_of_gumbel_coupled_draws_is_what_drawing_gives(gumbel):
    "χ² over all pairs of words: a right table is blamed once in a million runs, and draws that share nothing always."
    n, expected = 200_000, gumbel["shared_draws"](P, Q)
    def p_value(shared):
        noise = np.random.default_rng(0).exponential(size=(2, n, 5))
        a, b = (P.astype(float) / noise[0]).argmax(1), (Q.astype(float) / noise[0 if shared else 1]).argmax(1)
        counts = np.bincount(5 * a + b, minlength=25)
        possible = (expected != 0).ravel()
        if counts[~possible].any(): return 0
        return chisquare(counts[possible], n * expected.ravel()[possible].astype(float)).pvalue
    assert p_value(True) > 1e-6 > p_value(False)

@pytest.mark.parametrize("mutate", [
    ("sum(max(p[x]", "sum(min(p[x]"), ("sum(cut[i:j])", "sum(cut[i:j - 1])"), ("(p.cumsum(0) - p)", "p.cumsum(0)"),
    ("from_here / p + before / q", "from_here / q + before / p"), (".argsort()", ".argsort()[::-1]"),
    ("1 - (q.sum() - q.cumsum(0) + q)", "q.cumsum(0) - q"),
])
def test_the_page_catches_mutants_of_its_formulas(mutate):
    with pytest.raises((AssertionError, ZeroDivisionError)): page(GUMBEL, mutate)


# --- lenience

def lenience_holds(rule, l, p, q) -> bool:
    "What the paper promises, what the module promises, and the formula."
    accepted, distribution = enumerated(rule, p, q)
    formula = LossyLenience(l)
    return (
        sum(distribution) == 1
        and (distribution <= p / l).all()
        and accepted == np.minimum(q, p / l).sum()
        and tv(distribution, p) == accepted - acceptance_probability(p, q)
        and accepted == formula.kept(p, q).sum()
        and (distribution == formula.distribution(p, q)).all()
    )

@pytest.mark.parametrize("l", LENIENCES)
def test_the_distribution_of_lenience(l):
    assert all(lenience_holds(LossyLenience(l), l, p, q) for p, q in SOME)
    for p, q in SOME:
        for token in range(len(p)):
            accepted, distribution = enumerated(LossyLenience(l), p, q, draft=token)
            assert accepted == min(p[token] / l,
                                   1) and (distribution == LossyLenience(l).distribution(p, delta(p, token))).all()

def test_lenience_is_the_ratio_test_at_one_and_lossy_below():
    assert all(error == 0 for error in errors(LossyLenience(1)))
    assert max(errors(LossyLenience(F(1, 2)))) > 0
    # a float is the fraction it is
    assert LossyLenience(0.5).distribution(P, Q).tolist() == LossyLenience(F(1, 2)).distribution(P, Q).tolist()

def lenient(accept=lambda p, q, token, l: p[token] / (l * q[token]), resample=lambda p, q, l: residual(p, q)):
    def make(l):
        def rule(p, q, tokens, rng):
            for i, token in enumerate(tokens):
                if not rng.bernoulli(min(accept(p[i], q[i], token, l), 1)):
                    return i, rng.categorical(resample(p[i], q[i], l))
            return len(tokens), rng.categorical(p[len(tokens)])
        return rule
    return make

def test_mutants_of_lenience_are_caught():
    assert all(lenience_holds(lenient()(l), l, p, q) for l in LENIENCES for p, q in SOME)  # the same by other means
    for mutant in (
        lenient(resample=lambda p, q, l: residual(p, l * q)), lenient(resample=lambda p, q, l: p),
        lenient(accept=lambda p, q, token, l: l * p[token] / q[token]),
        lenient(accept=lambda p, q, token, l: p[token] / q[token] + 1 - l),
        lenient(accept=lambda p, q, token, l: p[token] / l),
    ):
        assert not all(lenience_holds(mutant(l), l, p, q) for l in LENIENCES for p, q in SOME)


# --- typical acceptance

def typical_distribution(p, q, epsilon, delta): # acceptance, law; written another way than the module's
    H = -sum(float(x) * math.log(x) for x in p if x)
    passed = [x > min(epsilon, delta * math.exp(-H)) for x in p]
    rejected = sum((b for b, ok in zip(q, passed) if not ok), F(0))
    return 1 - rejected, np.array([a * rejected + (b if ok else 0) for a, b, ok in zip(p, q, passed)], dtype=object)

PARAMETERS = [(0.3, 0.5), (0.09, 0.3), (0.9, 0.9), (0.25, 3.0), (0.05, 1.0)]

def typical_holds(rule, epsilon, delta, p, q) -> bool:
    (accepted, distribution), (formula_accepted, formula) = enumerated(rule, p, q), typical_distribution(
        p, q, epsilon, delta)
    return accepted == formula_accepted and (distribution == formula).all()

@pytest.mark.parametrize("epsilon, d", PARAMETERS)
def test_the_distribution_of_typical_acceptance(epsilon, d):
    rule = LossyTypical(epsilon, d)
    for p, q in SOME:
        assert typical_holds(rule, epsilon, d, p, q)
        assert (rule.distribution(p, q) == typical_distribution(p, q, epsilon, d)[1]).all() and rule.kept(
            p, q).sum() == typical_distribution(
            p, q, epsilon, d
        )[0]
        for token in range(len(p)):
            accepted, distribution = enumerated(rule, p, q, draft=token)
            assert (
                accepted in (0, 1)
                and (distribution == (delta(p, token) if accepted else p)).all()
                and (distribution == rule.distribution(p, delta(p, token))).all()
            )
        if d < 1: assert enumerated(rule, p, q, draft=int(p.argmax()))[0] == 1  # the target's likeliest always passes

def test_typical_acceptance_is_lossy():
    assert max(errors(LossyTypical(0.3, 0.5))) > 0 and max(errors(LossyTypical(0.3, 0.5), sure)) > 0

def test_a_token_exactly_at_the_threshold_is_not_accepted():
    p = row(1, 3)  # exp(-H) > 1/2, so the threshold is ε = 1/4
    assert LossyTypical(0.25, 1.0).threshold(p) == 0.25
    assert enumerated(LossyTypical(0.25, 1.0), p, p, draft=0)[0] == 0
    assert enumerated(LossyTypical(math.nextafter(0.25, 0), 1.0), p, p, draft=0)[0] == 1

def test_entropy_in_nats():
    assert entropy(row(1, 1, 1, 1)) == pytest.approx(math.log(4)) and entropy(row(0, 1, 0)) == 0
    assert entropy(torch.tensor([.5, .25, .25, 0.])) == pytest.approx(1.5 * math.log(2))
    assert entropy(torch.full((49152,), 1 / 49152)) == pytest.approx(math.log(49152), abs=1e-6)
    assert (
        LossyTypical(0.9, 0.5).threshold(row(1, 1, 1, 1)) == pytest.approx(0.125)
        and LossyTypical(0.1, 0.5).threshold(row(1, 1, 1, 1)) == 0.1
    )


def typical(
    threshold=lambda p, e, d: min(e, d * math.exp(-entropy(p))), passes=lambda x, t: x > t, resample=lambda p, q: p
):
    def make(epsilon, delta):
        def rule(p, q, tokens, rng):
            for i, token in enumerate(tokens):
                if not passes(p[i][token], threshold(p[i], epsilon, delta)):
                    return i, rng.categorical(resample(p[i], q[i]))
            return len(tokens), rng.categorical(p[len(tokens)])
        return rule
    return make


def test_mutants_of_typical_acceptance_are_caught():
    cases = [(e, d, p, q) for (e, d), (p, q) in product([*PARAMETERS, (0.25, 1.0)], [*SOME, (row(1, 3), row(3, 1))])]
    assert all(typical_holds(typical()(e, d), e, d, p, q) for e, d, p, q in cases)
    for mutant in (
        typical(threshold=lambda p, e, d: max(e, d * math.exp(-entropy(p)))),
        typical(threshold=lambda p, e, d: min(e, d * 2 ** -entropy(p))), typical(threshold=lambda p, e, d: e),
        typical(threshold=lambda p, e, d: d * math.exp(-entropy(p))),
        typical(threshold=lambda p, e, d: min(e, d * math.exp(entropy(p)))), typical(passes=lambda x, t: x >= t),
        typical(resample=residual),
    ):
        assert not all(typical_holds(mutant(e, d), e, d, p, q) for e, d, p, q in cases)


# --- all rules

def test_no_rule_accepts_more_than_its_distance_allows():
    "TV(law, p) ≥ acceptance - α for every rule; the ratio test and lenience have equality."
    for p, q in SOME:
        alpha = acceptance_probability(p, q)
        for rule in (speculative_sampling, sample_and_match, *LOSSY):
            accepted, distribution = enumerated(rule, p, q)
            assert sum(distribution) == 1 and tv(distribution, p) >= accepted - alpha
            if isinstance(rule, LossyLenience) or rule is speculative_sampling: assert tv(distribution,
                                                                                          p) == accepted - alpha

def round_by_formula(rule, p, q, K): # text → probability
    """What one round emits: at each place the kept part goes on, and the rest of the token's law ends the round; after
    K comes the bonus."""
    alive, distribution = {(): F(1)}, {}
    for _ in range(K):
        before, alive = alive, {}
        for text, weight in before.items():
            kept, token_distribution = rule.kept(p(text), q(text)), rule.distribution(p(text), q(text))
            for x in range(len(kept)):
                alive[(*text, x)] = weight * kept[x]
                distribution[(*text, x)] = weight * (token_distribution[x] - kept[x])
    for text, weight in alive.items():
        for x, w in enumerate(p(text)): distribution[(*text, x)] = weight * w
    return {text: w for text, w in distribution.items() if w}

@pytest.mark.parametrize("rule", LOSSY)
def test_whole_rounds_follow_the_distribution_of_each_token(rule):
    differ = False
    for K, V, seed in ((1, 3, 0), (2, 3, 1), (3, 3, 2), (2, 4, 3)):
        for _, p, q in language_pairs(V, seed):
            found = exact_distribution(lambda rng: one_round(rule, p, q, K, rng))
            assert found == round_by_formula(rule, p, q, K)
            differ |= found != exact_distribution(lambda rng: one_round(speculative_sampling, p, q, K, rng))
    assert differ

def test_a_laxer_parameter_accepts_more():
    for p, q in SOME:
        by_lenience = [LossyLenience(l).kept(p, q).sum() for l in LENIENCES]
        by_threshold = [LossyTypical(e, e ** 0.5).kept(p, q).sum() for e in (0.5, 0.25, 0.09, 0.01)]
        assert (
            by_lenience == sorted(by_lenience)
            and by_threshold == sorted(by_threshold)
            and by_lenience[0] == acceptance_probability(p, q)
        )

def test_distribution_of_token_shares_out_what_is_not_kept():
    assert distribution_of_token(row(1, 1) / 2, row(1, 3)).tolist() == [F(3, 8), F(5, 8)]

rows = st.lists(st.integers(0, 5), min_size=4, max_size=4).filter(any)


@settings(max_examples=examples(60), deadline=None)
@given(
    p=st.tuples(rows, rows, rows), q=st.tuples(rows, rows), seed=st.integers(0, 10**6), certain=st.booleans(),
    rule=st.sampled_from([sample_and_match, *LOSSY]),
)
def test_tensors_and_fractions_decide_alike_on_the_same_draws(p, q, seed, certain, rule):
    p, q = np.stack([row(*r) for r in p]), np.stack([row(*r) for r in q])
    p_tensor, q_tensor = (torch.tensor(x.astype(float), dtype=torch.float64) for x in (p, q))
    class Both(SeededRandom):
        "Fractions are drawn with the same uniforms as tensors."
        def categorical(self, weights):
            return super().categorical(
                weights if isinstance(weights, torch.Tensor) else torch.from_numpy(weights.astype(float))
            )

    drawing = SeededRandom(seed + 1)
    tokens = [drawing.categorical(r) for r in q_tensor]
    found = [rule(a, None if certain else b, tokens, Both(seed)) for a, b in ((p, q), (p_tensor, q_tensor))]
    assert found[0] == found[1]


def test_formulas_on_tensors_are_those_on_fractions():
    for (p, q), rule in product(SOME, LOSSY):
        p_tensor, q_tensor = (torch.tensor(x.astype(float), dtype=torch.float64) for x in (p, q))
        for name in ("kept", "distribution"):
            assert torch.allclose(
                getattr(rule, name)(p_tensor, q_tensor), torch.tensor(getattr(rule, name)(p, q).astype(float)),
                atol=1e-12,
            )

@pytest.mark.parametrize("rule", [sample_and_match, LossyLenience(0.1), LossyTypical(0.05, 0.2)])
def test_at_temperature_zero_every_rule_is_the_greedy_match(rule):
    for best in product(range(3), repeat=3):
        p = torch.eye(3)[list(best)]
        q = torch.tensor([[.5, .25, .25], [.25, .25, .5]])
        for tokens in product(range(3), repeat=2):
            expected = greedy_match(p, q, tokens, None)
            assert rule(p, q, tokens, SeededRandom(0)) == expected == rule(p, None, tokens, SeededRandom(0))

def test_a_plain_step_is_a_draw_from_p():
    for rule in (sample_and_match, *LOSSY):
        assert exact_distribution(lambda rng: rule(P[None], None, [], rng)) == {(0, x): w for x, w in enumerate(P)}

PROMISES = [
    pytest.param(speculative_sampling, "always", id="speculative_sampling"),
    pytest.param(sample_and_match, "always", id="sample_and_match"),
    pytest.param(LossyLenience(1), "always", id="lenience of 1"),
    pytest.param(greedy_match, "greedy", id="greedy_match"),
    *(pytest.param(rule, "greedy", id=str(rule)) for rule in LOSSY),
]

@pytest.mark.parametrize("rule, said", PROMISES)
def test_what_a_rule_says_of_itself_is_true(rule, said):
    "By enumeration: always, or not always; and at temperature 0, where rows of p are deltas, nothing but p."
    assert rule.lossless == said
    assert check_verify(rule, sizes=[(1, 2), (1, 3), (2, 2)], seeds=2).lossless == (said == "always")
    deltas, q = np.array([[F(i == j) for j in range(3)] for i in range(3)]), np.array([[F(1, 2), F(1, 3), F(1, 6)]] * 2)
    for best in product(range(3), repeat=3):
        for tokens in product(range(3), repeat=2):
            accepted = next((i for i in range(2) if tokens[i] != best[i]), 2)
            for rows in (q, None):
                distribution = exact_distribution(lambda rng: rule(deltas[list(best)], rows, list(tokens), rng))
                assert distribution == {(accepted, best[accepted]): 1}

@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5)], ids=repr)
def test_parameters_of_numpy_and_torch_become_plain_ones(number):
    rules = LossyLenience(number), LossyTypical(number, number)
    assert rules == (LossyLenience(0.5), LossyTypical(0.5, 0.5)) and str(rules[0]) == "LossyLenience(l=0.5)"

def test_names_say_lossy():
    for rule in LOSSY:
        assert (
            type(rule).__name__.startswith("Lossy")
            and "lossy" in type(rule).__doc__
            and "Lossy" in type(rule).__call__.__doc__
        )
    assert str(LossyLenience(0.5)) == "LossyLenience(l=0.5)" and str(LossyLenience(F(1, 2))) == "LossyLenience(l=1/2)"
    assert str(LossyTypical(0.09, 0.3)) == "LossyTypical(epsilon=0.09, delta=0.3)"
    assert "lossless" in sample_and_match.__doc__.lower()
    with pytest.raises(AttributeError): LOSSY[0].l = 1  # a rule can't change after the result was labelled

@pytest.mark.parametrize("make, words", [
    *[(lambda l=l: LossyLenience(l), "lenience l must be") for l in (0, -0.5, 1.01, float("nan"), "0.5", True, None)],
    *[(lambda e=e: LossyTypical(e, 0.3), "epsilon must be") for e in (0, 1, -1, float("nan"), "x", True)],
    *[(lambda d=d: LossyTypical(0.1, d), "delta must be") for d in (0, -1, float("inf"), float("nan"), "x", True)]])
def test_parameters_that_make_no_rule_are_input_errors(make, words):
    with pytest.raises(InputError, match=words): make()

def test_what_is_no_distribution_is_an_error():
    with pytest.raises(InputError, match="probability 0 in the q"):
        LossyLenience(0.5)(np.stack([P, P]), row(0, 1, 1, 1, 1)[None], [0], SeededRandom(0))
    bad = torch.tensor([[float("nan"), .5], [.5, .5]])
    for rule in (sample_and_match, LossyLenience(0.5), LossyTypical(0.3, 0.5)):
        with pytest.raises(NumericalError): rule(bad, None, [0], SeededRandom(0))


@pytest.mark.parametrize("said, cold, warm", [
    ("always", True, True), ("greedy", True, False), ("never", False, False),
])
def test_a_promise_holds_at_the_temperatures_that_it_names(said, cold, warm):
    rule = promises(lossless=said)(lambda: 0)
    assert [is_promised(rule, t) for t in (0, 0.0, 1e-9, 1)] == [cold, cold, warm, warm]
    assert is_promised(lambda: 0, 0) is None


def test_the_default_rule_is_greedy_at_temperature_0_only_and_matches_what_was_certain():
    rules = [default_rule(SamplingParams(t), q) for q in (torch.ones(1, 3) / 3, None) for t in (0, 1e-9, 1)]
    assert rules == [greedy_match, speculative_sampling, speculative_sampling,
                     greedy_match, sample_and_match, sample_and_match]


def test_a_lenience_from_a_tensor_is_kept_as_a_number():
    rule = LossyLenience(torch.tensor(.5))
    assert type(rule.l) is float and str(rule) == str(LossyLenience(.5))
    typical = LossyTypical(torch.tensor(.25), torch.tensor(.5))
    assert [type(typical.epsilon), type(typical.delta)] == [float, float] and str(typical) == str(LossyTypical(.25, .5))


@pytest.mark.parametrize("said", ["Always", True, ["always"]], ids=repr)
def test_a_rule_that_declares_something_else_is_told(said):
    def rule(p, q, tokens, rng): return 0, 0
    rule.lossless = said
    with pytest.raises(InputError, match="always.*greedy.*never"): is_promised(rule, 0)
