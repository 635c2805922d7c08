"""The forms of replies about models at run time."""

from __future__ import annotations

from typing import Any, Literal

from worker_node.api.replies import ErrorFields, Reply


class NodeModel(Reply):
    """A model of GET /models. `memory` is in bytes: what it takes, and what a load is expected to take."""

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
    capabilities: list[str] | None = None
    passport: dict[str, Any] | None = None


class NodeModels(Reply):
    """GET /models."""

    models: list[NodeModel]


class ModelChange(Reply):
    """POST /models/{id}/load and /unload: the state from which it goes on."""

    id: str
    state: str
    reason: str | None
    ready_in_s: float | None


class Deleted(Reply):
    """DELETE /models/{id}."""

    id: str
    deleted: bool


class PullJobReply(Reply):
    """A pull. `completed` and `total` are bytes of its present stage."""

    id: str
    name: str
    state: Literal["running", "done", "failed"]
    stage: str | None
    completed: int
    total: int | None
    error: ErrorFields | None


class Reload(Reply):
    """POST /admin/reload: names of models and settings. Those of `restart` differ from the running node's."""

    added: list[str]
    removed: list[str]
    changed: list[str]
    applied: list[str]
    restart: list[str]
    problems: list[str]
