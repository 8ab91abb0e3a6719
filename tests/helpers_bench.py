"""Files of benchmark records, made up: what is put in is known, so it can be asked for."""
import hashlib
import json
from itertools import product
from pathlib import Path

import numpy as np

ALPHAS = {"ngram": .3, "suffix": .35, "model": .55, "head": .6, "hybrid": .65, "skip": .7, "int4": .9}
COSTS = {"ngram": .005, "suffix": .01, "model": .12, "head": .15, "hybrid": .1, "skip": .8, "int4": .6}
STEP = .01  # s, a plain step
ENVIRONMENT = dict(
    processor="A processor", device="cpu", dtype="float32", threads=2, python="3.12.3", torch="2.13.0",
    transformers="5.23.0", system="Linux", code="0123456789ab", governor=None, load=.4,
)


def result(rng, method: str, K, alpha: float, c: float, n: int, step: float, temperature: float) -> dict:
    "A generation of n tokens or a few more, as `to_json` writes one."
    v = 1.15 if method != "plain" else 1.0
    rounds, draft, verify = [], [], []
    while sum(len(r["emitted"]) for r in rounds) < n - 1:
        drafted = 0 if method == "plain" else int(rng.integers(1, 6)) if K == "adaptive" else K
        accepted = min(int(rng.geometric(1 - alpha)) - 1, drafted)
        drafts = rng.integers(0, 49152, drafted).tolist()
        rounds.append(dict(drafted=drafts, accepted=accepted, emitted=[*drafts[:accepted], int(rng.integers(0, 49152))]))
        draft.append(step * c * drafted * rng.normal(1, .03))
        verify.append(step * v * rng.normal(1, .03))
    times = [5 * step, *(d + w for d, w in zip(draft, verify))]
    tokens = [7, *(token for r in rounds for token in r["emitted"])]
    each = [times[0], *(time / len(r["emitted"]) for time, r in zip(times[1:], rounds) for _ in r["emitted"])]
    return dict(
        prompt_ids=list(range(40)), generated_ids=tokens, text="words " * 20, finish_reason="length",
        method="plain" if method == "plain" else "speculative", rounds=rounds, per_token_latencies=each,
        round_latencies=times, time_to_first_token=times[0], total_time=sum(times), prefill_time_ms=45.0,
        draft_time_total_ms=1000 * sum(draft), verify_time_total_ms=950 * sum(verify),
        sampling_time_total_ms=40 * sum(verify), peak_memory_mb=None, settings={"temperature": temperature},
        is_lossless=True, drafter=None if method == "plain" else method, loop="host", device="cpu",
    )


def record(rng, method="plain", K=None, prompt="code_000", repeat=0, temperature=0.0, dtype="float32", n=32, step=STEP,
           pair="smollm2", gap=None, alpha=None, **environment) -> dict:
    "One record; alpha: that of the prompt, in place of the method's."
    domain, alpha = prompt.rsplit("_", 1)[0], ALPHAS.get(method, .5) if alpha is None else alpha
    made = result(rng, method, K, alpha, COSTS.get(method, 0), n, step, temperature)
    config = dict(
        pair=pair, method=method, K=K, temperature=temperature, max_new_tokens=n, domain=domain, prompt=prompt, seed=0,
        repeat=repeat, dtype=dtype, device="cpu", threads=2,
    )
    parted = None if gap is None else dict(position=5, gap=gap, plain=11, ours=made["generated_ids"][5])
    label = "AR" if method == "plain" else "SD-adaptive" if K == "adaptive" else f"SD-K{K}"
    return dict(
        version=1, key=hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12], decoder_label=label,
        config=config, weights=dict(target="a" * 64, drafter=None), environment={**ENVIRONMENT, "dtype": dtype, **environment},
        prompt_tokens=40, parted=parted, result=made,
    )


def grid(prompts=6, methods=("suffix", "model", "head"), Ks=(1, 2, 4, "adaptive"), temperatures=(0.0, 1.0),
         dtypes=("float32", "bfloat16"), repeats=1, pairs=("smollm2",), seed=0, **more) -> list[dict]:
    "Records of a whole grid: so many prompts of each of three domains, easier ones and harder ones."
    rng = np.random.default_rng(seed)
    names = [f"{domain}_{i:03}" for domain in ("code", "conversation", "summarization") for i in range(prompts)]
    harder = {name: rng.normal(0, .08) - .1 * name.startswith("conv") for name in names}
    lines = [("plain", None), *product(methods, Ks)]
    return [
        record(rng, method, K, name, repeat, temperature, dtype, pair=pair,
               alpha=float(np.clip(ALPHAS.get(method, .5) + harder[name], .02, .98)), **more)
        for pair, dtype, temperature, repeat, name in product(pairs, dtypes, temperatures, range(repeats), names)
        for method, K in lines
    ]


def write(path: Path, records: list[dict]) -> Path:
    "As a runner writes them."
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="ascii")
    return path
