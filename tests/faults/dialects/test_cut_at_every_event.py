"""The socket is closed at every event of a stream, in every dialect, while others stream from the same engine."""

import asyncio
import contextlib
import json
import re
from unittest.mock import ANY

import pytest

from tests.support.application import application
from tests.support.writing import WRITER, WritingEngine, writing_models
from worker_node.http.connection import ConnectionLimits, Connections
from worker_node.http.replies import error_response
from worker_node.tasks.generate.answer import detokenizer
from worker_node.tasks.generate.messages import TokenDelta

TEXT = "One two three."
CALL = '<tool_call>[{"name": "go", "arguments": {"to": 1}}]</tool_call>'
# The engine writes so many tokens of such an answer, and then nothing more until somebody gives it up.
CUT = re.compile(r"cut after (\d+)")
GO = {"name": "go", "parameters": {"type": "object", "properties": {"to": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": GO}]
FLAT_TOOLS = [{"type": "function", **GO}]
USAGE = {"include_usage": True, "continuous_usage_stats": True}


def turns(prompt):
    return {"messages": [{"role": "user", "content": prompt}]}


# By name: the route, the body, and what its answer is.
FORMS = {
    "chat": ("/v1/chat/completions", turns, TEXT),
    "chat with usage": ("/v1/chat/completions", lambda prompt: turns(prompt) | {"stream_options": USAGE}, TEXT),
    "chat with two choices": ("/v1/chat/completions", lambda prompt: turns(prompt) | {"n": 2}, TEXT),
    "chat with tools": ("/v1/chat/completions", lambda prompt: turns(prompt) | {"tools": TOOLS}, CALL),
    "completions": ("/v1/completions", lambda prompt: {"prompt": prompt, "max_tokens": 99}, TEXT),
    "responses": ("/v1/responses", lambda prompt: {"input": prompt}, TEXT),
    "responses with tools": ("/v1/responses", lambda prompt: {"input": prompt, "tools": FLAT_TOOLS}, CALL),
    "Ollama chat": ("/api/chat", turns, TEXT),
    "Ollama chat with tools": ("/api/chat", lambda prompt: turns(prompt) | {"tools": TOOLS}, CALL),
    "Ollama generate": ("/api/generate", lambda prompt: {"prompt": prompt, "keep_alive": "5m"}, TEXT),
    "native": ("/inference", lambda prompt: {"prompt": prompt}, TEXT),
}


# Of two answers some events may still be under way at a pause, and Ollama tells a call when it is whole.
SENT_LATER = {"chat with two choices", "Ollama chat with tools"}
# Those whose answers go on meanwhile.
OTHERS = ("chat", "Ollama generate", "native")


class PausingEngine(WritingEngine):
    """Stops after some tokens: for good in an answer that is to be cut, until `go` is set in the others'."""

    def __init__(self):
        super().__init__(TEXT)
        self.go = asyncio.Event()
        self.silent = asyncio.Semaphore(0)
        self.open = 0

    async def generate(self, job):
        prompt = detokenizer(self.tokenizer).push(memoryview(job.tokens).cast("i").tolist())
        cut = CUT.search(prompt)
        stop = int(cut[1]) if cut else 2
        self.open += 1
        try:
            for number, token in enumerate(self.tokenizer.encode_prompt(CALL if "call" in prompt else TEXT)):
                if number == stop:
                    await self._pause(asyncio.Event() if cut else self.go)
                yield TokenDelta(1, [token])
            if cut:
                await self._pause(asyncio.Event())
            yield TokenDelta(1, [], "stop")
        finally:
            self.open -= 1

    async def pauses(self, answers):
        async with asyncio.timeout(10):
            for _ in range(answers):
                await self.silent.acquire()

    async def _pause(self, until):
        self.silent.release()
        await until.wait()


class Served:
    """The application with `engine`, listening with the node's own connections."""

    def __init__(self, client, node, engine, port):
        self.node, self.engine, self.port = node, engine, port
        self._server = client.server.runner.server

    def held(self):
        """All that requests take while they are served."""
        model = self.node.manager.models[0]
        return {
            "engine": self.engine.open,
            "admission": [place.admission.outstanding for place in model.placements],
            "backlog": [len(place.admission.prefilling) + len(place.admission.decoding) for place in model.placements],
            "isolation": [place.isolation._users for place in model.placements],
            "in use": model.activity.idle_since is None,
            "requests": self.node.state.running,
            "tasks": len(asyncio.all_tasks()),
            "connections": len(self._server.connections),
        }

    async def returns_to(self, before):
        """Wait until no more is held than before."""
        async with asyncio.timeout(10):
            while self.held() != before:
                await asyncio.sleep(0.001)

    async def send(self, form, prompt, *, stream=True):
        path, body, _ = FORMS[form]
        asked = {"model": WRITER, "stream": stream} | body(prompt)
        if not stream:
            asked.pop("stream_options", None)
        data = json.dumps(asked).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head.encode() + data)
        return reader, writer

    async def cut(self, form, tokens, *, stream=True, reset=False):
        """Leave an answer after its first tokens, when all that there is to send has been sent; return its length."""
        kind = "call" if FORMS[form][2] == CALL else "write"
        reader, writer = await self.send(form, f"{kind}, cut after {tokens}.", stream=stream)
        await self.engine.pauses(2 if "two" in form else 1)
        sent = await reader.read(1 << 20) if stream else b""
        assert sent.startswith(b"HTTP/1.1 200") is stream
        if reset:
            writer.transport.abort()
        else:
            writer.close()
        return len(sent)


@contextlib.asynccontextmanager
async def serving(store):
    engine = PausingEngine()
    async with application(writing_models(store, engine)) as (client, node):
        server, loop = client.server.runner.server, asyncio.get_running_loop()
        limits = ConnectionLimits(60.0, 60.0, 1024, 64)
        connections = Connections(server, limits, lambda _error: None, error_response)
        listener = await loop.create_server(connections.accept, "127.0.0.1", 0)
        try:
            yield Served(client, node, engine, listener.sockets[0].getsockname()[1])
        finally:
            listener.close()
            for connection in server.connections:
                connection.force_close()
            await node.services.parts.close()


@pytest.mark.parametrize("form", FORMS)
async def test_nothing_is_left_of_a_stream_that_is_cut_at_any_event(store, form):
    text = FORMS[form][2]
    async with serving(store) as served:
        engine = served.engine
        tokens = len(engine.tokenizer.encode_prompt(text))
        idle = served.held()
        # The first starts what stays: the process that compiles schemas.
        await served.cut(form, 0)
        await served.returns_to(idle | {"tasks": ANY})
        at_rest = served.held()
        others = [await served.send(other, "write") for other in OTHERS]
        await engine.pauses(len(others))
        before = served.held()
        lengths = []
        for cut in range(tokens + 1):
            lengths.append(await served.cut(form, cut, reset=cut % 2 == 0))
            await served.returns_to(before)
        assert lengths[0] < lengths[-1] or form in SENT_LATER, "the cuts were not at different events"
        for cut in (1, tokens):
            await served.cut(form, cut, stream=False, reset=cut == 1)
            await served.returns_to(before)
        engine.go.set()
        for other in others:
            async with asyncio.timeout(10):
                answer = (await other[0].read()).decode()
            other[1].close()
            assert "".join(re.findall(r'"(?:content|text|response)":"([^"]*)"', answer)) == TEXT
        await served.returns_to(at_rest)
