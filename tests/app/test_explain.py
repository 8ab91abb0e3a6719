"""`specdec explain`: what engines write is read, translated and judged. The lines are real ones: vLLM's, SGLang's and
the newer of llama.cpp's as their trackers show them (vLLM 48915 by llama-swap 1032, sglang 11948 and 30393, llama.cpp
24536), and what xllamacpp wrote here."""
import gzip
import json
import random
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers import examples, tiny
from specdec.app.cli import app
from specdec.app.explain import (
    SUSPECTS,
    TERMS,
    Acceptance,
    break_even,
    explain,
    from_length,
    from_reached,
    of_text,
    read_acceptance,
    whole_K,
)
from specdec.bench import run as bench_run
from specdec.bench.grid import BenchmarkConfig
from specdec.bench.run import Record
from specdec.drafters.choose import HybridDrafter
from specdec.drafters.clock import Clock
from specdec.drafters.model import ModelDrafter
from specdec.errors import InputError
from specdec.pair import Pair
from specdec.result import GenerationResult, Round
from specdec.speedup import tokens_per_round

REQUEST = {"mean_acceptance_length": 1.2325581395348837, "draft_acceptance_rate": 0.07751937984496124,
           "acceptance_histogram": [39, 1, 0, 3], "num_spec_steps": 43, "num_accepted_draft_tokens": 10,
           "num_draft_tokens": 129, "num_spec_tokens": 3}
VLLM = """\
INFO 05-21 21:11:56 [loggers.py:271] Engine 000: Avg prompt throughput: 1503.9 tokens/s, Avg generation throughput: \
50.3 tokens/s, Running: 2 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.0%, Prefix cache hit rate: 0.0%
INFO 05-21 21:11:56 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 3.03, Accepted throughput: 3.87 \
tokens/s, Drafted throughput: 5.72 tokens/s, Accepted: 337 tokens, Drafted: 498 tokens, Per-position acceptance rate: \
0.837, 0.669, 0.524, Avg Draft acceptance rate: 67.7%
"""
VLLM_0 = ("Speculative metrics: Draft acceptance rate: 0.607, System efficiency: 0.510, Number of speculative tokens:"
          " 4, Number of accepted tokens: 32594, Number of draft tokens: 53716, Number of emitted tokens: 34244.")
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:num_requests_running{engine="0",model_name="m"} 4.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 20.0
"""
SGLANG_OLD = "\n".join(
    f"[2025-10-22 10:27:5{i} TP0] Decode batch. #running-req: 1, #token: 186, token usage: 0.00, accept len: {length}, "
    f"accept rate: {rate}, cuda graph: True, gen throughput (token/s): 178.86, #queue-req: 0, "
    for i, (length, rate) in enumerate([("2.17", "0.54"), ("1.95", "0.49"), ("1.80", "0.45"), ("1.57", "0.39")]))
SGLANG = "\n".join(
    f"[2026-08-14 14:02:4{i} TP0] Decode batch, #running-req: 3, #token: 266624, token usage: 0.43, accept len: "
    f"{length}, accept rate: {rate}, pre-allocated usage: 0.26, cuda graph: True, gen throughput (token/s): 183.10"
    for i, (length, rate) in enumerate([("1.67", "0.13"), ("1.68", "0.14"), ("1.73", "0.14")]))
LLAMA = """\
0.06.895.980 I slot print_timing: id  1 | task 0 | prompt eval time =     300.11 ms /    20 tokens (   15.01 ms)
0.06.895.998 I slot print_timing: id  1 | task 0 |        eval time =    2296.72 ms /   256 tokens (    8.97 ms)
0.06.896.015 I slot print_timing: id  1 | task 0 | draft acceptance = 0.64479 (  167 accepted /   259 generated), mean \
acceptance length =  2.92, acceptance rate per position = (0.805, 0.632, 0.483)
0.06.896.057 I statistics     draft-eagle3: #calls(b,g,a) =    1     87     87, #gen drafts =     87, #acc drafts =    \
70, #gen tokens =    259, #acc tokens =   167, #mean acc len = 2.92, #acc rate/pos = (0.805, 0.632, 0.483), dur(b,g,a) \
= 0.005, 325.555, 0.114 ms
"""
LLAMA_OLD = """\
draft acceptance rate = 0.98260 ( 1186 accepted /  1207 generated)
statistics mtp: #calls(b,g,a) = 1 861 690, #gen drafts = 690, #acc drafts = 690, #gen tokens = 1207, \
#acc tokens = 1186, dur(b,g,a) = 0.006, 3112.317, 0.287 ms
"""


def one(text: str) -> Acceptance:
    found = of_text(text)
    assert len(found) == 1
    return found[0]


# --- each engine's words

@pytest.mark.parametrize("around", [
    lambda x: x, lambda x: {"metrics": {"speculative_decoding": x}, "choices": []},
    lambda x: {"data": {"metrics": {"speculative_decoding": x}}},
])
def test_vllm_metrics_of_a_request(around):
    found = one(json.dumps(around(REQUEST)))
    assert (found.engine, found.K, found.rounds, found.drafted, found.accepted) == ("vLLM", 3, 43, 129, 10)
    assert found.alpha == 10 / (10 + 40) and found.tau == pytest.approx(REQUEST["mean_acceptance_length"])
    assert found.rate == pytest.approx(REQUEST["draft_acceptance_rate"])
    assert found.positions == pytest.approx([4 / 43, 3 / 4, 1]) and not found.solved


def test_requests_add_up_and_a_stream_is_read_too():
    lines = "\n".join(f"data: {json.dumps({'metrics': {'speculative_decoding': REQUEST}})}" for _ in range(2))
    found = one(lines + "\ndata: [DONE]\n")
    assert (found.parts, found.rounds, found.accepted) == (2, 86, 20)


def test_vllm_log():
    found = one(VLLM * 2)
    assert (found.parts, found.K, found.running) == (2, 3, 2)
    assert (found.rounds, found.drafted, found.accepted) == (332, 996, 674)
    assert found.tau == pytest.approx(3.03, abs=.005) and found.rate == pytest.approx(.677, abs=.0005)
    assert found.positions == pytest.approx([.837, .669 / .837, .524 / .669])


def test_vllm_metrics_text():
    found = one(METRICS)
    assert (found.form, found.K, found.running, found.tau) == ("/metrics", 3, 4, 2.5)
    assert found.alpha == 150 / (150 + 80) and found.positions == pytest.approx([.8, 5 / 8, 2 / 5])


def test_sglang_log_of_both_formulas():
    old, new = one(SGLANG_OLD), one(SGLANG)
    assert (old.K, new.K, new.running) == (3, 5, 3)
    assert "before April 2026" in old.notes[0] and not any("April" in note for note in new.notes)
    assert old.tau == pytest.approx((2.17 + 1.95 + 1.80 + 1.57) / 4)
    assert old.solved and tokens_per_round(old.alpha, 3) == pytest.approx(old.tau)


@pytest.mark.parametrize("K", [1, 3, 7, 15])
@pytest.mark.parametrize("old", [False, True])
def test_K_from_the_lines_of_sglang(K, old):
    lengths = [1 + K * share for share in (.13, .38, .71)]
    lines = [(round(x, 2), round(x / (K + 1) if old else (x - 1) / K, 2)) for x in lengths]
    assert whole_K(lines)[0] == K


def test_K_that_lines_of_sglang_dont_tell():
    K, note = whole_K([(4.0, 1.0)])
    assert "give more" in note if K is None else K == 3


def test_sglang_meta_info():
    meta = {"spec_verify_ct": 10, "completion_tokens": 25, "spec_accept_token_num": 15, "spec_draft_token_num": 30,
            "spec_accept_length": 2.5, "spec_accept_rate": 0.5, "spec_accept_histogram": [2, 3, 3, 2]}
    found = one(json.dumps({"text": "…", "meta_info": meta}))
    assert (found.K, found.tau, found.rate, found.alpha) == (3, 2.5, .5, 15 / (15 + 8))
    assert found.positions == pytest.approx([8 / 10, 5 / 8, 2 / 5])
    early = one(json.dumps({"meta_info": {"spec_verify_ct": 10, "completion_tokens": 25}}))
    assert (early.tau, early.K, early.alpha) == (2.5, None, None)


@pytest.mark.parametrize("inside", [
    lambda x: {"meta_info": {**x, "completion_tokens": 106}},
    lambda x: {"choices": [], "sglext": {"spec_tokens_details": x}},
], ids=["generate", "chat"])
def test_sglang_under_its_names_of_late_2026(inside):
    "Of DSpark with blocks of 5, from sglang 33518; what both names said is read once."
    today = {"spec_accept_rate": 0.2930232558139535, "spec_accept_length": 2.4651162790697674,
             "spec_num_correct_drafts": 63, "spec_num_proposed_drafts": 215, "spec_verify_ct": 43,
             "spec_correct_drafts_histogram": [11, 14, 11, 4, 0, 3]}
    between = today | {"spec_accepted_drafts": 63, "spec_proposed_drafts": 215,
                       "spec_accept_histogram": today["spec_correct_drafts_histogram"]}
    for answer in (today, between):
        found = one(json.dumps(inside(answer)))
        assert (found.K, found.rounds, found.drafted, found.accepted, found.alpha) == (5, 43, 215, 63, 63 / (63 + 40))
        assert found.tau == pytest.approx(today["spec_accept_length"]) and not found.solved
        assert found.positions == pytest.approx([32 / 43, 18 / 32, 7 / 18, 3 / 7, 1])


def test_llama_log():
    found = one(LLAMA)
    assert (found.engine, found.K, found.rounds, found.drafted, found.accepted) == ("llama.cpp", 3, 87, 259, 167)
    assert found.tau == pytest.approx(2.92, abs=.005) and found.alpha == pytest.approx(167 / (167 + 87 * .517), rel=.01)
    assert found.draft_seconds == pytest.approx(.325555 / 259)
    assert found.seconds_per_token == pytest.approx(2.29672 / 256)


def test_older_llama_log_has_no_positions_and_says_at_least():
    found = one(LLAMA_OLD)
    assert (found.rounds, found.drafted, found.accepted, found.positions) == (690, 1207, 1186, ())
    assert found.alpha == 1186 / (1186 + 690) and "at least" in found.notes[0]


def test_what_xllamacpp_wrote_here():
    "Release 2026.10.11549: ngram-simple and ngram-mod, a server each, two requests; statistics are of all so far."
    log = (Path(__file__).parents[1] / "data" / "llamacpp.log").read_text()
    simple, mod = log[:log.index("0.03.804.821")], log[log.index("0.03.804.821"):]
    found = one(simple)
    assert (found.parts, found.rounds, found.drafted, found.accepted) == (2, 6, 116, 73)
    assert found.tau == pytest.approx(13.17, abs=.005) and found.rate == 73 / 116 and not found.solved
    assert found.positions[:3] == pytest.approx([.833, .667 / .833, .5 / .667])
    assert found.round_seconds is None and "113 plain steps" in found.notes[1]
    assert found.seconds_per_token == pytest.approx((2.28502 + 3.84611) / 192)
    assert (one(mod).rounds, one(mod).drafted, one(mod).accepted, one(mod).tau) == (1, 40, 40, 41)
    tasks = one("\n".join(line for line in simple.splitlines() if "statistics" not in line))
    assert (tasks.drafted, tasks.accepted) == (116, 73) and tasks.rounds == pytest.approx(6, abs=.01)


def test_llama_timings():
    timings = {"draft_n": 8, "draft_n_accepted": 3, "predicted_n": 20, "predicted_ms": 400.0}
    found = one(json.dumps({"timings": timings}))
    assert (found.rate, found.tau, found.seconds_per_token) == (3 / 8, None, .02)
    assert "no rounds" in found.notes[0]


def test_every_engine_has_its_terms():
    for text in (json.dumps(REQUEST), SGLANG, LLAMA):
        told = explain(one(text))
        assert told.terms and {term.engine for term in told.terms} == {told.found.engine}
    assert len({(term.engine, term.name) for term in TERMS}) == len(TERMS)


# --- what can't be read

@pytest.mark.parametrize("text, words", [
    ('{"requests": 3}', ["requests", "is read", "SpecDecoding metrics:"]),
    ("hello\nworld", ["nothing about drafts", "is read"]),
    ("[1, 2]", ["nothing about drafts"]),
    (VLLM_0, ["line 1", "version 0", "SpecDecoding metrics: are read"]),
    (VLLM.splitlines()[1][:-60], ["line 1", "breaks off", "Per-position acceptance rate are read"]),
    (SGLANG.splitlines()[0].split(", accept rate")[0], ["line 1", "breaks off", "accept rate are read"]),
    ("statistics mtp: #calls = 3, #gen dra", ["line 1", "breaks off", "#gen tokens"]),
    ("draft acceptance rate = 0.98260 ( 1186 acc", ["line 1", "breaks off"]),
    ("vllm:spec_decode_num_drafts_total{engine=", ["line 1", "breaks off"]),
    ("vllm:spec_decode_num_drafts_total 3.0", ["per_pos is missing"]),
    ('{"acceptance_histogram": [39, 1', ["no JSON"]),
    (json.dumps(REQUEST) + '\n{"acceptance_hist', ["line 2"]),
    (json.dumps(REQUEST | {"acceptance_histogram": [3, -1]}), ["acceptance_histogram.1", "-1", "would be read"]),
    (json.dumps(REQUEST | {"mean_acceptance_length": 2.5}), ["2.5", "doesn't agree"]),
    (json.dumps(REQUEST | {"acceptance_histogram": [1, 2, 3, 4, 5]}), ["more than K + 1"]),
    (json.dumps(REQUEST | {"acceptance_histogram": [0, 0, 0, 0], "mean_acceptance_length": 1.0}), ["no round"]),
    ('{"spec_verify_ct": 0}', ["nothing was drafted"]),
    ('{"spec_verify_ct": 3}', ["completion_tokens"]),
    ('{"draft_n": 0, "draft_n_accepted": 0}', ["nothing was drafted"]),
    ('{"draft_n": 1, "draft_n_accepted": 2}', ["above draft_n"]),
    ('{"draft_n": "8", "draft_n_accepted": 2}', ["draft_n", "'8'"]),
    ('{"rounds": [], "generated_ids": []}', ["can't be read", "to_json"]),
])
def test_what_cant_be_read_is_named(text, words):
    with pytest.raises(InputError) as error: of_text(text)
    for word in words: assert word in str(error.value)


def test_a_half_line_among_whole_ones_is_named_and_left_out():
    found = one(VLLM + VLLM.splitlines()[1][:-60])
    assert (found.parts, found.accepted) == (1, 337) and "line 3 was left out" in found.notes[0]


def test_files_that_cant_be_read(tmp_path):
    with pytest.raises(InputError, match="There is no file"): read_acceptance(tmp_path / "none")
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(InputError, match="is empty"): read_acceptance(tmp_path / "empty")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="UTF-8"): read_acceptance(tmp_path / "bytes")


# --- ours

def result(accepted, K=3, seconds=.03, draft_ms=3.0, **more) -> GenerationResult:
    rounds = [Round([5] * K, n, [5] * n + [8]) for n in accepted]
    tokens = sum(len(r.emitted) for r in rounds) + 1
    settings = {"K": K}
    return GenerationResult(prompt_ids=[1], generated_ids=[5] * tokens, rounds=rounds, settings=settings,
                            round_latencies=[.1] + [seconds] * len(rounds), is_lossless=True,
                            draft_time_total_ms=draft_ms * len(rounds), **more)


def plain(steps=5, seconds=.02) -> GenerationResult:
    return GenerationResult(prompt_ids=[1], generated_ids=[5] * (steps + 1), rounds=[Round([], 0, [8])] * steps,
                            round_latencies=[.1] + [seconds] * steps)


def test_a_result_is_counted_and_priced():
    told = explain([result([3, 1, 0, 2]), plain()])
    f = told.found
    assert (f.K, f.rounds, f.drafted, f.accepted, f.alpha, f.tau) == (3, 4, 12, 6, 6 / 9, 2.5)
    assert f.positions == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert (told.c, told.v, told.speedup) == pytest.approx((.05, 1.35, 2.5 / 1.5))
    assert tokens_per_round(told.break_even, 3) == pytest.approx(1.5)
    assert explain(result([3, 1, 0, 2])).v is None and explain(result([3, 1, 0, 2]), plain=50).v == pytest.approx(1.35)


SEEN = {"step": .02, "verify": [1.1, 1.2, 1.35, 1.4], "c": [[.05, .05]], "origin": "clock"}


@pytest.mark.parametrize("origin, words", [("clock", "the clock of the run"), ("frozen", "its frozen prices")])
@pytest.mark.parametrize("busy", [1, 3])
def test_a_run_without_a_plain_step_has_what_its_clock_saw(origin, words, busy):
    "On a machine that is busier than the clock saw it S is the same; without costs nothing can be said."
    ours = result([3, 1, 0, 2], seconds=.03 * busy, draft_ms=3 * busy, costs=SEEN | {"origin": origin})
    told = explain(ours)
    assert (told.v, told.c, told.speedup) == pytest.approx((1.35, .05, 2.5 / 1.5)) and told.suspect != "unknown"
    assert f"cost in plain steps (by {words}, as no round was a plain step): v = 1.35" in str(told)
    assert told.best_K == 2 and told.best_speedup == pytest.approx((1 + 3 / 4 + 3 / 4 * 2 / 3) / (1.2 + 2 * .05))
    without = explain(replace(ours, costs=None))
    assert without.speedup is None and without.suspect == "unknown" and "by " not in str(without).splitlines()[6]


def test_what_was_measured_goes_before_the_clock():
    dear = result([3, 1, 0, 2], costs=SEEN | {"step": 9.0, "verify": [50.0]})
    for told in (explain([dear, plain()]), explain(dear, plain=50)):
        assert told.v == pytest.approx(1.35) and "by " not in str(told).splitlines()[6]
    steps = replace(dear, rounds=[*dear.rounds, Round([], 0, [8])], round_latencies=[*dear.round_latencies, .02])
    assert explain(steps).v == pytest.approx(1.35) and "by " not in str(explain(steps)).splitlines()[6]


def test_times_that_a_run_doesnt_tell_are_the_clocks():
    "Of one drafter; of several it isn't known whose turn it was. A target laid out for drafting is slower at plain."
    bare = replace(result([3, 1, 0, 2], draft_ms=0, costs=SEEN), round_latencies=[])
    assert (explain(bare).v, explain(bare).c, explain(bare).speedup) == pytest.approx((1.35, .05, 2.5 / 1.5))
    two = explain(replace(bare, costs=SEEN | {"c": [[0, 0], [.1, .1]]}))
    assert two.speedup is None and explain(replace(bare, costs={"origin": "frozen"})).speedup is None
    assert explain(replace(result([3, 1, 0, 2], costs=SEEN), plain_factor=1.1)).v == pytest.approx(1.1 * 1.35)
    long = explain(result([9, 3], K=9, costs=SEEN))
    assert long.v == pytest.approx(1.4 + 5 * .05)  # as steep as between the last two that were seen


@pytest.mark.parametrize("wrong", [{"step": 0}, {"step": "x"}, {"verify": []}, {"verify": [-1.0]}, {"c": [[.1]]},
                                   {"c": 3}, {"origin": "a table"}, {"step": 10**400}])
def test_costs_that_no_clock_has_are_named(wrong):
    with pytest.raises(InputError, match=f"costs: {next(iter(wrong))}"): explain(result([1], costs=SEEN | wrong))


def test_a_real_run_says_S_without_its_plain_steps(monkeypatch):
    "Its clock is told that drafts are cheap, so it drafts. The plain steps that it timed are taken out of the result."
    read, drafted = Clock.read, Clock.drafted
    monkeypatch.setattr(Clock, "read", lambda self, size, rows, seconds: read(self, size, rows, .01 + .001 * rows))
    monkeypatch.setattr(Clock, "drafted", lambda self, index, n, seconds: drafted(self, index, n, .0001 * n))
    target = tiny(context=512)
    pair = Pair(target, HybridDrafter(ModelDrafter(target.skip([1]), target.vocab_size)))
    ours = pair.generate([1, 2, 3], max_new_tokens=60, ignore_eos=True)
    rounds, times = zip(*((r, t) for r, t in zip(ours.rounds, ours.round_latencies[1:]) if r.drafted))
    only = replace(ours, rounds=[*rounds], round_latencies=[.1, *times])
    told = explain(GenerationResult.from_json(only.to_json()))
    n = only.num_drafted / len(rounds)
    assert 1 <= told.v == pytest.approx(1 + n / 11, rel=.02) and told.speedup > 0
    assert "by the clock of the run" in str(told)


def test_a_plain_result_has_nothing_to_explain():
    with pytest.raises(InputError, match="Nothing was drafted"): explain(plain())
    with pytest.raises(InputError, match="above 0"): explain(result([1]), plain=0)


def test_lines_of_results_and_bench_records(tmp_path):
    some = [result([3, 1, 0, 2]), plain()]
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(f"{r.to_json()}\n" for r in some))
    assert read_acceptance(file)[0] == explain(some).found
    configs = (BenchmarkConfig(pair="p", method="head", K=3), BenchmarkConfig(pair="p"))
    records = [Record(config, result=r) for config, r in zip(configs, some)]
    file.write_text("".join(f"{r.to_json()}\n" for r in records))
    found, = read_acceptance(file)
    assert found.plain_seconds == .02 and "records of head" in found.form and found.tau == 2.5
    file.write_text(records[1].to_json() + "\n")
    with pytest.raises(InputError, match="No run in"): read_acceptance(file)
    file.write_text(records[0].to_json()[:-9] + "\n")
    with pytest.raises(InputError, match="line 1"): read_acceptance(file)


def test_a_lossy_result_is_called_so():
    assert "; lossy" in str(explain(replace(result([1]), is_lossless=False)))


# --- what no run has: sizes, lines, bytes

META = {"spec_verify_ct": 10, "completion_tokens": 25, "spec_accept_token_num": 15, "spec_draft_token_num": 30,
        "spec_accept_length": 2.5, "spec_accept_rate": 0.5, "spec_accept_histogram": [2, 3, 3, 2]}
TIMINGS = {"draft_n": 8, "draft_n_accepted": 3, "predicted_n": 20, "predicted_ms": 400.0}
OURS = json.loads(result([3, 1, 0, 2]).to_json())
HUGE = 10**400


def told(text: str, speed: float | None = None) -> None:
    "All that the command does with a text."
    for each in of_text(text):
        explained = explain(each, speed)
        assert max(map(len, str(explained).splitlines())) < 1000
        json.dumps(explained.as_dict(), allow_nan=False)


@pytest.mark.parametrize("text", [
    *(json.dumps(REQUEST | {"num_spec_tokens": K}) for K in (10**8, 2**32, 10**19, HUGE)),
    json.dumps(REQUEST | {"acceptance_histogram": [HUGE, 1, 0, 3], "mean_acceptance_length": None}),
    json.dumps({"acceptance_histogram": [1] * 5000}),
    *(json.dumps(META | {name: HUGE}) for name in META if name[-4:] != "gram"),
    json.dumps(META | {"spec_draft_token_num": 10**9, "spec_verify_ct": 1}),
    json.dumps(META | {"spec_accept_token_num": 31}),
    *(json.dumps(TIMINGS | {name: HUGE}) for name in TIMINGS),
    *(VLLM.replace("498", number) for number in ("9" * 400, "9" * 5000, "1.2.3")),
    VLLM.replace("0.837, 0.669, 0.524", "."), VLLM.replace("0.669", "7.0"), SGLANG.replace("1.67", "9" * 400),
    METRICS.replace('position="2"', f'position="{"9" * 5000}"'), METRICS.replace("100.0", "1e400"),
    METRICS.replace("80.0", "-80.0"), METRICS.replace("50.0", "90.0"), LLAMA.replace("0.805", "9.0"),
    LLAMA_OLD.replace("690,", "0,"), LLAMA_OLD.replace("drafts = 690", "drafts = " + "9" * 400),
    json.dumps(OURS | {"round_latencies": [HUGE] * 5}), json.dumps(OURS | {"round_latencies": [-1.0] * 5}),
    json.dumps(OURS | {"draft_time_total_ms": 1e308}).replace("1e+308", "NaN"),
])
def test_numbers_that_no_run_has(text):
    "Refused in words, at once, whatever their size; or read without what they stand in."
    begun = time.monotonic()
    try: told(text, 60)
    except InputError as error: assert len(str(error)) < 1000
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize("K", [[3], {"K": 3}, HUGE, -5, 0, True, "adaptive", None])
def test_a_K_that_is_none_is_told_by_the_drafts(K):
    assert one(json.dumps(OURS | {"settings": {"K": K}})).K == 3


@pytest.mark.parametrize("speed", [1e-320, 1e308, HUGE, float("nan"), True])
def test_a_speed_that_no_machine_has(speed):
    with pytest.raises(InputError, match="above 0"): explain(result([1]), plain=speed)


def test_times_that_dont_go_together():
    with pytest.raises(InputError, match="which can't be: give --plain"): explain(result([1], seconds=1e-300), plain=60)


@pytest.mark.parametrize("line", [
    "SpecDecoding metrics: " + "Mean acceptance length: 1 " * 80_000,
    "SpecDecoding metrics: " + "Mean acceptance length: 1 Accepted: 1 tokens, " * 40_000,
    "statistics mtp: #calls " * 90_000, LLAMA_OLD.splitlines()[1] + " #acc rate/pos = (" * 110_000,
    "statistics " + "a" * 2_000_000, "statistics" + " " * 2_000_000, "draft acceptance = " + "1" * 2_000_000,
    "vllm:spec_decode" + "a" * 2_000_000, "vllm:spec_decode" + "{" * 2_000_000, "#gen drafts =" * 150_000,
    *("\n".join([line] * (2_000_000 // len(line))) for line in (VLLM.splitlines()[1], SGLANG.splitlines()[0])),
])
def test_two_megabytes_take_seconds_at_most(line):
    begun = time.monotonic()
    try: told(line)
    except InputError: pass
    assert time.monotonic() - begun < 5


def test_only_a_line_break_ends_a_line():
    "U+2028 and its kin stand in texts, unescaped."
    text = json.dumps({"text": "a\u2028b\x85c", "metrics": {"speculative_decoding": REQUEST}}, ensure_ascii=False)
    assert one(f"{text}\n{text}\r\n{text}").parts == 3
    assert one("\u2028".join(VLLM.splitlines())).parts == 1


def test_a_packed_file_is_unpacked_within_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_run, "MOST_RESULTS", 10**6, raising=False)
    with gzip.open(tmp_path / "zeros.gz", "wb") as file: file.write(bytes(2 * 10**6))
    with pytest.raises(InputError, match="more than 1 MB"): read_acceptance(tmp_path / "zeros.gz")


SEEDS = [VLLM, METRICS, SGLANG, SGLANG_OLD, LLAMA, LLAMA_OLD, *map(json.dumps, (REQUEST, META, TIMINGS, OURS)),
         'sglang:spec_accept_length{a="b"} 2.5\nsglang:spec_accept_rate 0.5\n',
         Record(BenchmarkConfig(pair="p", method="head", K=3), result=result([3, 1, 0, 2])).to_json()]
ODD = ["0", "-1", "1", "0.0", "1e400", "1e308", "5e-324", "100000000", "4294967296", "9" * 30, "9" * 400, "9" * 5000,
       "NaN", "-Infinity", "1.2.3", ".", "٣", "null", "[]", "{}", '"x"', "true", "[[1]]", "0, 0", '{"a": 1}', "3.7"]


def damaged(text: str, draw: random.Random) -> str:
    "With another number, a character too many, a piece missing or repeated."
    for _ in range(draw.choice([1, 1, 2, 3])):
        at, size = draw.randrange(len(text) + 1), draw.randrange(1, 60)
        numbers = list(re.finditer(r"-?\d+(?:\.\d+)?", text))
        match draw.choice(["number"] * 6 * bool(numbers) + ["more", "less", "again"]):
            case "number":
                found = draw.choice(numbers)
                text = text[:found.start()] + draw.choice(ODD) + text[found.end():]
            case "more": text = text[:at] + draw.choice("\u2028\0\x1b\ud800\r\n{[() \",") + text[at:]
            case "less": text = text[:at] + text[at + size:]
            case "again": text = text[:at + size] + text[at:at + size] * draw.choice([1, 50]) + text[at + size:]
    return text


@pytest.mark.parametrize("part", range(4))
@pytest.mark.filterwarnings("error")
def test_whatever_is_in_the_file_is_told_or_refused(part, tmp_path):
    "Never another error, a warning, a hang, or a number that is none."
    file = tmp_path / "file"
    for i in range(examples(800)):
        draw = random.Random(f"{part} {i}")
        text = damaged(draw.choice(SEEDS), draw)
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        begun = time.monotonic()
        try:
            told(text, draw.choice([None, 60, 1e-5]))
            for each in read_acceptance(file): explain(each)
        except InputError as error: assert str(error)
        except Exception as error: raise AssertionError(f"{part} {i}: {text[:2000]!r}") from error
        assert time.monotonic() - begun < 3, (part, i)


# --- what is suspected

def measured(alpha, K, c, v, running=1.0, positions=True) -> Acceptance:
    "A run at these costs, in plain steps of a second."
    reached = [100 * alpha**i for i in range(1, K + 1)]
    found = from_reached(reached, 100, engine="vLLM", form="x", running=running)
    return replace(found, plain_seconds=1.0, round_seconds=v + c * K, draft_seconds=c)


@pytest.mark.parametrize("found, suspect", [
    (measured(.05, 3, .05, 1.1), "doesn't fit"),
    (measured(.25, 3, .05, 1.1), "cold drafter"),
    (measured(.6, 4, .5, 1.1), "draft too dear"),
    (measured(.6, 4, .02, 4.0, running=16), "batch too large"),
    (measured(.6, 4, .02, 4.0), "fixed cost a round"),
    (measured(.5, 12, .06, 1.3), "K too long"),
    (measured(.8, 4, .05, 1.2), "none"),
    (from_length(2.5, 3, engine="SGLang", form="x"), "unknown"),
])
def test_the_first_suspect(found, suspect):
    told = explain(found)
    assert told.suspect == suspect and suspect in SUSPECTS and f"Suspect first: {suspect}" in str(told)


def test_break_even_and_best_K():
    assert break_even(.9, 3) == 0 and break_even(4.5, 3) is None
    assert tokens_per_round(break_even(2.2, 3), 3) == pytest.approx(2.2)
    assert explain(measured(.3, 4, .9, 2.0)).best_K == 0
    told = explain(measured(.8, 4, .05, 1.2))
    assert told.best_K > 4 and told.best_speedup > told.speedup


# --- the command

def run(*arguments):
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


def test_the_command(tmp_path):
    file = tmp_path / "log.txt"
    file.write_text(LLAMA)
    said = run(file, "--plain", 60)
    assert said.exit_code == 0 and len([x for x in said.stdout.splitlines() if not x.startswith("Note")]) == 10
    data = json.loads(run(file, "--plain", 60, "--json").stdout)
    assert data[0]["found"]["rounds"] == 87 and data[0]["suspect"] in SUSPECTS and data[0]["terms"]
    assert data[0]["speedup"] == pytest.approx(2.2967**-1 * 256 / 60, rel=.01)


ESCAPE = "\x1b]0;owned\x07\x9b31m\u202e"


@pytest.mark.parametrize("text", [
    json.dumps({f"a{ESCAPE}": 1}), json.dumps(REQUEST | {"acceptance_histogram": ESCAPE}),
    Record(BenchmarkConfig(pair=f"p{ESCAPE}", method="head", K=3), result=result([3, 1, 0, 2])).to_json(),
    json.dumps({"rounds": [{ESCAPE: 1}]}),
])
def test_escape_sequences_of_a_file_dont_reach_the_terminal(text, tmp_path):
    file = tmp_path / "a\x1b[31mb"
    file.write_text(text)
    said = run(file)
    assert said.exit_code in (0, 2) and not set("\x1b\x07\x9b\u202e") & set(said.stdout + said.stderr)
    assert "\\x1b" in said.stdout + said.stderr


def test_the_command_refuses_in_a_line(tmp_path):
    file = tmp_path / "log.txt"
    file.write_text("nothing here")
    said = run(file)
    assert said.exit_code == 2 and said.stderr.startswith("Error: ") and len(said.stderr.splitlines()) == 1
