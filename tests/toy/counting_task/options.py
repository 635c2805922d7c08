"""Options of the task's engine, which runs on the CPU and on the NPU."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from counting_task.task import KIND
from worker_node.core.types import Device
from worker_node.engines.options import NpuOptions, Option, declare


@declare
@dataclass(frozen=True, kw_only=True)
class CountingOptions(NpuOptions):
    title: ClassVar[str] = "Counting"
    task: ClassVar[str] = KIND
    devices: ClassVar[frozenset[Device]] = frozenset({Device.CPU, Device.NPU})
    runner: ClassVar[str] = "counting_task.runner:CountingRunner"

    engine: Literal["counting"] = "counting"
    parallel_texts: Annotated[int, Ge(1), Option("texts that are counted at the same time")] = 4
