"""An engine process has none of the secrets of its node in its environment."""

import os
from pathlib import Path

from tests.faults.engines.test_engine_faults import running, until
from worker_node.core.environment import native_environment, tool_environment
from worker_node.core.operating_system import start_module
from worker_node.engines.protocol import EngineState

SECRET = "c0ffee-secret"
SECRETS = ("NPU_NODE_API_KEYS", "OTEL_EXPORTER_OTLP_HEADERS", "HF_TOKEN", "DATABASE_URL", "OPENAI_API_KEY")


def read_environment(pid):
    return Path(f"/proc/{pid}/environ").read_bytes()


async def test_an_engine_inherits_no_secret(monkeypatch):
    # What /proc shows of the environment is what an interpreter was started with.
    monkeypatch.setattr("worker_node.engines.process.start_module", start_module)
    for name in SECRETS:
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("OPENVINO_LOG_LEVEL", "1")
    async with running() as engine:
        status = await until(engine, EngineState.READY)
        environment = read_environment(status.pid)
    assert SECRET.encode() not in environment
    assert b"OPENVINO_LOG_LEVEL=1" in environment
    assert b"PATH=" in environment


def threads_of(pid):
    return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]


async def test_every_thread_of_an_engine_has_a_lower_priority_than_the_edge():
    async with running(nice=7) as engine:
        status = await until(engine, EngineState.READY)
        lowered = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 7)
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads_of(status.pid)} == {lowered}


def test_a_tool_keeps_its_own_variables_and_gets_none_of_the_nodes():
    own = {"PIP_INDEX_URL": "https://user:password@index", "NPU_NODE_API_KEYS": SECRET, "HTTPS_PROXY": "p"}
    assert tool_environment(own) == {"PIP_INDEX_URL": "https://user:password@index", "HTTPS_PROXY": "p"}
    assert native_environment(own) == {}
