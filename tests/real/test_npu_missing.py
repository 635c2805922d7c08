"""A node whose NPU is missing says so and serves from the next placement."""

import asyncio
import json

import pytest

from tests.support.nodes import start_node

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("store")]


@pytest.fixture(scope="module")
def no_npu():
    import openvino as ov  # here: each worker imports this file, and one looks for devices

    if "NPU" in ov.Core().available_devices:
        pytest.skip("this machine has an NPU")


@pytest.mark.usefixtures("no_npu")
async def test_traffic_moves_from_a_missing_npu_with_the_reason(tmp_path, http):
    config = tmp_path / "node.toml"
    config.write_text('[[models]]\nname = "all-minilm-l6-v2"\nplacements = ["NPU", "CPU"]\n')
    with start_node("--config", str(config), ready=False) as node:
        body = await asyncio.to_thread(node.wait_for, lambda body: body["models"][0]["device"] == "CPU")
        assert body["status"] == "degraded"
        npu, cpu = body["models"][0]["engines"]
        assert (npu["state"], cpu["state"]) == ("failed", "ready")
        assert "OpenVINO sees no NPU on this machine, only CPU" in npu["reason"]
        assert body["devices"][0] == {
            "name": "NPU",
            "available": False,
            "emulated": False,
            "full_name": None,
            "driver": None,
        }
        assert body["npu"]["busy_time_us"] is None
        assert "no NPU at" in body["npu"]["reasons"]["busy_time_us"]
        async with http.post(node.url + "/embeddings", json={"texts": ["a"]}) as reply:
            assert reply.status == 200
            assert reply.headers["X-NPU-Node-Device"] == "CPU"
            assert reply.headers["X-NPU-Node-Route-Reason"] == "device_unavailable"
            assert "X-NPU-Emulated" not in reply.headers
        required = {"X-NPU-Require-Device": "NPU"}
        async with http.post(node.url + "/embeddings", json={"texts": ["a"]}, headers=required) as reply:
            error = json.loads(await reply.read())["error"]
            assert (reply.status, error["code"]) == (503, "npu_unavailable")
            assert "Retry-After" in reply.headers
            assert "OpenVINO sees no NPU" in error["message"]
