"""Where nodes come from: URLs, names in DNS, or a file; the latter are looked at again and again.

| given as | means |
|---|---|
| `http://10.0.0.22:8081` | this node |
| `dns://npu.internal:8081` | every address of the name (A, or AAAA where there are more), by the system's resolver |
| `srv://_npu._tcp.internal`, `srv+https://…` | host and port of every SRV record; needs `npu-node[dns]` |
| `file:///etc/npu/nodes` | a URL a line, `#` begins a comment; read again when it changes |

The system's resolver knows nothing of SRV, so dnspython, which is small and pure Python, is an optional extra. `dns`
has no https: a certificate is for a name, not for an address.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from yarl import URL

from backend_client.errors import ConfigurationError
from backend_client.resilience.threads import Shared

log = logging.getLogger(__name__)


class Source(Protocol):
    """Something that knows nodes."""

    async def find(self) -> list[str]:
        """Their URLs now. Raises OSError, or ValueError for what is no node's URL, when it cannot tell."""
        ...

    async def close(self) -> None:
        """Stop waiting for what `find` began."""
        ...


def node_url(value: str) -> str:
    """A node's URL in its one form, without a slash at the end. Raises ValueError, which does not repeat it."""
    try:
        url = URL(value.strip())
    except ValueError:
        raise ValueError("a node is given as http://host:port") from None
    if url.scheme not in {"http", "https"} or not url.host or url.query_string or url.fragment:
        raise ValueError("a node is given as http://host:port")
    if url.user or url.password:
        raise ValueError("a node's URL holds no user or password: URLs are logged; use api_key")
    return str(url).rstrip("/")


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


def parse_nodes(values: Iterable[str]) -> tuple[list[str], list[Source]]:
    """Node URLs, and the sources of others. Raises ValueError for what is neither."""
    urls: list[str] = []
    sources: list[Source] = []
    for value in values:
        scheme = value.strip().partition("://")[0]
        if scheme in {"dns", "srv", "srv+https", "file"}:
            sources.append(_source(scheme, URL(value.strip())))
        else:
            urls.append(node_url(value))
    return list(dict.fromkeys(urls)), sources


def _source(scheme: str, url: URL) -> Source:
    if scheme == "file":
        return FileNodes(Path(url.path))
    if not url.host:
        raise ValueError(f"{scheme}:// names no host")
    if scheme == "dns":
        if url.explicit_port is None:
            raise ValueError("a name in DNS is given with its port: dns://name:8081")
        return DnsNodes(url.host, url.explicit_port)
    if importlib.util.find_spec("dns") is None:
        raise ValueError("SRV records need dnspython: pip install 'npu-node[dns]'")
    return SrvNodes(url.host, "https" if scheme.endswith("https") else "http")


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


def parsed_or_configuration_error(nodes: Sequence[str]) -> tuple[list[str], list[Source]]:
    """`parse_nodes` for callers outside of the settings. Raises ConfigurationError."""
    if isinstance(nodes, str):
        raise ConfigurationError("nodes is a list of URLs")
    try:
        return parse_nodes(nodes)
    except ValueError as error:
        problem = str(error)
    raise ConfigurationError(problem)
