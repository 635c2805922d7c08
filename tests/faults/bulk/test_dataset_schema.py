"""All files of an output have one schema, which is that of the whole input, wherever it is cut."""

import json
import shutil
from decimal import Decimal

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from backend_client.cli.main import main
from tests.faults.bulk.data_sets import rejections_of

pytestmark = pytest.mark.usefixtures("fleet")


@pytest.fixture
def embed(tmp_path, capsys):
    """Runs `embed-dataset` to `out`, a fragment for each row; returns its rows by text, or why it failed."""

    def run(source, *more, status=0, command="embed-dataset"):
        out = tmp_path / "out"
        words = [command, str(source), str(out), "--rows-per-fragment", "1", "--max-rejected", "1", *more]
        assert main(words) == status
        return capsys.readouterr().err if status else whole(out)

    return run


def whole(out):
    """All rows by their text, after three readers agreed on the columns."""
    paths = sorted(out.glob("part-*.parquet"))
    schemas = [pq.read_schema(path) for path in paths]
    assert all(schema.equals(schemas[0]) for schema in schemas)
    table = pa.concat_tables([pq.read_table(path) for path in paths])
    rows = table.to_pylist()
    # As text, in which NaN equals NaN.
    assert repr(pyarrow.dataset.dataset(paths).to_table().to_pylist()) == repr(rows)
    return {row["text"]: row for row in rows}


def two_files(tmp_path, one, other):
    """A directory with two Parquet files of these columns."""
    source = tmp_path / "in"
    source.mkdir()
    pq.write_table(pa.table({"text": ["a"]} | one), source / "a.parquet")
    pq.write_table(pa.table({"text": ["b"]} | other), source / "b.parquet")
    return source


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("command", "column"), [("embed-dataset", "--text-column"), ("generate-dataset", "--prompt-column")]
)
def test_fragments_without_a_good_row_have_the_columns_of_the_input(tmp_path, embed, command, column):
    rows = [{"id": number, "text": f"t{number}", "note": ""} for number in range(5)]
    source = write_lines(tmp_path / "in.jsonl", [*rows, {"text": None, "id": 9}])
    found = embed(source, column, "text", command=command)
    assert {text: {name: row[name] for name in rows[0]} for text, row in found.items()} == {
        row["text"]: row for row in rows
    }
    counts = [pq.read_metadata(path).num_rows for path in (tmp_path / "out").glob("part-*")]
    assert sorted(counts) == [0] + [1] * len(rows)


def test_columns_of_fragments_have_the_types_of_all_lines(tmp_path, embed):
    padding = "p" * 2000
    rows = [
        {"text": "a", "number": 1, "mixed": 1, "id": 2**60, "p": padding},
        {"text": "b", "number": 2.5, "mixed": "x", "id": None, "p": padding},
        {"text": "c", "late": True, "id": 0.5, "mixed": None, "p": padding},
        {"text": "d", "number": None, "mixed": [1], "p": padding},
    ]
    found = embed(write_lines(tmp_path / "in.jsonl", rows))
    assert {text: (row["number"], row["mixed"], row["late"], row["id"]) for text, row in found.items()} == {
        "a": (1.0, "1", None, str(2**60)),
        "b": (2.5, '"x"', None, None),
        "c": (None, None, True, "0.5"),
        "d": (None, "[1]", None, None),
    }


def test_values_of_rejected_rows_change_no_type_of_the_rows_that_are_kept(tmp_path, embed):
    good = [{"text": 'she said "x"', "n": 1}, {"text": "b", "n": 2}]
    bad = [{"text": 5, "n": "x"}, {"text": None, "n": []}, {"text": ["c"], "only": 1}]
    found = embed(write_lines(tmp_path / "in.jsonl", [{**row, "p": "p" * 2000} for row in good + bad]))
    assert {text: row["n"] for text, row in found.items()} == {row["text"]: row["n"] for row in good}
    assert {row["only"] for row in found.values()} == {None}
    reasons = rejections_of(tmp_path / "out").values()
    assert sorted(reasons) == ["not text, but int", "not text, but list", "null"]


def test_files_of_several_forms_damaged_and_without_good_rows_have_one_schema(tmp_path, embed):
    source = two_files(tmp_path, {"id": pa.array([1], pa.int32())}, {"id": pa.array([2], pa.int64()), "x": [0.5]})
    pq.write_table(pa.table({"text": pa.array([None], pa.string())}), source / "c.parquet")
    (source / "d.parquet").write_bytes(b"no Parquet")
    write_lines(source / "e.jsonl", [{"text": "e", "note": "five"}])
    write_lines(source / "f.jsonl", [{"text": None, "other": "o"}])
    write_lines(source / "g.jsonl", [{"text": "g", "id": 7}])
    assert {text: (row["id"], row["x"], row["note"], row["other"]) for text, row in embed(source).items()} == {
        "a": (1, None, None, None),
        "b": (2, 0.5, None, None),
        "e": (None, None, "five", None),
        "g": (7, None, None, None),
    }


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        (pa.array([["x"]]), pa.array([1]), ("list<", "int64")),
        (pa.array(["1"]), pa.array([1]), ("string", "int64")),
        (pa.array([Decimal("0.10")]), pa.array([0.5]), ("decimal128(2, 2)", "double")),
        (pa.array([0]).cast(pa.timestamp("s")), pa.array([0]).cast(pa.timestamp("s", "UTC")), ("timestamp[", "tz=UTC")),
        # Numbers become the wider type, unless that would round one of them.
        (pa.array([2**53 + 1]), pa.array([0.5]), ("double", "leave it out with --keep-columns")),
        (pa.array([2**64 - 1], pa.uint64()), pa.array([-1]), ("int64", "leave it out with --keep-columns")),
    ],
)
def test_a_column_of_two_types_ends_the_job_with_its_name_unless_it_is_left_out(tmp_path, embed, one, other, names):
    source = two_files(tmp_path, {"tags": one}, {"tags": other})
    message = embed(source, status=1)
    assert "the column tags is " in message
    assert all(name in message for name in names)
    shutil.rmtree(tmp_path / "out")
    assert set(embed(source, "--keep-columns", "text")) == {"a", "b"}


def test_json_text_of_mixed_values_has_no_type_in_common_with_other_columns(tmp_path, embed):
    source = tmp_path / "in"
    source.mkdir()
    write_lines(source / "a.jsonl", [{"text": "a", "x": "1"}, {"text": "b", "x": 1}])
    pq.write_table(pa.table({"text": ["c"], "x": ["1"]}), source / "b.parquet")
    assert "the column x is JSON text" in embed(source, status=1)
    assert not (tmp_path / "out" / "_job.json").exists()


def test_numbers_of_several_types_are_exact(tmp_path, embed):
    source = two_files(tmp_path, {"n": [2**53], "u": pa.array([2**32], pa.uint64())}, {"n": [0.5], "u": [-1]})
    write_lines(source / "c.jsonl", [{"text": "c", "n": 3}])
    assert {text: (row["n"], row["u"]) for text, row in embed(source).items()} == {
        "a": (2.0**53, 2**32),
        "b": (0.5, -1),
        "c": (3.0, None),
    }


def test_a_job_of_another_format_is_refused(tmp_path, embed):
    source = write_lines(tmp_path / "in.jsonl", [{"text": "a"}])
    embed(source)
    job = tmp_path / "out" / "_job.json"
    values = json.loads(job.read_text())
    del values["schema"], values["json_types"]
    job.write_text(json.dumps(values | {"format": 0}))
    assert "continue with the version that began it" in embed(source, status=1)


@pytest.mark.parametrize(
    ("row", "more", "status", "message"),
    [
        ({}, ["--keep-columns", "text,noet"], 1, "no file of the input has a column 'noet'"),
        ({}, ["--text-column", "txt"], 1, "no file of the input has a column 'txt'"),
        ({}, ["--id-column", "key"], 1, "no file of the input has a column 'key'; it has: text"),
        ({"space": 1}, [], 1, "columns that the output adds: space"),
        ({}, ["--keep-columns", "text,text"], 2, "each kept column must be named once, got text,text"),
    ],
)
def test_wrong_columns_are_refused_by_name_before_any_work(tmp_path, embed, row, more, status, message):
    source = write_lines(tmp_path / "in.jsonl", [{"text": "a"} | row])
    assert message in embed(source, *more, status=status)
    assert not (tmp_path / "out" / "_job.json").exists()


def test_columns_that_a_parquet_file_has_twice_are_refused_unless_they_are_left_out(tmp_path, embed):
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array([1]), pa.array([2])], names=["text", "n", "n"])
    pq.write_table(twice, tmp_path / "in.parquet")
    assert "more than one column 'n'" in embed(tmp_path / "in.parquet", status=1)
    embed(tmp_path / "in.parquet", "--keep-columns", "text")


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path, embed):
    lines = ['{"text": "a", "n": 1}', '{"text": "c", "n": NaN}', '{"text": "d", "n": -Infinity}']
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    found = embed(tmp_path / "in.jsonl")
    assert {text: str(row["n"]) for text, row in found.items()} == {"a": "1.0", "c": "nan", "d": "-inf"}


def test_dictionaries_in_lists_pass_through_several_row_groups(tmp_path, embed):
    words = pa.array(["a", "b", "c", "d"] * 10).dictionary_encode()
    lists = pa.ListArray.from_arrays(pa.array(range(0, 41, 2), pa.int32()), words)
    texts = [None if row == 7 else str(row) for row in range(20)]
    pq.write_table(pa.table({"text": texts, "l": lists}), tmp_path / "a.parquet", row_group_size=5)
    pq.write_table(pa.table({"text": ["b"], "l": pa.nulls(1)}), tmp_path / "b.parquet")
    expected = {text: value for text, value in zip(texts, lists.to_pylist(), strict=True) if text} | {"b": None}
    found = embed(tmp_path / "*.parquet", "--rows-per-fragment", "20")
    assert {text: row["l"] for text, row in found.items()} == expected
