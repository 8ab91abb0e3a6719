"""The page for people who come from elsewhere: every name that it gives as ours exists."""
import inspect
import json
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

import specdec
from specdec import cli
from specdec.config import Decoding, PairSection
from specdec.result import GenerationResult

NOTEBOOK = Path(__file__).parents[1] / "nbs" / "use" / "elsewhere.ipynb"


def ours() -> list[str]:
    "The names in the columns headed `here`."
    found, column = [], None
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        for line in "".join(cell["source"]).splitlines() if cell["cell_type"] == "markdown" else []:
            parts = [part.strip() for part in line.split("|")[1:-1]] if line.startswith("|") else []
            if not parts: column = None  # a table has ended
            elif "here" in parts: column = parts.index("here")
            elif parts and column is not None: found += re.findall(r"`([^`]+)`", parts[column])
    return found


def exists(name: str) -> bool:
    "An argument or a method of a pair, a figure of a result, a key of a configuration, an option, or a name."
    arguments = inspect.signature(specdec.Pair.generate).parameters
    figures = {field.name for field in fields(GenerationResult)} | set(dir(GenerationResult))
    if name in {*arguments, *figures, *Decoding.model_fields, *PairSection.model_fields}: return True
    if name.startswith("--"): return name in Path(cli.__file__).read_text(encoding="utf-8")
    parts = name.split(".")
    deepest = max((n for n in range(1, len(parts)) if parts[0] == "specdec" and is_module(parts[:n])), default=0)
    found = import_module(".".join(parts[:deepest])) if deepest else specdec
    for part in parts[deepest:]:
        if not hasattr(found, part): return False
        found = getattr(found, part)
    return True


def is_module(parts: list[str]) -> bool:
    try: return bool(import_module(".".join(parts)))
    except ImportError: return False


@pytest.mark.parametrize("name", sorted(set(ours())))
def test_a_name_of_ours_exists(name): assert exists(name), name


def test_the_tables_are_read():
    assert {"K", "alpha", "specdec.cache.KVCache.rollback", "lenience"} <= set(ours()) and len(ours()) > 40
    assert not exists("specdec.cache.KVCache.truncate") and not exists("speed") and not exists("--drafts")


def test_every_test_that_is_named_exists():
    "In the table of rows and tests."
    page = "".join(map("".join, (cell["source"] for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"])))
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", page)
    assert len(named) >= 15
    for file, name in named:
        assert f"def {name}(" in (NOTEBOOK.parents[2] / file).read_text(encoding="utf-8"), name
