"""A port for a process that cannot be asked which one it took."""

import os
import random
import socket

# Below those that the kernel gives to connections, one of which would have it before the process listens.
LOWEST, HIGHEST = 12_000, 32_000
_random = random.Random(os.urandom(8))


def free_port() -> int:
    """A port of loopback that nobody has, out of so many that another test hardly takes the same."""
    while True:
        port = _random.randrange(LOWEST, HIGHEST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
