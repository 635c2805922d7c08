"""How pytest-xdist spreads the suite over its workers: file by file, and the shared `node` on as few as possible.

pytest-xdist 3.8 ignores the mark `xdist_group` under pytest 9.2: it appends the group to a private attribute that
pytest no longer reads. So what a file needs is read from its source.
"""

import ast
import functools
import os
import re
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

# The unit tests are many and short: they fill the gaps at the end.
ORDER = ("tests/real/", "tests/contract/", "tests/faults/", "tests/unit/")


def worker_count():
    """One more than the cores that this process may use, since many tests wait; at most six."""
    return min(6, len(os.sched_getaffinity(0)) + 1)


def take_core(worker):
    """Pin this worker and the nodes that it starts to one core, round-robin: `worker` is "gw0", "gw1" …

    OpenVINO starts a thread per core it may use, and these threads spin while they wait for each other: one test file
    used 54, 40 and 33 s of CPU time on 4, 2 and 1 cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@functools.cache
def uses_shared_node(path):
    """Whether a test or fixture of that file takes `node`, and the file has none of its own."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        node for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))) if isinstance(node, functions)
    ]
    wanted = {
        argument.arg
        for function in found
        if function.name.startswith("test_") or function.decorator_list
        for argument in function.args.args
    }
    return "node" in wanted - {function.name for function in found}


@functools.cache
def longest_first(path):
    """A sort key: first what is given most time, then by directory."""
    limits = re.findall(r"mark\.timeout\((\d+)\)", Path(path).read_text(encoding="utf-8"))
    directory = next((i for i, start in enumerate(ORDER) if path.startswith(start)), len(ORDER))
    return -max(map(int, limits), default=0), directory, path


class SharedNodeScheduling(LoadScopeScheduling):
    """Hands out files. Those that use the shared node go to a worker that has it, unless nothing else is left."""

    def __init__(self, config, log=None):
        super().__init__(config, log)
        self._with_node = set()

    def _split_scope(self, nodeid):
        return nodeid.split("::")[0]

    def _assign_work_unit(self, node):
        """`node` is xdist's word for a worker."""
        path = min(self.workqueue, key=lambda path: self._rank(node, path))
        if uses_shared_node(path):
            self._with_node.add(node)
        self.workqueue.move_to_end(path, last=False)
        super()._assign_work_unit(node)

    def _rank(self, worker, path):
        has_node = worker in self._with_node or not self._with_node
        # A worker that has the node keeps to what needs it; another leaves that for the end.
        return uses_shared_node(path) != has_node, longest_first(path)
