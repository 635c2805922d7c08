"""Reranking over HTTP, on two devices: MiniLM's real body with a random head, for no reranker comes in a package.

Scores are compared with BERT in plain numpy. The node is one of its own, for its models: its start and the conversion
of the model are most of this file's seconds.
"""

import math
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.support.cross_encoders import HEADS, write_minilm, write_tiny
from tests.support.foreign import environment, output_of
from tests.support.nodes import start_node
from tests.support.numpy_bert import bert_logits

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

ENVIRONMENTS = Path(__file__).parents[1] / "integrations" / "environments"
QUERY = "how tall is the eiffel tower"
DOCUMENTS = ["The tower is 330 metres tall.", "Bananas are rich in potassium.", "東京は日本の首都です。", ""]


@pytest.fixture(scope="module")
def models(store, tmp_path_factory):
    """The directory with a model of one label and one of two, and their tensors."""
    root = tmp_path_factory.mktemp("rerankers")
    tensors = write_minilm(root / "one", store.get("all-minilm-l6-v2").path)
    return root, tensors, write_tiny(root / "two", labels=2)


@pytest.fixture(scope="module")
def reranking(models):
    """A node with the first model on the NPU (in two lengths) and the CPU, and the second on the CPU."""
    root = models[0]
    (root / "node.toml").write_text(
        f"""
        [[models]]
        name = "one"
        path = "{root / "one"}"
        placements = ["NPU", "CPU"]
        npu_buckets = [32, 128]
        infer_requests = 2

        [[models]]
        name = "two"
        path = "{root / "two"}"
        placements = ["CPU"]
        documents_limit = 20
        precision = "f32"
        """
    )
    environment = {"NPU_NODE_NPU_EMULATION": "1", "NPU_NODE_COMPILE_CACHE": str(root / "cache")}
    with start_node("--config", str(root / "node.toml"), **environment) as running:
        yield running


@pytest.fixture
async def rank(reranking, http):
    async def send(path="/v2/rerank", headers=None, **body):
        async with http.post(reranking.url + path, json=body, headers=headers or {}) as reply:
            return reply.status, reply.headers, await reply.json()

    return send


@pytest.fixture(scope="module")
def expected(store, models):
    tokenizer = Tokenizer.from_file(str(store.get("all-minilm-l6-v2").path / "tokenizer.json"))
    encodings = [tokenizer.encode(QUERY, document) for document in DOCUMENTS]
    return [float(bert_logits(models[1], HEADS, e.ids, e.type_ids)[0]) for e in encodings]


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize("device", ["NPU", "CPU"])
async def test_scores_are_the_models_on_every_device(rank, expected, device):
    status, headers, body = await rank(
        headers={"X-NPU-Require-Device": device}, model="one", query=QUERY, documents=DOCUMENTS
    )
    assert (status, headers["X-NPU-Node-Device"]) == (200, device)
    scores = {result["index"]: result["relevance_score"] for result in body["results"]}
    # bf16, where the CPU has it, moves logits by some thousandths.
    assert [scores[index] for index in range(4)] == pytest.approx([sigmoid(x) for x in expected], abs=0.01)
    assert [result["relevance_score"] for result in body["results"]] == sorted(scores.values(), reverse=True)
    assert body["usage"]["total_tokens"] == int(headers["X-NPU-Node-Token-Count"]) > 0
    assert body["meta"]["device"] == device
    if device == "NPU":
        assert int(headers["X-NPU-Busy-Delta-Us"]) > 0
        assert headers["X-NPU-Emulated"] == "true"


async def test_coheres_form_has_the_best_and_the_documents_that_were_asked_for(rank, expected):
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1], "id": 7}, *DOCUMENTS[2:]]
    _, _, body = await rank(model="one", query=QUERY, documents=documents, top_n=2, return_documents=True)
    best = [int(index) for index in np.argsort(expected)[::-1][:2]]
    assert [result["index"] for result in body["results"]] == best
    given = [{"text": DOCUMENTS[0]}, {"text": DOCUMENTS[1], "id": 7}, *({"text": text} for text in DOCUMENTS[2:])]
    assert [result["document"] for result in body["results"]] == [given[index] for index in best]
    assert (body["model"], body["meta"]["api_version"]) == ("one", {"version": "2"})
    assert "document" not in (await rank("/v1/rerank", query=QUERY, documents=DOCUMENTS))[2]["results"][0]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank", "/v3/rerank"])
async def test_teis_form_is_a_sorted_list_at_every_path(rank, expected, path):
    wanted = {"model": "one", "query": QUERY, "texts": DOCUMENTS, "raw_scores": True, "return_text": True}
    status, _, body = await rank(path, **wanted)
    assert status == 200
    assert {entry["index"]: entry["score"] for entry in body} == pytest.approx(dict(enumerate(expected)), abs=0.05)
    assert all(entry["text"] == DOCUMENTS[entry["index"]] for entry in body)
    assert [entry["score"] for entry in body] == sorted((entry["score"] for entry in body), reverse=True)


async def test_two_labels_give_the_softmax_of_the_second(rank, models):
    texts = ["b c", "the cat"]
    tokenizer = Tokenizer.from_file(str(models[0] / "two/tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    logits = [bert_logits(models[2], 4, e.ids, e.type_ids) for e in (tokenizer.encode("a", text) for text in texts)]
    expected = {index: np.exp(row[1]) / np.exp(row).sum() for index, row in enumerate(logits)}
    _, _, scored = await rank("/rerank", model="two", query="a", texts=texts)
    assert {entry["index"]: entry["score"] for entry in scored} == pytest.approx(expected, abs=1e-4)
    _, _, raw = await rank("/rerank", model="two", query="a", texts=texts, raw_scores=True)
    assert [entry["score"] for entry in scored] == pytest.approx([sigmoid(entry["score"]) for entry in raw])


async def test_long_documents_are_cut_or_refused_as_the_form_says(rank):
    long = "tower " * 600
    wanted = {"model": "one", "query": QUERY}
    status, headers, cut = await rank(**wanted, documents=[long, DOCUMENTS[0]])
    assert (status, headers["X-NPU-Node-Device"], headers["X-NPU-Node-Route-Reason"]) == (
        200,
        "CPU",
        "context_exceeds_npu",
    )
    assert cut["usage"]["total_tokens"] < 600
    for path, body in (("/rerank", {"texts": [long]}), ("/v2/rerank", {"documents": [long], "truncate": False})):
        status, _, refused = await rank(path, **wanted, **body)
        assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")
        assert refused["error"]["param"] == f"{next(iter(body))}[0]"
        assert refused["message"] == refused["error"]["message"]
    status, headers, _ = await rank(**wanted, documents=[long], max_tokens_per_doc=20)
    assert (status, headers["X-NPU-Node-Device"]) == (200, "NPU")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["b"], "texts": ["b"]}, "texts"),
        ({"query": "", "documents": ["b"]}, "query"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": [{"title": "b"}]}, "documents[0].text"),
        ({"query": "a", "documents": ["b", 5]}, "documents[1]"),
        ({"query": "a", "documents": ["b"] * 21, "model": "two"}, "documents"),
        ({"query": "a " * 600, "documents": ["b"]}, "query"),
        ({"query": "a", "documents": [{"text": "b"}], "rank_fields": ["title"]}, "rank_fields"),
    ],
)
async def test_wrong_requests_are_refused_by_the_field_at_fault(rank, body, param):
    status, _, reply = await rank(**body)
    assert (status, reply["error"]["param"]) == (400, param), reply


async def test_metrics_cover_reranking(rank, reranking, http):
    assert (await rank(model="one", query=QUERY, documents=DOCUMENTS))[0] == 200
    async with http.get(reranking.url + "/metrics") as reply:
        text = await reply.text()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("npu_node_rerank"))
    assert float(samples['npu_node_reranked_documents_total{device="NPU",model="one"}']) >= 4
    padded = float(samples['npu_node_rerank_device_tokens_total{device="NPU",model="one"}'])
    assert padded > float(samples['npu_node_rerank_computed_tokens_total{device="NPU",model="one"}']) > 0


def test_coheres_own_client(reranking):
    # More than 5 s: its environment is installed once for each machine, and importing it takes seconds.
    python = environment(ENVIRONMENTS / "cohere.txt")
    told = output_of(python, ENVIRONMENTS / "cohere_calls.py", NODE_URL=reranking.url)
    assert told.endswith("all as expected\n")
