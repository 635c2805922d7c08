"""The base of all errors, and those of wrong use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from backend_client.results import Attempt


class NPUError(Exception):
    """Base of all. `attempts` holds each try on each node (and the cloud), oldest first."""

    def __init__(self, message: str, *, attempts: Sequence[Attempt] = (), request_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.attempts: tuple[Attempt, ...] = tuple(attempts)
        self.request_id = request_id

    def __reduce__(self) -> tuple[Callable[..., NPUError], tuple[Any, ...]]:
        """Pickle without calling the constructor: its keyword arguments are not in `args`."""
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(kind: type[NPUError], args: tuple[Any, ...], state: dict[str, Any]) -> NPUError:
    error: NPUError = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigurationError(NPUError):
    """The settings are wrong, or the client is used in a way that cannot work."""


class ClientClosed(ConfigurationError):
    """The client was closed before or during the call. Neither retried nor sent to the cloud."""
