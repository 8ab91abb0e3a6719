"The feature head: batched against incremental, the drafter's bookkeeping, the exact law with it, and its folder against the `speculators` library."
import copy
import importlib.util
import json
import os
import random
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from specdec.autoregressive import Transform
from specdec.core import InputError, ModelError, TorchSource, exact_law
from specdec.drafters.heads import (FastHead, Head, HeadConfig, HeadDrafter, HeadLayer, copy_layer, feature_layers, head_config, init_from_target, load_head, output_rows, plain_weight,
                           save_head, share_embedding, target_embedding, unrolled_attention, vllm_command, vocabulary_maps, with_vocabulary)
from specdec.kvcache import KVCache
from specdec.models import has_bfloat16
from specdec.speculative import speculate
from specdec.layouts import Linear, has_same_rows
from specdec.loading import load_model
from specdec.transformer import positions, rope_frequencies

CPU, V = torch.device("cpu"), 24
DRAFT = torch.tensor([0, 3, 4, 9, 10, 15, 20, 23])
OPTIONS = {"paper": {}, "two layers": dict(num_layers=2, norm_before_residual=True), "norm before fc": dict(norm_before_fc=True), "norms": dict(num_layers=2, fc_norm=True, norm_output=True)}


def random_target(folder, V=V, depth=5, dtype=torch.float32, **sizes):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64) | sizes
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=V, num_hidden_layers=depth, initializer_range=.3, tie_word_embeddings=True, **sizes)).save_pretrained(folder)
    return load_model(Path(folder), CPU, dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    random_target(folder)
    return folder


@pytest.fixture(scope="module")
def target(folder): return load_model(folder, CPU, torch.float32)


def random_head(target, tokens=DRAFT, **options):
    "Every weight random, norms too: a norm of ones would hide that it is left out."
    head = init_from_target(target, tokens, **{"dtype": target.dtype, **options})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + .3 * noise if "norm" in name else noise / parameter.shape[-1] ** .5)
    return head


def read(target, tokens, layers): return target.forward(tokens, target.new_cache(tokens.shape[1]), layers=layers)[1]


def difference(a, b): return ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()


# --- Two ways to run it ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_batched_and_incremental_agree_step_by_step(folder, name, dtype):
    if dtype == torch.bfloat16 and not has_bfloat16(CPU): pytest.skip("no bfloat16 on this processor")
    target = load_model(folder, CPU, dtype)
    head, limit = random_head(target, **OPTIONS[name]), 1e-5 if dtype == torch.float32 else .06
    tokens = torch.randint(V, (1, 30), generator=torch.Generator().manual_seed(2))
    features, steps = read(target, tokens, head.config.layers), 4
    batched = [step.detach() for step in head(tokens, features, steps)]
    assert [step.shape for step in batched] == [(1, 29 - s, len(DRAFT)) for s in range(steps)]
    fast, text = FastHead(head, target_embedding(target)), tokens[0].tolist()
    assert fast.lm_head.packed == fast.layers[0].attention.qkv.packed == has_same_rows(CPU, dtype)  # faster there for a single row, too
    with torch.inference_mode():
        for n in (1, 2, 7, 20, 26):  # positions read with true features
            cache = KVCache(len(head.layers), 40)
            first = max(n // 2, 1)
            logits, state = fast.step(text[1:first + 1], fast.fuse(features[0, :first]), cache)
            if first < n: logits, state = fast.step(text[first + 1:n + 1], fast.fuse(features[0, first:n]), cache)  # in two pieces
            for s in range(steps):
                if s: logits, state = fast.step(text[n + s:n + s + 1], state, cache)
                assert difference(logits, batched[s][0, n - 1]) < limit, (n, s)


def test_a_head_that_forgets_its_own_steps_does_not_agree(target, monkeypatch):
    "The negative control: without the later steps' own keys, the first step still agrees and the second doesn't."
    head = random_head(target)
    tokens = torch.randint(V, (1, 20))
    features = read(target, tokens, head.config.layers)
    right = head(tokens, features, 2)
    monkeypatch.setattr("specdec.drafters.heads.unrolled_attention", lambda q, keys, values: unrolled_attention(q, keys[:1], values[:1]))
    wrong = head(tokens, features, 2)
    assert difference(wrong[0], right[0]) == 0 and difference(wrong[1], right[1]) > 1e-3


def test_unrolled_attention_is_softmax_under_the_mask():
    "Against one dense attention over all keys with the ladder mask."
    generator = torch.Generator().manual_seed(0)
    q, *rest = (torch.randn(2, heads, n, 8, generator=generator, dtype=torch.float64) for heads, n in [(6, 5), (2, 7), (2, 6), (2, 5), (2, 7), (2, 6), (2, 5)])
    keys, values = rest[:3], rest[3:]
    mask = torch.cat([torch.ones(5, 5).tril(), torch.eye(5), torch.eye(5)], 1).bool()
    dense = F.scaled_dot_product_attention(q, *(torch.cat([t[:, :, :5] for t in side], 2).repeat_interleave(3, 1) for side in (keys, values)), attn_mask=mask)
    assert difference(unrolled_attention(q, keys, values), dense) < 1e-6


@pytest.mark.parametrize("kind, layer_class, config_class", [("llama", LlamaDecoderLayer, LlamaConfig), ("qwen3", Qwen3DecoderLayer, Qwen3Config)])
def test_an_ordinary_layer_is_transformers_layer(kind, layer_class, config_class):
    config = config_class(vocab_size=V, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1, attn_implementation="eager")
    theirs, ours = layer_class(config, 0), HeadLayer(HeadConfig(config, (0, 1, 2), V), first=False)
    with torch.no_grad():
        for parameter in theirs.parameters(): parameter.copy_(torch.randn_like(parameter) * .3)
    assert ours.load_state_dict(theirs.state_dict()) is not None  # the same names
    x, where = torch.randn(2, 9, 32), positions(*rope_frequencies(config), 0, 9, 1, torch.float32)
    angles = LlamaRotaryEmbedding(config)(x, torch.arange(9)[None])
    causal = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    expected = theirs(x, attention_mask=causal, position_embeddings=angles)
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert difference(ours(None, x, where.cos, where.sin, [], []).detach(), expected.detach()) < 1e-5


def test_first_layer_by_hand(target):
    "With zero attention and MLP, what comes out is the residual: the feature, or the normalised feature."
    for before in (False, True):
        head = random_head(target, norm_before_residual=before)
        with torch.no_grad():
            head.layers[0].self_attn.o_proj.weight.zero_()
            head.layers[0].mlp.down_proj.weight.zero_()
        tokens = torch.tensor([[1, 2, 3]])
        features = read(target, tokens, head.config.layers)
        x = head.fuse(features[:, :-1])
        expected = head.norm(head.layers[0].hidden_norm(x) if before else x)
        assert difference(head.states(tokens, features, 1)[0].detach(), expected.detach()) < 1e-6


def test_rows_of_a_batch_are_independent_and_padding_at_the_end_is_harmless(target):
    head = random_head(target, num_layers=2)
    tokens = torch.randint(V, (3, 16))
    features = torch.randn(3, 16, head.config.feature_size)
    together = head(tokens, features, 3)
    for b in range(3):
        for s, step in enumerate(head(tokens[b:b + 1, :11], features[b:b + 1, :11], 3)): assert difference(step[0], together[s][b, :step.shape[1]]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_trains(folder, name, dtype):
    target = load_model(folder, CPU, dtype)
    head = random_head(target, **OPTIONS[name])
    tokens = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(3))
    features = torch.cat([read(target, row[None], head.config.layers) for row in tokens])  # made in inference mode: autograd couldn't keep it
    optimizer, losses = torch.optim.SGD(head.parameters(), .05), []
    for _ in range(5):
        loss = sum(F.cross_entropy(step.float().flatten(0, 1), torch.zeros(step.shape[0] * step.shape[1], dtype=torch.long)) for step in head(tokens, features, 3))
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in head.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert head.shared_embedding is not None and "shared_embedding" not in head.state_dict()


def test_gradients_against_finite_differences(target):
    head = random_head(target).double()
    tokens = torch.randint(V, (1, 7))
    features = torch.randn(1, 7, head.config.feature_size, dtype=torch.float64)
    def loss(): return sum(step.logsumexp(-1).sum() for step in head(tokens, features, 3))
    loss().backward()
    for name in ("layers.0.self_attn.k_proj.weight", "layers.0.mlp.up_proj.weight", "fc.weight", "norm.weight"):
        parameter = head.get_parameter(name)
        direction = torch.randn_like(parameter)
        with torch.no_grad():
            values = []
            for sign in (1, -1):
                parameter += sign * 1e-5 * direction
                values.append(loss())
                parameter -= sign * 1e-5 * direction
        assert abs((values[0] - values[1]) / 2e-5 - (parameter.grad * direction).sum()) < 1e-5 * max(1, abs(values[0])), name


def test_what_can_not_be_unrolled_is_an_error(target):
    head = random_head(target)
    features = torch.zeros(1, 4, head.config.feature_size)
    for tokens, features, steps in [(torch.zeros(1, 4, dtype=torch.long), features, 4), (torch.zeros(1, 4, dtype=torch.long), features, 0), (torch.zeros(1, 5, dtype=torch.long), features, 1)]:
        with pytest.raises(InputError): head(tokens, features, steps)
    head.shared_embedding = None
    with pytest.raises(InputError, match="share_embedding"): head(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, head.config.feature_size), 1)


# --- Vocabulary and initialisation -------------------------------------------------------------------------------------------

def test_maps_lead_back_and_forth(target):
    d2t, t2d = vocabulary_maps(DRAFT, V)
    assert (torch.arange(len(DRAFT)) + d2t).tolist() == DRAFT.tolist() == t2d.nonzero()[:, 0].tolist()
    head = random_head(target)
    assert head.draft_tokens.tolist() == DRAFT.tolist()
    whole = random_head(target, torch.arange(V))
    assert whole.d2t is None and whole.draft_tokens.tolist() == list(range(V))
    for bad in ([3, 2], [2, 2], [], [V], [-1, 2], [[1, 2]]):
        with pytest.raises(InputError, match="rising"): vocabulary_maps(torch.tensor(bad), V)
    with pytest.raises(InputError, match="which tokens"): Head(head.config)
    with pytest.raises(InputError, match="config says"): Head(head.config, DRAFT[:3])


def test_layers_and_sizes(target):
    assert feature_layers(30) == (7, 18, 29) and feature_layers(3) == (0, 1, 2)
    for depth in (3, 4, 5, 12, 30, 80): assert len(set(feature_layers(depth))) == 3 and max(feature_layers(depth)) < depth
    for layers in ((1, 1, 2), (2, 1), (), (0, 5), (-1, 2)):  # 5 is the state after the final norm
        with pytest.raises(InputError, match="rising"): head_config(target, 8, layers=layers)
    for size in (0, V + 1):
        with pytest.raises(InputError, match="part of the target's"): head_config(target, size)
    with pytest.raises(InputError, match="at least one layer"): head_config(target, 8, num_layers=0)
    with pytest.raises(InputError, match="three different"): feature_layers(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initialised_from_the_target(folder, dtype):
    target = load_model(folder, CPU, dtype)
    head = init_from_target(target, DRAFT)
    table = target_embedding(target)(torch.arange(V)).float()
    assert torch.equal(head.lm_head.weight, table[DRAFT]) and torch.equal(output_rows(target, DRAFT).float(), table[DRAFT])  # tied
    assert torch.equal(head.shared_embedding, table) and torch.equal(head.norm.weight, target.norm.float())
    features = torch.randn(2, 3, head.config.feature_size)
    assert torch.equal(head.fuse(features), features[..., -32:])
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), init_from_target(target, DRAFT).parameters()))
    assert not torch.equal(head.layers[0].mlp.up_proj.weight, init_from_target(target, DRAFT, seed=1).layers[0].mlp.up_proj.weight)


def test_a_copied_layer_computes_what_the_target_computes(target):
    head = init_from_target(target, DRAFT, num_layers=2, decoder_from=3)
    tokens = torch.randint(V, (1, 9))
    before, after = (read(target, tokens, (i,)) for i in (3, 4))
    where = positions(target.frequencies, target.rope_scale, 0, 9, 1, torch.float32)
    for layer in head.layers: assert difference(layer(torch.zeros_like(before), before, where.cos, where.sin, [], []).detach(), after) < 1e-5
    with pytest.raises(InputError, match="no layer 5"): copy_layer(target, 5, head.layers[0])
    small = init_from_target(target, DRAFT, intermediate_size=16)
    with pytest.raises(InputError, match="same sizes"): copy_layer(target, 1, small.layers[0])


# --- The drafter ----------------------------------------------------------------------------------------------------------

def proposals(drafter, K=3, transform=Transform(1.0), seed=0): return drafter.propose(K, transform, TorchSource(seed))


def test_first_row_of_q_is_the_batched_forward(target):
    head = random_head(target)
    text = torch.randint(V, (1, 12), generator=torch.Generator().manual_seed(5))
    features = read(target, text, head.config.layers)
    drafter = HeadDrafter(head, target)
    drafter.prefill(text[0].tolist(), features[0, :-1], 30)
    for transform in (Transform(1.0), Transform(.7, top_k=3), Transform(1.3, top_p=.6)):
        q = proposals(drafter, 3, transform).q
        assert q.shape == (3, V) and torch.allclose(q.sum(-1), torch.ones(3)) and not q[:, t2d_complement()].any()
        expected = transform(head(text, features, 1)[0][0, -1].detach())
        assert torch.allclose(q[0, DRAFT], expected, atol=1e-6)
        assert ((q[0] > 0).sum() <= 3) or transform.top_k is None


def t2d_complement(): return [i for i in range(V) if i not in DRAFT.tolist()]


def test_tokens_are_drawn_from_the_reported_q(target):
    "The draws of a source that remembers what it was asked to draw from."
    class Remembering(TorchSource):
        asked = []
        def categorical(self, weights):
            choice = super().categorical(weights)
            self.asked.append((weights, choice))
            return choice
    head, source = random_head(target), Remembering(0)
    drafter = HeadDrafter(head, target)
    drafter.prefill([1, 2], read(target, torch.tensor([[1]]), head.config.layers)[0], 30)
    draft = drafter.propose(4, Transform(.8), source)
    assert draft.tokens == [DRAFT[choice].item() for _, choice in source.asked]
    assert all(torch.equal(weights, row[DRAFT]) for (weights, _), row in zip(source.asked, draft.q))


def test_greedy_drafts_are_certain_and_likeliest(target):
    head = random_head(target)
    text = torch.randint(V, (1, 12))
    features = read(target, text, head.config.layers)
    drafter = HeadDrafter(head, target)
    drafter.prefill(text[0].tolist(), features[0, :-1], 30)
    draft = drafter.propose(3, Transform(), None)  # nothing is drawn
    assert draft.q is None and draft.tokens[0] == DRAFT[head(text, features, 1)[0][0, -1].argmax()].item()
    assert draft.tokens == proposals(drafter, 3, Transform(1.0, top_k=1)).tokens


def fresh(head, target, text):
    drafter = HeadDrafter(head, target)
    drafter.prefill(text, read(target, torch.tensor([text]), head.config.layers)[0, :-1], 40)
    return drafter


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


class KeepsDrafts(HeadDrafter):
    "Wrong: goes on from its own states instead of reading the accepted tokens again."
    def commit(self, tokens, features):
        super().commit(tokens, features)
        kept = min(len(tokens), 1)
        if self.read and self.last is not None: self.unread, self.features = self.unread[kept:], [torch.cat(self.features)[kept:]]


def test_keeping_its_own_states_would_be_noticed(target):
    head, text, new = random_head(target), [1, 2, 3], [5, 6, 7]
    drafters = [kind(head, target) for kind in (HeadDrafter, KeepsDrafts)]
    features = read(target, torch.tensor([text + new]), head.config.layers)[0]
    rows = []
    for drafter in drafters:
        drafter.prefill(text, features[:2], 40)
        proposals(drafter)
        drafter.commit(new, features[2:5])
        rows.append(proposals(drafter).q[0])
    expected = proposals(fresh(head, target, text + new)).q[0]
    assert difference(rows[0], expected) < 1e-4 < difference(rows[1], expected)


def test_the_context_ends(target):
    head = random_head(target)
    short = copy.deepcopy(head.config.decoder)
    short.max_position_embeddings = 6
    head.config = replace(head.config, decoder=short)
    drafter = fresh(head, target, [1, 2, 3, 4])  # three positions known, three more fit, and the last draft is never read
    assert len(proposals(drafter, 9).tokens) == 4
    drafter.commit([5, 6], read(target, torch.tensor([[1, 2, 3, 4, 5, 6]]), head.config.layers)[0, 3:5])
    assert len(proposals(drafter, 9).tokens) == 2
    drafter.commit([7, 8], read(target, torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]), head.config.layers)[0, 5:7])
    assert proposals(drafter, 9).tokens == []
    rounds = list(speculate(target, HeadDrafter(head, target), [1, 2, 3], Transform(1.0), TorchSource(0), 3, 20))
    assert sum(len(r.emitted) for r in rounds) == 20


def test_broken_logits_name_the_head(target):
    head = random_head(target)
    with torch.no_grad(): head.lm_head.weight[0] = float("nan")
    with pytest.raises(ArithmeticError, match="The head"): proposals(fresh(head, target, [1, 2]))


# --- The exact law ------------------------------------------------------------------------------------------------------------

LENGTH, PROMPT, TINY = 4, [0, 2], dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory): return random_target(tmp_path_factory.mktemp("tiny"), V=3, depth=3, **TINY)


def chain_rule(target, transform):
    "What the target says alone, by the chain rule in float64, each row from a forward without a past."
    law = {(): 1.0}
    for _ in range(LENGTH):
        law = {(*text, token): weight * p for text, weight in law.items()
               for token, p in enumerate(transform(target.forward(torch.tensor([[*PROMPT, *text]]), target.new_cache(9), last=1)[0, -1]).double().tolist()) if p}
    return law


def error(target, drafter, transform, K):
    "Total variation between the walked law of the production loop and the chain rule."
    def program(source): return tuple(token for r in speculate(target, drafter, PROMPT, transform, source, K, LENGTH) for token in r.emitted)
    found, expected = exact_law(program), chain_rule(target, transform)
    assert sum(found.values()) == 1
    return sum(abs(float(found.get(text, 0)) - expected.get(text, 0)) for text in found.keys() | expected.keys()) / 2


class Misreports(HeadDrafter):
    "Wrong: draws from the head's q, and reports a uniform one."
    def propose(self, K, transform, source):
        draft = super().propose(K, transform, source)
        return replace(draft, q=(draft.q > 0) / (draft.q > 0).sum(-1, keepdim=True))


@pytest.mark.parametrize("K, tokens, transform", [(1, [0, 1, 2], Transform(1.0)), (2, [0, 2], Transform(1.0)), (2, [0, 1, 2], Transform(.8, top_k=2)), (3, [1, 2], Transform(1.5, top_p=.8)), (2, [0, 2], Transform())])
def test_the_law_is_the_targets(tiny, K, tokens, transform):
    "Softmax weights are no exact fractions, and float32 rows differ in the last bits with the number of tokens read at once: so 1e-6, not 0."
    head = random_head(tiny, torch.tensor(tokens))
    assert error(tiny, HeadDrafter(head, tiny), transform, K) < 1e-6


@pytest.mark.parametrize("stop_below", [.2, .45, .7])
def test_an_early_end_leaves_the_law_alone(tiny, stop_below):
    head = random_head(tiny, torch.tensor([0, 2]))
    drafter, lengths = HeadDrafter(head, tiny, stop_below), set()
    propose = drafter.propose
    def noted(*given):
        draft = propose(*given)
        lengths.add(len(draft.tokens))
        return draft
    drafter.propose = noted
    assert error(tiny, drafter, Transform(1.0), 3) < 1e-6 and len(lengths) > 1  # it did end early, and not always


def test_where_a_draft_ends(tiny):
    "After the first token with which the product of their probabilities is below the limit; greedily, too."
    head = random_head(tiny, torch.tensor([0, 1, 2]))
    for transform in (Transform(1.0), Transform()):
        for limit in (.05, .3, .6, .9):
            drafters = [HeadDrafter(head, tiny, stop) for stop in (0.0, limit)]
            for drafter in drafters: drafter.prefill([0, 2], tiny.forward(torch.tensor([[0, 2]]), tiny.new_cache(40), layers=drafter.layers)[1][0, :-1], 40)
            whole, short = (drafter.propose(5, transform, TorchSource(1)).tokens for drafter in drafters)
            q = [row[token] for row, token in zip(drafters[0].propose(5, Transform(1.0), Forced(whole)).q, whole)]
            products = torch.stack(q).cumprod(0).tolist()
            assert short == whole[:next((i + 1 for i, product in enumerate(products) if product < limit), 5)]
    for wrong in (-.1, 1.0):
        with pytest.raises(InputError, match="stop_below"): HeadDrafter(head, tiny, wrong)


class Forced:
    "A source that draws what it is told."
    def __init__(self, tokens): self.tokens = iter(tokens)
    def categorical(self, weights): return next(self.tokens)


def test_a_wrong_q_has_another_law(tiny):
    head = random_head(tiny, torch.tensor([0, 2]))
    assert error(tiny, Misreports(head, tiny), Transform(1.0), 2) > 1e-3


def test_a_head_that_reads_the_wrong_features_is_lossless_all_the_same(tiny):
    "Losslessness does not depend on what the drafter reads; only its usefulness does."
    class Late(HeadDrafter):
        def commit(self, tokens, features): super().commit(tokens, features.flip(0))
    assert error(tiny, Late(random_head(tiny, torch.tensor([0, 2])), tiny), Transform(1.0), 2) < 1e-6


# --- The folder --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tokens", [DRAFT, torch.arange(V)])
@pytest.mark.parametrize("name", OPTIONS)
def test_saved_and_loaded(target, tmp_path, name, tokens):
    head = random_head(target, tokens, **OPTIONS[name])
    save_head(head, tmp_path / "new" / "head", target, verifier="somebody/something")
    again = load_head(tmp_path / "new" / "head", target)
    assert again.state_dict().keys() == head.state_dict().keys() and all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), head.state_dict().values()))
    assert replace(again.config, decoder=None) == replace(head.config, decoder=None)
    with pytest.raises(InputError, match="share_embedding"): again.embed(tokens)
    tokens = torch.randint(V, (1, 9))
    features = read(target, tokens, head.config.layers)
    for a, b in zip(share_embedding(again, target)(tokens, features, 2), head(tokens, features, 2)): assert torch.equal(a, b)


def test_the_config_says_what_servers_look_for(target, tmp_path):
    save_head(random_head(target), tmp_path, target, verifier="somebody/something", K=4)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["speculators_model_type"] == "eagle3" and stored["speculators_config"]["algorithm"] == "eagle3"
    assert stored["eagle_aux_hidden_state_layer_ids"] == list(feature_layers(5)) and stored["draft_vocab_size"] == len(DRAFT)
    assert stored["norm_before_residual"] is False  # vLLM takes a missing one for true
    assert stored["speculators_config"]["verifier"] == dict(name_or_path="somebody/something", architectures=["LlamaForCausalLM"])
    assert stored["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    layer = stored["transformer_layer_config"]
    assert (layer["model_type"], layer["vocab_size"], layer["hidden_size"], layer["num_hidden_layers"], layer["head_dim"]) == ("llama", V, 32, 1, 8)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["t2d"].dtype == torch.bool and tensors["d2t"].dtype == torch.long and not any("embed" in name for name in tensors)
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (32, 64) and tensors["fc.weight"].shape == (32, 96)


def test_a_head_with_an_embedding_of_its_own(target, tmp_path):
    head = random_head(target)
    save_head(head, tmp_path, target, embedding=True)
    own = load_head(tmp_path, target)
    assert own.config.own_embedding and torch.equal(own.embed_tokens.weight, head.shared_embedding) and not own.embed_tokens.weight.requires_grad
    assert proposals(fresh(own, target, [1, 2, 3])).tokens == proposals(fresh(head, target, [1, 2, 3])).tokens
    with torch.no_grad(): own.embed_tokens.weight.neg_()
    assert difference(proposals(fresh(own, target, [1, 2, 3])).q, proposals(fresh(head, target, [1, 2, 3])).q) > 1e-3


def test_a_head_of_others(target, tmp_path):
    "No layers named, no key of ours, old names for the rotary embedding, the verifier's matrices beside the head's."
    head = random_head(target, layers=(2, 3, 4))
    save_head(head, tmp_path, target)
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["specdec"], stored["eagle_aux_hidden_state_layer_ids"]
    stored["transformer_layer_config"] |= dict(rope_theta=stored["transformer_layer_config"].pop("rope_parameters")["rope_theta"])
    (tmp_path / "config.json").write_text(json.dumps(stored))
    save_file(load_file(tmp_path / "model.safetensors") | {"verifier_norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="rising"): load_head(tmp_path, target)  # (2, 5 // 2, 5 - 3): what the format says goes wrong for five layers
    deep = copy.copy(target)
    deep.config = copy.deepcopy(target.config)
    deep.config.num_hidden_layers = 8
    assert load_head(tmp_path, deep).config.layers == (2, 4, 5)


@pytest.mark.parametrize("change, words", [
    (lambda stored: stored.update(speculators_model_type="mlp"), "no EAGLE-3 head"),
    (lambda stored: stored.pop("speculators_model_type"), "no EAGLE-3 head"),
    (lambda stored: stored.pop("transformer_layer_config"), "can't be used"),
    (lambda stored: stored.pop("draft_vocab_size"), "can't be used"),
    (lambda stored: stored.update(draft_vocab_size=10.0), "draft_vocab_size is 10.0"),
    (lambda stored: stored.update(specdec="x"), "can't be used"),
    (lambda stored: stored.update(eagle_aux_hidden_state_layer_ids="abc"), "layers is"),
    (lambda stored: stored.update(eagle_aux_hidden_state_layer_ids=[0.5, 1, 2]), "layers is"),
    (lambda stored: stored.update(norm_output="no"), "norm_output is 'no'"),
    (lambda stored: stored["transformer_layer_config"].update(hidden_size="8"), "can't be used"),
    (lambda stored: stored["transformer_layer_config"].update(num_attention_heads=0), "can't be used"),
    (lambda stored: stored["transformer_layer_config"].update(vocab_size=V + 1), "vocabulary of 25"),
    (lambda stored: stored["transformer_layer_config"].update(hidden_size=64), "hidden size of 64"),
    (lambda stored: stored["transformer_layer_config"].update(intermediate_size=50), "shape"),
    (lambda stored: stored["transformer_layer_config"].update(num_hidden_layers=2), "no tensor 'layers.1"),
    (lambda stored: stored["transformer_layer_config"].update(model_type="gpt2"), "kind"),
    (lambda stored: stored.update(eagle_aux_hidden_state_layer_ids=[0, 1, 9]), "5 layers"),
    (lambda stored: stored.update(eagle_aux_hidden_state_layer_ids=[0, 1]), "shape"),
    (lambda stored: stored.update(norm_before_fc=True), "input_norm"),
])
def test_folders_that_do_not_fit_say_why(target, tmp_path, change, words):
    save_head(random_head(target), tmp_path, target)
    stored = json.loads((tmp_path / "config.json").read_text())
    change(stored)
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ModelError, match=words): load_head(tmp_path, target)


def test_damaged_folders_say_why(target, tmp_path):
    with pytest.raises(ModelError, match="holds no head"): load_head(tmp_path / "nowhere", target)
    save_head(random_head(target), tmp_path, target)
    weights = tmp_path / "model.safetensors"
    whole, tensors = weights.read_bytes(), load_file(weights)
    weights.write_bytes(whole[:-10])
    with pytest.raises(ModelError, match="not a whole safetensors file"): load_head(tmp_path, target)
    for name, replacement, words in [("fc.weight", None, "no tensor 'fc.weight'"), ("extra", torch.ones(2), "'extra'"), ("t2d", tensors["t2d"].flip(0), "contradict"),
                                     ("d2t", tensors["d2t"].flip(0), "rising")]:
        changed = {**tensors, name: replacement}
        save_file({n: t.contiguous() for n, t in changed.items() if t is not None}, weights)
        with pytest.raises(ModelError, match=words): load_head(tmp_path, target)
    weights.unlink()
    with pytest.raises(ModelError, match="weights are missing"): load_head(tmp_path, target)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="can't be read"): load_head(tmp_path, target)
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="can't be written"): save_head(random_head(target), tmp_path / "file" / "head", target)


def test_a_head_knows_its_targets_weights(target, tmp_path):
    mine, other = copy.copy(target), copy.copy(target)
    mine.digest, other.digest = "a" * 64, "b" * 64
    save_head(random_head(target), tmp_path, mine)
    assert json.loads((tmp_path / "config.json").read_text())["specdec"] == dict(target_digest="a" * 64)
    load_head(tmp_path, mine)
    load_head(tmp_path, target)  # a target that doesn't know its digest isn't asked
    with pytest.raises(ModelError, match="other weights"): load_head(tmp_path, other)


def test_half_precision_does_not_overflow(target):
    "The first feature of a text can be thousands of times as large as the others."
    head = random_head(target).half()
    features = torch.full((1, head.config.feature_size), 6e4)
    head.fc.weight.data.fill_(1.0)
    fused = FastHead(head, lambda ids: torch.zeros(*ids.shape, 32)).fuse(features)
    assert fused.dtype == torch.float16 and torch.isfinite(fused).all()


@pytest.mark.parametrize("tokens", [torch.arange(V).flip(0), torch.zeros(V, dtype=torch.long), torch.arange(V + 10), [3, 1], [1.5, 2.7], []])
def test_what_is_no_draft_vocabulary(target, tokens):
    with pytest.raises(InputError, match="rising order"): init_from_target(target, tokens)
    with pytest.raises(InputError, match="rising order"): with_vocabulary(random_head(target), tokens, target)


def test_a_vocabulary_may_be_a_list(target):
    assert with_vocabulary(random_head(target), [1, 2, 3], target).draft_tokens.tolist() == [1, 2, 3]


def test_a_drafter_for_another_target_is_refused(target, tiny):
    with pytest.raises(ModelError, match="vocabulary of 24"): HeadDrafter(random_head(target), tiny)
    with pytest.raises(ModelError, match="vocabulary of 24"): save_head(random_head(target), Path("never"), tiny)
    assert not Path("never").exists()


def test_the_command_for_vllm_can_be_parsed():
    command = shlex.split(vllm_command("my head", "somebody/something", K=3))
    assert command[:3] == ["vllm", "serve", "somebody/something"] and command[3] == "--speculative-config"
    assert json.loads(command[4]) == dict(model="my head", num_speculative_tokens=3, method="eagle3")


# --- The real library -------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent
ENVIRONMENT = Path(os.environ.get("SPECULATORS_ENV", ROOT / "build" / "speculators"))


def agreeing(comparisons): return [max(line["differences"]) < 1e-5 and len(line["differences"]) == 4 for line in comparisons]


def test_the_recorded_comparison_with_speculators():
    "What tools/speculators.py measured when it was last run."
    data = json.loads((ROOT / "nbs" / "data" / "speculators.json").read_text())
    assert {line["direction"] for line in data["comparisons"]} == {"ours, loaded by speculators", "theirs, loaded by us", "ours, against another head"}
    assert agreeing(data["comparisons"]) == [line["case"] != "negative control" for line in data["comparisons"]]


@pytest.mark.skipif(not (ENVIRONMENT / "complete").exists(),
                    reason="the speculators library has an environment of its own: `python tools/speculators.py build/speculators` makes it (or SPECULATORS_ENV names it)")
def test_against_the_speculators_library():
    spec = importlib.util.spec_from_file_location("tools_speculators", ROOT / "tools" / "speculators.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    comparisons = tool.compare(tool.environment(ENVIRONMENT), length=24)["comparisons"]
    assert agreeing(comparisons) == [line["case"] != "negative control" for line in comparisons]


@pytest.mark.parametrize("shape", [(960, 576), (7, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pack", [True, False])
def test_plain_weight_is_the_very_weight(shape, dtype, pack):
    "Out of every layout, bias or not."
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    for b in (None, bias):
        layer = Linear(weight, b, pack)
        assert torch.equal(plain_weight(layer), weight) and (layer.bias is b)
