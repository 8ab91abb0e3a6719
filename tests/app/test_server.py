"""The check of a server from outside: right ones pass against their own law and the target's, wrong ones do not, and
what is no answer is named."""
import copy
import json
import math
import socketserver
import time
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from threading import Event, Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from helpers import examples
from specdec.app.cli import ExitCode, app
from specdec.errors import InputError, ModelError
from specdec.lossless import server as module
from specdec.lossless.black_box import BrokenDecoder
from specdec.lossless.check import NotLossless
from specdec.lossless.gallery import GALLERY
from specdec.lossless.proof import Language, target_distribution
from specdec.lossless.server import (
    LISTED,
    Ranks,
    ask_server,
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
RIGHT = target_distribution(P, 3)


def logits(ids): return torch.tensor(P(tuple(ids[1:])).astype(float)).log()


@pytest.fixture(scope="module")
def passed():
    "The report on a right server."
    with practice_server(RIGHT, P) as url: return check_server(url, "any text", **FEW)


# The verdict

def test_a_right_server_passes_and_says_what_that_rests_on(passed):
    assert passed.lossless and passed.found.samples == 300 and passed.found.power >= .9
    assert 300 < passed.takes[.2] < passed.takes[.1] < passed.takes[.05]
    for words in ("no difference", "its own distribution", f"0.2 ({passed.takes[.2]})", "2700 tokens, 0 accepted"):
        assert words in passed.summary()
    assert "lossless-300%20samples" in passed.badge()


@pytest.mark.parametrize("name", ["accept everything", "residual cut to the draft's size", "verified by the row after"])
def test_wrong_ones_are_rejected(name):
    with practice_server(BrokenDecoder(BY_NAME[name], P, Q, V, 1).distribution(3), P, "lists") as url:
        report = check_server(url, [0], **FEW)
    assert not report.lossless and report.found.samples < 300
    with pytest.raises(NotLossless): report.badge()


def test_a_wrong_distribution_that_is_listed_too_is_seen_by_the_target_only():
    def sharper(text): return P(text) ** 3 / (P(text) ** 3).sum()
    with practice_server(target_distribution(sharper, 3), sharper) as url:
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


def test_no_server_there(monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda seconds: pytest.fail("waited for a server that was never there"))
    with pytest.raises(ModelError, match="No server answers at http://127.0.0.1:9"):
        post(server_url("127.0.0.1:9"), "/", {})


# A server that stumbles

@contextmanager
def stumbling(fault, first=0, every=3, last=10**9):
    "A right server, but of the questions from the first to the last one in so many goes wrong: `fault(handler)`."
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize": return says(200, b'{"tokens": [0]}')(self)
            count[0] += 1
            if first <= count[0] < last and not count[0] % every: return fault(self)
            body = json.dumps(practice_answer(question, RIGHT, P, "objects")).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def log_message(self, *words): pass
    count = [0]
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(.02,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def says(status, body=b"busy", length=None, **headers):
    "A fault: this status and body, which may be announced as longer than it is."
    def fault(handler):
        handler.send_response(status)
        for name, value in headers.items(): handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(length or len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = True
    return fault


def hangs_up(handler): handler.close_connection = True


STUMBLES = {"too many": says(429), "wrong": says(500), "overloaded": says(503, Retry_After="0"), "hangs up": hangs_up,
            "an error cut short": says(502, b"ba", 100), "an answer cut short": says(200, b'{"choices": [', 5000)}


@pytest.fixture
def impatient(monkeypatch):
    "Waits before a further try are short."
    monkeypatch.setattr(module, "WAITS", (.01, .01, .01))


@pytest.mark.parametrize("fault", STUMBLES.values(), ids=STUMBLES)
def test_a_server_that_stumbles_loses_no_sample(impatient, fault):
    with stumbling(fault) as url: report = check_server(url, [0], **FEW)
    assert report.lossless and report.found.samples == 300 and report.failure is None


def test_a_server_that_fails_for_good_leaves_the_samples_that_there_are(impatient):
    with stumbling(says(500, b"out of memory"), first=100, every=1) as url: report = check_server(url, [0], **FEW)
    assert 50 < report.found.samples < 100 and not report.found.rejected and not report.lossless
    assert "out of memory" in report.failure and "failed before the end" in report.summary()
    assert "no verdict" in report.summary() and "REJECTED" not in report.summary()


def test_what_is_known_when_it_fails_stands(impatient):
    malformed = says(200, json.dumps({"choices": [{"logprobs": {"tokens": ["1"], "top_logprobs": [{}]}}]}).encode())
    with stumbling(malformed, first=100, every=1) as url: report = check_server(url, [0], **FEW)
    assert "malformed" in report.failure and report.found.samples > 50 and not report.found.rejected


def test_the_tries_have_a_bound_and_the_server_is_waited_for_as_it_asks(monkeypatch):
    waited = []
    monkeypatch.setattr(module.time, "sleep", waited.append)
    with stumbling(says(429, Retry_After="7"), every=1) as url, pytest.raises(ModelError, match="429: busy"):
        post(server_url(url), "/v1/completions", {"prompt": [0]})
    assert waited == [7] * len(module.WAITS)
    with stumbling(says(429, Retry_After="9999"), every=1) as url, pytest.raises(ModelError, match="429"):
        post(server_url(url), "/v1/completions", {})
    with stumbling(says(400), every=1) as url, pytest.raises(ModelError, match="400"): post(server_url(url), "/", {})
    assert len(waited) == len(module.WAITS)  # longer than there is time for, and what doesn't get better


# A server that holds on

@contextmanager
def bare(talk):
    "A server that reads a question and then does what it likes: `talk(send, over)`."
    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(65536)
            try: talk(self.request.sendall, over)
            except OSError: pass
    class Server(socketserver.ThreadingTCPServer): daemon_threads, block_on_close = True, False
    over = Event()
    with Server(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(.02,), daemon=True).start()
        try: yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            over.set()
            server.shutdown()


def dripping(start, drop):
    def talk(send, over):
        send(start)
        while not over.wait(.02): send(drop)
    return talk


OK = b"HTTP/1.1 200 OK\r\n"
HOLDS = {
    "silence": dripping(b"", b""), "a head without end": dripping(OK, b"X-A: b\r\n"),
    "drops of a head": dripping(OK, b"X"),
    "drops of a body": dripping(OK + b"Content-Length: 99999\r\n\r\n{", b" "),
    "a body without end": dripping(OK + b"\r\n{", b" "),
    "chunks": dripping(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "soon": dripping(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "an error without end": dripping(b"HTTP/1.1 500 X\r\n\r\n", b"x"),
}


@pytest.mark.parametrize("talk", HOLDS.values(), ids=HOLDS)
def test_no_server_holds_us(talk):
    with bare(talk) as url:
        start = time.monotonic()
        with pytest.raises(ModelError, match="no whole answer|No server answers"):
            ask_server(url, "/", {}, "server", "", .4, (.01, .01))
        assert time.monotonic() - start < 3


def test_a_body_cut_by_the_clock_is_not_taken_for_a_whole_one():
    with bare(dripping(OK + b"\r\n{}", b"")) as url, pytest.raises(ModelError, match="no whole answer"):
        ask_server(url, "/", {}, "server", "", .3)


def test_an_answer_has_a_largest_size(monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 1000)
    def flood(send, over): send(OK + b"\r\n" + b" " * 10**6)
    with bare(flood) as url, pytest.raises(ModelError, match="larger than"):
        ask_server(url, "/", {}, "server", "", 5)


# Malformed answers

def changed(form, change):
    answer = copy.deepcopy(practice_answer(dict(prompt=[0], max_tokens=2, seed=1), RIGHT, P, form))
    change(answer, answer["choices"][0]["logprobs"])
    return answer


def objects(change): return "objects", lambda answer, logs: change(logs["content"][0])
def lists(change): return "lists", lambda answer, logs: change(logs)
def outer(**fields): return "lists", lambda answer, logs: answer.update(fields)


MALFORMED = {
    "ids as text": objects(lambda token: token.update(id="2")),
    "an id below 0": objects(lambda token: token.update(id=-1)),
    "a huge id": objects(lambda token: token.update(id=10**30)),
    "an id that is true": objects(lambda token: token.update(id=True)),
    "half an id": objects(lambda token: token.update(id=1.5)),
    "a probability above one": objects(lambda token: token["top_logprobs"][0].update(logprob=.5)),
    "a log-probability of 1000": objects(lambda token: token["top_logprobs"][0].update(logprob=1000)),
    "not a number": objects(lambda token: token["top_logprobs"][0].update(logprob=math.nan)),
    "a probability as text": objects(lambda token: token["top_logprobs"][0].update(logprob="-1")),
    "two of one in all": objects(lambda token: [each.update(logprob=-.1) for each in token["top_logprobs"]]),
    "one token twice": objects(lambda token: token["top_logprobs"].append(token["top_logprobs"][0])),
    "bytes as text": objects(lambda token: token.update(bytes="ab")),
    "names without ids": lists(lambda logs: logs.update(tokens=["a", "b"])),
    "text that looks like an id": lists(lambda logs: logs.update(tokens=["7", "8"])),
    "fewer lists than tokens": lists(lambda logs: logs["top_logprobs"].pop()),
    "no law": lists(lambda logs: logs.update(top_logprobs=[None, None])),
    "drafts as text": outer(timings={"draft_n": "2"}), "drafts below 0": outer(timings={"draft_n": -2}),
    "more accepted than drafted": outer(timings={"draft_n": 1, "draft_n_accepted": 2}),
    "times as a list": outer(timings=[]),
    "a count as text": outer(usage={"completion_tokens": "3"}), "choices as text": outer(choices="abc"),
    "no choice": outer(choices=[]), "deep": outer(usage={"completion_tokens": [[[[]]]]}),
}


@pytest.mark.parametrize("form, change", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_answer_is_called_so_and_is_no_bad_verdict(form, change):
    wrong = changed(form, change)
    with pytest.raises(ModelError, match="malformed") as said: read_answer(wrong)
    assert "\n" not in str(said.value) and len(str(said.value)) < 500
    with answering(200, json.dumps(wrong).encode()) as url, pytest.raises(ModelError, match="malformed"):
        check_server(url, [0], logits, **FEW)


@pytest.mark.parametrize("tokens", ["0", ["0"], [-1], [1.5], None, [[0]], [10**40]])
def test_a_malformed_cut_is_called_so(tokens):
    with answering(200, json.dumps({"tokens": tokens}).encode()) as url, pytest.raises(ModelError, match="malformed"):
        check_server(url, "a text", **FEW)


def test_a_text_that_ends_too_soon_is_no_bad_verdict_by_the_target_either():
    short = {end[:1]: weight for end, weight in RIGHT.items()}
    with practice_server(short, P) as url, pytest.raises(InputError, match="name it in ends"):
        check_server(url, [0], logits, ahead=0, **FEW)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
                        ["id", "logprob", "top_logprobs", "content", "tokens", "draft_n", "bytes"]), inner, max_size=3),
                    max_leaves=8)


def places(value, path=()):
    "The path to each part of a JSON value."
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner: yield from places(part, (*path, key))


@settings(max_examples=examples(60), deadline=None)
@given(form=st.sampled_from(["objects", "lists"]), data=st.data(), value=JSON)
def test_any_answer_is_read_or_refused(form, data, value):
    answer = practice_answer(dict(prompt=[0], max_tokens=2, seed=1), RIGHT, P, form)
    *path, last = data.draw(st.sampled_from(list(places(answer))[1:]))
    inner = answer
    for key in path: inner = inner[key]
    inner[last] = value
    try: said = read_answer(answer)
    except ModelError: return
    assert all(0 <= i < 2**31 for i in said.ids) and all(0 <= w <= 1 for row in said.listed for w in row.values())


@settings(max_examples=examples(40), deadline=None)
@given(head=st.sampled_from([b"", OK, OK + b"\r\n", OK + b"Content-Length: 9\r\n\r\n", b"HTTP/1.1 404 X\r\n\r\n"]),
       body=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()) | st.just(b"[" * 10**5)
       | st.just(b'{"a": ' + b"1" * 10**4 + b"}"))
def test_any_bytes_are_an_object_or_refused(head, body):
    with bare(lambda send, over: send(head + body)) as url:
        try: found = ask_server(url, "/", {}, "server", "", 2)
        except ModelError as error:
            assert str(error).isprintable()
            return
    assert isinstance(found, dict)


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
    broken = BrokenDecoder(BY_NAME["accept everything"], P, Q, V, 1).distribution(3)
    with practice_server(RIGHT, P) as url: right = run(url)
    with practice_server(broken, P) as url: wrong = run(url, "--json")
    assert right.exit_code == ExitCode.DONE and "no difference" in right.stdout
    found = json.loads(wrong.stdout)
    assert wrong.exit_code == ExitCode.UNEXPECTED and found["lossless"] is False and found["samples"] < 300


def test_the_command_says_why_it_has_fewer_samples_and_prints_those(impatient):
    line = ["--prompt", "Hi", "--samples", "300", "--distance", "0.3"]
    with stumbling(says(500, b"out of memory"), first=100, every=1) as url:
        done = CliRunner().invoke(app, ["check-server", url, *line, "--json"], catch_exceptions=False)
    assert done.exit_code == ExitCode.BAD_INPUT and 50 < json.loads(done.stdout)["samples"] < 100
    assert "out of memory" in json.loads(done.stdout)["failure"] and done.stderr.startswith("Error: ")
