"""All files of an output have one schema, which is that of the whole input, wherever it is cut."""

import json

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from backend_client._cli.main import main
from backend_client.testing import FakeFleet

ARGUMENTS = ["--in-process", "--rows-per-fragment", "1", "--max-rejected", "1"]


@pytest.fixture(autouse=True)
def fleet(monkeypatch):
    monkeypatch.delenv("NPU_CLIENT_CONFIG", raising=False)
    with FakeFleet(1) as fleet:
        for name, value in fleet.environment().items():
            monkeypatch.setenv(name, value)
        yield fleet


def whole(out):
    """All rows by their text, after three readers agreed on the columns."""
    paths = sorted(out.glob("part-*.parquet"))
    assert len(paths) > 1
    schemas = [pq.read_schema(path) for path in paths]
    assert all(schema.equals(schemas[0]) for schema in schemas)
    table = pa.concat_tables([pq.read_table(path) for path in paths])
    assert pyarrow.dataset.dataset(paths).to_table().equals(table)
    return {row["text"]: row for row in table.to_pylist()}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("command", ["embed-dataset", "generate-dataset"])
def test_fragments_in_which_no_line_begins_have_the_columns_of_the_input(tmp_path, command):
    rows = [{"id": number, "text": f"t{number}", "note": "n" * 20_000 if number == 2 else ""} for number in range(5)]
    write_lines(tmp_path / "in.jsonl", rows)
    column = "--text-column" if command == "embed-dataset" else "--prompt-column"
    out = tmp_path / "out"
    assert main([command, str(tmp_path / "in.jsonl"), str(out), column, "text", *ARGUMENTS]) == 0
    assert 0 in [pq.read_metadata(path).num_rows for path in out.glob("part-*")]
    assert {text: {name: row[name] for name in rows[0]} for text, row in whole(out).items()} == {
        row["text"]: row for row in rows
    }


def test_columns_that_are_missing_null_or_of_another_type_in_a_fragment_have_the_type_of_all_lines(tmp_path):
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


def test_files_of_several_forms_damaged_and_without_good_rows_have_one_schema(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    pq.write_table(pa.table({"text": ["a"], "id": pa.array([1], pa.int32())}), source / "a.parquet")
    pq.write_table(pa.table({"text": ["b"], "id": pa.array([2], pa.int64()), "x": [0.5]}), source / "b.parquet")
    pq.write_table(pa.table({"text": pa.array([None], pa.string())}), source / "c.parquet")
    (source / "d.parquet").write_bytes(b"no Parquet")
    (source / "e.csv").write_text("text,id\ne,five\n")
    (source / "f.csv").write_text("text,other\n")
    write_lines(source / "g.jsonl", [{"text": "g", "id": 7}])
    out = tmp_path / "out"
    assert main(["embed-dataset", str(source), str(out), *ARGUMENTS]) == 0
    found = whole(out)
    assert {text: (row["id"], row["x"], row["other"]) for text, row in found.items()} == {
        "a": ("1", None, None),
        "b": ("2", 0.5, None),
        "e": ("five", None, None),
        "g": ("7", None, None),
    }


def test_views_of_strings_bear_a_rejected_row(tmp_path):
    """pyarrow writes them, and has no way to pick rows of them."""
    views = pa.array(["a", None, "c"], pa.string_view())
    nested = pa.array([["x"], ["y"], None], pa.list_(pa.string_view()))
    inside = pa.array([{"s": "1"}, {"s": "2"}, {"s": None}], pa.struct([("s", pa.string_view())]))
    data = pa.array([b"1", b"2", b"3"], pa.binary_view())
    pq.write_table(pa.table({"text": views, "nested": nested, "inside": inside, "data": data}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["d"], "nested": [["z"]]}), tmp_path / "b.parquet")
    out = tmp_path / "out"
    assert main(["embed-dataset", str(tmp_path / "*.parquet"), str(out), "--in-process", "--max-rejected", "1"]) == 0
    found = whole(out)
    assert found.pop("d")["nested"] == ["z"]
    assert {text: (row["nested"], row["inside"], row["data"]) for text, row in found.items()} == {
        "a": (["x"], {"s": "1"}, b"1"),
        "c": (None, {"s": None}, b"3"),
    }


def test_a_column_that_no_type_can_hold_is_refused_before_any_work_unless_it_is_left_out(tmp_path, capsys):
    source = tmp_path / "in"
    source.mkdir()
    pq.write_table(pa.table({"text": ["a"], "tags": [["x"]]}), source / "a.parquet")
    pq.write_table(pa.table({"text": ["b"], "tags": [1]}), source / "b.parquet")
    out = tmp_path / "out"
    assert main(["embed-dataset", str(source), str(out), *ARGUMENTS]) == 1
    assert "the column tags is list<" in capsys.readouterr().err
    assert not (out / "job.json").exists()
    assert main(["embed-dataset", str(source), str(out), *ARGUMENTS, "--keep-columns", "text,absent"]) == 0
    assert {row["absent"] for row in whole(out).values()} == {None}


def test_a_job_that_an_earlier_version_began_is_refused(tmp_path, capsys):
    write_lines(tmp_path / "in.jsonl", [{"text": "a"}])
    command = ["embed-dataset", str(tmp_path / "in.jsonl"), str(tmp_path / "out"), *ARGUMENTS]
    assert main(command) == 0
    job = tmp_path / "out" / "job.json"
    values = json.loads(job.read_text())
    del values["schema"], values["json_types"]
    job.write_text(json.dumps(values | {"format": 1}))
    assert main(command) == 1
    assert "continue with the version that began it" in capsys.readouterr().err
