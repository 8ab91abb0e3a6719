"""Build the documentation site: `python tools/site.py [--out docs]`.

nbdev turns the notebooks into pages with `show_doc` entries and links between names; Quarto usually renders those.
Quarto is in no package registry, so here smalldocs renders the same sources, and this module adds what it lacks:
nbdev's page names, KaTeX and fonts served from the site itself, pictures as files named by their content and with
their size, a sidebar with titles for people, a search that puts words before code, and pages that begin with their
idea: imports are folded, what a module exports is listed at the end. On the path, the answer to a **Predict** is folded
until it is asked for. A name that several modules define leads to the right one. The pages fetch nothing from other
sites, and building one tree twice gives the same bytes.
"""
import argparse
import ast
import builtins
import gc
import inspect
import json
import keyword
import logging
import os
import posixpath
import re
import shutil
import struct
import sys
from base64 import b64decode, b64encode
from collections import Counter
from functools import cache
from hashlib import sha256
from html import escape, unescape
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import yaml
from fastcore import docments
from fastcore.xml import A, Button, Details, Div, Li, Nav, Ol, Safe, Span, Summary, Ul
from fontTools import subset
from nbdev import processors
from nbdev.config import get_config
from nbdev.doclinks import NbdevLookup, _lineno
from nbdev.quarto import refresh_quarto_yml
from nbdev.serve import proc_nbs
from smalldocs import config, highlight, layout, markdown, notebook
from smalldocs.site import Site

from specdec.models.files import place_for

ROOT = Path(__file__).resolve().parents[1]
KATEX = "site_libs/katex"
CSS_IMPORT = re.compile(r"@import\s*(?:url\([^)]*\)|\"[^\"]*\"|'[^']*')[^;{}]*;")
NEW_FONT = re.compile(r'src:url\([^)]*\.woff2[^)]*\) format\("woff2"\),')
OLD_FONT = re.compile(r',url\([^)]*\.(?:woff|ttf)\) format\("\w+"\)')
LAST_MODIFIED = re.compile(r"\s*<lastmod>.*?</lastmod>")
PICTURE = re.compile(r"data:image/(png|jpeg|gif|svg\+xml);base64,([A-Za-z0-9+/=][A-Za-z0-9+/=\s]{40,})")
TAG = re.compile(r"<[^>]+>")
ID = re.compile(r'\bid="([^"]+)"')
ICON = re.compile(r'\.bi-([\w-]+)::before\{content:"[^"]*"\}')
# nbdev links names in a signature's comments, where no link can be
LINK_IN_CODE = re.compile(r"\[`([\w.]+)`\]\(https?://[^)\s]+\)")
EXPORTED = '#| code-fold: show\n#| code-summary: "Exported source"\n'  # how nbdev marks an exported cell
ENTRY = "#| echo: false\n#| output: asis\nshow_doc("  # and an entry on what it exports
LINKED = re.compile(r"\[(`([\w.]+)(?:\(\))?`)\]\((https?://[^)\s]+)\)")  # a name in prose, as nbdev links it
INSIDE = re.compile(r"\[\[(`[^`]+`)\]\([^)\s]+\)\](?=\()")  # such a name, where it is a link's own text
SOURCE = re.compile(r"(/blob/[^/]+/)[^)\s]*#L\w+")  # the end of nbdev's link to a line of the repository
# in code; a plain word where it is called
NAME = re.compile(r"\b(?:(?=[a-z]*[A-Z_0-9])[A-Za-z_]\w{2,}|[a-z]{3,}(?=\())")
WORD = re.compile(r"\b[A-Za-z_]\w{2,}")
SHOWN_PICTURE = re.compile(r'<img\b[^>]*?\bsrc="([^":]+\.(?:svg|png))"[^>]*>')
DRAWN = re.compile(r'\s(width|height|viewBox)="([^"]*)"')
PIXELS = {"": 1, "px": 1, "pt": 4 / 3}
CHOICES = re.compile(r"<p>(?=(?:<strong><a [^>]*>[^<]*</a></strong>\s*){2,}</p>)")  # nothing but links in bold
NO_HEADER = re.compile(r"<th\b[^>]*>\s*</th>")  # a corner of a table heads nothing
CELL = re.compile(r'<td( style="[^"]*")?>((?:(?!</?td).){1,120})</td>', re.S)
FIGURES = re.compile(r"[-+−~≈<>≤≥]?\s*\d(?:[^A-Za-z]|\b(?:to|of|ms|s|GB|MB|kB)\b)*")  # a number, a pair, an interval

layout.KATEX = KATEX  # where pages look for KaTeX; `finish_pages` leads them there from their own folder
logging.getLogger("fontTools").setLevel(logging.ERROR)  # two bytes too many in the icons' font are none of our business
config.PAGE_KEYS.add("output-file")  # NbdevSite.read reads it, so smalldocs need not warn
config.KNOWN["unlisted"] = None  # so does `page_titles` with the pages that the menu leaves out
config.KNOWN["terms"] = None  # and `write_search` with the words that find a page
smalldocs_output = notebook.output_html


def shorter_paths(svg: str) -> str:
    """Coordinates to a tenth of a point, without the spaces that a path can do without and those that set one element
    below another; no eye sees more, and a page is lighter by a third of its pictures."""
    def path(match: re.Match) -> str:
        tenths = re.sub(r"(\.\d)\d+", r"\1", match[0]).replace(".0 ", " ")
        return re.sub(r"\s*([A-Za-z])\s*", r"\1", tenths)

    shorter = re.sub(r'(?<=\s)([xy]="-?\d+\.\d)\d+', r"\1", re.sub(r'(?<=\sd=")[^"]*', path, svg))
    return re.sub(r">\s*\n\s*<", "><", shorter)


def output_html(output: dict, options: dict | None = None, n: int = 0) -> str:
    """smalldocs' rendering of a cell output, with an SVG as `<img>` like any other picture, so that it too becomes a
    file."""
    svg = output.get("data", {}).get("image/svg+xml")
    if svg is None:
        return smalldocs_output(output, options, n)
    data = b64encode(shorter_paths("".join(svg)).encode()).decode()
    image = notebook.figure(f'<img src="data:image/svg+xml;base64,{data}" class="img-fluid">', options or {}, n)
    return notebook.raw_html(f'<div class="cell-output cell-output-display">\n{image}\n</div>')


notebook.output_html = output_html
smalldocs_options = notebook.cell_options


def cell_options(code: str) -> tuple[dict, str]:
    "smalldocs' reading of a cell's `#|` options, line by line: a sentence with a colon in it needs no quotes."
    options, rest = smalldocs_options(code)
    for key, value in re.findall(r"^#\|\s*([\w-]+):\s+(.+)$", code, re.M):
        if key not in options: options[key] = value.strip().strip("\"'")
    return options, rest


notebook.cell_options = cell_options


def search_text(rules, state) -> None:
    """What stands under each heading, for the search index: smalldocs' text, and apart from it the names that only code
    has there, Python's own left out."""
    parts = [{"id": "", "title": "", "text": [], "code": []}]
    for before, token in zip([None, *state.tokens], state.tokens):
        if token.type == "heading_open":
            attributes = (token.meta or {}).get("attrs")
            parts.append({"id": attributes.id if attributes else "", "title": (token.meta or {}).get("text", ""),
                          "text": [], "code": []})
        elif token.type == "inline" and (before is None or before.type != "heading_open"):
            parts[-1]["text"].append(markdown.plain(token.children))
        elif token.type in ("fence", "code_block") and not token.info.strip().startswith("{="):
            parts[-1]["code"].append(token.content)
    for part in parts:
        part["text"] = " ".join(" ".join(part["text"]).split())
        said = set(WORD.findall(f"{part['title']} {part['text']}")) | set(keyword.kwlist) | set(dir(builtins))
        part["code"] = sorted(set(NAME.findall(LINK_IN_CODE.sub(r"\1", " ".join(part["code"])))) - said)
    state.env["search"] = [part for part in parts if part["text"] or part["code"] or part["id"]]


markdown.Rules.search_text = search_text
highlight.css_class = cache(highlight.css_class)  # asked for each of 300,000 pieces of code, and there are few kinds


def signature(function, eval_str: bool = False, **options) -> inspect.Signature:
    "A signature with its types as they are written, where one is in quotes and only defined further down the notebook."
    try: return inspect.signature(function, eval_str=eval_str, **options)
    except NameError: return inspect.signature(function, **options)


docments.signature = signature
processors._hide_dirs.discard("exporti")  # a reader sees all code; `exporti` only keeps a name out of `__all__`


# Notebooks, before they become pages

def named(code: str) -> set[str]:
    "The names that the statements of a cell define; none where it is not plain Python."
    try: body = ast.parse(code).body
    except SyntaxError: return set()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    targets = [t for node in body if isinstance(node, ast.Assign) for t in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return {node.name for node in body if isinstance(node, kinds)} | {t.id for t in targets if isinstance(t, ast.Name)}


def only_imports(code: str) -> bool:
    "Whether a cell holds imports and nothing else; the lines of `#|` and a file's docstring are not counted."
    try: body = ast.parse(code).body
    except SyntaxError: return False
    return bool(body) and all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body)


def markdown_cell(text: str) -> dict:
    "A cell with that text."
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def source_link(link: str, name: str, module: str | None) -> str:
    "nbdev's link to the source of a name, led to the page's own module where that defines it, not to a namesake."
    file = f"specdec/{module.replace('.', '/')}.py" if module else None
    line = _lineno(name, file)
    return SOURCE.sub(rf"\g<1>{file}#L{line}", link) if line else link


def entry(cell: dict, built: set[str], module: str | None) -> str | None:
    """What a `show_doc` cell says: a heading, the signature, the docstring, the place in the repository. None for any
    other cell. A name that was `built` on the page is found there, and its entry gets another anchor."""
    if not "".join(cell["source"]).startswith(ENTRY): return None
    text = "".join(cell["outputs"][0]["data"]["text/markdown"]).removeprefix("---\n\n")
    link = re.match(r"(\[source\]\([^)]*\))\S* ?[^\n]*\n+", text)
    name = re.search(r"^### (.+)$", text, re.M)
    if link: text = f"{text[link.end():].rstrip()}\n\n{source_link(link[1], name[1] if name else '', module)}"
    text = re.sub(r"```python\ndef \w+\(\n    \*args, \*\*kwargs\n\):\n```\n", "", text)  # of a protocol: says nothing
    text = re.sub(r"^def ([A-Z]\w*\()", r"class \1", text, flags=re.M)  # nbdev shows how a class is called
    text = re.sub(r"^\)->None:$", ")", text, flags=re.M)
    text = re.sub(r"^\*([^*\n][^*]*?)\*(?=\n|\Z)", r"\1", text, flags=re.M)  # and slants a docstring's first line
    if name and name[1] in built: text = text.replace(name[0], f"{name[0]} {{#api-{name[1].lower()}}}", 1)
    return text


def for_readers(cells: list[dict], module: str | None) -> list[dict]:
    """The cells in a reader's order: imports folded, one box for what one cell printed, exported code under the name of
    its module, and the entries on what the module exports at the end."""
    sources = ["".join(cell["source"]) for cell in cells]
    built = set().union(*[named(code) for code in sources if code.startswith(EXPORTED)])
    entries = [text for cell in cells if (text := entry(cell, built, module))]
    documented = set(re.findall(r"^### (\w+) \{#api-", "\n".join(entries), re.M))
    shown: list[dict] = []
    anchored: set[str] = set()  # `Trial` and `trial` have one address
    for cell, code in zip(cells, sources):
        if cell["cell_type"] != "code" or entry(cell, built, module):
            if cell["cell_type"] != "code": shown.append(cell)
            continue
        bare = code.removeprefix(EXPORTED)
        if only_imports(bare) and not cell.get("outputs"):
            last = "".join(shown[-1]["source"]) if shown else ""
            if last.startswith(IMPORTS): shown[-1]["source"] = f"{last}\n\n{bare}"
            else: shown.append({**cell, "source": IMPORTS + bare})
            continue
        if code.startswith(EXPORTED):
            for anchor in sorted({name.lower() for name in named(bare) & documented} - anchored):
                shown.append(markdown_cell(f'<div id="{anchor}" class="built"></div>'))
                anchored.add(anchor)
            file = f"specdec/{module.replace('.', '/')}.py" if module else "Exported source"
            code = EXPORTED.replace("Exported source", file) + bare
        shown.append({**cell, "source": code, "outputs": joined(cell.get("outputs", []))})
    return shown + [markdown_cell("## API\n\n" + "\n\n".join(entries))] if entries else shown


IMPORTS = '#| code-fold: true\n#| code-summary: "Imports"\n'


def with_answers_folded(cells: list[dict]) -> list[dict]:
    """The cells with each answer to a **Predict** folded until it is asked for: what the next code prints, and the
    paragraph after it, unless that asks the next question. Pictures stand in the open, before the fold. A heading in
    between ends a question unanswered."""
    shown: list[dict] = []
    rest, asked = list(cells), False
    answer: list[dict] | None = None  # what the fold holds, from the first output on

    def closed(fold: list[dict]) -> list[dict]:
        return [markdown_cell(ANSWER), *fold, markdown_cell("</details>")] if fold else []

    while rest:
        cell = rest.pop(0)
        text = "".join(cell["source"])
        if cell["cell_type"] != "code" and answer is not None:
            first, _, others = text.partition("\n\n")
            if PARAGRAPH.fullmatch(first) and "**Predict" not in first:
                answer.append(markdown_cell(first))
                if others: rest.insert(0, markdown_cell(others))
            else: rest.insert(0, cell)
            shown += closed(answer)
            asked, answer = False, None
        elif cell["cell_type"] != "code":
            asked = "**Predict" in text or asked and not HEADING.search(text)
            shown.append(cell)
        elif asked and cell.get("outputs") and not UNSHOWN.search(text):
            pictures = [output for output in cell["outputs"] if is_picture(output)]
            words = [output for output in cell["outputs"] if not is_picture(output)]
            if answer is None or pictures:
                shown.append({**cell, "outputs": pictures})
                cell = {**cell, "source": f"#| echo: false\n{text}", "outputs": words}
            answer = [*(answer or []), *([cell] if words else [])]
        else: (shown if answer is None else answer).append(cell)
    return [*shown, *closed(answer or [])]


def is_picture(output: dict) -> bool:
    "Whether a cell's output is one."
    return any(kind.startswith("image/") for kind in output.get("data", {}))


ANSWER = '<details class="predict"><summary>See the answer</summary>'
# no heading, list, quotation, table, formula or HTML, and nothing that leads to one
PARAGRAPH = re.compile(r"(?![#<>|$-]|\d+\. |:::|```).*[^:\s]\s*", re.S)
HEADING = re.compile(r"^#", re.M)
UNSHOWN = re.compile(r"^#\|\s*output:\s*false", re.M)


def joined(outputs: list[dict]) -> list[dict]:
    "A cell's outputs with what was printed in one piece, however often it was flushed."
    one: list[dict] = []
    for output in outputs:
        same = one and output["output_type"] == one[-1]["output_type"] == "stream" and output["name"] == one[-1]["name"]
        if same: one[-1] = {**one[-1], "text": "".join(one[-1]["text"]) + "".join(output["text"])}
        else: one.append(output)
    return one


def namesakes(package: str) -> dict[str, dict[str, str]]:
    "Of each name that several modules of the package define: the address of its entry, by module."
    found: dict[str, dict[str, str]] = {}
    for module, names in NbdevLookup().entries[package]["syms"].items():
        for name, (address, *_) in names.items():
            found.setdefault(name.removeprefix(f"{module}."), {})[module] = address
    return {name: places for name, places in found.items() if len(places) > 1}


def given(package: str) -> dict[str, str]:
    "The names that `import` of the package gives, with the module that defines each."
    top = import_module(package)
    return {name: module for name in top.__all__ if (module := getattr(getattr(top, name), "__module__", None))}


def disambiguated(text: str, module: str | None, shared: dict[str, dict[str, str]], public: dict[str, str]) -> str:
    """Lead each linked name that several modules define, where nbdev takes the first, to this page's own, else to the
    one that `import specdec` gives, else nowhere: no link is better than a wrong one. A name that stands in a link
    leads where that one does."""
    def led(match: re.Match) -> str:
        code, name, address = match.groups()
        places = shared.get(name, {})
        if address not in places.values(): return match[0]
        right = places.get(module) or places.get(public.get(name))
        return f"[{code}]({right})" if right else code

    return LINKED.sub(led, INSIDE.sub(r"[\1]", text))


@cache
def module_of(notebook: Path) -> str | None:
    "The module of the package that a notebook is exported to, its own before those that it adds to: `drafters.lookup`."
    text = notebook.read_text(encoding="utf-8")
    found = re.search(r"#\| default_exp ([\w.]+)", text) or re.search(r"#\| (?:exports|exporti) ([\w.]+)", text)
    return found and found[1]


def prepare(processed: Path, nbs: Path, package: str) -> None:
    "Put the cells of nbdev's processed notebooks into a reader's order, and lead names that are not unique."
    shared, public = namesakes(package), given(package)
    for path in sorted(processed.rglob("*.ipynb")):
        own = nbs / path.relative_to(processed)
        module = module_of(own)
        book = json.loads(path.read_text(encoding="utf-8"))
        for cell in book["cells"]:  # a cell of a module says it by a tag: directives would stand in the module
            if "fold" not in cell["metadata"].get("tags", []): continue
            code = "".join(cell["source"])
            marks = EXPORTED if code.startswith(EXPORTED) else ""
            cell["source"] = f"{marks}#| code-fold: true\n{code.removeprefix(EXPORTED)}"
        book["cells"] = for_readers(book["cells"], module)
        if own.parent == nbs / "path": book["cells"] = with_answers_folded(book["cells"])
        told = [(cell, "source") for cell in book["cells"] if cell["cell_type"] == "markdown"]
        told += [(output["data"], "text/markdown") for cell in book["cells"] for output in cell.get("outputs", [])
                 if "text/markdown" in output.get("data", {})]
        for part, key in told:
            part[key] = disambiguated("".join(part[key]), f"{package}.{module}", shared, public)
        path.write_text(json.dumps(book), encoding="utf-8")


# Pages

def icon(*names: str) -> Safe:
    "Icons, for eyes only."
    return Safe("".join(f'<i class="bi bi-{name}" aria-hidden="true"></i>' for name in names))


class PageLayout(layout.Layout):
    "smalldocs' page with our sidebar and our bar, a link past them, and a picture for those who share it."

    def label(self, item: layout.Item) -> list:
        """An entry of the sidebar: a title for people, a step of the path with its number; behind the last door, where
        one looks for a module, its name too."""
        last = item.page and self.sidebar["items"][-1].contains(item.page)
        name = module_of(ROOT / "nbs" / item.page.src) if last else None
        number = [Span(f"{step}", cls="menu-step"), " "] if item.page and (step := step_of(item.page.src)) else []
        return [*number, Span(Safe(item.text), cls="menu-text"), *([" ", Span(name, cls="menu-name")] if name else [])]

    def side_item(self, item: layout.Item, depth: int) -> Li:
        "A page, or a section that folds, open where the reader is; what stands after its colon says what it is for."
        if item.section:
            name, _, purpose = item.text.partition(": ")
            here = item.contains(self.page)
            head = Summary(Span(Safe(name), cls="track"), *([Span(Safe(purpose), cls="purpose")] if purpose else []))
            inside = Ul(*[self.side_item(child, depth + 1) for child in item.children], cls="list-unstyled")
            return Li(Details(head, inside, open=here), cls="sidebar-item")
        here = {"aria-current": "page"} if item.page is self.page else {}
        look = f"sidebar-link{' active' if here else ''}"
        return Li(A(*self.label(item), href=self.href(item.href), cls=look, **here), cls="sidebar-item")

    def scheme_button(self) -> Button:
        "Light or dark: the icon shows what one gets."
        return Button(icon("moon-stars", "sun"), type="button", cls="site-scheme", aria_label="Light or dark",
                      title="Light or dark", onclick="smalldocsToggleScheme()")

    def home(self) -> A:
        "The way to the front page."
        return A(self.web["title"], href=self.offset() or "./", cls="site-title")

    def sidebar_html(self, toc: list | None = None) -> list:
        "Title, light or dark, search, and all pages."
        field = Safe('<input type="search" placeholder="Search" aria-label="Search" autocomplete="off">')
        search = Div(icon("search"), field, Div(cls="site-results", hidden=True), cls="site-search")
        pages = Ul(*[self.side_item(item, 1) for item in self.sidebar["items"]], cls="list-unstyled")
        return [Nav(Div(self.home(), self.scheme_button(), cls="site-head"), search, pages, id="quarto-sidebar",
                    cls="sidebar sidebar-navigation docked", aria_label="All pages"),
                Div(id="quarto-sidebar-glass")]

    def secondary_nav(self) -> list:
        "The bar of a narrower window: all pages, where one is, search, light or dark, and what is on this page."
        menu = Button(icon("list"), type="button", cls="site-menu", aria_controls="quarto-sidebar",
                      aria_label="All pages", aria_expanded="false")
        find = Button(icon("search"), type="button", cls="site-find", aria_label="Search")
        where = self.crumbs_html("quarto-page-breadcrumbs") or [self.home()]
        button = Summary(icon("list-nested"), Span("Contents"))
        contents = [Details(button, part, cls="page-contents") for part in self.toc(body=True, ids=False)]
        return [Div(menu, *where, find, self.scheme_button(), *contents, cls="site-bar")]

    def crumbs_html(self, cls: str) -> list:
        "The way to this page: its door, and its title for people; a step of the path says which it is."
        step = step_of(self.page.src)
        number = f"Step {step}: " if step else ""
        trail = [(item.text.partition(": ")[0] if item.section else f"{number}{item.text}",
                  item.href or items_of([item])[0].href) for item in self.nav.crumbs(self.page)]
        steps = [Li(A(Safe(text), href=self.href(href)), cls="breadcrumb-item") for text, href in trail]
        return [Nav(Ol(*steps, cls="breadcrumb"), cls=cls, aria_label="breadcrumb")] if len(steps) > 1 else []

    def toc(self, body: bool = False, ids: bool = True, extra: list | None = None) -> list:
        "What is on this page; a page has it twice, each with a name."
        made = super().toc(body=body, ids=ids, extra=extra)
        for part in made: part.attrs["aria-label"] = "Contents" if body else "On this page"
        return made

    def repo_actions(self) -> list:
        "What one can do in the repository, as a part of the page that has a name."
        return [Nav(*super().repo_actions(), aria_label="In the repository")]

    def page_navigation(self) -> list:
        "The pages before and after this one, by their titles for people."
        order = [item for item in items_of(self.sidebar["items"]) if item.page]
        at = next((i for i, item in enumerate(order) if item.page is self.page), None)
        if at is None: return []  # the page of an address that leads to none

        def link(n: int, side: str) -> Div:
            if not 0 <= n < len(order): return Div(cls=f"nav-page nav-page-{side}")
            arrow = icon(f"arrow-{'left' if side == 'previous' else 'right'}-short")
            words = Span(*self.label(order[n]), cls="nav-page-text")
            inner = [arrow, " ", words] if side == "previous" else [words, " ", arrow]
            return Div(A(*inner, href=self.href(order[n].href), cls="pagination-link"), cls=f"nav-page nav-page-{side}")

        around = link(at - 1, "previous"), link(at + 1, "next")
        return [Nav(*around, cls="page-navigation", aria_label="Before and after")]

    def search_on(self) -> bool:
        "Ours looks for words first, and needs no library."
        return False

    def includes(self, key: str) -> list[str]:
        "The link that leads a keyboard past the sidebar, and our script."
        ours = {"include-before-body": '<a class="site-skip" href="#quarto-document-content">Skip to the text</a>',
                "include-in-header": f'<script src="{self.offset()}site_libs/site.js" defer></script>{self.shared()}'}
        return [*super().includes(key), *([ours[key]] if key in ours else [])]

    def shared(self) -> str:
        "What smalldocs leaves out of a page's card for those who share it."
        address = f"{self.web['site-url']}/{self.page.out}".removesuffix("index.html")
        tags = {"og:type": "website", "og:url": address, "og:image:alt": self.web["description"]}
        return "".join(f'<meta property="{key}" content="{escape(value)}">' for key, value in tags.items())

    def main_attrs(self) -> dict:
        "The text can be jumped to."
        return {**super().main_attrs(), "tabindex": "-1"}


layout.Layout = PageLayout


def step_of(notebook: PurePosixPath) -> int | None:
    "Which step of the path a page is: `path/03_rejection.ipynb` is 3. None for the tour, and for all other pages."
    found = re.fullmatch(r"path/0*(\d+)_\w+\.ipynb", notebook.as_posix())
    return int(found[1]) or None if found else None


def items_of(items: list[layout.Item]) -> list[layout.Item]:
    "The entries of a sidebar and of its sections, in order."
    return [found for item in items for found in (items_of(item.children) if item.section else [item])]


class NbdevSite(Site):
    "smalldocs' site, with nbdev's page names and nothing that comes from elsewhere."

    def read(self, src):
        "Read a page; it is called what nbdev calls it: `00_core.ipynb` becomes `core.html`."
        page = super().read(src)
        page.out = src.with_name(page.front.get("output-file", page.out.name))
        return page

    def copy_assets(self, nav):
        "Copy the theme without its web fonts, KaTeX with the one font format that browsers need, and our script."
        super().copy_assets(nav)
        for theme in self.theme_files():
            edit(self.out / "site_libs" / theme.href, lambda css: CSS_IMPORT.sub("", css))
        shutil.copytree(ROOT / "tools" / "katex", self.out / KATEX)
        edit(self.out / KATEX / "katex.min.css", lambda css: OLD_FONT.sub("", css))
        shutil.rmtree(self.out / "site_libs" / "fuse")
        shutil.copy(ROOT / "tools" / "site.js", self.out / "site_libs" / "site.js")

    def write_search(self):
        """Write the search index: the sections of every page in the sidebar's order, with the page's title for people,
        and the terms that it is about."""
        said = self.project.config
        titles, learn = page_titles(said), sidebar_titles(said["website"]["sidebar"]["contents"][:1])
        entries, pages = [], [self.pages[PurePosixPath(src)] for src in titles]
        having = Counter(name for page in pages for name in {n for part in page.env["search"] for n in part["code"]})
        for src, title in titles.items():
            page, met = self.pages[PurePosixPath(src)], set()
            for part in page.env["search"]:
                # a page says a name of code once, and one that a quarter of all pages have leads to none
                code = [name for name in part["code"] if name not in met and 4 * having[name] < len(pages)]
                met.update(code)
                text = part["text"] if part["id"] else f"{page.front.get('description', '')} {part['text']}"
                entries.append({"href": f"{page.out}#{part['id']}".removesuffix("#"), "page": title,
                                "name": page.out.stem, "section": part["title"] if part["id"] else "",
                                "text": unescape(TAG.sub(" ", text)).strip(), "code": " ".join(code),
                                **({"learn": 1} if src in learn else {}),
                                **({"terms": said["terms"][src]} if src in said["terms"] and not part["id"] else {})})
        index = json.dumps(entries, ensure_ascii=False, separators=(",", ":"))
        (self.out / "search.json").write_text(index, encoding="utf-8")

    def write_sitemap(self):
        "Write the sitemap without the times at which this machine wrote the notebooks."
        super().write_sitemap()
        edit(self.out / "sitemap.xml", lambda xml: LAST_MODIFIED.sub("", xml))


def edit(path: Path, change) -> None:
    "Replace the text of a file by `change(text)`."
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def sidebar_titles(contents: list) -> dict[str, str]:
    "The notebooks that a sidebar's `contents` lists, those in its sections too, each with its title for people."
    titles: dict[str, str] = {}
    for c in contents:
        titles |= sidebar_titles(c["contents"]) if "contents" in c else {c["href"]: c["text"]}
    return titles


def page_titles(said: dict) -> dict[str, str]:
    """Every page of nbs/sidebar.yml with its title for people: those of the menu in reading order, then those that the
    menu leaves out."""
    return sidebar_titles([*said["website"]["sidebar"]["contents"], *said["unlisted"]])


def check_sidebar(listed: list[str], present: set[str]) -> None:
    "Stop when the sidebar and the notebooks disagree: a link to nothing, or a page that nobody would find."
    problems = [f"nbs/sidebar.yml lists {name}, which does not exist" for name in listed if name not in present]
    problems += [f"nbs/{name} is not in nbs/sidebar.yml" for name in sorted(present - set(listed))]
    if problems:
        sys.exit("\n".join(problems))


def unshown(name: str, cells: list[dict]) -> list[str]:
    "The exported cells of a notebook that its page would lack, each with what to do."
    lacking = [source for cell in cells if cell["cell_type"] == "code"
               and re.search(r"^#\|\s*export\b", source := "".join(cell["source"]), re.M)
               and not re.search(r"^#\|\s*hide\b", source, re.M)]
    return [f"nbs/{name}: its page would lack the cell {source.splitlines()[-1].strip()!r} (`#| export`): "
            "write `#| exports`" for source in lacking]


def check_project(nbs: Path, package: str) -> None:
    """Stop when the pages would lack code, entries or links: a cell that is not rendered, an unlisted notebook, or a
    package that nbdev cannot look up."""
    listed = list(page_titles(yaml.safe_load((nbs / "sidebar.yml").read_text(encoding="utf-8"))))
    present = {p.relative_to(nbs).as_posix() for p in nbs.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts}
    check_sidebar(listed, present)
    books = {name: json.loads((nbs / name).read_text(encoding="utf-8")) for name in listed}
    if lacking := [problem for name, book in books.items() for problem in unshown(name, book["cells"])]:
        sys.exit("\n".join(lacking))
    module = find_spec(package)
    if not entry_points(group="nbdev", name=package) or Path(module.origin).resolve().parent != ROOT / package:
        sys.exit("pip install -e . first: nbdev finds the links between names through the installed package")


def relative(target: str, page: str) -> str:
    "The path from a page to another file of the site."
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def relink(text: str, page: str, site_url: str, anchors: dict[str, set[str]]) -> str:
    """Make nbdev's absolute links to this site relative to the page, and lead one whose anchor is missing to the class
    or page it is in."""
    def lead(match: re.Match) -> str:
        name, anchor = match.groups()
        while anchor and anchor not in anchors.get(name, ()):
            anchor = anchor.rpartition(".")[0]
        there = relative(name, page)
        return f'href="{there}#{anchor}"' if anchor else f'href="{there}"'

    return re.sub(rf'href="{re.escape(site_url)}/([\w./-]+\.html)(?:#([^"]*))?"', lead, text)


def save_pictures(text: str, page: str, out: Path) -> str:
    "Write each picture inside a page to `images/`, named by its content, and refer to that file instead."
    def save(match: re.Match) -> str:
        data = b64decode(match[2])
        name = f"images/{sha256(data).hexdigest()[:16]}.{match[1].removesuffix('+xml')}"
        (out / name).write_bytes(data)
        return relative(name, page)

    (out / "images").mkdir(exist_ok=True)
    return PICTURE.sub(save, text)


def picture_size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG or an SVG in pixels of the page; of an SVG without them, those of its view box, which
    our figures have in points."""
    if path.suffix == ".png":
        return struct.unpack(">II", path.read_bytes()[16:24])
    head = re.search(r"<svg\b[^>]*>", path.read_text(encoding="utf-8"))[0]
    said = dict(DRAWN.findall(head))
    sides = [re.fullmatch(r"([\d.]+)(px|pt|)", said.get(side, "")) for side in ("width", "height")]
    if all(sides):
        width, height = (float(side[1]) * PIXELS[side[2]] for side in sides)
    else:
        width, height = (float(side) * PIXELS["pt"] for side in said["viewBox"].replace(",", " ").split()[2:])
    return round(width), round(height)


def sized(text: str, page: str, out: Path) -> str:
    """Write its size into each picture of a page: one that only has a view box would be of none in a box that fits its
    content, and the text below stays where it is while pictures load. A drawing says too how wide it was drawn."""
    @cache
    def size(src: str) -> tuple[int, int]:
        return picture_size(out / posixpath.normpath(posixpath.join(posixpath.dirname(page), src)))

    def measured(match: re.Match) -> str:
        tag, (width, height) = match[0], size(match[1])
        drawn = f"--drawn: {width}px" if match[1].endswith(".svg") else ""
        if drawn and 'style="' in tag: tag = tag.replace('style="', f'style="{drawn}; ', 1)
        elif drawn: tag = tag.replace("<img", f'<img style="{drawn}"', 1)
        return tag if re.search(r"\b(?:width|height)\s*[=:]", tag) else tag.replace(
            "<img", f'<img width="{width}" height="{height}"', 1)

    return SHOWN_PICTURE.sub(measured, text)


def marked(text: str) -> str:
    """Mark what looks special: a paragraph of nothing but bold links, and cells of figures, which stay on one line. A
    header cell without words is none."""
    def cell(match: re.Match) -> str:
        plain = FIGURES.fullmatch(unescape(TAG.sub("", match[2])).strip())
        return f'<td class="figures"{match[1] or ""}>{match[2]}</td>' if plain else match[0]

    return NO_HEADER.sub("<td></td>", CELL.sub(cell, CHOICES.sub('<p class="choices">', text)))


# The site's root is where it was published, the folder of this page if that is what was asked for, else the nearest
# folder above the address that has our index of words: its styles are asked for next, so this waits for the answer.
FIND_ROOT = """(() => {
  const base = document.querySelector("base"), own = location.pathname.match(/^.*\\/(?=404\\.html$)/);
  if (own) { base.href = own[0]; return; }
  if (location.pathname.startsWith(base.getAttribute("href"))) return;
  for (const parts = location.pathname.split("/"); parts.pop() !== undefined;) {
    const ask = new XMLHttpRequest();
    base.href = `${parts.join("/")}/`;
    ask.open("HEAD", "search.json", false);
    ask.send();
    if (ask.status === 200) return;
  }
})();"""


def from_anywhere(text: str, site_url: str) -> str:
    """The page of an address that leads to none, which hosts show in place of a page in any folder: its links start at
    the root of the site, wherever that is mounted."""
    base = f'<base href="{urlsplit(site_url).path.rstrip("/")}/"><script>{FIND_ROOT}</script>'
    head = '<meta charset="utf-8">'
    return text.replace(head, head + base, 1).replace('href="#', 'href="404.html#')


def finish_pages(out: Path, site_url: str) -> None:
    "Relink the pages to each other and to KaTeX, move their pictures to files, and mark what a stylesheet can't find."
    paths = sorted(out.rglob("*.html"))
    pages = {p.relative_to(out).as_posix(): p.read_text(encoding="utf-8") for p in paths}
    anchors = {name: set(ID.findall(text)) for name, text in pages.items()}
    for name, text in pages.items():
        text = LINK_IN_CODE.sub(r"\1", relink(text, name, site_url, anchors))
        text = text.replace(f'="{KATEX}/', f'="{relative(KATEX, name)}/')
        text = marked(sized(save_pictures(text, name, out), name, out))
        (out / name).write_text(from_anywhere(text, site_url) if name == "404.html" else text, encoding="utf-8")


def keep_used_icons(out: Path) -> None:
    """Take the icons that no page shows, most of 2,000, out of the icons' stylesheet and font; the font stays in one
    format."""
    shown = {
        name for page in out.rglob("*.html") for name in re.findall(r"\bbi-([\w-]+)", page.read_text(encoding="utf-8"))
    }
    folder = out / "site_libs" / "bootstrap-icons"
    sheet = folder / "bootstrap-icons.min.css"
    edit(sheet, lambda css: NEW_FONT.sub("src:", ICON.sub(lambda rule: rule[0] if rule[1] in shown else "", css)))
    glyphs = {int(code, 16) for code in re.findall(r'content:"\\(\w+)"', sheet.read_text(encoding="utf-8"))}
    (folder / "fonts" / "bootstrap-icons.woff2").unlink()
    path = folder / "fonts" / "bootstrap-icons.woff"
    options = subset.Options(flavor="woff", recalc_timestamp=False)
    font = subset.load_font(path, options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=glyphs)
    subsetter.subset(font)
    subset.save_font(font, path, options)


def build(out: Path) -> None:
    "Render all notebooks into the folder `out`, which is emptied first; stop at anything that the pages would lack."
    place_for(out, "a site that was rendered here", lambda folder: (folder / ".nojekyll").is_file())
    os.chdir(ROOT)
    settings = get_config()
    check_project(settings.nbs_path, settings.lib_path.name)
    refresh_quarto_yml()
    processed = Path(proc_nbs(n_workers=0, force=True))
    prepare(processed, settings.nbs_path, settings.lib_path.name)
    project = config.load(processed)
    project.config["project"]["output-dir"] = str(out)
    site = NbdevSite(project, quiet=True)
    try:
        site.build()
    except config.BuildError as error:
        sys.exit(str(error))
    finish_pages(out, project.website["site-url"])
    keep_used_icons(out)
    (out / ".nojekyll").touch()  # a code host then serves the files as they are
    if site.warnings:
        sys.exit("\n".join(site.warnings))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Render the notebooks into a static site.")
    parser.add_argument("--out", default=ROOT / "docs", type=Path, help="folder of the site; its content is replaced")
    build(parser.parse_args().out.resolve())
    gc.freeze()  # a hundred notebooks had a shell each, and each would look for garbage in all of them as Python ends
