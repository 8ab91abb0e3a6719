"""The audit: it says "lossless" of rounds that are and of no others, installs what is published into a folder of its
own, and takes what goes wrong for no verdict."""
import json
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from specdec.cli import app
from specdec.core import InputError, ModelError
from specdec.lossless import audit as module
from specdec.lossless.audit import AUDITED, Audited, audit, check_round, verdict
from specdec.lossless.conformance import check_verify, verify_cases
from specdec.lossless.proof import sampled

STORED = json.loads((Path(__file__).parents[1] / "nbs" / "data" / "audit.json").read_text(encoding="utf-8"))


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


def test_models_say_the_laws_of_the_case(cases):
    case = cases[0]
    logits = module.model_of(case.p)(torch.tensor([[0, 1]]))
    assert logits.shape == (1, 2, case.V)
    for text, row in (((), logits[0, 0]), ((1,), logits[0, 1])):
        assert row.softmax(-1).tolist() == pytest.approx(case.p(text).astype(float).tolist())


def asked(monkeypatch, fn, **more) -> dict:
    "The verdict on a rule or a round of ours, on few cases."
    monkeypatch.setattr(module, "SIZES", [(1, 3)])
    monkeypatch.setattr(module, "check_verify", partial(check_verify, sizes=[(1, 3)], seeds=1))
    return verdict(Audited("ours", "1.0", "ours.verify", lambda: fn, does="It errs.", **more))


def test_a_verdict_explains_what_is_wrong_and_only_then(monkeypatch):
    good = asked(monkeypatch, a_round(), whole_round=True)
    bad = asked(monkeypatch, WRONG["resample from p"], whole_round=True)
    assert good["lossless"] is True and "does" not in good and good["case"] is None
    assert bad["lossless"] is False and bad["does"] == "It errs." and bad["lossy_cases"] > 0 and "K = 1" in bad["case"]
    assert json.loads(json.dumps(bad)) == bad and bad["command"] == "specdec audit ours"


def test_a_rule_is_asked_as_one(monkeypatch):
    def rule(p, q, tokens, source): return 0, int(torch.multinomial(p[0], 1))
    def broken(p, q, tokens, source): return 1, int(torch.multinomial(p[1], 1))
    assert asked(monkeypatch, rule)["lossless"] is True and asked(monkeypatch, broken)["lossless"] is False


def test_what_raises_gets_no_verdict(monkeypatch):
    def raises(*_): raise ZeroDivisionError("of theirs")
    for more in ({}, {"whole_round": True}):
        found = asked(monkeypatch, raises, **more)
        assert found["lossless"] is None and "of theirs" in found["raised"] and "does" not in found


@pytest.fixture
def index(tmp_path, monkeypatch):
    "A package index with one package, which can't be asked: it lacks the function."
    wheel = tmp_path / "index" / "dflash-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    about = "dflash-0.1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("dflash/__init__.py", "print('hello')\n")
        file.writestr("dflash/model.py", "from .missing import _rejection_sample\n")
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: dflash\nVersion: 0.1.0\nRequires-Dist: none\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    for name, value in {"SPECDEC_HOME": tmp_path / "home", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": wheel.parent}.items():
        monkeypatch.setenv(name, str(value))
    return wheel


def test_a_package_is_installed_once_and_asked_in_a_process_of_its_own(index, tmp_path):
    found, = audit("dflash")
    assert found["lossless"] is None and "dflash.missing" in found["raised"]
    folder = tmp_path / "home" / "audit"
    assert [path.name for path in folder.iterdir()] == ["dflash-0.1.0"]
    index.unlink()
    assert module.installed(AUDITED["dflash"]) == folder / "dflash-0.1.0"


def test_a_package_that_cannot_be_had_is_said_and_leaves_nothing(index, tmp_path):
    with pytest.raises(ModelError, match="pip can't install tightwad 0.5.4: .*tightwad==0.5.4"): list(audit("tightwad"))
    assert list((tmp_path / "home" / "audit").iterdir()) == []


def test_a_package_that_ends_the_process_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "installed", lambda each: tmp_path)
    monkeypatch.setattr(module, "_ASK", "import sys; sys.exit('no GPU here')")
    with pytest.raises(ModelError, match="tightwad ended the process that asked it: no GPU"): list(audit("tightwad"))


def test_an_unknown_name_is_refused_before_anything_is_installed(monkeypatch):
    monkeypatch.setattr(module, "installed", lambda each: pytest.fail("installed"))
    with pytest.raises(InputError, match="'nobody'.*rotalabs-accel"): audit("dflash", "nobody")


# What is stored

def test_stored_verdicts_are_those_of_the_audit():
    assert [(v["name"], v["version"], v["function"]) for v in STORED["verdicts"]] == [
        (each.name, each.version, each.function) for each in AUDITED.values()
    ]
    for found in STORED["verdicts"]:
        each = AUDITED[found["name"]]
        assert found["lossless"] is not None and found["seconds"] < 60
        explained = [found.get(part, "") for part in ("does", "mistake", "mend")]
        assert explained == [each.does, each.mistake, each.mend] and all(explained) == (not found["lossless"])


def test_the_command_prints_and_writes_the_same(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "audit", lambda *names: (v for v in STORED["verdicts"] if v["name"] in names))
    words = ["audit", "dflash", "--json", "--out", str(tmp_path / "a.json")]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    report = json.loads(done.stdout)
    assert done.exit_code == 0 and report == json.loads((tmp_path / "a.json").read_text())
    assert report["command"] == "specdec audit dflash" and [v["name"] for v in report["verdicts"]] == ["dflash"]
    assert done.stderr == "dflash: lossless\n"
