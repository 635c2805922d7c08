"""Waits for a fleet that is away, and finds the row that a node refuses.

Only a refusal of the row itself rejects it. After any other failure it stays unanswered: the same command answers it
later. Nodes refuse a request that kills its engine (`request_breaks_engine`), so such a row is found, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from backend_client.errors import (
    AuthenticationFailed,
    CloudRejected,
    ContextLengthExceeded,
    FleetOverloaded,
    InvalidAnswer,
    ModelNotFound,
    NPUError,
    NPUUnavailableError,
    PayloadTooLarge,
    RequestRejected,
)

log = logging.getLogger(__name__)
R = TypeVar("R")

Serve = Callable[[Sequence[int]], Awaitable[None]]
"""Serves the rows in one request and keeps what came back."""
Refuse = Callable[[int, str], None]

# Pauses before a request is sent again when no node could take it: doubled from the first up to the last.
_FIRST_PAUSE_S = 0.5
_LAST_PAUSE_S = 15.0


class Unanswered(NPUError):
    """A request was not answered for as long as the patience allows, while others were."""


class Patience:
    """Sends requests again until they are answered. Gives up when nothing was answered for `limit` seconds."""

    def __init__(
        self,
        limit: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._limit = limit
        self._clock = clock
        self._sleep = sleep
        self._answered = clock()
        self._warned = False

    async def ask(self, request: Callable[[], Awaitable[R]], final: tuple[type[NPUError], ...] = ()) -> R:
        """The answer to one request. Raises refusals of the row, AuthenticationFailed and `final` errors at once.

        Raises NPUUnavailableError when nothing was answered for `limit` seconds, Unanswered when others were.
        """
        pause, failing_since = _FIRST_PAUSE_S, None
        while True:
            try:
                answer = await request()
            except (NPUUnavailableError, RequestRejected) as error:
                if refuses_row(error) or isinstance(error, (AuthenticationFailed, *final)):
                    raise
                failure: NPUError = error
            else:
                self._answered = self._clock()
                return answer
            now = self._clock()
            failing_since = now if failing_since is None else failing_since
            self._check(failure, now, failing_since)
            if not self._warned and not isinstance(failure, FleetOverloaded):
                self._warned = True
                log.warning("waiting up to %.0f s for an answer: %s", self._limit, failure.message)
            await self._sleep(min(getattr(failure, "retry_after", None) or pause, _LAST_PAUSE_S))
            pause = min(2 * pause, _LAST_PAUSE_S)

    async def serve(self, rows: Sequence[int], serve: Serve, refuse: Refuse) -> None:
        """Serve the rows in one request; in halves, and halves of halves, where a row of them is refused.

        Raises as `ask` does, but no refusals.
        """
        try:
            await self.ask(lambda: serve(rows))
        except (RequestRejected, InvalidAnswer) as error:
            if not refuses_row(error):
                raise
            if len(rows) == 1:
                refuse(rows[0], reason_of(error))
                return
        else:
            return
        middle = len(rows) // 2
        for part in (rows[:middle], rows[middle:]):
            await self.serve(part, serve, refuse)

    def _check(self, failure: NPUError, now: float, failing_since: float) -> None:
        """Raise when waiting is over."""
        silence = now - self._answered
        known: dict[str, Any] = {"attempts": failure.attempts, "request_id": failure.request_id}
        if silence > self._limit:
            raise NPUUnavailableError(f"{failure.message}; nothing was answered for {silence:.0f} s", **known)
        waited = now - failing_since
        if waited > self._limit and not isinstance(failure, FleetOverloaded):
            raise Unanswered(f"not answered for {waited:.0f} s, while others were: {failure.message}", **known)


def refuses_row(error: NPUError) -> bool:
    """Whether the error is about the row that was sent, and not about the nodes, their models, the key or the cloud."""
    if isinstance(error, RequestRejected) and not isinstance(
        error, AuthenticationFailed | ModelNotFound | CloudRejected
    ):
        return error.status in {None, 400, 413, 422}
    return isinstance(error, InvalidAnswer)


def reason_of(error: RequestRejected | InvalidAnswer) -> str:
    """Why a row was refused, without the name of a node: the same on every run."""
    if isinstance(error, InvalidAnswer):
        return "the answer does not match the schema"
    if isinstance(error, ContextLengthExceeded):
        return "longer than the model accepts"
    if isinstance(error, PayloadTooLarge):
        return "larger than a node accepts"
    if error.code == "request_breaks_engine":
        return "takes down the engine that runs it"
    return f"refused: {error.message.removeprefix(f'{error.node}: ')}"
