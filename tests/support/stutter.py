"""Run tests while random ones of their processes are stopped for a moment, again and again: finds tests that race.

    python -m tests.support.stutter --seed 1 -- python -m pytest -q tests/faults

Any process of a busy machine may not be run for a second: pytest, a node, an engine. A test that fails here and is not
about that time fails in the suite one day.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

_MARK = "STUTTER_RUN"


def processes(mark):
    """The processes that were started with this mark in their environment, but for this one."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def stop(pid, seconds):
    """Stop a process for so long, unless a test has stopped it."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "T":
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=float, default=1.5, metavar="SECONDS", help="of a stop; most are shorter")
    parser.add_argument("--every", type=float, default=0.4, metavar="SECONDS", help="between the beginnings of stops")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    chance, mark, stops = random.Random(options.seed), f"{_MARK}={os.getpid()}", 0
    child = subprocess.Popen(options.command, env=os.environ | {_MARK: str(os.getpid())})
    while child.poll() is None:
        time.sleep(options.every * chance.uniform(0.5, 1.5))
        if found := list(processes(mark.encode())):
            stops += 1
            seconds = min(options.longest, chance.expovariate(3 / options.longest))
            threading.Thread(target=stop, args=(chance.choice(found), seconds), daemon=True).start()
    time.sleep(options.longest)
    print(f"{stops} stops", file=sys.stderr)
    return child.returncode


if __name__ == "__main__":
    sys.exit(main())
