"The block's drafter: its rows against the batched net, its bookkeeping after any history, and the exact law with it."
import copy
import random
from dataclasses import replace

import pytest
import torch

from helpers_drafters import DRAFT, PROMPT, TINY, V, difference, error, proposals, random_target, read
from specdec.drafters.block import BlockDrafter, BlockState, FastBlock, init_block, load_block, save_block
from specdec.drafters.choose import HybridDrafter
from specdec.drafters.load import load_drafter
from specdec.drafters.lookup import SuffixDrafter
from specdec.engine.batch import speculate_batch
from specdec.engine.request import Request
from specdec.errors import InputError, ModelError
from specdec.loop import speculate
from specdec.lossless.black_box import check_decoder
from specdec.lossless.enumerate import exact_distribution
from specdec.sampling import SamplingParams, SeededRandom

MARKOV = dict(markov_rank=4)
TRUST = dict(markov_rank=4, enable_confidence_head=True, confidence_head_with_markov=True)
OPTIONS = {
    "product": {}, "row 0 is the anchor": dict(sample_from_anchor=False), "two layers": dict(num_layers=2, **MARKOV),
    "chain": TRUST, "confidence alone": dict(enable_confidence_head=True),
}


def random_block(target, tokens=DRAFT, seed=1, **options):
    "Every weight random, norms too: a norm of ones would hide that it is left out."
    block = init_block(target, tokens, mask_token_id=1, **dict(block_size=5) | options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + .3 * noise if "norm" in name else noise / parameter.shape[-1] ** .5)
            if "markov" in name or "confidence" in name: parameter.mul_(3)  # so that the token before matters
    return block


def fresh(block, target, text, drafter=BlockDrafter, **more):
    "The state of a sequence that a block's drafter has read at once."
    features = read(target, torch.tensor([text]), block.config.layers)[0, :-1]
    return drafter(block, target, **more).start(text, features, 40)


@pytest.fixture(scope="module")
def target(tmp_path_factory): return random_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory): return random_target(tmp_path_factory.mktemp("tiny"), V=3, depth=3, **TINY)


# what it proposes

@pytest.mark.parametrize("name", OPTIONS)
def test_rows_of_q_are_those_of_the_batched_net(target, name):
    "Each place's row, given the tokens that were drawn before it; blocks of one text don't see each other."
    block = random_block(target, **OPTIONS[name])
    text = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(5))
    features = read(target, text, block.config.layers)
    anchors = torch.tensor([3, 11, 7, 0])
    of = torch.tensor([0, 1, 1, 0])
    with torch.no_grad(): states = block.states(text, features, of, anchors, block.config.most)[:, :4]
    for i, (row, anchor) in enumerate(zip(of.tolist(), anchors.tolist())):
        known = text[row, :anchor + 1].tolist()
        state = BlockDrafter(block, target).start(known, features[row, :anchor], 30)
        for sampling in (SamplingParams(1.0), SamplingParams(.7, top_k=3)):
            draft = proposals(state, 4, sampling)
            before = torch.tensor([known[-1], *draft.tokens[:-1]])
            expected = sampling.probs(block.logits(states[i], before).detach())
            assert draft.q.shape == (4, V) and len(draft.tokens) == 4
            torch.testing.assert_close(draft.q[:, DRAFT], expected, atol=1e-5, rtol=1e-4)
        certain = proposals(state, 4, SamplingParams())
        before = torch.tensor([known[-1], *certain.tokens[:-1]])
        assert certain.q is None
        assert certain.tokens == DRAFT[block.logits(states[i], before).argmax(-1)].tolist()


def test_tokens_are_drawn_from_the_reported_q(target):
    class Remembering(SeededRandom):
        def categorical(self, weights):
            choice = super().categorical(weights)
            self.asked.append((weights, choice))
            return choice
    for options in OPTIONS.values():
        rng = Remembering(0)
        rng.asked = []
        draft = fresh(random_block(target, **options), target, [1, 2]).propose(4, SamplingParams(.8), rng)
        assert draft.tokens == [DRAFT[choice].item() for _, choice in rng.asked] and len(draft.tokens) == 4
        assert all(torch.equal(weights, row[DRAFT]) for (weights, _), row in zip(rng.asked, draft.q))


def test_a_bias_of_the_token_before_changes_a_row_and_without_one_rows_stay(target):
    "Product and chain: whether row 1 of q depends on what was drawn at row 0."
    for options, depends in (({}, False), (MARKOV, True)):
        state = fresh(random_block(target, **options), target, [1, 2, 3])
        drafts = [proposals(state, 2, SamplingParams(9.0), seed) for seed in range(12)]
        rows = {draft.tokens[0]: draft.q[1] for draft in drafts}
        assert len(rows) > 2
        first, *others = rows.values()
        assert all(torch.equal(first, other) for other in others) is not depends


@pytest.mark.parametrize("name", OPTIONS)
def test_after_any_history_it_drafts_like_a_fresh_one(target, name):
    "Rejections, full acceptance, rounds in which it isn't asked, and asked twice."
    block, choose, text = random_block(target, **OPTIONS[name]), random.Random(0), [1, 2, 3]
    state = fresh(block, target, text)
    while len(text) < 30:
        for _ in range(choose.choice([0, 1, 1, 2])):
            again, draft = proposals(fresh(block, target, text)), proposals(state)
            assert draft.tokens == again.tokens and difference(draft.q, again.q) < 1e-4
        new = [choose.randrange(V) for _ in range(choose.randint(1, 4))]
        state.commit(new, read(target, torch.tensor([text + new]), block.config.layers)[0, len(text) - 1:-1])
        text += new


class KeepsRowsState(BlockState):
    "Wrong: the block's own rows, drafted places that may be rejected, stay in the cache as context."
    def propose(self, K, sampling, rng):
        draft = super().propose(K, sampling, rng)
        self.cache.length += len(draft.tokens)
        return draft

    def commit(self, tokens, features):
        known = min(self.cache.length, 2 + len(tokens))
        super().commit(tokens, features[known - 2:])


class KeepsRows(BlockDrafter): State = KeepsRowsState


class LateMasksState(BlockState):
    "Wrong: the block begins one row early, so that each mask row stands where the one before belongs."
    def propose(self, K, sampling, rng):
        self.read_on(sum(map(len, self.features)))
        length = self.cache.length
        self.cache.rollback(max(length - 1, 0))
        try: return super().propose(K, sampling, rng)
        finally: self.cache.length = length


class LateMasks(BlockDrafter): State = LateMasksState


@pytest.mark.parametrize("wrong", [KeepsRows, LateMasks])
def test_a_context_that_is_wrong_would_be_noticed(target, wrong):
    block, text, new = random_block(target), [1, 2, 3], [5, 6, 7]
    features = read(target, torch.tensor([text + new]), block.config.layers)[0]
    rows = []
    for kind in (BlockDrafter, wrong):
        state = kind(block, target).start(text, features[:2], 40)
        proposals(state)
        state.commit(new, features[2:5])
        rows.append(proposals(state).q[0])
    expected = proposals(fresh(block, target, text + new)).q[0]
    assert difference(rows[0], expected) < 1e-4 < difference(rows[1], expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_stops_at_the_end_of_the_text_and_keeps_it(target, temperature):
    block, text = random_block(target, **MARKOV), [1, 2, 3, 4]
    features = read(target, torch.tensor([text]), block.config.layers)[0, :-1]

    def proposed(eos_ids):
        state = BlockDrafter(block, target).start(text, features, 30, eos_ids)
        return state.propose(5, SamplingParams(temperature), SeededRandom(3))
    whole = proposed(frozenset())
    end = whole.tokens[1]
    n = whole.tokens.index(end) + 1
    draft = proposed({end})
    assert draft.tokens == whole.tokens[:n] and n < len(whole.tokens) == 5
    assert draft.q is None if temperature == 0 else torch.equal(draft.q, whole.q[:n])


def test_no_more_tokens_than_the_block_has_rows_and_the_context_has_room(target):
    block = random_block(target, sample_from_anchor=False)
    assert len(proposals(fresh(block, target, [1, 2]), 9).tokens) == 4  # of five rows, the first says nothing
    short = copy.deepcopy(block.config.decoder)
    short.max_position_embeddings = 6
    block.config = replace(block.config, decoder=short)
    state = fresh(block, target, [1, 2, 3, 4])  # three positions known, three more fit
    assert len(proposals(state, 9).tokens) == 3
    drafter = BlockDrafter(block, target)
    rounds = list(speculate(target, drafter, [1, 2, 3], SamplingParams(1.0), SeededRandom(0), 3, 20))
    assert sum(len(r.emitted) for r in rounds) == 20


def test_broken_logits_name_the_block(target):
    block = random_block(target)
    with torch.no_grad(): block.lm_head.weight[0] = float("nan")
    with pytest.raises(ArithmeticError, match="The block"): proposals(fresh(block, target, [1, 2]))


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("beside_lookup", [False, True])
def test_in_a_batch_each_text_is_drafted_and_written_as_alone(target, temperature, beside_lookup):
    "Round for round: what was drafted, drawn or not, how far it was kept, what was emitted; three texts, two at once."
    drafter = BlockDrafter(random_block(target, **OPTIONS["chain"]), target)
    if beside_lookup: drafter = HybridDrafter(SuffixDrafter(), drafter)
    sampling, texts = SamplingParams(temperature), [PROMPT, PROMPT[::-1], [4, 2, 4, 2, 4]]

    def request(i): return Request(target, texts[i], drafter, sampling, SeededRandom(i), 4, 20)
    together = [[], [], []]
    for i, found in speculate_batch(target, [request(i) for i in range(3)], 2): together[i].append(found)
    for i, rounds in enumerate(together):
        alone = list(speculate(target, drafter, texts[i], sampling, SeededRandom(i), 4, 20))
        assert rounds == alone and any(found.drafted for found in rounds)


def test_a_drafter_for_another_target_is_refused(target, tiny):
    with pytest.raises(ModelError, match="vocabulary of 24"): BlockDrafter(random_block(target), tiny)


def test_a_prompt_that_was_read_before_is_copied(target):
    block, text = random_block(target, **MARKOV), [i % V for i in range(300)]
    far = copy.deepcopy(block.config.decoder)
    far.max_position_embeddings = 400
    block.config = replace(block.config, decoder=far)
    fast, features = FastBlock(block, target.embed), torch.randn(299, block.config.feature_size)
    first = BlockDrafter(fast, target).start(text, features, 400)
    prefix = first.keep(text)
    assert prefix.cache.length == 256
    other = [*text[:200], *[1] * 100]
    again, expected = (BlockDrafter(fast, target).start(other, features, 400) for _ in range(2))
    again.resume(prefix, other)
    assert again.cache.length == 128 and len(again.features[0]) == 299 - 128
    assert torch.equal(proposals(again).q, proposals(expected).q)


# the exact law, on three words

class ReportsMarginalsState(BlockState):
    "Wrong: draws from rows with the bias of the token before, and reports them without it."
    @torch.inference_mode()
    def propose(self, K, sampling, rng):
        draft = super().propose(K, sampling, rng)
        states = self.block.states(self.last, self.block.config.most, self.cache)[:, :len(draft.tokens)]
        q = torch.zeros_like(draft.q)
        q[:, self.block.tokens] = sampling.probs(self.block.lm_head(states)[0])
        return replace(draft, q=q)


class ReportsMarginals(BlockDrafter): State = ReportsMarginalsState


class CutsByTheDroppedState(BlockState):
    "Wrong: draws a token, asks for the confidence behind it, and drops it if that is low."
    @torch.inference_mode()
    def propose(self, K, sampling, rng):
        draft = super().propose(K, sampling, rng)
        states = self.block.states(self.last, self.block.config.most, self.cache)[:, :len(draft.tokens)][0]
        for i, token in enumerate(draft.tokens):
            trust, others = (self.block.confidence(states[i], x) for x in (token, 2 - token))  # 0 or 2 is drafted
            if trust < others: return draft.up_to(i)
        return draft


class CutsByTheDropped(BlockDrafter): State = CutsByTheDroppedState


@pytest.mark.parametrize(
    "form, K, tokens, sampling",
    [
        ("product", 2, [0, 2], SamplingParams(1.0)), ("row 0 is the anchor", 2, [0, 2], SamplingParams(1.0)),
        ("chain", 2, [0, 2], SamplingParams(1.0)), ("chain", 1, [0, 1, 2], SamplingParams(0.8, top_k=2)),
        ("chain", 3, [1, 2], SamplingParams(1.5, top_p=0.8)), ("chain", 2, [0, 2], SamplingParams()),
    ],
    ids=["product", "row 0 is the anchor", "chain", "top-k", "top-p", "greedy"],
)
def test_the_distribution_is_the_targets(tiny, form, K, tokens, sampling):
    "Softmax weights are no exact fractions: so 1e-6, not 0."
    block = random_block(tiny, torch.tensor(tokens), **OPTIONS[form])
    assert error(tiny, BlockDrafter(block, tiny), sampling, K) < 1e-6


@pytest.mark.parametrize(
    "form, stop_below", [("product", .45), ("chain", .3), ("chain", .6), ("confidence alone", .45)])
def test_an_early_end_leaves_the_distribution_alone(tiny, form, stop_below):
    block = random_block(tiny, torch.tensor([0, 2]), **OPTIONS[form])
    drafter, lengths = BlockDrafter(block, tiny, stop_below), set()
    class Noted(BlockState):
        def propose(self, *given):
            draft = super().propose(*given)
            lengths.add(len(draft.tokens))
            return draft
    drafter.State = Noted
    assert error(tiny, drafter, SamplingParams(1.0), 3) < 1e-6 and len(lengths) > 1  # early, and not always


def test_a_wrong_context_is_lossless_all_the_same(tiny):
    "Losslessness does not depend on what the drafter reads; only its usefulness does."
    block = random_block(tiny, torch.tensor([0, 2]))
    for wrong in (KeepsRows, LateMasks): assert error(tiny, wrong(block, tiny), SamplingParams(1.0), 2) < 1e-6


WRONG = [ReportsMarginals, CutsByTheDropped]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_q_or_cut_has_another_distribution(tiny, wrong):
    block = random_block(tiny, torch.tensor([0, 2]), **TRUST)
    assert error(tiny, BlockDrafter(block, tiny), SamplingParams(1.0), 2) < 1e-6
    assert error(tiny, wrong(block, tiny), SamplingParams(1.0), 2) > 1e-3


def test_the_check_of_black_boxes_notices(tiny):
    "Texts drawn from the distribution that each decoder has, exactly, with a block on which both mistakes show."
    block = random_block(tiny, torch.tensor([0, 2]), seed=4, **TRUST)

    def program(kind):
        def written(rng):
            rounds = speculate(tiny, kind(block, tiny), PROMPT, SamplingParams(1.0), rng, 2, 3)
            return tuple(token for r in rounds for token in r.emitted)
        return {text: float(weight) for text, weight in exact_distribution(written).items()}

    def verdict(texts):
        drawn, weights = [*texts], torch.tensor([*texts.values()])
        def generate(prompt, n, seed): return list(drawn[SeededRandom(seed).categorical(weights)][:n])
        return check_decoder(generate, tiny, PROMPT, length=3, samples=26_000, distance=.04, progress=False)

    right = program(BlockDrafter)
    assert verdict(right).lossless
    for wrong in map(program, WRONG):
        assert sum(abs(right.get(text, 0) - wrong.get(text, 0)) for text in {*right, *wrong}) / 2 > .1
        assert not verdict(wrong).lossless


# in a folder

@pytest.mark.parametrize("name", OPTIONS)
def test_saved_and_loaded(target, tmp_path, name):
    block = random_block(target, **OPTIONS[name])
    save_block(block, tmp_path / "block", target)
    again = load_block(tmp_path / "block", target)
    assert again.config.layers == block.config.layers and again.config.most == block.config.most
    stored = block.state_dict()
    assert stored.keys() == again.state_dict().keys()
    for key, tensor in again.state_dict().items(): assert torch.equal(tensor, stored[key])
    loaded = load_drafter(tmp_path / "block", target)
    assert isinstance(loaded.drafter, BlockDrafter)
    state = loaded.start([1, 2, 3], read(target, torch.tensor([[1, 2]]), block.config.layers)[0], 40)
    assert proposals(state, 3).tokens


def test_what_a_config_leaves_out_is_the_librarys_default(target, tmp_path):
    import json
    said = dict(block_size=8, markov_rank=256, enable_confidence_head=True, confidence_head_with_markov=True)
    save_block(random_block(target, **said), tmp_path, target)
    stored = json.loads((tmp_path / "config.json").read_text())
    for name in (*said, "sample_from_anchor"): del stored[name]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    config = load_block(tmp_path, target).config
    assert config.sample_from_anchor and {name: getattr(config, name) for name in said} == said
    stored["draft_vocab_size"] = None
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ModelError, match="draft_vocab_size is None"): load_block(tmp_path, target)


@pytest.mark.parametrize("wrong, words", [
    (dict(block_size=0), "block_size"), (dict(mask_token_id=24), "mask_token_id"),
    (dict(markov_rank=True), "markov_rank"),
    (dict(enable_confidence_head=1), "enable_confidence_head"), (dict(markov_head_type="rnn"), "vanilla"),
    (dict(aux_hidden_state_layer_ids=[1, 9]), "layers"), (dict(speculators_model_type="eagle3"), "does not fit"),
], ids=lambda x: str(x))
def test_a_damaged_config_is_named(target, tmp_path, wrong, words):
    import json
    save_block(random_block(target, **TRUST), tmp_path, target)
    stored = json.loads((tmp_path / "config.json").read_text()) | wrong
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ModelError, match=words): load_drafter(tmp_path, target)


def test_a_limit_that_is_none_is_refused(target):
    for wrong in (-.1, 1.0, False, "0", float("nan")):
        with pytest.raises(InputError, match="stop_below"): BlockDrafter(random_block(target), target, wrong)
