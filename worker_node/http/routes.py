"""The routes of the node and of its tasks, and GET /openapi.json, which describes them."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from worker_node import __version__
from worker_node.http import replies
from worker_node.http.replies import Renderer, renderer
from worker_node.observability.metrics import OwnMetrics
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
    prefix has. `metrics` is the class of the task's own metrics, which are then there from the start.
    """

    operations: tuple[ApiOperation, ...]
    errors: Mapping[str, Renderer] = field(default_factory=dict)
    metrics: Callable[[CollectorRegistry], OwnMetrics] | None = None


def task_apis() -> Iterator[TaskApi]:
    for task in tasks().values():
        if task.api is not None:
            yield cast("TaskApi", load(task.api))


def error_form(request: web.Request) -> Renderer:
    """The function that makes a reply of an error of this request."""
    own = (api.errors[request.path] for api in task_apis() if request.path in api.errors)
    return next(own, None) or renderer(request)


# GET /openapi.json.

_REFUSALS = {
    400: "the request is wrong, or asks for what cannot be had; `param` names the part",
    401: "no API key, or a wrong one",
    403: "the request names another host, or comes from another site's page",
    404: "no such model or URL",
    405: "not with this method",
    409: "the model is in use",
    408: "the request was too slow in coming",
    413: "the body is too large",
    415: "the body is in an encoding that the node does not read",
    424: "a model could not be downloaded",
    429: "busy; Retry-After says when to try again",
    500: "a bug in the node",
    501: "not offered by this node",
    502: "a model could not be verified or converted",
    503: "not now: loading, draining, or the required device is missing or not proven to have worked",
    504: "the request's time was up",
}


DESCRIBED = web.AppKey("operations", tuple[ApiOperation, ...])


async def _openapi(request: web.Request) -> web.Response:
    return web.Response(body=orjson.dumps(document(request.app[DESCRIBED])), content_type=JSON, charset="utf-8")


@functools.cache
def document(described: tuple[ApiOperation, ...]) -> dict[str, Any]:
    """The description of these routes, as OpenAPI 3.1. Making it takes the event loop 70 ms, and it never changes."""
    kinds: dict[tuple[Model, JsonSchemaMode], None] = dict.fromkeys(
        [
            *((operation.body, "validation") for operation in described if operation.body is not None),
            *((kind, "serialization") for operation in described for kind in operation.replies.values() if kind),
            *((kind, "serialization") for kind in (replies.Error, replies.OllamaError, replies.AnthropicError)),
        ]
    )
    names, schemas = TypeAdapter.json_schemas(  # type: ignore[type-var]
        [(kind, mode, TypeAdapter(kind)) for kind, mode in kinds], ref_template="#/components/schemas/{model}"
    )
    refs: dict[Any, Any] = {model: reference for (model, _), reference in names.items()}
    paths: dict[str, Any] = {}
    for operation in described:
        paths.setdefault(operation.template, {})[operation.method] = _describe(operation, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "npu-node", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _describe(operation: ApiOperation, refs: Mapping[Model, Any]) -> dict[str, Any]:
    kind: Model = replies.OllamaError if operation.path.startswith("/api/") else replies.Error
    statuses = _REFUSALS
    if operation.path.startswith("/v1/messages"):
        kind, statuses = replies.AnthropicError, {529 if it == 503 else it: why for it, why in _REFUSALS.items()}
    error = {JSON: {"schema": refs[kind]}}
    success: dict[str, Any] = {"description": "done"}
    if operation.replies:
        success["content"] = {
            kind: {"schema": refs[model] if model is not None else {}} for kind, model in operation.replies.items()
        }
    answers: dict[str, Any] = {str(operation.status): success}
    answers |= {str(status): {"description": why, "content": error} for status, why in statuses.items()}
    if operation.path in {"/health", "/health/ready"}:
        # They tell of a node that cannot serve in the same form.
        answers["503"] = {"description": "it cannot serve now", "content": success["content"]}
    described: dict[str, Any] = {"summary": operation.summary, "responses": answers}
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": refs[operation.body]}}}
    if operation.open:
        described["security"] = []
    parameters: list[dict[str, Any]] = []
    if operation.inference:
        headers = [{"name": name, "in": "header", "required": False, "schema": it} for name, it in _HEADERS.items()]
        parameters += headers
    if "{id}" in operation.template:
        parameters.append({"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}})
    if parameters:
        described["parameters"] = parameters
    return described


_HEADERS: Mapping[str, dict[str, Any]] = {
    "X-Request-ID": {"type": "string", "pattern": "^[A-Za-z0-9._:/+=@-]{1,128}$"},
    "X-Request-Timeout-Ms": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
    "X-NPU-Start-Timeout-Ms": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
    "X-NPU-Require-Device": {"enum": ["NPU", "GPU", "CPU"]},
    "X-NPU-Min-New-Tokens": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
    "X-NPU-Restart-Wait-Ms": {"type": "integer", "minimum": 0, "maximum": 999_999_999},
    "X-NPU-Engine-Deaths": {"type": "integer", "minimum": 0, "maximum": 999_999_999},
    "X-Priority": {"enum": ["interactive", "batch"]},
}


OPERATIONS = (ApiOperation("get", "/openapi.json", _openapi, "This description", {JSON: None}),)
