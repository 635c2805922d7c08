"""The active probes: one task a node asks it for /health, again and again. The fleet's only I/O."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from backend_client.errors import NodeError
from backend_client.fleet.node import Node
from backend_client.fleet.pool import Pool
from backend_client.fleet.report import HealthReport
from backend_client.options import ProbeOptions

Ask = Callable[[str], Awaitable[HealthReport]]


class Prober:
    """Keeps the pool informed. `ask` fetches one node's /health and raises NodeError when there is none to be had."""

    def __init__(self, pool: Pool, ask: Ask, options: ProbeOptions, rng: random.Random) -> None:
        self._pool = pool
        self._ask = ask
        self._options = options
        self._rng = rng
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()

    def watch(self, node: Node) -> None:
        """Begin to probe a node."""
        self._tasks[node.url] = asyncio.create_task(self._watch(node), name=f"probe {node.url}")

    def forget(self, url: str) -> None:
        """Probe it no more."""
        self._tasks.pop(url).cancel()

    async def news(self) -> None:
        """Wait until there is something new: the next probe of any node has ended."""
        await self._news.wait()

    def tell(self) -> None:
        """Wake those who wait for news."""
        self._news.set()
        self._news.clear()

    async def close(self) -> None:
        """End all probes."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()

    async def _watch(self, node: Node) -> None:
        while True:
            began = self._pool.clock()
            await self.probe(node)
            in_doubt = 0 < node.probe_failures < self._options.failures
            if in_doubt:
                await asyncio.sleep(self._options.retry_interval)
            else:
                period = self._options.interval * (1 + self._rng.uniform(-self._options.jitter, self._options.jitter))
                await asyncio.sleep(max(0.0, began + period - self._pool.clock()))

    async def probe(self, node: Node) -> bool:
        """Probe once. Returns whether the node answered."""
        began = self._pool.clock()
        try:
            async with asyncio.timeout(self._options.timeout):
                report = await self._ask(node.url)
        except TimeoutError:
            why = f"did not answer its probe within {self._options.timeout:g} s"
            self._pool.probe_failed(node, why, began=began, silent=True)
            return False
        except NodeError as error:
            self._pool.probe_failed(node, error.what, began=began, silent=False)
            return False
        else:
            self._pool.probe_passed(node, report)
            return True
        finally:
            self.tell()
