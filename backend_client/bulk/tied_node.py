"""A node as the child of this process, which ends when this process ends, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

from backend_client.errors import NPUUnavailableError

# Runs before the node in its process: Linux sends SIGTERM to the node when the thread that started it is gone, and a
# parent that is gone already is noticed. A node that gets SIGTERM ends its engines.
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this node is gone")
os.execv(sys.executable, [sys.executable, "-m", "worker_node", "serve", "--port", "0"])
"""
_STOP_S = 20.0


@dataclass(slots=True)
class TiedNode:
    """A running node. `url` is where it listens, on this machine only."""

    url: str
    _process: subprocess.Popen[str]
    _stop: threading.Event

    @classmethod
    def start(cls, environment: dict[str, str] | None = None) -> TiedNode:
        """Start a node on a free port, with the settings of this machine. Raises NPUUnavailableError when it ends."""
        begun = threading.Event()
        stop = threading.Event()
        found: list[Any] = []

        def hold() -> None:
            # The tie is to the thread that starts a process, so this one lives as long as the node is wanted.
            process = subprocess.Popen(  # noqa: S603  (its own interpreter)
                [sys.executable, "-c", _TIED, str(os.getpid())],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **(environment or {})},
            )
            found.append(process)
            found.append(process.stdout.readline() if process.stdout else "")
            begun.set()
            stop.wait()

        threading.Thread(target=hold, name="tied node", daemon=True).start()
        begun.wait()
        process, line = found
        if not line.startswith("listening on "):
            stop.set()
            raise NPUUnavailableError(f"a node could not be started here: it ended with status {process.wait()}")
        return cls(line.split()[-1], process, stop)

    def stop(self) -> None:
        """End the node and its engines."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._stop.set()
