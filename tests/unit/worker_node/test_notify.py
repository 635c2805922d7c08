"""What the node tells its service manager, heard by a real socket in the manager's place."""

import asyncio
import logging
import os
import socket
import uuid
from contextlib import contextmanager

import pytest

from worker_node.server import ServiceManager

pytestmark = pytest.mark.linux


@contextmanager
def manager_at(address):
    """Listen where a manager would; yields the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + address[1:] if address.startswith("@") else address)
        sock.setblocking(False)
        yield sock


async def hear(sock):
    return (await asyncio.get_running_loop().sock_recv(sock, 4096)).decode().split("\n")


@pytest.fixture(params=["path", "abstract"])
def address(request, tmp_path):
    return str(tmp_path / "notify") if request.param == "path" else f"@npu-node-{uuid.uuid4().hex}"


async def test_a_manager_that_is_gone_is_logged_once_and_does_no_harm(tmp_path, caplog):
    manager = ServiceManager(str(tmp_path / "nobody"))
    with caplog.at_level(logging.WARNING):
        async with manager.attended(lambda: "ready"):
            manager.stopping()
    assert len([record for record in caplog.records if record.name == "worker_node.server"]) == 1
    assert "nobody" in caplog.text


def test_the_variables_are_taken_away_from_the_engines():
    environment = {"NOTIFY_SOCKET": "@a", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid()), "HOME": "/"}
    ServiceManager.from_environment(environment)
    assert environment == {"HOME": "/"}


@pytest.mark.parametrize(
    ("environment", "watched"),
    [
        ({}, False),
        ({"WATCHDOG_USEC": "20000"}, True),
        ({"WATCHDOG_USEC": "20000", "WATCHDOG_PID": str(os.getpid())}, True),
        ({"WATCHDOG_USEC": "20000", "WATCHDOG_PID": "1"}, False),
        ({"WATCHDOG_USEC": "0"}, False),
        ({"WATCHDOG_USEC": "soon"}, False),
    ],
)
async def test_the_watchdog_is_served_only_where_it_watches_this_process(environment, watched, address, monkeypatch):
    monkeypatch.setattr("worker_node.server._STATUS_PERIOD_S", 0.01)
    with manager_at(address) as sock:
        async with ServiceManager.from_environment({"NOTIFY_SOCKET": address} | environment).attended(lambda: "ready"):
            assert "READY=1" in await hear(sock)
            assert ("WATCHDOG=1" in await hear(sock)) is watched
