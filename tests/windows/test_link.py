"""The link to a child process, with other local processes at its port, how a child ends, and what ends a node."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import psutil
import pytest

from worker_node.core.environment import native_environment
from worker_node.core.operating_system import ENDED_BY_OTHERS, lower_priority, windows
from worker_node.sandbox.worker import Call, Returned, encode, replies

WORKER, MEMORY = "worker_node.sandbox.worker", 1 << 30
CALL = encode(Call("os:getpid", [], 5.0))


def closed(sock):
    sock.settimeout(10)
    with contextlib.suppress(ConnectionError):
        return sock.recv(1) == b""
    return True


def test_processes_that_connect_first_without_the_token_neither_get_the_link_nor_hold_it_up():
    process, link = windows.start_module(WORKER, MEMORY)
    psutil.Process(process.pid).suspend()
    port = int(process.args[3])
    first = [socket.create_connection(("127.0.0.1", port)) for _ in range(80)]
    guesses = [b"0" * 64, b"", b"0" * 63, b"\xff" * 200]
    for number, sock in enumerate(first):
        with contextlib.suppress(ConnectionError):
            sock.sendall(guesses[number % len(guesses)])
    psutil.Process(process.pid).resume()
    with Connection(link().detach()) as connection:
        connection.send_bytes(CALL)
        assert connection.poll(30)
        assert replies.decode(connection.recv_bytes()) == Returned(process.pid)
        assert all(closed(sock) for sock in first)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    for sock in first:
        sock.close()
    assert process.wait(30) == 0


def test_the_token_is_in_neither_the_arguments_nor_the_environment_of_the_child(monkeypatch):
    monkeypatch.setattr(windows.secrets, "token_hex", lambda count: "5ec" * 21 + "r")
    process, link = windows.start_module(WORKER, MEMORY)
    with link():
        child = psutil.Process(process.pid)
        for content in (child.cmdline(), child.environ()):
            assert content
            assert "5ec5ec" not in str(content)
    assert process.wait(30) == 0


def test_a_child_that_ends_before_it_connects_ends_the_wait(monkeypatch):
    monkeypatch.setattr(windows, "_LINK_S", 1000.0)
    process, link = windows.start_module("worker_node.no_such_module")
    with pytest.raises(ConnectionError, match="status 1"):
        link()
    assert process.wait(30) == 1


def test_a_child_takes_no_orders_from_another_listener_at_its_parents_port():
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(30)
        command = [sys.executable, "-m", WORKER, str(other.getsockname()[1]), str(os.getpid()), str(MEMORY)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=native_environment()
        ) as process:
            process.stdin.write(b"token\n")
            process.stdin.flush()
            sock, _ = other.accept()
            with sock, Connection(sock.detach()) as connection:
                connection.send_bytes(CALL)
                assert connection._read(connection.fileno(), 100) == b"token"
                process.stdin.close()
                with contextlib.suppress(ConnectionResetError):
                    assert connection._read(connection.fileno(), 1) == b"", "it answers nothing"
            assert process.wait(30) == 1
            assert b"the parent process is gone" in process.stderr.read()


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
