"""Required means proven: checks that the NPU worked for a request that requires it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import TypeVar

from worker_node.core.errors import NpuNotProven
from worker_node.core.types import Device, RequestContext, Route

T = TypeVar("T")


@dataclass(slots=True)
class Proof:
    """Judges the NPU's busy time for one request.

    `strict` refuses a counter that cannot be read. `unread`: it could not be read, and the request passed.
    """

    route: Route
    required: bool
    strict: bool
    unread: bool = False

    @classmethod
    def of(cls, route: Route, context: RequestContext, *, strict: bool) -> Proof:
        """The proof that a request needs on its route."""
        required = context.require_device is Device.NPU and route.device is Device.NPU and not context.own_proof
        return cls(route, required, strict)

    def check(self, busy_us: int | None) -> None:
        """Raise NpuNotProven if the request requires the NPU and its busy time does not prove that the NPU ran it."""
        if not self.required:
            return
        what = f"{self.route.model}: the request requires the NPU, and"
        if busy_us is None:
            if self.strict:
                raise NpuNotProven(
                    f"{what} its busy counter cannot be read (/health says why); npu_require_proof = false lets it pass"
                )
            self.unread = True
        elif busy_us <= 0:
            raise NpuNotProven(f"{what} its busy counter did not move during the run; try again or examine the device")


async def after_first(events: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """The same events, begun: what goes wrong before the first of them is raised here and now."""
    first = await anext(events, None)
    return _resumed(first, events)


async def _resumed(first: T | None, events: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    if first is not None:
        yield first
        async for event in events:
            yield event
