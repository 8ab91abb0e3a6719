"""Notebooks at home in nbdev: each exports or says why not, and is cleaned and exported before a commit. (Badges and
install cells: test_site.py; the tour from its file alone: waiting/test_wheel.py.)"""
import json
import re
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
NUMBERED = sorted((ROOT / "nbs").rglob("[0-9]*.ipynb"))
EXPORT = re.compile(r"^#\|\s*exports?i?\b", re.M)
WHY = "exports nothing: "


def exports_or_says_why_not(cells: list[dict]) -> bool:
    "Whether a notebook has a cell that is exported, or a sentence on why it has none; never both."
    def sources(kind): return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]
    exports = any(EXPORT.search(code) for code in sources("code"))
    says = any(WHY in text or "so this page exports nothing" in text for text in sources("markdown"))
    return exports != says


@pytest.mark.parametrize("path", NUMBERED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_numbered_notebook_exports_or_says_why_not(path):
    assert exports_or_says_why_not(json.loads(path.read_text(encoding="utf-8"))["cells"])


def test_a_silent_notebook_is_seen():
    "The negative control."
    code, export = ({"cell_type": "code", "source": [first, "x = 1"]} for first in ("#| hide\n", "#| exporti\n"))
    text, why = ({"cell_type": "markdown", "source": [words]} for words in ("A page.", f"This page {WHY}it measures."))
    assert exports_or_says_why_not([text, export]) and exports_or_says_why_not([why, code])
    assert not exports_or_says_why_not([text, code]) and not exports_or_says_why_not([why, export])


def test_before_a_commit_nbdevs_own_hooks_run():
    "At the version that the workflows have, with the pins that it needs, by commands that are there."
    theirs, ours = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert theirs["repo"].endswith("/nbdev")
    assert f"nbdev=={theirs['rev']}\n" in (ROOT / ".github" / "constraints.txt").read_text(encoding="utf-8")
    assert {hook["id"] for hook in theirs["hooks"]} == {"nbdev_clean", "nbdev_export"}
    settings = ConfigParser(delimiters=["="])
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    for hook in theirs["hooks"]:
        assert Path(sys.executable).with_name(hook["id"]).exists()
        assert set(hook["additional_dependencies"]) < set(settings["DEFAULT"]["dev_requirements"].split())
    assert (ROOT / ours["hooks"][0]["entry"].split()[1]).is_file()
