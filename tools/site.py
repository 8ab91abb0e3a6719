"""Build the documentation site: `python tools/site.py [--out docs]`.

nbdev turns the notebooks into pages with `show_doc` entries and links between names; Quarto usually renders those.
Quarto is in no package registry, so here smalldocs renders the same sources, and this module adds what it lacks:
nbdev's page names, KaTeX and fonts served from the site itself, and pictures as files named by their content.
The pages fetch nothing from other sites, and building one tree twice gives the same bytes.
"""
import argparse
import ast
import inspect
import logging
import os
import posixpath
import re
import shutil
import sys
from base64 import b64decode, b64encode
from hashlib import sha256
from html import unescape
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import yaml
from fastcore import docments
from fontTools import subset
from nbdev import processors
from nbdev.config import get_config
from nbdev.quarto import refresh_quarto_yml
from nbdev.serve import proc_nbs
from smalldocs import config, layout, notebook
from smalldocs.site import Site

ROOT = Path(__file__).resolve().parents[1]
KATEX = "site_libs/katex"
CSS_IMPORT = re.compile(r"@import\s*(?:url\([^)]*\)|\"[^\"]*\"|'[^']*')[^;{}]*;")
NEW_FONT = re.compile(r'src:url\([^)]*\.woff2[^)]*\) format\("woff2"\),')
OLD_FONT = re.compile(r',url\([^)]*\.(?:woff|ttf)\) format\("\w+"\)')
LAST_MODIFIED = re.compile(r"\s*<lastmod>.*?</lastmod>")
PICTURE = re.compile(r"data:image/(png|jpeg|gif|svg\+xml);base64,([A-Za-z0-9+/=][A-Za-z0-9+/=\s]{40,})")
ID = re.compile(r'\bid="([^"]+)"')
ICON = re.compile(r'\.bi-([\w-]+)::before\{content:"[^"]*"\}')
# nbdev links names in a signature's comments, where no link can be
LINK_IN_CODE = re.compile(r"\[`([\w.]+)`\]\(https?://[^)\s]+\)")

layout.KATEX = KATEX  # where pages look for KaTeX; `finish_pages` leads them there from their own folder
logging.getLogger("fontTools").setLevel(logging.ERROR)  # two bytes too many in the icons' font are none of our business
config.PAGE_KEYS.add("output-file")  # NbdevSite.read reads it, so smalldocs need not warn
smalldocs_output = notebook.output_html


def shorter_paths(svg: str) -> str:
    """Coordinates to a tenth of a point, without the spaces that a path can do without; no eye sees more, and a page is
    lighter by a third of its pictures."""
    def path(match: re.Match) -> str:
        tenths = re.sub(r"(\.\d)\d+", r"\1", match[0]).replace(".0 ", " ")
        return re.sub(r"\s*([A-Za-z])\s*", r"\1", tenths)

    return re.sub(r'(?<=\s)([xy]="-?\d+\.\d)\d+', r"\1", re.sub(r'(?<=\sd=")[^"]*', path, svg))


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


def signature(function, eval_str: bool = False, **options) -> inspect.Signature:
    "A signature with its types as they are written, where one is in quotes and only defined further down the notebook."
    try: return inspect.signature(function, eval_str=eval_str, **options)
    except NameError: return inspect.signature(function, **options)


docments.signature = signature
processors._hide_dirs.discard("exporti")  # a reader sees all code; `exporti` only keeps a name out of `__all__`


class NbdevSite(Site):
    "smalldocs' site, with nbdev's page names and nothing that comes from elsewhere."

    def read(self, src):
        "Read a page; it is called what nbdev calls it: `00_core.ipynb` becomes `core.html`."
        page = super().read(src)
        page.out = src.with_name(page.front["output-file"])
        return page

    def copy_assets(self, nav):
        "Copy the theme without its web fonts, and KaTeX with the one font format that browsers need."
        super().copy_assets(nav)
        for theme in self.theme_files():
            edit(self.out / "site_libs" / theme.href, lambda css: CSS_IMPORT.sub("", css))
        shutil.copytree(ROOT / "tools" / "katex", self.out / KATEX)
        edit(self.out / KATEX / "katex.min.css", lambda css: OLD_FONT.sub("", css))

    def write_sitemap(self):
        "Write the sitemap without the times at which this machine wrote the notebooks."
        super().write_sitemap()
        edit(self.out / "sitemap.xml", lambda xml: LAST_MODIFIED.sub("", xml))


def edit(path: Path, change) -> None:
    "Replace the text of a file by `change(text)`."
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def sidebar_entries(contents: list) -> list[str]:
    "The notebooks that a sidebar's `contents` lists, those in its sections too."
    return [name for c in contents for name in (sidebar_entries(c["contents"]) if isinstance(c, dict) else [c])]


def check_sidebar(listed: list[str], present: set[str]) -> None:
    "Stop when the sidebar and the notebooks disagree: a link to nothing, or a page that nobody would find."
    problems = [f"nbs/sidebar.yml lists {name}, which does not exist" for name in listed if name not in present]
    problems += [f"nbs/{name} is not in nbs/sidebar.yml" for name in sorted(present - set(listed))]
    if problems:
        sys.exit("\n".join(problems))


def check_project(nbs: Path, package: str) -> None:
    "Stop when the pages would lack entries or links: an unlisted notebook, or a package that nbdev cannot look up."
    sidebar = yaml.safe_load((nbs / "sidebar.yml").read_text(encoding="utf-8"))["website"]["sidebar"]
    check_sidebar(
        sidebar_entries(sidebar["contents"]),
        {p.relative_to(nbs).as_posix() for p in nbs.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts},
    )
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


def in_order(page: str) -> str:
    """The page with no level of headings left out: nbdev makes every documented name an `h3`, also before the first
    `h2`."""
    start = page.index("<main")
    end = page.find("<h2", start) if "<h2" in page[start:] else len(page)
    early = re.sub(r'<h3\b([^>]*)class="', r'<h2\1class="h3 ', page[start:end]).replace("</h3>", "</h2>")
    return page[:start] + early + page[end:]


def fold_imports(page: str) -> str:
    "The page with exported cells that hold nothing but imports folded away; all others stay open."
    def fold(match: re.Match) -> str:
        code = unescape(re.sub(r"<[^>]+>", "", match[1]))
        try: only_imports = all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(code).body)
        except SyntaxError: only_imports = False
        return match[0].replace(' open=""', "", 1) if only_imports else match[0]

    return re.sub(
        r'<details open="" [^>]*>\s*<summary>Exported source</summary>(.*?)</details>', fold, page, flags=re.S
    )


def finish_pages(out: Path, site_url: str) -> None:
    "Relink the pages to each other and to KaTeX, and move their pictures to files."
    paths = sorted(out.rglob("*.html"))
    pages = {p.relative_to(out).as_posix(): p.read_text(encoding="utf-8") for p in paths}
    anchors = {name: set(ID.findall(text)) for name, text in pages.items()}
    for name, text in pages.items():
        text = LINK_IN_CODE.sub(r"\1", relink(text, name, site_url, anchors))
        text = text.replace(f'="{KATEX}/', f'="{relative(KATEX, name)}/')
        (out / name).write_text(save_pictures(fold_imports(in_order(text)), name, out), encoding="utf-8")
    edit(out / "search.json", lambda index: LINK_IN_CODE.sub(r"\1", index))


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
    os.chdir(ROOT)
    settings = get_config()
    check_project(settings.nbs_path, settings.lib_path.name)
    refresh_quarto_yml()
    project = config.load(proc_nbs(n_workers=0, force=True))
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
