"""Whatever a client sends: a clear 4xx, never a 500, a hang or a leak. On a real node."""

import asyncio
import json

import pytest

pytestmark = pytest.mark.real

EMBED, INFER = "/embeddings", "/inference"
DEEP = 20_000

BAD_BODIES = {
    "nothing": (EMBED, b""),
    "not JSON": (EMBED, b"texts=hello"),
    "cut JSON": (EMBED, b'{"texts": ["a"'),
    "an array": (EMBED, b'["a"]'),
    "no texts": (EMBED, b"{}"),
    "a number among the texts": (EMBED, b'{"texts": ["a", 1]}'),
    "an unknown field": (EMBED, b'{"texts": ["a"], "normalise": false}'),
    "a string for a flag": (EMBED, b'{"texts": ["a"], "truncate": "yes"}'),
    "a lone surrogate": (EMBED, b'{"texts": ["\\ud800"]}'),
    "bytes that are no UTF-8": (EMBED, b'{"texts": ["\xff\xfe"]}'),
    "deep nesting": (EMBED, b'{"texts": ' + b"[" * DEEP + b"]" * DEEP + b"}"),
    "no prompt": (INFER, b'{"max_new_tokens": 1}'),
    "NaN": (INFER, b'{"prompt": "a", "temperature": NaN}'),
    "a huge float": (INFER, b'{"prompt": "a", "temperature": 1e999}'),
    "a huge integer": (INFER, b'{"prompt": "a", "max_new_tokens": ' + b"9" * 400 + b"}"),
    "an endless integer": (INFER, b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}"),
    "no new tokens": (INFER, b'{"prompt": "a", "max_new_tokens": 0}'),
    "negative temperature": (INFER, b'{"prompt": "a", "temperature": -0.1}'),
    "an empty stop": (INFER, b'{"prompt": "a", "stop": [""]}'),
    "too many stops": (INFER, json.dumps({"prompt": "a", "stop": ["x"] * 17}).encode()),
    "an empty raw prompt": (INFER, b'{"prompt": "", "raw": true}'),
}


async def error_of(reply, status):
    body = await reply.json()
    assert reply.status == status, body
    error = body["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert error["message"]
    assert reply.headers["X-Request-ID"]
    return error


@pytest.mark.parametrize(("path", "body"), BAD_BODIES.values(), ids=BAD_BODIES)
async def test_a_bad_body_is_a_400(node, http, path, body):
    async with http.post(node.url + path, data=body) as reply:
        await error_of(reply, 400)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "expected"),
    [
        ("POST", EMBED, {"texts": ["a", "b", None]}, 400, "texts[2]"),
        ("POST", EMBED, {"texts": ["a"] * 2049}, 400, "2048"),
        ("POST", EMBED, {"texts": ["a"], "model": "gpt-9"}, 404, "all-minilm-l6-v2"),
        ("POST", INFER, {"prompt": "a", "model": "gpt-9"}, 404, "model_not_found"),
        ("GET", "/nothing/here", None, 404, "not_found"),
        ("GET", EMBED, None, 405, "method_not_allowed"),
        ("DELETE", "/health", None, 405, "method_not_allowed"),
    ],
)
async def test_an_error_names_what_is_wrong(node, http, method, path, body, status, expected):
    async with http.request(method, node.url + path, json=body) as reply:
        error = await error_of(reply, status)
        assert expected in " ".join(filter(None, error.values()))
        assert status != 405 or reply.headers["Allow"] == {EMBED: "POST", "/health": "GET, HEAD"}[path]


async def connect(node):
    host, port = node.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def test_half_a_request_and_a_closed_line_leave_nothing(node):
    for data in (
        b"POST /embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Le",
        b'POST /embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{"texts": [',
    ):
        reader, writer = await connect(node)
        writer.write(data)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 30)
        writer.close()
        await writer.wait_closed()
    await asyncio.to_thread(node.wait_for, lambda body: all(model["in_flight"] == 0 for model in body["models"]))


async def test_malformed_http_is_counted_though_no_route_sees_it(node, http):
    reader, writer = await connect(node)
    writer.write(b"NONSENSE\r\n\r\n")
    assert b" 400 " in await reader.readline()
    writer.close()
    await writer.wait_closed()
    async with http.get(node.url + "/metrics") as reply:
        assert 'npu_node_http_requests_total{route="-",status="400"}' in await reply.text()
