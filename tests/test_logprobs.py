"How likely each token was: p of the round's rows, as one forward over the whole text has it, whoever drafted."
import math
from dataclasses import replace

import pytest
import torch

from helpers import Untouchable, tiny
from helpers_text import talker
from specdec.drafters.base import NoDrafter
from specdec.engine.logprobs import WatchedLM
from specdec.errors import InputError
from specdec.pair import Pair
from specdec.result import GenerationResult
from specdec.sampling import SamplingParams

PROMPT = [5, 3, 5, 3, 5]
SAMPLED = dict(temperature=0.9, top_k=9, top_p=0.95)


def by_hand(model, prompt, answer, temperature=0.0, top_k=None, top_p=None) -> list[list[float]]:
    "The law of each token in float64, from one forward without a cache; nothing of the package but the model."
    rows = model.forward(torch.tensor([[*prompt, *answer]]))[0, len(prompt) - 1:-1].double()
    found = []
    for row in rows:
        p = (row / (temperature or 1)).softmax(-1)
        if temperature and top_k: p = torch.where(p >= p.sort(descending=True).values[top_k - 1], p, 0)
        p = p / p.sum()
        if temperature and top_p:
            falling, order = p.sort(descending=True)
            inside = order[: int((falling.cumsum(0) < top_p).sum()) + 1]
            p = torch.zeros_like(p).index_copy(0, inside, p[inside])
        found.append((p / p.sum()).tolist())
    return found


@pytest.mark.parametrize("settings", [{}, dict(temperature=1.0), SAMPLED], ids=["greedy", "sampled", "cut off"])
@pytest.mark.parametrize("draft", ["n-gram", "a relative", "itself", "plain"])
def test_they_are_those_of_the_targets_distribution(draft, settings):
    target = tiny()
    pair = Pair(target, {"a relative": tiny(noise=0.05), "itself": target}.get(draft))
    method = "plain" if draft == "plain" else "speculative"
    result = pair.generate(PROMPT, max_new_tokens=24, seed=1, K=3, logprobs=3, method=method, **settings)
    distributions = by_hand(target, PROMPT, result.generated_ids, **settings)
    if draft == "a relative": assert 0 < result.num_accepted < result.num_drafted
    for token, odds, distribution in zip(result.generated_ids, result.logprobs, distributions, strict=True):
        best = sorted(range(len(distribution)), key=lambda i: -distribution[i])[:3]
        assert set(odds) == {i for i in {*best, token} if distribution[i] > 0} and token in odds
        assert all(math.exp(x) == pytest.approx(distribution[i], rel=1e-3) for i, x in odds.items())
        assert list(odds)[:3] == sorted(odds, key=lambda i: -odds[i])[:3]  # the likeliest first


@pytest.mark.parametrize("n, least, most", [(0, 1, 1), (1, 1, 2), (24, 24, 24), (1000, 24, 24)])
def test_so_many_are_told(n, least, most):
    result = Pair(tiny()).generate(PROMPT, max_new_tokens=8, temperature=1.5, seed=0, logprobs=n)
    assert {least <= len(odds) <= most for odds in result.logprobs} == {True}


def test_nobody_asked():
    result = Pair(tiny()).generate(PROMPT, max_new_tokens=4)
    assert result.logprobs is None and "logprobs" not in result.settings


def test_a_result_keeps_them_in_its_line_and_has_the_text_of_all_tokens():
    result = Pair(talker()).generate("Hello", max_new_tokens=8, logprobs=4)
    assert GenerationResult.from_json(result.to_json()) == result
    assert {token for odds in result.logprobs for token in odds} <= result.token_text.keys()
    short = replace(result, logprobs=result.logprobs[:-1])
    with pytest.raises(InputError, match="not those of the tokens"): GenerationResult.from_json(short.to_json())


def test_events_carry_those_of_their_tokens():
    pair = Pair(tiny(), tiny(noise=0.05))
    *events, last = pair.stream(PROMPT, max_new_tokens=20, K=3, logprobs=2)
    assert {e.status for e in events} >= {"accepted", "rejected", "corrected"}
    assert all((e.logprobs is None) == (e.status == "rejected") for e in events) and last.logprobs is None
    told = [e.logprobs for e in events if e.status != "rejected"]
    assert told == last.result.logprobs and all(e.token in e.logprobs for e in events if e.logprobs)
    assert {e.logprobs for e in pair.stream(PROMPT, max_new_tokens=4)} == {None}


@pytest.mark.parametrize("draft", ["itself", None])
def test_a_stop_string_cuts_them_with_the_tokens(draft):
    target = talker()
    free = Pair(target).generate("Hello", max_new_tokens=20)
    stop = target.tokenizer.decode(free.generated_ids[4:6])
    pair = Pair(target, target if draft else NoDrafter())
    result = pair.generate("Hello", max_new_tokens=20, K=8, stop=stop, logprobs=0)
    assert result.finish_reason == "stop" and len(result.logprobs) == result.num_tokens < 20
    assert all(list(odds) == [token] for token, odds in zip(result.generated_ids, result.logprobs, strict=True))


def test_an_interrupted_text_has_those_of_its_tokens():
    def impatient(piece): raise KeyboardInterrupt
    result = Pair(talker()).generate("Hello", max_new_tokens=20, logprobs=1, stream=impatient)
    assert result.finish_reason == "interrupted" and len(result.logprobs) == result.num_tokens > 0


def test_what_the_distribution_cannot_say_has_none():
    "Only a lossy rule brings such a token; minus infinity would be no JSON."
    def everything(p, q, tokens, rng): return len(tokens), rng.categorical(p[-1])
    pair = Pair(tiny(), tiny(noise=0.3))
    result = pair.generate(PROMPT, max_new_tokens=20, temperature=1.0, top_k=1, seed=0, verify=everything, logprobs=1)
    missing = [token not in odds for token, odds in zip(result.generated_ids, result.logprobs, strict=True)]
    assert any(missing) and not all(missing) and result.to_json()


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "3"], ids=repr)
def test_a_number_that_is_none_is_refused_before_any_work(wrong):
    with pytest.raises(InputError, match="logprobs, how many"): Pair(Untouchable()).generate([1], logprobs=wrong)


def test_the_loop_on_the_device_says_why_not():
    pair = Pair(tiny())
    with pytest.raises(InputError, match="log-probabilities"): pair.generate(PROMPT, logprobs=1, loop="device")
    pair.generate(PROMPT, max_new_tokens=2, loop="device")


def test_the_watched_model_is_the_model():
    model = tiny()
    watched, ids = WatchedLM(model, SamplingParams(), 0), torch.tensor([PROMPT])
    cache = watched.new_cache(8)
    logits, features = watched.forward(ids, cache, last=2, layers=(1, 2))
    wanted = model.forward(ids, model.new_cache(8), last=2, layers=(1, 2))
    assert torch.equal(logits, wanted[0]) and torch.equal(features, wanted[1]) and cache.length == 5
    assert torch.equal(watched.logits, logits[0])
    for name in ("vocab_size", "context_length", "device", "dtype", "param_count", "memory_footprint_mb", "eos_ids"):
        assert getattr(watched, name) == getattr(model, name)
