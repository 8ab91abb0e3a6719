"""The checks of the documentation site and of the README find what they are there to find."""
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from bs4 import BeautifulSoup

from helpers import tool
from specdec.core import FATE_MEANINGS, FATE_STYLES

ROOT = Path(__file__).parents[1]


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


# The sidebar and the reference

def test_a_page_that_nobody_lists_stops_the_build(capsys):
    site = site_tool()
    site.check_sidebar(
        site.sidebar_entries(["a.ipynb", {"section": "x", "contents": ["b.ipynb"]}]), {"a.ipynb", "b.ipynb"}
    )
    with pytest.raises(SystemExit, match="c.ipynb is not in"): site.check_sidebar(["a.ipynb"], {"a.ipynb", "c.ipynb"})
    with pytest.raises(SystemExit, match="b.ipynb, which does not exist"):
        site.check_sidebar(["a.ipynb", "b.ipynb"], {"a.ipynb"})


def test_notebooks_stand_in_the_sidebar_in_their_order():
    sidebar = yaml.safe_load((ROOT / "nbs" / "sidebar.yml").read_text(encoding="utf-8"))["website"]["sidebar"]
    listed = [Path(name) for name in site_tool().sidebar_entries(sidebar["contents"])]
    for track in ("path", "drafters", "lossless", "engine", "bench", "use"):
        numbered = [name.name for name in listed if name.parent.name == track and name.name[0].isdigit()]
        assert numbered == sorted(numbered) and len(numbered) > 2, track


def test_reference_lists_what_the_package_exports(monkeypatch):
    cells = [
        cell
        for cell in nbformat.read(ROOT / "nbs" / "use" / "reference.ipynb", as_version=4).cells
        if cell.cell_type == "code" and cell.id not in (badges.BADGE_ID, badges.INSTALL_ID)
    ]
    monkeypatch.chdir(ROOT / "nbs" / "use")
    names = {}
    for cell in cells[:-1]: exec(cell.source, names)
    *before, last = cells[-1].source.splitlines()
    exec("\n".join(before), names)
    assert (
        cells[-1].outputs[0].data["text/markdown"] == eval(last, names).data
    ), "nbs/use/reference.ipynb is stale: run it again"


# What the build adds to its renderer

def test_headings_leave_out_no_level():
    site = site_tool()
    page = (
        '<aside><h3 class="a">n</h3></aside><main><h1>t</h1><h3 id="f" class="anchored">f</h3><p>x</p><h2>s</h2><h3'
        ' class="anchored">g</h3></main>'
    )
    assert site.in_order(page) == page.replace(
        '<h3 id="f" class="anchored">f</h3>', '<h2 id="f" class="h3 anchored">f</h2>'
    )
    assert "<h3" not in site.in_order('<main><h1>t</h1><h3 class="anchored">f</h3></main>')


def test_cells_of_imports_are_folded_and_no_others():
    fold = site_tool().fold_imports
    cell = (
        '<details open="" class="code-fold">\n<summary>Exported source</summary>\n<pre><code>{}</code></pre></details>'
    )
    imports, function = cell.format('<span>import</span> os\nfrom x import y'), cell.format(
        "import os\ndef f(a): return a &lt; 1"
    )
    assert fold(imports + function) == imports.replace(' open=""', "") + function


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


def test_no_markdown_is_left_in_signatures():
    pattern = site_tool().LINK_IN_CODE
    assert (
        pattern.sub(r"\1", "# of [`HeadConfig`](https://example.org/heads.html#headconfig) and [this](x.html)")
        == "# of HeadConfig and [this](x.html)"
    )


# Colours of fates: the site's stylesheet and the package say the same, and both can be read

def contrast(one: str, other: str) -> float:
    "The contrast ratio of two colours (WCAG 2.1)."
    def luminance(colour):
        channels = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        return sum(
            weight * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
            for weight, c in zip((0.2126, 0.7152, 0.0722), channels)
        )
    low, high = sorted((luminance(one), luminance(other)))
    return (high + .05) / (low + .05)


def test_static_pages_name_the_fates_as_the_package_does():
    script = (ROOT / "nbs" / "use" / "recorded.js").read_text(encoding="utf-8")
    assert all(f'{fate}: "{words}"' in script for fate, words in FATE_MEANINGS.items())


@pytest.mark.parametrize("fate, style", [item for item in FATE_STYLES.items() if item[1]])
def test_fates_look_the_same_everywhere_and_can_be_read(fate, style):
    said = dict(part.split(":") for part in style.split(";"))
    rule = re.search(rf"^\.fate-{fate} {{ (.*?) }}", (ROOT / "nbs" / "styles.css").read_text(encoding="utf-8"), re.M)[1]
    assert dict(part.split(": ") for part in rule.rstrip(";").split("; ")) == said
    assert contrast(said["color"], said["background"]) >= 4.5
    assert contrast("#ffffff", "#000000") == 21 and contrast("#999999", "#ffffff") < 4.5  # the measure itself


# Opening it elsewhere

def test_every_notebook_has_its_badge():
    done = subprocess.run([sys.executable, ROOT / "tools" / "badges.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_badges_come_once_and_disturb_nothing():
    cells = [
        {"cell_type": "raw", "id": "a", "source": ["---\n"]},
        {"cell_type": "markdown", "id": "b", "source": ["# x\n", "\n", "> y"]},
        {"cell_type": "code", "id": "c", "source": ["1"], "outputs": ["kept"]},
    ]
    once = badges.with_badge(cells, "x.ipynb")
    assert [cell["id"] for cell in once] == ["a", "b", badges.BADGE_ID, badges.INSTALL_ID, "c"] and [
        once[i] for i in (0, 1, 4)
    ] == cells
    assert badges.with_badge(once, "x.ipynb") == once
    moved = [once[3], *once[:3], {**once[4]}]
    moved[3] = {**moved[3], "source": ["an old badge"]}
    assert badges.with_badge(moved, "x.ipynb") == once
    assert (
        "x.ipynb" in "".join(once[2]["source"])
        and "\n".join(badges.install("path/x.ipynb").splitlines()[:2]) == "#| hide\n#| eval: false"
    )


def test_install_cell_does_nothing_outside_of_colab():
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell()
    folder = os.getcwd()
    done = shell.run_cell(badges.install("path/x.ipynb"))
    assert done.success and os.getcwd() == folder
    assert {"google.colab", "git clone", "%pip install", "specdec fetch"} <= set(
        re.findall(r"google\.colab|git clone|%pip install|specdec fetch", badges.install("path/x.ipynb"))
    )


@pytest.mark.parametrize("workflow", ["test", "site"])
def test_workflows_are_pinned_and_run_what_exists(workflow):
    text = (ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"].values()
    steps = [step for job in jobs for step in job["steps"]]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", step["uses"]) for step in steps if "uses" in step)
    assert all(re.fullmatch(r"ubuntu-\d\d\.\d\d", job["runs-on"]) and job["timeout-minutes"] for job in jobs)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    asked = [word for step in steps for word in step.get("run", "").split() if word != "make" and "=" not in word]
    assert asked and set(asked) <= targets
    pins = (ROOT / ".github" / "constraints.txt").read_text(encoding="utf-8")
    assert (
        all(re.search(rf"^{name}==\d", pins, re.M) for name in ("torch", "transformers", "nbdev", "playwright"))
        and "http" not in pins + text
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
