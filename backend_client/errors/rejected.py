"""Requests that would be refused again: no retry, no fallback."""

from __future__ import annotations

from backend_client.errors.base import NPUError


class RequestRejected(NPUError):
    """The request itself was refused; sending it again, here or elsewhere, will not help."""

    def __init__(
        self,
        message: str,
        *,
        node: str | None = None,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.node = node
        self.status = status
        self.code = code
        self.param = param


class InvalidArgument(RequestRejected, ValueError):
    """An argument or option of the call is wrong, and nothing was sent. `param` names it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param)


class AuthenticationFailed(RequestRejected):
    """The API key is missing or not one of the node's."""


class ContextLengthExceeded(RequestRejected):
    """The prompt, or prompt and output together, are longer than any placement of the model allows."""


class PayloadTooLarge(RequestRejected):
    """The request is larger than the node takes."""
