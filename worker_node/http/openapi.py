"""GET /openapi.json: every route, from the models that its bodies are validated with."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web
from pydantic.json_schema import models_json_schema

from worker_node import __version__
from worker_node.http import dashboard as dashboard_replies
from worker_node.http import explain, replies
from worker_node.http import models as model_pulls
from worker_node.http import models as model_replies
from worker_node.http import ollama as ollama_models
from worker_node.http.task import EVENTS, HTML, JSON, LINES, TEXT, ApiOperation, Model, task_apis

_ICON = "image/svg+xml"
_REFUSALS = {
    400: "the request is wrong, or asks for what cannot be had; `param` names the part",
    401: "no API key, or a wrong one",
    403: "the request names another host, or comes from another site's page",
    404: "no such model or URL",
    405: "not with this method",
    409: "the model is in use",
    408: "the request was too slow in coming",
    413: "the body is too large",
    429: "busy; Retry-After says when to try again",
    500: "a bug in the node",
    501: "not offered by this node",
    502: "a model could not be downloaded or converted",
    503: "not now: loading, draining, or the required device is missing or not proven to have worked",
    504: "the request's time was up",
}


OPERATIONS = (
    ApiOperation("get", "/health", "What the node can do now", {JSON: replies.Health}, open=True),
    ApiOperation("get", "/health/live", "Whether the process is up", {JSON: replies.Status}, open=True),
    ApiOperation("get", "/health/ready", "Whether the node can serve", {JSON: replies.Status}, open=True),
    ApiOperation("get", "/health/devices", "All that is known of each device", {JSON: replies.Devices}),
    ApiOperation("get", "/metrics", "Metrics for Prometheus", {TEXT: None}),
    ApiOperation("get", "/dashboard", "The dashboard's page", {HTML: None}, open=True),
    ApiOperation("get", "/dashboard/state", "What the dashboard shows", {JSON: dashboard_replies.DashboardState}),
    ApiOperation("get", "/dashboard/history", "Its longer history", {JSON: dashboard_replies.DashboardHistory}),
    ApiOperation("get", "/openapi.json", "This description", {JSON: None}),
    ApiOperation(
        "post", "/route/explain", "Where a request would run", {JSON: replies.ExplanationReply}, explain.ExplainBody
    ),
    ApiOperation("get", "/models", "All models that can be used, loaded or not", {JSON: model_replies.NodeModels}),
    ApiOperation("get", "/models/{id}", "One model", {JSON: model_replies.NodeModel}),
    ApiOperation("delete", "/models/{id}", "Remove a model and its files", {JSON: model_replies.Deleted}),
    ApiOperation("post", "/models/{id}/load", "Load a model", {JSON: model_replies.ModelChange}, status=202),
    ApiOperation(
        "post", "/models/{id}/unload", "Unload a model when idle", {JSON: model_replies.ModelChange}, status=202
    ),
    ApiOperation(
        "post",
        "/models/pull",
        "Install a model",
        {JSON: model_replies.PullJobReply, EVENTS: None},
        model_pulls.PullBody,
        status=202,
    ),
    ApiOperation(
        "get", "/models/jobs/{id}", "The progress of a pull", {JSON: model_replies.PullJobReply, EVENTS: None}
    ),
    ApiOperation("post", "/admin/reload", "Read the settings again", {JSON: model_replies.Reload}),
    ApiOperation("get", "/v1/models", "OpenAI: list models", {JSON: replies.OpenAIModels}),
    ApiOperation("get", "/v1/models/{id}", "OpenAI: one model", {JSON: replies.OpenAIModel}),
    ApiOperation("get", "/", "Ollama: it is running; to a browser: links", {TEXT: None, HTML: None}, open=True),
    ApiOperation("get", "/docs", "This description, for people", {HTML: None}, open=True),
    ApiOperation("get", "/favicon.ico", "The icon of the pages", {_ICON: None}, open=True),
    ApiOperation("get", "/api/version", "Ollama: version of the API", {JSON: replies.OllamaVersion}),
    ApiOperation("get", "/api/tags", "Ollama: list models", {JSON: replies.OllamaModels}),
    ApiOperation("get", "/api/ps", "Ollama: models in memory", {JSON: replies.OllamaModels}),
    ApiOperation("post", "/api/show", "Ollama: one model", {JSON: replies.OllamaShow}, ollama_models.ShowBody),
    ApiOperation(
        "post",
        "/api/pull",
        "Ollama: install a model",
        {JSON: replies.OllamaStatus, LINES: None},
        ollama_models.OllamaPullBody,
    ),
    ApiOperation("delete", "/api/delete", "Ollama: remove a model", {}, ollama_models.NamedBody),
    ApiOperation("post", "/api/create", "Ollama: not offered", {}),
    ApiOperation("post", "/api/copy", "Ollama: not offered", {}),
    ApiOperation("post", "/api/push", "Ollama: not offered", {}),
)


def routes() -> list[web.RouteDef]:
    return [web.get("/openapi.json", _openapi)]


async def _openapi(_request: web.Request) -> web.Response:
    return web.Response(body=_body(), content_type=JSON, charset="utf-8")


@functools.cache
def _body() -> bytes:
    # Making it takes the event loop 70 ms, and it never changes.
    return orjson.dumps(document())


def operations() -> tuple[ApiOperation, ...]:
    """The node's own and those of every task."""
    return (*OPERATIONS, *(operation for api in task_apis() for operation in api.operations))


def document() -> dict[str, Any]:
    """The description, as OpenAPI 3.1."""
    described = operations()
    bodies = [(operation.body, "validation") for operation in described if operation.body is not None]
    answers = [(model, "serialization") for operation in described for model in operation.replies.values() if model]
    errors = [(replies.Error, "serialization"), (replies.OllamaError, "serialization")]
    names, schemas = models_json_schema(
        [*bodies, *answers, *errors],  # type: ignore[list-item]
        ref_template="#/components/schemas/{model}",
    )
    refs: dict[Any, Any] = {model: reference for (model, _), reference in names.items()}
    paths: dict[str, Any] = {}
    for operation in described:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation, refs)
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
    ollama = operation.path.startswith("/api/")
    error = {JSON: {"schema": refs[replies.OllamaError if ollama else replies.Error]}}
    success: dict[str, Any] = {"description": "done"}
    if operation.replies:
        success["content"] = {
            kind: {"schema": refs[model] if model is not None else {}} for kind, model in operation.replies.items()
        }
    answers: dict[str, Any] = {str(operation.status): success}
    answers |= {str(status): {"description": why, "content": error} for status, why in _REFUSALS.items()}
    if operation.path in {"/health", "/health/ready"}:
        # They tell of a node that cannot serve in the same form.
        answers["503"] = {"description": "it cannot serve now", "content": success["content"]}
    described: dict[str, Any] = {"summary": operation.summary, "responses": answers}
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": refs[operation.body]}}}
    if operation.open:
        described["security"] = []
    parameters = [_header(name, schema) for name, schema in _HEADERS.items() if operation.inference]
    if "{id}" in operation.path:
        parameters.append({"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}})
    if parameters:
        described["parameters"] = parameters
    return described


_HEADERS: Mapping[str, dict[str, Any]] = {
    "X-Request-ID": {"type": "string", "pattern": "^[A-Za-z0-9._:/+=@-]{1,128}$"},
    "X-Request-Timeout-Ms": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
    "X-NPU-Require-Device": {"enum": ["NPU", "GPU", "CPU"]},
    "X-NPU-Min-New-Tokens": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
    "X-NPU-Restart-Wait-Ms": {"type": "integer", "minimum": 0, "maximum": 999_999_999},
    "X-Priority": {"enum": ["interactive", "batch"]},
}


def _header(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "schema": schema}
