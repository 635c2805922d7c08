"""The registration of the task."""

from __future__ import annotations

from worker_node.core.types import ModelKind
from worker_node.registry import Task

TASK = Task(
    kind=ModelKind.GENERATION,
    verb="generate",
    capability="chat",
    listed=("completion", "tools"),
    options=("worker_node.tasks.generate.options",),
    serving="worker_node.tasks.generate.building:GENERATE",
    api="worker_node.tasks.generate.http:API",
)
