"""What serves the live page: asked with real requests, as its own page asks, as a page of another site does, and as a
command that is ended. Nothing here needs a browser."""

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import psutil
import pytest
import torch
from safetensors.torch import load, load_file

from helpers import tool
from specdec.app import live_server
from specdec.app.live_server import HEAD, LISTING, PART, REFUSED, content, open_live, serve_live, weights, write_weights
from specdec.errors import InputError, ModelError
from specdec.lossless.proof import target_distribution
from specdec.lossless.server import is_local, practice_server
from specdec.models.hub import GGUF_SHA256

ROOT = Path(__file__).parents[3]


def ask(address: str, path: str = "/live.html", method: str = "GET", **headers: str) -> SimpleNamespace:
    "What the server at an address answers."
    connection = HTTPConnection(urlsplit(address).netloc, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return SimpleNamespace(status=answer.status, body=answer.read(), headers=dict(answer.getheaders()))
    finally:
        connection.close()


@pytest.fixture(scope="module")
def served():
    "The package's own page."
    with serve_live() as address:
        yield address


@pytest.fixture
def small(monkeypatch):
    "Weights of a few bytes in the model's place, in parts of ten."
    data = {
        "model": live_server.Weights("m.gguf", "model", bytes(range(25))),
        "head": live_server.Weights("h.safetensors", "head", b"head"),
    }
    monkeypatch.setattr(live_server, "PART", 10)
    found = {LISTING: json.dumps({name: each.listing() for name, each in data.items()}).encode()}
    for each in data.values():
        found |= each.parts()
    monkeypatch.setattr(live_server, "weights", lambda: found)
    return data


# Parts


def test_the_parts_are_the_model_and_the_head(tmp_path):
    "Real files: each part as long as the list says, under ten megabytes, with its digest; together the whole."
    assert write_weights(tmp_path) == sum(file.stat().st_size for file in tmp_path.iterdir())
    listing = json.loads((tmp_path / LISTING).read_text())
    for name, whole in listing.items():
        parts = [(tmp_path / part["path"]).read_bytes() for part in whole["parts"]]
        assert [len(part) for part in parts] == [part["bytes"] for part in whole["parts"]] and max(
            map(len, parts)
        ) <= PART
        assert [hashlib.sha256(part).hexdigest() for part in parts] == [part["sha256"] for part in whole["parts"]]
        assert hashlib.sha256(b"".join(parts)).hexdigest() == whole["sha256"], name
        assert sum(map(len, parts)) == whole["bytes"]
    assert listing["model"]["sha256"] == GGUF_SHA256
    tensors = load(b"".join((tmp_path / part["path"]).read_bytes() for part in listing["head"]["parts"]))
    shards = [load_file(path) for path in (ROOT / "specdec" / "data" / HEAD).glob("*.safetensors")]
    assert len(tensors) == sum(map(len, shards)) == 15
    assert all(torch.equal(tensors[name], tensor) for shard in shards for name, tensor in shard.items())


def test_the_page_says_how_many_megabytes():
    "Before anything is fetched it has them from a line of its script."
    listing = json.loads(weights()[LISTING])
    script = (ROOT / "nbs" / "live" / "live.js").read_text(encoding="utf-8")
    model, head, parts = map(int, re.search(r"megabytes: (\d+), head: (\d+), parts: (\d+)", script).groups())
    assert (model, head) == tuple(round(listing[name]["bytes"] / 1e6) for name in ("model", "head"))
    assert parts == sum(len(whole["parts"]) for whole in listing.values())


def test_parts_are_served_whole_and_in_ranges(small):
    with serve_live() as address:
        listing = json.loads(ask(address, f"/live/weights/{LISTING}").body)
        assert [part["path"] for part in listing["model"]["parts"]] == ["model-00.bin", "model-01.bin", "model-02.bin"]
        found = ask(address, "/live/weights/model-02.bin")
        assert (found.status, found.body) == (200, bytes(range(20, 25)))
        assert found.headers["Content-Type"] == "application/octet-stream" and found.headers["Accept-Ranges"] == "bytes"
        part = ask(address, "/live/weights/model-01.bin", Range="bytes=2-4")
        assert (part.status, part.body, part.headers["Content-Range"]) == (206, bytes([12, 13, 14]), "bytes 2-4/10")
        assert ask(address, "/live/weights/model-01.bin", Range="bytes=8-").body == bytes([18, 19])
        assert ask(address, "/live/weights/model-01.bin", Range="bytes=10-").status == 416
        head = ask(address, "/live/weights/model-01.bin", "HEAD")
        assert (head.status, head.body, head.headers["Content-Length"]) == (200, b"", "10")
        assert ask(address, "/live/weights/model-03.bin").status == 404
        assert ask(address, "/live/weights/").status == 404  # no list of what lies there


def test_a_rendered_site_is_served_as_it_is(tmp_path, small):
    (tmp_path / "use").mkdir()
    for name, words in {"index.html": "front", "use/index.html": "use", "live.html": "live", "a.wasm": "w"}.items():
        (tmp_path / name).write_text(words)
    with serve_live(site=tmp_path) as address:
        found = [ask(address, path).body for path in ("/", "/use/", "/live.html?x=1", "/use/../index.html")]
        assert found == [b"front", b"use", b"live", b"front"]
        assert ask(address, "/a.wasm").headers["Content-Type"] == "application/wasm"
        assert ask(address, "/live/weights/head-00.bin").body == b"head"  # beside it, though it lies elsewhere
        assert ask(address, "/use").status == 404


def test_the_wheel_has_all_that_the_page_names():
    "The page, what it loads, and what those load; the scripts are not out of date copies but the sources."
    kind, page = content("/live.html", None)
    assert kind.startswith("text/html") and b"{{" not in page and b"--accepted-fill: #" in page
    named = re.findall(r'(?:src|href)="(live/[\w.]+)"', page.decode()) + ["live/client.js", "live/lens.js"]
    for name in named:
        assert content(f"/{name}", None)[1] == (ROOT / "nbs" / name).read_bytes()
    assert {"live/live.js", "live/live.css"} <= set(named)


# Who may ask

HOSTS = ["evil.example", "127.0.0.1.evil.example", "0.0.0.0", "169.254.169.254", ""]


@pytest.mark.parametrize("host", HOSTS)
def test_a_name_that_was_bound_to_this_machine_gets_nothing(served, host):
    for path in ("/live.html", "/live/live.js", f"/live/weights/{LISTING}", "/nothing"):
        for method in ("GET", "HEAD"):
            found = ask(served, path, method, Host=f"{host}:{urlsplit(served).port}")
            assert (found.status, found.body) == (403, REFUSED.encode() if method == "GET" else b"")
    assert ask(served, Host="localhost").status == 200


def test_what_is_local():
    assert all(map(is_local, ["127.0.0.1", "127.1.2.3:8866", "[::1]:80", "LOCALHOST:1"]))
    assert not any(map(is_local, ["0.0.0.0", "evil.example", "localhost.evil.example", "[::1", "", "10.0.0.1:80", "é"]))


PATHS = [
    "/../pyproject.toml",
    "/live/../live_server.py",
    "/live/%2e%2e/%2e%2e/errors.py",
    "//etc/passwd",
    "/live//etc/passwd",
    "/%2fetc%2fpasswd",
    "/live/%00",
    "/live/" + "x" * 5000,
    "/live/weights/../../errors.py",
    "/live/",
]


@pytest.mark.parametrize("path", PATHS, ids=range(len(PATHS)))
@pytest.mark.parametrize("whole", [True, False], ids=["site", "page"])
def test_nothing_outside_is_served(small, tmp_path, path, whole):
    (tmp_path / "site").mkdir()
    (tmp_path / "pyproject.toml").write_text("not yours")
    with serve_live(site=tmp_path / "site" if whole else None) as address:
        assert ask(address, path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT"])
def test_a_request_can_only_read(served, method):
    assert ask(served, method=method).status == 501


def test_the_page_fetches_from_its_own_address_only(served):
    "The browser is told so, and that no other site may embed what is here."
    for path in ("/live.html", "/live/live.js", "/nothing"):
        headers = ask(served, path).headers
        assert headers["Content-Security-Policy"].startswith("default-src 'self' data: blob:")
        assert "http" not in headers["Content-Security-Policy"] and "*" not in headers["Content-Security-Policy"]
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin" and "Access-Control-Allow-Origin" not in headers
        assert "frame-ancestors 'self'" in headers["Content-Security-Policy"]


def test_another_sites_page_gets_nothing_and_a_link_there_may_be_followed(small):
    "A browser says whose page asks; programs and old browsers say nothing."
    with serve_live() as address:
        for path in ("/live.html", "/live/weights/model-00.bin"):
            for site in ("cross-site", "same-site"):
                found = ask(address, path, **{"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"})
                assert (found.status, found.body) == (403, REFUSED.encode())
            for site in ("same-origin", "none"):
                assert ask(address, path, **{"Sec-Fetch-Site": site}).status == 200
        link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        assert ask(address, **link).status == 200 and ask(address, **link | {"Sec-Fetch-Dest": "iframe"}).status == 403


RAW = [
    b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /live.html\r\nHost: localhost\r\n\r\n",
    b"GET /live.html HTTP/1.1\r\nHost: localhost\r\nRange: bytes=" + b"9" * 5000 + b"-\r\n\r\n",
    b"GET /live/weights/large.bin HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\xff\xfe\0\r\n\r\n",
]


@pytest.mark.parametrize("raw", RAW, ids=range(len(RAW)))
@pytest.mark.parametrize("hangs_up", [False, True])
def test_no_request_leaves_a_traceback(monkeypatch, capfd, raw, hangs_up):
    "Neither a malformed one, nor a visitor who goes in the middle of the answer."
    monkeypatch.setattr(live_server, "weights", lambda: {"large.bin": bytes(PART)})
    with serve_live() as address, socket.create_connection(("127.0.0.1", urlsplit(address).port), 5) as visitor:
        visitor.sendall(raw)
        if hangs_up:  # by a reset, at once
            visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        elif b"large" not in raw:
            answer = visitor.makefile("rb").readline()
            assert answer.startswith(b"HTTP/1.1") or REFUSED.encode() in answer or b"DOCTYPE" in answer
        visitor.close()
        time.sleep(0.3)
    assert capfd.readouterr().err == ""


def listening() -> set[str]:
    "The addresses on which this process listens."
    return {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}


def test_every_server_of_ours_listens_to_this_machine_alone(served):
    "The live page's and the practice server that stands in for others; nothing in the package binds another address."
    with practice_server(target_distribution(lambda prefix: (1.0,), 1), lambda prefix: (1.0,)) as practice:
        assert listening() <= {"127.0.0.1"} and len(listening()) == 1
        evil = ask(practice, "/v1/completions", "POST", Host="evil.example")
        assert evil.status == 403
    sources = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "specdec").rglob("*.py")}
    servers = {
        name
        for name, text in sources.items()
        if re.search(r"HTTPServer\(|TCPServer|start_server|\.listen\(|uvicorn", text)
    }
    assert servers == {"live_server.py", "server.py"}  # a new one belongs into this test
    assert not any('"0.0.0.0"' in text for name, text in sources.items() if name in servers)


# The command


def test_a_port_that_is_taken_and_a_model_that_is_missing(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match=r"Port \d+ can't be had"), serve_live(taken.getsockname()[1]):
            pass

    def missing():
        raise ModelError("pip could not download it")

    monkeypatch.setattr(live_server, "weights", missing)
    monkeypatch.setattr(live_server, "serve_live", lambda *more: pytest.fail("served without a model"))
    with pytest.raises(ModelError, match="could not download"):
        open_live(browser=False)


@pytest.fixture
def command():
    "`specdec live` in a process of its own, and the address that it says."
    started = subprocess.Popen(
        [sys.executable, "-m", "specdec", "live", "--no-browser"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        # a shell gives its background jobs a SIGINT that is ignored: whoever presses Ctrl-C has another
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        address = next(filter(None, (re.search(r"http://\S+/live\.html", line) for line in started.stderr)))[0]
        yield started, address
    finally:
        started.kill()
        started.wait()
        started.stderr.close()


def test_a_visit_starts_nothing(command):
    started, address = command
    listing = json.loads(ask(address, f"/live/weights/{LISTING}").body)
    assert ask(address).status == 200 and listing["model"]["parts"]
    whole = b"".join(ask(address, f"/live/weights/{part['path']}").body for part in listing["model"]["parts"])
    assert hashlib.sha256(whole).hexdigest() == listing["model"]["sha256"]
    assert psutil.Process(started.pid).children(recursive=True) == []


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGKILL)),
    ],
    ids=lambda number: number.name,
)
def test_a_command_that_ends_in_any_way_leaves_no_process(command, number):
    started, address = command
    port = urlsplit(address).port
    busy = HTTPConnection("127.0.0.1", port)  # a visitor who stays
    busy.request("GET", "/live.html")
    started.send_signal(number)
    begun = time.monotonic()
    code = started.wait(20)
    assert time.monotonic() - begun < 10
    if number != signal.SIGKILL:
        assert code == 0 and "Closed." in started.stderr.read()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    busy.close()


# Publishing


def test_the_workflow_puts_the_parts_beside_the_page_and_never_commits_them():
    workflow = (ROOT / ".github" / "workflows" / "site.yml").read_text(encoding="utf-8")
    steps = "run: make check", "run: make docs", "tools/live.py weights docs/live/weights", "upload-pages-artifact"
    at = [workflow.index(step) for step in steps]
    assert at == sorted(at)
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert "docs/live/weights/" in ignored
    assert subprocess.run(["git", "check-ignore", "-q", "docs/live/weights/model-00.bin"], cwd=ROOT).returncode in (
        0,
        128,
    )


def test_the_tool_writes_them(tmp_path, small, capsys, monkeypatch):
    module = tool("live")
    monkeypatch.setattr(sys, "argv", ["live.py", "weights", str(tmp_path / "new")])
    module.main()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "head-00.bin",
        "model-00.bin",
        "model-01.bin",
        "model-02.bin",
        LISTING,
    ]
    assert "MB" in capsys.readouterr().out
