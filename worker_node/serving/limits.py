"""Limits of a placement that follow from its engine: what admission control must know, how far its memory may grow."""

from __future__ import annotations

from dataclasses import replace

from worker_node.devices.memory import machine_memory
from worker_node.domain import Device
from worker_node.hosting.growth import GrowthLimits, default_growth
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.scheduling.backlog import Capacity
from worker_node.serving.engine_plan import EnginePlan

# Of the runners, where the settings leave them open (`engines/`).
_BATCH_TOKENS = 512
_STEP_TOKENS = 256
_SEQUENCES = 256


def admission_limits(plan: EnginePlan, max_outstanding: int | None) -> AdmissionLimits:
    """Return the limits of a placement; `max_outstanding` None is the default of its engine.

    Units are texts for embeddings and requests for generation.
    """
    options = plan.options

    def size(name: str, default: int) -> int:
        value = options.get(name)
        return value if isinstance(value, int) and value > 0 else default

    match plan.runner:
        case "embedding":
            capacity = Capacity(step_tokens=size("max_batch_tokens", _BATCH_TOKENS))
            limits = AdmissionLimits(max_outstanding=8192, parallel=16, capacity=capacity)
        case "embedding_static":
            *buckets, rows = plan.lengths
            capacity = Capacity(step_tokens=buckets[-1] * rows)
            limits = AdmissionLimits(max_outstanding=8192, parallel=1, capacity=capacity, sizes=tuple(buckets))
        case "generation_continuous":
            sequences = size("max_num_seqs", _SEQUENCES)
            capacity = Capacity(sequences, size("max_num_batched_tokens", _STEP_TOKENS))
            limits = AdmissionLimits(max_outstanding=256, parallel=min(64, sequences), capacity=capacity)
        case _:
            limits = AdmissionLimits(max_outstanding=64, parallel=1, capacity=Capacity(sequences=1))
    return limits if max_outstanding is None else replace(limits, max_outstanding=max_outstanding)


def growth_limits(growth: int | None, device: Device, *, emulated: bool) -> GrowthLimits:
    """Return how far an engine process may grow, in bytes; `growth` None is a share of the machine's memory.

    Two processes at once only where their memory is the machine's: whether a real NPU or GPU holds two is not known
    before it fails.
    """
    memory = machine_memory()
    if memory is None:
        return GrowthLimits(growth, beside=False)
    beside = emulated or device is Device.CPU
    return GrowthLimits(growth or default_growth(memory.total), beside=beside, reserve=memory.total // 16)
