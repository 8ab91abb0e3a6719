"""The smallest decoder: exact and statistical verdicts with mutants that must fail them, greedy texts equal to
transformers', and its size."""
import ast
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig

import specdec.minimal as minimal
from families import STATES
from families import random_model as family
from specdec.lossless.black_box import check_decoder
from specdec.lossless.check import check_verify
from specdec.minimal import RandomSource, Reader, generate, lookup, one_round, probabilities, verify
from specdec.models.hub import encode, fetch, load_tokenizer, load_transformers, prompts
from specdec.sampling import SamplingParams

V = 8
SIZES = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2)
REPEATING = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]  # so that lookup has something to find


def random_model(config, seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


COMMON = dict(vocab_size=V, initializer_range=.4, eos_token_id=None)


def llama(seed=0): return random_model(LlamaConfig(**COMMON, **SIZES), seed)


def gpt2(): return random_model(GPT2Config(n_embd=16, n_layer=2, n_head=2, bos_token_id=0, **COMMON))


def mistral(): return random_model(MistralConfig(sliding_window=6, **COMMON, **SIZES))


TINY = {"llama": llama, "gpt2": gpt2, "sliding window": mistral}


def flat(rounds): return [token for tokens in rounds for token in tokens]


def drawn_by(model, temperature=1.0, said=1.0):
    "A draft function that draws from a model; `said` is the temperature of the q that it reports."
    reader = Reader(model)
    def draft(text, K, rng):
        tokens, rows = [], []
        for _ in range(K):
            logits = reader(text + tokens, 1)
            tokens.append(rng.categorical(probabilities(logits, temperature)[0]))
            rows.append(probabilities(logits, said)[0])
        return tokens, torch.stack(rows) if rows else None
    return draft


# The rule

def test_verify_is_exactly_lossless():
    "Drafts that are drawn, sure with a one-hot q, and sure without a q: both branches."
    report = check_verify(verify, none=True)
    assert (report.lossless, report.route, report.error) == (True, "fractions", 0) and report.cases > 150
    assert report.cases > check_verify(verify).cases


def test_verify_is_lossless_on_tensors():
    report = check_verify(verify, sizes=[(1, 2), (1, 3), (2, 2), (2, 3)], none=True, route="tensors")
    assert report.lossless and report.error < 1e-12


def no_residual(p, q, tokens, rng):
    for i, token in enumerate(tokens):
        if not rng.bernoulli(min(1, p[i][token] / q[i][token])): return i, rng.categorical(p[i])
    return len(tokens), rng.categorical(p[-1])


def bonus_from_the_residual(p, q, tokens, rng):
    num_accepted, next_token = verify(p, q, tokens, rng)
    if num_accepted < len(tokens): return num_accepted, next_token
    left = (p[-1] - q[-1]).clip(min=0)
    return num_accepted, rng.categorical(left if left.any() else p[-1])


def never_the_bonus_row(p, q, tokens, rng): return verify(p[:-1], q, tokens, rng)


def ratio_upside_down(p, q, tokens, rng):
    for i, token in enumerate(tokens):
        if not rng.bernoulli(min(1, q[i][token] / p[i][token]) if p[i][token] else 0): return i, rng.categorical(p[i])
    return len(tokens), rng.categorical(p[-1])


def keeps_what_it_did_not_draw(p, q, tokens, rng):
    if q is not None: return verify(p, q, tokens, rng)
    drawn = [rng.categorical(row) for row in p]
    return sum(a == b for a, b in zip(drawn, tokens)), drawn[-1]  # also behind the first difference


MUTANTS = [no_residual, bonus_from_the_residual, never_the_bonus_row, ratio_upside_down, keeps_what_it_did_not_draw]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda rule: rule.__name__)
def test_check_verify_fails_mutants(mutant):
    assert not check_verify(mutant, none=mutant is keeps_what_it_did_not_draw).lossless


def test_a_residual_of_nothing_is_only_rounding():
    "p = q up to rounding, and a rejection all the same: then p itself is drawn from."
    class Unlucky:
        def bernoulli(self, chance): return False
        def categorical(self, weights): return int(weights.argmax())
    row = torch.tensor([[.25, .75]])
    assert verify(torch.cat([row, row]), row, [0], Unlucky()) == (0, 1)


# The decoder as a black box

def black_box(model, draft, K=2):
    def answer(prompt, n, seed):
        return flat(generate(model, prompt, draft, K, temperature=1.0, max_new_tokens=n, seed=seed))
    return answer


def verdict(model, answer):
    def distribution(ids):
        with torch.inference_mode(): return model(torch.tensor([ids])).logits[0, -1]
    return check_decoder(answer, distribution, REPEATING, SamplingParams(1.0), length=4, samples=1000, distance=.2,
                         progress=False)


@pytest.fixture(scope="module")
def target(): return llama(0)


@pytest.fixture(scope="module")
def other(): return llama(1)


@pytest.mark.parametrize("drafts", ["lookup", "a model"])
def test_check_decoder_passes_it(target, other, drafts):
    report = verdict(target, black_box(target, lookup if drafts == "lookup" else drawn_by(other)))
    assert report.lossless and report.power > .9, report


def test_check_decoder_fails_a_q_that_was_not_drawn_from(target, other):
    assert not verdict(target, black_box(target, drawn_by(other, temperature=.3, said=1.0))).lossless


def test_check_decoder_fails_a_dropped_residual(target, other, monkeypatch):
    monkeypatch.setattr(minimal, "verify", no_residual)
    assert not verdict(target, black_box(target, drawn_by(other))).lossless


class Forgetless(Reader):
    "Keeps what was rejected in its cache."
    def __call__(self, text, n):
        new = text[-n:] if self.cache.get_seq_length() else text
        return self.model(torch.tensor([new]), **self.past).logits[0, -n:].detach()


def test_check_decoder_fails_a_cache_that_forgets_nothing(target, other, monkeypatch):
    draft = drawn_by(other)  # with a right reader
    monkeypatch.setattr(minimal, "Reader", Forgetless)
    assert not verdict(target, black_box(target, draft)).lossless


# The text belongs to the seed

def nothing(text, K, rng): return [], None


def ones(text, K, rng): return [1] * K, None


def at_random(text, K, rng): return [rng.categorical(torch.ones(V)) for _ in range(K)], None


def plain(model, seed, temperature=1.0, n=12):
    "Plain decoding, without a cache: a number of the seed's for each token."
    text, rng = list(REPEATING), RandomSource(seed)
    for _ in range(n):
        with torch.inference_mode(): logits = model(torch.tensor([text]), use_cache=False).logits[0, -1:]
        text.append(rng.categorical(probabilities(logits, temperature)[0]))
    return text[len(REPEATING):]


def drafted(model, drafter, K, seed, temperature=1.0, n=12):
    return flat(generate(model, REPEATING, drafter, K, temperature, max_new_tokens=n, seed=seed))


@pytest.mark.parametrize("kind", TINY)
def test_sure_drafts_leave_each_seed_its_text(kind):
    "Whatever is guessed, and however many; also what the drafter drew and calls sure, and what it knows."
    model, texts = TINY[kind](), set()
    for seed in range(12):
        temperature = (.5, 1.0, 2.0)[seed % 3]
        expected = plain(model, seed, temperature)
        def knows(text, K, rng): return expected[len(text) - len(REPEATING):][:K], None
        for drafter in (nothing, lookup, ones, at_random, knows):
            for K in (1, 8) if seed % 2 else (3,):
                assert drafted(model, drafter, K, seed, temperature) == expected, (drafter.__name__, K, seed)
        texts.add(tuple(expected))
    assert len(texts) == 12


def differs(target, drafter=lookup):
    "Whether some seed has another text than plain decoding's."
    return any(drafted(target, drafter, 3, seed) != plain(target, seed) for seed in range(8))


def draws_twice(p, q, tokens, rng):
    rng.categorical(p[0])
    return verify(p, q, tokens, rng)


def by_the_ratio(p, q, tokens, rng):
    "What is lossless, and keeps no seed's text: the ratio test with a one-hot q."
    q = torch.nn.functional.one_hot(torch.tensor(tokens, dtype=torch.long), V).float()
    return verify(p, q, tokens, rng)


def draws_ahead(p, q, tokens, rng):
    "A number for each row, used or not."
    drawn = [rng.categorical(row) for row in p]
    kept = [*(a == b for a, b in zip(drawn, tokens)), False].index(False)
    return kept, drawn[kept]


@pytest.mark.parametrize("rule", [draws_twice, by_the_ratio, draws_ahead])
def test_a_rule_that_takes_other_numbers_is_seen(target, rule, monkeypatch):
    assert not differs(target)
    monkeypatch.setattr(minimal, "verify", rule)
    assert differs(target)


def test_a_drafter_that_takes_a_number_of_the_targets_is_seen(target, monkeypatch):
    assert not differs(target, at_random)
    monkeypatch.setattr(minimal, "one_round", lambda *given: one_round(*given[:-2], rng := given[-2], rng))
    assert differs(target, at_random) and not differs(target)  # lookup takes none


P, Q = torch.tensor([.5, .2, .2, .1]), torch.tensor([.2, .5, .1, .2])  # the tour's weather


class Weather:
    "A target that says P, whatever it reads."
    def __init__(self, model): pass
    def __call__(self, text, n): return P.log().expand(n, -1)


def off(tokens): return float((np.bincount(tokens, minlength=4) / len(tokens) - P.numpy()).clip(0).sum())  # TV


def test_the_drafters_numbers_have_nothing_to_do_with_the_targets(monkeypatch):
    "Two sources of one seed: what is drafted and whether it is accepted hang together, and that is seen."
    def draft(text, K, rng): return [rng.categorical(Q) for _ in range(K)], Q.expand(K, -1)
    def error(): return off([next(generate(None, [0], draft, 1, 1.0, 2, seed=seed))[0] for seed in range(4000)])
    monkeypatch.setattr(minimal, "Reader", Weather)
    assert error() < .03
    monkeypatch.setattr(minimal, "RandomSource", lambda seed: RandomSource(min(seed, ~seed % 2**64)))
    assert error() > .06


# The reader

@pytest.mark.parametrize("kind", TINY)
def test_the_reader_reads_what_is_new_and_forgets_what_changed(kind):
    model, fed = TINY[kind](), []
    reader = Reader(model)
    model.register_forward_pre_hook(lambda module, args, kwargs: fed.append(args[0].shape[1]), with_kwargs=True)
    texts = [  # a text, rows asked for, tokens that are read
        ([1, 2, 3, 4, 5, 6, 7, 1], 1, 8), ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], 2, 2),
        ([1, 2, 3, 4, 5, 6, 7, 1, 2, 5], 1, 1), ([1, 2, 3, 4, 5, 6, 7, 1, 2, 5, 6], 3, 3),
        ([1, 2, 3, 7], 2, 2), ([1, 2, 3, 7], 2, 2), ([1, 2], 1, 1), ([5], 1, 1)]
    for text, n, count in texts:
        fed.clear()
        logits = reader(text, n)
        assert fed == [count] and reader.seen == text
        with torch.inference_mode(): expected = model(torch.tensor([text]), use_cache=False).logits[0, -n:]
        assert torch.allclose(logits, expected, atol=1e-5)


# The loop

@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize("K", [1, 3, 9])
def test_greedy_text_of_small_models_equals_generate(kind, K):
    model, ids = TINY[kind](), torch.tensor([REPEATING])
    settings = dict(attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0)
    expected = model.generate(ids, **settings)[0, ids.shape[1]:].tolist()
    rounds = list(generate(model, REPEATING, K=K, max_new_tokens=24))
    assert flat(rounds) == expected and all(1 <= len(tokens) <= K + 1 for tokens in rounds)


def test_a_list_is_a_forward(target):
    forwards = []
    handle = target.register_forward_hook(lambda *_: forwards.append(1))
    rounds = list(generate(target, REPEATING, max_new_tokens=20))
    handle.remove()
    assert len(rounds) == len(forwards) < 20


def test_the_target_as_its_own_draft_has_everything_accepted(target):
    rounds = list(generate(target, REPEATING, drawn_by(target), K=3, temperature=1.0, max_new_tokens=16))
    assert [len(tokens) for tokens in rounds] == [4, 4, 4, 4]


@pytest.mark.parametrize("n", [1, 2, 5, 17])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_as_many_tokens_as_asked_for(target, n, temperature):
    assert len(flat(generate(target, REPEATING, ones, K=4, temperature=temperature, max_new_tokens=n))) == n


@pytest.mark.parametrize("K", [1, 2, 4])
def test_the_text_ends_after_an_end_wherever_it_stands_in_a_round(target, K):
    expected = plain(target, seed=0, temperature=0)
    def knows(text, K, rng): return expected[len(text) - len(REPEATING):][:K], None  # guesses everything right
    for end in set(expected):
        said = flat(generate(target, REPEATING, knows, K=K, max_new_tokens=12, eos_ids={end}))
        assert said == expected[:expected.index(end) + 1]


def test_an_end_in_the_prompt_ends_nothing(target):
    said = flat(generate(target, REPEATING, max_new_tokens=6))
    absent = next(token for token in range(V) if token not in said)
    assert flat(generate(target, [*REPEATING[:-1], absent], max_new_tokens=1, eos_ids={absent}))


def test_the_same_seed_gives_the_same_text(target):
    def text(seed): return flat(generate(target, REPEATING, temperature=1.0, max_new_tokens=20, seed=seed))
    assert text(1) == text(1) and len({tuple(text(seed)) for seed in range(5)}) == 5


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1, -1, -2**63])
def test_each_seed_of_torchs_has_a_source_for_the_drafter(target, seed):
    "One with numbers of its own; for seeds below 2**63, those that `~seed` gives."
    seen = []
    def draft(text, K, rng):
        if not seen: seen.extend(rng.bernoulli(.5) for _ in range(64))
        return [], None
    said = flat(generate(target, REPEATING, draft, temperature=1.0, max_new_tokens=12, seed=seed))
    def draws(seed): return [rng.bernoulli(.5) for rng in [RandomSource(seed)] for _ in range(64)]
    assert said == plain(target, seed) and seen != draws(seed)
    assert seen == draws(~seed if seed < 2**63 else 2**64 - 1 - seed)


WRONG = {"no prompt": ({"prompt": []}, "Empty prompt"), "no guesses": ({"K": 0}, "must be 1 or more, not 0")}


@pytest.mark.parametrize("settings, message", WRONG.values(), ids=WRONG)
def test_errors_say_what_to_do(target, settings, message):
    with pytest.raises(ValueError, match=message): list(generate(target, **{"prompt": [1], **settings}))


@pytest.mark.parametrize("name", STATES)
def test_a_cache_that_cannot_be_cropped_is_refused(name):
    "States and windows of convolutions; the package itself has other means."
    with pytest.raises(ValueError, match="needs a cache that can be cropped"):
        next(generate(family(STATES[name]), REPEATING))


def test_lookup_takes_the_longest_and_latest_ending():
    assert lookup([1, 2, 3, 4, 1, 2, 3], 2) == ([4, 1], None)
    assert lookup([9, 2, 7, 1, 2, 8, 1, 2], 1) == ([8], None)  # the later place
    assert lookup([1, 2, 3, 9, 3, 5, 1, 2, 3], 1) == ([9], None)  # the longer ending
    assert lookup([1, 1], 5) == ([1], None)
    assert lookup([1, 2, 3], 5) == ([], None) and lookup([1], 5) == ([], None) and lookup([1, 1], 0) == ([], None)


def test_a_sure_draft_is_one_hot(target):
    "Greedy: the same round whether q is None or spelled out; at random, the same distribution (`check_verify` above)."
    def certain(text, K, rng):
        tokens, _ = lookup(text, K)
        return tokens, torch.nn.functional.one_hot(torch.tensor(tokens, dtype=torch.long), V).float()
    a, b = (one_round(Reader(target), draft, REPEATING, 3, 0.0, RandomSource(3), None) for draft in (lookup, certain))
    assert a == b


def test_dice_draw_in_proportion():
    rng, weights = RandomSource(0), torch.tensor([1., 0., 3.])
    counts = np.bincount([rng.categorical(weights) for _ in range(4000)], minlength=3)
    assert counts[1] == 0 and abs(counts[2] / 4000 - .75) < .04
    assert abs(sum(rng.bernoulli(.3) for _ in range(4000)) / 4000 - .3) < .04
    assert rng.bernoulli(1) and not rng.bernoulli(0) and not rng.bernoulli(Fraction(0))


# The real model

@pytest.fixture(scope="module")
def real(): return load_transformers(fetch(), torch.device("cpu"), torch.float32), load_tokenizer(fetch())


@pytest.mark.parametrize("index", [1, pytest.param(7, marks=pytest.mark.slow)], ids=["code", "conversation"])
def test_greedy_text_equals_generate(real, index):
    model, tokenizer = real
    prompt = encode(tokenizer, prompts()[index].messages)
    ids = torch.tensor([prompt])
    settings = dict(attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
    expected = model.generate(ids, pad_token_id=tokenizer.eos_token_id, **settings)[0, len(prompt):].tolist()
    said = flat(generate(model, prompt, max_new_tokens=40, eos_ids={tokenizer.eos_token_id}))
    if said == expected: return
    at = next(i for i, (a, b) in enumerate(zip(said, expected)) if a != b)  # only a tie may part them
    logits = Reader(model)([*prompt, *said[:at]], 1)[0]
    gap = (logits.max() - min(logits[said[at]], logits[expected[at]])).item()
    assert gap < 1e-4, f"The texts part at token {at}, where the logits are {gap:.2g} apart."


# Its size

SOURCE = Path(minimal.__file__).read_text(encoding="utf-8")


def test_it_is_small():
    assert len(SOURCE.splitlines()) <= 100
    assert max(map(len, SOURCE.split('"""', 2)[2].splitlines())) <= 90


def test_it_imports_nothing_of_ours():
    imports = [node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}
    assert modules == {"collections.abc", "inspect", "torch", "torch.nn.functional", "transformers"}
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in imports)
