"""Each row is in one fragment, wherever a file is cut and whatever is in it."""

import gzip
import json
import os
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_client.bulk import readers
from backend_client.bulk.inputs import InputChanged
from backend_client.bulk.readers import read
from tests.unit.backend_client.bulk.bulk_rows import rows_in, surveyed

LINES = st.lists(st.sampled_from([b"", b"  ", b'{"text": "a"}', b'"\xc3\xa4"', b"nope", b"\xff"]), max_size=30)


@settings(deadline=None)
@given(content=LINES, wanted=st.integers(1, 40), ended=st.booleans(), form=st.sampled_from(["jsonl", "txt"]))
def test_every_line_is_in_one_fragment_of_as_many_rows_as_are_wanted(tmp_path_factory, content, wanted, ended, form):
    text = b"\n".join(content) + (b"\n" if content and ended else b"")
    path = tmp_path_factory.mktemp("lines") / f"in.{form}"
    path.write_bytes(text)
    expected = [offset for offset, line in offsets(text) if line.strip() or (form == "txt" and offset < len(text))]
    _, fragments = surveyed(path, wanted)
    assert [fragment.rows for fragment in fragments[:-1]] == [wanted] * (len(fragments) - 1)
    assert fragments[-1].rows or len(fragments) == 1
    found, rejected = rows_in(path, wanted)
    assert sorted([offset for offset, _ in found] + [rejection.row for rejection in rejected]) == expected


def offsets(text):
    offset = 0
    for line in text.split(b"\n"):
        yield offset, line
        offset += len(line) + 1


def test_a_long_line_makes_no_fragments_without_rows(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "x" * 3_000_000}) + '\n{"text": "short"}\n')
    _, fragments = surveyed(tmp_path, 1)
    assert [fragment.rows for fragment in fragments] == [1, 1]


def compressed(data, suffix):
    if suffix == ".gz":
        return gzip.compress(data)
    if suffix == ".zst":
        return pa.compress(data, "zstd", asbytes=True)
    return data


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_compressed_lines_are_one_fragment_with_the_same_rows(tmp_path, suffix):
    content = "".join(f'{{"text": "row {row} ä"}}\n' for row in range(3000)).encode()
    (tmp_path / f"in.jsonl{suffix}").write_bytes(compressed(content, suffix))
    _, fragments = surveyed(tmp_path, 1000)
    assert [fragment.rows for fragment in fragments] == ([3000] if suffix else [1000] * 3)
    found, rejected = rows_in(tmp_path, 1000)
    assert [text for _, text in found] == [f"row {row} ä" for row in range(3000)]
    assert rejected == []


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_what_comes_before_the_end_of_a_truncated_stream_is_read(tmp_path, suffix):
    content = "".join(f'{{"text": "row {os.urandom(20).hex()}"}}\n' for row in range(20_000)).encode()
    data = compressed(content, suffix)
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(data[: len(data) * 2 // 3])
    found, rejected = rows_in(path, 10)
    assert 8_000 < len(found) < 14_000
    (last,) = rejected
    assert "ends early" in last.reason


def test_a_line_that_is_no_row_is_rejected_with_its_place(tmp_path):
    path = tmp_path / "in.jsonl"
    bad = [b"[1]", b"nope", b'"\\udcff"', b"\xff\xfe", b'{"id": 7, "other": "\\ud800", "text": "a"}']
    path.write_bytes(b"\n".join([b'{"text": "first", "id": 1}', *bad, b"", b'"plain text"']))
    found, rejected = rows_in(path, id_column="id")
    assert [text for _, text in found] == ["first", "plain text"]
    places = [offset for offset, line in offsets(path.read_bytes()) if line in bad]
    assert [rejection.row for rejection in rejected] == places
    assert [rejection.reason.split(",")[0] for rejection in rejected] == [
        "neither an object nor a string",
        "not JSON",
        "a lone surrogate",
        "invalid UTF-8",
        "a lone surrogate",
    ]
    assert rejected[-1].id == 7


def test_a_line_that_is_too_long_is_rejected_without_being_held(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONGEST_LINE", 1000)
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "' + "x" * 5000 + '"}\n{"text": "short"}\n')
    found, rejected = rows_in(path, 1000)
    assert [text for _, text in found] == ["short"]
    assert [rejection.row for rejection in rejected] == [0]


@pytest.mark.parametrize("what", ["rewritten", "removed"])
def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path, what):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n' * 3000)
    job, (fragment,) = surveyed(path, 10**6)
    chunks = read(fragment, job)
    next(chunks)
    if what == "rewritten":
        path.write_text('{"text": "b"}\n' * 3001)
    else:
        path.unlink()
    with pytest.raises(InputChanged):
        list(chunks)


def test_a_store_that_fails_is_no_damaged_file(tmp_path, monkeypatch):
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": ["a"] * 1000}), path)
    job, (fragment,) = surveyed(path)

    def fail(self, size=-1):
        self.failure = OSError("connection reset")
        raise self.failure

    monkeypatch.setattr("backend_client.bulk.inputs.InputSource.read", fail)
    with pytest.raises(OSError, match="connection reset"):
        list(read(fragment, job))


@pytest.mark.parametrize(("form", "group"), [("jsonl", None), ("parquet", None), ("parquet", 20)])
def test_rows_that_are_large_come_in_small_chunks_and_none_is_lost(tmp_path, form, group):
    """A line or a row may have megabytes: what is in memory is bounded by bytes, not by rows."""
    rows = [{"id": str(number), "text": "x" * (500_000 if 5 <= number < 65 else 3)} for number in range(80)]
    path = tmp_path / f"in.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path, group, use_dictionary=False)
    job, (fragment,) = surveyed(path, 10**6, id_column="id")
    chunks = list(read(fragment, job))
    assert [value for chunk in chunks for value in chunk.ids] == [row["id"] for row in rows]
    assert max(chunk.table.nbytes for chunk in chunks) < 14_000_000
    assert len(chunks) < 10


@settings(max_examples=30, deadline=None)
@given(groups=st.lists(st.integers(0, 50), max_size=4), wanted=st.integers(1, 60))
def test_a_parquet_file_is_read_whole_however_it_is_cut(tmp_path_factory, groups, wanted):
    path = tmp_path_factory.mktemp("parquet") / "in.parquet"
    texts = [f"row {row}" for row in range(sum(groups))]
    with pq.ParquetWriter(path, pa.schema({"text": pa.string()})) as writer:
        for number, rows in enumerate(groups):
            start = sum(groups[:number])
            writer.write_table(pa.table({"text": pa.array(texts[start : start + rows], pa.string())}))
    _, fragments = surveyed(path, wanted)
    assert all(part.rows == part.stop - part.start <= wanted for part in fragments)
    assert len({part.id for part in fragments}) == len(fragments)
    with mock.patch.object(readers, "CHUNK_ROWS", 7):
        assert rows_in(path, wanted) == ([*enumerate(texts)], [])


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())],
    ids=str,
)
def test_text_that_is_stored_as_bytes_is_read_as_text_where_it_is_utf_8(tmp_path, kind):
    path = tmp_path / "in.parquet"
    values = pa.array([None, b"good", "größer".encode(), b"\xff\xfe"], pa.binary())
    stored = pa.Array.from_buffers(kind, 4, values.buffers()) if kind == pa.string() else values.cast(kind)
    pq.write_table(pa.table({"text": stored}), path)
    found, _ = rows_in(path, 10)
    assert found == [(0, None), (1, "good"), (2, "größer"), (3, b"\xff\xfe")]


def test_a_damaged_row_group_rejects_the_rows_that_are_left(tmp_path):
    path = tmp_path / "in.parquet"
    texts = [os.urandom(30).hex() for _ in range(300)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=100, compression="zstd", use_dictionary=False)
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start + 10 : start + 2000] = os.urandom(1990)
    path.write_bytes(data)
    found, rejected = rows_in(path, 100)
    assert sum(rejection.count for rejection in rejected) + len(found) == 300
    assert {place for place, _ in found} >= {*range(100), *range(200, 300)}


def test_a_page_that_does_not_match_its_checksum_is_damaged(tmp_path):
    path = tmp_path / "in.parquet"
    table = pa.table({"text": [f"some words {row}" for row in range(50)], "id": list(range(50))})
    pq.write_table(table, path, write_page_checksum=True, compression="none", use_dictionary=False)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"words 25", b"w\xc3\xb6rd 25", 1))
    assert path.stat().st_size == len(data)
    found, rejected = rows_in(path, 100)
    assert found == []
    assert sum(rejection.count for rejection in rejected) == 50
