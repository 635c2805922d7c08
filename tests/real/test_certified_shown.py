"""A real node shows what its passports say of the emulated NPU, and its faults on demand in replies and errors."""

import asyncio
import json
import os

import httpx
import pytest

from tests.support.gateway import start_gateway
from tests.support.nodes import run_node_command, start_node
from tests.support.passports import certify
from worker_node.devices.npu import npu_source
from worker_node.devices.probe import probe
from worker_node.serving.build import Machine
from worker_node.settings import ModelSettings, NodeSettings

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

MODEL = "all-minilm-l6-v2"
SETTINGS = {"name": MODEL, "npu_buckets": [32], "placements": ["NPU"]}
WORDS = "lost_device after=3"


def test_passports_and_faults_are_seen_wherever_a_caller_looks(store, tmp_path):
    faults = tmp_path / "faults.toml"
    faults.write_text('[[fault]]\nkind = "lost_device"\nafter = 3\n')
    settings = NodeSettings(model_store=store.root, passports=tmp_path / "passports", npu_emulation=True, faults=faults)
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
    with start_node("--faults", str(faults), **environment) as node:
        health = node.health()[1]
        [engine] = health["models"][0]["engines"]
        assert health["faults"] == engine["faults"] == [WORDS]
        assert (engine["certified"], engine["certified_limit"], engine["prompt_limit"]) == ("limited", 24, 24)
        assert engine["certified_reason"].startswith("prompts up to 24 tokens, at 2026-09-01")
        assert engine["emulated"] is True
        [device] = httpx.get(f"{node.url}/v1/models/{MODEL}").json()["devices"]
        assert (device["certified"], device["faults"]) == ("limited", [WORDS])
        listed = run_node_command(["ps"], env=os.environ | {"NPU_NODE_URL": node.url}).stdout.splitlines()
        assert "NPU (emulated)" in listed[1]
        assert "limited to 24 tokens" in listed[1]
        assert listed[2] == f"This node has faults on demand: {WORDS}"
        with start_gateway(node.url) as gateway:
            reply = httpx.post(f"{gateway}/v1/embeddings", json={"model": MODEL, "input": "a text"}, timeout=120)
            assert (reply.status_code, reply.headers.get("X-NPU-Node-Faults")) == (200, "1"), reply.text
        replies = []
        while not replies or replies[-1].status_code == 200:
            body = {"model": MODEL, "input": f"text {len(replies)}"}
            replies.append(httpx.post(f"{node.url}/v1/embeddings", json=body, timeout=120))
            assert replies[-1].headers.get("X-NPU-Node-Faults") == "1", replies[-1].text
        assert replies[0].status_code == 200
        assert replies[-1].status_code >= 500
