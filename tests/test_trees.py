"""Trees of guesses: one forward reads all paths, the walk keeps the target's law, and what stays in the caches is one
path."""
from fractions import Fraction
from itertools import product
from math import prod

import pytest
import torch

from helpers import ids_of, tiny
from helpers_drafters import random_head, random_target
from specdec.cache import KVCache
from specdec.device.loop import ancestors, walk_on_device
from specdec.device.ops import DeviceDraft
from specdec.drafters.base import Draft, NoDrafter, walk
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.tree import GrowingTree, TreeDrafter, TreeState, best_tree, paying_shape
from specdec.engine.request import Request
from specdec.errors import InputError
from specdec.loop import decide, speculate
from specdec.lossless.enumerate import exact_distribution
from specdec.models.batch import ancestry, keep_rows, places, read_tree
from specdec.models.linear import FEW
from specdec.models.llama import rms_norm
from specdec.pair import Pair
from specdec.sampling import SamplingParams, SeededRandom

PROMPT = [1, 5, 2, 7]
BUSH = Draft([3, 9, 4, 3, 10, 9, 3], parents=[-1, -1, 0, 0, 1, 3, 4])  # two trunks; the same token in several places


@pytest.fixture(scope="module")
def target(tmp_path_factory): return random_target(tmp_path_factory.mktemp("trees"))


@pytest.fixture(scope="module")
def head(target): return random_head(target)


def path_to(tree, node):
    "The nodes from the text to it."
    return [] if node < 0 else [*path_to(tree, tree.parents[node]), node]


def said(tree, path): return [tree.tokens[node] for node in path]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tree", [BUSH, Draft([3, 4, 9], parents=[-1, 0, 1]),
                                  Draft([3] * 20, parents=list(range(-1, 19)))],
                         ids=["a bush", "a chain", "more than count as few"])
def test_each_node_reads_its_own_path(tmp_path, tree, dtype):
    target = random_target(tmp_path, dtype=dtype)
    cache = target.new_cache(48)
    target.forward(torch.tensor([PROMPT[:-1]]), cache)
    logits, features = read_tree(target, PROMPT[-1], tree, cache, layers=(1, 5))
    def normed(of_it):
        first, last = of_it.chunk(2, -1)
        return torch.cat([first, rms_norm(last, target.norm, target.config.rms_norm_eps)], -1)
    for node in range(-1, len(tree.tokens)):
        alone, of_it = target.forward(torch.tensor([PROMPT + said(tree, path_to(tree, node))]), layers=(1, 5))
        torch.testing.assert_close(logits[node + 1], alone[0, -1], rtol=0, atol=2e-5 if dtype == torch.float32 else .1)
        torch.testing.assert_close(  # the last state is large before the final norm, which the bound was made for
            normed(features[node + 1]), normed(of_it[0, -1]), rtol=0, atol=2e-5 if dtype == torch.float32 else .2
        )


@pytest.mark.parametrize("path", [[], [0], [1, 4, 6], [0, 3, 5]], ids=str)
def test_the_cache_keeps_one_path(target, path):
    cache = target.new_cache(48)
    target.forward(torch.tensor([PROMPT[:-1]]), cache)
    read_tree(target, PROMPT[-1], BUSH, cache)
    keep_rows(cache, len(PROMPT) - 1, [0, *(node + 1 for node in path)])
    text = PROMPT + said(BUSH, path)
    assert cache.length == len(text)
    torch.testing.assert_close(target.forward(torch.tensor([[8]]), cache)[0, -1],
                               target.forward(torch.tensor([[*text, 8]]))[0, -1], rtol=0, atol=2e-5)


def distribution_of(target, decode, count=2):
    "The exact law of the first tokens."
    def program(rng):
        texts = decode(rng, count)
        return tuple(ids_of(texts))
    return exact_distribution(program)


@pytest.mark.parametrize("min_p", [None, .5])
@pytest.mark.parametrize("shape", [None, [(0,), (0, 0), (1,), (1, 1)]], ids=["as the head believes", "one shape"])
def test_the_distribution_is_the_targets(tmp_path, shape, min_p):
    target = random_target(tmp_path, V=4, depth=4)
    head = random_head(target, torch.tensor([0, 1, 3]), num_layers=1)
    sampling = SamplingParams(1.0, min_p=min_p)
    def plain(rng, count): return speculate(target, NoDrafter(), [1, 2], sampling, rng, 1, count)
    def trees(rng, count):
        drafter = TreeDrafter(head, target, width=2, depth=2, shape=shape)
        return speculate(target, drafter, [1, 2], sampling, rng, 5, count)
    due, found = distribution_of(target, plain, 3), distribution_of(target, trees, 3)
    assert due.keys() == found.keys() and (len(due) == 64 if min_p is None else 1 < len(due) < 64)
    assert max(abs(due[text] - found[text]) for text in due) < Fraction(1, 10 ** 5)


@pytest.mark.parametrize("K", [1, 4, 15])
@pytest.mark.parametrize("shape", [None, best_tree([[.5, .2, .1]], 15)], ids=["as the head believes", "one shape"])
def test_greedy_texts_are_the_plain_ones(target, head, K, shape):
    drafter = TreeDrafter(head, target, width=3, depth=4, shape=shape)
    for prompt in (PROMPT, [2], list(range(20))):
        due = ids_of(speculate(target, NoDrafter(), prompt, SamplingParams(), SeededRandom(0), 1, 30))
        rounds = list(speculate(target, drafter, prompt, SamplingParams(), SeededRandom(0), K, 30))
        assert ids_of(rounds) == due
        for each in rounds[1:]:
            assert each.emitted[:each.accepted] == each.drafted[:each.accepted]
            assert len(each.drafted) <= each.accepted + 1
            if len(each.drafted) > each.accepted: assert each.drafted[each.accepted] != each.emitted[each.accepted]


def test_it_stops_at_an_end_and_at_the_context(target, head):
    drafter = TreeDrafter(head, target)
    due = ids_of(speculate(target, NoDrafter(), PROMPT, SamplingParams(), SeededRandom(0), 1, 60))
    assert ids_of(speculate(target, drafter, PROMPT, SamplingParams(), SeededRandom(0), 15, 500)) == due  # 64 positions
    end = due[7]
    texts = ids_of(speculate(target, drafter, PROMPT, SamplingParams(), SeededRandom(0), 15, 60, frozenset({end})))
    assert texts == due[:due.index(end) + 1]


def test_a_tree_accepts_more_than_a_chain_of_its_head(target, head):
    def rounds(loop, drafter, K):
        return sum(len(list(loop(target, drafter, [a, 5, 2], SamplingParams(), SeededRandom(0), K, 40)))
                   for a in range(8))
    assert rounds(speculate, TreeDrafter(head, target), 15) < rounds(speculate, HeadDrafter(head, target), 4)


def test_the_head_reads_each_node_along_its_path(target, head, monkeypatch):
    "A level's logits are those of the chain that leads there."
    drafter, seen = TreeDrafter(head, target, width=3, depth=3), []
    def told(tree, level, *rest):
        logits, states = read_level(tree, level, *rest)
        seen.extend((said(tree, path_to(tree, node)), row) for node, row in zip(level, logits))
        return logits, states
    _, features = target.forward(torch.tensor([PROMPT]), layers=drafter.layers)
    growing = drafter.start([*PROMPT, 3], features[0], 40)
    read_level = growing.read_level
    monkeypatch.setattr(growing, "read_level", told)
    growing.propose(12, SamplingParams(), SeededRandom(0))
    assert len(seen) == 6 and len({len(path) for path, _ in seen}) == 2
    for path, row in seen:
        alone = HeadDrafter(head, target).start([*PROMPT, 3], features[0], 40)
        logits, state = alone.catch_up()
        for token in path: logits, state = alone.head.step([token], state, alone.cache)
        torch.testing.assert_close(row, logits, rtol=0, atol=1e-5)


def test_the_drafter_gets_the_features_of_the_path(target, head):
    told = []
    class ToldState(TreeState):
        def commit(self, tokens, features):
            told.append(features)  # the first time, what it started with
            super().commit(tokens, features)
    class Told(TreeDrafter):
        def start(self, *begun): return ToldState(self, *begun)
    drafter = Told(head, target)
    rounds = list(speculate(target, drafter, PROMPT, SamplingParams(), SeededRandom(0), 15, 30))
    text = [*PROMPT, *ids_of(rounds)]
    told = torch.cat(told)
    _, due = target.forward(torch.tensor([text[:-1]]), layers=drafter.layers)
    torch.testing.assert_close(told, due[0, :len(told)], rtol=0, atol=1e-4)
    assert len(told) == len(text) - 1


def test_a_tree_of_one_node_is_a_chain_of_one(target, head):
    trees = list(speculate(target, TreeDrafter(head, target), PROMPT, SamplingParams(), SeededRandom(0), 1, 30))
    chains = list(speculate(target, HeadDrafter(head, target), PROMPT, SamplingParams(), SeededRandom(0), 1, 30))
    assert trees == chains


def test_the_best_tree_is_the_likeliest(target):
    found = best_tree([[.5, .3, .1], [.6, .2], [.5]], 7)
    assert found == [(0,), (0, 0), (1,), (1, 0), (0, 0, 0), (0, 1), (2,)]
    assert best_tree([[.5]], 3) == [(0,), (0, 0), (0, 0, 0)]
    for shape in (found, best_tree([[.4, .3]], 15)):
        assert all(path[:-1] in {(), *shape[:i]} for i, path in enumerate(shape))


def begun(drafter, target, limit=40, ends=frozenset()):
    "A drafter's state of a text."
    _, features = target.forward(torch.tensor([PROMPT]), layers=drafter.layers)
    return drafter.start([*PROMPT, 3], features[0], limit, ends)


def proposed(drafter, K): return drafter.propose(K, SamplingParams(), SeededRandom(0))


def test_nothing_is_guessed_behind_an_end(target, head):
    whole = proposed(begun(TreeDrafter(head, target), target), 12)
    ends = {whole.tokens[0]}
    assert 0 in whole.parents  # else it shows nothing
    found = proposed(begun(TreeDrafter(head, target), target, ends=ends), 12)
    assert ends & set(found.tokens) and len(found.tokens) == 12
    assert all(parent < 0 or found.tokens[parent] not in ends for parent in found.parents)


@pytest.mark.parametrize("K", [1, 3, 7, 12])
def test_what_is_not_gone_on_from_could_not_have_been_kept(target, head, K, monkeypatch):
    drafter = TreeDrafter(head, target, width=4, depth=4)
    state = begun(drafter, target)
    found, read = proposed(state, K), state.cache.length - state.read
    def all_of_them(self, born, ends): return self.best(born, self.width)
    monkeypatch.setattr(GrowingTree, "worth_reading", all_of_them)
    state = begun(drafter, target)
    assert proposed(state, K) == found
    fewer = state.cache.length - state.read - read  # of the rows that the head has to read
    assert fewer > 0 if K == 3 else fewer >= 0


@pytest.mark.parametrize("left", [0, 1, 2])
def test_no_guess_stands_where_neither_the_text_nor_the_head_can_get(target, head, left):
    shapes = None, [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    for drafter in (TreeDrafter(head, target, shape=shape) for shape in shapes):
        found = proposed(begun(drafter, target, limit=len(PROMPT) + left), 30)  # a draft's last token is never read
        assert max(found.depths(), default=0) == left + 1
        drafter.context_length = len(PROMPT) + left
        assert proposed(begun(drafter, target), 30) == found


def all_shapes(n, width, depth):
    "Every tree of at most n nodes."
    paths = [path for length in range(1, depth + 1) for path in product(range(width), repeat=length)]
    found, new = {()}, {()}
    for _ in range(n):
        new = {tuple(sorted((*tree, path))) for tree in new for path in paths
               if path not in tree and (len(path) == 1 or path[:-1] in tree)}
        found |= new
    return found - {()}


@pytest.mark.parametrize("c", [0.0, .3, (.5, .1), (.1, .6)], ids=str)
@pytest.mark.parametrize("verify", [[1.0, 1.1, 1.2, 1.9], [1.4, 1.4, 1.4, 1.4], [3.0, 3.0, 3.0, 3.0]], ids=str)
def test_no_tree_is_a_better_bargain_than_the_paying_one(c, verify):
    chances = [[.5, .2], [.6, .1], [.3, .3]]
    first, further = c if isinstance(c, tuple) else (c, c)
    def bargain(shape):
        tokens = 1 + sum(prod(chances[min(i, 2)][rank] for i, rank in enumerate(path)) for path in shape)
        return tokens / (verify[len(shape) - 1] + first + (max(map(len, shape)) - 1) * further)
    shape, value = paying_shape(chances, c, verify)
    best = max(map(bargain, all_shapes(4, 2, 4)))
    if best <= 1: assert (shape, value) == ([], 1.0)
    else: assert value == pytest.approx(best) == pytest.approx(bargain(shape))


def test_a_pair_decodes_with_it_on_the_device(target, head):
    for drafter in (TreeDrafter(head, target), TreeDrafter(head, target, shape=best_tree([[.5, .2]], 9))):
        pair, asked = Pair(target, drafter), dict(K=9, max_new_tokens=30)
        found, due = (pair.generate(PROMPT, loop=loop, **asked) for loop in ("device", "host"))
        assert found.rounds == due.rounds and found.generated_ids == due.generated_ids
        assert (found.loop, due.loop) == ("device", "host")


def test_a_guess_that_does_not_count_has_not_failed():
    "Behind the end of the head's context a tree on the device has places, and no guesses."
    for meant, tried in ((True, 2), (False, 1)):
        tokens, parents, valid, broken = map(torch.tensor, ([3, 4], [0, 1], [True, meant], [False]))
        tree = DeviceDraft(tokens, None, torch.tensor([2]), broken, parents=parents, valid=valid)
        decided = walk_on_device(tree, ancestors(parents), torch.tensor([3, 9, 9]), torch.zeros(3, 12))
        count = decided.report[2:3]  # behind the two places
        assert (decided.num_accepted.tolist(), count.tolist()) == ([1], [tried])


def test_ancestry_and_walk():
    assert ancestry(BUSH.parents)[6].nonzero().flatten().tolist() == [1, 4, 6]
    answers = {-1: 9, 1: 10, 4: 3, 6: 11}
    assert walk(BUSH, answers.get) == ([1, 4, 6], 11)
    assert walk(BUSH, lambda node: 23) == ([], 23)


def test_a_pair_decodes_with_it(target, head):
    pair = Pair(target, TreeDrafter(head, target))
    result = pair.generate(PROMPT, K=9, max_new_tokens=20)
    assert result.generated_ids == pair.generate(PROMPT, method="plain", max_new_tokens=20).generated_ids
    assert result.drafter == "tree of a head" and result.is_lossless and result.loop == "host"
    again = [pair.generate(PROMPT, K=9, max_new_tokens=20, temperature=1.0, seed=3).generated_ids for _ in range(2)]
    assert again[0] == again[1]


def nothing(*args): raise AssertionError


@pytest.mark.parametrize("wrong, said", [
    (lambda target, head: best_tree([[1.]], 0), "n, the nodes of a tree"),
    (lambda target, head: TreeDrafter(head, target, width=0), "width"),
    (lambda target, head: TreeDrafter(head, target, depth=0), "depth"),
    (lambda target, head: TreeDrafter(head, target, shape=[]), "shape"),
    (lambda target, head: TreeDrafter(head, target, shape=[(0, 0)]), "shape"),
    (lambda target, head: TreeDrafter(head, target, shape=[(0, 0), (0,)]), "shape"),
    (lambda target, head: TreeDrafter(head, target, shape=[(), (0,)]), "shape"),
    (lambda target, head: paying_shape([[.5]], 0.1, []), "verify is empty"),
    (lambda target, head: Pair(target, TreeDrafter(head, target)).generate(PROMPT, verify=nothing), "verify"),
    (lambda target, head: Pair(target, TreeDrafter(head, target)).generate(PROMPT, K="adaptive"), "adaptive"),
    (lambda target, head: speculate(Foreign(), TreeDrafter(head, target), PROMPT, SamplingParams(), SeededRandom(0)),
     "Foreign"),
    (lambda target, head: speculate(target, TreeDrafter(head, target), PROMPT, SamplingParams(), SeededRandom(0), 0),
     "K"),
], ids=["no nodes", "width", "depth", "empty shape", "orphans", "a child first", "the text", "no costs", "a rule",
        "adaptive", "another target", "K"])
def test_bad_input(target, head, wrong, said):
    with pytest.raises(InputError, match=said): wrong(target, head)


class Foreign:
    "A target that is none of our decoders."
    window, vocab_size, context_length = None, 100, 100


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_walk_reads_each_node_in_its_own_row(target, temperature):
    "Row 0 stands behind the sequence, row i + 1 behind node i; here each row leaves no choice."
    draft = Draft([3, 9, 4], parents=[-1, -1, 1])
    logits = torch.full((4, target.vocab_size), -100.0)
    for row, token in enumerate([9, 5, 4, 7]): logits[row, token] = 100.0
    request = Request(target, PROMPT, NoDrafter(), SamplingParams(temperature), SeededRandom(0))
    assert decide(request, draft, (logits, None)) == ([1, 2], [9, 4, 7])


def test_no_tree_is_asked_for_where_only_one_token_has_room():
    "A round emits one more token than it accepts; with room for one there is nothing to draft."
    class Unasked:
        layers = ()
        def max_nodes(self, K): return K
        def start(self, tokens, features, limit, eos_ids): return self
        def propose(self, K, sampling, rng): raise AssertionError("it was asked")
        def commit(self, tokens, features): pass
    rounds = speculate(tiny(), Unasked(), [1, 2, 3], SamplingParams(), SeededRandom(0), 4, 2)
    assert [(r.drafted, len(r.emitted)) for r in rounds] == [([], 1), ([], 1)]
    with pytest.raises(AssertionError, match="asked"):
        list(speculate(tiny(), Unasked(), [1, 2, 3], SamplingParams(), SeededRandom(0), 4, 3))


def test_many_nodes_in_float32_have_one_mask_for_all_heads():
    "Only a few rows in fewer bits are folded into the heads that share keys."
    model, hidden = tiny(), torch.zeros(FEW + 1, 32, dtype=torch.bool)
    many, few = (places(model, torch.arange(n), hidden[:n], False) for n in (FEW + 1, FEW))
    assert many.fold == few.fold == 1 and many.mask.shape == hidden.shape


def test_rows_are_kept_where_a_layer_has_nothing_yet():
    cache, rows = KVCache(2, 8), torch.arange(3.).view(1, 1, 3, 1)
    cache.append(1, rows, rows)
    keep_rows(cache, 0, [0, 2])
    assert cache.length == 2 and cache.keys[1][0, 0, :2, 0].tolist() == [0, 2] and cache.keys[0] is None
