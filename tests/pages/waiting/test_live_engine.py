"""The live page's engine in a headless Chromium, held to Python: its numbers, its tokens, its draws; and what it says
to files that are wrong."""
import importlib.util
import json
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from helpers_live import ENGINE, LIVE, Engine, file_at, served, weights
from specdec.drafters.base import NoDrafter
from specdec.drafters.choose import COST, PRIOR, Chooser
from specdec.drafters.clock import Clock, Watch
from specdec.drafters.head import load_head
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.load import shipped
from specdec.drafters.lookup import NGramDrafter
from specdec.errors import NumericalError
from specdec.loop import speculate
from specdec.models.hub import encode, prompts
from specdec.pair import load_pair
from specdec.sampling import SamplingParams, SeededRandom, check_logits

ROOT = Path(__file__).parents[3]
GAP = 1e-3  # of the two best logits: nearer ones are a tie, which another order of the same sums may break
EDGE = 1e-4  # so far other sums may move the edge between two tokens, of a line from 0 to 1
MESSAGE = "Repeat after me, three times: the boats went out to sea in the morning."


@pytest.fixture(scope="module")
def engine(browser):
    "The engine, loaded once from its parts."
    with served() as server:
        made = Engine(browser, server)
        ready = made.load()
        assert ready["info"] == {"name": "Smollm2 135M 8k Lc100K Mix1 Ep2", "bytes": 118094784, "vocab": 49152,
                                 "head": True, "eos": [2]}, ready
        yield made
        made.close()


@pytest.fixture(scope="module")
def pair():
    "The default pair, in float32."
    return load_pair("smollm2", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def drafters(pair):
    "Python's drafters by the page's names: a chain of K, without an early end."
    head = HeadDrafter(load_head(shipped("smollm2-head"), pair.target), pair.target)
    return {"plain": NoDrafter(), "lookup": NGramDrafter(), "head": head}


def chat(pair, message: str) -> list[int]:
    "A message through the chat template."
    return encode(pair.tokenizer, [{"role": "user", "content": message}])


def python(pair, drafter, ids, K, n, temperature=0.0, seed=0) -> list:
    "The rounds of `specdec`."
    rng = SeededRandom(seed)
    return list(speculate(pair.target, drafter, ids, SamplingParams(temperature), rng, K, n, pair.eos_ids,
                          draft_sampling=SamplingParams()))


def is_tie(pair, ids: list[int], a: int, b: int) -> bool:
    "Whether these two are the best of what follows, and next to equal."
    logits = pair.target.forward(torch.tensor([ids]), last=1)[0, -1]
    best = logits.topk(2)
    return {a, b} == set(best.indices.tolist()) and (best.values[0] - best.values[1]).item() < GAP


def is_edge(pair, ids: list[int], token: int, u: float, temperature: float) -> bool:
    "Whether u lies next to this token's piece of what follows, laid side by side from 0 to 1."
    logits = pair.target.forward(torch.tensor([ids]), last=1)[0, -1]
    ends = SamplingParams(temperature).probs(logits).double().cumsum(-1)
    return ends[token - 1] - EDGE < u < ends[token] + EDGE


def hold(pair, ids: list[int], found: dict, rounds: list, temperature: float = 0, seed: int = 0) -> None:
    "The same tokens round by round, up to the first tie; sampled, up to the first number that rounding moves."
    expected, rng = [token for r in rounds for token in r.emitted], SeededRandom(seed)
    for i, (ours, theirs) in enumerate(zip(found["ids"], expected)):
        u = rng.uniform()  # one a token
        if ours == theirs: continue
        before = [*ids, *expected[:i]]
        near = is_edge(pair, before, ours, u, temperature) if temperature else is_tie(pair, before, ours, theirs)
        assert near, (i, ours, theirs, u)
        return
    assert found["ids"] == expected
    assert [([d["id"] for d in r["drafts"]], sum(d["accepted"] for d in r["drafts"]), r["emitted"])
            for r in found["rounds"]] == [(list(r.drafted), r.accepted, list(r.emitted)) for r in rounds]


# Of a forward, of one behind a rollback, and of the head; of the logits every thirteenth, since they are many.
STATES = """([ids, cut, again]) => {
  const {model, head} = engine, some = (row) => Array.from(row).filter((_, i) => i % 13 === 0);
  const rows = (n) => [...Array(n).keys()].map((r) => some(model.row(r)));
  model.rollback(0);
  head.rollback(0);
  model.forward(ids.slice(0, cut));
  const first = rows(cut);
  model.rollback(again);
  model.forward(ids.slice(again));
  const features = Array.from(model.arena.read(model.features, ids.length * 1728));
  return {first, second: rows(ids.length - again), features,
          read: Array.from(head.read(ids.slice(1), 0)), step: Array.from(head.step([50]))};
}"""


def test_logits_features_and_the_heads_logits_are_pythons_and_a_rollback_changes_no_bit(engine, pair):
    ids = pair.tokenizer("The quick brown fox jumps over the lazy dog. def f(x): return")["input_ids"][:14]
    found = {name: torch.tensor(each) for name, each in engine.ask(STATES, [ids, 9, 6]).items()}
    layers = (7, 18, 29)
    logits, features = (each[0] for each in pair.target.forward(torch.tensor([ids]), layers=layers))
    logits = logits[:, ::13]
    # 576 to 1,536 products a sum, 30 layers: some 1e-5 of numbers up to 34
    assert (found["first"] - logits[:9]).abs().max() < 5e-4
    assert (found["second"] - logits[6:]).abs().max() < 5e-4
    assert torch.equal(found["first"][6:], found["second"][:3]), "a row depends on how many are read"
    theirs = found["features"].view(len(ids), -1)
    assert ((theirs - features).abs() / (1 + features.abs())).max() < 5e-4
    head = HeadDrafter(load_head(shipped("smollm2-head"), pair.target), pair.target)
    state = head.start([*ids], features[:-1], 64)
    read, last = state.catch_up()
    step, _ = head.head.step([50], last, state.cache)
    assert (found["read"] - read).abs().max() < 5e-4
    assert (found["step"] - step).abs().max() < 5e-4


TEXTS = [
    "def f(x):\n    return {'a': [1, 2.50, x**2]}  # 100%\n\n\n\tif x != 3: pass\r\n",
    "   leading and trailing   ",
    "",
    "I'm you're he'll WE'VE 'tis don''t",
    "naïve façade 東京は日本 Привет мир العربية हिन्दी",
    "👩‍👩‍👧‍👦 😀🏳️‍🌈 e\u0301 \u200b\ufeff x",
    "1234567890 3.14159 ½ ² ٣ ⅷ",
    "a\u00a0b\u2003c\u3000d\x85e\u2028f",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|><file_sep>",
    "\n\n \n  \t \n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "$%^&*()!!!___---```python",
    "\x00\x07\x1b",
    "ſ İ ß ﬁ",
]


def test_ids_are_those_of_pythons_tokenizer_and_give_the_text_again(engine, pair):
    texts = [*TEXTS, *(p.text for p in prompts()[:40])]
    found = engine.ask("(texts) => texts.map((text) => engine.tokenizer.encode(text))", texts)
    for text, ids in zip(texts, found, strict=True): assert ids == pair.tokenizer(text)["input_ids"], text
    plain = [text for text in texts if "<|" not in text]
    again = engine.ask("(texts) => texts.map((text) => engine.tokenizer.decode(engine.tokenizer.encode(text)))", plain)
    assert again == plain
    assert engine.ask("(text) => engine.tokenizer.chat(text)", MESSAGE) == chat(pair, MESSAGE)


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_uniform_numbers_are_pythons_bit_for_bit(engine, seed):
    rng = SeededRandom(seed)
    code = "(seed) => { const rng = new SeededRandom(seed); return [...Array(700)].map(() => rng.uniform()); }"
    assert engine.ask(code, seed) == [rng.uniform() for _ in range(700)]


@pytest.mark.parametrize("drafter, K", [("plain", 1), ("lookup", 4), ("head", 3)])
def test_a_greedy_text_is_pythons(engine, pair, drafters, drafter, K):
    ids = chat(pair, MESSAGE)
    found = engine.generate(prompt=MESSAGE, K=K, maxNewTokens=12, drafter=drafter)
    hold(pair, ids, found, python(pair, drafters[drafter], ids, K, 12))


@pytest.mark.parametrize("temperature", [.7, 1])
def test_a_sampled_text_is_pythons_of_the_same_seed_with_every_drafter(engine, pair, drafters, temperature):
    "The lane without drafts is Python's plain decoding, and those with drafts are that lane, token for token."
    ids = chat(pair, MESSAGE)
    for seed in (5, 6):
        options = {"ids": ids, "maxNewTokens": 12, "temperature": temperature, "seed": seed}
        plain = engine.generate(drafter="plain", **options)
        hold(pair, ids, plain, python(pair, drafters["plain"], ids, 1, 12, temperature, seed), temperature, seed)
        for drafter, K in (("lookup", 4), ("head", 3), ("head", 7)):
            found = engine.generate(drafter=drafter, K=K, **options)
            assert found["ids"] == plain["ids"], (drafter, K, seed)
            hold(pair, ids, found, python(pair, drafters[drafter], ids, K, 12, temperature, seed), temperature, seed)


def test_a_round_says_what_decided_it(engine):
    found = engine.generate(prompt=MESSAGE, K=2, maxNewTokens=24, drafter="head", temperature=1, seed=0)
    kinds, drawn, rng = set(), [], SeededRandom(0)
    for r in found["rounds"]:
        kinds.add(r["token"]["kind"])
        tried = [draft for draft in r["drafts"] if draft["own"]]  # the others stand behind the first that failed
        own = [*(draft["own"] for draft in tried), *([r["token"]] if r["token"]["kind"] != "corrected" else [])]
        assert [draft["accepted"] for draft in tried] == [draft["own"]["id"] == draft["id"] for draft in tried]
        assert [one["id"] for one in own] == r["emitted"]
        for one in own:
            assert one["from"] <= one["u"] < one["to"] and one["to"] - one["from"] == pytest.approx(one["p"], abs=1e-6)
            chances = [chance for _, _, chance in one["top"]]
            assert chances == sorted(chances, reverse=True) and len(chances) <= 8 and sum(chances) < 1 + 1e-5
        drawn += [one["u"] for one in own]
    assert drawn == [rng.uniform() for _ in drawn] and len(drawn) == len(found["ids"])  # one number a token
    assert kinds == {"plain", "corrected", "bonus"}
    assert found["forwards"] == len(found["rounds"]) < len(found["ids"])


def test_a_character_of_several_tokens_stands_at_its_last(engine):
    "Never half of it: a token that is a piece of a character is shown as one."
    text = "Well done 🙂, 你好 👩‍🚀!"
    found = engine.ask("""(text) => {
      const {tokenizer} = engine, read = tokenizer.reader(), ids = tokenizer.encode(text);
      return [ids.map((id) => read(id)), ids.map((id) => tokenizer.text(id))];
    }""", text)
    assert "".join(found[0]).replace("▯", "") == text and "▯" in found[0] and " 🙂" in found[0]
    assert "\ufffd" not in "".join(found[0] + found[1])


# The model's p at one place of a text, its likeliest token as the draft; then rounds as the page makes them. Broken: a
# token that differs is drawn once more.
THROWS = """([ids, n, broken]) => {
  const {model} = engine;
  model.rollback(0);
  model.forward(ids);
  const p = distribution(model.row(ids.length - 2), 1), after = distribution(model.row(ids.length - 1), 1);
  const draft = likeliest(p), counts = {}, rng = new SeededRandom(1);
  const own = (i) => draw([p, after][i], rng.uniform());
  for (let i = 0; i < n; i++) {
    const found = verify([draft], own);
    const {id} = broken && found[0].id !== draft ? own(0) : found[0];
    counts[id] = (counts[id] || 0) + 1;
  }
  return {p: Array.from(p), counts};
}"""


def off(engine, ids: list[int], n: int, broken: bool) -> float: # the p-value
    "Chi-squared of the emitted tokens against p, tokens below 1 % together."
    found = engine.ask(THROWS, [ids, n, broken])
    p = torch.tensor(found["p"], dtype=torch.float64)
    common = (p > .01).nonzero().flatten().tolist()
    seen = [found["counts"].get(str(i), 0) for i in common]
    expected = [n * p[i].item() for i in common]
    return chisquare([*seen, n - sum(seen)], [*expected, n - sum(expected)]).pvalue


def test_emitted_tokens_are_distributed_as_p_and_a_broken_rule_is_not(engine):
    ids = [504, 1671, 282, 253, 665, 314, 261]
    assert off(engine, ids, 1500, False) > 1e-6
    assert off(engine, ids, 1500, True) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("place", range(4))
def test_emitted_tokens_are_distributed_as_p_in_real_texts(engine, pair, place):
    ids = chat(pair, prompts()[place].text)[:40 + 3 * place]
    assert off(engine, ids, 6000, False) > 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["lookup", "head"])
def test_ten_greedy_texts_are_pythons_at_every_k(engine, pair, drafters, drafter):
    short = [p.text for p in prompts() if len(p.text) < 300]
    for message in short[::len(short) // 10][:10]:
        ids = chat(pair, message)
        hold(pair, ids, engine.generate(prompt=message, maxNewTokens=24), python(pair, NoDrafter(), ids, 1, 24))
        for K in range(1, 6):
            found = engine.generate(ids=ids, K=K, maxNewTokens=24, drafter=drafter)
            hold(pair, ids, found, python(pair, drafters[drafter], ids, K, 24))


BAD = [
    ({"K": 0}, "K, the draft tokens of a round, must be a whole number from 1 to 15, not 0."),
    ({"temperature": -1}, "temperature must be 0 (greedy) or a positive number, not -1."),
    ({"seed": 1.5}, "seed must be a whole number from 0 to 4,294,967,295, not 1.5."),
    ({"maxNewTokens": 0}, "maxNewTokens must be a whole number from 1"),
    ({"drafter": "tree"}, 'drafter must be "plain", "lookup" or "head", not "tree".'),
    ({"ids": [1, 49152]}, "A token id must be a whole number from 0 to 49,151, not 49152."),
    ({"ids": [1], "prompt": "Hi"}, "Give either prompt, a text, or ids"),
    ({"prompt": "  "}, "The prompt is empty"), ({"ids": []}, "The prompt is empty"),
    ({"ids": [1] * 2048}, "The prompt has 2,048 tokens, and the page has room for 2,048"),
]


def test_bad_input_gets_one_sentence_before_anything_is_computed(engine):
    for options, said in BAD:
        found = engine.generate(**(options if "ids" in options else {"prompt": "Hi"} | options))
        assert found["code"] == "bad-input" and said in found["message"], found


def test_a_text_ends_at_a_cancel_and_a_paced_one_waits_for_each_next(engine):
    options = {"K": 2, "temperature": 0, "seed": 0, "maxNewTokens": 6, "drafter": "plain", "prompt": "Hi",
               "paced": True}
    engine.talk({"type": "generate", "id": 9, "options": options}, "round")
    engine.talk({"type": "next", "id": 9}, "round")
    engine.tab.wait_for_timeout(150)
    assert len([m for m in engine.tab.evaluate("said") if m.get("type") == "round" and m["id"] == 9]) == 2
    found = engine.talk({"type": "cancel", "id": 9}, "done")["result"]
    assert found["end"] == "cancelled" and len(found["ids"]) == 2
    engine.talk({"type": "generate", "id": 10, "options": options}, "round")
    assert len(engine.talk({"type": "play", "id": 10}, "done")["result"]["ids"]) <= 6


def changed(path: str, to) -> object:
    "`file_at`, with other bytes at one address."
    return lambda asked: to(file_at(asked)) if asked == path else file_at(asked)


def first_part(**other) -> object:
    "A list of parts whose first is said to be otherwise."
    def listing(data):
        found = json.loads(data)
        found["model"]["parts"][0] |= other
        return json.dumps(found).encode()
    return listing


WRONG = {
    "the list is not there": ("live/weights/parts.json", lambda data: None, "network", "(404)"),
    "the list is damaged": ("live/weights/parts.json", lambda data: b"{", "network", "parts.json, can't be read"),
    "a part is not there": ("live/weights/model-00.bin", lambda data: None, "network", "Part 1 of 10 of model"),
    "a part is cut short": ("live/weights/model-00.bin", lambda data: data[:999], "truncated",
                            "Part 1 of 10 of model has 999 bytes where 10,000,000 are expected"),
    "a part is another": ("live/weights/model-00.bin", lambda data: data[:-1] + b"?", "wrong-file", "SHA-256"),
    "a part is longer": ("live/weights/parts.json", first_part(bytes=9 * 10**6), "wrong-file", "SHA-256"),
    "no SIMD": ("live/kernel.wasm", lambda data: b"\0asm\1\0\0\0\xff", "no-simd", "no SIMD"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_parts_get_one_sentence_each(browser, case):
    path, to, code, said = WRONG[case]
    with served(changed(path, to)) as server:
        made = Engine(browser, server)
        found = made.load()
        assert found["type"] == "error" and found["code"] == code and said in found["message"], found
        made.close()


def test_a_chosen_file_is_checked_and_another_is_refused(browser, tmp_path):
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = b"".join(part for path, part in weights().items() if path.startswith("model"))
    files = {"text.gguf": (b"Hello", "wrong-file", "text.gguf is no GGUF file"),
             name: (model[:1000], "truncated", f"{name} has 1,000 bytes where 98,362,432 are expected"),
             "other.gguf": (model[:5000], "wrong-file", "other.gguf is another file"),
             "changed.gguf": (model[:-1] + bytes([model[-1] ^ 1]), "wrong-file", "changed.gguf is another file")}
    with served() as server:
        made = Engine(browser, server)
        load = """(kinds) => talk({type: "load", files: {model: document.querySelector('#model').files[0],
          head: document.querySelector('#head').files[0]}}, ["ready", "error"])"""
        for file, (data, code, said) in files.items():
            (tmp_path / file).write_bytes(data)
            made.tab.set_input_files("#model", tmp_path / file)
            found = made.tab.evaluate(load)
            assert found.get("code") == code and said in found["message"], found
        (tmp_path / name).write_bytes(model)
        made.tab.set_input_files("#model", tmp_path / name)
        assert made.tab.evaluate(load)["info"]["head"] is False
        assert "No head was loaded" in made.generate(prompt="Hi", drafter="head")["message"]
        made.tab.set_input_files("#head", tmp_path / "text.gguf")
        assert "isn't the head that the package ships" in made.tab.evaluate(load)["message"]
        made.close()


def test_the_browser_keeps_what_was_fetched_and_forgets_it_when_told(browser):
    with served() as server:
        made = Engine(browser, server)
        made.load()
        before = len(server.asked)
        made.tab.evaluate("open_engine()")
        assert made.load()["type"] == "ready"
        assert [path for path in server.asked[before:] if path.endswith(".bin")] == []
        made.tab.evaluate("talk({type: 'clear'}, []), null")
        made.tab.wait_for_function("async () => (await caches.keys()).length === 0")
        made.tab.evaluate("talk({type: 'load', base: 'live/weights/'}, []), null")
        made.tab.wait_for_function("said.some((m) => m.type === 'progress' && m.done > 1e7)")
        assert made.talk({"type": "cancel"}, "error")["code"] == "cancelled"
        made.close()


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="no ziglang here: make setup installs it")
def test_the_kernel_is_what_its_source_compiles_to(tmp_path, monkeypatch):
    committed = (LIVE / "kernel.wasm").read_bytes()
    code = f"import live, pathlib; live.build(pathlib.Path({str(tmp_path / 'kernel.wasm')!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tools", check=True)
    assert (tmp_path / "kernel.wasm").read_bytes() == committed


# The engine's scripts in Node, around a model and a head of a few tokens whose logits are given: row i of the target's
# is behind token i of the sequence, and the head says the same everywhere; by token, row i of both is behind token i
# of the vocabulary. What `generate` answers, for each case; by token, its ids.
STUB = """
const vm = require("vm"), fs = require("fs"), [folder, cases] = JSON.parse(fs.readFileSync(0, "utf8"));
const said = [], context = vm.createContext({ performance, MessageChannel, postMessage: (message) => said.push(message),
  importScripts: (...names) => names.forEach(run) });
context.self = context;
function run(name) { vm.runInContext(fs.readFileSync(`${folder}/${name}`, "utf8"), context); }
run("worker.js");
(async () => {
  const number = (x) => ({ nan: NaN, inf: Infinity, "-inf": -Infinity })[x] ?? x;
  const answers = [];
  const floats = (rows) => rows.map((row) => Float32Array.from(row.map(number)));
  for (const { target, draft, options, byToken, eos = [] } of cases) {
    const rows = floats(target), model = { vocab: rows[0].length, length: 0, first: 0,
      forward(ids) { this.first = this.length; this.length += ids.length; this.ids = ids; },
      row(r) { return rows[byToken ? this.ids[r] : Math.min(this.first + r, rows.length - 1)]; },
      rollback(length) { this.length = length; } };
    const says = floats(byToken ? draft : [draft]), read = (ids) => {
      head.length += ids.length;
      return says[byToken ? ids.at(-1) : 0];
    };
    const head = { model, tokens: [...rows[0].keys()], length: 0, rollback: model.rollback, read, step: read };
    const tokenizer = { text: String, decode: String, reader: () => String, special: new Set() };
    context.made = { model, head, tokenizer, eos: new Set(eos) };
    vm.runInContext("engine = made", context);
    said.length = 0;
    context.onmessage({ data: { type: "generate", id: 1, options } });
    while (!said.some(({ type }) => type === "done" || type === "error")) await new Promise(setImmediate);
    answers.push(byToken ? said.at(-1).result.ids : said.at(-1));
  }
  console.log(JSON.stringify(answers));
})();
"""
FINE, BROKEN = [0, 1, 0, 0], {
    "NaN": [0, 1, "nan", 0], "NaN first": ["nan", 1, 0, 0], "+inf": [0, "inf", 0, 0], "nothing but -inf": ["-inf"] * 4}


def in_node(cases: list[dict], folder: Path = LIVE) -> list:
    "What the engine answers to each case."
    node = shutil.which("node")
    if node is None: pytest.skip("no Node.js here")
    assert ENGINE[0] == "worker.js"
    done = subprocess.run([node, "-e", STUB], input=json.dumps([str(folder), cases]), capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ask_node(function: str):
    "What a function of JavaScript gives, where the engine's own are at hand."
    code = STUB[:STUB.index("(async")] + f"console.log(JSON.stringify(vm.runInContext(`({function})()`, context)));"
    done = subprocess.run([shutil.which("node") or "node", "-e", code], input=json.dumps([str(LIVE), []]),
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def language(seed: int, V: int = 6) -> tuple[list, list]: # logits of a target and of a head
    "Two that say what follows a token, and often agree."
    rng = np.random.default_rng(seed)
    target = rng.normal(0, 1.5, (V, V))
    return target.tolist(), (target + rng.normal(0, 1, (V, V))).tolist()


def lanes(folder: Path = LIVE) -> dict[str, list]: # drafter -> the ids of each setting
    "Texts of many seeds and settings, by every drafter; and Python's own, of the same numbers, without any draft."
    found: dict[str, list] = {"python": []}
    cases = []
    for seed, K, temperature in product(range(25), (1, 2, 5, 15), (.7, 1)):
        target, draft = language(seed)
        rng, p, ids = SeededRandom(seed), SamplingParams(temperature).probs(torch.tensor(target)), [1]
        while len(ids) <= 24 and ids[-1] != 0: ids.append(rng.categorical(p[ids[-1]]))
        found["python"].append(ids[1:])
        options = dict(ids=[1], K=K, temperature=temperature, seed=seed, maxNewTokens=24)
        cases.append(dict(target=target, draft=draft, options=options, byToken=True, eos=[0]))
    names = ("plain", "lookup", "head")
    asked = {name: dict(drafter=name) for name in names} | {
        f"{name}, adaptive": dict(drafter=name, adaptive=True) for name in names[1:]}
    answers = in_node([case | dict(options=case["options"] | own) for own in asked.values() for case in cases], folder)
    return found | {name: answers[i * len(cases):(i + 1) * len(cases)] for i, name in enumerate(asked)}


def test_the_text_is_plain_decodings_at_any_temperature_with_every_drafter_and_k():
    "Also where the clock decides on K."
    found = lanes()
    assert found["plain"] == found["python"]
    for drafter in found: assert found[drafter] == found["plain"], drafter
    ends = [ids[-1] == 0 for ids in found["plain"]]
    assert any(ends) and not all(ends)


# Rounds that happened, one after the other, to the page's own clock: how many it would draft in each, and its prices. A
# round is how many it may draft at most, how many would be accepted, and how many times slower the machine was.
PACED = """() => ROUNDS.map(([drafter, row, rounds]) => {
  const pace = new Pace(drafter), token = drafter === "head" ? 0.003 : 0;
  return rounds.map(([most, accepted, slow]) => {
    const n = pace.choose(most), prices = [1, 2, 5, 8].map((k) => k <= pace.reach() ? pace.price(k) : null);
    pace.learn(n, Math.min(accepted, n), { draft: 0.0005 + token * n, target: slow * 0.03 * (1 + row * n) });
    return [n, ...prices];
  });
})"""


def python_paces(drafter: str, row: float, rounds: list[tuple]) -> list[list]:
    "The package's clock and chooser, told the same."
    token = .003 if drafter == "head" else 0
    clock = Clock([COST if token else 0.0])
    chooser, found = Chooser([0.0], 0.0, [PRIOR], watch=Watch(clock)), []
    for most, accepted, slow in rounds:
        n = chooser.choose([range(most)])[1]
        prices = clock.prices(0, 8)
        found.append([n, *(prices[k - 1] if k <= len(prices) else None for k in (1, 2, 5, 8))])
        accepted = min(accepted, n)
        clock.read(1, 1 + n, slow * .03 * (1 + row * n))
        chooser.learn(0, range(n), accepted, min(accepted + 1, n))
        if n: clock.drafted(0, n, .0005 + token * n)
    return found


def test_the_clock_decides_as_the_packages_does():
    "Choice by choice and price by price: drafts that pay, that don't, that begin to, with outliers of the machine."
    rng, cases = np.random.default_rng(0), []
    for drafter, row, good in product(("lookup", "head"), (.02, .3, .9), ((.9, .9), (.2, .2), (.1, .95))):
        cases.append((drafter, row, [(
            int(rng.integers(0, 9)) if drafter == "lookup" else 8, int(rng.geometric(1 - good[n > 60])) - 1,
            5 if rng.random() < .03 else 1) for n in range(150)]))
    pages, drafted = ask_node(PACED.replace("ROUNDS", json.dumps(cases))), []
    for case, found in zip(cases, pages, strict=True):
        wanted = python_paces(*case)
        assert [one[0] for one in found] == [one[0] for one in wanted]
        assert np.allclose(np.array(found, float), np.array(wanted, float), rtol=1e-9, equal_nan=True)
        drafted.append(sum(one[0] for one in found) / sum(most for most, *_ in case[2]))
    assert max(drafted) > .5 and min(drafted) < .15  # it drafts where that pays, and stops where it doesn't
    stopped, again = (sum(one[0] for one in pages[5][part]) for part in (slice(30, 60), slice(120, 150)))
    assert stopped < 15 < 60 < again  # lookup, rows of .3 steps, and drafts that are good from round 60 on


RULE = "verify(draft, (i) => own(p[i]))"
BREAKS = {
    "a draft token takes two numbers": (RULE, "verify(draft, (i) => (i < n && rng.uniform(), own(p[i])))"),
    "a drafter takes one of the target's numbers": (
        "const n = draft.length", "if (draft.length) rng.uniform();\nconst n = draft.length"),
    "a likely draft token is kept without a number": (
        RULE, "verify(draft, (i) => p[i][draft[i]] > .9 ? { id: draft[i] } : own(p[i]))"),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_what_takes_other_numbers_than_plain_decoding_is_caught(kind, tmp_path):
    old, new = BREAKS[kind]
    for file in LIVE.glob("*.js"): shutil.copy(file, tmp_path)
    source = (LIVE / "worker.js").read_text(encoding="utf-8")
    assert source.count(old) == 1
    (tmp_path / "worker.js").write_text(source.replace(old, new), encoding="utf-8")
    found = lanes(tmp_path)
    assert found["plain"] == found["python"]
    for drafter in ("lookup", "head"): assert found[drafter] != found["plain"], drafter


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("kind", BROKEN)
def test_damaged_numbers_end_a_text_of_the_page_as_they_end_pythons(kind, temperature):
    "After the prompt, in a round, behind a rejected token, or in the head's q: an error, and never a token."
    bad = BROKEN[kind]
    with pytest.raises(NumericalError): check_logits(torch.tensor([float(x) for x in bad]), "Here")
    options = dict(ids=[1, 2], K=3, temperature=temperature, seed=0, maxNewTokens=8, drafter="head")
    rejects = [0, 0, 0, 90]  # token 1, which the head drafts, is never accepted
    cases = [dict(target=[FINE, bad], draft=FINE), dict(target=[FINE, FINE, bad], draft=FINE),
             dict(target=[FINE, rejects, rejects, bad], draft=[0, 90, 0, 0]), dict(target=[FINE], draft=bad)]
    fine = dict(target=[FINE, FINE, rejects], draft=[0, 90, 0, 0]), dict(target=[["-inf", 1, 0, 0]], draft=FINE)
    *found, control, some = in_node([case | dict(options=options) for case in (*cases, *fine)])
    for answer in found:
        assert answer["type"] == "error" and answer["code"] == "numbers" and "damaged" in answer["message"], answer
    assert len(control["result"]["ids"]) == len(some["result"]["ids"]) == 8
    assert 0 not in some["result"]["ids"]  # -inf among others is a token that can't be


def test_weights_without_a_positive_finite_sum_are_never_drawn_from():
    "Also where a draft token stands, and after one that is kept; as `SeededRandom` refuses them."
    code = """() => { const caught = (run) => { try { return run(); } catch (error) { return error.code; } };
      return [[0, 0], [NaN, 1], [1, NaN], [Infinity, 1]].map((w) => caught(() => draw(w, .5))).concat(
        [[[.5, NaN]], [[0, 1], [NaN, 1]]].map((p) => caught(() => verify([1], (i) => draw(p[i], .5)))),
        [draw([0, 2], .5).id, draw([1, 0, 1, 2], .5).id, draw([1, 0], 1 - 2 ** -53).id, draw([0, 1], 0).id]); }"""
    assert ask_node(code) == ["numbers"] * 6 + [1, 3, 0, 1]
    for wrong in ([0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]):
        with pytest.raises(NumericalError): SeededRandom(0).categorical(torch.tensor(wrong))
