"""What a caller over HTTP gets when the engine hangs: a real node with a real tokenizer, and a scripted engine."""

import asyncio
from dataclasses import replace

import pytest

from tests.faults.engines.test_engine_faults import HANG_S, QUICK, RUNNER, no_canary, until
from tests.support.scripted_runner import HANG
from worker_node.app import make_app
from worker_node.core.types import Device, ModelKind
from worker_node.engines.process import EngineLimits
from worker_node.engines.protocol import EngineSpec, EngineState
from worker_node.engines.supervisor import SupervisedEngine
from worker_node.engines.watchdog import LivenessLimits
from worker_node.server import Profile, configured_models, running_node
from worker_node.settings import ModelSettings, NodeSettings

WRITER = "smollm2-135m-instruct"
SETTINGS = NodeSettings(port=0, models=(ModelSettings(name=WRITER, placements=("CPU",)),))


def scripted_models(machine):
    """The configured model, whose engine does what the tests of engine faults have it do."""
    [model] = configured_models(machine)
    spec = EngineSpec(WRITER, ModelKind.GENERATION, "/", Device.CPU, RUNNER, {})
    limits = EngineLimits(liveness=LivenessLimits(HANG_S), restart=QUICK)
    engine = SupervisedEngine(spec, no_canary, limits, lazy=True, suspects=model.placements[0].suspects)
    return [replace(model, placements=tuple(replace(place, engine=engine) for place in model.placements))]


@pytest.mark.usefixtures("store")
async def test_a_request_that_hangs_the_engine_is_refused_and_the_one_beside_it_is_answered(http):
    async def complete(url, *tokens):
        wanted = {"model": WRITER, "prompt": list(tokens), "max_tokens": 8}
        async with http.post(url + "/v1/completions", json=wanted) as reply:
            return reply.status, reply.headers, await reply.json()

    async with running_node(SETTINGS, Profile(scripted_models, make_app)) as (node, url):
        [model] = node.manager.models
        engine = model.placements[0].engine
        before = await until(engine, EngineState.READY)
        # The node's own limit for a request is minutes away: within this one, only the watchdog can end it.
        # More than 5 s: it hangs twice.
        async with asyncio.timeout(60):
            hanging, waiting = await asyncio.gather(complete(url, HANG), complete(url, 1000, 1001))
        # It was alone on the engine both times when the engine hung: nobody is to send it again, here or elsewhere.
        status, headers, body = hanging
        assert status == 400
        assert headers["x-should-retry"] == "false"
        assert "Retry-After" not in headers
        assert body["error"]["code"] == "request_breaks_engine"
        assert "hung" in body["error"]["message"]
        assert waiting[0] == 200, "the other one is run again"
        after = await until(engine, EngineState.READY)
        assert after.pid != before.pid
        status, _, body = await complete(url, 1000, 1001)
        assert (status, body["usage"]["completion_tokens"]) == (200, 2)
