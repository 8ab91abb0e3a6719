"What `make test` leaves to `make test-all`: combinations, never a value."
import os
import re
import subprocess
import sys
from pathlib import Path

CASES = """
import pytest

@pytest.fixture(params=["x", "y"])
def place(request): return request.param

@pytest.mark.parametrize("a, b", [(1, 2), (2, 3), (3, 4)])
@pytest.mark.parametrize("c", ["u", "v"])
def test_product(a, b, c): pass

@pytest.mark.parametrize("a", range(3))
def test_alone(a): pass

@pytest.mark.parametrize("a", range(3))
def test_with_a_fixture(a, place): pass

@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("c", ["u", "v"])
def test_slow_ones_stand_for_nothing(a, c): pass
"""


def test_each_value_keeps_a_case(tmp_path):
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: x\n")
    def collected(*chosen):
        command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "--collect-only", "-q"]
        done = subprocess.run([*command, *chosen, str(tmp_path)], capture_output=True, text=True, check=True,
                              cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)})
        return re.findall(r"::(\w+)\[(.*)\]", done.stdout)
    def cases(found, name): return [values.split("-") for test, values in found if test == name]
    few, every = collected("-m", "not slow"), collected()
    for name, number, all_of_them in [("test_product", 4, 6), ("test_with_a_fixture", 4, 6), ("test_alone", 3, 3)]:
        kept, there = cases(few, name), cases(every, name)
        assert len(there) == all_of_them and len(kept) <= number
        assert {value for case in kept for value in case} == {value for case in there for value in case}
    assert cases(few, "test_slow_ones_stand_for_nothing") == [["u", "1"], ["v", "1"]]
