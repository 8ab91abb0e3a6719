"Ollama's HTTP API: a real server on this machine that speaks it, and others that don't."
import json
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from helpers import examples
from specdec.app import ollama
from specdec.app.cli import app
from specdec.app.ollama import WHY_NOT, ollama_generate, ollama_status, ollama_url
from specdec.errors import InputError, ModelError
from specdec.lossless import server as asking


@contextmanager
def serving(answers: dict):
    "A server with fixed answers by path, (code, body), and the requests that it got."
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_): "Nothing."

        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.server.got.append((self.command, self.path, json.loads(body) if body else None))
            code, answer = answers.get(self.path, (404, "404 page not found"))
            self.send_response(code)
            self.end_headers()
            self.wfile.write((answer if isinstance(answer, str) else json.dumps(answer)).encode())

        do_POST = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.got = []
        Thread(target=server.serve_forever, daemon=True).start()
        yield server, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


MODELS = [
    {"name": "llama3.2:latest", "size": 2019393189,
     "details": {"parameter_size": "3.2B", "quantization_level": "Q4_K_M"}},
    {"name": "qwen3:8b", "size": 5225388164, "details": None},
]
WHOLE = {
    "/api/version": (200, {"version": "0.14.2"}), "/api/tags": (200, {"models": MODELS}),
    "/api/generate": (200, {"model": "llama3.2:latest", "response": "Paris.", "done": True, "eval_count": 3,
                            "eval_duration": 60_000_000, "logprobs": []}),
}


def test_what_is_there():
    with serving(WHOLE) as (_, url): found = ollama_status(url)
    assert found["url"] == url and found["version"] == "0.14.2"
    assert [(m["name"], round(m["megabytes"]), m["parameters"], m["quantization"]) for m in found["models"]] == [
        ("llama3.2:latest", 2019, "3.2B", "Q4_K_M"), ("qwen3:8b", 5225, None, None)]


@pytest.mark.parametrize(
    "model, asked", [(None, "llama3.2:latest"), ("qwen3:8b", "qwen3:8b"), ("llama3.2", "llama3.2")]
)
def test_one_generation(model, asked):
    with serving(WHOLE) as (server, url): found = ollama_generate("The capital of France?", model, 7, url)
    assert (found["text"], found["tokens"], found["model"]) == ("Paris.", 3, asked)
    assert abs(found["tokens_per_second"] - 50) < 1e-9
    method, path, data = server.got[-1]
    assert (method, path) == ("POST", "/api/generate") and data == dict(
        model=asked, prompt="The capital of France?", stream=False, options=dict(num_predict=7, temperature=0))


def test_a_proxy_for_the_internet_is_not_asked(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"): monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving(WHOLE) as (_, url): assert ollama_status(url)["version"] == "0.14.2"


@pytest.mark.parametrize(
    "given, url",
    [
        ("localhost", "http://localhost:11434"), ("0.0.0.0", "http://127.0.0.1:11434"),
        ("https://there", "https://there:11434"), ("[::1]:5000", "http://[::1]:5000"),
        ("http://there:80/", "http://there:80"), (None, "http://127.0.0.1:11434"),
    ],
)
def test_where_it_listens(given, url, monkeypatch):
    monkeypatch.delenv("OLLAMA_HOST", raising=False)
    assert ollama_url(given) == url
    if given:
        monkeypatch.setenv("OLLAMA_HOST", given)
        assert ollama_url() == url


@pytest.mark.parametrize("wrong", ["ftp://there", "http://there:port", "http://:5", "there:70000"])
def test_what_is_no_address(wrong):
    with pytest.raises(InputError, match="no address"): ollama_url(wrong)


WRONG = {
    "another server": ({}, "404 page not found"),
    "no JSON": (WHOLE | {"/api/version": (200, "hello")}, "no Ollama server"),
    "a list": (WHOLE | {"/api/version": (200, "[]")}, "no Ollama server"),
    "an error of its own": (WHOLE | {"/api/generate": (500, {"error": "out of memory"})}, "out of memory"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_answers_say_what_they_are(name):
    answers, words = WRONG[name]
    with serving(answers) as (_, url), pytest.raises(ModelError, match=words): ollama_generate("Hello", url=url)


def of_models(**changed): return WHOLE | {"/api/tags": (200, {"models": [MODELS[0] | changed]})}
def of_answer(**changed): return WHOLE | {"/api/generate": (200, WHOLE["/api/generate"][1] | changed)}


MALFORMED = {
    "models as text": WHOLE | {"/api/tags": (200, {"models": "abc"})},
    "a model as text": WHOLE | {"/api/tags": (200, {"models": ["llama"]})},
    "a name that is none": of_models(name=None), "a size as text": of_models(size="2 GB"),
    "a size below 0": of_models(size=-1), "a huge size": of_models(size=10**400),
    "details as text": of_models(details="Q4"),
    "a number for text": of_answer(response=5), "no text": of_answer(response=None),
    "tokens as text": of_answer(eval_count="3"), "half a token": of_answer(eval_count=2.5),
    "time below 0": of_answer(eval_duration=-5), "true": of_answer(eval_duration=True),
    "a version that is none": WHOLE | {"/api/version": (200, {})},
}


@pytest.mark.parametrize("answers", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_answer_is_called_so_in_a_line(answers):
    with serving(answers) as (_, url): done = run("Hello", "--url", url)
    assert done.exit_code == 2 and done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1
    assert "malformed" in done.stderr and done.stdout == ""


NO_JSON = {"deep": "[" * 10**5, "digits": '{"a": ' + "1" * 10**4 + "}", "escapes": "\x1b[2J\n" * 99}


@pytest.mark.parametrize("body", NO_JSON.values(), ids=NO_JSON)
def test_what_is_no_json_is_said_in_a_line(body):
    for status in (200, 404):
        with serving({"/api/version": (status, body)}) as (_, url): done = run("--url", url)
        assert done.exit_code == 2 and done.stderr.count("\n") == 1 and "\x1b" not in done.stderr
        assert len(done.stderr) < 600


def test_half_a_character_does_not_end_the_command():
    answers = of_models(name="m\ud800") | {"/api/generate": of_answer(response="a \ud800")["/api/generate"]}
    with serving(answers) as (_, url):
        assert run("--url", url).exit_code == 0
        assert run("Hello", "--url", url).stdout == "a ?\n"


@contextmanager
def holding(path, drop):
    "A server that is right, but for one path it sends this again and again, and never ends."
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_): "Nothing."

        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path != path:
                body = json.dumps(WHOLE[self.path][1]).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)
                return
            if drop: self.send_response(200); self.end_headers()
            while not over.wait(.02):
                try: self.wfile.write(drop)
                except OSError: return

        do_POST = do_GET

    over = Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(.02,), daemon=True).start()
        try: yield f"http://127.0.0.1:{server.server_port}"
        finally:
            over.set()
            server.shutdown()


@pytest.mark.parametrize("drop", [b"", b" "], ids=["silence", "drops"])
@pytest.mark.parametrize("path", ["/api/version", "/api/tags", "/api/generate"])
def test_no_server_holds_us(monkeypatch, path, drop):
    monkeypatch.setattr(ollama, "STATUS", .3)
    monkeypatch.setattr(ollama, "LOADING", -.7)  # and a second for the one token
    start = time.monotonic()
    with holding(path, drop) as url, pytest.raises(ModelError, match=f"no whole answer to {path} within 0.3 s"):
        ollama_generate("Hello", max_new_tokens=1, url=url)
    assert time.monotonic() - start < 4


@pytest.mark.parametrize("wrong", [0, -1, "a", 1.5, None])
def test_tokens_without_end_are_not_asked_for(wrong):
    "To the server, -1 means for ever."
    with pytest.raises(InputError, match="max_new_tokens"): ollama_generate("Hello", max_new_tokens=wrong, url="x:1")


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(
                        ["name", "size", "details", "models", "response", "version"]), inner, max_size=3), max_leaves=6)


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(version=JSON | st.just({"version": "1"}), tags=JSON | JSON.map(lambda inner: {"models": [{"name": "m"} | (
    inner if isinstance(inner, dict) else {})]}),
       answer=JSON | JSON.map(lambda inner: {"response": "a", "eval_count": inner}))
def test_any_answers_are_read_or_refused(monkeypatch, version, tags, answer):
    bodies = {"/api/version": version, "/api/tags": tags, "/api/generate": answer}
    def exchange(url, path, question, seconds): return 200, json.dumps(bodies[path]).encode(), ""
    monkeypatch.setattr(asking, "exchange", exchange)
    try: found = ollama_generate("Hello", url="here")
    except (ModelError, InputError) as error: assert str(error).isprintable()
    else:
        found["text"].encode()  # it can be printed; an answer may be empty
        assert found["tokens"] >= 0


def test_nobody_there():
    with serving({}) as (_, url): "It closes again."
    with pytest.raises(ModelError, match="ollama serve"): ollama_status(url)


def test_models_that_are_not_there():
    with serving(WHOLE) as (_, url), pytest.raises(InputError, match="it has llama3.2:latest, qwen3:8b"):
        ollama_generate("Hello", "gemma3", url=url)
    with serving(WHOLE | {"/api/tags": (200, {"models": None})}) as (_, url), pytest.raises(InputError, match="pull"):
        ollama_generate("Hello", url=url)
    with pytest.raises(InputError, match="empty"): ollama_generate(" ")


def test_why_it_can_not_be_measured(): assert "no logits" in WHY_NOT and "GGUF" in WHY_NOT


# The command

def run(*words): return CliRunner().invoke(app, ["ollama", *words])


def shown(table):
    "The cells of a printed table's rows."
    rows = (line.strip("│").split("│") for line in table.splitlines() if line.startswith("│"))
    return [[cell.strip() for cell in row] for row in rows]


def test_the_command_says_what_is_there():
    with serving(WHOLE) as (server, url): done = run("--url", url)
    assert done.exit_code == 0 and "0.14.2" in done.stdout
    assert [cells for cells in shown(done.stdout) if "MB" in " ".join(cells)] == [
        ["llama3.2:latest", "2,019 MB", "3.2B", "Q4_K_M"], ["qwen3:8b", "5,225 MB", "", ""]]
    assert WHY_NOT in done.stderr and [path for _, path, _ in server.got] == ["/api/version", "/api/tags"]


def test_the_command_asks_once():
    with serving(WHOLE) as (server, url):
        done = run("Where?", "--url", url, "--model", "qwen3:8b", "--max-new-tokens", "9")
    assert done.stdout == "Paris.\n" and "50.0 a second" in done.stderr and "no logits" in done.stderr
    assert server.got[-1][2]["model"] == "qwen3:8b" and server.got[-1][2]["options"]["num_predict"] == 9


def test_the_command_as_json():
    with serving(WHOLE) as (_, url): done = run("Where?", "--url", url, "--json")
    found = json.loads(done.stdout)
    assert found["answer"]["text"] == "Paris." and found["version"] == "0.14.2" and found["why_not"] == WHY_NOT
    assert done.stderr == ""


def test_the_command_without_a_server():
    with serving({}) as (_, url): "It closes again."
    done = run("--url", url)
    assert done.exit_code == 2 and "ollama serve" in done.stderr and done.stdout == ""
