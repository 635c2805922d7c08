"""A real node shows what its passports say of the emulated NPU."""

import asyncio
import json
import os

import httpx
import pytest

from tests.support.nodes import run_node_command, start_node
from tests.support.passports import certify
from worker_node.devices.npu import npu_source
from worker_node.devices.probe import probe
from worker_node.serving.build import Machine
from worker_node.settings import ModelSettings, NodeSettings

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

MODEL = "all-minilm-l6-v2"
SETTINGS = {"name": MODEL, "npu_buckets": [32], "placements": ["NPU"]}


def test_passports_are_seen_wherever_a_caller_looks(store, tmp_path):
    settings = NodeSettings(model_store=store.root, passports=tmp_path / "passports", npu_emulation=True)
    with npu_source(None, emulated=True) as npu:
        machine = Machine(settings, asyncio.run(probe()), npu)
        wanted = ModelSettings(**SETTINGS)
        certify(machine, store.get(MODEL), wanted, verdict="limited", limits={"max_prompt_tokens": 24})
    environment = {
        "NPU_NODE_NPU_EMULATION": "1",
        "NPU_NODE_PASSPORTS": str(tmp_path / "passports"),
        "NPU_NODE_MODELS": json.dumps([SETTINGS]),
        "NPU_NODE_CANARY_INTERVAL_S": "3600",
    }
    with start_node(**environment) as node:
        health = node.health()[1]
        [engine] = health["models"][0]["engines"]
        assert (engine["certified"], engine["certified_limit"], engine["prompt_limit"]) == ("limited", 24, 24)
        assert engine["certified_reason"].startswith("prompts up to 24 tokens, at 2026-09-01")
        assert engine["emulated"] is True
        [device] = httpx.get(f"{node.url}/v1/models/{MODEL}").json()["devices"]
        assert device["certified"] == "limited"
        listed = run_node_command(["ps"], env=os.environ | {"NPU_NODE_URL": node.url}).stdout.splitlines()
        assert "NPU (emulated)" in listed[1]
        assert "limited to 24 tokens" in listed[1]
