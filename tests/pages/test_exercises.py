"""Every exercise can be done: each numbered notebook, which nbdev_test leaves out, is run top to bottom with the folded
solution executed right after its stub, and then no check complains. A solution that is wrong, or missing, is noticed.
"""
import nbformat
import pytest

from helpers_notebooks import LONG, NBS, exercises, missing, solve, solve_notebook, to_run


@pytest.mark.parametrize("notebook", to_run())
def test_solutions_solve_their_exercises(notebook, shell, monkeypatch): solve_notebook(notebook, shell, monkeypatch)


def test_every_numbered_notebook_has_exercises_and_is_run():
    assert set(NBS.glob("*/[0-9]*.ipynb")) <= {case.values[0] for case in to_run()}


def test_the_tour_has_exercises():
    "So that a change of their form can't make the test above run nothing."
    assert len(exercises(nbformat.read(NBS / "path" / "00_tour.ipynb", as_version=4).cells)) >= 2


@pytest.mark.parametrize("name", sorted(LONG))
def test_one_that_takes_long_has_all_that_it_imports_and_whole_exercises(name):
    cells = nbformat.read(NBS / f"{name}.ipynb", as_version=4).cells
    assert missing(cells) == [] and len(exercises(cells)) > 0


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


def test_an_import_of_what_is_not_there_is_seen():
    cells = [CODE("from specdec.result import Round; from specdec.errors import Square"),
             CODE("%time 1 + 1\nfrom specdec import errors, nothing"),
             CODE("if 1:\n    !true || \\\n     true\n    from specdec.nowhere import x\nimport torch")]
    assert missing(cells) == ["specdec.errors.Square", "specdec.nothing", "specdec.nowhere"]


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
