"""Cells spread over machines that die: simulated ones in every order, and a real cluster of two nodes."""
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import specdec.bench.cluster as c
from helpers import examples
from specdec.bench.grid import BenchmarkConfig, Cell, Grid
from specdec.bench.records import Record, read_records
from specdec.bench.run import Failure, bench_run
from specdec.cli import app
from specdec.errors import InputError
from specdec.models import fetch
from specdec.result import GenerationResult


class Simulated:
    "A crew whose machines take some ticks for a cell and die, and come back, as told; it counts who works at a time."
    def __init__(self, ticks, deaths=(), curses=None):
        self.ticks, self.deaths, self.curses = ticks, deaths, curses or {}
        self.now, self.tickets, self.open, self.hired, self.stopped = 0, {}, set(), set(), False

    def alive(self, name, since=None):
        "Now; or without a break since then."
        since = self.now if since is None else since
        return not any(who == name and start <= self.now and since < end for who, start, end in self.deaths)

    def places(self): return [c.Place(name) for name in self.ticks if self.alive(name)]
    def start(self, place):
        self.hired.add(place.machine)
        return self.issue(place.machine, "ready", 0)
    def give(self, place, cell):
        assert place.machine in self.hired, "its worker died, and no other was started"
        return self.issue(place.machine, cell, self.ticks[place.machine])

    def issue(self, name, cell, ticks):
        number = len(self.tickets)
        assert name not in [self.tickets[ticket][0] for ticket in self.open], f"{name} has two things to do"
        self.tickets[number] = name, cell, self.now, self.now + ticks
        self.open.add(number)
        return number

    def wait(self, tickets, seconds):
        self.now += bool(seconds)
        came = []
        for ticket in tickets:
            name, cell, since, due = self.tickets[ticket]
            if self.alive(name, since) and due >= self.now: continue
            outcome = self.curses.get(cell, ("done", cell)) if self.alive(name, since) else c.Lost("died")
            came.append((ticket, outcome))
            self.open.discard(ticket)
            if isinstance(outcome, c.Lost): self.hired.discard(name)
        return came

    def stop(self): self.stopped = True


MACHINES = st.dictionaries(st.sampled_from("ABCD"), st.integers(1, 4), min_size=1)
DEATHS = st.lists(st.tuples(st.sampled_from("ABCD"), st.integers(1, 30), st.integers(1, 20)), max_size=2)


@settings(deadline=None, max_examples=examples(300))
@given(MACHINES, DEATHS, st.integers(0, 12))
def test_each_cell_is_kept_once_whoever_dies_and_when(ticks, deaths, cells):
    crew = Simulated(ticks, [(name, start, start + longer) for name, start, longer in deaths])
    spread = c.Spread(crew)
    assert sorted(spread.do(range(cells))) == [("done", cell) for cell in range(cells)]
    assert (spread.failed, spread.refused, crew.stopped) == ({}, {}, True)


def test_what_fails_is_told_and_the_rest_goes_on():
    crew = Simulated({"A": 1, "B": 2}, curses={1: ValueError("no\nluck"), 3: c.Lost("killed")})
    spread = c.Spread(crew)
    assert sorted(spread.do(range(5))) == [("done", 0), ("done", 2), ("done", 4)]
    assert spread.failed == {1: "ValueError: no luck", 3: "Lost: killed"}
    assert spread.lost[3] == c.ATTEMPTS


@pytest.mark.parametrize("machines, message", [
    ({}, "none is left"), ({"A": 1}, r"A: InputError: it has another version.*run the command again"),
], ids=["no machine", "only one that can't"])
def test_no_machine_is_an_error(machines, message):
    crew = Simulated(machines, curses={"ready": InputError("it has another version of specdec")})
    with pytest.raises(InputError, match=message): list(c.Spread(crew, patience=0).do([1]))
    assert crew.stopped


def test_a_machine_that_cannot_do_the_work_is_left_out():
    class Half(Simulated):
        def wait(self, tickets, seconds):
            names = {ticket: self.tickets[ticket][:2] for ticket in tickets}
            return [(t, ValueError("no such library") if names[t] == ("B", "ready") else outcome)
                    for t, outcome in super().wait(tickets, seconds)]
    spread = c.Spread(Half({"A": 1, "B": 1}))
    assert len(list(spread.do(range(4)))) == 4 and spread.refused == {c.Place("B"): "ValueError: no such library"}


def test_a_worker_that_never_starts_is_given_up():
    crew = Simulated({"A": 1}, curses={"ready": c.Lost("killed")})
    spread = c.Spread(crew)
    with pytest.raises(InputError, match="A: Lost: killed"): list(spread.do([1]))
    assert spread.lost[c.Place("A")] == c.ATTEMPTS


@pytest.fixture
def interruptible():
    "As in a terminal: Ctrl-C raises `KeyboardInterrupt`."
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_keeps_what_had_come_back(interruptible):
    kept, crew = [], Simulated({"A": 1, "B": 1})
    def interrupted():
        for result in c.Spread(crew).do(range(9)):
            if len(kept) == 2: signal.raise_signal(signal.SIGINT)  # while a result is written down
            kept.append(result)
    with pytest.raises(KeyboardInterrupt): interrupted()
    assert crew.stopped and sorted(kept) == [("done", cell) for cell in range(4)]  # the fourth came with the third


def test_what_comes_back_with_the_interrupt_is_kept(interruptible):
    class Late(Simulated):
        def wait(self, tickets, seconds):
            came = super().wait(tickets, seconds or 1)
            if seconds and len(self.tickets) == 3: signal.raise_signal(signal.SIGINT)  # nothing came within the second
            return came if not seconds or len(self.tickets) < 3 else []
    kept = []
    def interrupted():
        for result in c.Spread(Late({"A": 1})).do(range(9)): kept.append(result)
    with pytest.raises(KeyboardInterrupt): interrupted()
    assert kept == [("done", 0), ("done", 1)]


def test_ctrl_c_is_as_before_afterwards(interruptible):
    list(c.Spread(Simulated({"A": 1})).do(range(2)))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_is_one_at_once(interruptible):
    crew = Simulated({"A": 1})
    results = c.Spread(crew).do(range(9))
    next(results)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt): signal.raise_signal(signal.SIGINT)
    results.close()
    assert crew.stopped


def test_whoever_stops_taking_results_stops_the_workers():
    crew = Simulated({"A": 1})
    def full():
        for result in c.Spread(crew).do(range(3)): raise InputError("no space left")
    with pytest.raises(InputError, match="no space"): full()
    assert crew.stopped


# Merging

@pytest.fixture(scope="module")
def grid_records():
    "The records of two cells, and what made them."
    def run(prompt, method, K=None):
        return BenchmarkConfig(pair="p", method=method, K=K, temperature=0.0, max_new_tokens=2, domain="code",
                               prompt=prompt, seed=0, repeat=0, dtype="float32", device="cpu", threads=1)
    def record(run, seconds):
        result = GenerationResult(
            prompt_ids=[ord(letter) for letter in run.prompt], generated_ids=[1, 2], text="", finish_reason="length",
            method="plain", rounds=[], per_token_latencies=[], round_latencies=[], time_to_first_token=0.0,
            total_time=seconds, prefill_time_ms=0.0, draft_time_total_ms=0.0, verify_time_total_ms=0.0,
            sampling_time_total_ms=0.0, peak_memory_mb=None, settings={}, drafter="", device="cpu",
        )
        return Record(run, {"target": "t", "drafter": None}, {}, result)
    runs = {prompt: (run(prompt, "plain"), run(prompt, "suffix", 4)) for prompt in ("a", "b", "c")}
    return lambda prompt, seconds=1.0: [record(run, seconds) for run in runs[prompt]], runs


def test_a_record_is_kept_once_and_the_first_stays(grid_records):
    records, _ = grid_records
    seen, failure = {records("b")[0].key}, Failure("p", "float32", "model", "none")
    came = [*records("a"), failure, *records("a", 2.0), *records("b"), failure]
    assert list(c.new_ones(came, seen)) == [*records("a"), failure, records("b")[1], failure]
    assert seen == {r.key for r in [*records("a"), *records("b")]}
    assert list(c.new_ones(came[:2], seen)) == []


class AtOnce:
    "One place, where a cell is done when it is given; or its worker dies each time."
    def __init__(self, work, dies): self.work, self.dies, self.outcomes, self.stopped = work, dies, [], False
    def places(self): return [c.Place("A")]
    def start(self, place): return self.issue("ready")
    def give(self, place, cell): return self.issue(c.Lost("killed") if self.dies else self.work(cell))
    def wait(self, tickets, seconds): return [(ticket, self.outcomes[ticket]) for ticket in tickets]
    def stop(self): self.stopped = True
    def issue(self, outcome):
        self.outcomes.append(outcome)
        return len(self.outcomes) - 1


@pytest.fixture
def instead_of_ray(monkeypatch):
    "What was asked of the cluster; its only machine is this process."
    asked = {"dies": False}
    @contextmanager
    def spread_over(address, work, device, share):
        asked.update(address=address, device=device, share=share)
        yield c.Spread(AtOnce(work, asked["dies"]))
    monkeypatch.setattr(c, "spread_over", spread_over)
    return asked


@pytest.mark.parametrize("timed, share", [(True, None), (False, 1)], ids=["timed", "acceptance only"])
def test_cells_of_a_grid(monkeypatch, instead_of_ray, grid_records, timed, share):
    records, runs = grid_records
    work = [(Cell(None, None, runs[prompt], timed), {}) for prompt in "abc"]
    plain = records("b")[0]
    work[1][1][plain.key] = plain  # it is known, and `do_cell` gives it again here
    monkeypatch.setattr(c, "do_cell", lambda cell, known: iter(records(cell.runs[0].prompt)))
    came = []
    c.over_ray("host:1")(work, came.append)
    assert instead_of_ray == dict(dies=False, address="host:1", device="cpu", share=share)
    assert came == [*records("a"), records("b")[1], *records("c")]
    c.over_ray("nowhere:1")([], came.append)  # nothing to do: nobody is asked


def test_a_cell_that_nobody_can_do_fails_by_method(instead_of_ray, grid_records):
    instead_of_ray["dies"] = True
    came = []
    c.over_ray()([(Cell(None, None, grid_records[1]["a"]), {})], came.append)
    assert came == [Failure("p", "float32", name, "Lost: killed") for name in ("plain", "suffix")]


def test_one_gpu_can_not_be_named(grid_records):
    runs = [run.model_copy(update={"device": "cuda:1"}) for run in grid_records[1]["a"]]
    with pytest.raises(InputError, match="cpu or cuda, which takes any GPU, not cuda:1"):
        c.over_ray()([(Cell(None, None, tuple(runs)), {})], print)


# Places

def node(name, address, alive=True, **resources):
    return {"NodeID": name, "NodeManagerAddress": address, "Alive": alive, "Resources": resources}


NODES = [
    node("n2", "two", CPU=16.0, GPU=4.0), node("n1", "one", CPU=6.0), node("n3", "dead", alive=False, CPU=8.0),
    node("n4", "one", CPU=6.0), node("n5", "none", memory=1e9),
]


@pytest.mark.parametrize("how, expected", [
    (dict(device="cpu"), {("one", "n1", 6, 0): 1, ("two", "n2", 16, 0): 1}),
    (dict(device="cpu", share=4), {("one", "n1", 4, 0): 1, ("two", "n2", 4, 0): 4}),
    (dict(device="cuda"), {("two", "n2", 4, 1): 4}),
    (dict(device="cuda", share=2), {("two", "n2", 4, 1): 4}),
    (dict(device="cpu", share=32), {}),
], ids=["a machine each", "four CPUs each", "a GPU each", "a GPU each, untimed", "too many CPUs"])
def test_places(how, expected):
    found = c.places_of(NODES, **how)
    assert {key: [(p.machine, p.node, p.cpus, p.gpus) for p in found].count(key) for key in expected} == expected
    assert len(found) == len({*found}) == sum(expected.values())
    assert c.places_of(NODES[::-1], **how) == found


# Reaching a cluster

@pytest.mark.parametrize("address, message", [
    ("nowhere", "HOST:PORT, such as"), (":6379", "HOST:PORT"), ("host:port", "HOST:PORT"),
    ("ray://host:10001", "Can't reach the Ray cluster at ray://host:10001 .*ray start --head"),
    ("localhost:1", "Can't reach the Ray cluster at localhost:1 .*refused.*ray start --head"),
    ("localhost:99999", "HOST:PORT"), ("a..b:1", "Can't reach"),
], ids=["no port", "no host", "no number", "another protocol", "nobody listens", "no such port", "no such host"])
def test_an_address_where_no_cluster_is(address, message):
    start = time.monotonic()
    with pytest.raises(InputError, match=message), c.spread_over(address, print): pass
    assert time.monotonic() - start < 10


def test_without_ray(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r'pip install "specdec-nb\[ray\]"'), c.spread_over("auto", print): pass


# A real cluster

@pytest.fixture(scope="module")
def head():
    "A local cluster of one node; tests add others, under other addresses, so that they count as other machines."
    pytest.importorskip("ray", reason="no Ray, so no cluster was tried: pip install ray")
    from ray.cluster_utils import Cluster
    # A dead node is told from one whose processor is busy with other tests by six seconds of silence.
    quickly = dict(health_check_initial_delay_ms=0, health_check_period_ms=500, health_check_failure_threshold=12,
                   prestart_worker_first_driver=False)
    cluster = Cluster(initialize_head=True, head_node_args=dict(SMALL, num_cpus=2, no_monitor=True,
                                                                _system_config=quickly))
    yield cluster
    cluster.shutdown()


SMALL = dict(object_store_memory=80_000_000, include_log_monitor=False)


@contextmanager
def second(cluster, address):
    "Another machine of the cluster, meanwhile."
    node = cluster.add_node(num_cpus=1, node_ip_address=address, **SMALL)
    try: yield node
    finally:
        if node in cluster.list_all_nodes(): cluster.remove_node(node, allow_graceful=False)
        cluster.wait_for_nodes(timeout=60)  # until it is known to be gone


def noting(file, do, name=str):
    "Work that notes in a file when it began and ended, on which machine, in which process."
    def work(cell):
        import os

        import ray
        def note(what):
            with open(file, "a") as f: f.write(f"{what} {name(cell)} {ray.util.get_node_ip_address()} {os.getpid()}\n")
        note("begin")
        found = do(cell)
        note("end")
        return found
    return work


def pretending(seconds):
    "Work that takes its time, and tells which cell it was, and where."
    def do(cell):
        import os
        import time

        import ray
        time.sleep(seconds)
        return cell, ray.get_runtime_context().get_node_id(), os.getpid()
    return do


def most_at_once(file) -> dict[str, int]:
    "Machine → how many cells it worked on at a time, at most; of those that came to their end."
    lines = [line.split() for line in file.read_text().splitlines()]
    ended = {(cell, pid) for what, cell, _, pid in lines if what == "end"}
    now, most = {}, {}
    for what, cell, machine, pid in lines:
        if (cell, pid) not in ended: continue
        now[machine] = now.get(machine, 0) + (1 if what == "begin" else -1)
        most[machine] = max(most.get(machine, 0), now[machine])
    return most


def cells_lost(spread) -> dict[int, int]:
    "And how often; a dead machine may be asked once more until it is known to be dead."
    return {cell: times for cell, times in spread.lost.items() if not isinstance(cell, c.Place)}


def test_the_real_pairs_cells_of_a_killed_node_are_done_again(head, tmp_path, monkeypatch):
    "As `specdec bench run CONFIG --ray` does it; the second machine is killed with a cell in its hands."
    fetch()
    grid = Grid(methods=["plain", "head"], K=[3], dtypes=["float32"], device="cpu", threads=1, prompts="quick", count=1,
                max_new_tokens=4)
    file, notes, killed, spreads, spread_over = tmp_path / "r.jsonl", tmp_path / "notes", [], [], c.spread_over
    whole_cell = c.whole_cell
    def held(work):
        "On the second machine a cell lasts until it is killed."
        import time

        import ray
        if ray.util.get_node_ip_address() == "127.0.0.2": time.sleep(120)
        return whole_cell(work)
    @contextmanager
    def watched(*how):
        with spread_over(*how) as spread:
            spreads.append(spread)
            yield spread
    monkeypatch.setattr(c, "spread_over", watched)
    monkeypatch.setattr(c, "whole_cell", noting(notes, held, lambda work: work[0].prompt.id))

    def spread_on_both(work, keep):
        def keep_and_kill(one):
            keep(one)
            [spread] = spreads
            if spread.starting: spread.crew.ray.wait(list(spread.starting), timeout=60)  # until both are ready
            working = {place.node: number for place, number in spread.working.values()}
            if killed or doomed.node_id not in working: return
            killed.append(working[doomed.node_id])
            while "127.0.0.2 " not in notes.read_text(): time.sleep(.1)  # until it has begun
            head.remove_node(doomed, allow_graceful=False)  # SIGKILL to each of its processes
            with_signal(int(notes.read_text().rpartition("127.0.0.2 ")[2].split()[0]), signal.SIGKILL)
        c.over_ray(head.address)(work, keep_and_kill)

    with second(head, "127.0.0.2") as doomed: outcome = bench_run(grid, file, spread_on_both)
    assert outcome.complete and outcome.failed == {} and outcome.made == 3 * 2
    assert killed and spreads[0].refused == {} and cells_lost(spreads[0]) == {killed[0]: 1}
    assert most_at_once(notes) == dict.fromkeys(most_at_once(notes), 1)
    records = read_records(file)
    assert sorted(record.key for record in records) == sorted({record.key for record in outcome.records})
    assert {record.parted for record in records} == {None} and len(records) == 6  # the head's text is the plain one
    assert bench_run(grid, file).made == 0


def with_signal(pid, number):
    try: os.kill(pid, number)
    except ProcessLookupError: pass


def test_a_shared_machine_a_killed_worker_and_ctrl_c(head, tmp_path, interruptible):
    "Two cells at a time, until an interrupt: what is finished is kept, and the machine is free."
    kept, timers, noted = [], [], noting(tmp_path / "notes", pretending(.3))
    def work(cell):
        if cell == 1: raise ValueError("no such prompt")
        return noted(cell)
    def keep(result):
        kept.append(result)
        if len(kept) == 1: os.kill(result[2], signal.SIGKILL)
        if len({pid for *_, pid in kept}) == 3 and not timers:
            timers.append(threading.Timer(.5, signal.raise_signal, [signal.SIGINT]))
            timers[0].start()
    with c.spread_over(head.address, work, share=1) as spread, pytest.raises(KeyboardInterrupt):
        for result in spread.do(range(1000)): keep(result)
    assert spread.failed == {1: "ValueError: no such prompt"} and spread.refused == {}
    done = [cell for cell, *_ in kept]
    assert sum(cells_lost(spread).values()) == 1 and {*range(6)} - {1} <= {*done} and len(done) == len({*done})
    assert [*most_at_once(tmp_path / "notes").values()] == [2]
    ended = (tmp_path / "notes").read_text().count("end")
    assert len(kept) <= ended <= len(kept) + 2 < 1000  # what ended while they were stopped is lost
    with pytest.raises(ProcessLookupError):
        for _ in range(50):
            os.kill(kept[-1][2], 0)
            time.sleep(.1)


def test_a_cluster_without_a_gpu(head):
    with pytest.raises(InputError, match="no machine with a GPU"):
        with c.spread_over(head.address, print, device="cuda"): pass


@pytest.mark.parametrize("name", ["specdec", "torch", "transformers"])
def test_another_version_is_refused(name):
    worker, here = c.Worker(lambda cell: 2 * cell), c.code_here()
    assert worker.ready(here) is None and worker.do(4) == 8
    with pytest.raises(InputError, match=f"it has another {name} .*, not 0.0"): worker.ready(here | {name: "0.0"})


# Addresses

@pytest.mark.parametrize("given", [["--ray", ""], ["--ray="], ["--ray", "127.0.0.1:"], ["--ray=127.0.0.1:"],
                                   ["--ray", "somewhere"]], ids=str)
def test_an_address_that_is_none_is_refused_before_anything_is_run(given, tmp_path, monkeypatch):
    monkeypatch.setattr("specdec.bench.run.bench_run", lambda *_: pytest.fail("it ran here"))
    config = tmp_path / "grid.yaml"
    config.write_text("methods: [plain]\n")
    for words in ([str(config), *given], [*given, str(config)]):
        done = CliRunner().invoke(app, ["bench", "run", *words], prog_name="specdec")
        assert done.exit_code == 2 and "The address of a Ray cluster is HOST:PORT" in done.stderr, words


def test_another_server_is_no_cluster():
    "One that speaks HTTP/1; it is told from a head at once, and without Ray's own words."
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            start = time.monotonic()
            with pytest.raises(InputError, match="Can't reach the Ray cluster at .*the server there is another"):
                with c.connected(f"127.0.0.1:{server.server_port}"): pass
            assert time.monotonic() - start < 8
        finally: server.shutdown()
        thread.join()


def test_a_head_that_does_not_answer_ends_the_work():
    "After a few silences in a row; and its workers aren't told to end, which would wait for it."
    class Context: gcs_address = "127.0.0.1:1"
    class Ray:
        def get_runtime_context(self): return Context
        def nodes(self): raise AssertionError("Ray was asked")
        def kill(self, worker): raise AssertionError("Ray was asked")
    crew = c.RayCrew(Ray(), print)
    crew.workers[c.Place("a")] = None
    for _ in range(c.SILENCES - 1): assert crew.places() == [c.Place("a")]
    with pytest.raises(InputError, match="head of the Ray cluster, 127.0.0.1:1, does not answer any more. What is"):
        crew.places()
    crew.stop()
