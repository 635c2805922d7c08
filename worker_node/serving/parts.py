"""Resources of one task alone, such as a process that decodes audio: created on first use, closed with the node."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Protocol, TypeVar, cast

from worker_node.settings import NodeSettings


class TaskPart(Protocol):
    """A resource that must be closed when the node stops."""

    async def close(self) -> None: ...


P = TypeVar("P", bound=TaskPart)


class TaskParts:
    """The resources of all tasks, one of each kind, until `close`; made from the settings at the node's start."""

    def __init__(self, settings: NodeSettings | None = None) -> None:
        self._settings = settings or NodeSettings()
        self._parts: dict[Callable[[NodeSettings], TaskPart], TaskPart] = {}

    def of(self, make: Callable[[NodeSettings], P]) -> P:
        """The resource that `make` creates."""
        if make not in self._parts:
            self._parts[make] = make(self._settings)
        return cast("P", self._parts[make])

    async def close(self) -> None:
        """Close all resources, even if closing one of them fails."""
        async with AsyncExitStack() as stack:
            while self._parts:
                stack.push_async_callback(self._parts.popitem()[1].close)
