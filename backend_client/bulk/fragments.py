"""Fragments: the units of work of a job, and how files are cut into them. Pure: the same on every machine."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Form = Literal["parquet", "jsonl", "csv"]

# A line of JSON is taken for 1 KiB where a number of rows has to become a number of bytes: the plan reads no data.
BYTES_PER_ROW = 1024


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of the input. `version` is its etag, or else its modification time; `compression` is "" for none."""

    url: str
    size: int
    version: str
    form: Form
    compression: str = ""

    @property
    def splits(self) -> bool:
        """Whether a part of it can be read without what comes before."""
        return self.form == "parquet" or (self.form == "jsonl" and not self.compression)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Rows `start` to `stop` (exclusive) of a Parquet file; of a plain JSONL file the lines that begin in these bytes.

    Other files are one fragment each. `rows` is their number where metadata tells it. `problem` says why a file cannot
    be read at all; its fragment holds no rows, and is committed with one record among the rejected ones.
    """

    file: InputFile
    start: int
    stop: int
    rows: int | None = None
    problem: str = ""
    id: str = field(init=False, compare=False)
    """Names the fragment and its output: 32 hex digits of path, size, version and range."""

    def __post_init__(self) -> None:
        """Compute the id once: a run of many fragments asks for it often."""
        key = json.dumps([self.file.url, self.file.size, self.file.version, self.start, self.stop])
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:32]
        object.__setattr__(self, "id", digest)

    @property
    def name(self) -> str:
        """The name of its data file in the output."""
        return f"part-{self.id}.parquet"


def listing_digest(files: Iterable[InputFile]) -> str:
    """A digest of paths, sizes and versions."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(json.dumps([file.url, file.size, file.version]).encode(errors="surrogatepass") + b"\n")
    return digest.hexdigest()[:32]


def cut_parquet(file: InputFile, row_groups: Sequence[int], wanted: int) -> Iterator[Fragment]:
    """Fragments of about `wanted` rows: small row groups together, a large one in equal parts."""
    start = stop = 0
    for rows in row_groups:
        if stop > start and stop - start + rows > wanted:
            yield Fragment(file, start, stop, stop - start)
            start = stop
        stop += rows
        if stop - start > wanted:
            parts = -(-(stop - start) // wanted)
            bounds = [start + (stop - start) * part // parts for part in range(parts + 1)]
            yield from (Fragment(file, *bound, bound[1] - bound[0]) for bound in itertools.pairwise(bounds))
            start = stop
    if stop > start or not stop:
        yield Fragment(file, start, stop, stop - start)


def cut_bytes(file: InputFile, wanted: int) -> Iterator[Fragment]:
    """Byte ranges of about `wanted` rows; the whole of a file that cannot be split."""
    parts = max(1, round(file.size / (wanted * BYTES_PER_ROW))) if file.splits else 1
    for part in range(parts):
        yield Fragment(file, file.size * part // parts, file.size * (part + 1) // parts)


def of_shard(fragments: Sequence[Fragment], shard: tuple[int, int] | None) -> list[Fragment]:
    """The fragments of shard i (counted from 0) of n: every nth of the plan, so that shards differ by one at most."""
    return list(fragments) if shard is None else list(fragments[shard[0] :: shard[1]])
