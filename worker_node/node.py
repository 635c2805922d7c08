"""The running node: its settings, its services, the devices that it found, and what changes while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from worker_node.devices.busy import Utilisation
from worker_node.devices.npu_source import NpuSource
from worker_node.devices.probe import Probe
from worker_node.failures import RecentFailures
from worker_node.manager.manager import ModelManager
from worker_node.reload import Reloader
from worker_node.serving.services import Services
from worker_node.settings import NodeSettings
from worker_node.telemetry import Telemetry


class NodeState:
    """What changes while the node runs. `in_flight` counts inference requests; `started` is monotonic time."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.draining = False
        self.in_flight = 0
        self.npu_utilisation = Utilisation()
        self.failures = RecentFailures()
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
    """A node that runs. Handlers of requests get to everything through it."""

    settings: NodeSettings
    services: Services
    probe: Probe
    npu: NpuSource
    state: NodeState = field(repr=False)
    reloader: Reloader | None = None

    @property
    def manager(self) -> ModelManager:
        """The models."""
        return self.services.manager

    @property
    def telemetry(self) -> Telemetry:
        """The metrics."""
        return self.services.telemetry
