"""The node's child processes (engines, preparation) forked from one that has imported what they need.

A start of an interpreter with an engine's imports takes a fifth to half a second of CPU time, and the suite makes
hundreds. Here a process beside the one under test, the forker, waits for orders to become `python -m MODULE …`. All
else is as `operating_system.start_module` does it: a child of the process that started it, with the environment that
children get, whom it can wait for, and whom the kernel kills with it. `test_warm_children.py` compares the two.
"""

import atexit
import contextlib
import ctypes
import functools
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from worker_node.core.environment import native_environment
from worker_node.core.operating_system import end_with_parent, start_module
from worker_node.engines import process
from worker_node.sandbox import pool as preparation

# What becomes a child is imported by it, as its __main__; what it needs is there.
MODULES = ("worker_node.engines.child", "worker_node.sandbox.worker")
ENGINES = (
    "worker_node.structured_output.form",
    "worker_node.tasks.embed.packing",
    "worker_node.tasks.generate.continuous",
    "worker_node.tasks.generate.stateful",
)
SCRIPTED = ("tests.support.scripted_runner",)
_LARGEST = 1 << 17  # bytes of an order
_PR_SET_CHILD_SUBREAPER = 36
# Address space of a preparation process in an interpreter of its own, about.
_USUAL_BYTES = 64 << 20


class ForkedChild(subprocess.Popen):
    """A child that the forker made: the methods of Popen, which did not start it."""

    def __init__(self, pid, args):
        self.pid, self.args, self.returncode = pid, args, None
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock = threading.Lock()
        self._child_created = True


class Forker:
    """Starts modules through the process at the other end of `channel`."""

    def __init__(self, channel):
        self._channel = channel
        self._one = threading.Lock()

    def start_module(self, module, *arguments):
        """As `operating_system.start_module`."""
        ours, theirs = socket.socketpair()
        reading, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = {
            "module": module,
            "arguments": list(map(str, arguments)),
            "environment": native_environment(),
            "directory": str(Path.cwd()),
            "cores": sorted(os.sched_getaffinity(0)),
            # A command that a shell runs in the background ignores it, and so do its children.
            "interruptible": signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
            "parent": os.getpid(),
        }
        with theirs, told, reading, self._one, _subreaper():
            files = [told.fileno(), theirs.fileno(), 1, 2]
            socket.send_fds(self._channel, [json.dumps(order).encode()], files)
            told.close()
            pid = reading.recv(64)
        if not pid:
            ours.close()
            raise OSError(f"{module} could not be forked")
        return ForkedChild(int(pid), [module, *order["arguments"]]), ours


@contextlib.contextmanager
def _subreaper():
    """Orphans of this process's descendants become its children inside the block."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def import_all(names):
    """Import modules, and those that become children so that they can be run afterwards."""
    for name in (*MODULES, *names):
        importlib.import_module(name)
    for name in MODULES:
        del sys.modules[name]


def fork_children_of_this_process():
    """Fork a forker from this process, which has imported what its children need and has no threads yet."""
    parent = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        if _serve(theirs, parent):
            os._exit(0)
        return  # not reached: a child ends with SystemExit
    theirs.close()
    atexit.register(_end, ours, lambda: os.kill(pid, signal.SIGKILL), lambda: os.waitpid(pid, 0))
    process.start_module = preparation.start_module = Forker(ours).start_module


def start_engine(module, *arguments):
    """As `operating_system.start_module`, for the tests' own process: from a forker with scripted engines.

    The kernel ties children to the thread that makes them, or the forker, so others than the main thread get none.
    """
    if threading.current_thread() is not threading.main_thread():
        return start_module(module, *arguments)
    return _own_forker(os.getpid()).start_module(module, *arguments)


@functools.cache
def _own_forker(parent):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = start_forker("tests.support.warm_children", theirs, parent)
    atexit.register(_end, ours, process.kill, process.wait)
    return Forker(ours)


def start_forker(module, channel, *arguments):
    """Start a module of ours that forks, with its end of a channel."""
    command = [sys.executable, "-m", module, str(channel.fileno()), *map(str, arguments)]
    # The blanks are room for the command lines of what it forks.
    return subprocess.Popen(
        [*command, " " * 64],
        pass_fds=(channel.fileno(),),
        stdin=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )


def _end(channel, kill, wait):
    channel.close()
    kill()
    wait()


def _serve(channel, parent):
    """Make children until the other end is closed: then true. In a child it does not return."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal of the tests is theirs
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    while True:
        body, descriptors, _, _ = socket.recv_fds(channel, _LARGEST, 4)
        if not body:
            return True
        middle = os.fork()
        if middle == 0:
            middle = os.getpid()
            if os.fork():
                os._exit(0)
            channel.close()
            os.close(null)
            _become(json.loads(body), descriptors, middle)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(middle, 0)


def _become(told, descriptors, middle):
    """In the forked process: wait until it is a child of the one that asked, and run the module."""
    while os.getppid() == middle:
        time.sleep(0.0005)
    reply, own, *outputs = descriptors
    for target, descriptor in enumerate(outputs, 1):
        os.dup2(descriptor, target)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler if told["interruptible"] else signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["directory"])
    os.sched_setaffinity(0, told["cores"])
    arguments = told["arguments"]
    if told["module"] == "worker_node.sandbox.worker":
        # Its limit is of address space, of which the imports of engines have taken some.
        arguments[0] = str(int(arguments[0]) + max(0, _address_space() - _USUAL_BYTES))
    sys.argv = [told["module"], str(own), str(told["parent"]), *arguments]
    _show_as(f"{sys.executable}\0-m\0{told['module']}".encode())
    with socket.socket(fileno=reply) as channel:
        channel.sendall(str(os.getpid()).encode())
    runpy.run_module(told["module"], run_name="__main__", alter_sys=True)
    sys.exit(0)


def _address_space():
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _show_as(command):
    """Have /proc show this command line for this process: tests look for engines by it."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, the 48th and 49th of all
    assert len(command) < end - start, "the command line of the forker is too short"
    ctypes.memmove(start, command.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    import_all(SCRIPTED)
    _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
