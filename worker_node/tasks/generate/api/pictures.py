"""Pictures in requests: URLs and base64, bounded before anything is decoded."""

from __future__ import annotations

import re

from worker_node.core.errors import BadRequest, PayloadTooLarge
from worker_node.core.types import Picture
from worker_node.tasks.generate.serving.picture_rules import FORMATS, MAX_PICTURE_BYTES, PICTURE_TYPES

_HEAD = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE)
_HEAD_LENGTH = 200
_REMOTE = ("http", "https")


def picture_of_url(url: str, at: int, where: str) -> Picture:
    """The picture of a data URL, or a remote one, which is fetched later if the settings allow it.

    Raises BadRequest for any other URL, PayloadTooLarge.
    """
    if url[:_HEAD_LENGTH].partition(":")[0].lower() in _REMOTE:
        return Picture("", at, where, url)
    head = _HEAD.match(url[:_HEAD_LENGTH])
    if head is None:
        raise BadRequest(f"{where}: not a data URL of the form data:image/png;base64,…", param=where)
    if (kind := head["type"].lower()) not in PICTURE_TYPES:
        raise BadRequest(f"{where}: images are {FORMATS}, not {kind}", param=where)
    return picture(url[head.end() :], at, where)


def picture(base64: str, at: int, where: str) -> Picture:
    """The picture of a base64 text. Raises BadRequest if it is empty, PayloadTooLarge."""
    if not base64:
        raise BadRequest(f"{where}: the image is empty", param=where)
    if (size := len(base64) * 3 // 4) > MAX_PICTURE_BYTES + 2:
        raise PayloadTooLarge(
            f"{where}: the image has {size} bytes; the bound is {MAX_PICTURE_BYTES}. Send a smaller one", param=where
        )
    return Picture(base64, at, where)
