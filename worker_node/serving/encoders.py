"""What the tasks on encoder engines (embedding, reranking) share: models, requests, plans and canaries."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from worker_node.core.types import RequestContext
from worker_node.encoders.jobs import DynamicEncoderOptions, RowResult, StaticEncoderOptions, row_job
from worker_node.engines.options import EngineOptions
from worker_node.engines.process import CANARY_TIMEOUT_S, Canary, CanaryFailed
from worker_node.engines.protocol import JobEngine
from worker_node.manager.served import ServedModel
from worker_node.scheduling.admission import AdmissionLimits, TokenCost
from worker_node.serving.routing import Demand
from worker_node.serving.row_tokenizer import RowTokenizer, text_ids
from worker_node.serving.run import SingleRun
from worker_node.serving.task import EnginePlan, M, ServedTask, Target
from worker_node.settings import ModelSettings

MAX_OUTSTANDING_TEXTS = 8192
# Of the engine on a CPU, where the settings leave it open.
BATCH_TOKENS = 256
# Enough to show that an engine does not answer every text alike.
_KNOWN_TEXTS = 2
# Questions have 8 to 24 tokens. Above 32 each further length would spare less than the memory of its copy of the model.
_SHORT = (16, 24)
_DOUBLED = 32


@dataclass(eq=False, slots=True)
class EncoderModel(ServedModel):
    """A served model that takes texts as rows of token ids."""

    tokenizer: RowTokenizer

    async def token_ids(self, text: str, *, special: bool, deadline: float) -> list[int]:
        return await text_ids(self.tokenizer.whole, text, self.tokenizer.limit, special=special, deadline=deadline)


def rows_run(
    rows: Sequence[Sequence[int]],
    demand: Demand,
    context: RequestContext,
    began: float,
    prepared: float,
    *,
    second: Sequence[int] = (),
) -> SingleRun[RowResult]:
    """The run of one job with these rows; `second` as in `RowJob`, the times as in `SingleRun`."""
    job = row_job(rows, context.deadline, interactive=context.interactive, second=second)

    def work(limits: AdmissionLimits) -> TokenCost:
        return TokenCost(sum(map(limits.computed_tokens, job.lengths)))

    return SingleRun(demand, context, job, RowResult, len(rows), work, began, prepared)


Floats = npt.NDArray[np.float32]


def known_answers_canary(
    rows: Sequence[Sequence[int]],
    answers: Sequence[Sequence[float]],
    plan: EnginePlan,
    wanted: ModelSettings,
    fault: Callable[[Floats, Floats], str | None],
    *,
    second: Sequence[int] = (),
) -> Canary:
    """The canary that runs known rows, those that the planned engine holds; `second` as in `RowJob`.

    `fault` says what is wrong with an output, given it and the known answers. A device that computes garbage raises no
    error, so an engine must prove itself before it is ready. Raises ConfigurationError when fewer than two rows fit.
    """
    lengths = [len(row) for row in rows]
    least = sorted(lengths)[min(_KNOWN_TEXTS, len(lengths)) - 1]
    if plan.prompt_limit < least:
        raise wanted.error(
            "npu_buckets",
            f"npu_buckets: the longest has {plan.prompt_limit} tokens, and one of at least {least} is needed: before "
            "the model is called ready, its engine is examined with known texts",
        )

    fitting = [place for place, length in enumerate(lengths) if length <= plan.prompt_limit]
    ids = [rows[place] for place in fitting]
    types = [second[place] for place in fitting] if second else ()
    expected = np.asarray([answers[place] for place in fitting], np.float32)

    async def check(engine: JobEngine) -> None:
        job = row_job(ids, time.monotonic() + CANARY_TIMEOUT_S, second=types)
        async with aclosing(engine.run(job, RowResult)) as results:
            found = (await anext(results)).rows(len(ids))
        if found.shape != expected.shape:
            raise CanaryFailed(f"output of shape {found.shape}, not {expected.shape}")
        if message := fault(found, expected):
            raise CanaryFailed(message)

    return check


class EncoderTask(ServedTask[M]):
    """A task whose models run on `encoders.dynamic` and `encoders.static`. Units at admission are texts."""

    keeps_emulated = False

    def plan(self, given: EngineOptions, target: Target) -> EnginePlan:
        limit = target.installed.context_limit
        match given:
            case StaticEncoderOptions(npu_batch_size=rows):
                # 16, 24, 32, 64, 128 … and the limit itself, unless they are set.
                doubled = (_DOUBLED << step for step in range(limit.bit_length()))
                usual = (*(length for length in (*_SHORT, *doubled) if length < limit), limit)
                buckets = tuple(sorted(set(given.npu_buckets or usual)))
                longest = buckets[-1]
                if longest > limit:
                    raise target.wanted.error("npu_buckets", f"a bucket of {longest} tokens, the model takes {limit}")
                return EnginePlan(
                    options=replace(given, npu_buckets=buckets),
                    admission=AdmissionLimits(MAX_OUTSTANDING_TEXTS, step_tokens=longest * rows, sizes=buckets),
                    prompt_limit=longest,
                    total_limit=longest,
                    # Each static shape is compiled with a copy of the weights.
                    memory=target.footprint(float(len(buckets))),
                    lengths=(*buckets, rows),
                )
            case DynamicEncoderOptions(max_batch_tokens=tokens):
                return EnginePlan(
                    options=replace(given, context_limit=limit),
                    admission=AdmissionLimits(MAX_OUTSTANDING_TEXTS, parallel=16, step_tokens=tokens or BATCH_TOKENS),
                    prompt_limit=limit,
                    total_limit=limit,
                    memory=target.footprint(),
                )
        raise TypeError(f"{type(given).__name__} are not the options of an encoder engine")
