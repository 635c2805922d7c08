"""Each invariant of a chaos run, broken once: the harness must report it."""

import asyncio
import itertools
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from backend_client import RequestRejected
from tests.chaos import invariants, lateness
from tests.chaos import load as chaos_load
from tests.chaos.invariants import Report, TrafficWatch
from tests.chaos.lateness import Lateness
from tests.chaos.leaks import ClientBaseline, NodeBaseline
from tests.chaos.load import Load
from tests.chaos.oracle import References
from tests.chaos.ranking import Rankings
from tests.chaos.schedule import CALLER_FAULTS, NODE_FAULTS, RECOVERY_S, Fault, schedule

# As the harness itself.
pytestmark = pytest.mark.long
SEED = 1
PROMPTS = [f"prompt {number}" for number in range(9)]
QUERIES, DOCUMENTS = ["query"], [f"document {number}" for number in range(10)]
SCORES = {("query", text): 0.09 * number for number, text in enumerate(DOCUMENTS)}


class Client:
    """Answers as `vector`, `space` and `text` say, after `seconds`; raises `error`."""

    def __init__(self, clock):
        self.vector, self.space, self.text = [1.0, 0.0], "a", "right"
        self.clock, self.seconds, self.error = clock, 0.0, None
        self.disturb = list

    async def embed_result(self, _text, **_options):
        self.clock.now += self.seconds
        if self.error is not None:
            raise self.error
        return SimpleNamespace(vector=self.vector, space=self.space)

    async def rerank(self, query, documents, **_options):
        ranked = [SimpleNamespace(index=index, score=SCORES[query, text]) for index, text in enumerate(documents)]
        ranked.sort(key=lambda document: -document.score)
        return SimpleNamespace(documents=self.disturb(ranked), node="n")

    async def generate(self, _prompt, **_options):
        return SimpleNamespace(text=self.text, node="n", finish_reason="stop", usage=None, timing=None)


@pytest.fixture
def clock(monkeypatch):
    """Time passes only where a test says so, and no thread waits for a core."""
    clock = SimpleNamespace(now=0.0)
    for module in (chaos_load, lateness):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(Lateness, "_waited", lambda _: 0.0)
    return clock


@pytest.fixture
def load(clock):
    texts, short = Load._texts(SEED)
    known = {text: np.float32([1, 0]) for text in texts + short}
    references = References({"a": known, "b": known}, dict.fromkeys(PROMPTS, "right"))
    rankings = Rankings(QUERIES, DOCUMENTS, SCORES)
    return Load(Client(clock), [], references, rankings, Report(SEED, 1), Lateness(), SEED)


def one_wrong(ranked):
    ranked[0].score += 0.01
    return ranked


async def test_right_answers_in_time_violate_nothing(load):
    for kind in (load.embed, load.embed_alias, load.generate, load.rerank):
        await load.call(kind, timeout=30.0)
    assert load.report.answered == 4
    assert not load.report.violations


@pytest.mark.parametrize(
    ("kind", "name", "value", "reported"),
    [
        ("embed", "vector", [0.99, 0.14], "embed: cosine"),
        ("embed", "vector", [float("nan"), 0.0], "embed: cosine"),
        ("embed", "vector", [1.0, 0.0, 0.0], "embed: shape"),
        ("embed", "space", "c", "a vector space that no model here has"),
        ("embed", "error", KeyError("x"), "KeyError is not an error of the client"),
        ("embed", "error", TimeoutError(), "TimeoutError is not an error of the client"),
        ("embed", "error", RequestRejected("no"), "nothing was wrong with the call"),
        ("generate", "text", "righ", "answer 'righ', not 'right'"),
        ("rerank", "disturb", one_wrong, "a score is 0.0100 from the reference"),
        ("rerank", "disturb", lambda ranked: ranked[1:], "of 8 documents"),
        ("rerank", "disturb", lambda ranked: [*ranked[1:], ranked[1]], "of 8 documents"),
        ("rerank", "disturb", lambda ranked: ranked[::-1], "not the most relevant first"),
    ],
)
async def test_a_wrong_answer_or_error_is_reported(load, kind, name, value, reported):
    setattr(load.client, name, value)
    await load.call(getattr(load, kind), timeout=30.0)
    [violation] = load.report.violations
    assert reported in violation


async def test_a_second_space_under_one_name_is_reported(load):
    await load.call(load.embed, timeout=30.0)
    load.client.space = "b"
    await load.call(load.embed, timeout=30.0)
    assert "was in a and is now in b" in load.report.violations[0]


async def test_lateness_by_a_stall_on_purpose_or_a_busy_machine_is_excused_and_by_other_work_is_not(
    load, clock, monkeypatch
):
    async def busy(_timeout):
        clock.now += 0.3
        return "ok"

    async def stalled(timeout):
        began = clock.now
        await busy(timeout)
        load.lateness.stalled(began, clock.now)
        return "ok"

    async def without_a_core(timeout):
        monkeypatch.setattr(Lateness, "_waited", lambda _: 0.3)
        return await busy(timeout)

    await load.call(stalled, timeout=0.1)
    await load.call(without_a_core, timeout=0.1)
    assert not load.report.violations
    monkeypatch.setattr(Lateness, "_waited", lambda _: 0.0)
    await load.call(busy, timeout=0.1)
    assert "busy: ok came" in load.report.violations[0]


class Watched:
    """A node to the traffic watch; `ready` is what its /health says."""

    def __init__(self, number=0, *, ready=True, answers=True):
        self.number = number
        self.one_fault = asyncio.Lock()
        self.proxy = SimpleNamespace(requests=0)
        self.node = self
        self._ready, self._answers = ready, answers

    def health(self):
        if not self._answers:
            raise ConnectionRefusedError
        return 200, {"models": [{"state": "ready" if self._ready else "loading"}]}


async def watch_traffic(monkeypatch, node, faults, *, traffic=False, seconds=1.6):
    """Have a traffic watch look for so long, or until it reports something; returns what it reports."""
    monkeypatch.setattr(invariants, "LONGEST_SILENCE_S", 0.5)
    report = Report(SEED, 1)
    watch = TrafficWatch([node], faults, report, time.monotonic())
    watching = asyncio.create_task(watch.watch())
    end = time.monotonic() + seconds
    while time.monotonic() < end and not report.violations:
        watch.calls += 10
        node.proxy.requests += traffic
        await asyncio.sleep(0.02)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    return report.violations


async def test_a_healthy_node_without_traffic_is_reported_also_during_a_fault_of_the_caller(monkeypatch):
    faults = [Fault(0.0, 100.0, "frozen_resolver", None), Fault(0.0, 100.0, "node_freeze", 1)]
    assert "healthy node 0 got none of" in (await watch_traffic(monkeypatch, Watched(), faults, seconds=60))[0]


async def test_a_node_that_does_not_answer_is_reported_unless_a_fault_strikes_it(monkeypatch):
    silent = Watched(answers=False)
    assert "does not answer /health" in (await watch_traffic(monkeypatch, silent, [], seconds=60))[0]
    assert not await watch_traffic(monkeypatch, silent, [Fault(0.0, 100.0, "node_kill", 0)])


async def test_nodes_with_traffic_or_with_models_that_load_are_left_in_peace(monkeypatch):
    assert not await watch_traffic(monkeypatch, Watched(), [], traffic=True)
    assert not await watch_traffic(monkeypatch, Watched(ready=False), [])


async def test_what_is_left_of_a_client_is_reported(monkeypatch):
    before = ClientBaseline()
    assert not list(before.left({"127.0.0.9"}))
    task = asyncio.create_task(asyncio.sleep(60), name="left behind")
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, name="left thread")
    thread.start()
    with socket.create_server(("127.0.0.9", 0)) as server, socket.create_connection(server.getsockname()):
        problems = " ".join(before.left({"127.0.0.9"}))
    task.cancel()
    go_on.set()
    thread.join()
    assert "left behind" in problems
    assert "left thread" in problems
    assert "connections" in problems
    sizes = iter([300_000_000, 400_000_000])
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: SimpleNamespace(rss=next(sizes)))
    before.warmed_up()
    assert "95 MB of memory" in " ".join(before.left({"127.0.0.9"}))


@pytest.fixture
def idle_node(tmp_path):
    model = {"id": "m", "state": "ready", "in_flight": 0, "queue_depth": 0, "engines": []}
    process = SimpleNamespace(fds=20, rss=300_000_000, kids=[], children=lambda **_: process.kids)
    process.num_fds, process.memory_info = lambda: process.fds, lambda: SimpleNamespace(rss=process.rss)
    body = {"status": "ready", "models": [model]}
    node = SimpleNamespace(health=lambda: (200, body))
    return SimpleNamespace(number=0, process=process, node=node, store=tmp_path, temporary=tmp_path, body=body)


def child(*command, status=psutil.STATUS_RUNNING):
    return SimpleNamespace(pid=1, cmdline=lambda: ["python", *command], status=lambda: status)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"kids": [child("-m", "worker_node.engines.child")]}, "engine processes that it does not know of"),
        ({"kids": [child("-c", "", status=psutil.STATUS_ZOMBIE)]}, "have ended and were not waited for"),
        ({"kids": [child("-m", "worker_node.sandbox")] * 5}, "more processes than before"),
        ({"fds": 60}, "descriptors"),
        ({"rss": 400_000_000}, "95 MB more memory"),
    ],
)
async def test_what_a_node_leaves_is_reported(idle_node, change, reported):
    before = NodeBaseline(idle_node)
    assert await before.left() is None
    for name, value in change.items():
        setattr(idle_node.process, name, value)
    assert reported in "; ".join(before.problems())


async def test_files_jobs_and_models_that_stay_are_reported(idle_node, tmp_path):
    before = NodeBaseline(idle_node)
    (tmp_path / "half-written").write_text("x")
    idle_node.body["models"][0]["in_flight"] = 1
    problems = "; ".join(before.problems())
    assert "half-written" in problems
    assert "m has 1 jobs in flight" in problems
    idle_node.body["status"] = "degraded"
    assert "/health is 200 degraded" in "; ".join(before.problems())


@pytest.mark.parametrize("seed", range(20))
def test_a_seed_gives_one_schedule_in_which_no_node_has_two_faults_at_once(seed):
    faults = schedule(seed, 180)
    assert faults == schedule(seed, 180)
    assert faults != schedule(seed + 1, 180)
    for node in range(3):
        own = [fault for fault in faults if fault.node == node]
        assert all(later.at >= earlier.until + RECOVERY_S for earlier, later in itertools.pairwise(own))
    assert all(fault.until <= 180 - RECOVERY_S for fault in faults)
    assert {fault.kind for fault in faults} == NODE_FAULTS.keys() | CALLER_FAULTS.keys()
