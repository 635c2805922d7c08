"""Addresses of host names for connections, from a resolver that may hang or fail."""

from __future__ import annotations

import asyncio
import socket

from aiohttp.abc import AbstractResolver, ResolveResult

from backend_client._resilience.threads import Shared

# With the addresses of last time at hand there is little to wait for; without, a probe waits 0.8 s.
_KNOWN_WAIT_S = 0.2
_UNKNOWN_WAIT_S = 2.0


class RememberingResolver(AbstractResolver):
    """The system's resolver; while it hangs or fails, the addresses that it returned last."""

    def __init__(self) -> None:
        self._shared = Shared()
        self._last: dict[tuple[str, int, int], list[ResolveResult]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises OSError when nothing is known."""
        key = (host, port, int(family))
        last = self._last.get(key)
        try:
            async with asyncio.timeout(_UNKNOWN_WAIT_S if last is None else _KNOWN_WAIT_S):
                found = await self._shared.run(key, lambda: _look_up(host, port, family), f"resolve {host}")
        except OSError as error:
            if last is not None:
                return last
            raise OSError(None, error.strerror or f"the resolver does not answer for {host}") from None
        self._last[key] = found
        return found

    async def close(self) -> None:
        """Stop waiting for lookups."""
        await self._shared.close()


def _look_up(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    found = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [
        ResolveResult(
            hostname=host,
            host=str(address[0]),
            port=int(address[1]),
            family=kind,
            proto=protocol,
            flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
        )
        for kind, _, protocol, _, address in found
    ]
