"""Serves rows through a fleet that may be away: waits for it, and finds the row at fault."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from backend_client.errors import (
    AuthenticationFailed,
    ConfigurationError,
    ContextLengthExceeded,
    FleetOverloaded,
    InvalidAnswer,
    NPUError,
    NPUUnavailableError,
    PayloadTooLarge,
    RequestRejected,
)

Serve = Callable[[Sequence[int]], Awaitable[None]]
"""Serves the rows in one request and keeps what came back."""
Refuse = Callable[[int, str], None]

# After a batch failed this often while the fleet served others, its rows are tried in halves.
_STRIKES = 2
_LAST_STRIKES = 3
# Pauses before a batch is sent again when no node could take it: doubled from the first up to the last.
_FIRST_PAUSE_S = 0.5
_LAST_PAUSE_S = 15.0


class Patience:
    """How long to wait for the fleet, and whether a failure is the rows' own fault.

    `canary` is a small request of its own. A job waits `limit` seconds without any success before it gives up; what
    was committed stays.
    """

    def __init__(
        self,
        canary: Callable[[], Awaitable[object]],
        limit: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._canary = canary
        self._limit = limit
        self._clock = clock
        self._sleep = sleep
        self._succeeded = clock()

    async def serve(self, rows: Sequence[int], serve: Serve, refuse: Refuse) -> None:
        """Serve the rows in one request; in halves, and halves of halves, where a row of them is refused.

        Raises NPUUnavailableError when the fleet stayed away, AuthenticationFailed and ConfigurationError at once.
        """
        await self._serve(rows, serve, refuse, _STRIKES if len(rows) > 1 else _LAST_STRIKES)

    async def _serve(self, rows: Sequence[int], serve: Serve, refuse: Refuse, strikes: int) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            try:
                await serve(rows)
            except (AuthenticationFailed, ConfigurationError):
                raise
            except RequestRejected as error:
                failure: NPUError = error
                break
            except InvalidAnswer as error:
                failure = error
                break
            except NPUUnavailableError as error:
                if self._clock() - self._succeeded > self._limit:
                    raise
                await self._sleep(min(error.retry_after or pause, _LAST_PAUSE_S))
                pause = min(2 * pause, _LAST_PAUSE_S)
                if not isinstance(error, FleetOverloaded) and await self._fleet_serves():
                    strikes -= 1
                if strikes <= 0:
                    failure = error
                    break
            else:
                self._succeeded = self._clock()
                return
        if len(rows) == 1:
            refuse(rows[0], reason_of(failure))
            return
        middle = len(rows) // 2
        # The parts of a batch that was struck out are struck out by one failure: a hang costs a deadline each time.
        # Not a single row, though: on a busy fleet a good one may be late once.
        for part in (rows[:middle], rows[middle:]):
            await self._serve(part, serve, refuse, 1 if len(part) > 1 else _LAST_STRIKES)

    async def _fleet_serves(self) -> bool:
        """Whether a node serves the canary: then it was the rows that failed, and not the fleet."""
        try:
            await self._canary()
        except (AuthenticationFailed, ConfigurationError):
            raise
        except NPUError:
            return False
        self._succeeded = self._clock()
        return True


def reason_of(error: NPUError) -> str:
    """Why a row was refused, without the name of a node: the same on every run."""
    if isinstance(error, ContextLengthExceeded):
        return "longer than the model accepts"
    if isinstance(error, PayloadTooLarge):
        return "larger than a node accepts"
    if isinstance(error, RequestRejected):
        if error.code == "request_breaks_engine":
            return "takes down the engine that runs it"
        return f"refused: {error.message.removeprefix(f'{error.node}: ')}"
    if isinstance(error, InvalidAnswer):
        return "the answer does not match the schema"
    return "no node could serve it, while all of them served others"
