"""errors, core, result and the clocks of profiling: checks, sources of randomness, results and their JSON line."""
import importlib
import json
import math
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from helpers import examples, result_of
from specdec import errors, result, sampling
from specdec.engine import profiling
from specdec.engine.profiling import PhaseTimer, reset_peak_memory
from specdec.errors import (
    InputError,
    ModelError,
    NumericalError,
    SpecdecError,
    check,
    preserve_interrupts,
    require_int,
    to_int,
    to_number,
)
from specdec.lossless.enumerate import Enumerator
from specdec.result import (
    STATUS_MEANINGS,
    STATUS_STYLES,
    GenerationResult,
    Round,
    result_from_json,
    statuses,
    statuses_html,
)
from specdec.sampling import SeededRandom
from specdec.speedup import draft_cost
from specdec.verify import is_promised, promises

# --- errors

def test_errors_derive_from_one_base_and_from_the_builtin_a_caller_expects():
    for error, builtin in ((InputError, ValueError), (ModelError, RuntimeError), (NumericalError, ArithmeticError)):
        assert issubclass(error, SpecdecError) and issubclass(error, builtin)
    check(True, "unused")
    with pytest.raises(InputError, match="say why"): check(False, "say why")


# --- sources

class Scripted(SeededRandom):
    "Uniforms are given instead of drawn."
    def __init__(self, *uniforms): self.uniforms = iter(uniforms)
    def uniform(self): return next(self.uniforms)

class BFloat16(SeededRandom):
    "The negative control: uniforms in bfloat16."
    def uniform(self): return torch.rand((), generator=self.generator, dtype=torch.bfloat16).item()

ALMOST_ONE = 1 - 2**-53

def test_same_seed_same_draws_and_the_global_generator_is_left_alone():
    def draws(seed):
        rng = SeededRandom(seed)
        return [rng.categorical(torch.ones(50)) for _ in range(30)] + [rng.bernoulli(.5) for _ in range(30)]
    torch.manual_seed(1)
    first, after = draws(5), torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)
    assert draws(5) == first != draws(6)

@pytest.mark.parametrize("seed", [np.int64(5), np.uint8(5), torch.tensor(5)], ids=repr)
def test_a_seed_becomes_a_plain_number(seed):
    rng = SeededRandom(seed)
    assert type(rng.seed) is int and rng.uniform() == SeededRandom(5).uniform()

def test_golden_draws_stay_what_they_are():
    rng = SeededRandom(0)  # a change here changes every text that anybody has a seed for
    assert [rng.categorical(torch.ones(1000)) for _ in range(5)] == [970, 707, 459, 920, 645]

def test_a_fresh_seed_is_recorded_and_repeats():
    rng = SeededRandom()
    assert rng.uniform() == SeededRandom(rng.seed).uniform()
    assert SeededRandom().seed != SeededRandom().seed

NO_SEEDS = ["7", 1.5, True, np.bool_(True), torch.tensor(True), np.float64(7), 2**64, -2**63 - 1]

@pytest.mark.parametrize("seed", NO_SEEDS, ids=repr)
def test_a_seed_that_is_no_64_bit_number_is_an_input_error(seed):
    with pytest.raises(InputError, match="seed"): SeededRandom(seed)

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("u", [0., .5, ALMOST_ONE])
@pytest.mark.parametrize("at", [0, 3, 6])
def test_all_the_mass_on_one_token_draws_it(dtype, u, at):
    weights = torch.zeros(7, dtype=dtype)
    weights[at] = .3
    assert Scripted(u).categorical(weights) == at


NO_WEIGHTS = [[0.0, 0.0], [math.nan, 1.0], [1.0, math.inf], [math.inf, -math.inf], [3.0, -1.0], [-1.0, 0.0]]

@pytest.mark.parametrize("weights", NO_WEIGHTS, ids=str)
def test_what_is_no_distribution_is_an_error(weights):
    with pytest.raises(NumericalError, match="positive, finite sum"): SeededRandom(0).categorical(torch.tensor(weights))
    for given_as in (weights, torch.tensor(weights)):
        with pytest.raises(NumericalError): Enumerator().categorical(given_as)


@pytest.mark.parametrize("prob", [math.nan, -.1, 1.1, math.inf])
def test_what_is_no_probability_is_an_error(prob):
    for rng in (SeededRandom(0), Enumerator()):
        with pytest.raises(NumericalError, match="probability|Weights"): rng.bernoulli(prob)

def test_certain_coins_are_certain():
    assert Scripted(ALMOST_ONE).bernoulli(1) and not Scripted(0.).bernoulli(0)
    assert Scripted(0.).bernoulli(torch.tensor(1e-30))  # a tensor is fine, and so is a tiny probability


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-290, 1e-30, 1e-9, 0.1, 1.0, 3.0, 1e9]), min_size=1, max_size=12).filter(any),
    st.floats(0, ALMOST_ONE),
)
def test_categorical_equals_numpy_and_never_gives_a_zero_weight(weights, u):
    index = Scripted(u).categorical(torch.tensor(weights, dtype=torch.float64))
    cumulative = np.cumsum(weights)
    assert weights[index] > 0
    assert index == np.searchsorted(cumulative, u * cumulative[-1], side="right")


@settings(max_examples=examples(300), deadline=None)
@given(st.floats(2e-300, sys.float_info.max))
def test_the_largest_uniform_stays_inside_the_weights(total):
    assert Scripted(ALMOST_ONE).categorical(torch.tensor([0., total, 0.], dtype=torch.float64)) == 1

def test_weights_too_small_to_draw_from_exactly_are_an_error():
    with pytest.raises(NumericalError): Scripted(ALMOST_ONE).categorical(torch.tensor([5e-324], dtype=torch.float64))

def test_weights_in_low_precision_are_summed_in_float64():
    for dtype in (torch.bfloat16, torch.float16):
        assert [Scripted(u).categorical(torch.ones(4096, dtype=dtype)) for u in (0., .5, .9999)] == [0, 2048, 4095]

def test_categorical_equals_numpy_on_and_beside_every_boundary():
    w = np.array([0, 3, 0, 1, 0, 4, 0], dtype=float)
    ends = np.cumsum(w) / w.sum()
    u = np.concatenate([[0, ALMOST_ONE], ends, np.nextafter(ends, 0), np.nextafter(ends, 1)])
    u = u[u < 1]
    rng = Scripted(*u)
    drawn = [rng.categorical(torch.tensor(w)) for _ in u]
    assert drawn == np.searchsorted(np.cumsum(w), u * w.sum(), side="right").tolist()
    assert set(drawn) == {1, 3, 5}  # never a token of weight zero


FALSE_ALARM, DRAWS = 1e-9, 20_000
P = np.where(np.arange(64) % 4 == 0, 0, np.random.default_rng(0).gamma(2.0, size=64))  # 48 possible tokens
P /= P.sum()
THRESHOLD = stats.chi2.isf(FALSE_ALARM, (P > 0).sum() - 1)


def draws(rng): return [rng.categorical(torch.from_numpy(P)) for _ in range(DRAWS)]


def chi_squared(tokens, p=P) -> float:
    observed, possible = np.bincount(tokens, minlength=64), p > 0
    assert not observed[~possible].any(), "a token of weight zero was drawn"
    return stats.chisquare(observed[possible], len(tokens) * p[possible] / p[possible].sum()).statistic


def test_the_distribution_of_categorical_with_a_negative_control():
    "False-alarm rate 1e-9 per seed. The faulty law is written down: a fine grid of uniforms, rounded to bfloat16."
    grid = ((torch.arange(2**20) + 0.5) / 2**20).bfloat16().double()
    grid[grid == 1] = 0  # what torch.rand does with a uniform that rounds to 1
    owners = torch.searchsorted(torch.from_numpy(np.cumsum(P)), grid, right=True)
    faulty = np.bincount(owners, minlength=64)[:64] / 2**20
    shift = DRAWS * ((faulty - P)[P > 0]**2 / P[P > 0]).sum()
    assert stats.ncx2.sf(THRESHOLD, (P > 0).sum() - 1, shift) > 0.99  # the control's power

    wrong = draws(BFloat16(1))
    assert chi_squared(draws(SeededRandom(1))) < THRESHOLD < chi_squared(wrong)
    assert chi_squared(wrong, faulty) < THRESHOLD


def test_draws_have_the_distribution_of_numpys_own_sampler():
    theirs = np.random.default_rng(1).choice(64, size=DRAWS, p=P)
    table = np.stack([np.bincount(tokens, minlength=64) for tokens in (draws(SeededRandom(1)), theirs)])[:, P > 0]
    assert stats.chi2_contingency(table).pvalue > FALSE_ALARM


def test_the_distribution_of_bernoulli():
    rng, prob, n = SeededRandom(2), .003, 20_000
    count = sum(rng.bernoulli(prob) for _ in range(n))
    assert stats.binom.isf(5e-10, n, prob) >= count >= stats.binom.ppf(5e-10, n, prob)


# --- clocks

def test_phases_nest_and_add_up():
    timer = PhaseTimer("cpu")
    for _ in range(2):
        with timer.phase("outer"):
            time.sleep(.002)
            with timer.phase("inner"): time.sleep(.003)
    assert timer.seconds("inner") >= .006 - 1e-4
    assert timer.seconds("outer") >= timer.seconds("inner") + .004 - 1e-4
    assert timer.seconds("never") == 0

def test_a_phase_that_raises_counts_and_lets_the_error_through():
    timer = PhaseTimer()
    with pytest.raises(KeyboardInterrupt):
        with timer.phase("broken"):
            time.sleep(.002)
            raise KeyboardInterrupt
    assert timer.seconds("broken") >= .002 - 1e-4 and len(timer.spans) == 1

class Device:
    "A simulated asynchronous device with the three names of torch.cuda that PhaseTimer uses."
    def __init__(self, monkeypatch):
        self.queue, self.waits = ThreadPoolExecutor(max_workers=1), 0
        device = self
        class Event:
            def __init__(self, enable_timing=False): assert enable_timing
            def record(self, stream): self.at = stream.queue.submit(time.perf_counter)
            def elapsed_time(self, end): return 1000 * (end.at.result() - self.at.result())
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: device.wait())
    def wait(self):
        self.waits += 1
        self.queue.submit(lambda: None).result()

def test_cuda_phases_are_timed_on_the_device_without_waiting(monkeypatch):
    device = Device(monkeypatch)
    timer = PhaseTimer("cuda:0")
    with timer.phase("draft"): device.queue.submit(time.sleep, .02)
    with timer.phase("verify"): device.queue.submit(time.sleep, .04)
    assert device.waits == 0  # nothing waited while the work was queued
    assert timer.seconds("draft") >= .02 - 1e-4 and timer.seconds("verify") >= .04 - 1e-4
    assert device.waits > 0

def test_peak_memory_counts_in_megabytes():
    "In a process of its own, whose peak no earlier test has raised."
    code = (
        "import numpy; from specdec.engine.profiling import peak_memory_mb as peak; before = peak(); block ="
        " numpy.ones(100_000_000, numpy.uint8); print(peak() - before)"
    )
    grown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 90 < float(grown.stdout) < 130

@pytest.mark.skipif(sys.platform != "linux", reason="only Linux sets the peak back")
def test_the_peak_of_memory_is_set_back():
    code = (
        "import numpy\nfrom specdec.engine.profiling import peak_memory_mb as peak, reset_peak_memory\n"
        "before = peak()\n"
        "block = numpy.ones(100_000_000, numpy.uint8); del block; print(reset_peak_memory(), peak() - before)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    done, grown = said.split()
    assert done == "True" and float(grown) < 20

def test_where_the_peak_cannot_be_set_back_it_says_so(monkeypatch):
    def nothing(*args, **kwargs): raise OSError
    monkeypatch.setattr("builtins.open", nothing)
    assert reset_peak_memory() is False

def test_the_peak_of_cuda_is_the_allocators(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", asked.append)
    assert reset_peak_memory("cuda:1") and asked == [torch.device("cuda:1")]


def test_core_imports_where_the_system_has_no_resource_module():
    code = ("import builtins, sys\nsys.modules['resource'] = None\n"
            "from specdec.engine.profiling import peak_memory_mb\n"
            "def nothing(*args, **kwargs): raise OSError\n"
            "builtins.open = nothing; assert peak_memory_mb() == 0.0")
    subprocess.run([sys.executable, "-c", code], check=True)


# --- rounds and figures

def statistics(*rounds):
    return result_of(rounds)

def test_acceptance_rate_and_alpha_differ():
    s = statistics(Round([1, 2, 3, 4, 5], 2, [1, 2, 9]))
    assert (s.acceptance_rate, s.alpha, s.tokens_per_step) == (2/5, 2/3, 3)
    assert statistics(Round([1, 2], 2, [1, 2, 3])).alpha == 1
    assert statistics(Round([1, 2], 0, [3])).alpha == 0
    empty = statistics()
    assert (empty.acceptance_rate, empty.alpha, empty.tokens_per_step, empty.num_drafted) == (0, 0, 0, 0)

def test_rounds_are_counted_by_the_tokens_they_drafted():
    s = statistics(Round([1, 2, 3], 2, [1, 2, 9]), Round([], 0, [4]), Round([5], 1, [5, 6]), Round([7, 8, 9], 0, [3]))
    assert list(s.rounds_by_K.items()) == [(0, 1), (1, 1), (3, 2)] and statistics().rounds_by_K == {}
    assert sum(K * n for K, n in s.rounds_by_K.items()) == s.num_drafted
    assert GenerationResult.from_json(s.to_json()).rounds_by_K == s.rounds_by_K

def test_alpha_stays_where_the_acceptance_rate_falls_with_K():
    "E[accepted / drafted] = Σ αⁱ / K and τ = (1 - α^(K + 1)) / (1 - α) where each draft token is accepted with α."
    alpha, rng = 0.8, SeededRandom(0)
    for K in (1, 3, 6, 12):
        def simulated():
            accepted = next((i for i in range(K) if not rng.bernoulli(alpha)), K)
            return Round([1] * K, accepted, [1] * accepted + [2])
        s = statistics(*(simulated() for _ in range(1500)))
        assert abs(s.alpha - alpha) < 0.05
        assert abs(s.acceptance_rate - sum(alpha**i for i in range(1, K + 1)) / K) < 0.05
        assert abs(s.tokens_per_step - (1 - alpha**(K + 1)) / (1 - alpha)) < 0.35

@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(0, 9), max_size=6), st.data())
def test_statuses_without_the_rejected_are_the_emitted_tokens(drafted, data):
    accepted = data.draw(st.integers(0, len(drafted)))
    emitted = [*drafted[:accepted], 99][:data.draw(st.integers(1, accepted + 1))]  # the text may end inside
    statuses = list(Round(drafted, accepted, emitted).statuses())
    assert [token for token, status in statuses if status != "rejected"] == emitted
    assert sum(status == "rejected" for _, status in statuses) == (accepted < len(drafted) and len(emitted) > accepted)
    assert {status for _, status in statuses} <= STATUS_STYLES.keys()

def example(**changes) -> GenerationResult:
    return replace(
        GenerationResult(
            prompt_ids=[20, 21], generated_ids=[1, 2, 3], text="a<b>\nc", finish_reason="length", method="speculative",
            rounds=[Round([2, 5], 1, [2, 3])], per_token_latencies=[0.05, 0.01, 0.02],
            round_latencies=[0.05, 0.03], time_to_first_token=0.05, total_time=0.08, prefill_time_ms=49.0,
            draft_time_total_ms=2.5, verify_time_total_ms=20.0, sampling_time_total_ms=1.0, peak_memory_mb=812.5,
            settings={"K": 2, "stop": ["x"]},
            token_text={1: "a", 2: "<b>", 3: "\nc", 5: "\n\n"},
        ),
        **changes,
    )

def test_a_result_by_hand_needs_what_people_have():
    "What isn't given follows from what is, or is nothing; statistics are computed."
    rounds = [Round([0] * 4, 3, [0] * 4), Round([0] * 4, 1, [0] * 2)]
    r = GenerationResult(generated_ids=[0] * 7, per_token_latencies=[.04] + [.01] * 6, rounds=rounds)
    assert (r.method, r.time_to_first_token, r.acceptance_rate, r.tokens_per_step) == ("speculative", .04, .5, 3)
    assert r.total_time == pytest.approx(.1) and r.latency_p50 == .01
    assert r.peak_memory_mb is None and r.prompt_ids == []
    assert GenerationResult.from_json(r.to_json()) == r and "acceptance rate 0.50" in r.summary()
    given = GenerationResult(generated_ids=[0], per_token_latencies=[.04], total_time=.5, time_to_first_token=.3)
    assert (given.total_time, given.time_to_first_token, given.method) == (.5, .3, "plain")
    assert (given.draft_time_total_ms, given.verify_time_total_ms, given.num_speculation_rounds) == (None, None, None)
    assert GenerationResult().tokens_per_second == 0
    assert GenerationResult(generated_ids=[0] * 4, total_time=2.0).summary() == (
        "plain: 4 tokens in 2.00 s, 2.0 tokens/s (length)")  # no figure that wasn't given


ELEVEN = dict(
    generated_ids=[7] * 9, per_token_latencies=[.04] + [.012] * 8, total_time=.136, peak_memory_mb=812.5,
    time_to_first_token=.04, acceptance_rate=.75, tokens_per_step=4.0, num_speculation_rounds=2,
    draft_time_total_ms=3.0, verify_time_total_ms=90.0, sampling_time_total_ms=1.0,
)

@pytest.mark.parametrize("made", [lambda: GenerationResult(**ELEVEN), lambda: GenerationResult.from_dict(ELEVEN)],
                         ids=["by hand", "from a dictionary"])
def test_the_figures_of_a_run_elsewhere_are_kept(made):
    "All eleven, rounds or no rounds; where rounds are given, what follows from them does."
    r = made()
    assert {name: getattr(r, name) for name in ELEVEN} == ELEVEN and r.is_speculative and r.num_tokens == 9
    assert "acceptance rate 0.75, 4.00 tokens per round in 2 rounds" in r.summary()
    assert r.to_json_line() == r.to_json() + "\n" and GenerationResult.from_json(r.to_json_line()) == r
    assert GenerationResult.from_dict(asdict(r)) == r
    known = replace(r, rounds=[Round([1, 2], 1, [1, 3])])
    assert (known.acceptance_rate, known.tokens_per_step, known.num_speculation_rounds) == (.5, 2, 1)
    assert "tokens per round" not in GenerationResult(acceptance_rate=.5).summary()  # no figure that wasn't given

@pytest.mark.parametrize(
    "wrong", [dict(acceptance_rate="high"), dict(total_time=None), dict(rounds=[3]), dict(speed=1)], ids=str)
def test_a_dictionary_of_something_else_is_refused(wrong):
    with pytest.raises(InputError, match="Not a GenerationResult"): GenerationResult.from_dict(ELEVEN | wrong)

def test_plain_decoding_has_no_figures_of_drafts():
    rounds = [Round([], 0, [2]), Round([], 0, [3])]
    plain = example(method="plain", rounds=rounds, draft_time_total_ms=None, verify_time_total_ms=None,
                    decode_time_total_ms=21.0)
    names = ("acceptance_rate", "alpha", "tokens_per_step", "num_speculation_rounds", "draft_time_total_ms",
             "verify_time_total_ms")
    assert {name: getattr(plain, name) for name in names} == dict.fromkeys(names)
    assert plain.forward_time_total_ms == 21 and example().forward_time_total_ms == 20 and plain.rounds == rounds
    assert GenerationResult.from_json(plain.to_json()) == plain

def test_a_line_that_lacks_a_figure_is_no_result():
    "Made by hand it may be left out; a file that lacks it was damaged."
    for name in ("text", "total_time", "peak_memory_mb"):
        data = json.loads(example().to_json())
        del data[name]
        with pytest.raises(InputError, match=f"it lacks {name}"): GenerationResult.from_json(json.dumps(data))


def test_derived_figures_are_complete():
    r = example()
    assert (r.num_tokens, r.is_speculative, r.num_speculation_rounds) == (3, True, 1)
    assert r.tokens_per_second == pytest.approx(3 / .08)
    expected = np.percentile([0.05, 0.01, 0.02], [50, 95, 99]).tolist()
    assert [r.latency_p50, r.latency_p95, r.latency_p99] == pytest.approx(expected)
    assert "\n" not in r.summary() and "acceptance rate 0.50" in r.summary() and "length" in r.summary()
    plain = example(method="plain", rounds=[Round([], 0, [2]), Round([], 0, [3])])
    assert plain.num_speculation_rounds is None and not re.search("acceptance|round", plain.summary())
    assert plain.acceptance_rate is plain.alpha is plain.tokens_per_step is None

def test_percentiles_are_per_token_and_per_round():
    r = example(per_token_latencies=[.05, .01, .01, .03], round_latencies=[.05, .02, .03])
    assert [r.latency_p50, r.round_latency_p50] == pytest.approx([.02, .03])
    assert [r.round_latency_p95, r.round_latency_p99] == pytest.approx(np.percentile([.05, .02, .03], [95, 99]))
    assert "p50/p95/p99 20/47/49 ms per token" in r.summary()
    assert example(round_latencies=[]).round_latency_p99 == 0

def test_the_summary_says_rounds_and_memory_where_they_are_known():
    assert "2.00 tokens per round in 1 rounds" in example().summary() and "peak 812 MB" in example().summary()
    assert "peak" not in example(peak_memory_mb=None).summary() and "\n" not in example().summary()
    assert GenerationResult.from_json(example(peak_memory_mb=None).to_json()).peak_memory_mb is None

def test_the_speed_up_is_that_of_the_formula():
    "τ / (v + K c), by the functions of the notebook on speed-up; each phase counts, and the first token's forward not."
    rounds = [Round([1, 2, 3], 1, [1, 9]), Round([4], 1, [4, 5]), Round([], 0, [6])]
    r = example(
        generated_ids=[0, 1, 9, 4, 5, 6], rounds=rounds, round_latencies=[.5, .04, .03, .02], draft_time_total_ms=12.0,
        verify_time_total_ms=70.0, sampling_time_total_ms=5.0, prefill_time_ms=500.0,
    )
    assert r.plain_step == .02
    c, v = draft_cost([r], .02), .075 / 3 / .02
    assert r.speedup_estimate() == pytest.approx(5 / (3 * v + 4 * c))  # 5 tokens, 3 rounds, 4 draft tokens
    assert r.speedup_estimate(.04) == pytest.approx(2 * r.speedup_estimate())

def test_an_estimated_speed_up_is_over_the_fastest_plain_layout():
    "A target packed for several rows takes longer for one: its own plain steps would flatter."
    rounds = [Round([2, 5], 1, [2, 3]), Round([], 0, [4])]
    own = example(rounds=rounds, round_latencies=[.05, .04, .03], per_token_latencies=[.05, .02, .02, .03],
                  generated_ids=[1, 2, 3, 4])
    slow = replace(own, plain_factor=1.5)
    assert own.plain_step == .03 and slow.plain_step == pytest.approx(.02)
    assert slow.speedup_estimate() == pytest.approx(own.speedup_estimate() / 1.5)
    assert slow.speedup_estimate(.02) == own.speedup_estimate(.02)  # of a model that is at its best already

def test_a_speed_up_that_nobody_can_know_is_none():
    drafted = example()
    assert drafted.plain_step is None and drafted.speedup_estimate() is None
    assert drafted.speedup_estimate(.02) == pytest.approx(2 * .02 / .0235)
    assert example(rounds=[], round_latencies=[.05]).speedup_estimate(.02) is None
    plain = example(method="plain", rounds=[Round([], 0, [2]), Round([], 0, [3])], round_latencies=[.05, .02, .04])
    assert plain.plain_step == pytest.approx(.03) and plain.speedup_estimate(.02) is None

LABELS = {True: "", False: "lossy ", None: "perhaps lossy "}

@pytest.mark.parametrize("known", LABELS, ids=str)
def test_whether_it_is_lossless_is_the_first_word(known):
    result = example(is_lossless=known)
    assert result.is_speculative and result.num_speculation_rounds == 1
    assert result.summary() == LABELS[known] + "speculative: " + example(is_lossless=True).summary().split(": ", 1)[1]
    assert result.summary() in result._repr_html_() and GenerationResult.from_json(result.to_json()) == result
    plain = example(method="plain", is_lossless=known)
    assert plain.summary().startswith("plain: ") and not plain.is_speculative

def test_nothing_is_known_of_a_result_that_says_nothing():
    line = json.loads(example().to_json())
    del line["is_lossless"]
    assert example().is_lossless is None and GenerationResult.from_json(json.dumps(line)).is_lossless is None

@pytest.mark.parametrize("wrong", ["yes", 1, [True]], ids=repr)
def test_a_line_that_knows_something_else(wrong):
    line = json.dumps(json.loads(example().to_json()) | dict(is_lossless=wrong))
    with pytest.raises(InputError, match="is_lossless must be bool | None"): GenerationResult.from_json(line)

@pytest.mark.parametrize("said, cold, warm", [
    ("always", True, True), ("greedy", True, False), ("never", False, False), (None, None, None),
])
def test_what_a_rule_promises(said, cold, warm):
    def rule(): pass
    if said: assert promises(lossless=said)(rule) is rule and rule.lossless == said
    assert [is_promised(rule, t) for t in (0, 0.0, 1e-9, 1)] == [cold, cold, warm, warm]

@pytest.mark.parametrize("said", ["sometimes", True, False, ["always"]], ids=repr)
def test_a_promise_in_other_words(said):
    with pytest.raises(InputError, match="always.*greedy.*never"): is_promised(promises(lossless=said)(lambda: 0), 0)


# --- numbers, whatever holds them

WHOLE = [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), torch.tensor(3, dtype=torch.int8)]
TRUTHS = [True, np.bool_(True), np.array(True), torch.tensor(True)]
NO_NUMBERS = [*TRUTHS, "3", None, [3], 3j, np.array([3, 3]), torch.ones(2)]
REAL = [0.5, np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2)]

def test_a_whole_number_becomes_a_plain_one():
    for held in WHOLE:
        for found in (require_int(held, "n", 1), to_number(held), to_int(held)):
            assert found == 3 and type(found) is int
    assert require_int(np.int64(-5), "n", -5) == -5 and require_int(10 ** 30, "n", 0) == 10 ** 30

@pytest.mark.parametrize("wrong", [*NO_NUMBERS, *REAL, 3.0, torch.tensor([True]), math.nan], ids=repr)
def test_what_is_no_whole_number(wrong):
    with pytest.raises(InputError, match=r"^n must be a whole number of at least 1, not .*\.$"):
        require_int(wrong, "n", 1)
    with pytest.raises(TypeError): to_int(wrong)

@pytest.mark.parametrize("wrong", [0, np.int64(0), 9, torch.tensor(9)], ids=repr)
def test_a_whole_number_out_of_range(wrong):
    with pytest.raises(InputError, match="of at least 1 and at most 8, not"): require_int(wrong, "n", 1, 8)
    assert [require_int(end, "n", 1, 8) for end in (1, 8)] == [1, 8]

def test_a_number_becomes_a_plain_one():
    for held in REAL: assert to_number(held) == 0.5 and type(to_number(held)) is float
    assert to_number(float("inf")) == math.inf
    for wrong in NO_NUMBERS: assert math.isnan(to_number(wrong)), wrong

def test_a_result_without_tokens_has_figures_too():
    r = example(generated_ids=[], rounds=[], per_token_latencies=[], total_time=0., text="", token_text={})
    assert (r.tokens_per_second, r.latency_p99, r.alpha) == (0, 0, 0)
    assert r.summary() and r._repr_html_() and GenerationResult.from_json(r.to_json()) == r


# --- one line of JSON

ids = st.lists(st.integers(0, 2**31), max_size=8)
finite = st.floats(allow_nan=False, allow_infinity=False)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(), lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)

@st.composite
def rounds(draw):
    drafted = draw(ids)
    return Round(drafted, draw(st.integers(0, len(drafted))), draw(ids))

results = st.builds(
    GenerationResult, ids, ids, st.text(st.characters()), st.text(), st.sampled_from(["speculative", "plain"]),
    st.lists(rounds(), max_size=4), st.lists(finite, max_size=8), st.lists(finite, max_size=5), *[finite] * 6,
    st.none() | finite, drafter=st.none() | st.text(), loop=st.text(), device=st.text(),
    settings=st.dictionaries(st.text(), anything, max_size=4),
    token_text=st.dictionaries(st.integers(0, 2**31), st.text(st.characters()), max_size=6),  # lone surrogates too
)

@settings(max_examples=examples(150), deadline=None)
@given(results)
def test_json_line_and_back_without_loss(result):
    line = result.to_json()
    assert len(line.splitlines()) == 1 and line.encode()  # one line for every reader, in any encoding
    assert result_from_json(line) == result
    assert GenerationResult.from_json(line).to_json() == line

def test_other_line_separators_do_not_break_the_line():
    odd = example(text="one\u2028two\x85three 🦙")
    assert len(odd.to_json().splitlines()) == 1 and result_from_json(odd.to_json()) == odd
    assert len(json.dumps(asdict(odd), ensure_ascii=False).splitlines()) == 3  # the tempting version

def test_a_line_is_standard_json():
    with pytest.raises(ValueError): example(total_time=math.nan).to_json()
    first = json.loads(example().to_json(), parse_constant=pytest.fail)["rounds"][0]
    assert first == {"drafted": [2, 5], "accepted": 1, "emitted": [2, 3]}

@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, len(example().to_json()) - 1))
def test_every_truncated_line_is_an_input_error(length):
    with pytest.raises(InputError, match="to_json"): result_from_json(example().to_json()[:length])

OTHER = [
    "null", "3", '"text"', "[]", "[1, 2]", "{}", '{"rounds": []}', '{"rounds": 3, "token_text": {}}', "[" * 100_000,
    "{}{}", "not json", "",
]

@pytest.mark.parametrize("line", [*OTHER, None, 3, b"\xff", [1]], ids=lambda line: str(line)[:20] or "empty")
def test_other_things_are_input_errors(line):
    with pytest.raises(InputError, match="Not a GenerationResult"): result_from_json(line)

WRONG = {
    "prompt_ids": ["text", [1, "2"], None, {"a": 1}, [True], [1.5]],
    "generated_ids": ["", 5],
    "text": [3, None],
    "finish_reason": [None],
    "method": [[]],
    "rounds": [
        "text", [3], [{}], [[1, 2, 3]], None, [{"drafted": "ab", "accepted": 0, "emitted": []}],
        [{"drafted": [], "accepted": "0", "emitted": []}], [{"drafted": [1], "accepted": 2, "emitted": []}],
        [{"drafted": [1], "accepted": -1, "emitted": []}], [{"drafted": [], "accepted": 0, "emitted": [], "extra": 1}],
    ],
    "per_token_latencies": ["0.1", [None], [math.nan], [math.inf], 0.1],
    "total_time": ["1", None, True, math.nan, math.inf, -math.inf],
    "round_latencies": [None, [True], ["0.1"], [math.inf]],
    "peak_memory_mb": [[], math.nan, "812"],
    "drafter": [3, ["head"]],
    "batch_invariant": ["yes", 1, [True]],
    "loop": [None, 1],
    "device": [None, 0],
    "layout": [None, 0],
    "plain_factor": [None, "1", .5, 0, -1.0, math.nan],
    "settings": [[], "K", None, {"temperature": math.nan}],
    "token_text": [[], {"x": "a"}, {"1": 2}, None],
    "logprobs": [{}, 3, [[]], [{"x": -1.0}], [{"1": "2"}], [{"1": math.nan}]],
}

@pytest.mark.parametrize("name,value", [(name, value) for name, values in WRONG.items() for value in values], ids=str)
def test_wrong_types_and_numbers_are_input_errors(name, value):
    with pytest.raises(InputError, match="Not a GenerationResult"):
        result_from_json(json.dumps({**asdict(example()), name: value}))

DEFAULTS = ("settings", "is_lossless", "batch_invariant", "same_text_as_plain", "drafter", "loop", "device", "layout",
            "plain_factor", "costs", "logprobs", "tokens_before_stop", "fits_grammar", "prompt_reused", "run",
            "decode_time_total_ms", "acceptance_rate", "tokens_per_step", "num_speculation_rounds")

def test_missing_and_unknown_fields_are_input_errors():
    data = json.loads(example().to_json())
    for name in data:
        if name not in DEFAULTS:
            with pytest.raises(InputError): result_from_json(json.dumps({k: v for k, v in data.items() if k != name}))
    with pytest.raises(InputError, match="surprise"): result_from_json(json.dumps({**data, "surprise": 1}))

def test_a_number_too_large_for_a_float_is_an_input_error():
    with pytest.raises(InputError, match="finite"): result_from_json(example().to_json().replace("812.5", "1e999"))


# --- colours

def test_html_escapes_what_the_model_wrote_and_marks_each_status():
    html = example()._repr_html_()
    assert "<b>" not in html and "&lt;b&gt;" in html
    assert html.count("<del") == 2 and html.count("<ins") == 2  # once in the text, once in the key
    assert 'title="draft token, accepted"' in html and "aria-label" in html

def test_a_rejected_line_break_breaks_no_line():
    html = statuses_html(example())
    # two marks for the rejected token, one for the replacement, which does break
    assert html.count("⏎") == 3 and html.count("\n") == 1

def test_a_token_without_text_shows_its_id():
    assert "[77]" in statuses_html(example(generated_ids=[77], rounds=[]))

def test_statuses_cover_the_whole_text():
    assert [token for token, status in statuses(example()) if status != "rejected"] == example().generated_ids

def test_looks_can_be_told_apart_without_colour_and_set_their_text_colour():
    decorations = [style.partition("text-decoration:")[2] for style in STATUS_STYLES.values()]
    assert len(set(decorations)) == len(decorations)
    assert all("background:" in style and ";color:" in style for style in STATUS_STYLES.values() if style)

def luminance(colour: str) -> float:
    "Relative luminance of #rrggbb (WCAG 2.1)."
    parts = (int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055)**2.4 for c in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

@pytest.mark.parametrize("status", [status for status, style in STATUS_STYLES.items() if style])
def test_text_can_be_read_on_its_colour(status):
    "The strictest level of the Web Content Accessibility Guidelines asks for a contrast of 7."
    background, text = (part.split(":")[1] for part in STATUS_STYLES[status].split(";")[:2])
    assert (luminance(background) + 0.05) / (luminance(text) + 0.05) > 7

def test_every_status_has_a_look_and_a_meaning(): assert STATUS_STYLES.keys() == STATUS_MEANINGS.keys()


def test_core_is_light_to_import():
    code = (
        "import sys, specdec.sampling, specdec.errors, specdec.engine.profiling, specdec.result; "
        "assert not {'transformers', 'matplotlib', 'scipy', 'IPython'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for module in (sampling, errors, profiling, result): assert importlib.import_module(module.__name__) is module


# Interrupts

def interrupted_as(error):
    "What a library may make of Ctrl-C: another error, or nothing at all."
    try: signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        if error: raise error from None


@pytest.fixture
def ctrl_c():
    "Ctrl-C is heard, also where the test run was started in the background."
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "error", [ValueError("no shape"), ModelError("missing"), None], ids=["error", "ours", "nothing"]
)
def test_an_interrupt_is_kept_whatever_became_of_it(ctrl_c, error):
    with pytest.raises(KeyboardInterrupt):
        with preserve_interrupts():
            with preserve_interrupts(): interrupted_as(error)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_errors_without_an_interrupt_stay_what_they_are(ctrl_c):
    with pytest.raises(ZeroDivisionError):
        with preserve_interrupts(): 1 / 0
    with preserve_interrupts(): done = True
    assert done


def test_a_handler_that_does_not_raise_has_its_way(ctrl_c):
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    with preserve_interrupts(): signal.raise_signal(signal.SIGINT)
    assert heard == [1]


def test_other_threads_and_ignored_interrupts_change_nothing(ctrl_c):
    done = []
    def work():
        with preserve_interrupts(): done.append(signal.getsignal(signal.SIGINT))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    work()
    assert done == [signal.default_int_handler, signal.SIG_IGN]
