"""Audits of rules: a verdict says "lossless" of rules and rounds that are, of no others, and takes what goes wrong for
no verdict."""
import json
import sys
from fractions import Fraction
from functools import partial

import pytest
import torch

from audits import rules as module
from audits.rules import (
    RULES,
    Audited,
    as_round,
    at_zero,
    check_round,
    findings,
    judge_open,
    judge_round,
    judge_rule,
    without_zeros,
)
from specdec.lossless.check import VerifyReport, check_verify, verify_cases
from specdec.lossless.proof import Language, sampled


def a_round(ratio=lambda p, q, x: p[x] / q[x], resample=lambda p, q: (p - q).clamp(0), bonus=lambda p, q: p[-1]):
    "A round of two models, right unless a part of it is given."
    def fn(target, draft, K):
        ids = module.PROMPT
        for _ in range(K): ids = torch.cat([ids, torch.multinomial(draft(ids)[0, -1].softmax(-1), 1)[None]], -1)
        p, q, tokens = target(ids)[0].softmax(-1), draft(ids)[0].softmax(-1), ids[0, 1:].tolist()
        for i, x in enumerate(tokens):
            if torch.rand(()) < ratio(p[i], q[i], x): continue
            return [*tokens[:i], int(torch.multinomial(resample(p[i], q[i]), 1))]
        return [*tokens, int(torch.multinomial(bonus(p, q), 1))]
    return fn


WRONG = {
    "resample from p": a_round(resample=lambda p, q: p), "accepts too much": a_round(lambda p, q, x: 2 * p[x] / q[x]),
    "bonus one row early": a_round(bonus=lambda p, q: p[-2]), "bonus from the draft": a_round(bonus=lambda p, q: q[-1]),
}


@pytest.fixture(scope="module")
def cases(): return list(verify_cases([(1, 3), (2, 2)], seeds=1, draft=sampled))


def test_a_right_round_is_lossless_on_every_case(cases):
    report = check_round("right", a_round(), cases)
    assert report.lossless and report.cases == len(cases) and report.error < 1e-6


@pytest.mark.parametrize("fn", WRONG.values(), ids=WRONG)
def test_a_wrong_round_is_not(cases, fn):
    report = check_round("wrong", fn, cases)
    assert not report.lossless and report.error > .01 and report.cases == len(cases)


def test_models_say_the_distributions_of_the_case(cases):
    case = cases[0]
    logits = module.model_of(case.p)(torch.tensor([[0, 1]]))
    assert logits.shape == (1, 2, case.V)
    for text, row in (((), logits[0, 0]), ((1,), logits[0, 1])):
        assert row.softmax(-1).tolist() == pytest.approx(case.p(text).astype(float).tolist())


small_round = partial(judge_round, sizes=[(1, 3)])


def asked(fn, judge=small_round, **more) -> dict:
    "The verdict on a rule or a round of ours."
    return Audited("ours", "1.0", "ours.verify", lambda: fn, judge, does="It errs.", **more).ask()


def test_a_verdict_explains_what_is_wrong_and_only_then():
    good, bad = asked(a_round()), asked(WRONG["resample from p"])
    assert good["lossless"] is True and "does" not in good and good["case"] is None
    assert bad["lossless"] is False and bad["does"] == "It errs." and bad["lossy_cases"] > 0 and "K = 1" in bad["case"]
    assert json.loads(json.dumps(bad)) == bad and bad["command"] == "specdec audit ours"


def test_a_verdict_shows_the_text_that_is_furthest_off():
    expected, found = ({(i,): Fraction(w, 10) for i, w in enumerate(distribution)}
                       for distribution in ([6, 1, 3], [5, 4, 1]))
    report = VerifyReport("by hand", "tensors", 1e-6)
    report.add("case", found, expected)
    shown = findings(report)
    assert shown["text"] == [1] and shown["has"] == .4 and shown["due"] == .1 and shown["fraction"] == "3/10"


def test_an_error_is_a_fraction_only_where_it_is_one():
    report = check_verify(lambda p, q, tokens, source: (0, tokens[0]), sizes=[(1, 3)], seeds=1, route="tensors")
    exact = report.error
    assert findings(report)["fraction"] == str(exact)
    report.error = exact + Fraction(1, 10 ** 7)
    assert findings(report)["fraction"] is None


def test_a_rule_is_asked_as_one():
    def rule(p, q, tokens, source): return 0, int(torch.multinomial(p[0], 1))
    def broken(p, q, tokens, source): return 1, int(torch.multinomial(p[1], 1))
    assert asked(rule, judge_rule)["lossless"] is True and asked(broken, judge_rule)["lossless"] is False


@pytest.mark.parametrize("judge", [judge_rule, small_round], ids=["rule", "round"])
def test_what_raises_gets_no_verdict(judge):
    def raises(*_): raise ZeroDivisionError("of theirs")
    found = asked(raises, judge)
    assert found["lossless"] is None and "of theirs" in found["raised"] and "does" not in found


# Laws for those who can't bear all

@pytest.mark.parametrize("V", [2, 3, 4])
def test_opened_distributions_have_no_zeros_and_no_ties(V):
    for seed in range(30):
        row = without_zeros(Language(V, seed))(())
        assert sum(row) == 1 and min(row) > 0 and len(set(row)) == V


def test_temperature_zero_leaves_the_likeliest():
    distribution = without_zeros(Language(4, "a"))
    row = at_zero(distribution)(())
    assert list(row) == [int(w == max(distribution(()))) for w in distribution(())]


def greedy_by_softmax(target, draft, K):
    "The draft is greedy, its q a softmax: at temperature 0 the target's likeliest token isn't sure."
    token = draft(module.PROMPT)[0, -1].argmax()
    p, q = target(module.PROMPT)[0, -1].softmax(-1), draft(module.PROMPT)[0, -1].softmax(-1)
    return [int(token if torch.rand(()) < p[token] / q[token] else (p - q).argmax())]


def greedy(target, draft, K): return [int(target(module.PROMPT)[0, -1].argmax())]


@pytest.mark.parametrize("fn, lossless", [(greedy, True), (greedy_by_softmax, False)], ids=["right", "by softmax"])
def test_a_round_is_held_to_the_distribution_of_its_options(fn, lossless):
    found = judge_open(fn, 0, sizes=[(1, 3)], wanted=at_zero)
    assert found["lossless"] is lossless


def test_a_rule_is_a_round_with_a_draft_before_it(cases):
    def right(p, q, tokens, source):
        for i, x in enumerate(tokens):
            if torch.rand(()) >= p[i, x] / q[i, x]: return i, int(torch.multinomial((p[i] - q[i]).clamp(0), 1))
        return len(tokens), int(torch.multinomial(p[-1], 1))
    def wrong(p, q, tokens, source): return len(tokens), int(torch.multinomial(p[-1], 1))
    assert check_round("right", as_round(right), cases).lossless
    assert not check_round("wrong", as_round(wrong), cases).lossless


ADAPTERS = {"missing": (lambda: __import__("nobody"), "ModuleNotFoundError: No module named 'nobody'"),
            "another one": (lambda: 1 / 0, "ZeroDivisionError: division by zero")}


@pytest.mark.parametrize("adapter, why", ADAPTERS.values(), ids=ADAPTERS)
def test_a_package_that_cannot_be_imported_gets_no_verdict(adapter, why):
    found = Audited("ours", "1.0", "ours.verify", adapter).ask()
    assert found["lossless"] is None and found["raised"] == why


# The entries

def test_names_are_told_apart_and_versions_are_pinned():
    names = [each.name for each in RULES]
    assert len(set(names)) == len(names)
    assert all(wanted.count("==") == 1 for each in RULES for wanted in each.requirements)


def test_what_is_wrong_is_explained_and_only_that():
    for each in RULES: assert bool(each.does) == bool(each.mistake) == bool(each.mend)


def test_a_package_of_our_name_is_imported_beside_ours(tmp_path, monkeypatch):
    ours = sys.modules["specdec"]
    (tmp_path / "specdec").mkdir()
    (tmp_path / "specdec" / "__init__.py").write_text("from .decoder import SpecDecoder\n")
    (tmp_path / "specdec" / "decoder.py").write_text("class SpecDecoder: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    theirs = module._theirs("specdec")
    assert theirs.__file__.startswith(str(tmp_path)) and theirs.SpecDecoder and sys.modules["specdec"] is ours


def test_the_same_question_always_has_the_same_answer():
    "Nothing is drawn, so that there is no false positive by chance."
    answers = [{**asked(a_round()), "seconds": 0} for _ in range(3)]
    assert all(found == answers[0] and found["lossless"] for found in answers) and answers[0]["false_alarm"] == 0
