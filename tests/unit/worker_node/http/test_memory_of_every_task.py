"""One memory budget for models of all tasks, over HTTP: what is evicted, and who is refused with what is in the way."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from tests.support.application import application
from tests.support.scripted_engines import Machine, ScriptedEngine
from tests.support.task_models import HEARER, MODELS, RANKER, SEER, placement, request, said
from tests.support.task_runner import result_of
from worker_node.tasks.generate.messages import GenerateJob, TokenDelta

# Each takes 100; there is room for two.
BUDGET = 250


class Answering(ScriptedEngine):
    """Answers in the edge process, as soon as `go` is set."""

    def __init__(self, name, machine):
        super().__init__(name, "CPU", machine, load_s=0.01)
        self.go = asyncio.Event()
        self.go.set()

    async def run(self, job, _result):
        self.in_flight += 1
        try:
            await self.go.wait()
            if isinstance(job, GenerateJob):
                yield TokenDelta(job.id, np.frombuffer(job.tokens, "<i4").tolist()[:4], "stop", 0.0)
            else:
                yield result_of(job)
        finally:
            self.in_flight -= 1


@asynccontextmanager
async def serving(store, *pinned):
    """An application with a model of each task, loaded on demand; yields a client, engines by name, what was loaded."""
    machine = Machine()
    engines = {name: Answering(name, machine) for name in MODELS}
    models = []
    for name, make in MODELS.items():
        place = placement(name, engines[name], estimate=100, pinned=name in pinned)
        models.append(make(store, [replace(place, on_demand=name not in pinned, eager=name in pinned)]))
    async with application(models) as (client, node):
        node.manager._reconciler._measure = machine.measure
        node.manager.set_budget("host", BUDGET)
        node.manager.start()
        try:
            yield client, engines, machine.events
        finally:
            await node.manager.stop()
            await node.services.parts.close()


async def send(client, name, **headers):
    path, body = request(name)
    async with client.post(path, **body, headers=headers) as reply:
        return reply.status, reply.headers, await reply.json()


@pytest.mark.usefixtures("store")
async def test_the_model_of_whichever_task_was_used_longest_ago_makes_room(store):
    async with serving(store) as (client, _, events):
        for name in (RANKER, HEARER, RANKER, SEER, HEARER):
            status, _, body = await send(client, name)
            assert status == 200, body
            assert said(name, body)
        happened = [(kind, name) for kind, name, *_ in events]
        assert happened == [
            ("load", RANKER),
            ("load", HEARER),
            ("unload", HEARER),
            ("load", SEER),
            ("unload", RANKER),
            ("load", HEARER),
        ]


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("refused", MODELS)
async def test_a_model_of_any_task_that_finds_no_room_is_refused_with_what_is_in_the_way(store, refused):
    async with serving(store) as (client, engines, _):
        others = [name for name in MODELS if name != refused]
        for name in others:
            engines[name].go.clear()
        working = [asyncio.create_task(send(client, name)) for name in others]
        while not all(engines[name].in_flight for name in others):
            await asyncio.sleep(0.01)
        status, headers, body = await send(client, refused, **{"X-NPU-Restart-Wait-Ms": "0"})
        assert (status, body["error"]["code"]) == (503, "insufficient_memory")
        assert all(name in body["error"]["message"] for name in others), body
        assert int(headers["Retry-After"]) > 0
        assert engines[refused].loads == 0
        for name in others:
            engines[name].go.set()
        assert {status for status, *_ in await asyncio.gather(*working)} == {200}
        # They are idle now: the one that was refused makes its own room.
        status, _, body = await send(client, refused)
        assert status == 200, body


@pytest.mark.usefixtures("store")
async def test_pinned_models_of_any_task_are_never_evicted(store):
    async with serving(store, RANKER, HEARER) as (client, engines, events):
        async with asyncio.timeout(30):
            while {name for _, name, *_ in events} != {RANKER, HEARER}:
                await asyncio.sleep(0.01)
        for engine in (engines[RANKER], engines[HEARER]):
            await engine.settled()
        status, _, body = await send(client, SEER)
        assert (status, body["error"]["code"]) == (503, "insufficient_memory")
        assert RANKER in body["error"]["message"]
        assert HEARER in body["error"]["message"]
        assert [kind for kind, *_ in events] == ["load", "load"]
