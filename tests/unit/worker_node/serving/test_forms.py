"""What an answer is held to, in every format of calls: sampled from the grammar by the engines' runtime, read by the
format's own parser, and judged by another validator."""

import json
import re

import jsonschema_rs
import pytest

from tests.support.held_text import HeldText
from tests.support.recogniser import Recogniser
from worker_node.core.errors import BadRequest
from worker_node.core.types import RequestContext
from worker_node.structured_output.form import Compiled, FormPart, compile_form
from worker_node.tasks.generate.answer import Blocks
from worker_node.tasks.generate.blocks import BlockKind
from worker_node.tasks.generate.messages import Sampling
from worker_node.tasks.generate.request import GenerationRequest, Message, Tool, ToolUse
from worker_node.tasks.generate.schemas import answer_form
from worker_node.tasks.generate.tool_calls import HERMES, TOOL_FORMATS, BareCalls, CallsOrAnswer

FAMILIES = ["smollm", "qwen", "llama3"]


def objects(**properties):
    return {"type": "object", "properties": properties, "required": list(properties)}


SHADE = {"$defs": {"X": {"enum": ["red", "blue"]}}, **objects(shade={"$ref": "#/$defs/X"})}
COUNT = {"$defs": {"X": {"type": "integer", "maximum": 9}}, **objects(count={"$ref": "#/$defs/X"})}
TREE = objects(leaf={"type": "boolean"}, branches={"type": "array", "items": {"$ref": "#"}, "maxItems": 2})
NESTED = objects(a=objects(b=objects(c={"type": "array", "items": {"enum": [1, 2]}, "minItems": 1})))
# The keys and the tag of a call, and a name that a tool has, in an answer that is none.
LIKE_A_CALL = objects(
    name={"enum": ["shade", "count"]}, arguments={"type": "null"}, parameters={"const": "<tool_call>"}
)
TOOLS = tuple(
    Tool(name, "", schema, f"tools[{index}]")
    for index, (name, schema) in enumerate({"shade": SHADE, "count": COUNT, "tree": TREE, "nested": NESTED}.items())
)


@pytest.fixture(scope="module")
def held(store, tmp_path_factory):
    return HeldText(store.get("smollm2-135m-instruct").path, tmp_path_factory.mktemp("constant"))


def request(use, schema=None):
    wanted = None if schema is None else FormPart(schema, "response_format")
    context = RequestContext("test", 0, 1e9)
    return GenerationRequest(context, (Message("user", "Go."),), Sampling(), tool_use=use, grammar=wanted)


def read(parser, text):
    found = Blocks(skip_blanks=False)
    for character in text:
        parser.push(character, found)
    parser.finish(found, cut=False)
    calls = [(block.name, block.text) for block in found.blocks if block.kind is BlockKind.CALL]
    return calls, "".join(block.text for block in found.blocks if block.kind is BlockKind.TEXT)


def check(calls):
    for name, arguments in calls:
        (schema,) = (tool.parameters for tool in TOOLS if tool.name == name)
        jsonschema_rs.Draft202012Validator(schema).validate(json.loads(arguments))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forced_call_matches_the_schema_of_its_own_tool(held, family):
    grammar = compile_form(answer_form(family, request(ToolUse(TOOLS, forced=True), {"type": "null"})))
    seen = set()
    for text in filter(None, (held.sample(grammar, seed) for seed in range(16))):
        calls, answer = read(BareCalls([tool.name for tool in TOOLS], single=True), text)
        check(calls)
        assert answer == ""
        seen.add(*(name for name, _ in calls))
    assert len(seen) >= 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("schema", "single"), [({"type": "object"}, True), (LIKE_A_CALL, False)])
def test_beside_a_schema_an_answer_is_calls_or_matches_it(held, family, schema, single):
    grammar = compile_form(answer_form(family, request(ToolUse(TOOLS, single=single), schema)))
    answered = called = 0
    for text in filter(None, (held.sample(grammar, seed) for seed in range(12))):
        calls, answer = read(
            CallsOrAnswer(TOOL_FORMATS.get(family, HERMES).beside_json.parser([tool.name for tool in TOOLS])), text
        )
        check(calls)
        assert bool(calls) != bool(answer)
        assert not (single and len(calls) > 1)
        if answer:
            jsonschema_rs.Draft202012Validator(schema).validate(json.loads(answer))
        answered, called = answered + bool(answer), called + bool(calls)
    assert answered
    assert called


CALL = '{"name": "count", "arguments": {"count": 1}}'
CALLS = {
    "smollm": (f"<tool_call>[{CALL}]</tool_call>", f"<tool_call>[{CALL}, {CALL}]</tool_call>"),
    "qwen": (f"<tool_call>{CALL}</tool_call>", f"<tool_call>{CALL}</tool_call>" * 2),
    "llama3": (f"<tool_call>{CALL}</tool_call>", f"<tool_call>{CALL}</tool_call>" * 2),
}


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_call_is_admitted_unless_the_request_wants_a_single_one(family, single):
    use = ToolUse(TOOLS, single=single)
    form = Recogniser(compile_form(answer_form(family, request(use, {"type": "object"}))))
    assert [form.admits(text) for text in CALLS[family]] == [True, not single]


def begun(grammar):
    """The grammars of what follows each beginning of a call in free text, as texts that begin with it."""
    root, _, rules = grammar.partition("\n")
    found = re.findall(r'\(("(?:[^"\\]|\\.)*"), (\w+)\)', root)
    assert found
    return [f"root ::= {beginning} {rule}\n{rules}" for beginning, rule in found]


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_in_free_text_matches_from_where_it_begins(held, family, single):
    grammar = compile_form(answer_form(family, request(ToolUse(TOOLS, single=single))))
    assert f"loop_after_dispatch={str(not single).lower()}" in grammar
    seen = []
    for seed, one in enumerate(begun(grammar)[::7] if family == "llama3" else begun(grammar) * 7):
        text = held.sample(one, seed)
        if text is None:
            continue
        calls, answer = read(TOOL_FORMATS.get(family, HERMES).parser([tool.name for tool in TOOLS]), text)
        check(calls)
        assert calls
        assert answer == ""
        assert not (single and len(calls) > 1)
        seen += [name for name, _ in calls]
    assert len(set(seen)) >= 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_schema_that_cannot_be_enforced_leaves_the_arguments_of_its_own_tool_free(held, family):
    bad = Tool("bad", "", objects(x={"$ref": "#/$defs/X"}), "tools[1].function.parameters")
    grammar, dropped = Compiled.read(compile_form(answer_form(family, request(ToolUse((TOOLS[1], bad))))))
    assert dropped == ("tools[1].function.parameters",)
    calls, _ = read(TOOL_FORMATS.get(family, HERMES).parser(["count"]), held.sample(begun(grammar)[0], 1))
    assert calls
    check(calls)


def test_refusals_name_the_part_of_the_tool():
    tools = (TOOLS[0], Tool("bad", "", objects(x={"$ref": "#/$defs/X"}), "tools[1]"))
    text = (Tool("f", "", {"type": "string"}, "tools[0]"),)
    for use, schema, param in (
        (ToolUse(tools, forced=True), None, "tools[1].properties.x.$ref"),
        (ToolUse(tools, forced=True), {}, "tools[1].properties.x.$ref"),
        (ToolUse(tools), {}, "tools[1].properties.x.$ref"),
        (ToolUse(text, forced=True), None, "tools[0].type"),
    ):
        with pytest.raises(BadRequest) as refused:
            compile_form(answer_form("qwen", request(use, schema)))
        assert refused.value.param == param
