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
    """The rows of any number of texts, filled part by part in any order."""

    def __init__(self) -> None:
        self._one = OneSpace()
        self._vectors: npt.NDArray[np.float32] | None = None
        self._tokens = 0
        self._served = Counter[str]()
        self._attempts: dict[int, tuple[Attempt, ...]] = {}

    def put(self, start: int, part: EmbedBatch) -> None:
        """Fill the rows from `start` on. Raises VectorSpaceMismatch."""
        self._one.admit(part)
        rows = len(part.vectors)
        self._grow(start + rows)[start : start + rows] = part.vectors
        self._tokens += part.usage.prompt_tokens
        self._served[part.node] += rows
        self._attempts[start] = part.attempts

    def _grow(self, least: int, *, spare: bool = True) -> npt.NDArray[np.float32]:
        """The vectors, with at least so many rows; without `spare` exactly so many."""
        vectors = np.empty((0, self._one.dimensions), np.float32) if self._vectors is None else self._vectors
        if least > len(vectors) or not spare:
            # In place: the system moves large blocks without copying them.
            vectors.resize((least + least // 2 if spare else least, self._one.dimensions), refcheck=False)
        self._vectors = vectors
        return vectors

    def result(self, count: int) -> EmbedManyResult:
        """All rows. Only when every row of `count` texts has been put."""
        if self._vectors is not None:
            self._grow(count, spare=False)
        return EmbedManyResult(
            vectors=np.empty((0, 0), np.float32) if self._vectors is None else self._vectors,
            space=self._one.space,
            usage=Usage(self._tokens),
            served=dict(self._served),
            attempts=tuple(attempt for start in sorted(self._attempts) for attempt in self._attempts[start]),
        )

    def failure(self, count: int, failures: Sequence[BatchFailure]) -> NPUError:
        """The error of a call with `count` texts some of whose batches failed; when all did for one reason, that error
        itself. The last failure may be that of texts which were not read.
        """
        failures = sorted(failures, key=lambda failure: failure.start)
        first = failures[0]
        if self._vectors is None and len({type(failure.error) for failure in failures}) == 1:
            return first.error
        if self._vectors is not None:
            vectors = self._grow(count, spare=False)
            for failure in failures:
                vectors[failure.start : failure.stop] = np.nan
        failed = sum(failure.stop - failure.start for failure in failures)
        unavailable = all(isinstance(failure.error, NPUUnavailableError) for failure in failures)
        kind = EmbedManyUnavailable if unavailable else EmbedManyFailed
        rows = f"{failed} of {count} texts were not embedded, in {len(failures)} batches; "
        where = f"{rows}texts {first.start} to {first.stop - 1}: " if failed else ""
        return kind(
            f"{where}{first.error.message}",
            vectors=self._vectors,
            space=self._one.space,
            failures=failures,
        )
