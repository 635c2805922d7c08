"""Run a command that dies with the process that started it: `python -m worker_node.models.tether PARENT_PID
COMMAND…`.

A parent that is killed with -9 cleans nothing up, so the kernel is asked to do it: the "parent death signal"
survives exec, hence a program that knows nothing of it (pip) can be tethered too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def tethered(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` tethered to the calling process.

    The tie is to the calling *thread*: it must outlive the command, as one that waits for it does.
    """
    return [sys.executable, "-m", __name__, str(os.getpid()), *command]


def tie_to_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exit at once when that has already happened."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent process is gone")


if __name__ == "__main__":
    tie_to_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606
