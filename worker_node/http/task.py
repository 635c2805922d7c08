"""What the HTTP side must know of a task: its routes, their descriptions, and the form of their errors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

from aiohttp import web
from pydantic import BaseModel

from worker_node.http.errors import Renderer, renderer
from worker_node.http.leniency import SHARED_FIELDS
from worker_node.node import Node
from worker_node.observability.metrics import Telemetry
from worker_node.registry import load, tasks

Model = type[BaseModel]
# Content types of replies.
JSON, EVENTS, LINES = "application/json", "text/event-stream", "application/x-ndjson"
TEXT, HTML, BINARY = "text/plain", "text/html", "application/octet-stream"


@dataclass(frozen=True, slots=True)
class ApiOperation:
    """A route: what it takes, what it gives. `replies` are by content type; None is text or bytes."""

    method: str
    path: str
    summary: str
    replies: Mapping[str, Model | None]
    body: Model | None = None
    inference: bool = False
    open: bool = False
    status: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskApi:
    """The HTTP side of a task, which its registration names (`registry.Task.api`).

    Handlers of `routes` that run a model are marked by `middleware.inference`: so they are drained and explained.

    `operations` describe the routes in /openapi.json. `errors` gives the form of errors at paths whose clients expect
    another than their prefix has. `metrics` declares the task's own metrics, which are then there from the start.
    `fields` are those of other servers' requests that the task's bodies know and do not use: the metric
    of ignored fields names them. `prepare` gives the application what the routes need beside the node.
    """

    routes: Callable[[], list[web.RouteDef]]
    operations: tuple[ApiOperation, ...] = ()
    errors: Mapping[str, Renderer] = field(default_factory=dict)
    fields: frozenset[str] = frozenset()
    prepare: Callable[[web.Application, Node], None] | None = None
    metrics: Callable[[Telemetry], object] | None = None


def task_apis() -> Iterator[TaskApi]:
    """The HTTP side of every task that has one."""
    for task in tasks().values():
        if task.api is not None:
            yield cast("TaskApi", load(task.api))


@functools.cache
def known_fields() -> frozenset[str]:
    """Names of fields that a metric may have: what the dialects and the tasks name."""
    return SHARED_FIELDS.union(*(api.fields for api in task_apis()))


def error_form(path: str) -> Renderer:
    """The function that makes a reply of an error at this path."""
    own = (api.errors[path] for api in task_apis() if path in api.errors)
    return next(own, None) or renderer(path)
