"Where decoding reaches its ends: any K, drafters in drafters, streams left alone, interrupts, seeds, odd schemas."
import copy
from threading import Event, Thread

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from helpers import examples, ids_of, tiny
from helpers_drafters import random_head, random_target
from helpers_text import talker
from specdec.device.loop import LONGEST_DRAFT, DeviceDecoder
from specdec.drafters import costs
from specdec.drafters.adaptive import MOST, AdaptiveDrafter
from specdec.drafters.base import Draft, NoDrafter
from specdec.drafters.choose import HybridDrafter
from specdec.drafters.colder import TemperatureScaledDrafter
from specdec.drafters.costs import Prices
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.lookup import SuffixDrafter, SuffixIndex, SuffixState
from specdec.drafters.model import ModelDrafter
from specdec.drafters.tree import TreeDrafter
from specdec.drafters.tree_hybrid import TreeHybrid
from specdec.engine.constraints import JSONSchema, Regex
from specdec.engine.logprobs import WatchedLM
from specdec.errors import InputError, ModelError
from specdec.loop import speculate
from specdec.pair import Pair
from specdec.result import GenerationResult
from specdec.sampling import SamplingParams, SeededRandom, seed_generator
from specdec.verify import sample_and_match

FLAT = (1.0,) * 16
SHAPE = [(0,), (1,), (0, 0), (2,)]
PROMPT = [1, 5, 2, 7, 9, 1, 5, 2, 7, 9, 1, 5, 2]
FREE = Prices(forwards={1: .01, 17: .01}, drafts=[{1: 1e-5}, {1: .0005, 4: .002}])  # as if rows were free


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    target = random_target(tmp_path_factory.mktemp("reach"))
    target.batch_invariant = False  # as in every other dtype: there a pair takes trees
    return target


@pytest.fixture(scope="module")
def head(target): return random_head(target)


@pytest.fixture
def free_rows(monkeypatch, tmp_path):
    monkeypatch.setattr(costs, "take_prices", lambda *given: FREE)
    monkeypatch.setattr(costs, "cache_home", lambda: tmp_path)


def plain(target): return ids_of(speculate(target, NoDrafter(), PROMPT, SamplingParams(), SeededRandom(0), 1, 20))


# K

@pytest.mark.parametrize("K", [10**6, 10**9, 10**18])
def test_a_tree_takes_memory_for_its_nodes_not_for_K(target, head, K, monkeypatch, free_rows):
    asked, cache = [], type(target).new_cache
    monkeypatch.setattr(type(target), "new_cache", lambda self, n: asked.append(n) or cache(self, n))
    static = TreeDrafter(head, target, shape=SHAPE)
    for drafter in (static, TreeDrafter(head, target, width=2, depth=3), SuffixDrafter(),
                    TreeHybrid(SuffixDrafter(), static, c=(0.0, 0.0), verify=FLAT)):
        assert ids_of(speculate(target, drafter, PROMPT, SamplingParams(), SeededRandom(0), K, 20)) == plain(target)
    pair = Pair(target, HybridDrafter(SuffixDrafter(), HeadDrafter(head, target)))
    result = pair.generate(PROMPT, max_new_tokens=20, K=K)
    assert result.generated_ids == plain(target) and "tree" in result.drafter
    assert max(asked) <= 2 * target.context_length


@pytest.mark.parametrize("K", [10**6, 10**18])
def test_nor_on_the_device(target, head, K):
    for drafter in (TreeDrafter(head, target, shape=SHAPE), SuffixDrafter()):
        decoder = DeviceDecoder(target, drafter)
        assert ids_of(decoder.speculate(PROMPT, SamplingParams(), 0, K, 20)) == plain(target)
        assert all(loop.state.K <= LONGEST_DRAFT for loop in decoder.loops.values())


@pytest.mark.parametrize("shape", [[(0,), (9,), (1,), (0, 0), (0, 9), (9, 0)], [(9,), (0,)]], ids=str)
@pytest.mark.parametrize("K", [1, 3, 9])
def test_ranks_that_a_small_head_has_not_are_left_out_by_both_loops(target, head, shape, K):
    tree = TreeDrafter(head, target, shape=shape)
    assert ids_of(speculate(target, tree, PROMPT, SamplingParams(), SeededRandom(0), K, 20)) == plain(target)
    assert ids_of(DeviceDecoder(target, tree).speculate(PROMPT, SamplingParams(), 0, K, 20)) == plain(target)
    with pytest.raises(InputError, match="within the 8 tokens"): TreeDrafter(head, target, shape=[(9,), (9, 0)])


@pytest.mark.parametrize("K", ["adaptive", 40])
@pytest.mark.parametrize("rule", [None, sample_and_match])
def test_a_text_reads_no_more_rows_than_keep_their_bits(K, rule):
    seen, target = [], tiny()
    class EagerState(SuffixState):
        def propose(self, K, sampling, rng):
            seen.append(K)
            return Draft([1] * K)
        def reach(self, K): return K
    class Eager(SuffixDrafter):
        def start(self, tokens, *others): return EagerState(self.per_match, SuffixIndex(), tokens)
    def most(temperature, batch_invariant):
        seen.clear()
        target.batch_invariant = batch_invariant
        drafter = Eager() if K == 40 else AdaptiveDrafter(Eager(), Wants())
        Pair(target, drafter).generate(
            [1, 2, 3], K=K, max_new_tokens=50, temperature=temperature, seed=1, verify=rule)
        return max(seen)
    class Wants:
        lookahead = 99
        def observe_step(self, proposed, accepted): pass
        def reset(self): pass
    free = MOST if K == "adaptive" else K
    assert most(0.0, True) == most(1.0, True) == 15
    assert most(0.0, False) == most(1.0, False) == free  # no bits are at stake


# drafters inside drafters

def test_a_tree_beside_lookup_decodes_a_list(target, head):
    pair = Pair(target, TreeHybrid(SuffixDrafter(), TreeDrafter(head, target, shape=SHAPE), c=(0.0, 0.0), verify=FLAT))
    found = pair.generate([PROMPT, [2, 3]], max_new_tokens=20)
    assert [r.generated_ids for r in found][0] == plain(target) and len(found) == 2


def test_a_draft_model_beside_a_tree(target, head, free_rows):
    "Greedy text is plain decoding's; sampled text judges what the model drew (its law: test_tree_hybrid)."
    model = ModelDrafter(target.skip([1]), target.vocab_size)
    drafter = HybridDrafter(model, TemperatureScaledDrafter(HeadDrafter(head, target)))
    pair = Pair(target, drafter)
    result = pair.generate(PROMPT, max_new_tokens=20, K=9)
    assert "tree" in result.drafter and result.generated_ids == plain(target) and result.num_drafted > 0
    own = TreeHybrid(drafter.members[0], TreeDrafter(head, target, shape=SHAPE), c=(0.0, 0.0), verify=FLAT)
    sampled = Pair(target, own).generate(PROMPT, temperature=1.0, max_new_tokens=20, seed=0)
    assert sampled.num_drafted > 0 and sampled.is_lossless


@pytest.mark.parametrize("wrap", [
    TemperatureScaledDrafter, lambda tree: HybridDrafter(SuffixDrafter(), tree),
    lambda tree: HybridDrafter(TemperatureScaledDrafter(tree)),
], ids=["colder", "hybrid", "both"])
def test_a_tree_where_only_chains_are_handed_on_is_refused_at_once(target, head, wrap):
    pair = Pair(target, wrap(TreeDrafter(head, target, shape=SHAPE)))
    with pytest.raises(InputError, match="TreeHybrid"): pair.stream(PROMPT)
    with pytest.raises(InputError, match="TreeHybrid"): pair.generate([PROMPT, [2]])


# streams and interrupts

def answer_of(work, seconds=20):
    outcome = []
    def run():
        try: outcome.append(work())
        except Exception as error: outcome.append(error)
    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, "it waits for ever"
    return outcome[0]


def test_a_pair_that_is_left_alone_serves_others():
    "A thread leaves a stream alone, after it has used another pair; the pair serves others at once."
    one, other = Pair(talker(), talker(seed=1)), Pair(talker(), talker(seed=2))
    events, ready, done = one.stream("Hello", max_new_tokens=9), Event(), Event()
    def hold():
        next(events)
        other.generate("Hello", max_new_tokens=2)
        list(other.stream("Hello", max_new_tokens=2))
        ready.set()
        done.wait(30)
        events.close()
    holder = Thread(target=hold, daemon=True)
    holder.start()
    ready.wait(20)
    try: assert answer_of(lambda: one.generate("Hello", max_new_tokens=3)).num_tokens == 3
    finally:
        done.set()
        holder.join(20)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_interrupt_beside_log_probabilities_leaves_one_for_each_token(at, monkeypatch):
    real, count = WatchedLM.logprobs, []
    def interrupted(self, tokens):
        count.append(tokens)
        if len(count) == at: raise KeyboardInterrupt
        return real(self, tokens)
    pair = Pair(talker(), talker().skip([1]))
    due = pair.generate("Hello", max_new_tokens=20, logprobs=2)
    monkeypatch.setattr(WatchedLM, "logprobs", interrupted)
    result = pair.generate("Hello", max_new_tokens=20, logprobs=2)
    assert result.finish_reason == "interrupted" and result.num_tokens == len(result.logprobs) > 0
    assert result.logprobs == due.logprobs[:result.num_tokens]
    assert len(result.per_token_latencies) == result.num_tokens
    assert GenerationResult.from_json(result.to_json()) == result


# one seed, one text

def hybrid(target): return HybridDrafter(SuffixDrafter(), ModelDrafter(target.skip([1]), target.vocab_size))


def known(result): return result.generated_ids, result.rounds, result.costs


def draws_of(seed): return [SeededRandom(seed).uniform(), *(SeededRandom(seed).generator.get_state()[24:64].tolist())]


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_small_seeds_draw_what_they_always_did(seed):
    assert torch.equal(SeededRandom(seed).generator.get_state(), torch.Generator().manual_seed(seed).get_state())


def test_every_bit_of_a_seed_counts():
    found = {tuple(draws_of(seed)) for seed in [1, *(1 + 2**bit for bit in range(1, 64))]}
    assert len(found) == 64 and draws_of(-1) == draws_of(2**64 - 1) != draws_of(2**32 - 1)
    generator = torch.Generator()
    seed_generator(generator, 5 + 9 * 2**32)
    words = generator.get_state()[24:24 + 8 * 624].numpy().view(np.uint64)
    assert words.tolist() == np.random.RandomState([5, 9]).get_state()[1].tolist()


@pytest.mark.parametrize("loop", ["host", "device"])
def test_both_loops_use_them(loop):
    target = tiny()
    texts = {tuple(Pair(target, SuffixDrafter()).generate([1, 2], temperature=1.0, seed=seed, max_new_tokens=20,
             loop=loop).generated_ids) for seed in (3, 3 + 2**32, 3 + 2**63)}
    assert len(texts) == 3


# what is no grammar, no schema

class Silent:
    def start(self, model): return None


@pytest.mark.parametrize("grammar, said", [
    (JSONSchema, "make one of this class"), (Regex, "make one of this class"),
    (Silent(), "gave None"), ("x", "A grammar"),
], ids=["schema class", "regex class", "start gives None", "text"])
@pytest.mark.parametrize("method", ["plain", "speculative"])
def test_what_is_no_grammar_is_told(grammar, said, method):
    with pytest.raises(InputError, match=said):
        Pair(talker(eos=frozenset({2}))).stream("Hello", grammar=grammar, method=method)


def circle():
    schema = {"type": "object"}
    schema["properties"] = {"again": [schema]}
    return schema


def deep(n):
    schema: dict = {}
    for _ in range(n): schema = {"not": schema}
    return schema


def bomb():
    value: list = ["lol"]
    for _ in range(40): value = [value] * 9
    return {"enum": value}


@pytest.mark.parametrize("schema, said", [
    (circle(), "holds itself"), (deep(5000), "levels"), (deep(200), "levels"), (bomb(), "values"),
    ({"const": 10**30}, "64 bits"), ({"const": 10**5000}, "64 bits"), ({"const": "\ud800"}, "half a character"),
    ({"\ud800": 1}, "half a character"), ({"const": b"a"}, "not b'a'"), ({"enum": {1}}, "not {1}"),
    ({"const": float("nan")}, "nan"), ({1: True}, "keys"), ([{}], "a dict"),
], ids=["circle", "very deep", "deep", "bomb", "30 digits", "5000 digits", "surrogate", "surrogate key", "bytes", "set",
        "nan", "number as key", "list"])
def test_a_schema_that_cannot_be_is_told_in_one_line(schema, said):
    with pytest.raises(InputError, match=said) as error: JSONSchema(schema)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("pattern, said", [("\ud800", "half a character"), ("(" * 10**5, "No text can fit")])
def test_a_pattern_that_cannot_be_is_told_in_one_line(pattern, said):
    with pytest.raises(InputError, match=said) as error: Regex(pattern)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


KEYS = st.sampled_from([
    "type", "properties", "items", "enum", "const", "minimum", "maximum", "minLength", "maxLength", "pattern", "anyOf",
    "required", "$ref", "multipleOf", "format", "prefixItems", "\ud800", "\0",
])
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(10**29, 10**31), st.floats(), st.text(max_size=5),
    st.binary(max_size=2),
    st.sampled_from(["string", "integer", "number", "object", "array", "#", "date", "(", "[a-z]+", "\ud800"]),
)
SCHEMAS = st.dictionaries(KEYS, st.recursive(LEAVES, lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)), max_leaves=12), max_size=4)


@settings(max_examples=examples(50), deadline=None)
@given(SCHEMAS)
def test_any_schema_is_one_or_is_refused(schema):
    try: JSONSchema(schema).start(talker(eos=frozenset({2}))).allowed()
    except InputError: pass


@settings(max_examples=examples(50), deadline=None)
@given(st.one_of(st.text(max_size=12), st.text("ab()[]{}|*+?\\^$.-0123456789,:pPdwx\ud800", max_size=12)))
def test_any_pattern_is_one_or_is_refused(pattern):
    try: Regex(pattern).start(talker(eos=frozenset({2}))).allowed()
    except InputError: pass


@pytest.mark.parametrize("held, said", [
    (b"[" * 10**5, "levels"), (b'{"a":' * 1000 + b"1" + b"}" * 1000, "levels"),
    (b'{"const": ' + b"1" * 5000 + b"}", "no JSON"),
    (b'{"const": 1' + b"0" * 30 + b"}", "64 bits"), (b'{"const": "\\ud800"}', "half a character"),
    (b'{"const": NaN}', "nan"),
    (b"\xff\xfe\xff", "no JSON"), (b"", "no JSON"), (b" " * 10_000_001, "more than 10 MB"),
], ids=["deep", "deep dict", "5000 digits", "30 digits", "surrogate", "nan", "no text", "empty", "large"])
def test_a_schema_file_that_cannot_be_is_one_line_and_exit_2(held, said, tmp_path):
    from specdec.app.cli import app
    file = tmp_path / "schema.json"
    file.write_bytes(held)
    result = CliRunner().invoke(app, ["generate", "Hello", "--json-schema", str(file)])
    assert result.exit_code == 2 and said in " ".join(result.output.split()), result.output
    assert "Traceback" not in result.output and not isinstance(result.exception, (RecursionError, ValueError))


# chat templates

ENDLESS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


def test_a_chat_template_that_goes_round_and_round_is_stopped(monkeypatch):
    from specdec.models import hub
    monkeypatch.setattr(hub, "TEMPLATE_SECONDS", 0.3)
    target = talker()
    target.tokenizer = copy.deepcopy(target.tokenizer)
    target.tokenizer.chat_template = ENDLESS
    said = answer_of(lambda: Pair(target, NoDrafter()).stream([{"role": "user", "content": "Hello"}]))
    assert isinstance(said, ModelError) and "more than 0.3 seconds" in str(said)
