"""How the suite is spread over workers."""

import os
from collections import OrderedDict
from pathlib import Path

import pytest

pytest.importorskip("xdist")
from tests.support.workers import SharedNodeScheduling, longest_first, shared_nodes, take_core, worker_count

CONTENTS = {
    "tests/real/test_plain.py": "def test_it():\n    pass\n",
    "tests/real/test_slow.py": "@pytest.mark.timeout(300)\ndef test_it():\n    pass\n",
    "tests/real/test_shared.py": "async def test_it(http, node):\n    pass\n",
    "tests/real/test_by_fixture.py": "@pytest.fixture\ndef client(node):\n    pass\ndef test_it(client):\n    pass\n",
    "tests/faults/test_own.py": "@pytest.fixture\ndef node():\n    pass\ndef test_it(node):\n    pass\n",
    "tests/faults/test_helper.py": "def helper(node):\n    pass\ndef test_it():\n    pass\n",
    "tests/contract/openai/test_shared.py": "@pytest.mark.timeout(60)\ndef test_it(node):\n    pass\n",
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
    for cached in (shared_nodes, longest_first):
        cached.cache_clear()
    yield
    for cached in (shared_nodes, longest_first):
        cached.cache_clear()


def shared(path):
    return bool(shared_nodes(path))


@pytest.mark.usefixtures("suite")
def test_a_file_shares_the_node_when_a_test_or_fixture_takes_it_and_it_has_none_of_its_own():
    assert [path for path in CONTENTS if shared(path)] == [
        "tests/real/test_shared.py",
        "tests/real/test_by_fixture.py",
        "tests/contract/openai/test_shared.py",
    ]


class Worker:
    """A worker that takes what it is sent."""

    def send_runtest_some(self, indexes):
        pass


@pytest.fixture
def scheduling_of(suite, monkeypatch, pytestconfig):
    """A scheduling of files over workers."""
    monkeypatch.setattr("xdist.scheduler.loadscope.parse_tx_spec_config", lambda config: [])

    def make(paths, *workers):
        scheduling = SharedNodeScheduling(pytestconfig)
        scheduling.workqueue = OrderedDict((path, {}) for path in paths)
        scheduling.assigned_work = {worker: {} for worker in workers}
        scheduling.registered_collections = {worker: [] for worker in workers}
        return scheduling

    return make


def test_one_worker_gets_what_shares_the_node_and_the_longest_comes_first(scheduling_of):
    first, second = Worker(), Worker()
    scheduling = scheduling_of(CONTENTS, first, second)
    for worker in (first, second, first, first, second, second, first, second):
        scheduling._assign_work_unit(worker)
    assert list(scheduling.assigned_work[first]) == [
        "tests/contract/openai/test_shared.py",
        "tests/real/test_by_fixture.py",
        "tests/real/test_shared.py",
        "tests/faults/test_own.py",
    ]
    assert list(scheduling.assigned_work[second]) == [
        "tests/real/test_slow.py",
        "tests/real/test_plain.py",
        "tests/faults/test_helper.py",
        "tests/unit/test_pure.py",
    ]


def test_a_worker_with_nothing_else_to_do_gets_what_shares_the_node(scheduling_of):
    first, second = Worker(), Worker()
    scheduling = scheduling_of(filter(shared, CONTENTS), first, second)
    for worker in (first, second, first):
        scheduling._assign_work_unit(worker)
    assert list(scheduling.assigned_work[second]) == ["tests/real/test_by_fixture.py"]


def test_each_shared_node_has_a_worker_and_a_file_that_takes_both_comes_last(scheduling_of):
    wanted = {
        "a": {"node"},
        "b": {"node"},
        "c": {"whole_node"},
        "d": {"node", "whole_node"},
        "e": {"whole_node", "npu_node"},
    }
    for name, nodes in wanted.items():
        Path(f"test_{name}.py").write_text(f"def test_it({', '.join(nodes)}):\n    pass\n")
    Path("test_by_name.py").write_text('def test_it(request):\n    request.getfixturevalue("whole_node" if 1 else 2)\n')
    assert shared_nodes("test_d.py") == {"node", "whole_node"}
    assert shared_nodes("test_by_name.py") == {"whole_node"}
    first, second = Worker(), Worker()
    scheduling = scheduling_of([f"test_{name}.py" for name in (*wanted, "by_name")], first, second)
    for worker in (first, second, first, second, second, second):
        scheduling._assign_work_unit(worker)
    assert list(scheduling.assigned_work[first]) == ["test_a.py", "test_b.py"]
    assert list(scheduling.assigned_work[second]) == ["test_by_name.py", "test_c.py", "test_e.py", "test_d.py"]


def test_workers_are_pinned_to_one_core_each_round_robin(monkeypatch):
    taken = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: taken.append(cores))
    for worker in ("gw0", "gw1", "gw3", "gw4"):
        take_core(worker)
    assert taken == [{2}, {3}, {7}, {2}]


@pytest.mark.parametrize(("cores", "workers"), [(1, 2), (2, 3), (64, 6)])
def test_there_is_a_worker_more_than_cores(monkeypatch, cores, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert worker_count() == workers
