"""Nodes that announce themselves: who is enrolled, and at which address each may be reached."""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from yarl import URL

from backend_client.errors import ConfigurationError
from backend_client.gateway.keys import KeyFile, checked_name, is_key_of, new_key, prefix_of
from backend_client.gateway.limits import Refusal
from backend_client.http.addresses import sendable_key

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
# A node announces itself every five seconds.
EXPIRY_S = 20.0
# The default port of nodes.
NODE_PORT = 8081
_MOST_LABELS = 16
_MOST_LETTERS = 64
_MOST_KEY = 512


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

    An enrolment has one port, and one address at a time, and an address one enrolment: another one is refused until the
    first has not been announced for `EXPIRY_S`. A node is called with the key that it announced and no other.
    """

    def __init__(self, file: KeyFile, networks: Sequence[Network] = (), clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self._networks = networks
        self._clock = clock

    def enrol(self, name: str, port: int = NODE_PORT) -> str:
        """A key for a node of this name, which may announce that port only; it is shown once.

        Raises ConfigurationError for a name that has one.
        """
        checked_name(name, "node")
        if not 1 <= port <= 65535:
            raise ConfigurationError(f"the port of a node must be from 1 to 65535, got {port}")
        prefix, key, digest = new_key(self._file.secret, "npunode")
        if not self._file.rows(
            "INSERT INTO nodes (name, prefix, digest, port, made) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (name) DO NOTHING RETURNING name",
            *(name, prefix, digest, port, self._clock()),
        ):
            raise ConfigurationError(f"{name} is enrolled already; remove it first: npu-gateway nodes remove {name}")
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

    def members(self, kept: Collection[str] = ()) -> dict[str, str]:
        """The nodes that get requests, by URL, with the API key of each ("" for none).

        It fails while nothing can be written: then no node can announce itself, and silence says nothing. Those that
        are `kept` stay for the same reason, unless they are drained or have left.
        """
        with self._file.transaction():
            rows = self._file.rows("SELECT * FROM nodes WHERE drained = 0 AND seen > 0 ORDER BY name")
        return {row["url"]: row["api_key"] for row in rows if self._live(row) or row["url"] in kept}

    def announce(self, key: str, given: Any) -> str:
        """Note where a node is, and return its name. Raises Refusal."""
        with self._file.transaction():
            return self._announce(key, given)

    def _announce(self, key: str, given: Any) -> str:
        row = next(iter(self._file.rows("SELECT * FROM nodes WHERE prefix = ?", prefix_of(key))), None)
        if not is_key_of(self._file.secret, key, row["digest"] if row else None) or row is None:
            raise Refusal(
                401, "invalid_api_key", "send the node's enrolment key: npu-gateway nodes enrol NAME makes it"
            )
        if not isinstance(given, dict):
            raise Refusal(400, "invalid_request", "an announcement must be a JSON object")
        url = self._address(given.get("url"), row["port"])
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

    def _address(self, url: Any, allowed_port: int) -> str:
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
        # The same node, whether its IPv4 address is written as one of IPv6 or not.
        host = getattr(host, "ipv4_mapped", None) or host
        if not any(host.version == network.version and host in network for network in self._networks):
            raise Refusal(403, "forbidden", f"{host} is not in allowed_networks of this gateway")
        if port != allowed_port:
            raise Refusal(
                403,
                "forbidden",
                f"this key is for port {allowed_port}, got {port}; npu-gateway nodes enrol --port {port}",
            )
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
