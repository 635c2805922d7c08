"""A preparation process: one call after the other, until the edge process closes the socket or dies.

    python -m worker_node.sandbox.worker LINK PARENT_PID MEMORY_BYTES MODULE…

The modules are imported before the first call. A call that exceeds its CPU time ends the process (`limit_cpu`), even
inside native code that never returns to Python. Messages are msgpack; arguments and results are plain values (None,
bool, int, float, str, bytes, list, dict)."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from worker_node.core.errors import NodeError
from worker_node.core.operating_system import limit_cpu, limit_memory, link_to_parent


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Call `function` (`module:name`) within `cpu_s` seconds of CPU time."""

    function: str
    arguments: list[Any]
    cpu_s: float


class Returned(msgspec.Struct, frozen=True, tag="returned", array_like=True):
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

encode = msgspec.msgpack.Encoder().encode
calls = msgspec.msgpack.Decoder(Call)
replies = msgspec.msgpack.Decoder(Reply)


def run(call: Call) -> Reply:
    limit_cpu(call.cpu_s)
    try:
        module, _, function = call.function.partition(":")
        return Returned(getattr(importlib.import_module(module), function)(*call.arguments))
    except NodeError as error:
        return CallRefused(error.code, error.message, error.param)
    except MemoryError:
        return OutOfMemory()
    except Exception as error:  # noqa: BLE001  (a bug, which the edge logs; the process can go on)
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = "" if trace is None else f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        return CallFailed(f"{type(error).__name__}{where}")
    finally:
        limit_cpu(0)


def main(link: int, parent: int, memory_bytes: int, modules: Sequence[str]) -> None:
    sock = link_to_parent(link, parent)
    # The edge process decides when this one ends; a Ctrl-C in its terminal reaches us too and must not.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_memory(memory_bytes)
    for module in modules:
        importlib.import_module(module)
    with Connection(sock.detach()) as channel, contextlib.suppress(EOFError):  # the edge process has closed its end
        while True:
            channel.send_bytes(encode(run(calls.decode(channel.recv_bytes()))))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
