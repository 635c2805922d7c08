"""What an output holds: data files with their receipts, `_SUCCESS`; and the report of a run."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from backend_client.bulk.answers import Results
from backend_client.bulk.inputs import Fragment
from backend_client.bulk.job import FORMAT, RESULT_TYPES, BulkJob, Chunk, Rejection
from backend_client.bulk.readers import schema_of
from backend_client.bulk.stores import OutputFailed, Store, need
from backend_client.lifetime import map_in_daemon_threads

REJECTED = "_rejected"
BEGUN = "_begun"
"""The folder of marks: one for each fragment under way, as many bytes long as processes began with it and died."""
SUCCESS = "_SUCCESS"
_KEY = "npu_bulk"
_READS_AT_ONCE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The account of a fragment, in the metadata of its data file.

    `rejected_file` is "" without rejected rows. `incomplete` files end early, or cannot be read: each is one rejected
    row. `served` counts rows by node and device. `won`: this attempt's file has the name.
    """

    fragment: str
    rows: int
    rejected: int
    rejected_file: str = ""
    incomplete: int = 0
    tokens: int = 0
    generated_tokens: int = 0
    npu_busy_us: int = 0
    joules: float = 0.0
    served: Mapping[str, int] = field(default_factory=dict)
    size: int = 0
    won: bool = True


def read_receipts(store: Store, fragments: Sequence[Fragment]) -> list[Receipt]:
    """The receipts of fragments that have a file. Raises OSError, OutputFailed for a damaged file."""

    def look(fragment: Fragment) -> Receipt:
        with store.open(fragment.name) as file:
            size = file.seek(0, 2)
            try:
                metadata = need("pyarrow.parquet").ParquetFile(file).metadata.metadata
                return replace(Receipt(**json.loads(metadata[_KEY.encode()])), size=size, won=False)
            except (need("pyarrow").ArrowException, ValueError, TypeError, KeyError) as error:
                problem = error
        raise OutputFailed(f"{fragment.name} in the output is not a complete file of this job: remove it ({problem})")

    return map_in_daemon_threads(look, fragments, _READS_AT_ONCE, "receipts")


def deaths(store: Store, fragments: Iterable[Fragment]) -> dict[str, int]:
    """How many processes died with a fragment, or work on it now, where any did."""
    marked = store.names(BEGUN)
    known = [part.id for part in fragments if part.id in marked]
    marks = map_in_daemon_threads(lambda name: store.read(f"{BEGUN}/{name}"), known, _READS_AT_ONCE, "marks")
    return {name: len(mark) for name, mark in zip(known, marks, strict=True) if mark is not None}


def finish(store: Store, fragments: Sequence[Fragment], known: Mapping[str, Receipt]) -> None:
    """Write `_SUCCESS` for a job whose fragments are all committed; several processes may at once.

    `known` are receipts that were read already.
    """
    others = read_receipts(store, [part for part in fragments if part.id not in known])
    receipts = {**known, **{receipt.fragment: receipt for receipt in others}}
    every = [receipts[fragment.id] for fragment in fragments]
    served = Counter[str]()
    for receipt in every:
        served.update(receipt.served)
    sums = ("rows", "rejected", "incomplete", "tokens", "generated_tokens", "npu_busy_us", "joules", "size")
    totals = {name: sum(getattr(receipt, name) for receipt in every) for name in sums}
    files = {}
    for receipt in every:
        rejected = {"rejected_file": f"{REJECTED}/{receipt.rejected_file}"} if receipt.rejected_file else {}
        account = {"rows": receipt.rows, "rejected": receipt.rejected, "size": receipt.size}
        files[f"part-{receipt.fragment}.parquet"] = account | rejected
    content = {"format": FORMAT, "fragments": len(fragments), **totals, "served": served, "files": files}
    # Files of rejected rows whose attempt did not win, and what processes that died left: before the job is complete,
    # so that a death here leaves the rest to the next run.
    referred = {receipt.rejected_file for receipt in every}
    store.remove(f"{REJECTED}/{name}" for name in store.names(REJECTED) if name not in referred)
    store.remove(f"{BEGUN}/{name}" for name in store.names(BEGUN))
    store.sweep()
    store.create(SUCCESS, json.dumps(content, indent=1).encode() + b"\n")


# The data file: chunks with their results become row groups of Parquet.

# Row groups smaller than this make a file slow to scan; larger ones only cost memory here.
_ROWS_PER_GROUP = 8192
_BYTES_PER_GROUP = 64 * 1024 * 1024
# Pages that fit into the processor's cache cost a fifth less to write than those of 1 MiB.
_PAGE_BYTES = 256 * 1024


class Writer:
    """Writes one file, and keeps account of its rows."""

    def __init__(self, path: Path, fragment: Fragment, job: BulkJob) -> None:
        self._path = path
        self.rejected: list[Rejection] = []
        self._fragment = fragment
        self._sums = Counter[str](rows=0)
        self._joules = 0.0
        self._served = Counter[str]()
        self._schema = _schema(job)
        self._pending: list[Any] = []
        self._waiting = self._bytes = 0
        # By the names of leaves: vectors, which do not compress, and nested columns are left as they are.
        compression = dict.fromkeys(self._schema.names, "zstd") if job.kind == "embed" else "zstd"
        self._file = need("pyarrow.parquet").ParquetWriter(
            path,
            self._schema,
            compression=compression,
            data_page_size=_PAGE_BYTES,
            write_page_checksum=True,
            use_dictionary=["model", "node", "device", "space", "error", "source_file", "finish_reason"],
            write_statistics=[name for name in self._schema.names if name in {"source_row", job.id_column}],
        )

    def add(self, chunk: Chunk, results: Results) -> None:
        """Append the rows of a chunk that were not refused."""
        refused = [Rejection(chunk.rows[row], reason, chunk.ids[row]) for row, reason in results.refused.items()]
        self.rejected += sorted([*chunk.rejected, *refused], key=lambda rejection: rejection.row)
        kept = [row for row in range(len(chunk.rows)) if row not in results.refused]
        if not kept:
            return
        pa = need("pyarrow")
        columns = [*_picked(chunk.table, kept).columns, results.values_of(kept)]
        columns += [
            pa.array([values[row] for row in kept], getattr(pa, RESULT_TYPES[name])())
            for name, values in results.columns.items()
        ]
        columns.append(pa.repeat(pa.scalar(self._fragment.file.url, pa.string()), len(kept)))
        columns.append(pa.array([chunk.rows[row] for row in kept], pa.int64()))
        table = pa.Table.from_arrays(columns, schema=self._schema)
        self._served.update(results.served)
        self._sums.update(rows=len(kept), tokens=results.tokens)
        self._sums["generated_tokens"] += sum(filter(None, results.columns["num_generated_tokens"]))
        self._joules += sum(filter(None, results.columns["joules"]))
        self._sums["npu_busy_us"] += sum(filter(None, results.columns["npu_busy_us"]))
        self._pending.append(table)
        self._waiting += len(kept)
        self._bytes += table.nbytes
        if self._waiting >= _ROWS_PER_GROUP or self._bytes >= _BYTES_PER_GROUP:
            self._flush()

    def commit(self, store: Store) -> Receipt:
        """Complete the file and name it, unless another has the name: then the receipt is the other's."""
        if self._pending:
            self._flush()
        fragment = self._fragment
        rejected = b"".join(rejection.line(fragment.file.url) for rejection in self.rejected)
        sums: dict[str, Any] = dict(self._sums)
        receipt = Receipt(
            fragment=fragment.id,
            rejected=sum(rejection.count for rejection in self.rejected),
            rejected_file=f"{fragment.id}.{hashlib.sha256(rejected).hexdigest()[:8]}.jsonl" if rejected else "",
            incomplete=sum(rejection.rest for rejection in self.rejected),
            joules=self._joules,
            served=dict(self._served),
            **sums,
        )
        self._file.add_key_value_metadata({_KEY: json.dumps(asdict(receipt)), "source": fragment.file.url})
        self._file.close()
        receipt = replace(receipt, size=self._path.stat().st_size)
        if rejected:
            store.create(f"{REJECTED}/{receipt.rejected_file}", rejected)
        won = store.commit(self._path, fragment.name)
        return receipt if won else read_receipts(store, [fragment])[0]

    def abandon(self) -> None:
        self._pending = []
        try:
            self._file.close()
        except OSError:
            pass
        finally:
            self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        table = need("pyarrow").concat_tables(self._pending)
        self._pending, self._waiting, self._bytes = [], 0, 0
        self._file.write_table(table, row_group_size=len(table))


def _schema(job: BulkJob) -> Any:
    pa = need("pyarrow")
    columns = schema_of(job.schema)
    result = pa.list_(pa.float32(), max(1, job.dimensions)) if job.kind == "embed" else pa.string()
    added = [(job.result_column, result)]
    added += [(name, getattr(pa, kind)()) for name, kind in RESULT_TYPES.items()]
    added += [("source_file", pa.string()), ("source_row", pa.int64())]
    return pa.schema([*columns, *(pa.field(*each) for each in added)], columns.metadata)


def _picked(table: Any, rows: list[int]) -> Any:
    """These rows, in order. As slices: Arrow's `take` does not know every type."""
    if len(rows) == table.num_rows:
        return table
    starts = [place for place, row in enumerate(rows) if not place or row != rows[place - 1] + 1]
    runs = itertools.pairwise([*starts, len(rows)])
    return need("pyarrow").concat_tables([table.slice(rows[start], stop - start) for start, stop in runs])


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
    """Sums over the fragments that are committed, by this run and before.

    `quarantined` says why fragments were given up; `receipts` are those of the committed ones; by id.
    """

    def __init__(self, fragments: int) -> None:
        self.fragments = fragments
        self.rows = self.rows_now = 0
        self.rejected = self.incomplete = 0
        self.running = self.failures = self.lost = 0
        self.served = Counter[str]()
        self.quarantined: dict[str, str] = {}
        self.receipts: dict[str, Receipt] = {}

    @property
    def done(self) -> int:
        """The number of fragments that are committed."""
        return len(self.receipts)

    def add(self, receipt: Receipt) -> None:
        """Add a committed fragment. Rows of other processes and runs are not those of now."""
        self.receipts[receipt.fragment] = receipt
        self.rows += receipt.rows
        self.rejected += receipt.rejected
        self.incomplete += receipt.incomplete
        if receipt.won:
            self.rows_now += receipt.rows
            self.served.update(receipt.served)

    def report(self, code: ExitCode, message: str, **more: Any) -> BulkReport:
        """The report of a run that ends so."""
        known = {item.name: getattr(self, item.name) for item in fields(BulkReport) if hasattr(self, item.name)}
        known |= {"quarantined": dict(self.quarantined), "served": dict(self.served.most_common())}
        return BulkReport(exit_code=code, message=message, **known, **more)
