"""Decides when a failed attempt is followed by another, and after which pause. The loop itself is tenacity's."""

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
from backend_client.errors import FleetOverloaded, NodeError, NodeNotServing, NPUUnavailableError
from backend_client.options import RetryOptions

R = TypeVar("R")


@dataclass(slots=True)
class Tries:
    """The attempts of one call so far: how many requests nodes may have seen, and which nodes it asked."""

    sent: int = 0
    nodes: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Prospects:
    """The options of a call that failed.

    `elsewhere`: a node that it has not asked yet could take it at once; `later`: it may wait, and some node is likely
    to take it after a pause.
    """

    elsewhere: Callable[[], bool]
    later: Callable[[], bool] = lambda: False

    def worth_waiting(self, error: BaseException | None) -> bool:
        """Whether a call that failed so is worth a wait until the budget has a retry.

        The engine of the only node may be restarting: until it has, nothing is lost by waiting.
        """
        return self.elsewhere() or (isinstance(error, NodeNotServing) and self.later())


class _stop_when_spent(stop_base):  # noqa: N801  (tenacity names its strategies so)
    """Stop after the last attempt, or when the budget has no retry left and waiting for one is not worth it.

    What was never sent costs neither; what came to a node that cannot serve it costs an attempt, but no budget.
    `unpaid` is the error whose retry is still to be paid for.
    """

    def __init__(self, tries: Tries, limit: int, budget: RetryBudget, prospects: Prospects) -> None:
        self._tries = tries
        self._limit = limit
        self._budget = budget
        self._prospects = prospects
        self.unpaid: BaseException | None = None

    def __call__(self, retry_state: RetryCallState) -> bool:
        error = retry_state.outcome.exception() if retry_state.outcome else None
        if isinstance(error, NPUUnavailableError) or (isinstance(error, NodeError) and not error.sent):
            return False
        if self._tries.sent >= self._limit:
            return True
        if isinstance(error, NodeError) and error.misrouted:
            return False
        if error is self.unpaid:
            return True
        if not self._budget.affords_one and self._prospects.worth_waiting(error):
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
        prospects: Prospects,
        hedge: bool = False,
    ) -> R:
        """Return the first success, or raise the last attempt's error."""
        if not hedge:
            # A hedge is paid from the budget; it must not pay into it.
            self._budget.deposit()
        try:
            return await attempt()
        except (NodeError, NPUUnavailableError) as error:
            if not _may_succeed_again(error, prospects):
                raise
            failed: Exception | None = error

        async def next_attempt() -> R:
            # The loop costs as much as the rest of a call, so it is built only when there is something to repeat; it is
            # given the failure that has happened as its first attempt.
            nonlocal failed
            if failed is not None:
                error, failed = failed, None
                raise error
            if spent.unpaid is not None and not await self._pay(spent.unpaid, deadline, prospects):
                raise spent.unpaid
            spent.unpaid = None
            return await attempt()

        spent = _stop_when_spent(tries, self._options.attempts, self._budget, prospects)

        loop = AsyncRetrying(
            retry=retry_if_exception(lambda error: _may_succeed_again(error, prospects)),
            wait=wait_exception(lambda error: self._pause(error, tries, prospects, deadline)),
            stop=stop_before_delay(deadline.remaining()) | spent,
            reraise=True,
        )
        result: R = await loop(next_attempt)
        return result

    async def _pay(self, error: BaseException, deadline: Deadline, prospects: Prospects) -> bool:
        """Wait until the budget has a retry, while that is worth it after this error. Returns whether it had one.

        The newest call may go first: when failures go on, most calls are then retried at once and some not at all.
        """
        half = deadline.remaining() / 2
        # Where no other node waits for the retry, `patience` would give up what the deadline still allows.
        patience = min(self._options.patience, half) if prospects.elsewhere() else half
        until = deadline.remaining() - patience
        while not self._budget.affords_one:
            pause = self._rng.uniform(0.5, 1.0) * _LOOK_AGAIN_S
            if not prospects.worth_waiting(error) or deadline.remaining() - pause < until:
                break
            await asyncio.sleep(pause)
        return self._budget.withdraw()

    def _pause(self, error: BaseException, tries: Tries, prospects: Prospects, deadline: Deadline) -> float:
        if isinstance(error, NodeError) and prospects.elsewhere():
            return 0.0
        retry_after = error.retry_after if isinstance(error, NodeError | NPUUnavailableError) else None
        if retry_after is not None:
            # Not all that wait for the same moment may come back at it.
            pause = retry_after * self._rng.uniform(1.0, 1.0 + _SPREAD) + 0.001
            # A probe may show earlier that the reason is gone; to look again costs nothing.
            return min(pause, _LOOK_EVERY_S) if pause < deadline.remaining() else pause
        return self._rng.uniform(0, self._options.pause * 2**tries.sent)


_SPREAD = 0.2
_LOOK_AGAIN_S = 0.1
_LOOK_EVERY_S = 1.0


def _may_succeed_again(error: BaseException, prospects: Prospects) -> bool:
    if isinstance(error, NPUUnavailableError):
        # No node could be asked: to wait for one that is busy is always worth it, for another if the call may.
        return error.retry_after is not None and (isinstance(error, FleetOverloaded) or prospects.later())
    return isinstance(error, NodeError)
