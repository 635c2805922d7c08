"""What the rooms of the node tell of a request's stages, whether or not anybody traces.

Times are `time.monotonic()` seconds. `Tracing` and `Operation` themselves do nothing: they are what a node has whose
tracing is off, and nothing of OpenTelemetry is imported for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from worker_node.domain import RequestContext, Route, Usage
from worker_node.engines.base import Engine


class Operation:
    """One inference, from its tokens to its answer. Each stage is reported when it is over."""

    def tokenized(self, began: float) -> None:
        """The prompt was tokenized, from `began` until now."""

    def routed(self, route: Route) -> None:
        """The placement is chosen; that took from the tokens until now, the wait for its load included."""

    def submitted(self, engine: Engine) -> None:
        """The engine is given the job now."""

    def started(self, at: float) -> None:
        """The engine process took the job up, by its own clock."""

    def ran(self, began: float, ended: float) -> None:
        """The engine process ran the job from then to then, by its own clock."""

    def first_token(self, at: float) -> None:
        """The engine process had the first token."""

    def ended(self, at: float) -> None:
        """The engine process had the last token."""

    def answered(
        self,
        usage: Usage,
        *,
        finish_reason: str | None = None,
        busy_us: int | None = None,
        busy_shared: bool = False,
        cached: str | None = None,
    ) -> None:
        """The answer is complete."""

    def watch(self) -> AbstractContextManager[None]:
        """A failure in the block is the operation's, also where the caller makes an answer of it."""
        return nullcontext()


class ServerRequest:
    """One HTTP request."""

    def responded(self, status: int) -> None:
        """It was answered with this status."""


NOTHING: Mapping[str, float | str] = {}
_REQUEST = nullcontext(ServerRequest())
_OPERATION = nullcontext(Operation())


class Tracing:
    """The tracing of a node; this one is off."""

    enabled = False

    def request(
        self, _method: str, _route: str, _headers: Mapping[str, str], _request_id: str, _arrived: float, /
    ) -> AbstractContextManager[ServerRequest]:
        """Trace the HTTP request that is served while the block runs, as a part of the caller's trace if it has one.

        The route is its pattern, not the path that was asked for.
        """
        return _REQUEST

    def operation(
        self, _name: str, _context: RequestContext, _attributes: Mapping[str, float | str] = NOTHING, /
    ) -> AbstractContextManager[Operation]:
        """Trace an operation, by the name that its task gives it, while the block runs.

        The attributes are numbers and names that the node made itself: nothing of a request's text.
        """
        return _OPERATION

    async def close(self) -> None:
        """Send what was not sent yet."""


OFF = Tracing()
