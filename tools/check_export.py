"""Do the notebooks and the package agree? `python tools/check_export.py`.

Exports and cleans a copy of the tree, and fails naming the files that come out different.
"""
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]


def contents(root: Path) -> dict[str, bytes]:
    "Every exported module and every notebook, by its path from the root."
    return {
        str(file.relative_to(root)): file.read_bytes()
        for file in [*root.glob("specdec/**/*.py"), *root.glob("nbs/**/*.ipynb")]
    }


def exported_again(copy: Path) -> dict[str, bytes]:
    "What the tree's modules and notebooks are after an export and a clean, done in `copy`."
    shutil.copy(ROOT / "settings.ini", copy)
    for folder in ("nbs", "specdec"):
        shutil.copytree(
            ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        )
    for command in ("nbdev_export", "nbdev_clean"):
        subprocess.run([Path(sys.executable).with_name(command)], cwd=copy, check=True)
    return contents(copy)


def main() -> int:
    "0 if exporting and cleaning change nothing, else 1."
    with TemporaryDirectory() as copy:
        before, after = contents(ROOT), exported_again(Path(copy))
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in changed:
        print(
            f"{name} is not what the notebooks say: run nbdev_export and nbdev_clean, look at the difference and"
            " commit it."
        )
    wrong = [f"{name} {why}." for name, text in sorted(before.items()) if name.endswith(".py") for why, found in {
        "holds a directive: give the cell the tag `fold` in its place": b"\n#|" in text,
        "has a relative import: begin its cell of imports with `#| exporti`": re.search(rb"\n *from \.", text),
        "has two notebooks: one exports, the other imports and shows":
            len({*re.findall(rb"\n# %% (\S+\.ipynb)", text)}) > 1,
    }.items() if found]
    for line in wrong: print(line)
    return 1 if changed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
