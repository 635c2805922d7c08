"""Functions that preparation processes run in tests: slow, greedy, crashing."""

import os
import time
from pathlib import Path


def echo(value):
    return value


def spin():
    while True:
        pass


def hang(marker):
    """Says that it runs, then waits without using the CPU."""
    Path(marker).write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(600)


def take_memory():
    return len(bytearray(4 * 1024**3))


def crash():
    os.abort()


def fail(secret):
    raise ValueError(secret)
