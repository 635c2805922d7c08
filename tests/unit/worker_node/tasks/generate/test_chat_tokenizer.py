"""Large texts and long conversations: where they are tokenized, and which are refused before."""

import pytest

from worker_node.core.errors import BadRequest, ContextLengthExceeded
from worker_node.sandbox.pool import PreparationLimits, PreparationPool
from worker_node.tasks.generate import chat_tokenizer
from worker_node.tasks.generate.answer import detokenizer
from worker_node.tasks.generate.chat_tokenizer import ChatTokenizer, LargeTexts
from worker_node.tasks.generate.request import Message, Rendering, ToolCall

FAR = 1e12
SMALL = "the lighthouse keeper "
LARGE = SMALL * 500


class Pool:
    """Calls the functions here, and notes them."""

    def __init__(self):
        self.called = []

    async def run(self, function, *arguments, deadline, param):
        self.called.append(function)
        return function(*arguments)


@pytest.fixture(scope="module")
def chat(store):
    installed = store.get("smollm2-135m-instruct")
    return ChatTokenizer(installed.path, installed.context_limit)


def test_special_tokens_have_text_only_where_it_is_asked_for(chat):
    tokens = chat.encode_chat([Message("user", "漢🙂é")])
    growing = detokenizer(chat)
    text = growing.push(tokens) + growing.flush()
    assert text == chat.decode(tokens)
    assert "<|im_start|>" not in text
    assert "<|im_start|>" in chat.decode(tokens, skip_special_tokens=False)
    assert chat.piece(tokens[0]) == b""


@pytest.fixture
def pool():
    return Pool()


@pytest.fixture
def texts(pool):
    return LargeTexts(pool=pool)


@pytest.mark.parametrize("text", [SMALL, LARGE, "漢🙂é" * 1000], ids=["small", "large", "of many bytes"])
async def test_the_tokens_are_the_same_wherever_they_are_made(chat, pool, texts, text):
    tokens = await texts.encode(chat, text, deadline=FAR)
    assert tokens == chat.encode_prompt(text)
    assert pool.called == ([] if text == SMALL else [chat_tokenizer.encode])


async def test_a_large_conversation_is_rendered_elsewhere_with_all_that_belongs_to_it(chat, pool, texts):
    messages = (
        Message("system", "Be brief."),
        Message("user", LARGE),
        Message("assistant", "", tool_calls=(ToolCall("clock", {"zone": "UTC"}),)),
        Message("tool", "12:00", tool_name="clock"),
        Message("assistant", "It is"),
    )
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
    rendering = Rendering({"date": "today"}, answer_prompt=False, continue_last=True, tools=tools, think=False)
    assert await texts.render(chat, messages, rendering, deadline=FAR) == chat.render(messages, rendering)
    assert pool.called == [chat_tokenizer.render]


@pytest.mark.parametrize(
    ("messages", "tools", "elsewhere"),
    [
        ([Message("user", "a"), Message("assistant", "b")] * 50, None, False),
        ([Message("user", "a"), Message("assistant", "b")] * 200, None, True),
        ([Message("user", "a"), Message("assistant", "", (ToolCall("clock", {"zone": LARGE}),))], None, True),
        ([Message("user", "a")], [{"type": "function", "function": {"name": "f", "description": LARGE}}], True),
    ],
    ids=["some messages", "many messages", "large arguments", "large tools"],
)
async def test_a_conversation_is_large_by_all_that_the_template_renders(chat, pool, texts, messages, tools, elsewhere):
    await texts.render(chat, messages, Rendering(tools=tools), deadline=FAR)
    assert pool.called == ([chat_tokenizer.render] if elsewhere else [])


def test_neighbouring_turns_of_one_role_are_one_turn_and_results_stay_apart(chat):
    call, result = ToolCall("clock", {}), Message("tool", "12:00", tool_name="clock")
    parts = [Message("system", "Be brief."), Message("system", ""), Message("system", "Be kind.")]
    parts += [Message("user", "Hello."), Message("user", "What time is it?")]
    parts += [Message("assistant", "", (call,)), Message("assistant", "", (call,)), result, result]
    whole = [Message("system", "Be brief.\n\nBe kind."), Message("user", "Hello.\n\nWhat time is it?")]
    whole += [Message("assistant", "", (call, call)), result, result]
    assert chat.render(parts) == chat.render(whole)
    assert chat.render(whole).count("<|im_start|>") == 6


async def test_what_cannot_fit_whatever_its_tokens_is_refused_without_a_process(chat, pool, texts):
    hopeless = "a" * (chat.context_limit * 81 + 1)
    with pytest.raises(ContextLengthExceeded, match="characters"):
        await texts.encode(chat, hopeless, deadline=FAR)
    with pytest.raises(ContextLengthExceeded, match="characters"):
        await texts.render(chat, [Message("user", hopeless)], deadline=FAR)
    with pytest.raises(ContextLengthExceeded, match="messages"):
        await texts.render(chat, [Message("user", "a")] * (chat.context_limit + 1), deadline=FAR)
    assert pool.called == []


# Some 3 s: a process imports the runtime and loads the tokenizer, twice.
async def test_a_process_tokenizes_refuses_and_is_ended_at_its_limit(chat):
    texts = LargeTexts()
    try:
        assert await texts.encode(chat, LARGE, deadline=FAR) == chat.encode_prompt(LARGE)
        with pytest.raises(ContextLengthExceeded, match="tokens or more"):
            await texts.encode(chat, SMALL * 20_000, deadline=FAR)
    finally:
        await texts.close()
    impatient = LargeTexts(
        pool=PreparationPool(PreparationLimits(cpu_s=0.01, memory_bytes=8 * 2**30), chat_tokenizer._MODULES)
    )
    try:
        with pytest.raises(BadRequest, match="CPU time"):
            await impatient.encode(chat, LARGE, deadline=FAR)
    finally:
        await impatient.close()
