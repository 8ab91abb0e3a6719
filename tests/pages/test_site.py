"""The checks of the documentation site and of the README find what they are there to find."""
import ast
import builtins
import html
import importlib.util
import inspect
import json
import os
import re
import shutil
from fractions import Fraction
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
import yaml
from bs4 import BeautifulSoup

import specdec
from helpers import tool
from specdec.verify import residual

ROOT = Path(__file__).parents[2]


def site_tool():
    "The module that builds the site."
    pytest.importorskip("smalldocs", reason="the site's renderer, smalldocs, needs Python 3.11")
    return tool("site")


check_site, readme, badges = tool("check_site"), tool("readme"), tool("badges")

FILES = {"index.html", "core.html", "styles.css", "images/plot.png"}
GOOD = """<html><head><link rel="stylesheet" href="styles.css"><link rel="canonical" href="https://example.org/"></head>
<body><h1 id="title">Title</h1><a href="#title">here</a> <a href="core.html#double">there</a> <a href="./">home</a>
<a href="https://example.org/paper">a paper</a> <img src="images/plot.png"> <img src="data:image/png;base64,AAAA">
<script>const url = "https://example.org/named-only";</script></body></html>"""


def problems(html: str) -> list[str]:
    "What the checker says about a page of a site that has two pages, a stylesheet and a picture."
    pages = {"index.html": {"", "title"}, "core.html": {"", "double"}}
    return check_site.page_problems("index.html", BeautifulSoup(html, "html.parser"), FILES, pages)


def test_good_page_has_no_problem():
    assert problems(GOOD) == []


@pytest.mark.parametrize("html, url", [
    ('<a href="gone.html">x</a>', "gone.html"),
    ('<a href="core.html#gone">x</a>', "core.html#gone"),
    ('<a href="#gone">x</a>', "#gone"),
    ('<a href="../LICENSE">x</a>', "../LICENSE"),
    ('<img src="images/gone.png">', "images/gone.png"),
    ('<link rel="stylesheet" href="gone.css">', "gone.css"),
])
def test_broken_link_is_caught(html, url):
    assert problems(GOOD + html) == [f"index.html: broken link {url}"]


@pytest.mark.parametrize("html", [
    '<script src="{}"></script>',
    '<script type="module">import mermaid from "{}";</script>',
    '<link rel="stylesheet" href="{}">',
    '<link rel="preconnect" href="{}">',
    '<img src="{}">',
    '<img src="images/plot.png" srcset="{} 2x">',
    '<iframe src="{}"></iframe>',
    '<style>@import url({});</style>',
    '<style>@import "{}";</style>',
    '<p style="background: url(\'{}\')">x</p>',
])
@pytest.mark.parametrize("url", ["https://cdn.example.org/x.js", "//cdn.example.org/x.js"])
def test_external_request_is_caught(html, url):
    assert problems(GOOD + html.format(url)) == [f"index.html: would fetch {url}"]


@pytest.mark.parametrize("text", ["\\begin{align}", ":::"])
def test_markup_in_sight_is_caught(text):
    assert problems(f"{GOOD}<p>{text}\nx</p>") == [f"index.html: shows its markup, not what it means: {text}"]


def test_stylesheet_is_checked():
    css = "@import url(https://fonts.example.org/a.css); a { b: url(images/plot.png) } c { d: url(gone.woff2) }"
    assert check_site.css_problems("styles.css", css, FILES) == [
        "styles.css: would fetch https://fonts.example.org/a.css", "styles.css: broken link gone.woff2"]


def lines(html: str) -> list[str]:
    "The visible lines of a page."
    return check_site.visible_lines(BeautifulSoup(html, "html.parser"))


def test_stale_text_is_named_and_markup_is_not():
    old = lines("<div><p>the <b>same</b></p><p>α = 0.71</p></div><script>1</script>")
    new = lines("<div class='new'><p>the <i>same</i></p><p>α = 0.72</p></div><script>2</script>")
    assert check_site.text_problem("core.html", old, old) == []
    assert check_site.text_problem("core.html", old, new) == [
        "docs/core.html is stale, run make docs: -α = 0.71 | +α = 0.72"]


def test_code_in_one_piece_hides_nothing():
    "Only what colours a piece of code is left out: anchors, links and words are those of the whole page."
    page = ('<p><span class="kw">if</span> <span class="n" id="x">a</span> <span class="o"><a href="gone.html">b</a>'
            '</span><span class="s" style="background: url(https://example.org/c.png)">d</span></p>')
    short, whole = check_site.parsed(page), BeautifulSoup(page, "html.parser")
    assert len(short.find_all("span")) == 3
    for ask in (check_site.anchors, check_site.linked_urls, check_site.loaded_urls, check_site.visible_lines):
        assert ask(short) == ask(whole), ask.__name__


@pytest.mark.parametrize("written, led", [
    ("![a round](images/round.svg){width=60%}", "![a round](nbs/images/round.svg)"),
    ("[core](00_core.ipynb#double)", "[core](nbs/00_core.ipynb#double)"),
    ("[`double`](00_core.ipynb)", "[`double`](nbs/00_core.ipynb)"),
    ('[core](00_core.ipynb "a title")', '[core](nbs/00_core.ipynb "a title")'),
    ("[![badge](images/b.svg)](00_core.ipynb)", "[![badge](nbs/images/b.svg)](nbs/00_core.ipynb)"),
    ('<img src="images/round.svg" alt="a round">', '<img src="nbs/images/round.svg" alt="a round">'),
    ('<source srcset="images/still.svg">', '<source srcset="nbs/images/still.svg">'),
    ("[core]: 00_core.ipynb", "[core]: nbs/00_core.ipynb"),
    ("[licence](../LICENSE)", "[licence](LICENSE)"),
])
def test_readme_links_start_at_the_root(written, led):
    assert readme.rewrite_links(written) == led


@pytest.mark.parametrize("text", [
    "[paper](https://example.org/p.pdf)", "[below](#install)", "[mail](mailto:a@example.org)",
    "`[code](images/x.svg)`", "```md\n[code](images/x.svg)\n```",
])
def test_readme_leaves_other_links_and_code_alone(text):
    assert readme.rewrite_links(text) == text


def test_readme_hides_what_is_not_for_readers(tmp_path):
    cells = [nbformat.v4.new_raw_cell("---\ntitle: x\n---"), nbformat.v4.new_markdown_cell("# specdec"),
             nbformat.v4.new_code_cell("#| hide\nsecret = 1"), nbformat.v4.new_code_cell("#| eval: false\nshown = 1")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "index.ipynb")
    assert readme.readme(tmp_path / "index.ipynb") == readme.NOTICE + "# specdec\n\n```python\nshown = 1\n```\n"


def test_readme_refuses_what_it_cannot_show():
    picture = nbformat.v4.new_output("display_data", data={"image/png": "AAAA"})
    assert "picture" in readme.problem(nbformat.v4.new_code_cell("plot()", outputs=[picture]))
    assert ":::" in readme.problem(nbformat.v4.new_markdown_cell("::: {.callout-note}\nx\n:::"))
    assert readme.problem(nbformat.v4.new_markdown_cell("plain")) is None


# The sidebar and the reference

def test_a_page_that_nobody_lists_stops_the_build(capsys):
    site = site_tool()
    titles = site.sidebar_titles([{"text": "A", "href": "a.ipynb"},
                                  {"section": "x: y", "contents": [{"text": "B", "href": "b.ipynb"}]}])
    assert titles == {"a.ipynb": "A", "b.ipynb": "B"}
    site.check_sidebar(list(titles), {"a.ipynb", "b.ipynb"})
    with pytest.raises(SystemExit, match="c.ipynb is not in"): site.check_sidebar(["a.ipynb"], {"a.ipynb", "c.ipynb"})
    with pytest.raises(SystemExit, match="b.ipynb, which does not exist"):
        site.check_sidebar(["a.ipynb", "b.ipynb"], {"a.ipynb"})


def test_notebooks_stand_in_the_sidebar_in_their_order():
    sidebar = yaml.safe_load((ROOT / "nbs" / "sidebar.yml").read_text(encoding="utf-8"))["website"]["sidebar"]
    sections = [*sidebar["contents"][:2], *sidebar["contents"][2]["contents"]]
    for section in sections:
        listed = [Path(name) for name in site_tool().sidebar_titles(section["contents"])]
        for folder in {name.parent for name in listed}:
            numbered = [name.name for name in listed if name.parent == folder and name.name[0].isdigit()]
            assert numbered == sorted(numbered), section["section"]
    assert len(sections) == 10


@pytest.fixture(scope="module")
def reference():
    "What the cells of the reference define, and its table as saved and as it would be now."
    cells = [
        cell
        for cell in nbformat.read(ROOT / "nbs" / "use" / "reference.ipynb", as_version=4).cells
        if cell.cell_type == "code" and cell.id != badges.INSTALL_ID
    ]
    names, before = {}, os.getcwd()
    os.chdir(ROOT / "nbs" / "use")
    try:
        for cell in cells[:-1]: exec(cell.source, names)
        *lines, last = cells[-1].source.splitlines()
        exec("\n".join(lines), names)
        now = eval(last, names).data
    finally:
        os.chdir(before)
    return names, cells[-1].outputs[0].data["text/markdown"], now


def test_reference_lists_what_the_package_exports(reference):
    _, saved, now = reference
    assert saved == now, "nbs/use/reference.ipynb is stale: run it again"


def test_reference_leads_to_the_pages_that_the_menu_leaves_out(reference):
    "Each by its title, with its module, and what that says of itself."
    unlisted = yaml.safe_load((ROOT / "nbs" / "sidebar.yml").read_text(encoding="utf-8"))["unlisted"]
    lines = re.findall(r"^- \[(.+)\]\(\.\./(\S+)\) \(`([\w.]+)`\): \S.+$", reference[2], re.M)
    assert len(lines) > 10 and [(entry["text"], entry["href"], site_tool().module_of(ROOT / "nbs" / entry["href"]))
                                for entry in unlisted] == lines


def test_reference_says_every_public_name_once(reference):
    "What `import specdec` gives comes first, everything else under the task of its module."
    names, _, now = reference
    listed = re.findall(r"^\| \[(\w+)\]\(([^)#]+)", now, re.M)
    public = {(name, names["link"](module, name).partition("#")[0]) for module, words in names["NAMES"].items()
              for name, said in words.items() if said is not None}
    assert len(listed) == len(set(listed)) and set(listed) == public
    assert {name for name, _ in listed[: len(specdec.__all__)]} == set(specdec.__all__)


def test_every_public_name_is_explained_and_has_an_example(reference):
    "A name without a docstring (a constant without a comment), or without a line in EXAMPLES, is said here."
    names, *_ = reference
    parts = [(module, name, said) for _, modules in names["reference"]() for module, words in modules.items()
             for name, said in words.items()]
    unsaid = [f"{module}.{name}" for module, name, said in parts if not said]
    lacking = [f"{module}.{name}" for module, name, _ in parts if name not in names["EXAMPLES"].get(module, {})]
    assert not unsaid, f"no docstring, or no comment beside a constant: {', '.join(unsaid)}"
    assert not lacking, f"no line in EXAMPLES of nbs/use/reference.ipynb: {', '.join(lacking)}"


def problem_with(line: str, name: str, known: dict, run: bool) -> str | None:
    "What is wrong with a line of example: it does not use its name, calls something as it can't be called, or fails."
    tree = ast.parse(line)
    words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if name not in words | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}: return "not used"
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        plain = not any(isinstance(a, ast.Starred) for a in call.args) and all(k.arg for k in call.keywords)
        if call.func.id not in known or not plain or call.func.id in vars(builtins): continue
        try: inspect.signature(known[call.func.id]).bind(*call.args, **{k.arg: k.value for k in call.keywords})
        except (TypeError, ValueError) as error: return f"{call.func.id}: {error}"
    try: exec(line if run else "", dict(known))
    except Exception as error: return f"{type(error).__name__}: {error}"
    return None


def test_examples_are_true(reference):
    "Every line runs, on the real default model, but for those that take long; these can be called as they say."
    names, *_ = reference
    modules = {module: vars(importlib.import_module(f"specdec.{module}")) for module in names["NAMES"]}
    public = {name: modules[module][name] for module, words in names["NAMES"].items() for name in words}
    words = "torch target draft text ids drafter pair result p q P Q greedy sampled rng timer"
    given = {name: names[name] for name in words.split()}
    wrong = {}
    for _, parts in names["reference"]():
        for module, words in parts.items():
            own = {name: modules[module or names["HOME"][name]][name] for name in words}
            known = {**public, **own, **given, "specdec": specdec, "np": np, "Fraction": Fraction, "Path": Path}
            for name in words:
                line = names["EXAMPLES"].get(module, {}).get(name)
                problem = line and problem_with(line, name, known, name not in names["NOT_RUN"])
                if problem: wrong[f"{module}.{name}"] = problem
    assert wrong == {}


@pytest.mark.parametrize("line, run, says", [
    ("residual(p, q)", True, None), ("residual(p)", False, "missing"), ("residual(p, q, r=1)", False, "unexpected"),
    ("residual(p, 'q')", True, "TypeError"), ("p", True, "not used"), ("residual(p, missing)", True, "NameError"),
])
def test_wrong_examples_are_noticed(line, run, says):
    known = {"residual": residual, "p": torch.tensor([.5, .5]), "q": torch.tensor([.2, .8])}
    found = problem_with(line, "residual", known, run)
    assert found is None if says is None else says in found


# All code stands on its page

NOTEBOOKS = sorted(path.relative_to(ROOT / "nbs").as_posix() for path in (ROOT / "nbs").rglob("*.ipynb")
                   if ".ipynb_checkpoints" not in path.parts)
UNSHOWN = re.compile(r"^#\|\s*(?:hide\b|(?:echo|include):\s*false)", re.M)


def page_of(notebook: str) -> str:
    "The page that a notebook becomes."
    return re.sub(r"(^|/)\d+_([^/]+)\.ipynb$", r"\1\2.html", notebook).replace(".ipynb", ".html")


def bare(code: str) -> str:
    "Code as a page shows it: without its `#|` lines, and without spaces that none can see."
    return "\n".join(line.rstrip() for line in code.splitlines() if not line.startswith("#|")).strip()


def lacking(cells: list[dict], page: str) -> list[str]:
    "The code cells of a notebook that do not stand on its page, word for word."
    blocks = [bare(html.unescape(re.sub(r"<[^>]+>", "", block)))
              for block in re.findall(r"<code\b[^>]*>(.*?)</code>", page, re.S)]
    sources = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    wanted = [bare(source) for source in sources if not UNSHOWN.search(source)]
    return [code for code in wanted if not any(code in block for block in blocks)]


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_all_code_of_a_notebook_stands_on_its_page(notebook):
    "Exported code too."
    cells = nbformat.read(ROOT / "nbs" / notebook, as_version=4).cells
    page = (ROOT / "docs" / page_of(notebook)).read_text(encoding="utf-8")
    assert lacking(cells, page) == []


def test_a_lacking_cell_is_noticed():
    cells = [cell(source) for source in ("#| export\ndef f(x): return x < 1", "#| hide\n1", "#| echo: false\n2",
                                         "3 + 3", "#| slow\nif 4:\n    5")]
    page = "<code><span>def</span> f(x): return x &lt; 1</code> <code>if 4:\n  5</code> <p>3 + 3</p>"
    assert lacking(cells, page) == ["3 + 3", "if 4:\n    5"]
    assert lacking(cells[:1], "") == ["def f(x): return x < 1"]


def test_a_cell_that_a_page_would_lack_stops_the_build():
    cells = [cell("#| export\ndef f(): ..."), cell("#| exports\n1"), cell("#| exporti\n2"),
             cell("#| hide\n#| export\n3"), {"cell_type": "markdown", "source": "#| export"}]
    (told,) = site_tool().unshown("path/00_tour.ipynb", cells)
    assert "nbs/path/00_tour.ipynb" in told and "def f(): ..." in told and "`#| exports`" in told


def test_a_source_link_leads_to_the_file_of_its_page():
    "On all pages: to the line that defines the name in the page's own module, where that defines it."
    wrong, seen, public = [], set(), set()
    for notebook in NOTEBOOKS:
        found = re.search(r"#\| (?:default_exp|exports) ([\w.]+)",
                          (ROOT / "nbs" / notebook).read_text(encoding="utf-8"))
        if not found: continue
        own = f"specdec/{found[1].replace('.', '/')}.py"
        defined = site_tool().named((ROOT / own).read_text(encoding="utf-8"))
        listed = re.search(r"(?ms)^__all__ = (\[.*?\])", (ROOT / own).read_text(encoding="utf-8"))
        public |= {(own, name) for name in (ast.literal_eval(listed[1]) if listed else []) if name in defined}
        page = (ROOT / "docs" / page_of(notebook)).read_text(encoding="utf-8")
        for entry in re.split(r"<h3\b[^>]*>", page.partition(">API<")[2])[1:]:
            name = html.unescape(re.sub(r"<[^>]+>", "", entry.partition("</h3>")[0])).strip()
            link = re.search(r'href="[^"]*/blob/[^/]+/([^"#]+)#L(\d+)"[^>]*>source', entry)
            if not link or name not in defined: continue
            seen.add((own, name))
            line = (ROOT / link[1]).read_text(encoding="utf-8").splitlines()[int(link[2]) - 1]
            if link[1] != own or not re.search(rf"\b(?:def|class) {name}\b", line):
                wrong.append((notebook, name, link[0]))
    # of the public names nearly all have a link; constants have none
    assert wrong == [] and len(seen & public) > 0.95 * len(public) and len(public) > 190


def test_a_name_that_several_modules_define_leads_to_the_right_one():
    "To this page's own, else to what the package gives, else nowhere; other links, code and unique names stay."
    site = site_tool()
    shared = {"f": {"p.a": "https://x.org/a.html#f", "p.b": "https://x.org/b.html#f"}}
    text = "[`f`](https://x.org/a.html#f), [`g()`](https://x.org/a.html#g), [`f`](https://y.org), `f`, [`f()`](b.ipynb)"
    for module, public, led in (("p.b", {}, "[`f`](https://x.org/b.html#f)"), ("p.c", {}, "`f`"),
                                ("p.c", {"f": "p.b"}, "[`f`](https://x.org/b.html#f)"),
                                ("p.a", {"f": "p.b"}, "[`f`](https://x.org/a.html#f)")):
        assert site.disambiguated(text, module, shared, public) == led + text.removeprefix("[`f`](https://x.org/a.html#f)")
    nested = "[[`f`](https://x.org/a.html#f)](b.ipynb), [[`g()`](https://x.org/a.html#g)](#g)"  # as nbdev does
    assert site.disambiguated(nested, "p.c", shared, {}) == "[`f`](b.ipynb), [`g()`](#g)"
    for page in (ROOT / "docs").rglob("*.html"): assert "</a>](" not in page.read_text(encoding="utf-8"), page
    link = "[source](https://github.com/s/s/blob/main/specdec/app/cli.py#L499)"
    found = re.fullmatch(r"\[source\]\(https://github.com/s/s/blob/main/specdec/minimal.py#L(\d+)\)",
                         site.source_link(link, "generate", "minimal"))
    minimal = importlib.import_module("specdec.minimal")
    assert inspect.getsourcelines(minimal.generate)[1] == int(found[1])
    assert site.source_link(link, "unknown", "minimal") == site.source_link(link, "generate", None) == link


def test_the_tour_speaks_of_its_own_decoder():
    page = (ROOT / "docs" / "path" / "tour.html").read_text(encoding="utf-8")
    found = set(re.findall(r'<a href="([^"]+)"[^>]*><code[^>]*>(?:generate|fetch)(?:\(\))?</code>', page))
    assert found == {"tour.html#generate"}


# What those see with whom a page is shared

@pytest.mark.parametrize("page", ["index.html", "path/rejection.html", "use/reference.html"])
def test_pages_carry_a_card_for_those_who_share_them(page):
    docs, address = ROOT / "docs", "https://specdec.github.io/specdec"
    soup = BeautifulSoup((docs / page).read_text(encoding="utf-8"), "html.parser")
    card = {tag["property"]: tag["content"] for tag in soup.find_all("meta", property=True)}
    assert card["og:image"] == f"{address}/images/card.png" and (docs / "images" / "card.png").is_file()
    assert card["og:url"] == f"{address}/{page}".removesuffix("index.html") and card["og:type"] == "website"
    assert len(card["og:description"]) > 40 and card["og:image:alt"]
    assert card["og:title"] == {"index.html": "specdec", "path/rejection.html": "Why it is exact",
                                "use/reference.html": "Every public name"}[page]


def test_each_part_of_a_page_has_a_name_of_its_own():
    "By which one who hears the page finds it: the two lists of its contents, and what leads to the repository."
    soup = BeautifulSoup((ROOT / "docs" / "path" / "rejection.html").read_text(encoding="utf-8"), "html.parser")
    names = [nav["aria-label"] for nav in soup.select("nav:not(.quarto-page-breadcrumbs)")]
    assert len(names) == len(set(names)) and {"On this page", "Contents"} < set(names)
    assert soup.select_one(".toc-actions").find_parent("nav")["aria-label"]


# What the build adds to its renderer

EXPORTED = '#| code-fold: show\n#| code-summary: "Exported source"\n'
ENTRY = """---

[source](https://example.org/heads.py#L1){target="_blank"}

### Head

```python
def Head(
    *args, **kwargs
):
```

*One layer,*
and its norm."""


def cell(source: str, *outputs: dict) -> dict:
    "A code cell as nbdev hands it on."
    return {"cell_type": "code", "metadata": {}, "source": source, "outputs": list(outputs)}


def printed(*words: str) -> dict:
    "What a cell printed."
    return {"output_type": "stream", "name": "stdout", "text": list(words)}


def drawn(name: str) -> dict:
    "What a cell drew."
    return {"output_type": "display_data", "data": {"image/svg+xml": name}, "text": [f"<{name}>"]}


def folded(*cells) -> list:
    "What a page of the path shows of cells: text, code, and what is printed; what an answer's fold holds, in a list."
    shown: list = []
    places = [shown]
    for c in site_tool().with_answers_folded(list(cells)):
        text = "".join(c["source"])
        if text == site_tool().ANSWER:
            places[-1].append(inside := [])
            places.append(inside)
        elif text == "</details>": places.pop()
        else:
            if "echo: false" not in text: places[-1].append(text)
            places[-1] += ["".join(output["text"]) for output in c.get("outputs", [])]
    assert len(places) == 1, "a fold is left open"
    return shown


def told(text: str) -> dict: return {"cell_type": "markdown", "metadata": {}, "source": text}


def test_an_answer_waits_until_it_is_asked_for():
    "What is printed and the paragraph after it; not the code, not what comes later, and nothing where none was asked."
    first, second = cell("run()", printed("out")), cell("draw()", printed("more"))
    asked = told("**Predict.** How many?")
    assert folded(asked, first, second, told("Many.\n\nSo what?")) == [
        asked["source"], "run()", ["out", "draw()", "more", "Many."], "So what?"]
    assert folded(told("No question."), first, told("Many.")) == ["No question.", "run()", "out", "Many."]
    assert folded(asked, told("A hint."), cell("silent()"), first) == [
        asked["source"], "A hint.", "silent()", "run()", ["out"]]
    elsewhere = told("## Elsewhere\n\nText.")
    assert folded(asked, elsewhere, first) == [asked["source"], elsewhere["source"], "run()", "out"]
    unseen = cell("#| output: false\nwidget()", printed("never shown"))
    assert folded(asked, unseen, first)[-1] == ["out"]


def test_a_picture_stands_in_the_open():
    "Before the fold, whether it comes first, after what was printed, or with it; and where nothing is left, no fold."
    asked, end = told("**Predict.** How many?"), told("Many.")
    run, plot = cell("run()", printed("out")), cell("plot()", drawn("a"))
    assert folded(asked, plot, end) == [asked["source"], "plot()", "<a>", ["Many."]]
    assert folded(asked, run, plot, end) == [asked["source"], "run()", "plot()", "<a>", ["out", "Many."]]
    both = cell("both()", drawn("a"), printed("out"))
    assert folded(asked, both, end) == [asked["source"], "both()", "<a>", ["out", "Many."]]
    assert folded(asked, plot, told("- a list")) == [asked["source"], "plot()", "<a>", "- a list"]
    assert folded(asked, plot, run) == [asked["source"], "plot()", "<a>", ["run()", "out"]]


def test_no_picture_of_the_path_waits_in_a_fold():
    pictures = {}
    for page in sorted((ROOT / "docs" / "path").glob("*.html")):
        main = BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser").main
        assert main.select("details.predict img") == [], page.name
        pictures[page.stem] = len([p for p in main.select("figure img") if not p.find_parent("details")])
    assert len(pictures) == 9 and min(pictures.values()) >= 1, pictures


@pytest.mark.parametrize("after", ["## A heading", "- a list", "> a rule", "That gives the rule:", "| a | b |",
                                   "Right. **Predict.** And now?", "$$x$$", '<div class="built"></div>', "1. one"])
def test_only_a_paragraph_is_folded_with_its_answer(after):
    asked, run = told("**Predict.** How many?"), cell("run()", printed("out"))
    shown = folded(asked, run, told(after), cell("later()", printed("late")), told("End."))
    assert shown[:4] == [asked["source"], "run()", ["out"], after]
    again = ["later()", ["late", "End."]] if "Predict" in after else ["later()", "late", "End."]
    assert shown[4:] == again


def test_every_question_of_the_tour_waits_for_its_answer():
    "On the page: as many folds as questions, each with something in it, and no picture or print in the code's own box."
    soup = BeautifulSoup((ROOT / "docs" / "path" / "tour.html").read_text(encoding="utf-8"), "html.parser")
    asked = [p for p in soup.select("main p") if p.get_text().startswith("Predict.")]
    answers = soup.select("main details.predict")
    assert len(answers) == len(asked) >= 7
    assert all(len(box.get_text(strip=True)) > 60 and box.summary.get_text() == "See the answer" for box in answers)
    assert not any(box.has_attr("open") for box in answers)


def test_no_script_weighs_more_than_thirty_kilobytes():
    scripts = {path.name: path.stat().st_size for path in (ROOT / "nbs").rglob("*.js")}
    assert len(scripts) >= 5 and max(scripts.values()) < 30_000, scripts


def test_pages_begin_with_their_idea():
    "Imports are folded into one line, exported code bears its module's name, what it exports stands at the end."
    entry = {"output_type": "execute_result", "data": {"text/markdown": ENTRY.splitlines(keepends=True)}}
    title = {"cell_type": "markdown", "metadata": {}, "source": "# heads"}
    cells = [title, cell(EXPORTED + "import os"), cell("from x import y"),
             cell("import matplotlib", printed("a warning")),
             cell("#| echo: false\n#| output: asis\nshow_doc(Head)", entry), cell(EXPORTED + "class Head: ..."),
             cell("Head()", printed("a\n"), printed("b\n", "c"))]
    shown = site_tool().for_readers(cells, "drafters.head")
    sources = ["".join(c["source"]) for c in shown]
    fold = '#| code-fold: true\n#| code-summary: "Imports"\n'
    assert sources == [
        "# heads", fold + "import os\n\nfrom x import y", "import matplotlib", '<div id="head" class="built"></div>',
        EXPORTED.replace("Exported source", "specdec/drafters/head.py") + "class Head: ...", "Head()",
        "## API\n\n### Head {#api-head}\n\n\nOne layer,\nand its norm.\n\n[source](https://example.org/heads.py#L1)",
    ]
    assert shown[5]["outputs"] == [{**printed(), "text": "a\nb\nc"}]


def test_entries_of_names_built_elsewhere_keep_their_address():
    entry = {"output_type": "execute_result", "data": {"text/markdown": ENTRY}}
    shown = site_tool().for_readers([cell("#| echo: false\n#| output: asis\nshow_doc(Head)", entry)], None)
    assert len(shown) == 1 and "### Head\n" in shown[0]["source"] and "#api-" not in shown[0]["source"]


def test_names_that_differ_in_capitals_share_an_address():
    outputs = [{"output_type": "execute_result", "data": {"text/markdown": f"### {name}"}} for name in ("Head", "head")]
    entries = [cell("#| echo: false\n#| output: asis\nshow_doc(x)", output) for output in outputs]
    shown = site_tool().for_readers([cell(EXPORTED + "class Head: ...\n\ndef head(): ..."), *entries], None)
    assert [c["source"] for c in shown].count('<div id="head" class="built"></div>') == 1


def test_what_is_not_python_is_left_alone():
    cells = [cell("!pip list"), cell("")]
    assert [c["source"] for c in site_tool().for_readers(cells, None)] == ["!pip list", ""]


def test_options_need_no_quotes():
    options, code = site_tool().cell_options("#| slow\n#| fig-alt: One round: p, then q.\nplot()")
    assert options["fig-alt"] == "One round: p, then q." and code == "plot()"
    assert site_tool().cell_options("#| fig-alt: 'quoted'\n#| echo: false\n1")[0] == {
        "fig-alt": "quoted", "echo": False,
    }


def test_a_type_that_is_defined_later_is_shown_as_written():
    def takes(x: "NotYet", y: int): "..."  # noqa: F821
    shown = site_tool().signature(takes, eval_str=True)
    assert shown.parameters["x"].annotation == "NotYet"


def test_only_icons_in_use_are_kept(tmp_path):
    "In the stylesheet, and in the font, of which one format stays."
    from fontTools.ttLib import TTFont
    theirs = next(Path(importlib.util.find_spec("smalldocs").origin).parent.rglob("bootstrap-icons.min.css")).parent
    icons = tmp_path / "site_libs" / "bootstrap-icons"
    shutil.copytree(theirs, icons)
    (tmp_path / "a.html").write_text('<i class="bi bi-search"></i>')
    site_tool().keep_used_icons(tmp_path)
    sheet = (icons / "bootstrap-icons.min.css").read_text(encoding="utf-8")
    assert '.bi-search::before{content:"\\f52a"}' in sheet and "bi-gear::before" not in sheet and "woff2" not in sheet
    (font,) = (icons / "fonts").iterdir()
    assert font.name in sheet and list(TTFont(font).getBestCmap()) == [0xf52a] and font.stat().st_size < 10_000


def test_pictures_lose_digits_and_spaces_only():
    svg = '<path d="M 10.0 20.123456 \nL -3.99 .5 \nz" x="1.25"/><use x="12.345678" y="-0.5" width="1.23456"/>'
    assert (
        site_tool().shorter_paths(svg)
        == '<path d="M10 20.1L-3.9 .5z" x="1.2"/><use x="12.3" y="-0.5" width="1.23456"/>'
    )


@pytest.mark.parametrize("head, size", [
    ('viewBox="0 0 662.4 406.8" role="img"', (883, 542)), ('viewBox="0,0,60,30" width="100%"', (80, 40)),
    ('width="72pt" height="36pt" viewBox="0 0 72 36"', (96, 48)),
    ('width="30px" height="20" viewBox="0 0 1 1"', (30, 20)),
])
def test_the_size_of_a_drawing(tmp_path, head, size):
    (tmp_path / "a.svg").write_text(f'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg" {head}><g/></svg>')
    assert site_tool().picture_size(tmp_path / "a.svg") == size


def test_pictures_come_with_their_size(tmp_path):
    "From their files, on pages in any folder; a width that was asked for stays."
    site = site_tool()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.svg").write_text('<svg viewBox="0 0 60 30"></svg>')
    shutil.copy(ROOT / "nbs" / "images" / "card.png", tmp_path / "images" / "b.png")
    assert site.picture_size(tmp_path / "images" / "b.png") == (1200, 630)
    page = '<img src="../images/a.svg" alt="x"><img src="../images/a.svg" style="width:60%"><img src="../images/b.png">'
    assert site.sized(page, "path/x.html", tmp_path) == (
        '<img width="80" height="40" style="--drawn: 80px" src="../images/a.svg" alt="x">'
        '<img src="../images/a.svg" style="--drawn: 80px; width:60%">'
        '<img width="1200" height="630" src="../images/b.png">')
    outside = '<img src="https://x.org/a.svg"><img src="data:image/png;base64,AAAA">'
    assert site.sized(outside, "path/x.html", tmp_path) == outside


@pytest.mark.parametrize("before, after", [
    ('<p><strong><a href="a.html">A</a></strong> <strong><a href="#b">B</a></strong></p>', '<p class="choices">'),
    ('<p>The <strong><a href="a.html">A</a></strong> and <a href="b.html">B</a>.</p>', "<p>"),
    ('<p><strong><a href="a.html">A</a></strong> is it.</p>', "<p>"),
])
def test_only_a_row_of_bold_links_is_one_of_choices(before, after):
    assert site_tool().marked(before) == before.replace("<p>", after)


@pytest.mark.parametrize("text, one_line", [
    ("1.47 (1.28 to 1.58)", True), ("<strong>50.55</strong> (47.36 to 52.14)", True), ("1.01 / 0.93", True),
    ("−0.3 ms", True), ("&lt; 0.1", True), ("1 + accepted / rounds", False), ("ngram, K = 1", False),
    ("1 of two", False),
])
def test_figures_stand_on_one_line(text, one_line):
    cell = f'<td style="text-align: right;">{text}</td>'
    assert ('class="figures"' in site_tool().marked(cell)) is one_line


def test_the_index_knows_prose_from_code():
    "What a section says, and apart from it the names that only its code has."
    site_tool()  # which teaches smalldocs
    from smalldocs.markdown import render
    env = {"title": "x"}
    code = "```python\nfor x1 in drawn: token = categorical(p)\n```\n"
    render(f"Read `p`.\n\n## Draw\n\nA token is drawn.\n\n{code}", env)
    first, second = env["search"]
    assert (first["text"], first["code"]) == ("Read p.", [])
    assert (second["title"], second["text"], second["code"]) == ("Draw", "A token is drawn.", ["categorical"])


def test_no_markdown_is_left_in_signatures():
    pattern = site_tool().LINK_IN_CODE
    assert (
        pattern.sub(r"\1", "# of [`HeadConfig`](https://example.org/heads.html#headconfig) and [this](x.html)")
        == "# of HeadConfig and [this](x.html)"
    )


# Opening it elsewhere


def test_badges_come_once_and_disturb_nothing():
    cells = [
        {"cell_type": "raw", "id": "a", "source": ["---\n"]},
        {"cell_type": "markdown", "id": "b", "source": ["# x\n", "\n", "> y"]},
        {"cell_type": "code", "id": "c", "source": ["1"], "outputs": ["kept"]},
    ]
    once = badges.completed(cells, "x.ipynb")
    assert [cell["id"] for cell in once] == ["a", "b", badges.BADGE_ID, badges.INSTALL_ID, "c"] and [
        once[i] for i in (0, 1, 4)
    ] == cells
    assert badges.completed(once, "x.ipynb") == once
    moved = [once[3], *once[:2], {**once[2], "source": ["an old badge"]}, once[4]]
    assert badges.completed(moved, "x.ipynb") == once
    assert "x.ipynb" in "".join(once[2]["source"])


def test_a_badge_opens_what_is_there_and_installs_the_release():
    "The page of the branch, since a tag need not be there; the package as it was released; files where they are read."
    version = badges.released()[-1]
    alone, reading = (badges.install("path/x.ipynb", files) for files in (False, True))
    for cell in (alone, reading):
        assert cell.startswith("#| hide\n#| eval: false\n") and f'specdec-nb[notebooks]=={version}"' in cell
    assert "/specdec/blob/main/nbs/path/x.ipynb" in badges.badge("path/x.ipynb", [])
    assert f"--branch v{version} " in reading and "%cd specdec/nbs/path" in reading and "git clone" not in alone
    def cell(code): return {"cell_type": "code", "id": "c", "source": [code]}
    title = {"cell_type": "markdown", "id": "t", "source": ["# x"]}
    for code, reads in (('Path("../data/table.jsonl.gz")', True), ('hatches = ("", "..")', False)):
        assert ("git clone" in "".join(badges.completed([title, cell(code)], "x.ipynb")[2]["source"])) is reads


def released_extra(text: str) -> bool: return "specdec-nb[" in text or "pip install specdec-nb" in text


def test_what_to_install_is_there():
    "No index has a release yet: a page or a message says what works in a checkout; the install cells try both."
    texts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "specdec").rglob("*.py")}
    for path in (ROOT / "nbs").rglob("[!.]*.ipynb"):
        texts[path.name] = "".join(cell.source + str(cell.get("outputs")) for cell in
                                   nbformat.read(path, as_version=4).cells if cell.id != badges.INSTALL_ID)
    assert [name for name, text in texts.items() if released_extra(text)] == []
    assert released_extra(badges.install("x.ipynb", False)) and len(texts) > 150


TITLES = {"x/01_a_b.ipynb": "Its title", "y.ipynb": "Why?"}


@pytest.mark.parametrize("text, becomes", [
    ("see [a_b](01_a_b.ipynb#z), [a b](01_a_b.ipynb)", "see [Its title](01_a_b.ipynb#z), [Its title](01_a_b.ipynb)"),
    ("([y](../y.ipynb))", "([Why?](../y.ipynb))"), ("The [y](../y.ipynb) has it.", "The [y](../y.ipynb) has it."),
    ("[other words](../y.ipynb)", "[other words](../y.ipynb)"), ("[z](z.ipynb)", "[z](z.ipynb)"),
    ("[y](https://x.org/y.ipynb)", "[y](https://x.org/y.ipynb)"), ("[`y`](../y.ipynb)", "[`y`](../y.ipynb)"),
])
def test_a_link_calls_a_page_by_its_title(text, becomes):
    assert badges.titled(text, "x/02_c.ipynb", TITLES) == becomes
    assert badges.titled(becomes, "x/02_c.ipynb", TITLES) == becomes


def test_a_heading_is_the_title_of_the_sidebar():
    def markdown(name, text): return {"cell_type": "markdown", "id": name, "metadata": {}, "source": [text]}
    cells = [markdown("t", "# y\n\n> What."), markdown("u", "# A comment")]
    once = badges.readable(badges.completed(cells, "y.ipynb"), "y.ipynb", TITLES)
    assert ["".join(cell["source"]) for cell in once if cell["id"] in "tu"] == ["# Why?\n\n> What.", "# A comment"]
    unlisted = badges.readable(badges.completed(cells, "w.ipynb"), "w.ipynb", TITLES)
    assert "".join(unlisted[0]["source"]) == "# y\n\n> What."


def test_titles_are_those_of_the_sidebar():
    "Each is said once; an entry that waits as a comment is none."
    listed = site_tool().page_titles(yaml.safe_load((ROOT / "nbs" / "sidebar.yml").read_text(encoding="utf-8")))
    assert badges.titles() == {name: title for name, title in listed.items() if name != "index.ipynb"}
    assert len(set(listed.values())) == len(listed) == len(NOTEBOOKS)


def test_beside_the_badge_stands_what_a_notebook_builds():
    def code(text): return {"cell_type": "code", "source": [text]}
    cells = [code("#| exports verify\nx = 1"), code("#| default_exp drafters.tree"), code("#| exporti\nimport os"),
             code("#| exports verify\ny = 1"), {"cell_type": "markdown", "source": ["#| exports gone"]}]
    assert badges.modules(cells) == ["specdec.drafters.tree", "specdec.verify"]
    assert badges.badge("y.ipynb", badges.modules(cells)).endswith(") builds `specdec.drafters.tree`, `specdec.verify`")
    assert badges.modules([code("#| default_exp __init__")]) == ["specdec"]
    assert badges.modules([code("1")]) == [] and badges.badge("y.ipynb", []).endswith("y.ipynb)")


@pytest.mark.parametrize("code, outputs, unseen", [
    ("#| hide\nassert x", [], True), ("#| echo: false\nx", ["shown"], True), ("#| code-fold: true\nplot()", [], True),
    ("#| default_exp x", [], True), ("#| exports\nimport torch", [], True), ("from torch import nn", ["warned"], False),
    ("#| exports\ndef f(): ...", [], False), ("#| slow\nrace()", [], False), ("import torch\ntorch.rand(1)", [], False),
    ("!pip list", [], False), ("", [], True),
])
def test_jupyterlab_folds_what_the_site_does(code, outputs, unseen):
    "And nothing else: a fold that has lost its reason is opened, what else stands there is kept."
    wanted = {"jupyter": {"source_hidden": True}} if unseen else {}
    for jupyter in ({}, {"jupyter": {"source_hidden": True}}):
        found = badges.folded({"cell_type": "code", "source": [code], "outputs": outputs, "metadata": jupyter})
        assert found["metadata"] == wanted and found["outputs"] == outputs
    tagged = {"tags": ["fold"]}  # a cell of a module
    found = badges.folded({"cell_type": "code", "source": ["#| exports\nx = 1"], "outputs": [], "metadata": tagged})
    assert found["metadata"] == tagged | {"jupyter": {"source_hidden": True}}
    kept = {"tags": ["a"], "jupyter": {"outputs_hidden": True}}
    found = badges.folded({"cell_type": "code", "source": ["1"], "outputs": [], "metadata": kept})
    assert found["metadata"] == kept


def test_nothing_but_code_for_readers_is_open_in_jupyterlab():
    "In the tour and on the path: no set-up, no test; and where it runs, Jupyter need not ask."
    wanted, opened = re.compile(r"^#\| (?:exports?i?|slow|eval: false|fig-alt:|output:)\b"), 0
    for path in sorted((ROOT / "nbs" / "path").glob("*.ipynb")):
        book = nbformat.read(path, as_version=4)
        assert book.metadata.kernelspec.name == "python3"
        seen = [cell.source for cell in book.cells if cell.cell_type == "code"
                and not cell.metadata.get("jupyter", {}).get("source_hidden")]
        plumbing = [source for source in seen if re.search(r"^#\|", source) and not wanted.match(source)]
        assert plumbing == [] and not any(source.startswith(("import ", "from ")) for source in seen), path.name
        opened += len(seen)
    assert opened > 100


@pytest.mark.parametrize("on_index", [True, False])
def test_install_cell_takes_the_release_or_else_the_repository(on_index, monkeypatch):
    "A failing %pip raises nothing, so what counts is whether the package is there afterwards."
    from IPython.core.interactiveshell import InteractiveShell
    shell, asked, real = InteractiveShell(), [], importlib.util.find_spec
    def there(name): return real(name) if name != "specdec" else ("git+" in asked[-1] or on_index) if asked else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there(name) or None)
    shell.register_magic_function(asked.append, magic_name="pip")
    commands = []
    monkeypatch.setattr(shell, "system", commands.append)
    assert shell.run_cell(badges.install("path/x.ipynb", False)).success
    version = badges.released()[-1]
    release = f'"specdec-nb[notebooks]=={version}"'
    repository = '"specdec-nb[notebooks] @ git+https://github.com/specdec/specdec"'
    assert [words.removeprefix("install --quiet ") for words in asked] == [release, *[repository] * (not on_index)]
    assert len(commands) == 1 and commands[0].endswith("-m specdec fetch")


def test_install_cell_does_nothing_where_the_package_is():
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell()
    folder = os.getcwd()
    done = shell.run_cell(badges.install("path/x.ipynb", True))
    assert done.success and os.getcwd() == folder


def systems(job) -> set[str]:
    "Where a job of a workflow runs; the words of a variable are nothing fixed."
    matrix = job.get("strategy", {}).get("matrix", {})
    if job["runs-on"] != "${{ matrix.system }}": return {job["runs-on"]}
    return {*matrix["system"], *(each["system"] for each in matrix.get("include", []))}


@pytest.mark.parametrize("workflow", ["test", "site", "release"])
def test_workflows_are_pinned_and_run_what_exists(workflow):
    text = (ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"].values()
    steps = [step for job in jobs for step in job["steps"]]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]) for step in steps if "uses" in step)
    fixed = r"ubuntu-\d\d\.\d\d|macos-\d\d|\$\{\{ vars\.GPU_RUNNER \}\}"
    assert all(re.fullmatch(fixed, name) and job["timeout-minutes"] for job in jobs for name in systems(job))
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    made = [step["run"].split() for step in steps if step.get("run", "").startswith("make ")]
    asked = [word for words in made for word in words[1:] if "=" not in word]
    assert asked and set(asked) <= targets
    named = re.findall(r"(?<![\w/])(?:tests|tools)/[\w/]+\.py", text)
    assert all((ROOT / name).exists() for name in named)
    pins = (ROOT / ".github" / "constraints.txt").read_text(encoding="utf-8")
    assert (
        all(re.search(rf"^{name}==\d", pins, re.M) for name in ("torch", "transformers", "nbdev", "playwright"))
        and "http" not in pins + text.replace("https://pypi.org/project/specdec-nb", "")
    )


def test_devcontainer_is_pinned_and_runs_what_exists():
    found = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert found["containerEnv"]["PIP_CONSTRAINT"].endswith("/.github/constraints.txt")
    assert re.fullmatch(r"python:3\.\d+\.\d+-\w+", found["image"])
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(found["postCreateCommand"].split()[1:]) <= targets


# Pages in folders

def test_links_and_pictures_lead_from_the_page_that_has_them(tmp_path):
    site = site_tool()
    assert site.relative("engine/core.html", "path/rejection.html") == "../engine/core.html"
    assert site.relative("path/kvcache.html", "path/rejection.html") == "kvcache.html"
    page = '<a href="https://x.org/engine/core.html#Enumerator.gone">a</a><a href="https://x.org/index.html#no">b</a>'
    anchors = {"engine/core.html": {"Enumerator"}, "index.html": set()}
    assert site.relink(page, "path/rejection.html", "https://x.org", anchors) == (
        '<a href="../engine/core.html#Enumerator">a</a><a href="../index.html">b</a>'
    )
    picture = f'<img src="data:image/png;base64,{"A" * 48}">'
    saved = site.save_pictures(picture, "path/rejection.html", tmp_path)
    assert re.fullmatch(r'<img src="\.\./images/[0-9a-f]{16}\.png">', saved)
    assert len(list((tmp_path / "images").iterdir())) == 1
