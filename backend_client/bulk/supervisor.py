"""A run in a child process: a fragment that kills its process is found and quarantined, and the others are done.

The child reports which fragments are under way; when it dies, the next child processes one at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

# Deaths without a fragment done in between: then it is not the fragments.
_MOST_IN_A_ROW = 20
_FORWARDED = (signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.5

Deaths = tuple[frozenset[str], ...]
"""The fragments that were under way at each death of an earlier process: a single one is to blame for it."""
Note = Callable[[str, bool], None]
"""Called with a fragment's id when its processing begins (True) and when it has ended (False)."""


def supported() -> bool:
    """Whether this platform can run a job in a child process."""
    return hasattr(os, "fork")


def supervise(work: Callable[[Deaths, Note], int]) -> int:
    """Run `work` in a child process, again after each death. Returns its status; 1, with a message, when it
    gives up.

    To be called before this process has threads. SIGTERM and SIGINT are passed on; the child ends with this process.
    """
    deaths: Deaths = ()
    in_a_row = 0
    while True:
        end = _once(work, deaths)
        if end.status >= 0:
            return end.status
        name = signal.Signals(-end.status).name
        if end.stopped:
            return 130
        in_a_row = 1 if end.progressed else in_a_row + 1
        if not end.under_way:
            return _give_up(f"the process was ended by {name} while no fragment was under way")
        if in_a_row >= _MOST_IN_A_ROW:
            return _give_up(
                f"the process was ended by {name}, {in_a_row} times in a row without a fragment done in between"
            )
        deaths += (end.under_way,)
        print(
            f"npu-client: the process was ended by {name} with {len(end.under_way)} fragments under way; it is started "
            "again",
            file=sys.stderr,
        )


def _give_up(what: str) -> int:
    print(f"npu-client: {what}; what was committed is kept: the same command continues", file=sys.stderr)
    return 1


@dataclass(slots=True)
class _End:
    """How a child ended: `status` is negative for a signal. `stopped`: by a signal that was passed on to it."""

    status: int = 0
    under_way: frozenset[str] = frozenset()
    progressed: bool = False
    stopped: bool = False


def _once(work: Callable[[Deaths, Note], int], deaths: Deaths) -> _End:
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(work, deaths, writer, os.getpid()))
    end, under_way = _End(), set[str]()
    # Blocked until both processes have their handlers: a signal in between would be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        child.start()
        writer.close()
        with reader, _passed_on(child, end):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
            while True:
                # With a limit: a signal that arrives just before a call that blocks is handled only after it.
                if not reader.poll(_LOOK_S):
                    continue
                fragment, begun = reader.recv()
                if begun:
                    under_way.add(fragment)
                else:
                    under_way.discard(fragment)
                    end.progressed = True
    except EOFError:
        child.join()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    end.status = child.exitcode or 0
    end.under_way = frozenset(under_way)
    return end


@contextlib.contextmanager
def _passed_on(child: BaseProcess, end: _End) -> Iterator[None]:
    """Signals that arrive while the block runs go to the child."""

    def pass_on(number: int, _: object) -> None:
        end.stopped = True
        os.kill(child.pid or 0, number)

    # A shell starts what goes on in the background with SIGINT ignored, and so it stays.
    heeded = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _child(work: Callable[[Deaths, Note], int], deaths: Deaths, writer: Connection, parent: int) -> None:
    """What the child does; does not return."""
    # A process group of its own: Ctrl-C of a terminal reaches it once, through its parent.
    os.setpgid(0, 0)
    _end_with(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    status = work(deaths, lambda fragment, begun: writer.send((fragment, begun)))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _end_with(parent: int) -> None:
    """Have this process killed when its parent ends, where the system can do that; at once if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
