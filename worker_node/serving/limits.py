"""What admission control must know of the engine that a plan describes."""

from __future__ import annotations

from dataclasses import replace

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
