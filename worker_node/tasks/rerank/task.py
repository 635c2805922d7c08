"""The registration of the task, and the kind of its models."""

from __future__ import annotations

from worker_node.registry import Task

RERANK = "rerank"


TASK = Task(
    kind=RERANK,
    verb="rerank",
    capability="rerank",
    options=("worker_node.tasks.rerank.options",),
    serving="worker_node.tasks.rerank.building:SERVING",
    api="worker_node.tasks.rerank.http:API",
    files="worker_node.tasks.rerank.published:FILES",
)
