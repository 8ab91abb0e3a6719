"""Grids that are run, killed and gone on with, on a small random model. The claims are about processes, so one is
killed."""
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from helpers import on_a_disk_of
from helpers_training import make_target
from specdec.app.cli import app
from specdec.app.registry import get_pair
from specdec.bench import run as r
from specdec.bench.grid import Grid, GridPair, cells, read_grid
from specdec.bench.report import read_runs, report_sections
from specdec.bench.run import Record, Records, read_records
from specdec.drafters.choose import HybridDrafter
from specdec.drafters.clock import Clock
from specdec.drafters.model import ModelDrafter
from specdec.errors import InputError, ModelError


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    "Short ones, of words that the model knows."
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"text": " ".join(f"w{(7 * i + j) % 40}" for j in range(9)), "domain": d}
            for i, d in enumerate(("code", "code", "chat", "chat"))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def grid_of(folder, prompts, **more) -> Grid:
    pair = GridPair(name="small", target=str(folder), draft=str(folder), skip=[1])
    return Grid(**dict(pairs=[pair], methods=["plain", "suffix", "model"], K=[3, "adaptive"], temperatures=[0, 1],
                       dtypes=["float32"], device="cpu", threads=1, prompts=str(prompts), count=1,
                       max_new_tokens=12) | more)


@pytest.fixture
def grid(folder, prompts): return grid_of(folder, prompts)


def tokens(records): return {record.key: record.result.generated_ids for record in records}


# Seeds

def test_every_die_is_set():
    def throws():
        return [random.random(), np.random.rand(), torch.rand(()).item(), torch.randn(()).item()]
    r.set_seeds(3)
    first = throws()
    assert all(a != b for a, b in zip(throws(), first))
    r.set_seeds(3)
    assert throws() == first
    r.set_seeds(4)
    assert all(a != b for a, b in zip(throws(), first))
    assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, True, None, "1"])
def test_what_is_no_seed(seed):
    with pytest.raises(InputError, match="whole number"): r.set_seeds(seed)


# Two processes

LINES = 4

def started(config, file, *more):
    "The command, in a process of its own."
    command = [sys.executable, "-m", "specdec", "bench", "run", str(config), "--out", str(file), *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)


def test_a_killed_process_loses_nothing_and_another_one_says_the_same(folder, prompts, tmp_path):
    "While it writes, nobody else can; after `kill -9` this process does the rest; and the tokens are the same in both."
    config, file = tmp_path / "grid.yaml", tmp_path / "results.jsonl"
    grid = grid_of(folder, prompts, repeats=40)  # more than it can do by then
    config.write_text(yaml.safe_dump(grid.model_dump(exclude={"timing"})))
    assert read_grid(config) == grid
    process = started(config, file, "--log-json")
    try:
        limit = time.monotonic() + 120
        while not (file.exists() and file.read_bytes().count(b"\n") >= LINES):
            assert process.poll() is None and time.monotonic() < limit, process.communicate()[1]
            time.sleep(0.01)
        with pytest.raises(InputError, match="Another run is writing"): r.bench_run(grid, file)
    finally: process.send_signal(signal.SIGKILL)
    said = process.communicate()[1]
    before = file.read_bytes()
    done = before[:before.rfind(b"\n") + 1]
    theirs = read_records(file)
    assert LINES <= len(theirs) < sum(len(cell.runs) for cell in cells(grid))
    some = grid.model_copy(update={"repeats": 1 + max(record.config.repeat for record in theirs)})
    outcome = r.bench_run(some, file)
    every = sum(len(cell.runs) for cell in cells(some))
    assert outcome.complete and len(theirs) + outcome.made == every and file.read_bytes().startswith(done)
    keys = [json.loads(line)["key"] for line in file.read_text().splitlines()]
    assert len(keys) == len(set(keys)) == every
    here = tokens(r.bench_run(grid.model_copy(update={"repeats": 1})).records)
    both = here.keys() & tokens(theirs).keys()
    assert len(both) >= LINES - 1 and all(here[key] == tokens(theirs)[key] for key in both)
    events = [json.loads(line) for line in said.splitlines()]
    assert [event["event"] for event in events[:3]] == ["start", "run", "run"]
    assert {event["key"] for event in events[1:]} <= {*keys} and all("time" in event for event in events)


# In this process

def test_seeds_decide_the_tokens(grid):
    def said(seed):
        records = r.bench_run(grid.model_copy(update={"seed": seed, "temperatures": [1.0]})).records
        return [record.result.generated_ids for record in records]
    assert said(1) == said(1) != said(2)


def test_repeats_have_seeds_of_their_own(grid):
    records = r.bench_run(grid.model_copy(update={"repeats": 2, "methods": ["plain"]})).records
    for t, distinct in ((0, 1), (1, 2)):
        some = [record for record in records if record.config.temperature == t and record.config.domain == "code"]
        assert len({tuple(record.result.generated_ids) for record in some}) == distinct


def test_a_record_is_whole_and_comes_back(grid, tmp_path):
    outcome = r.bench_run(grid, tmp_path / "r.jsonl")
    assert outcome.failed == {} and read_records(tmp_path / "r.jsonl") == outcome.records
    for record in outcome.records:
        result, run = record.result, record.config
        assert result.num_tokens == 12 and result.finish_reason == "length" and result.token_text == {}
        assert result.settings["seed"] == run.seed and result.settings["temperature"] == run.temperature
        assert result.is_speculative == (run.method != "plain") and record.environment["timed"] is True
        assert record.environment["threads"] == 1 and record.environment["dtype"] == "float32"
        assert {"governor", "load", "code", "processor", "torch"} <= record.environment.keys()
        assert Record.from_json(record.to_json()) == record
        assert (record.weights["drafter"] is None) == (run.method != "model") and record.weights["target"]
    [one] = {record.weights["target"] for record in outcome.records}
    [two] = {record.weights["drafter"] for record in outcome.records if record.config.method == "model"}
    assert one == two  # here the draft is the target itself


def test_other_weights_are_other_runs(folder, prompts, tmp_path):
    one = list(cells(grid_of(folder, prompts)))[0]
    before = r.keys_of(one)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir(): (copy / path.name).write_bytes(path.read_bytes())
    assert list(r.keys_of(replace(one, pair=replace(one.pair, target=str(copy)))).values()) == list(before.values())
    from safetensors.torch import load_file, save_file
    weights = load_file(copy / "model.safetensors")
    name = sorted(weights)[0]
    weights[name][0] += 1
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    r.folder_digest.cache_clear()
    r.weights_of.cache_clear()
    assert not {*r.keys_of(replace(one, pair=replace(one.pair, target=str(copy)))).values()} & {*before.values()}


def test_nothing_is_done_twice_and_a_larger_grid_does_the_rest(grid, tmp_path, monkeypatch):
    file, made = tmp_path / "r.jsonl", []
    r.bench_run(grid, file)
    before = file.read_bytes()
    def counted(bench, run, ids):
        made.append(run)
        return true(bench, run, ids)
    true = r.decoded
    monkeypatch.setattr(r, "decoded", counted)
    assert r.bench_run(grid, file).made == 0 and made == [] and file.read_bytes() == before
    more = r.bench_run(grid.model_copy(update={"K": [3, 5, "adaptive"]}), file)
    assert more.made == 2 * 2 * 2 and len(more.records) == 2 * 2 * 7  # domains, temperatures; methods with that K
    assert file.read_bytes().startswith(before)
    timed = [run for run in made if run.max_new_tokens == 12]
    assert {(run.method, run.K) for run in timed} == {("suffix", 5), ("model", 5)}


def test_an_interrupt_keeps_what_there_is(grid, tmp_path, monkeypatch):
    true, calls = r.decoded, []
    def interrupted(bench, run, ids):
        calls.append(run)
        if len(calls) == 20: raise KeyboardInterrupt
        return true(bench, run, ids)
    monkeypatch.setattr(r, "decoded", interrupted)
    outcome = r.bench_run(grid, tmp_path / "r.jsonl")
    assert not outcome.complete and outcome.made == len(read_records(tmp_path / "r.jsonl")) > 0
    assert "Interrupted" in r.run_text(outcome)


def test_a_full_disk_is_one_line_and_the_rest_follows(grid, tmp_path):
    file = tmp_path / "r.jsonl"
    with on_a_disk_of(12_000):
        with pytest.raises(InputError, match="File too large"): r.bench_run(grid, file)
    there = read_records(file)
    assert there and file.read_bytes().endswith(b"\n")
    outcome = r.bench_run(grid, file)
    assert len(there) + outcome.made == len(outcome.records) == 20


def test_a_torn_line_is_said(grid, tmp_path):
    file = tmp_path / "r.jsonl"
    r.bench_run(grid, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    outcome = r.bench_run(grid, file)
    assert outcome.made == 1 and outcome.torn > 0 and "torn by a kill" in r.run_text(outcome)
    assert len(read_records(file)) == 20 and "torn" not in r.run_text(r.bench_run(grid, file))


@pytest.mark.parametrize("name", ["code", "torch", "transformers", "processor"])
def test_records_of_another_code_or_machine_are_refused(grid, tmp_path, name):
    file = tmp_path / "r.jsonl"
    small = grid.model_copy(update={"methods": ["plain"], "temperatures": [0.0], "domains": ["code"]})
    [record] = r.bench_run(small, file).records
    file.unlink()
    Records(file).add(replace(record, environment=record.environment | {name: "other"}))
    with pytest.raises(InputError, match=f"another {name} .other, now"): r.bench_run(small, file)
    assert r.bench_run(small.model_copy(update={"seed": 9}), file).made == 1  # of another grid: nobody divides by them


# What fails

def test_what_fails_says_why_and_the_rest_goes_on(grid, tmp_path):
    outcome = r.bench_run(grid.model_copy(update={"methods": ["plain", "head", "llamacpp-eagle3", "suffix"]}))
    assert outcome.complete and {record.config.method for record in outcome.records} == {"plain", "suffix"}
    head, other = outcome.failed["head, small in float32"], outcome.failed["llamacpp-eagle3, small in float32"]
    assert "There is no head" in head and other and "head, small in float32 is missing: " in r.run_text(outcome)


def test_a_target_that_cannot_be_had_fails_its_own_runs_only(grid, folder):
    nowhere = GridPair(name="gone", target=str(folder / "gone"))
    with pytest.raises(Exception, match="gone"): r.bench_run(grid.model_copy(update={"pairs": [nowhere]}))


def test_too_few_tokens_are_no_measurement(grid, monkeypatch):
    def short(bench, run, ids): return replace(true(bench, run, ids), generated_ids=[1])
    true = r.our_result
    monkeypatch.setattr(r, "our_result", short)
    outcome = r.bench_run(grid.model_copy(update={"methods": ["plain"]}))
    assert outcome.records == [] and "It made 1 tokens" in outcome.failed["plain, small in float32"]


def test_an_interrupt_that_a_library_takes_for_an_error_is_no_failure(grid, monkeypatch):
    def swallowed(bench, run, ids):
        try: signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt: raise ValueError("could not determine the shape") from None
    monkeypatch.setattr(r, "decoded", swallowed)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try: outcome = r.bench_run(grid)
    finally: signal.signal(signal.SIGINT, before)
    assert not outcome.complete and outcome.failed == {}
    r.put_away()


# Starting

def test_start_up_is_what_the_first_run_takes_longer_and_is_told_once(grid, tmp_path, monkeypatch):
    true, calls = r.decoded, []
    def slow_at_first(bench, run, ids):
        result = true(bench, run, ids)
        first = run.method not in [other.method for other in calls]
        calls.append(run)
        return replace(result, total_time=40.0 if first else 1.0)
    monkeypatch.setattr(r, "decoded", slow_at_first)
    r.put_away()
    some = grid.model_copy(update={"K": [3], "temperatures": [0.0], "methods": ["plain", "suffix"]})
    records = r.bench_run(some, tmp_path / "r.jsonl").records
    startups = {record.config.method: record.environment.get("startup") for record in reversed(records)}
    assert {method: found["first_run"] for method, found in startups.items()} == {"plain": 39, "suffix": 39}
    assert all(found["load"] > 0 for found in startups.values())
    assert sum("startup" in record.environment for record in records) == 2 < len(records)
    assert {record.result.total_time for record in records} == {1.0}
    assert [run.max_new_tokens for run in calls[:3]] == [8, 8, 12]


def test_what_breaks_at_its_start_is_not_tried_again(grid, monkeypatch):
    calls, true = [], r.our_result
    def broken(bench, run, ids):
        if run.method == "plain": return true(bench, run, ids)
        calls.append(run)
        raise InputError("of this prompt") if run.method == "model" else RuntimeError("no compiler")
    monkeypatch.setattr(r, "our_result", broken)
    r.put_away()
    outcome = r.bench_run(grid.model_copy(update={"K": [3], "temperatures": [0.0], "repeats": 2}))
    assert outcome.failed["suffix, small in float32"] == "RuntimeError: no compiler"
    assert [run.method for run in calls].count("suffix") == 1 and [run.method for run in calls].count("model") == 4
    r.put_away()


def test_a_target_that_breaks_is_loaded_once_and_fails_for_all(grid, monkeypatch):
    loads = []
    def broken(*which, **more):
        loads.append(which)
        raise MemoryError("no room")
    monkeypatch.setattr(r, "load", broken)
    r.put_away()
    outcome = r.bench_run(grid)
    assert len(loads) == 1 and set(outcome.failed.values()) == {"MemoryError: no room"} and len(outcome.failed) == 3
    r.put_away()


def test_a_cell_may_hold_several_precisions(grid):
    "Then what is compared across them is done side by side, and a text is compared with the plain one of its own."
    [cell, *_] = cells(grid.model_copy(update={"methods": ["plain", "suffix"], "K": [3]}))
    other = [run.model_copy(update={"dtype": "bfloat16"}) for run in cell.runs]
    records = list(r.do_cell(replace(cell, runs=(*cell.runs, *other))))
    assert [record.config.dtype for record in records] == ["float32"] * 2 + ["bfloat16"] * 2
    assert [record.environment["dtype"] for record in records] == [record.config.dtype for record in records]
    assert len({record.key for record in records}) == 4
    known = {record.key: record for record in reversed(records[:3])}
    [last] = r.do_cell(replace(cell, runs=(*cell.runs, *other)), known)
    assert last.config == other[1] and last.result.generated_ids == records[3].result.generated_ids
    first = replace(records[0], result=replace(records[0].result, generated_ids=[0] * 12))  # another text, in float32
    r.put_away()
    [last] = r.do_cell(replace(cell, runs=(*cell.runs, *other)), {**known, first.key: first})
    assert last.parted is None


def test_the_default_drafter_is_what_a_pair_drafts_with(grid):
    small = grid.model_copy(update={"methods": ["plain", "default"], "K": [4], "domains": ["code"]})
    records = [record for record in r.bench_run(small).records if record.config.method == "default"]
    assert len(records) == 2 and {record.decoder_label for record in records} == {"SD-K4"}
    assert {record.result.drafter for record in records} == {"lookup"}


# The plain text

def test_a_text_that_leaves_the_plain_one_says_where_and_how_far(grid, monkeypatch):
    def wrong(bench, run, ids):
        result = true(bench, run, ids)
        if run.method != "suffix": return result
        made = list(result.generated_ids)
        made[5] = (made[5] + 1) % 50
        return replace(result, generated_ids=made)
    true = r.our_result
    greedy = grid.model_copy(update={"temperatures": [0.0]})
    assert not any(record.parted for record in r.bench_run(greedy).records)
    monkeypatch.setattr(r, "our_result", wrong)
    records = r.bench_run(greedy).records
    r.put_away()
    assert {record.config.method for record in records if record.parted} == {"suffix"}
    for record in records:
        if not record.parted: continue
        parted, ours = record.parted, record.result.generated_ids
        assert (parted.position, parted.ours, parted.plain) == (5, ours[5], (ours[5] - 1) % 50)
        target = r.load(greedy.pairs[0].target, "cpu", "float32")
        text = torch.tensor([record.result.prompt_ids + ours[:5]])
        logits = target.forward(text, target.new_cache(text.shape[1]))[0, -1]
        assert parted.gap == pytest.approx(float(logits[parted.plain] - logits[parted.ours]), abs=1e-4)


# Peers, seen through the same machinery

def test_peers_are_records_as_well(grid):
    methods = ["plain", "transformers", "prompt_lookup"]
    records = r.bench_run(grid.model_copy(update={"methods": methods, "K": [3], "count": 1})).records
    assert {record.decoder_label for record in records} == {"AR", "transformers", "prompt_lookup"}
    plain = {(record.config.prompt, record.config.temperature): record for record in records
             if record.config.method == "plain"}
    for record in records:
        if record.config.method == "plain": continue
        assert record.result.rounds == [] and record.result.drafter == record.config.method
        assert record.result.total_time > 0 and Record.from_json(record.to_json()) == record
        if record.config.temperature == 0:
            assert record.result.generated_ids == plain[record.config.prompt, 0].result.generated_ids


# What is said

def test_figures_are_ratios_of_neighbours(grid, monkeypatch):
    # drafts seem cheap: on a model as small as its draft they would not pay, and an adaptive K would make none
    monkeypatch.setattr(Clock, "prices", lambda self, index, most, size=1: [1 + .09 * n for n in range(1, 1 + most)])
    outcome = r.bench_run(grid)
    def timed(record):
        slow = 1 + record.config.repeat + 10 * (record.config.domain == "chat")  # the machine had a bad time
        each = {"plain": 2.0, "suffix": 1.0, "model": 4.0}[record.config.method]
        return replace(record, result=replace(record.result, total_time=slow * each))
    rows = r.run_figures([timed(record) for record in outcome.records])
    assert {(row["method"], row["speedup"]) for row in rows} == {("plain", 1), ("suffix", 2), ("model", 0.5)}
    for row in rows:
        assert row["runs"] == 2 and (row["alpha"] is None) == (row["method"] == "plain")
        if row["method"] == "model" and row["temperature"] == 0: assert row["alpha"] == 1  # it drafts for itself
    text = r.run_text(outcome)
    assert "small in float32, temperature 1" in text and "adaptive" in text
    acceptance_only = replace(outcome, grid=grid.model_copy(update={"timing": False}))
    table = [line.split() for line in r.run_text(acceptance_only).splitlines() if line.startswith("suffix")]
    assert table and all(row[3:5] == ["-", "-"] for row in table)


def test_acceptance_only_is_marked_and_not_warmed_up(grid, monkeypatch):
    made, true = [], r.decoded
    def counted(bench, run, ids):
        made.append(run.max_new_tokens)
        return true(bench, run, ids)
    monkeypatch.setattr(r, "decoded", counted)
    r.put_away()
    records = r.bench_run(grid.model_copy(update={"timing": False})).records
    assert {record.environment["timed"] for record in records} == {False} and set(made) == {12}


@pytest.mark.parametrize("timing", [True, False])
@pytest.mark.parametrize("freezes", [True, False])
def test_repeats_choose_alike_whatever_the_machine_did_meanwhile(folder, prompts, freezes, timing, tmp_path,
                                                                 monkeypatch):
    "From the second repeat on each row of a forward is dear. Without the freezing the rounds are others: the control."
    row, read, drafted, decoded = [.02], Clock.read, Clock.drafted, r.decoded
    monkeypatch.setattr(Clock, "read", lambda self, size, rows, seconds: read(
        self, size, rows, .01 * (1 + row[0] * (rows - 1))))
    monkeypatch.setattr(Clock, "drafted", lambda self, index, n, seconds: drafted(self, index, n, .001 * n))
    def changing(bench, run, ids):
        row[0] = 2.0 if run.repeat else .02
        return decoded(bench, run, ids)
    monkeypatch.setattr(r, "decoded", changing)
    if not freezes: monkeypatch.setattr(r, "measured", changing)
    r.put_away()
    outcome = r.bench_run(grid_of(folder, prompts, methods=["plain", "model", "skip"], temperatures=[0], repeats=2,
                                  domains=["code"], max_new_tokens=32, timing=timing), tmp_path / "runs.jsonl")
    assert outcome.failed == {}
    chosen = [x for x in outcome.records if x.config.K == "adaptive"]
    alike = {}
    for x in chosen: alike.setdefault((x.config.method, x.config.prompt), []).append(x.result)
    assert len(alike) == 2 and {x.result.costs["origin"] for x in chosen} == {"frozen" if freezes else "clock"}
    assert all((one.rounds == other.rounds and one.costs == other.costs) == freezes for one, other in alike.values())
    assert any(result.num_drafted for result, _ in alike.values())
    said = "What to draft was chosen by frozen prices (model, skip)"
    report = report_sections(read_runs(tmp_path / "runs.jsonl"))[0].words
    assert (said in r.run_text(outcome)) == any(said in words for words in report) == freezes
    assert all(x.result.costs is None for x in outcome.records if x.config.K != "adaptive")  # nothing was chosen


def test_prices_that_are_frozen_know_every_length(folder, prompts, monkeypatch):
    "Runs of another K go by the same clock: the first may draft one token, and those that pay were timed as well."
    read, drafted = Clock.read, Clock.drafted
    monkeypatch.setattr(Clock, "read", lambda self, size, rows, seconds: read(self, size, rows, .01))
    monkeypatch.setattr(Clock, "drafted", lambda self, index, n, seconds: drafted(self, index, n, 1e-4))
    monkeypatch.setattr(r, "drafter_makers", lambda target, *_: {
        "hybrid": lambda: HybridDrafter(ModelDrafter(target, target.vocab_size))})
    monkeypatch.setattr(r, "weights_of", lambda spec, method: dict.fromkeys(("target", "drafter")))
    r.put_away()
    [cell, *_] = cells(grid_of(folder, prompts, methods=["hybrid"], K=[1, 8], temperatures=[0], max_new_tokens=64))
    bench = r.bench_of(cell, "float32")
    found = [r.recorded(bench, cell, run, {}).result for run in cell.runs]
    clock, = bench.pair("hybrid").clocks.values()
    assert max(clock.forwards[1].known) > 9 and found[0].costs == found[1].costs
    assert max(found[0].rounds_by_K) == 1 and max(found[1].rounds_by_K) == 8


def test_events_are_heard_only_by_those_who_asked(grid, capfd):
    small = grid.model_copy(update={"methods": ["plain"], "domains": ["code"]})
    r.bench_run(small)
    assert capfd.readouterr().err == ""
    with r.json_logs(): r.bench_run(small.model_copy(update={"methods": ["plain", "head"]}))
    events = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [event["event"] for event in events] == ["start", "run", "failed", "run", "end"]
    end = events[-1]
    assert events[0]["runs"] == 6 and (end["made"], end["complete"]) == (2, True)  # a head has K of two kinds
    r.bench_run(small)
    assert capfd.readouterr().err == "" and logging.getLogger("specdec.bench").handlers == []


# What must fail is refused before anything is run

@pytest.fixture
def nothing_runs(monkeypatch):
    def never(*_): raise AssertionError("something was run")
    monkeypatch.setattr(r, "do_cell", never)
    monkeypatch.setattr(r, "load", never)


def test_texts_that_do_not_fit_are_refused_before_the_first_run(grid, nothing_runs):
    "The context is of 128 tokens, and a prompt has 11."
    with pytest.raises(InputError, match=r"118 new tokens after the \d+ of prompt code_000 don't fit .* small, 128"):
        r.bench_run(grid.model_copy(update={"max_new_tokens": 118}))


def test_four_bits_that_cannot_be_packed_are_refused_before_the_first_run(prompts, tmp_path, nothing_runs):
    config = json.loads((make_target(tmp_path) / "config.json").read_text()) | {"intermediate_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="can't be packed in four bits.*take int4 out of dtypes"):
        r.bench_run(grid_of(tmp_path, prompts, dtypes=["float32", "int4"]))


def test_a_grid_of_too_many_runs_is_refused_at_once(folder, prompts, nothing_runs):
    start = time.process_time()
    with pytest.raises(InputError, match="This grid means 2,000,000,000 runs, and one file holds at most 100,000"):
        r.bench_run(grid_of(folder, prompts, repeats=10**8))
    assert time.process_time() - start < 5
    with pytest.raises(ValueError, match="seed of the last repeat"): grid_of(folder, prompts, seed=2**32 - 1, repeats=2)


def test_where_every_run_fails_the_command_does_too(folder, prompts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "grid.yaml"
    config.write_text(yaml.safe_dump(grid_of(folder, prompts, methods=["head"]).model_dump(exclude={"timing"})))
    done = CliRunner().invoke(app, ["bench", "run", str(config)], prog_name="specdec")
    assert done.exit_code == 2 and "head, small in float32 is missing: " in done.stdout
    assert "Every run failed" in done.stderr


def test_records_go_to_a_folder_for_them_by_default(folder, prompts, tmp_path, monkeypatch):
    "Named after the configuration; the second time nothing is run, and it says so."
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(grid_of(folder, prompts, methods=["plain"]).model_dump(exclude={"timing"})))
    first, again = (CliRunner().invoke(app, ["bench", "run", str(config)], prog_name="specdec") for _ in range(2))
    assert first.exit_code == again.exit_code == 0 and first.stdout == again.stdout
    made = len(r.read_records(tmp_path / "results" / "small.jsonl"))
    assert f"{made} runs, {made} of them new, in results/small.jsonl" in first.stderr and made > 0
    assert f"{made} runs, 0 of them new, in results/small.jsonl" in again.stderr


def test_a_link_to_a_file_has_its_lock(grid, tmp_path):
    file, link = tmp_path / "r.jsonl", tmp_path / "links" / "r.jsonl"
    link.parent.mkdir()
    link.symlink_to(file)
    hard = tmp_path / "hard.jsonl"
    with r.growing(file):
        hard.hardlink_to(file)
        for name in (link, hard):
            with pytest.raises(InputError, match="Another run is writing"): r.bench_run(grid, name)


@pytest.mark.parametrize("change", ["replaced", "removed", "longer"])
def test_a_file_that_is_changed_meanwhile_ends_the_run(grid, tmp_path, monkeypatch, change):
    file, true, calls = tmp_path / "r.jsonl", r.decoded, []
    def meddling(bench, run, ids):
        if run.max_new_tokens == 12: calls.append(run)
        if len(calls) == 3 and file.exists():
            if change == "longer": file.write_text(file.read_text() + "\n")
            else: file.rename(tmp_path / "elsewhere")
            if change == "replaced": file.write_bytes((tmp_path / "elsewhere").read_bytes())
        return true(bench, run, ids)
    monkeypatch.setattr(r, "decoded", meddling)
    with pytest.raises(InputError, match="r.jsonl was replaced, removed or changed by another program"):
        r.bench_run(grid, file)
    kept, = tmp_path.glob("r.kept-*.jsonl")  # and what was measured is kept
    assert len(calls) < 20 and len(read_records(kept)) == 3


def test_a_file_that_is_changed_after_the_last_run_is_told(grid, tmp_path, monkeypatch):
    file = tmp_path / "r.jsonl"
    def in_turn(work, keep):
        r.in_turn(work, keep)
        file.unlink()
    with pytest.raises(InputError, match="replaced, removed or changed"): r.bench_run(grid, file, in_turn)


# A pair that can't be had

def test_a_pair_that_cannot_be_reached_leaves_the_others(folder, prompts, tmp_path, monkeypatch):
    "The hub is asked once for a pair, and not for each of its prompts; what there is, is measured."
    asked, real = [], r.find_model
    def find(name, *more):
        if name == "some/where":
            asked.append(name)
            raise ModelError("some/where can't be had")
        return real(name, *more)
    monkeypatch.setattr(r, "find_model", find)
    pairs = [grid_of(folder, prompts).pairs[0], GridPair(name="far", target="some/where")]
    some = grid_of(folder, prompts, pairs=pairs, methods=["plain", "suffix"], temperatures=[0], K=[3], count=2)
    outcome = r.bench_run(some, tmp_path / "r.jsonl")
    assert outcome.complete and outcome.made == 2 * 4 and len(asked) <= 2
    assert {record.config.pair for record in outcome.records} == {"small"}
    assert list(outcome.failed) == ["plain, far in float32", "suffix, far in float32"]
    assert "plain, far in float32 is missing: ModelError: some/where can't be had" in r.run_text(outcome)
    monkeypatch.setattr(r, "find_model", real)  # and when it is there again, it is asked for again
    assert r.bench_run(some.model_copy(update={"pairs": pairs[:1]}), tmp_path / "r.jsonl").made == 0
    with pytest.raises(ModelError): r.bench_run(some.model_copy(update={"pairs": pairs[1:]}))


def test_each_pair_that_cannot_be_reached_has_a_line_with_its_reason(tmp_path, monkeypatch):
    "By the shipped configuration, and by the command: exit code 2 and nothing on standard output."
    file, asked = Path(__file__).parents[2] / "configs" / "pairs.yaml", []
    def find(name, *more):
        asked.append(name)
        raise ModelError(f"{name!r} can't be had:\nreason {len(asked)}" + " x" * 900 * (len(asked) == 2))
    monkeypatch.setattr(r, "find_model", find)
    monkeypatch.chdir(tmp_path)
    names = [pair.name for pair in read_grid(file).pairs]
    targets = list(dict.fromkeys(get_pair(name).target for name in names))
    done = CliRunner().invoke(app, ["bench", "run", str(file)])
    assert done.exit_code == 2 and not done.stdout and asked == targets and len(names) == 4
    said = done.stderr.removesuffix("\n").splitlines()
    first = "Error: None of the 4 pairs can be had, so nothing was measured:"
    assert said[0] == first and [line.partition(":")[0] for line in said[1:]] == names
    for name, line in zip(names, said[1:], strict=True):
        target = get_pair(name).target
        began = f"{name}: {target!r} can't be had: reason {1 + targets.index(target)}"
        assert len(line) < 830 and line.startswith(began)
    with pytest.raises(ModelError, match="None of the 4 pairs") as told: r.bench_run(read_grid(file))
    assert str(told.value).count("\n") == 4 and str(told.value).splitlines()[0] == first.removeprefix("Error: ")


def test_a_draft_that_cannot_be_reached_leaves_the_rest_of_its_pair(folder, prompts, monkeypatch):
    asked, real = [], r.find_model
    def find(name, *more):
        if name != "some/draft": return real(name, *more)
        asked.append(name)
        raise ModelError("some/draft can't be had")
    monkeypatch.setattr(r, "find_model", find)
    pair = GridPair(name="far", target=str(folder), draft="some/draft")
    some = grid_of(folder, prompts, pairs=[pair], methods=["plain", "model"], temperatures=[0], K=[3], count=2)
    outcome = r.bench_run(some)
    assert [record.config.method for record in outcome.records] == ["plain"] * 4 and len(asked) == 1
    assert list(outcome.failed) == ["model, far in float32"]
