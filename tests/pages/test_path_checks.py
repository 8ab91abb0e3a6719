"The exercises of the path whose checks are long: they see what is wrong, and say it."
import json
from pathlib import Path

import pytest
import torch
from fastcore import test as fastcore_test

from helpers_notebooks import SOLUTION

NBS = Path(__file__).parents[2] / "nbs" / "path"


def cells_of(page: str) -> dict[str, str]:
    "Its cells by id."
    cells = json.loads((NBS / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in cells}


def solution(page: str, name: str) -> str:
    "The folded solution that defines a function."
    found = [code for source in cells_of(page).values() for code in SOLUTION.findall(source) if f"def {name}(" in code]
    assert len(found) == 1
    return found[0]


@torch.no_grad()  # as the pages say themselves, for their whole process
def complaint(space: dict, page: str, check: str, code: str) -> str: # "" if the check is content
    "What the check says of a solution."
    exec(code, space)
    try: exec(cells_of(page)[check], space)
    except Exception as error: return f"{type(error).__name__}: {error}"
    return ""


@torch.no_grad()
def space_of(page: str, *ids: str) -> dict:
    "What those cells define."
    space: dict = {}
    for name in ids: exec(cells_of(page)[name], space)
    return space


GPU = "196bb1im 1a3beba5 202050e1 85e505ce 1ed19132 9277d5b6 ddd41fim ddd41fc1 cee8a43a ca3883im ca388312 3e3cc3f9 " \
      "7edd59bf 49f663c4 262addbf"
LOOP = """
import torch
from fastcore.test import test_eq
from specdec.lossless.enumerate import exact_distribution
from specdec.minimal import lookup
from specdec.sampling import SamplingParams, SeededRandom
from specdec.verify import speculative_sampling
"""


@pytest.fixture(scope="module")
def gpu():
    "What the page on the GPU defines before its exercises."
    return space_of("06_gpu", *GPU.split())


@pytest.fixture(scope="module")
def loop():
    "What the page on the loop has before its exercise on transformers."
    space: dict = {}
    cells = cells_of("04_speculative")
    exec("\n".join([LOOP, cells["hfforwim"], cells["hfforwrd"]]), space)
    return space


VERDICTS = {  # what is written wrong in the solution: what the check says
    ("device=p.device", ""): "born on the host",
    ("F.pad(q, (0, 0, 0, 1))", "torch.cat((q, torch.zeros(1, p.shape[-1])))"): "born on the host",
    ("keepdim=True)", "keepdim=True) + torch.tensor(0)"): "born on the host",
    (".index_select(0, accepted)", "[torch.tensor([0])]"): "born on the host",
    (".index_select(0, accepted)", "[[0]]"): "indexes by a list",
    (".index_select(0, accepted)", "[accepted.item()][None]"): "asks for a number",
    (".cumprod(0)", ""): "NotLossless",
    ("F.pad(q, (0, 0, 0, 1))", "F.pad(q[:-1], (0, 0, 0, 2))"): "NotLossless",
}


@pytest.mark.parametrize("wrong", VERDICTS, ids=lambda wrong: wrong[1] or f"no {wrong[0]}")
def test_a_wrong_verdict_is_seen(gpu, wrong):
    right = solution("06_gpu", "my_verdict")
    assert wrong[0] in right
    assert VERDICTS[wrong] in complaint(gpu, "06_gpu", "80d73ea2", right.replace(*wrong))


ROUNDS = {
    ("b.length += accepted + 1", "b.length += accepted"): "at least one token",
    ("- 2 + b.steps[:2]", "- 1 + b.steps[:1]"): "a target that drafts for itself",
    ("torch.cat((last, tokens))", "torch.cat((tokens[:1], tokens))"): "off the target's distribution",
    ("b.length += accepted + 1", "b.length += accepted + torch.tensor(1)"): "born on the host",
    ("b.length += accepted + 1", "b.length += accepted.item() + 1"): "asks for a number",
}


@pytest.mark.parametrize("wrong", ROUNDS, ids=lambda wrong: wrong[1])
def test_a_wrong_round_is_seen(gpu, wrong):
    right = solution("06_gpu", "my_round")
    assert wrong[0] in right
    assert ROUNDS[wrong].lower() in complaint(gpu, "06_gpu", "r0undex2", right.replace(*wrong)).lower()


LOOPS = {
    ("if rejected: cache.crop(-rejected)", "pass"): "Error",
    ("(len(tokens) - 1)", "len(tokens)"): "Error",
    ("cache.crop(-rejected)", "cache = DynamicCache()"): "It reads again what the cache holds",
    ("next_token]", "drafted[-1] if drafted else next_token]"): "AssertionError",
    (" q, drafted, rng)", " None if q is None else q.flip(-1), drafted, rng)"): "off the model's own",
}


@pytest.mark.parametrize("wrong", LOOPS, ids=range(len(LOOPS)))
def test_a_wrong_loop_on_a_hugging_face_model_is_seen(loop, wrong):
    right = solution("04_speculative", "on_hugging_face")
    assert wrong[0] in right
    found = complaint(loop, "04_speculative", "aa125b4f", right.replace(*wrong))
    assert LOOPS[wrong] in found


@pytest.fixture(scope="module")
def rules():
    "What the page on the rule defines before its exercises."
    return space_of("03_rejection", "32a992e2", "ce5c20e5", "537bd9e2")


BLOCKS = {
    ("min(1, weights[-1] * ", "min(1, "): "NotLossless",
    ("(weights[i] * p[i] - q[i])", "(p[i] - q[i])"): "NotLossless",
    ("rng.categorical(p[-1])", "rng.categorical(p[-2])"): "NotLossless",
    ("+ 1 - weights[i])", "+ 1)"): "Error",
}


@pytest.mark.parametrize("wrong", BLOCKS, ids=lambda wrong: wrong[1])
def test_a_wrong_block_verification_is_seen(rules, wrong):
    right = solution("03_rejection", "judge_together")
    assert wrong[0] in right
    assert BLOCKS[wrong] in complaint(rules, "03_rejection", "b10ckex2", right.replace(*wrong))


def test_one_that_keeps_less_than_can_be_kept_is_seen(rules):
    "The ratio test is lossless, and still no answer."
    found = complaint(rules, "03_rejection", "b10ckex2", "def judge_together(*given): return verify(*given)")
    assert "It keeps" in found and "NotLossless" not in found


@pytest.fixture(scope="module")
def batch():
    "What the page on batches defines before its exercise on a ragged one."
    return space_of("07_batches", "b7import", "ragged01", "ragged03")


RAGGED = {
    ("> at[..., None]", ">= at[..., None]"), ("cache.lengths[:, None] +", "cache.lengths.max() + 0 * which +"),
    (".masked_fill(hidden, -torch.inf)", ""), ("> at[..., None]", "> at[..., -1:, None]"),
}


@pytest.mark.parametrize("wrong", sorted(RAGGED), ids=lambda wrong: wrong[1] or f"no {wrong[0]}")
def test_a_wrong_ragged_round_is_seen(batch, wrong):
    lines = solution("07_batches", "ragged_attend").splitlines()
    lines[2], lines[3] = lines[3], lines[2]  # `which` first: one mistake uses it
    right = "\n".join(lines)
    assert wrong[0] in right and complaint(batch, "07_batches", "b7ex3002", right) == ""
    assert "AssertionError" in complaint(batch, "07_batches", "b7ex3002", right.replace(*wrong))


@pytest.mark.parametrize("wrong", [(".tril()", ""), ("torch.eye(n)", "torch.ones(n, n).tril()")])
def test_a_wrong_mask_of_the_unrolled_head_is_seen(wrong):
    space = {"torch": torch, "test_eq": fastcore_test.test_eq}
    right = solution("08_train", "who_sees")
    assert wrong[0] in right and complaint(space, "08_train", "t8ex3002", right) == ""
    assert "sees rows" in complaint(space, "08_train", "t8ex3002", right.replace(*wrong))
