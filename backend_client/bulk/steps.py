"""The steps of the protocol that commits a fragment, by name, for tests that stop a process at each of them."""

from __future__ import annotations

from collections.abc import Callable

STEPS = (
    "job described",
    "plan stored",
    "fragment begun",
    "rows read",
    "rows served",
    "rows written",
    "temporary file complete",
    "rejected rows committed",
    "data committed",
    "receipt written",
    "all fragments committed",
    "success written",
)
"""In the order in which a run of one fragment passes them."""

_observers: list[Callable[[str], None]] = []


def observe(observer: Callable[[str], None]) -> None:
    """Call `observer` with the name of each step that this process reaches."""
    _observers.append(observer)


def reached(step: str) -> None:
    """This process has completed the step."""
    for observer in _observers:
        observer(step)
