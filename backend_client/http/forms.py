"""Multipart forms with one file: encoded for nodes, and read as the OpenAI SDK sends them. No I/O."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from email.message import Message
from email.parser import HeaderParser
from typing import Any

from backend_client.errors import PayloadTooLarge, RequestRejected
from backend_client.http.health import ModelKind

MOST_BYTES = 512 * 1024 * 1024
"""A longer form is not sent: it is held in memory for the next attempt."""
_MOST_PARTS = 64


def encode_form(fields: Mapping[str, Any], name: str, content: bytes) -> tuple[bytes, str]:
    """A multipart form with the fields (a list: once for each value) and a file; its bytes and its content type."""
    boundary = secrets.token_hex(16)
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'.encode()
        for field, values in fields.items()
        for value in (values if isinstance(values, list) else [values])
    ]
    plain = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{plain}"\r\n'
    head += "Content-Type: application/octet-stream\r\n\r\n"
    body = b"".join([*parts, head.encode(), content, f"\r\n--{boundary}--\r\n".encode()])
    return body, f"multipart/form-data; boundary={boundary}"


def read_form(body: bytes, content_type: str) -> tuple[dict[str, list[str]], tuple[str, bytes]]:
    """The fields of a form, each with its values, and the name and bytes of its `file`.

    Raises RequestRejected if it is not such a form, PayloadTooLarge for one of more than `MOST_BYTES`.
    """
    if len(body) > MOST_BYTES:
        raise PayloadTooLarge(f"the form has {len(body)} bytes and may have {MOST_BYTES}", status=413)
    head = Message()
    head["Content-Type"] = content_type
    boundary = head.get_boundary()
    if head.get_content_type() != "multipart/form-data" or not boundary:
        raise _refused("the body is not multipart/form-data with a boundary")
    before, *parts = (b"\r\n" + body).split(f"\r\n--{boundary}".encode(errors="replace"), _MOST_PARTS)
    if before or not parts or not parts[-1].startswith(b"--"):
        raise _refused(f"the body is not a complete form of less than {_MOST_PARTS} parts")
    fields: dict[str, list[str]] = {}
    file: tuple[str, bytes] | None = None
    for part in parts[:-1]:
        headers, blank, content = part.partition(b"\r\n\r\n")
        found = HeaderParser().parsestr(headers.strip().decode(errors="replace"))
        name = found.get_param("name", header="Content-Disposition")
        if not blank or not isinstance(name, str):
            raise _refused("a part of the form has no name")
        if name == "file" and file is None:
            file = found.get_filename() or "audio", content
            continue
        try:
            fields.setdefault(name, []).append(content.decode())
        except UnicodeDecodeError:
            raise _refused("a field of the form is not UTF-8, or there are two files") from None
    if file is None:
        raise _refused("the form has no file", "file")
    return fields, file


def _refused(why: str, param: str | None = None) -> RequestRejected:
    return RequestRejected(why, status=400, code="invalid_request", param=param)


_IMAGE_PARTS = ("image_url", "input_image", "image")


def writing_kind(body: Mapping[str, Any]) -> ModelKind:
    """The kind of model for a request that asks for text, in any dialect: "vision" where it has an image."""
    if body.get("images"):
        return "vision"
    for items in (body.get("messages"), body.get("input")):
        for item in _list(items):
            if not isinstance(item, Mapping):
                continue
            parts = _list(item.get("content"))
            if item.get("images") or any(
                isinstance(part, Mapping) and part.get("type") in _IMAGE_PARTS for part in parts
            ):
                return "vision"
    return "generation"


def _list(value: object) -> list[Any] | tuple[Any, ...]:
    return value if isinstance(value, list | tuple) else ()
