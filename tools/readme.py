"""Write `README.md` from `nbs/index.ipynb`: `python tools/readme.py`, or `--check` to fail when it is not up to date.

nbdev leaves this to Quarto, which is in no package registry. A code host shows plain Markdown from the root of the
repository, so links are rewritten to start there, and what plain Markdown cannot show is an error, not clutter.
"""
import argparse
import re
import sys
from difflib import unified_diff
from pathlib import Path
from posixpath import normpath

import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = "nbs"
NOTICE = "<!-- Written by tools/readme.py from nbs/index.ipynb: edit that notebook, then run `make readme`. -->\n\n"
DIRECTIVE = re.compile(r"^#\|[^\n]*\n?", re.M)
SITE_ONLY = re.compile(r"^</?(?:div|script|link)\b.*\n?", re.M)  # what only a browser with our scripts can use
HIDDEN = re.compile(r"^#\|\s*(?:hide|include:\s*false)\s*$", re.M)
NO_ECHO = re.compile(r"^#\|\s*echo:\s*false\s*$", re.M)
CODE = r"(?P<code>^(?P<fence>```+|~~~+).*?^(?P=fence)[^\n]*$|(?P<ticks>`+).+?(?P=ticks))"
LINK = (r'(?P<open>\]\(|^\[[^\]\n]+\]:\s+|\b(?:src(?:set)?|href)=")(?P<target>[^)\s"]+)'
        r'(?P<close>[^)\n]*\)(?:\{[^}\n]*\})?)?')
CODE_OR_LINK = re.compile(f"{CODE}|{LINK}", re.M | re.S)


def from_root(target: str) -> str:
    "A link of a notebook as it reads from the root of the repository: `00_core.ipynb` is `nbs/00_core.ipynb` there."
    if re.match(r"[a-z][a-z0-9+.-]*:|//|#", target, re.I):
        return target
    return normpath(f"{NOTEBOOKS}/{target}")


def rewrite_links(markdown: str) -> str:
    "Lead links and pictures from the root, and drop Pandoc's `{…}` after them; code is left alone."
    def rewrite(match: re.Match) -> str:
        if match["code"]:
            return match["code"]
        return match["open"] + from_root(match["target"]) + re.sub(r"\{[^}]*\}$", "", match["close"] or "")

    return CODE_OR_LINK.sub(rewrite, markdown)


def problem(cell: nbformat.NotebookNode) -> str | None:
    "What a README could not show of a cell, or None."
    if cell.cell_type == "markdown" and re.search(r"^:::", cell.source, re.M):
        return "a README cannot show a ::: block; write it as plain Markdown"
    if any(kind.startswith("image/") for output in cell.get("outputs", []) for kind in output.get("data", {})):
        return "a cell prints a picture; save it in nbs/images and show it from Markdown instead"
    return None


def reader_cell(cell: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A cell as a reader sees it: without directives, its links led from the root, and no code where only the output is
    meant."""
    if cell.cell_type == "code" and NO_ECHO.search(cell.source):
        cell.metadata.transient = {"remove_source": True}
    markdown = cell.cell_type == "markdown"
    cell.source = rewrite_links(SITE_ONLY.sub("", cell.source)) if markdown else DIRECTIVE.sub("", cell.source)
    return cell


def is_shown(cell: nbformat.NotebookNode) -> bool:
    "Whether a cell belongs in the README: front matter and hidden cells do not."
    return cell.cell_type != "raw" and not (cell.cell_type == "code" and HIDDEN.search(cell.source))


def readme(notebook: Path) -> str:
    "The README that a notebook makes."
    nb = nbformat.read(notebook, as_version=4)
    shown = [cell for cell in nb.cells if is_shown(cell)]
    if problems := list(filter(None, map(problem, shown))):
        sys.exit("\n".join(f"nbs/index.ipynb: {p}" for p in problems))
    nb.cells = [reader_cell(cell) for cell in shown]
    nb.metadata.language_info = {"name": "python"}  # nbdev_clean drops it, and it names the language of code blocks
    body, _ = MarkdownExporter().from_notebook_node(nb)
    return NOTICE + re.sub(r"\n{3,}", "\n\n", body).strip() + "\n"


def main() -> None:
    "Write README.md, or check it."
    parser = argparse.ArgumentParser(description="Write README.md from nbs/index.ipynb.")
    parser.add_argument("--check", action="store_true", help="fail with a diff when README.md is not up to date")
    path, fresh = ROOT / "README.md", readme(ROOT / NOTEBOOKS / "index.ipynb")
    if not parser.parse_args().check:
        path.write_text(fresh, encoding="utf-8")
        return
    committed = path.read_text(encoding="utf-8") if path.exists() else ""
    diff = unified_diff(committed.splitlines(), fresh.splitlines(), "README.md", "from nbs/index.ipynb", lineterm="")
    sys.exit("\n".join(diff) or 0)


if __name__ == "__main__":
    main()
