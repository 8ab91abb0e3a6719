"What guesses cost: measured from rounds, kept in a file that is never believed too long, and data to whoever chooses."
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from helpers import tool
from helpers_drafters import packable_llama
from specdec import costs as module
from specdec.costs import (
    BusyError,
    Costs,
    KnownCosts,
    MachineCosts,
    TimedRound,
    calibrate,
    check_steady,
    costs_for,
    drafter_key,
    in_steps,
    kept_costs,
    measure_costs,
    member_cost,
    members_of,
    plain_step,
    read_costs,
    shipped_costs,
    shipped_table,
    timed_rounds,
    uses_costs,
    verify_costs,
    with_costs,
    write_costs,
)
from specdec.drafters.base import Draft, NoDrafter
from specdec.drafters.choose import VERIFY, AdaptiveDrafter, AdaptiveLookahead, HybridDrafter
from specdec.drafters.lookup import NGramDrafter, SuffixDrafter
from specdec.drafters.model import ModelDrafter, ModelState
from specdec.errors import InputError, ModelError
from specdec.loop import longest_chain, speculate
from specdec.lossless.proof import ExactModel, Language, language_pairs, loop_error
from specdec.models.loading import load
from specdec.pair import Pair, best_drafter
from specdec.sampling import SamplingParams, SeededRandom

CHEAP = Costs(0.01, (1.02, 1.04, 1.06, 1.08), ((0.0, 0.0), (0.1, 0.05)))  # drafting pays soon
DEAR = Costs(0.01, (9.0, 9.0, 9.0, 9.0), ((0.0, 0.0), (2.0, 2.0)))        # it never does
BOTH = MachineCosts(CHEAP, DEAR)


@pytest.fixture(scope="module")
def tiny(): return packable_llama()


@pytest.fixture
def named(tiny, monkeypatch, tmp_path):
    "A target with a name, a cache folder of its own, and a measurement that is counted and takes no time."
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    monkeypatch.setattr(tiny, "name", "tiny", raising=False)
    measured = []
    def measure(target, drafters):
        measured.append(len(drafters))
        return BOTH
    monkeypatch.setattr(module, "measure_costs", measure)
    return tiny, measured


def hybrid(target=None):
    return HybridDrafter(SuffixDrafter(), ModelDrafter(target, 96) if target else NoDrafter())

# from rounds to costs


def test_rounds_have_the_lengths_of_the_schedule(tiny):
    lengths = (0, 3, 1, 0, 2)
    for drafter in (module.ConstantDrafter(), ModelDrafter(tiny, 96)):
        for temperature in (0.0, 1.0):
            rounds = timed_rounds(tiny, drafter, lengths, temperature, held=8)
            assert [r.drafted for r in rounds] == list(lengths)
            assert all(r.forward > 0 and r.decide > 0 and r.draft >= 0 for r in rounds)


def test_each_phase_goes_to_its_place(tiny, monkeypatch):
    "A forward, a drafter and a rule that each take their own time."
    clock = [0.0]
    monkeypatch.setattr("specdec.profiling.time.perf_counter", lambda: clock[0])
    class Slow(module.ConstantDrafter):
        def propose(self, K, sampling, rng):
            clock[0] += 1 + K
            return super().propose(K, sampling, rng)
        def commit(self, tokens, features): clock[0] += 100
    class Clocked:
        vocab_size, context_length, device = tiny.vocab_size, tiny.context_length, tiny.device
        def new_cache(self, capacity): return tiny.new_cache(capacity)
        def forward(self, ids, cache, **more):
            clock[0] += 10_000 * ids.shape[1]
            return tiny.forward(ids, cache, **more)
    rounds = timed_rounds(Clocked(), Slow(), (0, 2, 1), 0.0, held=8)
    assert rounds == [TimedRound(0, 100, 10_000, 0), TimedRound(2, 103, 30_000, 0), TimedRound(1, 102, 20_000, 0)]


@pytest.mark.parametrize("beyond, expected", [
    ({}, (0.0, 0.0)), ({1: 0.5}, (0.5, 0.5)), ({3: 1.5}, (0.5, 0.5)),
    ({1: 1.0, 3: 1.5}, (1.0, 0.25)), ({1: -0.5, 2: -0.5}, (0.0, 0.0)),
], ids=["says nothing", "one length", "one longer", "the first is dearer", "quicker than nothing"])
@pytest.mark.parametrize("part", ["draft", "forward", "decide"])
def test_cost_of_a_drafter(beyond, expected, part):
    "Wherever a round with its guesses takes longer than one with guesses that cost nothing."
    rounds = [TimedRound(0, 0.0, 1.5, 0.5)]
    for n, steps in beyond.items():
        times = dict(draft=0.0, forward=2.2, decide=0.2)  # v = 1.2
        rounds.append(TimedRound(n, **times | {part: times[part] + 2 * steps}))
    assert member_cost(rounds, (1.2, 1.2, 1.2)) == pytest.approx(expected)


def test_one_odd_round_changes_nothing():
    rounds = [TimedRound(n, 1.0 * n, 1.0, 1.0) for _ in range(5) for n in (0, 1)]
    assert member_cost([*rounds, TimedRound(0, 0, 1, 1), TimedRound(1, 99.0, 1, 1)], (1.0,)) == (0.5, 0.5)
    dear = [TimedRound(4, 0, 50.0, 1.0)] * 9
    assert plain_step([*rounds, *dear, TimedRound(0, 0, 99.0, 1.0)]) == 2.0


def test_a_machine_that_slows_down_on_the_way_changes_no_ratio():
    rounds = [TimedRound(n, 0.0, slow * v, 0.0) for slow in (1, 1, 2, 3) for n, v in ((0, 1.0), (1, 1.25), (2, 1.5))]
    assert in_steps(rounds, lambda r: r.forward) == {1: 1.25, 2: 1.5}


def test_lengths_between_those_that_were_timed():
    assert verify_costs({1: 1.1, 3: 1.5, 4: 1.55}) == (1.1, 1.3, 1.5, 1.55)


@pytest.mark.parametrize("wrong", [
    dict(step=0.0), dict(step=float("nan")), dict(verify=()), dict(verify=(1.0, 0.0)), dict(verify=("1",)),
    dict(c=((0.1,),)), dict(c=((0.1, -0.1),)), dict(c=((True, 0.0),)), dict(verify=(float("inf"),)),
], ids=str)
def test_what_no_costs_can_be(wrong):
    with pytest.raises(InputError, match="Costs are positive"): Costs(**(asdict(CHEAP) | wrong))


def test_nothing_is_measured_unasked(named):
    target, measured = named
    assert costs_for(target, hybrid()) == KnownCosts(None, "default") and measured == [] and kept_costs() == []
    assert calibrate(target, hybrid()) == KnownCosts(BOTH, "calibrated") and measured == [2]
    assert costs_for(target, hybrid()) == KnownCosts(BOTH, "calibrated") and measured == [2]
    assert costs_for(target, hybrid(), batch_size=4) == KnownCosts(None, "default")


def test_a_busy_machine_measures_nothing(named, monkeypatch):
    target, _ = named
    steady = [TimedRound(0, 0, seconds, 0) for seconds in (1.0, 1.1, 1.2, 1.3)]
    check_steady([*steady, TimedRound(5, 0, 99.0, 0)])
    with pytest.raises(BusyError, match="other programs"): check_steady([*steady, TimedRound(0, 0, 3.0, 0)] * 3)
    def busy(*_): raise BusyError("so much to do")
    monkeypatch.setattr(module, "measure_costs", busy)
    with pytest.raises(BusyError, match="so much to do"): calibrate(target, hybrid())
    assert kept_costs() == [] and costs_for(target, hybrid()).origin == "default"


def test_measured_for_both_kinds_of_text(tiny, monkeypatch):
    monkeypatch.setattr(module, "check_steady", lambda rounds: None)
    found = measure_costs(tiny, members_of(hybrid(tiny)), repeats=2)
    assert found.tree is None  # no head drafts here
    for costs in (asdict(found.greedy), asdict(found.sampled)):
        assert len(costs["verify"]) == longest_chain(tiny, 16) and costs["c"][0] == (0, 0) and min(costs["c"][1]) >= 0

# the file


def test_measured_when_asked_and_read_after_that(named):
    target, measured = named
    found = [calibrate(target, hybrid(target)), *(costs_for(target, hybrid(target)) for _ in range(2))]
    assert found == [KnownCosts(BOTH, "calibrated")] * 3 and measured == [2]
    only, = kept_costs()
    assert only["state"] == "ready" and only["costs"]["greedy"]["step"] == 0.01
    assert "digest" in only["about"]["target"] and only["about"]["drafters"][1]["model"]["name"] == "tiny"
    calibrate(target, HybridDrafter(SuffixDrafter()))  # another pair
    assert measured == [2, 1] and len(kept_costs()) == 2
    calibrate(target, hybrid(target))  # again: whoever asks is not given old figures
    assert measured == [2, 1, 2] and len(kept_costs()) == 2


def test_costs_of_a_model_without_a_name_are_not_kept(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    monkeypatch.setattr(module, "measure_costs", lambda target, drafters: BOTH)
    assert tiny.name is None and calibrate(tiny, hybrid()) == KnownCosts(BOTH, "calibrated")
    assert costs_for(tiny, hybrid()) == KnownCosts(None, "default") and list(tmp_path.iterdir()) == []


def test_nothing_is_measured_on_a_gpu():
    class OnGPU: name, device = "tiny", torch.device("cuda")
    with pytest.raises(InputError, match="measured on a CPU"): calibrate(OnGPU(), hybrid())


WAYS_TO_BREAK = {
    "torn": lambda text: text[:150], "empty": lambda text: "", "not JSON": lambda text: "costs",
    "a list": lambda text: "[]", "another version": lambda text: text.replace('"version": 2', '"version": 1'),
    "NaN": lambda text: text.replace("1.02", "NaN"), "negative": lambda text: text.replace("1.02", "-1.02"),
    "no greedy ones": lambda text: text.replace('"greedy"', '"gready"'),
    "no numbers": lambda text: text.replace("1.02", '"1.02"'), "bytes": None,
}


@pytest.mark.parametrize("way", WAYS_TO_BREAK)
def test_a_damaged_file_is_said_and_not_believed(named, way, capsys):
    target, measured = named
    calibrate(target, hybrid())
    file = Path(kept_costs()[0]["file"])
    if way == "bytes": file.write_bytes(b"\xff\xfe\x00")
    else: file.write_text(WAYS_TO_BREAK[way](file.read_text()))
    with pytest.raises(ModelError, match="holds no costs"): read_costs(file)
    assert kept_costs() == [{"file": str(file), "state": "damaged", "about": None, "costs": None}]
    before = file.read_bytes()
    assert costs_for(target, hybrid()).origin == "default" and measured == [2] and file.read_bytes() == before
    said = capsys.readouterr().err
    assert "holds no costs" in said and "Calibrate again" in said and len(said.strip().splitlines()) == 1
    assert calibrate(target, hybrid()).costs == BOTH and kept_costs()[0]["state"] == "ready"


@pytest.mark.parametrize("change", ["code", "weights", "processor", "torch", "threads"])
def test_stale_costs_are_not_believed(named, monkeypatch, capsys, change):
    target, measured = named
    calibrate(target, hybrid())
    if change == "code": monkeypatch.setattr(module, "code_digest", lambda: "0" * 12)
    if change == "weights": monkeypatch.setattr(target, "digest", "f" * 64, raising=False)
    if change == "processor": monkeypatch.setattr(module, "processor_name", lambda: "an abacus")
    if change == "torch": monkeypatch.setattr(torch, "__version__", "9.9")
    if change == "threads": monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    if change in ("code", "processor", "torch"): assert kept_costs()[0]["state"] == "stale"
    assert costs_for(target, hybrid()).origin == "default" and measured == [2]
    said = capsys.readouterr().err
    assert ("something changed (" in said) == (change != "threads")
    assert calibrate(target, hybrid()).costs == BOTH and measured == [2, 2]
    assert costs_for(target, hybrid()).origin == "calibrated" and len(measured) == 2
    assert len(kept_costs()) == (2 if change == "threads" else 1)  # of each number of threads


def test_many_at_once_measure_one_after_the_other(named, monkeypatch):
    target, _ = named
    real, inside, most = module.measure_costs, [], []
    def slowly(*arguments):
        inside.append(1)
        most.append(len(inside))
        module.np.random.default_rng(0).random(200_000).sort()
        inside.pop()
        return real(*arguments)
    monkeypatch.setattr(module, "measure_costs", slowly)
    found = []
    threads = [Thread(target=lambda: found.append(calibrate(target, hybrid()))) for _ in range(6)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert found == [KnownCosts(BOTH, "calibrated")] * 6 and max(most) == 1
    assert costs_for(target, hybrid()).costs == BOTH and len(kept_costs()) == 1


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "costs.json"
    write_costs(file, {"processor": "one"}, BOTH)
    def full(*_): raise OSError("the disk is full")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ModelError, match="full"): write_costs(file, {"processor": "two"}, BOTH)
    assert read_costs(file) == ({"processor": "one"}, BOTH)
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


def test_where_nothing_can_be_kept(named, monkeypatch, tmp_path, capsys):
    target, _ = named
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "file"))
    assert calibrate(target, hybrid()).costs == BOTH and "can't be kept" in capsys.readouterr().err
    assert costs_for(target, hybrid()).origin == "default"


def test_people_can_read_it(tmp_path):
    write_costs(tmp_path / "costs.json", {"processor": "an abacus"}, BOTH)
    text = (tmp_path / "costs.json").read_text()
    assert text.isascii() and json.loads(text)["costs"] == json.loads(json.dumps(asdict(BOTH)))
    assert len(text.splitlines()) == 11 and '  "processor": "an abacus"' in text.splitlines()

# who goes by them


def test_who_goes_by_costs():
    usual, own = hybrid(), HybridDrafter(NoDrafter(), c=(0.1,))
    adapting = AdaptiveDrafter(NoDrafter(), AdaptiveLookahead())
    assert [uses_costs(d, False) for d in (usual, own, NGramDrafter(), adapting)] == [True] + [False] * 3
    assert [uses_costs(d, True) for d in (usual, own, NGramDrafter(), adapting)] == [True, False, True, False]
    priced = with_costs(usual, CHEAP)
    assert (priced.members, priced.c, priced.verify, priced.priors) == (
        usual.members, CHEAP.c, CHEAP.verify, usual.priors)
    one = Costs(1.0, (1.5, 2.0), ((0.3, 0.2),))
    for drafter in (NGramDrafter(), ModelDrafter(None, 4)):
        controller = with_costs(drafter, one, True).controller.chooser
        assert controller.c == ((0.3, 0.2),) and controller.verify == (1.5, 2.0)
        assert with_costs(drafter, None, True).controller.chooser.verify == VERIFY
    for same in (own, NGramDrafter()): assert with_costs(same, one) is same
    with pytest.raises(InputError, match="for 1 drafters"): with_costs(usual, one)


def text_of(pair, seed=5, **more):
    return pair.generate([1, 2, 3, 1, 2, 3, 1], temperature=1.0, seed=seed, max_new_tokens=40, **more)


def test_the_same_costs_give_the_same_tokens(tiny, monkeypatch):
    "On a busy day, too; and a result says which costs they were."
    def pair(costs): return Pair(tiny, hybrid(tiny.skip([2])), costs=costs)
    pays, doesnt = MachineCosts(DEAR, CHEAP), MachineCosts(CHEAP, DEAR)
    quiet, other = text_of(pair(pays)), text_of(pair(doesnt))
    assert quiet.num_drafted > 10 and other.num_drafted <= 3 and quiet.generated_ids != other.generated_ids
    assert quiet.costs == CHEAP.as_dict() | {"origin": "given"} and quiet.costs != other.costs
    real = type(tiny).forward
    def slow(self, ids, cache, **more):
        sum(range(20_000 * ids.shape[1] ** 2))  # a day on which several tokens take far longer
        return real(self, ids, cache, **more)
    monkeypatch.setattr(type(tiny), "forward", slow)
    busy = text_of(pair(pays))
    assert [r.drafted for r in busy.rounds] == [r.drafted for r in quiet.rounds]
    assert busy.generated_ids == quiet.generated_ids


def test_a_pair_goes_by_what_is_known(named, monkeypatch):
    target, measured = named
    pair = Pair(target, hybrid())
    assert text_of(pair, method="plain").costs is None  # nothing is chosen
    assert text_of(pair).costs == {"origin": "default"} and measured == []
    fresh = Pair(target, hybrid())
    assert fresh.calibrate() == {1: KnownCosts(BOTH, "calibrated")} and measured == [2]
    for calibrated in (fresh, Pair(target, hybrid())):  # this pair, and a new one of the same parts
        assert [text_of(calibrated).costs for _ in range(2)] == [DEAR.as_dict() | {"origin": "calibrated"}] * 2
        greedy = calibrated.generate([1, 2], max_new_tokens=4)  # greedy text has costs of its own
        assert greedy.costs == CHEAP.as_dict() | {"origin": "calibrated"}
    assert text_of(pair).costs == {"origin": "default"}  # what a pair has chosen by doesn't change under it
    given = Pair(target, hybrid(), costs=MachineCosts(CHEAP, CHEAP))
    assert text_of(given).costs == CHEAP.as_dict() | {"origin": "given"} and measured == [2]
    given.calibrate()  # who measures wants to go by it
    assert text_of(given).costs["origin"] == "calibrated"
    fixed = Pair(target, NGramDrafter())
    assert fixed.generate([1, 2], max_new_tokens=4).costs is None  # K is fixed
    own = Pair(target, HybridDrafter(NoDrafter(), c=(0.1,)))
    assert own.generate([1, 2], max_new_tokens=4).costs is None and measured == [2, 2]


@pytest.mark.parametrize("sizes", [(0,), (2.5,), ("4",), (1, -1)], ids=str)
def test_batch_sizes_that_cannot_be(named, sizes):
    target, measured = named
    with pytest.raises(InputError, match="A batch size"): Pair(target, hybrid()).calibrate(sizes)
    assert measured == []


def test_none_at_all_is_a_choice(tiny):
    "Where nothing can pay, what is drafted is a guess now and then."
    pair = Pair(tiny, hybrid(tiny), costs=MachineCosts(DEAR, DEAR))
    result = pair.generate([1, 2, 1, 2], max_new_tokens=100)
    assert result.num_drafted <= 1
    cheap = Pair(tiny, hybrid(tiny), costs=MachineCosts(CHEAP, CHEAP)).generate([1, 2, 1, 2], max_new_tokens=100)
    assert cheap.num_drafted > 30 and cheap.generated_ids == result.generated_ids

# the executed proof


PROVEN = {
    "pays": Costs(1.0, (1.0, 1.0, 1.0), ((0.0, 0.0), (0.1, 0.0))),
    "a dear first guess": Costs(1.0, (1.1, 1.15, 1.2), ((0.0, 0.0), (0.3, 0.05))),
    "hardly ever pays": Costs(1.0, (1.4, 1.5, 1.6), ((0.0, 0.0), (0.3, 0.3))),
}


@pytest.mark.parametrize("name", PROVEN)
@pytest.mark.parametrize("K, V", [(1, 3), (2, 2), (3, 2)])
def test_the_distribution_is_the_targets(K, V, name):
    "Of hybrids and of adaptive drafters that go by measured costs."
    costs = PROVEN[name]
    for case, p, q in language_pairs(V, f"costs {K}", most=max(2, 5 - K), halves=True):
        width = V - 1 if case == "smaller draft vocabulary" else V
        def model(): return ModelDrafter(ExactModel(q, width), V)
        def both(): return with_costs(HybridDrafter(SuffixDrafter(), model()), costs)
        def alone(): return with_costs(model(), replace(costs, c=costs.c[1:]), True)
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
    texts = [list(speculate(tiny, with_costs(HybridDrafter(SuffixDrafter()), Costs(1.0, v, ((0.0, 0.0),))),
                            [1, 2, 1, 2], SamplingParams(), SeededRandom(0), 3, 30)) for v in ((1.0,) * 3, (9.0,) * 3)]
    one, other = ([token for r in rounds for token in r.emitted] for rounds in texts)
    assert one == other


@pytest.mark.parametrize("count", [0, 1, 3])
def test_costs_of_another_number_of_drafters_are_not_believed(named, capsys, count):
    target, measured = named
    calibrate(target, hybrid())
    file = Path(kept_costs()[0]["file"])
    held = json.loads(file.read_text())
    for kind in ("greedy", "sampled"): held["costs"][kind]["c"] = [[0.1, 0.1]] * count
    file.write_text(json.dumps(held))
    assert costs_for(target, hybrid()).origin == "default" and measured == [2]
    assert "the number of drafters isn't 2" in capsys.readouterr().err

# what ships


@pytest.fixture(scope="module")
def default(): return load("smollm2", "cpu", "float32")


def test_the_table_has_what_the_default_pair_needs(default):
    device = shipped_table().devices["cpu"]
    assert {(entry.dtype, entry.batch_size) for entry in device.entries} >= {
        (dtype, size) for dtype in ("float32", "bfloat16", "int8", "int4") for size in (1, 2, 4, 8, 16)}
    drafter = best_drafter(default)
    keys = [drafter_key(member) for member in drafter.members]
    assert keys[0] == "lookup" and keys[1].startswith("head ")
    for entry in device.entries:  # of other models the table has a lookup's, at least
        needed = keys if entry.shape == module.model_shape(default) else keys[:1]
        assert entry.greedy.of(needed) and entry.sampled.of(needed), entry  # `Costs` checks the numbers
    known = costs_for(default, drafter)
    assert known.origin == "shipped" and known.costs == shipped_costs(default, drafter.members, 1)
    assert Pair(default).generate("The sea", max_new_tokens=3).costs == known.costs.greedy.as_dict() | {
        "origin": "shipped"}


def test_what_the_table_does_not_have_goes_by_the_constants(default, tiny):
    drafter = best_drafter(default)
    assert costs_for(tiny, HybridDrafter(SuffixDrafter())).origin == "default"  # another model
    model = HybridDrafter(SuffixDrafter(), ModelDrafter(tiny, 96))
    assert costs_for(default, model) == KnownCosts(None, "default")              # another drafter
    assert costs_for(default, HybridDrafter(SuffixDrafter())).origin == "shipped"
    class Elsewhere(type(default)):  # another kind of device
        def __init__(self): self.__dict__ |= default.__dict__ | {"device": torch.device("cuda"), "name": None}
    assert costs_for(Elsewhere(), drafter).origin == "default"


def test_batch_sizes_between_those_of_the_table(default):
    drafters = best_drafter(default).members
    four, eight = (shipped_costs(default, drafters, size).greedy for size in (4, 8))
    between = shipped_costs(default, drafters, 6).greedy
    for low, mid, high in zip(four.verify, between.verify, eight.verify):
        assert min(low, high) <= mid <= max(low, high)
    assert four != between != eight
    assert shipped_costs(default, drafters, 10_000) == shipped_costs(default, drafters, 64)


def test_the_file_is_as_its_tool_writes_it():
    file = Path(module.__file__).parent / "data" / "costs.json"
    maker, table = tool("costs"), json.loads(file.read_text())
    assert maker.as_text(table) == file.read_text() and file.read_text().isascii()
    entries = table["devices"]["cpu"]["entries"]
    places = [maker.place(entry) for entry in entries]
    assert places == sorted(set(places))


def test_the_tool_measures_and_keeps_what_it_could_not(monkeypatch, tmp_path, tiny, capsys):
    maker, file = tool("costs"), tmp_path / "costs.json"
    monkeypatch.setattr(maker, "load", lambda *names, **more: tiny)
    monkeypatch.setattr(maker, "best_drafter", lambda target: HybridDrafter(SuffixDrafter()))
    one = Costs(0.01, (1.02, 1.04), ((0.0, 0.0),))
    monkeypatch.setattr(maker, "measure_costs", lambda *given: MachineCosts(one, one))
    def busy(*given): raise BusyError("busy")
    monkeypatch.setattr(maker, "measure_batch_costs", busy)
    monkeypatch.setattr(maker.os, "getloadavg", lambda: (0.5,) * 3)
    monkeypatch.setattr(maker.torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(maker.torch, "set_grad_enabled", lambda on: None)
    monkeypatch.setattr("sys.argv", ["costs.py", "--out", str(file), "--only", "int4", "--sizes", "1", "4"])
    maker.main()
    entry, = module.ShippedTable.model_validate_json(file.read_bytes()).devices["cpu"].entries
    assert (entry.dtype, entry.batch_size, entry.greedy.c) == ("int4", 1, {})
    assert entry.greedy.of(["lookup", "lookup"]) == Costs(0.01, (1.02, 1.04), ((0.0, 0.0),) * 2)
    assert entry.greedy.of(["lookup", None]) is None
    assert "int4, 4: the machine is too busy" in capsys.readouterr().out
    before = file.read_text()
    maker.main()  # what is there already is replaced, what couldn't be measured stays
    assert file.read_text() == before


def test_the_tool_says_what_choosing_cost(monkeypatch, tmp_path, tiny):
    "Against the fixed way that was fastest over all prompts; and what a round costs by table, calibration and loop."
    maker, file = tool("choosing"), tmp_path / "choosing.json"
    table, here = Costs(1.0, (1, 1, 1, 1.25), ((0, 0), (.5, .25))), Costs(1.0, (1, 1, 1, 1.5), ((0, 0), (.5, .5)))
    monkeypatch.setattr(maker, "load", lambda *names, **more: tiny)
    monkeypatch.setattr(maker, "best_drafter", lambda target: HybridDrafter(SuffixDrafter(), NoDrafter()))
    monkeypatch.setattr(maker, "costs_for", lambda *given: KnownCosts(MachineCosts(table, table), "shipped"))
    tries = []
    def busy_at_first(*given):
        tries.append(given)
        if len(tries) == 1: raise BusyError("busy")
        return MachineCosts(here, here)
    monkeypatch.setattr(maker, "measure_costs", busy_at_first)
    class Timed:  # a token takes a second plainly, .8 as chosen, and with the head .9, with four draft tokens .5
        def __init__(self, target, drafter): self.target, self.drafter = target, drafter
        def generate(self, prompt, max_new_tokens, K=5, method="speculative", **asked):
            hybrid = isinstance(self.drafter, HybridDrafter)
            each = 1.0 if method == "plain" else .8 if hybrid else .5 if K == 4 else .9
            made = max_new_tokens - 1
            # of three rounds the last ends early
            rounds = [SimpleNamespace(drafted=[5] * n) for n in (4, 4, 1)]
            return SimpleNamespace(total_time=7 + each * made, time_to_first_token=7.0, rounds=rounds,
                                   draft_time_total_ms=100.0 * made)
    monkeypatch.setattr(maker, "Pair", Timed)
    monkeypatch.setattr(maker.torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr("sys.argv", ["choosing.py", "--out", str(file), "--only", "int4", "--tokens", "10"])
    maker.main()
    found = json.loads(file.read_text())["results"]["int4"]
    for row in (found["0"], found["1"]):
        assert row["best_fixed"] == "head, K = 4" and row["regret"] == pytest.approx(.8 / .5 - 1)
        assert row["over_plain"] == pytest.approx(1 / .8) == row["domains"]["code"] and len(row["domains"]) == 3
        assert row["price"] == pytest.approx({"shipped": (2 * (1.25 + .5 + 3 * .25) + 1 + .5) / 3,
                                              "calibrated": (2 * (1.5 + 2) + 1 + .5) / 3, "loop": 9 * .5 / 3})
        assert row["c"] == pytest.approx(.1 * 9 / 9) and row["drafted"] == 3
    monkeypatch.setattr("sys.argv", ["choosing.py", "--out", str(file), "--only", "int8", "--tokens", "10"])
    maker.main()  # the others' figures stay
    assert json.loads(file.read_text())["results"].keys() == {"int4", "int8"}
