"Lists of prompts: what each text says is what it would say alone, and what is told of it is its own."
import copy
import time
from functools import lru_cache
from itertools import count

import pytest
import torch

from helpers import Untouchable, real, tiny
from helpers_drafters import PayingLookahead, StepLookahead, check_sequences_apart, random_head, random_target, read
from helpers_text import TOKENIZER, talker
from specdec import pair as pairs
from specdec.drafters import costs as module
from specdec.drafters.adaptive import AdaptiveDrafter, AdaptiveLookahead
from specdec.drafters.base import NoDrafter
from specdec.drafters.choose import HybridDrafter
from specdec.drafters.colder import TemperatureScaledDrafter
from specdec.drafters.costs import Prices
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.lookup import NGramDrafter, NGramState, SuffixDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.tree import TreeDrafter, best_tree
from specdec.drafters.tree_hybrid import TreeHybrid
from specdec.engine.completion import StopChecker
from specdec.errors import InputError, NumericalError
from specdec.models.transformers import TransformersLM
from specdec.pair import Pair, load_config

CHAT = [{"role": "user", "content": "Hello"}]
PROMPTS = ["red green blue red green", [1, 2, 3], CHAT, "a", "one two one two one"]
DRAFTS = {
    "lookup": NGramDrafter, "model": lambda: ModelDrafter(talker(seed=1), talker().vocab_size),
    "hybrid": lambda: HybridDrafter(SuffixDrafter(), ModelDrafter(talker(seed=1), talker().vocab_size)),
    "controlled": lambda: AdaptiveDrafter(ModelDrafter(talker().skip([1]), talker().vocab_size), StepLookahead(2)),
    "head": lambda: HeadDrafter(random_head(talker()), talker()), "nothing": NoDrafter,
}


def same(result, alone):
    "All that doesn't depend on the clock; where it chooses, rounds do."
    for name in ("prompt_ids", "generated_ids", "text", "finish_reason", "method", "settings", "is_lossless",
                 "batch_invariant", "drafter", "loop", "device", "logprobs"):
        assert getattr(result, name) == getattr(alone, name), name
    if (result.costs or {}).get("origin") != "clock":
        assert result.rounds == alone.rounds and result.token_text == alone.token_text
    assert len(result.per_token_latencies) == result.num_tokens and min(result.per_token_latencies) > 0
    assert result.total_time >= 0.999 * sum(result.round_latencies) and result.time_to_first_token > 0
    assert result.prefill_time_ms > 0 and result.sampling_time_total_ms > 0


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_each_text_is_the_one_it_would_be_alone(draft, temperature, size):
    settings = dict(temperature=temperature, max_new_tokens=12, K=3)
    pair, other = Pair(talker(), DRAFTS[draft]()), Pair(talker(), DRAFTS[draft]())
    pair.priced = other.priced = size  # at the same frozen prices
    results = pair.generate(PROMPTS, seed=7, batch_size=size, **settings)
    for i, (result, prompt) in enumerate(zip(results, PROMPTS, strict=True)):
        same(result, other.generate(prompt, seed=7 + i, **settings))


@pytest.mark.parametrize("settings", [
    dict(method="plain"), dict(K="adaptive"), dict(stop=["e", "a "]), dict(ignore_eos=True), dict(max_new_tokens=500),
    dict(logprobs=2), dict(loop="host", top_k=3), dict(verify=lambda p, q, tokens, source: (0, 5)),
], ids=["plain", "adaptive", "stop", "ends ignored", "context", "logprobs", "host", "a rule"])
def test_every_setting_means_what_it_means_for_one(settings):
    target = talker(eos=frozenset(range(0, 49_000, 9)), context=40)
    settings = dict(temperature=1.0, max_new_tokens=12, K=3) | settings
    pair, other = Pair(target, NGramDrafter()), Pair(target, NGramDrafter())
    results = pair.generate(PROMPTS, seed=3, batch_size=3, **settings)
    for i, (result, prompt) in enumerate(zip(results, PROMPTS, strict=True)):
        same(result, other.generate(prompt, seed=3 + i, **settings))
    wanted = {"stop": "stop", "ignore_eos": "length"}
    for name, reason in wanted.items():
        if name in settings: assert reason in {result.finish_reason for result in results}


def test_lists_of_one_and_of_lists():
    pair = Pair(talker(), NGramDrafter())
    for prompts in (["Hello"], [[1, 2, 3]], [CHAT], ("Hello", "Hi"), [torch.tensor([1, 2]), torch.tensor([3])]):
        assert [r.num_tokens for r in pair.generate(prompts, max_new_tokens=2)] == [2] * len(prompts)
    for prompt in (CHAT, [1, 2], (1, 2), torch.tensor([[1, 2]]), list(torch.tensor([1, 2]))):
        assert pair.generate(prompt, max_new_tokens=2).num_tokens == 2


def test_a_fresh_seed_is_recorded_for_each():
    pair = Pair(talker(), NGramDrafter())
    results = pair.generate(["Hello"] * 3, temperature=1, max_new_tokens=9)
    first = results[0].settings["seed"]
    assert [r.settings["seed"] for r in results] == [first, first + 1, first + 2]
    assert len({tuple(r.generated_ids) for r in results}) == 3
    assert pair.generate("Hello", temperature=1, max_new_tokens=9, seed=first + 2).text == results[2].text
    assert pair.generate(["Hello"])[0].settings["seed"] != first


def test_models_and_loops_that_share_no_forward_take_turns():
    "Transformers' models, the loop of the device."
    module = tiny_transformers()
    for pair, more in ((Pair(module, NGramDrafter()), {}), (Pair(tiny(), NGramDrafter()), dict(loop="device"))):
        prompts = [[1, 2, 1, 2, 1], [3], [4, 5]]
        results = pair.generate(prompts, max_new_tokens=6, **more)
        for result, prompt in zip(results, prompts, strict=True):
            alone = pair.generate(prompt, max_new_tokens=6, **more)
            assert (result.generated_ids, result.loop) == (alone.generated_ids, alone.loop)


@lru_cache
def tiny_transformers():
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=24, n_positions=48, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return TransformersLM(GPT2LMHeadModel(config).eval())


# What is told of each

def test_results_come_as_texts_end():
    "Short ones first; and what comes next takes their place."
    pair = Pair(talker(context=24), NoDrafter())
    found = list(pair.results([[1], [1] * 16, [1] * 12], batch_size=2, max_new_tokens=99))
    assert [(i, r.num_tokens) for i, r in found] == [(1, 8), (2, 12), (0, 23)]
    assert {r.finish_reason for _, r in found} == {"context"}


def test_a_text_that_a_stop_string_ends_leaves_the_forward(monkeypatch):
    pair, rows = Pair(talker(), NoDrafter()), []
    whole = pair.generate("Hello", max_new_tokens=20).text
    from specdec import loop
    real = loop.read_batch
    def counted(target, new, *rest):
        rows.append(len(new))
        return real(target, new, *rest)
    monkeypatch.setattr(loop, "read_batch", counted)
    results = pair.generate(["Hello", "a b c"], max_new_tokens=20, stop=whole[2:5])
    assert results[0].text == whole[:2] and results[1].finish_reason == "length"
    assert rows == [2] * (results[0].num_tokens - 1)  # the other goes on alone


def test_times_are_those_of_the_texts_own_stay(monkeypatch):
    "Neither what went before it joined, nor what somebody does with results. (The clock is ours: a look takes 1 ms.)"
    clock, found = count(), []
    monkeypatch.setattr("time.perf_counter", lambda: next(clock) / 1000)
    def look_away():
        nonlocal clock
        clock = count(next(clock) + 1_000_000)
    pair = Pair(talker(), NGramDrafter())
    for _, result in pair.results(["Hello"] * 6, batch_size=2, max_new_tokens=8):
        look_away()
        found.append(result)
    assert max(result.total_time for result in found) < 1 and pair.stats.seconds < 1
    spent = [r.prefill_time_ms + r.draft_time_total_ms + r.verify_time_total_ms + r.sampling_time_total_ms
             for r in found]
    assert all(0 < ms <= 1000 * r.total_time + 1 for ms, r in zip(spent, found))


def test_a_batch_counts_the_decoding_of_its_texts_as_a_single_prompt_does(monkeypatch):
    "A tokenizer that takes 50 ms a text makes each text, and the batch's totals, 50 ms slower, however it is asked."
    real = StopChecker.finish
    def slow(self, ids):
        time.sleep(.05)
        return real(self, ids)
    pair, times = Pair(talker(), NGramDrafter()), {}
    for name, finish in (("fast", real), ("slow", slow)):
        monkeypatch.setattr(StopChecker, "finish", finish)
        pair.reset_stats()
        batch, alone = (pair.generate(prompts, max_new_tokens=6) for prompts in (["Hello", "a b c"], "Hello"))
        times[name] = *(r.total_time - sum(r.round_latencies) for r in (*batch, alone)), pair.stats.seconds
    assert max(times["fast"][:3]) < .03 and min(times["slow"][:3]) > .05 and times["slow"][3] > .15


def test_totals_share_the_time():
    pair = Pair(talker(), talker().skip([1]))
    results = pair.generate(["Hello", "a b c", "x"], max_new_tokens=9)
    stats, each = pair.stats, [r.total_time for r in results]
    assert (stats.texts, stats.tokens, stats.counts.drafted) == (3, 27, sum(r.num_drafted for r in results))
    assert max(each) <= stats.seconds < sum(each) and stats.tokens_per_second == 27 / stats.seconds


class Interrupting(NGramDrafter):
    "Interrupts one text's so-many-th proposal; all its texts count together."
    def __init__(self, after): super().__init__(); self.after, self.calls = after, count(1)
    def start(self, tokens, *told):
        drafter = self
        class Interrupted(NGramState):
            def propose(self, *arguments):
                if next(drafter.calls) == drafter.after: raise KeyboardInterrupt
                return super().propose(*arguments)
        return Interrupted(self.longest, tokens)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("after", [1, 4, 9])
def test_an_interrupt_leaves_what_there_is(after, size):
    prompts, whole = ["Hello", "a b c", "x", "y"], Pair(talker(), NoDrafter())
    pair = Pair(talker(), Interrupting(after))
    results = pair.generate(prompts, max_new_tokens=5, batch_size=size)
    reasons = [result.finish_reason for result in results]
    assert len(results) == 4 and "interrupted" in reasons and reasons[-1] == "interrupted"
    for result, prompt in zip(results, prompts):
        alone = whole.generate(prompt, max_new_tokens=5)
        assert result.generated_ids == alone.generated_ids[:result.num_tokens] and result.prompt_ids == alone.prompt_ids
        assert (result.finish_reason == "length") == (result.num_tokens == 5)
    assert pair.stats.tokens == sum(result.num_tokens for result in results)
    again = Pair(talker(), Interrupting(after))
    with pytest.raises(KeyboardInterrupt):
        again.generate(prompts, max_new_tokens=5, batch_size=size, raise_interrupt=True)
    assert len(again.generate(prompts[:2], max_new_tokens=5)) == 2  # the drafter is free


def test_leaving_early_frees_the_drafter():
    pair = Pair(talker(), NGramDrafter())
    for i, result in pair.results(["Hello", "a b c", "x"], batch_size=2, max_new_tokens=4): break
    assert pair.generate("Hello", max_new_tokens=2).num_tokens == 2


def test_a_configured_pair_answers_lists(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[pair]\nname = "smollm2"\ndtype = "float32"\n[decoding]\nmax_new_tokens = 2\nseed = 5\n')
    pair = load_config(file)
    results = pair.generate(["Hello", "Hi"])
    assert [(r.num_tokens, r.settings["seed"]) for r in results] == [(2, 5), (2, 6)]
    assert [r.num_tokens for _, r in pair.results(["Hello"], max_new_tokens=1)] == [1]


# Errors

@pytest.mark.parametrize("change, words", [
    (dict(prompts=[]), "^There are no prompts"), (dict(prompts="Hello"), "^There are no prompts"),
    (dict(prompts=[[1], ""]), "^Prompt 2 of 2: The prompt is empty"), (dict(prompts=[[]]), "^The prompt is empty"),
    (dict(prompts=[[1], [1], [24]]), "^Prompt 3 of 3: .*outside"), (dict(prompts=[[1], {}]), "^Prompt 2 of 2: .*dict"),
    (dict(prompts=[[1], [1] * 16]), "^Prompt 2 of 2: .*nothing could be added"),
    (dict(batch_size=0), "^batch_size"), (dict(batch_size=2.5), "^batch_size"), (dict(K=0), "^K, the number"),
    (dict(temperature=-1), "^.emperature"), (dict(seed="x"), "^The seed"), (dict(loop="magic"), "^loop must be"),
    (dict(method="magic"), "speculative or"),
    (dict(seed=2**64 - 1), "seed must be"),
], ids=lambda value: None if isinstance(value, str) else str(value)[:40])
def test_what_is_wrong_is_told_before_any_work(change, words):
    target = Untouchable()
    target.tokenizer = TOKENIZER
    with pytest.raises(InputError, match=words): Pair(target).results(**({"prompts": [[1], [2]]} | change))


def test_a_stream_tells_of_one_text():
    with pytest.raises(InputError, match="this is a list of prompts"): Pair(talker()).generate(["a", "b"], stream=print)
    with pytest.raises(InputError, match="empty"): Pair(talker()).generate([])


def test_damaged_weights_name_the_text():
    target = copy.copy(talker())
    target.norm = target.norm * float("nan")
    with pytest.raises(NumericalError, match="after the prompt"): Pair(target, NoDrafter()).generate(["Hello", "Hi"])


# One drafter, and states of its sequences

TREE = best_tree([(.5, .3), (.4, .2)], 5)
MADE = {
    "nothing": lambda target, other, head: NoDrafter(), "n-gram": lambda target, other, head: NGramDrafter(),
    "lookup": lambda target, other, head: SuffixDrafter(), "model": lambda target, other, head: other,
    "colder": lambda target, other, head: TemperatureScaledDrafter(other),
    "head": lambda target, other, head: HeadDrafter(head, target),
    "hybrid": lambda target, other, head: HybridDrafter(
        SuffixDrafter(), TemperatureScaledDrafter(other), HeadDrafter(head, target), c=(0.0, 0.1, 0.05)),
    "heuristic": lambda target, other, head: AdaptiveDrafter(other, StepLookahead(1)),
    "moving average": lambda target, other, head: AdaptiveDrafter(other, AdaptiveLookahead(2, 1, cooldown_steps=0)),
    "what pays": lambda target, other, head: AdaptiveDrafter(HeadDrafter(head, target), PayingLookahead()),
    "a controlled hybrid": lambda target, other, head: AdaptiveDrafter(
        HybridDrafter(SuffixDrafter(), other), StepLookahead(1)),
    "tree": lambda target, other, head: TreeDrafter(head, target, width=3, depth=2),
    "shaped tree": lambda target, other, head: TreeDrafter(head, target, shape=TREE),
    "tree hybrid": lambda target, other, head: TreeHybrid(
        SuffixDrafter(), TreeDrafter(head, target, shape=TREE), c=(0.0, 0.05), verify=[1.01, 1.02, 1.03, 1.04, 1.05]),
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    "A target, a draft model and a head; what a drafter is made of."
    target = random_target(tmp_path_factory.mktemp("target"))
    return target, ModelDrafter(tiny(noise=0.05), 24), random_head(target)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", [kind for kind in MADE if kind != "nothing"])
def test_sequences_of_one_drafter_do_not_know_of_each_other(kind, temperature, parts):
    prompts = [[1, 2, 3, 1, 2, 3, 1], [5, 9, 5, 9, 5], [20] * 6]
    def make(): return MADE[kind](*parts)
    check_sequences_apart(make, parts[0], prompts, K=5 if "tree" in kind else 3, temperature=temperature)


class OneIndexForAll(NGramDrafter):
    "Wrong: keeps the text that it was asked for last, and shows it to all."
    def start(self, tokens, *told):
        self.state = super().start(tokens, *told)
        drafter = self
        class Shared:
            def propose(self, *asked): return drafter.state.propose(*asked)
            def commit(self, *told): drafter.state.commit(*told)
        return Shared()


class OneController(AdaptiveDrafter):
    "Wrong: one controller for all texts."
    def wrap(self, *told):
        state = super().wrap(*told)
        state.controller = self.controller
        return state


@pytest.mark.parametrize("make", [
    OneIndexForAll, lambda: OneController(NGramDrafter(), StepLookahead(1)),
], ids=["a text", "what was learned"])
def test_a_drafter_that_remembers_a_text_is_caught(make, parts):
    with pytest.raises(AssertionError):
        check_sequences_apart(make, parts[0], [[1, 2, 3, 1, 2, 3, 1], [5, 9, 5, 9, 5], [20] * 6])


def test_sequences_share_weights_and_nothing_else(parts):
    target, other, head = parts
    drafter = HybridDrafter(SuffixDrafter(), TemperatureScaledDrafter(other), HeadDrafter(head, target))
    features = read(target, torch.tensor([[1, 2, 3]]), drafter.layers)[0][:-1]
    one, two = (drafter.start([1, 2, 3], features, 40) for _ in range(2))
    assert one.chooser is not two.chooser and one.states[0].index is not two.states[0].index
    assert one.states[1].inner.model is two.states[1].inner.model is other.model
    assert one.states[2].head is two.states[2].head is drafter.members[2].head
    for a, b in ((one.states[1].inner, two.states[1].inner), (one.states[2], two.states[2])):
        assert a.cache is not b.cache


def test_sequences_of_the_usual_pair_share_the_head():
    pair = pairs.load_pair("smollm2", "cpu", "float32", target=real())
    ids = [1, 2, 3]
    features = read(pair.target, torch.tensor([ids]), pair.drafter.layers)[0][:-1]
    one, two = (pair.drafter.start(ids, features, 40).states[1].inner for _ in range(2))
    assert one is not two and one.head is two.head is pair.drafter.members[1].drafter.head
    assert one.cache is not two.cache


def test_a_drafter_that_cannot_be_copied_serves_a_list():
    class Locked(NGramDrafter):
        def __init__(self):
            super().__init__()
            self.rows = iter(map(str, ()))
        def __deepcopy__(self, memo): raise TypeError("cannot pickle 'lock' object")
    pair, usual = Pair(talker(), Locked()), Pair(talker(), NGramDrafter())
    for size in (2, 1):
        found, expected = (each.generate(PROMPTS, batch_size=size, max_new_tokens=6) for each in (pair, usual))
        assert [r.rounds for r in found] == [r.rounds for r in expected] and len(found) == len(PROMPTS)


# Costs

def prices(one, many, c):
    "In the place of `take_prices`: plain steps that a draft of any length costs, alone and in a batch."
    taken = []
    def take(target, hybrid, sampled, size=1, certain=False):
        taken.append(size)
        more = one if size == 1 else many
        return Prices(forwards={size * n: .01 * (1 if n == 1 else more) for n in (1, 2, 3, 17)},
                      drafts=[{1: .01 * c, 4: .04 * c} for _ in hybrid.members])
    return take, taken


@pytest.fixture
def dear_batch(monkeypatch, tmp_path):
    "Drafting pays for a sequence by itself, and never in a batch."
    take, taken = prices(1.01, 9.0, .001)
    monkeypatch.setattr(module, "take_prices", take)
    monkeypatch.setattr(module, "cache_home", lambda: tmp_path)
    return taken


def test_a_batch_has_prices_of_its_own(dear_batch):
    def pair(): return Pair(talker(), DRAFTS["hybrid"]())
    mine, ask = pair(), dict(max_new_tokens=12, temperature=1.0, seed=0, ignore_eos=True)
    many = mine.generate(PROMPTS[:4], **ask)
    assert {r.num_drafted for r in many} == {0} and many[0].costs["origin"] == "frozen"
    assert many[0].costs["verify"][0] == 9.0
    assert mine.generate("a", **ask).num_drafted > 0
    mine.generate(PROMPTS, batch_size=4, **ask)
    mine.generate(PROMPTS[:2], **ask)
    assert dear_batch == [4, 1, 2]  # once each, and for all pairs of these parts
    pair().generate(PROMPTS[:2], **ask)
    mine.generate(PROMPTS, method="plain", max_new_tokens=3)
    assert dear_batch == [4, 1, 2]


@pytest.mark.parametrize("K, draft", [(3, "hybrid"), ("adaptive", "model")])
def test_a_text_that_is_left_alone_drafts_again(K, draft, dear_batch):
    context = talker().context_length
    long = [1, 2, 3] * (context // 4)  # has room for fewer tokens
    pair, ask = Pair(talker(), DRAFTS[draft]()), dict(K=K, ignore_eos=True, temperature=1.0, seed=0)
    last, *others = pair.generate([[1, 2, 3], long, long], max_new_tokens=context, **ask)
    together = others[0].num_tokens - 1
    assert not any(r.drafted for result in others for r in result.rounds)
    assert not any(r.drafted for r in last.rounds[:together])
    assert any(r.drafted for r in last.rounds[together:])
    pair.priced = 3  # as a run that was stopped goes on: with the choices of all its prompts
    alone = pair.generate([1, 2, 3], max_new_tokens=30, **ask)
    assert alone.num_drafted == 0


@pytest.mark.parametrize("wrong", [dict(logprobs=-1), dict(logprobs="two"), dict(grammar="one"), dict(grammar=int),
                                   dict(K=0), dict(loop="moon"), dict(verify=3)], ids=str)
def test_what_is_wrong_with_the_settings_is_said_when_they_are_given(wrong):
    "And not when the first result is asked for."
    with pytest.raises(InputError): Pair(talker()).results([[1], [2]], **wrong)
