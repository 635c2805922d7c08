"""Tells gateways where this node is, every few seconds and when it drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

import aiohttp
from yarl import URL

from worker_node.node import Node

log = logging.getLogger(__name__)

_EVERY_S = 5.0
# How soon a drain is told.
_LOOK_S = 0.5
# How long the news that it leaves may hold up its end.
_LEAVE_S = 1.0
_LIMIT = aiohttp.ClientTimeout(total=5.0)
_ANY = frozenset({"0.0.0.0", "::"})  # noqa: S104  (compared, not bound)


@asynccontextmanager
async def announced(node: Node, url: str) -> AsyncIterator[None]:
    """Announce the node at `url` to the gateways of its settings while the block runs."""
    settings = node.settings
    if not settings.announce:
        yield
        return
    async with aiohttp.ClientSession(timeout=_LIMIT, cookie_jar=aiohttp.DummyCookieJar()) as session:
        tasks = [
            asyncio.create_task(_keep_telling(session, node, gateway, url), name="announce to a gateway")
            for gateway in settings.announce
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # A node without work drains faster than the tasks look.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await asyncio.gather(
                        *(_tell(session, node, gateway, url, draining=True) for gateway in settings.announce)
                    )


async def _keep_telling(session: aiohttp.ClientSession, node: Node, gateway: str, url: str) -> None:
    loop = asyncio.get_running_loop()
    before: str | None = "never"
    while True:
        due, draining = loop.time() + _EVERY_S, node.state.draining
        problem = await _tell(session, node, gateway, url, draining=draining)
        if problem is not None and problem != before:
            log.warning("%s does not take this node: %s", gateway, problem)
        elif problem != before:
            log.info("announced to %s", gateway)

        before = problem
        while loop.time() < due and node.state.draining == draining:  # noqa: ASYNC110  (a drain sets no event)
            await asyncio.sleep(_LOOK_S)


async def _tell(session: aiohttp.ClientSession, node: Node, gateway: str, url: str, *, draining: bool) -> str | None:
    """Announce once; why it failed, or None."""
    settings = node.settings
    try:
        content = {
            "url": settings.announce_url or await _reached_at(url, gateway),
            "version": version("npu-node"),
            "labels": settings.announce_labels,
            "draining": draining,
            "api_key": settings.api_keys[0].get_secret_value() if settings.api_keys else "",
        }

        key = settings.announce_key.get_secret_value() if settings.announce_key else ""
        # The key is for this gateway, whatever it answers.
        async with session.post(
            f"{gateway.rstrip('/')}/announce",
            json=content,
            headers={"Authorization": f"Bearer {key}"},
            allow_redirects=False,
        ) as reply:
            if reply.status == 200:
                return None
            with contextlib.suppress(ValueError, KeyError, TypeError, aiohttp.ClientError):
                said = (await reply.json(content_type=None))["error"]["message"]
                return f"HTTP {reply.status}: {str(said)[:300]}"
            return f"HTTP {reply.status}"
    except (aiohttp.ClientError, OSError) as error:
        return f"{type(error).__name__}: {error}"[:300]


async def _reached_at(url: str, gateway: str) -> str:
    """The node's URL, for a node on all addresses with the one from which this machine reaches the gateway."""
    own, there = URL(url), URL(gateway)
    if own.host not in _ANY:
        return url

    # Nothing is sent: the system only chooses the address.
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        asyncio.DatagramProtocol, remote_addr=(there.host or "", there.port or 443)
    )
    try:
        return str(own.with_host(transport.get_extra_info("sockname")[0]))
    finally:
        transport.close()
