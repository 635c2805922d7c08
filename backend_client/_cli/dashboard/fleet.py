"""The fleet's state on the dashboard: the client's probes of each node, and the node's own state."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from backend_client._api.npu_client import NPUClient
from backend_client._api.status import NodeStatus

PERIOD_S = 1.0
# A busy node now and then answers one look too late. Without it, the sums and shares of the fleet would jump.
_LOOKS_MISSED = 3


class StateUnavailable(Exception):
    """A node's state could not be fetched; the text says why."""


Fetch = Callable[[str], Awaitable[dict[str, Any]]]


@dataclass(slots=True)
class _Seen:
    """What was last seen of one node. `since` is the Unix time at which `usable` last changed, None if it never did.

    `missed` counts the looks since it told its `state`.
    """

    usable: bool
    since: float | None = None
    state: dict[str, Any] | None = None
    trouble: str | None = None
    missed: int = 0

    def heard(self, state: dict[str, Any] | None, trouble: str | None) -> None:
        """Record the outcome of a look: a state is kept while only a look or two were missed."""
        self.trouble = trouble
        self.missed = self.missed + 1 if state is None else 0
        if state is not None or self.missed >= _LOOKS_MISSED:
            self.state = state


class FleetWatch:
    """Looks at every node of a client each second. `fetch` gets a node's state and raises StateUnavailable.

    It sends no inference requests, so it costs the nodes nothing and moves no breaker by itself.
    """

    def __init__(self, client: NPUClient, fetch: Fetch, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._fetch = fetch
        self._clock = clock
        self._seen: dict[str, _Seen] = {}

    async def watch(self) -> None:
        """Look until cancelled."""
        await self._client.health()
        while True:
            began = time.monotonic()
            await self.look()
            await asyncio.sleep(max(0.0, began + PERIOD_S - time.monotonic()))

    async def look(self) -> None:
        """Ask every node that there is now for its state, all at once."""
        # `health` counts as a call: the page shows fresh probes even where nothing else uses the client.
        nodes = await self._client.health()
        answers = await asyncio.gather(*(self._ask(node.url) for node in nodes))
        for node, (state, trouble) in zip(nodes, answers, strict=True):
            self._note(node).heard(state, trouble)
        there = {node.url for node in nodes}
        self._seen = {url: seen for url, seen in self._seen.items() if url in there}

    async def _ask(self, url: str) -> tuple[dict[str, Any] | None, str | None]:
        try:
            return await self._fetch(url), None
        except StateUnavailable as error:
            return None, str(error)

    def _note(self, node: NodeStatus) -> _Seen:
        """Keep when a node's usability changed. Also done between two looks: the probes may be ahead of them."""
        seen = self._seen.setdefault(node.url, _Seen(node.usable))
        if seen.usable != node.usable:
            seen.usable, seen.since = node.usable, self._clock()
        if node.status == "unreachable":
            seen.state = None  # what it said last is not how it is now
        return seen

    def state(self) -> dict[str, Any]:
        """The fleet for the page. `at` and `since` are Unix times by this machine's clock."""
        return {
            "kind": "fleet",
            "version": importlib.metadata.version("npu-node"),
            "at": round(self._clock(), 3),
            "nodes": [self._node(node) for node in self._client.status()],
        }

    def _node(self, node: NodeStatus) -> dict[str, Any]:
        seen = self._note(node)
        gone = node.status == "unreachable"
        return {
            "url": node.url,
            "status": node.status,
            "usable": node.usable,
            "breaker": node.breaker,
            "trouble": node.trouble,
            "version": node.version,
            "since": seen.since,
            "state": seen.state,
            "state_trouble": node.trouble if gone else seen.trouble,
            "models": [model.model_dump() for model in node.models],
            "devices": [device.model_dump() for device in node.devices],
        }
