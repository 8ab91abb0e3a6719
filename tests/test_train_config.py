"What can not be in the settings of a run."
import json
from dataclasses import asdict

import numpy as np
import pytest

from specdec.core import InputError
from specdec.train.student import DistillConfig


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
