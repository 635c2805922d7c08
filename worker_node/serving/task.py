"""What the serving layer must know of a task: how its engines are planned, and how its models are opened and examined.

A task derives a class from `ServedTask` and names an object of it in its registration (`registry.Task.serving`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

from worker_node.core.types import NOTHING, Device, Feature
from worker_node.engines.options import EngineOptions
from worker_node.engines.process import Canary, Prewarm
from worker_node.manager.served import ServedModel
from worker_node.models.directory import InstalledModel
from worker_node.registry import load, task_of
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.serving.run import TaskParts
from worker_node.settings import ModelSettings, NodeSettings

M = TypeVar("M", bound=ServedModel)

# Measured on Linux with OpenVINO 2026.4: a process with the runtime and no model.
_RUNTIME = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Target:
    """The model and the device that an engine is planned for.

    All models together may take `memory` bytes; None where nobody knows. `architecture` is that of a real NPU.
    """

    installed: InstalledModel
    wanted: ModelSettings
    device: Device
    emulated: bool
    memory: int | None
    architecture: str | None = None

    def footprint(self, per_byte: float = 1.2, extra: int = 0) -> int:
        """Resident bytes of an engine process: the runtime, `per_byte` for each byte of weights, and `extra`."""
        files = self.installed.files.items()
        weights = sum(size for name, size in files if Path(name).suffix == ".bin") or self.installed.size
        return _RUNTIME + int(weights * per_byte) + extra


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """One engine before it exists: its options, its limits, what it will take and what it cannot do.

    `prompt_limit` and `total_limit` are tokens, for the prompt, and for prompt and answer together; `lengths` the
    static shapes in tokens (none where shapes are dynamic). `admission` is in units of the task. `memory` is resident
    bytes. The engine `lacks` these features. `parts` are the devices of the model's parts, if not all of it runs on the
    engine's device. `notes` are warnings for the operator.
    """

    options: EngineOptions
    admission: AdmissionLimits
    prompt_limit: int
    total_limit: int
    memory: int
    lengths: tuple[int, ...] = ()
    lacks: frozenset[Feature] = NOTHING
    parts: Mapping[str, Device] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class ServedTask(ABC, Generic[M]):
    """One task, as the serving layer knows it. Its objects have no state."""

    # Whether its engines on a CPU have a lower priority than chats there.
    yields_to_chats: ClassVar[bool] = False
    # Whether what is compiled for the emulated NPU is kept: it costs a copy of all weights, and spares some seconds.
    keeps_emulated: ClassVar[bool] = True

    @abstractmethod
    def plan(self, given: Any, target: Target) -> EnginePlan:
        """Plan an engine with the options `given`. Raises ConfigurationError when they do not fit the model."""

    @abstractmethod
    def open(self, installed: InstalledModel, wanted: ModelSettings, settings: NodeSettings) -> M:
        """Return the model with what its requests need, such as a tokenizer. Raises ConfigurationError."""

    @abstractmethod
    def canary(self, model: M, wanted: ModelSettings, plan: EnginePlan) -> Canary | None:
        """What an engine must pass before it is ready, if anything. Raises ConfigurationError for too short limits."""

    def prewarm(self, _model: M, _wanted: ModelSettings, _plan: EnginePlan) -> tuple[Prewarm | None, tuple[str, ...]]:
        """What an engine computes for its prefix cache once it is loaded, and notes. Raises ConfigurationError."""
        return None, ()

    async def start(self, _parts: TaskParts) -> None:
        """Called when the node starts: start what the first request should not have to wait for."""


def served_task(kind: str) -> ServedTask[Any]:
    return cast("ServedTask[Any]", load(task_of(kind).serving))
