"""Measure whether the default pair chooses well, and whether its prices are those of the loop: the data behind the last
figures of nbs/engine/16_costs.ipynb, kept in nbs/data/choosing.json.

    python tools/choosing.py                  # on a quiet machine with two cores: twenty minutes
    python tools/choosing.py --only int4      # one dtype; the others' figures stay

Each prompt is answered plainly, by the head with every fixed number of draft tokens, and as the default pair chooses by
the shipped table, one way after the other, then the next prompt. Regret: how much longer all answers took than with the
fixed way that was fastest in hindsight, plain decoding among them. Prices: what a round of the head costs in plain
steps, as the table has it, as a calibration just before has it, and as the loop took: the mean over all rounds, with as
many draft tokens as each had (a head that isn't sure ends its draft); and c, the time in the drafter for each of
them."""
import argparse
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from specdec.bench.prompts import first_prompts
from specdec.costs import BusyError, Costs, costs_for, measure_costs, members_of, processor_name
from specdec.drafters.choose import drafting
from specdec.files import write_json
from specdec.models.hub import prompts
from specdec.models.loading import load
from specdec.pair import Pair, best_drafter

DATA = Path(__file__).resolve().parent.parent / "nbs" / "data" / "choosing.json"
DTYPES = "float32", "bfloat16", "int8", "int4"
LENGTHS = 1, 2, 3, 4, 6  # fixed numbers of draft tokens, at most
CHOSEN, PLAIN = "as chosen", "plain"
PRICED = 4               # draft tokens of the rounds whose price is looked at
ATTEMPTS = 4


def steps_after_the_first(result) -> float:
    "Seconds without the prompt."
    return result.total_time - result.time_to_first_token


def price(costs: Costs, drafts: Counter) -> float: # drafts: how many rounds had so many draft tokens
    "A round of the head's, in plain steps: the mean."
    prices = {n: costs.verify[n - 1] + drafting(costs.c[-1], n) if n else 1.0 for n in drafts}
    return sum(count * prices[n] for n, count in drafts.items()) / drafts.total()


def calibrated(pair: Pair):
    "As `Pair.calibrate` measures it, and without keeping it; raises `BusyError` after some attempts."
    for attempt in range(ATTEMPTS):
        try: return measure_costs(pair.target, members_of(pair.drafter))
        except BusyError as busy:
            print(busy, flush=True)
            if attempt == ATTEMPTS - 1: raise


def measured(dtype: str, count: int, tokens: int) -> dict:
    "By temperature: seconds of each way, the regret, and prices."
    target = load("smollm2", device="cpu", dtype=dtype)
    drafter = best_drafter(target)
    default, alone = Pair(target, drafter), Pair(target, members_of(drafter)[-1])
    shipped, here = costs_for(target, drafter).costs, calibrated(default)
    ways = {PLAIN: (default, dict(method="plain")), CHOSEN: (default, {})}
    ways |= {f"head, K = {K}": (alone, dict(K=K)) for K in LENGTHS}
    found = {}
    for T in (0.0, 1.0):
        seconds, made, drafting_ms, domains = {way: [] for way in ways}, 0, 0.0, []
        drafts: Counter = Counter()
        for i, prompt in enumerate(first_prompts(prompts(), count)):
            # in an order that turns, so that none always follows the same one
            order = [*ways][i % len(ways):] + [*ways][:i % len(ways)]
            for way in order:
                pair, asked = ways[way]
                result = pair.generate(prompt.messages, temperature=T, seed=i, max_new_tokens=tokens, ignore_eos=True,
                                       **asked)
                seconds[way].append(steps_after_the_first(result))
                if way == f"head, K = {PRICED}":
                    drafting_ms += result.draft_time_total_ms
                    drafts.update(len(r.drafted) for r in result.rounds)
            made += tokens - 1
            domains.append(prompt.domain)
        total = {way: sum(each) for way, each in seconds.items()}
        fixed = min((way for way in ways if way != CHOSEN), key=total.__getitem__)
        step, ratios = total[PLAIN] / made, np.divide(seconds[PLAIN], seconds[CHOSEN])
        took = total[f"head, K = {PRICED}"] / drafts.total() / step
        drafted = sum(n * count for n, count in drafts.items())
        found[f"{T:g}"] = {
            "tokens_per_second": {way: made / spent for way, spent in total.items()}, "best_fixed": fixed,
            "regret": total[CHOSEN] / total[fixed] - 1, "over_plain": float(np.median(ratios)),
            "domains": {domain: float(np.median(ratios[np.array(domains) == domain])) for domain in sorted({*domains})},
            "price": {"shipped": price(shipped.at(T), drafts), "calibrated": price(here.at(T), drafts), "loop": took},
            "c": drafting_ms / 1000 / drafted / step, "drafted": drafted / drafts.total()}
        print(dtype, json.dumps({f"{T:g}": found[f"{T:g}"]}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--count", type=int, default=15, help="prompts, domains in turn")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--out", type=Path, default=DATA)
    asked = parser.parse_args()
    torch.set_num_threads(2)
    held = json.loads(asked.out.read_text()) if asked.out.exists() else {"results": {}}
    for dtype in asked.only:
        results = held["results"] | {dtype: measured(dtype, asked.count, asked.tokens)}
        held = {"command": "python tools/choosing.py", "processor": processor_name(),
                "threads": torch.get_num_threads(), "torch": torch.__version__, "load": round(os.getloadavg()[0], 1),
                "prompts": asked.count, "tokens": asked.tokens, "K": PRICED, "results": results}
        write_json(asked.out, held)


if __name__ == "__main__": main()
