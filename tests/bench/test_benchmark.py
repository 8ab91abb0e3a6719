"""The comparison with peers: its figures, its probes, what it refuses. Nothing here asserts a time."""
import hashlib
import json
import math
import re
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from helpers_hub import write_gguf
from specdec.app.cli import ExitCode, app
from specdec.app.registry import PairSpec
from specdec.bench import methods as m
from specdec.bench import peers as b
from specdec.bench import run as r
from specdec.bench.methods import llamacpp_missing
from specdec.bench.prompts import first_prompts
from specdec.bench.report import read_runs
from specdec.bench.run import environment
from specdec.cache import cache_bytes
from specdec.errors import InputError, ModelError
from specdec.models.hub import fetch, load_tokenizer, prompts
from specdec.models.loading import load

SMALL = b.PeersConfig(prompts=2, max_new_tokens=4, repeats=2)
LLAMACPP = {name for name, way in b.WAYS.items() if way.method in m.LLAMACPP}
EVERYWHERE = {name for name, way in b.WAYS.items() if way.everywhere}  # in several precisions
THERE = {name for name in b.METHODS if not b.precision(name)} - LLAMACPP  # in one precision, without llama.cpp
THEIRS = {"transformers", "compiled", "prompt_lookup", "assisted", "prefill_transformers"}
ABSENT = {"llama.cpp": "not installed"}  # as `quick` pretends


def run_of(
    method: str, prompt: str, repeat: int, seconds: float, model_seconds: float = 0.0, text: str = "t", **more
) -> dict:
    return dict(method=method, prompt=prompt, domain=prompt.split("_")[0], repeat=repeat, tokens=8, seconds=seconds,
                text=text, model_seconds=model_seconds, **more)


def probed(method: str, prompt: str, repeat: int, tokens: int, seconds: float, **details) -> dict:
    return dict(method=method, prompt=prompt, domain=prompt.split("_")[0], repeat=repeat, tokens=tokens,
                seconds=seconds, text="", **details)


# Settings

@pytest.mark.parametrize(
    "wrong",
    [
        dict(prompts=0), dict(prompts=16), dict(repeats=0), dict(max_new_tokens=1), dict(max_new_tokens=0), dict(K=0),
        dict(K=1.5), dict(K=True),
    ],
    ids=lambda wrong: " ".join(f"{name}={value}" for name, value in wrong.items()),
)
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(InputError, match=f"{next(iter(wrong))} must be a whole number of at least"):
        b.PeersConfig(**wrong)


def test_more_prompts_than_there_are_names_the_limit():
    with pytest.raises(InputError, match="at most 15, not 16"): b.PeersConfig(prompts=16)


def cells(config, ways):
    "The cells of a comparison with peers."
    chosen = first_prompts(prompts(), config.prompts)
    return list(b.cells_of(PairSpec(config.model), config.model, ways.values(), chosen, apart=False,
                           **b.common(config)))


def runs_of(config):
    "Everything that is run, on a CPU in float32."
    some = cells(config, b.peers_ways(config, "float32")[0])
    runs = [run for cell in some for run in cell.runs]
    assert len(some) == config.prompts * config.repeats and len(runs) == len({*runs})
    return {*runs}


def test_more_of_the_same_is_the_same_and_more():
    config = replace(SMALL, device="cpu")
    few, more = runs_of(config), runs_of(replace(config, repeats=3, prompts=4))
    assert few < more and not few & runs_of(replace(config, max_new_tokens=5))
    assert {run.method for run in few - runs_of(replace(config, K=2))} == {"ngram", "prompt_lookup"}
    assert sum(run.method == "memory" for run in more) == 1  # it is asked for once


def test_methods_of_one_precision_are_neighbours(monkeypatch):
    monkeypatch.setattr(b, "llamacpp_missing", lambda: None)
    config = replace(SMALL, device="cpu", repeats=1)
    ways, missing = b.peers_ways(config, "float32", leave_out=["assisted"])
    assert missing == {"assisted": b.LEFT_OUT} and {name for name in b.METHODS if name not in ways} == {
        "assisted", *(f"{name}_float32" for name in EVERYWHERE)}
    for cell in cells(config, ways):
        dtypes = [run.dtype for run in cell.runs]
        assert sorted(dtypes, key=[*dict.fromkeys(dtypes)].index) == dtypes and len({*dtypes}) == 3
        assert {run.prompt for run in cell.runs} == {cell.prompt.id}
    other = b.peers_ways(replace(config, model="elsewhere"), "float32")[0]
    assert {name for name in ways if name not in other} == {
        f"llamacpp_eagle3{end}" for end in ("", "_bf16", "_int4")}  # its head was trained for one model


# Arithmetic

def test_the_floor_is_that_of_the_neighbourhood():
    runs = []
    for repeat, slow in ((0, 1.0), (1, 2.0)):  # a slow moment: the same ratios
        runs += [
            run_of("plain", "code_0", repeat, 9, decode_seconds=7.0 * slow),
            probed("floor", "code_0", repeat, 1, 0.5 * slow), probed("verify8", "code_0", repeat, 8, 1.5 * slow),
        ]
    # no partners
    runs += [probed("floor", "code_0", 2, 1, 100.0), run_of("plain", "code_1", 0, 9, decode_seconds=7.0)]
    runs = b.run_table(runs)
    assert b.paired_ratios(runs, *b.RATIOS["plain_vs_floor"]).to_dict() == {"code_0": 0.5}
    assert b.paired_ratios(runs, *b.RATIOS["verify8_vs_floor"]).to_dict() == {"code_0": 3.0}


def test_prefill_above_one_means_ours_is_faster():
    runs = [probed("prefill", "code_0", 0, 1024, 2.0), probed("prefill_transformers", "code_0", 0, 1024, 3.0)]
    ratios = b.paired_ratios(b.run_table(runs), *b.RATIOS["prefill_vs_transformers"])
    assert ratios.to_dict() == {"code_0": pytest.approx(1.5)}


def test_floor_figures_show_the_spread_of_the_bandwidth():
    runs = [
        probed("floor", f"code_{i}", 0, 1, 10 / rate, nbytes=10, bandwidth=rate)
        for i, rate in enumerate((2.0, 4.0, 8.0))
    ]
    assert b.floor_figures(b.run_table(runs)) == {
        "weight_bytes": 10, "bandwidth": {"median": 4.0, "quartiles": [3.0, 6.0]}, "measured": 3, "seconds": 2.5,
    }
    assert b.floor_figures(b.run_table([])) is None


def test_overhead_is_the_time_outside_the_models():
    runs = [
        run_of("ngram", "code_0", 0, 2, 1.9), run_of("ngram", "code_1", 0, 1, 1), run_of("plain", "code_0", 0, 1, 0),
    ]
    assert b.overheads(b.run_table(runs)).to_dict() == pytest.approx({"code_0": 0.05, "code_1": 0.0})


SECONDS = {"plain": 1.0, "ngram": 1.25, "transformers": 2.5, "prompt_lookup": 1.0, "compiled": 0.5, "assisted": 10.0}
SECONDS |= {"speculative": 0.5, "plain_sampled": 1.2, "speculative_sampled": 1.0}
SECONDS |= {"llamacpp": 0.8, "llamacpp_eagle3": 0.6}
SECONDS |= {"plain_int4": 0.4, "speculative_int4": 0.5, "llamacpp_int4": 0.5, "llamacpp_ngram-mod_int4": 0.6}


def full_report(plain: float = 1.0, memory: int = 120) -> dict:
    where = [(prompt, repeat) for prompt in ("code_0", "conversation_0") for repeat in (0, 1)]
    # 10 steps/s
    runs = [
        run_of(method, *at, s, 0.98 * s, decode_seconds=0.7 * s)
        for method, s in (SECONDS | {"plain": plain}).items()
        for at in where
    ]
    for at in where:
        runs += [
            probed("floor", *at, 1, 0.05, nbytes=100, bandwidth=2000.0), probed("verify8", *at, 8, 0.1),
            probed("prefill", *at, 1024, 2.0), probed("prefill_transformers", *at, 1024, 1.0),
            probed("prefill_llamacpp", *at, 1024, 3.0),
        ]
    runs.append(probed("memory", "code_0", 0, 128, 0.0, after_imports=50, peak=50 + memory, weights=80, cache=20))
    first = next(i for i, run in enumerate(runs) if run["method"] == "compiled")
    for i, start in ((first, {"load": 2.0, "first_run": 40.0}), (first + 1, {"load": 0.1, "first_run": 0.2})):
        runs[i] |= start  # it was started a second time, warmer
    return b.make_report(SMALL, environment("cpu", "float32"), b.run_table(runs), {}, True)


def test_report_counts_wins_and_losses_alike():
    report = full_report()
    assert report["ratios"] == pytest.approx({
        "plain_vs_transformers": 2.5, "plain_vs_compiled": 0.5, "plain_vs_floor": 0.5, "verify8_vs_floor": 2,
        "prefill_vs_transformers": 0.5, "ngram_vs_plain": 0.8, "ngram_vs_prompt_lookup": 0.8, "ngram_vs_assisted": 8,
        "overhead": 0.02, "memory_vs_model": 1.2,
        # the run's own dtype is float32
        "plain_float32_vs_llamacpp_float32": 0.8, "plain_bf16_vs_llamacpp_bf16": None,
        "plain_int4_vs_llamacpp_q4": 1.25,
        "plain_int4_vs_transformers": 6.25, "prefill_vs_llamacpp": 1.5, "speculative_vs_plain": 2,
        "speculative_vs_plain_float32_greedy": 2, "speculative_vs_plain_float32_sampled": 1.2,
        "speculative_vs_plain_int4_greedy": 0.8, "speculative_vs_plain_int4_sampled": None,
        "speculative_vs_plain_bf16_greedy": None, "speculative_vs_plain_bf16_sampled": None,
        "speculative_vs_plain_worst": 0.8,
        # drafts help us in float32 and not in int4; them as well
        "best_vs_llamacpp_best_float32": 1.2, "best_vs_llamacpp_best_int4": 1.25, "best_vs_llamacpp_best_bf16": None,
        "best_vs_llamacpp_best": 1.2,
    })
    assert report["spread"]["ngram_vs_plain"]["above_one"] == 0 and report["startup_seconds"] == {
        "compiled": {"load": 2.0, "first_run": 40.0}
    }
    text = b.report_text(report)
    assert (
        all(name in text for name in report["ratios"])
        and all(b.METHODS[name] in text for name in SECONDS)
        and "0 of 2" in text
        and "42.0 s" in text
    )
    assert "at 0.0 GB/s" in text and "measured 4 times" in text


def test_report_is_json_and_says_what_is_missing():
    report = b.make_report(
        SMALL, environment("cpu", "float32"), b.run_table([]),
        {"transformers": "ImportError: no", "floor": "RuntimeError: too small"}, False,
    )
    assert (
        json.loads(json.dumps(report)) == report
        and set(report["ratios"].values()) == {None}
        and report["floor"] is None
    )
    text = b.report_text(report)
    assert (
        text.count("not measured") == len(report["ratios"])
        and "ImportError: no" in text
        and "the weights once is missing: RuntimeError" in text
        and "Interrupted" in text
    )


def test_columns_stand_below_each_other():
    lines = b.report_text(full_report()).splitlines()
    for starts, number in (
        (("tokens/s", "specdec,", "transformers "), r"\d+\.\d"), (("ratio", *b.RATIOS), r"(?:\d+\.\d{3}|-)"),
    ):
        rows = [line for line in lines if line.startswith(starts)]
        assert len(rows) > 5 and len({re.search(rf" (median|{number})(?= |$)", line).end() for line in rows}) == 1


def test_methods_are_listed_in_one_order():
    runs = [run_of(method, "code_0", 0, 1) for method in ("mine", *reversed(b.METHODS))]
    assert list(b.method_figures(b.run_table(runs), {"code_0": "code"})) == [*b.METHODS, "mine"]


def test_equal_texts_are_counted():
    runs = [
        run_of("plain", "code_0", 0, 1, text="x"), run_of("ngram", "code_0", 0, 1, text="x"),
        run_of("plain", "code_1", 0, 1, text="y"), run_of("ngram", "code_1", 0, 1, text="z"),
    ]
    figures = b.method_figures(b.run_table(runs), {"code_0": "code", "code_1": "code"})
    assert (figures["plain"]["texts_equal_to_plain"], figures["ngram"]["texts_equal_to_plain"]) == (2, 1)
    assert figures["plain"]["repeats_vary_by"] is None  # one repeat says nothing about noise


class Shortened:
    "A model that fails while it drafts with its first layers."
    device = torch.device("cpu")
    def __init__(self): self.config = type("Config", (), {"num_hidden_layers": 30})()
    def generate(self, *args, assistant_early_exit, **options):
        self.config.num_hidden_layers = assistant_early_exit
        raise KeyboardInterrupt


def test_an_early_exit_that_breaks_leaves_the_model_whole():
    model = Shortened()
    with pytest.raises(KeyboardInterrupt): m.transformers_peer(model, assistant_early_exit=4)([1], 2)
    assert model.config.num_hidden_layers == 30


def test_compile_folder_is_put_back(monkeypatch):
    import os
    for before in (None, "mine"):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if before: monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
        with pytest.raises(RuntimeError), m.compile_folder("other"):
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "other"
            raise RuntimeError
        assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


# Probes

class Counting:
    "A model that only notes what it was asked."
    device = torch.device("cpu")
    def __init__(self): self.seen = []
    def new_cache(self, capacity): return Cache(capacity)
    def forward(self, ids, cache, last=None):
        self.seen.append((cache.length, ids.shape[1], last))
        cache.length += ids.shape[1]
        assert cache.length <= cache.capacity
        return torch.zeros(1, last or ids.shape[1], 3)


class Cache:
    def __init__(self, capacity): self.capacity, self.length = capacity, 0
    def rollback(self, length): self.length = length


def test_verifying_stands_on_the_prompt_and_asks_for_all_logits():
    model = Counting()
    tokens, seconds, details = m.verify_probe(model, repeats=3)([5, 6, 7])
    assert (tokens, details) == (8, {}) and seconds > 0
    assert model.seen == [(0, 3, 1)] + [(3, 8, None)] * 3


def test_prefill_reads_a_thousand_tokens_for_the_last_logits():
    model = Counting()
    tokens, seconds, _ = m.specdec_probes(model, 1)["prefill"]([5, 6, 7])
    assert tokens == 1024 and seconds > 0 and model.seen == [(0, 1024, 1)]
    seen = []
    m.prefill_probe(lambda ids: seen.append(ids) or torch.zeros(1, 1, 1), tokens=7)([5, 6, 7])
    assert seen[0].tolist() == [[5, 6, 7, 5, 6, 7, 5]]


def test_the_floor_probe_divides_bytes_by_bandwidth(monkeypatch):
    monkeypatch.setattr(m, "memory_bandwidth", lambda device: 4e9)
    assert m.floor_probe(10**9, torch.device("cpu"))([1]) == (1, 0.25, {"nbytes": 10**9, "bandwidth": 4e9})


# A tiny model, end to end

@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    "A folder with a random model and the default model's tokenizer."
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=49152, tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    load_tokenizer(fetch()).save_pretrained(folder)
    return folder


@pytest.fixture
def quick(monkeypatch):
    "No child processes, a pretend bandwidth, and a `torch.compile` that only notes what it was asked."
    figures = {"after_imports": 1, "peak": 4, "weights": 2, "cache": 1}
    monkeypatch.setattr(m, "memory_in_child", lambda *words: figures)
    monkeypatch.setattr(m, "memory_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(b, "llamacpp_missing", lambda: ABSENT["llama.cpp"])
    monkeypatch.setattr(b, "COMPARED", {"float32": "float32"})
    compiled = []
    monkeypatch.setattr(
        torch,
        "compile",
        lambda work=None, **options: compiled.append(options)
        or (lambda *args, **more: compiled.append("step") or work(*args, **more)),
    )
    return compiled


def test_a_tiny_run_from_end_to_end(tiny, tmp_path, monkeypatch, quick):
    config = b.PeersConfig(model=str(tiny), dtype="float32", prompts=2, max_new_tokens=12, repeats=2)
    report = b.bench_peers(config, tmp_path / "r.jsonl")
    assert (
        report["complete"]
        and report["failed"] == ABSENT
        and set(report["methods"]) == THERE == set(report["startup_seconds"])
    )
    assert all(
        set(start) == {"load", "first_run"} and start["load"] > 0 for start in report["startup_seconds"].values()
    )
    others = ("llamacpp", "int4", "bf16")  # of other engines and precisions
    assert all((value is None) == any(other in name for other in others) for name, value in report["ratios"].items())
    assert report["ratios"]["memory_vs_model"] == 1
    # float32: the same greedy tokens everywhere
    assert all(
        figures["texts_equal_to_plain"] == (None if "sampled" in name else 2)
        for name, figures in report["methods"].items()
    )
    assert 0 < report["ratios"]["overhead"] < 1
    parameters = sum(p.numel() for p in LlamaForCausalLM.from_pretrained(tiny).parameters())  # tied ones once
    assert report["floor"] == {
        "weight_bytes": 4 * parameters, "bandwidth": {"median": 1e9, "quartiles": [1e9, 1e9]}, "measured": 4,
        "seconds": pytest.approx(4 * parameters / 1e9, abs=1e-6),
    }
    # compiled once, and every step but the prompt's goes through it
    assert quick[0]["mode"] == "reduce-overhead" and quick.count("step") == len(quick) - 1 == 2 * 7 + 4 * 11
    there = read_runs(tmp_path / "r.jsonl").runs  # the page is made of texts only
    assert {run.method for run in there} == {b.WAYS[name].method for name in THERE} and len(there) == 4 * len(THERE)
    monkeypatch.setattr(r, "decoded", lambda *words: pytest.fail("measured again"))
    again = b.bench_peers(config, tmp_path / "r.jsonl")
    assert again == report


def test_the_best_mode_is_chosen_over_all_prompts():
    "Not anew for each, which would flatter the side with more modes."
    seconds = {"plain": (1.0, 4.0, 4.0), "speculative": (2.0, 1.0, 1.0), "llamacpp": (2.0, 2.0, 2.0)}
    runs = [run_of(method, f"code_{i}", 0, s) for method, some in seconds.items() for i, s in enumerate(some)]
    found = b.best_ratios(b.run_table(runs), "bfloat16")
    assert {name: ratios.to_dict() for name, ratios in found.items()} == {
        "best_vs_llamacpp_best_int4": {}, "best_vs_llamacpp_best_float32": {},
        "best_vs_llamacpp_best_bf16": {"code_0": 1.0, "code_1": 2.0, "code_2": 2.0},
    }


def test_where_texts_of_the_other_engine_leave_ours():
    runs = [
        run_of("llamacpp", f"code_{i}", 0, 1, parted_at=at, parted_gap=gap)
        for i, (at, gap) in enumerate(((8, 0.0), (5, 0.25), (2, 0.5)))
    ]
    found = b.partings(b.run_table(runs))
    assert found == {"prompts": 2, "of": 3, "earliest": 2, "median_gap": 0.375, "largest_gap": 0.5}
    assert b.partings(b.run_table([run_of("plain", "code_0", 0, 1)])) is None
    report = full_report()
    report["methods"]["llamacpp"]["parted"], report["methods"]["plain"]["parted"] = found, found | {"prompts": 0}
    lines = b.report_text(report).splitlines()
    at = lines.index("specdec, plain: its text leaves ours on 0 of 3 prompts")
    assert lines[at - 1] == "" and lines[at + 1] == (
        "llama.cpp, plain: its text leaves ours on 2 of 3 prompts, first at token 2; logit gap 0.38 in the median,"
        " at most 0.5") and len(lines) == at + 2


@pytest.mark.skipif(bool(llamacpp_missing()), reason=str(llamacpp_missing()))
def test_the_real_engine_beside_ours_in_three_precisions(tiny, monkeypatch, quick):
    monkeypatch.setattr(b, "llamacpp_missing", llamacpp_missing)
    monkeypatch.setattr(b, "COMPARED", {"float32": "float32", "bfloat16": "bf16", "int4": "int4"})
    modes = ["llamacpp_ngram-cache", "llamacpp_ngram-simple", "llamacpp_ngram-mod"]
    unwanted = [name + end for name in modes for end in ("", "_bf16", "_int4")]
    config = b.PeersConfig(model=str(tiny), dtype="float32", prompts=1, max_new_tokens=8, repeats=1)
    report = b.bench_peers(config, leave_out=["compiled", "assisted", "prompt_lookup", *unwanted])
    # a folder of safetensors comes from no file of four bits
    assert "doesn't come from a GGUF file" in report["failed"]["llamacpp_int4"] and report["complete"]
    methods = report["methods"]
    assert {"llamacpp", "llamacpp_sampled", "llamacpp_bf16", "plain_int4", "speculative_bf16"} <= methods.keys()
    assert methods["llamacpp"]["texts_equal_to_plain"] == 1 and methods["llamacpp"]["parted"]["prompts"] == 0
    for name in ("plain_float32_vs_llamacpp_float32", "plain_bf16_vs_llamacpp_bf16", "prefill_vs_llamacpp",
                 "best_vs_llamacpp_best", "best_vs_llamacpp_best_bf16", "speculative_vs_plain_int4_sampled"):
        assert report["ratios"][name] > 0
    assert "specdec, plain, bf16" in b.report_text(report)


def test_without_a_compiler_the_compiled_peer_says_so(tiny, monkeypatch, quick):

    def compile(work=None, **options):
        return lambda *args, **more: (_ for _ in ()).throw(RuntimeError("No working C++ compiler found"))

    monkeypatch.setattr(torch, "compile", compile)
    report = b.bench_peers(b.PeersConfig(model=str(tiny), dtype="float32", prompts=1, max_new_tokens=4, repeats=1))
    assert report["failed"] == ABSENT | {"compiled": "RuntimeError: No working C++ compiler found"}
    assert report["complete"] and "llama.cpp is missing: not installed" in b.report_text(report)
    assert set(report["methods"]) == THERE - {"compiled"} and report["ratios"]["plain_vs_compiled"] is None
    assert "transformers compiled is missing: RuntimeError: No working C++ compiler found" in b.report_text(report)


def test_what_is_left_out_is_not_run_and_is_named(tiny, quick):
    report = b.bench_peers(
        b.PeersConfig(model=str(tiny), dtype="float32", prompts=1, max_new_tokens=4, repeats=1),
        leave_out=["compiled", "memory", "floor", "assisted"],
    )
    assert (
        set(report["failed"]) == {"compiled", "memory", "floor", "assisted", *ABSENT}
        and quick == []
        and report["floor"] is None
        and report["memory_bytes"] is None
    )
    assert (
        set(report["methods"]) == THERE - {"compiled", "assisted"}
        and report["ratios"]["prefill_vs_transformers"] > 0
    )


@pytest.mark.parametrize(
    "place",
    [
        "specdec.drafters.lookup.NGramState.propose", "specdec.bench.methods.memory_bandwidth",
        "specdec.bench.methods.memory_in_child",
    ],
)
def test_interrupting_anything_stops_the_benchmark(tiny, monkeypatch, quick, place):
    calls = []
    def interrupt(*words):
        calls.append(words)
        raise KeyboardInterrupt
    monkeypatch.setattr(place, interrupt)
    report = b.bench_peers(b.PeersConfig(model=str(tiny), dtype="float32", prompts=1, max_new_tokens=6, repeats=1))
    assert (
        not report["complete"]
        and len(calls) == 1
        and (report["ratios"]["memory_vs_model"] == 1) == ("child" not in place)
    )


def test_transformers_missing_is_a_line_not_an_end(tiny, monkeypatch, quick):
    monkeypatch.setattr(m, "memory_in_child", lambda *words: (_ for _ in ()).throw(ModelError("no /proc here")))
    monkeypatch.setattr(m, "load_transformers", lambda *words: 1 / 0)
    report = b.bench_peers(b.PeersConfig(model=str(tiny), dtype="float32", prompts=1, max_new_tokens=4, repeats=1))
    assert (
        report["complete"] and set(report["methods"]) == EVERYWHERE - LLAMACPP | {"ngram"}
        and report["ratios"]["plain_vs_floor"] > 0
    )
    assert set(report["failed"]) == {*THEIRS, "memory", *ABSENT} and "no /proc here" in report["failed"]["memory"]


@pytest.mark.slow
def test_memory_is_measured_in_a_fresh_process(tiny):
    found = m.memory_in_child(str(tiny), "auto", "float32", tokens=8)
    parameters = sum(p.numel() for p in LlamaForCausalLM.from_pretrained(tiny).parameters())  # tied ones once
    assert found["weights"] == 4 * parameters and found["after_imports"] < found["peak"]
    assert found["cache"] % cache_bytes(2, 2, 8, 1, torch.float32) == 0


def test_memory_of_a_model_that_is_not_there_is_a_clear_error(tmp_path):
    with pytest.raises(ModelError, match="memory failed.*no config.json"):
        m.memory_in_child(str(tmp_path), "auto", "auto")


# The command

def test_command_prints_json_and_the_interrupted_code(monkeypatch):
    asked = []
    def fake(config, out):
        asked.append((config, out))
        return full_report() | {"complete": len(asked) < 3}
    monkeypatch.setattr(b, "bench_peers", fake)
    done = CliRunner().invoke(
        app, ["bench", "peers", "--json", "--count", "2", "--max-new-tokens", "16", "--repeats", "1", "-K", "3"]
    )
    assert done.exit_code == ExitCode.DONE and json.loads(done.stdout) == full_report()
    assert asked[0] == (b.PeersConfig(prompts=2, max_new_tokens=16, repeats=1, K=3), None)
    assert "plain_vs_transformers" in CliRunner().invoke(app, ["bench", "peers"]).stdout
    stopped = CliRunner().invoke(app, ["bench", "peers"])
    assert stopped.exit_code == ExitCode.INTERRUPTED and "Interrupted" in stopped.stdout


def test_the_command_has_the_defaults_of_the_config(monkeypatch):
    asked = []
    monkeypatch.setattr(b, "bench_peers", lambda config, out: asked.append(config) or full_report())
    assert CliRunner().invoke(app, ["bench", "peers"]).exit_code == ExitCode.DONE and asked == [b.PeersConfig()]


def test_a_damaged_results_file_is_exit_code_2_before_any_model(tmp_path, monkeypatch):
    monkeypatch.setattr(r, "load", lambda *words: pytest.fail("a model was opened"))
    (tmp_path / "r.jsonl").write_text("{\n")
    done = CliRunner().invoke(app, ["bench", "peers", "--out", str(tmp_path / "r.jsonl")])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (
        ExitCode.BAD_INPUT, "", 1,
    ) and "line 1" in done.stderr


def test_the_command_in_the_report_is_one_that_works():
    words = b.PeersConfig(prompts=2, K=3).command.split()[1:]
    # the last one wins, and is refused: everything before it parsed
    done = CliRunner().invoke(app, [*words, "--count", "0"])
    assert done.exit_code == ExitCode.BAD_INPUT and "--count" in done.stderr


# The second target

def made(kind, method, T, prompt, seconds):
    first = 0 if method.startswith("transformers") else seconds / 4  # it doesn't say
    return dict(method=f"{method} T={T}", prompt=prompt, domain=kind, repeat=0, tokens=10, seconds=seconds,
                first_token=first, text="")


def test_the_second_target_by_kind_of_work():
    "Ratios prompt by prompt; our fastest way and theirs, whatever their precision or mode."
    rows = []
    for prompt in ("editing_000", "editing_001"):
        for T in (0, 1):
            rows += [made("editing", *way) for way in [
                ("plain int4", T, prompt, 5), ("plain bf16", T, prompt, 10), ("drafts int4", T, prompt, 2 + T),
                ("drafts bf16", T, prompt, 8), ("llama.cpp plain", T, prompt, 4), ("llama.cpp ngram-mod", T, prompt, 3),
                ("transformers bf16", T, prompt, 20), ("beside it: plain int8", T, prompt, 7),
                ("drafts of the sibling int8", T, prompt, 14)]]
    config = b.TargetConfig("m.gguf", prompts=2)
    machine = dict(processor="p", threads=2, torch="t")
    report = b.target_report(config, machine, b.run_table(rows), {"float32": 10.0, "int4": 10.5}, {}, True)
    greedy, sampled = report["rows"]
    assert greedy["kind"] == "editing" and (greedy["temperature"], sampled["temperature"]) == (0, 1)
    assert greedy["best"] == "drafts int4 T=0" and greedy["plain"] == "plain int4 T=0"
    assert greedy["llama.cpp"] == "llama.cpp ngram-mod T=0"
    assert greedy["plain_vs_llamacpp_plain"] == pytest.approx(4 / 5)
    assert greedy["best_vs_llamacpp_best"] == pytest.approx(3 / 2)
    assert sampled["best_vs_llamacpp_best"] == pytest.approx(1) and greedy["best_vs_plain"] == pytest.approx(5 / 2)
    assert greedy["drafts_vs_plain"] == pytest.approx({
        "file": None, "int4": 5 / 2, "int8": None, "bf16": 10 / 8, "SmolLM2": None,
        "fewer layers": None, "the sibling": 7 / 14})
    assert greedy["tokens_per_second"]["drafts int4 T=0"] == 5 and report["file"]["digest"] == b.TARGET.digest
    assert greedy["first_token"]["plain bf16 T=0"] == 2.5 and "transformers bf16 T=0" not in greedy["first_token"]
    text = b.target_text(report)
    assert re.search(r"plain bf16 +1.0 +2.5 s to the first\n", text) and re.search(r"transformers bf16 +0.5\n", text)
    assert "editing, T = 0" in text and "best 1.50 (drafts int4 over llama.cpp ngram-mod)" in text
    assert "int4 2.50, int8 -, bf16 1.25" in text and "perplexity, 1,024 tokens: float32 10.00, int4 10.50" in text
    assert json.loads(json.dumps(report)) == report
    # as a reader would type it: by the files' own names, no path of this machine
    assert report["command"] == ("specdec bench target qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --count 2"
                                 " --max-new-tokens 128 --repeats 2 --json")
    both = replace(config, file="/here/a.gguf", sibling="/here/b.gguf")
    named = b.target_report(both, machine, b.run_table(rows), {}, {}, True)
    assert " --sibling qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --count 2" in named["command"]
    assert "/here" not in json.dumps(named)
    begun = b.run_table([made("writing", "llama.cpp plain", 0, "writing_000", 4)])  # interrupted before ours
    text = b.target_text(b.target_report(config, machine, begun, {}, {}, False))
    assert "writing, T = 0" in text and "over llama.cpp" not in text


def test_the_second_target_is_one_file(tmp_path, monkeypatch):
    "By its digest. Where it isn't, one line says how to get it."
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repository, name: None)
    for place in (None, tmp_path / "m.gguf"):
        with pytest.raises(ModelError, match="second target isn't .*hf download Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF"):
            b.find_target(place)
    (tmp_path / "m.gguf").write_bytes(b"other")
    with pytest.raises(ModelError, match="isn't the second target.*not cc324af070c2"):
        b.find_target(tmp_path / "m.gguf")
    wanted = replace(b.TARGET, digest=hashlib.sha256(b"other").hexdigest())
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repository, name: str(tmp_path / "m.gguf"))
    assert b.find_target(None, wanted) == b.find_target(tmp_path / "m.gguf", wanted) == tmp_path / "m.gguf"
    shown = CliRunner().invoke(app, ["bench", "target", str(tmp_path / "gone.gguf")])
    assert shown.exit_code == ExitCode.BAD_INPUT and "hf download" in shown.output
    assert len(shown.output.strip().splitlines()) == 1


def test_what_runs_on_the_second_target(monkeypatch):
    "Three kinds of work in turn, every way at both temperatures; llama.cpp on the file as it is."
    monkeypatch.setattr(b, "llamacpp_missing", lambda: None)
    ways, beside, missing = b.target_ways()
    assert not missing
    for some in (ways, beside): assert {way.temperature for way in some.values()} == {0.0, 1.0}
    assert {way.dtype for name, way in ways.items() if name.startswith("llama.cpp")} == {"int4"}
    assert not any("eagle3" in name for name in ways)
    assert {name[:-4] for name in beside} == {"beside it: plain int8", "drafts of the sibling int8", "llama.cpp draft"}
    spec = PairSpec("m.gguf", "smollm2", skip=(1,))
    config = b.TargetConfig(prompts=3, repeats=2, max_new_tokens=7)
    cells = list(b.cells_of(spec, b.pair_name(spec), ways.values(), first_prompts(prompts("work"), config.prompts),
                            apart=False, **b.common(config)))
    assert [cell.prompt.domain for cell in cells] == ["editing", "explaining", "writing"] * 2
    for cell in cells:
        assert len(cell.runs) == len(ways) and {run.max_new_tokens for run in cell.runs} == {7}
        assert {(run.dtype, run.method, run.temperature, run.K) for run in cell.runs} == {*ways.values()}
    monkeypatch.setattr(b, "llamacpp_missing", lambda: "not here")
    assert b.target_ways()[2] == {"llama.cpp": "not here"}
    with pytest.raises(InputError, match="at most 15"): b.TargetConfig("m.gguf", prompts=16)


def test_perplexity_is_that_of_each_next_token(tiny):
    model = load(str(tiny), "cpu", "float32")
    ids = torch.arange(5, 40).tolist()
    logits = model.forward(torch.tensor([ids]), model.new_cache(len(ids)))[0].double()
    chances = [logits[i].softmax(-1)[ids[i + 1]].item() for i in range(len(ids) - 1)]
    assert b.perplexity(model, ids) == pytest.approx(math.exp(-sum(map(math.log, chances)) / len(chances)), rel=1e-4)


@pytest.mark.slow
def test_the_second_target_is_measured(tmp_path, monkeypatch):
    file = tmp_path / "m.gguf"
    write_gguf(file, {"token_embd": "Q8_0", "": "Q4_1"}, context=4096)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "smollm2").symlink_to(fetch())
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(b, "TARGET", replace(b.TARGET, digest=hashlib.sha256(file.read_bytes()).hexdigest()))
    monkeypatch.setattr(b, "llamacpp_missing", lambda: "not here")
    monkeypatch.setattr(b, "SKIPPED", (1,))
    monkeypatch.setattr(b, "SIBLING", b.TARGET)  # as a draft, it is always right
    config = b.TargetConfig(str(file), str(file), prompts=3, max_new_tokens=4, repeats=1)
    report = b.bench_target(config)
    assert report["complete"] and report["failed"] == {"llama.cpp": "not here"}
    assert [(row["kind"], row["temperature"]) for row in report["rows"]] == [
        (kind, T) for kind in ("editing", "explaining", "writing") for T in (0, 1)]
    dtypes = b.target_dtypes().keys()
    for row in report["rows"]: assert len(row["tokens_per_second"]) == 5 + 2 * len(dtypes) and row["best_vs_plain"] > 0
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repository, name: None)
    alone = b.bench_target(replace(config, sibling=None, prompts=1))
    assert "isn't on this machine: `hf download" in alone["failed"]["the sibling"]
    with pytest.raises(ModelError, match="isn't in .*gone.gguf"):
        b.bench_target(replace(config, sibling=str(tmp_path / "gone.gguf")))
    assert report["perplexity"].keys() == {"float32", *dtypes} >= {"int4", "int8", "bfloat16"}
    assert report["perplexity"]["int4"] == pytest.approx(report["perplexity"]["float32"], rel=.02)
