"""Measure in which layout plain decoding is faster, and write the table that `use="plain"` is chosen by.

    python tools/layouts.py                                        # on a quiet machine: ten minutes, 4 GB of memory
    python tools/layouts.py --out mine.json                        # for SPECDEC_LAYOUTS=mine.json
    python tools/layouts.py --only SmolLM2-135M --repeats 3 --out /tmp/try.json       # quickly

Decoders of published shapes get random numbers as weights: how long a step takes depends on shapes alone. One has its
matrices packed, one has them as they are, and the two take turns, a step each. A large one has a part of its layers and
the same part of its vocabulary. The file's entries of other kinds of processor stay."""
import argparse
import json
import os
import platform
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from specdec.drafters.costs import processor_name
from specdec.models.checkpoint import Checkpoint
from specdec.models.linear import has_layouts, processor_kind
from specdec.models.llama import Llama
from specdec.models.loading import layer_numbers
from specdec.speedup import forward_seconds

HELD = 64  # tokens in the cache before a step
SHAPES = {  # from their published configs: hidden, inner, heads, key-value heads, layers, vocabulary, tied
    "SmolLM2-135M": (576, 1536, 9, 3, 30, 49152, True),
    "SmolLM2-360M": (960, 2560, 15, 5, 32, 49152, True),
    "Qwen2.5-0.5B": (896, 4864, 14, 2, 24, 151936, True),
    "Qwen2.5-1.5B": (1536, 8960, 12, 2, 28, 151936, False),
    "Llama-3.2-1B": (2048, 8192, 32, 8, 16, 128256, True),
    "Qwen2.5-7B": (3584, 18944, 28, 4, 28, 152064, False),
}
ROOM = 500_000_000  # numbers that one model may have


class RandomWeights(Checkpoint):
    "Random numbers under every name; the way in lies in a file of its own, as some layouts leave it there."
    def __init__(self, config: LlamaConfig, pack: bool, folder: Path):
        self.dtype, self.device, self.pack = torch.bfloat16, torch.device("cpu"), pack
        self.int8 = self.int4 = False
        name, file = "model.embed_tokens.weight", folder / "model.safetensors"
        if not file.exists():
            shape = config.vocab_size, config.hidden_size
            save_file({name: torch.empty(shape, dtype=self.dtype).normal_(0, .02)}, file)
        self.files, self.tensors, self.unread = {name: file}, {}, set()

    def read(self, name: str, into: Tensor) -> Tensor:
        return into.normal_(0, .02)


def config_of(shape: tuple, room: int = ROOM) -> tuple[LlamaConfig, float]:
    "A config, and which part of its layers and vocabulary that is."
    hidden, inner, heads, kv_heads, layers, vocabulary, tied = shape
    def made(part: float) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads,
            num_hidden_layers=max(2, round(part * layers)), vocab_size=max(64, round(part * vocabulary) // 64 * 64),
            tie_word_embeddings=tied)
    whole = made(1.0)
    part = min(1.0, room / (layers * layer_numbers(whole) + vocabulary * hidden))
    return made(part), part


def measured(name: str, repeats: int) -> dict:
    "One shape: medians of a step in each layout, and of their ratio, each step beside its neighbour."
    config, part = config_of(SHAPES[name])
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = (Llama(config, RandomWeights(config, pack, Path(folder))) for pack in (False, True))
        seconds = forward_seconds([(plain, 1), (packed, 1)], HELD, repeats)
    plain_ms, packed_ms = 1000 * np.median(seconds, axis=0)
    ratio = np.median(seconds[:, 1] / seconds[:, 0])
    return {
        "shape": name, "layer": layer_numbers(config), "part": round(part, 3), "plain_ms": round(float(plain_ms), 3),
        "packed_ms": round(float(packed_ms), 3), "packed_to_plain": round(float(ratio), 3),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("specdec/data/layouts.json"))
    parser.add_argument("--only", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=60)
    asked = parser.parse_args()
    if not has_layouts(torch.device("cpu"), torch.bfloat16):
        parser.error("this processor multiplies no bfloat16, so there is no layout to choose")
    torch.manual_seed(0)
    found = []
    for name in asked.only:
        found.append(measured(name, asked.repeats))
        print(found[-1], flush=True)
    table = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    table["made_by"] = "python tools/layouts.py"
    table.setdefault("kinds", {})[processor_kind()] = {
        "processor": processor_name(), "system": platform.machine(), "torch": torch.__version__,
        "threads": torch.get_num_threads(), "load": round(os.getloadavg()[0], 1),
        "bfloat16": sorted(found, key=lambda entry: entry["layer"]),
    }
    asked.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__": main()
