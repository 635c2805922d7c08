"""Chats with images by URL, over real sockets on loopback: allowed by a reload, bounded, asked of engines that die."""

import asyncio
import logging
import os
import signal
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest

from tests.faults.engines import test_every_task_under_faults as hosted
from tests.faults.image_server import PNG, WHERE, Server, reply
from tests.support.application import application
from tests.support.scripted_engines import Machine, ScriptedEngine
from tests.support.task_models import SEER, placement, seer
from worker_node.core.errors import BadRequest
from worker_node.settings import NodeSettings
from worker_node.tasks.generate.chat import Image
from worker_node.tasks.generate.images import ImageDecoder
from worker_node.tasks.generate.messages import TokenDelta


@pytest.fixture
async def server():
    async with Server().running() as running:
        yield running


def chat(*urls):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": SEER, "messages": [{"role": "user", "content": [{"type": "text", "text": "dark"}, *parts]}]}


class Seeing(ScriptedEngine):
    """Answers with the first tokens of the prompt; keeps the sizes of the images that it was given."""

    def __init__(self, name, machine):
        super().__init__(name, "CPU", machine, load_s=0.01)
        self.sizes = []

    async def run(self, job, _result):
        if job.seen is not None:
            self.sizes += [(image.width, image.height) for image in job.seen.images]
        yield TokenDelta(job.id, np.frombuffer(job.tokens, "<i4").tolist()[:4], "stop", 0.0)


@asynccontextmanager
async def serving(store, **settings):
    engine = Seeing(SEER, Machine())
    async with application([seer(store, [placement(SEER, engine)])], NodeSettings(**settings)) as (client, node):
        node.manager.start()
        try:
            yield client, node, engine
        finally:
            await node.manager.stop()
            await node.services.parts.close()


@pytest.mark.usefixtures("store")
async def test_chats_see_images_by_url_once_a_reload_allows_it(store, server, caplog):
    caplog.set_level(logging.DEBUG)
    url = f"http://127.0.0.1:{server.port}/a.png?key=secret"
    async with serving(store) as (client, node, engine):

        async def send(*urls, path="/v1/chat/completions"):
            async with client.post(path, json=chat(*urls)) as answer:
                body = await answer.json()
                return answer.status, body.get("error", {}).get("message", "")

        status, message = await send(url)
        assert (status, "allow_image_hosts names no host" in message) == (400, True)
        node.adopt(
            NodeSettings(allow_image_hosts=(f"http://127.0.0.1:{server.port}",), max_image_body_bytes=len(PNG) * 2)
        )
        assert await send(url, url) == (200, "")
        assert engine.sizes == [(48, 40)] * 2
        status, message = await send(url, url, url)
        assert status == 413, "all images of a request together have the bound of a body"
        assert message.startswith("messages[0].content[3].image_url.url")
        server.answer = reply(body=b"no image at all")
        status, message = await send(url)
        assert (status, "not an image" in message) == (400, True)
        async with client.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        # Three of two requests that were answered or had too many, and the text that is no image.
        assert {line for line in lines if line.startswith("npu_node_remote_image")} == {
            'npu_node_remote_images_total{outcome="fetched"} 5.0',
            'npu_node_remote_images_total{outcome="invalid_request"} 1.0',
            'npu_node_remote_images_total{outcome="payload_too_large"} 1.0',
            f"npu_node_remote_image_bytes_total {4 * len(PNG) + 15}.0",
        }
        assert {line for line in lines if line.startswith("npu_node_image")} == {
            f'npu_node_images_total{{model="{SEER}",outcome="decoded",source="remote"}} 4.0',
            f'npu_node_images_total{{model="{SEER}",outcome="invalid_request",source="remote"}} 2.0',
            f'npu_node_images_total{{model="{SEER}",outcome="payload_too_large",source="remote"}} 1.0',
            f'npu_node_image_bytes_total{{model="{SEER}",source="remote"}} {4 * len(PNG)}.0',
        }
    assert "secret" not in caplog.text


async def test_without_the_edge_nothing_is_fetched():
    with pytest.raises(BadRequest, match="fetches no remote URLs"):
        await ImageDecoder().decode([Image("", 0, WHERE, "https://images.test/")], None, time.monotonic() + 60, print)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=["killed from outside", "crashed"])
@pytest.mark.usefixtures("store")
async def test_an_image_is_fetched_once_though_its_engine_dies(number, store, server, http):
    """The engine is a real process; it holds the request when it dies, and the restarted one gets the image again."""
    host = f"http://127.0.0.1:{server.port}"
    async with hosted.serving(store, (SEER,), allow_image_hosts=(host,)) as (engines, node, url):
        engine = engines[SEER]
        pid = engine.status.pid
        os.kill(pid, signal.SIGSTOP)

        async def send():
            async with http.post(f"{url}/v1/chat/completions", json=chat(f"{host}/a.png")) as answer:
                return answer.status, await answer.json()

        call = asyncio.create_task(send())
        async with asyncio.timeout(60):
            while not engine.status.in_flight:
                await asyncio.sleep(0.01)
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)
        status, body = await call
        assert status == 200, body
        assert engine.status.restarts == 1
        assert len(server.requests) == 1
        assert node.state.in_flight == 0
