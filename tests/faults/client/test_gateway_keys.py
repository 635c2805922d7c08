"""The gateway's file of keys while it is locked, replaced or missing, and the limits that the keys of a team share."""

import asyncio
import contextlib
import sqlite3

import pytest

from backend_client.errors import ConfigurationError
from backend_client.gateway import keys as gateway_keys
from backend_client.gateway.keys import KeyStore, Team
from backend_client.gateway.limits import Limits, Refusal
from tests.faults.client.test_gateway import STREAM, gateway


def made_keys(path, *names):
    with contextlib.closing(KeyStore(path)) as store:
        return [store.add(name) for name in names]


async def status_with(http, key):
    async with http.post("/v1/chat/completions", json=STREAM, headers={"x-api-key": key}) as reply:
        await reply.read()
        return reply.status


async def test_requests_are_served_while_another_process_locks_the_file(scripted, tmp_path):
    file = tmp_path / "keys.db"
    (key,) = made_keys(file, "team")
    async with gateway(scripted, keys=file, allowed_networks="127.0.0.0/8") as http:
        assert await status_with(http, key) == 200
        with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            statuses = await asyncio.gather(*(status_with(http, key) for _ in range(20)))
            assert set(statuses) == {200}
            assert await status_with(http, "npugw_" + "0" * 12 + "_" + "a" * 43) == 503, "it may have been made since"
            node = {"Authorization": f"Bearer {key}"}
            assert (await http.post("/announce", json={"url": "http://127.0.0.1:1"}, headers=node)).status == 503
            other.execute("ROLLBACK")
        with contextlib.closing(KeyStore(file)) as store:
            store.revoke(key.split("_")[1])
        async with asyncio.timeout(30):
            while await status_with(http, key) != 401:
                await asyncio.sleep(0.05)


async def test_a_file_that_replaces_the_keys_counts_from_the_next_request(scripted, tmp_path):
    file, other = tmp_path / "keys.db", tmp_path / "other" / "keys.db"
    other.parent.mkdir()
    (old,), (new,) = made_keys(file, "old"), made_keys(other, "new")
    async with gateway(scripted, keys=file) as http:
        assert [await status_with(http, key) for key in (old, new)] == [200, 401]
        for name in ("keys.db.secret", "keys.db"):
            (other.parent / name).replace(file.parent / name)
        assert [await status_with(http, key) for key in (old, new)] == [401, 200]


async def test_the_keys_that_were_read_last_count_for_some_minutes_without_their_file(scripted, tmp_path, monkeypatch):
    file = tmp_path / "keys.db"
    (key,) = made_keys(file, "team")
    async with gateway(scripted, keys=file) as http:
        assert await status_with(http, key) == 200
        file.unlink()
        assert await status_with(http, key) == 200
        assert not file.exists()
        monkeypatch.setattr(gateway_keys, "STALE_S", -1.0)
        assert await status_with(http, key) == 503


def test_no_new_secret_is_made_beside_existing_keys(tmp_path):
    made_keys(tmp_path / "keys.db", "team")
    (tmp_path / "keys.db.secret").unlink()
    with pytest.raises(ConfigurationError, match=r"cannot be used: .*keys\.db\.secret"):
        KeyStore(tmp_path / "keys.db")
    assert not (tmp_path / "keys.db.secret").exists()


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
    with pytest.raises(Refusal, match="may use 2 requests a minute"):
        await limits.admit(low)
    await limits.used(low, 50)
    with pytest.raises(Refusal, match="may use 10 tokens a minute"):
        await limits.admit(low)
    await limits.admit(high)
    await limits.used(low, 60)
    with pytest.raises(Refusal, match="may use 100 tokens a minute"):
        await limits.admit(high)
