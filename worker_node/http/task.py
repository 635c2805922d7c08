"""The HTTP side of a task: its routes, their descriptions, and the form of their errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

from aiohttp import web

from worker_node.http.errors import Renderer, renderer
from worker_node.observability.metrics import Telemetry
from worker_node.registry import load, tasks

# A pydantic model, or a dataclass.
Model = type[object]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# Content types of replies.
JSON, EVENTS, LINES = "application/json", "text/event-stream", "application/x-ndjson"
TEXT, HTML, BINARY = "text/plain", "text/html", "application/octet-stream"


@dataclass(frozen=True, slots=True, eq=False)
class ApiOperation:
    """A route and its description: what it takes, what it gives. `replies` are by content type; None is text or bytes.

    An `inference` is refused while the node drains, and waited for when it does; it is traced.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    replies: Mapping[str, Model | None]
    body: Model | None = None
    inference: bool = False
    open: bool = False
    status: int = 200

    @property
    def template(self) -> str:
        """The path as /openapi.json names it: without the pattern of an id."""
        return self.path.replace("{id:.+}", "{id}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskApi:
    """The HTTP side of a task, which its registration names (`registry.Task.api`).

    `operations` are its routes. `errors` gives the form of errors at paths whose clients expect another than their
    prefix has. `metrics` declares the task's own metrics, which are then there from the start.
    """

    operations: tuple[ApiOperation, ...]
    errors: Mapping[str, Renderer] = field(default_factory=dict)
    metrics: Callable[[Telemetry], object] | None = None


def task_apis() -> Iterator[TaskApi]:
    """The HTTP side of every task that has one."""
    for task in tasks().values():
        if task.api is not None:
            yield cast("TaskApi", load(task.api))


def error_form(request: web.Request) -> Renderer:
    """The function that makes a reply of an error of this request."""
    own = (api.errors[request.path] for api in task_apis() if request.path in api.errors)
    return next(own, None) or renderer(request)
