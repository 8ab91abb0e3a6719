"""The picture with which the playground's notebook opens: `OMP_NUM_THREADS=1 python tools/screenshot.py`.

The real panel, served as `specdec playground` serves it, after a run with the settings that it starts with. One thread,
so that the browser has a core of its own. Wants a machine that does nothing else, since the panel shows times, and a
Chromium (`make browser`).
"""
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

from specdec.playground_server import serve_playground

OUT = Path(__file__).resolve().parents[1] / "nbs" / "images" / "playground.png"
LIMIT = 180_000  # ms, for loading the model and for the run


def main() -> None:
    "Serve, run once, and take the picture."
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None: raise SystemExit("No Chromium was found: `make browser` installs one.")
    with serve_playground() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=dict(width=1280, height=1000))
        page.set_default_timeout(LIMIT)
        page.goto(address)
        says = "words => RegExp(words).test(document.querySelector('.sp-status')?.textContent)"
        page.wait_for_function(says, arg="^Ready")
        page.get_by_role("button", name="Run").click()
        page.wait_for_function(says, arg="^(?!Ready)((?!…).)*$")  # neither writing nor measuring
        page.wait_for_timeout(1000)
        page.screenshot(path=OUT)
        browser.close()
    print(f"{OUT.name}: {OUT.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__": main()
