"""Bounds the number of values in a JSON text before it is parsed, in time that is linear in its bytes.

Parsing and validating cost by the value, not by the byte: eight megabytes of empty lists or of wrong items take half a
minute of the event loop, in which no other request is served.
"""

from __future__ import annotations

from worker_node.core.errors import PayloadTooLarge

MAX_VALUES = 50_000
# Token ids are read in one go, and there may honestly be many: so many of them in a row count as one value.
_NUMBERS_AS_ONE = 16

_NUMBERS_AND_BLANKS = b"-0123456789 \t\r\n"


def check_structure(data: bytes) -> None:
    """Raise PayloadTooLarge for a JSON text of too many values. Sixteen whole numbers in a row count as one."""
    if values(data) > MAX_VALUES:
        raise PayloadTooLarge(
            f"the body holds more than the {MAX_VALUES} values that it may hold, lists, objects and fields included; "
            "send it in several requests"
        )


def values(data: bytes) -> int:
    """How many values a JSON text holds, within a few. It may be more if that is beyond `MAX_VALUES` or under it."""
    most = _opened(data) + data.count(b",")
    if most <= MAX_VALUES:
        return most
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Each value is a string or not, and may have a name: two quotes each.
    if (strings := unescaped.count(b'"') // 4) > MAX_VALUES:
        return strings
    outside = b"s".join(unescaped.split(b'"')[::2])
    marks = outside.translate(None, _NUMBERS_AND_BLANKS)
    runs = marks.count(b"," * _NUMBERS_AS_ONE)
    # What is left of each run.
    rest = marks.replace(b"," * _NUMBERS_AS_ONE, b"").replace(b",,,,", b",")
    return _opened(marks) + runs + rest.count(b",")


def _opened(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")
