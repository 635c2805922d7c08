"""How the suite is spread over workers."""

import os
from collections import OrderedDict

import pytest

pytest.importorskip("xdist")
from tests.support.workers import LongestFirst, take_cores, unit_of, worker_count

CONTENTS = {
    "tests/real/test_plain.py": "def test_it():\n    pass\n",
    "tests/real/test_shared.py": "async def test_it(http, node):\n    pass\n",
    "tests/real/test_by_fixture.py": "@pytest.fixture\ndef client(node):\n    pass\ndef test_it(client):\n    pass\n",
    "tests/faults/test_own.py": "@pytest.fixture\ndef node():\n    pass\ndef test_it(node):\n    pass\n",
    "tests/faults/test_helper.py": "def helper(node):\n    pass\ndef test_it():\n    pass\n",
    "tests/contract/openai/test_shared.py": "def test_it(node):\n    pass\n",
    "tests/unit/test_pure.py": "def test_it():\n    pass\n",
}


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """A directory of test files."""
    for name, content in CONTENTS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.chdir(tmp_path)
    unit_of.cache_clear()
    yield
    unit_of.cache_clear()


@pytest.mark.usefixtures("suite")
def test_files_that_use_the_shared_node_are_one_unit_for_each_directory():
    assert {name: unit_of(name) for name in CONTENTS if unit_of(name) != name} == {
        "tests/real/test_shared.py": "node of tests/real",
        "tests/real/test_by_fixture.py": "node of tests/real",
        "tests/contract/openai/test_shared.py": "node of tests/contract",
    }


class Queue(LongestFirst):
    """The scheduler with its queue only; a worker takes what is first in it."""

    def __init__(self, units):
        self.workqueue = OrderedDict.fromkeys(units, {})
        self.assigned_work = {"worker": {}}
        self.registered_collections = {"worker": []}


class Worker:
    def __init__(self):
        self.taken = []

    def send_runtest_some(self, indexes):
        self.taken.append(indexes)


def test_units_that_take_long_are_handed_out_first():
    worker = Worker()
    queue = Queue(
        ["tests/unit/test_a.py", "elsewhere.py", "tests/real/test_b.py", "tests/faults/test_c.py", "node of tests/real"]
    )
    queue.assigned_work = {worker: {}}
    queue.registered_collections = {worker: []}
    while queue.workqueue:
        queue._assign_work_unit(worker)
    assert list(queue.assigned_work[worker]) == [
        "node of tests/real",
        "tests/real/test_b.py",
        "tests/faults/test_c.py",
        "tests/unit/test_a.py",
        "elsewhere.py",
    ]


def test_a_worker_keeps_to_two_cores_and_neighbours_to_others(monkeypatch):
    taken = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: taken.append(cores))
    for worker in ("gw0", "gw1", "gw2"):
        take_cores(worker)
    assert taken == [{2, 3}, {5, 7}, {2, 3}]


@pytest.mark.parametrize(("cores", "workers"), [(1, 2), (2, 3), (64, 6)])
def test_there_is_a_worker_more_than_cores(monkeypatch, cores, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert worker_count() == workers
