"""The same package on other processors: libraries are told to use older instructions, and each dtype is right there,
with equal bits where they are promised, or is refused in a line. No product runs in reference code, on any of them."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specdec.models.hub import fetch
from specdec.models.kernel import kernel_missing

OTHERS = [{}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
          {"ATEN_CPU_CAPABILITY": "default"}]
MORE = [{"ONEDNN_MAX_CPU_ISA": "SSE41"}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, {"ATEN_CPU_CAPABILITY": "avx2"}]
DTYPES = ["float32", "bfloat16", "float16", "int8", "int4"]


def named(env: dict) -> str: return "=".join(*env.items()) if env else "as it is"

# what one processor says of each dtype: reads a text in several ways, decodes it plainly and with drafts
CHILD = '''
import json, sys
from pathlib import Path
import torch
from families import CPU, FAMILIES, random_model, tokens
from specdec.app.doctor import distribution_error
from specdec.drafters.base import NoDrafter
from specdec.drafters.lookup import NGramDrafter
from specdec.errors import SpecdecError
from specdec.loop import speculate
from specdec.models.devices import STORED
from specdec.models.hub import fetch
from specdec.models.linear import can_be_batch_invariant
from specdec.models.loading import load_model
from specdec.sampling import SamplingParams, SeededRandom

folder, dtypes = Path(sys.argv[1]), sys.argv[2:]
if not (folder / "config.json").exists(): random_model(FAMILIES["tinyllama"]).save_pretrained(folder)
exact = load_model(folder, CPU, torch.float32)
ids = torch.randint(exact.vocab_size, (1, 40), generator=torch.Generator().manual_seed(0))

def read(model, n):
    cache, logits = model.new_cache(40), []
    for piece in ids.split(n, 1): logits.append(model.forward(piece, cache))
    return torch.cat(logits, 1).float()

def text(model, drafter, temperature):
    rounds = speculate(model, drafter, [3, 5, 8, 3, 5], SamplingParams(temperature), SeededRandom(0), K=4,
                       max_new_tokens=16)
    return [token for r in rounds for token in r.emitted]

wanted, said = read(exact, 40), {"invariant": can_be_batch_invariant(CPU, torch.float32),
                                 "distance": [distribution_error(kind) for kind in ("lookup", "model")]}
for dtype in dtypes:
    try: model = load_model(folder, CPU, STORED[dtype])
    except SpecdecError as error:
        said[dtype] = {"refused": str(error)}
        continue
    rows = read(model, 1)
    said[dtype] = {"off": ((rows - wanted).norm() / wanted.norm()).item(),
                   "bits": all(torch.equal(read(model, n), rows) for n in (2, 5, 9)),
                   "close": all(torch.allclose(read(model, n), rows, atol=.05 * wanted.abs().max()) for n in (5, 40)),
                   "texts": [text(model, NoDrafter(), 0), text(model, NGramDrafter(), 0)],
                   "sampled": text(model, NGramDrafter(), 1)}
print("said", json.dumps(said))
'''


def told(env: dict, folder: Path, dtypes: list[str]) -> tuple[dict, set[str]]:
    "What the child says on such a processor, and by which implementations oneDNN multiplied."
    run = subprocess.run([sys.executable, "-c", CHILD, str(folder), *dtypes], cwd=Path(__file__).parents[1], text=True,
                         capture_output=True, env=os.environ | env | {"ONEDNN_VERBOSE": "1"}, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = run.stdout.splitlines()
    products = [line.split(",") for line in lines if line.startswith("onednn_verbose") and ",primitive,exec," in line]
    used = {parts[6] for parts in products if parts[5] in ("matmul", "inner_product")}
    return json.loads(next(line for line in lines if line.startswith("said "))[5:]), used


def hold(env: dict, said: dict, used: set[str], dtypes: list[str]) -> None:
    "What must be true there."
    assert said["distance"] == ["0", "0"]
    assert not [name for name in used if "ref" in name], f"{env}: products in reference code, {used}"
    assert used or not said["invariant"], f"{env}: oneDNN multiplied nothing"
    x86 = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    assert said["invariant"] == (x86 and env != {"ATEN_CPU_CAPABILITY": "default"})
    for dtype in dtypes:
        found = said[dtype]
        if dtype == "int8" and not said["invariant"]:
            assert "int8 has no exact kernel on cpu: it needs an x86 CPU with AVX2" in found["refused"]
            continue
        assert "refused" not in found, (env, dtype, found)
        bound = {"float32": 1e-5, "float16": .01, "bfloat16": .05, "int8": .05, "int4": .3}[dtype]
        assert found["off"] < bound and found["close"] and len(found["sampled"]) == 16, (env, dtype, found)
        if said["invariant"] and dtype in ("float32", "int8"):
            assert found["bits"] and found["texts"][0] == found["texts"][1], (env, dtype)


@pytest.mark.parametrize("env", OTHERS + [pytest.param(env, marks=pytest.mark.slow) for env in MORE], ids=named)
def test_every_dtype_is_right_or_refused(env, tmp_path): hold(env, *told(env, tmp_path, DTYPES), DTYPES)


@pytest.mark.slow
@pytest.mark.parametrize("env", OTHERS + MORE, ids=named)
def test_every_dtype_of_the_default_model_is_right_or_refused(env): hold(env, *told(env, fetch(), DTYPES), DTYPES)


@pytest.mark.skipif(bool(kernel_missing()), reason=f"no kernel here: {kernel_missing()}")
@pytest.mark.parametrize("env", [{}, {"ATEN_CPU_CAPABILITY": "default"}], ids=named)
def test_a_file_in_its_own_form_is_right_there(env):
    "By the branch of this processor, and in plain C; a row keeps its bits where attention does so, too."
    said = told(env, fetch(), ["file"])[0]
    found = said["file"]
    assert found["off"] < .05 and found["close"] and len(found["sampled"]) == 16, found
    if said["invariant"]: assert found["bits"] and found["texts"][0] == found["texts"][1], found


def test_what_is_wrong_there_is_seen():
    "Control: reference code, a missing product, a distance, other bits."
    right = {"invariant": True, "distance": ["0", "0"],
             "float32": {"off": 0, "bits": True, "close": True, "texts": [[1], [1]], "sampled": [1] * 16}}
    if not torch.backends.mkldnn.is_available(): right["invariant"] = False
    hold({}, right, {"brg_matmul:avx2"}, ["float32"])
    wrong = [(right, {"brg_matmul:avx2", "ref:any"}), (right, set()),
             (right | {"distance": ["0", "1/8"]}, {"gemm:jit"}),
             (right | {"float32": right["float32"] | {"bits": False}}, {"gemm:jit"}),
             (right | {"float32": right["float32"] | {"off": 1e-3}}, {"gemm:jit"})]
    for said, used in wrong:
        with pytest.raises(AssertionError): hold({}, said, used, ["float32"])


def test_the_doctor_says_what_is_slow_there():
    "Without vector instructions: nothing is wrong, int8 isn't had, and what takes long has a line."
    done = subprocess.run([sys.executable, "-m", "specdec", "doctor", "--json"], text=True, capture_output=True,
                          timeout=300, env=os.environ | {"ATEN_CPU_CAPABILITY": "default"})
    found = json.loads(done.stdout)
    assert (done.returncode, found["problems"]) == (0, []) and found["processor"]["instructions"] == "DEFAULT"
    assert found["products"].keys() == {"float32", "bfloat16", "float16", "int4"}
    assert found["products"]["float32"]["one_row"] == 1
    assert any(line.startswith("int4 is slow on this processor: its products take up to") for line in found["warnings"])
