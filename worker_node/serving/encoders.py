"""What all tasks share that serve models on encoder engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worker_node.core.types import Device
from worker_node.encoders.jobs import DynamicEncoderOptions, StaticEncoderOptions
from worker_node.engines.options import EngineOptions
from worker_node.models.directory import InstalledModel
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.scheduling.wait_estimate import Capacity
from worker_node.serving.task import EnginePlan, Footprint, ServedTask, Shapes
from worker_node.settings import ModelSettings

MAX_OUTSTANDING_TEXTS = 8192
# Of the engine on a CPU, where the settings leave it open.
BATCH_TOKENS = 512
# So many show that an engine does not answer every text alike.
_KNOWN_TEXTS = 2
# Questions have 8 to 24 tokens. Above 32 each further length would spare less than the memory of its copy of the model.
_SHORT = (16, 24)
_DOUBLED = 32


def known_that_fit(lengths: Sequence[int], limit: int, wanted: ModelSettings) -> list[int]:
    """The indices of the known texts, given their lengths in tokens, that the engine's canary can use.

    Raises ConfigurationError when fewer than two fit its longest bucket of `limit` tokens.
    """
    least = sorted(lengths)[min(_KNOWN_TEXTS, len(lengths)) - 1]
    if limit < least:
        raise wanted.error(
            "npu_buckets",
            f"npu_buckets: the longest has {limit} tokens, and one of at least {least} is needed: before the model is "
            "called ready, its engine is examined with known texts",
        )
    return [place for place, length in enumerate(lengths) if length <= limit]


class EncoderTask(ServedTask):
    """A task whose models run on `encoders.dynamic` and `encoders.static`. Units at admission are texts."""

    def admission(self, options: EngineOptions) -> AdmissionLimits:
        """See `ServedTask.admission`."""
        match options:
            case StaticEncoderOptions(npu_buckets=buckets, npu_batch_size=rows):
                return AdmissionLimits(
                    MAX_OUTSTANDING_TEXTS, capacity=Capacity(step_tokens=buckets[-1] * rows), sizes=buckets
                )
            case DynamicEncoderOptions(max_batch_tokens=tokens):
                return AdmissionLimits(
                    MAX_OUTSTANDING_TEXTS, parallel=16, capacity=Capacity(step_tokens=tokens or BATCH_TOKENS)
                )
        raise TypeError(f"{type(options).__name__} is no encoder engine's")

    def complete(
        self,
        installed: InstalledModel,
        wanted: ModelSettings,  # noqa: ARG002
        values: dict[str, Any],
        device: Device,  # noqa: ARG002
        memory: int | None,  # noqa: ARG002
        store: Path,  # noqa: ARG002
    ) -> None:
        """See `ServedTask.complete`."""
        values["context_limit"] = installed.context_limit

    def static_shapes(
        self,
        installed: InstalledModel,
        wanted: ModelSettings,
        values: dict[str, Any],
        *,
        emulated: bool,  # noqa: ARG002
    ) -> Shapes:
        """See `ServedTask.static_shapes`."""
        return bucket_shapes(installed.context_limit, wanted, values)

    def footprint(self, _installed: InstalledModel, plan: EnginePlan) -> Footprint:
        """See `ServedTask.footprint`."""
        if isinstance(plan.options, StaticEncoderOptions):
            # Each static shape is compiled with a copy of the weights.
            return Footprint(weights=float(len(plan.options.npu_buckets)))
        return Footprint()

    def keeps_compiled(self, device: Device, *, emulated: bool) -> bool:
        """On the emulated NPU compiling takes half a second, and keeping it a copy of all weights for each bucket."""
        return device is not Device.CPU and not emulated


def buckets_up_to(limit: int) -> tuple[int, ...]:
    """16, 24, 32, 64, 128 … and the limit itself, in tokens."""
    buckets = [length for length in _SHORT if length < limit]
    length = _DOUBLED
    while length < limit:
        buckets.append(length)
        length *= 2
    return (*buckets, limit)


def bucket_shapes(limit: int, wanted: ModelSettings, values: dict[str, Any]) -> Shapes:
    """The shapes for a model of so many tokens; `npu_buckets` of `values` is completed. Raises ConfigurationError."""
    buckets = tuple(sorted(set(values.get("npu_buckets") or buckets_up_to(limit))))
    if buckets[-1] > limit:
        raise wanted.error("npu_buckets", f"a bucket of {buckets[-1]} tokens, the model takes {limit}")
    values["npu_buckets"] = buckets
    return Shapes((*buckets, values.get("npu_batch_size", 1)), buckets[-1], buckets[-1])
