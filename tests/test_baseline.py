"""What the package computed when the record was made, it computes still: a slice of `tools/baseline.py`, and whether
that tool would notice."""
import copy
import fnmatch
from pathlib import Path

import pytest
import torch

from helpers import tool

RECORD = Path(__file__).parent / "data" / "baseline.json.xz"
SLICE = ("tiny/float32/*/cat/T0 K=[48]", "tiny/float32/*/cat/T1 K=4", "tiny/float32/small/cat/T0 K=4 device",
         "tiny/float32/hybrid/list/T0 K=4 B=3", "tiny/float32/small/cat/T0 K=4 regex")


@pytest.fixture(scope="module")
def baseline():
    threads = torch.get_num_threads()
    yield tool("baseline")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def chosen(baseline):
    return [case for case in baseline.CASES if any(fnmatch.fnmatch(case.name, pattern) for pattern in SLICE)]


@pytest.fixture(scope="module")
def now(baseline, chosen): return baseline.run(chosen)


def failures(baseline, old, new, chosen):
    return sorted({kind for kind, *_ in baseline.compare(old, new, chosen) if kind in baseline.HARD})


def test_what_must_stay_is_as_it_was_recorded(baseline, chosen, now):
    assert len(chosen) > 40 and len(now["logits"]) == 1
    assert failures(baseline, baseline.read(RECORD), now, chosen) == []


def test_the_record_holds_every_configuration_and_no_error(baseline):
    old = baseline.read(RECORD)
    assert len(baseline.CASES) >= 200 and {case.name for case in baseline.CASES} == old["cases"].keys()
    assert not [name for name, case in old["cases"].items() if "error" in case]
    accepted = [sum(r[1] for text in case["texts"] for r in text["rounds"]) for case in old["cases"].values()]
    assert sum(n > 2 for n in accepted) > 200  # a text without an accepted token shows little


@pytest.mark.parametrize("of, change, kind", [
    ("logits", lambda found: found.update(all="0" * 16), "logits"),
    ("text", lambda found: found["ids"].__setitem__(5, 0), "greedy text in float32"),
    ("text", lambda found: found.update(finish="eos"), "finish reason of a greedy text in float32"),
    ("text", lambda found: found["rounds"].pop(), None),
    ("text", lambda found: found.update(keys=len("another")), None),
], ids=["logits", "text", "finish", "rounds", "keys"])
def test_each_difference_is_told_by_its_kind(baseline, chosen, now, of, change, kind):
    other = copy.deepcopy(now)
    other["keys"] += [["another"]] * 9
    found = other["logits"]["tiny/float32/cat"] if of == "logits" else other["cases"][chosen[0].name]["texts"][0]
    change(found)
    told = baseline.compare(now, other, chosen)
    assert len(told) == 1 and (told[0][0] == kind if kind else told[0][0] not in baseline.HARD)
    assert baseline.compare(now, copy.deepcopy(now), chosen) == []


def test_another_models_texts_and_a_broken_loop_are_noticed(baseline, chosen, now, monkeypatch):
    "The negative control: what computes something else fails."
    few = [case for case in chosen if case.drafter in ("small", "suffix") and case.settings.get("K") == 4]
    load = baseline.load
    def nudged(name, dtype):
        model = load(name, dtype)
        forward = model.forward
        model.forward = lambda *args, **options: forward(*args, **options) * (1 + 2 ** -20)
        return model
    def biased(name, dtype):
        model = load(name, dtype)
        forward = model.forward
        def other(ids, cache=None, **options): return forward((ids + 1) % model.vocab_size, cache, **options)
        model.forward = other
        return model
    for broken, due in ((nudged, "logits"), (biased, "greedy text in float32")):
        forget(baseline)
        monkeypatch.setattr(baseline, "load", broken)
        assert due in failures(baseline, now, baseline.run(few), few)
    forget(baseline)


def test_what_raises_is_a_difference(baseline, chosen, now, monkeypatch):
    monkeypatch.setattr(type(chosen[0]), "arguments", lambda self: {"K": 0})
    assert failures(baseline, now, baseline.run(chosen[:1]), chosen[:1]) == ["error"]


def test_on_another_processor_bits_are_not_compared_and_near_ties_are_no_failure(baseline, chosen, now):
    other = copy.deepcopy(now)
    other["processor"]["model name"] = "another"
    greedy = next(case for case in chosen if case.is_greedy)
    other["logits"]["tiny/float32/cat"]["all"] = "0" * 16
    assert failures(baseline, now, other, chosen) == []
    other["cases"][greedy.name]["texts"][0]["ids"][3] = 0
    assert failures(baseline, now, other, chosen) == ["greedy text in float32"]
    near = copy.deepcopy(now)
    near["logits"]["tiny/float32/cat"]["lead"] = 1e-5
    assert failures(baseline, near, other, chosen) == []


def forget(baseline):
    for function in (baseline.tiny, baseline.pair, baseline.target_of): function.cache_clear()
