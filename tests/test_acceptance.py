"""Acceptance by decree, and drafts that are drawn or certain."""
import json
from fractions import Fraction as F

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from helpers_bench import record
from helpers_training import make_target
from specdec.app.config import lenience_of
from specdec.bench import run as r
from specdec.bench.grid import BenchmarkConfig, Grid, GridPair, ways
from specdec.bench.report import read_runs
from specdec.bench.run import Record
from specdec.drafters.lookup import NGramDrafter
from specdec.engine.synthetic import SyntheticAcceptance
from specdec.errors import InputError
from specdec.lossless.black_box import check_decoder
from specdec.lossless.check import check_verify
from specdec.lossless.enumerate import exact_distribution
from specdec.models.loading import load
from specdec.pair import Pair
from specdec.sampling import SeededRandom
from specdec.verify import is_promised, sample_and_match, speculative_sampling

# --- acceptance by decree

def test_the_rates_are_kept_exactly():
    p = np.array([[F(1, 3), F(2, 3)]] * 4, dtype=object)
    def program(rng): return SyntheticAcceptance((.5, .25))(p, None, [0, 0, 0], rng)
    joint = exact_distribution(program)
    shares = [float(sum(w for (n, _), w in joint.items() if n == k)) for k in range(4)]
    assert shares == [1 / 2, 3 / 8, 3 / 32, 1 / 32]
    assert float(sum(w for (n, x), w in joint.items() if n == 0 and x == 1)) == pytest.approx(1 / 3)


def test_it_says_everywhere_that_it_is_lossy(target):
    rule = SyntheticAcceptance((.5, .25))
    assert is_promised(rule, 0.0) is is_promised(rule, 1.0) is False and "lossy" in str(rule)
    result = Pair(target, NGramDrafter()).generate([1, 2, 1, 2], K=2, max_new_tokens=6, verify=rule)
    assert result.is_lossless is False and "lossy" in result.summary() and "lossy" in result.settings["verify"]
    with pytest.raises(InputError, match="can't be kept in a file"): lenience_of(rule)


@pytest.mark.parametrize("rates", [(), (1.1,), (-.1,), ("a",), (float("nan"),), (True,), None])
def test_rates_that_cant_be(rates):
    with pytest.raises(InputError, match="from 0 to 1"): SyntheticAcceptance(rates)


def test_checks_refuse_it_and_others_pass_after():
    p = torch.full((2, 3), 1 / 3)
    def box(rule):
        def generate(prompt, n, seed):
            rng = SeededRandom(seed)
            return [rule(p, None, [0], rng)[1] for _ in range(n)]
        return generate
    plan = dict(target=lambda ids: torch.zeros(3), prompt=[0], samples=60, weak=True, progress=False)
    with pytest.raises(InputError, match="lossy on purpose"): check_decoder(box(SyntheticAcceptance(1.0)), **plan)
    assert SyntheticAcceptance(1.0)(p, None, [0], SeededRandom(0))[0] == 1  # outside it works again
    check_decoder(box(sample_and_match), **plan)
    assert not check_verify(SyntheticAcceptance(1.0)).lossless and check_verify(speculative_sampling).lossless


# --- in a benchmark

@pytest.fixture(scope="module")
def folder(tmp_path_factory): return make_target(tmp_path_factory.mktemp("target"))

@pytest.fixture(scope="module")
def target(folder): return load(str(folder), "cpu", "float32")

SYNTHETIC = "synthetic:1/0.5"

def test_a_grid_with_it(folder):
    grid = Grid(methods=["plain", SYNTHETIC], K=[2, 4, "adaptive"])
    assert ways(grid) == [("plain", None), (SYNTHETIC, 2), (SYNTHETIC, 4)]
    assert BenchmarkConfig(pair="p", method=SYNTHETIC, K=2).decoder_label == "lossy-synthetic-K2"
    with pytest.raises(ValueError, match="needs a K"): BenchmarkConfig(pair="p", method=SYNTHETIC)


@pytest.mark.parametrize("name", ["synthetic", "synthetic:", "synthetic:1.5", "synthetic:a", "synthetic:0.5/"])
def test_names_that_cant_be(name):
    with pytest.raises(ValueError, match="synthetic: and rates"): Grid(methods=["plain", name])
    with pytest.raises(ValueError, match="unknown method"): BenchmarkConfig(pair="p", method=name, K=2)


@pytest.mark.parametrize("draft", [True, False], ids=["a draft model", "an untrained head"])
def test_a_run_has_costs_and_no_speedup(folder, tmp_path, draft):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"text": "w1 w2 w3 w4 w1 w2", "domain": "code"}) + "\n")
    pair = GridPair(name="small", target=str(folder), draft=str(folder) if draft else None)
    grid = Grid(pairs=[pair], methods=["plain", SYNTHETIC], K=[3],
                dtypes=["float32"], device="cpu", threads=1, prompts=str(prompts), max_new_tokens=40)
    file = tmp_path / "runs.jsonl"
    outcome = r.bench_run(grid, file)
    assert not outcome.failed
    lossy = [record for record in outcome.records if record.config.method == SYNTHETIC]
    assert [x.result.is_lossless for x in lossy] == [False] and lossy[0].parted is None
    rounds = lossy[0].result.rounds[:-1]
    assert all(len(x.drafted) == 3 for x in rounds) and all(x.accepted >= 1 for x in rounds)
    row, = r.synthetic_figures(outcome.records)
    assert row["lossy"] and row["K"] == 3 and row["v"] > 0 and row["c"] > 0 and "speedup" not in row
    assert [x["method"] for x in r.run_figures(outcome.records)] == ["plain"]
    said = r.run_text(outcome)
    assert "Synthetic acceptance: lossy" in said and said.count(SYNTHETIC) == 1
    assert {line.method for line in read_runs(file).runs} == {"plain"}


def test_costs_are_those_that_were_put_in():
    rng = np.random.default_rng(0)
    made = [record(rng), record(rng, "model", 3)]
    made[1]["config"]["method"] = SYNTHETIC
    some = [Record(BenchmarkConfig(**m["config"]), result=r.result_from_data(m["result"] | {"token_text": {}}))
            for m in made]
    row, = r.synthetic_figures(some)
    assert row["c"] == pytest.approx(.12, rel=.1) and row["v"] == pytest.approx(1.15 * .99, rel=.05)
    assert r.synthetic_figures(some[1:]) == [] and "Synthetic" not in r.run_text(r.Measured(some[1:]))


# --- drawn or certain

@given(st.lists(st.integers(0, 9), min_size=2, max_size=5), st.lists(st.integers(0, 9), min_size=2, max_size=5))
@settings(max_examples=examples(40), deadline=None)
def test_how_often_each_kind_of_draft_is_accepted(a, b):
    "Every branch of the rules, in fractions: Σ min(p, q), Σ q·p, and p of the likeliest."
    n = min(len(a), len(b))
    p, q = (np.array([F(x + 1, sum(w[:n]) + n) for x in w[:n]], dtype=object) for w in (a, b))
    def accepted(rule, certain):
        def program(rng):
            token = int(q.argmax()) if certain else rng.categorical(q)
            return rule(np.stack([p, p]), None if certain else q[None], [token], rng)[0]
        return exact_distribution(program).get(1, F(0))
    drawn, match = sum(map(min, p, q)), sum(p * q)
    assert accepted(speculative_sampling, False) == drawn >= match == accepted(sample_and_match, False)
    assert accepted(speculative_sampling, True) == accepted(sample_and_match, True) == p[q.argmax()]
