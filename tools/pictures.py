"""Draw the pictures in `nbs/images`: `python tools/pictures.py` draws all of them, `python tools/pictures.py map` one.

`round.svg` is a real round of the default model, `race.svg` a real race, `map.svg` the layers of the package,
`recorded.svg` stands in for the sliders of the recorded runs where no script runs, `touch.svg` for the figure that one
can touch, `colab.svg` is the badge that opens a notebook there, and `card.png` goes with a link to the site where it is
shared. `palette` writes the colours of `specdec/panel/palette.py` into the site's style sheet.
"""
import argparse
import json
import re
from html import escape
from pathlib import Path

from specdec.panel.palette import LOOKS, style_sheet

ROOT = Path(__file__).resolve().parents[1]
IMAGES, STYLES = ROOT / "nbs" / "images", ROOT / "nbs" / "styles.css"
INK, FAINT = "#1f2933", "#52606d"
FILL = {
    "context": "#e4e7eb",
    "drafted": "#ffffff",
    "dropped": "#f5f7fa",
    **{name: look.fill for name, look in LOOKS.items()},
}


def svg(width: int, height: int, title: str, body: list[str]) -> str:
    "A picture on a white card, with its title for readers who can't see it."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img" font-family="Helvetica, Arial, sans-serif" fill="{INK}">\n<title>{escape(title)}</title>\n<rect'
        f' width="{width}" height="{height}" fill="#ffffff"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, size: int = 15, anchor: str = "start", extra: str = "") -> str:
    "Words at a point."
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" {extra}>{escape(words)}</text>'


def box(x: float, y: float, width: float, words: str, fill: str, extra: str = "", text_extra: str = "") -> list[str]:
    "A rounded box with words in the middle."
    return [f'<rect x="{x}" y="{y}" width="{width}" height="34" rx="6" fill="{fill}" stroke="{FAINT}" {extra}/>',
            text(x + width / 2, y + 22, words, 15, "middle", text_extra)]


def real_round() -> tuple[list[str], list[str], int, str]:
    """A round of the default model in which some draft tokens were accepted and one was not: context, draft, accepted,
    the target's token."""
    from specdec.models.hub import prompts
    from specdec.pair import load_pair
    pair = load_pair("smollm2-ngram", device="cpu", dtype="float32")
    for prompt in reversed(prompts()):
        result = pair.generate(prompt.messages, max_new_tokens=64)
        said = result.generated_ids[:1]
        for r in result.rounds:
            words = [result.token_text[t].strip() for t in [*said[-3:], *r.drafted, r.emitted[-1]]]
            plain = all(re.fullmatch(r"[A-Za-z.,]+", word) for word in words)
            if len(said) >= 3 and len(r.drafted) == 5 and r.accepted == 3 and plain:
                return words[:3], words[3:8], 3, words[8]
            said += r.emitted
    raise SystemExit("No round with three of five accepted: look at other prompts.")


def draw_round(context: list[str], draft: list[str], accepted: int, target: str) -> str:
    "Draft, verify, commit: each step with its name above it, so that the picture is readable at phone width."
    step, wide, left, body = 98, 92, 8, []
    lefts = [left + step * i for i in range(len(draft) + 1)]

    def label(y: int, head: str, small: str):
        body.extend([
            text(left, y, head, 16, extra='font-weight="bold"'),
            text(left + 9.2 * len(head) + 10, y, small, 15, extra=f'fill="{FAINT}"'),
        ])

    label(22, "Text so far", "committed already")
    for x, word in zip(lefts, context):
        body += box(x, 32, wide, word, FILL["context"])
    label(98, "1  Draft", "cheap guesses, drawn from q")
    for x, word in zip(lefts, draft):
        body += box(x, 108, wide, word, FILL["drafted"], 'stroke-dasharray="5 3"')
    label(174, "2  Verify", "one forward of the target")
    body += [
        f'<rect x="{left}" y="184" width="{step * len(draft) + wide}" height="34" rx="6" fill="{INK}"/>',
        text(
            left + (step * len(draft) + wide) / 2, 206, "p for every position at once", 16, "middle", 'fill="#ffffff"'
        ),
    ]
    label(250, "3  Accept or resample", "accept with probability min(1, p/q)")
    for i, (x, word) in enumerate(zip(lefts, draft)):
        if i < accepted:
            body += box(x, 260, wide, "✓ " + word, FILL["accepted"])
        elif i == accepted:
            body += box(x, 260, wide, word, FILL["rejected"], text_extra='text-decoration="line-through"')
            body += box(x, 302, wide, target, FILL["corrected"], 'stroke-width="2"')
            body.append(text(x - 10, 324, "from the residual, max(p − q, 0):", 15, "end", f'fill="{FAINT}"'))
        else:
            body += box(x, 260, wide, word, FILL["dropped"], 'stroke-dasharray="2 3"', f'fill="{FAINT}"')
    said = " ".join(draft[:accepted] + [target])
    body.append(
        text(
            left, 368, f"{accepted + 1} tokens from one forward of the target: “{said}”", 16, extra='font-weight="bold"'
        )
    )
    title = (
        f"One round: of {len(draft)} draft tokens the target accepts {accepted}, replaces the next, and drops the rest."
    )
    return svg(left + step * len(draft) + wide + 8, 384, title, body)


def draw_lanes(
    lanes: list[tuple[str, list[float], list[bool], int]], left: int, width: int, top: int
) -> list[str]:
    """Lanes on one axis of time, a box for each forward: of each lane its name, when its forwards ended, which of them
    kept a guess, and how many tokens it made."""
    body, scale, tall = [], width / max(ends[-1] for _, ends, _, _ in lanes), 34
    for i, (name, ends, kept, tokens) in enumerate(lanes):
        y = top + 62 * i
        body.append(text(8, y + 22, name, 16, extra='font-weight="bold"'))
        for start, end, fill in zip([0.0, *ends], ends, (FILL["accepted" if k else "drafted"] for k in kept)):
            body.append(
                f'<rect x="{left + start * scale:.1f}" y="{y}" width="{(end - start) * scale:.1f}" height="{tall}"'
                f' fill="{fill}" stroke="{INK}" stroke-width=".6"/>'
            )
        words = f"{tokens} tokens, {len(ends)} forwards, {ends[-1]:.1f} s"
        body.append(text(left, y + tall + 17, words, 14, extra=f'fill="{FAINT}"'))
    return body


def real_runs() -> dict:
    "What `tools/record.py` recorded."
    from record import unpacked
    return unpacked(json.loads((ROOT / "nbs" / "data" / "recorded.json").read_text(encoding="utf-8")))


def draw_recorded(
    data: dict, prompt: str = "song", drafter: str = "smollm2", temperature: float = 0.7, K: int = 8, shown: int = 8
) -> str:
    """The first rounds of one recorded run, a line each: what was drafted, and what became of it; below them its time
    and that of plain decoding."""
    at = {"prompt": prompt, "drafter": drafter, "temperature": temperature, "K": K}
    run = next(r for r in data["runs"] if all(r[name] == value for name, value in at.items()))
    plain = next(lane for lane in data["plain"] if (lane["prompt"], lane["temperature"]) == (prompt, temperature))
    body = [
        text(8, 22, f"K = {K}, temperature {temperature}: the first {shown} rounds", 16, extra='font-weight="bold"')
    ]
    rights = []
    for n, r in enumerate(run["rounds"][:shown]):
        y, x = 38 + 42 * n, 40
        body.append(text(8, y + 22, str(n + 1), 15, extra=f'fill="{FAINT}"'))
        last = "target" if not r["draft"] else "bonus" if r["accepted"] == len(r["draft"]) else "corrected"
        statuses = [
            ("accepted" if i < r["accepted"] else "rejected", token)
            for i, token in enumerate(r["draft"][: r["accepted"] + 1])
        ]
        for status, token in statuses + [(last, r["own"])][:r["emitted"] - r["accepted"]]:
            word = data["tokens"][token].strip().replace("\n", "⏎") or "⏎"
            wide = 9 * len(word) + 20
            fill = FILL.get(status, FILL["drafted"])
            body += box(
                x, y, wide, word, fill, text_extra='text-decoration="line-through"' if status == "rejected" else ""
            )
            x += wide + 6
        rights.append(x)
    left, top, width = 120, 58 + 42 * len(rights), max(600, *rights) - 130
    kept = [False, *(r["accepted"] > 0 for r in run["rounds"])]
    body += draw_lanes([
        ("plain", plain["ends"], [False] * len(plain["ends"]), len(plain["text"])),
        ("speculative", run["ends"], kept, 1 + sum(r["emitted"] for r in run["rounds"])),
    ], left, width, top)
    return svg(
        left + width + 10,
        top + 124,
        f"The first {shown} rounds of a recorded run: accepted draft tokens, rejected ones with their replacement, and"
        " bonus tokens; below them the run's time beside that of plain decoding.",
        body,
    )


def draw_race(data: dict, temperature: float = 0.0, K: int = 4) -> str:
    """Plain and speculative decoding of one prompt on one axis of time: a box for each forward, green what was guessed
    and kept."""
    race = next(r for r in data["races"] if r["temperature"] == temperature)
    plain, speculative = race["lanes"]["plain"], race["lanes"][str(K)]
    left, width = 120, 640
    body = [
        text(8, 24, f"{data['model']}, one prompt, temperature {temperature:g}, K = {K}", 15, extra=f'fill="{FAINT}"')
    ]
    body += draw_lanes([
        (name, [r["end"] for r in rounds], [bool(r["accepted"]) for r in rounds], sum(len(r["text"]) for r in rounds))
        for name, rounds in [("plain", plain), ("speculative", speculative)]
    ], left, width, 42)
    gain = plain[-1]["end"] / speculative[-1]["end"]
    body.append(text(left + width, 42 + 62 + 34 + 17, f"{gain:.2f} × as fast", 16, "end", 'font-weight="bold"'))
    title = (
        f"Plain decoding takes {len(plain)} forwards for the text, speculative decoding {len(speculative)} and"
        f" {gain:.2f} times less time; green forwards kept guessed tokens."
    )
    return svg(left + width + 10, 170, title, body)


def layers() -> dict[str, list[str]]:
    """The layers of the package, lowest first, as the contract in pyproject.toml has them: the comments there are their
    names. What a module of a layer may use in it stands to its left."""
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition('\nlayers = [\n')[2].partition("\n]")[0]
    found: dict[str, list[str]] = {}
    for line in map(str.strip, contract.splitlines()):
        if line.startswith("#"): found[name := line[1:].strip()] = []
        else: found[name] += line.strip('",').split(" | ")
    return {name: found[name][::-1] for name in reversed(found)}


def draw_map(found: dict[str, list[str]]) -> str:
    "A band for each layer, the highest on top, with its modules from left to right; the colour is the sub-package."
    colours = {"": FILL["context"], "models": "#fff2cc", "drafters": FILL["accepted"], "device": "#fde2c8",
               "lossless": "#cfe2f3", "train": "#ead1dc", "bench": "#e6dcf2", "engine": "#d9ead3", "app": "#fce5cd",
               "panel": "#d0e0e3"}
    left, wide, body, y = 250, 750, [], 12
    for layer, modules in reversed(found.items()):
        body.append(text(left - 14, y + 22, layer.partition(";")[0], 14, "end", f'fill="{FAINT}"'))
        x = left
        for module in modules:
            words = 8 * len(module) + 18
            if x + words > left + wide: x, y = left, y + 42
            body += box(x, y, words, module, colours[module.rpartition(".")[0]])
            x += words + 8
        y += 54
        body.append(f'<path d="M8 {y - 10} H{left + wide}" stroke="#cbd2d9" stroke-width="1"/>')
    title = "The package in layers: each module uses modules of layers below its own, or to its left, and none above."
    return svg(left + wide + 12, y, title, body[:-1])


def draw_touch(throws: int = 10_000) -> str:
    "The first two panels of the figure that one can touch, as it opens and after so many throws."
    from specdec.panel.touch import PLACES, draw_drag, draw_throw
    place = PLACES["doing"]
    panels = [draw_drag(place, place.q), draw_throw(place, place.q, "exact", throws)]
    moved = [panel.replace("<svg ", f'<svg y="{270 * i}" ', 1) for i, panel in enumerate(panels)]
    title = f"p as outlines and q as bars over six words; below, {throws:,} thrown tokens fill the outlines of p."
    return svg(480, 530, title, moved)


def draw_badge(words: str) -> str:
    "A button in the look of such buttons elsewhere, but our own file."
    wide = 26 + 7.1 * len(words)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} 24" width="{wide:g}" height="24" role="img"'
        f' font-family="Helvetica, Arial, sans-serif">\n<title>{escape(words)}</title>\n<rect width="{wide:g}"'
        f' height="24" rx="5" fill="{INK}"/>\n<path d="M10 7 L18 12 L10 17 Z" fill="#ffd8a8"/>\n<text x="23" y="16.5"'
        f' font-size="13" fill="#ffffff">{escape(words)}</text>\n</svg>\n'
    )


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


def draw_card(race: dict, K: str = "4"):
    """What goes with a link to the site where it is shared, a figure of matplotlib: a title, what it is about, and the
    first lines of the race, as the default model wrote it."""
    import matplotlib
    from matplotlib import font_manager
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch
    matplotlib.rcParams["font.family"] = "DejaVu Sans"
    width, height, size, step, left, top, lines = 1200, 630, 30, 58, 80, 330, 4
    ink, faint = "#1f2328", "#57606a"
    plain, rounds = race["lanes"]["plain"], race["lanes"][K]
    figure = Figure(figsize=(width / 100, height / 100), dpi=100, facecolor="#ffffff")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    axes.add_patch(FancyBboxPatch((0, 0), width, 12, boxstyle="square,pad=0", color="#0b5cad"))
    axes.text(left, 130, "specdec", fontsize=62, fontweight="bold", color=ink)
    axes.text(left, 196, "The same text, sooner: speculative decoding", fontsize=25, color=faint)
    axes.text(left, 238, "from first principles, fast and provably lossless", fontsize=25, color=faint)
    mono = font_manager.FontProperties(family="DejaVu Sans Mono", size=size)
    letter = size * 100 / 72 * 1233 / 2048  # how wide that font draws each
    for row, line in enumerate(pieces(rounds)[:lines]):
        x, y = left, top + step * row
        for words, guessed in line:
            seen = words.strip()
            start, wide = x + letter * words.index(seen), letter * len(seen)
            if guessed and seen:
                box = FancyBboxPatch((start + 1, y - 34), wide - 2, 46, boxstyle="round,pad=0,rounding_size=7")
                axes.add_patch(box)
                box.set(color=LOOKS["accepted"].fill, linewidth=0)
            axes.text(x, y, words, fontproperties=mono, color=ink)
            x += letter * len(words)
    tokens = sum(len(r["text"]) for r in rounds)
    said = f"{tokens} tokens: {len(rounds)} forwards instead of {len(plain)}. Green was guessed, and kept."
    axes.text(left, 588, said, fontsize=20, color=faint)
    return figure


def with_palette(css: str) -> str:
    "The site's style sheet with the palette between its two marks."
    head, _, rest = css.partition("/* The palette: ")
    mark, _, rest = rest.partition("\n")
    _, end, tail = rest.partition("/* End of the palette */")
    return f"{head}/* The palette: {mark}\n{style_sheet()}{end}{tail}"


def races() -> dict:
    "What `tools/race.py` recorded."
    return json.loads((ROOT / "nbs" / "data" / "race.json").read_text(encoding="utf-8"))


PICTURES = {
    "round": lambda: draw_round(*real_round()),
    "map": lambda: draw_map(layers()),
    "colab": lambda: draw_badge("Open in Colab"),
    "race": lambda: draw_race(races()),
    "recorded": lambda: draw_recorded(real_runs()),
    "touch": draw_touch,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the pictures in nbs/images.")
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"palette, card, {', '.join(PICTURES)}; all of them if none is named"
    )
    IMAGES.mkdir(exist_ok=True)
    for name in parser.parse_args().names or ["palette", "card", *PICTURES]:
        if name == "palette":
            STYLES.write_text(with_palette(STYLES.read_text(encoding="utf-8")), encoding="utf-8")
        elif name == "card":
            greedy = next(race for race in races()["races"] if not race["temperature"])
            draw_card(greedy).savefig(IMAGES / "card.png", metadata={"Software": None})
        else:
            (IMAGES / f"{name}.svg").write_text(PICTURES[name](), encoding="utf-8")
