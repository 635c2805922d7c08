"""Models: what there are, loading, unloading, removing, pulling, and reloading their settings.

GET /models, POST and DELETE below it; GET /v1/models as OpenAI has it; POST /admin/reload.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import Field

from worker_node.core.errors import (
    BadRequest,
    ConfigurationError,
    InsufficientMemory,
    InternalError,
    JobNotFound,
    NodeError,
    NotOffered,
)
from worker_node.engines.protocol import EngineState
from worker_node.http.body import Body, read_body
from worker_node.http.context import NODE, deadline_of
from worker_node.http.health import describe_placement, excluded_placements, rounded
from worker_node.http.replies import (
    ANTHROPIC_VERSION,
    ErrorFields,
    OpenAIModel,
    OpenAIModels,
    Reply,
    describe,
    json_response,
    utc,
)
from worker_node.http.routes import EVENTS, JSON, ApiOperation
from worker_node.http.sse import EventStream
from worker_node.manager.manager import ModelManager
from worker_node.manager.replacement import WhileInUse
from worker_node.manager.served import FailedModel, ModelState, ServedModel
from worker_node.models.directory import InstalledModel
from worker_node.models.progress import Progress
from worker_node.models.sources import is_below, is_local
from worker_node.models.store import ModelStore
from worker_node.node import ReloadReport
from worker_node.registry import task_of, tasks

# As Anthropic documents them.
_PAGE, _LARGEST_PAGE = 20, 1000
_OF_A_PLACEMENT = (
    "device", "state", "emulated", "certified", "certified_reason", "certified_limit", "prompt_limit", "faults",
)  # fmt: skip
# How many ended pulls are kept, and how often those who follow one hear of its progress.
_KEPT, _PROGRESS_S = 100, 0.2


async def _list(request: web.Request) -> web.Response:
    manager = request.app[NODE].manager
    on_disk = await manager.query_store(ModelStore.installed, deadline_of(request))
    served = {model.id for model in manager.models}
    return json_response(
        {
            "models": [
                *(_describe_served(manager, model) for model in manager.models),
                *map(_describe_failed, manager.failed),
                *(_describe_installed(manager, model) for model in on_disk if model.id not in served),
            ]
        }
    )


async def _one(request: web.Request) -> web.Response:
    manager = request.app[NODE].manager
    name = request.match_info["id"]
    failed = next((failed for failed in manager.failed if failed.answers_to(name)), None)
    if failed is not None:
        return json_response(_describe_failed(failed))
    return json_response(_describe_served(manager, await manager.resolve(name, deadline_of(request))))


async def _load(request: web.Request) -> web.Response:
    manager = request.app[NODE].manager
    model = await manager.resolve(request.match_info["id"], deadline_of(request))
    await manager.force_load(model)
    return await _changed(manager, model)


async def _unload(request: web.Request) -> web.Response:
    manager = request.app[NODE].manager
    model = await manager.resolve(request.match_info["id"], deadline_of(request))
    manager.unload(model)
    return await _changed(manager, model, loading=False)


async def _changed(manager: ModelManager, model: ServedModel, *, loading: bool = True) -> web.Response:
    # The manager decides in its next turn whether a model fits at all.
    await manager.decided()
    if loading and (refusal := model.placements[0].refusal) is not None:
        raise InsufficientMemory(refusal)
    described = _describe_served(manager, model)
    return json_response({key: described[key] for key in ("id", "state", "reason", "ready_in_s", "memory")}, 202)


async def _delete(request: web.Request) -> web.Response:
    name = request.match_info["id"]
    force = request.query.get("force", "false").lower()
    if force not in {"true", "false", "1", "0"}:
        raise BadRequest("force is true or false", param="force")
    in_use = WhileInUse.FORCE if force in {"true", "1"} else WhileInUse.REFUSE
    await request.app[NODE].manager.delete(name, in_use, deadline=deadline_of(request))
    return json_response({"id": name, "deleted": True})


async def _reload(request: web.Request) -> web.Response:
    reloader = request.app[NODE].reloader
    if reloader is None:
        raise NotOffered("this node was not started from settings that could be read again")
    try:
        report = await reloader.reload()
    except ConfigurationError as error:
        raise BadRequest(f"nothing was changed: {error.message}") from error
    return json_response(report)


async def _openai_list(request: web.Request) -> web.Response:
    node = request.app[NODE]
    served = {model.id: model for model in node.manager.models}
    usable = chat_first(await node.manager.installed(deadline_of(request)))
    if ANTHROPIC_VERSION in request.headers:
        rows = [_anthropic_model(model) for model in usable if "completion" in capabilities(model)]
        return json_response(_anthropic_page(rows, request.query))
    return json_response({"object": "list", "data": [_openai_model(model, served.get(model.id)) for model in usable]})


def _anthropic_page(rows: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The models that `limit`, and `after_id` or `before_id`, ask for. Raises BadRequest."""
    limit = query.get("limit", str(_PAGE))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 5 and 1 <= int(limit) <= _LARGEST_PAGE):
        raise BadRequest(f"limit: must be a number from 1 to {_LARGEST_PAGE}", param="limit")
    ids = [row["id"] for row in rows]
    after, before = query.get("after_id"), query.get("before_id")
    for name, given in (("after_id", after), ("before_id", before)):
        if given is not None and given not in ids:
            raise BadRequest(f"{name}: must be the id of a model in this list", param=name)
    start = 0 if after is None else ids.index(after) + 1
    end = None if before is None else ids.index(before)
    rows = rows[start:end]
    backward = before is not None and after is None
    page = rows[-int(limit) :] if backward else rows[: int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"data": page, "has_more": len(page) < len(rows), "first_id": first, "last_id": last}


async def _openai_one(request: web.Request) -> web.Response:
    node = request.app[NODE]
    model = await node.manager.resolve(request.match_info["id"], deadline_of(request))
    if ANTHROPIC_VERSION in request.headers:
        return json_response(_anthropic_model(model.installed))
    return json_response(_openai_model(model.installed, model))


def _anthropic_model(model: InstalledModel) -> dict[str, Any]:
    return {
        "type": "model",
        "id": model.id,
        "display_name": model.id,
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "created_at": utc(int(model.installed_at)),
        "max_input_tokens": model.context_limit,
    }


def _openai_model(model: InstalledModel, served: ServedModel | None) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        # When it was installed here.
        "created": int(model.installed_at),
        "owned_by": "npu-node",
        "kind": model.kind,
        "capabilities": capabilities(model, served),
        "context_limit": model.context_limit,
        # One that is not is loaded by the first request for it.
        "loaded": served is not None and served.serving() is not None,
        "devices": [] if served is None else _devices(served),
    }


def capabilities(installed: InstalledModel, served: ServedModel | None = None) -> list[str]:
    """`embedding` alone for a model that cannot chat; `thinking` is known only for models that were loaded before."""
    task = task_of(installed.kind)
    thinking = served is not None and "thinking" in served.abilities()
    return [*(task.listed or (task.capability,)), *(["thinking"] if thinking else [])]


def chat_first(models: Iterable[InstalledModel]) -> list[InstalledModel]:
    """The models in their order, but those that chat before all others.

    Many tools begin with the first model of a list (Open WebUI, scripts that take `data[0]`), whatever it can do.
    """
    return sorted(models, key=lambda model: "completion" not in capabilities(model))


def _describe_served(manager: ModelManager, model: ServedModel) -> dict[str, Any]:
    preferred, serving = model.placements[0], model.serving()
    left = manager.expires_in(model)
    described = _describe(model.installed)
    return described | {
        "aliases": manager.names.aliases(model),
        "state": _state(model),
        "loaded": serving is not None,
        "reason": None if serving is not None else preferred.reason,
        "ready_in_s": rounded(model.ready_in()),
        "memory": {
            "bytes": sum(placement.held or 0 for placement in model.placements) or None,
            "estimate": preferred.memory,
        },
        "devices": _devices(model),
        "excluded": excluded_placements(model),
        "pinned": preferred.pinned,
        "in_use": model.activity.idle_since is None,
        "expires_in_s": rounded(left),
        "capabilities": [*described["capabilities"], *model.abilities()],
    }


def _describe_installed(manager: ModelManager, model: InstalledModel) -> dict[str, Any]:
    """A model that is only in the store."""
    entry = manager.store.catalog.find(model.id)
    return _describe(model) | {
        "aliases": sorted(entry.aliases) if entry is not None and entry.id == model.id else [],
        "state": "installed",
        "loaded": False,
        "memory": {"bytes": None, "estimate": None},
        "devices": [],
        "excluded": [],
        "pinned": False,
        "in_use": False,
        **dict.fromkeys(("reason", "ready_in_s", "expires_in_s")),
    }


def _describe_failed(failed: FailedModel) -> dict[str, Any]:
    task = tasks().get(failed.kind or "")
    return {
        "id": failed.name,
        "aliases": list(failed.aliases),
        "task": failed.kind if task is None else task.verb,
        "state": "failed",
        "reason": failed.reason,
        "devices": [],
        "excluded": excluded_placements(failed),
    }


def _describe(model: InstalledModel) -> dict[str, Any]:
    # A model may outlive the installation of its task.
    task = tasks().get(model.kind)
    return model.describe() | {
        "task": model.kind if task is None else task.verb,
        "capabilities": [] if task is None else [task.capability],
    }


def _state(model: ServedModel) -> str:
    """`installed` before the first load, `unloaded` after one."""
    state = model.state()
    states = {placement.state for placement in model.placements}
    if state is ModelState.FAILED and EngineState.QUARANTINED in states:
        return "quarantined"
    if state is ModelState.UNLOADED and not any(placement.loads for placement in model.placements):
        return "installed"
    return state.value


def _devices(model: ServedModel) -> list[dict[str, Any]]:
    """What lists of models say of the placements: parts of what /health says."""
    described = map(describe_placement, model.placements)
    return [{name: placement[name] for name in _OF_A_PLACEMENT} for placement in described]


class PullBody(Body):
    """Body of POST /models/pull."""

    name: Annotated[str, Field(min_length=1, max_length=2048)]


class PullJob(Progress):
    """A pull, which goes on also when nobody follows it any more."""

    def __init__(self, manager: ModelManager, name: str) -> None:
        self.id = "pull_" + secrets.token_hex(8)
        self.name = name
        self.error: NodeError | None = None
        self._stages: list[tuple[str, int | None]] = []
        self._done = 0
        self.task = asyncio.create_task(self._pull(manager), name=self.id)

    async def _pull(self, manager: ModelManager) -> None:
        try:
            await manager.pull(self.name, self)
        except NodeError as error:
            self.error = error
        except BaseException:
            self.error = InternalError("the pull failed; the node's log says where")
            raise

    def stage(self, name: str, total: int | None = None) -> None:
        self._stages.append((name, total))
        self._done = 0

    def update(self, done: int) -> None:
        self._done = done

    def describe(self) -> dict[str, Any]:
        """See `PullReply`."""
        ended = "done" if self.error is None else "failed"
        stage, total = self._stages[-1] if self._stages else (None, None)
        return {
            "id": self.id,
            "name": self.name,
            "state": ended if self.task.done() else "running",
            "stage": stage,
            "completed": self._done,
            "total": total,
            "error": None if self.error is None else describe(self.error),
        }

    async def changes(self) -> AsyncIterator[dict[str, Any]]:
        """The job now and as it changes, until it has ended. A stage that passed between two looks is not left out."""
        before: dict[str, Any] = {"state": "running"}
        seen = max(0, len(self._stages) - 1)
        while before["state"] == "running":
            now = self.describe()
            for stage, total in self._stages[seen:-1]:
                yield now | {"state": "running", "stage": stage, "completed": total or 0, "total": total, "error": None}
            seen = max(0, len(self._stages) - 1)
            if now != before:
                yield now
            before = now
            await asyncio.wait([self.task], timeout=_PROGRESS_S)


# Those under way and the last that ended, by id.
PULLS = web.AppKey("pulls", dict[str, PullJob])


async def start_pull(request: web.Request, name: str) -> PullJob:
    """Begin to pull, or return the pull of that name that is under way. Raises as `ModelStore.pull_spec`.

    Raises BadRequest for files of this machine outside of `pull_roots`, by one text, so that nobody learns which exist.
    """
    node, deadline = request.app[NODE], deadline_of(request)
    manager, roots = node.manager, node.settings.pull_roots
    local = is_local(name.strip()) and manager.store.catalog.find(name) is None
    if local and not await manager.query_store(lambda _: is_below(name.strip(), roots), deadline):
        raise BadRequest(
            f"{name[:200]!r}: requests may name local files only by an absolute path below one of the node's "
            "pull_roots; add its directory there, or run npu-node pull on the node's machine",
            param="model",
        )
    # A wrong name has a status of its own.
    await manager.query_store(lambda store: store.pull_spec(name), deadline)

    jobs = request.app[PULLS]
    ended = [job.id for job in jobs.values() if job.task.done()]
    for job_id in ended[:-_KEPT]:
        del jobs[job_id]
    for job in jobs.values():
        if job.name == name and not job.task.done():
            return job
    job = PullJob(manager, name)
    jobs[job.id] = job
    return job


async def _pull(request: web.Request) -> web.StreamResponse:
    body = await read_body(request, PullBody)
    return await _show_pull(request, await start_pull(request, body.name), 202)


async def _pull_job(request: web.Request) -> web.StreamResponse:
    job_id = request.match_info["id"]
    job = request.app[PULLS].get(job_id)
    if job is None:
        raise JobNotFound(f"there is no pull {job_id[:100]!r}; the node keeps the last {_KEPT} that ended", param="id")
    return await _show_pull(request, job, 200)


async def _show_pull(request: web.Request, job: PullJob, status: int) -> web.StreamResponse:
    if EVENTS not in request.headers.get("Accept", ""):
        return json_response(job.describe(), status)
    async with EventStream(request, {}) as stream:
        async for state in job.changes():
            await stream.send(state)
    return stream.response


class NodeModel(Reply):
    """A model of GET /models. `memory` is in bytes: what it takes, and what a load is expected to take.

    `devices` have the state and the certification (`certified`, `certified_reason`) of each placement, `excluded` those
    of the devices that the model may not run on.
    """

    id: str
    aliases: list[str]
    state: str
    reason: str | None
    loaded: bool | None = None
    task: str | None = None
    source: str | None = None
    size: int | None = None
    context: int | None = None
    memory: dict[str, int | None] | None = None
    devices: list[dict[str, Any]] | None = None
    excluded: list[dict[str, Any]] | None = None
    capabilities: list[str] | None = None
    details: dict[str, Any] | None = None


class NodeModels(Reply):
    """GET /models."""

    models: list[NodeModel]


class ModelChange(Reply):
    """POST /models/{id}/load and /unload: the state that the change begins from."""

    id: str
    state: str
    reason: str | None
    ready_in_s: float | None


class Deleted(Reply):
    """DELETE /models/{id}."""

    id: str
    deleted: bool


class PullReply(Reply):
    """A pull. `completed` and `total` are bytes of its present stage."""

    id: str
    name: str
    state: Literal["running", "done", "failed"]
    stage: str | None
    completed: int
    total: int | None
    error: ErrorFields | None


# An id may hold slashes: organisation/model.
_MODEL = "/models/{id:.+}"
OPERATIONS = (
    # Before the routes of single models.
    ApiOperation(
        "post", "/models/pull", _pull, "Install a model", {JSON: PullReply, EVENTS: None}, PullBody, status=202
    ),
    ApiOperation("get", "/models/jobs/{id}", _pull_job, "The progress of a pull", {JSON: PullReply, EVENTS: None}),
    ApiOperation("get", "/models", _list, "All models that can be used, loaded or not", {JSON: NodeModels}),
    ApiOperation("get", _MODEL, _one, "One model", {JSON: NodeModel}),
    ApiOperation("delete", _MODEL, _delete, "Remove a model and its files", {JSON: Deleted}),
    ApiOperation("post", f"{_MODEL}/load", _load, "Load a model", {JSON: ModelChange}, status=202),
    ApiOperation("post", f"{_MODEL}/unload", _unload, "Unload a model when idle", {JSON: ModelChange}, status=202),
    ApiOperation("post", "/admin/reload", _reload, "Read the settings again", {JSON: ReloadReport}),
    ApiOperation("get", "/v1/models", _openai_list, "OpenAI: list models", {JSON: OpenAIModels}),
    ApiOperation("get", f"/v1{_MODEL}", _openai_one, "OpenAI: one model", {JSON: OpenAIModel}),
)
