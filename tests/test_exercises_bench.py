"""The notebooks of this track run with the solutions of their exercises, as in tests/test_exercises.py."""

import pytest

from helpers_notebooks import solve_notebook, to_run


@pytest.mark.parametrize("notebook", to_run("bench"))
def test_solutions_solve_their_exercises(notebook, shell, monkeypatch): solve_notebook(notebook, shell, monkeypatch)
