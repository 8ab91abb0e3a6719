"""Lookup and a tree take turns: the law stays, prices are those of levels, and a pair takes the tree only where it
promises clearly more and nothing is lost."""
from fractions import Fraction

import pytest
import torch

from helpers import ids_of
from helpers_drafters import random_head, random_target
from specdec.drafters import costs as costs_module
from specdec.drafters.base import Draft, NoDrafter, WrapperDrafter
from specdec.drafters.choose import HybridDrafter, HybridState
from specdec.drafters.colder import TemperatureScaledDrafter
from specdec.drafters.costs import Prices, clock_for, frozen_clock, show, tree_level
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.lookup import SuffixDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.tree import TreeDrafter, paying_shape
from specdec.drafters.tree_hybrid import CHANCES, CLEARLY, Promise, TreeHybrid, head_of, paying_tree
from specdec.errors import InputError
from specdec.loop import speculate
from specdec.lossless.enumerate import exact_distribution
from specdec.options import Options
from specdec.pair import Pair
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


@pytest.fixture
def pair_at(target, head, monkeypatch, tmp_path):
    "A pair on a machine with these prices, in plain steps: v(1), v(2), …, c of a chain's tokens, of a tree's levels."
    monkeypatch.setattr(costs_module, "cache_home", lambda: tmp_path)
    timed = []
    def pair(verify, c=.05, tree=.05, target=target, head=head, **options):
        def take(target, hybrid, sampled, size=1, certain=False):
            level = isinstance(hybrid, TreeHybrid)
            timed.append("tree" if level else "chain")
            n = hybrid.max_nodes(99) if level else 4
            lengths = {1: tree, n: tree * hybrid.tree.forwards(n)} if level else {n: n * c for n in (1, 4)}
            return Prices(forwards={1 + i: .01 * v for i, v in enumerate((1.0, *verify))},
                          drafts=[{}, {n: .01 * max(each, 1e-4) for n, each in lengths.items()}])
        monkeypatch.setattr(costs_module, "take_prices", take)
        chains = TemperatureScaledDrafter(HeadDrafter(head, target, **options))
        found = Pair(target, HybridDrafter(SuffixDrafter(), chains))
        found.timed = timed
        return found
    return pair


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


@pytest.mark.parametrize("V, drafted", [(3, [0, 2]), pytest.param(4, [0, 1, 3], marks=pytest.mark.slow)])
def test_drawn_chains_beside_a_tree_keep_the_distribution(tmp_path, V, drafted):
    "A member that draws its tokens is judged by the rule, and the tree is walked: together they are exact."
    target = random_target(tmp_path, V=V, depth=4)
    head = random_head(target, torch.tensor(drafted), num_layers=1)
    tree, asked = TreeDrafter(head, target, shape=[(0,), (1,), (0, 1)]), set()
    model = ModelDrafter(random_target(tmp_path / "draft", V=V, depth=2), V)
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


def test_a_pair_takes_the_tree_where_it_pays(target, pair_at):
    for K in (5, "adaptive"):
        pair = pair_at(FLAT)
        assert drafts_of(pair, K=K) == "lookup + tree of a head"
        assert pair.generate(REPEATING, max_new_tokens=4, K=K).costs["c"][1] == pytest.approx([.05, .05])
    plain = pair.generate(REPEATING, max_new_tokens=20, method="plain")
    for K in (2, 5, "adaptive"):
        result = pair.generate(REPEATING, max_new_tokens=20, K=K)
        assert result.generated_ids == plain.generated_ids and result.costs["origin"] == "frozen"
    for K, nodes in ((2, 0), (5, 5), (16, 16)):  # never more than K
        drafter = pair._plan(Options(K=K, max_new_tokens=20, seed=0)).drafter
        assert (len(drafter.tree.shape) if isinstance(drafter, TreeHybrid) else 0) == nodes


def test_a_pair_keeps_its_chains_where_rows_are_dear(pair_at):
    pair = pair_at(STEEP)
    assert drafts_of(pair) == "lookup + head" and pair.timed == ["chain"]  # a tree isn't even timed


def test_it_keeps_chains_where_something_would_be_lost(target, pair_at, tmp_path):
    pair, chains = pair_at(FLAT), "lookup + head"
    assert drafts_of(pair, temperature=1.0) == drafts_of(pair, logprobs=1) == chains
    assert drafts_of(pair, verify=lambda *given: (0, 1)) == chains
    exact = random_target(tmp_path)
    exact.batch_invariant = True  # as on an x86 processor: chains have the bits of plain decoding
    assert drafts_of(pair_at(FLAT, target=exact, head=random_head(exact))) == chains
    exact.batch_invariant = False
    assert drafts_of(pair_at(FLAT, target=exact, head=random_head(exact))) != chains


@pytest.mark.parametrize("tree, taken", [(.05, True), (5.0, False)], ids=["cheap", "dear"])
def test_a_tree_is_timed_before_it_is_believed(pair_at, tree, taken):
    pair = pair_at(FLAT, tree=tree)
    for _ in range(2): assert ("tree" in drafts_of(pair, K=16)) == taken
    assert pair.timed == ["chain", "tree"]  # once, and kept
    assert "tree" in drafts_of(pair_at(FLAT, tree=tree), K=16) or not taken
    assert pair.timed == ["chain", "tree"]


def test_a_tree_that_was_asked_for_goes_by_the_costs_it_was_given(target, head):
    assert drafts_of(Pair(target, tree_hybrid(target, head))) == "lookup + tree of a head"


# what a tree costs

def test_levels_are_what_is_paid_for(target, head):
    tree = tree_hybrid(target, head)  # four nodes in two levels
    prices = Prices(forwards={1: 2.0}, drafts=[{}, {1: 1.0, 4: 1.5}])
    assert tree_level(show(prices, clock_for(target, tree, True), 1), tree, 2.0) == (.5, .25)
    nothing = Prices(forwards={1: 2.0}, drafts=[{}, {}])
    assert tree_level(show(nothing, clock_for(target, tree, True), 1), tree, 2.0) is None


def test_a_trees_drafts_are_timed_by_their_nodes(target, head, monkeypatch, tmp_path):
    monkeypatch.setattr(costs_module, "cache_home", lambda: tmp_path)
    clock = frozen_clock(target, tree_hybrid(target, head), False)
    assert {1, 4} <= clock.drafts[1].known.keys() and clock.drafts[0].known == {}


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
