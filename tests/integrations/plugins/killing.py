"""A pytest plugin: after KILL_AFTER tests the process KILL_VICTIM, one of the nodes, is killed."""

import os
import signal

_left = int(os.environ["KILL_AFTER"])


def pytest_runtest_teardown():
    global _left  # noqa: PLW0603
    _left -= 1
    if _left == 0:
        os.kill(int(os.environ["KILL_VICTIM"]), signal.SIGKILL)
