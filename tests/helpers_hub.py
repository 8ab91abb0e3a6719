"""A hub on this machine that speaks the real one's HTTP API, with tiny random models under their published names: of
the architecture, with the vocabulary's true size, and a tokenizer with as many tokens as the real one has."""
import hashlib
import json
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
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


def k_blocks(shape, kind, generator):
    "Random blocks of a format with blocks of 256 weights in blocks, which the library reads and doesn't write."
    size, scales = {"Q4_K": (144, (0, 4)), "Q6_K": (210, (208, 210))}[kind]
    blocks = generator.integers(0, 256, (shape[0] * shape[1] // 256, size), dtype=np.uint8)
    first, last = scales
    blocks[:, first:last] = np.full(((last - first) // 2), 1e-3, np.float16).view(np.uint8)
    if kind == "Q4_K": blocks[:, 16::32], blocks[:, 17::32] = 0, 255 # each group uses its outer levels
    return blocks.reshape(shape[0], -1)

def write_gguf(path, kinds, sizes=(64, 96), family="llama", heads=4, kv_heads=4, context=64,
               extra=None, fill=lambda writer: None):
    """A model of that family with two layers and a byte-level tokenizer, random weights, in the formats that `kinds`
    names by what a tensor's name contains, and extra tensors (None: one that is left out); the numbers that are stored,
    by their GGUF names."""
    from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
    tokens = [
        "<|end|>", *(chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]), "ab",
        "cd",
    ]
    generator, layers, (d, m) = np.random.default_rng(0), 2, sizes
    writer = GGUFWriter(path, family)
    writer.add_context_length(context)
    writer.add_embedding_length(d)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(m)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(d // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    fill(writer)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["a b", "c d"])  # of a single one, transformers 5.17 makes a text
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    shapes = {"token_embd": (len(tokens), d), "output_norm": (d,)}
    for i in range(layers):
        kv = d // heads * kv_heads
        layer = {"attn_norm": (d,), "attn_q": (d, d), "attn_k": (kv, d), "attn_v": (kv, d), "attn_output": (d, d),
                 "ffn_norm": (d,), "ffn_gate": (m, d), "ffn_up": (m, d), "ffn_down": (d, m)}
        if family == "qwen3": layer |= {"attn_q_norm": (d // heads,), "attn_k_norm": (d // heads,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    tensors = {f"{name}.weight": generator.normal(0, .1, shape).astype(np.float32) for name, shape in shapes.items()}
    if family == "qwen2": tensors |= {
        f"blk.{i}.attn_{name}.bias": generator.normal(0, .1, rows).astype(np.float32)
        for i in range(layers) for name, rows in (("q", d), ("k", kv), ("v", kv))}
    tensors |= extra or {}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in tensors.items():
        kind = next((GGMLQuantizationType[kind] for part, kind in kinds.items() if part in name), None)
        if kind is None or tensor.ndim == 1: writer.add_tensor(name, tensor)
        else:
            packed = k_blocks(tensor.shape, kind.name, generator) if "_K" in kind.name else quantize(tensor, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
            tensors[name] = dequantize(packed, kind)
    writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file(); writer.close()
    return tensors
