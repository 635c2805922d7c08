"""`npu-client`, as a user calls it: commands, keys, addresses and settings."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from aiohttp import web

from backend_client.cli.main import main
from tests.faults.scripted_node import ANSWER, EMBEDDER, ScriptedNode, error_response, served_in_thread, vectors_for

DEAD = "http://127.0.0.1:1"
KEY = "right-key"


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    for name in [name for name in os.environ if name.startswith("NPU_CLIENT_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def scripted_node(monkeypatch, _no_settings_from_outside):
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
    assert main(["--node", node.removeprefix("http://"), "--node", DEAD, "health", "--json"]) == 0
    alive, dead = json.loads(capsys.readouterr().out)
    assert (alive["url"], alive["usable"], alive["models"][0]["id"]) == (node, True, EMBEDDER)
    assert (dead["usable"], dead["status"]) == (False, "unreachable")
    assert main(["--node", DEAD, "health"]) == 1
    assert "cannot connect" in capsys.readouterr().out


@pytest.mark.usefixtures("interruptible")
def test_health_is_watched_until_interrupted(scripted_node):
    command = [sys.executable, "-m", "backend_client", "health", "--watch", "--interval", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        looks = (line.split()[1] for line in watching.stdout if line.startswith(scripted_node.url))
        assert [next(looks) for _ in range(3)] == ["ready"] * 3
        scripted_node.health_status = "draining"
        while (look := next(looks)) == "ready":
            pass
        watching.send_signal(signal.SIGINT)
        _, printed = watching.communicate(timeout=30)
    assert (look, printed, watching.returncode) == ("draining", "npu-client: interrupted\n", 130)


@pytest.mark.parametrize("what", ["embed", "generate"])
def test_bench_prints_rates_and_who_served(node, capsys, what):
    assert main(["bench", "--what", what, "--calls", "6", "--concurrency", "2"]) == 0
    head, figures, by = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["CALLS", "FAILED"]
    assert figures.split()[:2] == ["6", "0"]
    assert by == f"6 by {node}"
    assert main(["--node", DEAD, "bench", "--calls", "3"]) == 1
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
    assert main(["--node", DEAD, "embed", "text"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"npu-client: no node can serve it: {DEAD} cannot connect")


@pytest.mark.parametrize(
    ("key", "health"), [(None, "needs a key: set NPU_CLIENT_API_KEY"), ("wrong", "check NPU_CLIENT_API_KEY")]
)
def test_a_missing_key_and_a_wrong_one_are_told_apart(monkeypatch, capsys, key, health):
    async def unless_keyed(request):
        if request.headers.get("Authorization") == f"Bearer {KEY}":
            return None
        if request.path == "/health":
            return web.json_response({"status": "ready", "version": "1"})
        return error_response(401, "invalid_api_key")

    keyed = ScriptedNode()
    keyed.respond = keyed.health_respond = unless_keyed
    if key is not None:
        monkeypatch.setenv("NPU_CLIENT_API_KEY", key)
    with served_in_thread(keyed) as url:
        main(["--node", url, "health"])
        assert health in capsys.readouterr().out
        assert main(["--node", url, "embed", "a"]) == 1
        assert "is missing or wrong; check NPU_CLIENT_API_KEY" in capsys.readouterr().err


def test_settings_may_stand_before_the_command_and_behind_it(tmp_path, capsys):
    with served_in_thread(ScriptedNode()) as first, served_in_thread(ScriptedNode()) as second:
        assert main(["--node", first, "health", "--node", second, "--local-only"]) == 0
        assert first in (out := capsys.readouterr().out)
        assert second in out
        (tmp_path / "client.toml").write_text(f'nodes = ["{second}"]\n')
        assert main(["embed", "--config", str(tmp_path / "client.toml"), "a"]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"nodes = []\nx = = 3\n", "not valid TOML: Invalid value (at line 2, column 5)"),
        (b"nodes = '\xff'", "cannot be read: it is not UTF-8"),
    ],
)
def test_a_broken_settings_file_is_named(tmp_path, capsys, content, message):
    file = tmp_path / "client.toml"
    if content is not None:
        file.write_bytes(content)
    assert main(["--config", str(file), "health"]) == 1
    assert f"{file}" in (err := capsys.readouterr().err)
    assert message in err


@pytest.mark.parametrize(
    ("name", "value"), [("NPU_CLIENT_NODES", "ftp://user:hunter2@host"), ("NPU_CLIENT_SPACES", "{hunter2")]
)
def test_wrong_settings_are_named_and_not_quoted(capsys, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert main(["health"]) == 1
    err = capsys.readouterr().err
    assert name.removeprefix("NPU_CLIENT_").lower() in err.lower()
    assert "hunter2" not in err
