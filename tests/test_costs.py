"""What drafts cost: who goes by a clock and who by frozen prices, and a file that is never believed too long."""
import json
import os
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from helpers import tiny as tiny_llama
from helpers import tool
from helpers_drafters import packable_llama, random_head, random_target
from specdec.drafters import costs as module
from specdec.drafters.adaptive import AdaptiveLookahead
from specdec.drafters.base import Draft, NoDrafter, WrapperDrafter
from specdec.drafters.block import BlockDrafter, init_block
from specdec.drafters.choose import HybridDrafter
from specdec.drafters.costs import (
    Prices,
    clock_for,
    frozen_clock,
    kept_costs,
    prices_in,
    read_costs,
    show,
    take_prices,
    turns_of,
    write_costs,
)
from specdec.drafters.head_drafter import HeadDrafter
from specdec.drafters.lookup import NGramDrafter, SuffixDrafter
from specdec.drafters.model import ModelDrafter, ModelState
from specdec.drafters.tree import TreeDrafter
from specdec.errors import ModelError, NumericalError
from specdec.loop import speculate
from specdec.lossless.proof import ExactModel, Language, language_pairs, loop_error
from specdec.models.llama import Llama
from specdec.pair import Pair
from specdec.sampling import SamplingParams, SeededRandom

FREE = dict.fromkeys(range(1, 18), 0.01)
CHEAP = Prices(forwards=FREE, drafts=[{}, {1: .0001, 4: .0002}])                       # drafting pays soon
DEAR = Prices(forwards={1: .01, 2: .09, 5: .09, 16: .09}, drafts=[{}, {1: .02, 4: .08}])  # it never does


@pytest.fixture(scope="module")
def tiny(): return packable_llama()


@pytest.fixture
def named(tiny, monkeypatch, tmp_path):
    "A target with a name, a cache folder of its own, and a measurement that is counted and takes no time."
    monkeypatch.setattr(module, "cache_home", lambda: tmp_path)
    monkeypatch.setattr(tiny, "name", "tiny", raising=False)
    taken = []
    def take(target, hybrid, sampled, size=1, certain=False):
        taken.append((sampled, size))
        return CHEAP
    monkeypatch.setattr(module, "take_prices", take)
    return tiny, taken


def hybrid(target=None):
    return HybridDrafter(SuffixDrafter(), ModelDrafter(target, 96) if target else NoDrafter())

# from rounds to prices


def test_prices_are_those_of_the_loop(monkeypatch):
    "A clock that only forwards move: .875 + .125 a row, and .25 for each of the draft's; alone and in a batch."
    target, draft, clock = tiny_llama(context=4096), tiny_llama(seed=1, context=4096), [0.0]
    def clocked(self, ids, *given, compute=Llama.compute, **more):
        clock[0] += .875 + .125 * ids.shape[1] if self is target else .25
        return compute(self, ids, *given, **more)
    monkeypatch.setattr(Llama, "compute", clocked)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    both = HybridDrafter(SuffixDrafter(), ModelDrafter(draft, 24))
    for sampled in (False, True):
        for size in (1, 3):
            prices = take_prices(target, both, sampled, size)
            assert {size, 2 * size, 3 * size, 5 * size} <= prices.forwards.keys() and prices.drafts[0] == {}
            for rows, seconds in prices.forwards.items(): assert seconds == pytest.approx(.875 + .125 * rows)
            assert prices.drafts[1] == pytest.approx({1: .25, 4: 1.0})
            price = show(prices, clock_for(target, both, True), size).prices(1, 4, size)[3]
            assert price == pytest.approx((.875 + .625 * size + size) / (.875 + .125 * size))


class Screen(StringIO):
    "Standard error where a person looks, or a pipe."
    def __init__(self, looks): super().__init__(); self.looks = looks
    def isatty(self): return self.looks


@pytest.mark.parametrize("looks, slow", [(True, True), (False, True), (True, False)])
def test_prices_that_take_longer_than_a_second_say_so_where_a_person_looks(monkeypatch, looks, slow):
    monkeypatch.setattr(sys, "stderr", screen := Screen(looks))
    monkeypatch.setattr(module, "ENOUGH", 0.0)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    target, compute = tiny_llama(context=4096), Llama.compute
    def slowly(self, *given, **more):
        time.sleep(.065 * slow)
        return compute(self, *given, **more)
    monkeypatch.setattr(Llama, "compute", slowly)
    began = time.time()
    assert take_prices(target, HybridDrafter(SuffixDrafter()), False).forwards
    took, said = time.time() - began, screen.getvalue()
    assert slow or took < 1 or pytest.skip(f"A busy machine: {took:.1f} s for what takes a tenth")
    assert ("Timing what drafts cost here" in said) == (looks and slow) and "\n" not in said
    assert not said or said.endswith("\r") and not said.split("\r")[-2].strip()  # the line is gone at the end


def test_turns_have_plain_steps_between_them_and_equal_ones_where_rejections_are_read_again(tiny, monkeypatch):
    turns = turns_of(tiny, hybrid(tiny), 1)
    assert all(turn == (0, 0) for turn in turns[::2]) and {(2, 1), (2, 4), (1, 1), (1, 4)} <= {*turns[1::2]}
    assert not {who for who, n in turns if n} & {0}  # a lookup is not timed
    assert max(n for _, n in turns_of(tiny, hybrid(tiny), 64)) == 2
    monkeypatch.setattr(tiny, "replays", True)
    again = turns_of(tiny, hybrid(tiny), 1)
    assert again == [turn for turn in turns for _ in range(2)]


def test_a_model_that_fails_is_told_of_by_decoding_and_nothing_is_kept(named, monkeypatch):
    target, _ = named
    def fail(*given): raise NumericalError("no numbers")
    monkeypatch.setattr(module, "take_prices", fail)
    assert frozen_clock(target, hybrid(), True).told() == {} and kept_costs() == []

# the file


def test_taken_once_and_read_after_that(named):
    target, taken = named
    for _ in range(3): assert frozen_clock(target, hybrid(target), True).prices(1, 4)[3] == pytest.approx(1.02)
    assert taken == [(True, 1)]
    only, = kept_costs()
    assert only["state"] == "ready" and only["costs"]["step"] == .01 and only["costs"]["verify"][0] == 1
    assert "digest" in only["about"]["target"] and only["about"]["drafters"][1]["model"]["name"] == "tiny"
    frozen_clock(target, hybrid(target), False)                   # another kind of decoding
    frozen_clock(target, hybrid(), True)                          # another pair
    assert taken == [(True, 1), (False, 1), (True, 1)] and len(kept_costs()) == 3
    both = frozen_clock(target, hybrid(target), True, 4)          # a batch, and what is left of it
    assert taken[3:] == [(True, 4)] and both.forwards.keys() == {1, 4}


WAYS_TO_BREAK = {
    "torn": lambda text: text[:150], "empty": lambda text: "", "not JSON": lambda text: "costs",
    "a list": lambda text: "[]", "another version": lambda text: text.replace('"version": 3', '"version": 2'),
    "NaN": lambda text: text.replace("0.0001", "NaN"), "negative": lambda text: text.replace("0.0001", "-0.0001"),
    "no forwards": lambda text: text.replace('"forwards"', '"fourwards"'),
    "no rows": lambda text: text.replace('"1":', '"0":'),
    "no numbers": lambda text: text.replace("0.0001", '"0.0001"'), "bytes": None,
}


@pytest.mark.parametrize("way", WAYS_TO_BREAK)
def test_a_damaged_file_is_shown_and_its_prices_are_taken_anew(named, way, capsys):
    target, taken = named
    frozen_clock(target, hybrid(), True)
    file = Path(kept_costs()[0]["file"])
    if way == "bytes": file.write_bytes(b"\xff\xfe\x00")
    else: file.write_text(WAYS_TO_BREAK[way](file.read_text()))
    with pytest.raises(ModelError, match="holds no costs"): read_costs(file)
    assert kept_costs() == [{"file": str(file), "state": "damaged", "about": None, "costs": None}]
    assert frozen_clock(target, hybrid(), True).told() and len(taken) == 2 and capsys.readouterr().err == ""
    assert kept_costs()[0]["state"] == "ready"


@pytest.mark.parametrize("change", ["code", "weights", "processor", "torch", "threads"])
def test_prices_of_something_else_are_not_believed(named, monkeypatch, change):
    target, taken = named
    frozen_clock(target, hybrid(), True)
    if change == "code": monkeypatch.setattr(module, "code_digest", lambda: "0" * 12)
    if change == "weights": monkeypatch.setattr(target, "digest", "f" * 64, raising=False)
    if change == "processor": monkeypatch.setattr(module, "processor_name", lambda: "an abacus")
    if change == "torch": monkeypatch.setattr(torch, "__version__", "9.9")
    if change == "threads": monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    if change in ("code", "processor", "torch"): assert kept_costs()[0]["state"] == "stale"
    for _ in range(2): frozen_clock(target, hybrid(), True)
    assert len(taken) == 2 and len(kept_costs()) == (2 if change == "threads" else 1)


def two_of_a_kind():
    "Drafters of one class, the first two of which are equally fast, and the third isn't."
    tokens = torch.arange(8)
    def head(target, width, **options): return HeadDrafter(random_head(target, tokens[:width], **options), target)
    def block(target, layers=1, seed=0):
        return BlockDrafter(init_block(target, tokens, seed=seed, mask_token_id=1, block_size=3, num_layers=layers),
                            target)
    return {
        "block": (block, dict(seed=0), dict(seed=1), dict(layers=2)),
        "head": (head, dict(width=8), dict(width=8, seed=2), dict(width=6)),
        "tree": (lambda target, seed=1, **sizes: TreeDrafter(random_head(target, tokens, seed), target, **sizes),
                 {}, dict(seed=2), dict(width=3)),
        "model": (lambda target, layers: ModelDrafter(tiny_llama(24, layers=layers), 24),
                  dict(layers=2), dict(layers=2), dict(layers=3)),
        "wrapper": (lambda target, seed=0, layers=1: WrapperDrafter(block(target, layers, seed)),
                    {}, dict(seed=1), dict(layers=2)),
        "hybrid in a wrapper": (lambda target, seed=0, layers=1: WrapperDrafter(
            HybridDrafter(SuffixDrafter(), block(target, layers, seed))), {}, dict(seed=1), dict(layers=2)),
    }


@pytest.mark.parametrize("kind", two_of_a_kind())
def test_prices_of_another_drafter_of_the_class_are_not_believed(named, kind, tmp_path):
    _, taken = named
    target, (make, first, alike, other) = random_target(tmp_path / "target"), two_of_a_kind()[kind]
    def clock(how): return frozen_clock(target, HybridDrafter(SuffixDrafter(), make(target, **how)), True)
    for how in (first, alike, first): clock(how)  # trained further it is as fast
    assert len(taken) == 1
    for how in (other, first, other): clock(how)  # each has a file of its own
    assert len(taken) == 2 and len(kept_costs()) == 2


@pytest.mark.parametrize("count", [0, 1, 3])
def test_prices_of_another_number_of_drafters_are_not_believed(named, count):
    target, taken = named
    frozen_clock(target, hybrid(), True)
    file = Path(kept_costs()[0]["file"])
    held = json.loads(file.read_text())
    held["prices"]["drafts"] = [{"1": .01}] * count
    file.write_text(json.dumps(held))
    frozen_clock(target, hybrid(), True)
    assert len(taken) == 2 and len(read_costs(file)[1].drafts) == 2


def test_many_at_once_take_them_once(named, monkeypatch):
    target, taken = named
    clocks = []
    threads = [Thread(target=lambda: clocks.append(frozen_clock(target, hybrid(), True))) for _ in range(6)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(clocks) == 6 and len(taken) == 1 and len(kept_costs()) == 1


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "costs.json"
    write_costs(file, {"processor": "one"}, CHEAP)
    def full(*_): raise OSError("the disk is full")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ModelError, match="full"): write_costs(file, {"processor": "two"}, CHEAP)
    assert read_costs(file) == ({"processor": "one"}, CHEAP)
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


def test_where_nothing_can_be_kept_one_line_says_so(named, monkeypatch, tmp_path, capsys):
    target, taken = named
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(module, "cache_home", lambda: tmp_path / "file")
    pair = Pair(target, hybrid(target))
    found = [text_of(pair) for _ in range(2)]
    said = capsys.readouterr().err
    assert len(taken) == 1 and said.count("can't be kept") == 1 and len(said.strip().splitlines()) == 1
    assert found[0].rounds == found[1].rounds


def test_people_can_read_it(tmp_path):
    write_costs(tmp_path / "costs.json", {"processor": "an abacus", "drafters": [1, 2]}, CHEAP)
    text = (tmp_path / "costs.json").read_text()
    assert text.isascii() and Prices.model_validate(json.loads(text)["prices"]) == CHEAP
    assert len(text.splitlines()) == 11 and '  "processor": "an abacus"' in text
    assert prices_in(tmp_path / "costs.json", {"processor": "an abacus", "drafters": [1, 2]}) == CHEAP

# who goes by what


def text_of(pair, seed=5, **more):
    return pair.generate([1, 2, 3, 1, 2, 3, 1], **dict(temperature=1.0, seed=seed, max_new_tokens=40) | more)


def test_who_goes_by_a_clock_and_who_by_frozen_prices(named, monkeypatch):
    target, taken = named
    monkeypatch.setattr(target, "batch_invariant", True)
    pair = Pair(target, hybrid(target))
    assert text_of(pair, method="plain").costs is None                        # nothing is chosen
    assert text_of(pair, temperature=0.0).costs["origin"] == "clock" and taken == []
    assert text_of(pair).costs["origin"] == "frozen" and taken == [(True, 1)] # drafts are drawn
    lossy = text_of(pair, temperature=0.0, verify=lambda p, q, tokens, rng: (0, int(p[0].argmax())))
    assert lossy.costs["origin"] == "frozen"
    monkeypatch.setattr(target, "batch_invariant", False)                     # a near-tie could fall otherwise
    assert text_of(pair, temperature=0.0).costs["origin"] == "frozen" and taken == [(True, 1), (False, 1)]
    for fixed in (NGramDrafter(), HybridDrafter(NoDrafter(), c=(0.1,))):      # K is fixed, costs are given
        assert text_of(Pair(target, fixed)).costs is None
    assert text_of(Pair(target, NGramDrafter()), K="adaptive").costs["origin"] == "frozen"
    assert text_of(Pair(target, NGramDrafter()), K=AdaptiveLookahead()).costs is None


def test_the_same_prices_make_the_same_choices_on_a_busy_day_too(named, monkeypatch):
    target, _ = named
    def pair(): return Pair(target, hybrid(target.skip([2])))
    quiet = text_of(pair())
    monkeypatch.setattr(module, "take_prices", lambda *given: DEAR)
    clock = [0.0]
    def leaps():
        clock[0] += 1 + 50 * (clock[0] % 3)
        return clock[0]
    monkeypatch.setattr("time.perf_counter", leaps)
    busy = text_of(pair())
    assert quiet.num_drafted > 10 and busy.rounds == quiet.rounds and busy.costs == quiet.costs


def test_none_at_all_is_a_choice(named, monkeypatch):
    "Where nothing can pay, what is drafted is a guess now and then; greedy text is the same."
    target, _ = named
    monkeypatch.setattr(target, "batch_invariant", False)
    cheap = Pair(target, hybrid(target.skip([2]))).generate([1, 2, 1, 2], max_new_tokens=100)
    module.cache_home().joinpath("costs").rename(module.cache_home() / "away")
    monkeypatch.setattr(module, "take_prices", lambda *given: DEAR)
    dear = Pair(target, hybrid(target.skip([2]))).generate([1, 2, 1, 2], max_new_tokens=100)
    assert dear.num_drafted <= 1 < 30 < cheap.num_drafted and cheap.generated_ids == dear.generated_ids


def test_a_pair_remembers_its_clock_and_a_copy_begins_anew(tiny):
    import pickle
    pair = Pair(tiny, hybrid(tiny.skip([2])))
    pair.generate([1, 2, 3], max_new_tokens=20)
    clock, = pair.clocks.values()
    before = clock.spent
    pair.generate([1, 2, 3], max_new_tokens=20)
    assert [*pair.clocks.values()] == [clock] and clock.spent > before > 0
    assert pair.__getstate__()["clocks"] == {} and pickle.dumps(pair.__getstate__()["stats"])


CALL = """
import random, sys, time
sys.path.insert(0, "tests")
from helpers_drafters import packable_llama, random_head, random_target
from specdec.drafters import costs
from specdec.drafters.choose import HybridDrafter
from specdec.drafters.lookup import SuffixDrafter
from specdec.drafters.model import ModelDrafter
from specdec.pair import Pair
from pathlib import Path
costs.cache_home = lambda: Path(sys.argv[1])
rng, now = random.Random(int(sys.argv[2])), [0.0]
def wild():
    now[0] += 10 ** rng.uniform(-6, 2)
    return now[0]
time.perf_counter = wild
target = packable_llama()
pair = Pair(target, HybridDrafter(SuffixDrafter(), ModelDrafter(target.skip([2]), 96)))
ask = dict(temperature=1.0, max_new_tokens=60, ignore_eos=True)
found = [pair.generate([1, 2, 3, 1, 2, 3], seed=seed, **ask) for seed in range(3)]
print([r.rounds for r in (*found, *pair.generate([[1, 2], [3, 4], [5, 6]], seed=9, **ask))])
"""


def test_two_processes_with_random_clocks_say_the_same(tmp_path):
    "The first takes prices, such as they are, and they are frozen; the second has another clock. A third has its own."
    def said(folder, seed):
        return subprocess.run([sys.executable, "-c", CALL, str(folder), str(seed)], text=True, check=True,
                              capture_output=True, cwd=Path(__file__).parents[1]).stdout
    first = said(tmp_path / "a", 1)
    assert said(tmp_path / "a", 2) == first and "drafted=[" in first

# the executed proof


PROVEN = {  # v(1), v(2), …, and c of both
    "pays": ((1.0, 1.0, 1.0), ((0.0, 0.0), (0.1, 0.0))),
    "a dear first guess": ((1.1, 1.15, 1.2), ((0.0, 0.0), (0.3, 0.05))),
    "hardly ever pays": ((1.4, 1.5, 1.6), ((0.0, 0.0), (0.3, 0.3))),
}


@pytest.mark.parametrize("name", PROVEN)
@pytest.mark.parametrize("K, V", [(1, 3), (2, 2), (3, 2)])
def test_the_distribution_is_the_targets(K, V, name):
    "Of hybrids that go by frozen costs, of two drafters and of one."
    verify, c = PROVEN[name]
    for case, p, q in language_pairs(V, f"costs {K}", most=max(2, 5 - K), halves=True):
        width = V - 1 if case == "smaller draft vocabulary" else V
        def model(): return ModelDrafter(ExactModel(q, width), V)
        def both(): return HybridDrafter(SuffixDrafter(), model(), c=c, verify=verify)
        def alone(): return HybridDrafter(model(), c=c[1:], verify=verify)
        assert [loop_error(speculate, make, p, K, V, case).error for make in (both, alone)] == [0, 0], case


class RegretfulState(ModelState):
    "Wrong: weighs what a draft costs when it is drawn already, and throws an unlikely one away."
    def propose(self, K, sampling, rng):
        draft = super().propose(K, sampling, rng)
        worth = all(row[token] == max(row) for token, row in zip(draft.tokens, draft.q))
        return draft if worth else Draft([])

class Regretful(ModelDrafter): State = RegretfulState


def test_weighing_after_the_draw_is_caught():
    "The negative control of the proof above."
    errors = []
    for seed in range(4):
        p, q = Language(3, f"p{seed}"), Language(3, f"q{seed}")
        def wrong(q=q): return Regretful(ExactModel(q, 3), 3)
        errors.append(loop_error(speculate, wrong, p, 1, 3, "regret").error)
    assert max(errors) > 0


def test_the_source_is_not_asked_by_the_choice(tiny):
    "A choice draws nothing: with guesses that are certain, costs change the rounds and no random number."
    texts = [list(speculate(tiny, HybridDrafter(SuffixDrafter(), c=(0.0,), verify=v),
                            [1, 2, 1, 2], SamplingParams(), SeededRandom(0), 3, 30)) for v in ((1.0,) * 3, (9.0,) * 3)]
    one, other = ([token for r in rounds for token in r.emitted] for rounds in texts)
    assert one == other


def test_the_tool_says_what_choosing_cost(monkeypatch, tmp_path, tiny):
    "Against the fixed way that was fastest over all prompts."
    maker, file = tool("choosing"), tmp_path / "choosing.json"
    monkeypatch.setattr(maker, "load", lambda *names, **more: tiny)
    monkeypatch.setattr(maker, "best_drafter", lambda target: HybridDrafter(SuffixDrafter(), NoDrafter()))
    class Timed:  # a token takes a second plainly, .8 as chosen, and with the head .9, with four draft tokens .5
        def __init__(self, target, drafter): self.target, self.drafter = target, drafter
        def generate(self, prompt, max_new_tokens, K=5, method="speculative", **asked):
            hybrid = isinstance(self.drafter, HybridDrafter)
            each = 1.0 if method == "plain" else .8 if hybrid else .5 if K == 4 else .9
            total = 7 + each * (max_new_tokens - 1)
            return SimpleNamespace(total_time=total, time_to_first_token=7.0, costs={"origin": "clock"})
    monkeypatch.setattr(maker, "Pair", Timed)
    monkeypatch.setattr(maker.torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr("sys.argv", ["choosing.py", "--out", str(file), "--only", "int4", "--tokens", "10"])
    maker.main()
    found = json.loads(file.read_text())["results"]["int4"]
    for row in (found["0"], found["1"]):
        assert row["best_fixed"] == "head, K = 4" and row["regret"] == pytest.approx(.8 / .5 - 1)
        assert row["over_plain"] == pytest.approx(1 / .8) == row["domains"]["code"] and len(row["domains"]) == 3
        assert row["costs"] == {"origin": "clock"}
    monkeypatch.setattr("sys.argv", ["choosing.py", "--out", str(file), "--only", "int8", "--tokens", "10"])
    maker.main()  # the others' figures stay
    assert json.loads(file.read_text())["results"].keys() == {"int4", "int8"}
