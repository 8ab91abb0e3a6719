"""Draw the picture that goes with a link to the site where it is shared: `python tools/card.py`.

It is `nbs/images/card.png`. The text in it is that of the race on the page of recorded runs, as the default model wrote
it: green was guessed, and kept.
"""
import json
from pathlib import Path

import matplotlib
from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from specdec.panel.palette import LOOKS

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HEIGHT = 1200, 630  # what those who show such pictures ask for
INK, FAINT, LINK, PAPER = "#1f2328", "#57606a", "#0b5cad", "#ffffff"
KEPT = LOOKS["accepted"].fill
SIZE, LINE, LEFT, TOP, LINES = 30, 58, 80, 330, 4


def pieces(rounds: list[dict]) -> list[list[tuple[str, bool]]]:
    "The text of a race, by line: each piece, and whether it was guessed."
    lines: list[list[tuple[str, bool]]] = [[]]
    for r in rounds:
        for n, token in enumerate(r["text"]):
            first, *more = token.split("\n")
            if first: lines[-1].append((first, n < r["accepted"]))
            for words in more: lines.append([(words, n < r["accepted"])] if words else [])
    said = [line for line in lines if "".join(words for words, _ in line).strip()]
    return [line for line in said if not line[0][0].startswith("```")]


def draw(race: dict, K: str = "4") -> Figure:
    "A title, what it is about, and the first lines of the race."
    plain, rounds = race["lanes"]["plain"], race["lanes"][K]
    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100, facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.axis("off")
    axes.add_patch(FancyBboxPatch((0, 0), WIDTH, 12, boxstyle="square,pad=0", color=LINK))
    axes.text(LEFT, 130, "specdec", fontsize=62, fontweight="bold", color=INK)
    axes.text(LEFT, 196, "The same text, sooner: speculative decoding", fontsize=25, color=FAINT)
    axes.text(LEFT, 238, "from first principles, fast and provably lossless", fontsize=25, color=FAINT)
    mono = font_manager.FontProperties(family="DejaVu Sans Mono", size=SIZE)
    letter = SIZE * 100 / 72 * 1233 / 2048  # how wide that font draws each
    for row, line in enumerate(pieces(rounds)[:LINES]):
        x, y = LEFT, TOP + LINE * row
        for words, guessed in line:
            seen = words.strip()
            start, wide = x + letter * words.index(seen), letter * len(seen)
            if guessed and seen:
                box = FancyBboxPatch((start + 1, y - 34), wide - 2, 46, boxstyle="round,pad=0,rounding_size=7")
                axes.add_patch(box)
                box.set(color=KEPT, linewidth=0)
            axes.text(x, y, words, fontproperties=mono, color=INK)
            x += letter * len(words)
    tokens = sum(len(r["text"]) for r in rounds)
    said = f"{tokens} tokens: {len(rounds)} forwards instead of {len(plain)}. Green was guessed, and kept."
    axes.text(LEFT, 588, said, fontsize=20, color=FAINT)
    return figure


if __name__ == "__main__":
    matplotlib.rcParams["font.family"] = "DejaVu Sans"
    races = json.loads((ROOT / "nbs" / "data" / "race.json").read_text(encoding="utf-8"))["races"]
    draw(next(race for race in races if not race["temperature"])).savefig(
        ROOT / "nbs" / "images" / "card.png", metadata={"Software": None}
    )
