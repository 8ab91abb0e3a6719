"""Imports go one way: each module may use the layers before its own, and in its own layer what stands before it.

The order is DESIGN's; reading order (the folders of `nbs/`) is another matter. Imports inside of functions count."""
import ast
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.models import fetch

PACKAGE = Path(__file__).parents[1] / "specdec"
LAYERS = {  # layer → its modules, in order
    "minimal": ["minimal"],
    "core": ["errors", "core", "result"],
    "models": ["models", "kvcache", "protocol", "drafters.small"],
    "decoder": ["layouts", "checkpoint", "transformer", "adapter", "loading", "profiling"],
    "sampling": ["sampling", "autoregressive"],
    "rules": ["rejection", "lossless.rules", "lossless.block", "lossless.candidates", "logprobs"],
    "loop": ["drafters.base", "requests", "speculative", "device.ops"],
    "drafters": [
        "drafters.lookup", "drafters.skipping", "drafters.heads", "drafters.head_drafter", "drafters.published",
        "drafters.int4", "drafters.colder", "drafters.hybrid", "drafters.adaptive", "drafters.translation",
        "drafters.trees", "drafters.tree_hybrid", "batches", "device.drafters", "device.graphs", "device.loop", "gguf",
        "grammars",
    ],
    "lossless": [
        "lossless.enumerate", "lossless.torch_rng", "lossless.proof", "lossless.gallery", "lossless.check",
    ],
    "measures": ["speedup", "costs", "batch_costs"],
    "pairs": ["registry", "config", "pairs"],
    "training": [
        "train.data", "train.student", "train.loop", "train.export",
    ],
    "benchmarks": [
        "bench.alpha", "bench.prompts", "bench.methods", "bench.grid", "bench.run", "bench.peers", "bench.report",
    ],
    "applications": [
        "playground", "playground_server", "ollama", "doctor", "cli", "__main__",
    ],
}
FRONT = {"", "_modidx", "bench", "device", "drafters", "lossless", "playground", "train"}  # the packages themselves
TRAINING = "train."


def modules(package: Path) -> dict[str, Path]:
    "Every module of the package by its name from the package on; a sub-package has the name of its folder."
    names = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports(name: str, path: Path, known: set[str]) -> set[str]:
    "The package's modules that a module imports, at its top or anywhere inside."
    package = name.split(".")[:-1] if path.name != "__init__.py" else name.split(".") * bool(name)
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = ["specdec", *package[:len(package) - node.level + 1]] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            inside = {f"{base}.{alias.name}" for alias in node.names}  # a module, or a name in one
            found |= {name for name in inside if name.removeprefix("specdec.") in known} or {base}
    return {name.removeprefix("specdec.") for name in found if name.startswith("specdec.")} & known


def places() -> dict[str, tuple[int, int]]:
    "Module → its layer, and its place in it."
    return {name: (i, j) for i, names in enumerate(LAYERS.values()) for j, name in enumerate(names)}


def against_the_order(graph: dict[str, set[str]]) -> list[str]:
    "Each import that goes up, in words; and each module that has no place."
    place = places()
    unknown = [f"{name} has no layer" for name in sorted(graph.keys() - place.keys() - FRONT)]
    up = [f"{name} imports {other}" for name in sorted(graph.keys() & place.keys()) for other in sorted(graph[name])
          if other in place and place[other] >= place[name]]
    return unknown + up


@pytest.fixture(scope="module")
def graph():
    known = modules(PACKAGE)
    return {name: imports(name, path, set(known)) for name, path in known.items()}


def test_imports_go_one_way(graph):
    assert against_the_order(graph) == []


def test_every_name_in_the_order_is_a_module(graph):
    assert sorted(places().keys() - graph.keys()) == []


def test_nothing_that_decodes_imports_training(graph):
    "Not even through others: training, the command line and the benchmarks may."
    may = {"cli", "__main__", *(name for name in graph if name.startswith((TRAINING, "bench.")))}
    for name in sorted(graph.keys() - may):
        reached, to_do = set(), [name]
        while to_do:
            for other in graph[to_do.pop()] - reached:
                reached.add(other)
                to_do.append(other)
        assert not [other for other in reached if other.startswith(TRAINING)], f"{name} reaches the trainer"


def test_minimal_stands_alone(graph):
    assert graph.get("minimal") == set()


HEAVY = """import sys
def heavy(): return [name for name in ("pandas", "jinja2", "scipy") if name in sys.modules]
assert not heavy(), heavy()
assert not heavy(), heavy()
before = {name for name in sys.modules if name.startswith("specdec.bench")}
pair = specdec.load_pair("smollm2-head")
pair.generate([1, 2, 3], max_new_tokens=4)
# transformers' tokenizers import Jinja2 for their chat formats
assert heavy() in ([], ["jinja2"]), heavy()
assert {name for name in sys.modules if name.startswith("specdec.bench")} == before"""


def test_tables_reports_and_intervals_are_loaded_by_reports_only():
    fetch()
    done = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line, found", [
    ("from specdec.loop import speculate", "speculative"),
    ("from .speculative import speculate", "speculative"),
    ("from specdec import speculative", "speculative"),
    ("from . import speculative", "speculative"),
    ("import specdec.loop", "speculative"),
    ("def late():\n    from .pairs import Pair", "pairs"),
    ("import torch\nfrom fractions import Fraction", None),
], ids=["by its name", "relative", "from the package", "from here", "plain", "in a function", "others"])
def test_an_import_upwards_is_seen(line, found, tmp_path, graph):
    "The negative control: the same line in the core."
    path = tmp_path / "core.py"
    path.write_text(line, encoding="utf-8")
    wrong = against_the_order(graph | {"core": imports("core", path, set(graph))})
    assert ([f"core imports {found}"] if found else []) == [w for w in wrong if w.startswith("core ")]


def test_a_module_without_a_layer_is_seen(graph):
    assert "stray has no layer" in against_the_order(graph | {"stray": set()})


@pytest.mark.xfail(strict=True, reason="each reader of foreign data parses and checks by itself; one place comes with"
                                       " the redesign of records and configurations")
def test_data_from_outside_is_parsed_in_one_place():
    "JSON, YAML and TOML become checked values in one module, in the place of one for each reader."
    parsers = {("json", "loads"), ("json", "load"), ("yaml", "load"), ("yaml", "safe_load"), ("tomllib", "loads")}
    def parses(file):
        calls = (node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
        return any((getattr(f.value, "id", ""), f.attr) in parsers for f in calls if isinstance(f, ast.Attribute))
    assert sum(map(parses, PACKAGE.rglob("*.py"))) == 1
