"A head's folder: saved and loaded, damaged and refused, and against the `speculators` library."
import copy
import importlib.util
import json
import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import specdec
from helpers_drafters import (
    CPU,
    DRAFT,
    OPTIONS,
    V,
    difference,
    fresh,
    proposals,
    random_head,
    random_target,
    read,
)
from specdec.drafters.base import NoDrafter
from specdec.drafters.head import Head, feature_layers, layer_windows, load_head, save_head, share_embedding
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.load import load_drafter
from specdec.errors import InputError, ModelError
from specdec.models.hub import load_transformers
from specdec.models.llama import rms_norm
from specdec.models.loading import load_model
from specdec.models.transformers import TransformersLM
from specdec.options import Options
from specdec.train.export import vllm_command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    random_target(folder)
    return folder


@pytest.fixture(scope="module")
def target(folder): return load_model(folder, CPU, torch.float32)

# the folder


@pytest.mark.parametrize("tokens", [DRAFT, torch.arange(V)], ids=["some tokens", "all tokens"])
@pytest.mark.parametrize("name", OPTIONS)
def test_saved_and_loaded(target, tmp_path, name, tokens):
    head = random_head(target, tokens, **OPTIONS[name])
    save_head(head, tmp_path / "new" / "head", target, verifier="somebody/something")
    again = load_head(tmp_path / "new" / "head", target)
    assert again.state_dict().keys() == head.state_dict().keys() and all(
        torch.equal(a, b) for a, b in zip(again.state_dict().values(), head.state_dict().values())
    )
    assert replace(again.config, decoder=None, K=None) == replace(head.config, decoder=None) and again.config.K == 5
    with pytest.raises(InputError, match="share_embedding"): again.embed(tokens)
    tokens = torch.randint(V, (1, 9))
    features = read(target, tokens, head.config.layers)
    for a, b in zip(share_embedding(again, target)(tokens, features, 2), head(tokens, features, 2)):
        assert torch.equal(a, b)


def test_the_config_says_what_servers_look_for(target, tmp_path):
    save_head(random_head(target), tmp_path, target, verifier="somebody/something", K=4)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["speculators_model_type"] == "eagle3" and stored["speculators_config"]["algorithm"] == "eagle3"
    assert stored["eagle_aux_hidden_state_layer_ids"] == list(feature_layers(5)) and stored["draft_vocab_size"] == len(
        DRAFT
    )
    assert stored["norm_before_residual"] is False  # vLLM takes a missing one for true
    assert stored["speculators_config"]["verifier"] == dict(
        name_or_path="somebody/something", architectures=["LlamaForCausalLM"]
    )
    assert stored["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    layer = stored["transformer_layer_config"]
    assert (
        layer["model_type"], layer["vocab_size"], layer["hidden_size"], layer["num_hidden_layers"], layer["head_dim"],
    ) == ("llama", V, 32, 1, 8)
    tensors = load_file(tmp_path / "model.safetensors")
    assert (
        tensors["t2d"].dtype == torch.bool
        and tensors["d2t"].dtype == torch.long
        and not any("embed" in name for name in tensors)
    )
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (32, 64) and tensors["fc.weight"].shape == (32, 96)


def test_a_head_with_an_embedding_of_its_own(target, tmp_path):
    head = random_head(target)
    save_head(head, tmp_path, target, embedding=True)
    own = load_head(tmp_path, target)
    assert (
        own.config.own_embedding
        and torch.equal(own.embed_tokens.weight, head.shared_embedding)
        and not own.embed_tokens.weight.requires_grad
    )
    assert proposals(fresh(own, target, [1, 2, 3])).tokens == proposals(fresh(head, target, [1, 2, 3])).tokens
    with torch.no_grad(): own.embed_tokens.weight.neg_()
    assert difference(proposals(fresh(own, target, [1, 2, 3])).q, proposals(fresh(head, target, [1, 2, 3])).q) > 1e-3


def test_a_head_of_others(target, tmp_path):
    "No layers named, no key of ours, old names for the rotary embedding, the verifier's matrices beside the head's."
    head = random_head(target, layers=(2, 3, 4))
    save_head(head, tmp_path, target)
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["specdec"], stored["eagle_aux_hidden_state_layer_ids"]
    stored["transformer_layer_config"] |= dict(
        rope_theta=stored["transformer_layer_config"].pop("rope_parameters")["rope_theta"]
    )
    (tmp_path / "config.json").write_text(json.dumps(stored))
    save_file(
        load_file(tmp_path / "model.safetensors") | {"verifier_norm.weight": torch.ones(32)},
        tmp_path / "model.safetensors",
    )
    # (2, 5 // 2, 5 - 3): what the format says goes wrong for five layers
    with pytest.raises(ModelError, match="rising"): load_head(tmp_path, target)
    deep = copy.copy(target)
    deep.config = copy.deepcopy(target.config)
    deep.config.num_hidden_layers = 8
    assert load_head(tmp_path, deep).config.layers == (2, 4, 5)


def stored_as(folder, target, head, decoder=None, **changes):
    "A head's folder with other entries in its config.json."
    save_head(head, folder, target)
    stored = json.loads((folder / "config.json").read_text())
    stored["transformer_layer_config"] |= decoder or {}
    (folder / "config.json").write_text(json.dumps(stored | changes))
    return folder


@pytest.mark.parametrize("layers", [(1, 3, 4), (1, 3, 5), (0, 5)])
def test_hidden_states_named_in_any_order_are_read_from_below_the_last_one_before_its_norm(target, tmp_path, layers):
    "As vLLM hands them out, for training and for serving: it sorts them, and counts before the final norm."
    head = random_head(target, layers=layers)
    for named in (layers, layers[::-1]):
        stored_as(tmp_path, target, head, eagle_aux_hidden_state_layer_ids=named)
        again = load_head(tmp_path, target)
        assert again.config.layers == layers == HeadDrafter(again, target).layers
    text = torch.randint(V, (1, 9))
    logits, states = target.forward(text, layers=layers)
    for i, state in zip(layers, states.chunk(len(layers), -1)):
        assert torch.equal(state, target.forward(text, layers=(i,))[1])
        if i < 5: continue
        assert difference(target.head(rms_norm(state, target.norm, target.config.rms_norm_eps)), logits) < 1e-6
    found = specdec.Pair(target, load_drafter(tmp_path, target)).generate([1, 2, 3], K=3, max_new_tokens=20)
    plain = specdec.Pair(target, NoDrafter()).generate([1, 2, 3], max_new_tokens=20)
    assert found.generated_ids == plain.generated_ids and found.num_drafted > 0


def test_the_last_state_of_a_wrapped_target_is_refused(folder, target, tmp_path):
    save_head(random_head(target, layers=(1, 3, 5)), tmp_path, target)
    wrapped = TransformersLM(load_transformers(folder, CPU, torch.float32))
    with pytest.raises(ModelError, match="State 5 comes out of transformers behind the final norm.*specdec computes"):
        load_head(tmp_path, wrapped)
    save_head(random_head(target, layers=(1, 3, 4)), tmp_path, target)
    assert load_head(tmp_path, wrapped).config.layers == (1, 3, 4)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_layers_with_a_window_are_read_and_saved(target, tmp_path, kind):
    window = dict(model_type=kind, layer_types=["sliding_attention", "full_attention"], sliding_window=6,
                  use_sliding_window=True)
    head = random_head(target, num_layers=2)
    if kind == "qwen3":
        sizes = head.config.decoder.to_dict()
        decoder = Qwen3Config(**{key: value for key, value in sizes.items() if key != "model_type"})
        head = share_embedding(Head(replace(head.config, decoder=decoder), DRAFT), target)
    wide = load_head(stored_as(tmp_path / "wide", target, head), target)
    near = load_head(stored_as(tmp_path / "near", target, head, window), target)
    assert layer_windows(wide.config.decoder) == [None, None] and layer_windows(near.config.decoder) == [6, None]
    text = torch.randint(V, (1, 12))
    features = read(target, text, head.config.layers)
    a, b = (share_embedding(each, target)(text, features, 1)[0][0] for each in (wide, near))
    assert difference(a[:6], b[:6]) < 1e-6 and difference(a[6:], b[6:]) > 1e-4
    save_head(near, tmp_path / "again", target)
    assert layer_windows(load_head(tmp_path / "again", target).config.decoder) == [6, None]


def test_a_part_of_each_head_that_the_library_does_not_read(target, tmp_path):
    "Its default rotary embedding turns heads as a whole, whatever the config says beside it; the others don't."
    head = random_head(target)
    part = dict(rope_parameters=head.config.decoder.rope_parameters | dict(partial_rotary_factor=0.5))
    found = load_head(stored_as(tmp_path, target, head, part), target)
    assert torch.equal(found.frequencies, head.frequencies)
    decoder = LlamaConfig(**{**head.config.decoder.to_dict(), **part})
    assert torch.allclose(LlamaRotaryEmbedding(decoder).inv_freq, head.frequencies)


def test_what_a_config_leaves_out_is_the_librarys_default(folder, tmp_path):
    target = random_target(tmp_path / "wide", V=32100)
    head = random_head(target, torch.arange(0, 32000))
    save_head(head, tmp_path, target, K=3)
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["draft_vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    config = load_head(tmp_path, target).config
    assert config.draft_vocab_size == 32000 and config.K == 3
    del stored["speculators_config"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert load_head(tmp_path, target).config.K is None


def test_the_K_of_a_head_is_its_pairs_unless_the_call_says_another(target, tmp_path):
    save_head(random_head(target), tmp_path, target, K=3)
    drafter = load_drafter(tmp_path, target)
    drafter.drafter.stop_below = 0.0
    pair = specdec.Pair(target, drafter)
    how = dict(max_new_tokens=20, ignore_eos=True)
    for result, K in ((pair.generate([1, 2, 3], **how), 3), (pair.generate([1, 2, 3], K=4, **how), 4),
                      (pair.generate([[1, 2, 3]], Options(**how))[0], 3),
                      (specdec.Pair(target, HeadDrafter(random_head(target), target)).generate([1, 2], **how), 5)):
        assert result.settings["K"] == K == max(len(r.drafted) for r in result.rounds)


REMOVED = object()
MISFITS = {  # what differs in config.json, what differs in its decoder's part, and what the error says
    "another kind": (dict(speculators_model_type="mlp"), {}, "no EAGLE-3 head"),
    "no kind": (dict(speculators_model_type=REMOVED), {}, "EAGLE-3 head in its authors' format"),
    "no decoder": (dict(transformer_layer_config=REMOVED), {}, "can't be used"),
    "no vocabulary": (dict(draft_vocab_size=REMOVED), {}, "draft_vocab_size is 32000"),
    "K is a text": (dict(speculators_config=dict(proposal_methods=[dict(speculative_tokens="3")])), {}, "K is '3'"),
    "a window is a text": (
        {}, dict(sliding_window="8", layer_types=["sliding_attention"]), "can't be used"),
    "a state twice": (dict(eagle_aux_hidden_state_layer_ids=[0, 1, 1]), {}, "rising"),
    "half of each head turns": (
        {}, dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4, partial_rotary_factor=0.5)),
        "whole"),
    "vocabulary is a fraction": (dict(draft_vocab_size=10.0), {}, "draft_vocab_size is 10.0"),
    "our own key is a text": (dict(specdec="x"), {}, "can't be used"),
    "layers are letters": (dict(eagle_aux_hidden_state_layer_ids="abc"), {}, "layers is"),
    "layers are fractions": (dict(eagle_aux_hidden_state_layer_ids=[0.5, 1, 2]), {}, "layers is"),
    "an option is a text": (dict(norm_output="no"), {}, "norm_output is 'no'"),
    "a size is a text": ({}, dict(hidden_size="8"), "can't be used"),
    "no attention heads": ({}, dict(num_attention_heads=0), "can't be used"),
    "another vocabulary": ({}, dict(vocab_size=V + 1), "vocabulary of 25"),
    "another width": ({}, dict(hidden_size=64), "hidden size of 64"),
    "another MLP": ({}, dict(intermediate_size=50), "shape"),
    "a layer too many": ({}, dict(num_hidden_layers=2), "no tensor 'layers.1"),
    "another family": ({}, dict(model_type="gpt2"), "kind"),
    "states that the target lacks": (dict(eagle_aux_hidden_state_layer_ids=[0, 1, 9]), {}, "5 layers"),
    "too few states": (dict(eagle_aux_hidden_state_layer_ids=[0, 1]), {}, "shape"),
    "a norm that isn't there": (dict(norm_before_fc=True), {}, "input_norm"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_folders_that_do_not_fit_say_why(target, tmp_path, name):
    save_head(random_head(target), tmp_path, target)
    stored = json.loads((tmp_path / "config.json").read_text())
    config, decoder, words = MISFITS[name]
    stored["transformer_layer_config"] |= decoder
    stored = {key: value for key, value in (stored | config).items() if value is not REMOVED}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ModelError, match=words): load_head(tmp_path, target)


def test_damaged_folders_say_why(target, tmp_path):
    with pytest.raises(ModelError, match="holds no head"): load_head(tmp_path / "nowhere", target)
    save_head(random_head(target), tmp_path, target)
    weights = tmp_path / "model.safetensors"
    whole, tensors = weights.read_bytes(), load_file(weights)
    weights.write_bytes(whole[:-10])
    with pytest.raises(ModelError, match="not a whole safetensors file"): load_head(tmp_path, target)
    for name, replacement, words in [
        ("fc.weight", None, "no tensor 'fc.weight'"), ("extra", torch.ones(2), "'extra'"),
        ("t2d", tensors["t2d"].flip(0), "contradict"), ("d2t", tensors["d2t"].flip(0), "rising"),
    ]:
        changed = {**tensors, name: replacement}
        save_file({n: t.contiguous() for n, t in changed.items() if t is not None}, weights)
        with pytest.raises(ModelError, match=words): load_head(tmp_path, target)
    weights.unlink()
    with pytest.raises(ModelError, match="weights are missing"): load_head(tmp_path, target)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="can't be read"): load_head(tmp_path, target)
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="Nothing was written"):
        save_head(random_head(target), tmp_path / "file" / "head", target)


def test_a_head_knows_its_targets_weights(target, tmp_path):
    mine, other = copy.copy(target), copy.copy(target)
    mine.digest, other.digest = "a" * 64, "b" * 64
    save_head(random_head(target), tmp_path, mine)
    assert json.loads((tmp_path / "config.json").read_text())["specdec"] == dict(target_digest="a" * 64)
    load_head(tmp_path, mine)
    load_head(tmp_path, target)  # a target that doesn't know its digest isn't asked
    with pytest.raises(ModelError, match="other weights"): load_head(tmp_path, other)


def test_a_head_is_not_saved_for_another_target(target, tmp_path):
    other = random_target(
        tmp_path / "other", V=3, depth=3, hidden_size=8, intermediate_size=8, num_attention_heads=2,
        num_key_value_heads=1,
    )
    with pytest.raises(ModelError, match="vocabulary of 24"): save_head(random_head(target), tmp_path / "never", other)
    assert not (tmp_path / "never").exists()


def test_the_command_for_vllm_can_be_parsed():
    command = shlex.split(vllm_command("my head", "somebody/something", K=3))
    assert command[:3] == ["vllm", "serve", "somebody/something"] and command[3] == "--speculative-config"
    assert json.loads(command[4]) == dict(model="my head", num_speculative_tokens=3, method="eagle3")

# the real library
ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("SPECULATORS_ENV", ROOT / "build" / "speculators"))


def agreeing(comparisons):
    "Four steps of a head; four or five rows of a block, and its confidence."
    return [max(line["differences"]) < 1e-5 and 4 <= len(line["differences"]) <= 6 for line in comparisons]


def test_the_recorded_comparison_with_speculators():
    "What tools/speculators.py measured when it was last run."
    data = json.loads((ROOT / "nbs" / "data" / "speculators.json").read_text())
    assert {line["direction"] for line in data["comparisons"]} == {
        "ours, loaded by speculators", "theirs, loaded by us", "ours, against another head",
        "ours, its bias a place off",
    }
    assert agreeing(data["comparisons"]) == [line["case"] != "negative control" for line in data["comparisons"]]


@pytest.mark.skipif(
    not (ENVIRONMENT / "complete").exists(),
    reason=(
        "the speculators library has an environment of its own: `python tools/speculators.py build/speculators` makes"
        " it (or SPECULATORS_ENV names it)"
    ),
)
def test_against_the_speculators_library():
    spec = importlib.util.spec_from_file_location("tools_speculators", ROOT / "tools" / "speculators.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    comparisons = tool.compare(tool.environment(ENVIRONMENT), length=24)["comparisons"]
    assert agreeing(comparisons) == [line["case"] != "negative control" for line in comparisons]


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, None, 2 ** 50], ids=repr)
@pytest.mark.parametrize("name", ["num_key_value_heads", "num_attention_heads", "hidden_size", "rope_theta"])
def test_a_head_with_a_damaged_config_is_refused(target, tmp_path, name, wrong):
    save_head(random_head(target), tmp_path, target, verifier="somebody/something")
    config = json.loads((tmp_path / "config.json").read_text())
    decoder = config["transformer_layer_config"]
    if name == "rope_theta" and wrong in (1.5, 2 ** 50) and wrong is not True: pytest.skip("an angle like any other")
    if name == "num_key_value_heads" and wrong is None: pytest.skip("as many as heads, transformers says")
    (decoder["rope_parameters"] if name == "rope_theta" else decoder)[name] = wrong
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError): load_head(tmp_path, target)
