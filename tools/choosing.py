"""Measure whether the default pair chooses well: the data of the front page, kept in nbs/data/choosing.json.

    python tools/choosing.py                  # on a quiet machine with two cores: twenty minutes
    python tools/choosing.py --only int4      # one dtype; the others' figures stay
    python tools/choosing.py --target FILE.gguf --only file --count 6 --out OTHER.json  # a larger one, 20 minutes

Each prompt is answered plainly, by the head (by lookup, for another target) with every fixed number of draft tokens,
and as the default pair chooses by itself (by its clock, or by frozen prices), one way after the other, then the next
prompt. Regret: how much longer all
answers took than with the fixed way that was fastest in hindsight, plain decoding among them. Beside it the last
estimates of the prices that it chose by."""
import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch

from specdec.bench.prompts import first_prompts
from specdec.drafters.costs import processor_name
from specdec.models.files import write_json
from specdec.models.hub import prompts
from specdec.models.loading import load
from specdec.pair import Pair, best_drafter

DATA = Path(__file__).resolve().parent.parent / "nbs" / "data" / "choosing.json"
OURS = "smollm2"
DTYPES = "float32", "bfloat16", "int8", "int4"
LENGTHS = 1, 2, 3, 4, 6  # fixed numbers of draft tokens, at most
CHOSEN, PLAIN = "as chosen", "plain"
USUAL = 5                # draft tokens of the default pair, at most


def steps_after_the_first(result) -> float:
    "Seconds without the prompt."
    return result.total_time - result.time_to_first_token


def measured(name: str, dtype: str, count: int, tokens: int) -> dict:
    "By temperature: seconds of each way, the regret, and the prices that it chose by."
    target = load(name, device="cpu", dtype=dtype)
    asked_of_it = prompts("quick" if name == OURS else "work")
    drafter = best_drafter(target)
    default, alone = Pair(target, drafter), Pair(target, drafter.members[-1])
    drafts = "head" if name == OURS else "lookup"
    ways = {PLAIN: (default, dict(method="plain")), CHOSEN: (default, {})}
    ways |= {f"{drafts}, K = {K}": (alone, dict(K=K)) for K in LENGTHS}
    found = {}
    for T in (0.0, 1.0):
        seconds, made, domains, costs = {way: [] for way in ways}, 0, [], None
        for i, prompt in enumerate(first_prompts(asked_of_it, count)):
            # in an order that turns, so that none always follows the same one
            order = [*ways][i % len(ways):] + [*ways][:i % len(ways)]
            for way in order:
                pair, asked = ways[way]
                result = pair.generate(prompt.messages, temperature=T, seed=i, max_new_tokens=tokens, ignore_eos=True,
                                       **asked)
                seconds[way].append(steps_after_the_first(result))
                if way == CHOSEN: costs = result.costs
            made += tokens - 1
            domains.append(prompt.domain)
        total = {way: sum(each) for way, each in seconds.items()}
        fixed = min((way for way in ways if way != CHOSEN), key=total.__getitem__)
        ratios = np.divide(seconds[PLAIN], seconds[CHOSEN])
        found[f"{T:g}"] = {
            "tokens_per_second": {way: made / spent for way, spent in total.items()}, "best_fixed": fixed,
            "regret": total[CHOSEN] / total[fixed] - 1, "over_plain": float(np.median(ratios)),
            "lowest": float(ratios.min()),
            "domains": {domain: float(np.median(ratios[np.array(domains) == domain])) for domain in sorted({*domains})},
            "costs": costs}
        print(dtype, json.dumps({f"{T:g}": found[f"{T:g}"]}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=(*DTYPES, "file"), nargs="+", default=list(DTYPES))
    parser.add_argument("--count", type=int, default=15, help="prompts, domains in turn")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--target", default=OURS, help="a name, folder or file that load takes")
    parser.add_argument("--out", type=Path, default=DATA)
    asked = parser.parse_args()
    command = "python tools/choosing.py"
    if asked.target != OURS: command += f" --target FILE.gguf --only {' '.join(asked.only)} --count {asked.count}"
    torch.set_num_threads(2)
    held = json.loads(asked.out.read_text()) if asked.out.exists() else {"results": {}}
    for dtype in asked.only:
        results = held["results"] | {dtype: measured(asked.target, dtype, asked.count, asked.tokens)}
        held = {"command": command, "target": Path(asked.target).name, "processor": processor_name(),
                "threads": torch.get_num_threads(), "torch": torch.__version__, "load": round(os.getloadavg()[0], 1),
                "prompts": asked.count, "tokens": asked.tokens, "K": USUAL, "results": results}
        write_json(asked.out, held)


if __name__ == "__main__": main()
