"""The messages between the edge process and an engine for embeddings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from worker_node.engines.protocol import TOKEN_DTYPE, Outcome


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
