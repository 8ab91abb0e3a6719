"""block: exact laws of whole rounds, no draft that keeps fewer tokens, what it does on tensors, and mutants that these
tests catch."""
from fractions import Fraction as F
from itertools import product

import numpy as np
import pytest
import torch

from specdec.engine.block import block_residual, block_verification, block_weights
from specdec.errors import InputError, NumericalError
from specdec.lossless.check import check_verify
from specdec.lossless.enumerate import exact_distribution
from specdec.lossless.proof import Language, language_pairs, round_error, sampled, sure
from specdec.sampling import SeededRandom
from specdec.verify import acceptance_probability, delta, greedy_match, residual, speculative_sampling

SIZES = ((1, 4), (2, 3), (3, 2), (3, 3), (4, 2))
P, Q = (np.stack([np.array([F(n, 3) for n in row], dtype=object)] * 5) for row in ((1, 2), (2, 1)))  # of the paper


def errors(rule, draft=sampled): # of many small cases
    return [round_error(rule, p, q, K, V, case, draft).error
            for K, V in SIZES for seed in range(3) for case, p, q in language_pairs(V, seed)]


def accepted(rule, K): # exact, in the paper's example
    def count(rng): return rule(P[:K + 1], Q[:K], [rng.categorical(Q[0]) for _ in range(K)], rng)[0]
    return sum(n * weight for n, weight in exact_distribution(count).items())


# --- The law

@pytest.mark.parametrize("draft", [sampled, sure])
def test_rounds_have_the_distribution_of_the_target(draft):
    found = errors(block_verification, draft)
    assert len(found) == 60 and all(error == 0 and isinstance(error, F) for error in found)


def test_any_verifier_is_satisfied():
    report = check_verify(block_verification, sizes=[(1, 3), (2, 3)], none=True)
    assert report.lossless and report.promise == "always"
    assert check_verify(block_verification, sizes=[(2, 2)], seeds=2, route="tensors").lossless


def stops_early(q, K, rng):
    "Ends a draft after the first token 0: in view of what was drawn, and keeping it."
    tokens, rows = sampled(q, K, rng)
    n = tokens.index(0) + 1 if 0 in tokens else K
    return tokens[:n], rows[:n]


def test_drafts_that_stop_early_in_view_of_their_tokens():
    assert max(errors(block_verification, stops_early)) == 0


def test_the_example_of_the_paper():
    assert accepted(speculative_sampling, 2) == F(10, 9) and accepted(block_verification, 2) == F(11, 9)


@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_a_prefix_stays_with_its_weight(K):
    for tokens in product(range(2), repeat=K):
        distribution = exact_distribution(lambda rng: block_verification(P[:K + 1], Q[:K], tokens, rng)[0])
        # the weight counts what other ends of the draft keep, too: on average over the tokens that follow
        for i in range(K + 1):
            kept = sum(
                np.prod(Q[0][list(ends)])
                * sum(w for n, w in exact_distribution(lambda rng: block_verification(
                    P[:K + 1], Q[:K], [*tokens[:i], *ends], rng)[0]).items() if n >= i)
                for ends in product(range(2), repeat=K - i)
            )
            assert kept == block_weights(P, Q, tokens)[i]
        assert sum(distribution.values()) == 1


def test_no_draft_keeps_fewer_than_token_by_token():
    gained = 0
    for seed in range(10):
        for _, p, q in language_pairs(3, seed):
            for tokens in product(range(3), repeat=3):
                rows_p, rows_q = (np.stack([f(tokens[:i]) for i in range(n)]) for f, n in ((p, 4), (q, 3)))
                if any(row[token] == 0 for row, token in zip(rows_q, tokens)): continue
                chance = F(1)
                for i, token in enumerate(tokens):
                    chance *= min(rows_p[i][token] / rows_q[i][token], 1)
                    weight = block_weights(rows_p, rows_q, tokens)[i + 1]
                    assert chance <= weight <= 1
                    gained += weight > chance
    assert gained > 10


def test_one_token_and_sure_drafts_are_the_ratio_test():
    "The joint law of how many stay and what follows; so the rule leaves them to that one, and keeps its draws."
    def distribution(rule, *given): return exact_distribution(lambda rng: rule(*given, rng))
    for seed in range(5):
        for _, p, q in language_pairs(3, seed):
            for token in np.flatnonzero(q(())):
                one = np.stack([p(()), p((token,))]), q(())[None], [int(token)]
                assert distribution(mutant(), *one) == distribution(speculative_sampling, *one)
            tokens, _ = sure(q, 3, None)
            several = np.stack([p(tuple(tokens[:i])) for i in range(4)]), None, tokens
            assert distribution(mutant(), *several) == distribution(speculative_sampling, *several)


def test_where_they_are_the_same_the_draws_are():
    for seed in range(20):
        p, q, tokens = tensors(seed)
        for given in ((p[:2], q[:1], tokens[:1]), (p, None, tokens), (p[:1], q[:0], [])):
            assert block_verification(*given, SeededRandom(seed)) == speculative_sampling(*given, SeededRandom(seed))


# --- Mutants

def rows_of(p, q, tokens): return [delta(p[i], t) for i, t in enumerate(tokens)] if q is None else q


def right(p, q, tokens, n, w):
    return w * p[n] if n == len(tokens) else block_residual(p[n], rows_of(p, q, tokens)[n], w)


def mutant(weights=block_weights, chance=lambda w, m: 1 if w == 1 else m / (m + 1 - w), left=right,
           drawn=lambda left, p: left if left.any() else p, first=False):
    "The rule with one part replaced."
    def rule(p, q, tokens, rng):
        ws = weights(p, q, tokens)
        order = range(len(tokens) + 1) if first else range(len(tokens), -1, -1)
        for n in order:
            rest = left(p, q, tokens, n, ws[n])
            if n == (len(tokens) if first else 0) or rng.bernoulli(chance(ws[n], rest.sum())):
                return n, rng.categorical(drawn(rest, p[n]))
    return rule


def uncapped_in_the_middle(p, q, tokens):
    product_, weights = F(1), [1]
    for i, token in enumerate(tokens):
        product_ *= p[i][token] / rows_of(p, q, tokens)[i][token]
        weights.append(min(product_, 1))
    return weights


def capped_ratios(p, q, tokens):
    weights = [F(1)]
    for i, token in enumerate(tokens):
        weights.append(weights[-1] * min(p[i][token] / rows_of(p, q, tokens)[i][token], 1))
    return weights


def old_residual(p, q, tokens, n, w):
    return w * p[n] if n == len(tokens) else residual(p[n], rows_of(p, q, tokens)[n])


def row_before(p, q, tokens, n, w):
    return right(p, q, tokens, n, w) if n == len(tokens) or not n else right(p, q, tokens, n - 1, w)


def bonus_from_residual(p, q, tokens, n, w):
    if n < len(tokens): return right(p, q, tokens, n, w)
    return residual(p[n], rows_of(p, q, tokens)[n - 1])


MUTANTS = {
    "no cap between": mutant(weights=uncapped_in_the_middle),
    "capped ratios": mutant(weights=capped_ratios),
    "the weight as the chance": mutant(chance=lambda w, m: w),
    "chance without 1 - w": mutant(chance=lambda w, m: 1 if m else 0),
    "chance m / (m + 1)": mutant(chance=lambda w, m: 1 if w == 1 else m / (m + 1)),
    "the old residual": mutant(left=old_residual),
    "residual without the weight": mutant(left=lambda p, q, tokens, n, w: right(p, q, tokens, n, 1)),
    "residual of the row before": mutant(left=row_before),
    "the bonus from a residual": mutant(left=bonus_from_residual),
    "replacement from p": mutant(drawn=lambda left, p: p),
    "the shortest first": mutant(first=True),
}


def test_the_rule_from_parts_is_right(): assert max(errors(mutant())) == max(errors(mutant(), sure)) == 0


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name): assert max(errors(MUTANTS[name])) > 0


# --- On tensors

def tensors(seed, K=4, V=50):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(K + 1, V, generator=generator)
    q = (logits + torch.randn(K + 1, V, generator=generator)).softmax(-1)[:K]
    tokens = torch.multinomial(q, 1, generator=generator)[:, 0].tolist()
    return logits.softmax(-1), q, tokens


def test_as_many_stay_as_the_weights_say():
    "In float32, over many drafts; token by token would keep fewer."
    kept, promised, before = 0.0, 0.0, 0.0
    for seed in range(500):
        p, q, tokens = tensors(seed)
        kept += block_verification(p, q, tokens, SeededRandom(seed))[0]
        promised += sum(float(w) for w in block_weights(p, q, tokens)[1:])
        before += float(torch.stack([(p[i][t] / q[i][t]).clamp(max=1) for i, t in enumerate(tokens)]).cumprod(0).sum())
    assert abs(kept - promised) < (promised - before) / 2 and promised > 1.1 * before


def test_p_equal_to_q_keeps_everything_and_nothing_in_common_nothing():
    for seed in range(50):
        p, _, _ = tensors(seed)
        tokens = torch.multinomial(p[:4], 1)[:, 0].tolist()
        assert block_verification(p, p[:4], tokens, SeededRandom(seed))[0] == 4
    apart, q = torch.tensor([[.5, .5, 0, 0]] * 3), torch.tensor([[0, 0, .5, .5]] * 2)
    for seed in range(20):
        num_accepted, next_token = block_verification(apart, q, [2, 3], SeededRandom(seed))
        assert num_accepted == 0 and next_token < 2


def test_rows_that_sum_to_more_than_one_by_rounding():
    "Nothing in common behind the first token: then all of its weight is left, and a little more."
    more = 1 / 3 + 1e-7
    p = torch.tensor([[.3, .7, 0, 0, 0], [0, 0, more, more, more], [1, 0, 0, 0, 0]])
    q = torch.tensor([[.6, .4, 0, 0, 0], [.5, .5, 0, 0, 0]])
    kept = {block_verification(p, q, [0, 1], SeededRandom(seed)) for seed in range(40)}
    assert kept == {(0, 1), (1, 2), (1, 3), (1, 4)}


class Unlucky(SeededRandom):
    "Every coin that can fail does."
    def bernoulli(self, prob):
        assert 0 <= prob <= 1
        return prob == 1


def test_where_rounding_leaves_nothing_it_is_drawn_from_p():
    "The draft has a little more of every token, so nothing is left where its tokens failed."
    p = torch.tensor([[.4999, .4999], [.5, .5], [.5, .5]])
    found = {block_verification(p, torch.full((2, 2), .5), [0, 0], Unlucky(seed)) for seed in range(20)}
    assert found == {(0, 0), (0, 1)}


@pytest.mark.parametrize("rows", ["q", None])
def test_at_temperature_zero_it_is_the_greedy_match(rows):
    for best in product(range(3), repeat=3):
        p = torch.eye(3)[list(best)]
        q = torch.tensor([[.5, .25, .25], [.25, .25, .5]]) if rows else None
        for tokens in product(range(3), repeat=2):
            assert block_verification(p, q, tokens, SeededRandom(0)) == greedy_match(p, q, tokens, None)


def test_a_plain_step_is_a_draw_from_p():
    distribution = exact_distribution(lambda rng: block_verification(P[:1], None, [], rng))
    assert distribution == {(0, 0): F(1, 3), (0, 1): F(2, 3)}


@pytest.mark.parametrize("q, tokens, words", [
    (torch.tensor([[1., 0, 0]]), [1], "probability 0 in the q"),
    (torch.tensor([[1., 0, 0]]), [3], "outside the target's vocabulary"),
    (None, [-1], "outside the target's vocabulary"),
], ids=["not drawn from q", "outside", "outside, sure"])
def test_a_draft_that_can_not_be(q, tokens, words):
    with pytest.raises(InputError, match=words):
        block_verification(torch.full((2, 3), 1 / 3), q, tokens, SeededRandom(0))


def test_what_is_no_distribution_is_an_error():
    with pytest.raises(NumericalError):
        block_verification(torch.full((2, 2), float("nan")), None, [0], SeededRandom(0))


def test_one_token_keeps_alpha():
    p, q = Language(4, "p")(()), Language(4, "q")(())
    def kept(rng): return block_verification(np.stack([p, p]), q[None], [rng.categorical(q)], rng)[0]
    assert exact_distribution(kept).get(1, 0) == acceptance_probability(p, q)
