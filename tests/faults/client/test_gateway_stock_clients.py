"""Stock clients of three dialects through npu-gateway while its nodes die, hang, lie and return.

What a call must say follows from its prompt alone, so that an answer of another request, a part that was lost or sent
twice, and a wrong vector all show. Else it must be an error of the client's own kind, with a status that says who is to
blame: nobody but the fleet.
"""

import asyncio
import base64
import contextlib
import hashlib
import itertools
import json
import random
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import openai
from aiohttp import web
from aiohttp.test_utils import TestServer

from backend_client import InferenceClient, NPUClient
from backend_client.gateway.app import make_app
from backend_client.gateway.settings import GatewaySettings
from backend_client.options import ClientOptions
from backend_client.testing import FakeNode
from backend_client.testing.fleet import Served
from backend_client.testing.node import EMBEDDER, WRITER, route_headers
from tests.support.later import Later

anthropic = Later("anthropic")
ollama = Later("ollama")

SEED = 20261124
CALLS = 40
BLAMED = {429, 503, 504, 529}
USAGE = {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
STREAMS = {"sse": "text/event-stream", "lines": "application/x-ndjson"}
PATHS = "/v1/chat/completions", "/v1/messages", "/api/chat"


def words_for(prompt):
    """The answer to a prompt, in its pieces."""
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    return [f"{digest[start : start + 6]} " for start in range(0, 48, 6)]


def vector_for(text):
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    return np.random.default_rng(seed).standard_normal(8).astype("<f4")


def sse(data, name=""):
    return (f"event: {name}\n" if name else "").encode() + f"data: {json.dumps(data)}\n\n".encode()


def answer_of(path, body, space=""):
    """A node's whole reply, or the kind and the parts of its stream."""
    if path in {"/v1/embeddings", "/api/embed"}:
        vectors = [vector_for(space + text) for text in body["input"]]
        if path == "/api/embed":
            return {"model": EMBEDDER, "embeddings": [vector.tolist() for vector in vectors]}
        in_base64 = body.get("encoding_format") == "base64"
        rows = [base64.b64encode(v.tobytes()).decode() if in_base64 else v.tolist() for v in vectors]
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
        return {"object": "list", "model": EMBEDDER, "data": data, "usage": {"prompt_tokens": 1, "total_tokens": 1}}
    words = words_for(body["messages"][0]["content"])
    stream = body.get("stream", path == "/api/chat")
    return FORMS[path](words) if stream else WHOLE[path]("".join(words))


def openai_stream(words):
    head = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": WRITER}
    deltas = [
        ({"role": "assistant", "content": ""}, None),
        *(({"content": word}, None) for word in words),
        ({}, "stop"),
    ]
    chunks = [{**head, "choices": [{"index": 0, "delta": d, "finish_reason": reason}]} for d, reason in deltas]
    return "sse", [*map(sse, chunks), b"data: [DONE]\n\n"]


def anthropic_stream(words):
    message = {"id": "m", "type": "message", "role": "assistant", "model": WRITER, "content": [], "stop_reason": None}
    usage = {"input_tokens": 3, "output_tokens": 0}
    events = [
        {"type": "message_start", "message": {**message, "stop_sequence": None, "usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": w}} for w in words),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": usage},
        {"type": "message_stop"},
    ]
    return "sse", [sse(event, event["type"]) for event in events]


def ollama_stream(words):
    rows = [{"model": WRITER, "message": {"role": "assistant", "content": w}, "done": False} for w in words]
    end = {"model": WRITER, "message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "stop"}
    return "lines", [json.dumps(row).encode() + b"\n" for row in [*rows, end]]


FORMS = dict(zip(PATHS, (openai_stream, anthropic_stream, ollama_stream), strict=True))
WHOLE = {
    "/v1/chat/completions": lambda text: {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": WRITER,
        "usage": USAGE,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
    },
    "/v1/messages": lambda text: {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": WRITER,
        "stop_sequence": None,
        "content": [{"type": "text", "text": text}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 3, "output_tokens": 8},
    },
    "/api/chat": lambda text: {
        "model": WRITER,
        "message": {"role": "assistant", "content": text},
        "done": True,
        "done_reason": "stop",
    },
}


class Node:
    """Answers in all dialects, except for the share of requests that `faults` are drawn for."""

    FAULTS = "refused", "overloaded", "dropped", "hung", "cut", "cut short", "error event", "another space", "one less"

    def __init__(self, rng):
        self._rng = rng
        self._health = FakeNode(lambda _: None, 8)
        self.faults = 0.0
        self.drawn = Counter()
        self.port = 0
        self._served = None
        # One caller kills while another starts.
        self._changing = asyncio.Lock()

    @property
    def alive(self):
        return self._served is not None

    async def start(self):
        async with self._changing:
            if self.alive:
                return
            app = web.Application()
            app.router.add_get("/health", self._report)
            app.router.add_post("/{path:.*}", self._answer)
            self._served = await Served.start(app, self.port)
            self.port = self._served.port
            self.url = f"http://127.0.0.1:{self.port}"

    async def kill(self):
        async with self._changing:
            served, self._served = self._served, None
            if served is None:
                return
            for connection in served.runner.server.connections:
                # None: its client left, and its handler has not ended yet.
                if connection.transport is not None:
                    connection.transport.abort()
            await served.end()

    async def _report(self, _):
        answer = self._health.health()
        return web.Response(body=answer.body, headers=answer.headers)

    async def _answer(self, request):
        body = json.loads(await request.read())
        fault = self._rng.choice(self.FAULTS) if self._rng.random() < self.faults else None
        if fault is not None:
            self.drawn[fault] += 1
        found = answer_of(request.path, body, space="another" * (fault == "another space"))
        if fault in {"refused", "overloaded"}:
            error = {"message": "scripted", "type": "x", "code": "engine_unavailable", "param": None}
            status = 503 if fault == "refused" else 429
            text = json.dumps({"error": error if request.path != "/api/chat" else "scripted"})
            return web.Response(status=status, text=text, headers={"retry-after-ms": "50"})
        if fault == "hung":
            await asyncio.get_running_loop().create_future()
        if fault == "dropped":
            request.transport.abort()
        if isinstance(found, tuple):
            return await self._stream(request, *found, fault)
        return self._whole(found, fault)

    def _whole(self, found, fault):
        rows = found.get("data") or found.get("embeddings")
        headers = route_headers(WRITER if rows is None else EMBEDDER)
        if rows is not None:
            headers["X-Space"] = "another" if fault == "another space" else "fake-space"
            if fault == "one less":
                del rows[-1]
        text = json.dumps(found)
        if fault == "cut short":
            text = text[: len(text) // 2]
        return web.Response(text=text, headers=headers | {"Content-Type": "application/json"})

    async def _stream(self, request, kind, parts, fault):
        response = web.StreamResponse(headers={"Content-Type": STREAMS[kind], **route_headers(WRITER)})
        # The gateway leaves when its caller's deadline is over.
        with contextlib.suppress(ConnectionError):
            await self._send(request, response, kind, parts, fault)
        return response

    async def _send(self, request, response, kind, parts, fault):
        await response.prepare(request)
        after = self._rng.randrange(len(parts)) if fault in {"cut", "cut short", "error event"} else len(parts)
        for part in parts[:after]:
            await response.write(part)
            await asyncio.sleep(0)
        if fault == "cut":
            request.transport.abort()
        if fault == "cut short":
            await response.write(parts[after][: len(parts[after]) // 2])
        if fault == "error event":
            error = {"message": "scripted", "type": "overloaded_error", "code": "engine_unavailable", "param": None}
            broken = {"lines": b'{"error":"scripted"}\n', "sse": sse({"error": error}, "error")}[kind]
            if request.path == "/v1/chat/completions":
                broken = sse({"error": error})
            if request.path == "/v1/messages":
                broken = sse({"type": "error", "error": error}, "error")
            await response.write(broken)
        await response.write_eof()


def asks(text):
    return {"model": WRITER, "messages": [{"role": "user", "content": text}]}


class Callers:
    """Each method makes one call with a stock client and adds what it gets to `got`; it returns once all is there."""

    def __init__(self, url):
        self._url = url
        options = {"api_key": "unused", "max_retries": 0, "timeout": 60}
        self._openai = openai.AsyncOpenAI(base_url=url + "/v1", **options)
        self._anthropic = anthropic.AsyncAnthropic(base_url=url, **options)
        self._ollama = ollama.AsyncClient(host=url)

    async def close(self):
        await self._openai.close()
        await self._anthropic.close()
        await self._ollama._client.aclose()

    async def openai_chat(self, text, got):
        reply = await self._openai.chat.completions.create(**asks(text))
        got.append(reply.choices[0].message.content)
        assert reply.choices[0].finish_reason == "stop"

    async def openai_stream(self, text, got):
        last = None
        async with await self._openai.chat.completions.create(**asks(text), stream=True) as stream:
            async for chunk in stream:
                last = chunk.choices[0]
                got.append(last.delta.content or "")
        assert last.finish_reason == "stop"

    async def openai_embed(self, text, got):
        reply = await self._openai.embeddings.create(model=EMBEDDER, input=[text, f"{text}, too"])
        got.extend(row.embedding for row in reply.data)

    async def anthropic_message(self, text, got):
        reply = await self._anthropic.messages.create(**asks(text), max_tokens=9)
        got.append(reply.content[0].text)
        assert reply.stop_reason == "end_turn"

    async def anthropic_stream(self, text, got):
        async with self._anthropic.messages.stream(**asks(text), max_tokens=9) as stream:
            async for part in stream.text_stream:
                got.append(part)
            assert (await stream.get_final_message()).stop_reason == "end_turn"

    async def ollama_chat(self, text, got):
        reply = await self._ollama.chat(**asks(text))
        got.append(reply.message.content)

    async def ollama_stream(self, text, got):
        last = None
        async for last in await self._ollama.chat(**asks(text), stream=True):
            got.append(last.message.content)
        assert last.done

    async def ollama_embed(self, text, got):
        reply = await self._ollama.embed(EMBEDDER, [text, f"{text}, too"])
        got.extend(reply.embeddings)


KINDS = [name for name in vars(Callers) if not name.startswith("_") and name != "close"]


ERRORS = {"openai": openai.APIError, "anthropic": anthropic.APIStatusError, "ollama": ollama.ResponseError}


async def call(callers, kind, text):
    """One call, judged by its prompt: True if it was answered, False if it had a permitted error."""
    got = []
    embeds = kind.endswith("embed")
    expected = [vector_for(text), vector_for(f"{text}, too")] if embeds else "".join(words_for(text))
    failed = None
    try:
        await getattr(callers, kind)(text, got)
    except ERRORS[kind.partition("_")[0]] as error:
        failed = error
    if failed is not None:
        status = getattr(failed, "status_code", getattr(failed, "status", None))
        # An event in a stream that has begun: its status was 200, or is not known.
        begun = kind.endswith("stream") and status in {None, -1, 200}
        assert begun or status in BLAMED, f"{kind}: {failed!r}"
        assert not isinstance(failed, openai.APIConnectionError), f"{kind}: {failed!r}"
        assert not got if embeds else expected.startswith("".join(got))
        return False
    if embeds:
        np.testing.assert_array_equal(np.asarray(got, "<f4"), np.asarray(expected))
    else:
        assert "".join(got) == expected
    return True


@asynccontextmanager
async def running():
    """Three nodes, and callers of the gateway in front of them."""
    async with AsyncExitStack() as stack:
        nodes = [Node(random.Random(SEED + index)) for index in range(3)]
        for node in nodes:
            await node.start()
            stack.push_async_callback(node.kill)
        times = {"timeouts": {"embed": 3, "generate": 3}, "probe": {"interval": 0.2, "timeout": 0.5}}
        breaker = {"base": 0.1, "longest": 0.3, "longest_probed": 0.2, "longest_model": 0.3, "recovery": 0.1}
        # More retries than faults, as in a fleet where only a few of a thousand requests fail.
        options = ClientOptions(**times, breaker=breaker, retry={"per_request": 1, "initial": 20})
        client = NPUClient([node.url for node in nodes], spaces={EMBEDDER: "fake-space"}, options=options)
        app = make_app(GatewaySettings.load(), InferenceClient(client))
        server = await stack.enter_async_context(TestServer(app, host="127.0.0.1", handler_cancellation=True))
        callers = Callers(str(server.make_url("")).rstrip("/"))
        stack.push_async_callback(callers.close)
        yield nodes, callers, client


async def test_every_answer_is_right_or_a_typed_error_while_nodes_die_and_return(caplog):
    rng = random.Random(SEED)
    plan = [(kind, f"{kind} {number}") for kind in KINDS for number in range(CALLS)]
    rng.shuffle(plan)
    answered, refused = Counter(), Counter()
    async with running() as (nodes, callers, client):
        waiting = iter(plan)
        done = itertools.count(1)

        async def caller():
            for kind, text in waiting:
                (answered if await call(callers, kind, text) else refused)[kind] += 1
                if next(done) % 15 == 0:
                    # By the count of answers, not by a clock. Mostly one is dead, now and then all three.
                    dead = [node for node in nodes if not node.alive]
                    if dead and rng.random() < 0.6:
                        await rng.choice(dead).start()
                    else:
                        await rng.choice(nodes).kill()

        for node in nodes:
            node.faults = 0.25
        async with asyncio.TaskGroup() as group:
            for _ in range(12):
                group.create_task(caller())
        for node in nodes:
            node.faults = 0.0
            await node.start()
        async with asyncio.timeout(60):
            while client.healthz().nodes_usable < 3:
                await asyncio.sleep(0.05)
        for kind in KINDS:
            assert await call(callers, kind, f"{kind} after the faults"), f"{kind} is still refused"
    assert sum(answered.values()) + sum(refused.values()) == len(plan)
    assert set(answered) == set(KINDS)
    assert refused, "no call saw a fault: the test has shown nothing"
    assert set().union(*(node.drawn for node in nodes)) == set(Node.FAULTS)
    assert "a bug of the gateway" not in caplog.text
