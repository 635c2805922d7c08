"""The keys of teams and of nodes: 256 random bits, kept as HMAC-SHA-256 in SQLite, looked up by a public prefix."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from backend_client.errors import ConfigurationError

_FORM = re.compile(r"(npugw|npunode)_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TABLE = """
CREATE TABLE IF NOT EXISTS keys (
    prefix TEXT PRIMARY KEY, digest BLOB NOT NULL, team TEXT NOT NULL, models TEXT NOT NULL, cloud INTEGER NOT NULL,
    requests INTEGER NOT NULL, tokens INTEGER NOT NULL, spend_cap TEXT, admin INTEGER NOT NULL, made REAL NOT NULL,
    until REAL
) STRICT
"""


@dataclass(frozen=True, slots=True)
class Team:
    """What the holder of a key may do: `models` by name (none given: all), and whether the cloud may answer.

    `requests` and `tokens` are limits a minute for all keys of the team together; 0 is none. `spend_cap` is what the
    cloud may cost the team in a month (UTC), in the currency of the prices; None is no cap. `admin`: it sees all teams.
    """

    name: str
    models: frozenset[str] = frozenset()
    cloud: bool = True
    requests: int = 0
    tokens: int = 0
    spend_cap: Decimal | None = None
    admin: bool = False


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key as it is listed: never the key itself. `until`: the Unix time when it ends, None for never."""

    prefix: str
    team: Team
    made: float
    until: float | None


class KeyFile:
    """A SQLite file, and beside it the secret of its digests; both are their owner's alone (mode 0600).

    Raises ConfigurationError.
    """

    def __init__(self, path: Path, table: str) -> None:
        try:
            secret = path.with_name(path.name + ".secret")
            for file, content in ((path, b""), (secret, secrets.token_bytes(32))):
                if not file.exists():
                    # Exclusively: of two processes that start at once, one makes it.
                    with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as stream:
                        stream.write(content)
            self._secret = secret.read_bytes()
            if len(self._secret) != 32:
                raise ConfigurationError(f"{secret} must hold 32 bytes, and has {len(self._secret)}; restore it")
            self.base = sqlite3.connect(path, timeout=5.0, isolation_level=None)
            self.base.row_factory = sqlite3.Row
            self.base.execute("PRAGMA journal_mode = WAL")
            self.base.execute(table)
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(f"the file of keys {path} cannot be used: {error}") from None

    def rows(self, query: str, *values: object) -> list[sqlite3.Row]:
        """What a query finds, or the rows that a statement returns."""
        with closing(self.base.execute(query, values)) as found:
            return found.fetchall()

    def new_key(self, kind: str) -> tuple[str, str, bytes]:
        """The prefix, the key and the digest of a new key: npugw for a team, npunode for a node."""
        prefix = secrets.token_hex(6)
        key = f"{kind}_{prefix}_{secrets.token_urlsafe(32)}"
        return prefix, key, self._digest(key)

    def find(self, table: str, key: str) -> sqlite3.Row | None:
        """The row of a key, by its prefix and then its digest."""
        match = _FORM.fullmatch(key)
        found = self.rows(f"SELECT * FROM {table} WHERE prefix = ?", match[2] if match else "")  # noqa: S608 (ours)
        # Compared in any case, so that the time does not tell whether there is such a prefix.
        same = hmac.compare_digest(self._digest(key), found[0]["digest"] if found else b"\0" * 32)
        return found[0] if found and same else None

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode("utf-8", "surrogateescape"), hashlib.sha256)


def checked_name(name: str, what: str) -> str:
    """The name of a team or a node. Raises ConfigurationError."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"a {what}'s name must be 1 to 64 letters, digits, '.', '_' or '-', got {name[:80]!r}")
    return name


class KeyStore:
    """The keys of teams. Every process asks the file: a key that is revoked is refused from the next request on.

    Raises ConfigurationError.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._file = KeyFile(path, _TABLE)
        columns = {row["name"] for row in self._file.rows("PRAGMA table_info(keys)")}
        if not {"spend_cap", "admin"} <= columns:
            raise ConfigurationError(f"{path} was made by an earlier version; move it away, and make new keys")

    def close(self) -> None:
        self._file.base.close()

    def add(
        self,
        name: str,
        models: Collection[str] = (),
        *,
        cloud: bool = True,
        requests: int = 0,
        tokens: int = 0,
        spend_cap: Decimal | None = None,
        admin: bool = False,
    ) -> str:
        """Make a key for a team, and return it: it is not kept, and cannot be shown again."""
        checked_name(name, "team")
        if requests < 0 or tokens < 0:
            raise ConfigurationError(f"a limit must be at least 0 (none), got {min(requests, tokens)}")
        if spend_cap is not None and not (spend_cap.is_finite() and 0 <= spend_cap < 1_000_000_000):
            raise ConfigurationError(f"a spend cap must be an amount from 0 to 999999999, got {spend_cap}")
        return self._insert(Team(name, frozenset(models), cloud, requests, tokens, spend_cap, admin))

    def _insert(self, team: Team) -> str:
        prefix, key, digest = self._file.new_key("npugw")
        cap = None if team.spend_cap is None else str(team.spend_cap)
        rights = ("\n".join(sorted(team.models)), int(team.cloud), team.requests, team.tokens, cap, int(team.admin))
        values = (prefix, digest, team.name, *rights, self._clock(), None)
        self._file.rows("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", *values)
        return key

    def rotate(self, prefix: str, overlap_s: float = 0.0) -> str:
        """A new key in place of one, which ends after `overlap_s` seconds."""
        entry = next((entry for entry in self.list() if entry.prefix == prefix), None)
        if entry is None:
            raise ConfigurationError(f"there is no key {prefix[:80]!r}; npu-gateway keys list shows their prefixes")
        key = self._insert(entry.team)
        self._file.rows("UPDATE keys SET until = ? WHERE prefix = ?", self._clock() + overlap_s, prefix)
        return key

    def revoke(self, prefix: str) -> None:
        """End a key at once."""
        if not self._file.rows("DELETE FROM keys WHERE prefix = ? RETURNING prefix", prefix):
            raise ConfigurationError(f"there is no key {prefix[:80]!r}; npu-gateway keys list shows their prefixes")

    def list(self) -> list[KeyEntry]:
        """All keys, the oldest first."""
        rows = self._file.rows("SELECT * FROM keys ORDER BY made, prefix")
        return [KeyEntry(row["prefix"], _team(row), row["made"], row["until"]) for row in rows]

    def find(self, key: str) -> Team | None:
        """The team of a key; None for one that is not in the file, or has ended."""
        row = self._file.find("keys", key)
        if row is None or (row["until"] is not None and row["until"] <= self._clock()):
            return None
        return _team(row)


def _team(row: Any) -> Team:
    return Team(
        name=row["team"],
        models=frozenset(row["models"].split("\n")) - {""},
        cloud=bool(row["cloud"]),
        requests=row["requests"],
        tokens=row["tokens"],
        spend_cap=None if row["spend_cap"] is None else Decimal(row["spend_cap"]),
        admin=bool(row["admin"]),
    )
