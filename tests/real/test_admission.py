"""A real node under mixed load: what can be served soon is not refused, interactive work does not wait for batch."""

import asyncio
import os
import signal

import pytest

from tests.real.inference import post

pytestmark = pytest.mark.real

EMBEDDER, GENERATOR = "all-minilm-l6-v2", "smollm2-135m-instruct"


async def reading(http, node, name, **labels):
    async with http.get(node.url + "/metrics") as reply:
        text = await reply.text()
    for line in text.splitlines():
        if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    return None


async def test_an_interactive_text_is_answered_before_the_batch_texts_that_came_first(node, http):
    texts = [f"{number}: " + "the lighthouse keeper counted the ships " * (1 + number % 4) for number in range(2000)]
    labels, answered = {"model": EMBEDDER, "device": "CPU"}, []

    def ask(name, texts, **headers):
        asked = asyncio.create_task(post(http, node, "/embeddings", {"texts": texts}, headers))
        asked.add_done_callback(lambda _: answered.append(name))
        return asked

    async def waiting(count):
        while await reading(http, node, "npu_node_admission_outstanding", **labels) < count:
            assert not answered, batch.result()

    # Stopped until all of it waits: on a quick machine the batch would be done before the text comes.
    engine = node.engine_pids()[EMBEDDER]
    os.kill(engine, signal.SIGSTOP)
    try:
        batch = ask("batch", texts, **{"X-Priority": "batch"})
        await waiting(2000)
        tokens = await reading(http, node, "npu_node_admission_outstanding_tokens", **labels, priority="batch")
        assert tokens > 2000
        text = ask("interactive", ["How are you?"])
        await waiting(2001)
    finally:
        os.kill(engine, signal.SIGCONT)
    status, _, body = await text
    assert status == 200, body
    assert answered == ["interactive"]
    # Nothing more is to be seen: the engine drops what nobody waits for.
    batch.cancel()
    await asyncio.gather(batch, return_exceptions=True)
    while await reading(http, node, "npu_node_admission_outstanding", **labels):
        pass
