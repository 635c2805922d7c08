"""Loading slots: on each device one engine at a time compiles, whether for a first load, a restart or a successor."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext

FREE: AbstractAsyncContextManager[object] = nullcontext()


class LoadingSlots:
    """One slot for each device, granted in order of request."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}

    def slot(self, device: str) -> AbstractAsyncContextManager[object]:
        """What an engine of the device holds while it loads."""
        return self._locks.setdefault(device, asyncio.Lock())
