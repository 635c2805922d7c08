"""Frames between the edge process and an engine process.

A frame is a 4-byte little-endian length and a msgpack body (`msgspec`), over a socket that has no name in the
file system: nothing is left behind by any kind of exit, and the end of either process is the end of the stream."""

from __future__ import annotations

import select
import socket
import struct
from typing import TypeVar

import msgspec

from worker_node.engines.protocol import Command, EngineSpec, Event, Job, Submit

LENGTH = struct.Struct("<I")
# Far above any real frame (2,048 vectors of 4,096 floats are 32 MiB): a larger one means that the stream is corrupt.
MAX_FRAME_BYTES = 256 * 1024 * 1024
_RECEIVE_BYTES = 256 * 1024

_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T", bound=Command | Event | EngineSpec)
# Decoders of what a frame may hold: commands to an engine process, events of it, and its first frame.
COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
EVENTS: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
SPECS = msgspec.msgpack.Decoder(EngineSpec)


class CorruptFrame(Exception):
    """The other side sent something that is not a frame: its process cannot be trusted any more."""


def encode(message: Command | Event | EngineSpec) -> bytes:
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def submission(job: Job) -> bytes:
    return encode(Submit(job.id, msgspec.Raw(_encoder.encode(job))))


def decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    """Return the message in a frame's body. Raises CorruptFrame if there is none of the decoder's."""
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise CorruptFrame(str(error)) from error


class FrameBuffer:
    """Splits a byte stream into frame bodies, however the bytes arrive."""

    def __init__(self) -> None:
        # The beginning of a frame, and how many bytes it must have before it can be parsed further.
        self._rest = bytearray()
        self._wanted = LENGTH.size

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return the bodies of all frames that are now complete."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return []
            data, self._rest = bytes(self._rest), bytearray()
        bodies: list[bytes] = []
        start, have = 0, len(data)
        self._wanted = LENGTH.size
        while have - start >= LENGTH.size:
            (size,) = LENGTH.unpack_from(data, start)
            if size > MAX_FRAME_BYTES:
                raise CorruptFrame(f"a frame of {size} bytes")
            end = start + LENGTH.size + size
            if have < end:
                self._wanted = end - start
                break
            bodies.append(data[start + LENGTH.size : end])
            start = end
        if start < have:
            self._rest += data[start:]
        return bodies


class ChildChannel:
    """The engine process's end: blocking writes, reads that wait only when asked to."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = FrameBuffer()
        self._unsent = b""

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, event: Event, *, later: bool = False) -> None:
        """Send one event, `later` with the next one or by `flush`. Raises OSError when the edge process is gone."""
        self._unsent += encode(event)
        if not later:
            self.flush()

    def flush(self) -> None:
        """Send what was to be sent later; raises as `send`."""
        if self._unsent:
            data, self._unsent = self._unsent, b""
            self._sock.sendall(data)

    def receive(self, *, wait: bool) -> list[bytes]:
        """Return the frames that have arrived (at least one if `wait`); EOFError when the edge process is gone."""
        frames: list[bytes] = []
        while True:
            if (frames or not wait) and not select.select([self._sock], [], [], 0)[0]:
                return frames
            data = self._sock.recv(_RECEIVE_BYTES)
            if not data:
                raise EOFError
            frames += self._buffer.feed(data)
