"""Limits of a placement that follow from its engine: what admission control must know, how far its memory may grow."""

from __future__ import annotations

from dataclasses import replace

from worker_node.devices.memory import machine_memory
from worker_node.domain import Device
from worker_node.hosting.growth import GrowthLimits, default_growth
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.scheduling.backlog import Capacity
from worker_node.serving.engine_plan import EnginePlan
from worker_node.tasks.embed.dynamic_options import EmbeddingOptions
from worker_node.tasks.embed.static_options import StaticOptions
from worker_node.tasks.generate.continuous_options import ContinuousOptions

# Of the embedding engine on a CPU, where the settings leave it open.
_BATCH_TOKENS = 512


def admission_limits(plan: EnginePlan, max_outstanding: int | None) -> AdmissionLimits:
    """Return the limits of a placement; `max_outstanding` None is the default of its engine.

    Units are texts for embeddings and requests for generation.
    """
    match plan.options:
        case EmbeddingOptions(max_batch_tokens=tokens):
            capacity = Capacity(step_tokens=tokens or _BATCH_TOKENS)
            limits = AdmissionLimits(max_outstanding=8192, parallel=16, capacity=capacity)
        case StaticOptions(npu_buckets=buckets, npu_batch_size=rows):
            capacity = Capacity(step_tokens=buckets[-1] * rows)
            limits = AdmissionLimits(max_outstanding=8192, parallel=1, capacity=capacity, sizes=buckets)
        case ContinuousOptions(max_num_seqs=sequences, max_num_batched_tokens=tokens):
            capacity = Capacity(sequences, tokens, piece_tokens=tokens)
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
