"""The frames between the edge process and a preparation process: 4 bytes of length, then msgpack.

Arguments and results are plain values (None, bool, int, float, str, bytes, list, dict).
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Call `function` (`module:name`) within `cpu_s` seconds of CPU time."""

    function: str
    arguments: list[Any]
    cpu_s: float


class Returned(msgspec.Struct, frozen=True, tag="returned", array_like=True):
    """What the function returned."""

    value: Any


class CallRefused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """The function raised a `NodeError`; `code` is its code."""

    code: str
    message: str
    param: str | None


class OutOfMemory(msgspec.Struct, frozen=True, tag="out_of_memory", array_like=True):
    """The function needed more memory than the process may have."""


class CallFailed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The function raised something else: a bug. `where` is the exception's type and line, never its text."""

    where: str


Reply = Returned | CallRefused | OutOfMemory | CallFailed

_encoder = msgspec.msgpack.Encoder()
calls = msgspec.msgpack.Decoder(Call)
replies = msgspec.msgpack.Decoder(Reply)


def frame(message: Call | Reply) -> bytes:
    """The frame that carries a message. Raises ValueError, OverflowError or RecursionError for what has no form."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body
