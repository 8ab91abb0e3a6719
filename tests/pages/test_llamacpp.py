"""GGUF files that the real engine loads: weights of several families, the tokenizer, and our head beside its target.
Without the package `xllamacpp` only what is said then is tested."""
import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from families import FAMILIES, random_model
from specdec.bench import methods as e
from specdec.drafters.head import Head, head_config, load_head, save_head
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.load import shipped
from specdec.errors import InputError, ModelError
from specdec.models.convert import cuts
from specdec.models.gguf import check_head, cut_of, export_gguf, export_head, original_gguf
from specdec.models.hub import encode, fetch, find_model, load_tokenizer, prompts
from specdec.models.loading import load, load_model
from specdec.sampling import SamplingParams, SeededRandom

HERE = e.llamacpp_missing() is None
real = pytest.mark.skipif(not HERE, reason=str(e.llamacpp_missing()))
CPU = torch.device("cpu")
WORDS = 300  # tokens of the small tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    "Byte-level BPE with few merges, so that a file is written in no time."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>"]
    texts = [p.text for p in prompts()[:15]] + ["12345 it's"] * 500  # digits are worth a token of their own
    backend.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=WORDS - 2, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>", additional_special_tokens=["<|user|>"],
        chat_template="{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}<|end|>")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    "The engine's threads wait for each other by spinning, which takes minutes where another process has a core."
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stored(config, folder, tokenizer):
    "A random model of that kind with the small tokenizer, which leaves two of its tokens unused."
    sizes = dict(hidden_size=64, intermediate_size=96, vocab_size=WORDS, head_dim=16)
    random_model(type(config).from_dict(config.to_dict() | sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


KINDS = {  # name → what the engine gets wrong otherwise
    "llama3": "stretched rotary frequencies", "linear": "stretched evenly", "smollm2-tied": "tied embeddings",
    "attention-bias": "biases, whose rows move too", "mistral": "another name for llama", "qwen2": "rows as they are",
    "qwen3": "norms of queries and keys",
}


@real
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_says_what_we_say(tmp_path, tokenizer, kind):
    folder = stored(FAMILIES[kind], tmp_path / kind, tokenizer)
    ours = load_model(folder, CPU, torch.float32)
    engine = e.LlamaCpp(export_gguf(folder, tmp_path / "m.gguf", "float32"), context=128)
    ids = torch.randint(20, WORDS - 2, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    made = engine.generate(ids, 16).ids
    engine.close()
    parting = e.parting(ours, ids, made)
    assert len(made) == 16 and (parting is None or parting.gap < 1e-2), parting


@pytest.mark.parametrize("kind", KINDS)
def test_what_we_write_is_read_again(tmp_path, monkeypatch, tokenizer, kind):
    "The same model, stretched frequencies, biases and tokenizer included."
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "cache"))
    config = FAMILIES[kind]
    if kind == "llama3":  # those that are known are Meta's
        config = type(config).from_dict(config.to_dict() | dict(
            rope_parameters=config.rope_parameters | dict(original_max_position_embeddings=8192)))
    if kind.startswith("qwen"):  # as transformers has it for these models, whatever a folder says
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.backend_tokenizer.pre_tokenizer = cuts()["qwen2"]
    folder = stored(config, tmp_path / kind, tokenizer)
    back = find_model(export_gguf(folder, tmp_path / "m.gguf", "float32"))
    one, other = (load_model(place, CPU, torch.float32) for place in (folder, back))
    ids = torch.randint(20, WORDS - 2, (1, 24), generator=torch.Generator().manual_seed(1))
    assert torch.allclose(one.frequencies, other.frequencies, rtol=1e-5)
    assert torch.allclose(one.forward(ids), other.forward(ids), atol=1e-4)
    text = "It's 12345 of IT'S (x)!!"
    assert load_tokenizer(back)(text).input_ids == tokenizer(text).input_ids


@real
def test_the_engine_cuts_texts_as_our_tokenizer_does(tmp_path, tokenizer):
    folder = stored(FAMILIES["smollm2-tied"], tmp_path / "m", tokenizer)
    engine = e.LlamaCpp(export_gguf(folder, tmp_path / "m.gguf"), context=64)
    for text in ("It's 12345 of IT'S (x)!!\n\n  a\tb", "naïve Ωmega 😀", "<|user|>Hi<|end|>"):
        found = engine.ask("/tokenize", {"content": text, "parse_special": True, "add_special": True})
        assert found["tokens"] == tokenizer(text).input_ids
    asked = [{"role": "user", "content": "Hi"}]
    assert engine.ask("/apply-template", {"messages": asked})["prompt"] == "<|user|>Hi<|end|>"
    with pytest.raises(ModelError, match="refused /tokenise"): engine.ask("/tokenise", {})
    engine.close()


# The head

@pytest.fixture(scope="module")
def target(): return load("smollm2", "cpu", "bfloat16")


@pytest.fixture(scope="module")
def said(target):
    "A prompt, and what the engine alone answers."
    ids = encode(target.tokenizer, next(p for p in prompts() if p.domain == "conversation").messages)
    engine = e.LlamaCpp(original_gguf(), context=256)
    answer = engine.generate(ids, 64)
    engine.close()
    return ids, answer.ids


@torch.no_grad()
def other_head(target, ids, folder, option):
    "The shipped head with that option on; its weights are changed so that it stays a good one."
    shipped_head = load_head(shipped("smollm2-head"), target, torch.float32)
    head = Head(replace(shipped_head.config, **{option: True}), shipped_head.draft_tokens)
    head.load_state_dict(shipped_head.state_dict(), strict=False)
    features = target.forward(torch.tensor([ids]), target.new_cache(len(ids)), layers=head.config.layers)[1][0, 1:]
    def size(x): return x.float().pow(2).mean(-1).sqrt().mean()
    if option == "norm_before_fc":  # it divides by the size, which its weight brings back; without it, fc reads noise
        uneven = torch.rand(features.shape[-1], generator=torch.Generator().manual_seed(0)) * 10 + 0.1
        head.input_norm.weight.copy_(uneven * size(features))
        head.fc.weight /= uneven
    else:  # the residual stream begins with what this norm made: its weight brings the size back
        layer, typical = head.layers[0], size(shipped_head.fuse(features.float()[None]))
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.weight[:, len(layer.hidden_norm.weight):] *= layer.hidden_norm.weight / typical
        layer.hidden_norm.weight.fill_(typical)
        head.fc.weight *= 100  # without the norm, nothing else would be heard
    save_head(head, folder, target)
    return folder


@torch.inference_mode()
def accepted_along(target, drafter, ids, made, K) -> list[int]:
    "For each round of our drafter along a given answer, how many of its draft tokens the answer confirms."
    text = [*ids, *made]
    read = target.forward(torch.tensor([text]), target.new_cache(len(text)), last=1, layers=drafter.layers)
    state = drafter.start(text[:len(ids) + 1], read[1][0][:len(ids)], len(text) + K)
    done, rounds = len(ids) + 1, []
    while done < len(text):
        drafted = state.propose(min(K, len(text) - done), SamplingParams(0), SeededRandom(0)).tokens
        right = [a == b for a, b in zip(drafted, text[done:])]
        rounds.append(right.index(False) if False in right else len(right))
        new = text[done:done + rounds[-1] + 1]
        state.commit(new, read[1][0][done - 1:done - 1 + len(new)])
        done += len(new)
    return rounds


@real
@pytest.mark.parametrize("option", [None, "norm_before_residual", "norm_before_fc"])
def test_our_head_drafts_in_the_real_engine_as_here(target, said, tmp_path, option):
    ids, text = said
    folder = other_head(target, ids, tmp_path / "head", option) if option else shipped("smollm2-head")
    draft = export_head(folder, target, tmp_path / "head.gguf", "float32" if option else "bfloat16")
    engine = e.LlamaCpp(original_gguf(), "eagle3", context=256, draft=draft, K=4)
    answer = engine.generate(ids, len(text))
    engine.close()
    ours = accepted_along(target, HeadDrafter(load_head(folder, target, torch.float32), target), ids, text, K=4)
    assert answer.ids == text  # the target's text, whoever drafts
    # of the same drafts, but for rounding: their activations have eight bits
    assert sum(ours) >= 10 and abs(answer.accepted - sum(ours)) <= 2


def test_what_a_head_can_have_and_the_format_cannot(target):
    fits = head_config(target, 64, intermediate_size=64)
    tokens = torch.arange(64)
    check_head(Head(fits, tokens))
    for change, words in (
        (dict(layers=(3, 9)), "2 hidden states"), (dict(fc_norm=True), "fc_norm"),
        (dict(norm_output=True), "norm_output"),
    ):
        with pytest.raises(ModelError, match=words): check_head(Head(replace(fits, **change), tokens))
    with pytest.raises(ModelError, match="2 layers, where it has one; and .*fc_norm"):
        check_head(Head(head_config(target, 64, num_layers=2, intermediate_size=64, fc_norm=True), tokens))


# What can't be

def test_without_the_package_it_is_said_and_nothing_fails(monkeypatch, target):
    monkeypatch.setattr(e, "find_spec", lambda name: None)
    assert 'pip install -e ".[peers]"' in e.llamacpp_missing()
    with pytest.raises(ModelError, match="not installed"): e.LlamaCpp("model.gguf")
    with pytest.raises(ModelError, match="not installed"): e.LlamaCppModes(target, "bfloat16")


@real
def test_a_file_that_is_none_is_a_clear_error(tmp_path, capfd):
    (tmp_path / "m.gguf").write_text("no")
    with pytest.raises(ModelError, match="can't load .*m.gguf"): e.LlamaCpp(tmp_path / "m.gguf")
    with pytest.raises(InputError, match="no mode 'fast'.*plain, ngram"): e.LlamaCpp(tmp_path / "m.gguf", "fast")
    with pytest.raises(InputError, match="needs a draft"): e.LlamaCpp(tmp_path / "m.gguf", "eagle3")


@pytest.mark.parametrize("kind, words", [
    ("phi3", "expected one of llama"), ("mistral-window", "window"), ("yarn", "type 'yarn'"),
    ("mlp-bias", None), ("gpt-neox", "'gpt_neox'"),
])
def test_models_that_the_format_or_we_have_no_place_for(tmp_path, kind, words):
    from families import OTHERS
    folder = tmp_path / kind
    config = (FAMILIES | OTHERS)[kind]
    random_model(config).save_pretrained(folder)
    load_tokenizer(fetch()).save_pretrained(folder)
    words = words or "don't fit"  # a vocabulary of 100
    with pytest.raises((ModelError, InputError), match=words): export_gguf(folder, tmp_path / "m.gguf")
    assert not list(tmp_path.glob("*.gguf*"))  # nothing half-written is left


def test_a_file_that_cannot_be_finished_is_not_left(tmp_path, tokenizer):
    folder = stored(FAMILIES["smollm2-tied"], tmp_path / "m", tokenizer)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="model.norm.weight.*quantised"): export_gguf(folder, tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("path", ["model.bin", "nowhere/model.gguf"])
def test_a_path_that_cannot_be_is_refused_before_anything_is_read(tmp_path, path, monkeypatch):
    monkeypatch.setattr("specdec.models.gguf.find_model", lambda name: pytest.fail("a model was looked for"))
    with pytest.raises(InputError, match="something.gguf"): export_gguf("smollm2", tmp_path / path)


def test_a_tokenizer_whose_cuts_nobody_knows_is_refused(target):
    from tokenizers import Tokenizer
    from tokenizers.models import BPE, WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast
    for model, cut in ((BPE(), Whitespace()), (WordLevel({"a": 0}, unk_token="a"), Whitespace()), (BPE(), None)):
        backend = Tokenizer(model)
        if cut: backend.pre_tokenizer = cut
        unknown = PreTrainedTokenizerFast(tokenizer_object=backend)
        with pytest.raises(ModelError, match="byte-level BPE"): cut_of(unknown)
    assert cut_of(target.tokenizer) == "smollm"  # as its file says
