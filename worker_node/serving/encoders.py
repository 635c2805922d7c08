"""What the tasks on encoder engines (embedding, reranking) share: their plans, admission and canaries."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing

import numpy as np
import numpy.typing as npt

from worker_node.encoders.jobs import DynamicEncoderOptions, RowJob, RowResult, StaticEncoderOptions
from worker_node.engines.options import EngineOptions
from worker_node.engines.process import CANARY_TIMEOUT_S, Canary, CanaryFailed
from worker_node.engines.protocol import JobEngine
from worker_node.models.directory import InstalledModel
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.serving.task import Draft, EnginePlan, Footprint, ServedTask, Shapes
from worker_node.settings import ModelSettings

MAX_OUTSTANDING_TEXTS = 8192
# Of the engine on a CPU, where the settings leave it open.
BATCH_TOKENS = 256
# Enough to show that an engine does not answer every text alike.
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


Floats = npt.NDArray[np.float32]


def known_answers_canary(
    job: Callable[[float], RowJob], shape: tuple[int, ...], fault: Callable[[Floats], str | None]
) -> Canary:
    """The canary that runs known rows: `job` makes the job for a deadline, `fault` says what is wrong with the output.

    A device that computes garbage raises no error, so an engine must prove itself before it is ready.
    """

    async def check(engine: JobEngine) -> None:
        async with aclosing(engine.run(job(time.monotonic() + CANARY_TIMEOUT_S), RowResult)) as results:
            found = (await anext(results)).rows(shape[0])
        if found.shape != shape:
            raise CanaryFailed(f"output of shape {found.shape}, not {shape}")
        if message := fault(found):
            raise CanaryFailed(message)

    return check


class EncoderTask(ServedTask):
    """A task whose models run on `encoders.dynamic` and `encoders.static`. Units at admission are texts."""

    keeps_emulated = False

    def admission(self, options: EngineOptions) -> AdmissionLimits:
        match options:
            case StaticEncoderOptions(npu_buckets=buckets, npu_batch_size=rows):
                return AdmissionLimits(MAX_OUTSTANDING_TEXTS, step_tokens=buckets[-1] * rows, sizes=buckets)
            case DynamicEncoderOptions(max_batch_tokens=tokens):
                return AdmissionLimits(MAX_OUTSTANDING_TEXTS, parallel=16, step_tokens=tokens or BATCH_TOKENS)
        raise TypeError(f"{type(options).__name__} are not the options of an encoder engine")

    def complete(self, draft: Draft) -> None:
        draft.values["context_limit"] = draft.installed.context_limit

    def static_shapes(self, draft: Draft) -> Shapes:
        limit, values = draft.installed.context_limit, draft.values
        buckets = tuple(sorted(set(values.get("npu_buckets") or buckets_up_to(limit))))
        if buckets[-1] > limit:
            raise draft.wanted.error("npu_buckets", f"a bucket of {buckets[-1]} tokens, the model takes {limit}")
        values["npu_buckets"] = buckets
        return Shapes((*buckets, values.get("npu_batch_size", 1)), buckets[-1], buckets[-1])

    def footprint(self, _installed: InstalledModel, plan: EnginePlan) -> Footprint:
        if isinstance(plan.options, StaticEncoderOptions):
            # Each static shape is compiled with a copy of the weights.
            return Footprint(weights=float(len(plan.options.npu_buckets)))
        return Footprint()


def buckets_up_to(limit: int) -> tuple[int, ...]:
    """16, 24, 32, 64, 128 … and the limit itself, in tokens."""
    buckets = [length for length in _SHORT if length < limit]
    length = _DOUBLED
    while length < limit:
        buckets.append(length)
        length *= 2
    return (*buckets, limit)
