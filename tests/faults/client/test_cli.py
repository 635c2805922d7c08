"""`npu-client`, as a user calls it: commands, keys, addresses, settings, and files of vectors."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from aiohttp import web

from backend_client import ClientSettings, NPUClient
from backend_client.cli.main import main
from tests.faults.scripted_node import (
    ANSWER,
    EMBEDDER,
    WRITER,
    ScriptedNode,
    answering,
    error_response,
    served_in_thread,
    vectors_for,
)

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


@pytest.mark.parametrize(
    ("change", "model", "message"),
    [
        (("http:", "https:"), EMBEDDER, "does not speak TLS; write http:// for a node without a certificate"),
        (
            ("", ""),
            "minilm",
            f"no node serves the model minilm: NODE does not serve minilm; models for embedding: {EMBEDDER}",
        ),
        (("", ""), WRITER, f"NODE has {WRITER} for generation, not embedding; models for embedding: {EMBEDDER}"),
    ],
)
def test_a_wrong_address_or_model_is_answered_with_the_next_step(node, capsys, change, model, message):
    assert main(["embed", "text", "--node", node.replace(*change), "--model", model, "--timeout", "5"]) == 1
    assert message.replace("NODE", node) in capsys.readouterr().err


def test_the_base_url_of_an_openai_client_is_refused_with_the_address_of_the_node(capsys):
    assert main(["health", "--node", "http://10.0.0.22:8081/v1/"]) == 1
    assert "a node is given as http://10.0.0.22:8081\n" in capsys.readouterr().err


def test_a_403_of_a_proxy_names_the_key_and_the_proxy(scripted_node, capsys):
    scripted_node.respond = answering(lambda: web.Response(status=403, text="<html>", content_type="text/html"))
    assert main(["embed", "text"]) == 1
    assert "HTTP 403 without the error body of a node; check NPU_CLIENT_API_KEY, and the" in capsys.readouterr().err


async def test_a_page_in_place_of_a_node_is_named_as_such(capsys, aiohttp_server):
    app = web.Application()
    app.add_routes([web.get("/health", answering(lambda: web.Response(text="<html>", content_type="text/html")))])
    url = str((await aiohttp_server(app)).make_url("")).rstrip("/")
    assert await asyncio.to_thread(main, ["health", "--node", url]) == 1
    assert f"{url}: /health answered HTTP 200, but not as a node does; check the address" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "nearest"), [("helth", "health"), ("health --jsno", "--json"), ("health --nothing-like-it", None)]
)
def test_an_unknown_word_is_answered_with_the_nearest_one(arguments, nearest, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert f"did you mean {nearest}?" in message if nearest else "did you mean" not in message


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


def test_health_tells_what_is_not_as_certified_and_the_faults_on_demand(scripted_node, capsys):
    def said(device, certified, reason, **more):
        return {"device": device, "certified": certified, "certified_reason": reason, **more}

    scripted_node.models[EMBEDDER] |= {
        "engines": [said("NPU", "limited", "prompts up to 480 tokens", emulated=True), said("CPU", "certified", "now")],
        "excluded": [said("GPU", "failed", "at noon: canary")],
    }
    scripted_node.models[WRITER]["engines"] = [said("NPU", "expired", "the driver changed"), {"device": "CPU"}]
    faults = ["garbage beyond_tokens=500", "crash"]

    async def health(_):
        body = {"status": "ready", "version": "1", "faults": faults}
        return web.json_response(body | {"models": [{"id": id_} | row for id_, row in scripted_node.models.items()]})

    scripted_node.health_respond = health
    assert main(["health"]) == 0
    url = scripted_node.url
    assert capsys.readouterr().out.splitlines()[-4:] == [
        f"{url}: has faults on demand: garbage beyond_tokens=500; crash",
        f"{url}: {EMBEDDER} on NPU (emulated): limited, prompts up to 480 tokens",
        f"{url}: {EMBEDDER} on GPU: failed, at noon: canary",
        f"{url}: {WRITER} on NPU: expired, the driver changed",
    ]
    assert main(["health", "--json"]) == 0
    [node] = json.loads(capsys.readouterr().out)
    assert node["faults"] == faults
    assert [engine["certified"] for engine in node["models"][0]["engines"]] == ["limited", "certified"]


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


def test_generate_takes_its_prompt_from_a_pipe_and_never_waits_for_a_terminal(node, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert main(["generate"]) == 0
    assert capsys.readouterr().out == "".join(ANSWER) + "\n"
    for terminal in (True, False):
        monkeypatch.setattr(sys, "stdin", io.StringIO("typed later" if terminal else " \n"))
        monkeypatch.setattr(sys.stdin, "isatty", lambda terminal=terminal: terminal)
        with pytest.raises(SystemExit, match="2"):
            main(["generate"])
        assert "a prompt is needed: as arguments, or on standard input" in capsys.readouterr().err


def test_the_dashboard_ends_on_sigterm_as_the_first_process_of_a_container(tmp_path):
    # The kernel drops signals without a handler that PID 1 gets from within its namespace.
    init = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*init, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no PID namespaces")
    script = 'mkfifo "$2"; { read -r said < "$2"; kill -TERM 1; } & exec "$1" -m backend_client dashboard > "$2"'
    command = [*init, "sh", "-c", script, "sh", sys.executable, tmp_path / "said"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_missing_key_or_a_wrong_one_is_named(monkeypatch, capsys, key):
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
        assert "check NPU_CLIENT_API_KEY" in capsys.readouterr().out
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
        (b"#" * 1_000_001, "is not a file of at most 1 MB"),
        (b"nodes = []\nx = = 3\n", "not valid TOML: Invalid value (at line 2, column 5)"),
        (b"nodes = '\xff'", "cannot be read: it is not UTF-8"),
    ],
)
def test_a_broken_settings_file_is_named_and_an_empty_variable_names_none(
    tmp_path, monkeypatch, capsys, content, message
):
    file = tmp_path / "client.toml"
    monkeypatch.setenv("NPU_CLIENT_CONFIG", "")
    assert ClientSettings.load().cloud is None
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


TEXTS = [f"text {index} ä" for index in range(300)]


async def test_embed_stream_fails_in_its_turn_and_cleans_up(scripted):
    scripted.respond = answering(
        lambda: error_response(400, "invalid_request") if TEXTS[150] in scripted.bodies[-1]["texts"] else None
    )
    async with NPUClient([scripted.url]) as client:
        stream = client.embed_stream(TEXTS)
        assert len((await anext(stream)).vectors) == 64
        assert len((await anext(stream)).vectors) == 64
        with pytest.raises(Exception, match="invalid"):
            await anext(stream)
        assert client.status()[0].in_flight == 0
