"""How pytest-xdist spreads the suite over its workers: file by file, and the shared nodes on as few as possible.

pytest-xdist 3.8 ignores the mark `xdist_group` under pytest 9.2: it appends the group to a private attribute that
pytest no longer reads. So what a file needs is read from its source.
"""

import ast
import functools
import os
import re
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

# The fixtures of tests/conftest.py that are nodes.
SHARED_NODES = {"node", "whole_node", "npu_node"}
_MAY_TAKE_NODE = re.compile(rf"[(,]\s*(?:{'|'.join(SHARED_NODES)})\s*[,)=:]|getfixturevalue")
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
def shared_nodes(path):
    """Which of the shared nodes a test or fixture of that file takes, where the file has none of that name."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    source = Path(path).read_text(encoding="utf-8")
    if not _MAY_TAKE_NODE.search(source):  # parsing all files takes seconds
        return set()
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, functions)]
    tests = [function for function in found if function.name.startswith("test_") or function.decorator_list]
    wanted = {argument.arg for function in tests for argument in function.args.args}
    asked = set(re.findall(r'"(\w+)"', "".join(re.findall(r"getfixturevalue\((.*)\)", source)))) & SHARED_NODES
    return (SHARED_NODES & wanted | asked) - {function.name for function in found}


@functools.cache
def longest_first(path):
    """A sort key: first what is given most time, then by directory."""
    limits = re.findall(r"mark\.timeout\((\d+)\)", Path(path).read_text(encoding="utf-8"))
    directory = next((i for i, start in enumerate(ORDER) if path.startswith(start)), len(ORDER))
    return -max(map(int, limits), default=0), directory, path


class SharedNodeScheduling(LoadScopeScheduling):
    """Hands out files. Those that use a shared node go to a worker that has it, unless nothing else is left."""

    def __init__(self, config, log=None):
        super().__init__(config, log)
        self._nodes = {}

    def _split_scope(self, nodeid):
        return nodeid.split("::")[0]

    def _assign_work_unit(self, node):
        """`node` is xdist's word for a worker."""
        path = min(self.workqueue, key=lambda path: self._rank(node, path))
        self._nodes[node] = self._nodes.get(node, set()) | shared_nodes(path)
        self.workqueue.move_to_end(path, last=False)
        super()._assign_work_unit(node)

    def _rank(self, worker, path):
        """A worker that has a node keeps to what needs it; another takes what nobody has, and the rest at the end."""
        has, needs = self._nodes.get(worker, set()), shared_nodes(path)
        running = set().union(*self._nodes.values())
        if needs:
            missing = needs - has
            first = not missing & running and (not has or bool(has & needs))
            rank = 0 if first else 2 + len(missing)
        else:
            rank = 2 if has else 1
        return rank, longest_first(path)
