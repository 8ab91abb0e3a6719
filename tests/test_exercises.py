"""Every exercise of the path can be done: each notebook is run top to bottom with the folded solution executed right
after its stub, and then no check complains. A solution that is wrong, or missing, is noticed."""
import os
import re
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from execnb.shell import CaptureShell

PATH = Path(__file__).parents[1] / "nbs" / "path"
NOTEBOOKS = sorted(PATH.glob("*.ipynb"))
NOT_RUN = re.compile(r"^#\|\s*(eval:\s*false|slow)\s*$", re.M)
STUB = re.compile(r"^\s*raise NotImplementedError\b", re.M)
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
    last = max(exercise.check for exercise in todo.values())
    for i, cell in enumerate(cells[:last + 1]):
        if cell.cell_type != "code" or NOT_RUN.search(cell.source): continue
        for source in [cell.source, *([todo[i].solution] if i in todo else [])]:
            outputs = shell.run(source)
            assert shell.exc is None, f"Cell {i} raised {shell.exc!r}:\n{source}"
        assert UNWRITTEN not in printed(outputs), f"The check in cell {i} did not see the solution."
    return len(todo)


@pytest.fixture
def shell(monkeypatch):
    "A notebook's shell in this process, as nbdev_test has it."
    monkeypatch.setitem(os.environ, "IN_TEST", "1")
    return CaptureShell()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_solutions_solve_their_exercises(notebook, shell, monkeypatch):
    monkeypatch.chdir(notebook.parent)
    cells = nbformat.read(notebook, as_version=4).cells
    solve(cells, shell)


def test_the_tour_has_exercises():
    "So that a change of their form can't make the test above run nothing."
    assert len(exercises(nbformat.read(PATH / "00_tour.ipynb", as_version=4).cells)) >= 2


# Negative controls, on a notebook made up here

MARKDOWN, CODE = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell


def synthetic(solution="    return 2 * x", check="assert double(4) == 8"):
    "One exercise, and a cell that can't run without a kernel."
    return [
        CODE("#| eval: false\n1 / 0"),
        MARKDOWN("**1.** Write `double`."),
        CODE("def double(x):\n    'Twice x.'\n    raise NotImplementedError  # write it here"),
        CODE(f"try:\n    {check}\nexcept NotImplementedError: print('Not written yet.')"),
        MARKDOWN(f"<details><summary>Solution</summary>\n\n```python\ndef double(x):\n{solution}\n```\n\n</details>"),
    ]


def test_a_right_solution_passes(shell): assert solve(synthetic(), shell) == 1


def test_a_wrong_solution_is_caught(shell):
    with pytest.raises(AssertionError, match="Cell 3 raised AssertionError"): solve(synthetic("    return x"), shell)


def test_a_solution_that_is_a_stub_itself_is_caught(shell):
    cells = synthetic("    raise NotImplementedError")
    with pytest.raises(AssertionError, match="did not see the solution"): solve(cells, shell)


def test_a_stub_without_a_solution_is_caught(shell):
    with pytest.raises(AssertionError, match="0 solutions"): solve(synthetic()[:-1], shell)


def test_a_stub_without_a_check_is_caught(shell):
    cells = synthetic()
    del cells[3]
    with pytest.raises(AssertionError, match="0 checks"): solve(cells, shell)


def test_a_solution_belongs_to_the_stub_before_it(shell):
    twice = [*synthetic()[2:4], *synthetic()[2:]]
    with pytest.raises(AssertionError, match="The stub in cell 0 has 0 solutions"): solve(twice, shell)


def test_slow_cells_are_not_run(shell):
    assert solve([CODE("#| slow\n1 / 0"), *synthetic()], shell) == 1
