"""A model that loads for long takes no other out of service: a real node and embedding engine, a scripted writer."""

from dataclasses import replace

import pytest

from tests.faults.engines.test_engine_faults import RUNNER, no_canary, until
from worker_node.app import make_app
from worker_node.core.types import Device, ModelKind
from worker_node.engines.process import EngineLimits
from worker_node.engines.protocol import EngineSpec, EngineState
from worker_node.engines.supervisor import SupervisedEngine
from worker_node.server import Profile, configured_models, running_node
from worker_node.settings import ModelSettings, NodeSettings

EMBEDDER, WRITER = "all-minilm-l6-v2", "smollm2-135m-instruct"
SETTINGS = NodeSettings(
    port=0, models=tuple(ModelSettings(name=name, placements=("CPU",)) for name in (EMBEDDER, WRITER))
)


def one_that_loads_for_ever(machine):
    embedder, writer = configured_models(machine)
    spec = EngineSpec(WRITER, ModelKind.GENERATION, "/", Device.CPU, RUNNER, {"load_s": 3600})
    engine = SupervisedEngine(spec, no_canary, EngineLimits(stop_timeout_s=0.1), lazy=True)
    return [embedder, replace(writer, placements=tuple(replace(p, engine=engine) for p in writer.placements))]


@pytest.mark.usefixtures("store")
async def test_embeddings_are_served_while_the_generation_model_loads(http):
    async with running_node(SETTINGS, Profile(one_that_loads_for_ever, make_app)) as (node, url):
        await until(node.manager.models[0].placements[0].engine, EngineState.READY)
        async with http.get(url + "/health") as reply:
            body = await reply.json()
        assert (reply.status, body["status"]) == (200, "degraded")
        assert body["reason"] in {f"{WRITER} is loading: loading", f"{WRITER} is loading: it waits for its turn"}
        assert [model["state"] for model in body["models"]] == ["ready", "loading"]
        async with http.get(url + "/health/ready") as reply:
            assert reply.status == 200
        async with http.post(url + "/embeddings", json={"texts": ["here"]}) as reply:
            assert reply.status == 200
