"""The fleet's dashboard while nodes die, refuse, or are no nodes of this version."""

import asyncio
import json

import pytest
from aiohttp import web

from backend_client.cli.dashboard import Fleet, fetch_state, served
from backend_client.client import NPUClient
from backend_client.errors import NodeError
from tests.faults.scripted_node import ScriptedNode, answering


async def settled(client, url, usable):
    async with asyncio.timeout(10):
        while next(node for node in client.status() if node.url == url).usable is not usable:
            await asyncio.sleep(0.02)


async def test_a_node_that_dies_is_down_since_then_and_up_when_it_is_back(pair):
    stays, dies = pair
    now = [1000.0]
    states = {node.url: {"kind": "node", "name": node.url} for node in pair}

    async def fetch(url):
        return states[url]

    async with NPUClient([stays.url, dies.url]) as client:
        page = Fleet(client, fetch, clock=lambda: now[0])
        first, second = (await page.state())["nodes"]
        known = {"url": stays.url, "status": "ready", "usable": True, "breaker": "closed"}
        assert first.items() >= known.items()
        assert first["state"]["name"] == stays.url
        assert second["since"] is None
        dies.health_respond = answering(lambda: web.Response(status=500))
        await settled(client, dies.url, usable=False)
        now[0] = 1060.0
        assert (await page.state())["nodes"][0]["usable"]
        now[0] = 1075.0
        second = (await page.state())["nodes"][1]
        assert (second["usable"], second["status"], second["since"]) == (False, "unreachable", 1060.0)
        assert second["state"] is None
        assert second["state_trouble"] == second["trouble"] != ""
        dies.health_respond = None
        states[dies.url] = {"kind": "node", "name": "again"}
        await settled(client, dies.url, usable=True)
        now[0] = 1090.0
        second = (await page.state())["nodes"][1]
        assert (second["usable"], second["since"], second["state"]["name"]) == (True, 1090.0, "again")


def detailed(handler):
    return ScriptedNode(routes=[web.get("/dashboard/state", handler)]).running()


# What a browser's page would not read.
UNREADABLE = [
    {"models": 5}, {"models": [None]}, {"models": [{"id": "m", "engines": [{"state": "ready", "reason": 1}]}]},
    {"history": {"requests": "abc"}}, {"devices": "x"}, {"failures": {}}, {"events": [1]}, {"made": {"m": 1}},
    {"npu": []}, {"routes": [{"count": 1.5}]},
]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (401, b"{}", "refuses this client's API key"),
        (404, b"{}", "HTTP 404"),
        (200, b"<html>", "not its state"),
        (200, b'{"kind": "fleet"}', "not its state"),
        *((200, json.dumps({"kind": "node", **state}).encode(), "not its state") for state in UNREADABLE),
        (200, b'{"kind": "node", "x": NaN}', "not its state"),
        (200, b'{"kind": "node", "x": 1e999}', "not its state"),
        (200, b"[" * 100_000, "not its state"),
    ],
)
async def test_an_answer_that_is_not_a_state_is_an_error_without_the_key(status, body, why):
    async def handler(request):
        assert request.headers["Authorization"] == "Bearer sk-canary"
        return web.Response(status=status, body=body, headers={"Location": "/elsewhere"})

    async with detailed(handler) as node, NPUClient([node.url], node_keys={node.url: "sk-canary"}) as client:
        with pytest.raises(NodeError, match=why) as raised:
            await fetch_state(client, node.url)
        assert "sk-canary" not in repr(raised.value)
        with pytest.raises(NodeError, match="cannot connect"):
            await fetch_state(client, "http://127.0.0.1:9")


async def test_the_state_reaches_the_page(http):
    async with (
        ScriptedNode().running() as node,
        detailed(answering(lambda: web.json_response({"kind": "node", "name": "one"}))) as other,
        NPUClient([node.url, other.url]) as client,
        served(client) as url,
    ):
        for address in (url, url.removesuffix("dashboard")):
            async with http.get(address) as reply:
                assert reply.status == 200
                assert reply.content_type == "text/html"
                assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
        async with asyncio.timeout(10):
            while True:
                async with http.get(url + "/state") as reply:
                    assert reply.headers["Cache-Control"] == "no-store"
                    fleet = await reply.json()
                plain, told = fleet["nodes"]
                if told["state"] and plain["state_trouble"]:
                    break
                await asyncio.sleep(0.02)
    # A scripted node has no dashboard, as one of an older version: its /health is known all the same.
    assert "HTTP 404" in plain["state_trouble"]
    assert [model["state"] for model in plain["models"]] == ["ready", "ready"]


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("Host", "127.0.0.1", 200),
        ("Host", "localhost:99", 200),
        ("Host", "evil.example", 403),
        ("Origin", "{own}", 200),
        ("Origin", "https://evil.example", 403),
        ("Origin", "null", 403),
        ("Origin", "{own}1", 403),
    ],
)
async def test_other_sites_and_other_names_for_this_machine_are_refused(http, header, value, status):
    async with NPUClient(["http://127.0.0.1:9"]) as client, served(client) as url:
        headers = {header: value.format(own=url.removesuffix("/dashboard"))}
        for path in ("", "/state"):
            async with http.get(url + path, headers=headers) as reply:
                assert reply.status == status, path
