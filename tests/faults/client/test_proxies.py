"""A node behind a proxy: what the proxy says by itself is not what the node says."""

import pytest
from aiohttp import web

from backend_client import ClientOptions, NPUClient, NPUUnavailableError
from backend_client.errors import AuthenticationFailed, ContextLengthExceeded, DeadlineExceeded
from backend_client.options import RetryOptions
from tests.faults.scripted_node import EMBEDDER, answering, error_response

# So many retries that no call waits for one.
ENOUGH = ClientOptions(retry=RetryOptions(initial=20.0))


def html(status):
    return answering(lambda: web.Response(status=status, text="<html>from a proxy</html>", content_type="text/html"))


def other_json(status, body):
    return answering(lambda: web.json_response(body, status=status))


# What a proxy answers in the place of a node that passes its probes.
OF_A_PROXY = {
    "504": html(504),
    "404": html(404),
    "400": html(400),
    "405": html(405),
    "418": html(418),
    "422 of FastAPI": other_json(422, {"detail": [{"msg": "field required"}]}),
    "404 without a type": other_json(404, {"error": {"message": "no", "code": "model_not_found", "param": None}}),
    "404 with a text": other_json(404, {"error": "model_not_found"}),
}


@pytest.mark.parametrize("answer", OF_A_PROXY)
@pytest.mark.parametrize("kind", ["embed", "generate"])
async def test_a_proxys_own_answer_does_not_end_the_call_while_another_node_serves(pair, kind, answer, caplog):
    pair[0].respond = OF_A_PROXY[answer]
    async with NPUClient([node.url for node in pair], options=ENOUGH) as client:
        for _ in range(100):
            assert await getattr(client, kind)("text", timeout=10)
            # No further: on a busy machine the ejection is over before the next call.
            if "is ejected" in caplog.text:
                break
    ejections = [record.getMessage() for record in caplog.records if "is ejected" in record.getMessage()]
    assert len(ejections) == 1, "it counts against the node"
    assert pair[0].url in ejections[0]


async def test_where_proxies_alone_answer_no_node_is_available(pair):
    pair[0].respond, pair[1].respond = OF_A_PROXY["404"], OF_A_PROXY["418"]
    async with NPUClient([node.url for node in pair]) as client:
        with pytest.raises(NPUUnavailableError, match="without the error body of a node") as caught:
            await client.embed("text")
    assert {attempt.outcome for attempt in caught.value.attempts} == {"BadReply"}


@pytest.mark.parametrize("status", [401, 403])
async def test_a_call_that_one_node_refuses_for_its_key_goes_to_another(pair, status):
    pair[0].respond = html(status)
    async with NPUClient([node.url for node in pair]) as client:
        for number in range(8):
            await client.embed(f"text {number}")
        pair[1].respond = html(status)
        with pytest.raises(AuthenticationFailed) as caught:
            await client.embed("text")
    assert [attempt.outcome for attempt in caught.value.attempts] == ["KeyRefused", "KeyRefused"]
    assert caught.value.status == status
    assert pair[0].requests


@pytest.mark.parametrize("model", [None, EMBEDDER])
@pytest.mark.parametrize("more", [{"context_limit": 512}, {"placements": ["NPU", "CPU"]}])
async def test_a_text_too_long_for_one_node_goes_to_one_with_more_room(pair, model, more):
    refuse = answering(lambda: error_response(400, "context_length_exceeded", "the text has 300 tokens"))
    pair[0].respond = refuse
    for node in pair:
        node.models[EMBEDDER] |= {"placements": ["NPU"], "context_limit": 256}
    pair[1].models[EMBEDDER] |= more
    async with NPUClient([node.url for node in pair]) as client:
        for number in range(8):
            await client.embed(f"text {number}", model=model)
        pair[1].respond = refuse
        with pytest.raises(ContextLengthExceeded):
            await client.embed("text", model=model)
    assert pair[0].requests
    # Each is asked once, at most.
    assert 9 <= len(pair[1].requests) <= 10


async def test_a_nodes_own_504_ends_the_call(pair):
    for node in pair:
        node.respond = answering(
            lambda: error_response(504, "deadline_exceeded", "the deadline passed while the request was queued")
        )
    async with NPUClient([node.url for node in pair]) as client:
        with pytest.raises(DeadlineExceeded, match="deadline passed on the node"):
            await client.embed("text")
    assert len(pair[0].requests) + len(pair[1].requests) == 1


@pytest.mark.parametrize("text", ["m\x1b]0;title\x07", "failed\nforged line", "m" * 600, "\u202etxet"])
@pytest.mark.parametrize("field", ["id", "state"])
async def test_a_report_that_no_terminal_may_show_is_not_a_nodes(scripted, field, text):
    row = {"id": EMBEDDER, "kind": "embedding", "state": "ready", field: text}
    scripted.health_respond = answering(lambda: web.json_response({"status": "ready", "models": [row]}))
    async with NPUClient([scripted.url]) as client:
        with pytest.raises(NPUUnavailableError) as caught:
            await client.embed("text", timeout=5)
    assert text not in str(caught.value)
