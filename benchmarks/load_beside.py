"""What reranking and transcription beside it cost a chat: its first-token and inter-token latency with and without.

    python -m benchmarks.load_beside --seconds 20 --rounds 3

One node with SmolLM2, a cross-encoder over MiniLM's body and Whisper tiny.en on the CPU. One caller streams answers all
the time; beside it, in turn, is nothing, callers that rerank, callers that transcribe. Printed: the medians, and their
ratio to the mean of the rounds without load before and after. At most 1.20 is wanted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.quiet import describe_machine
from tests.support.cross_encoders import write_minilm
from tests.support.nodes import start_node
from tests.support.speech import SPEECH
from worker_node.models.store import ModelStore

WRITER, EMBEDDER, HEARER = "smollm2-135m-instruct", "all-minilm-l6-v2", "whisper-tiny.en"
WANTED = 1.20
_ANSWER = {
    "model": WRITER,
    "prompt": "Write a story about the sea.",
    "max_tokens": 48,
    "ignore_eos": True,
    "stream": True,
}


@dataclass
class Latencies:
    """Seconds to the first token of each answer, and between its tokens; what the load beside it had done."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    beside: int = 0


async def _stream(http: aiohttp.ClientSession, url: str, found: Latencies) -> None:
    """One answer."""
    began = last = time.perf_counter()
    async with http.post(url + "/v1/completions", json=_ANSWER) as reply:
        assert reply.status == 200, await reply.text()
        count = 0
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            if count:
                found.between.append(now - last)
            else:
                found.first.append(now - began)
            count, last = count + 1, now


async def _rerank(http: aiohttp.ClientSession, url: str) -> None:
    body = {"model": "ranker", "query": "Where do fish live?", "documents": ["Fish live in the sea. " * 6] * 32}
    async with http.post(url + "/v1/rerank", json=body) as reply:
        assert reply.status in {200, 429}, await reply.text()
        await reply.read()


async def _transcribe(http: aiohttp.ClientSession, url: str) -> None:
    form = aiohttp.FormData()
    form.add_field("model", HEARER)
    form.add_field("file", next(iter(SPEECH)).read_bytes(), filename="speech")
    async with http.post(url + "/v1/audio/transcriptions", data=form) as reply:
        assert reply.status in {200, 429}, await reply.text()
        await reply.read()


async def _measure(
    http: aiohttp.ClientSession, url: str, seconds: float, work: Callable[..., Awaitable[None]] | None, callers: int
) -> Latencies:
    found = Latencies()

    async def beside() -> None:
        while work is not None:
            await work(http, url)
            found.beside += 1

    async with contextlib.AsyncExitStack() as stack:
        for _ in range(callers if work else 0):
            task = asyncio.create_task(beside())
            stack.callback(task.cancel)
        until = time.monotonic() + seconds
        while time.monotonic() < until or not found.first:
            await _stream(http, url, found)
    return found


def _line(name: str, found: list[Latencies], ratios: dict[str, list[float]]) -> str:
    first = statistics.median(value for each in found for value in each.first)
    between = statistics.median(value for each in found for value in each.between)
    text = f"{name:12}{first * 1e3:9.1f} ms{between * 1e3:9.2f} ms{sum(each.beside for each in found):8}"
    for part, values in ratios.items():
        ratio = statistics.median(values)
        text += f"   {part} ÷ alone {ratio:.2f} {'reached' if ratio <= WANTED else 'MISSED'}"
    return text


async def _run(url: str, seconds: float, rounds: int, callers: int) -> None:
    loads = {"rerank": _rerank, "transcribe": _transcribe}
    alone: list[Latencies] = []
    found: dict[str, list[Latencies]] = {name: [] for name in loads}
    ratios: dict[str, dict[str, list[float]]] = {name: {"first": [], "between": []} for name in loads}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as http:
        for work in (None, *loads.values()):
            await _measure(http, url, 0.0, work, 1)
        for _ in range(rounds):
            for name, work in loads.items():
                before = await _measure(http, url, seconds / 2, None, 0)
                loaded = await _measure(http, url, seconds, work, callers)
                after = await _measure(http, url, seconds / 2, None, 0)
                alone += [before, after]
                found[name].append(loaded)
                for part, values in ratios[name].items():
                    base = statistics.mean(statistics.median(getattr(each, part)) for each in (before, after))
                    values.append(statistics.median(getattr(loaded, part)) / base)
    print(f"{'':12}{'first token':>12}{'between':>12}{'beside':>8}")
    print(_line("alone", alone, {}))
    for name in loads:
        print(_line(name, found[name], ratios[name]))


@contextlib.asynccontextmanager
async def _node() -> AsyncIterator[str]:
    store = ModelStore()
    store.pull(HEARER)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        write_minilm(root / "ranker", store.get(EMBEDDER).path)
        tables = [{"name": WRITER}, {"name": HEARER}, {"name": "ranker", "path": str(root / "ranker")}]
        environment = {
            "NPU_NODE_MODELS": json.dumps([table | {"placements": ["CPU"]} for table in tables]),
            "NPU_NODE_COMPILE_CACHE": str(root / "cache"),
        }
        with start_node("--log-level", "warning", **environment) as node:
            yield node.url


async def _main(seconds: float, rounds: int, callers: int) -> None:
    print(", ".join(f"{name}: {value}" for name, value in describe_machine().items()), flush=True)
    async with _node() as url:
        await _run(url, seconds, rounds, callers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of one measurement under load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--callers", type=int, default=2, help="that rerank, or transcribe, at the same time")
    given = parser.parse_args()
    asyncio.run(_main(given.seconds, given.rounds, given.callers))
