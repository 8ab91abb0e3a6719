"""The comparison of drafters: its order, its figures from made-up measurements, resuming, and one tiny live run of our
side."""
import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from specdec.bench import drafters
from specdec.bench.drafters import (
    DRAFTERS,
    DraftersConfig,
    alphas,
    best_of,
    chosen_prompts,
    counts,
    draft_costs,
    drafter_jobs,
    drafter_peer,
    drafters_text,
    find_drafters,
    held_out_prompts,
    is_asked_for,
    make_drafters_report,
    method_name,
)
from specdec.bench.runner import Measurement, Results, Runner, timed
from specdec.core import InputError, Round
from specdec.drafters.base import Draft, NoDrafter
from specdec.models import prompts
from specdec.protocol import CausalLM


def made_up(method, prompt, repeat, seconds, **details):
    return Measurement("r", method, prompt, prompt.split("_")[0], repeat, 10, seconds, "t", details)


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
    held_out = held_out_prompts()
    every = [*prompts(), *held_out]
    assert len({p.id for p in every}) == len({p.text for p in every}) == 30
    assert all(p.text == p.text.strip() and p.id.startswith(p.domain) for p in held_out)
    assert [p.id for p in chosen_prompts(DraftersConfig(prompts=2, held_out=4))] == [
        "code_000", "conversation_000", "code_005", "conversation_005", "summarization_005", "code_006",
    ]


def test_order_is_interleaved_and_everyone_goes_first():
    config = DraftersConfig(prompts=4, held_out=2, repeats=2, temperatures=(0.0, 1.0))
    methods = [f"{m}@{t}" for t in "01" for m in "ABC"]
    order = list(drafter_jobs(config, methods))
    assert len(order) == len(set(order)) == 2 * 6 * 6
    blocks = [order[i:i + 3] for i in range(0, len(order), 3)]
    assert all(len({(r, p.id, m[-1]) for r, p, m in block}) == 1 for block in blocks)
    assert {block[0][2] for block in blocks} == set(methods)


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

    from specdec.bench import drafters as bench_drafters
    from specdec.cli import app
    config, seen = (
        DraftersConfig(
            drafters=("suffix", "head"), Ks=(2, 5), temperatures=(0.0, 0.7), prompts=3, held_out=2, max_new_tokens=9,
            repeats=1, device="cpu", dtype="float32",
        ),
        [],
    )
    def instead(given, out): return seen.append(given) or {"complete": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_drafters, "bench_drafters", instead)
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
    report = make_drafters_report(ONE, {}, some, {}, True)
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
        ONE, {}, [m for m in others("code_000") if m.method == "plain@0"] + [speculated("head/4@0", "code_000", 1.0)],
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
    assert make_drafters_report(ONE, {}, [], {}, False)["alpha"] == {"0": {}}


def test_the_hybrid_is_compared_with_the_better_of_its_two():
    some = [
        *others("code_000"), speculated("suffix/4@0", "code_000", 1.6), speculated("head/4@0", "code_000", 1.0),
        speculated("hybrid/4@0", "code_000", 1.25),
    ]
    found = make_drafters_report(ONE, {}, some, {}, True)["hybrid_vs_better"]["0"]
    assert found["better"] == "head" and found["median"] == pytest.approx(0.8)


def test_best_of_takes_the_fastest_on_each_prompt_and_repeat():
    some = [
        made_up("a", "code_000", 0, 2.0), made_up("b", "code_000", 0, 1.0), made_up("a", "code_000", 1, 1.0),
        made_up("b", "code_000", 1, 3.0), made_up("c", "code_000", 0, 0.1),
    ]
    assert {(m.method, m.repeat, m.seconds) for m in best_of(some, ["a", "b"], "best")} == {
        ("best", 0, 1.0), ("best", 1, 1.0),
    }


def test_costs_are_ratios_on_the_same_prompt():
    some = [
        *others("code_000"), speculated("head/4@0", "code_000", 1.0, step_seconds=0.05),
        speculated("none/4@0", "code_000", 1.0, step_seconds=0.0),
    ]
    assert (
        draft_costs(some, "head/4@0", "plain@0") == pytest.approx({"code_000": 0.25})
        and draft_costs(some, "none/4@0", "plain@0") == {}
    )
    assert alphas(some, "plain@0") == []


def test_a_run_goes_on_where_it_stopped():
    calls = []
    def good(ids, n, seed):
        calls.append((n, seed))
        return list(range(n)), {"rounds": 1.0}
    def bad(ids, n, seed): raise RuntimeError("out of luck")
    config = DraftersConfig(prompts=1, held_out=1, repeats=2, temperatures=(0.0,), max_new_tokens=12)
    methods = {"good@0": timed(good), "bad@0": timed(bad)}
    runner = Runner(methods, lambda prompt: [1], config.max_new_tokens, Results(), "r")
    runner.do(drafter_jobs(config, methods))
    assert runner.failed == {"bad@0": "RuntimeError: out of luck"}
    assert len(runner.results.of("r")) == 1 + 4  # the start-up, and two prompts twice
    assert calls == [(8, 0), (8, 0), (12, 0), (12, 0), (12, 1), (12, 1)]
    calls.clear()
    runner.do(drafter_jobs(config, ["good@0"]))
    assert calls == []


@pytest.mark.parametrize(
    "method, prompt, repeat, expected",
    [
        ("head/4@0", "code_000", 0, True), ("plain@0", "code_005", 0, True), ("suffix/4@0", "code_000", 0, False),
        ("head/4@1", "code_000", 0, False), ("head/4@0", "code_001", 0, False), ("head/4@0", "code_000", 1, False),
        ("startup", "head/4@0", 0, False),
    ],
    ids=["drafter", "plain", "other drafter", "other temperature", "other prompt", "other repeat", "start-up"],
)
def test_a_report_takes_what_it_was_asked_for(method, prompt, repeat, expected):
    config = DraftersConfig(drafters=("head",), prompts=1, held_out=1, repeats=1, temperatures=(0.0,))
    assert is_asked_for(made_up(method, prompt, repeat, 1.0), config) is expected


def test_drafters_that_cannot_be_had_say_why(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    class Target: vocab_size, device, dtype = 10, torch.device("cpu"), torch.float32
    found, missing = find_drafters(
        DraftersConfig(drafters=("ngram", "suffix", "head", "int4"), head=str(tmp_path)), Target()
    )
    assert set(found) == {"ngram", "suffix"} and set(missing) == {"head", "int4"} and all(missing.values())
    assert (
        "no trained head for other" in find_drafters(DraftersConfig(model="other", drafters=("head",)), Target())[1][
            "head"
        ]
    )
    assert (
        "no trained drafter"
        in find_drafters(DraftersConfig(drafters=("model",), draft=str(tmp_path / "nowhere")), Target())[1]["model"]
    )
    assert {name for some in find_drafters(DraftersConfig(model="other"), Target()) for name in some} == {*DRAFTERS}


class Recital(CausalLM):
    "A target that counts up."
    vocab_size, context_length, device = 50, 100, torch.device("cpu")
    def new_cache(self, capacity):
        from specdec.kvcache import KVCache
        return KVCache(1, capacity)
    def forward(self, ids, cache, last=None, layers=()):
        cache.append(0, torch.zeros(1, 1, ids.shape[1], 1), torch.zeros(1, 1, ids.shape[1], 1))
        logits = 9.0 * torch.nn.functional.one_hot((ids + 1) % 50, 50)
        return logits[:, -last:] if last else logits


class Knows:
    layers = ()
    def prefill(self, tokens, features, limit, eos_ids): self.last = tokens[-1]
    def commit(self, tokens, features): self.last = tokens[-1]
    def propose(self, K, transform, source): return Draft([(self.last + 1 + i) % 50 for i in range(K)])


@pytest.mark.parametrize("t", [0.0, 1.0])
def test_our_peer_counts_what_the_loop_did(t):
    ids, details = drafter_peer(Recital(), Knows(), 3, t)([1, 2, 3], 17, 0)
    assert len(ids) == 17 and details["emitted"] == 16 and details["accepted_1"] <= details["tried_1"]
    if t == 0: assert details["accepted_1"] == details["tried_1"]
    if t == 0: assert ids == list(range(4, 21)) and details["rounds"] == 4 and details["step_seconds"] > 0
    ids, details = drafter_peer(Recital(), NoDrafter(), 1, t)([1, 2, 3], 5, 0)
    assert len(ids) == 5 and details["rounds"] == 4 and details["drafted"] == 0
    assert method_name("head", t, 4) == f"head/4@{t:g}"


@pytest.mark.parametrize(
    "method, details",
    [
        ("plain@0", {}), ("plain@0", {"rounds": 3, "emitted": 3}), ("suffix/2@0", {"rounds": 3}),
        ("plain@0", {"rounds": 0, "emitted": 3, "verify_seconds": 1.0}),
    ],
    ids=["nothing", "no time", "no tokens", "no rounds"],
)
def test_a_measurement_without_what_the_report_needs_is_named(tmp_path, monkeypatch, method, details):
    line = {"run": "r", "method": method, "prompt": "code_000", "domain": "code", "repeat": 0, "tokens": 8}
    line |= {"seconds": 1.0, "text": "t", "details": details}
    (tmp_path / "r.jsonl").write_text(json.dumps(line) + "\n")
    def refuse(*arguments): raise AssertionError("a model was loaded")
    monkeypatch.setattr(drafters, "load", refuse)
    with pytest.raises(InputError, match="r.jsonl, line 1 is not a measurement"):
        drafters.bench_drafters(DraftersConfig(), tmp_path / "r.jsonl")


def test_what_has_no_details_needs_none():
    for method in ("transformers@0", "assisted@1", "startup", "load", "plain"):
        assert drafters.needed_details(method) == ()
def test_numbers_of_numpy_become_plain_ones():
    config = DraftersConfig(prompts=np.int64(2), Ks=(np.int64(3),), temperatures=(np.float32(0.5),))
    plain = DraftersConfig(prompts=2, Ks=(3,), temperatures=(0.5,))
    assert json.dumps(asdict(config)) == json.dumps(asdict(plain)) and config.command == plain.command
