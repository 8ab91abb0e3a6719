"""Lookup and a tree take turns: the law stays, prices are those of levels, and a pair takes the tree only where it
promises clearly more and nothing is lost."""
from fractions import Fraction

import pytest
import torch

from helpers import ids_of
from helpers_drafters import random_head, random_target
from specdec import costs as costs_module
from specdec import pair as pairs_module
from specdec.costs import (
    Costs,
    KnownCosts,
    MachineCosts,
    TimedRound,
    calibrate,
    costs_for,
    measure_tree,
    member_cost,
    timed_rounds,
)
from specdec.drafters.base import Draft, NoDrafter, TemperatureScaledDrafter, WrapperDrafter
from specdec.drafters.choose import (
    CHANCES,
    CLEARLY,
    HybridDrafter,
    HybridState,
    Promise,
    TreeHybrid,
    head_of,
    paying_shape,
    paying_tree,
)
from specdec.drafters.head import HeadDrafter
from specdec.drafters.lookup import SuffixDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.tree import TreeDrafter
from specdec.errors import InputError
from specdec.loop import speculate
from specdec.lossless.enumerate import exact_distribution
from specdec.pair import Pair
from specdec.plan import check_settings
from specdec.sampling import SamplingParams, SeededRandom

FLAT, STEEP = (1.0,) * 16, tuple(1 + n for n in range(1, 17))
SHAPE = [(0,), (1,), (0, 0), (2,)]
REPEATING = [1, 5, 2, 7, 9, 1, 5, 2, 7, 9, 1, 5, 2]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    target = random_target(tmp_path_factory.mktemp("hybrid"))
    target.batch_invariant = False  # as in every other dtype: there, a tree's rounding can turn a greedy text
    return target


@pytest.fixture(scope="module")
def head(target): return random_head(target)


def tree_hybrid(target, head, shape=SHAPE, c=(0.0, 0.0), verify=FLAT):
    return TreeHybrid(SuffixDrafter(), TreeDrafter(head, target, shape=shape), c=c, verify=verify)


def at(verify, c=(.05, .05), tree=None):
    one = Costs(.01, verify, ((0.0, 0.0), c))
    return MachineCosts(one, one, tree)


def pair_at(target, head, costs, **options):
    chains = TemperatureScaledDrafter(HeadDrafter(head, target, **options))
    return Pair(target, HybridDrafter(SuffixDrafter(), chains), costs)


# the loop

def test_the_distribution_is_the_targets(tmp_path):
    target = random_target(tmp_path, V=4, depth=4)
    head = random_head(target, torch.tensor([0, 1, 3]), num_layers=1)
    def distribution(drafter, K):
        def program(rng): return tuple(ids_of(speculate(target, drafter, [1, 2, 1], SamplingParams(1.0), rng, K, 3)))
        return exact_distribution(program)
    due, found = distribution(NoDrafter(), 1), distribution(tree_hybrid(target, head, [(0,), (1,), (0, 1)]), 5)
    assert due.keys() == found.keys() and len(due) == 64
    assert max(abs(due[text] - found[text]) for text in due) < Fraction(1, 10 ** 5)


@pytest.mark.parametrize("K", [1, 2, 9])
def test_both_have_their_turns_and_greedy_texts_are_the_plain_ones(target, head, K):
    class WatchedState(HybridState):
        def propose(self, K, sampling, rng):
            draft = super().propose(K, sampling, rng)
            turns.append((self.pending[0], draft))
            return draft
    class Watched(TreeHybrid): State = WatchedState
    turns: list = []
    watched = Watched(SuffixDrafter(), TreeDrafter(head, target, shape=SHAPE), c=(0.0, 0.0), verify=FLAT)
    for prompt in (REPEATING, [2], [7, 7, 7, 7]):
        due = ids_of(speculate(target, NoDrafter(), prompt, SamplingParams(), SeededRandom(0), 1, 30))
        assert ids_of(speculate(target, watched, prompt, SamplingParams(), SeededRandom(0), K, 30)) == due
    kinds = {(who, draft.parents is None) for who, draft in turns if draft.tokens}
    assert kinds == {(0, True), (1, False)}
    assert all(len(draft.tokens) <= K for _, draft in turns)


class Roomy(WrapperDrafter):
    "A drafter of chains that could draft trees."
    def max_nodes(self, K): return K


def test_a_chain_is_read_as_one_also_where_trees_could_come(target, monkeypatch):
    "Its rounds are those of a drafter of chains, all of them, and need no mask; a chain may say its parents."
    def never(*given): raise AssertionError("a chain was read as a tree")
    monkeypatch.setattr("specdec.loop.read_tree", never)
    for temperature in (0.0, 1.0):
        usual, found = (list(speculate(target, drafter, REPEATING, SamplingParams(temperature), SeededRandom(0), 4, 30))
                        for drafter in (SuffixDrafter(), Roomy(SuffixDrafter())))
        assert found == usual and any(r.accepted for r in found)
    assert Draft([4, 5, 6], parents=[-1, 0, 1]).is_chain and Draft([]).is_chain
    assert not Draft([1, 2], parents=[-1, -1]).is_chain


def test_drawn_chains_beside_a_tree_keep_the_distribution(tmp_path):
    "A member that draws its tokens is judged by the rule, and the tree is walked: together they are exact."
    target = random_target(tmp_path, V=4, depth=4)
    head = random_head(target, torch.tensor([0, 1, 3]), num_layers=1)
    tree, asked = TreeDrafter(head, target, shape=[(0,), (1,), (0, 1)]), set()
    model = ModelDrafter(random_target(tmp_path / "draft", V=4, depth=2), 4)
    class Turns:
        "The model drafts where the sequence has an even length, the tree where it is odd."
        layers = tree.layers
        def max_nodes(self, K): return K
        def start(self, tokens, features, limit, eos_ids):
            self = Turns()
            self.states = model.start(tokens, None, limit, eos_ids), tree.start(tokens, features, limit, eos_ids)
            return self
        def propose(self, K, sampling, rng):
            draft = self.states[len(self.states[0].tokens) % 2].propose(K, sampling, rng)
            asked.add((draft.q is None, draft.is_chain))
            return draft
        def commit(self, tokens, features):
            self.states[0].commit(tokens, None)
            self.states[1].commit(tokens, features)
    def distribution(drafter, K):
        def program(rng): return tuple(ids_of(speculate(target, drafter, [1, 2, 1], SamplingParams(1.0), rng, K, 4)))
        return exact_distribution(program)
    due, found = distribution(NoDrafter(), 1), distribution(Turns(), 2)
    assert {(False, True), (True, False)} <= asked
    assert due.keys() == found.keys() and max(abs(due[text] - found[text]) for text in due) < Fraction(1, 10 ** 5)


# what it goes by

def test_a_tree_costs_its_levels(target, head):
    verify = (1.1, 1.2, 1.3, 1.4)
    found = tree_hybrid(target, head, c=(.2, (.5, .25)), verify=verify).chooser().prices(1, 9)
    assert found == pytest.approx([1.1 + .5, 1.2 + .5, 1.3 + .75, 1.4 + .75])
    assert tree_hybrid(target, head, c=(.2, .5), verify=verify[:2]).chooser().prices(1, 9) == pytest.approx([1.6, 1.7])
    assert tree_hybrid(target, head, c=(.2, .5), verify=verify).chooser().prices(0, 2) == pytest.approx([1.3, 1.6])
    assert [TreeDrafter(head, target, shape=SHAPE).forwards(n) for n in range(6)] == [0, 1, 1, 2, 2, 2]


def test_a_promise_is_the_sum_of_chances_and_learns(target, head):
    both = tree_hybrid(target, head)
    (a, b, third, *_), (below, *_), *_ = CHANCES
    due = [1 + a, 1 + a + b, 1 + a + b + a * below, 1 + a + b + a * below + third]
    assert both.chooser().estimates[1].expected(range(4)) == pytest.approx(due)
    promise = Promise([.5, .25])
    for _ in range(300): promise.observe(range(2), 2, 2)
    more = promise.expected(range(2))
    assert more[1] > 2.5 and more[1] - 1 == pytest.approx(1.5 * (more[0] - 1))
    least = Promise([.5, .25])
    for _ in range(300): least.observe(range(2), 0, 2)
    assert least.expected(range(2))[1] < 1.1
    for _ in range(600): promise.observe([], 0, 0)  # others have their turns: it is forgotten
    assert promise.expected(range(2)) == pytest.approx([1.5, 1.75], abs=.02)


def test_the_path_is_what_was_accepted(target, head):
    chooser = tree_hybrid(target, head).chooser()
    assert chooser.outcome(1, [3, 4, 5, 6], [3, 5, 9]) == (2, 4)
    assert chooser.outcome(1, [3, 4, 5, 6], [8]) == (0, 4)
    assert chooser.outcome(1, [], [8]) == (0, 0)
    assert chooser.outcome(0, [3, 4], [3, 9]) == (1, 2)


@pytest.mark.parametrize("chain, tree, verify", [
    (.05, .05, FLAT), (.1, .1, tuple(1 + .1 * n for n in range(1, 17))), (.2, .3, FLAT[:5]), (.05, 3.0, FLAT),
    (9.0, 9.0, FLAT),
], ids=["free rows", "dear rows", "five nodes", "a dear tree", "nothing pays"])
def test_a_tree_is_taken_where_it_is_clearly_better(chain, tree, verify):
    _, of_chains = paying_shape([row[:1] for row in CHANCES], chain, verify)
    shape, of_trees = paying_shape(CHANCES, tree, verify)
    assert paying_tree(chain, tree, verify) == (shape if of_trees > CLEARLY * of_chains else [])


def test_a_hair_better_is_no_reason():
    alike = [[.5, .001]]
    assert paying_shape(alike, 0.0, FLAT)[1] > paying_shape([[.5]], 0.0, FLAT)[1]
    assert paying_tree(0.0, 0.0, FLAT, alike) == []


def test_the_head_is_found_inside(target, head):
    chains = HeadDrafter(head, target)
    assert head_of(TemperatureScaledDrafter(chains)) is chains.head and head_of(SuffixDrafter()) is None
    assert TreeDrafter(chains.head, target).head is chains.head  # one copy of the weights


# the pair

def drafts_of(pair, **settings): return pair.generate(REPEATING, max_new_tokens=12, **settings).drafter


def test_a_pair_takes_the_tree_where_it_pays(target, head):
    assert drafts_of(pair_at(target, head, at(FLAT))) == "lookup + tree of a head"
    assert drafts_of(pair_at(target, head, at(FLAT)), K="adaptive") == "lookup + tree of a head"
    assert drafts_of(pair_at(target, head, at(STEEP))) == "lookup + head"
    pair = pair_at(target, head, at(FLAT))
    plain = pair.generate(REPEATING, max_new_tokens=20, method="plain")
    for K in (2, 5, "adaptive"):
        result = pair.generate(REPEATING, max_new_tokens=20, K=K)
        assert result.generated_ids == plain.generated_ids and result.costs["c"][1] == [.05, .05]
    for K, nodes in ((2, 0), (5, 5), (16, 16)):  # never more than K
        asked = check_settings(
            target, (), K=K, temperature=0.0, top_k=None, top_p=None, max_new_tokens=20, seed=0, stop=(), verify=None,
            method="speculative", loop=None, ignore_eos=False, logprobs=None, grammar=None)
        drafter = pair._plan(asked).drafter
        assert (len(drafter.tree.shape) if isinstance(drafter, TreeHybrid) else 0) == nodes


def test_it_keeps_chains_where_something_would_be_lost(target, head, tmp_path):
    pair = pair_at(target, head, at(FLAT))
    chains = "lookup + head"
    assert drafts_of(pair, temperature=1.0) == drafts_of(pair, logprobs=1) == chains
    assert drafts_of(pair, verify=lambda *given: (0, 1)) == chains
    exact = random_target(tmp_path)
    exact.batch_invariant = True  # as on an x86 processor: chains have the bits of plain decoding
    assert drafts_of(pair_at(exact, random_head(exact), at(FLAT))) == chains
    exact.batch_invariant = False
    assert drafts_of(pair_at(exact, random_head(exact), at(FLAT))) != chains


@pytest.mark.parametrize("tree, taken", [((.05, .05), True), ((5.0, 5.0), False), (None, False)],
                         ids=["cheap", "dear", "not known"])
def test_a_tree_is_timed_before_it_is_believed(target, head, monkeypatch, tree, taken):
    known = KnownCosts(at(FLAT, tree=tree), "calibrated")
    monkeypatch.setattr(pairs_module, "costs_for", lambda *given: known)
    pair = pair_at(target, head, None)
    for _ in range(2): assert ("tree" in drafts_of(pair)) == taken
    found = pair.generate(REPEATING, max_new_tokens=4).costs
    assert found["c"][1] == [.05, .05] and found["origin"] == "calibrated"


@pytest.mark.parametrize("origin", ["shipped", "default"])
def test_no_tree_takes_a_chains_place_unasked(target, head, monkeypatch, origin):
    "Where a tree would pay clearly, too: K would turn from a chain's length into a tree's nodes."
    known = KnownCosts(at(FLAT, tree=(0.0, 0.0)) if origin == "shipped" else None, origin)
    monkeypatch.setattr(pairs_module, "costs_for", lambda *given: known)
    for K in (5, "adaptive"):
        assert drafts_of(pair_at(target, head, None), K=K) == "lookup + head"
    asked = Pair(target, tree_hybrid(target, head))
    assert drafts_of(asked) == "lookup + tree of a head"


def test_default_costs_make_no_tree(target, head): assert "tree" not in drafts_of(pair_at(target, head, None))


# what a tree costs

def test_levels_are_what_is_paid_for():
    rounds = [TimedRound(0, 0, 1.0, 1.0), TimedRound(1, 1.0, 1.0, 1.0), TimedRound(9, 3.0, 1.0, 1.0)] * 3
    assert member_cost(rounds, (1.0,) * 9, lambda n: {1: 1, 9: 3}[n]) == pytest.approx((.5, .5))
    assert member_cost(rounds, (1.0,) * 9) == pytest.approx((.5, .125))


def test_a_trees_rounds_hold_its_nodes(target, head):
    tree = TreeDrafter(head, target, shape=SHAPE)
    assert [r.drafted for r in timed_rounds(target, tree, (0, 1, 0, 4), 0.0, held=8)] == [0, 1, 0, 4]


def test_what_a_tree_costs_is_measured_and_kept_by_a_calibration(target, head, monkeypatch, tmp_path):
    monkeypatch.setattr(costs_module, "cache_home", lambda: tmp_path)
    monkeypatch.setattr(costs_module, "check_steady", lambda rounds: None)
    monkeypatch.setattr(costs_module, "measure_costs", lambda *given: at(FLAT))
    monkeypatch.setattr(target, "name", "tiny")
    paid = []
    def member(rounds, verify, forwards=int):
        paid.append([forwards(n) for n in (1, 2, 4, 16)])
        return .125, .25
    monkeypatch.setattr(costs_module, "member_cost", member)
    drafter = pair_at(target, head, None).drafter
    found = calibrate(target, drafter)
    assert found.costs == at(FLAT, tree=(.125, .25)) and costs_for(target, drafter) == found
    assert paid == [[1, 2, 2, 2]]  # levels
    assert measure_tree(target, drafter, at(STEEP).greedy) is None  # it would not be taken: not timed
    assert measure_tree(target, HybridDrafter(SuffixDrafter()), at(FLAT).greedy) is None and len(paid) == 1
    monkeypatch.setattr(target, "batch_invariant", True)
    assert measure_tree(target, drafter, at(FLAT).greedy) is None and len(paid) == 1
    def busy(rounds): raise costs_module.BusyError("busy")
    monkeypatch.setattr(target, "batch_invariant", False)
    monkeypatch.setattr(costs_module, "check_steady", busy)
    with pytest.raises(costs_module.BusyError): calibrate(target, drafter)
    assert costs_for(target, drafter) == found  # what was kept stays


# bad input

@pytest.mark.parametrize("wrong, said", [
    (lambda target, head: TreeHybrid(c=(), verify=FLAT), "TreeDrafter with a shape"),
    (lambda target, head: tree_hybrid(target, head, shape=None), "TreeDrafter with a shape"),
    (lambda target, head: tree_hybrid(target, head, c=(0.0,)), "one of them"),
    (lambda target, head: tree_hybrid(target, head, verify=()), "Costs must not be negative"),
    (lambda target, head: paying_tree(.1, .1, []), "verify is empty"),
    (lambda target, head: Pair(target, tree_hybrid(target, head)).generate([1], logprobs=1), "Trees of draft"),
    (lambda target, head: Pair(target, tree_hybrid(target, head)).generate([1], loop="device"), "works on the host"),
], ids=["nobody", "no shape", "a cost missing", "no v", "no v for a tree", "log-probabilities", "device"])
def test_bad_input(target, head, wrong, said):
    with pytest.raises(InputError, match=said): wrong(target, head)
