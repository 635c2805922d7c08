"""A node that an actor started ends with the actor, however that ends; the actor learns of the node's end, too."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from backend_client.bulk.ray_executor import TiedNode
from backend_client.errors import NPUUnavailableError

NODE = """
import json, os, sys, time
open("node.pid", "w").write(str(os.getpid()))
given = {name: value for name, value in os.environ.items() if name.startswith("NPU_NODE_")}
json.dump([sys.argv[1:], given], open("given.json", "w"))
print("a line of its log", file=sys.stderr, flush=True)
if "NPU_NODE_MODELS" in os.environ:
    sys.exit("NPU_NODE_MODELS: is not valid JSON")
print("listening on http://127.0.0.1:1", flush=True)
time.sleep(600)
"""
ACTOR = """
import sys, time
from backend_client.bulk.ray_executor import TiedNode
node = TiedNode.start()
print(node.url, flush=True)
if sys.argv[1] == "stop":
    node.stop()
time.sleep(600)
"""
# For hangs only.
HANG_S = 60


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A stand-in for the node, where this process would start the real one."""
    package = tmp_path / "worker_node"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(NODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("end", ["kill", "exit", "stop"])
def test_the_node_ends_with_the_process_that_started_it(package, end):
    actor = subprocess.Popen([sys.executable, "-c", ACTOR, end], stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert actor.stdout.readline() == "http://127.0.0.1:1\n"
        pid = int((package / "node.pid").read_text())
        if end == "kill":
            actor.kill()
        elif end == "exit":
            actor.send_signal(signal.SIGTERM)
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(HANG_S)
    finally:
        actor.kill()
        actor.wait()
        actor.stdout.close()


def test_it_listens_on_loopback_only_with_a_key_of_its_own_whatever_the_machine_sets_for_services(package, monkeypatch):
    services = ("API_KEYS_FILE", "ALLOW_UNAUTHENTICATED", "OLLAMA_PORT", "TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA")
    for name in (*services, "API_KEYS", "HOST"):
        monkeypatch.setenv(f"NPU_NODE_{name}", "of a service")
    monkeypatch.setenv("NPU_NODE_EMBEDDING_CACHE", "5")
    node = TiedNode.start()
    node.stop()
    arguments, given = json.loads((package / "given.json").read_text())
    # Flags go before NPU_NODE_HOST.
    assert arguments == ["serve", "--host", "127.0.0.1", "--port", "0"]
    assert [name for name in services if f"NPU_NODE_{name}" in given] == []
    assert given["NPU_NODE_API_KEYS"] == node.key
    assert given["NPU_NODE_EMBEDDING_CACHE"] == "5"
    assert len(node.key) == 64
    assert node.key not in repr(node)


def test_a_node_that_does_not_start_fails_with_its_last_message(package, monkeypatch):
    monkeypatch.setenv("NPU_NODE_MODELS", "not JSON")
    with pytest.raises(NPUUnavailableError, match="NPU_NODE_MODELS: is not valid JSON"):
        TiedNode.start()


def test_the_end_of_a_node_is_noticed_unless_it_was_stopped(package):
    ended = threading.Event()
    TiedNode.start(on_end=ended.set)
    os.kill(int((package / "node.pid").read_text()), signal.SIGKILL)
    assert ended.wait(HANG_S)
    calls = []
    stopped = TiedNode.start(on_end=lambda: calls.append(None))
    stopped.stop()
    for thread in threading.enumerate():
        if thread.name == "tied node":
            thread.join(HANG_S)
    assert not calls
