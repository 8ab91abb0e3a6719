"""Let every notebook open anywhere: `python tools/badges.py` adds or refreshes what each has besides its own cells;
`--check` fails if anything is missing.

- Its heading is the title that nbs/sidebar.yml has for it, and a link that calls another notebook by its file's name
  calls it by its title. ("the [gallery](…)" stays: with an article it is a word, not a name.)
- A badge under the title opens the notebook in Colab, as it is on the branch that settings.ini names; beside it stands
  the module that the notebook builds.
- An install cell, hidden on the site, does something only where `specdec` isn't installed: in Colab, in Kaggle, or
  where the file lies alone. It installs the version in settings.ini, or the repository as it is where the index has no
  such release, and fetches the default model. For the few notebooks that read the repository's files it takes a copy of
  them as well.
- The kernel, so that Jupyter need not ask for one.
- What the site hides or folds, JupyterLab folds: set-up, imports, tests, drawing.

Running this twice changes nothing, and no saved output is touched.
"""
import argparse
import ast
import configparser
import json
import posixpath
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BADGE_ID, INSTALL_ID = "open-in-colab", "install-in-colab"
KERNEL = {"display_name": "python3", "language": "python", "name": "python3"}
# how a notebook's code names a file of the repository, as seen from the notebook's folder
FILES = re.compile(r"""["']\.\./|["']data/|Path\("\.\."|\bfrom audits\b""")
# an entry of nbs/sidebar.yml: a page's title and its notebook
ENTRY = re.compile(r'^ *- text: "(.+)"\n +href: (\S+\.ipynb)$', re.M)
FRONT = "index.ipynb"  # is called by the project's name
HEADING = re.compile(r"^# .*")
# a link to a notebook; in front of it, an article makes its text a word of the sentence
LINK = re.compile(r"(?<!\bthe )(?<!\bThe )(?<!\ba )(?<!\bA )(?<!\ban )(?<!\bour )"
                  r"\[([\w ]+)\]\(([^)\s#]+\.ipynb)(#[^)\s]*)?\)")
MODULE = re.compile(r"^#\|\s*(default_exp|exports?i?)[ \t]+(\w[\w.]*)[ \t]*$", re.M)
UNSEEN = re.compile(r"^#\|\s*(?:hide|include:\s*false|echo:\s*false|code-fold:\s*true)\s*$", re.M)


def released() -> tuple[str, str, str, str, str]:
    "Owner, repository, its branch, distribution and version, as settings.ini has them."
    settings = configparser.ConfigParser(delimiters=["="])
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    return tuple(settings["DEFAULT"][key] for key in ("user", "repo", "branch", "lib_name", "version"))


def titles() -> dict[str, str]:
    "Each notebook's title for people, as the sidebar has it; the front page has the project's name."
    listed = ENTRY.findall((ROOT / "nbs" / "sidebar.yml").read_text(encoding="utf-8"))
    return {notebook: title for title, notebook in listed if notebook != FRONT}


def modules(cells: list[dict]) -> list[str]:
    "The modules that a notebook's cells are exported to, its own first."
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    found = sorted(MODULE.findall(code), key=lambda match: match[0] != "default_exp")
    return list(dict.fromkeys(f"specdec.{name}".removesuffix(".__init__") for _, name in found))


def badge(notebook: str, # relative to nbs/, such as "path/00_tour.ipynb"
          built: list[str], # the modules that it is exported to
         ) -> str:
    """The badge's Markdown, and what the notebook builds. Its picture lies beside the notebooks, so that no page
    fetches anything from another site."""
    user, repo, branch, *_ = released()
    up = "../" * notebook.count("/")
    there = f"https://colab.research.google.com/github/{user}/{repo}/blob/{branch}/nbs/{notebook}"
    said = f" builds {', '.join(f'`{name}`' for name in built)}" if built else ""
    return f"[![Open in Colab]({up}images/colab.svg)]({there}){said}"


def titled(text: str, notebook: str, called: dict[str, str]) -> str:
    "A text with each link to a notebook by its title, where it has the name of the file."
    def title(match: re.Match) -> str:
        words, target, place = match.groups("")
        there = posixpath.normpath(posixpath.join(posixpath.dirname(notebook), target))
        name = re.sub(r"^\d+_", "", posixpath.basename(there).removesuffix(".ipynb"))
        known = words.replace(" ", "_") == name and there in called
        return f"[{called[there]}]({target}{place})" if known else match[0]

    return LINK.sub(title, text)


def need_not_be_seen(cell: dict) -> bool:
    "Whether a code cell is one that the site hides or folds, or only says where code is exported to."
    code = "".join(cell["source"])
    if UNSEEN.search(code) or "fold" in cell["metadata"].get("tags", []): return True
    try: body = ast.parse(code).body
    except SyntaxError: return False  # a line for the shell
    return not cell["outputs"] and all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body)


def folded(cell: dict) -> dict:
    "The cell, its code folded in JupyterLab if it need not be seen and open if it should."
    kept = {key: value for key, value in cell["metadata"].get("jupyter", {}).items() if key != "source_hidden"}
    if need_not_be_seen(cell): kept["source_hidden"] = True
    others = {key: value for key, value in cell["metadata"].items() if key != "jupyter"}
    return {**cell, "metadata": {**others, **({"jupyter": kept} if kept else {})}}


def install(notebook: str,
            files: bool, # whether the notebook reads files of the repository
           ) -> str:
    """The code that makes a machine ready which has only Jupyter and this file: the package with what notebooks use
    besides, the default model, and the repository's files if need be; all of one version."""
    user, repo, _, distribution, version = released()
    there = f"https://github.com/{user}/{repo}"
    lines = [
        "#| hide", "#| eval: false",
        "import sys", "from importlib import invalidate_caches", "from importlib.util import find_spec", "",
        'if find_spec("specdec") is None:  # in Colab, in Kaggle, or where this file lies alone',
        f'    %pip install --quiet "{distribution}[notebooks]=={version}"',
        "    invalidate_caches()",
        '    if find_spec("specdec") is None:  # the index has no such release: the repository as it is',
        f'        %pip install --quiet "{distribution}[notebooks] @ git+{there}"',
        '    !"{sys.executable}" -m specdec fetch']
    clone = "git clone --quiet --depth 1"
    if files: lines += [
        f"    !{clone} --branch v{version} {there} || \\", f"     {clone} {there}",
        f"    %cd {repo}/{Path('nbs', notebook).parent.as_posix()}"]
    return "\n".join(lines)


def as_lines(text: str) -> list[str]:
    "A cell's source as a notebook stores it."
    return text.splitlines(keepends=True)


def code_cell(name: str, source: str) -> dict:
    "A cell that was never run."
    return {
        "cell_type": "code", "execution_count": None, "id": name, "metadata": {}, "outputs": [],
        "source": as_lines(source)
    }


def completed(cells: list[dict], notebook: str) -> list[dict]:
    "The cells with badge and install cell right after the title, each once; all others as they are."
    others = [cell for cell in cells if cell["id"] not in (BADGE_ID, INSTALL_ID)]
    files = any(FILES.search("".join(cell["source"])) for cell in others if cell["cell_type"] == "code")
    after = 1 + next(
        i
        for i, cell in enumerate(others)
        if cell["cell_type"] == "markdown" and "".join(cell["source"]).startswith("# ")
    )
    first = [
        {"cell_type": "markdown", "id": BADGE_ID, "metadata": {}, "source": as_lines(badge(notebook, modules(others)))},
        code_cell(INSTALL_ID, install(notebook, files)),
    ]
    return [*others[:after], *first, *others[after:]]


def readable(cells: list[dict], notebook: str, called: dict[str, str]) -> list[dict]:
    "The cells under the notebook's title, with links by titles, and with the code folded that need not be seen."
    shown = []
    for cell, following in zip(cells, [*cells[1:], {"id": None}]):
        if cell["cell_type"] == "code": cell = folded(cell)
        elif cell["cell_type"] == "markdown" and cell["id"] != BADGE_ID:
            text = titled("".join(cell["source"]), notebook, called)
            if following["id"] == BADGE_ID and notebook in called: text = HEADING.sub(f"# {called[notebook]}", text)
            cell = {**cell, "source": as_lines(text)}
        shown.append(cell)
    return shown


def refreshed(notebook: str, text: str, called: dict[str, str]) -> str:
    "The notebook's file as it should be, given its name, what it is, and what each notebook is called."
    nb = json.loads(text)
    nb["cells"] = readable(completed(nb["cells"], notebook), notebook, called)
    nb["metadata"]["kernelspec"] = KERNEL
    return json.dumps(nb, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    "Write the notebooks, or check them."
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail with the names of the notebooks that would change"
    )
    check, stale = parser.parse_args().check, []
    nbs, called = ROOT / "nbs", titles()
    for path in sorted(path for path in nbs.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts):
        name, text = path.relative_to(nbs).as_posix(), path.read_text(encoding="utf-8")
        if (fresh := refreshed(name, text, called)) == text: continue
        stale.append(f"nbs/{name}")
        if not check: path.write_text(fresh, encoding="utf-8")
    if check and stale:
        sys.exit("\n".join(
            f"{name} lacks its title, badge, install cell or kernel, a link's title or a fold: "
            "run python tools/badges.py"
            for name in stale))
    print("\n".join(stale) or "All notebooks have their title, badge, install cell, kernel and folds.")


if __name__ == "__main__":
    main()
