"""No entry point lets OpenVINO report to its makers: it creates nothing in the home and looks up no name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.nodes import RunningNode, started

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
[WARM_UP] = re.findall(r"python -c '(import examples.demo, .*?)'", MAKEFILE)
# Python imports it first in every process, engines included: variables PYTHON… and HOME reach them.
RECORDER = """
import os, sys
def refuse_and_record(event, arguments):
    if event in {"socket.getaddrinfo", "socket.gethostbyname"} and arguments[0] != "127.0.0.1":
        with open(os.path.join(os.environ["HOME"], "lookups"), "a") as file:
            print(arguments[0], file=file)
        raise OSError("a name was looked up")
sys.addaudithook(refuse_and_record)
"""
_TURNS_IT_OFF = {"CI", "TF_BUILD", "JENKINS_URL"}  # openvino_telemetry is silent in continuous integration


@pytest.fixture
def home(store, tmp_path, monkeypatch):
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(RECORDER)
    (home := tmp_path / "home").mkdir()
    for name in (*_TURNS_IT_OFF, "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    path = os.pathsep.join(filter(None, [str(tmp_path / "path"), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", path)
    return home


def reports(home):
    """What OpenVINO's telemetry leaves: its directory, and the names that were looked up."""
    looked_up = set((home / "lookups").read_text().split()) if (home / "lookups").exists() else set()
    return [path.name for path in home.iterdir() if path.name.lower().startswith("intel")], looked_up


def run(*command):
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("-c", WARM_UP),
        ("examples/demo.py", "--help"),
        ("-c", "import sys, npu_commands; sys.argv = ['npu-node', 'doctor', '--json']; npu_commands.node()"),
        ("-c", "import sys, npu_commands; sys.argv = ['npu-client', '--version']; npu_commands.client()"),
        ("-c", "import sys, npu_commands; sys.argv = ['npu-gateway', 'serve', '--help']; npu_commands.gateway()"),
        ("packaging/bundle/entry.py", "-m", "worker_node.devices.probe"),
        ("-m", "benchmarks", "--help"),
        ("-c", "import benchmarks.generation"),
        ("-c", "import tests.support.held_text"),
    ],
    ids=lambda command: " ".join(command)[:50],
)
def test_an_entry_point_reports_nothing(home, command):
    run(*command)
    assert reports(home) == ([], set())


def test_a_node_and_its_engines_report_nothing(home, quick_models):
    with started(["serve", "--port", "0"], os.environ | quick_models) as process:
        node = RunningNode(process, process.stdout.readline().split()[-1])
        node.wait_for(lambda body: body["status"] == "ready")
        assert len(node.engine_processes()) == 2
    assert reports(home) == ([], set())


def test_what_these_tests_look_for_is_seen(home):
    """OpenVINO on its own creates its directory. Its look-up, in a process that it soon ends, may not be reached."""
    run("-c", "import openvino, socket, contextlib\nwith contextlib.suppress(OSError): socket.getaddrinfo('a.test', 1)")
    created, looked_up = reports(home)
    assert created == ["intel"]
    assert "a.test" in looked_up
