"""`Pair.generate` from outside: every argument, every ending, every error, on tiny random models with the real
tokenizer."""
import copy
import dataclasses
import gc
import json
import multiprocessing
import pickle
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from threading import Barrier, Thread
from time import process_time, sleep

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers import Failing, Untouchable, assert_same_text, examples, greedy, real, tiny, workers_kept
from helpers_text import TOKENIZER, V, talker
from specdec import pair as pairs
from specdec.app.registry import get_pair
from specdec.drafters import costs
from specdec.drafters.base import Draft, NoDrafter
from specdec.drafters.choose import HybridDrafter
from specdec.drafters.colder import TemperatureScaledDrafter
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.load import load_drafter, shipped
from specdec.drafters.lookup import NGramDrafter, SuffixDrafter
from specdec.drafters.model import ModelDrafter
from specdec.engine.block import block_verification
from specdec.engine.completion import PairStats, StopChecker
from specdec.engine.lossy import LossyLenience, LossyTypical
from specdec.errors import InputError, ModelError, NumericalError
from specdec.models.hub import prompts
from specdec.models.transformers import TransformersLM
from specdec.options import METHODS
from specdec.pair import Pair, load_pair
from specdec.result import GenerationResult, statuses
from specdec.verify import greedy_match, sample_and_match, speculative_sampling


def decode(ids) -> str: return TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def consistent(result: GenerationResult) -> None:
    "What must hold for every result."
    assert sum(len(r.emitted) for r in result.rounds) == max(len(result.generated_ids) - 1, 0)
    assert result.generated_ids[1:] == [token for r in result.rounds for token in r.emitted]
    assert len(result.per_token_latencies) == result.num_tokens
    assert len(result.round_latencies) == len(result.rounds) + (result.num_tokens > 0)
    assert sum(result.round_latencies) == pytest.approx(sum(result.per_token_latencies))
    assert (result.drafter is None) == (result.method == "plain") and result.loop == "host" and result.device == "cpu"
    assert sum(result.per_token_latencies) <= result.total_time + 1e-6
    assert set(result.generated_ids) <= result.token_text.keys() or not result.token_text
    assert GenerationResult.from_json(result.to_json()) == result
    assert result._repr_html_()


# Stop strings

def cut_of(text: str, stops: list[str]) -> int | None:
    "Where the text is cut: character by character, before the stop string that is complete first, the longest of them."
    for end in range(1, len(text) + 1):
        complete = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if complete: return end - max(complete)


@given(st.lists(st.text("aEND of", min_size=1, max_size=4), max_size=8),
       st.lists(st.text("aEND of", min_size=1, max_size=6) | st.sampled_from(["END of", "ND"]), min_size=1, max_size=3))
@settings(max_examples=examples(200), deadline=None)
def test_a_text_is_cut_at_the_same_place_however_it_comes(pieces, stops):
    "As single characters, as one text or as these pieces: what is given out never goes further than the cut."
    text = "".join(pieces)
    for parts in (pieces, list(text), [text]):
        checker, given = StopChecker(TOKENIZER, stops), ""
        for part in parts:
            for token in TOKENIZER(part)["input_ids"] if part else ():
                if checker.end is None: checker.read([token])
                given += checker.new()
        checker.finish(checker.decoder.ids)
        at = cut_of(text, stops)
        assert (checker.end, checker.text) == (at, text[:at])
        assert checker.text.startswith(given) and given + checker.new(final=True) == checker.text
        before = checker.tokens_before
        assert (before is None) == (at is None) and checker.text.startswith(decode(checker.decoder.ids[:before]))
        if at is not None: assert len(decode(checker.decoder.ids[:before + 1])) > at


@given(st.integers(0, 3), st.data())
@settings(max_examples=examples(40), deadline=None)
def test_stop_strings_cut_what_plain_decoding_says_for_every_k(seed, data):
    target = talker(seed)
    plain, ways = Pair(target, NoDrafter()), [Pair(target), Pair(target, talker(seed + 1)), Pair(target, talker(seed))]
    whole = plain.generate([1, 2, 3], max_new_tokens=20, method="plain")
    assume(len(whole.text) > 3)
    parts = st.tuples(st.integers(0, len(whole.text) - 1), st.integers(1, 6)).map(
        lambda part: whole.text[part[0]:sum(part)])
    stops = data.draw(st.lists(parts, min_size=1, max_size=3))
    wanted = plain.generate([1, 2, 3], max_new_tokens=20, method="plain", stop=stops)
    assert wanted.finish_reason == "stop" and wanted.text == whole.text[:cut_of(whole.text, stops)]
    assert whole.generated_ids[:wanted.num_tokens] == wanted.generated_ids
    assert wanted.text.startswith(decode(wanted.text_ids))
    assert wanted.generated_ids[:len(wanted.text_ids)] == wanted.text_ids
    for i, K in enumerate((1, 2, 3, 5, 8)):  # each drafts with each, from seed to seed
        found = ways[(seed + i) % 3].generate([1, 2, 3], max_new_tokens=20, K=K, stop=stops)
        assert (found.text, found.generated_ids) == (wanted.text, wanted.generated_ids)
        assert found.text_ids == wanted.text_ids


def test_ids_behind_a_stop_string_can_be_left_out():
    ids = TOKENIZER("Oh ha ha ha")["input_ids"]
    checker = StopChecker(TOKENIZER, ["ha h"])
    read = ids[:checker.read(ids)]
    assert checker.text == "Oh " and decode(read) == "Oh ha ha" and decode(read[:checker.tokens_before]) == "Oh"


def test_long_stop_strings_take_no_longer_than_the_text():
    checker = StopChecker(TOKENIZER, ["ab" * 250_000 + "c", "ab" * 250_000 + "d"])
    start = process_time()
    for token in TOKENIZER("ab" * 2000)["input_ids"]:
        checker.read([token])
        checker.new()
    assert process_time() - start < 5 and checker.given == 0


# Memory

def sampled(pair, cycle: int, lengths, **more) -> None:
    "Generations with other prompts, seeds and draft lengths in each cycle."
    for n, length in enumerate(lengths):
        prompt = [(17 * cycle + 31 * n + i) % 900 + 3 for i in range(length)]
        pair.generate(prompt, temperature=0.8, seed=100 * cycle + n, K=1 + (n + cycle) % 6, **more)

def test_generations_leave_no_objects_behind():
    pair, counts = Pair(talker(vocab=1000), talker(seed=1, vocab=1000)), []
    for cycle in range(6):
        sampled(pair, cycle, range(1, 11), max_new_tokens=6)
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[-1] - counts[1] < 20  # 40 generations


@pytest.mark.slow
def test_memory_levels_where_prompts_have_the_lengths_of_earlier_ones():
    """oneDNN keeps the programs of the last 1,024 shapes, and the allocator what it has had: memory grows with new
    lengths of prompts, up to a limit, and not with generations."""
    statm = Path("/proc/self/statm")
    if not statm.exists(): pytest.skip("the system doesn't say")
    pair, pages = load_pair("smollm2-draft", "cpu", "float32"), []
    for cycle in range(6):
        sampled(pair, cycle, range(5, 250, 20), max_new_tokens=8)
        pages.append(int(statm.read_text().split()[1]))
    assert pages[-1] < 1.04 * pages[2], pages


# Sent to another process

def answer_of(pair, prompt, prefilled, stop) -> tuple[list[int], str, int]:
    result = pair.generate(prompt, max_new_tokens=4, prefilled=prefilled)
    return result.generated_ids, pair.target.name, result.prompt_reused


@pytest.mark.parametrize("name", ["smollm2", pytest.param("smollm2-draft", marks=pytest.mark.slow),
                                  pytest.param("smollm2-skip", marks=pytest.mark.slow)])
def test_a_pair_goes_to_another_process_by_its_names(name, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)  # of pytest-xdist, it has none
    pair = load_pair(name, "cpu", "float32")
    prefilled = pair.prefill("word " * 300)
    assert len(pickle.dumps(pair)) < 10_000
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for given in ((None, ()), (prefilled, ())):
            asked = pair, "word " * 300 + "and", *given
            assert pool.submit(answer_of, *asked).result(100) == answer_of(*asked)


def test_copies_of_a_pair_share_its_models():
    pair = load_pair("smollm2", "cpu", "float32")
    said = pair.generate("Hello", max_new_tokens=4).generated_ids
    prefilled = pair.prefill("Hello there")
    for one in (copy.copy(pair), copy.deepcopy(pair)):
        assert one.target is pair.target and one.adding is not pair.adding and one.stats == pair.stats
        for state in (prefilled, copy.copy(prefilled), copy.deepcopy(prefilled)):
            assert one.generate("Hello there", max_new_tokens=2, prefilled=state).prompt_reused
        assert one.generate("Hello", max_new_tokens=4).generated_ids == said and pair.stats.texts == 1
    again = [pickle.loads(pickle.dumps(pair)) for _ in range(2)]
    assert again[0].target is again[1].target is not pair.target  # a process has one of each


def test_what_has_no_name_says_what_to_do():
    for one in (Pair(talker()), talker(), Pair(talker(), talker(seed=1)), copy.copy(real())):
        with pytest.raises(InputError, match="made in memory.*load it by its folder"): pickle.dumps(one)
    pair = Pair(talker(), talker(seed=1))
    assert copy.deepcopy(pair).generate([1, 2], max_new_tokens=5) is not None


def test_a_module_in_memory_goes_with_its_weights():
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    model = TransformersLM(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=24)))
    for one in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert one.model is not model.model and greedy(one, [1, 2], 5) == greedy(model, [1, 2], 5)


@pytest.mark.parametrize("method", METHODS)
def test_prompts_of_every_kind(method):
    pair = Pair(talker())
    chat = [{"role": "user", "content": "Hello"}]
    for prompt, ids in [
        ("Hello there", TOKENIZER("Hello there")["input_ids"]), ([1, 2, 3], [1, 2, 3]),
        (torch.tensor([1, 2, 3]), [1, 2, 3]),
        (chat, TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)),
    ]:
        result = pair.generate(prompt, max_new_tokens=6, method=method)
        assert result.prompt_ids == ids and result.method == method and result.finish_reason == "length"
        assert result.generated_ids == greedy(pair.target, ids, 6)
        assert result.text == decode(result.generated_ids)
        consistent(result)


@settings(max_examples=examples(25), deadline=None)
@given(
    seed=st.integers(0, 10**6), temperature=st.sampled_from([0.0, 0.7, 1.5]), K=st.integers(1, 6),
    count=st.integers(1, 40), kind=st.sampled_from(["n-gram", "itself", "skip", None]),
)
def test_streamed_pieces_make_the_text(seed, temperature, K, count, kind):
    target = talker()
    pair = Pair(target, {"itself": target, "skip": target.skip([1])}.get(kind))
    pieces = []
    result = pair.generate(
        "Hello", K=K, temperature=temperature, max_new_tokens=count, seed=seed, stream=pieces.append,
        method="speculative" if kind else "plain",
    )
    assert "".join(pieces) == result.text == decode(result.generated_ids)
    assert len(result.generated_ids) == count and all(pieces)
    consistent(result)


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 10**6), start=st.integers(0, 60), length=st.integers(1, 12),
    kind=st.sampled_from(["n-gram", "itself"]), decoy=st.text("abc ", min_size=1, max_size=3),
)
def test_stop_strings_end_the_text_at_the_earliest_token(seed, start, length, kind, decoy):
    target = talker()
    pair = Pair(target, target if kind == "itself" else None)
    arguments = dict(temperature=1.0, max_new_tokens=24, seed=seed, K=4)
    full = pair.generate("Hello", **arguments)
    stop = full.text[start:start + length]
    assume(stop and "\ufffd" not in full.text)
    pieces = []
    result = pair.generate("Hello", stop=[stop, decoy], stream=pieces.append, **arguments)
    tokens = next(
        n for n in range(1, 25) if stop in decode(full.generated_ids[:n]) or decoy in decode(full.generated_ids[:n])
    )
    assert result.finish_reason == "stop"
    assert result.generated_ids == full.generated_ids[:tokens]
    seen = decode(result.generated_ids)
    # the one that is complete first; of two that one character completes the longer
    ends = [(seen.find(one) + len(one), seen.find(one)) for one in (stop, decoy) if one in seen]
    assert result.text == seen[:min(ends)[1]]
    assert "".join(pieces) == result.text
    consistent(result)


def test_a_stop_string_in_the_first_token():
    full = Pair(talker()).generate("Hello", max_new_tokens=4)
    result = Pair(talker()).generate("Hello", max_new_tokens=4, stop=decode(full.generated_ids[:1])[0])
    assert (result.finish_reason, result.text, result.num_tokens, result.rounds) == ("stop", "", 1, [])
    consistent(result)


def test_a_text_that_only_begins_like_a_stop_string_is_shown_in_the_end():
    full = Pair(talker()).generate("Hello", max_new_tokens=5)
    pieces = []
    result = Pair(talker()).generate("Hello", max_new_tokens=5, stop=full.text[-2:] + "never", stream=pieces.append)
    assert result.text == full.text == "".join(pieces) and result.finish_reason == "length"


def test_every_finish_reason():
    pair = Pair(talker(context=20), talker(context=20))
    prompt = [1, 2, 3]
    said = greedy(pair.target, prompt, 17)
    assert pair.generate(prompt, max_new_tokens=1).num_tokens == 1
    full = pair.generate(prompt, max_new_tokens=1000)
    assert (full.finish_reason, full.generated_ids) == ("context", said)
    assert pair.generate(prompt, max_new_tokens=17).finish_reason == "length"
    for at in (0, 4, 9):
        ending = copy.copy(pair.target)
        ending.eos_ids = frozenset({said[at]})
        result = Pair(ending, pair.target).generate(prompt, K=6, max_new_tokens=17)
        assert (result.finish_reason, result.generated_ids) == ("eos", said[:said.index(said[at]) + 1])
        consistent(result)


def test_a_stop_string_of_a_million_characters_costs_nothing():
    "At each token the text may end with its beginning; the text is short."
    stop = "the " * 250_000 + "."
    checker = StopChecker(TOKENIZER, [stop, stop[1:], "x" * 10**6])
    begun = time.monotonic()
    pieces = []
    for token in TOKENIZER(" the" * 150 + " end", add_special_tokens=False)["input_ids"]:
        checker.read([token])
        pieces.append(checker.new())
    assert time.monotonic() - begun < 5
    assert len([piece for piece in pieces if piece]) < 5 and "".join(pieces).startswith(" the the")


def test_special_tokens_are_ids_but_not_text():
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    answer = StopChecker(TOKENIZER)
    assert answer.read([28120, end]) == 2
    answer.finish([28120, end])
    assert answer.text == decode([28120])


def test_one_pair_serves_many_texts():
    target = talker()
    for draft in (None, target, target.skip([0]), talker(seed=1)):
        pair = Pair(target, draft)
        first = pair.generate("Hello", temperature=1.0, seed=5, max_new_tokens=20)
        pair.generate("Something else entirely", max_new_tokens=7)
        with pytest.raises(NumericalError): Pair(Failing(target, 5), pair.drafter).generate([1, 2, 3], max_new_tokens=9)
        assert pair.generate("Hello", temperature=1.0, seed=5, max_new_tokens=20).generated_ids == first.generated_ids
        fresh = pair.generate("Hello", temperature=1.0, max_new_tokens=20)
        again = pair.generate("Hello", temperature=1.0, max_new_tokens=20, seed=fresh.settings["seed"])
        assert again.generated_ids == fresh.generated_ids


@pytest.mark.slow  # `test_eight_threads_share_a_pair_and_its_totals` shows it too
def test_threads_share_a_pair():
    "With a draft model, whose cache two texts at once would spoil."
    target = talker(context=600)
    pair, prompts = Pair(target, talker(seed=1, context=600)), [
        "Hello", "Something else entirely", "A third", "The last of them",
    ]
    alone = [pair.generate(prompt, temperature=1.0, seed=5, max_new_tokens=40).generated_ids for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = [
            pool.submit(pair.generate, prompt, temperature=1.0, seed=5, max_new_tokens=40)
            for _ in range(4)
            for prompt in prompts
        ]
    assert [run.result().generated_ids for run in found] == alone * 4


@pytest.mark.parametrize("work", ["together", "text", "left early"])
def test_no_thread_keeps_workers_that_would_slow_down_the_next(work):
    "Whoever waits keeps none of OpenMP's threads: neither after putting a pair together nor after a text."
    if not workers_kept(lambda: None): pytest.skip("no libgomp here: no thread keeps workers")
    target, pair = talker(), Pair(talker(), NGramDrafter())
    def left_early():
        for _ in pair.stream("Hello", max_new_tokens=8): break
    done = {
        "together": lambda: Pair(target, NGramDrafter()),
        "text": lambda: pair.generate("Hello", max_new_tokens=4),
        "left early": left_early,
    }
    assert workers_kept(done[work]) == 0


def own_model(): return ModelDrafter(tiny(seed=1, context=600), 24)

def shared(kind: str): # two drafters that remember a text in the same place
    model = own_model()
    if kind == "itself": return model, model
    if kind == "inside another": return TemperatureScaledDrafter(model), model
    if kind == "in a dictionary": return Listed(model), TemperatureScaledDrafter(model)
    return HybridDrafter(SuffixDrafter(), TemperatureScaledDrafter(model)), HybridDrafter(model, NGramDrafter())

class Listed:
    "A user's own wrapper, which keeps what it wraps in a dictionary."
    layers, name = (), "listed"
    def __init__(self, drafter): self.by_name = {"only": drafter}
    def start(self, *told): return self.by_name["only"].start(*told)

SHARING = ["itself", "inside another", "in a dictionary", "inside two others"]

@pytest.mark.parametrize("kind", SHARING)
def test_pairs_that_share_a_drafter_need_not_take_turns(kind):
    target, prompts = tiny(context=600), ([1, 2, 3], [7, 5, 9, 2, 7])
    both = [Pair(target, drafter) for drafter in shared(kind)]
    asked = [(pair, prompt) for pair in both for prompt in prompts]
    def text(of): return of[0].generate(of[1], temperature=1.0, seed=5, max_new_tokens=15, K=3).generated_ids
    alone = [text(of) for of in asked]
    with ThreadPoolExecutor(8) as pool: assert list(pool.map(text, asked * 2)) == alone * 2


@pytest.mark.parametrize("kind", SHARING)
def test_streams_interleaved_token_by_token_give_what_they_give_alone(kind):
    "Four streams of two pairs with one drafter take turns at random; one more is left half way."
    target, prompts = tiny(context=600), ([1, 2, 3], [7, 5, 9, 2, 7])
    both = [Pair(target, drafter) for drafter in shared(kind)]
    how = dict(temperature=1.0, seed=5, max_new_tokens=15, K=3)
    asked = [(pair, prompt) for pair in both for prompt in prompts]
    alone = [pair.generate(prompt, **how).generated_ids for pair, prompt in asked]
    left = both[0].stream(prompts[0], **how)
    for _ in range(7): next(left)
    streams, said, random = [pair.stream(prompt, **how) for pair, prompt in asked], [[] for _ in asked], Random(0)
    running = list(range(len(asked)))
    while running:
        i = random.choice(running)
        event = next(streams[i], None)
        if event is None: running.remove(i)
        elif event.token is not None and event.status != "rejected": said[i].append(event.token)
    assert said == alone


def within(seconds: float, work):
    "What the work returns or raises, if it comes to an end at all."
    outcome = []
    def run():
        try: outcome.append(work())
        except Exception as error: outcome.append(error)
    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, "it waits for ever"
    if isinstance(outcome[0], Exception): raise outcome[0]
    return outcome[0]

def started(work) -> Thread:
    thread = Thread(target=work, daemon=True)
    thread.start()
    return thread

def by_itself(work): work()
def by_join(work): started(work).join()
def by_two_joins(work): started(lambda: started(work).join()).join()
def by_a_result(work):
    with ThreadPoolExecutor(1) as pool: pool.submit(work).result()
def by_leaving_a_pool(work):
    with ThreadPoolExecutor(1) as pool: pool.submit(work)
def by_a_map(work):
    with ThreadPoolExecutor(2) as pool: list(pool.map(lambda i: work(), range(2)))

WAYS = [by_itself, by_join, by_two_joins, by_a_result, by_leaving_a_pool, by_a_map]

@pytest.mark.parametrize("other", [False, True], ids=["one pair", "another with the same drafter"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_text_within_a_text_is_served(way, other):
    "A callback asks for another text of the drafter that is just calling it, and gets it at once."
    pair = Pair(talker(), talker(seed=1))
    asked = Pair(talker(), TemperatureScaledDrafter(pair.drafter)) if other else pair
    alone = asked.generate("Hello", max_new_tokens=2).generated_ids
    whole = pair.generate("Hello", max_new_tokens=5).generated_ids
    inner = []
    def ask(): inner.append(asked.generate("Hello", max_new_tokens=2).generated_ids)
    result = within(20, lambda: pair.generate("Hello", max_new_tokens=5, stream=lambda piece: way(ask)))
    assert result.generated_ids == whole and inner and all(text == alone for text in inner)


def test_two_streams_that_ask_for_each_other_are_both_served():
    one, two, met = Pair(talker()), Pair(talker()), Barrier(2)
    def crossing(mine, other):
        asked = []
        def stream(piece):
            if asked: return
            asked.append(piece)
            met.wait()
            assert other.generate("Hello", max_new_tokens=2).num_tokens == 2
        return mine.generate("Hello", max_new_tokens=5, stream=stream).num_tokens
    def both():
        with ThreadPoolExecutor(2) as pool:
            return [run.result() for run in (pool.submit(crossing, one, two), pool.submit(crossing, two, one))]
    assert within(20, both) == [5, 5]


def test_nobody_waits_for_a_stream_that_is_left_alone():
    "A thread holds a stream of one pair and goes away; its drafter serves everybody else."
    drafter = own_model()
    held, free = Pair(tiny(context=600), drafter), Pair(tiny(context=600), drafter)
    stream = held.stream([1, 2, 3], max_new_tokens=30)
    next(stream)
    for pair in (held, free):
        assert within(5, lambda: pair.generate([1, 2, 3], max_new_tokens=9)).num_tokens == 9
    rest = [event for event in stream if event.result][0].result
    assert rest.generated_ids == held.generate([1, 2, 3], max_new_tokens=30).generated_ids


def test_eight_threads_share_a_pair_and_its_totals():
    pair, prompts = Pair(talker(), talker(seed=1)), ["Hello", "Something else entirely", "A third", "The last of them"]
    def text(seed):
        return pair.generate(prompts[seed % 4], temperature=1.0, seed=seed, max_new_tokens=10).generated_ids
    alone = [text(seed) for seed in range(8)]
    pair.reset_stats()
    with ThreadPoolExecutor(8) as pool: assert list(pool.map(text, [*range(8)] * 2)) == alone * 2
    assert (pair.stats.texts, pair.stats.tokens) == (16, 2 * sum(map(len, alone)))


def test_an_error_and_an_interrupt_leave_a_pair_as_it_was():
    pair = Pair(talker())
    def broken(piece): raise RuntimeError("theirs")
    def impatient(piece): raise KeyboardInterrupt
    with pytest.raises(RuntimeError, match="theirs"): pair.generate("Hello", stream=broken)
    pair.generate("Hello", stream=impatient)
    assert within(20, lambda: pair.generate("Hello", max_new_tokens=5)).num_tokens == 5


# Numbers, whatever holds them

NUMBERS = dict(
    K=np.int64(3), temperature=np.float32(0.5), top_k=np.int32(7), top_p=np.float64(0.9), min_p=np.float32(0.25),
    seed=np.uint8(1), max_new_tokens=torch.tensor(3),
)
PLAIN = dict(K=3, temperature=0.5, top_k=7, top_p=0.9, min_p=0.25, max_new_tokens=3, seed=1)

@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_numpy_and_torch_are_as_good_as_plain_ones(name):
    pair = Pair(talker(), talker(seed=1))
    result = pair.generate("Hello", **(PLAIN | {name: NUMBERS[name]}))
    assert result.generated_ids == pair.generate("Hello", **PLAIN).generated_ids and result.finish_reason == "length"
    assert json.loads(result.to_json())["settings"] == PLAIN | dict(stop=[], ignore_eos=False)
    assert type(result.settings[name]) is type(PLAIN[name])
    consistent(result)

@pytest.mark.parametrize("wrong", [True, np.bool_(True), torch.tensor(True), "3", float("nan"), [3], 1j], ids=repr)
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_is_refused(name, wrong):
    with pytest.raises(InputError, match=name): Pair(Untouchable()).generate([1], **{name: wrong})

def test_ends_of_numpy_and_torch_end_a_text():
    pair = Pair(talker())
    full = pair.generate([1, 2, 3], max_new_tokens=9)
    for number in (np.int64, torch.tensor):
        pair.eos_ids = {number(full.generated_ids[4])}
        ended = pair.generate([1, 2, 3], max_new_tokens=9)
        first = full.generated_ids.index(full.generated_ids[4])
        assert ended.finish_reason == "eos" and ended.generated_ids == full.generated_ids[:first + 1]


def test_settings_are_recorded():
    result = Pair(talker()).generate(
        "Hello", K=3, temperature=0.5, top_k=7, top_p=0.9, max_new_tokens=3, seed=1, stop="zzzz"
    )
    assert result.settings == dict(
        K=3, temperature=0.5, top_k=7, top_p=0.9, min_p=None, max_new_tokens=3, seed=1, stop=["zzzz"],
        ignore_eos=False,
    )


# Ends that are ignored

@pytest.mark.parametrize("method", METHODS)
def test_ends_can_be_ignored(method):
    target, prompt = copy.copy(talker()), [1, 2, 3]
    said = greedy(target, prompt, 12)
    target.eos_ids = frozenset(said)
    for draft in (None, NGramDrafter(), talker()):
        ended, whole = (
            Pair(target, draft).generate(prompt, max_new_tokens=12, method=method, ignore_eos=ignored)
            for ignored in (False, True)
        )
        assert (ended.finish_reason, ended.num_tokens) == ("eos", 1)
        assert (whole.finish_reason, whole.generated_ids) == ("length", said)
        assert whole.settings["ignore_eos"] is True
        consistent(whole)
    events = list(Pair(target).stream(prompt, max_new_tokens=12, ignore_eos=True))
    assert events[-1].result.generated_ids == said


# Events

@settings(max_examples=examples(20), deadline=None)
@given(
    seed=st.integers(0, 10**6), temperature=st.sampled_from([0.0, 1.0]), K=st.integers(1, 6), count=st.integers(1, 30),
    kind=st.sampled_from(["n-gram", "itself", "skip", "plain"]), stop=st.sampled_from(["", "a", "e t", "zzzz"]),
)
def test_a_stream_tells_each_token_with_its_status(seed, temperature, K, count, kind, stop):
    target = talker()
    pair = Pair(target, {"itself": target, "skip": target.skip([1]), "n-gram": NGramDrafter()}.get(kind))
    method = "plain" if kind == "plain" else "speculative"
    arguments = dict(K=K, temperature=temperature, max_new_tokens=count, seed=seed, method=method, stop=stop or ())
    *events, end = pair.stream("Hello", **arguments)
    result = end.result
    assert result.generated_ids == pair.generate("Hello", **arguments).generated_ids
    assert [(event.token, event.status) for event in events] == list(statuses(result))
    assert "".join(event.text for event in (*events, end)) == result.text
    assert end.token is end.status is None and all(event.result is None for event in events)
    assert not any(event.text for event in events if event.status == "rejected")
    consistent(result)


def test_a_rejected_draft_is_told_without_text():
    *events, end = Pair(talker(), talker(seed=1)).stream("Hello", K=2, max_new_tokens=12)
    kept = [event for event in events if event.status != "rejected"]
    assert len(kept) == 12 < len(events) and not any(event.text for event in events if event.status == "rejected")
    said = [decode(end.result.generated_ids[:n]) for n in range(13)]
    whole = [n for n in range(13) if not said[n].endswith("\ufffd")]
    for n in whole: assert "".join(event.text for event in kept[:n]) == said[n]


def test_text_comes_with_the_token_that_made_it_certain():
    ids = [*TOKENIZER("a 🦔 b")["input_ids"]]
    class Reciting(NoDrafter):
        def propose(self, K, sampling, rng): return Draft(ids[1:1 + K])
    def believe(p, q, tokens, rng): return len(tokens), ids[0]
    *events, end = Pair(talker(), Reciting()).stream([1], K=len(ids), max_new_tokens=len(ids) + 1, verify=believe)
    said = [event.text for event in events]
    assert "".join([*said, end.text]) == end.result.text and "🦔" in end.result.text
    whole = next(i for i, piece in enumerate(said) if "🦔" in piece)
    assert said[whole - 1] == "" and not any("\ufffd" in piece for piece in said)


def test_a_stream_that_is_left_early_leaves_nothing_behind():
    pair, threads = Pair(talker(), talker(seed=1)), threading.active_count()
    whole = pair.generate("Hello", max_new_tokens=20)
    for event in pair.stream("Hello", max_new_tokens=20):
        if event.status != "target": break
    events = pair.stream("Hello", max_new_tokens=20)
    next(events)
    assert pair.generate("Hello", max_new_tokens=20).generated_ids == whole.generated_ids  # beside it
    events.close()
    assert threading.active_count() == threads and list(events) == []
    again = within(20, lambda: pair.generate("Hello", max_new_tokens=20))
    assert again.generated_ids == whole.generated_ids


def test_the_listeners_time_is_not_counted():
    "Nor that of one who listens to tokens; a callback is part of the run."
    for event in Pair(talker()).stream("Hello", max_new_tokens=5): sleep(0.1)
    assert event.result.total_time < 0.4 and max(event.result.round_latencies) < 0.1
    slow = Pair(talker()).generate("Hello", max_new_tokens=5, stream=lambda piece: sleep(0.1))
    assert slow.total_time > 0.1


@pytest.mark.parametrize("change, words", [
    (dict(K=0), "K, the number"), (dict(prompt=""), "empty"),
    (dict(ignore_eos="no"), "ignore_eos must be True or False"),
    (dict(raise_interrupt=None), "raise_interrupt must be True or False"),
], ids=["K", "prompt", "ignore_eos", "raise_interrupt"])
def test_a_wrong_stream_is_told_at_once(change, words):
    target = Untouchable()
    target.tokenizer = TOKENIZER
    with pytest.raises(InputError, match=words): Pair(target).stream(**({"prompt": [1]} | change))


@pytest.mark.parametrize("name", ["stream", "max_tokens"])
def test_a_keyword_that_there_is_not_is_named(name):
    "By Python itself, as for any function whose signature says its arguments."
    for ask in (Pair(talker()).stream, Pair(talker()).results):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"): ask([1], **{name: print})
    with pytest.raises(TypeError, match="max_tokens"): Pair(talker()).generate([1], max_tokens=3)


def test_everything_after_the_prompt_is_named():
    for call in (Pair(Untouchable()).generate, Pair(Untouchable()).stream):
        with pytest.raises(InputError, match="must be an Options"): call([1], 5)
        with pytest.raises(TypeError, match="positional"): call([1], None, 5)


# What drafts where nobody says

def test_the_default_drafter_is_the_head_for_its_weights_only():
    target = copy.copy(real())
    best = Pair(target).drafter
    kinds = [type(member) for member in best.members]
    assert type(best) is HybridDrafter and kinds == [SuffixDrafter, TemperatureScaledDrafter]
    assert type(best.members[1].drafter) is HeadDrafter
    for digest in ("f" * 64, None):
        target.digest = digest
        assert [type(member) for member in Pair(target).drafter.members] == [SuffixDrafter]
    assert pairs.drafter_name(best) == "lookup + head" and pairs.drafter_name(Pair(target).drafter) == "lookup"


def test_the_default_looks_up_where_that_pays_and_only_there(monkeypatch):
    "At the same prices: a looked-up token costs nothing, and reading it a twentieth of a step."
    steps = {1: .01, 3: .011, 9: .014}
    monkeypatch.setattr(costs, "take_prices", lambda *given: costs.Prices(forwards=steps, drafts=[{1: 1e-6, 4: 1e-6}]))
    loop = [7, 8, 9] * 200
    def right(p, q, tokens, rng): return len(tokens), 7 + len(tokens) % 3  # as the loop goes on
    pair = Pair(talker(context=400))
    pays = pair.generate(loop[:30], K=2, max_new_tokens=90, verify=right)
    assert pays.drafter == "lookup" and pays.tokens_per_step > 2
    nonsense = pair.generate("Hello", temperature=1.5, max_new_tokens=200, seed=0)
    assert nonsense.drafter == "lookup" and sum(bool(r.drafted) for r in nonsense.rounds) < 10


def test_the_result_says_what_drafted():
    target = talker()
    names = {
        "n-gram lookup": NGramDrafter(), "nothing": NoDrafter(), "a model": target.skip([1]),
        "lookup + a model": HybridDrafter(SuffixDrafter(), TemperatureScaledDrafter(ModelDrafter(target, V))),
    }
    for name, draft in names.items():
        pair = Pair(target, draft)
        assert pair.generate("Hello", max_new_tokens=3).drafter == name
        assert pair.generate("Hello", max_new_tokens=3, method="plain").drafter is None


# Running totals

def test_totals_are_the_sums_of_the_results():
    pair = Pair(talker(), talker().skip([1]))
    assert pair.stats == PairStats() and pair.stats.acceptance_rate == pair.stats.tokens_per_step == 0
    assert pair.stats.speedup_estimate() is None and pair.stats.tokens_per_second == 0
    drafted = [pair.generate("Hello", K=3, max_new_tokens=n) for n in (9, 14)]
    plain = pair.generate("Hello", max_new_tokens=6, method="plain")
    stats, counts = pair.stats, pair.stats.counts
    rounds = [r for result in drafted for r in result.rounds]
    assert (stats.texts, stats.tokens, counts.rounds) == (3, 29, len(rounds))
    assert counts.drafted == sum(r.num_drafted for r in drafted) and counts.accepted == sum(r.accepted for r in rounds)
    rejected = sum(r.accepted < len(r.drafted) for r in rounds)
    assert stats.alpha == pytest.approx(counts.accepted / (counts.accepted + rejected)) and rejected > 0
    assert stats.tokens_per_step == pytest.approx(21 / len(rounds))
    assert stats.seconds == pytest.approx(sum(r.total_time for r in (*drafted, plain)))
    assert stats.plain_steps == 5 + sum(not r.drafted for r in rounds)
    spent = sum(r.draft_time_total_ms + r.verify_time_total_ms + r.sampling_time_total_ms for r in drafted) / 1000
    step = stats.plain_seconds / stats.plain_steps
    assert stats.speedup_estimate() == pytest.approx(21 * step / spent)
    pair.reset_stats()
    assert pair.stats == PairStats() and stats.texts == 3


def test_totals_count_what_was_interrupted_and_not_what_was_left():
    pair = Pair(talker())
    def impatient(piece): raise KeyboardInterrupt
    pair.generate("Hello", stream=impatient)
    for event in pair.stream("Hello"): break
    assert pair.stats.texts == 1


def test_totals_of_threads_add_up():
    pair = Pair(talker())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: pair.generate("Hello", max_new_tokens=3, method="plain"), range(24)))
    assert (pair.stats.texts, pair.stats.tokens, pair.stats.plain_steps) == (24, 72, 48)


# Memory

@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux sets the peak back")
def test_memory_is_that_of_the_run():
    gc.collect()
    def eats(piece): assert np.ones(400_000_000, np.uint8).all()
    def peak(stream): return Pair(talker()).generate("Hello", max_new_tokens=2, stream=stream).peak_memory_mb
    peak(None)
    before, risen = peak(None), peak(eats)
    gc.collect()
    again = min(peak(None) for _ in range(3))  # the system may take back late what was freed
    assert risen > before + 200 and again < risen - 200


def test_memory_that_cannot_be_told_is_none(monkeypatch):
    monkeypatch.setattr(pairs, "reset_peak_memory", lambda device: False)
    result = Pair(talker()).generate("Hello", max_new_tokens=2)
    assert result.peak_memory_mb is None and "peak" not in result.summary()
    consistent(result)


# Other verify rules

def believer(p, q, tokens, rng): return len(tokens), rng.categorical(p[len(tokens)])

class Believer:
    "A rule that is an object with parameters, and says of itself what it is told to."
    def __init__(self, lossless): self.lossless = lossless
    def __call__(self, p, q, tokens, rng): return believer(p, q, tokens, rng)
    def __str__(self): return "Believer(0.5)"

def labelled(rule, temperature, draft=None):
    return Pair(talker(), draft or talker().skip([1])).generate(
        "Hello", K=3, temperature=temperature, max_new_tokens=13, seed=1, verify=rule
    )

LABELS = [ # rule, what the result says at temperature 0 and 1
    pytest.param(None, True, True, id="no rule"),
    pytest.param(speculative_sampling, True, True, id="speculative_sampling"),
    pytest.param(greedy_match, True, False, id="greedy_match"),
    pytest.param(sample_and_match, True, True, id="sample_and_match"),
    pytest.param(LossyLenience(0.3), True, False, id="lenience"),
    pytest.param(LossyLenience(1.0), True, True, id="lenience of 1: the ratio test"),
    pytest.param(LossyTypical(0.09, 0.3), True, False, id="typical"),
    pytest.param(believer, None, None, id="a rule that says nothing"),
    pytest.param(Believer("never"), False, False, id="never"),
    pytest.param(Believer("greedy"), True, False, id="greedy"),
    pytest.param(Believer("always"), True, True, id="always"),
    pytest.param(partial(speculative_sampling), None, None, id="a wrapper says nothing"),
]

@pytest.mark.parametrize("rule, cold, warm", LABELS)
def test_losslessness_is_claimed_by_the_rule_for_the_temperature(rule, cold, warm):
    for temperature, said in ((0, cold), (1.0, warm)):
        result = labelled(rule, temperature)
        assert result.is_lossless is said and result.method == "speculative" and result.is_speculative
        start = {True: "speculative: ", False: "lossy speculative: ", None: "perhaps lossy speculative: "}[said]
        assert result.summary().startswith(start) and start in result._repr_html_()
        assert json.loads(result.to_json())["is_lossless"] is said
        consistent(result)

@pytest.mark.parametrize("claim", [True, "Always", ["always"]], ids=repr)
def test_a_claim_that_is_none(claim):
    with pytest.raises(InputError, match="always.*greedy.*never"):
        Pair(Untouchable()).generate([1], verify=Believer(claim))

def test_a_lossy_rule_is_told_in_the_result():
    result = labelled(Believer("never"), 1.0)
    assert result.settings["verify"] == "Believer(0.5)" and result.acceptance_rate == 1
    assert result.num_speculation_rounds == 3 and "acceptance rate 1.00" in result.summary()


@pytest.mark.parametrize(
    "temperature, rule",
    [(0.0, greedy_match), (0.0, speculative_sampling), (0.0, block_verification), (1.0, speculative_sampling)],
)
def test_the_rule_by_default_is_the_lossless_one(temperature, rule):
    given, default = (labelled(v, temperature) for v in (rule, None))
    assert (
        given.generated_ids == default.generated_ids
        and given.settings.pop("verify") == rule.__name__
        and given.settings == default.settings
    )
    # the rule that is given is the one that runs
    believed = labelled(believer, temperature)
    assert believed.generated_ids != given.generated_ids and believed.acceptance_rate == 1


def test_sampled_drafts_are_judged_token_by_token_unless_a_rule_is_given():
    default, by_blocks = (labelled(rule, 1.0) for rule in (None, block_verification))
    assert default.generated_ids != by_blocks.generated_ids and by_blocks.is_lossless


@pytest.mark.parametrize(
    "rule, name",
    [
        (sample_and_match, "sample_and_match"), (LossyLenience(0.3), "LossyLenience(l=0.3)"),
        (LossyTypical(0.09, 0.3), "LossyTypical(epsilon=0.09, delta=0.3)"),
    ],
)
def test_the_rules_of_the_package_decode(rule, name):
    for pair in (Pair(talker(), talker().skip([1])), Pair(talker())):
        cold, default = (pair.generate("Hello", K=3, max_new_tokens=20, verify=v) for v in (rule, None))
        # at temperature 0 p is one-hot: the greedy match, whatever the rule
        assert cold.generated_ids == default.generated_ids and cold.is_lossless
        warm = pair.generate("Hello", K=3, temperature=0.8, max_new_tokens=20, seed=1, verify=rule)
        for result in (cold, warm):
            assert result.settings["verify"] == name
            consistent(result)


@pytest.mark.parametrize("answer", [
    None, 1, "ab", (), (1,), (1, 2, 3), (4, 5), (-1, 5), (0, V), (0, -1), (0.5, 5), (True, 5), (0, 5.0), (0, None),
    torch.tensor([0.5, 5]),
], ids=repr)
def test_a_rule_that_answers_rubbish_is_named(answer):
    def rubbish(p, q, tokens, rng): return answer
    with pytest.raises(ModelError, match="verify rule rubbish returned"): labelled(rubbish, 1.0)

def test_numbers_of_a_rule_are_made_plain():
    def theirs(p, q, tokens, rng): return torch.tensor(speculative_sampling(p, q, tokens, rng))
    ours, result = labelled(speculative_sampling, 1.0), labelled(theirs, 1.0)
    assert result.generated_ids == ours.generated_ids and result.is_lossless is None
    consistent(result)


def test_plain_decoding_is_lossless():
    assert Pair(talker()).generate("Hello", max_new_tokens=3, method="plain").is_lossless


# Interrupts

@pytest.mark.parametrize("after", [1, 2, 5])
def test_interrupt_in_the_callback(after):
    heard = []
    def impatient(piece):
        heard.append(piece)
        if len(heard) >= after: raise KeyboardInterrupt  # and would again
    result = Pair(talker()).generate("Hello", max_new_tokens=30, stream=impatient, stop="zzzz")
    full = Pair(talker()).generate("Hello", max_new_tokens=30)
    assert (
        result.finish_reason == "interrupted"
        and result.generated_ids == full.generated_ids[: result.num_tokens]
        and 0 < result.num_tokens < 30
    )
    assert (
        len(heard) == after and result.text.startswith("".join(heard)) and result.text == decode(result.generated_ids)
    )
    consistent(result)


@pytest.mark.parametrize("at", [0, 4, 9])
def test_interrupt_in_a_forward(at):
    class Interrupted(Failing):
        def forward(self, ids, cache, **options):
            if cache.length >= self.at: raise KeyboardInterrupt
            return self.model.forward(ids, cache, **options)
    for broken in (Pair(Interrupted(talker(), at)), Pair(talker(), Interrupted(talker(), at))):
        result = broken.generate([1, 2, 3], max_new_tokens=30)
        assert (
            result.finish_reason == "interrupted"
            and result.generated_ids == greedy(talker(), [1, 2, 3], 30)[: result.num_tokens]
        )
        assert result.num_tokens < 12
        consistent(result)


@pytest.mark.parametrize("at", [0, 4, 9])
def test_an_interrupt_is_raised_for_who_asks(at):
    class Interrupted(Failing):
        def forward(self, ids, cache, **options):
            if cache.length >= self.at: raise KeyboardInterrupt
            return self.model.forward(ids, cache, **options)
    pair = Pair(Interrupted(talker(), at), talker())
    with pytest.raises(KeyboardInterrupt): pair.generate([1, 2, 3], max_new_tokens=30, raise_interrupt=True)
    with pytest.raises(KeyboardInterrupt): list(pair.stream([1, 2, 3], max_new_tokens=30, raise_interrupt=True))
    def impatient(piece): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        Pair(talker(), pair.drafter).generate("Hello", stream=impatient, raise_interrupt=True)
    assert pair.stats.texts == 0
    *events, end = pair.stream([1, 2, 3], max_new_tokens=30)
    assert end.result.finish_reason == "interrupted" and len(events) >= end.result.num_tokens
    assert "".join(event.text for event in (*events, end)) == end.result.text


def test_interrupt_in_the_prompt_leaves_an_empty_result():
    class Interrupted(Failing):
        def forward(self, ids, cache, **options): raise KeyboardInterrupt
    result = Pair(Interrupted(talker(), 0)).generate("Hello")
    assert (result.finish_reason, result.generated_ids, result.text, result.time_to_first_token) == (
        "interrupted", [], "", 0,
    )
    consistent(result)
    assert result.summary()


def test_interrupt_while_text_is_decoded():
    class Slow:
        def __init__(self): self.calls = 0
        def __getattr__(self, name): return getattr(TOKENIZER, name)
        def __call__(self, *args, **kwargs): return TOKENIZER(*args, **kwargs)
        def decode(self, *args, **kwargs):
            self.calls += 1
            if self.calls == 5: raise KeyboardInterrupt
            return TOKENIZER.decode(*args, **kwargs)
    target = copy.copy(talker())
    target.tokenizer = Slow()
    result = Pair(target).generate("Hello", max_new_tokens=30)
    assert (
        result.finish_reason == "interrupted" and result.text == decode(result.generated_ids) and result.num_tokens >= 2
    )
    consistent(result)


# Errors


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(prompt=""), "empty"), (dict(prompt=[]), "empty"), (dict(prompt=None), "not NoneType"),
        (dict(prompt=[24]), "outside"), (dict(prompt=[1] * 16), "nothing could be added"), (dict(K=0), "K, the number"),
        (dict(temperature=-0.1), "temperature"), (dict(temperature=float("nan")), "temperature"),
        (dict(top_k=0), "top_k"), (dict(top_p=0), "top_p"), (dict(top_p=1.1), "top_p"),
        (dict(max_new_tokens=0), "max_new_tokens"), (dict(seed="x"), "seed"), (dict(stop=""), "not empty"),
        (dict(stop=[3]), "Stop strings"), (dict(stop=7), "Stop strings"), (dict(stream=3), "stream must be"),
        (dict(method="magic"), "speculative or plain"), (dict(verify="strict"), "verify must be a function"),
        (dict(verify=Believer), "verify must be a function"),
        (dict(verify=believer, method="plain"), "nothing to verify"),
    ],
)
def test_wrong_arguments_are_told_before_any_work(change, words):
    target = Untouchable()
    target.tokenizer = TOKENIZER
    with pytest.raises(InputError, match=words): Pair(target).generate(**({"prompt": [1]} | change))


def test_models_without_a_tokenizer_decode_ids():
    target = talker(vocab=24, tokenizer=False)
    result = Pair(target).generate([1, 2, 3], max_new_tokens=5)
    assert result.generated_ids == greedy(target, [1, 2, 3], 5) and result.text == ""
    consistent(result)
    with pytest.raises(InputError, match="no tokenizer"): Pair(target).generate("Hello")
    with pytest.raises(InputError, match="no tokenizer"): Pair(target).generate([1], stop="x")
    with pytest.raises(InputError, match="no tokenizer"): Pair(target).generate([1], stream=print)
    with pytest.raises(InputError, match="must be the same"): Pair(target, talker(vocab=25, tokenizer=False))
    with pytest.raises(InputError, match="load\\(name\\)"): Pair(target, "smollm2")


def test_a_draft_with_another_vocabulary():
    other = copy.copy(talker(seed=1))
    other.tokenizer = copy.deepcopy(TOKENIZER)
    other.tokenizer.add_tokens(["<|hedgehog|>"])
    pair = Pair(talker(), other)
    assert str(pair.drafter) == "translated draft, 49,152 of 49,152 tokens shared"
    assert pair.generate([1, 2, 3], K=3, max_new_tokens=20).generated_ids == greedy(talker(), [1, 2, 3], 20)


@pytest.mark.parametrize("target_width, draft_width", [(V, V + 128), (V + 128, V)])
def test_padded_vocabularies_make_a_pair(target_width, draft_width):
    target, draft = talker(vocab=target_width), talker(seed=1, vocab=draft_width)
    for draft in (draft, target):
        result = Pair(target, draft).generate([1, 2, 3], K=3, max_new_tokens=20)
        assert result.generated_ids == greedy(target, [1, 2, 3], 20)
        Pair(target, draft).generate([1, 2, 3], K=3, temperature=1.0, max_new_tokens=20)


def test_two_models_of_transformers():
    from transformers import GPT2Config, GPT2LMHeadModel
    def gpt2(seed, layers):
        torch.manual_seed(seed)
        config = GPT2Config(
            vocab_size=40, n_positions=48, n_embd=16, n_layer=layers, n_head=2, initializer_range=0.5,
            bos_token_id=None, eos_token_id=None,
        )
        return TransformersLM(GPT2LMHeadModel(config).eval())
    target, draft = gpt2(0, 2), gpt2(1, 1)
    for drafting in (None, draft, target):
        result = Pair(target, drafting).generate([1, 2, 3], max_new_tokens=30)
        assert result.generated_ids == greedy(target, [1, 2, 3], 30)
    assert result.acceptance_rate == result.alpha == 1


def test_drafters_of_any_kind_and_their_errors():
    class Mine:
        layers = ()
        def start(self, tokens, features, limit, eos_ids): return self
        def commit(self, tokens, features): pass
        def propose(self, K, sampling, rng): raise ZeroDivisionError("mine")
    class Stateless(Mine):
        def start(self, tokens, features, limit, eos_ids): return None
    with pytest.raises(ModelError, match="Stateless.start gave None: expected the state"):
        Pair(talker(), Stateless()).generate([1])
    with pytest.raises(ZeroDivisionError, match="mine"): Pair(talker(), Mine()).generate([1])
    assert isinstance(Pair(talker(), talker()).drafter, ModelDrafter)


# Trained drafters

SHIPPED = {"smollm2-head": HeadDrafter, "smollm2-draft": ModelDrafter}


def test_shipped_files_are_small_and_no_pickles():
    files = [path for name in SHIPPED for path in shipped(name).iterdir()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert max(path.stat().st_size for path in files) <= 15e6 and sum(path.stat().st_size for path in files) <= 32e6


@lru_cache
def plainly(asked: str) -> list[int]:
    "What plain decoding says to one of the prompts."
    prompt = next(prompt for prompt in prompts() if prompt.text == asked)
    return Pair(real(), NoDrafter()).generate(prompt.messages, max_new_tokens=24, method="plain").generated_ids


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_drafters_are_lossless_and_better_than_nothing(name):
    """Greedy and in float32 the text is the target's own, and some guesses are right: a drafter that was damaged or put
    together wrongly would be lossless too."""
    pair = Pair(real(), load_drafter(shipped(name), real()))
    assert type(pair.drafter.drafter) is SHIPPED[name]
    for prompt in prompts()[:2]:
        speculative = pair.generate(prompt.messages, K=3, max_new_tokens=24)
        assert speculative.generated_ids == plainly(prompt.text)
        assert speculative.tokens_per_step > 1.15, speculative.summary()


@pytest.mark.parametrize("name", SHIPPED)
def test_a_drafter_for_other_weights_is_refused(name):
    other = copy.copy(real())
    other.digest = "f" * 64
    with pytest.raises(ModelError, match="for this target"): load_drafter(shipped(name), other)
    with pytest.raises(ModelError): load_drafter(shipped(name), talker(vocab=40, tokenizer=False))


def test_a_folder_without_a_drafter(tmp_path):
    with pytest.raises(InputError, match="specdec distill"): load_drafter(tmp_path, talker())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError): load_drafter(tmp_path, talker())


def test_a_pair_with_another_drafter():
    def pair_of(name, **settings): return load_pair(name, "cpu", "float32", target=real(), **settings)

    def kinds(drafter):
        inner = kinds(drafter.drafter) if type(drafter) is TemperatureScaledDrafter else ()
        return (type(drafter), *inner)

    assert {
        name: kinds(pair_of(name).drafter)
        for name in ("smollm2-head", "smollm2-draft", "smollm2-ngram")
    } == {
        # what was trained draws colder
        "smollm2-head": (TemperatureScaledDrafter, HeadDrafter),
        "smollm2-draft": (TemperatureScaledDrafter, ModelDrafter),
        "smollm2-ngram": (NGramDrafter,),
    }
    assert kinds(pair_of("smollm2-head", drafter=shipped("smollm2-draft")).drafter) == (
        TemperatureScaledDrafter, ModelDrafter,
    )
    # a trained drafter takes the place of lookup alone; a pair that looks drafts up besides goes on to do so
    other = pair_of("smollm2-ngram", drafter=shipped("smollm2-draft")).drafter
    assert kinds(other) == (TemperatureScaledDrafter, ModelDrafter)
    draft = shipped("smollm2-draft")
    for name, drafter, kind in (
        ("smollm2", None, HeadDrafter), ("smollm2", draft, ModelDrafter),
    ):
        hybrid = pair_of(name, drafter=drafter).drafter
        assert type(hybrid) is HybridDrafter and [kinds(member) for member in hybrid.members] == [
            (SuffixDrafter,), (TemperatureScaledDrafter, kind),
        ]
    # plain decoding needs no draft
    assert type(pair_of("smollm2", method="plain").drafter) is NoDrafter


@pytest.mark.parametrize("method, use", [("speculative", "target"), ("plain", "plain")])
def test_a_pair_is_loaded_for_its_method(method, use, monkeypatch):
    asked = []
    def refuse(*given):
        asked.append(given)
        raise ModelError("not here")
    monkeypatch.setattr("specdec.pair.load", refuse)
    monkeypatch.setattr("specdec.pair.find_model", lambda name: Path("here"))
    monkeypatch.setattr("specdec.pair.check_room", lambda *given: None)
    with pytest.raises(ModelError): load_pair("qwen2.5", "cpu", "float32", method=method, revision="v1")
    assert asked == [(get_pair("qwen2.5").target, "cpu", "float32", use, "v1")]


@pytest.mark.parametrize("wrong, words", [
    (dict(method="greedy"), "speculative or plain"), (dict(method=True), "speculative or plain"),
    (dict(target=tiny(), revision="v1"), "loaded already"),
], ids=["method", "truth", "revision of a loaded target"])
def test_a_pair_is_not_loaded_for_anything_else(wrong, words, monkeypatch):
    monkeypatch.setattr("specdec.pair.load", None)
    with pytest.raises(InputError, match=words): load_pair("smollm2", **wrong)


@pytest.mark.parametrize("thing", ["smollm2", None, 3, torch.nn.Linear(2, 2)])
def test_a_target_is_a_model(thing):
    with pytest.raises(InputError, match="load\\(name\\)"): Pair(thing)
    if thing is not None:
        with pytest.raises(InputError, match="load\\(name\\)"): Pair(tiny(), thing)


def test_a_drafter_has_all_its_parts():
    class Half:
        layers = None
        def start(self, tokens, features, limit, eos_ids): pass
    for wrong in (NGramDrafter, Half()):
        with pytest.raises(InputError, match="A draft is"): Pair(tiny(), wrong)


@pytest.mark.parametrize("name", [None, 5, ["smollm2"]])
def test_a_pair_has_a_name(name):
    with pytest.raises(InputError, match="by its name"): load_pair(name)


def test_a_missing_drafter_is_noticed_before_the_target_is_loaded(monkeypatch, tmp_path):
    def fail(*args): raise AssertionError("work before validation")
    monkeypatch.setattr(pairs, "load", fail)
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match="no trained drafter"): load_pair("smollm2", drafter=folder)


@pytest.mark.parametrize("name", [pytest.param("smollm2-ngram", marks=pytest.mark.slow), "smollm2-head"])
def test_a_pair_in_four_bits(name):
    """int4 is a dtype like the others: of the target, and where a draft is computed from it, of that. Some answer goes
    on, some other ends by itself: which ones depends on how the processor rounds."""
    pair, ended = load_pair(name, "cpu", "int4"), []
    assert pair.target.int4 and pair.target.precision == "int4"
    for asked in ("How do bees make honey?", "What is the capital of France?", "What is 2+2?"):
        question = [{"role": "user", "content": asked}]
        result, plain = (pair.generate(question, method=method, K=3, max_new_tokens=24) for method in METHODS)
        ended.append(plain.generated_ids[-1] in pair.target.eos_ids)
        assert ended[-1] == (plain.finish_reason == "eos") and (ended[-1] or plain.num_tokens == 24)
        assert_same_text(pair.target, plain.prompt_ids, plain.generated_ids, result.generated_ids, tie=.3)  # bfloat16
    assert set(ended) == {True, False}


def test_totals_are_over_the_fastest_plain_layout():
    "What a step of a target took that is laid out for several rows is no plain step at its best."
    result = Pair(talker()).generate("Hello", max_new_tokens=5, method="plain")
    own, slow = pairs.PairStats(), pairs.PairStats()
    own.add(result)
    slow.add(dataclasses.replace(result, plain_factor=1.5))
    assert own.plain_steps == slow.plain_steps > 0 and slow.plain_seconds == pytest.approx(own.plain_seconds / 1.5)
