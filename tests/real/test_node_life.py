"""A node from its start to every end: service manager, signals, models that load while asked for, killed engines."""

import asyncio
import collections
import contextlib
import json
import os
import shutil
import signal
import socket
import threading
import time

import aiohttp
import psutil
import pytest

from tests.real.inference import post
from tests.support.nodes import start_node

pytestmark = [pytest.mark.real, pytest.mark.timeout(300), pytest.mark.usefixtures("store")]


@pytest.fixture(scope="module")
def temporary(tmp_path_factory):
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def killed(quick_models, temporary):
    """A node for tests that kill its engines."""
    with start_node(TMPDIR=str(temporary), **quick_models) as running:
        yield running


def test_sigterm_drains(quick_models):
    """Ready → 503 first, admitted work finishes, new work is refused, all within 30 s and with exit status 0."""
    # More than 5 s: a model loads.

    async def drain(node):
        async with aiohttp.ClientSession() as http:
            body = {"prompt": "Write a story.", "max_new_tokens": 30, "ignore_eos": True}

            async def generate():
                async with http.post(node.url + "/inference", json=body) as reply:
                    return reply.status, await reply.json()

            (engine,) = node.engine_pids().values()
            # Stopped, so that the answer is not over before all has been asked.
            os.kill(engine, signal.SIGSTOP)
            running = asyncio.create_task(generate())
            await asyncio.to_thread(node.wait_for, lambda health: health["models"][0]["in_flight"] == 1)
            node.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):
                while True:
                    async with http.get(node.url + "/health/ready") as reply:
                        if reply.status == 503:
                            assert (await reply.json())["status"] == "draining"
                            break
            async with http.post(node.url + "/inference", json={"prompt": "late"}) as reply:
                assert reply.status == 503
                assert (await reply.json())["error"]["code"] == "draining"
            os.kill(engine, signal.SIGCONT)
            status, answer = await running
            assert status == 200
            assert answer["usage"]["completion_tokens"] == 30

    with start_node(NPU_NODE_MODELS='[{"name": "smollm2-135m-instruct"}]', **quick_models) as node:
        engines = list(node.engine_pids().values())
        asyncio.run(drain(node))
        began = time.monotonic()
        assert node.process.wait(30) == 0
        assert time.monotonic() - began < 30
        assert not any(psutil.pid_exists(pid) for pid in engines)


def kill_9(node, temporary):
    children = psutil.Process(node.process.pid).children(recursive=True)
    assert len(children) >= 2
    node.process.kill()
    node.process.wait()
    assert not psutil.wait_procs(children, timeout=10)[1]
    assert not list(temporary.iterdir())


def test_kill_9_of_a_node_that_loads_leaves_no_process_and_no_file(tmp_path, quick_models):
    with start_node(ready=False, TMPDIR=str(tmp_path), **quick_models) as node:
        node.wait_for(lambda body: all(model["engines"][0]["pid"] for model in body["models"]))
        kill_9(node, tmp_path)


@pytest.mark.linux
def test_listening_alive_ready_stopping(store, tmp_path):
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(60)

        def hear():
            return dict(line.split("=", 1) for line in manager.recv(4096).decode().split("\n"))

        with start_node(
            ready=False,
            NOTIFY_SOCKET=address,
            WATCHDOG_USEC="400000",
            NPU_NODE_MODELS='[{"name": "all-minilm-l6-v2", "placements": ["CPU"]}]',
        ) as node:
            first = hear()
            assert first["READY"] == "1"
            assert first["STATUS"].startswith("starting; 0 of 1 models serve")
            said = hear()
            while not said["STATUS"].startswith("ready; 1 of 1"):
                assert said["WATCHDOG"] == "1"
                said = hear()
            node.process.send_signal(signal.SIGHUP)
            assert node.health()[0] == 200, "without a file of settings a hangup changes nothing"
            assert node.terminate() == 0
            while "STOPPING" not in said:
                said = hear()
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                assert "READY" not in hear(), "an engine spoke in the node's name"


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
        if hasattr(signal, "SIGHUP"):
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


@pytest.mark.linux
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


EMBEDDER, WRITER = "all-minilm-l6-v2", "smollm2-135m-instruct"
MESSAGES = [{"role": "user", "content": "Hello"}]
# A request of each dialect, streams among them.
REQUESTS = [
    ("/embeddings", {"texts": ["a"]}),
    ("/v1/embeddings", {"model": EMBEDDER, "input": "a"}),
    ("/api/embed", {"model": EMBEDDER, "input": "a"}),
    ("/inference", {"prompt": "Hello", "max_new_tokens": 2}),
    ("/inference", {"prompt": "Hello", "max_new_tokens": 2, "stream": True}),
    ("/v1/chat/completions", {"model": WRITER, "messages": MESSAGES, "max_tokens": 2, "stream": True}),
    ("/v1/completions", {"model": WRITER, "prompt": "Hello", "max_tokens": 2}),
    ("/v1/responses", {"model": WRITER, "input": "Hello", "max_output_tokens": 16}),
    ("/api/chat", {"model": WRITER, "messages": MESSAGES, "options": {"num_predict": 2}}),
    ("/api/generate", {"model": WRITER, "prompt": "Hello", "options": {"num_predict": 2}, "stream": False}),
]


def with_session(test):
    async def run(node):
        async with aiohttp.ClientSession() as http:
            await test(http, node)

    return lambda node: asyncio.run(run(node))


@with_session
async def ask_while_both_load(http, node):
    states = {model["id"]: model for model in node.health()[1]["models"]}
    assert states[WRITER]["state"] == "loading"
    assert states[WRITER]["ready_in_s"] > 0
    for headers in ({"X-Request-Timeout-Ms": "100"}, {"X-NPU-Restart-Wait-Ms": "0"}):
        status, replied, content = await post(http, node, "/inference", {"prompt": "Hello"}, headers)
        assert status == 503, content
        assert json.loads(content)["error"]["code"] in {"model_loading", "engine_unavailable"}
        assert int(replied["Retry-After"]) > 0
    answers = await asyncio.gather(*(post(http, node, path, body) for path, body in REQUESTS))
    for (path, body), (status, _, content) in zip(REQUESTS, answers, strict=True):
        assert status == 200, (path, body, content)
        assert b"error" not in content.replace(b'"error":null', b"")


def test_requests_of_any_dialect_wait_for_a_model_that_is_loading(quick_models):
    # More than 5 s: both models load.
    with start_node(ready=False, **quick_models) as node:
        ask_while_both_load(node)


def test_requests_of_any_dialect_wait_for_a_model_whose_engine_died(killed):
    for pid in killed.engine_processes():
        os.kill(pid, signal.SIGKILL)
    killed.wait_for(lambda body: all(model["state"] != "ready" for model in body["models"]))
    ask_while_both_load(killed)
    killed.wait_for(lambda body: body["status"] == "ready")


def test_no_more_requests_wait_for_a_load_than_there_are_places(quick_models):
    @with_session
    async def fill(http, node):
        small = {"prompt": "Hello", "max_new_tokens": 1}
        answers = await asyncio.gather(*(post(http, node, "/inference", small) for _ in range(5)))
        assert sorted(status for status, *_ in answers) == [200, 200, 200, 429, 429]
        assert node.health()[1]["models"][0]["in_flight"] == 0

    only = json.dumps([{"name": WRITER, "max_outstanding": 3}])
    with start_node(ready=False, NPU_NODE_MODELS=only, **quick_models) as node:
        fill(node)


def test_a_node_that_ends_refuses_what_still_waits_for_a_load(quick_models):
    @with_session
    async def end(http, node):
        await asyncio.to_thread(node.wait_for, lambda body: node.engine_processes())
        for pid in node.engine_processes():
            os.kill(pid, signal.SIGSTOP)
        waiting = asyncio.create_task(post(http, node, "/inference", {"prompt": "Hello"}))
        await asyncio.to_thread(node.wait_for, lambda body: body["models"][0]["in_flight"] == 1)
        node.process.send_signal(signal.SIGTERM)
        status, _, content = await waiting
        error = json.loads(content)["error"]
        assert (status, error["code"]) == (503, "engine_unavailable")
        assert "the node is shutting down" in error["message"]

    models = {"NPU_NODE_MODELS": json.dumps([{"name": WRITER}]), "NPU_NODE_DRAIN_TIMEOUT_S": "0.2"}
    with start_node(ready=False, **models, **quick_models) as node:
        end(node)


def test_a_forced_removal_ends_streams_with_its_reason_and_leaves_the_model_failed(tmp_path, quick_models):
    # More than 5 s: a model loads.
    @with_session
    async def remove(http, node):
        endless = {"prompt": "Hello", "max_new_tokens": 1000, "ignore_eos": True, "stream": True}
        async with http.post(node.url + "/inference", json=endless) as reply:
            assert (await reply.content.readline()).startswith(b"event: token")
            async with http.delete(f"{node.url}/models/{WRITER}") as refused:
                assert refused.status == 409
            async with http.delete(f"{node.url}/models/{WRITER}?force=true") as deleted:
                assert deleted.status == 200
            last = (await reply.content.read()).decode().strip().splitlines()[-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "engine_unavailable"
        assert error["message"].endswith("the model was removed")
        _, health = node.health()
        [model] = health["models"]
        assert (model["id"], model["kind"], model["state"]) == (WRITER, "generation", "failed")
        assert f"npu-node pull {WRITER}" in model["reason"]
        async with http.get(f"{node.url}/models/smollm2") as reply:
            listed = await reply.json()
        assert (listed["id"], listed["task"], listed["state"]) == (WRITER, "generate", "failed")
        for body in ({"prompt": "Hello"}, {"prompt": "Hello", "model": "smollm2"}):
            status, _, content = await post(http, node, "/inference", body)
            assert (status, json.loads(content)["error"]["code"]) == (503, "engine_unavailable"), content

    store = tmp_path / "models"
    shutil.copytree(quick_models["NPU_NODE_MODEL_STORE"], store)
    models = json.dumps([{"name": WRITER}])
    with start_node(NPU_NODE_MODELS=models, NPU_NODE_MODEL_STORE=str(store)) as node:
        remove(node)


DEADLINE = {"X-Request-Timeout-Ms": "60000"}


@pytest.mark.parametrize("victim", [WRITER, EMBEDDER])
async def test_all_that_had_no_first_token_are_answered_after_a_kill(killed, http, victim):
    # More than 5 s: the engine loads a second time.
    async def send(path, body):
        status, _, content = await post(http, killed, path, body, DEADLINE)
        return path, status, b"" if status == 200 else content

    def chat(n):
        message = {"role": "user", "content": f"Story {n}. " + "It was a dark and stormy night. " * 20}
        return send("/v1/chat/completions", {"model": WRITER, "messages": [message], "max_tokens": 2})

    def embed(n):
        # Texts of its own: known ones are answered without the engine.
        return send("/v1/embeddings", {"model": EMBEDDER, "input": [f"{victim} {n}, line {k}." for k in range(10)]})

    def held(health):
        return next(model["in_flight"] for model in health["models"] if model["id"] == victim) >= 10

    # Stopped, so that it holds them all and has answered none when it is killed.
    pid = killed.engine_pids()[victim]
    os.kill(pid, signal.SIGSTOP)
    tasks = [asyncio.create_task(chat(n)) for n in range(40)] + [asyncio.create_task(embed(n)) for n in range(20)]
    await asyncio.to_thread(killed.wait_for, held)
    os.kill(pid, signal.SIGKILL)
    outcomes = collections.Counter(await asyncio.gather(*tasks))
    assert outcomes == {("/v1/chat/completions", 200, b""): 40, ("/v1/embeddings", 200, b""): 20}
    health = await asyncio.to_thread(killed.wait_for, lambda body: body["status"] == "ready")
    assert not any(model["in_flight"] for model in health["models"])


def test_kill_9_of_a_node_that_serves_leaves_no_process_and_no_file(killed, temporary):
    """The last one: no node is left."""
    kill_9(killed, temporary)
