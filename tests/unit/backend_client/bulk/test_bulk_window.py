"""Small fragments share a slot, so that many small files do not wait for the disk one after another."""

import pytest

from backend_client.bulk.inputs import Fragment, InputFile
from backend_client.bulk.window import SLOT, shared_by_small, whole

MIB = 1024 * 1024


def fragment(form="parquet", size=1000, rows=None, compression="", start=0, stop=None):
    stop = stop if stop is not None else rows if form == "parquet" else size
    return Fragment(InputFile(f"file:///in.{form}", size, "v", form, compression), start, stop, rows)


@pytest.mark.parametrize(
    ("part", "small"),
    [
        (fragment(rows=1), True),
        (fragment(rows=1024), True),
        (fragment(rows=1025), False),
        (fragment(rows=1, size=MIB + 1), False),
        (fragment("jsonl", size=1024), True),
        (fragment("jsonl", size=MIB), True),
        (fragment("jsonl", size=MIB + 1), False),
        (fragment("jsonl", size=100 * MIB, start=5000, stop=6000), True),
        (fragment("jsonl", size=MIB // 8, compression="gzip"), True),
        (fragment("jsonl", size=MIB // 8 + 1, compression="gzip"), False),
        (fragment("csv", size=0), True),
    ],
)
def test_fragments_of_one_chunk_share_a_slot(part, small):
    assert shared_by_small(50_000)(part) == (1 if small else SLOT)
    assert whole(part) == SLOT


def test_what_shares_a_slot_is_no_more_work_than_one_whole_fragment():
    """One death may cost that: 200 prompts are minutes of generation."""
    parts = shared_by_small(200)
    assert [parts(fragment(rows=rows)) for rows in (1, 25, 26, 200)] == [1, 1, SLOT, SLOT]
    assert {shared_by_small(7)(fragment(rows=rows)) for rows in (1, 7)} == {SLOT}
