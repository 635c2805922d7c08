"""Recordings as callers give them, and transcriptions as nodes reply them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from backend_client._resilience.threads import in_daemon_thread
from backend_client.errors import InvalidArgument
from backend_client.results import TranscriptionSegment, TranscriptionWord

Audio: TypeAlias = str | Path | bytes | BinaryIO


async def read_recording(audio: Any) -> tuple[str, bytes]:
    """The name and the bytes of a recording. Raises InvalidArgument."""
    if isinstance(audio, bytes | bytearray | memoryview):
        name, content = "audio", bytes(audio)
    elif isinstance(audio, str | Path):
        path = Path(audio)
        name, content = path.name, await _read(path.read_bytes)
    elif callable(read := getattr(audio, "read", None)):
        given = getattr(audio, "name", None)
        name = os.path.basename(given) if isinstance(given, str) else "audio"  # noqa: PTH119  (not always a path)
        content = await _read(read)
    else:
        raise InvalidArgument(
            f"audio is {type(audio).__name__}, not a path, bytes or a file opened in binary mode", param="audio"
        )
    if not content:
        raise InvalidArgument("audio is empty", param="audio")
    return name or "audio", content


async def _read(read: Callable[[], Any]) -> bytes:
    problem = "it is not opened in binary mode"
    try:
        content = await in_daemon_thread(read, "read a recording")
    except OSError as error:
        problem = error.strerror or type(error).__name__
    except ValueError:
        # A path with a NUL, or a file that was closed.
        problem = "it is closed, or not a valid path"
    else:
        if isinstance(content, bytes):
            return content
    raise InvalidArgument(f"audio cannot be read: {problem}", param="audio")


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


def transcription_fields(body: Any) -> dict[str, Any] | None:
    """What a reply of /v1/audio/transcriptions (`verbose_json`) says; None if it is malformed."""
    try:
        return {
            "text": _typed(body["text"], str),
            "language": _typed(body.get("language"), str, none=True),
            "duration": _seconds(body.get("duration"), none=True),
            "segments": tuple(
                TranscriptionSegment(_seconds(part["start"]), _seconds(part["end"]), _typed(part["text"], str))
                for part in _parts(body.get("segments"))
            ),
            "words": tuple(
                TranscriptionWord(_seconds(part["start"]), _seconds(part["end"]), _typed(part["word"], str))
                for part in _parts(body.get("words"))
            ),
        }
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    return iter(value or ())


def _typed(value: Any, kind: type, *, none: bool = False) -> Any:
    if not isinstance(value, kind) and not (none and value is None):
        raise TypeError
    return value


def _seconds(value: Any, *, none: bool = False) -> Any:
    if none and value is None:
        return None
    # OpenAI itself sends the duration as a text in some versions.
    seconds = float(value)
    if isinstance(value, bool) or not math.isfinite(seconds):
        raise ValueError
    return seconds
