"""What the suite costs: CPU seconds of each test file, with all processes that its tests start.

Wall time depends on what else the machine does; CPU time far less.
"""

import contextlib
import os
import time
from collections import Counter
from pathlib import Path

import pytest

TICK = os.sysconf("SC_CLK_TCK")
SHOWN = 10
START = "(imports and collection)"
CONTROLLER = "(the process that hands out the tests)"


def cpu_seconds(pid):
    """Of a process and its descendants: of those that run, and of those that have ended and were waited for."""
    try:
        # The name in parentheses may contain spaces: utime, stime, cutime and cstime are the 12th to 15th field after.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / TICK + sum(map(cpu_seconds, children(pid)))
    except OSError:
        return 0.0  # it has ended since


def children(pid):
    """The process ids of a process's children. Raises OSError when it has ended."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended since
            found += [int(child) for child in (task / "children").read_text(encoding="ascii").split()]
    return found


class CpuTime:
    """A pytest plugin: measures each test in the process that runs it, and reports the ten most expensive files.

    With CPU_TIME_LOG=FILE each test is a line of FILE, and every file is reported.
    """

    def __init__(self):
        self._before = 0.0
        self._by_file = Counter()
        self._hands_out = False
        self._log = os.environ.get("CPU_TIME_LOG")

    def add_start(self, seconds):
        """Count what this process, which hands out the tests, used before it started the workers."""
        self._by_file[START] += seconds
        self._hands_out = True

    def pytest_collection_finish(self, session):
        self._before = cpu_seconds(os.getpid())
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_seconds"] = self._before
        else:
            self._by_file[START] += self._before

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self._by_file[START] += getattr(node, "workeroutput", {}).get("cpu_seconds", 0.0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "teardown":
            now = cpu_seconds(os.getpid())
            report.user_properties.append(("cpu_seconds", now - self._before))
            self._before = now
        return report

    def pytest_runtest_logreport(self, report):
        if report.when != "teardown" or "PYTEST_XDIST_WORKER" in os.environ:
            return
        for name, seconds in report.user_properties:
            if name == "cpu_seconds":
                self._by_file[report.nodeid.partition("::")[0]] += seconds
                if self._log:
                    with Path(self._log).open("a", encoding="utf-8") as log:
                        print(f"{seconds:8.2f} {report.nodeid}", file=log)

    def pytest_terminal_summary(self, terminalreporter):
        if self._hands_out:
            self._by_file[CONTROLLER] = time.process_time()
        total = sum(self._by_file.values())
        terminalreporter.section(f"{total / 60:.1f} minutes of CPU time, most of it in")
        for file, seconds in self._by_file.most_common(None if self._log else SHOWN):
            terminalreporter.write_line(f"{seconds:7.1f} s  {file}")
