"What a file of settings may say, what is refused and in which words, and which runs it means."
import json
from itertools import chain, product

import pytest
from pydantic import ValidationError

from specdec.app.registry import PAIRS, get_pair
from specdec.bench.grid import BenchmarkConfig, Grid, cells, grid_schema, read_grid
from specdec.errors import InputError

RUN = dict(pair="smollm2", method="suffix", K=4, temperature=0.0, max_new_tokens=8, domain="code", prompt="code_000",
           seed=0, repeat=0, dtype="float32", device="cpu", threads=1)
SMALL = dict(methods=["plain", "suffix"], K=[2, "adaptive"], prompts="quick", count=1, dtypes=["float32"], threads=1)


def grid_file(tmp_path, text, name="grid.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


# One run

@pytest.mark.parametrize("method, K, label", [
    ("plain", None, "AR"), ("head", 4, "SD-K4"), ("hybrid", "adaptive", "SD-adaptive"), ("assisted", None, "assisted"),
    ("prompt_lookup", 5, "prompt_lookup"), ("llamacpp-eagle3", None, "llamacpp-eagle3"),
])
def test_labels(method, K, label):
    run = BenchmarkConfig(**RUN | {"method": method, "K": K})
    assert run.decoder_label == label
    assert BenchmarkConfig.model_validate_json(run.model_dump_json()) == run


@pytest.mark.parametrize("wrong", [
    {"method": "sufix"}, {"K": 0}, {"K": True}, {"K": 2.5}, {"K": "many"}, {"K": None}, {"method": "plain"},
    {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": -1.0}, {"max_new_tokens": 0},
    {"repeat": -1}, {"threads": 0}, {"seed": "0"}, {"gamma": 4},
])
def test_what_can_be_no_run(wrong):
    with pytest.raises(ValidationError): BenchmarkConfig(**RUN | wrong)


def test_names_of_another_benchmark_are_understood():
    "The pair and the prompt's domain by the names that they have there; one name each, and the same hash."
    theirs = BenchmarkConfig(model_pair_name="gpt2_dev", prompt_domain="code", K=4)
    assert theirs == BenchmarkConfig(pair="gpt2_dev", domain="code", K=4) and theirs.decoder_label == "SD-K4"
    assert theirs.config_hash == BenchmarkConfig(pair="gpt2_dev", domain="code", K=4).config_hash
    assert theirs.model_dump()["pair"] == "gpt2_dev" and "model_pair_name" not in theirs.model_dump()
    with pytest.raises(ValidationError): BenchmarkConfig(model_pair_name="a", pair="b")


def test_everything_that_matters_changes_the_key():
    weights = {"target": "a", "drafter": "b"}
    key = BenchmarkConfig(**RUN).key(weights, [1, 2])
    assert key == BenchmarkConfig(**RUN | {"temperature": 0}).key(dict(reversed(weights.items())), [1, 2])
    assert len(key) == 12 and int(key, 16) >= 0
    others = [
        ("pair", "x"), ("method", "head"), ("K", 2), ("K", "adaptive"), ("temperature", 1.0), ("max_new_tokens", 9),
        ("domain", "x"), ("prompt", "code_001"), ("seed", 1), ("repeat", 1), ("dtype", "bfloat16"), ("device", "cuda"),
        ("threads", 2),
    ]
    keys = [BenchmarkConfig(**RUN | {name: value}).key(weights, [1, 2]) for name, value in others]
    keys += [BenchmarkConfig(**RUN).key(w, ids) for w, ids in (
        (weights | {"target": "c"}, [1, 2]), (weights | {"drafter": None}, [1, 2]), (weights, [1, 3]))]
    assert {*RUN} == {name for name, _ in others}  # a new setting must be thought of here
    assert len({key, *keys}) == 1 + len(keys)


# The file

MISTAKES = {  # text → what is said
    "an unknown key": ("seed: 1\ntemprature: [0]\n", "line 2: unknown key temprature: did you mean temperatures"),
    "a name of others": ("max_tokens: 5\n", "line 1: unknown key max_tokens: here it is max_new_tokens"),
    "an unknown key of a pair": (
        "pairs:\n  - smollm2\n  - name: a\n    target: b\n    drafts: c\n",
        "line 5: unknown key pairs.1.drafts: did you mean draft"),
    "a key of a pair": ("skip: [3]\n", "line 1: skip belongs into the section pairs"),
    "an unknown pair": ("pairs: [smolm2]\n", "line 1: pairs.0: No pair 'smolm2'. Nearest: smollm2"),
    "parts of a registered pair": (
        "pairs:\n  - name: smollm2\n    drafter: x\n", "line 2: pairs.0: parts need a target"),
    "a pair without a name": ("pairs:\n  - target: x\n", "line 2: pairs.0.name is missing"),
    "an unknown method": ("methods: [plain, sufix]\n", "line 1: methods: unknown method 'sufix': did you mean suffix"),
    "K of nothing": ("K: [2, 0]\n", "line 1: K: expected whole numbers of at least 1, or adaptive, not 0"),
    "K in words": ("K: [two]\n", "line 1: K: expected whole numbers of at least 1, or adaptive, not 'two'"),
    "K alone": ("K: four\n", "line 1: K: expected whole numbers of at least 1, or adaptive, not 'four'"),
    "no K": ("K: []\n", "suffix needs a K"),
    "a truth for a number": ("repeats: true\n", "line 1: repeats should be a valid integer, not True"),
    "a temperature that is none": ("temperatures: [.nan]\n", "line 1: temperatures.0 should be"),
    "below zero": ("temperatures: [0, -1]\n", "line 1: temperatures.1 should be greater than or equal to 0, not -1"),
    "nothing to do": ("methods: []\n", "line 1: methods must not be empty"),
    "one token": ("max_new_tokens: 1\n", "line 1: max_new_tokens should be greater than or equal to 2, not 1"),
    "twice the same": ("K: [2, 4, 2]\n", "line 1: K: 2 is given twice"),
    "twice a key": ("seed: 1\nseed: 2\n", "line 2: seed is given a second time, first in line 1"),
    "compiled and sampled": ("methods: [compiled]\ntemperatures: [0, 1]\n", "compiled is greedy"),
    "no YAML": ("methods: [plain\n", "line 2"),
    "a list": ("- plain\n", "expected the keys pairs, methods, K"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_line(name, tmp_path):
    text, words = MISTAKES[name]
    with pytest.raises(InputError) as caught: read_grid(grid_file(tmp_path, text))
    assert words in str(caught.value) and "grid.yaml" in str(caught.value) and ".." not in str(caught.value)


def test_all_mistakes_at_once(tmp_path):
    text = "pairs: [nobody]\nmethods: [magic]\nK: [0]\nrepeats: 0\n"
    with pytest.raises(InputError) as caught: read_grid(grid_file(tmp_path, text))
    assert all(f"line {n}: " in str(caught.value) for n in (1, 2, 3, 4))


def test_both_formats_say_the_same(tmp_path):
    in_yaml = grid_file(
        tmp_path, "pairs: [smollm2, {name: mine, target: ./m, draft: ./d}]\nK: [1, adaptive]\nseed: 3\n")
    in_toml = grid_file(tmp_path, 'pairs = ["smollm2", {name = "mine", target = "./m", draft = "./d"}]\n'
                        'K = [1, "adaptive"]\nseed = 3\n', "grid.toml")
    grid = read_grid(in_yaml)
    assert grid == read_grid(in_toml)
    assert grid.pairs[0].spec == get_pair("smollm2")
    assert grid.pairs[1].spec.target == str((tmp_path / "m").resolve())  # from the file's folder on
    assert Grid.model_validate(json.loads(grid.model_dump_json())) == grid


def test_files_that_are_none(tmp_path):
    assert read_grid(grid_file(tmp_path, "")) == Grid()
    with pytest.raises(InputError, match="can't be read"): read_grid(tmp_path / "nowhere.yaml")
    with pytest.raises(InputError, match=".yaml, .yml or .toml"): read_grid(grid_file(tmp_path, "", "grid.json"))


def test_an_editor_sees_what_we_see():
    schema = grid_schema()
    assert set(schema["properties"]) == set(Grid.model_fields) and schema["additionalProperties"] is False
    pair = schema["$defs"]["GridPair"]["anyOf"]
    assert pair[0] == {"type": "string"} and "target" in pair[1]["properties"]


# The runs

def test_every_combination_once():
    grid = Grid(**SMALL | dict(temperatures=[0, 1], repeats=2, seed=5, methods=["plain", "suffix", "assisted"]))
    runs = list(chain.from_iterable(cell.runs for cell in cells(grid)))
    ways = [("plain", None), ("suffix", 2), ("suffix", "adaptive"), ("assisted", None)]
    prompts = ["code_000", "conversation_000", "summarization_000"]
    wanted = {(*way, t, repeat, prompt) for way, t, repeat, prompt in product(ways, (0.0, 1.0), (0, 1), prompts)}
    found = [(r.method, r.K, r.temperature, r.repeat, r.prompt) for r in runs]
    assert len(found) == len(wanted) and set(found) == wanted
    assert all(run.seed == 5 + run.repeat for run in runs)


def test_what_is_compared_stands_in_one_cell():
    grid = Grid(**SMALL | dict(temperatures=[0, 1], dtypes=["float32", "bfloat16"], repeats=2))
    every = list(cells(grid))
    for cell in every:
        assert len({(r.pair, r.dtype, r.temperature, r.repeat, r.prompt) for r in cell.runs}) == 1
        assert [r.method for r in cell.runs].count("plain") == 1 and cell.runs[0].prompt == cell.prompt.id
    dtypes = [cell.runs[0].dtype for cell in every]
    assert dtypes == sorted(dtypes, key=["float32", "bfloat16"].index)  # no model is loaded twice
    assert {cell.runs[0].method for cell in every} == {"plain", "suffix"}  # everyone goes first


def test_prompts_come_from_all_domains_in_turn():
    def of(**more): return [cell.prompt.id for cell in cells(Grid(**SMALL | more))]
    assert of(count=2) == [f"{d}_{n:03}" for n in (0, 1) for d in ("code", "conversation", "summarization")]
    assert of(domains=["code"], count=3) == ["code_000", "code_001", "code_002"]
    with pytest.raises(InputError, match="domain"): of(domains=["poetry"])
    with pytest.raises(InputError, match="prompts"): of(prompts="slow")


def test_what_is_left_open_is_what_the_machine_has():
    [cell] = cells(Grid(**SMALL | dict(threads=None, dtypes=["auto"], domains=["code"])))
    assert cell.runs[0].dtype in ("float32", "bfloat16") and cell.runs[0].device in ("cpu", "cuda", "mps")
    for wrong in (dict(device="abacus"), dict(dtypes=["float7"])):
        with pytest.raises(ValidationError, match="expected auto, .* not '(abacus|float7)'"): Grid(**SMALL | wrong)
    with pytest.raises(InputError, match="isn't available"): list(cells(Grid(**SMALL | dict(device="cuda:99"))))


# The configurations that come with the project

def test_the_configurations_are_what_they_say():
    from pathlib import Path
    folder = Path(__file__).parents[2] / "configs"
    runs = {path.stem: sum(len(cell.runs) for cell in cells(read_grid(path))) for path in folder.glob("*.yaml")}
    assert set(runs) == {"quick", "drafters", "peers", "table", "pairs", "coder"} and runs["quick"] < 60
    table = read_grid(folder / "table.yaml")
    assert {"ngram", "suffix", "model", "head", "hybrid"} <= {*table.methods} and set(table.temperatures) == {0, 1}
    assert set(table.K) == {1, 2, 4, 8, "adaptive"} and set(table.dtypes) == {"float32", "bfloat16", "int4"}


# By hand, and for other programs' runs

def test_the_four_pairs_have_a_configuration():
    from pathlib import Path
    grid = read_grid(Path(__file__).parents[2] / "configs" / "pairs.yaml")
    names = ["gpt2_dev", "tinyllama_llama3", "phi3_llama3", "llama3_self"]
    assert [pair.name for pair in grid.pairs] == names and [*grid.K] == [1, 2, 4, 8] and "plain" in grid.methods
    assert {PAIRS[name].dtype for name in names} == {"float16"} == {*grid.dtypes}
    assert len(next(cells(grid)).runs) == 1 + 4  # plain, and a draft for each K


def test_a_configuration_by_hand_needs_a_pair_only():
    run = BenchmarkConfig(pair="p", K=4)
    assert (run.decoder_label, run.method, run.temperature, run.seed) == ("SD-K4", "default", 0, 0)
    assert BenchmarkConfig(pair="p").decoder_label == "AR"
    assert BenchmarkConfig(pair="p", method="elsewhere:vLLM-0.11", K=3).decoder_label == "vLLM-0.11"
    for wrong in ("elsewhere:", "elsewhere:a b", "elsewhere", "vLLM"):
        with pytest.raises(ValidationError, match="unknown method"): BenchmarkConfig(pair="p", method=wrong)
    with pytest.raises(ValidationError): BenchmarkConfig(K=4)


def test_the_hash_of_a_configuration_is_the_same_everywhere():
    "It goes by the settings alone; the value is that of an earlier process."
    hashes = {BenchmarkConfig(**RUN | more).config_hash for more in ({}, {"K": 8}, {"seed": 1}, {"pair": "q"})}
    assert len(hashes) == 4
    again = BenchmarkConfig(**dict(reversed(RUN.items())))
    assert again.config_hash in hashes and BenchmarkConfig(pair="gpt2_dev", K=4).config_hash == "41a03ec338ef"
