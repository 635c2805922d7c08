"""Ollama's routes for models, and how long a model stays in memory. Its answers are in `tasks.generate.http.ollama`."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web

from worker_node.core.errors import BadRequest, ModelNotFound, NotOffered
from worker_node.core.types import Device
from worker_node.http.body import DialectBody, deadline_of, read_body
from worker_node.http.errors import message, not_found
from worker_node.http.models import capabilities, chat_first, start_pull
from worker_node.http.replies import OllamaModels, OllamaShow, OllamaStatus, OllamaVersion, json_response
from worker_node.http.request_state import NODE, STATE
from worker_node.http.sse import LineStream
from worker_node.http.task import JSON, LINES, ApiOperation
from worker_node.manager.served import ServedModel
from worker_node.models.directory import InstalledModel

# The version of Ollama's API that this dialect follows. Tools compare it to know what they may ask for.
OLLAMA_API_VERSION = "0.12.6"


async def served(request: web.Request, name: str) -> ServedModel:
    """The model of that name. Raises as `ModelManager.resolve`, ModelNotFound in Ollama's words."""
    try:
        return await request.app[NODE].manager.resolve(name, deadline_of(request))
    except ModelNotFound:
        raise not_found(name) from None


_NEVER = "2318-01-01T00:00:00Z"


class NamedBody(DialectBody):
    """A body that names a model; `name` is the older word for it."""

    model: str | None = None
    name: str | None = None

    def wanted(self) -> str:
        """The name. Raises BadRequest if there is none."""
        name = self.model or self.name
        if not name:
            raise BadRequest("model: its name is missing", param="model")
        return name


class ShowBody(NamedBody):
    """Body of POST /api/show."""

    verbose: bool | None = None


class OllamaPullBody(NamedBody):
    """Body of POST /api/pull: a name of the catalog, or any source that `npu-node pull` takes.

    Every download is verified, so `insecure` changes nothing.
    """

    insecure: bool | None = None
    stream: bool | None = None


async def _version(_request: web.Request) -> web.Response:
    return json_response({"version": OLLAMA_API_VERSION})


async def _tags(request: web.Request) -> web.Response:
    manager = request.app[NODE].manager
    served_here = {model.id: model for model in manager.models}
    return json_response(
        {
            "models": [
                _entry(model)
                | {
                    "modified_at": _modified(model),
                    "capabilities": capabilities(model, served_here.get(model.id)),
                }
                for model in chat_first(await manager.installed(deadline_of(request)))
            ]
        }
    )


async def _ps(request: web.Request) -> web.Response:
    manager = request.app[NODE].manager
    loaded: list[dict[str, Any]] = []
    for model in manager.models:
        placement = model.serving()
        if placement is None:
            continue
        left = manager.expires_in(model)
        until = _NEVER if left is None else _utc(datetime.now(UTC) + timedelta(seconds=left))
        loaded.append(
            _entry(model.installed)
            | {
                "expires_at": until,
                # What of it is on an accelerator: all or nothing.
                "size_vram": 0 if placement.device is Device.CPU else model.installed.size,
                "context_length": placement.total_limit,
                "device": placement.device,
            }
        )
    return json_response({"models": loaded})


async def _show(request: web.Request) -> web.Response:
    body = await read_body(request, ShowBody)
    model = await served(request, body.wanted())
    installed = model.installed
    return json_response(
        {
            "license": installed.licence,
            "modelfile": f"# {installed.source}\nFROM {installed.id}\n",
            "parameters": "",
            "template": model.template(),
            "details": _details(installed),
            "model_info": {
                "general.architecture": installed.family,
                "general.name": installed.id,
                f"{installed.family}.context_length": installed.context_limit,
                **(
                    {}
                    if installed.dimensions is None
                    else {f"{installed.family}.embedding_length": installed.dimensions}
                ),
            },
            "capabilities": capabilities(installed, model),
            "modified_at": _modified(installed),
        }
    )


async def _pull(request: web.Request) -> web.StreamResponse:
    body = await read_body(request, OllamaPullBody)
    job = await start_pull(request, body.wanted())
    if body.stream is False:
        async for _ in job.changes():
            pass
        if job.error is not None:
            raise job.error
        return json_response({"status": "success"})
    async with LineStream(request, {}) as stream:
        await stream.send({"status": "pulling manifest"})
        async for state in job.changes():
            if state["stage"] is not None and state["state"] == "running":
                size = {name: state[name] for name in ("total", "completed")} if state["total"] is not None else {}
                await stream.send({"status": state["stage"], **size})
        if job.error is None:
            await stream.send({"status": "success"})
        else:
            stream.failed(job.error)
            await stream.send({"error": message(job.error)})
    return stream.response


async def _delete(request: web.Request) -> web.Response:
    body = await read_body(request, NamedBody)
    name = body.wanted()
    try:
        await request.app[NODE].manager.delete(name, deadline=deadline_of(request))
    except ModelNotFound:
        raise not_found(name) from None
    return web.Response()


async def _not_offered(request: web.Request) -> web.Response:
    raise NotOffered(f"{request.path} is not offered: models come from the node's catalog (npu-node pull)")


def _entry(model: InstalledModel) -> dict[str, Any]:
    return {
        "name": f"{model.id}:latest",
        "model": f"{model.id}:latest",
        "size": model.size,
        "digest": model.digest,
        "details": _details(model),
    }


def _details(model: InstalledModel) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "openvino",
        "family": model.family,
        "families": [model.family],
        # Not told by the files: empty rather than guessed.
        "parameter_size": "",
        "quantization_level": model.quantization,
    }


def _modified(model: InstalledModel) -> str:
    return _utc(datetime.fromtimestamp(model.installed_at, UTC))


def _utc(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_S = 10 * 365 * 86400.0

KeepAlive = str | float


def seconds_of(keep_alive: KeepAlive) -> float | None:
    """How long a model stays in memory; None for good. Raises BadRequest if it is not a duration."""
    if isinstance(keep_alive, int | float):
        seconds = float(keep_alive)
    else:
        sign, text = (-1.0, keep_alive[1:]) if keep_alive.startswith("-") else (1.0, keep_alive)
        if text.isdecimal() and len(text) < 12:
            seconds = sign * float(text)
        elif len(text) < 64 and _DURATION.sub("", text) == "" and text:
            seconds = sign * sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(text))
        else:
            raise BadRequest("keep_alive is a number of seconds or a duration as 5m or 1h30m", param="keep_alive")
    return None if seconds < 0 or math.isinf(seconds) or seconds > _LONGEST_S else seconds


@asynccontextmanager
async def keeping(request: web.Request, model: ServedModel | str, keep_alive: KeepAlive | None) -> AsyncIterator[None]:
    """Keep the model in memory for that long after the block, however it ends.

    Raises BadRequest, and what `ModelManager.resolve` raises, before it.
    """
    if keep_alive is None:
        yield
        return
    seconds = seconds_of(keep_alive)
    if isinstance(model, str):
        model = await request[STATE].node.manager.resolve(model, deadline_of(request))
    try:
        yield
    finally:
        request[STATE].node.manager.keep(model, seconds)


OPERATIONS = (
    ApiOperation("get", "/api/version", _version, "Ollama: version of the API", {JSON: OllamaVersion}),
    ApiOperation("get", "/api/tags", _tags, "Ollama: list models", {JSON: OllamaModels}),
    ApiOperation("get", "/api/ps", _ps, "Ollama: models in memory", {JSON: OllamaModels}),
    ApiOperation("post", "/api/show", _show, "Ollama: one model", {JSON: OllamaShow}, ShowBody),
    ApiOperation(
        "post", "/api/pull", _pull, "Ollama: install a model", {JSON: OllamaStatus, LINES: None}, OllamaPullBody
    ),
    ApiOperation("delete", "/api/delete", _delete, "Ollama: remove a model", {}, NamedBody),
    *(
        ApiOperation("post", f"/api/{name}", _not_offered, "Ollama: not offered", {})
        for name in ("create", "copy", "push")
    ),
)
