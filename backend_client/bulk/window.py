"""How much of a slot a fragment takes: of small ones several share one, so that each need not wait for the disk."""

from __future__ import annotations

from collections.abc import Callable

from backend_client.bulk.fragments import BYTES_PER_ROW, Fragment

SLOT = 8
"""The parts of a slot."""

# So many rows and bytes are one chunk: what is in memory stays bounded.
_FEW_ROWS = 1024
_FEW_BYTES = 1024 * 1024
# Of compressed files, for one byte of the file.
_UNFOLDED = 8

Parts = Callable[[Fragment], int]


def whole(_: Fragment) -> int:
    """Every fragment takes a slot."""
    return SLOT


def shared_by_small(rows_per_fragment: int) -> Parts:
    """Fragments of at most one chunk and an eighth of the rows wanted take an eighth of a slot, others a whole one.

    So a process that dies never loses more than a full fragment of work for each slot.
    """
    most_rows = min(_FEW_ROWS, rows_per_fragment // SLOT)

    def parts(fragment: Fragment) -> int:
        file = fragment.file
        size = file.size if file.form == "parquet" else fragment.stop - fragment.start
        size *= _UNFOLDED if file.compression else 1
        rows = fragment.rows if fragment.rows is not None else size // BYTES_PER_ROW
        return 1 if rows <= most_rows and size <= _FEW_BYTES else SLOT

    return parts
