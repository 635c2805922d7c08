"""`npu-gateway serve` as a process of its own."""

import os
import subprocess
import sys
from contextlib import contextmanager

_COMMAND = "import sys; from backend_client.gateway.cli import main; sys.exit(main())"


@contextmanager
def start_gateway(*nodes, **variables):
    """The URL of a gateway in front of these nodes."""
    words = [word for node in nodes for word in ("--node", node)]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("NPU_CLIENT", "NPU_GATEWAY"))
    }
    process = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, "serve", "--port", "0", *words],
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        line = process.stdout.readline()
        yield line.split()[3]
    finally:
        process.terminate()
        assert process.wait(30) == 0
        process.stdout.close()
