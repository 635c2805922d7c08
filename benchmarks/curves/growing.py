"""Curves of pure parts: the queue of an embedding engine, and the client's choice of a node."""

import gc
import random
import time
import tracemalloc

from benchmarks.client_selection import Fleet
from benchmarks.curves.curve import Curve, Series
from worker_node.scheduling.texts import BatchLimits, TextQueue, Waiting

_LIMITS = BatchLimits(128, 64, 8)


async def waiting_texts(_store, quick):
    """CPU time to add and take one of so many waiting texts, and what they take in memory."""
    points = [100, 1000, 10_000] if quick else [100, 1000, 10_000, 100_000]
    costs, sizes = [], []
    for count in points:
        rng = random.Random(count)
        texts = [
            Waiting(number // 16, number % 16, min(208, max(8, round(rng.lognormvariate(3.7, 0.75)))))
            for number in range(count)
        ]
        seconds = min(_fill_and_empty(texts) for _ in range(3))
        costs.append(seconds / count * 1e6)
        sizes.append(_size_of(texts) / 1e6)
    series = [Series("to queue and take one", "µs", costs), Series("memory", "MB", sizes)]
    return Curve("waiting texts", "texts that wait", points, series)


def _fill_and_empty(texts):
    queue = TextQueue()
    began = time.process_time()
    for text in texts:
        queue.add(text)
    while queue.take(_LIMITS):
        pass
    return time.process_time() - began


def _size_of(texts):
    gc.collect()
    tracemalloc.start()
    queue = TextQueue()
    for text in texts:
        queue.add(text)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size


async def client_nodes(_store, quick):
    """CPU time to choose one of so many nodes, and what the client keeps of them."""
    points = [3, 30, 300, 3000]
    costs, sizes = [], []
    for count in points:
        calls = max(100, (10_000 if quick else 100_000) // count)
        tracemalloc.start()
        fleet = Fleet(count)
        sizes.append(tracemalloc.get_traced_memory()[0] / 1e6)
        tracemalloc.stop()
        fleet.take(calls // 10, failing=False)
        began = time.process_time()
        fleet.take(calls, failing=False)
        costs.append((time.process_time() - began) / calls * 1e6)
    series = [Series("to choose one", "µs", costs), Series("memory", "MB", sizes)]
    return Curve("nodes of a client", "nodes", points, series)
