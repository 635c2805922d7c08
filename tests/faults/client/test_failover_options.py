"""Each option of `failover` by itself, and for a client, a key of the gateway and a request."""

import re
import secrets

import pytest

from backend_client import ClientOptions, CloudClient, InferenceClient, InvalidArgument, NPUClient, StreamInterrupted
from backend_client.errors import ContextLengthExceeded, ModelNotFound
from backend_client.gateway.cli import main
from backend_client.gateway.keys import KeyStore
from backend_client.options import FailoverOptions
from backend_client.testing import cut
from backend_client.testing.node import EMBEDDER, WRITER
from tests.faults.client.gateways import cloud_settings, gateway, streaming
from tests.faults.client.test_failover import CHUNKS, MESSAGES, TEXT, answering
from tests.faults.scripted_node import error_response

STREAM = {"model": WRITER, "messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
WHOLE = {"model": WRITER, "messages": MESSAGES}


def client_of(nodes, **failover):
    return NPUClient([node.url for node in nodes], options=ClientOptions(failover=FailoverOptions(**failover)))


def answers(node, **how):
    respond = answering(**how)

    async def one(request):
        return await respond(request, 0)

    node.respond, node.answer = one, TEXT


def refuses_long_prompts(node):
    async def respond(request):
        too_long = (await request.json())["model"] == WRITER
        return error_response(400, "context_length_exceeded") if too_long else None

    node.respond, node.answer = respond, TEXT
    node.offer("generation", "larger")


@pytest.mark.parametrize(
    ("how", "option"), [({"wait": 100}, "first_token_s"), ({"until": 20, "stall": 100}, "stall_s")]
)
async def test_another_node_takes_over_from_a_slow_one(pair, how, option):
    """Without the option the call would wait for the slow node until its deadline."""
    answers(pair[0], **how)
    answers(pair[1])
    # Long enough for the other node on a busy machine.
    async with client_of(pair, **{option: 2.0}) as client:
        while not pair[0].requests:
            reply = await client.chat(MESSAGES, model=WRITER, timeout=60, prompt_cache_key=secrets.token_hex(4))
            assert reply.node == pair[1].url


async def test_an_answer_that_nobody_else_could_give_is_waited_for(scripted):
    answers(scripted, wait=1.5)
    async with client_of([scripted], first_token_s=0.2, stall_s=0.2) as client:
        assert (await client.chat(MESSAGES, model=WRITER)).text == TEXT
    assert len(scripted.requests) == 1


async def test_a_stream_that_has_begun_ends_after_the_stall(scripted):
    answers(scripted, until=20, stall=100)
    async with client_of([scripted], stall_s=0.5) as client:
        with pytest.raises(StreamInterrupted) as caught:
            [_ async for _ in client.stream_chat(MESSAGES, model=WRITER)]
    assert caught.value.partial_text
    assert TEXT.startswith(caught.value.partial_text)


@pytest.mark.parametrize("through", ["client", "gateway"])
async def test_a_prompt_that_is_too_long_goes_to_the_larger_model_of_a_node(scripted, through):
    refuses_long_prompts(scripted)
    failover = FailoverOptions(on_context_length="larger")
    if through == "client":
        async with InferenceClient(client_of([scripted])) as client:
            with pytest.raises(ContextLengthExceeded):
                await client.chat(MESSAGES, model=WRITER)
            result = await client.chat(MESSAGES, model=WRITER, failover=failover)
            assert (result.text, result.model, result.source) == (TEXT, "larger", "node")
            assert [attempt.outcome for attempt in result.attempts] == ["ContextLengthExceeded", "ok"]
    else:
        async with gateway(scripted, client={"options": ClientOptions(failover=failover)}) as http:
            for body in (WHOLE, STREAM):
                reply = await http.post("/v1/chat/completions", json=body)
                assert (reply.status, reply.headers["X-Model"]) == (200, "larger")
                assert "word59" in await reply.text()
    assert [body["model"] for body in scripted.bodies][-2:] == [WRITER, "larger"]


async def test_a_larger_model_that_refuses_or_is_missing_is_asked_once_and_never_for_vectors(scripted):
    async def respond(_):
        return error_response(400, "context_length_exceeded")

    scripted.respond = respond
    for kind, name in (("generation", "larger"), ("embedding", "larger-embedder")):
        scripted.offer(kind, name)
    async with InferenceClient(client_of([scripted], on_context_length="larger")) as client:
        with pytest.raises(ContextLengthExceeded) as caught:
            await client.chat(MESSAGES, model=WRITER)
        assert len(scripted.requests) == len(caught.value.attempts) == 2
        # The larger model itself has nowhere to go.
        with pytest.raises(ContextLengthExceeded):
            await client.chat(MESSAGES, model="larger")
        assert len(scripted.requests) == 3
        with pytest.raises(ModelNotFound):
            await client.chat(MESSAGES, model=WRITER, failover=FailoverOptions(on_context_length="nobody's"))
        asked = len(scripted.requests)
        with pytest.raises(ContextLengthExceeded):
            await client.embed("text", model=EMBEDDER, failover=FailoverOptions(on_context_length="larger-embedder"))
        assert len(scripted.requests) == asked + 1


async def test_a_key_is_held_to_its_models_for_long_prompts_too(scripted, tmp_path):
    refuses_long_prompts(scripted)
    store = KeyStore(tmp_path / "keys.db")
    failover = FailoverOptions(on_context_length="larger")
    held, free = store.add("held", [WRITER], failover=failover), store.add("free", failover=failover)
    store.close()
    async with gateway(scripted, keys=tmp_path / "keys.db") as http:
        for key, status in ((held, 400), (free, 200)):
            reply = await http.post("/v1/chat/completions", json=WHOLE, headers={"Authorization": f"Bearer {key}"})
            assert reply.status == status


@pytest.mark.parametrize("how", ["client", "key", "request"])
async def test_a_recovered_stream_is_the_whole_one_of_another_node_and_says_so(pair, tmp_path, how):
    answers(pair[0], until=40)
    answers(pair[1])
    store = KeyStore(tmp_path / "keys.db")
    options = FailoverOptions(stream_recovery="restart")
    key = store.add("team", failover=options) if how == "key" else store.add("team")
    store.close()
    headers = {"Authorization": f"Bearer {key}"}
    if how == "request":
        headers["X-NPU-Failover"] = "stream_recovery=restart"
    client = {"options": ClientOptions(failover=options)} if how == "client" else {}
    async with gateway(*pair, client=client, keys=tmp_path / "keys.db") as http:
        while not pair[0].requests:
            headers["X-Session-Id"] = secrets.token_hex(4)
            reply = await http.post("/v1/chat/completions", json=STREAM, headers=headers)
            assert await reply.read() == b"".join(CHUNKS)
            assert reply.headers["Content-Type"] == "text/event-stream"
            assert reply.headers["X-NPU-Gateway-Stream-Recovery"] == "restart"
            assert reply.headers["X-NPU-Gateway-Node"] == pair[1].url
        whole = await http.post("/v1/chat/completions", json=WHOLE, headers=headers)
        assert "X-NPU-Gateway-Stream-Recovery" not in whole.headers
    assert not any("X-NPU-Failover" in request.headers for node in pair for request in node.requests)


async def test_a_request_turns_off_what_its_client_sets(scripted):
    answers(scripted, until=40)
    options = ClientOptions(failover=FailoverOptions(stream_recovery="restart"))
    async with gateway(scripted, client={"options": options}) as http:
        reply = await http.post("/v1/chat/completions", json=STREAM, headers={"X-NPU-Failover": "stream_recovery=off"})
        assert reply.status == 200
        assert "word39" in await reply.text()
        reply = await http.post("/v1/chat/completions", json=STREAM)
        assert reply.status == 503


async def test_a_stream_of_the_cloud_that_breaks_is_a_clean_error_when_streams_are_recovered(scripted, cloud):
    scripted.health_status = "draining"
    cloud.script(cut(2), cut(2))
    options = ClientOptions(failover=FailoverOptions(stream_recovery="restart"))
    async with gateway(scripted, cloud=cloud, client={"options": options}) as http:
        reply = await http.post("/v1/chat/completions", json=STREAM)
        assert (reply.status, (await reply.json())["error"]["code"]) == (503, "unavailable")


async def test_a_request_that_must_stay_does_not_go_to_the_cloud_after_its_first_token(scripted, cloud):
    answers(scripted, wait=1.0)
    async with InferenceClient(client_of([scripted], first_token_s=0.2), CloudClient(cloud_settings(cloud))) as client:
        assert (await client.chat(MESSAGES, model=WRITER, local_only=True)).source == "node"
    assert not cloud.requests


@pytest.mark.parametrize(
    ("given", "got"),
    [
        ("first_token_s", "first_token_s="),
        ("stall_s=0", "'stall_s=0': Input should be greater than 0"),
        ("first_token_s=nan", "'first_token_s=nan': Input should be a finite number"),
        ("stream_recovery=resume", "stream_recovery=resume"),
        (";;", "';;=': Extra inputs are not permitted"),
        ("first_token_s=5, x=1", "'x=1': Extra inputs are not permitted"),
        ("stall_s=1, stall_s=2", "stall_s"),
    ],
)
async def test_options_that_are_none_are_refused_by_name_and_value(scripted, given, got, capsys):
    async with gateway(scripted) as http:
        for body in (WHOLE, STREAM):
            async with http.post("/v1/chat/completions", json=body, headers={"X-NPU-Failover": given}) as reply:
                assert reply.status == 400
                message = (await reply.json())["error"]["message"]
                assert got in message
                assert "first_token_s=5" in message
    with pytest.raises(SystemExit):
        main(["keys", "--keys", "unused.db", "add", "team", "--failover", given])
    assert got in capsys.readouterr().err
    async with client_of([scripted]) as client:
        with pytest.raises(InvalidArgument, match="failover must be"):
            await client.chat(MESSAGES, failover=given)
    assert not scripted.requests


def test_a_key_shows_its_options(tmp_path, capsys):
    keys = ["keys", "--keys", str(tmp_path / "keys.db")]
    assert main([*keys, "add", "team", "--failover", "first_token_s=5, stall_s=off"]) == 0
    assert main([*keys, "list"]) == 0
    assert re.search(r"all models, first_token_s=5\.0, stall_s=None", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("path", "kind", "begun", "end"),
    [
        (
            "/api/chat",
            "application/x-ndjson",
            '{"message":{"content":"Hi"},"done":false}\n',
            '{"message":{},"done":true}\n',
        ),
        (
            "/v1/messages",
            "text/event-stream",
            'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"Hi"}}\n\n',
            'data: {"type":"message_stop"}\n\n',
        ),
    ],
)
async def test_streams_of_other_dialects_are_recovered_too(scripted, path, kind, begun, end):
    async def respond(request):
        parts = [begun, end] if len(scripted.requests) > 1 else [begun]
        return await streaming(*map(str.encode, parts), kind=kind)(request)

    scripted.respond = respond
    async with gateway(scripted) as http:
        asked = {**STREAM, "max_tokens": 9}
        reply = await http.post(path, json=asked, headers={"X-NPU-Failover": "stream_recovery=restart"})
        assert await reply.text() == begun + end
    assert len(scripted.requests) == 2
