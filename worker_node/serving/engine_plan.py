"""Plans an engine: which one runs a model on a device, with what options and limits. Reads settings, runs nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from worker_node.core.types import Device
from worker_node.devices.memory import machine_memory
from worker_node.devices.source import NpuSource
from worker_node.models.manifest import InstalledModel
from worker_node.serving.task import EnginePlan, served_task
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings
from worker_node.settings.declaration import declarations, engine_for, engines, options_of
from worker_node.settings.options import engine_options, select


def plan_engine(
    installed: InstalledModel,
    wanted: ModelSettings,
    place: PlacementSettings,
    beside: Collection[Device],
    settings: NodeSettings,
    npu: NpuSource,
) -> EnginePlan:
    """Return the plan for one placement of a model whose placements are on the devices `beside`.

    Raises ConfigurationError when its lengths do not fit the model.
    """
    declaration = engine_for(installed.kind, place.device)
    values = select(declaration, wanted.options)
    if place.plugin_config:
        values["plugin_config"] = dict(place.plugin_config)
    ignored = tuple(sorted(_ignored(installed.kind, wanted, place.device, beside)))
    task = served_task(installed.kind)
    if place.device is not Device.NPU:
        task.complete(installed, wanted, values, place.device, _memory(settings), settings.model_store)
        limit = installed.context_limit
        return EnginePlan(engine_options(declaration, values), limit, limit, ignored=ignored)
    taken = {field.name for field in fields(declaration)}
    counter = {"busy_counter": str(npu.busy_counter), "stand_in": npu.stand_in}
    values |= {name: value for name, value in counter.items() if name in taken}
    shapes = task.static_shapes(installed, wanted, values, emulated=npu.emulated)
    options = engine_options(declaration, values)
    prompt_limit = min(shapes.prompt_limit, settings.npu_token_limit)
    return EnginePlan(options, prompt_limit, shapes.total_limit, shapes.lengths, ignored)


def _memory(settings: NodeSettings) -> int | None:
    if settings.memory_budget is not None:
        return settings.memory_budget
    machine = machine_memory()
    return None if machine is None else machine.total


def _ignored(kind: str, wanted: ModelSettings, device: Device, beside: Collection[Device]) -> set[str]:
    """The options that other engines for this kind of model have, but not the one for this device."""
    every = {name for owner in engines() if owner.task == kind for name in options_of(owner)}
    used = set(options_of(engine_for(kind, device)))
    if device is not Device.NPU and Device.NPU in beside:
        used |= options_of(engine_for(kind, Device.NPU)).keys()  # they are for the other placement
    return (wanted.options.keys() & every) - used


def refuse_foreign_options(installed: InstalledModel, wanted: ModelSettings) -> None:
    """Raise ConfigurationError for options that no engine for this kind of model has."""
    known = {name for owner in declarations() if owner.task == installed.kind for name in options_of(owner)}
    foreign = sorted(wanted.options.keys() - known)
    if foreign:
        raise wanted.error(
            foreign[0], f"{', '.join(foreign)} cannot be used by an engine for {installed.kind}; remove it"
        )
