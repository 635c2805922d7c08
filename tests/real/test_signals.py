"""Signals to a node without models, so that it starts in a moment."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading

import aiohttp
import psutil
import pytest

from tests.support.nodes import start_node

pytestmark = pytest.mark.real


@pytest.mark.linux
def test_a_hangup_changes_nothing(tmp_path):
    with start_node(NPU_NODE_MODELS="[]", NPU_NODE_MODEL_STORE=str(tmp_path)) as node:
        node.process.send_signal(signal.SIGHUP)
        assert node.health()[0] == 200
        assert node.terminate() == 0


def test_a_changed_file_is_applied_by_a_signal_a_request_and_itself(tmp_path):
    config = tmp_path / "node.toml"
    config.write_text("models = []\n")

    async def reload(node):
        async with aiohttp.ClientSession() as http, http.post(node.url + "/admin/reload") as reply:
            return reply.status, await reply.json()

    with start_node("--config", str(config), NPU_NODE_MODEL_STORE=str(tmp_path / "store")) as node:
        config.write_text("models = []\nembedding_cache = 7\n")
        status, report = asyncio.run(reload(node))
        assert (status, report["restart"]) == (200, ["embedding_cache"])
        config.write_text("models = []\nmax_textz = 7\n")
        if os.environ.get("NPU_NODE_PORTABLE") != "1":
            node.process.send_signal(signal.SIGHUP)
        status, refused = asyncio.run(reload(node))
        assert status == 400
        assert "node.toml: max_textz" in refused["error"]["message"]
        config.write_text('[[models]]\nname = "missing"\n')
        status, refused = asyncio.run(reload(node))
        assert (status, "npu-node pull missing" in refused["error"]["message"]) == (400, True)
        config.write_text("")
        status, refused = asyncio.run(reload(node))
        assert (status, "sets nothing" in refused["error"]["message"]) == (400, True)
        assert node.health()[0] == 200, "it goes on as before"
        assert node.terminate() == 0


@pytest.mark.linux  # what a pull starts: Windows has the job object, portable mode nothing
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_an_end_does_not_wait_for_a_pull_and_leaves_no_pip(tmp_path, end):
    """The index of packages takes the connection and never answers: a download would go on for as long."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        asked, held = threading.Event(), []

        def take():
            held.append(index.accept()[0])
            asked.set()

        threading.Thread(target=take, daemon=True).start()
        environment = {
            "NPU_NODE_MODELS": "[]",
            "NPU_NODE_MODEL_STORE": str(tmp_path),
            "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple",
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_EXTRA_INDEX_URL": "",
            "NO_PROXY": "127.0.0.1",
        }

        async def pull(node):
            async with (
                aiohttp.ClientSession() as http,
                http.post(node.url + "/api/pull", json={"model": "all-minilm"}) as reply,
            ):
                lines = [json.loads(await reply.content.readline()) for _ in range(2)]
                assert await asyncio.to_thread(asked.wait, 30)
                children = psutil.Process(node.process.pid).children(recursive=True)
                assert any("pip" in child.cmdline() for child in children)
                node.process.send_signal(end)
                with contextlib.suppress(aiohttp.ClientError) if end is signal.SIGKILL else contextlib.nullcontext():
                    assert "shutting down" in (await reply.content.read()).decode()
                return lines, children, await asyncio.to_thread(node.process.wait, 10)

        with start_node(**environment) as node:
            lines, children, status = asyncio.run(pull(node))
            assert psutil.wait_procs(children, timeout=10)[1] == []
        held[0].close()
    assert [line["status"].split()[0] for line in lines] == ["pulling", "downloading"]
    assert status == (0 if end is signal.SIGTERM else -signal.SIGKILL)
