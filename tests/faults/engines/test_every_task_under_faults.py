"""Reranking, speech and vision over real sockets, with scripted engines in real processes: an engine that dies, a
deadline, a caller who leaves."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import pytest

from tests.faults.engines.test_engine_faults import QUICK, no_canary, until
from tests.support.scripted_runner import RUNNER
from tests.support.task_models import MODELS, placement, request, said
from tests.support.waiting import eventually
from worker_node.app import make_app
from worker_node.core.types import Device
from worker_node.engines.isolation import Suspects
from worker_node.engines.process import EngineLimits
from worker_node.engines.protocol import EngineSpec, EngineState
from worker_node.engines.supervisor import Engine
from worker_node.server import Profile, running_node
from worker_node.settings import NodeSettings

pytestmark = pytest.mark.usefixtures("store")


@asynccontextmanager
async def serving(store, names=tuple(MODELS), **settings):
    """A node with these models, each with a scripted engine; yields the engines by name, the node and its URL."""
    engines = {}

    def models(_machine):
        for name in names:
            suspects = Suspects()
            spec = EngineSpec(name, "scripted", "/", Device.CPU, RUNNER, {"step_s": 0.01})
            engines[name] = Engine(spec, no_canary, EngineLimits(restart=QUICK), suspects=suspects)
        return [MODELS[name](store, [placement(name, engines[name])]) for name in names]

    profile = Profile(models, make_app, starts_parts=False)
    async with running_node(NodeSettings(port=0, **settings), profile) as (node, url):
        for engine in engines.values():
            await until(engine, EngineState.READY)
        yield engines, node, url


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=["killed from outside", "crashed"])
async def test_a_dead_engine_is_answered_for_within_each_deadline_and_nothing_is_left(number, store, http):
    async with serving(store) as (engines, node, url):

        async def send(name, text, seconds=60.0):
            path, body = request(name, text)
            headers = {"X-Request-Timeout-Ms": str(int(seconds * 1000))}
            async with http.post(url + path, headers=headers, **body) as reply:
                return reply.status, reply.headers, await reply.json()

        wanted = {name: said(name, (await send(name, "dark"))[2]) for name in engines}
        # Stopped, so that each holds its requests when it dies.
        pids = {name: engine.status.pid for name, engine in engines.items()}
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        long = {name: asyncio.create_task(send(name, "dark")) for name in engines}
        short = {name: asyncio.create_task(send(name, "short", 3.0)) for name in engines}
        leaving = [asyncio.create_task(send(name, "leaving")) for name in engines]
        for engine in engines.values():
            await eventually(lambda engine=engine: engine.status.in_flight >= 2)
        for task in leaving:
            task.cancel()
        # The deadline passes while the engine is stopped, and that is told at once.
        for task in short.values():
            status, _, body = await task
            assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        assert not any(task.done() for task in long.values())
        for pid in pids.values():
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)
        for name, task in long.items():
            status, headers, body = await task
            assert (status, headers["X-NPU-Node-Device"]) == (200, "CPU"), body
            assert said(name, body) == wanted[name]
            assert engines[name].status.restarts == 1
        for model in node.manager.models:
            assert model.placements[0].admission.outstanding == 0
            assert model.placements[0].engine.status.in_flight == 0
        assert node.state.running == 0
