"""The report as a reader meets it: a page in a real browser, a summary, a comparison, and clear errors."""
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from helpers import on_a_disk_of
from helpers_bench import grid, record, write
from helpers_site import Visit
from specdec.app.cli import app
from specdec.bench import report
from specdec.bench.report import Section, changes, compare_reports, parted_table, read_runs, report_on, study, written
from specdec.bench.run import check_installed, read_records
from specdec.errors import InputError, ModelError

SMALL = dict(prompts=5, methods=("suffix", "head"), Ks=(1, 4), dtypes=("float32",))


@pytest.fixture(scope="module")
def results(tmp_path_factory): return write(tmp_path_factory.mktemp("made") / "results.jsonl", grid(**SMALL))


@pytest.fixture(scope="module")
def page(results): return report_on(results, results.parent / "new" / "report")


@pytest.fixture(scope="module")
def compared(results):
    other = write(results.parent / "other.jsonl", grid(**SMALL, seed=1))
    return compare_reports(results, other, results.parent / "compared")


def test_a_page_needs_nothing_else(page):
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg ") == 7 and text.count("<figcaption>") == 7
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", text)
    assert set(re.findall(r"https?://[^\"]*", text)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


@pytest.mark.parametrize("made", ["page", "compared"])
@pytest.mark.parametrize("width, scheme", [(360, "light"), (1280, "light"), (360, "dark"), (1280, "dark")])
def test_a_page_reads_well(browser, request, made, width, scheme):
    visit = Visit(browser, request.getfixturevalue(made).as_uri())
    seen = visit.audit(width, scheme)
    background = visit.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    ink = visit.tab.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
    boxes = "[...document.querySelectorAll('.wide')].filter((e) => e.tabIndex < 0 || !e.ariaLabel).length"
    shape, unreachable = visit.shape(width), visit.tab.evaluate(boxes)
    visit.tab.close()
    assert visit.said == [] and len(visit.fetched) == 1
    assert seen["wide"] <= 0 and seen["faint"] == [] and shape["cut"] == [] and unreachable == 0
    assert seen["titles"] == 1 and seen["skipped"] == [] and seen["unlabelled"] == []
    assert (background, ink) == {"light": ("rgb(255, 255, 255)", "rgb(31, 35, 40)"),
                                 "dark": ("rgb(22, 25, 29)", "rgb(226, 230, 234)")}[scheme]


def test_the_summary_says_the_same_as_the_page(page, results):
    summary, text = page.with_suffix(".md").read_text(encoding="utf-8"), page.read_text(encoding="utf-8")
    known = study(read_runs(results).runs)
    for line, found in known.figures.items():
        row = next(
            row for row in summary.splitlines() if row.startswith(f"| {line.name} |") and str(found.speed) in row
        )
        for figure in (found.speedup, found.alpha, found.c, found.predicted, found.agreement):
            assert figure is None or f" {figure} |" in row and f"<td>{figure}</td>" in text
    assert "150 runs of 10 lines" in summary and "15 prompts in 3 domains" in summary and "A processor" in summary


def test_the_short_words_count_what_is_beyond_noise(results):
    known = study(read_runs(results).runs)
    found = [known.figures[line].speedup for line in known.of(known.settings[0]) if line.method != "plain"]
    told = [speedup for speedup in found if speedup.excludes(1)]
    faster = sum(speedup.value > 1 for speedup in told)
    said = report.in_short(known, known.settings[0])
    assert f"Of {len(found)} lines {faster} are faster" in said and f"{len(told) - faster} slower" in said
    assert f"{max(found, key=lambda speedup: speedup.value)} times" in said


@pytest.mark.parametrize("dtype, gap, tie", [
    ("float32", 9e-5, True), ("float32", 2e-4, False), ("bfloat16", .3, True), ("bfloat16", .8, False),
    ("int4", .3, True), ("float16", .3, False),
])
def test_texts_that_part_are_ties_or_worth_a_look(dtype, gap, tie, tmp_path):
    rng = np.random.default_rng(0)
    made = [record(rng, "head", 2, dtype=dtype, gap=gap), record(rng, "head", 2, "code_001", dtype=dtype),
            record(rng, "head", 2, "code_002", temperature=1.0, dtype=dtype, gap=gap), record(rng, dtype=dtype)]
    words, table = parted_table(study(read_runs(write(tmp_path / "r.jsonl", made)).runs))
    assert words.startswith("1 of 2 greedy texts part") and f"{int(not tie)} of them" in words
    rows = [row[:3] + row[4:6] for row in table.values.tolist()]
    assert rows == [[dtype, "head, K = 2", "code_000", "5", f"{gap:.3g}"]]
    assert ("tie" in table.verdict[0]) == tie


def test_texts_that_do_not_part_need_no_table(results):
    words, table = parted_table(study(read_runs(results).runs))
    assert words == "0 of 60 greedy texts part from the plain one." and table.empty


def test_cells_are_escaped():
    section = Section("<b>", ["*x*"], pd.DataFrame([["<x>|y"]], columns=["a|b"]))
    page, summary = (written(form, "t", [section]) for form in ("page.html", "summary.md"))
    assert "<td>&lt;x&gt;|y</td>" in page and "<th>a|b</th>" in page and "<h2>&lt;b&gt;</h2>" in page
    assert "| a\\|b |\n| --- |\n| &lt;x&gt;\\|y |\n" in summary and "\\*x\\*" in summary


def quicker(made, factor):
    "The same records with every drafting run so many times as fast."
    made = json.loads(json.dumps(made))
    for each in made:
        if each["config"]["method"] != "plain":
            for name in ("total_time", "time_to_first_token"): each["result"][name] /= factor
    return made


def verdicts(tmp_path, a, b) -> list:
    studies = [study(read_runs(write(tmp_path / f"{i}.jsonl", made)).runs) for i, made in enumerate((a, b))]
    return changes(*studies)


@pytest.mark.parametrize("factor, verdict", [(1, "no difference seen"), (1.03, "faster"), (.97, "slower")])
def test_a_change_is_seen_on_the_same_prompts_however_much_prompts_differ(factor, verdict, tmp_path):
    made = grid(**SMALL)
    found = verdicts(tmp_path, made, quicker(made, factor))
    assert len(found) == 8 and {change.verdict for change in found} == {verdict}
    for change in found:
        assert change.speedup.value == pytest.approx(factor) and change.alpha.value == change.tau.value == 0
        assert change.b.value == pytest.approx(factor * change.a.value)
    wide = [change.a.high > change.b.low and change.b.high > change.a.low for change in found]
    assert all(wide)  # the intervals of A and B overlap: looking at these would have missed it


def test_luck_alone_changes_few_lines(tmp_path):
    "Other draws of the same world: of 24 lines 1.2 are expected; more than eight would be a wrong unit."
    worlds = [
        grid(12, ("suffix", "model", "head"), (1, 2, 4, 8), dtypes=("float32",), n=24, seed=seed) for seed in (3, 4)
    ]
    easy = {each["config"]["prompt"]: 1 for each in worlds[0]}
    assert len(easy) == 36
    found = verdicts(tmp_path, *worlds)
    assert len(found) == 24 and sum(change.speedup.excludes(1) for change in found) <= 8


def test_a_better_draft_is_said_to_accept_more(tmp_path):
    a, b = (grid(6, ("head",), (4,), (0.0,), ("float32",), seed=seed) for seed in (0, 1))
    better = [
        (
            each
            if each["config"]["method"] == "plain"
            else record(np.random.default_rng(i), "head", 4, each["config"]["prompt"], alpha=0.9)
        )
        for i, each in enumerate(b)
    ]
    [found] = verdicts(tmp_path, a, better)
    assert found.verdict == "faster, accepts more" and found.alpha.value > .2 and found.tau.value > .5


def test_only_prompts_of_both_are_compared(tmp_path):
    made = grid(**SMALL)
    fewer = [each for each in quicker(made, 1.1) if each["config"]["domain"] == "code"]
    found = verdicts(tmp_path, made, fewer)
    assert {change.speedup.prompts for change in found} == {5} == {change.a.prompts for change in found}


def test_a_comparison_says_what_only_one_has_and_which_machine_differs(tmp_path):
    a = write(tmp_path / "a.jsonl", grid(**SMALL))
    b = write(tmp_path / "b.jsonl", grid(5, ("suffix",), (1, 4), (0.0,), ("float32",), threads=8, processor="Another"))
    text = compare_reports(a, b, tmp_path).with_suffix(".md").read_text(encoding="utf-8")
    assert "Only A has 7 lines, such as head, K = 1" in text and "Only B" not in text
    assert "| processor | A processor | Another |" in text and "torch" not in text.split("## Line by line")[0]


def test_results_with_nothing_in_common_are_refused(tmp_path):
    a, b = (write(tmp_path / f"{dtype}.jsonl", grid(1, dtypes=(dtype,))) for dtype in ("float32", "bfloat16"))
    with pytest.raises(InputError, match="no line in common"): compare_reports(a, b, tmp_path)


def test_a_folder_that_cannot_be_written_is_refused(results, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"can't be written.*--out"): report_on(results, tmp_path / "file" / "inside")


def test_without_the_library_that_draws_the_command_that_helps_is_named(monkeypatch):
    monkeypatch.setattr("specdec.bench.run.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r'needs matplotlib, pandas.*pip install -e "\.\[bench\]"'):
        check_installed("matplotlib", "pandas")


def command(*words: str): # what typer's runner returns
    return CliRunner().invoke(app, ["bench", "report", *words], prog_name="specdec")


def test_ten_thousand_lines_take_seconds(tmp_path):
    """Against parsing the same lines as JSON, in turn, by the processor's clock: six to eight times as long here, ten
    seconds, half of them for drawing. Records are made once and written under many prompts, so that making them takes
    no time."""
    few = grid(2, ("suffix", "model", "head", "hybrid"), (1, 2, 4, 8, "adaptive"), (0.0, 1.0), ("float32",), n=64)
    lines = [json.dumps(each) for each in few]
    file, count = tmp_path / "big.jsonl", -(-10_000 // len(lines))
    with open(file, "w") as out:
        for i in range(count):
            for n, line in enumerate(lines):
                out.write(re.sub(r'(code|conversation|summarization)_00(\d)', rf"\1_{i:02}\2", line)
                          .replace(few[n]["key"], f"{i * len(lines) + n:012x}") + "\n")
    start = time.process_time()
    report_on(file, tmp_path)
    reported = time.process_time()
    with open(file) as inside:
        for line in inside: json.loads(line)
    assert reported - start < 12 * (time.process_time() - reported)
    assert "10,080 runs" in (tmp_path / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("words, answer", [
    ((), "Give a file of results, or --compare A B"), (("none.jsonl",), "There is no file none.jsonl"),
    (("a", "--compare", "b", "c"), "one of the two"),
])
def test_the_command_says_what_is_wrong_in_a_line(words, answer):
    done = command(*words)
    assert done.exit_code == 2 and answer in done.stderr and done.stderr.count("\n") == 1 and not done.stdout


def test_the_command_names_what_it_wrote(results, tmp_path):
    done = command("--compare", str(results), str(results), "--out", str(tmp_path))
    assert done.exit_code == 0 and str(tmp_path / "report.html") in done.stdout and not done.stderr
    assert "0 are faster in B beyond noise, 0 slower" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_a_report_goes_to_a_folder_for_figures_by_default(results, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command("--compare", str(results), str(results))
    assert done.exit_code == 0 and (tmp_path / "figures" / "report.html").is_file()


# What comes from outside

@pytest.mark.parametrize("where", ["report.html", "report.md"])
def test_a_full_disk_leaves_the_report_before(results, tmp_path, where):
    report.write_report("before", [report.Section("a", ["b"])], tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in ("report.html", "report.md")}
    size = 1500 if where == "report.html" else 10_000
    long = [report.Section("a", ["*" * 6000])]  # the summary escapes each
    with on_a_disk_of(size), pytest.raises(InputError, match=rf"{where} can't be written .File too large.*--out"):
        report.write_report("after", long, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


HOSTILE_NAME = "<script>alert(1)</script> [x](javascript:1) $x_{$ *b* `c` | d\n# e"


def test_a_name_is_a_name_on_the_page_in_the_summary_and_in_the_figures(tmp_path):
    made = [each for name in ("plain name", HOSTILE_NAME)
            for each in grid(5, ("suffix",), (4,), (0.0,), ("float32",), pairs=(name,))]
    for each in made:
        each["config"]["domain"] = each["config"]["domain"].replace("code", "$x_{$")
        each["key"] = each["key"][:6] + f"{made.index(each):06x}"
    page = report_on(write(tmp_path / "r.jsonl", made), tmp_path)
    for file in (page, page.with_suffix(".md")):
        text = file.read_text(encoding="utf-8")
        assert "<script" not in text and "&lt;script&gt;" in text
    summary = page.with_suffix(".md").read_text(encoding="utf-8")
    assert "[x](" not in summary and "\\[x\\](javascript:1) \\$x\\_{\\$ \\*b\\* \\`c\\` \\| d # e" in summary
    assert "$x_{$" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [
    "https://evil.example/x", "see http://evil.example", "www.evil.example", "a@evil.example",
    "[x](javascript:alert(1))",
    '" onload="alert(1)', "<https://evil.example>", "![x](https://evil.example/p.png)", "[a]: https://evil.example",
])
def test_no_name_is_a_link_or_an_attribute(name, tmp_path):
    "In the words of GitHub's Markdown, which makes links of bare addresses too, and in the page."
    made = [each for other in ("plain", name)
            for each in grid(5, ("suffix",), (4,), (0.0,), ("float32",), pairs=(other,))]
    for i, each in enumerate(made): each["key"], each["config"]["domain"] = f"{i:012x}", name
    page = report_on(write(tmp_path / "r.jsonl", made), tmp_path)
    html, summary = (file.read_text(encoding="utf-8") for file in (page, page.with_suffix(".md")))
    seen = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: seen.append({tag, *(key for key, _ in attributes)})
    parser.feed(html)
    assert len(seen) > 50 and not {"a", "script", "img", "onload", "href"} & set().union(*seen)
    tokens = MarkdownIt("commonmark").enable("table").parse(summary)
    kinds = {child.type for token in tokens for child in (token, *(token.children or ()))}
    assert not kinds & {"link_open", "image"} and "inline" in kinds
    assert not re.search(r"\w://|www\.|(?<!-->)@", summary)


WRONG = {
    "pair": [5, None, ["a"], "\ud800"], "K": ["four", 0, 2.5, 10**30, True], "threads": [0, "2", 1.5, 10**400, None],
    "temperature": [-1, "0", None, {}], "prompt": [7, None], "repeat": [-1, "0", 1.5, 10**30], "dtype": [1, None, []],
    "device": [None, 3], "method": ["magic", None, 5], "domain": [1, []],
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in WRONG.items() for value in values])
def test_one_wrong_setting_is_one_line_that_names_file_and_line(name, value, tmp_path):
    rng = np.random.default_rng(0)
    made = [record(rng), record(rng, "head", 2)]
    made[1]["config"][name] = value
    done = command(str(write(tmp_path / "r.jsonl", made)), "--out", str(tmp_path))
    assert done.exit_code == 2 and "r.jsonl, line 2 " in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("part, value", [
    ("load", "much"), ("load", -1), ("load", [1]), ("timed", "yes"), ("timed", 1), ("parted", 5), ("parted", {}),
    ("parted", {"position": 5, "gap": "wide", "plain": 1, "ours": 2}), ("parted", [1]),
    ("parted", {"position": -1, "gap": 1.0, "plain": 1, "ours": 2}),
], ids=str)
def test_another_wrong_part_is_one_line_that_names_file_and_line(part, value, tmp_path):
    rng = np.random.default_rng(0)
    made = [record(rng), record(rng, "head", 2)]
    if part == "parted": made[1]["parted"] = value
    else: made[1]["environment"][part] = value
    done = command(str(write(tmp_path / "r.jsonl", made)), "--out", str(tmp_path))
    assert done.exit_code == 2 and "r.jsonl, line 2 " in done.stderr and done.stderr.count("\n") == 1
    assert part in done.stderr


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from([10**400, -1, 1e300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=4)


def places(data, path=()):
    "Every place in a record."
    items = data.items() if isinstance(data, dict) else enumerate(data[:2]) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_a_record_with_anything_in_one_place_is_reported_or_a_clear_error(data):
    rng = np.random.default_rng(0)
    made = [record(rng, n=8), record(rng, "head", 2, n=8, gap=.1)]
    *path, last = data.draw(st.sampled_from(sorted(places(made[1]), key=str)))
    at = made[1]
    for key in path: at = at[key]
    at[last] = data.draw(anything)
    with TemporaryDirectory() as folder:
        file = write(Path(folder) / "r.jsonl", made)
        for read in (lambda: report.report_sections(read_runs(file)), lambda: read_records(file)):
            try: read()
            except InputError as error: assert "r.jsonl" in str(error)
