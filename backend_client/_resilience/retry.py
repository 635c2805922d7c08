"""When a failed attempt is followed by another, and after which pause. The loop itself is tenacity's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_before_delay
from tenacity.stop import stop_base
from tenacity.wait import wait_exception

from backend_client._resilience.budget import RetryBudget
from backend_client._resilience.deadline import Deadline
from backend_client.errors import FleetOverloaded, NodeError
from backend_client.options import RetryOptions

R = TypeVar("R")


@dataclass(slots=True)
class Tries:
    """What one call has done so far: how many requests nodes may have seen, and which nodes it asked."""

    sent: int = 0
    nodes: set[str] = field(default_factory=set)


class _stop_when_spent(stop_base):  # noqa: N801  (tenacity names its strategies so)
    """Stop after the last attempt, or when the budget has no retry left and waiting for one is not worth it.

    What was never sent costs neither; what came to a node that cannot serve it costs an attempt, but no budget.
    `unpaid` is the error whose retry is still to be paid for.
    """

    def __init__(self, tries: Tries, limit: int, budget: RetryBudget, elsewhere: Callable[[], bool]) -> None:
        self._tries = tries
        self._limit = limit
        self._budget = budget
        self._elsewhere = elsewhere
        self.unpaid: BaseException | None = None

    def __call__(self, retry_state: RetryCallState) -> bool:
        error = retry_state.outcome.exception() if retry_state.outcome else None
        if isinstance(error, FleetOverloaded) or (isinstance(error, NodeError) and not error.sent):
            return False
        if self._tries.sent >= self._limit:
            return True
        if isinstance(error, NodeError) and error.misrouted:
            return False
        if error is self.unpaid:
            return True
        if not self._budget.affords_one and self._elsewhere():
            self.unpaid = error
            return False
        return not self._budget.withdraw()


class Retrier:
    """Runs attempts until one succeeds, or another is not worth it."""

    def __init__(self, options: RetryOptions, budget: RetryBudget, rng: random.Random) -> None:
        self._options = options
        self._budget = budget
        self._rng = rng

    def affords(self, tries: Tries) -> bool:
        """Whether another request may follow the one under way."""
        return tries.sent < self._options.attempts and self._budget.affords_one

    async def run(
        self,
        attempt: Callable[[], Awaitable[R]],
        *,
        deadline: Deadline,
        tries: Tries,
        elsewhere: Callable[[], bool],
        hedge: bool = False,
    ) -> R:
        """Return the first success, or raise the last attempt's error.

        `elsewhere` tells whether a node that was not tried yet could take the request at once.
        """
        if not hedge:
            # A hedge is paid from the budget; it must not pay into it.
            self._budget.deposit()
        try:
            return await attempt()
        except (NodeError, FleetOverloaded) as error:
            failed: Exception | None = error

        async def next_attempt() -> R:
            # The loop costs as much as the rest of a call, so it is built only when there is something to repeat; it is
            # given the failure that has happened as its first attempt.
            nonlocal failed
            if failed is not None:
                error, failed = failed, None
                raise error
            if spent.unpaid is not None and not await self._pay(deadline, elsewhere):
                raise spent.unpaid
            spent.unpaid = None
            return await attempt()

        spent = _stop_when_spent(tries, self._options.attempts, self._budget, elsewhere)

        loop = AsyncRetrying(
            retry=retry_if_exception(_may_succeed_again),
            wait=wait_exception(lambda error: self._pause(error, tries, elsewhere, deadline)),
            stop=stop_before_delay(deadline.remaining()) | spent,
            reraise=True,
        )
        result: R = await loop(next_attempt)
        return result

    async def _pay(self, deadline: Deadline, elsewhere: Callable[[], bool]) -> bool:
        """Wait until the budget has a retry, while another node could take the request at once. Returns whether it had.

        The newest call may go first: when failures go on, most calls are then retried at once and some not at all.
        """
        patience = min(self._options.patience, deadline.remaining() / 2)
        until = deadline.remaining() - patience
        while not self._budget.affords_one:
            pause = self._rng.uniform(0.5, 1.0) * _LOOK_AGAIN_S
            if not elsewhere() or deadline.remaining() - pause < until:
                break
            await asyncio.sleep(pause)
        return self._budget.withdraw()

    def _pause(self, error: BaseException, tries: Tries, elsewhere: Callable[[], bool], deadline: Deadline) -> float:
        if isinstance(error, NodeError) and elsewhere():
            return 0.0
        retry_after = error.retry_after if isinstance(error, NodeError | FleetOverloaded) else None
        if retry_after is not None:
            # Not all that wait for the same moment may come back at it.
            pause = retry_after * self._rng.uniform(1.0, 1.0 + _SPREAD) + 0.001
            # A probe may show earlier that the reason is gone; to look again costs nothing.
            return min(pause, _LOOK_EVERY_S) if pause < deadline.remaining() else pause
        return self._rng.uniform(0, self._options.pause * 2**tries.sent)


_SPREAD = 0.2
_LOOK_AGAIN_S = 0.1
_LOOK_EVERY_S = 1.0


def _may_succeed_again(error: BaseException) -> bool:
    if isinstance(error, FleetOverloaded):
        return error.retry_after is not None
    return isinstance(error, NodeError)
