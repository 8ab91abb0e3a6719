"The project's own goals, by the tool that holds them."
import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
g = runpy.run_path(str(ROOT / "tools" / "goals.py"))


@pytest.mark.parametrize("name", g["GOALS"])
def test_each_goal_is_met_at_its_limit_and_missed_beyond(name):
    way, limit = g["GOALS"][name]
    worse = limit * (0.99 if way == "at least" else 1.01)
    met = g["goals_met"]
    assert met({name: limit}) == {name: True} and met({name: worse}) == {name: False} and met({name: None}) == {}


def test_the_stored_measurement_is_judged_as_it_was():
    stored = json.loads((ROOT / "nbs" / "data" / "peers.json").read_text(encoding="utf-8"))
    assert g["goals_met"](stored["ratios"]) == stored["goals_met"]
    assert {name: f"{way} {limit}" for name, (way, limit) in g["GOALS"].items()} == stored["targets"]


def test_what_is_missed_is_named_and_what_was_not_measured_is_counted():
    words = g["said"]({"plain_vs_transformers": 2.5, "overhead": .04, "memory_vs_model": None})
    assert "1 met, 1 missed: overhead, 18 not measured" in words and "at least 2.5: met" in words
