"""How pytest-xdist spreads the suite over its workers: by file, and the files that share a node on one worker.

pytest-xdist 3.8 ignores the mark `xdist_group` under pytest 9.2: it appends the group to a private attribute that
pytest no longer reads. So the groups are derived from the files.
"""

import ast
import functools
import os
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

# What takes long starts first; the unit tests fill the gaps at the end.
ORDER = ("node of ", "tests/real/", "tests/contract/", "tests/faults/", "tests/unit/")
# A node runs on this many cores whatever the machine has: more make its threads wait for each other, busily.
CORES_OF_A_WORKER = 2


def worker_count():
    """One more than the cores that this process may use, since many tests wait; at most six."""
    return min(6, len(os.sched_getaffinity(0)) + 1)


def take_cores(worker):
    """Keep this worker and the nodes that it starts to two of the cores, in turn: `worker` is "gw0", "gw1" …"""
    cores = sorted(os.sched_getaffinity(0))
    first = int(worker.removeprefix("gw")) * CORES_OF_A_WORKER
    os.sched_setaffinity(0, {cores[(first + i) % len(cores)] for i in range(CORES_OF_A_WORKER)})


@functools.cache
def unit_of(path):
    """What runs as a whole on one worker: a file, or all files of a directory of tests/ that use the shared `node`."""
    return f"node of {'/'.join(path.split('/')[:2])}" if _uses_shared_node(Path(path)) else path


def _uses_shared_node(path):
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, functions)]
    own_fixtures = {function.name for function in found}
    wanted = {
        argument.arg
        for function in found
        if function.name.startswith("test_") or function.decorator_list
        for argument in function.args.args
    }
    return "node" in wanted - own_fixtures


class LongestFirst(LoadScopeScheduling):
    """Hands out units in `ORDER`."""

    def _split_scope(self, nodeid):
        return unit_of(nodeid.split("::")[0])

    def _assign_work_unit(self, node):
        self.workqueue.move_to_end(min(self.workqueue, key=_rank), last=False)
        super()._assign_work_unit(node)


def _rank(unit):
    return next((rank for rank, start in enumerate(ORDER) if unit.startswith(start)), len(ORDER)), unit
