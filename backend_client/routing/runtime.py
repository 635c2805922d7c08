"""The running parts of a fleet: connections, probes, discovery; started by the first call, ended by `close`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from backend_client.fleet.discovery import Follower
from backend_client.fleet.pool import Pool
from backend_client.fleet.probes import Prober
from backend_client.fleet.spaces import Bindings
from backend_client.http.addresses import NodeAddress
from backend_client.http.transport import Transport
from backend_client.lifetime import OpenCalls, supervise
from backend_client.options import ClientOptions
from backend_client.routing.call import Dispatcher, RetryBudget


@dataclass(frozen=True, slots=True)
class Running:
    """The parts of a started runtime."""

    transport: Transport
    prober: Prober
    dispatcher: Dispatcher


class Runtime:
    """Belongs to the event loop in which it is started, and ends with it."""

    def __init__(
        self,
        pool: Pool,
        bindings: Bindings,
        make_transport: Callable[[], Transport],
        options: ClientOptions,
        rng: random.Random,
        lists: Sequence[NodeAddress] = (),
    ) -> None:
        self.pool = pool
        self.bindings = bindings
        self.budget = RetryBudget(options.retry, pool.clock)
        self.calls = OpenCalls(self._release)
        self._make_transport = make_transport
        self._options = options
        self._rng = rng
        self._lists = lists
        self._follower: asyncio.Task[None] | None = None
        self._running: Running | None = None

    def start(self) -> Running:
        """Start to probe, if that has not been done; then calls raise as `OpenCalls.check`."""
        if self._running is not None:
            return self._running
        self.calls.check()
        transport = self._make_transport()
        options = self._options
        prober = Prober(self.pool, transport.health, options.probe, self._rng)
        dispatcher = Dispatcher(
            self.pool, self.bindings, prober, self.calls, self.budget, options.retry, self._rng, options.timeouts.share
        )
        self._running = Running(transport, prober, dispatcher)
        for node in self.pool.nodes.values():
            prober.watch(node)
        if self._lists:
            self.pool.complete = False
            follower = Follower(self._lists, self.pool.nodes, add=self.add, remove=self.remove)
            self._follower = supervise(lambda: self._follow(follower, prober), "node discovery")
        return self._running

    async def known(self) -> None:
        """Wait until every node's first probe has ended."""
        running = self.start()
        async with self.calls.open():
            while self.pool.unseen:
                await running.prober.wait_for_probe()

    def add(self, urls: Iterable[str]) -> None:
        """Take nodes in; they get requests once a probe has passed."""
        for node in self.pool.add(urls):
            if self._running is not None:
                self._running.prober.watch(node)

    def remove(self, urls: Iterable[str]) -> None:
        """Remove nodes; requests that are under way there end as they will."""
        for url in urls:
            self.pool.remove(url)
            if self._running is not None:
                self._running.prober.forget(url)

    async def _release(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        if self._running is not None:
            await self._running.prober.close()
            await self._running.transport.close()
        # What was known of the nodes' health is out of date.
        urls = list(self.pool.nodes)
        for url in urls:
            self.pool.remove(url)
        self.pool.add(urls)

    async def _follow(self, follower: Follower, prober: Prober) -> None:
        try:
            while True:
                await follower.look()
                self.pool.trouble = follower.trouble
                self.pool.complete = True
                prober.notify()
                await asyncio.sleep(self._options.discovery_interval)
        finally:
            await follower.close()
