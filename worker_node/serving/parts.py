"""What one task alone needs while the node runs, as a process that decodes audio: made when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar, cast


class TaskPart(Protocol):
    """Something that must be closed when the node stops."""

    async def close(self) -> None: ...


P = TypeVar("P", bound=TaskPart)


class TaskParts:
    """The parts of all tasks, one of each kind, until `close`."""

    def __init__(self) -> None:
        self._parts: dict[Callable[[], TaskPart], TaskPart] = {}

    def of(self, make: Callable[[], P]) -> P:
        """The part that `make` makes."""
        if make not in self._parts:
            self._parts[make] = make()
        return cast("P", self._parts[make])

    async def close(self) -> None:
        """Close all parts."""
        while self._parts:
            await self._parts.popitem()[1].close()
