"The head's drafter: its q against the batched head, its bookkeeping after any history, and the exact law with it."
import copy
import random
from dataclasses import replace

import pytest
import torch

from helpers_drafters import (
    CPU,
    DRAFT,
    OPTIONS,
    TINY,
    V,
    difference,
    error,
    fresh,
    proposals,
    random_head,
    random_target,
    read,
)
from specdec.drafters.head_drafter import FastHead, HeadDrafter, HeadState
from specdec.errors import InputError, ModelError
from specdec.loop import speculate
from specdec.models.loading import load_model
from specdec.sampling import SamplingParams, SeededRandom


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    random_target(folder)
    return folder


@pytest.fixture(scope="module")
def target(folder): return load_model(folder, CPU, torch.float32)

# what it proposes


def t2d_complement(): return [i for i in range(V) if i not in DRAFT.tolist()]
def test_first_row_of_q_is_the_batched_forward(target):
    head = random_head(target)
    text = torch.randint(V, (1, 12), generator=torch.Generator().manual_seed(5))
    features = read(target, text, head.config.layers)
    drafter = HeadDrafter(head, target).start(text[0].tolist(), features[0, :-1], 30)
    for sampling in (SamplingParams(1.0), SamplingParams(.7, top_k=3), SamplingParams(1.3, top_p=.6)):
        q = proposals(drafter, 3, sampling).q
        assert q.shape == (3, V) and torch.allclose(q.sum(-1), torch.ones(3)) and not q[:, t2d_complement()].any()
        expected = sampling.probs(head(text, features, 1)[0][0, -1].detach())
        assert torch.allclose(q[0, DRAFT], expected, atol=1e-6)
        assert ((q[0] > 0).sum() <= 3) or sampling.top_k is None


def test_tokens_are_drawn_from_the_reported_q(target):
    "The draws of a source that remembers what it was asked to draw from."
    class Remembering(SeededRandom):
        asked = []
        def categorical(self, weights):
            choice = super().categorical(weights)
            self.asked.append((weights, choice))
            return choice
    head, rng = random_head(target), Remembering(0)
    known = read(target, torch.tensor([[1]]), head.config.layers)[0]
    draft = HeadDrafter(head, target).start([1, 2], known, 30).propose(4, SamplingParams(.8), rng)
    assert draft.tokens == [DRAFT[choice].item() for _, choice in rng.asked]
    assert all(torch.equal(weights, row[DRAFT]) for (weights, _), row in zip(rng.asked, draft.q))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_stops_at_the_end_of_the_text_and_keeps_it(target, temperature):
    head = random_head(target)
    text = torch.randint(V, (1, 12), generator=torch.Generator().manual_seed(5))
    features = read(target, text, head.config.layers)

    def proposed(eos_ids):
        state = HeadDrafter(head, target).start(text[0].tolist(), features[0, :-1], 30, eos_ids)
        return state.propose(5, SamplingParams(temperature), SeededRandom(3))
    whole = proposed(frozenset())
    end = whole.tokens[1]
    n = whole.tokens.index(end) + 1
    draft = proposed({end})
    assert draft.tokens == whole.tokens[:n] and n < len(whole.tokens) == 5
    assert draft.q is None if temperature == 0 else torch.equal(draft.q, whole.q[:n])


def test_greedy_drafts_are_certain_and_likeliest(target):
    head = random_head(target)
    text = torch.randint(V, (1, 12))
    features = read(target, text, head.config.layers)
    drafter = HeadDrafter(head, target).start(text[0].tolist(), features[0, :-1], 30)
    draft = drafter.propose(3, SamplingParams(), None)  # nothing is drawn
    assert draft.q is None and draft.tokens[0] == DRAFT[head(text, features, 1)[0][0, -1].argmax()].item()
    assert draft.tokens == proposals(drafter, 3, SamplingParams(1.0, top_k=1)).tokens


@pytest.mark.parametrize("name", OPTIONS)
def test_after_any_history_it_drafts_like_a_fresh_one(target, name):
    "Rejections, full acceptance, rounds in which it isn't asked, and asked twice."
    head, choose = random_head(target, **OPTIONS[name]), random.Random(0)
    text = [1, 2, 3]
    drafter = fresh(head, target, text)
    while len(text) < 30:
        for _ in range(choose.choice([0, 1, 1, 2])):
            again = proposals(fresh(head, target, text))
            draft = proposals(drafter)
            assert draft.tokens == again.tokens and difference(draft.q, again.q) < 1e-4
        new = [choose.randrange(V) for _ in range(choose.randint(1, 4))]
        features = read(target, torch.tensor([text + new]), head.config.layers)[0, len(text) - 1:-1]
        drafter.commit(new, features)
        text += new


class KeepsState(HeadState):
    "Wrong: goes on from its own states instead of reading the accepted tokens again."
    def commit(self, tokens, features):
        super().commit(tokens, features)
        kept = min(len(tokens), 1)
        if self.read and self.last is not None:
            self.unread, self.features = self.unread[kept:], [torch.cat(self.features)[kept:]]

class KeepsDrafts(HeadDrafter): State = KeepsState


def test_keeping_its_own_states_would_be_noticed(target):
    head, text, new = random_head(target), [1, 2, 3], [5, 6, 7]
    drafters = [kind(head, target) for kind in (HeadDrafter, KeepsDrafts)]
    features = read(target, torch.tensor([text + new]), head.config.layers)[0]
    rows = []
    for drafter in drafters:
        state = drafter.start(text, features[:2], 40)
        proposals(state)
        state.commit(new, features[2:5])
        rows.append(proposals(state).q[0])
    expected = proposals(fresh(head, target, text + new)).q[0]
    assert difference(rows[0], expected) < 1e-4 < difference(rows[1], expected)


def test_the_context_ends(target):
    head = random_head(target)
    short = copy.deepcopy(head.config.decoder)
    short.max_position_embeddings = 6
    head.config = replace(head.config, decoder=short)
    # three positions known, three more fit, and the last draft is never read
    drafter = fresh(head, target, [1, 2, 3, 4])
    assert len(proposals(drafter, 9).tokens) == 4
    drafter.commit([5, 6], read(target, torch.tensor([[1, 2, 3, 4, 5, 6]]), head.config.layers)[0, 3:5])
    assert len(proposals(drafter, 9).tokens) == 2
    drafter.commit([7, 8], read(target, torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]), head.config.layers)[0, 5:7])
    assert proposals(drafter, 9).tokens == []
    rounds = list(speculate(target, HeadDrafter(head, target), [1, 2, 3], SamplingParams(1.0), SeededRandom(0), 3, 20))
    assert sum(len(r.emitted) for r in rounds) == 20


def test_broken_logits_name_the_head(target):
    head = random_head(target)
    with torch.no_grad(): head.lm_head.weight[0] = float("nan")
    with pytest.raises(ArithmeticError, match="The head"): proposals(fresh(head, target, [1, 2]))


def test_half_precision_does_not_overflow(target):
    "The first feature of a text can be thousands of times as large as the others."
    head = random_head(target).half()
    features = torch.full((1, head.config.feature_size), 6e4)
    head.fc.weight.data.fill_(1.0)
    fused = FastHead(head, lambda ids: torch.zeros(*ids.shape, 32)).fuse(features)
    assert fused.dtype == torch.float16 and torch.isfinite(fused).all()


def test_a_drafter_for_another_target_is_refused(target, tiny):
    with pytest.raises(ModelError, match="vocabulary of 24"): HeadDrafter(random_head(target), tiny)

# the exact law
@pytest.fixture(scope="module")
def tiny(tmp_path_factory): return random_target(tmp_path_factory.mktemp("tiny"), V=3, depth=3, **TINY)


class MisreportsState(HeadState):
    "Wrong: draws from the head's q, and reports a uniform one."
    def propose(self, K, sampling, rng):
        draft = super().propose(K, sampling, rng)
        return replace(draft, q=(draft.q > 0) / (draft.q > 0).sum(-1, keepdim=True))

class Misreports(HeadDrafter): State = MisreportsState


@pytest.mark.parametrize(
    "K, tokens, sampling",
    [
        (1, [0, 1, 2], SamplingParams(1.0)), (2, [0, 2], SamplingParams(1.0)),
        (2, [0, 1, 2], SamplingParams(0.8, top_k=2)),
        (3, [1, 2], SamplingParams(1.5, top_p=0.8)), (2, [0, 2], SamplingParams()),
    ],
    ids=["one guess", "two of three tokens", "top-k", "top-p", "greedy"],
)
def test_the_distribution_is_the_targets(tiny, K, tokens, sampling):
    """Softmax weights are no exact fractions, and float32 rows differ in the last bits with the number of tokens read
    at once: so 1e-6, not 0."""
    head = random_head(tiny, torch.tensor(tokens))
    assert error(tiny, HeadDrafter(head, tiny), sampling, K) < 1e-6


@pytest.mark.parametrize("stop_below", [.2, .45, .7])
def test_an_early_end_leaves_the_distribution_alone(tiny, stop_below):
    head = random_head(tiny, torch.tensor([0, 2]))
    drafter, lengths = HeadDrafter(head, tiny, stop_below), set()
    class Noted(HeadState):
        def propose(self, *given):
            draft = super().propose(*given)
            lengths.add(len(draft.tokens))
            return draft
    drafter.State = Noted
    assert error(tiny, drafter, SamplingParams(1.0), 3) < 1e-6 and len(lengths) > 1  # it did end early, and not always


class Forced:
    "A source that draws what it is told."
    def __init__(self, tokens): self.tokens = iter(tokens)
    def categorical(self, weights): return next(self.tokens)


def test_where_a_draft_ends(tiny):
    "After the first token with which the product of their probabilities is below the limit; greedily, too."
    head = random_head(tiny, torch.tensor([0, 1, 2]))
    for sampling in (SamplingParams(1.0), SamplingParams()):
        for limit in (.05, .3, .6, .9):
            layers = HeadDrafter(head, tiny).layers
            known = tiny.forward(torch.tensor([[0, 2]]), tiny.new_cache(40), layers=layers)[1][0, :-1]
            drafters = [HeadDrafter(head, tiny, stop).start([0, 2], known, 40) for stop in (0.0, limit)]
            whole, short = (drafter.propose(5, sampling, SeededRandom(1)).tokens for drafter in drafters)
            q = [row[token] for row, token in zip(drafters[0].propose(5, SamplingParams(1.0), Forced(whole)).q, whole)]
            products = torch.stack(q).cumprod(0).tolist()
            assert short == whole[:next((i + 1 for i, product in enumerate(products) if product < limit), 5)]
    for wrong in (-.1, 1.0, False, "0", float("nan")):
        with pytest.raises(InputError, match="stop_below"): HeadDrafter(head, tiny, wrong)


def test_a_wrong_q_has_another_distribution(tiny):
    head = random_head(tiny, torch.tensor([0, 2]))
    assert error(tiny, Misreports(head, tiny), SamplingParams(1.0), 2) > 1e-3


def test_a_head_that_reads_the_wrong_features_is_lossless_all_the_same(tiny):
    "Losslessness does not depend on what the drafter reads; only its usefulness does."
    class LateState(HeadState):
        def commit(self, tokens, features): super().commit(tokens, features.flip(0))
    class Late(HeadDrafter): State = LateState
    assert error(tiny, Late(random_head(tiny, torch.tensor([0, 2])), tiny), SamplingParams(1.0), 2) < 1e-6
