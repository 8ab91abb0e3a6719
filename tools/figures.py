"""Every figure that a page quotes, made anew: `python tools/figures.py`, about an hour on a machine that does nothing
else. `--list` only says what would be run; `--check` fails where a page says a figure of speed that is not in the data.

A page has its figures from stored measurements or from what its own cells printed, and `nbs/bench/numbers.ipynb` shows
them side by side. Prose that repeats one is held to these: a number of tokens a second, of times as fast and so on must
stand in the outputs of its page, or in that table, unless the sentence names the paper that it comes from.
"""
import argparse
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NBS = ROOT / "nbs"
# each file says the command that made it
DATA = ("race", "recorded", "drafters", "drafters_float32", "peers", "choosing", "target")
GRIDS = {f"nbs/data/{name}.jsonl.gz": f"specdec bench run configs/{name}.yaml --out {name}.jsonl"
         for name in ("table", "coder")}
# pages that measure when they are run; then those that only show what was stored
MEASURING = ("path/*", "bench/01_peers", "bench/12_batches")
SHOWING = ("bench/02_drafters", "bench/11_table", "use/recorded", "bench/numbers", "index")
CLAIM = re.compile(
    r"(?<![\w.,/-])(\d+(?:\.\d+)?)(?:\*\*)?(?: (?:and|to|or) (\d+(?:\.\d+)?)(?:\*\*)?)?"
    r"\s*(?:×|times as (?:fast|long|slow)|times (?:faster|slower)|tokens? (?:a|per) (?:second|round)|tokens/s\b)"
)
CITED = re.compile(
    r"\b(?:1[89]|20)\d\d\b|\bpapers?\b|\((?:abstract|authors|report|Spec-Bench)\b|\bSpec-Bench\)"
)
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w])")
NO_PROSE = re.compile(r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$|<[^>]*>|\]\([^)]*\)", re.S)


def stored(name: str) -> dict:
    "A file of measurements."
    return json.loads((NBS / "data" / f"{name}.json").read_text(encoding="utf-8"))


def pages(patterns: tuple[str, ...]) -> list[str]:
    "Notebooks, in order, from the root of the repository."
    found = [path for pattern in patterns for path in sorted(NBS.glob(f"{pattern}.ipynb"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def steps() -> list[tuple[str, str]]: # what is written, by which command
    "All that makes the figures, in order: files first, then the pages that show them."
    measured = [(f"nbs/data/{name}.json", stored(name)["command"]) for name in DATA]
    shown = [(page, f"make notebooks NOTEBOOKS={page}") for page in pages(MEASURING) + pages(SHOWING)]
    pictures = ("nbs/images/recorded.svg", "python tools/pictures.py recorded round round-still results")
    return [*measured, pictures, *GRIDS.items(), *shown, ("README.md", "make readme")]


def make(file: str, command: str) -> None:
    """Run one command and write its file; raises `CalledProcessError` where it fails, and keeps the old file then, as
    where a model's file isn't in the repository's root."""
    words = shlex.split(command)
    named = [name for word in words if word.endswith(".yaml")
             for name in re.findall(r": (\S+\.gguf)$", (ROOT / word).read_text(encoding="utf-8"), re.M)]
    absent = [word for word in {*words, *named} if word.endswith(".gguf") and not (ROOT / word).exists()]
    if absent: return print(f"{file} stays as it is, since {', '.join(sorted(absent))} isn't here")
    if words[0] in ("python", "specdec"): words[0] = str(Path(sys.executable).with_name(words[0]))
    if file in GRIDS: (ROOT / words[-1]).unlink(missing_ok=True)  # it would go on where an old run ended
    prints = words[-1] == "--json"
    done = subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE if prints else None, text=True)
    if prints:
        found = json.loads(done.stdout)
        if file.endswith("peers.json"):  # with the project's own goals beside it
            goals = runpy.run_path(str(ROOT / "tools" / "goals.py"))
            found["targets"] = {name: f"{way} {limit}" for name, (way, limit) in goals["GOALS"].items()}
            found["goals_met"] = goals["goals_met"](found["ratios"])
        (ROOT / file).write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    if file in GRIDS:
        packed = subprocess.run(
            ["gzip", "--best", "--stdout", words[-1]], cwd=ROOT, check=True, stdout=subprocess.PIPE
        )
        (ROOT / file).write_bytes(packed.stdout)


def outputs(cells: list[dict]) -> str:
    "All that a notebook's cells have printed."
    found = [output for cell in cells for output in cell.get("outputs", [])]
    texts = [output.get("text", "") for output in found]
    texts += [output.get("data", {}).get(kind, "") for output in found for kind in ("text/plain", "text/markdown")]
    return "\n".join("".join(text) for text in texts)


def sentences(prose: str) -> list[str]:
    "Sentences and, whole, the rows of tables."
    found = []
    for part in re.split(r"\n{2,}|\n(?=[|-])", prose):
        found += [part] if part.startswith("|") else re.split(r"(?<=[.:;!?])(?<!\bal\.)\s+", part)
    return found


def claims(prose: str) -> list[tuple[str, str]]: # the figure, and the sentence that says it
    "Figures of speed in a page's prose; code, formulas and what is cited from a paper are left out."
    found = []
    for sentence in sentences(NO_PROSE.sub(" ", prose)):
        if CITED.search(sentence): continue
        for match in CLAIM.finditer(sentence): found += [(n, sentence) for n in match.groups() if n]
    return found


def unknown(cells: list[dict], table: str = "") -> list[str]:
    "What a page says and neither its own outputs nor the table of figures has."
    have = set(NUMBER.findall(outputs(cells) + "\n" + table))
    prose = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return [f"{figure}: {' '.join(sentence.split())}" for figure, sentence in claims(prose) if figure not in have]


def check() -> list[str]:
    "Every page that says a figure which is nowhere in the data."
    def cells_of(page): return json.loads((ROOT / page).read_text(encoding="utf-8"))["cells"]
    table = outputs(cells_of("nbs/bench/numbers.ipynb"))
    everything = pages(("*", "*/*"))
    return [f"{page}: {words}" for page in everything for words in unknown(cells_of(page), table)]


def main() -> None:
    "Measure, list or check."
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="say what would be run")
    parser.add_argument("--check", action="store_true", help="fail where a page says a figure that is not in the data")
    wants = parser.parse_args()
    if wants.check: sys.exit("\n".join(check()) or 0)
    for file, command in steps():
        print(f"{file:32} {command}", flush=True)
        if not wants.list: make(file, command)


if __name__ == "__main__":
    main()
