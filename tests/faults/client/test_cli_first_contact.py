"""`npu-client` in the hands of somebody who has not read anything: keys, addresses, files, the operating system."""

import os

import pytest
from aiohttp import web

from backend_client.cli.main import main
from tests.faults.scripted_node import ScriptedNode, error_response
from tests.faults.served import served_in_thread


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    for name in [name for name in os.environ if name.startswith("NPU_CLIENT_")]:
        monkeypatch.delenv(name)


KEY = "right-key"


@pytest.fixture
def keyed():
    """The URL of a node that serves holders of its key, and tells others its status and version, as nodes do."""

    async def unless_keyed(request):
        if request.headers.get("Authorization") == f"Bearer {KEY}":
            return None
        if request.path == "/health":
            return web.json_response({"status": "ready", "version": "1"})
        return error_response(401, "invalid_api_key")

    node = ScriptedNode()
    node.respond = node.health_respond = unless_keyed
    with served_in_thread(node) as url:
        yield url


@pytest.mark.parametrize(
    ("key", "health", "call"),
    [
        (None, "needs a key: set NPU_CLIENT_API_KEY", "is missing or wrong; check NPU_CLIENT_API_KEY"),
        ("wrong", "check NPU_CLIENT_API_KEY", "is missing or wrong; check NPU_CLIENT_API_KEY"),
    ],
)
def test_a_missing_key_and_a_wrong_one_are_told_apart(keyed, monkeypatch, capsys, key, health, call):
    if key is not None:
        monkeypatch.setenv("NPU_CLIENT_API_KEY", key)
    main(["--node", keyed, "health"])
    assert f"{keyed}: " in (out := capsys.readouterr().out)
    assert health in out
    assert main(["--node", keyed, "embed", "a"]) == 1
    assert call in capsys.readouterr().err


def test_a_node_is_given_without_a_scheme(capsys):
    with served_in_thread(ScriptedNode()) as url:
        assert main(["--node", url.removeprefix("http://"), "health"]) == 0
    assert url in capsys.readouterr().out


def test_settings_may_stand_before_the_command_and_behind_it(tmp_path, capsys):
    with served_in_thread(ScriptedNode()) as first, served_in_thread(ScriptedNode()) as second:
        assert main(["health", "--node", first, "--local-only"]) == 0
        assert first in capsys.readouterr().out
        assert main(["--node", first, "health", "--node", second]) == 0
        assert first in (out := capsys.readouterr().out)
        assert second in out
        (tmp_path / "client.toml").write_text(f'nodes = ["{second}"]\n')
        assert main(["embed", "--config", str(tmp_path / "client.toml"), "a"]) == 0


@pytest.mark.parametrize("node", ["127.0.0.1", "npu.internal"])
def test_a_node_without_its_port_is_told_what_is_missing(capsys, node):
    assert main(["health", "--node", node]) == 1
    assert "  nodes: the port is missing: a node is given as host:port" in capsys.readouterr().err


def test_no_command_shows_the_help(capsys):
    assert main([]) == 0
    assert "commands:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nodes = []\nx = = 3\n", ": not valid TOML: Invalid value (at line 2, column 5)"),
        ("nodes = [", ": not valid TOML: Invalid value (at end of document)"),
        (b"nodes = '\xff'", ": cannot be read: it is not UTF-8"),
    ],
)
def test_a_broken_settings_file_is_named_with_its_line(tmp_path, capsys, text, told):
    file = tmp_path / "client.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["--config", str(file), "health"]) == 1
    assert f"{file}{told}" in capsys.readouterr().err


def test_a_variable_that_is_no_json_is_named_without_its_value(monkeypatch, capsys):
    monkeypatch.setenv("NPU_CLIENT_SPACES", "{hunter2")
    assert main(["health"]) == 1
    assert "NPU_CLIENT_SPACES: is not valid JSON" in (err := capsys.readouterr().err)
    assert "hunter2" not in err


def test_an_output_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("a\n")
    with served_in_thread(ScriptedNode()) as url:
        out = tmp_path / "missing" / "out.npy"
        assert main(["--node", url, "embed", "--in", str(tmp_path / "in.txt"), "--out", str(out)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"npu-client: the directory {out.parent} of the output does not exist")
    assert err.count("\n") == 1
