import re

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from worker_node.bounded import jobs
from worker_node.bounded.fitting import fit
from worker_node.bounded.jobs import JOBS, excerpt, json_object, summary, title

MARKUP = st.text(st.sampled_from("ab A.#*_`\"'“”-+>~|[]()1!:\n\t é東"), max_size=200)


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ('"Database Migration Fails"', "Database Migration Fails"),
        ("# **Build** `4812` failed", "Build 4812 failed"),
        ("Title: The Sea\n\nThis is a title.", "The Sea"),
        ("\n\n- A list of things\n- more", "A list of things"),
        ("```\nQuiet Night\n```", "Quiet Night"),
        ("Dana's Day", "Dana's Day"),
        ("[Release](http://x) is out.", "Release is out"),
        ("one two three four five six seven at nine ten", "one two three four five six seven"),
        ("*** --- ###", ""),
        ("", ""),
    ],
)
def test_a_title_is_one_plain_line(text, made):
    assert title(text) == made


# Each takes more passes than the one before: what is taken off an end uncovers another mark.
@pytest.mark.parametrize("text", ["'a", '"- a', "`>.>'a", '">->-a', "'>#>.a", "a`.'", "\"*> ->'a", "*>.#>#.>a"])
def test_marks_that_lie_over_one_another_are_all_taken_off_a_title(text):
    assert title(text) == "a"


@example('"+ 1')
@example("`- a")
@given(MARKUP | st.text(max_size=200))
def test_a_title_has_at_most_eight_words_and_neither_quotes_nor_marks_of_markdown(text):
    made = title(text)
    assert len(made.split()) <= 8
    assert "\n" not in made
    assert not re.search('["“”`]', made)
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


@given(MARKUP | st.text(max_size=200))
def test_a_summary_is_one_paragraph_or_two_to_four_bullets(text):
    lines = summary(text).split("\n")
    assert len(lines) == 1 or (2 <= len(lines) <= 4 and all(line.startswith("- ") for line in lines))


GOOD = {"severity": "info", "category": "build", "summary": "It failed.", "action_needed": False}


@pytest.mark.parametrize(
    "value",
    [
        GOOD | {"severity": "grave"},
        GOOD | {"action_needed": 1},
        GOOD | {"category": ""},
        GOOD | {"summary": "x" * 201},
        GOOD | {"more": 1},
        {"severity": "info"},
        [GOOD],
        "text",
    ],
)
def test_json_of_another_form_is_null(value):
    schema = jobs.notification(96)
    assert json_object(orjson.dumps(GOOD).decode(), schema) == GOOD
    assert json_object(orjson.dumps(value).decode(), schema) is None


def test_json_that_was_cut_is_null():
    text = orjson.dumps(GOOD).decode()
    assert all(json_object(text[:end], jobs.notification(96)) is None for end in range(len(text)))


def test_candidates_are_held_to_their_number_and_length():
    schema = jobs.memory_candidate(192)
    most = schema["properties"]["candidates"]["maxItems"]
    good = {"candidates": ["a"] * most, "notes": ""}
    assert json_object(orjson.dumps(good).decode(), schema) == good
    assert json_object(orjson.dumps(good | {"candidates": ["a"] * (most + 1)}).decode(), schema) is None
    assert json_object(orjson.dumps(good | {"candidates": [1]}).decode(), schema) is None
    assert json_object(orjson.dumps(good | {"candidates": "a"}).decode(), schema) is None


@pytest.mark.parametrize("name", ["notification", "memory_candidate"])
@pytest.mark.parametrize("budget", [1, 15, 16, 64, 96, 192, 255, 256])
def test_every_budget_has_a_schema_and_a_grammar(name, budget):
    schema = JOBS[name].schema(budget)
    assert set(schema["required"]) == set(schema["properties"])
    grammar = JOBS[name].grammar(budget)
    assert grammar.startswith("root ::=")
    assert 'ws ::= " "?\n' in grammar


def test_a_larger_budget_never_makes_a_smaller_form():
    lengths = [jobs.notification(budget)["properties"]["summary"]["maxLength"] for budget in range(1, 257)]
    assert lengths == sorted(lengths)


def test_a_grammar_of_another_make_is_not_taken_for_compact():
    with pytest.raises(ValueError, match="blanks"):
        jobs.compact("root ::= value\n")


@given(st.text(max_size=300), st.integers(0, 100))
def test_what_is_fitted_fits_and_what_fits_is_left_alone(text, limit):
    made, kept = fit(text, len, limit + 5)
    assert len(made) <= limit + 5
    assert (made == text) == (len(text) <= limit + 5)
    assert kept == len(text) if made == text else kept < len(text)


@given(st.text(min_size=1, max_size=50), st.data())
def test_an_excerpt_keeps_both_ends(text, data):
    kept = data.draw(st.integers(0, len(text)))
    made = excerpt(text, kept)
    if kept == len(text):
        assert made == text
    else:
        head, _, tail = made.partition(" […] ") if " […] " not in text else (None, None, None)
        assert head is None or (text.startswith(head) and text.endswith(tail) and len(head) + len(tail) == kept)
