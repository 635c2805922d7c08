"""From settings and installed models to served models."""

from __future__ import annotations

from collections.abc import Callable

from worker_node.core.errors import ModelNotFound
from worker_node.engines.process import Canary
from worker_node.manager.placement import Placement
from worker_node.manager.served import ServedModel
from worker_node.models.manifest import InstalledModel, check_weights
from worker_node.registry import tasks
from worker_node.serving.engine_plan import refuse_foreign_options
from worker_node.serving.machine import Machine
from worker_node.serving.placements import build_placements
from worker_node.serving.task import ModelParts, served_task
from worker_node.settings import ModelSettings, PlacementSettings


def build_model(
    installed: InstalledModel,
    wanted: ModelSettings,
    machine: Machine,
    guard: Callable[[Canary], Canary] = lambda canary: canary,
) -> ServedModel:
    """Return the model with its tokenizer and its engines, none started. Raises ConfigurationError.

    `guard` wraps a canary that needs the device as a request does.
    """
    refuse_foreign_options(installed, wanted)
    task = served_task(installed.kind)

    def place(canary: Callable[[int], Canary]) -> tuple[Placement, ...]:
        return build_placements(task, installed, wanted, machine, canary)

    return task.build(ModelParts(installed, wanted, machine.settings, place, guard))


def build_on_demand(machine: Machine, installed: InstalledModel) -> ServedModel:
    """As `build_model`, for a model that the settings do not name: its engines are loaded when requests need them.

    Raises ModelNotFound for a model that only other models use, such as the one that detects speech.
    """
    if installed.kind not in tasks():
        raise ModelNotFound(f"model {installed.id} is a part of other models: no task serves it", param="model")
    check_weights(installed.path)
    places = tuple(PlacementSettings(device=device, load="lazy") for device in machine.devices())
    return build_model(installed, ModelSettings(name=installed.id, placements=places), machine)
