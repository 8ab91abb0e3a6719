"""What several test files use."""
import numpy as np
import pytest

from specdec.core import Round, RoundStatistics


class Rounds(RoundStatistics):
    "Nothing but rounds, with the statistics of a result."
    def __init__(self, rounds): self.rounds = rounds


def make_round(accepted, drafted):
    "A round in which so many of the drafts were accepted."
    return Round([0] * drafted, int(accepted), [0] * (int(accepted) + 1))


def toss(alpha, K, shape, rng):
    """Accepted drafts of rounds whose acceptances are independent, one uniform number a draft: nothing in common with
    the formulas."""
    right = rng.random((*shape, K)) < np.asarray(alpha)[..., None]
    return right.cumprod(-1).sum(-1)


def calls(*cases):
    "Cases of a call and the words that it must be refused with, each with a name."
    return [pytest.param(lambda call=call, given=given: call(*given), words, id=f"{call.__name__}-{i}-{words}")
            for i, (call, given, words) in enumerate(cases)]
