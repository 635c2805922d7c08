"""The running parts of a fleet: connections, probes, discovery; started by the first call, ended by `close`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from backend_client.errors import ClientClosed, ConfigurationError
from backend_client.fleet.discovery import Follower
from backend_client.fleet.pool import Pool
from backend_client.fleet.probes import Prober
from backend_client.fleet.spaces import Bindings
from backend_client.http.addresses import NodeAddress
from backend_client.http.transport import Transport
from backend_client.lifetime import before_loop_ends, supervise
from backend_client.options import ClientOptions
from backend_client.routing.call import Dispatcher, RetryBudget


@dataclass(frozen=True, slots=True)
class Running:
    """The parts of a started runtime."""

    loop: asyncio.AbstractEventLoop
    transport: Transport
    prober: Prober
    dispatcher: Dispatcher


class Runtime:
    """Belongs to the event loop in which it is started; when that has ended, the next call starts it in another one."""

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
        self._make_transport = make_transport
        self._options = options
        self._rng = rng
        self._lists = lists
        self._follower: asyncio.Task[None] | None = None
        self._running: Running | None = None
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._end: asyncio.Task[None] | None = None

    def start(self) -> Running:
        """Start to probe, if that has not been done. Raises ClientClosed, or ConfigurationError while another loop has
        it.
        """
        loop = asyncio.get_running_loop()
        running = self._running
        if running is not None and running.loop is loop and not self._closed:
            return running
        if self._closed:
            raise ClientClosed("this client is closed; make a new one")
        if running is not None and not running.loop.is_closed():
            raise ConfigurationError(
                "this client belongs to another event loop, which has not ended, or to a process that forked this "
                "one; make a client for each process and event loop, or use backend_client.sync"
            )
        if running is not None:
            self._forget()
        transport = self._make_transport()
        prober = Prober(self.pool, transport.health, self._options.probe, self._rng)
        options = self._options
        dispatcher = Dispatcher(
            self.pool, self.bindings, prober, self.budget, options.retry, self._rng, options.timeouts.share
        )
        running = self._running = Running(loop, transport, prober, dispatcher)
        self._end = before_loop_ends(lambda: self._loop_ends(running), "connections of the client")
        for node in self.pool.nodes.values():
            prober.watch(node)
        if self._lists:
            self.pool.complete = False
            follower = Follower(self._lists, self.pool.nodes, add=self.add, remove=self.remove)
            self._follower = supervise(lambda: self._follow(follower, prober), "node discovery")
        return running

    def _forget(self) -> None:
        """Nothing runs any more, and what was known of the nodes' health is out of date."""
        self._running = self._follower = self._end = None
        urls = list(self.pool.nodes)
        for url in urls:
            self.pool.remove(url)
        self.pool.add(urls)

    async def known(self) -> None:
        """Wait until every node's first probe has ended."""
        running = self.start()
        with running.dispatcher.calls.open():
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

    async def close(self) -> None:
        """End calls, probes and connections. Calls under way, and those that wait, raise ClientClosed.

        A second call waits for the first. One that is cancelled leaves nothing open: closing goes on.
        """
        self._closed = True
        if self._closing is None and self._running is not None and not self._running.loop.is_closed():
            self._closing = asyncio.create_task(self._close(self._running), name="closing the client")
        if self._closing is not None and not self._closing.done():
            await asyncio.shield(self._closing)

    async def _close(self, running: Running) -> None:
        await running.dispatcher.calls.close()
        if self._end is not None:
            self._end.cancel()
            await asyncio.gather(self._end, return_exceptions=True)
        follower = self._follower
        self._forget()
        await self._release(running, follower)

    async def _loop_ends(self, running: Running) -> None:
        """The loop's tasks were cancelled, so the calls under way are ending."""
        if self._running is running and not self._closed:
            follower = self._follower
            self._forget()
            await self._release(running, follower)

    async def _release(self, running: Running, follower: asyncio.Task[None] | None) -> None:
        if follower is not None:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)
        await running.prober.close()
        await running.transport.close()

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
