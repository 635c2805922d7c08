"""What the node asks of Linux alone: prctl, inherited descriptors, signals, limits, uvloop. See `windows`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from typing import TYPE_CHECKING

from worker_node.core.environment import native_environment

if TYPE_CHECKING:
    import asyncio
    import subprocess
    from collections.abc import Callable, Iterator, Sequence

assert sys.platform != "win32"  # noqa: S101  (for mypy, which checks the node for Windows too)

# Exit statuses of a process that another one ended, and of one whose CPU time is used up (`limit_cpu`).
ENDED_BY_OTHERS = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT})
OUT_OF_TIME = -signal.SIGPROF
_PR_SET_PDEATHSIG = 1


def _end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, even by kill −9 and even inside native code.

    The tie is to the *thread* that started this process. Exits at once when the parent has died already.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit("the parent process is gone")


def start_module(module: str, *arguments: object) -> tuple[subprocess.Popen[bytes], Callable[[], socket.socket]]:
    """Start a module of ours without our secrets, and what waits for the link with it, which may raise OSError."""
    import subprocess  # noqa: PLC0415  (children start nothing)

    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", module, *map(str, (theirs.fileno(), os.getpid(), *arguments))]
        try:
            process = subprocess.Popen(  # noqa: S603  (this interpreter and a module of ours)
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=native_environment(),
                # Ctrl-C is for the node, which decides when its children end.
                process_group=0,
            )
        except BaseException:
            ours.close()
            raise
    return process, lambda: ours


def link_to_parent(place: int, parent: int) -> socket.socket:
    """The link of a process that `start_module` started. From now on it ends with its parent."""
    _end_with_parent(parent)
    return socket.socket(fileno=place)


def tethered(command: Sequence[str]) -> list[str]:
    """The command line that runs `command`, which knows nothing of it, and ends it when the calling process ends.

    A parent that is killed cleans nothing up; the kernel's parent death signal survives exec. The tie is to the calling
    *thread*: it must outlive the command, as one that waits for it does.
    """
    run = f"from {__name__} import run_tethered; run_tethered()"
    return [sys.executable, "-c", run, str(os.getpid()), *command]


def run_tethered() -> None:
    _end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    import uvloop  # noqa: PLC0415  (the edge process alone needs it)

    return uvloop.new_event_loop


@contextlib.contextmanager
def stop_signals(loop: asyncio.AbstractEventLoop, stop: Callable[[], object]) -> Iterator[None]:
    """Have `loop` call `stop` when this process is asked to end, while the block runs."""
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


def on_reload(loop: asyncio.AbstractEventLoop, reload: Callable[..., object], *arguments: object) -> None:
    """Have `loop` call `reload` on SIGHUP, until `stop_signals` ends."""
    loop.add_signal_handler(signal.SIGHUP, reload, *arguments)


def limit_memory(count: int) -> None:
    """Limit the address space of this process; it leaves no core file."""
    resource.setrlimit(resource.RLIMIT_AS, (count, count))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_cpu(seconds: float) -> None:
    """End this process with `OUT_OF_TIME` after CPU seconds, even inside native code; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def pci_drivers(_vendor: str) -> list[tuple[str, str | None, str | None]]:
    """PCI devices of a vendor: id, and version and date of the driver as far as there is one; none here: see /sys."""
    return []
