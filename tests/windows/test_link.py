"""The link to a child process, how a child ends, and what ends a node."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import psutil
import pytest

from worker_node.core.operating_system import ENDED_BY_OTHERS, lower_priority, windows
from worker_node.sandbox.worker import Call, Returned, encode, replies

WORKER, MEMORY = "worker_node.sandbox.worker", 1 << 30
CALL = encode(Call("os:getpid", [], 5.0))


def test_a_child_answers_by_the_link_and_ends_when_it_is_closed():
    process, link = windows.start_module(WORKER, MEMORY)
    with Connection(link().detach()) as connection:
        connection.send_bytes(CALL)
        assert connection.poll(30)
        assert replies.decode(connection.recv_bytes()) == Returned(process.pid)
    assert process.wait(30) == 0


def test_a_child_that_ends_before_it_connects_ends_the_wait(monkeypatch):
    monkeypatch.setattr(windows, "_LINK_S", 1000.0)
    process, link = windows.start_module("worker_node.no_such_module")
    with pytest.raises(ConnectionError, match="status 1"):
        link()
    assert process.wait(30) == 1


@pytest.mark.parametrize(
    "end",
    [lambda pid: os.kill(pid, signal.SIGTERM), lambda pid: psutil.Process(pid).kill(), subprocess.Popen.kill],
    ids=["os.kill", "psutil", "subprocess"],
)
def test_a_child_that_another_process_ends_has_the_status_of_one(end):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        end(process if end is subprocess.Popen.kill else process.pid)
        assert process.wait(30) in ENDED_BY_OTHERS


def test_what_a_process_starts_ends_when_it_is_killed(tmp_path):
    """By the job alone: the child neither reads the pipe nor has a link."""
    started = tmp_path / "child"
    child = f"import os, pathlib, time; pathlib.Path({str(started)!r}).write_text(str(os.getpid())); time.sleep(600)"
    code = (
        "import subprocess, sys, time\n"
        "from worker_node.core.operating_system import tethered\n"
        f"subprocess.Popen(tethered([sys.executable, '-c', {child!r}]))\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        while not (started.is_file() and started.read_text()):
            assert parent.poll() is None
            time.sleep(0.05)
        grandchild = psutil.Process(int(started.read_text()))
        parent.kill()
        assert psutil.wait_procs([grandchild], timeout=30)[1] == []


async def test_ctrl_break_stops_a_node_as_ctrl_c_does():
    stopped = asyncio.Event()
    with windows.stop_signals(asyncio.get_running_loop(), stopped.set):
        signal.raise_signal(signal.SIGBREAK)
        async with asyncio.timeout(30):
            await stopped.wait()


def test_a_lower_priority_is_windows_own_class_for_it():
    process = psutil.Process()
    before = process.nice()
    lower_priority(0)
    assert process.nice() == before
    try:
        lower_priority(5)
        assert process.nice() == psutil.BELOW_NORMAL_PRIORITY_CLASS
    finally:
        process.nice(before)
