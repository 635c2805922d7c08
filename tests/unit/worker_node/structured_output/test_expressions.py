"""Regular expressions of a caller's own: what they admit, and which are refused before an engine sees them."""

import contextlib
import itertools
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.held_text import HeldText
from tests.support.recogniser import Recogniser
from worker_node.core.errors import BadRequest
from worker_node.structured_output.form import compile_form


def compiled(pattern):
    return compile_form({"text": {"source": pattern, "where": "here"}})


ATOMS = ["a", "b", "[ab]", r"\d", r"\s", r"\S", r"\W", r"\D", ".", "(a|b)", "(?:ab|a)", "[^a]", r"[^\s]", "1"]
COUNTS = ["", "", "*", "+", "?", "{1,2}", "{2}"]
TEXTS = ["".join(text) for length in range(5) for text in itertools.product("ab1 \n", repeat=length)]


@pytest.mark.parametrize("seed", range(8))
def test_what_an_expression_admits_matches_it(seed):
    chance = random.Random(seed)
    compared = 0
    for _ in range(40):
        pattern = "".join(chance.choice(ATOMS) + chance.choice(COUNTS) for _ in range(chance.randint(1, 4)))
        if chance.random() < 0.4:
            ahead = chance.choice(ATOMS) + chance.choice(["", "+", "*", "$", "b$"])
            pattern = f"({chance.choice(['?=', '?!'])}{ahead}){pattern}"
        if chance.random() < 0.2:
            pattern += "|" + chance.choice(ATOMS)
        try:
            held = Recogniser(compiled(pattern))
        except BadRequest:
            continue
        compared += 1
        for text in chance.sample(TEXTS, 60):
            assert not held.admits(text) or re.fullmatch(pattern, text), (pattern, text)
    assert compared > 20


@pytest.mark.parametrize(
    ("pattern", "admitted", "forbidden"),
    [
        (r"\w+@\w+\.com\n", ["a_1@b.com\n"], ["a@b.com", "@b.com\n"]),
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", ["-01.5", "7", ".5"], ["", "+", "-.", "1.2.3"]),
        (r"^(?=.*\d)(?=.*[a-z])[a-z0-9]{4,8}$", ["ab1c", "1a11"], ["abcd", "1234", "a1", "ab1 c"]),
        (r"\d{4}-\d{2}-\d{2}T\S+", ["2024-05-01Tnoon"], ["2024-5-1T", "2024-05-01T \xa0"]),
        ("|".join(f"[a-z]+{n}" for n in range(90)), ["abc89", "x0"], ["abc", "89", "abc90"]),
        (r".{1,20}.{1,20}", ["ab", "x" * 40], ["a", "x" * 41]),
    ],
)
def test_expressions_in_common_use(pattern, admitted, forbidden):
    held = Recogniser(compiled(pattern))
    assert [text for text in admitted if not held.admits(text)] == []
    assert [text for text in forbidden if held.admits(text)] == []


REFUSED_EXPRESSIONS = [
    *("(", "a)", "[", "[]", "a{2", "a{3,2}", "a**", "(?<x>a)", "a\\b", "\\1", "a{1,1000000}"),
    *("(a{1,100}){1,100}b{300}", r"\bword", r"(a)\1", "(?<=a)b", "(?=a)b(", "(?!.*).*", "a" * 1001),
]


@pytest.mark.parametrize("pattern", REFUSED_EXPRESSIONS)
def test_expressions_that_cannot_be_enforced_are_refused(pattern):
    with pytest.raises(BadRequest, match=r"^here: "):
        compiled(pattern)


@given(st.text("ab[](){}|^$.*+?\\d-,1", max_size=12))
def test_any_expression_is_turned_into_a_grammar_or_refused(pattern):
    with contextlib.suppress(BadRequest):
        compiled(pattern)


# The runtime reads a negated class wrongly, and may end by it, where it names characters beyond ASCII.
@pytest.mark.parametrize("pattern", ["[^\x80-\uffff]{6}", "[^é]{6}", r"\S{6}", ".{6}"])
def test_the_runtime_reads_classes_beyond_ascii_as_they_are_meant(held, pattern):
    texts = [held.sample(compiled(pattern), seed) for seed in range(8)]
    assert all(text is not None and re.fullmatch(pattern, text) for text in texts), texts


@pytest.fixture(scope="module")
def held(store, tmp_path_factory):
    return HeldText(store.get("smollm2-135m-instruct").path, tmp_path_factory.mktemp("constant"))
