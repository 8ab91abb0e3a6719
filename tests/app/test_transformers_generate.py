"""Our loop inside `generate` of transformers: what it emits is the library's, and what it can't serve it says."""
import copy
import warnings
from collections import deque
from functools import partial, wraps

import pytest
import torch
import transformers
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
)
from transformers.generation import CandidateGenerator
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator

import specdec
import specdec.app.generate as home
from families import FAMILIES, OTHERS, SMALL, V, random_model
from specdec.app.generate import CandidateDrafter, CandidateState, drafter_of, process, remembers
from specdec.drafters.base import NoDrafter
from specdec.drafters.lookup import NGramDrafter, SuffixDrafter
from specdec.errors import InputError, ModelError
from specdec.lossless.enumerate import exact_distribution
from specdec.models.transformers import TransformersLM, cache_argument
from specdec.sampling import SamplingParams, SeededRandom

OURS = specdec.transformers_generate
PROMPT = torch.tensor([[1, 17, 42, 5, 17, 42]])


@pytest.fixture(scope="module")
def llama():
    module = random_model(LlamaConfig(**SMALL | dict(eos_token_id=None)))
    TransformersLM(module)  # it is tried once: what a test counts are forwards over a prompt
    return module


@pytest.fixture(scope="module")
def draft(): return random_model(LlamaConfig(**SMALL | dict(num_hidden_layers=1, eos_token_id=None)))


def settings(ids=PROMPT, **others):
    return dict(attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0) | others


def generate(model, ids=PROMPT, ours=OURS, **others):
    return model.generate(ids, **settings(ids, **others), **(dict(custom_generate=ours) if ours else {}))


def reads(model, run):
    "What `run` returns, and how often the model ran."
    seen = []
    hook = model.register_forward_pre_hook(lambda *_: seen.append(1))
    try: return run(), len(seen)
    finally: hook.remove()


# --- greedy: the library's own

@pytest.mark.parametrize("name", ["tinyllama", "qwen3", "phi3", "mistral-window", *OTHERS])
def test_greedy_is_the_librarys(name):
    model = random_model((FAMILIES | OTHERS)[name])
    model.generation_config.eos_token_id = None
    whole = generate(model, ours=None)
    model.generation_config.eos_token_id = whole[0, 6 + 9].item()
    expected = generate(model, ours=None)
    assert expected.shape[1] <= 16 and torch.equal(generate(model), expected)
    assert torch.equal(generate(model, drafter=model, K=3), expected)


PROCESSED = [
    dict(repetition_penalty=1.4), dict(no_repeat_ngram_size=2), dict(min_new_tokens=12),
    dict(bad_words_ids=[[8], [9, 3]]), dict(suppress_tokens=[4, 5]), dict(sequence_bias=[[[7, 3], 4.0]]),
    dict(forced_eos_token_id=2), dict(exponential_decay_length_penalty=(3, 1.5)), dict(encoder_repetition_penalty=1.5),
    dict(prefix_allowed_tokens_fn=lambda row, ids: [(int(ids[-1]) * 7 + k) % V for k in range(5)]),
    dict(repetition_penalty=1.3, no_repeat_ngram_size=3, min_new_tokens=6),
]


@pytest.mark.parametrize("how", PROCESSED, ids=lambda how: "+".join(how))
def test_processors_at_every_draft_position(llama, draft, how):
    how = dict(eos_token_id=2) | how
    expected = generate(llama, ours=None, **how)
    for drafter in (None, llama, draft):
        assert torch.equal(generate(llama, drafter=drafter, **how), expected)


def test_a_processor_that_is_told_the_wrong_text_is_seen(llama, monkeypatch):
    "The negative control."
    def blind(processors, text, rows, row=0, count=1):
        before = text[:, :text.shape[1] - len(rows) + 1].expand(len(rows), -1)
        for processor in processors: rows = processor(before, rows)
        return rows
    expected = generate(llama, ours=None, no_repeat_ngram_size=2)
    monkeypatch.setattr(home, "process", blind)
    assert not torch.equal(generate(llama, drafter=llama, no_repeat_ngram_size=2), expected)


def test_drafts_save_forwards(llama):
    plain, steps = reads(llama, lambda: generate(llama, drafter=NoDrafter()))
    same, fewer = reads(llama, lambda: generate(llama, prompt_lookup_num_tokens=7, max_matching_ngram_size=2))
    assert torch.equal(plain, same) and steps == 24 and fewer <= 24
    twin = TransformersLM(copy.deepcopy(llama))
    _, rounds = reads(llama, lambda: generate(llama, drafter=twin, K=4))
    assert rounds == 1 + 5  # 23 tokens after the first, up to five a round


def test_a_batch_with_padding_on_the_left(llama):
    prompts = [[1, 17, 42, 5, 17, 42], [9, 8], [4, 4, 4, 4]]
    ids = torch.tensor([[0] * (6 - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (6 - len(p)) + [1] * len(p) for p in prompts])
    end = generate(llama, ids, ours=None, attention_mask=mask)[1, 6 + 4].item()
    for how in (dict(), dict(repetition_penalty=1.3),
                dict(prefix_allowed_tokens_fn=lambda row, ids: [(int(ids[-1]) * 7 + row + k) % V for k in range(9)])):
        how |= dict(attention_mask=mask, eos_token_id=end)
        expected = generate(llama, ids, ours=None, **how)
        assert torch.equal(generate(llama, ids, **how), expected)
        assert torch.equal(generate(llama, ids, drafter=llama, **how), expected)
    hole = mask.clone()
    hole[0, 2] = 0
    for kind in (torch.int64, torch.bool, torch.float32):
        assert torch.equal(generate(llama, ids, attention_mask=mask.to(kind)),
                           generate(llama, ids, attention_mask=mask))
        for wrong in (mask.flip(1), hole):
            with pytest.raises(InputError, match="on the left"):
                generate(llama, ids, attention_mask=wrong.to(kind))


def batch(*prompts):
    "Ids and mask, padded on the left."
    width = max(map(len, prompts))
    return (torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
            torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]))


TEXTS = [1, 17, 42, 5, 17, 42], [9, 8], [4, 4, 4, 4]


@pytest.mark.parametrize("drafter", [None, "the target", "another"])
def test_a_batch_shares_forwards(drafter, llama, draft):
    "As many rounds as its longest sequence has, and a forward for each prompt; each text is the library's."
    ids, mask = batch(*TEXTS)
    how = dict(drafter={"the target": llama, "another": draft}.get(drafter, drafter), K=4)
    generate(llama, ids, attention_mask=mask)  # tried once
    def forwards(ids, mask):
        seen, inner = [], llama.forward
        @wraps(inner)
        def watched(*args, **named):
            if named["input_ids"].shape[1] > 1 or drafter is None: seen.append(len(named["input_ids"]))
            return inner(*args, **named)
        llama.forward = watched
        try: return generate(llama, ids, attention_mask=mask, **how), seen
        finally: del llama.forward
    if drafter == "the target": how["drafter"] = copy.deepcopy(llama)  # whose forwards aren't counted
    found, together = forwards(ids, mask)
    assert torch.equal(found, generate(llama, ids, ours=None, attention_mask=mask))
    alone = [forwards(*batch(text))[1] for text in TEXTS]
    assert together[:3] == [1, 1, 1] and set(together[3:]) <= {1, 2, 3} and 3 in together
    assert len(together) <= max(map(len, alone)) + 2 < sum(map(len, alone))


@pytest.mark.parametrize("name", ["tinyllama", "qwen3", "phi3", "gpt2", "mistral-window"])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_sequence_is_the_same_in_any_company(name, sampled, monkeypatch):
    "Together, one after another: the same tokens, greedy and drawn. A window is read alone."
    model, (ids, mask) = random_model((FAMILIES | OTHERS)[name]), batch(*TEXTS)
    model.generation_config.eos_token_id = None
    how = dict(attention_mask=mask, drafter=model, K=3) | (dict(SAMPLED, max_new_tokens=12) if sampled else {})
    assert home.reads_together(TransformersLM(model)) is (name != "mistral-window")
    torch.manual_seed(3)
    together = generate(model, ids, **how)
    monkeypatch.setattr(home, "reads_together", lambda target: False)
    torch.manual_seed(3)
    assert torch.equal(generate(model, ids, **how), together)


def test_sequences_of_a_batch_end_by_themselves(llama):
    "At an end of the text, or where a criterion says so; the others go on, and the rest is padding."
    ids, mask = batch(*TEXTS)
    end = generate(llama, ids, ours=None, attention_mask=mask)[1, 6 + 4].item()
    how = dict(attention_mask=mask, eos_token_id=end)
    found = generate(llama, ids, drafter=llama, **how)
    assert torch.equal(found, generate(llama, ids, ours=None, **how)) and (found[:, 6:] == end).any(1).sum() >= 1
    def short(ids, scores, **named): return torch.full((len(ids),), bool(ids.shape[1] > 6 + 3 + (ids[0, 0] == 0)))
    stop = dict(attention_mask=mask, stopping_criteria=StoppingCriteriaList([short]))
    assert (generate(llama, ids, **stop)[:, 6:] != 0).sum(1).tolist() == [4, 5, 5]


@pytest.mark.parametrize("change", ["a mask that is left out", "positions that are left out"])
def test_a_module_that_reads_a_batch_otherwise_reads_alone(change, llama):
    "It is tried on two texts before a batch is trusted to it."
    odd, name = copy.deepcopy(llama), "attention_mask" if "mask" in change else "position_ids"
    inner = odd.forward
    @wraps(inner)
    def forward(input_ids=None, attention_mask=None, position_ids=None, **named):
        given = dict(attention_mask=attention_mask, position_ids=position_ids) | {name: None}
        return inner(input_ids=input_ids, **given, **named)
    odd.forward = forward
    assert home.reads_together(TransformersLM(llama)) and not home.reads_together(TransformersLM(odd))
    ids, mask = batch(*TEXTS)
    assert torch.equal(generate(odd, ids, attention_mask=mask), generate(llama, ids, attention_mask=mask))


def test_a_module_that_is_trained_is_in_training_afterwards(draft):
    "Each part as it was: one may be frozen. Also after an error, and the module that drafts."
    trained, drafts = copy.deepcopy(draft).train(), copy.deepcopy(draft).train()
    trained.model.norm.eval()
    before = [part.training for part in trained.modules()]
    assert torch.equal(generate(trained, drafter=drafts), generate(draft, ours=None))
    with pytest.raises(InputError): generate(trained, drafter=drafts, K=0)
    assert [part.training for part in trained.modules()] == before and not all(before)
    assert all(part.training for part in drafts.modules())


# --- where it ends

class After:
    "Ends a sequence once it holds a token often enough; remembers how often it was asked."
    def __init__(self, token, times): self.token, self.times, self.asked = token, times, 0
    def __call__(self, ids, scores, **kwargs):
        self.asked += 1
        return (ids == self.token).sum(-1) >= self.times


def test_stopping_criteria_end_inside_a_round(llama):
    whole = generate(llama, ours=None)[0]
    token, times = whole[6 + 10].item(), (whole[:6 + 11] == whole[6 + 10]).sum().item()
    found = {}
    for ours in (None, OURS):
        criterion = After(token, times)
        found[ours] = generate(llama, ours=ours, stopping_criteria=StoppingCriteriaList([criterion]),
                               **(dict(drafter=llama, K=8) if ours else {}))
        assert criterion.asked == 11
    assert torch.equal(found[None], found[OURS]) and found[OURS].shape[1] == 6 + 11


def test_stop_strings_by_a_criterion(llama):
    class Letters:
        "A tokenizer of one character a token, as far as the criterion looks at it."
        def __call__(self, text, **how): return {"input_ids": [ord(letter) for letter in text]}
        def _convert_id_to_token(self, i): return chr(i)
        def get_vocab(self): return {chr(300 + i): i for i in range(V)}
        def convert_tokens_to_string(self, tokens): return "".join(tokens)
        def convert_ids_to_tokens(self, ids): return [chr(300 + i) for i in ids]
    whole = generate(llama, ours=None)[0]
    words = "".join(chr(300 + i) for i in whole[6 + 7:6 + 9].tolist())
    with pytest.raises(ValueError, match="tokenizer"): generate(llama, stop_strings=words, tokenizer=Letters())
    found = {}
    for ours in (None, OURS):
        stops = StoppingCriteriaList([StopStringCriteria(Letters(), words)])
        found[ours] = generate(llama, ours=ours, stopping_criteria=stops)
    assert torch.equal(found[None], found[OURS]) and found[OURS].shape[1] < 30


def test_a_text_ends_where_positions_end():
    model = random_model(OTHERS["gpt2"])
    model.generation_config.eos_token_id = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert generate(model, max_new_tokens=100).shape == (1, 64)


# --- what comes back

def test_an_output_where_asked(llama):
    how = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, repetition_penalty=1.3)
    theirs, ours = generate(llama, ours=None, **how), generate(llama, drafter=llama, **how)
    assert type(ours) is type(theirs) and list(ours) == list(theirs) and torch.equal(ours.sequences, theirs.sequences)
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(theirs[name]) == 24
        for a, b in zip(ours[name], theirs[name]): assert a.shape == (1, V) and torch.allclose(a, b, atol=1e-4)
    held = [output["cache" if "cache" in output else "past_key_values"] for output in (theirs, ours)]
    assert [cache.get_seq_length() for cache in held] == [29, 29]
    for a, b in zip(held[0].layers, held[1].layers):
        assert torch.allclose(a.keys, b.keys, atol=1e-5) and torch.allclose(a.values, b.values, atol=1e-5)
    assert generate(llama, return_dict_in_generate=True).scores is None


def test_a_cache_is_continued_and_extended(llama):
    first = {ours: DynamicCache(config=llama.config) for ours in (None, OURS)}
    texts = {}
    for ours, cache in first.items():
        past = {cache_argument(llama): cache}
        text = generate(llama, ours=ours, max_new_tokens=8, **past)
        assert cache.get_seq_length() == 13
        more = torch.cat([text, torch.tensor([[3, 17, 42]])], 1)
        texts[ours] = generate(llama, more, ours=ours, max_new_tokens=8, **past)
        assert cache.get_seq_length() == 24
    assert torch.equal(texts[None], texts[OURS]) and torch.equal(texts[None], generate(llama, more, max_new_tokens=8))
    for a, b in zip(first[None].layers, first[OURS].layers): assert torch.allclose(a.keys, b.keys, atol=1e-5)


def test_a_cached_prompt_is_not_read_again(llama):
    cache, seen = DynamicCache(config=llama.config), []
    past = {cache_argument(llama): cache}
    text = generate(llama, max_new_tokens=8, **past)
    def note(module, args, kwargs): seen.append(kwargs["input_ids"].shape[1])
    hook = llama.register_forward_pre_hook(note, with_kwargs=True)
    generate(llama, torch.cat([text, torch.tensor([[3]])], 1), drafter=NoDrafter(), max_new_tokens=3, **past)
    hook.remove()
    assert seen == [2, 1, 1]


def test_a_static_cache_is_continued_and_extended(llama):
    plain = generate(llama, ours=None, max_new_tokens=8)
    assert torch.equal(generate(llama, cache_implementation="static", max_new_tokens=8), plain)
    held = generate(llama, cache_implementation="static", max_new_tokens=8, return_dict_in_generate=True)
    assert torch.equal(held.sequences, plain) and getattr(held, cache_argument(llama)).get_seq_length() == 13
    cache = StaticCache(config=llama.config, max_cache_len=30)
    past = {cache_argument(llama): cache}
    more = torch.cat([generate(llama, max_new_tokens=8, **past), torch.tensor([[3, 17, 42]])], 1)
    assert int(cache.get_seq_length()) == 13
    text = generate(llama, more, max_new_tokens=8, **past)
    assert torch.equal(text, generate(llama, more, ours=None, max_new_tokens=8)) and int(cache.get_seq_length()) == 24
    whole = DynamicCache(config=llama.config)
    llama(text[:, :24], **{cache_argument(llama): whole})
    for a, b in zip(cache.layers, whole.layers): assert torch.allclose(a.keys[:, :, :24], b.keys, atol=1e-5)
    with pytest.raises(InputError, match="has room for 30 tokens, and 32 may be written"):
        generate(llama, text, max_new_tokens=8, **past)


def test_a_static_cache_of_windows():
    "The library's own is left alone; one that is handed in can't be rolled back."
    model = random_model(OTHERS["gemma3-window"])
    plain = generate(model, ours=None, max_new_tokens=20)
    assert torch.equal(generate(model, cache_implementation="static", max_new_tokens=20), plain)
    past = {cache_argument(model): StaticCache(config=model.config, max_cache_len=40)}
    with pytest.raises(InputError, match="StaticCache with layers .*StaticSlidingWindowLayer can't be rolled"):
        generate(model, **past)


@pytest.mark.parametrize("how, match", [
    (dict(ids=PROMPT[:, :3]), "holds 13 tokens, and there are 3"),
    (dict(ids=PROMPT.repeat(2, 1)), "with a batch or with padding"),
])
def test_a_cache_that_cannot_be_continued(llama, how, match):
    cache = DynamicCache(config=llama.config)
    past = {cache_argument(llama): cache}
    generate(llama, max_new_tokens=8, **past)
    with pytest.raises(InputError, match=match):
        OURS(llama, logits_processor=LogitsProcessorList(), stopping_criteria=StoppingCriteriaList(),
             generation_config=GenerationConfig(max_length=30), input_ids=how["ids"], **past)


class Collect:
    def __init__(self): self.pieces, self.ended = [], 0
    def put(self, ids): self.pieces.append(ids.flatten().tolist())
    def end(self): self.ended += 1


def test_a_bound_streamer_gets_prompt_and_tokens_and_is_ended(llama):
    streamer = Collect()
    out = generate(llama, ours=partial(OURS, streamer=streamer, drafter=llama, K=3))
    assert streamer.pieces[0] == PROMPT[0].tolist() and sum(streamer.pieces, []) == out[0].tolist()
    assert streamer.ended == 1 and max(map(len, streamer.pieces[1:])) == 4
    with pytest.raises(InputError, match="single prompt"):
        generate(llama, PROMPT.repeat(2, 1), ours=partial(OURS, streamer=Collect()))


def test_a_streamer_is_ended_when_decoding_fails(llama):
    class Fails(NoDrafter):
        def propose(self, *args): raise RuntimeError("out of luck")
    streamer = Collect()
    with pytest.raises(RuntimeError, match="out of luck"):
        generate(llama, ours=partial(OURS, streamer=streamer, drafter=Fails()))
    assert streamer.ended == 1


def test_a_streamer_of_the_library(llama):
    class Words:
        def decode(self, ids, **how): return "".join(f"{i} " for i in ids)
    streamer = TextIteratorStreamer(Words(), skip_prompt=True, timeout=5)
    out = generate(llama, ours=partial(OURS, streamer=streamer))
    assert "".join(streamer).split() == [str(i) for i in out[0, 6:].tolist()]


def test_what_generate_keeps_to_itself_is_refused(llama, draft):
    "Why a streamer is bound: the library doesn't hand it on, nor an assistant. A setting is never ignored."
    streamer = Collect()
    with pytest.raises(InputError, match="keeps its streamer.*bind it"): generate(llama, streamer=streamer)
    assert streamer.pieces == [PROMPT[0].tolist()] and streamer.ended == 1  # a thread that waits for it goes on
    with pytest.raises(InputError, match="assistant_model.*give the assistant as drafter"):
        generate(llama, assistant_model=draft)


# --- a folder with custom_generate/generate.py, the library's own format

@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text("from specdec import transformers_generate as generate\n")
    return dict(custom_generate=str(tmp_path), trust_remote_code=True)


def test_a_folder_that_holds_our_function(llama, draft, folder):
    streamer = Collect()
    for how in (dict(), dict(K=2), dict(assistant_model=draft), dict(drafter=draft), dict(streamer=streamer),
                dict(repetition_penalty=1.4), dict(generation_config=GenerationConfig(max_new_tokens=5))):
        theirs = {k: v for k, v in how.items() if k not in ("K", "drafter", "assistant_model", "streamer")}
        expected = llama.generate(PROMPT, **settings() | theirs)
        assert torch.equal(llama.generate(PROMPT, **settings() | how, **folder), expected)
        assert torch.equal(llama.generate(input_ids=PROMPT, **settings() | how, **folder), expected)
    assert streamer.ended == 2 and streamer.pieces.count(PROMPT[0].tolist()) == 2
    twin = copy.deepcopy(llama)
    _, count = reads(llama, lambda: llama.generate(PROMPT, **settings(), **folder, assistant_model=twin))
    assert count == 1 + 4  # its own tokens are right: the assistant drafts, five and one a round
    with pytest.raises(InputError, match="assistant_model and drafter both"):
        llama.generate(PROMPT, **settings(), **folder, assistant_model=draft, drafter=draft)
    with pytest.raises(InputError, match="called by generate"): OURS(llama, PROMPT)


# --- sampling: the exact distribution

@pytest.fixture(scope="module")
def small():
    "A target and a draft of four tokens, far from uniform and from each other."
    torch.manual_seed(3)
    shape = dict(SMALL, vocab_size=4, hidden_size=16, num_hidden_layers=1, eos_token_id=None, initializer_range=0.8)
    return [transformers.LlamaForCausalLM(LlamaConfig(**shape)).eval().requires_grad_(False) for _ in range(2)]


SAMPLED = dict(do_sample=True, temperature=0.8, top_k=3, repetition_penalty=1.6, max_new_tokens=3)
SHORT = torch.tensor([[1, 2, 1]])


def of_the_library(model, **how):
    "The probability of each text, by the library's processors and the bare module."
    given = []
    def keep(model, input_ids, logits_processor, **others): given.extend(logits_processor)
    generate(model, SHORT, ours=keep, **how)
    found = {(): 1.0}
    for _ in range(how["max_new_tokens"]):
        grown = {}
        for text, probability in found.items():
            ids = torch.cat([SHORT, torch.tensor([text], dtype=torch.long)], 1)
            logits = LogitsProcessorList(given)(ids, model(ids, use_cache=False).logits[:, -1].float())
            for token, p in enumerate(logits.double().softmax(-1)[0].tolist()):
                if p: grown[(*text, token)] = probability * p
        found = grown
    return found


def of_ours(monkeypatch, model, make, **how):
    "The exact distribution of what the function returns: every branch of its draws is walked."
    def program(rng):
        monkeypatch.setattr(home, "SeededRandom", lambda seed: rng)
        return tuple(generate(model, SHORT, drafter=make(), K=2, **how)[0, 3:].tolist())
    return exact_distribution(program)


def total_variation(a, b): return sum(abs(float(a.get(t, 0)) - float(b.get(t, 0))) for t in {*a, *b}) / 2


class Liar(CandidateGenerator):
    "Proposes the draft's likeliest tokens, and says that they were drawn from its logits."
    def __init__(self, model): self.model = model
    def get_candidates(self, input_ids):
        rows = []
        for _ in range(2):
            rows.append(self.model(input_ids, use_cache=False).logits[:, -1])
            input_ids = torch.cat([input_ids, rows[-1].argmax(-1, keepdim=True)], 1)
        return input_ids, torch.stack(rows, 1)
    def update_candidate_strategy(self, input_ids, scores, num_matches): pass


@pytest.mark.parametrize("kind", ["lookup", "model", "untrue q"])
def test_the_exact_distribution_is_the_librarys(small, monkeypatch, kind):
    model, draft = small
    make = {"lookup": lambda: None, "model": lambda: draft, "untrue q": lambda: Liar(draft)}[kind]
    found = of_ours(monkeypatch, model, make, **SAMPLED)
    assert sum(found.values()) == 1 and total_variation(found, of_the_library(model, **SAMPLED)) < 1e-5


def test_a_blind_processor_and_an_untrue_q_change_the_distribution(small, monkeypatch):
    "The negative controls: each mistake moves more than a thousand times what is allowed."
    model, draft = small
    expected = of_the_library(model, **SAMPLED)
    with monkeypatch.context() as patch:
        patch.setattr(home, "process", lambda processors, text, rows, row=0, count=1: process(
            processors, text, rows[:1].clone(), row, count) if len(rows) == 1 else torch.cat([
                process(processors, text[:, :text.shape[1] - len(rows) + 1], r[None].clone()) for r in rows]))
        assert total_variation(of_ours(monkeypatch, model, lambda: draft, **SAMPLED), expected) > 0.01
    class Believing(CandidateState):
        def __init__(self, *args):
            super().__init__(*args)
            self.has_q = True
    with monkeypatch.context() as patch:
        patch.setattr(home, "CandidateState", Believing)
        assert total_variation(of_ours(monkeypatch, model, lambda: Liar(draft), **SAMPLED), expected) > 0.01


def test_torchs_seed_repeats_a_sample_and_greedy_leaves_it_alone(llama):
    def run(seed):
        torch.manual_seed(seed)
        return generate(llama, do_sample=True, top_k=0)
    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))
    before = torch.get_rng_state()
    generate(llama)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_draft_samples_as_the_processors_say(llama):
    asked = []
    class Listens(NoDrafter):
        def propose(self, K, sampling, rng):
            asked.append(sampling)
            return super().propose(K, sampling, rng)
    generate(llama, drafter=Listens(), do_sample=True, temperature=0.6, top_k=7, top_p=0.9, max_new_tokens=4)
    assert set(asked) == {SamplingParams(0.6, 7, 0.9)}


# --- a candidate generator of theirs

def assisted(draft, **how):
    config = GenerationConfig(max_length=40, eos_token_id=None, pad_token_id=0, **how)
    config.update(**config._get_default_generation_params(), defaults_only=True)
    config.min_length = 0
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.assistant_confidence_threshold = 0.0
    given = {"attention_mask": torch.ones_like(PROMPT)}
    return AssistedCandidateGenerator(PROMPT, draft, config, given)


def test_candidate_generators_draft(llama, draft):
    expected = generate(llama, ours=None)
    for generator in (assisted(copy.deepcopy(llama)), assisted(copy.deepcopy(draft)),
                      PromptLookupCandidateGenerator(max_length=40), Liar(draft)):
        assert torch.equal(generate(llama, drafter=generator), expected)
    twin = assisted(copy.deepcopy(llama))
    _, count = reads(llama, lambda: generate(llama, drafter=twin))
    assert count == 1 + 5  # its own tokens are right: 23 tokens after the first, five a round
    with pytest.raises(InputError, match="one sequence it was made for"):
        generate(llama, PROMPT.repeat(2, 1), drafter=PromptLookupCandidateGenerator())


@pytest.mark.parametrize("schedule", ["heuristic", "constant"])
@pytest.mark.parametrize("lengths", [dict(), dict(max_length=10), dict(max_new_tokens=24), dict(max_length=99)],
                         ids=str)
def test_an_assistant_needs_no_lengths_of_its_own(llama, draft, schedule, lengths):
    "The library fills them in inside `generate`; one that was made outside has none, or others."
    assistant = copy.deepcopy(draft)
    assistant.generation_config.num_assistant_tokens_schedule = schedule
    config = GenerationConfig(eos_token_id=None, pad_token_id=0, **lengths)
    generator = AssistedCandidateGenerator(PROMPT, assistant, config, {"attention_mask": torch.ones_like(PROMPT)})
    assert torch.equal(generate(llama, drafter=generator), generate(llama, ours=None))


@pytest.mark.parametrize("lookup", [NGramDrafter, SuffixDrafter])
def test_a_lookup_drafts_nothing_behind_an_end(llama, lookup):
    "What followed an end of the prompt belongs to another text; the cut draft has the end itself."
    state = drafter_of(lookup(), TransformersLM(llama)).start([5, 6, 7, 2, 8, 9, 5, 6], None, 40, {2})
    assert state.propose(5, SamplingParams(), SeededRandom(0)).tokens == [7, 2]


class Doubles(AssistedCandidateGenerator):
    def get_candidates(self, input_ids, **others):
        ids, logits = super().get_candidates(input_ids, **others)
        return ids, 2 * logits


@pytest.mark.parametrize("top_k", [0, 5])
def test_q_of_an_assistant_is_what_it_draws_from(draft, monkeypatch, top_k):
    "By the weights that the library hands to torch.multinomial; the negative control doubles its logits."
    drawn, real = [], torch.multinomial
    def multinomial(weights, *args, **how):
        drawn.append(weights[0].clone())
        return real(weights, *args, **how)
    monkeypatch.setattr(torch, "multinomial", multinomial)
    generator = assisted(copy.deepcopy(draft), do_sample=True, temperature=0.7, top_k=top_k)
    state = CandidateState(generator, PROMPT[0].tolist(), torch.device("cpu"))
    assert state.has_q
    found = state.propose(3, SamplingParams(1.0), SeededRandom(0))
    assert len(found.tokens) == 3 and len(drawn) == 4 and found.q.shape == (3, V)
    torch.testing.assert_close(found.q, torch.stack(drawn[:3]), atol=1e-6, rtol=1e-4)
    assert (found.q[range(3), found.tokens] > 0).all() and ((found.q > 0).sum(-1) == (top_k or V)).all()
    drawn.clear()
    generator.__class__ = Doubles
    q = CandidateState.propose(state, 3, SamplingParams(1.0), SeededRandom(0)).q
    assert (q - torch.stack(drawn[:3])).abs().max() > 0.01


def test_q_is_taken_only_where_it_is_known_to_be_true(draft):
    device = torch.device("cpu")
    for generator in (Liar(draft), assisted(copy.deepcopy(draft), do_sample=False)):
        state = CandidateState(generator, PROMPT[0].tolist(), device)
        assert not state.has_q and state.propose(2, SamplingParams(1.0), SeededRandom(0)).q is None
    sampling = assisted(copy.deepcopy(draft), do_sample=True)
    sampling.__class__ = Doubles  # a class of somebody else's
    assert not CandidateState(sampling, [1], device).has_q
    class Needs(Liar): requires_model_outputs = True
    with pytest.raises(InputError, match="Needs drafts from the target's outputs"):
        CandidateDrafter(Needs(draft), device)


# --- what is refused

class Counter:
    def __init__(self): self.calls = 0
    def __call__(self, ids, logits):
        self.calls += 1
        return logits


class Recent:
    def __init__(self): self.seen = deque(maxlen=3)
    def __call__(self, ids, logits):
        self.seen.append(int(ids[0, -1]))
        return logits


def closed():
    calls = []
    def counting(ids, logits):
        calls.append(1)
        return logits
    return counting


class Prepares:
    "Sets something up in its first call; that is no memory."
    def __init__(self): self.ready, self.weights = False, None
    def __call__(self, ids, logits):
        if not self.ready: self.ready, self.weights = True, torch.arange(logits.shape[-1]) / 50
        return logits + self.weights + (ids[:, -1:] == 3)


@pytest.mark.parametrize("make, name", [(Counter, "Counter"), (Recent, "Recent"), (closed, "counting")])
def test_a_processor_that_remembers_is_refused_by_name(llama, make, name):
    def refused():
        with pytest.raises(InputError, match=f"logits processor {name} remembers"):
            generate(llama, logits_processor=LogitsProcessorList([make()]))
    assert reads(llama, refused)[1] == 0


def test_a_processor_that_sets_itself_up_is_not_refused(llama):
    how = [dict(logits_processor=LogitsProcessorList([Prepares()])) for _ in range(2)]
    assert torch.equal(generate(llama, drafter=llama, **how[0]), generate(llama, ours=None, **how[1]))
    assert not remembers(lambda ids, logits: logits + 1, PROMPT, V) and remembers(Counter(), PROMPT, V)


@pytest.mark.parametrize("how, match", [
    (dict(num_beams=2), "num_beams=2"),
    (dict(num_return_sequences=2, do_sample=True), "num_return_sequences=2"),
    (dict(penalty_alpha=0.6, top_k=4), "contrastive search"),
    (dict(assistant_early_exit=1), "assisted generation"),
    (dict(output_attentions=True, return_dict_in_generate=True), "output_attentions"),
    (dict(output_hidden_states=True, return_dict_in_generate=True), "output_hidden_states"),
    (dict(guidance_scale=1.5), "UnbatchedClassifierFreeGuidanceLogitsProcessor remembers"),
    (dict(watermarking_config=transformers.SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=2), do_sample=True),
     "SynthIDTextWatermarkLogitsProcessor remembers"),
    (dict(K=0), "K, the number of draft tokens"),
    (dict(drafter="smollm2"), "drafter must be a drafter of specdec.*not 'smollm2'"),
    (dict(position_ids=torch.tensor([[0, 1, 2, 4, 5, 6]])), "position_ids must count from 0"),
    (dict(inputs_embeds=torch.zeros(1, 6, 32)), "inputs_embeds"),
], ids=lambda value: "" if isinstance(value, str) else "+".join(value))
def test_what_cannot_be_served_is_refused_by_name(llama, how, match):
    def refused():
        with pytest.raises(InputError, match=match): generate(llama, **how)
    assert reads(llama, refused)[1] == 0


def test_models_that_cannot_be_served_are_refused():
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=V, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0))
    with pytest.raises(InputError, match="T5ForConditionalGeneration is an encoder-decoder"): generate(t5)
    mamba = random_model(transformers.MambaConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2, state_size=4))
    with pytest.raises(ModelError, match="can't be rolled back"):
        OURS(mamba, PROMPT, LogitsProcessorList(), StoppingCriteriaList(), GenerationConfig(max_length=9))


def test_import_specdec_stays_light():
    assert specdec.transformers_generate is home.transformers_generate and "transformers_generate" in specdec.__all__
