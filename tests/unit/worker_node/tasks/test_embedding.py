"""Texts on their way through the cache and the engine, what the node counts of them, and what the cache gives back."""

import asyncio
import time
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.services import services_of
from tests.support.task_engine import TaskEngine, encoded
from worker_node.core.types import Busy, Device, ModelKind, RequestContext, Route, Timing, Usage
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.manager.placement import Placement
from worker_node.node import NodeState
from worker_node.scheduling.admission import Admission, AdmissionLimits
from worker_node.tasks.embed.http import render_vectors
from worker_node.tasks.embed.service import EmbeddingCache, EmbeddingModel, EmbeddingReply, embed

BUCKET = 32


class Tokenizer:
    """Takes texts that are token ids already."""

    async def encode(self, texts, *, truncate, deadline):
        return [list(text) for text in texts]


class Engine(TaskEngine):
    """Runs each text in one static bucket; `priorities` are those that it was told."""

    status = EngineStatus(EngineState.READY)

    def __init__(self):
        self.priorities = []

    async def embed(self, tokens, *, deadline, interactive):
        self.priorities.append(interactive)
        vectors = np.asarray([[sum(row)] for row in tokens], np.float32)
        return encoded(vectors, busy=Busy(7), device_tokens=BUCKET * len(tokens))


def services():
    placement = Placement(Device.NPU, Engine(), Admission("m", AdmissionLimits(8)), 256, 256, emulated=True)
    model = EmbeddingModel(
        SimpleNamespace(id="m", kind=ModelKind.EMBEDDING, aliases=()),
        Tokenizer(),
        "s",
        1,
        cache=EmbeddingCache(10),
        placements=(placement,),
    )
    return services_of([model])


async def test_tokens_of_texts_that_the_cache_answers_are_not_counted_as_computed():
    served = services()

    async def after(*texts):
        now = time.monotonic()
        reply = await embed(served, RequestContext("req_1", now, now + 60), texts)
        assert reply.vectors[:, 0].tolist() == [sum(text) for text in texts]

        def total(name):
            labels = {"model": "m", "device": "NPU"}
            return served.telemetry.registry.get_sample_value(f"npu_node_{name}_total", labels)

        return total("prompt_tokens"), total("embedding_computed_tokens"), total("embedding_device_tokens")

    assert await after((1, 2, 3), (4, 5)) == (5, 5, 2 * BUCKET)
    assert await after((1, 2, 3)) == (8, 5, 2 * BUCKET)
    assert await after((1, 2, 3), (6,)) == (12, 6, 3 * BUCKET)


def vector_of(origin, row):
    return [len(origin), *row, *[-1] * (3 - len(row))]


def vectors_of(origin, rows):
    return np.asarray([vector_of(origin, row) for row in rows], np.float32).reshape(len(rows), 4)


def test_a_kept_vector_does_not_hold_on_to_its_batch():
    cache = EmbeddingCache(1)
    rows = [[i] for i in range(1000)]
    cache.keep("cpu", rows, vectors_of("cpu", rows))
    (found,) = cache.look_up("cpu", [[999]])
    assert found.base is None


def test_the_text_that_was_asked_for_least_lately_makes_place_for_another():
    cache = EmbeddingCache(2)
    for row in ([1], [2]):
        cache.keep("cpu", [row], vectors_of("cpu", [row]))
    cache.look_up("cpu", [[1]])
    cache.keep("cpu", [[3]], vectors_of("cpu", [[3]]))
    assert [found is not None for found in cache.look_up("cpu", [[1], [2], [3]])] == [True, False, True]


TEXTS = st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=8)


@given(st.lists(st.tuples(st.sampled_from(["cpu", "a npu"]), TEXTS), max_size=20), st.integers(0, 6))
def test_it_never_lies_and_never_grows_over_its_size(requests, capacity):
    cache = EmbeddingCache(capacity)
    for origin, rows in requests:
        for row, vector in zip(rows, cache.look_up(origin, rows), strict=True):
            assert vector is None or vector.tolist() == vector_of(origin, row)
        cache.keep(origin, rows, vectors_of(origin, rows))
        assert len(cache._vectors) <= capacity


async def test_of_several_large_replies_one_is_rendered_at_a_time_and_small_ones_do_not_wait():
    node, order = SimpleNamespace(state=NodeState(0.0)), []

    async def render(name, rows):
        route, timing = (
            Route("m", Device.CPU, "preferred", 1),
            Timing(queue=0.0, tokenize=0.0, inference=1.0, total=1.0),
        )
        reply = EmbeddingReply(route, np.zeros((rows, 1024), np.float32), "s", Usage(1), timing)
        await render_vectors(node, {"m": 1}, "data", reply, lambda index, _: order.append((name, index)))

    await asyncio.gather(render("first", 100), render("second", 100), render("small", 1))
    assert order[32] == ("small", 0)
    assert [name for name, _ in order if name != "small"] == ["first"] * 100 + ["second"] * 100
