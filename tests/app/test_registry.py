"""The registry: what is said of a pair holds, and every pair loads and decodes, by the code that loads the real ones,
from a hub on this machine with tiny random models of the same architectures and vocabularies."""
import copy
import json

import pytest
import torch
from typer.testing import CliRunner

from helpers import tiny
from helpers_hub import hub, tiny_copy
from specdec.app.cli import app
from specdec.app.config import Config, Decoding, PairSection, config_schema, save_config
from specdec.app.registry import (
    _SHAPE_ONLY,
    MODELS,
    PAIRS,
    PairSpec,
    Shape,
    SlowerWarning,
    get_pair,
    head_parameters,
    known_about,
    list_pairs,
    memory_mb,
    page,
    too_large,
    weights_mb,
)
from specdec.drafters.head import init_from_target, save_head
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.lookup import NGramDrafter, SuffixDrafter
from specdec.engine.lossy import LossyLenience
from specdec.errors import InputError, ModelError
from specdec.models.loading import load, load_model, memory_needed
from specdec.pair import Pair, load_pair
from specdec.verify import greedy_match

ON_THE_HUB = {name: spec for name, spec in PAIRS.items() if spec.target != "smollm2"}


# What is said

def counted(shape: Shape) -> int:
    "Parameters of the model that transformers builds for these sizes, without any numbers in it."
    from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.for_model(
        shape.family, vocab_size=shape.vocab_size, hidden_size=shape.hidden, intermediate_size=shape.inside,
        num_hidden_layers=2, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, tie_word_embeddings=shape.tied, pad_token_id=0)
    with torch.device("meta"): model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_shape_gives_the_parameters(name):
    shape = MODELS[name].shape
    two = Shape(**{**vars(shape), "layers": 2})  # the others are all alike
    assert two.parameters == counted(two)
    a_layer = (two.parameters - Shape(**{**vars(shape), "layers": 1}).parameters)
    assert shape.parameters == two.parameters + (shape.layers - 2) * a_layer


@pytest.mark.parametrize("name, parameters", [  # as the models' pages have them
    ("openai-community/gpt2", 124_439_808), ("openai-community/gpt2-xl", 1_557_611_200),
    ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1_100_048_384), ("microsoft/Phi-3-mini-4k-instruct", 3_821_079_552),
    ("meta-llama/Meta-Llama-3-8B-Instruct", 8_030_261_248), ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
    ("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824), ("meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496),
    ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768), ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
    ("Qwen/Qwen3-8B", 8_190_735_360), ("Qwen/Qwen3-32B", 32_762_123_264),
    ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008), ("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1_711_376_384),
])
def test_published_parameters(name, parameters): assert MODELS[name].shape.parameters == parameters


def test_registry():
    assert {
        "smollm2", "smollm2-skip", "gpt2_dev", "tinyllama_llama3", "phi3_llama3", "llama3_self", "llama3.1", "llama3.2",
        "qwen2.5", "qwen3", "smollm2-360m", "smollm2-1.7b", "llama3.1-eagle3", "qwen3-eagle3",
    } <= list_pairs().keys()
    assert all(isinstance(spec, PairSpec) and spec.note and spec.tested for spec in list_pairs().values())
    assert next(iter(list_pairs())) == "smollm2"
    list_pairs().clear()
    assert list_pairs() == PAIRS


def test_nothing_is_said_to_be_tested_that_was_not():
    assert all(spec.tested == _SHAPE_ONLY for spec in ON_THE_HUB.values())


@pytest.mark.parametrize("wrong, near", [("smolm2", "smollm2"), ("gpt2-dev", "gpt2_dev"), ("@", "smollm2"),
                                         ("qwen-3", "qwen3"), (None, "by its name"), (5, "by its name")])
def test_a_name_that_is_none(wrong, near):
    for look_up in (get_pair, load_pair):
        with pytest.raises(InputError, match=near): look_up(wrong)


def test_four_pairs_by_their_users_names():
    tiny, phi, own, gpt2 = map(get_pair, ("tinyllama_llama3", "phi3_llama3", "llama3_self", "gpt2_dev"))
    llama = "meta-llama/Meta-Llama-3-8B-Instruct"
    assert tiny.target == phi.target == own.target == own.draft == llama and own.draft_dtype == "int4"
    assert tiny.translates and phi.translates and not own.translates and not gpt2.translates
    assert own.drafts == "itself in int4"
    for spec in (tiny, phi, own): assert spec.to_ask_for == {llama: f"https://huggingface.co/{llama}"}
    assert gpt2.to_ask_for == {}


def test_only_what_translates_has_two_vocabularies():
    assert {name for name, spec in PAIRS.items() if spec.translates} == {"tinyllama_llama3", "phi3_llama3"}


def test_names_of_other_registries():
    spec = get_pair("gpt2_dev")
    assert (spec.target_model_id, spec.draft_model_id) == ("openai-community/gpt2-xl", "openai-community/gpt2")
    assert get_pair("smollm2").draft_model_id is None


def test_parameters_add_up():
    "Two models do, also one model twice; layers that are left out are the target's own."
    def numbers(name): return known_about(get_pair(name))["parameters"]
    llama = MODELS["meta-llama/Meta-Llama-3-8B-Instruct"].shape.parameters
    assert numbers("llama3_self") == dict(target=llama, draft=llama, total=2 * llama)
    gpt2, skip = numbers("gpt2_dev"), numbers("smollm2-skip")
    assert gpt2["total"] == gpt2["target"] + gpt2["draft"] and skip["total"] == skip["target"] > skip["draft"] > 0


def test_memory_by_dtype():
    shape = MODELS["meta-llama/Meta-Llama-3-8B-Instruct"].shape
    assert weights_mb(shape, "float32") == 2 * weights_mb(shape, "bfloat16") == 4 * shape.parameters / 1e6
    assert 0.3 < weights_mb(shape, "int4") / weights_mb(shape, "bfloat16") < 0.4
    own = memory_mb(get_pair("llama3_self"), "bfloat16")
    assert own == dict(target=weights_mb(shape, "bfloat16"), draft=weights_mb(shape, "int4"),
                       total=weights_mb(shape, "bfloat16") + weights_mb(shape, "int4"))
    head = memory_mb(get_pair("llama3.1-eagle3"), "bfloat16")
    assert head["draft"] == 2 * head_parameters(shape) / 1e6 < 1000 < head["target"]
    assert memory_mb(get_pair("gpt2_dev"), "int4") is None  # transformers computes it, and has no int4 here
    assert memory_mb(PairSpec("a/b"), "bfloat16") is None and memory_mb(get_pair("smollm2"), "float32")["draft"] == 0
    assert .23 < weights_mb(shape, "int8") / weights_mb(shape, "float32") < .24  # the way in stays in its file
    with pytest.raises(InputError, match="int8 or int4"): weights_mb(shape, "int3")


@pytest.mark.parametrize("name", PAIRS)
def test_facts_are_plain_data(name):
    facts = known_about(get_pair(name))
    assert json.loads(json.dumps(facts)) | dict(skip=()) == facts | dict(skip=())
    own = get_pair(name).own_dtype
    assert facts["parameters"]["target"] > 1e8 and set(facts["memory_mb"]) == {"float32", "bfloat16", "int4", own}
    assert facts["licences"][get_pair(name).target] in (
        "apache-2.0", "mit", "llama3", "llama3.1", "llama3.2", "llama3.3")
    assert all("meta-llama/" in model and address == page(model) for model, address in facts["to_ask_for"].items())


def test_a_pair_of_ones_own():
    facts = known_about(PairSpec("my/model", "my/draft"))
    assert facts["parameters"] == dict(target=None, draft=None, total=None) and facts["memory_mb"]["int4"] is None
    assert facts["licences"] == {} and facts["to_ask_for"] == {} and not facts["translates"]


@pytest.mark.parametrize(
    "draft, target, words",
    [
        (1, 1, ""), (1, 2, ""), (101, 100, ""), (6, 5, "1.2 times"), (3, 2, "1.5 times"), (80, 1, "80.0 times"),
        (5, 0, ""),
    ],
)
def test_a_draft_that_is_too_large(draft, target, words):
    said = too_large(draft, target, 5)
    assert words in said and bool(said) == bool(words)
    if words == "1.5 times": assert f"{6 / 8.5:.2f} times the plain speed" in said and f"{1 / 8.5:.2f} if none" in said


# What loads

def made_of(name: str) -> tuple:
    "What decides how a pair loads; pairs with the same are loaded by the same code."
    spec = PAIRS[name]
    cards = [MODELS.get(model) for model in (spec.target, spec.draft)]
    parts = [card and (card.shape.family, card.shape.vocab_size, card.shape.tied, card.vocabulary) for card in cards]
    return (*parts, spec.drafter is not None, spec.draft_dtype)


LOADED = list({made_of(name): name for name in reversed(ON_THE_HUB)}.values())[::-1]
DEPTH = 8  # layers of a target with a head: the format's own choice of features needs so many


def published_head(target, folder) -> None:
    "A head as published ones are: of the first version of the format, which names no layers."
    L, tokens = DEPTH, torch.arange(0, target.vocab_size, 400)
    head = init_from_target(target, tokens, layers=(2, L // 2, L - 3))
    save_head(head, folder, target, verifier="org/name")
    stored = json.loads((folder / "config.json").read_text())
    for key in ("specdec", "eagle_aux_hidden_state_layer_ids", "norm_before_fc", "fc_norm", "norm_output",
                "embed_requires_grad", "tie_word_embeddings", "dtype"):
        del stored[key]
    layer = stored["transformer_layer_config"]
    layer |= dict(rope_theta=layer.pop("rope_parameters")["rope_theta"], rope_scaling=None, pretraining_tp=1)
    stored |= dict(architectures=["Eagle3Speculator"], auto_map={"": "eagle3.Eagle3SpeculatorConfig"},
                   has_no_defaults_at_init=False, speculators_version="0.1.0.dev14", torch_dtype="float32",
                   target_hidden_size=None, transformers_version="4.53.2")
    (folder / "config.json").write_text(json.dumps(stored))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    "A hub with all models and heads that the registry names; those with the same architecture and size share a folder."
    folder, made = tmp_path_factory.mktemp("hub"), {}
    with pytest.MonkeyPatch.context() as patch, hub(patch, tmp_path_factory.mktemp("cache")) as server:
        server.gated = set()
        heads = {spec.target for spec in ON_THE_HUB.values() if spec.drafter}
        for name, card in MODELS.items():
            if name == "smollm2": continue
            shape = card.shape
            key = (shape.family, shape.vocab_size, shape.tied, card.vocabulary, name in heads)
            if key not in made:
                made[key] = tiny_copy(card, folder / str(len(made)), DEPTH if name in heads else 2, seed=len(made))
            server.folders[name] = made[key]
        for spec in ON_THE_HUB.values():
            if not spec.drafter: continue
            of = server.folders[spec.target].with_name(f"{server.folders[spec.target].name}-head")
            if not of.exists():
                target = load_model(server.folders[spec.target], torch.device("cpu"), torch.float32)
                published_head(target, of)
            server.folders[spec.drafter] = of
        yield server


def test_every_pair_is_like_one_that_is_loaded():
    assert {made_of(name) for name in ON_THE_HUB} == {made_of(name) for name in LOADED}


@pytest.mark.parametrize("name", LOADED)
def test_a_registered_pair_loads_and_decodes(name, server):
    """From its names, through the hub's own client, to text; greedily the target's own."""
    spec = get_pair(name)
    pair = load_pair(name, "cpu", "float32")
    assert pair.target.name == spec.target and pair.target.vocab_size == MODELS[spec.target].shape.vocab_size
    assert pair.origin.name == name
    prompt = "a bad cab"
    speculative, plain = (pair.generate(prompt, K=spec.K, max_new_tokens=8, method=m) for m in ("speculative", "plain"))
    assert speculative.generated_ids == plain.generated_ids and len(plain.generated_ids) == 8
    assert speculative.num_drafted > 0
    if spec.drafter: assert type(pair.drafter.drafter) is HeadDrafter
    if spec.draft_dtype: assert pair.drafter.model.precision == spec.draft_dtype and pair.target.precision == "float32"


def test_what_is_gated_says_where_to_ask(server, monkeypatch):
    "Before the other model is fetched, whichever of the two it is."
    ask = "it is gated. Ask for access at https://huggingface.co/{}, then log in"
    for name, gated in [("llama3_self", "meta-llama/Meta-Llama-3-8B-Instruct"), ("qwen3", "Qwen/Qwen3-0.6B"),
                        ("qwen3-eagle3", "RedHatAI/Qwen3-8B-speculator.eagle3")]:
        monkeypatch.setattr(server, "gated", {gated})
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", f"/nowhere/{name}")
        server.asked.clear()
        with pytest.raises(ModelError, match=ask.format(gated)): load_pair(name, "cpu", "float32")
        assert not any("Qwen3-8B/" in path and path.endswith(".safetensors") for path in server.asked)
        with pytest.raises(ModelError, match=ask.format(gated)): load(gated, "cpu", "float32")


@pytest.mark.parametrize("name", ["nobody/nothing", "RedHatAI/nothing"])
def test_what_is_not_on_the_hub_is_noticed_first(name, server):
    server.asked.clear()
    with pytest.raises(ModelError, match="check the name"): load_pair("qwen3", "cpu", "float32", drafter=name)
    assert not any("Qwen3-8B" in path for path in server.asked)
    with pytest.raises(InputError, match="no trained drafter"): load_pair("qwen3", "cpu", drafter="nothing")


def test_a_head_of_the_hub_for_another_pair(server):
    "The drafter of one pair, given by name to another of the same target; and to one that it doesn't fit."
    pair = load_pair("llama3.1", "cpu", "float32", drafter="RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3")
    assert type(pair.drafter.drafter) is HeadDrafter and pair.to_config().pair.drafter.startswith("RedHatAI/")
    with pytest.raises(ModelError, match="made for a target"):
        load_pair("gpt2_dev", "cpu", "float32", drafter="RedHatAI/Qwen3-8B-speculator.eagle3")


def test_plainly_nothing_of_the_draft_is_fetched(server, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    server.asked.clear()
    for name in ("smollm2-360m", "qwen3-eagle3"):
        load_pair(name, "cpu", "float32", method="plain").generate("a bad cab", max_new_tokens=2, method="plain")
    assert not any("135M" in path or "speculator" in path for path in server.asked)


def test_two_that_do_not_fit_together_are_refused_with_the_numbers(server, monkeypatch):
    "Each would fit alone. Before anything but the configs is fetched."
    target, draft = (memory_needed(name, "cpu", "float32", use).total_mb for name, use in (
        ("Qwen/Qwen3-8B", "target"), ("Qwen/Qwen3-0.6B", "draft")))
    between = max(target, draft) + min(target, draft) / 2
    monkeypatch.setattr("specdec.pair.memory_free_mb", lambda place: between)
    monkeypatch.setattr("specdec.pair.load", None)
    numbers = f"about {target:,.0f} and {draft:,.0f} MB, and {between:,.0f} MB are free on cpu"
    with pytest.raises(ModelError, match=numbers): load_pair("qwen3", "cpu", "float32")
    monkeypatch.setattr("specdec.pair.memory_free_mb", lambda place: target + draft + 1)
    with pytest.raises(TypeError): load_pair("qwen3", "cpu", "float32")  # it goes on to load


def test_a_draft_that_is_larger_is_warned_of(server, small):
    with pytest.warns(SlowerWarning, match="times the parameters of the target") as seen:
        pair = Pair(small.target, tiny(vocab=small.target.vocab_size, hidden=64))
    assert [record.filename for record in seen] == [__file__]  # where the pair is made
    assert pair.generate([5, 6], max_new_tokens=4).num_tokens == 4


# In a file

SMALL = "smollm2-360m"


@pytest.fixture(scope="module")
def small(server): return load_pair(SMALL, "cpu", "float32")


@pytest.mark.parametrize("name, K", [(SMALL, 2), (SMALL, "adaptive"), ("qwen3-eagle3", 2)])
def test_a_pair_in_a_file_gives_the_same_tokens(name, K, server, tmp_path):
    pair = load_pair(name, "cpu", "float32")
    result = pair.generate("a bad cab", K=K, temperature=1.0, top_k=50, max_new_tokens=12, stop=["<zz>"])
    save_config(pair.to_config(**result.settings), tmp_path / "a.toml")
    again = Pair.from_config(tmp_path / "a.toml")
    assert again.generate("a bad cab").generated_ids == result.generated_ids
    assert again.generate("a bad cab", max_new_tokens=3).num_tokens == 3
    other = again.to_config(seed=7).decoding
    assert (other.seed, other.draft_tokens, other.top_k) == (7, K, 50)


def test_a_pair_by_its_parts_is_the_registered_one(small, tmp_path):
    target, draft = get_pair(SMALL).target, get_pair(SMALL).draft
    text = f"pair: {{target: {target}, draft: {draft}, device: cpu, dtype: float32}}"
    (tmp_path / "a.yaml").write_text(text)
    parts = Pair.from_config(tmp_path / "a.yaml")
    assert parts.generate("a", max_new_tokens=5).generated_ids == small.generate("a", max_new_tokens=5).generated_ids
    assert parts.drafter.model.name == draft
    by_hand = Pair(small.target, small.drafter.model).to_config().pair
    assert (by_hand.name, by_hand.target, by_hand.draft) == (None, target, draft)
    assert by_hand.dtype == "float32" and by_hand.draft_dtype is None


def test_what_has_no_name_can_not_be_written_down(small):
    nameless = copy.copy(small.target)
    nameless.name = None
    for pair in (Pair(nameless), Pair(small.target, nameless), Pair(small.target, small.target.skip([1])),
                 Pair(small.target, SuffixDrafter())):
        with pytest.raises(InputError, match="no names"): pair.to_config()
    assert Pair(small.target).to_config().pair.draft is None and not Pair(small.target).to_config().pair.lookup
    assert Pair(small.target, NGramDrafter()).to_config().pair.lookup
    for rule in (greedy_match, "greedy_match"):
        with pytest.raises(InputError, match="can't be kept in a file"): small.to_config(verify=rule)
    with pytest.raises(InputError, match="K_max"): small.to_config(K_max=3)


def test_a_lossy_rule_is_kept_as_what_it_is(small):
    result = small.generate("a bad cab", temperature=1.0, seed=3, max_new_tokens=12, verify=LossyLenience(0.25))
    config = small.to_config(**result.settings)
    assert config.decoding.lenience == 0.25
    again = Pair.from_config(config).generate("a bad cab")
    assert again.generated_ids == result.generated_ids and again.is_lossless is False


def test_a_file_that_decodes_plainly(server):
    config = Config(pair=PairSection(name=SMALL, device="cpu", dtype="float32"), decoding=Decoding(method="plain"))
    server.asked.clear()
    result = Pair.from_config(config).generate("a", max_new_tokens=3)
    assert result.method == "plain" and not any("135M" in path for path in server.asked)


# The commands

def run(*words): return CliRunner().invoke(app, words)


def test_the_list_and_one_of_it():
    listed = run("pairs")
    assert all(name in listed.stdout for name in PAIRS) and listed.exit_code == 0
    assert {name: facts["target"] for name, facts in json.loads(run("pairs", "--json").stdout).items()} == {
        name: spec.target for name, spec in PAIRS.items()
    }
    one = run("pairs", "phi3_llama3").stdout
    for words in (
        "8,030,261,248 parameters", "3,821,079,552 parameters", "23.7 GB", "llama3: ", "mit: ", "1 to start from",
        "at https://huggingface.co/meta-llama/Meta-Llama-3-8B-Instruct", "translated", _SHAPE_ONLY,
    ):
        assert words in one, words
    assert set(json.loads(run("pairs", "phi3_llama3", "--json").stdout)) == {"phi3_llama3"}
    wrong = run("pairs", "phi3")
    assert wrong.exit_code == 2 and "Nearest: phi3_llama3" in wrong.stderr


def test_a_pair_of_ones_own_is_listed(monkeypatch):
    monkeypatch.setitem(PAIRS, "mine", PairSpec("my/model", "my/draft", note="my own"))
    assert "my/draft" in run("pairs").stdout and "my own" in run("pairs", "mine").stdout


def test_generate_takes_a_file(server, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f'[pair]\nname = "{SMALL}"\ndevice = "cpu"\ndtype = "float32"\n'
                    "[decoding]\ntemperature = 1.0\nseed = 4\nmax_new_tokens = 6\ndraft_tokens = 2\n")
    def generated(*more):
        return json.loads(run("generate", "a bad cab", "--raw", "--json", "--config", str(file), *more).stdout)

    first, again = generated(), generated()
    assert first["generated_ids"] == again["generated_ids"]
    assert first["settings"]["K"] == 2 and first["settings"]["seed"] == 4 and len(first["generated_ids"]) == 6
    other = generated("--seed", "5", "-K", "3", "--max-new-tokens", "128", "--temperature", "0", "--method", "plain")
    assert (other["settings"]["seed"], other["settings"]["temperature"], other["method"]) == (5, 0, "plain")
    assert len(other["generated_ids"]) == 128  # an option is given, also where it is the default
    file.write_text(file.read_text().replace("draft_tokens = 2", 'draft_tokens = "adaptive"'))
    assert (generated()["settings"]["K"], generated("-K", "3")["settings"]["K"]) == ("adaptive", 3)


@pytest.mark.parametrize(
    "option", [["--pair", "smollm2"], ["--target", "smollm2"], ["--draft", "lookup"]], ids=" ".join
)
def test_a_file_names_the_pair(option, tmp_path):
    (tmp_path / "a.yaml").write_text("")
    done = run("generate", "a", "--config", str(tmp_path / "a.yaml"), *option)
    assert done.exit_code == 2 and f"{option[0]} can't stand beside --config" in done.stderr


def test_a_wrong_file_is_one_line(tmp_path):
    (tmp_path / "a.yaml").write_text("decoding:\n  temprature: 1\n")
    done = run("generate", "a", "--config", str(tmp_path / "a.yaml"))
    assert done.exit_code == 2 and "line 2: unknown key decoding.temprature: did you mean temperature?" in done.stderr
    assert run("generate", "a", "--config", str(tmp_path / "b.yaml")).exit_code == 2


def test_the_schema_is_printed(): assert json.loads(run("config", "schema").stdout) == config_schema()
