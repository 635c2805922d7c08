"""Rows of Parquet files: read whole however they are cut, damage set aside, memory bounded."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_client.bulk.inputs import list_inputs, plan
from tests.support.bulk_rows import rows_in


@settings(max_examples=20, deadline=None)
@given(wanted=st.integers(1, 60))
def test_a_parquet_file_is_read_whole_however_it_is_cut(tmp_path_factory, wanted):
    path = tmp_path_factory.mktemp("parquet") / "in.parquet"
    pq.write_table(pa.table({"text": [f"row {row}" for row in range(100)]}), path, row_group_size=37)
    found, rejected = rows_in(plan(list_inputs(str(path)), wanted))
    assert found == [(row, f"row {row}") for row in range(100)]
    assert rejected == []


def test_a_parquet_string_that_is_not_utf_8_comes_as_bytes(tmp_path):
    path = tmp_path / "in.parquet"
    raw = pa.array([b"good", b"\xff\xfe", None], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"text": column}), path)
    found, _ = rows_in(plan(list_inputs(str(path)), 10))
    assert found == [(0, "good"), (1, b"\xff\xfe"), (2, None)]


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())]
)
def test_text_that_is_stored_as_bytes_is_read_as_text(tmp_path, kind):
    path = tmp_path / "in.parquet"
    values = pa.array([None, b"good", "größer".encode(), b"\xff\xfe"], pa.binary()).cast(kind)
    pq.write_table(pa.table({"text": values}), path)
    found, _ = rows_in(plan(list_inputs(str(path)), 10))
    assert found == [(0, None), (1, "good"), (2, "größer"), (3, b"\xff\xfe")]


def test_a_damaged_row_group_rejects_the_rows_that_are_left(tmp_path):
    path = tmp_path / "in.parquet"
    texts = [os.urandom(30).hex() for _ in range(300)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=100, compression="zstd", use_dictionary=False)
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start + 10 : start + 2000] = os.urandom(1990)
    path.write_bytes(data)
    found, rejected = rows_in(plan(list_inputs(str(path)), 100))
    assert sum(rejection.count for rejection in rejected) + len(found) == 300
    assert {place for place, _ in found} >= {*range(100), *range(200, 300)}


def test_a_page_that_does_not_match_its_checksum_is_damaged(tmp_path):
    path = tmp_path / "in.parquet"
    table = pa.table({"text": [f"some words {row}" for row in range(50)], "id": list(range(50))})
    pq.write_table(table, path, write_page_checksum=True, compression="none", use_dictionary=False)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"words 25", b"w\xc3\xb6rd 25", 1))
    assert path.stat().st_size == len(data)
    found, rejected = rows_in(plan(list_inputs(str(path)), 100))
    assert found == []
    assert sum(rejection.count for rejection in rejected) == 50
