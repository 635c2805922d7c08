"""The plan of a job: all its fragments, from the metadata of its files. Made once and stored beside the output."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple

from backend_client.bulk.inputs import Fragment, InputFile, cut_bytes, cut_parquet
from backend_client.bulk.optional import need
from backend_client.bulk.readers.source import InputChanged, opened

_FOOTERS_AT_ONCE = 16


def plan(files: Sequence[InputFile], rows_per_fragment: int) -> list[Fragment]:
    """Cut every file. Reads the footers of Parquet files and nothing else.

    Raises OSError when a store does not answer; a file that is no Parquet becomes a fragment with a problem.
    """
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE, "footers") as pool:
        parts = pool.map(lambda file: list(_cut(file, rows_per_fragment)), files)
        return [fragment for part in parts for fragment in part]


def _cut(file: InputFile, wanted: int) -> Iterator[Fragment]:
    if file.form != "parquet":
        return cut_bytes(file, wanted)
    groups, problem = _row_groups(file)
    return iter([Fragment(file, 0, 0, 0, problem)]) if problem else cut_parquet(file, groups, wanted)


def _row_groups(file: InputFile) -> tuple[list[int], str]:
    pa = need("pyarrow")
    pq = need("pyarrow.parquet")
    with opened(file) as source:
        try:
            metadata = pq.ParquetFile(source).metadata
        except (pa.ArrowException, OSError, ValueError) as error:
            if source.failure is not None:
                raise source.failure from None
            if isinstance(error, InputChanged):
                raise
            return [], f"not a complete Parquet file: {_first_line(error)}"
        return [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)], ""


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def dump(fragments: Sequence[Fragment]) -> bytes:
    """As JSON: the files, and of each fragment its file's number, range, rows and problem."""
    files = list(dict.fromkeys(fragment.file for fragment in fragments))
    numbers = {file: number for number, file in enumerate(files)}
    rows = [[numbers[part.file], part.start, part.stop, part.rows, part.problem] for part in fragments]
    return json.dumps({"files": [astuple(file) for file in files], "fragments": rows}).encode()


def load(data: bytes) -> list[Fragment]:
    """Read `dump`."""
    stored = json.loads(data)
    files = [InputFile(*file) for file in stored["files"]]
    return [Fragment(files[number], *rest) for number, *rest in stored["fragments"]]
