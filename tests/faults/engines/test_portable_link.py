"""The link of portable mode (and of Windows) to a child process, with other local processes at its port."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from worker_node.core.environment import native_environment
from worker_node.core.operating_system import portable
from worker_node.sandbox.worker import Call, Returned, encode, replies

WORKER, MEMORY = "worker_node.sandbox.worker", 1 << 30
CALL = encode(Call("os:getpid", [], 5.0))


@pytest.fixture(autouse=True)
def portable_children(monkeypatch):
    monkeypatch.setenv("NPU_NODE_PORTABLE", "1")


def closed(sock):
    sock.settimeout(10)
    with contextlib.suppress(ConnectionError):
        return sock.recv(1) == b""
    return True


def test_processes_that_connect_first_without_the_token_neither_get_the_link_nor_hold_it_up():
    process, link = portable.start_module(WORKER, MEMORY)
    os.kill(process.pid, signal.SIGSTOP)
    port = int(process.args[3])
    first = [socket.create_connection(("127.0.0.1", port)) for _ in range(80)]
    guesses = [b"0" * 64, b"", b"0" * 63, b"\xff" * 200]
    for number, sock in enumerate(first):
        with contextlib.suppress(ConnectionError):
            sock.sendall(guesses[number % len(guesses)])
    os.kill(process.pid, signal.SIGCONT)
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
    monkeypatch.setattr(portable.secrets, "token_hex", lambda count: "5ec" * 21 + "r")
    process, link = portable.start_module(WORKER, MEMORY)
    with link():
        for file in ("cmdline", "environ"):
            content = Path(f"/proc/{process.pid}/{file}").read_bytes()
            assert content
            assert b"5ec5ec" not in content
    assert process.wait(30) == 0


def test_a_child_that_ends_before_it_connects_ends_the_wait(monkeypatch):
    monkeypatch.setattr(portable, "_LINK_S", 1000.0)
    process, link = portable.start_module("worker_node.no_such_module")
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
