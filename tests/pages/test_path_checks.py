"The exercises of the path on a GPU's round and on a Hugging Face model: their checks see what is wrong, and say it."
import json
from pathlib import Path

import pytest
import torch

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


GPU = "196bb1im 1a3beba5 202050e1 85e505ce 1ed19132 834f89e7 fr0mh0im fr0mh0s0 fr0mh0imx fr0mh0s2 9277d5b6 " \
      "ddd41fim ddd41fc1 cee8a43a ca3883im ca388312 3e3cc3f9 7edd59bf 49f663c4 262addbf"
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
    ("b.length += accepted + 1", "b.length += accepted.item() + 1"): "on `meta` it asks",
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
