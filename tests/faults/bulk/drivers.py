"""Drivers in processes of their own, which end where a test says.

One process imports everything and forks a child for each driver: an interpreter that imports pyarrow takes a second.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager

from tests.faults.bulk.data_sets import PARQUET_ROWS

ROWS_PER_FRAGMENT = PARQUET_ROWS // 4


class Drivers:
    """Starts drivers; `run` waits for one."""

    def __init__(self, process):
        self._process = process

    def start(self, source, out, **how):
        """The process id of a driver; `how` are the arguments of `_drive`."""
        return self._ask({"start": {"source": str(source), "out": str(out), **how}})

    def wait(self, pid):
        return self._ask({"wait": pid})

    def run(self, source, out, **how):
        return self.wait(self.start(source, out, **how))

    def _ask(self, order):
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def drivers(environment):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.bulk.drivers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        yield Drivers(process)
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


def _serve():
    import pyarrow.parquet  # noqa: F401  (imported before the forks)

    import backend_client.cli.dataset  # noqa: F401

    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                status = 70
                try:
                    status = _drive(**order["start"])
                finally:
                    os._exit(status)
        print(answer, flush=True)


def _drive(source, out, step=None, sign="SIGKILL", occurrence=1, largest_file=None, shard=None, deadly=None):
    """Run a job. Its process gets the signal when it reaches the step for the nth time, and SIGKILL when it reads the
    Parquet fragment that begins at the row `deadly`.
    """
    from backend_client.cli.main import main
    from tests.faults.bulk.steps import observe

    # Ignored in what a shell starts in the background, as this run of the tests may be.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    left = occurrence

    def kill(name):
        nonlocal left
        if name == step:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), getattr(signal, sign))

    observe(kill)
    if deadly is not None:
        _make_deadly(deadly)
    if largest_file is not None:
        # Bytecode that is cut off at the limit would break every later import of its module.
        sys.dont_write_bytecode = True
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 1)
    # Two thirds of a fragment in a process's memory at once would hide a fault of the order of its steps.
    arguments = [source, out, "--rows-per-fragment", str(ROWS_PER_FRAGMENT), "--max-rejected", "0.1", "--patience", "5"]
    return main(["embed-dataset", *arguments, *(["--shard", shard] if shard else [])])


def _make_deadly(row):
    """Kill this process when it reads the fragment of the Parquet file that begins at that row."""
    from backend_client.bulk import worker

    read = worker.read

    def reading(fragment, job):
        if fragment.file.form == "parquet" and fragment.start == row:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(fragment, job)

    worker.read = reading


if __name__ == "__main__":
    _serve()
