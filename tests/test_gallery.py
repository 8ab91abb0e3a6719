"""The gallery: every broken decoder is caught by one check, right and harmless ones pass it, and its rules run on
tensors too."""
from fractions import Fraction

import numpy as np
import pytest
import torch

from specdec.drafters.model import ModelDrafter
from specdec.errors import InputError, NumericalError
from specdec.loop import speculate
from specdec.lossless.candidates import draw_distinct, draw_independent, recursive_rejection, take_likeliest
from specdec.lossless.enumerate import exact_distribution
from specdec.lossless.gallery import (
    CANDIDATES,
    GALLERY,
    SHARED,
    Broken,
    drops_unlikely,
    evidence,
    greedy_softmax,
)
from specdec.lossless.proof import (
    Branches,
    ExactDecoder,
    ExactModel,
    Language,
    Proven,
    candidates_error,
    loop_error,
    one_round,
    round_error,
)
from specdec.sampling import SeededRandom
from specdec.verify import delta, residual, speculative_sampling

EVERYTHING = GALLERY + CANDIDATES + SHARED
BY_NAME = {broken.name: broken for broken in EVERYTHING}
RULES = [broken for broken in GALLERY if broken.part == "rule"]


def named(broken): return broken.name.replace(" ", "-")


def found(broken, **more): return evidence(broken, speculate, ModelDrafter, **more)


# --- The list ---------------------------------------------------------------------------------------------------------

def test_names_are_unique_and_every_sighting_is_told():
    assert len(BY_NAME) == len(EVERYTHING) >= 50
    for broken in EVERYTHING:
        assert broken.name and broken.does.endswith(".") and broken.seen
        assert "://" not in broken.seen
    assert sum(broken.seen.startswith("our own") for broken in GALLERY) >= 2


def test_parts():
    assert {broken.part for broken in GALLERY} == {"rule", "draft", "cache"}
    assert {broken.part for broken in SHARED} == {"forward"}
    assert {broken.part for broken in CANDIDATES} == {"candidates"}
    for broken in CANDIDATES:  # one mistake each
        assert (broken.verify is recursive_rejection) == (broken.candidates is not draw_independent)
    for broken in GALLERY + SHARED:
        right = Broken("", "", "")
        changed = broken.verify is not right.verify, broken.draft is not right.draft, broken.model is not right.model
        assert sum(changed) == 1


# --- Caught, or left in peace -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("broken", EVERYTHING, ids=named)
def test_caught(broken):
    line = found(broken)
    if broken.name == "no guard for p = q": assert isinstance(line, Exception)
    else: assert isinstance(line, Proven) and 0 < line.error <= 1 and line.case == broken.name


def test_evidence_returns_the_error_that_was_raised():
    assert isinstance(found(BY_NAME["no guard for p = q"]), ZeroDivisionError)
    def nothing_to_draw_from(p, q, tokens, rng): return 0, rng.categorical(0 * p[0])
    assert isinstance(found(Broken("zero", "", "", nothing_to_draw_from)), NumericalError)
    def complains(p, q, tokens, rng): raise InputError("not today")
    assert str(found(Broken("complains", "", "", complains))) == "not today"


def test_evidence_wants_a_seed():
    for seeds in (0, -1, 1.5):
        with pytest.raises(InputError, match="seeds must be"): found(GALLERY[0], seeds=seeds)


@pytest.mark.parametrize("seeds", [1, 20, 40])
def test_right_one_passes(seeds): assert found(Broken("right", "", ""), seeds=seeds) is None


def test_right_loop_passes():  # the path that broken caches take
    class Subclassed(ExactModel): pass
    assert Broken("right", "", "", model=Subclassed).part == "cache"
    assert found(Broken("right", "", "", model=Subclassed), seeds=1) is None


def test_right_forward_passes(): assert found(Broken("right", "", "", model=ExactDecoder), seeds=1) is None


TREES = {"siblings see each other", "positions count rows", "path stays scattered"}


@pytest.mark.parametrize("broken", SHARED, ids=named)
def test_shared_mistakes_show_where_a_forward_is_shared(broken):
    "In a tree that branches, or in a batch; in one text with a chain of guesses never."
    assert ("Branches" in found(broken).what) == (broken.name in TREES)
    p, q = Language(2, "p1"), Language(2, "q1", halves=True)
    chain = loop_error(speculate, lambda: ModelDrafter(ExactModel(q, 2), 2), p, 2, 2, "", model=broken.model)
    of_one = loop_error(speculate, lambda: Branches(q), p, 1, 2, "", model=broken.model)
    assert (chain.error, of_one.error) == (0, 0) and chain.texts > 8


@pytest.mark.parametrize("broken", CANDIDATES, ids=named)
def test_a_second_candidate_shows_what_one_hides(broken):
    "But for candidates that were never drawn."
    def p(text): return np.array([Fraction(n, 16) for n in (5, 3, 2, 6)], dtype=object)
    def q(text): return np.array([Fraction(n, 16) for n in (2, 6, 4, 4)], dtype=object)
    one, two = (candidates_error(broken.verify, broken.candidates, p, q, n, 4, "").error for n in (1, 2))
    assert two > 0 and (one > 0) == (broken.name == "the likeliest, as if drawn")


@pytest.mark.parametrize("draw", [draw_independent, draw_distinct, take_likeliest])
def test_right_candidates_pass(draw):
    assert found(Broken("right", "", "", recursive_rejection, candidates=draw)) is None


def match(p, q, tokens, rng):
    for i, token in enumerate(tokens):
        own = rng.categorical(p[i])
        if own != token: return i, own
    return len(tokens), rng.categorical(p[len(tokens)])


def no_bonus(p, q, tokens, rng):
    num_accepted, next_token = speculative_sampling(p, q, tokens, rng)
    return (num_accepted, next_token) if num_accepted < len(tokens) else (num_accepted - 1, tokens[-1])


def block(p, q, tokens, rng):
    K, weight, kept = len(tokens), 1, (0, 1)
    for i, token in enumerate(tokens, 1):
        weight = min(weight * p[i - 1][token] / q[i - 1][token], 1)
        more = (weight * p[i] - q[i]).clip(min=0).sum() if i < K else 0
        if rng.bernoulli(weight if i == K or weight == 1 else more / (more + 1 - weight)): kept = i, weight
    n, weight = kept
    return n, rng.categorical(p[n] if n == K else residual(weight * p[n], q[n]))


@pytest.mark.parametrize(
    "harmless",
    [
        Broken("no bonus", "", "", no_bonus), Broken("match", "", "", match),
        Broken("match, greedy", "", "", match, greedy_softmax),
        Broken("match, thrown away", "", "", match, drops_unlikely), Broken("block", "", "", block),
    ],
    ids=named,
)
def test_harmless_ones_pass(harmless):
    assert found(harmless) is None


# --- Where they show --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["one number a round", "one verdict for the draft", "half of block verification"])
def test_needs_two_draft_tokens(name):
    assert found(BY_NAME[name]).K == 2
    for seed in range(40):  # one draft token never shows it
        assert round_error(BY_NAME[name].verify, Language(3, f"p{seed}"), Language(3, f"q{seed}"), 1, 3, "").error == 0


@pytest.mark.parametrize("name", ["one number for verdict and replacement", "one number for draft and replacement"])
def test_needs_three_tokens(name):
    assert found(BY_NAME[name]).V == 3
    for seed in range(20):
        assert round_error(BY_NAME[name].verify, Language(2, f"p{seed}"), Language(2, f"q{seed}"), 2, 2, "").error == 0


def test_known_distances():
    half = Fraction(1, 2)
    p, q = np.array([half, half], dtype=object), np.array([Fraction(1), Fraction(0)], dtype=object)
    def said(broken):
        return exact_distribution(
            lambda rng: one_round(broken.verify, lambda text: p, lambda text: q, 1, rng, broken.draft)[0]
        )

    assert said(BY_NAME["resample from p"]) == {0: Fraction(3, 4), 1: Fraction(1, 4)}
    assert said(BY_NAME["accept everything"]) == {0: 1}
    epsilon = Fraction(1, 10 ** 9)
    assert said(BY_NAME["epsilon in the residual"])[0] == half + half * epsilon / (half + 2 * epsilon)
    # a draft that always says 0 and reports (.8, .2): 0 is kept with .6 / .8, and the residual is all on 1; so (.6, .4)
    # becomes (.75, .25)
    p, q = (np.array([Fraction(a, 10), Fraction(10 - a, 10)], dtype=object) for a in (6, 8))
    assert said(BY_NAME["greedy draft, softmax q"]) == {0: Fraction(3, 4), 1: Fraction(1, 4)}
    # q = (.6, .4), p = (.5, .5) gives (.7, .3) if the unlikely one is thrown away
    p, q = (np.array([Fraction(a, 10), Fraction(10 - a, 10)], dtype=object) for a in (5, 6))
    distribution = exact_distribution(
        lambda rng: one_round(speculative_sampling, lambda text: p, lambda text: q, 1, rng, drops_unlikely)[0]
    )
    assert distribution == {0: Fraction(7, 10), 1: Fraction(3, 10)}


def test_a_forbidden_token_passes_less_or_equal():
    p, q = np.array([[Fraction(1), Fraction(0)]] * 2, dtype=object), np.array([[Fraction(1, 2)] * 2], dtype=object)
    distribution = exact_distribution(lambda rng: BY_NAME["less or equal"].verify(p, q, [1], rng)[0])
    assert distribution == {1: Fraction(1, 2 ** 24), 0: 1 - Fraction(1, 2 ** 24)}


def fractions(*row): return np.array([Fraction(w).limit_denominator(1000) for w in row], dtype=object)


DISTRIBUTIONS = {  # name → p, q, and the law of the first token, worked out by hand
    # the draft says 0 unless both draws are 1, and with p = q all of it stays
    "the likelier of two": ((.75, .25), (.75, .25), (Fraction(15, 16), Fraction(1, 16))),
    # a 1 is dropped, and a fresh toss takes its place
    "end token thrown away": ((.5, .5), (.5, .5), (Fraction(3, 4), Fraction(1, 4))),
    # numbers from 1/2 on said 1, and none of them lies below p/q = 1/2
    "one number for draft and verdict": ((.75, .25), (.5, .5), (Fraction(1), 0)),
    # of 0, .01, … 1, the 51 up to p/q = 1/2
    "a hundred and one numbers": ((.5, .5), (1, 0), (Fraction(51, 101), Fraction(50, 101))),
    # the residual is 1/4 and 1/2, and the line is cut at 85 1/3 of 256
    "coarse replacement": ((.25, .25, .5), (1, 0, 0), (Fraction(1, 4), Fraction(3, 4) * Fraction(86, 256),
                                                       Fraction(3, 4) * Fraction(170, 256))),
    # of the residual 1/2 and 1/8, the first holds four fifths
    "top-p on the residual": ((.375, .5, .125), (1, 0, 0), (Fraction(3, 8), Fraction(5, 8), 0)),
    "residual cut to the draft's size": ((.25, .25, .5), (1, 0, 0), (Fraction(1, 4), Fraction(3, 4), 0)),
    # softened, p is 7/8 and 1/8 and q a half each: a 1 stays once in four times
    "temperature 0 by softmax": ((1, 0), (.5, .5), (Fraction(7, 8), Fraction(1, 8))),
    # at half the temperature p is 9/10 and 1/10, and so is the text
    "target at another temperature": ((.75, .25), (.5, .5), (Fraction(9, 10), Fraction(1, 10))),
    # p itself in half of the cases; else 4/5 are drawn anew, and 1/5 were rejected and became a 0
    "batch's minimum, drawn anew": ((.6, .4), (.4, .6), (Fraction(16, 25), Fraction(9, 25))),
    # within three quarters of q only 0 is left, which is kept with (1/2) / (3/4)
    "top-p not reported": ((.5, .5), (.75, .25), (Fraction(2, 3), Fraction(1, 3))),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_worked_out_by_hand(name):
    p, q, distribution = DISTRIBUTIONS[name]
    p, q, broken = fractions(*p), fractions(*q), BY_NAME[name]
    found = exact_distribution(
        lambda rng: one_round(broken.verify, lambda text: p, lambda text: q, 1, rng, broken.draft)[0])
    assert found == {token: weight for token, weight in enumerate(distribution) if weight}


def test_rows_one_off():
    """Row i of p is sure of token i. Verified by the row after, draft 0 is refused and 1 takes its place; the right row
    of a draft 1 allows it, and so does no other."""
    rows = np.stack([delta(fractions(0, 0, 0), i) for i in range(3)])
    q = np.stack([fractions(.5, .5, 0)] * 2)
    def said(name): return exact_distribution(lambda rng: BY_NAME[name].verify(rows, q, [0, 1], rng))
    assert said("verified by the row after") == {(0, 1): 1}
    # token 1 is compared with q of token 0, where it had probability 0 and so can't be refused
    q[0] = fractions(1, 0, 0)
    assert said("draft's row of the token before") == {(2, 2): 1}
    rows[1] = fractions(.5, .25, .25)  # p = 1/4, q = 1/2: half of them should go
    assert said("draft's row of the token before") == {(2, 2): 1}


# --- On tensors -------------------------------------------------------------------------------------------------------

def rows(V, n, seed): return np.stack([Language(V, f"{seed} {i}", halves=True)(()) for i in range(n)])


@pytest.mark.parametrize("sure", [False, True])
@pytest.mark.parametrize("broken", RULES, ids=named)
def test_rule_runs_on_tensors_and_has_the_same_distribution(broken, sure):
    """Rows of powers of two: float32 holds p, q and their ratios, so the law on tensors is the law on fractions, up to
    rounding."""
    V, K = 3, 2
    for seed in range(6):
        p, q = rows(V, K + 1, f"p{seed}"), rows(V, K, f"q{seed}")
        tensors = [torch.tensor(x.astype(float), dtype=torch.float32) for x in (p, q)]
        tokens = [int(np.flatnonzero(row)[seed % np.count_nonzero(row)]) for row in q]
        try: exact = exact_distribution(lambda rng: broken.verify(p, None if sure else q, tokens, rng))
        except ZeroDivisionError: continue  # fractions can't divide by zero, floats can
        floats = exact_distribution(lambda rng: broken.verify(tensors[0], None if sure else tensors[1], tokens, rng))
        assert all(abs(floats.get(x, 0) - exact.get(x, 0)) < 1e-6 for x in floats.keys() | exact.keys())


@pytest.mark.parametrize("broken", RULES, ids=named)
def test_rule_runs_under_a_seeded_source(broken):
    p, q = torch.tensor([[.5, .3, .2], [.25, .5, .25], [.1, .2, .7]]), torch.tensor([[.2, .3, .5], [.4, .4, .2]])
    def play(seed):
        return [
            broken.verify(p, given, [2, 0], source)
            for source in [SeededRandom(seed)]
            for given in (q, None)
            for _ in range(20)
        ]

    assert play(3) == play(3)
    assert all(
        isinstance(accepted, int) and 0 <= accepted <= 2 and following in (0, 1, 2) for accepted, following in play(3)
    )


# another law even where there is no draft
WITHOUT_DRAFT = "target without its filter", "target cut to the draft's size", "target at another temperature"


def test_no_draft_is_a_plain_step():
    p = np.array([[Fraction(1, 4), Fraction(3, 4)]], dtype=object)
    for broken in RULES:
        if broken.name in WITHOUT_DRAFT: continue
        distribution = exact_distribution(lambda rng: broken.verify(p, None, [], rng))
        assert distribution == {(0, 0): Fraction(1, 4), (0, 1): Fraction(3, 4)}, broken.name
    for broken in GALLERY: assert broken.draft(Language(2), 0, SeededRandom(0)) == ([], None), broken.name
