"""What one task alone needs while the node runs, as a process that decodes audio: made when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Protocol, TypeVar, cast

from worker_node.settings import NodeSettings


class TaskPart(Protocol):
    """Something that must be closed when the node stops."""

    async def close(self) -> None: ...


P = TypeVar("P", bound=TaskPart)


class TaskParts:
    """The parts of all tasks, one of each kind, until `close`, as the settings at the start of the node have them."""

    def __init__(self, settings: NodeSettings | None = None) -> None:
        self._settings = settings or NodeSettings()
        self._parts: dict[Callable[[NodeSettings], TaskPart], TaskPart] = {}

    def of(self, make: Callable[[NodeSettings], P]) -> P:
        """The part that `make` makes."""
        if make not in self._parts:
            self._parts[make] = make(self._settings)
        return cast("P", self._parts[make])

    async def close(self) -> None:
        """Close all parts, also where one of them cannot be."""
        async with AsyncExitStack() as stack:
            while self._parts:
                stack.push_async_callback(self._parts.popitem()[1].close)
