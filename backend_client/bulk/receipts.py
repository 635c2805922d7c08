"""Receipts of committed fragments: counts and checksum, stored beside the data by the writer that won."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from backend_client.bulk.fragments import Fragment
from backend_client.bulk.optional import need
from backend_client.bulk.stores import Store, read_many

FOLDER = "_receipts"
REJECTED = "rejected"
METADATA_KEY = "npu_bulk"
"""Under this key a data file's metadata has its receipt, without the checksum and the size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Of one fragment. `rejected_file` is in the folder of rejected rows, "" without any. `incomplete`
    files ended early, or could not be read at all: each counts as one rejected row. `served` counts rows by node
    and device. `won`: this attempt's file is the one that has the name.
    """

    fragment: str
    rows: int
    rejected: int
    rejected_file: str = ""
    incomplete: int = 0
    tokens: int = 0
    generated_tokens: int = 0
    npu_busy_us: int = 0
    seconds: float = 0.0
    served: Mapping[str, int] = field(default_factory=dict)
    size: int = 0
    sha256: str = ""
    won: bool = True

    @property
    def name(self) -> str:
        """The receipt's own file."""
        return f"{FOLDER}/{self.fragment}.json"

    def dump(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def load(cls, data: bytes) -> Self:
        """Read `dump`. Raises ValueError, TypeError."""
        return cls(**json.loads(data))


def read_receipts(store: Store, fragments: Iterable[Fragment]) -> dict[str, Receipt]:
    """The receipts that there are, by fragment."""
    stored = store.names(FOLDER)
    wanted = [fragment.id for fragment in fragments if f"{fragment.id}.json" in stored]
    found = read_many(store, [f"{FOLDER}/{name}.json" for name in wanted])
    receipts = (_loaded(data) for data in found.values())
    return {receipt.fragment: receipt for receipt in receipts if receipt is not None}


def _loaded(data: bytes) -> Receipt | None:
    try:
        return Receipt.load(data)
    except (ValueError, TypeError):
        return None


def rebuilt(store: Store, fragment: Fragment) -> Receipt:
    """The receipt of a data file whose writer died before it wrote one. Raises OSError."""
    pq = need("pyarrow.parquet")
    with store.open(fragment.name) as file:
        metadata = pq.ParquetFile(file).metadata.metadata
        file.seek(0)
        digest, size = hashlib.sha256(), 0
        while block := file.read(1024 * 1024):
            digest.update(block)
            size += len(block)
    return Receipt(**{**json.loads(metadata[METADATA_KEY.encode()]), "size": size, "sha256": digest.hexdigest()})


def committed(store: Store, fragment: Fragment) -> Receipt | None:
    """The receipt of a fragment that another process has committed; None while there is no file. Raises OSError."""
    if not store.has(fragment.name):
        return None
    data = store.read(f"{FOLDER}/{fragment.id}.json")
    receipt = (_loaded(data) if data is not None else None) or rebuilt(store, fragment)
    return replace(receipt, won=False)


def totals(receipts: Iterable[Receipt]) -> dict[str, Any]:
    """Their sums."""
    every = list(receipts)
    served: Counter[str] = Counter()
    for receipt in every:
        served.update(receipt.served)
    names = ("rows", "rejected", "incomplete", "tokens", "generated_tokens", "npu_busy_us", "size")
    sums = {name: sum(getattr(receipt, name) for receipt in every) for name in names}
    return {**sums, "served": dict(served.most_common())}
