"""The parts of the node that requests of every task need."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker_node.manager.manager import ModelManager
from worker_node.observability.metrics import Telemetry
from worker_node.observability.tracing import OFF, Tracing
from worker_node.serving.parts import TaskParts


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of the node that requests of every task share.

    `require_proof`: requests that require the NPU are refused where its counter cannot be read.
    """

    manager: ModelManager
    telemetry: Telemetry
    tracing: Tracing = OFF
    parts: TaskParts = field(default_factory=TaskParts)
    require_proof: bool = False
