"""The messages between the edge process and an engine for embeddings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from worker_node.engines.protocol import TOKEN_DTYPE, VECTOR_DTYPE, JobEngine, Outcome


class EmbedJob(msgspec.Struct, frozen=True, tag="embed", array_like=True):
    """Embed `len(lengths)` texts, whose token ids stand one after another in `tokens` (int32)."""

    id: int
    tokens: bytes
    lengths: list[int]
    deadline: float
    interactive: bool = True

    def with_id(self, job_id: int) -> EmbedJob:
        """See `engines.messages.Job`."""
        return msgspec.structs.replace(self, id=job_id)

    def timeless(self) -> EmbedJob:
        """See `engines.messages.Job`."""
        return EmbedJob(0, self.tokens, self.lengths, 0.0)


def embed_job(rows: Sequence[Sequence[int]], deadline: float, *, interactive: bool = True) -> EmbedJob:
    """The job for texts that are rows of token ids."""
    lengths = [len(row) for row in rows]
    import numpy as np  # noqa: PLC0415  # takes longer to import than the messages need

    flat = np.fromiter(itertools.chain.from_iterable(rows), TOKEN_DTYPE, count=sum(lengths))
    return EmbedJob(0, flat.tobytes(), lengths, deadline, interactive)


class Embedded(Outcome, frozen=True, array_like=True):
    """The finished vectors of one job: float32, row-major, `len(lengths)` rows.

    `device_tokens` are those that the device computed for it, padding included. `busy_us` is the NPU's busy time,
    `busy_shared` that others are known to have used the NPU meanwhile; a run that held texts of several jobs is shared
    out by rows. Since the last such event the engine computed `measured_tokens` tokens of any jobs in `measured_s`
    seconds in which more texts were waiting.
    """

    id: int
    vectors: bytes
    started: float
    inference_s: float
    busy_us: int | None = None
    busy_shared: bool = False
    device_tokens: int | None = None
    measured_tokens: int = 0
    measured_s: float = 0.0

    @property
    def last(self) -> bool:
        """Always: a job has one result."""
        return True

    def parts(self) -> tuple[Embedded]:
        """See `engines.messages.Outcome`."""
        return (self,)


# Vectors from an engine.


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
    engine: JobEngine, rows: Sequence[Sequence[int]], *, deadline: float, interactive: bool = True
) -> EmbeddingOutput:
    """Return the vectors of texts, given as rows of token ids, in order. Raises EngineUnavailable, DeadlineExceeded."""
    job = embed_job(rows, deadline, interactive=interactive)
    async with aclosing(engine.run(job, Embedded)) as results:
        return EmbeddingOutput.of(await anext(results), len(rows))
