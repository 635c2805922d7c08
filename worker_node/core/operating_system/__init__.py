"""The services of the operating system beyond Python's own. What differs as a whole is in `linux` and `windows`, which
have the same names; the rest is here, in branches.

Readers of /proc and /sys are elsewhere: where these are missing they return nothing, and the node serves without."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

if sys.platform == "win32":
    from worker_node.core.operating_system.windows import *  # noqa: F403
else:
    from worker_node.core.operating_system.linux import *  # noqa: F403

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl
    import grp
    import resource

WINDOWS = sys.platform == "win32"
_LOCK_LOOK_S = 0.005


def lock(file: IO[str] | int) -> None:
    """Lock a file against other processes, waiting for them. Ends when the file is closed."""
    while not try_lock(file):
        time.sleep(_LOCK_LOOK_S)


def try_lock(file: IO[str] | int) -> bool:
    """Lock a file unless another process has it locked. Returns whether it is ours now."""
    try:
        if sys.platform == "win32":
            msvcrt.locking(_lock_byte(file), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(file: IO[str] | int) -> None:
    if sys.platform == "win32":
        msvcrt.locking(_lock_byte(file), msvcrt.LK_UNLCK, 1)
    else:
        fcntl.flock(file, fcntl.LOCK_UN)


def _lock_byte(file: IO[str] | int) -> int:
    """The descriptor, at a byte behind what any file holds: on Windows no other process can read a locked one."""
    descriptor = file if isinstance(file, int) else file.fileno()
    os.lseek(descriptor, 1 << 30, os.SEEK_SET)
    return descriptor


def allow_files(count: int) -> int:
    """Raise our own limit of open files to `count`, as far as we may. Returns how many of these can be open."""
    if sys.platform != "win32":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        count = count if hard == resource.RLIM_INFINITY else min(count, hard)
        if soft != resource.RLIM_INFINITY and soft < count:
            resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    return count


def lower_priority(nice: int) -> None:
    """Add to the nice value of all threads of this process; on Windows any sets the class below normal."""
    if sys.platform == "win32" and nice > 0:
        import psutil  # noqa: PLC0415  (slow to import, for every child process)

        psutil.Process().nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
    if sys.platform == "linux":
        for task in Path("/proc/self/task").iterdir():
            thread = int(task.name)
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)


def since_boot() -> float:
    """Seconds that go on while the machine sleeps, unlike `time.monotonic` on Linux."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def group_name(number: int) -> str:
    if sys.platform != "win32":
        with contextlib.suppress(KeyError):
            return grp.getgrgid(number).gr_name
    return str(number)


def flush(path: Path) -> None:
    """Have a file or directory written to disk; Windows flushes no directory."""
    if sys.platform == "win32" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def own_address(sock: socket.socket) -> None:
    """Before `bind`: also where connections of a process before us linger, and shared with no other process."""
    if sys.platform == "win32":
        # SO_REUSEADDR would let another process take the connections.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
    else:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def send_datagram(address: str, data: bytes) -> None:
    """Send to a socket of the file system, without waiting. Raises OSError; always on Windows, which has none."""
    if sys.platform == "win32":
        raise OSError(f"{address}: this system has no such sockets for {len(data)} bytes")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto(data, address)


@contextlib.contextmanager
def shared_file() -> Iterator[Path]:
    """An empty file for this process's children while the block runs; Linux keeps nothing of it after a kill."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("shared", os.MFD_CLOEXEC)
        try:
            yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return
    import tempfile  # noqa: PLC0415  (slow to import, for every child process)

    descriptor, name = tempfile.mkstemp()
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        with contextlib.suppress(OSError):
            Path(name).unlink()
