"""`npu-client`, as a user calls it."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from backend_client.cli.main import main
from tests.faults.scripted_node import ANSWER, EMBEDDER, ScriptedNode, vectors_for
from tests.faults.served import served_in_thread


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    monkeypatch.delenv("NPU_CLIENT_CONFIG", raising=False)


@pytest.fixture
def scripted_node(monkeypatch):
    node = ScriptedNode()
    with served_in_thread(node) as url:
        monkeypatch.setenv("NPU_CLIENT_NODES", url)
        yield node


@pytest.fixture
def node(scripted_node):
    return scripted_node.url


def test_health_is_a_table_of_nodes_and_models(node, capsys):
    assert main(["health"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["NODE", "STATUS", "MODEL"]
    assert first.split()[:4] == [node, "ready", EMBEDDER, "ready"]
    assert "space-a" in first
    assert second.split()[1] == "ready"


def test_health_as_json_and_of_a_dead_node(node, capsys):
    assert main(["--node", node, "--node", "http://127.0.0.1:1", "health", "--json"]) == 0
    alive, dead = json.loads(capsys.readouterr().out)
    assert (alive["usable"], alive["models"][0]["id"]) == (True, EMBEDDER)
    assert (dead["usable"], dead["status"]) == (False, "unreachable")
    assert main(["--node", "http://127.0.0.1:1", "health"]) == 1
    assert "cannot connect" in capsys.readouterr().out


@pytest.mark.usefixtures("interruptible")
def test_health_is_watched_until_interrupted(scripted_node):
    command = [sys.executable, "-m", "backend_client", "health", "--watch", "--interval", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        looks = (line.split()[1] for line in watching.stdout if line.startswith(scripted_node.url))
        assert [next(looks) for _ in range(3)] == ["ready"] * 3
        scripted_node.status = "draining"
        while (look := next(looks)) == "ready":
            pass
        watching.send_signal(signal.SIGINT)
        _, told = watching.communicate(timeout=30)
    assert (look, told, watching.returncode) == ("draining", "npu-client: interrupted\n", 130)


def test_bench_of_answers_and_of_a_dead_node(node, capsys):
    assert main(["bench", "--what", "generate", "--calls", "6", "--concurrency", "2"]) == 0
    assert f"6 by {node}" in capsys.readouterr().out
    assert main(["--node", "http://127.0.0.1:1", "bench", "--calls", "3"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.partition(": http")[0]) == ("", "npu-client: there is no node to measure")


def test_embed_prints_a_vector_a_line(node, capsys):
    assert main(["embed", "one", "two"]) == 0
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    np.testing.assert_array_equal(np.float32([row["embedding"] for row in rows]), vectors_for(["one", "two"]))
    assert f"2 by {node}" in printed.err


def test_generate_prints_the_answer_and_who_gave_it(node, capsys):
    assert main(["generate", "a", "prompt", "--max-new-tokens", "5"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "".join(ANSWER) + "\n"
    assert f"CPU of {node}" in printed.err


def test_a_failure_is_one_line_and_status_1(capsys):
    assert main(["--node", "http://127.0.0.1:1", "embed", "text"]) == 1
    assert capsys.readouterr().err.startswith("npu-client: no node can serve it: http://127.0.0.1:1 cannot connect")


def test_wrong_settings_are_named_and_not_quoted(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("NPU_CLIENT_NODES", "ftp://user:hunter2@host")
    assert main(["health"]) == 1
    printed = capsys.readouterr().err
    assert "nodes" in printed
    assert "hunter2" not in printed
    for path, problem in ((tmp_path / "none.toml", "does not exist"), (tmp_path, "is not a file")):
        assert main(["--config", str(path), "health"]) == 1
        assert f"{path} {problem}" in capsys.readouterr().err
