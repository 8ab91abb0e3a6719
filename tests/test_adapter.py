"The wrapper around transformers: any architecture that can be rolled back, and a refusal for those that can't."
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

from families import FAMILIES, LOOKALIKES, OTHERS, SMALL, V, check_interface, random_model, rope, tokens
from specdec.cache import KVCache
from specdec.drafters.lookup import NGramDrafter
from specdec.errors import InputError, ModelError, SpecdecError
from specdec.models.transformers import TransformersLM, as_transformers_cache, cache_argument, is_native
from specdec.pair import Pair


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures(name):
    module = random_model(OTHERS[name])
    check_interface(TransformersLM(module), module, tokens(24))


@pytest.mark.parametrize(
    "config, reason",
    [
        (transformers.MambaConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2, state_size=4), "recurrent"),
        (
            transformers.JambaConfig(
                **SMALL, num_experts=2, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False
            ),
            "recurrent",
        ),
        (transformers.OpenAIGPTConfig(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=V), "no keys"),
    ],
    ids=["mamba", "jamba", "gpt1"],
)
def test_what_cannot_roll_back_is_refused(config, reason):
    with pytest.raises(ModelError, match=f"can't be rolled back.*{reason}"):
        TransformersLM(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("config", [
    LlamaConfig(**SMALL, hidden_act="relu"),
    LlamaConfig(**SMALL, quantization_config=dict(quant_method="gptq", bits=4)),
    LlamaConfig(**SMALL, **rope("default", partial_rotary_factor=0.5)),
    transformers.MixtralConfig(**SMALL),
    transformers.GPT2Config(),
], ids=["relu", "quantised", "partial rotary llama", "mixtral", "gpt2"])
def test_not_native(config):
    assert not is_native(config)


def test_a_model_that_attends_both_ways_is_refused():
    from transformers import BertConfig, BertLMHeadModel
    config = BertConfig(vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(ModelError, match="attend to later"): TransformersLM(BertLMHeadModel(config))


def test_a_model_that_was_trained_just_now_drops_nothing_out():
    model = TransformersLM(random_model(OTHERS["gpt2"]).train())
    a, b = (model.forward(tokens(8), model.new_cache(8)) for _ in range(2))
    assert torch.equal(a, b)


def test_longrope_ends_where_its_frequencies_change():
    model = TransformersLM(random_model(LOOKALIKES["longrope"]))
    assert model.context_length == 32
    with pytest.raises(ModelError, match="end at 32"):
        model.forward(tokens(33), model.new_cache(40))


def test_transformers_makes_no_mask_for_rounded_views():
    with pytest.raises(InputError, match="multiple=1"): as_transformers_cache(KVCache(1, 8, multiple=4))


def test_generate_of_transformers_on_this_cache():
    llama, start = random_model(LlamaConfig(**SMALL)), torch.tensor([[1, 2, 3], [4, 5, 6]])
    how = dict(attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=15, pad_token_id=0,
               eos_token_id=None)
    cache = KVCache(3, 20)
    adapter = as_transformers_cache(cache)
    assert torch.equal(llama.generate(start, **{cache_argument(llama): adapter}, **how), llama.generate(start, **how))
    assert cache.length == 17
    for refused in (lambda: adapter.crop(-1), adapter.reset):
        with pytest.raises(SpecdecError, match="rollback"): refused()


def ended(module, prompt, place=6, new=16):
    "What the library's `generate` emits greedily once a token that it would emit is declared an end."
    how = dict(attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=new, pad_token_id=0)
    module.generation_config.eos_token_id = None
    end = module.generate(prompt, **how)[0, prompt.shape[1] + place].item()
    module.generation_config.eos_token_id = [end, V - 1]
    return module.generate(prompt, **how)[0, prompt.shape[1]:].tolist()


@pytest.mark.parametrize("name", FAMILIES | LOOKALIKES | OTHERS)
def test_a_module_ends_where_generate_ends(name):
    module, prompt = random_model((FAMILIES | LOOKALIKES | OTHERS)[name]), tokens(8, 1)
    expected = ended(module, prompt)
    assert len(expected) <= 7 and expected[-1] in module.generation_config.eos_token_id
    result = Pair(TransformersLM(module), NGramDrafter()).generate(prompt[0].tolist(), max_new_tokens=16)
    assert result.generated_ids == expected and result.finish_reason == "eos"


def test_ends_are_those_of_the_generation_config_then_of_the_config():
    module = random_model(LlamaConfig(**SMALL))
    module.config.eos_token_id = 7
    for named, ends in [([3, 4], {3, 4}), (5, {5}), (None, {7})]:
        module.generation_config.eos_token_id = named
        assert TransformersLM(module).eos_ids == ends
    tokenizer = SimpleNamespace(eos_token_id=9)
    model = TransformersLM(module, tokenizer=tokenizer)
    assert model.eos_ids == {7, 9} and model.tokenizer is tokenizer
    module.config.eos_token_id = None
    assert TransformersLM(module).eos_ids == frozenset() and TransformersLM(module).tokenizer is None
    module.generation_config.eos_token_id = "</s>"
    with pytest.raises(ModelError, match="must be token ids, not '</s>'"): TransformersLM(module)
