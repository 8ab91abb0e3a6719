"""One option, one field: a keyword, a key of a file, a flag, and what the result records. Min-p shows it."""
import inspect
import json
from dataclasses import fields

import pytest
import torch
from typer.testing import CliRunner

from helpers import tiny
from specdec.app.cli import app
from specdec.app.config import Config, Decoding, config_schema
from specdec.drafters.lookup import NGramDrafter
from specdec.errors import InputError
from specdec.options import Options, in_files
from specdec.pair import ConfiguredPair, Pair
from specdec.sampling import SamplingParams

KEPT = {each.metadata.get("key", each.name) for each in in_files()}


@pytest.fixture(scope="module")
def pair(): return Pair(tiny(), NGramDrafter())


@pytest.mark.parametrize("call", [Pair.generate, Pair.results, Pair.stream])
def test_help_shows_every_option(call):
    known = inspect.signature(call).parameters
    assert {each.name for each in fields(Options)} <= set(known) and "given" not in known
    assert known["temperature"].default == 0.0 and known["min_p"].kind is inspect.Parameter.KEYWORD_ONLY


def test_a_file_has_a_key_for_each_and_its_limits():
    assert set(Decoding.model_fields) == KEPT | {"lenience"}
    schema = config_schema()["$defs"]["Decoding"]["properties"]
    assert schema["min_p"]["anyOf"][0] == {"exclusiveMinimum": 0, "maximum": 1, "type": "number"}
    for each in in_files():
        assert schema[each.metadata.get("key", each.name)]["description"] == each.metadata["help"]


@pytest.mark.parametrize("command, without", [("generate", set()), ("compare", {"method"})])
def test_the_command_line_has_a_flag_for_each(command, without):
    said = CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, "--help"]).stdout
    names = {each.name.replace("_", "-") for each in in_files()} - {"K"} - without
    assert not [name for name in names if f"--{name}" not in said]


@pytest.mark.parametrize("wrong", [dict(temprature=1), dict(options=3), dict(options={"K": 3})], ids=str)
def test_what_is_no_option_is_told(pair, wrong):
    with pytest.raises((TypeError, InputError), match="temprature|Options"): pair.generate([1, 2], **wrong)


@pytest.mark.parametrize("theirs, words", [
    ("num_assistant_tokens", "here it is K."), ("draft_tokens", "here it is K."), ("do_sample", "temperature says it"),
    ("max_tokens", "here it is max_new_tokens."), ("acceptance_threshold", "LossyTypical"),
    ("temprature", "did you mean temperature?"),
])
def test_a_keyword_of_another_system_is_translated(pair, theirs, words):
    "As a key of a file is; before any model runs, in every call."
    for call in (pair.generate, pair.stream, pair.generate_text, lambda p, **given: pair.results([p], **given)):
        with pytest.raises(TypeError) as caught: call([1, 2], **{theirs: 1})
        assert f"unexpected keyword argument '{theirs}': " in str(caught.value) and words in str(caught.value)


def test_an_object_and_its_keywords_are_one_call(pair):
    asked = Options(temperature=1.0, max_new_tokens=12, seed=4, min_p=.01)
    one, other = pair.generate([1, 2, 3], asked), pair.generate([1, 2, 3], temperature=1.0, max_new_tokens=12, seed=4,
                                                                min_p=.01)
    assert one.generated_ids == other.generated_ids and one.settings == other.settings
    assert pair.generate([1, 2, 3], asked, seed=5).settings == one.settings | {"seed": 5}
    (_, of_list), = pair.results([[1, 2, 3]], options=asked)
    *_, last = pair.stream([1, 2, 3], asked)
    assert of_list.generated_ids == last.result.generated_ids == one.generated_ids
    assert json.loads(one.to_json())["settings"]["min_p"] == .01


def test_a_seed_is_drawn_for_each_call(pair):
    asked = Options(temperature=1.0, max_new_tokens=2)
    first, second = (pair.generate([1, 2], asked).settings["seed"] for _ in range(2))
    assert asked.seed is None and first != second


@pytest.mark.parametrize("K", [1, 4])
def test_min_p_never_emits_what_it_cuts_and_keeps_the_text_of_plain_decoding(pair, K):
    "Each token is among those that min-p keeps, in plain and in speculative decoding, which write one text."
    asked = Options(temperature=2.0, min_p=.6, max_new_tokens=24, ignore_eos=True)
    cut = 0
    for seed in range(4):
        texts = [pair.generate([1, 2, 1, 2, 1], asked, seed=seed, K=K, method=m).generated_ids
                 for m in ("plain", "speculative")]
        assert texts[0] == texts[1]
        logits = pair.target.forward(torch.tensor([[1, 2, 1, 2, 1, *texts[0]]]))[0, 4:-1]
        p = SamplingParams(2.0).probs(logits)
        assert all(row[token] >= .6 * row.max() * (1 - 1e-5) for row, token in zip(p, texts[0]))
        free = pair.generate([1, 2, 1, 2, 1], asked, seed=seed, K=K, min_p=None).generated_ids
        cut += free != texts[0]
    assert cut  # the control: without it, other tokens come


def test_an_object_stands_in_place_of_what_a_file_says(pair):
    "Keywords go before both; the control: without an object the file's settings hold."
    of_file = ConfiguredPair(pair, Config(decoding=Decoding(temperature=1.0, max_new_tokens=3, seed=7)))
    asked, prompt = Options(max_new_tokens=5, seed=2), [1, 2, 3]
    (_, listed), = of_file.results([prompt], options=asked)
    *_, end = of_file.stream(prompt, asked)
    for result in (of_file.generate(prompt, asked), listed, end.result):
        assert [result.settings[name] for name in ("temperature", "max_new_tokens", "seed")] == [0, 5, 2]
    assert of_file.generate(prompt, asked, seed=9).settings["seed"] == 9
    assert of_file.generate(prompt, seed=9).settings["temperature"] == 1.0
