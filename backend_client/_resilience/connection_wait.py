"""Whether an attempt still waits for a free connection: that time shows nothing about the node."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol


class Waiter(Protocol):
    """An attempt. `queued`: it waits for one of the limited connections to its node."""

    queued: bool


current: ContextVar[Waiter | None] = ContextVar("attempt", default=None)
"""The attempt of this task, set by the dispatcher and marked by the transport."""


def mark(*, queued: bool) -> None:
    """Record that the attempt of this task begins or ends to wait for a connection."""
    waiter = current.get()
    if waiter is not None:
        waiter.queued = queued
