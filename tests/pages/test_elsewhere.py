"""The page for people who come from elsewhere: each name that it gives as ours exists, and each test that it names."""
import ast
import inspect
import json
import re
import shlex
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import specdec
from helpers_text import talker
from specdec.app import cli
from specdec.app.config import Decoding, PairSection
from specdec.bench.prompts import PromptDataset
from specdec.drafters.adaptive import AdaptiveLookahead
from specdec.engine.profiling import PhaseTimer
from specdec.pair import Pair
from specdec.result import GenerationResult

NOTEBOOK = Path(__file__).parents[2] / "nbs" / "use" / "elsewhere.ipynb"


HELD = re.compile(r"\[(test_\w+)\]\(https://github\.com/specdec/specdec/blob/main/(tests/[\w/]+\.py)\)")


def column(name: str, page: str) -> list[str]:
    "The cells under that heading, of all tables of a page."
    found, at = [], None
    for line in page.splitlines():
        parts = [part.strip() for part in line.split("|")[1:-1]] if line.startswith("|") else []
        if not parts: at = None
        elif at is None: at = parts.index(name) if name in parts else -1
        elif at >= 0 and not re.fullmatch("-+", parts[at]): found.append(parts[at])
    return found


def page() -> str:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def ours() -> list[str]:
    "The names in the columns headed `here`."
    return [name for cell in column("here", page()) for name in re.findall(r"`([^`]+)`", cell)]


def exists(name: str) -> bool:
    "An argument or a method of a pair, a figure of a result, a key of a configuration, an option, or a name."
    arguments = inspect.signature(specdec.Pair.generate).parameters
    figures = {field.name for field in fields(GenerationResult)} | set(dir(GenerationResult))
    if name in {*arguments, *figures, *Decoding.model_fields, *PairSection.model_fields}: return True
    if name.startswith("--"): return name in options(typer.main.get_command(cli.app))
    parts = name.split(".")
    deepest = max((n for n in range(1, len(parts)) if parts[0] == "specdec" and is_module(parts[:n])), default=0)
    found = import_module(".".join(parts[:deepest])) if deepest else specdec
    for part in parts[deepest:]:
        if not hasattr(found, part): return False
        found = getattr(found, part)
    return True


def options(command) -> set[str]:
    "Those of a command, and of all in it."
    own = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return own.union(*map(options, getattr(command, "commands", {}).values()))


def is_module(parts: list[str]) -> bool:
    try: return bool(import_module(".".join(parts)))
    except ImportError: return False


@pytest.mark.parametrize("name", sorted(set(ours())))
def test_a_name_of_ours_exists(name): assert exists(name), name


def typed() -> list[tuple[str, str]]: # what is typed, what it gives; "": not said
    "The lines of the table of what is typed here."
    def code(cell: str) -> str: return found[1] if (found := re.match("`([^`]+)`", cell)) else ""
    return [(code(line), code(gives)) for line, gives in zip(column("type", page()), column("gives", page()))]


@pytest.fixture(scope="module")
def names():
    "What the page imports, and the things that it speaks of."
    found: dict = {}
    cell, = (each for each in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if each["id"] == "typ30002")
    exec("".join(cell["source"]), found)
    pair = Pair(talker(), talker(seed=1))
    result, plain = (pair.generate("red green", max_new_tokens=8, seed=1, method=m) for m in ("speculative", "plain"))
    cache, timer = pair.target.new_cache(9), PhaseTimer()
    pair.target.forward(torch.tensor([[1, 2, 3]]), cache)
    with timer.phase("step"): pass
    return found | dict(pair=pair, result=result, plain=plain, cache=cache, timer=timer, controller=AdaptiveLookahead(),
                        prompts=PromptDataset.load("quick", pair.tokenizer))


def check_line(line: str, gives: str, names: dict) -> None:
    "Run it: a command, or an expression whose value is compared."
    if line.startswith("specdec "):
        done = CliRunner().invoke(cli.app, shlex.split(line)[1:], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return
    value = eval(line, dict(names))
    assert not gives or value == eval(gives, dict(names)), f"{line} gives {value!r}"


@pytest.mark.parametrize("line, gives", typed())
def test_a_line_to_type_gives_what_it_says(line, gives, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_line(line, gives, names)


@pytest.mark.parametrize("line, gives", [
    ("plain.draft_time_total_ms", "0.0"), ("result.speed", ""), ("pair.generate('Hi', do_sample=True)", ""),
    ("specdec prompts --both", ""),
])
def test_a_line_that_does_not_is_noticed(line, gives, names):
    with pytest.raises((AssertionError, AttributeError, TypeError)): check_line(line, gives, names)


def test_the_tables_are_read():
    assert len(typed()) >= 20 and all(line for line, _ in typed()) and sum(bool(gives) for _, gives in typed()) > 12
    known = {"K", "alpha", "specdec.cache.KVCache.rollback", "specdec.engine.lossy.LossyTypical"}
    assert known <= set(ours()) and len(ours()) > 40
    assert not exists("specdec.cache.KVCache.truncate") and not exists("speed") and not exists("--drafts")


def lacking(page: str) -> list[str]:
    "Rows that no test holds, and tests that are not there."
    found = [cell for cell in column("held by", page) if not HELD.search(cell)]
    for name, file in {test for cell in column("held by", page) for test in HELD.findall(cell)}:
        path = NOTEBOOK.parents[2] / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.exists() else ast.Module([], [])
        tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if name not in tests: found.append(f"{file}::{name}")
    return found


def test_every_row_is_held_by_tests_that_are_there():
    assert len(column("held by", page())) > 50 and lacking(page()) == []


@pytest.mark.parametrize("cell", [
    "", "a test", "[test_fast](https://github.com/specdec/specdec/blob/main/tests/test_core.py)",
    "[test_fast](https://github.com/specdec/specdec/blob/main/tests/test_none.py)",
], ids=["nothing", "no link", "no such test", "no such file"])
def test_a_row_without_a_test_is_noticed(cell):
    assert lacking(f"| there | here | held by |\n|---|---|---|\n| a | b | {cell} |")


OURS = re.compile(r"github\.com/specdec/specdec/(?:blob|tree)/main/([\w./-]*\w)")


def dead(text: str) -> list[str]:
    "Files of the repository that a text links to, and that are not there."
    return [path for path in OURS.findall(text) if not (NOTEBOOK.parents[2] / path).exists()]


def test_links_to_files_of_the_repository_are_alive():
    "Of every notebook, of the README and of what a contributor reads; the site's own links: tools/check_site.py."
    root = NOTEBOOK.parents[2]
    pages = [*(root / "nbs").rglob("*.ipynb"), *root.glob("*.md"), *(root / "nbs").glob("*.md")]
    found = {path.name: text for path in pages if OURS.search(text := path.read_text(encoding="utf-8"))}
    assert {"elsewhere.ipynb", "promises.ipynb", "README.md"} <= set(found)
    assert {name: dead(text) for name, text in found.items() if dead(text)} == {}
    assert dead("https://github.com/specdec/specdec/blob/main/tests/test_core.py, and /tree/main/tests") == []
    assert dead("(https://github.com/specdec/specdec/blob/main/settings.toml).") == ["settings.toml"]
