"The family of drafters: the suffix index against a search and its costs counted, four bits against the plain product, the hybrid's choices, and all of them in the executed proof."
import builtins
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from specdec.autoregressive import Transform
from specdec.core import InputError, ModelError, TorchSource
from specdec.drafters.family import (Acceptance, Clocked, ColderDrafter, HybridDrafter, Int4Linear, SuffixDrafter, SuffixIndex, expected_acceptance, outcome, quantised,
                              replay, rows_on, search_layers, trial)
from specdec.lossless.proof import ExactModel, Language, language_pairs, loop_error
from specdec.speculative import Draft, ModelDrafter, NGramDrafter, NoDrafter, speculate
from specdec.layouts import Linear

CPU = torch.device("cpu")


# --- The suffix index -------------------------------------------------------------------------------------------------

def search(tokens):
    "The longest ending that occurred before, and the position after its newest earlier occurrence, by looking everywhere."
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


@settings(max_examples=300, deadline=None, derandomize=True)
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


@settings(max_examples=100, deadline=None, derandomize=True)
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
    assert sum(index.length[s] - index.length[index.link[s]] for s in range(1, len(index.next))) == len(inside - {()})  # each state's share of distinct substrings


class Counting(list):
    "A list that counts how often it is looked into."
    count = 0
    def __getitem__(self, i):
        Counting.count += 1
        return super().__getitem__(i)


HARD = {"one token": lambda n: [0] * n, "no repeats": lambda n: list(range(n)), "random": lambda n: np.random.default_rng(0).integers(0, 3, n).tolist(),
        "a tail": lambda n: [0] * (n // 2) + [1] * (n // 2), "periodic": lambda n: [0, 1, 1] * (n // 3),
        "Fibonacci": lambda n: fibonacci(n)}


def fibonacci(n):
    a, b = [0], [0, 1]
    while len(b) < n: a, b = b, b + a
    return b[:n]


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


# --- The suffix drafter -----------------------------------------------------------------------------------------------

def started(drafter, tokens):
    drafter.prefill(tokens, None, 10 ** 6)
    return drafter


@settings(max_examples=200, deadline=None, derandomize=True)
@given(texts, st.integers(1, 7), st.sampled_from([0.5, 1, 2, 3.5]))
def test_what_the_suffix_drafter_proposes(tokens, K, per_match):
    length, end = search(tokens)
    drafter = started(SuffixDrafter(per_match), tokens)
    draft = drafter.propose(K, None, None)
    wanted = 0 if not length else min(K, max(1, int(per_match * length)))
    longer = list(tokens)
    start = drafter.index.match[1]
    for i in range(wanted): longer.append(longer[start + i])  # copying may run into what was copied
    assert draft == Draft(longer[len(tokens):]) and draft.q is None and drafter.reach(K) == wanted
    assert [drafter.evidence(i) for i in range(3)] == [min(8, length + i) for i in range(3)]


def test_the_suffix_drafter_goes_on_and_starts_anew():
    drafter = started(SuffixDrafter(), [1, 2, 3])
    drafter.commit([1], None)
    assert drafter.propose(4, None, None).tokens == [2, 3]
    drafter.prefill([1, 2, 1], None, 10)
    assert drafter.propose(4, None, None).tokens == [2, 1]
    assert started(SuffixDrafter(), [1]).propose(4, None, None) == Draft([])


def test_colder_than_the_largest_number():
    assert ColderDrafter(NoDrafter()).colder(Transform(10**400)).temperature > 1e299


def test_per_match_may_be_without_end():
    drafter = started(SuffixDrafter(float("inf")), [1, 2, 3, 1])
    assert drafter.propose(5, None, None).tokens == [2, 3, 1, 2, 3] and drafter.propose(0, None, None) == Draft([])


@pytest.mark.parametrize("wrong", [0, -1, "2", None])
def test_per_match_is_checked(wrong):
    with pytest.raises(InputError, match="above 0"): SuffixDrafter(wrong)


# --- Replaying --------------------------------------------------------------------------------------------------------

class Recital:
    "A target that recites one text."
    vocab_size, context_length, device = 50, 10 ** 4, CPU
    def __init__(self, text): self.text = torch.tensor(text)
    def new_cache(self, capacity):
        from specdec.kvcache import KVCache
        return KVCache(1, capacity)
    def forward(self, ids, cache, last=None, layers=()):
        at = cache.length
        cache.append(0, torch.zeros(1, 1, ids.shape[1], 1), torch.zeros(1, 1, ids.shape[1], 1))
        logits = 9.0 * torch.nn.functional.one_hot(self.text[at + 1:cache.length + 1], self.vocab_size)
        return logits[None, -last:] if last else logits[None]


@pytest.mark.parametrize("K", [1, 3, 8])
@pytest.mark.parametrize("make", [NGramDrafter, SuffixDrafter, NoDrafter, lambda: HybridDrafter(SuffixDrafter(), NGramDrafter())])
def test_replaying_gives_the_rounds_of_the_loop(make, K):
    text = np.random.default_rng(1).integers(0, 4, 80).tolist()
    rounds = list(speculate(Recital(text), make(), text[:10], Transform(), TorchSource(0), K, 70))
    assert replay(make(), text[:10], text[10:], K) == rounds[1:]
    assert sum(r.accepted for r in rounds) > 0 or make is NoDrafter


def test_only_certain_guesses_are_replayed():
    class Unsure(NGramDrafter):
        def propose(self, K, transform, source): return Draft([1], torch.full((1, 50), 1 / 50))
    with pytest.raises(InputError, match="reports a q"): replay(Unsure(), [1, 2], [3, 4, 5], 2)


# --- Layers left out --------------------------------------------------------------------------------------------------

def tiny_llama(dtype=torch.float32, layers=4, seed=0):
    "A random Llama whose matrices can be packed in fours."
    import tempfile
    from pathlib import Path
    from transformers import LlamaConfig, LlamaForCausalLM
    from specdec.loading import load_model
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                         tie_word_embeddings=False, initializer_range=0.2)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        return load_model(Path(folder), CPU, dtype)


@pytest.fixture(scope="module")
def tiny(): return tiny_llama()


WRITTEN = [([1, 2, 3], [4, 5, 6, 7, 8, 9]), ([9, 8], [7, 6, 5])]


def test_rows_are_those_before_each_written_token(tiny):
    rows = rows_on(tiny, WRITTEN)
    assert rows.shape == (9, 96)
    for at, (prompt, text, i) in enumerate([(p, t, i) for p, t in WRITTEN for i in range(len(t))]):
        ids = torch.tensor([[*prompt, *text[:i]]])
        torch.testing.assert_close(rows[at], tiny.forward(ids, tiny.new_cache(32), last=1)[0, 0], rtol=1e-4, atol=1e-4)


def test_expected_acceptance_by_hand(tiny):
    p = Transform(1.0)(rows_on(tiny, WRITTEN))
    q = Transform(1.0)(rows_on(tiny.skip([1]), WRITTEN))
    assert expected_acceptance(p, tiny, WRITTEN, Transform(1.0)) == pytest.approx(1, abs=1e-6)
    assert expected_acceptance(p, tiny.skip([1]), WRITTEN, Transform(1.0)) == pytest.approx(torch.minimum(p, q).sum(-1).mean().item(), abs=1e-5)


def test_the_search_takes_the_best_layer_at_each_step(tiny):
    p = Transform(1.0)(rows_on(tiny, WRITTEN))
    def alpha(*skip): return expected_acceptance(p, tiny.skip(skip), WRITTEN, Transform(1.0))
    (first, a), (second, b) = search_layers(tiny, WRITTEN, 2, width=4)
    assert a == pytest.approx(max(alpha(i) for i in range(4))) and alpha(*first) == pytest.approx(a)
    assert set(first) < set(second) and b == pytest.approx(max(alpha(*first, i) for i in range(4) if i not in first))
    for wrong in (dict(count=0), dict(count=4, width=4), dict(count=3, width=2), dict(count=1, width=5)):
        with pytest.raises(InputError, match="count and width"): search_layers(tiny, WRITTEN, **wrong)
    with pytest.raises(InputError, match="no text"): search_layers(tiny, [], 1, 2)


# --- Four bits --------------------------------------------------------------------------------------------------------

def four_bits(weight, group):
    "The nearest of 16 evenly spaced levels between each group's smallest and largest weight."
    parts = weight.double().unflatten(-1, (-1, group))
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    step = (high - low) / 15
    return (low + ((parts - low) / step).round() * step).flatten(-2)


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 0.01), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("group", [32, 64])
def test_four_bits_are_sixteen_levels_in_each_group(dtype, limit, group):
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    weight, x, bias = torch.randn(48, 128).to(dtype), torch.randn(2, 3, 128).to(dtype), torch.randn(48).to(dtype)
    y = Int4Linear(Linear(weight, bias), group)(x)
    wanted = x.double() @ four_bits(weight, group).T + bias.double()
    assert y.dtype == dtype and y.shape == (2, 3, 48)
    assert (y.double() - wanted).norm() / wanted.norm() < limit
    exact = x.double() @ weight.double().T + bias.double()
    assert (y.double() - exact).norm() / exact.norm() > 0.06  # it did quantise


def test_weights_on_sixteen_levels_are_kept(tiny):
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    weight = torch.randint(0, 16, (32, 64)).float()
    weight[:, ::32], weight[:, 1::32] = 0, 15  # both ends occur in each group
    weight = weight / 8 - 0.5
    x = torch.randn(1, 64)
    torch.testing.assert_close(Int4Linear(Linear(weight))(x), x @ weight.T, rtol=1e-3, atol=1e-3)


def test_a_quantised_model_is_another_draft_and_leaves_the_target_alone(tiny):
    pytest.importorskip("torchao")
    ids = torch.tensor([[1, 2, 3, 4]])
    before = tiny.forward(ids, tiny.new_cache(8))
    light = quantised(tiny)
    after = light.forward(ids, light.new_cache(8))
    assert torch.equal(before, tiny.forward(ids, tiny.new_cache(8)))
    assert not torch.allclose(before, after) and torch.nn.functional.cosine_similarity(before, after, -1).mean() > 0.5  # random weights: far from any sixteen levels
    assert isinstance(light.layers[0].mlp.down, Int4Linear) and isinstance(tiny.layers[0].mlp.down, Linear)
    said = [t for r in speculate(tiny, ModelDrafter(light, 96), [1, 2, 3], Transform(), TorchSource(0), 3, 20) for t in r.emitted]
    plain = [t for r in speculate(tiny, NoDrafter(), [1, 2, 3], Transform(), TorchSource(0), 3, 20) for t in r.emitted]
    assert said == plain


def test_what_cannot_be_quantised():
    pytest.importorskip("torchao")
    with pytest.raises(InputError, match="Only our own decoder"): quantised(SimpleNamespace())
    with pytest.raises(InputError, match="group_size"): Int4Linear(Linear(torch.ones(16, 64)), 48)
    for shape in [(16, 48), (24, 64)]:
        with pytest.raises(InputError, match="can't be packed"): Int4Linear(Linear(torch.ones(shape)))


def test_without_torchao_the_error_names_the_command(monkeypatch):
    real = builtins.__import__
    def without(name, *args, **more):
        if name.split(".")[0] == "torchao": raise ImportError("No module named 'torchao'")
        return real(name, *args, **more)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModelError, match="pip install torchao"): Int4Linear(Linear(torch.ones(16, 32)))


# --- What is known of acceptance --------------------------------------------------------------------------------------

def test_acceptance_counts_tried_guesses_only():
    estimate = Acceptance(0.5, weight=2, keep=1)
    estimate.observe(["a", "b", "c"], accepted=1, tried=2)
    assert estimate.counts == {"a": (1, 1), "b": (0, 1)}  # c was never tried
    assert [estimate.alpha(k) for k in "abc"] == pytest.approx([2 / 3, 1 / 3, 1 / 2])
    assert estimate.expected(["a", "b"]) == pytest.approx([1 + 2 / 3, 1 + 2 / 3 + 2 / 3 * (2 * 2 / 3) / 3])  # b begins like a


def test_a_position_that_was_never_tried_is_like_the_one_before():
    estimate = Acceptance(0.5, weight=1, keep=1)
    for _ in range(200): estimate.observe([0, 1], 2, 2)
    assert estimate.expected([0, 1, 2])[2] > 3.9 and estimate.alpha(2) == 0.5
    assert Acceptance({"a": 0.9}).expected(["a", "b"]) == pytest.approx([1.9, 1.9 + 0.81])  # not in the prior: like the one before


def test_acceptance_finds_the_truth_under_censoring_and_the_tempting_count_does_not():
    rng, truth, K = np.random.default_rng(0), [0.8, 0.6, 0.3], 3
    estimate, naive = Acceptance(0.5, keep=1), np.zeros(3)
    for _ in range(3000):
        accepted = next((i for i in range(K) if rng.random() > truth[i]), K)
        estimate.observe(range(K), accepted, min(accepted + 1, K))
        naive[:accepted] += 1
    assert [estimate.alpha(i) for i in range(K)] == pytest.approx(truth, abs=0.04)
    assert abs(naive[2] / 3000 - truth[2]) > 0.1  # accepted / drafted


def test_old_tries_fade():
    estimate = Acceptance({"a": 0.9}, weight=1, keep=0.5)
    for _ in range(5): estimate.observe(["a"], 0, 1)
    low = estimate.alpha("a")
    for _ in range(10): estimate.observe(["b"], 1, 1)
    assert low < 0.35 and estimate.alpha("a") == pytest.approx(0.9, abs=0.01) and estimate.alpha("unknown") == 0.5


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), max_size=5), st.integers(0, 5), st.integers(0, 3), st.booleans())
def test_outcome_reads_what_the_loop_did(drafted, accepted, own, ended):
    "Commits as the loop makes them: accepted drafts and the target's own token, which differs from a rejected draft; an end inside cuts it."
    accepted = min(accepted, len(drafted))
    if accepted < len(drafted) and own == drafted[accepted]: own = (own + 1) % 4
    tokens = drafted[:accepted] if ended and accepted else [*drafted[:accepted], own]
    rejected = accepted < len(drafted) and len(tokens) > accepted
    assert outcome(drafted, tokens) == (accepted, accepted + rejected)


# --- The hybrid -------------------------------------------------------------------------------------------------------

class Scripted:
    "Proposes what it is told to, knows what it is told to know, and logs everything."
    def __init__(self, tokens=(), layers=(), evidence=None):
        self.tokens, self.layers, self.log = list(tokens), layers, []
        if evidence is not None: self.reach, self.evidence = (lambda K: min(K, len(evidence))), (lambda i: evidence[i])
    def prefill(self, tokens, features, limit): self.log.append(("prefill", list(tokens), features))
    def commit(self, tokens, features): self.log.append(("commit", list(tokens), features))
    def propose(self, K, transform, source):
        self.log.append(("propose", K))
        return Draft(self.tokens[:K])


def test_the_plan_is_the_best_rate():
    "Against every choice, by the formula."
    first, second = Scripted(evidence=["x", "y", "z"]), Scripted()
    priors, c, verify = ({"x": 0.9, "y": 0.2, "z": 0.9}, 0.7), (0.01, 0.3), 0.05
    hybrid = HybridDrafter(first, second, c, verify, priors)
    hybrid.prefill([1], None, 10)
    rates = {(0, 0): 1.0}
    for n, tokens in enumerate((1.9, 1.9 + .18, 1.9 + .18 + .162), 1): rates[0, n] = tokens / (1 + n * .06)
    for n in range(1, 5): rates[1, n] = sum(.7 ** i for i in range(n + 1)) / (1 + n * .35)
    who, evidence = hybrid.plan(4)
    assert (who, len(evidence)) == max(rates, key=rates.get)
    assert hybrid.plan(1) == (0, ["x"])


def test_no_guess_is_better_than_a_bad_one():
    hybrid = HybridDrafter(Scripted(evidence=["x"]), Scripted(), c=(0.1, 1.0), priors=({"x": 0.05}, 0.5))
    hybrid.prefill([1], None, 10)
    assert hybrid.plan(5) == (0, []) and hybrid.propose(5, None, None) == Draft([])
    assert not any(entry[0] == "propose" for member in hybrid.members for entry in member.log)


def test_both_members_hear_everything_and_the_proposer_learns():
    first, second = Scripted([7, 8], evidence=["x", "x"]), Scripted([5, 6])
    hybrid = HybridDrafter(first, second, c=(0, 0.1), priors=({"x": 0.9}, 0.5))
    hybrid.prefill([1, 2], None, 10)
    assert hybrid.propose(2, None, None).tokens == [7, 8]
    hybrid.commit([7, 3], None)
    assert hybrid.estimates[0].counts == {"x": (1.0, 2.0)} and hybrid.estimates[1].counts == {}
    hybrid.commit([4], None)  # a round without a draft
    assert hybrid.estimates[0].counts["x"] == pytest.approx((0.98, 1.96))  # what it knows grows old
    for member in (first, second): assert [e[:2] for e in member.log if e[0] != "propose"] == [("prefill", [1, 2]), ("commit", [7, 3]), ("commit", [4])]
    for _ in range(20):
        drafted = hybrid.propose(2, None, None).tokens
        if drafted[:1] == [5]: break  # the first has disappointed
        hybrid.commit([9], None)
    assert drafted[:1] == [5]
    hybrid.prefill([1], None, 10)
    assert hybrid.propose(2, None, None).tokens == [7, 8]  # a new text begins with the priors


def test_who_was_unlucky_is_asked_again():
    "While the other one drafts, old disappointments fade."
    first, second = Scripted([7], evidence=["x"]), Scripted([5], evidence=["y"])
    hybrid = HybridDrafter(first, second, c=(0.0, 0.1), priors=(0.5, 0.8))
    hybrid.prefill([1], None, 10)
    asked = []
    for _ in range(400):
        drafted = hybrid.propose(1, None, None).tokens
        asked.append(drafted)
        hybrid.commit([9] if drafted == [5] else [7] if len(asked) % 2 else [9], None)  # the second is never right, the first one half of the time
    turned = asked.index([7])
    assert [5] in asked[:turned] and [5] in asked[turned + 20:]


def test_features_are_shared_out():
    features = torch.arange(12.).view(2, 6)  # two tokens, layers 3, 1 and 9, two numbers each
    first, second, third = Scripted(layers=(3, 1)), Scripted(layers=(1, 9)), Scripted()
    hybrid = HybridDrafter(first, second)
    assert hybrid.layers == (3, 1, 9)
    hybrid.prefill([1, 2, 3], features, 10)
    assert torch.equal(first.log[0][2], features[:, :4]) and torch.equal(second.log[0][2], features[:, [2, 3, 4, 5]])
    hybrid = HybridDrafter(third, second)
    hybrid.prefill([1, 2, 3], features[:, :4], 10)
    assert third.log[0][2] is None and second.log[-1][2].tolist() == features[:, :4].tolist()


def test_wrong_costs():
    for wrong in (dict(c=(-1, 0)), dict(verify=-0.1), dict(c=(0.1,)), dict(c=0.1), dict(c=(0, float("nan"))), dict(c=(float("nan"), 0)), dict(verify=float("nan"))):
        with pytest.raises(InputError, match="Costs"): HybridDrafter(Scripted(), Scripted(), **wrong)
    with pytest.raises(InputError, match="prior"): HybridDrafter(Scripted(), Scripted(), priors=(0.5,))
    for wrong in (dict(weight=0), dict(weight=-1), dict(keep=0), dict(keep=1.1)):
        with pytest.raises(InputError, match="prior"): Acceptance(0.5, **wrong)


def test_same_seed_same_tokens(tiny):
    def text(): return [r for r in speculate(tiny, HybridDrafter(SuffixDrafter(), ModelDrafter(tiny.skip([2]), 96)), [1, 2, 1, 2], Transform(0.7), TorchSource(3), 4, 40)]
    assert text() == text()


def test_a_hybrid_in_the_loop_keeps_its_model_right(tiny):
    "A target drafting for itself accepts everything, also after rounds in which the other one proposed."
    class Often(SuffixDrafter):
        def evidence(self, i): return "always"
    own = ModelDrafter(tiny, 96)
    hybrid = HybridDrafter(Often(), own, c=(0, 0.3), priors=({"always": 0.9}, 0.9))
    proposals, real = [], hybrid.propose
    def propose(K, transform, source):
        draft = real(K, transform, source)
        proposals.append(hybrid.pending[0])
        return draft
    hybrid.propose = propose
    rounds = list(speculate(tiny, hybrid, [1, 2, 1, 2, 1], Transform(1.0), TorchSource(0), 3, 120))[1:]
    assert {0, 1} <= set(proposals)
    for who, r in zip(proposals, rounds):
        if who == 1: assert r.accepted == len(r.drafted)


def test_the_hybrid_is_not_slower_than_its_better_half():
    "Two drafters that are right now and then, in texts where now the one, now the other is better; speeds by the cost model."
    rng = np.random.default_rng(0)
    class Knowing:
        "Right with a probability that depends on the place."
        layers = ()
        def __init__(self, text, chances, seed): self.text, self.right = text, np.random.default_rng(seed).random(len(text)) < chances
        def prefill(self, tokens, features, limit): self.at = len(tokens)
        def commit(self, tokens, features): self.at += len(tokens)
        def propose(self, K, transform, source): return Draft([t if ok else t + 100 for t, ok in zip(self.text[self.at:self.at + K], self.right[self.at:])])
    text = rng.integers(0, 50, 4000).tolist()
    for chances in [(0.8, 0.3), (0.3, 0.8), (0.6, 0.6), (0.05, 0.5)]:
        def make(i): return Knowing(text, chances[i], i)
        c = (0.02, 0.1)
        def speed(drafter, cost):
            rounds = replay(drafter, text[:1], text[1:], 4)
            return sum(len(r.emitted) for r in rounds) / sum(1 + len(r.drafted) * .025 + cost(r) for r in rounds)
        alone = [speed(make(i), lambda r, i=i: len(r.drafted) * c[i]) for i in (0, 1)]
        hybrid, spent = HybridDrafter(make(0), make(1), c, .025, (0.5, 0.5)), []
        real = hybrid.propose
        def propose(K, transform, source):
            draft = real(K, transform, source)
            spent.append(len(draft.tokens) * c[hybrid.pending[0]])
            return draft
        hybrid.propose = propose
        rounds = replay(hybrid, text[:1], text[1:], 4)
        together = sum(len(r.emitted) for r in rounds) / (sum(1 + len(r.drafted) * .025 for r in rounds) + sum(spent))
        assert together > 0.97 * max(alone), (chances, alone, together)


# --- The executed proof -----------------------------------------------------------------------------------------------

def hybrid_of(q, width, V, **options): return lambda: HybridDrafter(SuffixDrafter(), ModelDrafter(ExactModel(q, width), V), **options)


@pytest.mark.parametrize("K, V", [(1, 2), (1, 3), (2, 2), (2, 3), (3, 2)])
def test_every_drafter_is_lossless(K, V):
    for case, p, q in language_pairs(V, f"drafters {K}", most=max(2, 5 - K), halves=True):
        width = V - 1 if case == "smaller draft vocabulary" else V
        for make in (SuffixDrafter, lambda: SuffixDrafter(0.5), hybrid_of(q, width, V), hybrid_of(q, width, V, c=(0.0, 0.0), priors=(0.9, 0.6)), lambda: Clocked(SuffixDrafter())):
            assert loop_error(speculate, make, p, K, V, case).error == 0, case
        assert loop_error(speculate, hybrid_of(q, width, V), p, K, V, case, greedy=True).error == 0
        if case == "p and q differ":
            for end in range(V): assert loop_error(speculate, hybrid_of(q, width, V), p, K, V, case, eos_ids=frozenset({end})).error == 0
            assert loop_error(speculate, hybrid_of(q, width, V), p, K, V, case, max_new_tokens=K + 2).error == 0


def test_in_the_proof_both_members_propose():
    "Else the test above would prove less than it says."
    seen = set()
    class Seen(HybridDrafter):
        def propose(self, K, transform, source):
            draft = super().propose(K, transform, source)
            seen.add(self.pending[0] if draft.tokens else None)
            return draft
    p, q = Language(2, "p", halves=True), Language(2, "q", halves=True)
    assert loop_error(speculate, lambda: Seen(SuffixDrafter(), ModelDrafter(ExactModel(q, 2), 2)), p, 2, 2, "").error == 0
    assert {0, 1} <= seen


class Peeking(HybridDrafter):
    "Wrong: lets the second draw first, and takes the first one's guesses where the drawn token is an unlikely one."
    def propose(self, K, transform, source):
        drawn = self.members[1].propose(K, transform, source)
        if drawn.tokens and drawn.q[0][drawn.tokens[0]] >= 0.5: return drawn
        return self.members[0].propose(K, transform, source)


class Blending(HybridDrafter):
    "Wrong: takes the first one's guesses and reports the second one's q."
    def propose(self, K, transform, source):
        sure = self.members[0].propose(K, transform, source)
        drawn = self.members[1].propose(len(sure.tokens), transform, source) if sure.tokens else Draft([])
        return Draft(sure.tokens, drawn.q)


@pytest.mark.parametrize("wrong", [Peeking, Blending])
def test_wrong_hybrids_are_caught(wrong):
    errors = []
    for seed in range(4):
        p, q = Language(3, f"p{seed}", halves=True), Language(3, f"q{seed}", halves=True)
        assert loop_error(speculate, lambda: HybridDrafter(SuffixDrafter(), ModelDrafter(ExactModel(q, 3), 3)), p, 1, 3, "").error == 0
        try: errors.append(loop_error(speculate, lambda: wrong(SuffixDrafter(), ModelDrafter(ExactModel(q, 3), 3)), p, 1, 3, "").error)
        except InputError: errors.append(1)  # a token with q = 0
    assert max(errors) > 0


# --- Colder than the target -------------------------------------------------------------------------------------------

class Likelier(ColderDrafter):
    "As if it were colder, in fractions: of the two likeliest tokens, each with the same chance."
    def colder(self, transform):
        def even(row):
            best = row.topk(min(2, len(row)))
            kept = (best.values > 0).float()
            return torch.zeros_like(row).index_copy_(-1, best.indices, kept / kept.sum())
        return even


class Unreported(Likelier):
    "Wrong: draws colder, and reports the q that it would otherwise have drawn from."
    def propose(self, K, transform, source):
        text, drawn = self.drafter.tokens[1:], super().propose(K, transform, source)
        rows = [self.drafter.model.language((*text, *drawn.tokens[:i])).astype(float) for i in range(len(drawn.tokens))]
        return Draft(drawn.tokens, torch.tensor(np.stack(rows), dtype=torch.float32))


@pytest.mark.parametrize("K, V", [(1, 2), (1, 3), (2, 2), (2, 3), (3, 2)])
def test_a_colder_draft_is_lossless(K, V):
    for case, p, q in language_pairs(V, f"colder {K}", most=max(2, 5 - K), halves=True):
        width = V - 1 if case == "smaller draft vocabulary" else V
        def colder(): return Likelier(ModelDrafter(ExactModel(q, width), V))
        for make in (colder, lambda: HybridDrafter(SuffixDrafter(), colder())): assert loop_error(speculate, make, p, K, V, case).error == 0, case


def test_drawing_colder_without_saying_so_is_caught():
    errors = []
    for seed in range(4):
        p, q = Language(3, f"p{seed}", halves=True), Language(3, f"q{seed}", halves=True)
        errors.append(loop_error(speculate, lambda: Unreported(ModelDrafter(ExactModel(q, 3), 3)), p, 1, 3, "").error)
    assert max(errors) > 0


def test_only_the_draft_gets_colder(tiny):
    "q is the draft's softmax at the lower temperature, and greedy text has the same rounds as without."
    prompt, transform = [1, 2, 3], Transform(0.8, top_k=20)
    drafter = ColderDrafter(ModelDrafter(tiny, 96), 0.5)
    drafter.prefill(prompt, None, 20)
    draft = drafter.propose(2, transform, TorchSource(0))
    logits = tiny.forward(torch.tensor([prompt + draft.tokens[:1]]), tiny.new_cache(9), last=2)[0]
    assert torch.allclose(draft.q, Transform(0.4, top_k=20)(logits), atol=1e-5) and not torch.allclose(draft.q, transform(logits), atol=1e-2)
    greedy = [list(speculate(tiny, make(), prompt, Transform(), TorchSource(0), 3, 20)) for make in (lambda: ColderDrafter(ModelDrafter(tiny, 96)), lambda: ModelDrafter(tiny, 96))]
    assert greedy[0] == greedy[1]


@pytest.mark.parametrize("factor", [0, -1, float("inf"), float("nan"), "1"])
def test_a_temperature_that_cannot_be(factor):
    with pytest.raises(InputError, match="positive part"): ColderDrafter(NGramDrafter(), factor)


# --- Trials -----------------------------------------------------------------------------------------------------------

def test_a_trial_counts_and_times(tiny):
    one = trial(tiny, ModelDrafter(tiny, 96), [1, 2, 3], K=3, max_new_tokens=21)
    assert sum(len(r.emitted) for r in one.rounds) == 20 and all(r.accepted == len(r.drafted) for r in one.rounds)
    assert 0 < one.verify_seconds < one.seconds and 0 < one.step_seconds < one.seconds
    assert trial(tiny, NoDrafter(), [1, 2, 3], K=1, max_new_tokens=5).step_seconds == 0


def test_the_clock_leaves_out_the_first_proposal_and_empty_ones():
    clocked = Clocked(SuffixDrafter())
    clocked.times = [(4, 100.0), (2, 4.0), (0, 50.0), (1, 2.0), (3, 9.0)]
    assert clocked.step_seconds == 2.0
