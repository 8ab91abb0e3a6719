"""Runs notebooks as nbdev_test does, each stub of an exercise followed by its folded solution."""
import ast
import re
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest

NBS = Path(__file__).parents[1] / "nbs"
NOT_RUN = re.compile(r"^#\|\s*(eval:\s*false|slow)\s*$", re.M)
STUB = re.compile(r"\braise NotImplementedError\b")
CHECK = re.compile(r"^\s*except NotImplementedError\b", re.M)
SOLUTION = re.compile(r"<summary>Solution</summary>.*?```python\n(.*?)```", re.S)
UNWRITTEN = "Not written yet."
# Those that take most time or memory, of the tracks behind the path: `make pages` sees that what they import is
# there and that each exercise has its check and its solution; `make test-all` runs them.
LONG = {
    "bench/07_run", "bench/09_report", "bench/01_methods", "drafters/03_model", "drafters/06_head",
    "drafters/06_head_parts", "drafters/25_trees",
    "engine/02_models", "engine/04_transformer", "engine/14_device_loop", "engine/15_gguf", "engine/17_prefill",
    "engine/18_batches", "engine/19_batch_loop",
    "lossless/01_proof", "lossless/02_gallery", "lossless/07_check", "lossless/10_audit",
    "lossless/14_grammars", "use/01_pairs", "use/06_panel", "use/07_cli",
}


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


def to_run() -> list:
    "The notebooks that have exercises of this form, as cases; those that take long are marked slow."
    def case(path):
        name = path.relative_to(NBS).with_suffix("").as_posix()
        return pytest.param(path, id=name, marks=[pytest.mark.slow] if name in LONG else [])
    return [case(path) for path in sorted(NBS.glob("*/*.ipynb"))
            if "raise NotImplementedError  # write it here" in path.read_text(encoding="utf-8")]


def missing(cells) -> list[str]:
    "What cells import of the package and it doesn't have."
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    sources = [re.sub(r"^(\s*)[%!](?:.*\\\n)*.*$", r"\1pass", source, flags=re.M) for source in code]
    found = []
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "specdec": continue
        try: module = import_module(node.module)
        except ModuleNotFoundError: found.append(node.module)
        else: found += [f"{node.module}.{name.name}" for name in node.names if not is_there(module, name.name)]
    return found


def is_there(module, name: str) -> bool:
    "Whether a module has it, as a name or as a module of its own."
    if name == "*" or hasattr(module, name): return True
    return hasattr(module, "__path__") and find_spec(f"{module.__name__}.{name}") is not None


def solve_notebook(notebook: Path, shell, monkeypatch) -> None:
    "Run one notebook, in its own folder, with its solutions; it has at least one."
    monkeypatch.chdir(notebook.parent)
    assert solve(nbformat.read(notebook, as_version=4).cells, shell) > 0
