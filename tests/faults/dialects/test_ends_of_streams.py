"""Streams whose engine dies (with real engines: tests/real/test_dashboard.py); connections closed in one direction."""

import asyncio

import pytest

from tests.faults.dialects.streams import ROUTES, at_rest, connect, raw_request
from tests.support.application import application
from tests.support.writing import WRITER, WritingEngine, writing_models
from worker_node.core.errors import EngineDied

CALL = '<tool_call>[{"name": "go", "arguments": {"to": 1}}]</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}]
TURNS = [{"role": "user", "content": "Go."}]
OPENAI, OLLAMA = "/v1/chat/completions", "/api/chat"


class DyingEngine(WritingEngine):
    """Dies once, before the last token of an answer."""

    died = False

    async def generate(self, job):
        async for delta in super().generate(job):
            if delta.finish and not self.died:
                self.died = True
                raise EngineDied("the engine process ended")
            yield delta


@pytest.mark.parametrize(
    ("route", "more", "text", "answered"),
    [
        # Ollama's frame of a call has all of it: none was sent.
        (OLLAMA, {"tools": TOOLS}, CALL, True),
        (OLLAMA, {}, "One two three.", False),
        (OPENAI, {"tools": TOOLS}, CALL, False),
        (OPENAI, {"n": 2}, "One two three.", False),
    ],
)
async def test_a_stream_is_run_again_after_its_engines_death_only_if_no_part_was_sent(
    store, route, more, text, answered
):
    engine = DyingEngine(text)
    async with application(writing_models(store, engine)) as (client, _):
        body = {"model": WRITER, "messages": TURNS, "stream": True} | more
        async with client.post(route, json=body) as reply:
            assert reply.status == 200
            frames = await reply.text()
    assert ("the engine process ended" in frames) is not answered
    assert frames.count('"name":"go"') == ("tools" in more)
    assert len(engine.jobs) == more.get("n", 1) + answered


@pytest.mark.real
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", ROUTES)
async def test_a_half_closed_connection_is_answered_or_dropped(http, node, route, stream):
    reader, writer = await connect(node)
    writer.write(raw_request(route, stream=stream, tokens=4))
    writer.write_eof()
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    assert answer == b"" or answer.startswith(b"HTTP/1.1 200")
    await at_rest(http, node)
