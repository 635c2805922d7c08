"""Expressions and grammars of a caller's own: what they admit, and which are refused before an engine sees them."""

import itertools
import random
import re

import pytest

from tests.support.held_text import HeldText
from tests.support.recogniser import Recogniser
from worker_node.errors import BadRequest
from worker_node.grammars.form import compile_form

ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws   # a name
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (
             string ":" ws value
             ("," ws string ":" ws value)*
           )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
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
    "arithmetic": (ARITHMETIC, ["x=1\n", "(x_1+2)*3= y\nz=1\n"], ["x=1", "=1\n", "(x=1\n", "x+=1\n"]),
    "JSON": (JSON, ['{"a":[1,{"b": "\\u00e9"}],"c":-1.5e3}', "{}"], ["[]", '{"a"}', '{"a":01}', '{"a":"\n"}']),
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
    "no text that ends": ('root ::= "(" root ")"', "never ends"),
    "left recursion": ('root ::= root "a" | "a"', "begin with itself"),
    "left recursion behind what may be empty": ('root ::= "x"? b\nb ::= root "a" | "a"', "begin with itself"),
    "right recursion": ('root ::= [a-z] root | "."', "end with itself"),
    "an undecided recursion": ('root ::= "a" root "a" | "a"', "does not tell"),
    "an undecided option": ('root ::= "[" ("]" root)? "]"', "does not tell"),
    "repetitions of the same characters": ('root ::= a{1,20}\na ::= [a-z]{1,20}', "in many ways"),
    "plain repetitions in a row": ("root ::= a a\na ::= [a-z]*", "in many ways"),
    "many repetitions at a place": ("root ::= " + " | ".join(f'[a-z]+ "{i}"' for i in range(40)), "open at"),
    "too long": ("root ::= " + '"a" ' * 10_000, "bound"),
    "too many rules": ('root ::= "a"\n' + "\n".join(f'r{i} ::= "a"' for i in range(600)), "bound"),
    "too deep": ("root ::= " + "(" * 60 + '"a"' + ")" * 60, "nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_grammar_that_could_harm_an_engine_is_refused_with_its_reason(name):
    grammar, reason = REFUSED[name]
    with pytest.raises(BadRequest, match=r"^here: ") as refusal:
        compiled("grammar", grammar)
    assert reason in refusal.value.message
    assert refusal.value.param == "here"


def test_rules_that_double_each_other_are_translated_in_little_time():
    rules = [f"a{i} ::= a{i + 1} a{i + 1}" for i in range(40)]
    grammar = "\n".join(["root ::= a0", *rules, 'a40 ::= "x"?'])
    held = Recogniser(compiled("grammar", grammar))
    assert held.admits("")
    with pytest.raises(BadRequest):
        compiled("grammar", grammar.replace('"x"?', "[a-z]*"))


CHAIN = [*(f'r{i} ::= r{i + 1} "x"? | [a-z\u00e9-\u00ff]{{1,3}} ws' for i in range(400)), "ws ::= [ ]*"]


@pytest.mark.parametrize(
    "last",
    ['r400 ::= root "a" | "a"', 'r400 ::= ws ("" | ws) r7', "r400 ::= ws{0,3} (r399 | ws)", "r400 ::= r400 | ws"],
)
def test_left_recursion_is_refused_by_name_before_a_rule_is_translated(monkeypatch, last):
    monkeypatch.setattr("worker_node.grammars.gbnf._Translation", lambda *_: pytest.fail("it was translated"))
    with pytest.raises(BadRequest, match=r"here: .* the rule '(root|r\d+)' can begin with itself; write a repetition"):
        compiled("grammar", "\n".join(["root ::= r0", *CHAIN, last]))


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


@pytest.mark.parametrize("pattern", ["(", "a**", r"\bword", r"(a)\1", "(?<=a)b", "(?=a)b(", "(?!.*).*", "a" * 1001])
def test_expressions_that_cannot_be_enforced_are_refused(pattern):
    with pytest.raises(BadRequest, match=r"^here: "):
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
