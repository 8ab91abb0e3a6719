"The feature head: batched against incremental, its gradients, its vocabulary, and where it begins."
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from helpers_drafters import CPU, DRAFT, OPTIONS, V, difference, random_head, random_target, read, windowed
from specdec.cache import KVCache
from specdec.drafters.head import (
    Head,
    HeadConfig,
    HeadLayer,
    copy_layer,
    feature_layers,
    head_config,
    init_from_target,
    output_rows,
    save_head,
    share_embedding,
    target_embedding,
    unrolled_attention,
    vocabulary_maps,
    why_no_copy,
    with_vocabulary,
)
from specdec.drafters.head_drafter import FastHead, HeadDrafter
from specdec.drafters.load import load_drafter
from specdec.drafters.model import plain_weight
from specdec.drafters.tree import TreeDrafter
from specdec.errors import InputError
from specdec.models.devices import has_bfloat16
from specdec.models.hub import load_transformers
from specdec.models.linear import Int4Linear, Linear, can_be_batch_invariant, fits_four_bits
from specdec.models.llama import positions, rope_frequencies
from specdec.models.loading import load_model
from specdec.models.protocol import CausalLM
from specdec.models.transformers import TransformersLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    random_target(folder)
    return folder


@pytest.fixture(scope="module")
def target(folder): return load_model(folder, CPU, torch.float32)

# two ways to run it


@torch.no_grad()
def put_on_levels(head: Head) -> None:
    "Give a head the weights that four bits have a place for, where its matrices fit."
    for module in head.modules():
        if isinstance(module, torch.nn.Linear) and fits_four_bits(module.weight):
            module.weight.copy_(Int4Linear(module.weight).plain())


def test_a_loaded_head_drafts_in_four_bits_on_a_cpu(target, tmp_path):
    "Whatever the target's dtype; one that was made in memory keeps its own."
    head = random_head(target, intermediate_size=64)
    save_head(head, tmp_path, target)
    loaded, made = load_drafter(tmp_path, target).drafter.head, FastHead(head, target_embedding(target))
    for fast, few_bits in ((loaded, True), (made, False)):
        mlp = fast.layers[0].mlp
        assert [isinstance(each, Int4Linear) for each in (mlp.gate_up, mlp.down)] == [few_bits] * 2
    x = torch.randn(3, mlp.gate_up.inputs)
    rough, fine = (fast.layers[0].mlp.gate_up(x) for fast in (loaded, made))
    assert .01 < (rough - fine).norm() / fine.norm() < .12  # of sixteen levels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_batched_and_incremental_agree_step_by_step(folder, name, dtype):
    if dtype == torch.bfloat16 and not has_bfloat16(CPU): pytest.skip("no bfloat16 on this processor")
    target = load_model(folder, CPU, dtype)
    head, limit = random_head(target, **OPTIONS[name]), 1e-5 if dtype == torch.float32 else .06
    if dtype == torch.bfloat16: put_on_levels(head)
    tokens = torch.randint(V, (1, 30), generator=torch.Generator().manual_seed(2))
    features, steps = read(target, tokens, head.config.layers), 4
    batched = [step.detach() for step in head(tokens, features, steps)]
    assert [step.shape for step in batched] == [(1, 29 - s, len(DRAFT)) for s in range(steps)]
    fast, text = FastHead(head, target_embedding(target)), tokens[0].tolist()
    for linear in (fast.lm_head, fast.layers[0].attention.qkv):
        few_bits = dtype == torch.bfloat16 and fits_four_bits(torch.empty(linear.outputs, linear.inputs))
        assert isinstance(linear, Int4Linear) == few_bits
        # packed in float32, which is faster there for a single row, too
        assert few_bits or linear.packed == can_be_batch_invariant(CPU, dtype)
    with torch.inference_mode():
        for n in (1, 2, 7, 20, 26):  # positions read with true features
            cache = KVCache(len(head.layers), 40)
            first = max(n // 2, 1)
            logits, state = fast.step(text[1:first + 1], fast.fuse(features[0, :first]), cache)
            # in two pieces
            if first < n: logits, state = fast.step(text[first + 1:n + 1], fast.fuse(features[0, first:n]), cache)
            for s in range(steps):
                if s: logits, state = fast.step(text[n + s:n + s + 1], state, cache)
                assert difference(logits, batched[s][0, n - 1]) < limit, (n, s)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_window_hides_what_is_further_back(target, layers):
    "Read at once, in pieces and one by one; the negative control is the same head without it."
    wide = random_head(target, num_layers=layers)
    head = windowed(wide, target, 6)
    tokens = torch.randint(V, (1, 30), generator=torch.Generator().manual_seed(2))
    features, text = read(target, tokens, head.config.layers), tokens[0].tolist()
    seen, all_seen = (each(tokens, features, 1)[0][0].detach() for each in (head, wide))
    assert torch.equal(seen[:6], all_seen[:6]) and difference(seen[6:], all_seen[6:]) > 1e-3
    fast = FastHead(head, target_embedding(target))
    with torch.inference_mode():
        for pieces in ([29], [4, 9, 16], [1] * 29):
            cache, at = KVCache(layers, 40), 0
            for n in pieces:
                logits, _ = fast.step(text[at + 1:at + n + 1], fast.fuse(features[0, at:at + n]), cache)
                at += n
                assert difference(logits, seen[at - 1]) < 1e-5, at
    with pytest.raises(InputError, match="a layer of this head sees a window.*take a HeadDrafter"):
        TreeDrafter(head, target)


def test_a_step_of_its_own_sees_the_window_and_the_steps_before(target):
    q, *rest = (torch.randn(1, heads, 9, 8, dtype=torch.float64) for heads in (4, 2, 2, 2, 2))
    keys, values = rest[:2], rest[2:]
    near = torch.ones(9, 9).tril().triu(-2)
    mask = torch.cat([near, torch.eye(9)], 1).bool()
    dense = F.scaled_dot_product_attention(
        q, *(torch.cat(side, 2).repeat_interleave(2, 1) for side in (keys, values)), attn_mask=mask)
    assert difference(unrolled_attention(q, keys, values, 3), dense) < 1e-6


def test_a_head_that_forgets_its_own_steps_does_not_agree(target, monkeypatch):
    "The negative control: without the later steps' own keys, the first step still agrees and the second doesn't."
    head = random_head(target)
    tokens = torch.randint(V, (1, 20))
    features = read(target, tokens, head.config.layers)
    right = head(tokens, features, 2)
    monkeypatch.setattr(
        "specdec.drafters.head.unrolled_attention",
        lambda q, keys, values, window: unrolled_attention(q, keys[:1], values[:1]),
    )
    wrong = head(tokens, features, 2)
    assert difference(wrong[0], right[0]) == 0 and difference(wrong[1], right[1]) > 1e-3


def test_unrolled_attention_is_softmax_under_the_mask():
    "Against one dense attention over all keys with the ladder mask."
    generator = torch.Generator().manual_seed(0)
    q, *rest = (
        torch.randn(2, heads, n, 8, generator=generator, dtype=torch.float64)
        for heads, n in [(6, 5), (2, 7), (2, 6), (2, 5), (2, 7), (2, 6), (2, 5)]
    )
    keys, values = rest[:3], rest[3:]
    mask = torch.cat([torch.ones(5, 5).tril(), torch.eye(5), torch.eye(5)], 1).bool()
    dense = F.scaled_dot_product_attention(
        q, *(torch.cat([t[:, :, :5] for t in side], 2).repeat_interleave(3, 1) for side in (keys, values)),
        attn_mask=mask,
    )
    assert difference(unrolled_attention(q, keys, values), dense) < 1e-6


@pytest.mark.parametrize(
    "kind, layer_class, config_class",
    [("llama", LlamaDecoderLayer, LlamaConfig), ("qwen3", Qwen3DecoderLayer, Qwen3Config)],
    ids=["llama", "qwen3"],
)
def test_an_ordinary_layer_is_transformers_layer(kind, layer_class, config_class):
    config = config_class(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_hidden_layers=1, attn_implementation="eager",
    )
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
        for s, step in enumerate(head(tokens[b : b + 1, :11], features[b : b + 1, :11], 3)):
            assert difference(step[0], together[s][b, : step.shape[1]]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_trains(folder, name, dtype):
    target = load_model(folder, CPU, dtype)
    head = random_head(target, **OPTIONS[name])
    tokens = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(3))
    # made in inference mode: autograd couldn't keep it
    features = torch.cat([read(target, row[None], head.config.layers) for row in tokens])
    optimizer, losses = torch.optim.SGD(head.parameters(), .05), []
    for _ in range(5):
        loss = sum(
            F.cross_entropy(step.float().flatten(0, 1), torch.zeros(step.shape[0] * step.shape[1], dtype=torch.long))
            for step in head(tokens, features, 3)
        )
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
        assert abs((values[0] - values[1]) / 2e-5 - (parameter.grad * direction).sum()) < 1e-5 * max(
            1, abs(values[0])
        ), name


def test_what_can_not_be_unrolled_is_an_error(target):
    head = random_head(target)
    features = torch.zeros(1, 4, head.config.feature_size)
    for tokens, features, steps in [
        (torch.zeros(1, 4, dtype=torch.long), features, 4), (torch.zeros(1, 4, dtype=torch.long), features, 0),
        (torch.zeros(1, 5, dtype=torch.long), features, 1),
    ]:
        with pytest.raises(InputError): head(tokens, features, steps)
    head.shared_embedding = None
    with pytest.raises(InputError, match="share_embedding"):
        head(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, head.config.feature_size), 1)

# vocabulary and initialisation


def test_maps_lead_back_and_forth(target):
    d2t, t2d = vocabulary_maps(DRAFT, V)
    assert (torch.arange(len(DRAFT)) + d2t).tolist() == DRAFT.tolist() == t2d.nonzero()[:, 0].tolist()
    head = random_head(target)
    assert head.draft_tokens.tolist() == DRAFT.tolist()
    whole = random_head(target, torch.arange(V))
    assert whole.d2t is None and whole.draft_tokens.tolist() == list(range(V))
    for bad in ([3, 2], [2, 2], [], [V], [-1, 2], [[1, 2]]):
        with pytest.raises(InputError, match="rising"): vocabulary_maps(torch.tensor(bad), V)
    with pytest.raises(InputError, match="ids in it"): Head(head.config)
    with pytest.raises(InputError, match="config says"): Head(head.config, DRAFT[:3])


def test_layers_and_sizes(target):
    assert feature_layers(30) == (7, 18, 29) and feature_layers(3) == (0, 1, 2)
    for depth in (3, 4, 5, 12, 30, 80):
        assert len(set(feature_layers(depth))) == 3 and max(feature_layers(depth)) < depth
    for layers in ((1, 1, 2), (2, 1), (), (0, 6), (-1, 2)):  # 5 is the state after the last layer
        with pytest.raises(InputError, match="rising"): head_config(target, 8, layers=layers)
    for size in (0, V + 1, True, 8.0):
        with pytest.raises(InputError, match="part of the target's"): head_config(target, size)
    with pytest.raises(InputError, match="num_layers"): head_config(target, 8, num_layers=0)
    with pytest.raises(InputError, match="three different"): feature_layers(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_initialised_from_the_target(folder, dtype):
    target = load_model(folder, CPU, dtype)
    head = init_from_target(target, DRAFT)
    table = target_embedding(target)(torch.arange(V)).float()
    # tied
    assert torch.equal(head.lm_head.weight, table[DRAFT]) and torch.equal(
        output_rows(target, DRAFT).float(), table[DRAFT]
    )
    assert torch.equal(head.shared_embedding, table) and torch.equal(head.norm.weight, target.norm.float())
    features = torch.randn(2, 3, head.config.feature_size)
    assert torch.equal(head.fuse(features), features[..., -32:])
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), init_from_target(target, DRAFT).parameters()))
    assert not torch.equal(
        head.layers[0].mlp.up_proj.weight, init_from_target(target, DRAFT, seed=1).layers[0].mlp.up_proj.weight
    )


def test_a_copied_layer_computes_what_the_target_computes(target):
    head = init_from_target(target, DRAFT, num_layers=2, decoder_from=3)
    tokens = torch.randint(V, (1, 9))
    before, after = (read(target, tokens, (i,)) for i in (3, 4))
    where = positions(target.frequencies, target.rope_scale, 0, 9, 1, torch.float32)
    for layer in head.layers:
        assert difference(layer(torch.zeros_like(before), before, where.cos, where.sin, [], []).detach(), after) < 1e-5
    with pytest.raises(InputError, match="no layer 5"): copy_layer(target, 5, head.layers[0])
    small = init_from_target(target, DRAFT, intermediate_size=16)
    with pytest.raises(InputError, match="same sizes"): copy_layer(target, 1, small.layers[0])


def test_a_target_inside_of_transformers_shows_the_same_weights(folder, target):
    wrapped = TransformersLM(load_transformers(folder, CPU, torch.float32))
    ids = torch.arange(V)
    assert torch.equal(target_embedding(wrapped)(ids).detach(), target_embedding(target)(ids))
    assert torch.equal(output_rows(wrapped, DRAFT), output_rows(target, DRAFT))
    ours, theirs = init_from_target(target, DRAFT), init_from_target(wrapped, DRAFT)
    assert torch.equal(ours.shared_embedding, theirs.shared_embedding)
    assert torch.equal(ours.lm_head.weight, theirs.lm_head.weight)
    with pytest.raises(InputError, match="only a Llama has layers"):
        init_from_target(wrapped, DRAFT, decoder_from=0)


class Discreet(CausalLM):
    "Answers as another model does, and keeps its weights to itself; `embed`, `head` and `norm` are its own affair."
    def __init__(self, model):
        self.vocab_size, self.context_length, self.config = model.vocab_size, model.context_length, model.config
        self.device, self.dtype = model.device, model.dtype
        self.embed = self.head = self.norm = self.layers = self.model = "something else"


def test_only_our_own_decoder_has_layers_to_copy(target):
    assert why_no_copy(target) == "" and "only a Llama" in why_no_copy(Discreet(target))


@pytest.mark.parametrize("needs", [
    lambda target, head: init_from_target(target, DRAFT),
    lambda target, head: share_embedding(head, target),
    lambda target, head: output_rows(target, DRAFT),
    lambda target, head: with_vocabulary(head, DRAFT[:3], target),
    lambda target, head: HeadDrafter(head, target),
], ids=["to begin from", "to share", "rows", "another vocabulary", "to draft for"])
def test_a_target_that_keeps_its_weights_to_itself(target, needs):
    with pytest.raises(InputError, match="in a Llama or in a TransformersLM, but not in Discreet"):
        needs(Discreet(target), random_head(target))


@pytest.mark.parametrize(
    "tokens", [torch.arange(V).flip(0), torch.zeros(V, dtype=torch.long), torch.arange(V + 10), [3, 1], [1.5, 2.7], []],
    ids=["falling", "all the same", "too many", "a falling list", "fractions", "none"],
)
def test_what_is_no_draft_vocabulary(target, tokens):
    with pytest.raises(InputError, match="rising order"): init_from_target(target, tokens)
    with pytest.raises(InputError, match="rising order"): with_vocabulary(random_head(target), tokens, target)


def test_a_vocabulary_may_be_a_list(target):
    assert with_vocabulary(random_head(target), [1, 2, 3], target).draft_tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("shape", [(960, 576), (7, 33)], ids=["large", "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
def test_plain_weight_is_the_very_weight(shape, dtype, pack):
    "Out of every layout, bias or not."
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    for b in (None, bias):
        layer = Linear(weight, b, pack)
        assert torch.equal(plain_weight(layer), weight) and (layer.bias is b)
