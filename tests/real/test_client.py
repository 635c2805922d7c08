"""The client on a real node: calls, batches, streams, data sets, and the node as the cloud of a client.

Exact times are shown in virtual time (tests/unit/backend_client), every form of a broken reply on sockets
(tests/faults/client); here it is shown that the same happens with real models.
"""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend_client import CloudClient, CloudSettings, InferenceClient, NPUClient, StreamInterrupted
from backend_client.bulk import BulkRequest, ExitCode, run_job
from backend_client.errors import DeadlineExceeded
from backend_client.settings import ClientSettings
from tests.faults.proxy import Fault, FaultProxy

pytestmark = pytest.mark.real
TEXTS = [f"Text number {index} is about {'rivers' if index % 3 else 'mountains'}." for index in range(400)]


async def test_tokens_are_counted_as_the_answer_counts_them(node):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Zürich, 東京?"}]
    async with NPUClient([node.url]) as client:
        counted = await client.count_tokens(messages)
        assert counted == (await client.chat(messages, max_tokens=1)).usage.prompt_tokens
        assert await client.count_tokens("Hello Hello") == 2


@pytest.fixture
async def proxies(node):
    async with (
        FaultProxy(node.url).running() as one,
        FaultProxy(node.url).running() as two,
        FaultProxy(node.url).running() as three,
    ):
        yield [one, two, three]


@pytest.fixture
async def client(proxies):
    async with NPUClient([proxy.url for proxy in proxies]) as client:
        await client.health()
        yield client


@pytest.mark.parametrize("fault", [Fault(silent=True), Fault(latency=60), Fault(bandwidth=100)], ids=str)
async def test_the_deadline_ends_every_wait(client, proxies, fault):
    for proxy in proxies:
        proxy.fault = fault
    with pytest.raises(DeadlineExceeded):
        await client.embed("text", timeout=0.3)
    with pytest.raises((DeadlineExceeded, StreamInterrupted)):
        [_ async for _ in client.stream("prompt", timeout=0.3)]
    assert all(node.in_flight == 0 for node in client.status())


@pytest.fixture
async def expected(client):
    """The vectors by single calls of a few texts, by index. They also give the client a few retries to spend."""
    return {index: await client.embed(TEXTS[index]) for index in range(0, 400, 19)}


async def test_a_way_that_breaks_in_the_middle_costs_no_vector(client, proxies, expected):
    def progress(_done, _total):
        proxies[0].fault = Fault(cut_after=700)

    outcomes = set()
    # Which nodes get the last batches is chance: they are sent again until the broken way was taken.
    while outcomes <= {"ok"}:
        found = await client.embed_many_result(TEXTS, progress=progress)
        assert found.vectors.shape == (400, 384)
        for index, vector in expected.items():
            # A batch is padded as a single text is not; that moves the last bits.
            assert float(np.dot(found.vectors[index], vector)) > 0.999, index
        assert sum(found.served.values()) == 400
        outcomes |= {attempt.outcome for attempt in found.attempts}


EMBEDDER, WRITER = "all-minilm-l6-v2", "smollm2-135m-instruct"
PROMPT = "What is the capital of France?"
MOST = 24


@pytest.fixture
async def local(node):
    """What the node answers when asked as a node: a vector and an answer."""
    async with NPUClient([node.url]) as client:
        return await client.embed_result("a text"), await client.generate(PROMPT, max_new_tokens=MOST)


@pytest.fixture
def client_with(node, local):
    """Makes a client whose nodes are dead and whose cloud, at one millionth a token, is the node."""

    def make(**cloud):
        settings = CloudSettings(
            base_url=node.url + "/v1",
            api_key="unused",
            chat_model=WRITER,
            embedding_models={local[0].space: EMBEDDER},
            prices={WRITER: {"input": 1, "output": 1}, EMBEDDER: {"input": 1}},
            **cloud,
        )
        dead = NPUClient(["http://127.0.0.1:1"], spaces={EMBEDDER: local[0].space})
        return InferenceClient(dead, CloudClient(settings))

    return make


async def test_answers_are_those_of_the_node_and_the_ledger_holds_what_it_counted(client_with, local):
    expected, answer = local
    async with client_with() as client:
        result = await client.embed_result("a text")
        assert (result.source, result.space) == ("cloud", expected.space)
        assert float(np.dot(result.vector, expected.vector)) > 0.9999
        assert client.ledger.cloud.prompt_tokens == expected.usage.prompt_tokens
        whole = await client.generate(PROMPT, max_new_tokens=MOST)
        stream = client.stream(PROMPT, max_new_tokens=MOST)
        text = "".join([piece async for piece in stream])
        assert whole.text == text == answer.text
        assert whole.usage == stream.result.usage == answer.usage
        tally = client.ledger.cloud
        tokens = expected.usage.prompt_tokens + 2 * total(answer.usage)
        assert tally.prompt_tokens + tally.completion_tokens == tokens
        assert tally.cost * 1_000_000 == tokens


def total(usage):
    return usage.prompt_tokens + usage.completion_tokens


SENTENCES = [f"Sentence number {number} is about topic {number % 7}." for number in range(150)]


async def test_vectors_are_those_of_single_calls_and_a_text_too_long_is_set_aside(node, tmp_path):
    pq.write_table(pa.table({"text": [*SENTENCES[:100], "word " * 5000, *SENTENCES[100:]]}), tmp_path / "in.parquet")
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
        expected = await client.embed_many(SENTENCES)
        health = await client.health()
    found = np.float32([rows[text]["embeddings"] for text in SENTENCES])
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
