"Looked-up drafts: the suffix index against a search and its costs counted, and replayed rounds against the loop."
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from helpers_drafters import CPU, started
from specdec.drafters.base import Draft, NoDrafter
from specdec.drafters.choose import HybridDrafter
from specdec.drafters.lookup import NGramDrafter, SuffixDrafter, SuffixIndex, outcome, replay
from specdec.errors import InputError
from specdec.loop import speculate
from specdec.lossless.proof import language_pairs, loop_error
from specdec.sampling import SamplingParams, SeededRandom

# the index


def search(tokens):
    """The longest ending that occurred before, and the position after its newest earlier occurrence, by looking
    everywhere."""
    n = len(tokens)
    for length in range(n - 1, 0, -1):
        for end in range(n - 1, length - 1, -1):
            if tokens[end - length:end] == tokens[n - length:]: return length, end
    return 0, None


def index_of(tokens):
    index = SuffixIndex()
    for token in tokens: index.append(token)
    return index

texts = st.integers(1, 4).flatmap(lambda V: st.lists(st.integers(0, V - 1), min_size=1, max_size=30))


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(texts)
def test_the_match_is_what_a_search_finds(tokens):
    index = SuffixIndex()
    for n, token in enumerate(tokens, start=1):
        index.append(token)
        length, end = search(tokens[:n])
        assert index.match[0] == length
        if 0 < length <= SuffixIndex.REFRESH: assert index.match[1] == end
        if length: assert tokens[index.match[1] - length:index.match[1]] == tokens[n - length:n] and index.match[1] < n


def test_the_index_without_refreshing_finds_older_places():
    "The negative control of the test above: the newest place comes from `refresh`."
    class Old(SuffixIndex): REFRESH = 0
    tokens, old = [1, 2, 5, 1, 2, 6, 1, 2], Old()
    for token in tokens: old.append(token)
    assert old.match == (2, 2) and index_of(tokens).match == (2, 5) == search(tokens)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(texts)
def test_the_automaton_knows_every_substring_and_no_other(tokens):
    index = index_of(tokens)
    def known(piece):
        at = 0
        for token in piece:
            at = index.next[at].get(token)
            if at is None: return False
        return True
    inside = {tuple(tokens[i:j]) for i in range(len(tokens)) for j in range(i, len(tokens) + 1)}
    assert all(map(known, inside))
    # each state's share of distinct substrings
    assert sum(index.length[s] - index.length[index.link[s]] for s in range(1, len(index.next))) == len(inside - {()})


class Counting(list):
    "A list that counts how often it is looked into."
    count = 0
    def __getitem__(self, i):
        Counting.count += 1
        return super().__getitem__(i)


def fibonacci(n):
    a, b = [0], [0, 1]
    while len(b) < n: a, b = b, b + a
    return b[:n]


HARD = {
    "one token": lambda n: [0] * n, "no repeats": lambda n: list(range(n)),
    "random": lambda n: np.random.default_rng(0).integers(0, 3, n).tolist(),
    "a tail": lambda n: [0] * (n // 2) + [1] * (n // 2), "periodic": lambda n: [0, 1, 1] * (n // 3),
    "Fibonacci": lambda n: fibonacci(n),
}


@pytest.mark.parametrize("name", HARD)
def test_time_and_memory_are_linear(name):
    looks = []
    for n in (600, 1200, 2400):
        index, Counting.count = SuffixIndex(), 0
        index.next, index.link = Counting(index.next), Counting(index.link)
        for token in HARD[name](n): index.append(token)
        looks.append(Counting.count / n)
        assert len(index.next) <= 2 * n and sum(len(following) for following in list.__iter__(index.next)) <= 3 * n
    assert max(looks) < 60 and looks[2] < 1.1 * looks[0] + 1  # per token, it doesn't grow


def test_the_count_of_looks_would_notice_a_walk_up_all_links():
    "The negative control: told about every new occurrence, a text of one token costs its length at each step."
    class Thorough(SuffixIndex): REFRESH = 10 ** 9
    looks = []
    for n in (600, 1200):
        index, Counting.count = Thorough(), 0
        index.next, index.link = Counting(index.next), Counting(index.link)
        for token in [0] * n: index.append(token)
        looks.append(Counting.count / n)
    assert looks[1] > 1.8 * looks[0]

# the drafter


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(texts, st.integers(1, 7), st.sampled_from([0.5, 1, 2, 3.5]))
def test_what_the_suffix_drafter_proposes(tokens, K, per_match):
    length, _end = search(tokens)
    state = started(SuffixDrafter(per_match), tokens)
    draft = state.propose(K, None, None)
    wanted = 0 if not length else min(K, max(1, int(per_match * length)))
    longer = list(tokens)
    start = state.index.match[1]
    for i in range(wanted): longer.append(longer[start + i])  # copying may run into what was copied
    assert draft == Draft(longer[len(tokens):]) and draft.q is None and state.reach(K) == wanted
    assert [state.evidence(i) for i in range(3)] == [min(8, length + i) for i in range(3)]


def test_the_suffix_drafter_goes_on_and_starts_anew():
    drafter = SuffixDrafter()
    state = started(drafter, [1, 2, 3])
    state.commit([1], None)
    assert state.propose(4, None, None).tokens == [2, 3]
    assert started(drafter, [1, 2, 1]).propose(4, None, None).tokens == [2, 1]
    assert started(drafter, [1]).propose(4, None, None) == Draft([])
    assert state.propose(4, None, None).tokens == [2, 3]  # whatever has been started since


def test_per_match_may_be_without_end():
    state = started(SuffixDrafter(float("inf")), [1, 2, 3, 1])
    assert state.propose(5, None, None).tokens == [2, 3, 1, 2, 3] and state.propose(0, None, None) == Draft([])


@pytest.mark.parametrize("wrong", [0, -1, "2", None, True, float("nan")], ids=repr)
def test_per_match_is_checked(wrong):
    with pytest.raises(InputError, match="above 0"): SuffixDrafter(wrong)


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), max_size=5), st.integers(0, 5), st.integers(0, 3), st.booleans())
def test_outcome_reads_what_the_loop_did(drafted, accepted, own, ended):
    """Commits as the loop makes them: accepted drafts and the target's own token, which differs from a rejected draft;
    an end inside cuts it."""
    accepted = min(accepted, len(drafted))
    if accepted < len(drafted) and own == drafted[accepted]: own = (own + 1) % 4
    tokens = drafted[:accepted] if ended and accepted else [*drafted[:accepted], own]
    rejected = accepted < len(drafted) and len(tokens) > accepted
    assert outcome(drafted, tokens) == (accepted, accepted + rejected)

# replaying


class Recital:
    "A target that recites one text."
    vocab_size, context_length, device = 50, 10 ** 4, CPU
    def __init__(self, text): self.text = torch.tensor(text)
    def new_cache(self, capacity):
        from specdec.cache import KVCache
        return KVCache(1, capacity)
    def forward(self, ids, cache, last=None, layers=()):
        at = cache.length
        cache.append(0, torch.zeros(1, 1, ids.shape[1], 1), torch.zeros(1, 1, ids.shape[1], 1))
        logits = 9.0 * torch.nn.functional.one_hot(self.text[at + 1:cache.length + 1], self.vocab_size)
        return logits[None, -last:] if last else logits[None]


@pytest.mark.parametrize("K", [1, 3, 8])
@pytest.mark.parametrize(
    "make", [NGramDrafter, SuffixDrafter, NoDrafter, lambda: HybridDrafter(SuffixDrafter(), NGramDrafter())],
    ids=["n-gram", "suffix", "none", "hybrid"],
)
def test_replaying_gives_the_rounds_of_the_loop(make, K):
    text = np.random.default_rng(1).integers(0, 4, 80).tolist()
    rounds = list(speculate(Recital(text), make(), text[:10], SamplingParams(), SeededRandom(0), K, 70))
    assert replay(make(), text[:10], text[10:], K) == rounds[1:]
    assert sum(r.accepted for r in rounds) > 0 or make is NoDrafter


def test_only_certain_guesses_are_replayed():
    class Unsure(NoDrafter):
        def propose(self, K, sampling, rng): return Draft([1], torch.full((1, 50), 1 / 50))
    with pytest.raises(InputError, match="reports a q"): replay(Unsure(), [1, 2], [3, 4, 5], 2)

# the executed proof


@pytest.mark.parametrize("K, V", [(1, 2), (1, 3), (2, 2), (2, 3), (3, 2)])
def test_a_lookup_is_lossless(K, V):
    for case, p, _ in language_pairs(V, f"drafters {K}", most=max(2, 5 - K), halves=True):
        for make in (SuffixDrafter, lambda: SuffixDrafter(0.5)):
            assert loop_error(speculate, make, p, K, V, case).error == 0, case


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(texts, st.integers(1, 4), st.integers(1, 4))
def test_an_ending_that_is_shorter_than_asked_drafts_nothing(tokens, longest, shortest):
    if shortest > longest:
        with pytest.raises(InputError, match=f"shortest.*no more than longest.*at most {longest}, not {shortest}"):
            NGramDrafter(longest, shortest)
        return
    found = started(NGramDrafter(longest, shortest), tokens).propose(3, SamplingParams(), None).tokens
    free = started(NGramDrafter(longest), tokens).propose(3, SamplingParams(), None).tokens
    assert found == (free if search(tokens)[0] >= shortest else [])
