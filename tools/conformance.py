"""Test decoders on the default model against its own law: ours, transformers' own, and two that are wrong on purpose.

python tools/conformance.py --out nbs/data/conformance.json

Each finished test is written at once; a second run goes on with those that are missing. Ctrl-C ends the test under way
without a verdict."""
import argparse
import copy
import json
import os
import time
from pathlib import Path

import torch
import transformers
from specdec.lossless.black_box import check_decoder

from specdec.drafters.model import ModelDrafter
from specdec.loop import speculate
from specdec.models.hub import encode, fetch, load_tokenizer, load_transformers
from specdec.models.loading import load_model
from specdec.sampling import SamplingParams, SeededRandom

CPU, SKIP, K = torch.device("cpu"), (3, 5, 9, 14, 25, 26), 1
PROMPT = "red, blue, red, green, red,"
SAMPLING = SamplingParams(temperature=0.8, top_k=20)


def accept_everything(p, q, tokens, rng):
    "Wrong on purpose: no draft token is refused."
    return len(tokens), rng.categorical(p[len(tokens)])


def our_decoder(target, drafter, verify=None):
    "`speculate` as a black box."
    def generate(prompt, n, seed):
        rounds = speculate(target, drafter, prompt, SAMPLING, SeededRandom(seed), K, n, verify=verify)
        return [token for r in rounds for token in r.emitted]
    return generate


def their_decoder(model, top_k=SAMPLING.top_k, **options):
    "transformers' `generate` as a black box; an end-of-sequence token is a token like any other, on both sides."
    def generate(prompt, n, seed):
        torch.manual_seed(seed)
        ids = torch.tensor([prompt])
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=SAMPLING.temperature, top_k=top_k,
            top_p=1.0, max_new_tokens=n, eos_token_id=None, pad_token_id=0, **options,
        )
        return text[0, len(prompt):].tolist()
    return generate


def smaller(model, keep: int):
    "A copy that has only the first layers: an assistant for transformers."
    assistant = copy.copy(model)
    assistant._modules = dict(model._modules)
    assistant.config = copy.deepcopy(model.config)
    assistant.config.num_hidden_layers = keep
    base = assistant._modules["model"] = copy.copy(model.model)
    base._modules = dict(model.model._modules)
    base.config = assistant.config
    base._modules["layers"] = model.model.layers[:keep]
    assistant.generation_config = copy.deepcopy(model.generation_config)
    return assistant


def decoders(folder: Path):
    "Name → target's own law is compared with this black box, and whether it should pass."
    target, model = load_model(folder, CPU, torch.float32), load_transformers(folder, CPU, torch.float32)
    draft = target.skip(SKIP)
    model.generation_config.eos_token_id = None
    assistant = smaller(model, 8)
    boxes = {
        "ours, draft by skipping layers": our_decoder(target, ModelDrafter(draft, target.vocab_size)),
        "transformers, assistant of 8 layers": their_decoder(model, assistant_model=assistant),
        "wrong on purpose: ours, accepts everything": our_decoder(
            target, ModelDrafter(draft, target.vocab_size), accept_everything
        ),
        "wrong on purpose: transformers, top_k left at 50": their_decoder(model, top_k=50),
        "transformers, prompt lookup": their_decoder(model, prompt_lookup_num_tokens=3),
        "transformers, early exit at layer 8": their_decoder(model, assistant_early_exit=8),
        "transformers, generate": their_decoder(model),
    }
    return target, draft, boxes


def record(report, seconds: float) -> dict:
    "What is stored of a report."
    tv, low, high = report.tv
    return dict(
        rejected=report.rejected, interrupted=report.interrupted, samples=report.samples, seconds=round(seconds, 1),
        proof=report.proof, evidence=[round(min(log_e, 1e3), 3) for log_e in report.log_e_values],
        tv=tv, tv_low=low, tv_high=high,
        counts=report.counts.astype(int).tolist(), suspects=[[s.name, round(s.score, 2)] for s in report.suspects[:4]],
        remarks=report.remarks,
    )


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--samples", type=int, default=300)
    options.add_argument("--distance", type=float, default=0.25)
    options.add_argument("--length", type=int, default=3)
    chosen = options.parse_args()
    folder = fetch()
    target, draft, boxes = decoders(folder)
    tokenizer = load_tokenizer(folder)
    prompt = encode(tokenizer, PROMPT)
    command = (
        f"python tools/conformance.py --out {chosen.out} --samples {chosen.samples} --distance {chosen.distance:g}"
        f" --length {chosen.length}"
    )
    data = json.loads(chosen.out.read_text()) if chosen.out.exists() else {"command": command, "tests": {}}
    if data["command"] != command:
        raise SystemExit(f"{chosen.out} was made by another command: {data['command']}. Remove it first.")
    for name, generate in boxes.items():
        if name in data["tests"] and not data["tests"][name]["interrupted"]: continue
        print(name, flush=True)
        start = time.perf_counter()
        report = check_decoder(
            generate, target, prompt, SAMPLING, length=chosen.length, samples=chosen.samples, distance=chosen.distance,
            draft=draft, K=K,
        )
        print(report, flush=True)
        data |= dict(
            model="SmolLM2-135M-Instruct, float32", prompt=PROMPT, temperature=SAMPLING.temperature,
            top_k=SAMPLING.top_k, K=K, length=chosen.length, planned=report.planned, alarm=report.false_positive_rate,
            distance=report.distance, power=report.power, needed=report.needed, confidence=report.confidence,
            bins=[[tokenizer.decode([t]) if t >= 0 else "…" for t in text] for text in report.bins.texts],
            expected=report.expected.tolist(), torch=torch.__version__, transformers=transformers.__version__,
            threads=torch.get_num_threads(), cores=os.cpu_count(),
        )
        data["tests"][name] = record(report, time.perf_counter() - start)
        chosen.out.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        if report.interrupted: break


if __name__ == "__main__": main()
