"""A fragment that kills the process holds up no other: the same command does it last."""

import asyncio

import pytest

from backend_client.bulk import BulkRequest, status
from tests.faults.bulk.data_sets import ROWS_PER_GROUP, assert_whole, rows_of

SIGKILL, INCOMPLETE = -9, 5


@pytest.mark.parametrize("row", [0, ROWS_PER_GROUP])
def test_all_others_are_done_by_the_third_run(starter, tmp_path, row):
    started, source, texts = starter
    out = tmp_path / "out"
    # Beside another fragment, alone before that one, and after it.
    assert [started.run(source, out, deadly=row) for _ in range(3)] == [SIGKILL] * 3
    assert set(texts) - set(rows_of(out)) == set(texts[row : row + ROWS_PER_GROUP])
    request = BulkRequest(kind="embed", source=str(source), out=str(out), column="text", max_rejected=0.1)
    assert asyncio.run(status(request)).exit_code == INCOMPLETE
    assert started.run(source, out) == 0
    assert_whole(out, texts)
    assert not [*(out / "_begun").iterdir()]
