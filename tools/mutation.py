"""Break what decodes on purpose, one small change at a time, and see whether the tests notice.

    python -m pip install "cosmic-ray>=8.4,<9"
    python tools/mutation.py           # tries what has not been tried yet, and writes nbs/data/mutation.json
    python tools/mutation.py --check   # fails if the file speaks of other code than today's; needs Python only

Cosmic Ray makes the mutants; one operator is added to its own: taking a statement out. Of each module a sample is
tried. A mutant meets the fast tests of its module that call the function it is in, in a fork of this process, which
has imported the heavy libraries once. The file is written after every mutant, and a second call goes on where the
first one stopped. Of each module it keeps a digest of the code, for which comments, docstrings, annotations and line
breaks don't count.

A survivor that changes nothing gets a `reason`, written into the file by hand: it is kept, and not tried again. Other
survivors are gaps in the tests: `--check` fails for them, and a second call tries them again."""
import argparse
import ast
import gc
import json
import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from difflib import unified_diff
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import process_time

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "nbs" / "data" / "mutation.json"
COMMAND = "python tools/mutation.py"
# For each module the test files that hold it, those that notice most for their time first.
TESTS = {
    "verify": ["rules", "block", "rejection", "acceptance"],
    "engine/block": ["block", "rules"],
    "engine/lossy": ["rules"],
    "engine/synthetic": ["acceptance"],
    "loop": ["requests", "speculative", "batches", "trees", "prefill"],
    "engine/request": ["requests", "speculative", "prefill"],
    "engine/prefix": ["prefill", "batches"],
    "engine/batch": ["batches", "prefill"],
    "cache": ["kvcache"],
    "drafters/base": ["drafters_base", "prefill", "speculative", "trees", "drafters_colder"],
    "models/batch": ["batches", "trees"],
    "device/ops": ["device_loop"],
}
# mutants of a module, at most; of the others, whose tests take longer, `FEW`
SAMPLES = {"verify": 80, "cache": 80, "engine/block": 30, "engine/lossy": 30}
FEW = 16
SLOWEST = 2.0   # seconds of a test, at most: slower ones are left out
VERY_FAST = .1  # seconds of a test that is asked before the others
BUDGET = 15.0   # seconds of all tests that one mutant meets, at most: the slowest are left out
MEMORY = 6 << 30  # bytes that a mutant may ask for beyond what there is
OPERATORS = re.compile(
    r"core/(ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul)|NumberReplacer|AddNot|ReplaceTrueWithFalse"
    r"|ReplaceFalseWithTrue|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceBreakWithContinue|ReplaceContinueWithBreak"
    r"|ZeroIterationForLoop|RemoveDecorator|ReplaceUnaryOperator_Delete_USub"
    r"|ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Lt_LtE|Lt_GtE|LtE_Lt|LtE_Gt|Gt_GtE|Gt_LtE|GtE_Gt|GtE_Lt"
    r"|Is_IsNot|IsNot_Is))$"
)  # each operator's opposite, and its edge


def sample_of(module: str, made: int) -> int:
    "How many of the mutants that can be made of a module are tried."
    return min(SAMPLES.get(module, FEW), made)


def source(module: str) -> str:
    "The code of a module."
    return (ROOT / "specdec" / f"{module}.py").read_text(encoding="utf-8")


# --- what a module does, whatever it looks like

def is_text(node) -> bool:
    "Whether it is a docstring."
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def is_exports(node) -> bool:
    "Whether it is the list of exports."
    return isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"


def behaviour(node) -> object:
    """A syntax tree as lists of what runs: without docstrings, annotations and the list of exports. Fields that are
    empty are left out, so that it is the same in every version of Python."""
    if isinstance(node, list): return [behaviour(part) for part in node if not (is_text(part) or is_exports(part))]
    if not isinstance(node, ast.AST): return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node)
              if name not in ("annotation", "returns", "kind") and value is not None and value != []]
    return [type(node).__name__, *([name, behaviour(value)] for name, value in fields)]


def digest(code: str) -> str:
    "The same for codes that do the same and differ in comments, docstrings, annotations or line breaks."
    return sha256(json.dumps(behaviour(ast.parse(code))).encode()).hexdigest()[:16]


# --- the stored file

def problems(stored: dict, modules: dict[str, str]) -> list[str]: # `modules`: name → code
    "What is wrong with the stored results, a line each: other code, too few mutants, survivors without a reason."
    found = []
    for module, code in modules.items():
        name, known = f"specdec/{module}.py", stored["modules"].get(module)
        if known is None: found.append(f"{name}: no mutant was tried")
        elif known["digest"] != digest(code): found.append(f"{name} has changed since its mutants were tried")
        elif known["tried"] < sample_of(module, known["made"]):
            found.append(f"{name}: {known['tried']} mutants of {sample_of(module, known['made'])} were tried")
    for row in stored["mutants"]:
        if row["outcome"] == "survived" and not row.get("reason"):
            found.append(f"specdec/{row['module']}.py, {row['where']}: no test noticed {row['diff'][-1]!r}")
    return found


def load() -> dict:
    "The stored file; an empty one if there is none."
    return json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {"modules": {}, "mutants": []}


def check() -> int: # exit code
    "Say what is wrong with the stored file."
    found = problems(load(), {module: source(module) for module in TESTS})
    for line in found: print(line)
    if found: print(f"The stored mutation figure is not that of this code: {COMMAND} (or make mutation).")
    return int(bool(found))


# --- mutants

class DeleteStatement:
    "An operator like Cosmic Ray's: take one statement out."
    def mutation_positions(self, node):
        if node.type == "simple_stmt" and node.children[0].type not in ("string", "import_name", "import_from"):
            yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        import parso
        nothing = parso.parse("pass\n").children[0]
        nothing.get_first_leaf().prefix = node.get_first_leaf().prefix
        return nothing


def operators() -> Iterator[tuple[str, object]]:
    "Name and instance of each."
    from cosmic_ray import plugins
    for name in plugins.operator_names():
        if OPERATORS.match(name): yield name.removeprefix("core/"), plugins.get_operator(name)()
    yield "DeleteStatement", DeleteStatement()


def is_protocol(node) -> bool:
    "Whether it is a class that says only which methods there are."
    return isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") == "Protocol" for base in node.bases)


def unread(code: str) -> list[tuple]:
    """Where code is not executed for what it does: annotations, docstrings, imports, protocols and the list of exports.
    Pairs of (line, column)."""
    found = []
    for node in ast.walk(ast.parse(code)):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, (ast.Import, ast.ImportFrom)) or is_text(node) or is_exports(node) or is_protocol(node):
            parts.append(node)
        found += [((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset))
                  for part in parts if part is not None]
    return found


def scope(code: str, line: int) -> tuple[str, range]:
    "The function (outside of functions the class, outside of classes nothing) that a line is in, and its lines."
    name, lines, nodes = "", range(0), ast.parse(code).body
    while True:
        around = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))
                  and min([node.lineno, *(d.lineno for d in node.decorator_list)]) <= line <= node.end_lineno]
        if not around: return name, lines
        node = around[0]
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        name, lines = f"{name}.{node.name}".strip("."), range(first, node.end_lineno + 1)
        if isinstance(node, ast.FunctionDef): return name, lines
        nodes = node.body


def mutants(module: str) -> list[tuple[dict, str, range]]:
    "Of a module all mutants: what was changed, the code, the lines of the function that it is in."
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    code = source(module)
    nowhere, seen, found = unread(code), {digest(code)}, []
    for name, operator in operators():
        positions = [position for node in ast_nodes(get_ast(code)) for position in operator.mutation_positions(node)]
        for occurrence, (start, _end) in enumerate(positions):
            if any(a <= start < b for a, b in nowhere): continue
            changed = mutate_code(code, operator, occurrence)
            if changed is None or digest(changed) in seen: continue
            seen.add(digest(changed))
            where, lines = scope(code, start[0])
            diff = list(unified_diff(code.splitlines(), changed.splitlines(), n=0, lineterm=""))[3:]
            row = {"module": module, "where": where, "operator": name, "diff": diff, "id": digest(changed)}
            found.append((row, changed, lines))
    return found


def sample(module: str, made: list) -> list:
    "Those of them that are tried, in their order; always the same."
    chosen = sorted(Random(0).sample(range(len(made)), sample_of(module, len(made))))
    return [made[i] for i in chosen]


# --- tests

@dataclass(frozen=True)
class Test:
    "A test of a module, as it is without a mutant."
    id: str
    seconds: float    # of processor time
    calls: list[int]  # first lines of the module's functions that it calls


class Plugin:
    "Watches pytest in a fork: which test fails or hangs, or what each calls."
    def __init__(self, folder: Path, module: str, tests: list[Test] | None): # None: all, and survey them
        self.folder, self.tests, self.found = folder, tests, []
        self.file = str(folder / "specdec" / f"{module}.py")
        self.seconds = {test.id: test.seconds for test in tests or ()}

    def say(self, what) -> None: (self.folder / "report").write_text(json.dumps(what))

    def pytest_collection(self):
        from hypothesis import Phase, settings
        # a failure is enough, it need not be made small; and the same examples every time
        settings.register_profile("mutation", settings.get_profile("ci"), database=None, derandomize=True,
                                  phases=[Phase.explicit, Phase.generate])
        settings.load_profile("mutation")
        # where imports are found is the copy with the mutant in it
        if not find_spec("specdec").origin.startswith(str(self.folder)): os._exit(99)

    def pytest_collection_modifyitems(self, items):
        if self.tests is None: return
        by_id = {item.nodeid: item for item in items}
        items[:] = [by_id[test.id] for test in self.tests]

    def pytest_runtest_logstart(self, nodeid):
        self.test, self.began, self.calls = nodeid, process_time(), set()
        if self.tests is None: sys.settrace(self.note_call)
        else: signal.setitimer(signal.ITIMER_PROF, 5 + 10 * self.seconds[nodeid])

    def note_call(self, frame, event, arg):
        if frame.f_code.co_filename == self.file: self.calls.add(frame.f_code.co_firstlineno)

    def pytest_runtest_logreport(self, report):
        if report.failed: self.say(self.test.rpartition("/")[2])
        elif self.tests is None and report.skipped: self.began = None

    def pytest_runtest_logfinish(self, nodeid):
        sys.settrace(None)
        if self.tests is None and self.began is not None:
            self.found.append(asdict(Test(nodeid, round(process_time() - self.began, 3), sorted(self.calls))))

    def hangs(self, *_):
        self.say(f"{self.test.rpartition('/')[2]} (hangs)")
        os._exit(1)

    def pytest_sessionfinish(self, exitstatus):
        if self.tests is None and exitstatus == 0: self.say(self.found)


def in_a_fork(module: str, code: str, files: list[str], tests: list[Test] | None) -> tuple[int, object]:
    "Run tests on a copy of the package with one module replaced: exit code, what the plugin says (None: nothing)."
    with TemporaryDirectory() as name:
        folder = Path(name).resolve()
        shutil.copytree(ROOT / "specdec", folder / "specdec", copy_function=os.symlink,
                        ignore=shutil.ignore_patterns(f"{Path(module).name}.*.pyc"))
        (folder / "specdec" / f"{module}.py").unlink()
        (folder / "specdec" / f"{module}.py").write_text(code, encoding="utf-8")
        child = os.fork()
        if child == 0: _in_child(folder, files, Plugin(folder, module, tests))
        status, report = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), folder / "report"
        return status, json.loads(report.read_text()) if report.exists() else None


def _in_child(folder: Path, files: list[str], plugin: Plugin):
    import pytest
    code = 1
    try:
        signal.signal(signal.SIGPROF, plugin.hangs)
        if plugin.tests is not None: signal.alarm(600)  # one that waits for ever
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(folder))
        os.chdir(folder)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)
        code = pytest.main(["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"),
                            *files], plugins=[plugin])
    finally:
        os._exit(int(code))


def test_file(name: str) -> Path:
    "Where a file of tests lies: in tests/ itself, or in one of its folders."
    return next((ROOT / "tests").glob(f"**/test_{name}.py"))


def survey(module: str) -> list[Test]:
    "The fast tests of a module, in the order in which a mutant meets them: the very fast ones first, each by file."
    found = []
    for file in TESTS[module]:
        status, report = in_a_fork(module, source(module), [str(test_file(file))], None)
        if status: sys.exit(f"{test_file(file)} fails without any mutant: {report}")
        rows = [Test(**row) for row in report]
        found += sorted((test for test in rows if test.seconds <= SLOWEST), key=lambda test: test.seconds)
    return sorted(found, key=lambda test: test.seconds > VERY_FAST)


def chosen_for(lines: range, tests: list[Test]) -> list[Test]:
    "The tests that call a function; where none does, as at import, all of them. The fastest of them, up to the budget."
    calling = [test for test in tests if any(line in lines for line in test.calls)] or tests
    cost, within = 0.0, set()
    for test in sorted(calling, key=lambda test: test.seconds):
        cost += test.seconds
        if cost <= BUDGET: within.add(test.id)
    return [test for test in calling if test.id in within]


def try_out(module: str, code: str, tests: list[Test]) -> str: # "survived", or the first test that failed
    "What becomes of a mutant."
    files = list(dict.fromkeys(str(ROOT / test.id.partition("::")[0]) for test in tests))
    status, report = in_a_fork(module, code, files, tests)
    if status == 99: sys.exit("The tests don't import the mutant: is another specdec in front of it?")
    if status == 0: return "survived"
    return str(report or ("import" if status > 0 else "ended"))


def key(row: dict) -> tuple:
    "What a mutant is, whatever else has changed in its module."
    return row["module"], row["where"], *row["diff"]


def run():
    "Try what has not been tried."
    # heavy ones, once for all forks
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401
    from tqdm import tqdm
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: F401
    gc.freeze()  # forks needn't look through what was imported
    stored = load()
    reasons = {key(row): row["reason"] for row in stored["mutants"] if row.get("reason")}
    for module in TESTS:
        code, made = source(module), mutants(module)
        chosen = sample(module, made)
        if stored["modules"].get(module, {}).get("digest") == digest(code):
            known = {row["id"]: row["outcome"] for row in stored["mutants"] if row["module"] == module}
        else: known = {}
        for row, _, _ in chosen:
            if key(row) in reasons: row["reason"] = reasons[key(row)]
            outcome = known.get(row["id"])
            if outcome and (outcome != "survived" or "reason" in row): row["outcome"] = outcome
        new = [mutant for mutant in chosen if "outcome" not in mutant[0]]
        tests = survey(module) if new else []
        for row, changed, lines in tqdm(new, desc=module):
            row["outcome"] = try_out(module, changed, chosen_for(lines, tests))
            done = [row for row, _, _ in chosen if "outcome" in row]
            for row in done:
                if row["outcome"] != "survived": row.pop("reason", None)
            stored = merged(stored, module, digest(code), len(made), done)
            save(stored)
    for row in stored["mutants"]:
        if row["outcome"] == "survived" and "reason" not in row:
            print(f"\n{row['module']}, {row['where']}, {row['operator']}", *row["diff"], sep="\n  ")


def merged(stored: dict, module: str, code: str, made: int, rows: list[dict]) -> dict:
    "The file with these results of a module, in place of those that it has; `code` is its digest."
    caught = sum(row["outcome"] != "survived" for row in rows)
    modules = stored["modules"] | {module: {"digest": code, "made": made, "tried": len(rows), "caught": caught}}
    modules = {name: modules[name] for name in TESTS if name in modules}
    of = {name: [row for row in stored["mutants"] if row["module"] == name] for name in modules} | {module: rows}
    return {"command": COMMAND, "modules": modules, "mutants": [row for name in modules for row in of[name]]}


def save(stored: dict):
    "Write the file, whole or not at all."
    partial = OUT.with_suffix(".partial")
    partial.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(OUT)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether the stored file speaks of this code")
    if parser.parse_args().check: sys.exit(check())
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}  # before torch is imported
    run()


if __name__ == "__main__": main()
