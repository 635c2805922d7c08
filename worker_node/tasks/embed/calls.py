"""Vectors from an engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker_node.engines.protocol import VECTOR_DTYPE, Engine
from worker_node.tasks.embed.messages import Embedded, embed_job


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """`vectors`: float32 (n, dimensions). `started` is monotonic time, `inference_s` seconds on the device.

    `device_tokens` are those that the device computed, padding included, where the engine counts them. For
    `measured_tokens` and `measured_s` see `messages.Embedded`.
    """

    vectors: npt.NDArray[np.float32]
    started: float
    inference_s: float
    busy_us: int | None
    busy_shared: bool = False
    device_tokens: int | None = None
    measured_tokens: int = 0
    measured_s: float = 0.0

    @classmethod
    def of(cls, result: Embedded, count: int) -> EmbeddingOutput:
        """Return the vectors of `count` texts."""
        return cls(
            np.frombuffer(result.vectors, VECTOR_DTYPE).reshape(count, -1),
            result.started,
            result.inference_s,
            result.busy_us,
            result.busy_shared,
            result.device_tokens,
            result.measured_tokens,
            result.measured_s,
        )


async def embed(
    engine: Engine, rows: Sequence[Sequence[int]], *, deadline: float, interactive: bool = True
) -> EmbeddingOutput:
    """Return the vectors of texts, given as rows of token ids, in order. Raises EngineUnavailable, DeadlineExceeded."""
    job = embed_job(rows, deadline, interactive=interactive)
    async with aclosing(engine.run(job, Embedded)) as results:
        return EmbeddingOutput.of(await anext(results), len(rows))
