"""What the live page needs: `python tools/live.py build` compiles its kernel, `python tools/live.py weights
docs/live/weights` puts the weights that it fetches beside it, and `python tools/live.py record` takes the run with
which it opens.

Those are the default model, from the package's own download with its SHA-256, and the shipped head, in parts of at most
10 MB with a list of their digests. The workflow that publishes the site does this; git ignores that folder.

The run is one of the page itself, of its first prompt with the settings that it starts with, in a Chromium (`make
browser`) on a machine that does nothing else.
"""
import argparse
import json
import shutil
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


# The page's own first prompt and settings, both lanes; the second time counts, for a page's first forwards are slow.
RUN = """async () => {
  const labels = [...document.querySelectorAll(".live label")];
  const value = (label) => labels.find((e) => e.textContent === label).control.value;
  const K = Number(value("K, draft tokens at most")), maxNewTokens = Number(value("Tokens, at most"));
  const prompt = document.querySelector(".live-question").value;
  const asked = { prompt, K, temperature: 0, seed: 1, maxNewTokens, drafter: "lookup", adaptive: true };
  const lane = async (more) => (await window.specdec.generate({ ...asked, ...more })).rounds;
  await lane({});
  const drafted = await lane({}), tokens = drafted.reduce((sum, r) => sum + r.emitted.length, 0);
  return { asked, drafted, plain: await lane({ drafter: "plain", maxNewTokens: tokens }) };
}"""


def rounded(value):
    "Numbers to five digits after the point: no bar shows more."
    if isinstance(value, float): return round(value, 5)
    if isinstance(value, dict): return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def record() -> dict:
    "A run of the page, and of what machine; of plain decoding only what its lane shows."
    from playwright.sync_api import sync_playwright

    from specdec.app.live_server import serve_live
    from specdec.drafters.costs import processor_name
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None: raise SystemExit("No Chromium was found: `make browser` installs one.")
    with serve_live() as address, sync_playwright() as playwright:
        tab = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"]).new_page()
        tab.set_default_timeout(240_000)
        tab.goto(address)
        tab.get_by_role("button", name="Fetch").click()
        tab.wait_for_selector(".live-run[aria-disabled=false]")
        run = tab.evaluate(RUN)
    for r in run["plain"]: r["token"] = {key: r["token"][key] for key in ("id", "text", "kind")}
    return {"machine": f"one thread of an {processor_name()}"} | rounded(run)


def main() -> None:
    "Compile, record, or write the weights and say how much they are."
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("build", "record"): commands.add_parser(name)
    commands.add_parser("weights").add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.command == "build": return build(LIVE / "kernel.wasm")
    if given.command == "record":
        (LIVE / "recorded.json").write_text(json.dumps(record(), ensure_ascii=False, separators=(",", ":")) + "\n",
                                            encoding="utf-8")
        return
    from specdec.app.live_server import write_weights
    print(f"{given.folder}: {write_weights(given.folder) / 1e6:.1f} MB")


if __name__ == "__main__": main()
