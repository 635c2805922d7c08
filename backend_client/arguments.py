"""Checks and reads the arguments of a call before anything is sent.

Every function raises InvalidArgument, which names the argument and its type and repeats no value.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import threading
from collections.abc import AsyncIterable, Callable, Iterable, KeysView, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, get_type_hints

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from backend_client.errors import InvalidArgument
from backend_client.http.messages import MOST_BYTES
from backend_client.lifetime import in_daemon_thread

# What frames a request: another value would break it.
_OWN_HEADERS = frozenset({
    "accept", "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host",
    "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "x-npu-restart-wait-ms", "x-npu-engine-deaths",
})  # fmt: skip
_OPTION_OF_HEADER = {
    "x-request-id": "request_id",
    "x-request-timeout-ms": "timeout",
    "x-npu-start-timeout-ms": "timeout",
    "x-priority": "priority",
    "x-npu-require-device": "require_device",
    "x-npu-local-only": "local_only",
    "x-npu-failover": "failover",
}
NOT_SENT_ON = _OWN_HEADERS | _OPTION_OF_HEADER.keys()
"""Headers of a request that the client sets itself, or has an option for: a node must not get its caller's."""
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_HEADER_TEXT = re.compile(r"[\x20-\x7e]*")


def options(method: str, given: Mapping[str, Any], declared: type) -> dict[str, Any]:
    """The options that were given, as the TypedDict `declared` types them; None means not given."""
    if not given:
        return {}
    checked = _checked_by(declared)
    if unknown := next((name for name in given if name not in checked.model_fields), None):
        close = difflib.get_close_matches(unknown, list(checked.model_fields), 1)
        hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(checked.model_fields)}"
        if unknown == "stream":
            hint = "call stream(prompt) for an answer piece by piece"
        raise InvalidArgument(f"{method}() has no option {unknown}: {hint}", param=unknown)
    values = {name: _plain(value) for name, value in given.items() if value is not None}
    try:
        read = checked.model_validate(values)
    except ValidationError as error:
        problems = error.errors(include_input=False, include_url=False, include_context=False)
    else:
        headers(values.get("extra_headers", {}))
        return {name: getattr(read, name) for name in values}
    # Raised outside of the handler: that error holds the values.
    name = str(problems[0]["loc"][0])
    expected = [problem["msg"].removeprefix("Input should be ") for problem in problems if problem["loc"][0] == name]
    must = checked.model_fields[name].description or " or ".join(dict.fromkeys(expected))
    raise InvalidArgument(f"{name} must be {must}; {method}() got {type(values[name]).__name__}", param=name)


@cache
def _checked_by(declared: type) -> type[BaseModel]:
    """A model with the fields of a TypedDict, which pydantic would not take as it is before Python 3.12."""
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, str_min_length=1)
    fields: dict[str, Any] = {
        name: (hint, None) for name, hint in get_type_hints(declared, include_extras=True).items()
    }
    return create_model(declared.__name__, __config__=config, **fields)


def _plain(value: Any) -> Any:
    """numpy's numbers are numbers, and a tuple is as good as a list."""
    if isinstance(value, np.generic):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def headers(given: Mapping[str, str]) -> None:
    """Raise InvalidArgument for extra headers that a node must not get."""
    for name, value in given.items():
        plain = name.lower()
        problem = None
        if not _HEADER_NAME.fullmatch(name):
            problem = "a name that is not printable ASCII"
        elif not _HEADER_TEXT.fullmatch(value):
            problem = f"a value that is not printable ASCII, in {name}"
        elif plain in _OPTION_OF_HEADER:
            problem = f"{plain}: give the option {_OPTION_OF_HEADER[plain]}"
        elif plain in _OWN_HEADERS or plain.startswith("proxy-"):
            problem = f"{plain}, which the client sets itself"
        if problem is not None:
            raise InvalidArgument(f"extra_headers has {problem}", param="extra_headers")


def text(value: object, name: str) -> str:
    """`value`, if it is a text that can be sent."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} must be a str, got {type(value).__name__}", param=name.partition("[")[0])
    if not value.isascii() and _SURROGATE.search(value):
        raise InvalidArgument(f"{name} is not Unicode: it has a lone surrogate", param=name.partition("[")[0])
    return value


def text_list(values: Iterable[str], name: str = "texts") -> list[str]:
    """The texts of any iterable, in its order."""
    return [
        # Nearly all pass without a call, and without a name that nobody reads.
        value if type(value) is str and value.isascii() else text(value, f"{name}[{index}]")
        for index, value in enumerate(ordered(values, name))
    ]


def ordered(values: Iterable[str], name: str = "texts") -> Iterable[str]:
    """`values`, if its order is that of the results and it is not one text by mistake."""
    hint = ""
    if isinstance(values, str | bytes | bytearray | memoryview):
        hint = "; for one text call embed" if name == "texts" else ""
    elif isinstance(values, AsyncIterable):
        hint = "; call embed_many or embed_stream" if name == "texts" else ""
    elif not isinstance(values, Mapping | AbstractSet) or isinstance(values, KeysView):
        try:
            return iter(values)
        except TypeError:
            pass
    raise InvalidArgument(f"{name} must be a list of texts, got {type(values).__name__}{hint}", param=name)


def messages(values: object) -> list[Any]:
    """OpenAI's messages: a list of mappings, or of the SDK's objects, that is not empty."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence) or not values:
        raise InvalidArgument(
            "messages must be a list such as [{'role': 'user', 'content': …}] that is not empty, got "
            f"{type(values).__name__}; for a prompt call generate",
            param="messages",
        )
    read = [value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value for value in values]
    for index, message in enumerate(read):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            kind = type(message).__name__
            raise InvalidArgument(f"messages[{index}] must be a mapping with a role, got {kind}", param="messages")
    return [dict(message) for message in read]


def is_model(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel)


def response_format(model: Any) -> dict[str, Any]:
    """OpenAI's `response_format` for a pydantic model: all its fields, and no others."""
    if not is_model(model):
        raise InvalidArgument("schema must be a pydantic model (the class)", param="schema")
    name = re.sub(r"[^a-zA-Z0-9_-]", "_", model.__name__)[:64]
    return {"type": "json_schema", "json_schema": {"name": name, "schema": _closed(model.model_json_schema())}}


def _closed(schema: Any) -> Any:
    """The schema with every object closed and every property required, as strict servers demand."""
    if isinstance(schema, list):
        return [_closed(value) for value in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {name: value for name, value in schema.items() if name != "default"}
    for name in ("properties", "$defs", "definitions", "patternProperties"):
        if isinstance(found.get(name), Mapping):
            found[name] = {key: _closed(value) for key, value in found[name].items()}
    for name in ("anyOf", "allOf", "oneOf", "prefixItems", "items", "additionalProperties", "not"):
        if name in found:
            found[name] = _closed(found[name])
    if isinstance(found.get("properties"), Mapping):
        found["required"] = list(found["properties"])
        found.setdefault("additionalProperties", False)
    return found


Audio: TypeAlias = str | Path | bytes | BinaryIO
_PIECE = 1 << 20


async def recording(audio: Any) -> tuple[str, bytes]:
    """The name and the bytes of a recording, of at most `MOST_BYTES`."""
    if isinstance(audio, bytes | bytearray | memoryview):
        name, content = "audio", bytes(audio)
        _bound(len(content))
    elif isinstance(audio, str | Path):
        path = Path(audio)
        name, content = path.name, await _read(lambda: path.open("rb"))
    elif callable(getattr(audio, "read", None)):
        given = getattr(audio, "name", None)
        name = os.path.basename(given) if isinstance(given, str) else "audio"  # noqa: PTH119  (not always a path)
        content = await _read(lambda: nullcontext(audio))
    else:
        kind = type(audio).__name__
        raise InvalidArgument(f"audio must be a path, bytes or a file opened in binary mode, got {kind}", param="audio")
    if not content:
        raise InvalidArgument("audio is empty", param="audio")
    return name or "audio", content


async def _read(opened: Callable[[], AbstractContextManager[BinaryIO]]) -> bytes:
    left = threading.Event()

    def read() -> bytes:
        """The whole recording, read in pieces: reading ends when the call is cancelled, or at the bound on bytes."""
        content = bytearray()
        with opened() as file:
            while not left.is_set() and (piece := file.read(_PIECE)):
                if not isinstance(piece, bytes):
                    raise ValueError
                content += piece
                _bound(len(content))
        return bytes(content)

    try:
        return await in_daemon_thread(read, "read a recording")
    except InvalidArgument:
        raise
    except OSError as error:
        problem = error.strerror or type(error).__name__
    except ValueError:
        # A path with a NUL, a file that was closed, or one of texts.
        problem = "it must be a valid path, or a file that is open in binary mode"
    finally:
        left.set()
    raise InvalidArgument(f"audio cannot be read: {problem}", param="audio")


def _bound(size: int) -> None:
    if size > MOST_BYTES:
        raise InvalidArgument(f"audio must have at most {MOST_BYTES} bytes; send it in parts", param="audio")


def form_value(value: Any, name: str) -> str:
    """An option as a field of a form."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, Mapping):
        return str(value)
    try:
        return json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{name} has no JSON form ({error})", param=name) from error
