"""The gateway's file of keys while it is locked, replaced or missing, and the limits that the keys of a team share."""

import asyncio
import contextlib
import json
import re
import sqlite3
from functools import partial

import aiohttp
import pytest
import redis
from aiohttp import web
from limits.aio.strategies import SlidingWindowCounterRateLimiter

from backend_client.errors import ConfigurationError
from backend_client.gateway import cli as gateway_cli
from backend_client.gateway import keys as gateway_keys
from backend_client.gateway import limits as gateway_limits
from backend_client.gateway.keys import KeyStore, Team
from backend_client.gateway.limits import Limits
from backend_client.http.errors import Problem
from backend_client.http.replies import TokenCount, asking_for_usage, tokens_of_prompt
from backend_client.results import Usage
from backend_client.testing.node import EMBEDDER, route_headers
from tests.faults.client.gateways import (
    CHAT,
    CHAT_PATH,
    STREAM,
    asked,
    draining,
    gateway,
    made_keys,
    metrics_of,
    streaming,
)
from tests.faults.scripted_node import answering
from tests.support.gateway import started_store


async def test_requests_are_served_while_another_process_locks_the_file(scripted, tmp_path):
    file = tmp_path / "keys.db"
    (key,) = made_keys(file, "team")
    async with gateway(scripted, keys=file, allowed_networks="127.0.0.0/8") as http:
        assert (await asked(http, key)).status == 200
        with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            replies = await asyncio.gather(*(asked(http, key) for _ in range(20)))
            assert {reply.status for reply in replies} == {200}
            assert (await asked(http, "npugw_" + "0" * 12 + "_" + "a" * 43)).status == 503, (
                "it may have been made since"
            )
            node = {"Authorization": f"Bearer {key}"}
            assert (await http.post("/announce", json={"url": "http://127.0.0.1:1"}, headers=node)).status == 503
            other.execute("ROLLBACK")
        with contextlib.closing(KeyStore(file)) as store:
            store.revoke(key.split("_")[1])
        async with asyncio.timeout(30):
            while (await asked(http, key)).status != 401:
                await asyncio.sleep(0.05)


async def test_a_file_that_replaces_the_keys_counts_from_the_next_request(scripted, tmp_path):
    file, other = tmp_path / "keys.db", tmp_path / "other" / "keys.db"
    other.parent.mkdir()
    (old,), (new,) = made_keys(file, "old"), made_keys(other, "new")
    async with gateway(scripted, keys=file) as http:
        assert [(await asked(http, key)).status for key in (old, new)] == [200, 401]
        for name in ("keys.db.secret", "keys.db"):
            (other.parent / name).replace(file.parent / name)
        assert [(await asked(http, key)).status for key in (old, new)] == [401, 200]


async def test_the_keys_that_were_read_last_count_for_some_minutes_without_their_file(scripted, tmp_path, monkeypatch):
    file = tmp_path / "keys.db"
    (key,) = made_keys(file, "team")
    async with gateway(scripted, keys=file) as http:
        assert (await asked(http, key)).status == 200
        file.unlink()
        assert (await asked(http, key)).status == 200
        assert not file.exists()
        monkeypatch.setattr(gateway_keys, "STALE_S", -1.0)
        assert (await asked(http, key)).status == 503


def test_no_new_secret_is_made_beside_existing_keys(tmp_path):
    made_keys(tmp_path / "keys.db", "team")
    (tmp_path / "keys.db.secret").unlink()
    with pytest.raises(ConfigurationError, match=r"cannot be used: .*keys\.db\.secret"):
        KeyStore(tmp_path / "keys.db")
    assert not (tmp_path / "keys.db.secret").exists()


@pytest.mark.parametrize("words", [["serve"], ["keys", "list"], ["nodes", "list"]])
def test_every_command_says_which_packages_are_missing(words, monkeypatch, capsys):
    monkeypatch.setattr(gateway_cli, "_PACKAGES", ("redis", "no_such_package"))
    assert gateway_cli.main(words) == 1
    said = "npu-gateway: the gateway needs more packages (no_such_package): pip install '.[gateway]'"
    assert capsys.readouterr().err.startswith(said)


def test_a_command_says_that_the_file_is_locked(tmp_path, monkeypatch, capsys):
    made_keys(tmp_path / "keys.db", "team")
    monkeypatch.setattr(gateway_cli, "KeyStore", partial(KeyStore, patience_s=0.01))
    with contextlib.closing(sqlite3.connect(tmp_path / "keys.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert gateway_cli.main(["keys", "--keys", str(tmp_path / "keys.db"), "add", "other"]) == 1
    assert capsys.readouterr().err == "npu-gateway: the file of the keys cannot be used: database is locked\n"


def test_a_file_of_another_version_is_refused(tmp_path):
    made_keys(tmp_path / "keys.db", "team")
    with contextlib.closing(sqlite3.connect(tmp_path / "keys.db")) as file:
        file.execute("PRAGMA user_version = 1")
    with pytest.raises(ConfigurationError, match="made by another version; move it away"):
        KeyStore(tmp_path / "keys.db")


async def test_the_keys_of_a_team_share_one_count_whatever_their_limits():
    limits = Limits("memory://", lambda: None)
    low, high = Team("team", requests=2, tokens=10), Team("team", requests=5, tokens=100)
    await limits.admit(high)
    await limits.admit(low)
    with pytest.raises(Problem, match="may use 2 requests a minute"):
        await limits.admit(low)
    await limits.used(low, 50)
    with pytest.raises(Problem, match="may use 10 tokens a minute"):
        await limits.admit(low)
    await limits.admit(high)
    await limits.used(low, 60)
    with pytest.raises(Problem, match="may use 100 tokens a minute"):
        await limits.admit(high)


async def test_no_request_waits_for_a_store_of_limits_that_hangs_but_the_one_that_tries_it(monkeypatch):
    failures, asked = [], []

    async def hang(*_):
        asked.append(1)
        await asyncio.Event().wait()

    monkeypatch.setattr(gateway_limits, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(gateway_limits, "_PAUSE_S", 3600.0)
    limits, team = Limits("memory://", lambda: failures.append(1)), Team("team", requests=1)
    with monkeypatch.context() as hanging:
        hanging.setattr(SlidingWindowCounterRateLimiter, "hit", hang)
        for _ in range(20):
            await limits.admit(team)
    assert (len(asked), len(failures)) == (1, 20)
    limits._guard._next_try = 0.0
    await limits.admit(team)
    with pytest.raises(Problem):
        await limits.admit(team)


async def test_a_gateway_that_ends_leaves_no_connection_to_its_store(scripted, tmp_path):
    (key,) = made_keys(tmp_path / "keys.db", "team", requests=9)
    with started_store() as (url, _), contextlib.closing(redis.Redis.from_url(url)) as watcher:
        async with gateway(scripted, keys=tmp_path / "keys.db", store=url) as http:
            assert (await asked(http, key)).status == 200
            assert len(watcher.client_list()) > 1
        async with asyncio.timeout(20):
            while len(watcher.client_list()) > 1:
                await asyncio.sleep(0.02)


async def until_counted(http, key, tokens):
    """The tokens of prompts and answers are these."""

    async def counted(kind):
        lines = (await metrics_of(http, key)).splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith(f'npu_gateway_tokens_total{{kind="{kind}"')
        )

    async with asyncio.timeout(30):
        while (await counted("prompt"), await counted("completion")) != tokens:
            await asyncio.sleep(0.02)


def chunk(text, **more):
    """As nodes write it where the usage was asked for; `more` comes after it."""
    delta = {"index": 0, "delta": {"content": text}, "finish_reason": None if text else "stop"}
    fields = {"object": "chat.completion.chunk", "choices": [delta], "usage": None, **more}
    return f"data: {json.dumps(fields, separators=(',', ':'))}\n\n".encode()


async def stream_of(request):
    """A stream of a node: with the usage, and without the field, if it was not asked for."""
    with_usage = ((await request.json()).get("stream_options") or {}).get("include_usage")
    parts = [chunk("Hi "), chunk('"usage":null,"usage":null'), chunk("", npu_busy_delta_us=5)]
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":20,"completion_tokens":9}}\n\n'
    parts = [*parts, usage] if with_usage else [part.replace(b',"usage":null', b"") for part in parts]
    return await streaming(b"".join([*parts, b"data: [DONE]\n\n"]))(request)


@pytest.mark.parametrize(
    "options",
    [{}, {"stream_options": None}, *({"stream_options": {"include_usage": asked}} for asked in (False, True))],
)
async def test_a_stream_comes_as_it_was_sent_and_counts_whether_or_not_its_usage_was_asked_for(
    scripted, tmp_path, options
):
    (key,) = made_keys(tmp_path / "keys.db", "team")
    scripted.respond = stream_of
    async with gateway(scripted, keys=tmp_path / "keys.db") as http, aiohttp.ClientSession() as direct:
        reply = await http.post(CHAT_PATH, json=STREAM | options, headers={"x-api-key": key})
        as_sent = await direct.post(f"{scripted.url}/v1/chat/completions", json=STREAM | options)
        assert reply.headers["Content-Type"] == as_sent.headers["Content-Type"]
        assert await reply.read() == await as_sent.read()
        await until_counted(http, key, (20.0, 9.0))
        metrics = await metrics_of(http, key)
        assert 'npu_client_served_calls_total{source="node"} 1.0' in metrics
        assert 'npu_gateway_requests_total{dialect="openai",status="200",team="team"}' in metrics
        assert re.search(r'^gen_ai_client_operation_duration_seconds_count{.*source="node"} 1.0', metrics, re.MULTILINE)


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("/api/embeddings", {"prompt": "text"}, {"embedding": [1.0] * 8}),
        ("/v1/embeddings", {"input": "text"}, {"data": [{"index": 0, "embedding": [1.0] * 8}]}),
    ],
)
async def test_tokens_that_only_the_head_of_a_reply_names_count(scripted, tmp_path, path, body, answer):
    (key,) = made_keys(tmp_path / "keys.db", "team")
    headers = {**route_headers(EMBEDDER), "X-Space": "space-a", "X-NPU-Node-Token-Count": "7"}
    scripted.respond = answering(lambda: web.json_response(answer, headers=headers))
    async with gateway(scripted, keys=tmp_path / "keys.db") as http:
        reply = await http.post(path, json={"model": EMBEDDER, **body}, headers={"x-api-key": key})
        assert reply.status == 200
        await until_counted(http, key, (7.0, 0.0))


async def test_a_stream_that_its_caller_leaves_counts_its_prompt_and_what_was_passed_on(scripted, tmp_path):
    (key,) = made_keys(tmp_path / "keys.db", "team")
    scripted.respond = streaming(chunk("Hi ") * 3, asyncio.Event().wait, **{"X-NPU-Node-Token-Count": "100"})
    async with gateway(scripted, keys=tmp_path / "keys.db") as http:
        async with http.post(CHAT_PATH, json=STREAM, headers={"x-api-key": key}) as reply:
            for _ in range(6):
                await reply.content.readline()
            reply.close()
        await until_counted(http, key, (100.0, 3.0))


async def test_a_stream_of_the_cloud_counts_also_when_its_caller_leaves(scripted, cloud, tmp_path):
    (key,) = made_keys(tmp_path / "keys.db", "team")
    scripted.respond = draining
    async with gateway(scripted, cloud=cloud, keys=tmp_path / "keys.db") as http:
        usage = (await (await asked(http, key, CHAT)).json())["usage"]
        said = usage["prompt_tokens"], usage["completion_tokens"]
        assert "usage" not in await (await asked(http, key)).text()
        await until_counted(http, key, (said[0] * 2, said[1] * 2))


def test_what_asks_for_the_usage_leaves_the_rest_of_a_body_as_it_is():
    sent = b'{ "stream" : true, "odd": 1.50 } \n'
    assert asking(CHAT_PATH, sent) == b'{ "stream" : true, "odd": 1.50 ,"stream_options": {"include_usage": true}}'
    assert asking("/api/chat", sent) == sent
    assert asking("/v1/completions", b'{"stream": false}') == b'{"stream": false}'
    asked = {"stream": True, "stream_options": {"include_usage": True, "a": 1}}
    for options in ({"a": 1}, {"a": 1, "include_usage": None}):
        given = json.dumps({"stream": True, "stream_options": options}).encode()
        assert json.loads(asking("/v1/completions", given)) == asked
    wide = json.dumps({"stream": True}).encode("utf-16")
    assert json.loads(asking("/v1/completions", wide)) == {"stream": True, "stream_options": {"include_usage": True}}
    wrong = b'{"stream": true, "stream_options": [1]}'
    assert asking("/v1/completions", wrong) == wrong


def asking(path, content):
    return asking_for_usage(path, json.loads(content), content)


@pytest.mark.parametrize("content", ["x" * 400, [{"type": "text", "text": "x" * 400}, 5, {"type": "image_url"}]])
def test_what_the_cloud_has_not_said_yet_is_estimated(content):
    count = TokenCount(tokens_of_prompt({"messages": [{"content": content}, 5]}))
    for text in ("Hi", "y" * 40):
        count.write(text)
    assert count.usage == Usage(100, 11)
