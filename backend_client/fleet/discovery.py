"""Discovers nodes that a DNS name or a file lists, by repeated look-ups.

The system's resolver has no SRV records, so dnspython, which is small and pure Python, is an optional extra.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend_client.http.addresses import NodeAddress, node_url
from backend_client.lifetime import Shared

log = logging.getLogger(__name__)

# How long a list may take to answer.
LIMIT_S = 2.0


async def find_nodes(address: NodeAddress, shared: Shared) -> list[str]:
    """The URLs that a list of nodes names now.

    Raises OSError, or ValueError if one is not a node's URL, when they cannot be determined.
    """
    if address.scheme == "file":
        path = Path(address.path)
        text = await shared.run(address, lambda: path.read_text(encoding="utf-8"), f"read {address}")
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        return [node_url(line) for line in lines if line]
    if address.scheme == "dns":
        found = await shared.run(address, lambda: _resolve(address), f"resolve {address}")
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
        self._lists = [_Listed(address) for address in lists]
        self._fixed = frozenset(fixed)
        self._members = set(self._fixed)
        self._shared = Shared()
        self._add = add
        self._remove = remove

    @property
    def trouble(self) -> str | None:
        """Why there is no node, when there is none."""
        if self._members:
            return None
        return "; ".join(listed.problem or f"{listed.address} names none" for listed in self._lists)

    async def close(self) -> None:
        await self._shared.close()

    async def look(self) -> None:
        """Look at all lists at once, and apply what each one names as it answers."""
        await asyncio.gather(*map(self._look_at, self._lists))

    async def _look_at(self, listed: _Listed) -> None:
        problem = None
        found: set[str] = set()
        try:
            async with asyncio.timeout(LIMIT_S):
                found = {node_url(url) for url in await find_nodes(listed.address, self._shared)}
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
