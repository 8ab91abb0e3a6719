"""Record the race on the page of recorded runs: `python tools/race.py`.

One prompt, answered to its end by plain and by speculative decoding in turn, each several times, in float32 on the CPU.
Runs of which the machine stole more than two percent are left out; of the others the one with the median time is kept,
round by round with its real times. The page plays them back and computes nothing. A prompt on which drafting wins was
chosen on purpose: what it buys on average stands in the table.
"""
import argparse
import json
import platform
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from tqdm import tqdm

from specdec.bench.run import environment
from specdec.drafters.base import NoDrafter
from specdec.drafters.load import drafter_name
from specdec.loop import speculate
from specdec.models.hub import encode, prompts
from specdec.pair import load_pair
from specdec.sampling import SamplingParams, SeededRandom

OUT = Path(__file__).resolve().parents[1] / "nbs" / "data" / "race.json"
PROMPT, NEW_TOKENS, REPEATS = "code_002", 420, 3
SEED = 4  # the first under which all texts end by then
STALL = 2.5  # a round that took so many times the run's median: the machine did something else
LOST = 0.02  # of a run's time, at most, in such rounds
TEMPERATURES, KS = (0.0, 0.7, 1.0), (2, 4, 8)


def run(pair, drafter, ids: list[int], temperature: float, K: int) -> list[dict]:
    """One run: of each round its end in seconds since the start, the tokens that joined the text, how many of them were
    guesses, and the guesses that were rejected or came after a rejected one. Exits if the text doesn't end."""
    noted, start = [], time.perf_counter()
    rounds = speculate(
        pair.target, drafter, ids, SamplingParams(temperature), SeededRandom(SEED), K, NEW_TOKENS, pair.target.eos_ids,
        draft_sampling=SamplingParams(),  # certain drafts: all lanes write plain decoding's text
    )
    for r in rounds:
        noted.append({
            "end": round(time.perf_counter() - start, 4), "accepted": r.accepted,
            "text": [pair.tokenizer.decode([token]) for token in r.emitted],
            "rejected": [pair.tokenizer.decode([token]) for token in r.drafted[r.accepted:]],
        })
    if sum(len(r["text"]) for r in noted) == NEW_TOKENS:
        sys.exit(f"A text at temperature {temperature} has no end: choose another seed.")
    return noted


def stalled(rounds: list[dict]) -> bool:
    "Whether too much of the time went to rounds (after the first, which reads the prompt) that took far too long."
    times = [end - before for before, end in pairwise(r["end"] for r in rounds)]
    usual = statistics.median(times)
    return sum(time - usual for time in times if time > STALL * usual) > LOST * sum(times)


def median_run(runs: list[list[dict]]) -> list[dict]:
    "The one that took the median time."
    return sorted(runs, key=lambda rounds: rounds[-1]["end"])[len(runs) // 2]


def main() -> None:
    "Record all settings."
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, help="runs of each kind without a stall; the median one is kept"
    )
    repeats = parser.parse_args().repeats
    question = next(p for p in prompts() if p.id == PROMPT)
    pair = load_pair("smollm2", device="cpu", dtype="float32")
    ids = encode(pair.tokenizer, question.messages)
    races = []
    run(pair, NoDrafter(), ids, 0.0, 1)  # warms up
    for temperature in tqdm(TEMPERATURES, desc="temperatures"):
        drafters = {"plain": (NoDrafter(), 1), **{str(K): (pair.drafter, K) for K in KS}}
        runs: dict[str, list] = {name: [] for name in drafters}
        for _ in range(3 * repeats):
            for name, (drafter, K) in drafters.items():  # in turn, so that a slow minute meets all of them
                if len(runs[name]) == repeats: continue
                found = run(pair, drafter, ids, temperature, K)
                if not stalled(found): runs[name].append(found)
        if missing := [name for name in runs if len(runs[name]) < repeats]:
            sys.exit(f"Most runs of {', '.join(missing)} had a stall: is the machine quiet?")
        assert len({"".join(w for r in found[0] for w in r["text"]) for found in runs.values()}) == 1
        races.append({"temperature": temperature, "lanes": {name: median_run(found) for name, found in runs.items()}})
    where = environment("cpu", "float32")
    data = {
        "command": "python tools/race.py", "model": "SmolLM2-135M-Instruct", "prompt": question.text, "Ks": list(KS),
        "drafter": drafter_name(pair.drafter),
        "dtype": "float32", "threads": torch.get_num_threads(), "processor": where["processor"],
        "torch": torch.__version__, "python": platform.python_version(), "races": races,
    }
    OUT.write_text(json.dumps(data, ensure_ascii=False, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")
    for race in races:
        lanes = race["lanes"].items()
        seconds = {name: rounds[-1]["end"] / sum(len(r["text"]) for r in rounds) for name, rounds in lanes}
        print(race["temperature"], {K: round(seconds["plain"] / seconds[str(K)], 2) for K in KS})  # of a token


if __name__ == "__main__":
    main()
