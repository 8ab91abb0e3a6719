"""What several test files share: a real browser, and a file server for the committed site."""
import gc
import os
import shutil
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from ctypes import CDLL
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import settings

CHROMIUMS = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
FLAGS = ("--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
         "--disable-component-update --disable-sync").split()

# how many examples hypothesis tries; a test that wants another number says `max_examples=examples(60)`
settings.register_profile("ci", deadline=None, max_examples=25)
settings.register_profile("nightly", deadline=None, max_examples=100)
settings.load_profile(os.environ.get("SPECDEC_TESTS", "ci"))


@contextmanager
def quietly(file):
    "The package's lock, which says nothing here while it waits: another process of this run may take the same prices."
    from specdec.models.files import locked
    with ExitStack() as stack:
        with redirect_stderr(StringIO()): stack.enter_context(locked(file))
        yield


@pytest.fixture(scope="session", autouse=True)
def prices_apart(tmp_path_factory):
    "What tests take of prices is kept in a folder of theirs, not in the user's cache: one for all processes of a run."
    from specdec.drafters import costs
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "prices"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(costs, "cache_home", lambda: folder)
        patched.setattr(costs, "locked", quietly)
        yield


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium of the system. Without one, or without Playwright, its tests are skipped with a line that
    says how to get it."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="no Playwright, so no browser test ran: make setup installs it"
    )
    path = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if path is None:
        pytest.skip(
            "no Chromium on this machine, so no browser test ran: make browser installs one where the system's"
            " packages can"
        )
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield started
        started.close()


def axes(item) -> set[tuple]:
    "The values that a parametrised case has, one for each decorator and each parametrised fixture."
    params, decorators = item.callspec.params, []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        decorators.append(tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names))
    decorators += [(name,) for name in params if not any(name in names for names in decorators)]
    return {(names, *(id(params[name]) for name in names)) for names in decorators}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Where a test is parametrised more than once, `make test` runs as many cases as it takes for each value to stand
    in one of them; all combinations are `slow`, which `make test-all` runs too."""
    cases: dict[str, list] = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for left in cases.values():
        values = {item: axes(item) for item in left}
        if len(values[left[0]]) < 2: continue
        missing = set().union(*values.values())
        while missing:
            best = max(left, key=lambda item: len(values[item] & missing))
            missing -= values[best]
            left.remove(best)
        for item in left: item.add_marker("slow")


def pytest_collection_finish():
    "What the test files import stays to the end: whoever looks for garbage from now on need not go through it."
    gc.freeze()


RESIDENT = Path("/proc/self/statm")
GROWN = 100 * 10**6  # bytes, less than half of the default model
held = float("inf")


def memory() -> int: # bytes; 0: the system doesn't say
    "What this process holds."
    return int(RESIDENT.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if RESIDENT.exists() else 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish():
    """Give back what models held that tests have loaded and let go: they are too few objects for Python to look for
    garbage, and the C library keeps what is free between others. Without this one process came to hold 6.8 GB."""
    global held
    held = min(held, memory())
    if memory() < held + GROWN: return
    gc.collect()
    with suppress(OSError, TypeError, AttributeError): CDLL(None).malloc_trim(0)  # glibc has it
    held = memory()


def pytest_sessionfinish():
    "Nor does anything else need going through once all is said: a notebook's shell looks for garbage as Python ends."
    gc.freeze()


def pytest_make_parametrize_id(val):
    """A name for a parametrised case whose value pytest would only number: what a dict or a list holds, what a function
    is called, which function of ours a lambda asks first."""
    if isinstance(val, dict): words = ", ".join(f"{key}={value!r}" for key, value in val.items()) or "nothing"
    elif callable(val) and getattr(val, "__name__", "") == "<lambda>": words = " ".join(val.__code__.co_names)
    elif hasattr(val, "__name__"): words = val.__name__
    elif isinstance(val, (str, int, float, type(None))): return None  # pytest names these itself
    else: words = repr(val).removeprefix("torch.")
    return None if " at 0x" in words else " ".join(words.split())[:60]


def pytest_terminal_summary(terminalreporter):
    "Say once, at the end and in any verbosity, that the browser tests did not run, and why."
    why = {
        report.longrepr[2] for report in terminalreporter.stats.get("skipped", []) if isinstance(report.longrepr, tuple)
    }
    for reason in sorted(reason for reason in why if "no browser test ran" in reason):
        terminalreporter.write_line(reason.removeprefix("Skipped: "), yellow=True)


class Quiet(SimpleHTTPRequestHandler):
    "A plain file server that keeps its log to itself."
    def log_message(self, *_): "Nothing."


@pytest.fixture(scope="session")
def site():
    "The address of the committed site on a plain file server."
    folder = Path(__file__).parents[1] / "docs"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(autouse=True)
def gradients():
    """A test ends with gradients on, as it began: the one that leaves them off is named, and those that train after it
    in the same process still do."""
    yield
    import torch
    on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert on, "this test left torch's gradients off: let go of its notebook by `let_go`, or close its generators"


@contextmanager
def let_go(shell):
    """Run a notebook in a shell, then let go what it held, with gradients as they were: notebooks switch them off, and
    a generator that is closed sets them as they were when it began, so that comes first."""
    import torch
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        yield shell
        shell.user_ns.clear()
        shell.user_ns_hidden.clear()
        shell.exc = None
        gc.collect()


@pytest.fixture
def shell(monkeypatch):
    "A notebook's shell in this process, as nbdev_test has it. What the notebook held is let go afterwards."
    from execnb.shell import CaptureShell
    monkeypatch.setenv("IN_TEST", "1")
    with let_go(CaptureShell()) as made: yield made
