"""Let every notebook open anywhere: `python tools/badges.py` adds or refreshes what each has besides its own cells;
`--check` fails if anything is missing.

- A badge under the title opens the notebook in Colab, as it was when the version in settings.ini was released.
- An install cell, hidden on the site, does something only where `specdec` isn't installed: in Colab, in Kaggle, or
  where the file lies alone. It installs that same version and fetches the default model. For the few notebooks that
  read the repository's files it takes a copy of that version as well.
- A last cell, hidden too, does something only under nbdev_test, which runs many notebooks in one process and would keep
  what each of them holds.
- The kernel, so that Jupyter need not ask for one.

Running this twice changes nothing, and no saved output is touched.
"""
import argparse
import configparser
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BADGE_ID, INSTALL_ID, LAST_ID = "open-in-colab", "install-in-colab", "let-go-in-tests"
KERNEL = {"display_name": "python3", "language": "python", "name": "python3"}
# how a notebook's code names a file of the repository, as seen from the notebook's folder
FILES = re.compile(r"""["']\.\./|["']data/|Path\("\.\."|\bfrom audits\b""")
LET_GO = """\
#| hide
from os import environ

if "IN_TEST" in environ:  # nbdev_test goes on with other notebooks in this process: keep nothing
    get_ipython().reset(new_session=False)
    from ctypes import CDLL
    from sys import platform
    if platform == "linux": getattr(CDLL(None), "malloc_trim", int)(0)  # glibc gives memory back"""


def released() -> tuple[str, str, str, str]:
    "Owner, repository, distribution and version, as settings.ini has them."
    settings = configparser.ConfigParser(delimiters=["="])
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    return tuple(settings["DEFAULT"][key] for key in ("user", "repo", "lib_name", "version"))


def badge(notebook: str) -> str: # relative to nbs/, such as "path/00_tour.ipynb"
    "The badge's Markdown. Its picture lies beside the notebooks, so that no page fetches anything from another site."
    user, repo, _, version = released()
    up = "../" * notebook.count("/")
    there = f"https://colab.research.google.com/github/{user}/{repo}/blob/v{version}/nbs/{notebook}"
    return f"[![Open in Colab]({up}images/colab.svg)]({there})"


def install(notebook: str,
            files: bool, # whether the notebook reads files of the repository
           ) -> str:
    """The code that makes a machine ready which has only Jupyter and this file: the package with what notebooks use
    besides, the default model, and the repository's files if need be; all of one version."""
    user, repo, distribution, version = released()
    lines = [
        "#| hide", "#| eval: false",
        "import sys", "from importlib.util import find_spec", "",
        'if find_spec("specdec") is None:  # in Colab, in Kaggle, or where this file lies alone',
        f'    %pip install --quiet "{distribution}[notebooks]=={version}"',
        '    !"{sys.executable}" -m specdec fetch']
    if files: lines += [
        f"    !git clone --quiet --depth 1 --branch v{version} https://github.com/{user}/{repo}",
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
    """The cells with badge and install cell right after the title, and the last cell, each once; all others as they
    are."""
    others = [cell for cell in cells if cell["id"] not in (BADGE_ID, INSTALL_ID, LAST_ID)]
    files = any(FILES.search("".join(cell["source"])) for cell in others if cell["cell_type"] == "code")
    after = 1 + next(
        i
        for i, cell in enumerate(others)
        if cell["cell_type"] == "markdown" and "".join(cell["source"]).startswith("# ")
    )
    first = [
        {"cell_type": "markdown", "id": BADGE_ID, "metadata": {}, "source": as_lines(badge(notebook))},
        code_cell(INSTALL_ID, install(notebook, files)),
    ]
    return [*others[:after], *first, *others[after:], code_cell(LAST_ID, LET_GO)]


def refreshed(notebook: str, text: str) -> str:
    "The notebook's file as it should be, given its name and what it is."
    nb = json.loads(text)
    nb["cells"] = completed(nb["cells"], notebook)
    nb["metadata"]["kernelspec"] = KERNEL
    return json.dumps(nb, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    "Write the notebooks, or check them."
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail with the names of the notebooks that would change"
    )
    check, stale = parser.parse_args().check, []
    nbs = ROOT / "nbs"
    for path in sorted(path for path in nbs.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts):
        name, text = path.relative_to(nbs).as_posix(), path.read_text(encoding="utf-8")
        if (fresh := refreshed(name, text)) == text: continue
        stale.append(f"nbs/{name}")
        if not check: path.write_text(fresh, encoding="utf-8")
    if check and stale:
        sys.exit("\n".join(
            f"{name} lacks its badge, its install cell, its last cell or its kernel: run python tools/badges.py"
            for name in stale))
    print("\n".join(stale) or "All notebooks have their badge, their install cell, their last cell and their kernel.")


if __name__ == "__main__":
    main()
