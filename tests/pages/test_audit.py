"""The audit: it installs what is published into a folder of its own, asks it in a process of its own, keeps what is
known, and says why where it has no verdict."""
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from setuptools import find_packages
from typer.testing import CliRunner

from audits import run as module
from audits.rules import no_verdict
from audits.run import AUDITED, audit, audit_row, in_order, kept_verdicts
from specdec.app.cli import app
from specdec.errors import InputError, ModelError

ROOT = Path(__file__).parents[2]
STORED = json.loads((ROOT / "nbs" / "data" / "audit.json").read_text(encoding="utf-8"))


def a_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    "A package, written into the folder."
    path, about = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        for place, text in files.items(): file.writestr(place, text)
        needs = "Requires-Dist: none\n"  # which is not installed
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    "A package index with one package, which can't be asked: it lacks the function."
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {"SPECDEC_HOME": tmp_path / "home", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": folder}.items():
        monkeypatch.setenv(name, str(value))
    code = {"dflash/__init__.py": "print('hello')\n", "dflash/model.py": "from .missing import _rejection_sample\n"}
    return a_wheel(folder, "dflash", "0.1.0", code)


def test_a_package_is_installed_once_and_asked_in_a_process_of_its_own(index, tmp_path):
    found, = audit("dflash")
    assert found["lossless"] is None and "dflash.missing" in found["raised"]
    home, = (tmp_path / "home" / "audit").iterdir()
    assert home.name.startswith("dflash-0.1.0-")
    index.unlink()
    assert module.installed(AUDITED["dflash"]) == home


def test_what_it_needs_is_installed_with_it_and_makes_another_folder(index):
    a_wheel(index.parent, "wanted", "2.0", {"wanted.py": "x = 1\n"})
    alone = module.installed(AUDITED["dflash"])
    both = module.installed(replace(AUDITED["dflash"], needs=("wanted==2.0",)))
    assert both != alone and (both / "wanted.py").exists() and not (alone / "wanted.py").exists()


def test_a_package_that_has_our_name_is_not_taken_for_ours(index, monkeypatch):
    "Ours is imported first; what the package is asked in has both."
    wheel = a_wheel(index.parent, "dflash", "9.0", {"specdec/__init__.py": "raise SystemExit('theirs')\n"})
    found = module.verdict_apart(replace(AUDITED["dflash"], version="9.0"))
    assert wheel.exists() and found["raised"] == "ModuleNotFoundError: No module named 'dflash'"


def test_a_package_that_cannot_be_had_is_said_and_leaves_nothing(index, tmp_path):
    found, = audit("tightwad")
    assert found["lossless"] is None and found["raised"].startswith("pip can't install tightwad==0.5.4: ")
    assert list((tmp_path / "home" / "audit").iterdir()) == []


ENDS = {"ends": ("import sys; sys.exit('no GPU here')", 60, "it ended the process that asked it: no GPU here"),
        "hangs": ("import time; time.sleep(60)", 1, "it did not answer within 1 s")}


@pytest.mark.parametrize("ask, seconds, why", ENDS.values(), ids=ENDS)
def test_a_package_that_gives_no_answer_is_said(monkeypatch, tmp_path, ask, seconds, why):
    monkeypatch.setattr(module, "installed", lambda each: tmp_path)
    monkeypatch.setattr(module, "_ASK", ask)
    found = module.verdict_apart(AUDITED["tightwad"], seconds=seconds)
    assert found["lossless"] is None and found["raised"] == why and found["name"] == "tightwad"


def test_a_package_that_ends_its_process_in_peace_has_no_verdict(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "installed", lambda each: tmp_path)
    for ask, why in {"pass": "silently", "import sys; open(sys.argv[4], 'w').write('{')": "can't be read"}.items():
        monkeypatch.setattr(module, "_ASK", ask)
        found = module.verdict_apart(AUDITED["tightwad"])
        assert found["lossless"] is None and why in found["raised"]


# What is left of an audit that is killed

def until(condition, what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(.05)


def living(processes) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_an_audit_that_is_killed_leaves_no_pip_and_its_folder_to_the_next(monkeypatch, tmp_path, number):
    "The index takes questions and never answers."
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        index = {"PIP_INDEX_URL": f"http://127.0.0.1:{port}/", "PIP_NO_INDEX": "", "PIP_FIND_LINKS": ""}
        code = "from audits.run import AUDITED, installed; installed(AUDITED['dflash'])"
        audited = subprocess.Popen([sys.executable, "-c", code], env=os.environ | index, cwd=ROOT)
        try:
            below = psutil.Process(audited.pid)
            until(lambda: any("pip" in p.cmdline() for p in below.children(recursive=True)[1:]), "pip")
            processes = below.children(recursive=True)
            audited.send_signal(number)
            audited.wait()
            until(lambda: not living(processes), "pip's end", 10)
        finally:
            audited.kill()
            for process in living(processes): process.kill()
    left = list((tmp_path / "home" / "audit").glob(".work-*"))
    assert len(left) == 2  # a folder and the lock beside it
    with module.work_folder() as folder:
        assert not any(path.exists() for path in left) and folder.is_dir()
        with module.work_folder(): assert folder.is_dir()  # whose owner lives
    assert list((tmp_path / "home" / "audit").iterdir()) == []


def test_what_takes_too_long_ends_with_all_that_it_started(tmp_path):
    child = "import subprocess, sys, time; open(sys.argv[1], 'w').write(str(subprocess.Popen(['sleep', '99']).pid))"
    note = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        module.run_below([sys.executable, "-c", f"{child}; time.sleep(99)", str(note)], 2)
    until(lambda: not psutil.pid_exists(int(note.read_text())) or not living([psutil.Process(int(note.read_text()))]),
          "what it started", 10)


def test_a_cache_that_is_a_file_is_said(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "file"))
    found, = audit("dflash")
    assert found["lossless"] is None and "can't be written" in found["raised"]


def test_a_package_is_asked_with_one_thread(monkeypatch, tmp_path):
    ask = "import os, sys; sys.exit(os.environ['OMP_NUM_THREADS'])"
    monkeypatch.setattr(module, "installed", lambda each: tmp_path)
    monkeypatch.setattr(module, "_ASK", ask)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert module.verdict_apart(AUDITED["tightwad"])["raised"].endswith(": 1")


def test_an_unknown_name_is_refused_before_anything_is_installed(monkeypatch):
    monkeypatch.setattr(module, "installed", lambda each: pytest.fail("installed"))
    with pytest.raises(InputError, match="'nobody'.*rotalabs-accel"): audit("dflash", "nobody")


# What is known already

@pytest.fixture
def asks(monkeypatch):
    "What is asked anew."
    asked = []
    def verdict_apart(each, run):
        asked.append((each.name, run))
        return each.about() | {"lossless": True, "run": run}
    monkeypatch.setattr(module, "verdict_apart", verdict_apart)
    return asked


def known(**changed) -> list[dict]: return [AUDITED["dflash"].about() | {"run": 0, "lossless": True} | changed]


def test_what_is_known_is_not_asked_again(asks):
    first = list(audit("dflash", "tightwad", runs=2))
    assert asks == [("dflash", 0), ("dflash", 1), ("tightwad", 0), ("tightwad", 1)]
    assert list(audit("tightwad", "dflash", runs=2, known=first)) == first[2:] + first[:2] and len(asks) == 4


STALE = {
    "no verdict": {"lossless": None}, "another version": {"version": "0.0.9"}, "other options": {"options": "K = 9"},
    "another run": {"run": 3}, "other needs": {"requirements": ["dflash==0.1.0", "x==1"]},
}


@pytest.mark.parametrize("changed", STALE.values(), ids=STALE)
def test_what_is_about_something_else_is_asked_again(asks, changed):
    list(audit("dflash", known=known(**changed)))
    assert asks == [("dflash", 0)]


def test_a_known_bad_verdict_is_explained_as_today(asks):
    about = AUDITED["tightwad"].about() | {"run": 0, "lossless": False, "does": "as it was said once"}
    found, = audit("tightwad", known=[about])
    assert found["does"] == AUDITED["tightwad"].does and not asks


# What is stored

def test_stored_verdicts_are_those_of_the_audit():
    assert [v["name"] for v in STORED["verdicts"]] == list(AUDITED)
    for found in STORED["verdicts"]:
        each = AUDITED[found["name"]]
        assert each.about().items() <= found.items() and found["lossless"] is not None
        explained = [found.get(part, "") for part in ("does", "mistake", "mend")]
        assert explained == [each.does, each.mistake, each.mend] and all(explained) == (not found["lossless"])


def test_wrong_ones_are_shown_again_within_a_minute():
    assert all(found["seconds"] < 60 for found in STORED["verdicts"] if not found["lossless"])


def accused(runs: dict[str, list[bool]]) -> list[str]:
    return [name for name, verdicts in runs.items() if not all(verdicts)]


def test_no_run_of_a_right_one_accuses_it():
    path = Path(__file__).parents[2] / "nbs" / "data" / "audit_runs.json"
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    right = {found["name"] for found in STORED["verdicts"] if found["lossless"]}
    assert set(runs) == right and all(len(verdicts) > 1 for verdicts in runs.values()) and not accused(runs)
    assert accused(runs | {"dflash": [True, False]}) == ["dflash"]


def test_what_says_that_it_is_lossy_is_not_accused():
    row = {"name": "a", "version": "1", "error": .1, "seconds": 1.}
    assert audit_row(row | {"lossless": False, "promises": True})[2] == "NOT LOSSLESS"
    assert audit_row(row | {"lossless": False, "promises": False})[2] == "lossy, as it says"


# The command

def run_cli(*words: str): return CliRunner().invoke(app, ["audit", *words], catch_exceptions=False)


def test_without_a_checkout_the_command_says_so_in_one_line(monkeypatch, tmp_path):
    "As after `pip install` of the wheel, which holds no audits."
    monkeypatch.setattr("specdec.__file__", str(tmp_path / "specdec" / "__init__.py"))
    done = run_cli("dflash")
    assert done.exit_code == 2 and done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1
    assert "not part of the installed package" in done.stderr and "python -m audits" in done.stderr


def test_the_wheel_has_no_audits():
    packages = re.search(r"packages=find_packages\(include=(\[.*?\])\)", (ROOT / "setup.py").read_text())
    found = find_packages(str(ROOT), include=json.loads(packages[1]))
    assert "specdec.lossless" in found and not [name for name in found if name.startswith("audits")]


def test_the_folder_is_a_command_too():
    done = subprocess.run([sys.executable, "-m", "audits", "nobody"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "expected rotalabs-accel" in done.stderr and done.stderr.count("\n") == 1


def test_the_command_prints_and_writes_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "verdict_apart", lambda each, run: next(
        found for found in STORED["verdicts"] if found["name"] == each.name))
    done = run_cli("dflash", "--json", "--out", str(tmp_path / "a.json"))
    report = json.loads(done.stdout)
    assert done.exit_code == 0 and report == json.loads((tmp_path / "a.json").read_text())
    assert report["command"] == "specdec audit" and [v["name"] for v in report["verdicts"]] == ["dflash"]
    assert done.stderr == "dflash: lossless\n"


def test_the_command_goes_on_where_it_was_ended(asks, tmp_path, monkeypatch):
    out = tmp_path / "a.json"
    answer = module.verdict_apart
    def ended(each, run):
        if each.name == "dflash": raise RuntimeError("ended")
        return answer(each, run) | {"error": 0.0, "seconds": 1.0}
    monkeypatch.setattr(module, "verdict_apart", ended)
    with pytest.raises(RuntimeError, match="ended"): run_cli("tightwad", "dflash", "--out", str(out))
    monkeypatch.setattr(module, "verdict_apart", lambda each, run: answer(each, run) | {"error": 0.0, "seconds": 1.0})
    run_cli("tightwad", "dflash", "--out", str(out))
    assert asks == [("tightwad", 0), ("dflash", 0)]
    assert [found["name"] for found in kept_verdicts(out)] == ["tightwad", "dflash"]


def test_no_verdict_is_a_failure_that_says_why(monkeypatch):
    monkeypatch.setattr(module, "verdict_apart", lambda each, run: (
        each.about() | no_verdict("it hid") | {"run": run, "seconds": 0.}))
    done = run_cli("dflash")
    assert done.exit_code == 2
    assert "dflash: no verdict (it hid)" in done.stderr and "no verdict on dflash" in done.stderr


def test_verdicts_stand_in_the_order_of_the_audit_and_the_last_counts():
    old, new = ({"name": "dflash", "run": 0, "error": error} for error in (1, 2))
    first = {"name": list(AUDITED)[0], "run": 0}
    assert in_order([old, {"name": "gone", "run": 0}, new, first]) == [first, new]


GOOD = {"name": "dflash", "version": "1", "promises": True, "lossless": True, "error": 0.0, "seconds": 1}
NO_FILES = {
    "a list": "[1]", "a number": '{"verdicts": 1}', "an object": '{"verdicts": {}}', "text": '{"verdicts": "abc"}',
    "no verdict": '{"verdicts": [1]}', "an empty one": '{"verdicts": [{}]}', "deep": "[" * 10**5,
    "cut": '{"verdicts": [',
    "digits": '{"verdicts": ' + "1" * 5000 + "}",
    **{f"{key} {value!r}": json.dumps({"verdicts": [GOOD | {key: value}]})
       for key, value in {"name": ["a"], "lossless": "yes", "error": "0.1", "seconds": None, "run": [], "version": 1,
                          "promises": 1, "raised": {}}.items()},
    "infinite": json.dumps({"verdicts": [GOOD | {"error": float("inf")}]}),
}


@pytest.mark.parametrize("text", NO_FILES.values(), ids=NO_FILES)
def test_a_file_with_other_things_is_refused_in_a_line(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    done = run_cli("dflash", "--out", str(tmp_path / "a.json"))
    assert done.exit_code == 2 and done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1
    assert "can't be read" in done.stderr and (tmp_path / "a.json").read_text() == text


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
                    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
                    max_leaves=5)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(found=JSON | st.builds(
    lambda key, value: {"verdicts": [GOOD | {key: value}]}, st.sampled_from(list(GOOD)), JSON))
def test_any_file_is_read_or_refused(tmp_path, found):
    (tmp_path / "a.json").write_text(json.dumps(found))
    try: verdicts = kept_verdicts(tmp_path / "a.json")
    except ModelError as error:
        assert len(str(error).splitlines()) == 1
        return
    for verdict in in_order(verdicts): assert len(audit_row(verdict)) == 5


def test_a_file_that_holds_no_verdicts_is_refused(tmp_path):
    assert kept_verdicts(tmp_path / "none.json") == []
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ModelError, match="a.json can't be read"): kept_verdicts(tmp_path / "a.json")


@pytest.mark.parametrize("held", [
    {"verdicts": [1, 2]}, {"verdicts": []}, {"command": "specdec audit", "verdicts": {}},
    {"command": "another program", "verdicts": []}, {"command": "specdec audit", "verdicts": [{"name": "a"}]},
    {"command": "specdec audit", "verdicts": [], "notes": "mine"},
], ids=str)
def test_a_file_of_another_program_is_refused_and_left_as_it_is(held, tmp_path, monkeypatch):
    "Before anything is asked."
    monkeypatch.setattr(module, "verdict_apart", lambda each, run: pytest.fail("asked"))
    file = tmp_path / "a.json"
    file.write_text(json.dumps(held))
    done = run_cli("dflash", "--out", str(file))
    assert done.exit_code == 2 and "a.json can't be read" in done.stderr and json.loads(file.read_text()) == held


@pytest.mark.parametrize("where", ["none/a.json", "."])
def test_where_no_verdict_can_be_written_nothing_is_asked(where, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "verdict_apart", lambda each, run: pytest.fail("asked"))
    assert run_cli("dflash", "--out", str(tmp_path / where)).exit_code == 2


def test_the_verdicts_that_were_published_are_read_back():
    path = Path(__file__).parents[2] / "nbs" / "data" / "audit.json"
    assert kept_verdicts(path) == STORED["verdicts"]
