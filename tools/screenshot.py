"""The picture with which the playground's notebook opens: `OMP_NUM_THREADS=1 python tools/screenshot.py`.

The real panel in JupyterLab, after a run with the settings that it starts with. One thread, so that the browser has a
core of its own. Wants a machine that does nothing else, since the panel shows times, and a Chromium (`make browser`).
"""
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

OUT = Path(__file__).resolve().parents[1] / "nbs" / "images" / "playground.png"
LIMIT = 300_000  # ms, for loading the model and for the run
CELL = {"cell_type": "code", "id": "panel", "metadata": {}, "outputs": [], "execution_count": None,
        "source": "from specdec.panel.playground import Playground\nPlayground()"}
NOTEBOOK = {"cells": [CELL], "nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": {
    "name": "python3", "display_name": "Python 3", "language": "python"}, "language_info": {"name": "python"}}}
QUIET = {"fetchNews": "false", "checkForUpdates": False}  # JupyterLab asks no other site


@contextmanager
def lab() -> Iterator[str]:
    "JupyterLab with one notebook, the panel, to this machine alone, and none of the user's settings; its address."
    with TemporaryDirectory() as name:
        folder, token = Path(name), secrets.token_urlsafe(24)
        settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
        settings.mkdir(parents=True)
        (settings / "notification.jupyterlab-settings").write_text(json.dumps(QUIET))
        (folder / "work").mkdir()
        (folder / "work" / "panel.ipynb").write_text(json.dumps(NOTEBOOK))
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        own = {"JUPYTER_CONFIG_DIR": f"{folder}/config", "IPYTHONDIR": f"{folder}/ipython", "JUPYTER_TOKEN": token,
               "JUPYTERLAB_SETTINGS_DIR": f"{folder}/settings", "JUPYTERLAB_WORKSPACES_DIR": f"{folder}/spaces"}
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
                   f"--port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={folder / 'work'}",
                   "--expose-app-in-browser", "--LabServerApp.extra_labextensions_path=[]"]
        server = subprocess.Popen(command, env=os.environ | own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 60
            while socket.socket().connect_ex(("127.0.0.1", port)):
                if server.poll() is not None or time.monotonic() > end: raise RuntimeError("JupyterLab did not start.")
                time.sleep(.1)
            yield f"http://127.0.0.1:{port}/doc/tree/panel.ipynb?token={token}"
        finally:
            server.terminate()  # it ends its kernels
            server.wait(30)


def show_panel(page, address: str) -> None:
    "Open the notebook, run its cell, and wait until the panel has its model."
    page.goto(address)
    page.wait_for_function("() => window.jupyterapp && document.querySelector('.jp-Notebook .jp-Cell')")
    page.wait_for_function("""() => {
      document.querySelector('.jp-Dialog .jp-mod-accept')?.click(); // which kernel: the one that is offered
      return window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle';
    }""")
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")  # and don't wait for it
    page.wait_for_function("() => /^Ready/.test(document.querySelector('.sp-status')?.textContent)", timeout=LIMIT)


def main() -> None:
    "Serve, run once, and take the picture."
    from playwright.sync_api import sync_playwright
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None: raise SystemExit("No Chromium was found: `make browser` installs one.")
    with lab() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=dict(width=1280, height=1500))
        page.set_default_timeout(LIMIT)
        show_panel(page, address)
        page.locator(".sp button", has_text="Run").click()
        says = "words => RegExp(words).test(document.querySelector('.sp-status')?.textContent)"
        page.wait_for_function(says, arg="^(?!Ready)((?!…).)*$")  # neither writing nor measuring
        page.wait_for_timeout(1000)
        page.locator(".sp").first.screenshot(path=OUT)
        browser.close()
    print(f"{OUT.name}: {OUT.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__": main()
