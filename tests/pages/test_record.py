"""What the page of recorded runs is made of: the recorder changes nothing, texts can come before drafts, the averages
are averages, and the stored file holds what it should."""
import json
import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs

import pytest
import torch

from helpers import tiny, tool
from specdec.drafters.base import Draft
from specdec.drafters.lookup import NGramDrafter
from specdec.drafters.model import ModelDrafter
from specdec.loop import speculate
from specdec.lossless.enumerate import exact_distribution
from specdec.sampling import SamplingParams, SeededRandom

ROOT = Path(__file__).parents[2]
record = tool("record")
PROMPT, LENGTH, T = [2, 0, 2], 4, SamplingParams(1.0)


# Texts first, drafts afterwards: the same law as the loop's

class Narrow:
    "A drafter that knows two tokens only, and draws among them, as the trained head does among its own."
    layers, tokens = (), torch.tensor([2, 0])
    def start(self, tokens, features, limit, eos_ids): return self  # it remembers nothing
    def commit(self, tokens, features): "Nothing to remember."
    def propose(self, K, sampling, rng):
        q = torch.tensor([.7, .3])
        draft = [int(self.tokens[rng.categorical(q)]) for _ in range(K)]
        return Draft(draft, torch.zeros(K, 3).index_copy_(1, self.tokens, q.expand(K, 2)))


def models():
    "A target and another for a draft, with three tokens."
    return tiny(vocab=3, layers=1), tiny(vocab=3, layers=1, seed=1)


def looped(drafter):
    "What the loop does: accepted guesses and tokens of each round."
    def program(rng):
        rounds = speculate(models()[0], drafter, PROMPT, T, rng, 2, LENGTH)
        return tuple((r.accepted, *r.emitted) for r in rounds)
    return program


def told_backwards(drafter, vocabulary=None, along=False):
    "The target alone writes a text; then the rounds are found in which the loop would have written it."
    target, draft = models()

    def program(rng):
        ids, rows = list(PROMPT), []
        for _ in range(LENGTH):
            rows.append(T.probs(target.forward(torch.tensor([ids]), target.new_cache(len(ids)), last=1)[0, -1]))
            ids.append(rng.categorical(rows[-1]))
        text = record.Text(PROMPT, ids[len(PROMPT):], torch.stack(rows), None)
        mine = drafter
        if along:
            whole = torch.tensor([ids[:-1]])
            mine = record.Along(text.tokens, T.probs(draft.forward(whole, draft.new_cache(len(ids)), last=LENGTH)[0]))
        rounds = record.replay(mine, record.Coupled(rng, text, vocabulary), text, T, 2, LENGTH)
        return (0, text.tokens[0]), *((r.accepted, *r.emitted) for r in rounds)

    return program


@pytest.mark.parametrize("drafter, options", [
    pytest.param(lambda: ModelDrafter(models()[1], 3), {}, id="a model"),
    pytest.param(lambda: ModelDrafter(models()[1], 3), {"along": True}, id="a model that read the text at once"),
    pytest.param(NGramDrafter, {}, id="lookup"),
    pytest.param(Narrow, {"vocabulary": Narrow.tokens}, id="a vocabulary of its own"),
])
def test_texts_can_come_before_drafts(drafter, options):
    "Every branch of both is walked: the same rounds with the same probabilities."
    loop, backwards = exact_distribution(looped(drafter())), exact_distribution(told_backwards(drafter(), **options))
    assert {k: float(v) for k, v in backwards.items()} == pytest.approx(
        {k: float(v) for k, v in loop.items() if v > 1e-9}, abs=1e-6
    )
    assert max(accepted for rounds in loop for accepted, *_ in rounds) == 2


def test_guesses_that_look_ahead_are_noticed():
    "The negative control: a draft that simply says the text is accepted too often."
    class Cheat(record.Coupled):
        def categorical(self, weights):
            self.at += 1
            return self.text.tokens[self.at - 1]
    honest, record.Coupled = record.Coupled, Cheat
    try: backwards = exact_distribution(told_backwards(ModelDrafter(models()[1], 3)))
    finally: record.Coupled = honest
    loop = exact_distribution(looped(ModelDrafter(models()[1], 3)))
    assert max(abs(float(loop.get(k, 0) - v)) for k, v in backwards.items()) > .01


def test_texts_written_together_are_those_written_alone():
    "Plain decoding of several seeds at once, with what drafters may ask."
    target = models()[0]
    texts = record.write_texts(target, PROMPT, T, [0, 1, 2], 6, (0, 1), frozenset([1]))
    for seed, text in enumerate(texts):
        alone = [
            t for r in speculate(target, ModelDrafter(target, 3), PROMPT, T, SeededRandom(seed), 1, 6, frozenset([1]))
            for t in r.emitted
        ]
        assert text.tokens[:1] == alone[:1] and 1 not in text.tokens[:-1]
        whole = torch.tensor([[*PROMPT, *text.tokens[:-1]]])
        logits, features = target.forward(whole, target.new_cache(12), layers=(0, 1))
        assert torch.allclose(text.p[:len(text.tokens)], T.probs(logits[0, len(PROMPT) - 1:]), atol=1e-5)
        assert torch.allclose(text.features[:whole.shape[1]], features[0], atol=1e-5)
    assert len({tuple(text.tokens) for text in texts}) > 1


# The statistics

def test_a_spread_is_what_it_says():
    assert record.spread([]) is None and record.spread([2.0]) == [2.0, None, 2.0, 2.0]
    mean, error, low, high = record.spread([float(x) for x in range(11)])
    assert (mean, low, high) == (5, 1, 9) and error == pytest.approx(1, abs=1e-9)  # √(110 / 10) / √11


@pytest.mark.parametrize("number, written", [
    (.12345, "0.123"), (.99999, "1"), (0, "0"), (.000321, "0.0003"),
])
def test_numbers_under_the_microscope_are_short(number, written):
    assert str(record.decimals(number)) == written


def test_rounds_are_counted_by_position():
    Round = record.Round
    rounds = [Round([5, 6, 7], 1, [5, 9]), Round([5, 6], 2, [5, 6, 1]), Round([], 0, [4])]
    counts = record.counted(rounds, 3)
    assert counts == {"rounds": 3, "tokens": 6, "tried": [2, 2, 0], "kept": [2, 1, 0]}
    both = [counts, {"rounds": 0, "tokens": 0, "tried": [0, 0, 0], "kept": [0, 0, 0]}]
    found = record.average(both)
    assert found["texts"] == 1 and found["tau"][0] == 2 and found["alpha"][0] == .75
    assert record.by_position(both) == {"tried": [2, 2, 0], "kept": [2, 1, 0]}
    undrafted = record.counted([Round([], 0, [4])], 3)
    assert record.average([undrafted])["alpha"] is None  # nothing was tried, so nothing is said


def test_averages_are_of_texts_and_of_all_prompts_together(monkeypatch):
    monkeypatch.setattr(record, "AVERAGES", {"prompts": ["a", "b"], "temperatures": [0.0], "Ks": [1], "texts": 2})
    monkeypatch.setattr(record, "DRAFTERS", {"x": ("x", "x")})
    def of(tokens): return {"rounds": 10, "tokens": tokens, "tried": [10], "kept": [tokens - 10]}
    parts = {("a", 0.0): {"x 1": [of(10), of(12)]}, ("b", 0.0): {"x 1": [of(20)]}}
    cells = {c["prompt"]: c for c in record.averages(parts)}
    assert cells["a"]["tau"][0] == 1.1 and cells["b"]["tau"][0] == 2 and cells["all"]["tau"][0] == 1.4
    assert cells["all"]["texts"] == 3 and cells["all"]["kept"] == [12] and "kept" not in cells["a"]


def test_ends_are_medians_of_each_round():
    assert record.median_ends([[1, 1, 1], [1, 5, 2], [9, 2, 3]]) == [1, 3, 5]
    with pytest.raises(ValueError): record.median_ends([[1], [1, 2]])  # rounds that are not the same


def test_parts_share_one_table_of_texts():
    def part(tokens, a, b):
        rounds = [{"draft": [a], "own": b, "positions": [[.5, [[a, .1, .2], [b, .3, .4]]]]}]
        return {"tokens": tokens, "plain": [{"text": [a, b]}], "runs": [{"first": b, "rounds": rounds}]}
    found = record.joined([part(["x", "y"], 0, 1), part(["y", "z"], 0, 1)])
    assert found["tokens"] == ["x", "y", "z"] and [lane["text"] for lane in found["plain"]] == [[0, 1], [1, 2]]
    run = found["runs"][1]
    assert run["first"] == 2 and run["rounds"][0]["draft"] == [1] and run["rounds"][0]["own"] == 2
    assert run["rounds"][0]["positions"] == [[.5, [[1, .1, .2], [2, .3, .4]]]]


def test_an_interrupted_recording_goes_on(monkeypatch, tmp_path):
    "What ended before the interrupt is kept, and what was in the making leaves no half of a file."
    monkeypatch.setattr(record, "PARTS", tmp_path)
    monkeypatch.setattr(record, "RUNS", {"prompts": ["a", "b"], "temperatures": [0.0, 1.0]})
    done = []

    def work(pairs, prompt, temperature):
        if len(done) == 2: raise KeyboardInterrupt
        done.append((prompt, temperature))
        return {"at": [prompt, temperature]}

    with pytest.raises(KeyboardInterrupt): record.make("runs", work, {})
    assert done == [("a", 0.0), ("a", 1.0)] and len(list(tmp_path.glob("*/*"))) == 2
    found = record.make("runs", lambda pairs, prompt, t: {"at": [prompt, t], "new": True}, {})
    assert [("new" in part) for part in found.values()] == [False, False, True, True]
    assert [part["at"] for part in found.values()] == [["a", 0.0], ["a", 1.0], ["b", 0.0], ["b", 1.0]]


def test_packing_loses_nothing(recorded):
    stored = json.loads((ROOT / "nbs" / "data" / "recorded.json").read_text(encoding="utf-8"))
    assert record.packed(recorded) == stored and stored["runs"] != recorded["runs"]


def test_times_keep_the_averages(monkeypatch, tmp_path, recorded, capsys):
    "Only runs are recorded, only their parts are used up; and not beside averages of other settings."
    out, parts = tmp_path / "recorded.json", tmp_path / "parts" / "x"
    out.write_text(json.dumps(record.packed(recorded)), encoding="utf-8")
    parts.mkdir(parents=True)
    for kind in ("runs", "averages"): (parts / f"{kind}-a-0.0.json").touch()
    asked = []
    monkeypatch.setattr(record, "OUT", out)
    monkeypatch.setattr(record, "PARTS", tmp_path / "parts")
    monkeypatch.setattr(record, "load_pair", lambda *_, **__: SimpleNamespace(target=SimpleNamespace(digest="new")))
    monkeypatch.setattr(
        record, "make", lambda kind, *_: asked.append(kind) or {kind: {"tokens": [], "plain": [], "runs": []}}
    )
    monkeypatch.setattr("sys.argv", ["record.py", "--times"])
    record.main()
    written = record.unpacked(json.loads(out.read_text(encoding="utf-8")))
    assert asked == ["runs"] and written["runs"] == [] and written["cells"] == recorded["cells"]
    assert written["digest"] == "new" and [p.name for p in parts.iterdir()] == ["averages-a-0.0.json"]
    monkeypatch.setattr(record, "SETTINGS", {**record.SETTINGS, "runs": {}})
    with pytest.raises(SystemExit): record.main()
    assert "other settings" in capsys.readouterr().err


# The recorder

def test_a_wrong_record_is_noticed():
    good = dict(p=[.5, .2], q=[.5, .4], u=[.9, .6], accepted=1)
    assert not record.inconsistent(good)
    assert (
        record.inconsistent({**good, "u": [0.9, 0.4]})
        and record.inconsistent({**good, "accepted": 0})
        and record.inconsistent({**good, "p": [0.4, 0.2]})
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_recorder_changes_nothing(temperature):
    "The same run without it says the same; a tiny random model for a target, and another for a draft."
    target, drafter = tiny(vocab=40), ModelDrafter(tiny(vocab=40, seed=1), 40)
    texts, rng = [], record.RecordingRandom(0)
    ids, plain = [3, 1, 4], SeededRandom(0)
    recorder = record.Recorder(texts, lambda ids: f"<{ids[0]}>", SamplingParams(temperature))
    with_it = list(speculate(target, drafter, ids, SamplingParams(temperature), rng, 3, 20, verify=recorder.verify))
    assert with_it == list(speculate(target, drafter, ids, SamplingParams(temperature), plain, 3, 20))
    assert [n["accepted"] for n in recorder.rounds] == [r.accepted for r in with_it[1:]]
    assert [[texts[t] for t in n["draft"]] for n in recorder.rounds] == [
        [f"<{t}>" for t in r.drafted] for r in with_it[1:]
    ]


def test_the_run_that_is_timed_is_the_recorded_one():
    "Also of draft tokens that were certain."
    pair = SimpleNamespace(target=tiny(vocab=5), eos_ids=frozenset(), tokenizer=SimpleNamespace(decode=str))
    for drafter, temperature in product((NGramDrafter(), ModelDrafter(tiny(vocab=5, seed=1), 5)), (0.0, 1.0)):
        run = record.record(pair, drafter, [3, 1, 4, 3, 1], temperature, 3, [])
        rounds, seconds = record.timed(pair, drafter, [3, 1, 4, 3, 1], temperature, 3)
        noted = [(len(n["draft"]), n["accepted"], n["emitted"]) for n in run["rounds"]]
        assert noted == [(len(r.drafted), r.accepted, len(r.emitted)) for r in rounds[1:]], (drafter, temperature)
        assert len(seconds) == len(rounds) and any(drafted for drafted, _, _ in noted)


# What is stored

@pytest.fixture(scope="module")
def recorded() -> dict:
    "What the page shows."
    return record.unpacked(json.loads((ROOT / "nbs" / "data" / "recorded.json").read_text(encoding="utf-8")))


def test_recorded_runs_fill_the_grid(recorded):
    runs, drafters = recorded["settings"]["runs"], recorded["settings"]["drafters"]
    grid = {(p, d, t, k) for p in runs["prompts"] for d in drafters for t in runs["temperatures"] for k in runs["Ks"]}
    found = [(r["prompt"], r["drafter"], r["temperature"], r["K"]) for r in recorded["runs"]]
    assert set(found) == grid and len(found) == len(grid)
    assert len(recorded["plain"]) == len(runs["prompts"]) * len(runs["temperatures"])
    assert recorded["settings"] == json.loads(json.dumps(record.SETTINGS)), "recorded with other settings: record anew"
    assert (ROOT / "nbs" / "data" / "recorded.json").stat().st_size < 260_000


def test_recorded_rounds_add_up(recorded):
    for run in recorded["runs"]:
        ends = run["ends"]
        assert len(ends) == len(run["rounds"]) + 1 and ends == sorted(ends) and ends[0] > 0
        for r in run["rounds"]:
            tried = min(r["accepted"] + 1, len(r["draft"]))
            assert len(r["p"]) == len(r["q"]) == tried <= run["K"]
            assert len(r["u"]) == (tried if run["temperature"] else 0)
            assert 1 <= r["emitted"] <= r["accepted"] + 1
            assert len(r["positions"]) == r["accepted"] + 1 and not record.inconsistent(r)
            for (_, top), token in zip(r["positions"], r["draft"]): assert token in [t for t, *_ in top]
            assert r["own"] in [t for t, *_ in r["positions"][-1][1]]
    for lane in recorded["plain"]:
        assert len(lane["ends"]) == len(lane["text"]) and lane["ends"] == sorted(lane["ends"])


def test_a_round_is_there_that_teaches(recorded):
    "Eight of eight and a bonus, by the default pair, on the prompt that repeats itself."
    at = {"prompt": "song", "drafter": "smollm2", "temperature": .7, "K": 8}
    run = next(r for r in recorded["runs"] if all(r[name] == value for name, value in at.items()))
    assert any(len(r["draft"]) == r["accepted"] == 8 and r["emitted"] == 9 for r in run["rounds"])


def test_averages_are_over_enough_texts(recorded):
    "Twenty seeds and several prompts, with their spread; greedy text has no seed."
    over = recorded["settings"]["averages"]
    assert over["texts"] >= 20 and len(over["prompts"]) >= 3
    cells = {(c["drafter"], c["prompt"], c["temperature"], c["K"]): c for c in recorded["cells"]}
    names = ["all", *over["prompts"]]
    grid = [(d, p, t, k) for d in recorded["settings"]["drafters"] for p in names
            for t in over["temperatures"] for k in over["Ks"]]
    assert set(grid) == set(cells)
    for (_, prompt, temperature, K), c in cells.items():
        of_each = over["texts"] if temperature else 1
        assert .9 * of_each * (len(over["prompts"]) if prompt == "all" else 1) <= c["texts"]
        mean, error, low, high = c["tau"]
        assert 1 <= low <= high <= K + 1 and 1 <= mean <= K + 1 and (error is not None or c["texts"] == 1)
        if prompt == "all":
            assert error > 0 and len(c["tried"]) == len(c["kept"]) == K
            assert c["tried"] == sorted(c["tried"], reverse=True)


def test_the_song_repeats_itself(recorded):
    "Lookup finds more in it than in the other prompts, at every temperature that is shown, averages and all."
    over = recorded["settings"]["averages"]
    cells = {(c["prompt"], c["temperature"]): c["tau"][0]
             for c in recorded["cells"] if c["drafter"] == "smollm2-ngram" and c["K"] == 8}
    others = [name for name in over["prompts"] if name != "song"]
    for t in recorded["settings"]["runs"]["temperatures"]:
        assert cells["song", t] > max(cells[name, t] for name in others)


def test_the_picture_of_recorded_runs_is_up_to_date(recorded):
    drawn = tool("pictures").draw_recorded(recorded)
    assert (ROOT / "nbs" / "images" / "recorded.svg").read_text(encoding="utf-8") == drawn


def test_the_pictures_of_stored_data_are_up_to_date(recorded):
    pictures = tool("pictures")
    rounds = pictures.real_rounds(recorded)
    drawn = {"round": pictures.draw_round(*rounds), "round-still": pictures.draw_round(*rounds, still=True),
             "rollback": pictures.draw_rollback(),
             "results": pictures.draw_results(pictures.gains(*map(pictures.stored, ("choosing", "target"))))}
    for name, svg in drawn.items():
        stored = (ROOT / "nbs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
        assert stored == svg, f"run python tools/pictures.py {name}"


def test_the_rounds_that_play_are_some_that_were_recorded(recorded):
    """In a row: drafts that were kept whole, with a bonus token, then one of which some were, with another token; the
    text that they stand in is the run's."""
    said, rounds = tool("pictures").real_rounds(recorded)
    kept = [r["accepted"] == len(r["draft"]) for r in rounds]
    assert kept == [True, True, False] and rounds[-1]["accepted"] > 0
    for r in rounds: said += [*r["draft"][:r["accepted"]], r["own"]]
    run, words = recorded["runs"], recorded["tokens"]
    texts = ["".join(words[token] for r in one["rounds"] for token in [*r["draft"][:r["accepted"]], r["own"]])
             for one in run]
    assert any((words[one["first"]] + text).startswith("".join(said)) for one, text in zip(run, texts))
    with pytest.raises(SystemExit, match="No such rounds"):
        tool("pictures").real_rounds({**recorded, "runs": [{**one, "rounds": one["rounds"][:2]} for one in run]})


def test_what_drafts_gain_is_drawn_as_it_was_measured():
    pictures = tool("pictures")
    real, used = map(pictures.stored, ("choosing", "target"))
    found = {name: bars for models in pictures.gains(real, used).values() for name, bars in models.items()}
    svg = pictures.draw_results(pictures.gains(real, used))
    assert len(found) == len(real["results"]) + len({row["kind"] for row in used["rows"]})
    for bars in found.values():
        assert set(bars) == {"0", "1"} and all(f">{gain:.2f}</text>" in svg for gain, _ in bars.values())
    (row,) = [row for row in used["rows"] if (row["kind"], row["temperature"]) == ("editing", 0)]
    editing = next(bars for name, bars in found.items() if name.endswith("editing"))
    assert editing["0"][0] == pytest.approx(row["best_vs_plain"])
    assert editing["0"][0] / editing["0"][1] == pytest.approx(row["best_vs_llamacpp_best"])


# Where the boxes on the pages open

BOXES = [(path.name, *re.findall(r'data-(?:runs|open)="([^"]+)"', box))
         for path in sorted((ROOT / "nbs").rglob("*.ipynb")) if ".ipynb_checkpoints" not in path.parts
         for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "markdown"
         for box in re.findall(r'<div class="recorded"[^>]*>', "".join(cell["source"]))]


@pytest.mark.parametrize("name, runs, opens", BOXES)
def test_a_box_opens_on_a_rejected_token_that_was_drawn(name, runs, opens):
    "With one kept before it and one in its place, so that the guide has all to show."
    stored = record.unpacked(json.loads((ROOT / "nbs" / "data" / "recorded.json").read_text(encoding="utf-8")))
    asked = {key: value for key, (value,) in parse_qs(opens).items()}
    assert runs.endswith("data/recorded.json") and set(asked) == {"prompt", "draft", "T", "K", "round"}
    (run,) = [r for r in stored["runs"] if (r["prompt"], r["drafter"], f"{r['temperature']:g}", str(r["K"]))
              == (asked["prompt"], asked["draft"], asked["T"], asked["K"])]
    r = run["rounds"][int(asked["round"]) - 1]
    assert 1 <= r["accepted"] < len(r["draft"]) - 1 and r["emitted"] == r["accepted"] + 1 and run["temperature"] > 0


def test_boxes_stand_where_they_are_read():
    assert {"recorded.ipynb", "00_tour.ipynb", "04_speculative.ipynb"} <= {name for name, *_ in BOXES}
