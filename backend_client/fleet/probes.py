"""Active health checks: one supervised task per node requests /health periodically. The fleet's only I/O."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from backend_client.errors import NodeError
from backend_client.fleet.node import Node
from backend_client.fleet.pool import Pool
from backend_client.http.health import HealthReport
from backend_client.lifetime import supervise
from backend_client.options import ProbeOptions

Ask = Callable[[str], Awaitable[HealthReport]]

# A timeout that fires this late measured a blocked event loop, not the node. After a few in a row it counts anyway.
LATE_S = 0.1
_LATE_IN_A_ROW = 3


class Prober:
    """Keeps the pool informed. `ask` fetches one node's /health and raises NodeError when it gets none.

    Every node is probed each `interval`.
    """

    def __init__(self, pool: Pool, ask: Ask, options: ProbeOptions, rng: random.Random) -> None:
        self._pool = pool
        self._ask = ask
        self._options = options
        self._rng = rng
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._probe_ended = asyncio.Event()

    def watch(self, node: Node) -> None:
        self._tasks[node.url] = supervise(lambda: self._watch(node), f"probe {node.url}")

    def forget(self, url: str) -> None:
        self._tasks.pop(url).cancel()

    async def wait_for_probe(self) -> None:
        """Wait until the next probe of any node has ended, or `notify`."""
        await self._probe_ended.wait()

    def notify(self) -> None:
        self._probe_ended.set()
        self._probe_ended.clear()

    async def close(self) -> None:
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
                jitter = 1 + self._rng.uniform(-self._options.jitter, self._options.jitter)
                await asyncio.sleep(max(0.0, began + self._options.interval * jitter - self._pool.clock()))

    async def probe(self, node: Node) -> None:
        try:
            for late in range(_LATE_IN_A_ROW, -1, -1):
                began = self._pool.clock()
                try:
                    async with asyncio.timeout(self._options.timeout):
                        report = await self._ask(node.url)
                except TimeoutError:
                    if late and self._pool.clock() - began > self._options.timeout + LATE_S:
                        continue
                    why = f"did not answer its probe within {self._options.timeout:g} s"
                    self._pool.probe_failed(node, why, began=began, silent=True)
                else:
                    self._pool.probe_passed(node, report, began=began)
                return
        except NodeError as error:
            self._pool.probe_failed(node, error.what, began=began, silent=False)
        except Exception as error:
            # Counts as a failed probe, so that nobody waits for a result; then it is logged and the task restarted.
            why = f"its probe failed with {type(error).__name__}"
            self._pool.probe_failed(node, why, began=began, silent=False)
            raise
        finally:
            self.notify()
