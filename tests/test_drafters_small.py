"A small model on a part of the target's vocabulary, behind the target's ids."
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from helpers_drafters import CPU, packable_llama
from specdec.core import InputError, ModelError
from specdec.drafters.model import TOKENS_FILE, NarrowLM, narrow_ids
from specdec.loading import load_model


def test_narrow_ids_say_where_each_token_stands():
    assert narrow_ids(torch.tensor([1, 3]), 5).tolist() == [2, 0, 2, 1, 2]


def test_what_it_says_is_what_the_model_says_elsewhere_nothing():
    "Ids are translated on the way in, logits on the way out; all unknown ids are one."
    model, tokens = packable_llama(), torch.arange(5, 100)  # 95 tokens, and one place for all others
    narrow = NarrowLM(model, tokens, 200)
    logits = narrow.forward(torch.tensor([[5, 99, 150, 0]]), narrow.new_cache(8))
    expected = model.forward(torch.tensor([[0, 94, 95, 95]]), model.new_cache(8))
    assert logits.shape == (1, 4, 200) and torch.equal(logits[..., tokens], expected[..., :95])
    assert torch.isinf(logits).sum(-1).tolist() == [[105] * 4]


def test_what_cannot_be_narrow():
    model = packable_llama()
    with pytest.raises(InputError, match="stands for the others"): NarrowLM(model, torch.arange(96), 200)
    narrow = NarrowLM(model, torch.arange(95), 200)
    with pytest.raises(InputError, match="not asked for"):
        narrow.forward(torch.tensor([[1]]), narrow.new_cache(2), layers=(1,))


@pytest.mark.parametrize("damage", ["nonsense", "no size", "no tokens"])
def test_a_damaged_list_of_tokens_is_told(tmp_path, damage):
    sizes = dict(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )
    LlamaForCausalLM(LlamaConfig(vocab_size=9, **sizes)).save_pretrained(tmp_path)
    assert load_model(tmp_path, CPU, torch.float32, use="draft").vocab_size == 9  # without a list: an ordinary model
    file, tokens = tmp_path / TOKENS_FILE, torch.arange(8, dtype=torch.int32)
    save_file({"tokens": tokens}, file, {"vocab_size": "20"})
    assert load_model(tmp_path, CPU, torch.float32, use="draft").vocab_size == 20
    if damage == "nonsense":file.write_bytes(b"nonsense")
    elif damage == "no size":save_file({"tokens": tokens}, file)
    else: save_file({"others": tokens}, file, {"vocab_size": "20"})
    with pytest.raises(ModelError, match="can't be read"): load_model(tmp_path, CPU, torch.float32, use="draft")
