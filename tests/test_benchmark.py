"""The benchmark's arithmetic, its order, what it keeps and what it refuses. Nothing here asserts a time."""
import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from specdec import benchmark as b
from specdec.cli import ExitCode, app
from specdec.core import InputError, ModelError
from specdec.kvcache import cache_bytes
from specdec.models import fetch, load_tokenizer, prompts

SMALL = b.PeersConfig(prompts=2, max_new_tokens=4, repeats=2)


def timed(method: str, prompt: str, repeat: int, seconds: float, model_seconds: float = 0.0, text: str = "t") -> b.Measurement:
    return b.Measurement("run", method, prompt, prompt.split("_")[0], repeat, 8, seconds, text, {"model_seconds": model_seconds})


def peer(ids: list[int], n: int): return list(range(n)), {"model_seconds": 0.0}
def one_id(prompt): return [1]


# Settings and order

@pytest.mark.parametrize("wrong", [dict(prompts=0), dict(prompts=16), dict(repeats=0), dict(max_new_tokens=0), dict(K=0), dict(K=1.5)])
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong)) if wrong != dict(prompts=16) else "15 prompts"): b.PeersConfig(**wrong)


def test_prompts_take_the_domains_in_turn():
    assert {p.domain for p in b.choose_prompts(3)} == {p.domain for p in prompts()}
    assert sorted(p.id for p in b.choose_prompts(15)) == sorted(p.id for p in prompts())


def test_schedule_is_interleaved_and_takes_turns():
    methods = ["a", "b", "c"]
    jobs = list(b.schedule(b.PeersConfig(prompts=3, repeats=3), methods))
    groups = [jobs[i:i + 3] for i in range(0, len(jobs), 3)]
    assert len(jobs) == 27 == len(set(jobs))
    assert all(len({(repeat, prompt) for repeat, prompt, _ in group}) == 1 and {m for _, _, m in group} == set(methods) for group in groups)
    assert {first[2]: sum(g[0][2] == first[2] for g in groups) for first, *_ in groups} == dict.fromkeys(methods, 3)


def test_fingerprint_ignores_how_many_and_nothing_else():
    machine = {"torch": "1"}
    run = b.run_fingerprint(SMALL, machine)
    assert len(run) == 12 and run == b.run_fingerprint(replace(SMALL, repeats=9, prompts=15), machine)
    assert run not in {b.run_fingerprint(replace(SMALL, K=2), machine), b.run_fingerprint(replace(SMALL, max_new_tokens=5), machine), b.run_fingerprint(SMALL, {"torch": "2"})}


def test_environment_names_no_host_and_no_path():
    import socket
    said = json.dumps(b.environment("cpu", "float32"))
    assert socket.gethostname() not in said and ":/" not in said and '"/' not in said


# Arithmetic

def test_quartiles():
    assert b.quartiles([3]) == (3, 3, 3) and b.quartiles(range(5)) == (1, 2, 3)
    with pytest.raises(InputError, match="nothing"): b.quartiles([])


def test_ratios_are_taken_within_a_repeat():
    runs = [timed("plain", "code_0", 0, 1), timed("transformers", "code_0", 0, 2),    # 2
            timed("plain", "code_0", 1, 10), timed("transformers", "code_0", 1, 15),  # 1.5, on a slower machine
            timed("plain", "code_0", 2, 1), timed("transformers", "code_0", 2, 9),    # 9: an outlier
            timed("plain", "code_0", 3, 1), timed("transformers", "code_1", 3, 1)]    # no partners
    assert b.speed_ratios(runs, "plain", "transformers") == {"code_0": 2.0}
    assert b.speed_ratios(runs, "plain", "ngram") == {}


def test_overhead_is_the_time_outside_the_models():
    runs = [timed("ngram", "code_0", 0, 2, 1.9), timed("ngram", "code_1", 0, 1, 1), timed("plain", "code_0", 0, 1, 0)]
    assert b.overheads(runs) == pytest.approx({"code_0": 0.05, "code_1": 0.0})


def test_summary_by_domain():
    found = b.summarise({"code_0": 1.0, "code_1": 3.0, "conversation_0": 0.5}, {"code_0": "code", "code_1": "code", "conversation_0": "conversation"})
    assert (found["median"], found["prompts"], found["above_one"]) == (1.0, 3, 1)
    assert found["domains"]["code"]["median"] == 2.0 and found["domains"]["conversation"] == {"low": 0.5, "median": 0.5, "high": 0.5}
    assert b.summarise({}, {}) is None


def full_report(plain: float = 1.0, memory: int = 120) -> dict:
    seconds = {"plain": plain, "ngram": 1.25, "transformers": 2.0, "prompt_lookup": 1.0}
    runs = [timed(method, prompt, repeat, s, 0.98 * s) for method, s in seconds.items() for prompt in ("code_0", "conversation_0") for repeat in (0, 1)]
    runs.append(b.Measurement("run", "memory", "longest", "", 0, 128, 0.0, "", {"after_imports": 50, "peak": 50 + memory, "weights": 80, "cache": 20}))
    return b.make_report(SMALL, b.environment("cpu", "float32"), runs, {}, True)


def test_report_counts_wins_and_losses_alike():
    report = full_report()
    assert report["ratios"] == pytest.approx({"plain_vs_transformers": 2, "ngram_vs_plain": 0.8, "ngram_vs_prompt_lookup": 0.8, "overhead": 0.02, "memory_vs_model": 1.2})
    assert report["goals_met"] == {"plain_vs_transformers": True, "overhead": True, "memory_vs_model": True}
    assert report["spread"]["ngram_vs_plain"]["above_one"] == 0
    text = b.report_text(report)
    assert all(name in text for name in report["ratios"]) and all(name in text for name in b.METHODS.values()) and "0 of 2" in text and "missed" not in text


def test_a_missed_goal_is_said():
    report = full_report(plain=1.9, memory=140)
    assert report["goals_met"] == {"plain_vs_transformers": False, "overhead": True, "memory_vs_model": False}
    assert b.report_text(report).count(": missed") == 2


def test_report_is_json_and_says_what_is_missing():
    report = b.make_report(SMALL, b.environment("cpu", "float32"), [], {"transformers": "ImportError: no"}, False)
    assert json.loads(json.dumps(report)) == report and set(report["ratios"].values()) == {None} and report["goals_met"] == {}
    text = b.report_text(report)
    assert "not measured" in text and "ImportError: no" in text and "Interrupted" in text


def test_equal_texts_are_counted():
    runs = [timed("plain", "code_0", 0, 1, text="x"), timed("ngram", "code_0", 0, 1, text="x"), timed("plain", "code_1", 0, 1, text="y"), timed("ngram", "code_1", 0, 1, text="z")]
    figures = b.method_figures(runs, {"code_0": "code", "code_1": "code"})
    assert (figures["plain"]["texts_equal_to_plain"], figures["ngram"]["texts_equal_to_plain"]) == (2, 1)
    assert figures["plain"]["repeats_vary_by"] is None  # one repeat says nothing about noise


# Results that are kept

def test_results_come_back_and_go_on(tmp_path):
    file = tmp_path / "results.jsonl"
    first = timed("plain", "code_0", 0, 1.5, 1.25)
    b.Results(file).add(first)
    file.write_text(file.read_text().rstrip("\n"))  # an editor that drops the last newline
    results = b.Results(file)
    assert results.of("run") == [first] and results.of("other") == []
    results.add(replace(first, repeat=1))
    assert len(b.Results(file).of("run")) == 2 and file.read_text().count("\n") == 2


@pytest.mark.parametrize("damage", ['{"run": "x', '{"run": "x"}', "[]", "", '{"a": 1}', "nonsense"])
def test_a_damaged_line_is_named(tmp_path, damage):
    file = tmp_path / "results.jsonl"
    b.Results(file).add(timed("plain", "code_0", 0, 1))
    with open(file, "a") as f: f.write(damage + "\n")
    before = file.read_bytes()
    with pytest.raises(InputError, match="results.jsonl, line 2"): b.Results(file)
    assert file.read_bytes() == before


def test_a_file_that_cannot_be_used_is_refused(tmp_path):
    with pytest.raises(InputError, match="another file"): b.Results(tmp_path)
    with pytest.raises(InputError, match="another file"): b.Results(tmp_path / "no" / "folder.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="another file"): b.Results(tmp_path / "bytes")


def test_a_rerun_measures_only_what_is_missing(tmp_path):
    calls = []
    def counted(ids, n): calls.append(n); return peer(ids, n)
    for repeats, expected in ((2, 1 + 4), (2, 0), (3, 1 + 2)):  # a warm-up, then two prompts a repeat
        calls.clear()
        b.run_peers(replace(SMALL, repeats=repeats), {"p": counted}, one_id, b.Results(tmp_path / "r.jsonl"), "run", {})
        assert len(calls) == expected
    assert len(b.Results(tmp_path / "r.jsonl").of("run")) == 6


def test_what_was_measured_before_an_interrupt_is_kept(tmp_path):
    calls = []
    def interrupted(ids, n):
        calls.append(n)
        if len(calls) == 4: raise KeyboardInterrupt
        return peer(ids, n)
    with pytest.raises(KeyboardInterrupt): b.run_peers(SMALL, {"p": interrupted}, one_id, b.Results(tmp_path / "r.jsonl"), "run", {})
    assert len(b.Results(tmp_path / "r.jsonl").of("run")) == 2  # of four: one warm-up, two runs, the interrupt


def test_a_peer_that_fails_says_why_and_the_rest_goes_on():
    def broken(ids, n): raise RuntimeError("out of\nluck")
    def short(ids, n): return [1], {}
    failed, results = {}, b.Results()
    b.run_peers(SMALL, {"broken": broken, "short": short, "good": peer}, one_id, results, "run", failed)
    assert failed == {"broken": "RuntimeError: out of luck", "short": "ModelError: It made 1 tokens where 4 were asked for."}
    assert {m.method for m in results.of("run")} == {"good"} and len(results.of("run")) == 4


# A tiny model, end to end

@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    "A folder with a random model and the default model's tokenizer."
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=49152, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    load_tokenizer(fetch()).save_pretrained(folder)
    return folder


def test_a_tiny_run_from_end_to_end(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(b, "memory_in_child", lambda config: {"after_imports": 1, "peak": 4, "weights": 2, "cache": 1})
    config = b.PeersConfig(model=str(tiny), dtype="float32", prompts=2, max_new_tokens=12, repeats=2)
    report = b.bench_peers(config, tmp_path / "r.jsonl")
    assert report["complete"] and report["failed"] == {} and set(report["methods"]) == set(b.METHODS)
    assert all(value is not None for value in report["ratios"].values()) and report["ratios"]["memory_vs_model"] == 1
    assert all(figures["texts_equal_to_plain"] == 2 for figures in report["methods"].values())  # float32: the same greedy tokens everywhere
    assert 0 < report["ratios"]["overhead"] < 1
    monkeypatch.setattr(b, "measure", lambda *words: pytest.fail("measured again"))
    again = b.bench_peers(config, tmp_path / "r.jsonl")
    assert again == report


def test_interrupting_a_generation_stops_the_benchmark(tiny, monkeypatch):
    monkeypatch.setattr(b, "memory_in_child", lambda config: {"after_imports": 1, "peak": 4, "weights": 2, "cache": 1})
    calls = []
    def interrupt(self, K, transform, source):
        calls.append(K)
        raise KeyboardInterrupt
    monkeypatch.setattr("specdec.speculative.NGramDrafter.propose", interrupt)
    report = b.bench_peers(b.PeersConfig(model=str(tiny), dtype="float32", prompts=1, max_new_tokens=6, repeats=1))
    assert not report["complete"] and len(calls) == 1 and report["ratios"]["memory_vs_model"] == 1


def test_transformers_missing_is_a_line_not_an_end(tiny, monkeypatch):
    monkeypatch.setattr(b, "memory_in_child", lambda config: (_ for _ in ()).throw(ModelError("no /proc here")))
    monkeypatch.setattr(b, "load_transformers", lambda *words: 1 / 0)
    report = b.bench_peers(b.PeersConfig(model=str(tiny), dtype="float32", prompts=1, max_new_tokens=4, repeats=1))
    assert report["complete"] and set(report["methods"]) == {"plain", "ngram"}
    assert set(report["failed"]) == {"transformers", "prompt_lookup", "memory"} and "no /proc here" in report["failed"]["memory"]


def test_memory_is_measured_in_a_fresh_process(tiny):
    found = b.memory_in_child(b.PeersConfig(model=str(tiny), dtype="float32"), tokens=8)
    parameters = sum(p.numel() for p in LlamaForCausalLM.from_pretrained(tiny).parameters())  # tied ones once
    assert found["weights"] == 4 * parameters and found["after_imports"] < found["peak"]
    assert found["cache"] % cache_bytes(2, 2, 8, 1, torch.float32) == 0


def test_memory_of_a_model_that_is_not_there_is_a_clear_error(tmp_path):
    with pytest.raises(ModelError, match="memory failed.*no config.json"): b.memory_in_child(b.PeersConfig(model=str(tmp_path)))


# The command

def test_command_prints_json_and_the_interrupted_code(monkeypatch):
    asked = []
    def fake(config, out):
        asked.append((config, out))
        return full_report() | {"complete": len(asked) < 3}
    monkeypatch.setattr(b, "bench_peers", fake)
    done = CliRunner().invoke(app, ["bench", "peers", "--json", "--prompts", "2", "--max-new-tokens", "16", "--repeats", "1", "-K", "3"])
    assert done.exit_code == ExitCode.DONE and json.loads(done.stdout) == full_report()
    assert asked[0] == (b.PeersConfig(prompts=2, max_new_tokens=16, repeats=1, K=3), None)
    assert "plain_vs_transformers" in CliRunner().invoke(app, ["bench", "peers"]).stdout
    stopped = CliRunner().invoke(app, ["bench", "peers"])
    assert stopped.exit_code == ExitCode.INTERRUPTED and "Interrupted" in stopped.stdout


def test_a_damaged_results_file_is_exit_code_2_before_any_model(tmp_path, monkeypatch):
    monkeypatch.setattr(b, "load_peers", lambda config: pytest.fail("a model was opened"))
    (tmp_path / "r.jsonl").write_text("{\n")
    done = CliRunner().invoke(app, ["bench", "peers", "--out", str(tmp_path / "r.jsonl")])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (ExitCode.BAD_INPUT, "", 1) and "line 1" in done.stderr


def test_the_command_in_the_report_is_one_that_works():
    words = b.PeersConfig(prompts=2, K=3).command.split()[1:]
    done = CliRunner().invoke(app, [*words, "--prompts", "0"])  # the last one wins, and is refused: everything before it parsed
    assert done.exit_code == ExitCode.BAD_INPUT and "--prompts" in done.stderr
