"""How long the edge waits for a core that its own engines have, by the setting engine_nice.

    python -m benchmarks.engine_nice --seconds 6 --rounds 4

One node for each value, loaded in turn by callers with one text each. What the event loop waited (the scheduler's
count) is told for each second that it ran; the load of other processes disturbs all values alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time

import aiohttp

from benchmarks.five_models import LoopTime
from benchmarks.load import session
from benchmarks.workload import texts
from tests.support.nodes import start_node

MODEL = "all-minilm-l6-v2"
CALLERS = 32
_MODELS = f'[{{"name": "{MODEL}", "placements": ["CPU"]}}]'


async def _load(url: str, seconds: float) -> int:
    """The requests that were answered."""
    until, answered = time.monotonic() + seconds, 0
    inputs = texts(512)

    async def caller(http: aiohttp.ClientSession, number: int) -> None:
        nonlocal answered
        while time.monotonic() < until:
            body = {"model": MODEL, "input": inputs[(number + answered) % len(inputs)]}
            async with http.post(url + "/v1/embeddings", json=body) as reply:
                assert reply.status in {200, 429}, await reply.text()
                await reply.read()
            answered += reply.status == 200

    async with session() as http:
        await asyncio.gather(*(caller(http, number) for number in range(CALLERS)))
    return answered


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--nice", default="0,5,10,19", help="values of engine_nice")
    args = parser.parse_args()
    values = args.nice.split(",")
    waits: dict[str, list[float]] = {value: [] for value in values}
    rates: dict[str, list[float]] = {value: [] for value in values}
    with contextlib.ExitStack() as stack:
        settings = {"NPU_NODE_MODELS": _MODELS, "NPU_NODE_EMBEDDING_CACHE": "0"}
        nodes = {
            value: stack.enter_context(start_node("--log-level", "warning", NPU_NODE_ENGINE_NICE=value, **settings))
            for value in values
        }
        for number in range(args.rounds):
            for value in values if number % 2 else values[::-1]:
                node = nodes[value]
                before = LoopTime.of(node.process.pid)
                answered = asyncio.run(_load(node.url, args.seconds))
                loop = LoopTime.of(node.process.pid).since(before)
                waits[value].append(loop.waited / loop.ran)
                rates[value].append(answered / args.seconds)
    print("engine_nice   waited for each second that it ran   texts/s")
    for value in values:
        spread = f"{min(waits[value]):.2f} … {max(waits[value]):.2f}"
        print(
            f"{value:>11s}   {statistics.median(waits[value]):.2f} ({spread})   {statistics.median(rates[value]):.0f}"
        )


if __name__ == "__main__":
    main()
