"""The edge process's own CPU time: per single embedding, per streamed token, and at idle.

Processor time, not wall time, so that a busy machine disturbs it little: the scheduler's count in nanoseconds, over
all threads of the edge process, around a fixed amount of work. Beside it, in turn, aiohttp alone (`bare_server`).
"""

import asyncio
import json
import time
from functools import partial
from pathlib import Path

from benchmarks import bare_server
from benchmarks.harness import GUARD, Figure, show, to_json
from benchmarks.load import session

# Few tokens, so that the edge is asked often while the engine has little to do.
TEXT = "How warm is it in the garden today?"
PROMPT = "Tell me a long story about a garden in winter."
NEW_TOKENS = 128


def cpu_seconds(pid):
    """The CPU time that the live threads of a process have used, in seconds."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


async def run(node, _store, quick):
    """Measure and print; return the figures."""
    pid, rounds = node.process.pid, 2 if quick else 5
    figures = [
        Figure("one embedding, 1 caller", "ms", []),
        Figure("one embedding, 32 callers", "ms", []),
        Figure("one streamed token, 1 caller", "ms", []),
        Figure("one streamed token, 16 callers", "ms", []),
        Figure("idle, share of a core", "%", []),
    ]
    work = (
        (_embed, 300, 1),
        (_embed, 1000, 32),
        (_stream, 4, 1),
        (_stream, 32, 16),
    )
    floor = [Figure(f"aiohttp alone: {figure.name}", "ms", []) for figure in figures[: len(work)]]
    with bare_server.running() as (bare, bare_url):
        servers = ((pid, node.url, figures), (bare, bare_url, floor))
        async with session() as http:
            for _, url, _ in servers:
                await _embed(http, url, 50, 1)
                await _stream(http, url, 1, 1)
            for _ in range(rounds):
                for index, (measure, count, callers) in enumerate(work):
                    for process, url, taken in servers:
                        take = partial(_cpu_per_unit, process, measure, http, url, count, callers)
                        taken[index].values.append(await GUARD.take(take) * 1e3)
                idle = await GUARD.take(partial(_cpu_per_unit, pid, _rest, 5 if quick else 20))
                figures[-1].values.append(idle * 100)
    show("CPU time of the edge process", [*figures, *floor])
    return to_json([*figures, *floor])


async def _cpu_per_unit(pid, measure, *arguments):
    """CPU seconds of the process for each of the units that `measure` returns."""
    before = cpu_seconds(pid)
    units = await measure(*arguments)
    return (cpu_seconds(pid) - before) / units


async def _rest(seconds):
    """Do nothing; return how many seconds that took."""
    began = time.monotonic()
    await asyncio.sleep(seconds)
    return time.monotonic() - began


async def _embed(http, url, count, callers):
    """Embed one text a request; return how many requests were made."""
    body = json.dumps({"model": "all-minilm-l6-v2", "input": TEXT}).encode()

    async def request(_):
        async with http.post(url + "/v1/embeddings", data=body, headers={"Content-Type": "application/json"}) as reply:
            assert reply.status == 200, await reply.text()
            await reply.read()

    await _closed_loop(request, count, callers)
    return count


async def _stream(http, url, count, callers):
    """Stream chat answers; return how many tokens they had in all."""
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": NEW_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }

    async def request(_):
        async with http.post(url + "/v1/chat/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            await reply.read()

    await _closed_loop(request, count, callers)
    return count * NEW_TOKENS


async def _closed_loop(request, count, callers):
    """Make `count` requests, `callers` at a time."""
    waiting = iter(range(count))

    async def caller():
        for number in waiting:
            await request(number)

    await asyncio.gather(*(caller() for _ in range(callers)))
