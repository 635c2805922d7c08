"""`npu-gateway serve`, and a Redis or Valkey, as processes of their own."""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

_COMMAND = "import sys; from backend_client.gateway.cli import main; sys.exit(main())"


WAYS = ("the node", "through the gateway")


@contextmanager
def reached(node, way):
    """The node itself, or what has the URL of a gateway in front of it, by one of `WAYS`."""
    if way == WAYS[0]:
        yield node
    else:
        with start_gateway(node.url) as url:
            yield SimpleNamespace(url=url)


@contextmanager
def start_gateway(*nodes, stderr=subprocess.DEVNULL, **variables):
    """The URL of a gateway in front of these nodes."""
    words = [word for node in nodes for word in ("--node", node)]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("NPU_CLIENT", "NPU_GATEWAY"))
    }
    process = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, "serve", "--port", "0", *words],
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    try:
        line = process.stdout.readline()
        yield line.split()[3]
    finally:
        process.terminate()
        assert process.wait(30) == 0
        process.stdout.close()


@contextmanager
def started_store():
    """The URL and the process of a Redis or Valkey that keeps nothing on disk."""
    server = shutil.which("valkey-server") or shutil.which("redis-server")
    if server is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert any("Ready to accept" in line for line in process.stdout)
        yield f"redis://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()
