"""Caches that can't be cut back: states and windows go back exactly, decoding with them is the library's, and what is
broken in them is caught."""
import random
from fractions import Fraction
from functools import cache, lru_cache

import numpy as np
import pytest
import torch
import transformers
from transformers import LlamaConfig

import specdec.models.transformers as home
from families import OTHERS, SMALL, STATES, V, check_interface, difference, random_model, tokens
from specdec.cache import CacheFullError, KVCache
from specdec.drafters.base import Draft, NoDrafter
from specdec.drafters.choose import HybridDrafter
from specdec.drafters.costs import take_prices
from specdec.drafters.lookup import NGramDrafter, SuffixDrafter
from specdec.drafters.model import ModelDrafter
from specdec.engine.prefix import prefill
from specdec.errors import InputError, ModelError
from specdec.loop import speculate
from specdec.lossless.black_box import check_decoder
from specdec.lossless.proof import (
    AsIs,
    ExactModel,
    Language,
    Remembering,
    distance,
    distribution_of_rounds,
    memory_of,
    target_distribution,
)
from specdec.models.protocol import WrapperLM, truncate_cache
from specdec.models.recurrent import _SNAPSHOTS, StateCache
from specdec.models.transformers import AGAIN, TransformersLM
from specdec.pair import Pair
from specdec.sampling import SamplingParams, SeededRandom

RING = "gemma3-ring"
NAMES = [*STATES, RING]


@lru_cache
def module_of(name): return random_model(OTHERS["gemma3-window"] if name == RING else STATES[name])


@lru_cache
def model_of(name): return TransformersLM(module_of(name), ring=name == RING)


CUTS = not model_of(RING).replays # whether this version of the library can keep what a window has read
only_if_cut = pytest.mark.skipif(not CUTS, reason="this version goes back to a copy of the window")


# --- There and back ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", NAMES)
def test_the_interface_with_rollbacks(name):
    model = model_of(name)
    check_interface(model, module_of(name), tokens(24))
    assert isinstance(model.new_cache(8), StateCache)
    assert model.replays == (name != "lfm2" and not (name == RING and CUTS))


@pytest.mark.parametrize("name", NAMES)
def test_back_to_anywhere(name):
    "Pieces of any length, rollbacks to any length, also beyond all that is kept, features too."
    model, choose = model_of(name), random.Random(0)
    cache, ids = model.new_cache(40), torch.zeros(2, 0, dtype=torch.long)
    for _ in range(25):
        keep = choose.randint(0, ids.shape[1]) if choose.random() < 0.5 else ids.shape[1]
        cache.rollback(keep)
        T = min(choose.randint(1, 8), 40 - keep)
        if T == 0: continue
        ids = torch.cat([ids[:, :keep], torch.randint(V, (2, T), generator=torch.Generator().manual_seed(keep))], 1)
        logits, features = model.forward(ids[:, keep:], cache, layers=(1,))
        want, states = model.forward(ids, layers=(1,))
        assert difference(logits, want[:, keep:]) <= 1e-5 and difference(features, states[:, keep:]) <= 1e-5
        assert cache.length == ids.shape[1] and cache.behind == 0


def test_keys_and_values_are_served_as_before():
    for name in ("gpt2", "gemma3-window", "mixtral"):
        model = TransformersLM(random_model(OTHERS[name]))
        assert type(model.new_cache(8)) is KVCache and not model.replays and not model.has_states


@pytest.mark.parametrize("name", ["granite-hybrid", "lfm2"])
def test_an_interrupted_forward_leaves_the_cache_as_it_was(name):
    model, ids = model_of(name), tokens(12)
    cache = model.new_cache(12)
    model.forward(ids[:, :5], cache)
    last = [layer for layer in model.model.modules() if type(layer).__name__.endswith("DecoderLayer")][-1]
    def interrupt(*_): raise KeyboardInterrupt
    hook = last.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt): model.forward(ids[:, :4], cache)
    hook.remove()
    assert cache.length == 5
    assert difference(model.forward(ids[:, 5:], cache), model.forward(ids)[:, 5:]) <= 1e-5


def test_a_full_cache_and_impossible_lengths():
    cache = model_of("mamba2").new_cache(4)
    model_of("mamba2").forward(tokens(3), cache)
    with pytest.raises(CacheFullError, match="3 positions held, 2 more asked for, room for 4"):
        model_of("mamba2").forward(tokens(2), cache)
    for wrong in (-1, 4, 1.5):
        with pytest.raises(InputError, match="roll back to"): cache.rollback(wrong)
    assert cache.length == 3


def test_copies_of_states_are_few_and_counted():
    "However long nothing is rolled back; and the first, which the next rollback may need, stays."
    model = model_of("mamba2")
    cache = model.new_cache(64)
    model.forward(tokens(3), cache)
    cache.rollback(2)
    model.forward(tokens(1), cache)
    before = cache.nbytes # of a copy of nothing, and of the states
    for token in tokens(40).split(1, 1): model.forward(token, cache)
    assert len(cache.snapshots) == _SNAPSHOTS and before > 0 and cache.snapshots[0][0] == 0
    assert before < cache.nbytes <= (_SNAPSHOTS + 1) * before


def test_windows_hold_no_more_than_their_window():
    model = model_of(RING)
    cache = model.new_cache(64)
    model.forward(tokens(50), cache)
    for _ in range(3):
        model.forward(tokens(5), cache)
        cache.rollback(cache.length - 2)
    held = {layer.keys.shape[2] for layer in cache.layers if layer is not None}
    assert held == {7} and cache.layers.count(None) == 1  # a window of 8; one layer sees everything


@pytest.mark.parametrize("name", NAMES)
def test_prompts_read_before_and_copies(name):
    model, ids = model_of(name), tokens(20)[:1]
    prompt = ids[0].tolist()
    known = prefill(model, prompt[:12])
    pair = Pair(model, NGramDrafter())
    for text in (prompt[:12], prompt, [*prompt[:5], 1, 2]):  # the same, its continuation, another end
        how = dict(max_new_tokens=12, ignore_eos=True)
        assert pair.generate(text, prefilled=known, **how).generated_ids == pair.generate(text, **how).generated_ids
    cache = model.new_cache(20)
    model.forward(ids[:, :9], cache)
    other = truncate_cache(cache, 6)
    model.forward(ids.flip(1)[:, :4], other)
    assert difference(model.forward(ids[:, 9:], cache), model.forward(ids)[:, 9:]) <= 1e-5
    changed = torch.cat([ids[:, :6], ids.flip(1)[:, :6]], 1)
    assert difference(model.forward(changed[:, 10:], other), model.forward(changed)[:, 10:]) <= 1e-5


# --- Decoding with them -----------------------------------------------------------------------------------------------

def drafters(model):
    return {"lookup": SuffixDrafter(), "n-grams": NGramDrafter(), "itself": ModelDrafter(model, V),
            "a model": ModelDrafter(TransformersLM(random_model(LlamaConfig(**SMALL))), V)}


@pytest.mark.parametrize("name", NAMES)
def test_greedy_is_the_librarys(name):
    module, model = module_of(name), model_of(name)
    prompts = [[1, 17, 42, 5, 17, 42], [3, 3, 3]]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        new = module.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30,
                              pad_token_id=0, eos_token_id=None)
        expected.append(new[0, len(prompt):].tolist())
    for drafter in drafters(model).values():
        results = Pair(model, drafter).generate(prompts, K=4, max_new_tokens=30, ignore_eos=True)  # one by one
        assert [result.generated_ids for result in results] == expected
    assert results[0].num_drafted > 0


def test_it_drafts_for_itself_without_a_rejection():
    "Also sampled: a draft model's states go back, too, and the same token is in the same state."
    for name in ("mamba2", RING):
        model = model_of(name)
        result = Pair(model, ModelDrafter(model, V)).generate([1, 2, 3], K=3, max_new_tokens=24, temperature=1, seed=1,
                                                              ignore_eos=True)
        assert result.num_accepted >= 0.95 * result.num_drafted > 10


class Wrong:
    "Drafts what is never accepted."
    layers = ()
    def start(self, *text): return self
    def propose(self, K, sampling, rng): return Draft([99] * K)
    def commit(self, tokens, features): pass


def test_what_is_read_again_stays_short():
    model, read = model_of("mamba2"), []
    hook = model.model.register_forward_pre_hook(lambda *a: read.append(a[2]["input_ids"].shape[1]), with_kwargs=True)
    def ids(drafter):
        rounds = speculate(model, drafter, [5, 6, 7], SamplingParams(), SeededRandom(0), K=2, max_new_tokens=60)
        return [token for r in rounds for token in r.emitted]
    plain, of_plain = ids(NoDrafter()), read.copy()
    read.clear()
    wrong, of_wrong = ids(Wrong()), read.copy()
    hook.remove()
    assert wrong == plain and 99 not in plain and of_plain == [3] + [1] * 59
    assert max(of_wrong) == AGAIN + 3  # and now and then there is one forward more
    assert len(of_wrong) == 60 + 59 // (AGAIN + 1)


@pytest.mark.parametrize("name", ["mamba2", "granite-hybrid", "lfm2"])
def test_inside_the_librarys_generate(name):
    from specdec import transformers_generate
    module, ids = module_of(name), torch.tensor([[1, 17, 42, 5, 17, 42]])
    how = dict(attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0,
               eos_token_id=None)
    expected = module.generate(ids, **how)
    for more in (dict(), dict(drafter=module, K=3)):
        assert torch.equal(module.generate(ids, custom_generate=transformers_generate, **how, **more), expected)
    known = transformers.DynamicCache(config=module.config)
    with pytest.raises(InputError, match="recurrent states can't be continued"):
        module.generate(ids, custom_generate=transformers_generate, **{home.cache_argument(module): known}, **how)


def test_refused_by_name():
    "By its own words; and nothing that a user asks is read."
    small = dict(vocab_size=V, hidden_size=32, num_hidden_layers=2)
    gemma = transformers.RecurrentGemmaConfig(
        **SMALL, lru_width=32, attention_window_size=8, block_types=("recurrent", "attention"))
    for config, reason in [
        (transformers.MambaConfig(**small, state_size=4), "forgets its recurrent state where it reads several tokens"),
        (transformers.JambaConfig(**SMALL, num_experts=2, attn_layer_period=2, attn_layer_offset=1,
                                  use_mamba_kernels=False), "forgets its recurrent state"),
        (transformers.RwkvConfig(**small, attention_hidden_size=32, intermediate_size=64), "keeps no keys and values"),
        (gemma, "recurrent state"),
    ]:
        module = random_model(config)
        with pytest.raises(ModelError, match=f"{type(module).__name__} can't be rolled back.*({reason})"):
            TransformersLM(module)
    with pytest.raises(InputError, match="no layers with a sliding window"):
        TransformersLM(random_model(OTHERS["gpt2"]), ring=True)
    with pytest.raises(InputError, match="ring must be True or False"):
        TransformersLM(random_model(OTHERS["gpt2"]), ring=1)


class Leaky(transformers.Mamba2ForCausalLM):
    "Remembers how often it was called, where no cache holds it."
    count = 0
    def forward(self, input_ids, cache=None, use_cache=True, output_hidden_states=False):
        output = super().forward(input_ids, **{CACHE: cache}, use_cache=use_cache)
        self.count += 1
        output.logits = output.logits + 0.1 * self.count
        return output

CACHE = home.cache_argument(transformers.Mamba2ForCausalLM(STATES["mamba2"]))


def test_a_model_that_remembers_elsewhere_is_found_out():
    "The negative control of the trial: it finds the same module right without the leak."
    module = Leaky(STATES["mamba2"])
    with pytest.raises(ModelError, match="Leaky can't be rolled back"): TransformersLM(module)
    assert TransformersLM(transformers.Mamba2ForCausalLM(STATES["mamba2"])).replays


# --- The exact distribution -------------------------------------------------------------------------------------------

class Exact(WrapperLM):
    "Its rows are probabilities in 64ths, so that rounding in its states shows in none. It keeps its last cache."
    def new_cache(self, capacity):
        self.cache = self.model.new_cache(capacity)
        return self.cache

    def forward(self, ids, cache=None, last=None, layers=()):
        row = (64 * super().forward(ids, cache, last).softmax(-1)).round()
        lacks = 64 - row.sum(-1, keepdim=True)
        return row.scatter_add(-1, row.argmax(-1, keepdim=True), lacks) / 64

    def language(self):
        "What it says after a sequence, read without a cache."
        @cache
        def row(text):
            rows = WrapperLM.forward(self, torch.tensor([[0, *text]]), last=1)
            counts = (64 * rows[0, -1].softmax(-1)).round().int().tolist()
            counts[int(np.argmax(counts))] += 64 - sum(counts)
            return np.array([Fraction(n, 64) for n in counts], dtype=object)
        return row


TINY = dict(SMALL, vocab_size=2, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, pad_token_id=None, bos_token_id=None, eos_token_id=None)
TINY_MAMBA = dict(mamba_n_heads=4, mamba_d_head=8, mamba_d_state=4, mamba_n_groups=1, mamba_chunk_size=4)


@lru_cache
def tiny(name):
    "Models with two tokens, whose states matter."
    config = {
        "mamba2": lambda: transformers.Mamba2Config(
            vocab_size=2, hidden_size=16, num_hidden_layers=1, state_size=4, num_heads=4, head_dim=8, n_groups=1,
            chunk_size=4),
        "granite-hybrid": lambda: transformers.GraniteMoeHybridConfig(
            **TINY, **TINY_MAMBA, layer_types=["mamba", "attention"], num_local_experts=2, num_experts_per_tok=1,
            shared_intermediate_size=16),
        "lfm2": lambda: transformers.Lfm2Config(**TINY, full_attn_idxs=[1]),
        RING: lambda: transformers.MistralConfig(**TINY, head_dim=8, sliding_window=3),
    }[name]()
    torch.manual_seed(int(name == RING))
    module = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in module.parameters(): parameter.add_(0.6 * torch.randn_like(parameter))
    head = module.get_output_embeddings()
    spread = 0.6 if name == RING else 0.3
    head.weight = torch.nn.Parameter(spread * torch.randn_like(head.weight), requires_grad=False)
    return TransformersLM(module, ring=name == RING)


def walked(model, drafter, K): # drafter() makes one
    "Total variation between the loop's exact distribution of K + 3 tokens and the target's, and both."
    target = Exact(model)
    p = target.language()
    def fingerprint():
        held = [] if not isinstance(target.cache, StateCache) else [
            np.round(t.float().numpy(), 3).tobytes() for layer in target.cache.layers if layer is not None
            for part in vars(layer).values() for t in (part.values() if isinstance(part, dict) else [part])
            if isinstance(t, torch.Tensor)]
        return target.cache.length, getattr(target.cache, "read", 0), tuple(held)
    def start(rng):
        drafting = Remembering(drafter())
        rounds = speculate(target, drafting, [0], AsIs(), rng, K, 2 * (K + 3), frozenset())
        return rounds, lambda: (fingerprint(), memory_of(drafting))
    expected = target_distribution(p, K + 3)
    found = distribution_of_rounds(start, K + 3)
    return distance(found, expected), found, expected


DRAFTS = {"a model": lambda: ModelDrafter(ExactModel(Language(2, "q", halves=True), 2), 2),
          "n-grams": NGramDrafter, "lookup": SuffixDrafter}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", ["mamba2", "granite-hybrid", "lfm2", RING])
def test_the_exact_distribution_is_the_targets(name, draft):
    error, _, expected = walked(tiny(name), DRAFTS[draft], 2)
    assert error == 0 and len(expected) > 8


# --- Broken on purpose ------------------------------------------------------------------------------------------------

class NotRestored(StateCache):
    "The states keep what was rejected."
    def restore(self): self.read = self.length

class RestoredLate(StateCache):
    "The copy has read one token more than it says."
    def restore(self):
        super().restore()
        self.read = max(self.read - 1, 0)

class Overwritten(StateCache):
    "Rejected tokens have taken the places of what the window still needs."
    def cut(self, length):
        rejected, window = self.read - length, self.layers[0].sliding_window
        late = [(layer.keys[:, :, -rejected:], layer.values[:, :, -rejected:]) for layer in self.layers]
        super().cut(length)
        if rejected < 2 or length < window - 1: return
        for layer, (keys, values) in zip(self.layers, late):
            n = min(rejected, window) - 1
            layer.keys = torch.cat([keys[:, :, 1:n + 1], layer.keys[:, :, n:]], 2)
            layer.values = torch.cat([values[:, :, 1:n + 1], layer.values[:, :, n:]], 2)

BROKEN = {"mamba2": [NotRestored, RestoredLate], RING: [Overwritten]}


class Breaks(WrapperLM):
    "A model with a broken cache."
    def __init__(self, model, broken):
        super().__init__(model)
        self.broken = broken
    def new_cache(self, capacity):
        return self.broken(self.model.state_layers, capacity, cuts=not self.model.replays)


@pytest.mark.parametrize("broken", [NotRestored, RestoredLate, pytest.param(Overwritten, marks=only_if_cut)])
def test_a_broken_cache_has_another_distribution(broken):
    name = next(name for name, kinds in BROKEN.items() if broken in kinds)
    error, found, expected = walked(Breaks(tiny(name), broken), DRAFTS["a model"], 2)
    assert 0.2 < error < 1
    # the target may write each of its texts (the ring's rows have zeros, by rounding)
    assert found.keys() <= expected.keys() or name == RING


def sampler(model, K=2):
    def generate(prompt, n, seed):
        rounds = speculate(model, ModelDrafter(ExactModel(Language(2, "q", halves=True), 2), 2), prompt,
                           SamplingParams(1.0), SeededRandom(seed), K, n)
        return [token for r in rounds for token in r.emitted][:n]
    return generate


@pytest.mark.parametrize("broken, name", [
    pytest.param(StateCache, "mamba2", marks=pytest.mark.slow), (NotRestored, "mamba2"), (RestoredLate, "mamba2"),
    pytest.param(Overwritten, RING, marks=only_if_cut),
])
def test_samples_tell_a_broken_cache(broken, name):
    "With as many as the page counts, and the right one passes."
    target = Breaks(tiny(name), broken)
    report = check_decoder(sampler(target), target, [0], length=5, width=1, samples=900, distance=.15, progress=False)
    assert report.rejected == (broken is not StateCache)


# --- What it costs ----------------------------------------------------------------------------------------------------

def test_reading_again_is_part_of_what_a_draft_costs(monkeypatch):
    "Rounds with a draft pay for what the one before left to be read again, and plain steps don't."
    target, clock = model_of("mamba2"), [0.0]
    real = target.forward
    def slow(ids, cache=None, **more):
        clock[0] += ids.shape[-1]
        return real(ids, cache, **more)
    monkeypatch.setattr(target, "forward", slow)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    prices = take_prices(target, HybridDrafter(NGramDrafter()), False)
    assert target.replays and prices.forwards[1] == 1 and prices.forwards[3] >= 3

