"The target writes its own training texts: the sampler, questions of others, and shards."
import json

import numpy as np
import pytest
import torch
from scipy import stats

from helpers import on_a_disk_of
from helpers_training import CPU, V, make_target
from specdec.errors import InputError, ModelError
from specdec.loading import load_model
from specdec.models import load_tokenizer
from specdec.train import data as module
from specdec.train.data import SampleConfig, chat_prefix, draw, question_starts, read_prompts, sample, sample_rows

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder): return load_model(folder, CPU, torch.float32)
def test_draws_follow_the_softmax():
    logits, counts = torch.tensor([[2.0, 1.0, 0.0, -1.0, -30.0]]), {}
    for temperature in (0.5, 1.0):
        found = draw(logits.expand(40000, -1), temperature, torch.Generator().manual_seed(3))
        counts[temperature] = np.bincount(found, minlength=5)[:4]
        expected = (logits[0].double() / temperature).softmax(-1)[:4].numpy()
        assert stats.chisquare(counts[temperature], expected / expected.sum() * 40000).pvalue > 1e-6
    wrong = logits[0, :4].double().softmax(-1).numpy()  # the negative control: the other temperature's law
    assert stats.chisquare(counts[0.5], wrong / wrong.sum() * counts[0.5].sum()).pvalue < 1e-9


def test_draws_are_greedy_at_temperature_zero_and_keep_to_the_top_k():
    logits = torch.randn(200, V, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draw(logits, 0.0, torch.Generator()), logits.argmax(-1))
    found = draw(logits, 5.0, torch.Generator().manual_seed(1), top_k=3)
    assert (logits.topk(3).indices == found[:, None]).any(-1).all()
    assert (found != logits.argmax(-1)).any()


def test_rows_are_what_one_row_at_a_time_would_be(target):
    """At temperature 0 the batch makes the same text as a plain loop without a cache; with a seed it makes the same
    rows again."""
    rows = sample_rows(target, [[0, 5]] * 3, 12, 0.0, torch.Generator())
    text = [0, 5]
    for _ in range(10): text.append(int(target.forward(torch.tensor([text]), target.new_cache(20), last=1).argmax()))
    assert rows.tolist() == [text] * 3
    again = [sample_rows(target, [[0]] * 4, 12, 1.0, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(again[0], again[1]) and not torch.equal(again[0], again[2])
    assert len({tuple(row) for row in again[0].tolist()}) == 4


def test_rows_may_begin_differently(target):
    "Rows in one batch, whose starts end at different places: each is what it would be alone."
    starts = [[0, 5], [7], [3, 1, 4, 1, 5, 9]]
    rows = sample_rows(target, starts, 12, 0.0, torch.Generator())
    assert rows.tolist() == [sample_rows(target, [start], 12, 0.0, torch.Generator())[0].tolist() for start in starts]
    for row, start in zip(rows.tolist(), starts): assert row[:len(start)] == start


def test_questions_of_others_are_answered(folder, tmp_path, monkeypatch):
    tokenizer, asked = load_tokenizer(folder), tmp_path / "asked.jsonl"
    texts = ["w1 w2", "w5", "w6 w7 w8 w9 w10 w11 w12 w13"]
    asked.write_text("\n".join(json.dumps({"prompt": text}) for text in texts) + "\n\n")
    assert read_prompts(asked) == texts
    starts = question_starts(tokenizer, texts, 12)
    assert starts == [[0, 4, 5, 1], [0, 8, 1]]  # the third fills more than half a row
    with pytest.raises(InputError, match="more than half a row of 4"): question_starts(tokenizer, texts[2:], 4)
    config = SampleConfig(
        str(folder), str(tmp_path / "a"), tokens=2 * 3 * 12, prompts=str(asked), length=12, batch=3, device="cpu",
        dtype="float32",
    )

    assert config.temperatures == (0.0, 0.7, 1.0) and SampleConfig().temperatures == (0.7, 1.0)
    first, second = (np.load(file).tolist() for file in sorted(sample(config).glob("*.npy")))
    for n, row in enumerate(first + second): assert row[:len(starts[n % 2])] == starts[n % 2]
    assert first[0] == first[2] and second[0] != second[2]  # greedy, then drawn
    seen = []
    def instead(model, mine, length, temperature, *rest):
        return seen.append(temperature) or torch.zeros(len(mine), length)

    monkeypatch.setattr(module, "sample_rows", instead)
    sample(SampleConfig(**config.__dict__ | dict(out=str(tmp_path / "b"), tokens=5 * 3 * 12)))
    assert seen == [0.0, 1.0, 0.7, 1.0, 0.7]  # a question is answered greedily once
    asked.write_text(json.dumps({"prompt": "w8"}))
    with pytest.raises(InputError, match="begun with other settings: starts"): sample(config)


@pytest.mark.parametrize(
    "text, error",
    [
        ("", "no prompt"), ('{"prompt": "a"}\nnonsense', "Line 2"), ('{"question": "a"}', "Line 1"),
        ('{"prompt": 5}', "Line 1"), ('{"prompt": " "}', "Line 1"), ("[1]", "Line 1"),
    ],
    ids=["empty", "no JSON", "another name", "a number", "a blank", "a list"],
)
def test_prompts_are_checked(tmp_path, text, error):
    (tmp_path / "asked.jsonl").write_text(text)
    with pytest.raises(InputError, match=error): read_prompts(tmp_path / "asked.jsonl")
    with pytest.raises(InputError, match="can't be read"): read_prompts(tmp_path / "none.jsonl")


def test_sampling_goes_on_where_it_stopped(folder, tmp_path):
    config = SampleConfig(
        str(folder), str(tmp_path / "a"), tokens=3 * 4 * 16, length=16, batch=4, device="cpu", dtype="float32"
    )
    sample(config)
    names = sorted(f.name for f in (tmp_path / "a").glob("*.npy"))
    assert names == ["samples-00000.npy", "samples-00001.npy", "samples-00002.npy"]
    before = [np.load(tmp_path / "a" / n) for n in names]
    assert before[0].dtype == np.uint16 and not (before[0] == before[1]).all()
    (tmp_path / "a" / names[1]).unlink()
    (tmp_path / "a" / f"{names[1]}.123.partial").write_bytes(b"half a file")
    sample(config)
    assert all((np.load(tmp_path / "a" / n) == b).all() for n, b in zip(names, before))
    with pytest.raises(InputError, match="seed was 0 and is 1"): sample(SampleConfig(**config.__dict__ | dict(seed=1)))
    # two processes share the shards out
    for part in (0, 1): sample(SampleConfig(**config.__dict__ | dict(out=str(tmp_path / "b"))), part, 2)
    assert all((np.load(tmp_path / "b" / n) == b).all() for n, b in zip(names, before))


def test_prefix_is_the_chat_up_to_the_user(folder):
    tokenizer = load_tokenizer(folder)
    assert chat_prefix(tokenizer) == [0]
    tokenizer.chat_template = None
    assert chat_prefix(tokenizer) == [1]


@pytest.mark.parametrize(
    "wrong",
    [
        dict(tokens=0), dict(length=0), dict(batch=0), dict(temperatures=()), dict(temperatures=(-1.0,)),
        dict(temperatures=(float("inf"),)), dict(temperatures=(float("nan"),)), dict(seed=-1), dict(top_k=1.5),
        dict(tokens=True), dict(batch=True), dict(temperatures=(True,)), dict(temperatures=("1",)), dict(seed=2.0),
    ],
    ids=str,
)
def test_sample_settings_are_checked(wrong):
    with pytest.raises(InputError): SampleConfig(**wrong)


def test_a_bad_prompt_is_named_by_its_line_in_the_file(tmp_path):
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"prompt": "a"}\n\n\n{"question": "b"}\n')
    with pytest.raises(InputError, match="Line 4 "): read_prompts(asked)
    asked.write_text('{"prompt": "a"}\n' + "[" * 10**5 + "\n")
    with pytest.raises(InputError, match="Line 2 "): read_prompts(asked)
    asked.write_text('{"prompt": "two\u2028lines"}\n', encoding="utf-8")  # JSON allows that character
    assert read_prompts(asked) == ["two\u2028lines"]


def test_a_shard_that_does_not_fit_says_why_and_leaves_nothing(tmp_path):
    with on_a_disk_of(500):
        with pytest.raises(ModelError, match="File too large"):
            module.write_shard(tmp_path / "a.npy", np.zeros((10, 100), int), V)
    assert list(tmp_path.iterdir()) == []
