"""Record what the page of recorded runs shows: `python tools/record.py`.

Two things. *Runs*: the production loop answers two prompts with three drafters, at three temperatures and three K, in
float32 on the CPU. A source notes each uniform number, and a verify rule notes what it was given and lets one of the
package's rules decide; the times are medians of interleaved repeats without these notes. *Averages*: twenty texts of
each of four prompts at each temperature, and what each drafter and each K would have made of them. Each part is kept in
`build/record` until all are there, so that a second start goes on. `--times` records the runs and keeps the averages,
which no busy machine can change.
"""
import argparse
import json
from collections.abc import Set
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, product
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from specdec.app.registry import PAIRS
from specdec.bench.run import environment
from specdec.drafters.base import Draft, Drafter, NoDrafter
from specdec.drafters.lookup import outcome
from specdec.loop import speculate
from specdec.models.hub import encode, prompts
from specdec.pair import Pair, load_pair
from specdec.panel.playground import RecordingRandom
from specdec.result import Round
from specdec.sampling import RandomSource, SamplingParams, SeededRandom
from specdec.verify import VerifyRule, acceptance_probability, delta, greedy_match, residual, speculative_sampling

ROOT = Path(__file__).resolve().parents[1]
OUT, PARTS = ROOT / "nbs" / "data" / "recorded.json", ROOT / "build" / "record"
VERSE = (
    "{} little boats went out to sea,\nout to sea in the morning.\n"
    "One little boat came back to me,\nback to me in the evening."
)
SONG = "Write the next two verses of this song:\n\n" + "\n\n".join(map(VERSE.format, ("Five", "Four", "Three")))
STORED = {p.id: p.text for p in prompts()}
PROMPTS = {
    "song": ("repeating song", SONG),
    "code": ("Python class", STORED["code_002"]),
    "moon": ("child's question", STORED["conversation_002"]),
    "summary": ("article's summary", STORED["summarization_003"]),
}
DRAFTERS = {
    "smollm2": ("head or lookup", "the default, a trained head, or lookup where that promises more"),
    "smollm2-skip": ("skipped layers", "the target itself, without six of its thirty layers"),
    "smollm2-ngram": ("n-gram lookup", "what followed the same words before"),
}
RUNS = {"prompts": ["song", "moon"], "temperatures": [0.0, 0.7, 1.0], "Ks": [2, 4, 8], "tokens": 32, "seed": 0}
AVERAGES = {
    "prompts": list(PROMPTS), "temperatures": [0.0, 0.4, 0.7, 1.0, 1.3], "Ks": [1, 2, 3, 4, 6, 8], "tokens": 40,
    "texts": 20,
}
REPEATS, SHOWN = 3, 5
SETTINGS = {"prompts": PROMPTS, "drafters": DRAFTERS, "runs": RUNS, "averages": AVERAGES}


def shorter(number, digits: int = 4) -> float:
    "So many significant digits."
    return float(f"{float(number):.{digits}g}")


def decimals(number) -> float:
    "Three decimals, as the page writes them; one digit of what is smaller, and no more than needed of what is whole."
    x = round(float(number), 3) or shorter(number, 1)
    return int(x) if x == int(x) else x


# Runs

def rule(temperature: float) -> VerifyRule:
    "Above temperature 0 speculative sampling, for certain draft tokens too: so each has a number to show."
    return speculative_sampling if temperature else greedy_match


class Recorder:
    "A verify rule that leaves the decision to `rule` and records what led to it."
    def __init__(self, texts: list[str], decode, sampling: SamplingParams):
        self.texts, self.decode, self.sampling, self.rounds = texts, decode, sampling, []
        self.places = {text: i for i, text in enumerate(texts)}

    def place(self, token: int) -> int:
        "Where the token's text stands in the table of texts."
        text = self.decode([token])
        if text not in self.places:
            self.places[text] = len(self.texts)
            self.texts.append(text)
        return self.places[text]

    def position(self, p: Tensor, q: Tensor | None, named: list[int]) -> list:
        """One position under the microscope: how much p and q overlap, and the likeliest tokens of both with those that
        were `named`."""
        of_q = torch.zeros_like(p) if q is None else q
        order = torch.maximum(p, of_q).topk(SHOWN).indices.tolist()
        kept = dict.fromkeys([*named, *(t for t in order if max(p[t], of_q[t]) >= 2e-3)])
        shown = sorted(list(kept)[:SHOWN], key=lambda t: -max(p[t].item(), of_q[t].item()))
        top = [[self.place(t), decimals(p[t]), decimals(of_q[t])] for t in shown]
        return [None if q is None else decimals(acceptance_probability(p, q)), top]

    def verify(self, p, q, tokens, rng: RecordingRandom) -> tuple[int, int]:
        "Decide, and note it."
        before = len(rng.drawn)
        num_accepted, next_token = rule(self.sampling.temperature)(p, q, tokens, rng)
        *tried, drawn = rng.drawn[before:] if self.sampling.temperature else [None]
        count = min(num_accepted + 1, len(tokens))  # draft tokens that were tried
        rows = [delta(p[i], tokens[i]) if q is None else q[i] for i in range(count)]
        positions = [self.position(p[i], rows[i], [tokens[i]] + [next_token] * (i == num_accepted))
                     for i in range(count)]
        if num_accepted == len(tokens): positions.append(self.position(p[num_accepted], None, [next_token]))
        weights = p[num_accepted] if num_accepted == len(tokens) else residual(p[num_accepted], rows[num_accepted])
        self.rounds.append({
            "draft": [self.place(t) for t in tokens],
            "accepted": num_accepted,
            "own": self.place(next_token),
            "p": [shorter(p[i][t]) for i, t in enumerate(tokens[:count])],
            "q": [shorter(rows[i][t]) for i, t in enumerate(tokens[:count])],
            "u": [shorter(u) for u in tried],
            "drawn": None if drawn is None else shorter(drawn),
            "chance": shorter(weights[next_token] / weights.sum()),
            "positions": positions,
        })
        return num_accepted, next_token


def inconsistent(r: dict) -> bool:
    "Whether the shortened numbers of a round would decide otherwise than the loop did."
    statuses = [u < min(1, p / q) for p, q, u in zip(r["p"], r["q"], r["u"])]
    return bool(r["u"]) and statuses != [i < r["accepted"] for i in range(len(statuses))]


def record(pair: Pair, drafter: Drafter, ids: list[int], temperature: float, K: int, texts: list[str]) -> dict:
    "One run, with the texts of its tokens added to the table; `emitted` says how many tokens joined the text."
    rng, sampling = RecordingRandom(RUNS["seed"]), SamplingParams(temperature)
    recorder = Recorder(texts, pair.tokenizer.decode, sampling)
    first, *rounds = speculate(
        pair.target, drafter, ids, sampling, rng, K, RUNS["tokens"], pair.eos_ids, recorder.verify
    )
    for note, r in zip(recorder.rounds, rounds, strict=True): note["emitted"] = len(r.emitted)
    assert not any(map(inconsistent, recorder.rounds)), "four digits are too few for a draw this close: another seed"
    return {"first": recorder.place(first.emitted[0]), "rounds": recorder.rounds}


def timed(pair: Pair, drafter: Drafter, ids: list[int], temperature: float, K: int) -> tuple[list[Round], list[float]]:
    "The same run without notes: its rounds, and the seconds that each took; first the prompt's forward."
    rounds, seconds, before = [], [], perf_counter()
    for r in speculate(
        pair.target, drafter, ids, SamplingParams(temperature), SeededRandom(RUNS["seed"]), K, RUNS["tokens"],
        pair.eos_ids, rule(temperature)
    ):
        now = perf_counter()
        rounds.append(r)
        seconds.append(now - before)
        before = now
    return rounds, seconds


def median_ends(repeats: list[list[float]]) -> list[float]:
    "When each round ends, in seconds since the start, if every round takes the median time of its repeats."
    return [round(end, 4) for end in accumulate(map(median, zip(*repeats, strict=True)))]


def record_runs(pairs: dict[str, Pair], prompt: str, temperature: float) -> dict:
    "All runs of a prompt at a temperature, and the plain one, taken in turn so that all meet the same machine."
    pair, texts = pairs["smollm2"], []
    ids = encode(pair.tokenizer, [{"role": "user", "content": PROMPTS[prompt][1]}])
    grid = {(name, K): (pairs[name].drafter, K) for name, K in product(DRAFTERS, RUNS["Ks"])}
    runs = {
        at: {"prompt": prompt, "drafter": at[0], "temperature": temperature, "K": K,
             **record(pair, drafter, ids, temperature, K, texts)}
        for at, (drafter, K) in grid.items()
    }
    lanes = {"plain": (NoDrafter(), 1), **grid}
    seconds: dict = {at: [] for at in lanes}
    for _, (at, lane) in product(range(REPEATS), lanes.items()):
        rounds, taken = timed(pair, lane[0], ids, temperature, lane[1])
        seconds[at].append(taken)
        table = Recorder(texts, pair.tokenizer.decode, SamplingParams(temperature))
        if at == "plain": said = [table.place(t) for r in rounds for t in r.emitted]
        else: assert [len(r.emitted) for r in rounds[1:]] == [r["emitted"] for r in runs[at]["rounds"]]
    for at, run in runs.items(): run["ends"] = median_ends(seconds[at])
    plain = {"prompt": prompt, "temperature": temperature, "text": said, "ends": median_ends(seconds["plain"])}
    return {"tokens": texts, "plain": [plain], "runs": list(runs.values())}


def joined(parts: list[dict]) -> dict:
    "Several records of runs as one, with one table of texts."
    tokens: dict[str, int] = {}
    found: dict = {"plain": [], "runs": []}
    for part in parts:
        new = [tokens.setdefault(text, len(tokens)) for text in part["tokens"]]
        found["plain"] += [{**lane, "text": [new[t] for t in lane["text"]]} for lane in part["plain"]]
        for run in part["runs"]:
            rounds = [
                {**r, "draft": [new[t] for t in r["draft"]], "own": new[r["own"]],
                 "positions": [[overlap, [[new[t], p, q] for t, p, q in top]] for overlap, top in r["positions"]]}
                for r in run["rounds"]
            ]
            found["runs"].append({**run, "first": new[run["first"]], "rounds": rounds})
    return {"tokens": list(tokens), **found}


# Averages. Speculative decoding leaves the target's distribution as it is. So the texts can come first, from the target
# alone, and every drafter and every K can be tried on the same ones.

@dataclass
class Text:
    "An answer of the target alone, with what a drafter may ask about it."
    prompt: list[int]
    tokens: list[int]        # [n], up to the end of the text
    p: Tensor                # the distribution that each was drawn from, [n, V]
    features: Tensor | None  # of prompt and text without its last token, [L + n - 1, F]


def write_texts(
    target, ids: list[int], sampling: SamplingParams, seeds: list[int], count: int, layers: tuple[int, ...],
    eos_ids: frozenset[int],
) -> list[Text]:
    "Plain decoding, for several seeds at once."
    cache, sources = target.new_cache(len(ids) + count), [SeededRandom(seed) for seed in seeds]
    unread, tokens, rows, states = torch.tensor([ids] * len(seeds)), [], [], []
    while len(tokens) < count:
        output = target.forward(unread, cache, last=1, layers=layers)
        logits, features = output if layers else (output, None)
        rows.append(sampling.probs(logits[:, -1]))
        tokens.append([rng.categorical(p) for rng, p in zip(sources, rows[-1])])
        states.append(features)
        unread = torch.tensor(tokens[-1])[:, None]
    said, p = torch.tensor(tokens).T.tolist(), torch.stack(rows, 1)
    features = torch.cat(states, 1) if layers else None
    ends = [next((i + 1 for i, t in enumerate(text) if t in eos_ids), count) for text in said]
    return [
        Text(ids, text[:n], p[b], None if features is None else features[b])
        for b, (text, n) in enumerate(zip(said, ends))
    ]


class Coupled:
    """Draws guesses for a text that is known already. In the loop the guess comes first, and the text's token is the
    guess itself with probability Σ min(p, q), else comes from the residual. Seen from the text's token x: the guess
    was x with probability min(1, q(x)/p(x)), else it came from where q has too much."""
    def __init__(self, rng: RandomSource, text: Text, vocabulary: Tensor | None = None):
        self.rng, self.text = rng, text
        self.vocabulary = vocabulary  # of a draft that has its own: the target's ids
        self.at: int | None = None    # the place of the next guess; None: nothing is tried any more

    def categorical(self, weights: Tensor) -> int:
        "A guess, given the token that the text has there."
        if self.at is None or self.at >= len(self.text.tokens): return self.rng.categorical(weights)
        p, x = self.text.p[self.at], self.text.tokens[self.at]
        if self.vocabulary is not None and len(weights) == len(self.vocabulary):
            p, places = p[self.vocabulary], (self.vocabulary == x).nonzero()
            x = int(places[0]) if len(places) else None
        self.at += 1
        if x is not None and self.rng.bernoulli(min(1, float(weights[x] / p[x]))): return x
        self.at = None
        return self.rng.categorical(residual(weights, p))


class Along:
    """A draft model along a known text, which it has read in one forward: the same q as token by token. A guess after a
    wrong one is never tried, so it makes none."""
    layers = ()
    def __init__(self, text: list[int], q: Tensor): self.text, self.q = text, q

    def start(self, tokens: list[int], features: Tensor | None, limit: int,
              eos_ids: Set[int] = frozenset()) -> "Along":
        "The first token came with the prompt. It follows one text, so it is its own state."
        self.at = 1
        return self

    def commit(self, tokens: list[int], features: Tensor | None) -> None:
        "The text grew."
        self.at += len(tokens)

    def propose(self, K: int, sampling: SamplingParams, rng: RandomSource) -> Draft:
        "Guesses, up to the first wrong one."
        draft: list[int] = []
        for i in range(self.at, min(self.at + K, len(self.text))):
            draft.append(rng.categorical(self.q[i]))
            if draft[-1] != self.text[i]: break
        return Draft(draft, self.q[self.at:self.at + len(draft)] if draft else None)


def replay(drafter: Drafter, rng: Coupled, text: Text, sampling: SamplingParams, K: int, limit: int) -> list[Round]:
    "The rounds in which the loop would have written the text, after its first token."
    start, said = len(text.prompt), text.tokens

    def known(begin: int, end: int) -> Tensor | None:
        "The features that belong to these positions."
        return None if text.features is None or not drafter.layers else text.features[begin:end]

    state = drafter.start([*text.prompt, said[0]], known(0, start), start + limit, frozenset())
    rounds, at = [], 1
    while at < len(said):
        rng.at, n = at, min(K, limit - at - 1)
        draft = state.propose(n, sampling, rng) if n else Draft([])
        accepted, _ = outcome(draft.tokens, said[at:])
        emitted = said[at:at + accepted + 1]
        state.commit(emitted, known(start + at - 1, start + at - 1 + len(emitted)))
        rounds.append(Round(draft.tokens, accepted, emitted))
        at += len(emitted)
    return rounds


def counted(rounds: list[Round], K: int) -> dict:
    "What the averages need of a text: its rounds and tokens, and by draft position how often a guess was tried, kept."
    tried, kept = [0] * K, [0] * K
    for r in rounds:
        for i in range(min(r.accepted + 1, len(r.drafted))): tried[i] += 1
        for i in range(r.accepted): kept[i] += 1
    return {"rounds": len(rounds), "tokens": sum(len(r.emitted) for r in rounds), "tried": tried, "kept": kept}


def spread(values: list[float]) -> list | None:
    """Mean, its standard error, and the ends between which eight of ten values lie; no error of a single value, and
    nothing at all of none."""
    if not values: return None
    error = np.std(values, ddof=1) / len(values)**.5 if len(values) > 1 else None
    low, high = np.quantile(values, [.1, .9])
    return [None if x is None else shorter(x, 3) for x in (np.mean(values), error, low, high)]


def average(texts: list[dict]) -> dict:
    "The averages over texts; those that end with their first token have no rounds and say nothing."
    texts = [t for t in texts if t["rounds"]]
    return {
        "texts": len(texts),
        "tau": spread([t["tokens"] / t["rounds"] for t in texts]),
        "alpha": spread([sum(t["kept"]) / sum(t["tried"]) for t in texts if sum(t["tried"])]),
    }


def by_position(texts: list[dict]) -> dict:
    "How often the guess at each draft position was tried and kept, in all texts together."
    return {name: np.sum([t[name] for t in texts], 0).tolist() for name in ("tried", "kept")}


def count_texts(pairs: dict[str, Pair], prompt: str, temperature: float) -> dict:
    "Twenty texts of a prompt, one if they are greedy, and what each drafter and K makes of them: `drafter K` → counts."
    pair, sampling, limit = pairs["smollm2"], SamplingParams(temperature), AVERAGES["tokens"]
    seeds = list(range(AVERAGES["texts"] if temperature else 1))
    ids = encode(pair.tokenizer, [{"role": "user", "content": PROMPTS[prompt][1]}])
    texts = write_texts(pair.target, ids, sampling, seeds, limit, pair.drafter.layers, pair.eos_ids)
    vocabulary = pair.drafter.members[1].drafter.head.tokens
    found: dict = {}
    for seed, text in zip(seeds, texts):
        light = pair.target.skip(PAIRS["smollm2-skip"].skip)
        whole = torch.tensor([[*ids, *text.tokens[:-1]]])
        q = sampling.probs(light.forward(whole, light.new_cache(whole.shape[1]), last=len(text.tokens))[0])
        for (name, other), K in product(pairs.items(), AVERAGES["Ks"]):
            drafter = Along(text.tokens, q) if name == "smollm2-skip" else other.drafter
            rng = Coupled(SeededRandom(1000 + seed), text, vocabulary if name == "smollm2" else None)
            rounds = replay(drafter, rng, text, sampling, K, limit)
            found.setdefault(f"{name} {K}", []).append(counted(rounds, K))
    return found


def averages(parts: dict[tuple[str, float], dict]) -> list[dict]:
    "The averages of every drafter, temperature and K: over the texts of each prompt, and over those of all."
    cells = []
    for name, temperature, K in product(DRAFTERS, AVERAGES["temperatures"], AVERAGES["Ks"]):
        at = {"drafter": name, "temperature": temperature, "K": K}
        of = {prompt: parts[prompt, temperature][f"{name} {K}"] for prompt in AVERAGES["prompts"]}
        together = [text for texts in of.values() for text in texts]
        cells.append({**at, "prompt": "all", **average(together), **by_position(together)})
        cells += [{**at, "prompt": prompt, **average(texts)} for prompt, texts in of.items()]
    return cells


# Both

COLUMNS = {
    "rounds": ["draft", "accepted", "own", "p", "q", "u", "drawn", "chance", "positions", "emitted"],
    "cells": ["drafter", "temperature", "K", "prompt", "texts", "tau", "alpha", "tried", "kept"],
}


def packed(data: dict) -> dict:
    "The same, lighter: rounds and averages as rows, and the names of their columns once."
    runs = [{**run, "rounds": [[r[name] for name in COLUMNS["rounds"]] for r in run["rounds"]]} for run in data["runs"]]
    cells = [[c[name] for name in COLUMNS["cells"] if name in c] for c in data["cells"]]
    return {**data, "columns": COLUMNS, "runs": runs, "cells": cells}


def unpacked(data: dict) -> dict:
    "What `packed` was given."
    rounds, cells = data["columns"]["rounds"], data["columns"]["cells"]
    runs = [{**run, "rounds": [dict(zip(rounds, r)) for r in run["rounds"]]} for run in data["runs"]]
    return {**data, "runs": runs, "cells": [dict(zip(cells, c)) for c in data["cells"]]}


def make(kind: str, work, pairs: dict[str, Pair]) -> dict[tuple[str, float], dict]:
    "The parts of a kind, of every prompt and temperature: those that are there, and those that `work` makes."
    what = {"runs": RUNS, "averages": AVERAGES}[kind]
    folder = PARTS / sha256(json.dumps(SETTINGS).encode()).hexdigest()[:8]
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for prompt, temperature in tqdm(list(product(what["prompts"], what["temperatures"])), desc=kind):
        path = folder / f"{kind}-{prompt}-{temperature}.json"
        if not path.exists():
            written = path.with_suffix(".new")
            written.write_text(json.dumps(work(pairs, prompt, temperature)), encoding="utf-8")
            written.replace(path)
        found[prompt, temperature] = json.loads(path.read_text(encoding="utf-8"))
    return found


def main() -> None:
    "Record what is missing, and write the page's data."
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", action="store_true", help="the runs and their times only; the averages stay")
    times = parser.parse_args().times
    if times:
        stored = unpacked(json.loads(OUT.read_text(encoding="utf-8")))
        if stored["settings"] != json.loads(json.dumps(SETTINGS)):
            parser.error(f"{OUT.name} was recorded with other settings: record all of it, without --times")
    pairs = {"smollm2": load_pair("smollm2", device="cpu", dtype="float32")}
    for name in list(DRAFTERS)[1:]: pairs[name] = load_pair(name, "cpu", "float32", target=pairs["smollm2"].target)
    runs = joined(list(make("runs", record_runs, pairs).values()))
    cells = stored["cells"] if times else averages(make("averages", count_texts, pairs))
    data = {
        "command": "python tools/record.py", "model": "SmolLM2-135M-Instruct", "digest": pairs["smollm2"].target.digest,
        "settings": SETTINGS, "repeats": REPEATS, **environment("cpu", "float32"), **runs, "cells": cells,
    }
    OUT.write_text(json.dumps(packed(data), ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    for part in PARTS.glob("*/runs-*.json" if times else "*/*.json"): part.unlink()
    print(f"{len(data['runs'])} runs, {len(cells)} averages, {OUT.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
