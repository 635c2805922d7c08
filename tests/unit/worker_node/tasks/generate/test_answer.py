"""From the tokens of an answer to its text, its end, and the reasoning before it, however they are cut."""

import itertools
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.writing import WRITER, writing
from worker_node.core.errors import EngineUnavailable
from worker_node.tasks.generate.answer import (
    AnswerBuilder,
    Blocks,
    ByteDetokenizer,
    ReasoningFirst,
    StopMatcher,
    WindowDetokenizer,
    detokenizer,
)
from worker_node.tasks.generate.blocks import BlockKind, Closed, Finished, FinishReason, Grown, Opened
from worker_node.tasks.generate.chat_tokenizer import ChatTokenizer
from worker_node.tasks.generate.messages import Sampling, TokenDelta
from worker_node.tasks.generate.tool_calls import TaggedCalls

BYTES = [bytes([i]) for i in range(256)]
TOKENIZER = SimpleNamespace(byte_table=BYTES)


def answered(steps, sampling):
    """The text and the number of tokens of an answer that the engine gives in these steps, until it has ended."""
    answer = AnswerBuilder(TOKENIZER, sampling)
    for step in steps:
        answer.push(TokenDelta(1, step))
        if answer.complete:
            break
    answer.flush()
    return answer.finished(0.0, 0.0).text(), answer.tokens


@pytest.mark.parametrize(
    ("sampling", "text", "tokens"),
    [
        (Sampling(max_new_tokens=20, stop=("dog",)), "a ", 5),
        (Sampling(max_new_tokens=20, stop_token_ids=(ord("o"),)), "a d", 4),
        (Sampling(max_new_tokens=20), "a dog runs", 10),
        (Sampling(max_new_tokens=20, stop=("dog",), min_tokens=6), "a dog runs", 10),
    ],
    ids=["stop", "stop token", "none", "stop too early"],
)
@given(cuts=st.sets(st.integers(1, 9)))
def test_text_and_count_are_those_of_tokens_that_come_one_by_one(sampling, text, tokens, cuts):
    given_ = list(b"a dog runs")
    edges = [0, *sorted(cuts), len(given_)]
    steps = [given_[begin:end] for begin, end in itertools.pairwise(edges)]
    assert answered(steps, sampling) == (text, tokens)


# Token ids to text; stop sequences.


@given(st.text(), st.integers(1, 5))
def test_bytes_of_any_text_come_out_as_that_text(text, size):
    data = text.encode()
    detokenizer = ByteDetokenizer(BYTES)
    parts = [detokenizer.push(list(data[i : i + size])) for i in range(0, len(data), size)]
    assert "".join(parts) + detokenizer.flush() == text


def test_bytes_that_are_no_text_are_left_out():
    detokenizer = ByteDetokenizer(BYTES)
    assert detokenizer.push([0xFF, ord("a"), 0xE2]) + detokenizer.flush() == "a"


@pytest.mark.parametrize("byte_level", [True, False])
def test_a_tokenizer_gives_no_text_for_tokens_beyond_its_vocabulary(store, byte_level):
    installed = store.get("smollm2-135m-instruct")
    chat = ChatTokenizer(installed.path, installed.context_limit)
    if not byte_level:
        chat.byte_table = None  # the other kind of vocabulary is decoded by the tokenizer itself
    [hello] = chat.encode_prompt("hello")
    growing = detokenizer(chat)
    text = "".join(growing.push([token]) for token in (hello, 49152, 10**6, hello)) + growing.flush()
    assert text == "hellohello"
    assert chat.piece(10**6) == b""


def sentencepiece(tokens):
    """Like SentencePiece: a word token begins with a space, dropped at the very start; bytes join to characters."""
    data = b"".join(bytes([t]) if t < 256 else b" w%d" % t for t in tokens)
    return data.decode("utf-8", "replace").removeprefix(" ")


@given(st.lists(st.one_of(st.integers(256, 300), st.integers(97, 122)), max_size=40))
def test_a_window_gives_the_text_of_the_whole(tokens):
    detokenizer = WindowDetokenizer(sentencepiece)
    text = "".join(detokenizer.push([token]) for token in tokens) + detokenizer.flush()
    assert text == sentencepiece(tokens)


pieces = st.lists(st.text("abc", max_size=4), max_size=12)
stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


@given(pieces, stops)
def test_the_text_ends_where_the_first_stop_sequence_begins(parts, sequences):
    matcher = StopMatcher(tuple(sequences))
    shown = "".join(matcher.push(part) for part in parts) + matcher.flush()
    whole = "".join(parts)
    # A generation is stopped as soon as a sequence is complete, so what counts is which one completes first.
    ends = [(whole.find(s) + len(s), s) for s in sequences if s in whole]
    if not ends:
        assert (shown, matcher.matched) == (whole, None)
    else:
        assert matcher.matched is not None
        assert whole.startswith(shown + matcher.matched)
        assert not any(s in shown for s in sequences)


# Reasoning.


PLAIN = st.text("ab<think/> \n", max_size=20).filter(lambda text: "<think>" not in text and "</think>" not in text)
CUTS = st.lists(st.integers(0, 60), max_size=30)


def reasoning_and_answer(text, cuts=(), *, begun=False):
    parser, found = ReasoningFirst(begun=begun), Blocks(skip_blanks=False)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    for start, end in itertools.pairwise(ends):
        parser.push(text[start:end], found)
    parser.finish(found, cut=False)
    ended = Finished(FinishReason.STOP, None, None, blocks=found.blocks)
    return ended.text(BlockKind.REASONING), ended.text()


@given(PLAIN, PLAIN, CUTS, st.booleans())
def test_reasoning_and_answer_are_separated_however_the_text_is_cut(thought, answer, cuts, begun):
    text = f"{'' if begun else '<think>'}{thought}</think>\n\n{answer}"
    assert reasoning_and_answer(text, cuts, begun=begun) == (thought, answer.lstrip())


@given(PLAIN, CUTS)
def test_without_reasoning_at_its_beginning_all_is_answer(answer, cuts):
    for text in (answer, f"see {answer}<think>x</think>"):
        assert reasoning_and_answer(text, cuts) == ("", text)


def test_tokens_of_reasoning_and_of_its_end_are_counted_apart():
    answer = AnswerBuilder(TOKENIZER, Sampling(), ReasoningFirst())
    for token in b"<think>So</think>Yes.":
        answer.push(TokenDelta(1, [token]))
    usage = answer.finished(0.0, 0.0).usage
    assert (usage.reasoning_tokens, usage.completion_tokens) == (len("So</think>"), 21)


# An answer that is sent as a whole and is generated twice, since its first engine died.


async def test_reasoning_is_found_again_in_the_second_attempt(store):
    async with writing(store, "<think>So.</think>Hello.") as (client, _, engine):
        complete = engine.generate

        async def dies_before_its_last_token(job):
            engine.generate = complete
            async for delta in complete(job):
                if delta.finish is not None:
                    raise EngineUnavailable("the engine process died")
                yield delta

        engine.generate = dies_before_its_last_token
        body = {"model": WRITER, "messages": [{"role": "user", "content": "Hello"}]}
        async with client.post("/v1/chat/completions", json=body) as reply:
            message = (await reply.json())["choices"][0]["message"]
    assert len(engine.jobs) == 2
    assert (message["reasoning_content"], message["content"]) == ("So.", "Hello.")


# Blocks.

CALL = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'
CHAT = [{"role": "user", "content": "Hello"}]
LOOK = {"name": "look", "parameters": {"type": "object"}}


def blocks_of(text, *, size=1000, parser=None, single=False, cut=False):
    """The blocks of an answer; the events say the same, and only the last block is ever open."""
    answer = AnswerBuilder(
        TOKENIZER, Sampling(), parser or ReasoningFirst(lambda: TaggedCalls({"look"})), single_call=single
    )
    tokens, finish = list(text.encode()), "length" if cut else "stop"
    events = [
        e for at in range(0, len(tokens), size) for e in answer.push(TokenDelta(1, tokens[at : at + size], finish))
    ]
    events += answer.flush()
    blocks = answer.finished(0.0, 0.0).blocks
    assert [event.block for event in events if isinstance(event, Opened)] == blocks
    assert [event.block for event in events if isinstance(event, Closed)] == blocks
    assert [block.index for block in blocks] == list(range(len(blocks)))
    for block in blocks:
        assert block.text == "".join(e.text for e in events if isinstance(e, Grown) and e.block is block)
    return blocks


def kinds_and_texts(text, **options):
    return [(block.kind.value, block.text) for block in blocks_of(text, **options)]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("Hello \n", [("text", "Hello \n")]),
        (" \n ", []),
        (f" \n{CALL}\n\n{CALL}\n", [("call", '{"at": "x"}')] * 2),
        (f"\nSee:\n{CALL}\nThere.", [("text", "\nSee:\n"), ("call", '{"at": "x"}'), ("text", "There.")]),
        (f"<think>So</think>\n\n{CALL}", [("reasoning", "So"), ("call", '{"at": "x"}')]),
        ("<think>\n</think>\n\nYes.", [("reasoning", "\n"), ("text", "Yes.")]),
        ("<think>so far", [("reasoning", "so far")]),
    ],
)
def test_an_answer_is_blocks_and_blanks_around_calls_are_no_text(text, blocks, size):
    assert kinds_and_texts(text, size=size) == blocks


def test_only_a_call_that_the_length_cut_is_no_call():
    for length, cut, calls in ((-14, True, 0), (-12, True, 1), (-14, False, 1)):
        blocks = blocks_of(CALL[:length], parser=TaggedCalls({"look"}), cut=cut)
        assert len(Finished(FinishReason.LENGTH, None, None, blocks=blocks).calls) == calls
    assert kinds_and_texts(CALL + CALL, single=True) == [("call", '{"at": "x"}')]


async def test_every_dialect_streams_the_blocks_that_its_whole_reply_has(store):
    text = f" \n{CALL}\n There. \n{CALL}\n"
    async with writing(store, text) as (client, *_):

        async def lines(path, **fields):
            async with client.post(
                path, json={"model": WRITER, "messages": CHAT, "max_tokens": 200, **fields}
            ) as reply:
                sent = [line.removeprefix("data: ") for line in (await reply.text()).splitlines()]
            return [json.loads(line) for line in sent if line.startswith("{")]

        tools = [{"type": "function", "function": LOOK}]
        [whole] = await lines("/v1/chat/completions", tools=tools)
        deltas = [c["choices"][0]["delta"] for c in await lines("/v1/chat/completions", tools=tools, stream=True)]
        assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]
        [whole] = await lines("/api/chat", tools=tools, stream=False)
        frames = [frame["message"] for frame in await lines("/api/chat", tools=tools, stream=True)]
        assert "".join(frame["content"] for frame in frames) == whole["message"]["content"]
        # A call comes when it is complete, before the text that follows it.
        assert next("tool_calls" in frame for frame in frames if frame["content"] or "tool_calls" in frame)
        named = [{"name": "look", "input_schema": LOOK["parameters"]}]
        [whole] = await lines("/v1/messages", tools=named)
        begun = [e for e in await lines("/v1/messages", tools=named, stream=True) if e["type"] == "content_block_start"]
        kinds = ["tool_use", "text", "tool_use"]
        assert [block["type"] for block in whole["content"]] == kinds
        assert [event["content_block"]["type"] for event in begun] == kinds
        assert [event["index"] for event in begun] == [0, 1, 2]
        assert begun[1]["content_block"]["text"] == ""
