"""The messages between the edge process and an engine for reranking."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from worker_node.engines.protocol import TOKEN_DTYPE, VECTOR_DTYPE, Outcome


class Pair(NamedTuple):
    """A query and a document as token ids, special ones included; the first `query` of them are of token type 0."""

    ids: list[int]
    query: int


class RerankJob(msgspec.Struct, frozen=True, tag="rerank", array_like=True):
    """Score `len(lengths)` pairs, whose token ids stand one after another in `tokens` (int32).

    The first `queries[i]` tokens of pair i are of type 0, the others of type 1.
    """

    id: int
    tokens: bytes
    lengths: list[int]
    queries: list[int]
    deadline: float
    interactive: bool = True

    def with_id(self, job_id: int) -> RerankJob:
        """See `engines.messages.Job`."""
        return msgspec.structs.replace(self, id=job_id)

    def timeless(self) -> RerankJob:
        """See `engines.messages.Job`."""
        return RerankJob(0, self.tokens, self.lengths, self.queries, 0.0)


def rerank_job(pairs: Sequence[Pair], deadline: float, *, interactive: bool = True) -> RerankJob:
    """The job for some pairs."""
    lengths = [len(pair.ids) for pair in pairs]
    flat = np.fromiter(itertools.chain.from_iterable(pair.ids for pair in pairs), TOKEN_DTYPE, count=sum(lengths))
    return RerankJob(0, flat.tobytes(), lengths, [pair.query for pair in pairs], deadline, interactive)


class Scored(Outcome, frozen=True, array_like=True):
    """The logits of one job: float32, row-major, a row for each pair with a number for each label.

    The other fields are those of `serving.single.SingleResult`; `device_tokens` are those that the device computed,
    padding included.
    """

    id: int
    logits: bytes
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

    def parts(self) -> tuple[Scored]:
        """See `engines.messages.Outcome`."""
        return (self,)

    def rows(self, count: int) -> npt.NDArray[np.float32]:
        """The logits of `count` pairs, f32 [count, labels]."""
        return np.frombuffer(self.logits, VECTOR_DTYPE).reshape(count, -1)


# Names of the graph's ports beside those of every encoder.

TOKEN_TYPES = "token_type_ids"  # noqa: S105  (the name of an input)
LOGITS = "logits"
