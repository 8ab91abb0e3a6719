"What a decoder turns away before any model runs, and the words it finds."
import numpy as np
import pytest
import torch

from helpers import Untouchable, tiny
from specdec.drafters.adaptive import AdaptiveLookahead
from specdec.drafters.base import NoDrafter
from specdec.engine.request import Request, check_request, longest_chain, token_ids
from specdec.errors import InputError
from specdec.loop import keeps_text, speculate
from specdec.models.linear import FEW
from specdec.sampling import SamplingParams, SeededRandom
from specdec.verify import greedy_match, sample_and_match, speculative_sampling


def start(prompt, **options):
    "The loop, asked for a text that it must not begin."
    return speculate(Untouchable(), NoDrafter(), prompt, SamplingParams(), SeededRandom(0), **options)


@pytest.mark.parametrize("change, words", [
    pytest.param(dict(prompt=[]), "empty", id="empty prompt"),
    pytest.param(dict(prompt=[24]), "outside 0…23", id="first id outside"),
    pytest.param(dict(prompt=[30]), "outside 0…23", id="id far outside"),
    pytest.param(dict(prompt=[-1]), "outside", id="negative id"),
    pytest.param(dict(prompt=[1] * 16), "nothing could be added", id="prompt fills the context"),
    pytest.param(dict(K=0), "K, the number", id="K of 0"),
    pytest.param(dict(K=1.5), "whole number", id="K of 1.5"),
    pytest.param(dict(K="3"), "whole number", id="K as text"),
    pytest.param(dict(K=AdaptiveLookahead()), r"a controller here.*AdaptiveDrafter\(drafter, it", id="a controller"),
    pytest.param(dict(max_new_tokens=0), "max_new_tokens", id="no new tokens"),
    pytest.param(dict(max_new_tokens=2.0), "whole number", id="float of new tokens"),
    pytest.param(dict(K=True), "whole number", id="K of True"),
    pytest.param(dict(K=np.bool_(True)), "whole number", id="K of NumPy's True"),
    pytest.param(dict(K=np.float64(2)), "whole number", id="K of a NumPy float"),
    pytest.param(dict(max_new_tokens=torch.tensor(True)), "whole number", id="new tokens of torch's True"),
])
def test_requests_are_checked_before_any_work(change, words):
    request = dict(prompt=[1], K=2, max_new_tokens=4) | change
    with pytest.raises(InputError, match=words): check_request(Untouchable(), **request)
    with pytest.raises(InputError, match=words): start(**request)


@pytest.mark.parametrize("request_", [
    pytest.param(dict(prompt=[0], K=1, max_new_tokens=1), id="smallest"),
    pytest.param(dict(prompt=[23] * 15, K=100, max_new_tokens=1000), id="more than fits is cut, not refused"),
    pytest.param(dict(prompt=[1], K=np.int64(3), max_new_tokens=np.int64(3)), id="numbers of numpy"),
])
def test_what_can_be_served_passes(request_): check_request(Untouchable(), **request_)


@pytest.mark.parametrize("form", [int, np.int64, np.uint8, torch.tensor], ids=lambda form: form.__name__)
def test_numbers_become_plain_ones(form):
    K, max_new_tokens, ends = check_request(Untouchable(), [1], form(3), form(4), {form(5), form(6)})
    assert (K, max_new_tokens, ends) == (3, 4, {5, 6})
    assert {type(n) for n in (K, max_new_tokens, *ends)} == {int}


@pytest.mark.parametrize("prompt", [
    pytest.param([0.5, 1.7], id="floats"),
    pytest.param(torch.tensor([[1, 2]]), id="a batch"),
    pytest.param(torch.tensor([1.0]), id="float tensor"),
    pytest.param("12", id="text"),
    pytest.param([[1]], id="nested list"),
    pytest.param(None, id="None"),
    pytest.param(3, id="a number"),
    pytest.param([True, False], id="truths"),
    pytest.param(torch.tensor([True]), id="a tensor of truths"),
])
def test_prompts_that_are_no_token_ids(prompt):
    with pytest.raises(InputError, match="flat list of token ids"): token_ids(prompt)
    with pytest.raises(InputError, match="flat list of token ids"): start(prompt)


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor, iter], ids=lambda form: form.__name__)
def test_token_ids_are_plain_numbers_whatever_held_them(form):
    found = token_ids(form([1, 2, 0]))
    assert found == [1, 2, 0] and all(type(token) is int for token in found)


@pytest.mark.parametrize("eos_ids", [2, None, "2", {"2"}, {2.0}, [True]], ids=repr)
def test_ends_that_are_no_set(eos_ids):
    with pytest.raises(InputError, match="eos_ids"): start([1], eos_ids=eos_ids)


# What a request takes for granted

def test_a_request_has_the_loops_defaults():
    target = tiny(context=400)
    request = Request(target, [1, 2], NoDrafter(), SamplingParams(), SeededRandom(0))
    assert (request.K, request.limit) == (5, 2 + 128)


@pytest.mark.parametrize("invariant, most", [(True, FEW - 1), (False, 40)])
def test_chains_are_cut_where_bits_are_kept_and_only_there(invariant, most):
    target = tiny()
    target.batch_invariant = invariant
    assert longest_chain(target, 40) == most and longest_chain(target, 3) == 3


@pytest.mark.parametrize("rule, greedy, warm", [
    (greedy_match, True, False), (sample_and_match, True, True), (speculative_sampling, True, False),
    (lambda *given: None, False, False)], ids=["greedy", "match", "ratio", "unknown"])
def test_which_rules_keep_the_text_of_plain_decoding(rule, greedy, warm):
    assert (keeps_text(rule, 0), keeps_text(rule, 1.0)) == (greedy, warm)
