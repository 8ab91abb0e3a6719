"What `tools/mutation.py --check` says of a stored figure that isn't that of the code."
import copy
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

spec = spec_from_file_location("mutation", Path(__file__).parents[2] / "tools" / "mutation.py")
mutation = module_from_spec(spec)
spec.loader.exec_module(mutation)

CODE = '''"A module."
__all__ = ["half"]

def half(n: int, # a number
        ) -> float:
    "The half of it."
    return n / 2
'''


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
