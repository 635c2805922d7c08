"""A node on Windows' Python: what a user of Windows does with it, and what happens when something is killed.

It runs under Wine, which is not Windows: docs/proof.md says what that leaves open.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import time

import httpx
import numpy as np
import psutil
import pytest

from backend_client.sync import NPUClient as SyncNPUClient
from tests.support.ports import free_port
from tests.wine.npu_compiler import EMBEDDER, GENERATOR, model_store
from tests.wine.windows import ROOT, windows, windows_path

pytestmark = pytest.mark.timeout(900)
READY_S, KILLED_S = 300, 180
TEXTS = ["The tower is 330 metres tall.", "Bananas are rich in potassium.", "東京は日本の首都です。"]


@pytest.fixture(scope="module")
def installation():
    return windows()


def settings_file(installation, *models):
    path = installation.drive / f"{len(models)}-models.toml"
    entries = "\n".join(f'[[models]]\nname = "{name}"\nplacements = ["CPU"]' for name in models)
    path.write_text(f"model_store = '{windows_path(model_store())}'\n{entries}\n")
    return rf"C:\{path.name}"


class WindowsNode:
    """A node with these models."""

    def __init__(self, installation, *models):
        self.installation = installation
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = ("-m", "worker_node", "serve", "--config", settings_file(installation, *models))
        self.process = installation.start(*command, "--port", str(self.port), STARTED_BY=self.url)

    def call(self, path, body=None, timeout=120):
        reply = httpx.request("POST" if body else "GET", self.url + path, json=body, timeout=timeout)
        return reply.raise_for_status().json()

    def wait_ready(self, within=READY_S):
        until = time.monotonic() + within
        while time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError):
                if self.call("/health/ready", timeout=10)["status"] == "ready":
                    return
            assert self.process.poll() is None, self.process.stdout.read()[-3000:]
            time.sleep(1)
        raise AssertionError(f"the node was not ready within {within} s")

    def processes(self):
        """The commands of all Python of this node, by their ids on Linux, whose environment Wine passes on."""
        return {
            process.pid: " ".join(process.info["cmdline"])
            for process in psutil.process_iter(["cmdline", "environ"])
            if "python.exe" in " ".join(process.info["cmdline"] or ())
            and (process.info["environ"] or {}).get("STARTED_BY") == self.url
        }

    def left(self):
        """What of the node runs on, half a minute after its end at the latest."""
        until = time.monotonic() + 30
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.5)
        return left


@contextlib.contextmanager
def windows_node(installation, *models):
    node = WindowsNode(installation, *models)
    try:
        node.wait_ready()
        yield node
    finally:
        node.process.kill()
        node.process.wait()
        node.process.stdout.close()


def test_a_client_on_linux_falls_over_to_a_node_on_linux_and_no_engine_of_the_killed_one_is_left(
    installation, whole_node
):
    with windows_node(installation, EMBEDDER) as node, SyncNPUClient([node.url, whole_node.url]) as client:
        before = {client.embed_result(text, model=EMBEDDER).node for text in TEXTS * 5}
        node.process.kill()
        node.process.wait()
        after = {client.embed_result(text, model=EMBEDDER).node for text in TEXTS * 5}
        assert node.url in before
        assert after == {whole_node.url}
        assert not node.left()


@pytest.fixture(scope="module")
def node(installation):
    with windows_node(installation, EMBEDDER, GENERATOR) as running:
        yield running


def chat(node, content="Name the capital of France.", **more):
    body = {"model": GENERATOR, "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 16}
    return node.call("/v1/chat/completions", body | more)


def engines(node):
    return {pid for pid, command in node.processes().items() if "worker_node.engines.child" in command}


def test_vectors_equal_those_of_linux(node, whole_node):
    def vectors(url):
        with SyncNPUClient([url]) as client:
            return np.array([client.embed_result(text, model=EMBEDDER).vector for text in TEXTS])

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


# Beside a node Wine need not be started for each command.
@pytest.mark.usefixtures("node")
def test_the_demo_calls_a_node_kills_it_and_falls_back(installation):
    store = windows_path(model_store())
    done = installation.run(windows_path(ROOT / "examples" / "demo.py"), NPU_NODE_MODEL_STORE=store)
    assert done.returncode == 0, done.stdout[-3000:]
    served = done.stdout.partition("Who served what")[2]
    assert re.search(r"3 x embed +by the node at .*, on its CPU", served), done.stdout[-3000:]
    assert re.search(r"3 x embed +by the stand-in", served)
    assert re.search(r"1 x generate +by the stand-in", served)


def command(installation, *arguments, **environment):
    done = installation.run("-m", "worker_node", *arguments, **environment)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.usefixtures("node")
def test_a_local_model_is_pulled_listed_and_removed(installation):
    def run(*arguments):
        return command(installation, *arguments, NPU_NODE_MODEL_STORE=r"C:\models")

    shutil.rmtree(installation.drive / "models", ignore_errors=True)
    run("pull", windows_path(model_store() / GENERATOR), "--name", "mine")
    assert re.search(r"^mine\b", run("list", "--all"), re.MULTILINE)
    run("rm", "mine")
    assert not (installation.drive / "models" / "mine").exists()


LINUX = ("0000:00", "PCI bus", "firmware", "render", "/dev/accel", "sudo", "apt ", "modprobe", "dmesg", "kernel")
ENUM = r"SYSTEM\CurrentControlSet\Enum\PCI\VEN_8086&DEV_B03E&SUBSYS_00000000&REV_04\3&11583659&0&58"
CLASS = r"SYSTEM\CurrentControlSet\Control\Class\{f01a9d53-3ff6-48d2-9f97-c8a7004be10c}\0000"
NPU = {
    ENUM: {"Driver": CLASS.split("Class\\")[1]},
    CLASS: {"DriverVersion": "32.0.100.4512", "DriverDate": "1-15-2026"},
}
WRITE = f"""
import winreg
for path, values in {NPU!r}.items():
    with winreg.CreateKey(winreg.HKEY_LOCAL_MACHINE, path) as key:
        for name, value in values.items():
            winreg.SetValueEx(key, name, 0, winreg.REG_SZ, value)
"""
DELETE = f"""
import winreg
for path in {list(NPU)!r}:
    winreg.DeleteKey(winreg.HKEY_LOCAL_MACHINE, path)
"""


@pytest.mark.usefixtures("node")
def test_doctor_speaks_of_windows(installation):
    store = windows_path(model_store())
    text = command(installation, "doctor", NPU_NODE_MODEL_STORE=store)
    assert "Windows lists no Intel NPU" in text
    assert "nothing keeps a node from serving here" in text
    assert [word for word in LINUX if word in text] == []
    assert installation.run("-c", WRITE).returncode == 0
    try:
        text = command(installation, "doctor", NPU_NODE_MODEL_STORE=store)
    finally:
        assert installation.run("-c", DELETE).returncode == 0
    assert "npu-present: Panther Lake NPU 8086:b03e" in text
    assert "driver 32.0.100.4512 of 2026-01-15: versions before 32.0.100.5540 crash" in text
    assert "https://www.intel.com/" in text
    assert [word for word in LINUX if word in text] == []


# The last of those that share the node: it ends here.
def test_after_ctrl_c_no_engine_is_left(node):
    node.process.send_signal(signal.SIGINT)
    assert node.process.wait(60) == 0
    assert not node.left()


UNIT = "tests/unit/worker_node"
# What fails under Wine, and why. Nothing else is left out but what is marked `linux`.
LEFT_OUT = {
    f"{UNIT}/sandbox/test_pool.py::test_a_call_over_a_bound_is_refused_and_the_next_one_runs[take_memory-memory]": (
        "Wine limits no job's memory"
    ),
    f"{UNIT}/models/test_pull_process.py::test_two_pulls_at_once_do_the_work_once": (
        "Wine's _locking sets no errno where another process has the lock"
    ),
    f"{UNIT}/bounded/test_settings.py::test_waiting_is_bounded_for_other_processes_and_for_our_own_jobs": (
        "Wine's _locking sets no errno where another process has the lock"
    ),
    f"{UNIT}/http/test_models.py::test_requests_pull_files_of_the_pull_roots_only_and_learn_of_no_others": (
        "Wine makes no symbolic links, and says that it did"
    ),
    f"{UNIT}/structured_output/test_official_suite.py": "pip does not end under Wine",
    f"{UNIT}/cli/test_node_commands.py::test_a_pull_without_a_network_says_so_in_one_line": (
        "pip does not end under Wine"
    ),
    f"{UNIT}/models/test_gguf_conversion.py": (
        "not judged: a page fault ends the process when a graph that OpenVINO read from GGUF is freed"
    ),
}


def unit(*packages):
    return [f"{UNIT}/{name}" for name in packages]


GROUPS = {
    "windows": ["tests/windows"],
    "node": unit("engines", "sandbox", "scheduling", "manager", "serving", "encoders", "settings", "doctor"),
    "models": unit("models"),
    "tasks": unit("tasks"),
    "http": unit("http"),
    "others": unit("structured_output", "bounded", "certify", "cli", "devices", "observability"),
}


@pytest.mark.parametrize("group", GROUPS)
def test_unit_tests_pass(installation, group):
    root = windows_path(ROOT)
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "--rootdir", root, "-c", rf"{root}\pyproject.toml"]
    options += [part for name in LEFT_OUT for part in ("--deselect", name)]
    files = [rf"{root}\{path}".replace("/", "\\") for path in GROUPS[group]]
    # Tests write files in the encoding of the system, and hold them to be UTF-8.
    environment = {"PYTHONUTF8": "1", "TESTS_USERS_STORE": windows_path(model_store())}
    done = installation.run("-m", "pytest", *options, *files, timeout=850, **environment)
    print(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout[-6000:]
