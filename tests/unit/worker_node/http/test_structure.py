"""A body's structure is bounded before it is parsed: values cost the event loop more than bytes."""

import io
import json

import pytest

from tests.support.application import application
from worker_node.core.errors import PayloadTooLarge
from worker_node.http.body import MAX_VALUES, check_structure, values

MANY = 2 * MAX_VALUES
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}

TOO_MUCH = {
    "empty lists": ("/v1/embeddings", {"model": "m", "input": [[]] * MANY}),
    "lists of ids": ("/v1/completions", {"model": "m", "prompt": [[1, 2]] * MANY}),
    "empty strings": ("/embeddings", {"texts": [""] * MANY}),
    "numbers": ("/embeddings", {"texts": [1.5] * MANY}),
    "numbers with signs": ("/v1/embeddings", {"model": "m", "input": [-1] * 16 * MANY}),
    "words": ("/embeddings", {"texts": [None] * MANY}),
    "messages": ("/v1/chat/completions", {"model": "m", "messages": CHAT["messages"] * MANY}),
    "messages without sense": ("/v1/chat/completions", {"model": "m", "messages": [{"role": "x"}] * MANY}),
    "calls": ("/api/chat", {"model": "m", "messages": [{"tool_calls": [{"function": {}}]}] * MANY}),
    "items": ("/v1/responses", {"model": "m", "input": [{"type": "message", "content": [{}]}] * MANY}),
    "fields": ("/v1/chat/completions", CHAT | {f"f{i}": 1 for i in range(MANY)}),
    "fields of a field that is ignored": (
        "/v1/chat/completions",
        CHAT | {"metadata": {str(i): 1 for i in range(MANY)}},
    ),
    "lists to explain": ("/route/explain", {"path": "/inference", "body": {"prompt": [[]] * MANY}}),
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


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
@pytest.mark.parametrize("name", HONEST)
def test_what_clients_send_is_not_too_much(name, separators):
    check_structure(json.dumps(HONEST[name], separators=separators).encode())
    check_structure(json.dumps(HONEST[name], separators=separators, ensure_ascii=False).encode())


@pytest.mark.parametrize("text", [b'"' * 1_000_001, b"\\" * 1_000_001, b'{"a":"' + b"," * 100_000, b"\xff," * 100_000])
def test_what_is_no_json_is_counted_too(text):
    assert values(text) >= 0


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
        ("/v1/chat/completions", CHAT | {"tools": [{}] * 100}, "tools[0].type"),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": [{}] * 1000}]}, None),
        ("/v1/responses", {"model": "m", "input": [{"type": "x"}] * 1000}, None),
        ("/v1/embeddings", {"model": "m", "input": [{}] * 1000}, None),
        ("/inference", {"prompt": "a", "stop": [1] * 1000}, "stop[0]"),
    ],
)
async def test_only_the_first_wrong_item_of_a_list_is_looked_at(path, body, first):
    async with application() as (client, _), client.post(path, json=body) as reply:
        answer = await reply.json()
    assert reply.status == 400
    assert "[1]" not in answer["error"]["message"]
    assert "more problems" not in answer["error"]["message"] or int(answer["error"]["message"].split()[-3]) < 30
    assert first is None or answer["error"]["param"] == first
