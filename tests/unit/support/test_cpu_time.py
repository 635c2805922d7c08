"""CPU time of tests and of the processes that they start."""

import os
import subprocess
import sys
from types import SimpleNamespace

from tests.support.cpu_time import CpuTime, cpu_seconds

BURN = "import time\nwhile time.process_time() < 0.3:\n    pass\n"


def test_the_time_of_a_child_counts_while_it_runs_and_when_it_has_ended():
    before = cpu_seconds(os.getpid())
    child = subprocess.Popen(
        [sys.executable, "-c", BURN + "print('burnt', flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout.readline() == b"burnt\n"
        running = cpu_seconds(os.getpid())
        child.communicate(b"\n")
    assert running - before >= 0.28
    assert cpu_seconds(os.getpid()) >= running


def test_a_process_that_has_ended_has_none():
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    assert cpu_seconds(child.pid) == 0.0


def test_the_summary_adds_up_files_and_names_the_most_expensive_first(monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.delenv("CPU_TIME_LOG", raising=False)
    plugin = CpuTime()
    for nodeid, when, seconds in (
        ("a.py::one", "teardown", 10.0),
        ("b.py::one", "teardown", 40.0),
        ("a.py::two", "teardown", 40.0),
        ("a.py::two", "call", 1000.0),
    ):
        plugin.pytest_runtest_logreport(
            SimpleNamespace(nodeid=nodeid, when=when, user_properties=[("cpu_seconds", seconds)])
        )
    lines = []
    plugin.pytest_terminal_summary(SimpleNamespace(section=lines.append, write_line=lines.append))
    assert lines[0].startswith("1.5 minutes of CPU time")
    assert [line.split() for line in lines[1:]] == [["50.0", "s", "a.py"], ["40.0", "s", "b.py"]]
