"""What the node asks of Linux alone: prctl, inherited descriptors, signals, limits, uvloop. See `portable`."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import getpass
import grp
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

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
    """Start a module of ours in a process without our secrets, and what waits for the link with it.

    Its first two arguments are for `link_to_parent`. Waiting raises OSError.
    """
    import subprocess  # noqa: PLC0415  (children start nothing)

    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", module, *map(str, (theirs.fileno(), os.getpid(), *arguments))]
        try:
            process = subprocess.Popen(  # noqa: S603  (this interpreter and a module of ours)
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=native_environment()
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
    """Become the command that `tethered` was given."""
    _end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """The function that creates the edge process's event loop."""
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


def lock(file: IO[str] | int) -> None:
    """Lock a file against other processes, waiting for them. Ends when the file is closed."""
    fcntl.flock(file, fcntl.LOCK_EX)


def try_lock(file: IO[str] | int) -> bool:
    """Lock a file unless another process has it locked. Returns whether it is ours now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: IO[str] | int) -> None:
    """Unlock a file before it is closed."""
    fcntl.flock(file, fcntl.LOCK_UN)


def limit_memory(count: int) -> None:
    """Limit the address space of this process to `count` bytes; it leaves no core file."""
    resource.setrlimit(resource.RLIMIT_AS, (count, count))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_cpu(seconds: float) -> None:
    """End this process with `OUT_OF_TIME` after CPU seconds, even inside native code; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def allow_files(count: int) -> int:
    """Raise our own limit of open files to `count`, as far as we may. Returns how many of these can be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def lower_priority(nice: int) -> None:
    """Add to the nice value of every thread of this process; threads that are made later have it from their maker."""
    for task in Path("/proc/self/task").iterdir():
        thread = int(task.name)
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)


def since_boot() -> float:
    """Seconds that go on while the machine sleeps, unlike `time.monotonic`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def cores() -> set[int]:
    """The processors that this process may use."""
    return os.sched_getaffinity(0)


def user() -> str:
    """The name, or the number, of the user who asks."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def group_name(number: int) -> str:
    """The name, or the number, of a group."""
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def flush(path: Path) -> None:
    """Have a file or directory written to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def own_address(sock: socket.socket) -> None:
    """Before `bind`: also where connections of a process before us linger, and shared with no other process."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def send_datagram(address: str, data: bytes) -> None:
    """Send to a socket of the file system, without waiting. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto(data, address)


@contextlib.contextmanager
def shared_file() -> Iterator[Path]:
    """An empty file that this process's children can open while the block runs; nothing is left if it is killed."""
    descriptor = os.memfd_create("shared", os.MFD_CLOEXEC)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)
