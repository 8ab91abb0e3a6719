"Names in the notebooks' prose: what stands in backticks exists."
import builtins
import json
import keyword
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "nbs").rglob("[!.]*.ipynb"))
# names of other libraries, systems and formats, and strings that are examples
OTHERS = set("""NaN p95 p99 LlamaRMSNorm LlamaAttention LlamaMLP LlamaDecoderLayer data uniform_ rand_like
websockets Origin Host doctest bin pytorch_model LlamaForCausalLMEagle3 proc_pid_clear_refs speculators
banana an aa trans sea load_in_8bit nbdev_test nbdev_docs""".split())
ELSEWHERE = "nbs/use/elsewhere.ipynb"  # other systems' names; test_elsewhere holds ours
PROSE = re.compile(r'"""[\s\S]*?"""|"[^"\n]*"|#[^\n]*')


def names(code: str) -> set[str]:
    "Identifiers of Python code: words outside of comments, docstrings and texts with a space."
    return set(re.findall(r"[A-Za-z_]\w*", PROSE.sub(lambda m: "" if " " in m[0] else m[0], code)))


def package() -> set[str]:
    "Names that a page may use: those of the package, the audits and the tests, and Python's."
    found = set(dir(builtins)) | set(keyword.kwlist) | OTHERS
    for folder in ("specdec", "audits"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= names(path.read_text(encoding="utf-8")) | {path.stem, path.parent.name}
    for path in (ROOT / "tests").rglob("*.py"):
        found |= set(re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8")))
        found |= {path.stem, "py"}
    return found


def cells(notebook: dict, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def unknown(notebook: dict, known: set[str]) -> set[str]:
    "Identifiers in backticks that neither the package nor the page's own code has."
    prose = "\n\n".join(cells(notebook, "markdown"))
    blocks = re.findall(r"```\w*\n(.*?)```", prose, re.S)
    here = set().union(*map(names, cells(notebook, "code") + blocks), known)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", prose, flags=re.S))
    called = [span.split("(")[0] for span in spans if re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", span)]
    return {span for span in called if not set(filter(None, span.split("."))) <= here}


@pytest.fixture(scope="module")
def pages() -> dict[str, dict]:
    return {str(path.relative_to(ROOT)): json.loads(path.read_text(encoding="utf-8"))
            for path in NOTEBOOKS}


def test_names_in_backticks_exist(pages):
    known = package()
    wrong = {page: unknown(notebook, known) for page, notebook in pages.items()
             if page != ELSEWHERE}
    assert {page: found for page, found in wrong.items() if found} == {}


def test_paths_in_backticks_exist(pages):
    place = re.compile(r"`((?:specdec|tests|tools|nbs|audits|configs)/[\w./-]*\w)`")
    named = {(page, path) for page, notebook in pages.items()
             for cell in cells(notebook, "markdown") for path in place.findall(cell)}
    assert len(named) > 5  # the pattern finds some
    assert {(page, path) for page, path in named if not (ROOT / path).exists()} == set()


def test_what_is_wrong_is_found():
    page = {"cells": [
        {"cell_type": "code", "source": ["here = 1"]},
        {"cell_type": "markdown", "source": [
            "`here`, `KVCache.rollback(length)`, `gone`, `KVCache.unwind()`, `a b`\n"
            "```python\nshown = law\n```\n`shown`"]}]}
    assert unknown(page, {"KVCache", "rollback"}) == {"gone", "KVCache.unwind"}
