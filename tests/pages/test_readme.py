"""Every command that the README shows is run here, but for those that set everything up and run all tests."""
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdec.app.cli import ExitCode, app
from specdec.bench import drafters
from specdec.bench import peers as benchmark

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKE = [
    "make", "-f", str(ROOT / "Makefile"), f"BIN={Path(sys.executable).parent}", "-o", "setup", "-o", ".venv/ready",
    "-o", "model",
]
SETS_UP = {"make demo", "make test", "make pages"}
# what made the stored measurements, as the pages of the benchmarks show it
STORED = {
    json.loads((ROOT / "nbs" / "data" / f"{name}.json").read_text(encoding="utf-8"))["command"]
    for name in ("peers", "drafters")
}


def commands(markdown: str) -> set[str]:
    "The commands in its code: those of `sh` blocks, comments and line breaks undone, and inline ones."
    markdown = re.sub(r"<!--.*?-->", "", markdown, flags=re.S)  # no reader sees these
    blocks = re.findall(r"^```sh\n(.*?)^```", markdown, re.M | re.S)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(
        r"`((?:make|pip|specdec|python) [^`]+)`", re.sub(r"^```.*?^```", "", markdown, flags=re.M | re.S)
    )
    return {re.sub(r"\s+", " ", command) for command in [*lines, *inline] if command}


def specdec(*words: str):
    "A command in this process."
    return CliRunner().invoke(app, words, catch_exceptions=False)


def run_set_up(command: str) -> None:
    """`make test` runs it before any test, with the tools for tests besides: it is the recipe of a target that `test`
    needs."""
    plan = subprocess.run(
        ["make", "-n", "-B", "test", "BIN=BIN"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert command == "pip install -e ." and '-m pip install --quiet --disable-pip-version-check -e ".[dev]"' in plan


def run_prove(command: str) -> None:
    "It takes a while, and tests/app/test_cli.py runs all of it: once is enough."
    assert (
        'run("prove", "--json")' in (ROOT / "tests" / "app" / "test_cli.py").read_text(encoding="utf-8")
        and "--json" in specdec("prove", "--help").stdout
    )


def run_model(command: str) -> None:
    done = specdec(command.split()[1], "--max-new-tokens", "4", "Say hello.")
    assert done.exit_code == ExitCode.DONE and done.stdout


def run_fetch(command: str) -> None:
    assert "ready" in specdec("fetch").stdout


def run_doctor(command: str) -> None:
    done = specdec("doctor", "--json")
    assert done.exit_code == ExitCode.DONE and {pair["device"] for pair in json.loads(done.stdout)["loops"]} >= {"cpu"}


def run_bench(command: str, monkeypatch) -> None:
    """The command as it stands, on one prompt and four tokens, of two methods only; test_benchmark.py runs all of them
    on a tiny model."""
    asked, real = [], benchmark.bench_peers
    def small(config, out=None):
        asked.append(config)
        return real(
            replace(config, prompts=1, max_new_tokens=4, repeats=1),
            out,
            leave_out=[
                name for name in (*benchmark.METHODS, *benchmark.PROBES, "memory") if name not in ("plain", "ngram")
            ],
        )
    monkeypatch.setattr(benchmark, "bench_peers", small)
    done = specdec(*shlex.split(command)[1:])
    stored = json.loads((ROOT / "nbs" / "data" / "peers.json").read_text(encoding="utf-8"))
    assert done.exit_code == ExitCode.DONE and stored["command"] == command
    assert {name: getattr(asked[0], name) for name in ("prompts", "max_new_tokens", "repeats", "K")} == {
        name: stored["settings"][name] for name in ("prompts", "max_new_tokens", "repeats", "K")
    }


def run_bench_drafters(command: str, monkeypatch) -> None:
    "The command as it stands, on one prompt and four tokens, of one drafter at one K."
    asked, real = [], drafters.bench_drafters
    def small(config, out=None):
        asked.append(config)
        return real(
            replace(
                config, prompts=1, held_out=0, max_new_tokens=4, repeats=1, drafters=("head",), Ks=(2,),
                temperatures=(0.0,),
            ),
            out,
        )
    monkeypatch.setattr(drafters, "bench_drafters", small)
    done = specdec(*shlex.split(command)[1:])
    stored = json.loads((ROOT / "nbs" / "data" / "drafters.json").read_text(encoding="utf-8"))
    assert done.exit_code == ExitCode.DONE and stored["command"] == command == asked[0].command and stored["complete"]


def run_notebooks(command: str, tmp_path: Path) -> None:
    "On a copy that holds one short notebook."
    (tmp_path / "nbs" / "use").mkdir(parents=True)
    shutil.copy(ROOT / "settings.ini", tmp_path)
    nb = json.loads((ROOT / "nbs" / "use" / "main.ipynb").read_text(encoding="utf-8"))
    for cell in nb["cells"]:
        if cell["cell_type"] == "code": cell["outputs"] = []
    (tmp_path / "nbs" / "use" / "main.ipynb").write_text(json.dumps(nb), encoding="utf-8")
    subprocess.run([*MAKE, "notebooks"], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    saved = json.loads((tmp_path / "nbs" / "use" / "main.ipynb").read_text(encoding="utf-8"))
    assert any(cell.get("outputs") for cell in saved["cells"])


def run_lab(command: str, tmp_path: Path) -> None:
    "JupyterLab comes up and says where; no browser, no fixed port."
    (tmp_path / "nbs").mkdir()
    (tmp_path / "jupyter_server_config.json").write_text(json.dumps({"ServerApp": {"open_browser": False, "port": 0}}))
    started = subprocess.Popen(
        [*MAKE, "lab"], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        start_new_session=True, env={**os.environ, "JUPYTER_CONFIG_DIR": str(tmp_path)},
    )
    try:
        assert any("http://127.0.0.1:" in line for line in started.stderr)
    finally:
        os.killpg(started.pid, 15)
        started.wait(30)
        started.stderr.close()


def run_live(command: str, tmp_path: Path) -> None:
    "The page is served where the command says, until Ctrl-C."
    # a shell gives its background jobs a SIGINT that is ignored: who presses Ctrl-C has another
    options = dict(cwd=tmp_path, stderr=subprocess.PIPE, text=True,
                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    words = [sys.executable, "-m", *command.split(), "--no-browser"]
    with subprocess.Popen(words, **options) as started:
        try:
            address = next(filter(None, (re.search(r"http://127\S+", line) for line in started.stderr)))[0]
            with urllib.request.urlopen(address, timeout=60) as answer: page = answer.read()
            assert b'data-engine="live/worker.js"' in page
            started.send_signal(signal.SIGINT)
            assert started.wait(60) == 0
        finally: started.kill()


def run_docs(command: str) -> None:
    "What it runs is what `make pages` builds the site with and compares."
    plan = subprocess.run(
        [*MAKE, "--no-print-directory", "-n", "docs"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert plan.split()[-1] == "tools/site.py" and '"tools" / "site.py"' in (
        ROOT / "tools" / "check_site.py"
    ).read_text(encoding="utf-8")


RUNS = {
    "pip install -e .": run_set_up, "specdec fetch": run_fetch, "specdec prove": run_prove,
    "specdec generate": run_model, "specdec compare": run_model, "specdec bench peers": run_bench,
    "specdec bench drafters": run_bench_drafters, "make notebooks": run_notebooks, "make lab": run_lab,
    "make docs": run_docs, "specdec doctor": run_doctor, "specdec live": run_live,
}


@pytest.mark.parametrize("command", sorted(commands(README) - SETS_UP | STORED), ids=lambda command: command[:40])
def test_command_works(command, tmp_path, monkeypatch):
    kind = next((start for start in RUNS if command == start or command.startswith(start + " ")), None)
    assert kind, f"the README shows `{command}`, and no test runs it"
    given = {"tmp_path": tmp_path, "monkeypatch": monkeypatch}
    wants = RUNS[kind].__code__.co_varnames[1:RUNS[kind].__code__.co_argcount]
    RUNS[kind](command, **{name: given[name] for name in wants})


def test_commands_are_found():
    text = (
        "Run `make demo` or `specdec prove`; `pair.generate` is no command.\n\n```sh\nmake test   # all\nspecdec bench"
        " peers --x \\\n  --y 2\n```\n\n```python\nmake = 1\n```\n"
    )
    assert commands(text) == {"make demo", "specdec prove", "make test", "specdec bench peers --x --y 2"}
    assert SETS_UP <= commands(README)
