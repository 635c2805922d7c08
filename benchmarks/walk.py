"""How many files of the client and of the node's edge process one warm request runs through, by `sys.setprofile`.

    python -m benchmarks.walk [-v]

`changes`: how often control goes to a function of another file. `-v` names the files.
"""

import asyncio
import os
import sys
from collections import Counter
from pathlib import Path

import aiohttp

import backend_client
import worker_node
from backend_client import NPUClient
from backend_client.testing import FakeFleet
from worker_node.server import running_node
from worker_node.settings import NodeSettings

# Heartbeats of engines fall into some: the shortest walk counts.
WALKS = 5
EMBEDDING, CHAT = "/embeddings", "/v1/chat/completions"


def of_the_background():
    """Whether a task of the node's own runs, such as the one that reads figures for the dashboard."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.get_coro().cr_code.co_filename.startswith(str(Path(worker_node.__file__).parent))


class Walk:
    """Counts calls of functions of one package while the block runs."""

    def __init__(self, package):
        self._root = str(Path(package.__file__).parent) + os.sep
        self.calls = []

    def __enter__(self):
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _event(self, frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(self._root) and not of_the_background():
            self.calls.append(frame.f_code.co_filename[len(self._root) :])

    @property
    def changes(self):
        return sum(before != after for before, after in zip(self.calls, self.calls[1:], strict=False))

    def show(self, title):
        print(f"{title}: {len(set(self.calls))} files, {self.changes} changes, {len(self.calls)} calls")
        if "-v" in sys.argv:
            for file, count in Counter(self.calls).most_common():
                print(f"  {count:4d} {file}")


async def client():
    with FakeFleet(1) as fleet:
        async with NPUClient(fleet.urls) as npu:
            for number in range(5):
                await npu.embed(f"text {number}")
            await asyncio.sleep(0.2)
            with Walk(backend_client) as walk:
                await npu.embed("another text")
    walk.show("one warm NPUClient.embed")


async def edge():
    requests = {
        EMBEDDING: {"texts": ["one text"]},
        CHAT: {
            "model": "smollm2-135m-instruct",
            "messages": [{"role": "user", "content": "Say hello"}],
            "max_tokens": 8,
            "stream": True,
        },
    }
    async with running_node(NodeSettings(port=0)) as (_, url), aiohttp.ClientSession(url) as http:

        async def post(path):
            async with http.post(path, json=requests[path]) as reply:
                await reply.read()
                return reply.status

        for path in requests:
            # The first requests wait for the model; the second is warm.
            assert await post(path) == 200
            await post(path)
        # The next decision on what is loaded finds that nobody waits.
        await asyncio.sleep(2.5)
        for path in requests:
            walks = []
            for _ in range(WALKS):
                await asyncio.sleep(0.5)
                with Walk(worker_node) as walk:
                    await post(path)
                walks.append(walk)
            min(walks, key=lambda walk: walk.changes).show(
                f"one warm {path}" + (", 8 tokens streamed" if path == CHAT else "")
            )


if __name__ == "__main__":
    asyncio.run(client())
    asyncio.run(edge())
