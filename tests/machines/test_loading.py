"From a name to a model that is ready: who computes what, where texts end, and drafts that know some tokens only."
import json
import signal

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig

from families import (
    CPU,
    FAMILIES,
    LOOKALIKES,
    OTHERS,
    check_interface,
    random_model,
    stored,
    tokens,
)
from specdec.drafters.model import TOKENS_FILE, NarrowLM
from specdec.errors import InputError, ModelError
from specdec.models import loading
from specdec.models.checkpoint import StoredRows, finer_numbers
from specdec.models.convert import GRID
from specdec.models.devices import INT4, STORED, pick_dtype
from specdec.models.hub import fetch, load_tokenizer, load_transformers
from specdec.models.linear import Int4Linear, Linear
from specdec.models.llama import Llama
from specdec.models.loading import (
    MemoryNeeded,
    check_fits,
    end_tokens,
    group_free,
    load,
    load_model,
    memory_free_mb,
    memory_needed,
    system_free,
)
from specdec.models.transformers import TransformersLM


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
    def find(name, revision, look):
        asked.update(name=name, revision=revision)
        raise ModelError("not here")
    monkeypatch.setattr("specdec.models.loading.find_model", find)
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
    with pytest.raises(InputError, match="no hidden states"):
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
    ends = frozenset([module.generation_config.eos_token_id])  # of a module, what its config says
    for model, eos_ids in ((TransformersLM(module), ends), (load_model(fetch(), CPU, torch.bfloat16), frozenset())):
        assert (model.tokenizer, model.eos_ids, model.name, model.digest, model.target_digest) == (
            None, eos_ids, None, None, None)


def test_an_interrupt_inside_a_storage_is_an_interrupt(tmp_path, monkeypatch):
    """PyTorch asks a storage for its first item while it makes a tensor, and takes an interrupt there for "not a
    sequence": a ValueError, once in some hundred interrupts. One interrupt a load: transformers makes tensors in
    threads, which could still raise another one while the next test runs."""
    from helpers_training import make_target
    folder, handler = make_target(tmp_path), signal.signal(signal.SIGINT, signal.default_int_handler)
    def interrupt_once():
        left = iter([True])
        def interrupted(self, which, item=torch.UntypedStorage.__getitem__):
            if not isinstance(which, slice) and next(left, False): signal.raise_signal(signal.SIGINT)
            return item(self, which)
        return interrupted
    try:
        for load in (load_model, load_transformers):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(torch.UntypedStorage, "__getitem__", interrupt_once())
                load(folder, CPU, torch.float32)
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


# --- sizes

@pytest.mark.parametrize("name", [*FAMILIES, "granite", "gpt2"])
def test_parameters_are_counted_before_and_after_loading(name, tmp_path):
    module = random_model((FAMILIES | LOOKALIKES | OTHERS)[name])
    model = stored(module, tmp_path)
    needed = memory_needed(module.config, "cpu", "float32", context=10)
    assert needed.param_count == model.param_count == module.num_parameters()
    cache = model.new_cache(10)
    if cache.multiple == 1 and name != "gpt2":
        model.forward(tokens(10, B=1), cache)
        assert needed.cache_mb * 1e6 == cache.nbytes
    assert needed.context == 10 and needed.total_mb == needed.weights_mb + needed.cache_mb


@pytest.mark.parametrize("use", ["target", "plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "int4"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "two tables"])
def test_memory_is_told_before_loading(tied, dtype, use, tmp_path):
    """What is told is what the tensors take; four bits are five with their steps and zeros, and the vocabulary's matrix
    is left in bfloat16, once."""
    sizes = dict(vocab_size=512, hidden_size=64, intermediate_size=128, tie_word_embeddings=tied)
    config = LlamaConfig(**SHAPE | sizes)
    random_model(config).save_pretrained(tmp_path)
    model = load_model(tmp_path, CPU, pick_dtype(dtype, CPU, STORED), use)
    assert model.precision == dtype and str(model.dtype) != "torch.int4"
    assert model.memory_footprint_mb == pytest.approx(memory_needed(config, CPU, dtype, use).weights_mb, rel=1e-3)
    if dtype == "int4":
        layers, half = model.param_count - 512 * 64 * (2 - tied), pick_dtype("auto", CPU).itemsize
        assert model.memory_footprint_mb == pytest.approx(1e-6 * (5 / 8 * layers + half * 512 * 64), rel=.02)  # norms
    light = model.skip([0])
    assert light.memory_footprint_mb < model.memory_footprint_mb and light.param_count < model.param_count


def test_four_bits_on_a_gpu_keep_a_plain_table_besides(monkeypatch):
    "Rows in a file are the CPU's: a GPU has the way in in bfloat16, tied or not."
    monkeypatch.setattr(loading, "working_dtype", lambda dtype, device: torch.bfloat16)
    for embedding in (0, 24 * 16):
        counts = 800, embedding, 10
        taken = loading.weight_bytes(LlamaConfig(**SHAPE), counts, torch.device("cuda"), INT4, "target")
        assert taken == 500 + 2 * (24 * 16 + 10)
        # a way out that stays as it is: one matrix if tied, two if not
        taken = loading.weight_bytes(LlamaConfig(**SHAPE), counts, torch.device("cuda"), INT4, "target", 24 * 16)
        assert taken == (800 - 24 * 16) * 5 / 8 + 2 * (24 * 16 + embedding + 10)


@pytest.mark.parametrize("levels, left", [(["layer"], 100), (["layer", "lm_head"], 0), ([], 164)],
                         ids=["a layer has levels", "the way out too", "nothing has"])
def test_what_four_bits_leave_as_it_is(levels, left, tmp_path):
    "More than sixteen levels, and the way out, unless it has sixteen; the way in is multiplied by nothing."
    names = ["model.embed_tokens.weight", "lm_head.weight", "layer.weight"]
    shapes = dict(zip(names, [(20, 5), (20, 5), (8, 8)]))
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    blocks = {f"{name}.weight": torch.zeros(1) for name in levels}
    save_file(blocks, tmp_path / GRID, {name: "Q4_0" if name in blocks else "Q8_0" for name in names})
    assert finer_numbers(tmp_path, 100) == left


def test_a_model_says_how_large_it_is(tmp_path):
    model = load("smollm2", "cpu", "float32")
    line = "<Llama smollm2: 134.5 M parameters in float32 on cpu, 538 MB; 49,152 tokens, context 8,192>"
    assert repr(model) == line
    assert memory_needed("smollm2", "cpu", "float32").weights_mb == pytest.approx(538, abs=1)
    module = random_model(LOOKALIKES["gelu"])
    assert repr(TransformersLM(module)).startswith("<TransformersLM: 0.0 M parameters in float32 on cpu, 0 MB")
    narrow(tmp_path)
    draft = load_model(tmp_path, CPU, torch.float32)
    assert draft.param_count == draft.model.param_count and "100 tokens" in repr(draft)


def test_a_load_that_cannot_fit_is_refused_with_the_numbers(tmp_path, monkeypatch):
    "Before anything is read, and with a cache for a text; what just fits is loaded."
    stored(random_model(LlamaConfig(**SHAPE)), tmp_path)
    needed = memory_needed(LlamaConfig(**SHAPE), "cpu", "float32").total_mb
    tokenizer = load_tokenizer(fetch())
    monkeypatch.setattr(loading, "load_tokenizer", lambda folder: tokenizer)
    monkeypatch.setattr(loading, "memory_free_mb", lambda device: needed)
    load(str(tmp_path), "cpu", "float32")
    monkeypatch.setattr(loading, "memory_free_mb", lambda device: .99 * needed)
    monkeypatch.setattr(loading, "load_tokenizer", None)  # nothing comes after the refusal
    with pytest.raises(ModelError, match=r"doesn't fit: in float32 .* MB are free on cpu. Take bfloat16 or int4"):
        load(str(tmp_path), "cpu", "float32")


def test_a_model_on_the_hub_is_refused_before_its_weights_are_downloaded(tmp_path, monkeypatch):
    import huggingface_hub
    LlamaConfig(**SHAPE | dict(vocab_size=2**25)).save_pretrained(tmp_path)
    asked = []
    def snapshot_download(name, **options):
        asked.append(options["allow_patterns"])
        return str(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(loading, "memory_free_mb", lambda device: 1000)
    with pytest.raises(ModelError, match="org/large doesn't fit.* 1,000 MB are free"): load("org/large", "cpu", "int4")
    assert memory_needed("org/large", "cpu", "int4").weights_mb > 1000
    assert asked == ["config.json"] * 2


@pytest.mark.parametrize("kind, sizes, words", [
    ("Mamba", dict(hidden_size=16, state_size=4, num_hidden_layers=1, vocab_size=24), "can't be rolled back"),
    ("T5", dict(vocab_size=24, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2), "of the kind 't5'"),
], ids=["recurrent", "an encoder as well"])
def test_a_model_that_cannot_be_decoded_is_no_crash_where_it_is_sized(kind, sizes, words, tmp_path, monkeypatch):
    config = getattr(transformers, f"{kind}Config")(**sizes)
    module = transformers.MambaForCausalLM if kind == "Mamba" else transformers.T5ForConditionalGeneration
    module(config).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(fetch())
    monkeypatch.setattr(loading, "load_tokenizer", lambda folder: tokenizer)
    with pytest.raises(ModelError, match=words): load(str(tmp_path), "cpu", "float32")


@pytest.mark.parametrize("kept, device, advice", [
    (torch.float32, "cpu", "bfloat16 or int4"), (torch.bfloat16, "cpu", "int4"), (INT4, "cpu", "a smaller model"),
    (torch.float32, "mps", "a smaller dtype or model"),
], ids=["float32", "bfloat16", "int4", "no kernel"])
def test_what_to_do_about_a_model_that_is_too_large(kept, device, advice):
    with pytest.raises(ModelError, match=f"Take {advice}, or free"):
        check_fits("m", MemoryNeeded(10, 100., 1., 8), 100.9, torch.device(device), kept)
    check_fits("m", MemoryNeeded(10, 100., 1., 8), 101., torch.device(device), kept)


def test_what_is_free(tmp_path, monkeypatch):
    "By the system, and by a container's limit in either version; files that are held can be given back."
    found = system_free()
    assert 1e6 < min(found) < 1e14
    monkeypatch.setattr(loading, "system_free", lambda: found)  # others take and give back meanwhile
    assert 1 < memory_free_mb(CPU) <= min(found) / 1e6
    assert group_free(tmp_path) == []
    for name, text in (("memory.max", "max"), ("memory.current", "900"), ("memory.stat", "anon 700\nfile 200\n")):
        (tmp_path / name).write_text(text)
    assert group_free(tmp_path) == []
    (tmp_path / "memory.max").write_text("1000\n")
    assert group_free(tmp_path) == [300]
    (tmp_path / "memory").mkdir()
    for name, text in (("limit_in_bytes", "500"), ("usage_in_bytes", "450"), ("stat", "total_cache 30")):
        (tmp_path / "memory" / f"memory.{name}").write_text(text)
    assert group_free(tmp_path) == [300, 80]


# --- four bits

def test_four_bits_are_a_dtype_of_load(tmp_path):
    "Near to the numbers of the file; text continues in pieces with rollbacks."
    model, exact = load("smollm2", "cpu", "int4"), load("smollm2", "cpu", "float32")
    assert model.int4 and model.precision == "int4" and isinstance(model.layers[0].mlp.down, Int4Linear)
    assert isinstance(model.head, Linear)  # eight bits in the file
    assert model.memory_footprint_mb == pytest.approx(memory_needed("smollm2", "cpu", "int4").weights_mb, rel=1e-3)
    ids = tokens(12, B=1)
    logits, wanted = model.forward(ids), exact.forward(ids)
    def far(other): return (other.float() - wanted).norm() / wanted.norm()
    assert far(logits) < .025
    cache = model.new_cache(20)
    model.forward(ids[:, :9], cache)
    cache.rollback(7)
    assert torch.allclose(model.forward(ids[:, 7:], cache), logits[:, 7:], atol=.5)

@pytest.mark.parametrize("tied", [True, False], ids=["tied", "two tables"])
def test_other_weights_are_quantised_when_they_are_loaded(tied, tmp_path):
    """The same numbers as of a model that is quantised after loading, and the vocabulary's as they are, whatever their
    number; what is the way in only stays in its file."""
    from specdec.drafters.model import quantised
    sizes = dict(vocab_size=515, hidden_size=64, intermediate_size=128, tie_word_embeddings=tied)
    stored(random_model(LlamaConfig(**SHAPE | sizes)), tmp_path)
    ids, dtype = torch.arange(12)[None], pick_dtype("auto", CPU)
    model, whole = load_model(tmp_path, CPU, INT4), load_model(tmp_path, CPU, dtype)
    assert torch.equal(model.forward(ids), quantised(whole).forward(ids)) and isinstance(model.head, Linear)
    assert torch.equal(model.embed(ids), whole.embed(ids)) and (tied or isinstance(model.embed, StoredRows))

def test_four_bits_where_there_is_no_kernel(tmp_path, monkeypatch):
    stored(random_model(LOOKALIKES["gelu"]), tmp_path)
    with pytest.raises(ModelError, match="computed by transformers: take bfloat16"): load_model(tmp_path, CPU, INT4)
    with pytest.raises(ModelError, match="computed by transformers: take bfloat16"):
        memory_needed(LOOKALIKES["gelu"], CPU, "int4")
    with pytest.raises(InputError, match="no kernel on mps"): pick_dtype("int4", torch.device("mps"), STORED)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(InputError, match="no kernel on cuda"): pick_dtype("int4", torch.device("cuda"), STORED)
    stored(random_model(LlamaConfig(**SHAPE)), tmp_path)
    with pytest.raises(ModelError, match="can't be packed in four bits"): load_model(tmp_path, CPU, INT4)
