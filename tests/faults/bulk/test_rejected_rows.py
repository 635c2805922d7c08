"""Bad rows are set aside exactly, whatever they do to the nodes; all others are served."""

import asyncio
import gzip
import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web

from backend_client import ClientOptions, NPUClient
from backend_client.bulk import BulkRequest, ExitCode, ray_executor, run_job
from backend_client.bulk.ray_executor import RayExecutor
from backend_client.errors import ConfigurationError
from backend_client.settings import ClientSettings
from tests.faults.bulk.data_sets import rejections_of, rows_of
from tests.faults.scripted_node import ScriptedNode, error_response, vectors_for

TEXTS = [f"text {number}" for number in range(300)]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": TEXTS, "number": range(len(TEXTS))}), path)
    return path


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
async def node():
    async with ScriptedNode().running() as running:
        yield running


@pytest.fixture
def run(out):
    """Runs a job over these nodes; `client` are settings of theirs, `more` those of the job."""

    async def job(source, *nodes, executor=None, client=None, **more):
        values = {"kind": "embed", "column": "text", "rows_per_fragment": 100, "max_rejected": 0.5} | more
        request = BulkRequest(source=str(source), out=str(out), **values)
        urls = tuple(node.url for node in nodes)
        made = None if executor is None else executor(request, urls)
        return await run_job(request, ClientSettings.load(nodes=urls, **(client or {})), executor=made)

    return job


def take_back(out):
    """Remove the end of the job and one of its files, as if it had not come so far."""
    (out / "_SUCCESS").unlink()
    next(out.glob("part-*")).unlink()


def refusing(bad, code, status=400):
    async def respond(request):
        body = await request.json()
        return error_response(status, code) if bad & set(body["texts"]) else None

    return respond


class MeasuringNode(ScriptedNode):
    """Each request for vectors has seven tokens and costs half a joule, and a time that its rows do not divide."""

    def take(self, path, headers, content):
        step, answer = super().take(path, headers, content)
        costs = {"X-NPU-Node-Joules": "0.5", "X-NPU-Busy-Delta-Us": "1009", "X-NPU-Node-Token-Count": "7"}
        return step, replace(answer, headers=answer.headers | costs)


async def test_the_joules_and_the_npu_time_of_a_request_are_divided_among_its_rows(source, out, run):
    async with MeasuringNode().running() as node:
        await run(source, node)
        # The first request, of one text, asked for the space.
        batches = [len(body["texts"]) for body in node.bodies[1:]]
    assert max(batches) == ClientOptions().batch.texts
    rows = rows_of(out).values()
    assert sorted({row["joules"] for row in rows}) == sorted({0.5 / size for size in batches})
    success = json.loads((out / "_SUCCESS").read_text())
    assert success["joules"] == pytest.approx(sum(row["joules"] for row in rows)) == 0.5 * len(batches)
    assert success["npu_busy_us"] == sum(row["npu_busy_us"] for row in rows) == 1009 * len(batches)
    assert success["tokens"] == 7 * len(batches)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("context_length_exceeded", "longer than the model accepts"),
        ("request_breaks_engine", "takes down the engine that runs it"),
    ],
)
async def test_a_refused_batch_is_bisected_down_to_its_bad_rows(source, out, node, run, code, reason):
    bad = {"text 0", "text 63", "text 64", "text 150", "text 151", "text 299"}
    node.respond = refusing(bad, code)
    report = await run(source, node)
    assert (report.exit_code, report.rows, report.rejected) == (ExitCode.COMPLETE, 294, 6)
    assert set(rows_of(out)) == set(TEXTS) - bad
    assert rejections_of(out) == {("in.parquet", int(text.split()[1])): reason for text in bad}
    for text, row in rows_of(out).items():
        assert row["embeddings"] == vectors_for([text])[0].tolist()
        assert row["source_row"] == row["number"]


class InThreads:
    """Stands in for Ray on two machines: tasks run in threads."""

    exceptions = SimpleNamespace(RayTaskError=ChildProcessError, RayError=ChildProcessError)

    def __init__(self, process):
        self._process = process

    def cluster_resources(self):
        return {"intel_npu": 2}

    def remote(self, function):
        task = SimpleNamespace(remote=lambda *given: asyncio.to_thread(function, *given))
        return SimpleNamespace(options=lambda **_: task)

    def shutdown(self):
        self._process.loop.close()


async def test_on_ray_too_a_row_that_is_never_answered_holds_up_no_other(three_files, node, run, monkeypatch):
    process = ray_executor.ProcessWorker()
    monkeypatch.setattr(ray_executor, "PROCESS", process)
    monkeypatch.setitem(sys.modules, "ray", InThreads(process))
    monkeypatch.setenv("NPU_CLIENT_RETRY__ATTEMPTS", "1")
    made = mock.Mock(wraps=NPUClient.from_settings)
    monkeypatch.setattr(NPUClient, "from_settings", made)
    node.respond = answering_bad_rows(lambda _: error_response(500, "internal_error"))
    report = await run(three_files, node, executor=RayExecutor, attempts=1)
    assert (report.exit_code, report.rows, len(report.quarantined)) == (ExitCode.QUARANTINED, 100, 2)
    assert made.call_count == 2, "one client before the job is known, and one for all its fragments"


@pytest.fixture
def three_files(tmp_path):
    """Of 100 rows each."""
    source = tmp_path / "in"
    source.mkdir()
    for start in range(0, len(TEXTS), 100):
        lines = [json.dumps({"text": text}) for text in TEXTS[start : start + 100]]
        (source / f"{start:03}.jsonl").write_text("\n".join(lines))
    return source


def answering_bad_rows(answer):
    """Requests with a row of the first two files."""

    async def respond(request):
        return answer(request) if {"text 10", "text 150"} & set((await request.json())["texts"]) else None

    return respond


def html(status):
    return web.Response(status=status, text="<html>No.</html>", content_type="text/html")


@pytest.mark.parametrize(
    "answer",
    [lambda _: error_response(500, "internal_error"), lambda _: html(403), lambda request: request.transport.abort()],
    ids=["500", "a proxy's 403", "dropped"],
)
async def test_fragments_with_a_row_that_is_never_answered_hold_up_no_other_on_any_run(three_files, node, run, answer):
    """Two of them, which take both places of the window."""
    node.respond = answering_bad_rows(answer)
    for _ in range(2):
        report = await run(three_files, node, attempts=1, client={"retry": {"attempts": 1}})
        assert (report.exit_code, report.rows, report.rejected) == (ExitCode.QUARANTINED, 100, 0)
        assert len(report.quarantined) == 2
        assert all("one of the rows" in reason for reason in report.quarantined.values())
    node.respond = None
    report = await run(three_files, node)
    assert (report.exit_code, report.rows) == (ExitCode.COMPLETE, 300)


async def test_a_job_stops_when_more_rows_are_rejected_than_it_allows_and_goes_on_when_it_may(source, out, node, run):
    node.respond = refusing({"text 7", "text 8"}, "context_length_exceeded")
    report = await run(source, node, max_rejected=0.001, window=1)
    assert (report.exit_code, report.success) == (ExitCode.TOO_MANY_REJECTED, False)
    report = await run(source, node, max_rejected=0.01)
    assert (report.exit_code, report.rows, report.rejected) == (ExitCode.COMPLETE, 298, 2)
    take_back(out)
    report = await run(source, node, max_rejected=0.01)
    assert (report.exit_code, report.rejected) == (ExitCode.COMPLETE, 2), "2 of all 300 rows, not of the 100 left"
    report = await run(source, node, max_rejected=0.001)
    assert report.exit_code is ExitCode.TOO_MANY_REJECTED, "a complete job is judged too"


async def test_two_attempts_that_reject_different_rows_leave_one_consistent_account(source, out, node, run):
    """The first attempt rejects a row and dies before its data; the second serves that row."""
    node.respond = refusing({"text 5"}, "context_length_exceeded")
    await run(source, node, rows_per_fragment=300)
    take_back(out)
    node.respond = None
    report = await run(source, node, rows_per_fragment=300)
    assert (report.rows, report.rejected) == (300, 0)
    assert rejections_of(out) == {}


async def test_a_node_in_another_space_is_excluded_and_named(source, out, node, run):
    async def slowly(_request):
        await asyncio.sleep(0.3)  # so later than the other node's first answer

    async with ScriptedNode("space-b").running() as stranger:
        await run(source, node)
        take_back(out)
        with pytest.raises(ConfigurationError, match="vector space"):
            await run(source, stranger)
        assert len(list(out.glob("part-*"))) == 2
        stranger.health_respond = slowly
        report = await run(source, stranger, node)
    assert report.excluded == (stranger.url,)
    assert {row["space"] for row in rows_of(out).values()} == {"space-a"}
    for text, row in rows_of(out).items():
        assert row["embeddings"] == vectors_for([text])[0].tolist()


async def test_a_new_job_is_in_the_space_of_the_first_answer_and_names_the_nodes_of_others(source, out, node, run):
    async with ScriptedNode("space-b").running() as other:
        report = await run(source, node, other)
    (space,) = {row["space"] for row in rows_of(out).values()}
    assert report.excluded == ((other if space == "space-a" else node).url,)
    assert (report.exit_code, report.rows) == (ExitCode.COMPLETE, len(TEXTS))


async def test_a_node_that_answers_shorter_vectors_than_it_reports_decides_nothing(source, out, node, run):
    async with ScriptedNode().running() as wrong:
        wrong.answers = 2
        report = await run(source, wrong, node)
    assert (report.exit_code, json.loads((out / "_job.json").read_text())["dimensions"]) == (ExitCode.COMPLETE, 8)
    assert {text: row["embeddings"] for text, row in rows_of(out).items()} == {
        text: vectors_for([text])[0].tolist() for text in TEXTS
    }
    assert {row["node"] for row in rows_of(out).values()} == {node.url}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"column": "number"}, "column"),
        ({"rows_per_fragment": 99}, "rows_per_fragment"),
        ({"options": {"truncate": True}}, "options"),
        ({"model": "other"}, "model"),
        ({"require_device": "NPU"}, "require_device"),
    ],
)
async def test_a_different_job_is_refused_with_the_difference(source, node, run, change, field):
    await run(source, node)
    with pytest.raises(ConfigurationError, match=f"holds another job:\n  {field}: "):
        await run(source, node, **change)


async def test_a_job_whose_input_has_another_file_is_refused_with_its_name(three_files, node, run):
    await run(three_files, node)
    (three_files / "late.jsonl").write_text('{"text": "late"}')
    with pytest.raises(ConfigurationError, match=r"files: \S+/late.jsonl is new, gone or changed"):
        await run(three_files, node)


@pytest.mark.parametrize("form", [".parquet", ".jsonl.gz", ".jsonl.zst"])
async def test_a_torn_file_does_not_keep_good_files_from_being_done(source, tmp_path, out, node, run, form):
    """It may hold no row at all: that says nothing of how many of the others are bad."""
    folder = tmp_path / "in"
    folder.mkdir()
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)
    whole = {
        ".parquet": source.read_bytes(),
        ".jsonl.gz": gzip.compress(lines),
        ".jsonl.zst": pa.compress(lines, "zstd", asbytes=True),
    }[form]
    (folder / f"a{form}").write_bytes(whole[: len(whole) // 2])
    (folder / "b.jsonl").write_bytes(lines)
    (folder / "empty.jsonl").write_bytes(b"")
    report = await run(folder, node, max_rejected=0.001, window=1)
    assert {request.headers["X-Priority"] for request in node.requests} == {"batch"}
    accepted = await run(folder, node, max_rejected=1.0)
    assert report.exit_code is ExitCode.TOO_MANY_REJECTED
    assert "1 files are damaged or end early" in report.message
    assert (report.success, report.done, report.rejected) == (True, 5, 1)
    assert accepted.exit_code is ExitCode.COMPLETE
    ((file, _),) = rejections_of(out)
    assert file == f"a{form}"
    rows = [row for path in out.glob("part-*") for row in pq.read_table(path).to_pylist()]
    assert {row["text"] for row in rows if row["source_file"].endswith("b.jsonl")} == set(TEXTS)
    assert json.loads((out / "_SUCCESS").read_text())["incomplete"] == 1
