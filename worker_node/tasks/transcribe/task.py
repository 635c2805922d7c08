"""The registration of the task."""

from __future__ import annotations

from worker_node.registry import Task

KIND = "transcription"

TASK = Task(
    kind=KIND,
    verb="transcribe",
    capability="transcription",
    options=("worker_node.tasks.transcribe.options",),
    serving="worker_node.tasks.transcribe.building:TRANSCRIBE",
    api="worker_node.tasks.transcribe.http:API",
    files="worker_node.tasks.transcribe.files:FILES",
)
