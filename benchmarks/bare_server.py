"""`python -m benchmarks.bare_server [MODEL_DIRECTORY]`: aiohttp and uvloop alone, as the floor of what an edge costs.

It parses the same bodies as a node and sends as many bytes back, after the pauses that an engine would make: a process
that waits for each request finds the caches of its core used by others, which costs more than the work itself. With an
embedding model it answers a node's own route, too, by raw inference in its own process: one text at a time, no more.
"""

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import orjson
import uvloop
from aiohttp import web

from benchmarks.raw import OneText

# About what one text takes on an engine, and one step of a small model.
EMBED_S = 0.004
STEP_S = 0.008
_VECTOR = np.linspace(-0.1, 0.1, 384, dtype=np.float32)
_HEAD = orjson.dumps({"id": "chatcmpl-" + 24 * "0", "object": "chat.completion.chunk", "created": 1, "model": 21 * "m"})


class Steps:
    """Wakes all who wait for the next step, as one frame of an engine wakes all of its streams."""

    def __init__(self, seconds):
        self._seconds = seconds
        self._next = None

    def next(self):
        """What to await for the step that begins now or is under way."""
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            loop.call_later(self._seconds, self._end)
        return self._next

    def _end(self):
        ended, self._next = self._next, None
        ended.set_result(None)


# By their length in seconds, which a request may say.
STEPS = web.AppKey("steps", dict)
MODEL = web.AppKey("model", OneText)


async def _embed(request):
    body = orjson.loads(await request.read())
    await asyncio.sleep(EMBED_S)
    item = {"object": "embedding", "index": 0, "embedding": _VECTOR}
    answer = {"object": "list", "model": body["model"], "usage": {"prompt_tokens": 10}, "data": [item]}
    return web.Response(body=orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), content_type="application/json")


async def _infer(request):
    body = orjson.loads(await request.read())
    (text,) = body["texts"]
    return web.Response(body=request.app[MODEL].vector(text).tobytes(), content_type="application/octet-stream")


async def _chat(request):
    body = orjson.loads(await request.read())
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    length = body.get("step_s", STEP_S)
    steps = request.app[STEPS].setdefault(length, Steps(length))
    with contextlib.suppress(ConnectionResetError):  # the caller has left
        for _ in range(body["max_tokens"]):
            await steps.next()
            part = {"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}
            await response.write(b"data: " + _HEAD[:-1] + b',"choices":[' + orjson.dumps(part) + b"]}\n\n")
        await response.write_eof(b"data: [DONE]\n\n")
    return response


@contextlib.contextmanager
def running(*arguments):
    """Start the server in a process of its own; yield its process id and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.bare_server", *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    try:
        yield process.pid, process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


async def serve(model=None):
    """Listen on a free port of loopback, and print where, until the process is ended."""
    app = web.Application()
    app[STEPS] = {}
    if model is not None:
        app[MODEL] = OneText(Path(model))
        app.add_routes([web.post("/embeddings", _infer)])
    app.add_routes([web.post("/v1/embeddings", _embed), web.post("/v1/chat/completions", _chat)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"listening on http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as main:
        main.run(serve(*sys.argv[1:]))
