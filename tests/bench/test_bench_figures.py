"""Pictures of a measurement: what is drawn is what was measured, in roles that both schemes have a colour for."""
import re
from dataclasses import replace
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest

from helpers_bench import grid, write
from specdec.bench import report as figures
from specdec.bench.report import ROLES, Setting, pictures, read_runs, scheme_css, shade, study, told_apart


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    made = grid(6, ("suffix", "head"), (1, 4, "adaptive"), (0.0,), ("float32",), pairs=("smollm2", "other"))
    return study(read_runs(write(tmp_path_factory.mktemp("made") / "r.jsonl", made)).runs)


@pytest.fixture(scope="module")
def drawn(known): return {picture.name: picture for picture in pictures(known)}


def words(picture) -> list[str]: return re.findall(r"<text[^>]*>([^<]*)</text>", picture.svg())


def test_all_eight_are_there_and_say_what_they_show(drawn):
    assert [*drawn] == ["speedup-by-domain", "speedup-by-pair", "throughput", "prediction", "acceptance-by-domain",
                        "acceptance-by-position", "round-times", "latencies"]
    for picture in drawn.values():
        assert picture.title and picture.caption.endswith(".") and re.search(r"\d", picture.alt), picture.name


@pytest.mark.parametrize("name", ["speedup-by-domain", "prediction", "latencies"])
def test_a_drawing_is_well_formed_and_has_no_colour_of_its_own_but_on_cells(drawn, name):
    svg = drawn[name].svg()
    tree = ElementTree.fromstring(svg)
    assert tree.get("role") == "img" and tree.get("aria-label") == drawn[name].alt
    used = set(re.findall(r"var\(--(\w+)\)", svg))
    assert used <= ROLES.keys() and "ink" in used
    left = set(re.findall(r"#[0-9a-f]{6}\b", re.sub(r'href="[^"]*"|url\([^)]*\)', "", svg)))
    assert name == "speedup-by-domain" or left <= {"#ffffff"}, left  # white: lines between phases
    assert not set(re.findall(r'\bid="([^"]*)"', svg)) & set(re.findall(r'\bid="([^"]*)"', drawn["throughput"].svg()))


def test_roles_have_a_colour_in_each_scheme_and_a_plain_drawing_needs_none(drawn):
    for dark in (False, True):
        assert set(re.findall(r"--(\w+):#[0-9a-f]{6}", scheme_css(dark))) == {*ROLES}
    plain = drawn["throughput"].svg(page=False)
    assert "var(" not in plain and not any(stands in plain for stands, *_ in ROLES.values())


def luminance(colour: str) -> float:
    parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= .04045 else ((v + .055) / 1.055)**2.4 for v in parts]
    return np.dot(linear, [.2126, .7152, .0722])


def contrast(a: str, b: str) -> float:
    low, high = sorted([luminance(a), luminance(b)])
    return (high + .05) / (low + .05)


@pytest.mark.parametrize("role", [role for role in ROLES if role != "grid"])
def test_a_role_can_be_seen_in_both_schemes(role):
    "Text 4.5, lines and markers 3, on either paper (WCAG 2.1, 1.4.3 and 1.4.11)."
    needed = 4.5 if role in ("ink", "muted") else 3
    _, light, dark = ROLES[role]
    assert contrast(light, "#ffffff") >= needed and contrast(dark, "#16191d") >= needed


@pytest.mark.parametrize("ratio", [.1, .5, .7, .9, 1, 1.1, 1.5, 1.8, 2, 9])
def test_a_cell_can_be_read_and_tells_its_side(ratio):
    cell, ink = shade(ratio)
    as_text = "#" + "".join(f"{round(255 * v):02x}" for v in cell)
    assert contrast(as_text, ink) >= 4.5
    assert ratio == 1 or (cell[2] > cell[0]) == (ratio > 1)  # blue is faster


def test_a_heatmap_holds_every_speedup_and_marks_the_doubtful(known, drawn):
    shown = words(drawn["speedup-by-domain"])
    cells = figures.heat_cells(known, by_pair=False)
    found = [estimate for panel in cells.values() for row in panel.values() for estimate in row.values()]
    assert len(found) == 2 * 2 * 4 * 3  # pairs, methods, three domains and all, K
    for estimate in found:
        assert f"{'' if estimate.excludes(1) else '~'}{estimate.value:.2f}" in shown
    assert {"suffix, code", "head, summarization", "head, all", "adaptive", "4"} <= {*shown}
    assert {"suffix, other", "head, smollm2"} <= {*words(drawn["speedup-by-pair"])}


def test_bars_of_a_round_add_up(known):
    for line, columns in known.columns.items():
        parts = figures.parts_of(columns)
        assert sum(parts.values()) == pytest.approx(columns.decode, rel=1e-6), line.name
        if line.method == "head": assert 0 < parts["draft"].sum() < parts["verify"].sum()


def test_shares_of_accepted_drafts_are_shares(known):
    line = next(line for line in known.runs if (line.method, line.K) == ("head", 4))
    value, low, high = figures.accepted_shares(known.columns[line])
    accepted = np.concatenate([run.accepted for run in known.runs[line]])
    np.testing.assert_allclose(value, np.bincount(accepted, minlength=5) / len(accepted))
    assert value.sum() == pytest.approx(1) and (low <= value).all() and (value <= high).all()


def test_a_curve_of_latencies_is_the_share_of_all(known):
    line = next(line for line in known.runs if (line.method, line.K) == ("head", 4))
    x = np.array([0, .005, .01, .02, 9])
    value, low, high = figures.curve(known.runs[line], "per_token", x)
    every = np.concatenate([run.per_token for run in known.runs[line]])
    np.testing.assert_allclose(value, [(every <= limit).mean() for limit in x])
    assert value[0] == 0 and value[-1] == 1 and (low <= value).all() and (value <= high).all()
    silent = [replace(run, per_token=np.array([])) for run in known.runs[line]]
    assert figures.curve(silent, "per_token", x) is None


def test_what_was_not_measured_is_not_drawn(known):
    plain = study(run for runs in known.runs.values() for run in runs if run.method == "plain")
    assert [picture.name for picture in pictures(plain)] == ["round-times", "latencies"]
    untimed = study(replace(run, timed=False) for runs in known.runs.values() for run in runs)
    assert [picture.name for picture in pictures(untimed)] == ["acceptance-by-domain", "acceptance-by-position"]


def test_titles_say_what_differs():
    one = Setting("smollm2", "float32", "cpu", 2, 0.0)
    assert told_apart([one]) == [""]
    assert told_apart([one, one._replace(threads=1, temperature=1.0)]) == ["2 threads, T = 0", "1 threads, T = 1"]


def test_a_drawing_leaves_the_callers_settings_alone(known):
    before = dict(matplotlib.rcParams)
    figures.throughput(known).svg()
    assert dict(matplotlib.rcParams) == before


def test_the_same_data_make_the_same_drawing(known, drawn):
    assert figures.throughput(known).svg() == drawn["throughput"].svg()
