"""`npu-client bench`: how fast the nodes answer this client, now."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import numpy as np

from backend_client.cli.flags import add_call_options, call_options, table
from backend_client.cli.main import WrongUsage
from backend_client.client import NPUClient
from backend_client.errors import NPUError, NPUUnavailableError
from backend_client.settings import ClientSettings

_WORDS = ["node", "text", "vector", "answer", "model", "device", "queue", "batch", "token", "cloud"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="measure the nodes through this client", description=__doc__)
    parser.add_argument("--what", choices=("embed", "generate"), default="embed")
    parser.add_argument("--calls", type=int, default=200, help="calls in all (200)")
    parser.add_argument("--concurrency", type=int, default=8, help="callers at once (8)")
    parser.add_argument("--words", type=int, default=32, help="words of each text or prompt (32)")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="tokens of each answer (32)")
    add_call_options(parser)
    parser.set_defaults(run=run)


async def run(args: argparse.Namespace, settings: ClientSettings) -> int:
    """Print rate, latencies, and who served; 1 when a call failed. Raises WrongUsage."""
    if min(args.calls, args.concurrency) < 1:
        raise WrongUsage("--calls and --concurrency are at least 1")
    async with NPUClient.from_settings(settings) as client:

        async def embed(text: str) -> str:
            return (await client.embed_result(text, **call_options(args))).node

        async def generate(text: str) -> str:
            options = call_options(args)
            return (await client.generate(text, max_new_tokens=args.max_new_tokens, **options)).node

        nodes = await client.health()
        if not any(node.usable for node in nodes):
            known = "; ".join(f"{node.url}: {node.trouble or node.status}" for node in nodes)
            raise NPUUnavailableError(f"there is no node to measure: {known or 'none is configured'}")
        seconds, latencies, served, failed, messages = await _load(args, embed if args.what == "embed" else generate)
    points = np.percentile(latencies, (50, 95, 99)) * 1000 if latencies else np.full(3, np.nan)
    head = ("CALLS", "FAILED", "CALLS/S", "P50 MS", "P95 MS", "P99 MS")
    rate = f"{len(latencies) / seconds:.1f}"
    print(table(head, [(str(args.calls), str(failed.total()), rate, *(f"{point:.1f}" for point in points))]))
    for node, count in served.most_common():
        print(f"{count} by {node}")
    for name, count in failed.most_common():
        print(f"{count} failed: {name}, such as: {messages[name]}")
    return 1 if failed else 0


async def _load(
    args: argparse.Namespace, call: Callable[[str], Awaitable[str]]
) -> tuple[float, list[float], Counter[str], Counter[str], dict[str, str]]:
    """Seconds in all, seconds of each call that succeeded, calls by node, failures by their name, a message of each."""
    latencies: list[float] = []
    served: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    messages: dict[str, str] = {}
    numbers = iter(range(args.calls))

    async def caller() -> None:
        for number in numbers:
            # Each text is another one, so that nothing can answer from a cache.
            text = " ".join([str(number), *(_WORDS[(number + word) % len(_WORDS)] for word in range(args.words))])
            began = time.perf_counter()
            try:
                served[await call(text)] += 1
            except NPUError as error:
                failed[type(error).__name__] += 1
                messages[type(error).__name__] = error.message
            else:
                latencies.append(time.perf_counter() - began)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(args.concurrency):
            group.create_task(caller())
    return time.perf_counter() - began, latencies, served, failed, messages
