"""Recoveries of the NPU, as the kernel announces them: it aborts the jobs of all processes, and no call need fail."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

_UEVENTS = 15
_KERNELS_GROUP = 1
_LARGEST = 8192
_RECOVERED = b"IVPU_PM_EVENT=IVPU_RECOVER"


def uevents() -> socket.socket | None:
    """A socket with the kernel's announcements; None where there is none, or this process may not have it."""
    family = getattr(socket, "AF_NETLINK", None)
    if family is None:
        return None
    found = None
    try:
        found = socket.socket(family, socket.SOCK_DGRAM, _UEVENTS)
        found.setblocking(False)
        found.bind((0, _KERNELS_GROUP))
    except OSError as error:
        if found is not None:
            found.close()
        log.info("recoveries of the NPU are not heard of: %s (RestrictAddressFamilies of the unit?)", error.strerror)
        return None
    return found


@contextmanager
def listening(source: socket.socket, recovered: Callable[[], None]) -> Iterator[None]:
    """Call `recovered` for each recovery that the kernel announces while the block runs; `source` is closed after it.

    As a callback of the event loop: it runs before the tasks that wait for results which have arrived together with the
    announcement.
    """
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            while True:
                content, sender = source.recvfrom(_LARGEST)
                # The kernel's own id is 0; other processes may send, too.
                if (not isinstance(sender, tuple) or sender[0] == 0) and _RECOVERED in content.split(b"\0"):
                    recovered()
        except BlockingIOError:
            pass
        except OSError as error:
            # Too many at once: some were lost, and one of them may have been a recovery.
            log.warning("announcements of the kernel were lost: %s", error.strerror)
            recovered()

    with source:
        loop.add_reader(source, read)
        try:
            yield
        finally:
            loop.remove_reader(source)
