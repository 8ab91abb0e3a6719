"""Nothing is left of a visit: kernels are counted in the table of processes, while a real browser reloads, leaves and
crashes, and while the command is ended in every way."""
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec

import psutil
import pytest

from conftest import CHROMIUMS, FLAGS

UP, MINUTE = 120, 60  # s: until a kernel is up on a busy machine; until one that nobody needs must be gone

pytestmark = pytest.mark.skipif(find_spec("voila") is None, reason="no Voilà, so no browser test ran: make setup")


def until(condition, seconds: float, what: str) -> float:
    "Wait until it holds; how long that took, s."
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + seconds, f"not within {seconds} s: {what}"
        time.sleep(.2)
    return time.monotonic() - start


def alive(processes) -> list[psutil.Process]:
    "Those that still run."
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


class Command:
    "`specdec playground` in a process of its own."
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "specdec", "playground", "--no-browser"], stderr=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            # a shell gives its background jobs a SIGINT that is ignored: whoever presses Ctrl-C has another
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.address = None
        for line in self.process.stderr:
            if found := re.search(r"http://\S+", line): break
        else: raise AssertionError("the command ended before it said its address")
        self.address = found[0]

    @property
    def all(self) -> list[psutil.Process]:
        "The command's processes, itself among them."
        command = psutil.Process(self.process.pid)
        return [command, *command.children(recursive=True)]

    @property
    def kernels(self) -> list[psutil.Process]:
        "The visitors' processes that run."
        found = [p for p in self.all if p.is_running() and "ipykernel_launcher" in " ".join(cmdline(p))]
        return alive(found)


def cmdline(process) -> list[str]:
    "How it was started; nothing, if it just ended."
    try: return process.cmdline()
    except psutil.Error: return []


@contextmanager
def command():
    "The command; whatever is left of it in the end is killed, so that a failure harms no other test."
    made = Command()
    known = made.all
    try:
        yield made
        known = made.all if made.process.poll() is None else known
    finally:
        for process in alive(known): process.kill()
        made.process.wait()
        made.process.stderr.close()


def visit(browser, address):
    "A page with the panel in it, connected to its kernel."
    page = browser.new_page()
    page.set_default_timeout(1000 * UP)
    page.goto(address)
    page.wait_for_function("(document.querySelector('.sp-status')?.textContent ?? '') != ''")
    return page


def reloaded(served, tab) -> None:
    tab.get_by_role("button", name="Run").click()  # a text that is being written keeps no kernel alive
    tab.reload()
    tab.wait_for_function("(document.querySelector('.sp-status')?.textContent ?? '') != ''")
    until(lambda: len(served.kernels) == 2, MINUTE, "reload")
    tab.close()


def crashed(served, tab) -> None:
    tab.close()
    until(lambda: len(served.kernels) == 1, MINUTE, "close")
    crash(served, served.address)


ENDS = {"closed": lambda served, tab: tab.close(), "left": lambda served, tab: tab.goto("about:blank"),
        "reloaded": reloaded, "crashed": crashed}


@pytest.mark.parametrize("end", ["closed", *(pytest.param(end, marks=pytest.mark.slow) for end in [*ENDS][1:])])
def test_a_visit_that_ends_in_any_way_leaves_no_kernel(browser, end):
    with command() as served:
        stays = visit(browser, served.address)
        [first] = served.kernels
        other = visit(browser, served.address)
        assert len(served.kernels) == 2
        ENDS[end](served, other)
        print(f"{end} {until(lambda: served.kernels == [first], MINUTE, end):.0f} s")
        # and the one that stayed was left alone all the while
        stays.get_by_role("button", name="Reset").click()
        stays.wait_for_function("document.querySelector('.sp-status').textContent.includes('Ready')")
        stays.close()
        until(lambda: not served.kernels, MINUTE, "the last page")


def crash(served, address: str) -> None:
    "A browser of its own opens the page, and is killed once its kernel is up."
    path = next(filter(None, map(shutil.which, CHROMIUMS)))
    profile = f"/tmp/specdec-crash-{os.getpid()}"
    options = ["--headless", *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", address]
    started = subprocess.Popen(
        [path, *options], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try: until(lambda: len(served.kernels) == 2, UP, "a second kernel")
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        shutil.rmtree(profile, ignore_errors=True)


@pytest.mark.parametrize("number", [
    signal.SIGINT, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGKILL)),
], ids=lambda number: number.name)
def test_a_command_that_ends_in_any_way_leaves_no_process(browser, number):
    with command() as served:
        page = visit(browser, served.address)
        page.get_by_role("button", name="Run").click()
        processes = served.all
        assert len(served.kernels) == 1 and len(processes) >= 3
        served.process.send_signal(number)
        seconds = until(lambda: not alive(processes), MINUTE, [p.cmdline() for p in alive(processes)])
        print(f"{number.name} {seconds:.0f} s")
        page.close()
        if number != signal.SIGKILL: assert served.process.wait() == 0 and "Closed." in served.process.stderr.read()
