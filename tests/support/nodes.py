"""Real nodes in processes of their own, as a user starts them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

import psutil

from tests.support.forking import fork_node

NPU_NODE = (sys.executable, "-m", "worker_node")


def run_node_command(arguments, **options):
    """Run `npu-node …` to its end: a `subprocess.CompletedProcess` with both outputs as text."""
    return subprocess.run([*NPU_NODE, *map(str, arguments)], capture_output=True, text=True, check=False, **options)


def engine_processes(pid):
    found = set()
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            if "worker_node.engines.child" in child.cmdline():
                found.add(child.pid)
    return found


@dataclass
class RunningNode:
    """A node process; `url` is where it listens, `key` one of its API keys where it has any."""

    process: subprocess.Popen
    url: str
    key: str | None = None

    def health(self):
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        request = urllib.request.Request(self.url + "/health", headers=headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:  # noqa: S310
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def wait_for(self, condition, timeout=600.0):
        """Poll /health until `condition(body)` holds; return the body. The limit is for a hang."""
        deadline = time.monotonic() + timeout
        pause = 0.02
        while True:
            _, body = self.health()
            if condition(body):
                return body
            assert self.process.poll() is None, "the node ended"
            assert time.monotonic() < deadline, f"still {body}"
            time.sleep(pause)
            # Each look costs the node CPU time, and a model on a busy machine takes many of them to load.
            pause = min(0.3, pause * 1.2)

    def engine_pids(self):
        _, body = self.health()
        return {model["id"]: model["engines"][0]["pid"] for model in body["models"]}

    def engine_processes(self):
        return engine_processes(self.process.pid)

    def terminate(self, timeout=30.0):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


@contextlib.contextmanager
def start_node(*arguments, ready=True, **environment):
    """A node on a free loopback port, ended with the block; none of its processes outlives it.

    It is greedy where a request leaves sampling open, in Ollama's dialect too, so that texts can be compared.
    """
    command = ["serve", "--port", "0", *arguments]
    env = os.environ | {"NPU_NODE_SAMPLING_DEFAULTS": "greedy"} | environment
    with _ended(_start(command, env)) as process:
        line = process.stdout.readline()
        assert line.startswith("listening on "), f"the node said {line!r}"
        key = environment.get("NPU_NODE_API_KEYS", "").split(",")[0]
        node = RunningNode(process, line.split()[-1], key or None)
        if ready:
            node.wait_for(lambda body: body["status"] == "ready")
        yield node


def _start(command, env):
    # A library may read a variable that is not the node's own while it is imported.
    foreign = {name for name in env if env[name] != os.environ.get(name) and not name.startswith("NPU_NODE_")}
    if foreign or not hasattr(os, "fork"):
        return subprocess.Popen([*NPU_NODE, *command], stdout=subprocess.PIPE, text=True, env=env)
    return fork_node(command, env)


def started(command, env, stderr=None):
    """A node, or a command, in a process of its own, ended with the block."""
    return _ended(subprocess.Popen([*NPU_NODE, *command], stdout=subprocess.PIPE, stderr=stderr, text=True, env=env))


@contextlib.contextmanager
def _ended(process):
    try:
        yield process
    finally:
        children = []
        if process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                children = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive, f"processes outlived their node: {alive}"
