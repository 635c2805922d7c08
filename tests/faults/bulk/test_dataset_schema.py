"""All files of an output have one schema, which is that of the whole input, wherever it is cut."""

import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from backend_client.cli.main import main
from tests.faults.bulk.data_sets import rejections_of

pytestmark = pytest.mark.usefixtures("fleet")
ARGUMENTS = ["--rows-per-fragment", "1", "--max-rejected", "1"]


def whole(out):
    """All rows by their text, after three readers agreed on the columns."""
    paths = sorted(out.glob("part-*.parquet"))
    assert len(paths) > 1
    schemas = [pq.read_schema(path) for path in paths]
    assert all(schema.equals(schemas[0]) for schema in schemas)
    table = pa.concat_tables([pq.read_table(path) for path in paths])
    assert pyarrow.dataset.dataset(paths).to_table().equals(table)
    return {row["text"]: row for row in table.to_pylist()}


def two_files(tmp_path, one, other):
    """A directory with two Parquet files of these columns."""
    source = tmp_path / "in"
    source.mkdir()
    pq.write_table(pa.table({"text": ["a"]} | one), source / "a.parquet")
    pq.write_table(pa.table({"text": ["b"]} | other), source / "b.parquet")
    return source


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("command", ["embed-dataset", "generate-dataset"])
def test_fragments_without_a_good_row_have_the_columns_of_the_input(tmp_path, command):
    rows = [{"id": number, "text": f"t{number}", "note": ""} for number in range(5)]
    write_lines(tmp_path / "in.jsonl", [*rows, {"text": None, "id": 9}])
    column = "--text-column" if command == "embed-dataset" else "--prompt-column"
    out = tmp_path / "out"
    assert main([command, str(tmp_path / "in.jsonl"), str(out), column, "text", *ARGUMENTS]) == 0
    assert len([*out.glob("part-*.parquet")]) == len(rows) + 1
    assert 0 in [pq.read_metadata(path).num_rows for path in out.glob("part-*")]
    assert {text: {name: row[name] for name in rows[0]} for text, row in whole(out).items()} == {
        row["text"]: row for row in rows
    }


def test_columns_of_fragments_have_the_types_of_all_lines(tmp_path):
    padding = "p" * 2000
    rows = [
        {"text": "a", "number": 1, "mixed": 1, "id": 2**60, "p": padding},
        {"text": "b", "number": 2.5, "mixed": "x", "id": None, "p": padding},
        {"text": "c", "late": True, "id": 0.5, "mixed": None, "p": padding},
        {"text": "d", "number": None, "mixed": [1], "p": padding},
    ]
    write_lines(tmp_path / "in.jsonl", rows)
    out = tmp_path / "out"
    assert main(["embed-dataset", str(tmp_path / "in.jsonl"), str(out), *ARGUMENTS]) == 0
    found = whole(out)
    assert {text: (row["number"], row["mixed"], row["late"], row["id"]) for text, row in found.items()} == {
        "a": (1.0, "1", None, str(2**60)),
        "b": (2.5, '"x"', None, None),
        "c": (None, None, True, "0.5"),
        "d": (None, "[1]", None, None),
    }


def test_values_of_rejected_rows_change_no_type_of_the_rows_that_are_kept(tmp_path):
    good = [{"text": 'she said "x"', "n": 1}, {"text": "b", "n": 2}]
    bad = [{"text": 5, "n": "x"}, {"text": None, "n": []}, {"text": ["c"], "only": 1}]
    write_lines(tmp_path / "in.jsonl", [{**row, "p": "p" * 2000} for row in good + bad])
    out = tmp_path / "out"
    assert main(["embed-dataset", str(tmp_path / "in.jsonl"), str(out), *ARGUMENTS]) == 0
    found = whole(out)
    assert {text: row["n"] for text, row in found.items()} == {row["text"]: row["n"] for row in good}
    assert {row["only"] for row in found.values()} == {None}
    assert sorted(rejections_of(out).values()) == ["not text, but int", "not text, but list", "null"]


def test_files_of_several_forms_damaged_and_without_good_rows_have_one_schema(tmp_path):
    source = two_files(tmp_path, {"id": pa.array([1], pa.int32())}, {"id": pa.array([2], pa.int64()), "x": [0.5]})
    pq.write_table(pa.table({"text": pa.array([None], pa.string())}), source / "c.parquet")
    (source / "d.parquet").write_bytes(b"no Parquet")
    write_lines(source / "e.jsonl", [{"text": "e", "note": "five"}])
    write_lines(source / "f.jsonl", [{"text": None, "other": "o"}])
    write_lines(source / "g.jsonl", [{"text": "g", "id": 7}])
    out = tmp_path / "out"
    assert main(["embed-dataset", str(source), str(out), *ARGUMENTS]) == 0
    found = whole(out)
    assert {text: (row["id"], row["x"], row["note"], row["other"]) for text, row in found.items()} == {
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
    ],
)
def test_a_column_of_two_types_is_refused_unless_it_is_left_out(tmp_path, capsys, one, other, names):
    source = two_files(tmp_path, {"tags": one}, {"tags": other})
    out = tmp_path / "out"
    assert main(["embed-dataset", str(source), str(out), *ARGUMENTS]) == 1
    message = capsys.readouterr().err
    assert "the column tags is " in message
    assert all(name in message for name in names)
    assert not (out / "_job.json").exists()
    assert main(["embed-dataset", str(source), str(out), *ARGUMENTS, "--keep-columns", "text"]) == 0
    assert set(whole(out)) == {"a", "b"}


def test_a_job_of_another_format_is_refused(tmp_path, capsys):
    write_lines(tmp_path / "in.jsonl", [{"text": "a"}])
    command = ["embed-dataset", str(tmp_path / "in.jsonl"), str(tmp_path / "out"), *ARGUMENTS]
    assert main(command) == 0
    job = tmp_path / "out" / "_job.json"
    values = json.loads(job.read_text())
    del values["schema"], values["json_types"]
    job.write_text(json.dumps(values | {"format": 0}))
    assert main(command) == 1
    assert "continue with the version that began it" in capsys.readouterr().err


def test_numbers_of_several_types_are_exact(tmp_path):
    source = two_files(tmp_path, {"n": [2**53], "u": pa.array([2**32], pa.uint64())}, {"n": [0.5], "u": [-1]})
    write_lines(source / "c.jsonl", [{"text": "c", "n": 3}])
    out = tmp_path / "out"
    assert main(["embed-dataset", str(source), str(out), *ARGUMENTS]) == 0
    assert {text: (row["n"], row["u"]) for text, row in whole(out).items()} == {
        "a": (2.0**53, 2**32),
        "b": (0.5, -1),
        "c": (3.0, None),
    }


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([2**53 + 1]), pa.array([0.5])),
        (pa.array([2**64 - 1], pa.uint64()), pa.array([-1])),
    ],
)
def test_a_value_that_its_column_would_round_ends_the_job_with_its_name(tmp_path, capsys, one, other):
    source = two_files(tmp_path, {"n": one}, {"n": other})
    assert main(["embed-dataset", str(source), str(tmp_path / "out"), *ARGUMENTS]) == 1
    message = capsys.readouterr().err
    assert "the column n is " in message
    assert "leave it out with --keep-columns" in message


def test_json_text_of_mixed_values_has_no_type_in_common_with_other_columns(tmp_path, capsys):
    source = tmp_path / "in"
    source.mkdir()
    write_lines(source / "a.jsonl", [{"text": "a", "x": "1"}, {"text": "b", "x": 1}])
    pq.write_table(pa.table({"text": ["c"], "x": ["1"]}), source / "b.parquet")
    assert main(["embed-dataset", str(source), str(tmp_path / "out"), *ARGUMENTS]) == 1
    assert "the column x is JSON text" in capsys.readouterr().err


def test_a_column_is_kept_once(tmp_path, capsys):
    write_lines(tmp_path / "in.jsonl", [{"text": "a"}])
    kept = ["--keep-columns", "text,text"]
    assert main(["embed-dataset", str(tmp_path / "in.jsonl"), str(tmp_path / "out"), *ARGUMENTS, *kept]) == 2
    assert "each kept column must be named once, got text,text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "more", "message"),
    [
        ({}, ["--keep-columns", "text,noet"], "no file of the input has a column 'noet'"),
        ({}, ["--text-column", "txt"], "no file of the input has a column 'txt'"),
        ({}, ["--id-column", "key"], "no file of the input has a column 'key'; it has: text"),
        ({"space": 1}, [], "columns that the output adds: space"),
    ],
)
def test_wrong_columns_are_refused_by_name_before_any_work(tmp_path, capsys, row, more, message):
    write_lines(tmp_path / "in.jsonl", [{"text": "a"} | row])
    assert main(["embed-dataset", str(tmp_path / "in.jsonl"), str(tmp_path / "out"), *ARGUMENTS, *more]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "_job.json").exists()


def test_columns_that_a_parquet_file_has_twice_are_refused_unless_they_are_left_out(tmp_path, capsys):
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array([1]), pa.array([2])], names=["text", "n", "n"])
    pq.write_table(twice, tmp_path / "in.parquet")
    command = ["embed-dataset", str(tmp_path / "in.parquet"), str(tmp_path / "out"), *ARGUMENTS]
    assert main(command) == 1
    assert "more than one column 'n'" in capsys.readouterr().err
    assert main([*command, "--keep-columns", "text"]) == 0


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    lines = [
        '{"text": "a", "n": 1}',
        '{"text": "c", "n": NaN}',
        '{"text": "d", "n": -Infinity}',
    ]
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    out = tmp_path / "out"
    assert main(["embed-dataset", str(tmp_path / "in.jsonl"), str(out), "--max-rejected", "1"]) == 0
    (path,) = out.glob("part-*.parquet")
    rows = {row["text"]: str(row["n"]) for row in pq.read_table(path).to_pylist()}
    assert rows == {"a": "1.0", "c": "nan", "d": "-inf"}


def test_dictionaries_in_lists_pass_through_several_row_groups(tmp_path):
    words = pa.array(["a", "b", "c", "d"] * 10).dictionary_encode()
    lists = pa.ListArray.from_arrays(pa.array(range(0, 41, 2), pa.int32()), words)
    texts = [None if row == 7 else str(row) for row in range(20)]
    pq.write_table(pa.table({"text": texts, "l": lists}), tmp_path / "a.parquet", row_group_size=5)
    pq.write_table(pa.table({"text": ["b"], "l": pa.nulls(1)}), tmp_path / "b.parquet")
    out = tmp_path / "out"
    assert main(["embed-dataset", str(tmp_path / "*.parquet"), str(out), "--max-rejected", "1"]) == 0
    expected = {text: value for text, value in zip(texts, lists.to_pylist(), strict=True) if text} | {"b": None}
    assert {text: row["l"] for text, row in whole(out).items()} == expected
