"""How many guesses next: golden traces, what is learned under censoring, against hindsight, and the law of it all."""
import copy
from fractions import Fraction

import numpy as np
import pytest

import specdec
from helpers_drafters import PayingLookahead, StepLookahead, packable_llama
from specdec.drafters import costs
from specdec.drafters.adaptive import MOST, AdaptiveDrafter, AdaptiveLookahead, AdaptiveState, adaptive, play
from specdec.drafters.base import Draft
from specdec.drafters.choose import SUFFIX_PRIOR, Chooser, HybridDrafter
from specdec.drafters.clock import PROBE
from specdec.drafters.costs import Prices
from specdec.drafters.lookup import NGramDrafter, NGramState, SuffixDrafter, replay
from specdec.drafters.model import ModelDrafter, ModelState
from specdec.engine.profiling import PhaseTimer
from specdec.engine.request import Request, longest_chain
from specdec.errors import InputError
from specdec.loop import serve, speculate
from specdec.lossless.enumerate import exact_distribution
from specdec.lossless.proof import (
    ExactModel,
    Language,
    language_pairs,
    loop_error,
    one_round,
    sampled,
)
from specdec.pair import Pair
from specdec.result import Round
from specdec.sampling import SamplingParams, SeededRandom
from specdec.speedup import best_K
from specdec.verify import speculative_sampling


@pytest.fixture(scope="module")
def tiny(): return packable_llama()

# the moving average


def test_all_accepted_climbs_to_the_top():
    controller, seen = AdaptiveLookahead(), []
    for _ in range(45):
        controller.observe_step(controller.lookahead, controller.lookahead)
        seen.append(controller.lookahead)
    expected = [5] * 4 + [n for n in range(6, 12) for _ in range(5)] + [12] * 11
    assert seen == expected  # it moves at observations 5, 10, …, 35 and nowhere else
    assert (controller.observations, controller.updates) == (45, 9)


def test_none_accepted_falls_to_the_bottom():
    controller, seen = AdaptiveLookahead(), []
    for _ in range(12):
        controller.observe_step(controller.lookahead, 0)
        seen.append(controller.lookahead)
    assert seen == [5] * 4 + [2] * 8 and controller.mean_accepted == 0 and controller.updates == 2


def test_the_mean_and_its_rounding():
    controller = AdaptiveLookahead(initial=3, min=1, max=9, alpha=0.25, cooldown_steps=0)
    assert (controller.lookahead, controller.mean_accepted, controller.observations) == (3, 0, 0)
    controller.observe_step(3, 2)
    assert controller.mean_accepted == 2 and controller.lookahead == 3  # the first one counts in full
    controller.observe_step(3, 7)  # no more than was proposed
    assert controller.mean_accepted == 2.25 and controller.lookahead == 3
    controller.observe_step(4, 4)
    controller.observe_step(4, 3)
    assert controller.mean_accepted == pytest.approx(2.765625) and controller.lookahead == 4
    controller.observe_step(0, 0)  # a round without a draft counts as none accepted
    assert controller.mean_accepted == pytest.approx(2.07421875) and controller.observations == 5
    half = AdaptiveLookahead(alpha=1, cooldown_steps=0)
    half.mean_accepted, half.observations, half.alpha = 2.5, 1, 0
    half.observe_step(5, 5)
    assert half.lookahead == 4  # 3.5 is rounded up
    half.reset()
    assert (half.lookahead, half.mean_accepted, half.observations, half.updates, half.cooldown) == (5, 0, 0, 0, 0)


@pytest.mark.parametrize("wrong", [
    dict(min=0), dict(min=3, max=2, initial=3), dict(initial=1), dict(initial=13), dict(alpha=-0.1), dict(alpha=1.1),
    dict(alpha=float("nan")), dict(alpha=True), dict(cooldown_steps=-1), dict(initial=5.0), dict(max="12"),
], ids=lambda wrong: " ".join(f"{k}={v}" for k, v in wrong.items()))
def test_what_the_moving_average_refuses(wrong):
    with pytest.raises(InputError): AdaptiveLookahead(**wrong)


def test_observations_are_whole_numbers():
    for wrong in ((-1, 0), (2, -1), (2.0, 1), (2, None)):
        with pytest.raises(InputError): AdaptiveLookahead().observe_step(*wrong)


def test_a_controller_given_as_K_is_not_capped(tiny):
    "It begins with its own number of tokens, not with the default K; all accepted, one more every five rounds."
    pair = Pair(tiny, ModelDrafter(tiny, tiny.vocab_size))  # the draft is the target
    result = pair.generate([1, 2, 3], K=AdaptiveLookahead(initial=8), max_new_tokens=160, ignore_eos=True)
    assert [len(r.drafted) for r in result.rounds[:15]] == [8] * 5 + [9] * 5 + [10] * 5


def test_a_controller_goes_on_learning_and_is_the_callers(tiny):
    "From call to call, also streamed, until the caller resets it; the pair's own totals are another thing."
    pair, controller = Pair(tiny, ModelDrafter(packable_llama(seed=1), tiny.vocab_size)), AdaptiveLookahead(initial=8)
    def rounds(): return pair.generate([1, 2, 3], K=controller, max_new_tokens=60, ignore_eos=True).rounds
    first = rounds()
    learned = controller.observations, controller.lookahead
    assert learned == (len(first), learned[1]) and learned[1] < 8 == len(first[0].drafted)
    again = rounds()
    assert len(again[0].drafted) == learned[1] and controller.observations == len(first) + len(again)
    pair.reset_stats()
    assert (pair.stats.counts.drafted, pair.stats.counts.rounds) == (0, 0) and controller.observations > len(first)
    *_, end = pair.stream([1, 2, 3], K=controller, max_new_tokens=60, ignore_eos=True)
    assert len(end.result.rounds[0].drafted) < 8
    controller.reset()
    assert rounds() == first


@pytest.mark.parametrize("batch_size", [1, 2])
def test_each_sequence_of_a_list_has_a_copy_of_what_a_controller_knows(tiny, batch_size):
    "Each is decoded as it would be alone, and none teaches the others."
    pair, controller = Pair(tiny, ModelDrafter(packable_llama(seed=1), tiny.vocab_size)), AdaptiveLookahead(initial=8)
    how = dict(max_new_tokens=40, ignore_eos=True)
    pair.generate([1, 2, 3], K=controller, **how)
    before, prompts = dict(vars(controller)), [[1, 2, 3], [5, 6]]
    several = [result for _, result in sorted(pair.results(prompts, batch_size, K=controller, **how),
                                              key=lambda each: each[0])]
    assert vars(controller) == before and before["observations"] > 0
    alone = [pair.generate(prompt, K=copy.deepcopy(controller), **how) for prompt in prompts]
    assert [r.rounds for r in several] == [r.rounds for r in alone]
    assert len(several[0].rounds[0].drafted) == before["lookahead"]


def test_the_controller_of_a_text_can_be_read_reset_and_replaced(tiny):
    drafter = AdaptiveDrafter(ModelDrafter(tiny, tiny.vocab_size), AdaptiveLookahead(initial=8))
    request = Request(tiny, [1, 2, 3], drafter, SamplingParams(), SeededRandom(0), 16, 100)
    rounds = serve(tiny, request, PhaseTimer())
    next(rounds)
    assert len(next(rounds).drafted) == 8
    controller = request.state.controller
    assert (controller.observations, controller.mean_accepted) == (1, 8)
    controller.reset()
    assert (controller.observations, controller.mean_accepted, controller.lookahead) == (0, 0, 8)
    request.state.controller = AdaptiveLookahead(initial=3)
    assert len(next(rounds).drafted) == 3 and request.state.controller.observations == 1


def test_a_round_says_its_acceptance_rate(tiny):
    assert Round([1, 2, 3, 4], 1, [1, 9]).acceptance_rate == 0.25 and Round([], 0, [9]).acceptance_rate == 0
    found = speculate(tiny, ModelDrafter(tiny, tiny.vocab_size), [1, 2], SamplingParams(), SeededRandom(0), 3, 20)
    assert [r.acceptance_rate for r in found] == [0, 1, 1, 1, 1, 1]


def test_limits_hold_and_the_ends_of_alpha_work():
    AdaptiveLookahead(initial=1, min=1, max=1, alpha=0)
    frozen = AdaptiveLookahead(alpha=0, cooldown_steps=0)
    frozen.observe_step(5, 3)
    for _ in range(9): frozen.observe_step(5, 5)
    assert frozen.mean_accepted == 3 and frozen.lookahead == 4


def test_it_drafts_too_little():
    "The figures of its known weakness; and what would be best."
    for alpha, K, tenth, fiftieth in ((0.7, 2.24, 4, 8), (0.8, 2.85, 6, 11), (0.9, 4.21, 10, 19)):
        controller, total = AdaptiveLookahead(), 0
        reached = np.random.default_rng(0).geometric(1 - alpha, 30_000) - 1
        for reach in reached.tolist():
            total += controller.lookahead
            controller.observe_step(controller.lookahead, min(reach, controller.lookahead))
        assert total / len(reached) == pytest.approx(K, abs=0.08)
        assert (best_K(alpha, 0.1), best_K(alpha, 0.02)) == (tenth, fiftieth)


# what pays


def drawn(alphas, seed=0):
    "How many guesses in a row are right at each place of a text."
    found, run = [], 0
    for right in (np.random.default_rng(seed).random(len(alphas)) < alphas)[::-1]:
        run = run + 1 if right else 0
        found.append(run)
    return found[::-1]


class Fixed:
    def __init__(self, K): self.lookahead = K
    def observe_step(self, proposed, accepted): pass


def speed(rounds, c, verify=0.02):
    return sum(a + 1 for _, a in rounds) / sum(1 + n * (c + verify) for n, _ in rounds)


def test_play_is_what_the_loop_would_do():
    "Against `replay`, which needs a drafter and a text."
    text = [1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 9, 9, 9, 9, 9]
    seen = []
    class Recording(NGramState):
        def propose(self, K, sampling, rng):
            guesses = super().propose(16, sampling, rng).tokens
            rest = text[len(self.tokens):]
            differ = (i for i, (a, b) in enumerate(zip(guesses, rest)) if a != b)
            seen.append(next(differ, min(len(guesses), len(rest))))
            return Draft([])
    class Recorder(NGramDrafter):
        def start(self, tokens, features, limit, eos_ids): return Recording(self.longest, tokens)
    replay(Recorder(), [1], text[1:], 16)
    seen += [0] * (len(text) - 2 - len(seen))
    for K in (1, 2, 5):
        real = [(len(r.drafted), r.accepted) for r in replay(NGramDrafter(), [1], text[1:], K)]
        played = play(Fixed(K), seen)
        assert [a for _, a in real] == [a for _, a in played]


@pytest.mark.parametrize("c, alpha", [(0.02, 0.9), (0.1, 0.5), (0.1, 0.8), (0.4, 0.5), (0.4, 0.9)])
def test_what_pays_is_within_three_per_cent_of_hindsight(c, alpha):
    texts = [drawn(np.full(1500, alpha), seed) for seed in range(3)]
    def over(make): return speed([r for text in texts for r in play(make(), text)], c)
    best = max(over(lambda: Fixed(K)) for K in range(17))
    assert over(lambda: PayingLookahead(c, 0.02)) > 0.97 * best


@pytest.mark.parametrize("c", [0, 0.05, 0.3, 0.9])
def test_hopeless_drafts_cost_three_per_cent_at_most(c):
    rounds = play(PayingLookahead(c, 0.02), [0] * 600)
    assert speed(rounds, c) > 0.97
    spent = sum(n for n, _ in rounds[300:]) * (c + 0.02) / 300
    assert 0 < spent < (2 * PROBE if c else 0.021)  # it still looks, and cheaply (a lookup's guess is always worth it)


@pytest.mark.parametrize("c", [0.1, 0.3])
def test_a_text_that_changes_half_way(c):
    "Better than any fixed K of hindsight, in both directions."
    for alphas in ((0.1, 0.9), (0.9, 0.1)):
        texts = [drawn(np.repeat(alphas, 300), seed) for seed in range(3)]
        def over(make): return speed([r for text in texts for r in play(make(), text)], c)
        fixed = max(over(lambda: Fixed(K)) for K in range(17))
        assert over(lambda: PayingLookahead(c, 0.02)) > 1.04 * fixed
        assert over(lambda: PayingLookahead(c, 0.02)) > over(AdaptiveLookahead)


def test_a_success_while_resting_is_followed_up_at_once():
    controller = PayingLookahead(0.1, 0.02)
    lengths = [n for n, _ in play(controller, [0] * 400)]
    waits = np.diff(np.flatnonzero(lengths[-100:]))
    assert 4 <= waits.min() and waits.max() <= 12  # what a guess is thought to lose is saved up
    while not controller.lookahead: controller.observe_step(0, 0)
    assert controller.lookahead == 1
    controller.observe_step(1, 1)
    assert controller.lookahead == 1  # at once, though it doesn't seem to pay yet
    controller.observe_step(1, 0)
    assert controller.lookahead == 0


def test_a_draft_that_seems_too_dear_gets_its_chance():
    "c is above the prior: without looking it would never be found out that all guesses are right."
    rounds = play(PayingLookahead(0.6, 0.02), [40] * 1000)
    assert sum(n for n, _ in rounds[-100:]) > 100


def test_measured_costs_are_data():
    steep = PayingLookahead(0.0, [1.0, 1.01, 3.0, 3.0, 3.0])
    for _ in range(30): steep.observe_step(5, 5)
    assert steep.lookahead == 2  # the third costs two steps
    flat = PayingLookahead(0.0, np.array([1.0, 1.0, 1.0, 1.0]))
    for _ in range(30): flat.observe_step(4, 4)
    assert flat.lookahead == 4   # nobody has measured a fifth
    assert PayingLookahead(most=3, c=0, verify=0, prior=1).lookahead == 3
    # 1 + α + α² … over v(n) + n c, with all costs counted
    for c, verify, expected in ((0.3, [1.0] * 4, 2), (0.0, 0.3, 2), (0.6, [1.0] * 4, 1), (0.0, [1.0] * 4, 4)):
        assert PayingLookahead(c, verify, prior=0.7, most=4).lookahead == expected


@pytest.mark.parametrize("wrong", [
    dict(c=-1), dict(c=None), dict(verify=-1), dict(verify=[]), dict(verify=[1, 0]), dict(verify="ab"), dict(prior=2),
    dict(prior=None),
], ids=lambda wrong: " ".join(f"{k}={v}" for k, v in wrong.items()))
def test_what_a_chooser_refuses(wrong):
    given = dict(c=.1, prior=.5, verify=.02) | wrong
    with pytest.raises(InputError): Chooser((given["c"],), given["verify"], (given["prior"],))


def test_guesses_beyond_a_rejection_say_nothing():
    controller = PayingLookahead()
    controller.observe_step(5, 2)
    assert controller.chooser.estimates[0].counts == {0: (1, 1), 1: (1, 1), 2: (0, 1)}
    controller.reset()
    assert controller.chooser.estimates[0].counts == {} and controller.chooser.rested == 0

# around a drafter


class Scripted:
    layers = (3,)
    def __init__(self): self.log = []
    def start(self, *news):
        self.log.append(("start", *news))
        return self
    def commit(self, *news): self.log.append(("commit", *news))
    def propose(self, K, sampling, rng):
        self.log.append(("propose", K))
        return Draft([7, 8, 9][:K])


class Heard:
    lookahead = 2
    def __init__(self): self.heard = []
    def observe_step(self, *seen): self.heard.append(seen)
    def reset(self): self.heard.append("reset")


def test_the_controller_is_asked_and_told():
    inner, template = Scripted(), Heard()
    drafter = AdaptiveDrafter(inner, template)
    assert drafter.layers == (3,)
    state = drafter.start([1], "features", 9, frozenset({4}))
    controller = state.controller
    assert inner.log == [("start", [1], "features", 9, frozenset({4}))] and controller.heard == ["reset"]
    assert state.propose(5, None, None).tokens == [7, 8]
    state.commit([7, 5], "more")
    assert inner.log[-1] == ("commit", [7, 5], "more")
    assert state.propose(1, None, None).tokens == [7]  # the loop's limit holds as well
    state.commit([7, 5], None)
    state.commit([5], None)                            # it was not asked
    controller.lookahead = 0
    assert state.propose(5, None, None) == Draft([])
    state.commit([5], None)
    controller.lookahead = 3
    state.propose(5, None, None)
    state.commit([7], None)                            # the text ended inside: nothing was compared with 8 and 9
    assert controller.heard[1:] == [(2, 1), (1, 1), (0, 0), (0, 0), (1, 1)]
    assert [entry[1] for entry in inner.log if entry[0] == "propose"] == [2, 1, 3]
    state.controller = StepLookahead(1)           # replaced while in use
    assert len(state.propose(5, None, None).tokens) == 1
    state.commit([7], None)
    assert state.controller.lookahead == 3 and controller.heard[-1] == (1, 1)  # the new one hears of it
    assert drafter.controller is template and template.heard == []  # that of the drafter never changes


def test_nothing_learned_is_carried_over():
    "Each sequence starts from the template or the priors, even from a template that has been in use."
    used, fresh = PayingLookahead(), PayingLookahead()
    for _ in range(9): used.observe_step(used.lookahead, 0)
    assert used.lookahead < fresh.lookahead and used.chooser.estimates[0].counts
    known = dict(used.chooser.estimates[0].counts)
    drafter, hybrid = AdaptiveDrafter(Scripted(), used), HybridDrafter(Scripted())
    for one, learned in ((drafter, lambda state: state.controller.chooser), (hybrid, lambda state: state.chooser)):
        first, other = one.start([1], None, 9), one.start([1], None, 9)
        for _ in range(3):
            first.propose(3, None, None)
            first.commit([5], None)
        for state in (other, one.start([1], None, 9)):  # of the same time, and a later one
            assert learned(state).estimates[0].counts == {} and learned(state).rested == 0
            assert len(state.propose(16, None, None).tokens) == min(3, fresh.lookahead)
        assert learned(first).estimates[0].counts[0][1] > 1 and learned(first) is not learned(other)
    assert drafter.controller is used and used.chooser.estimates[0].counts == known


def test_what_a_sequence_has_taught_can_be_read_and_replaced():
    "Who wants another text to go on with it gives it to that text's state."
    drafter, hybrid = AdaptiveDrafter(Scripted(), PayingLookahead()), HybridDrafter(Scripted())
    for one, place in ((drafter, "controller"), (hybrid, "chooser")):
        first, other = one.start([1], None, 9), one.start([1], None, 9)
        for _ in range(6):
            first.propose(3, None, None)
            first.commit([5], None)
        learned = getattr(first, place)
        def alpha(one): return getattr(one, "chooser", one).estimates[0].alpha(0)
        assert alpha(learned) < alpha(getattr(other, place))
        setattr(other, place, learned)
        asked = [len(state.propose(3, None, None).tokens) for state in (first, other, one.start([1], None, 9))]
        assert asked[0] == asked[1] < asked[2]


def test_one_rule_for_one_drafter():
    "A hybrid of one and a controller make the same choice by the same chooser."
    hybrid, controller = HybridDrafter(Scripted(), c=(0.1,), verify=0.02), PayingLookahead(0.1, 0.02, most=3)
    state = hybrid.start([1], None, 9)
    assert type(state.chooser) is type(controller.chooser) is Chooser
    for accepted in (2, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0):
        assert len(state.plan(3)[1]) == controller.lookahead
        n = controller.lookahead
        state.propose(3, None, None)
        state.commit([*[7, 8, 9][:min(n, accepted)], 5], None)
        controller.chooser.learn(0, range(n), min(n, accepted), min(n, accepted + 1))


def test_what_adaptive_makes_of_each():
    hybrid = HybridDrafter(SuffixDrafter(), Scripted())
    assert adaptive(hybrid) is hybrid
    lookup = adaptive(SuffixDrafter())
    assert type(lookup) is HybridDrafter and lookup.c == (0.0,) and lookup.priors == (SUFFIX_PRIOR,)
    for drafter, cost in ((NGramDrafter(), 0.0), (Scripted(), 0.07)):
        found = adaptive(drafter)
        assert type(found) is HybridDrafter and found.members == (drafter,) and found.c == (cost,)
        assert adaptive(found) is found
    controlled = AdaptiveDrafter(Scripted(), AdaptiveLookahead())
    assert adaptive(controlled) is controlled


def test_it_is_at_the_front_door():
    assert specdec.AdaptiveLookahead is AdaptiveLookahead and specdec.AdaptiveDrafter is AdaptiveDrafter


def test_a_target_drafting_for_itself_is_drafted_for_ever_longer(tiny):
    own = AdaptiveDrafter(ModelDrafter(tiny, 96), PayingLookahead())
    rounds = list(speculate(tiny, own, [1, 2, 3], SamplingParams(1.0), SeededRandom(0), MOST, 200))[1:]
    assert all(r.accepted == len(r.drafted) for r in rounds)
    assert len(rounds[0].drafted) < 8 and max(len(r.drafted) for r in rounds) == longest_chain(tiny, MOST)


def test_same_seed_same_tokens(tiny):
    drafter = AdaptiveDrafter(ModelDrafter(tiny.skip([2]), 96), PayingLookahead())
    def text(): return list(speculate(tiny, drafter, [1, 2, 1], SamplingParams(0.7), SeededRandom(3), 8, 40))
    assert text() == text()  # also when the same drafter has seen another text


# the executed proof


def variants(q, width, V):
    def model(): return ModelDrafter(ExactModel(q, width), V)
    def moving(): return AdaptiveLookahead(2, 1, 3, 0.5, cooldown_steps=0)
    return {
        "heuristic": lambda: AdaptiveDrafter(model(), StepLookahead(1)),
        "moving average": lambda: AdaptiveDrafter(model(), moving()),
        "what pays": lambda: AdaptiveDrafter(model(), PayingLookahead(c=0.2, prior=0.7)),
        "a hybrid of one": lambda: HybridDrafter(model(), c=(0.2,), priors=(0.7,)),
        "a hybrid of three": lambda: HybridDrafter(
            SuffixDrafter(), model(), NGramDrafter(1), c=(0.0, 0.1, 0.0), priors=(0.4, 0.6, 0.5)
        ),
        "a lookup": lambda: adaptive(SuffixDrafter()),
    }


@pytest.mark.parametrize("name", variants(None, 2, 2).keys())
@pytest.mark.parametrize("K, V", [(1, 3), (2, 2), (3, 2)])
def test_the_distribution_stays_the_targets(K, V, name):
    for case, p, q in language_pairs(V, f"adaptive {K}", most=max(2, 5 - K), halves=True):
        width = V - 1 if case == "smaller draft vocabulary" else V
        assert loop_error(speculate, variants(q, width, V)[name], p, K, V, case).error == 0, case
    if (K, V) == (2, 2):
        for end in range(V):
            make = variants(q, V, V)[name]
            assert loop_error(speculate, make, p, K, V, case, eos_ids=frozenset({end})).error == 0


@pytest.mark.parametrize("name", ["heuristic", "moving average", "what pays"])
def test_in_the_proof_the_lengths_differ(name):
    "Else it would prove less than it says."
    lengths = set()
    p, q = Language(2, "p", halves=True), Language(2, "q", halves=True)
    def make():
        drafter = variants(q, 2, 2)[name]()
        class Seen(type(drafter)):
            def start(self, *told):
                state = super().start(*told)
                class Noting(type(state)):
                    def propose(self, *asked):
                        draft = super().propose(*asked)
                        lengths.add(len(draft.tokens))
                        return draft
                state.__class__ = Noting
                return state
        drafter.__class__ = Seen
        return drafter
    assert loop_error(speculate, make, p, 3, 2, "").error == 0
    assert len(lengths) > 1


def test_the_token_thrown_away():
    "p = q = (.6, .3, .1) becomes (.84, .12, .04); kept, it stays what it is."
    row = np.array([Fraction(6, 10), Fraction(3, 10), Fraction(1, 10)], dtype=object)
    def agreed(text): return row
    def ends(keep):
        def draft(q, K, rng):
            tokens, rows = sampled(q, K, rng)
            n = next((i + keep for i, t in enumerate(tokens) if rows[i][t] < Fraction(1, 2)), len(tokens))
            return tokens[:n], rows[:n] if n else None
        return lambda rng: one_round(speculative_sampling, agreed, agreed, 1, rng, draft)[0]
    assert exact_distribution(ends(0)) == {0: Fraction(84, 100), 1: Fraction(12, 100), 2: Fraction(4, 100)}
    assert exact_distribution(ends(1)) == dict(enumerate(row))


class PeekingAtItsToken(ModelState):
    "Wrong: the token is drawn first, and thrown away where it is an unlikely one."
    def propose(self, K, sampling, rng):
        draft = super().propose(K, sampling, rng)
        sure = [float(row[token]) >= 0.5 for token, row in zip(draft.tokens, draft.q)]
        n = sure.index(False) if False in sure else len(sure)
        return Draft(draft.tokens[:n], draft.q[:n] if n else None)


class PeeksAtItsToken(ModelDrafter): State = PeekingAtItsToken


class PeekingAtTheOutcome(AdaptiveState):
    "Wrong: a draft whose last token came out as 0 is not proposed."
    def propose(self, K, sampling, rng):
        draft = super().propose(K, sampling, rng)
        if draft.tokens[-1:] == [0]: draft, self.drafted = Draft([]), []
        return draft


class PeeksAtTheOutcome(AdaptiveDrafter):
    def wrap(self, *told):
        right = super().wrap(*told)
        return PeekingAtTheOutcome(right.inner, right.controller)


@pytest.mark.parametrize("make", [
    lambda q: PeeksAtItsToken(ExactModel(q, 3), 3),
    lambda q: PeeksAtTheOutcome(ModelDrafter(ExactModel(q, 3), 3), StepLookahead(1)),
], ids=["the token thrown away", "the draft thrown away"])
def test_wrong_ways_are_caught(make):
    errors = []
    for seed in range(3):
        p, q = Language(3, f"p{seed}", halves=True), Language(3, f"q{seed}", halves=True)
        errors.append(loop_error(speculate, lambda: make(q), p, 1, 3, "").error)
    assert max(errors) > 0

# by name: `Pair.generate(K="adaptive")`


def test_a_pair_that_adapts(tiny, monkeypatch, tmp_path):
    pair = specdec.Pair(tiny, tiny)
    result = pair.generate([1, 2, 3], K="adaptive", max_new_tokens=120)
    assert result.settings["K"] == "adaptive" and result.is_lossless
    assert result.generated_ids == pair.generate([1, 2, 3], max_new_tokens=120, method="plain").generated_ids
    # by frozen prices that make drafts cheap; what is certain goes by the clock (test_clock, test_same_seed)
    free = Prices(forwards={1: .01, 17: .011}, drafts=[{1: 1e-4, 4: 1e-4}])
    monkeypatch.setattr(costs, "take_prices", lambda *given: free)
    monkeypatch.setattr(costs, "cache_home", lambda: tmp_path)
    for name, value in (("batch_invariant", False), ("name", "tiny")): monkeypatch.setattr(tiny, name, value)
    pair = specdec.Pair(tiny, tiny)
    found = pair.generate([1, 2, 3], K="adaptive", max_new_tokens=120)
    lengths = [len(r.drafted) for r in found.rounds]
    assert lengths[0] <= MOST and max(lengths) == MOST and found.costs["origin"] == "frozen"
    assert pair.generate([1, 2, 3], K="adaptive", max_new_tokens=120).rounds == found.rounds  # nothing is carried over
    plain = pair.generate([1, 2, 3], K="adaptive", max_new_tokens=9, method="plain")
    assert plain.num_drafted == 0
    assert specdec.GenerationResult.from_json(result.to_json()) == result


def test_a_controller_as_K_is_the_controllers_own_K(tiny):
    "No default K caps it, and a result names it."
    pair, template = specdec.Pair(tiny, tiny), AdaptiveLookahead(initial=8)
    result = pair.generate([1, 2, 3], K=template, max_new_tokens=120)
    assert [len(r.drafted) for r in result.rounds[:6]] == [8, 8, 8, 8, 8, 9]
    assert result.settings["K"] == "AdaptiveLookahead" and result.costs is None
    assert specdec.GenerationResult.from_json(result.to_json()) == result
    assert template.observations == len(result.rounds)
    assert result.generated_ids == pair.generate([1, 2, 3], max_new_tokens=120, method="plain").generated_ids
    stepping = pair.generate([1, 2, 3], K=StepLookahead(3), max_new_tokens=60, temperature=1.0, seed=1)
    assert [len(r.drafted) for r in stepping.rounds[:3]] == [3, 5, 7]
    for wrong in (AdaptiveLookahead, object()):  # a class, and no controller
        with pytest.raises(InputError, match="K, .*per round"): pair.generate([1, 2, 3], K=wrong)
    with pytest.raises(InputError, match=r"\"adaptive\" or AdaptiveLookahead\(\), not <class"):
        pair.generate([1, 2, 3], K=AdaptiveLookahead)
    with pytest.raises(InputError, match="K that changes"): pair.generate([1], K=template, loop="device")


@pytest.mark.parametrize("wrong", ["adaptve", "5", 0, 2.5])
def test_a_round_length_that_is_neither(tiny, wrong):
    choices = '"adaptive" or AdaptiveLookahead' if isinstance(wrong, str) else "K, the number"
    with pytest.raises(InputError, match=choices): specdec.Pair(tiny, tiny).generate([1, 2, 3], K=wrong)


def test_the_word_on_the_command_line():
    import typer

    from specdec.app.cli import round_length
    assert round_length("adaptive") == "adaptive" and round_length("7") == 7 and round_length(5) == 5
    for wrong in ("0", "-1", "2.5", "many", ""):
        with pytest.raises(typer.BadParameter, match="adaptive"): round_length(wrong)
