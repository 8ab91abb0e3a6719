"The exact distribution of other people's rules: their own code, called with models whose distributions are known."
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from specdec.lossless.check import SIZES, VerifyCase, VerifyReport, check_verify, verify_cases
from specdec.lossless.enumerate import exact_distribution
from specdec.lossless.proof import Next, completed, sampled, target_distribution
from specdec.lossless.torch_rng import drawn_from
from specdec.verify import VerifyRule, delta

Logits = Callable[[Tensor], Tensor]               # ids [1, n] → logits [1, n, V]
WholeRound = Callable[[Logits, Logits, int], list[int]]  # target, draft, K → 1…K + 1 new tokens
PROMPT = torch.zeros(1, 1, dtype=torch.long)      # one token stands before everything


def model_of(distribution: Next) -> Logits:
    "A model that gives this distribution after the prompt."
    def logits(ids: Tensor) -> Tensor:
        text = ids[0, 1:].tolist()
        rows = [distribution(tuple(text[:i])).astype(float) for i in range(len(text) + 1)]
        return torch.stack([torch.tensor(row) for row in rows]).log()[None]
    return logits


def check_round(
    name: str, fn: WholeRound, cases: list[VerifyCase],
    wanted: Callable[[Next], Next] = lambda distribution: distribution,  # what the options make of p
) -> VerifyReport:
    "As `check_verify`, for a function that drafts as well."
    report = VerifyReport(name, "tensors", 1e-6)
    for case in cases:
        def program(rng):
            with drawn_from(rng): return tuple(fn(model_of(case.p), model_of(case.q), case.K))
        distribution = wanted(case.p)
        try: found = completed(exact_distribution(program), distribution, case.K + 1)
        except Exception as error:
            report.raised = f"{type(error).__name__}: {error} (case: {case})"
            break
        report.add(case, found, target_distribution(distribution, case.K + 1))
    return report


def without_zeros(distribution: Next) -> Next:
    "A distribution that gives every token something, and no two of them the same."
    def mixed(text):
        row = distribution(text)
        ramp = [Fraction(2 * i, len(row) * (len(row) + 1)) for i in range(1, len(row) + 1)]
        return (row + ramp) / 2
    return mixed


def at_zero(distribution: Next) -> Next:
    "What temperature 0 leaves of a distribution: its likeliest token."
    def sure(text):
        row = distribution(text)
        return delta(row, int(row.argmax()))
    return sure


def as_round(rule: VerifyRule) -> WholeRound:
    "A rule, with a draft that samples before it."
    def fn(target, draft, K):
        ids = PROMPT
        for _ in range(K):
            token = torch.multinomial(draft(ids)[0, -1].softmax(-1), 1)
            ids = torch.cat([ids, token[None]], -1)
        p, q = target(ids)[0].softmax(-1), draft(ids)[0, :K].softmax(-1)
        tokens = ids[0, 1:].tolist()
        num_accepted, next_token = rule(p, q, tokens, None)
        return [*tokens[:num_accepted], next_token]
    return fn


def rotalabs_accel() -> VerifyRule:
    from rotalabs_accel.speculative.sampling import rejection_sample
    def verify(p, q, tokens, rng):
        for i, token in enumerate(tokens):
            drafted = torch.tensor(token)
            accepted, said = rejection_sample(p[i, token], q[i, token], drafted, p[i].log())
            if not accepted: return i, int(said)
        return len(tokens), int(torch.multinomial(p[-1], 1))
    return verify


def tightwad() -> VerifyRule:
    from tightwad import speculation
    speculation.random = SimpleNamespace(random=lambda: torch.rand(()))  # it draws with Python's
    def verify(p, q, tokens, rng):
        drafts = [speculation.DraftToken(token, float(q[i, token].log()))
                  for i, token in enumerate(tokens)]
        said = [int(torch.multinomial(row, 1)) for row in p]  # the target's own samples
        rows = [speculation.TargetLogprob(token, float(p[i, token].log()))
                for i, token in enumerate(said)]
        for i, token in enumerate(tokens): rows[i].draft_token_logprob = float(p[i, token].log())
        found = speculation.verify_draft_tokens(drafts, rows, temperature=1.0)
        return found.accepted_count, (found.bonus_token or found.resample_token).token_id
    return verify


def dflash() -> VerifyRule:
    from dflash.model import _rejection_sample
    def verify(p, q, tokens, rng):
        num_accepted, next_token = _rejection_sample(torch.tensor([tokens]), p[None], q[None])
        return num_accepted, int(next_token)
    return verify


def flashspec() -> VerifyRule:
    from flashspec.sampling.rejection import rejection_sample
    def verify(p, q, tokens, rng):
        K = len(tokens)
        ids, first, _ = rejection_sample(
            PROMPT, q[None].log(), p[None, :K].log(), torch.tensor([tokens]), K)
        accepted = int(first[0])
        if accepted < K: return accepted, int(ids[0, accepted])
        return K, int(torch.multinomial(p[K], 1))  # the bonus token is its caller's
    return verify


class _Softmax:
    "A selector as economize asks for one, at temperature 1."
    generator = None
    def distribution(self, logits, history): return logits.softmax(-1)
    def __call__(self, logits, history): return int(torch.multinomial(logits.softmax(-1), 1))


def economize() -> VerifyRule:
    from economize.decoding.verifiers import RejectionVerifier
    verifier = RejectionVerifier.__new__(RejectionVerifier)  # its configuration isn't read
    def verify(p, q, tokens, rng):
        history = torch.zeros(len(p), dtype=torch.long)
        return verifier.verify(p.log(), tokens, q, _Softmax(), history, 1)
    return verify


def mini_infer() -> WholeRound:
    from mini_infer.speculative.verifier import speculative_step
    def step(target, draft, K):
        new, _ = speculative_step(
            lambda ids: (target(ids), None), lambda ids: (draft(ids), None), PROMPT, K, 1.0)
        return new
    return step


def sequential_speculative_decoding() -> WholeRound:
    from seqspecdecod.standard_sd import standard_speculative_step
    def named(model): return lambda ids: SimpleNamespace(logits=model(ids))
    def step(target, draft, K):
        ids, _, _ = standard_speculative_step(named(draft), named(target), PROMPT, K, 1.0, 1.0)
        return ids[0, 1:].tolist()
    return step


def rotalabs_verify_tokens() -> WholeRound:
    from rotalabs_accel.speculative.core import verify_tokens
    def verify(p, q, tokens, rng):
        def model(ids, **_): return SimpleNamespace(logits=p.log()[None], past_key_values=None)
        drafted = torch.tensor(tokens)
        told = q[range(len(tokens)), drafted]  # the draft's probability of each token, no more
        said, accepted, _ = verify_tokens(model, PROMPT, drafted, told, None)
        return accepted, int(said[accepted])
    return as_round(verify)


def rotalabs_eagle_verify() -> WholeRound:
    from rotalabs_accel.speculative.eagle import eagle_verify
    def verify(p, q, tokens, rng):
        def model(ids, **_): return SimpleNamespace(logits=p.log()[None], past_key_values=None)
        drafted = torch.tensor([tokens])
        told = q[range(len(tokens)), drafted[0]][None]
        said, accepted, _ = eagle_verify(model, PROMPT, drafted, told, None, use_sampling=True)
        return accepted, int(said[accepted])
    return as_round(verify)


def capped_hsd() -> WholeRound:
    from seqspecdecod.capped_hsd import capped_hsd_step
    def named(model): return lambda ids: SimpleNamespace(logits=model(ids))
    def step(target, draft, K):
        ids, _, _ = capped_hsd_step(named(draft), named(target), PROMPT, K, 1.0, 1.0)
        return ids[0, 1:].tolist()
    return step


def other_specdec() -> VerifyRule:
    SpecDecoder = _theirs("specdec").SpecDecoder
    def verify(p, q, tokens, rng):
        decoder = SpecDecoder.__new__(SpecDecoder)  # without loading its models
        decoder.device = "cpu"
        decoder.big_model = lambda ids: SimpleNamespace(logits=p.log()[None])
        said = decoder.verify(PROMPT, list(tokens), [row[None] for row in q])
        return len(said) - 1, said[-1]
    return verify


def _theirs(name: str) -> ModuleType:
    "A package that has our name, beside ours."
    ours = {each: sys.modules.pop(each) for each in list(sys.modules)
            if each.partition(".")[0] == name}
    try: return importlib.import_module(name)
    finally: sys.modules.update(ours)


class _Placed:
    "A model that keeps what it has read by position, as litgpt's do."
    def __init__(self, logits: Logits): self.logits, self.read = logits, PROMPT
    def __call__(self, idx: Tensor, input_pos: Tensor, input_pos_maxp1=None) -> Tensor:
        before = int(input_pos[0])
        self.read = torch.cat([self.read[:, :before], idx], -1)
        return self.logits(self.read)[:, before:]


def litgpt(temperature: float = 1.0) -> WholeRound:
    from litgpt.generate.speculative_decoding import speculative_decoding
    def step(target, draft, K):
        said = speculative_decoding(
            _Placed(draft), _Placed(target), PROMPT[0], torch.tensor([0]), 1, K,
            temperature=temperature)
        return said.tolist()
    return step


def csaq_quant() -> WholeRound:
    from csaq.inference import CSAQInferenceEngine
    def step(target, draft, K):
        engine = CSAQInferenceEngine.__new__(CSAQInferenceEngine)
        def model(input_ids, past_key_values, use_cache):
            read = () if past_key_values is None else (past_key_values[0][0][:, 0, :, 0],)
            ids = torch.cat([*read, input_ids], -1)
            logits = (target if engine._in_verify else draft)(ids)[:, -input_ids.shape[1]:]
            return SimpleNamespace(logits=logits, past_key_values=((ids[:, None, :, None],),))
        model.eval = lambda: None
        engine.model, engine.tokenizer, engine.device = model, None, torch.device("cpu")
        engine._hooks, engine._in_verify, engine.verbose = [(None,) * 4], False, False
        counted = ["total_tokens", "accepted_tokens", "backpressure_events"]
        engine.telemetry = dict.fromkeys(counted, 0)
        ids, _ = engine.generate(PROMPT, speculative=True, lookahead=K, max_new_tokens=K)
        return ids[0, 1:].tolist()
    return step


def medusa_llm() -> WholeRound:
    from medusa.model.utils import evaluate_posterior, generate_candidates
    def step(target, draft, K):
        ids = torch.cat([PROMPT, target(PROMPT)[:, -1:].argmax(-1)], -1)
        heads = []  # each head's logits for the place after the last
        for _ in range(K):
            heads.append(draft(ids)[:, -1:])
            ids = torch.cat([ids, heads[-1].argmax(-1)], -1)
        candidates, _ = generate_candidates(
            torch.stack(heads), target(PROMPT), [1] * K, list(range(K + 1)), 1.0)
        logits = target(torch.cat([PROMPT, candidates], -1))[:, 1:]
        best, accepted = evaluate_posterior(logits, candidates, 1.0, .09, .3)  # its own defaults
        return candidates[best, :int(accepted) + 1].tolist()
    return step


def eagle_llm() -> WholeRound:
    from eagle.model import utils
    from eagle.model.cnets import Model
    utils.random = SimpleNamespace(random=lambda: torch.rand(()))  # it draws with Python's
    def as_is(ids, logits): return logits
    def step(target, draft, K):
        first, told, row = Model.sample(None, draft(PROMPT)[:, -1], as_is, k=2)
        paths = [torch.cat([PROMPT, first[:, i:i + 1]], -1) for i in range(2)]
        probs, rows = [[1., float(prob)] for prob in told[0]], [row]
        for _ in range(K - 1):  # two children of the root, then a chain below each
            drawn = [Model.sample(None, draft(path)[:, -1], as_is) for path in paths]
            paths = [torch.cat([path, x], -1) for path, (x, _, _) in zip(paths, drawn)]
            for each, (_, prob, _) in zip(probs, drawn): each.append(float(prob))
            rows.append(torch.cat([row for _, _, row in drawn]))
        candidates = torch.cat(paths)
        tree = torch.cat([PROMPT[0], first[0]])[None]
        rest = [[]] * (K - 1)  # below the root's children there are no siblings
        best, num_accepted, next_row = utils.evaluate_posterior(
            torch.cat([target(path) for path in paths]), candidates, as_is,
            torch.tensor(probs, dtype=row.dtype), rows,
            [[0, 0] + [i] * (K - 1) for i in range(2)], tree, [[[], [], *rest], [[], [1], *rest]])
        said = candidates[best, 1:1 + int(num_accepted)].tolist()
        return [*said, int(torch.multinomial(next_row, 1))]
    return step


def speculative_decoding() -> WholeRound:
    module = importlib.import_module("speculative_decoding.speculative_decoding")
    module.log = torch.log  # theirs keeps u from 0, which has probability 0
    def net(logits):
        def call(ids, **_): return logits(ids), (torch.zeros(1, 1, ids.shape[1], 1), None)
        return call
    def step(target, draft, K):
        said, _ = module.speculative_decoding(
            net(target), net(draft), PROMPT, K + 2, gamma=K, filter_thres=0.)
        return said[0].tolist()
    return step


def flashmap() -> WholeRound:
    from flashmap.modeling_flashmap import FlashMapDraftModel
    def step(target, draft, K):
        read = []
        def model(ids, position_ids=None, **_):
            del read[0 if position_ids is None else int(position_ids[0, 0]):]
            read.extend(ids[0].tolist())
            return SimpleNamespace(logits=target(torch.tensor([read]))[:, -ids.shape[1]:])
        model.generation_config = SimpleNamespace(eos_token_id=None)
        model.get_input_embeddings = model.get_output_embeddings = lambda: None
        drafter = SimpleNamespace(
            check_target=lambda target: None, device=torch.device("cpu"), dtype=torch.float32,
            config=SimpleNamespace(block_size=K, hidden_size=1, num_attention_heads=1,
                                   num_hidden_layers=1),
            target_features=lambda target: nullcontext(lambda: PROMPT),
            extend_context=lambda cache, features: None,
            # its places don't know each other's tokens: the draft's rows after token 0 serve
            draft=lambda *_, **__: draft(torch.zeros(1, K, dtype=torch.long)))
        found = FlashMapDraftModel.spec_generate(drafter, model, PROMPT, K + 1, temperature=1.0)
        return found.sequences[0, 1:].tolist()
    return step


def transformers_sampling(weight: float | None = None) -> VerifyRule:
    from transformers.generation.utils import _speculative_sampling
    def verify(p, q, tokens, rng):
        said, accepted = _speculative_sampling(
            torch.tensor([[0, *tokens]]), q.log()[None], len(tokens), p.log()[None], weight)
        return int(accepted), int(said[0, -1])
    return verify


class _Gemma4Assistant:
    "A function with the name and the settings that the generator looks for."
    device = torch.device("cpu")
    def __init__(self, call: Callable, settings): self.call, self.generation_config = call, settings
    def __call__(self, **inputs): return self.call(**inputs)


def transformers_single_position() -> WholeRound:
    from transformers import GenerationConfig
    from transformers.generation.candidate_generator import (
        SinglePositionMultiTokenCandidateGenerator,
    )
    rule, nothing = transformers_sampling(), torch.zeros(1, 1, 1)
    def step(target, draft, K):
        ids = [0]
        def assistant(**_):
            logits = draft(torch.tensor([ids]))[:, -1:]
            ids.append(int(logits.argmax()))  # what the generator takes, too
            return SimpleNamespace(logits=logits, last_hidden_state=nothing)
        generator = SinglePositionMultiTokenCandidateGenerator(
            _Gemma4Assistant(assistant, GenerationConfig(num_assistant_tokens=K)),
            lambda ids: nothing, GenerationConfig(max_length=99, do_sample=True))
        states = SimpleNamespace(hidden_states=(torch.zeros(1, 2, 1),), shared_kv_states={})
        drafted, logits = generator.get_candidates(
            PROMPT, model_kwargs={}, model_outputs=states, is_first_iteration=False,
            n_last_matches=0)
        p, q = target(drafted)[0].softmax(-1), logits[0].softmax(-1)
        tokens = drafted[0, 1:].tolist()
        num_accepted, next_token = rule(p, q, tokens, None)
        return [*tokens[:num_accepted], next_token]
    return step


class _Trimmed:
    "A cache that holds the tokens themselves, as mlx-lm asks for one."
    state: tuple = ()
    def __init__(self): self.read = []
    def is_trimmable(self) -> bool: return True
    def trim(self, n: int) -> int:
        del self.read[len(self.read) - n:]
        return n


def mlx_lm() -> WholeRound:
    import mlx.core as mx
    from mlx_lm.generate import speculative_generate_step
    def model(logits):
        def call(ids, cache):
            cache[0].read += ids[0].tolist()
            rows = logits(torch.tensor([cache[0].read]))[:, -ids.shape[1]:]
            return mx.array(rows.float().numpy())
        call.layers = [None]
        return call
    def sampler(logprobs):  # mlx's own random numbers can't be followed; torch's can
        rows = torch.tensor(logprobs.tolist(), dtype=torch.float64).exp()
        return mx.array(torch.multinomial(rows, 1)[:, 0].tolist(), dtype=mx.uint32)
    def step(target, draft, K):
        said = speculative_generate_step(
            mx.array([0]), model(target), model(draft), num_draft_tokens=K, max_tokens=K + 1,
            sampler=sampler, prompt_cache=[_Trimmed(), _Trimmed()])
        return [int(token) for token, _, _ in said]
    return step


def findings(report: VerifyReport) -> dict: # the part of a verdict that says what was found
    "A report for JSON."
    judged = report.lossless or report.lossy > 0
    found = {
        "lossless": report.lossless if judged else None, "cases": report.cases,
        "lossy_cases": report.lossy, "error": float(report.error), "tolerance": report.tolerance,
        "case": str(report.worst) if report.lossy else None, "raised": report.raised or None,
        "false_alarm": 0.0,  # nothing is drawn
    }
    return found | (_worst_text(report) if report.lossy else {})


def _worst_text(report: VerifyReport) -> dict:
    "The text whose probability is furthest off, in the worst case; and the error as a fraction."
    def off(text): return abs(report.found.get(text, 0) - report.expected.get(text, 0))
    text = max(report.found.keys() | report.expected.keys(), key=off)
    near = report.error.limit_denominator(1000)
    exact = abs(near - report.error) < 1e-8  # what float32 leaves
    return {
        "fraction": str(near) if exact else None, "text": list(text),
        "has": float(report.found.get(text, 0)), "due": float(report.expected.get(text, 0)),
    }


def judge_rule(rule: VerifyRule, run: int) -> dict: # findings; `run` is for those who draw
    "The exact distribution of a verify function."
    return findings(check_verify(rule, route="tensors"))


def judge_round(
    fn: WholeRound, run: int,
    sizes: Sequence[tuple[int, int]] = SIZES,          # (K, V)
    given: Callable[[Next], Next] = lambda distribution: distribution,  # what is made of both models' distributions
    wanted: Callable[[Next], Next] = lambda distribution: distribution,  # what the options make of the target's
) -> dict: # findings
    "The exact distribution of a whole round."
    cases = [replace(case, p=given(case.p), q=given(case.q))
             for case in verify_cases(sizes, draft=sampled)]
    return findings(check_round("round", fn, cases, wanted))

FEW = [(1, 2), (1, 3), (2, 2)]  # for what goes on for several rounds, or has a tree
judge_open = partial(judge_round, sizes=FEW, given=without_zeros)


LITGPT_NEEDS = tuple(f"{name}=={version}" for name, version in {
    "lightning": "2.6.6", "lightning-utilities": "0.15.3", "pytorch-lightning": "2.6.6",
    "torchmetrics": "1.9.0", "jsonargparse": "4.53.0",
}.items())


@dataclass(frozen=True)
class Audited:
    "A package on the index, and how to ask it."
    name: str                     # on the index; what follows a slash tells its functions apart
    version: str
    function: str                 # the one that is asked
    adapter: Callable             # imports it; gives what `judge` takes
    judge: Callable[..., dict] = judge_rule  # (what the adapter gives, run) → findings
    kind: str = "rule"            # or "engine"
    needs: tuple[str, ...] = ()   # other packages that it can't do without, "name==version"
    temperature: float = 1.0      # with which it is asked
    options: str = ""             # others that are not the package's own choice
    unseen: str = ""              # what was not asked
    promises: bool = True         # whether it says that it is lossless
    does: str = ""                # what is wrong about it, if anything is
    mistake: str = ""             # which of the gallery's
    mend: str = ""                # what would mend it

    @property
    def requirements(self) -> tuple[str, ...]: # for pip
        "All that is installed to ask it."
        return (f"{self.name.partition('/')[0]}=={self.version}", *self.needs)

    def about(self) -> dict: # for JSON
        "What a verdict says before anything was asked."
        return {
            "name": self.name, "version": self.version, "kind": self.kind,
            "function": self.function, "temperature": self.temperature, "options": self.options,
            "unseen": self.unseen, "promises": self.promises,
            "requirements": list(self.requirements), "command": f"specdec audit {self.name}",
        }

    def ask(self, run: int = 0) -> dict: # for JSON
        """The verdict on a package that can be imported here, and what it rests on. Another `run`
        is another seed, where anything is drawn."""
        start = time.perf_counter()
        try: found = self.judge(self.adapter(), run)
        except Exception as error:
            found = no_verdict(f"{type(error).__name__}: {error}")
        found = self.about() | found | {"run": run, "seconds": time.perf_counter() - start}
        return self.explained(found)

    def explained(self, found: dict) -> dict:
        "A verdict, and if it is a bad one, why."
        if found["lossless"] is not False: return found
        return found | {"does": self.does, "mistake": self.mistake, "mend": self.mend}


def no_verdict(why: str) -> dict: # findings
    "What is said of a package that could not be asked."
    return {"lossless": None, "cases": 0, "lossy_cases": 0, "error": 0.0, "raised": why,
            "false_alarm": 0.0}


_RIGHT = (
    Audited("dflash", "0.1.0", "dflash.model._rejection_sample", dflash,
            unseen="its draft model and its loop"),
    Audited("flashspec", "0.3.1", "flashspec.sampling.rejection.rejection_sample", flashspec,
            unseen="the bonus token, which its caller draws"),
    Audited("economize", "0.3.2", "economize.decoding.verifiers.RejectionVerifier.verify",
            economize, unseen="its selectors other than temperature 1, and its trees"),
    Audited("mini-infer", "0.2.5", "mini_infer.speculative.verifier.speculative_step", mini_infer,
            judge_round, unseen="its caches"),
    Audited("sequential-speculative-decoding", "0.1.1",
            "seqspecdecod.standard_sd.standard_speculative_step", sequential_speculative_decoding,
            judge_round, unseen="its loop over rounds"),
    Audited("specdec", "0.2.0", "specdec.decoder.SpecDecoder.verify", other_specdec,
            unseen="its loop and its tokenizer; it has no temperature"),
    Audited("speculative-decoding", "0.2.0",
            "speculative_decoding.speculative_decoding.speculative_decoding", speculative_decoding,
            partial(judge_round, sizes=FEW), needs=("beartype==0.23.1", "einops==0.8.2"),
            options="filter_thres 0", unseen="batches, its caches, and the guard of its Gumbel "
            "noise against the logarithm of 0"),
    Audited("flashmap", "0.1.0", "flashmap.modeling_flashmap.FlashMapDraftModel.spec_generate",
            flashmap, partial(judge_round, sizes=FEW),
            unseen="its draft model, its caches, and the kernels for other engines"),
    Audited("eagle-llm", "1.2.1", "eagle.model.utils.evaluate_posterior, cnets.Model.sample",
            eagle_llm, judge_open, options="two children of the root, chains below; "
            "distributions without zeros", unseen="larger trees, filters, its caches"),
    Audited("litgpt", "0.5.13", "litgpt.generate.speculative_decoding.speculative_decoding",
            litgpt, partial(judge_round, sizes=FEW), needs=LITGPT_NEEDS,
            unseen="its caches and its loop; top-p"),
    Audited("transformers", "5.23.0", "transformers.generation.utils._speculative_sampling",
            transformers_sampling, unseen="candidate generators and caches"),
    Audited("mlx-lm", "0.32.2", "mlx_lm.generate.speculative_generate_step", mlx_lm,
            partial(judge_round, sizes=FEW), needs=("mlx==0.32.4", "mlx-cpu==0.32.4"),
            options="exact match", unseen="its own sampler, and its caches"),
)


_WRONG = (
    Audited("rotalabs-accel", "1.1.1", "rotalabs_accel.speculative.sampling.rejection_sample",
            rotalabs_accel, unseen="its bonus token, which the caller draws",
            does="After a rejection it takes the draft's probability away from the rejected token, "
                 "and from no other.",
            mistake="the residual of a sure draft, for a draft that was sampled",
            mend="subtract the draft's whole row, which the function would have to be given"),
    Audited("rotalabs-accel/verify_tokens", "1.1.1",
            "rotalabs_accel.speculative.core.verify_tokens", rotalabs_verify_tokens, judge_open,
            options="top_p .9, its default, which takes no token from these distributions",
            does="The same residual; and the bonus token is the likeliest one, since the threshold "
                 "of top-p arrives at its sampler as the k of top-k.",
            mistake="bonus token from another distribution than the target's",
            mend="name the arguments in that call; hand the draft's rows over"),
    Audited("rotalabs-accel/eagle_verify", "1.1.1",
            "rotalabs_accel.speculative.eagle.eagle_verify", rotalabs_eagle_verify, judge_open,
            options="use_sampling; distributions without zeros",
            does="After a rejection it takes the probability of the drafted token away from every "
                 "token, and its bonus token is always the likeliest.",
            mistake="a residual of something else than q; bonus token from another distribution",
            mend="subtract the draft's row; draw the bonus token from the target's"),
    Audited("tightwad", "0.5.4", "tightwad.speculation.verify_draft_tokens", tightwad,
            unseen="the server that it asks, which decides what the target's token is",
            does="After a rejection it says the target's own token for that place (read here as a "
                 "sample of the target, the kindest reading), and not one from the residual.",
            mistake="resample from p",
            mend="draw from the residual, for which the server must send the target's whole row"),
)


_WRONG_ROUNDS = (
    Audited("sequential-speculative-decoding/capped_hsd", "0.1.1",
            "seqspecdecod.capped_hsd.capped_hsd_step", capped_hsd, judge_open,
            options="distributions without zeros",
            unseen="distributions with zeros, for which it fails",
            does="Its prefixes are one token too short: the chance to keep all draft tokens "
                 "comes from all but the last, and what is drawn after a rejection belongs to the "
                 "place before.",
            mistake="off by one",
            mend="count prefixes as its helpers do: ask them at gamma, not gamma − 1, and at "
                 "tau + 1, not tau"),
    Audited("litgpt/greedy", "0.5.13",
            "litgpt.generate.speculative_decoding.speculative_decoding", partial(litgpt, 0.),
            partial(judge_open, wanted=at_zero), needs=LITGPT_NEEDS, temperature=0.0,
            options="distributions without zeros and ties",
            does="At temperature 0 it drafts the likeliest token, but accepts it with the ratio of "
                 "the two softmax probabilities, as if it had been drawn.",
            mistake="greedy draft with a softmax q, on both sides",
            mend="make both distributions one-hot at temperature 0: accept what is the target's "
                 "likeliest token, and nothing else"),
    Audited("csaq-quant", "0.6.0", "csaq.inference.CSAQInferenceEngine.generate", csaq_quant,
            partial(judge_round, sizes=FEW), unseen="its quantised layers",
            does="Each draft token is judged by the target's row after it, which is about the next "
                 "token; and between rounds the cache keeps one token too many.",
            mistake="off by one in the rows of the logits",
            mend="judge draft token k by row k of the verifying pass, and keep one token less "
                 "in the cache"),
    Audited("transformers/single_position", "5.23.0", "transformers.generation."
            "candidate_generator.SinglePositionMultiTokenCandidateGenerator",
            transformers_single_position, partial(judge_round, sizes=FEW),
            options="do_sample", unseen="the models that use it",
            does="It drafts the likeliest token each time, and reports the softmax as the "
                 "distribution it was drawn from.",
            mistake="greedy draft with a softmax q",
            mend="draw the token from that softmax, or report a one-hot q"),
)


_LOSSY_BY_DESIGN = (
    Audited("medusa-llm", "0.1", "medusa.model.utils.evaluate_posterior", medusa_llm, judge_open,
            options="its default thresholds; one candidate; distributions without zeros",
            promises=False,
            unseen="trees",
            does="Typical acceptance: a draft token that the target finds likely enough is kept, "
                 "at any probability that the draft gave it; nothing is drawn at all.",
            mistake="none: its authors say that it is not the target's distribution",
            mend="rejection sampling, where the target's distribution is wanted"),
    Audited("transformers/ensemble", "5.23.0",
            "transformers.generation.utils._speculative_sampling",
            partial(transformers_sampling, .5), options="assistant_ensemble_weight .5",
            promises=False,
            does="It verifies against a mixture of the target and the draft, so that more draft "
                 "tokens are kept.",
            mistake="none: its documentation calls it a controlled bias",
            mend="leave the weight unset"),
)
RULES = (*_WRONG, *_WRONG_ROUNDS, *_RIGHT, *_LOSSY_BY_DESIGN)
