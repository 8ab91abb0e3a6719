"""Record real runs for the site's sliders: `python tools/record.py --out nbs/data/recorded.json`.

The production loop runs over a grid of drafters, temperatures and K, in float32 on the CPU, with a source that notes
each uniform number and a verify rule that notes what it was given and then lets the package's own rule decide. A page
shows these numbers and computes nothing that could differ from them. Each run is written as it ends; a second start
goes on.
"""
import argparse
import json
from pathlib import Path

import torch

from specdec.models import encode, prompts
from specdec.pairs import Pair, load_pair
from specdec.playground.session import RecordingSource
from specdec.rejection import acceptance_probability, delta, greedy_match, residual, speculative_sampling
from specdec.sampling import Transform
from specdec.speculative import speculate

DRAFTERS = {
    "smollm2-skip": "the target without six of its layers",
    "smollm2-head": "feature head: trained to guess from what the target computed",
    "smollm2-ngram": "n-gram lookup: what followed the same words before",
}
TEMPERATURES = (0.0, 0.4, 0.7, 1.0, 1.3)
KS = (1, 2, 3, 4, 6, 8)
PROMPT, NEW_TOKENS, SEED, SHOWN = "conversation_002", 40, 0, 6


class Recorder:
    "A verify rule that leaves the decision to the package's rule and records what led to it."
    def __init__(self, texts: list[str], decode):
        self.texts, self.decode, self.rounds = texts, decode, []
        self.places = {text: i for i, text in enumerate(texts)}

    def place(self, token: int) -> int:
        "Where the token's text stands in the table of texts."
        text = self.decode([token])
        if text not in self.places:
            self.places[text] = len(self.texts)
            self.texts.append(text)
        return self.places[text]

    def position(self, p: torch.Tensor, q: torch.Tensor | None, named: list[int]) -> dict:
        """One position under the microscope: how much p and q overlap, and the likeliest tokens of both with those that
        were `named`."""
        of_q = torch.zeros_like(p) if q is None else q
        order = torch.maximum(p, of_q).topk(SHOWN).indices.tolist()
        kept = dict.fromkeys([*named, *(t for t in order if max(p[t], of_q[t]) >= 5e-4)])
        shown = sorted(list(kept)[:SHOWN], key=lambda t: -max(p[t].item(), of_q[t].item()))
        top = [[self.place(t), shorter(p[t], 3), shorter(of_q[t], 3)] for t in shown]
        return {"overlap": None if q is None else shorter(acceptance_probability(p, q)), "top": top}

    def verify(self, p, q, tokens, source: RecordingSource) -> tuple[int, int]:
        "Decide as the package does, and note it."
        before = len(source.drawn)
        rule = speculative_sampling if source.sampled else greedy_match
        accepted, own = rule(p, q, tokens, source)
        *tried, drawn = source.drawn[before:] if source.sampled else [None]
        count = min(accepted + 1, len(tokens))  # draft tokens that were tried
        rows = [delta(p[i], tokens[i]) if q is None else q[i] for i in range(count)]
        positions = [self.position(p[i], rows[i], [tokens[i]] + [own] * (i == accepted)) for i in range(count)]
        if accepted == len(tokens): positions.append(self.position(p[accepted], None, [own]))
        weights = p[accepted] if accepted == len(tokens) else residual(p[accepted], rows[accepted])
        self.rounds.append({
            "draft": [self.place(t) for t in tokens],
            "accepted": accepted,
            "own": self.place(own),
            "p": [shorter(p[i][t]) for i, t in enumerate(tokens[:count])],
            "q": [shorter(rows[i][t]) for i, t in enumerate(tokens[:count])],
            "u": [shorter(u) for u in tried],
            "drawn": None if drawn is None else shorter(drawn),
            "chance": shorter(weights[own] / weights.sum()),
            "positions": positions,
        })
        return accepted, own


def shorter(number, digits: int = 4) -> float:
    "So many significant digits."
    return float(f"{float(number):.{digits}g}")


def record(pair: Pair, drafter: str, temperature: float, K: int, question: list[dict], texts: list[str]) -> dict:
    "One run, with the texts of its tokens added to the table; the rounds hold what the loop emitted."
    source = RecordingSource(SEED)
    source.sampled = temperature > 0
    recorder = Recorder(texts, pair.tokenizer.decode)
    ids = encode(pair.tokenizer, question)
    first, *rounds = speculate(
        pair.target, pair.drafter, ids, Transform(temperature), source, K, NEW_TOKENS, pair.eos_ids, recorder.verify
    )
    for note, r in zip(recorder.rounds, rounds, strict=True):
        note["emitted"] = [recorder.place(t) for t in r.emitted]
    return {
        "drafter": drafter, "temperature": temperature, "K": K, "first": recorder.place(first.emitted[0]),
        "rounds": recorder.rounds,
    }


def inconsistent(r: dict) -> bool:
    "Whether the shortened numbers of a round would decide otherwise than the loop did."
    fates = [u < min(1, p / q) for p, q, u in zip(r["p"], r["q"], r["u"])]
    return bool(r["u"]) and fates != [i < r["accepted"] for i in range(len(fates))]


def main() -> None:
    "Record what is missing of the grid."
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, help="stop after so many new runs")
    args = parser.parse_args()
    question = next(p for p in prompts() if p.id == PROMPT)
    settings = {
        "command": "python tools/record.py --out nbs/data/recorded.json", "model": "SmolLM2-135M-Instruct",
        "dtype": "float32", "torch": torch.__version__, "seed": SEED, "prompt": question.text, "drafters": DRAFTERS,
        "temperatures": list(TEMPERATURES), "Ks": list(KS),
    }
    data = (
        json.loads(args.out.read_text(encoding="utf-8"))
        if args.out.exists()
        else {**settings, "tokens": [], "runs": []}
    )
    if any(data[name] != value for name, value in settings.items()):
        parser.error(f"{args.out} was recorded with other settings: remove it, and record anew")
    done = {(r["drafter"], r["temperature"], r["K"]) for r in data["runs"]}
    grid = [(d, t, k) for d in DRAFTERS for t in TEMPERATURES for k in KS if (d, t, k) not in done]
    pairs = {}
    for drafter, temperature, K in grid[:args.runs]:
        pair = pairs.setdefault(drafter, None) or load_pair(drafter, device="cpu", dtype="float32")
        pairs[drafter] = pair
        run = record(pair, drafter, temperature, K, question.messages, data["tokens"])
        assert not any(
            map(inconsistent, run["rounds"])
        ), "four digits are too few for a draw this close: choose another seed"
        data["runs"].append(run)
        data["runs"].sort(key=lambda r: (list(DRAFTERS).index(r["drafter"]), r["temperature"], r["K"]))
        args.out.write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
        print(drafter, temperature, K, len(run["rounds"]), "rounds")


if __name__ == "__main__":
    main()
