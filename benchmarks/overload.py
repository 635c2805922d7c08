"""Ten times the load that the node can serve: what it still serves, and how soon it says no."""

import asyncio
import statistics
import time

from benchmarks import load, workload
from benchmarks.harness import Figure, show, to_json

TEXTS_A_REQUEST = 16
DEADLINE_MS = 2000


async def run(node, _store, quick):
    """Measure and print; return the figures."""
    seconds = 4 if quick else 12
    rounds = 1 if quick else 5
    texts = workload.texts(4096, seed=99)
    requests = [texts[i : i + TEXTS_A_REQUEST] for i in range(0, len(texts), TEXTS_A_REQUEST)]
    peaks, goodputs, refusals = [], [], []
    async with load.session() as http:
        for _ in range(rounds):
            peak = await _closed_loop(http, node.url, requests, seconds)
            served, refused = await _open_loop(http, node.url, requests, seconds, rate=10 * peak)
            peaks.append(peak)
            goodputs.append(served)
            refusals += refused
    ratios = [good / peak for good, peak in zip(goodputs, peaks, strict=True)]
    figures = [
        Figure("peak goodput, 8 callers", "requests/s", peaks),
        Figure("goodput at 10 times the peak", "requests/s", goodputs, ratios, target=0.95),
        Figure("a refusal, at the median (wanted: at most 10 ms)", "ms", [statistics.median(refusals or [0.0]) * 1e3]),
        Figure("refusals", "", [len(refusals)]),
    ]
    show(f"Overload: requests of {TEXTS_A_REQUEST} texts with {DEADLINE_MS} ms to live", figures)
    return to_json(figures)


async def _post(http, url, texts):
    headers = load.BINARY | {"X-Request-Timeout-Ms": str(DEADLINE_MS)}
    began = time.perf_counter()
    async with http.post(url + "/embeddings", json={"texts": texts}, headers=headers) as reply:
        await reply.read()
        return reply.status, time.perf_counter() - began


async def _closed_loop(http, url, requests, seconds):
    end = time.perf_counter() + seconds
    served = 0

    async def caller(number):
        nonlocal served
        index = number
        while time.perf_counter() < end:
            status, _ = await _post(http, url, requests[index % len(requests)])
            served += status == 200
            index += 8

    began = time.perf_counter()
    await asyncio.gather(*(caller(i) for i in range(8)))
    return served / (time.perf_counter() - began)


async def _open_loop(http, url, requests, seconds, rate):
    """Requests come when they come, whether or not the earlier ones were answered."""
    began = time.perf_counter()
    tasks = []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(_post(http, url, requests[number % len(requests)])))
    offered_for = time.perf_counter() - began
    answers = await asyncio.gather(*tasks)
    unexpected = {status for status, _ in answers} - {200, 429, 504}
    assert not unexpected, f"answered with {unexpected}"
    served = sum(status == 200 and taken <= DEADLINE_MS / 1000 for status, taken in answers)
    return served / offered_for, [taken for status, taken in answers if status == 429]
