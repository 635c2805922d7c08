"""The registration of the task."""

from __future__ import annotations

from worker_node.core.types import ModelKind
from worker_node.registry import Task

TASK = Task(
    kind=ModelKind.EMBEDDING,
    verb="embed",
    capability="embedding",
    options=("worker_node.tasks.embed.options",),
    serving="worker_node.tasks.embed.building:EMBED",
    api="worker_node.tasks.embed.http:API",
)
