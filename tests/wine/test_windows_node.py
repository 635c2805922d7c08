"""A node on Windows' Python: what a user of Windows does with it, and what happens when something is killed.

It runs under Wine, which is not Windows: docs/proof.md says what that leaves open.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request

import numpy as np
import psutil
import pytest

from backend_client.sync import NPUClient as SyncNPUClient
from tests.support.ports import free_port
from tests.wine.npu_compiler import EMBEDDER, GENERATOR, model_store
from tests.wine.windows import windows, windows_path

pytestmark = pytest.mark.timeout(600)
READY_S, KILLED_S = 240, 120
TEXTS = ["The tower is 330 metres tall.", "Bananas are rich in potassium.", "東京は日本の首都です。"]


@pytest.fixture(scope="module")
def installation():
    return windows()


@pytest.fixture(scope="module")
def settings(installation):
    path = installation.drive / "node.toml"
    models = "\n".join(f'[[models]]\nname = "{name}"\nplacements = ["CPU"]' for name in (EMBEDDER, GENERATOR))
    path.write_text(f"model_store = '{windows_path(model_store())}'\n{models}\n")
    return r"C:\node.toml"


class WindowsNode:
    def __init__(self, installation, settings):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = installation.start("-m", "worker_node", "serve", "--config", settings, "--port", str(self.port))

    def call(self, path, body=None, timeout=120):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=timeout) as reply:  # noqa: S310
            return json.load(reply)

    def wait_ready(self, within=READY_S):
        until = time.monotonic() + within
        while time.monotonic() < until:
            with contextlib.suppress(OSError, urllib.error.HTTPError):
                if self.call("/health/ready", timeout=10)["status"] == "ready":
                    return
            assert self.process.poll() is None, self.process.stdout.read()[-3000:]
            time.sleep(1)
        raise AssertionError(f"the node was not ready within {within} s")

    def processes(self):
        """The ids of its processes, the engines' too, as Linux counts them."""
        commands = {
            process.pid: " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
        }
        return {pid: command for pid, command in commands.items() if "python.exe" in command}

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@pytest.fixture(scope="module")
def node(installation, settings):
    made = WindowsNode(installation, settings)
    try:
        made.wait_ready()
        yield made
    finally:
        made.stop()


def chat(node, content="Name the capital of France.", **more):
    body = {"model": GENERATOR, "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 16}
    return node.call("/v1/chat/completions", body | more)


def engines(node):
    return {pid for pid, command in node.processes().items() if "worker_node.engines.child" in command}


def test_vectors_equal_those_of_linux(node, whole_node):
    def vectors(url):
        with SyncNPUClient([url]) as client:
            return np.array([client.embed(text, model=EMBEDDER).embedding for text in TEXTS])

    np.testing.assert_allclose(vectors(node.url), vectors(whole_node.url), atol=1e-6)


def test_a_chat_answers_in_words_in_parts_and_in_a_schema(node):
    assert "Paris" in chat(node)["choices"][0]["message"]["content"]
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = chat(node, response_format=form, max_tokens=32)["choices"][0]["message"]["content"]
    assert json.loads(answer)["city"] in {"Paris", "Rome"}


def test_a_killed_engine_is_replaced_and_its_request_answered(node):
    before = engines(node)
    assert len(before) == 2
    for engine in before:
        os.kill(engine, signal.SIGKILL)
    assert "Paris" in chat(node)["choices"][0]["message"]["content"]
    node.wait_ready(KILLED_S)
    assert engines(node).isdisjoint(before)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "the end of the node"])
def test_no_engine_outlives_its_node(installation, settings, how):
    node = WindowsNode(installation, settings)
    others = node.processes().keys() - {node.process.pid}
    node.wait_ready()
    node.process.send_signal(how)
    node.stop()
    assert how is signal.SIGKILL or node.process.returncode == 0
    until = time.monotonic() + 30
    while (left := node.processes().keys() - others) and time.monotonic() < until:
        time.sleep(0.5)
    assert not left


def test_a_local_model_is_pulled_listed_and_removed(installation):
    source = windows_path(model_store() / GENERATOR)

    def command(*arguments):
        done = installation.run("-m", "worker_node", *arguments, NPU_NODE_MODEL_STORE=r"C:\models")
        assert done.returncode == 0, done.stdout
        return done.stdout

    command("pull", source, "--name", "mine")
    assert re.search(r"^mine\b", command("list", "--all"), re.MULTILINE)
    command("rm", "mine")
    assert not re.search(r"^mine\b", command("list", "--all"), re.MULTILINE)


def test_doctor_says_what_windows_lacks(installation):
    done = installation.run("-m", "worker_node", "doctor")
    assert "Traceback" not in done.stdout, done.stdout
    assert "NPU" in done.stdout
