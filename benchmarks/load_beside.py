"""What reranking and transcription beside it cost a chat, and what the chat costs them, by `share_beside_chats`.

    python -m benchmarks.load_beside --seconds 8 --rounds 2 --shares 1,0.2

For each share a node with SmolLM2, a cross-encoder over MiniLM's body and Whisper tiny.en on the CPU. One caller
streams answers all the time; beside it, in turn, are callers that rerank, and callers that transcribe. Printed:
medians of the first token, the time between tokens and the whole answer, their ratio to those without load just before
and after (at most 1.20 is wanted), and the requests a second of the load, beside the chat and without it.
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
PARTS = ("first", "between", "answer")
Work = Callable[[aiohttp.ClientSession, str], Awaitable[None]]
_ANSWER = {
    "model": WRITER,
    "prompt": "Write a story about the sea.",
    "max_tokens": 48,
    "ignore_eos": True,
    "stream": True,
}


@dataclass
class Latencies:
    """Seconds to the first token of each answer, between its tokens, and of the whole; what was done beside it."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    answer: list[float] = field(default_factory=list)
    beside: int = 0
    seconds: float = 0.0

    def median(self, part: str) -> float:
        """The median of one of the lists."""
        return statistics.median(getattr(self, part))


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
    found.answer.append(last - began)


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
    http: aiohttp.ClientSession, url: str, seconds: float, work: Work | None, callers: int, *, chat: bool = True
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
        began = time.monotonic()
        while chat and (time.monotonic() < began + seconds or not found.first):
            await _stream(http, url, found)
        if not chat:
            await asyncio.sleep(seconds)
        found.seconds = time.monotonic() - began
    return found


@dataclass
class Results:
    """Of one share and one load: the ratios of each round, and the load's requests a second."""

    ratios: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    medians: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    rates: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)

    def line(self) -> str:
        """All of it."""
        text = ""
        for part in PARTS:
            ratio = statistics.median(self.ratios[part])
            seen = statistics.median(self.medians[part]) * 1e3
            text += f"{seen:9.1f} ms ×{ratio:.2f} {'ok    ' if ratio <= WANTED else 'MISSED'}"
        rate, alone = statistics.median(self.rates), statistics.median(self.alone)
        return f"{text}{rate:8.2f}/s of {alone:.2f} ({rate / alone:.0%})"


async def _round(
    http: aiohttp.ClientSession, url: str, work: Work, seconds: float, callers: int, results: Results
) -> None:
    alone = await _measure(http, url, seconds / 2, work, callers, chat=False)
    results.alone.append(alone.beside / alone.seconds)
    before = await _measure(http, url, seconds / 2, None, 0)
    loaded = await _measure(http, url, seconds, work, callers)
    after = await _measure(http, url, seconds / 2, None, 0)
    results.rates.append(loaded.beside / loaded.seconds)
    for part in PARTS:
        base = statistics.mean(each.median(part) for each in (before, after))
        results.medians[part].append(loaded.median(part))
        results.ratios[part].append(loaded.median(part) / base)


async def _run(urls: dict[str, str], seconds: float, rounds: int, callers: int) -> None:
    loads = {"rerank": _rerank, "transcribe": _transcribe}
    found = {(name, share): Results() for name in loads for share in urls}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as http:
        for url in urls.values():
            for work in (None, *loads.values()):
                await _measure(http, url, 0.0, work, 1)
        for _ in range(rounds):
            for (name, share), results in found.items():
                await _round(http, urls[share], loads[name], seconds, callers, results)
    print(f"{'beside':11} share  {'first token':22}{'between tokens':24}{'whole answer':24}load beside")
    for (name, share), results in found.items():
        print(f"{name:11} {share:5}{results.line()}")


@contextlib.asynccontextmanager
async def _node(share: str) -> AsyncIterator[str]:
    store = ModelStore()
    store.pull(HEARER)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        write_minilm(root / "ranker", store.get(EMBEDDER).path)
        tables = [{"name": WRITER}, {"name": HEARER}, {"name": "ranker", "path": str(root / "ranker")}]
        environment = {
            "NPU_NODE_MODELS": json.dumps([table | {"placements": ["CPU"]} for table in tables]),
            "NPU_NODE_COMPILE_CACHE": str(root / "cache"),
            "NPU_NODE_SHARE_BESIDE_CHATS": share,
        }
        with start_node("--log-level", "warning", **environment) as node:
            yield node.url


async def _main(shares: list[str], seconds: float, rounds: int, callers: int) -> None:
    print(", ".join(f"{name}: {value}" for name, value in describe_machine().items()), flush=True)
    async with contextlib.AsyncExitStack() as stack:
        urls = {share: await stack.enter_async_context(_node(share)) for share in shares}
        await _run(urls, seconds, rounds, callers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of one measurement under load")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--callers", type=int, default=2, help="that rerank, or transcribe, at the same time")
    parser.add_argument("--shares", default="1,0.2", help="values of share_beside_chats")
    given = parser.parse_args()
    asyncio.run(_main(given.shares.split(","), given.seconds, given.rounds, given.callers))
