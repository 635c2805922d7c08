"""Data sets over nodes that contradict themselves or each other: no wrong vector, no wrong length, every row traced."""

import json
from contextlib import ExitStack

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend_client.cli.main import main
from tests.faults.bulk.data_sets import rows_of
from tests.faults.scripted_node import EMBEDDER, WRITER, ScriptedNode, vectors_for
from tests.faults.served import served_in_thread

TEXTS = [f"row {number}" for number in range(200)]


@pytest.fixture
def data_set(tmp_path, monkeypatch):
    """Runs a command of data sets over nodes; returns its status and the rows of the output."""
    monkeypatch.delenv("NPU_CLIENT_CONFIG", raising=False)
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "in.parquet")
    out = tmp_path / "out"

    def run(command, *nodes):
        with ExitStack() as running:
            urls = [running.enter_context(served_in_thread(node)) for node in nodes]
            monkeypatch.setenv("NPU_CLIENT_NODES", ",".join(urls))
            column = "--text-column" if command == "embed-dataset" else "--prompt-column"
            arguments = ["--in-process", "--rows-per-fragment", "100", "--patience", "20", column, "text"]
            return main([command, str(tmp_path / "in.parquet"), str(out), *arguments]), out

    return run


def node(*, reported=8, answered=8):
    made = ScriptedNode()
    made.dimensions, made.answers = reported, answered
    return made


def test_a_node_that_answers_shorter_vectors_decides_nothing(data_set):
    nodes = [node(answered=2), node(), node()]
    status, out = data_set("embed-dataset", *nodes)
    assert (status, json.loads((out / "job.json").read_text())["dimensions"]) == (0, 8)
    rows = rows_of(out)
    assert {text: row["embeddings"] for text, row in rows.items()} == {
        text: vectors_for([text])[0].tolist() for text in TEXTS
    }
    assert {row["node"] for row in rows.values()} == {nodes[1].url, nodes[2].url}
    assert {row["model"] for row in rows.values()} == {EMBEDDER}


def test_the_answers_of_another_model_are_in_no_row(data_set):
    liar, honest = node(), node()
    liar.answers_as = "tiny-other"
    status, out = data_set("generate-dataset", liar, honest)
    rows = rows_of(out)
    assert (status, len(rows)) == (0, len(TEXTS))
    assert {(row["model"], row["node"]) for row in rows.values()} == {(WRITER, honest.url)}
