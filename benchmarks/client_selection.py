"""What choosing a node costs: request, budget, selection, breaker and book-keeping of a call, without any I/O."""

import gc
import random
import time
from collections import deque

import psutil

from backend_client.errors import NodeFailed
from backend_client.fleet.pool import Pool
from backend_client.fleet.spaces import Bindings
from backend_client.http.messages import HealthReport, Request
from backend_client.lifetime import Deadline
from backend_client.options import ClientOptions
from backend_client.routing.call import RetryBudget
from benchmarks.harness import Figure, show, to_json

MODEL = "all-minilm-l6-v2"
UNDER_WAY = 32
FAILS_ONE_IN = 20
ROUNDS = 5


class Fleet:
    """The pure parts of a client with so many nodes, on the real clock."""

    def __init__(self, count):
        options = ClientOptions()
        self.pool = Pool(options, time.monotonic, random.Random(1))
        model = {"id": MODEL, "kind": "embedding", "state": "ready", "placements": ["CPU"], "space": "s"}
        report = HealthReport.model_validate({"status": "ready", "models": [model]})
        for node in self.pool.add([f"http://node-{index}:8081" for index in range(count)]):
            self.pool.probe_passed(node, report, began=0.0)
        self.bindings = Bindings(self.pool, {})
        self.budget = RetryBudget(options.retry, time.monotonic)

    def request(self):
        request = Request(path="/embeddings", kind="embedding", deadline=Deadline.after(10))
        self.bindings.complete(request)
        return request

    def take(self, calls, *, failing):
        """Microseconds a call, with some under way all the time."""
        under_way = deque()
        began = time.perf_counter()
        for number in range(calls):
            self.budget.deposit()
            under_way.append(self.pool.acquire(self.request()))
            if len(under_way) == UNDER_WAY:
                error = None
                if failing and number % FAILS_ONE_IN == 0:
                    error = NodeFailed("failed", node="", status=500)
                    self.budget.withdraw()
                self.pool.settle(under_way.popleft(), error)
        seconds = time.perf_counter() - began
        for lease in under_way:
            self.pool.settle(lease, None)
        return seconds / calls * 1e6


async def run(_node, _store, quick):
    """Measure and print; return the figures."""
    calls = 10_000 if quick else 1_000_000 // ROUNDS
    process = psutil.Process()
    figures = []
    sizes = []
    for count, failing in ((1, False), (3, False), (3, True), (5, False)):
        fleet = Fleet(count)
        fleet.take(calls // 10, failing=failing)
        name = f"{count} nodes" + (f", one call in {FAILS_ONE_IN} fails" if failing else "")
        figures.append(Figure(name, "µs", [fleet.take(calls, failing=failing) for _ in range(ROUNDS)]))
        gc.collect()
        sizes.append(process.memory_info().rss / 1024)
    figures.append(Figure("resident memory afterwards", "kB", sizes))
    show(f"Selection: a node for a call, {UNDER_WAY} under way, {calls * ROUNDS} calls each", figures)
    return to_json(figures)
