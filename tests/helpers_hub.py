"""A hub on this machine that speaks the real one's HTTP API, with tiny random models under their published names: of
the architecture, with the vocabulary's true size, and a tokenizer with as many tokens as the real one has."""
import hashlib
import json
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

COMMIT = "c" * 40


class Hub(BaseHTTPRequestHandler):
    "Answers for the repositories of its server: folders by name, and the names that have to be asked for."
    protocol_version = "HTTP/1.1"

    def log_message(self, *_): "Nothing."

    def answer(self, code: int, body: bytes = b"", **headers) -> None:
        self.send_response(code)
        for name, value in ({"Content-Length": len(body)} | headers).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD": self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.split("?")[0].strip("/")
        name = "/".join(path.removeprefix("api/models/").split("/")[:2])
        self.server.asked.append(path)
        folder = self.server.folders.get(name)
        if folder is None: return self.answer(404, b"{}", X_Error_Code="RepoNotFound")
        files = {file.name: file for file in folder.iterdir()}
        if path == f"api/models/{name}/revision/main":
            return self.answer(200, json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode())
        if path.startswith(f"api/models/{name}/tree/"):
            entries = [dict(type="file", path=n, size=f.stat().st_size, oid=sha(f)[:40]) for n, f in files.items()]
            return self.answer(200, json.dumps(entries).encode(), Content_Type="application/json")
        if name in self.server.gated:
            words = f"Access to model {name} is restricted. You must have access to it and be authenticated."
            return self.answer(401, b"", X_Error_Code="GatedRepo", X_Error_Message=words)
        file = files[path.rsplit("/", 1)[1]]
        self.answer(200, file.read_bytes(), ETag=f'"{sha(file)[:40]}"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET


@lru_cache
def sha(file: Path) -> str: return hashlib.sha256(file.read_bytes()).hexdigest()


@contextmanager
def hub(monkeypatch, cache: Path):
    "The hub client talks to this server, and keeps what it gets in a cache of its own."
    from huggingface_hub import constants
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.folders, server.gated, server.asked = {}, set(), []
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                            constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server
        server.shutdown()


# how many tokens the published tokenizers have, and how they write a space
TOKENIZERS = {
    "smollm2": (49152, "Ġ"), "gpt2": (50257, "Ġ"), "llama2": (32000, "▁"), "phi3": (32011, "▁"),
    "llama3": (128256, "Ġ"), "llama3.1": (128256, "Ġ"), "qwen2.5": (151665, "Ġ"), "qwen3": (151669, "Ġ"),
}


@lru_cache
def tokenizer(vocabulary: str) -> PreTrainedTokenizerFast:
    "Bytes or letters, as the family writes them, some words, and tokens that only this vocabulary has."
    size, space = TOKENIZERS[vocabulary]
    bytelike = space == "Ġ"
    letters = (sorted(pre_tokenizers.ByteLevel.alphabet()) if bytelike
               else [space, *map(chr, range(33, 127)), *(f"<0x{i:02X}>" for i in range(256))])
    tokens = ["<end>", *letters, *(space + letter for letter in "abcdefghij")]
    tokens += [f"<{vocabulary}-{i}>" for i in range(size - len(tokens))]
    # every vocabulary numbers what they share in an order of its own
    if vocabulary == "llama3.1": tokens[-2:] = ["<new-1>", "<new-2>"]
    elif not bytelike: tokens[1:len(letters) + 1] = letters[::-1]
    ids = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(ids, [], byte_fallback=not bytelike)
    made = Tokenizer(model)
    if bytelike:
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=space, prepend_scheme="never")
        made.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def tiny_copy(card, folder: Path, layers: int = 2, seed: int = 0) -> Path:
    "A random model of a published one's family and vocabulary, small in everything else, stored with its tokenizer."
    shape = card.shape
    kinds = dict(pad_token_id=0, eos_token_id=0, bos_token_id=0, vocab_size=shape.vocab_size, num_hidden_layers=layers,
                 hidden_size=32, num_attention_heads=4, max_position_embeddings=256, tie_word_embeddings=shape.tied)
    if shape.family != "gpt2": kinds |= dict(intermediate_size=32, num_key_value_heads=2)
    if shape.family == "qwen3": kinds |= dict(head_dim=8)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.family, **kinds))
    model.save_pretrained(folder)
    tokenizer(card.vocabulary).save_pretrained(folder)
    return folder
