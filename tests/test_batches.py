"""Several texts in one forward: each is what it would be alone, whatever its neighbours do; the exact law of two at
once; who joins, who leaves; requests that are turned away."""
import copy
from collections import Counter
from random import Random

import pytest
import torch

from families import FAMILIES, random_model, stored
from helpers import CPU, Failing, Untouchable, greedy, ids_of, tiny
from helpers_drafters import PayingLookahead, StepLookahead, random_head, take_turns
from specdec import loop
from specdec.cache import CacheFullError
from specdec.drafters.adaptive import AdaptiveDrafter
from specdec.drafters.base import NoDrafter, WrapperDrafter, WrapperState
from specdec.drafters.choose import HybridDrafter
from specdec.drafters.colder import TemperatureScaledDrafter
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.lookup import NGramDrafter, SuffixDrafter
from specdec.drafters.model import ModelDrafter
from specdec.engine.batch import speculate_batch
from specdec.engine.profiling import PhaseTimer
from specdec.engine.request import Request
from specdec.errors import InputError, NumericalError
from specdec.loop import speculate
from specdec.lossless.enumerate import exact_distribution
from specdec.lossless.proof import (
    AsIs,
    ExactModel,
    Language,
    target_distribution,
)
from specdec.lossless.proof import (
    distance as exact_distance,
)
from specdec.models.batch import BatchCache, read_batch
from specdec.models.linear import can_be_batch_invariant
from specdec.models.transformers import TransformersLM
from specdec.sampling import SamplingParams, SeededRandom

exact_rows = pytest.mark.skipif(not can_be_batch_invariant(CPU, torch.float32),
                                reason="rows depend on their number here")


def filled(model):
    "The same model, as where a token's bits depend on how many are read: texts are filled up to the longest."
    light = copy.copy(model)
    light.batch_invariant = False
    return light


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    "A model whose later layers have a window, and one in bfloat16."
    def made(name, dtype): return stored(random_model(FAMILIES[name]), tmp_path_factory.mktemp("model"), dtype)
    return {"windowed": made("qwen2-window", torch.float32), "bfloat16": made("llama2", torch.bfloat16)}


@pytest.fixture(params=["apart", "filled", "windowed", "windowed, filled", "bfloat16"])
def model(request, others):
    chosen = others.get(request.param.split(",")[0], tiny(vocab=40, context=64))
    return filled(chosen) if "filled" in request.param else chosen


# The forward


def walk(model, seed, steps=25, size=4, bound=1e-5):
    "Texts join, grow by different lengths, forget a little and leave; the rows of each are always those of one alone."
    rng, cache, texts = Random(seed), BatchCache(model, size, 64), []
    def words(n): return [rng.randrange(model.vocab_size) for _ in range(n)]
    for _ in range(steps):
        if len(texts) < size and (not texts or rng.random() < 0.6):
            texts.append(words(rng.randint(1, 40)))
            model.forward(torch.tensor([texts[-1]]), cache.join())
        new = [words(rng.randint(1, 5)) for _ in texts]
        outputs = read_batch(model, new, cache, [(1, 3)] * len(new))
        rows, features = zip(*outputs)
        for i, (text, more) in enumerate(zip(texts, new)):
            expected, states = model.forward(torch.tensor([text + more]), layers=(1, 3))
            assert rows[i].shape == (len(more), model.vocab_size)
            assert (rows[i] - expected[0, -len(more):]).abs().max() < bound * expected.abs().max()
            assert (features[i] - states[0, -len(more):]).abs().max() < bound * states.abs().max()
            text += more
            del text[len(text) - rng.randint(0, len(more) - 1):]  # never all that is new
            cache.caches[i].rollback(len(text))
        for i in reversed(range(len(texts))):
            if len(texts[i]) > 52 or rng.random() < 0.15:
                texts[i] = texts[-1]
                texts.pop()
                cache.leave(i)
        assert [text.length for text in cache.caches] == [len(text) for text in texts]


@pytest.mark.parametrize("seed", range(3))
def test_every_text_is_read_as_if_it_were_alone(model, seed):
    walk(model, seed, bound=0.03 if model.dtype == torch.bfloat16 else 2e-5)


@exact_rows
@pytest.mark.parametrize("lengths", [(3, 200, 17, 191), (400, 16, 1, 15), (31, 32, 33, 250)], ids=str)
def test_the_bits_are_those_of_a_text_alone(lengths):
    "Long texts too: past position 190 some processors answer with other bits if a sum has more zeros."
    model = tiny(vocab=40, hidden=64, context=512)
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(40, (n,), generator=draw).tolist() for n in lengths]
    cache, alone = BatchCache(model, 4, 512), [model.new_cache(512) for _ in texts]
    for text, own in zip(texts, alone):
        model.forward(torch.tensor([text]), cache.join())
        model.forward(torch.tensor([text]), own)
    for sizes in ([1, 1, 1, 1], [1, 6, 16, 2], [4, 1, 1, 9]):
        new = [torch.randint(40, (n,), generator=draw).tolist() for n in sizes]
        rows = [logits for logits, _ in read_batch(model, new, cache)]
        for i, own in enumerate(alone): assert torch.equal(rows[i], model.forward(torch.tensor([new[i]]), own)[0])


def test_a_cache_gives_each_text_a_place_and_takes_it_back():
    model = tiny()
    cache = BatchCache(model, 2, 20)
    first, second = cache.join(), cache.join()
    with pytest.raises(InputError, match="All 2 places are taken"): cache.join()
    numbers = 2 * model.new_cache(20).span(20) * 2 * 4  # texts, positions, heads, head size
    assert cache.nbytes == numbers * 3 * 2 * 4  # layers, keys and values, bytes
    model.forward(torch.tensor([[1, 2, 3]]), second)
    cache.leave(0)
    assert cache.caches == [second] and second.length == 3 and first not in cache.caches
    assert second.keys[2].data_ptr() == cache.held[2][0].data_ptr()  # its views have moved with it
    assert second.values[2].data_ptr() == cache.held[2][1].data_ptr()
    assert cache.join().length == 0 and second.length == 3
    with pytest.raises(CacheFullError, match="no memory for a cache"): BatchCache(model, 2**40, 2**20)


# Whole texts


def some_texts(target, temperature, seed=0):
    "Texts of every kind: drafters, K, limits and ends of their own."
    V = target.vocab_size
    kinds = [NoDrafter, NGramDrafter, lambda: ModelDrafter(tiny(V, noise=0.05), V), lambda: ModelDrafter(target, V)]
    draw = torch.Generator().manual_seed(seed)
    for i in range(9):
        prompt = torch.randint(V, (1 + 7 * i % 11,), generator=draw)
        ends = {3, 5} if i % 2 else set()
        yield dict(
            prompt=prompt, drafter=kinds[i % 4](), sampling=SamplingParams(0.0 if i == 4 else temperature),
            rng=SeededRandom(seed + i), K=1 + i % 6, max_new_tokens=1 + 5 * i % 23, eos_ids=ends,
        )


def decode(target, texts, size, **options):
    "The rounds of each text."
    rounds = {i: [] for i in range(len(texts))}
    for i, r in speculate_batch(target, texts, size, **options): rounds[i].append(r)
    return list(rounds.values())


def one_by_one(target, requests): return [list(speculate(target, **request)) for request in requests]


@exact_rows
@pytest.mark.parametrize("size", [1, 2, 4, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_texts_are_those_of_the_loop_that_reads_one_after_the_other(temperature, size):
    target = tiny(40, context=64)
    rounds = decode(target, [Request(target, **request) for request in some_texts(target, temperature)], size)
    assert rounds == one_by_one(target, some_texts(target, temperature))
    assert len({len(of_one) for of_one in rounds}) > 3  # they end at different times


def test_greedy_texts_are_those_of_plain_decoding_without_a_cache():
    target = filled(tiny(33, context=64))
    prompts = [[1, 2, 3], [4] * 9, [5, 6]]
    texts = [Request(target, prompt, NGramDrafter(), SamplingParams(), SeededRandom(0), 4, 20) for prompt in prompts]
    for prompt, rounds in zip(prompts, decode(target, texts, 3)): assert ids_of(rounds) == greedy(target, prompt, 20)


def test_models_of_transformers_read_one_after_the_other():
    target = TransformersLM(random_model(FAMILIES["llama2"]))
    usual = dict(sampling=SamplingParams(), rng=SeededRandom(0))
    def requests():
        for i in range(3): yield dict(usual, prompt=[1, i], drafter=NGramDrafter(), max_new_tokens=4 + i)
    rounds = decode(target, [Request(target, **request) for request in requests()], 2)
    assert rounds == one_by_one(target, requests())


class Recording(WrapperDrafter):
    "Keeps the features that it is shown."
    def __init__(self, layers):
        super().__init__(NGramDrafter())
        self.layers, self.shown = layers, []
    def start(self, tokens, features, limit, eos_ids):
        self.shown.append(features)
        return super().start(tokens, features, limit, eos_ids)
    def wrap(self, inner, tokens, eos_ids):
        shown = self.shown
        class Noting(WrapperState):
            def commit(self, tokens, features):
                shown.append(features)
                super().commit(tokens, features)
        return Noting(inner)


@exact_rows
def test_each_drafter_sees_the_layers_that_it_asked_for():
    target = tiny(context=64)
    def requests():
        for i, layers in enumerate([(2, 0), (), (1,), (0, 1, 3)]):
            yield dict(prompt=[1, 2, 1, 2, i], drafter=Recording(layers), sampling=SamplingParams(),
                       rng=SeededRandom(0))
    together, alone = list(requests()), list(requests())
    decode(target, [Request(target, **request) for request in together], 4)
    one_by_one(target, alone)
    for a, b in zip(together, alone):
        shown = [request["drafter"].shown for request in (a, b)]
        assert len(shown[0]) == len(shown[1]) > 3
        for x, y in zip(*shown): assert (x is None and y is None) or torch.equal(x, y)


def test_texts_share_their_forwards(monkeypatch):
    "Four plain texts of ten tokens: four prompts, and nine forwards over a row of each."
    target, rows = tiny(context=64), []
    class Counting(type(target)):
        def compute(self, ids, *rest):
            rows.append(ids.shape[1])
            return super().compute(ids, *rest)
    counting = copy.copy(target)
    counting.__class__ = Counting
    texts = [Request(counting, [i, 2], NoDrafter(), SamplingParams(), SeededRandom(0), 5, 10) for i in range(4)]
    decode(counting, texts, 4)
    assert Counter(rows) == {2: 4, 4: 9}


def test_texts_ask_in_one_product_where_their_bits_differ_anyway(monkeypatch):
    def apart(*_): raise AssertionError("asked apart")
    monkeypatch.setattr("specdec.models.linear.invariant_answer", apart)
    for model in (filled(tiny()), tiny()):
        cache = BatchCache(model, 2, 16)
        for _ in range(2): cache.join()
        if model.batch_invariant:
            with pytest.raises(AssertionError, match="apart"): read_batch(model, [[1], [2]], cache)
        else: read_batch(model, [[1], [2]], cache)


def test_texts_join_in_order_as_others_end():
    target, timer = tiny(context=64), PhaseTimer()
    lengths = [9, 3, 5, 2, 1, 4]
    texts = [Request(target, [1], NoDrafter(), SamplingParams(), SeededRandom(0), 5, n) for n in lengths]
    order = [i for i, _ in speculate_batch(target, texts, 2, timer)]
    assert Counter(order) == Counter(dict(enumerate(lengths)))
    assert [order.index(i) for i in range(6)] == sorted(order.index(i) for i in range(6))
    assert order == [0, 1, 0, 1, 0, 1, 2, 0, 2, 0, 2, 0, 2, 0, 2, 3, 0, 3, 4, 5, 0, 5, 5, 5]
    assert timer.seconds("verify") > 0 and timer.seconds("prefill") > 0


def test_who_has_enough_of_a_text_ends_it():
    target = tiny(context=64)
    texts = [Request(target, [1, i], NGramDrafter(), SamplingParams(), SeededRandom(0), 5, 30) for i in range(3)]
    seen = Counter()
    for i, _ in speculate_batch(target, texts, 3):
        seen[i] += 1
        if i == 1 and seen[1] == 3: texts[1].ended = True
    assert seen[1] == 3 and min(seen[0], seen[2]) > 3


def test_each_text_is_judged_by_its_own_rule():
    target, usual = tiny(), dict(prompt=[1, 2], sampling=SamplingParams(), rng=SeededRandom(0))
    def never(p, q, tokens, rng): return 0, 7
    texts = [Request(target, **usual, drafter=NGramDrafter(), verify=rule) for rule in (None, never)]
    own, judged = decode(target, texts, 2)
    assert set(ids_of(judged[1:])) == {7} != set(ids_of(own[1:]))


# One drafter for several texts

def relative_of(target): return ModelDrafter(tiny(target.vocab_size, noise=0.05), target.vocab_size)


def head_of(target): return HeadDrafter(random_head(target), target)


SHARED = {
    "n-gram": lambda target: NGramDrafter(), "lookup": lambda target: SuffixDrafter(),
    "model": relative_of, "colder": lambda target: TemperatureScaledDrafter(relative_of(target)),
    "head": head_of, "hybrid": lambda target: HybridDrafter(SuffixDrafter(), head_of(target), relative_of(target)),
    "adaptive": lambda target: AdaptiveDrafter(relative_of(target), PayingLookahead()),
    "schedule": lambda target: AdaptiveDrafter(head_of(target), StepLookahead(2)),
    "nothing": lambda target: NoDrafter(),
}


def of_one(target, drafter, temperature):
    "Requests that a drafter serves, with texts that repeat themselves; two of them begin alike."
    prompts = [[1, 2, 3, 1, 2, 3, 1], [5, 9, 5, 9, 5], [30] * 6, [1, 2, 3, 1, 2, 3, 1], list(range(12))]
    for i, prompt in enumerate(prompts):
        ends = {3, 5} if i == 2 else set()
        yield dict(
            prompt=prompt, drafter=drafter(target), sampling=SamplingParams(temperature), rng=SeededRandom(i),
            K=2 + i % 3, max_new_tokens=16 + 3 * i, eos_ids=ends,
        )


@exact_rows
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", SHARED)
def test_texts_may_have_one_drafter(kind, temperature):
    "It gives to each of them what a drafter of its own would: in one batch, in the next one, in two that take turns."
    target = tiny(40, context=64)
    alone = one_by_one(target, of_one(target, SHARED[kind], temperature))
    one = SHARED[kind](target)
    def texts(): return [Request(target, **request) for request in of_one(target, lambda _: one, temperature)]
    for size in (5, 2): assert decode(target, texts(), size) == alone
    both = take_turns([speculate_batch(target, texts(), 3) for _ in range(2)])
    for found in both: assert [[r for i, r in found if i == text] for text in range(5)] == alone
    assert any(r.drafted for rounds in alone for r in rounds) or kind == "nothing"


@pytest.mark.parametrize("kind", ["n-gram", "lookup", "model", "head", "hybrid", "adaptive"])
def test_greedy_texts_of_one_drafter_are_those_of_plain_decoding(kind):
    target = filled(tiny(40, context=64))
    one = SHARED[kind](target)
    texts = [Request(target, **request | dict(eos_ids=set())) for request in of_one(target, lambda _: one, 0.0)]
    for text, rounds in zip(texts, decode(target, texts, 3), strict=True):
        assert ids_of(rounds) == greedy(target, text.prompt, text.limit - len(text.prompt))


def test_each_text_has_a_state_of_its_own_once_it_has_begun():
    target, drafter = tiny(context=64), NGramDrafter()
    texts = [Request(target, [1, i], drafter, SamplingParams(), SeededRandom(0), 3, 9) for i in range(3)]
    begun = [[text.started for text in texts] for _ in speculate_batch(target, texts, 2)]
    assert begun[-1] == [True] * 3 and begun[1][2] is False
    assert len({id(text.state) for text in texts}) == 3 and all(text.drafter is drafter for text in texts)
    assert [text.state.tokens[:2] for text in texts] == [[1, 0], [1, 1], [1, 2]]


# The exact law of two texts at once

PROMPTS, WARM = ([1, 2, 1], [3, 0]), SamplingParams(1.0, top_k=3)


def pair_distribution(target, sampling, drafters, count, K=2, prompts=PROMPTS):
    "The joint law of two texts that are decoded together."
    def run(rng):
        each = zip(prompts, drafters)
        texts = [Request(target, prompt, drafter(), sampling, rng, K, count) for prompt, drafter in each]
        return tuple(tuple(ids_of(rounds)) for rounds in decode(target, texts, 2))
    return exact_distribution(run)


def product(a, b): return {(x, y): p * q for x, p in a.items() for y, q in b.items()}


@pytest.mark.parametrize("kind", ["apart", "filled"])
def test_the_joint_distribution_of_two_texts_is_the_product_of_their_own(kind):
    target = tiny(vocab=4, hidden=8, layers=2, seed=8)
    if kind == "filled": target = filled(target)
    def row(prompt):
        return lambda text: WARM.probs(target.forward(torch.tensor([[*prompt, *text]]))[0, -1]).double().tolist()
    def relative(): return ModelDrafter(tiny(vocab=4, hidden=8, layers=2, seed=8, noise=0.2), 4)
    found = pair_distribution(target, WARM, [relative, NGramDrafter], 2)
    expected = product(*(target_distribution(row(prompt), 2) for prompt in PROMPTS))
    assert len(found) == len(expected) > 50
    assert sum(abs(found.get(x, 0) - expected.get(x, 0)) for x in found.keys() | expected.keys()) / 2 < 1e-5


def of_languages(kind, q):
    "A drafter of a language; two of them, or one for both texts."
    def model(): return ModelDrafter(ExactModel(q, 3), 3)
    if kind == "each its own": return [model, model]
    one = model()
    if kind == "one hybrid": one = HybridDrafter(SuffixDrafter(), one, c=(0.0, 0.1), priors=(0.4, 0.6))
    if kind == "one controlled": one = AdaptiveDrafter(one, StepLookahead(1))
    return [lambda: one, lambda: one]


@pytest.mark.parametrize("kind", ["each its own", "one model", "one hybrid", "one controlled"])
def test_the_joint_distribution_is_exact_in_fractions(kind):
    "The scheduling of texts, on a model without rounding; also if one drafter serves both."
    p, q = Language(3, "p", most=3), Language(3, "q", most=2, halves=True)
    found = pair_distribution(ExactModel(p, 3), AsIs(), of_languages(kind, q), 3, prompts=([0], [0]))
    expected = product(target_distribution(p, 3), target_distribution(p, 3))
    assert exact_distance(found, expected) == 0 and len(expected) > 20


# What can't be served


def ask(target=None, size=2, **wrong):
    "A request that is wrong, or a batch of two right ones."
    usual, target = dict(prompt=[1, 2], sampling=SamplingParams(), rng=SeededRandom(0)), target or Untouchable()
    texts = [Request(target, **usual | dict(drafter=NGramDrafter()) | wrong) for _ in range(2)]
    speculate_batch(target, texts, size)  # nothing of it is asked for


@pytest.mark.parametrize("wrong, words", [
    (dict(prompt=[]), "The prompt is empty"),
    (dict(prompt=[99]), "The prompt has token ids outside"),
    (dict(prompt="ab"), "The prompt must be a flat list"),
    (dict(prompt=[1] * 16), "The prompt has 16 tokens and the model's context 16"),
    (dict(K=0), "K, the number"), (dict(max_new_tokens=2.5), "max_new_tokens"),
    (dict(eos_ids=3), "eos_ids"), (dict(size=0), "size, how many sequences"), (dict(size=True), "size"),
], ids=lambda value: value[:20] if isinstance(value, str) else None)
def test_what_is_wrong_is_said_before_any_work(wrong, words):
    with pytest.raises(InputError, match=words): ask(**wrong)


def test_no_texts_are_no_rounds(): assert list(speculate_batch(Untouchable(), [], 4)) == []


def test_logits_that_are_no_numbers_are_named():
    target = Failing(tiny(), 6)
    texts = [Request(target, [1], NoDrafter(), SamplingParams(), SeededRandom(0)) for _ in range(2)]
    with pytest.raises(NumericalError, match="after 6 tokens"): decode(target, texts, 2)


def test_two_sequences_share_a_forward_and_one_alone_does_not(monkeypatch):
    read, sizes = loop.read_batch, []
    def counted(target, new, *rest):
        sizes.append(len(new))
        return read(target, new, *rest)
    monkeypatch.setattr(loop, "read_batch", counted)
    target = tiny()
    requests = [Request(target, [1, 2], NoDrafter(), SamplingParams(), SeededRandom(0), max_new_tokens=n)
                for n in (4, 6)]
    list(speculate_batch(target, requests, 2))
    assert sizes == [2, 2, 2]  # three steps together, then one of them goes on alone
