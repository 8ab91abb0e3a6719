"""The data behind the figures of nbs/drafters/13_rows.ipynb and 22_distill.ipynb, kept in nbs/data/distillation.json.

The measurements of a run of `specdec distill --out FOLDER`:

    python tools/distillation.py curve FOLDER --command "specdec distill …"

Train the same head with one setting changed at a time:

    python tools/distillation.py compare --data SAMPLES

How much of the text small vocabularies cover:

    python tools/distillation.py coverage --data SAMPLES

SAMPLES is a folder of shards as `specdec.train.data.sample` writes them. Each replaces its own part of the file and
leaves the others.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "nbs" / "data" / "distillation.json"
CHANGES = {  # name: what differs from the first
    "as exported": {},
    "AdamW": dict(optimizer="adamw"),
    "total variation": dict(loss="tv"),
    "hard labels": dict(loss="hard"),
    "two layers": dict(layers=2),
    "vocabulary 4k": dict(vocab=4096),
    "vocabulary 16k": dict(vocab=16384),
    "own layer random": dict(init="target"),
    "all random": dict(init="random"),
}


def store(part: str, content) -> None:
    "Replace one part of the file."
    from specdec.files import write_json
    whole = json.loads(DATA.read_text()) if DATA.exists() else {}
    DATA.parent.mkdir(exist_ok=True)
    write_json(DATA, whole | {part: content})


def curve(folder: Path, command: str, name: str | None, before: int) -> None:
    """What a run has measured so far, stored under a name (None: the drafter's kind); `before`: tokens that its first
    weights had been trained on."""
    training = folder / "training"
    lines = [json.loads(line) for line in (training / "log.jsonl").read_text().splitlines()]
    config = json.loads((training / "config.json").read_text())
    config["weights"] = bool(config.get("weights"))  # no path of this machine
    known = json.loads(DATA.read_text()).get("curve", {}) if DATA.exists() else {}
    run = {"command": command, "before": before, "config": config, "lines": lines}
    store("curve", known | {name or config["kind"]: run})


def compare(data: Path, rows: int, tokens: int, states: Path, only: list[str]) -> None:
    "Train with each change on the same rows, and keep the last measurement."
    import numpy as np
    import torch

    from specdec.models.hub import find_model, load_tokenizer, pick_dtype
    from specdec.models.loading import load_model
    from specdec.train.data import answer_marks, read_rows
    from specdec.train.loop import Training, train
    from specdec.train.student import DistillConfig
    device = torch.device("cpu")
    target = load_model(find_model("smollm2"), device, pick_dtype("auto", device))
    all_rows, marks = read_rows(data, target.vocab_size), answer_marks(load_tokenizer(find_model("smollm2")))
    some = all_rows[np.random.default_rng(0).permutation(len(all_rows))[:rows]]
    found = json.loads(DATA.read_text()).get("compare", {}).get("results", {}) if DATA.exists() else {}
    for name, change in CHANGES.items():
        if only: unwanted = name not in only
        else: unwanted = name in found and found[name]["tokens"] >= tokens
        if unwanted: continue
        with tempfile.TemporaryDirectory() as out:
            config = DistillConfig(out=out, tokens=tokens, batch=4, held_out=20, evaluate_rows=8, warmup=5,
                                   evaluate_every=10**6, checkpoint_every=10**6, keep_states=str(states), **change)
            line = list(train(Training(config, target, some, marks=marks)))[-1]
        found[name] = {"change": change, **line}
        print(name, [round(a, 3) for a in line["alpha"]], [round(a, 3) for a in line["greedy"]], flush=True)
        command = "python tools/distillation.py compare --data SAMPLES"
        store("compare", {"command": command, "rows": rows, "threads": torch.get_num_threads(), "results": found})


def coverage_of(data: Path) -> None:
    "Count on the rows to train on, and look at those held out as well."
    import numpy as np

    from specdec.train.data import count_tokens, coverage, frequent_tokens, read_rows, shared_prefix, split_rows
    V = 49152  # of the default model
    rows = read_rows(data, V)
    train, held = (side[:, shared_prefix(rows):] for side in split_rows(rows, 64))
    counts, sizes = count_tokens(train, V), [512, 1024, 2048, 4096, 8192, 16384, 32768]
    held_out = [float(np.isin(held, frequent_tokens(counts, size).numpy()).mean()) for size in sizes]
    counted = [coverage(counts, size) for size in sizes]
    store("coverage", {"command": "python tools/distillation.py coverage --data SAMPLES", "tokens": int(rows.size),
                       "sizes": sizes, "counted": counted, "held_out": held_out})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="what")
    one = commands.add_parser("curve")
    one.add_argument("folder", type=Path)
    one.add_argument("--command", required=True)
    one.add_argument("--name")
    one.add_argument("--before", type=int, default=0)
    two = commands.add_parser("compare")
    two.add_argument("--data", type=Path, required=True)
    two.add_argument("--rows", type=int, default=200)
    two.add_argument("--tokens", type=int, default=80_000)
    two.add_argument("--states", type=Path, default=Path(tempfile.gettempdir()) / f"specdec-states-{os.getuid()}")
    two.add_argument("--only", nargs="*", default=[])
    three = commands.add_parser("coverage")
    three.add_argument("--data", type=Path, required=True)
    given = parser.parse_args()
    if given.what == "coverage": coverage_of(given.data)
    elif given.what == "curve": curve(given.folder, given.command, given.name, given.before)
    else: compare(given.data, given.rows, given.tokens, given.states, given.only)
