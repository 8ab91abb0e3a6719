"""One look for each thing: it can be read, it differs without colour, and every page has it from one table."""
import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from helpers import tool
from specdec.panel.palette import LOOKS, STATUSES, bar, line, style_sheet
from specdec.result import STATUS_MEANINGS, STATUS_STYLES

NBS = Path(__file__).parents[2] / "nbs"
LIGHT, DARK = "#ffffff", "#16191d"  # pages


def contrast(one: str, other: str) -> float:
    "The contrast ratio of two colours (WCAG 2.1)."
    def luminance(colour):
        channels = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))
    low, high = sorted((luminance(one), luminance(other)))
    return (high + .05) / (low + .05)


@pytest.mark.parametrize("name", LOOKS)
def test_text_and_lines_can_be_read_on_light_and_dark(name):
    look = LOOKS[name]
    assert contrast(look.ink, look.fill) >= 7
    assert contrast(look.line, LIGHT) >= 3 and contrast(look.line, DARK) >= 3
    assert contrast("#ffffff", "#000000") == 21 and contrast("#999999", "#ffffff") < 4.5  # the measure itself


def test_what_stands_side_by_side_differs_without_colour():
    def grey(name): return LOOKS[name].hatch, LOOKS[name].dash, LOOKS[name].decoration
    for together in (["p", "q"], ["accepted", "rejected", "residual"], STATUSES):
        assert all(grey(a) != grey(b) for a, b in combinations(together, 2)), together
    assert LOOKS["p"].fill == LOOKS["bonus"].fill and LOOKS["residual"].fill == LOOKS["corrected"].fill
    assert len({LOOKS[name].fill for name in ("p", "q", "accepted", "rejected", "residual")}) == 5


def test_a_result_the_site_and_the_recorded_page_say_the_same():
    assert {style for style in STATUS_STYLES.values() if style} == {LOOKS[status].css for status in STATUSES}
    meanings = {LOOKS[status].meaning for status in STATUSES}
    assert meanings < set(STATUS_MEANINGS.values())
    assert style_sheet() in (NBS / "styles.css").read_text(encoding="utf-8")  # python tools/pictures.py palette
    script = (NBS / "use" / "recorded.js").read_text(encoding="utf-8")
    for status in STATUSES:
        assert f'{status}: "{LOOKS[status].meaning}"' in script and f".status-{status} {{ background: " in style_sheet()
    colours = re.compile("|".join({getattr(look, part) for look in LOOKS.values() for part in ("fill", "ink", "line")}))
    files = ("use/recorded.css", "use/recorded.js", "race.js", "touch.css", "touch.js")
    for path in (NBS / name for name in files):
        assert not colours.findall(path.read_text(encoding="utf-8")), path.name


def test_the_style_sheet_is_written_where_it_stands():
    old = "a\n/* The palette: x */\nold\n/* End of the palette */\nb\n"
    new = tool("pictures").with_palette(old)
    assert style_sheet() in new and "old" not in new and new.startswith("a\n") and new.endswith("b\n")
    assert tool("pictures").with_palette(new) == new


@pytest.mark.parametrize(
    "notebook", ["00_tour", "03_rejection", "04_speculative", "05_speedup", "07_batches", "08_train"])
def test_figures_of_the_path_have_their_colours_from_the_palette(notebook):
    cells = json.loads((NBS / "path" / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    plots = ["".join(cell["source"]) for cell in cells if "ax." in "".join(cell["source"])]
    assert not [plot for plot in plots if re.search("#[0-9a-f]{6}", plot)]
    assert any("import palette" in "".join(cell["source"]) for cell in cells)


def test_matplotlib_takes_them():
    from matplotlib.figure import Figure
    ax = Figure().subplots()
    for name in LOOKS:
        ax.bar([0], [1], **bar(name))
        ax.plot([0, 1], [0, 1], **line(name))
