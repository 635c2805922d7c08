"""The kind of model that this task serves."""

from __future__ import annotations

from worker_node.registry import Task

VISION = "vision"


# The registration of the task.

TASK = Task(
    kind=VISION,
    verb="generate",
    capability="chat",
    listed=("completion", "vision"),
    options=("worker_node.tasks.vision.options",),
    serving="worker_node.tasks.vision.building:VISION_CHAT",
    files="worker_node.tasks.vision.files:FILES",
)
