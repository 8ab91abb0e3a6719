"""What the notebooks ask of their readers: the limits hold, and the tool that counts them can say no."""
import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def reading():
    "tools/reading.py as a module."
    spec = spec_from_file_location("reading", TOOLS / "reading.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def notebook(*cells) -> str:
    "A notebook's file: code cells, and Markdown where a cell begins with a hash and a space."
    kinds = ["markdown" if cell.startswith("# ") else "code" for cell in cells]
    return json.dumps({"cells": [{"cell_type": kind, "id": str(i), "source": [cell]}
                                 for i, (kind, cell) in enumerate(zip(kinds, cells))]})


def place(reading, monkeypatch, folder: Path, name: str, text: str):
    "What the tool says of a tree that holds this notebook only."
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(reading, "ROOT", folder)
    return reading.read(folder / name)


def test_the_limits_hold(reading):
    assert reading.problems(*reading.report()) == []


def test_what_counts(reading, monkeypatch, tmp_path):
    cells = ["# Title of four words", "#| export\nx = 1\n\ny = 2", "#| hide\nhidden = 1",
             "#| code-fold: true\nplot()\nshow()", "#| fig-alt: " + "long " * 40 + "\nz = 3"]
    found = place(reading, monkeypatch, tmp_path, "nbs/engine/01_x.ipynb", notebook(*cells))
    assert (found.words, found.code_lines, found.longest_cell, found.longest_line) == (5, 3, 2, 10)
    assert found.minutes == 2 and found.kind == "other" and found.problems() == []


@pytest.mark.parametrize("name, cell, figure", [
    ("nbs/path/01_x.ipynb", "# " + "word " * 2600, "words"),
    ("nbs/path/01_x.ipynb", "\n".join(f"x = {i}" for i in range(301)), "code lines"),
    ("nbs/path/00_tour.ipynb", "\n".join(f"x = {i}" for i in range(121)), "code lines"),
    ("nbs/path/00_tour.ipynb", "x = " + "1" * 90, "longest line"),
    ("nbs/use/01_x.ipynb", "x = " + "1" * 100, "longest line"),
], ids=["words", "lines", "lines of the tour", "line of the tour", "line anywhere"])
def test_what_is_too_much_is_named(reading, monkeypatch, tmp_path, name, cell, figure):
    problems = place(reading, monkeypatch, tmp_path, name, notebook(cell)).problems()
    assert len(problems) == 1 and figure in problems[0] and name in problems[0]


def test_the_whole_path_has_a_limit_too(reading, monkeypatch, tmp_path):
    found = [reading.Reading(f"nbs/path/0{i}_x.ipynb", 2400, 0, 0, 0, 12) for i in range(9)]
    totals = {"tour and path": reading.total("tour and path", found)}
    assert reading.problems(found, totals) == ["tour and path: 21600 words, and 20000 is the limit"]
