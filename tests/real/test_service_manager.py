"""A real node under a stand-in for its service manager: the messages of a whole life, in order."""

import socket

import pytest

from tests.support.nodes import start_node

pytestmark = pytest.mark.real


@pytest.mark.linux
def test_listening_alive_ready_stopping(store, tmp_path):
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(60)

        def hear():
            return dict(line.split("=", 1) for line in manager.recv(4096).decode().split("\n"))

        with start_node(
            ready=False,
            NOTIFY_SOCKET=address,
            WATCHDOG_USEC="400000",
            NPU_NODE_MODELS='[{"name": "all-minilm-l6-v2", "placements": ["CPU"]}]',
        ) as node:
            first = hear()
            assert first["READY"] == "1"
            assert first["STATUS"].startswith("starting; 0 of 1 models serve")
            said = hear()
            while not said["STATUS"].startswith("ready; 1 of 1"):
                assert said["WATCHDOG"] == "1"
                said = hear()
            assert node.terminate() == 0
            while "STOPPING" not in said:
                said = hear()
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                assert "READY" not in hear(), "an engine spoke in the node's name"
