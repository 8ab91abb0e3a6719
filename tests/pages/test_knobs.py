"""What the tour's sliders play on the site: what the tour's own decoder said, for the question that the tour asks."""
import json
from pathlib import Path

import pytest

from helpers import tool

ROOT = Path(__file__).parents[2]
knobs = tool("knobs")
DATA = json.loads((ROOT / "nbs" / "data" / "knobs.json").read_text(encoding="utf-8"))


def test_they_answer_the_question_that_the_tour_asks():
    assert DATA["question"] == knobs.question(), "the tour asks something else by now: python tools/knobs.py"
    assert "def mean" in DATA["question"]


def test_a_tour_without_a_question_is_named(tmp_path):
    (tmp_path / "x.ipynb").write_text(json.dumps({"cells": [
        {"cell_type": "code", "source": "questions = 1\nother_question = 2"},
        {"cell_type": "markdown", "source": "question ="},
    ]}))
    with pytest.raises(LookupError, match="x.ipynb assigns no question"): knobs.question(tmp_path / "x.ipynb")


def test_the_sliders_reach_as_far_as_those_of_the_notebook():
    cells = json.loads(knobs.TOUR.read_text(encoding="utf-8"))["cells"]
    (cell,) = ["".join(c["source"]) for c in cells if "guesses_knob =" in "".join(c["source"])]
    Ks, temperatures = DATA["Ks"], DATA["temperatures"]
    assert "IntSlider(5, 1, 10," in cell and (Ks[0], Ks[-1]) == (1, 10) and 5 in Ks
    assert "FloatSlider(0, min=0, max=1.5," in cell and (temperatures[0], temperatures[-1]) == (0, 1.5)
    assert Ks == sorted(set(Ks)) == knobs.KS and temperatures == sorted(set(temperatures)) == knobs.TEMPERATURES


def test_every_place_of_both_sliders_has_its_run():
    assert [len(row) for row in DATA["runs"]] == [len(DATA["Ks"])] * len(DATA["temperatures"])
    for row in DATA["runs"]:
        for K, rounds in zip(DATA["Ks"], row):
            assert sum(map(len, rounds)) == knobs.TOKENS and all(1 <= len(r) <= K + 1 for r in rounds)
            assert all(0 <= token < len(DATA["tokens"]) for r in rounds for token in r)
    texts = [{tuple(sum(rounds, [])) for rounds in row} for row in DATA["runs"]]
    assert all(len(said) == 1 for said in texts)  # K changes the rounds, never the text
    assert len(set.union(*texts)) == len(DATA["temperatures"])
    assert len({len(rounds) for rounds in DATA["runs"][0]}) > 2


@pytest.mark.slow
def test_the_decoder_says_so_again():
    model, tokenizer = knobs.load()
    ids = knobs.prompt(tokenizer, knobs.question())
    for T, K in [(0, 5), (4, 3)]:
        rounds = knobs.recorded(model, ids, DATA["Ks"][K], DATA["temperatures"][T])
        assert [[tokenizer.decode([t]) for t in r] for r in rounds] == [
            [DATA["tokens"][t] for t in r] for r in DATA["runs"][T][K]]
