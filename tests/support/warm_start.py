"""`npu-node …` in a process that is forked from one that has imported it: a node starts with a second of CPU time less.

All else is as in a process of its own: arguments, environment, working directory, standard streams, signals, exit
status. `test_warm_start.py` compares the two; what is about imports or the interpreter's start takes `cold=True`.

None of them outlives the tests, however those end: the process that forks ends when the process that started it has
ended, and the kernel kills with it what it forked.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path

from tests.support import warm_children
from worker_node.core.operating_system import end_with_parent

IMPORTED = ("worker_node.server", "worker_node.bounded.profile", "worker_node.cli.serve", "uvloop")
_LENGTH = 4


class WarmProcess:
    """A process that `start_warm` started, with what tests use of `subprocess.Popen`."""

    def __init__(self, pid, channel, stdout, args):
        self.pid = pid
        self.args = args
        self.stdout = stdout
        self.returncode = None
        self._channel = channel

    def poll(self):
        """The exit status as far as it is known; negative for a signal."""
        return self._status(0)

    def wait(self, timeout=None):
        """The exit status. Raises subprocess.TimeoutExpired."""
        if self._status(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _status(self, timeout):
        if self.returncode is None:
            waiting = select.poll()
            waiting.register(self._channel, select.POLLIN)
            if waiting.poll(None if timeout is None else 1000 * timeout):
                self.returncode = int(self._channel.recv(64))
                self._channel.close()
        return self.returncode

    def send_signal(self, number):
        """Nothing when it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def start_warm(arguments, *, env, stdin=None, stdout=None, stderr=None):
    """Start `npu-node` with these arguments and environment. Streams are files, without them no input, and ours."""
    # Of packets: its pid and its status are two messages.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told = {
        "arguments": list(map(str, arguments)),
        "environment": env,
        "directory": str(Path.cwd()),
        "cores": sorted(os.sched_getaffinity(0)),
    }
    with theirs, contextlib.ExitStack() as stack:
        null = stack.enter_context(Path(os.devnull).open("rb"))
        files = [null if stdin is None else stdin, 1 if stdout is None else stdout, 2 if stderr is None else stderr]
        descriptors = [file if isinstance(file, int) else file.fileno() for file in files]
        body = json.dumps(told).encode()
        with _one_at_a_time:
            server = _server()
            socket.send_fds(server, [len(body).to_bytes(_LENGTH, "big")], [theirs.fileno(), *descriptors])
            server.sendall(body)
    return WarmProcess(int(ours.recv(64)), ours, None, ["npu-node", *arguments])


def start_warm_piped(arguments, *, env, stderr=None):
    """As `start_warm`, with its standard output as the text file `stdout`."""
    reading, writing = os.pipe()
    try:
        process = start_warm(arguments, env=env, stdout=writing, stderr=stderr)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    process.stdout = os.fdopen(reading, encoding="utf-8")
    return process


def run_warm(arguments, *, env, input=None, timeout=None):  # noqa: A002  (as subprocess.run names it)
    """Run `npu-node …` to its end: a `subprocess.CompletedProcess` with both outputs as text."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        stdin.write((input or "").encode())
        stdin.seek(0)
        process = start_warm(arguments, env=env, stdin=stdin, stdout=stdout, stderr=stderr)
        try:
            process.wait(timeout)
        finally:
            process.kill()
        outputs = []
        for file in (stdout, stderr):
            file.seek(0)
            outputs.append(file.read().decode())
    return subprocess.CompletedProcess(process.args, process.returncode, *outputs)


@functools.cache
def _server():
    """The process that forks, started when it is first needed. It ends when this process has ended."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = warm_children.start_forker("tests.support.warm_start", theirs)

    def end():
        ours.close()
        process.terminate()
        process.wait()

    atexit.register(end)
    return ours


_one_at_a_time = threading.Lock()


def serve(channel):
    """Fork a process for each message, until the other end is closed; tell each one's pid, and later its status."""
    gc.disable()
    for module in IMPORTED:
        importlib.import_module(module)
    warm_children.import_all(warm_children.ENGINES)
    gc.freeze()
    gc.enable()
    found = _in_child(_devices)
    waiting = {}
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal of the tests is theirs
    signal.set_wakeup_fd(woken.fileno())
    while True:
        readable, _, _ = select.select([channel, wake], [], [])
        if wake in readable:
            with contextlib.suppress(BlockingIOError):
                wake.recv(4096)
            _report(waiting)
        if channel in readable:
            head, descriptors, _, _ = socket.recv_fds(channel, _LENGTH, 4)
            if not head:
                return None
            told = json.loads(channel.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
            ours = os.getpid()
            pid = os.fork()
            if pid == 0:
                end_with_parent(ours)
                for end in (channel, wake, woken, *waiting.values()):
                    end.close()
                return _become(told, descriptors, found)
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            waiting[pid] = socket.socket(fileno=descriptors[0])
            waiting[pid].sendall(str(pid).encode())
            _report(waiting)


def _report(waiting):
    """Tell the statuses of those that have ended."""
    while waiting and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        with waiting.pop(ended.si_pid) as channel, contextlib.suppress(OSError):
            channel.sendall(str(status).encode())
        # Not before: until its status is known, there is a process of that id.
        os.waitpid(ended.si_pid, 0)


def _in_child(function):
    """What a function returns in a forked process, as plain values."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with os.fdopen(writing, "w") as stream:
            json.dump(function(), stream)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        returned = json.load(stream)
    os.waitpid(pid, 0)
    return returned


def _devices():
    from worker_node.devices.probe import list_devices

    return asdict(list_devices())


def _become(told, descriptors, found):
    """In the forked process: take over what it was told and run the command.

    `found` are this machine's devices: a node need not ask again if its environment tells OpenVINO the same.
    """
    from worker_node import server
    from worker_node.core.environment import native_environment
    from worker_node.devices.probe import DeviceInfo, Probe

    async def probe():
        return Probe(tuple(DeviceInfo(**device) for device in found["devices"]), found["openvino"])

    if native_environment(told["environment"]) == native_environment():
        server.probe = probe
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.close(descriptors[0])
    for target, descriptor in enumerate(descriptors[1:]):
        os.dup2(descriptor, target)
        os.close(descriptor)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8")
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(2, "w", closefd=False)), "utf-8", "backslashreplace", line_buffering=True
    )
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["directory"])
    os.sched_setaffinity(0, told["cores"])
    sys.argv = ["npu-node", *told["arguments"]]
    warm_children.fork_children_of_this_process()
    from worker_node.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1]))))
