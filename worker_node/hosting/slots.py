"""Turns at loading: one engine at a time compiles for a device, first loads, restarts and successors alike."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext

FREE: AbstractAsyncContextManager[object] = nullcontext()


class LoadingSlots:
    """One slot for each device, given in the order in which it is asked for."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}

    def slot(self, device: str) -> AbstractAsyncContextManager[object]:
        """What an engine of the device holds while it loads."""
        return self._locks.setdefault(device, asyncio.Lock())
