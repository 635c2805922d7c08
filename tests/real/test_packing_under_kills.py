"""Packed rows over HTTP on the emulated NPU, whose engine is killed meanwhile: every vector is that of its text."""

import asyncio
import json
import os
import signal

import numpy as np
import pytest

from tests.support.nodes import start_node
from tests.support.tiny_encoder import write_encoder

pytestmark = pytest.mark.real

TEXTS = ["the cat", "a b c d e f g", "cats", "the the the the", "1 2 3", "x"]


async def test_a_killed_engine_mixes_up_no_packed_texts(tmp_path, http):
    # Over 5 s: a real node, whose engine compiles its shape three times.
    write_encoder(tmp_path / "tiny")
    table = {"path": str(tmp_path / "tiny"), "placements": ["NPU"], "npu_packing": True, "npu_buckets": [32]}
    settings = {
        "NPU_NODE_NPU_EMULATION": "1",
        "NPU_NODE_MODELS": json.dumps([table]),
        "NPU_NODE_COMPILE_CACHE": str(tmp_path / "cache"),
    }
    with start_node("--log-level", "error", **settings) as node:

        async def vector(text):
            body = {"model": "tiny", "input": text}
            async with http.post(f"{node.url}/v1/embeddings", json=body) as reply:
                answer = await reply.json()
                assert reply.status == 200, answer
                assert reply.headers["X-NPU-Node-Device"] == "NPU"
                return np.array(answer["data"][0]["embedding"])

        alone = {text: await vector(text) for text in TEXTS}
        over = asyncio.Event()
        answered = 0

        async def ask(text):
            nonlocal answered
            while not over.is_set():
                found = await vector(text)
                assert found @ alone[text] / np.linalg.norm(found) / np.linalg.norm(alone[text]) > 0.999
                answered += 1

        async with asyncio.TaskGroup() as tasks:
            for text in TEXTS * 3:
                tasks.create_task(ask(text))
            for _ in range(2):
                before = answered
                async with asyncio.timeout(100):
                    while answered < before + 50:
                        await asyncio.sleep(0.01)
                (pid,) = node.engine_processes()
                os.kill(pid, signal.SIGKILL)
                async with asyncio.timeout(100):
                    while node.engine_processes() in ({pid}, set()):
                        await asyncio.sleep(0.05)
                before = answered
                async with asyncio.timeout(100):
                    while answered < before + 50:
                        await asyncio.sleep(0.01)
            over.set()
