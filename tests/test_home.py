"""Notebooks at home in nbdev: each exports or says why not, lets go of what it holds, and is cleaned and exported
before a commit. (Badges and install cells: tests/test_site.py; the tour from its file alone: tests/test_wheel.py.)"""
import gc
import json
import re
import sys
from configparser import ConfigParser
from ctypes import CDLL
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from os import environ
from pathlib import Path
from subprocess import run
from weakref import ref

import pytest
import torch
import yaml

from conftest import let_go

ROOT = Path(__file__).parents[1]
NUMBERED = sorted((ROOT / "nbs").rglob("[0-9]*.ipynb"))
EXPORT = re.compile(r"^#\|\s*exports?i?\b", re.M)
WHY = "exports nothing: "


@pytest.fixture(scope="module")
def badges():
    spec = spec_from_file_location("tools_badges", ROOT / "tools" / "badges.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


@pytest.mark.parametrize("tested", [True, False])
def test_a_notebook_lets_go_under_nbdev_test_alone(badges, shell, monkeypatch, tested):
    "Of what it named, of what refers to itself, and of what our functions remember."
    if not tested: monkeypatch.delenv("IN_TEST")
    ours, others = (cache(lambda x: x) for _ in range(2))
    ours.__module__ = "specdec.drafters.costs"
    for function in (ours, others): function(1)
    gc.disable()  # else the collector might come by on its own
    try:
        shell.run("held = bytearray(10)\nclass Ring: pass\nring = Ring()\nring.ring = ring")
        ring = ref(shell.user_ns["ring"])
        for source in (badges.LET_GO, "1 + 1"):
            shell.run(source)
            assert shell.exc is None
    finally: gc.enable()
    assert shell.result == 2 and ("held" in shell.user_ns) != tested and (ring() is None) == tested
    assert ours.cache_info().currsize == 1 - tested and others.cache_info().currsize == 1


KEEPS = """
import numpy as np
def held(): return int(open("/proc/self/statm").read().split()[1]) * 4096
for _ in range(2):
    before, blocks, between = held(), [], []
    for _ in range(20):
        blocks.append(np.ones(900_000))  # 7.2 MB, as a matrix of the default model
        between.append(bytearray(60_000))
    del blocks
print((held() - before) / 20 / 7_200_000)
"""


@pytest.mark.skipif(not hasattr(CDLL(None), "mallopt"), reason="the C library isn't glibc")
@pytest.mark.parametrize("let_go_before", [True, False])
def test_what_the_next_notebook_frees_goes_back_at_once(badges, let_go_before):
    "Left to itself, glibc keeps matrices between others."
    shell = "class Shell:\n    def reset(self, **_): pass\ndef get_ipython(): return Shell()\n"
    code = KEEPS if not let_go_before else f"{shell}{badges.LET_GO}\n{KEEPS}"
    done = run([sys.executable, "-c", code], capture_output=True, text=True, env=environ | {"IN_TEST": "1"}, check=True)
    assert (float(done.stdout) < .1) == let_go_before, done.stdout


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


def test_a_stream_left_half_way_leaves_gradients_as_they_were():
    from execnb.shell import CaptureShell
    code = ("import torch\n_ = torch.set_grad_enabled(False)\ndef stream():\n    with torch.no_grad(): yield 1\n"
            "left = stream()\nnext(left)")
    with let_go(CaptureShell()) as shell:
        shell.run(code)
        assert shell.exc is None and "left" in shell.user_ns and not torch.is_grad_enabled()
    assert torch.is_grad_enabled() and shell.user_ns == {}
