"""What the node asks of Windows alone: job objects, shared sockets, Ctrl-Break. Same names as `linux`."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
import winreg
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from worker_node.core.environment import native_environment

if TYPE_CHECKING:
    import asyncio

assert sys.platform == "win32"  # noqa: S101  (for mypy, which checks the node for Linux too)

# TerminateProcess of Python, taskkill and Task Manager; of os.kill and psutil; Ctrl-C. OUT_OF_TIME is faulthandler's.
ENDED_BY_OTHERS = frozenset({1, signal.SIGTERM, 0xC000013A})
OUT_OF_TIME = 1
_LINK_S, _LINK_LOOK_S = 60.0, 0.05
# Wall time in place of CPU time, which a busy machine stretches.
_WALL_PER_CPU = 4
_EXTENDED_LIMITS, _KILL_ON_JOB_CLOSE, _PROCESS_MEMORY = 9, 0x2000, 0x100


class _JobLimits(ctypes.Structure):
    """JOBOBJECT_EXTENDED_LIMIT_INFORMATION; the counters and limits between are not used."""

    _fields_ = (
        ("times", ctypes.c_int64 * 2),
        ("flags", ctypes.c_uint32),
        ("unused", ctypes.c_size_t * 5),
        ("io", ctypes.c_uint64 * 6),
        ("process_memory", ctypes.c_size_t),
        ("job_memory_and_peaks", ctypes.c_size_t * 3),
    )


def _enter_job(memory: int = 0) -> None:
    """Put this process and what it starts into a new job: they end when it does, however that happens."""
    kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel.CreateJobObjectW.restype = kernel.GetCurrentProcess.restype = ctypes.c_void_p
    job = ctypes.c_void_p(kernel.CreateJobObjectW(None, None))  # closed by the end of this process alone
    flags = _KILL_ON_JOB_CLOSE | (_PROCESS_MEMORY if memory else 0)
    limits = _JobLimits(flags=flags, process_memory=memory)
    process = ctypes.c_void_p(kernel.GetCurrentProcess())
    if not (
        kernel.SetInformationJobObject(job, _EXTENDED_LIMITS, ctypes.byref(limits), ctypes.sizeof(limits))
        and kernel.AssignProcessToJobObject(job, process)
    ):
        raise ctypes.WinError(ctypes.get_last_error())


_tie_children = functools.cache(_enter_job)


def start_module(module: str, *arguments: object) -> tuple[subprocess.Popen[bytes], Callable[[], socket.socket]]:
    """See `linux`. The child gets its end of the link by its standard input, and ends with that pipe."""
    _tie_children()
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    command = [sys.executable, "-m", module, *map(str, (0, os.getpid(), *arguments))]
    # A console of its own: none appears, and Ctrl-C is for the node, which decides when its children end.
    no_window = subprocess.CREATE_NO_WINDOW
    try:
        process = subprocess.Popen(  # noqa: S603  (this interpreter and a module of ours)
            command, stdin=reading, env=native_environment(), creationflags=no_window
        )
    except BaseException:
        for end in (ours, theirs):
            end.close()
        os.close(writing)
        raise
    finally:
        os.close(reading)
    weakref.finalize(process, os.close, writing)
    with contextlib.suppress(OSError):  # it has ended already
        os.write(writing, theirs.share(process.pid).hex().encode() + b"\n")
    return process, functools.partial(_linked, process, ours, theirs)


def _linked(process: subprocess.Popen[bytes], ours: socket.socket, theirs: socket.socket) -> socket.socket:
    """The link, once the child has taken its end, which must stay open here until then. Raises OSError."""
    until = time.monotonic() + _LINK_S
    ours.settimeout(_LINK_LOOK_S)
    with theirs:
        while process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                ours.recv(1)
                ours.settimeout(None)
                return ours
    ours.close()
    raise ConnectionError(f"a child process (status {process.poll()}) did not connect within {_LINK_S:.0f} s")


def link_to_parent(place: int, parent: int) -> socket.socket:  # noqa: ARG001  (as in `linux`)
    # A thread waits below for the end of this pipe. Libraries that ask what standard input is would wait for it when
    # they are loaded (numpy#24290), so standard input becomes another file.
    tie = os.dup(0)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123  (Windows' `nul` is no path)
        os.dup2(nothing.fileno(), 0)
    with os.fdopen(os.dup(tie), "rb", buffering=0) as pipe:
        if not (shared := pipe.readline()):
            sys.exit("the parent process is gone")
    link = socket.fromshare(bytes.fromhex(shared.decode()))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.sendall(b"\n")
    threading.Thread(target=lambda: os.read(tie, 1) or os._exit(1), daemon=True).start()
    return link


def tethered(command: Sequence[str]) -> list[str]:
    """See `linux`: the job ends the command."""
    _tie_children()
    return list(command)


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    import asyncio  # noqa: PLC0415  (children need none)

    return asyncio.new_event_loop


@contextlib.contextmanager
def stop_signals(loop: asyncio.AbstractEventLoop, stop: Callable[[], object]) -> Iterator[None]:
    """See `linux`. Ctrl-C and Ctrl-Break."""
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGBREAK)
    before = {number: signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop)) for number in stops}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def on_reload(loop: asyncio.AbstractEventLoop, reload: Callable[..., object], *arguments: object) -> None:
    """Nothing: POST /admin/reload and a changed file reload."""


def limit_memory(count: int) -> None:
    _enter_job(count)


def limit_cpu(seconds: float) -> None:
    """End this process with `OUT_OF_TIME` after CPU seconds, taken as wall time, even inside native code; 0: never."""
    faulthandler.cancel_dump_traceback_later()
    if seconds:
        faulthandler.dump_traceback_later(seconds * _WALL_PER_CPU, exit=True)


def pci_drivers(vendor: str) -> list[tuple[str, str | None, str | None]]:
    """PCI devices of a vendor: id, and version and date (month-day-year) of the driver as far as there is one."""
    system = r"SYSTEM\CurrentControlSet"
    found = []
    for hardware in _registry_keys(rf"{system}\Enum\PCI"):
        match = re.match(rf"VEN_{vendor}&DEV_([0-9A-F]{{4}})", hardware.upper())
        if match is None:
            continue
        for instance in _registry_keys(rf"{system}\Enum\PCI\{hardware}"):
            driver = _registry_value(rf"{system}\Enum\PCI\{hardware}\{instance}", "Driver")
            version, date = (
                None if driver is None else _registry_value(rf"{system}\Control\Class\{driver}", name)
                for name in ("DriverVersion", "DriverDate")
            )
            found.append((match[1].lower(), version, date))
    return found


def _registry_keys(path: str) -> list[str]:
    with contextlib.suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, path) as key:
        return [winreg.EnumKey(key, number) for number in range(winreg.QueryInfoKey(key)[0])]
    return []


def _registry_value(path: str, name: str) -> str | None:
    with contextlib.suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, path) as key:
        return str(winreg.QueryValueEx(key, name)[0])
    return None
