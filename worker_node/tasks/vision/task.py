"""The registration of the task, and the options of its engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from worker_node.core.types import Device
from worker_node.engines.options import EngineOptions, NpuOptions, declare
from worker_node.registry import Task
from worker_node.tasks.generate.task import MaxPromptLen, MinResponseLen

VISION = "vision"
_RUNNER = "worker_node.tasks.vision.engine:VisionRunner"


@declare
@dataclass(frozen=True, kw_only=True)
class VisionOptions(EngineOptions):
    """All of the model on one device, in dynamic shapes."""

    title: ClassVar[str] = "Vision-language models on CPU and GPU"
    task: ClassVar[str] = VISION
    devices: ClassVar[frozenset[Device]] = frozenset({Device.CPU, Device.GPU})
    runner: ClassVar[str] = _RUNNER

    engine: Literal["vision_dynamic"] = "vision_dynamic"


@declare
@dataclass(frozen=True, kw_only=True)
class VisionNpuOptions(NpuOptions):
    """The language model on the NPU, in static shapes; vision and the embedding of texts on the CPU."""

    title: ClassVar[str] = "Vision-language models on the NPU"
    task: ClassVar[str] = VISION
    devices: ClassVar[frozenset[Device]] = frozenset({Device.NPU})
    runner: ClassVar[str] = _RUNNER

    engine: Literal["vision_npu"] = "vision_npu"
    max_prompt_len: MaxPromptLen = 1024
    min_response_len: MinResponseLen = 128


TASK = Task(
    kind=VISION,
    verb="generate",
    capability="chat",
    listed=("completion", "vision"),
    options=(__name__,),
    serving="worker_node.tasks.vision.building:VISION_CHAT",
    files="worker_node.tasks.vision.building:FILES",
)
