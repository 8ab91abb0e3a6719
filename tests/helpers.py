"""What several test files share: tiny random models, what they say without speculation, fakes that fail, rounds that
were tossed."""
import os
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis
import numpy as np
import pytest
import torch

from specdec.models.llama import Llama
from specdec.models.loading import load, load_model
from specdec.models.protocol import CausalLM
from specdec.result import GenerationResult, Round

CPU = torch.device("cpu")
NIGHTLY = os.environ.get("SPECDEC_TESTS") == "nightly"  # `make test-all`


def examples(most: int) -> int:
    "How many examples hypothesis tries: all in the profile `nightly`, a quarter of them in `ci`, and at least ten."
    return min(most, max(10, most * hypothesis.settings.default.max_examples // 100))


def tool(name: str):
    "A script of `tools/` as a module. That folder stays off the path, where its `site.py` would hide Python's own."
    spec = spec_from_file_location(name, Path(__file__).parents[1] / "tools" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@lru_cache
def tiny(vocab=24, hidden=16, layers=3, seed=0, context=48, noise=0.0) -> Llama:
    "A random Llama with uneven logits; with noise, a relative of the one without."
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=context,
                         tie_word_embeddings=False, initializer_range=0.3)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for w in model.parameters(): w += noise * torch.randn_like(w)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_model(Path(folder), CPU, torch.float32)


@lru_cache
def real():
    "The default model in float32 on the CPU, one for all tests of a process: one that changes it takes a copy."
    return load("smollm2", "cpu", "float32")


def ids_of(rounds) -> list[int]:
    "All tokens of a text."
    return [token for r in rounds for token in r.emitted]


def greedy(target, prompt, count) -> list[int]:
    "Plain greedy decoding without a cache: the independent reference."
    ids = list(prompt)
    for _ in range(count):
        logits = target.forward(torch.tensor([ids]), target.new_cache(len(ids)))
        ids.append(logits[0, -1].argmax().item())
    return ids[len(prompt):]


class Failing:
    "A model whose logits are broken from some length on."
    def __init__(self, model, at, value=float("nan")): self.model, self.at, self.value = model, at, value
    def __getattr__(self, name): return getattr(self.model, name)
    def forward(self, ids, cache, **options):
        logits = self.model.forward(ids, cache, **options)
        return torch.full_like(logits, self.value) if cache.length >= self.at else logits


class Untouchable(CausalLM):
    "A target that must not run."
    vocab_size, context_length, device = 24, 16, CPU
    def new_cache(self, capacity): raise AssertionError("work before validation")


def assert_same_text(model, prompt, a, b, tie=1e-4):
    """Equal, or parting where the two best logits are within `tie` (float32 rounding depends on how many tokens are
    read at once)."""
    if a == b: return
    at = next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)
    ids = torch.tensor([[*prompt, *a[:at]]])
    logits = model.forward(ids, model.new_cache(ids.shape[1]), last=1)[0, 0]
    gap = (logits.max() - min(logits[a[at]], logits[b[at]])).item()
    assert gap < tie, f"The texts part at token {at}, where the logits are {gap:.2g} apart."


def result_of(rounds, method="speculative") -> GenerationResult:
    "A result of nothing but rounds, for its statistics."
    return GenerationResult([], [], "", "length", method, list(rounds), [], [], 0, 0, 0, 0, 0, 0, None)


def make_round(accepted, drafted):
    "A round in which so many of the drafts were accepted."
    return Round([0] * drafted, int(accepted), [0] * (int(accepted) + 1))


def toss(alpha, K, shape, rng):
    """Accepted drafts of rounds whose acceptances are independent, one uniform number a draft: nothing in common with
    the formulas."""
    right = rng.random((*shape, K)) < np.asarray(alpha)[..., None]
    return right.cumprod(-1).sum(-1)


def calls(*cases):
    "Cases of a call and the words that it must be refused with, each with a name."
    return [pytest.param(lambda call=call, given=given: call(*given), words, id=f"{call.__name__}-{i}-{words}")
            for i, (call, given, words) in enumerate(cases)]


@contextmanager
def on_a_disk_of(size):
    "Inside, no file can become larger than that many bytes: writes are cut short, and then refused."
    import resource
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try: yield
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def workers_kept(then: Callable[[], object]) -> int:
    """How many of OpenMP's threads a Python thread still has when it has shared out an operation over two cores, and
    done something then: those that end with it. (Linux lists the threads of a process; elsewhere 0.)"""
    folder = Path("/proc/self/task")
    if not folder.is_dir(): return 0
    def threads():
        before, now = None, set(os.listdir(folder))
        while now != before:  # one that was told to end takes a moment
            time.sleep(0.1)
            before, now = now, set(os.listdir(folder))
        return now
    usual, ready, over = torch.get_num_threads(), threading.Event(), threading.Event()
    def work():
        try:
            torch.set_num_threads(2)
            torch.ones(2 * 10**6).add(1)
            then()
        finally: ready.set()
        over.wait()
    before, thread = threads(), threading.Thread(target=work)
    thread.start()
    ready.wait()
    waiting = threads()
    over.set()
    thread.join()
    while (folder / str(thread.native_id)).exists(): time.sleep(0.01)  # on a busy machine it ends later
    torch.set_num_threads(usual)
    return len(waiting - before - threads()) - 1  # without the thread itself
