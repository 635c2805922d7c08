"""A child that is forked is one that `start_module` starts, to itself and to the process that asked for it."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import warm_children
from tests.support.nodes import engine_processes
from worker_node.core import operating_system

CHILD = "tests.support.telling_child"


@pytest.fixture(params=[operating_system.start_module, warm_children.start_engine], ids=["started", "forked"])
def start(request):
    return request.param


def test_what_it_is_told_and_has_is_as_in_a_child_of_its_own(monkeypatch):
    monkeypatch.setenv("NPU_NODE_API_KEYS", "secret")
    monkeypatch.setenv("OPENVINO_LOG_LEVEL", "1")
    both = []
    for start in (operating_system.start_module, warm_children.start_engine):
        child, channel = start(CHILD, "word", 7)
        with channel:
            told = json.loads(channel.recv(1 << 17))
            channel.sendall(b"3")
            assert child.wait(30) == 3
        both.append(told)
    started, forked = both
    assert started == forked
    assert started["parent"] == os.getpid()
    assert "secret" not in started["environment"].values()


def test_signals_reach_it_and_its_end_is_seen_at_once(start):
    child, channel = start(CHILD)
    with channel:
        assert json.loads(channel.recv(1 << 17))["name"] == "__main__"
        assert child.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.01)
        child.kill()
        assert channel.recv(1) == b"", "the kernel closes its end"
        assert child.wait(30) == child.poll() == -signal.SIGKILL
        assert not psutil.pid_exists(child.pid)


def test_engines_are_found_by_their_command_line():
    child, channel = warm_children.start_engine("worker_node.engines.child")
    with channel:
        assert child.pid in engine_processes(os.getpid())
    assert child.wait(30) == 0


def test_it_ends_with_the_process_that_asked_for_it(start):
    script = (
        "from tests.support import warm_children\nfrom worker_node import operating_system\n"
        f"child, channel = {start.__module__.rpartition('.')[2]}.{start.__name__}({CHILD!r})\n"
        "channel.recv(1)\nprint(child.pid, flush=True)\ninput()\n"
    )
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asking:
        ended = os.pidfd_open(int(asking.stdout.readline()))
        asking.kill()
    try:
        assert select.select([ended], [], [], 30)[0]
    finally:
        os.close(ended)
