"""The HTTP side of the task: its routes in every dialect, how they are described."""

from __future__ import annotations

from worker_node.http.task import TaskApi
from worker_node.tasks.generate.http import anthropic, native, ollama, openai, responses, tokenize
from worker_node.tasks.generate.metrics import declare_generation_metrics

API = TaskApi(
    operations=tuple(
        operation
        for module in (native, openai, responses, anthropic, tokenize, ollama)
        for operation in module.OPERATIONS
    ),
    metrics=declare_generation_metrics,
)
