"""A pytest plugin for the OpenAI SDK's own suite: its HTTP clients get a transport over the nodes of OVER_FLEET_NODES.

After OVER_FLEET_KILL_AFTER tests the process OVER_FLEET_VICTIM, one of the nodes, is killed.
"""

import os
import signal
from functools import wraps

import httpx2

from backend_client import NPUClient
from backend_client.sdk.client import BlockingFleetTransport, FleetTransport

NODES = os.environ["OVER_FLEET_NODES"].split(",")
_left = int(os.environ["OVER_FLEET_KILL_AFTER"])


def over_fleet(client, transport):
    made = client.__init__

    @wraps(made)
    def make(self, *args, **options):
        # Explicit transports, and proxies read from the environment, are replaced alike.
        made(self, *args, **{**options, "transport": transport(NPUClient(NODES)), "trust_env": False})

    client.__init__ = make


over_fleet(httpx2.AsyncClient, FleetTransport)
over_fleet(httpx2.Client, BlockingFleetTransport)


def pytest_runtest_teardown():
    global _left  # noqa: PLW0603
    _left -= 1
    if _left == 0:
        os.kill(int(os.environ["OVER_FLEET_VICTIM"]), signal.SIGKILL)
