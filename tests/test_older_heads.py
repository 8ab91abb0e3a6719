"""A head as EAGLE's authors store one, and what is no model for other reasons: one sentence from every door, with the
command that helps."""
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import specdec
from helpers_drafters import CPU, DRAFT, random_head, random_target
from helpers_hub import tokenizer
from specdec.app import cli
from specdec.drafters.head import load_head, save_head
from specdec.drafters.load import find_drafter, load_drafter, shipped
from specdec.errors import InputError, ModelError
from specdec.models.hub import older_head
from specdec.models.loading import load, load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    random_target(folder)
    tokenizer("gpt2").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(folder):
    model = load_model(folder, CPU, torch.float32)
    model.name = str(folder)
    return model


def save_older(head, folder: Path, version: int, pickled: bool) -> Path:
    "A head in its authors' format: EAGLE-3's layer is called midlayer, that of EAGLE layers.0; sizes in a flat config."
    layer = head.config.decoder.to_dict()
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
             "rms_norm_eps", "hidden_act", "vocab_size", "max_position_embeddings")
    config = {name: layer[name] for name in names} | dict(
        architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=1, torch_dtype="float32",
        rope_theta=layer["rope_parameters"]["rope_theta"])
    if version == 3: config |= dict(
        architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=head.config.draft_vocab_size)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name.replace("layers.0.", "midlayer.") if version == 3 else name: tensor.clone()
               for name, tensor in head.state_dict().items() if version == 3 or "2" not in name}
    if pickled: torch.save(weights, folder / "pytorch_model.bin")
    else: save_file(weights, folder / "model.safetensors")
    return folder


DOORS = {
    "load_drafter": lambda head, folder, target: load_drafter(head, target),
    "load_head": lambda head, folder, target: load_head(head, target),
    "load": lambda head, folder, target: load(str(head), "cpu", "float32"),
    "Pair(draft=…)": lambda head, folder, target: specdec.Pair(target, draft=str(head)),
    "load_pair": lambda head, folder, target: specdec.load_pair("smollm2", "cpu", drafter=head, target=target),
    "a configuration's drafter": lambda head, folder, target: from_config("drafter", head, folder),
    "a configuration's draft": lambda head, folder, target: from_config("draft", head, folder),
    "--drafter": lambda head, folder, target: by_command(["--target", str(folder), "--drafter", str(head)]),
    "--draft": lambda head, folder, target: by_command(["--target", str(folder), "--draft", str(head)]),
}


def from_config(key: str, head: Path, folder: Path):
    (head.parent / "a.yaml").write_text(f"pair: {{target: {folder}, {key}: {head}}}\n")
    return specdec.Pair.from_config(head.parent / "a.yaml")


def by_command(words):
    "Raises with what the command line says, and ends as it ends."
    done = CliRunner().invoke(cli.app, ["generate", "w1", "--raw", "--device", "cpu", "--dtype", "float32", *words])
    assert done.exit_code == cli.ExitCode.BAD_INPUT and done.stdout == ""
    raise ModelError(done.stderr.removeprefix("Error: ").strip())


@pytest.mark.parametrize("pickled", [True, False], ids=["pickled", "safetensors"])
@pytest.mark.parametrize("version", [3, 1], ids=["EAGLE-3", "EAGLE"])
@pytest.mark.parametrize("door", DOORS)
def test_an_older_head_gets_one_sentence_and_the_command_from_every_door(
        door, version, pickled, folder, target, tmp_path):
    head = save_older(random_head(target), tmp_path / "head", version, pickled)
    with pytest.raises(ModelError) as caught: DOORS[door](head, folder, target)
    said = str(caught.value)
    command = {3: rf"`speculators convert {head} --algorithm eagle3 --verifier \S+ --output-path converted`",
               1: r"`specdec distill --target \S+ --out FOLDER`"}[version]
    read = f"{tmp_path / 'a.yaml'}: " if door.startswith("a configuration's") else ""  # the file in which it is named
    assert said.startswith(f"{read}{head} is ") and re.search(command, said) and said.count(". ") == 0, said
    if door in ("load_drafter", "load_head", "Pair(draft=…)", "load_pair", "a configuration's drafter", "--drafter"):
        assert door == "load_head" or str(folder) in said


def test_only_a_head_is_taken_for_one(folder, target, tmp_path):
    save_head(random_head(target), tmp_path / "head", target)
    for other in (folder, tmp_path / "head", tmp_path, shipped("smollm2-head"), shipped("smollm2-draft")):
        assert older_head(other) is None, other
    names = tmp_path / "gpt2"  # whose c_fc.weight ends so, too
    names.mkdir()
    (names / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    torch.save({"h.0.mlp.c_fc.weight": torch.zeros(2)}, names / "pytorch_model.bin")
    save_file({"h.0.mlp.c_fc.weight": torch.zeros(2)}, names / "model.safetensors")
    assert older_head(names) is None
    for damaged in ("", "[]", "{", "\xff"):
        (names / "config.json").write_text(damaged, encoding="latin-1")
        assert older_head(names) is None


def test_a_head_is_known_by_its_config_alone(tmp_path):
    "As of one on the hub, of which only the config.json is there yet."
    for words, version in ((dict(architectures=["LlamaForCausalLMEagle3"]), 3), (dict(draft_vocab_size=32000), 3),
                           (dict(model_type="eagle", architectures=["EAGLEModel"]), 1),
                           (dict(model_type="llama"), None)):
        (tmp_path / "config.json").write_text(json.dumps(words))
        assert older_head(tmp_path) == version, words


def test_a_head_of_today_is_no_model(target, tmp_path):
    save_head(random_head(target), tmp_path / "head", target)
    with pytest.raises(ModelError, match="it is a head, .*load_drafter.*--drafter"): load(str(tmp_path / "head"), "cpu")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("speculators") is None, reason="needs pip install speculators")
def test_the_command_that_is_said_makes_a_drafter(tmp_path):
    target = random_target(tmp_path / "target", depth=8)  # layers 2, 4, 5: the default of the format
    target.name = str(tmp_path / "target")
    head = save_older(random_head(target, layers=(2, 4, 5)), tmp_path / "head", 3, pickled=True)
    with pytest.raises(ModelError) as caught: load_drafter(head, target)
    command = shlex.split(re.search("`(.*?)`", str(caught.value))[1])
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    drafter = load_drafter(find_drafter(tmp_path / "converted"), target)
    found = specdec.Pair(target, drafter).generate([1, 2, 3], K=3, max_new_tokens=8)
    plain = specdec.Pair(target, drafter).generate([1, 2, 3], method="plain", max_new_tokens=8)
    assert found.generated_ids == plain.generated_ids and found.num_drafted > 0
    assert load_head(tmp_path / "converted", target).config.draft_vocab_size == len(DRAFT)


# What a pair is given

def test_a_name_or_a_state_is_no_draft(target):
    with pytest.raises(InputError, match=r"load\(name\) loads a model, load_drafter\(folder.*load_pair\(name\)"):
        specdec.Pair(target, "smollm2")
    with pytest.raises(InputError, match=r"load\(name\) loads a model by its name, load_pair\(name\) a whole pair"):
        specdec.Pair("smollm2")
    state = specdec.Pair(target, target).drafter.start([1, 2], None, 20)
    with pytest.raises(InputError, match="ModelState drafts for one sequence: give the drafter that started it"):
        specdec.Pair(target, state)
