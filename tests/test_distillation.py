"Training a drafter: sampler, losses, resuming, several processes."
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.train import distillation
from specdec.autoregressive import Transform
from specdec.core import InputError, ModelError, TorchSource
from specdec.train.distillation import (LOSSES, DistillConfig, HeldOut, NarrowLM, SampleConfig, States, Teacher, Training, answer_marks, chat_prefix, check_run, claim, count_tokens,
                                  coverage, distill, distillation_loss, draw, entropies, frequent_tokens, hard_label, in_answers, kl, load_checkpoint, load_draft_model, make_optimizers,
                                  measure, narrow_ids, question_starts, read_prompts, read_rows, rows_of_step, sample, sample_rows, save_checkpoint, schedule, shared_prefix, small_embedding, split_rows,
                                  step_weights, tokens_of_round, total_variation, training_tensors, write_shard, written_whole)
from specdec.drafters.heads import HeadDrafter, load_head, output_rows
from specdec.models import load_tokenizer
from specdec.pairs import load
from specdec.speculative import ModelDrafter, speculate
from specdec.loading import load_model

torch.set_num_threads(1)
V, CPU = 50, torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A target of four layers with random weights, and its tokenizer."
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=V, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                         max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None)
    model = LlamaForCausalLM(config)
    for p in model.parameters(): p.data.add_(torch.randn_like(p) * 0.1)
    model.model.norm.weight.data.mul_(4)  # it has opinions
    model.save_pretrained(folder)
    words = ["<user>", "<end>", "[UNK]"] + [f"w{i}" for i in range(V - 3)]
    plain = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]", eos_token="<end>", additional_special_tokens=["<user>"])
    tokenizer.chat_template = "{% for m in messages %}<user> {{ m['content'] }} <end>{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(folder): return load_model(folder, CPU, torch.float32)


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = sample_rows(target, [[0]] * 48, 32, 1.0, torch.Generator().manual_seed(1))
    write_shard(folder / "a.npy", rows[:24].numpy(), V)
    write_shard(folder / "b.npy", rows[24:].numpy(), V)
    return folder


def settings(folder, data, out, **more):
    "A run of twelve steps."
    return DistillConfig(**dict(target=str(folder), data=str(data), out=str(out), tokens=12 * 4 * 32, batch=4, vocab=30, held_out=6, evaluate_rows=4, evaluate_every=3,
                                checkpoint_every=3, warmup=2, hidden=64, dtype="float32", device="cpu") | more)


# the sampler

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
    "At temperature 0 the batch makes the same text as a plain loop without a cache; with a seed it makes the same rows again."
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
    config = SampleConfig(str(folder), str(tmp_path / "a"), tokens=2 * 3 * 12, prompts=str(asked), length=12, batch=3, device="cpu", dtype="float32")
    assert config.temperatures == (0.0, 0.7, 1.0) and SampleConfig().temperatures == (0.7, 1.0)
    first, second = (np.load(file).tolist() for file in sorted(sample(config).glob("*.npy")))
    for n, row in enumerate(first + second): assert row[:len(starts[n % 2])] == starts[n % 2]
    assert first[0] == first[2] and second[0] != second[2]  # greedy, then drawn
    seen = []
    def instead(model, mine, length, temperature, *rest): return seen.append(temperature) or torch.zeros(len(mine), length)
    monkeypatch.setattr(distillation, "sample_rows", instead)
    sample(SampleConfig(**config.__dict__ | dict(out=str(tmp_path / "b"), tokens=5 * 3 * 12)))
    assert seen == [0.0, 1.0, 0.7, 1.0, 0.7]  # a question is answered greedily once
    asked.write_text(json.dumps({"prompt": "w8"}))
    with pytest.raises(InputError, match="begun with other settings: starts"): sample(config)


@pytest.mark.parametrize("text, error", [("", "no prompt"), ('{"prompt": "a"}\nnonsense', "Line 2"), ('{"question": "a"}', "Line 1"), ('{"prompt": 5}', "Line 1"), ('{"prompt": " "}', "Line 1"), ("[1]", "Line 1")])
def test_prompts_are_checked(tmp_path, text, error):
    (tmp_path / "asked.jsonl").write_text(text)
    with pytest.raises(InputError, match=error): read_prompts(tmp_path / "asked.jsonl")
    with pytest.raises(InputError, match="can't be read"): read_prompts(tmp_path / "none.jsonl")


def test_sampling_goes_on_where_it_stopped(folder, tmp_path):
    config = SampleConfig(str(folder), str(tmp_path / "a"), tokens=3 * 4 * 16, length=16, batch=4, device="cpu", dtype="float32")
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
    for part in (0, 1): sample(SampleConfig(**config.__dict__ | dict(out=str(tmp_path / "b"))), part, 2)  # two processes share the shards out
    assert all((np.load(tmp_path / "b" / n) == b).all() for n, b in zip(names, before))


def test_prefix_is_the_chat_up_to_the_user(folder):
    from specdec.models import load_tokenizer
    tokenizer = load_tokenizer(folder)
    assert chat_prefix(tokenizer) == [0]
    tokenizer.chat_template = None
    assert chat_prefix(tokenizer) == [1]


@pytest.mark.parametrize("wrong", [dict(tokens=0), dict(length=0), dict(batch=0), dict(temperatures=()), dict(temperatures=(-1.0,)), dict(temperatures=(float("inf"),)), dict(temperatures=(float("nan"),)), dict(seed=-1), dict(top_k=1.5)])
def test_sample_settings_are_checked(wrong):
    with pytest.raises(InputError): SampleConfig(**wrong)


# rows

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
    for few in (2, 3, 4): assert len(split_rows(rows[:few], 10**9)[1]) == 1  # one is held out even if no digest asks for it
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
    assert frequent_tokens(counts, 3, known=torch.tensor([2, 4])).tolist() == [1, 2, 3]  # 2 was known, and occurs as often as 0
    assert frequent_tokens(counts, 5, known=torch.tensor([5])).tolist() == [0, 1, 2, 3, 5] and frequent_tokens(counts, 5).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(InputError): frequent_tokens(counts, 7)
    assert narrow_ids(torch.tensor([1, 3]), 5).tolist() == [2, 0, 2, 1, 2]


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
    for marks in (None, ([3, 3, 3], 9), ([1] * 11, 9)): assert in_answers(rows, marks).all()  # nobody answers: everything counts
    tokenizer = load_tokenizer(folder)
    assert answer_marks(tokenizer) is None  # this template has nothing that opens an answer
    tokenizer.chat_template += "{% if add_generation_prompt %}<user> w1{% endif %}"
    assert answer_marks(tokenizer) == ([0, 4], 1)
    tokenizer.chat_template = None
    assert answer_marks(tokenizer) is None


# losses

def fractions(*values): return [Fraction(v) for v in values]


def test_losses_are_exact():
    p, q = fractions("1/2", "1/4", "1/4"), fractions("1/4", "1/2", "1/4")
    tensors = lambda x: torch.tensor([float(v) for v in x], dtype=torch.float64)
    P, log_q, label = tensors(p), tensors(q).log(), torch.tensor(1)
    assert kl(P, log_q, label).item() == pytest.approx(0.25 * np.log(2), abs=1e-12)  # ½ log 2 − ¼ log 2
    assert kl(P, log_q, label, floor=entropies(P)).item() == kl(P, log_q, label).item()
    assert Fraction(total_variation(P, log_q, label).item()).limit_denominator(1000) == 1 - sum(map(min, p, q)) == Fraction(1, 4)
    assert hard_label(P, log_q, label).item() == pytest.approx(np.log(2))
    assert hard_label(P, log_q, torch.tensor(-1)).item() == 0
    for name in ("kl", "tv"): assert LOSSES[name](P, P.log(), label).item() == pytest.approx(0, abs=1e-12)
    assert kl(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]).log(), label[None]).isfinite()  # 0 log 0 is 0


def test_gradients_agree_with_torch():
    torch.manual_seed(0)
    logits, p = torch.randn(4, 9, dtype=torch.float64, requires_grad=True), torch.randn(4, 9, dtype=torch.float64).softmax(-1)
    labels = torch.tensor([0, 3, 8, -1])
    ours, = torch.autograd.grad(kl(p, logits.log_softmax(-1), labels).sum(), logits)
    torch.testing.assert_close(ours, logits.softmax(-1) - p)
    ours, = torch.autograd.grad(hard_label(p, logits.log_softmax(-1), labels).sum(), logits)
    theirs, = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum"), logits)
    torch.testing.assert_close(ours, theirs)
    for loss in LOSSES.values(): assert torch.autograd.gradcheck(lambda l: loss(p, l.log_softmax(-1), labels), logits)


def test_tau_is_the_expected_length_of_a_round():
    a = fractions("1/2", "1/3", "3/4")
    expected = 1 + a[0] + a[0] * a[1] + a[0] * a[1] * a[2]
    assert tokens_of_round(torch.tensor([float(x) for x in a], dtype=torch.float64)).item() == pytest.approx(float(expected))
    assert step_weights(3, 0.5) == [4 / 7, 2 / 7, 1 / 7]


# one step

def test_every_row_once_per_epoch():
    seen = [i for step in range(5) for i in rows_of_step(step, 4, 10, seed=0)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10)) and seen[:10] != seen[10:]
    assert rows_of_step(3, 4, 10, 0) == seen[12:16] and rows_of_step(3, 4, 10, 1) != seen[12:16]


def test_schedules():
    for kind in ("trapezoid", "cosine"):
        rates = [schedule(s, 100, 5, kind) for s in range(100)]
        assert rates[0] == pytest.approx(0.2, abs=0.01) and max(rates) <= 1 and rates[4] > 0.98 and 0 < rates[-1] < 0.06
        assert rates[5:] == sorted(rates[5:], reverse=True)
    assert schedule(79, 100, 5, "trapezoid") == 1 > schedule(79, 100, 5, "cosine")
    assert [schedule(s, 100, 5, "trapezoid") for s in range(80)] == [schedule(s, 200, 5, "trapezoid") for s in range(80)]  # a longer run begins the same


def test_muon_gets_the_matrices_inside(folder, data, tmp_path, target):
    run = Training(settings(folder, data, tmp_path), target, read_rows(data, V))
    names = {id(p): n for n, p in run.student.module.named_parameters()}
    muon = {names[id(p)] for g in run.optimizers["muon"].param_groups for p in g["params"]}
    adamw = {names[id(p)] for g in run.optimizers["adamw"].param_groups for p in g["params"]}
    assert "lm_head.weight" in adamw and "fc.weight" in muon and len(muon) == 8
    assert muon | adamw == {n for n, p in run.student.module.named_parameters() if p.requires_grad} and not muon & adamw
    assert list(make_optimizers(run.student.module, settings(folder, data, tmp_path, optimizer="adamw"))) == ["adamw"]


def test_a_step_is_compared_with_the_right_position(folder, data, tmp_path, target):
    "A student that says what the target says at each position has loss 0 and α 1; shifted by one place it has not."
    rows = read_rows(data, V)
    run = Training(settings(folder, data, tmp_path, vocab=0), target, rows)
    ids, states = run.states([0, 1, 2])

    class Oracle:
        steps = 3
        def __init__(self, shift): self.shift = shift
        def predictions(self, ids, features, steps, start, where):
            logits = torch.cat([target.forward(row[None], target.new_cache(32)) for row in ids]).roll(self.shift, 1)
            for _ in range(steps): yield logits[:, start:][where]

    for shift, right in ((0, True), (1, False)):
        loss = distillation_loss(Oracle(shift), run.teacher, ids, states, run.config, run.start, run.counts[:3, run.start:]).item()
        found = measure(Oracle(shift), run.teacher, run.held, run.start)
        assert (abs(loss) < 1e-4) == right and (abs(found["tau"] - 6) < 1e-3) == right
        assert all((abs(a - 1) < 1e-4) == right for a in found["alpha"] + found["greedy"])


def test_measured_alpha_is_what_the_decoder_accepts(folder, data, tmp_path, target):
    "Σ min(p, q) with the whole p, on a draft vocabulary that lacks tokens."
    run = Training(settings(folder, data, tmp_path), target, read_rows(data, V))
    found, by_hand = run.measure(), []
    drafter = HeadDrafter(run.student.head, target)
    ids = run.held.ids[0].tolist()
    for L in range(run.start + 1, 32):
        logits, features = target.forward(torch.tensor([ids[:L]]), target.new_cache(32), layers=run.student.layers)
        drafter.prefill(ids[:L], features[0, :-1], 40)
        q = drafter.propose(1, Transform(1.0), TorchSource(0)).q[0]
        by_hand.append(torch.minimum(logits[0, -1].softmax(-1), q).sum().item())
    one = HeldOut(*(getattr(run.held, name)[:1, :31] for name in ("ids", "states", "normalisers", "likeliest", "counts")))  # the last position's prediction exists only in the batch
    alpha = measure(run.student, run.teacher, one, run.start, 5)["alpha"][0]
    assert alpha == pytest.approx(np.mean(by_hand), abs=1e-4) and 0 < found["tau"] - 1 < 5


def test_answers_alone_are_learned_and_measured(folder, data, tmp_path, target):
    "What stands outside of answers changes neither the loss nor its gradient; α and τ are those of the places inside."
    rows = read_rows(data, V) % 40
    rows[:, 9], rows[:, 25] = 48, 49
    run = Training(settings(folder, data, tmp_path), target, rows, marks=([48], 49))
    assert run.counts.sum(1).tolist() == [16] * len(run.counts)  # from the opening to the last token before the end
    ids, states = run.states([0, 1])
    loss = lambda states, where: distillation_loss(run.student, run.teacher, ids, states, run.config, run.start, where)
    where = run.counts[:2, run.start:]
    other = states.clone()
    other[:, 26:] = 7 * torch.randn_like(other[:, 26:])  # the target says something else after the answer
    assert loss(other, where).item() == loss(states, where).item()
    assert loss(other, torch.ones_like(where)).item() != loss(states, torch.ones_like(where)).item()
    assert loss(states, torch.zeros_like(where)).item() == 0
    each = [distillation_loss(run.student, run.teacher, ids[i:i + 1], states[i:i + 1], run.config, run.start, where[i:i + 1]).item() for i in range(2)]
    assert loss(states, where).item() == pytest.approx(np.mean(each), rel=1e-5)
    mine = rows_of_step(0, 4, len(run.counts), 0)
    ids, states = run.states(mine)
    asked = loss(states, run.counts[mine, run.start:]).item()
    assert run.take_step() == pytest.approx(asked, rel=1e-6) and asked != pytest.approx(loss(states, torch.ones_like(run.counts[mine, run.start:])).item(), rel=1e-3)
    with pytest.raises(InputError, match="nothing to measure on"): Training(settings(folder, data, tmp_path), target, rows[:, :13], marks=([48], 49))  # four places of an answer
    (answers, held_answers), (plain, held_plain) = split_rows(rows, 6), split_rows(read_rows(data, V) % 40, 6)
    for train, held, error in ((answers, held_plain, "nothing to measure on"), (plain, held_answers, "nothing to learn from")):
        with pytest.raises(InputError, match=error): Training(settings(folder, data, tmp_path), target, np.concatenate((train, held)), marks=([48], 49))
    held = run.held
    assert held.counts.sum(1).tolist() == [16] * len(held.counts)
    held.counts[1:] = False
    inside = measure(run.student, run.teacher, held, run.start)
    alone = HeldOut(*(getattr(held, name)[:1, :26] for name in ("ids", "states", "normalisers", "likeliest", "counts")))
    found = measure(run.student, run.teacher, alone, run.start)  # the same text cut off where its answer ends
    assert inside["tau"] == pytest.approx(found["tau"], abs=1e-4) and inside["alpha"] == pytest.approx(found["alpha"], abs=1e-4)


# runs

@pytest.mark.parametrize("kind", ["head", "lm"])
def test_training_helps_and_the_drafter_loads(folder, data, tmp_path, target, kind):
    out = distill(settings(folder, data, tmp_path / "d", kind=kind, tokens=80 * 4 * 32, lr=3e-3))
    lines = [json.loads(line) for line in (out / "training" / "log.jsonl").read_text().splitlines()]
    assert lines[0]["tokens"] == 0 and lines[-1]["tokens"] == 80 * 4 * 32
    assert lines[-1]["loss"] < lines[1]["loss"] / 2
    if kind == "head": drafter = HeadDrafter(load_head(out, target), target)
    else:
        draft = load_draft_model(out, CPU, torch.float32)
        assert isinstance(draft, NarrowLM) and draft.vocab_size == V
        assert torch.isfinite(draft.forward(torch.tensor([[0, 49]]), draft.new_cache(4))).sum(-1).tolist() == [[30, 30]]
        drafter = ModelDrafter(draft, V)
    rounds = list(speculate(target, drafter, [0, 3], Transform(0.0), TorchSource(0), 3, 20, frozenset()))
    text = [t for r in rounds for t in r.emitted]
    plain = [0, 3]
    for _ in range(20): plain.append(int(target.forward(torch.tensor([plain]), target.new_cache(30), last=1).argmax()))
    assert text == plain[2:]


def test_a_whole_vocabulary_is_an_ordinary_checkpoint(folder, data, tmp_path):
    out = distill(settings(folder, data, tmp_path / "d", kind="lm", vocab=0, tokens=4 * 32))
    assert load(str(out), "cpu", "float32").vocab_size == V and not (out / "draft_tokens.safetensors").exists()


def test_small_embedding_keeps_what_fits():
    rows = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)) @ torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    small = small_embedding(rows, 3)  # nothing is lost: the rows have rank 3
    likeness = lambda x: torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(x).T
    torch.testing.assert_close(likeness(small), likeness(rows), atol=1e-4, rtol=1e-4)
    assert small.std().item() == pytest.approx(rows.std().item(), rel=1e-4)


def weights(out): return load_file(Path(out) / "training" / "checkpoint.safetensors")


SCRIPT = """
import json, sys, torch
torch.set_num_threads(1)
from specdec.train.distillation import DistillConfig, distill
distill(DistillConfig(**json.loads(sys.argv[1])))
"""


def test_resumes_after_kill_9_with_the_same_weights(folder, data, tmp_path):
    whole, killed = (settings(folder, data, tmp_path / name, tokens=40 * 4 * 32, keep_states=str(tmp_path / "states" / name)) for name in ("whole", "killed"))
    distill(whole)
    log = tmp_path / "killed" / "training" / "log.jsonl"
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, json.dumps(killed.__dict__)], stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 3): time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was done before it could be killed"
    with open(log, "a") as file: file.write('{"step": 39, "half a li')  # what a kill can leave behind
    assert weights(killed.out).keys() == weights(whole.out).keys()
    assert any(not torch.equal(a, weights(whole.out)[name]) for name, a in weights(killed.out).items())  # it was really interrupted
    distill(killed)
    assert all(torch.equal(a, weights(whole.out)[name]) for name, a in weights(killed.out).items())
    logs = [[{k: v for k, v in json.loads(line).items() if k not in ("seconds", "loss")} for line in (Path(c.out) / "training" / "log.jsonl").read_text().splitlines()] for c in (whole, killed)]
    assert logs[0] == logs[1]
    drafters = [load_file(Path(c.out) / "model.safetensors") for c in (whole, killed)]
    assert all(torch.equal(a, drafters[1][name]) for name, a in drafters[0].items())


def test_a_finished_run_can_go_on_and_a_changed_one_cannot(folder, data, tmp_path):
    config = settings(folder, data, tmp_path / "d")
    distill(config)
    before = weights(config.out)
    distill(config)  # nothing left to do
    assert all(torch.equal(a, before[name]) for name, a in weights(config.out).items())
    distill(DistillConfig(**config.__dict__ | dict(tokens=15 * 4 * 32)))
    assert any(not torch.equal(a, before[name]) for name, a in weights(config.out).items())
    with pytest.raises(InputError, match="loss was 'kl' and is 'tv'"): distill(DistillConfig(**config.__dict__ | dict(loss="tv")))
    (tmp_path / "d" / "training" / "checkpoint.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match="can't be resumed"): distill(config)


def test_a_run_that_has_begun_keeps_its_texts(folder, data, tmp_path, monkeypatch):
    "More tokens to train on don't mean other rows to train on."
    asked = []
    def written(config, rank, count, target):
        asked.append(config.tokens)
        return shutil.copytree(data, config.out)
    monkeypatch.setattr(distillation, "sample", written)
    config = DistillConfig(**settings(folder, data, tmp_path / "d").__dict__ | dict(data=None))
    distill(config)
    distill(DistillConfig(**config.__dict__ | dict(tokens=15 * 4 * 32)))
    assert asked == [config.tokens]


def test_a_run_that_was_killed_early_begins_its_log_again(folder, data, tmp_path, target):
    config = settings(folder, data, tmp_path / "d")
    (tmp_path / "d" / "training").mkdir(parents=True)
    (tmp_path / "d" / "training" / "log.jsonl").write_text('{"step": 0}\n{"step": 3, "al')  # no checkpoint was written yet
    distill(config)
    steps = [json.loads(line)["step"] for line in (tmp_path / "d" / "training" / "log.jsonl").read_text().splitlines()]
    assert steps == [0, 3, 6, 9, 12]


@pytest.fixture
def no_texts(monkeypatch):
    "Fail where the target would write its texts."
    def refuse(*arguments): raise AssertionError("texts were written")
    monkeypatch.setattr(distillation, "sample", refuse)


@pytest.mark.parametrize("more, error, says", [
    (dict(vocab=V + 1), InputError, "draft vocabulary"), (dict(kind="lm", vocab=V + 1), InputError, "draft vocabulary"), (dict(kind="lm", hidden=128), InputError, "wider"),
    (dict(weights="target"), ModelError, "EAGLE-3"), (dict(out="file"), InputError, "can't be made"), (dict(keep_states="file/states"), InputError, "can't be made")],
    ids=["vocab", "small vocab", "hidden", "weights", "out", "states"])
def test_what_cannot_be_trained_is_told_before_texts_are_written(folder, data, tmp_path, no_texts, more, error, says):
    (tmp_path / "file").write_text("in the way")
    paths = {name: str(folder if more[name] == "target" else tmp_path / more[name]) for name in more.keys() & {"out", "weights", "keep_states"}}
    with pytest.raises(error, match=says): distill(replace(settings(folder, None, tmp_path / "new"), **more | paths, data=None))


def test_a_target_of_another_family_is_told_before_texts_are_written(tmp_path, no_texts):
    from transformers import GPT2Config, GPT2LMHeadModel
    GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=32, n_layer=3, n_head=2, n_positions=64)).save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match="our own decoder"): distill(replace(settings(tmp_path / "other", None, tmp_path / "new"), data=None))


def test_a_batch_is_shared_out_evenly(folder, data, tmp_path, target):
    with pytest.raises(InputError, match="evenly among 3 processes"): check_run(settings(folder, data, tmp_path / "new"), target, 3)
    check_run(settings(folder, data, tmp_path / "new"), target, 2)


def test_damaged_records_are_told(folder, data, tmp_path):
    config = settings(folder, data, tmp_path / "d")
    distill(config)
    training = tmp_path / "d" / "training"
    for name, damage, says in (("log.jsonl", '{"step": 0}\n{"st\n', "log.jsonl, line 2"), ("config.json", "{", "can't be read"), ("config.json", "3", "can't be read")):
        (training / name).write_text(damage)
        with pytest.raises(ModelError, match=says): distill(config)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_head_for_a_target_whose_layers_cannot_be_copied(data, tmp_path, family):
    "It begins with the target's vocabulary instead, unless a layer was asked for; and it learns."
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
    Config, Model = dict(qwen2=(Qwen2Config, Qwen2ForCausalLM), qwen3=(Qwen3Config, Qwen3ForCausalLM))[family]
    Model(Config(vocab_size=V, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128)).save_pretrained(tmp_path / "target")
    other = load_model(tmp_path / "target", CPU, torch.float32)
    def begun(name, **more): return Training(settings(tmp_path / "target", data, tmp_path / name, **more), other, read_rows(data, V))
    first, expected = begun("a"), begun("b", init="target")
    for a, b in zip(first.student.head.parameters(), expected.student.head.parameters()): assert torch.equal(a, b)
    losses = [first.take_step() for _ in range(first.steps)]
    assert losses[-1] < losses[0]
    with pytest.raises(InputError, match="biases or norms"): begun("c", init="layer")


def test_the_seed_decides(folder, data, tmp_path):
    found = []
    for i, seed in enumerate((0, 0, 1)):
        distill(settings(folder, data, tmp_path / str(i), seed=seed, tokens=2 * 4 * 32, evaluate_every=2))
        found.append(weights(tmp_path / str(i)))
    same = lambda a, b: all(torch.equal(t, b[name]) for name, t in a.items())
    assert same(found[0], found[1]) and not same(found[0], found[2])


def test_kept_states_are_the_same_states(folder, data, tmp_path, target):
    rows = read_rows(data, V)
    teacher = Teacher(target, torch.arange(30), (1, 2))
    kept, plain = States(teacher, rows, tmp_path), States(teacher, rows, None)
    for _ in range(2):
        for a, b in zip(kept([3, 1]), plain([3, 1])): assert torch.equal(a, b)
    assert kept.done.sum() == 2
    expected = plain([3, 1])[1]
    teacher.read = None  # what is kept isn't computed again
    assert torch.equal(States(teacher, rows, tmp_path)([1, 3])[1], expected.flip(0))


def test_two_processes_train_as_one(folder, data, tmp_path, target):
    "Started by accelerate's launcher on two CPU processes: equal weights on both, and the same as one process makes of the same batches."
    one, two = (settings(folder, data, tmp_path / name, tokens=6 * 4 * 32, evaluate_every=6, checkpoint_every=6) for name in ("one", "two"))
    distill(one)
    script = tmp_path / "run.py"
    script.write_text("""
import json, os, sys, torch
torch.set_num_threads(1)
import specdec.train.distillation as d
from safetensors.torch import save_file
config, train = d.DistillConfig(**json.loads(sys.argv[1])), d.train
def watched(training):
    yield from train(training)
    save_file(d.training_tensors(training.student.module, {}), f"{config.out}-rank{os.environ['RANK']}.safetensors")
d.train = watched
d.distill(config)
""")
    subprocess.run([sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
                    "--main_process_port", "0", str(script), json.dumps(two.__dict__)], check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120)
    ranks = [load_file(f"{two.out}-rank{r}.safetensors") for r in (0, 1)]
    alone, begun = weights(one.out), training_tensors(Training(one, target, read_rows(data, V)).student.module, {})
    for name, a in ranks[0].items():
        assert torch.isfinite(a).all() and torch.equal(a, ranks[1][name])
        assert (a - alone[name]).norm() < 0.25 * (begun[name] - alone[name]).norm()  # sums in another order, and Muon's products are in bfloat16


@pytest.mark.parametrize("kind", ["head", "lm"])
def test_training_goes_on_from_a_drafter(folder, data, target, tmp_path, kind):
    "With its weights, as they were rounded when it was saved, and with as many tokens as it had: here the same ones, since the texts are the same."
    first = distill(settings(folder, data, tmp_path / "first", kind=kind))
    again = settings(folder, data, tmp_path / "second", kind=kind, weights=str(first), vocab=20, layers=3, seed=5, hidden=128)
    begun = Training(again, target, read_rows(data, V))
    kept = load_file(first / "model.safetensors")
    weights = {name: p.detach() for name, p in begun.student.module.named_parameters() if p.requires_grad}
    assert weights.keys() == {name for name in kept if name not in ("d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")}
    for name, p in weights.items(): assert torch.equal(p, kept[name].float()), name
    assert len(begun.student.tokens) == 30 and torch.equal(begun.student.tokens, begun.teacher.tokens)
    before = json.loads((tmp_path / "first/training/log.jsonl").read_text().splitlines()[-1])
    assert begun.measure()["alpha"] == pytest.approx(before["alpha"], abs=0.01)
    assert (distill(again) / "model.safetensors").exists()


def test_a_head_learns_the_frequent_tokens_of_new_texts(folder, data, target, tmp_path):
    "Tokens that occur no more make room for new ones; the others keep their rows, and those that nobody needs the place of stay."
    first = distill(settings(folder, data, tmp_path / "first"))
    old = load_head(first, target, torch.float32)
    known = old.draft_tokens.tolist()
    new = [token for token in range(V) if token not in known][:4]
    few = np.array(known[5:15] + new)  # the new texts have these tokens only
    begun = Training(settings(folder, data, tmp_path / "second", weights=str(first)), target, few[read_rows(data, V) % len(few)])
    found = begun.student.tokens.tolist()
    assert len(found) == 30 and set(few.tolist()) <= set(found) <= set(known) | set(new) and torch.equal(begun.student.tokens, begun.teacher.tokens)
    head = begun.student.head
    for i, token in enumerate(found):
        expected = old.lm_head.weight[known.index(token)] if token in known else output_rows(target, torch.tensor([token]))[0]
        assert torch.equal(head.lm_head.weight[i], expected)
    for name, p in head.named_parameters():
        if name != "lm_head.weight": assert torch.equal(p, old.get_parameter(name)), name


def test_weights_to_go_on_from_are_checked(folder, data, target, tmp_path):
    first = distill(settings(folder, data, tmp_path / "first", kind="lm"))
    with pytest.raises(InputError, match="would be overwritten"): settings(folder, data, first, weights=str(first))
    with pytest.raises(ModelError): Training(settings(folder, data, tmp_path / "second", weights=str(first)), target, read_rows(data, V))  # a model where a head is expected
    LlamaForCausalLM(LlamaConfig(vocab_size=V - 1, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=1)).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match="no small Llama"): Training(settings(folder, data, tmp_path / "second", kind="lm", weights=str(tmp_path / "other")), target, read_rows(data, V))
    with pytest.raises(InputError, match="either data or prompts"): settings(folder, data, tmp_path / "second", prompts="asked.jsonl")


@pytest.mark.parametrize("wrong", [dict(kind="tree"), dict(loss="mse"), dict(optimizer="sgd"), dict(schedule="step"), dict(init="zero"), dict(tokens=0), dict(lr=0), dict(lr=float("nan")),
                                   dict(hidden=100), dict(vocab=-1), dict(held_out=1), dict(seed=-1), dict(batch=2.5), dict(temperature=0), dict(samples=0), dict(samples=1.5)])
def test_settings_are_checked(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))): DistillConfig(**wrong)


def test_files_are_whole_or_absent(tmp_path):
    with pytest.raises(ZeroDivisionError):
        with written_whole(tmp_path / "a") as path:
            path.write_text("half")
            1 / 0
    assert not (tmp_path / "a").exists()
    claim(tmp_path / "b", {"x": 1})
    claim(tmp_path / "b", {"x": 1})
    with pytest.raises(InputError, match="x was 1 and is 2"): claim(tmp_path / "b", {"x": 2})


def test_checkpoint_holds_everything(tmp_path):
    def fresh():
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        return module, make_optimizers(module, DistillConfig())
    def step(module, optimizers, i):
        (module(torch.full((1, 4), float(i))) ** 2).sum().backward()
        for optimizer in optimizers.values(): optimizer.step(); optimizer.zero_grad()
    module, optimizers = fresh()
    for i in range(3): step(module, optimizers, i)
    save_checkpoint(tmp_path / "c", module, optimizers, {"step": 3})
    other, others = fresh()
    assert load_checkpoint(tmp_path / "c", other, others) == {"step": 3}
    for i in range(3, 5): step(module, optimizers, i); step(other, others, i)
    for name, tensor in training_tensors(module, optimizers).items(): assert torch.equal(tensor, training_tensors(other, others)[name]), name
