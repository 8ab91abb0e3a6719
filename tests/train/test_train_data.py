"The target writes its own texts and reads them once: sampler, questions, shards, rows held out, answers, states."
import json
import os

import numpy as np
import pytest
import torch
from scipy import stats

from helpers import on_a_disk_of, tool
from helpers_training import CPU, V, make_data, make_target
from specdec.app.answers import read_prompts
from specdec.errors import InputError, ModelError
from specdec.models.hub import load_tokenizer, prompts
from specdec.models.loading import load_model
from specdec.train import data as module
from specdec.train.data import (
    SampleConfig,
    States,
    Teacher,
    answer_marks,
    chat_prefix,
    count_tokens,
    coverage,
    draw,
    frequent_tokens,
    in_answers,
    question_starts,
    read_rows,
    sample,
    sample_rows,
    shared_prefix,
    split_rows,
)

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


def test_questions_for_training_are_no_prompts_to_measure_on(tmp_path):
    "Two thousand, each once, the same each time; of code, texts and everyday matters."
    maker, file = tool("questions"), tmp_path / "questions.jsonl"
    asked = maker.questions()
    assert len({*asked}) == len(asked) > 1900 and asked == maker.questions()
    measured = [prompt.text for name in ("held_out", "work") for prompt in prompts(name)]
    measured += [prompt.text for prompt in prompts()]
    assert not {*measured} & {*asked} and not any("{" in text for text in asked if "article" in text.split("\n")[0])
    kinds = {"```python": 400, "Write a Python function": 50, "article": 400, "this text": 200, "paragraph about": 60}
    for words, many in kinds.items(): assert sum(words in text for text in asked) >= many, words
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked), encoding="utf-8")
    assert read_prompts(file) == asked


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

    assert config.in_turn == (0.0, 0.7, 1.0) and SampleConfig().in_turn == (0.7, 1.0)
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
        ("", "no prompt"), ('{"prompt": "a"}\nnonsense', "line 2"), ('{"question": "a"}', "line 1"),
        ('{"prompt": 5}', "line 1"), ('{"prompt": " "}', "line 1"), ("[1]", "line 1"),
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
    with pytest.raises(InputError, match="line 4 "): read_prompts(asked)
    asked.write_text('{"prompt": "a"}\n' + "[" * 10**5 + "\n")
    with pytest.raises(InputError, match="line 2 "): read_prompts(asked)
    asked.write_text('{"prompt": "two\u2028lines"}\n', encoding="utf-8")  # JSON allows that character
    assert read_prompts(asked) == ["two\u2028lines"]


def test_a_shard_that_does_not_fit_says_why_and_leaves_nothing(tmp_path):
    with on_a_disk_of(500):
        with pytest.raises(ModelError, match="File too large"):
            module.write_shard(tmp_path / "a.npy", np.zeros((10, 100), int), V)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def data(target, tmp_path_factory): return make_data(target, tmp_path_factory.mktemp("data"))
def test_rows_are_read_and_checked(data, tmp_path):
    assert read_rows(data, V).shape == (48, 32)
    with pytest.raises(InputError, match="no .npy"): read_rows(tmp_path, V)
    with pytest.raises(InputError, match="another tokenizer"): read_rows(data, 20)
    np.save(tmp_path / "a.npy", np.zeros((2, 5), np.uint16))
    np.save(tmp_path / "b.npy", np.zeros((2, 6), np.uint16))
    with pytest.raises(InputError, match="must be the same"): read_rows(tmp_path, V)
    np.save(tmp_path / "b.npy", np.zeros((2, 5), np.float32))
    with pytest.raises(InputError, match="rows of token ids"): read_rows(tmp_path, V)
    np.save(tmp_path / "b.npy", np.array([[{}]]), allow_pickle=True)
    with pytest.raises(InputError, match="can't be read"): read_rows(tmp_path, V)


def test_a_row_stays_on_its_side(data):
    rows = read_rows(data, V)
    kept, held = split_rows(rows, 6)
    kept_first, held_first = split_rows(rows[:24], 6)
    as_set = lambda rows: {tuple(r) for r in rows.tolist()}
    assert len(kept) + len(held) == len(rows) and not as_set(kept) & as_set(held)
    assert as_set(kept_first) <= as_set(kept) and as_set(held_first) <= as_set(held)
    # one is held out even if no digest asks for it
    for few in (2, 3, 4): assert len(split_rows(rows[:few], 10**9)[1]) == 1
    for none in (rows[:1], rows[[0, 0]]):
        with pytest.raises(InputError, match="nothing to train on"): split_rows(none, 6)


def test_shared_prefix():
    assert shared_prefix(np.array([[1, 2, 3], [1, 2, 4]])) == 2
    assert shared_prefix(np.array([[1, 2], [1, 2]])) == 2 and shared_prefix(np.array([[1, 2], [0, 2]])) == 0


def test_draft_vocabulary():
    counts = count_tokens(np.array([[3, 3, 1], [2, 1, 0]]), 6)
    assert counts.tolist() == [1, 2, 1, 2, 0, 0]
    assert frequent_tokens(counts, 3).tolist() == [0, 1, 3]  # 0 and 2 tie: the lower id
    assert frequent_tokens(counts, 0).tolist() == list(range(6))
    assert coverage(counts, 2) == 4 / 6 and coverage(counts, 6) == 1
    # 2 was known, and occurs as often as 0
    assert frequent_tokens(counts, 3, known=torch.tensor([2, 4])).tolist() == [1, 2, 3]
    assert frequent_tokens(counts, 5, known=torch.tensor([5])).tolist() == [0, 1, 2, 3, 5] and frequent_tokens(
        counts, 5
    ).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(InputError): frequent_tokens(counts, 7)


def test_answers_are_found(folder):
    rows = np.array([[5, 7, 8, 1, 2, 9, 3, 7, 8, 4], [7, 8, 9, 7, 1, 1, 8, 1, 7, 8], [9, 9, 1, 1, 1, 1, 1, 1, 1, 1]])
    expected = np.array([[0, 0, 1, 1, 1, 0, 0, 0, 1, 1], [0, 1, 0, 0, 0, 0, 0, 0, 0, 1], [0] * 10], bool)
    assert (in_answers(rows, ([7, 8], 9)) == expected).all()
    by_hand = np.zeros(rows.shape, bool)  # the same, place by place
    for i, row in enumerate(rows.tolist()):
        inside = False
        for j in range(len(row)):
            inside = row[j - 1:j + 1] == [7, 8] or (inside and row[j] != 9)
            by_hand[i, j] = inside
    assert (by_hand == expected).all()
    # nobody answers: everything counts
    for marks in (None, ([3, 3, 3], 9), ([1] * 11, 9)): assert in_answers(rows, marks).all()
    tokenizer = load_tokenizer(folder)
    assert answer_marks(tokenizer) is None  # this template has nothing that opens an answer
    tokenizer.chat_template += "{% if add_generation_prompt %}<user> w1{% endif %}"
    assert answer_marks(tokenizer) == ([0, 4], 1)
    tokenizer.chat_template = None
    assert answer_marks(tokenizer) is None


def test_kept_states_are_the_same_states(folder, data, tmp_path, target):
    rows = read_rows(data, V)
    teacher = Teacher(target, torch.arange(30), (1, 2))
    kept, plain = States(teacher, rows, tmp_path), States(teacher, rows, None)
    for _ in range(2):
        for a, b in zip(kept([3, 1]), plain([3, 1])): assert torch.equal(a, b)
    assert [i for i in range(len(rows)) if kept.kept.read(i)] == [1, 3]
    expected = plain([3, 1])[1]
    teacher.read = None  # what is kept isn't computed again
    assert torch.equal(States(teacher, rows, tmp_path)([1, 3])[1], expected.flip(0))


def shorter(file): os.truncate(file, file.stat().st_size - 1)
def longer(file): os.truncate(file, file.stat().st_size + 1)
def much_shorter(file): os.truncate(file, 10)
def zeros(file):
    shorter(file)
    longer(file)
def flipped(file):
    data = bytearray(file.read_bytes())
    data[-40] ^= 1
    file.write_bytes(data)
def other_place(file): file.write_bytes(b"!" + file.read_bytes())


@pytest.mark.parametrize("damage", [shorter, longer, much_shorter, zeros, flipped, other_place])
def test_damaged_states_are_never_trained_on(data, tmp_path, target, damage):
    """Cut off, filled up with zeros, one bit changed: what isn't as it was written counts as not kept, and the target
    is asked again."""
    rows, teacher = read_rows(data, V), Teacher(target, torch.arange(30), (1, 2))
    expected = States(teacher, rows, tmp_path)([0, 5])[1]
    (file,) = tmp_path.glob("*.states")
    damage(file)
    again = States(teacher, rows, tmp_path)
    assert torch.equal(again([0, 5])[1], expected)
    teacher.read = None
    assert torch.equal(again([0, 5])[1], expected)  # and they are kept again


def test_a_file_that_is_cut_off_while_it_is_used(data, tmp_path, target):
    "Mapped into memory it would be a bus error."
    rows, teacher = read_rows(data, V), Teacher(target, torch.arange(30), (1, 2))
    states = States(teacher, rows, tmp_path)
    expected = states([0, 5])[1]
    (file,) = tmp_path.glob("*.states")
    os.truncate(file, 0)
    assert torch.equal(states([0, 5])[1], expected)


def test_a_full_disk_is_told_and_what_was_kept_stays(data, tmp_path, target):
    rows, teacher = read_rows(data, V), Teacher(target, torch.arange(30), (1, 2))
    states = States(teacher, rows, tmp_path)
    expected = states([0])[1]
    (file,) = tmp_path.glob("*.states")
    with on_a_disk_of(file.stat().st_size + 100):
        with pytest.raises(ModelError, match="--keep-states"): states([1])
    assert states.kept.read(0) and not states.kept.read(1)
    teacher.read = None
    assert torch.equal(States(teacher, rows, tmp_path)([0])[1], expected)
