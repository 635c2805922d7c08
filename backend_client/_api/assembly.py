"""Joins the vectors of one call: the only place that does, and only for vectors of one vector space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from backend_client.errors import (
    BatchFailure,
    EmbedManyFailed,
    EmbedManyUnavailable,
    NPUError,
    NPUUnavailableError,
    VectorSpaceMismatch,
)
from backend_client.results import Attempt, EmbedBatch, EmbedManyResult, Usage


class OneSpace:
    """The vector space of one call: that of the first part that is admitted. Parts of any other are refused."""

    def __init__(self) -> None:
        self.space: str | None = None
        self.dimensions = 0

    def admit(self, part: EmbedBatch) -> EmbedBatch:
        """Return the part. Raises VectorSpaceMismatch for one that cannot be compared with the first."""
        dimensions = part.vectors.shape[1]
        if self.space is None:
            self.space, self.dimensions = part.space, dimensions
        if part.space != self.space:
            raise VectorSpaceMismatch(
                f"{part.node} answered in the vector space {part.space}, earlier vectors of this call are in "
                f"{self.space}",
                attempts=part.attempts,
                request_id=part.request_id,
            )
        if dimensions != self.dimensions:
            raise VectorSpaceMismatch(
                f"{part.node} answered with {dimensions} dimensions, earlier vectors of this call have "
                f"{self.dimensions}",
                attempts=part.attempts,
                request_id=part.request_id,
            )
        return part


class Assembly:
    """The rows of `count` texts, filled part by part in any order."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._one = OneSpace()
        self._vectors: npt.NDArray[np.float32] | None = None
        self._tokens = 0
        self._served = Counter[str]()
        self._attempts: dict[int, tuple[Attempt, ...]] = {}

    def put(self, start: int, part: EmbedBatch) -> None:
        """Fill the rows from `start` on. Raises VectorSpaceMismatch."""
        self._one.admit(part)
        if self._vectors is None:
            self._vectors = np.full((self._count, self._one.dimensions), np.nan, np.float32)
        rows = len(part.vectors)
        self._vectors[start : start + rows] = part.vectors
        self._tokens += part.usage.prompt_tokens
        self._served[part.node] += rows
        self._attempts[start] = part.attempts

    def result(self) -> EmbedManyResult:
        """All rows. Only when every row has been put."""
        return EmbedManyResult(
            vectors=np.empty((0, 0), np.float32) if self._vectors is None else self._vectors,
            space=self._one.space,
            usage=Usage(self._tokens),
            served=dict(self._served),
            attempts=tuple(attempt for start in sorted(self._attempts) for attempt in self._attempts[start]),
        )

    def failure(self, failures: Sequence[BatchFailure]) -> NPUError:
        """The error of a call some of whose batches failed; when all did for one reason, that error itself."""
        failures = sorted(failures, key=lambda failure: failure.start)
        first = failures[0]
        if self._vectors is None and len({type(failure.error) for failure in failures}) == 1:
            return first.error
        count = sum(failure.stop - failure.start for failure in failures)
        unavailable = all(isinstance(failure.error, NPUUnavailableError) for failure in failures)
        kind = EmbedManyUnavailable if unavailable else EmbedManyFailed
        return kind(
            f"{count} of {self._count} texts were not embedded, in {len(failures)} batches; "
            f"texts {first.start} to {first.stop - 1}: {first.error.message}",
            vectors=self._vectors,
            space=self._one.space,
            failures=failures,
        )
