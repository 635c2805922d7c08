"""Models that are changed by reloads under load: no request is lost, and the first device waits for no load."""

import asyncio
import contextlib
import shutil
from collections import Counter

import pytest

from tests.real.test_compiled_ahead import blobs  # noqa: F401  (a fixture)
from tests.support.cross_encoders import write_tiny
from tests.support.cut_model import EMBEDDER, WRITER
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


async def test_an_encoder_on_two_devices_and_a_reranker_are_changed_under_load(quick_npu_models, tmp_path, http):
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
    with start_node("--config", str(config), NPU_NODE_NPU_EMULATION="1", **quick_npu_models) as node:
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


@pytest.mark.long
async def test_blobs_come_and_go_under_load(quick_npu_models, blobs, store, tmp_path, http):  # noqa: F811
    # More than 5 s: a node whose two engines are loaded four times, and the blobs before that.
    damaged, config, said = tmp_path / "damaged", tmp_path / "node.toml", set()
    shutil.copytree(blobs, damaged)
    whole = (blobs / "generate.blob").read_bytes()
    (damaged / "generate.blob").write_bytes(whole[: len(whole) // 2])

    def write(*lines):
        shape = ("max_prompt_len = 64", "min_response_len = 64", "prefill_chunk_size = 64")
        places = 'placements = [{device = "NPU", load = "eager"}, {device = "CPU", load = "eager"}]'
        config.write_text("\n".join(("[[models]]", f'name = "{WRITER}"', places, *shape, *lines, "")))

    def complete(device):
        async def ask(number):
            # Prompts of the CPU differ, so that none is answered from another's prefix.
            prompt = "Once upon a time" if device == "NPU" else f"{number} times"
            wanted = {"model": WRITER, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
            headers = {"X-NPU-Require-Device": device, "X-Request-Timeout-Ms": "100000"}
            async with http.post(node.url + "/v1/completions", json=wanted, headers=headers) as reply:
                body = await reply.json()
                assert (reply.status, reply.headers.get("X-NPU-Node-Device")) == (200, device), body
            assert body["usage"]["completion_tokens"] == 8
            if device == "NPU":
                said.add(body["choices"][0]["text"])

        return ask

    write()
    with start_node("--config", str(config), NPU_NODE_NPU_EMULATION="1", **quick_npu_models) as node:
        processes = len(node.engine_processes())
        async with load(complete("NPU"), complete("NPU"), complete("CPU")) as goes_on:
            await goes_on()
            write(f'blobs = "{blobs}"')
            assert (await reloaded(http, node))["changed"] == [WRITER]
            await goes_on()
            # What cannot be loaded is reported, and the engines that are there serve on.
            write(f'blobs = "{damaged}"')
            (problem,) = (await reloaded(http, node))["problems"]
            assert "generate.blob" in problem
            await goes_on()
            write()
            assert (await reloaded(http, node))["problems"] == []
            await goes_on()
        assert len(said) == 1, "compiled or from blobs, the NPU answers the same"
        async with asyncio.timeout(60):
            while len(node.engine_processes()) != processes:
                await asyncio.sleep(0.05)
