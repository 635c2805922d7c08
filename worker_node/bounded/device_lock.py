"""One generation at a time on an NPU, for all processes that lock the same file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from worker_node.core.errors import EngineUnavailable
from worker_node.core.operating_system import try_lock

_POLL_S = 0.02


class DeviceLock:
    """An advisory lock (flock) on a file; the kernel frees it when its holder dies."""

    def __init__(self, path: Path, wait_s: float) -> None:
        self.path = path
        self.wait_s = wait_s
        self._turn = asyncio.Lock()  # callers of this process take turns in the order of their arrival

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold the lock while the block runs. Raises EngineUnavailable when it cannot be had within `wait_s`."""
        until = time.monotonic() + self.wait_s
        try:
            async with asyncio.timeout(self.wait_s):
                await self._turn.acquire()
        except TimeoutError:
            raise self._busy() from None
        try:
            try:
                file = self.path.open("a")
            except OSError as error:
                raise EngineUnavailable(
                    f"the lock file {self.path} cannot be opened ({error.strerror}); set OV_GENAI_NPU_LOCK"
                ) from None
            with file:
                while not try_lock(file):
                    if time.monotonic() >= until:
                        raise self._busy()
                    await asyncio.sleep(_POLL_S)
                yield
        finally:
            self._turn.release()

    def _busy(self) -> EngineUnavailable:
        return EngineUnavailable(
            f"the NPU was busy with other jobs for {self.wait_s:g} s; try again later", retry_after=self.wait_s
        )
