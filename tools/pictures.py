"""Draw the pictures of the front page: `python tools/pictures.py` writes `nbs/images/round.svg` and `nbs/images/map.svg`.

The round is a real one of the default model; the map's arrows are the package's real imports.
"""
import ast
import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "nbs" / "images"
INK, FAINT = "#1f2933", "#52606d"
FILL = {"context": "#e4e7eb", "drafted": "#ffffff", "accepted": "#b7e4c7", "rejected": "#f8c4c4", "replacement": "#ffd8a8", "dropped": "#f5f7fa"}


def svg(width: int, height: int, title: str, body: list[str]) -> str:
    "A picture on a white card, with its title for readers who can't see it."
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
            f'font-family="Helvetica, Arial, sans-serif" fill="{INK}">\n<title>{escape(title)}</title>\n'
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n")


def text(x: float, y: float, words: str, size: int = 15, anchor: str = "start", extra: str = "") -> str:
    "Words at a point."
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" {extra}>{escape(words)}</text>'


def box(x: float, y: float, width: float, words: str, fill: str, extra: str = "", text_extra: str = "") -> list[str]:
    "A rounded box with words in the middle."
    return [f'<rect x="{x}" y="{y}" width="{width}" height="34" rx="6" fill="{fill}" stroke="{FAINT}" {extra}/>',
            text(x + width / 2, y + 22, words, 15, "middle", text_extra)]


def real_round() -> tuple[list[str], list[str], int, str]:
    "A round of the default model in which some draft tokens were accepted and one was not: context, draft, accepted, the target's token."
    from specdec.models import prompts
    from specdec.pairs import load_pair
    pair = load_pair("smollm2", device="cpu", dtype="float32")
    for prompt in reversed(prompts()):
        result = pair.generate(prompt.messages, max_new_tokens=64)
        said = result.generated_ids[:1]
        for r in result.rounds:
            words = [result.token_text[t].strip() for t in [*said[-3:], *r.drafted, r.emitted[-1]]]
            plain = all(re.fullmatch(r"[A-Za-z.,]+", word) for word in words)
            if len(said) >= 3 and len(r.drafted) == 5 and r.accepted == 3 and plain: return words[:3], words[3:8], 3, words[8]
            said += r.emitted
    raise SystemExit("No round with three of five accepted: look at other prompts.")


def draw_round(context: list[str], draft: list[str], accepted: int, target: str) -> str:
    "Draft, verify, commit."
    step, left, body = 104, 196, []
    lefts = [left + 112 * i for i in range(len(draft) + 1)]
    def label(y: int, head: str, small: str): body.extend([text(16, y + 15, head, 15, extra='font-weight="bold"'), text(16, y + 33, small, 12, extra=f'fill="{FAINT}"')])
    label(16, "text so far", "already committed")
    for x, word in zip(lefts, context): body += box(x, 20, step, word, FILL["context"])
    label(84, "1  draft", "cheap guesses from q")
    for x, word in zip(lefts, draft): body += box(x, 88, step, word, FILL["drafted"], 'stroke-dasharray="5 3"')
    label(152, "2  verify", "one forward of the target")
    body += [f'<rect x="{left}" y="156" width="{112 * len(draft) + step}" height="34" rx="6" fill="{INK}"/>',
             text(left + (112 * len(draft) + step) / 2, 178, "p for every position at once", 15, "middle", 'fill="#ffffff"')]
    label(220, "3  accept or resample", "accept with min(1, p/q)")
    for i, (x, word) in enumerate(zip(lefts, draft)):
        if i < accepted: body += box(x, 224, step, "✓ " + word, FILL["accepted"])
        elif i == accepted:
            body += box(x, 224, step, "✗ " + word, FILL["rejected"], text_extra='text-decoration="line-through"')
            body += box(x, 266, step, target, FILL["replacement"], 'stroke-width="2"')
            body.append(text(x + step + 8, 288, "from the residual max(p − q, 0)", 12, extra=f'fill="{FAINT}"'))
        else: body += box(x, 224, step, word, FILL["dropped"], 'stroke-dasharray="2 3"', f'fill="{FAINT}"')
    said = " ".join(draft[:accepted] + [target])
    body.append(text(left, 332, f"{accepted + 1} tokens from one forward of the target: “{said}”", 15, extra='font-weight="bold"'))
    title = f"One round: of {len(draft)} draft tokens the target accepts {accepted}, replaces the next, and drops the rest."
    return svg(left + 112 * len(draft) + step + 16, 350, title, body)


def imports() -> dict[str, set[str]]:
    "Which modules of the package each module imports; the order is the notebooks'."
    names = [re.sub(r"^\d\d[a-z]?_", "", path.stem) for path in sorted((ROOT / "nbs").glob("[0-9]*.ipynb"))]
    names.remove("package")  # __init__: what `import specdec` gives
    found = {}
    for name in names:
        tree = ast.parse((ROOT / "specdec" / f"{name}.py").read_text(encoding="utf-8"))
        used = {node.module.split(".")[-1] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("specdec."))}
        found[name] = used & set(names)
    return found


def draw_map(found: dict[str, set[str]]) -> str:
    "Modules in the order of their notebooks, each a step to the right; an arc for every import."
    names, body, width = list(found), [], 150
    at = {name: (16 + 88 * i, 24 + 42 * i) for i, name in enumerate(names)}
    for name, used in found.items():
        x, y = at[name]
        for other in sorted(used):
            ox, oy = at[other]
            down = ox + 4 + 80 / len(names) * (names.index(name) - names.index(other))  # left of the next box
            body.append(f'<path d="M{down:.1f} {oy + 34} V{y + 17} H{x}" fill="none" stroke="#7b8794" stroke-width="1.2"/>')
    for name, (x, y) in at.items(): body += box(x, y, width, name, FILL["context"])
    return svg(max(x for x, _ in at.values()) + width + 16, max(y for _, y in at.values()) + 58,
               "The modules in the order of their notebooks; every import goes from a later one to an earlier one.", body)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "round.svg").write_text(draw_round(*real_round()), encoding="utf-8")
    (IMAGES / "map.svg").write_text(draw_map(imports()), encoding="utf-8")
