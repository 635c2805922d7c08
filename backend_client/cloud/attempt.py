"""One request to the cloud: its cost is reserved before, its outcome is settled once after."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Self, TypeVar

import openai

from backend_client.cloud import Ledger
from backend_client.errors import CloudError, CloudRejected, CloudUnavailable
from backend_client.fleet.node import Availability
from backend_client.http.errors import retry_after_of
from backend_client.http.messages import NotAnAnswer, Request
from backend_client.lifetime import Clock, OpenCalls
from backend_client.results import Attempt, FailureKind, Usage
from backend_client.sdk.client import httpx

R = TypeVar("R")

_ABOUT_THE_REQUEST = frozenset({400, 413, 422})
# Codes and types of errors by which a cloud, or a proxy such as LiteLLM's, says that our account is used up.
_NO_BUDGET = frozenset({"budget_exceeded", "billing_hard_limit_reached", "billing_not_active", "insufficient_quota"})
_HINTS = {
    401: "check cloud.api_key",
    402: "check the account",
    403: "check cloud.api_key and what it may use",
    404: "check cloud.base_url and the model names in cloud",
}


@dataclass(frozen=True, slots=True)
class CloudState:
    """What all requests to one cloud share. `name` is the cloud's name in attempts.

    Each of its models has an availability of its own: answers of one say nothing of another.
    """

    name: str
    new_availability: Callable[[], Availability]
    ledger: Ledger
    clock: Clock
    calls: OpenCalls
    models: dict[str, Availability] = field(default_factory=dict)

    def availability(self, model: str) -> Availability:
        return self.models.setdefault(model, self.new_availability())

    @property
    def best(self) -> Availability:
        """That of the model that takes requests first."""
        known = self.models.values()
        return min(known, key=lambda model: (not model.closed, model.opens_in), default=self.new_availability())

    def trouble(self, model: str | None = None) -> str | None:
        """Why the model, or any (None), gets no request now; None if it gets them."""
        found = self.best if model is None else self.availability(model)
        if found.admits():
            return None
        pause = found.opens_in
        return f"ejected {f'for {pause:.1f} s more' if pause else 'until a trial succeeds'} after consecutive failures"


class CloudAttempt:
    """`begin` it to reserve the cost; `run` what there is to wait for; then call `succeeded`, or `abandoned`.

    `run` settles a failure itself.
    """

    def __init__(self, state: CloudState, request: Request, model: str, bound: Usage) -> None:
        state.calls.check()
        if trouble := state.trouble(model):
            raise CloudUnavailable(f"{model} of the cloud at {state.name} is {trouble}")
        self.model = model
        self.request = request
        self._state = state
        self._reservation = state.ledger.reserve(model, bound, capped=request.spend_limit is not None)
        # Until somebody else pays for the call, too.
        self._pay: Callable[[Decimal], None] = lambda _: None
        self._available = state.availability(model)
        self._ticket = self._available.begin()
        self._began = state.clock()
        self._settled = False

    @classmethod
    async def begin(cls, state: CloudState, request: Request, model: str, bound: Usage) -> Self:
        """Raises CloudUnavailable while the breaker is open, SpendCapReached, and as the request's spend limit."""
        attempt = cls(state, request, model, bound)
        if request.spend_limit is None:
            return attempt
        try:
            attempt._pay = await request.spend_limit(attempt._reservation.cost)
        except BaseException:
            # Nothing was sent.
            attempt._settled = True
            attempt._available.abandoned(attempt._ticket)
            state.ledger.release(attempt._reservation)
            raise
        return attempt

    @property
    def bound(self) -> Usage:
        """The most that the request may use."""
        return self._reservation.bound

    async def run(self, work: Callable[[], Awaitable[R]], seconds: float | None = None) -> R:
        """Await the SDK for at most this many seconds, or until the call's deadline.

        Raises CloudError, with this attempt in its history, or ClientClosed.
        """
        remaining = self.request.deadline.remaining() if seconds is None else seconds
        problem: CloudError
        try:
            async with self._state.calls.open():
                if not remaining:
                    # What is in a buffer already comes without waiting, and no timeout would end that.
                    raise TimeoutError
                async with asyncio.timeout(remaining):
                    return await work()
        except TimeoutError:
            problem, failure, owed = self._unavailable("did not answer within the call's time"), FailureKind.NONE, True
        except (openai.OpenAIError, httpx.HTTPError, OSError, ValueError, RecursionError, StopAsyncIteration) as error:
            problem, failure, owed = self._translate(error)
        except BaseException:
            self.abandoned()
            raise
        self._fail(problem, failure, owed=owed)
        # Raised out here: the SDK's error holds the request with its headers and must not become the context of ours.
        raise problem

    def succeeded(self, usage: Usage | None) -> None:
        """Settle with the usage of the complete answer; None if the answer did not report it."""
        if not self._settled:
            self._settled = True
            self._available.succeeded(self._ticket)
            self._pay(self._state.ledger.settle(self._reservation, usage))

    def abandoned(self) -> None:
        """Settle when the caller left: the usage is unknown, and this shows nothing about the cloud's health."""
        if not self._settled:
            self._settled = True
            self._available.abandoned(self._ticket)
            self._pay(self._state.ledger.settle(self._reservation, None))

    def origin(self) -> dict[str, Any]:
        """The fields of `Origin`, for every result of the cloud."""
        return {
            "source": "cloud",
            "node": self._state.name,
            "model": self.model,
            "device": None,
            "request_id": self.request.request_id,
            "attempts": (self._record("ok", 200),),
        }

    def _record(self, outcome: str, status: int | None = None, *, sent: bool = True) -> Attempt:
        duration = self._state.clock() - self._began
        return Attempt(self._state.name, outcome, 0.0, duration, sent, status, source="cloud")

    def _fail(self, problem: CloudError, failure: FailureKind, *, owed: bool) -> None:
        self._settled = True
        status = problem.status if isinstance(problem, CloudRejected | CloudUnavailable) else None
        problem.attempts = (self._record(type(problem).__name__, status, sent=owed or status is not None),)
        problem.request_id = self.request.request_id
        if failure is not FailureKind.NONE:
            self._available.failed(self._ticket, failure, problem.message)
        elif isinstance(problem, CloudRejected):
            self._available.succeeded(self._ticket)
        else:
            self._available.abandoned(self._ticket)
        if owed:
            self._pay(self._state.ledger.settle(self._reservation, None))
        else:
            self._state.ledger.release(self._reservation)
            self._pay(Decimal(0))

    def _translate(self, error: Exception) -> tuple[CloudError, FailureKind, bool]:
        """Our error, what it says of the cloud's health, and whether the request may have been billed.

        Nothing of the cloud's own message is taken over: it may quote the prompt.
        """
        if isinstance(error, openai.APIStatusError):
            no_budget = not _NO_BUDGET.isdisjoint({error.code, error.type})
            problem, failure, owed = self._status_error(402 if no_budget else error.status_code)
            if isinstance(problem, CloudUnavailable):
                problem.retry_after = retry_after_of(error.response.headers)
            return problem, failure, owed
        if isinstance(error, openai.APIConnectionError) and isinstance(error.__cause__, NotAnAnswer):
            error = error.__cause__
        if isinstance(error, openai.APIConnectionError):
            # What came of a request whose connection broke after it was made is not known.
            never_sent = isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout)
            return self._unavailable("cannot be reached"), FailureKind.CONNECTION, not never_sent
        if isinstance(error, NotAnAnswer):
            return self._unavailable(f"returned a malformed response: {error}"), FailureKind.SERVER, True
        return self._unavailable(f"broke off its answer ({type(error).__name__})"), FailureKind.CONNECTION, True

    def _status_error(self, status: int) -> tuple[CloudError, FailureKind, bool]:
        """What a status means. Only 400, 413 and 422 are about the request; our key, model or URL may be wrong too."""
        if status in _ABOUT_THE_REQUEST:
            text = f"the cloud at {self._state.name} rejected the request: HTTP {status}"
            return CloudRejected(text, node=self._state.name, status=status), FailureKind.NONE, False
        if status in {408, 429}:
            return self._unavailable(f"is busy (HTTP {status})", status), FailureKind.NONE, False
        if status >= 500:
            return self._unavailable(f"failed (HTTP {status})", status), FailureKind.SERVER, False
        hint = _HINTS.get(status, "check cloud.base_url")
        return self._unavailable(f"does not accept us (HTTP {status}): {hint}", status), FailureKind.NONE, False

    def _unavailable(self, what: str, status: int | None = None) -> CloudUnavailable:
        return CloudUnavailable(f"the cloud at {self._state.name} {what}", status=status)


# What a cloud adds to the name of a model for one of its versions: -2024-08-06, -0613, -001.
_VERSION = re.compile(r"-\d{4}-\d{2}-\d{2}|-\d{3,8}")


def check_model(asked: str, body: Any, others: Collection[str] | None = None) -> None:
    """Raise NotAnAnswer for a reply that names neither the model that was asked nor a version of it.

    With `others`, for chats, one of them may answer ("*": any), and a provider before a name (`openai/gpt-4o`) counts
    nothing.
    """
    answered = body.get("model") if isinstance(body, dict) else None
    if not answered or "*" in (others or ()):
        return
    if others is None and not _same(asked, str(answered)):
        raise NotAnAnswer(f"another model answered than {asked}; name in the settings the one that answers")
    plain = str(answered).rpartition("/")[2]
    if not any(_same(name.rpartition("/")[2], plain) for name in (asked, *(others or ()))):
        raise NotAnAnswer(f"another model answered than {asked}; if it may, add its name to cloud.answers_as.{asked}")


def _same(asked: str, answered: str) -> bool:
    """Whether these name one model, or the second a version of the first."""
    base = asked.removesuffix("-latest")
    return answered == asked or (answered.startswith(base) and _VERSION.fullmatch(answered, len(base)) is not None)


def usage_in(body: Any, bound: Usage, text: str = "") -> Usage | None:
    """The tokens that a reply with that text says it used; None if it does not say, or says what cannot be.

    None is counted at the request's `bound`, so that no reply can lower what was spent.
    """
    usage = body.get("usage") if isinstance(body, dict) else None
    usage = usage if isinstance(usage, dict) else {}
    prompt = usage.get("prompt_tokens")
    completion = usage.get("completion_tokens") if bound.completion_tokens else 0
    if type(prompt) is not int or type(completion) is not int:
        return None
    if not 1 <= prompt <= bound.prompt_tokens or not bool(text) <= completion <= bound.completion_tokens:
        return None
    return Usage(prompt, completion)
