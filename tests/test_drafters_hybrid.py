"Two drafters and a choice: estimates under censoring, the hybrid's plans, and all of it in the executed proof."
import numpy as np
import pytest
import torch

from helpers_drafters import packable_llama
from specdec.drafters.base import Draft, Informed, WrapperDrafter
from specdec.drafters.choose import (
    Acceptance,
    HybridDrafter,
    HybridState,
    drafting,
    most_for_its_cost,
)
from specdec.drafters.lookup import SuffixDrafter, SuffixIndex, SuffixState, replay
from specdec.drafters.model import ModelDrafter
from specdec.errors import InputError
from specdec.loop import speculate
from specdec.lossless.proof import ExactModel, Language, language_pairs, loop_error
from specdec.sampling import SamplingParams, SeededRandom


@pytest.fixture(scope="module")
def tiny(): return packable_llama()

# what is known of acceptance


def test_acceptance_counts_tried_guesses_only():
    estimate = Acceptance(0.5, weight=2, keep=1)
    estimate.observe(["a", "b", "c"], accepted=1, tried=2)
    assert estimate.counts == {"a": (1, 1), "b": (0, 1)}  # c was never tried
    assert [estimate.alpha(k) for k in "abc"] == pytest.approx([2 / 3, 1 / 3, 1 / 2])
    # b begins like a
    assert estimate.expected(["a", "b"]) == pytest.approx([1 + 2 / 3, 1 + 2 / 3 + 2 / 3 * (2 * 2 / 3) / 3])


def test_a_position_that_was_never_tried_is_like_the_one_before():
    estimate = Acceptance(0.5, weight=1, keep=1)
    for _ in range(200): estimate.observe([0, 1], 2, 2)
    assert estimate.expected([0, 1, 2])[2] > 3.9 and estimate.alpha(2) == 0.5
    # not in the prior: like the one before
    assert Acceptance({"a": 0.9}).expected(["a", "b"]) == pytest.approx([1.9, 1.9 + 0.81])


def test_acceptance_finds_the_truth_under_censoring_and_the_tempting_count_does_not():
    rng, truth, K = np.random.default_rng(0), [0.8, 0.6, 0.3], 3
    estimate, naive = Acceptance(0.5, keep=1), np.zeros(3)
    for _ in range(3000):
        accepted = next((i for i in range(K) if rng.random() > truth[i]), K)
        estimate.observe(range(K), accepted, min(accepted + 1, K))
        naive[:accepted] += 1
    assert [estimate.alpha(i) for i in range(K)] == pytest.approx(truth, abs=0.04)
    assert abs(naive[2] / 3000 - truth[2]) > 0.1  # accepted / drafted


def test_old_tries_fade():
    estimate = Acceptance({"a": 0.9}, weight=1, keep=0.5)
    for _ in range(5): estimate.observe(["a"], 0, 1)
    low = estimate.alpha("a")
    for _ in range(10): estimate.observe(["b"], 1, 1)
    assert low < 0.35 and estimate.alpha("a") == pytest.approx(0.9, abs=0.01) and estimate.alpha("unknown") == 0.5

# the hybrid


class Scripted:
    "Proposes what it is told to, knows what it is told to know, and logs everything; for one sequence at a time."
    def __init__(self, tokens=(), layers=(), evidence=None):
        self.tokens, self.layers, self.log = list(tokens), layers, []
        if evidence is not None: self.reach, self.evidence = (lambda K: min(K, len(evidence))), (lambda i: evidence[i])
    def start(self, tokens, features, limit, eos_ids):
        self.log.append(("start", list(tokens), features, eos_ids))
        return self
    def commit(self, tokens, features): self.log.append(("commit", list(tokens), features))
    def propose(self, K, sampling, rng):
        self.log.append(("propose", K))
        return Draft(self.tokens[:K])


def test_the_best_bargain_is_the_first_of_equals():
    offers = [np.array([1.5, 1.5]), np.array([1.5])]
    def prices(*each): return [1 + cost * np.arange(1, 1 + len(offer)) for cost, offer in zip(each, offers)]
    assert most_for_its_cost(offers, prices(0.1, 0.1)) == (0, 1)
    assert most_for_its_cost(offers, prices(0.2, 0.1)) == (1, 1)
    assert most_for_its_cost(offers, prices(0.5, 0.5)) == (0, 0)  # as good as a plain step, which comes first
    assert most_for_its_cost([np.array([]), np.array([])], [np.array([]), np.array([])]) == (0, 0)


def test_who_is_informed():
    "Both methods, or the position of a guess is all that is known."
    half = Scripted()
    half.evidence = "xyz".__getitem__  # it doesn't say how far it reaches
    def began(drafter): return drafter.start([1], None, 9, frozenset())
    for drafter in (Scripted(evidence=["x"]), SuffixDrafter()): assert isinstance(began(drafter), Informed)
    for drafter in (Scripted(), half, ModelDrafter(ExactModel(None, 4), 4)):
        assert not isinstance(began(drafter), Informed)
        hybrid = HybridDrafter(drafter, Scripted(), c=(0, 9), priors=(0.9, 0.1))
        assert began(hybrid).plan(3) == (0, [0, 1, 2])


def test_the_plan_is_the_best_rate():
    "Against every choice, by the formula."
    first, second = Scripted(evidence=["x", "y", "z"]), Scripted()
    priors, c, verify = ({"x": 0.9, "y": 0.2, "z": 0.9}, 0.7), (0.01, 0.3), 0.05
    state = HybridDrafter(first, second, c=c, verify=verify, priors=priors).start([1], None, 10)
    rates = {(0, 0): 1.0}
    for n, tokens in enumerate((1.9, 1.9 + .18, 1.9 + .18 + .162), 1): rates[0, n] = tokens / (1 + n * .06)
    for n in range(1, 5): rates[1, n] = sum(.7 ** i for i in range(n + 1)) / (1 + n * .35)
    who, evidence = state.plan(4)
    assert (who, len(evidence)) == max(rates, key=rates.get)
    assert state.plan(1) == (0, ["x"])


def test_no_guess_is_better_than_a_bad_one():
    hybrid = HybridDrafter(Scripted(evidence=["x"]), Scripted(), c=(0.1, 1.0), priors=({"x": 0.05}, 0.5))
    state = hybrid.start([1], None, 10)
    assert state.plan(5) == (0, []) and state.propose(5, None, None) == Draft([])
    assert not any(entry[0] == "propose" for member in hybrid.members for entry in member.log)


def test_both_members_hear_everything_and_the_proposer_learns():
    first, second = Scripted([7, 8], evidence=["x", "x"]), Scripted([5, 6])
    hybrid = HybridDrafter(first, second, c=(0, 0.1), priors=({"x": 0.9}, 0.5))
    state = hybrid.start([1, 2], None, 10)
    estimates = state.chooser.estimates
    assert state.propose(2, None, None).tokens == [7, 8]
    state.commit([7, 3], None)
    assert estimates[0].counts == {"x": (1.0, 2.0)} and estimates[1].counts == {}
    state.commit([4], None)  # a round without a draft tells nothing, and makes nothing forgotten
    assert estimates[0].counts == {"x": (1.0, 2.0)}
    state.propose(1, None, None)
    state.commit([7, 4], None)
    assert estimates[0].counts["x"] == pytest.approx((1.98, 2.96))  # what it knows grows old
    for member in (first, second):
        assert [e[:2] for e in member.log if e[0] != "propose"] == [
            ("start", [1, 2]), ("commit", [7, 3]), ("commit", [4]), ("commit", [7, 4]),
        ]
    for _ in range(20):
        drafted = state.propose(2, None, None).tokens
        if drafted[:1] == [5]: break  # the first has disappointed
        state.commit([9], None)
    assert drafted[:1] == [5]
    new = hybrid.start([1], None, 10)
    assert new.propose(2, None, None).tokens == [7, 8]  # a new text begins with the priors
    assert state.plan(2)[0] == 1                        # and the old one goes on with what it knows


def test_who_was_unlucky_is_asked_again():
    "While the other one drafts, old disappointments fade."
    first, second = Scripted([7], evidence=["x"]), Scripted([5], evidence=["y"])
    state = HybridDrafter(first, second, c=(0.0, 0.1), priors=(0.5, 0.8)).start([1], None, 10)
    asked = []
    for _ in range(400):
        drafted = state.propose(1, None, None).tokens
        asked.append(drafted)
        # the second is never right, the first one half of the time
        state.commit([9] if drafted == [5] else [7] if len(asked) % 2 else [9], None)
    turned = asked.index([7])
    assert [5] in asked[:turned] and [5] in asked[turned + 20:]


def test_features_are_shared_out():
    features = torch.arange(12.).view(2, 6)  # two tokens, layers 3, 1 and 9, two numbers each
    first, second, third = Scripted(layers=(3, 1)), Scripted(layers=(1, 9)), Scripted()
    hybrid = HybridDrafter(first, second)
    assert hybrid.layers == (3, 1, 9)
    state = hybrid.start([1, 2, 3], features, 10, {5})
    assert all(member.log[0][3] == {5} for member in hybrid.members)
    assert torch.equal(first.log[0][2], features[:, :4]) and torch.equal(second.log[0][2], features[:, [2, 3, 4, 5]])
    state.commit([4, 5], -features)
    assert torch.equal(first.log[1][2], -features[:, :4]) and torch.equal(second.log[1][2], -features[:, 2:])
    hybrid = HybridDrafter(third, second)
    hybrid.start([1, 2, 3], features[:, :4], 10)
    assert third.log[0][2] is None and second.log[-1][2].tolist() == features[:, :4].tolist()


@pytest.mark.parametrize("c, expected", [(0.1, [0, 0.1, 0.3]), ((0.3, 0.1), [0, 0.3, 0.5])], ids=["each", "the first"])
def test_what_guesses_cost(c, expected):
    assert [drafting(c, n) for n in (0, 1, 3)] == pytest.approx(expected)


def test_wrong_costs():
    for wrong in (
        dict(c=(-1, 0)), dict(verify=-0.1), dict(c=(0.1,)), dict(c=0.1), dict(c=(0, float("nan"))),
        dict(c=(float("nan"), 0)), dict(verify=float("nan")), dict(c=("0", 0)), dict(c=(True, 0)), dict(verify=None),
    ):
        with pytest.raises(InputError, match="Costs"): HybridDrafter(Scripted(), Scripted(), **wrong)
    with pytest.raises(InputError, match="prior"): HybridDrafter(Scripted(), Scripted(), priors=(0.5,))
    for wrong in (dict(weight=0), dict(weight=-1), dict(keep=0), dict(keep=1.1), dict(weight=True), dict(keep="1")):
        with pytest.raises(InputError, match="prior"): Acceptance(0.5, **wrong)


def test_same_seed_same_tokens(tiny):

    def text():
        return list(speculate(
                tiny, HybridDrafter(SuffixDrafter(), ModelDrafter(tiny.skip([2]), 96)), [1, 2, 1, 2],
            SamplingParams(0.7),
                SeededRandom(3), 4, 40,
            ))

    assert text() == text()


def test_a_hybrid_in_the_loop_keeps_its_model_right(tiny):
    "A target drafting for itself accepts everything, also after rounds in which the other one proposed."
    class Always(SuffixState):
        def evidence(self, i): return "always"
    class Often(SuffixDrafter):
        def start(self, tokens, *told): return Always(self.per_match, SuffixIndex(), tokens)
    own = ModelDrafter(tiny, 96)
    hybrid = HybridDrafter(Often(), own, c=(0, 0.3), priors=({"always": 0.9}, 0.9))
    proposals = []
    class Noting(HybridState):
        def propose(self, K, sampling, rng):
            draft = super().propose(K, sampling, rng)
            proposals.append(self.pending[0])
            return draft
    hybrid.State = Noting
    rounds = list(speculate(tiny, hybrid, [1, 2, 1, 2, 1], SamplingParams(1.0), SeededRandom(0), 3, 120))[1:]
    assert {0, 1} <= set(proposals)
    for who, r in zip(proposals, rounds):
        if who == 1: assert r.accepted == len(r.drafted)


def test_the_hybrid_is_not_slower_than_its_better_half():
    """Two drafters that are right now and then, in texts where now the one, now the other is better; speeds by the cost
    model."""
    rng = np.random.default_rng(0)
    class Knowing:
        "Right with a probability that depends on the place."
        layers = ()
        def __init__(self, text, chances, seed):
            self.text, self.right = text, np.random.default_rng(seed).random(len(text)) < chances

        def start(self, tokens, features, limit, eos_ids):
            self.at = len(tokens)
            return self
        def commit(self, tokens, features): self.at += len(tokens)
        def propose(self, K, sampling, rng):
            return Draft(
                [t if ok else t + 100 for t, ok in zip(self.text[self.at : self.at + K], self.right[self.at :])]
            )

    text = rng.integers(0, 50, 4000).tolist()
    for chances in [(0.8, 0.3), (0.3, 0.8), (0.6, 0.6), (0.05, 0.5)]:
        def make(i): return Knowing(text, chances[i], i)
        c = (0.02, 0.1)
        def speed(drafter, cost):
            rounds = replay(drafter, text[:1], text[1:], 4)
            return sum(len(r.emitted) for r in rounds) / sum(1 + len(r.drafted) * .025 + cost(r) for r in rounds)
        alone = [speed(make(i), lambda r, i=i: len(r.drafted) * c[i]) for i in (0, 1)]
        hybrid, spent = HybridDrafter(make(0), make(1), c=c, verify=.025, priors=(0.5, 0.5)), []
        class Spending(HybridState):
            def propose(self, K, sampling, rng):
                draft = super().propose(K, sampling, rng)
                spent.append(len(draft.tokens) * c[self.pending[0]])
                return draft
        hybrid.State = Spending
        rounds = replay(hybrid, text[:1], text[1:], 4)
        together = sum(len(r.emitted) for r in rounds) / (sum(1 + len(r.drafted) * .025 for r in rounds) + sum(spent))
        assert together > 0.97 * max(alone), (chances, alone, together)

# the executed proof


def hybrid_of(q, width, V, **options):
    return lambda: HybridDrafter(SuffixDrafter(), ModelDrafter(ExactModel(q, width), V), **options)


@pytest.mark.parametrize("K, V", [(1, 2), (1, 3), (2, 2), (2, 3), (3, 2)])
def test_every_drafter_is_lossless(K, V):
    for case, p, q in language_pairs(V, f"drafters {K}", most=max(2, 5 - K), halves=True):
        width = V - 1 if case == "smaller draft vocabulary" else V
        for make in (
            SuffixDrafter, lambda: SuffixDrafter(0.5), hybrid_of(q, width, V),
            hybrid_of(q, width, V, c=(0.0, 0.0), priors=(0.9, 0.6)), lambda: WrapperDrafter(SuffixDrafter()),
        ):
            assert loop_error(speculate, make, p, K, V, case).error == 0, case
        assert loop_error(speculate, hybrid_of(q, width, V), p, K, V, case, greedy=True).error == 0
        if case == "p and q differ":
            for end in range(V):
                assert loop_error(speculate, hybrid_of(q, width, V), p, K, V, case, eos_ids=frozenset({end})).error == 0
            assert loop_error(speculate, hybrid_of(q, width, V), p, K, V, case, max_new_tokens=K + 2).error == 0


def test_in_the_proof_both_members_propose():
    "Else the test above would prove less than it says."
    seen = set()
    class Noting(HybridState):
        def propose(self, K, sampling, rng):
            draft = super().propose(K, sampling, rng)
            seen.add(self.pending[0] if draft.tokens else None)
            return draft
    class Seen(HybridDrafter): State = Noting
    p, q = Language(2, "p", halves=True), Language(2, "q", halves=True)
    assert (
        loop_error(speculate, lambda: Seen(SuffixDrafter(), ModelDrafter(ExactModel(q, 2), 2)), p, 2, 2, "").error == 0
    )
    assert {0, 1} <= seen


class Peeking(HybridDrafter):
    "Wrong: lets the second draw first, and takes the first one's guesses where the drawn token is an unlikely one."
    class State(HybridState):
        def propose(self, K, sampling, rng):
            drawn = self.states[1].propose(K, sampling, rng)
            if drawn.tokens and drawn.q[0][drawn.tokens[0]] >= 0.5: return drawn
            return self.states[0].propose(K, sampling, rng)


class Blending(HybridDrafter):
    "Wrong: takes the first one's guesses and reports the second one's q."
    class State(HybridState):
        def propose(self, K, sampling, rng):
            sure = self.states[0].propose(K, sampling, rng)
            drawn = self.states[1].propose(len(sure.tokens), sampling, rng) if sure.tokens else Draft([])
            return Draft(sure.tokens, drawn.q)


@pytest.mark.parametrize("wrong", [Peeking, Blending], ids=["chosen after the draw", "another's q"])
def test_wrong_hybrids_are_caught(wrong):
    errors = []
    for seed in range(4):
        p, q = Language(3, f"p{seed}", halves=True), Language(3, f"q{seed}", halves=True)
        assert (
            loop_error(
                speculate, lambda: HybridDrafter(SuffixDrafter(), ModelDrafter(ExactModel(q, 3), 3)), p, 1, 3, ""
            ).error
            == 0
        )
        try:
            errors.append(
                loop_error(
                    speculate, lambda: wrong(SuffixDrafter(), ModelDrafter(ExactModel(q, 3), 3)), p, 1, 3, ""
                ).error
            )
        except InputError:
            errors.append(1)  # a token with q = 0
    assert max(errors) > 0
