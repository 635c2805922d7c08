"""Cores that a process may use: its affinity mask, and threads of one core once."""

import os

import pytest

from worker_node.devices.memory import usable_cores


@pytest.mark.parametrize(
    ("mask", "siblings", "cores"),
    [
        ({0, 1, 2, 3}, {}, 4),
        ({0, 1, 2, 3}, {0: "0", 1: "1", 2: "2", 3: "3"}, 4),
        ({0, 1, 2, 3}, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, 2),
        ({0, 2}, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, 1),
        ({1, 2}, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, 2),
        ({5}, {}, 1),
    ],
)
def test_threads_of_a_core_are_one_and_cores_outside_of_the_mask_none(tmp_path, monkeypatch, mask, siblings, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: mask)
    for cpu, shared in siblings.items():
        directory = tmp_path / f"cpu{cpu}" / "topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(shared + "\n")
    assert usable_cores(tmp_path) == cores
