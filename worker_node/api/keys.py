"""What the application keeps, by typed key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from worker_node.api.failures import RecentFailures
from worker_node.api.leniency import Ignored, IgnoredNames
from worker_node.devices.busy import Utilisation
from worker_node.devices.npu_source import NpuSource
from worker_node.devices.probe import Probe
from worker_node.serving.library import Library
from worker_node.serving.registry import Registry
from worker_node.settings import NodeSettings


class NodeState:
    """What changes while the node runs. `in_flight` counts inference requests; `started` is monotonic time."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.draining = False
        self.in_flight = 0
        self.npu_utilisation = Utilisation()
        self.failures = RecentFailures()
        self.ignored_names = IgnoredNames()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def working(self) -> Iterator[None]:
        """One inference request is in flight while the block runs."""
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no inference request is in flight."""
        await self._idle.wait()


@dataclass(frozen=True, slots=True)
class Node:
    """All that the handlers need."""

    settings: NodeSettings
    registry: Registry
    probe: Probe
    npu: NpuSource
    state: NodeState = field(repr=False)


@dataclass(frozen=True, slots=True)
class DryRun:
    """The body and headers of a request that is only to be explained, in place of the HTTP request's own."""

    body: bytes
    headers: Mapping[str, str]


NODE = web.AppKey("node", Node)
LIBRARY = web.AppKey("library", Library)
DRY_RUN = web.RequestKey("dry_run", DryRun)
IGNORED = web.RequestKey("ignored", Ignored)
REQUEST_ID = web.RequestKey("request_id", str)
ARRIVED = web.RequestKey("arrived", float)
