"""Debian's HAProxy with config/haproxy/npu-nodes.cfg in front of two real nodes: load by open requests, and drain."""

import contextlib
import csv
import json
import shutil
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.ops.calls import eventually
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
        nodes = [stack.enter_context(start_node(NPU_NODE_MODELS=MODELS, **quick_models)) for _ in range(2)]
        front, sock = free_port(), tmp_path / "stats.sock"
        config = EXAMPLE.read_text().replace("/run/haproxy/npu-nodes.sock", str(sock))
        config = config.replace("127.0.0.1:8080", f"127.0.0.1:{front}").replace("inter 2s", "inter 100ms")
        for number, node in enumerate(nodes, start=1):
            old = f"192.0.2.1{number}:8081"
            assert old in config
            config = config.replace(old, node.url.removeprefix("http://"))
        (tmp_path / "haproxy.cfg").write_text(config)
        with subprocess.Popen([shutil.which("haproxy"), "-db", "-f", tmp_path / "haproxy.cfg"]) as process:
            stack.callback(process.wait)
            stack.callback(process.terminate)
            yield f"http://127.0.0.1:{front}", sock, nodes
            stack.close()


def servers(sock):
    """What HAProxy says of each node: its status and how many requests it was sent."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(sock))
        connection.sendall(b"show stat\n")
        text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    rows = csv.DictReader(text.removeprefix("# ").splitlines())
    return {row["svname"]: (row["status"], int(row["stot"])) for row in rows if row["svname"].startswith("node")}


def opened(url, **fields):
    body = json.dumps(CHAT | fields).encode()
    request = urllib.request.Request(url + "/v1/chat/completions", body, {"Content-Type": "application/json"})  # noqa: S310
    return urllib.request.urlopen(request, timeout=60)  # noqa: S310


def test_haproxy_prefers_the_idle_node_and_leaves_out_one_that_drains(fleet):
    front, sock, nodes = fleet
    eventually(lambda: servers(sock), lambda seen: {status for status, _ in seen.values()} == {"UP"})
    with opened(front, max_tokens=4000, ignore_eos=True, stream=True) as held:
        held.readline()
        (busy,) = [name for name, (_, sent) in servers(sock).items() if sent]
        for _ in range(4):
            with opened(front, max_tokens=2) as reply:
                assert json.load(reply)["usage"]["completion_tokens"] == 2
        assert servers(sock)[busy] == ("UP", 1), "the node with the open stream got more requests"
        nodes[int(busy[-1]) - 1].process.send_signal(signal.SIGTERM)
        eventually(lambda: servers(sock), lambda seen: seen[busy][0].startswith("DOWN"))
        assert held.readline(), "a node that drains finishes its requests"
    with opened(front, max_tokens=2) as reply:
        assert reply.status == 200
