"""A decoder that ranks, changed and removed by reloads under load: each reply is that of one state, and none is lost.

The decoders are tiny and random (no such model comes in a package); their scores are computed in plain numpy.
"""

import asyncio
import math

import pytest

from tests.support.cross_encoders import write_tiny
from tests.support.nodes import start_node
from tests.support.tiny_decoder import TinyRanker, ranking_prompt

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

QUERY = "how tall is the eiffel tower"
DOCUMENTS = ["The tower is 330 metres tall.", "Bananas are rich in potassium.", "東京は日本の首都です。", ""]
CAT, CAPITAL = "Find a cat.", "Name the capital of France."
CALLERS = 2


def expected(ranker, instruction):
    """The scores of DOCUMENTS: the softmax of "yes" over "no" and "yes" after the prompt of the model card."""
    pairs = [ranker.logits(ranking_prompt(ranker.tokenizer, instruction, QUERY, text)) for text in DOCUMENTS]
    return [1 / (1 + math.exp(no - yes)) for no, yes in pairs]


class Callers:
    """They ask again and again. `right` are the states whose scores may come now."""

    def __init__(self, http, url, right):
        self.http, self.url, self.right, self.over = http, url, [right], asyncio.Event()
        self.replies = [0] * CALLERS
        self.tasks = [asyncio.create_task(self._ask(number)) for number in range(CALLERS)]

    async def _ask(self, number):
        wanted = {"model": "decoder", "query": QUERY, "documents": DOCUMENTS}
        while not self.over.is_set():
            begun = self.right[0]
            async with self.http.post(self.url + "/v2/rerank", json=wanted) as reply:
                body = await reply.json()
                assert (reply.status, reply.headers.get("X-NPU-Node-Device")) == (200, "NPU"), body
            scores = {result["index"]: result["relevance_score"] for result in body["results"]}
            found = [scores[index] for index in range(len(DOCUMENTS))]
            # bf16, where the CPU has it, moves logits; the states are much further apart.
            assert any(found == pytest.approx(right, abs=0.1) for right in (begun, *self.right)), (found, self.right)
            self.replies[number] += 1

    async def go_on(self):
        """Wait until each has had two more replies: the second was asked for after now."""
        before = list(self.replies)
        async with asyncio.timeout(60):
            while any(now < then + 2 for now, then in zip(self.replies, before, strict=True)):
                assert not any(task.done() for task in self.tasks), self.tasks
                await asyncio.sleep(0.01)

    async def during(self, state, change):
        """Have settings changed, after which the scores are those of `state`."""
        self.right.append(state)
        await change
        self.right = [state]
        await self.go_on()

    async def end(self):
        self.over.set()
        await asyncio.gather(*self.tasks)


async def test_a_decoder_is_changed_and_removed_under_load_and_no_request_is_lost(tmp_path, http):
    # More than 5 s: a node whose reranker is compiled three times for the emulated NPU.
    first, second = TinyRanker(), TinyRanker(seed=1)
    first.write(tmp_path / "first-reranker")
    second.write(tmp_path / "second-reranker")
    write_tiny(tmp_path / "other")
    config = tmp_path / "node.toml"
    places = 'placements = ["NPU"]'

    def write(directory, instruction, *more):
        table = ("[[models]]", 'name = "decoder"', f'path = "{tmp_path / directory}"', places)
        table += (f'rerank_instruction = "{instruction}"', "npu_buckets = [256]")
        other = ("[[models]]", 'name = "other"', f'path = "{tmp_path / "other"}"', 'placements = ["CPU"]', *more)
        config.write_text("\n".join((*(table if directory else ()), *other, "")))

    write("first-reranker", CAT)
    environment = {"NPU_NODE_NPU_EMULATION": "1", "NPU_NODE_COMPILE_CACHE": str(tmp_path / "compiled")}
    with start_node("--config", str(config), **environment) as node:

        async def reloaded(*, status=200):
            async with http.post(node.url + "/admin/reload") as reply:
                body = await reply.json()
                assert reply.status == status, body
                return body

        async def applied(*arguments):
            write(*arguments)
            report = await reloaded()
            assert (report["changed"], report["problems"]) == (["decoder"], [])

        processes = len(node.engine_processes())
        callers = Callers(http, node.url, expected(first, CAT))
        await callers.go_on()
        await callers.during(expected(first, CAPITAL), applied("first-reranker", CAPITAL))
        # One mistake anywhere, and nothing changes: a cross-encoder reads no instruction.
        write("second-reranker", CAT, 'rerank_instruction = "no"')
        refused = await reloaded(status=400)
        assert "a cross-encoder reads no instruction" in refused["error"]["message"]
        await callers.go_on()
        await callers.during(expected(second, CAPITAL), applied("second-reranker", CAPITAL))
        await callers.end()
        write("", "")
        assert (await reloaded())["removed"] == ["decoder"]
        wanted = {"model": "decoder", "query": QUERY, "documents": DOCUMENTS}
        async with http.post(node.url + "/v2/rerank", json=wanted) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (404, "model_not_found")
        async with http.post(node.url + "/v2/rerank", json=wanted | {"model": "other"}) as reply:
            assert reply.status == 200
        async with asyncio.timeout(60):
            while len(node.engine_processes()) != processes - 1:
                await asyncio.sleep(0.05)
    assert min(callers.replies) >= 8
