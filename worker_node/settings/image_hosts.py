"""The hosts that images may be fetched from, as settings name them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = re.compile(
    r"(?:(?P<scheme>https?)://)?(?P<host>\*|(?:\*\.)?[A-Za-z0-9_-][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])(?::(?P<port>\d{1,5}))?"
)
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class ImageHost:
    """One entry: a scheme, a host (`*.example` for all names below one, `*` for all) and the port, if it is named."""

    scheme: str
    host: str
    port: int | None

    @classmethod
    def parse(cls, entry: str) -> ImageHost:
        """Read `images.example`, `*.example`, `images.example:8443`, `http://[fd00::1]:8080`. Raises ValueError."""
        found = _ENTRY.fullmatch(entry)
        port = None if found is None or found["port"] is None else int(found["port"])
        if found is None or (port is not None and not 0 < port < 65536):
            raise ValueError(
                f"{entry!r} is no host of images: write images.example, *.example, images.example:8443 or "
                "http://images.example:8080"
            )
        return cls(found["scheme"] or "https", found["host"].lower().strip("[]"), port)

    def covers(self, scheme: str, host: str, port: int) -> bool:
        """Whether an address is meant: its scheme, host (lower case) and port."""
        if scheme != self.scheme or port != (self.port or DEFAULT_PORTS[scheme]):
            return False
        if self.host.startswith("*"):
            return host.endswith(self.host[1:])
        return host == self.host

    @property
    def may_be_private(self) -> bool:
        """Whether addresses that are not public are meant, too: only one host with its port is so explicit."""
        return self.port is not None and not self.host.startswith("*")
