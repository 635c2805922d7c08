"""Run a command that dies with the process that started it: `python -m worker_node.models.tether PARENT_PID
COMMAND…`.

A parent that is killed with -9 cleans nothing up, so the kernel is asked to do it: the "parent death signal"
survives exec, hence a program that knows nothing of it (pip) can be tethered too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from worker_node.core.operating_system import end_with_parent


def tethered(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` tethered to the calling process.

    The tie is to the calling *thread*: it must outlive the command, as one that waits for it does.
    """
    return [sys.executable, "-m", __name__, str(os.getpid()), *command]


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606
