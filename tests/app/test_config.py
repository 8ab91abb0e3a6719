"A pair in a file: both formats, every mistake with its line, and the way back."
import json
import re
import time
from itertools import pairwise

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from helpers import examples, on_a_disk_of
from specdec.app.cli import app
from specdec.app.config import (
    Config,
    Decoding,
    PairSection,
    config_schema,
    config_text,
    read_config,
    save_config,
)
from specdec.bench.grid import read_grid
from specdec.engine.lossy import LossyLenience
from specdec.errors import InputError, ModelError
from specdec.models.files import parse_yaml, toml_lines
from specdec.options import ELSEWHERE, NOTES, meant
from specdec.pair import Pair

FULL = Config(
    pair=PairSection(target="org/large", draft="org/small", draft_dtype="int4", device="cpu", dtype="float32"),
    decoding=Decoding(method="plain", draft_tokens=3, max_new_tokens=9, stop=["\n\n", 'a "b"', "\\n", "\x7f\u2028"],
                      temperature=0.7, top_k=5, top_p=0.9, seed=2**63, lenience=0.5),
)


@pytest.fixture
def file(tmp_path):
    "Writes a file, and gives its path."
    def write(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name
    return write


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".toml"])
@pytest.mark.parametrize("config", [Config(), FULL], ids=["nothing said", "everything said"])
def test_there_and_back(config, suffix, tmp_path):
    save_config(config, tmp_path / f"a{suffix}")
    assert read_config(tmp_path / f"a{suffix}") == config


def test_both_formats_say_the_same(file):
    a = file("a.yaml", config_text(FULL, ".yaml"))
    b = file("b.toml", config_text(FULL, ".toml"))
    assert read_config(a) == read_config(b) == FULL


def test_an_empty_file_is_the_default_pair(file):
    for name in ("a.yaml", "a.toml"): assert read_config(file(name, "")) == Config()
    assert Config().pair.name == "smollm2"


def test_what_the_keys_mean():
    settings = FULL.decoding.settings()
    assert (
        settings["K"] == 3 and settings["verify"] == LossyLenience(0.5) and not settings["verify"].lossless == "always"
    )
    assert "draft_tokens" not in settings and "lenience" not in settings and "verify" not in Decoding().settings()


def test_every_key_is_an_argument_of_generate():
    import inspect

    from specdec.pair import Pair
    arguments = inspect.signature(Pair.generate).parameters
    assert set(FULL.decoding.settings()) <= set(arguments)
    defaults = Decoding().settings()
    for name in set(defaults) - {"stop"}: assert defaults[name] == arguments[name].default, name


def test_as_many_as_pay(tmp_path):
    for suffix in (".yaml", ".toml"):
        save_config(Config(decoding=Decoding(draft_tokens="adaptive")), tmp_path / f"a{suffix}")
        assert read_config(tmp_path / f"a{suffix}").decoding.settings()["K"] == "adaptive"


# Mistakes, with their lines

MISTAKES = {  # YAML, TOML, what the error says (the line in YAML, in TOML)
    "misspelt": (
        "pair:\n  name: smollm2\ndecoding:\n  temprature: 1\n",
        '[pair]\nname = "smollm2"\n\n[decoding]\ntemprature = 1\n',
        "line {}: unknown key decoding.temprature: did you mean temperature", 4, 5,
    ),
    "a value of no kind": (
        "pair:\n  name: smollm2\n  dtype: int5\n", '[pair]\nname = "smollm2"\ndtype = "int5"\n',
        "line {}: pair.dtype: expected auto, float32, .*, int8, int4 or file, not 'int5'; nearest: int8.$",
        3, 3,
    ),
    "a dtype as others write it": (
        "pair: {target: a, draft: b,\n  draft_dtype: bf16}\n",
        '[pair]\ntarget = "a"\ndraft = "b"\ndraft_dtype = "bf16"\n',
        "line {}: pair.draft_dtype: expected .*; nearest: bfloat16", 2, 4,
    ),
    "no such pair": (
        "decoding: {}\npair:\n  name: smolm2\n", '[pair]\nname = "smolm2"\n',
        "line {}: pair.name: No pair 'smolm2'. Nearest: smollm2, ", 3, 2,
    ),
    "no such device": (
        "pair:\n  name: smollm2\n  device: gpu\n", '[pair]\nname = "smollm2"\ndevice = "gpu"\n',
        "line {}: pair.device: expected auto, cpu, cuda, cuda:1, … or mps, not 'gpu'", 3, 3,
    ),
    "no name": ("pair:\n  target: ''\n", '[pair]\ntarget = ""\n', "line {}: pair.target: a name is not empty", 2, 2),
    "a layer below the first": (
        "pair:\n  target: a\n  skip: [3, -1]\n", '[pair]\ntarget = "a"\nskip = [3, -1]\n',
        "line {}: pair.skip.1 should be greater than or equal to 0, not -1", 3, 3,
    ),
    "stop before nothing": (
        "decoding:\n  stop: [a, '']\n", '[decoding]\nstop = ["a", ""]\n',
        "line {}: decoding.stop.1: a text to stop before is not empty", 2, 2,
    ),
    "infinitely hot": (
        "decoding:\n  temperature: .inf\n", "[decoding]\ntemperature = inf\n",
        "line {}: decoding.temperature should be a finite number", 2, 2,
    ),
    "a seed of 65 bits": (
        f"decoding:\n  seed: {2**64}\n", f"[decoding]\nseed = {2**64}\n", "line {}: decoding.seed should be less",
        2, 2,
    ),
    "another system's, of the other section": (
        "decoding:\n  draft_model_path: a\n", '[decoding]\ndraft_model_path = "a"\n',
        "line {}: unknown key decoding.draft_model_path: here it is draft, in the section pair", 2, 2,
    ),
    "another system's, outside of a section": (
        "main_model: a\n", 'main_model = "a"\n',
        "line {}: unknown key main_model: here it is target, in the section pair", 1, 1,
    ),
    "what is no key here": (
        "decoding:\n  do_sample: yes\n", "[decoding]\ndo_sample = true\n",
        "line {}: unknown key decoding.do_sample: temperature says it: 0 is greedy", 2, 2,
    ),
    "of another system": (
        "decoding:\n  num_speculative_tokens: 5\n", "[decoding]\n\nnum_speculative_tokens = 5\n",
        "line {}: unknown key decoding.num_speculative_tokens: here it is draft_tokens", 2, 3,
    ),
    "one less": (
        "decoding:\n  speculative_num_draft_tokens: 5\n", "[decoding]\nspeculative_num_draft_tokens = 5\n",
        "line {}: .*one less", 2, 2,
    ),
    "in the wrong section": (
        "pair:\n  name: smollm2\n  seed: 3\n", '[pair]\nname = "smollm2"\nseed = 3\n',
        "line {}: seed belongs into the section decoding", 3, 3,
    ),
    "outside of a section": ("seed: 3\n", "seed = 3\n", "line {}: seed belongs into the section decoding", 1, 1),
    "unknown section": ("drafter: {}\ncolours: 5\n", "colours = 5\n[drafter]\n", "unknown key colours", 2, 1),
    "no number": (
        "decoding:\n  top_p: 0.9\n  temperature: hot\n", '[decoding]\ntop_p = 0.9\ntemperature = "hot"\n',
        "line {}: decoding.temperature should be a valid number, not 'hot'", 3, 3,
    ),
    "a number in quotes": (
        "decoding:\n  draft_tokens: '5'\n", '[decoding]\ndraft_tokens = "5"\n',
        "line {}: decoding.draft_tokens: expected a whole number of at least 1, or adaptive, not '5'", 2, 2,
    ),
    "out of range": (
        "decoding:\n  draft_tokens: 0\n", "[decoding]\ndraft_tokens = 0\n",
        "line {}: decoding.draft_tokens: expected a whole number of at least 1, or adaptive, not 0", 2, 2,
    ),
    "a yes that is a truth": ("decoding:\n  seed: yes\n", "[decoding]\nseed = true\n", "line {}: decoding.seed", 2, 2),
    "a word for a list": (
        "decoding:\n  stop: END\n", '[decoding]\nstop = "END"\n', "line {}: decoding.stop should be", 2, 2,
    ),
    "a number in a list": (
        "decoding:\n  stop: [a, 5]\n", '[decoding]\nstop = ["a", 5]\n', "line {}: decoding.stop.1", 2, 2,
    ),
    "no such method": (
        "decoding:\n  method: fast\n", '[decoding]\nmethod = "fast"\n', "'speculative' or 'plain'", 2, 2,
    ),
    "two pairs": (
        "pair:\n  name: smollm2\n  target: gpt2\n", '[pair]\nname = "smollm2"\ntarget = "gpt2"\n',
        "line {}: pair: give either the name", 1, 1,
    ),
    "no pair": ("pair:\n  device: cpu\n", '\n[pair]\ndevice = "cpu"\n', "line {}: pair: give either the name", 1, 2),
    "a name and its parts": (
        "pair:\n  name: smollm2\n  draft: gpt2\n", '[pair]\nname = "smollm2"\ndraft = "gpt2"\n',
        "has its parts already", 1, 1,
    ),
    "two drafters": (
        "pair: {target: a, draft: b, drafter: c}\n", 'pair = {target="a", draft="b", drafter="c"}\n',
        "line {}: .*give one", 1, 1,
    ),
    "lookup beside a model": (
        "pair: {target: a, draft: b, lookup: true}\n", 'pair = {target="a", draft="b", lookup=true}\n',
        "beside a trained drafter", 1, 1,
    ),
    "the dtype of nothing": (
        "pair: {target: a, draft_dtype: int4}\n", 'pair = {target="a", draft_dtype="int4"}\n', "needs a draft", 1, 1,
    ),
    "no section": (
        "pair: smollm2\n", 'pair = "smollm2"\n', "line {}: pair is a section, which holds name, .* not 'smollm2'", 1, 1,
    ),
    "in no section": (
        "tempurature: 1\n", "tempurature = 1\n", "line {}: .* temperature, in the section decoding", 1, 1,
    ),
    "a list of things": ("- pair\n", "x = [", "expected the keys|end of document", 1, 1),
    "unfinished": ("pair: [\n", "[pair\n", "line [12]|end of document", 2, 1),
    "twice": ("pair:\n  name: a\n  name: b\n", '[pair]\nname = "a"\nname = "b"\n', "line {}|line 3", 3, 3),
    "code": ("pair: !!python/object/apply:os.system [ls]\n", "pair = os.system\n", "line {}|could not determine", 1, 1),
}


@pytest.mark.parametrize("suffix", [".yaml", ".toml"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_line(name, suffix, file):
    in_yaml, in_toml, words, yaml_line, toml_line = MISTAKES[name]
    path = file(f"a{suffix}", in_yaml if suffix == ".yaml" else in_toml)
    words = words.format(yaml_line if suffix == ".yaml" else toml_line)
    with pytest.raises(InputError, match=words) as caught: read_config(path)
    assert str(path) in str(caught.value)


def test_a_section_that_is_unknown_is_none_of_the_keys(file):
    "`generate` looks like `temperature`, and it holds keys."
    for text, line in (("pair:\n  name: smollm2\ngenerate:\n  top_k: 2\n", 3), ("decode: {top_k: 2}\n", 1)):
        with pytest.raises(InputError) as caught: read_config(file("a.yaml", text))
        name = text.splitlines()[line - 1].split(":")[0]
        assert str(caught.value).endswith(f"line {line}: unknown section {name}: expected pair or decoding.")
    with pytest.raises(InputError, match="here it is target, in the section pair"):
        read_config(file("a.yaml", "main_model_path: {a: b}\n"))


def test_all_mistakes_at_once(file):
    path = file("a.yaml", "decoding:\n  temprature: 1\n  top_k: 0\nseed: 5\n")
    with pytest.raises(InputError) as caught: read_config(path)
    assert all(f"line {n}: " in str(caught.value) for n in (2, 3, 4))


@pytest.mark.parametrize("name, text, lines", [
    ("yaml", "# pair:\npair:  # here\n  name: |\n    seed: 1\ndecoding: {seed: 1,\n  top_k: 2}\n",
     {("pair",): 2, ("pair", "name"): 3, ("decoding",): 5, ("decoding", "seed"): 5, ("decoding", "top_k"): 6}),
    ("toml", '# seed = 1\n[ pair ]  # here\nname="a"\n"target" = "b"\n\n[decoding]\nstop = [\n "x",\n]\nseed = 1\n',
     {("pair",): 2, ("pair", "name"): 3, ("pair", "target"): 4, ("decoding",): 6, ("decoding", "stop"): 7,
      ("decoding", "seed"): 10}),
    ("toml", "pair.name = 'a'\n", {("pair", "name"): 1}),
], ids=["YAML", "TOML", "dotted"])
def test_where_keys_stand(name, text, lines):
    assert (parse_yaml(text)[1] if name == "yaml" else toml_lines(text)) == lines


def test_files_that_are_none(tmp_path, file):
    for wrong, words in [(tmp_path / "none.yaml", "can't be read"), (tmp_path / "a.json", "yaml, .yml or .toml"),
                         (tmp_path, "yaml, .yml or .toml")]:
        with pytest.raises(InputError, match=words): read_config(wrong)
    with pytest.raises(InputError, match="yaml, .yml or .toml"): save_config(Config(), tmp_path / "a.json")
    path = tmp_path / "latin.toml"
    path.write_bytes(b"# \xe4\n")
    with pytest.raises(InputError, match="can't be read"): read_config(path)


def test_folders_are_taken_from_the_files_own(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "a.yaml"
    path.write_text("pair: {target: ./model, drafter: ../head}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    pair = read_config(path).pair
    assert (pair.target, pair.drafter) == (str(tmp_path / "sub" / "model"), str(tmp_path / "head"))
    path.write_text("pair: {target: org/name, drafter: smollm2-head}\n", encoding="utf-8")
    assert (read_config(path).pair.target, read_config(path).pair.drafter) == ("org/name", "smollm2-head")


# The schema

def test_an_editor_sees_what_we_see():
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(yaml.safe_load(config_text(FULL))) and validator.is_valid({})
    for name in ("misspelt", "no number", "out of range", "no such method", "a word for a list", "no section"):
        assert not validator.is_valid(yaml.safe_load(MISTAKES[name][0])), name
    for length, fits in (("adaptive", True), (1, True), (0, False), ("often", False)):
        assert validator.is_valid({"decoding": {"draft_tokens": length}}) is fits, length
    assert json.loads(json.dumps(schema)) == schema


def test_an_editor_lists_what_a_value_may_be():
    section = config_schema()["$defs"]["PairSection"]["properties"]
    assert section["dtype"]["enum"] == ["auto", "float32", "bfloat16", "float16", "int8", "int4", "file"]
    assert "int4" in section["dtype"]["description"] and section["draft_dtype"]["anyOf"][0]["enum"][-1] == "file"
    validator = jsonschema.Draft202012Validator(config_schema())
    for device, fits in (("auto", True), ("cuda:1", True), ("mps", True), ("gpu", False), ("cuda:", False)):
        assert validator.is_valid({"pair": {"name": "smollm2", "device": device}}) is fits, device


# What others call it

OURS = {*Decoding.model_fields, *PairSection.model_fields}
KEYS = {  # theirs → ours, as somebody who comes from there would type it
    "transformers": dict(num_assistant_tokens="draft_tokens", prompt_lookup_num_tokens="draft_tokens",
                         assistant_model="draft", max_length="max_new_tokens", stop_strings="stop", torch_dtype="dtype",
                         device_map="device", model_name_or_path="target"),
    "vLLM": dict(model="target", speculative_model="draft", num_speculative_tokens="draft_tokens",
                 max_tokens="max_new_tokens"),
    "gpt-fast": dict(checkpoint_path="target", draft_checkpoint_path="draft", speculate_k="draft_tokens"),
    "llama.cpp": {"model_draft": "draft", "--draft-max": "draft_tokens", "n_predict": "max_new_tokens",
                  "temp": "temperature"},
    "SGLang": dict(speculative_draft_model_path="draft", speculative_num_steps="draft_tokens"),
    "a toy engine": dict(num_draft_tokens="draft_tokens", target_model="target", draft_model="draft"),
    "a controller": dict(lookahead="draft_tokens", main_model_path="target", draft_model_path="draft",
                         max_speculative_tokens="draft_tokens"),
    "papers": dict(gamma="draft_tokens", K="draft_tokens"),
    "a library for drafters": dict(verifier="target", speculator="drafter"),
}


@pytest.mark.parametrize("theirs, ours", [pair for names in KEYS.values() for pair in names.items()])
def test_a_key_of_another_system_is_translated_in_either_section(theirs, ours, file):
    home = "pair" if ours in PairSection.model_fields else "decoding"
    pairs = {"pair": "pair:\n  name: smollm2\n  ", "decoding": "decoding:\n  "}
    for section, text in pairs.items():
        with pytest.raises(InputError) as caught: read_config(file("a.yaml", f"{text}{theirs}: 3\n"))
        where = "" if section == home else f", in the section {home}"
        assert str(caught.value).endswith(f"unknown key {section}.{theirs}: here it is {ours}{where}."), caught.value


def test_names_of_others_lead_to_keys_of_ours():
    assert set(ELSEWHERE.values()) <= OURS and not set(ELSEWHERE) & OURS
    assert not set(NOTES) & {*ELSEWHERE, *OURS}


@pytest.mark.parametrize("theirs, words", [
    ("acceptance_threshold", "LossyTypical"), ("use_vllm", "specdec distill"), ("do_sample", "temperature"),
    ("deepspeed_config_path", "accelerate launch"),
])
def test_a_library_for_drafters_has_keys_that_are_none_here(theirs, words, file):
    with pytest.raises(InputError) as caught: read_config(file("a.yaml", f"decoding:\n  {theirs}: 1\n"))
    said = str(caught.value)
    assert f"line 2: unknown key decoding.{theirs}: " in said and words in said and "here it is lenience" not in said


@pytest.mark.parametrize("theirs", NOTES)
def test_what_has_no_key_here_gets_a_sentence_that_names_things_that_exist(theirs):
    said = meant(theirs, list(Decoding.model_fields))
    assert said == NOTES[theirs] and said.endswith(".") and "did you mean" not in said
    options = {*re.findall(r"--([a-z-]+)", said)}
    assert options <= {"prompts", "config", "batch-size"}


def test_a_grid_has_several_of_what_a_configuration_has_one_of(file):
    for theirs, ours in (("num_speculative_tokens", "K"), ("temp", "temperatures"), ("torch_dtype", "dtypes")):
        with pytest.raises(InputError, match=f"line 1: unknown key {theirs}: here it is {ours}"):
            read_grid(file("a.yaml", f"{theirs}: 3\n"))


def test_what_cannot_be_loaded_is_told_with_its_file(file):
    from specdec.pair import Pair
    path = file("a.yaml", "pair:\n  target: no such model\n")
    with pytest.raises(InputError, match="a.yaml: No model 'no such model'"): Pair.from_config(path)


# What a hostile or damaged file may do

def bomb(begin, more):
    "Nine levels, each of which repeats the one before nine times."
    names = "abcdefghij"
    lines = [f"a: &a {begin}"]
    lines += [f"{new}: &{new} {more % ','.join([f'*{old}'] * 9)}" for old, new in pairwise(names)]
    return "\n".join(lines)


HOSTILE = {  # name → (kind, text, words)
    "aliases": ("yaml", bomb("[x]", "[%s]"), "more than 10,000 values"),
    "merges": ("yaml", bomb("{k: 1}", "{<<: [%s]}"), "more than 10,000 values"),
    "itself": ("yaml", "a: &a [*a]", "nested too deeply"), "deep": ("yaml", "a: " + "[" * 5000, "nested too deeply"),
    "deep, in TOML": ("toml", "a = " + "[" * 5000, "nested too deeply"),
    "2 MB": ("yaml", "a: 1\n" * 400_000, "more than 100,000 bytes"),
    "5,000 digits": ("yaml", "decoding:\n  seed: " + "9" * 5000, "line 2: a number of thousands of digits"),
    "5,000 digits, in TOML": ("toml", "[decoding]\nseed = " + "9" * 5000, "line 2: a number of thousands of digits"),
    "hexadecimal": ("toml", "[decoding]\nseed = 0x" + "f" * 5000, "line 2: decoding.seed is a number of hundreds"),
    "NUL": ("yaml", 'pair:\n  target: ".\\0"', "line 2: pair.target: no name holds the character U+0000"),
    "NUL, in TOML": ("toml", '[pair]\ntarget = ".\\u0000"', "line 2: pair.target: no name holds"),
    "no date": ("yaml", "a: 2001-99-99", "a value isn't what its form says"),
    "no integer": ("yaml", "a: !!int ''", "a value isn't what its form says"),
    "a list for a key": ("yaml", "? [a]\n: 1", "line 1: a key is a word"),
    "brackets": ("toml", "a = \'\'\'\n" + "[" * 90_000 + "\n\'\'\'", "unknown key a"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("read", [read_config, read_grid])
def test_a_hostile_file_is_refused_at_once(name, read, file):
    kind, text, words = HOSTILE[name]
    start = time.process_time()
    with pytest.raises(InputError) as caught: read(file(f"a.{kind}", text))
    assert time.process_time() - start < 5 and len(str(caught.value)) < 1000
    assert read is read_grid or words in str(caught.value)


def test_a_device_is_no_configuration(tmp_path):
    (tmp_path / "a.yaml").symlink_to("/dev/zero")
    with pytest.raises(InputError, match="a.yaml can't be read: it is not a file"): read_config(tmp_path / "a.yaml")


words = st.sampled_from(["pair", "decoding", "pairs", "K", "seed", "target", "stop", "a", "*a", "&a x", "!!int", "0x9",
                         "1e400", ".nan", "2001-99-99", "true", "~", "<<", "name: x", "smollm2", "[", "]", "{", "}",
                         ":", "-", "=", "\n", "  ", "'", '"', "\\0", "\0", "é", "9" * 5000, "? "])


@given(text=st.one_of(st.text(max_size=60), st.lists(words, max_size=20).map(" ".join),
                      st.lists(words, max_size=20).map("".join)),
       kind=st.sampled_from(["yaml", "toml"]))
@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_a_configuration_or_a_clear_error(text, kind, tmp_path):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for read in (read_config, read_grid):
        try: read(path)
        except InputError as error: assert str(path) in str(error)


def test_of_many_mistakes_the_first_five_are_named(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("decoding:\n" + "".join(f"  k{i}: 1\n" for i in range(9000)))
    begun = time.monotonic()
    with pytest.raises(InputError) as caught: read_config(path)
    assert str(caught.value).count("unknown key") == 5 and "8,995 more" in str(caught.value)
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("text", [
    'pairs: ["\\ud800"]', 'pairs:\n  - {name: "a\\udfff", target: smollm2}', '"\\ud800": 1'])
def test_half_a_character_is_refused_with_its_line(text, tmp_path):
    "It can't be printed or written, which would be found out when all runs are over."
    path = tmp_path / "a.yaml"
    path.write_text(f"# a grid\n{text}\n")
    for read in (read_config, read_grid):
        with pytest.raises(InputError, match=r"line [23]: .*half a character"): read(path)


def test_a_key_doesnt_steer_the_terminal(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text('"a\\x1b]0;owned\\x07": 1\n')
    done = CliRunner().invoke(app, ["generate", "Hi", "--config", str(path)])
    assert done.exit_code == 2 and "\\x1b" in done.stderr and not set("\x1b\x07") & set(done.stderr)


def test_a_folder_that_is_not_there_is_no_full_disk(tmp_path):
    with pytest.raises(InputError, match="there is no folder .*none. Make it first") as caught:
        save_config(Config(), tmp_path / "none" / "a.yaml")
    assert "room" not in str(caught.value) and not (tmp_path / "none").exists()


def test_a_full_disk_leaves_the_configuration_before(tmp_path):
    path = tmp_path / "a.yaml"
    save_config(Config(), path)
    before = path.read_bytes()
    with on_a_disk_of(20), pytest.raises(ModelError, match="a.yaml can't be written .*make room .*same command"):
        save_config(FULL, path)
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["a.yaml"]


@pytest.mark.parametrize("pair, words", [
    ('target = "./nothing"', "nothing"), ('name = "smollm2"\ndrafter = "./nothing"', "nothing"),
], ids=["target", "drafter"])
def test_what_can_not_be_loaded_is_said_with_the_file(pair, words, tmp_path):
    "By `from_config`, and by the command."
    file = tmp_path / "run.toml"
    file.write_text(f"[pair]\n{pair}\n")
    with pytest.raises((InputError, ModelError)) as caught: Pair.from_config(file)
    assert str(caught.value).startswith(f"{file}: ") and words in str(caught.value)
    done = CliRunner().invoke(app, ["generate", "--config", str(file), "--raw", "Hi"])
    assert done.exit_code == 2 and f"{file}: " in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count(str(file)) == 1
