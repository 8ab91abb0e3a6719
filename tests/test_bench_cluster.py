"""Cells spread over machines that die: simulated ones in every order, and a real cluster of two nodes."""
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec.bench.cluster as c
from specdec.core import InputError


class Simulated:
    "A crew whose machines take some ticks for a cell and die, and come back, as told; it counts who works at a time."
    def __init__(self, ticks, deaths=(), curses=None):
        self.ticks, self.deaths, self.curses = ticks, deaths, curses or {}
        self.now, self.tickets, self.open, self.stopped = 0, {}, set(), False

    def alive(self, name, since=None):
        "Now; or without a break since then."
        since = self.now if since is None else since
        return not any(who == name and start <= self.now and since < end for who, start, end in self.deaths)

    def places(self): return [c.Place(name) for name in self.ticks if self.alive(name)]
    def start(self, place): return self.issue(place.machine, "ready", 0)
    def give(self, place, cell): return self.issue(place.machine, cell, self.ticks[place.machine])

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
        return came

    def stop(self): self.stopped = True


MACHINES = st.dictionaries(st.sampled_from("ABCD"), st.integers(1, 4), min_size=1)
DEATHS = st.lists(st.tuples(st.sampled_from("ABCD"), st.integers(1, 30), st.integers(1, 20)), max_size=2)


@settings(deadline=None, max_examples=300)
@given(MACHINES, DEATHS, st.integers(0, 12))
def test_each_cell_is_kept_once_whoever_dies_and_when(ticks, deaths, cells):
    kept = []
    crew = Simulated(ticks, [(name, start, start + longer) for name, start, longer in deaths])
    spread = c.Spread(crew, kept.append)
    spread.do(range(cells))
    assert sorted(kept) == [("done", cell) for cell in range(cells)]
    assert (spread.failed, spread.refused, crew.stopped) == ({}, {}, True)


def test_what_fails_is_told_and_the_rest_goes_on():
    kept = []
    crew = Simulated({"A": 1, "B": 2}, curses={1: ValueError("no\nluck"), 3: c.Lost("killed")})
    spread = c.Spread(crew, kept.append)
    spread.do(range(5))
    assert sorted(kept) == [("done", 0), ("done", 2), ("done", 4)]
    assert spread.failed == {1: "ValueError: no luck", 3: "Lost: killed"}
    assert spread.lost[3] == c.ATTEMPTS


@pytest.mark.parametrize("machines, message", [
    ({}, "none is left"), ({"A": 1}, r"A: InputError: it has another version.*run the command again"),
], ids=["no machine", "only one that can't"])
def test_no_machine_is_an_error(machines, message):
    crew = Simulated(machines, curses={"ready": InputError("it has another version of specdec")})
    with pytest.raises(InputError, match=message): c.Spread(crew, print, patience=0).do([1])
    assert crew.stopped


def test_a_machine_that_cannot_do_the_work_is_left_out():
    class Half(Simulated):
        def wait(self, tickets, seconds):
            names = {ticket: self.tickets[ticket][:2] for ticket in tickets}
            return [(t, ValueError("no such library") if names[t] == ("B", "ready") else outcome)
                    for t, outcome in super().wait(tickets, seconds)]
    kept, crew = [], Half({"A": 1, "B": 1})
    spread = c.Spread(crew, kept.append)
    spread.do(range(4))
    assert len(kept) == 4 and spread.refused == {c.Place("B"): "ValueError: no such library"}


def test_a_worker_that_never_starts_is_given_up():
    crew = Simulated({"A": 1}, curses={"ready": c.Lost("killed")})
    spread = c.Spread(crew, print)
    with pytest.raises(InputError, match="A: Lost: killed"): spread.do([1])
    assert spread.lost[c.Place("A")] == c.ATTEMPTS


def test_an_interrupt_keeps_what_had_come_back():
    kept, crew = [], Simulated({"A": 1, "B": 1})
    def keep(result):
        kept.append(result)
        if len(kept) == 3: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): c.Spread(crew, keep).do(range(9))
    assert crew.stopped and {*kept} == {("done", cell) for cell in range(4)}  # the fourth had come with the third
    assert kept.count(kept[2]) == 2  # and the third may come again: keeping is by key


def test_a_full_disk_stops_the_workers():
    def keep(result): raise InputError("no space left")
    crew = Simulated({"A": 1})
    with pytest.raises(InputError, match="no space"): c.Spread(crew, keep).do(range(3))
    assert crew.stopped


# Merging

class Pile(SimpleNamespace):
    def add(self, record):
        self.by_key[record.key] = record
        self.lines.append(record)


def record(key, text="first"): return SimpleNamespace(key=key, text=text)


def test_a_key_is_kept_once_and_the_first_stays():
    pile = Pile(by_key={}, lines=[])
    assert c.merge([record("a"), record("b"), record("a", "second")], pile) == 2
    assert c.merge([record("b", "second"), record("c")], pile) == 1
    assert [(r.key, r.text) for r in pile.lines] == [("a", "first"), ("b", "first"), ("c", "first")]


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
    ("localhost:99999", "Can't reach"), ("a..b:1", "Can't reach"),
], ids=["no port", "no host", "no number", "another protocol", "nobody listens", "no such port", "no such host"])
def test_an_address_where_no_cluster_is(address, message):
    start = time.monotonic()
    with pytest.raises(InputError, match=message): c.spread_over(address, print, [1], print)
    assert time.monotonic() - start < 10


def test_without_ray(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r'pip install "specdec-nb\[ray\]"'): c.spread_over("auto", print, [1], print)


# A real cluster

@pytest.fixture(scope="module")
def head():
    "A local cluster of one node; tests add others, under other addresses, so that they count as other machines."
    pytest.importorskip("ray", reason="no Ray, so no cluster was tried: pip install ray")
    from ray.cluster_utils import Cluster
    quickly = dict(health_check_initial_delay_ms=0, health_check_period_ms=500, health_check_failure_threshold=4)
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


def noting(file, seconds=.1):
    "Work that notes in a file when it began and ended, on which machine, in which process."
    def work(cell):
        import os
        import time

        import ray
        def note(what):
            with open(file, "a") as f: f.write(f"{what} {cell} {ray.util.get_node_ip_address()} {os.getpid()}\n")
        note("begin")
        time.sleep(seconds)
        note("end")
        return cell, ray.get_runtime_context().get_node_id(), os.getpid()
    return work


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


def test_the_cells_of_a_killed_node_are_done_again(head, tmp_path):
    kept, killed = [], []
    with second(head, "127.0.0.2") as doomed:
        def keep(result):
            kept.append(result)
            if killed or result[1] != doomed.node_id: return
            killed.append(len(kept))  # it has the next cell in its hands, or gets it now
            time.sleep(.2)
            head.remove_node(doomed, allow_graceful=False)  # SIGKILL to each of its processes
            with_signal(result[2], signal.SIGKILL)
        spread = c.spread_over(head.address, noting(tmp_path / "notes", .5), range(8), keep)
    assert killed and sorted(cell for cell, *_ in kept) == list(range(8))
    assert spread.failed == spread.refused == {} and sum(spread.lost.values()) >= 1
    assert most_at_once(tmp_path / "notes") == dict.fromkeys(most_at_once(tmp_path / "notes"), 1)
    assert {node for _, node, _ in kept[-3:]} == {head.head_node.node_id}


def with_signal(pid, number):
    try: os.kill(pid, number)
    except ProcessLookupError: pass


def test_a_killed_worker_is_replaced_and_an_error_of_the_work_is_its_own(head, tmp_path):
    kept, noted = [], noting(tmp_path / "notes")
    def work(cell):
        if cell == 1: raise ValueError("no such prompt")
        return noted(cell)
    def keep(result):
        kept.append(result)
        if len(kept) == 1: os.kill(result[2], signal.SIGKILL)
    spread = c.spread_over(head.address, work, range(4), keep)
    assert sorted(cell for cell, *_ in kept) == [0, 2, 3] and spread.failed == {1: "ValueError: no such prompt"}
    assert len({node for _, node, _ in kept}) == 1 and len({pid for *_, pid in kept}) == 2


def test_shared_machines_and_ctrl_c(head, tmp_path):
    "Two cells at a time on one machine, until an interrupt: what is finished is kept, and the machine is free."
    kept = []
    def keep(result):
        kept.append(result)
        if len(kept) == 4: threading.Timer(.5, signal.raise_signal, [signal.SIGINT]).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            c.spread_over(head.address, noting(tmp_path / "notes", .3), range(1000), keep, share=1)
    finally: signal.signal(signal.SIGINT, before)
    assert [*most_at_once(tmp_path / "notes").values()] == [2]
    ended = (tmp_path / "notes").read_text().count("end")
    assert 4 <= len(kept) <= ended <= len(kept) + 2 < 1000  # what ended while they were stopped is lost
    with pytest.raises(ProcessLookupError):
        for _ in range(50):
            os.kill(kept[0][2], 0)
            time.sleep(.1)


def test_a_cluster_without_a_gpu(head):
    with pytest.raises(InputError, match="no machine with a GPU"):
        c.spread_over(head.address, print, [1], print, device="cuda")


def test_another_version_of_the_code_is_refused():
    worker = c.Worker(lambda cell: 2 * cell)
    assert worker.ready(c.code_digest()) is None and worker.do(4) == 8
    with pytest.raises(InputError, match="another version of specdec"): worker.ready("0" * 12)
