"""The node's whole application over HTTP, with engines that a test chooses; nothing is hosted or loaded."""

import contextlib
import time
from dataclasses import replace

from aiohttp.test_utils import TestClient, TestServer

from tests.support.services import services_of
from worker_node.app import make_app
from worker_node.devices.npu import npu_source
from worker_node.devices.probe import DeviceInfo, Probe
from worker_node.models.store import ModelStore
from worker_node.node import Node, NodeState
from worker_node.observability.tracing import OFF
from worker_node.serving.build import Machine, build_model
from worker_node.settings import ModelSettings, NodeSettings


@contextlib.asynccontextmanager
async def application(models=(), settings=None, tracing=OFF):
    settings = settings or NodeSettings()
    with npu_source(None, emulated=False) as npu:
        services = services_of(models, store=ModelStore(settings.model_store), tracing=tracing)
        probe = Probe((DeviceInfo("CPU"),), "test")
        node = Node(settings, services, probe, npu, NodeState(time.monotonic()))
        async with TestClient(TestServer(make_app(node))) as client:
            yield client, node


def built_models(store, *names, settings=None, **options):
    """Installed models with their tokenizers and limits, placed on the CPU. Their engines are never started."""
    with npu_source(None, emulated=False) as npu:
        machine = Machine(settings or NodeSettings(embedding_cache=0), Probe((DeviceInfo("CPU"),), "test"), npu)
        return [build_model(store.get(name), ModelSettings(name=name, **options), machine) for name in names]


def with_engine(model, engine):
    return replace(model, placements=tuple(replace(place, engine=engine) for place in model.placements))
