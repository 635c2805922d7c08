"""The file of the keys: teams, and nodes that announce themselves, and at which address each may be reached.

A key is 256 random bits, kept as HMAC-SHA-256 in SQLite and looked up by a public prefix.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from yarl import URL

from backend_client.errors import ConfigurationError
from backend_client.http.addresses import node_url, sendable_key
from backend_client.http.errors import Problem
from backend_client.lifetime import DaemonThread
from backend_client.options import NO_FAILOVER, FailoverOptions

log = logging.getLogger("npu_gateway")
R = TypeVar("R")
# How long a request waits for the file, and how long the keys that were read last count while it cannot be read.
_WAIT_S = 0.1
STALE_S = 300.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VERSION = 4
_TABLES = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS keys (
    prefix TEXT PRIMARY KEY, digest BLOB NOT NULL, team TEXT NOT NULL, made REAL NOT NULL, until REAL
) STRICT;
CREATE TABLE IF NOT EXISTS nodes (
    name TEXT PRIMARY KEY, prefix TEXT UNIQUE NOT NULL, digest BLOB NOT NULL, port INTEGER NOT NULL, made REAL NOT NULL,
    drained INTEGER NOT NULL DEFAULT 0, url TEXT NOT NULL DEFAULT '', api_key TEXT NOT NULL DEFAULT '',
    version TEXT NOT NULL DEFAULT '', labels TEXT NOT NULL DEFAULT '{{}}', seen REAL NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE IF NOT EXISTS spent (account TEXT PRIMARY KEY, amount INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS reservations (
    id TEXT PRIMARY KEY, account TEXT NOT NULL, amount INTEGER NOT NULL
) STRICT;
PRAGMA user_version = {_VERSION};
COMMIT;
"""


@dataclass(frozen=True, slots=True)
class Team:
    """What the holder of a key may do: `models` by name (none given: all), and whether the cloud may answer.

    `requests` and `tokens` are limits a minute for all keys of the team together; 0 is none. `spend_cap` is what the
    cloud may cost the team in a month (UTC), in the currency of the prices; None is no cap. `admin`: it sees all teams.
    `failover`: when answers to its requests are given up; what it does not set is the client's.
    """

    name: str
    models: frozenset[str] = frozenset()
    cloud: bool = True
    requests: int = 0
    tokens: int = 0
    spend_cap: Decimal | None = None
    admin: bool = False
    failover: FailoverOptions = NO_FAILOVER


_TEAM = TypeAdapter(Team)


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key, never itself. `until`: the Unix time when it ends, None for never."""

    prefix: str
    team: Team
    until: float | None
    digest: bytes = b""


class KeyFile:
    """The SQLite file of the keys, enrolments and spending, and beside it the secret of the keys' digests (mode 0600).

    It follows the path: when another file is moved there, that one is used from then on. Commands use it directly. The
    gateway uses it through `run` only, in one thread, so that a file that is locked or hangs delays nobody.

    Raises ConfigurationError when it cannot be opened, OSError or sqlite3.Error later.
    """

    def __init__(self, path: Path, patience_s: float = 5.0) -> None:
        self._path, self._secret_path = path, path.with_name(path.name + ".secret")
        self._patience_s = patience_s
        self._identity: object = None
        try:
            # A new secret beside an existing file would make its keys invalid.
            for file, content in ((self._secret_path, secrets.token_bytes(32)), (path, b"")):
                if not path.exists() and not file.exists():
                    # Exclusively: of two processes that start at once, one makes it.
                    with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as stream:
                        stream.write(content)
            self._base = self._open()
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(f"the file of keys {path} cannot be used: {error}") from None
        self._thread = DaemonThread("file of keys")

    def close(self) -> None:
        """Close it after what is under way, unless that hangs."""
        closed = self._thread.submit(self._base.close)
        self._thread.end()
        with suppress(TimeoutError):
            closed.result(self._patience_s)

    async def run(self, work: Callable[..., R], *values: Any) -> R:
        """Run a function that uses the file in its thread.

        Raises OSError when it fails, or takes too long; a function that has not begun by then never runs.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                return await self._thread.run(partial(work, *values))
        except sqlite3.Error as error:
            raise OSError(str(error)) from None

    def rows(self, query: str, *values: object) -> list[sqlite3.Row]:
        """What a query finds, or the rows that a statement returns."""
        with closing(self._current().execute(query, values)) as found:
            return found.fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything or nothing, with no other process's writes in between."""
        base = self._current()
        with base:
            base.execute("BEGIN IMMEDIATE")
            yield

    def version(self) -> object:
        """Another value after each change of the file."""
        (changes,) = self.rows("PRAGMA data_version")
        return self._identity, changes[0], self._base.total_changes

    def _current(self) -> sqlite3.Connection:
        """The connection to the file that is at the path now."""
        if not self._base.in_transaction and self._at_path() != self._identity:
            replaced, self._base = self._base, self._open()
            replaced.close()
        return self._base

    def _at_path(self) -> object:
        return [(found.st_dev, found.st_ino) for found in (self._path.stat(), self._secret_path.stat())]

    def _open(self) -> sqlite3.Connection:
        identity, secret = self._at_path(), self._secret_path.read_bytes()
        if len(secret) != 32:
            raise OSError(f"{self._secret_path} must hold 32 bytes, and has {len(secret)}; restore it")
        # The file is not made here: one that is missing for a moment must not become an empty one.
        base = sqlite3.connect(
            f"{self._path.absolute().as_uri()}?mode=rw",
            uri=True,
            timeout=self._patience_s,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            base.row_factory = sqlite3.Row
            # Not WAL: a log that stays beside the file would be applied to the one that replaces it.
            base.execute("PRAGMA journal_mode = TRUNCATE")
            if base.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
                if base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    raise OSError("it was made by another version; move it away, and make new keys")
                base.executescript(_TABLES)
        except BaseException:
            base.close()
            raise
        self._identity, self.secret = identity, secret
        return base


def new_key(secret: bytes, kind: str) -> tuple[str, str, bytes]:
    """The prefix, the key and the digest of a new key: npugw for a team, npunode for a node."""
    prefix = secrets.token_hex(6)
    key = f"{kind}_{prefix}_{secrets.token_urlsafe(32)}"
    return prefix, key, _digest(secret, key)


def prefix_of(key: str) -> str:
    """The public part of a key."""
    return key.partition("_")[2][:12]


def is_key_of(secret: bytes, key: str, digest: bytes) -> bool:
    return hmac.compare_digest(_digest(secret, key), digest)


def _digest(secret: bytes, key: str) -> bytes:
    return hmac.digest(secret, key.encode("utf-8", "surrogateescape"), hashlib.sha256)


def checked_name(name: str, what: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"a {what}'s name must be 1 to 64 letters, digits, '.', '_' or '-', got {name[:80]!r}")
    return name


class KeyStore:
    """The keys of teams, in `file` and as they were last read from it.

    A gateway asks `team_of` for each request, so that a revoked key is refused from the next request on. While the file
    cannot be read, no request waits for it, and the keys that were read last count for `STALE_S`.

    Raises ConfigurationError.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, patience_s: float = 5.0) -> None:
        self._clock = clock
        self.file = KeyFile(path, patience_s)
        self._version: object = None
        self._read: tuple[bytes, dict[str, KeyEntry]] = (b"", {})
        self.read()
        self._readable = True
        self._read_at = time.monotonic()
        self._reading: asyncio.Task[None] | None = None

    def close(self) -> None:
        self.file.close()

    def add(self, name: str, models: Collection[str] = (), **rights: Any) -> str:
        """Make a key for a team with these rights, fields of `Team`. It is not kept, and cannot be shown again."""
        team = Team(checked_name(name, "team"), frozenset(models), **rights)
        least, cap = min(team.requests, team.tokens), team.spend_cap
        if least < 0:
            raise ConfigurationError(f"a limit must be at least 0 (none), got {least}")
        if cap is not None and not (cap.is_finite() and 0 <= cap < 1_000_000_000):
            raise ConfigurationError(f"a spend cap must be an amount from 0 to 999999999, got {cap}")
        return self._insert(team)

    def _insert(self, team: Team) -> str:
        prefix, key, digest = new_key(self.file.secret, "npugw")
        rights = _TEAM.dump_json(team, exclude_unset=True).decode()
        self.file.rows("INSERT INTO keys VALUES (?, ?, ?, ?, NULL)", prefix, digest, rights, self._clock())
        return key

    def rotate(self, prefix: str, overlap_s: float = 0.0) -> str:
        """A new key in place of one, which ends after `overlap_s` seconds."""
        with self.file.transaction():
            self.read()
            entry = self._read[1].get(prefix)
            if entry is None:
                raise _no_key(prefix)
            key = self._insert(entry.team)
            self.file.rows("UPDATE keys SET until = ? WHERE prefix = ?", self._clock() + overlap_s, prefix)
        return key

    def revoke(self, prefix: str) -> None:
        if not self.file.rows("DELETE FROM keys WHERE prefix = ? RETURNING prefix", prefix):
            raise _no_key(prefix)

    @property
    def entries(self) -> list[KeyEntry]:
        """All keys as they were last read, the oldest first."""
        return list(self._read[1].values())

    def read(self) -> None:
        """Read the keys if the file has changed."""
        version = self.file.version()
        if version != self._version:
            rows = self.file.rows("SELECT * FROM keys ORDER BY made, prefix")
            entries = [
                KeyEntry(row["prefix"], _TEAM.validate_json(row["team"]), row["until"], row["digest"]) for row in rows
            ]
            self._read, self._version = (self.file.secret, {entry.prefix: entry for entry in entries}), version

    async def refresh(self) -> None:
        """As `read`, in the thread of the file, and shared by all who ask at the same time."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_again())
        if self._readable:
            done, _ = await asyncio.wait([self._reading], timeout=_WAIT_S)
            if not done:
                self._unreadable("it is locked, or hangs")

    async def _read_again(self) -> None:
        try:
            await self.file.run(self.read)
            self._readable, self._read_at = True, time.monotonic()
        except OSError as error:
            self._unreadable(str(error) or type(error).__name__)
        finally:
            self._reading = None

    def _unreadable(self, why: str) -> None:
        if self._readable:
            log.warning("the file of keys cannot be read (%s); the keys that were read last count", why)
        self._readable = False

    async def team_of(self, key: str) -> Team | None:
        """The team of a key; None for one that is not there, or has ended. Raises OSError where that is not known."""
        await self.refresh()
        team = self.find(key)
        if time.monotonic() - self._read_at > STALE_S or (team is None and not self._readable):
            raise OSError("the file of keys cannot be read now; the gateway's log says why")
        return team

    def find(self, key: str) -> Team | None:
        """As `team_of`, among the keys that were read last."""
        secret, known = self._read
        entry = known.get(prefix_of(key))
        if entry is None or not is_key_of(secret, key, entry.digest):
            return None
        return entry.team if entry.until is None or entry.until > self._clock() else None


def _no_key(prefix: str) -> ConfigurationError:
    return ConfigurationError(f"there is no key {prefix[:80]!r}; npu-gateway keys list shows their prefixes")


Network = ipaddress.IPv4Network | ipaddress.IPv6Network
# A node announces itself every five seconds.
EXPIRY_S = 20.0
# The default port of nodes.
NODE_PORT = 8081
_Word = Annotated[str, Field(max_length=64)]


class Announcement(BaseModel):
    """What a node sends to `/announce`."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)

    url: str = Field(max_length=200)
    api_key: Annotated[str, Field(max_length=512), AfterValidator(sendable_key)] = ""
    version: _Word = ""
    labels: Annotated[dict[_Word, _Word], Field(max_length=16)] = {}
    draining: bool = False


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
        self.file = file
        self._networks = networks
        self._clock = clock

    def enrol(self, name: str, port: int = NODE_PORT) -> str:
        """A key for a node of this name, which may announce that port only; it is shown once.

        Raises ConfigurationError for a name that has one.
        """
        checked_name(name, "node")
        if not 1 <= port <= 65535:
            raise ConfigurationError(f"the port of a node must be from 1 to 65535, got {port}")
        prefix, key, digest = new_key(self.file.secret, "npunode")
        if not self.file.rows(
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
        if not self.file.rows(statement, *values):
            raise ConfigurationError(f"node {values[-1]!r} is not enrolled; npu-gateway nodes list shows the names")

    def list(self) -> list[Enrolment]:
        return [
            Enrolment(
                row["name"],
                row["url"],
                row["version"],
                json.loads(row["labels"]),
                self._live(row),
                bool(row["drained"]),
            )
            for row in self.file.rows("SELECT * FROM nodes ORDER BY name")
        ]

    def members(self, kept: Collection[str] = ()) -> dict[str, str]:
        """The nodes that get requests, by URL, with the API key of each ("" for none).

        It fails while nothing can be written: then no node can announce itself, and silence says nothing. Those that
        are `kept` stay for the same reason, unless they are drained or have left.
        """
        with self.file.transaction():
            rows = self.file.rows("SELECT * FROM nodes WHERE drained = 0 AND seen > 0 ORDER BY name")
        return {row["url"]: row["api_key"] for row in rows if self._live(row) or row["url"] in kept}

    def announce(self, key: str, content: bytes) -> str:
        """Note where a node is by its Announcement, as JSON, and return its name. Raises Problem."""
        with self.file.transaction():
            return self._announce(key, content)

    def _announce(self, key: str, content: bytes) -> str:
        row = next(iter(self.file.rows("SELECT * FROM nodes WHERE prefix = ?", prefix_of(key))), None)
        if row is None or not is_key_of(self.file.secret, key, row["digest"]):
            raise Problem(
                401, "invalid_api_key", "send the node's enrolment key: npu-gateway nodes enrol NAME makes it"
            )
        try:
            node = Announcement.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False, include_context=False)[0]
            where = first["loc"][0] if first["loc"] else "an announcement"
            raise Problem(400, "invalid_request", f"{where}: {first['msg']}") from None
        url = self._address(node.url, row["port"])
        if row["url"] != url and self._live(row):
            raise Problem(409, "conflict", f"{row['name']} is at {row['url']}, and has been announced there lately")
        for other in self.file.rows("SELECT * FROM nodes WHERE url = ? AND name != ?", url, row["name"]):
            if self._live(other):
                raise Problem(409, "conflict", f"{url} is the address of another node")
        # A node that drains gives its address up at once.
        seen = 0.0 if node.draining else self._clock()
        self.file.rows(
            "UPDATE nodes SET url = ?, api_key = ?, version = ?, labels = ?, seen = ? WHERE name = ?",
            *(url, node.api_key, node.version, json.dumps(node.labels), seen, row["name"]),
        )
        return str(row["name"])

    def _live(self, row: Any) -> bool:
        # In both directions: a node must expire even if the clock was set back.
        return abs(self._clock() - float(row["seen"])) < EXPIRY_S

    def _address(self, given: str, allowed_port: int) -> str:
        """The URL in its one form, at an address and not a name: what a name means may change after it was checked."""
        try:
            made = node_url(given)
            url = URL(made)
            host, port = ipaddress.ip_address(url.host or ""), url.port
            plain = not url.path.strip("/") and "%" not in made
        except ValueError:
            plain = False
        if not plain:
            raise Problem(
                400,
                "invalid_request",
                "url must be http://ADDRESS:PORT or https://ADDRESS:PORT with an IP address, such as "
                "http://10.0.0.21:8081",
            )
        if not any(host in network for network in self._networks):
            raise Problem(403, "forbidden", f"{host} is not in allowed_networks of this gateway")
        if port != allowed_port:
            raise Problem(
                403,
                "forbidden",
                f"this key is for port {allowed_port}, got {port}; npu-gateway nodes enrol --port {port}",
            )
        return made
