"""Finds the model that a request names."""

from __future__ import annotations

from typing import TypeVar

from worker_node.core.errors import BadRequest
from worker_node.manager.manager import ModelManager
from worker_node.manager.served import ServedModel
from worker_node.registry import task_of

M = TypeVar("M", bound=ServedModel)


async def model_of(manager: ModelManager, kind: str, form: type[M], name: str | None, deadline: float) -> M:
    """The model of that name, or the default one of that kind; `form` is its class, `deadline` monotonic seconds.

    Raises ModelNotFound, BadRequest (a model of another kind; the message names one of the right kind), and what
    `ModelManager.resolve` raises.
    """
    model = await (manager.default(kind, deadline) if name is None else manager.resolve(name, deadline))
    if isinstance(model, form):
        return model
    suitable = ", ".join(other.id for other in manager.models if other.installed.kind == kind)
    instead = f"use one of these: {suitable}" if suitable else f"this node has no {kind} model: npu-node pull adds one"
    raise BadRequest(
        f"model {model.id} is for {task_of(model.installed.kind).verb}, not for {task_of(kind).verb}; {instead}",
        param="model",
    )
