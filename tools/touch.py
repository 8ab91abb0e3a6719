"""Write the data of the page that one can touch: `python tools/touch.py`.

The places are those of `specdec.panel.touch`; the points are the table's lines of four guesses a round, with the run
that each was measured in.
"""
import json
from pathlib import Path

from specdec.bench.report import read_runs, study
from specdec.panel.touch import PLACES

ROOT = Path(__file__).resolve().parents[1]
TABLE, OUT = ROOT / "nbs" / "data" / "table.jsonl.gz", ROOT / "nbs" / "data" / "touch.json"
K = 4


def points() -> list[dict]:
    "What was measured with four guesses a round: the run, α, c, v, and the speed-up after the first token."
    found = read_runs(TABLE)
    return [
        {"name": f"{line.method}, {line.setting.dtype}, temperature {line.setting.temperature:g}", "K": K,
         **{name: round(getattr(figures, name).value, 4) for name in ("alpha", "c", "v", "measured")}}
        for line, figures in study(iter(found.runs)).figures.items() if line.K == K and figures.c
    ]


def places() -> list[dict]:
    "Real rows, and one of the path's."
    return [{"name": place.name, "title": place.title, "said": place.said, "words": place.words, "p": place.p,
             "q": place.q} for place in PLACES.values()]


if __name__ == "__main__":
    OUT.write_text(json.dumps({"rows": places(), "points": points()}, ensure_ascii=False, separators=(",", ":")) + "\n",
                   encoding="utf-8")
    print(f"{OUT.relative_to(ROOT)}: {OUT.stat().st_size} bytes")
