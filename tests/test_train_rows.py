"Rows to train on and rows held out, answers in them, and the draft vocabulary."
import numpy as np
import pytest
import torch

from helpers_training import CPU, V, make_data, make_target
from specdec.core import InputError
from specdec.loading import load_model
from specdec.models import load_tokenizer
from specdec.train.data import (
    answer_marks,
    count_tokens,
    coverage,
    frequent_tokens,
    in_answers,
    read_rows,
    shared_prefix,
    split_rows,
)

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder): return load_model(folder, CPU, torch.float32)


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
