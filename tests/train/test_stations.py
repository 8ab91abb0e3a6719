"""Heads and blocks followed from training to serving: an intact one is not accused, and each planted fault is named as
what it is. They are trained for a moment on the very texts, so that later draft tokens are tried, too."""
import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from helpers_drafters import random_head, random_target, read
from specdec.app import cli
from specdec.bench.methods import llamacpp_missing
from specdec.drafters.base import Draft, NoDrafter
from specdec.drafters.block import BlockDrafter, BlockState, FastBlock, init_block, load_block, save_block
from specdec.drafters.head import load_head, save_head
from specdec.drafters.head_drafter import FastHead, HeadDrafter, HeadState
from specdec.drafters.load import shipped
from specdec.errors import InputError, ModelError
from specdec.loop import speculate
from specdec.models import loading
from specdec.models.gguf import export_block, export_head, paired
from specdec.models.hub import encode
from specdec.models.loading import load
from specdec.result import Round
from specdec.sampling import SamplingParams, SeededRandom, likeliest
from specdec.train import stations
from specdec.train.rows import BLOCK_FAULTS, HEAD_FAULTS, TEMPLATE, HeadReading, fast_net, head_rows, later, rows_of
from specdec.train.stations import follow_drafter

WORDS, NEW, K = 300, 24, 3
PROMPTS = [[{"role": "user", "content": words}] for words in (
    "hello there", "and what is that? it has more tokens than the drafter reads at once, " * 2)]


def small_tokenizer():
    "Byte-level BPE with a chat template."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(["<|end|>", "<|user|>", *letters])}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", additional_special_tokens=["<|user|>"],
        chat_template="{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}<|user|>")


def greedy(target, ids):
    "The target's own text."
    rounds = speculate(target, NoDrafter(), ids, SamplingParams(0), SeededRandom(0), K, NEW)
    return [*ids, *(token for made in rounds for token in made.emitted)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    random_target(folder, V=WORDS, depth=6, max_position_embeddings=256)
    small_tokenizer().save_pretrained(folder)
    found = load(str(folder), "cpu", "float32")
    found.eos_ids = frozenset()
    return found


@pytest.fixture(scope="module")
def trained(target):
    "A head that knows the answers by heart, more or less."
    texts = [torch.tensor([greedy(target, encode(target.tokenizer, prompt))]) for prompt in PROMPTS]
    said = torch.cat([text[0, 1:] for text in texts]).unique()
    others = torch.tensor([i for i in range(3, WORDS, 2) if i not in said])[:40]
    head = random_head(target, torch.cat((said, others)).sort().values, layers=(1, 3, 4))
    narrow = {int(token): i for i, token in enumerate(head.draft_tokens)}
    labels = [torch.tensor([narrow[token] for token in text[0, 1:].tolist()]) for text in texts]
    features = [read(target, text, head.config.layers).clone() for text in texts]
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(40):
        for text, states, wanted in zip(texts, features, labels):
            rows = head(text, states, K)
            sum(F.cross_entropy(row[0, :-1], wanted[1 + s:]) for s, row in enumerate(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return head.requires_grad_(False)


@pytest.fixture(scope="module")
def folder(target, trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "head"
    save_head(trained, folder, target)
    return folder


@pytest.fixture
def no_engine(monkeypatch): monkeypatch.setattr(stations, "llamacpp_missing", lambda: "not here")


def follow(folder, target, **more):
    return follow_drafter(folder, target, PROMPTS, K=K, max_new_tokens=NEW, **more)


def departing(found):
    "The names of the stations that depart, and of the suspects."
    return [station.name.split(",")[0] for station in found.stations if station.departs], [
        list(station.suspects) for station in found.stations if station.departs]


# An intact head

def test_an_intact_head_is_not_accused(folder, target, no_engine):
    found = follow(folder, target)
    assert found.intact and departing(found) == ([], [])
    rows, decoder, gguf, engine, reloaded, loaded = found.stations
    assert rows.alpha == decoder.alpha == gguf.alpha == reloaded.alpha and rows.tried == reloaded.tried
    assert rows.tau == decoder.tau == gguf.tau > 1.5 and engine.left_out == "not here"
    assert loaded.alpha and "training's rows" in loaded.note and not loaded.departs
    assert decoder.tried[1] > 3 and decoder.tried[2] > 2  # later draft tokens are compared, too
    assert len(found.trained) == K and found.trained[0] > .3
    assert "Every station does what training's rows say." in str(found)
    assert json.loads(json.dumps(found.as_dict()))["intact"] is True


def test_rounding_that_costs_too_much_departs(folder, target, trained, no_engine, monkeypatch):
    "The station after all files: what `load_drafter` gives, whose weights are in four bits."
    right = follow(folder, target).stations[-1]
    rough = copy.deepcopy(trained)
    with torch.no_grad(): rough.lm_head.weight.copy_(rough.lm_head.weight.sign())
    monkeypatch.setattr(stations, "load_drafter", lambda *_: HeadDrafter(rough, target))
    found = follow(folder, target)
    assert departing(found) == (["5 folder by load_drafter"], [[]])
    last = found.stations[-1]
    assert last.alpha != right.alpha and "rounding costs" in last.advice[0] and "rounding costs" in str(found)


def test_every_tensor_of_a_row_is_compared(folder, target, trained, no_engine, monkeypatch):
    "Each of them alone is enough to depart, in the first step and in a later one."
    ours = FastHead(trained, target.embed)
    text = stations.decoded(target, ours, encode(target.tokenizer, PROMPTS[0]), K, NEW)
    assert stations.first_difference(trained, target, [text], K) is None
    names = list(head_rows(trained, target, text, K)[0])
    assert {"features", "fused features", "token", "last state", "logits", "draft token"} < set(names)
    r = next(i for i, seen in enumerate(text.seen) if seen.round.tried > 1)
    for s in (0, 1):
        for name in list(text.seen[r].steps[s]):
            seen = copy.copy(text.seen[r])
            steps = [dict(step) for step in seen.steps]
            value = steps[s][name]
            steps[s][name] = value + 1 if not value.is_floating_point() else value * 1.01 + .01
            broken = replace(text, seen=[*text.seen[:r], replace(seen, steps=steps), *text.seen[r + 1:]])
            found = stations.first_difference(trained, target, [broken], K)
            assert (found.tensor, found.round, found.step) == (name, r + 1, s + 1)
        names = [name for name in names if "features" not in name]
    gone = replace(text.seen[r], steps=[{} for _ in text.seen[r].steps])
    missing = stations.first_difference(trained, target, [replace(text, seen=[gone])], K)
    assert missing.tensor == "features" and missing.size == float("inf")


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_copy_that_is_rounded_is_not_accused(kind, folder, target, trained, tmp_path, no_engine):
    "Most heads are served in bfloat16, whatever they were trained in; fewer bits than that are another matter."
    if kind == "gguf": served = export_head(folder, target, tmp_path / "head.gguf", "bfloat16")
    else: save_head(copy.deepcopy(trained).bfloat16(), served := tmp_path / "half", target)
    assert follow(folder, target, served=served).intact
    assert stations.LIMIT < ((trained.fc.weight.bfloat16() - trained.fc.weight).norm() / trained.fc.weight.norm())
    kinds = {"fc.weight": "Q4_0"}
    other = stations.rounded(trained, {"fc.weight": "BF16"})
    ours = FastHead(other, target.embed)
    text = stations.decoded(target, ours, encode(target.tokenizer, PROMPTS[0]), K, NEW)
    found = stations.checked("x", trained, other, target, [text], K, NEW, kinds)
    assert found.departs and found.weight == "fc.weight (stored as Q4_0)"


# Faults in the folder that a server loads

def planted(folder, out, change):
    "A copy of a head's folder with a fault in it."
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    tensors = load_file(out / "model.safetensors")
    change(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors",
              {"format": "pt"})
    return out


def layers(by):
    def change(config, tensors): config["eagle_aux_hidden_state_layer_ids"] = [
        i + by for i in config["eagle_aux_hidden_state_layer_ids"]]
    return change


def flag(name):
    def change(config, tensors): config[name] = not config[name]
    return change


def d2t(new):
    def change(config, tensors): tensors["d2t"] = new(tensors["d2t"], torch.arange(len(tensors["d2t"])))
    return change


def order(config, tensors):
    for name, heads in (("q_proj", 4), ("k_proj", 2)):
        name = f"layers.0.self_attn.{name}.weight"
        tensors[name] = paired(tensors[name], heads)


IN_FOLDER = {
    "features one layer early": (layers(-1), "features"), "features one layer late": (layers(1), "features"),
    "norm on the wrong side of the residual": (flag("norm_before_residual"), "layer 0, MLP input"),
    "norm on the wrong side of the next step": (flag("norm_output"), "layer 0, input"),
    "rows of q and k in GGUF's order": (order, "layer 0, attention"),
    "d2t left out": (d2t(lambda d, i: 0 * d), "draft token"),
    "d2t: ids taken for differences": (d2t(lambda d, i: d + i), "draft token"),
    "d2t: differences taken for ids": (d2t(lambda d, i: d - i), "draft token"),
}


@pytest.mark.parametrize("name", IN_FOLDER)
def test_a_fault_in_the_folder_is_named(name, folder, target, tmp_path, no_engine):
    change, tensor = IN_FOLDER[name]
    found = follow(folder, target, served=planted(folder, tmp_path / "served", change))
    assert departing(found) == (["4 served"], [[name]])
    last = found.stations[-2]
    assert last.first.tensor == tensor and last.first.step == (2 if "next step" in name else 1)
    assert (last.weight != "") == ("rows" in name)
    assert last.alpha != found.stations[1].alpha and name in str(found) and len(last.advice) == 1


def test_two_faults_at_once_are_both_named(folder, target, tmp_path, no_engine):
    def both(config, tensors):
        layers(1)(config, tensors)
        d2t(lambda d, i: 0 * d)(config, tensors)
    found = follow(folder, target, served=planted(folder, tmp_path / "served", both))
    assert departing(found) == (["4 served"], [["features one layer late", "d2t left out"]])


def test_a_suspect_that_merely_helps_is_not_accused(folder, target, tmp_path, no_engine):
    "A usual fault and an unusual one: half of it is explained, so nothing is."
    def both(config, tensors):
        layers(1)(config, tensors)
        tensors["fc.weight"] = tensors["fc.weight"] * 1.1
    found = follow(folder, target, served=planted(folder, tmp_path / "served", both))
    assert departing(found) == (["4 served"], [[]]) and found.stations[-2].first.tensor == "features"


def test_of_three_faults_none_is_named(folder, target, tmp_path, no_engine):
    "Two of them don't give what was seen."
    def three(config, tensors):
        for change in (layers(1), flag("norm_before_residual"), d2t(lambda d, i: 0 * d)): change(config, tensors)
    found = follow(folder, target, served=planted(folder, tmp_path / "served", three))
    assert departing(found) == (["4 served"], [[]])


@pytest.mark.parametrize("weight, tensor", [
    ("fc.weight", "fused features"), ("layers.0.mlp.up_proj.weight", "layer 0, MLP"),
    ("layers.0.input_layernorm.weight", "layer 0, input"), ("norm.weight", "last state"),
    ("lm_head.weight", "logits"),
])
def test_another_weight_is_found_and_not_called_a_usual_fault(weight, tensor, folder, target, tmp_path, no_engine):
    def change(config, tensors): tensors[weight] = tensors[weight] * 1.02
    found = follow(folder, target, served=planted(folder, tmp_path / "served", change))
    assert departing(found) == (["4 served"], [[]])
    last = found.stations[-2]
    assert (last.first.tensor, last.weight) == (tensor, weight) and "No usual fault" in last.advice[0]
    named = {"fc": "fc isn't", "up_proj": "Attention is right", "layernorm": "two norms", "norm": "final", "lm_": "lm_"}
    assert next(words for part, words in named.items() if part in weight) in last.advice[0]


def test_a_checkpoint_that_is_not_the_folders_is_found(folder, target, trained, tmp_path, no_engine):
    out = shutil.copytree(folder, tmp_path / "head")
    (out / "training").mkdir()
    tensors = {f"weight.{name}": p.clone() for name, p in trained.named_parameters()}
    save_file(tensors, out / "training" / "checkpoint.safetensors")
    (out / "training" / "log.jsonl").write_text('{"step": 1, "greedy": [0.9, 0.8, 0.7]}\n')
    same = follow(out, target)
    assert same.intact and "checkpoint" in same.stations[0].name and same.logged == (.9, .8, .7)
    tensors["weight.fc.weight"] *= 1.1
    save_file(tensors, out / "training" / "checkpoint.safetensors")
    found = follow(out, target)
    assert found.stations[1].departs and found.stations[1].weight == "fc.weight"


# Faults in a GGUF file

def test_features_of_another_layer_in_a_file(folder, target, tmp_path, no_engine):
    file = export_head(planted(folder, tmp_path / "f", layers(-1)), target, tmp_path / "head.gguf", "float32")
    found = follow(folder, target, served=file)
    assert departing(found) == (["3 head.gguf"], [["features one layer early"]])


def test_a_norm_on_the_wrong_side_in_a_file(folder, target, tmp_path, no_engine):
    changed = planted(folder, tmp_path / "f", flag("norm_before_residual"))
    file = export_head(changed, target, tmp_path / "head.gguf", "float32")
    assert departing(follow(folder, target, served=file)) == (
        ["3 head.gguf"], [["norm on the wrong side of the residual"]])


def test_rows_that_were_not_reordered_for_a_file(folder, target, tmp_path, no_engine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("specdec.models.gguf.paired", lambda weight, heads: weight)
        file = export_head(folder, target, tmp_path / "head.gguf", "float32")
    found = follow(folder, target, served=file)
    assert departing(found) == (["3 head.gguf"], [["rows of q and k not in GGUF's order"]])


def test_differences_in_a_file_of_ids(folder, target, trained, tmp_path, no_engine):
    from gguf import GGUFReader
    file = export_head(folder, target, tmp_path / "head.gguf", "float32")
    map_ = next(tensor for tensor in GGUFReader(file, "r+").tensors if tensor.name == "d2t")
    map_.data[:] = trained.d2t.numpy()
    map_.data.base.flush()
    assert departing(follow(folder, target, served=file)) == (
        ["3 head.gguf"], [["d2t: differences taken for ids"]])


def without_template(target):
    found = copy.copy(target)
    found.tokenizer = copy.copy(target.tokenizer)
    found.tokenizer.chat_template = None
    return found


def test_a_missing_chat_template_is_named(folder, target, tmp_path, no_engine):
    file = export_head(folder, without_template(target), tmp_path / "head.gguf", "float32")
    found = follow(folder, target, served=file)
    assert departing(found) == (["3 head.gguf"], [[TEMPLATE.name]])
    assert found.stations[2].first.tensor == "prompt" and found.stations[2].alpha


def test_another_chat_template_is_not_called_missing(folder, target, tmp_path, no_engine):
    other = without_template(target)
    other.tokenizer.chat_template = target.tokenizer.chat_template + " ok"
    file = export_head(folder, other, tmp_path / "head.gguf", "float32")
    found = follow(folder, target, served=file)
    assert departing(found) == (["3 head.gguf"], [[]]) and "system prompt" in found.stations[2].advice[0]


# Faults in a decoder

class LateFeatures(HeadState):
    "Beside each token it reads the feature of one place before."
    before = None

    def commit(self, tokens, features):
        first = features[:1] if self.before is None else self.before
        self.before = features[-1:]
        super().commit(tokens, torch.cat((first, features[:-1])))


class Stepping(HeadState):
    "Greedy drafts, with places to do it wrong."
    shift = 0

    def fed(self, draft): return draft[-1:]

    def propose(self, n, sampling, rng):
        n = min(n, self.cache.capacity - self.read - len(self.unread) + 1)
        logits, state = self.catch_up()
        draft = []
        while len(draft) < n:
            if draft:
                where = self.head.where(self.cache.length + self.shift, 1)
                x = self.head.read(torch.tensor(self.fed(draft)), state, where, self.cache)
                logits, state = self.head.say(x)
            draft.append(int(self.head.tokens[int(likeliest(logits))]))
        return Draft(draft)

    propose = torch.inference_mode()(propose)


class PositionsAhead(Stepping): shift = 1


class PositionsBehind(Stepping): shift = -1


class LateTokens(Stepping):
    "Beside each feature it reads the token of that same place."
    def __init__(self, drafter, tokens, *more):
        self.newest = tokens[0]
        super().__init__(drafter, tokens, *more)

    def commit(self, tokens, features):
        late, self.newest = [self.newest, *tokens[:-1]], tokens[-1]
        super().commit(late, features)

    def fed(self, draft): return [[self.newest, *draft][len(draft) - 1]]


IN_DECODER = {
    "features one place late": (LateFeatures, "features"), "tokens one place late": (LateTokens, "token"),
    "draft positions one too far": (PositionsAhead, "layer 0, positions"),
    "draft positions one short": (PositionsBehind, "layer 0, positions"),
}


@pytest.mark.parametrize("name", IN_DECODER)
def test_a_fault_in_the_decoder_is_named(name, folder, target, no_engine, monkeypatch):
    state, tensor = IN_DECODER[name]
    monkeypatch.setattr(HeadDrafter, "State", state)
    found = follow(folder, target)
    departing = [station.suspects for station in found.stations if station.departs]
    assert departing[:3] == [(name,)] * 3 and departing[3:] in ([], [()])  # the last one shows rounds only
    assert found.stations[1].first.tensor == tensor and not found.stations[0].departs


def test_the_state_of_these_tests_is_right_without_its_fault(folder, target, no_engine, monkeypatch):
    "The negative control of the planting."
    monkeypatch.setattr(HeadDrafter, "State", Stepping)
    assert follow(folder, target).intact


def test_states_that_stay_in_the_cache_are_no_usual_fault(folder, target, no_engine, monkeypatch):
    "A decoder that keeps its own states of accepted tokens in place of the target's features."
    class Keeps(HeadState):
        def commit(self, tokens, features):
            if self.read and (kept := min(self.cache.length - self.read, len(tokens) - 1)) > 0:
                self.cache.rollback(self.read + kept)
                self.read += kept
                tokens, features = tokens[kept:], features[kept:]
            super().commit(tokens, features)
    monkeypatch.setattr(HeadDrafter, "State", Keeps)
    found = follow(folder, target).stations[1]
    assert found.departs and found.suspects == () and found.first.tensor == "layer 0, attention"
    assert found.first.round > 1 and "stay in the cache" in found.advice[0]


def test_each_suspect_is_planted_somewhere():
    planted = {*IN_FOLDER, *IN_DECODER, "rows of q and k not in GGUF's order"}
    assert planted == {fault.name for fault in HEAD_FAULTS}


# A block, whose rows come out of one forward

BLOCK_WORDS = dict(markov_rank=8, enable_confidence_head=True, confidence_head_with_markov=True)


@pytest.fixture(scope="module", params=["chain", "product, row 0 the anchor"])
def block(request, target):
    "A block that knows the answers by heart, more or less; it drafts one token more than we ask for."
    texts = [torch.tensor([greedy(target, encode(target.tokenizer, prompt))]) for prompt in PROMPTS]
    said = torch.cat([text[0, 1:] for text in texts]).unique()
    others = torch.tensor([i for i in range(3, WORDS, 2) if i not in said])[:40]
    options = BLOCK_WORDS | dict(block_size=K + 1)
    if request.param != "chain": options = dict(block_size=K + 2, sample_from_anchor=False)
    block = init_block(target, torch.cat((said, others)).sort().values, layers=(1, 3, 4), mask_token_id=2, **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in block.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + .3 * noise if "norm" in name else noise / weight.shape[-1] ** .5)
    narrow = {int(token): i for i, token in enumerate(block.draft_tokens)}
    labels = [torch.tensor([narrow[token] for token in text[0, 1:].tolist()]) for text in texts]
    features = [read(target, text, block.config.layers).clone() for text in texts]
    optimizer = torch.optim.AdamW([p for p in block.parameters() if p.requires_grad], lr=1e-2)
    most = block.config.most
    for _ in range(60):
        for text, states, wanted in zip(texts, features, labels):
            anchors = torch.arange(1, text.shape[1] - most)
            at = anchors[:, None] + torch.arange(most)
            rows = block.states(text, states, torch.zeros_like(anchors), anchors, most)
            F.cross_entropy(block.logits(rows, text[0, at]).flatten(0, 1), wanted[at].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return block.requires_grad_(False)


@pytest.fixture(scope="module")
def block_folder(target, block, tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocks") / "block"
    save_block(block, folder, target)
    return folder


def test_an_intact_block_is_not_accused(block_folder, block, target, no_engine):
    found = follow(block_folder, target)
    assert found.intact and departing(found) == ([], [])
    rows, decoder, gguf, engine, reloaded, loaded = found.stations
    assert rows.alpha == decoder.alpha == gguf.alpha == reloaded.alpha and rows.tried == reloaded.tried
    assert rows.tau == decoder.tau > 1.5 and engine.left_out == "not here" and not loaded.departs
    assert decoder.tried[1] > 3 and decoder.tried[2] > 2  # later draft tokens are compared, too
    text = stations.decoded(target, fast_net(block, target), encode(target.tokenizer, PROMPTS[0]), K, NEW)
    names = set(rows_of(block, target, text, K)[0])
    assert names == set(text.seen[0].steps[0])
    assert ("bias" in names) == (block.config.markov_rank > 0)


def test_every_tensor_of_a_blocks_row_is_compared(block, target):
    "Each of them alone is enough to depart, in the first row and in a later one."
    text = stations.decoded(target, fast_net(block, target), encode(target.tokenizer, PROMPTS[0]), K, NEW)
    assert stations.first_difference(block, target, [text], K) is None
    r = next(i for i, seen in enumerate(text.seen) if seen.round.tried > 1)
    for s in (0, 1):
        for name in list(text.seen[r].steps[s]):
            seen = copy.copy(text.seen[r])
            steps = [dict(step) for step in seen.steps]
            value = steps[s][name]
            steps[s][name] = value + 1 if not value.is_floating_point() else value * 1.01 + .01
            broken = replace(text, seen=[*text.seen[:r], replace(seen, steps=steps), *text.seen[r + 1:]])
            found = stations.first_difference(block, target, [broken], K)
            assert (found.tensor, found.round, found.step) == (name, r + 1, s + 1)


def block_layers(by):
    def change(config, tensors): config["aux_hidden_state_layer_ids"] = [
        i + by for i in config["aux_hidden_state_layer_ids"]]
    return change


def no_bias(config, tensors): tensors["markov_head.markov_w2.weight"] = 0 * tensors["markov_head.markov_w2.weight"]


BLOCK_IN_FOLDER = {  # what a server's folder does wrong → the first tensor that differs
    "features one layer early": (block_layers(-1), "features"),
    "features one layer late": (block_layers(1), "features"),
    "rows off by one": (flag("sample_from_anchor"), "positions"),
    "another mask token": (lambda c, t: c.update(mask_token_id=0), "mask token"),
    "rows of q and k in GGUF's order": (order, "layer 0, attention"),
    "d2t left out": (d2t(lambda d, i: 0 * d), "draft token"),
    "d2t: ids taken for differences": (d2t(lambda d, i: d + i), "draft token"),
    "d2t: differences taken for ids": (d2t(lambda d, i: d - i), "draft token"),
}


@pytest.mark.parametrize("name", BLOCK_IN_FOLDER)
def test_a_fault_in_a_blocks_folder_is_named(name, block_folder, target, tmp_path, no_engine):
    change, tensor = BLOCK_IN_FOLDER[name]
    found = follow(block_folder, target, served=planted(block_folder, tmp_path / "served", change))
    assert departing(found) == (["4 served"], [[name]])
    last = found.stations[-2]
    assert last.first.tensor == tensor and name in str(found) and len(last.advice) == 1


class EarlyContext(BlockState):
    "In each place of its context stands that of the place before."
    def __init__(self, drafter, tokens, features, *more):
        self.before = features[-1:]
        super().__init__(drafter, tokens, torch.cat((features[:1], features[:-1])), *more)

    def commit(self, tokens, features):
        late, self.before = torch.cat((self.before, features[:-1])), features[-1:]
        super().commit(tokens, late)


class LateAnchor(BlockState):
    "It begins with the token before the last one."
    def __init__(self, drafter, tokens, *more):
        super().__init__(drafter, tokens, *more)
        self.newest, self.last = self.last, tokens[-2]

    def commit(self, tokens, features):
        super().commit(tokens, features)
        self.newest, self.last = tokens[-1], [self.newest, *tokens][-2]


made, states, forward, bias = FastBlock.__init__, FastBlock.states, FastBlock.forward, FastBlock.bias


def shifted(by):
    "Its rows stand so many positions too far."
    def moved(self, *given):
        there = copy.copy(self)
        there.where = lambda start, rows: self.where(start + by, rows)
        return states(there, *given)
    return dict(states=moved)


def left_to_right(self, ids, where, cache, mask=None):
    "A row sees those before it only."
    rows, decoder = ids.shape[1], self.config.decoder
    seen = torch.ones(rows, cache.length + rows, dtype=torch.bool).tril(cache.length)
    seen = seen.repeat(decoder.num_attention_heads // decoder.num_key_value_heads, 1)
    return forward(self, ids, where, cache, seen[None, None])


def without_norm(self, *given):
    "Its context isn't normed."
    made(self, *given)
    self.hidden_norm = torch.nn.Identity()


def without_bias(self, before): return 0 * bias(self, before)


def by_anchor():
    "The Markov head is told the anchor in each place."
    anchors = []
    def begin(self, token, *more):
        anchors.append(token)
        return states(self, token, *more)
    return dict(states=begin, bias=lambda self, before: bias(self, anchors[-1]))


BLOCK_IN_DECODER = {
    "block one position too far": (shifted(1), "positions"), "block one position short": (shifted(-1), "positions"),
    "rows see one another from left to right": (dict(forward=left_to_right), "layer 0, attention"),
    "context not normed": (dict(__init__=without_norm), "fused features"),
    "Markov bias left out": (dict(bias=without_bias), "bias"), "Markov bias by the anchor": (by_anchor(), "bias"),
    "features one place late": (EarlyContext, "features"), "anchor one place late": (LateAnchor, "token"),
}


@pytest.mark.parametrize("name", BLOCK_IN_DECODER)
def test_a_fault_in_a_blocks_decoder_is_named(name, block_folder, block, target, no_engine, monkeypatch):
    planted, tensor = BLOCK_IN_DECODER[name]
    if "Markov" in name and not block.config.markov_rank: pytest.skip("it has no Markov head")
    if isinstance(planted, type): monkeypatch.setattr(BlockDrafter, "State", planted)
    else:
        for part, fault in planted.items(): monkeypatch.setattr(FastBlock, part, fault)
    found = follow(block_folder, target)
    departing = [station.suspects for station in found.stations if station.departs]
    assert departing[:3] == [(name,)] * 3
    assert found.stations[1].first.tensor == tensor and not found.stations[0].departs


def test_states_that_stay_in_a_blocks_cache_are_no_usual_fault(block_folder, target, no_engine, monkeypatch):
    "A decoder that keeps the block's own keys and values of accepted tokens in place of the target's."
    class Keeps(BlockState):
        def commit(self, tokens, features):
            if self.cache.length: # what was drafted still stands behind
                self.cache.length += len(tokens) - 1
                features = features[-1:]
            super().commit(tokens, features)
    monkeypatch.setattr(BlockDrafter, "State", Keeps)
    found = follow(block_folder, target).stations[1]
    assert found.departs and found.suspects == () and found.first.tensor == "layer 0, attention"
    assert found.first.round > 1 and "stay in the cache" in found.advice[0]


def test_each_suspect_of_a_block_is_planted_somewhere():
    assert {*BLOCK_IN_FOLDER, *BLOCK_IN_DECODER} == {fault.name for fault in BLOCK_FAULTS}


BLOCK_IN_FILE = {  # bytes of a block's file → the fault, and the first tensor that differs
    "another mask token": (lambda d: overwritten(d, "tokenizer.ggml.mask_token_id", value=b"\0\0\0\0"), "mask token"),
    "features one layer late": (lambda d: overwritten(d, "dflash.target_layers", value=b"\2\0\0\0\4\0\0\0\5\0\0\0",
                                                      at=12), "features"),
}


@pytest.mark.parametrize("name", [*BLOCK_IN_FILE, "rows off by one"])
def test_a_fault_in_a_blocks_file_is_named(name, block_folder, block, target, tmp_path, no_engine):
    flip = bytes([not block.config.sample_from_anchor])
    change, tensor = BLOCK_IN_FILE.get(
        name, (lambda d: overwritten(d, "dflash.sample_from_anchor", value=flip), "positions"))
    file = export_block(block_folder, target, tmp_path / "block.gguf", "float32")
    file.write_bytes(change(file.read_bytes()))
    found = follow(block_folder, target, served=file)
    assert departing(found) == (["3 block.gguf"], [[name]]) and found.stations[2].first.tensor == tensor


def test_a_blocks_kind_is_told_to_the_engine(block):
    assert stations.engine_mode(block) == ("dspark" if block.config.markov_rank else "dflash")


def test_what_a_block_can_not_be_wrong_about_is_not_suspected(block, target):
    names = {fault.name for fault in stations.usual_faults(block, target)}
    assert ("Markov bias left out" in names) == (block.config.markov_rank > 0)
    whole = init_block(target, torch.arange(WORDS), layers=(0, 3, 6), mask_token_id=0, block_size=1)
    names = {fault.name for fault in stations.usual_faults(whole, target)}
    assert names == {"features one place late", "anchor one place late", "block one position too far",
                     "block one position short", "context not normed", "rows of q and k in GGUF's order"}


def save_other(block, target, out, **change):
    "The folder of a block with the same vocabulary, of another shape."
    options = dict(layers=(1, 3, 4), mask_token_id=2, block_size=4) | change
    save_block(init_block(target, options.pop("tokens", block.draft_tokens), **options), out, target)
    return out


@pytest.mark.parametrize("change", [
    dict(block_size=1), dict(block_size=3, sample_from_anchor=False), dict(num_layers=2, markov_rank=4),
    dict(tokens=torch.arange(WORDS))], ids=["one row", "fewer rows than asked for", "two layers", "whole vocabulary"])
def test_blocks_of_all_shapes_are_followed(change, block, target, tmp_path, no_engine):
    "Also along prompts of one token, and with what each fault would do."
    out = save_other(block, target, tmp_path / "block", **change)
    found = follow_drafter(out, target, [*PROMPTS, "a"], K=K, max_new_tokens=NEW, signatures=True)
    assert found.intact and len(found.trained) == min(K, load_block(out, target).config.most)


def test_a_whole_vocabulary_may_speak_by_the_targets_matrix(block, target, tmp_path, no_engine):
    out = save_other(block, target, tmp_path / "block", tokens=torch.arange(WORDS))
    tensors = load_file(out / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, out / "model.safetensors")
    assert follow(out, target, served=shutil.copytree(out, tmp_path / "served")).intact


@pytest.mark.parametrize("change, words", [
    (lambda c, t: c["transformer_layer_config"].update(layer_types=["sliding_attention"], sliding_window=4,
                                                       use_sliding_window=True), "sliding window"),
    (lambda c, t: c["transformer_layer_config"].update(hidden_act="gelu"), "don't compute"),
    (lambda c, t: c["transformer_layer_config"].update(max_position_embeddings=5), "context ends"),
    (lambda c, t: t["norm.weight"].fill_(float("nan")), "NaN or infinities"),
    (lambda c, t: c.update(mask_token_id=10**6), "mask_token_id"),
], ids=["window", "activation", "context", "NaN", "mask"])
def test_a_blocks_copy_that_can_not_be_right_says_why(change, words, block_folder, target, tmp_path, no_engine):
    found = follow(block_folder, target, served=planted(block_folder, tmp_path / "served", change))
    assert departing(found) == (["4 served"], [[]]) and words in str(found)


def test_rounds_end_with_the_drafters_context(block, target, tmp_path, no_engine):
    "Training's rows know where it ends, too."
    out = planted(save_other(block, target, tmp_path / "block"), tmp_path / "short",
                  lambda c, t: c["transformer_layer_config"].update(max_position_embeddings=20))
    found = follow(out, target)
    assert found.intact and found.stations[0].tried == found.stations[1].tried


def test_a_blocks_file_that_is_damaged_says_why(block_folder, block, target, tmp_path):
    file = export_block(block_folder, target, tmp_path / "block.gguf", "float32")
    data = file.read_bytes()
    eps = "dflash.attention.layer_norm_rms_epsilon"
    for change, words in ((lambda d: overwritten(d, "dflash.block_size", value=b"\xff\xff"), "block_size"),
                          (lambda d: overwritten(d, "dflash.rope.freq_base", value=b"\0\0\xc0\x7f"), "freq_base"),
                          (lambda d: overwritten(d, "dflash.attention.causal", value=b"\1"), "attention.causal"),
                          (lambda d: overwritten(d, "tokenizer.ggml.mask_token_id", value=b"\0\0\1\0"), "mask token"),
                          (lambda d: overwritten(d, eps, value=b"\xff\xff\x7f\xff"), "epsilon"),
                          (lambda d: d[:len(d) // 3], "can't be read")):
        file.write_bytes(change(data))
        [found] = stations.gguf_stations(block_folder, file, load_block(block_folder, target), target, PROMPTS, [], K,
                                         NEW, tmp_path)
        assert found.departs and words in found.left_out and "\n" not in found.left_out
    export_head(*a_head(target, block, tmp_path), file, "float32")
    [found] = stations.gguf_stations(block_folder, file, load_block(block_folder, target), target, PROMPTS, [], K,
                                     NEW, tmp_path)
    assert "'eagle3'" in found.left_out and "'dflash'" in found.left_out


def a_head(target, block, tmp_path):
    "The folder of a head, and its target."
    save_head(random_head(target, block.draft_tokens, layers=(1, 3, 4)), tmp_path / "head", target)
    return tmp_path / "head", target


# llama.cpp, whose tensors can't be seen

class Engine:
    "A double that drafts with a head that is read some way, with the prompts that it makes."
    def __init__(self, *arguments, **more): self.address = ""

    def close(self): pass

    def ask(self, path, question):
        if path == "/apply-template": return {"prompt": self.shown(question["messages"])}
        return {"tokens": encode(self.tokenizer, question["content"])}

    def shown(self, messages):
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.fixture
def engine(target, trained, monkeypatch):
    "A function that puts a double in the place of llama.cpp, for a way to read the head."
    def place(reading=HeadReading(), shown=None):
        Engine.tokenizer = target.tokenizer
        def rounds(_, ids, n):
            text = stations.Text(ids, greedy(target, ids)[len(ids):][:n])
            rows = head_rows(trained, target, text, K, reading)
            return text.answer, stations.rounds_of_rows(rows, text, K, n, frozenset(), 999)
        monkeypatch.setattr(stations, "llamacpp_missing", lambda: None)
        monkeypatch.setattr(stations, "LlamaCpp", Engine)
        monkeypatch.setattr(stations, "export_gguf", lambda *_: None)
        monkeypatch.setattr(stations, "streamed_rounds", rounds)
        if shown: monkeypatch.setattr(Engine, "shown", shown)
    return place


def test_an_engine_that_drafts_as_training_says_is_not_accused(folder, target, engine):
    engine()
    found = follow(folder, target)
    assert found.intact and found.stations[3].alpha == found.stations[1].alpha
    assert "100% of its rounds" in str(found)


def test_an_engine_that_drafts_otherwise_is_accused_by_its_rounds(folder, target, engine):
    engine(HeadReading(features=-1))
    found = follow(folder, target)
    assert departing(found) == (["3 exported GGUF"], [["features one place late"]])
    engine(HeadReading(features=-1, tokens=-1))  # two at once: where nothing is accepted, rounds alone don't tell
    found = follow(folder, target)
    assert departing(found) == (["3 exported GGUF"], [[]])
    assert "Its rounds are those of: " in str(found) and "d2t left out or d2t: ids" in str(found)


def test_an_engine_without_the_chat_template_is_named(folder, target, engine):
    engine(shown=lambda self, messages: messages[0]["content"])
    assert departing(follow(folder, target)) == (["3 exported GGUF"], [[TEMPLATE.name]])


def test_rounds_are_counted_from_a_stream(monkeypatch):
    parts = [dict(tokens=[5], timings=dict(draft_n=0)), dict(tokens=[6], timings=dict(draft_n=3, draft_n_accepted=1)),
             dict(tokens=[7], timings=dict(draft_n=3, draft_n_accepted=1)),
             dict(tokens=[8], timings=dict(draft_n=6, draft_n_accepted=1)), dict(tokens=[], stop=True)]
    lines = [b"\n", *(b"data: " + json.dumps(part).encode() + b"\n" for part in parts)]

    class Opened:
        def open(self, request): return self
        def __enter__(self): return iter(lines)
        def __exit__(self, *_): pass
    monkeypatch.setattr(stations, "build_opener", lambda _: Opened())
    Engine.tokenizer = None
    engine = Engine()
    engine.address = "http://here"
    answer, rounds = stations.streamed_rounds(engine, [1], 4)
    assert answer == [5, 6, 7, 8] and [(len(r.drafted), r.accepted) for r in rounds] == [(3, 1), (3, 0)]


# What each would do, and what can't be

def test_signatures_are_what_a_planted_fault_gives(folder, target, tmp_path, no_engine):
    served = planted(folder, tmp_path / "served", layers(1))
    found = follow(folder, target, served=served, signatures=True)
    assert set(found.signatures) == {*(fault.name for fault in HEAD_FAULTS), TEMPLATE.name}
    assert found.signatures["features one layer late"] == found.stations[-2].alpha
    assert "If it were served so:" in str(found)


def test_places_are_shifted_with_their_ends_repeated():
    x = torch.arange(4)
    assert [later(x, by).tolist() for by in (0, 1, -1)] == [[0, 1, 2, 3], [1, 2, 3, 3], [0, 0, 1, 2]]


def test_what_can_not_be_followed_is_one_clear_line(folder, target, tmp_path, no_engine, trained):
    half = copy.copy(target)
    half.dtype = torch.bfloat16
    with pytest.raises(InputError, match='float32 on the CPU.*load\\(name, "cpu", "float32"\\)'): follow(folder, half)
    bare = copy.copy(target)
    bare.tokenizer = None
    with pytest.raises(InputError, match="no tokenizer"): follow(folder, bare)
    with pytest.raises(InputError, match="There is nothing at .*nowhere that"): follow(folder, target, served="nowhere")
    with pytest.raises(InputError, match="no prompts"): follow_drafter(folder, target, [])
    with pytest.raises(InputError, match="K, draft tokens"): follow_drafter(folder, target, PROMPTS, K=0)
    with pytest.raises(ModelError, match="holds no head"): follow(tmp_path, target)


@pytest.mark.parametrize("change, words", [
    (lambda c, t: c.update(draft_vocab_size=len(t["d2t"]) - 1), "another drafter"),
    (lambda c, t: t.pop("fc.weight"), "fc.weight"),
    (lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 3, 7]), "does not fit"),
    (lambda c, t: c.pop("transformer_layer_config"), "can't be used"),
], ids=["vocabulary", "weight", "layers", "config"])
def test_a_copy_that_can_not_be_read_departs_and_says_why(change, words, folder, target, tmp_path, no_engine):
    found = follow(folder, target, served=planted(folder, tmp_path / "served", change))
    assert departing(found) == (["4 served"], [[]]) and words in found.stations[-2].left_out
    assert words in str(found)


def test_a_file_that_is_no_heads_departs_and_says_why(folder, target, tmp_path, no_engine):
    (tmp_path / "head.gguf").write_text("no")
    found = follow(folder, target, served=tmp_path / "head.gguf")
    assert departing(found) == (["3 head.gguf"], [[]]) and "can't be read" in found.stations[2].left_out


def overwritten(data, name, kind=None, value=b"", at=0):
    "A GGUF file in which a value, or its kind, is another."
    start = data.index(len(name).to_bytes(8, "little") + name.encode()) + 8 + len(name)
    if kind is not None: data = data[:start] + kind.to_bytes(4, "little") + data[start + 4:]
    return data[:start + 4 + at] + value + data[start + 4 + at + len(value):]


DAMAGE = {  # bytes of a file → what is said of it
    "a flipped length": (
        lambda d: overwritten(d, "eagle3.target_layers", value=b"\x03\0\0\0\x80\0\0\0", at=4), "metadata"),
    "more tokens": (lambda d: overwritten(d, "tokenizer.ggml.tokens", value=b"\x2c\x01\0\x10", at=4), "metadata"),
    "more entries": (lambda d: d[:16] + (2**60).to_bytes(8, "little") + d[24:], "metadata"),
    "more tensors": (lambda d: d[:8] + (2**60).to_bytes(8, "little") + d[16:], "metadata"),
    "half a file": (lambda d: d[:len(d) // 3], "can't be read"),
    "no UTF-8": (lambda d: overwritten(d, "general.architecture", value=b"\xff\xfe", at=8), "can't be used"),
    "no integer": (lambda d: overwritten(d, "eagle3.attention.head_count", 6), "head_count"),
    "no heads": (lambda d: overwritten(d, "eagle3.attention.head_count", value=b"\0" * 4), "head_count"),
    "too many heads": (lambda d: overwritten(d, "eagle3.attention.head_count", value=b"\x07\0\0\0"), "attn_q"),
    "no base": (lambda d: overwritten(d, "eagle3.rope.freq_base", value=b"\0\0\xc0\x7f"), "freq_base"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_departs_and_says_why(name, folder, target, tmp_path):
    damage, words = DAMAGE[name]
    file = export_head(folder, target, tmp_path / "head.gguf", "float32")
    file.write_bytes(damage(file.read_bytes()))
    [found] = stations.gguf_stations(folder, file, load_head(folder, target), target, PROMPTS, [], K, NEW, tmp_path)
    assert found.departs and words in found.left_out and "\n" not in found.left_out


@pytest.mark.parametrize("log", [
    '{"step": 1, "greedy": null}\n', '{"step": 1, "greedy": "high"}\n', '{"step": 1, "greedy": [1e999]}\n',
    '{"step": 1, "greedy": [' + ", ".join(["0.5"] * 10**5) + "]}\n", '{"step": 1, "greedy": [0.9, "x"]}\n',
    '{"step": 1, "greedy": [0.5], "al', '{"step": 1, "greedy": [0.5]}', "[1]\n", "\xff\n", "[" * 10**5 + "\n", "\n\n",
], ids=["null", "text", "infinite", "huge", "mixed", "torn", "no break", "list", "bytes", "deep", "blank"])
def test_a_damaged_log_is_told_before_any_station(log, folder, target, tmp_path, monkeypatch):
    def work(*arguments, **more): raise AssertionError("a station was begun")
    monkeypatch.setattr(stations, "trained_net", work)
    out = shutil.copytree(folder, tmp_path / "head")
    (out / "training").mkdir()
    (out / "training" / "log.jsonl").write_bytes(log.encode("latin-1"))
    with pytest.raises(InputError, match="log.jsonl"): follow(out, target)


@pytest.mark.parametrize("change, words", [
    (lambda c: c["transformer_layer_config"].update(num_hidden_layers=10**6), "num_hidden_layers 1000000"),
    (lambda c: c["transformer_layer_config"].update(num_hidden_layers=10**400), "num_hidden_layers"),
    (lambda c: c["transformer_layer_config"].update(num_hidden_layers="1"), "num_hidden_layers"),
    (lambda c: c["transformer_layer_config"].update(intermediate_size=10**9), "intermediate_size 1000000000"),
    (lambda c: c["transformer_layer_config"].update(head_dim=10**9), "head_dim 1000000000"),
    (lambda c: c["transformer_layer_config"].update(num_hidden_layers=200), "num_hidden_layers is 200"),
    (lambda c: c["transformer_layer_config"].update(intermediate_size=10**6), "_proj"),
    (lambda c: c["transformer_layer_config"].update(head_dim=10**6), "q_proj"),
], ids=["layers", "many layers", "text", "intermediate", "head", "some layers", "wide", "wide heads"])
def test_a_heads_sizes_are_held_against_its_file(change, words, folder, target, tmp_path):
    "Nothing is built of sizes that the file doesn't have."
    out = shutil.copytree(folder, tmp_path / "head")
    config = json.loads((out / "config.json").read_text())
    change(config)
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=words): follow(out, target)
    with pytest.raises(ModelError): stations.from_folder(out, load_head(folder, target), target)


@pytest.mark.parametrize("change", [
    lambda t: t.update({"weight.fc.weight": t["weight.fc.weight"][:1, :1]}),
    lambda t: t["weight.norm.weight"].fill_(float("nan")),
], ids=["shape", "NaN"])
def test_a_checkpoint_that_is_not_this_heads_is_told(change, folder, target, trained, tmp_path):
    out = shutil.copytree(folder, tmp_path / "head")
    (out / "training").mkdir()
    tensors = {f"weight.{name}": p.clone() for name, p in trained.named_parameters()}
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, out / "training" / "checkpoint.safetensors")
    with pytest.raises(ModelError, match="isn't this drafter's"): follow(out, target)


def test_a_head_that_gguf_can_not_hold_leaves_that_station_out(target, trained, tmp_path, no_engine):
    save_head(random_head(target, trained.draft_tokens, num_layers=2), tmp_path / "two", target)
    found = follow(tmp_path / "two", target)
    assert found.intact and "2 layers" in found.stations[2].left_out and len(found.stations) == 5


# The command

def test_the_command_says_it_in_a_table_or_in_json(folder, target, tmp_path, no_engine, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda name, device, dtype: target)
    questions = tmp_path / "questions.jsonl"
    questions.write_text("hello there\nand what is that?\n")
    words = ["follow", str(folder), "--target", "x", "--prompts", str(questions), "-K", str(K), "--max-new-tokens",
             str(NEW)]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0 and "Every station does" in done.stdout and "2 prompts" in done.stdout
    served = planted(folder, tmp_path / "served", layers(1))
    done = CliRunner().invoke(cli.app, [*words, "--served", str(served), "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == cli.ExitCode.UNEXPECTED and found["intact"] is False
    assert found["stations"][-2]["suspects"] == ["features one layer late"]
    done = CliRunner().invoke(cli.app, [*words, "--served", str(tmp_path / "nowhere")])
    assert done.exit_code == cli.ExitCode.BAD_INPUT and "There is nothing at" in done.stderr and not done.stdout


def test_a_round_without_drafts_is_no_round():
    assert stations.station_of("x", []) == stations.Station("x", (), (), None)
    assert stations.drafted_at([1, 2, 3], 1, 0, frozenset(), lambda n: [9]) == Round([], 0, [2])


@pytest.mark.slow
@pytest.mark.skipif(llamacpp_missing() is not None, reason=str(llamacpp_missing()))
def test_the_shipped_head_in_the_real_engine():
    "Round by round as training's rows say, with a control: rows that are read otherwise give other rounds."
    real = load("smollm2", "cpu", "float32")
    found = follow_drafter(shipped("smollm2-head"), real, max_new_tokens=32)
    engine = found.stations[3]
    assert found.intact and engine.alpha and int(engine.note.split("%")[0].split()[-1]) >= 90
    trained, _ = stations.trained_net(shipped("smollm2-head"), real)
    text = stations.decoded(real, FastHead(trained, real.embed), [1, 2, 3, 4], 5, 48)
    rounds = [[stations.rounds_of_rows(head_rows(trained, real, text, 5, reading), text, 5, 48, frozenset(), 9999)]
              for reading in (HeadReading(), HeadReading(layers=1))]
    assert stations.alike(rounds[0], rounds[1]) < stations.ALIKE
