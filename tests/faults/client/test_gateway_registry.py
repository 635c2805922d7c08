"""Nodes that announce themselves to the gateway: enrolment, addresses, keys, and nodes that lie."""

import asyncio
import contextlib
import ipaddress
import json
import sqlite3
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from yarl import URL

from backend_client.errors import ConfigurationError
from backend_client.gateway import app as gateway_app
from backend_client.gateway import keys as gateway_keys
from backend_client.gateway.cli import main
from backend_client.gateway.keys import EXPIRY_S, KeyFile, KeyStore, Registry
from backend_client.http.addresses import parse_nodes
from backend_client.http.errors import Problem
from tests.faults.client.test_gateway import STREAM, gateway

NETWORKS = [ipaddress.ip_network("10.0.0.0/24"), ipaddress.ip_network("fd00::/64")]
HERE = {"url": "http://10.0.0.21:8081"}


@pytest.fixture
def now():
    return [1_000_000.0]


@pytest.fixture
def registry(tmp_path, now):
    with contextlib.closing(KeyFile(tmp_path / "keys.db")) as file:
        yield Registry(file, NETWORKS, lambda: now[0])


def announce(registry, key, **given):
    return registry.announce(key, json.dumps(HERE | given).encode())


def status_of(registry, key, given):
    with pytest.raises(Problem) as refused:
        registry.announce(key, json.dumps(given).encode())
    return refused.value.status


def test_an_announced_node_is_a_member_until_it_is_silent(registry, now):
    key = registry.enrol("one")
    assert registry.members() == {}
    assert announce(registry, key, api_key="its-own", version="0.1.0", labels={"site": "a"}) == "one"
    assert registry.members() == {"http://10.0.0.21:8081": "its-own"}
    (row,) = registry.list()
    assert (row.name, row.live, row.labels) == ("one", True, {"site": "a"})
    now[0] += EXPIRY_S
    assert registry.members() == {}
    announce(registry, key)
    now[0] -= 1000
    assert registry.members() == {}, "a clock that was set back keeps no node"


def test_an_enrolment_has_one_address_and_an_address_one_enrolment(registry, now):
    one, two = registry.enrol("one"), registry.enrol("two")
    announce(registry, one)
    assert status_of(registry, one, {"url": "http://10.0.0.22:8081"}) == 409
    assert status_of(registry, two, HERE) == 409
    announce(registry, one, draining=True)
    announce(registry, two)
    assert list(registry.members()) == ["http://10.0.0.21:8081"]
    now[0] += EXPIRY_S
    announce(registry, one, url="http://10.0.0.22:8081")
    assert list(registry.members()) == ["http://10.0.0.22:8081"]


def test_drained_and_removed_nodes_are_no_members(registry):
    key = registry.enrol("one")
    announce(registry, key)
    registry.drain("one")
    announce(registry, key)
    assert registry.members() == {}
    registry.drain("one", drained=False)
    assert list(registry.members()) == ["http://10.0.0.21:8081"]
    registry.remove("one")
    assert status_of(registry, key, HERE) == 401
    with pytest.raises(ConfigurationError, match="node 'one' is not enrolled"):
        registry.drain("one")


def test_one_key_for_a_name(registry):
    registry.enrol("one")
    with pytest.raises(ConfigurationError, match="one is enrolled already"):
        registry.enrol("one")
    with pytest.raises(ConfigurationError, match="a node's name must be"):
        registry.enrol("../one")


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("http://10.0.1.21:8081", 403),
        ("http://127.0.0.1:8081", 403),
        ("http://[::ffff:127.0.0.1]:8081", 403),
        ("http://169.254.169.254:80", 403),
        ("http://node.example:8081", 400),
        ("http://2130706433:8081", 400),
        ("http://0x7f.1:8081", 400),
        ("http://10.0.0.21", 403),
        ("http://10.0.0.21:8081/admin", 400),
        ("http://10.0.0.21:8081/?a=b", 400),
        ("http://user@10.0.0.21:8081", 400),
        ("file:///etc/passwd", 400),
        ("ftp://10.0.0.21:8081", 400),
        ("http://[fd00::1%25eth0]:8081", 400),
        ("http://10.0.0.21:99999", 400),
        ("//10.0.0.21:8081", 400),
        ("", 400),
        (None, 400),
        (["http://10.0.0.21:8081"], 400),
        ("http://10.0.0.21:8081" + "0" * 300, 400),
    ],
)
def test_only_addresses_of_the_allowed_networks_are_taken(registry, url, status):
    assert status_of(registry, registry.enrol("one"), {"url": url}) == status
    assert registry.members() == {}


@pytest.mark.parametrize(
    "more",
    [
        {"api_key": "two\r\nlines"},
        {"api_key": "k" * 513},
        {"api_key": 5},
        {"version": ["0.1"]},
        {"labels": {"a": 1}},
        {"labels": [1]},
        {"labels": {str(number): "x" for number in range(17)}},
        {"draining": "yes"},
    ],
)
def test_every_field_is_checked(registry, more):
    assert status_of(registry, registry.enrol("one"), HERE | more) == 400
    assert status_of(registry, registry.enrol("two"), [HERE | more]) == 400


@pytest.mark.parametrize("content", [b"", b"[" * 8000, b"\xff"])
def test_an_announcement_is_json(registry, content):
    with pytest.raises(Problem, match="an announcement: Invalid JSON"):
        registry.announce(registry.enrol("one"), content)


def test_a_team_is_no_node_and_a_node_no_team(registry, tmp_path):
    teams = KeyStore(tmp_path / "keys.db")
    team, node = teams.add("team"), registry.enrol("one")
    assert status_of(registry, team, HERE) == 401
    teams.read()
    assert teams.find(node) is None
    teams.close()


@asynccontextmanager
async def open_gateway(tmp_path, monkeypatch, port, *nodes):
    """A gateway that looks often, the key of a team and of a node, and what announces."""
    monkeypatch.setattr(gateway_app, "_LOOK_S", 0.02)
    file = tmp_path / "keys.db"
    teams = KeyStore(file)
    registry = Registry(teams.file)
    headers = {"x-api-key": teams.add("team")}
    key = registry.enrol("one", port)
    async with gateway(*nodes, keys=file, allowed_networks="127.0.0.0/8, ::1/128") as http:

        async def announce(**given):
            reply = await http.post("/announce", json=given, headers={"Authorization": f"Bearer {key}"})
            return reply.status

        async def ask():
            reply = await http.post("/v1/chat/completions", json=STREAM, headers=headers)
            await reply.read()
            return reply

        yield http, announce, ask, registry
    teams.close()


async def until(condition):
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_an_announced_node_serves_with_its_own_key_and_never_the_shared_one(tmp_path, monkeypatch, scripted):
    async with open_gateway(tmp_path, monkeypatch, URL(scripted.url).port) as (_, announce, ask, registry):
        assert (await ask()).status == 503
        assert await announce(url=scripted.url, api_key="its-own") == 200

        async def served():
            return (await ask()).status == 200

        await until(served)
        assert {request.headers.get("Authorization") for request in scripted.requests} == {"Bearer its-own"}
        registry.drain("one")

        async def refused():
            return (await ask()).status == 503

        await until(refused)
        registry.drain("one", drained=False)
        await until(served)
        assert await announce(url=scripted.url, draining=True) == 200
        await until(refused)


async def test_no_node_is_silent_while_no_announcement_can_be_written(tmp_path, monkeypatch, scripted, caplog):
    async with open_gateway(tmp_path, monkeypatch, URL(scripted.url).port) as (_, announce, ask, _registry):
        assert await announce(url=scripted.url) == 200

        async def served():
            return (await ask()).status == 200

        async def refused():
            return not await served()

        await until(served)
        with contextlib.closing(sqlite3.connect(tmp_path / "keys.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            monkeypatch.setattr(gateway_keys, "EXPIRY_S", 0.0)

            async def failed():
                return "the announced nodes stay as they are" in caplog.text

            await until(failed)
            assert await served()
            assert await announce(url=scripted.url) == 503
            other.execute("ROLLBACK")

        async def written():
            return await announce(url=scripted.url) == 200

        await until(written)
        assert await served()
        monkeypatch.setattr(gateway_app, "EXPIRY_S", 0.0)
        await until(refused)


def test_a_node_that_left_or_is_drained_is_not_kept(registry, now):
    one, two = registry.enrol("one"), registry.enrol("two")
    announce(registry, one)
    announce(registry, two, url="http://10.0.0.22:8081")
    members = registry.members()
    now[0] += EXPIRY_S
    assert registry.members(members) == members
    announce(registry, one, draining=True)
    registry.drain("two")
    assert registry.members(members) == {}


def test_a_key_is_for_one_port(registry):
    key = registry.enrol("one", 9000)
    assert status_of(registry, key, HERE) == 403
    announce(registry, key, url="http://10.0.0.21:9000")
    with pytest.raises(ConfigurationError, match="must be from 1 to 65535, got 0"):
        registry.enrol("two", 0)


def test_an_ipv4_address_written_as_one_of_ipv6_is_the_same_node(registry):
    one, two = registry.enrol("one"), registry.enrol("two")
    announce(registry, one, url="http://[::ffff:10.0.0.21]:8081")
    assert list(registry.members()) == [HERE["url"]]
    assert status_of(registry, two, HERE) == 409


async def test_a_node_without_a_key_of_its_own_gets_none(tmp_path, monkeypatch, scripted):
    async with open_gateway(tmp_path, monkeypatch, URL(scripted.url).port) as (_, announce, ask, _registry):
        assert await announce(url=scripted.url) == 200

        async def served():
            return (await ask()).status == 200

        await until(served)
    assert not any("Authorization" in request.headers for request in scripted.requests)


async def test_a_node_of_the_settings_keeps_its_place_and_its_key(tmp_path, monkeypatch, scripted):
    async with open_gateway(tmp_path, monkeypatch, URL(scripted.url).port, scripted) as (_, announce, ask, registry):
        assert await announce(url=scripted.url, api_key="stolen") == 200
        await asyncio.sleep(0.1)
        registry.remove("one")
        await asyncio.sleep(0.1)
        assert (await ask()).status == 200
    assert {request.headers.get("Authorization") for request in scripted.requests} == {"Bearer shared-key"}


async def test_what_is_no_node_gets_neither_prompts_nor_keys_and_no_redirect_is_followed(tmp_path, monkeypatch):
    seen = []

    async def take(request):
        seen.append((request.method, request.path, request.headers.get("Authorization")))
        raise web.HTTPTemporaryRedirect("/elsewhere")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", take)
    server = TestServer(app, host="127.0.0.1")
    async with server, open_gateway(tmp_path, monkeypatch, server.port) as (_, announce, ask, _registry):
        assert await announce(url=str(server.make_url("")).rstrip("/")) == 200

        async def probed():
            return bool(seen)

        await until(probed)
        assert (await ask()).status == 503
    assert {(method, key) for method, _, key in seen} == {("GET", None)}
    assert not any("elsewhere" in path for _, path, _ in seen)


async def test_announcements_are_refused_without_a_key_networks_or_bounds(tmp_path, monkeypatch, scripted):
    async with open_gateway(tmp_path, monkeypatch, 8081) as (http, announce, _ask, _registry):
        assert (await http.post("/announce", json=HERE)).status == 401
        assert await announce(url="http://10.0.0.21:8081") == 403
        assert await announce(url=scripted.url, labels={"a": "x" * 9000}) == 413
        assert (await http.get("/announce")).status == 404
        metrics = (await http.get("/metrics")).status
        assert metrics == 401
    async with gateway(scripted) as http:
        assert (await http.post("/announce", json=HERE)).status == 404


def test_a_list_of_nodes_has_an_ipv4_address_once():
    urls, _ = parse_nodes(["http://[::ffff:10.0.0.21]:8081", "10.0.0.21:8081", "http://[fd00::1]:8081"])
    assert urls == [HERE["url"], "http://[fd00::1]:8081"]


async def test_a_gateway_is_not_a_node(scripted):
    async with gateway(scripted) as http:
        health = await http.get("/health")
        assert (await health.json())["server"] == "npu-gateway"
        around = SimpleNamespace(url=str(health.url.origin()))
        async with gateway(around) as outer:
            reply = await outer.post("/v1/chat/completions", json=STREAM)
            assert reply.status == 503
            assert f"{around.url} is an npu-gateway and not a node" in await reply.text()
            assert (await outer.get("/health")).status == 503
    assert not scripted.requests


async def test_a_request_of_a_gateway_is_refused_by_another(scripted):
    async with gateway(scripted) as http:
        assert (await http.post("/v1/chat/completions", json=STREAM)).status == 200
        (request,) = scripted.requests
        hop = {"X-NPU-Gateway-Hop": request.headers["X-NPU-Gateway-Hop"]}
        reply = await http.post("/v1/chat/completions", json=STREAM, headers=hop)
        assert (reply.status, (await reply.json())["error"]["code"]) == (508, "loop_detected")
    assert len(scripted.requests) == 1


def test_nodes_are_enrolled_listed_and_ended_by_commands(tmp_path, capsys):
    def run(*words):
        status = main(["nodes", "--keys", str(tmp_path / "keys.db"), *words])
        return status, capsys.readouterr()

    status, said = run("enrol", "one")
    key = said.out.strip()
    assert (status, key[:8]) == (0, "npunode_")
    file = KeyFile(tmp_path / "keys.db")
    registry = Registry(file, NETWORKS)
    announce(registry, key, version="0.1.0", labels={"site": "berlin"})
    for action, state in (("drain", "drained"), ("resume", "live")):
        assert run(action, "one")[0] == 0
        assert run("list")[1].out.split() == ["one", state, "http://10.0.0.21:8081", "0.1.0", "site=berlin"]
    assert run("remove", "one")[0] == 0
    assert run("list")[1].out == ""
    assert run("remove", "one")[0] == 1
    file.close()
