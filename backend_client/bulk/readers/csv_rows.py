"""Rows of CSV (RFC 4180) with a header; every column is text."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

from backend_client.bulk.inputs import Fragment, InputFile, opened
from backend_client.bulk.job import CHUNK_BYTES, BulkJob, Chunk, Rejection
from backend_client.bulk.optional import need
from backend_client.bulk.readers.json_lines import LONGEST_LINE, Damaged, lines
from backend_client.errors import ConfigurationError


def read(fragment: Fragment, job: BulkJob, size: int) -> Iterator[Chunk]:
    """The rows of the file, counted from 0 after the header. A row with more or fewer cells is rejected."""
    csv.field_size_limit(LONGEST_LINE)
    damage: list[Damaged] = []
    number = length = 0
    with opened(fragment.file) as source:
        rows = csv.reader(_text(lines(source, fragment), damage))
        header = _header(rows)
        found: list[tuple[int, list[str]]] = []
        rejected: list[Rejection] = []
        for row in _checked(rows):
            problem = row if isinstance(row, str) else _problem(row, header)
            if problem:
                rejected.append(Rejection(number, problem))
            elif isinstance(row, list):
                found.append((number, row))
                length += sum(map(len, row))
            number += 1
            if len(found) + len(rejected) >= size or length >= CHUNK_BYTES:
                yield _chunk(found, rejected, header, job)
                found, rejected, length = [], [], 0
        rejected += [Rejection(number, str(error), rest=True) for error in damage]
        if found or rejected:
            yield _chunk(found, rejected, header, job)


def columns(file: InputFile, _: BulkJob) -> Any:
    """The schema of the header. Raises ConfigurationError for a file whose header cannot be read."""
    pa = need("pyarrow")
    csv.field_size_limit(LONGEST_LINE)
    with opened(file) as source:
        header = _header(csv.reader(_text(lines(source, Fragment(file, 0, file.size)), [])))
    problem = "" if header is None else header if isinstance(header, str) else _problem(header, header)
    if "new-line character" in problem:
        problem = "its lines end with CR alone, convert them to LF"
    if problem:
        raise ConfigurationError(f"the header of {file.url} cannot be read: {problem}")
    names = header if isinstance(header, list) else []
    return pa.schema([(name, pa.string()) for name in names])


def _header(rows: Any) -> list[str] | str | None:
    header = next(_checked(rows), None)
    if isinstance(header, list) and header:
        header[0] = header[0].removeprefix("\ufeff")
    return header


def _text(numbered: Iterator[tuple[int, bytes | None]], damage: list[Damaged]) -> Iterator[str]:
    try:
        for _, line in numbered:
            # What is not UTF-8 becomes lone surrogates, which no valid text has: the row is rejected by them.
            yield ("\udcff" if line is None else line.decode(errors="surrogateescape")) + "\n"
    except Damaged as error:
        damage.append(error)


def _checked(rows: Any) -> Iterator[list[str] | str]:
    """Rows, or why one cannot be parsed; lines without anything are left out."""
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"not CSV: {error}"
            continue
        if row:
            yield row


def _problem(row: list[str], header: list[str] | str | None) -> str:
    if not isinstance(header, list):
        return "the file has no header"
    if len(row) != len(header):
        return f"{len(row)} cells where the header has {len(header)}"
    try:
        "".join(row).encode()
    except UnicodeEncodeError:
        return "invalid UTF-8"
    return ""


def _chunk(
    found: list[tuple[int, list[str]]], rejected: list[Rejection], header: list[str] | str | None, job: BulkJob
) -> Chunk:
    pa = need("pyarrow")
    names = header if isinstance(header, list) else []
    cells = dict(zip(names, zip(*(row for _, row in found), strict=True), strict=True)) if found else {}
    kept = names if job.keep is None else [name for name in job.keep if name in names]
    table = pa.table({name: pa.array(cells.get(name, ()), pa.string()) for name in kept})
    numbers = [number for number, _ in found]
    if found and job.column not in cells:
        rejected = [*rejected, *(Rejection(number, f"there is no column {job.column}") for number in numbers)]
        return Chunk(table.slice(0, 0), [], [], rejected)
    ids = list(cells[job.id_column]) if job.id_column in cells else None
    return Chunk(table, numbers, list(cells.get(job.column, ())), rejected, ids)
