"""Check the committed site: `python tools/check_site.py`.

Builds the site anew in a temporary folder. Fails, with one line for each problem, when the committed `docs/` says
something else, when a link, anchor or picture inside the site leads nowhere, or when a page would fetch anything from
another site. Comparing what a reader sees, not bytes, lets another patch release of the renderer pass.
"""
import json
import re
import subprocess
import sys
import tempfile
from difflib import unified_diff
from functools import cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from posixpath import dirname, join, normpath
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup

ROOT = Path(__file__).resolve().parents[1]
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src",
           "track": "src", "embed": "src", "input": "src", "object": "data", "image": "href", "use": "href"}
LOADING_RELS = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "preconnect", "dns-prefetch", "manifest"}
BLOCKS = ["p", "div", "li", "pre", "tr", "br", "h1", "h2", "h3", "h4", "h5", "h6",
          "summary", "dt", "dd", "figcaption", "nav"]
CSS_URL = re.compile(r"url\(\s*[\"']?(?!data:)([^\"')]+)|@import\s*[\"']([^\"']+)")
COLOURED = re.compile(r'<span class="[\w -]+">([^<]*)</span>')  # a piece of code: its text, and nothing to check
SCRIPT_URL = re.compile(r"\b(?:from|import|fetch)\s*\(?\s*[\"'`]((?:https?:)?//[^\"'`]+)")


def is_external(url: str) -> bool:
    "Whether `url` leads out of this site."
    parts = urlsplit(url)
    return bool(parts.scheme or parts.netloc)


def css_urls(css: str) -> list[str]:
    "What a stylesheet loads: its `url(…)` and `@import` addresses, pictures held in the stylesheet itself left out."
    return [url or imported for url, imported in CSS_URL.findall(css)]


def loaded_urls(soup: BeautifulSoup) -> list[str]:
    "What a browser fetches to show a page: scripts, styles, pictures, frames, and what inline styles and scripts name."
    urls = [tag[attribute] for name, attribute in LOADING.items() for tag in soup.find_all(name) if tag.get(attribute)]
    urls += [tag["href"] for tag in soup.find_all("link") if LOADING_RELS & set(tag.get("rel", []))]
    urls += [entry.split()[0] for tag in soup.find_all(srcset=True) for entry in tag["srcset"].split(",")]
    urls += [url for tag in soup.find_all("style") for url in css_urls(tag.get_text())]
    urls += [url for tag in soup.find_all(style=True) for url in css_urls(tag["style"])]
    urls += [url for tag in soup.find_all("script", src=False) for url in SCRIPT_URL.findall(tag.get_text())]
    return [url for url in urls if not url.startswith("data:")]


def linked_urls(soup: BeautifulSoup) -> list[str]:
    "Where a page's hyperlinks lead."
    return [tag["href"] for tag in soup.find_all("a", href=True)]


def anchors(soup: BeautifulSoup) -> set[str]:
    "The names that a link can lead to inside a page; the empty one is its top."
    return {"", "top"} | {tag["id"] for tag in soup.find_all(id=True)}


def is_broken(url: str, source: str, files: set[str], pages: dict[str, set[str]]) -> bool:
    "Whether a link inside the site, written in the file `source`, leads to no file or, in a page, to no anchor."
    parts = urlsplit(url)
    target = normpath(join(dirname(source), unquote(parts.path))) if parts.path else source
    target = "index.html" if target == "." else target
    return target not in files or unquote(parts.fragment) not in pages.get(target, {unquote(parts.fragment)})


def unrendered(soup: BeautifulSoup) -> list[str]:
    "Paragraphs that show their markup: LaTeX outside of dollar signs, and a `:::` without its partner."
    texts = [tag.get_text().strip() for tag in soup.find_all("p")]
    return [text.splitlines()[0] for text in texts if text.startswith(("\\begin{", ":::"))]


def page_problems(name: str, soup: BeautifulSoup, files: set[str], pages: dict[str, set[str]]) -> list[str]:
    """What is wrong with the links, the loaded files and the markup of one page; `pages` holds the anchors of every
    page."""
    loaded, linked = loaded_urls(soup), linked_urls(soup)
    problems = [f"{name}: would fetch {url}" for url in loaded if is_external(url)]
    inside = [url for url in loaded + linked if not is_external(url)]
    problems += [f"{name}: broken link {url}" for url in inside if is_broken(url, name, files, pages)]
    return problems + [f"{name}: shows its markup, not what it means: {text}" for text in unrendered(soup)]


def css_problems(name: str, css: str, files: set[str]) -> list[str]:
    "What is wrong with the files that a stylesheet loads."
    urls = css_urls(css)
    problems = [f"{name}: would fetch {url}" for url in urls if is_external(url)]
    return problems + [
        f"{name}: broken link {url}" for url in urls if not is_external(url) and is_broken(url, name, files, {})
    ]


def file_names(site: Path) -> set[str]:
    "The files of a site, relative to its folder."
    return {p.relative_to(site).as_posix() for p in site.rglob("*") if p.is_file()}


def site_problems(site: Path, soups: dict[str, BeautifulSoup]) -> list[str]:
    "What is wrong inside one site: its pages, its stylesheets and its search index."
    files, pages = file_names(site), {name: anchors(soup) for name, soup in soups.items()}
    problems = [p for name, soup in soups.items() for p in page_problems(name, soup, files, pages)]
    for name in sorted(f for f in files if f.endswith(".css")):
        problems += css_problems(name, (site / name).read_text(encoding="utf-8"), files)
    hits = [entry["href"] for entry in json.loads((site / "search.json").read_text(encoding="utf-8"))]
    return problems + [f"search.json: broken link {url}" for url in hits if is_broken(url, "search.json", files, pages)]


def visible_lines(soup: BeautifulSoup) -> list[str]:
    "The text that a reader sees, a line for each block or line of code. Takes the soup apart: call it last."
    for tag in soup.find_all(["script", "style"]):
        tag.decompose()
    for tag in soup.find_all(BLOCKS):
        tag.insert_before("\n")
    return [line.strip() for line in soup.get_text().splitlines() if line.strip()]


def text_problem(name: str, committed: list[str], built: list[str]) -> list[str]:
    "The first lines in which a committed page differs from the built one."
    changed = (d for d in unified_diff(committed, built, n=0, lineterm="") if not d.startswith(("---", "+++", "@@")))
    first = " | ".join(line[:120] for line in islice(changed, 4))
    return [f"docs/{name} is stale, run make docs: {first}"] if first else []


def stale_problems(
    committed: Path, built: Path, old: dict[str, BeautifulSoup], new: dict[str, BeautifulSoup]
) -> list[str]:
    """Where the committed site differs from the built one: files on one side only, and pages or data that say something
    else."""
    ours, fresh = file_names(committed), file_names(built)
    problems = [f"docs/{name} is missing, run make docs" for name in sorted(fresh - ours)]
    problems += [f"docs/{name} is no longer part of the site, run make docs" for name in sorted(ours - fresh)]
    for name in sorted(ours & fresh):
        if name in old:
            if old[name] is new[name]: continue  # one text, parsed once
            problems += text_problem(name, visible_lines(old[name]), visible_lines(new[name]))
        elif not name.startswith("site_libs/") and (committed / name).read_bytes() != (built / name).read_bytes():
            problems.append(f"docs/{name} is stale, run make docs")
    return problems


@cache
def parsed(page: str) -> BeautifulSoup:
    "The tree of a page, its code in one piece. Equal pages have one, for parsing takes long."
    return BeautifulSoup(COLOURED.sub(r"\1", page), "html.parser")


def read_pages(site: Path) -> dict[str, BeautifulSoup]:
    "The pages of a site, parsed."
    return {p.relative_to(site).as_posix(): parsed(p.read_text(encoding="utf-8")) for p in sorted(site.rglob("*.html"))}


def check() -> list[str]:
    "Every problem of the committed site, each named once."
    if find_spec("smalldocs") is None and sys.version_info < (3, 11):
        print("The site is not checked: its renderer needs Python 3.11.")
        return []
    committed = ROOT / "docs"
    if not committed.is_dir():
        return ["docs/ is missing, run make docs"]
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "docs"
        if subprocess.run([sys.executable, ROOT / "tools" / "site.py", "--out", built]).returncode:
            return ["tools/site.py failed, for the reason above"]
        old, new = read_pages(committed), read_pages(built)
        problems = site_problems(committed, old) + site_problems(built, new)
        return list(dict.fromkeys(problems + stale_problems(committed, built, old, new)))


if __name__ == "__main__":
    sys.exit("\n".join(check()) or 0)
