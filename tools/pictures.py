"""Draw the pictures in `nbs/images`: `python tools/pictures.py` draws all of them, `python tools/pictures.py map` one.

`round.svg` plays rounds of a recorded run, and `round-still.svg` is its end for those who want no motion; `results.svg`
shows what drafts gain by the stored measurements, `race.svg` a real race, `rollback.svg` a cache that forgets,
`map.svg` the layers of the package,
`recorded.svg` stands in for the sliders of the recorded runs where no script runs, `touch.svg` for the figure that one
can touch, `colab.svg` is the badge that opens a notebook there, and `card.png` goes with a link to the site where it is
shared. `palette` writes the colours of `specdec/panel/palette.py` into the site's style sheet.
"""
import argparse
import json
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


def real_rounds(data: dict, shown: int = 3) -> tuple[list[str], list[dict]]:
    """Some rounds of a recorded run, whose drafts were drawn: the last has a token rejected, those before keep all of
    theirs. Before them, the tokens that stood there already."""
    at = {"prompt": "song", "drafter": "smollm2-skip", "temperature": 0.7, "K": 4}
    run = next(r for r in data["runs"] if all(r[name] == value for name, value in at.items()))
    words, said = data["tokens"], [run["first"]]
    for n, first in enumerate(run["rounds"]):
        rounds = run["rounds"][n:n + shown]
        rejected = [len(r["draft"]) - r["accepted"] for r in rounds]
        if len(rounds) == shown and not any(rejected[:-1]) and rejected[-1] and rounds[-1]["accepted"]:
            return [words[token] for token in said], [
                {"draft": [words[token] for token in r["draft"]], "accepted": r["accepted"], "own": words[r["own"]]}
                for r in rounds]
        said += [*first["draft"][:first["accepted"]], first["own"]]
    raise SystemExit("No such rounds were recorded: look at other runs.")


class Film:
    "A picture that plays in a loop, by its reader's clock; a still has what stands there at the end."
    def __init__(self, seconds: float, still: bool):
        self.seconds, self.still, self.rules = seconds, still, []

    def seen(self, parts: list[str], start: float, end: float | None = None, grows: bool = False) -> str:
        "Parts that are seen between two seconds, `None`: to the end; what grows does so from its left, for a second."
        if self.still: return "" if end else "".join(parts)
        n, a, b = len(self.rules), 100 * start / self.seconds, 100 * (end or self.seconds) / self.seconds
        full = a + 100 * (1 if grows else .25) / self.seconds
        gone, there = ("transform:scaleX(0)", "transform:none") if grows else ("opacity:0", "opacity:1")
        after = f"{b:.2f}%{{{there};opacity:1}}{b + .01:.2f}%,100%{{opacity:0}}" if end else f"100%{{{there}}}"
        self.rules.append(f"@keyframes k{n}{{0%,{a:.2f}%{{{gone}}}{full:.2f}%{{{there}}}{after}}}"
                          f".k{n}{{animation:k{n} {self.seconds:g}s linear -2.6s infinite;transform-box:fill-box}}")
        return f'<g class="k{n}">{"".join(parts)}</g>'

    def style(self) -> list[str]:
        "What plays it."
        return ["<style>", *self.rules, "</style>"] if self.rules else []


def draw_round(said: list[str], rounds: list[dict], still: bool = False) -> str:
    """Rounds, one after the other: some tokens are drafted, read by one forward of the target, kept or replaced, and
    stand in the text. Steps have their names above them, so that the picture is readable at phone width."""
    left, step, wide, letter, each = 4, 92, 86, 9.0, 5.5
    film, body = Film(each * len(rounds) + 3.5, still), []
    slots = 1 + max(len(r["draft"]) for r in rounds)
    width = step * (slots - 1) + wide

    def label(y: int, head: str, small: str) -> None:
        body.extend([text(left, y, head, 16, extra='font-weight="bold"'),
                     text(left + 8.6 * len(head) + 8, y, small, 15, extra=f'fill="{FAINT}"')])

    def shown(token: str) -> str: return token.strip() or "⏎"
    line, column = 0, 0

    def written(token: str, status: str = "") -> list[str]:
        "A token where it stands in the text, of letters that are all as wide."
        nonlocal line, column
        if token == "\n":
            line, column = line + 1, 0
            return []
        word, x = token.strip(), left + 10 + letter * (column + len(token) - len(token.lstrip()))
        column += len(token)
        back = f'<rect x="{x - 2:g}" y="{10 + 24 * line}" width="{letter * len(word) + 4:g}" height="21" rx="4"'
        long = f'textLength="{letter * len(word):g}" font-family="DejaVu Sans Mono, Menlo, Consolas, monospace"'
        return ([f'{back} fill="{FILL[status]}"/>'] if status else []) + [text(x, 26 + 24 * line, word, 15, extra=long)]

    body.append(f'<rect x="{left}" y="2" width="{width}" height="86" rx="6" fill="none" stroke="{FAINT}"/>')
    for token in said: body += written(token)
    label(114, "1  Draft", "a cheap drafter guesses")
    label(182, "2  Verify", "one forward of the target")
    label(244, "3  Keep or replace", "so that the text stays the target’s")
    tokens, commits = 0, [each * n + 3.4 + .3 * r["accepted"] for n, r in enumerate(rounds)]
    for n, r in enumerate(rounds):
        last = n == len(rounds) - 1
        start, end = each * n, None if last else each * (n + 1) - .2
        for i, token in enumerate(r["draft"]):
            x, word, kept = left + step * i, shown(token), i < r["accepted"]
            guess = box(x, 122, wide, word, FILL["drafted"], 'stroke-dasharray="5 3"')
            body.append(film.seen(guess, start + .2 + .3 * i, end))
            if kept: verdict = box(x, 252, wide, f"✓ {word}", FILL["accepted"])
            elif i == r["accepted"]:
                verdict = box(x, 252, wide, word, FILL["rejected"], text_extra='text-decoration="line-through"')
            else: verdict = box(x, 252, wide, word, FILL["dropped"], 'stroke-dasharray="2 3"', f'fill="{FAINT}"')
            body.append(film.seen(verdict, start + 2.8 + .3 * min(i, r["accepted"]), end))
        bar = f'<rect x="{left}" y="190" width="{width}" height="26" rx="6" fill="{INK}"/>'
        body.append(film.seen([bar], start + 1.6, end, grows=True))
        words = text(left + width / 2, 208, "its probabilities at every place, at once", 15, "middle", 'fill="#ffffff"')
        body.append(film.seen([words], start + 2.5, end))
        x, bonus = left + step * r["accepted"], r["accepted"] == len(r["draft"])
        own = box(x, 252 if bonus else 292, wide, shown(r["own"]), FILL["bonus" if bonus else "corrected"],
                  'stroke-width="2"')
        if not bonus: own.append(text(x - 8, 314, "the target’s own:", 15, "end", f'fill="{FAINT}"'))
        body.append(film.seen(own, commits[n] - .3, end))
        status = ["accepted"] * r["accepted"] + ["bonus" if bonus else "corrected"]
        news = [part for token, kind in zip([*r["draft"][:r["accepted"]], r["own"]], status)
                for part in written(token, kind)]
        body.append(film.seen(news, commits[n]))
        tokens += r["accepted"] + 1
        forwards = f"{n + 1} forward{'s' if n else ''}"
        counter = text(left, 352, f"{tokens} tokens from {forwards} of the target", 16, extra='font-weight="bold"')
        body.append(film.seen([counter], commits[n], None if last else commits[n + 1]))
    title = (
        f"{len(rounds)} rounds as they were recorded: of the draft tokens of each, one forward of the target keeps as"
        f" many as fit and adds a token of its own; {tokens} tokens from {len(rounds)} forwards."
    )
    return svg(width + 2 * left, 364, title, [*film.style(), *filter(None, body)])


def draw_rollback(capacity: int = 8) -> str:
    "A cache of one buffer: what is written, what is forgotten, and the number that says so."
    left, step, wide, tall, body = 4, 57, 53, 98, []
    rows = [("append: the text", "context", 5, 5), ("append: two draft tokens, both wrong", "drafted", 7, 7),
            ("rollback(5): one assignment", "rejected", 7, 5), ("append: three other tokens", "bonus", 8, 8)]
    for n, (what, kind, filled, length) in enumerate(rows):
        y = tall * n
        body.append(text(left, y + 18, what, 16, extra='font-weight="bold"'))
        for i in range(capacity):
            new = i >= 5
            dashed = 'stroke-dasharray="5 3"' if new and kind == "drafted" or i >= filled else ""
            struck = 'text-decoration="line-through"' if new and kind == "rejected" else ""
            fill = FILL[kind if new else "context"] if i < filled else "#ffffff"
            body += box(left + step * i, y + 28, wide, f"row {i}" if i < filled else "", fill, dashed, struck)
        x = left + step * length - 2
        body.append(f'<path d="M{x} {y + 24} v44" stroke="{INK}" stroke-width="4"/>')
        body.append(text(x - 6, y + 82, f"length = {length}", 15, "end", f'fill="{FAINT}"'))
    title = "A buffer of eight rows: five are written, then two, which a smaller length forgets, then others."
    return svg(2 * left + step * capacity, tall * len(rows), title, body)


def stored(name: str) -> dict:
    "A file of measurements."
    return json.loads((ROOT / "nbs" / "data" / f"{name}.json").read_text(encoding="utf-8"))


def gains(real: dict, used: dict) -> dict[str, dict[str, dict[str, tuple[float, float | None]]]]:
    """Times as fast as plain decoding by the stored measurements, by machine, model and temperature: the default model,
    and one that people use at each kind of work, with the drafts that are fastest there. Beside the latter the speed of
    llama.cpp in its fastest mode, on the same scale."""
    found = {real["processor"]: {f"SmolLM2-135M, {dtype}, {real['prompts']} prompts": {
        T: (one["over_plain"], None) for T, one in both.items()} for dtype, both in real["results"].items()}}
    beside = found.setdefault(used["environment"]["processor"].replace("(R)", "").removesuffix(" Processor"), {})
    for row in used["rows"]:
        speed, way = row["tokens_per_second"], row["best"].rpartition(" T=")[0]
        gain = row["drafts_vs_plain"][way.removeprefix("drafts ").removeprefix("of ").removesuffix(" int8")]
        kinds = beside.setdefault(f"Qwen2.5-Coder-1.5B, int8, {row['kind']}", {})
        kinds[f"{row['temperature']:g}"] = gain, speed[row["llama.cpp"]] / speed[row["plain"]]
    return found


def draw_results(found: dict) -> str:
    "A bar for each, on one scale whose unit is plain decoding: filled when greedy, hatched when sampled."
    left, width, tall, y = 4, 454, 20, 0
    most = max(gain for models in found.values() for bars in models.values() for gain, _ in bars.values())
    scale, green, body, halo = (width - 46) / most, LOOKS["accepted"], [], 'paint-order="stroke" stroke="#ffffff"'
    for machine, models in found.items():
        y += 22
        body.append(text(left, y, f"{machine}, two threads", 15, extra=f'fill="{FAINT}" {halo} stroke-width="6"'))
        for name, bars in models.items():
            y += 26
            body.append(text(left, y, name, 15, extra=f'font-weight="bold" {halo} stroke-width="6"'))
            y += 6
            for T, (gain, other) in bars.items():
                fill = green.fill if T == "0" else "url(#sampled)"
                body.append(f'<rect x="{left}" y="{y}" width="{gain * scale:.1f}" height="{tall}" fill="{fill}"'
                            f' stroke="{INK}"/>')
                body.append(text(left + gain * scale + 6, y + 16, f"{gain:.2f}", 15))
                if other: body.append(f'<path d="M{left + other * scale:.1f} {y - 1} v{tall + 2}" stroke-width="4"'
                                      f' stroke="{LOOKS["rejected"].line}"/>')
                y += tall + 3
        y += 12
    one, hatch = left + scale, f'<path d="M0 3 H6" stroke="{green.line}" stroke-width="2"/>'
    body.insert(0, f'<defs><pattern id="sampled" width="6" height="6" patternUnits="userSpaceOnUse"'
                   f' patternTransform="rotate(45)"><rect width="6" height="6" fill="#ffffff"/>{hatch}</pattern>'
                   '</defs>')
    body.insert(0, f'<path d="M{one:.1f} 30 V{y}" stroke="{INK}" stroke-width="2" stroke-dasharray="6 4"/>')
    key = [("greedy", f'<rect x="{{}}" y="{{}}" width="22" height="14" fill="{green.fill}" stroke="{INK}"/>'),
           ("temperature 1", f'<rect x="{{}}" y="{{}}" width="22" height="14" fill="url(#sampled)" stroke="{INK}"/>'),
           ("plain decoding", f'<path transform="translate({{}} {{}})" d="M11 -2 V18" stroke="{INK}" stroke-width="2"'
                              ' stroke-dasharray="6 4"/>'),
           ("llama.cpp at its fastest", f'<path transform="translate({{}} {{}})" d="M11 -2 V18" stroke-width="4"'
                                        f' stroke="{LOOKS["rejected"].line}"/>')]
    for i, (words, sign) in enumerate(key):
        x, at = left + 220 * (i % 2), y + 14 + 26 * (i // 2)
        body += [sign.format(x, at), text(x + 30, at + 12, words, 15)]
    title = "Times as fast as plain decoding: " + "; ".join(
        f"{name}, {' and '.join(f'{gain:.2f}' for gain, _ in bars.values())}"
        for models in found.values() for name, bars in models.items())
    return svg(width + 2 * left, y + 66, f"{title} (greedy and at temperature 1).", body)


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
    return unpacked(stored("recorded"))


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


PICTURES = {
    "round": lambda: draw_round(*real_rounds(real_runs())),
    "round-still": lambda: draw_round(*real_rounds(real_runs()), still=True),
    "results": lambda: draw_results(gains(stored("choosing"), stored("target"))),
    "map": lambda: draw_map(layers()),
    "colab": lambda: draw_badge("Open in Colab"),
    "rollback": draw_rollback,
    "race": lambda: draw_race(stored("race")),
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
            greedy = next(race for race in stored("race")["races"] if not race["temperature"])
            draw_card(greedy).savefig(IMAGES / "card.png", metadata={"Software": None})
        else:
            (IMAGES / f"{name}.svg").write_text(PICTURES[name](), encoding="utf-8")
