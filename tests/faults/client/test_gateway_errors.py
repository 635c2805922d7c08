"""A node behind a proxy: what the proxy says by itself is not what the node says."""

import pytest
from aiohttp import web

from backend_client import DeadlineExceeded, NPUClient, RequestRejected
from tests.faults.scripted_node import error_response


async def gateway_timeout(_):
    return web.Response(status=504, text="<html>504 Gateway Time-out</html>", content_type="text/html")


@pytest.mark.parametrize("kind", ["embed", "generate"])
async def test_a_proxys_504_does_not_end_the_call_while_another_node_serves(pair, kind, caplog):
    pair[0].respond = gateway_timeout
    async with NPUClient([node.url for node in pair]) as client:
        for _ in range(100):
            assert await getattr(client, kind)("text", timeout=10)
            # No further: on a busy machine the ejection is over before the next call.
            if "is ejected" in caplog.text:
                break
    ejections = [record.getMessage() for record in caplog.records if "is ejected" in record.getMessage()]
    assert len(ejections) == 1, "it counts against the node"
    assert pair[0].url in ejections[0]


async def test_a_nodes_own_504_ends_the_call(pair):
    async def respond(_):
        return error_response(504, "deadline_exceeded", "the deadline passed while the request was queued")

    for node in pair:
        node.respond = respond
    async with NPUClient([node.url for node in pair]) as client:
        with pytest.raises(DeadlineExceeded, match="deadline passed on the node"):
            await client.embed("text")
    assert len(pair[0].requests) + len(pair[1].requests) == 1


async def test_a_proxys_message_is_not_repeated(scripted):
    async def respond(_):
        body = rb'{"error": {"message": "no\nERROR forged \u001b[31m \ud800", "code": "x"}}'
        return web.Response(status=400, body=body, content_type="application/json")

    scripted.respond = respond
    async with NPUClient([scripted.url]) as client:
        with pytest.raises(RequestRejected, match="HTTP 400") as caught:
            await client.embed("text")
    assert "forged" not in str(caught.value)
    assert str(caught.value).isprintable()
    assert str(caught.value).encode()
