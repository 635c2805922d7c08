"""An NPU that others use too: no reply and no metric gives a caller the others' time as its own.

The counter is a file that the test writes, as the kernel would for a process that is not the node's.
"""

import itertools
import json

import pytest

from tests.support.nodes import start_node

pytestmark = [pytest.mark.real, pytest.mark.timeout(300), pytest.mark.usefixtures("store")]

CONFIG = """
[[models]]
name = "all-minilm-l6-v2"
placements = ["NPU"]
npu_buckets = [32]

[[models]]
name = "smollm2-135m-instruct"
placements = ["NPU"]
max_prompt_len = 128
min_response_len = 64
"""
PROMPT = {"prompt": "What is the capital of France?"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory, quick_models):
    """A node, and a function that moves the counter of its device as others do who use it."""
    directory, counts = tmp_path_factory.mktemp("sysfs"), itertools.count(10_000_000, 10_000_000)

    def use_by_others():
        fresh = directory / "fresh"
        fresh.write_text(f"{next(counts)}\n")
        fresh.replace(directory / "npu_busy_time_us")

    use_by_others()
    config = directory / "node.toml"
    config.write_text(CONFIG)
    # No canary comes between the requests: it would be the run that sees what moved before it.
    environment = {
        "NPU_NODE_NPU_EMULATION": "1",
        "NPU_NODE_NPU_SYSFS": str(directory),
        "NPU_NODE_CANARY_INTERVAL_S": "86400",
    } | quick_models
    with start_node("--config", str(config), ready=False, **environment) as node:
        node.wait_for(lambda body: body["status"] == "ready", timeout=240)
        yield node, use_by_others


@pytest.mark.parametrize(
    ("path", "body"),
    [
        # The edge ends this one, before the engine's last word on it.
        ("/inference", {**PROMPT, "stop": [" "]}),
        ("/embeddings", {"texts": ["one"]}),
    ],
    ids=["stop sequence", "embedding"],
)
async def test_a_reply_says_that_its_busy_time_is_not_its_own(shared, http, path, body):
    node, use_by_others = shared

    async def ask(body):
        async with http.post(node.url + path, json=body) as reply:
            assert reply.status == 200
            return reply.headers.get("X-NPU-Busy-Exclusive"), (await reply.json()).get("npu_busy_exclusive")

    use_by_others()
    assert await ask(body) == ("false", False)
    again = {"texts": ["two"]} if path == "/embeddings" else body
    assert await ask(again) == (None, None), "nobody is known to have used it"


async def test_a_stream_that_others_run_into_says_so_at_its_end(shared, http):
    node, use_by_others = shared
    # So long that it goes on when the counter is moved, though this process is not run for a while.
    body = {**PROMPT, "max_new_tokens": 150, "ignore_eos": True, "stream": True}
    events = []
    async with http.post(node.url + "/inference", json=body) as reply:
        async for line in reply.content:
            if line.startswith(b"data: "):
                if not events:
                    use_by_others()
                events.append(json.loads(line[6:]))
    assert (events[-1]["npu_busy_delta_us"], events[-1]["npu_busy_exclusive"]) == (10_000_000, False)
    async with http.get(node.url + "/metrics") as reply:
        lines = (await reply.text()).splitlines()
    busy = [line for line in lines if line.startswith("npu_node_npu_busy_seconds_total") and not line.endswith(" 0.0")]
    labels = 'emulated="true",exclusive="false",model="smollm2-135m-instruct"'
    assert busy == [f"npu_node_npu_busy_seconds_total{{{labels}}} 10.0"]
