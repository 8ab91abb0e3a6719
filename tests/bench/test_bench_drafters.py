"""The comparison of drafters: its order, its figures from made-up times, resuming, and one tiny live run."""
import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from helpers_training import make_target
from specdec.app.registry import PairSpec
from specdec.bench import drafters
from specdec.bench import run as r
from specdec.bench.drafters import (
    DraftersConfig,
    alphas,
    bench_drafters,
    chosen_prompts,
    draft_costs,
    drafters_text,
    drafters_ways,
    make_drafters_report,
    method_name,
    with_best_assisted,
)
from specdec.bench.grid import Way, cells_of
from specdec.bench.methods import DRAFTERS
from specdec.bench.peers import common, counts, run_row, run_table
from specdec.bench.run import read_records
from specdec.errors import InputError
from specdec.models.hub import prompts
from specdec.result import Round


def made_up(method, prompt, repeat, seconds, **details):
    return dict(method=method, prompt=prompt, domain=prompt.split("_")[0], repeat=repeat, tokens=10, seconds=seconds,
                **details)


def speculated(method, prompt, seconds, repeat=0, **more):
    details = (
        dict(rounds=3, emitted=9, drafted=6, step_seconds=0.02, tried_1=3, accepted_1=2, tried_2=2, accepted_2=1) | more
    )
    return made_up(method, prompt, repeat, seconds, **details)


def others(prompt, t="0"):
    return [
        made_up(f"plain@{t}", prompt, 0, 2.0, verify_seconds=1.8, rounds=9),
        made_up(f"transformers@{t}", prompt, 0, 4.0), made_up(f"assisted@{t}", prompt, 0, 8.0),
        made_up(f"prompt_lookup@{t}", prompt, 0, 3.0),
    ]


ONE = DraftersConfig(prompts=1, held_out=1, repeats=1, temperatures=(0.0,), Ks=(2, 4), max_new_tokens=10)


def test_thirty_prompts():
    held_out = prompts("held_out")
    every = [*prompts(), *held_out]
    assert len({p.id for p in every}) == len({p.text for p in every}) == 30
    assert all(p.text == p.text.strip() and p.id.startswith(p.domain) for p in held_out)
    assert [p.id for p in chosen_prompts(DraftersConfig(prompts=2, held_out=4))] == [
        "code_000", "conversation_000", "code_005", "conversation_005", "summarization_005", "code_006",
    ]


def test_order_is_interleaved_and_everyone_goes_first():
    config = DraftersConfig(drafters=("suffix", "head"), Ks=(2, 4), prompts=4, held_out=2, repeats=2, device="cpu")
    ways = drafters_ways(config, "float32")
    some = list(cells_of(PairSpec("smollm2"), "smollm2", ways.values(), chosen_prompts(config), **common(config)))
    every = [run for cell in some for run in cell.runs]
    assert len(some) == 2 * 6 * 2 and len(every) == len({*every}) == len(some) * (1 + 2 * 2 + 3)
    assert all(len({(run.repeat, run.prompt, run.temperature) for run in cell.runs}) == 1 for cell in some)
    assert {(cell.runs[0].method, cell.runs[0].temperature) for cell in some} >= {("plain", 0), ("suffix", 1)}
    assert [cell.prompt.id for cell in some[:12:2]] == [prompt.id for prompt in chosen_prompts(config)]
    assert {run.K for run in every if run.method == "prompt_lookup"} == {4}  # the largest


def test_the_settings_are_ways_and_trained_folders_the_pairs_parts(monkeypatch):
    config = DraftersConfig(head="my-head", draft="my-draft", dtype="float32", device="cpu", prompts=1, held_out=0)
    measured = []
    def noted(cells, out): return measured.extend(cells) or r.Measured()
    monkeypatch.setattr("specdec.bench.peers.measure", noted)
    bench_drafters(config)
    assert {cell.pair for cell in measured} == {PairSpec("smollm2", "my-draft", "my-head")} and len(measured) == 2 * 2
    ways = drafters_ways(config, "float32")
    assert [*dict.fromkeys(way.method for way in ways.values() if way.method in DRAFTERS)] == [*DRAFTERS]
    assert ways["head/4@1"] == Way("float32", "head", 1.0, 4) and {way.dtype for way in ways.values()} == {"float32"}


@pytest.mark.parametrize(
    "wrong",
    [
        dict(prompts=16), dict(prompts=-1), dict(held_out=2.5), dict(prompts=0, held_out=0), dict(Ks=()), dict(Ks=(0,)),
        dict(temperatures=()), dict(temperatures=(-1,)), dict(temperatures=(float("inf"),)), dict(drafters=("magic",)),
        dict(max_new_tokens=1), dict(repeats=0), dict(repeats=True), dict(Ks=(True,)), dict(temperatures=("1",)),
    ],
    ids=lambda wrong: " ".join(f"{name}={value}" for name, value in wrong.items()),
)
def test_settings_are_checked(wrong):
    with pytest.raises(InputError): DraftersConfig(**wrong)


def test_an_unknown_drafter_is_refused_before_anything_is_loaded():
    with pytest.raises(InputError, match="Unknown drafter 'magic': expected one of ngram, suffix"):
        DraftersConfig(drafters=("ngram", "magic"))


def test_the_command_repeats_the_settings():
    from typer.testing import CliRunner

    from specdec.app.cli import app
    config, seen = (
        DraftersConfig(
            drafters=("suffix", "head"), Ks=(2, 5), temperatures=(0.0, 0.7), prompts=3, held_out=2, max_new_tokens=9,
            repeats=1, device="cpu", dtype="float32",
        ),
        [],
    )
    def instead(given, out): return seen.append(given) or {"complete": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafters, "bench_drafters", instead)
        assert CliRunner().invoke(app, config.command.split()[1:]).exit_code == 0
    assert seen == [config]


def test_counts_are_censored_after_a_rejection():
    found = counts([Round([5, 6, 7], 1, [5, 9]), Round([], 0, [4]), Round([1, 2], 2, [1, 2, 3])])
    assert found == dict(
        rounds=3, emitted=6, drafted=5, tried_1=2, accepted_1=2, tried_2=2, accepted_2=1, tried_3=0, accepted_3=0
    )


def test_figures_by_hand():
    some = [
        *others("code_000"), speculated("head/4@0", "code_000", 1.0), speculated("head/2@0", "code_000", 1.5),
        *others("code_005"), speculated("head/4@0", "code_005", 2.0), speculated("head/2@0", "code_005", 1.0),
    ]
    report = make_drafters_report(ONE, {}, run_table(some), {}, True)
    # chosen on the known prompt, though the held-out one would say 2
    assert report["best_K"]["0"]["head"] == 4
    assert (
        report["sets"]["fifteen"]["0"]["head"]["sd_vs_plain"] == 2.0
        and report["sets"]["held_out"]["0"]["head"]["sd_vs_plain"] == 1.0
    )
    row = {
        name: report[name]["0"]["head"]
        for name in ("alpha", "tau", "sd_vs_plain", "sd_vs_transformers", "sd_vs_best_assisted", "c")
    }
    assert row == pytest.approx(
        dict(alpha=2 / 3, tau=3, sd_vs_plain=1.5, sd_vs_transformers=3, sd_vs_best_assisted=2.25, c=0.1)
    )
    assert report["alpha_by_position"]["0"]["head"] == pytest.approx([2 / 3, 1 / 2])
    assert json.loads(json.dumps(report))["alpha"] == report["alpha"]


def test_what_was_not_measured_is_none_and_nothing_falls_over():
    report = make_drafters_report(
        ONE, {}, run_table([*others("code_000")[:1], speculated("head/4@0", "code_000", 1.0)]),
        {"transformers": "gone"}, False,
    )
    assert (
        report["sd_vs_transformers"]["0"]["head"] is None
        and report["sd_vs_plain"]["0"]["head"] == 2
        and report["hybrid_vs_better"]["0"] is None
    )
    text = drafters_text(report | {"environment": dict(dtype="d", processor="p", threads=1)})
    assert "1 prompt and 1 held-out one, 10 tokens each, 1 interleaved repeat\n" in text
    assert "Interrupted" in text and "transformers is missing: gone" in text
    assert make_drafters_report(ONE, {}, run_table([]), {}, False)["alpha"] == {"0": {}}


def test_the_hybrid_is_compared_with_the_better_of_its_two():
    some = [
        *others("code_000"), speculated("suffix/4@0", "code_000", 1.6), speculated("head/4@0", "code_000", 1.0),
        speculated("hybrid/4@0", "code_000", 1.25),
    ]
    report = make_drafters_report(ONE, {}, run_table(some), {}, True)
    found = report["hybrid_vs_better"]["0"]
    assert found["better"] == "head" and found["median"] == pytest.approx(0.8)
    text = drafters_text(report | {"environment": dict(dtype="d", processor="p", threads=1)})
    assert "  hybrid / head, prompt by prompt: 0.80 (code 0.80)" in text


def test_the_best_assisted_is_the_fastest_on_each_prompt_and_repeat():
    some = run_table([
        made_up("assisted@0", "code_000", 0, 2.0), made_up("prompt_lookup@0", "code_000", 0, 1.0),
        made_up("assisted@0", "code_000", 1, 1.0), made_up("prompt_lookup@0", "code_000", 1, 3.0),
        made_up("c@0", "code_000", 0, 0.1),
    ])
    found = with_best_assisted(some, [0.0, 1.0])
    best = found[found.method == "best_assisted@0"]
    assert {*zip(best.repeat, best.seconds)} == {(0, 1.0), (1, 1.0)} and len(found) == len(some) + 2


def test_costs_are_ratios_on_the_same_prompt():
    some = run_table([
        *others("code_000"), speculated("head/4@0", "code_000", 1.0, step_seconds=0.05),
        speculated("none/4@0", "code_000", 1.0, step_seconds=0.0),
    ])
    assert draft_costs(some, "head/4@0", "plain@0").to_dict() == pytest.approx({"code_000": 0.25})
    assert draft_costs(some, "none/4@0", "plain@0").empty
    assert alphas(some[some.method == "plain@0"]) == []


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_precision_that_weights_are_kept_in_is_one_to_compare_in(monkeypatch, dtype):
    "As the command's help says; it was refused, and only when all was measured."
    seen = []
    def measured(cells, out):
        seen.extend(run.dtype for cell in cells for run in cell.runs)
        return r.Measured(complete=True)
    monkeypatch.setattr("specdec.bench.peers.measure", measured)
    report = bench_drafters(replace(ONE, device="cpu", dtype=dtype))
    assert {*seen} == {dtype} == {report["environment"]["dtype"]} and report["complete"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def live(folder, tmp_path_factory):
    "One run of a small random model: its settings, its file, and what the report said."
    config = DraftersConfig(model=str(folder), draft=str(folder), drafters=("suffix", "model", "head"), Ks=(3,),
                            prompts=1, held_out=1, max_new_tokens=9, repeats=1, device="cpu", dtype="float32")
    file = tmp_path_factory.mktemp("run") / "r.jsonl"
    return config, file, bench_drafters(config, file)


def test_a_live_run_of_both_sides(live):
    _, file, report = live
    assert report["complete"] and set(report["failed"]) == {"head"} and "There is no head" in report["failed"]["head"]
    assert set(report["alpha"]["0"]) == set(report["alpha"]["1"]) == {"suffix", "model"}
    assert report["alpha"]["0"]["model"] == 1 and report["tau"]["0"]["model"] == 4  # it drafts for itself
    for name in ("sd_vs_plain", "sd_vs_transformers", "sd_vs_best_assisted", "c"):
        assert report[name]["0"]["model"] > 0
    assert {"plain@0", "suffix/3@1", "assisted@0", "prompt_lookup@1"} <= report["tokens_per_second"].keys()
    assert len(read_records(file)) == 2 * 2 * 6


def test_a_run_goes_on_where_it_stopped(live, monkeypatch):
    config, file, report = live
    monkeypatch.setattr(r, "decoded", lambda *words: pytest.fail("measured again"))
    again = bench_drafters(replace(config, drafters=("suffix", "model")), file)
    assert again["failed"] == {} and again["sets"] == report["sets"]
    assert "head" not in drafters_text(again)


def test_counts_come_from_the_rounds_of_a_record(live):
    records = read_records(live[1])
    for record in records:
        run, rounds = record.config, record.result.rounds
        row = run_row(record, method_name(run.method, run.temperature, run.K if run.method in DRAFTERS else None))
        assert (row["tokens"], row["rounds"]) == (9, len(rounds)) and ("verify_seconds" in row) == bool(rounds)
        assert ("step_seconds" in row) == any(one.drafted for one in rounds)
        if rounds: assert row["emitted"] == 8
        if row["drafted"]:
            in_all = row["step_seconds"] * sum(len(one.drafted) for one in rounds)
            assert in_all == pytest.approx(record.result.draft_time_total_ms / 1000)
    assert {run_row(record, "plain@0")["rounds"] for record in records if record.config.method == "plain"} == {8}


def test_numbers_of_numpy_become_plain_ones():
    config = DraftersConfig(prompts=np.int64(2), Ks=(np.int64(3),), temperatures=(np.float32(0.5),))
    plain = DraftersConfig(prompts=2, Ks=(3,), temperatures=(0.5,))
    assert json.dumps(asdict(config)) == json.dumps(asdict(plain)) and config.command == plain.command
