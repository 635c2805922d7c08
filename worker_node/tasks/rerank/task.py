"""The registration of the task."""

from __future__ import annotations

from worker_node.registry import Task
from worker_node.tasks.rerank.kind import RERANK

TASK = Task(
    kind=RERANK,
    verb="rerank",
    capability="rerank",
    options=("worker_node.tasks.rerank.options",),
    serving="worker_node.tasks.rerank.serving.building:SERVING",
    api="worker_node.tasks.rerank.api.registration:API",
    files="worker_node.tasks.rerank.files.published:FILES",
)
