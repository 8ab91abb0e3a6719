"One text with one drafter: what is counted, and what is timed."
import pytest

from helpers_drafters import packable_llama
from specdec.bench.trial import Clocked, trial
from specdec.drafters.base import NoDrafter
from specdec.drafters.lookup import SuffixDrafter
from specdec.drafters.model import ModelDrafter


@pytest.fixture(scope="module")
def tiny(): return packable_llama()
def test_a_trial_counts_and_times(tiny):
    one = trial(tiny, ModelDrafter(tiny, 96), [1, 2, 3], K=3, max_new_tokens=21)
    assert sum(len(r.emitted) for r in one.rounds) == 20 and all(r.accepted == len(r.drafted) for r in one.rounds)
    assert 0 < one.verify_seconds < one.seconds and 0 < one.step_seconds < one.seconds
    assert trial(tiny, NoDrafter(), [1, 2, 3], K=1, max_new_tokens=5).step_seconds == 0


def test_the_clock_leaves_out_the_first_proposal_and_empty_ones():
    clocked = Clocked(SuffixDrafter())
    clocked.times = [(4, 100.0), (2, 4.0), (0, 50.0), (1, 2.0), (3, 9.0)]
    assert clocked.step_seconds == 2.0
