"""Models that are changed by reloads under load: no request is lost, and the first device waits for no load."""

import asyncio
import contextlib
from collections import Counter

import pytest

from tests.support.cross_encoders import write_tiny
from tests.support.cut_model import EMBEDDER
from tests.support.nodes import start_node

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
RANKING = {"model": "ranker", "query": "a cat", "documents": ["the cat", "a", "b c"]}


@contextlib.asynccontextmanager
async def load(*asks):
    """Callers who ask again and again. Yields a function that waits until each has had one more answer than now."""
    answers, over = Counter(), asyncio.Event()

    async def caller(number, ask):
        while not over.is_set():
            await ask(answers[number])
            answers[number] += 1
            await asyncio.sleep(0.02)

    async def goes_on():
        before = answers.copy()
        async with asyncio.timeout(100):
            while any(answers[number] <= before[number] + 1 for number in range(len(callers))):
                assert not any(task.done() for task in callers), callers
                await asyncio.sleep(0.01)

    callers = [asyncio.create_task(caller(number, ask)) for number, ask in enumerate(asks)]
    yield goes_on
    over.set()
    await asyncio.gather(*callers)


async def reloaded(http, node):
    async with http.post(node.url + "/admin/reload") as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def test_an_encoder_on_two_devices_and_a_reranker_are_changed_under_load(quick_models, tmp_path, http):
    # More than 5 s: a node whose models are compiled three and two times.
    write_tiny(tmp_path / "ranker")
    config, rankings = tmp_path / "node.toml", []

    def write(outstanding, documents):
        embedder = (f'name = "{EMBEDDER}"', 'placements = ["NPU", "CPU"]', "npu_buckets = [16]")
        ranker = ('path = "ranker"', 'placements = ["CPU"]', 'precision = "f32"')
        limits = f"max_outstanding = {outstanding}", f"documents_limit = {documents}"
        config.write_text("\n".join(("[[models]]", *embedder, limits[0], "[[models]]", *ranker, limits[1], "")))

    def embed(device):
        async def ask(_number):
            wanted = {"model": EMBEDDER, "input": f"for the {device}"}
            headers = {"X-NPU-Require-Device": device}
            async with http.post(node.url + "/api/embed", json=wanted, headers=headers) as reply:
                body = await reply.json()
                assert (reply.status, reply.headers.get("X-NPU-Node-Device")) == (200, device), body
            assert device == "CPU" or body["load_duration"] == 0
            return body["load_duration"]

        return ask

    async def rank(_number):
        async with http.post(node.url + "/v2/rerank", json=RANKING) as reply:
            body = await reply.json()
            assert reply.status == 200, body
        rankings.append([(result["index"], result["relevance_score"]) for result in body["results"]])

    write(100, 3)
    with start_node("--config", str(config), NPU_NODE_NPU_EMULATION="1", **quick_models) as node:
        engine = node.engine_pids()["ranker"]
        assert await embed("CPU")(0) > 0, "the CPU's engine is loaded for the first request"
        async with load(embed("NPU"), embed("CPU"), rank) as goes_on:
            await goes_on()
            write(101, 4)
            before = len(rankings)
            report = await reloaded(http, node)
            assert (sorted(report["changed"]), report["problems"]) == ([EMBEDDER, "ranker"], [])
            assert len(rankings) > before, "the earlier reranker answered while the later one was loaded"
            await goes_on()
        assert rankings == [rankings[0]] * len(rankings)
        async with http.post(node.url + "/v2/rerank", json=RANKING | {"documents": ["a"] * 4}) as reply:
            assert reply.status == 200, "as many documents as the new settings allow"
        assert node.engine_pids()["ranker"] != engine
        async with asyncio.timeout(60):
            while engine in node.engine_processes():
                await asyncio.sleep(0.05)
