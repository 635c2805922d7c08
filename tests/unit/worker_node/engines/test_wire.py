"""Frames survive any cutting of the stream; rubbish is recognised."""

import contextlib
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.encoders.jobs import RowResult
from worker_node.engines import wire
from worker_node.engines.child import EdgeGone, Loop
from worker_node.engines.protocol import (
    Cancel,
    EngineStats,
    Failed,
    Heartbeat,
    Loaded,
    LoadFailed,
    NativeCall,
    OutcomeBatch,
    results_of,
)
from worker_node.engines.wire import (
    LENGTH,
    MAX_FRAME_BYTES,
    ChildChannel,
    CorruptFrame,
    FrameBuffer,
    decode,
    encode,
)
from worker_node.tasks.generate.messages import GenerateJob, Step, TokenDelta

OUTCOMES = [
    Step([TokenDelta(1, [1, 2], "stop", 3.5, 17), TokenDelta(2, [3])]),
    RowResult(4, b"\x00" * 8, 1.0, 0.5),
    OutcomeBatch([RowResult(6, b"\x00" * 8, 1.0, 0.5), Step([TokenDelta(7, [3])])]),
]
EVENTS = [
    Loaded(1.5, "CPU", "2026"),
    LoadFailed("no device"),
    *map(results_of, OUTCOMES),
    Failed(5, "overloaded", "full"),
    Heartbeat(EngineStats(waiting=1, running=2, kv_cache_usage=0.5)),
]


@given(st.lists(st.integers(1, 50), max_size=60))
def test_frames_survive_any_cutting(cuts):
    stream = b"".join(encode(event) for event in EVENTS)
    buffer = FrameBuffer()
    bodies, at = [], 0
    for cut in cuts:
        bodies += buffer.feed(stream[at : at + cut])
        at += cut
    bodies += buffer.feed(stream[at:])
    assert [decode(wire.EVENTS, body) for body in bodies] == EVENTS


def test_an_impossible_length_is_corrupt():
    with pytest.raises(CorruptFrame):
        FrameBuffer().feed(LENGTH.pack(MAX_FRAME_BYTES + 1))


@given(st.binary(max_size=64))
def test_rubbish_is_corrupt_and_nothing_else(body):
    for decoder in (wire.COMMANDS, wire.EVENTS, wire.SPECS):
        with contextlib.suppress(CorruptFrame):
            decode(decoder, body)


def test_the_child_reads_without_waiting_and_sees_the_end():
    ours, theirs = socket.socketpair()
    with theirs:
        channel = ChildChannel(theirs)
        assert channel.receive(wait=False) == []
        ours.sendall(encode(Cancel(1)) + encode(Cancel(2)))
        assert [decode(wire.COMMANDS, body).id for body in channel.receive(wait=True)] == [1, 2]
        ours.close()
        with pytest.raises(EOFError):
            channel.receive(wait=False)


def test_the_first_native_call_of_each_stage_is_marked():
    ours, theirs = socket.socketpair()

    class Runner:
        jobs, has_work, wake_fd = GenerateJob, True, None

        def stats(self):
            return EngineStats()

        def step(self, emit, _poll):
            for stage in ("prefill", "step", "step", "prefill"):
                emit(NativeCall(stage, 1, [1]))
            ours.shutdown(socket.SHUT_WR)

    with ours, theirs:
        with pytest.raises(EdgeGone):
            Loop(ChildChannel(theirs), Runner()).run()
        events = [decode(wire.EVENTS, body) for body in FrameBuffer().feed(ours.recv(4096))]
    calls = [(event.stage, event.first) for event in events if isinstance(event, NativeCall)]
    assert calls == [("prefill", True), ("step", True), ("step", False), ("prefill", False)]
