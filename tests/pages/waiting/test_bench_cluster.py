"""Cells spread over machines that die: a real Ray cluster of two nodes, and what is asked of it."""
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

import specdec.bench.run as c
from specdec.app.cli import app
from specdec.bench.grid import BenchmarkConfig, Cell, Grid
from specdec.errors import InputError
from specdec.models.hub import fetch


@pytest.fixture
def interruptible():
    "As in a terminal: Ctrl-C raises `KeyboardInterrupt`."
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


class Pretend:
    "A Ray whose tasks are done one at each call of `wait`; `alive` says whether any machine is left."
    def __init__(self, alive=True, address="127.0.0.1:1"): self.alive, self.gcs_address, self.waits = alive, address, 0
    def get_runtime_context(self): return self
    def nodes(self): return [dict(Alive=self.alive)]
    def wait(self, refs, num_returns=1, timeout=1):
        self.waits += 1
        return refs[:num_returns] if self.alive else [], refs[num_returns:] if self.alive else refs


def test_an_interrupt_while_a_result_is_written_keeps_what_is_done(interruptible):
    kept = []
    def interrupted():
        for ref in c.results(Pretend(), range(4)):
            if len(kept) == 2: signal.raise_signal(signal.SIGINT)  # while a result is written down
            kept.append(ref)
    with pytest.raises(KeyboardInterrupt): interrupted()
    assert kept == [0, 1, 2, 3]  # the fourth was done with the third


def test_a_second_interrupt_is_one_at_once(interruptible):
    results = c.results(Pretend(), range(9))
    next(results)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt): signal.raise_signal(signal.SIGINT)
    results.close()


def test_ctrl_c_is_as_before_afterwards(interruptible):
    assert list(c.results(Pretend(), range(2))) == [0, 1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_no_machine_is_an_error(monkeypatch):
    monkeypatch.setattr(c, "knock", lambda head: None)
    monkeypatch.setattr(c, "PATIENCE", -1)
    with pytest.raises(InputError, match="No machine of the Ray cluster is left. What is finished is kept"):
        list(c.results(Pretend(alive=False), range(2)))


def test_a_head_that_does_not_answer_ends_the_work():
    "After a few silences in a row."
    ray = Pretend(alive=False)
    ray.nodes = lambda: pytest.fail("Ray was asked")
    with pytest.raises(InputError, match="head of the Ray cluster, 127.0.0.1:1, does not answer any more. What is"):
        list(c.results(ray, range(2)))
    assert ray.waits == c.SILENCES


def run(method="plain", device="cpu"):
    return BenchmarkConfig(pair="p", method=method, K=4 if method == "suffix" else None, temperature=0.0,
                           max_new_tokens=2, domain="code", prompt="a", seed=0, repeat=0, dtype="float32",
                           device=device, threads=1)


def test_nothing_to_do_asks_nobody():
    c.over_ray("nowhere:1")([], pytest.fail)


def test_one_gpu_can_not_be_named():
    with pytest.raises(InputError, match="cpu or cuda, which takes any GPU, not cuda:1"):
        c.over_ray()([(Cell(None, None, (run(device="cuda:1"),)), {})], print)


# What is asked for

def node(name, address, alive=True, **resources):
    return {"NodeID": name, "NodeManagerAddress": address, "Alive": alive, "Resources": resources}


NODES = [
    node("n2", "two", CPU=16.0, GPU=4.0), node("n1", "one", CPU=6.0), node("n3", "dead", alive=False, CPU=80.0),
    node("n5", "none", memory=1e9),
]


@pytest.mark.parametrize("nodes, device, threads, expected", [
    (NODES, "cpu", None, dict(num_cpus=16)), (NODES[1:], "cpu", None, dict(num_cpus=6)),
    ([*NODES, node("n6", "six", CPU=9.0)], "cpu", None, dict(num_cpus=9)),
    (NODES, "cpu", 4, dict(num_cpus=4)), (NODES, "cuda", None, dict(num_cpus=4, num_gpus=1)),
    (NODES, "cuda", 2, dict(num_cpus=4, num_gpus=1)),
], ids=["the larger machine", "one machine", "two that fit", "four CPUs each", "a GPU each", "a GPU each, untimed"])
def test_a_cells_share(nodes, device, threads, expected):
    assert c.share_of(nodes, device, threads) == expected == c.share_of(nodes[::-1], device, threads)
    if device == "cpu" and threads is None:  # no machine ever has room for two
        assert all(n["Resources"].get("CPU", 0) < 2 * expected["num_cpus"] for n in nodes if n["Alive"])


@pytest.mark.parametrize("device, threads, words", [("cpu", 32, "32 CPUs"), ("cuda", None, "a GPU")])
def test_a_cluster_that_has_not_got_it(device, threads, words):
    with pytest.raises(InputError, match=f"no machine with {words}"): c.share_of(NODES[1:], device, threads)
    with pytest.raises(InputError, match="no machine with a CPU"): c.share_of(NODES[2:], "cpu", None)


def test_a_machine_that_joined_twice_is_refused():
    with pytest.raises(InputError, match="one has joined the Ray cluster twice"):
        c.share_of([*NODES, node("n4", "one", CPU=6.0)], "cpu", None)


# Reaching a cluster

@pytest.mark.parametrize("address, message", [
    ("nowhere", "HOST:PORT, such as"), (":6379", "HOST:PORT"), ("host:port", "HOST:PORT"),
    ("ray://host:10001", "Can't reach the Ray cluster at ray://host:10001 .*ray start --head"),
    ("localhost:1", "Can't reach the Ray cluster at localhost:1 .*refused.*ray start --head"),
    ("localhost:99999", "HOST:PORT"), ("a..b:1", "Can't reach"),
], ids=["no port", "no host", "no number", "another protocol", "nobody listens", "no such port", "no such host"])
def test_an_address_where_no_cluster_is(address, message):
    start = time.monotonic()
    with pytest.raises(InputError, match=message), c.connected(address): pass
    assert time.monotonic() - start < 10


def test_without_ray(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r'pip install -e "\.\[ray\]"'), c.connected("auto"): pass


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
def second(cluster, address, num_cpus=1):
    "Another machine of the cluster, meanwhile."
    node = cluster.add_node(num_cpus=num_cpus, node_ip_address=address, **SMALL)
    try: yield node
    finally:
        if node in cluster.list_all_nodes(): cluster.remove_node(node, allow_graceful=False)
        cluster.wait_for_nodes(timeout=60)  # until it is known to be gone


def noting(file, do, name=str):
    "Work that notes in a file when it began and ended, on which machine, in which process."
    def work(*given):
        import os

        import ray
        def note(what):
            where = f"{ray.util.get_node_ip_address()} {os.getpid()}"
            with open(file, "a") as f: f.write(f"{what} {name(*given)} {where}\n")
        note("begin")
        found = do(*given)
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


@pytest.mark.slow  # a killed worker's cell is in every run, with work that only pretends
def test_the_real_pairs_cells_of_a_killed_node_are_done_again(head, tmp_path, monkeypatch):
    "As `specdec bench run CONFIG --ray` does it; the second machine is killed with a cell in its hands."
    fetch()
    grid = Grid(methods=["plain", "head"], K=[3], dtypes=["float32"], device="cpu", threads=1, prompts="quick", count=1,
                max_new_tokens=4)
    file, notes, killed, do_cell = tmp_path / "r.jsonl", tmp_path / "notes", [], c.whole_cell
    def held(work, code):
        "On the second machine a cell lasts until it is killed."
        import time

        import ray
        if ray.util.get_node_ip_address() == "127.0.0.2": time.sleep(120)
        return do_cell(work, code)
    monkeypatch.setattr(c, "whole_cell", noting(notes, held, lambda work, code: work[0].prompt.id))

    def spread_on_both(work, keep):
        def keep_and_kill(one):
            keep(one)
            if killed: return
            while "127.0.0.2 " not in notes.read_text(): time.sleep(.1)  # until it has begun
            _, cell, _, pid = next(line for line in notes.read_text().splitlines() if "127.0.0.2 " in line).split()
            killed.append(cell)
            head.remove_node(doomed, allow_graceful=False)  # SIGKILL to each of its processes
            with_signal(int(pid), signal.SIGKILL)
        c.over_ray(head.address)(work, keep_and_kill)

    # two machines of one size, so that each can have a cell
    with second(head, "127.0.0.2", num_cpus=2) as doomed: outcome = c.bench_run(grid, file, spread_on_both)
    assert outcome.complete and outcome.failed == {} and outcome.made == 3 * 2
    began = [line.split()[1] for line in notes.read_text().splitlines() if line.startswith("begin")]
    assert killed and began.count(killed[0]) >= 2 and len({*began}) == 3  # it was started again, elsewhere
    assert most_at_once(notes) == dict.fromkeys(most_at_once(notes), 1)
    records = c.read_records(file)
    assert sorted(record.key for record in records) == sorted({record.key for record in outcome.records})
    assert {record.parted for record in records} == {None} and len(records) == 6  # the head's text is the plain one
    assert c.bench_run(grid, file).made == 0


def with_signal(pid, number):
    try: os.kill(pid, number)
    except ProcessLookupError: pass


def spread(ray, work, share, count):
    "The results of pieces of work on a cluster, each with its number, or with what went wrong."
    task = ray.remote(max_retries=c.RETRIES, **share)(work)
    refs = {task.remote(i): i for i in range(count)}
    cell = Cell(None, None, (run(),))
    for ref in c.results(ray, refs): yield refs[ref], c.outcome_of(ray, ref, cell)


def test_a_killed_workers_cell_is_done_again_on_a_shared_machine(head, tmp_path):
    "Two cells at a time; one fails, and one's worker is killed."
    kept, notes, pretend = {}, tmp_path / "notes", pretending(.3)
    def with_another(cell):
        "A cell lasts until two have been at work: to start a second worker can take longer than all the cells."
        import time
        def two_began():
            steps = [1 if line.startswith("begin") else -1 for line in notes.read_text().splitlines()]
            return any(sum(steps[:i + 1]) > 1 for i in range(len(steps)))
        for _ in range(600):
            if two_began(): break
            time.sleep(.1)
        return pretend(cell)
    noted = noting(notes, with_another)
    def work(cell):
        if cell == 1: raise ValueError("no such prompt")
        return noted(cell)
    with c.connected(head.address) as ray:
        for number, result in spread(ray, work, dict(num_cpus=1), 10):
            assert number not in kept
            kept[number] = result
            if len(kept) == 2: os.kill(next(r for n, r in kept.items() if n != 1)[2], signal.SIGKILL)
    assert [one.why for one in kept.pop(1)] == ["ValueError: no such prompt"]
    assert {number: result[0] for number, result in kept.items()} == {i: i for i in range(10) if i != 1}
    assert [*most_at_once(notes).values()] == [2]


def test_ctrl_c_keeps_what_is_finished_and_frees_the_machine(head, tmp_path, interruptible):
    kept, noted = [], noting(tmp_path / "notes", pretending(.3))
    with c.connected(head.address) as ray, pytest.raises(KeyboardInterrupt):
        for _, result in spread(ray, noted, dict(num_cpus=1), 1000):
            kept.append(result)
            if len(kept) == 4: threading.Timer(.5, signal.raise_signal, [signal.SIGINT]).start()
    done = [cell for cell, *_ in kept]
    assert len(done) == len({*done}) >= 4  # in the order in which they end, which is nearly that in which they begin
    ended = (tmp_path / "notes").read_text().count("end")
    assert len(kept) <= ended <= len(kept) + 2 < 1000  # what ended while they were stopped is lost
    with pytest.raises(ProcessLookupError):
        for _ in range(50):
            os.kill(kept[-1][2], 0)
            time.sleep(.1)


def test_a_cell_that_takes_every_worker_with_it_is_given_up(head):
    def deadly(cell):
        import os
        import signal
        os.kill(os.getpid(), signal.SIGKILL)
    with c.connected(head.address) as ray:
        [(_, [failure])] = spread(ray, deadly, dict(num_cpus=1), 1)
    assert failure.method == "plain" and "its worker died 3 times" in failure.why


def test_a_cluster_without_a_gpu(head):
    with pytest.raises(InputError, match="no machine with a GPU"):
        c.over_ray(head.address)([(Cell(None, None, (run(device="cuda"),)), {})], print)


@pytest.mark.parametrize("name", ["specdec", "torch", "transformers"])
def test_another_version_is_refused(name):
    here = c.code_here()
    c.check_code(here)
    with pytest.raises(InputError, match=f"it has another {name} .*, not 0.0"): c.check_code(here | {name: "0.0"})


def test_a_machine_with_another_version_is_named_before_anything_is_run(head, monkeypatch):
    monkeypatch.setattr(c, "code_here", lambda: {"torch": "0.0"})
    with pytest.raises(InputError, match=r"The machine [\d.]+ of the Ray cluster can't do the work .*another torch"):
        c.over_ray(head.address)([(Cell(None, None, (run(),)), {})], print)


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
