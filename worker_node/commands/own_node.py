"""A node that one command starts for itself, and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from worker_node.commands.node_client import NodeClient
from worker_node.core.errors import ConfigurationError
from worker_node.models.tether import tethered

_STOP_S = 10.0
_LOG_TAIL = 600
# It listens on loopback for this user's command alone.
_OF_A_SERVICE = ("NPU_NODE_API_KEYS", "NPU_NODE_API_KEYS_FILE", "NPU_NODE_OLLAMA_PORT", "NPU_NODE_PORT")


@contextmanager
def own_node() -> Iterator[NodeClient]:
    """A node on a free loopback port that loads models on demand; it ends with the block, or with this process.

    Raises ConfigurationError, with the end of its log, when it does not start.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_SERVICE}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(  # noqa: S603 (our own program)
            tethered([sys.executable, "-m", "worker_node", "serve", "--host", "127.0.0.1", "--port", "0"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment | {"NPU_NODE_MODELS": "[]"},
            # Ctrl-C in the terminal stops an answer, not the node.
            start_new_session=True,
        )
        try:
            client = NodeClient(_address(process, log))
            try:
                yield client
            finally:
                client.close()
        finally:
            _stop(process)


def _address(process: subprocess.Popen[str], log: IO[bytes]) -> str:
    assert process.stdout is not None  # noqa: S101  (it was asked for)
    line = process.stdout.readline()
    if not line.startswith("listening on "):
        process.wait()
        log.seek(0)
        tail = log.read().decode(errors="replace")[-_LOG_TAIL:].strip()
        raise ConfigurationError(f"the node for this chat did not start: {tail or 'it said nothing'}")
    return line.split()[-1]


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
