"""What the footer of a Parquet file tells of the values in its columns."""

from __future__ import annotations

import json
from typing import Any

from backend_client.bulk.common_type import Bounds, Kind, kind_of, leaves_of
from backend_client.bulk.optional import need

_UNITS = {"milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"}


def kinds_in(schema: Any, file: Any) -> list[Kind]:
    """The kind of each column of a `ParquetFile`, whose Arrow schema is given."""
    leaves = [leaf for column in schema for leaf in leaves_of(column.type)]
    # A type whose leaves are counted otherwise than here would move the bounds to other columns.
    known = len(leaves) == file.metadata.num_columns
    bounds = iter([_bounds(leaf, file, index) if known else None for index, leaf in enumerate(leaves)])
    return [kind_of(column.type, bounds) for column in schema]


def _bounds(leaf: Any, file: Any, index: int) -> Bounds | None:
    """Between which values a column of 64-bit integers, days or ticks is, over all row groups. Others fit anyway."""
    types = need("pyarrow").types
    if not _is_counted(leaf):
        return None
    raw = not types.is_integer(leaf)
    if types.is_timestamp(leaf):
        stored = json.loads(file.schema.column(index).logical_type.to_json())
        if _UNITS.get(stored.get("timeUnit")) != leaf.unit:
            return None
    low: list[int] = []
    high: list[int] = []
    for group in range(file.metadata.num_row_groups):
        column = file.metadata.row_group(group).column(index)
        statistics = column.statistics
        if statistics is None:
            return None
        if statistics.has_min_max:
            low.append(statistics.min_raw if raw else statistics.min)
            high.append(statistics.max_raw if raw else statistics.max)
        elif not (statistics.has_null_count and statistics.null_count == column.num_values):
            return None
    return (min(low), max(high)) if low else (0, 0)


def _is_counted(leaf: Any) -> bool:
    types = need("pyarrow").types
    tests = (types.is_int64, types.is_uint64, types.is_date32, types.is_timestamp, types.is_duration)
    return any(test(leaf) for test in tests)
