"""How much there is to read: `python tools/reading.py`, `--json` for a program, `--check` to fail above the limits.

For each notebook: words, code lines that a reader sees, the longest line, the longest cell, and minutes at 120 words
and 15 lines a minute, which is what first readers of the path took. Hidden cells are nobody's reading, folded ones
(`code-fold: true`) and folded solutions are opened by choice: neither counts as visible. Every line of code counts for
the longest one; what `#|` says of a cell, a figure's description for one, does not. The three doors of nbs/sidebar.yml
are added up: the front page has to say how many hours the one with a limit takes, and of another says the true ones or
none.
"""
import argparse
import json
import re
import sys
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
OWN = {"open-in-colab", "install-in-colab"}  # cells that tools/badges.py puts into every notebook
UNSEEN = re.compile(r"^#\|\s*(?:hide|include:\s*false|echo:\s*false|code-fold:\s*true)\s*$", re.M)
DIRECTIVE = re.compile(r"^#\|")
WORDS_A_MINUTE, LINES_A_MINUTE = 120, 15
TOUR = "nbs/path/00_tour.ipynb"
ALL = "all notebooks"


@dataclass(frozen=True)
class Limits:
    "What a notebook may ask of its reader; None: as much as it takes."
    words: int | None = None
    code_lines: int | None = None
    minutes: int | None = None
    longest_line: int = 100


LIMITS = {"tour": Limits(2500, 120, 45, 88), "path": Limits(2500, 300, 45), "other": Limits()}
FRONT = "nbs/index.ipynb"  # says what each door takes
PLAYED = {"nbs/live.ipynb", "nbs/use/touch.ipynb"}  # a tool, and what to try with it
LOOKED_AT = {FRONT, "nbs/symbols.ipynb", *PLAYED}  # not read from top to bottom: no part of what a door takes
DOOR_WORDS = {"Learn": 20_000}  # the whole of it
HOURS = re.compile(r"^## (.+)\n(?:(?!## ).*\n)*?.*?(\d+) hours", re.M)  # what the front page's section says of a door


@dataclass(frozen=True)
class Reading:
    "What one notebook asks of its reader."
    notebook: str
    words: int          # of all Markdown, formulas and folded solutions included
    code_lines: int     # visible ones, not empty
    longest_line: int   # columns, of any code line
    longest_cell: int   # visible code lines
    minutes: int        # rounded up

    @property
    def kind(self) -> str:
        "Which limits it is held to."
        if self.notebook == TOUR: return "tour"
        return "path" if self.notebook.startswith("nbs/path/") else "other"

    def problems(self) -> list[str]:
        "Each limit that is broken."
        limits, figures = asdict(LIMITS[self.kind]), asdict(self)
        over = [name for name, limit in limits.items() if limit is not None and figures[name] > limit]
        return [
            f"{self.notebook}: {name.replace('_', ' ')} {figures[name]}, and {limits[name]} is the limit"
            for name in over
        ]


def code_lines(source: str) -> list[str]:
    "The lines that say something: not empty, no directive."
    return [line for line in source.splitlines() if line.strip() and not DIRECTIVE.match(line)]


def read(path: Path) -> Reading:
    "Count one notebook."
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell.get("id") not in OWN]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    words = sum(len(text.split()) for text in texts)
    folded = [cell for cell in cells if "fold" in cell.get("metadata", {}).get("tags", [])]
    unseen = [code for code in codes if UNSEEN.search(code)] + ["".join(cell["source"]) for cell in folded]
    seen = [len(code_lines(code)) for code in codes if code not in unseen]
    columns = [len(line) for code in codes for line in code_lines(code)]
    minutes = -(-words // WORDS_A_MINUTE) + -(-sum(seen) // LINES_A_MINUTE)
    return Reading(
        path.relative_to(ROOT).as_posix(), words, sum(seen), max(columns, default=0), max(seen, default=0), minutes
    )


def total(name: str, readings: list[Reading]) -> Reading:
    "Several notebooks as one."
    def added(figure: str) -> int: return sum(getattr(r, figure) for r in readings)
    def most(figure: str) -> int: return max(getattr(r, figure) for r in readings)
    return Reading(
        name, added("words"), added("code_lines"), most("longest_line"), most("longest_cell"), added("minutes")
    )


def doors() -> dict[str, list[str]]:
    "The notebooks behind each door of the sidebar, in reading order."
    def notebooks(entry: dict) -> list[str]:
        if "contents" in entry: return [name for inner in entry["contents"] for name in notebooks(inner)]
        return [f"nbs/{entry['href']}"]

    sidebar = yaml.safe_load((ROOT / "nbs" / "sidebar.yml").read_text(encoding="utf-8"))["website"]["sidebar"]
    return {door["section"].partition(":")[0]: notebooks(door) for door in sidebar["contents"]}


def report() -> tuple[list[Reading], dict[str, Reading]]:
    "Every notebook in reading order, and the totals: of each door, and of all."
    paths = sorted(path for path in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
    readings = [read(path) for path in paths]
    totals = {door: total(door, [r for r in readings if r.notebook in names and r.notebook not in LOOKED_AT])
              for door, names in doors().items()}
    return readings, {**totals, ALL: total(ALL, readings)}


def hours_said(front: str) -> dict[str, int]:
    "How many hours the front page says that each door takes."
    return {door: int(hours) for door, hours in HOURS.findall(front)}


def problems(readings: list[Reading], totals: dict[str, Reading], said: dict[str, int]) -> list[str]:
    "All that is over its limit, and each door that takes other hours to read than the front page says."
    found = [problem for r in readings for problem in r.problems()]
    for door, limit in DOOR_WORDS.items():
        if totals[door].words > limit: found.append(f"{door}: {totals[door].words} words, and {limit} is the limit")
    takes = {door: ceil(reading.minutes / 60) for door, reading in totals.items() if door != ALL}
    held = {door: hours for door, hours in takes.items() if door in said or door in DOOR_WORDS}
    return found + [f"{FRONT} says {said.get(door, 'no')} hours of {door}, and it takes {hours}"
                    for door, hours in held.items() if said.get(door) != hours]


def main() -> None:
    "Print the table, or check it."
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--check", action="store_true", help="print only what is over its limit, and fail if anything is"
    )
    wants = parser.parse_args()
    readings, totals = report()
    if wants.check:
        cells = json.loads((ROOT / FRONT).read_text(encoding="utf-8"))["cells"]
        sys.exit("\n".join(problems(readings, totals, hours_said("\n".join("".join(c["source"]) for c in cells)))) or 0)
    if wants.json:
        print(
            json.dumps(
                {"notebooks": [asdict(r) for r in readings], "totals": {n: asdict(t) for n, t in totals.items()}},
                indent=1,
            )
        )
        return
    print(f"{'notebook':36} {'words':>6} {'lines':>6} {'line':>5} {'cell':>5} {'minutes':>8}")
    for r in [*readings, *totals.values()]:
        print(f"{r.notebook:36} {r.words:6} {r.code_lines:6} {r.longest_line:5} {r.longest_cell:5} {r.minutes:8}")


if __name__ == "__main__":
    main()
