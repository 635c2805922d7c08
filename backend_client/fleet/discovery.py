"""Discovers nodes that a DNS name or a file lists, by repeated look-ups.

The system's resolver has no SRV records, so dnspython, which is small and pure Python, is an optional extra.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from backend_client.http.addresses import NodeAddress, node_url
from backend_client.lifetime import Shared

log = logging.getLogger(__name__)


class Source(Protocol):
    """A source of node URLs."""

    async def find(self) -> list[str]:
        """The URLs now. Raises OSError, or ValueError for what is no node's URL, when they cannot be determined."""
        ...

    async def close(self) -> None:
        """Release what `find` started."""
        ...


class DnsNodes:
    """A node on each address of a name.

    A host with an IPv4 and an IPv6 address is one node: only the family with more addresses is used, the resolver's
    preferred one if they are as many.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._lookup = Shared()

    def __str__(self) -> str:
        return f"dns://{self._host}:{self._port}"

    async def find(self) -> list[str]:
        """Resolve the name."""
        found = await self._lookup.run(self._host, self._look_up, f"resolve {self._host}")
        families: dict[int, set[str]] = {}
        for family, *_, address in found:
            families.setdefault(family, set()).add(str(address[0]))
        hosts = max(families.values(), key=len, default=set())
        return [
            f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}" for host in sorted(hosts)
        ]

    async def close(self) -> None:
        """Stop waiting for the resolver."""
        await self._lookup.close()

    def _look_up(self) -> list[Any]:
        return socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)


class SrvNodes:
    """A node for each SRV record of a name; priority and weight are left to the selection, which knows the load."""

    def __init__(self, name: str, scheme: str = "http", nameservers: Sequence[str] = (), port: int = 53) -> None:
        self._name = name
        self._scheme = scheme
        self._nameservers = list(nameservers)
        self._port = port

    def __str__(self) -> str:
        return f"srv://{self._name}"

    async def find(self) -> list[str]:
        """Ask for the records."""
        # Only who names an SRV record has dnspython.
        from dns import asyncresolver, exception, rdatatype  # noqa: PLC0415
        from dns.rdtypes.IN.SRV import SRV  # noqa: PLC0415

        resolver = asyncresolver.Resolver(configure=not self._nameservers)
        if self._nameservers:
            resolver.nameservers = list(self._nameservers)
            resolver.port = self._port
        try:
            answer = await resolver.resolve(self._name, rdatatype.SRV, lifetime=2.0)
        except exception.DNSException as error:
            raise OSError(f"no SRV records for {self._name} ({type(error).__name__})") from None
        records = [record for record in answer if isinstance(record, SRV)]
        return sorted(
            f"{self._scheme}://{record.target.to_text(omit_final_dot=True)}:{record.port}" for record in records
        )

    async def close(self) -> None:
        """Nothing outlives `find`."""


class FileNodes:
    """The nodes that a file lists."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reading = Shared()
        self._seen: tuple[int, int] | None = None
        self._nodes: list[str] = []

    def __str__(self) -> str:
        return self._path.as_uri()

    async def find(self) -> list[str]:
        """Read the file, if it is another one than before."""
        return await self._reading.run(self._path, self._read, f"read {self._path}")

    async def close(self) -> None:
        """Stop waiting for the file."""
        await self._reading.close()

    def _read(self) -> list[str]:
        found = self._path.stat()
        seen = (found.st_mtime_ns, found.st_size)
        if seen != self._seen:
            lines = (line.partition("#")[0].strip() for line in self._path.read_text(encoding="utf-8").splitlines())
            self._nodes = [node_url(line) for line in lines if line]
            self._seen = seen
        return self._nodes


def source_of(address: NodeAddress) -> Source:
    """The source that an address names."""
    if address.scheme == "file":
        return FileNodes(Path(address.path))
    if address.scheme == "dns":
        return DnsNodes(address.host, address.port)
    return SrvNodes(address.host, "https" if address.scheme.endswith("https") else "http")


class Follower:
    """Keeps the members of a fleet those that the sources name.

    A source that fails or names no node keeps those that it named last. A node is removed when its source leaves it out
    twice in a row: a file that is being written, or a resolver that gives a part of the addresses, removes none.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        fixed: Iterable[str],
        *,
        add: Callable[[Iterable[str]], None],
        remove: Callable[[Iterable[str]], None],
        limit: float = 2.0,
    ) -> None:
        self._sources = sources
        self._fixed = frozenset(fixed)
        self._found: dict[int, set[str]] = {}
        self._left_out: dict[int, set[str]] = {}
        self._problems: dict[int, str] = {}
        self._members = set(self._fixed)
        self._add = add
        self._remove = remove
        self._limit = limit

    @property
    def trouble(self) -> str | None:
        """Why there is no node, when there is none."""
        if self._members:
            return None
        told = [self._problems.get(index, f"{source} names none") for index, source in enumerate(self._sources)]
        return "; ".join(told)

    async def look(self) -> None:
        """Ask all sources at once, each for at most `limit` seconds, and apply what each one names as it answers."""
        await asyncio.gather(*(self._look_at(index, source) for index, source in enumerate(self._sources)))

    async def _look_at(self, index: int, source: Source) -> None:
        try:
            async with asyncio.timeout(self._limit):
                found = {node_url(url) for url in await source.find()}
            self._answered(index, source, found)
        except TimeoutError:
            self._failed(index, f"{source} did not answer within {self._limit:g} s")
        except (OSError, ValueError) as error:
            self._failed(index, f"{source} failed: {error}")
        wanted = self._fixed.union(*self._found.values())
        self._add(sorted(wanted - self._members))
        self._remove(sorted(self._members - wanted))
        self._members = set(wanted)

    def _answered(self, index: int, source: Source, found: set[str]) -> None:
        known = self._found.get(index, set())
        if known and not found:
            self._failed(index, f"{source} names no node")
            return
        missing = known - found
        self._found[index] = found | (missing - self._left_out.get(index, set()))
        self._left_out[index] = missing
        self._problems.pop(index, None)

    def _failed(self, index: int, why: str) -> None:
        if self._problems.get(index) != why:
            log.warning("the nodes stay as they are: %s", why)
        self._problems[index] = why
