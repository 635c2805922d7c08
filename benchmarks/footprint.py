"""Memory of the node's processes, and the time from start to ready."""

import time

import psutil

from benchmarks.harness import Figure, show, to_json
from benchmarks.node import start_node


async def run(node, _store, quick):
    """Measure and print; return the figures."""
    process = psutil.Process(node.process.pid)
    names = {pid: name for name, pid in node.engine_pids().items()}
    figures = [Figure("edge process", "MB", [process.memory_info().rss / 1e6])]
    figures += [
        Figure(f"engine of {names[child.pid]}", "MB", [child.memory_info().rss / 1e6])
        for child in process.children()
        if child.pid in names
    ]
    starts = []
    for _ in range(1 if quick else 3):
        began = time.perf_counter()
        with start_node():
            starts.append(time.perf_counter() - began)
    figures.append(Figure("start to ready, both embedded models", "s", starts))
    show("Memory and start-up", figures)
    return to_json(figures)
