"""The conformance kit: right rules pass, every broken one is caught, the sequential test keeps its stated error rates,
and bad input is refused."""
import math
import random

import numpy as np
import pytest
import torch

from specdec.errors import InputError, NumericalError
from specdec.lossless.black_box import (
    Bins,
    BrokenDecoder,
    check_decoder,
    distribution_after,
    e_processes,
    flaw,
    log_e_value,
    power_of,
    rank,
    samples_needed,
    tempered,
    tv_interval,
)
from specdec.lossless.check import NotLossless, check_verify, pick_route
from specdec.lossless.gallery import GALLERY, Broken
from specdec.lossless.proof import Language, distance, target_distribution
from specdec.sampling import SamplingParams, SeededRandom
from specdec.verify import greedy_match, promises, speculative_sampling

V, START = 3, [0]


def uneven(seed):
    "A language without zeros."
    language = Language(V, seed)
    return lambda text: (5 * language(text) + 1) / 8


def logits_of(language): return lambda ids: torch.tensor(language(tuple(ids[1:])).astype(float)).log()


P, Q = uneven("target 6"), uneven("draft 6")
DISTRIBUTION, DRAFT_DISTRIBUTION = (distribution_after(logits_of(language), START, SamplingParams(1.0))
                                    for language in (P, Q))
BINS = Bins(DISTRIBUTION, 3, 2)
EXPECTED, PROCESSES = BINS.distribution(DISTRIBUTION), e_processes(BINS, DISTRIBUTION)
BY_NAME = {b.name: b for b in GALLERY}


class Chance(SeededRandom):
    "A source that takes fractions too."
    def categorical(self, weights): return super().categorical(torch.tensor([float(w) for w in weights]))


def box(broken, K=1):
    "A black box with one of the gallery's mistakes."
    decoder = BrokenDecoder(broken, P, Q, V, K)
    return lambda prompt, n, seed: decoder.text(n, Chance(seed))


def sampler(language):
    def generate(prompt, n, seed):
        rng, text = SeededRandom(seed), ()
        while len(text) < n: text += (rng.categorical(torch.tensor(language(text).astype(float))),)
        return list(text)
    return generate


# Verify functions

def with_torch(p, q, tokens, rng):
    for i, token in enumerate(tokens):
        if torch.rand(()) >= p[i, token] / q[i, token]: return i, torch.multinomial((p[i] - q[i]).clamp(min=0), 1)
    return len(tokens), torch.multinomial(p[len(tokens)], 1)


def test_right_rules_pass_on_both_routes():
    small = [(1, 2), (1, 3), (2, 2), (2, 3)]
    exact = check_verify(speculative_sampling, none=True)
    assert (exact.lossless, exact.route, exact.error) == (True, "fractions", 0) and exact.cases > 200
    floats = check_verify(speculative_sampling, sizes=small, route="tensors")
    assert floats.lossless and floats.error < 1e-12
    drawn = check_verify(with_torch, sizes=small)
    assert drawn.lossless and drawn.route == "tensors" and drawn.error < 1e-12
    single = check_verify(with_torch, sizes=small, dtype=torch.float32)
    assert single.lossless and single.error < 1e-6
    exact.raise_if_lossy()


@pytest.mark.parametrize("broken", [b for b in GALLERY if b.part != "cache"], ids=lambda b: b.name)
def test_the_gallery_is_caught(broken):
    report = check_verify(broken.verify, draft=None if broken.part == "rule" else broken.draft)
    assert not report.lossless
    with pytest.raises(AssertionError): report.raise_if_lossy()


def test_a_rule_for_tensors_that_is_wrong_is_caught():
    def resamples_from_p(p, q, tokens, rng):
        for i, token in enumerate(tokens):
            if torch.rand(()) >= p[i, token] / q[i, token]: return i, torch.multinomial(p[i], 1)
        return len(tokens), torch.multinomial(p[len(tokens)], 1)
    report = check_verify(resamples_from_p, sizes=[(1, 3), (2, 2)])
    assert report.route == "tensors" and report.error > 0.1 and "NOT LOSSLESS" in report.summary()
    assert report.found != report.expected and distance(report.found, report.expected) == report.error


def test_what_it_raises_and_returns_is_in_the_report():
    def raises(p, q, tokens, rng):
        if len(tokens) == 2: raise RuntimeError("two is too many")
        return speculative_sampling(p, q, tokens, rng)
    report = check_verify(raises)
    assert not report.lossless and "two is too many" in report.raised and "K = 2" in report.raised
    assert "9 of" in check_verify(lambda p, q, tokens, rng: (9, 0)).raised
    assert "token 77" in check_verify(lambda p, q, tokens, rng: (0, 77)).raised
    assert not check_verify(lambda p, q, tokens, rng: (0, int(np.random.rand() < .5))).lossless


def test_a_randomness_that_cannot_be_followed_is_refused():
    state = iter(range(10 ** 9))
    with pytest.raises(InputError, match="can't be followed"):
        check_verify(lambda p, q, tokens, rng: (0, next(state) // 3 % 2))
    def later(p, q, tokens, rng):
        if len(tokens) > 1: random.random()
        return speculative_sampling(p, q, tokens, rng)
    report = check_verify(later)
    assert report.route == "fractions" and "Python's `random`" in report.raised and not report.lossless
    assert "no verdict" in report.summary() and "NOT LOSSLESS" not in report.summary()


def test_routes():
    assert pick_route(speculative_sampling, torch.float64) == "fractions"
    assert pick_route(with_torch, torch.float64) == "tensors"
    epsilon = lambda p, q, tokens, rng: (
        speculative_sampling(p, q, tokens, rng)
        if rng.bernoulli(0.5)
        else speculative_sampling(p, q, tokens, rng)
    )
    assert pick_route(epsilon, torch.float64) == "tensors"  # it draws with a float


@pytest.mark.parametrize(
    "wrong",
    [
        dict(seeds=0), dict(sizes=[]), dict(sizes=[(0, 2)]), dict(sizes=[(1, 17)]), dict(route="x"), dict(tolerance=0),
        dict(seeds=True), dict(seeds=1.5), dict(sizes=[(True, 2)]), dict(sizes=[(1, "2")]), dict(tolerance=True),
        dict(fn="x"),
    ],
    ids=str,
)
def test_bad_input_to_check_verify(wrong):
    with pytest.raises(InputError, match="^(?!.*`most`)"): check_verify(**{"fn": speculative_sampling} | wrong)


# The game

def test_bins_are_a_partition_and_their_distribution_is_exact():
    whole = target_distribution(P, 3)
    by_hand = np.zeros(len(BINS))
    for text, weight in whole.items(): by_hand[BINS(text)] += float(weight)
    assert abs(by_hand - EXPECTED).max() < 1e-6 and abs(EXPECTED.sum() - 1) < 1e-9
    ended = Bins(DISTRIBUTION, 3, 2, eos_ids={BINS.kept[()][0]})
    assert (BINS.kept[()][0],) in ended.texts and abs(ended.distribution(DISTRIBUTION).sum() - 1) < 1e-9
    assert ended([BINS.kept[()][0]]) == ended.texts.index((BINS.kept[()][0],))


def test_the_e_value_is_a_martingale():
    identity = np.eye(len(BINS))
    start = np.random.default_rng(0).integers(0, 5, len(BINS)).astype(float)  # any past
    after = sum(w * np.exp(log_e_value(PROCESSES, start + identity[b])) for b, w in enumerate(EXPECTED))
    assert math.isclose(after, np.exp(log_e_value(PROCESSES, start)), rel_tol=1e-9)
    assert math.isclose(np.exp(log_e_value(PROCESSES, 0 * start)), 1, rel_tol=1e-9)


def test_false_positives_stay_below_the_stated_rate():
    rng, rate = np.random.default_rng(1), 0.1
    counts = np.eye(len(BINS))[rng.choice(len(BINS), size=(300, 500), p=EXPECTED)].cumsum(1)
    rejects = (log_e_value(PROCESSES, counts) >= -math.log(rate)).any(1)  # a look after every sample
    assert rejects.mean() < rate
    wrong = np.eye(len(BINS))[rng.choice(len(BINS), size=(50, 500),
                                         p=BINS.distribution(tempered(DISTRIBUTION, 2)))].cumsum(1)
    assert (log_e_value(PROCESSES, wrong) >= -math.log(rate)).any(1).mean() > 0.9


def test_the_stated_power_holds():
    truth = BINS.distribution(tempered(DISTRIBUTION, 1.6))
    away = abs(truth - EXPECTED).sum() / 2
    samples = samples_needed(PROCESSES, 1e-6, away)
    assert power_of(PROCESSES, samples, 1e-6, away) >= 0.9 > power_of(PROCESSES, samples // 3, 1e-6, away)
    counts = np.random.default_rng(2).multinomial(samples, truth, size=300)
    assert (log_e_value(PROCESSES, counts) >= math.log(1e6)).mean() >= 0.9
    assert power_of(PROCESSES, 10 ** 6, 1e-6, .95) == 0  # no law is so far away: no claim


SEEN = [
    "accept everything", "first token unverified", "greedy draft, softmax q", "top-p not reported",
    "verified by the row after", "residual cut to the draft's size", "end token thrown away",
    "one number for draft and verdict",
]


def test_three_thousand_samples_catch_the_controls_with_power_99_in_100():
    "Texts of three tokens, two of them drafted; the page of the kit shows it for the whole gallery."
    def rejected(distribution):
        weights = np.zeros(len(BINS))
        for text, weight in distribution.items(): weights[BINS(text)] += float(weight)
        counts = np.random.default_rng(4).multinomial(3000, weights, size=400)
        return (log_e_value(PROCESSES, counts) >= math.log(1e6)).mean()
    for name in SEEN:
        assert rejected(BrokenDecoder(BY_NAME[name], P, Q, V, 2, drafts_first=True).distribution(3)) >= 0.99, name
    assert rejected(target_distribution(P, 3)) == 0


def test_how_many_samples_a_report_says():
    report = check_decoder(sampler(P), logits_of(P), START, samples=60, weak=True, distance=.2)
    assert report.samples_for(.2) == report.needed < report.samples_for(.1) and report.samples_for(.95) is None


def test_the_interval_covers():
    rng = np.random.default_rng(3)
    for beta in (1, 1.5):
        truth = BINS.distribution(tempered(DISTRIBUTION, beta))
        away = abs(truth - EXPECTED).sum() / 2
        for n, planned in ((500, 500), (500, 900)):
            found = [tv_interval(BINS, EXPECTED, rng.multinomial(n, truth), planned, .05) for _ in range(100)]
            assert sum(low <= away <= high for _, low, high in found) >= 95
    # far away is seen to be far away
    assert tv_interval(BINS, EXPECTED, 5000 * np.eye(len(BINS))[0], 5000, .01)[1] > 0.3


# Black boxes

def test_a_right_decoder_passes_and_wrong_ones_do_not():
    right = check_decoder(sampler(P), logits_of(P), START, samples=2000, distance=.15)
    assert right.lossless and right.power >= 0.9 and right.samples == 2000 and max(right.log_e_values) < math.log(1e6)
    right.raise_if_lossy()
    flat = check_decoder(
        sampler(lambda text: np.sqrt(P(text).astype(float))), logits_of(P), START, samples=2000, distance=0.15
    )
    assert flat.rejected and flat.samples < 2000 and "flatter" in flat.suspects[0].name
    # the first token's law is wrong too, only not by so much
    assert not any("nothing is wrong" in remark for remark in flat.remarks)
    with pytest.raises(NotLossless, match="REJECTED"): flat.raise_if_lossy()


@pytest.mark.parametrize("name", [
    "keep the greedy test", *[pytest.param(name, marks=pytest.mark.slow) for name in (
        "accept everything", "temperature not reported")],
])
def test_mutants_are_caught_and_named(name):
    report = check_decoder(
        box(BY_NAME[name]), logits_of(P), START, samples=1500, distance=0.2, stop=False, draft=logits_of(Q), K=1
    )
    assert report.rejected
    assert name in [s.name for s in report.suspects[:2]], report.suspects[:4]


def test_a_right_loop_is_not_accused():
    report = check_decoder(
        box(Broken("right", "", ""), K=2), logits_of(P), START, samples=1000, distance=0.2, draft=logits_of(Q), K=2
    )
    assert report.lossless and not report.suspects


def test_naming_prefers_none_of_these_to_a_wrong_name():
    odd = EXPECTED * np.where(np.arange(len(BINS)) % 2, 1.6, 0.4)
    distributions = ((name, "", weights) for name,
                     weights in {"sharper": BINS.distribution(tempered(DISTRIBUTION, 2))}.items())
    best = rank(np.round(2000 * odd / odd.sum()), EXPECTED, distributions, [b for b in PROCESSES if b.depth == 3])[0]
    assert best.name == "none of these"


def test_proofs_and_forms():
    outside = check_decoder(sampler(P), logits_of(P), START, SamplingParams(1.0, top_k=2), samples=2000, distance=.2)
    assert outside.rejected and outside.samples < 50 and "probability 0" in outside.proof
    greedy = check_decoder(
        lambda prompt, n, seed: [int(P(()).argmax())] * n, logits_of(P), START, samples=2000, distance=0.2
    )
    assert greedy.rejected and any("every seed" in remark for remark in greedy.remarks)
    for answer in ([1], [0, 1, 1, 1], [1, 1, 9], None, "120", [1.7, 2.2, 0.]):
        assert check_decoder(lambda prompt, n, seed: answer, logits_of(P), START, samples=2000, distance=.2).proof
    assert "prompt" in flaw([0, 1, 1, 1], 3, [0], V, frozenset()) and flaw([1, 2], 3, [0], V, {2}) == ""
    assert flaw([2, 1, 1], 3, [0], V, {2})


def test_temperature_zero():
    def logits(ids): return logits_of(P)(ids)
    distribution = distribution_after(logits, START, SamplingParams(0.0))
    said = []
    for _ in range(3): said.append(int(distribution(tuple(said)).argmax()))
    assert check_decoder(lambda prompt, n, seed: said, logits, START, SamplingParams(0.0), samples=50).lossless
    assert check_decoder(
        lambda prompt, n, seed: [*said[:2], (said[2] + 1) % V], logits, START, SamplingParams(0.0), samples=50
    ).proof


def test_interrupt_and_seeds():
    seen = []
    def generate(prompt, n, seed):
        seen.append(seed)
        if len(seen) == 10: raise KeyboardInterrupt
        return sampler(P)(prompt, n, seed)
    report = check_decoder(generate, logits_of(P), START, samples=2000, distance=.2, seed=5)
    assert report.interrupted and report.samples == 9 and seen == list(range(5, 15))
    assert not report.lossless and not report.rejected


@pytest.mark.parametrize(
    "wrong",
    [
        dict(samples=0), dict(false_positive_rate=0), dict(false_positive_rate=1), dict(prompt=[]), dict(length=0),
        dict(width=0), dict(distance=2), dict(K=1), dict(length=12), dict(confidence=1), dict(samples=50),
        dict(samples=3, distance=0.95),
        dict(distance=0.95, weak=True), dict(draft=logits_of(Q), K=1.5),
        dict(draft=lambda ids: torch.zeros(V - 1), K=1),
    ],
    ids=lambda wrong: ", ".join(wrong),
)
def test_bad_input_to_check_decoder(wrong):
    def never(prompt, n, seed): raise AssertionError("no sample may be drawn")
    with pytest.raises(InputError):
        check_decoder(**{"generate": never, "target": logits_of(P), "prompt": START} | wrong)


@pytest.mark.parametrize(
    "row, error",
    [
        (torch.full((V,), math.nan), NumericalError), (torch.full((V,), -math.inf), NumericalError),
        (torch.zeros(1, V), InputError), (torch.tensor(0.0), InputError),
    ],
    ids=str,
)
def test_a_target_without_a_distribution_is_refused(row, error):
    with pytest.raises(error): check_decoder(sampler(P), lambda ids: row, START, samples=1000, distance=.2)


def test_weak_tests_say_so():
    report = check_decoder(sampler(P), logits_of(P), START, samples=60, weak=True)
    assert report.power < 0.5 and report.needed > 60 and str(report.needed) in report.summary()


def test_the_example_for_other_projects():
    "A file of three tests, which pass; of a decoder that was told another temperature the check does not."
    import json
    from pathlib import Path
    cells = json.loads((Path(__file__).parents[1] / "nbs/lossless/08_black_box.ipynb").read_text())["cells"]
    source = next("".join(c["source"]) for c in cells if "EXAMPLE = '''" in "".join(c["source"]))
    right, wrong = {}, {}
    exec(example := source.split("'''")[1], right)
    exec(example.replace("p = (logits(ids) / 0.7)", "p = (logits(ids) / 1.3)"), wrong)
    tests = [name for name in right if name.startswith("test_")]
    for name in tests: right[name]()
    assert len(tests) == 3
    with pytest.raises(NotLossless): wrong["test_the_decoder_samples_from_the_target"]()


# What a rule says of itself, and what is shown

def test_a_promise_that_is_not_kept_is_named():
    def believer(p, q, tokens, rng): return len(tokens), rng.categorical(p[len(tokens)])
    few = dict(sizes=[(1, 2)], seeds=1)
    for said, words in (("always", "promises to be lossless always"), (None, ""), ("never", "")):
        report = check_verify(promises(lossless=said)(believer), **few)
        assert not report.lossless and report.promise == said and words in report.summary()
        assert ("promises" in report.summary()) == bool(words)
    greedy = check_verify(greedy_match, **few)
    assert not greedy.lossless and "at temperature 0 only" in greedy.summary()
    assert "promises" not in check_verify(speculative_sampling, **few).summary()


@pytest.mark.parametrize("answer", [(0.5, 0), (True, 0), ("0", 0), (0, None)], ids=repr)
def test_a_rule_that_answers_no_whole_numbers_gets_no_verdict(answer):
    report = check_verify(lambda p, q, tokens, rng: answer, sizes=[(1, 2)], seeds=1)
    assert not report.lossless and report.raised and "no verdict" in report.summary()
