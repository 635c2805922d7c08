"""The HTTP side of the task: its routes in every dialect, how they are described, what they need beside the node."""

from __future__ import annotations

from aiohttp import web

from worker_node.http.task import TaskApi
from worker_node.node import Node
from worker_node.tasks.generate.http import anthropic, native, ollama, openai, responses, tokenize
from worker_node.tasks.generate.http.remote_images import fetch_remote_images
from worker_node.tasks.generate.http.response_store import ResponseStore, StoreLimits
from worker_node.tasks.generate.metrics import declare_generation_metrics


def _prepare(app: web.Application, node: Node) -> None:
    """Give the application what the routes of stored responses need, and have remote images fetched."""
    settings = node.settings
    limits = StoreLimits(settings.stored_responses, settings.stored_response_bytes, settings.stored_response_s)
    app[responses.RESPONSES] = ResponseStore(limits)
    fetch_remote_images(node)


API = TaskApi(
    operations=tuple(
        operation
        for module in (native, openai, responses, anthropic, tokenize, ollama)
        for operation in module.OPERATIONS
    ),
    prepare=_prepare,
    metrics=declare_generation_metrics,
)
