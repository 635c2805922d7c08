"""Host names and origins in settings."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

_HOST_NAME = re.compile(r"\*|(?:\*\.)?[A-Za-z0-9_-][A-Za-z0-9._-]*|[0-9A-Fa-f:.]+")
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s]+")


def is_host_name(name: str) -> bool:
    """Whether it is a name or an address, `*.example` for all names below one, or `*` for all."""
    return _HOST_NAME.fullmatch(name) is not None


def is_origin(origin: str) -> bool:
    """Whether it is scheme, host and port as browsers send them."""
    return _ORIGIN.fullmatch(origin) is not None


@lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a socket that is bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
