"""Debian's HAProxy with config/haproxy/npu-nodes.cfg in front of two real nodes: weight by free queue, and drain."""

import contextlib
import csv
import json
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from tests.support.nodes import start_node
from tests.support.ports import free_port

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(shutil.which("haproxy") is None, reason="NOT RUN: apt-get install haproxy"),
]

EXAMPLE = Path(__file__).parents[2] / "config" / "haproxy" / "npu-nodes.cfg"
MODELS = json.dumps([{"name": "smollm2-135m-instruct", "max_outstanding": 4}])
CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def fleet(quick_models, tmp_path):
    """The front's URL, the path of HAProxy's socket, and the nodes."""
    with contextlib.ExitStack() as stack:
        agents = [free_port(), free_port()]
        nodes = [
            stack.enter_context(
                start_node(NPU_NODE_MODELS=MODELS, NPU_NODE_AGENT_CHECK_PORT=str(agent), **quick_models)
            )
            for agent in agents
        ]
        front, sock = free_port(), tmp_path / "stats.sock"
        config = EXAMPLE.read_text().replace("/run/haproxy/npu-nodes.sock", str(sock))
        config = config.replace("127.0.0.1:8080", f"127.0.0.1:{front}").replace("inter 1s", "inter 100ms")
        for number, (node, agent) in enumerate(zip(nodes, agents, strict=True), start=1):
            old = f"192.0.2.1{number}:8081 agent-port 8082"
            assert old in config
            config = config.replace(old, f"{node.url.removeprefix('http://')} agent-port {agent}")
        (tmp_path / "haproxy.cfg").write_text(config)
        with subprocess.Popen([shutil.which("haproxy"), "-db", "-f", tmp_path / "haproxy.cfg"]) as process:
            stack.callback(process.wait)
            stack.callback(process.terminate)
            yield f"http://127.0.0.1:{front}", sock, nodes
            stack.close()


def servers(sock):
    """What HAProxy says of each node: its status and weight."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(sock))
        connection.sendall(b"show stat\n")
        text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    rows = csv.DictReader(text.removeprefix("# ").splitlines())
    return {row["svname"]: (row["status"], int(row["weight"])) for row in rows if row["svname"].startswith("node")}


def wait_for(sock, wanted):
    deadline = time.monotonic() + 60  # for a hang
    seen = None
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if wanted(seen := servers(sock)):
                return
        time.sleep(0.05)
    pytest.fail(f"HAProxy still says {seen}")


def opened(url, **fields):
    body = json.dumps(CHAT | fields).encode()
    request = urllib.request.Request(url + "/v1/chat/completions", body, {"Content-Type": "application/json"})  # noqa: S310
    return urllib.request.urlopen(request, timeout=60)  # noqa: S310


def test_haproxy_follows_the_queue_and_the_drain_of_nodes(fleet):
    front, sock, nodes = fleet
    wait_for(sock, lambda seen: seen == {"node1": ("UP", 100), "node2": ("UP", 100)})
    with opened(nodes[0].url, max_tokens=4000, ignore_eos=True, stream=True) as held:
        held.readline()
        wait_for(sock, lambda seen: seen["node1"] == ("UP", 75) and seen["node2"] == ("UP", 100))
        nodes[0].process.send_signal(signal.SIGTERM)
        wait_for(sock, lambda seen: seen["node1"][0].startswith("DRAIN"))
        for _ in range(4):
            with opened(front, max_tokens=2) as reply:
                assert json.load(reply)["usage"]["completion_tokens"] == 2
    wait_for(sock, lambda seen: seen["node1"][0].startswith("DOWN"))
    with opened(front, max_tokens=2) as reply:
        assert reply.status == 200
