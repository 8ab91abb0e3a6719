"""Break the verify rules and the loop on purpose, one small change at a time, and see whether the tests notice.

    python -m pip install "cosmic-ray>=8.4,<9"
    python tools/mutation.py --out nbs/data/mutation.json

Cosmic Ray makes the mutants; one operator is added to its own: taking a statement out. Each mutant runs in a fork of this process, which has
imported the heavy libraries once. The file is written after every mutant, and a second call goes on where the first one stopped; what survived is tried again."""
import argparse
import ast
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from difflib import unified_diff
from hashlib import sha256
from pathlib import Path

import parso
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
MODULES = ["rejection", "speculative"]
FAST = ["test_rejection", "test_proof", "test_gallery", "test_speculative"]  # in this order, up to the first failure
REST = ["test_pairs", "test_lossless", "test_rules", "test_conformance"]     # for what survives those
COMMAND = "python tools/mutation.py --out nbs/data/mutation.json"
PATIENCE = 5                                                                 # a mutant that takes so many times as long as none hangs, and is caught
SKIPPED = ("core/Variable", "core/ExceptionReplacer", "core/ReplaceUnaryOperator_Delete_Not")  # the last is AddNot once more


class DeleteStatement(Operator):
    "Take one statement out."
    def mutation_positions(self, node):
        if node.type == "simple_stmt" and node.children[0].type not in ("string", "import_name", "import_from"): yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        nothing = parso.parse("pass\n").children[0]
        nothing.get_first_leaf().prefix = node.get_first_leaf().prefix
        return nothing

    @classmethod
    def examples(cls): return ()


def operators():
    "Name and instance of each."
    for name in plugins.operator_names():
        if not name.startswith(SKIPPED): yield name.removeprefix("core/"), plugins.get_operator(name)()
    yield "DeleteStatement", DeleteStatement()


def unread(code: str) -> list[tuple]:
    "Where code is not executed for what it does: annotations, docstrings, imports and the list of exports. Positions: (line, column) pairs."
    found = []
    for node in ast.walk(ast.parse(code)):
        parts = [node.annotation] if isinstance(node, (ast.arg, ast.AnnAssign)) else [node.returns] if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) or isinstance(node, (ast.Import, ast.ImportFrom)): parts.append(node)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__": parts.append(node)
        if isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") == "Protocol" for base in node.bases): parts.append(node)
        found += [((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)) for part in parts if part is not None]
    return found


def mutants(module: str):
    "Every mutant of a module: what was changed, and the code."
    code = (ROOT / "specdec" / f"{module}.py").read_text()
    nowhere, seen = unread(code), {code}
    for name, operator in operators():
        positions = [position for node in ast_nodes(get_ast(code)) for position in operator.mutation_positions(node)]
        for occurrence, (start, end) in enumerate(positions):
            if any(a <= start < b for a, b in nowhere): continue
            changed = mutate_code(code, operator, occurrence)
            if changed is None or changed in seen: continue
            seen.add(changed)
            lines = [line for line in unified_diff(code.splitlines(), changed.splitlines(), n=0, lineterm="")][3:]
            yield {"module": module, "operator": name, "line": start[0], "diff": lines, "id": sha256(changed.encode()).hexdigest()[:16]}, changed


def run_tests(module: str, code: str, tests: list[str], limit: float) -> str: # "survived", "hangs" (limit is in seconds), or the test that failed
    "Run test files on a copy of the package with one module replaced, in a fork."
    folder = Path(tempfile.mkdtemp())
    try:
        shutil.copytree(ROOT / "specdec", folder / "specdec", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "specdec" / f"{module}.py").write_text(code)
        child = os.fork()
        if child == 0: _in_child(folder, tests)
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done: break
            time.sleep(0.05)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hangs"
        if os.waitstatus_to_exitcode(status) == 0: return "survived"
        report = folder / "failed"
        return report.read_text() if report.exists() else "import"
    finally: shutil.rmtree(folder, ignore_errors=True)


def _in_child(folder: Path, tests: list[str]):
    import pytest
    from hypothesis import Phase, settings
    settings.register_profile("mutation", phases=[Phase.explicit, Phase.generate], database=None)  # a failure is enough: it needn't be made small
    settings.load_profile("mutation")
    class Report:
        def pytest_runtest_logreport(self, report):
            if report.failed: (folder / "failed").write_text(report.nodeid.split("::", 1)[-1])
    os.setsid()
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    files = [str(ROOT / "tests" / f"{test}.py") for test in tests if (ROOT / "tests" / f"{test}.py").exists()]
    code = 1
    try: code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", *files], plugins=[Report()])
    finally: os._exit(int(code))


def summary(results: list[dict]) -> dict:
    "Score by module: caught of tried."
    def score(rows): return {"tried": len(rows), "caught": sum(row["outcome"] != "survived" for row in rows)}
    return {module: score([row for row in results if row["module"] == module]) for module in dict.fromkeys(row["module"] for row in results)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--modules", nargs="+", default=MODULES)
    options = parser.parse_args()
    import numpy, pytest, scipy.stats, torch, transformers, hypothesis  # noqa: F401  once, for all forks
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: F401
    gc.freeze()  # forks needn't look through what was imported
    earlier = json.loads(options.out.read_text())["mutants"] if options.out.exists() else []
    known = {row["id"]: row["outcome"] for row in earlier if row["outcome"] != "survived"}
    work = [pair for module in options.modules for pair in mutants(module)]
    unchanged, limits = (ROOT / "specdec" / "rejection.py").read_text(), []
    for tests in (FAST, REST):
        start = time.monotonic()
        if (failed := run_tests("rejection", unchanged, tests, 3600)) != "survived": sys.exit(f"The tests fail without any mutant: {failed}")
        limits.append(PATIENCE * (time.monotonic() - start))
    results = []
    for row, code in tqdm(work, desc="mutants"):
        outcome = known.get(row["id"]) or run_tests(row["module"], code, FAST, limits[0])
        if outcome == "survived": outcome = run_tests(row["module"], code, REST, limits[1])
        results.append(row | {"outcome": outcome})
        found = {"command": COMMAND, "summary": summary(results), "mutants": results + [old for old in earlier if old["id"] not in {row["id"] for row in results}]}
        if row["id"] not in known: options.out.write_text(json.dumps(found, indent=1))
    found["mutants"] = results
    options.out.write_text(json.dumps(found, indent=1))
    for module, score in found["summary"].items(): print(f"{module}: {score['caught']} of {score['tried']} mutants caught")
    for row in results:
        if row["outcome"] == "survived": print(f"\n{row['module']} line {row['line']}, {row['operator']}", *row["diff"], sep="\n  ")


if __name__ == "__main__": main()
