"""Rows that nobody answered are neither rejected nor written: the same command answers them later."""

import contextlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend_client.bulk import BulkRequest, ExitCode, run_job
from backend_client.errors import NPUUnavailableError
from backend_client.settings import ClientSettings
from tests.faults.bulk.data_sets import rejections_of
from tests.faults.scripted_node import WRITER, ScriptedCloud, ScriptedNode, error_response

PROMPTS = [f"prompt {number}" for number in range(40)]
IMPATIENT = 0.2
# The scripted cloud reports five output tokens for each answer, which is also all that each may cost.
AFFORDED = 24
CLOUD = {
    "api_key": "sk-test",
    "chat_model": "cloud-chat",
    "chat_models": {WRITER: "cloud-chat"},
    "prices": {"cloud-chat": {"input": 0, "output": 1_000_000}},
}


def request_for(tmp_path, **more):
    source = tmp_path / "in.parquet"
    if not source.exists():
        pq.write_table(pa.table({"prompt": PROMPTS}), source)
    options = {"max_tokens": 5}
    values = {"kind": "generate", "column": "prompt", "max_rejected": 1.0, "options": options, "patience": IMPATIENT}
    return BulkRequest(source=str(source), out=str(tmp_path / "out"), **(values | more))


def settings_for(node, cloud=None, **limits):
    """Of clients that ask once: retries would only make these tests slower."""
    fallback = None if cloud is None else {**CLOUD, "base_url": cloud.url, **limits}
    return ClientSettings.load(nodes=[node.url], cloud=fallback, retry={"attempts": 1})


def prompts_of(out):
    return sorted(row["prompt"] for path in out.glob("part-*") for row in pq.read_table(path).to_pylist())


async def away(_):
    return error_response(503, "engine_unavailable")


def away_from_the_first_row():
    """The probe at the start of a job is answered, nothing from its first row on."""
    gone = False

    async def respond(request):
        nonlocal gone
        gone = gone or (await request.json())["prompt"] in PROMPTS
        return await away(request) if gone else None

    return respond


async def test_no_row_goes_to_the_cloud_unless_that_is_allowed(tmp_path):
    async with ScriptedNode().running() as node, ScriptedCloud().running() as cloud:
        node.respond = away_from_the_first_row()
        with pytest.raises(NPUUnavailableError) as failed:
            await run_job(request_for(tmp_path, model=WRITER), settings_for(node, cloud))
        assert cloud.requests == []
        assert "local_only" not in str(failed.value), "nobody has set it"


async def test_rows_that_the_spend_cap_refuses_are_answered_by_a_rerun(tmp_path):
    request = request_for(tmp_path, allow_cloud=True, rows_per_fragment=8, concurrency=4)
    async with ScriptedNode().running() as node, ScriptedCloud().running() as cloud:
        settings = settings_for(node, cloud, spend_cap=5 * AFFORDED)

        node.respond = away_from_the_first_row()
        with pytest.raises(NPUUnavailableError, match="spend cap"):
            await run_job(request, settings)
        paid = [body["messages"][0]["content"] for body in cloud.bodies]
        assert len(paid) == AFFORDED
        assert set(paid) <= set(PROMPTS), "only rows are billed"
        assert rejections_of(tmp_path / "out") == {}
        node.respond = None
        report = await run_job(request, settings)
    assert (report.exit_code, report.rejected) == (ExitCode.COMPLETE, 0)
    assert prompts_of(tmp_path / "out") == sorted(PROMPTS)


async def test_a_row_that_the_cloud_rejects_is_answered_by_a_node_later(tmp_path):
    """What the cloud refuses, a content filter for example, says nothing of the nodes."""
    request = request_for(tmp_path, allow_cloud=True, model=WRITER)
    async with ScriptedNode().running() as node, ScriptedCloud().running() as cloud:
        settings = settings_for(node, cloud)

        async def filtered(request):
            body = await request.json()
            return error_response(400, "content_filter") if "7" in body["messages"][0]["content"] else None

        node.respond, cloud.respond = away, filtered
        # Or the fragment is quarantined, where another row was answered just before.
        with contextlib.suppress(NPUUnavailableError):
            assert (await run_job(request, settings)).exit_code is ExitCode.QUARANTINED
        assert rejections_of(tmp_path / "out") == {}
        node.respond = None
        report = await run_job(request, settings)
    assert (report.rows, report.rejected) == (len(PROMPTS), 0)


async def test_a_job_waits_for_nodes_that_are_not_there_at_its_start(tmp_path):
    request = request_for(tmp_path, patience=600.0)
    async with ScriptedNode().running() as node:
        asked = 0

        async def respond(request):
            nonlocal asked
            asked += 1
            return await away(request) if asked <= 2 else None

        node.respond = respond
        report = await run_job(request, settings_for(node))
    assert (report.rows, report.rejected) == (len(PROMPTS), 0)


async def test_the_first_request_of_a_job_never_goes_to_the_cloud(tmp_path):
    """Its answer decides the model that _job.json pins: one of the cloud's is unknown to the nodes."""
    async with ScriptedNode().running() as node, ScriptedCloud().running() as cloud:
        settings = settings_for(node, cloud)
        node.respond = away
        with pytest.raises(NPUUnavailableError):
            await run_job(request_for(tmp_path, allow_cloud=True), settings)
        assert cloud.requests == []
        node.respond = None
        report = await run_job(request_for(tmp_path, allow_cloud=True), settings)
    assert report.rows == len(PROMPTS)
    assert json.loads((tmp_path / "out" / "_job.json").read_text())["model"] == WRITER
