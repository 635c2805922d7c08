"""A real node with faults on demand names them in health, lists, replies and errors, also through a gateway."""

import json
import os

import httpx
import pytest

from tests.support.gateway import start_gateway
from tests.support.nodes import run_node_command, start_node
from worker_node.cli.main import main

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

MODEL = "all-minilm-l6-v2"
WORDS = "lost_device after=3"
HEADER = "X-NPU-Node-Faults"


def test_faults_on_demand_are_seen_wherever_a_caller_looks(store, tmp_path):
    faults = tmp_path / "faults.toml"
    faults.write_text('[[fault]]\nkind = "lost_device"\nafter = 3\n')
    environment = {
        "NPU_NODE_NPU_EMULATION": "1",
        "NPU_NODE_MODELS": json.dumps([{"name": MODEL, "npu_buckets": [32], "placements": ["NPU"]}]),
        "NPU_NODE_CANARY_INTERVAL_S": "3600",
    }
    with start_node("--faults", str(faults), **environment) as node:
        health = node.health()[1]
        [engine] = health["models"][0]["engines"]
        assert health["faults"] == engine["faults"] == [WORDS]
        assert f"fault on demand: {WORDS}" in engine["notes"]
        [device] = httpx.get(f"{node.url}/v1/models/{MODEL}").json()["devices"]
        assert device["faults"] == [WORDS]
        listed = run_node_command(["ps"], env=os.environ | {"NPU_NODE_URL": node.url}).stdout.splitlines()
        assert listed[2] == f"This node has faults on demand: {WORDS}"
        with start_gateway(node.url) as gateway:
            reply = httpx.post(f"{gateway}/v1/embeddings", json={"model": MODEL, "input": "a text"}, timeout=120)
            assert (reply.status_code, reply.headers.get(HEADER)) == (200, "1"), reply.text
        replies = []
        while not replies or replies[-1].status_code == 200:
            body = {"model": MODEL, "input": f"text {len(replies)}"}
            replies.append(httpx.post(f"{node.url}/v1/embeddings", json=body, timeout=120))
            assert replies[-1].headers.get(HEADER) == "1", replies[-1].text
        assert replies[0].status_code == 200
        assert replies[-1].status_code >= 500


def test_a_node_does_not_start_with_a_fault_that_would_strike_nothing(store, tmp_path, monkeypatch, capsys):
    (tmp_path / "f.toml").write_text("[[fault]]\nkind = 'crash'\nmodel = 'minilm'\n")
    monkeypatch.setenv("NPU_NODE_NPU_EMULATION", "1")
    monkeypatch.setenv("NPU_NODE_MODELS", json.dumps([{"name": MODEL, "placements": ["NPU"]}]))
    assert main(["serve", "--port", "0", "--faults", str(tmp_path / "f.toml")]) == 1
    assert f"model must be the id of a model of the settings ({MODEL}), got minilm" in capsys.readouterr().err
