"A line for each run: nothing is lost there and back, no damage goes unnoticed, no kill costs more than a run."
import gzip
import json
import multiprocessing
import time
from dataclasses import replace

import pytest

from helpers import on_a_disk_of
from specdec.bench.grid import BenchmarkConfig
from specdec.bench.methods import Parted
from specdec.bench.report import report_on
from specdec.bench.run import Record, Records, moment, read_records, run_figures
from specdec.errors import InputError
from specdec.models.files import locked
from specdec.result import GenerationResult, Round

CONFIG = BenchmarkConfig(pair="smollm2", method="suffix", K=4, temperature=0, max_new_tokens=3, domain="code",
                         prompt="code_000", seed=0, repeat=0, dtype="bfloat16", device="cpu", threads=2)
RESULT = GenerationResult(
    prompt_ids=[1, 2], generated_ids=[5, 6, 7],
    text="ab\n\u2028\ud800 \"ć", finish_reason="length",
    method="speculative", rounds=[Round([6, 9], 1, [6, 7])], per_token_latencies=[.2, .05, 5e-05],
    round_latencies=[.2, .1], time_to_first_token=.2, total_time=.3, prefill_time_ms=190.,
    draft_time_total_ms=2., verify_time_total_ms=90., sampling_time_total_ms=5., peak_memory_mb=None,
    settings={"K": 4, "stop": []}, is_lossless=True, drafter="suffix")
RECORD = Record(CONFIG, {"target": "a" * 64, "drafter": None}, {"processor": "some", "load": .5}, RESULT,
                Parted(position=1, gap=.01, plain=8, ours=6))


def numbered(repeat): return replace(RECORD, config=CONFIG.model_copy(update={"repeat": repeat}))


def of(file): return [record.config.repeat for record in read_records(file)]


@pytest.fixture
def file(tmp_path):
    "Three records."
    records = Records(tmp_path / "results.jsonl")
    for repeat in range(3): records.add(numbered(repeat))
    return tmp_path / "results.jsonl"


# There and back

@pytest.mark.parametrize("more", [
    {}, {"parted": None}, {"weights": {"target": None, "drafter": "b"}},
    {"result": replace(RESULT, rounds=[], per_token_latencies=[], round_latencies=[], peak_memory_mb=1.5),
     "config": CONFIG.model_copy(update={"method": "assisted", "K": None})},
    {"config": CONFIG.model_copy(update={"K": "adaptive", "temperature": 0.7})},
])
def test_nothing_is_lost(more):
    record = replace(RECORD, **more)
    line = record.to_json()
    assert Record.from_json(line) == record and line.isascii() and "\n" not in line
    data = json.loads(line)
    assert list(data) == ["version", "key", "decoder_label", "config", "weights", "environment", "prompt_tokens",
                          "parted", "result"]
    assert data["key"] == record.key and data["prompt_tokens"] == 2 and "token_text" not in data["result"]
    assert data["config"] == record.config.model_dump() and data["decoder_label"] == record.decoder_label


def changed(path, value):
    "The line with one value replaced; a value of `del` removes it."
    data = json.loads(RECORD.to_json())
    at = data
    for name in path[:-1]: at = at[name]
    if value is del_: del at[path[-1]]
    else: at[path[-1]] = value
    return json.dumps(data)


del_ = object()
WRONG = {  # name → (line, words)
    "NaN": (RECORD.to_json().replace("0.05", "NaN"), "NaN is not a finite number"),
    "infinite": (RECORD.to_json().replace("0.05", "-Infinity"), "not a finite number"),
    "overflowing": (RECORD.to_json().replace("0.05", "1e999"), "not a finite number"),
    "NaN in the environment": (changed(("environment", "load"), float("nan")), "NaN is not a finite number"),
    "a newer version": (changed(("version",), 2), "a newer specdec wrote it"),
    "no version": (changed(("version",), del_), "it has no version"),
    "a version that is none": (changed(("version",), True), "it has no version"),
    "something missing": (changed(("parted",), del_), "parted"),
    "something more": (changed(("colour",), 1), "colour"),
    "another key": (changed(("key",), "0" * 12), "its key doesn't agree"),
    "another label": (changed(("decoder_label",), "SD-K5"), "its decoder_label doesn't agree"),
    "another length": (changed(("prompt_tokens",), 3), "its prompt_tokens doesn't agree"),
    "other settings": (changed(("config", "K"), 8), "its key doesn't agree"),
    "unknown settings": (changed(("config", "gamma"), 8), "gamma"),
    "another prompt": (changed(("result", "prompt_ids"), [1, 3]), "its key doesn't agree"),
    "no digest": (changed(("weights",), {"target": None}), "weights must be"),
    "a number for a digest": (changed(("weights", "drafter"), 5), "weights.drafter must be"),
    "an environment that is none": (changed(("environment",), []), "environment must be"),
    "a text for a time": (changed(("result", "total_time"), "1"), "total_time must be float"),
    "a truth for a token": (changed(("result", "generated_ids"), [True]), "generated_ids must be"),
    "too much accepted": (changed(("result", "rounds", 0, "accepted"), 3), "accepted more than was drafted"),
    "a round that is none": (changed(("result", "rounds"), [5]), "not a record"),
    "no result": (changed(("result",), None), "not a record"),
    "parted nowhere": (changed(("parted", "position"), 3), "parted names a token"),
    "parted at another token": (changed(("parted", "ours"), 9), "parted names a token"),
    "parted by a text": (changed(("parted", "gap"), "1"), "parted.gap must be a valid number"),
    "parted by more": (changed(("parted", "colour"), 1), "colour"),
    "a list": ("[]", "it isn't an object"), "nothing": ("", "not a record"), "words": ("Dear Sir", "not a record"),
    "too deep": ("[" * 10**5, "not a record"),
}


@pytest.mark.parametrize("name", WRONG)
def test_damage_is_named_with_its_line(name, file):
    line, words = WRONG[name]
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], line, *lines[1:]]) + "\n")
    before = file.read_bytes()
    for reader in (read_records, Records):
        with pytest.raises(InputError) as caught: reader(file)
        assert "results.jsonl, line 2: " in str(caught.value) and words in str(caught.value)
    assert file.read_bytes() == before  # nothing is thrown away


def test_what_is_no_utf8_is_named(file):
    file.write_bytes(file.read_bytes().replace(b"some", b"\xff\xfe", 1))
    with pytest.raises(InputError, match="line 1: not a record"): read_records(file)


# The file

def test_a_kill_at_any_byte_costs_the_run_that_was_under_way(file):
    "A process that dies leaves a beginning of what it would have written, and the next one goes on behind it."
    whole = file.read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == 10]
    cuts = {0, *range(ends[1] - 3, ends[1] + 30), *range(ends[1], len(whole), 97), *range(len(whole) - 30, len(whole))}
    for cut in sorted(cuts):
        file.write_bytes(whole[:cut])
        done = sum(end <= cut for end in ends)  # a line whose last byte, the line break, is missing is whole as well
        assert of(file) == list(range(done)) and file.read_bytes() == whole[:cut]  # who only reads changes nothing
        records = Records(file)
        assert bool(records.torn) == (cut not in ends and cut - 1 not in ends and cut > 0)
        for repeat in range(3):
            if numbered(repeat).key not in records.by_key: records.add(numbered(repeat))
        assert file.read_bytes() == whole


def test_another_file_is_not_taken_for_a_torn_line(tmp_path):
    letter = tmp_path / "letter.jsonl"
    for text in ("Dear Sir", '{"run": "x", "meth', '{"version": 1}'):
        letter.write_text(text)
        with pytest.raises(InputError, match="line 1: not a record"): Records(letter)
        assert letter.read_text() == text


def test_of_two_records_of_one_run_the_later_counts(file):
    late = replace(numbered(1), environment={"processor": "another"})
    Records(file).add(late)
    assert read_records(file) == [numbered(0), late, numbered(2)]


def test_a_full_disk_is_one_line_and_loses_nothing(file):
    records, before = Records(file), file.read_bytes()
    with on_a_disk_of(len(before) + 50):
        with pytest.raises(InputError, match="File too large.*another file"): records.add(numbered(3))
        assert file.read_bytes() == before and numbered(3).key not in records.by_key
    records.add(numbered(3))
    assert of(file) == [0, 1, 2, 3]


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(InputError, match="There is no file"): read_records(tmp_path / "none.jsonl")
    for wrong in (tmp_path, tmp_path / "no" / "folder.jsonl"):
        with pytest.raises(InputError, match="can't be used"): Records(wrong)


def hold(file, held):
    "Another process, which writes to the file for as long as it lives."
    with locked(file, wait=False):
        held.set()
        time.sleep(60)


def test_a_packed_file_is_read_and_never_written(file):
    packed = file.with_name("packed.jsonl.gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert of(packed) == of(file) and of(file)
    with pytest.raises(InputError, match="is packed"): Records(packed)
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(InputError, match="packed.jsonl.gz can't be used"): read_records(packed)
    packed.write_bytes(b"{}")
    with pytest.raises(InputError, match="Not a gzipped file"): read_records(packed)


def test_one_process_writes_at_a_time(file):
    context = multiprocessing.get_context("fork")
    held = context.Event()
    other = context.Process(target=hold, args=(file, held))
    other.start()
    try:
        assert held.wait(30)
        with pytest.raises(InputError, match="Another run is writing to .*results.jsonl"):
            with locked(file, wait=False): pytest.fail("two at a time")
        with locked(file.with_name("other.jsonl"), wait=False): pass  # its own file is nobody else's business
        other.kill()  # it can't say good-bye
        other.join()
        with locked(file, wait=False): Records(file).add(numbered(3))
    finally: other.kill()
    assert of(file) == [0, 1, 2, 3]


def test_a_file_in_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="there is no folder"):
        with locked(tmp_path / "no" / "results.jsonl", wait=False): pytest.fail("where?")
    assert not (tmp_path / "no").exists()


# The machine

def test_what_the_system_does_not_tell_is_none(monkeypatch, tmp_path):
    from specdec.bench import run
    monkeypatch.setattr(run, "GOVERNOR", tmp_path / "governor")
    monkeypatch.delattr(run.os, "getloadavg")
    assert moment() == {"governor": None, "load": None}
    (tmp_path / "governor").write_text("performance\n")
    assert moment()["governor"] == "performance"


def test_a_run_made_elsewhere_is_a_record(tmp_path):
    "By hand: settings and figures; written, read and compared as any other."
    def of_theirs(method, K, seconds, rounds):
        config = BenchmarkConfig(pair="gpt2_dev", method=method, K=K, domain="code")
        ids = [0] * (1 + sum(len(r.emitted) for r in rounds))
        return Record(config, result=GenerationResult(generated_ids=ids, total_time=seconds, rounds=rounds))
    plain = of_theirs("plain", None, 2.0, [Round([], 0, [0])] * 8)
    theirs = of_theirs("elsewhere:vLLM", 4, 1.0, [Round([0] * 4, 3, [0] * 4)] * 2)
    file = tmp_path / "theirs.jsonl"
    file.write_text("".join(f"{record.to_json()}\n" for record in (plain, theirs)))
    assert read_records(file) == [plain, theirs]
    row = run_figures(read_records(file))[1]
    assert (row["method"], row["speedup"], row["alpha"], row["tau"]) == ("elsewhere:vLLM", 2.0, .75, 4.0)
    report_on(file, tmp_path / "report")
    assert "| elsewhere:vLLM, K = 4 | 1 | 9.00 | 2.00 |" in (tmp_path / "report" / "report.md").read_text()
