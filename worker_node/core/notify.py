"""Notifies the service manager that the node listens, is alive or stops (systemd's sd_notify, in datagrams)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import asynccontextmanager

from worker_node.core.operating_system import send_datagram

log = logging.getLogger(__name__)

# How often the status is sent if no watchdog wants it more often.
_STATUS_PERIOD_S = 10.0


class ServiceManager:
    """The socket of the service manager; without one, as in a shell, every call does nothing.

    `address` is the path of a datagram socket, with `@` first for an abstract one. `watchdog_s` is the silence after
    which the manager takes the node for hung and kills it; None when it does not watch.
    """

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        self._address = address
        self._period_s = _STATUS_PERIOD_S if watchdog_s is None else watchdog_s / 2
        self._watched = watchdog_s is not None

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] | None = None) -> ServiceManager:
        """Read the manager's variables and remove them, so that engines cannot notify in the node's name."""
        variables = os.environ if environment is None else environment
        address = variables.pop("NOTIFY_SOCKET", None)
        watchdog_us = variables.pop("WATCHDOG_USEC", None)
        watched_pid = variables.pop("WATCHDOG_PID", None)
        watched = watchdog_us is not None and watchdog_us.isdecimal() and int(watchdog_us) > 0
        if not watched or watched_pid not in {None, str(os.getpid())}:
            return cls(address)
        return cls(address, int(watchdog_us or 0) / 1e6)

    @asynccontextmanager
    async def attended(self, status: Callable[[], str]) -> AsyncIterator[None]:
        """Report that the node is up and, while the block runs, that its event loop turns, with `status` in words.

        Up means that it listens. Its models may still load, for minutes on an NPU; /health says `starting` until then,
        which is for clients and probes. A manager that waited for them would kill the node for a slow compiler.
        """

        async def keep_telling() -> None:
            while self._address is not None:
                await asyncio.sleep(self._period_s)
                self._tell(*(["WATCHDOG=1"] if self._watched else []), f"STATUS={status()}")

        self._tell("READY=1", f"STATUS={status()}")
        beat = asyncio.create_task(keep_telling(), name="service manager")
        try:
            yield
        finally:
            beat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beat

    def stopping(self) -> None:
        """Report that the node drains and will end."""
        self._tell("STOPPING=1")

    def _tell(self, *assignments: str) -> None:
        if self._address is None:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            send_datagram(address, "\n".join(assignments).encode())
        except OSError as error:
            # The node serves on without it.
            log.warning("the service manager at %s cannot be notified of %s: %s", self._address, assignments[0], error)
            self._address = None
