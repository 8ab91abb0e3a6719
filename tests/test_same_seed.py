"""The same seed gives the same text, whatever the clock says: it decides where it can't change a token. Elsewhere a
first call takes prices, before anything is decoded, and keeps them."""
import copy
import dataclasses
import random
import time

import pytest

from helpers_drafters import StepLookahead, random_head, random_target
from helpers_text import talker
from specdec.drafters import costs as costs_module
from specdec.drafters.adaptive import AdaptiveLookahead
from specdec.drafters.base import Draft
from specdec.drafters.choose import HybridDrafter
from specdec.drafters.colder import TemperatureScaledDrafter
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.load import best_drafter
from specdec.drafters.lookup import NGramDrafter, NGramState, SuffixDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.tree import TreeDrafter
from specdec.drafters.tree_hybrid import TreeHybrid
from specdec.engine.plan import is_best_certain, own_K
from specdec.errors import InputError
from specdec.models.loading import load
from specdec.pair import Pair

PROMPTS = ["red green blue red green", [1, 2, 3, 1, 2, 3, 1], "one two one two one"]


class WildClock:
    "Time passes in leaps: a microsecond here, an hour there."
    def __init__(self, seed): self.random, self.now = random.Random(seed), 0.0

    def __call__(self):
        self.now += 10 ** self.random.uniform(-6, 3.5)
        return self.now


def relative(): return ModelDrafter(talker(seed=1), talker().vocab_size)


PAIRS = {
    "what a pair drafts with by itself": lambda: Pair(talker()), "a model": lambda: Pair(talker(), talker(seed=1)),
    "several": lambda: Pair(talker(), HybridDrafter(SuffixDrafter(), TemperatureScaledDrafter(relative()))),
    "lookup": lambda: Pair(talker(), NGramDrafter()),
}
WAYS = {
    "K": {}, "adaptive": dict(K="adaptive"), "a controller": dict(K=AdaptiveLookahead(3, 1, 6, cooldown_steps=1)),
    "a controller of one's own": dict(K=StepLookahead(2)), "device": dict(loop="device"),
    "log-probabilities": dict(logprobs=2),
}


def known(result):
    "All that the clock should not touch: where it decides, it decides how the text comes, and not which."
    free = (result.costs or {}).get("origin") == "clock"
    rounds = [(token,) for token in result.generated_ids] if free else (result.rounds, result.costs)
    return result.generated_ids, result.text, rounds, result.drafter, result.finish_reason, result.settings


def told(made, **settings):
    "What becomes of one prompt, of a list, and of a stream that is read to its end."
    settings = dict(max_new_tokens=16, ignore_eos=True, seed=3) | settings
    if "K" in settings: settings["K"] = copy.deepcopy(settings["K"])  # a controller remembers what it was told before
    pair = made()
    one = [pair.generate(PROMPTS[0], **settings) for _ in range(2)]
    several = pair.generate(PROMPTS, batch_size=2, **settings)
    *events, end = pair.stream(PROMPTS[1], **settings)
    free = (end.result.costs or {}).get("origin") == "clock"
    tokens = [(event.token, not free and event.status, event.text)
              for event in events if event.status != "rejected" or not free]
    return [known(result) for result in (*one, *several, end.result)], tokens


def differs(made, monkeypatch, **settings):
    "Whether a wild clock changes anything."
    due = told(made, **settings)
    for seed in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(time, "perf_counter", WildClock(seed))
            if told(made, **settings) != due: return True
    return False


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PAIRS)
def test_a_wild_clock_changes_nothing(name, way, temperature, monkeypatch):
    if name == "what a pair drafts with by itself" and way == "device": pytest.skip("its drafter has no counterpart")
    assert not differs(PAIRS[name], monkeypatch, temperature=temperature, **WAYS[way])


def test_nor_with_a_head_or_a_tree(tmp_path, monkeypatch):
    target = random_target(tmp_path)
    target.batch_invariant = False
    head = random_head(target)
    prompt = [1, 5, 2, 7, 9, 1, 5, 2, 7, 9, 1, 5, 2]
    def drafters():
        tree = TreeDrafter(head, target, shape=[(0,), (1,), (0, 0), (2,)])
        yield HybridDrafter(SuffixDrafter(), TemperatureScaledDrafter(HeadDrafter(head, target)))
        yield tree
        yield TreeHybrid(SuffixDrafter(), tree, c=(0.0, .05), verify=[1 + .02 * n for n in range(1, 17)])
    def texts():
        return [known(Pair(target, drafter).generate(prompt, temperature=t, seed=1, max_new_tokens=20))
                for drafter in drafters() for t in (0.0, 1.0)]
    due = texts()
    monkeypatch.setattr(time, "perf_counter", WildClock(0))
    assert texts() == due


def test_nor_with_the_default_model(monkeypatch):
    "Where its drafts are certain and bits are kept it goes by the clock, and else by frozen prices."
    target = load("smollm2", "cpu", "float32")
    warm = "clock" if target.batch_invariant and is_best_certain(best_drafter(target)) else "frozen"
    def texts():
        pair = Pair(target)
        return [pair.generate("one two three one two", temperature=t, K=K, seed=1, max_new_tokens=12)
                for t in (0.0, 1.0) for K in (5, "adaptive")]
    due = texts()
    assert [r.costs["origin"] for r in due] == ["clock" if target.batch_invariant else "frozen"] * 2 + [warm] * 2
    monkeypatch.setattr(time, "perf_counter", WildClock(0))
    assert list(map(known, texts())) == list(map(known, due))


def texts_of(pair, prompts, **settings):
    "The tokens of one prompt, of a list and of a stream; how many were drafted."
    settings = dict(max_new_tokens=40, ignore_eos=True) | settings
    one, several = pair.generate(prompts[0], **settings), pair.generate(prompts, batch_size=2, **settings)
    *_, end = pair.stream(prompts[0], **settings)
    results = one, *several, end.result
    return [r.generated_ids for r in results], [len(r.drafted) for result in results for r in result.rounds]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_wild_clock_changes_the_rounds_and_the_text_stays_plain_decodings(temperature, tmp_path, monkeypatch):
    "In float32, with certain drafts: alone, in a batch, streamed. That the clock decides at all is seen by the rounds."
    target = random_target(tmp_path)
    if not target.batch_invariant: pytest.skip("this processor doesn't keep a row's bits, so prices are frozen here")
    prompts = [[1, 5, 2, 7, 9, 1, 5, 2, 7, 9, 1, 5, 2], [3, 3, 3, 3], [1, 2]]
    drafter = HybridDrafter(SuffixDrafter(), ModelDrafter(target.skip([0]), target.vocab_size))
    certain = dict(temperature=temperature, seed=3)
    due, _ = texts_of(Pair(target, drafter), prompts, method="plain", **certain)
    if temperature: certain["same_text"] = True  # a model's drafts are drawn, unless it is asked for
    made = []
    for seed in range(4):
        with monkeypatch.context() as patched:
            patched.setattr(time, "perf_counter", WildClock(seed))
            found, drafted = texts_of(Pair(target, drafter), prompts, K=(5, "adaptive")[seed % 2], **certain)
        assert found == due
        made.append(tuple(drafted))
    assert len({*made}) == 4 and sum(map(sum, made)) > 0


class HastyState(NGramState):
    "Wrong: drafts less when time is short."
    def propose(self, K, sampling, source):
        hurried = time.perf_counter() % 2 < 1
        return super().propose(1 if hurried else K, sampling, source) if K else Draft([])


class Hasty(NGramDrafter):
    def start(self, tokens, *told): return HastyState(self.longest, tokens)


def test_a_drafter_that_looks_at_the_clock_is_caught(monkeypatch):
    assert differs(lambda: Pair(talker(), Hasty()), monkeypatch)


@pytest.mark.parametrize("settings", [{}, dict(K="adaptive")], ids=["K", "adaptive"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_first_call_takes_prices_only_where_a_clock_could_change_the_text(name, settings, monkeypatch, tmp_path):
    "Nor does it read the prompt or any token twice: the target's forwards are the prompt's and those of the rounds."
    monkeypatch.setattr(costs_module, "cache_home", lambda: tmp_path)
    pair, reads = PAIRS[name](), []
    monkeypatch.setattr(pair.target, "name", "a talker", raising=False)
    monkeypatch.setattr(pair.target, "batch_invariant", True)
    forward = pair.target.forward
    def counted(ids, cache=None, **more):
        reads.append(ids.shape[-1])
        return forward(ids, cache, **more)
    monkeypatch.setattr(pair.target, "forward", counted, raising=False)
    result = pair.generate(PROMPTS[0], max_new_tokens=16, ignore_eos=True, **settings)
    assert sum(reads) <= len(result.prompt_ids) + sum(1 + len(r.drafted) for r in result.rounds)
    assert len(reads) == 1 + len(result.rounds)
    pair.generate(PROMPTS, max_new_tokens=8, **settings)
    list(pair.stream(PROMPTS[1], max_new_tokens=8, **settings))
    assert list(tmp_path.iterdir()) == []
    assert result.costs is None or result.costs["origin"] == "clock"
    drawn = result.costs is not None and name in ("a model", "several")
    for _ in range(2):  # where drafts are drawn they are taken once, and kept
        sampled = pair.generate(PROMPTS[0], max_new_tokens=8, temperature=1.0, seed=1, **settings)
        assert len(list(tmp_path.glob("costs/*.json"))) == drawn
        assert (sampled.costs or {}).get("origin") == ("frozen" if drawn else (result.costs or {}).get("origin"))


def test_what_a_result_tells_of_costs_survives_json():
    result = Pair(talker()).generate(PROMPTS[0], max_new_tokens=4)
    assert type(result).from_json(result.to_json()) == result and dataclasses.asdict(result)["costs"] == result.costs


def test_what_cannot_be_continued_is_told_before_prices_are_taken(tmp_path, monkeypatch):
    "A head needs features that were not read then; and a head's own K counts inside a hybrid, too."
    target = random_target(tmp_path)
    target.batch_invariant = False  # so prices would be frozen
    known = Pair(target, NGramDrafter()).prefill([1, 2, 3])
    head = HeadDrafter(random_head(target), target)
    pair = Pair(target, HybridDrafter(SuffixDrafter(), head))
    def never(*given): raise AssertionError("prices were taken")
    monkeypatch.setattr(costs_module, "take_prices", never)
    with pytest.raises(InputError, match="prefill"): pair.generate([1, 2, 3, 4], prefilled=known)
    assert own_K(pair.drafter) == own_K(head) == own_K(None) == 5
    head.K = 7
    assert own_K(pair.drafter) == own_K(TemperatureScaledDrafter(head)) == own_K(head) == 7
