"""npu-gateway beside a direct call: added latency, throughput, processor time, open streams.

One node, and one gateway in front of it; each request goes once directly and once through the gateway, in turns. Node,
gateway and callers share this machine's cores, so the gateway's processor time for a request is beside each ratio.
"""

import asyncio
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil

from benchmarks import load, workload
from benchmarks.harness import Contender, Figure, in_turn, show, to_json

CALLERS = 32


async def run(node, _store, quick):
    """Measure and print; return the figures."""
    with _start_gateway(node.url) as (url, process):
        async with load.session() as http:
            figures = await _latency(http, node.url, url, process, 200 if quick else 2000)
            texts = workload.texts(400 if quick else 4000)

            def through(place):
                return lambda: load.embed_one_by_one(http, place, texts, CALLERS)

            before = sum(process.cpu_times()[:2])
            contenders = [Contender("direct", through(node.url)), Contender("through the gateway", through(url), 0.95)]
            rounds = 2 if quick else 5
            found = await in_turn(f"One text a request, {CALLERS} callers", "texts/s", contenders, rounds)
            spent = (sum(process.cpu_times()[:2]) - before) * 1000 / (len(texts) * (rounds + 1))
            figures += [*found, Figure(f"processor time of the gateway, {CALLERS} callers", "ms/request", [spent])]
            figures += await _streams(http, url, process, 100 if quick else 1000)
        show("The gateway", figures)
    return to_json(figures)


@contextmanager
def _start_gateway(node):
    """Its URL, and its process."""
    code = "import sys; from backend_client.gateway.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", "--port", "0", "--node", node]
    process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield process.stdout.readline().split()[3], process
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


async def _latency(http, direct, gateway, process, count):
    taken = {direct: [], gateway: []}
    before = sum(process.cpu_times()[:2])
    for number in range(-20, count):
        for place in (direct, gateway) if number % 2 else (gateway, direct):
            body = {"texts": [f"text {number} of the latency"]}
            began = time.perf_counter()
            async with http.post(place + "/embeddings", json=body, headers=load.BINARY) as reply:
                await reply.read()
                assert reply.status == 200
            if number >= 0:
                taken[place].append((time.perf_counter() - began) * 1000)
    spent = (sum(process.cpu_times()[:2]) - before) * 1000 / (count + 20)
    added = statistics.median(taken[gateway]) - statistics.median(taken[direct])
    return [
        Figure("median of a direct call", "ms", [statistics.median(taken[direct])]),
        Figure("added by the gateway at the median", "ms", [added]),
        Figure("processor time of the gateway, one caller", "ms/request", [spent]),
    ]


async def _streams(http, url, process, count):
    """Streams that are open at once: each waits for the node, which refuses none that fits its queue."""
    resident = process.memory_info().rss

    async def stream(number):
        body = {"prompt": f"Number {number}:", "raw": True, "max_new_tokens": 4, "ignore_eos": True, "stream": True}
        async with http.post(url + "/inference", json=body) as reply:
            return reply.status == 200 and b"event: done" in await reply.read()

    done = await asyncio.gather(*(stream(number) for number in range(count)))
    return [
        Figure(f"complete of {count} streams at once", "", [float(sum(done))]),
        Figure("memory of the gateway after them", "MB", [process.memory_info().rss / 1e6]),
        Figure("memory of the gateway before them", "MB", [resident / 1e6]),
    ]
