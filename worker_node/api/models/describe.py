"""A model as GET /models describes it."""

from __future__ import annotations

from typing import Any

import msgspec

from worker_node.engines.protocol import EngineState
from worker_node.manager.manager import ModelManager
from worker_node.manager.placement import Placement
from worker_node.manager.served import ModelState, ServedModel
from worker_node.models.manifest import InstalledModel
from worker_node.registry import Task, tasks


def describe_served(manager: ModelManager, model: ServedModel) -> dict[str, Any]:
    """A model that has engines, loaded or not."""
    preferred, serving = model.placements[0], model.serving()
    left = manager.expires_in(model)
    state = _state(model)
    return _installed(model.installed) | {
        "aliases": manager.aliases(model),
        "state": state,
        "loaded": serving is not None,
        "reason": None if serving is not None else preferred.reason,
        "ready_in_s": None if (ready_in := model.ready_in()) is None else round(ready_in, 1),
        "memory": {
            "bytes": sum(placement.residency.held or 0 for placement in model.placements) or None,
            "estimate": preferred.residency.memory,
        },
        "devices": [_device(placement) for placement in model.placements],
        "pinned": preferred.residency.pinned,
        "in_use": model.activity.idle_since is None,
        "expires_in_s": None if left is None else round(left, 1),
        "capabilities": [*_capabilities(model.installed), *model.abilities()],
    }


def describe_installed(manager: ModelManager, model: InstalledModel) -> dict[str, Any]:
    """A model that is only in the store."""
    entry = manager.store.catalog.find(model.id)
    return _installed(model) | {
        "aliases": sorted(entry.aliases) if entry is not None and entry.id == model.id else [],
        "state": "installed",
        "loaded": False,
        "reason": None,
        "ready_in_s": None,
        "memory": {"bytes": None, "estimate": None},
        "devices": [],
        "pinned": False,
        "in_use": False,
        "expires_in_s": None,
        "capabilities": _capabilities(model),
    }


def _installed(model: InstalledModel) -> dict[str, Any]:
    task = _task(model)
    return {
        "id": model.id,
        "task": model.kind if task is None else task.verb,
        "source": model.source,
        "size": model.size,
        "context": model.context_limit,
        "passport": {
            "digest": model.digest,
            "family": model.family,
            "quantization": model.quantization,
            "licence": model.licence,
            "dimensions": model.dimensions,
            "space": model.space,
            "prompts": model.prompts or None,
            "matryoshka": list(model.matryoshka) or None,
            "vector_fidelity": None if model.vector_fidelity is None else msgspec.to_builtins(model.vector_fidelity),
        },
    }


def _state(model: ServedModel) -> str:
    """As the spec names it: `installed` before the first load, `unloaded` after one."""
    state = model.state()
    states = {placement.engine.status.state for placement in model.placements}
    if state is ModelState.FAILED and EngineState.QUARANTINED in states:
        return "quarantined"
    if state is ModelState.UNLOADED and not any(placement.residency.loads for placement in model.placements):
        return "installed"
    return state.value


def _device(placement: Placement) -> dict[str, Any]:
    return {"device": placement.device, "state": placement.state, "emulated": placement.emulated}


def _task(model: InstalledModel) -> Task | None:
    """The task that serves it; None for a model whose task is not installed any more."""
    return tasks().get(model.kind)


def _capabilities(model: InstalledModel) -> list[str]:
    task = _task(model)
    return [] if task is None else [task.capability]
