"""The live page's engine in a browser's worker, with the default model beside it, and a way to ask it anything."""
import hashlib
import json
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from safetensors.torch import load_file, save

from specdec.drafters.load import shipped
from specdec.models.gguf import original_gguf

LIVE = Path(__file__).parents[1] / "nbs" / "live"
ENGINE = ("worker.js", "sampling.js", "tokenizer.js", "files.js", "pace.js", "kernel.wasm")
PART = 10**7  # bytes, at most
PAGE = b"<!DOCTYPE html><title>engine</title><input type=file id=model><input type=file id=head>"
# A worker that is the engine and answers what the test asks: its functions are the worker's own global ones.
ASKED = b"""importScripts("worker.js");
const theirs = self.onmessage;
self.onmessage = async (event) => {
  if (event.data.asked === undefined) return theirs(event);
  try { postMessage({answer: await (0, eval)(event.data.asked)(event.data.argument)}); }
  catch (error) { postMessage({answer: null, failed: String(error.stack)}); }
};"""
# In the page: one message out, and the first that ends it back; what came before it is kept in `said`.
TALK = """() => {
self.open_engine = () => {
  self.worker?.terminate();
  self.worker = new Worker("live/asked.js");
  self.said = [];
};
self.talk = (message, kinds) => new Promise((done, fail) => {
  worker.onerror = (event) => fail(new Error(event.message));
  worker.onmessage = ({data}) => {
    said.push(data);
    if (data.failed) fail(new Error(data.failed));
    else if (kinds.includes(data.type ?? "answer")) done(data);
  };
  if (message) worker.postMessage(message);
});
}"""


@lru_cache(maxsize=1)
def weights() -> dict[str, bytes]: # file name -> its bytes
    "What the page fetches: the list of parts, and the parts."
    head = {k: v for file in sorted(shipped("smollm2-head").glob("*.safetensors")) for k, v in load_file(file).items()}
    files = {"model": original_gguf("smollm2").read_bytes(), "head": save(head)}
    parts = {f"{name}-{at // PART:02}.bin": data[at:at + PART] for name, data in files.items()
             for at in range(0, len(data), PART)}
    listing = {name: {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "parts": [
        {"path": path, "bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()}
        for path, part in parts.items() if path.startswith(name)]} for name, data in files.items()}
    return {"parts.json": json.dumps(listing).encode()} | parts


class Files(BaseHTTPRequestHandler):
    "Answers with what `server.files` has at an address, and notes what was asked for."
    def do_GET(self):
        path = self.path.lstrip("/")
        self.server.asked.append(path)
        found = self.server.files(path)
        self.send_response(200 if found is not None else 404)
        kind = {"js": "text/javascript", "html": "text/html", "wasm": "application/wasm", "json": "application/json"}
        self.send_header("Content-Type", kind.get(path.rpartition(".")[2], "application/octet-stream"))
        self.send_header("Content-Length", str(len(found or b"")))
        self.end_headers()
        self.wfile.write(found or b"")

    def log_message(self, *_): "Nothing."


def file_at(path: str) -> bytes | None:
    "The engine's files, the weights, the page of the tests."
    if path == "page.html": return PAGE
    if path == "live/asked.js": return ASKED
    if path.startswith("live/weights/"): return weights().get(path.removeprefix("live/weights/"))
    if path.removeprefix("live/") in ENGINE: return (LIVE / Path(path).name).read_bytes()
    return None


@contextmanager
def served(files=file_at):
    "A server for the engine; `files` may give other bytes than those of `file_at`."
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        server.files, server.asked = files, []
        Thread(target=server.serve_forever, args=(.05,), daemon=True).start()
        try: yield server
        finally: server.shutdown()


class Engine:
    "The engine in a tab of a browser."
    def __init__(self, browser, server):
        self.tab, self.server = browser.new_page(), server
        self.tab.goto(f"http://127.0.0.1:{server.server_port}/page.html")
        self.tab.evaluate(TALK)
        self.tab.evaluate("open_engine()")

    def talk(self, message: dict | None, *kinds: str) -> dict:
        "Send a message, and wait for the first answer of these kinds."
        return self.tab.evaluate("([message, kinds]) => talk(message, kinds)", [message, list(kinds)])

    def load(self) -> dict:
        "Load the model from its parts: the answer, `ready` or `error`."
        return self.talk({"type": "load", "base": "live/weights/"}, "ready", "error")

    def ask(self, function: str, argument=None):
        "What a function of JavaScript gives in the worker, where the engine's own are at hand."
        return self.talk({"asked": function, "argument": argument}, "answer")["answer"]

    def generate(self, **options) -> dict:
        "A text: the answer's `result`, or an `error`."
        some = {"K": 4, "temperature": 0, "seed": 0, "maxNewTokens": 32, "drafter": "plain"}
        found = self.talk({"type": "generate", "id": 1, "options": some | options}, "done", "error")
        return found.get("result", found)

    def close(self) -> None: self.tab.close()
