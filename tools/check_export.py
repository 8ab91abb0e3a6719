"""Do the notebooks and the package agree? `python tools/check_export.py`.

Exports and cleans in place, as a developer would, and fails naming the files that this changed.
"""
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def contents() -> dict[str, bytes]:
    "Every exported module and every notebook, by its path from the root."
    files = [*ROOT.glob("specdec/*.py"), *ROOT.glob("nbs/*.ipynb")]
    return {str(file.relative_to(ROOT)): file.read_bytes() for file in files}


def main() -> int:
    "0 if exporting and cleaning change nothing, else 1."
    before = contents()
    for command in ("nbdev_export", "nbdev_clean"):
        subprocess.run([Path(sys.executable).with_name(command)], cwd=ROOT, check=True)
    after = contents()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in changed:
        print(f"{name} was not what the notebooks say; it is now. Look at the difference and commit it.")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
