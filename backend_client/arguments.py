"""Checks the arguments of a call before anything is sent.

Every function raises InvalidArgument, which names the argument and its type and repeats no value."""

from __future__ import annotations

import difflib
import inspect
import math
import re
import types
from collections.abc import AsyncIterable, Callable, Iterable, KeysView, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from backend_client.errors import InvalidAnswer, InvalidArgument
from backend_client.results import ChatResult

# Names come back in messages and logs.
_NAME_CHARS = 256
_NAME = re.compile(rf"[^\x00-\x1f\x7f]{{1,{_NAME_CHARS}}}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
# What frames a request, or says what other options say: another value would break the request or be lost.
_OWN_HEADERS = frozenset({
    "accept", "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host",
    "keep-alive", "te", "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
_OPTION_OF_HEADER = {
    "x-request-id": "request_id",
    "x-request-timeout-ms": "timeout",
    "x-priority": "priority",
    "x-npu-require-device": "require_device",
    "x-npu-local-only": "local_only",
}
_HEADER_TEXT = re.compile(r"[\x20-\x7e]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_INVALID = object()
# Returns the value as it is sent, or _INVALID.
_Reader = Callable[[Any], Any]


def text(value: object, name: str) -> str:
    """`value`, if it is a text that can be sent."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} is {_type(value)}, not str", param=name.partition("[")[0])
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            # Raised outside of the handler: that error holds the text.
            pass
        else:
            return value
        raise InvalidArgument(f"{name} is not Unicode: it has a lone surrogate", param=name.partition("[")[0])
    return value


def text_list(values: Iterable[str], name: str = "texts") -> list[str]:
    """The texts of any iterable, in its order."""
    return [
        # Nearly all pass without a call, and without a name that nobody reads.
        value if type(value) is str and value.isascii() else text(value, f"{name}[{index}]")
        for index, value in enumerate(ordered(values, name))
    ]


def words(values: Sequence[object], name: str, known: Sequence[str]) -> list[str]:
    """`values`, if all of them are among the known words."""
    if not values or not all(isinstance(value, str) and value in known for value in values):
        raise InvalidArgument(f"{name} is a list of {' and '.join(map(repr, known))}", param=name)
    return [str(value) for value in values]


def ordered(values: Iterable[str], name: str = "texts") -> Iterable[str]:
    """`values`, if its order is that of the results and it is not one text by mistake."""
    problem = None
    if isinstance(values, str | bytes | bytearray | memoryview):
        problem = "one text; give a list of texts" + (", or call embed for one text" if name == "texts" else "")
    elif isinstance(values, Mapping):
        problem = "a mapping; give a list of its keys or of its values"
    elif isinstance(values, AbstractSet) and not isinstance(values, KeysView):
        problem = "without an order; give a list of texts"
    elif isinstance(values, AsyncIterable):
        problem = "asynchronous; give a list of texts" + (
            ", or call embed_many or embed_stream" if name == "texts" else ""
        )
    else:
        try:
            return iter(values)
        except TypeError:
            problem = "not iterable; give a list of texts"
    raise InvalidArgument(f"{name} is {_type(values)}, {problem}", param=name)


def messages(values: object) -> list[Any]:
    """OpenAI's messages: a list of mappings, or of the SDK's objects, that is not empty."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        hint = (
            "; for a prompt call generate, or give [{'role': 'user', 'content': …}]" if isinstance(values, str) else ""
        )
        raise InvalidArgument(f"messages is {_type(values)}, not a list of messages{hint}", param="messages")
    if not values:
        raise InvalidArgument("messages is empty", param="messages")
    read: list[Any] = []
    for index, value in enumerate(values):
        message = value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidArgument(f"messages[{index}] is {_type(value)}, not a mapping with a role", param="messages")
        read.append(dict(message))
    return read


def no_answer(schema: str, result: ChatResult) -> InvalidAnswer:
    """The error for an answer that is a tool call where an object was asked for."""
    return InvalidAnswer(
        f"the answer of {result.model} is not a valid {schema}; the model called a tool instead",
        text=result.text,
        finish_reason=result.finish_reason,
        attempts=result.attempts,
        request_id=result.request_id,
    )


def headers(value: object) -> None:
    """Raise InvalidArgument for extra headers that a node must not get."""
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str)
        and _HEADER_NAME.fullmatch(name)
        and isinstance(text, str)
        and _HEADER_TEXT.fullmatch(text)
        for name, text in value.items()
    ):
        raise InvalidArgument(
            "extra_headers maps names of headers to texts of printable ASCII characters", param="extra_headers"
        )
    for name in value:
        plain = name.lower()
        if plain in _OPTION_OF_HEADER:
            raise InvalidArgument(
                f"extra_headers has {plain}: give the option {_OPTION_OF_HEADER[plain]}", param="extra_headers"
            )
        if plain in _OWN_HEADERS or plain.startswith("proxy-"):
            raise InvalidArgument(f"extra_headers has {plain}, which the client sets itself", param="extra_headers")


def plain_function(value: object, name: str) -> None:
    """Check a callback: a function that may be called without being awaited, or None."""
    if value is not None and (not callable(value) or inspect.iscoroutinefunction(value)):
        kind = "a coroutine function" if callable(value) else _type(value)
        raise InvalidArgument(f"{name} is {kind}; give a plain function", param=name)


def options(method: str, given: Mapping[str, Any], declared: type) -> dict[str, Any]:
    """The options that were given, as the TypedDict `declared` types them; None means not given."""
    if not given:
        return {}
    rules = _rules(declared)
    read: dict[str, Any] = {}
    for name, value in given.items():
        rule = rules.get(name)
        if rule is None:
            raise InvalidArgument(_unknown(method, name, rules), param=name)
        if value is None:
            continue
        read[name] = rule[0](value)
        if name == "extra_headers":
            headers(value)
        if name == "request_id" and not (isinstance(value, str) and _REQUEST_ID.fullmatch(value)):
            raise InvalidArgument("request_id must be 1 to 128 letters, digits and ._:/+=@-", param=name)
        if name == "model" and isinstance(value, str) and not _NAME.fullmatch(value):
            raise InvalidArgument(f"model must be a name of 1 to {_NAME_CHARS} printable characters", param=name)
        if read[name] is _INVALID:
            raise InvalidArgument(f"{name} must be {rule[1]}; {method}() got {_got(value)}", param=name)
    return read


def _unknown(method: str, name: str, known: Iterable[str]) -> str:
    if name == "stream":
        return f"{method}() has no option stream: call stream(prompt) for an answer piece by piece"
    close = difflib.get_close_matches(name, list(known), 1)
    hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(known)}"
    return f"{method}() has no option {name}: {hint}"


@cache
def _rules(declared: type) -> dict[str, tuple[_Reader, str]]:
    """For each option of a TypedDict: how to read a value, and what to call the values that are accepted."""
    return {name: _rule(hint) for name, hint in get_type_hints(declared).items()}


def _rule(hint: Any) -> tuple[_Reader, str]:
    origin = get_origin(hint)
    if origin in {Union, types.UnionType}:
        rules = [_rule(part) for part in get_args(hint) if part is not types.NoneType]
        return lambda value: _first(rules, value), " or ".join(name for _, name in rules)
    if origin is Literal:
        words = get_args(hint)
        names = " or ".join(map(repr, words))
        return lambda value: value if isinstance(value, str) and value in words else _INVALID, names
    if origin is list and get_args(hint) == (str,):
        return _strings, "a list of str"
    known: dict[Any, tuple[_Reader, str]] = {
        int: (_integer, "an int"),
        float: (_number, "a finite number"),
        str: (lambda value: value if value and _is_text(value) else _INVALID, "a str of Unicode that is not empty"),
    }
    if hint in known:
        return known[hint]
    kind = origin or hint
    if kind is Any or not isinstance(kind, type):
        return lambda value: value, "anything"
    return lambda value: value if isinstance(value, kind) else _INVALID, f"a {kind.__name__}"


def _first(rules: Iterable[tuple[_Reader, str]], value: Any) -> Any:
    return next((read for reader, _ in rules if (read := reader(value)) is not _INVALID), _INVALID)


def _integer(value: Any) -> Any:
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else _INVALID


def _number(value: Any) -> Any:
    if not isinstance(value, Real) or isinstance(value, bool):
        return _INVALID
    try:
        number = float(value)
    except OverflowError:
        return _INVALID
    if not math.isfinite(number):
        return _INVALID
    return int(value) if isinstance(value, Integral) else number


def _strings(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not all(_is_text(item) for item in value):
        return _INVALID
    return list(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not _SURROGATE.search(value)


def _type(value: object) -> str:
    return type(value).__name__


def _got(value: object) -> str:
    """What a refused value is, without the value."""
    if isinstance(value, str):
        return "another str" if value else "an empty str"
    if isinstance(value, float) and not math.isfinite(value):
        return "one that is not"
    return f"a value of type {_type(value)}"
