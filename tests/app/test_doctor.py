"""specdec doctor: every check is seen to fail, on a machine that is made ill for it, and each illness is one line and
exit code 2. What is only worth knowing is not."""
import ast
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from importlib import metadata
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from helpers import examples
from helpers_cuda import FakeCuda
from specdec import pair as pairs
from specdec import verify
from specdec.app import doctor
from specdec.app.cli import ExitCode, app
from specdec.app.doctor import Findings, ask, examine, report_text
from specdec.device import ops
from specdec.drafters import costs
from specdec.drafters.colder import TemperatureScaledDrafter
from specdec.drafters.lookup import NGramDrafter, SuffixDrafter
from specdec.engine import profiling
from specdec.errors import ModelError
from specdec.models import checkpoint, devices, hub, linear, loading


@pytest.fixture
def quick(monkeypatch):
    """Without what takes long: the exact laws, the digests of the default model, the memory's speed. Huge pages for
    all, and a processor on which no dtype is slow."""
    monkeypatch.setattr(doctor, "SLOW", float("inf"))
    monkeypatch.setattr(doctor, "distribution_error", lambda kind: "0")
    monkeypatch.setattr(profiling, "memory_bandwidth", lambda device, **more: 3e10)
    monkeypatch.setattr(hub, "check_folder", lambda folder, *advice: "digest")
    monkeypatch.setattr(doctor, "huge_pages", lambda: "always")


def run(*words):
    "The command, in this process."
    done = CliRunner().invoke(app, ["doctor", *words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


# A machine that is well

def test_a_machine_that_is_well():
    "The whole of it, with nothing left out: exit code 0, no problem, every key explained."
    done = run("--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, done.stderr, found["problems"]) == (ExitCode.DONE, "", []) and found["well"] is True
    assert {pair["drafter"] for pair in found["loops"]} == {"lookup", "model"}
    for pair in found["loops"]:
        assert pair["equal"] and pair["tokens"] == doctor.TOKENS
        if pair["device"] == "cpu": assert pair["law_errors"] == {"host": "0"}
    assert found["devices"][-1]["bandwidth"] > 1e8 and found["model"]["state"] == "ready"
    assert found["libraries"]["torch"] == metadata.version("torch")


def test_the_same_for_a_person(quick):
    done = run()
    assert (done.exit_code, done.stderr) == (ExitCode.DONE, "") and done.stdout.endswith("All is well.\n")
    lines = done.stdout.splitlines()
    titles = ("system", "torch", "transformers", "processor", "packed", "one token", "1 and 8 rows", "cpu", "model",
              "loops", "playground")
    assert all(any(line.startswith(title) for line in lines) for title in titles)
    # 30 GB/s over the bytes of the weights
    assert f"at most {3e10 / (doctor.WEIGHTS * devices.pick_dtype().itemsize):.0f} tokens/s" in done.stdout


KEPT = costs.Prices(forwards={1 + n: .01 + n / 1000 for n in range(17)}, drafts=[{}, {1: .003, 4: .009}])


def test_what_guesses_cost_here(quick, monkeypatch, tmp_path):
    "Whole, stale and damaged files; the last are a problem, which is named."
    monkeypatch.setattr(costs, "cache_home", lambda: tmp_path)
    drafting = SuffixDrafter(), TemperatureScaledDrafter(NGramDrafter())
    for name, processor in (("b.json", "an abacus"), ("a.json", costs.processor_name())):
        about = {**costs.machine(), "processor": processor, "target": {"name": "smollm2", "dtype": "int4"},
                 "drafters": [costs.about_drafter(each) for each in drafting], "sampled": True, "batch_size": 1}
        costs.write_costs(tmp_path / "costs" / name, about, KEPT)
    (tmp_path / "costs" / "c.json").write_text("{")
    done = run()
    lines = [line.removeprefix("costs").strip() for line in done.stdout.splitlines() if line.startswith("costs")]
    assert done.exit_code == ExitCode.BAD_INPUT and len(lines) == 3 and "All is well" not in done.stdout
    said, = [line for line in done.stderr.splitlines() if "c.json" in line]
    assert said.startswith("Error: ") and "c.json" in said and "delete it; its prices are taken anew" in said
    assert "smollm2 in int4, sampled" in lines[0]
    assert "a step 10.0 ms; v(1) = 1.10, v(2) = 1.20, v(4) = 1.40" in lines[0]
    assert lines[0].endswith("c of SuffixDrafter = 0, c of NGramDrafter = 0.30, then 0.20")
    assert lines[1] == f"{lines[0]} (stale: of another machine or version, and not used)"
    assert lines[2].endswith("c.json is damaged: its prices are taken anew")
    assert [entry["state"] for entry in json.loads(run("--json").stdout)["costs"]] == ["ready", "stale", "damaged"]


ABOUT = {"threads": 2, "batch_size": 1, "target": {"name": "m", "dtype": "int4"}}
STRANGE = [{}, {"threads": 2}, ABOUT | {"target": None}, ABOUT | {"target": {"name": "m"}},
           ABOUT | {"threads": "two"}, ABOUT | {"batch_size": "four"},
           ABOUT | {"target": {"name": "\ud800", "dtype": "int4"}},
           ABOUT | {"target": {"name": ["m"], "dtype": "int4"}},
           ABOUT | {"drafters": "x"}, ABOUT | {"drafters": [{"kind": "a b"}]}, ABOUT | {"drafters": [{"inside": 1}]},
           ABOUT | {"drafters": [{"inside": []}]}]


@pytest.mark.parametrize("about", STRANGE)
def test_costs_that_do_not_say_whose_they_are(quick, monkeypatch, tmp_path, about):
    "They are of no use."
    monkeypatch.setattr(doctor, "QUESTIONS", (doctor.imports, doctor.costs))  # the others take seconds
    monkeypatch.setattr(costs, "cache_home", lambda: tmp_path)
    costs.write_costs(tmp_path / "costs" / "a.json", about, KEPT)
    done, found = run(), json.loads(run("--json").stdout)["costs"]
    assert done.exit_code == ExitCode.BAD_INPUT and "a.json is damaged: its prices are taken anew" in done.stdout
    assert "a.json" in done.stderr and "All is well" not in done.stdout
    assert [(entry["state"], entry["costs"]) for entry in found] == [("damaged", None)]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_among_the_costs_holds_nothing_up(quick, monkeypatch, tmp_path):
    "No program writes to it; a test that waits would never end, so an alarm ends it."
    monkeypatch.setattr(doctor, "QUESTIONS", (doctor.imports, doctor.costs))
    monkeypatch.setattr(costs, "cache_home", lambda: tmp_path)
    (tmp_path / "costs").mkdir()
    os.mkfifo(tmp_path / "costs" / "a.json")
    def late(*_): raise AssertionError("it waits for a writer")
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    try: done = run()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert done.exit_code == ExitCode.BAD_INPUT and "a.json" in done.stderr


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
                    max_leaves=5)


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(about=st.dictionaries(st.sampled_from(["target", "threads", "batch_size"]), JSON) | st.fixed_dictionaries(
    {"threads": JSON, "drafters": JSON, "batch_size": JSON,
     "target": st.fixed_dictionaries({"name": JSON, "dtype": JSON})}))
def test_any_subject_is_shown_or_called_damaged(monkeypatch, tmp_path, about):
    monkeypatch.setattr(costs, "cache_home", lambda: tmp_path)
    costs.write_costs(tmp_path / "costs" / "a.json", about, KEPT)
    line, = map(doctor.costs_line, doctor.costs(Findings()))
    assert line.encode() and ("is damaged" in line or "a step 10.0 ms" in line)


def test_every_key_is_explained_and_every_explained_key_is_there(quick):
    "The table stands in the notebook."
    page = json.loads((Path(__file__).parents[2] / "nbs" / "use" / "10_doctor.ipynb").read_text(encoding="utf-8"))
    cells = ("".join(cell["source"]) for cell in page["cells"])
    keys = ast.literal_eval(next(cell for cell in cells if cell.startswith("KEYS = {")).removeprefix("KEYS = "))
    def keys_of(value, path=""):
        if path in keys: return {path}
        if isinstance(value, list): return set().union(*(keys_of(v, f"{path}[]") for v in value))
        assert isinstance(value, dict), f"{path} isn't explained"
        return set().union(*(keys_of(v, f"{path}.{key}".strip(".")) for key, v in value.items()))
    assert keys_of(json.loads(run("--json").stdout)) == set(keys)
    with pytest.raises(AssertionError, match="unheard isn't explained"): keys_of({"unheard": 1})


# What is wrong

def is_ill(says: str, *words) -> dict:
    "The command ends with exit code 2 and one line for each problem, one of which says this."
    done = run("--json", *words)
    found = json.loads(done.stdout)
    assert done.exit_code == ExitCode.BAD_INPUT and found["well"] is False
    assert done.stderr == "".join(f"Error: {problem}\n" for problem in found["problems"])
    assert any(says in problem for problem in found["problems"]), found["problems"]
    assert all("\n" not in problem for problem in found["problems"])
    person = run(*words)
    assert person.exit_code == ExitCode.BAD_INPUT and "All is well" not in person.stdout and says in person.stderr
    return found


def of_version(monkeypatch, **versions):
    "Other versions of some libraries."
    known = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: versions[name] if name in versions else known(name))


@pytest.mark.parametrize(
    "version, says",
    [
        ("2.10.1+cu128", "torch 2.10.1+cu128 is installed, and specdec works with torch"),
        ("2.14.0", "torch 2.14.0 is installed"), ("1.0", "pip install 'torch"), (None, "torch isn't installed"),
    ],
)
def test_a_torch_outside_of_its_range(quick, monkeypatch, version, says):
    of_version(monkeypatch, torch=version)
    assert is_ill(says)["libraries"]["torch"] == version


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.0", "2.13.1+cpu"])
def test_a_torch_inside_of_its_range(quick, monkeypatch, version):
    of_version(monkeypatch, torch=version)
    assert run().exit_code == ExitCode.DONE


def test_libraries_that_cannot_be_imported():
    "In a process of its own, where torch is a file that fails; the other questions aren't asked."
    code = """import sys
from specdec.app.cli import main
sys.modules["torch"] = None
sys.argv = ["specdec", "doctor"]
from specdec.app.cli import main
main()"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == ExitCode.BAD_INPUT and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("Error: imports: ModuleNotFoundError: import of torch halted")
    assert "transformers" in done.stdout and "processor" not in done.stdout


def test_a_source_tree_that_is_not_installed(quick, monkeypatch):
    def unknown(name): raise metadata.PackageNotFoundError(name)
    monkeypatch.setattr(metadata, "requires", unknown)
    done = run("--json")
    found = json.loads(done.stdout)
    assert done.exit_code == ExitCode.DONE and "pip install -e" in found["warnings"][0]
    assert set(found["libraries"]) == {"torch", "transformers"}


def test_a_cache_that_is_a_file(quick, monkeypatch, tmp_path):
    "Nothing could be put there, neither into the file nor below it."
    monkeypatch.setattr(doctor, "QUESTIONS", (doctor.imports, doctor.model))  # the others take seconds
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("SPECDEC_HOME", str(home))
        assert is_ill("can't be written (Not a directory): set SPECDEC_HOME")["model"]["state"] == "absent"
    assert (tmp_path / "file").read_text() == "" and os.listdir(tmp_path) == ["file"]


def test_a_cache_that_is_not_there_yet_and_one_that_is_read_only(quick, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "QUESTIONS", (doctor.imports, doctor.model))
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "a" / "b"))
    done = run()
    assert done.exit_code == ExitCode.DONE and "specdec fetch" in done.stdout and os.listdir(tmp_path) == []
    (tmp_path / "a" / "b" / "smollm2").mkdir(parents=True)
    monkeypatch.setattr(doctor, "unwritable", lambda folder: "It can't be written.")
    done = run()  # with a model that is ready
    assert done.exit_code == ExitCode.DONE and "It can't be written." in done.stdout


def test_a_damaged_model(quick, monkeypatch):
    def damaged(folder, *advice): raise ModelError(f"The model in {folder} is damaged:\nRebuild it.")
    monkeypatch.setattr(hub, "check_folder", damaged)
    assert is_ill("is damaged: Rebuild it.")["model"]["state"] == "damaged"


def test_a_model_of_which_a_byte_is_missing(tmp_path, monkeypatch):
    "The real check, on a home whose model has one file of the wrong length."
    whole, folder = hub.fetch(), tmp_path / "smollm2"
    folder.mkdir()
    for file in whole.iterdir(): (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    (folder / "config.json").write_bytes((whole / "config.json").read_bytes()[:-1])
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    found = Findings()
    ask(found, doctor.model)
    assert found.facts["model"]["state"] == "damaged"
    (problem,) = found.problems
    assert "config.json" in problem and "specdec fetch --rebuild" in problem


def test_a_model_that_is_not_here_is_nothing_wrong(quick, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    monkeypatch.setattr(hub, "fetch", lambda *words, **more: pytest.fail("the doctor fetches nothing"))
    done = run()
    assert done.exit_code == ExitCode.DONE and "specdec fetch" in done.stdout and "absent" in done.stdout
    assert not list(tmp_path.iterdir())


def test_too_little_memory(quick, monkeypatch):
    monkeypatch.setattr(doctor, "free_memory", lambda *device: 300_000_000)
    found = is_ill("300 MB of memory are free for the CPU")
    assert found["memory"]["free_bytes"] == 300_000_000
    if not torch.cuda.is_available(): assert len(found["problems"]) == 1


@pytest.mark.parametrize("free, ill", [(500_000_000, True), (80_000_000_000, False)], ids=["nearly full", "empty"])
def test_too_little_memory_on_a_gpu(monkeypatch, free, ill):
    "With a device that is described, and not there."
    def facts(device): return {"device": str(device), "dtype": "bfloat16", "free_bytes": free}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor, "device_facts", facts)
    found = Findings()
    ask(found, doctor.devices)
    assert [device["device"] for device in found.facts["devices"]] == ["cuda:0", "cpu"] and not found.warnings
    assert ["500 MB of memory are free on cuda:0" in problem for problem in found.problems] == [True] * ill


def test_a_system_that_does_not_say_what_is_free(quick, monkeypatch):
    monkeypatch.setattr(doctor, "free_memory", lambda *device: None)
    assert run().exit_code == ExitCode.DONE


@pytest.mark.parametrize("words, given", [("always [madvise] never\n", "madvise"), ("[always] madvise never", "always"),
                                          ("always madvise [never]", "never"), ("", None), (None, None)])
def test_who_gets_huge_pages(tmp_path, words, given):
    if words is not None: (tmp_path / "enabled").write_text(words)
    assert doctor.huge_pages(tmp_path / "enabled") == given


@pytest.mark.parametrize(
    "given, tunables, library, told", [
        ("madvise", "", ("glibc", "2.36"), True), ("madvise", "", ("glibc", "2.35.1"), True),
        ("madvise", "glibc.malloc.hugetlb=0", ("glibc", "2.36"), True),
        ("madvise", "glibc.malloc.hugetlb=1", ("glibc", "2.36"), False),
        ("madvise", "glibc.malloc.perturb=1:glibc.malloc.hugetlb=1", ("glibc", "2.36"), False),
        ("always", "", ("glibc", "2.36"), False), ("never", "", ("glibc", "2.36"), False),
        (None, "", ("", ""), False), ("madvise", "", ("glibc", "2.31"), False), ("madvise", "", ("", ""), False),
    ])
def test_huge_pages_that_could_be_had_are_a_warning(quick, monkeypatch, given, tunables, library, told):
    monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    monkeypatch.setattr(doctor, "huge_pages", lambda: given)
    monkeypatch.setattr(doctor.platform, "libc_ver", lambda: library)
    done = run("--json")
    found = json.loads(done.stdout)
    assert done.exit_code == ExitCode.DONE and found["well"]
    assert found["memory"]["huge_pages"] == given
    assert found["memory"]["asks_for_them"] == tunables.endswith("hugetlb=1")
    assert any("GLIBC_TUNABLES=glibc.malloc.hugetlb=1" in line for line in found["warnings"]) == told


@pytest.mark.skipif(doctor.huge_pages() != "madvise", reason="needs a system that gives huge pages to those who ask")
def test_what_the_doctor_advises_brings_huge_pages():
    "A process that is told so has its memory in huge pages, and one that isn't hasn't."
    held = """if True:
        import torch
        kept = torch.ones(64, 1_000_000)
        pages = next(line for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages"))
        print(pages.split()[1])"""
    usual = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    def huge(variables):
        done = subprocess.run([sys.executable, "-c", held], env=variables, capture_output=True, text=True, check=True)
        return int(done.stdout) * 1024
    assert huge(usual) < 64e6 < 200e6 < huge(usual | {"GLIBC_TUNABLES": doctor.HUGE})


@pytest.mark.parametrize("free, told", [(1.5, 1_500_000), (float("inf"), None)], ids=["known", "not told"])
def test_free_memory_is_what_loading_asks_for(monkeypatch, free, told):
    monkeypatch.setattr(loading, "memory_free_mb", lambda device: free)
    assert doctor.free_memory() == told


def plug_in(bus: Path, vendor: str, kind: str) -> None:
    "A card in a bus that is a folder."
    device = bus / f"0000:00:{len(list(bus.iterdir())):02}.0"
    device.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")


def test_cards_are_counted_without_a_driver(tmp_path):
    assert doctor.cards(tmp_path) == doctor.cards(tmp_path / "none") == 0
    plug_in(tmp_path, "0x8086", "0x030000")
    for kind in ("0x040300", "0x030200", "0x030000"): plug_in(tmp_path, "0x10de", kind)
    (tmp_path / "without files").mkdir()
    assert doctor.cards(tmp_path) == 2  # neither Intel's nor the sound of NVIDIA's


def without_gpu(monkeypatch, cuda: str | None, plugged: int, hidden: str | None):
    "A machine on which PyTorch finds no GPU."
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "cards", lambda: plugged)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)


def test_cuda_and_a_card_but_no_driver(quick, monkeypatch):
    def no_driver(): raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check.")
    without_gpu(monkeypatch, "13.0", 1, None)
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    is_ill("built for CUDA 13.0, but it can't be used (Found no NVIDIA driver on your system. Please check.)")


@pytest.mark.parametrize(
    "cuda, plugged, hidden, says",
    [
        (None, 0, None, "There is no GPU"), ("13.0", 0, None, "There is no GPU"),
        ("13.0", 1, "", "There is no GPU"), (None, 1, None, "built without CUDA"),
    ],
    ids=["no card", "no card, torch for CUDA", "hidden", "torch for CPUs"],
)
def test_no_gpu_is_nothing_wrong(quick, monkeypatch, cuda, plugged, hidden, says):
    without_gpu(monkeypatch, cuda, plugged, hidden)
    done = run("--json")
    assert done.exit_code == ExitCode.DONE
    assert [says in warning for warning in json.loads(done.stdout)["warnings"]] == [True]


def test_more_threads_than_cores(quick, monkeypatch):
    monkeypatch.setattr(doctor, "cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    done = run()
    assert done.exit_code == ExitCode.DONE and "OMP_NUM_THREADS=2" in done.stdout


# Kernels that lie

class Inexact(linear.Linear):
    "Packed products are too large by a tenth."
    def __call__(self, x): return super().__call__(x) * 1.1


class Sociable(linear.Linear):
    "A row has other bits among others, by one unit in the last place."
    def __call__(self, x):
        y = super().__call__(x)
        # a single row is multiplied as up to four copies of itself
        return y * (1 + torch.finfo(y.dtype).eps) if len(x) > 4 else y


def can_be_batch_invariant(): return linear.can_be_batch_invariant(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("wrong, says", [(Inexact, "weights are wrong by"), (Sociable, "other bits alone")])
def test_packed_products_are_tried(quick, monkeypatch, wrong, says):
    if not can_be_batch_invariant():
        pytest.skip("this processor has no packed kernels for float32, so there are none to break")
    monkeypatch.setattr(linear, "Linear", wrong)
    is_ill(says)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_right_products_pass(dtype): assert doctor.packed_error(dtype) == ""


# Loops that differ

def test_a_device_loop_with_another_text(quick, monkeypatch):
    right = ops.match_on_device
    def generous(logits, tokens, *count):
        accepted, following = right(logits, tokens, *count)
        return (accepted + 1).clamp(max=len(tokens)), following
    monkeypatch.setattr(ops, "match_on_device", generous)
    found = is_ill("writes another greedy text than the host's after")
    assert [pair["equal"] for pair in found["loops"]] == [False, False]


def test_a_host_loop_with_another_text(quick, monkeypatch):
    right = pairs.speculate_batch
    def other(*arguments):
        for i, r in right(*arguments):
            r.emitted = [min(token, 40) for token in r.emitted]
            yield i, r
    monkeypatch.setattr(pairs, "speculate_batch", other)
    is_ill("another greedy text")


def test_a_loop_that_fails_is_a_line_and_the_rest_is_told(quick, monkeypatch):
    def refused(*arguments, **more): raise RuntimeError("CUDA error: no kernel image is available\nfor execution")
    monkeypatch.setattr(pairs, "DeviceDecoder", refused)
    found = is_ill("loops: RuntimeError: CUDA error: no kernel image is available for execution")
    assert found["loops"] is None and found["extras"] and found["model"]


def test_a_loop_with_another_distribution(monkeypatch):
    "The device's: see test_device_loop, test_a_wrong_loop_has_another_distribution."
    assert [doctor.distribution_error(kind) for kind in ("lookup", "model")] == ["0", "0"]
    for rule in ("speculative_sampling", "sample_and_match"): monkeypatch.setattr(verify, rule, verify.greedy_match)
    assert all(Fraction(doctor.distribution_error(kind)) > 0 for kind in ("lookup", "model"))


@pytest.mark.parametrize("loop", ["host", "device"])
def test_which_loop_is_taken_is_what_a_result_says(quick, monkeypatch, loop):
    generate = pairs.Pair.generate
    monkeypatch.setattr(pairs.Pair, "generate", lambda *given, **more: replace(generate(*given, **more), loop=loop))
    found = json.loads(run("--json").stdout)
    assert {pair["taken"] for pair in found["loops"]} == {loop}
    assert f"On cpu, a pair decodes with the loop of the {loop}." in found["expect"]


def test_another_distribution_is_a_problem(quick, monkeypatch):
    monkeypatch.setattr(doctor, "distribution_error", lambda kind: "1/8")
    found = is_ill("the distribution of the host's loop differs from the target's by 1/8")
    assert len(found["problems"]) == 2 and found["loops"][0]["law_errors"] == {"host": "1/8"}


@pytest.mark.parametrize("fails", [None, "CUDA error: the driver is too old"], ids=["captured", "refused"])
@pytest.mark.parametrize("kind", ["lookup", "model"])
def test_recordings_are_tried(monkeypatch, kind, fails):
    "With the double for CUDA's graphs, on a device that calls itself CUDA and computes on the CPU."
    monkeypatch.setattr(checkpoint, "can_be_batch_invariant", lambda *given: False)  # on a GPU weights lie as they are
    findings, target = Findings(), doctor.tiny_model(torch.device("cpu"))
    drafter = doctor.tiny_drafters(target)[kind]
    FakeCuda().install(monkeypatch).fails = fails
    pair = doctor.compared(torch.device("cuda"), kind, target, drafter, findings)
    assert (pair["equal"], pair["recorded"], pair["law_errors"]) == (True, not fails, None)
    said = [fails in problem and "can't be captured" in problem for problem in findings.problems]
    assert said == [True] * bool(fails)
    assert ("not captured" in doctor.loop_line(pair)) is bool(fails)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: nothing is recorded on this machine")
def test_on_a_gpu():
    found = examine()
    assert found.well, found.problems
    assert found.facts["devices"][0]["device"] == "cuda:0" and found.facts["devices"][0]["driver"]
    pairs = [pair for pair in found.facts["loops"] if pair["device"] == "cuda"]
    assert len(pairs) == 2 and all(pair["recorded"] and pair["equal"] for pair in pairs)
    assert "captured" in report_text(found)


# The doctor itself

def test_every_question_may_fail_and_the_rest_is_told(quick, monkeypatch):
    for i, question in enumerate(doctor.QUESTIONS):
        def ill(findings): raise ValueError("ill")
        ill.__name__ = question.__name__
        with monkeypatch.context() as patched:
            patched.setattr(doctor, "QUESTIONS", (*doctor.QUESTIONS[:i], ill, *doctor.QUESTIONS[i + 1:]))
            found = examine()
        assert found.problems == [f"{question.__name__}: ValueError: ill"]
        assert found.facts[question.__name__] is None and question.__name__ not in report_text(found).splitlines()


def test_nothing_heavy_is_imported_with_it():
    code = "import sys, specdec.app.doctor; print(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_long_error_is_cut():
    def long(findings): raise ValueError("x" * 5000)
    found = Findings()
    ask(found, long)
    assert len(found.problems[0]) == 800


def test_the_random_numbers_of_the_caller_stay():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    doctor.tiny_model(torch.device("cpu"))
    doctor.packed_error(torch.float32)
    assert torch.equal(before, torch.get_rng_state())


def test_no_environment_is_left_behind(quick):
    before = dict(os.environ)
    run()
    assert dict(os.environ) == before
