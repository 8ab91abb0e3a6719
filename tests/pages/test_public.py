"""What a module lists in `__all__` is what a user may use: each name says what it is, and the front page's are among
them. All other names are imported by name, never by a star."""
import ast
from pathlib import Path

import pytest

import specdec

PACKAGE = Path(__file__).parents[2] / "specdec"
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(PACKAGE.rglob("*.py")) if path.stem not in ("__init__", "_modidx")
}


def listed(tree: ast.Module) -> list[str]:
    "The names in `__all__`."
    found = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    return ast.literal_eval(found[0]) if found else []


def silent(tree: ast.Module) -> list[str]:
    "Listed functions and classes, and methods of these classes, that don't say what they do."
    kinds = (ast.FunctionDef, ast.ClassDef)
    public = [n for n in tree.body if isinstance(n, kinds) and n.name in listed(tree)]
    names = [n.name for n in public if not ast.get_docstring(n)]
    for n in public:
        if isinstance(n, ast.FunctionDef): continue
        methods = [m for m in n.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")]
        spoken = {m.name for m in methods if ast.get_docstring(m)}  # of overloads, one speaks
        names += [f"{n.name}.{m.name}" for m in methods if m.name not in spoken]
    return names


def stars(tree: ast.Module) -> list[str]:
    "Modules from which everything is imported."
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    return [str(n.module) for n in imports if any(alias.name == "*" for alias in n.names)]


@pytest.mark.parametrize("name", MODULES)
def test_public_names_say_what_they_are(name): assert silent(MODULES[name]) == []


@pytest.mark.parametrize("name", MODULES)
def test_nothing_is_imported_by_a_star(name): assert stars(MODULES[name]) == []


def test_names_of_the_front_are_public_at_home():
    for name in specdec.__all__:
        thing = getattr(specdec, name)
        assert name in listed(MODULES[thing.__module__.removeprefix("specdec.")])


def test_a_silent_name_and_a_star_are_seen():
    "The negative control."
    tree = ast.parse('__all__ = ["f", "C"]\nfrom os import *\ndef f(): ...\ndef g(): ...\nclass C:\n "Says it."\n'
                     " def _hidden(self): ...\n def method(self): ...\n")
    assert silent(tree) == ["f", "C.method"] and stars(tree) == ["os"]
