"""Let every notebook open in Colab: `python tools/badges.py` adds or refreshes a badge and an install cell; `--check`
fails if one is missing.

The badge stands under the title; the install cell follows it, is hidden on the site, and does nothing outside of Colab.
Running this twice changes nothing, and no saved output is touched.
"""
import argparse
import configparser
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BADGE_ID, INSTALL_ID = "open-in-colab", "install-in-colab"


def repository() -> tuple[str, str, str]:
    "Owner, name and branch, as settings.ini has them."
    settings = configparser.ConfigParser()
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    return tuple(settings["DEFAULT"][key] for key in ("user", "repo", "branch"))


def badge(notebook: str) -> str: # relative to nbs/, such as "path/00_tour.ipynb"
    "The badge's Markdown. Its picture lies beside the notebooks, so that no page fetches anything from another site."
    user, repo, branch = repository()
    up = "../" * notebook.count("/")
    there = f"https://colab.research.google.com/github/{user}/{repo}/blob/{branch}/nbs/{notebook}"
    return f"[![Open in Colab]({up}images/colab.svg)]({there})"


def install(notebook: str) -> str:
    """The code that makes Colab's machine ready: the project, the packages that notebooks use besides, and the default
    model."""
    user, repo, branch = repository()
    folder = Path("nbs", notebook).parent.as_posix()
    root = "/".join([".."] * len(Path(folder).parts))
    return "\n".join([
        "#| hide", "#| eval: false",
        'if "google.colab" in str(get_ipython()):  # elsewhere the package is installed already',
        f"    !git clone --quiet --depth 1 --branch {branch} https://github.com/{user}/{repo}",
        f"    %cd {repo}/{folder}",
        f"    %pip install --quiet {root} fastcore matplotlib scipy psutil ipywidgets",
        "    !specdec fetch"])


def as_lines(text: str) -> list[str]:
    "A cell's source as a notebook stores it."
    return text.splitlines(keepends=True)


def with_badge(cells: list[dict], notebook: str) -> list[dict]:
    "The cells with badge and install cell right after the title, each once; all others as they are."
    own = [
        {"cell_type": "markdown", "id": BADGE_ID, "metadata": {}, "source": as_lines(badge(notebook))},
        {
            "cell_type": "code", "execution_count": None, "id": INSTALL_ID, "metadata": {}, "outputs": [],
            "source": as_lines(install(notebook)),
        },
    ]
    others = [cell for cell in cells if cell["id"] not in (BADGE_ID, INSTALL_ID)]
    after = 1 + next(
        i
        for i, cell in enumerate(others)
        if cell["cell_type"] == "markdown" and "".join(cell["source"]).startswith("# ")
    )
    return others[:after] + own + others[after:]


def refreshed(notebook: str, text: str) -> str:
    "The notebook's file as it should be, given its name and what it is."
    nb = json.loads(text)
    nb["cells"] = with_badge(nb["cells"], notebook)
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
        sys.exit("\n".join(f"{name} lacks its badge or install cell: run python tools/badges.py" for name in stale))
    print("\n".join(stale) or "All notebooks have their badge.")


if __name__ == "__main__":
    main()
