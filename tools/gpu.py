"""Measure the loop on the device: plain and speculative decoding, beside transformers and what the memory allows.

    python tools/gpu.py --out gpu.json                # on a CUDA GPU, under 8 minutes
    python tools/gpu.py --device cpu --tiny           # the script itself, anywhere, in seconds

Each finished part is written at once; a second run goes on with those that are missing or failed. A part that fails
says why, and the others run on."""
import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.device.graphs import count_synchronisations
from specdec.device.loop import DeviceDecoder, compile_layers
from specdec.device.ops import as_llama
from specdec.drafters.base import Drafter, NoDrafter, TemperatureScaledDrafter
from specdec.drafters.choose import HybridDrafter
from specdec.drafters.head import Head, HeadDrafter, head_config, load_head
from specdec.drafters.load import shipped
from specdec.drafters.lookup import NGramDrafter, SuffixDrafter
from specdec.drafters.model import ModelDrafter
from specdec.errors import ModelError
from specdec.models.hub import encode, find_model, load_tokenizer, load_transformers
from specdec.profiling import floor_seconds, memory_bandwidth
from specdec.sampling import SamplingParams

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages


SHAPES = {  # the default model's, and that of Llama 3.2 1B, from their published configs
    "default": dict(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=100000.0),
    ),
    "llama-1b": dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters=dict(
            rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
}
TINY = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3,
)
QUESTION = "Write a Python class Stack with the methods push, pop and peek, and show how to use it."


class Skipped(Exception):
    "A part that has no meaning here; the message says why."


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument(
        "--model", default="smollm2",
        help="the default model: its name, a folder, or a GGUF file; random weights of its shape if it can't be had",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="tiny random models and few tokens: to test the script")
    parser.add_argument("--only", default="", help="besides the bandwidth, only parts whose name contains this")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each text")
    parser.add_argument("--repeats", type=int, default=5, help="timed texts for each method; the methods take turns")
    parser.add_argument("--seconds", type=float, default=450, help="no part is started after so many")
    return parser.parse_args()


def environment(device: torch.device) -> dict:
    on_gpu = device.type == "cuda"
    return dict(
        device=device.type,
        name=torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        torch=torch.__version__, cuda=torch.version.cuda, transformers=transformers.__version__,
        python=platform.python_version(), time=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    )


def spread(values: list[float]) -> dict:
    "Median, extremes and all values."
    return dict(median=statistics.median(values), low=min(values), high=max(values), values=values)


class Subject:
    "One model in both implementations, its prompt, and what is measured on it."
    def __init__(self, name: str, options: argparse.Namespace, bandwidth: Callable[[], float]):
        self.options, self.device, self.bandwidth = options, torch.device(options.device), bandwidth
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.weights, self.tokens = "random", 24 if options.tiny else options.tokens
        self.reference = None
        if name == "default" and not options.tiny:
            try:
                folder = find_model(options.model)
                self.reference = load_transformers(folder, self.device, self.dtype)
                self.weights = "local file" if Path(options.model).exists() else options.model
                self.prompt = encode(load_tokenizer(folder), [{"role": "user", "content": QUESTION}])
            except (ModelError, OSError, ValueError, ImportError) as error:
                self.weights = f"random, since the model can't be had: {error}"
        if self.reference is None:
            torch.manual_seed(0)
            config = LlamaConfig(**(TINY if options.tiny else SHAPES[name]))
            with self.device: self.reference = LlamaForCausalLM(config).to(self.dtype)
            self.prompt = torch.randint(config.vocab_size, (32,), generator=torch.Generator().manual_seed(0)).tolist()
        self.reference.eval().requires_grad_(False)
        self.reference.generation_config.eos_token_id = None  # every text has all its tokens
        self.ours = as_llama(self.reference)
        self.nbytes = sum(w.nbytes for w in self.reference.parameters())
        self.skipping = self.ours.skip(range(1, len(self.ours.layers), 3))  # a draft that shares its weights
        if name == "default" and not options.tiny: self.head = load_head(shipped("smollm2-head"), self.ours)
        else:  # random: for its time and its waits
            torch.manual_seed(0)
            tokens = torch.arange(min(8192, self.ours.vocab_size // 2))
            self.head = Head(head_config(self.ours, len(tokens)), tokens).to(self.device, self.dtype)

    def drafters(self) -> dict[str, tuple[Drafter, int]]:
        "One of each kind, with its K."
        model = ModelDrafter(self.skipping, self.ours.vocab_size)
        def head() -> Drafter: return TemperatureScaledDrafter(HeadDrafter(self.head, self.ours))
        return {"plain": (NoDrafter(), 1), "n-gram": (NGramDrafter(), 8), "suffix": (SuffixDrafter(), 8),
                "model": (model, 4), "head": (head(), 5), "hybrid": (HybridDrafter(SuffixDrafter(), head()), 5)}

    def synchronize(self) -> None:
        if self.device.type == "cuda": torch.cuda.synchronize()

    def decode(self, decoder: DeviceDecoder, sampling: SamplingParams, K: int) -> dict:
        "One text: seconds in all and after the first token, tokens, rounds."
        self.synchronize()
        start, first, rounds = time.perf_counter(), None, []
        for r in decoder.speculate(self.prompt, sampling, 0, K, self.tokens):
            rounds.append(r)
            first = first or time.perf_counter()
        end, count = time.perf_counter(), sum(len(r.emitted) for r in rounds)
        return dict(total=end - start, step=(end - first) / max(1, count - 1), tokens=count, rounds=len(rounds) - 1)

    def generate(self, **settings) -> dict:
        "One text by transformers' `generate`, greedy."
        ids = torch.tensor([self.prompt], device=self.device)
        self.synchronize()
        start = time.perf_counter()
        out = self.reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=self.tokens, pad_token_id=0,
            **settings,
        )
        self.synchronize()
        seconds, count = time.perf_counter() - start, out.shape[1] - ids.shape[1]
        return dict(total=seconds, step=seconds / count, tokens=count, rounds=count)

    def compare(self, methods: dict[str, Callable[[], dict]]) -> dict:
        "Warm each up (recording and compiling happen there), then let them take turns."
        failed, runs, warm = {}, {name: [] for name in methods}, {}
        for repeat in range(-1, 2 if self.options.tiny else self.options.repeats):
            for name, method in methods.items():
                if name in failed: continue
                start = time.perf_counter()
                try: run = method()
                except Exception as error: failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
                else: runs[name].append(run) if repeat >= 0 else warm.update({name: time.perf_counter() - start})
        def figures(name: str) -> dict:
            found = runs[name]
            return dict(
                tokens_per_second=spread([run["tokens"] / run["total"] for run in found]),
                step_ms=spread([1000 * run["step"] for run in found]),
                tokens_per_round=(found[0]["tokens"] - 1) / max(1, found[0]["rounds"]), first_time_s=warm[name])
        result = {name: figures(name) for name in methods if runs[name] and name not in failed}
        return result | {name: dict(failed=why) for name, why in failed.items()}

    def plain(self) -> dict:
        "Plain greedy decoding: ours in several stages, and transformers."
        greedy, methods = SamplingParams(), {}
        stages = [("ours, recorded", self.ours, {}), ("ours, step by step", self.ours, dict(graphs=False, ahead=0)),
                  ("ours, recorded, no round ahead", self.ours, dict(ahead=0))]
        if self.device.type == "cuda":  # compiles for a minute on a CPU, and nobody uses it there
            stages.append(("ours, fused and recorded", compile_layers(self.ours), {}))
        for name, target, settings in stages:
            decoder = DeviceDecoder(target, NoDrafter(), **settings)
            methods[name] = lambda decoder=decoder: self.decode(decoder, greedy, 1)
        methods["transformers, eager"] = self.generate
        if self.device.type == "cuda":
            methods["transformers, compiled, static cache"] = lambda: self.generate(cache_implementation="static")
        result, bandwidth = self.compare(methods), self.bandwidth()
        floor = 1000 * floor_seconds(self.nbytes, bandwidth) if bandwidth else None  # ms
        for found in result.values():
            if floor and "step_ms" in found: found["share_of_floor"] = floor / found["step_ms"]["median"]
        timed = {name: found for name, found in result.items() if "tokens_per_second" in found}
        speeds = {name: found["tokens_per_second"]["median"] for name, found in timed.items()}
        best = max((name for name in speeds if name.startswith("ours")), key=speeds.get, default=None)
        theirs = [name for name in speeds if best and name.startswith("transformers")]
        ratios = {f"plain over {name}": speeds[best] / speeds[name] for name in theirs}
        return dict(
            methods=result, floor_ms=floor, weights_bytes=self.nbytes, weights=self.weights, best=best,
            best_share_of_floor=result.get(best, {}).get("share_of_floor"), ratios=ratios,
        )

    def speculative(self) -> dict:
        "Speculative decoding against plain, greedy and at temperature 1."
        methods: dict[str, Callable[[], dict]] = {}
        for temperature in (0.0, 1.0):
            for name, (drafter, K) in self.drafters().items():
                decoder = DeviceDecoder(self.ours, drafter)
                def method(decoder=decoder, sampling=SamplingParams(temperature), K=K):
                    return self.decode(decoder, sampling, K)
                methods[f"{name}, temperature {temperature:g}"] = method
        return dict(methods=self.compare(methods), weights=self.weights)

    def waits(self) -> dict:
        "How often the host waits in a round, by the profiler."
        found, n = {}, 4 if self.options.tiny else 20
        for name, (drafter, _) in self.drafters().items():
            rounds = DeviceDecoder(self.ours, drafter).speculate(self.prompt, SamplingParams(1.0), 0, 4, 8 * n)
            next(rounds)
            next(rounds)
            waits, seen = count_synchronisations(rounds, n)
            found[name] = dict(waits=dict(waits), rounds=seen, per_round=waits.total() / max(1, seen))
        return found

    def trace(self) -> list:
        "What the host and the device did in three rounds of model drafts: [name, where, start in µs, duration in µs]."
        from torch.profiler import ProfilerActivity, profile
        if self.device.type != "cuda": raise Skipped("needs a GPU: on a CPU there is one queue only")
        decoder = DeviceDecoder(self.ours, ModelDrafter(self.skipping, self.ours.vocab_size))
        rounds = decoder.speculate(self.prompt, SamplingParams(1.0), 0, 4, self.tokens)
        for _ in range(6): next(rounds)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(3): next(rounds)
        events = [e for e in profiler.events() if e.name.startswith("cuda") or "CUDA" in str(e.device_type)]
        first = min(e.time_range.start for e in events)
        def line(e) -> list:
            device, start = str(e.device_type).split(".")[-1], e.time_range.start - first
            return [e.name[:60], device, round(start, 1), round(e.time_range.elapsed_us(), 1)]
        return [line(e) for e in events][:3000]


def cuda_tests(options: argparse.Namespace) -> dict:
    "The tests marked cuda."
    if options.tiny or options.device == "cpu": raise Skipped("needs a GPU; here all of them are skipped")
    tests = Path(__file__).parents[1] / "tests" / "test_device_loop.py"
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(pytest, capture_output=True, text=True, timeout=240)
    lines = done.stdout.strip().splitlines()
    if done.returncode: raise RuntimeError("\n".join(lines[-40:]) + done.stderr[-2000:])
    return dict(summary=lines[-1])


def run(name: str, part: Callable[[], object], record: dict, options: argparse.Namespace, start: float) -> None:
    "One part, unless it is there already; its result or its failure is written at once."
    if options.only not in name and name != "bandwidth": return
    if name in record["parts"] and "failed" not in record["parts"][name]: return print(f"part {name}: already there")
    before = time.perf_counter()
    try:
        if before - start > options.seconds: raise TimeoutError(f"not started: {options.seconds:g} s were over")
        found = dict(result=part())
        outcome = "done"
    except Skipped as why:
        found = dict(skipped=str(why))
        outcome = f"skipped, {why}"
    except Exception as error:
        found = dict(failed=f"{type(error).__name__}: {str(error)[-3000:]}")
        outcome = f"failed, {found['failed'].splitlines()[-1]}"
    found["seconds"] = time.perf_counter() - before
    record["parts"][name] = found
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"part {name}: {outcome} ({found['seconds']:.1f} s)", flush=True)


def main() -> None:
    options, start = arguments(), time.perf_counter()
    device = torch.device(options.device)
    record = dict(environment=environment(device), parts={})
    if options.out.exists(): record = json.loads(options.out.read_text())
    subjects = {}
    def subject(name: str) -> Subject:
        if name not in subjects:
            subjects.clear()  # one model at a time
            gc.collect()
            subjects[name] = Subject(name, options, lambda: record["parts"]["bandwidth"].get("result"))
        return subjects[name]
    small = dict(size=2 ** 22, repeats=2) if options.tiny else {}
    run("bandwidth", lambda: memory_bandwidth(device, **small), record, options, start)
    for name in ("llama-1b", "default"):
        for part in ("plain", "waits", "speculative", "trace"):
            run(f"{name}, {part}", lambda name=name, part=part: getattr(subject(name), part)(), record, options, start)
    run("cuda tests", lambda: cuda_tests(options), record, options, start)
    for name in ("llama-1b", "default"):
        found = record["parts"].get(f"{name}, plain", {}).get("result")
        if not found: continue
        share = found["best_share_of_floor"] or float("nan")
        ratios = ", ".join(f"{ratio:.2f}× {what}" for what, ratio in found["ratios"].items())
        print(f"{name}: {found['best']}, {share:.0%} of the floor, {ratios}")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__": main()
