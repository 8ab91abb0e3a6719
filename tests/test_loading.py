"From a name to a model that is ready: who computes what, where texts end, and drafts that know some tokens only."
import json
import signal

import pytest
import torch
from safetensors.torch import save_file

from families import CPU, LOOKALIKES, check_interface, random_model, stored, tokens
from specdec.adapter import TransformersLM
from specdec.core import InputError, ModelError
from specdec.drafters.small import TOKENS_FILE, NarrowLM
from specdec.loading import end_tokens, load, load_model
from specdec.models import fetch, load_transformers
from specdec.transformer import Llama


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalike_goes_to_transformers(name, tmp_path):
    module = random_model(LOOKALIKES[name])
    model = stored(module, tmp_path)
    assert isinstance(model, TransformersLM)
    check_interface(model, module, tokens(24))


def test_load_and_end_tokens(tmp_path):
    model = load("smollm2", "cpu", "float32")
    assert model.name == "smollm2" and model.dtype == torch.float32
    tokenizer = model.tokenizer
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in model.eos_ids
    assert end_tokens(tmp_path, tokenizer) == {tokenizer.eos_token_id}  # no generation_config.json
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert end_tokens(tmp_path, tokenizer) == {5, 6, tokenizer.eos_token_id}


@pytest.mark.parametrize("arguments", [dict(device="gpu"), dict(dtype="int3")], ids=["device", "dtype"])
def test_a_device_or_dtype_that_is_none(arguments):
    with pytest.raises(InputError): load("smollm2", **arguments)


@pytest.mark.parametrize("use", ["verify", True, None, ["target"]])
def test_what_a_model_is_loaded_for_is_one_of_three(use, tmp_path):
    nothing = tmp_path / "nothing"
    with pytest.raises(InputError, match="target, draft, plain"): load_model(nothing, CPU, torch.float32, use)
    with pytest.raises(InputError, match="target, draft, plain"): load("nowhere", use=use)


@pytest.mark.parametrize("use", ["target", "draft", "plain"])
def test_a_revision_is_passed_on(use, monkeypatch):
    asked = {}
    def find(name, revision):
        asked.update(name=name, revision=revision)
        raise ModelError("not here")
    monkeypatch.setattr("specdec.loading.find_model", find)
    with pytest.raises(ModelError, match="not here"): load("org/name", use=use, revision="v1")
    assert asked == dict(name="org/name", revision="v1")


class Named:
    eos_token_id = 2


def test_where_texts_end(tmp_path):
    "As transformers has it: the generation config, or the config where there is none."
    config = {"model_type": "gpt2", "eos_token_id": [7, 9]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert end_tokens(tmp_path, Named) == {2, 7, 9}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert end_tokens(tmp_path, Named) == {2, 5}
    for damaged in ('{"eos_token_id": [5', "[]", '{"eos_token_id": [[2]]}', '{"eos_token_id": "2"}'):
        (tmp_path / "generation_config.json").write_text(damaged)
        with pytest.raises(ModelError, match="eos_token_id|can't be read"): end_tokens(tmp_path, Named)


def narrow(folder):
    "A stored draft that knows the tokens 4, 7 and 97 of a target's 100, and was trained for the weights `abc`."
    from transformers import LlamaConfig
    shape = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=4)
    module = random_model(LlamaConfig(**shape, specdec_target_digest="abc"))
    module.save_pretrained(folder)
    save_file({"tokens": torch.tensor([4, 7, 97])}, folder / TOKENS_FILE, {"vocab_size": "100"})
    return module


def test_a_draft_that_knows_some_tokens_only(tmp_path):
    module = narrow(tmp_path)
    model = load_model(tmp_path, CPU, torch.float32, use="draft")
    assert isinstance(model, NarrowLM) and isinstance(model.model, Llama)
    assert (
        model.vocab_size == 100 and model.target_digest == "abc" and model.context_length == model.model.context_length
    )
    logits = model.forward(torch.tensor([[7, 50, 4, 3]]), model.new_cache(4))
    expected = module(torch.tensor([[1, 3, 0, 3]])).logits
    assert torch.allclose(logits[..., [4, 7, 97]], expected[..., :3], atol=1e-5)
    assert torch.isneginf(logits).sum() == 4 * 97
    with pytest.raises(InputError, match="Hidden states"):
        model.forward(torch.tensor([[4]]), model.new_cache(4), layers=(0,))


@pytest.mark.parametrize("damage", [
    lambda path: path.write_bytes(b"no"), lambda path: save_file({"tokens": torch.tensor([4])}, path),
    lambda path: save_file({"words": torch.tensor([4])}, path, {"vocab_size": "100"}),
], ids=["no file of tensors", "no vocabulary", "no tokens"])
def test_a_damaged_list_of_tokens(damage, tmp_path):
    narrow(tmp_path)
    damage(tmp_path / TOKENS_FILE)
    with pytest.raises(ModelError, match="train the draft again"): load_model(tmp_path, CPU, torch.float32)


def test_more_tokens_than_the_draft_has(tmp_path):
    narrow(tmp_path)
    save_file({"tokens": torch.arange(4)}, tmp_path / TOKENS_FILE, {"vocab_size": "100"})
    with pytest.raises(ModelError, match="can't know 4"): load_model(tmp_path, CPU, torch.float32)


def test_what_nobody_said_has_a_default(tmp_path):
    module = random_model(LOOKALIKES["gelu"])
    for model in (TransformersLM(module), load_model(fetch(), CPU, torch.bfloat16)):
        assert (model.tokenizer, model.eos_ids, model.name, model.digest, model.target_digest) == (
            None, frozenset(), None, None, None)


def test_an_interrupt_inside_a_storage_is_an_interrupt(tmp_path, monkeypatch):
    """PyTorch asks a storage for its first item while it makes a tensor, and takes an interrupt there for "not a
    sequence": a ValueError, once in some hundred interrupts."""
    from helpers_training import make_target
    folder, handler = make_target(tmp_path), signal.signal(signal.SIGINT, signal.default_int_handler)
    def interrupted(self, which, item=torch.UntypedStorage.__getitem__):
        if not isinstance(which, slice): signal.raise_signal(signal.SIGINT)
        return item(self, which)
    try:
        monkeypatch.setattr(torch.UntypedStorage, "__getitem__", interrupted)
        with pytest.raises(KeyboardInterrupt): load_model(folder, CPU, torch.float32)
        with pytest.raises(KeyboardInterrupt): load_transformers(folder, CPU, torch.float32)
    finally: signal.signal(signal.SIGINT, handler)
SHAPE = dict(vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=48)
DAMAGES = [
    *((name, wrong) for name in SHAPE for wrong in (0, -1, 2 ** 50)),
    ("num_key_value_heads", 3), ("num_attention_heads", True), ("num_attention_heads", 4.5),
    ("head_dim", -1), ("head_dim", 0),
    *(("rms_norm_eps", wrong) for wrong in (float("nan"), -1.0, "x")),
    *(("rope_theta", wrong) for wrong in (0.0, -1.0, float("nan"), "x", None)),
]

@pytest.mark.parametrize("name, wrong", DAMAGES, ids=lambda value: str(value))
def test_a_damaged_config_is_named(name, wrong, tmp_path):
    from transformers import LlamaConfig
    random_model(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (config["rope_parameters"] if name == "rope_theta" else config)[name] = wrong
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError): load_model(tmp_path, CPU, torch.float32)

def test_a_model_without_positions_is_refused(tmp_path):
    from transformers import GPT2Config
    module = random_model(GPT2Config(vocab_size=24, n_embd=16, n_layer=1, n_head=2, n_positions=8))
    for wrong in (0, -1):
        module.config.n_positions = wrong
        with pytest.raises(ModelError, match=f"{wrong} positions"): TransformersLM(module)
