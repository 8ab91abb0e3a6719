"The wrapper around transformers: any architecture that can be rolled back, and a refusal for those that can't."
import inspect
import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

from families import (
    FAMILIES,
    IMAGE,
    LOOKALIKES,
    MULTIMODAL,
    OTHERS,
    SMALL,
    V,
    check_interface,
    difference,
    random_model,
    rope,
    stored,
    tokens,
)
from specdec import transformers_generate
from specdec.cache import KVCache
from specdec.drafters.lookup import NGramDrafter
from specdec.errors import InputError, ModelError, SpecdecError
from specdec.models import transformers as home
from specdec.models.loading import memory_needed
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


@pytest.mark.parametrize("kind", [transformers.StaticCache, transformers.DynamicCache])
def test_a_cache_of_the_librarys_is_refused_with_what_takes_it(kind):
    module = random_model(LlamaConfig(**SMALL))
    cache = kind(config=module.config, **(dict(max_cache_len=16) if kind is transformers.StaticCache else {}))
    with pytest.raises(InputError, match=f"takes a KVCache, .* not a {kind.__name__}: .*transformers_generate"):
        TransformersLM(module).forward(tokens(8), cache)


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


# --- Tried when it is wrapped

LLAMA = LlamaConfig(**SMALL)


def forwards(module, run):
    "How many tokens each forward of the module reads in `run()`."
    seen = []
    hook = module.register_forward_pre_hook(lambda *a: seen.append(a[2]["input_ids"].shape[1]), with_kwargs=True)
    try: run()
    finally: hook.remove()
    return seen


def test_a_module_is_tried_once_by_five_short_forwards():
    module = random_model(OTHERS["gpt2"])
    seen = forwards(module, lambda: TransformersLM(module))
    assert len(seen) == 5 and sum(seen) <= 40
    assert forwards(module, lambda: TransformersLM(module)) == []
    module.to(torch.bfloat16)  # that is another computation
    assert len(forwards(module, lambda: TransformersLM(module))) == 5


def test_a_trial_reads_past_windows_that_are_short_and_no_large_model_reads_long():
    module = random_model(OTHERS["gemma3-window"])
    assert max(forwards(module, lambda: TransformersLM(module))) == 8 + 8  # a window of eight, crossed
    model = TransformersLM(random_model(LlamaConfig(**SMALL)))
    model.config.sliding_window = 40
    assert home.trial_text(model).shape[1] == 48
    model.config.sliding_window = model.config.max_position_embeddings = model.context_length = 10**5
    assert home.trial_text(model).shape[1] == 12  # few parameters, and a score for each pair of tokens
    model.config.sliding_window = 40
    model.model.num_parameters = lambda: 7 * 10**9
    assert home.trial_text(model).shape[1] == 12
    assert home.trial_text(model)[0, 1:6:2].tolist() == [0, 2, 1]  # padding, end, beginning


def test_roberta_counts_from_0_as_generate_does():
    "Also where the text holds padding ids; without our positions, reading in pieces gives another text."
    kind = dict(vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                max_position_embeddings=64, pad_token_id=1, is_decoder=True)
    module = random_model(transformers.RobertaConfig(**kind))
    model = TransformersLM(module)
    assert model.gives_positions and not TransformersLM(random_model(LLAMA)).gives_positions
    prompt = torch.tensor([[5, 1, 17, 42, 1, 1, 9]])
    how = dict(attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=30, eos_token_id=None)
    theirs = module.generate(prompt, **how)
    result = Pair(model, NGramDrafter()).generate(prompt[0].tolist(), max_new_tokens=30, ignore_eos=True)
    assert result.generated_ids == theirs[0, 7:].tolist() and result.num_drafted > 0
    assert torch.equal(module.generate(prompt, custom_generate=transformers_generate, **how), theirs)
    with torch.inference_mode(): alone = module(prompt).logits
    assert (model.forward(prompt) - alone).abs().max() > 0.1  # the module by itself counts from the padding id


class Late(transformers.LlamaForCausalLM):
    "Broken past so many tokens: with a cache it forgets the first token there."
    def forward(self, input_ids=None, cache=None, use_cache=None, past_key_values=None, **others):
        past = {CACHE: cache if past_key_values is None else past_key_values}
        output = super().forward(input_ids=input_ids, **past, use_cache=use_cache, **others)
        held = past[CACHE]
        if use_cache and held is not None and held.get_seq_length() > self.config.broken_after: output.logits += 0.5
        return output


class Ahead(transformers.LlamaForCausalLM):
    "Lets each token see the last one."
    def forward(self, input_ids=None, cache=None, use_cache=None, past_key_values=None, **others):
        past = {CACHE: cache if past_key_values is None else past_key_values}
        output = super().forward(input_ids=input_ids, **past, use_cache=use_cache, **others)
        output.logits = output.logits + output.logits[:, -1:]
        return output


class Broken(transformers.LlamaForCausalLM):
    def forward(self, *args, **others):
        output = super().forward(*args, **others)
        return self.config.breaks(output)
Broken.forward.__signature__ = inspect.signature(transformers.LlamaForCausalLM.forward)

CACHE = cache_argument(random_model(LLAMA))


@pytest.mark.parametrize("kind, reason", [
    (Ahead, "its tokens attend to later ones"), (Late, "can't be rolled back.*something else than"),
])
def test_a_module_that_reads_otherwise_in_pieces_is_refused(kind, reason):
    "The negative control: the same class without the fault passes."
    config = LlamaConfig(**SMALL, broken_after=10)
    with pytest.raises(ModelError, match=reason): TransformersLM(kind(config).eval())
    config.broken_after = 60
    if kind is Late: TransformersLM(kind(config).eval())


def spoil(output, what):
    if what == "last": output.logits = output.logits[:, -1:]
    elif what == "wide": output.logits = torch.cat([output.logits, output.logits[..., :1]], -1)
    elif what == "nan": output.logits = output.logits * float("nan")
    return output


@pytest.mark.parametrize("what, message", [
    ("last", r"is no causal language model.*must give logits \[1, 12, 100\], and it gives \[1, 1, 100\]"),
    ("wide", r"it gives \[1, 12, 101\]"), ("nan", "with a cache it says something else|attend to later"),
])
def test_logits_that_cannot_be_served(what, message):
    module = Broken(LlamaConfig(**SMALL)).eval()
    module.config.breaks = lambda output: spoil(output, what)
    with pytest.raises(ModelError, match=message): TransformersLM(module)
    module.config.breaks = lambda output: output
    assert TransformersLM(module).vocab_size == V


@pytest.mark.parametrize("make, kind, message", [
    (lambda: None, InputError, "wraps a causal language model of transformers, such as .*not None"),
    (lambda: "gpt2", InputError, "not 'gpt2'"),
    (lambda: torch.nn.Linear(2, 2), InputError, "not Linear"),
    (lambda: transformers.LlamaForCausalLM, InputError, "not the class LlamaForCausalLM"),
    (lambda: transformers.LlamaModel(LLAMA), ModelError, "no causal language model.*it gives none"),
    (lambda: transformers.LlamaForSequenceClassification(LLAMA), ModelError, r"give logits \[1, 12, 100\], and it"),
], ids=["None", "a name", "Linear", "a class", "no head", "a classifier"])
def test_what_is_no_causal_language_model_is_refused(make, kind, message):
    with pytest.raises(kind, match=message): TransformersLM(make())


def test_weights_that_are_not_in_memory_are_refused():
    with torch.device("meta"): module = transformers.LlamaForCausalLM(LLAMA)
    with pytest.raises(ModelError, match="LlamaForCausalLM are not in memory.*load all of it"): TransformersLM(module)
    module = random_model(LLAMA)  # one layer offloaded, as accelerate leaves it
    module.model.layers[1].to("meta")
    with pytest.raises(ModelError, match="not in memory"): TransformersLM(module)


def test_a_refused_module_keeps_its_mode():
    module = transformers.LlamaModel(LLAMA).train()
    with pytest.raises(ModelError): TransformersLM(module)
    assert module.training
    assert not TransformersLM(random_model(LLAMA).train()).model.training


def test_a_pair_says_that_it_leaves_a_modules_own_settings_out():
    module = random_model(LLAMA)
    def warned():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            Pair(TransformersLM(module), NGramDrafter())
        return [str(one.message) for one in said if "generation_config" in str(one.message)]
    assert warned() == []
    module.generation_config.update(temperature=0.6, top_p=0.9)
    assert warned() == []  # they are of sampling, and it doesn't sample
    module.generation_config.update(do_sample=True, repetition_penalty=1.1)
    message, = warned()
    assert all(f"'{name}': {value}" in message for name, value in dict(
        do_sample=True, temperature=0.6, top_p=0.9, repetition_penalty=1.1).items())


# --- What could read images writes text

def writes(module, prompt, **how):
    "What the library's `generate` writes after a prompt, greedily."
    how = dict(attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=30, eos_token_id=None,
               pad_token_id=0) | how
    return module.generate(prompt, **how)[0, prompt.shape[1]:].tolist()


@pytest.mark.parametrize("name", MULTIMODAL)
def test_a_model_that_could_read_images_writes_text(name):
    "Windows of eight tokens are crossed."
    module, prompt = random_model(MULTIMODAL[name]), tokens(20, 1)
    model = TransformersLM(module)
    check_interface(model, module, tokens(24))
    expected = writes(module, prompt)
    for drafter in (NGramDrafter(), model):
        result = Pair(model, drafter).generate(prompt[0].tolist(), max_new_tokens=30, ignore_eos=True)
        assert result.generated_ids == expected and result.num_drafted > 0
    plain = Pair(model).generate(prompt[0].tolist(), method="plain", max_new_tokens=30, ignore_eos=True)
    assert plain.generated_ids == expected
    kinds = dict(token_type_ids=torch.zeros_like(prompt)) if name == "gemma3" else {}  # as its processor says
    assert writes(module, prompt, custom_generate=transformers_generate, **kinds) == expected


@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_an_image_is_refused_by_name(name):
    module, prompt = random_model(MULTIMODAL[name]), tokens(20, 1)
    prompt[0, 5:9] = IMAGE
    image = dict(pixel_values=torch.randn(1, 3, 8, 8))
    if name == "gemma3": image |= dict(token_type_ids=(prompt == IMAGE).long())
    assert writes(module, prompt, **image) != writes(module, prompt)
    with pytest.raises(InputError, match="model would get .*image.* besides token ids"):
        writes(module, prompt, custom_generate=transformers_generate, **image)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_a_folder_of_a_model_that_could_read_images_is_loaded(name, tmp_path):
    module, ids = random_model(MULTIMODAL[name]), tokens(24)
    model = stored(module, tmp_path)
    assert difference(model.forward(ids), module(ids, use_cache=False).logits) <= 1e-5
    needed = memory_needed(tmp_path, "cpu", "float32")
    assert needed.param_count == module.num_parameters() and needed.cache_mb > 0


def test_an_image_that_was_read_before_moves_no_position():
    "Qwen2.5-VL keeps from each image how far its positions were moved, and takes them for the next text."
    module, prompt = random_model(MULTIMODAL["qwen2.5-vl"]), tokens(20, 1)
    model = TransformersLM(module)
    expected = Pair(model, NGramDrafter()).generate(prompt[0].tolist(), max_new_tokens=20, ignore_eos=True)
    module.model.rope_deltas = torch.tensor([[-7]])
    again = Pair(model, NGramDrafter()).generate(prompt[0].tolist(), max_new_tokens=20, ignore_eos=True)
    assert again.generated_ids == expected.generated_ids


# --- Wrapped once more

def test_a_compiled_module_is_looked_through_and_called():
    module, ids = random_model(LLAMA), tokens(20, 1)
    calls = []
    def backend(graph, inputs):
        calls.append(1)
        return graph.forward
    compiled = torch.compile(module, backend=backend)
    model = TransformersLM(compiled)
    assert model.model is module and model.gives_positions and calls
    assert difference(model.forward(ids), module(ids, use_cache=False).logits) <= 1e-5
    result = Pair(model, NGramDrafter()).generate(ids[0].tolist(), max_new_tokens=8, ignore_eos=True)
    assert result.generated_ids == writes(module, ids, max_new_tokens=8)


def test_a_compiled_module_that_cannot_be_read_says_how():
    torch._dynamo.reset()  # what earlier tests have compiled is not compiled again
    def backend(graph, inputs): raise RuntimeError("no compiler here")
    with pytest.raises(ModelError, match=r"LlamaForCausalLM can't be .*no compiler here.*model\._orig_mod\) serves it"):
        TransformersLM(torch.compile(random_model(LLAMA), backend=backend))


class Adapted(torch.nn.Module):
    "What PEFT's model is to us: adapters lie in the layers of the model inside, or tokens before the text."
    def __init__(self, module, prompt_learning=False):
        super().__init__()
        self.held, self.active_peft_config = module, SimpleNamespace(is_prompt_learning=prompt_learning)
    def get_base_model(self): return self.held
    def forward(self, *args, **kwargs): return self.held(*args, **kwargs)


def test_adapters_in_layers_are_looked_through_and_tokens_before_the_text_refused():
    module, ids = random_model(LLAMA), tokens(20, 1)
    model = TransformersLM(Adapted(module))
    assert model.model is module and difference(model.forward(ids), module(ids, use_cache=False).logits) <= 1e-5
    with pytest.raises(ModelError, match="Adapted puts learned tokens before each text.*such as LoRA"):
        TransformersLM(Adapted(module, prompt_learning=True))


def test_a_model_of_peft():
    import peft
    module, ids = random_model(LLAMA), tokens(20, 1)
    alone = writes(module, ids)
    lora = peft.get_peft_model(module, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, lora_alpha=64))
    expected = lora.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30,
                             eos_token_id=None, pad_token_id=0)[0, 20:].tolist()
    result = Pair(TransformersLM(lora), NGramDrafter()).generate(ids[0].tolist(), max_new_tokens=30, ignore_eos=True)
    assert result.generated_ids == expected != alone
    learned = peft.get_peft_model(random_model(LLAMA), peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ModelError, match="puts learned tokens before each text"): TransformersLM(learned)
