"""The live page's engine: `python tools/live.py build` compiles its kernel, `python tools/live.py measure` prints how
fast it is in a headless Chromium, one thread, on a machine that does nothing else."""
import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

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


FORWARDS = """() => {
  const {model} = engine, text = [...Array(200).keys()].map((i) => 1000 + i), seconds = {};
  for (const n of [1, 2, 3, 4, 5, 6, 8]) {
    const found = [];
    for (let i = 0; i < 9; i++) {
      model.rollback(100);
      const before = now();
      model.forward(text.slice(0, n));
      found.push(now() - before);
    }
    seconds[n] = found.sort((a, b) => a - b)[4];
  }
  return seconds;
}"""


def measure() -> None:
    "Print the figures that the page has to hold."
    sys.path.insert(0, str(ROOT / "tests"))
    import psutil  # `build` does without these
    from playwright.sync_api import sync_playwright

    from conftest import CHROMIUMS, FLAGS
    from helpers_live import Engine, served, weights
    weights()
    path = next(filter(None, map(shutil.which, CHROMIUMS)))
    with sync_playwright() as playwright, served() as server:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        engine, before = Engine(browser, server), perf_counter()
        engine.load()
        print(f"loaded in {perf_counter() - before:.1f} s")
        ids = [*range(1000, 1050)]
        first = [engine.generate(ids=ids, maxNewTokens=1)["seconds"] for _ in range(3)]
        print(f"first token of a prompt of fifty tokens: {median(first):.2f} s (at most 2)")
        seconds = engine.ask(FORWARDS)
        times = ", ".join(f"{n}: {1000 * s:.1f}" for n, s in seconds.items())
        print(f"a forward behind 100 positions, ms by rows: {times}; five are {seconds['5'] / seconds['1']:.2f} × one"
              " (at most 2.6)")
        song = "Repeat this word for word:\n\n" + "Five little boats went out to sea, out to sea in the morning. " * 3
        for drafter in ("plain", "lookup", "head"):
            runs = [engine.generate(prompt=song, maxNewTokens=64, drafter=drafter) for _ in range(3)]
            written = [r["rounds"][1:] for r in runs]
            rate = median(sum(len(r["emitted"]) for r in rounds) / sum(sum(r["seconds"].values()) for r in rounds)
                          for rounds in written)
            tokens, forwards = len(runs[0]["ids"]), runs[0]["forwards"]
            print(f"{drafter}: {rate:.1f} tokens/s" + " (at least 25)" * (drafter == "plain")
                  + f", {tokens} tokens in {forwards} forwards")
        used = max(child.memory_info().rss for child in psutil.Process().children(recursive=True)
                   if "--type=renderer" in child.cmdline())
        print(f"memory of the page's process: {used / 1e6:.0f} MB (below 500)")
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("build", "measure"))
    if parser.parse_args().command == "build": build(LIVE / "kernel.wasm")
    else: measure()
