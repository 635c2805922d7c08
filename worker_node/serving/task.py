"""What the serving layer must know of a task: how its models are built, planned and admitted.

A task derives a class from `ServedTask` and names an object of it in its registration (`registry.Task.serving`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from worker_node.core.types import NOTHING, Device, Feature
from worker_node.engines.options import EngineOptions, options_of
from worker_node.engines.process import Canary
from worker_node.manager.placement import Placement
from worker_node.manager.served import ServedModel
from worker_node.models.directory import InstalledModel
from worker_node.registry import load, task_of
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.serving.run import TaskParts
from worker_node.settings import ModelSettings, NodeSettings


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """`lengths` are the static shapes in tokens (none where shapes are dynamic); `ignored` names the settings that this
    engine has no use for."""

    options: EngineOptions
    prompt_limit: int
    total_limit: int
    lengths: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def runner(self) -> str:
        """The name of the engine."""
        return self.options.engine

    def chosen(self, wanted: Collection[str]) -> dict[str, Any]:
        """The engine's values of the options with these names."""
        return {name: getattr(self.options, name) for name in options_of(type(self.options)) if name in wanted}


@dataclass(frozen=True, slots=True)
class Shapes:
    """The static shapes of an engine, in tokens: its lengths, the longest prompt, and prompt and answer together."""

    lengths: tuple[int, ...]
    prompt_limit: int
    total_limit: int


@dataclass(frozen=True, slots=True)
class Draft:
    """An engine that is being planned: its task completes the `values` of its options.

    All models together may take `memory` bytes; None where nobody knows.
    """

    installed: InstalledModel
    wanted: ModelSettings
    device: Device
    emulated: bool
    memory: int | None
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of an engine process beyond the runtime: resident bytes for each byte of weights, and `extra` bytes."""

    weights: float = 1.2
    extra: int = 0


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What a model is built of.

    `place` makes its placements; it is given a function that makes a canary for an engine's longest prompt. `guard`
    wraps a canary that needs the device as a request does.
    """

    installed: InstalledModel
    wanted: ModelSettings
    settings: NodeSettings
    place: Callable[[Callable[[int], Canary]], tuple[Placement, ...]]
    guard: Callable[[Canary], Canary]


class ServedTask(ABC):
    """One task, as the serving layer knows it. Its objects have no state."""

    # Whether its engines on a CPU have a lower priority than chats there.
    yields_to_chats: ClassVar[bool] = False
    # Whether what is compiled for the emulated NPU is kept: it costs a copy of all weights, and spares some seconds.
    keeps_emulated: ClassVar[bool] = True

    @abstractmethod
    def build(self, parts: ModelParts) -> ServedModel:
        """Return the model with what its requests need; no engine is started. Raises ConfigurationError."""

    async def start(self, _parts: TaskParts) -> None:  # noqa: B027
        """Called when the node starts: start what the first request should not have to wait for."""

    @abstractmethod
    def admission(self, options: EngineOptions) -> AdmissionLimits:
        """The limits of one engine, in the units that its requests are counted in."""

    def static_shapes(self, draft: Draft) -> Shapes:
        """Complete the NPU's engine and return its shapes; by default one, the model's whole context.

        Raises ConfigurationError when what was set does not fit the model.
        """
        limit = draft.installed.context_limit
        return Shapes((limit,), limit, limit)

    def complete(self, draft: Draft) -> None:  # noqa: B027
        """Complete an engine of dynamic shapes. Raises ConfigurationError."""

    def footprint(self, _installed: InstalledModel, _plan: EnginePlan) -> Footprint:
        """The memory that an engine will take, before its first load."""
        return Footprint()

    def lacks(self, _options: EngineOptions) -> frozenset[Feature]:
        """The features that this engine does not support."""
        return NOTHING

    def parts(self, _options: EngineOptions) -> Mapping[str, Device]:
        """The device of each part of the model, if not all of it runs on the engine's device."""
        return {}

    def notes(self, _installed: InstalledModel, _plan: EnginePlan) -> list[str]:
        """Warnings about this plan for the operator."""
        return []


async def no_canary(_engine: object) -> None:
    """The canary of a model without known answers: the model is ready as soon as it is loaded."""


def served_task(kind: str) -> ServedTask:
    """The task that serves models of a kind. Raises ConfigurationError when there is none."""
    return cast("ServedTask", load(task_of(kind).serving))
