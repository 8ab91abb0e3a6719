"""What the notebooks ask of their readers: the limits hold, and the tool that counts them can say no."""
import json
import re
from pathlib import Path

import pytest
import yaml

from helpers import tool

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def reading():
    "tools/reading.py as a module."
    return tool("reading")


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


def test_a_door_has_a_limit_too(reading):
    """So has the whole of *Learn*, and the front page says how many hours it takes, begun ones counted; of another door
    it says the true ones or none."""
    found = [reading.Reading(f"nbs/path/0{i}_x.ipynb", 2400, 0, 0, 0, 20) for i in range(9)]
    totals = {"Learn": reading.total("Learn", found), reading.ALL: reading.total(reading.ALL, found)}
    long = "Learn: 21600 words, and 20000 is the limit"
    assert reading.problems(found, totals, {"Learn": 3}) == [long]
    assert reading.problems(found, totals, {"Learn": 2}) == [
        long, "nbs/index.ipynb says 2 hours of Learn, and it takes 3"]
    assert reading.problems(found[:8], {"Learn": reading.total("Learn", found[:8])}, {}) == [
        "nbs/index.ipynb says no hours of Learn, and it takes 3"]
    other = {"Go deeper": reading.total("Go deeper", found)}
    assert reading.problems(found, totals | other, {"Learn": 3}) == [long]
    assert reading.problems(found, totals | other, {"Learn": 3, "Go deeper": 2}) == [
        long, "nbs/index.ipynb says 2 hours of Go deeper, and it takes 3"]


def test_hours_are_read_off_the_front_page(reading):
    text = "Two.\n## Run it\nNow.\n\n## Learn\n\nA path.\nIt takes 4 hours.\n## Go deeper\n14 hours, 2 hours.\n## M"
    assert reading.hours_said(text) == {"Learn": 4, "Go deeper": 14}


def test_three_doors(reading):
    """Behind the first stands what everybody reads, in its order; behind the second a choice; behind the last, which is
    folded into sections, what else a reader comes for. Each notebook is behind one of them, or is left out by name."""
    doors = reading.doors()
    assert list(doors) == ["Learn", "Go deeper", "How the package is built"]
    learn, deeper, package = doors.values()
    present = {path.relative_to(TOOLS.parent).as_posix() for path in (TOOLS.parent / "nbs").rglob("*.ipynb")
               if ".ipynb_checkpoints" not in path.parts}
    sidebar = yaml.safe_load((TOOLS.parent / "nbs" / "sidebar.yml").read_text(encoding="utf-8"))
    unlisted = [f"nbs/{entry['href']}" for entry in sidebar["unlisted"]]
    assert sorted(learn + deeper + package + unlisted) == sorted(present)
    path = sorted(name for name in present if name.startswith("nbs/path/"))
    assert learn == [reading.FRONT, path[0], "nbs/use/recorded.ipynb", "nbs/live.ipynb", *path[1:4],
                     "nbs/use/touch.ipynb", *path[4:], "nbs/symbols.ipynb"]
    assert 15 <= len(deeper) <= 18 < len(package)


def test_the_front_page_leads_to_every_page_that_was_chosen(reading):
    "All of *Learn* and of *Go deeper*, each by its title; and its sections have the doors' names."
    front = (TOOLS.parent / reading.FRONT).read_text(encoding="utf-8")
    titles = tool("badges").titles()
    linked = {target: words for words, target in re.findall(r"\[([^\]\[]+)\]\(([\w/]+\.ipynb)\)", front)}
    doors = reading.doors()
    for name in [name.removeprefix("nbs/") for door in ("Learn", "Go deeper") for name in doors[door]]:
        if name not in ("index.ipynb", "symbols.ipynb"):
            assert f"[{titles[name]}]({name})" in front, f"{name} is linked as {linked.get(name)}"
    assert all(f'"## {door}\\n"' in front for door in doors)
