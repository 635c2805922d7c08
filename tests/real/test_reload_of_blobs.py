"""Blobs that are set and left out, reloaded under load: no request is lost."""

import asyncio
import shutil
from collections import Counter

import pytest

from tests.real.test_compiled_ahead import blobs  # noqa: F401  (a fixture)
from tests.support.cut_model import WRITER
from tests.support.nodes import start_node

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(300)]


class Load:
    """Two callers of each device, who ask again and again. On the NPU the same greedy answer comes every time."""

    def __init__(self, http, node):
        self.http, self.node, self.over = http, node, asyncio.Event()
        self.answers, self.said = Counter(), set()
        self.callers = [asyncio.create_task(self._ask(device, n)) for device in ("NPU", "CPU") for n in range(2)]

    async def _ask(self, device, number):
        # Prompts of the CPU differ, so that none is answered from another's prefix.
        prompt = "Once upon a time" if device == "NPU" else f"{number} {self.answers.total()} times"
        wanted = {"model": WRITER, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
        headers = {"X-NPU-Require-Device": device, "X-Request-Timeout-Ms": "100000"}
        while not self.over.is_set():
            async with self.http.post(self.node.url + "/v1/completions", json=wanted, headers=headers) as reply:
                body = await reply.json()
                assert reply.status == 200, body
                assert reply.headers["X-NPU-Node-Device"] == device
            assert body["usage"]["completion_tokens"] == 8
            if device == "NPU":
                self.said.add(body["choices"][0]["text"])
            self.answers[device, number] += 1

    async def goes_on(self):
        """Wait until every caller has had one more answer than now."""
        before = self.answers.copy()
        async with asyncio.timeout(100):
            while any(self.answers[caller] <= before[caller] for caller in before) or len(before) < len(self.callers):
                before = before if len(before) == len(self.callers) else self.answers.copy()
                assert not any(caller.done() for caller in self.callers), [c for c in self.callers if c.done()]
                await asyncio.sleep(0.01)

    async def end(self):
        self.over.set()
        await asyncio.gather(*self.callers)


async def test_blobs_come_and_go_under_load(quick_npu_models, blobs, store, tmp_path, http):  # noqa: F811
    # More than 5 s: a node whose two engines are loaded four times, and the blobs before that.
    damaged = tmp_path / "damaged"
    shutil.copytree(blobs, damaged)
    whole = (blobs / "generate.blob").read_bytes()
    (damaged / "generate.blob").write_bytes(whole[: len(whole) // 2])
    config = tmp_path / "node.toml"

    def write(*lines):
        shape = ("max_prompt_len = 64", "min_response_len = 64", "prefill_chunk_size = 64")
        places = 'placements = [{device = "NPU", load = "eager"}, {device = "CPU", load = "eager"}]'
        config.write_text("\n".join(("[[models]]", f'name = "{WRITER}"', places, *shape, *lines, "")))

    async def reloaded():
        async with http.post(node.url + "/admin/reload") as reply:
            assert reply.status == 200, await reply.text()
            return await reply.json()

    write()
    with start_node("--config", str(config), NPU_NODE_NPU_EMULATION="1", **quick_npu_models) as node:
        processes = len(node.engine_processes())
        load = Load(http, node)
        await load.goes_on()
        write(f'blobs = "{blobs}"')
        assert (await reloaded())["changed"] == [WRITER]
        await load.goes_on()
        # What cannot be loaded is told, and the engines that are there serve on.
        write(f'blobs = "{damaged}"')
        (problem,) = (await reloaded())["problems"]
        assert "generate.blob" in problem
        await load.goes_on()
        write()
        assert (await reloaded())["problems"] == []
        await load.goes_on()
        await load.end()
        assert len(load.said) == 1, "compiled or from blobs, the NPU answers the same"
        async with asyncio.timeout(60):
            while len(node.engine_processes()) != processes:
                await asyncio.sleep(0.05)
