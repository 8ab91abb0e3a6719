"""The command line: what goes to which stream, which exit code says what, and that bad input is refused before any
model is loaded."""
import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import specdec
from helpers import examples as tries
from specdec import errors
from specdec import pair as pairs
from specdec.app import answers, cli, registry
from specdec.app.cli import ExitCode, app
from specdec.drafters.load import shipped
from specdec.lossless import gallery
from specdec.lossless.proof import prove_rule
from specdec.models import devices, hub, loading
from specdec.result import GenerationResult
from specdec.verify import speculative_sampling

QUESTION = "What is the capital of France?"
PLAIN = {
    name: value
    for name, value in os.environ.items()
    if name not in ("FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "GITHUB_ACTIONS")
}


def run(*words: str, stdin: str = ""):
    "A command in this process."
    return CliRunner().invoke(app, words, input=stdin, catch_exceptions=False)


def process(*words: str, **more) -> subprocess.CompletedProcess:
    "A command in a process of its own."
    return subprocess.run([sys.executable, "-m", "specdec", *words], capture_output=True, text=True, env=PLAIN, **more)


@lru_cache(maxsize=2)
def model(name, device, dtype, use): return loading.load(name, device, dtype, use)


def load_once(name, device="auto", dtype="auto", use="target", revision=None):
    "A model that is asked for again, also by what `auto` means here, is the same; the last two are kept."
    device = str(devices.pick_device(device))
    dtype = str(devices.pick_dtype(dtype, torch.device(device), devices.STORED)).removeprefix("torch.")
    return model(name, device, dtype, use)


@pytest.fixture
def one_load(monkeypatch, loaded=lru_cache(maxsize=4)(pairs.load_pair)):
    "Put each pair together once, of models that are loaded once: `compare` loads two."
    monkeypatch.setattr(pairs, "load", load_once)
    monkeypatch.setattr(pairs, "load_pair", loaded)
    return loaded


def usual(one_load, name="smollm2"):
    "The pair that a command without further options loads."
    return one_load(name, "auto", "auto", method="speculative", drafter=None, revision=None)


@pytest.fixture
def no_model(monkeypatch):
    "Fail where a model would be opened."
    def refuse(*arguments, **more): raise AssertionError("a model was opened")
    monkeypatch.setattr(loading, "find_model", refuse)


# Help

COMMANDS = [
    [], ["generate"], ["compare"], ["pairs"], ["fetch"], ["doctor"], ["prove"], ["bench"], ["bench", "peers"],
    ["bench", "target"], ["bench", "drafters"], ["bench", "run"], ["bench", "schema"], ["bench", "report"], ["distill"],
    ["load"],
    ["config", "schema"], ["ollama"], ["export"], ["prompts"], ["audit"], ["check-server"],
    ["live"], ["playground"], ["explain"], ["follow"],
]


@lru_cache
def help_of(*words: str, columns: int = 80) -> str:
    "A command's help, as wide as that."
    done = CliRunner().invoke(app, [*words, "-h"], env={"COLUMNS": str(columns)}, catch_exceptions=False)
    assert done.exit_code == ExitCode.DONE
    return done.stdout


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_is_there_for_both_spellings(words):
    long = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"})
    assert long.exit_code == ExitCode.DONE and long.stdout == help_of(*words) and "Usage" in long.stdout


@pytest.mark.parametrize("words", [c for c in COMMANDS if c and c != ["bench"]], ids=" ".join)
def test_help_of_each_command_shows_an_example(words):
    assert f"specdec {' '.join(words)}" in help_of(*words).split("Examples:")[1]


def examples(words: list[str]) -> list[list[str]]:
    "The command lines under a command's examples, as a shell takes them apart, without what is piped."
    text = typer.main.get_command(app)
    for word in words: text = text.commands[word]
    lines = text.help.split("Examples:")[1].strip().split("\n\n")
    lines = (re.sub(r"^.*?\| (?=specdec)|^accelerate launch .* -m (?=specdec)| [<>|] .*$", "", " ".join(line.split()))
             for line in lines)
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("words", [c for c in COMMANDS if c and c != ["bench"]], ids=" ".join)
def test_examples_are_lines_that_the_command_takes(words, tmp_path, monkeypatch):
    "Every option is there, and every value is one that it takes; nothing is run."
    monkeypatch.chdir(tmp_path)
    for folder in ("drafter", "my-head", "samples"): (tmp_path / folder).mkdir()
    for file in ("questions.jsonl", "run.toml", "city.json"): (tmp_path / file).touch()
    found = examples(words)
    assert any(line[1:len(words) + 1] == words for line in found)
    for program, *line in found:
        command, context = typer.main.get_command(app), None
        while hasattr(command, "commands"):
            command, line = command.commands[line[0]], line[1:]
        context = command.make_context("specdec", list(line))
        assert program == "specdec" and bool(context.params) == bool(command.params)


def untaken(line: str) -> list[str]:
    "The words of a command line, as prose has it, that the program hasn't: a command, or options."
    command, words = typer.main.get_command(app), line.split()[1:]
    while hasattr(command, "commands"):
        if not words: return []
        if words[0] not in command.commands: return words[:1]
        command = command.commands[words.pop(0)]
    options = {"-h", "--help"}.union(*(option.opts + option.secondary_opts for option in command.params))
    return [word for word in words if word.startswith("--") and word.split("=")[0] not in options]


def test_commands_in_prose_are_there():
    "In every notebook's text, and in what a contributor reads."
    root, found = Path(__file__).parents[2], {}
    for path in [*(root / "nbs").rglob("*.ipynb"), root / "README.md", root / "CONTRIBUTING.md"]:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            cells = json.loads(text)["cells"]
            text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        for line in re.findall(r"`(specdec [a-z][^`\n]*)`", text): found.setdefault(line, path.name)
    assert len(found) > 40 and {line: name for line, name in found.items() if untaken(line)} == {}
    assert untaken("specdec bench run --target smollm2") == ["--target"] and untaken("specdec bnch run") == ["bnch"]


STORED = Path(__file__).parents[2] / "nbs" / "data"


@pytest.mark.parametrize("name", ["peers", "drafters", "drafters_float32"])
def test_the_commands_of_stored_measurements_are_still_taken(name):
    program, *line = json.loads((STORED / f"{name}.json").read_text(encoding="utf-8"))["command"].split()
    command = typer.main.get_command(app)
    while hasattr(command, "commands"): command, line = command.commands[line[0]], line[1:]
    assert program == "specdec" and command.make_context("specdec", line).params["as_json"]


def test_prompts_are_a_file_in_every_command():
    "What each does with a file that isn't there, see `test_names_that_nothing_has_are_one_line`."
    found, to_do = set(), [typer.main.get_command(app)]
    while to_do:
        command = to_do.pop()
        to_do += getattr(command, "commands", {}).values()
        if any("--prompts" in option.opts for option in command.params): found.add(command.name)
    assert found == {"generate", "distill", "follow"} == {words[0] for words in NAMED if "--prompts" in words}


def test_an_example_with_a_wrong_option_is_seen():
    command = typer.main.get_command(app).commands["bench"].commands["peers"]
    with pytest.raises(Exception, match="--prompts"): command.make_context("specdec", ["--prompts", "3"])


def written(group: typer.Typer, *names: str):
    "Every command under a group, by its words, with its docstring and the help of its options, as the source has them."
    for each in group.registered_commands:
        hints = get_type_hints(each.callback, include_extras=True)
        helps = [told for hint in hints.values() for one in getattr(hint, "__metadata__", ())
                 if (told := getattr(one, "help", None))]
        yield [*names, each.name or each.callback.__name__], each.callback.__doc__, helps
    for each in group.registered_groups: yield from written(each.typer_instance, *names, each.name)


def paragraphs(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split("\n\n")]


WRITTEN = list(written(app))


@pytest.mark.parametrize("words, doc, helps", WRITTEN, ids=[" ".join(words) for words, *_ in WRITTEN])
def test_a_help_page_says_what_its_source_says(words, doc, helps):
    "Each paragraph, with all its brackets, is one line where the terminal is wide enough; so is the first in a list."
    page = [line.strip("│ ") for line in help_of(*words, columns=1200).splitlines()]
    assert [p for p in paragraphs(doc) if p not in page] == []
    assert [told for told in helps if not any(" ".join(told.split()) in line for line in page)] == []
    assert any(paragraphs(doc)[0] in line for line in help_of(*words[:-1], columns=1200).splitlines())


def test_the_help_of_all_commands_says_what_its_source_says():
    page = [line.strip() for line in help_of(columns=1200).splitlines()]
    assert [p for p in paragraphs(cli.HELP) if p not in page] == []


def test_commands_are_found_for_the_comparison_of_help_pages():
    assert {" ".join(words) for words, *_ in WRITTEN} == {" ".join(c) for c in COMMANDS} - {"", "bench"}
    assert any("[peers]" in doc for _, doc, _ in WRITTEN)


@pytest.mark.parametrize("words", [[], ["bench"], ["config"]], ids=["specdec", "bench", "config"])
def test_without_a_command_the_help_is_all_that_is_said(words):
    bare, asked = run(*words), run(*words, "-h")
    assert bare.exit_code == ExitCode.BAD_INPUT and (bare.stdout + bare.stderr).strip() == asked.stdout.strip() != ""


def test_help_lists_the_doctor_before_what_takes_long():
    listed = re.findall(r"^│ (\w+) ", process("-h").stdout, re.M)
    assert listed.index("fetch") + 1 == listed.index("doctor") < listed.index("bench")


def test_help_loads_nothing_heavy():
    code = """import sys
from typer.testing import CliRunner
from specdec.app.cli import app
assert CliRunner().invoke(app, ["compare", "-h"]).exit_code == 0
assert CliRunner().invoke(app, ["generate", "x", "-K", "0"]).exit_code == 2
print(sorted({"torch", "transformers", "numpy"} & sys.modules.keys()))"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_python_m_and_the_version():
    done = process("--version")
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.DONE, f"specdec {specdec.__version__}\n", "")


def test_the_script_is_the_same_program():
    "By the line that installing reads."
    from configparser import ConfigParser
    from importlib.metadata import EntryPoint

    from specdec import __main__
    config = ConfigParser(delimiters=("=",), interpolation=None)
    config.read(Path(__file__).parents[2] / "settings.ini")
    name, _, place = config["DEFAULT"]["console_scripts"].partition("=")
    assert (name, EntryPoint(name, place, "console_scripts").load()) == ("specdec", __main__.main)


# import specdec

def test_lazy_names():
    assert specdec.load is loading.load and specdec.Pair is pairs.Pair and specdec.load_pair is pairs.load_pair
    assert specdec.list_pairs is registry.list_pairs and specdec.GenerationResult is GenerationResult
    assert all(hasattr(specdec, name) for name in specdec.__all__) and set(specdec.__all__) <= set(dir(specdec))
    with pytest.raises(AttributeError, match="nothing"): specdec.nothing


def test_import_star_and_import_alone():
    done = subprocess.run(
        [
            sys.executable, "-c",
            "import specdec, sys; a = 'torch' in sys.modules; from specdec import *; print(a, Pair.__name__)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False Pair\n"


# generate

def test_text_on_one_stream_and_summary_on_the_other(one_load):
    done = run("generate", QUESTION)
    assert done.exit_code == ExitCode.DONE
    assert "Paris" in done.stdout and "tokens/s" not in done.stdout
    assert done.stderr.startswith("speculative: ") and done.stderr.count("\n") == 1


def test_text_streamed_is_the_text_of_the_result(one_load):
    streamed = run("generate", QUESTION).stdout
    assert streamed == GenerationResult.from_json(run("generate", QUESTION, "--json").stdout).text + "\n"


def test_json_comes_back_without_loss(one_load):
    words = [
        "generate", "Once upon a time", "--raw", "--temperature", "0.8", "--top-k", "40", "--top-p", "0.9", "--seed",
        "7", "-K", "3", "--max-new-tokens", "9", "--json",
    ]
    done = run(*words, "--stop", "dragon", "--stop", "castle")
    assert done.exit_code == ExitCode.DONE and done.stderr == "" and done.stdout.count("\n") == 1
    result = GenerationResult.from_json(done.stdout)
    assert result.to_json() == done.stdout.strip()
    assert result.settings == {
        "K": 3, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": None, "max_new_tokens": 9, "seed": 7,
        "stop": ["dragon", "castle"], "ignore_eos": False,
    }
    assert (
        result.generated_ids == GenerationResult.from_json(
            run(*words, "--stop", "dragon", "--stop", "castle").stdout
        ).generated_ids
    )


def test_json_tells_how_likely_each_token_was(one_load):
    line = run("generate", QUESTION, "--max-new-tokens", "4", "--json", "--logprobs", "2").stdout
    result = GenerationResult.from_json(line)
    assert [len(odds) for odds in result.logprobs] == [2] * 4
    assert all(token in odds for token, odds in zip(result.generated_ids, result.logprobs, strict=True))


def test_an_answer_that_fits_a_schema(one_load, tmp_path):
    schema = {"type": "object", "properties": {"capital": {"enum": ["Paris", "Rome"]}}, "required": ["capital"],
              "additionalProperties": False}
    (tmp_path / "schema.json").write_text(json.dumps(schema), encoding="utf-8")
    answer = run("generate", QUESTION, "--json-schema", str(tmp_path / "schema.json"))
    assert answer.exit_code == 0 and json.loads(answer.stdout) in ({"capital": "Paris"}, {"capital": "Rome"})


@pytest.mark.parametrize("more", [["--json"], []], ids=["JSON", "text"])
def test_an_answer_that_is_cut_before_it_fits_the_schema_says_so(one_load, tmp_path, more):
    schema, texts = tmp_path / "schema.json", tmp_path / "texts"
    schema.write_text('{"enum": ["It is the city of Paris"]}', encoding="utf-8")
    texts.write_text("Which?\nWhat?", encoding="utf-8")
    words = ["--json-schema", str(schema), *more]
    cut, whole = (run("generate", QUESTION, *words, "--max-new-tokens", n) for n in ("3", "40"))
    assert cut.exit_code == ExitCode.BAD_INPUT and "Error: The answer was cut" in cut.stderr
    assert "larger --max-new-tokens" in cut.stderr and whole.exit_code == ExitCode.DONE
    several = run("generate", "--prompts", str(texts), *words, "--max-new-tokens", "3")
    assert several.exit_code == ExitCode.BAD_INPUT and "2 of 2 answers were (1, 2) cut" in several.stderr
    if more:
        assert [json.loads(done.stdout)["fits_grammar"] for done in (cut, whole)] == [False, True]
        assert json.loads(json.loads(whole.stdout)["text"]) == "It is the city of Paris"
        alone = json.loads(run("generate", QUESTION, "--json", "--max-new-tokens", "2").stdout)
        assert alone["fits_grammar"] is None


def test_an_answer_that_is_complete_where_no_token_is_left_fits(one_load, tmp_path):
    "Its end token doesn't fit, its text does."
    (tmp_path / "schema.json").write_text('{"enum": ["It is the city of Paris"]}', encoding="utf-8")
    words = ["generate", QUESTION, "--json", "--json-schema", str(tmp_path / "schema.json"), "--max-new-tokens"]
    n = json.loads(run(*words, "40").stdout)["generated_ids"]
    done = run(*words, str(len(n) - 1))
    assert done.exit_code == ExitCode.DONE and json.loads(done.stdout)["finish_reason"] == "length"


@pytest.mark.parametrize("text, says", [
    ("[" * 99999, "too many levels for JSON"), ('{"minimum": ' + "1" * 5000 + "}", "holds no JSON"),
    ('{"type"', "holds no JSON"), ("\xff", "holds no JSON"), ("[]", "A JSON schema is a dict"),
    ('{"enum": []}', "No text"),
], ids=["deep", "a long number", "half", "bytes", "list", "nothing fits"])
def test_a_schema_that_is_none_is_one_line(text, says, no_model, tmp_path):
    (tmp_path / "schema.json").write_bytes(text.encode("latin-1"))
    answer = run("generate", "Hi", "--json-schema", str(tmp_path / "schema.json"))
    assert answer.exit_code == ExitCode.BAD_INPUT and says in answer.stderr and answer.stderr.count("\n") == 1


def test_raw_and_chat_prompts_differ(one_load):

    def ids(*more):
        return GenerationResult.from_json(
            run("generate", "Hi", "--max-new-tokens", "1", "--json", *more).stdout
        ).prompt_ids

    tokenizer = usual(one_load).tokenizer
    assert ids("--raw") == tokenizer("Hi")["input_ids"]
    assert ids() == hub.encode(tokenizer, [{"role": "user", "content": "Hi"}])


def test_standard_input_is_the_prompt(one_load):

    def prompt_ids(*words, **more):
        return GenerationResult.from_json(
            run("generate", *words, "--max-new-tokens", "1", "--json", **more).stdout
        ).prompt_ids

    assert prompt_ids("-", stdin="Two\nlines\n") == prompt_ids("Two\nlines")


def test_method_and_stop(one_load):
    done = run("generate", QUESTION, "--method", "plain", "--stop", "Paris", "--json")
    result = GenerationResult.from_json(done.stdout)
    assert (result.method, result.finish_reason) == ("plain", "stop") and not result.text.count("Paris")


def test_a_target_without_chat_template_asks_for_raw(one_load, monkeypatch):
    monkeypatch.setattr(usual(one_load).tokenizer, "chat_template", None)
    done = run("generate", "Hi")
    assert done.exit_code == ExitCode.BAD_INPUT and "--raw" in done.stderr
    assert run("generate", "Hi", "--raw", "--max-new-tokens", "1").exit_code == ExitCode.DONE


# A file of prompts

@pytest.fixture
def questions(tmp_path):
    "Three prompts in a file; one of them is what stands for standard input elsewhere."
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hi", "-", "Why?")))
    return file


def test_every_prompt_of_a_file_gives_one_line(one_load, questions):
    words = ["--max-new-tokens", "3", "--temperature", "1", "--json"]
    done = run("generate", "--prompts", str(questions), *words, "--seed", "4", "--batch-size", "1", stdin="not read")
    found = [GenerationResult.from_json(line) for line in done.stdout.splitlines()]
    assert done.exit_code == ExitCode.DONE and done.stderr == "" and len(found) == 3
    alone = [GenerationResult.from_json(run("generate", text, *words, "--seed", seed).stdout)
             for text, seed in (("Hi", "4"), ("Why?", "6"))]
    assert [r.generated_ids for r in (found[0], found[2])] == [r.generated_ids for r in alone]
    tokenizer = hub.load_tokenizer(hub.fetch())
    assert found[1].prompt_ids == hub.encode(tokenizer, [{"role": "user", "content": "-"}])


def test_texts_of_several_prompts(one_load, questions):
    words = ["--raw", "--max-new-tokens", "2"]
    done = run("generate", "--prompts", str(questions), *words)
    alone = [run("generate", "-", *words, stdin=text).stdout for text in ("Hi", "-", "Why?")]
    assert done.exit_code == ExitCode.DONE and done.stdout == "\n".join(alone)
    said = r".*questions\.jsonl: 3 texts\n3 answers; 5 tokens in \d+\.\d\d s, \d+\.\d tokens/s\n"
    assert re.fullmatch(said, done.stderr)


def test_a_prompt_of_several_that_does_not_fit_is_named(one_load, tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hi", "word " * 9000)))
    done = run("generate", "--prompts", str(file), "--max-new-tokens", "2", "--json")
    assert done.exit_code == ExitCode.BAD_INPUT and done.stdout == ""  # the first isn't answered in vain
    assert done.stderr.startswith("Error: Prompt 2 of 2: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("text, found", [
    ("Hi\n\n  Why? \r\n-", ["Hi", "  Why? ", "-"]), (' {"prompt": "Hi"}\n\t{"text": "Why?"}', ["Hi", "Why?"]),
    ("[INST] Hi\n[1] is a footnote", ["[INST] Hi", "[1] is a footnote"]),
    ('{"prompt": "Hi", "id": 3}\n\n{"text": "Why?", "domain": "science"}\n', ["Hi", "Why?"]),
    ('\ufeff{"messages": [{"role": "user", "content": "Hi"}]}', [[{"role": "user", "content": "Hi"}]]),
], ids=["text", "JSON after a space", "brackets in text", "prompts of both names", "a chat, after a byte order mark"])
def test_lines_that_are_prompts(tmp_path, text, found):
    file = tmp_path / "prompts"
    file.write_text(text, encoding="utf-8", newline="")
    assert answers.read_prompts(file) == found
    chats = [each if isinstance(each, list) else [{"role": "user", "content": each}] for each in found]
    assert [answers.as_chat(each) for each in found] == chats


@pytest.mark.parametrize("text, words", [
    ("", "no prompt"), ("\n \n", "no prompt"), (b"\xff\xfe", "can't be read"), ('{"prompt": 3}', "line 1"),
    ('{"prompt": "Hi"}\nWhy?', "line 2"), ('{"prompt": " "}', "line 1"), ('{"messages": []}', "line 1"),
    ("{" * 9999, "line 1"), ('{"prompt": "Hi"}\n[1]', "line 2"), ('{"messages": "hi"}', "line 1"),
    ('{"messages": [1, 2, 3]}', "line 1"), ('{"messages": [[{"role": "user", "content": "Hi"}]]}', "line 1"),
    ('{"messages": [{"role": "user"}]}', "line 1"), ('{"messages": [{"role": "user", "content": 3}]}', "line 1"),
    ("[1,2,3]", "line 1"), ('["Hi", "Why?"]', "line 1"), ('[\n{"prompt": "Hi"}\n]', "line 1"),
    ('[{"prompt": "Hi"},', "line 1"), ('Hi\n\n {"prompt": "Why?"}', "line 3"), ("Hi\n[1, 2]", "line 2"),
    ('{"prompt": "Hi", "text": "Why?"}', "line 1"), ('{"prompt": "Hi", "messages": []}', "line 1"),
    ('{"prompt": "\\ud800"}', "line 1"), ("Hi\0", "line 1"), (b"Hi\nWh\xff", "line 2"),
    (gzip.compress(b"Hi", mtime=0), "packed"),
    (b"PK\x03\x04\xff", "line 1"), ('{"prompt": ' + "9" * 5000 + "}", "line 1"),
], ids=lambda value: None)
def test_lines_that_are_no_prompts(tmp_path, text, words):
    file = tmp_path / "prompts"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(errors.InputError, match=words): answers.read_prompts(file)


SILENT = st.text() | st.binary().map(lambda b: b.decode("latin-1"))
LINES = st.one_of(SILENT, st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | SILENT | st.sampled_from(["prompt", "messages", "role"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(
        ["prompt", "text", "messages", "role", "content", "prompt_ids", "run", "index", "rounds"]) | SILENT, inner),
    max_leaves=8).map(json.dumps))


@given(st.lists(LINES), st.sampled_from(["\n", "\r\n", "\n\n"]), st.sampled_from(["utf-8", "latin-1", "utf-16"]))
@settings(max_examples=tries(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_is_prompts_or_one_line(tmp_path, lines, end, encoding):
    file = tmp_path / "prompts"
    file.write_bytes(end.join(lines).encode(encoding, errors="replace"))
    try: found = answers.read_prompts(file)
    except errors.InputError as error: assert str(file) in str(error)
    else:
        assert found and all(isinstance(each, str) and each.strip() or each[0]["role"] is not None for each in found)


def test_prompts_without_an_end_and_a_pipe_without_a_writer(no_model, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for file, says in (("/dev/zero", "more than 100 MB"), (str(tmp_path / "pipe"), "There is no prompt")):
        done = run("generate", "--prompts", file)
        assert done.exit_code == ExitCode.BAD_INPUT and says in done.stderr and done.stderr.count("\n") == 1


def test_prompts_come_through_a_pipe(tmp_path):
    ends = os.pipe()
    with open(ends[1], "w") as pipe: pipe.write("Hi\nWhy?\n")
    assert answers.read_prompts(Path(f"/dev/fd/{ends[0]}")) == ["Hi", "Why?"]
    os.close(ends[0])


# A file of answers

@pytest.fixture
def answered(one_load, questions, tmp_path):
    "Answer the questions into a file, with more words for the command; the same file each time."
    def answer(*more: str, words=("--max-new-tokens", "3")):
        return run("generate", "--prompts", str(questions), "--out", str(answer.out), *words, *more)
    answer.out = tmp_path / "answers.jsonl"
    return answer


def test_answers_in_a_file_are_gone_on_with(answered, questions):
    "Stopped anywhere, also within a line, the same command ends with the same file; others don't touch it."
    out, sampled = answered.out, ["--temperature", "1"]
    first = answered(*sampled, "--seed", "4")
    whole = out.read_bytes()
    assert first.exit_code == ExitCode.DONE and first.stdout == "" and "\n3 answers in " in first.stderr
    def told(): return [(r.generated_ids, r.settings["seed"], r.run["index"]) for r in answers.kept_answers(out)[0]]
    found, lines = told(), whole.splitlines(keepends=True)
    assert [place for _, *place in found] == [[4, 0], [5, 1], [6, 2]] and len(lines) == 3
    gaps = [lines[0] + lines[1][:50], lines[0] + lines[1], whole, lines[2], lines[2] + lines[0] + b"{", whole[:-1]]
    for kept in gaps:  # with a seed, and without: it is in there
        for seed in (["--seed", "4"], []):
            if not seed and kept not in gaps[:2]: continue
            out.write_bytes(kept)
            again = answered(*sampled, *seed)
            assert again.exit_code == ExitCode.DONE, again.stderr
            assert told() == found and set(kept.splitlines()[:1]) <= set(out.read_bytes().splitlines())
            whole_lines = sum(line.endswith(b"}") for line in kept.splitlines())
            assert f"{whole_lines} of them from before" in again.stderr
    out.write_bytes(whole)
    questions.write_text('{"prompt": "Hi"}')
    assert "count was 3 and is 1" in answered(*sampled, "--seed", "4").stderr and out.read_bytes() == whole


MADE: list[bytes] = []


@pytest.fixture
def held(answered):
    "A file of answers with seed 4, which are made once."
    if not MADE:
        assert answered("--seed", "4").exit_code == ExitCode.DONE
        MADE.append(answered.out.read_bytes())
    answered.out.write_bytes(MADE[0])
    return MADE[0]


@pytest.mark.parametrize("more, name", [
    (["--seed", "5"], "seed was 4 and is 5"), (["--top-k", "3"], "top_k"), (["--raw"], "prompts"),
    (["--method", "plain"], "method was 'speculative' and is 'plain'"), (["-K", "2"], "K was 5 and is 2"),
    (["--dtype", "int4"], "dtype was"), (["--logprobs", "1"], "logprobs was None and is 1"),
    (["--pair", "smollm2-ngram"], "drafter was"), (["--json-schema", "schema.json"], "schema was None"),
    (["--max-new-tokens", "4"], "max_new_tokens was 3 and is 4"),
], ids=lambda value: value[0] if isinstance(value, list) else "")
def test_a_file_of_another_run_is_refused_by_what_differs(answered, held, tmp_path, monkeypatch, more, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").write_text('{"enum": ["a"]}')
    done = answered("--seed", "4", *more)
    assert done.exit_code == ExitCode.BAD_INPUT and name in done.stderr, done.stderr
    assert f"{answered.out} holds answers of another run: " in done.stderr
    assert answered.out.read_bytes() == held


def test_the_same_command_goes_on_with_a_schema_and_with_a_lenience(answered, tmp_path):
    (tmp_path / "schema.json").write_text('{"enum": ["a", "b"]}')
    (tmp_path / "run.toml").write_text('[pair]\nname = "smollm2"\n[decoding]\nlenience = 0.5\nmax_new_tokens = 3\n')
    for words in (["--json-schema", str(tmp_path / "schema.json"), "--logprobs", "1", "--max-new-tokens", "9"],
                  ["--config", str(tmp_path / "run.toml")]):
        answered.out.unlink(missing_ok=True)
        assert answered(words=words).exit_code == ExitCode.DONE
        kept = answered.out.read_bytes()
        answered.out.write_bytes(kept.splitlines(keepends=True)[0])
        again = answered(words=words)
        assert again.exit_code == ExitCode.DONE and "1 of them from before" in again.stderr, again.stderr
        assert answered.out.read_bytes().count(b"\n") == 3


FOREIGN = {
    "notes": b"notes of mine\n", "notes without an end": b"notes of mine", "JSON": b'{"prompt_ids": []}\n',
    "JSON without an end": b'{"a": 1, "b": [2]}', "our key without an end": b'{"prompt_ids": [1, 2], "mine": 3}',
    "a brace": b"{", "half of JSON": b'{"prompt": "Hi"', "several lines": b'{\n "a": 1\n}', "bytes": b"\xff\n",
    "bytes without an end": b"\xff", "packed": gzip.compress(b"notes", mtime=0),
    "deep": b'{"prompt_ids": [' + b"[" * 99999,
    "a blank line": b"\n", "numbers": b"[1, 2]",
}


@pytest.mark.parametrize("held", FOREIGN.values(), ids=FOREIGN)
def test_a_file_with_anything_else_is_not_overwritten(no_model, questions, tmp_path, held):
    out = tmp_path / "answers.jsonl"
    out.write_bytes(held)
    done = run("generate", "--prompts", str(questions), "--out", str(out))
    assert done.exit_code == ExitCode.BAD_INPUT and f"{out} holds something else than answers" in done.stderr
    assert "(Line 1: " in done.stderr and done.stderr.count("\n") == 2 and out.read_bytes() == held


def test_the_prompts_are_not_overwritten_by_their_answers(no_model, questions):
    questions.write_bytes(before := questions.read_bytes().rstrip(b"\n"))
    link = questions.with_name("link")
    link.symlink_to(questions)
    for out in (questions, link):
        done = run("generate", "--prompts", str(questions), "--out", str(out))
        assert done.exit_code == ExitCode.BAD_INPUT and "the same file" in done.stderr
        assert questions.read_bytes() == before


@lru_cache
def an_answer() -> bytes:
    "A line as it is written, of no model."
    result = GenerationResult(
        prompt_ids=[1, 2], generated_ids=[3], text="three", finish_reason="length", method="plain", rounds=[],
        per_token_latencies=[0.1], round_latencies=[0.1], time_to_first_token=0.1, total_time=0.1, prefill_time_ms=1.0,
        draft_time_total_ms=0.0, verify_time_total_ms=0.0, sampling_time_total_ms=0.0, peak_memory_mb=None,
        run={"index": 0})
    return result.to_json().encode() + b"\n"


@given(st.integers(0, 2), st.binary() | LINES.map(str.encode) | st.integers(0, 600), st.data())
@settings(max_examples=tries(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_is_answers_or_one_line_and_is_left_as_it_is(tmp_path, whole, rest, data):
    "After whole answers: what is anybody's, the beginning of one, or one with a byte changed."
    line = an_answer()
    if isinstance(rest, int):
        changed = bytearray(line[:rest])
        if changed and data.draw(st.booleans()): changed[data.draw(st.integers(0, len(changed) - 1))] ^= 4
        rest = bytes(changed)
    out = tmp_path / "answers"
    out.write_bytes(line * whole + rest)
    try: found, size = answers.kept_answers(out)
    except errors.InputError as error: assert str(out) in str(error)
    else:
        assert len(found) >= whole and out.read_bytes()[:size].count(b"}") >= len(found)
        lost = out.read_bytes()[size:].lstrip(b"\n")
        assert not lost or lost.startswith(answers.BEGIN) or found and answers.BEGIN.startswith(lost)
    assert out.read_bytes() == line * whole + rest


@pytest.mark.parametrize("out, says", [
    ("/dev/full", "regular file"), ("/dev/null", "regular file"), ("pipe", "regular file"), ("folder", "directory"),
    ("nowhere/answers", "no folder"), ("loop", "loop"),
])
def test_what_cannot_hold_answers_is_one_line(no_model, questions, tmp_path, monkeypatch, out, says):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    done = run("generate", "--prompts", str(questions), "--out", out)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (ExitCode.BAD_INPUT, "", 1)
    assert says in done.stderr


def test_standard_output_is_no_file_for_answers(questions):
    done = process("generate", "--prompts", str(questions), "--out", "/dev/stdout")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (ExitCode.BAD_INPUT, "", 1)


def test_one_run_at_a_time_writes_into_a_file(no_model, questions, tmp_path):
    "Under any of its names."
    from specdec.models.files import growing
    out, link, hard = (tmp_path / name for name in ("answers", "link", "hard"))
    link.symlink_to(out)
    with growing(out):
        hard.hardlink_to(out)
        for name in (out, link, hard):
            done = run("generate", "--prompts", str(questions), "--out", str(name))
            assert done.exit_code == ExitCode.BAD_INPUT and "Another run is writing" in done.stderr


@pytest.mark.parametrize("meddle", [Path.unlink, lambda out: os.truncate(out, 0), lambda out: out.write_text("mine\n")],
                         ids=["removed", "emptied", "another file"])
@pytest.mark.parametrize("when", [1, 3], ids=["meanwhile", "after the last"])
def test_answers_to_a_file_that_is_changed_meanwhile_are_kept(answered, one_load, monkeypatch, meddle, when):
    pair, out = usual(one_load), answered.out
    results = pair.results
    def meddling(*given, **more):
        for n, each in enumerate(results(*given, **more), 1):
            yield each
            if n == when: meddle(out)
    monkeypatch.setattr(pair, "results", meddling)
    done = answered("--seed", "7", "--batch-size", "1")
    kept, = out.parent.glob("answers.kept-*.jsonl")
    assert done.exit_code == ExitCode.BAD_INPUT and done.stderr.endswith(".\n") and str(kept) in done.stderr
    assert [result.run["index"] for result in answers.kept_answers(kept)[0]] == list(range(min(when + 1, 3)))
    monkeypatch.setattr(pair, "results", results)
    kept.replace(out)
    assert answered("--seed", "7").exit_code == ExitCode.DONE


def test_each_answer_is_written_when_it_is_done(answered, one_load, monkeypatch):
    "The last one first; an interrupt keeps what is finished, and the same command answers the rest, in their order."
    pair, lines = usual(one_load), []
    results = pair.results
    def last_first(prompts, *given, **more):
        for i, result in sorted(results(prompts, *given, **more), reverse=True):
            if lines == [0, 1]: raise KeyboardInterrupt
            yield i, result
            lines.append(answered.out.read_bytes().count(b"\n") - 1)
    monkeypatch.setattr(pair, "results", last_first)
    stopped = answered("--seed", "7")
    assert stopped.exit_code == ExitCode.INTERRUPTED and lines == [0, 1] and "2 of 3 answers in" in stopped.stderr
    def order(): return [result.run["index"] for result in answers.kept_answers(answered.out)[0]]
    assert order() == [1, 2]
    monkeypatch.setattr(pair, "results", results)
    assert answered("--seed", "7").exit_code == ExitCode.DONE and order() == [0, 1, 2]


def test_an_error_keeps_the_answers_that_are_done(answered, one_load, monkeypatch):
    pair = usual(one_load)
    results = pair.results
    def fails(*given, **more):
        for i, result in results(*given, **more):
            if i == 2: raise errors.NumericalError("Step 1: NaN.")
            yield i, result
    monkeypatch.setattr(pair, "results", fails)
    assert answered("--batch-size", "1").exit_code == ExitCode.BAD_INPUT
    assert len(answers.kept_answers(answered.out)[0]) == 2


def test_a_full_disk_names_the_file_of_answers(answered, monkeypatch):
    def full(held, text): raise OSError(28, "No space left on device")
    monkeypatch.setattr(answers.GrowingFile, "append", full)
    done = answered()
    assert done.exit_code == ExitCode.BAD_INPUT and f"Error: {answered.out} can't be written" in done.stderr


def test_on_a_full_disk_it_is_said_that_the_same_command_goes_on(answered, one_load, monkeypatch):
    "Also where what is done came in another order and can't be sorted any more: a second file has no room."
    pair, kept = usual(one_load), []
    results = pair.results
    monkeypatch.setattr(pair, "results", lambda *given, **more: reversed(list(results(*given, **more))))
    append = answers.GrowingFile.append
    def full(held, text):
        if len(kept) == 2: raise OSError(28, "No space left on device")
        append(held, text)
        kept.append(text)
    @contextmanager
    def no_room(path):
        raise errors.ModelError("no second file")
        yield
    monkeypatch.setattr(answers.GrowingFile, "append", full)
    monkeypatch.setattr(answers, "written_whole", no_room)
    done = answered()
    assert len(kept) == 2 and done.exit_code == ExitCode.BAD_INPUT and "the same command goes on" in done.stderr


def test_what_comes_from_outside_is_text_in_a_table(capsys):
    "No markup, which would end in an error or colour what follows, and nothing that steers a terminal."
    cli.print_table(["name", "size"], [["llama[/x]", "[red]1"], ["\x1b]0;a\x07b", "[link=javascript:1]x[/link]"]])
    said = capsys.readouterr().out
    assert all(words in said for words in ("llama[/x]", "[red]1", "\\x1b]0;a\\x07b", "[link=javascript:1]x[/link]"))
    assert "\x1b" not in said


@pytest.mark.parametrize("terminal", [True, False])
def test_a_model_doesnt_steer_the_terminal_and_a_pipe_has_its_very_text(terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    cli.emit("a\x1b[2J\tb\n")
    assert capsys.readouterr().out == ("a\\x1b[2J\tb\n" if terminal else "a\x1b[2J\tb\n")


@pytest.mark.parametrize("number", [
    pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL,
], ids=["Ctrl-C", "kill -9"])
def test_a_stopped_process_leaves_what_it_had_finished(one_load, tmp_path, number):
    "A short answer waits behind a long one, and is on the disk before that ends."
    (tmp_path / "texts").write_text("Tell me a very long story.\nSay only: yes.\n")
    out = tmp_path / "answers"
    words = ["generate", "--prompts", str(tmp_path / "texts"), "--out", str(out), "--max-new-tokens", "80"]
    running = start(*words)
    while running.poll() is None and not (out.exists() and out.read_bytes().endswith(b"\n")): time.sleep(0.01)
    running.send_signal(number)
    errors = running.communicate(timeout=60)[1].decode()
    kept, size = answers.kept_answers(out)
    assert kept and (kept[0].run["index"] == 1 or len(kept) == 2) and running.returncode in (130, -9)
    if number == signal.SIGINT: assert "1 of 2 answers in" in errors and "Traceback" not in errors
    first = out.read_bytes()[:size]
    again = run(*words)
    assert again.exit_code == ExitCode.DONE and first.splitlines()[0] in out.read_bytes().splitlines(), again.stderr
    assert [result.run["index"] for result in answers.kept_answers(out)[0]] == [0, 1]


def test_results_are_told_in_the_order_of_the_prompts():
    told = []
    def results():
        for i in (2, 0, 3, 1):
            yield i, i
            told.append(list(seen))
    seen: list = []
    for result in answers.in_order(results()): seen.append(result)
    assert seen == [0, 1, 2, 3] and told == [[], [0], [0], [0, 1, 2, 3]]


def test_an_interrupt_ends_all_prompts(one_load, questions, monkeypatch):
    pair = usual(one_load)
    monkeypatch.setattr(pair, "drafter", interrupted(after=1))
    done = run("generate", "--prompts", str(questions), "--json", "--batch-size", "2")
    found = [GenerationResult.from_json(line) for line in done.stdout.splitlines()]
    assert done.exit_code == ExitCode.INTERRUPTED and 1 <= len(found) <= 2  # the third had not begun
    assert all(result.finish_reason == "interrupted" and result.num_tokens for result in found)
    done = run("generate", "--prompts", str(questions), "--out", str(out := questions.with_name("answers.jsonl")))
    assert done.exit_code == ExitCode.INTERRUPTED and out.read_bytes() == b""  # what is unfinished is asked again
    assert "0 of 3 answers in" in done.stderr


# Any two models

@pytest.fixture
def loads(monkeypatch, kept=lru_cache(loading.load)):
    "What is loaded: name, use and revision; each model once in a test."
    asked = []
    def load(name, device="auto", dtype="auto", use="target", revision=None):
        asked.append((name, use, revision))
        return kept(name, device, dtype, use)
    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(pairs, "load", load)
    yield asked
    kept.cache_clear()


def ids_of(*words) -> list[int]:
    done = run("generate", "The cat sat on the mat. The cat", "--raw", "--max-new-tokens", "8", "--json", *words)
    assert done.exit_code == ExitCode.DONE, done.stderr
    return json.loads(done.stdout)["generated_ids"]


def drafted_by(monkeypatch) -> list:
    "The drafters of the pairs that generate."
    seen, generate = [], pairs.Pair.generate
    def noticed(pair, *given, **more):
        seen.append(pair.drafter)
        return generate(pair, *given, **more)
    monkeypatch.setattr(pairs.Pair, "generate", noticed)
    return seen


def test_any_target_with_any_draft(loads, monkeypatch):
    folder, small = str(hub.fetch()), str(shipped("smollm2-draft"))
    seen = drafted_by(monkeypatch)
    float32 = ("--dtype", "float32", "--target", folder)
    expected = ids_of(*float32, "--draft", "none")
    for more in (["--draft", "lookup"], ["--draft", folder], ["--drafter", small], []):
        assert ids_of(*float32, *more) == expected
    kinds = [type(drafter).__name__ for drafter in seen]
    assert kinds[:4] == ["NoDrafter", "SuffixDrafter", "ModelDrafter", "TemperatureScaledDrafter"]
    assert type(seen[4]) is type(pairs.Pair(loading.load(folder, dtype="float32")).drafter)
    assert loads[:4] == [(folder, "plain", None), (folder, "target", None), (folder, "target", None),
                         (folder, "draft", None)]


def test_a_trained_drafter_alone_or_beside_lookup(loads, monkeypatch):
    "With --target it drafts alone; the default pair looks up in the text as well."
    seen, small = drafted_by(monkeypatch), str(shipped("smollm2-draft"))
    for more in (["--target", "smollm2"], []):
        assert ids_of("--dtype", "float32", *more, "--drafter", small)
    alone, both = seen
    assert type(alone).__name__ == "TemperatureScaledDrafter" and type(both).__name__ == "HybridDrafter"


def test_a_loaded_model_is_warm_before_its_speed_is_told(monkeypatch):
    "The first run pays for what is done once; the second is the one that is told."
    made, generate = [], pairs.Pair.generate
    def noticed(pair, *given, **more):
        made.append((more["max_new_tokens"], generate(pair, *given, **more)))
        return made[-1][1]
    monkeypatch.setattr(pairs.Pair, "generate", noticed)
    report = cli.load_report("smollm2", "cpu", "float32", 5)
    assert [n for n, _ in made] == [2, 5] and report["num_tokens"] == 5
    assert report["tokens_per_second"] == made[1][1].tokens_per_second


def test_the_dtype_of_a_pair_is_told():
    assert "dtype        float16, on a GPU" in run("pairs", "gpt2_dev").stdout
    assert "dtype" not in run("pairs", "smollm2").stdout
    assert json.loads(run("pairs", "llama3_self", "--json").stdout)["llama3_self"]["dtype"] == "float16"


def test_compare_any_two_models(loads):
    folder = str(hub.fetch())
    words = ["--target", folder, "--draft", folder, "--dtype", "float32", "--max-new-tokens", "6", "--json"]
    done = run("compare", "Hi", *words)
    assert done.exit_code == ExitCode.DONE, done.stderr
    found = json.loads(done.stdout)
    assert found["texts_identical"]
    first = found["speculative"]["rounds"][0]
    assert first["accepted"] == len(first["drafted"]) > 0  # it drafts for itself


def test_a_draft_is_looked_for_before_the_target_is_loaded(loads):
    done = run("generate", "Hi", "--target", "smollm2", "--draft", "nothing-like-it")
    assert done.exit_code == ExitCode.BAD_INPUT and "nothing-like-it" in done.stderr and not loads


def test_a_revision_reaches_the_loader(loads):
    for more in (["--target", "smollm2", "--draft", "lookup"], ["--pair", "smollm2-ngram"]):
        run("generate", "Hi", "--revision", "main", "--max-new-tokens", "1", *more)
    assert [revision for name, use, revision in loads] == ["main", "main"]


# Bad input


@pytest.mark.parametrize(
    "words, named",
    [
        (["generate", ""], "empty"), (["generate", " \n"], "empty"), (["compare", ""], "empty"),
        (["generate", "-"], "empty"), (["generate", "\udcff"], "UTF-8"),
        (["generate", "Hi", "--pair", "smolm2"], "smollm2"), (["compare", "Hi", "--pair", "llama"], "specdec pairs"),
        (["generate", "Hi", "--top-p", "0"], "top_p"), (["generate", "Hi", "--temperature", "inf"], "temperature"),
        (["generate", "Hi", "--stop", ""], "stop"), (["generate", "Hi", "--seed", str(2**70)], "seed"),
        (["generate", "Hi", "--dtype", "float7"], "float7"), (["generate", "Hi", "--device", "abacus"], "abacus"),
        (["bench", "peers", "--out", "/nowhere/at/all.jsonl"], "/nowhere/at/all.jsonl"),
        (["generate"], "--prompts FILE"),
        (["generate", "Hi", "--prompts", __file__], "one of the two"),
        (["generate", "Hi", "--out", "answers.jsonl"], "--prompts FILE"),
        (["generate", "Hi", "--pair", "smollm2", "--target", "smollm2"], "--pair"),
        (["compare", "Hi", "--pair", "smollm2", "--target", "smollm2"], "--pair"),
        (["generate", "Hi", "--draft", "lookup"], "--target"),
        (["compare", "Hi", "--target", "smollm2", "--draft", "lookup", "--drafter", "."], "--drafter"),
        (["compare", "Hi", "--target", "smollm2", "--draft", "none"], "--draft none"),
        (["generate", "Hi", "--target", "smollm2", "--device", "abacus"], "abacus"),
        (["generate", "Hi", "--logprobs", "1"], "add --json"),
    ],
)
def test_our_errors_are_one_line_and_exit_code_2(no_model, words, named):
    done = run(*words)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (ExitCode.BAD_INPUT, "", 1)
    assert done.stderr.startswith("Error: ") and named in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "Hi", "-K", "0"], ["generate", "Hi", "-K", "two"], ["generate", "Hi", "--max-new-tokens", "0"],
        ["generate", "Hi", "--temperature", "-1"], ["generate", "Hi", "--temperature", "nan"],
        ["generate", "Hi", "--top-k", "0"], ["generate", "Hi", "--top-p", "1.5"],
        ["generate", "Hi", "--logprobs", "-1"],
        ["generate", "Hi", "--method", "magic"], ["compare"], ["generat"], ["pairs", "--rebuild"],
        ["bench", "peers", "--repeats", "0"], ["bench", "peers", "--count", "16"],
    ],
)
def test_usage_errors_are_exit_code_2(no_model, words):
    done = run(*words)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (ExitCode.BAD_INPUT, "", 1)
    assert done.stderr.startswith("Error: ") and done.stderr.endswith(" -h.)\n")


NAMES = {"of nobody": "~nouser/x", "of 5,000 characters": "x" * 5000}
NAMED = [
    ["generate", "Hi", "--pair"], ["generate", "Hi", "--drafter"], ["generate", "--prompts"],
    ["distill", "--out", "new", "--target"],
    ["distill", "--out", "new", "--data"], ["distill", "--out", "new", "--prompts"],
    ["distill", "--out", "new", "--from"], ["bench", "drafters", "--head"],
    ["prompts", "--source"], ["prompts", "--target"], ["audit"],
    ["follow"], ["follow", "smollm2-head", "--served"], ["follow", "smollm2-head", "--prompts"],
]


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("words", NAMED, ids=" ".join)
def test_names_that_nothing_has_are_one_line(no_model, tmp_path, monkeypatch, words, name):
    monkeypatch.chdir(tmp_path)
    done = run(*words, name)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (ExitCode.BAD_INPUT, "", 1)
    assert len(done.stderr) < 1000


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("words", [["--target"], ["--target", ".", "--draft"]], ids=" ".join)
def test_models_that_nothing_has_are_one_line(words, name):
    done = run("generate", "Hi", *words, name)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (ExitCode.BAD_INPUT, "", 1)
    assert name[:20] in done.stderr and len(done.stderr) < 1000


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_home_that_cannot_be_is_one_line(monkeypatch, name):
    monkeypatch.setenv("SPECDEC_HOME", name)
    done = run("fetch")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (ExitCode.BAD_INPUT, "", 1)


def test_a_prompt_that_fills_the_context_is_one_line(one_load):
    done = run("generate", "-", "--raw", stdin="word " * 9000)
    assert done.exit_code == ExitCode.BAD_INPUT and "context" in done.stderr and done.stderr.count("\n") == 1


def test_no_traceback_in_a_real_process():
    done = process("generate", "Hi", "--top-p", "0")
    assert (done.returncode, done.stdout) == (ExitCode.BAD_INPUT, "") and "Traceback" not in done.stderr


def test_a_bug_is_exit_code_1_with_a_traceback(monkeypatch):
    monkeypatch.setattr(registry, "list_pairs", lambda: 1 / 0)
    done = CliRunner().invoke(app, ["pairs"])
    assert done.exit_code == ExitCode.UNEXPECTED and isinstance(done.exception, ZeroDivisionError)


def test_nan_logits_are_one_line(one_load, monkeypatch):
    # a drafter that asks for logits only
    target = usual(one_load, "smollm2-ngram").target
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda *words, **more: forward(*words, **more) * float("nan"), raising=False)
    done = run("generate", "Hi", "--pair", "smollm2-ngram")
    assert done.exit_code == ExitCode.BAD_INPUT and "NaN" in done.stderr and done.stderr.count("\n") == 1


# A damaged model

@pytest.fixture
def damaged(tmp_path, monkeypatch):
    "A home whose default model has one file of the wrong length; the rest are links."
    whole = hub.fetch()
    folder = tmp_path / "smollm2"
    folder.mkdir()
    for file in whole.iterdir(): (folder / file.name).symlink_to(file)
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_bytes((whole / "tokenizer_config.json").read_bytes()[:-1])
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    return folder


@pytest.mark.parametrize("words", [["generate", "Hi"], ["compare", "Hi"], ["fetch"]], ids=" ".join)
def test_damage_is_named_with_the_command_that_repairs_it(damaged, words):
    done = run(*words)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (ExitCode.BAD_INPUT, "", 1)
    assert "tokenizer_config.json" in done.stderr and "specdec fetch --rebuild" in done.stderr


class Terminal:
    def isatty(self): return True


def test_somebody_at_a_terminal_is_asked_and_the_model_rebuilt(damaged, monkeypatch):
    def rebuild(rebuild):
        assert rebuild
        (damaged / "tokenizer_config.json").write_bytes(whole)
        return damaged
    whole = (damaged / "config.json").resolve().with_name("tokenizer_config.json").read_bytes()
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(hub, "fetch", rebuild)
    monkeypatch.setattr(cli.typer, "confirm", lambda *question, **more: True)
    assert cli.or_rebuild(lambda: hub.check_folder(damaged)) == hub.check_folder(damaged)


def test_somebody_who_declines_gets_exit_code_2(damaged, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(cli.typer, "confirm", lambda *question, **more: False)
    with pytest.raises(cli.typer.Exit) as stopped: cli.or_rebuild(lambda: hub.check_folder(damaged))
    assert stopped.value.exit_code == ExitCode.BAD_INPUT


# compare

def table_of(text: str) -> list[list[str]]:
    "The cells of a table's rows; what was folded into a second line is put together again."
    lines = [line.strip("│ ").split("│") for line in text.splitlines() if line.startswith("│")]
    rows = []
    for cells in ([cell.strip() for cell in line] for line in lines):
        cells += [""] * (3 - len(cells))
        if cells[0] or not rows: rows.append(cells)
        else: rows[-1] = [" ".join(filter(None, both)) for both in zip(rows[-1], cells)]
    return rows


def test_compare_in_float32(one_load):
    words = ["compare", "Repeat this: one two three one two three.", "--dtype", "float32", "--max-new-tokens", "12"]
    done = run(*words)
    assert done.exit_code == ExitCode.DONE
    first, second = done.stdout.split("── speculative decoding ──")
    assert first.startswith("── plain decoding ──\n")
    assert all(
        word in second
        for word in ("tokens", "seconds", "tokens/s", "acceptance rate", "tokens per round", "speed-up", "texts")
    )
    rows = {row[0]: row[1:] for row in table_of(second)}
    assert rows["device"] == ["cpu", "cpu"] and rows["loop"][0] in ("host", "device") and rows["drafter"][1]
    found = json.loads(run(*words, "--json").stdout)
    plain, speculative = (
        GenerationResult.from_json(json.dumps(found[method])) for method in ("plain", "speculative")
    )
    assert (
        plain.text in first
        and speculative.text in second
        and (plain.method, speculative.method) == ("plain", "speculative")
    )
    assert found["speedup"] == speculative.tokens_per_second / plain.tokens_per_second
    assert [rows["loop"], rows["device"]] == [[plain.loop, speculative.loop], [plain.device, speculative.device]]
    assert rows["drafter"] == ["", speculative.drafter] and plain.drafter is None
    difference = found["difference"]
    assert found["texts_identical"] or difference["gap"] < 1e-4, difference


def test_compare_of_samples_promises_one_text_only_where_it_is_asked_for(one_load):
    words = ["compare", "Hi", "--temperature", "1", "--seed", "3", "--max-new-tokens", "4"]
    assert "Two draws from one distribution" in run(*words).stdout
    found = json.loads(run(*words, "--json").stdout)
    assert found["texts_identical"] is None and found["difference"] is None
    assert "The texts are identical" in run(*words, "--same-text").stdout
    found = json.loads(run(*words[:4], "--max-new-tokens", "4", "--same-text", "--json").stdout)  # a seed of its own
    assert found["texts_identical"] is True
    assert found["plain"]["settings"]["seed"] == found["speculative"]["settings"]["seed"]


def test_where_texts_part_is_explained(one_load):
    pair = one_load("smollm2", "auto", "float32")
    plain = pair.generate("The capital of France is", max_new_tokens=6, method="plain")
    other = GenerationResult.from_json(plain.to_json())
    other.generated_ids[4] += 1
    found = answers.comparison(plain, other, pair)
    assert found["texts_identical"] is False and found["difference"]["token"] == 4
    assert found["difference"]["gap"] > 1e-4 > found["difference"]["rounding_step"]
    said = answers.verdict(False, found["difference"])
    assert "after 4 equal tokens" in said and "float32" in said
    assert "--dtype float32" in answers.verdict(False, found["difference"] | {"dtype": "bfloat16"})


@pytest.mark.parametrize(
    "a, b, at", [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([2], [], 0)]
)
def test_first_difference(a, b, at):
    assert answers.first_difference(a, b) == at == answers.first_difference(b, a)


# pairs, fetch

def test_pairs_lists_the_registry():
    assert set(json.loads(run("pairs", "--json").stdout)) == set(registry.list_pairs())
    assert all(name in run("pairs").stdout for name in registry.list_pairs())


def test_pairs_adds_up_a_target_and_its_draft():
    "Parameters and gigabytes, in the pair's own dtype; in the table and of one pair."
    def cells(name):
        "The row's parts, as they stand in a wide table."
        rows = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["pairs"]).stdout.splitlines()
        at = next(i for i, line in enumerate(rows) if name in line)
        return [[cell.strip() for cell in line.split("│")[1:3]] for line in rows[at:at + 3]]
    assert cells("gpt2_dev") == [
        ["gpt2_dev", "openai-community/gpt2-xl: 1.56 B, 3.1 GB"],
        ["float16", "+ openai-community/gpt2: 0.12 B, 0.2 GB"], ["", "= 1.68 B, 3.4 GB"]]
    assert [cell[1].split(": ")[1] for cell in cells("llama3_self")[:2]] == ["8.03 B, 16.1 GB", "8.03 B, 5.7 GB"]
    alone = cells("smollm2-skip")
    assert alone[0][1] == "smollm2: 0.13 B, 0.3 GB" and not alone[2][1].startswith("=")  # its own layers, once
    needed = registry.memory_mb(registry.get_pair("gpt2_dev"), "float16")
    assert needed["target"] + needed["draft"] == needed["total"] == pytest.approx(3364, abs=5)
    said = run("pairs", "gpt2_dev").stdout
    assert "in float16   3.1 + 0.2 = 3.4 GB for the weights" in said and "both         1,682," in said


def test_fetch_says_what_is_there():
    found = json.loads(run("fetch", "--json").stdout)
    assert (
        found["model"] == "smollm2"
        and found["folder"] == str(hub.fetch())
        and found["digest"] == hub.check_folder(hub.fetch())
    )
    assert "ready" in run("fetch").stdout


# prove

@pytest.mark.slow  # each line and each mutant is also a test of proof and gallery
def test_prove_covers_every_size_and_finds_no_error(no_model):
    found = run("prove", "--json")
    report = json.loads(found.stdout)
    assert found.exit_code == ExitCode.DONE and report["holds"] is True
    def sizes(what): return {(line["K"], line["V"]) for line in report["lines"] if line["what"] == what}
    few = {"speculate, Branches": {(1, 2), (2, 3), (3, 3), (5, 2)},
           "speculate_batch, three sequences": {(1, 2), (2, 3)}}
    for what in few.keys() | {line["what"] for line in report["lines"]}:
        assert sizes(what) == few.get(what, {(K, V) for K in (1, 2, 3, 4) for V in (2, 3, 4)})
    assert {line["error"] for line in report["lines"]} == {"0"}
    assert {line["what"] for line in report["lines"]} > {
        "speculative_sampling", "sample_and_match", "block_verification", "speculate, ModelDrafter",
        "speculate, NGramDrafter", "recursive_rejection",
    }
    assert len(report["mutants"]) == len(gallery.GALLERY + gallery.CANDIDATES + gallery.SHARED) > 45
    assert all(mutant["caught"] for mutant in report["mutants"])
    assert all(mutant["raised"] or Fraction(mutant["error"]) > 0 for mutant in report["mutants"])


@pytest.fixture
def short_proof(monkeypatch):
    "Few laws and few mutants; a list of rules that the test may change."
    rules = [speculative_sampling]
    monkeypatch.setattr(
        gallery, "prove_lines",
        lambda: (line for rule in rules for line in prove_rule(rule, seeds=1, sizes=[(1, 2), (2, 3)])),
    )
    monkeypatch.setattr(gallery, "GALLERY", gallery.GALLERY[:2])
    monkeypatch.setattr(gallery, "CANDIDATES", gallery.CANDIDATES[:1])
    monkeypatch.setattr(gallery, "SHARED", gallery.SHARED[:1])
    return rules


def test_prove_shows_a_table(short_proof):
    found = run("prove")
    assert (
        found.exit_code == ExitCode.DONE
        and "speculative_sampling" in found.stdout
        and "4 of 4 broken decoders caught" in found.stdout
    )
    # a narrow terminal folds them
    assert all(word in found.stdout for broken in gallery.GALLERY + gallery.CANDIDATES + gallery.SHARED
               for word in broken.name.split())


def test_prove_fails_if_a_distribution_differs(short_proof):
    short_proof.append(gallery.GALLERY[0].verify)
    assert run("prove").exit_code == ExitCode.UNEXPECTED
    found = run("prove", "--json")
    assert found.exit_code == ExitCode.UNEXPECTED and json.loads(found.stdout)["holds"] is False


def test_prove_fails_if_a_broken_decoder_gets_through(short_proof, monkeypatch):
    monkeypatch.setattr(gallery, "GALLERY", [gallery.Broken("not broken at all", "Everything right.", "our own")])
    found = run("prove")
    assert (
        found.exit_code == ExitCode.UNEXPECTED
        and "not caught" in found.stdout
        and "2 of 3 broken decoders caught" in found.stdout
    )


# Signals

def start(*words: str) -> subprocess.Popen:
    "A real process that hears Ctrl-C, also where the test run itself was started in the background and so ignores it."
    return subprocess.Popen(
        [sys.executable, "-m", "specdec", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=PLAIN,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_interrupt_keeps_the_text_and_exits_with_130():
    running = start("generate", "Tell me a very long story.", "--max-new-tokens", "4000")
    first = running.stdout.read(10)
    running.send_signal(signal.SIGINT)
    rest, errors = running.communicate(timeout=60)
    assert running.returncode == ExitCode.INTERRUPTED
    assert len(first) == 10 and rest.endswith(b"\n")
    assert errors.decode().startswith("speculative: ") and b"(interrupted)" in errors and b"Traceback" not in errors


TOLD = """
import sys
from specdec import __main__
install, told = __main__.signal.signal, []
def listening(*way):
    install(*way)
    if not told: sys.stderr.write("."), sys.stderr.flush(), told.append(way)
__main__.signal.signal = listening
sys.argv[0] = "specdec"
__main__.main()
"""
# when Ctrl-C comes, s after the command has begun to listen: most of this time modules are imported
MOMENTS = {"--help": [0, 0.15], "generate": [0, 0.7, 1.8, 3.2]}
COMMAND = {"--help": ["--help"], "generate": ["generate", "Hi", "--max-new-tokens", "1000", "--ignore-eos"]}

@pytest.mark.parametrize("name, delay", [
    *((name, delay) for name, delays in MOMENTS.items() for delay in delays),
    *(pytest.param(name, n / 50 * most, marks=pytest.mark.slow)
      for name, most in (("--help", 0.5), ("generate", 6)) for n in range(50)),
])
def test_an_interrupt_at_any_time_is_one_quiet_line(name, delay):
    running = subprocess.Popen(
        [sys.executable, "-c", TOLD, *COMMAND[name]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=PLAIN,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    assert running.stderr.read(1) == b"."
    time.sleep(delay)
    running.send_signal(signal.SIGINT)
    said = running.communicate(timeout=100)[1].decode()
    assert "Traceback" not in said and "Error" not in said and "ignored" not in said, said
    if running.returncode == 0: assert name == "--help"  # it had ended
    else: assert running.returncode == ExitCode.INTERRUPTED and (said == "Interrupted.\n" or "(interrupted)" in said)


def test_an_interrupt_while_help_is_printed_gets_its_line(monkeypatch, capsys):
    def printed(*given, **more): raise KeyboardInterrupt
    monkeypatch.setattr("typer.rich_utils.rich_format_help", printed)
    with pytest.raises(SystemExit) as ended: cli.app(["--help"])
    assert ended.value.code == ExitCode.INTERRUPTED and capsys.readouterr().err == "Interrupted.\n"


def test_an_interrupt_while_transformers_reads_a_config_is_none_of_the_config(monkeypatch):
    "Also where a library makes another error of it."
    from transformers import AutoConfig
    def read(*given, **more):
        try: signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt: raise ImportError("cannot import name 'AutoConfig'") from None
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        folder = hub.find_model("smollm2")
        monkeypatch.setattr(AutoConfig, "from_pretrained", read)
        for ask in (lambda: loading.read_config(folder), lambda: loading.memory_needed(folder)):
            with pytest.raises(KeyboardInterrupt): ask()
    finally: signal.signal(signal.SIGINT, handler)


def interrupted(after: int):
    "A drafter that is interrupted at its so-many-th proposal."
    from specdec.drafters.base import WrapperDrafter, WrapperState
    from specdec.drafters.lookup import NGramDrafter

    class InterruptedState(WrapperState):
        def propose(self, *arguments):
            drafter.calls += 1
            if drafter.calls >= after: raise KeyboardInterrupt
            return super().propose(*arguments)

    class Interrupted(WrapperDrafter):
        calls = 0
        def wrap(self, inner, tokens, eos_ids): return InterruptedState(inner)
    drafter = Interrupted(NGramDrafter())
    return drafter


def test_interrupted_json_is_still_a_result(one_load, monkeypatch):
    pair = usual(one_load)
    monkeypatch.setattr(pair, "drafter", interrupted(after=3))
    done = run("generate", "Tell me a long story.", "--json")
    result = GenerationResult.from_json(done.stdout)
    assert done.exit_code == ExitCode.INTERRUPTED and result.finish_reason == "interrupted" and result.num_tokens >= 3


def test_interrupted_compare_shows_what_there_is(one_load, monkeypatch):
    pair = usual(one_load)
    monkeypatch.setattr(cli, "WARM_UP", 1)  # one token takes no proposal
    for words in ([], ["--json"]):
        monkeypatch.setattr(pair, "drafter", interrupted(after=3))
        done = run("compare", "Tell me a long story.", "--max-new-tokens", "12", *words)
        assert done.exit_code == ExitCode.INTERRUPTED
        if words:
            assert {m: r["finish_reason"] for m, r in json.loads(done.stdout).items()} == {
                "plain": "length", "speculative": "interrupted",
            }
        else:
            assert "plain: 12 tokens" in done.stderr and "(interrupted)" in done.stderr


@pytest.mark.parametrize(
    "words, asked",
    [
        (["generate", "Hi", "--method", "plain"], ["plain"]), (["generate", "Hi"], ["speculative"]),
        (["compare", "Hi"], ["speculative", "plain"]),
    ],
)
def test_plain_decoding_gets_the_model_that_is_loaded_for_it(words, asked, one_load, monkeypatch):
    "On a processor where the layout of the weights matters, nobody is compared with a plain loop that was made slow."
    seen = []
    usual(one_load)
    monkeypatch.setattr(loading, "fits_plain", lambda model: False)
    monkeypatch.setattr(
        pairs,
        "load_pair",
        lambda *given, method, **more: (seen.append(method), one_load(*given, method=method, **more))[1],
    )
    assert run(*words, "--max-new-tokens", "2").exit_code == ExitCode.DONE and seen == asked
    if words[0] == "compare":
        monkeypatch.setattr(loading, "fits_plain", lambda model: True)
        # one model does both
        assert run(*words, "--max-new-tokens", "2").exit_code == ExitCode.DONE and seen == [*asked, "speculative"]


def test_a_trained_drafter_by_its_folder(one_load):
    folder = str(shipped("smollm2-head"))
    given, own = (
        run("generate", "Hi", "--pair", pair, "--max-new-tokens", "8", "--json", *more)
        for pair, more in (("smollm2-draft", ["--drafter", folder]), ("smollm2-head", []))
    )
    a, b = (json.loads(done.stdout) for done in (given, own))
    assert a["generated_ids"] == b["generated_ids"] and a["rounds"] == b["rounds"]
    missing = run("generate", "Hi", "--drafter", folder + "-nowhere")
    assert missing.exit_code == ExitCode.BAD_INPUT and "nowhere" in missing.stderr.replace("\n", "")


def test_a_reader_that_goes_away_is_no_crash():
    running = start("generate", "Tell me a very long story.", "--max-new-tokens", "4000")
    running.stdout.read(5)
    running.stdout.close()
    errors = running.stderr.read()
    assert running.wait(timeout=60) == ExitCode.NO_READER == 128 + signal.SIGPIPE and errors == b""


def shell(line: str) -> subprocess.CompletedProcess:
    "What a shell makes of a line."
    program = f"set -o pipefail; {line.replace('specdec', f'{sys.executable} -m specdec')}"
    return subprocess.run(["bash", "-c", program], capture_output=True, text=True, env=PLAIN)


@pytest.mark.parametrize(
    "line, code, says",
    [
        ("specdec --version <&-", ExitCode.DONE, ""), ("specdec -h <&- 2>&-", ExitCode.DONE, ""),
        ("specdec pairs >&-", ExitCode.BAD_INPUT, "Standard output can't be"),
        ("specdec --version >&- 2>&-", ExitCode.BAD_INPUT, ""),
        ("specdec generate - <&-", ExitCode.BAD_INPUT, "Standard input can't be read"),
        ("specdec generate Hi -K 0 2>&-", ExitCode.BAD_INPUT, ""),
        ("specdec -h >/dev/full", ExitCode.BAD_INPUT, "No space left"),
        ("specdec --version >/dev/full", ExitCode.BAD_INPUT, "No space left"),
        ("specdec --version | true", ExitCode.NO_READER, ""), ("specdec -h | true", ExitCode.NO_READER, ""),
    ],
)
def test_streams_that_are_closed_full_or_gone(line, code, says):
    "One line or none, never a traceback, and nothing is said twice when Python ends."
    if "/dev/full" in line and not Path("/dev/full").exists(): pytest.skip("this system has no /dev/full")
    done = shell(line)
    assert done.returncode == code, done.stderr
    if says: assert done.stderr.startswith("Error: ") and says in done.stderr and done.stderr.count("\n") == 1
    else: assert done.stderr == ""
    if code == ExitCode.DONE: assert done.stdout


def test_a_closed_stream_does_not_lend_its_number_to_a_file():
    "What is printed must not end in a file that happens to be opened next."
    code = """import os, sys
from specdec.app.cli import replace_closed_streams
replace_closed_streams()
assert os.open(os.devnull, os.O_RDONLY) > 2
print("lost", file=sys.stderr)
try: print("refused", flush=True)
except OSError: os._exit(7)"""
    done = subprocess.run(["bash", "-c", f"{sys.executable} -c '{code}' <&- >&- 2>&-"])
    assert done.returncode == 7


def test_a_full_disk_ends_an_answer_with_one_line():
    if not Path("/dev/full").exists(): pytest.skip("this system has no /dev/full")
    done = shell("specdec generate Hi --max-new-tokens 4 > /dev/full")
    assert done.returncode == ExitCode.BAD_INPUT
    assert done.stderr == "Error: Standard output can't be read or written: No space left on device.\n"


def test_an_error_without_a_name_is_not_blamed_on_standard_output(monkeypatch):
    def full(*given): raise OSError(28, "No space left on device")
    monkeypatch.setattr(registry, "list_pairs", full)
    done = run("pairs")
    assert done.exit_code == ExitCode.BAD_INPUT and done.stderr.count("\n") == 1
    assert "Standard output" not in done.stderr and "No space left on device" in done.stderr


def test_ctrl_c_at_the_question_is_an_interrupt(damaged, monkeypatch):
    monkeypatch.setattr(cli, "or_rebuild", lambda action: cli.typer.confirm("Rebuild it now?", err=True))
    assert run("fetch", stdin="").exit_code == ExitCode.INTERRUPTED


def test_every_exit_code_is_in_the_help():
    said = " ".join(run("-h").stdout.split())
    assert all(f"{code.value} " in said.split("Exit codes:")[1] for code in ExitCode)


@pytest.mark.slow
def test_text_is_utf_8_whatever_the_system_says():
    "A pipe in a C locale, as in a bare container: Python would take both ends for ASCII."
    plain = PLAIN | dict(LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    def piped(*words, **more):
        return subprocess.run([sys.executable, "-m", "specdec", *words], capture_output=True, env=plain, **more)

    assert "┏" in piped("pairs").stdout.decode()
    asked = "Say “né”"
    result = json.loads(piped("generate", "-", "--raw", "--json", "--max-new-tokens", "1", input=asked.encode()).stdout)
    assert result["prompt_ids"] == hub.load_tokenizer(hub.fetch())(asked)["input_ids"]


@pytest.mark.parametrize("encoding, shown", [
    ("ascii", "😀 é\n".encode()),  # typer takes that for a mistake
    ("latin-1", b"\\U0001f600 \xe9\n"), ("latin-1:strict", b"\\U0001f600 \xe9\n"),
    ("utf-8", "😀 é\n".encode()),
])
def test_what_the_encoding_has_not_got_is_written_as_its_number(encoding, shown):
    code = "import typer; from specdec.app import cli; cli.app = lambda: typer.echo('😀 é'); cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=PLAIN | {"PYTHONIOENCODING": encoding})
    assert (done.returncode, done.stdout, done.stderr) == (0, shown, b"")


def test_what_is_no_utf_8_is_known_before_the_work(no_model, tmp_path):
    "A stop string, a prompt, a value of a configuration; the file's name may be what it is."
    from specdec.models import files
    done = run("generate", "Hi", "--stop", os.fsdecode(b"a\xff"))
    assert done.exit_code == ExitCode.BAD_INPUT and "half a character" in done.stderr and done.stderr.count("\n") == 1
    for text in ('a: "\\ud800"', '"\\udc00": 1', 'a: [{b: "x\\udfff"}]'):
        with pytest.raises(errors.InputError, match="line 1: .*half a character"): files.parse_lines(text, ".yaml")
    assert files.parse_lines('a: "\\U0001f600"', ".yaml")[0] == {"a": "😀"}


def test_answers_go_to_a_file_whose_name_is_no_utf_8(answered, tmp_path):
    answered.out = tmp_path / os.fsdecode(b"a\xff")
    done = process("generate", "--prompts", str(tmp_path / "questions.jsonl"), "--out", str(answered.out),
                   "--max-new-tokens", "2")
    assert done.returncode == ExitCode.DONE and "3 answers in " in done.stderr and answered.out.is_file(), done.stderr


@pytest.mark.parametrize(
    "target, says",
    [
        ("smollm2", "specdec compare PROMPT --drafter 'my drafter'"),
        ("Qwen/Qwen2.5-7B-Instruct", "specdec compare PROMPT --drafter 'my drafter' --pair qwen2.5"),
        ("my target", "specdec compare PROMPT --drafter 'my drafter' --target 'my target'"),
    ],
)
def test_how_to_decode_with_a_trained_drafter(target, says):
    assert cli.decoded_with(Path("my drafter"), target) == says


def test_how_to_decode_where_no_pair_has_that_target():
    "The line that is said runs."
    said = cli.decoded_with(shipped("smollm2-draft"), str(hub.fetch()))
    done = run(*shlex.split(said.replace("PROMPT", "Hi"))[1:], "--max-new-tokens", "2", "--json")
    assert done.exit_code == ExitCode.DONE and len(json.loads(done.stdout)["speculative"]["generated_ids"]) == 2


def test_what_a_training_run_is_told(tmp_path, monkeypatch):
    "Every folder and file of the command reaches the configuration; what excludes each other is bad input."
    from specdec.train import export as training
    asked, told = tmp_path / "asked.jsonl", []
    asked.write_text('{"prompt": "Why?"}')
    (tmp_path / "before").mkdir()
    monkeypatch.setattr(training, "distill", lambda config: told.append(config) or Path(config.out))
    command = [
        "distill", "--out", str(tmp_path / "new"), "--target", str(tmp_path), "--kind", "lm", "--from",
        str(tmp_path / "before"), "--keep-states", str(tmp_path / "states"),
    ]
    assert run(*command, "--prompts", str(asked)).exit_code == 0
    assert run(*command, "--data", str(tmp_path)).exit_code == 0
    found = [(config.prompts, config.data, config.weights, config.keep_states) for config in told]
    kept = (str(tmp_path / "before"), str(tmp_path / "states"))
    assert found == [(str(asked), None, *kept), (None, str(tmp_path), *kept)]
    for wrong in (
        ("--prompts", str(asked), "--data", str(tmp_path)), ("--prompts", str(tmp_path / "nowhere")),
        ("--data", str(tmp_path / "nowhere")),
    ):
        assert run(*command, *wrong).exit_code == ExitCode.BAD_INPUT
    assert len(told) == 2


# Loading

def test_load_says_what_a_model_is(monkeypatch):
    "Loaded once in four bits, told twice."
    done = run("load", "smollm2", "--dtype", "int4", "--device", "cpu", "--n-tokens", "2", "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == ExitCode.DONE and report["num_tokens"] == 2
    assert report["dtype"] == "int4 (79 % of the weights)"
    four = report["int4"]
    assert (four["matrices"], four["of"]) == (120, 121) and .78 < four["share"] < .80
    beside = devices.pick_dtype().itemsize  # what isn't in four bits
    assert four["step_mb"] == pytest.approx(66.4 + 28.3 * beside, rel=.02)
    assert report["memory_footprint_mb"] == pytest.approx(four["step_mb"], rel=.02)
    assert report["param_count"] == 134_515_008
    assert "Paris" in report["text"] and report["load_seconds"] > 0 and report["cache_context"] == 1024
    monkeypatch.setattr(cli, "load_report", lambda *asked: report | {"model": asked[0]})
    told = run("load", "smollm2").stdout
    mb = f"{four['step_mb']:,.0f} MB"  # 123 where the rest is in bfloat16
    for words in ("smollm2: 134.5 M parameters in int4 (79 % of the weights) on cpu", f"weights {mb}",
                  f"120 of 121 matrices are in four bits; a step reads {mb}", "8,192 positions", "France is Paris"):
        assert words in told


@pytest.mark.parametrize("words", [
    ["smollm2", "--dtype", "int3"], ["smollm2", "--device", "abacus"], ["smollm2", "--n-tokens", "0"],
    ["no-such-model"],
], ids=" ".join)
def test_load_refuses_before_anything_is_loaded(words, monkeypatch):
    monkeypatch.setattr(loading, "load_model", None)
    done = run("load", *words)
    assert done.exit_code == ExitCode.BAD_INPUT and not done.stdout and done.stderr.count("\n") <= 8


def test_load_of_a_model_that_cannot_fit_is_one_line(monkeypatch):
    monkeypatch.setattr(loading, "load_model", None)
    monkeypatch.setattr(loading, "memory_free_mb", lambda device: 100)
    done = run("load", "smollm2", "--dtype", "float32")
    assert done.exit_code == ExitCode.BAD_INPUT and done.stderr.count("\n") == 1
    assert "538 MB for its weights" in done.stderr and "100 MB are free on" in done.stderr


def test_an_interrupted_load_test_exits_with_130(monkeypatch):
    monkeypatch.setattr(cli, "load_report", lambda *asked: {"finish_reason": "interrupted"})
    assert run("load", "smollm2", "--json").exit_code == ExitCode.INTERRUPTED
