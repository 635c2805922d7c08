"""The services of the operating system beyond Python's own: all Linux-specific code of the node.

Supporting another system means another version of this file; docs/install.md lists what is missing for Windows. The
readers of /proc and /sys are elsewhere: where these are missing they return nothing, and the node serves without."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

from worker_node.core.environment import native_environment

if TYPE_CHECKING:
    import asyncio
    import subprocess
    from collections.abc import Callable, Sequence


_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, even by kill −9 and even inside native code.

    The tie is to the *thread* that started this process. Exits at once when the parent has died already.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit("the parent process is gone")


def start_module(module: str, *arguments: object) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a module of ours in a process without our secrets; the process and our end of a socket pair with it.

    Its first arguments are the descriptor of its own end, and our process id, for `end_with_parent`.
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
    return process, ours


def tethered(command: Sequence[str]) -> list[str]:
    """The command line that runs `command`, which knows nothing of it, and ends it when the calling process ends.

    A parent that is killed cleans nothing up; the kernel's parent death signal survives exec. The tie is to the calling
    *thread*: it must outlive the command, as one that waits for it does.
    """
    return [sys.executable, "-m", __name__, str(os.getpid()), *command]


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """The function that creates the edge process's event loop."""
    import uvloop  # noqa: PLC0415  (the edge process alone needs it)

    return uvloop.new_event_loop


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


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606
