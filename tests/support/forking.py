"""Nodes forked from a process that has imported all they need: a start costs less than half of the CPU time.

What a start by `python -m worker_node` proves has its own tests: they use `tests.support.nodes.started`.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

_LONGEST_REQUEST = 2**20


class ForkedProcess:
    """What `subprocess.Popen` offers of a node that the forking process started."""

    def __init__(self, pid, stdout, ended):
        self.pid = pid
        self.stdout = stdout
        self.returncode = None
        self._ended = ended

    def poll(self):
        return self._look(0)

    def wait(self, timeout=None):
        if self._look(timeout) is None:
            raise subprocess.TimeoutExpired(f"node {self.pid}", timeout)
        return self.returncode

    def _look(self, timeout):
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            self.returncode = os.waitstatus_to_exitcode(int(self._ended.readline()))
            self._ended.close()
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def fork_node(arguments, env):
    """A process that runs `npu-node` with these arguments; its `stdout` is read as text."""
    (out, stdout), (ended, keeper) = os.pipe(), os.pipe()
    request = json.dumps({"arguments": arguments, "env": env, "directory": str(Path.cwd())}).encode()
    requests, _ = _forking_process()
    socket.send_fds(requests, [request], [stdout, keeper, sys.stderr.fileno()])
    for given in (stdout, keeper):
        os.close(given)
    ended = os.fdopen(ended)
    return ForkedProcess(int(ended.readline()), os.fdopen(out), ended)


@functools.cache
def _forking_process():
    """The socket that takes requests, and the process at its other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST_REQUEST)
    command = [sys.executable, "-m", "tests.support.forking", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    return ours, process


def end():
    """End the forking process, if there is one, after its nodes: their CPU time then counts as that of this process."""
    if _forking_process.cache_info().currsize:
        requests, process = _forking_process()
        requests.close()
        process.wait()


def _serve(requests):
    """Fork a node for each request, and a keeper of it that tells when it ended. Returns in each node."""
    while True:
        content, files, *_ = socket.recv_fds(requests, _LONGEST_REQUEST, 3)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG if content else 0)[0]:
                pass
        if not content:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            return _keep(json.loads(content), *files)
        for file in files:
            os.close(file)


def _keep(wanted, stdout, keeper, stderr):
    if pid := os.fork():
        os.close(stdout)
        with os.fdopen(keeper, "w") as told:
            print(pid, file=told, flush=True)
            _, status = os.waitpid(pid, 0)
            print(status, file=told, flush=True)
        os._exit(0)
    os.close(keeper)
    for file, standard in ((stdout, 1), (stderr, 2)):
        os.dup2(file, standard)
        os.close(file)
    os.environ.clear()
    os.environ.update(wanted["env"])
    os.chdir(wanted["directory"])
    return wanted["arguments"]


# What a node imports as it starts, later than its first line.
_IMPORTED = (
    "worker_node.cli.serve",
    "worker_node.server",
    "worker_node.sandbox.pool",
    "openvino_genai",
    "tokenizers",
    "uvloop",
)

if __name__ == "__main__":
    from worker_node.cli.main import main

    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # forked processes share what they never collect
    sys.exit(main(_serve(socket.socket(fileno=int(sys.argv[1])))))
