"""One token, a thousand times, in Python: the rows are the recorded ones, the laws are the proof's, the widgets keep
one state."""
import json
import random
import re
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import tool
from specdec.errors import InputError
from specdec.lossless.enumerate import exact_distribution
from specdec.panel import touch
from specdec.panel.touch import (
    PLACES,
    RULES,
    Course,
    Measured,
    Touch,
    dragged,
    draw_map,
    fractions,
    level_cost,
    pulled,
    total_variation,
    touch_law,
)
from specdec.speedup import tokens_per_round
from specdec.verify import speculative_sampling

NBS = Path(__file__).parents[2] / "nbs"
ROWS = st.lists(st.integers(0, 50), min_size=6, max_size=6).filter(any).map(lambda row: touch.shared(row, 1000))
DATA = json.loads((NBS / "data" / "touch.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["doing", "little", "boats"])
def test_a_real_place_is_a_recorded_one(name):
    place, recorded = PLACES[name], tool("record").unpacked(json.loads((NBS / "data" / "recorded.json").read_text()))
    wanted = {word: (p, q) for word, p, q in zip(place.words[:5], place.p, place.q)}
    rows = [{recorded["tokens"][t].strip(): (round(1000 * p), round(1000 * q)) for t, p, q in top}
            for run in recorded["runs"] if run["drafter"] == "smollm2-skip"
            for r in run["rounds"] for _, top in r["positions"]]
    assert wanted in rows
    assert (sum(place.p), sum(place.q)) == (1000, 1000)


def test_the_fourth_place_is_that_of_rejection():
    cells = json.loads((NBS / "path" / "03_rejection.ipynb").read_text(encoding="utf-8"))["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells)
    for rows, row in zip(("P", "Q"), (PLACES["sun"].p, PLACES["sun"].q)):
        table = re.search(rf"^{rows} = table\((\[\[.*?\]\])\)", source, re.M | re.S)[1]
        found = json.loads(re.sub(r"#.*", "", table))[1]
        assert [Fraction(x, sum(found)) for x in found] == list(fractions(row))


def test_the_page_has_the_same_places():
    assert DATA["rows"] == json.loads(json.dumps(tool("touch").places()))
    assert len(DATA["points"]) == 30


@pytest.mark.slow
def test_the_page_has_the_measured_points():
    assert DATA["points"] == tool("touch").points()


@given(ROWS, ROWS)
def test_only_the_rule_itself_is_lossless(p, q):
    assert list(touch_law("exact", p, q)) == list(fractions(p))
    rows = np.stack([fractions(p), fractions(p)])

    def first(rng): # the production rule, one guess from q
        word = rng.categorical(fractions(q))
        kept, own = speculative_sampling(rows, fractions(q)[None], [word], rng)
        return word if kept else own

    found = exact_distribution(first)
    assert [found.get(i, 0) for i in range(6)] == list(touch_law("exact", p, q))


@pytest.mark.parametrize("rule, off", [
    ("exact", 0), ("no_residual", Fraction(21, 200)), ("keep_with_p", Fraction(137, 480)),
    ("greedy_draft", Fraction(7, 20)),
])
def test_the_distances_are_those_of_the_path(rule, off):
    "Of no_residual, keep_with_p and greedy_draft in the rejection notebook, after “sun”."
    place = PLACES["sun"]
    assert total_variation(touch_law(rule, place.p, place.q), fractions(place.p)) == off


@pytest.mark.parametrize("rule", RULES)
def test_throws_settle_at_the_law_and_nowhere_else(rule):
    place, n = PLACES["doing"], 200_000
    counts, kept = touch.touch_counts(rule, place.p, place.q, n)
    law = touch_law(rule, place.p, place.q).astype(float)
    assert total_variation(counts / n, law) < .004 and counts.sum() == n
    assert (total_variation(counts / n, fractions(place.p).astype(float)) < .004) == (rule == "exact")
    if rule in ("exact", "no_residual", "epsilon"): assert abs(kept / n - .530) < .005


@given(ROWS, st.integers(0, 5), st.integers(0, 1000))
def test_a_dragged_q_sums_to_one(q, word, to):
    found = dragged(q, word, to)
    assert sum(found) == 1000 and min(found) >= 0 and found[word] == to
    others = [i for i in range(6) if i != word and q[i]]
    for i in others: # in proportion, up to rounding
        assert abs(found[i] - q[i] * (1000 - to) / (1000 - q[word])) < 1


@given(ROWS, ROWS, st.integers(0, 1000))
def test_a_pulled_q_has_the_overlap_that_was_asked_for(p, q, alpha):
    found = pulled(p, q, alpha)
    assert sum(found) == 1000 and sum(map(min, p, found)) == max(alpha, min(p))


def test_the_race_has_the_rounds_that_alpha_promises():
    rng = random.Random(0)
    for _ in range(20):
        alpha, K = rng.random(), rng.randint(1, 16)
        rounds = touch.race_rounds(alpha, K)
        assert sum(rounds) + len(rounds) >= 24 > sum(rounds[:-1]) + len(rounds) - 1 and max(rounds) <= K
        course = Course(K, rng.random(), rng.random())
        assert course.speedup(alpha) == pytest.approx(tokens_per_round(alpha, K) / course.round())
    assert touch.race_rounds(1, 5) == [5] * 4 and touch.race_rounds(0, 5) == [0] * 24


@pytest.mark.parametrize("act", [
    lambda: Course(K=0), lambda: Course(c=1.5), lambda: Course(e=-1), lambda: Touch("nowhere"),
    lambda: dragged([500, 500], 0, 1001), lambda: Measured("?", -.1, Course(), 1.0),
], ids=["K", "c", "e", "place", "height", "measured"])
def test_what_is_out_of_range_is_refused(act):
    with pytest.raises(InputError): act()


@given(st.floats(.01, 1), st.floats(.1, 12), st.integers(1, 16), st.floats(-.05, 1))
def test_a_line_of_the_map_has_its_speed_up(alpha, S, K, e):
    c = level_cost(S, alpha, Course(K, 0, e))
    if 0 <= c <= 1: assert Course(K, c, e).speedup(alpha) == pytest.approx(S)


def test_the_map_has_the_state_and_what_was_measured_on_it():
    point = Measured("a <head>", .5, Course(4, .25), 1.3)
    drawn = ElementTree.fromstring(draw_map(.75, Course(2, .09), [point]))
    dots = [(float(dot.get("cx")), float(dot.get("cy")), dot.get("r")) for dot in drawn.iter() if "circle" in dot.tag]
    assert dots[-2:] == [(48 + 210, 200 - 82, "4.5"), (48 + 315, pytest.approx(200 - 164 * .3), "7")]
    levels = [float(line.get("data-level")) for line in drawn.iter() if line.get("data-level")]
    assert levels and max(levels) <= 3 and 1 in levels  # no draft of two guesses is more than three times as fast
    said = f"a <head>: measured S = 1.30, the formula says {point.course.speedup(.5):.2f}"
    assert said in [title.text for title in drawn.iter() if "title" in title.tag]
    figure = Touch("sun", [point])
    assert [words for words, _ in figure.measured.options] == ["–", said]
    figure.measured.value = point
    assert (figure.K.value, figure.c.value) == (4, .25) and sum(map(min, figure.place.p, figure.q)) == 500
    assert f"S = {point.course.speedup(.5):.3f} at α = 0.500, c = 0.250, K = 4" in figure.views[3].value


def test_a_row_that_costs_less_than_nothing_is_shown_as_it_was_measured():
    "A widget clamps what it can't show; noise may put v(K) below 1, as far as `Course` takes it."
    point = Measured("a head", .5, Course(4, .25, -.05), 1.3)
    figure = Touch("sun", [point])
    figure.measured.value = point
    assert figure.e.value == -.05 and f"S = {point.course.speedup(.5):.3f}" in figure.views[3].value


def test_both_drawings_have_one_scale():
    "An outline of p is as high in what is dragged as in what is thrown."
    place = PLACES["boats"]
    outlines = [re.findall(r'd="M[\d.]+ 210V([\d.]+)H', drawn) for drawn in (
        touch.draw_drag(place, place.q), touch.draw_throw(place, place.q, "exact", 100))]
    assert outlines[0] == outlines[1] and len(outlines[0]) == 6


def test_the_widgets_keep_one_state():
    figure = Touch("doing")
    assert [bar.value for bar in figure.bars] == list(PLACES["doing"].q)
    figure.more[2].click()
    figure.bars[3].value = 900
    assert (sum(figure.q), figure.q[3], figure.throws) == (1000, 900, 10_000)
    assert [bar.value for bar in figure.bars] == figure.q
    alpha = sum(map(min, figure.place.p, figure.q)) / 1000
    drag, throw, race, seen = (view.value for view in figure.views)
    assert f"α = {alpha:.3f}" in drag and "10,000 thrown" in throw and "0.0000 in the end" in throw
    assert f"S = {Course().speedup(alpha):.3f} at K = 4" in race
    assert f"S = {Course().speedup(alpha):.3f} at α = {alpha:.3f}" in seen
    figure.rule.value, figure.K.value = "epsilon", 2
    off = total_variation(touch_law("epsilon", figure.place.p, figure.q), fractions(figure.place.p))
    assert off > 0 and f"{float(off):.4f} in the end" in figure.views[1].value
    assert f"S = {Course(2).speedup(alpha):.3f} at K = 2" in figure.views[2].value
    figure.resets[1].click()
    assert figure.q == list(figure.place.p) and "α = 1.000" in figure.views[0].value
    figure.more[3].click()
    assert figure.throws == 0 and "Nothing thrown yet" in figure.views[1].value
