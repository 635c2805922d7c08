"""One call through the fleet: lease a node, make an attempt, learn from it, try again while that is allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from backend_client._fleet.bindings import Bindings
from backend_client._fleet.health import LATE_S, Prober
from backend_client._fleet.lease import Lease
from backend_client._fleet.node import Requirement
from backend_client._fleet.pool import Pool
from backend_client._fleet.selection import explain, refusal, unavailable_holders
from backend_client._resilience import connection_wait
from backend_client._resilience.closing import OpenCalls, end_now, renew
from backend_client._resilience.deadline import Deadline
from backend_client._resilience.retry import Prospects, Retrier, Tries
from backend_client.errors import (
    AttemptTimeout,
    AuthenticationFailed,
    DeadlineExceeded,
    FleetOverloaded,
    KeyRefused,
    ModelMissing,
    ModelNotFound,
    NodeError,
    NodeLost,
    NodeOverloaded,
    NPUError,
    NPUUnavailableError,
    RequestRejected,
    SpaceChanged,
    VectorSpaceMismatch,
)
from backend_client.results import Attempt

R = TypeVar("R")

# Another attempt makes sense when this many times the usual time to an answer remains for it.
_ROOM = 1.5
# Timers are not exact: less than this before the deadline is the deadline.
_MOMENT_S = 0.001


@dataclass(slots=True)
class Call:
    """One call of the client's user, over all its attempts. `size`: the power of two of its length.

    `may_wait`: the present attempt may wait for an engine that is being restarted, since no other node could take it.
    `failed`: the last error of an attempt at a node that may have the model.
    `cloud_takes_over`: whether the cloud gets the call when no node can take it now; then it does not wait for one.
    """

    need: Requirement
    deadline: Deadline
    request_id: str
    attempt_timeout: float | None
    began: float
    size: int = 0
    hedge: bool = False
    may_wait: bool = True
    cloud_takes_over: Callable[[], bool] | None = None
    tries: Tries = field(default_factory=Tries)
    attempts: list[Attempt] = field(default_factory=list)
    failed: NodeError | None = None


@dataclass(slots=True)
class Served(Generic[R]):
    """The value of the attempt that succeeded, with its node still lent: `Dispatcher.settle` gives it back."""

    value: R
    lease: Lease


class Dispatcher:
    """Runs calls. Every error it raises has the call's attempts and request id."""

    def __init__(self, pool: Pool, bindings: Bindings, prober: Prober, retrier: Retrier, share: float) -> None:
        self.calls = OpenCalls()
        self._share = share
        self._pool = pool
        self._bindings = bindings
        self._prober = prober
        self._retrier = retrier

    async def run(self, call: Call, send: Callable[[Lease], Awaitable[R]]) -> Served[R]:
        """Return the first success of `send`, tried on one node after another.

        Raises NPUUnavailableError or one of its kind when no node served it, RequestRejected when one refused it.
        """
        self._prober.note_call()
        try:
            with self.calls.open():
                return await self._retrier.run(
                    lambda: self._attempt(call, send),
                    deadline=call.deadline,
                    tries=call.tries,
                    prospects=Prospects(lambda: self.elsewhere(call), lambda: self.later(call)),
                    hedge=call.hedge,
                )
        except NodeError as error:
            problem = self._verdict(call, error)
        except NPUError as error:
            problem = error
        problem.attempts = tuple(call.attempts)
        problem.request_id = call.request_id
        raise problem

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

    async def guard(self, call: Call, lease: Lease, work: Awaitable[R], limit: float | None = None) -> R:
        """Await a node's work within the call's deadline and `limit` seconds, and no longer than the node lives.

        Raises DeadlineExceeded, AttemptTimeout, NodeLost, ClientClosed, or what the work raised.
        """
        remaining = call.deadline.remaining()
        url = lease.node.url
        token = connection_wait.current.set(lease)
        try:
            async with asyncio.timeout(remaining if limit is None else min(limit, remaining)) as scope:
                lease.on_lost = lambda: end_now(scope)
                if limit is not None:
                    # Each sign of life renews the limit.
                    lease.on_heard = lambda: renew(scope, limit, call.deadline)
                lease.waiting_since = self._pool.clock()
                value = await work
            lease.waiting_since = None
            return value
        except TimeoutError:
            # A node's 504 is a TimeoutError too.
            if not scope.expired():
                raise
            lease.late = asyncio.get_running_loop().time() - (scope.when() or 0.0) > LATE_S
        finally:
            connection_wait.current.reset(token)
            lease.on_lost = lease.on_heard = None
        if lease.lost:
            raise NodeLost("stopped answering its probes while it worked on the request", node=url)
        if limit is not None and call.deadline.remaining() > _MOMENT_S:
            why = f"no connection to it became free within {limit:.3g} s" if lease.queued else None
            raise AttemptTimeout(why or f"did not answer within {limit:.3g} s", node=url)
        raise DeadlineExceeded(f"the call's deadline passed while {url} worked on it; increase `timeout` or send less")

    def limit(self, call: Call, lease: Lease) -> float | None:
        """Seconds that this node gets for its next sign of life; None: all that remains.

        A share of the remaining time while another node could take over and a retry is affordable, unless too little
        would remain for that one. A node that has to load the model first gets longer than an attempt usually may.
        """
        longest = None if lease.loading else call.attempt_timeout
        if call.may_wait:
            return longest
        share = call.deadline.remaining() * self._share
        usual = self._pool.usual.get(lease.model, lease.size)
        if usual is not None and share < _ROOM * usual:
            return longest
        return share if longest is None else min(share, longest)

    async def _attempt(self, call: Call, send: Callable[[Lease], Awaitable[R]]) -> Served[R]:
        lease = await self._lend(call)
        call.tries.nodes.add(lease.node.url)
        call.tries.sent += 1
        call.may_wait = not (self._retrier.affords(call.tries) and self.elsewhere(call))
        try:
            value = await self.guard(call, lease, send(lease), self.limit(call, lease))
        except AuthenticationFailed as error:
            url = lease.node.url
            # A refusal costs a node next to nothing, and this one is not asked again for seconds.
            call.tries.sent -= 1
            refused = KeyRefused(error.message.removeprefix(f"{url}: "), node=url, status=error.status, code=error.code)
            self.settle(call, lease, refused)
            if self._pool.key_refused(call.need):
                raise
            raise refused from None
        except BaseException as error:
            if isinstance(error, NodeError) and not error.sent:
                call.tries.sent -= 1
            self.settle(call, lease, error)
            raise
        return Served(value, lease)

    async def _lend(self, call: Call) -> Lease:
        """Lease a node for the next attempt. While a node's state is unknown, wait for its first probe."""
        while True:
            if call.deadline.remaining() <= 0:
                raise DeadlineExceeded("the call's time was up before a node could be asked")
            if not self._bindings.undecided(call.need):
                call.need = self._bindings.complete(call.need)
                try:
                    return self._pool.acquire(call.need, call.tries.nodes, call.size)
                except (NPUUnavailableError, RequestRejected):
                    if not self._pool.unknown:
                        raise
            try:
                async with asyncio.timeout(call.deadline.remaining()):
                    await self._prober.wait_for_probe()
            except TimeoutError:
                continue

    def elsewhere(self, call: Call) -> bool:
        """Whether a node that the call has not asked yet could take it now."""
        now = self._pool.clock()
        return any(
            url not in call.tries.nodes and refusal(node, call.need, now) is None
            for url, node in self._pool.nodes.items()
        )

    def later(self, call: Call) -> bool:
        """Whether the call may wait, and some node could take it now or names a time at which it may."""
        if call.cloud_takes_over is not None and call.cloud_takes_over():
            return False
        now, left = self._pool.clock(), call.deadline.remaining()
        reasons = [refusal(node, call.need, now) for node in self._pool.nodes.values()]
        return any(reason is None or (reason.until is not None and left > reason.patience) for reason in reasons)

    def _verdict(self, call: Call, last: NodeError) -> NPUError:
        """The error of the call as a whole, given that of its last attempt."""
        if isinstance(last, ModelMissing):
            nodes, name = self._pool.nodes, call.need.model or ""
            # That others do not know the model says nothing while a node that has it is down or busy.
            if holders := unavailable_holders(nodes.values(), call.need, self._pool.clock()):
                return explain(call.need, holders, self._pool.clock())
            unasked = any(node.resolve(name) is not None for url, node in nodes.items() if url not in call.tries.nodes)
            if call.failed is None and not unasked:
                message = _told(last, call)
                return ModelNotFound(message, node=last.node, status=last.status, code=last.code)
            last = call.failed or last
        message = _told(last, call)
        if isinstance(last, SpaceChanged):
            return VectorSpaceMismatch(message)
        kind = FleetOverloaded if isinstance(last, NodeOverloaded) else NPUUnavailableError
        return kind(message, retry_after=last.retry_after)


def _told(last: NodeError, call: Call) -> str:
    return f"no node served it in {len(call.attempts)} attempts; the last one: {last.message}"
