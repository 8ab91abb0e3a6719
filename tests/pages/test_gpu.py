"""The script for a GPU: its parts in small on a CPU, the watch over its worker, what it carries, what pages say."""
import json
import sys
import tarfile
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
import torch

from helpers_cuda import FakeCuda
from specdec.bench.report import gpu_lines

TOOLS = Path(__file__).parents[2] / "tools"


def tool(name):
    spec = spec_from_file_location(f"tools_{name}", TOOLS / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu, parts = tool("gpu"), tool("gpu_parts")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    "A CPU, in small; the default model isn't there, so a tiny random one takes its place."
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr("specdec.models.hub.installed_gguf", lambda: None)
    return parts.Machine(torch.device("cpu"), True, time.time() + 60)


def run(name, machine):
    part = (parts.FIRST | parts.SECOND)[name]
    return json.loads(json.dumps(part.run(parts.Default(machine) if part.of_default else machine)))


ELSEWHERE = {"cuda tests", "default, trace", "default, transformers compiled", "default, int4"}

@pytest.mark.parametrize("name", [name for name in parts.FIRST | parts.SECOND if name not in ELSEWHERE])
def test_a_part_runs_in_small(machine, name):
    found = run(name, machine)
    if name == "loops agree": assert found["all_as_expected"] and len(found["drafters"]) == 8
    if name == "law": assert not found["alarms"]
    if name == "default, tokens":
        assert not [method for method in found["methods"].values() if "failed" in method]
        assert found["device_over_host"]["head, temperature 1"] > 0 and found["weights"].startswith("random")
    if name in ("8B, bf16", "1B, int4"): assert found["S"]["block"]["0.8"]["S"] > 0 and found["v"].keys() == {"1", "4"}


@pytest.mark.parametrize("name", ["default, trace", "default, transformers compiled", "default, int4"])
def test_what_has_no_meaning_here_says_why(machine, name):
    with pytest.raises(parts.Skipped, match="needs"): run(name, machine)


def test_the_captured_forms_are_right(machine, monkeypatch):
    "With a double in the place of CUDA: what a GPU forbids inside a recording raises."
    fake = FakeCuda().install(monkeypatch)
    found = parts.agree(machine)
    assert found["all_as_expected"] and all(f["captured"] for f in found["drafters"].values())
    before = len(fake.graphs)
    assert parts.shape(machine, "8B", 16)["S"]["head"] and len(fake.graphs) > before
    class Gpu(parts.Machine): on_gpu = True
    table = parts.batches(Gpu(torch.device("cpu"), True, 0), "8B")["forward_ms"]
    assert table.keys() == {"step by step", "captured"}


def test_the_laws_test_is_not_blind(machine, monkeypatch):
    "With enough texts temperature 2 is told from 1, and the right law raises no alarm."
    every = parts.some_drafters
    monkeypatch.setattr(parts, "some_drafters", lambda target, head: dict(head=every(target, head)["head"]))
    machine.small, machine.until = False, time.time() + 6
    found = parts.law(machine)
    assert not found["alarms"] and not found["blind"] and found["drafters"]["head"]["texts"] > 100


def test_a_failure_is_written_and_the_next_part_runs(tmp_path, monkeypatch, capsys):
    def fails(machine): raise ValueError("broken here")
    def skips(machine): raise parts.Skipped("needs a GPU")
    def lost(machine): raise RuntimeError("CUDA error: an illegal memory access was encountered")
    table = {"bad": fails, "none": skips, "long": lambda machine: 1, "lost": lost, "good": lambda machine: dict(x=1)}
    monkeypatch.setattr(parts, "FIRST", {
        name: parts.Part(run, 1000 if name == "long" else 1) for name, run in table.items()})
    out, now = tmp_path / "gpu.json", time.time()
    options = SimpleNamespace(part="first", out=out, only="", call="a", deadline=now + 60, device="cpu", small=False)
    assert parts.work(options) == 75  # another process has to go on
    assert parts.work(options) == 0
    found = json.loads(out.read_text())["parts"]
    assert "Traceback" in found["bad"]["failed"] and "broken here" in found["bad"]["failed"]
    assert found["none"]["skipped"] == "needs a GPU" and "were left" in found["long"]["skipped"]
    assert "illegal memory" in found["lost"]["failed"] and found["good"]["result"] == dict(x=1)
    assert "part bad: failed, ValueError: broken here" in capsys.readouterr().out
    table["bad"] = lambda machine: 2
    monkeypatch.setattr(parts, "FIRST", {"bad": parts.Part(table["bad"], 1), "good": parts.Part(fails, 1)})
    options.call = "b"  # a later call: what failed is tried again, what is there stays
    parts.work(options)
    found = json.loads(out.read_text())["parts"]
    assert found["bad"]["result"] == 2 and found["good"]["result"] == dict(x=1)


WORKER = '''
import json, os, sys, time
from pathlib import Path
out, call = Path(sys.argv[3]), sys.argv[5]
record = json.loads(out.read_text()) if out.exists() else dict(parts={})
def write(found): # at once, as the real one does
    out.with_suffix(".new").write_text(json.dumps(found))
    out.with_suffix(".new").replace(out)
for name in ("crash", "hang", "good"):
    if name in record["parts"]: continue
    running = dict(name=name, since=time.time(), until=time.time() + .3, call=call)
    write(record | dict(running=running))
    if name == "crash":
        print("the last words", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "hang": time.sleep(60)
    record["parts"][name] = dict(result=1, call=call)
    write(record)
'''

def test_a_worker_that_crashes_or_hangs_is_replaced(tmp_path, monkeypatch):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "gpu_parts.py").write_text(WORKER)
    for name in ("ROOT", "WHEELS", "SITE"): monkeypatch.setattr(gpu, name, tmp_path / ("" if name == "ROOT" else name))
    out = tmp_path / "gpu.json"
    start = time.time()
    assert gpu.main(["first", "--out", str(out)]) == 0 and time.time() - start < 20
    record = json.loads(out.read_text())
    assert "ended with 3" in record["parts"]["crash"]["failed"] and "last words" in record["parts"]["crash"]["failed"]
    assert "stopped after" in record["parts"]["hang"]["failed"] and record["parts"]["good"]["result"] == 1
    assert "running" not in record


def test_a_worker_that_cannot_start_says_why(tmp_path, monkeypatch, capsys):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "gpu_parts.py").write_text("import no_such_module")
    for name in ("ROOT", "WHEELS", "SITE"): monkeypatch.setattr(gpu, name, tmp_path / ("" if name == "ROOT" else name))
    assert gpu.main(["first", "--out", str(tmp_path / "gpu.json")]) == 1
    assert "no_such_module" in capsys.readouterr().out


def test_wheels_are_unpacked_whole_or_it_says_why_not(tmp_path, monkeypatch, capfd):
    "What an install that failed or was stopped left behind isn't taken for the packages."
    for name in ("WHEELS", "SITE", "HOME"): monkeypatch.setattr(gpu, name, tmp_path / name)
    gpu.WHEELS.mkdir()
    wheel = gpu.WHEELS / "not_to_be_had-1-py3-none-any.whl"
    wheel.write_bytes(b"torn")
    (left := tmp_path / "SITE.new").mkdir()
    (left / "half").write_text("")
    with pytest.raises(SystemExit, match="for Python 3.12 on x86-64 Linux, and .* is Python 3"): gpu.prepare()
    assert not gpu.SITE.exists()
    with ZipFile(wheel, "w") as inside:
        inside.writestr("not_to_be_had.py", "x = 1")
        inside.writestr("not_to_be_had-1.dist-info/WHEEL",
                        "Wheel-Version: 1.0\nGenerator: us\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        inside.writestr("not_to_be_had-1.dist-info/METADATA",
                        "Metadata-Version: 2.1\nName: not_to_be_had\nVersion: 1\n")
        inside.writestr("not_to_be_had-1.dist-info/RECORD", "")
    assert str(gpu.SITE) in gpu.prepare()["PYTHONPATH"]
    assert (gpu.SITE / "not_to_be_had.py").exists() and not (gpu.SITE / "half").exists() and not left.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="stands in for programs by shell scripts")
def test_the_rehearsal_finds_a_python_that_runs(tmp_path, monkeypatch, capsys):
    "pyenv's command may refuse to run, though pyenv has that Python."
    monkeypatch.syspath_prepend(str(TOOLS))
    rehearsal = tool("gpu_rehearsal")
    def program(path, said):
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{said}\n")
        path.chmod(0o755)
        return str(path)
    program(tmp_path / "bin" / "python3.12", "exit 127")
    program(tmp_path / ".pyenv/versions/3.12.0/bin/python", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["gpu_rehearsal.py", "--folder", str(tmp_path / "new")])
    with pytest.raises(SystemExit, match="python3.12 isn't a Python 3.12 that runs.* --python /path"): rehearsal.main()
    works = program(tmp_path / ".pyenv/versions/3.12.1/bin/python", "echo 3.12")
    assert rehearsal.python_312() == works


def test_only_what_the_machine_lacks_is_carried():
    has = {"torch": "2.11.0", "typing-extensions": "", "numpy": "1.0"}
    wanted = ["torch>=2.11,<2.14", "Typing_Extensions>=4", "gguf>=0.17", "numpy>=2", "tomli>=2;python_version<'3.11'",
              "x; extra == 'all'"]
    assert gpu.lacking(wanted, has) == ["gguf>=0.17", "numpy>=2"]
    listed = gpu.there()
    assert listed["torch"].startswith("2.") and not listed.keys() & {"pydantic", "gguf", "platformdirs"}


def test_the_parts_make_the_archive(tmp_path, monkeypatch, capsys):
    def download_missing(folder):
        (folder / "a-1-py3-none-any.whl").write_bytes(b"x" * 100)
        return ["a"]
    monkeypatch.setattr(gpu, "download_missing", download_missing)
    monkeypatch.setattr(gpu, "CARRIED", ("tools/gpu.py", "tests/data", "settings.ini"))
    monkeypatch.setattr(gpu, "PART", 10_000)
    assert gpu.main(["carry", str(tmp_path / "parts")]) == 0
    found = sorted((tmp_path / "parts").glob("*/part"), key=lambda part: int(part.parent.name))
    assert len(found) > 1 and all(part.stat().st_size <= 10_000 for part in found)
    archive = tmp_path / "all.tar.gz"
    archive.write_bytes(b"".join(part.read_bytes() for part in found))
    with tarfile.open(archive) as tar: names = tar.getnames()
    assert {"tools/gpu.py", "settings.ini", "wheels/a-1-py3-none-any.whl"} <= set(names)
    with pytest.raises(SystemExit, match="isn't empty"): gpu.main(["carry", str(tmp_path / "parts")])


def test_records_are_merged(tmp_path):
    a, b, out = (tmp_path / f"{name}.json" for name in "abc")
    a.write_text(json.dumps(dict(parts=dict(x=dict(result=1), y=dict(failed="no"), z=dict(result=2)))))
    b.write_text(json.dumps(dict(parts=dict(x=dict(skipped="late"), y=dict(result=3), z=dict(result=4)))))
    gpu.main(["merge", str(a), str(b), "--out", str(out)])
    assert json.loads(out.read_text())["parts"] == dict(x=dict(result=1), y=dict(result=3), z=dict(result=4))
    b.write_text("{}")
    with pytest.raises(SystemExit, match="no record"): gpu.main(["merge", str(a), str(b), "--out", str(out)])


MEASURED = dict(parts={
    "machine": dict(result=dict(name="A GPU")), "8B, batches": dict(failed="why"),
    "default, tokens": dict(result=dict(
        methods={"device, plain, temperature 0": dict(tokens_per_second=dict(median=400.4, low=399.0, high=402.0)),
                 "device, head, temperature 0": dict(tokens_per_second=dict(median=812.4, low=790.0, high=820.0)),
                 "device, tree, temperature 0": dict(tokens_per_second=dict(median=600.6, low=590.0, high=620.0)),
                 "broken": dict(failed="why")},
        over_plain={"device, plain, temperature 0": 1.0, "device, tree, temperature 0": 1.5,
                    "device, head, temperature 0": 2.029, "device, head, temperature 1": None})),
    "default, waits": dict(result=dict(head=dict(per_round=1.0))),
    "1B, batches": dict(result=dict(pays_up_to=dict(captured={"0.8": 16})))})


def test_pages_say_what_was_measured_or_that_nothing_was(tmp_path):
    file = tmp_path / "gpu.json"
    for about in ("best", "tokens", "waits", "batches"):
        assert gpu_lines(file, about).startswith("No GPU has run this yet")
    file.write_text(json.dumps(MEASURED))
    assert "812 tokens/s (790 to 820)" in gpu_lines(file, "tokens") and "broken" not in gpu_lines(file, "tokens")
    assert "1.00 synchronisations a round" in gpu_lines(file, "waits")
    assert gpu_lines(file, "batches").splitlines() == [
        "Measured on A GPU:", "1B       α = 0.8: drafts that cost nothing pay up to B = 16"]


@pytest.mark.parametrize("measured", [True, False])
def test_the_front_page_says_what_was_measured_or_that_nothing_was(tmp_path, shell, monkeypatch, measured):
    pages = TOOLS.parent / "nbs"
    (tmp_path / "data").mkdir()
    for file in (pages / "data").glob("*.json"): (tmp_path / "data" / file.name).symlink_to(file)
    (tmp_path / "data" / "gpu.json").unlink(missing_ok=True)
    if measured: (tmp_path / "data" / "gpu.json").write_text(json.dumps(MEASURED))
    monkeypatch.chdir(tmp_path)
    cells = ["".join(cell["source"]) for cell in json.loads((pages / "index.ipynb").read_text("utf-8"))["cells"]]
    reading, = (at for at, source in enumerate(cells) if "data/gpu.json" in source)
    for source in [source for source in cells if "\nimport json\n" in source] + cells[reading:reading + 1]:
        found = shell.run(source)
        assert shell.exc is None, shell.exc
    text, nothing = "".join(found[-1]["data"]["text/markdown"]), "No GPU has run this yet"
    said = "Measured on A GPU: 812 tokens/s (head, temperature 0), 2.03 times as fast as plain decoding."
    assert (said in text, nothing in text) == (measured, not measured)
