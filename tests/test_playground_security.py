"""Who may use the playground: every lock is tried with real requests and a real websocket, as a page of another site
sends them."""
import asyncio
import os
import re
import subprocess
from http.client import HTTPConnection
from importlib.util import find_spec
from types import SimpleNamespace
from urllib.parse import urlsplit

import psutil
import pytest

from specdec import playground_server as module
from specdec.playground_server import REFUSED, is_local, refused, serve_playground, visitor_kernels

pytestmark = pytest.mark.skipif(find_spec("voila") is None, reason="no Voilà, which serves the playground: make setup")


def ask(address: str, path: str, **headers: str) -> SimpleNamespace:
    "What the server that listens at an address answers."
    parts = urlsplit(address)
    connection = HTTPConnection(parts.hostname, parts.port, timeout=60)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return SimpleNamespace(status=answer.status, text=answer.read().decode(errors="replace"),
                               cookie=(answer.getheader("Set-Cookie") or "").partition(";")[0],
                               cookie_says=answer.getheader("Set-Cookie") or "")
    finally: connection.close()


def kernels() -> int:
    "How many kernels this process' server has."
    found = psutil.Process(os.getpid()).children(recursive=True)
    return sum("ipykernel_launcher" in " ".join(process.cmdline()) for process in found if process.is_running())


@pytest.fixture(scope="module")
def served():
    "The address with its token; and what a visitor got, whose kernel runs: the page, its cookie, its kernel."
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with serve_playground() as address:
        token = urlsplit(address).query
        for path in ("/", "/?token=", "/?token=guess", "/?token=" + token[:-1].partition("=")[2]):
            assert ask(address, path).status == 403  # before anybody had a cookie
        before = kernels()
        page = ask(address, f"/?{token}")
        kernel, = re.findall(r'"kernelId": "([-0-9a-f]+)"', page.text)
        yield SimpleNamespace(address=address, token=token, page=page, cookie=page.cookie, kernel=kernel, before=before,
                              port=urlsplit(address).port)


def test_the_address_that_is_given_works_and_no_kernel_was_started_before(served):
    assert served.page.status == 200 and served.before == 0 and kernels() == 1
    assert "SameSite=Strict" in served.page.cookie_says and "HttpOnly" in served.page.cookie_says


OTHERS = {"a picture on any page": {}, "with this machine's cookie": {"Cookie": True},
          "with the cookie, from another port": {"Cookie": True, "Origin": "http://127.0.0.1:1", "Referer": "http://127.0.0.1:1/"}}


@pytest.mark.parametrize("headers", OTHERS.values(), ids=OTHERS)
def test_no_page_starts_a_kernel_without_the_token(served, headers):
    sent = {name: served.cookie if value is True else value for name, value in headers.items()}
    for path in ("/", "/?token=guess", f"/?{served.token}&token=guess"):
        found = ask(served.address, path, **sent)
        assert (found.status, found.text) == (403, REFUSED)
    assert kernels() == 1


@pytest.mark.parametrize("path", ["/", "/login", "/voila/static/voila.js", "/api/kernels/x", "/nothing"])
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "0.0.0.0", "169.254.169.254", ""])
def test_a_name_that_was_bound_to_this_machine_gets_nothing(served, path, host):
    found = ask(served.address, f"{path}?{served.token}", Host=f"{host}:{served.port}", Cookie=served.cookie)
    assert (found.status, found.text) == (403, REFUSED) and kernels() == 1


def opened(served, **headers) -> int:
    "What the kernel's websocket says to a handshake with these headers: 101 when it opens."
    from tornado.httpclient import HTTPClientError, HTTPRequest
    from tornado.websocket import websocket_connect
    async def connect():
        address = f"ws://127.0.0.1:{served.port}/api/kernels/{served.kernel}/channels?session_id=x"
        try: (await websocket_connect(HTTPRequest(address, headers=headers, request_timeout=60))).close()
        except HTTPClientError as error: return error.code
        return 101
    return asyncio.run(connect())


def test_the_websocket_opens_for_the_page_alone(served):
    own = f"http://127.0.0.1:{served.port}"
    assert opened(served, Cookie=served.cookie, Origin=own) == 101
    assert opened(served, Origin=own) == 403  # no cookie, no token
    assert opened(served, Cookie=served.cookie, Origin="http://evil.example") == 403
    evil = f"evil.example:{served.port}"  # which means this machine by now
    assert opened(served, Cookie=served.cookie, Host=evil, Origin=f"http://{evil}") == 403


def test_the_token_stands_in_no_list_of_processes(served):
    token = served.token.partition("=")[2]
    lines = [" ".join(process.cmdline()) for process in psutil.Process(os.getpid()).children(recursive=True)]
    assert any("playground.ipynb" in line for line in lines) and not any(token in line for line in lines)


def test_what_is_local():
    assert all(map(is_local, ["127.0.0.1", "127.1.2.3:8866", "[::1]:80", "LOCALHOST:1"]))
    assert not any(map(is_local, ["0.0.0.0", "evil.example", "localhost.evil.example", "[::1", "", "10.0.0.1:80", "é"]))


def test_who_serves_a_network_is_asked_under_any_name_and_with_the_token_only():
    def asks(**query):
        return not refused(SimpleNamespace(path="/", host="lab.example", query_arguments=query), "secret", local=False)
    assert asks(token=[b"secret"])
    assert not asks() and not asks(token=[b"secret", b"x"]) and not asks(token=["é".encode()])


# A limit on kernels

def test_there_are_no_more_kernels_than_there_is_room_for(monkeypatch):
    from tornado.web import HTTPError
    monkeypatch.setattr(module, "KERNELS", 2)
    async def visit():
        keeper = visitor_kernels()()
        start = [keeper.start_kernel(kernel_name="python3") for _ in range(3)]
        started = await asyncio.gather(*start, return_exceptions=True)  # at once
        try:
            full, = [found for found in started if isinstance(found, HTTPError)]
            assert full.status_code == 503 and "close one" in full.log_message and len(keeper) == 2
            leaves, stays = [found for found in started if isinstance(found, str)]
            for kernel in (leaves, stays): keeper.notify_connect(kernel)
            keeper.notify_disconnect(leaves)
            third = await keeper.start_kernel(kernel_name="python3")  # there is room at once
            assert set(keeper.list_kernel_ids()) == {stays, third}
            with pytest.raises(HTTPError): await keeper.start_kernel(kernel_name="python3")
        finally: await keeper.shutdown_all(now=True)
    asyncio.run(visit())


def test_a_visitor_too_many_is_told_so_on_a_page_that_asks_no_other_site(monkeypatch):
    real = subprocess.Popen
    program = "from specdec import playground_server as server; server.KERNELS = 0; server.run_server()"
    monkeypatch.setattr(module.subprocess, "Popen",
                        lambda line, **more: real([line[0], "-c", program, *line[3:]], **more))
    with serve_playground() as address:
        found = ask(address, f"/?{urlsplit(address).query}")
    assert found.status == 503 and "there is room for no more: close one" in found.text and "https:" not in found.text
