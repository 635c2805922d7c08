"""A model on the NPU and the CPU, changed by reloads under load: the NPU waits for no load, the CPU for one."""

import asyncio

import pytest

from tests.support.cut_model import EMBEDDER
from tests.support.nodes import start_node

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


async def test_the_first_device_waits_for_no_load_while_a_model_is_changed_and_the_second_serves(
    quick_npu_models, tmp_path, http
):
    config = tmp_path / "node.toml"
    over, replies = asyncio.Event(), {"NPU": 0, "CPU": 0}

    def write(outstanding):
        lines = ("[[models]]", f'name = "{EMBEDDER}"', 'placements = ["NPU", "CPU"]', "npu_buckets = [16]")
        config.write_text("\n".join((*lines, f"max_outstanding = {outstanding}", "")))

    async def ask(device):
        wanted = {"model": EMBEDDER, "input": f"for the {device}"}
        headers = {"X-NPU-Require-Device": device}
        async with http.post(node.url + "/api/embed", json=wanted, headers=headers) as reply:
            body = await reply.json()
            assert (reply.status, reply.headers.get("X-NPU-Node-Device")) == (200, device), body
        replies[device] += 1
        return body["load_duration"]

    async def caller(device):
        while not over.is_set():
            assert await ask(device) == 0 or device == "CPU"
            await asyncio.sleep(0.05)

    # More than 5 s where other work is done: a node whose model is compiled four times.
    write(100)
    with start_node("--config", str(config), NPU_NODE_NPU_EMULATION="1", **quick_npu_models) as node:
        assert await ask("CPU") > 0, "the CPU's engine is loaded for the first request"
        callers = [asyncio.create_task(caller(device)) for device in replies]
        write(101)
        async with http.post(node.url + "/admin/reload") as reply:
            report = await reply.json()
            assert (report["changed"], report["problems"]) == ([EMBEDDER], [])
        before = dict(replies)
        async with asyncio.timeout(100):
            while any(replies[device] < before[device] + 2 for device in replies):
                assert not any(task.done() for task in callers), callers
                await asyncio.sleep(0.01)
        over.set()
        await asyncio.gather(*callers)
