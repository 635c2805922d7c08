"""What the gateway hands on: of every route only replies that answer the request, of the model that was asked for.

Of two nodes the one that is asked first sends something else; the other one's reply is the caller's."""

import asyncio
import base64
import json
import math

import aiohttp
import numpy as np
import pytest
from aiohttp import web

import backend_client
from backend_client import ClientOptions, NPUClient
from backend_client.http.routes import ROUTES
from backend_client.options import RetryOptions, Timeouts
from backend_client.testing.node import EMBEDDER, LISTENER, RERANKER, WRITER, route_headers
from tests.faults.client.gateways import EVENTS, LINES, gateway, streaming

HI = [{"role": "user", "content": "Hi"}]
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
END = {"finish_reason": "stop", "index": 0}
# A request of each route, and a reply that answers it.
ROWS = {
    "/v1/chat/completions": (
        {"messages": HI},
        {"choices": [{**END, "message": {"role": "assistant", "content": "Hi"}}]},
    ),
    "/v1/completions": ({"prompt": "a"}, {"choices": [{**END, "text": "b"}]}),
    "/v1/responses": ({"input": "a"}, {"status": "completed", "output": [{"type": "message"}]}),
    "/v1/messages": (
        {"messages": HI, "max_tokens": 5},
        {"type": "message", "content": [{"type": "text", "text": "Hi"}], "stop_reason": "end_turn"},
    ),
    "/v1/messages/count_tokens": ({"messages": HI}, {"input_tokens": 3}),
    "/api/chat": ({"messages": HI, "stream": False}, {"message": {"content": "Hi"}, "done": True}),
    "/api/generate": ({"prompt": "a", "stream": False}, {"response": "b", "done": True}),
    "/inference": (
        {"prompt": "a"},
        {"text": "b", "model": WRITER, "device": "CPU", "finish_reason": "stop", "usage": USAGE},
    ),
    "/tokenize": ({"prompt": "a"}, {"count": 1}),
    "/detokenize": ({"tokens": [1]}, {"prompt": "a"}),
    "/v1/embeddings": ({"input": "a", "dimensions": 8}, {"data": [{"index": 0, "embedding": [1.0] * 8}]}),
    "/embeddings": ({"texts": ["a"]}, {"embeddings": [[1.0] * 8]}),
    "/api/embed": ({"input": "a"}, {"embeddings": [[1.0] * 8]}),
    "/api/embeddings": ({"prompt": "a"}, {"embedding": [1.0] * 8}),
    "/v1/rerank": ({"query": "q", "documents": ["a"]}, {"results": [{"index": 0, "relevance_score": 0.5}]}),
    "/v2/rerank": ({"query": "q", "documents": ["a"]}, {"results": [{"index": 0, "relevance_score": 0.5}]}),
    "/rerank": ({"query": "q", "texts": ["a"]}, [{"index": 0, "score": 0.5}]),
    "/v1/audio/transcriptions": ({"response_format": "json"}, {"text": "Hi"}),
    "/v1/audio/translations": ({"response_format": "json"}, {"text": "Hi"}),
}
# It ejects no node and gives up no retry, however many replies are wrong.
LENIENT = {
    "options": ClientOptions(breaker={"server_failures": 1000, "connection_failures": 1000}, retry={"initial": 100})
}
MODELS = {None: WRITER, "embedding": EMBEDDER, "rerank": RERANKER, "transcription": LISTENER}
JSON = "application/json"
WRONG = {
    "a page": ("text/html", b"<html>login</html>"),
    "text": ("text/plain", b"hello"),
    "bytes": ("application/octet-stream", b"\0\1"),
    "nothing": (JSON, b""),
    "null": (JSON, b"null"),
    "a list": (JSON, b"[]"),
    "an object": (JSON, b"{}"),
    "an error": (JSON, b'{"error": {"message": "no"}}'),
    "a stream of nothing": ("text/event-stream", b"data: [DONE]\n\n"),
    "lines of nothing": ("application/x-ndjson", b'{"done": true}\n{"done": true}\n'),
}


GOOD = [0.5] * 8


def encoded(vector):
    return base64.b64encode(np.float32(vector).tobytes()).decode()


def rows_of(*vectors):
    return [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]


def ranking(*rows):
    return {"results": [{"index": index, "relevance_score": score} for index, score in rows]}


# What only some routes can get wrong.
WRONG_VECTORS = {
    "one NaN": rows_of([0.5] * 7 + [math.nan]),
    "infinite": rows_of([math.inf] + [0.5] * 7),
    "beyond float32": rows_of([1e300] * 8),
    "zeros": rows_of([0.0] * 8),
    "strings": rows_of(["0.5"] * 8),
    "booleans": rows_of([True] * 8),
    "no vector": rows_of(None),
    "a short one": rows_of([0.5] * 4),
    "no base64": rows_of("%%%"),
    "cut base64": rows_of(encoded(GOOD)[:-6]),
    "NaN in base64": rows_of(encoded([math.nan] * 8)),
    "two for one text": rows_of(GOOD, GOOD),
    "another index": [{"index": 1, "embedding": GOOD}],
    "an index that is not a number": [{"index": "0", "embedding": GOOD}],
    "no list": None,
}
WRONG_RANKINGS = [
    ranking((1, 0.5)), ranking((0, math.nan)), ranking((0, math.inf)), ranking((0, "0.4")), ranking((0, True)),
    ranking((0, 0.5), (0, 0.4)), ranking((0, 0.5), (1, 0.4)), ranking(),
]  # fmt: skip
RANKINGS = {str(wrong): wrong for wrong in WRONG_RANKINGS}
EMBEDDINGS = {str(rows): {"embeddings": rows} for rows in ([], [["x"] * 8])}
WRONG_OF = {
    "/v1/embeddings": {name: {"data": rows} for name, rows in WRONG_VECTORS.items()},
    "/v1/rerank": RANKINGS,
    "/v2/rerank": RANKINGS,
    "/api/embed": EMBEDDINGS,
    "/embeddings": EMBEDDINGS,
}


@pytest.fixture
def nodes(pair):
    for node in pair:
        for kind, model in (("rerank", RERANKER), ("transcription", LISTENER)):
            node.offer(kind, model)
    return pair


def sent(path, body):
    body = {"model": MODELS[ROUTES[path].kind], **body}
    if not ROUTES[path].upload:
        return {"json": body}
    form = aiohttp.FormData(default_to_multipart=True)
    for name, value in body.items():
        form.add_field(name, value)
    form.add_field("file", b"RIFF", filename="a.wav")
    return {"data": form}


def first_then(nodes, path, *replies):
    """The first request gets the first reply, the others the last."""
    left = list(replies)

    async def respond(_):
        kind, body = left.pop(0) if len(left) > 1 else left[0]
        headers = {**route_headers(MODELS[ROUTES[path].kind]), "X-Space": "space-a", "Content-Type": kind}
        return web.Response(body=body, headers=headers)

    for node in nodes:
        node.respond = respond


def test_every_route_has_a_row():
    assert ROWS.keys() == ROUTES.keys()


@pytest.mark.parametrize("path", ROWS)
async def test_a_whole_reply_that_answers_another_request_is_another_nodes(nodes, path):
    body, answer = ROWS[path]
    good = JSON, json.dumps(answer).encode()
    wrong = dict(WRONG)
    if isinstance(answer, dict):
        wrong["another model"] = JSON, json.dumps({**answer, "model": "other"}).encode()
        for name in answer.keys() & {"choices", "data", "embeddings", "results"}:
            wrong[f"its {name} twice"] = JSON, json.dumps({**answer, name: answer[name] * 2}).encode()
        wrong |= {name: (JSON, json.dumps(bad).encode()) for name, bad in WRONG_OF.get(path, {}).items()}
    async with gateway(*nodes, client=LENIENT) as http:
        for name, bad in wrong.items():
            first_then(nodes, path, bad, good)
            async with http.post(path, **sent(path, body)) as reply:
                assert (reply.status, await reply.read()) == (200, good[1]), name
                assert reply.headers["X-NPU-Gateway-Attempts"] == "2", name


CHUNK = {"choices": [{"index": 0, "delta": {"content": "Hi"}, "text": "Hi", "finish_reason": None}]}
LAST = {"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}]}
DELTA, DONE = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hi"}}, {"type": "message_stop"}
RESPONSE = {"type": "response.completed", "response": {"status": "completed", "output": []}}
ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
FAILED = {"error": {"message": "the engine died", "code": "engine_unavailable"}}
# The events of a stream that answers, and such as no answer has, or as are not followed by a token.
STREAMS = {
    "/v1/chat/completions": (
        [CHUNK, LAST, None],
        [{**CHUNK, "model": "other"}, {"choices": 3}, [1], None, ROLE, FAILED],
    ),
    "/v1/completions": ([CHUNK, LAST, None], [{**CHUNK, "model": "other"}, {"choices": [{"text": 1}]}, None]),
    "/v1/responses": (
        [{"type": "response.output_text.delta", "delta": "Hi"}, RESPONSE],
        [{"type": "response.completed"}, {"type": "response.completed", "response": {"model": "other"}}, None],
    ),
    "/v1/messages": (
        [{"type": "message_start", "message": {"model": WRITER}}, DELTA, DONE],
        [{"type": "message_start", "message": {"model": "other"}}, {"type": "content_block_delta"}, {}, None],
    ),
    "/api/chat": (
        [{"message": {"content": "Hi"}, "done": False}, {"done": True}],
        [{"message": {"content": "Hi"}, "model": "other"}, {"message": {"content": 1}}, {"error": "it died"}, [1], "x"],
    ),
    "/api/generate": (
        [{"response": "Hi", "done": False}, {"response": "", "done": True}],
        [{"response": "Hi", "model": "other"}, {"response": 1}, {}],
    ),
}


def encoded(lines, *events):
    texts = ["[DONE]" if event is None else json.dumps(event) for event in events]
    return "".join(f"{text}\n" if lines else f"data: {text}\n\n" for text in texts).encode()


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_that_answers_another_request_is_another_nodes(nodes, path):
    events, wrong = STREAMS[path]
    lines = path.startswith("/api/")
    kind, other = (LINES, EVENTS) if lines else (EVENTS, LINES)
    good = kind, encoded(lines, *events)
    async with gateway(*nodes, client=LENIENT) as http:
        for bad in [(other, good[1]), *((kind, encoded(lines, event)) for event in wrong)]:
            first_then(nodes, path, bad, good)
            async with http.post(path, **sent(path, {**ROWS[path][0], "stream": True})) as reply:
                assert (reply.status, await reply.read()) == (200, good[1]), bad
                assert reply.headers["X-NPU-Gateway-Attempts"] == "2", bad


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
async def test_only_a_stream_that_has_comments_must_not_fall_silent(scripted, path):
    """Lines have none: a long prompt, or a call of a tool that is held back, is silence."""
    events, _ = STREAMS[path]
    lines = path.startswith("/api/")

    async def silence():
        await asyncio.sleep(0.6)

    parts = [silence, *(encoded(lines, event) for event in events)]
    scripted.respond = streaming(*parts[:2], silence, *parts[2:], kind=LINES if lines else EVENTS)
    client = {"options": ClientOptions(timeouts=Timeouts(idle=0.2), retry=RetryOptions(attempts=1))}
    async with gateway(scripted, client=client) as http:
        reply = await http.post(path, **sent(path, {**ROWS[path][0], "stream": True}))
        assert reply.status == (200 if lines else 503)
        if lines:
            assert await reply.read() == encoded(lines, *events)


async def test_what_a_node_says_of_other_things_than_its_reply_is_not_handed_on(scripted):
    own = {
        "Set-Cookie": "a=b",
        "Location": "http://evil.example",
        "Access-Control-Allow-Origin": "*",
        "X-NPU-Gateway-Node": "another",
        "X-Request-ID": "another",
        "X-NPU-Node-Route-Reason": "first",
    }
    _, answer = ROWS["/v1/chat/completions"]

    async def respond(_):
        return web.json_response(answer, status=status, headers={**route_headers(WRITER), **own})

    scripted.respond = respond
    async with gateway(scripted) as http:
        for status in (200, 400):
            reply = await http.post("/v1/chat/completions", **sent("/v1/chat/completions", {"messages": HI}))
            assert not {"Set-Cookie", "Location", "Access-Control-Allow-Origin"} & reply.headers.keys()
            assert "another" not in reply.headers.values()
            assert len(reply.headers.getall("X-Request-ID")) == 1
            if status == 200:
                assert reply.headers["X-NPU-Node-Route-Reason"] == "first"
                assert reply.headers.getall("X-NPU-Gateway-Node") == [scripted.url]
        scripted.respond = None
        reply = await http.post("/v1/chat/completions", json={"model": WRITER, "messages": HI, "stream": True})
        assert len(reply.headers.getall("X-Request-ID")) == len(reply.headers.getall("Server")) == 1


@pytest.mark.parametrize(
    "asked",
    [
        {"input": [1, 2, 3]},
        {"input": "text", "dimensions": 8},
        {"input": [[1, 2, 3]], "encoding_format": "base64"},
    ],
)
async def test_callers_of_the_client_and_of_the_sdk_get_no_wrong_vectors_either(nodes, asked):
    wrong, good = ((JSON, json.dumps({"data": rows_of(row)}).encode()) for row in ([0.0] * 8, GOOD))
    first_then(nodes, "/v1/embeddings", wrong, good)
    async with NPUClient([node.url for node in nodes]) as client:
        reply = await client.post("/v1/embeddings", {"model": EMBEDDER, **asked})
        assert reply.body["data"] == rows_of(GOOD)
        assert [attempt.outcome for attempt in reply.attempts] == ["BadReply", "ok"]
    first_then(nodes, "/v1/embeddings", wrong, good)
    async with backend_client.openai(nodes=[node.url for node in nodes]) as openai:
        found = await openai.embeddings.create(model=EMBEDDER, **asked)
    assert [row.embedding for row in found.data] == [GOOD]
