"The page of promises names tests that are there."
import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "nbs" / "lossless" / "promises.ipynb"
NAMED = re.compile(r"\[(\w+)\]\(https://github\.com/specdec/specdec/blob/main/(tests/[\w/]+\.py)\)")


def lines(page: str) -> list[str]:
    "The promises: rows of the tables, without their heads."
    return [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| We promise")]


def lacking(page: str) -> list[str]:
    "Promises without a test, and named tests that are not there."
    found = [line for line in lines(page) if not NAMED.search(line)]
    for name, file in NAMED.findall(page):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8")) if (ROOT / file).exists() else ast.Module([], [])
        if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}: found.append(name)
    return found


def test_every_promise_names_tests_that_are_there():
    cells = json.loads(PAGE.read_text(encoding="utf-8"))["cells"]
    page = "\n".join("".join(cell["source"]) for cell in cells)
    assert len(lines(page)) > 20 and not lacking(page)


@pytest.mark.parametrize("line", [
    "| It is fast. | |",
    "| It is fast. | [test_fast](https://github.com/specdec/specdec/blob/main/tests/test_core.py) |",
    "| It is fast. | [test_fast](https://github.com/specdec/specdec/blob/main/tests/test_none.py) |",
], ids=["no test", "no such test", "no such file"])
def test_a_promise_without_a_test_is_noticed(line):
    assert lacking(line)
