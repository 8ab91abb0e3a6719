"""The figures of a file of records: what was put in comes out, against results taken apart the long way."""
import json
from collections import defaultdict
from statistics import median

import numpy as np
import pytest

from helpers_bench import COSTS, grid, record, write
from specdec.bench.alpha import alpha_by_position, estimate_alpha
from specdec.bench.report import Line, read_runs, study
from specdec.errors import InputError
from specdec.result import Round
from specdec.speedup import tokens_per_round, walltime_factor


@pytest.fixture(scope="module")
def records():
    return grid(prompts=6, methods=("suffix", "model"), Ks=(2, 4, "adaptive"), temperatures=(0.0,), repeats=2)


@pytest.fixture(scope="module")
def known(records, tmp_path_factory):
    return study(read_runs(write(tmp_path_factory.mktemp("made") / "r.jsonl", records)).runs)


def the_line(known, method, K, dtype="float32"):
    return next(line for line in known.runs if (line.method, line.K, line.setting.dtype) == (method, K, dtype))


def rounds_of(records, method, K, dtype="float32"):
    return [Round(**r) for each in records if (each["config"]["method"], each["config"]["K"]) == (method, K)
            and each["config"]["dtype"] == dtype for r in each["result"]["rounds"]]


@pytest.mark.parametrize("method, K", [("suffix", 2), ("model", 4), ("model", "adaptive")])
def test_alpha_and_tau_are_those_of_all_rounds(records, known, method, K):
    rounds, found = rounds_of(records, method, K), known.figures[the_line(known, method, K)]
    assert found.alpha.value == pytest.approx(estimate_alpha(rounds).alpha)
    assert found.tau.value == pytest.approx(sum(len(r.emitted) for r in rounds) / len(rounds))
    columns = known.columns[the_line(known, method, K)]
    by_position, tries = alpha_by_position(rounds)
    np.testing.assert_allclose(columns.tried.sum(0), tries)
    np.testing.assert_allclose(columns.passed.sum(0) / columns.tried.sum(0), by_position)
    assert columns.lengths.sum() == len(rounds) == columns.rounds.sum()


def test_speedups_are_taken_run_by_run_against_the_plain_run_of_the_same_repeat(records, known):
    def rate(each): return len(each["result"]["generated_ids"]) / each["result"]["total_time"]
    def mine(each): return each["config"]["dtype"] == "float32"
    plain = {(c["prompt"], c["repeat"]): rate(each) for each in records if mine(each)
             for c in [each["config"]] if c["method"] == "plain"}
    ratios = defaultdict(list)
    for each in filter(mine, records):
        c = each["config"]
        if (c["method"], c["K"]) == ("model", 4):
            ratios[c["prompt"]].append(rate(each) / plain[c["prompt"], c["repeat"]])
    found = known.figures[the_line(known, "model", 4)].speedup
    assert found.prompts == 18 and found.value == pytest.approx(median(median(some) for some in ratios.values()))


@pytest.mark.parametrize("method", ["suffix", "model"])
def test_costs_come_out_as_they_were_put_in(known, method):
    for K in (2, 4, "adaptive"):
        found = known.figures[the_line(known, method, K)]
        assert found.c.value == pytest.approx(COSTS[method], rel=.02)
        assert found.v.value == pytest.approx(1.15, rel=.02)


@pytest.mark.parametrize("K", [2, 4])
def test_the_prediction_is_the_formula_of_the_speedup_notebook(known, K):
    found = known.figures[the_line(known, "model", K)]
    formula = walltime_factor(found.alpha.value, K, found.c.value, found.v.value)
    assert found.predicted.value == pytest.approx(formula, rel=1e-6)
    assert found.agreement.value == pytest.approx(found.measured.value / found.predicted.value)


def test_rounds_of_all_lengths_are_predicted_by_their_own_lengths(records, known):
    line = the_line(known, "model", "adaptive")
    found, rounds = known.figures[line], rounds_of(records, "model", "adaptive")
    tau = np.mean([tokens_per_round(found.alpha.value, len(r.drafted)) for r in rounds])
    mean = np.mean([len(r.drafted) for r in rounds])
    assert found.predicted.value == pytest.approx(tau / (found.v.value + mean * found.c.value), rel=1e-6)


def test_a_round_without_drafts_gives_one_token():
    from specdec.bench.report import tau_of_lengths
    assert tau_of_lengths(np.array([np.nan]), np.array([[5., 0, 0]])) == [1]
    assert tau_of_lengths(np.array([1.]), np.array([[1., 0, 1]])) == [2]


def test_lines_stand_in_the_order_of_a_report(tmp_path):
    made = grid(1, ("hybrid", "transformers", "suffix"), ("adaptive", 8, 2), (0.0,), ("float32",))
    names = [line.name for line in study(read_runs(write(tmp_path / "r.jsonl", made)).runs).runs]
    assert names[:5] == ["plain", "suffix, K = 2", "suffix, K = 8", "suffix, adaptive", "hybrid, K = 2"]
    assert names[-1] == "transformers, adaptive"
    made = grid(1, ("suffix",), (2,), dtypes=("bfloat16", "int4", "float32"))
    settings = study(read_runs(write(tmp_path / "p.jsonl", made)).runs).settings
    bits = ["float32"] * 2 + ["bfloat16"] * 2 + ["int4"] * 2  # the most first
    assert [setting.dtype for setting in settings] == bits and [s.temperature for s in settings] == [0, 1] * 3


def test_the_best_K_is_the_fastest_and_without_times_the_one_with_most_tokens_a_round(known, records, tmp_path):
    setting = known.settings[0]
    best = {line.method: line for line in known.best(setting)}["model"]
    assert known.figures[best].speedup.value == max(
        known.figures[line].speedup.value for line in known.of(setting) if line.method == "model")
    untimed = [each | {"environment": each["environment"] | {"timed": False}} for each in records]
    alone = study(read_runs(write(tmp_path / "r.jsonl", untimed)).runs)
    found = alone.figures[the_line(alone, "model", 4)]
    assert found.speed is found.speedup is found.c is found.v is found.predicted is None
    assert found.alpha.value == known.figures[the_line(known, "model", 4)].alpha.value
    assert {line.method: line.K for line in alone.best(setting)}["model"] == 4


def test_a_plain_run_whose_time_does_not_count_is_no_partner(records, tmp_path):
    half = [each | {"environment": each["environment"] | {"timed": each["config"]["method"] != "plain"}}
            for each in records]
    mixed = study(read_runs(write(tmp_path / "r.jsonl", half)).runs)
    assert mixed.figures[the_line(mixed, "model", 4)].speedup is None


def test_without_plain_runs_there_is_no_speedup(records, tmp_path):
    ours = [each for each in records if each["config"]["method"] != "plain"]
    alone = study(read_runs(write(tmp_path / "r.jsonl", ours)).runs)
    found = alone.figures[the_line(alone, "model", 4)]
    assert found.speedup is found.c is found.predicted is None and found.speed and found.alpha and found.tau


def test_a_peer_without_rounds_or_latencies_has_a_speedup_only(tmp_path):
    made = grid(6, (), (), (0.0,), ("float32",))
    rng = np.random.default_rng(0)
    for each in list(made):
        peer = record(rng, "transformers", None, each["config"]["prompt"], step=.02)
        peer["result"] |= dict(rounds=[], per_token_latencies=[], round_latencies=[])
        made.append(peer)
    found = study(read_runs(write(tmp_path / "r.jsonl", made)).runs).figures
    peer = next(figures for line, figures in found.items() if line.method == "transformers")
    assert .4 < peer.speedup.value < .6 and peer.alpha is peer.tau is peer.predicted is None


def test_a_run_written_twice_counts_once_and_the_machine_is_told_once(records, tmp_path):
    found = read_runs(write(tmp_path / "r.jsonl", records + records[:5]))
    assert len(found.runs) == len(records) and len(found.machines) == 1 and set(found.loads) == {.4}


def test_a_torn_last_line_is_left_out_and_said(records, tmp_path):
    file = write(tmp_path / "r.jsonl", records[:4])
    whole = file.read_bytes()
    file.write_bytes(whole[:-60])
    found = read_runs(file)
    assert found.torn and len(found.runs) == 3 and file.read_bytes() == whole[:-60]
    assert not read_runs(write(file, records[:4])).torn


def spoilt(change):
    "A good record, spoilt."
    made = record(np.random.default_rng(0), "model", 2)
    change(made, made["result"])
    return json.dumps(made)


BAD = {
    "nothing": ("\n", "line 1"),
    "no JSON": ("spam\n", "line 1"),
    "a list": ("[1]\n", "line 1 .*isn't an object"),
    "another object": ('{"run": "x"}\n', "line 1 .*has no version"),
    "a newer version": (spoilt(lambda m, r: m.update(version=2)) + "\n", "newer specdec.*update specdec"),
    "NaN": (spoilt(lambda m, r: r.update(total_time=float("nan"))) + "\n", "line 1"),
    "infinity": (spoilt(lambda m, r: r["per_token_latencies"].append(1e400)) + "\n", "line 1"),
    "an overflow": (spoilt(lambda m, r: r.update(total_time="HUGE")).replace('"HUGE"', "1e999") + "\n", "finite"),
    "words for a time": (
        spoilt(lambda m, r: r["round_latencies"].append("soon")) + "\n", "round_latencies must be numbers",
    ),
    "a time below 0": (spoilt(lambda m, r: r.update(total_time=-1)) + "\n", "times must be finite"),
    "no tokens": (spoilt(lambda m, r: r.update(generated_ids=[])) + "\n", "without time or tokens"),
    "more accepted than drafted": (spoilt(lambda m, r: r["rounds"][0].update(accepted=9)) + "\n", "accepted more"),
    "NaN where no figure looks": (spoilt(lambda m, r: r.update(prefill_time_ms=float("nan"))) + "\n", "line 1"),
    "half a token accepted": (spoilt(lambda m, r: r["rounds"][0].update(accepted=0.5)) + "\n", "whole number"),
    "no result": (spoilt(lambda m, r: m.pop("result")) + "\n", "line 1 .*result"),
    "no config": (spoilt(lambda m, r: m["config"].pop("pair")) + "\n", "line 1 .*pair' is missing"),
    "cut in the middle": (spoilt(lambda m, r: None)[:300] + "\n" + spoilt(lambda m, r: None) + "\n", "line 1"),
    "bytes": ("\xff\xfe\x00\n", "line 1"),
}


@pytest.mark.parametrize("text, words", BAD.values(), ids=BAD)
def test_what_is_no_record_is_named_with_its_line(text, words, tmp_path):
    file = tmp_path / "r.jsonl"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=words): read_runs(file)


def test_the_line_that_is_named_is_the_bad_one(records, tmp_path):
    file = write(tmp_path / "r.jsonl", records[:3])
    with open(file, "a") as end: end.write('{"version": 1}\n')
    with pytest.raises(InputError, match="line 4"): read_runs(file)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.touch()],
                         ids=["missing", "a folder", "empty"])
def test_a_file_without_runs_is_refused(make, tmp_path):
    make(tmp_path / "r.jsonl")
    with pytest.raises(InputError, match="r.jsonl"): read_runs(tmp_path / "r.jsonl")


def test_a_line_is_told_by_its_method_and_K(known):
    line = the_line(known, "model", 4)
    assert line == Line(line.setting, "model", 4) and str(line.setting) == "smollm2, float32, cpu, 2 threads, T = 0"
