"""Nobody could serve the call, in time or at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from backend_client.results import Attempt

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
from backend_client.errors.base import NPUError
from backend_client.errors.cloud import CloudError, CloudUnavailable
from backend_client.errors.rejected import RequestRejected


class NPUUnavailableError(NPUError):
    """No node can serve the request now. `retry_after`: seconds until one, or the cloud, is expected to, where known.

    `cloud_error` is how the fallback failed, if it was asked.
    """

    def __init__(
        self,
        message: str,
        *,
        attempts: Sequence[Attempt] = (),
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, attempts=attempts, request_id=request_id)
        self.retry_after = retry_after
        self.cloud_error: CloudError | None = None

    def without_cloud(self, why: str, error: CloudError | None = None) -> Self:
        """This error, saying also why the cloud did not help; `error` is how it failed, if it was asked."""
        self.message = f"{self.message}; {why}"
        self.args = (self.message,)
        self.cloud_error = error
        pause = error.retry_after if isinstance(error, CloudUnavailable) else None
        if pause is not None:
            self.retry_after = pause if self.retry_after is None else min(pause, self.retry_after)
        return self


class ModelNotFound(RequestRejected, NPUUnavailableError):
    """No node serves a model of that name now. The cloud is asked if the settings map the model; it is not retried."""


class NotOffered(ModelNotFound):
    """No node of the fleet has a model for this task, so nothing was sent."""


class FleetOverloaded(NPUUnavailableError):
    """Nodes are up, but all that could serve the request are busy for longer than it may wait."""


class VectorSpaceMismatch(NPUUnavailableError):
    """Nodes are up, but none answers in the vector space that this client's earlier vectors are in."""


class DeadlineExceeded(NPUUnavailableError, TimeoutError):
    """The call's time was up before a node had answered."""


@dataclass(frozen=True, slots=True)
class BatchFailure:
    """Texts `start` to `stop` (exclusive) were not embedded."""

    start: int
    stop: int
    error: NPUError


class EmbedManyFailed(NPUError):
    """Some batches could not be embedded.

    `vectors` is float32 (n, d), all of one `space`, with NaN in the rows that failed; both are None when no batch
    succeeded. `failures` names the rows of each failed batch and why.
    """

    def __init__(
        self,
        message: str,
        *,
        vectors: npt.NDArray[np.float32] | None = None,
        space: str | None = None,
        failures: Sequence[BatchFailure] = (),
    ) -> None:
        attempts = [attempt for failure in failures for attempt in failure.error.attempts]
        super().__init__(message, attempts=attempts)
        self.vectors = vectors
        self.space = space
        self.failures = tuple(failures)


class EmbedManyUnavailable(EmbedManyFailed, NPUUnavailableError):
    """Some batches could not be embedded because no node could serve them: the fleet died on the way.

    `vectors` and `failures` as in EmbedManyFailed; `retry_after` is the longest that a batch names.
    """

    def __init__(self, message: str, *, failures: Sequence[BatchFailure] = (), **more: Any) -> None:
        super().__init__(message, failures=failures, **more)
        waits = [failure.error.retry_after for failure in failures if isinstance(failure.error, NPUUnavailableError)]
        self.retry_after = max((wait for wait in waits if wait is not None), default=None)
