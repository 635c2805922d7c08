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
from backend_client.gateway.keys import KeyFile, Team
from backend_client.gateway.spending import Spending, _InRedis
from tests.faults.client.gateways import CHAT, STREAM, asked, draining, gateway, made_keys, metrics_of
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
        # Each commit would wait for the disk.
        file.rows("PRAGMA synchronous = OFF")
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


@pytest.mark.parametrize(
    ("cap", "most", "cost", "calls", "total"),
    [
        (1, "0.0001", "0.0000001", 20, "0.000002"),
        (999_999_999, "300000000.000000001", "300000000.000000001", 3, "900000000.000000003"),
    ],
)
async def test_small_and_large_costs_sum_exactly(shared, cap, most, cost, calls, total):
    spending, team = shared(), Team("capped", spend_cap=Decimal(cap))
    for _ in range(calls):
        (await spending.limit(team)(Decimal(most)))(Decimal(cost))
    with pytest.raises(SpendCapReached):
        await spending.limit(team)(Decimal("1e30"))
    await spending._settling
    assert await spent(spending) == Decimal(total)


PRICES = {"cloud-chat": {"input": 1000, "output": 1000}, "cloud-minilm": {"input": 1000}}


@pytest.fixture
def capped(scripted, cloud, tmp_path):
    """Makes a gateway without nodes that serve, and keys of teams with these caps; None is no cap."""
    scripted.respond = draining

    @contextlib.asynccontextmanager
    async def opened(*caps, prices=PRICES, **values):
        keys = [made_keys(tmp_path / "keys.db", f"team-{cap}", spend_cap=cap and Decimal(cap))[0] for cap in caps]
        async with gateway(scripted, cloud=cloud, cloud_prices=prices, keys=tmp_path / "keys.db", **values) as http:
            yield http, *keys

    return opened


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_a_team_at_its_cap_has_nodes_only(scripted, cloud, capped, body):
    """One answer of the scripted cloud costs 18 tokens at 0.001."""
    sent = {**body, "max_tokens": 20}
    async with capped("0.3", None) as (http, poor, free):
        served = 0
        while (reply := await asked(http, poor, sent)).status == 200:
            served += 1
        assert 1 <= served <= 16, "0.3 at 0.018 each, and each may cost more than it does"
        assert len(cloud.requests) == served
        assert reply.status == 402
        assert "spend_cap_reached" in await reply.text()
        assert "team-0.3's spend cap of 0.3 a month" in await reply.text()
        reply = await asked(http, free, sent)
        assert (reply.status, reply.headers["X-NPU-Gateway-Source"]) == (200, "cloud")
        lines = (await metrics_of(http, free)).splitlines()
        ratio = next(line for line in lines if line.startswith('npu_gateway_spend_ratio{team="team-0.3"}'))
        assert float(ratio.split()[1]) == pytest.approx(served * 0.018 / 0.3)
        scripted.respond = None
        # The scripted node streams every chat.
        sent["stream"] = True
        async with asyncio.timeout(30):
            while (await asked(http, poor, sent)).headers.get("X-NPU-Gateway-Source") != "node":
                await asyncio.sleep(0.05)
        assert len(cloud.requests) == served + 1


@pytest.mark.parametrize(
    ("prices", "more", "status", "message"),
    [
        (PRICES, {"web_search_options": {}}, 503, "cannot bound what web_search_options costs"),
        ({}, {}, 402, "cloud.prices lacks cloud-chat"),
    ],
)
async def test_what_no_bound_holds_and_what_has_no_price_is_refused_to_a_capped_team(
    cloud, capped, prices, more, status, message
):
    async with capped("1000", prices=prices) as (http, key):
        reply = await asked(http, key, CHAT | more)
        assert reply.status == status
        assert message in await reply.text()
    assert not cloud.requests


async def test_a_store_that_is_down_refuses_the_cloud_and_serves_from_nodes(scripted, cloud, capped):
    async with capped("1000", store="redis://127.0.0.1:1") as (http, key):
        reply = await asked(http, key)
        assert reply.status == 503
        assert "the store of the spend caps fails" in await reply.text()
        assert not cloud.requests
        assert "npu_gateway_store_failures_total 1.0" in await metrics_of(http, key)
        scripted.respond = None
        async with asyncio.timeout(30):
            while (await asked(http, key)).status != 200:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("cap", ["-1", "NaN", "Infinity", "1e12"])
def test_a_cap_is_an_amount(tmp_path, cap):
    with pytest.raises(ConfigurationError, match="a spend cap must be an amount from 0 to 999999999"):
        made_keys(tmp_path / "keys.db", "team", spend_cap=Decimal(cap))


async def test_a_request_that_the_cloud_refuses_costs_nothing(cloud, capped):
    cloud.respond = answering(lambda: error_response(400, "no"))
    async with capped("1000") as (http, key):
        assert (await asked(http, key, CHAT)).status == 400
        assert 'npu_gateway_spend_ratio{team="team-1000"} 0.0' in (await metrics_of(http, key)).splitlines()


async def test_what_a_team_may_not_spend_does_not_count_for_the_process(capped):
    """The process has a cap of its own, which fits one of these calls."""
    async with capped("0.01", "1000", spend_cap=2) as (http, poor, rich):
        for _ in range(5):
            assert (await asked(http, poor, CHAT)).status == 402
        assert (await asked(http, rich, CHAT)).status == 200
