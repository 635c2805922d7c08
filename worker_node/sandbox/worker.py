"""A preparation process: one call after the other, until the edge process closes the socket or dies.

    python -m worker_node.sandbox.worker FD PARENT_PID MEMORY_BYTES MODULE…

The modules are imported before the first call. A call that exceeds its CPU time ends the process with SIGPROF, even
inside native code that never returns to Python. Frames are 4 bytes of length, then msgpack; arguments and results are
plain values (None, bool, int, float, str, bytes, list, dict). Not `engines.wire`: its buffer holds a frame three times,
which for audio of 200 MB is more than a call's bound of memory."""

from __future__ import annotations

import importlib
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from worker_node.core.errors import NodeError
from worker_node.core.operating_system import end_with_parent, limit_memory

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


def run(call: Call) -> Reply:
    """Run one call."""
    signal.setitimer(signal.ITIMER_PROF, call.cpu_s)
    try:
        return Returned(_function(call.function)(*call.arguments))
    except NodeError as error:
        return CallRefused(error.code, error.message, error.param)
    except MemoryError:
        return OutOfMemory()
    except Exception as error:  # noqa: BLE001  (a bug, which the edge logs; the process can go on)
        return CallFailed(_place(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main(fd: int, parent: int, memory_bytes: int, modules: Sequence[str]) -> None:
    """Serve calls on the socket `fd`."""
    end_with_parent(parent)
    # The edge process decides when this one ends; a Ctrl-C in its terminal reaches us too and must not.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_memory(memory_bytes)
    for module in modules:
        importlib.import_module(module)
    with socket.socket(fileno=fd) as channel:
        while (head := _received(channel, LENGTH.size)) is not None:
            body = _received(channel, LENGTH.unpack(head)[0])
            if body is None:
                return
            channel.sendall(frame(run(calls.decode(body))))


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _received(channel: socket.socket, size: int) -> bytes | None:
    """So many bytes; None when the edge process has closed its end."""
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(size - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    return f"{type(error).__name__}{where}"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
