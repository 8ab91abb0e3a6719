"""What the package computes today, kept, so that a redesign can show that it computes the same.

    python tools/baseline.py record tests/data/baseline.json.xz
    python tools/baseline.py compare tests/data/baseline.json.xz [--only 'tiny/float32/*'] [--strict]

Some 400 configurations go through `specdec.load`, `Pair` and `Pair.generate`: every drafter, several K, temperatures,
dtypes, both loops, lists, trees, grammars, log-probabilities, on tiny models whose weights are made here and on the
default model. Kept of each: the generated ids, of every round how many tokens were drafted, accepted and emitted, the
finish reason and the keys of the result's JSON; of each target and prompt the bits of its logits.

`compare` prints every difference. It fails on those that no step of a redesign may make: other bits of logits, another
greedy text in float32, a configuration that raises. Of sampled texts, rounds, texts in other dtypes and JSON keys it
tells, and fails only with `--strict`. Bits depend on the processor, so they are compared only on the kind of processor
on which they were recorded; elsewhere, record the commit before and compare with that.

What it needs of the package stands in the functions above `CASES`: a redesign that moves a name changes it there."""
import argparse
import fnmatch
import json
import lzma
import os
import platform
import re
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from itertools import product
from pathlib import Path

import numpy as np
import torch

os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}

VERSION = 1
NEAR = 1e-3  # two logits this close may change places on another processor


# The models

def numbers(seed: int, name: str, shape) -> np.ndarray:
    "Even numbers in (-1, 1), the same on every machine; each tensor has its own by its name."
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return (rng.integers(-2**12, 2**12, shape) / 2**12).astype(np.float32)


def fill(module: torch.nn.Module, seed: int, scale: float, noise: float = 0.0) -> None:
    "Give a module made-up weights, norms too; with noise, those of a relative of the one without."
    with torch.no_grad():
        for name, w in module.named_parameters():
            made = numbers(seed, name, w.shape) + noise * numbers(seed + 1, name, w.shape)
            w.copy_(torch.from_numpy(1 + .25 * made if "norm" in name else scale * made))


MERGES = {
    "usual": "Ġ t,h e,i n,Ġ a,Ġt he,e r,o n,Ġ s,a t,r e,Ġ c,n d,Ġs at,Ġc at,i s,o r,e s,Ġ m,Ġm at,e n,i t,Ġa nd,Ġ o,"
             "Ġo n,in g,l l,o u,Ġ w,e d,Ġ b,a n,a r",
    "other": "t h,th e,Ġ the,c a,Ġ ca,a n,an d,o n,Ġ on,s a,m a,Ġ ma,Ġ sa,i n,e r,e n",
}
ENDS = ["<end>"] + [f"<spare {i}>" for i in range(31)]


def save_tokenizer(folder: Path, merges: str) -> int: # how many tokens it has
    "A byte-level tokenizer with a few merges."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    pairs = [tuple(pair.split()) for pair in MERGES[merges].split(",")]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in pairs)]
    if merges == "other": tokens.reverse()
    raw = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=ENDS[0])
    wrapped.add_special_tokens({"additional_special_tokens": ENDS[1:]})
    wrapped.save_pretrained(folder)
    return len(wrapped)


SCALE = .16


def before(vocab: int, steps: int = 1, length: int = 6) -> torch.Tensor:
    "What stands before each token, usually: another of the same six."
    at = torch.arange(vocab)
    return (at - at % length + (at % length - steps) % length).clamp(max=vocab - 1)


TINY = {  # name → seed of the weights, noise, layers, tokenizer
    "target": (3, 0.0, 4, "usual"), "relative": (3, 0.3, 4, "usual"), "stranger": (9, 0.0, 2, "other"),
}


@lru_cache
def tiny(name: str, dtype: str):
    "A made-up Llama, saved and loaded as any model is."
    from transformers import LlamaConfig, LlamaForCausalLM
    seed, noise, layers, merges = TINY[name]
    with tempfile.TemporaryDirectory() as folder:
        vocab = save_tokenizer(Path(folder), merges)
        config = LlamaConfig(
            vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None,
            eos_token_id=vocab - len(ENDS),
        )
        model = LlamaForCausalLM(config)
        fill(model, seed, SCALE, noise)
        with torch.no_grad():  # most tokens have a usual follower, so that texts repeat themselves, as real ones do
            words = torch.from_numpy(numbers(seed, "words", (vocab, 64)))
            model.model.embed_tokens.weight.copy_(words)
            model.lm_head.weight.copy_(model.lm_head.weight + .4 * words[before(vocab)])
        model.save_pretrained(folder)
        return load(folder, dtype)


# What the package is asked for

def load(name: str, dtype: str):
    "A model by its name or folder."
    import specdec
    return specdec.load(str(name), device="cpu", dtype=dtype)


def logits(model, ids: list[int], rows: int) -> np.ndarray: # [rows, V]
    "The last rows of the target's logits after these tokens."
    with torch.inference_mode():
        return model.forward(torch.tensor([ids]), model.new_cache(len(ids)), last=rows)[0].float().numpy()


def random_head(target):
    "A head with made-up weights for a tiny target."
    from specdec.drafters.head import init_from_target
    tokens = torch.arange(0, target.vocab_size, 2)
    head = init_from_target(target, tokens, dtype=torch.float32, num_layers=1)
    fill(head.layers, 5, SCALE)
    with torch.no_grad():  # a feature is of the token before the last one
        head.lm_head.weight.copy_(.4 * torch.from_numpy(numbers(3, "words", (target.vocab_size, 64)))[
            before(target.vocab_size, 2)[tokens]])
    return head.to(target.dtype)


def shipped_head(target):
    "The drafter that comes with the package for the default model, without lookup."
    from importlib import resources

    from specdec.drafters.load import load_drafter
    return load_drafter(Path(str(resources.files("specdec") / "data" / "smollm2-head")), target)


SHAPE = [(0,), (1,), (0, 0), (2,), (0, 1), (0, 0, 0)]


def drafter(name: str, target, model: str, dtype: str):
    "What drafts for a target, by the name that it has here; a model or None for what `Pair` makes of these."
    from specdec import AdaptiveDrafter, AdaptiveLookahead, HeadDrafter, HybridDrafter, NGramDrafter, SuffixDrafter
    from specdec.drafters.base import NoDrafter
    from specdec.drafters.colder import TemperatureScaledDrafter
    from specdec.drafters.model import ModelDrafter
    from specdec.drafters.tree import TreeDrafter
    from specdec.drafters.tree_hybrid import TreeHybrid
    is_tiny = model == "tiny"
    def small(): return tiny("relative", dtype)
    def head(): return random_head(target)
    def chains(): return HeadDrafter(head(), target) if is_tiny else shipped_head(target)
    def tree(**options): return TreeDrafter(head() if is_tiny else chains().drafter.head, target, **options)
    return {
        "usual": lambda: None, "nothing": NoDrafter, "ngram": NGramDrafter, "suffix": SuffixDrafter, "small": small,
        "itself": lambda: target, "skip": lambda: target.skip([1] if is_tiny else [3, 7, 11, 15, 19, 23]),
        "head": chains, "cold": lambda: TemperatureScaledDrafter(chains(), .7),
        "hybrid": lambda: HybridDrafter(SuffixDrafter(), chains()),
        "controlled": lambda: AdaptiveDrafter(
            ModelDrafter(small(), target.vocab_size), AdaptiveLookahead(initial=3, min=1, max=6, cooldown_steps=1)),
        "translated": lambda: tiny("stranger", dtype), "tree": lambda: tree(shape=SHAPE),
        "growing tree": lambda: tree(width=3, depth=3),
        "tree beside lookup": lambda: TreeHybrid(
            SuffixDrafter(), tree(shape=SHAPE), c=(0.0, 0.05), verify=[1 + .02 * i for i in range(16)]),
    }[name]()


def grammar(name: str):
    "What a text must fit."
    from specdec.engine.constraints import JSONSchema, Regex
    if name == "regex": return Regex("(the (cat|mat) (and|on) )+the end\\.")
    return JSONSchema({
        "type": "object", "additionalProperties": False, "required": ["kind", "n"],
        "properties": {"kind": {"enum": ["cat", "dog"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    })


def rule(name: str) -> Callable:
    "A verify rule by its name."
    from specdec.verify import speculative_sampling
    return {"ratio": speculative_sampling}[name]


@lru_cache(maxsize=40)
def pair(model: str, dtype: str, draft: str):
    "A target and what drafts for it. One object serves all cases: what one leaves behind, another would show."
    from specdec import Pair
    target = target_of(model, dtype)
    return Pair(target, drafter(draft, target, model, dtype))


@lru_cache(maxsize=2)
def target_of(model: str, dtype: str): return tiny("target", dtype) if model == "tiny" else load(model, dtype)


# The cases

SAMPLINGS = {
    "T0": dict(temperature=0.0), "T.7": dict(temperature=.7, top_k=20), "T1": dict(temperature=1.0),
    "T1.3": dict(temperature=1.3, top_p=.9),
}
PROMPTS = {
    "cat": "the cat sat on the mat and the cat sat on", "letters": "abcabcabcabcab", "one": "w",
    "list": ["the cat sat on the mat and the", "on and on and on and", "b", "in the sea, in the sea, in"],
    "loop": [{"role": "user", "content": "Write a Python loop that prints the numbers from 1 to 10."}],
    "copy": "Say again: one two three four five six. one two three four",
    "chat": [{"role": "user", "content": "What is the capital of France?"}],
    "three": ["The sea is", "one two three one two three one two", "def add(a, b):"],
}


@dataclass(frozen=True)
class Case:
    "One call of `Pair.generate`."
    model: str
    dtype: str
    drafter: str
    prompt: str
    settings: dict = field(default_factory=dict, compare=False)
    label: str = ""

    @property
    def name(self) -> str: return "/".join([self.model, self.dtype, self.drafter, self.prompt, self.label])

    @property
    def is_greedy(self) -> bool: return self.settings["temperature"] == 0

    def arguments(self) -> dict:
        "Those of `generate`."
        made = dict(seed=11, **self.settings)
        if "grammar" in made: made["grammar"] = grammar(made["grammar"])
        if "verify" in made: made["verify"] = rule(made["verify"])
        return made

    def run(self) -> list[dict]: # one a text
        "What became of it."
        found = pair(self.model, self.dtype, self.drafter).generate(PROMPTS[self.prompt], **self.arguments())
        return [described(result) for result in (found if isinstance(found, list) else [found])]


def described(result) -> dict:
    "What is kept of a result."
    data = json.loads(result.to_json())
    made = {
        "prompt": data["prompt_ids"], "ids": data["generated_ids"], "finish": data["finish_reason"],
        "rounds": [[len(r["drafted"]), r["accepted"], len(r["emitted"])] for r in data["rounds"]],
        "keys": sorted([*data, *(f"settings.{key}" for key in data["settings"]),
                        *(f"rounds.{key}" for key in data["rounds"][:1] and data["rounds"][0])]),
    }
    if data.get("logprobs") is not None:
        made["logprobs"] = [sorted([int(i), round(x, 4)] for i, x in of.items()) for of in data["logprobs"]]
    return made


def cases() -> Iterator[Case]:
    "Every configuration."
    def made(dtype, draft, prompt, sampling, label="", model="tiny", tokens=32, **settings):
        label = " ".join(filter(None, [sampling, label]))
        return Case(model, dtype, draft, prompt, dict(**SAMPLINGS[sampling], max_new_tokens=tokens, **settings), label)
    trees = ("tree", "growing tree", "tree beside lookup")
    chains = ("usual", "ngram", "suffix", "small", "itself", "skip", "head", "cold", "hybrid", "translated")
    for draft, K, sampling in product((*chains, *trees), (1, 4, 8, "adaptive"), SAMPLINGS):
        if K == "adaptive" and draft in trees: continue
        yield made("float32", draft, "cat", sampling, f"K={K}", K=K)
    for draft, sampling in product(("nothing", "controlled"), SAMPLINGS):
        yield made("float32", draft, "cat", sampling, "K=8", K=8)
    for draft, prompt in product((*chains, *trees), ("letters", "one")):
        yield made("float32", draft, prompt, "T0", "K=5", K=5)
    for sampling in SAMPLINGS:
        yield made("float32", "nothing", "cat", sampling, "plain", method="plain")
        yield made("float32", "small", "cat", sampling, "ratio", K=4, verify="ratio")
    for dtype, draft, sampling in product(("bfloat16", "int4"), (*chains, *trees), ("T0", "T1")):
        if dtype == "int4" and draft in ("small", "translated", "cold", "tree beside lookup"): continue
        yield made(dtype, draft, "cat", sampling, "K=4", K=4)
    device = ("nothing", "ngram", "suffix", "small", "itself", "head", "cold", "hybrid", "tree", "growing tree")
    for draft, K, sampling in product(device, (1, 4), SAMPLINGS):
        yield made("float32", draft, "cat", sampling, f"K={K} device", K=K, loop="device")
    for draft, size, sampling in product(("usual", "small", "hybrid", "nothing"), (1, 3, 16), ("T0", "T1")):
        yield made("float32", draft, "list", sampling, f"K=4 B={size}", K=4, batch_size=size)
    yield made("float32", "small", "list", "T1", "plain B=3", method="plain", batch_size=3)
    yield made("float32", "small", "list", "T0", "adaptive B=3", K="adaptive", batch_size=3)
    yield made("float32", "tree", "list", "T0", "K=4 B=3", K=4, batch_size=3)
    yield made("bfloat16", "suffix", "list", "T0", "K=4 B=3", K=4, batch_size=3)
    for draft, fits, sampling in product(("usual", "small", "hybrid", "nothing"), ("regex", "schema"), ("T0", "T1")):
        yield made("float32", draft, "cat", sampling, f"K=4 {fits}", K=4, grammar=fits, tokens=60)
    for draft, sampling in product(("usual", "small", "head"), ("T0", "T1")):
        yield made("float32", draft, "cat", sampling, "K=4 logprobs", K=4, logprobs=2)
    yield made("float32", "small", "cat", "T1", "context", K=8, tokens=1000)
    yield made("float32", "small", "cat", "T1", "no end", K=8, tokens=64, ignore_eos=True)
    yield made("float32", "small", "cat", "T1", "stop", K=4, stop=["a", "e"])

    def real(dtype, draft, prompt, sampling, label="K=5", **settings):
        return made(dtype, draft, prompt, sampling, label, "smollm2", 24, **{"K": 5, **settings})
    for draft in ("usual", "ngram", "suffix", "skip", "head", "tree"):
        yield real("float32", draft, "loop", "T0")
    for draft, sampling in product(("usual", "head"), ("T.7", "T1")): yield real("float32", draft, "loop", sampling)
    for draft in ("usual", "growing tree"): yield real("float32", draft, "copy", "T0")
    yield real("float32", "usual", "chat", "T0")
    yield real("float32", "usual", "chat", "T1", "K=adaptive", K="adaptive")
    yield real("float32", "nothing", "loop", "T1", "plain", method="plain")
    yield real("float32", "usual", "loop", "T0", "schema", grammar="schema")
    yield real("float32", "hybrid", "loop", "T0", "K=4 device", K=4, loop="device")
    for sampling in ("T0", "T1"): yield real("float32", "usual", "three", sampling, "K=5 B=3", batch_size=3)
    for dtype in ("bfloat16", "int4"):
        yield real(dtype, "usual", "loop", "T0")
        yield real(dtype, "usual", "loop", "T1")


CASES = list(cases())


# Recording and comparing

def bits(numbers: np.ndarray) -> str:
    "The same for the same bits of float32 only."
    return sha256(np.ascontiguousarray(numbers, dtype="<f4").tobytes()).hexdigest()[:16]


def processor() -> dict:
    "What the bits of a sum of float32 depend on."
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        known = dict(re.findall(r"^(vendor_id|cpu family|model|model name)\s*:\s*(.+)$", lines, re.MULTILINE))
    except OSError: known = {"model name": platform.processor()}
    return {**known, "machine": platform.machine(), "instructions": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__.split("+")[0]}


def look_at(case: Case, read: list[int], ids: list[int]) -> dict:
    "The bits of a target's logits after the prompt, and those of every row of prompt and greedy answer read at once."
    target = target_of(case.model, case.dtype)
    rows = logits(target, [*read, *ids], len(read) + len(ids))
    best = np.sort(rows[len(read) - 1:-1])[:, -2:]
    lead = float((best[:, 1] - best[:, 0]).min())
    return {"prompt": bits(logits(target, read, 1)[-1]), "all": bits(rows), "lead": lead}


def run(chosen: list[Case], progress: Callable[[str], None] = lambda line: None) -> dict:
    "Run cases; the record."
    torch.set_num_threads(1)
    found: dict = {"version": VERSION, "processor": processor(), "logits": {}, "cases": {}, "keys": []}
    for case in chosen:
        start = time.perf_counter()
        try: texts = case.run()
        except Exception as error:  # a case that raises is a difference like any other
            found["cases"][case.name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            progress(f"{case.name}: {error}")
            continue
        prompt = texts[0]["prompt"]
        for text in texts:
            text["prompt"] = len(text["prompt"])
            keys = text.pop("keys")
            if keys not in found["keys"]: found["keys"].append(keys)
            text["keys"] = found["keys"].index(keys)
        found["cases"][case.name] = {"texts": texts}
        where = f"{case.model}/{case.dtype}/{case.prompt}"
        is_plain_greedy = case.is_greedy and "grammar" not in case.settings and case.settings.get("loop") is None
        if is_plain_greedy and len(texts) == 1 and where not in found["logits"]:
            found["logits"][where] = look_at(case, prompt, texts[0]["ids"])
        progress(f"{case.name}: {time.perf_counter() - start:.2f} s")
    return found


HARD = {"logits", "greedy text in float32", "finish reason of a greedy text in float32", "error", "missing",
        "log-probabilities"}


def compare(old: dict, new: dict, chosen: list[Case]) -> list[tuple[str, str, str]]: # kind, where, what
    "Every difference between two records, for these cases."
    same = old["processor"] == new["processor"]
    found = []
    for where in (new["logits"] if same else ()):
        a, b = old["logits"].get(where), new["logits"][where]
        for which in ("prompt", "all") if a else ():
            # rows behind the prompt are those of the answer: another answer has others
            if a[which] != b[which]: found.append(("logits", where, f"{which}: {a[which]} → {b[which]}"))
    for case in chosen:
        a, b = (record["cases"].get(case.name) for record in (old, new))
        if a is None or b is None:
            found.append(("missing", case.name, "not in the record" if a is None else "not run"))
        elif "error" in a or "error" in b:
            if a != b: found.append(("error", case.name, f"{a.get('error', 'a text')} → {b.get('error', 'a text')}"))
        else:
            lead = old["logits"].get(f"{case.model}/{case.dtype}/{case.prompt}", {}).get("lead", 0.0)
            sure = same or lead > NEAR
            for i, (x, y) in enumerate(zip(a["texts"], b["texts"], strict=True)):
                where = f"{case.name}[{i}]" if len(a["texts"]) > 1 else case.name
                found += [(kind, where, what) for kind, what in
                          differences(case, {**x, "keys": old["keys"][x["keys"]]},
                                      {**y, "keys": new["keys"][y["keys"]]}, sure, same)]
    return found


def differences(case: Case, x: dict, y: dict, sure: bool, same: bool) -> Iterator[tuple[str, str]]:
    "Of one text. sure: no other processor can have turned a greedy text."
    exact = case.is_greedy and case.dtype == "float32" and sure
    kind = ("greedy text in float32" if exact else f"greedy text in {case.dtype}, not sure"
            if case.is_greedy else "sampled text")
    if x["ids"] != y["ids"]:
        at = next((i for i, (a, b) in enumerate(zip(x["ids"], y["ids"])) if a != b), min(len(x["ids"]), len(y["ids"])))
        yield kind, f"from token {at} on: {x['ids'][at:at + 6]} → {y['ids'][at:at + 6]}"
    elif x["finish"] != y["finish"]:
        yield ("finish reason of a greedy text in float32" if exact else "finish reason",
               f"{x['finish']} → {y['finish']}")
    if x["rounds"] != y["rounds"]: yield "rounds", f"{shape(x['rounds'])} → {shape(y['rounds'])}"
    if x["keys"] != y["keys"]:
        yield "JSON keys", f"gone {sorted({*x['keys']} - {*y['keys']})}, new {sorted({*y['keys']} - {*x['keys']})}"
    if x["ids"] == y["ids"] and x.get("logprobs") != y.get("logprobs"):
        yield "log-probabilities" if same and case.dtype == "float32" else "log-probabilities, not sure", "others"


def shape(rounds: list) -> str: # "8 rounds, 32 drafted, 20 accepted"
    drafted, accepted = (sum(r[i] for r in rounds) for i in (0, 1))
    return f"{len(rounds)} rounds, {drafted} drafted, {accepted} accepted"


def write(path: Path, record: dict) -> None:
    text = json.dumps(record, separators=(",", ":"), sort_keys=True)
    path.write_bytes(lzma.compress(text.encode(), preset=9))


def read(path: Path) -> dict:
    record = json.loads(lzma.decompress(path.read_bytes()))
    if record["version"] != VERSION: sys.exit(f"{path} is of version {record['version']}, expected {VERSION}.")
    return record


def tell(found: list[tuple[str, str, str]], old: dict, new: dict, strict: bool) -> int: # the exit status
    "Print the differences; 1 if there is one that must not be."
    if old["processor"] != new["processor"]:
        print(f"Bits of logits are not compared: recorded on {old['processor']}, here {new['processor']}.")
    for kind, where, what in found: print(f"{'FAIL' if kind in HARD else 'note'}  {kind}  {where}  {what}")
    for kind, n in sorted(Counter(kind for kind, *_ in found).items()):
        print(f"{n:4} × {kind}{' (must not be)' if kind in HARD else ''}")
    hard = [kind for kind, *_ in found if strict or kind in HARD]
    texts = sum(len(case.get("texts", ())) for case in new["cases"].values())
    print(f"{len(new['cases'])} configurations, {texts} texts: " + (
        f"{len(hard)} differences that must not be." if hard else "nothing that must stay has changed."))
    return bool(hard)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="*", help="a pattern of names of configurations")
    parser.add_argument("--strict", action="store_true", help="every difference is a failure")
    parser.add_argument("--verbose", action="store_true", help="each configuration with its time")
    asked = parser.parse_args(arguments)
    chosen = [case for case in CASES if fnmatch.fnmatch(case.name, asked.only)]
    old = read(asked.file) if asked.do == "compare" else None
    new = run(chosen, (lambda line: print(line, file=sys.stderr)) if asked.verbose else lambda line: None)
    if old is not None: return tell(compare(old, new, chosen), old, new, asked.strict)
    broken = {name: case["error"] for name, case in new["cases"].items() if "error" in case}
    for name, error in broken.items(): print(f"{name}: {error}")
    write(asked.file, new)
    print(f"{len(new['cases'])} configurations, {len(broken)} with an error, {asked.file.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__": sys.exit(main())
