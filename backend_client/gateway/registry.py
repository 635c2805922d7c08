"""Nodes that announce themselves: who is enrolled, and at which address each may be reached."""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yarl import URL

from backend_client.errors import ConfigurationError
from backend_client.gateway.keys import KeyFile, checked_name
from backend_client.gateway.limits import Refusal
from backend_client.http.tls import sendable_key

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
# A node announces itself every five seconds.
EXPIRY_S = 20.0
_MOST_LABELS = 16
_MOST_LETTERS = 64
_MOST_KEY = 512
_TABLE = """
CREATE TABLE IF NOT EXISTS nodes (
    name TEXT PRIMARY KEY, prefix TEXT UNIQUE NOT NULL, digest BLOB NOT NULL, made REAL NOT NULL,
    drained INTEGER NOT NULL DEFAULT 0, url TEXT NOT NULL DEFAULT '', api_key TEXT NOT NULL DEFAULT '',
    version TEXT NOT NULL DEFAULT '', labels TEXT NOT NULL DEFAULT '{}', seen REAL NOT NULL DEFAULT 0
) STRICT
"""


@dataclass(frozen=True, slots=True)
class Enrolment:
    """A node by its name; `url` is empty before its first announcement, `live` whether it announced itself lately."""

    name: str
    url: str
    version: str
    labels: Mapping[str, str]
    live: bool
    drained: bool


class Registry:
    """In the file of the keys, so that the gateways of one machine share it, and commands reach it.

    An enrolment has one address at a time, and an address one enrolment: another one is refused until the first has
    not been announced for `EXPIRY_S`. A node is called with the key that it announced and no other.
    """

    def __init__(self, path: Path, networks: Sequence[Network] = (), clock: Callable[[], float] = time.time) -> None:
        self._file = KeyFile(path, _TABLE)
        self._networks = networks
        self._clock = clock

    def close(self) -> None:
        self._file.base.close()

    def enrol(self, name: str) -> str:
        """A key for a node of this name; it is shown once. Raises ConfigurationError for a name that has one."""
        checked_name(name, "node")
        if self._file.rows("SELECT name FROM nodes WHERE name = ?", name):
            raise ConfigurationError(f"{name} is enrolled already; remove it first: npu-gateway nodes remove {name}")
        prefix, key, digest = self._file.new_key("npunode")
        self._file.rows(
            "INSERT INTO nodes (name, prefix, digest, made) VALUES (?, ?, ?, ?)", name, prefix, digest, self._clock()
        )
        return key

    def remove(self, name: str) -> None:
        """End an enrolment: its key is refused, and its node gets no request from the next look on."""
        self._change("DELETE FROM nodes WHERE name = ? RETURNING name", name)

    def drain(self, name: str, *, drained: bool = True) -> None:
        """Send a node no more requests, or let it have them again."""
        self._change("UPDATE nodes SET drained = ? WHERE name = ? RETURNING name", int(drained), name)

    def _change(self, statement: str, *values: object) -> None:
        if not self._file.rows(statement, *values):
            raise ConfigurationError(f"there is no node {values[-1]!r}; npu-gateway nodes list shows their names")

    def list(self) -> list[Enrolment]:
        """All enrolments by name."""
        return [
            Enrolment(
                row["name"],
                row["url"],
                row["version"],
                json.loads(row["labels"]),
                self._live(row),
                bool(row["drained"]),
            )
            for row in self._file.rows("SELECT * FROM nodes ORDER BY name")
        ]

    def members(self) -> dict[str, str]:
        """The nodes that get requests, by URL, with the API key of each ("" for none)."""
        rows = self._file.rows("SELECT * FROM nodes WHERE drained = 0 ORDER BY name")
        return {row["url"]: row["api_key"] for row in rows if self._live(row)}

    def announce(self, key: str, given: Any) -> str:
        """Note where a node is, and return its name. Raises Refusal."""
        row = self._file.find("nodes", key)
        if row is None:
            raise Refusal(
                401, "invalid_api_key", "send the node's enrolment key: npu-gateway nodes enrol NAME makes it"
            )
        if not isinstance(given, dict):
            raise Refusal(400, "invalid_request", "an announcement must be a JSON object")
        url = self._address(given.get("url"))
        try:
            api_key = sendable_key(_text(given, "api_key", _MOST_KEY))
        except ValueError as error:
            raise Refusal(400, "invalid_request", str(error)) from None
        version, labels, draining = _text(given, "version", _MOST_LETTERS), _labels(given), given.get("draining", False)
        if not isinstance(draining, bool):
            raise Refusal(400, "invalid_request", "draining must be true or false")
        if row["url"] != url and self._live(row):
            raise Refusal(409, "conflict", f"{row['name']} is at {row['url']}, and has been announced there lately")
        for other in self._file.rows("SELECT * FROM nodes WHERE url = ? AND name != ?", url, row["name"]):
            if self._live(other):
                raise Refusal(409, "conflict", f"{url} is the address of another node")
        # A node that drains gives its address up at once.
        seen = 0.0 if draining else self._clock()
        self._file.rows(
            "UPDATE nodes SET url = ?, api_key = ?, version = ?, labels = ?, seen = ? WHERE name = ?",
            *(url, api_key, version, json.dumps(labels), seen, row["name"]),
        )
        return str(row["name"])

    def _live(self, row: Any) -> bool:
        # Either way: a clock that was set back must not keep a node for ever.
        return abs(self._clock() - float(row["seen"])) < EXPIRY_S

    def _address(self, url: Any) -> str:
        """The URL in its one form, at an address and not a name: what a name means may change after it was checked."""
        problem = (
            "url must be http://ADDRESS:PORT or https://ADDRESS:PORT with an IP address, such as http://10.0.0.21:8081"
        )
        try:
            read = URL(url) if isinstance(url, str) and len(url) < 200 else URL()
            host, port = ipaddress.ip_address(read.host or ""), read.explicit_port
        except ValueError:
            raise Refusal(400, "invalid_request", problem) from None
        plain = read == read.origin() if read.scheme in {"http", "https"} else False
        if not plain or port is None or "%" in (read.host or ""):
            raise Refusal(400, "invalid_request", problem)
        seen = getattr(host, "ipv4_mapped", None) or host
        if not any(seen.version == network.version and seen in network for network in self._networks):
            raise Refusal(403, "forbidden", f"{host} is not in allowed_networks of this gateway")
        shown = f"[{host}]" if host.version == 6 else str(host)
        return f"{read.scheme}://{shown}:{port}"


def _text(given: dict[str, Any], name: str, most: int) -> str:
    value = given.get(name) or ""
    if not isinstance(value, str) or len(value) > most:
        raise Refusal(400, "invalid_request", f"{name} must be a string of at most {most} characters")
    return value


def _labels(given: dict[str, Any]) -> dict[str, str]:
    labels = given.get("labels") or {}
    if (
        not isinstance(labels, dict)
        or len(labels) > _MOST_LABELS
        or not all(isinstance(text, str) and len(text) <= _MOST_LETTERS for item in labels.items() for text in item)
    ):
        raise Refusal(400, "invalid_request", f"labels must be at most {_MOST_LABELS} strings by name")
    return labels
