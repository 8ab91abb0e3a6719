"What can not be in the settings of a run."
import pytest

from specdec.core import InputError
from specdec.train.config import DistillConfig


@pytest.mark.parametrize(
    "wrong",
    [
        dict(kind="tree"), dict(loss="mse"), dict(optimizer="sgd"), dict(schedule="step"), dict(init="zero"),
        dict(tokens=0), dict(lr=0), dict(lr=float("nan")), dict(hidden=100), dict(vocab=-1), dict(held_out=1),
        dict(seed=-1), dict(batch=2.5), dict(temperature=0), dict(samples=0), dict(samples=1.5),
    ],
    ids=str,
)
def test_settings_are_checked(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))): DistillConfig(**wrong)
