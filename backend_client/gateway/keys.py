"""The keys of teams: 256 random bits, kept as HMAC-SHA-256 in SQLite, looked up by a public prefix."""

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
from pathlib import Path

from backend_client.errors import ConfigurationError

_FORM = re.compile(r"npugw_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TABLE = """
CREATE TABLE IF NOT EXISTS keys (
    prefix TEXT PRIMARY KEY, digest BLOB NOT NULL, team TEXT NOT NULL, models TEXT NOT NULL, cloud INTEGER NOT NULL,
    requests INTEGER NOT NULL, tokens INTEGER NOT NULL, made REAL NOT NULL, until REAL
) STRICT
"""


@dataclass(frozen=True, slots=True)
class Team:
    """What the holder of a key may do: `models` by name (none given: all), and whether the cloud may answer.

    `requests` and `tokens` are limits a minute for all keys of the team together; 0 is none. `admin`: the page shows
    all teams, not its own alone.
    """

    name: str
    models: frozenset[str] = frozenset()
    cloud: bool = True
    requests: int = 0
    tokens: int = 0
    admin: bool = False


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key as it is listed: never the key itself. `until`: the Unix time when it ends, None for never."""

    prefix: str
    team: Team
    made: float
    until: float | None


class KeyStore:
    """A file of keys, and beside it the secret of their digests; both are their owner's alone (mode 0600).

    Every process asks the file: a key that is revoked is refused from the next request on. Raises ConfigurationError.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
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
            self._base = sqlite3.connect(path, timeout=5.0, isolation_level=None)
            self._base.execute("PRAGMA journal_mode = WAL")
            self._base.execute(_TABLE)
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(f"the file of keys {path} cannot be used: {error}") from None

    def close(self) -> None:
        self._base.close()

    def add(
        self, name: str, models: Collection[str] = (), *, cloud: bool = True, requests: int = 0, tokens: int = 0
    ) -> str:
        """Make a key for a team, and return it: it is not kept, and cannot be shown again."""
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"a team's name must be 1 to 64 letters, digits, '.', '_' or '-', got {name[:80]!r}"
            )
        if requests < 0 or tokens < 0:
            raise ConfigurationError(f"a limit must be at least 0 (none), got {min(requests, tokens)}")
        prefix, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        key = f"npugw_{prefix}_{secret}"
        rights = ("\n".join(sorted(models)), int(cloud), requests, tokens)
        values = (prefix, self._digest(key), name, *rights, self._clock(), None)
        self._base.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        return key

    def rotate(self, prefix: str, overlap_s: float = 0.0) -> str:
        """A new key in place of one, which ends after `overlap_s` seconds."""
        entry = next((entry for entry in self.list() if entry.prefix == prefix), None)
        if entry is None:
            raise ConfigurationError(f"there is no key {prefix[:80]!r}; npu-gateway keys list shows their prefixes")
        team = entry.team
        key = self.add(team.name, team.models, cloud=team.cloud, requests=team.requests, tokens=team.tokens)
        self._base.execute("UPDATE keys SET until = ? WHERE prefix = ?", (self._clock() + overlap_s, prefix))
        return key

    def revoke(self, prefix: str) -> None:
        """End a key at once."""
        if not self._base.execute("DELETE FROM keys WHERE prefix = ?", (prefix,)).rowcount:
            raise ConfigurationError(f"there is no key {prefix[:80]!r}; npu-gateway keys list shows their prefixes")

    def list(self) -> list[KeyEntry]:
        """All keys, the oldest first."""
        with closing(self._base.execute("SELECT * FROM keys ORDER BY made, prefix")) as rows:
            return [KeyEntry(row[0], _team(*row[2:7]), row[7], row[8]) for row in rows]

    def find(self, key: str) -> Team | None:
        """The team of a key; None for one that is not in the file, or has ended."""
        match = _FORM.fullmatch(key)
        with closing(self._base.execute("SELECT * FROM keys WHERE prefix = ?", (match[1] if match else "",))) as rows:
            row = rows.fetchone()
        # Compared in any case, so that the time does not tell whether there is such a prefix.
        known = row[1] if row else b"\0" * 32
        same = hmac.compare_digest(self._digest(key), known)
        if row is None or not same or (row[8] is not None and row[8] <= self._clock()):
            return None
        return _team(*row[2:7])

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode("utf-8", "surrogateescape"), hashlib.sha256)


def _team(name: str, models: str, cloud: int, requests: int, tokens: int) -> Team:
    return Team(name, frozenset(models.split("\n")) - {""}, bool(cloud), requests, tokens)
