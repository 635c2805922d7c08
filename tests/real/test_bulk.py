"""Data sets on a real node: the vectors and answers are those of single calls, and say what ran them."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend_client import NPUClient
from backend_client.bulk import BulkRequest, ExitCode, run_job
from backend_client.settings import ClientSettings

pytestmark = pytest.mark.real

TEXTS = [f"Sentence number {number} is about topic {number % 7}." for number in range(150)]


async def test_vectors_are_those_of_single_calls_and_a_text_too_long_is_set_aside(node, tmp_path):
    pq.write_table(pa.table({"text": [*TEXTS[:100], "word " * 5000, *TEXTS[100:]]}), tmp_path / "in.parquet")
    request = BulkRequest(
        kind="embed",
        source=str(tmp_path / "in.parquet"),
        out=str(tmp_path / "out"),
        column="text",
        rows_per_fragment=60,
        max_rejected=0.05,
    )
    report = await run_job(request, ClientSettings.load(nodes=[node.url]))
    assert (report.exit_code, report.rows, report.rejected) == (ExitCode.COMPLETE, 150, 1)
    rows = {row["text"]: row for path in (tmp_path / "out").glob("part-*") for row in pq.read_table(path).to_pylist()}
    async with NPUClient([node.url]) as client:
        expected = await client.embed_many(TEXTS)
        health = await client.health()
    found = np.float32([rows[text]["embeddings"] for text in TEXTS])
    assert np.min(np.sum(found * expected, axis=1)) > 0.999
    spaces = {model.space for model in health[0].models if model.space is not None}
    assert {row["space"] for row in rows.values()} <= spaces
    assert all(row["device"] for row in rows.values())
    (rejected,) = (tmp_path / "out" / "_rejected").glob("*.jsonl")
    entry = json.loads(rejected.read_text())
    assert (entry["row"], entry["reason"]) == (100, "longer than the model accepts")


async def test_answers_follow_the_schema(node, tmp_path):
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    (tmp_path / "in.jsonl").write_text('{"prompt": "Capital of France?"}\n{"prompt": "Capital of Italy?"}\n')
    request = BulkRequest(
        kind="generate",
        source=str(tmp_path / "in.jsonl"),
        out=str(tmp_path / "out"),
        column="prompt",
        options={"max_tokens": 24, "response_schema": schema},
    )
    report = await run_job(request, ClientSettings.load(nodes=[node.url]))
    assert (report.exit_code, report.rows) == (ExitCode.COMPLETE, 2)
    (path,) = (tmp_path / "out").glob("part-*")
    for row in pq.read_table(path).to_pylist():
        assert json.loads(row["generated_text"])["city"] in {"Paris", "Rome"}
        assert (row["error"], row["finish_reason"]) == ("", "stop")
        assert row["num_input_tokens"] > 0
        assert row["num_generated_tokens"] > 0
