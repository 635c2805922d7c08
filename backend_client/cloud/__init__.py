"""The cloud by itself: an OpenAI-compatible API behind the methods of `NPUClient`, with prices and a spend cap.

    from backend_client.cloud import CloudClient

`InferenceClient` uses it as the fallback of the nodes. The OpenAI SDK, which is slow to import, is imported for
`CloudClient` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from backend_client.errors import InvalidArgument, SpendCapReached
from backend_client.results import Usage
from backend_client.settings import CloudSettings, Price

if TYPE_CHECKING:
    from backend_client.cloud.backend import CloudClient

__all__ = ["CloudClient", "CloudSettings", "Ledger", "Price", "Tally"]


def __getattr__(name: str) -> Any:
    if name == "CloudClient":
        from backend_client.cloud.backend import CloudClient  # noqa: PLC0415  (imports the OpenAI SDK)

        return CloudClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_MILLION = Decimal(1_000_000)


@dataclass(frozen=True, slots=True)
class Tally:
    """Calls and tokens of one side. `estimated_calls` had no usage in their answer and are counted at their bound.

    `joules` are the nodes', of the calls for which they could measure them. Calls of different models that ran at the
    same time on one device each count all of its energy.
    """

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    estimated_calls: int = 0
    cost: Decimal = Decimal(0)
    joules: float = 0.0

    def plus(
        self, usage: Usage, cost: Decimal = Decimal(0), *, estimated: bool = False, joules: float | None = None
    ) -> Tally:
        """This tally with one more call."""
        return replace(
            self,
            calls=self.calls + 1,
            prompt_tokens=self.prompt_tokens + usage.prompt_tokens,
            completion_tokens=self.completion_tokens + usage.completion_tokens,
            estimated_calls=self.estimated_calls + estimated,
            cost=self.cost + cost,
            joules=self.joules + (joules or 0.0),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """What a cloud call may cost at most, held until its usage is known."""

    model: str
    bound: Usage
    cost: Decimal


class Ledger:
    """Exact to the token. The cap can not be overrun: every call reserves the most that it may cost before it is
    sent. `cap` is what the cloud may cost in all; None without one.
    """

    def __init__(self, prices: Mapping[str, Price], cap: Decimal | None = None) -> None:
        self._prices = prices
        self.cap = cap
        self._open: set[Reservation] = set()
        self.local = Tally()
        self.cloud = Tally()

    @property
    def left(self) -> Decimal | None:
        """What the cap leaves; None without a cap."""
        if self.cap is None:
            return None
        return max(Decimal(0), self.cap - self.cloud.cost - sum(reservation.cost for reservation in self._open))

    def kept_local(self, usage: Usage, joules: float | None) -> None:
        """Record a call that a node served."""
        self.local = self.local.plus(usage, joules=joules)

    def reserve(self, model: str, bound: Usage, *, capped: bool = False) -> Reservation:
        """Reserve the most that a call may cost. Raises SpendCapReached, also for a model without a price.

        `capped`: another cap than this one holds for the call, too.

        Raises InvalidArgument for a negative bound, which would raise the cap.
        """
        if min(bound.prompt_tokens, bound.completion_tokens) < 0:
            raise InvalidArgument("a call cannot use less than 0 tokens")
        if (capped or self.cap is not None) and model not in self._prices:
            raise SpendCapReached(f"the cloud was not asked: there is a spend cap, and cloud.prices lacks {model}")
        cost = self._cost(model, bound)
        left = self.left
        if left is not None and cost > left:
            raise SpendCapReached(
                f"the cloud was not asked: this may cost up to {cost.normalize():f} with {model}, "
                f"and the spend cap leaves {left.normalize():f}"
            )
        reservation = Reservation(model, bound, cost)
        self._open.add(reservation)
        return reservation

    def settle(self, reservation: Reservation, usage: Usage | None) -> Decimal:
        """Record the usage of a call, and return its cost. Without a usage it counts at its bound: it may be billed."""
        self.release(reservation)
        estimated = usage is None or min(usage.prompt_tokens, usage.completion_tokens) < 0
        used = reservation.bound if usage is None or estimated else usage
        cost = self._cost(reservation.model, used)
        self.cloud = self.cloud.plus(used, cost, estimated=estimated)
        return cost

    def release(self, reservation: Reservation) -> None:
        """Release the reservation of a call that was refused or never arrived."""
        self._open.discard(reservation)

    def _cost(self, model: str, usage: Usage) -> Decimal:
        price = self._prices.get(model)
        if price is None:
            return Decimal(0)
        return (usage.prompt_tokens * price.input + usage.completion_tokens * price.output) / _MILLION
