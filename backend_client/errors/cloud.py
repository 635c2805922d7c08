"""The cloud leg failed."""

from __future__ import annotations

from backend_client.errors.base import NPUError
from backend_client.errors.rejected import RequestRejected


class CloudError(NPUError):
    """The cloud leg failed."""


class CloudUnavailable(CloudError):
    """The cloud could not be reached, was busy, failed, did not accept our key or model, or is in quarantine.

    `status` is that of its HTTP reply, if there was one; `retry_after`: seconds, where it says so.
    """

    def __init__(self, message: str, *, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class CloudRejected(CloudError, RequestRejected):
    """The cloud answered 400, 413 or 422, or cannot do what the request asks; it would refuse it again."""


class SpendCapReached(CloudError):
    """The request might cost more than the spend cap leaves; nothing was sent."""
