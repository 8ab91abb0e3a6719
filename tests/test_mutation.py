"The stored mutation figure speaks of today's code, and the check can say no."
import copy
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

spec = spec_from_file_location("mutation", Path(__file__).parents[1] / "tools" / "mutation.py")
mutation = module_from_spec(spec)
spec.loader.exec_module(mutation)

CODE = '''"A module."
__all__ = ["half"]

def half(n: int, # a number
        ) -> float:
    "The half of it."
    return n / 2
'''


def test_the_stored_figure_speaks_of_this_code():
    assert mutation.problems(mutation.load(), {module: mutation.source(module) for module in mutation.TESTS}) == []


def test_the_modules_and_their_tests_are_there():
    for module, files in mutation.TESTS.items():
        assert mutation.source(module) and files
        for file in files: assert (mutation.ROOT / "tests" / f"test_{file}.py").exists()


@pytest.mark.parametrize("old, new", [
    ("# a number", "# any number at all"), ("The half of it", "Half"), ("n: int", "n: float"), (" -> float", ""),
    ('["half"]', "[]"), ('"A module."', '"Halves."\n# %% a cell'), ("n / 2", "(n\n            / 2)"),
    ('    "The half of it."\n', ""),
])
def test_prose_and_form_do_not_change_the_digest(old, new):
    assert old in CODE and mutation.digest(CODE.replace(old, new)) == mutation.digest(CODE)


@pytest.mark.parametrize("old, new", [
    ("n / 2", "n * 2"), ("n / 2", "n / 3"), ("n / 2", "n / 2.0"), ("return ", ""), ("n: int", "m: int"),
    ("half(", "halve("), ("def half", "@staticmethod\ndef half"), ("n: int", "n: int = 2"), ("n / 2", 'f"{n}"'),
])
def test_another_code_has_another_digest(old, new):
    assert old in CODE and mutation.digest(CODE.replace(old, new)) != mutation.digest(CODE)


def row(outcome: str, **more) -> dict:
    "A mutant of `CODE` in the stored file."
    diff = ["-    return n / 2", "+    return n * 2"]
    known = {"module": "half", "where": "half", "operator": "Div_Mul", "diff": diff, "id": "0"}
    return known | {"outcome": outcome} | more


STORED = {
    "modules": {"half": {"digest": mutation.digest(CODE), "made": 2, "tried": 2, "caught": 1}},
    "mutants": [row("test_half.py::test_half"), row("survived", reason="Nobody calls it.")],
}


@pytest.mark.parametrize("change, code, said", [
    (lambda stored: None, CODE, []),
    (lambda stored: None, CODE.replace("a number", "one"), []),
    (lambda stored: None, CODE.replace("2", "3"), ["specdec/half.py has changed since its mutants were tried"]),
    (lambda stored: stored["modules"].clear(), CODE, ["specdec/half.py: no mutant was tried"]),
    (lambda stored: stored["modules"]["half"].update(tried=1), CODE, ["specdec/half.py: 1 mutants of 2 were tried"]),
    (lambda stored: stored["modules"]["half"].update(made=200), CODE,
     [f"specdec/half.py: 2 mutants of {mutation.FEW} were tried"]),
    (lambda stored: stored["mutants"][1].pop("reason"), CODE,
     ["specdec/half.py, half: no test noticed '+    return n * 2'"]),
], ids=["as stored", "other words", "other code", "never tried", "some not tried", "too few", "a survivor"])
def test_the_check_says_what_is_wrong(change, code, said):
    stored = copy.deepcopy(STORED)
    change(stored)
    assert mutation.problems(stored, {"half": code}) == said


def test_results_of_a_module_take_the_place_of_its_old_ones(monkeypatch):
    monkeypatch.setattr(mutation, "TESTS", {"half": [], "other": []})
    other = mutation.merged(STORED, "other", "1", 9, [row("survived", module="other")])
    assert [mutant["module"] for mutant in other["mutants"]] == ["half", "half", "other"]
    assert other["modules"]["other"] == {"digest": "1", "made": 9, "tried": 1, "caught": 0}
    again = mutation.merged(other, "half", "2", 2, [row("import")])
    assert [mutant["module"] for mutant in again["mutants"]] == ["half", "other"]
    assert again["modules"]["half"] == {"digest": "2", "made": 2, "tried": 1, "caught": 1}


@pytest.mark.parametrize("line, name, lines", [
    (2, "", range(0)), (4, "half", range(4, 8)), (7, "half", range(4, 8)), (8, "A", range(8, 14)),
    (10, "A.b", range(10, 14)), (12, "A.b", range(10, 14)),
])
def test_a_mutant_is_named_by_the_function_it_is_in(line, name, lines):
    code = CODE + "@dataclass\nclass A:\n    @property\n    def b(self):\n        def c(): pass\n        return c\n"
    assert mutation.scope(code, line) == (name, lines)


def test_a_mutant_meets_the_fast_tests_that_call_its_function(monkeypatch):
    monkeypatch.setattr(mutation, "BUDGET", 3.0)
    tests = [mutation.Test("slow", 2.5, [4]), mutation.Test("fast", 1.0, [4]), mutation.Test("faster", .5, [4]),
             mutation.Test("other", .1, [20])]
    assert [test.id for test in mutation.chosen_for(range(4, 8), tests)] == ["fast", "faster"]
    # one that runs at import meets all
    assert [test.id for test in mutation.chosen_for(range(30, 31), tests)] == ["fast", "faster", "other"]
