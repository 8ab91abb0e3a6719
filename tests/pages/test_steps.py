"""The last two steps of the path: what their pages say of stored data holds, their data is what they take it for, and
each step leads to the next. (The notebooks themselves are run, with their exercises, by test_exercises.py.)"""
import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from specdec.speedup import tokens_per_round
from specdec.train.data import shared_prefix

NBS = Path(__file__).parents[2] / "nbs"
STEPS = sorted((NBS / "path").glob("0*.ipynb"))


def texts(path: Path, kind: str) -> list[str]:
    "The cells of a notebook of one kind."
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


@pytest.mark.parametrize("step, following", list(pairwise(STEPS)), ids=lambda path: path.stem)
def test_each_step_leads_to_the_next(step, following):
    assert f"({following.name})" in texts(step, "markdown")[-1]


# When rows are no longer free

def gains(alpha: float, dtype: str) -> dict[int, tuple[float, int]]:
    "For each batch the best S by the stored prices, and its K, as the page computes it."
    found = {}
    stored = json.loads((NBS / "data" / "batch_prices.json").read_text())
    for entry in stored["devices"]["cpu"]["entries"]:
        if entry["dtype"] != dtype or not entry["greedy"]["c"]: continue  # of other models, no head's
        ((first, further),) = entry["greedy"]["c"].values()
        found[entry["batch_size"]] = max((tokens_per_round(alpha, K) / (v + first + (K - 1) * further), K)
                                         for K, v in enumerate(entry["greedy"]["verify"][:8], 1))
    return found


def last_batch(alpha: float, dtype: str) -> int:
    return max((B for B, (S, _) in gains(alpha, dtype).items() if S > 1), default=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_by_the_stored_prices_drafts_stop_paying_and_better_ones_stop_later(dtype):
    bad, middling, good = (last_batch(alpha, dtype) for alpha in (.5, .7, .9))
    assert 1 <= bad <= middling <= good and bad < good
    assert gains(.5, dtype)[32][0] < 1 < gains(.5, dtype)[1][0]
    for alpha in (.5, .7, .9): assert gains(alpha, dtype)[32][0] < .7 * gains(alpha, dtype)[1][0]


def test_the_steps_last_figures_are_those_of_the_table():
    "The saved output of 07 is made from the stored prices."
    cells = json.loads((NBS / "path" / "07_batches.ipynb").read_text(encoding="utf-8"))["cells"]
    (said,) = ["".join(output["text"]) for cell in cells for output in cell.get("outputs", [])
               if "".join(cell["source"]).startswith("head = load_drafter")]
    for alpha in (.5, .7, .9):
        found = gains(alpha, "float32")
        wanted = [f"{S:.2f} ({K})" if S > 1 else "plain" for S, K in (found[B] for B in (1, 2, 4, 8, 16, 32))]
        (row,) = re.findall(rf"^α = {alpha} +(.*)$", said, re.M)
        assert re.split(r" {2,}", row.strip()) == wanted


# Train a head

def test_the_words_to_train_on_are_rows_of_the_default_model():
    rows = np.load(NBS / "data" / "own_words.npy", allow_pickle=False)
    assert rows.shape == (128, 448) and rows.dtype == np.uint16 and rows.max() < 49_152
    assert len(np.unique(rows, axis=0)) == 128
    assert f"START = {shared_prefix(rows) - 1} " in "\n".join(texts(NBS / "path" / "08_train.ipynb", "code"))


def test_the_last_run_of_the_shipped_head_was_worth_it():
    heads = json.loads((NBS / "data" / "distillation.json").read_text(encoding="utf-8"))["heads"]
    before, after = (heads["results"][name] for name in ("before", "after"))
    for name in ("alpha", "greedy"):
        more = after["more"][name]
        assert more["mean"] == pytest.approx(np.subtract(after[name], before[name]), abs=1e-5)
        assert all(.02 < low < mean < high for low, mean, high in zip(more["low"], more["mean"], more["high"]))
    gains = [after["more"][name]["mean"] for name in ("alpha", "greedy")]
    assert np.mean(gains[0]) > np.mean(gains[1])   # its loss cares about the whole of p
    assert gains[0][4] > .8 * gains[0][0] and .15 < after["tau"] - before["tau"] < .2


def test_each_doubling_brings_about_the_same():
    lines = json.loads((NBS / "data" / "distillation.json").read_text(encoding="utf-8"))["curve"]["scratch"]["lines"]
    at = {line["tokens"]: line["alpha"][0] for line in lines}
    doubled = [at[179_200 * 2**i] for i in range(4)]
    assert all(.025 < gain < .055 for gain in np.diff(doubled))
