"""The running node: its settings, its services, the devices that it found, and what changes while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from worker_node.devices.npu import NpuSource, Utilisation
from worker_node.devices.probe import Probe
from worker_node.manager.manager import ModelManager
from worker_node.manager.served import Activity
from worker_node.observability.metrics import Telemetry
from worker_node.reload import Reloader
from worker_node.serving.run import Services
from worker_node.settings import NodeSettings


class NodeState(Activity):
    """What changes while the node runs, and its inference requests. `started` is monotonic time."""

    def __init__(self, started: float) -> None:
        super().__init__()
        self.started = started
        self.draining = False
        self.npu_utilisation = Utilisation()

    @property
    def in_flight(self) -> int:
        """How many inference requests are under way."""
        return self.running


@dataclass(slots=True)
class Node:
    """A running node, through which request handlers reach everything.

    `settings` are the current ones: a reload replaces them, and calls the `followers` with the new ones.
    """

    settings: NodeSettings
    services: Services
    probe: Probe
    npu: NpuSource
    state: NodeState = field(repr=False)
    reloader: Reloader | None = None
    followers: list[Callable[[NodeSettings], None]] = field(default_factory=list, repr=False)

    def adopt(self, settings: NodeSettings) -> None:
        """Replace the settings."""
        self.settings = settings
        for follow in self.followers:
            follow(settings)

    @property
    def manager(self) -> ModelManager:
        """The models."""
        return self.services.manager

    @property
    def telemetry(self) -> Telemetry:
        """The metrics."""
        return self.services.telemetry
