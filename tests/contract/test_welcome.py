"""What `serve` prints for people: addresses, a call that works, and the models with their state."""

import json
import re
import shlex
import sys
import urllib.request
from types import SimpleNamespace

import pytest

from tests.unit.worker_node.http.test_health import READY, node
from worker_node.cli.output import TOY_MODEL, TOY_NOTE, USEFUL_MODEL
from worker_node.cli.serve import announce_and_welcome, welcome
from worker_node.devices.probe import DeviceInfo, Probe
from worker_node.models.catalog import Catalog
from worker_node.settings import NodeSettings

URL = "http://127.0.0.1:8081"


def served(*, keys=(), found=("CPU",), emulated=False, places=None, error=None, installed=(), **models):
    made = node(**models)
    on_disk = [SimpleNamespace(id=name, kind="generation") for name in (*models, *installed)]
    made.manager.store = SimpleNamespace(installed=lambda: on_disk)
    for model in made.manager.models:
        model.installed.kind = "generation"
        for placement in model.placements:
            placement.emulated = False
    wanted = {"name": "a", "placements": places} if places else {"name": "a"}
    made.settings = NodeSettings(api_keys=keys, models=[wanted])
    made.probe = Probe(tuple(map(DeviceInfo, found)), "2026", error)
    made.npu = SimpleNamespace(emulated=emulated)
    return made


def printed(url, **options):
    return welcome(url, served(**options))


def test_a_node_with_keys_shows_where_the_key_goes_and_shows_no_key():
    text = printed(URL, keys=("secret-0123456789abcdef",), a=[READY])
    assert "-H 'Authorization: Bearer KEY'" in text
    assert "secret-0123456789abcdef" not in text


NO_NPU = "CPU; no NPU found, models run without it (see npu-node doctor)"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, NO_NPU),
        ({"places": ["NPU", "CPU"]}, NO_NPU),
        ({"places": ["CPU"]}, "CPU"),
        ({"found": ("CPU", "GPU", "NPU")}, "CPU, GPU, NPU"),
        ({"emulated": True}, "CPU; the NPU is emulated on the CPU"),
        ({"error": "listing the devices ended with status 1"}, "not known, listing the devices ended with status 1"),
    ],
)
def test_a_missing_npu_is_named_where_the_settings_leave_room_for_one(options, line):
    assert re.search("devices +(.*)", printed(URL, a=[READY], **options))[1] == line


TOY_ANSWERS = f"requests that name no model are answered by the toy {TOY_MODEL}"


@pytest.mark.parametrize(
    ("url", "models", "installed", "commands"),
    [
        (URL, [TOY_MODEL], [], [f"npu-node run {TOY_MODEL}", TOY_NOTE]),
        (URL, [TOY_MODEL], ["better"], ["npu-node run better", TOY_ANSWERS]),
        (URL, ["better", TOY_MODEL], ["another"], ["npu-node run better"]),
        (URL, [], ["better"], ["npu-node run better"]),
        (URL, [], [], [f"npu-node run {USEFUL_MODEL}"]),
        ("http://127.0.0.1:9", ["better"], [], ["NPU_NODE_URL=http://127.0.0.1:9 npu-node run better"]),
    ],
)
def test_what_next_ends_with_a_chat_and_a_model_that_is_more_than_a_toy(url, models, installed, commands):
    lines = printed(url, installed=installed, **{name: [READY] for name in models}).splitlines()
    assert [line.strip() for line in lines[-len(commands) :]] == commands
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize("terminal", [True, False])
def test_a_log_gets_two_lines_where_a_terminal_gets_the_block(terminal, monkeypatch, capsys, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    announce_and_welcome("http://0.0.0.0:8081", served(a=[READY]))
    out, err = capsys.readouterr()
    assert out == "listening on http://0.0.0.0:8081\n"
    assert ("what next" in err) == terminal
    lines = [f"devices: {NO_NPU}", f"next: open {URL}/play; npu-node run a"]
    assert caplog.messages == ([] if terminal else lines)


def test_models_that_only_a_request_loads_are_listed():
    text = printed(URL, installed=["b", "c"], a=[READY])
    assert re.search("models +a +ready on NPU\n +loaded when a request names them: b, c\n", text)
    assert "loaded when" not in printed(URL, a=[READY])


def test_the_model_that_is_recommended_suits_npu_and_cpu():
    toy, useful = map(Catalog.load().find, (TOY_MODEL, USEFUL_MODEL))
    assert (toy.kind, toy.embedded) == ("generation", True)
    assert (useful.kind, useful.quantization) == ("generation", "int4_sym")


def test_the_call_to_try_is_answered(node):
    command = shlex.split(re.search(r"curl .*", printed(node.url))[0])
    request = urllib.request.Request(command[1], command[command.index("-d") + 1].encode())  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as reply:  # noqa: S310
        assert len(json.load(reply)["embeddings"]) == 1
