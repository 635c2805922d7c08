"""Conversations stay on their node: the hash, the bound on load, the key, and a fleet in virtual time."""

import asyncio
import random
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_client.fleet.affinity import Affinity, conversation_key
from backend_client.fleet.node import Availability, Node
from backend_client.http.messages import Request
from backend_client.http.routes import ROUTES
from backend_client.lifetime import Deadline
from backend_client.options import BreakerOptions
from tests.unit.backend_client.fakes import WRITER, report, with_fleet

URLS = [f"http://node-{index}:8081" for index in range(12)]


def node(url, load=0):
    made = Node(url, Availability(BreakerOptions(), lambda: 0.0, random.Random(1)))
    made.take_report(report())
    made.outstanding[WRITER] = load
    return made


def request(body, path="/v1/chat/completions", **fields):
    kind = ROUTES[path].kind_of(body)
    return Request(path=path, kind=kind, model=WRITER, body=body, deadline=Deadline.after(1), **fields)


CHAT = request({"messages": []})
numbers = st.integers(0, 10_000).map(lambda number: number.to_bytes(16))
some_urls = st.lists(st.sampled_from(URLS), min_size=1, unique=True)


def first_node(key, urls):
    return Affinity().choose(key, [node(url) for url in urls], CHAT).url


@given(numbers, some_urls, st.sets(st.sampled_from(URLS)))
def test_all_clients_of_a_fleet_agree_on_the_node_of_a_conversation_whatever_each_has_sent(key, urls, busy):
    others = [node(url, load=int(url in busy)) for url in sorted(urls, reverse=True)]
    assert first_node(key, urls) == Affinity().choose(key, others, CHAT).url


@given(numbers, some_urls, st.sampled_from(URLS))
def test_a_node_that_comes_or_goes_moves_only_its_own_conversations(key, urls, changed):
    before, after = first_node(key, {*urls} - {changed} or {URLS[0]}), first_node(key, {*urls, changed})
    assert after in {before, changed}


@pytest.mark.parametrize("count", [3, 12])
def test_conversations_spread_evenly(count):
    nodes = [node(url) for url in URLS[:count]]
    homes = Counter(Affinity().choose(number.to_bytes(16), nodes, CHAT).url for number in range(1000 * count))
    assert len(homes) == count
    assert all(900 < found < 1100 for found in homes.values())


@given(numbers, st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(0, 11))
def test_no_node_above_the_bound_gets_a_conversation(key, loads, last):
    found = Affinity()
    home = found.choose(key, [node(URLS[last % len(loads)])], CHAT).url
    nodes = [node(url, load) for url, load in zip(URLS, loads, strict=False)]
    bound = Fraction(5, 4) * sum(loads) / len(loads)
    chosen = found.choose(key, nodes, CHAT)
    load, own = chosen.outstanding[WRITER], loads[URLS.index(home)]
    assert load <= max(bound, 1)
    if own <= max(bound, 1):
        assert chosen.url == home


def test_a_conversation_stays_where_it_had_to_go():
    found, key = Affinity(), bytes(16)
    home = found.choose(key, [node(url) for url in URLS], CHAT).url
    elsewhere = found.choose(key, [node(url, load=4 if url == home else 0) for url in URLS], CHAT).url
    assert elsewhere != home
    assert found.choose(key, [node(url) for url in URLS], CHAT).url == elsewhere
    assert (found.hits, found.misses) == (1, 1)


def test_many_conversations_take_a_bounded_memory_and_an_old_one_returns_to_its_first_node():
    found, nodes = Affinity(), [node(url) for url in URLS]
    first = found.choose(bytes(16), nodes, CHAT).url
    for number in range(1, 6000):
        found.choose(number.to_bytes(16), nodes, CHAT)
    assert len(found._last) == 4096
    assert found.choose(bytes(16), nodes, CHAT).url == first
    assert found.hits == 0


def test_a_conversation_that_goes_on_is_not_forgotten_however_many_others_come():
    found, nodes, key = Affinity(), [node(url) for url in URLS], bytes(16)
    home = found.choose(key, nodes, CHAT).url
    elsewhere = found.choose(key, [node(url, load=4 if url == home else 0) for url in URLS], CHAT).url
    for number in range(1, 6000):
        found.choose(number.to_bytes(16), nodes, CHAT)
        if number % 1000 == 0:
            assert found.choose(key, nodes, CHAT).url == elsewhere


def user(text):
    return {"role": "user", "content": text}


SYSTEM = {"role": "system", "content": "You are brief."}
TURN = [SYSTEM, user("Who wrote Faust?")]
LATER = [*TURN, {"role": "assistant", "content": "Goethe."}, user("When?")]
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {}}}]


@pytest.mark.parametrize(
    ("path", "first", "later"),
    [
        ("/v1/chat/completions", {"messages": TURN}, {"messages": LATER}),
        ("/v1/chat/completions", {"messages": TURN, "tools": TOOLS}, {"messages": LATER, "tools": TOOLS}),
        ("/v1/messages", {"system": "Brief.", "messages": TURN[1:]}, {"system": "Brief.", "messages": LATER[1:]}),
        ("/v1/responses", {"input": "Who wrote Faust?"}, {"input": LATER[1:]}),
        ("/api/chat", {"messages": TURN}, {"messages": LATER}),
        ("/v1/completions", {"prompt": "a", "user": "anna"}, {"prompt": "b", "user": "anna"}),
        ("/v1/messages", {"metadata": {"user_id": "anna"}, "system": "1"}, {"metadata": {"user_id": "anna"}}),
    ],
)
def test_the_turns_of_a_conversation_have_one_key(path, first, later):
    key = conversation_key(request(first, path))
    assert key is not None
    assert conversation_key(request(later, path)) == key
    assert conversation_key(request(later, path, tenant="another")) != key


def test_what_begins_otherwise_is_another_conversation():
    bodies = [
        {"messages": TURN},
        {"messages": [SYSTEM, user("Who wrote Hamlet?")]},
        {"messages": TURN[1:]},
        {"messages": TURN, "tools": TOOLS},
        {"messages": TURN, "user": "anna"},
        {"messages": TURN, "prompt_cache_key": "anna, first talk", "user": "anna"},
    ]
    keys = [conversation_key(request(body)) for body in bodies]
    named = request(bodies[-1], extra_headers={"X-Session-Id": "1"})
    assert len({*keys, conversation_key(named), conversation_key(request(bodies[0], tenant="b"))}) == len(bodies) + 2


def test_a_session_named_in_a_header_goes_before_all_else():
    one = request({"messages": TURN, "prompt_cache_key": "a"}, extra_headers={"X-Session-ID": "s"})
    other = request({"messages": LATER[1:], "user": "b"}, extra_headers={"x-session-id": "s"})
    assert conversation_key(one) == conversation_key(other)


def test_pictures_are_not_hashed():
    def shown(data):
        parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": data}}]
        return request({"messages": [{"role": "user", "content": parts}]})

    assert conversation_key(shown("data:1")) == conversation_key(shown("data:2")) is not None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/inference", {"prompt": "Once"}),
        ("/v1/completions", {"prompt": "Once"}),
        ("/tokenize", {"messages": TURN}),
        ("/v1/embeddings", {"input": "text", "user": "anna"}),
        ("/api/chat", {}),
    ],
)
def test_what_is_no_chat_has_no_conversation(path, body):
    assert conversation_key(request(body, path)) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("messages", "input", "tools", "system", "user", "prompt_cache_key", "metadata")


@given(st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_any_json_has_a_key_or_none(body):
    made = Request(path="/v1/messages", body=body, content=b"", deadline=Deadline.after(1))
    assert isinstance(conversation_key(made), bytes | None)


@with_fleet(3)
async def test_later_turns_stay_on_their_node_and_are_counted(nodes, client):
    async def talk(number):
        """The nodes of a conversation, whose turns are a second apart; those of others are under way meanwhile."""
        asked = set()
        await asyncio.sleep(0.1 * number)
        for _ in range(4):
            asked.add((await client.generate("turn", extra_headers={"X-Session-Id": f"talk {number}"})).node)
            await asyncio.sleep(1)
        return asked

    found = await asyncio.gather(*map(talk, range(20)))
    assert all(len(asked) == 1 for asked in found)
    assert set.union(*found) == {node.url for node in nodes}
    affinity = client.fleet.runtime.pool.affinity
    assert (affinity.hits, affinity.misses) == (20 * 3, 0)
