"""Measure what drafting costs the default model, and write the table that ships with the package.

    python tools/costs.py                                    # on a quiet machine with two cores: five minutes
    python tools/costs.py --only int4 --out /tmp/try.json    # one dtype, elsewhere
    python tools/costs.py --model FILE.gguf --only int4 int8 bfloat16 --sizes 1           # another model's, besides

For each dtype and each batch size the default model plays rounds with drafts of set lengths (`specdec.costs`), on two
threads: drafts that cost nothing give v(1), v(2), …, those of the head that comes with the package give its c. The
file's entries of other kinds of device, and of dtypes that aren't measured now, stay. Where equal steps take very
different times, another attempt is made; after some in vain the entry that is there stays, and that is said."""
import argparse
import json
import os
from pathlib import Path

import torch

from specdec.costs import (
    BusyError,
    Costs,
    ShippedTable,
    drafter_key,
    measure_batch_costs,
    measure_costs,
    members_of,
    model_shape,
    processor_name,
)
from specdec.models.loading import load
from specdec.pair import best_drafter

DTYPES = "float32", "bfloat16", "int8", "int4"
SIZES = 1, 2, 4, 8, 16, 32, 64  # sequences that share a forward
ATTEMPTS = 4
REPEATS = 25  # rounds of each length of one sequence: a calibration has 5, and this is for everybody
NOTE = "Measured on two threads of a quiet machine."


def told(costs: Costs, keys: list[str | None]) -> dict:
    "Costs as the table has them: by drafter, and without a lookup's, which are nothing."
    c = {key: list(each) for key, each in zip(keys, costs.c) if key not in (None, "lookup")}
    return {"step": costs.step, "verify": list(costs.verify), "c": c}


def measured(model: str, dtype: str, size: int, attempts: int) -> dict | None:
    "One entry; None where the machine was busy at every attempt."
    target = load(model, device="cpu", dtype=dtype)
    drafters = members_of(best_drafter(target))
    keys = [drafter_key(drafter) for drafter in drafters]
    for _ in range(attempts):
        try:
            if size == 1: found = measure_costs(target, drafters, REPEATS)
            else: found = measure_batch_costs(target, drafters, size)
        except BusyError as busy:
            print(dtype, size, busy, flush=True)
            continue
        return {
            "model": Path(model).stem, "shape": model_shape(target), "dtype": dtype, "batch_size": size,
            "greedy": told(found.greedy, keys), "sampled": told(found.sampled, keys),
        }
    return None


def place(entry: dict) -> tuple:
    "What an entry is about, in the order of the file."
    return entry["model"], entry["shape"], DTYPES.index(entry["dtype"]), entry["batch_size"]


def as_text(table: dict) -> str:
    "JSON with a line for each entry's kind of text, so that a change can be read."
    devices = []
    for kind, device in table["devices"].items():
        lines = []
        for entry in device["entries"]:
            head = ", ".join(f"{json.dumps(key)}: {json.dumps(entry[key])}"
                             for key in ("model", "shape", "dtype", "batch_size"))
            kinds = ",\n".join(f"     {json.dumps(key)}: {json.dumps(entry[key])}" for key in ("greedy", "sampled"))
            lines.append(f"    {{{head},\n{kinds}}}")
        about = "".join(f"   {json.dumps(key)}: {json.dumps(value)},\n"
                        for key, value in device.items() if key != "entries")
        entries = ",\n".join(lines)
        devices.append(f"  {json.dumps(kind)}: {{\n{about}   \"entries\": [\n{entries}\n   ]\n  }}")
    every = ",\n".join(devices)
    return f"{{\n \"made_by\": {json.dumps(table['made_by'])},\n \"devices\": {{\n{every}\n }}\n}}\n"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("specdec/data/costs.json"))
    parser.add_argument("--model", default="smollm2", help="as load() takes it")
    parser.add_argument("--only", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--attempts", type=int, default=ATTEMPTS)
    parser.add_argument("--note", default=NOTE, help="what a reader should know about these figures")
    asked = parser.parse_args()
    torch.set_num_threads(2)
    table = json.loads(asked.out.read_text()) if asked.out.exists() else {"devices": {}}
    table["made_by"] = "python tools/costs.py"
    held = table["devices"].get("cpu", {}).get("entries", [])
    found = {place(entry): entry for entry in held}
    for dtype in asked.only:
        for size in asked.sizes:
            entry = measured(asked.model, dtype, size, asked.attempts)
            if entry is None: print(f"{dtype}, {size}: the machine is too busy, so what was there stays", flush=True)
            else: found[place(entry)] = entry
            if entry: print(dtype, size, json.dumps(entry["greedy"]), flush=True)
    table["devices"]["cpu"] = {
        "processor": processor_name(), "torch": torch.__version__, "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1), "note": asked.note, "entries": [found[at] for at in sorted(found)],
    }
    asked.out.write_text(as_text(table))
    ShippedTable.model_validate_json(asked.out.read_bytes())


if __name__ == "__main__": main()
