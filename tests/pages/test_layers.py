"""Imports go one way: the contracts in pyproject.toml, which import-linter holds (`lint-imports`; `make check-code`).

The order is that of the package; reading order (the folders of `nbs/`) is another matter. Imports inside of functions
count, those for type checkers only don't."""
import ast
import os
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import grimp
import pytest
from importlinter.api import read_configuration

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "specdec"


def contracts() -> dict[str, dict]:
    "The contracts of the package, by name."
    read = read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]
    return {contract["name"]: contract for contract in read}


def layers() -> list[list[str]]:
    "The order: the highest layer first."
    return [[name.strip() for name in layer.split("|")] for layer in contracts()["imports go one way"]["layers"]]


def lint(root: Path) -> tuple[int, str]:
    "What import-linter says of the package in a folder: its exit status, and its words in one line."
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", root / "pyproject.toml"]
    environment = os.environ | {"PYTHONPATH": str(root), "COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph("specdec", cache_dir=None, exclude_type_checking_imports=True)


@pytest.fixture
def copy(tmp_path):
    "The package's code and its contracts, to break."
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(PACKAGE, tmp_path / "specdec", ignore=lambda folder, names: [
        name for name in names if not (Path(folder, name).is_dir() or name.endswith(".py")) or name == "__pycache__"])
    return tmp_path


def test_every_module_has_its_place(graph):
    "The packages themselves are empty; what they hold has a place."
    placed = {f"specdec.{name}" for layer in layers() for name in layer}
    assert placed == {name for name in graph.modules if not graph.find_children(name) and name != "specdec._modidx"}


def test_the_picture_of_the_layers_is_the_contract():
    "nbs/images/map.svg, on the front page."
    spec = spec_from_file_location("pictures", ROOT / "tools" / "pictures.py")
    pictures = module_from_spec(spec)
    spec.loader.exec_module(pictures)
    drawn = [module for modules in pictures.layers().values() for module in modules]
    assert drawn == [name for layer in reversed(layers()) for name in reversed(layer)]
    stored = (ROOT / "nbs" / "images" / "map.svg").read_text(encoding="utf-8")
    assert stored == pictures.draw_map(pictures.layers()), "run python tools/pictures.py map"


def test_packages_are_empty(graph):
    folders = [name for name in graph.modules if graph.find_children(name) and name != "specdec"]
    assert folders and not [name for name in folders if graph.find_modules_directly_imported_by(name)]


def test_minimal_stands_alone(graph):
    assert graph.find_modules_directly_imported_by("specdec.minimal") == set()


SPELLINGS = {  # how a module may be imported; each in a module of its own
    "by its name": "from specdec.pair import Pair",
    "relative": "from {dots}pair import Pair",
    "from the package": "from specdec import pair",
    "from here": "from {dots} import pair",
    "plain": "import specdec.pair",
    "in a function": "def late():\n    from {dots}pair import Pair",
}


def test_an_import_upwards_is_seen(copy):
    "The negative control: the pair, imported by modules below it in every spelling; and what is no import of ours."
    order = layers()
    below = [name for layer in order[[("pair" in layer) for layer in order].index(True) + 1:] for name in layer]
    below = [name for name in below if name != "minimal"][-len(SPELLINGS) - 1:]
    for name, line in zip(below, [*SPELLINGS.values(), "import torch\nfrom fractions import Fraction"], strict=True):
        path = copy.joinpath("specdec", *name.split(".")).with_suffix(".py")
        line = line.format(dots="." * (1 + name.count(".")))
        path.write_text(f"{path.read_text(encoding='utf-8')}\n{line}\n", encoding="utf-8")
    status, said = lint(copy)
    seen = [f"specdec.{name} -> specdec.pair (l." in said for name in below]
    assert status == 1 and seen == [True] * len(SPELLINGS) + [False]


@pytest.mark.parametrize("module, imported, contract", [
    ("minimal", "sampling", "imports go one way"),
    ("loop", "lossless.proof", "nothing that decodes imports the proofs, the training or the benchmarks"),
    ("app.doctor", "train.data", "only the command line and the benchmarks import the training"),
])
def test_what_must_not_be_imported_is_seen(module, imported, contract, copy):
    "Negative controls of the contracts, each broken by one line."
    path = copy.joinpath("specdec", *module.split(".")).with_suffix(".py")
    path.write_text(f"{path.read_text(encoding='utf-8')}\nimport specdec.{imported}\n", encoding="utf-8")
    status, said = lint(copy)
    assert status == 1 and f"{contract} BROKEN" in said


def test_a_module_without_a_place_is_seen(graph):
    graph.add_module("specdec.stray")
    try:
        with pytest.raises(AssertionError): test_every_module_has_its_place(graph)
    finally: graph.remove_module("specdec.stray")


PARSERS = {  # what makes values of text
    "json": {"load", "loads", "JSONDecoder"}, "yaml": {"load", "safe_load", "load_all", "SafeLoader", "Loader"},
    "tomllib": {"load", "loads"}, "tomli": {"load", "loads"}, "ast": {"literal_eval"},
    "pickle": {"load", "loads", "Unpickler"},
}


def parses(code: str) -> bool:
    "Whether a module turns JSON, YAML, TOML or Python's own text into values by itself."
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and node.attr in PARSERS.get(getattr(node.value, "id", ""), ()): return True
        if isinstance(node, ast.ImportFrom) and PARSERS.get(node.module or "", set()) & {a.name for a in node.names}:
            return True
    return False


def test_data_from_outside_is_parsed_in_one_place():
    """JSON, YAML and TOML become checked values in `files`; pydantic's models, which check as they parse, may do it
    too. `sandbox` speaks JSON with a process of its own."""
    found = {file.name for file in PACKAGE.rglob("*.py") if parses(file.read_text(encoding="utf-8"))}
    assert found == {"files.py", "sandbox.py"}


@pytest.mark.parametrize("code", ["import json\njson.loads(text)", "from json import loads", "yaml.safe_load(text)",
                                  "map(json.loads, lines)", "import tomllib\ntomllib.load(file)"])
def test_another_parser_is_seen(code): assert parses(code)
