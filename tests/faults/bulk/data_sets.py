"""Inputs whose outputs are known without the code under test, and what an output holds."""

import json

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

from backend_client.testing import fake_vector

PARQUET_ROWS, JSON_ROWS = 700, 300
ROWS_PER_GROUP = 150


def make_input(directory):
    """Two files with 1,000 good rows and 3 bad ones; returns the texts of the good ones."""
    directory.mkdir()
    texts = [f"row {number} ä" for number in range(PARQUET_ROWS)]
    table = pa.table({"id": list(range(PARQUET_ROWS)), "text": texts})
    pq.write_table(table, directory / "a.parquet", row_group_size=ROWS_PER_GROUP)
    lines = [f"line {number} ö" for number in range(JSON_ROWS)]
    rows = [json.dumps({"id": number, "text": text}) for number, text in enumerate(lines)]
    rows[100:100] = ['{"id": -1, "text": "\\ud800"}', '{"id": -2, "text": null}', "not JSON"]
    (directory / "b.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return texts + lines


def rows_of(out):
    found = {}
    for path in out.glob("part-*.parquet"):
        for row in pq.read_table(path).to_pylist():
            assert row["text"] not in found, f"{row['text']} is there twice"
            found[row["text"]] = row
    return found


def rejections_of(out):
    entries = [
        json.loads(line) for path in (out / "_rejected").glob("*.jsonl") for line in path.read_text().splitlines()
    ]
    places = [(entry["file"].rsplit("/", 1)[-1], entry["row"]) for entry in entries]
    assert len(places) == len(set(places))
    return {place: entry["reason"] for place, entry in zip(places, entries, strict=True)}


def assert_whole(out, texts):
    """The output has every row once, with its own vector, and the bad rows among the rejected; nothing else is left."""
    found = rows_of(out)
    assert sorted(found) == sorted(texts)
    # Spark, Arrow and pandas take what is not hidden for data.
    assert pyarrow.dataset.dataset(out).count_rows() == len(texts)
    for text, row in found.items():
        assert row["embeddings"] == fake_vector(text).tolist(), text
        assert row["error"] == ""
        assert row["space"] == "fake-space"
    reasons = rejections_of(out)
    assert {file for file, _ in reasons} == {"b.jsonl"}
    assert sorted(reasons.values()) == ["a lone surrogate, which is not valid Unicode", "not JSON", "null"]
    success = json.loads((out / "_SUCCESS").read_text())
    assert (success["rows"], success["rejected"]) == (len(texts), 3)
    sizes = {path.name: path.stat().st_size for path in out.glob("part-*")}
    assert {name: file["size"] for name, file in success["files"].items()} == sizes
    # A small file whose writer was killed beside it may stay.
    assert not [*out.glob(".tmp-*")], "temporary data files are left"
