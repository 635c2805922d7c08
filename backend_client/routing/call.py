"""One call over the nodes: attempts on one after another, and the whole policy of what follows a failed one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception

from backend_client.errors import (
    AttemptTimeout,
    AuthenticationFailed,
    ContextLengthExceeded,
    DeadlineExceeded,
    FleetOverloaded,
    KeyRefused,
    ModelMissing,
    ModelNotFound,
    NodeError,
    NodeLost,
    NodeNotServing,
    NodeOverloaded,
    NPUError,
    NPUUnavailableError,
    RequestRejected,
    SpaceChanged,
    VectorSpaceMismatch,
)
from backend_client.fleet.node import Lease
from backend_client.fleet.pool import refusal
from backend_client.fleet.runtime import Runtime
from backend_client.http.messages import Request
from backend_client.lifetime import Clock, Deadline, end_now, renew
from backend_client.options import LONGEST_S, NO_FAILOVER, ClientOptions, RetryOptions
from backend_client.results import Attempt

R = TypeVar("R")
Send: TypeAlias = Callable[[Lease, dict[str, str]], Awaitable[R]]
"""Sends a request to the node of a lease, with these headers."""

# Timers are not exact: less than this before the deadline is the deadline.
_MOMENT_S = 0.001
# Not all that wait for the same moment may come back at it: a pause is up to this share longer.
_SPREAD = 0.2
# How often a call that waits for the retry budget, or for a node, looks again.
_LOOK_FOR_BUDGET_S = 0.1
_LOOK_FOR_NODE_S = 1.0
# Others on the first engine may be to blame for its death; on the second it was alone.
_MOST_DEATHS = 2


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again after `after` seconds; `costs`: the attempt takes a retry from the budget."""

    after: float
    costs: bool


@dataclass(slots=True)
class Call:
    """A request on its way over the nodes.

    `request` gets its model and vector space as soon as they are known, and `content` is it encoded, once for all
    attempts. `streamed`: its caller gets the stream as it comes; `by_token`: the client does. `may_wait`: the present
    attempt may wait for a model that is loading, since no other node could take it. `sent`: how many requests nodes may
    have seen; `tried`: the nodes that were asked. `failed`: the last error of an attempt at a node that may have the
    model. `retry` is what was decided after the last attempt.
    """

    request: Request
    attempt_timeout: float | None
    began: float
    accept: str
    streamed: bool = False
    by_token: bool = False
    content: bytes | None = None
    content_type: str = "application/json"
    may_wait: bool = True
    sent: int = 0
    tried: set[str] = field(default_factory=set)
    attempts: list[Attempt] = field(default_factory=list)
    failed: NodeError | None = None
    retry: Retry | None = None

    @property
    def engine_deaths(self) -> int:
        """How many engines died under it, perhaps because of it; a node runs it alone then."""
        return sum(attempt.code == "engine_crashed" for attempt in self.attempts)

    def headers(self, left: float) -> dict[str, str]:
        """The headers of an attempt that begins `left` seconds before the deadline, but for the type of its content."""
        request = self.request
        headers = {"Accept": self.accept, "X-Request-ID": request.request_id}
        # Rounded down: the node must not think it has longer than we wait.
        headers["X-NPU-Start-Timeout-Ms" if self.streamed else "X-Request-Timeout-Ms"] = str(int(left * 1000))
        if self.streamed and request.ends:
            headers["X-Request-Timeout-Ms"] = str(request.ends.remaining_ms())
        if request.priority != "interactive":
            headers["X-Priority"] = request.priority
        if not self.may_wait:
            headers["X-NPU-Restart-Wait-Ms"] = "0"
        if self.engine_deaths:
            headers["X-NPU-Engine-Deaths"] = str(self.engine_deaths)
        if request.require_device is not None:
            headers["X-NPU-Require-Device"] = request.require_device
        return {**headers, **request.extra_headers, **request.trace}


class Dispatcher:
    """Runs calls. Every error it raises has the call's attempts and request id."""

    def __init__(self, runtime: Runtime, options: ClientOptions, rng: random.Random) -> None:
        self._runtime = runtime
        self._pool = runtime.pool
        self._options = options.retry
        self._rng = rng
        # The part of its remaining time that an attempt gets while another node could take over.
        self._share = options.timeouts.share
        self.budget = RetryBudget(options.retry, runtime.pool.clock)

    async def run(self, call: Call, send: Send[R], *, settle: bool = True) -> tuple[R, Lease]:
        """Return the first success of `send`, tried on one node after another as `decide` says, and its lease.

        Without `settle` its node is still lent: the caller settles the lease. Raises NPUUnavailableError or one of its
        kind when no node served it, RequestRejected when one refused it.
        """
        self.budget.deposit()

        def decided(error: BaseException) -> bool:
            call.retry = self.decide(call, error)
            return call.retry is not None

        try:
            async with self._runtime.calls.open():
                async for attempt in AsyncRetrying(
                    retry=retry_if_exception(decided),
                    wait=lambda _: call.retry.after if call.retry else 0.0,
                    before_sleep=partial(self._pay, call),
                    reraise=True,
                ):
                    with attempt:
                        left = call.request.deadline.remaining()
                        value, lease = await self._attempt(call, send, left)
                        if settle:
                            self.settle(call, lease, None)
                        return value, lease
            raise RuntimeError("the last attempt neither returned nor raised")
        except NodeError as error:
            problem = self._verdict(call, error)
        except NPUError as error:
            problem = error
        problem.attempts = tuple(call.attempts)
        problem.request_id = call.request.request_id
        raise problem

    def decide(self, call: Call, error: BaseException) -> Retry | None:
        """Whether another attempt may succeed after this error, and when; None: give up."""
        elsewhere = self.elsewhere(call)
        if call.engine_deaths >= _MOST_DEATHS:
            return None
        if isinstance(error, NodeNotServing | AttemptTimeout):
            # On the same node it would wait, and for that there may be the cloud.
            worth_it = elsewhere or self.later(call)
        elif isinstance(error, NPUUnavailableError):
            # No node could be asked: to wait for one that is busy is always worth it, for another if the call may.
            worth_it = error.retry_after is not None and (isinstance(error, FleetOverloaded) or self.later(call))
        elif isinstance(error, ContextLengthExceeded) or (isinstance(error, NodeError) and error.misrouted):
            worth_it = elsewhere
        else:
            worth_it = isinstance(error, NodeError)
        if not worth_it:
            return None
        pause = 0.0 if isinstance(error, NodeError) and elsewhere else self._pause(call, error)
        if call.sent >= self._options.attempts or pause >= call.request.deadline.remaining():
            return None
        # What no node has seen costs nothing. Nor does what a node cannot serve, or not before it has loaded the model:
        # it is not asked again, so other attempts cannot multiply load.
        costs = isinstance(error, NodeError) and error.sent and not error.misrouted
        if isinstance(error, NodeError) and costs and error.code == "model_loading":
            node = self._pool.nodes.get(error.node)
            model = node.resolve(call.request.model or "") if node else None
            costs = model is None or not model.loading
        return Retry(pause, costs)

    def _pause(self, call: Call, error: BaseException) -> float:
        """Seconds until the next attempt, at a node that was asked before or cannot take the request yet."""
        retry_after = error.retry_after if isinstance(error, NodeError | NPUUnavailableError) else None
        if retry_after is None:
            return self._rng.uniform(0, self._options.pause * 2**call.sent)
        pause = retry_after * self._rng.uniform(1.0, 1.0 + _SPREAD) + _MOMENT_S
        # A probe may show earlier that the reason is gone; to look again costs nothing.
        return min(pause, _LOOK_FOR_NODE_S) if pause < call.request.deadline.remaining() else pause

    async def _pay(self, call: Call, state: RetryCallState) -> None:
        """Take a retry from the budget, or wait for one while that is worth it. Raises the attempt's error if there is
        none.
        """
        error = state.outcome.exception() if state.outcome else None
        if error is None or call.retry is None or not call.retry.costs:
            return
        half = (call.request.deadline.remaining() - call.retry.after) / 2
        # Where no other node waits for the retry, `patience` would give up what the deadline still allows.
        patience = min(self._options.patience, half) if self.elsewhere(call) else half
        until = self._pool.clock() + patience
        # The newest call may go first: when failures go on, most calls are then retried at once and some not at all.
        # The only engine may be restarting: nothing is lost by waiting then.
        while not self.budget.affords_one and (
            self.elsewhere(call) or (isinstance(error, NodeNotServing) and self.later(call))
        ):
            step = self._rng.uniform(0.5, 1.0) * _LOOK_FOR_BUDGET_S
            if self._pool.clock() + step > until:
                break
            await asyncio.sleep(step)
        if not self.budget.withdraw():
            raise error

    def settle(self, call: Call, lease: Lease, error: BaseException | None) -> None:
        """The request on this node is over; learn from it and note it in the call's history."""
        now = self._pool.clock()
        self._pool.settle(lease, error)
        known = error if isinstance(error, NodeError | RequestRejected) else None
        if isinstance(error, NodeError) and not isinstance(error, ModelMissing):
            call.failed = error
        call.attempts.append(
            Attempt(
                lease.node.url,
                "ok" if error is None else type(error).__name__,
                lease.began - call.began,
                now - lease.began,
                not isinstance(error, NodeError) or error.sent,
                known.status if known else None,
                known.code if known else None,
            )
        )

    async def guard(
        self,
        lease: Lease,
        work: Callable[[], Awaitable[R]],
        until: Deadline,
        left: float,
        limit: float,
        next_limit: float = LONGEST_S,
    ) -> R:
        """Await a node's work until the deadline, in `left` seconds, and no longer than the node lives. Its first sign
        of life may take `limit` seconds, and each one after that `next_limit`.

        Raises DeadlineExceeded, AttemptTimeout, NodeLost, ClientClosed, or what the work raised.
        """
        url = lease.node.url

        def heard() -> None:
            nonlocal limit
            limit = next_limit
            renew(scope, limit, until)

        late = f"the call's deadline passed while {url} worked on it; increase `timeout` or send less"
        if not left:
            # What is in a buffer already comes without waiting, and no timeout would end that.
            raise DeadlineExceeded(late)
        try:
            async with asyncio.timeout(min(limit, left)) as scope:
                lease.on_lost = lambda: end_now(scope)
                lease.on_heard = heard
                lease.waiting_since = self._pool.clock()
                value = await work()
            lease.waiting_since = None
            return value
        except TimeoutError:
            # A node's 504 is a TimeoutError too.
            if not scope.expired():
                raise
        finally:
            lease.on_lost = lease.on_heard = None
        if lease.lost:
            raise NodeLost("stopped answering its probes while it worked on the request", node=url)
        if until.remaining() > _MOMENT_S:
            raise AttemptTimeout(f"did not answer within {limit:.3g} s", node=url)
        raise DeadlineExceeded(late)

    def limits(self, call: Call, lease: Lease, left: float) -> tuple[float, float]:
        """Seconds that this node gets for its first sign of life, and for each next one.

        A share of the `left` time while another node could take over and a retry is affordable; shorter where the
        call's `failover` says so. A node that has to load the model first gets longer than an attempt usually may, but
        no more than the share where the cloud could take over.
        """
        request = call.request
        limit = LONGEST_S if lease.loading or call.attempt_timeout is None else call.attempt_timeout
        if not call.may_wait or (lease.loading and request.cloud_takes_over()):
            limit = min(limit, left * self._share)
        early = request.failover
        if call.by_token and early != NO_FAILOVER and (not call.may_wait or request.cloud_takes_over()):
            return min(limit, early.first_token_s or LONGEST_S), min(limit, early.stall_s or LONGEST_S)
        return limit, limit

    async def _attempt(self, call: Call, send: Send[R], left: float) -> tuple[R, Lease]:
        lease, left = await self._lend(call, left)
        call.tried.add(lease.node.url)
        call.sent += 1
        may_retry = call.sent < self._options.attempts and self.budget.affords_one
        call.may_wait = not (may_retry and self.elsewhere(call))
        try:
            value = await self.guard(
                lease,
                partial(send, lease, call.headers(left)),
                call.request.deadline,
                left,
                *self.limits(call, lease, left),
            )
        except BaseException as error:
            if isinstance(error, NodeError) and not error.sent:
                call.sent -= 1
            self.settle(call, lease, error)
            raise
        return value, lease

    async def _lend(self, call: Call, left: float) -> tuple[Lease, float]:
        """Lease a node for an attempt that has `left` seconds; return what it has then. While a node's state is
        unknown, wait for its first probe.
        """
        while left:
            if self._runtime.bindings.complete(call.request):
                try:
                    return self._pool.acquire(call.request, call.tried), left
                except (NPUUnavailableError, RequestRejected):
                    if not self._pool.unseen:
                        raise
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._runtime.prober.wait_for_probe()
            left = call.request.deadline.remaining()
        raise DeadlineExceeded("the call's time was up before a node could be asked")

    def elsewhere(self, call: Call) -> bool:
        """Whether a node that the call has not asked yet could take it now."""
        now = self._pool.clock()
        return any(
            url not in call.tried and refusal(node, call.request, now) is None for url, node in self._pool.nodes.items()
        )

    def later(self, call: Call) -> bool:
        """Whether the call may wait, and some node could take it now or names a time at which it may."""
        if call.request.cloud_takes_over():
            return False
        now = self._pool.clock()
        reasons = [refusal(node, call.request, now) for node in self._pool.nodes.values()]
        return any(reason is None or reason.until is not None for reason in reasons)

    def _verdict(self, call: Call, last: NodeError) -> NPUError:
        """The error of the call as a whole, given that of its last attempt."""
        what = f"no node served it in {len(call.attempts)} attempts; the last one: "
        if isinstance(last, ModelMissing):
            nodes, name = self._pool.nodes, call.request.model or ""
            unasked = any(node.resolve(name) is not None for url, node in nodes.items() if url not in call.tried)
            if call.failed is None and not unasked:
                found = ModelNotFound(what + last.message, node=last.node, status=last.status, code=last.code)
                found.reply = last.reply
                return found
            last = call.failed or last
        if isinstance(last, KeyRefused):
            refused = AuthenticationFailed(last.message, node=last.node, status=last.status, code=last.code)
            refused.reply = last.reply
            return refused
        if isinstance(last, SpaceChanged):
            return VectorSpaceMismatch(what + last.message)
        if call.engine_deaths >= _MOST_DEATHS:
            why = "it took down the engines that ran it, twice; do not send it again. The last attempt: "
            return RequestRejected(why + last.message, node=last.node, status=400, code="request_breaks_engine")
        kind = FleetOverloaded if isinstance(last, NodeOverloaded) else NPUUnavailableError
        return kind(what + last.message, retry_after=last.retry_after)


class RetryBudget:
    """A token bucket, one for the whole client. Every call pays `per_request` in, every second `per_second`; a retry
    costs 1.

    So from the client's start on, retries never exceed `initial + per_request × calls + per_second × seconds`.
    `refused` counts those that were refused.
    """

    def __init__(self, options: RetryOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._balance = options.initial
        self._filled_at = clock()
        self.refused = 0

    @property
    def balance(self) -> float:
        """Retries that could be made now. Changes nothing, so that any thread may ask."""
        earned = (self._clock() - self._filled_at) * self._options.per_second
        return min(self._options.saved, self._balance + earned)

    @property
    def affords_one(self) -> bool:
        # Float: ten deposits of 0.1 sum to just under 1.0.
        return self.balance >= 1.0 - 1e-9

    def deposit(self) -> None:
        self._balance = min(self._options.saved, self._balance + self._options.per_request)

    def withdraw(self) -> bool:
        """Take one retry. Return False if none is left; the call then fails with its last error."""
        self._balance, self._filled_at = self.balance, self._clock()
        if not self.affords_one:
            self.refused += 1
            return False
        self._balance = max(0.0, self._balance - 1.0)
        return True
