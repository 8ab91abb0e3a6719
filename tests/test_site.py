"""The checks of the documentation site and of the README find what they are there to find."""
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup


def tool(name: str):
    "A script of `tools/` as a module. That folder stays off the path, where its `site.py` would hide Python's own."
    spec = spec_from_file_location(name, Path(__file__).parents[1] / "tools" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_site, readme = tool("check_site"), tool("readme")

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


@pytest.mark.parametrize("written, led", [
    ("![a round](images/round.svg){width=60%}", "![a round](nbs/images/round.svg)"),
    ("[core](00_core.ipynb#double)", "[core](nbs/00_core.ipynb#double)"),
    ("[`double`](00_core.ipynb)", "[`double`](nbs/00_core.ipynb)"),
    ('[core](00_core.ipynb "a title")', '[core](nbs/00_core.ipynb "a title")'),
    ("[![badge](images/b.svg)](00_core.ipynb)", "[![badge](nbs/images/b.svg)](nbs/00_core.ipynb)"),
    ('<img src="images/round.svg" alt="a round">', '<img src="nbs/images/round.svg" alt="a round">'),
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
