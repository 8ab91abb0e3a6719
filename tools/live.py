"""What the live page needs: `python tools/live.py build` compiles its kernel, and `python tools/live.py weights
docs/live/weights` puts the weights that it fetches beside it.

Those are the default model, from the package's own download with its SHA-256, and the shipped head, in parts of at most
10 MB with a list of their digests. The workflow that publishes the site does this; git ignores that folder.
"""
import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
LIVE = ROOT / "nbs" / "live"
COMPILER = "-m ziglang cc -target wasm32-freestanding -mcpu=generic+simd128 -O3 -nostdlib".split()
LINKER = "--no-entry --import-memory --strip-all -z,stack-size=65536 --export=__heap_base".split()


def build(out: Path) -> None:
    "Compile kernel.c; the same bytes on every machine, by the compiler that the dev extra pins."
    with TemporaryDirectory() as folder: # its own caches, so that nothing of this machine comes in
        command = [sys.executable, *COMPILER, *(f"-Wl,{word}" for word in LINKER), "-o", f"{folder}/kernel.wasm",
                   "kernel.c"]
        subprocess.run(command, cwd=LIVE, check=True)
        out.write_bytes(Path(folder, "kernel.wasm").read_bytes())


def main() -> None:
    "Compile, or write the weights and say how much they are."
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build")
    commands.add_parser("weights").add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.command == "build": return build(LIVE / "kernel.wasm")
    from specdec.app.live_server import write_weights
    print(f"{given.folder}: {write_weights(given.folder) / 1e6:.1f} MB")


if __name__ == "__main__": main()
