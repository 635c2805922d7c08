"""The bounded jobs: what may be asked for, and what is made of an answer."""

import json
import re

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from worker_node.bounded.jobs import JOBS, json_object, make_request, parse_request, summary, title
from worker_node.bounded.service import fit
from worker_node.core.errors import BadRequest


def body(**fields):
    return json.dumps({"job": "title", "input": "a", **fields}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{",
        b'{"job": "title", "input": "\\ud800"}',
        b'{"job": "title", "input": "\xff"}',
        b'{"input": "a"}',
        body(job="Title"),
        body(job=["title"]),
        body(input=""),
        body(input=" \n\t"),
        body(input=7),
        body(max_new_tokens=0),
        body(max_new_tokens=257),
        body(max_new_tokens=32.0),
        body(max_new_tokens="32"),
        body(max_new_tokens=True),
        body(max_tokens=32),
    ],
)
def test_what_is_beyond_a_bound_or_of_another_type_is_refused(data):
    with pytest.raises(BadRequest):
        parse_request(data)


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


MARKUP = st.lists(
    st.sampled_from(["<title>", "</b>", "Title: ", *"ab A.#*_`\"'“”-+<>~|[]()1!:\n\t é東"]), max_size=200
).map("".join)


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ('"Database Migration Fails"', "Database Migration Fails"),
        ("# **Build** `4812` failed", "Build 4812 failed"),
        ("Title: The Sea\n\nThis is a title.", "The Sea"),
        ("\n\n- A list of things\n- more", "A list of things"),
        ("```\nQuiet Night\n```", "Quiet Night"),
        ("Dana's Day", "Dana's Day"),
        ("p*q* is no *p*q", "p*q* is no *p*q"),
        ("Rename *.py to `__main__.py`", "Rename *.py to __main__.py"),
        ("**.env** has npu_busy_time_us, *really*.", ".env has npu_busy_time_us, really"),
        ("[Release](http://x) is out.", "Release is out"),
        ("one two three four five six seven at nine ten", "one two three four five six seven"),
        ("<title>Sea and Sky</title>", "Sea and Sky"),
        ('<TITLE>\n"Title: Sea and Sky"\n</titl', "Sea and Sky"),
        ("<h1><b>Sea</b> and Sky</h1>", "Sea and Sky"),
        ("Why a < b holds", "Why a < b holds"),
        ("*** --- ###", ""),
        ("", ""),
    ],
)
def test_a_title_is_one_plain_line(text, made):
    assert title(text) == made


# Marks of emphasis that are part of a word, or have no pair.
NAMES = (
    "npu_busy_time_us",
    "2**10",
    "*.py",
    "__init__.py",
    "~/bin",
    "f(*args,",
    "**kwargs)",
    "a",
    "*",
    "C#",
    ".NET",
    "b2",
)


@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=8).map(" ".join).map(lambda text: f"Set {text} x"))
def test_marks_that_are_not_a_pair_around_words_are_kept(text):
    assert summary(text) == text


@given(
    st.lists(st.from_regex(r"[a-z0-9é東]+(_[a-z]+)*", fullmatch=True), min_size=1, max_size=6).map(" ".join),
    st.sampled_from(["*", "**", "***", "_", "__", "~~", "`", "**_"]),
)
def test_pairs_around_words_and_code_are_removed_and_nothing_else(words, mark):
    text = f"Say {mark}{words}{mark[::-1]}, now"
    assert summary(text) == f"Say {words}, now"


@example(" *a* _b_ ")
@given(st.text('ab _*~#<>()[].-1"', min_size=1, max_size=12).map(lambda code: f"x{code}x"))
def test_a_code_span_keeps_its_content(code):
    assert summary(f"- Call `{code}` now") == f"Call {code} now"


@given(st.text(f"ab12é*_~`#>- .()[]!:{chr(10)}", max_size=60))
def test_no_letter_is_lost_but_links_and_fences(text):
    line = " ".join(text.replace("~~~", "").replace("(", "").replace("```", "").split())
    kept = [sign for sign in f"x {line}" if sign.isalnum()]
    assert [sign for sign in summary(f"x {line}") if sign.isalnum()] == kept


@example('"+ 1')
@example("`- a")
@given(MARKUP | st.text(max_size=200))
def test_a_title_has_at_most_eight_words_and_neither_quotes_nor_markup(text):
    made = title(text)
    assert len(made.split()) <= 8
    assert "\n" not in made
    assert not re.search('["“”`]', made)
    assert "`" in text or not re.search("</?(title|b)>", made)
    assert not re.match(r"[#>*+\-]\s", made)


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("All is well.", "All is well."),
        ("Summary: all is\nwell.\n\nMore of it.", "all is well."),
        ("- a\n- b\n* c\n1. d\n- e", "- a\n- b\n- c\n- d"),
        ("Here is the list:\n- one\n- two", "- one\n- two"),
        ("- only one", "only one"),
        ("# Head\nIt **rained**.", "Head It rained."),
        ("---\n\nIt rained.", "It rained."),
        ("", ""),
    ],
)
def test_a_summary_is_a_paragraph_or_bullets(text, made):
    assert summary(text) == made


GOOD = {"severity": "info", "category": "build", "summary": "It failed.", "action_needed": False}


def test_json_that_was_cut_is_null():
    text = orjson.dumps(GOOD).decode()
    assert json_object(text) == GOOD
    assert all(json_object(text[:end]) is None for end in range(len(text)))


@pytest.mark.parametrize("name", ["notification", "memory_candidate"])
@pytest.mark.parametrize("budget", [1, 15, 16, 64, 96, 192, 255, 256])
def test_every_budget_has_a_schema_and_a_grammar(name, budget):
    schema = JOBS[name].schema(budget)
    assert set(schema["required"]) == set(schema["properties"])
    grammar = JOBS[name].grammar(budget)
    assert grammar.startswith("root ::=")
    assert 'ws ::= " "?\n' in grammar


@given(st.text(max_size=300), st.integers(0, 100))
def test_what_is_fitted_fits_and_what_fits_is_left_alone(text, limit):
    made, kept = fit(text, len, limit + 5)
    assert len(made) <= limit + 5
    assert (made == text) == (len(text) <= limit + 5)
    assert kept == len(text) if made == text else kept < len(text)
