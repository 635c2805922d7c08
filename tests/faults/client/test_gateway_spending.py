"""Spend caps of teams: shared by gateways, in a file and in a real Redis or Valkey, whatever fails in between."""

import asyncio
import contextlib
import signal
import sqlite3
import threading
from decimal import Decimal

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_client.errors import CloudUnavailable, ConfigurationError, SpendCapReached
from backend_client.gateway.keys import KeyFile, KeyStore, Team
from backend_client.gateway.spending import Spending, _InRedis
from tests.faults.client.test_gateway import CHAT, STREAM, gateway
from tests.faults.scripted_node import answering, error_response
from tests.support.gateway import started_store

NOVEMBER, DECEMBER = 1_795_500_000.0, 1_796_083_201.0
CAPPED = Team("capped", spend_cap=Decimal(1))


@pytest.fixture(scope="module")
def redis_server():
    with started_store() as found:
        yield found


@pytest.fixture(params=["file", "redis"])
async def shared(request, tmp_path):
    """Makes the spending of one gateway more."""
    url, files = "memory://", contextlib.ExitStack()
    if request.param == "redis":
        url, _ = request.getfixturevalue("redis_server")
        redis.Redis.from_url(url).flushall()
    made = []

    def make(clock=lambda: NOVEMBER):
        file = files.enter_context(contextlib.closing(KeyFile(tmp_path / "keys.db", patience_s=60)))
        made.append(Spending(url, file, lambda: None, clock, patience_s=60))
        return made[-1]

    with files:
        yield make
        for each in made:
            await each.close()


async def spent(spending):
    """What the capped team has spent this month."""
    return (await spending.spent([CAPPED]))["capped"][0]


async def test_two_gateways_never_spend_more_than_the_cap_together(shared):
    """Of 120 calls that may cost 0.03 each, sent at once by two gateways, 33 fit into a cap of 1."""
    gateways = [shared(), shared()]
    done = await asyncio.gather(
        *(gateways[index % 2].limit(CAPPED)(Decimal("0.03")) for index in range(120)), return_exceptions=True
    )
    settles = [each for each in done if callable(each)]
    assert len(settles) == 33
    assert all(isinstance(each, SpendCapReached) for each in done if not callable(each))
    assert await spent(shared()) == Decimal("0.99")
    for settle in settles:
        settle(Decimal("0.01"))
    for each in gateways:
        await each.close()
    assert await spent(shared()) == Decimal("0.33")


@settings(max_examples=20, deadline=None)
@given(calls=st.lists(st.tuples(st.integers(0, 700_000), st.integers(-900_000, 900_000)), max_size=12))
def test_what_is_held_is_what_the_calls_did_cost(tmp_path_factory, calls):
    """Against plain sums of whole millionths; a cost below nothing or above what was reserved moves no cap."""

    async def run():
        file = KeyFile(tmp_path_factory.mktemp("spent") / "keys.db")
        spending = Spending("memory://", file, lambda: None, lambda: NOVEMBER, patience_s=60)
        held = 0
        for most, cost in calls:
            try:
                settle = await spending.limit(CAPPED)(Decimal(most) / 1_000_000)
            except SpendCapReached:
                assert held + most > 1_000_000
                continue
            assert held + most <= 1_000_000
            settle(Decimal(cost) / 1_000_000)
            held += min(most, max(0, cost))
            await spending._settling
            assert (await spending.spent([CAPPED]))["capped"][0] == Decimal(held) / 1_000_000
        await spending.close()
        file.close()

    asyncio.run(run())


async def test_each_month_has_its_own_cap_and_gives_back_to_the_month_that_paid(shared):
    now = [NOVEMBER]
    spending = shared(lambda: now[0])
    settle = await spending.limit(CAPPED)(Decimal(1))
    with pytest.raises(
        SpendCapReached, match="of capped's spend cap of 1 a month 0 is left; the next month begins on 2026-12-01"
    ):
        await spending.limit(CAPPED)(Decimal("0.000001"))
    now[0] = DECEMBER
    await spending.limit(CAPPED)(Decimal("0.5"))
    settle(Decimal(0))
    await spending.close()
    assert await spent(shared(lambda: DECEMBER)) == Decimal("0.5")
    assert await spent(shared(lambda: NOVEMBER)) == 0


async def test_a_caller_who_leaves_while_the_store_is_asked_reserves_nothing(shared):
    """What one caller left may still be held while the next asks: each may cost a twelfth of the cap."""
    spending = shared()
    for turns in range(12):
        task = asyncio.create_task(spending.limit(CAPPED)(Decimal("0.08")))
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            (await task)(Decimal(0))
    await spending.close()
    assert await spent(shared()) == 0


async def test_a_caller_who_leaves_while_others_are_written_reserves_nothing_later(tmp_path):
    with contextlib.closing(KeyFile(tmp_path / "keys.db", patience_s=60)) as file:
        spending = Spending("memory://", file, lambda: None, lambda: NOVEMBER, patience_s=60)
        written = threading.Event()
        slow = asyncio.create_task(file.run(written.wait))
        first, left = (asyncio.create_task(spending.limit(CAPPED)(Decimal("0.1"))) for _ in range(2))
        await turns_of_the_loop()
        late = asyncio.create_task(spending.limit(CAPPED)(Decimal("0.1")))
        await turns_of_the_loop()
        late.cancel()
        await turns_of_the_loop()
        written.set()
        await slow
        for task in (first, left):
            (await task)(Decimal(0))
        await spending.close()
        assert await spent(spending) == 0


async def turns_of_the_loop():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_an_emptied_store_holds_nothing_and_not_less(redis_server):
    url, _ = redis_server
    spending = Spending(url, None, lambda: None, lambda: NOVEMBER, patience_s=60)
    settle = await spending.limit(CAPPED)(Decimal(1))
    redis.Redis.from_url(url).flushall()
    settle(Decimal(0))
    await spending._settling
    await spending.limit(CAPPED)(Decimal(1))
    with pytest.raises(SpendCapReached):
        await spending.limit(CAPPED)(Decimal(1))
    await spending.close()


async def test_a_file_that_others_hold_refuses_all_who_wait_for_it_at_once(tmp_path):
    """One after the other, 200 waits of a quarter of a second would last 50 s."""
    file = KeyFile(tmp_path / "keys.db", patience_s=0.25)
    spending = Spending("memory://", file, lambda: None, lambda: NOVEMBER, patience_s=60)
    with contextlib.closing(sqlite3.connect(tmp_path / "keys.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with asyncio.timeout(25):
            calls = (spending.limit(CAPPED)(Decimal("0.001")) for _ in range(200))
            refused = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(each) for each in refused} == {CloudUnavailable}
        other.execute("ROLLBACK")
    await spending.close()
    assert await spent(spending) == 0
    file.close()


async def test_a_frozen_store_refuses_the_cloud_and_charges_nothing_once_it_answers(redis_server):
    """The store has the refused reservations in its sockets, and carries them out when it goes on."""
    url, process = redis_server
    redis.Redis.from_url(url).flushall()
    failures = []
    spending = Spending(url, None, lambda: failures.append(1), lambda: NOVEMBER, patience_s=60)
    settle = await spending.limit(CAPPED)(Decimal("0.5"))
    process.send_signal(signal.SIGSTOP)
    try:
        frozen = Spending(url, None, lambda: failures.append(1), lambda: NOVEMBER)
        calls = (frozen.limit(CAPPED)(Decimal("0.1")) for _ in range(5))
        refused = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(each) for each in refused} == {CloudUnavailable}
        assert all("the store of the spend caps fails" in each.message for each in refused)
        assert len(failures) == 5
        with pytest.raises(OSError, match="the store"):
            await frozen.spent([CAPPED])
        settle(Decimal("0.2"))
    finally:
        process.send_signal(signal.SIGCONT)
    async with asyncio.timeout(60):
        await frozen._settling
        await spending._settling
    assert await spent(spending) == Decimal("0.2")
    for each in (frozen, spending):
        await each.close()


async def test_a_reservation_that_arrives_after_it_was_given_back_is_not_made(redis_server):
    url, _ = redis_server
    redis.Redis.from_url(url).flushall()
    store = _InRedis(url, 60)
    await store.settle({"late": ("account", 0)})
    assert await store.reserve("account", "late", 5, 100) == (False, 0)
    assert await store.reserve("account", "once", 5, 100) == (True, 0)
    for _ in range(2):
        await store.settle({"once": ("account", 2)})
    assert await store.total("account") == 2
    await store.close()


async def test_small_costs_sum_exactly(shared):
    spending = shared()
    for _ in range(20):
        (await spending.limit(CAPPED)(Decimal("0.0001")))(Decimal("0.0000001"))
    await spending._settling
    assert await spent(spending) == Decimal("0.000002")


async def test_a_large_cap_is_counted_exactly(shared):
    spending, large = shared(), Team("capped", spend_cap=Decimal(999_999_999))
    for cost in ("900000000.000000001", "0.000000001"):
        settle = await spending.limit(large)(Decimal(cost))
        settle(Decimal(cost))
    with pytest.raises(SpendCapReached):
        await spending.limit(large)(Decimal("1e30"))
    await spending._settling
    assert await spent(spending) == Decimal("900000000.000000002")


def prices():
    return {"cloud-chat": {"input": 1000, "output": 1000}, "cloud-minilm": {"input": 1000}}


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_a_team_at_its_cap_has_nodes_only(scripted, cloud, tmp_path, body):
    """One answer of the scripted cloud costs 18 tokens at 0.001."""
    keys = KeyStore(tmp_path / "keys.db")
    capped, free = keys.add("capped", spend_cap=Decimal("1.2")), keys.add("free")
    keys.close()
    sent = {**body, "max_tokens": 20}

    async def ask(http, key):
        reply = await http.post("/v1/chat/completions", json=sent, headers={"x-api-key": key})
        return reply.status, reply.headers.get("X-NPU-Gateway-Source"), await reply.text()

    scripted.respond = answering(lambda: error_response(503, "draining"))
    async with gateway(scripted, cloud=cloud, cloud_prices=prices(), keys=tmp_path / "keys.db") as http:
        answers = [await ask(http, capped)]
        while answers[-1][0] == 200 and len(answers) < 100:
            answers.append(await ask(http, capped))
        served = len(answers) - 1
        assert 1 <= served <= 66, "1.2 at 0.018 each, and each may cost more than it does"
        assert len(cloud.requests) == served
        assert answers[-1][0] == 402
        assert "spend_cap_reached" in answers[-1][2]
        assert "capped's spend cap of 1.2 a month" in answers[-1][2]
        assert (await ask(http, free))[:2] == (200, "cloud")
        metrics = await (await http.get("/metrics", headers={"x-api-key": free})).text()
        ratio = next(line for line in metrics.splitlines() if line.startswith('npu_gateway_spend_ratio{team="capped"}'))
        assert float(ratio.split()[1]) == pytest.approx(served * 0.018 / 1.2)
        scripted.respond = None
        # The scripted node streams every chat.
        sent["stream"] = True
        async with asyncio.timeout(30):
            while (await ask(http, capped))[:2] != (200, "node"):
                await asyncio.sleep(0.05)
        assert len(cloud.requests) == served + 1


async def test_what_no_bound_holds_and_what_has_no_price_is_refused_to_a_capped_team(scripted, cloud, tmp_path):
    keys = KeyStore(tmp_path / "keys.db")
    capped = keys.add("capped", spend_cap=Decimal(1000))
    keys.close()
    scripted.respond = answering(lambda: error_response(503, "draining"))
    for prices_of, body, status, message in (
        (prices(), {**CHAT, "web_search_options": {}}, 503, "cannot bound what web_search_options costs"),
        ({}, CHAT, 402, "cloud.prices lacks cloud-chat"),
    ):
        async with gateway(scripted, cloud=cloud, cloud_prices=prices_of, keys=tmp_path / "keys.db") as http:
            reply = await http.post("/v1/chat/completions", json=body, headers={"x-api-key": capped})
            assert reply.status == status
            assert message in await reply.text()
    assert not cloud.requests


async def test_a_store_that_is_down_refuses_the_cloud_and_serves_from_nodes(scripted, cloud, tmp_path):
    keys = KeyStore(tmp_path / "keys.db")
    capped = {"x-api-key": keys.add("capped", spend_cap=Decimal(1000))}
    keys.close()
    values = {"keys": tmp_path / "keys.db", "store": "redis://127.0.0.1:1"}
    async with gateway(scripted, cloud=cloud, cloud_prices=prices(), **values) as http:
        assert (await http.post("/v1/chat/completions", json=STREAM, headers=capped)).status == 200
        scripted.respond = answering(lambda: error_response(503, "draining"))
        reply = await http.post("/v1/chat/completions", json=STREAM, headers=capped)
        assert reply.status == 503
        assert "the store of the spend caps fails" in await reply.text()
        assert not cloud.requests
        metrics = await (await http.get("/metrics", headers=capped)).text()
        assert "npu_gateway_store_failures_total 1.0" in metrics


@pytest.mark.parametrize("cap", ["-1", "NaN", "Infinity", "1e12"])
def test_a_cap_is_an_amount(tmp_path, cap):
    keys = KeyStore(tmp_path / "keys.db")
    with pytest.raises(ConfigurationError, match="a spend cap must be an amount from 0 to 999999999"):
        keys.add("team", spend_cap=Decimal(cap))
    keys.close()


async def test_a_request_that_the_cloud_refuses_costs_nothing(scripted, cloud, tmp_path):
    keys = KeyStore(tmp_path / "keys.db")
    capped = {"x-api-key": keys.add("capped", spend_cap=Decimal(1000))}
    keys.close()
    scripted.respond = answering(lambda: error_response(503, "draining"))
    cloud.respond = answering(lambda: error_response(400, "no"))
    async with gateway(scripted, cloud=cloud, cloud_prices=prices(), keys=tmp_path / "keys.db") as http:
        assert (await http.post("/v1/chat/completions", json=CHAT, headers=capped)).status == 400
        metrics = await (await http.get("/metrics", headers=capped)).text()
        assert 'npu_gateway_spend_ratio{team="capped"} 0.0' in metrics


async def test_what_a_team_may_not_spend_does_not_count_for_the_process(scripted, cloud, tmp_path):
    """The process has a cap of its own, which fits one of these calls."""
    keys = KeyStore(tmp_path / "keys.db")
    poor = {"x-api-key": keys.add("poor", spend_cap=Decimal("0.01"))}
    rich = {"x-api-key": keys.add("rich", spend_cap=Decimal(1000))}
    keys.close()
    scripted.respond = answering(lambda: error_response(503, "draining"))
    values = {"keys": tmp_path / "keys.db", "spend_cap": 2}
    async with gateway(scripted, cloud=cloud, cloud_prices=prices(), **values) as http:
        for _ in range(5):
            assert (await http.post("/v1/chat/completions", json=CHAT, headers=poor)).status == 402
        assert (await http.post("/v1/chat/completions", json=CHAT, headers=rich)).status == 200
