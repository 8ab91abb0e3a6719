"""The parts of `gpu.py`: what is measured, one function each. Run by it, in a process that it watches."""
import argparse
import gc
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))
from gpu import read, write

# torch hands the path on to processes of its own, which would take `site.py` here for Python's
sys.path[:] = [path for path in sys.path if path != str(HERE)]

import numpy as np
import torch
import transformers
from scipy.stats import chi2
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.app.answers import first_difference
from specdec.device.graphs import captured, count_synchronisations
from specdec.device.loop import DeviceDecoder, DeviceLoop
from specdec.device.ops import as_llama
from specdec.drafters.base import Drafter, NoDrafter
from specdec.drafters.block import Block, BlockDrafter, block_config
from specdec.drafters.choose import HybridDrafter
from specdec.drafters.colder import TemperatureScaledDrafter
from specdec.drafters.head import Head, head_config, load_head
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.load import shipped
from specdec.drafters.lookup import NGramDrafter, SuffixDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.tree import TreeDrafter
from specdec.engine.profiling import PhaseTimer, floor_seconds, matrix_rate, memory_bandwidth, synchronized_time
from specdec.errors import ModelError
from specdec.loop import speculate
from specdec.models.batch import BatchCache, _PaddedBatch
from specdec.models.hub import encode, fetch, find_model, load_tokenizer, load_transformers
from specdec.models.linear import GROUP, Int4Linear
from specdec.models.llama import Llama
from specdec.models.loading import load_model
from specdec.sampling import SamplingParams, SeededRandom
from specdec.speedup import tokens_per_round, walltime_factor

LLAMA3 = dict(
    vocab_size=128256, num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5,
    rope_parameters=dict(
        rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
)
SHAPES = {  # the default model's, and those of Llama 3.2 1B and 3B and 3.1 8B, from their published configs
    "default": dict(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=100000.0),
    ),
    "1B": LLAMA3 | dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                        head_dim=64, tie_word_embeddings=True),
    "3B": LLAMA3 | dict(hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
                        tie_word_embeddings=True),
    "8B": LLAMA3 | dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                        tie_word_embeddings=False, rope_parameters=LLAMA3["rope_parameters"] | dict(factor=8.0)),
}
TINY = dict(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3,
)
QUESTION = "Write a Python class Stack with the methods push, pop and peek, and show how to use it."
ALPHAS = (.6, .7, .8)
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch",
            "cudaMemcpyAsync", "cudaMemsetAsync")
SAMPLED = SamplingParams(1.0)


class Skipped(Exception):
    "A part that has no meaning here; the message says why."


@dataclass
class Machine:
    "Where it runs, and how much of it."
    device: torch.device
    small: bool     # to test the script: small random models, few repeats
    until: float    # by `time.time`: when a part that can end early has to

    @property
    def on_gpu(self) -> bool: return self.device.type == "cuda"
    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.on_gpu else platform.processor() or platform.machine()
    @property
    def dtype(self) -> torch.dtype: return torch.bfloat16 if self.on_gpu else torch.float32

    def need_gpu(self, why: str) -> None:
        if not self.on_gpu: raise Skipped(f"needs a GPU: {why}")


def spread(values: list[float]) -> dict:
    "Median, extremes and all values."
    return dict(median=statistics.median(values), low=min(values), high=max(values), values=values)


def random_transformers(machine: Machine, shape: dict, dtype: torch.dtype) -> LlamaForCausalLM:
    "A transformers model of that shape with random weights, made where it runs."
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with machine.device: model = LlamaForCausalLM(LlamaConfig(**shape))
    finally: torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def random_llama(machine: Machine, shape: dict, dtype: torch.dtype) -> Llama:
    "The same as our decoder."
    model = as_llama(random_transformers(machine, shape, dtype))
    gc.collect()
    return model


def random_head(target: Llama) -> Head:
    "A head for its time: the numbers don't matter for that."
    torch.manual_seed(0)
    tokens = torch.arange(min(32768, target.vocab_size // 2))
    return Head(head_config(target, len(tokens)), tokens).to(target.device, target.dtype)


def random_block(target: Llama) -> Block:
    "A block of sixteen rows for its time, likewise."
    torch.manual_seed(0)
    tokens = torch.arange(min(32768, target.vocab_size // 2))
    config = block_config(target, len(tokens), mask_token_id=0, num_layers=2, block_size=16, markov_rank=64)
    return Block(config, tokens).to(target.device, target.dtype)


def in_four_bits(target: Llama) -> Llama:
    "The same shape with random levels in the matrices of its layers, as `quantised` makes it of real ones."
    import copy
    def int4(linear) -> Int4Linear:
        rows, columns, device = linear.outputs, linear.inputs, target.device
        levels = torch.randint(16, (rows, columns), device=device, dtype=torch.int8)
        steps = torch.full((columns // GROUP, rows, 2), .002, dtype=torch.bfloat16, device=device)
        return Int4Linear((levels, steps))
    light = copy.copy(target)
    light.int4, light.layers = True, [copy.copy(layer) for layer in target.layers]
    for layer in light.layers:
        layer.attention, layer.mlp = copy.copy(layer.attention), copy.copy(layer.mlp)
        layer.attention.qkv, layer.attention.out = int4(layer.attention.qkv), int4(layer.attention.out)
        layer.mlp.gate_up, layer.mlp.down = int4(layer.mlp.gate_up), int4(layer.mlp.down)
    return light


def some_drafters(target: Llama, head: Head) -> dict[str, tuple[Drafter, int]]:
    "One of each kind that the device has, with its K."
    skipping = target.skip(range(1, len(target.layers), 3))  # a draft model that shares the target's weights
    def colder() -> Drafter: return TemperatureScaledDrafter(HeadDrafter(head, target))
    return {"plain": (NoDrafter(), 1), "n-gram": (NGramDrafter(), 8), "suffix": (SuffixDrafter(), 8),
            "model": (ModelDrafter(skipping, target.vocab_size), 4), "head": (colder(), 5),
            "block": (TemperatureScaledDrafter(BlockDrafter(random_block(target), target)), 5),
            "hybrid": (HybridDrafter(SuffixDrafter(), colder()), 5),
            "tree": (TreeDrafter(head, target, width=4, depth=4), 12)}


def random_prompt(vocab_size: int, n: int = 32) -> list[int]:
    return torch.randint(vocab_size, (n,), generator=torch.Generator().manual_seed(0)).tolist()


def tokens_of(rounds) -> list[int]: return [token for r in rounds for token in r.emitted]


class Default:
    "The default model in both implementations, its head and a prompt; random ones of its shape where it isn't here."
    def __init__(self, machine: Machine):
        self.machine, self.tokens = machine, 16 if machine.small else 128
        try:
            folder = find_model("smollm2")
            self.reference = load_transformers(folder, machine.device, machine.dtype)
            self.weights = "smollm2"
            self.prompt = encode(load_tokenizer(folder), [{"role": "user", "content": QUESTION}])
        except (ModelError, OSError, ValueError, ImportError) as error:
            self.weights = f"random, since the model can't be had: {error}"
            shape = TINY if machine.small else SHAPES["default"]
            self.reference = random_transformers(machine, shape, machine.dtype)
            self.prompt = random_prompt(shape["vocab_size"])
        self.reference.requires_grad_(False)
        self.reference.generation_config.eos_token_id = None  # every text has all its tokens
        self.ours = as_llama(self.reference)
        self.nbytes = sum(w.nbytes for w in self.reference.parameters())
        known = self.weights == "smollm2"
        self.head = load_head(shipped("smollm2-head"), self.ours) if known else random_head(self.ours)

    def device_loop(self, decoder: DeviceDecoder, sampling: SamplingParams, K: int) -> dict:
        return self.timed(lambda: decoder.speculate(self.prompt, sampling, 0, K, self.tokens))

    def host_loop(self, drafter: Drafter, sampling: SamplingParams, K: int) -> dict:
        rng = SeededRandom(0)
        return self.timed(lambda: speculate(self.ours, drafter, self.prompt, sampling, rng, K, self.tokens))

    def timed(self, decode: Callable) -> dict:
        "One text: seconds in all and after the first token, tokens, rounds."
        start, first, rounds = synchronized_time(self.machine.device), None, []
        for r in decode():
            rounds.append(r)
            first = first or time.perf_counter()
        end, count = time.perf_counter(), sum(len(r.emitted) for r in rounds)
        return dict(total=end - start, step=(end - first) / max(1, count - 1), tokens=count, rounds=len(rounds) - 1)

    def generate(self, **settings) -> dict:
        "One text by transformers' `generate`, greedy."
        ids = torch.tensor([self.prompt], device=self.machine.device)
        start = synchronized_time(self.machine.device)
        out = self.reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=self.tokens, pad_token_id=0,
            **settings,
        )
        seconds, count = synchronized_time(self.machine.device) - start, out.shape[1] - ids.shape[1]
        return dict(total=seconds, step=seconds / count, tokens=count, rounds=count)

    def compare(self, methods: dict[str, Callable[[], dict]], repeats: int = 5) -> dict:
        "Warm each up (capturing and compiling happen there), then let them take turns. One that fails says so."
        failed, runs, warm = {}, {name: [] for name in methods}, {}
        for repeat in range(-1, 1 if self.machine.small else repeats):
            for name, method in methods.items():
                slow = name.startswith("host") and repeat > 1
                if name in failed or runs[name] and (slow or time.time() > self.machine.until): continue
                start = time.perf_counter()
                try: run = method()
                except Exception as error:
                    raise_if_lost(error)
                    failed[name] = dict(failed=traceback.format_exc()[-1500:])
                else: runs[name].append(run) if repeat >= 0 else warm.update({name: time.perf_counter() - start})
        def figures(name: str) -> dict:
            found = runs[name]
            return dict(
                tokens_per_second=spread([run["tokens"] / run["total"] for run in found]),
                step_ms=spread([1000 * run["step"] for run in found]),
                tokens_per_round=(found[0]["tokens"] - 1) / max(1, found[0]["rounds"]), first_time_s=warm[name])
        return {name: figures(name) for name in methods if runs[name] and name not in failed} | failed

    def with_floor(self, result: dict) -> dict:
        "With the time that reading the weights takes at least, and each method's share of that speed."
        bandwidth = memory_bandwidth(self.machine.device, **(dict(size=2**22, repeats=2) if self.machine.small else {}))
        floor = 1000 * floor_seconds(self.nbytes, bandwidth)  # ms
        for found in result.values():
            if "step_ms" in found: found["share_of_floor"] = floor / found["step_ms"]["median"]
        return dict(methods=result, floor_ms=floor, weights_bytes=self.nbytes, weights=self.weights)


# First call

def the_machine(machine: Machine) -> dict:
    "What it is, and its two ceilings."
    facts = dict(device=machine.device.type, name=machine.name, torch=torch.__version__, cuda=torch.version.cuda,
                 transformers=transformers.__version__, python=platform.python_version(),
                 time=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))
    if machine.on_gpu:
        properties = torch.cuda.get_device_properties(machine.device)
        facts |= dict(memory=properties.total_memory, multiprocessors=properties.multi_processor_count,
                      capability=list(torch.cuda.get_device_capability(machine.device)))
    few = dict(repeats=2) if machine.small else {}
    facts["bandwidth"] = memory_bandwidth(machine.device, **few | (dict(size=2**22) if machine.small else {}))
    facts["matrix_rate"] = matrix_rate(machine.device, machine.dtype, **few | (dict(size=256) if machine.small else {}))
    return facts


def agree(machine: Machine) -> dict:
    """One text by the host's loop, by the device's step by step, and captured: greedy, and at temperature 1 with draft
    tokens that are certain, where it is the host's plain text of that seed. Drawn ones: equal seeds, and another."""
    target = random_llama(machine, TINY, torch.float32)
    prompt, n, found = random_prompt(64, 8), 12 if machine.small else 60, {}
    for name, (drafter, K) in some_drafters(target, random_head(target)).items():
        host = tokens_of(speculate(target, drafter, prompt, SamplingParams(), SeededRandom(0), K, n))
        steps, graphs = DeviceDecoder(target, drafter, graphs=False, ahead=0), DeviceDecoder(target, drafter)
        plain = tokens_of(speculate(target, NoDrafter(), prompt, SAMPLED, SeededRandom(1), 1, n))
        def text(decoder: DeviceDecoder, sampling=SAMPLED, seed=1, K=K, **more) -> list[int]:
            return tokens_of(decoder.speculate(prompt, sampling, seed, K, n, **more))
        greedy = [text(decoder, SamplingParams()) for decoder in (steps, graphs)]
        certain = [text(decoder, draft_sampling=SamplingParams()) for decoder in (steps, graphs)]
        found[name] = dict(
            parts_at=[first_difference(host, other) for other in greedy],  # None: equal
            sampled_parts_at=[first_difference(plain, other) for other in certain],
            captured=next(iter(graphs.loops.values())).is_captured,
            seeded=dict(steps_again=text(steps) == text(steps), graphs_again=text(graphs) == text(graphs),
                        graphs_as_steps=text(graphs) == text(steps), other_seed=text(graphs, seed=2) != text(graphs)))
    same = [None, None]
    every = [f["parts_at"] == f["sampled_parts_at"] == same and all(f["seeded"].values()) for f in found.values()]
    return dict(drafters=found, all_as_expected=all(every))


def law(machine: Machine) -> dict:
    """The first three tokens of a tiny model at temperature 1 against float64 softmaxes on the CPU: χ², for each
    drafter. As a negative control, the same texts against temperature 2."""
    V, prompt, most = 6, [1, 2, 3], 60 if machine.small else 2000
    target = random_llama(machine, TINY | dict(vocab_size=V), torch.float32)
    def rows(texts: list[list[int]]) -> np.ndarray:
        ids = torch.tensor([[*prompt, *text] for text in texts])
        logits = torch.cat([target.forward(row[None], target.new_cache(8), last=1)[0].cpu() for row in ids])
        return logits.double().numpy()
    firsts = [[a] for a in range(V)]
    logits = [rows([[]]), rows(firsts), rows([[a, b] for a in range(V) for b in range(V)])]
    def expected(temperature: float) -> np.ndarray: # [V³]
        one, two, three = (np.exp(x / temperature) / np.exp(x / temperature).sum(-1, keepdims=True) for x in logits)
        return (one.reshape(V, 1, 1) * two.reshape(V, V, 1) * three.reshape(V, V, V)).ravel()
    def chance(counts: np.ndarray, p: np.ndarray) -> float:
        wanted = p * counts.sum()
        many = wanted >= 5
        if many.sum() < 2: return 1.0
        cells = [(counts[many], wanted[many]), ([counts[~many].sum()], [wanted[~many].sum() + 1e-9])]
        found, wanted = (np.concatenate(column) for column in zip(*cells))
        return float(chi2.sf(((found - wanted) ** 2 / wanted).sum(), len(found) - 1))
    result, drafters = {}, some_drafters(target, random_head(target))
    share = max(1.0, machine.until - time.time()) / len(drafters)
    for name, (drafter, K) in drafters.items():
        decoder, counts, start = DeviceDecoder(target, drafter), np.zeros(V ** 3), time.time()
        for seed in range(most):
            if time.time() - start > share: break
            a, b, c = tokens_of(decoder.speculate(prompt, SAMPLED, seed, min(K, 3), 4))[:3]
            counts[(a * V + b) * V + c] += 1
        result[name] = dict(texts=int(counts.sum()), p=chance(counts, expected(1)), control=chance(counts, expected(2)))
    return dict(drafters=result, alarms=[name for name, f in result.items() if f["p"] < 1e-6],
                blind=[name for name, f in result.items() if f["control"] > 1e-6])


def cuda_tests(machine: Machine) -> dict:
    "The tests marked cuda, in a process of their own; without a GPU they are collected and skipped."
    tests = [str(file) for file in sorted((ROOT / "tests").glob("**/test_*.py"))
             if "mark.cuda" in file.read_text(encoding="utf-8")]
    limit = max(60.0, machine.until - time.time())
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "cuda", "-rA", "--tb=short", "-p", "no:cacheprovider", *tests],
        capture_output=True, text=True, timeout=limit, cwd=ROOT)
    lines = done.stdout.strip().splitlines()
    if done.returncode: raise RuntimeError("\n".join(lines[-80:]) + done.stderr[-2000:])
    return dict(summary=lines[-1])


def waits(default: Default) -> dict:
    "How often the host waits in a round, and what it launches, by the profiler."
    found, n = {}, 4 if default.machine.small else 20
    for name, (drafter, _) in some_drafters(default.ours, default.head).items():
        rounds = DeviceDecoder(default.ours, drafter).speculate(default.prompt, SAMPLED, 0, 4, 8 * n)
        next(rounds)
        next(rounds)
        counted, seen = count_synchronisations(rounds, n)
        found[name] = dict(waits=dict(counted), rounds=seen, per_round=counted.total() / max(1, seen))
    return found


def tokens(default: Default) -> dict:
    "Plain and speculative decoding by both loops, and transformers, in turns."
    methods: dict[str, Callable[[], dict]] = {}
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature)
        for name, (drafter, K) in some_drafters(default.ours, default.head).items():
            decoder, label = DeviceDecoder(default.ours, drafter), f"{name}, temperature {temperature:g}"
            methods[f"device, {label}"] = partial(default.device_loop, decoder, sampling, K)
            if temperature == 0 or name in ("plain", "head"):
                methods[f"host, {label}"] = partial(default.host_loop, drafter, sampling, K)
    methods["transformers, eager"] = default.generate
    result = default.with_floor(default.compare(methods))
    speed = {name: found["tokens_per_second"]["median"] for name, found in result["methods"].items()
             if "tokens_per_second" in found}
    def over(a: str, b: str) -> float | None: return speed[a] / speed[b] if a in speed and b in speed else None
    names = [name.removeprefix("host, ") for name in speed if name.startswith("host, ")]
    result["device_over_host"] = {name: over(f"device, {name}", f"host, {name}") for name in names}
    result["over_plain"] = {
        name: over(name, f"device, plain, temperature {name[-1]}") for name in speed if name.startswith("device")}
    result["plain_over_transformers"] = over("device, plain, temperature 0", "transformers, eager")
    return result


def plain(default: Default) -> dict:
    "Plain greedy decoding by our loop in its stages; how much is due to graphs, to the round ahead."
    stages = {"captured": {}, "captured, no round ahead": dict(ahead=0), "step by step": dict(graphs=False, ahead=0)}
    methods = {}
    for name, settings in stages.items():
        decoder = DeviceDecoder(default.ours, NoDrafter(), **settings)
        methods[name] = partial(default.device_loop, decoder, SamplingParams(), 1)
    return default.with_floor(default.compare(methods))


def transformers_compiled(default: Default) -> dict:
    "Transformers with a static cache, which it compiles."
    default.machine.need_gpu("on a CPU it compiles for minutes")
    return default.with_floor(default.compare(
        {"transformers, compiled": lambda: default.generate(cache_implementation="static")}, repeats=3))


def marks_ms(marks: list, device: torch.device) -> list[float]:
    "Milliseconds between marks of a `PhaseTimer`."
    if device.type != "cuda": return [1000 * (b - a) for a, b in pairwise(marks)]
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


STEPS = ("draft", "verify", "decide", "commit")

@torch.inference_mode()
def step_times(loop: DeviceLoop, prompt: list[int], n: int) -> dict[str, float]:
    "Median milliseconds of a round's four steps, always at the same place of a sequence."
    state, device, found = loop.state, loop.state.target.device, []
    loop.start(prompt, PhaseTimer(device))()
    length, timer = state.sequence.length.clone(), PhaseTimer(device)
    for _ in range(n + 2):
        marks = [timer.now()]
        proposal = loop.steps.draft()
        marks.append(timer.now())
        logits, features = loop.steps.verify(proposal)
        marks.append(timer.now())
        decided = loop.steps.decide(proposal, logits)
        marks.append(timer.now())
        loop.steps.commit(proposal, decided, features)
        marks.append(timer.now())
        state.sequence.length.copy_(length)
        found.append(marks_ms(marks, device))
    return dict(zip(STEPS, map(statistics.median, zip(*found[2:]))))


def costs_of(machine: Machine, target: Llama, head: Head, prompt: list[int], Ks: tuple[int, ...],
             sampling=SamplingParams(), **options) -> dict:
    """v(K) of the target; c of a head, of a block, and of the target without a third of its layers; and by these S for
    some α: with the best of the K that were timed, tokens drafted independently."""
    n = 3 if machine.small else 15
    drafters = some_drafters(target, head)
    def times(drafter: Drafter, K: int) -> dict[str, float]:
        decoder = DeviceDecoder(target, drafter, keep=1, **options)
        return step_times(decoder.loop(sampling, K, 400), prompt, n)
    step = times(NoDrafter(), 1)
    whole = sum(step.values())
    free = {K: times(drafters["n-gram"][0], K) for K in Ks}
    v = {K: (sum(found.values()) - found["draft"]) / whole for K, found in free.items()}
    c: dict[str, dict[int, float]] = {"lookup": {K: found["draft"] / K / whole for K, found in free.items()}}
    raw = {"plain": step, "n-gram": free}
    for name in ("head", "model", "block"):
        raw[name] = {K: times(drafters[name][0], K) for K in Ks}
        c[name] = {K: max(0, found["draft"] + found["commit"] - free[K]["commit"]) / K / whole
                   for K, found in raw[name].items()}
    def best(alpha: float, c: dict[int, float]) -> dict:
        S = {K: float(walltime_factor(alpha, K, c[K], v[K])) for K in Ks}
        K = max(S, key=S.get)
        return dict(S=S[K], K=K, tau=float(tokens_per_round(alpha, K)))
    S = {name: {str(alpha): best(alpha, found) for alpha in ALPHAS} for name, found in c.items()}
    return dict(plain_ms=whole, v=v, c=c, S=S, steps_ms=raw)


def costs(default: Default) -> dict:
    "v(K), c and launches of the default model, with graphs and without, greedy and at temperature 1."
    machine, Ks = default.machine, (1, 4) if default.machine.small else (1, 2, 4, 8, 16)
    settings = {"captured": {}, "step by step": dict(graphs=False, ahead=0)}
    if not machine.on_gpu: del settings["captured"]
    def launches(drafter: Drafter, K: int, options: dict) -> dict:
        from torch.profiler import ProfilerActivity, profile
        rounds = DeviceDecoder(default.ours, drafter, **options).speculate(default.prompt, SAMPLED, 0, K, 120)
        for _ in range(3): next(rounds)
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * machine.on_gpu]
        with profile(activities=activities) as profiler:
            for _ in range(4): next(rounds)
        counted = Counter(e.name for e in profiler.events() if e.name in LAUNCHES)
        return {name: count / 4 for name, count in counted.items()}
    result = {}
    for name, options in settings.items():
        result[name] = costs_of(machine, default.ours, default.head, default.prompt, Ks, **options)
        drafters = some_drafters(default.ours, default.head)
        result[name]["launches_per_round"] = {
            kind: launches(drafter, min(K, 4), options) for kind, (drafter, K) in drafters.items()}
    return result


def trace(default: Default) -> list:
    "What the host and the device did in three rounds of model drafts: [name, where, start in µs, duration in µs]."
    from torch.profiler import ProfilerActivity, profile
    default.machine.need_gpu("on a CPU there is one queue only")
    drafter = some_drafters(default.ours, default.head)["model"][0]
    rounds = DeviceDecoder(default.ours, drafter).speculate(default.prompt, SAMPLED, 0, 4, default.tokens)
    for _ in range(6): next(rounds)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(3): next(rounds)
    events = [e for e in profiler.events() if e.name.startswith("cuda") or "CUDA" in str(e.device_type)]
    first = min(e.time_range.start for e in events)
    def line(e) -> list:
        device, start = str(e.device_type).split(".")[-1], e.time_range.start - first
        return [e.name[:30], device, round(start, 1), round(e.time_range.elapsed_us(), 1)]
    return [line(e) for e in events][:3000]


# Second call

def shape(machine: Machine, size: str, bits: int) -> dict:
    "v(K), c and S of a model of that size with random weights."
    target = random_llama(machine, TINY if machine.small else SHAPES[size], machine.dtype)
    head, prompt = random_head(target), random_prompt(target.vocab_size)
    if bits == 4: target = in_four_bits(target)
    found = costs_of(machine, target, head, prompt, (1, 4) if machine.small else (1, 2, 4, 8, 16))
    return found | dict(memory_mb=target.memory_footprint_mb)


@torch.inference_mode()
def batches(machine: Machine, size: str) -> dict:
    """Forwards over 1 + K new tokens of each of B sequences, with graphs and without; and up to which B drafts pay at
    some α, if drafting cost nothing."""
    held, Ks = 32 if machine.small else 256, (0, 1, 2, 4)
    sizes = (1, 2, 4) if machine.small else (1, 2, 4, 8, 16, 32, 64)
    target = random_llama(machine, TINY if machine.small else SHAPES[size], machine.dtype)
    result: dict[str, dict] = {}
    for B in sizes:
        for K in Ks:
            cache = BatchCache(target, B, held + 16)
            for _ in range(B): cache.join().length = held
            rows = _PaddedBatch(target, cache, [K + 1] * B)
            ids = torch.randint(target.vocab_size, (1, B * (K + 1)), device=machine.device)
            def forward(ids=ids, rows=rows): return target.compute(ids, rows, rows, None).argmax(-1)
            runs = {"step by step": forward}
            if machine.on_gpu:
                runs["captured"], _ = captured(forward, (), machine.device, torch.Generator(machine.device))
            for name, run in runs.items():
                found = []
                for _ in range(3 if machine.small else 9):
                    timer = PhaseTimer(machine.device)
                    with timer.phase("forward"): run()
                    found.append(1000 * timer.seconds("forward"))
                result.setdefault(name, {}).setdefault(B, {})[K] = statistics.median(found[1:])
    def best(times: dict[int, float], alpha: float) -> float:
        return max(tokens_per_round(alpha, K) / (times[K] / times[0]) for K in Ks if K)
    S = {name: {str(alpha): {B: float(best(times, alpha)) for B, times in table.items()} for alpha in ALPHAS}
         for name, table in result.items()}
    def even(found: dict[int, float]) -> int: return max((B for B, s in found.items() if s > 1), default=0)
    return dict(forward_ms=result, held=held, S=S, pays_up_to={
        name: {alpha: even(found) for alpha, found in table.items()} for name, table in S.items()})


def four_bits(machine: Machine) -> dict:
    "The default model with the four bits that its file has: plain, lookup and head by the device's loop."
    try: folder = fetch() if find_model("smollm2") else None
    except ModelError as error: raise Skipped(f"needs the default model: {error}") from error
    default = Default(machine)
    default.ours = load_model(folder, machine.device, torch.int4)
    default.nbytes = int(1e6 * default.ours.memory_footprint_mb)
    default.head, methods = load_head(shipped("smollm2-head"), default.ours), {}
    drafters = some_drafters(default.ours, default.head)
    for name in ("plain", "suffix", "head"):
        drafter, K = drafters[name]
        decoder = DeviceDecoder(default.ours, drafter)
        methods[f"device, {name}, temperature 0"] = partial(default.device_loop, decoder, SamplingParams(), K)
    return default.with_floor(default.compare(methods, repeats=3))


@dataclass
class Part:
    run: Callable      # takes the machine, or the default model
    seconds: float     # what it takes on a GPU, roughly; it may take four times as long
    of_default: bool = False


FIRST = {  # the most important first
    "machine": Part(the_machine, 10),
    "loops agree": Part(agree, 20),
    "law": Part(law, 40),
    "default, tokens": Part(tokens, 70, True),
    "default, waits": Part(waits, 10, True),
    "default, costs": Part(costs, 30, True),
    "cuda tests": Part(cuda_tests, 90),
    "default, trace": Part(trace, 5, True),
    "default, plain": Part(plain, 40, True),
    "default, transformers compiled": Part(transformers_compiled, 45, True),
}
SECOND = {
    "8B, bf16": Part(partial(shape, size="8B", bits=16), 25),
    "8B, int4": Part(partial(shape, size="8B", bits=4), 25),
    "8B, batches": Part(partial(batches, size="8B"), 25),
    "1B, bf16": Part(partial(shape, size="1B", bits=16), 15),
    "default, batches": Part(partial(batches, size="default"), 20),
    "3B, bf16": Part(partial(shape, size="3B", bits=16), 20),
    "1B, batches": Part(partial(batches, size="1B"), 20),
    "1B, int4": Part(partial(shape, size="1B", bits=4), 15),
    "3B, int4": Part(partial(shape, size="3B", bits=4), 20),
    "default, int4": Part(four_bits, 20),
}


# The worker

def raise_if_lost(error: BaseException) -> None:
    "After an error of CUDA nothing works in this process any more."
    if "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError": raise error


def is_settled(found: dict | None, call: str) -> bool:
    "Whether a part has its result, or was tried in this call."
    return found is not None and ("result" in found or found["call"] == call)


def line(found: dict) -> str:
    "A part's outcome, for people."
    if "result" in found: return f"done ({found['seconds']:.1f} s)"
    if "skipped" in found: return f"skipped, {found['skipped']}"
    return f"failed, {found['failed'].strip().splitlines()[-1]} ({found['seconds']:.1f} s)"


def work(options: argparse.Namespace) -> int: # 75: another process has to go on
    "The parts, one after another; each is written at once."
    parts = FIRST if options.part == "first" else SECOND | FIRST
    default = None
    for name, part in parts.items():
        record = read(options.out)
        if options.only not in name or is_settled(record["parts"].get(name), options.call): continue
        now, lost = time.time(), False
        left = options.deadline - now
        if left < part.seconds and not options.small:
            found = dict(skipped=f"{max(0, left):.0f} s were left, and it takes about {part.seconds:.0f}")
        else:
            until = min(now + 4 * part.seconds + 60, options.deadline)
            write(options.out, record | dict(running=dict(name=name, since=now, until=until, call=options.call)))
            machine = Machine(torch.device(options.device), options.small, min(now + 1.3 * part.seconds, until - 3))
            if not part.of_default: default = None  # one model at a time
            gc.collect()
            try:
                if part.of_default:
                    default = default or Default(machine)
                    default.machine = machine
                found = dict(result=part.run(default if part.of_default else machine))
            except Skipped as why: found = dict(skipped=str(why))
            except Exception as error:
                found = dict(failed=traceback.format_exc()[-4000:])
                try: raise_if_lost(error)
                except Exception: lost = True
            if machine.on_gpu and not lost: torch.cuda.empty_cache()
        found |= dict(seconds=time.time() - now, call=options.call, on=Machine(
            torch.device(options.device), False, 0).name if not lost else "")
        record["parts"][name] = found
        write(options.out, record)
        print(f"part {name}: {line(found)}", flush=True)
        if lost: return 75
    return 0


def summary(record: dict) -> list[str]:
    "The main figures, a line each."
    def result(name: str) -> dict: return record["parts"].get(name, {}).get("result") or {}
    lines = []
    if facts := result("machine"):
        lines.append(f"{facts['name']}: {facts['bandwidth'] / 1e9:.0f} GB/s, {facts['matrix_rate'] / 1e12:.1f} TFLOP/s")
    if found := result("loops agree"): lines.append(f"loops agree: {found['all_as_expected']}")
    if found := result("law"): lines.append(f"law: alarms {found['alarms']}, too few texts to tell {found['blind']}")
    for name, found in result("default, tokens").get("methods", {}).items():
        if "tokens_per_second" in found:
            lines.append(f"{name}: {found['tokens_per_second']['median']:.0f} tokens/s, "
                         f"{found['share_of_floor']:.0%} of the floor's speed")
    for name in record["parts"]:
        if S := result(name).get("S", {}).get("head"):
            lines.append(f"{name}: S with a head " + ", ".join(
                f"{found['S']:.2f} (K = {found['K']}) at α = {alpha}" for alpha, found in S.items()))
        if pays := result(name).get("pays_up_to"): lines.append(f"{name}: free drafts pay up to B = {pays}")
    return lines


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("first", "second"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--call", required=True)
    parser.add_argument("--deadline", type=float, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args(given)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    code = work(options)
    if not code: print(*summary(read(options.out)), sep="\n")
    return code


if __name__ == "__main__": sys.exit(main())
