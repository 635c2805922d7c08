"""Recordings as callers give them: a path, bytes or an open file, read whole and within a bound."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from backend_client.errors import InvalidArgument
from backend_client.http.forms import MOST_BYTES
from backend_client.lifetime import in_daemon_thread

Audio: TypeAlias = str | Path | bytes | BinaryIO
_PIECE = 1 << 20


async def read_recording(audio: Any) -> tuple[str, bytes]:
    """The name and the bytes of a recording, of at most `MOST_BYTES`. Raises InvalidArgument."""
    if isinstance(audio, bytes | bytearray | memoryview):
        name = "audio"
        _bound(audio.nbytes if isinstance(audio, memoryview) else len(audio))
        content = bytes(audio)
    elif isinstance(audio, str | Path):
        path = Path(audio)
        name, content = path.name, await _read(lambda: path.open("rb"))
    elif callable(getattr(audio, "read", None)):
        given = getattr(audio, "name", None)
        name = os.path.basename(given) if isinstance(given, str) else "audio"  # noqa: PTH119  (not always a path)
        content = await _read(lambda: nullcontext(audio))
    else:
        raise InvalidArgument(
            f"audio is {type(audio).__name__}, not a path, bytes or a file opened in binary mode", param="audio"
        )
    if not content:
        raise InvalidArgument("audio is empty", param="audio")
    return name or "audio", content


async def _read(opened: Callable[[], AbstractContextManager[BinaryIO]]) -> bytes:
    problem = "it is not opened in binary mode"
    left = threading.Event()

    def read() -> bytes | None:
        """All of it piece by piece, so that it ends when nobody waits for it, or it has too many."""
        pieces: list[bytes] = []
        size = 0
        with opened() as file:
            while not left.is_set() and (piece := file.read(_PIECE)):
                if not isinstance(piece, bytes):
                    return None
                pieces.append(piece)
                _bound(size := size + len(piece))
        return b"".join(pieces)

    try:
        content = await in_daemon_thread(read, "read a recording")
    except InvalidArgument:
        raise
    except OSError as error:
        problem = error.strerror or type(error).__name__
    except ValueError:
        # A path with a NUL, or a file that was closed.
        problem = "it is closed, or not a valid path"
    else:
        if content is not None:
            return content
    finally:
        left.set()
    raise InvalidArgument(f"audio cannot be read: {problem}", param="audio")


def _bound(size: int) -> None:
    if size > MOST_BYTES:
        raise InvalidArgument(
            f"audio has more than the {MOST_BYTES} bytes that are sent; send it in parts", param="audio"
        )


def form_value(value: Any, name: str) -> str:
    """An option as a field of a form. Raises InvalidArgument."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, Mapping):
        return str(value)
    try:
        return json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{name} has no JSON form ({error})", param=name) from error
