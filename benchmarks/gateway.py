"""npu-gateway beside a direct call: added latency, throughput, processor time, open streams.

One node, and one gateway in front of it; each request goes once directly and once through the gateway, in turns. Node,
gateway and callers share this machine's cores, so the gateway's processor time for a request is beside each ratio.
"""

import asyncio
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager

import psutil

from benchmarks import load, workload
from benchmarks.harness import Contender, Figure, in_turn, show, to_json

CALLERS = 32
CHAT, EMBEDDER = "smollm2-135m-instruct", "all-MiniLM-L6-v2"


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


async def soak(node, _store, _quick, minutes):
    """Print the gateway's memory every minute under a light load of each kind of request; return its slope."""
    with _start_gateway(node.url) as (url, process):
        deadline = time.monotonic() + minutes * 60
        counts = Counter()
        async with load.session() as http:
            callers = [
                asyncio.create_task(_call_until(deadline, http, url, kind, counts))
                for kind in ("embeddings", "binary", "chat", "stream", "broken off", "messages", "refused", "models")
            ]
            resident = []
            while time.monotonic() < deadline:
                await asyncio.sleep(min(60, max(0.1, deadline - time.monotonic())))
                resident.append(process.memory_info().rss / 1e6)
                done = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
                print(f"{len(resident):4d} min {resident[-1]:8.2f} MB  {done}", flush=True)
            await asyncio.gather(*callers)
    settled = resident[len(resident) // 3 :]
    slope = statistics.linear_regression(range(len(settled)), settled).slope * 60 if len(settled) > 1 else 0.0
    figures = [
        Figure("memory of the gateway", "MB", resident),
        Figure("growth of memory in the last two thirds", "MB/h", [slope]),
    ]
    show(f"The gateway for {minutes:g} minutes", figures)
    return to_json(figures)


async def _call_until(deadline, http, url, kind, counts):
    """A request every two seconds; every tenth over a connection of its own."""
    while time.monotonic() < deadline:
        path, body, status = _soak_request(kind, counts[kind])
        headers = (load.BINARY if kind == "binary" else {}) | ({} if counts[kind] % 10 else {"Connection": "close"})
        call = http.get(url + path) if body is None else http.post(url + path, json=body, headers=headers)
        async with call as reply:
            assert reply.status == status, await reply.text()
            if kind == "broken off":
                await reply.content.readline()
                reply.close()
            else:
                await reply.read()
        counts[kind] += 1
        await asyncio.sleep(2)


def _soak_request(kind, number):
    """Path, body (None: a GET) and the status that it gets."""
    chat = {"model": CHAT, "messages": [{"role": "user", "content": f"Count from {number}."}], "max_tokens": 4}
    text = workload.texts(1, seed=number)[0]
    return {
        "embeddings": ("/v1/embeddings", {"model": EMBEDDER, "input": [text]}, 200),
        "binary": ("/embeddings", {"texts": [text]}, 200),
        "chat": ("/v1/chat/completions", chat, 200),
        "stream": ("/v1/chat/completions", chat | {"stream": True}, 200),
        "broken off": ("/v1/chat/completions", chat | {"stream": True, "max_tokens": 200, "ignore_eos": True}, 200),
        "messages": ("/v1/messages", chat, 200),
        "refused": ("/v1/chat/completions", chat | {"model": f"none-{number}"}, 404),
        "models": ("/v1/models", None, 200),
    }[kind]


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
