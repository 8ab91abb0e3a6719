"""What all benchmarks share: the order of runs, lines that survive, and the arithmetic. Nothing here asserts a time."""
import json
import socket
from pathlib import Path

import pandas as pd
import pytest

from specdec.bench import run as r
from specdec.bench.grid import interleaved
from specdec.bench.peers import paired_ratios, run_table, spread_of, summarise
from specdec.bench.prompts import first_prompts
from specdec.drafters import costs
from specdec.errors import InputError
from specdec.models.files import GrowingFile
from specdec.models.hub import prompts


def measured(method: str, prompt: str = "code_0", repeat: int = 0, seconds: float = 1.0, **details) -> dict:
    return dict(method=method, prompt=prompt, domain=prompt.split("_")[0], repeat=repeat, tokens=8, seconds=seconds,
                text="t", **details)


# Order

def test_prompts_take_the_domains_in_turn():
    assert {p.domain for p in first_prompts(prompts(), 3)} == {p.domain for p in prompts()}
    assert sorted(p.id for p in first_prompts(prompts(), 15)) == sorted(p.id for p in prompts())
    assert first_prompts(prompts(), 0) == []


def test_order_is_interleaved_and_takes_turns():
    methods = ["a", "b", "c"]
    every = list(interleaved(first_prompts(prompts(), 15), 4, methods))
    assert len(every) == 180 == len(set(every))
    groups = [every[i:i + 3] for i in range(0, len(every), 3)]
    for group in groups:
        assert len({(job.repeat, job.prompt) for job in group}) == 1
        assert {job.method for job in group} == set(methods)
    orders = [[job.method for job in group] for group in groups]
    for one, other in (("a", "b"), ("b", "c"), ("a", "c")):  # neither of two is favoured by always running first
        assert 24 <= sum(order.index(one) < order.index(other) for order in orders) <= 36
    assert all(15 <= sum(order[0] == m for order in orders) <= 25 for m in methods)
    for i in range(15):  # and a prompt's next repeat runs the other way round
        assert [order.index("a") < order.index("b") for order in orders[i::15]].count(True) == 2


def test_groups_of_methods_stay_together():
    every = list(interleaved(first_prompts(prompts(), 6), 2, ["A0", "B0", "C0"], ["A1", "B1", "C1"]))
    blocks = [every[i:i + 3] for i in range(0, len(every), 3)]
    assert len(every) == len(set(every)) == 2 * 6 * 6
    assert all(len({(job.repeat, job.prompt.id, job.method[-1]) for job in block}) == 1 for block in blocks)
    assert {block[0].method for block in blocks} == {"A0", "B0", "C0", "A1", "B1", "C1"}  # everyone goes first


def test_without_methods_there_is_nothing_to_do():
    assert list(interleaved(first_prompts(prompts(), 2), 2, [])) == []


# Which run it was

def test_other_code_is_another_run(monkeypatch, tmp_path):
    def code():
        costs.code_digest.cache_clear()
        return r.environment("cpu", "float32")["code"]
    before = code()
    assert before == code()
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "one.py").write_text("x = 1")
    monkeypatch.setattr(costs.resources, "files", lambda package: tmp_path)
    changed = code()
    (tmp_path / "notes.txt").write_text("not code")
    assert changed != before and code() == changed
    (tmp_path / "part" / "one.py").write_text("x = 2")  # sub-packages count
    assert code() != changed
    costs.code_digest.cache_clear()


def test_environment_names_no_host_and_no_path():
    said = json.dumps(r.environment("cpu", "float32"))
    assert socket.gethostname() not in said and ":/" not in said and '"/' not in said


# Lines that are kept

ONE, TWO = '{"version": 1}', '{"version": 2}'


def lines(file: Path) -> list[bytes]:
    "What the file holds, mended."
    found, torn = r.read_lines(file)
    r.mended(file, torn)
    return found


def test_lines_come_back_and_go_on(tmp_path):
    file = tmp_path / "results.jsonl"
    assert lines(file) == [] and file.read_bytes() == b""
    file.write_text(ONE)  # an editor drops the last newline
    assert lines(file) == [ONE.encode()]
    GrowingFile(file).append(TWO + "\n")
    assert lines(file) == [ONE.encode(), TWO.encode()]


def test_a_file_that_cannot_be_used_is_refused(tmp_path):
    for file in (tmp_path, Path("/dev/full")):
        with pytest.raises(InputError, match="not a file.*another file"): lines(file)
    with pytest.raises(InputError, match="another file"): lines(tmp_path / "no" / "folder.jsonl")


@pytest.mark.parametrize("rest", ['{', '{"version": "r', '{"version": 1, "method": "plain", "sec'])
def test_a_line_torn_by_a_kill_is_cut_off(tmp_path, rest):
    file = tmp_path / "results.jsonl"
    whole = ONE.encode() + b"\n"
    file.write_bytes(whole + rest.encode())
    assert lines(file) == [ONE.encode()] and file.read_bytes() == whole


@pytest.mark.parametrize("rest", ["Dear Sir", '{"ran": 1', TWO, "\xff"],
                         ids=["letter", "other", "whole", "no UTF-8"])
def test_anything_else_is_not_taken_for_a_torn_line(tmp_path, rest):
    file = tmp_path / "letter"
    file.write_bytes(rest.encode("latin-1"))
    assert lines(file) == [rest.encode("latin-1")] and file.read_bytes() == rest.encode("latin-1") + b"\n"


# What is said

def test_a_long_reason_is_cut():
    assert r.reason(RuntimeError("a\n b")) == "RuntimeError: a b" and len(r.reason(RuntimeError("word " * 500))) < 310


# Arithmetic

def test_quartiles():
    assert [*spread_of([3]).values()] == [3, 3, 3] and [*spread_of(range(5)).values()] == [1, 2, 3]


def test_ratios_are_taken_within_a_repeat():
    runs = run_table([
        measured("a", repeat=0, seconds=1), measured("b", repeat=0, seconds=2),    # 2
        measured("a", repeat=1, seconds=10), measured("b", repeat=1, seconds=15),  # 1.5, on a slower machine
        measured("a", repeat=2, seconds=1), measured("b", repeat=2, seconds=9),    # 9: an outlier
        measured("a", repeat=3), measured("b", "code_1", repeat=3),                # no partners
    ])
    assert paired_ratios(runs, "a", "b").to_dict() == {"code_0": 2.0}
    assert paired_ratios(runs, "a", "c").empty


def test_a_step_is_what_comes_after_the_first_token():
    runs = run_table([measured("plain", seconds=5.0, decode_seconds=3.5),  # 8 tokens: 7 steps
                      measured("floor", seconds=0.25)])
    assert [*runs.steps_per_second] == [2, 32] and runs.tokens_per_second[0] == 8 / 5


def test_summary_by_domain():
    found = summarise(
        pd.Series({"code_0": 1.0, "code_1": 3.0, "conversation_0": 0.5}),
        {"code_0": "code", "code_1": "code", "conversation_0": "conversation"},
    )
    assert (found["median"], found["prompts"], found["above_one"]) == (1.0, 3, 1)
    assert found["domains"]["code"]["median"] == 2.0
    assert found["domains"]["conversation"] == {"low": 0.5, "median": 0.5, "high": 0.5}
    assert summarise(pd.Series(dtype=float), {}) is None


# What both reports say

def test_what_is_missing_is_said_and_so_is_an_interrupt():
    def closing(**report): return r.rendered("closing.txt", names={"a": "A's way"}, **report)
    assert closing(failed={"a": "no luck", "b": "no fuel"}, complete=False).splitlines() == [
        "", "A's way is missing: no luck", "b is missing: no fuel", "Interrupted: this is what there was by then.",
    ]
    assert closing(failed={}, complete=True) == ""


@pytest.mark.parametrize("stop", [False, True], ids=["to its end", "interrupted"])
def test_an_interrupt_ends_the_work_only(stop):
    done = []
    def work(cells, keep):
        done.append(1)
        if stop: raise KeyboardInterrupt
        done.append(2)
    assert r.measure([], None, work).complete is not stop and done == [1, 2][:2 - stop]
