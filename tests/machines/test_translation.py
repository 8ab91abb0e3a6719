"""Drafting across vocabularies: what tokens stand for, texts encoded again, caches, exact laws of the loop, and what
goes wrong before anything runs."""
import copy
import json
import random
from fractions import Fraction
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from helpers import Untouchable, assert_same_text, examples, greedy, tiny
from helpers_drafters import Noting, check_sequences_apart
from helpers_text import TOKENIZER, V, talker
from specdec.drafters.base import BLOCK, Draft
from specdec.drafters.model import ModelDrafter
from specdec.drafters.translate import (
    IntersectionState,
    Rereader,
    RunningText,
    SharedTokens,
    TokenIntersectionDrafter,
    Vocabulary,
    byte_letters,
    in_common,
    is_byte_level,
    shared_tokens,
    text_of,
)
from specdec.engine.prefix import prefill
from specdec.errors import InputError, ModelError, NumericalError
from specdec.loop import speculate
from specdec.lossless.enumerate import exact_distribution
from specdec.lossless.proof import AsIs, ExactModel, Language, loop_error
from specdec.models.linear import can_be_batch_invariant
from specdec.pair import Pair
from specdec.sampling import SamplingParams, SeededRandom

TEXTS = ["The cat sat on the mat, naïvely.", "Translate: 'ein Igel' 🦔 is a hedgehog.\n\n  def f(x):\n    return x"] * 3


def wrapped(raw, **names): return PreTrainedTokenizerFast(tokenizer_object=raw, **names)


@lru_cache
def sentencepiece(prepend="first"):
    "A small tokenizer that spells as sentencepiece does, bytes included."
    marked = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = marked
    bare.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    learned = json.loads(bare.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    ids = {token: i for i, token in enumerate([*names, *learned["vocab"]])}
    merges = [tuple(pair) for pair in learned["merges"]]
    full = Tokenizer(models.BPE(ids, merges, byte_fallback=True, unk_token="<unk>"))
    full.pre_tokenizer = marked
    return wrapped(full, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def words(*tokens, special=(), **names):
    "A tokenizer of those tokens that never merges any; special ones stand behind them."
    made = wrapped(Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [])), **names)
    made.add_special_tokens({"additional_special_tokens": list(special)})
    return made


def known(tokenizer, size=None):
    "The table of a tokenizer, for a model of that width."
    return Vocabulary(SimpleNamespace(tokenizer=tokenizer, vocab_size=len(tokenizer) if size is None else size))


def speaker(tokenizer, **shape):
    "A tiny random model that speaks those tokens."
    model = copy.copy(talker(vocab=len(tokenizer), tokenizer=False, **shape))
    model.tokenizer = tokenizer
    return model


TABLES = {
    "byte level": known(TOKENIZER), "sentencepiece": known(sentencepiece()),
    "a space first": known(sentencepiece("always")),
}
families = pytest.mark.parametrize("family", TABLES)
# the default model's tokenizer was trained without some bytes, and leaves them out
LACKING = "".join(chr(c) for c in range(128) if chr(c).encode() not in TABLES["byte level"].ids)
PLAIN = st.text(st.characters(exclude_characters=LACKING, exclude_categories=["Cs", "Co", "Cn"]), max_size=12)
quick = settings(deadline=None, max_examples=examples(40))


# What tokens stand for

def test_the_alphabet_is_that_of_tokenizers():
    letters = byte_letters()
    assert set(letters) == set(pre_tokenizers.ByteLevel.alphabet()) and sorted(letters.values()) == list(range(256))


@quick
@given(PLAIN)
@families
def test_tokens_spell_the_text_that_they_encode(family, text):
    table = TABLES[family]
    spelled = b"".join(table.bytes[i] for i in table.encode(text))
    assert spelled == text.encode() or family != "byte level" and spelled == b" " + text.encode()


@quick
@given(st.binary(max_size=12))
def test_any_bytes_have_a_spelling_in_both_families(data):
    letters = byte_letters()
    spelled = {byte: letter for letter, byte in letters.items()}
    assert b"".join(text_of(spelled[byte], letters) for byte in data) == data
    assert text_of("".join(spelled[byte] for byte in data), letters) == data
    assert b"".join(text_of(f"<0x{byte:02X}>", {}) for byte in data) == data


def test_families_are_told_apart():
    assert is_byte_level(TOKENIZER.get_vocab()) and not is_byte_level(sentencepiece().get_vocab())
    assert not is_byte_level(["▁a", "▁b", "Ġ"]) and not is_byte_level([]) and not is_byte_level(["", "a"])


def test_a_byte_that_is_a_character_goes_by_the_token_that_encoding_takes():
    table = known(sentencepiece())
    for i in (table.ids[b"a"], table.ids[b" "]): assert i > 258 and table.bytes[i] in (b"a", b" ")
    assert table.ids[b"\xe2"] == 3 + 0xE2
    later = known(words("a", "<0x61>", "<0x62>", "b"))  # wherever it stands
    assert (later.ids[b"a"], later.ids[b"b"]) == (0, 3)


def test_special_and_added_tokens():
    made = words("Ġa", "Ġ", "a", special=["<|turn|>"], eos_token="<e>")
    made.add_tokens([AddedToken("Ġé", special=False)])
    table = known(made)
    ids = made.get_vocab()
    assert table.special == {ids["<|turn|>"]: "<|turn|>", ids["<e>"]: "<e>"}
    assert table.bytes[ids["Ġé"]] == "Ġé".encode() and table.bytes[ids["Ġa"]] == b" a"  # added: as it is
    assert table.size == len(made) and known(made, 2).size == 2 and set(known(made, 2).bytes) == {0, 1}


def test_what_a_text_begins_with():
    assert toy(["<s>", "a"], []).bos_token and known(toy(["<s>", "a"], [])).start == [0]
    assert TABLES["byte level"].start == [] == TABLES["sentencepiece"].start
    assert known(toy(["<s>", "a"], [])).encode("aa") == [1, 1]


def test_a_model_without_tokenizer():
    with pytest.raises(InputError, match="has no tokenizer: load it with one"): Vocabulary(tiny())
    for drafter in [TokenIntersectionDrafter]:
        with pytest.raises(InputError, match="has no tokenizer"): drafter(talker(), tiny())


# What two of them share

def test_shared_tokens_have_the_same_bytes():
    a, b = TABLES["byte level"], TABLES["sentencepiece"]
    shared, back = shared_tokens(a, b), shared_tokens(b, a)
    pairs = list(zip(shared.target, shared.draft))
    text = [(i, j) for i, j in pairs if i in a.bytes]
    assert all(a.bytes[i] == b.bytes[j] for i, j in text) and len({j for _, j in pairs}) == len(pairs)
    assert {(j, i) for i, j in zip(back.target, back.draft)} == set(pairs)
    assert (TOKENIZER.get_vocab()["Ġthe"], sentencepiece().get_vocab()["▁the"]) in text
    assert len(text) == len(a.ids.keys() & b.ids.keys() - a.special.keys()) > 250
    assert str(shared) == f"{len(pairs):,} of 49,152 tokens shared"
    with_itself = shared_tokens(a, a)
    assert with_itself.target == with_itself.draft and len(with_itself.target) == len(a.ids)


@pytest.mark.parametrize("own, theirs, pairs", [
    (dict(special=["<x>", "<y>"]), dict(special=["<y>"]), {"a": "a", "<y>": "<y>"}),
    (dict(eos_token="<e>"), dict(eos_token="</s>"), {"a": "a", "<e>": "</s>"}),
    (dict(eos_token="<e>", special=["</s>"]), dict(eos_token="</s>"), {"a": "a", "</s>": "</s>"}),
    (dict(eos_token="<e>"), {}, {"a": "a"}),
    (dict(bos_token="<b>"), dict(bos_token="<s>"), {"a": "a"}),
], ids=["by name", "the ends", "the name first", "one has no end", "no beginnings"])
def test_special_tokens_are_shared_by_name_and_by_what_they_end(own, theirs, pairs):
    target, draft = words("a", **own), words("b", "a", **theirs)
    shared = shared_tokens(known(target), known(draft))
    found = zip(target.convert_ids_to_tokens(shared.target), draft.convert_ids_to_tokens(shared.draft))
    assert dict(found) == pairs


@pytest.mark.parametrize("make", [TokenIntersectionDrafter, Pair], ids=lambda make: make.__name__)
def test_nothing_in_common(make):
    target, draft = Untouchable(), Untouchable()
    target.tokenizer, draft.tokenizer = words("a", eos_token="<e>"), words("b", eos_token="<e>")
    with pytest.raises(InputError, match=r"\(2 tokens\).*\(2\) have no token in common.*take another"):
        make(target, draft)


# The text so far

@quick
@given(PLAIN, st.data())
@families
def test_a_growing_text_is_that_of_its_tokens(family, text, data):
    table = TABLES[family]
    ids, running = table.encode(text), RunningText(table, {})
    before = 0
    while before < len(ids):
        end = data.draw(st.integers(before + 1, len(ids)))
        running.add(ids[before:end])
        spelled = b"".join(table.bytes[i] for i in ids[:end])
        assert spelled.startswith(running.text.encode())
        assert running.unfinished == (running.text.encode() != spelled)
        before = end
    assert running.text in (text, " " + text)


def test_special_tokens_in_a_text():
    table = known(words("a", "<0xF0>", special=["<x>", "<y>"]))
    running = RunningText(table, {2: "[x]"})
    running.add([0, 2, 0, 3, 1, 2, 0])
    assert running.text == "a[x]a\ufffd[x]a" and not running.unfinished


def test_nothing_is_proposed_inside_a_character():
    made = TokenIntersectionDrafter(talker(), speaker(sentencepiece(), seed=1))
    hedgehog = TOKENIZER("🦔", add_special_tokens=False)["input_ids"]
    assert len(hedgehog) > 1
    state = made.start([*hedgehog[:-1]], None, 50)
    assert state.propose(3, SamplingParams(1.0), SeededRandom(0)) == Draft([]) and state.reader.read == []
    state.commit(hedgehog[-1:], None)
    state.propose(3, SamplingParams(1.0), SeededRandom(0))
    assert state.reader.read


@pytest.mark.parametrize("names, text", [
    (dict(special=["<turn>"], eos_token="<e>"), "a<turn>b</s>"), (dict(), "ab</s>"),
], ids=["known by name", "unknown"])
def test_the_draft_reads_special_tokens_that_it_has(names, text):
    target = speaker(words("a", "b", special=["<turn>"], eos_token="</s>", bos_token="<turn>" if not names else None))
    draft = speaker(words("a", "b", **{"eos_token": "</s>"} | names))
    made = TokenIntersectionDrafter(target, draft)
    ids = target.tokenizer.get_vocab()
    state = made.start([ids["a"], ids["<turn>"], ids["b"], ids["</s>"]], None, 20)
    expected = text.replace("</s>", draft.tokenizer.eos_token)
    assert draft.tokenizer.decode(state.encoded()).replace(" ", "") == expected


def test_a_beginning_is_not_read_twice():
    made = TokenIntersectionDrafter(speaker(toy(["<s>", "a"], [])), speaker(toy(["a", "<s>"], [], begin=1)))
    assert made.start([0, 1, 1], None, 10).encoded() == [1, 0, 0]


# Reading versions of a text

@settings(deadline=None, max_examples=examples(30))
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=6), st.integers(1, 4))
def test_rows_do_not_depend_on_what_was_read_before(versions, room):
    model, read = tiny(), []
    class Noting:
        context_length, new_cache, device = model.context_length, model.new_cache, model.device
        def forward(self, ids, cache, **options):
            read.append(ids.shape[1])
            return model.forward(ids, cache, **options)
    reader = Rereader(Noting())
    reader.start(room)
    for before, ids in zip([[], *versions], versions):
        grown = len(ids) > reader.cache.capacity
        found = reader.row(ids)
        alone = model.forward(torch.tensor([ids]), model.new_cache(len(ids)), last=1)[0, -1]
        assert torch.allclose(found, alone, atol=1e-4) and reader.read == ids
        assert read[-1] == len(ids) - (0 if grown else min(in_common(before, ids), len(ids) - 1))


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_in_common(a, b):
    n = in_common(a, b)
    assert a[:n] == b[:n] and (n == min(len(a), len(b)) or a[n] != b[n])


def test_a_broken_draft_is_named():
    draft = speaker(sentencepiece(), seed=1)
    class Broken:
        def __getattr__(self, name): return getattr(draft, name)
        def forward(self, ids, cache, **options): return draft.forward(ids, cache, **options) * float("nan")
    made = TokenIntersectionDrafter(talker(), Broken())
    state = made.start(TOKENIZER("Hello")["input_ids"], None, 20)
    with pytest.raises(NumericalError, match="The draft, after"): state.propose(1, SamplingParams(1.0), SeededRandom(0))


def test_the_drafts_context_ends():
    target, draft = talker(context=96), speaker(sentencepiece(), seed=1, context=12)
    state = TokenIntersectionDrafter(target, draft).start(TOKENIZER("abcdefgh")["input_ids"], None, 90)
    room = 12 - len(state.encoded()) + 1
    assert 0 < room < 8 and len(state.propose(8, SamplingParams(1.0), SeededRandom(0)).tokens) == room
    state.commit(TOKENIZER(" and some more words")["input_ids"], None)
    assert state.propose(8, SamplingParams(1.0), SeededRandom(0)) == Draft([])


# The proposals

@settings(deadline=None, max_examples=examples(10))
@given(st.integers(0, 10 ** 6), st.floats(0.3, 2.0), st.sampled_from([None, 3]))
def test_q_is_the_drafts_own_on_the_shared_tokens_renormalised(seed, temperature, top_k):
    target, draft = talker(), speaker(sentencepiece(), seed=1)
    made, sampling = TokenIntersectionDrafter(target, draft), SamplingParams(temperature, top_k)
    state = made.start(TOKENIZER("The cat")["input_ids"], None, 40)
    ids, found = state.encoded(), state.propose(3, sampling, SeededRandom(seed))
    assert len(found.tokens) == 3 and found.q.shape == (3, V)
    for token, row in zip(found.tokens, found.q):
        logits = draft.forward(torch.tensor([ids]), draft.new_cache(len(ids)), last=1)[0, -1]
        expected = torch.zeros(V)
        if top_k is None:
            q = sampling.probs(logits)
            expected[made.shared.target] = q[made.shared.draft]
            assert torch.allclose(row, expected / expected.sum(), atol=1e-5)
        else: assert (row > 0).sum() == 3  # of the shared ones
        assert row[token] > 0 and set(row.nonzero().flatten().tolist()) <= set(made.shared.target)
        ids = [*ids, made.shared.draft[made.shared.target.index(token)]]


def certain(*said):
    "A model that says these tokens one after the other, whatever the text."
    class Certain(ExactModel):
        def forward(self, ids, cache, last=None, layers=()):
            cache.tokens += ids[0].tolist()
            row = torch.full((1, 1, self.vocab_size), -9.0)
            row[0, 0, said[len(cache.tokens) - self.begin]] = 9
            return row
    return Certain


def test_a_translated_draft_stops_at_the_end_of_the_text():
    target = speaker(words("a", "b", eos_token="<e>"))
    own = words("b", "a", eos_token="</s>")
    model = certain(1, 2, 0, 0)(None, len(own))
    model.tokenizer, model.begin = own, 1
    made = TokenIntersectionDrafter(target, model)
    for ends, count in [({2}, 2), (set(), 4)]:
        found = made.start([0], None, 20, frozenset(ends)).propose(4, SamplingParams(), SeededRandom(0)).tokens
        assert found == [0, 2, 1, 1][:count]


def test_they_say_what_they_are():
    target, draft = talker(), speaker(sentencepiece())
    shared = str(shared_tokens(known(TOKENIZER), known(sentencepiece())))
    assert str(TokenIntersectionDrafter(target, draft)) == f"translated draft, {shared}"
    assert str(SharedTokens([1] * 12345, [1] * 12345, 49152)) == "12,345 of 49,152 tokens shared"


# A prompt read once

exact_rows = pytest.mark.skipif(not can_be_batch_invariant(torch.device("cpu"), torch.float32),
                                reason="rows depend on their number here")
SAID = "The cat sat on the mat, naïvely. Translate: 'ein Igel' is a hedgehog. " * 24
OLD = SAID[:1400]  # what is prefilled
SAID_NEXT = {"the same": OLD, "going on": SAID, "its beginning": SAID[:1000], "a few more": SAID[:1405],
             "parted inside": f"{SAID[:900]}a hedgehog sat{SAID[:200]}", "parted early": f"The hedgehog{SAID[:300]}"}


def reading(seed=1):
    "A target, and a drafter across vocabularies whose model notes what it reads."
    note = Noting(speaker(sentencepiece(), seed=seed, context=2048))
    return TokenIntersectionDrafter(SPEAKER, note), note


SPEAKER = talker(context=1024)


def spoken(text, drafter, count=10, **more):
    ids = TOKENIZER(text)["input_ids"]
    return list(speculate(SPEAKER, drafter, ids, SamplingParams(1.0), SeededRandom(0), 4, count, **more))


def read_once(text, drafter, prefilled=None):
    return prefill(SPEAKER, TOKENIZER(text)["input_ids"], (), prefilled, drafter)


def ids_of_draft(text): return known(sentencepiece()).start + known(sentencepiece()).encode(text)


@exact_rows
def test_the_rounds_are_those_without_a_prompt_read_once():
    "And the draft model reads, in whole blocks of its own tokens, only what is new to it."
    drafter, note = reading()
    state = read_once(OLD, drafter)
    old, kept = ids_of_draft(OLD), state.drafting[0]
    assert kept.model is note and kept.tokens == old and len(old) > 2 * BLOCK
    assert note.sizes == [BLOCK] * (len(old) // BLOCK) and kept.cache.length == sum(note.sizes)
    shares = set()
    for text in SAID_NEXT.values():
        note.sizes.clear()
        alone, whole = spoken(text, drafter), list(note.sizes)
        note.sizes.clear()
        assert spoken(text, drafter, prefilled=state) == alone and any(r.drafted for r in alone)
        shared = min(in_common(old, ids_of_draft(text)), len(ids_of_draft(text)) - 1) // BLOCK
        assert note.sizes == whole[shared:] and whole[:shared] == [BLOCK] * shared
        shares.add(shared)
    assert len(shares) > 2 and 0 in shares


@exact_rows
@pytest.mark.parametrize("text", ["the same", "a few more", "going on"])
def test_a_second_turn_keeps_the_drafts_cache_bit_for_bit(text):
    "A block that was read as one is never read again in parts, for a part has other bits."
    drafter, note = reading()
    first, text = read_once(OLD, drafter), SAID_NEXT[text]
    note.sizes.clear()
    second, alone = (read_once(text, drafter, state).drafting[0] for state in (first, None))
    blocks = len(ids_of_draft(text)) // BLOCK
    assert note.sizes == [BLOCK] * (blocks - len(ids_of_draft(OLD)) // BLOCK) + [BLOCK] * blocks
    assert second.tokens == alone.tokens and second.cache.length == alone.cache.length == blocks * BLOCK
    for name in ("keys", "values"):
        for one, other in zip(getattr(second.cache, name), getattr(alone.cache, name), strict=True):
            assert torch.equal(one[:, :, :blocks * BLOCK], other[:, :, :blocks * BLOCK])


@exact_rows
def test_what_another_draft_has_read_is_left_alone():
    "Of the same shape and over the same tokens, so that its cache would fit."
    drafter, note = reading()
    state = read_once(OLD, reading(seed=2)[0])
    alone, whole = spoken(SAID, drafter), list(note.sizes)
    note.sizes.clear()
    assert state.drafting[0].cache.length >= 2 * BLOCK
    assert spoken(SAID, drafter, prefilled=state) == alone and note.sizes == whole


def test_inside_a_character_nothing_is_kept():
    "Its text is not known yet."
    drafter, note = reading()
    state = drafter.start(TOKENIZER(OLD + "🦔")["input_ids"][:-1], None, 400)
    assert state.text.unfinished
    kept = state.keep([])
    assert kept.tokens == [] and kept.cache.length == 0 and note.sizes == []


# The law of the loop

def toy(tokens, merges, begin=0):
    "A tokenizer of those tokens; a text begins with <s>."
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    return wrapped(made, bos_token="<s>")


TARGET = toy(["<s>", "a", "b", "ab"], [("a", "b")])
DRAFT = toy(["<s>", "b", "a", "ba", "bb"], [("b", "a"), ("b", "b")])


def exact(language, tokenizer):
    model = ExactModel(language, len(tokenizer))
    model.tokenizer = tokenizer
    return model


def half_shared(seed):
    "A draft with all, half or nothing of its probability on the shared tokens."
    shared, others = (Language(5, f"{name} {seed}", ids, halves=True)
                      for name, ids in [("shared", [1, 2]), ("others", [3, 4])])
    def q(text):
        if text[-1:] == (3,): return others(text)
        return (shared(text) + others(text)) / 2 if len(text) % 2 else shared(text)
    return q


def error(make, K, seed=5, **options):
    p = exact(Language(4, f"target {seed}", [1, 2, 3], most=max(2, 4 - K), halves=True), TARGET)
    def drafter(): return make(p, exact(half_shared(seed), DRAFT))
    return loop_error(speculate, drafter, p.language, K, 4, "", **options).error


@pytest.mark.parametrize("options", [
    {}, dict(greedy=True), dict(eos_ids=frozenset({3})), dict(max_new_tokens=4),
], ids=["sampled", "greedy", "the end inside", "the limit inside"])
@pytest.mark.parametrize("K", [1, 2, 3])
def test_the_distribution_is_the_targets(K, options): assert error(TokenIntersectionDrafter, K, **options) == 0


def test_the_distribution_without_merging_paths(): assert error(TokenIntersectionDrafter, 1, seed=1, merge=False) == 0


class Unscaled(TokenIntersectionDrafter):
    "Reports q as it was."
    class State(IntersectionState):
        def propose(self, K, sampling, rng):
            made = super().propose(1, sampling, rng)
            if not made.tokens: return made
            return Draft(made.tokens, self.widened(self.weights(self.encoded(), sampling)[None]))


class Tensors:
    "Rows that the loop's own check of a drafter doesn't look at."
    def __init__(self, rows): self.rows, self.shape = rows, rows.shape
    def __getitem__(self, i): return self.rows[i]


class Misreporting(TokenIntersectionDrafter):
    "Draws from the restricted row, and reports the row one place further on."
    class State(IntersectionState):
        def propose(self, K, sampling, rng):
            made = super().propose(K, sampling, rng)
            if made.tokens: made.q = made.q.roll(1, -1) / 2 + made.q / 2
            return made


class ThrowsAway(TokenIntersectionDrafter):
    "Draws from all of q, ends the draft where the target lacks the token, and reports q as it was."
    class State(IntersectionState):
        def propose(self, K, sampling, rng):
            ids, shared = self.encoded(), self.drafter.shared
            if not ids: return Draft([])
            q = sampling.probs(self.reader.row(ids))
            token = rng.categorical(q)
            if token not in shared.draft: return Draft([])
            rows = self.widened(q[shared.draft][None])
            return Draft([shared.target[shared.draft.index(token)]], Tensors(rows))


class UnscaledUnseen(Unscaled):
    class State(Unscaled.State):
        def propose(self, K, sampling, rng):
            made = super().propose(K, sampling, rng)
            return Draft(made.tokens, Tensors(made.q)) if made.tokens else made


@pytest.mark.parametrize("wrong", [UnscaledUnseen, Misreporting, ThrowsAway])
def test_the_distribution_catches_a_wrong_report(wrong):
    assert max(error(wrong, 1, seed) for seed in range(3)) > 0.01


def test_the_loop_refuses_rows_that_do_not_sum_to_1():
    with pytest.raises(ModelError, match="sum to 1"): error(Unscaled, 1)


def test_throwing_away_is_exact_with_the_right_report():
    class Conditional(ThrowsAway):
        class State(ThrowsAway.State):
            def propose(self, K, sampling, rng):
                made = super().propose(K, sampling, rng)
                if made.tokens: made.q = made.q.rows / made.q.rows.sum()
                return made
    assert [error(Conditional, 1, seed) for seed in range(3)] == [0, 0, 0]


def test_a_wrong_table_costs_alpha_and_not_the_distribution():
    class Scrambled(TokenIntersectionDrafter):
        def __init__(self, target, draft):
            super().__init__(target, draft)
            self.shared.target.reverse()
            self.target_ids = torch.tensor(self.shared.target)
    assert error(Scrambled, 2) == 0


# A target that drafts for itself in another vocabulary must accept everything: nothing of the text may be lost

SAME = toy(["ab", "b", "<s>", "a"], [("a", "b")], begin=2)  # the target's tokens under other ids
ACROSS = [SAME.get_vocab()[token] for token in ["<s>", "a", "b", "ab"]]


@lru_cache
def spelled_alike(text):
    "A language whose texts are spelled as encoding does: `b` never follows `a`. No two tokens are equally likely."
    weights = np.array([Fraction(0)] * 4, dtype=object)
    weights[1:] = random.Random(str(text)).sample([Fraction(5, 8), Fraction(2, 8), Fraction(1, 8)], 3)
    if text[-1:] == (1,): weights[3], weights[2] = weights[3] + weights[2], Fraction(0)
    return weights


def in_other_ids(language):
    back = {j: i for i, j in enumerate(ACROSS)}
    def row(text):
        weights = language(tuple(back[j] for j in text)).copy()
        weights[ACROSS] = language(tuple(back[j] for j in text))
        return weights
    return row


class Forgets(TokenIntersectionDrafter):
    "Reads the newest token only."
    class State(IntersectionState):
        def encoded(self): return [*self.drafter.own.start, *super().encoded()[-1:]]


def own_alpha(make, K, sampling, rounds=2):
    "Accepted / drafted if target and draft are one language."
    def counts(rng):
        target, draft = exact(spelled_alike, TARGET), exact(in_other_ids(spelled_alike), SAME)
        running = speculate(target, make(target, draft), [0], sampling, rng, K, 40)
        next(running)
        seen = [next(running) for _ in range(rounds)]
        return sum(r.accepted for r in seen), sum(len(r.drafted) for r in seen)
    distribution = exact_distribution(counts)
    return sum(accepted * w for (accepted, _), w in distribution.items()), sum(drafted * w for (_, drafted),
                                                                               w in distribution.items())


@pytest.mark.parametrize("K", [1, 2])
def test_a_target_in_other_ids_accepts_everything(K):
    accepted, drafted = own_alpha(TokenIntersectionDrafter, K, AsIs(), rounds=1)
    assert accepted == drafted == K
    accepted, drafted = own_alpha(TokenIntersectionDrafter, K, SamplingParams())
    assert accepted == drafted == 2 * K


def test_a_draft_that_reads_another_text_is_caught():
    accepted, drafted = own_alpha(Forgets, 2, SamplingParams())
    assert accepted < drafted


# Real tokens

@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_sequences_of_one_drafter_do_not_know_of_each_other(temperature):
    "One of them begins inside a character."
    target, draft = talker(), speaker(sentencepiece(), seed=1)
    prompts = [TOKENIZER(text)["input_ids"] for text in ("The cat", "🦔", "x = [1, 2, 3]")]
    prompts[1] = prompts[1][:-1]  # and the rest of it is not always what follows
    drafter = TokenIntersectionDrafter(target, draft)
    assert drafter.start(prompts[1], None, 9).text.unfinished
    check_sequences_apart(lambda: TokenIntersectionDrafter(target, draft), target, prompts, temperature=temperature)


@pytest.mark.filterwarnings("ignore:The draft has")  # one of the two is the larger
@pytest.mark.parametrize("make", [TokenIntersectionDrafter, None], ids=["drafter", "pair"])
@pytest.mark.parametrize("reverse", [False, True], ids=["byte level target", "sentencepiece target"])
def test_greedy_text_is_the_targets(make, reverse):
    target, draft = talker(), speaker(sentencepiece(), seed=1)
    if reverse: target, draft = draft, target
    pair = Pair(target, make(target, draft) if make else draft)
    ids = target.tokenizer("The cat sat")["input_ids"]
    found = pair.generate(ids, K=3, max_new_tokens=16)
    assert found.drafter == str(pair.drafter) and found.drafter.endswith("tokens shared")
    assert_same_text(target, ids, found.generated_ids, greedy(target, ids, 16))
    assert found.num_drafted > 0
    pair.generate(ids, K=3, temperature=1.0, max_new_tokens=16, seed=1)


def test_a_pair_translates_where_vocabularies_differ():
    target, draft = talker(), speaker(sentencepiece())
    pair = Pair(target, draft)
    assert type(pair.drafter) is TokenIntersectionDrafter and "of 49,152 tokens shared" in str(pair.drafter)
    assert type(Pair(target, talker(seed=1)).drafter) is ModelDrafter
    with pytest.raises(InputError, match="no tokenizer to translate by"): Pair(target, tiny())
