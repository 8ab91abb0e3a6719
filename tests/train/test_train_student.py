"What a drafter is trained to make small, what cannot be in the settings of a run, and where students begin."
import json
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from helpers_training import CPU, V, make_data, make_target, settings
from specdec.drafters.head import load_head, output_rows
from specdec.errors import InputError, ModelError
from specdec.models.loading import load_model
from specdec.train.data import read_rows
from specdec.train.export import distill
from specdec.train.loop import Training
from specdec.train.student import (
    LOSSES,
    DistillConfig,
    entropies,
    hard_label,
    kl,
    minus_log_alpha,
    small_embedding,
    step_weights,
    total_variation,
)


def fractions(*values): return [Fraction(v) for v in values]
def test_losses_are_exact():
    p, q = fractions("1/2", "1/4", "1/4"), fractions("1/4", "1/2", "1/4")
    tensors = lambda x: torch.tensor([float(v) for v in x], dtype=torch.float64)
    P, log_q, label = tensors(p), tensors(q).log(), torch.tensor(1)
    assert kl(P, log_q, label).item() == pytest.approx(0.25 * np.log(2), abs=1e-12)  # ½ log 2 − ¼ log 2
    assert kl(P, log_q, label, floor=entropies(P)).item() == kl(P, log_q, label).item()
    assert (
        Fraction(total_variation(P, log_q, label).item()).limit_denominator(1000)
        == 1 - sum(map(min, p, q))
        == Fraction(1, 4)
    )
    assert minus_log_alpha(P, log_q, label).item() == pytest.approx(-np.log(3 / 4), abs=1e-12)
    apart = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]).log()
    assert minus_log_alpha(*apart, label).isfinite()
    assert hard_label(P, log_q, label).item() == pytest.approx(np.log(2))
    assert hard_label(P, log_q, torch.tensor(-1)).item() == 0
    for name in ("kl", "tv", "lk"): assert LOSSES[name](P, P.log(), label).item() == pytest.approx(0, abs=1e-12)
    assert kl(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]).log(), label[None]).isfinite()  # 0 log 0 is 0


def test_gradients_agree_with_torch():
    torch.manual_seed(0)
    logits, p = torch.randn(4, 9, dtype=torch.float64, requires_grad=True), torch.randn(
        4, 9, dtype=torch.float64
    ).softmax(-1)
    labels = torch.tensor([0, 3, 8, -1])
    ours, = torch.autograd.grad(kl(p, logits.log_softmax(-1), labels).sum(), logits)
    torch.testing.assert_close(ours, logits.softmax(-1) - p)
    ours, = torch.autograd.grad(hard_label(p, logits.log_softmax(-1), labels).sum(), logits)
    (theirs,) = torch.autograd.grad(
        torch.nn.functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum"), logits
    )
    torch.testing.assert_close(ours, theirs)
    for loss in LOSSES.values(): assert torch.autograd.gradcheck(lambda l: loss(p, l.log_softmax(-1), labels), logits)


def test_weights_of_steps_sum_to_one():
    assert step_weights(3, 0.5) == [4 / 7, 2 / 7, 1 / 7]


@pytest.mark.parametrize(
    "wrong",
    [
        dict(kind="tree"), dict(loss="mse"), dict(optimizer="sgd"), dict(schedule="step"), dict(init="zero"),
        dict(tokens=0), dict(lr=0), dict(lr=float("nan")), dict(hidden=100), dict(vocab=-1), dict(held_out=1),
        dict(seed=-1), dict(batch=2.5), dict(temperature=0), dict(samples=0), dict(samples=1.5),
        dict(tokens=True), dict(hidden=64.0), dict(hidden="64"), dict(lr=True), dict(decay="1"), dict(seed=True),
    ],
    ids=str,
)
def test_settings_are_checked(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))): DistillConfig(**wrong)


def test_numbers_of_numpy_become_plain_ones():
    given = dict(tokens=np.int64(9), hidden=np.int32(64), samples=np.int64(3), lr=np.float32(0.5), seed=np.uint8(1))
    plain = DistillConfig(tokens=9, hidden=64, samples=3, lr=0.5, seed=1)
    assert json.loads(json.dumps(asdict(DistillConfig(**given)))) == asdict(plain)


torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder): return load_model(folder, CPU, torch.float32)


@pytest.fixture(scope="module")
def data(target, tmp_path_factory): return make_data(target, tmp_path_factory.mktemp("data"))
def test_small_embedding_keeps_what_fits():
    rows = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)) @ torch.randn(
        3, 16, generator=torch.Generator().manual_seed(1)
    )
    small = small_embedding(rows, 3)  # nothing is lost: the rows have rank 3
    likeness = lambda x: torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(x).T
    torch.testing.assert_close(likeness(small), likeness(rows), atol=1e-4, rtol=1e-4)
    assert small.std().item() == pytest.approx(rows.std().item(), rel=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_head_for_a_target_whose_layers_cannot_be_copied(data, tmp_path, family):
    "It begins with the target's vocabulary instead, unless a layer was asked for; and it learns."
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
    Config, Model = dict(qwen2=(Qwen2Config, Qwen2ForCausalLM), qwen3=(Qwen3Config, Qwen3ForCausalLM))[family]
    Model(
        Config(
            vocab_size=V, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
        )
    ).save_pretrained(tmp_path / "target")

    other = load_model(tmp_path / "target", CPU, torch.float32)
    def begun(name, **more):
        return Training(settings(tmp_path / "target", data, tmp_path / name, **more), other, read_rows(data, V))

    first, expected = begun("a"), begun("b", init="target")
    for a, b in zip(first.student.head.parameters(), expected.student.head.parameters()): assert torch.equal(a, b)
    losses = [first.take_step() for _ in range(first.steps)]
    assert losses[-1] < losses[0]
    with pytest.raises(InputError, match="biases or norms"): begun("c", init="layer")


@pytest.mark.parametrize("kind", ["head", "block", "lm"])
def test_training_goes_on_from_a_drafter(folder, data, target, tmp_path, kind):
    """With its weights, as they were rounded when it was saved, and with as many tokens as it had: here the same ones,
    since the texts are the same."""
    first = distill(settings(folder, data, tmp_path / "first", kind=kind))
    again = settings(
        folder, data, tmp_path / "second", kind=kind, weights=str(first), vocab=20, layers=3, seed=5, hidden=128
    )
    begun = Training(again, target, read_rows(data, V))
    kept = load_file(first / "model.safetensors")
    weights = {name: p.detach() for name, p in begun.student.module.named_parameters() if p.requires_grad}
    assert weights.keys() == {
        name for name in kept if name not in ("d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")
    }
    for name, p in weights.items(): assert torch.equal(p, kept[name].float()), name
    assert len(begun.student.tokens) == 30 and torch.equal(begun.student.tokens, begun.teacher.tokens)
    before = json.loads((tmp_path / "first/training/log.jsonl").read_text().splitlines()[-1])
    assert begun.evaluate()["alpha"] == pytest.approx(before["alpha"], abs=0.01)
    assert (distill(again) / "model.safetensors").exists()


def test_a_head_learns_the_frequent_tokens_of_new_texts(folder, data, target, tmp_path):
    """Tokens that occur no more make room for new ones; the others keep their rows, and those that nobody needs the
    place of stay."""
    first = distill(settings(folder, data, tmp_path / "first"))
    old = load_head(first, target, torch.float32)
    known = old.draft_tokens.tolist()
    new = [token for token in range(V) if token not in known][:4]
    few = np.array(known[5:15] + new)  # the new texts have these tokens only
    begun = Training(
        settings(folder, data, tmp_path / "second", weights=str(first)), target, few[read_rows(data, V) % len(few)]
    )
    found = begun.student.tokens.tolist()
    assert (
        len(found) == 30
        and set(few.tolist()) <= set(found) <= set(known) | set(new)
        and torch.equal(begun.student.tokens, begun.teacher.tokens)
    )
    head = begun.student.head
    for i, token in enumerate(found):
        expected = (
            old.lm_head.weight[known.index(token)] if token in known else output_rows(target, torch.tensor([token]))[0]
        )
        assert torch.equal(head.lm_head.weight[i], expected)
    for name, p in head.named_parameters():
        if name != "lm_head.weight": assert torch.equal(p, old.get_parameter(name)), name


def test_weights_to_go_on_from_are_checked(folder, data, target, tmp_path):
    first = distill(settings(folder, data, tmp_path / "first", kind="lm"))
    with pytest.raises(InputError, match="would be overwritten"): settings(folder, data, first, weights=str(first))
    # a model where a head is expected
    with pytest.raises(ModelError):
        Training(settings(folder, data, tmp_path / "second", weights=str(first)), target, read_rows(data, V))
    LlamaForCausalLM(
        LlamaConfig(vocab_size=V - 1, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=1)
    ).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match="no small Llama"):
        Training(
            settings(folder, data, tmp_path / "second", kind="lm", weights=str(tmp_path / "other")), target,
            read_rows(data, V),
        )
    with pytest.raises(InputError, match="either data or prompts"):
        settings(folder, data, tmp_path / "second", prompts="asked.jsonl")
