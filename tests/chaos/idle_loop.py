"""How late an event loop without any work wakes on this machine: the part of a loop's lag that is nobody's fault.

    python -m tests.chaos.idle_loop

samples twice a second, as a node that serves does, until its standard input ends, and prints the seconds as JSON.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

PERIOD_S = 0.5


async def sample() -> list[float]:
    """How late each wake-up was, in seconds, until standard input ends."""
    lags: list[float] = []
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    while not ended.done():
        due = time.monotonic() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        lags.append(max(0.0, time.monotonic() - due))
    return lags


@contextmanager
def beside() -> Iterator[list[float]]:
    """Sample in a process beside the block; the list is filled when the block ends."""
    lags: list[float] = []
    command = [sys.executable, "-m", "tests.chaos.idle_loop"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield lags
        finally:
            printed, _ = process.communicate()
            lags.extend(json.loads(printed))


def main() -> None:
    """Sample and print."""
    print(json.dumps(asyncio.run(sample())))


if __name__ == "__main__":
    main()
