"""What stands beside the data: receipts of committed fragments, `_SUCCESS`, and the report of a run."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import IntEnum
from typing import Any, Self

from backend_client.bulk.inputs import Fragment
from backend_client.bulk.job import FORMAT
from backend_client.bulk.optional import need
from backend_client.bulk.stores import Store, read_many

FOLDER = "_receipts"
REJECTED = "_rejected"
BEGUN = "_begun"
"""The folder of marks: one for each fragment under way, as many bytes long as processes began with it and died."""
METADATA_KEY = "npu_bulk"
"""Under this key a data file's metadata has its receipt, without the checksum and the size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The account of one fragment. `rejected_file` is in the folder of rejected rows, "" without any. `incomplete`
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
        return f"{FOLDER}/{self.fragment}.json"

    def dump(self) -> bytes:
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


def deaths(store: Store, fragments: Iterable[Fragment]) -> dict[str, int]:
    """How many processes died while they worked on a fragment, or still do, of those that have a mark."""
    marked = store.names(BEGUN)
    marks = read_many(store, [f"{BEGUN}/{part.id}" for part in fragments if part.id in marked])
    return {name.removeprefix(f"{BEGUN}/"): len(mark) for name, mark in marks.items()}


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
    """Read the receipt of a fragment that another process committed; None if it does not exist yet. Raises OSError."""
    if not store.has(fragment.name):
        return None
    data = store.read(f"{FOLDER}/{fragment.id}.json")
    receipt = (_loaded(data) if data is not None else None) or rebuilt(store, fragment)
    return replace(receipt, won=False)


# The end of a job: when every fragment has a file, counts and checksums of all of them are written once.

SUCCESS = "_SUCCESS"


def finish(store: Store, fragments: Sequence[Fragment], known: Mapping[str, Receipt]) -> None:
    """Write `_SUCCESS` for a job whose fragments are all committed. Blocking. Raises OSError.

    `known` are receipts that were read already. Any number of processes may do this at once.
    """
    receipts = {**known, **read_receipts(store, [part for part in fragments if part.id not in known])}
    missing = [fragment for fragment in fragments if fragment.id not in receipts]
    for receipt in [rebuilt(store, fragment) for fragment in missing]:
        store.put(receipt.name, receipt.dump())
        receipts[receipt.fragment] = receipt
    every = [receipts[fragment.id] for fragment in fragments]
    content = {
        "format": FORMAT,
        "fragments": len(fragments),
        **_totals(every),
        "files": {f"part-{receipt.fragment}.parquet": _file(receipt) for receipt in every},
    }
    # Files of rejected rows whose attempt did not win, and what processes that died left: before the job is complete,
    # so that a death here leaves the rest to the next run.
    referred = {receipt.rejected_file for receipt in every}
    store.remove(f"{REJECTED}/{name}" for name in store.names(REJECTED) if name not in referred)
    store.remove(f"{BEGUN}/{name}" for name in store.names(BEGUN))
    store.sweep()
    store.create(SUCCESS, json.dumps(content, indent=1).encode() + b"\n")


def _totals(receipts: Sequence[Receipt]) -> dict[str, Any]:
    served: Counter[str] = Counter()
    for receipt in receipts:
        served.update(receipt.served)
    names = ("rows", "rejected", "incomplete", "tokens", "generated_tokens", "npu_busy_us", "size")
    sums = {name: sum(getattr(receipt, name) for receipt in receipts) for name in names}
    return {**sums, "served": dict(served.most_common())}


def _file(receipt: Receipt) -> dict[str, Any]:
    rejected = {"rejected_file": f"{REJECTED}/{receipt.rejected_file}"} if receipt.rejected_file else {}
    return {
        "rows": receipt.rows,
        "rejected": receipt.rejected,
        "sha256": receipt.sha256,
        "size": receipt.size,
        **rejected,
    }


# The report of a run, or of a job's progress.


class ExitCode(IntEnum):
    """The exit status of a run."""

    COMPLETE = 0
    """Every fragment of the job, or of the shard, has a file."""
    FAILED = 1
    """The run stopped with an error; what was committed is kept."""
    QUARANTINED = 3
    """Everything has a file but the fragments that are listed."""
    TOO_MANY_REJECTED = 4
    """More rows were rejected than `max_rejected` allows."""
    INCOMPLETE = 5
    """Of `status`: there are fragments to do yet."""
    INTERRUPTED = 130
    """Stopped by a signal; run the same command to continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkReport:
    """`done` of `fragments` have a file, with `rows` rows; `rejected` were set aside. `rows_now`: of this run.

    `quarantined` says why, by fragment. `served` counts rows of this run by node and device. `excluded` are nodes that
    answer in another vector space. `lost`: workers that died. `success`: `_SUCCESS` is written.
    """

    exit_code: ExitCode
    fragments: int
    done: int
    rows: int
    rejected: int
    rows_now: int = 0
    seconds: float = 0.0
    quarantined: Mapping[str, str] = field(default_factory=dict)
    served: Mapping[str, int] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    failures: int = 0
    lost: int = 0
    success: bool = False
    message: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rate = round(self.rows_now / self.seconds, 1) if self.seconds else 0.0
        return asdict(self) | {"exit_code": int(self.exit_code), "rows_per_second": rate}


class Progress:
    """The progress of a run: sums over the fragments that are committed, by this run and before.

    `quarantined` says why fragments were given up, by their ids.
    """

    def __init__(self, fragments: int) -> None:
        self.fragments = fragments
        self.done = 0
        self.rows = 0
        self.rejected = 0
        self.incomplete = 0
        self.rows_now = 0
        self.running = 0
        self.failures = 0
        self.lost = 0
        self.served: Counter[str] = Counter()
        self.quarantined: dict[str, str] = {}

    def add(self, receipt: Receipt, *, before: bool = False) -> None:
        """Add a committed fragment; `before`: of an earlier run. Fragments that others committed do not count as this
        run's.
        """
        self.done += 1
        self.rows += receipt.rows
        self.rejected += receipt.rejected
        self.incomplete += receipt.incomplete
        if receipt.won and not before:
            self.rows_now += receipt.rows
            self.served.update(receipt.served)

    def report(self, code: ExitCode, message: str, **more: Any) -> BulkReport:
        """The report of a run that ends so."""
        known = {item.name: getattr(self, item.name) for item in fields(BulkReport) if hasattr(self, item.name)}
        known |= {"quarantined": dict(self.quarantined), "served": dict(self.served.most_common())}
        return BulkReport(exit_code=code, message=message, **known, **more)
