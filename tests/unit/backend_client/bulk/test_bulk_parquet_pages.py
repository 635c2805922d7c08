"""Pages of Parquet files that are too large to be decoded are refused by their headers, and by nothing else."""

import os
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend_client.bulk.inputs import list_inputs
from backend_client.bulk.plan import plan
from backend_client.bulk.readers import parquet
from backend_client.bulk.readers.parquet import page_sizes
from backend_client.bulk.readers.source import opened
from tests.support.bulk_rows import JOB, rows_in

TEXTS = [f"{'long ' * (row % 40)}{row}" for row in range(3000)]
TABLE = pa.table(
    {
        "text": TEXTS,
        "id": list(range(3000)),
        "lists": [[row, None] for row in range(3000)],
        "words": pa.array([f"word {row % 7}" for row in range(3000)]).dictionary_encode(),
        "long": [f"{row % 3}" * 2000 for row in range(3000)],
        "flags": [row % 3 == 0 for row in range(3000)],
    }
)
FORMS = {
    "plain": {"compression": "none", "use_dictionary": False, "data_page_size": 5000},
    "zstd": {"compression": "zstd", "row_group_size": 700},
    "second version": {"data_page_version": "2.0", "data_page_size": 3000},
    "checksums": {"write_page_checksum": True, "use_dictionary": False, "data_page_size": 4000},
    "index": {"write_page_index": True, "data_page_size": 4000},
    "statistics": {"write_statistics": True, "use_dictionary": False, "data_page_size": 4000},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_sizes_of_all_pages_are_what_the_footer_says_in_sum(tmp_path, form):
    path = tmp_path / "in.parquet"
    pq.write_table(TABLE, path, **FORMS[form])
    (file,) = list_inputs(str(path))
    metadata = pq.read_metadata(path)
    pages = 0
    with opened(file) as source:
        for group in range(metadata.num_row_groups):
            for index in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(index)
                sizes = list(page_sizes(source, chunk))
                pages += len(sizes)
                headers = chunk.total_uncompressed_size - sum(decoded for _, decoded in sizes)
                assert sum(stored for stored, _ in sizes) == chunk.total_compressed_size
                assert 10 * len(sizes) <= headers <= 4500 * len(sizes), "what is left are the headers"
    assert pages > metadata.num_row_groups * metadata.num_columns


@pytest.fixture
def limit(monkeypatch):
    monkeypatch.setattr(parquet, "LARGEST_PAGE", 20_000)


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("what", ["page", "dictionary"])
def test_rows_behind_a_page_that_is_too_large_are_rejected_and_it_is_not_decoded(tmp_path, monkeypatch, what):
    path = tmp_path / "in.parquet"
    dictionary = what == "dictionary"
    texts = [f"{row}{'x' * 100}" for row in range(500)]
    table = pa.table({"text": texts, "id": list(range(500))})
    pq.write_table(
        table, path, compression="zstd", use_dictionary=["text"] if dictionary else False, data_page_size=10**6,
        dictionary_pagesize_limit=10**6,
    )  # fmt: skip
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", None)
    found, rejected = rows_in(plan(list_inputs(str(path)), 200))
    assert found == []
    assert [(each.row, each.count) for each in rejected] == [(0, 166), (166, 167), (333, 167)]
    for each in rejected:
        assert each.reason.startswith("the column text has a page of 5")
        assert each.reason.endswith("a reader takes at most 20000: write the file with smaller pages")


@pytest.mark.usefixtures("limit")
def test_large_columns_of_small_pages_are_read(tmp_path):
    path = tmp_path / "in.parquet"
    pq.write_table(TABLE.select(["text", "id"]), path, use_dictionary=False, data_page_size=5000, write_batch_size=10)
    assert pq.read_metadata(path).row_group(0).column(0).total_uncompressed_size > 20_000
    found, rejected = rows_in(plan(list_inputs(str(path)), 10**6))
    assert ([text for _, text in found], rejected) == (TEXTS, [])


@pytest.mark.usefixtures("limit")
def test_a_column_that_is_not_read_may_have_any_pages(tmp_path):
    path = tmp_path / "in.parquet"
    large = ["x" * 200] * 500
    table = pa.table(
        {"text": ["a"] * 500, "id": list(range(500)), "text2": large, "deep": [{"x": each} for each in large]}
    )
    pq.write_table(table, path, use_dictionary=False, data_page_size=10**6)
    fragments = plan(list_inputs(str(path)), 10**6)
    for keep, good in [(("id",), 500), (("text2",), 0), (("deep",), 0), (None, 0)]:
        found, rejected = rows_in(fragments, replace(JOB, keep=keep))
        assert (len(found), sum(each.count for each in rejected)) == (good, 500 - good)


@pytest.mark.usefixtures("limit")
def test_page_headers_that_make_no_sense_are_damage(tmp_path):
    path = tmp_path / "in.parquet"
    pq.write_table(TABLE.select(["text", "id"]), path, use_dictionary=False, data_page_size=5000)
    start = pq.read_metadata(path).row_group(0).column(0).data_page_offset
    good = path.read_bytes()
    for junk in (
        b"\xff" * 2000,
        bytes(2000),
        b"\x15" * 2000,
        b"\x1c" * 2000,
        b"\x19" * 2000,
        *(os.urandom(2000) for _ in range(50)),
    ):
        path.write_bytes(good[:start] + junk + good[start + 2000 :])
        found, rejected = rows_in(plan(list_inputs(str(path)), 10**6))
        assert len(found) + sum(each.count for each in rejected) == 3000
        assert rejected
