"""What both benchmarks share: the order of runs, what is kept, what is refused, and the arithmetic. Nothing here
asserts a time."""
import json
import math
import signal
import socket
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from helpers import on_a_disk_of
from specdec.bench import runner as r
from specdec.core import InputError
from specdec.models import prompts


def measured(method: str, prompt: str = "code_0", repeat: int = 0, seconds: float = 1.0, **details) -> r.Measurement:
    return r.Measurement("run", method, prompt, prompt.split("_")[0], repeat, 8, seconds, "t", details)


def peer(ids: list[int], n: int, seed: int): return list(range(n)), {}
def one_id(prompt): return [1]


def jobs(*methods: str, repeats: int = 2) -> list[r.Job]:
    "On two prompts."
    return list(r.interleaved(r.first_prompts(prompts(), 2), repeats, methods))


def runner(methods: dict[str, r.Method], results: r.Results | None = None, tokens: int = 4) -> r.Runner:
    return r.Runner(methods, one_id, tokens, results or r.Results(), "run")


# Order

def test_prompts_take_the_domains_in_turn():
    assert {p.domain for p in r.first_prompts(prompts(), 3)} == {p.domain for p in prompts()}
    assert sorted(p.id for p in r.first_prompts(prompts(), 15)) == sorted(p.id for p in prompts())
    assert r.first_prompts(prompts(), 0) == []


def test_order_is_interleaved_and_takes_turns():
    methods = ["a", "b", "c"]
    every = list(r.interleaved(r.first_prompts(prompts(), 15), 4, methods))
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
    every = list(r.interleaved(r.first_prompts(prompts(), 6), 2, ["A0", "B0", "C0"], ["A1", "B1", "C1"]))
    blocks = [every[i:i + 3] for i in range(0, len(every), 3)]
    assert len(every) == len(set(every)) == 2 * 6 * 6
    assert all(len({(job.repeat, job.prompt.id, job.method[-1]) for job in block}) == 1 for block in blocks)
    assert {block[0].method for block in blocks} == {"A0", "B0", "C0", "A1", "B1", "C1"}  # everyone goes first


def test_without_methods_there_is_nothing_to_do():
    assert jobs() == []
    runner({}).do([])


# Which run it was

def test_other_code_is_another_run(monkeypatch, tmp_path):
    def code(): return r.environment("cpu", "float32")["code"]
    before = code()
    assert before == code()
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "one.py").write_text("x = 1")
    monkeypatch.setattr(r.resources, "files", lambda package: tmp_path)
    changed = code()
    (tmp_path / "notes.txt").write_text("not code")
    assert changed != before and code() == changed
    (tmp_path / "part" / "one.py").write_text("x = 2")  # sub-packages count
    assert code() != changed


def test_environment_names_no_host_and_no_path():
    said = json.dumps(r.environment("cpu", "float32"))
    assert socket.gethostname() not in said and ":/" not in said and '"/' not in said


# Results that are kept

def test_results_come_back_and_go_on(tmp_path):
    file, first = tmp_path / "results.jsonl", measured("plain", seconds=1.5, model_seconds=1.25)
    r.Results(file).add(first)
    file.write_text(file.read_text().rstrip("\n"))  # an editor that drops the last newline
    results = r.Results(file)
    assert results.of("run") == [first] and results.of("other") == []
    results.add(replace(first, repeat=1))
    assert len(r.Results(file).of("run")) == 2 and file.read_text().count("\n") == 2


NAN = math.nan

def wrong(**fields): return json.dumps(asdict(measured("plain")) | fields)
WRONG = wrong(seconds="1.0")

@pytest.mark.parametrize(
    "damage",
    [WRONG, '{"run": "x', '{"run": "x"}', "[]", "", '{"a": 1}', "nonsense", "5", "[" * 10**5, "\xff",
     wrong(seconds=0), wrong(seconds=-1), wrong(seconds=NAN), wrong(seconds=math.inf), wrong(seconds=True),
     wrong(tokens=0), wrong(repeat=-1), wrong(details={"rounds": NAN}), wrong(details={"rounds": "3"})],
    ids=["wrong type", "cut off", "too few fields", "a list", "empty", "other fields", "no JSON", "a number",
         "too deep", "no UTF-8", "no time", "time back", "NaN", "for ever", "a truth", "no tokens", "before the first",
         "NaN inside", "a text inside"],
)
def test_a_damaged_line_is_named(tmp_path, damage):
    file = tmp_path / "results.jsonl"
    r.Results(file).add(measured("plain"))
    with open(file, "a", encoding="latin-1") as f: f.write(damage + "\n")
    before = file.read_bytes()
    with pytest.raises(InputError, match="results.jsonl, line 2"): r.Results(file)
    assert file.read_bytes() == before


def test_a_file_that_cannot_be_used_is_refused(tmp_path):
    with pytest.raises(InputError, match="another file"): r.Results(tmp_path)
    with pytest.raises(InputError, match="another file"): r.Results(tmp_path / "no" / "folder.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="another file"): r.Results(tmp_path / "bytes")
    assert (tmp_path / "bytes").read_bytes() == b"\xff\xfe"
    with pytest.raises(InputError, match="not a file"): r.Results(Path("/dev/full"))


@pytest.mark.parametrize("rest", ['{', '{"run": "r', '{"run": "run", "method": "plain", "sec'])
def test_a_line_torn_by_a_kill_is_cut_off(tmp_path, rest):
    file, first = tmp_path / "results.jsonl", measured("plain")
    r.Results(file).add(first)
    whole = file.read_bytes()
    with open(file, "a") as f: f.write(rest)
    assert r.Results(file).of("run") == [first] and file.read_bytes() == whole


def test_another_file_is_not_taken_for_a_torn_line(tmp_path):
    (tmp_path / "letter").write_text("Dear Sir")
    with pytest.raises(InputError, match="line 1 is not a measurement"): r.Results(tmp_path / "letter")
    assert (tmp_path / "letter").read_text() == "Dear Sir"


def test_details_that_the_report_divides_by_must_be_there(tmp_path):
    file = tmp_path / "results.jsonl"
    def needs(method): return ("rounds",) if method == "plain" else ()
    r.Results(file).add(measured("other"))
    r.Results(file, needs).add(measured("plain", rounds=3))
    assert len(r.Results(file, needs).of("run")) == 2
    for rounds in ({}, {"rounds": 0}):
        r.Results(file).add(measured("plain", repeat=1, **rounds))
        with pytest.raises(InputError, match="line 3 is not a measurement .rounds is not above 0"):
            r.Results(file, needs)
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))


def test_a_full_disk_is_one_line_and_leaves_whole_lines(tmp_path):
    file = tmp_path / "results.jsonl"
    results = r.Results(file)
    results.add(measured("plain"))
    before = file.read_bytes()
    with on_a_disk_of(len(before) + 20):
        with pytest.raises(InputError, match="File too large"): results.add(measured("plain", repeat=1))
    assert file.read_bytes() == before


# The runner

def test_a_rerun_measures_only_what_is_missing(tmp_path):
    calls = []
    def counted(ids, n, seed):
        calls.append((n, seed))
        return peer(ids, n, seed)
    for repeats, seeds in ((2, [0, 0, 1, 1]), (2, []), (3, [2, 2])):
        calls.clear()
        runner({"p": r.timed(counted)}, r.Results(tmp_path / "r.jsonl"), 12).do(jobs("p", repeats=repeats))
        warm_up = [(8, 0), (8, 0)] if seeds else []
        assert calls == warm_up + [(12, seed) for seed in seeds]
    assert [m.method for m in r.Results(tmp_path / "r.jsonl").of("run")].count("p") == 6


def test_what_was_measured_before_an_interrupt_is_kept(tmp_path):
    calls = []
    def interrupted(ids, n, seed):
        calls.append(n)
        if len(calls) == 5: raise KeyboardInterrupt
        return peer(ids, n, seed)
    with pytest.raises(KeyboardInterrupt):
        runner({"p": r.timed(interrupted)}, r.Results(tmp_path / "r.jsonl")).do(jobs("p"))
    # of four: two to warm up, two runs, the interrupt
    assert [m.method for m in r.Results(tmp_path / "r.jsonl").of("run")] == ["startup", "p", "p"]


def test_an_interrupt_that_a_library_takes_for_an_error_is_no_failure():
    def swallowed(ids, n, seed):
        try: signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt: raise ValueError("could not determine the shape") from None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    bench = runner({"p": swallowed})
    try:
        with pytest.raises(KeyboardInterrupt): bench.do(jobs("p"))
    finally: signal.signal(signal.SIGINT, before)
    assert bench.failed == {}


def test_a_method_that_fails_says_why_and_the_rest_goes_on():
    def broken(ids, n, seed): raise RuntimeError("out of\nluck")
    def short(ids, n, seed): return [1], {}
    bench = runner({"broken": r.timed(broken), "short": r.timed(short), "good": r.timed(peer)})
    bench.do(jobs(*bench.methods))
    assert bench.failed == {
        "broken": "RuntimeError: out of luck", "short": "ModelError: It made 1 tokens where 4 were asked for.",
    }
    assert [m.method for m in bench.results.of("run")] == ["startup", "good", "good", "good", "good"]


def test_a_probes_start_up_is_nobodys():
    def broken(ids, n, seed): raise RuntimeError("no such memory")
    def probe(ids, n, seed): return r.Sample(8, 0.5, "", {})
    bench = runner({"good": r.timed(peer), "floor": broken, "probe": probe})
    bench.do(jobs(*bench.methods))
    assert bench.failed == {"floor": "RuntimeError: no such memory"}
    assert sorted(m.method for m in bench.results.of("run")) == ["good"] * 4 + ["probe"] * 4 + ["startup"]


def test_start_up_is_what_the_first_run_takes_longer(monkeypatch):
    clock = iter([0, 40, 40, 41, 41, 42, 42, 43, 43, 44, 44, 45, 45, 46, 46, 47, 47, 48, 48, 49])  # 40 s, then 1 s each
    monkeypatch.setattr(r.time, "perf_counter", lambda: next(clock))
    bench = runner({"p": r.timed(peer)})
    def found(): return [(m.method, m.prompt, m.seconds) for m in bench.results.of("run") if m.repeat == 0]
    expected = [("startup", "p", 39), ("p", "code_000", 1), ("p", "conversation_000", 1)]
    bench.do(jobs("p"))
    assert found() == expected
    bench.do(jobs("p", repeats=3))  # a warm start later doesn't replace it
    assert found() == expected


def test_a_long_reason_is_cut():
    assert r.reason(RuntimeError("a\n b")) == "RuntimeError: a b" and len(r.reason(RuntimeError("word " * 500))) < 310


# Arithmetic

def test_quartiles():
    assert r.quartiles([3]) == (3, 3, 3) and r.quartiles(range(5)) == (1, 2, 3)
    with pytest.raises(InputError, match="nothing"): r.quartiles([])


def test_ratios_are_taken_within_a_repeat():
    runs = [
        measured("a", repeat=0, seconds=1), measured("b", repeat=0, seconds=2),    # 2
        measured("a", repeat=1, seconds=10), measured("b", repeat=1, seconds=15),  # 1.5, on a slower machine
        measured("a", repeat=2, seconds=1), measured("b", repeat=2, seconds=9),    # 9: an outlier
        measured("a", repeat=3), measured("b", "code_1", repeat=3),                # no partners
        measured("startup", "a", seconds=0.0),                                     # nobody asks for its speed
    ]
    assert r.paired_ratios(runs, "a", "b") == {"code_0": 2.0}
    assert r.paired_ratios(runs, "a", "c") == {}


def test_a_step_is_what_comes_after_the_first_token():
    run = measured("plain", seconds=5.0, decode_seconds=3.5)  # 8 tokens: 7 steps
    assert run.steps_per_second == 2 and run.tokens_per_second == 8 / 5
    assert measured("floor", seconds=0.25).steps_per_second == 32


def test_summary_by_domain():
    found = r.summarise(
        {"code_0": 1.0, "code_1": 3.0, "conversation_0": 0.5},
        {"code_0": "code", "code_1": "code", "conversation_0": "conversation"},
    )
    assert (found["median"], found["prompts"], found["above_one"]) == (1.0, 3, 1)
    assert found["domains"]["code"]["median"] == 2.0
    assert found["domains"]["conversation"] == {"low": 0.5, "median": 0.5, "high": 0.5}
    assert r.summarise({}, {}) is None


# What both reports say

def test_what_is_missing_is_said_and_so_is_an_interrupt():
    report = {"failed": {"a": "no luck", "b": "no fuel"}, "complete": False}
    assert r.closing(report, {"a": "A's way"}) == [
        "", "A's way is missing: no luck", "b is missing: no fuel", "Interrupted: this is what there was by then.",
    ]
    assert r.closing({"failed": {}, "complete": True}, {}) == []


@pytest.mark.parametrize("stop", [False, True], ids=["to its end", "interrupted"])
def test_an_interrupt_ends_the_work_only(stop):
    done = []
    def work():
        done.append(1)
        if stop: raise KeyboardInterrupt
        done.append(2)
    assert r.finished(work) is not stop and done == [1, 2][:2 - stop]
