"""The verify rules: exact laws by enumeration in fractions, properties in float32, counts under the seeded generator.

Every check of a law is also run on broken rules, which it must reject."""
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.stats import chi2, ncx2

from helpers import examples
from specdec.errors import InputError
from specdec.lossless.enumerate import Enumerator, exact_distribution
from specdec.sampling import SeededRandom
from specdec.verify import acceptance_probability, delta, greedy_match, residual, speculative_sampling

# --- Exact laws -------------------------------------------------------------------------------------------------------

class Language:
    """A target p and a draft q with a row of their own for every context, and a sure guess (for delta drafts) for each
    context."""
    def __init__(self, p, q, drafted): self.p, self.q, self.drafted = p, q, drafted

    def draft(self, text, K, rng, sampled):
        "K draft tokens after `text`, and their q (None for sure guesses)."
        tokens, rows = [], []
        for _ in range(K):
            context = (*text, *tokens)
            rows.append(self.q[context])
            tokens.append(rng.categorical(rows[-1]) if sampled else self.drafted[context])
        return tokens, np.stack(rows) if sampled and rows else None

    def emit(self, rule, text, K, rng, sampled):
        "One round."
        tokens, q = self.draft(text, K, rng, sampled)
        p = np.stack([self.p[(*text, *tokens[:i])] for i in range(K + 1)])
        num_accepted, next_token = rule(p, q, tokens, rng)
        return [*tokens[:num_accepted], next_token]

    def write(self, rule, Ks, length, rng, sampled):
        "One round for each K while there is room, completed by the target, cut at `length`."
        text = []
        for K in Ks:
            if len(text) < length: text += self.emit(rule, text, K, rng, sampled)
        while len(text) < length: text.append(rng.categorical(self.p[tuple(text)]))
        return tuple(text[:length])

    def target_distribution(self, length):
        return exact_distribution(lambda rng: self.write(None, [], length, rng, True))


def fractions(weights): return np.array([Fraction(w, sum(weights)) for w in weights], dtype=object)


def contexts(V, depth): return [c for n in range(depth + 1) for c in product(range(V), repeat=n)]


@st.composite
def weights(draw, V):
    "V whole numbers, not all zero; zeros are frequent."
    return draw(st.lists(st.one_of(st.just(0), st.integers(0, 9)), min_size=V, max_size=V).filter(any))


@st.composite
def languages(draw, V, depth):
    where = contexts(V, depth)
    p, q = ({c: fractions(draw(weights(V))) for c in where} for _ in range(2))
    return Language(p, q, {c: draw(st.integers(0, V - 1)) for c in where})


def is_lossless(language, rule, Ks, length, sampled):
    "The check: the exact joint law of the text equals the target's."
    return exact_distribution(lambda rng: language.write(rule, Ks, length, rng,
                                                         sampled)) == language.target_distribution(length)


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("V, K", [(2, 1), (3, 1), (2, 2), (3, 2)])
def test_joint_distribution_of_a_round_is_exact(V, K, sampled):
    @settings(max_examples=examples(12), deadline=None, derandomize=True)
    @given(languages(V, K))
    def check(language): assert is_lossless(language, speculative_sampling, [K], K + 1, sampled)
    check()


@pytest.mark.parametrize("sampled", [True, False])
@settings(max_examples=examples(8), deadline=None, derandomize=True)
@given(language=languages(2, 4))
def test_joint_distribution_of_several_rounds_cut_inside_one(sampled, language):
    assert is_lossless(language, speculative_sampling, [2, 0, 2], 3, sampled)


# --- Rules that are wrong ---------------------------------------------------------------------------------------------

def rule(accept=lambda p, q, token: min(p[token] / q[token], 1), resample=residual, bonus=lambda p, q, tokens: p[-1]):
    "A rule like `speculative_sampling` with one part replaced."
    def verify(p, q, tokens, rng):
        if q is None: q = [delta(row, token) for row, token in zip(p, tokens)]
        for i, token in enumerate(tokens):
            if not rng.bernoulli(accept(p[i], q[i], token)): return i, rng.categorical(resample(p[i], q[i]))
        return len(tokens), rng.categorical(bonus(p, q, tokens))
    return verify


def residual_of_wrong_row(p, q, tokens, rng):
    for i, token in enumerate(tokens):
        if not rng.bernoulli(min(p[i][token] / q[i][token], 1)):
            return i, rng.categorical(residual(p[i + 1], q[i]))
    return len(tokens), rng.categorical(p[-1])


def all_or_nothing(p, q, tokens, rng):
    "One decision for the whole draft."
    ratio = Fraction(1)
    for i, token in enumerate(tokens): ratio *= p[i][token] / q[i][token]
    if rng.bernoulli(min(ratio, 1)): return len(tokens), rng.categorical(p[-1])
    return 0, rng.categorical(residual(p[0], q[0]))


def drops_unlikely_tokens(p, q, tokens, rng):
    "Ends the draft before the first token that the draft itself found unlikely."
    unlikely = [i for i, token in enumerate(tokens) if q[i][token] < Fraction(1, 3)]
    return speculative_sampling(p, q, tokens[:unlikely[0]] if unlikely else tokens, rng)


def last_residual(p, q, tokens): return residual(p[len(tokens) - 1], q[len(tokens) - 1])


MUTANTS = {
    "resample from p": rule(resample=lambda p, q: p),
    "resample from the draft": rule(resample=lambda p, q: q),
    "residual |p - q|": rule(resample=lambda p, q: abs(p - q)),
    "epsilon in the residual": rule(resample=lambda p, q: (p - q).clip(min=0) + Fraction(1, 10 ** 9)),
    "accept the favourite": rule(accept=lambda p, q, token: int(token == p.argmax()), resample=lambda p, q: p),
    "accept if p ≥ q": rule(accept=lambda p, q, token: int(p[token] >= q[token])),
    "accept with min(1, q/p)": rule(accept=lambda p, q, token: min(q[token] / p[token], 1) if p[token] else 1),
    "accept with p": rule(accept=lambda p, q, token: p[token]),
    "accept everything": rule(accept=lambda p, q, token: 1),
    "token 0 is an error": rule(accept=lambda p, q, token: min(p[token] / q[token], 1) if token else 0),
    "bonus from the residual": rule(bonus=last_residual),
    "bonus from the row before": rule(bonus=lambda p, q, tokens: p[-2]),
    "residual of the wrong row": residual_of_wrong_row,
    "all or nothing": all_or_nothing,
    "drops unlikely tokens": drops_unlikely_tokens,
}
DELTA_MUTANTS = {
    "token not struck out": rule(resample=lambda p, q: p),
    "accept everything": rule(accept=lambda p, q, token: 1),
    "accept the favourite": rule(accept=lambda p, q, token: int(token == p.argmax()), resample=lambda p, q: p),
    "bonus from the residual": rule(bonus=last_residual),
    "token 0 is an error": rule(accept=lambda p, q, token: p[token] if token else 0),
}
WHERE = contexts(3, 2)
SOME_LANGUAGE = Language(
    {c: fractions([1 + i % 4, 4 + i % 3, 2 + i % 5]) for i, c in enumerate(WHERE)},
    {c: fractions([5 - i % 3, 1 + i % 2, 3 + i % 4]) for i, c in enumerate(WHERE)},
    {c: i % 3 for i, c in enumerate(WHERE)},
)


def is_lossless_for_every_draft(rule):
    """Sure guesses are not random, so one language shows one first guess only, and a broken rule may be right for that
    one ("accept the favourite" is, where the guess is another token). So all of them are tried."""
    for first in range(3):
        language = Language(SOME_LANGUAGE.p, SOME_LANGUAGE.q, {**SOME_LANGUAGE.drafted, (): first})
        if not is_lossless(language, rule, [2], 3, sampled=False): return False
    return True


@pytest.mark.parametrize("verify", [rule(), speculative_sampling], ids=["from parts", "production"])
def test_right_rules_pass_the_check_of_the_mutants(verify):
    assert is_lossless(SOME_LANGUAGE, verify, [2], 3, sampled=True)
    assert is_lossless_for_every_draft(verify)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name):
    assert not is_lossless(SOME_LANGUAGE, MUTANTS[name], [2], 3, sampled=True)


@pytest.mark.parametrize("name", DELTA_MUTANTS)
def test_delta_mutant_is_caught(name):
    assert not is_lossless_for_every_draft(DELTA_MUTANTS[name])


def test_greedy_draft_that_reports_its_softmax_is_caught():
    "Sure guesses need q = None: with the softmax they were picked from, the law changes."
    class Lying(Language):
        def draft(self, text, K, rng, sampled):
            tokens, _ = super().draft(text, K, rng, sampled=False)
            return tokens, np.stack([self.q[(*text, *tokens[:i])] for i in range(K)])
    greedy = {c: int(row.argmax()) for c, row in SOME_LANGUAGE.q.items()}
    assert not is_lossless(Lying(SOME_LANGUAGE.p, SOME_LANGUAGE.q, greedy), speculative_sampling, [2], 3, sampled=True)
    assert is_lossless(Language(SOME_LANGUAGE.p, SOME_LANGUAGE.q, greedy), speculative_sampling, [2], 3, sampled=False)


def test_a_round_without_bonus_is_lossless_too():
    "A round may end where it likes; leaving the bonus out wastes a token and biases nothing."
    def emit(rng):
        tokens, q = SOME_LANGUAGE.draft((), 2, rng, True)
        p = np.stack([SOME_LANGUAGE.p[tuple(tokens[:i])] for i in range(3)])
        num_accepted, next_token = speculative_sampling(p, q, tokens, rng)
        text = [*tokens[:num_accepted]] if num_accepted == 2 else [*tokens[:num_accepted], next_token]
        while len(text) < 3: text.append(rng.categorical(SOME_LANGUAGE.p[tuple(text)]))
        return tuple(text)
    assert exact_distribution(emit) == SOME_LANGUAGE.target_distribution(3)


def test_textbook_rejection_sampling_is_lossless_and_keeps_less():
    "Scaled until q covers p (von Neumann 1951): the target's law, and fewer tokens kept than α."
    p, q = fractions([1, 1, 3, 10, 3, 2]), fractions([3, 2, 6, 5, 2, 2])
    scale = max(p / q)
    def one_token(rng):
        token = rng.categorical(q)
        if rng.bernoulli(p[token] / (scale * q[token])): return token, True
        return rng.categorical(p), False
    distribution = exact_distribution(one_token)
    assert [distribution.get((x, True), 0) + distribution.get((x, False), 0) for x in range(6)] == list(p)
    assert sum(w for (_, kept), w in distribution.items() if kept) == 1 / scale < acceptance_probability(p, q)


# --- Properties, in fractions and in float32 --------------------------------------------------------------------------

@st.composite
def rounds(draw, K=st.integers(0, 3)):
    "Exact p [K + 1, V], q [K, V], and tokens that q can say."
    V, K = draw(st.integers(2, 6)), draw(K)
    p, q = ([fractions(draw(weights(V))) for _ in range(n)] for n in (K + 1, K))
    tokens = [draw(st.sampled_from(np.flatnonzero(row).tolist())) for row in q]
    return np.stack(p), np.stack(q) if K else np.empty((0, V), dtype=object), tokens


def tensor(x): return torch.tensor(x.astype(float), dtype=torch.float32)


class Played:
    "Plays given uniform numbers, for fractions and tensors alike."
    def __init__(self, uniforms): self.uniforms = iter(uniforms)
    def bernoulli(self, prob): return bool(next(self.uniforms) < prob)
    def categorical(self, weights):
        u = next(self.uniforms) * sum(weights)
        return next(i for i in range(len(weights)) if u < sum(weights[:i + 1]))


class Rejects(SeededRandom):
    "Rejects whatever can be rejected."
    def bernoulli(self, prob): return bool(prob >= 1)


class Accepts(SeededRandom):
    "Accepts whatever can be accepted."
    def bernoulli(self, prob): return bool(prob > 0)


@settings(deadline=None)
@given(rounds(), st.integers(0, 2 ** 32))
def test_seeded_source_gives_tokens_of_the_target(case, seed):
    "Also where p or q have zeros: everything emitted has p > 0."
    p, q, tokens = case
    for rows in (tensor(q), None):
        for source in (SeededRandom(seed), Rejects(seed), Accepts(seed)):
            num_accepted, next_token = speculative_sampling(tensor(p), rows, tokens, source)
            assert 0 <= num_accepted <= len(tokens) and type(next_token) is int
            assert all(p[i][token] > 0 for i, token in enumerate([*tokens[:num_accepted], next_token]))


@settings(deadline=None)
@given(rounds(), st.lists(st.integers(0, 10 ** 6 - 1), min_size=5, max_size=5))
def test_fractions_and_tensors_take_the_same_decisions(case, millionths):
    p, q, tokens = case
    uniforms = [Fraction(n + 1, 1_000_003) for n in millionths]  # a prime: no tie with any of the probabilities
    for rows in (q, None):
        exact = speculative_sampling(p, rows, tokens, Played(uniforms))
        double_p, double_q = (None if x is None else torch.tensor(x.astype(float)) for x in (p, rows))
        doubles = speculative_sampling(double_p, double_q, tokens, Played([float(u) for u in uniforms]))
        assert exact == doubles


@settings(deadline=None)
@given(rounds(), st.integers(0, 2 ** 32))
def test_equal_models_accept_everything(case, seed):
    _, q, tokens = case
    q = tensor(q)
    p = torch.cat([q, torch.full((1, q.shape[1]), 1 / q.shape[1])])
    assert speculative_sampling(p, q, tokens, Rejects(seed))[0] == len(tokens)


@given(st.integers(2, 6), st.data())
def test_disjoint_models_accept_nothing(V, data):
    cut = data.draw(st.integers(1, V - 1))
    p, q = (fractions(data.draw(weights(n))) for n in (cut, V - cut))
    p, q = np.concatenate([p, [0] * (V - cut)]), np.concatenate([[0] * cut, q])
    token = int(np.flatnonzero(q)[0])
    assert acceptance_probability(p, q) == 0 and residual(p, q).tolist() == p.tolist()
    assert speculative_sampling(tensor(np.stack([p, p])), tensor(q)[None], [token], Accepts(0))[0] == 0


@given(rounds(K=st.just(1)))
def test_residual_never_gives_a_token_the_draft_has_enough_of(case):
    p, q, _ = case
    for a, b in ((p[0], q[0]), (tensor(p)[0], tensor(q)[0])):
        weights = residual(a, b)
        if (a - b).clip(min=0).any(): assert not weights[b >= a].any()
        assert (weights >= 0).all() and weights.any()
        assert not weights[a == 0].any()


@settings(max_examples=examples(30), deadline=None)
@given(rounds(K=st.integers(0, 2)), st.randoms(use_true_random=False))
def test_no_token_id_is_special(case, random):
    "New names for the tokens: the exact law of (accepted, following) is the same, renamed."
    p, q, tokens = case
    new = list(range(p.shape[1]))
    random.shuffle(new)             # token i is now called new[i]
    old = np.argsort(new)
    for rows, renamed in ((q, q[:, old]), (None, None)):
        before = exact_distribution(lambda rng: speculative_sampling(p, rows, tokens, rng))
        after = exact_distribution(lambda rng: speculative_sampling(p[:, old], renamed, [new[t] for t in tokens], rng))
        assert after == {(accepted, new[token]): w for (accepted, token), w in before.items()}


@given(st.integers(1, 50), st.integers(0, 2 ** 32))
def test_rounding_may_leave_no_residual(V, seed):
    "p ≤ q everywhere, by rounding: a rejection falls back to p. Also for deltas."
    q = torch.rand(V, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    p = q * (1 - 2 ** -23)
    assert not (p - q).clip(min=0).any() and (p < q).all()
    assert speculative_sampling(torch.stack([p, p]), q[None], [V - 1], Rejects(seed))[0] == 0
    alone = delta(p, V - 1) * (1 - 2 ** -23)
    assert speculative_sampling(torch.stack([alone, alone]), None, [V - 1], Rejects(seed)) == (0, V - 1)


def test_a_token_its_q_cannot_say_is_an_error():
    p, q = torch.full((2, 3), 1 / 3), torch.tensor([[.5, .5, 0.]])
    with pytest.raises(InputError, match="Draft token 0 .id 2. has probability 0"):
        speculative_sampling(p, q, [2], SeededRandom(0))
    with pytest.raises(InputError, match="Draft token 0 .id 2. has probability -0.5"):
        speculative_sampling(p, q - 0.5, [2], SeededRandom(0))
    with pytest.raises(InputError, match="has probability nan"):
        speculative_sampling(p, q * float("nan"), [2], SeededRandom(0))
    for token in (-1, 3):
        for rows in (q, None):
            with pytest.raises(InputError, match="vocabulary of 3"):
                speculative_sampling(p, rows, [token], SeededRandom(0))
    thirds, halves = np.stack([fractions([1, 1, 1])] * 2), fractions([1, 1, 0])[None]
    with pytest.raises(InputError): speculative_sampling(thirds, halves, [2], Enumerator())


@settings(max_examples=examples(60), deadline=None)
@given(rounds(), st.data())
def test_greedy_match_is_speculative_sampling_of_one_hot_p(case, data):
    p, q, tokens = case
    any_token = st.integers(0, p.shape[1] - 1)
    often_drafted = st.one_of(st.sampled_from(tokens), any_token) if tokens else any_token
    best = [data.draw(often_drafted) for _ in p]
    p = np.stack([delta(row, token) for row, token in zip(p, best)])
    expected = greedy_match(p, q, tokens, None)
    for rows in (q, None):
        assert exact_distribution(lambda rng: speculative_sampling(p, rows, tokens, rng)) == {expected: 1}
        rows = None if rows is None else tensor(rows)
        for source in (Rejects(0), Accepts(0), SeededRandom(0)):
            assert speculative_sampling(tensor(p), rows, tokens, source) == expected
            assert greedy_match(tensor(p), rows, tokens, source) == expected


def test_greedy_match_compares_numbers_not_objects():
    "Python keeps one object for each small whole number, and makes new ones for large token ids."
    p = torch.nn.functional.one_hot(torch.tensor([700, 1000, 2]), 1001)
    assert greedy_match(p, None, [int("700"), int("1000")], None) == (2, 2)


def test_whole_numbers_and_empty_drafts():
    "One-hot rows of Python ints work too; with nothing drafted, one token is drawn from p."
    p = np.array([[0, 1, 0], [1, 0, 0]], dtype=object)
    assert exact_distribution(lambda rng: speculative_sampling(p, None, [1], rng)) == {(1, 0): 1}
    assert exact_distribution(lambda rng: speculative_sampling(p, None, [2], rng)) == {(0, 1): 1}
    assert exact_distribution(lambda rng: speculative_sampling(p[:1], None, [], rng)) == {(0, 1): 1}
    assert greedy_match(p, None, [1], None) == (1, 0)


def test_arguments_are_left_alone():
    p, q = torch.tensor([[.5, .3, .2], [.2, .3, .5]]), torch.tensor([[.1, .8, .1]])
    before = p.clone(), q.clone()
    for rows in (q, None): speculative_sampling(p, rows, [1], Rejects(0))
    assert torch.equal(p, before[0]) and torch.equal(q, before[1])


# --- α ----------------------------------------------------------------------------------------------------------------

@settings(max_examples=examples(60), deadline=None)
@given(rounds(K=st.just(1)))
def test_alpha_is_one_minus_total_variation(case):
    "Against the definition of total variation as the largest difference in the probability of an event."
    p, q = case[0][0], case[1][0]
    gap = max(((p - q) * event).sum() for event in product([0, 1], repeat=len(p)))  # over all events
    alpha = acceptance_probability(p, q)
    assert alpha == 1 - gap == sum(map(min, p, q)) == 1 - abs(p - q).sum() / 2
    assert alpha == 1 - (p - q).clip(min=0).sum()
    accepts = exact_distribution(
        lambda rng: speculative_sampling(np.stack([p, p]), q[None], [rng.categorical(q)], rng)[0]
    )
    assert accepts.get(1, 0) == alpha
    assert acceptance_probability(tensor(p), tensor(q)).item() == pytest.approx(float(alpha), abs=1e-6)


@settings(max_examples=examples(20), deadline=None)
@given(rounds(K=st.just(1)))
def test_no_coupling_keeps_more(case):
    "α is the largest P(X = Z) of all pairs with X ~ q and Z ~ p: a linear program over the table of their joint law."
    p, q = case[0][0], case[1][0]
    V = len(p)
    cells = np.eye(V * V).reshape(V, V, -1)  # cells[x, z] picks one entry of the table
    sums = np.concatenate([cells.sum(1), cells.sum(0)])
    same = cells[range(V), range(V)].sum(0)
    best = linprog(-same, A_eq=sums, b_eq=np.concatenate([q, p]).astype(float))
    assert -best.fun == pytest.approx(float(acceptance_probability(p, q)), abs=1e-9)


def test_alpha_of_a_batch_and_of_deltas():
    p = torch.rand(2, 3, 7).softmax(-1)
    assert acceptance_probability(p, p).shape == (2, 3)
    assert torch.allclose(acceptance_probability(p, p), torch.ones(2, 3))
    assert acceptance_probability(p[0, 0], delta(p[0, 0], 4)).item() == pytest.approx(p[0, 0, 4].item())


# --- Counting under the seeded generator ------------------------------------------------------------------------------
# The joint law of four tokens from a round with K = 3, for three tokens, each context with its own p and q. A rule is
# rejected if three independent samples of N rounds all exceed the limit. Each does so with probability below 1e-3 if
# the rule is right (asserted below), so the false-alarm rate is below 1e-9. The power against each broken rule is
# asserted too.

N, LEVEL = 3000, 5e-4
P, Q = (np.array([[Fraction(n, 16) for n in row] for row in rows], dtype=object)
        for rows in ([[8, 4, 4], [1, 12, 3], [5, 0, 11]], [[4, 8, 4], [4, 6, 6], [8, 4, 4]]))
TEXTS = list(product(range(3), repeat=4))


def round_of_three(rule, P, Q, rng):
    "A round with K = 3 after token 0, completed to four tokens by the target."
    text = [0]
    for _ in range(3): text.append(rng.categorical(Q[text[-1]]))
    num_accepted, next_token = rule(P[text], Q[text[:-1]], text[1:], rng)
    text = [*text[:num_accepted + 1], next_token]
    while len(text) < 5: text.append(rng.categorical(P[text[-1]]))
    return tuple(text[1:5])


def probabilities(rule):
    joint = exact_distribution(lambda rng: round_of_three(rule, P, Q, rng))
    return np.array([float(joint.get(text, 0)) for text in TEXTS])


TARGET = np.array([float(np.prod([P[a][b] for a, b in zip((0, *text), text)])) for text in TEXTS])
RARE = N * TARGET < 5


def pool(x): return np.concatenate([x[..., ~RARE], x[..., RARE].sum(-1, keepdims=True)], -1)


EXPECTED = pool(N * TARGET)
FREEDOM = len(EXPECTED) - 1
LIMIT = chi2.isf(LEVEL, FREEDOM)


def statistic(count): return ((pool(count) - EXPECTED) ** 2 / EXPECTED).sum(-1)


def failed_stages(rule, seed):
    for stage in range(3):
        rng, count = SeededRandom(1000 * seed + stage), dict.fromkeys(TEXTS, 0)
        for _ in range(N): count[round_of_three(rule, tensor(P), tensor(Q), rng)] += 1
        count = np.array(list(count.values()))
        if not count[TARGET == 0].any() and statistic(count) <= LIMIT: return stage
    return 3


def test_false_alarm_rate_of_the_count():
    assert EXPECTED.min() >= 5
    simulated = statistic(np.random.default_rng(0).multinomial(N, TARGET, size=50_000))
    assert (simulated > LIMIT).mean() < 1e-3


def test_counted_acceptance_is_alpha():
    "Drafts and coins of the seeded generator; a right program strays more than 5 standard errors twice in a million."
    rounds_each = 4000
    for i, (p, q) in enumerate(zip(P, Q)):
        alpha, rng, after = float(acceptance_probability(p, q)), SeededRandom(1 + i), tensor(np.stack([p, p]))
        kept = sum(speculative_sampling(after, tensor(q)[None], [rng.categorical(tensor(q))], rng)[0]
                   for _ in range(rounds_each))
        assert abs(kept / rounds_each - alpha) < 5 * (alpha * (1 - alpha) / rounds_each) ** .5


def accepted_in_round(P, Q, K, rng): # tables, [V, V]: row i is for what follows token i
    "How many of K tokens drafted after token 0 are accepted."
    text = [0]
    for _ in range(K): text.append(rng.categorical(Q[text[-1]]))
    return speculative_sampling(P[text], Q[text[:-1]], text[1:], rng)[0]


def expected_words(K):
    "1 + Σ P(the first i drafts are accepted), exactly: products of the table min(P, Q)."
    alive, kept, total = delta(P[0], 0), np.minimum(P, Q), 1
    for _ in range(K):
        alive = alive @ kept
        total += alive.sum()
    return total


@pytest.mark.parametrize("K", [1, 2])
def test_words_per_round_are_those_of_every_branch(K):
    branches = exact_distribution(lambda rng: 1 + accepted_in_round(P, Q, K, rng))
    assert expected_words(K) == sum(n * w for n, w in branches.items())


@pytest.mark.parametrize("K", [1, 2, 4, 8])
def test_words_per_round_as_counted(K):
    rng = SeededRandom(K)
    lengths = np.array([1 + accepted_in_round(tensor(P), tensor(Q), K, rng) for _ in range(500)])
    assert abs(lengths.mean() - float(expected_words(K))) < 5 * lengths.std() / 500 ** .5


def test_counts_have_the_distribution_of_the_target():
    assert failed_stages(speculative_sampling, seed=5) < 3


@pytest.mark.parametrize("name", ["resample from p", "accept the favourite", "bonus from the residual"])
def test_counts_reject_a_broken_rule(name):
    noncentrality = statistic(N * probabilities(MUTANTS[name]))
    assert 3 * ncx2.cdf(LIMIT, FREEDOM, noncentrality) < 1e-6, "the power must be above 1 - 1e-6"
    assert failed_stages(MUTANTS[name], seed=6) == 3
