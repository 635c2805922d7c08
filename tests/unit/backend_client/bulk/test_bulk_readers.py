"""Fragments cover their file exactly: each row is in one of them, wherever it is cut and whatever is in it."""

import csv
import gzip
import io
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_client.bulk.fragments import BYTES_PER_ROW, Fragment, InputFile, cut_bytes, cut_parquet, of_shard
from backend_client.bulk.inputs import changed, check_apart, list_inputs
from backend_client.bulk.job import BulkJob
from backend_client.bulk.plan import dump, load, plan
from backend_client.bulk.readers import lines, parquet, read
from backend_client.bulk.readers.lines import split
from backend_client.bulk.readers.source import InputChanged
from backend_client.errors import ConfigurationError

JOB = BulkJob(kind="embed", source="", listing="", column="text", id_column="id", rows_per_fragment=10, model="m")
PARQUET = InputFile("file:///in.parquet", 1, "v", "parquet")


def rows_in(fragments, job=JOB):
    """(place, input) of all rows, and all rejections."""
    found, rejected = [], []
    for fragment in fragments:
        for chunk in read(fragment, job):
            found += zip(chunk.rows, chunk.inputs, strict=True)
            rejected += chunk.rejected
            assert chunk.table is None or chunk.table.num_rows == len(chunk.rows)
    return found, rejected


@given(st.lists(st.integers(0, 50)), st.integers(1, 40))
def test_parquet_fragments_cover_every_row_once_in_about_the_size_that_was_asked_for(groups, wanted):
    fragments = list(cut_parquet(PARQUET, groups, wanted))
    covered = [row for part in fragments for row in range(part.start, part.stop)]
    assert covered == list(range(sum(groups)))
    assert all(part.rows == part.stop - part.start <= wanted for part in fragments)
    assert len({part.id for part in fragments}) == len(fragments)


@given(st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")), max_size=30), st.data())
def test_lines_belong_to_the_range_that_they_begin_in(content, data):
    text = b"".join(line + b"\n" for line in content)
    if text and data.draw(st.booleans()):
        text = text[:-1]
    expected = [(offset, line) for offset, line in offsets(text) if line]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    block = data.draw(st.integers(1, 9))
    found = []
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        begin = max(0, start - 1)
        blocks = [text[at : at + block] for at in range(begin, len(text), block)]
        some = split(iter(blocks), begin, stop)
        if start:
            next(some, None)
        found += [(offset, line) for offset, line in some if line]
    assert found == expected


def offsets(text):
    offset = 0
    for line in text.split(b"\n"):
        yield offset, line
        offset += len(line) + 1


@settings(max_examples=20, deadline=None)
@given(wanted=st.integers(1, 60))
def test_a_parquet_file_is_read_whole_however_it_is_cut(tmp_path_factory, wanted):
    path = tmp_path_factory.mktemp("parquet") / "in.parquet"
    pq.write_table(pa.table({"text": [f"row {row}" for row in range(100)]}), path, row_group_size=37)
    found, rejected = rows_in(plan(list_inputs(str(path)), wanted))
    assert found == [(row, f"row {row}") for row in range(100)]
    assert rejected == []


@pytest.mark.parametrize("wanted", [1, 2, 1000])
def test_json_lines_are_read_whole_however_they_are_cut(tmp_path, wanted):
    path = tmp_path / "in.jsonl"
    texts = ["x" * (37 * number % 900) + "ä" for number in range(50)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    fragments = plan(list_inputs(str(path)), wanted)
    assert len(fragments) == max(1, round(path.stat().st_size / (wanted * BYTES_PER_ROW)))
    found, rejected = rows_in(fragments)
    assert [text for _, text in found] == texts
    assert rejected == []
    content = path.read_bytes()
    for offset, text in found:
        assert json.loads(content[offset : content.index(b"\n", offset)])["text"] == text


def compressed(data, suffix):
    if suffix == ".gz":
        return gzip.compress(data)
    if suffix == ".zst":
        return pa.compress(data, "zstd", asbytes=True)
    return data


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_compressed_lines_are_one_fragment_with_the_same_rows(tmp_path, suffix):
    content = "".join(f'{{"text": "row {row}"}}\n' for row in range(3000)).encode()
    (tmp_path / f"in.jsonl{suffix}").write_bytes(compressed(content, suffix))
    fragments = plan(list_inputs(str(tmp_path)), 10)
    assert suffix == "" or len(fragments) == 1
    found, rejected = rows_in(fragments)
    assert [text for _, text in found] == [f"row {row}" for row in range(3000)]
    assert rejected == []


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_what_comes_before_the_end_of_a_truncated_stream_is_read(tmp_path, suffix):
    content = "".join(f'{{"text": "row {os.urandom(20).hex()}"}}\n' for row in range(20_000)).encode()
    data = compressed(content, suffix)
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(data[: len(data) * 2 // 3])
    found, rejected = rows_in(plan(list_inputs(str(path)), 10))
    assert 8_000 < len(found) < 14_000
    (last,) = rejected
    assert "ends early" in last.reason


def test_a_line_that_is_no_row_is_rejected_with_its_place(tmp_path):
    path = tmp_path / "in.jsonl"
    bad = [b"[1]", b"nope", b'"\\udcff"', b"\xff\xfe", b'{"id": 7, "other": "\\ud800", "text": "a"}']
    path.write_bytes(b"\n".join([b'{"text": "first"}', *bad, b"", b'"plain text"']))
    found, rejected = rows_in(plan(list_inputs(str(path)), 1000))
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
    monkeypatch.setattr(lines, "LONGEST_LINE", 1000)
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "' + "x" * 5000 + '"}\n{"text": "short"}\n')
    found, rejected = rows_in(plan(list_inputs(str(path)), 1000))
    assert [text for _, text in found] == ["short"]
    assert [rejection.row for rejection in rejected] == [0]


def test_json_columns_have_one_type_in_a_fragment(tmp_path):
    path = tmp_path / "in.jsonl"
    rows = [{"text": "a", "n": 1, "mixed": 1, "deep": {"x": [1]}, "big": 2**70}]
    rows += [{"text": "b", "n": 1.5, "mixed": "1", "flag": True}] * 2000
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (fragment,) = plan(list_inputs(str(path)), 10**6)
    chunks = [chunk.table for chunk in read(fragment, JOB)]
    table = pa.concat_tables(chunks)
    types = {field.name: str(field.type) for field in table.schema}
    strings = dict.fromkeys(("text", "mixed", "deep", "big"), "string")
    assert types == strings | {"n": "double", "flag": "bool"}
    assert table.slice(0, 1).to_pylist()[0] == {
        "text": "a",
        "n": 1.0,
        "mixed": "1",
        "deep": '{"x": [1]}',
        "big": str(2**70),
        "flag": None,
    }


@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), min_size=1, max_size=20))
@settings(max_examples=15, deadline=None)
def test_csv_gives_back_every_cell(tmp_path_factory, cells):
    cells = [tuple(cell.replace("\r", "").replace("\0", "") for cell in row) for row in cells]
    file = io.StringIO()
    csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows([("id", "text"), *cells])
    path = tmp_path_factory.mktemp("csv") / "in.csv"
    path.write_bytes(file.getvalue().encode())
    found, rejected = rows_in(plan(list_inputs(str(path)), 1000))
    assert found == [(number, text) for number, (_, text) in enumerate(cells)]
    assert rejected == []


def test_csv_rows_with_other_cells_than_the_header_are_rejected(tmp_path):
    path = tmp_path / "in.csv"
    path.write_bytes(b'\xef\xbb\xbfid,text\n1,a\n2\n3,b,c\n4,\xff\n5,"d\ne"\n')
    found, rejected = rows_in(plan(list_inputs(str(path)), 1000))
    assert found == [(0, "a"), (4, "d\ne")]
    assert [(rejection.row, rejection.reason) for rejection in rejected] == [
        (1, "1 cells where the header has 2"),
        (2, "3 cells where the header has 2"),
        (3, "invalid UTF-8"),
    ]


def test_a_parquet_string_that_is_not_utf_8_comes_as_bytes(tmp_path):
    path = tmp_path / "in.parquet"
    raw = pa.array([b"good", b"\xff\xfe", None], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"text": column}), path)
    found, _ = rows_in(plan(list_inputs(str(path)), 10))
    assert found == [(0, "good"), (1, b"\xff\xfe"), (2, None)]


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


def test_a_file_that_changed_is_not_read(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n')
    fragments = plan(list_inputs(str(path)), 10)
    path.write_text('{"text": "b"}\n{"text": "c"}\n')
    with pytest.raises(InputChanged):
        rows_in(fragments)


@pytest.mark.parametrize("what", ["rewritten", "removed"])
def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path, what):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n' * 3000)
    (fragment,) = plan(list_inputs(str(path)), 10**6)
    chunks = read(fragment, JOB)
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
    fragments = plan(list_inputs(str(path)), 1000)

    def fail(self, size=-1):
        self.failure = OSError("connection reset")
        raise self.failure

    monkeypatch.setattr("backend_client.bulk.readers.source.InputSource.read", fail)
    with pytest.raises(OSError, match="connection reset"):
        rows_in(fragments)


def test_a_stored_plan_is_the_same_plan(tmp_path):
    pq.write_table(pa.table({"text": ["a"] * 100}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "b"}'))
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no")
    fragments = plan(list_inputs(str(tmp_path)), 30)
    assert load(dump(fragments)) == fragments
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


@pytest.mark.parametrize("name", ["in.txt", "in.parquet.gz"])
def test_a_file_of_no_known_form_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigurationError, match="no known form"):
        list_inputs(str(tmp_path / name))


def test_an_input_that_names_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no input file"):
        list_inputs(str(tmp_path / "*.parquet"))
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        list_inputs("nonsense://bucket/x")


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_rows_that_are_large_come_in_small_chunks_and_none_is_lost(tmp_path, form):
    """A line or a row may have megabytes: what is in memory is bounded by bytes, not by rows."""
    rows = [{"id": str(number), "text": "x" * (500_000 if 5 <= number < 65 else 3)} for number in range(80)]
    path = tmp_path / f"in.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "csv":
        path.write_text("id,text\n" + "".join(f"{row['id']},{row['text']}\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path, use_dictionary=False)
    (fragment,) = plan(list_inputs(str(path)), 10**6)
    chunks = list(read(fragment, JOB))
    assert [value for chunk in chunks for value in chunk.ids] == [row["id"] for row in rows]
    assert max(chunk.table.nbytes for chunk in chunks) < 14_000_000
    assert len(chunks) < 10


def test_a_row_group_of_few_bytes_that_unfolds_is_read_in_smaller_parts_from_there_on(tmp_path):
    text = "x" * 200_000
    pq.write_table(pa.table({"text": [text] * 1500, "id": list(range(1500))}), tmp_path / "in.parquet")
    (fragment,) = plan(list_inputs(str(tmp_path / "in.parquet")), 10**6)
    sizes, ids = [], []
    for chunk in read(fragment, JOB):
        sizes.append(chunk.table.nbytes)
        ids += chunk.ids
    assert ids == list(range(1500))
    assert max(sizes[1:]) < 10_000_000


def test_links_are_read_as_what_they_lead_to_and_nothing_is_there_twice(tmp_path):
    """The Hugging Face cache and Kubernetes' volumes hold files behind links."""
    source, elsewhere = tmp_path / "in", tmp_path / "elsewhere"
    (source / "..2026" / "deep").mkdir(parents=True)
    elsewhere.mkdir()
    for path in (source / "a.jsonl", source / "..2026" / "m.jsonl", elsewhere / "z.jsonl", tmp_path / "blob"):
        path.write_text('{"text": "x"}\n' * (1 + len(path.name)))
    links = {"b.jsonl": "../blob", "m.jsonl": "..2026/m.jsonl", "dir": "../elsewhere", "loop": ".", "up": ".."}
    for name, target in links.items():
        (source / name).symlink_to(target)
    found = list_inputs(str(source))
    names = ["a.jsonl", "b.jsonl", "dir/z.jsonl", "m.jsonl"]
    assert [file.url.removeprefix(f"file://{source}/") for file in found] == names
    assert [file.size for file in found] == [(source / name).stat().st_size for name in names]
    assert not any(changed(file) for file in found)
    assert len(list_inputs(f"{source}/*.jsonl")) == 3
    (source / "gone.jsonl").symlink_to("nowhere")
    for pattern in (source, f"{source}/*.jsonl"):
        with pytest.raises(ConfigurationError, match="is a link to a file that is not there"):
            list_inputs(str(pattern))


@pytest.mark.parametrize(
    ("pattern", "out", "apart"),
    [
        ("in", "out", True),
        ("in", "in", False),
        ("in", "in/out", False),
        ("in/", "in/out/", False),
        ("in", "in/_out", True),
        ("in", "in2", True),
        ("in", ".", True),
        ("in/*.jsonl", "in/out", True),
        ("in/*.parquet", "in", False),
        ("in/**/*.jsonl", "in/out", False),
    ],
)
def test_an_output_that_the_input_would_list_is_refused(tmp_path, monkeypatch, pattern, out, apart):
    monkeypatch.chdir(tmp_path)
    if apart:
        check_apart(pattern, out)
    else:
        with pytest.raises(ConfigurationError, match="choose an output outside of it"):
            check_apart(pattern, out)


@pytest.mark.parametrize("size", [2, 5, 100])
def test_dictionaries_in_lists_and_structs_are_read_over_row_groups(tmp_path, size):
    words = pa.array(["a", "b", "c", "d"] * 10).dictionary_encode()
    lists = pa.ListArray.from_arrays(pa.array(range(0, 41, 2), pa.int32()), words)
    inside = pa.StructArray.from_arrays([words.slice(0, 20)], ["x"])
    table = pa.table({"text": [str(row) for row in range(20)], "id": list(range(20)), "l": lists, "s": inside})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=5)
    (fragment,) = plan(list_inputs(str(tmp_path / "in.parquet")), 100)
    chunks = list(parquet.read(fragment, JOB, size))
    rows = [row for chunk in chunks for row in chunk.table.to_pylist()]
    assert rows == table.to_pylist()


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
