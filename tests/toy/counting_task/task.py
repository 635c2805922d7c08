"""The registration of the task."""

from worker_node.registry import Task

KIND = "counting"

TASK = Task(
    kind=KIND,
    verb="count",
    capability="counting",
    options=("counting_task.options",),
    serving="counting_task.serving.building:COUNTING",
    api="counting_task.api:API",
    files="counting_task.files:FILES",
)
