"""Runs notebooks as nbdev_test does, each stub of an exercise followed by its folded solution."""
import re
from dataclasses import dataclass
from pathlib import Path

import nbformat

NBS = Path(__file__).parents[1] / "nbs"
NOT_RUN = re.compile(r"^#\|\s*(eval:\s*false|slow)\s*$", re.M)
STUB = re.compile(r"\braise NotImplementedError\b")
CHECK = re.compile(r"^\s*except NotImplementedError\b", re.M)
SOLUTION = re.compile(r"<summary>Solution</summary>.*?```python\n(.*?)```", re.S)
UNWRITTEN = "Not written yet."


@dataclass
class Exercise:
    "Where an exercise stands in its notebook, and its solution."
    stub: int      # number of the cell
    check: int
    solution: str


def is_check(cell) -> bool: return cell.cell_type == "code" and bool(CHECK.search(cell.source))


def is_stub(cell) -> bool: return cell.cell_type == "code" and bool(STUB.search(cell.source)) and not is_check(cell)


def exercises(cells) -> list[Exercise]:
    "Each stub with the check and the solution that stand between it and the next stub."
    stubs = [i for i, cell in enumerate(cells) if is_stub(cell)]
    found = []
    for stub, end in zip(stubs, [*stubs[1:], len(cells)]):
        checks = [i for i in range(stub, end) if is_check(cells[i])]
        solved = [SOLUTION.search(cell.source) for cell in cells[stub:end] if cell.cell_type == "markdown"]
        solutions = [match.group(1) for match in solved if match]
        assert len(checks) == 1, f"The stub in cell {stub} has {len(checks)} checks before the next, not one."
        assert len(solutions) == 1, f"The stub in cell {stub} has {len(solutions)} solutions before the next, not one."
        found.append(Exercise(stub, checks[0], solutions[0]))
    return found


def printed(outputs) -> str:
    "What a cell wrote."
    return "".join("".join(output.get("text", "")) for output in outputs)


def solve(cells, shell) -> int: # how many exercises there were
    "Run cells as nbdev_test does, each stub followed by its solution; raises `AssertionError` if anything fails."
    todo = {exercise.stub: exercise for exercise in exercises(cells)}
    if not todo: return 0  # nbdev_test runs the others
    for i, cell in enumerate(cells):
        if cell.cell_type != "code" or NOT_RUN.search(cell.source): continue
        for source in [cell.source, *([todo[i].solution] if i in todo else [])]:
            outputs = shell.run(source)
            assert shell.exc is None, f"Cell {i} raised {shell.exc!r}:\n{source}"
        assert UNWRITTEN not in printed(outputs), f"The check in cell {i} did not see the solution."
    return len(todo)


def having_stubs(*tracks: str) -> list[Path]:
    "The notebooks of those folders that have exercises of this form."
    paths = sorted(path for track in tracks for path in (NBS / track).glob("*.ipynb"))
    return [path for path in paths if "raise NotImplementedError  # write it here" in path.read_text(encoding="utf-8")]


def solve_notebook(notebook: Path, shell, monkeypatch) -> None:
    "Run one notebook, in its own folder, with its solutions; it has at least one."
    monkeypatch.chdir(notebook.parent)
    assert solve(nbformat.read(notebook, as_version=4).cells, shell) > 0
