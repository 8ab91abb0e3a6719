"""Break the verify rules and the loop on purpose, one small change at a time, and see whether the tests notice.

    python -m pip install "cosmic-ray>=8.4,<9"
    python tools/mutation.py --out nbs/data/mutation.json

Cosmic Ray makes the mutants; one operator is added to its own: taking a statement out. Each mutant runs in a fork of
this process, which has imported the heavy libraries once, and every processor core tries one at a time. The file is
written after every mutant, and a second call goes on where the first one stopped; what survived is tried again."""
import argparse
import ast
import gc
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
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
# For each module the test files that look at it, those that notice most first; a mutant goes through them until one
# fails.
TESTS = {
    "rejection": ["test_rejection", "test_proof", "test_speculative", "test_gallery", "test_lossless"],
    "requests": ["test_requests", "test_pairs"],
    "drafters/base": ["test_drafters_base", "test_speculative", "test_proof", "test_pairs", "test_lossless"],
    "speculative": ["test_speculative", "test_drafters_base", "test_proof", "test_gallery", "test_pairs",
                    "test_lossless"],
}
COMMAND = "python tools/mutation.py --out nbs/data/mutation.json"
# seconds of processor time; a mutant that keeps one test busy for longer hangs, and is caught (the slowest takes 10)
LIMIT = 40
OPERATORS = re.compile(
    r"core/(ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul)|NumberReplacer|AddNot|ReplaceTrueWithFalse|ReplaceFalseWithTrue"
    r"|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceBreakWithContinue|ReplaceContinueWithBreak|ZeroIterationForLoop|RemoveDecorator"
    r"|ReplaceUnaryOperator_Delete_USub|ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Lt_LtE|Lt_GtE|LtE_Lt|LtE_Gt|Gt_GtE|Gt_LtE|GtE_Gt|GtE_Lt"
    r"|Is_IsNot|IsNot_Is))$"
)  # each operator's opposite, and its edge


class DeleteStatement(Operator):
    "Take one statement out."
    def mutation_positions(self, node):
        if node.type == "simple_stmt" and node.children[0].type not in ("string", "import_name", "import_from"):
            yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        nothing = parso.parse("pass\n").children[0]
        nothing.get_first_leaf().prefix = node.get_first_leaf().prefix
        return nothing

    @classmethod
    def examples(cls):
        return ()


def operators():
    "Name and instance of each."
    for name in plugins.operator_names():
        if OPERATORS.match(name): yield name.removeprefix("core/"), plugins.get_operator(name)()
    yield "DeleteStatement", DeleteStatement()


def unread(code: str) -> list[tuple]:
    """Where code is not executed for what it does: annotations, docstrings, imports and the list of exports. Positions:
    (line, column) pairs."""
    found = []
    for node in ast.walk(ast.parse(code)):
        parts = (
            [node.annotation]
            if isinstance(node, (ast.arg, ast.AnnAssign))
            else [node.returns] if isinstance(node, ast.FunctionDef) else []
        )
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            or isinstance(node, (ast.Import, ast.ImportFrom))
        ):
            parts.append(node)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__": parts.append(node)
        if isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") == "Protocol" for base in node.bases):
            parts.append(node)
        found += [
            ((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset))
            for part in parts
            if part is not None
        ]
    return found


def mutants(module: str):
    "Every mutant of a module: what was changed, and the code."
    code = (ROOT / "specdec" / f"{module}.py").read_text()
    nowhere, seen = unread(code), {code}
    for name, operator in operators():
        positions = [position for node in ast_nodes(get_ast(code)) for position in operator.mutation_positions(node)]
        for occurrence, (start, _end) in enumerate(positions):
            if any(a <= start < b for a, b in nowhere): continue
            changed = mutate_code(code, operator, occurrence)
            if changed is None or changed in seen: continue
            seen.add(changed)
            lines = list(unified_diff(code.splitlines(), changed.splitlines(), n=0, lineterm=""))[3:]
            yield {
                "module": module, "operator": name, "line": start[0], "diff": lines,
                "id": sha256(changed.encode()).hexdigest()[:16],
            }, changed


def run_tests(module: str, code: str, test: str) -> str: # "survived", or the test that failed
    "Run a test file on a copy of the package with one module replaced, in a fork."
    folder = Path(tempfile.mkdtemp())
    try:
        shutil.copytree(ROOT / "specdec", folder / "specdec", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "specdec" / f"{module}.py").write_text(code)
        child = os.fork()
        if child == 0: _in_child(folder, test)
        status = os.waitpid(child, 0)[1]
        if os.waitstatus_to_exitcode(status) == 0: return "survived"
        return (folder / "failed").read_text() if (folder / "failed").exists() else "import"
    finally: shutil.rmtree(folder, ignore_errors=True)


def try_out(mutant: tuple) -> str: # what became of it: "survived", or the first test that failed
    "Run the test files on one of `mutants` until one fails."
    row, code = mutant
    outcomes = (run_tests(row["module"], code, test) for test in TESTS[row["module"]])
    return next((outcome for outcome in outcomes if outcome != "survived"), "survived")


def _in_child(folder: Path, test: str):
    import pytest
    from hypothesis import Phase, settings
    # a failure is enough: it needn't be made small
    settings.register_profile("mutation", phases=[Phase.explicit, Phase.generate], database=None)
    settings.load_profile("mutation")
    class Report:
        def pytest_runtest_logstart(self, nodeid):
            self.test = nodeid.split("::", 1)[-1]
            signal.setitimer(signal.ITIMER_PROF, LIMIT)
        def pytest_runtest_logreport(self, report):
            if report.failed: (folder / "failed").write_text(self.test)
        def hangs(self, *_):
            (folder / "failed").write_text(f"{self.test} (hangs)")
            os._exit(1)
    report = Report()
    signal.signal(signal.SIGPROF, report.hangs)
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    code = 1
    try:
        code = pytest.main(
            ["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", str(ROOT / "tests" / f"{test}.py")],
            plugins=[report],
        )
    finally:
        os._exit(int(code))


def summary(results: list[dict]) -> dict:
    "Score by module: caught of tried."
    def score(rows): return {"tried": len(rows), "caught": sum(row["outcome"] != "survived" for row in rows)}
    return {
        module: score([row for row in results if row["module"] == module])
        for module in dict.fromkeys(row["module"] for row in results)
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    import numpy  # noqa: F401  once, for all forks
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: F401
    gc.freeze()  # forks needn't look through what was imported
    earlier = json.loads(options.out.read_text())["mutants"] if options.out.exists() else []
    known = {row["id"]: row["outcome"] for row in earlier if row["outcome"] != "survived"}
    work = [pair for module in TESTS for pair in mutants(module)]
    unchanged = (ROOT / "specdec" / "rejection.py").read_text()
    for test in dict.fromkeys(test for tests in TESTS.values() for test in tests):
        if (failed := run_tests("rejection", unchanged, test)) != "survived":
            sys.exit(f"{test} fails without any mutant: {failed}")
    new = [mutant for mutant in work if mutant[0]["id"] not in known]
    with multiprocessing.get_context("fork").Pool() as pool:
        for (row, _), outcome in zip(new, tqdm(pool.imap(try_out, new), desc="mutants", total=len(new))):
            known[row["id"]] = outcome
            # in the order of the code
            results = [row | {"outcome": known[row["id"]]} for row, _ in work if row["id"] in known]
            options.out.write_text(
                json.dumps(
                    {"command": COMMAND, "made": len(work), "summary": summary(results), "mutants": results}, indent=1
                )
            )
    results = [row | {"outcome": known[row["id"]]} for row, _ in work]
    for module, score in summary(results).items():
        print(f"{module}: {score['caught']} of {score['tried']} mutants caught")
    for row in results:
        if row["outcome"] == "survived":
            print(f"\n{row['module']} line {row['line']}, {row['operator']}", *row["diff"], sep="\n  ")


if __name__ == "__main__": main()
