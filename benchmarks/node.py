"""A node in a process of its own, as a user starts it."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass


@dataclass
class RunningNode:
    """A node process; `url` is where it listens."""

    process: subprocess.Popen
    url: str

    def health(self):
        """The body of /health."""
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=30) as reply:  # noqa: S310
                return json.load(reply)
        except urllib.error.HTTPError as error:  # 503: it does not serve now
            with error:
                return json.load(error)

    def engine_pids(self):
        """The node's engine processes by model id."""
        return {model["id"]: model["engines"][0]["pid"] for model in self.health()["models"]}


@contextlib.contextmanager
def start_node(*arguments, **environment):
    """A ready node on a free loopback port, stopped with the block. Sampling is greedy by default."""
    command = [sys.executable, "-m", "worker_node", "serve", "--port", "0", *arguments]
    env = os.environ | {"NPU_NODE_SAMPLING_DEFAULTS": "greedy", "NPU_NODE_CONFIG": ""} | environment
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("listening on "), f"the node said {line!r}"
            node = RunningNode(process, line.split()[-1])
            while node.health()["status"] != "ready":
                assert process.poll() is None, "the node ended"
                time.sleep(0.1)
            yield node
        finally:
            process.terminate()
