"""What a block is worth beside the shipped head, kept in nbs/data/blocks.json:

    python tools/blocks.py alpha --data SAMPLES NAME=FOLDER …
    python tools/blocks.py kinds NAME=FOLDER …
    python tools/blocks.py draft --dtype float32 NAME=FOLDER …
    python tools/blocks.py speed --dtype float32 NAME=FOLDER …

`alpha`: of each block, and of the head, α by draft position on the rows that `specdec distill` holds out of SAMPLES (a
folder of shards), with 95 % intervals. `kinds`: the last line of each run's own log, to compare kinds of blocks after
as many tokens. `draft`: what a draft of five costs, in plain steps. `speed`: the package's
fifteen prompts at temperatures 0 and 1, plain decoding, the head and the blocks in turn, each with several K, where
drafts are drawn by block verification, too, and beside lookup, as a pair chooses: the median of plain decoding's times
by theirs, and tokens a round. Plain is the faster of the target's two layouts. Each replaces its own part of the file
and leaves the others.
"""
import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

DATA = Path(__file__).resolve().parent.parent / "nbs" / "data" / "blocks.json"
KS, NEW_TOKENS, DRAFT = (3, 5), 64, 5


def store(part: str, name: str, content) -> None:
    "Replace one entry of one part of the file."
    from specdec.models.files import write_json
    whole = json.loads(DATA.read_text()) if DATA.exists() else {}
    write_json(DATA, whole | {part: whole.get(part, {}) | {name: content}})


def alpha(data: Path, folders: dict[str, Path]) -> None:
    "α by position of the head and of each block, on the same rows."
    from distillation import interval, measured
    from specdec.drafters.block import load_block
    from specdec.drafters.head import load_head, share_embedding
    from specdec.drafters.load import shipped
    from specdec.models.hub import find_model, load_tokenizer
    from specdec.models.loading import load_model
    from specdec.train import student
    from specdec.train.data import answer_marks, read_rows
    from specdec.train.loop import Training
    from specdec.train.student import DistillConfig
    target = load_model(find_model("smollm2"), torch.device("cpu"), torch.float32)
    rows, marks = read_rows(data, target.vocab_size), answer_marks(load_tokenizer(find_model("smollm2")))
    for name, folder in {"head": shipped("smollm2-head"), **folders}.items():
        kind, load = ("head", load_head) if name == "head" else ("block", load_block)
        trained = share_embedding(load(folder, target, torch.float32), target)
        with tempfile.TemporaryDirectory() as out, mock.patch.object(student, f"_first_{kind}", lambda *_: trained):
            config = DistillConfig(kind=kind, out=out, evaluate_rows=10**6)
            summary, each = measured(Training(config, target, rows, marks=marks))
        content = {**summary, "rows": each.shape[-1], "intervals": interval(each)}
        if kind == "block":
            run = folder / "training" / "log.jsonl"
            lines = [json.loads(line) for line in run.read_text().splitlines()] if run.exists() else []
            content["tokens"] = lines[-1]["tokens"] if lines else None
            content["curve"] = [[line["tokens"], line["alpha"]] for line in lines]
            content["weights"] = sum(p.numel() for p in trained.parameters())
        print(name, json.dumps(content), flush=True)
        store("alpha", name, content)


def kinds(folders: dict[str, Path]) -> None:
    "What training logged last: α by position, after so many tokens."
    for name, folder in folders.items():
        last = json.loads((folder / "training" / "log.jsonl").read_text().splitlines()[-1])
        config = json.loads((folder / "training" / "config.json").read_text())
        store("kinds", name, {what: last[what] for what in ("tokens", "alpha", "tau")} | {
            what: config[what] for what in ("layers", "markov", "block", "evaluate_rows")})


def seconds(result) -> float: return result.total_time - result.time_to_first_token


def draft_seconds(target, drafter, ids: list[int]) -> float:
    "A draft of five, in the loop's order: the features of one more token first. The median."
    from specdec.sampling import SamplingParams, SeededRandom
    features = target.forward(torch.tensor([ids]), target.new_cache(len(ids)), last=1, layers=drafter.layers)[1][0]
    half, took = len(ids) // 2, []
    state = drafter.start(ids[:half], features[:half - 1], len(ids) + DRAFT)
    for i in range(half, len(ids)):
        target.forward(torch.tensor([[ids[i]]]), target.new_cache(1))  # as between two drafts: the caches are cold
        start = time.perf_counter()
        state.propose(DRAFT, SamplingParams(1.0), SeededRandom(0))
        took.append(time.perf_counter() - start)
        state.commit([ids[i]], features[i - 1:i])
    return statistics.median(took)


def target_and_drafters(dtype: str, folders: dict[str, Path]):
    "The target in both layouts, and its drafters by name: the head that ships, and the blocks."
    from specdec.drafters.load import load_drafter, shipped
    from specdec.models.loading import load
    target, fast = load("smollm2", "cpu", dtype), load("smollm2", "cpu", dtype, use="plain")
    named = {"head": shipped("smollm2-head"), **folders}
    drafters = {name: load_drafter(folder, target).drafter for name, folder in named.items()}
    for drafter in drafters.values(): drafter.stop_below = 0.0  # a draft of K has K tokens
    return [target, fast], drafters


def draft(dtype: str, folders: dict[str, Path]) -> None:
    "What a draft of five costs."
    from specdec.bench.run import environment
    from specdec.models.hub import encode, prompts
    targets, drafters = target_and_drafters(dtype, folders)
    ids = encode(targets[0].tokenizer, prompts()[10].text)[:96]
    step = min(map(step_seconds, targets, [ids] * 2))
    prices = {name: draft_seconds(targets[0], drafter, ids) / step for name, drafter in drafters.items()}
    print(dtype, "a draft of five, in plain steps:", prices, "step", step)
    where = environment("cpu", dtype)
    store("draft", dtype, {"prices": prices, "step": step, "tokens": DRAFT, "threads": torch.get_num_threads(),
                           "processor": where["processor"]})


def step_seconds(target, ids: list[int]) -> float:
    "A plain step behind them, the median."
    cache, took = target.new_cache(len(ids) + 1), []
    target.forward(torch.tensor([ids]), cache, last=1)
    for _ in range(50):
        start = time.perf_counter()
        target.forward(torch.tensor([ids[-1:]]), cache)
        took.append(time.perf_counter() - start)
        cache.rollback(len(ids))
    return statistics.median(took)


def speed(dtype: str, folders: dict[str, Path]) -> None:
    "The fifteen prompts, everything in turn."
    from specdec.bench.run import environment
    from specdec.drafters.choose import HybridDrafter
    from specdec.drafters.lookup import SuffixDrafter
    from specdec.engine.block import block_verification
    from specdec.models.hub import prompts
    from specdec.pair import Pair
    targets, drafters = target_and_drafters(dtype, folders)
    plains, found = [Pair(target) for target in targets], {}
    pairs = {name: Pair(targets[0], drafter) for name, drafter in drafters.items()}
    choosing = {f"lookup and {name}": Pair(targets[0], HybridDrafter(SuffixDrafter(), drafter))
                for name, drafter in drafters.items()}
    for temperature in (0.0, 1.0):
        ways: dict = {(name, K): (pair, dict(K=K)) for name, pair in pairs.items() for K in KS}
        whole = dict(K=DRAFT, verify=block_verification)
        if temperature: ways |= {(f"{name}, block verification", DRAFT): (pair, whole) for name, pair in pairs.items()}
        ways |= {(name, "chosen"): (pair, {}) for name, pair in choosing.items()}
        runs: dict = {way: [] for way in ways}
        for prompt in prompts():
            how = dict(max_new_tokens=NEW_TOKENS, temperature=temperature, seed=1)
            alone = min((pair.generate(prompt.messages, method="plain", **how) for pair in plains), key=seconds)
            step = seconds(alone) / max(1, alone.num_tokens - 1)
            for way, (pair, more) in ways.items():
                result = pair.generate(prompt.messages, **more, **how)
                runs[way].append((step * (result.num_tokens - 1) / seconds(result), result.tokens_per_step))
        for (name, K), kept in runs.items():
            ratio, tau = (statistics.median(column) for column in zip(*kept))
            found[f"{name}, T = {temperature:g}, K = {K}"] = {"speed": ratio, "tau": tau}
            print(dtype, temperature, name, K, round(ratio, 3), round(tau, 3), flush=True)
    where = environment("cpu", dtype)
    store("speed", dtype, {"runs": found, "threads": torch.get_num_threads(), "processor": where["processor"],
                           "prompts": len(prompts())})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="what")
    one, two, three, four = (commands.add_parser(name) for name in ("alpha", "speed", "draft", "kinds"))
    one.add_argument("--data", type=Path, required=True)
    for each in (two, three): each.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "int4"])
    for each in (one, two, three, four): each.add_argument("folders", nargs="*", metavar="NAME=FOLDER")
    given = parser.parse_args()
    named = {name: Path(folder) for name, folder in (each.split("=", 1) for each in given.folders)}
    if given.what == "alpha": alpha(given.data, named)
    elif given.what == "kinds": kinds(named)
    elif given.what == "draft": draft(given.dtype, named)
    else: speed(given.dtype, named)
