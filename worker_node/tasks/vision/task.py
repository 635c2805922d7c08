"""The registration of the task."""

from __future__ import annotations

from worker_node.registry import Task

VISION = "vision"

TASK = Task(
    kind=VISION,
    verb="generate",
    capability="chat",
    listed=("completion", "vision"),
    options=("worker_node.tasks.vision.options",),
    serving="worker_node.tasks.vision.building:VISION_CHAT",
    files="worker_node.tasks.vision.files:FILES",
)
