"""What the loop of an engine process sends at once, and what it sends along with the next event."""

import contextlib
import socket

import pytest

from worker_node.encoders.jobs import RowJob
from worker_node.engines import child
from worker_node.engines.child import EdgeGone, Loop
from worker_node.engines.protocol import Cancel, EngineStats, NativeCall, Results, Shutdown
from worker_node.engines.wire import ChildChannel, FrameBuffer, decode_event, encode
from worker_node.tasks.generate.messages import Step, TokenDelta

STEP, LAST = Step([TokenDelta(1, [7])], announced=True), Step([TokenDelta(1, [8], "stop")])
CALL = NativeCall("step", 1, [1])


class Edge:
    """The other end of the loop's channel; it reads only what has arrived."""

    def __init__(self, sock):
        self._sock = sock
        self._buffer = FrameBuffer()

    def received(self):
        data = b""
        with contextlib.suppress(BlockingIOError):
            while more := self._sock.recv(1 << 16, socket.MSG_DONTWAIT):
                data += more
        return [type(decode_event(body)) for body in self._buffer.feed(data)]

    def send(self, command):
        self._sock.sendall(encode(command))


class ScriptedSteps:
    """A runner that does one thing in each step, then has no work; `cancelled` is what the edge had by a Cancel."""

    jobs = RowJob
    wake_fd = None

    def __init__(self, edge, *steps):
        self._edge = edge
        self._steps = list(steps)
        self.cancelled = None

    has_work = property(lambda self: bool(self._steps))

    def step(self, emit, poll):
        self._steps.pop(0)(emit)

    def cancel(self, _job_id):
        self.cancelled = self._edge.received()

    def stats(self):
        return EngineStats()


@pytest.fixture
def run(monkeypatch):
    """Run a loop over these steps, made by a function of the edge, until the edge is gone; returns the runner."""
    monkeypatch.setattr(child, "HEARTBEAT_S", 1e9)
    ours, theirs = socket.socketpair()

    def go(make):
        edge = Edge(ours)
        runner = ScriptedSteps(edge, *make(edge))
        loop = Loop(ChildChannel(theirs), runner)
        loop.poll()
        assert len(edge.received()) == 1, "the first heartbeat"
        with pytest.raises(EdgeGone):
            loop.run()
        return runner

    with ours, theirs:
        yield go


def test_results_go_with_the_announcement_of_the_next_step(run):
    seen = []

    def make(edge):
        def announce(emit):
            seen.append(edge.received())
            emit(CALL)
            seen.append(edge.received())
            edge.send(Shutdown())

        return (lambda emit: emit(STEP)), announce

    run(make)
    assert seen == [[], [Results, NativeCall]]


def test_results_that_nothing_follows_are_sent_at_once(run):
    seen = []

    def make(edge):
        def end(emit):
            emit(LAST)
            seen.append(edge.received())
            edge.send(Shutdown())

        return (end,)

    run(make)
    assert seen == [[Results]]


def test_a_command_does_not_find_results_held_back(run):
    """It may cancel all that the next step would have announced."""

    def make(edge):
        def cancelled(emit):
            emit(STEP)
            edge.send(Cancel(1))

        return cancelled, (lambda _emit: edge.send(Shutdown()))

    assert run(make).cancelled == [Results]


def test_nothing_is_held_back_while_the_loop_waits(run, monkeypatch):
    seen = []

    def make(edge):
        def select(*_arguments):
            seen.append(edge.received())
            edge.send(Shutdown())

        monkeypatch.setattr(child.select, "select", select)
        return ((lambda emit: emit(STEP)),)

    run(make)
    assert seen == [[Results]]
