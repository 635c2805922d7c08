"""Tool calls are told from text however the answer is cut, and text that is no call is given back whole."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.tasks.generate.answer import Blocks
from worker_node.tasks.generate.blocks import BlockKind, Grown, Opened
from worker_node.tasks.generate.request import ToolCall
from worker_node.tasks.generate.tool_calls import HERMES, TOOL_FORMATS, BareCalls, TaggedCalls

NAMES = frozenset({"add", "get_weather"})
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8), st.lists, max_leaves=4)
ARGUMENTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3)


def parse(parser, text, cuts=()):
    """The text and the calls of an answer that arrives in pieces."""
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    found = Blocks(skip_blanks=False)
    for start, end in itertools.pairwise(ends):
        parser.push(text[start:end], found)
    parser.finish(found, cut=False)
    calls = [block for block in found.blocks if block.kind is BlockKind.CALL]
    assert [call.call for call in calls] == list(range(len(calls)))
    text = "".join(block.text for block in found.blocks if block.kind is BlockKind.TEXT)
    return text, [(call.name, json.loads(call.text)) for call in calls]


CUTS = st.lists(st.integers(0, 400), max_size=60)


@given(CALLS, st.text("ab <t", max_size=12), CUTS, st.booleans())
def test_tagged_calls_are_read_however_the_text_is_cut(calls, before, cuts, listed):
    bodies = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    if listed:
        written = f"<tool_call>[{', '.join(bodies)}]</tool_call>"
    else:
        written = "".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    assert parse(TaggedCalls(NAMES), before + written, cuts) == (before, calls)


@given(CALLS, CUTS)
def test_llamas_bare_calls_are_read_however_the_text_is_cut(calls, cuts):
    bodies = [json.dumps({"type": "function", "name": name, "parameters": arguments}) for name, arguments in calls]
    assert parse(BareCalls(NAMES), "; ".join(bodies), cuts) == ("", calls)


@given(CALLS, CUTS)
def test_a_forced_call_ends_with_its_object(calls, cuts):
    name, arguments = calls[0]
    text = json.dumps({"arguments": arguments, "name": name}) + " and more"
    assert parse(BareCalls(NAMES, single=True), text, cuts) == ("", [(name, arguments)])


@given(st.text('<tol_ca>/{}[]":, \nax', max_size=60), CUTS)
def test_what_is_no_call_is_given_back(text, cuts):
    for parser in (TaggedCalls(NAMES), BareCalls(NAMES)):
        shown, calls = parse(parser, text, cuts)
        assert calls == []
        if not isinstance(parser, TaggedCalls) or "</tool_call>" not in text:
            assert shown.strip() == text.strip()


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>not JSON</tool_call>",
        '<tool_call>{"name": "a\\q", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", oops}</tool_call>'.replace('"name": "add", ', ""),
        "<tool_call>",
        '{"answer": 42}',
        "[1, 2, 3]",
    ],
)
def test_what_only_looks_like_a_call_stays_text(text):
    for parser in (TaggedCalls(NAMES), BareCalls(NAMES)):
        assert parse(parser, text, range(len(text))) == (text, [])


def test_a_call_is_read_after_one_that_breaks_off_within_a_string():
    broken, whole = (f"<tool_call>{call}</tool_call>" for call in ('{"name": "add', '{"name": "add"}'))
    assert parse(TaggedCalls(NAMES), broken + whole) == (broken, [("add", {})])


def test_arguments_stream_as_they_come():
    parser, found = TaggedCalls(NAMES), Blocks()
    parser.push('<tool_call>{"name": "add", "arguments": {"a": 1', found)
    [call] = found.blocks
    assert call.name == "add"
    assert found.take() == [Opened(call), Grown(call, '{"a": 1')]
    parser.push(', "b": 2}}', found)
    assert found.take() == [Grown(call, ', "b": 2}')]


@pytest.mark.parametrize("length", range(1, 16))
@pytest.mark.parametrize("opening", ["", "<tool_call>"])
def test_the_beginning_of_a_call_that_is_cut_is_not_text(opening, length):
    parser = TaggedCalls(NAMES) if opening else BareCalls(NAMES, single=True)
    beginning = '{"name": "get_weather"'[:length]
    found = Blocks()
    parser.push(opening + beginning, found)
    parser.finish(found, cut=True)
    assert found.blocks == []


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"name": "add"}', {}),
        ('{"name": "add", "arguments": null}', {}),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"parameters": {"a": "}"}, "name": "add"}', {"a": "}"}),
    ],
)
def test_the_ways_in_which_models_write_arguments(written, arguments):
    text = f"<tool_call>{written}</tool_call>"
    assert parse(TaggedCalls(NAMES), text, range(len(text))) == ("", [("add", arguments)])


@pytest.mark.parametrize("family", ["smollm", "qwen", "llama3", "unheard-of"])
def test_each_family_reads_what_it_is_shown_to_write(family):
    wanted = TOOL_FORMATS.get(family, HERMES)
    text = wanted.written([ToolCall("add", {"a": 1}), ToolCall("get_weather", {"city": "Rome"})])
    expected = [("add", {"a": 1}), ("get_weather", {"city": "Rome"})]
    assert parse(wanted.parser(NAMES), text) == ("", expected)
