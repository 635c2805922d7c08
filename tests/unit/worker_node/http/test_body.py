"""Reading bodies: their size, structure, time, and what is said of wrong ones."""

import asyncio
import gzip
import io
import json

import pytest

from tests.support.application import application
from tests.support.task_models import SEER, placement, seer
from tests.support.writing import WritingEngine
from worker_node.core.errors import PayloadTooLarge
from worker_node.http.body import MAX_NESTING, MAX_VALUES, check_structure
from worker_node.settings import NodeSettings

MANY = 2 * MAX_VALUES
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}

TOO_MUCH = {
    "empty lists": ("/v1/embeddings", {"model": "m", "input": [[]] * MANY}),
    "empty strings": ("/embeddings", {"texts": [""] * MANY}),
    "numbers with signs": ("/v1/embeddings", {"model": "m", "input": [-1] * 16 * MANY}),
    "fields": ("/v1/chat/completions", CHAT | {f"f{i}": 1 for i in range(MANY)}),
    "fields of a field that is ignored": (
        "/v1/chat/completions",
        CHAT | {"metadata": {str(i): 1 for i in range(MANY)}},
    ),
}

HONEST = {
    "as many texts as a request may have": {"texts": ['a, [b] {c}: "d" \\ \\" ä,,,,'] * 2048},
    "one text of marks": {"texts": [",[{" * 1_000_000]},
    "one text of escaped quotes": {"texts": ['",' * 1_000_000]},
    "one text that ends with backslashes": {"texts": ["\\" * 100_001, ",[" * MANY]},
    "half a million token ids": {"input": [list(range(1, 251))] * 2000},
    "a long conversation": {"messages": [{"role": "user", "content": ","}] * 4000},
}


@pytest.fixture(scope="module")
def hostile():
    return {name: (path, json.dumps(body).encode()) for name, (path, body) in TOO_MUCH.items()}


@pytest.mark.parametrize("name", TOO_MUCH)
async def test_a_body_of_too_many_values_is_a_413(hostile, name):
    path, body = hostile[name]
    async with application() as (client, _), client.post(path, data=io.BytesIO(body)) as reply:
        answer = await reply.json()
        assert reply.status == 413, answer
        assert str(MAX_VALUES) in json.dumps(answer)


@pytest.mark.parametrize("sees", [True, False])
async def test_a_body_may_be_as_large_as_images_only_while_a_model_reads_them(store, sees):
    models = [seer(store, [placement(SEER, WritingEngine())])] if sees else []
    settings = NodeSettings(max_body_bytes=100_000, max_image_body_bytes=1_000_000)
    asked = {"json": CHAT | {"model": "nobody", "user": "a" * 200_000}}
    async with application(models, settings) as (client, _), client.post("/v1/chat/completions", **asked) as reply:
        assert reply.status == (404 if sees else 413)


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
@pytest.mark.parametrize("name", HONEST)
def test_what_clients_send_is_not_too_much(name, separators):
    check_structure(json.dumps(HONEST[name], separators=separators).encode())
    check_structure(json.dumps(HONEST[name], separators=separators, ensure_ascii=False).encode())


@pytest.mark.parametrize("path", ["/inference", "/v1/chat/completions", "/v1/messages", "/api/chat"])
async def test_a_body_that_is_nested_too_deeply_is_a_400(path):
    # JSON texts of either depth come through the parser; past the bound they would end in a template or an encoder.
    for levels in (MAX_NESTING, 300, 1000):
        body = b'{"x": ' * levels + b"1" + b"}" * levels
        async with application() as (client, _), client.post(path, data=body) as reply:
            assert (reply.status, f"more than {MAX_NESTING} levels" in await reply.text()) == (
                400,
                levels > MAX_NESTING,
            )


@pytest.mark.parametrize("count", [MAX_VALUES - 10, MAX_VALUES + 10])
def test_values_are_counted_as_a_parser_counts_them(count):
    body = json.dumps([{"a,": "b["}] * (count // 2)).encode()
    if count > MAX_VALUES:
        with pytest.raises(PayloadTooLarge):
            check_structure(body)
    else:
        check_structure(body)


@pytest.mark.parametrize(
    ("path", "body", "first"),
    [
        ("/embeddings", {"texts": [1] * 1000}, "texts[0]"),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "x"}] * 1000}, "messages[0]"),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": [{}] * 1000}]}, None),
        ("/v1/embeddings", {"model": "m", "input": [{}] * 1000}, None),
    ],
)
async def test_only_the_first_wrong_item_of_a_list_is_looked_at(path, body, first):
    async with application() as (client, _), client.post(path, json=body) as reply:
        answer = await reply.json()
    assert reply.status == 400
    assert "[1]" not in answer["error"]["message"]
    assert "more problems" not in answer["error"]["message"] or int(answer["error"]["message"].split()[-3]) < 30
    assert first is None or answer["error"]["param"] == first


FORM = "multipart/form-data; boundary=X"


def head(path, content_type, *lines):
    common = ("Host: localhost", f"Content-Type: {content_type}", "Content-Length: 5000")
    return "\r\n".join((f"POST {path} HTTP/1.1", *common, *lines, "", "")).encode()


async def answer(client, begin, piece):
    """The status and error of a request whose body goes on with `piece` (None: with nothing) until there is a reply."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(begin)

    async def drip():
        while piece is not None:
            writer.write(piece)
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    try:
        async with asyncio.timeout(60):
            reply = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in reply.decode().splitlines() if line.startswith("Content-Length:"))
            body = json.loads(await reader.readexactly(length))
        return int(reply.split()[1]), body["error"]["code"]
    finally:
        dripping.cancel()
        writer.close()


CASES = pytest.mark.parametrize(
    ("path", "content_type", "begin"),
    [
        ("/v1/embeddings", "application/json", b'{"model":"x","input":"'),
        ("/v1/rerank", "application/json", b'{"query":"'),
        ("/v1/audio/transcriptions", FORM, b'--X\r\nContent-Disposition: form-data; name="file"\r\n\r\n'),
        ("/v1/audio/transcriptions", FORM, b'--X\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n'),
    ],
    ids=["embeddings", "rerank", "a file", "a field"],
)


@CASES
async def test_a_body_that_drips_in_ends_with_the_callers_deadline(path, content_type, begin):
    async with application() as (client, _):
        limit = "X-Request-Timeout-Ms: 300"
        sent = head(path, content_type, limit) + begin
        assert await answer(client, sent, b"a") == (504, "deadline_exceeded")


@CASES
async def test_a_body_that_falls_silent_is_a_408(path, content_type, begin):
    async with application(settings=NodeSettings(body_timeout_s=0.2)) as (client, _):
        assert await answer(client, head(path, content_type) + begin, None) == (408, "request_timeout")


@pytest.mark.parametrize(
    ("path", "head", "status"),
    [
        ("/v1/completions", "Content-Length: 9", 401),
        ("/v1/completions", "x-api-key: key-0123456789abcdef\r\nContent-Length: 2000", 413),
        (
            "/v1/audio/transcriptions",
            "x-api-key: key-0123456789abcdef\r\nContent-Type: multipart/form-data\r\nContent-Length: 999999999",
            413,
        ),
        ("/v1/completions", "x-api-key: key-0123456789abcdef\r\nContent-Encoding: x-zstd\r\nContent-Length: 9", 415),
    ],
)
async def test_a_refusal_comes_before_a_client_is_told_to_send_the_body(path, head, status):
    settings = NodeSettings(api_keys=["key-0123456789abcdef"], max_body_bytes=1000)
    async with application(settings=settings) as (client, _):
        reader, writer = await asyncio.open_connection(client.host, client.port)
        asked = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n{head}\r\n\r\n"
        writer.write(asked.encode())
        reply = await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert reply.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"\r\nConnection: close\r\n" in reply


async def test_a_client_that_waits_is_told_to_send_a_body_that_is_read():
    async with application() as (client, _):
        async with client.post("/v1/completions", json={"model": "none", "prompt": "a"}, expect100=True) as reply:
            assert reply.status == 404
        async with client.post("/v1/completions", json={"model": "none", "prompt": "a"}) as reply:
            assert reply.status == 404


@pytest.mark.parametrize(
    ("encoding", "sent", "status"),
    [
        ("gzip", gzip.compress(b"{}", mtime=0)[:-1], 400),
        ("GZIP", gzip.compress(b'{"texts": []}', mtime=0), 404),
        ("compress", b"{}", 415),
        ("gzip, br", b"{}", 415),
        # It counts as what it holds.
        ("gzip", gzip.compress(b" " * 1000, mtime=0), 400),
        ("gzip", gzip.compress(b" " * 1001, mtime=0), 413),
    ],
)
async def test_the_encoding_of_a_body_is_read_or_named(encoding, sent, status):
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    settings = NodeSettings(max_body_bytes=1000)
    async with (
        application(settings=settings) as (client, _),
        client.post("/embeddings", data=sent, headers=headers) as reply,
    ):
        assert reply.status == status, await reply.text()
        assert status != 415 or "gzip, deflate" in await reply.text()
