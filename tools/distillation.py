"""The data behind the figures of nbs/drafters/12_data.ipynb, 15_export.ipynb and nbs/path/08_train.ipynb, kept in
nbs/data/distillation.json.

The measurements of a run of `specdec distill --out FOLDER`:

    python tools/distillation.py curve FOLDER --command "specdec distill …"

Train the same head with one thing changed at a time, on the same rows and as many tokens, from the start or from a
head that was trained before. α of each on the same held-out rows, with 95 % intervals (held-out rows drawn again, 2,000
times), and what it gains on the first one, row against row:

    python tools/distillation.py compare --data SAMPLES
    python tools/distillation.py compare --data SAMPLES --into since --from HEAD --only "as exported" "minus log alpha"

What is no setting of `specdec distill` is put in its place here, for the run.

What two heads, each with its own vocabulary, are worth on the rows that `specdec distill` holds out of SAMPLES, and
what the second gains, row against row:

    python tools/distillation.py heads --data SAMPLES --before OLD --after NEW

How much of the text small vocabularies cover:

    python tools/distillation.py coverage --data SAMPLES

SAMPLES is a folder of shards as `specdec.train.data.sample` writes them. Each replaces its own part of the file and
leaves the others.
"""

import argparse
import json
import os
import shlex
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch

DATA = Path(__file__).resolve().parent.parent / "nbs" / "data" / "distillation.json"
DRAWN = 2000  # times that the held-out rows are drawn again, for an interval


def overlap(p, log_q): return torch.minimum(p, log_q.exp()).sum(-1)


def hybrid(p, log_q, labels, floor=None):
    """λ KL + (1 − λ)(1 − α) with λ = exp(−3 α) at each place, through which no gradient goes (Samarin et al. 2026,
    arXiv 2602.23881)."""
    from specdec.train.student import kl
    alpha = overlap(p, log_q)
    share = (-3 * alpha.detach()).exp()
    return share * kl(p, log_q, labels, floor) + (1 - share) * (1 - alpha)


def with_norms():
    """A first head with EAGLE-3.1's two changes: a norm on each feature before they are fused, and the normed state
    fed back."""
    from specdec.drafters.head import Head, share_embedding
    from specdec.train import student
    plain = student._first_head

    def first_head(config, target, counts):
        before = plain(config, target, counts)
        shape = replace(before.config, fc_norm=True, norm_output=True)
        head = Head(shape, None if before.d2t is None else before.draft_tokens)
        head.load_state_dict(before.state_dict(), strict=False)
        return share_embedding(head, target)

    return mock.patch.object(student, "_first_head", first_head)


def each_row_twice(read: int):
    "Half as many rows as the run reads, in two passes."
    from specdec.train import loop
    plain = loop.rows_of_step

    def rows_of_step(step, batch, rows, seed): return plain(step, batch, read // 2, seed)

    return mock.patch.object(loop, "rows_of_step", rows_of_step)


def with_loss(loss):
    "Another loss in the place of KL."
    from specdec.train.student import LOSSES
    return mock.patch.dict(LOSSES, kl=loss)


CHANGES = {  # name: what differs from the first: settings, or what is put in place for the run
    "as exported": {},
    "AdamW": dict(optimizer="adamw"),
    "total variation": dict(loss="tv"),
    "hard labels": dict(loss="hard"),
    "two layers": dict(layers=2),
    "vocabulary 4k": dict(vocab=4096),
    "vocabulary 16k": dict(vocab=16384),
    "own layer random": dict(init="target"),
    "all random": dict(init="random"),
    "each row twice": each_row_twice,
    "two steps": dict(unroll=2),
    "minus log alpha": dict(loss="lk"),
    "hybrid": lambda read: with_loss(hybrid),
    "norms": lambda read: with_norms(),
}


def store(part: str, content) -> None:
    "Replace one part of the file."
    from specdec.models.files import write_json
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


def measured(training) -> tuple[dict, np.ndarray]:
    """What `evaluate` says; and of each held-out row, at temperature 1 and greedily, the sum of α over its places by
    position, and how many these are: [2, steps + 1, B]."""
    from specdec.train.loop import DRAFTED, acceptance_chances, acceptance_summary
    held, start = training.held, training.start
    with training.autocast(): chances = acceptance_chances(training.student, training.teacher, held, start, DRAFTED)
    where = held.counts[:, start:]
    counts = where.sum(-1).expand(2, 1, -1)
    return acceptance_summary(chances, where), torch.cat((chances.sum(-1), counts), 1).numpy().astype(float)


def interval(rows: np.ndarray, minus: np.ndarray | None = None) -> dict:
    "α by position, or what it is more than another run's on the same rows, with 95 % intervals."
    drawn = np.random.default_rng(0).integers(0, rows.shape[-1], (DRAWN, rows.shape[-1]))
    def alpha(sums): return sums[:, :-1] / sums[:, -1:]
    found, again = alpha(rows.sum(-1)), np.stack([alpha(rows[..., some].sum(-1)) for some in drawn])
    if minus is not None:
        found = found - alpha(minus.sum(-1))
        again = again - np.stack([alpha(minus[..., some].sum(-1)) for some in drawn])
    low, high = np.quantile(again, (.025, .975), 0)
    return {name: {"mean": found[i].tolist(), "low": low[i].tolist(), "high": high[i].tolist()}
            for i, name in enumerate(("alpha", "greedy"))}


def command_of(given: argparse.Namespace, names: list[str]) -> str:
    "The command that trains these again; what isn't named has its default."
    words = ["python tools/distillation.py compare --data SAMPLES"]
    if given.into != "compare": words.append(f"--into {given.into}")
    if given.weights: words.append("--from HEAD")
    words.append(f"--rows {given.rows} --tokens {given.tokens} --held-out {given.held_out} --batch {given.batch}"
                 f" --rates {given.rates[0]:g} {given.rates[1]:g}")
    if given.into != "compare": words.append("--only " + " ".join(map(shlex.quote, names)))
    return " ".join(words)


def compare(given: argparse.Namespace) -> None:
    "Train with each change on the same rows, and keep the last measurement."
    from specdec.models.devices import pick_dtype
    from specdec.models.hub import find_model, load_tokenizer, weights_digest
    from specdec.models.loading import load_model
    from specdec.train.data import answer_marks, read_rows
    from specdec.train.loop import Training
    from specdec.train.student import DistillConfig
    device, into, states = torch.device("cpu"), given.into, given.states
    target = load_model(find_model("smollm2"), device, pick_dtype("auto", device))
    target.name, target.digest = "smollm2", weights_digest(find_model("smollm2"))
    all_rows, marks = read_rows(given.data, target.vocab_size), answer_marks(load_tokenizer(find_model("smollm2")))
    rows = all_rows[np.random.default_rng(0).permutation(len(all_rows))[:given.rows]]
    found = json.loads(DATA.read_text()).get(into, {}).get("results", {}) if DATA.exists() else {}
    first = states / f"{into}-{next(iter(CHANGES))}.npy"
    lr, matrix_lr = given.rates
    for name, change in CHANGES.items():
        if given.only: unwanted = name not in given.only
        else: unwanted = name in found and found[name]["tokens"] >= given.tokens
        if unwanted: continue
        settings, instead = (change, None) if isinstance(change, dict) else ({}, change)
        with tempfile.TemporaryDirectory() as out, ExitStack() as places:
            if instead: places.enter_context(instead(given.tokens // rows.shape[1]))
            common = dict(batch=given.batch, lr=lr, matrix_lr=matrix_lr)
            config = DistillConfig(out=out, tokens=given.tokens, held_out=given.held_out, evaluate_rows=10**6, warmup=5,
                                   weights=given.weights and str(given.weights), keep_states=str(states),
                                   **common | settings)
            training, losses = Training(config, target, rows, marks=marks), []
            begun, begin = measured(training)[0], time.perf_counter()
            while training.step < training.steps: losses.append(training.take_step())
            seconds = time.perf_counter() - begin
            summary, each = measured(training)
        np.save(states / f"{into}-{name}.npy", each)
        found[name] = {"change": settings, "step": training.step, "tokens": training.step * training.per_step,
                       "loss": sum(losses[-20:]) / len(losses[-20:]), "seconds": round(seconds, 1), **summary,
                       "begun": begun, "intervals": interval(each)}
        if first.exists() and name != next(iter(CHANGES)): found[name]["more"] = interval(each, np.load(first))
        print(name, json.dumps(found[name]), flush=True)
        store(into, {"command": command_of(given, list(found)), "rows": len(rows), "held_out": each.shape[-1],
                     "batch": given.batch, "rates": given.rates, "drawn": DRAWN, "threads": torch.get_num_threads(),
                     "results": found})


def heads(data: Path, folders: dict[str, Path]) -> None:
    "Measure heads that are trained, each with its own vocabulary."
    from specdec.drafters.head import load_head, share_embedding
    from specdec.models.devices import pick_dtype
    from specdec.models.hub import find_model, load_tokenizer
    from specdec.models.loading import load_model
    from specdec.train import student
    from specdec.train.data import answer_marks, read_rows
    from specdec.train.loop import Training
    from specdec.train.student import DistillConfig
    device, found, first = torch.device("cpu"), {}, None
    target = load_model(find_model("smollm2"), device, pick_dtype("auto", device))
    rows, marks = read_rows(data, target.vocab_size), answer_marks(load_tokenizer(find_model("smollm2")))
    for name, folder in folders.items():
        trained = share_embedding(load_head(folder, target, torch.float32), target)
        with tempfile.TemporaryDirectory() as out, \
             mock.patch.object(student, "_first_head", lambda *_: trained):
            config = DistillConfig(out=out, evaluate_rows=10**6)
            summary, each = measured(Training(config, target, rows, marks=marks))
        found[name] = {**summary, "intervals": interval(each)}
        if first is not None: found[name]["more"] = interval(each, first)
        first = each if first is None else first
        print(name, json.dumps(found[name]), flush=True)
    store("heads", {"command": "python tools/distillation.py heads --data SAMPLES --before OLD --after NEW",
                    "held_out": each.shape[-1], "drawn": DRAWN, "results": found})


def coverage_of(data: Path) -> None:
    "Count on the rows to train on, and look at those held out as well."
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
    two.add_argument("--into", default="compare", help="the part of the file")
    two.add_argument("--from", dest="weights", type=Path)
    two.add_argument("--rows", type=int, default=200)
    two.add_argument("--tokens", type=int, default=80_000)
    two.add_argument("--held-out", type=int, default=10, help="one row in so many")
    two.add_argument("--batch", type=int, default=4, help="rows of a step")
    two.add_argument("--rates", type=float, nargs=2, default=[2e-3, 0.04], help="AdamW's and Muon's")
    two.add_argument("--states", type=Path, default=Path(tempfile.gettempdir()) / f"specdec-states-{os.getuid()}")
    two.add_argument("--only", nargs="*", default=[])
    five = commands.add_parser("heads")
    five.add_argument("--data", type=Path, required=True)
    five.add_argument("--before", type=Path, required=True)
    five.add_argument("--after", type=Path, required=True)
    three = commands.add_parser("coverage")
    three.add_argument("--data", type=Path, required=True)
    given = parser.parse_args()
    if given.what == "coverage": coverage_of(given.data)
    elif given.what == "heads": heads(given.data, {"before": given.before, "after": given.after})
    elif given.what == "curve": curve(given.folder, given.command, given.name, given.before)
    else: compare(given)
