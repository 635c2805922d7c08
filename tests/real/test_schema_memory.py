"""A new schema with each request: GenAI keeps every grammar, and the node replaces the engine that has grown."""

import asyncio
import json

import aiohttp
import psutil
import pytest

from tests.support.nodes import start_node

# Two engine processes are loaded, the second while the first is at work: 15 s alone, minutes on a busy machine.
pytestmark = [pytest.mark.real, pytest.mark.usefixtures("store"), pytest.mark.timeout(300)]

MODEL = "smollm2-135m-instruct"
# More than an engine takes for its first requests, and about 15 grammars.
GROWTH = 80 * 2**20


def schema(number):
    """A schema that no other request has; its grammar takes 4 to 5 MB."""
    text = {"type": "string", "maxLength": 1000 + number}
    return {"type": "object", "properties": {f"field{number}": text}, "required": [f"field{number}"]}


async def chat(http, node, **more):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me a long story."}]} | more
    async with http.post(f"{node.url}/v1/chat/completions", json=body) as reply:
        text = await reply.text()
        assert reply.status == 200, text
        return text


async def streams(http, node, stop):
    """One stream after another; each must come to its end."""
    count = 0
    while not stop.is_set():
        text = await chat(http, node, stream=True, max_tokens=40, ignore_eos=True)
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]", events[-1]
        assert not [event for event in events if "error" in event]
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        count += 1
    return count


async def one_schema_after_another(node):
    """Ask with new schemas until the process was replaced; return all pids and streams."""
    stop, pids, number = asyncio.Event(), set(), 0
    async with aiohttp.ClientSession() as http:
        beside = [asyncio.create_task(streams(http, node, stop)) for _ in range(2)]
        while len(pids) < 2 and not any(task.done() for task in beside):
            form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema(number)}}
            await chat(http, node, response_format=form, max_tokens=1)
            number += 1
            pids |= {node.engine_pids()[MODEL]} - {None}
        stop.set()
        return pids, await asyncio.gather(*beside)


def test_new_schemas_for_ever_replace_the_engine_and_every_request_is_answered(tmp_path, long):
    if not long:
        pytest.skip("50 s of CPU time: run with --long; tests/faults/engines/test_growing_engines.py scripts the same")
    config = tmp_path / "node.toml"
    config.write_text(f'engine_memory_growth = {GROWTH}\n[[models]]\nname = "{MODEL}"\nplacements = ["CPU"]\n')
    with start_node("--config", str(config)) as node:
        pids, streamed = asyncio.run(one_schema_after_another(node))
        assert all(streamed)
        assert len(pids) == 2
        _, body = node.health()
        assert body["models"][0]["engines"][0]["restarts"] == 0
        # The processes that were replaced end after their last streams.
        for process in psutil.Process(node.process.pid).children(recursive=True):
            if process.pid in pids and process.pid != node.engine_pids()[MODEL]:
                process.wait(60)
