"""Files are cut into fragments that cover them exactly, the same on every machine."""

import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_client.bulk.inputs import (
    Fragment,
    InputFile,
    cut_bytes,
    cut_parquet,
    dump_plan,
    list_inputs,
    load_plan,
    of_shard,
    plan,
)

PARQUET = InputFile("file:///in.parquet", 1, "v", "parquet")


@given(st.lists(st.integers(0, 50)), st.integers(1, 40))
def test_parquet_fragments_cover_every_row_once_in_about_the_size_that_was_asked_for(groups, wanted):
    fragments = list(cut_parquet(PARQUET, groups, wanted))
    covered = [row for part in fragments for row in range(part.start, part.stop)]
    assert covered == list(range(sum(groups)))
    assert all(part.rows == part.stop - part.start <= wanted for part in fragments)
    assert len({part.id for part in fragments}) == len(fragments)


def test_a_stored_plan_is_the_same_plan(tmp_path):
    pq.write_table(pa.table({"text": ["a"] * 100}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "b"}'))
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no")
    fragments = plan(list_inputs(str(tmp_path)), 30)
    assert load_plan(dump_plan(fragments)) == fragments
    assert [bool(fragment.problem) for fragment in fragments] == [False] * 4 + [False, True]


@pytest.mark.parametrize("count", [1, 3, 7])
def test_shards_share_the_fragments_evenly(count):
    fragments = [Fragment(PARQUET, start, start + 1) for start in range(10)]
    shards = [of_shard(fragments, (index, count)) for index in range(count)]
    assert sorted(part.start for shard in shards for part in shard) == list(range(10))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_the_id_tells_versions_of_a_file_apart():
    files = [InputFile("a", 1, "1", "jsonl"), InputFile("a", 1, "2", "jsonl"), InputFile("a", 2, "1", "jsonl")]
    assert len({part.id for file in files for part in cut_bytes(file, 10)}) == 3
