"""Drivers in processes of their own, which end where a test says.

They are forked from a process that has imported everything: an interpreter that imports pyarrow takes a second.
"""

import multiprocessing
import os
import resource
import signal
import sys

from tests.faults.bulk.data_sets import PARQUET_ROWS

ROWS_PER_FRAGMENT = PARQUET_ROWS // 4


class Drivers:
    """Starts drivers over the fleet of an environment; `run` waits for one."""

    def __init__(self, environment):
        self._environment = environment
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["__main__", "backend_client.cli.dataset", __name__])

    def start(self, source, out, **how):
        """The process of a driver; `how` are the arguments of `_drive`."""
        given = {"source": str(source), "out": str(out), "environment": self._environment, **how}
        process = self._context.Process(target=_drive, kwargs=given)
        process.start()
        return process

    def wait(self, process):
        process.join(60)
        status = process.exitcode
        process.close()
        return status

    def run(self, source, out, **how):
        return self.wait(self.start(source, out, **how))


def _drive(
    source, out, environment, step=None, sign="SIGKILL", occurrence=1, largest_file=None, shard=None, deadly=None
):
    """Run a job. Its process gets the signal when it reaches the step for the nth time, and SIGKILL when it reads the
    Parquet fragment that begins at the row `deadly`.
    """
    from backend_client.cli.main import main
    from tests.faults.bulk.steps import observe

    os.environ |= environment
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
    sys.exit(main(["embed-dataset", *arguments, *(["--shard", shard] if shard else [])]))


def _make_deadly(row):
    """Kill this process when it reads the fragment of the Parquet file that begins at that row."""
    from backend_client.bulk import worker

    read = worker.read

    def reading(fragment, job):
        if fragment.file.form == "parquet" and fragment.start == row:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(fragment, job)

    worker.read = reading
