"""No request of a caller counts against a node: odd ones, valid or not, through the gateway to a real node.

The gateway hands on what the node itself replies, and its client has no failure of the node or of a model afterwards,
though a single one would eject it."""

import io
import itertools
import json
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from multidict import CIMultiDict

from backend_client import ClientOptions, InferenceClient, NPUClient
from backend_client.gateway.app import make_app
from backend_client.gateway.settings import GatewaySettings
from backend_client.http.routes import ROUTES
from backend_client.options import BreakerOptions
from tests.support.cross_encoders import write_minilm
from tests.support.nodes import start_node
from tests.support.whisper import MODEL as WHISPER
from worker_node.tasks import transcribe

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

EMBEDDER, WRITER, RANKER = "all-minilm-l6-v2", "smollm2-135m-instruct", "ranker"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
RECORDING = Path(transcribe.__file__).with_name("canary.ogg").read_bytes()
ON_CPU = {"X-NPU-Require-Device": "CPU"}
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def node(store, speech_store, quick_models, tmp_path_factory):
    root = tmp_path_factory.mktemp("odd")
    write_minilm(root / RANKER, store.get(EMBEDDER).path)
    config = root / "node.toml"
    paths = {EMBEDDER: None, WRITER: None, RANKER: root / RANKER, WHISPER: speech_store.get(WHISPER).path}
    tables = [f'[[models]]\nname = "{name}"\n' + (f'path = "{path}"\n' if path else "") for name, path in paths.items()]
    config.write_text("".join(tables))
    with start_node("--config", str(config), **quick_models) as running:
        yield running


@pytest.fixture
async def fleet(node):
    async with gateway_to(node) as found:
        yield found


@asynccontextmanager
async def gateway_to(node):
    """A gateway, and what its client knows of the node."""
    at_once = BreakerOptions(connection_failures=1, server_failures=1)
    npu = NPUClient([node.url], options=ClientOptions(breaker=at_once))
    server = TestServer(make_app(GatewaySettings.load(), InferenceClient(npu)), host="127.0.0.1")
    async with server, aiohttp.ClientSession(auto_decompress=False) as session:
        await npu.health()
        yield session, str(server.make_url("")), next(iter(npu.fleet.runtime.pool.nodes.values()))


# Of each route what all its requests have, and what makes them odd.
CASES = {
    ("/v1/embeddings",): (
        {"model": EMBEDDER},
        {"input": []},
        {"input": ""},
        {"input": [""]},
        {"input": [[]]},
        {"input": [101, 7592, 102]},
        {"input": [[101, 102], [101, 7592, 102]]},
        {"input": ["a", 1]},
        {"input": ["a", "b"], "texts": ["a"], "prompt": "c"},
        {"input": "a", "encoding_format": "base64"},
        {"input": "a", "encoding_format": "int8"},
        {"input": "a", "dimensions": 384},
        {"input": "a", "dimensions": 385},
        {"input": "a", "dimensions": 0},
        {"input": "a", "dimensions": "8"},
        {"input": "a " * 9000},
        {"input": ["a"] * 3000},
        {"input": "\ud800"},
        {},
    ),
    ("/embeddings",): (
        {},
        {"texts": ["a"]},
        {"texts": []},
        {"texts": "a"},
        {"texts": [""]},
        {"texts": ["a", "b"], "input": "a"},
        {"texts": ["a"], "dimensions": 8},
        {"texts": [], "dimensions": 8},
        {"texts": {"a": 1}},
    ),
    ("/api/embed",): (
        {"model": f" ALL-{EMBEDDER[4:]}:latest"},
        {"input": []},
        {"input": ""},
        {"input": ["a", "b"], "texts": ["a"]},
        {"input": "a", "dimensions": 0},
        {"input": "a", "dimensions": 8},
        {"input": [], "dimensions": 8},
        {"input": "a", "keep_alive": "nonsense"},
        {"input": "a", "model": " ALL-MiniLM "},
    ),
    ("/api/embeddings",): (
        {"model": EMBEDDER},
        {"prompt": ""},
        {"prompt": "a", "dimensions": 8, "input": ["a", "b"]},
    ),
    ("/rerank", "/v2/rerank"): (
        {"model": RANKER, "query": "q"},
        {"documents": ["a", "b"], "top_n": 1},
        {"documents": ["a", "b"], "top_n": 9},
        {"documents": ["a", "b"], "top_n": 0},
        {"documents": ["a", "b"], "top_n": "1"},
        {"documents": ["a", ""], "return_documents": True},
        {"documents": [{"text": "a", "more": 1}]},
        {"documents": []},
        {"texts": ["a", "b"], "top_n": 1},
        {"texts": ["a"], "raw_scores": True, "return_text": True},
        {"texts": ["a"], "documents": ["a", "b"]},
        {"texts": []},
        {},
    ),
    ("/v1/chat/completions",): (
        {"model": WRITER, "messages": HI, "max_tokens": 2},
        {"n": 2},
        {"n": 2, "best_of": 3},
        {"n": 0},
        {"n": "2"},
        {"n": [1]},
        {"n": True},
        {"n": None},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": "Hi"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]},
        {"stop": [""]},
        {"logprobs": True, "top_logprobs": 1},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}},
        {"response_format": {"type": "xml"}},
        {"tools": [WEATHER], "tool_choice": "required"},
        {"tools": []},
        {"stream": "yes"},
        {"stream": 1},
        {"stream": [1]},
        {"stream": {"a": 1}},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"include_usage": False}, "n": 2},
        {"stream": True, "stream_options": [1]},
        {"stream": True, "n": "2"},
        {"stream": True, "logprobs": True},
        {"stream": True, "tools": [WEATHER], "tool_choice": "required"},
    ),
    ("/v1/completions",): (
        {"model": WRITER, "max_tokens": 2},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": ["a", "b"], "messages": HI},
        {"prompt": ["a", "b"], "n": 2},
        {"prompt": [1, 2, 3]},
        {"prompt": [[1], [2]], "stream": True},
        {"prompt": "a", "n": 2, "best_of": 3},
        {"prompt": "a", "echo": True},
        {"prompt": "a", "logprobs": 0},
        {"prompt": "a", "stream": True, "messages": HI, "n": 2},
        {},
    ),
    ("/v1/responses",): (
        {"model": WRITER, "max_output_tokens": 2},
        {"input": ""},
        {"input": []},
        {"input": "Hi", "n": 3},
        {"input": "Hi", "stream": True},
        {"input": "Hi", "store": True, "background": True},
        {"input": "Hi", "previous_response_id": "../../dashboard/state"},
        {"input": [{"type": "item_reference", "id": "x"}]},
    ),
    ("/v1/messages",): (
        {"model": WRITER, "max_tokens": 2, "messages": HI},
        {},
        {"stream": True},
        {"max_tokens": 0},
        {"messages": []},
        {"model": "none"},
    ),
    ("/v1/messages/count_tokens",): ({"model": WRITER}, {"messages": HI}, {"messages": []}),
    ("/api/chat", "/api/generate"): (
        {"model": WRITER, "options": {"num_predict": 2}},
        {},
        {"stream": False},
        {"prompt": "Hi", "messages": HI},
        {"prompt": "Hi", "messages": HI, "stream": None},
        {"prompt": "", "messages": [], "images": [], "stream": False},
        {"prompt": "Hi", "messages": HI, "images": ["aGk="]},
        {"prompt": "Hi", "messages": HI, "format": "json", "stream": False},
        {"prompt": 1, "messages": "Hi"},
        {"model": "none", "messages": HI},
    ),
    ("/inference",): (
        {"max_new_tokens": 2},
        {"prompt": ""},
        {"prompt": "a", "raw": True},
        {"prompt": "a", "stream": True},
        {"prompt": ["a"]},
    ),
    ("/tokenize",): (
        {"model": WRITER},
        {"prompt": ""},
        {"prompt": "a", "content": "b"},
        {"prompt": "a", "with_pieces": True, "return_token_strs": True},
        {"messages": HI},
        {},
    ),
    ("/detokenize",): ({"model": WRITER}, {"tokens": []}, {"tokens": [10**9]}),
}
FORMS = [
    (),
    (("response_format", " srt "),),
    (("response_format", "vtt"), ("stream", "true")),
    (("response_format", "verbose_json"), ("timestamp_granularities[]", "word")),
    (("response_format", "text"), ("response_format", "")),
    (("response_format", "text"), ("response_format", "json")),
    (("response_format", "xml"),),
    (("stream", "on"),),
    (("stream", "maybe"),),
    (("stream", "true"), ("stream", "false")),
    (("language", "xx"),),
    (("local_only", "true"), ("unknown", "1")),
]


def assert_untouched(node, what=None):
    """Nothing counts against the node, or against a model there."""
    assert (node.availability.closed, node.availability.reason) == (True, None), what
    assert not [name for name, model in node.of_models.items() if model.reason or model.pauses], what


async def assert_handed_on(node, fleet, path, **sent):
    """Through the gateway comes the node's own reply, and nothing counts against the node."""
    session, gateway, known = fleet
    replies = []
    for url in (node.url, gateway):
        async with session.post(f"{url}{path}", **{name: make() for name, make in sent.items()}) as reply:
            replies.append((reply.status, _form(reply.content_type, await reply.read())))
    assert replies[0] == replies[1], (path, {name: make() for name, make in sent.items()})
    assert_untouched(known, path)


def _form(content_type, body):
    """What a reply has, without what differs from one to the next."""
    if content_type != "application/json":
        return content_type
    found = json.loads(body)
    return sorted(found) if isinstance(found, dict) else len(found)


# More than 5 s: some hundred requests, each to the node and through the gateway. With a required device the client
# also checks which one the reply names.
@pytest.mark.parametrize(
    "headers", [pytest.param({}, marks=pytest.mark.long), ON_CPU], ids=["any device", "CPU required"]
)
async def test_no_odd_request_counts_against_a_node(node, fleet, headers):
    for paths, (common, *odd) in CASES.items():
        for path, fields in itertools.product(paths, odd):
            body = json.dumps(common | fields)
            await assert_handed_on(node, fleet, path, data=lambda body=body: body, headers=lambda: headers)


# More than 5 s: each form is a transcription.
async def test_no_odd_form_counts_against_a_node(fleet):
    session, gateway, known = fleet
    asked = [("transcriptions", fields, RECORDING) for fields in FORMS]
    asked += [("translations", fields, RECORDING) for fields in [FORMS[1], (("stream", "true"),)]]
    asked += [("transcriptions", (), b""), ("transcriptions", (), b"no audio")]
    for route, fields, file in asked:
        form = aiohttp.FormData(default_to_multipart=True)
        for name, value in (("model", WHISPER), *fields):
            form.add_field(name, value)
        form.add_field("file", file, filename="a.ogg")
        async with session.post(f"{gateway}/v1/audio/{route}", data=form, headers=ON_CPU) as reply:
            assert reply.status in {200, 400}, (route, fields, await reply.text())
            await reply.read()
        assert_untouched(known, (route, fields))


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"model": 1}', b'{"input": NaN}', b"[" * 99_999])
async def test_no_body_that_is_not_json_counts_against_a_node(node, fleet, body):
    session, gateway, known = fleet
    for path in ROUTES:
        async with session.post(f"{gateway}{path}", data=body) as reply:
            assert 400 <= reply.status < 500
    assert_untouched(known)


async def test_a_body_that_is_too_large_for_the_node_is_refused_by_it(node, fleet):
    long = json.dumps({"model": EMBEDDER, "input": "a" * 9_000_000}).encode()
    await assert_handed_on(node, fleet, "/v1/embeddings", data=lambda: io.BytesIO(long))


@pytest.mark.parametrize(
    "headers",
    [
        {"X-NPU-Local-Only": "maybe"},
        {"X-NPU-Local-Only": ""},
        CIMultiDict([("X-NPU-Local-Only", "false"), ("X-NPU-Local-Only", "true")]),
        CIMultiDict([("X-NPU-Require-Device", "CPU"), ("X-NPU-Require-Device", "NPU")]),
        {"X-NPU-Require-Device": "TPU"},
        {"traceparent": "\u00e9"},
        {"X-NPU-Other": "\u00e9"},
    ],
)
async def test_a_header_that_is_unknown_or_given_twice_is_refused(fleet, headers):
    session, gateway, known = fleet
    for path in ("/v1/embeddings", "/api/embed"):
        async with session.post(f"{gateway}{path}", json={"model": EMBEDDER, "input": "a"}, headers=headers) as reply:
            assert reply.status == 400
    assert_untouched(known)
    assert not known.outstanding.total()


async def test_a_model_in_the_store_of_a_node_is_listed_and_loaded_on_demand(quick_models):
    models = json.dumps([{"name": EMBEDDER}])
    with start_node(NPU_NODE_MODELS=models, **quick_models) as node:
        async with gateway_to(node) as (session, gateway, known):
            for path, field in (("/v1/models", "data"), ("/api/tags", "models")):
                async with session.get(f"{node.url}{path}") as own, session.get(f"{gateway}{path}") as reply:
                    assert (await reply.json())[field] == (await own.json())[field]
            chat = {"model": WRITER, "messages": HI, "max_tokens": 1}
            async with session.get(f"{gateway}/v1/models/{WRITER}") as reply:
                assert (await reply.json())["loaded"] is False
            async with session.post(f"{gateway}/v1/chat/completions", json=chat) as reply:
                assert (reply.status, (await reply.json())["model"]) == (200, WRITER)
            async with session.post(f"{gateway}/v1/chat/completions", json=chat | {"model": "../none"}) as reply:
                assert (reply.status, (await reply.json())["error"]["code"]) == (404, "model_not_found")
            assert_untouched(known)
