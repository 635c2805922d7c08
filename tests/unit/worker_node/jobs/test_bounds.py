import json

import pytest

from worker_node.bounded.jobs import JOBS, make_request, parse_request
from worker_node.core.errors import BadRequest

# One of each of the seventeen planes of Unicode, and some that people write.
PLANES = [*(chr(0x10000 * plane + 0x3021) for plane in range(17)), "é", "東", "😀", "𠀀", "\U0010fffd"]


def body(**fields):
    return json.dumps({"job": "title", "input": "a", **fields}).encode()


@pytest.mark.parametrize("character", ["a", *PLANES])
def test_characters_are_counted_as_characters(character):
    for escaped in (True, False):
        at_edge = json.dumps({"job": "title", "input": character * 6000}, ensure_ascii=escaped).encode()
        assert len(parse_request(at_edge).text) == 6000
        beyond = json.dumps({"job": "title", "input": character * 6001}, ensure_ascii=escaped).encode()
        with pytest.raises(BadRequest, match="6001 characters; at most 6000"):
            parse_request(beyond)


@pytest.mark.parametrize("limit", [1, 256])
def test_the_edges_of_the_budget(limit):
    assert parse_request(body(max_new_tokens=limit)).max_new_tokens == limit


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'"title"',
        b"{",
        b'{"job": "title", "input": "\\ud800"}',
        b'{"job": "title", "input": "\xff"}',
        b'{"job": "title"}',
        b'{"input": "a"}',
        body(job="Title"),
        body(job=""),
        body(job=None),
        body(job=["title"]),
        body(job={}),
        body(input=""),
        body(input=" \n\t"),
        body(input=None),
        body(input=7),
        body(input=["a"]),
        body(max_new_tokens=0),
        body(max_new_tokens=-1),
        body(max_new_tokens=257),
        body(max_new_tokens=10**30),
        body(max_new_tokens=32.0),
        body(max_new_tokens="32"),
        body(max_new_tokens=True),
        body(max_new_tokens=[32]),
        body(max_tokens=32),
    ],
)
def test_what_is_beyond_a_bound_or_of_another_type_is_refused(data):
    with pytest.raises(BadRequest):
        parse_request(data)


@pytest.mark.parametrize(("name", "tokens"), [("title", 32), ("summary", 160), ("notification", 96), ("memory", 192)])
def test_each_job_has_its_own_budget(name, tokens):
    assert make_request(name, "a").max_new_tokens == tokens
    assert parse_request(body(job=name, max_new_tokens=None)).max_new_tokens == tokens


def test_memory_is_another_name_of_memory_candidate():
    assert make_request("memory", "a").job is JOBS["memory_candidate"]


@pytest.mark.parametrize("implied", ["notification", "memory_candidate"])
def test_a_url_that_implies_a_job_takes_no_other(implied):
    assert parse_request(b'{"input": "a"}', implied).job.name == implied
    assert parse_request(body(job=implied), implied).job.name == implied
    with pytest.raises(BadRequest, match=implied):
        parse_request(body(job="title"), implied)
    with pytest.raises(BadRequest, match=implied):
        parse_request(body(job=7), implied)


def test_no_message_and_no_repr_repeats_what_was_sent():
    secret = "canary-7f3a"
    request = make_request("title", secret)
    assert secret not in repr(request)
    for data in (body(job=secret), body(**{secret: 1}), secret.encode(), body(max_new_tokens=secret)):
        with pytest.raises(BadRequest) as caught:
            parse_request(data)
        assert secret not in str(caught.value)
        assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "text", ["", " \n", "\u200b", "\u200b\u200d\ufeff \u2060", "\x00\x1b", "\u0301", "\ufe0f" * 7000]
)
def test_a_text_of_which_nothing_is_seen_is_empty(text):
    with pytest.raises(BadRequest, match="must not be empty"):
        make_request("title", text)


@pytest.mark.parametrize("text", ["\u200ba", "❤\ufe0f", "👨\u200d👩", "e\u0301", "٠", "!"])
def test_a_text_with_one_visible_character_is_not_empty(text):
    assert make_request("title", text).text == text
