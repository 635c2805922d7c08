"""A node as the child of this process, which ends when this process ends, however it ends."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from backend_client.errors import NPUUnavailableError

# Runs before the node in its process: Linux sends SIGTERM to the node when the thread that started it is gone, and a
# parent that is gone already is noticed. A node that gets SIGTERM ends its engines.
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this node is gone")
os.execv(sys.executable, [sys.executable, "-m", "worker_node", "serve", "--host", "127.0.0.1", "--port", "0"])
"""
# What a machine or an image sets for a node that serves its network; this one serves its own process.
_OF_A_SERVICE = frozenset(
    f"NPU_NODE_{name}"
    for name in ("ALLOW_UNAUTHENTICATED", "API_KEYS_FILE", "OLLAMA_PORT", "TLS_CERT", "TLS_CLIENT_CA", "TLS_KEY")
)
_LISTENING = "listening on "
# Until it listens; its models load after that. The limit is for a hang.
_START_S = 120.0
_STOP_S = 35.0


@dataclass(eq=False)
class TiedNode:
    """A running node. `url` is where it listens, on this machine only; `key` is what its requests must carry."""

    url: str = ""
    key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    _process: subprocess.Popen[str] | None = None
    _last: str = ""
    _begun: threading.Event = field(default_factory=threading.Event)
    _stopped: bool = False

    @classmethod
    def start(
        cls, environment: dict[str, str] | None = None, *, on_end: Callable[[], object] = lambda: None
    ) -> TiedNode:
        """Start a node on a free port, with the settings of this machine; what it logs goes to this process's stderr.

        `on_end` is called, in a thread, when the node ends without having been stopped. Raises NPUUnavailableError,
        with the node's last message, when it does not start.
        """
        node = cls()
        threading.Thread(target=node._hold, args=(environment or {}, on_end), name="tied node", daemon=True).start()
        if not node._begun.wait(_START_S):
            node.stop()
            raise NPUUnavailableError(f"a node could not be started here: it did not listen within {_START_S:.0f} s")
        if not node.url:
            raise NPUUnavailableError(f"a node could not be started here: {node._last or 'it ended at once'}")
        return node

    def stop(self) -> None:
        """End the node and its engines."""
        self._stopped = True
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _hold(self, environment: dict[str, str], on_end: Callable[[], object]) -> None:
        """Run the node. The tie is to the thread that starts a process, so this one lives as long as the node."""
        given = {name: value for name, value in os.environ.items() if name not in _OF_A_SERVICE}
        try:
            self._process = subprocess.Popen(  # noqa: S603  (its own interpreter)
                [sys.executable, "-c", _TIED, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env={**given, **environment, "NPU_NODE_API_KEYS": self.key},
            )
        except OSError as error:
            self._last = str(error)
            self._begun.set()
            return
        with self._process as process:
            for line in process.stdout or ():
                if not self.url and line.startswith(_LISTENING):
                    self.url = line.split()[-1]
                    self._begun.set()
                else:
                    self._last = line.strip() or self._last
                    print(line, end="", file=sys.stderr)
        if self.url and not self._stopped:
            on_end()
        self._begun.set()
