"What public decoders really sample: each is installed as it is published and asked in a process of its own."
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal
from uuid import uuid4

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specdec.errors import ModelError, check, require_int
from specdec.models.files import first_line
from specdec.models.hub import cache_home

from .engines import ENGINES
from .rules import RULES, Audited, no_verdict

AUDITED = {each.name: each for each in (*RULES, *ENGINES)}


@contextmanager
def work_folder() -> Iterator[Path]:
    """An empty folder in the cache, gone afterwards; those of audits that were killed are removed.
    Raises `ModelError` if none can be made."""
    home = cache_home() / "audit"
    try:
        home.mkdir(parents=True, exist_ok=True)
        for left in home.glob(".work-*.lock"): _remove(left)
        lock = FileLock(home / f".work-{uuid4().hex}.lock")
        lock.acquire()  # before the folder is there
    except OSError as error:
        raise ModelError(f"The cache folder {home} can't be written ({error}). Set SPECDEC_HOME to "
                         "a folder that can.") from error
    try:
        folder = Path(lock.lock_file).with_suffix("")
        folder.mkdir()
        yield folder
    finally:
        lock.release()
        _remove(Path(lock.lock_file))


def _remove(lock: Path) -> None:
    "A folder and the lock beside it, unless a living process holds that."
    with suppress(OSError, Timeout), FileLock(lock, timeout=0):
        shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
        lock.unlink(missing_ok=True)


_BELOW = """import os, signal, subprocess, sys, threading
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)


def watch():
    sys.stdin.buffer.read()  # until the process that started this is gone
    if hasattr(os, "killpg"): os.killpg(0, signal.SIGKILL)
    child.kill()
    os._exit(1)
threading.Thread(target=watch, daemon=True).start()
code = child.wait()
os._exit(code if code >= 0 else 1)"""


def run_below(program: list[str],
              seconds: float | None = None, # None: as long as it takes
              **options,                    # of `subprocess.Popen`
             ) -> tuple[int, str]: # exit code, what it said on standard error
    """Run a program that ends when we do, however we end, with all that it has started. Raises
    `TimeoutExpired` if it takes longer; then it is ended, too."""
    started = subprocess.Popen(
        [sys.executable, "-c", _BELOW, *program], stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, **options)
    said: list[bytes] = []
    reader = threading.Thread(target=lambda: said.append(started.stderr.read()), daemon=True)
    reader.start()
    try: code = started.wait(seconds)
    finally:
        with suppress(OSError):  # what is left of them
            if hasattr(os, "killpg"): os.killpg(started.pid, signal.SIGKILL)
            else: started.kill()
        started.wait()
        started.stdin.close()
    reader.join(10)
    return code, b"".join(said).decode(errors="replace")


def installed(each: Audited) -> Path:
    """The folder that holds this version and what it needs, and nothing else. Raises `ModelError`
    if pip can't get it."""
    wanted = hashlib.sha256(" ".join(each.requirements).encode()).hexdigest()[:8]
    folder = cache_home() / "audit" / f"{each.requirements[0].replace('==', '-')}-{wanted}"
    if folder.exists(): return folder
    with work_folder() as partial:
        target = partial / "packages"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
               "--no-input", "--no-deps", "--target", str(target), *each.requirements]
        code, said = run_below(pip, env=os.environ | {"TMPDIR": str(partial)})
        if code:
            reason = _last_line(said, "pip gave no reason")
            raise ModelError(f"pip can't install {' '.join(each.requirements)}: {reason}")
        try: os.replace(target, folder)
        except OSError:
            if not folder.exists(): raise  # another audit was quicker
    return folder


def _last_line(text: str, otherwise: str) -> str:
    "Where a program that failed says why."
    return (text.strip().splitlines() or [otherwise])[-1]


_ASK = """import json, sys; from pathlib import Path
ours, name, run, answer = sys.argv[1:]
sys.path.insert(0, ours)
from audits.run import AUDITED
sys.path.remove(ours)
Path(answer).write_text(json.dumps(AUDITED[name].ask(int(run))))"""


def verdict_apart(each: Audited, run: int = 0, seconds: float = 600) -> dict:
    """The verdict on a package as it is published, from a process of its own that may take so many
    seconds. Where there is none, the verdict says why."""
    ours = str(Path(__file__).parents[1])
    try:
        paths = [str(installed(each)), os.environ.get("PYTHONPATH")]
        with work_folder() as folder:
            where = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)),
                                  "TMPDIR": str(folder),
                                  "OMP_NUM_THREADS": "1"}  # so tiny, models gain nothing by more
            answer = folder / "verdict.json"  # beside what the package prints
            ask = [sys.executable, "-c", _ASK, ours, each.name, str(run), str(answer)]
            code, said = run_below(ask, seconds, env=where, cwd=folder)
            if not code and answer.exists(): return json.loads(answer.read_text())
            why = f"it ended the process that asked it: {_last_line(said, 'silently')}"
    except ModelError as error: why = str(error)
    except (OSError, ValueError) as error: why = f"its verdict can't be read: {error}"
    except subprocess.TimeoutExpired: why = f"it did not answer within {seconds:.0f} s"
    return each.about() | no_verdict(why) | {"run": run, "seconds": 0.0}


def audit(
    *names: str,                 # as in the table; none: all of them
    runs: int = 1,               # how often each is asked, with other seeds where anything is drawn
    known: Iterable[dict] = (),  # verdicts of an earlier audit, which are taken over
) -> Iterator[dict]: # verdicts, as they come
    """Install each package in the version that the audit names, ask it, and say whether its distribution is
    the target's; where that fails, there is no verdict, and `raised` says why. Raises `InputError`
    for a name that isn't known."""
    for name in names:
        check(name in AUDITED, f"No package {name!r} is audited: expected {', '.join(AUDITED)}.")
    asked = [AUDITED[name] for name in names or AUDITED]
    known = list(known)
    runs = require_int(runs, "runs, how often each is asked,", 1)
    return (_known(known, each, run) or verdict_apart(each, run)
            for each in asked for run in range(runs))


def _known(known: list[dict], each: Audited, run: int) -> dict | None:
    "The verdict on just this, if there is one; explained as today."
    for found in known:
        same = all(found.get(key) == value for key, value in each.about().items())
        if same and found.get("run") == run and found["lossless"] is not None:
            return each.explained(found)
    return None


class Verdict(BaseModel):
    "What a verdict in a file must hold; what else it holds is kept."
    model_config = ConfigDict(extra="allow", strict=True)
    name: str
    version: str
    promises: bool
    lossless: bool | None
    error: float = Field(allow_inf_nan=False)
    seconds: float = Field(allow_inf_nan=False)
    run: int = 0
    raised: str | None = None


class Verdicts(BaseModel):
    "What `specdec audit --out` writes, and nothing else."
    model_config = ConfigDict(extra="forbid", strict=True)
    command: Literal["specdec audit"]
    verdicts: list[Verdict]


def kept_verdicts(path: Path) -> list[dict]: # empty if there is no such file
    """The verdicts that an earlier audit has written; raises `ModelError` if the file isn't one's,
    which is then left as it is."""
    try:
        if not path.exists() and path.parent.is_dir(): return []
        if not path.is_file(): raise OSError("there is no such folder, or it is no file")
        data = json.loads(path.read_text(encoding="utf-8"))
        Verdicts.model_validate(data)
        return data["verdicts"]
    except ValidationError as error:
        wrong = error.errors()[0]
        reason = f"{'.'.join(map(str, wrong['loc'])) or 'the whole'}: {wrong['msg']}"
    except (OSError, ValueError, RecursionError) as error: reason = first_line(error)
    reason = " ".join(reason.split())[:300]
    raise ModelError(f"The verdicts in {path} can't be read ({reason}): name another file, or "
                     "delete this one.")


def in_order(verdicts: list[dict]) -> list[dict]: # of what is audited, the last for each run
    "Verdicts as the table has them."
    latest = {(found["name"], found.get("run", 0)): found for found in verdicts}
    places = {name: place for place, name in enumerate(AUDITED)}
    named = [key for key in latest if key[0] in places]
    return [latest[key] for key in sorted(named, key=lambda key: (places[key[0]], key[1]))]


def audit_row(found: dict) -> list[str]: # of a table: package, version, verdict, error, seconds
    "A verdict in five words."
    lossy = "NOT LOSSLESS" if found["promises"] else "lossy, as it says"
    said = {True: "lossless", False: lossy, None: "no verdict"}[found["lossless"]]
    return [found["name"], found["version"], said, f"{found['error']:.2g}",
            f"{found['seconds']:.0f}"]
