"""What runs beside the calls of a fleet: connections, probes, discovery; begun by the first call, ended by `close`."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend_client.errors import NodeError
from backend_client.fleet.node import Node
from backend_client.fleet.pool import Pool
from backend_client.fleet.spaces import Bindings
from backend_client.http.addresses import NodeAddress, node_url
from backend_client.http.messages import HealthReport
from backend_client.http.transport import HttpTransport, fetch_health
from backend_client.lifetime import DaemonThread, OpenCalls, supervise
from backend_client.options import ClientOptions, ProbeOptions

# A timeout that fires this late measured a blocked event loop, not the node. After a few in a row it counts anyway.
LATE_S = 0.1
_LATE_IN_A_ROW = 3


class Prober:
    """Active health checks: one supervised task per node asks it every `interval`, and keeps the pool informed.

    `ask` fetches one node's /health and raises NodeError when it gets none.
    """

    def __init__(
        self, pool: Pool, ask: Callable[[str], Awaitable[HealthReport]], options: ProbeOptions, rng: random.Random
    ) -> None:
        self._pool = pool
        self._ask = ask
        self._options = options
        self._rng = rng
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._probe_ended = asyncio.Event()

    def watch(self, node: Node) -> None:
        self._tasks[node.url] = supervise(lambda: self._watch(node), f"probe {node.url}")

    def forget(self, url: str) -> None:
        if (task := self._tasks.pop(url, None)) is not None:
            task.cancel()

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
            # Counts as a failed probe, so that calls do not wait for it; then it is logged and the task restarted.
            why = f"its probe failed with {type(error).__name__}"
            self._pool.probe_failed(node, why, began=began, silent=False)
            raise
        finally:
            self.notify()


class Runtime:
    """Belongs to the event loop in which it is started, and ends with it. `calls` are those under way."""

    def __init__(
        self,
        pool: Pool,
        bindings: Bindings,
        make_transport: Callable[[], HttpTransport],
        options: ClientOptions,
        rng: random.Random,
        lists: Sequence[NodeAddress] = (),
    ) -> None:
        self.pool = pool
        self.bindings = bindings
        self.calls = OpenCalls(self._release)
        self._make_transport = make_transport
        self._discovery_interval = options.discovery_interval
        self._lists = lists
        self._follower: asyncio.Task[None] | None = None
        self.transport: HttpTransport | None = None
        self.prober = Prober(pool, self._probed, options.probe, rng)

    def start(self) -> HttpTransport:
        """Start to probe, if that has not been done; then calls raise as `OpenCalls.check`."""
        if self.transport is not None:
            return self.transport
        self.calls.check()
        self.transport = self._make_transport()
        for node in self.pool.nodes.values():
            self.prober.watch(node)
        if self._lists:
            self.pool.complete = False
            follower = Follower(self._lists, self.pool.nodes, add=self.add, remove=self.remove)
            self._follower = supervise(lambda: self._discover(follower), "node discovery")
        return self.transport

    async def wait_probed(self) -> None:
        """Wait until every node's first probe has ended."""
        self.start()
        async with self.calls.open():
            while self.pool.unseen:
                await self.prober.wait_for_probe()

    def add(self, urls: Iterable[str]) -> None:
        """Take nodes in; they get requests once a probe has passed."""
        for node in self.pool.add(urls):
            if self.transport is not None:
                self.prober.watch(node)

    def remove(self, urls: Iterable[str]) -> None:
        for url in urls:
            self.pool.remove(url)
            self.prober.forget(url)

    async def _probed(self, url: str) -> HealthReport:
        return await fetch_health(self.start(), url)

    async def _release(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        await self.prober.close()
        if self.transport is not None:
            await self.transport.close()
        # What was known of the nodes' health is out of date.
        urls = list(self.pool.nodes)
        for url in urls:
            self.pool.remove(url)
        self.pool.add(urls)

    async def _discover(self, follower: Follower) -> None:
        try:
            while True:
                await follower.look()
                self.pool.trouble = follower.trouble
                self.pool.complete = True
                self.prober.notify()
                await asyncio.sleep(self._discovery_interval)
        finally:
            await follower.close()


log = logging.getLogger(__name__)

# How long a list may take to answer.
LIMIT_S = 2.0


async def find_nodes(address: NodeAddress, thread: DaemonThread) -> list[str]:
    """The URLs that a list of nodes names now, by look-ups in a thread: they may hang.

    Raises OSError, or ValueError if one is not a node's URL, when they cannot be determined.
    """
    if address.scheme == "file":
        path = Path(address.path)
        text = await thread.run(lambda: path.read_text(encoding="utf-8"))
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        return [node_url(line) for line in lines if line]
    if address.scheme == "dns":
        found = await thread.run(lambda: _resolve(address))
        return [f"http://[{host}]:{address.port}" if ":" in host else f"http://{host}:{address.port}" for host in found]
    return await srv_nodes(address)


def _resolve(address: NodeAddress) -> list[str]:
    """The addresses of a name, each a node.

    A host with an IPv4 and an IPv6 address is one node: only the family with more addresses is used, the resolver's
    preferred one if they are as many.
    """
    families: dict[int, set[str]] = {}
    for family, *_, found in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        families.setdefault(family, set()).add(str(found[0]))
    most: set[str] = max(families.values(), key=len, default=set())
    return sorted(most)


async def srv_nodes(address: NodeAddress, resolver: Any = None) -> list[str]:
    """A node for each SRV record; priority and weight are left to the selection, which knows the load."""
    # Only who names an SRV record has dnspython.
    from dns import asyncresolver, exception, rdatatype  # noqa: PLC0415
    from dns.rdtypes.IN.SRV import SRV  # noqa: PLC0415

    resolver = resolver or asyncresolver.Resolver()
    try:
        answer = await resolver.resolve(address.host, rdatatype.SRV, lifetime=LIMIT_S)
    except exception.DNSException as error:
        raise OSError(f"no SRV records for {address.host} ({type(error).__name__})") from None
    scheme = "https" if address.scheme.endswith("https") else "http"
    records = [record for record in answer if isinstance(record, SRV)]
    return sorted(f"{scheme}://{record.target.to_text(omit_final_dot=True)}:{record.port}" for record in records)


@dataclass(slots=True)
class _Listed:
    """What a list named last, and which of that it left out then; `problem`: why its last look-up failed."""

    address: NodeAddress
    thread: DaemonThread
    found: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    problem: str | None = None


class Follower:
    """Keeps the members of a fleet those that the lists name.

    A list that fails or names no node keeps those that it named last. A node is removed when its list leaves it out
    twice in a row: a file that is being written, or a resolver that gives a part of the addresses, removes none.
    """

    def __init__(
        self,
        lists: Sequence[NodeAddress],
        fixed: Iterable[str],
        *,
        add: Callable[[Iterable[str]], None],
        remove: Callable[[Iterable[str]], None],
    ) -> None:
        self._lists = [_Listed(address, DaemonThread(f"look up {address}")) for address in lists]
        self._fixed = frozenset(fixed)
        self._members = set(self._fixed)
        self._add = add
        self._remove = remove

    @property
    def trouble(self) -> str | None:
        if self._members:
            return None
        return "; ".join(listed.problem or f"{listed.address} names none" for listed in self._lists)

    async def close(self) -> None:
        for listed in self._lists:
            listed.thread.end()

    async def look(self) -> None:
        """Look at all lists at once, and apply what each one names as it answers."""
        await asyncio.gather(*map(self._look_at, self._lists))

    async def _look_at(self, listed: _Listed) -> None:
        problem = None
        found: set[str] = set()
        try:
            async with asyncio.timeout(LIMIT_S):
                found = {node_url(url) for url in await find_nodes(listed.address, listed.thread)}
        except TimeoutError:
            problem = f"{listed.address} did not answer within {LIMIT_S:g} s"
        except (OSError, ValueError) as error:
            problem = f"{listed.address} failed: {error}"
        if problem is None and listed.found and not found:
            problem = f"{listed.address} names no node"
        if problem is not None and problem != listed.problem:
            log.warning("the nodes stay as they are: %s", problem)
        listed.problem = problem
        if problem is None:
            missing = listed.found - found
            listed.found = found | (missing - listed.left_out)
            listed.left_out = missing
        wanted = self._fixed.union(*(each.found for each in self._lists))
        self._add(sorted(wanted - self._members))
        self._remove(sorted(self._members - wanted))
        self._members = set(wanted)
