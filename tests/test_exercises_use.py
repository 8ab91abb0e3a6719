"""The notebooks of this track run with the solutions of their exercises, as in tests/test_exercises.py."""

import pytest

from helpers_notebooks import having_stubs, solve_notebook


@pytest.mark.parametrize("notebook", having_stubs("use"), ids=lambda path: path.stem)
def test_solutions_solve_their_exercises(notebook, shell, monkeypatch): solve_notebook(notebook, shell, monkeypatch)
