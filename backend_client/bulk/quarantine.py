"""Fragments that a run gave up, as the output keeps them: `--status` tells them, and the next run tries them again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from backend_client.bulk.fragments import Fragment
from backend_client.bulk.stores import Store, read_many

FOLDER = "_quarantine"


@dataclass(slots=True)
class Quarantined:
    """A fragment that is given up for this run, and why."""

    fragment: Fragment
    attempts: int
    reason: str

    def __str__(self) -> str:
        """The file, the range and the reason."""
        return f"{self.fragment.file.url} {self.fragment.start}-{self.fragment.stop}: {self.reason}"


def record(store: Store, given_up: Quarantined) -> None:
    """Keep it in the output. Raises OSError."""
    entry = {"attempts": given_up.attempts, "reason": str(given_up)}
    store.put(f"{FOLDER}/{given_up.fragment.id}.json", json.dumps(entry).encode())


def recorded(store: Store, fragments: Iterable[Fragment]) -> dict[str, str]:
    """Why the last run that tried them gave up some of these fragments, by their ids. Raises OSError."""
    kept = store.names(FOLDER)
    wanted = [f"{FOLDER}/{fragment.id}.json" for fragment in fragments if f"{fragment.id}.json" in kept]
    return {name.split("/")[1].removesuffix(".json"): _reason(data) for name, data in read_many(store, wanted).items()}


def _reason(data: bytes) -> str:
    try:
        reason: str = json.loads(data)["reason"]
    except ValueError:
        return "the reason was lost: the machine lost its power"
    return reason


def forget(store: Store) -> None:
    """Remove what is kept: every fragment has a file. Raises OSError."""
    store.remove(f"{FOLDER}/{name}" for name in store.names(FOLDER))
