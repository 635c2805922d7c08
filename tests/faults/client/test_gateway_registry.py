"""Nodes that announce themselves to the gateway: enrolment, addresses, keys, and nodes that lie."""

import asyncio
import contextlib
import ipaddress
import json
import sqlite3
import time
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
from tests.faults.client.gateways import STREAM, asked, gateway, made_keys

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


@pytest.mark.parametrize(
    ("name", "port", "message"),
    [
        ("one", 8081, "one is enrolled already"),
        ("../one", 8081, "a node's name must be"),
        ("two", 0, "must be from 1 to 65535, got 0"),
    ],
)
def test_a_key_is_for_one_name_and_one_port(registry, name, port, message):
    key = registry.enrol("one", 9000)
    with pytest.raises(ConfigurationError, match=message):
        registry.enrol(name, port)
    assert status_of(registry, key, HERE) == 403
    announce(registry, key, url="http://10.0.0.21:9000")


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("http://10.0.1.21:8081", 403),
        ("http://127.0.0.1:8081", 403),
        ("http://[::ffff:127.0.0.1]:8081", 403),
        ("http://169.254.169.254:80", 403),
        ("http://node.example:8081", 400),
        ("http://2130706433:8081", 400),
        ("http://10.0.0.21", 403),
        ("http://10.0.0.21:8081/admin", 400),
        ("http://user@10.0.0.21:8081", 400),
        ("file:///etc/passwd", 400),
        ("http://[fd00::1%25eth0]:8081", 400),
        ("http://10.0.0.21:99999", 400),
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


class Announcing:
    """A gateway, a node's key for it, and a team that asks."""

    def __init__(self, http, registry, key, team):
        self.http = http
        self.registry = registry
        self._key = key
        self._team = team

    async def announce(self, **given):
        reply = await self.http.post("/announce", json=given, headers={"Authorization": f"Bearer {self._key}"})
        return reply.status

    async def ask(self):
        return await asked(self.http, self._team)

    async def until(self, status):
        async with asyncio.timeout(20):
            while (await self.ask()).status != status:
                await asyncio.sleep(0.02)


@asynccontextmanager
async def open_gateway(tmp_path, monkeypatch, port, *nodes):
    """A gateway that looks often."""
    monkeypatch.setattr(gateway_app, "_LOOK_S", 0.02)
    file = tmp_path / "keys.db"
    (team,) = made_keys(file, "team")
    with contextlib.closing(KeyFile(file)) as used:
        registry = Registry(used)
        key = registry.enrol("one", port)
        async with gateway(*nodes, keys=file, allowed_networks="127.0.0.0/8, ::1/128") as http:
            yield Announcing(http, registry, key, team)


@pytest.fixture
async def fleet(tmp_path, monkeypatch, scripted):
    """Of the one node that its gateway does not know."""
    async with open_gateway(tmp_path, monkeypatch, URL(scripted.url).port) as opened:
        yield opened


def keys_given(node):
    return {request.headers.get("Authorization") for request in node.requests}


@pytest.mark.parametrize(("own", "given"), [({"api_key": "its-own"}, "Bearer its-own"), ({}, None)])
async def test_an_announced_node_serves_with_its_own_key_and_never_the_shared_one(fleet, scripted, own, given):
    assert (await fleet.ask()).status == 503
    assert await fleet.announce(url=scripted.url, **own) == 200
    await fleet.until(200)
    assert keys_given(scripted) == {given}
    fleet.registry.drain("one")
    await fleet.until(503)
    fleet.registry.drain("one", drained=False)
    await fleet.until(200)
    assert await fleet.announce(url=scripted.url, draining=True) == 200
    await fleet.until(503)


async def test_no_node_is_silent_while_no_announcement_can_be_written(fleet, scripted, tmp_path, monkeypatch, caplog):
    assert await fleet.announce(url=scripted.url) == 200
    await fleet.until(200)
    with contextlib.closing(sqlite3.connect(tmp_path / "keys.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr(gateway_keys, "EXPIRY_S", 0.0)
        async with asyncio.timeout(20):
            while "the announced nodes stay as they are" not in caplog.text:
                await asyncio.sleep(0.02)
        assert (await fleet.ask()).status == 200
        assert await fleet.announce(url=scripted.url) == 503
        other.execute("ROLLBACK")
    async with asyncio.timeout(20):
        while await fleet.announce(url=scripted.url) != 200:
            await asyncio.sleep(0.02)
    assert (await fleet.ask()).status == 200
    monkeypatch.setattr(gateway_app, "EXPIRY_S", 0.0)
    await fleet.until(503)


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


def test_an_ipv4_address_written_as_one_of_ipv6_is_the_same_node(registry):
    one, two = registry.enrol("one"), registry.enrol("two")
    announce(registry, one, url="http://[::ffff:10.0.0.21]:8081")
    assert list(registry.members()) == [HERE["url"]]
    assert status_of(registry, two, HERE) == 409


async def test_a_node_of_the_settings_keeps_its_place_and_its_key(tmp_path, monkeypatch, scripted):
    async with open_gateway(tmp_path, monkeypatch, URL(scripted.url).port, scripted) as opened:
        assert await opened.announce(url=scripted.url, api_key="stolen") == 200
        await asyncio.sleep(0.1)
        opened.registry.remove("one")
        await asyncio.sleep(0.1)
        assert (await opened.ask()).status == 200
    assert keys_given(scripted) == {"Bearer shared-key"}


async def test_what_is_no_node_gets_neither_prompts_nor_keys_and_no_redirect_is_followed(tmp_path, monkeypatch):
    seen = []

    async def take(request):
        seen.append((request.method, request.path, request.headers.get("Authorization")))
        raise web.HTTPTemporaryRedirect("/elsewhere")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", take)
    server = TestServer(app, host="127.0.0.1")
    async with server, open_gateway(tmp_path, monkeypatch, server.port) as opened:
        assert await opened.announce(url=str(server.make_url("")).rstrip("/")) == 200
        async with asyncio.timeout(20):
            while not seen:
                await asyncio.sleep(0.02)
        assert (await opened.ask()).status == 503
    assert {(method, key) for method, _, key in seen} == {("GET", None)}
    assert not any("elsewhere" in path for _, path, _ in seen)


async def test_announcements_are_refused_without_a_key_networks_or_bounds(fleet, scripted):
    assert (await fleet.http.post("/announce", json=HERE)).status == 401
    assert await fleet.announce(**HERE) == 403
    assert await fleet.announce(url=scripted.url, labels={"a": "x" * 9000}) == 413
    assert (await fleet.http.get("/announce")).status == 404
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


def test_nodes_are_enrolled_listed_and_ended_by_commands(registry, now, tmp_path, capsys):
    now[0] = time.time()

    def run(*words):
        status = main(["nodes", "--keys", str(tmp_path / "keys.db"), *words])
        return status, capsys.readouterr().out.strip()

    status, key = run("enrol", "one")
    assert (status, key[:8]) == (0, "npunode_")
    announce(registry, key, version="0.1.0", labels={"site": "berlin"})
    assert run("drain", "one") == (0, "")
    assert run("list")[1].split() == ["one", "drained", "http://10.0.0.21:8081", "0.1.0", "site=berlin"]
    assert run("resume", "one") == (0, "")
    assert run("list")[1].split()[1] == "live"
    assert run("remove", "one") == (0, "")
    assert run("list") == (0, "")
    assert run("remove", "one")[0] == 1
