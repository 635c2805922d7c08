"""Readers: a fragment as chunks of rows, never more than one chunk in memory. Blocking; run in a thread.

Begin with `read` below; there is a module for each format, and `source` opens what all of them read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from backend_client.bulk.inputs import Fragment, InputFile, check_unchanged
from backend_client.bulk.job import BulkJob, Chunk, Rejection
from backend_client.bulk.readers import json_lines, parquet

_READERS = {"parquet": parquet.read, "jsonl": json_lines.read, "txt": json_lines.read}
_COLUMNS = {"parquet": parquet.columns, "jsonl": json_lines.columns, "txt": json_lines.columns}
CHUNK_ROWS = 1024


def read(fragment: Fragment, job: BulkJob) -> Iterator[Chunk]:
    """The rows of a fragment, in their order. Damaged content becomes rejections.

    Raises OSError when the store fails, InputChanged when the file is no longer the planned one.
    """
    if fragment.problem:
        yield Chunk(None, [], [], [Rejection(0, fragment.problem, rest=True)])
    else:
        yield from _READERS[fragment.file.form](fragment, job, CHUNK_ROWS)
    check_unchanged(fragment.file)


def columns_in(file: InputFile, job: BulkJob) -> Any:
    """The columns of a file: their JSON types by name for JSON lines, otherwise Arrow's schema.

    Without any where nothing can be read. Raises OSError when the store fails, InputChanged when the file is no longer
    the listed one.
    """
    found = _COLUMNS[file.form](file, job)
    check_unchanged(file)
    return found
