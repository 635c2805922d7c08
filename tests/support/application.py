"""The node's whole application over HTTP, with engines that a test chooses; nothing is hosted or loaded."""

import contextlib
import time
from dataclasses import replace

from aiohttp.test_utils import TestClient, TestServer

from worker_node.api.keys import Node, NodeState
from worker_node.app import make_app
from worker_node.devices.npu_source import npu_source
from worker_node.devices.probe import DeviceInfo, Probe
from worker_node.models.catalog import Catalog
from worker_node.serving.build import Machine, build_model
from worker_node.serving.embedding_cache import EmbeddingCache
from worker_node.serving.registry import Registry
from worker_node.settings import ModelSettings, NodeSettings
from worker_node.telemetry import Telemetry


@contextlib.asynccontextmanager
async def application(models=(), settings=None, cache=0):
    """Yields a client of it and its `Node`."""
    with npu_source(None, emulated=False) as npu:
        registry = Registry(models, Catalog.load(), Telemetry(), EmbeddingCache(cache))
        probe = Probe((DeviceInfo("CPU"),), "test")
        node = Node(settings or NodeSettings(), registry, probe, npu, NodeState(time.monotonic()))
        async with TestClient(TestServer(make_app(node))) as client:
            yield client, node


def built_models(store, *names, settings=None):
    """Installed models with their tokenizers and limits, placed on the CPU. Their engines are never started."""
    with npu_source(None, emulated=False) as npu:
        machine = Machine(settings or NodeSettings(), Probe((DeviceInfo("CPU"),), "test"), npu)
        return [build_model(store.get(name), ModelSettings(name=name), machine) for name in names]


def with_engine(model, engine):
    """The model with one engine on all of its placements."""
    return replace(model, placements=tuple(replace(place, engine=engine) for place in model.placements))
