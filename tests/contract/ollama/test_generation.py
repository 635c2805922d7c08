"""/api/generate and /api/chat."""

import pytest

from tests.support.events import ndjson

MODEL = "smollm2:135m"
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


async def call(http, node, route, **body):
    async with http.post(f"{node.url}/api/{route}", json={"model": MODEL, "stream": False, **body}) as reply:
        return reply, await reply.json()


async def stream(http, node, route, **body):
    async with http.post(f"{node.url}/api/{route}", json={"model": MODEL, **body}) as reply:
        assert reply.status == 200
        assert reply.headers["Content-Type"] == "application/x-ndjson"
        assert reply.headers["X-NPU-Node-Device"] == "CPU"
        return await ndjson(reply)


def check_last(frame, eval_count):
    assert frame["done"] is True
    assert frame["eval_count"] == eval_count
    assert all(isinstance(frame[name], int) for name in DURATIONS)
    assert 0 < frame["prompt_eval_duration"] + frame["eval_duration"] <= frame["total_duration"]
    assert frame["load_duration"] == 0


async def test_a_chat_streams_by_default(http, node):
    frames = await stream(http, node, "chat", messages=CAPITAL, options={"num_predict": 8})
    _, whole = await call(http, node, "chat", messages=CAPITAL, options={"num_predict": 8})
    *pieces, last = frames
    assert all(frame["model"] == MODEL and frame["created_at"].endswith("Z") for frame in frames)
    assert not any(frame["done"] for frame in pieces)
    assert "".join(frame["message"]["content"] for frame in pieces) == whole["message"]["content"]
    assert last["message"] == {"role": "assistant", "content": ""}
    assert last["done_reason"] == whole["done_reason"]
    check_last(last, 8)
    check_last(whole, 8)


async def test_raw_skips_the_template_and_system_is_a_first_message(http, node):
    _, raw = await call(http, node, "generate", prompt="One, two, three,", raw=True, options={"num_predict": 4})
    _, plain = await call(http, node, "generate", prompt="One, two, three,", options={"num_predict": 4})
    assert raw["prompt_eval_count"] < plain["prompt_eval_count"]
    _, system = await call(http, node, "generate", prompt="Hello", system="Be brief.", options={"num_predict": 4})
    _, turns = await call(
        http,
        node,
        "chat",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        options={"num_predict": 4},
    )
    assert system["response"] == turns["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "status", "error"),
    [
        ({"model": "gpt-17"}, 404, "model 'gpt-17' not found"),
        ({"options": {"mirostat": 1}}, 400, "options.mirostat"),
        ({"options": {"num_ctx": 20}}, 400, "num_ctx"),
        ({"options": {"temperature": "hot"}}, 400, "options.temperature"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "messages[0].images[0]: "),
        ({"messages": [{"role": "prophet", "content": "x"}]}, 400, "messages[0]"),
        ({"keep_alive": "soon"}, 400, "keep_alive"),
        ({"think": True}, 400, "think"),
    ],
)
async def test_wrong_requests_are_refused_naming_the_field(http, node, fields, status, error):
    reply, body = await call(http, node, "chat", **{"messages": CAPITAL, **fields})
    assert reply.status == status
    assert set(body) == {"error", "code"}
    assert body["error"].startswith(error)


@pytest.mark.parametrize(
    "fields", [{"suffix": "x"}, {"template": "x"}, {"images": ["aGk="]}, {"context": [1]}, {"raw": True, "system": "x"}]
)
async def test_what_generate_cannot_do_is_refused(http, node, fields):
    reply, body = await call(http, node, "generate", prompt="x", **fields)
    assert reply.status == 400
    assert next(reversed(fields)) in body["error"]
