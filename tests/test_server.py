"""The check of a server from outside: right ones pass against their own law and the target's, wrong ones do not, and
what is no answer is named."""
import json
import math
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
import torch
from typer.testing import CliRunner

from specdec.cli import ExitCode, app
from specdec.core import InputError, ModelError
from specdec.lossless import server as module
from specdec.lossless.conformance import BrokenDecoder, NotLossless
from specdec.lossless.gallery import GALLERY
from specdec.lossless.proof import Language, target_law
from specdec.lossless.server import (
    LISTED,
    Ranks,
    check_server,
    post,
    practice_answer,
    practice_server,
    read_answer,
    server_url,
)

V, FEW = 3, dict(length=2, samples=300, distance=.3, progress=False)
BY_NAME = {broken.name: broken for broken in GALLERY}


def uneven(seed):
    "A language without zeros."
    language = Language(V, seed)
    return lambda text: (5 * language(text) + 1) / 8


P, Q = uneven("target 6"), uneven("draft 6")
RIGHT = target_law(P, 3)


def logits(ids): return torch.tensor(P(tuple(ids[1:])).astype(float)).log()


@pytest.fixture(scope="module")
def passed():
    "The report on a right server."
    with practice_server(RIGHT, P) as url: return check_server(url, "any text", **FEW)


# The verdict

def test_a_right_server_passes_and_says_what_that_rests_on(passed):
    assert passed.lossless and passed.found.samples == 300 and passed.found.power >= .9
    assert 300 < passed.takes[.2] < passed.takes[.1] < passed.takes[.05]
    for words in ("no difference", "its own law", f"0.2 ({passed.takes[.2]})", "2700 tokens, 0 accepted"):
        assert words in passed.summary()
    assert "lossless-300%20samples" in passed.badge()


@pytest.mark.parametrize("name", ["accept everything", "residual cut to the draft's size", "verified by the row after"])
def test_wrong_ones_are_rejected(name):
    with practice_server(BrokenDecoder(BY_NAME[name], P, Q, V, 1).law(3), P, "lists") as url:
        report = check_server(url, [0], **FEW)
    assert not report.lossless and report.found.samples < 300
    with pytest.raises(NotLossless): report.badge()


def test_a_wrong_law_that_is_listed_too_is_seen_by_the_target_only():
    def sharper(text): return P(text) ** 3 / (P(text) ** 3).sum()
    with practice_server(target_law(sharper, 3), sharper) as url:
        assert check_server(url, [0], **FEW).lossless
        assert not check_server(url, [0], logits, **FEW).lossless
    with practice_server(RIGHT, P) as url: assert check_server(url, [0], logits, **FEW).lossless


def test_nothing_drafted_is_no_badge(passed):
    def told(drafted):
        report = replace(passed, drafted=drafted)
        vars(report)["takes"] = passed.takes  # it takes a second
        return report
    assert "NOTHING" in told(0).summary() and "doesn't say" in told(None).summary()
    with pytest.raises(InputError, match="drafted nothing"): told(0).badge()


def test_every_filter_is_off_and_each_answer_has_a_seed_of_its_own(monkeypatch):
    asked = []
    def answer(url, path, question):
        asked.append(question)
        return practice_answer(question, RIGHT, P, "objects")
    monkeypatch.setattr(module, "post", answer)
    check_server("localhost:1", [0], model="m", ahead=5, settings={"n_max": 4}, seed=7, **FEW)
    off = dict(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, model="m", n_max=4)
    assert all(question.items() >= off.items() for question in asked)
    texts = [question["seed"] for question in asked if question["max_tokens"] == 2 + 5]
    assert texts == list(range(7, 307)) and {question["max_tokens"] for question in asked} == {1, 7}
    assert all(question["prompt"] == [0] for question in asked if question["max_tokens"] > 1)


# Ranks

def listed(ids):
    "Forty tokens, from 100 on; the second is the likeliest."
    weights = [3, 9, *([1] * 38)]
    return {100 + i: w / 50 for i, w in enumerate(weights)}


def test_tokens_are_called_by_their_rank():
    ranks = Ranks(listed, 2, frozenset())
    assert ranks.order(())[:2] == [101, 100] and len(ranks.order(())) == LISTED
    assert ranks.ranks([101, 100, 101], 3) == [0, 1, 0]
    # what has no bin of its own is followed no further, whether it is listed or not
    assert ranks.ranks([101, 102, 101], 3) == [0, 2, LISTED] and ranks.ranks([139], 2) == [LISTED, LISTED]
    row = ranks.logits([0]).exp()
    assert math.isclose(row.sum(), 1) and math.isclose(row[LISTED], 20 / 50) and math.isclose(row[0], 9 / 50)
    assert ranks.logits([LISTED]).exp().tolist() == [0] * LISTED + [1]


def test_few_tokens_leave_nothing_for_others():
    assert Ranks(lambda ids: {5: .25, 7: .75}, 2, frozenset()).logits([]).exp()[LISTED] == 0


def test_a_text_that_ends():
    known, unknown = Ranks(listed, 2, {100}), Ranks(listed, 2, frozenset())
    assert known.ranks([101, 100], 3) == [0, 1, LISTED] and known.logits([0, 1]).exp()[LISTED] == 1
    with pytest.raises(InputError, match="id 100.*name it in ends"): unknown.ranks([101, 100], 3)
    with pytest.raises(InputError, match="id none"): unknown.ranks([], 3)


# Answers

@pytest.mark.parametrize("form", ["objects", "lists"])
def test_both_forms_say_the_same(form):
    said = read_answer(practice_answer(dict(prompt=[0], max_tokens=3, seed=1), RIGHT, P, form))
    assert said.ids == read_answer(practice_answer(dict(prompt=[0], max_tokens=3, seed=1), RIGHT, P, "lists")).ids
    assert [row[0] for row in said.listed] == pytest.approx(
        [float(P(tuple(said.ids[:i]))[0]) for i in range(3)])
    assert (said.lost, said.drafted, said.accepted) == (False, 2, 0)


def test_ids_are_believed_up_to_the_first_that_may_be_late():
    answer = practice_answer(dict(prompt=[0], max_tokens=3, seed=1), RIGHT, P, "objects")
    entries = answer["choices"][0]["logprobs"]["content"]
    for entry, data in zip(entries, ([97], [240, 98], [99])): entry["bytes"] = data
    assert len(read_answer(answer | {"usage": {"completion_tokens": 3}}).ids) == 3
    late = read_answer(answer | {"usage": {"completion_tokens": 4}})
    assert late.lost and len(late.ids) == 1
    assert read_answer({key: value for key, value in answer.items() if key != "timings"}).drafted is None


@contextmanager
def answering(status: int, body: bytes):
    "A server that says one thing only."
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)
        def log_message(self, *words): pass
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(.02,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


TEXT_ONLY = {"choices": [{"text": "Hello", "logprobs": None}]}
LOST = {"choices": [{"logprobs": {"content": []}}], "usage": {"completion_tokens": 1}}


@pytest.mark.parametrize("status, body, words", [
    (404, b"no such model", "refused /v1/completions .404: no such model"), (200, b"<html>", "no OpenAI-compatible"),
    (200, b"[1]", "no OpenAI-compatible"), (200, json.dumps(TEXT_ONLY).encode(), "no token ids"),
    (200, json.dumps(LOST).encode(), "lists no tokens"),
], ids=["refused", "a page", "a list", "text only", "never a token"])
def test_what_is_no_answer_is_named(status, body, words):
    with answering(status, body) as url, pytest.raises(ModelError, match=words):
        check_server(url, [1, 2], **FEW)


def test_a_lost_token_ends_the_check():
    with answering(200, json.dumps(LOST).encode()) as url, pytest.raises(ModelError, match="no whole character"):
        check_server(url, [0], logits, **FEW)


def test_nobody_there():
    with pytest.raises(ModelError, match="No server answers at http://127.0.0.1:9"):
        post(server_url("127.0.0.1:9"), "/", {})


@pytest.mark.parametrize("wrong", [
    dict(url="ftp://x"), dict(url="http://x:port"), dict(url=None), dict(prompt=[]), dict(prompt=["a"]),
    dict(ahead=-1), dict(width=0), dict(width=LISTED + 1), dict(ends={"a"}), dict(samples=0), dict(samples=50),
], ids=lambda wrong: ", ".join(f"{key}={value}" for key, value in wrong.items()))
def test_bad_input(wrong):
    with practice_server(RIGHT, P) as url, pytest.raises(InputError):
        check_server(**{"url": url, "prompt": [0]} | FEW | wrong)


# The command

def test_the_command_prints_the_report_and_fails_with_a_bad_verdict():
    def run(url, *more):
        line = ["check-server", url, "--prompt", "Hi", "--samples", "300", "--distance", "0.3", *more]
        return CliRunner().invoke(app, line, catch_exceptions=False)
    broken = BrokenDecoder(BY_NAME["accept everything"], P, Q, V, 1).law(3)
    with practice_server(RIGHT, P) as url: right = run(url)
    with practice_server(broken, P) as url: wrong = run(url, "--json")
    assert right.exit_code == ExitCode.DONE and "no difference" in right.stdout
    found = json.loads(wrong.stdout)
    assert wrong.exit_code == ExitCode.UNEXPECTED and found["lossless"] is False and found["samples"] < 300
