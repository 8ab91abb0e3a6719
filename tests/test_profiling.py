"""The formulas for work and traffic against PyTorch's own counter and real tensors, and
the meters on work whose time or memory is known. Nothing here asserts how fast the machine is."""
import json
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, LlamaConfig, Qwen3Config

import specdec.engine.profiling as profiling
from specdec.drafters.lookup import NGramDrafter
from specdec.engine.profiling import (
    MemoryMeter,
    PhaseTimer,
    context_bytes,
    fastest,
    floor_seconds,
    forward_flops,
    matrix_rate,
    matrix_weights,
    memory_bandwidth,
    readers,
    reset_peak_memory,
    resident_bytes,
    synchronized_time,
    weight_bytes_read,
)
from specdec.errors import InputError, ModelError
from specdec.loop import speculate
from specdec.models.transformers import TransformersLM, cache_argument
from specdec.sampling import SamplingParams, SeededRandom

CPU = torch.device("cpu")
SHAPE = dict(
    vocab_size=97, hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
    max_position_embeddings=128,
)
CONFIGS = {
    "grouped, tied": LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True),
    "every head its own, untied": LlamaConfig(**SHAPE, num_key_value_heads=4, tie_word_embeddings=False),
    "heads of another size": Qwen3Config(**SHAPE, num_key_value_heads=1, head_dim=16, tie_word_embeddings=False),
}
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def library(config):
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    return AutoModelForCausalLM.from_config(config).eval()


# --- Bandwidth and rate -----------------------------------------------------------------------------------------------

def test_fastest_takes_the_shortest_and_does_not_time_the_first(monkeypatch):
    clock, calls = [0.0], []
    durations = iter([0.1, 5.0, 2.0, 3.0])  # the first is the shortest, but it is the warm-up
    monkeypatch.setattr("specdec.engine.profiling.time.perf_counter", lambda: clock[0])
    def work():
        calls.append(1)
        clock[0] += next(durations)
    assert fastest(work, CPU, 3) == 2.0 and len(calls) == 4


def test_every_way_of_reading_reads_the_whole_buffer():
    """A change at either end, in the middle or at a boundary of halves changes what each of them returns."""
    size = 2**20
    for name in readers(size, CPU):
        for place in (0, size // 16 - 1, size // 16, size // 8 - 1):
            ways = readers(size, CPU)
            whole = ways["largest int64"].__self__
            assert whole.nbytes == size
            before = ways[name]().clone()
            whole[place] = 2**62 + 2**30 + 1  # both float32 halves change: 2.0 above, 2e-9 below
            assert not torch.equal(ways[name](), before), (name, place)


@pytest.mark.parametrize("size, used", [(2**20, 2**20), (2**20 + 15, 2**20), (None, 2**28)])
def test_bandwidth_is_bytes_over_the_fastest_way(monkeypatch, size, used):
    seconds = {"a": 4.0, "b": 0.5, "c": 1.0}
    seen = []
    monkeypatch.setattr(profiling, "readers", lambda nbytes, device: seen.append((nbytes, device)) or seconds)
    monkeypatch.setattr(profiling, "fastest", lambda work, device, repeats: work)
    assert memory_bandwidth(size=size) == used / 0.5
    assert seen == [(size or used, CPU)]


def test_a_gpu_gets_a_larger_buffer(monkeypatch):
    monkeypatch.setattr(profiling, "readers", lambda nbytes, device: {"only": nbytes})
    monkeypatch.setattr(profiling, "fastest", lambda work, device, repeats: 1.0 if device.type == "cuda" else 0.0)
    assert memory_bandwidth("cuda") == 2**31


def test_bandwidth_and_rate_are_measured():
    assert 1e8 < memory_bandwidth(size=2**24, repeats=2) < 1e14
    assert 1e7 < matrix_rate(size=128, repeats=2) < 1e16


def test_matrix_rate_counts_a_multiplication_and_an_addition(monkeypatch):
    """The counter watches the one product that the stopwatch would time."""
    with FlopCounterMode(display=False) as counter:
        monkeypatch.setattr(profiling, "fastest", lambda work, device, repeats: 2.0 if work() is not None else None)
        assert matrix_rate(CPU, torch.bfloat16, size=24) * 2.0 == 2 * 24**3
    assert counter.get_total_flops() == 2 * 24**3


@pytest.mark.parametrize("call, given, words", [
    (memory_bandwidth, dict(size=2**20 - 1), "at least 1048576"),
    (memory_bandwidth, dict(size=1e9), "size must be"),
    (memory_bandwidth, dict(repeats=0), "repeats"),
    (matrix_rate, dict(size=0), "size must be"),
    (matrix_rate, dict(size=2.5), "size must be"),
    (matrix_rate, dict(repeats=0), "repeats"),
    (matrix_rate, dict(repeats=True), "repeats"),
    (fastest, dict(work=print, device=CPU, repeats=0), "repeats"),
], ids=lambda value: getattr(value, "__name__", str(value)))
def test_wrong_sizes_are_refused(call, given, words):
    with pytest.raises(InputError, match=words): call(**given)


def test_floor():
    assert floor_seconds(0, 5.0) == 0 and floor_seconds(10, 4.0) == 2.5
    for nbytes, bandwidth in [(-1, 1), (1, 0), (1, -2), (1, float("nan")), (1, float("inf"))]:
        with pytest.raises(InputError): floor_seconds(nbytes, bandwidth)


# --- Work and traffic -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("T, S", [(1, 0), (1, 9), (5, 0), (4, 17)])
def test_flops_are_what_pytorch_counts(name, T, S):
    """Written out, attention computes the T (T − 1) / 2 pairs that the mask then hides; a fused one, and the formula,
    do not."""
    config, model = CONFIGS[name], library(CONFIGS[name])
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        past = {cache_argument(model): cache}
        if S: model(torch.ones(1, S, dtype=torch.long), **past)
        with FlopCounterMode(display=False) as counter: model(torch.ones(1, T, dtype=torch.long), **past)
    head = config.head_dim if config.model_type == "qwen3" else 8
    hidden = 4 * 3 * 4 * head * T * (T - 1) // 2
    assert counter.get_total_flops() == forward_flops(config, T, S) + hidden


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_are_the_parameters_and_the_cache(name):
    config, model = CONFIGS[name], library(CONFIGS[name])
    ids = torch.ones(1, 11, dtype=torch.long)
    own = TransformersLM(model)
    cache = own.new_cache(11)
    own.forward(ids, cache)
    embedding = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    # Qwen3's norms inside of attention, a few numbers, are left out
    inside = sum(p.numel() for n, p in model.named_parameters() if "q_norm" in n or "k_norm" in n)
    assert weight_bytes_read(config, torch.float32) == 4 * (model.num_parameters() - embedding - inside)
    assert context_bytes(config, 11, torch.float32) == cache.nbytes
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n)
    head = 97 * 32 if config.tie_word_embeddings else 0  # else it is among them
    assert matrix_weights(config) == matrices + head


def test_llama_2_7b_has_the_known_number_of_parameters():
    """6,738,415,616, as published with the weights; the embedding is not read."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
        vocab_size=32000,
    )
    assert weight_bytes_read(config, torch.float16) == 2 * (6_738_415_616 - 32000 * 4096)


def test_the_head_can_be_left_out_for_all_but_the_last():
    config = CONFIGS["grouped, tied"]
    assert forward_flops(config, 9, 4) - forward_flops(config, 9, 4, last=2) == 2 * 7 * 97 * 32
    assert forward_flops(config, 2, 4, last=5) == forward_flops(config, 2, 4)


@pytest.mark.parametrize("call, given, words", [
    (forward_flops, (0, 1), "T, the number of new tokens"),
    (forward_flops, (1, -1), "S, the positions"),
    (forward_flops, (2, 1, -3), "last must be"),
    (forward_flops, (2, 1, 1.5), "last must be"),
], ids=lambda value: getattr(value, "__name__", str(value)))
def test_numbers_that_can_not_be_are_refused(call, given, words):
    with pytest.raises(InputError, match=words): call(CONFIGS["grouped, tied"], *given)


@pytest.mark.parametrize("call, given", [
    (forward_flops, (1, 1)), (matrix_weights, ()),
], ids=["flops", "weights"])
def test_what_the_formulas_do_not_cover_is_refused(call, given):
    with pytest.raises(InputError, match="gpt2"): call(GPT2Config(), *given)


# --- Memory -----------------------------------------------------------------------------------------------------------

@linux
def test_the_peak_is_set_back():
    block = torch.ones(60_000_000, dtype=torch.uint8)
    del block
    reset_peak_memory()
    now, peak = resident_bytes()
    assert abs(peak - now) < 5e6


PHASES = """
import json, torch
from specdec.engine.profiling import MemoryMeter
meter = MemoryMeter()
for name, size in [("large", 80_000_000), ("small", 20_000_000), ("large", 1_000_000)]:
    with meter.phase(name): block = torch.ones(size, dtype=torch.uint8)
    del block
print(json.dumps([meter.spans, meter.peak("large"), meter.peak("none")]))
"""

@linux
def test_phases_do_not_see_each_others_peaks():
    "In a fresh process: what earlier tests have freed may be used again, or be given back in the middle of a phase."
    done = subprocess.run([sys.executable, "-c", PHASES], capture_output=True, text=True, check=True)
    spans, large, none = json.loads(done.stdout)
    risen = [peak - before for _, before, peak, _ in spans]
    assert 78e6 < risen[0] < 90e6 and risen[1] < 30e6
    assert large == max(spans[0][2], spans[2][2]) and none == 0


@linux
def test_it_takes_the_timers_place_in_the_loop():
    model = TransformersLM(library(CONFIGS["grouped, tied"]))
    meter = MemoryMeter()
    prompt, greedy, rng = [1, 2, 3, 1, 2], SamplingParams(), SeededRandom(0)
    rounds = list(speculate(model, NGramDrafter(), prompt, greedy, rng, K=3, max_new_tokens=12, timer=meter))
    assert sum(len(r.emitted) for r in rounds) == 12
    assert {name for name, *_ in meter.spans} == {"prefill", "sample", "draft", "verify"}
    assert all(before <= peak and after <= peak for _, before, peak, after in meter.spans)


@linux
def test_a_phase_that_fails_is_kept_and_closed():
    meter = MemoryMeter()
    with pytest.raises(ZeroDivisionError):
        with meter.phase("bad"): 1 / 0
    with meter.phase("good"): pass
    assert [name for name, *_ in meter.spans] == ["bad", "good"]
    with pytest.raises(InputError, match="inside of 'outer'"):
        with meter.phase("outer"):
            with meter.phase("inner"): pass


def test_cuda_is_asked_through_its_allocator(monkeypatch):
    """Scripted: the peak is set back before each phase, and the figures are the allocator's."""
    state, calls = {"now": 100, "peak": 900}, []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: state["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: state["peak"])
    def reset(device):
        calls.append(str(device))
        state.update(peak=state["now"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    meter = MemoryMeter("cuda:0")
    with meter.phase("first"): state.update(now=150, peak=400)
    with meter.phase("second"): state.update(now=160, peak=170)
    assert meter.spans == [("first", 100, 400, 150), ("second", 150, 170, 160)] and calls == ["cuda:0"] * 2


def test_without_proc_it_says_so(monkeypatch):
    def missing(*args, **options): raise OSError("nothing there")
    monkeypatch.setattr("builtins.open", missing)
    for call in (resident_bytes, lambda: MemoryMeter().phase("a").__enter__()):
        with pytest.raises(ModelError, match="/proc"): call()
    with pytest.raises(InputError): MemoryMeter("mps")


# --- Phases by hand ---------------------------------------------------------------------------------------------------

@pytest.fixture
def ticks(monkeypatch):
    "A clock that a test sets."
    now = [0.0]
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: now[0])
    return now


def test_phases_begin_and_end_by_name(ticks):
    "They may overlap; times, counts and the print agree."
    timer = PhaseTimer()
    for at, act, name in ((0, timer.start, "draft"), (1, timer.start, "verify"), (3, timer.stop, "draft"),
                          (7, timer.stop, "verify"), (10, timer.start, "draft"), (11, timer.stop, "draft")):
        ticks[0] = at
        act(name)
    assert timer.summary() == {"draft": {"count": 2, "total_ms": 4000.0, "mean_ms": 2000.0},
                               "verify": {"count": 1, "total_ms": 6000.0, "mean_ms": 6000.0}}
    lines = [line.split() for line in str(timer).splitlines()]
    assert lines[1:] == [["draft", "2", "4000.00", "2000.00"], ["verify", "1", "6000.00", "6000.00"]]
    assert lines[0][:2] == ["phase", "count"] and PhaseTimer().summary() == {}


def test_the_phase_that_ended_last_says_its_time(ticks):
    timer = PhaseTimer()
    assert timer.elapsed_ms == 0
    for seconds in (2, 5):
        with timer.phase("step"): ticks[0] += seconds
        assert timer.elapsed_ms == 1000 * seconds
    assert timer.seconds("step") == 7


def test_a_phase_runs_once_at_a_time(ticks):
    timer = PhaseTimer()
    timer.start("draft")
    with pytest.raises(InputError, match="'draft' runs already"): timer.start("draft")
    with pytest.raises(InputError, match="'verify' doesn't run.* Running: 'draft'"): timer.stop("verify")
    assert timer.summary() == {}  # what runs is not counted yet
    timer.stop("draft")
    with pytest.raises(InputError, match="Running: none"): timer.stop("draft")


@pytest.mark.parametrize("device, waited", [("cpu", []), ("cuda:1", ["cuda:1"]), ("mps", ["mps"])])
def test_the_clock_waits_for_the_device(monkeypatch, ticks, device, waited):
    "Scripted: work that is queued is done before the time is read."
    calls = []
    def done(where):
        calls.append(str(where))
        ticks[0] = 5.0
    monkeypatch.setattr(torch.cuda, "synchronize", done)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: done("mps"))
    assert synchronized_time(device) == (5.0 if waited else 0.0) and calls == waited
