"""The gateway's pages: who sees which teams, what is counted, and nodes that are asked once for all who look."""

import asyncio
import base64
import hashlib

import pytest
from prometheus_client import CollectorRegistry, Counter

from backend_client.gateway.keys import KeyEntry, KeyStore, Team
from backend_client.gateway.page import SharedState, teams_shown, usage_by_team
from backend_client.testing.node import WRITER
from tests.faults.client.gateways import asked, gateway, made_keys, metrics_of


def as_holder(key):
    return {"Authorization": f"Bearer {key}"}


async def state_of(http, key=None):
    async with http.get("/dashboard/state", headers=as_holder(key) if key else {}) as reply:
        assert reply.status == 200
        assert reply.headers["Cache-Control"] == "no-store"
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        return await reply.json()


@pytest.mark.parametrize("path", ["/dashboard", "/play"])
async def test_the_pages_are_open_and_run_their_own_script_alone(scripted, tmp_path, path):
    KeyStore(tmp_path / "keys.db").close()
    async with gateway(scripted, keys=tmp_path / "keys.db") as http:
        reply = await http.get(path)
        text, policy = await reply.text(), reply.headers["Content-Security-Policy"]
        assert (reply.status, reply.content_type) == (200, "text/html")
        script = text.partition("<script>")[2].partition("</script>")[0]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in policy
        assert "frame-ancestors 'none'" in policy
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert 'data-server="gateway"' in text
        for method in (http.post, http.delete):
            assert (await method(path)).status == 401


async def test_the_state_needs_a_key_and_a_team_sees_the_fleet_and_itself(pair, tmp_path):
    file = tmp_path / "keys.db"
    (ours,) = made_keys(file, "ours", models=[WRITER], requests=60)
    (other, _idle), (boss,) = made_keys(file, "other", "idle", cloud=False), made_keys(file, "boss", admin=True)
    async with gateway(*pair, keys=file) as http:
        for headers in ({}, as_holder("npugw_x"), as_holder(ours[:-1])):
            reply = await http.get("/dashboard/state", headers=headers)
            assert reply.status == 401
            assert "nodes" not in await reply.text()
        for _ in range(3):
            await asked(http, other)
        assert (await asked(http, ours, [])).status == 400
        state = await state_of(http, ours)
        assert state["kind"] == "fleet"
        assert [node["url"] for node in state["nodes"]] == [node.url for node in pair]
        told = state["gateway"]
        assert (told["team"], told["admin"], told["cloud"]) == ("ours", False, "none")
        (team,) = told["teams"]
        assert team["used"] == {"requests": 1, "refused": 1, "failed": 0, "prompt": 0, "completion": 0}
        rights = {"models": [WRITER], "cloud": True, "admin": False, "requests": 60, "tokens": 0, "spend_cap": None}
        assert team["keys"] == [{"prefix": ours.split("_")[1], **rights, "until": None, "ended": False}]
        assert ours.split("_", 2)[2] not in str(state)
        told = (await state_of(http, boss))["gateway"]
        assert told["admin"]
        found = {team["team"]: team for team in told["teams"]}
        assert found.keys() >= {"ours", "other", "idle"}
        assert found["idle"]["used"] is None
        assert found["other"]["used"]["requests"] == 3
        assert found["other"]["used"]["completion"] > 0
        assert not found["other"]["keys"][0]["cloud"]


async def test_looking_is_no_use_of_the_fleet_but_a_wrong_key_is_counted(scripted, tmp_path):
    (key,) = made_keys(tmp_path / "keys.db", "ours", requests=1)
    async with gateway(scripted, keys=tmp_path / "keys.db") as http:
        for _ in range(3):
            assert (await state_of(http, key))["gateway"]["teams"][0]["used"] is None
        assert (await http.get("/dashboard/state")).status == 401
        assert 'status="401",team="anybody"} 1.0' in await metrics_of(http, key)
    assert not [request for request in scripted.requests if request.path != "/dashboard/state"]


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}])
async def test_without_keys_all_of_this_machine_see_it_and_no_other_site(scripted, headers):
    async with gateway(scripted) as http:
        for path in ("/dashboard", "/play", "/dashboard/state", "/v1/models"):
            assert (await http.get(path, headers=headers)).status == 403, path
        await asked(http)
        told = (await state_of(http))["gateway"]
        assert (told["team"], told["admin"]) == (None, True)
        (team,) = told["teams"]
        assert (team["team"], team["keys"]) == ("anybody", [])
        assert team["used"]["completion"] > 0


async def test_nodes_are_asked_once_for_all_who_look_and_again_after_a_period():
    now, looks, answer = [100.0], [], asyncio.Event()

    async def look():
        looks.append(now[0])
        await answer.wait()
        now[0] += 5.0 if len(looks) == 2 else 0.0
        return {"look": len(looks)}

    shared = SharedState(look, clock=lambda: now[0])
    leaving, staying, third = (asyncio.create_task(shared.get()) for _ in range(3))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    answer.set()
    # Another look, as the first one went with who had asked for it; one that takes long is not doubled.
    assert [await staying, await third] == [{"look": 2}] * 2
    assert await shared.get() == {"look": 3}
    now[0] += 0.5
    assert await shared.get() == {"look": 3}
    now[0] += 0.5
    assert await shared.get() == {"look": 4}


def entry(prefix, team, until=None):
    return KeyEntry(prefix, team, until)


def test_a_team_keeps_its_row_when_its_keys_ended_or_are_gone():
    registry = CollectorRegistry()
    requests = Counter("requests", "", ("dialect", "team", "status"), registry=registry)
    tokens = Counter("tokens", "", ("team", "kind"), registry=registry)
    for dialect, status, count in (
        ("openai", "200", 3),
        ("ollama", "200", 2),
        ("openai", "429", 4),
        ("openai", "503", 1),
    ):
        requests.labels(dialect, "gone", status).inc(count)
    tokens.labels("gone", "prompt").inc(7)
    usage = usage_by_team(requests, tokens)
    assert usage == {"gone": {"requests": 10, "refused": 4, "failed": 1, "prompt": 7, "completion": 0}}
    team = Team("here")
    entries = [entry("aa", team, until=50.0), entry("bb", team, until=150.0), entry("cc", team)]
    gone, here = teams_shown(Team("boss", admin=True), entries, usage, now=100.0)
    assert (gone["team"], gone["keys"]) == ("gone", [])
    assert [(key["prefix"], key["ended"]) for key in here["keys"]] == [("aa", True), ("bb", False), ("cc", False)]
    assert [row["team"] for row in teams_shown(team, entries, usage, now=100.0)] == ["here"]
    assert teams_shown(Team("new"), entries, usage, now=100.0) == []
