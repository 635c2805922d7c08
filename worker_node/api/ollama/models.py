"""What models there are, and getting and removing them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
from aiohttp import web

from worker_node.api.arrival import deadline_of
from worker_node.api.body import DialectBody, read_body
from worker_node.api.capabilities import capabilities, chat_first
from worker_node.api.keys import NODE
from worker_node.api.ollama import OLLAMA_API_VERSION
from worker_node.api.ollama.errors import message, not_found
from worker_node.api.ollama.residents import served
from worker_node.api.sse import LineStream
from worker_node.core.errors import BadRequest, ModelNotFound, NodeError, NotOffered
from worker_node.core.types import Device
from worker_node.models.manifest import InstalledModel

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


def routes() -> list[web.RouteDef]:
    """The routes of this file."""
    return [
        web.get("/api/version", _version),
        web.get("/api/tags", _tags),
        web.get("/api/ps", _ps),
        web.post("/api/show", _show),
        web.post("/api/pull", _pull),
        web.delete("/api/delete", _delete),
        *(web.post(f"/api/{name}", _not_offered) for name in ("create", "copy", "push")),
    ]


async def _version(_request: web.Request) -> web.Response:
    return _json({"version": OLLAMA_API_VERSION})


async def _tags(request: web.Request) -> web.Response:
    manager = request.app[NODE].manager
    served_here = {model.id: model for model in manager.models}
    return _json(
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
    return _json({"models": loaded})


async def _show(request: web.Request) -> web.Response:
    body = await read_body(request, ShowBody)
    model = await served(request, body.wanted())
    installed = model.installed
    return _json(
        {
            "license": installed.licence,
            "modelfile": f"# {installed.source}\nFROM {installed.id}\n",
            "parameters": "",
            "template": "" if model is None else model.template(),
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
    name, manager = body.wanted(), request.app[NODE].manager
    await manager.wish(name, deadline_of(request))  # what is wrong with the name itself has a status of its own
    progress = _Progress()
    pulling = asyncio.create_task(manager.pull(name, progress))
    pulling.add_done_callback(lambda _: progress.end())
    pulling.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    if body.stream is False:
        await asyncio.shield(pulling)
        return _json({"status": "success"})
    async with LineStream(request, {}) as stream:
        try:
            await stream.send({"status": "pulling manifest"})
            while (line := await progress.next()) is not None:
                await stream.send(line)
            await pulling
            await stream.send({"status": "success"})
        except NodeError as error:
            stream.failed(error)
            await stream.send({"error": message(error)})
    return stream.response


class _Progress:
    """Carries the progress of a pull to the reply; of several updates the reader gets the latest."""

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._stages: list[dict[str, Any]] = []
        self._total: int | None = None
        self._ended = False

    def stage(self, name: str, total: int | None = None) -> None:
        """See `models.progress.Progress`."""
        self._total = total
        self._stages.append({"status": name, **({} if total is None else {"total": total, "completed": 0})})
        self._news.set()

    def update(self, done: int) -> None:
        """See `models.progress.Progress`."""
        if self._total is None:
            return
        if self._stages and "total" in self._stages[-1]:
            self._stages[-1]["completed"] = done
        else:
            self._stages.append({"status": "downloading", "total": self._total, "completed": done})
        self._news.set()

    def end(self) -> None:
        """There is nothing more to tell."""
        self._ended = True
        self._news.set()

    async def next(self) -> dict[str, Any] | None:
        """The next line to tell; None at the end."""
        while not self._stages and not self._ended:
            self._news.clear()
            await self._news.wait()
        return self._stages.pop(0) if self._stages else None


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


def _json(data: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(data), content_type="application/json", charset="utf-8")
