"""Expressions and grammars of a caller's own: what they admit, and which are refused before an engine sees them."""

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

SUMS = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num
ident ::= [a-z] [a-z0-9_]* ws   # a name
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
CHESS = r"""
root ::= ("1. " move " " move "\n") ([1-9] [0-9]? ". " move " " move "\n")*
move ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""
SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""
JAPANESE = "root ::= jp-char+ ([ \\t\\n] jp-char+)*\njp-char ::= [ぁ-ゟ] | [ァ-ヿ]"

# Grammars that the documentation of llama.cpp and of vLLM shows.
DOCUMENTED = {
    "sums": (SUMS, ["x=1\n", "x_1+2*3= y\nz=1\n"], ["x=1", "=1\n", "(x=1\n", "x+=1\n"]),
    "chess": (CHESS, ["1. e4 e5\n", "1. Nf3 O-O\n2. exd8=Q+ Kxe1\n"], ["1. e4\n", "1. e9 e5\n", "e4 e5\n"]),
    "SQL": (SQL, ["SELECT col_1  from table_2  where col_2 = 1 "], ["SELECT * from table_1", ""]),
    "Japanese": (JAPANESE, ["ねこ", "ネコ ねこ"], ["", "neko", " ね"]),
    "yes or no": ('root ::= "yes" | "no"', ["yes", "no"], ["maybe", "yesno"]),
    "any character": ('root ::= "\\u00e9" .{2}', ["éab", "é\n¿"], ["éa", "éabc", "abc"]),
}


def compiled(kind, source):
    return compile_form({"text": {"kind": kind, "source": source, "where": "here"}})


@pytest.mark.parametrize("name", DOCUMENTED)
def test_grammars_that_servers_document_admit_what_they_say(name):
    grammar, admitted, forbidden = DOCUMENTED[name]
    held = Recogniser(compiled("grammar", grammar))
    assert [text for text in admitted if not held.admits(text)] == []
    assert [text for text in forbidden if held.admits(text)] == []


DOUBLING = [f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)]
REFUSED = {
    "empty": ("# nothing", "no rule root"),
    "another notation": ('start: "a" | "b"', "cannot be read"),
    "an open text": ('root ::= "a', "cannot be read"),
    "an open group": ('root ::= ("a"', "not closed"),
    "a missing rule": ("root ::= x", "no rule 'x'"),
    "two rules of a name": ('root ::= "a"\nroot ::= "b"', "twice"),
    "two counts": ('root ::= "a"*+', "two counts"),
    "limits the wrong way round": ('root ::= "a"{3,2}', "wrong way round"),
    "a count beyond the bound": ('root ::= "a"{1,100000}', "a count above"),
    "a control character": ('root ::= "\\x00"', "control character"),
    "a surrogate": ('root ::= "\\ud800"', "no character"),
    "a rule within itself": ('root ::= "(" root ")" | "a"', "refers to itself"),
    "a rule within itself behind another": ('root ::= a\na ::= [a-z] b\nb ::= a | "."', "refers to itself"),
    "many parts": ("\n".join(["root ::= r0 r0", *DOUBLING, 'r40 ::= "x"?']), "written out"),
    "too long": ("root ::= " + '"a" ' * 10_000, "bound"),
    "too deep": ("root ::= " + "(" * 60 + '"a"' + ")" * 60, "nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_grammar_that_could_harm_an_engine_is_refused_with_its_reason(name):
    grammar, reason = REFUSED[name]
    with pytest.raises(BadRequest, match=r"^here: ") as refusal:
        compiled("grammar", grammar)
    assert reason in refusal.value.message
    assert refusal.value.param == "here"


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
            held = Recogniser(compiled("regex", pattern))
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
    held = Recogniser(compiled("regex", pattern))
    assert [text for text in admitted if not held.admits(text)] == []
    assert [text for text in forbidden if held.admits(text)] == []


REFUSED_EXPRESSIONS = [
    *("(", "a)", "[", "[]", "a{2", "a{3,2}", "a**", "(?<x>a)", "a\\b", "\\1", "a{1,1000000}"),
    *("(a{1,100}){1,100}b{300}", r"\bword", r"(a)\1", "(?<=a)b", "(?=a)b(", "(?!.*).*", "a" * 1001),
]


@pytest.mark.parametrize("pattern", REFUSED_EXPRESSIONS)
def test_expressions_that_cannot_be_enforced_are_refused(pattern):
    with pytest.raises(BadRequest, match=r"^here: "):
        compiled("regex", pattern)


@given(st.text("ab[](){}|^$.*+?\\d-,1", max_size=12))
def test_any_expression_is_turned_into_a_grammar_or_refused(pattern):
    with contextlib.suppress(BadRequest):
        compiled("regex", pattern)


# The runtime reads a negated class wrongly, and may end by it, where it names characters beyond ASCII.
@pytest.mark.parametrize("pattern", ["[^\x80-\uffff]{6}", "[^é]{6}", r"\S{6}", ".{6}"])
def test_the_runtime_reads_classes_beyond_ascii_as_they_are_meant(held, pattern):
    texts = [held.sample(compiled("regex", pattern), seed) for seed in range(8)]
    assert all(text is not None and re.fullmatch(pattern, text) for text in texts), texts


@pytest.mark.parametrize("name", ["SQL", "Japanese", "yes or no", "any character"])
def test_the_runtime_reads_the_grammars(held, name):
    grammar = compiled("grammar", DOCUMENTED[name][0])
    oracle = Recogniser(grammar)
    texts = [held.sample(grammar, seed) for seed in range(4)]
    assert any(texts)
    assert all(text is None or oracle.admits(text) for text in texts), texts


@pytest.fixture(scope="module")
def held(store, tmp_path_factory):
    return HeldText(store.get("smollm2-135m-instruct").path, tmp_path_factory.mktemp("constant"))
