"""`npu-node doctor` on this machine: the node of the settings, and the file that they are read from."""

import json
import os
import re
import socket
from pathlib import Path

import pytest

from tests.support.nodes import run_node_command
from worker_node.cli.main import main
from worker_node.settings import reading

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def doctor(monkeypatch, capsys):
    """Runs it; gives its exit status and its findings: severity and text by id, the last of an id."""

    def run(*arguments, **environment):
        with monkeypatch.context() as patch:
            # The suite's own store would count for more than that of a file of settings.
            patch.delenv("NPU_NODE_MODEL_STORE", raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            status = main(["doctor", "--json", *arguments])
        findings = json.loads(capsys.readouterr().out)["findings"]
        assert all(finding["fix"] for finding in findings if finding["severity"] != "ok")
        return status, {finding["id"]: (finding["severity"], finding["found"]) for finding in findings}

    return run


def test_a_node_that_serves_on_the_cpu_is_healthy_and_one_that_must_have_an_npu_is_not(doctor, node, quick_models):
    port = node.url.rpartition(":")[2]
    status, found = doctor(**quick_models, NPU_NODE_PORT=port)
    assert status == 0
    assert {found[check][0] for check in ("cpu", "settings", "model-store", "model-files", "port")} == {"ok"}
    assert found["port"][1] == f"a node answers on port {port}"
    status, required = doctor("--require", "npu", **quick_models, NPU_NODE_PORT=port)
    assert status == any(severity == "error" for severity, _ in required.values())
    assert {check for check, (severity, _) in required.items() if severity == "error"} == {
        check for check, (severity, _) in found.items() if severity == "warning" and check != "kernel-log"
    }


def test_what_keeps_the_configured_node_from_serving_is_an_error(doctor, tmp_path):
    key, config = tmp_path / "key.pem", tmp_path / "node.toml"
    key.write_text("a key")
    key.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config.write_text(
            f'port = {port}\nmodel_store = "{tmp_path}"\ntls_cert = "{key}"\n[[models]]\nname = "smollm2"'
        )
        status, found = doctor("--config", str(config))
    assert status == 1
    assert found["settings"] == ("ok", str(config))
    assert found["model-files"] == ("error", f"smollm2 is not installed in {tmp_path}")
    assert found["key-files"] == ("warning", f"{key} may be read or written by every user")
    assert found["port"] == ("error", f"127.0.0.1, port {port} cannot be bound: Address already in use")


def test_a_model_that_a_newer_openvino_wrote_is_an_error(doctor, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "openvino_model.xml").write_text('<rt_info><Runtime_version value="2099.1.0-1-abc" /></rt_info>')
    config = tmp_path / "node.toml"
    config.write_text(f'port = 0\nmodel_store = "{tmp_path}"\n[[models]]\nname = "m"\npath = "{model}"')
    severity, found = doctor("--config", str(config))[1]["model-files"]
    assert severity == "error"
    assert found.startswith(f"{model / 'openvino_model.xml'} was written by OpenVINO 2099.1.0, and this node runs 20")


def test_the_memory_of_a_window_and_the_longest_prompt_are_told(doctor, tmp_path, quick_models):
    config = tmp_path / "node.toml"

    def memory(lines, **environment):
        config.write_text(f'[[models]]\nname = "smollm2-135m-instruct"\nplacements = ["NPU"]\n{lines}')
        status, found = doctor("--config", str(config), **quick_models, NPU_NODE_NPU_EMULATION="1", **environment)
        return status, *found["model-memory"]

    def taken(found):
        return float(re.search(r"takes about ([\d.]+) GB", found)[1])

    _, severity, short = memory("")
    assert severity == "ok"
    assert short.endswith("with prompts of up to 1024 tokens")
    _, _, long = memory('max_prompt_len = 8000\nprefill_attention_hint = "STATIC"')
    assert taken(long) > taken(short) + 1
    assert long.endswith("with prompts of up to 1800 tokens")
    _, severity, much = memory("max_prompt_len = 8000", NPU_NODE_MEMORY_BUDGET="300MB")
    assert severity == "warning"
    assert much.endswith("engines may take 0.3 GB")
    status, severity, wrong = memory("max_prompt_len = 9000")
    assert (status, severity) == (1, "error")
    assert "max_prompt_len is 9000, the model's context 8192 tokens" in wrong


def test_a_node_for_others_may_have_its_keys_from_its_unit(doctor, tmp_path, quick_models):
    config = tmp_path / "node.toml"
    config.write_text('host = "0.0.0.0"\nport = 0\n[[models]]\nname = "all-minilm-l6-v2"')
    status, found = doctor(**quick_models, NPU_NODE_CONFIG=str(config))
    assert status == 0
    assert found["api-keys"][0] == "warning"
    assert "api-keys" not in doctor(**quick_models, NPU_NODE_CONFIG=str(config), NPU_NODE_API_KEYS="k" * 16)[1]


def test_the_file_is_that_of_the_flag_then_the_variable_then_the_user_then_the_machine(tmp_path, monkeypatch):
    own, machine = tmp_path / ".config" / "npu-node" / "node.toml", tmp_path / "machine.toml"
    monkeypatch.setattr(reading, "SYSTEM_FILE", machine)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert reading.find_file(tmp_path / "given") == tmp_path / "given"
    assert reading.find_file(None) is None, "the suite sets the variable to nothing"
    monkeypatch.setenv("NPU_NODE_CONFIG", "named.toml")
    assert str(reading.find_file(None)) == "named.toml"
    monkeypatch.delenv("NPU_NODE_CONFIG")
    assert reading.find_file(None) is None
    machine.write_text("")
    assert reading.find_file(None) == machine
    own.parent.mkdir(parents=True)
    own.write_text("port = 1\nprot = 2")
    assert reading.find_file(None) == own
    environment = {name: value for name, value in os.environ.items() if name != "NPU_NODE_CONFIG"}
    refused = run_node_command(["serve"], env=environment, timeout=60)
    assert (refused.returncode, f"{own}: prot: unknown key" in refused.stderr) == (1, True)
    assert "Traceback" not in refused.stderr


def test_the_file_of_the_machine_is_examined_with_the_store_of_its_unit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reading, "SYSTEM_FILE", tmp_path / "node.toml")
    monkeypatch.setattr(reading, "SYSTEM_STORE", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("NPU_NODE_CONFIG", "NPU_NODE_MODEL_STORE", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "node.toml").touch()
    assert main(["doctor", "--json"]) == 1
    assert f'is not installed in {tmp_path}"' in capsys.readouterr().out


@pytest.mark.parametrize("named", [True, False])
def test_commands_without_a_node_work_on_the_store_of_its_settings(tmp_path, monkeypatch, capsys, quick_models, named):
    """Though the keys of its service are closed to this user, or in the environment of its unit."""
    store = Path(quick_models["NPU_NODE_MODEL_STORE"])
    monkeypatch.setattr(reading, "SYSTEM_FILE", tmp_path / "node.toml")
    monkeypatch.setattr(reading, "SYSTEM_STORE", tmp_path if named else store)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NPU_NODE_URL", "none")
    for name in ("NPU_NODE_CONFIG", "NPU_NODE_MODEL_STORE", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    keys = f'host = "0.0.0.0"\napi_keys_file = "{tmp_path}/gone"\n'
    (tmp_path / "node.toml").write_text(keys + named * f'model_store = "{store}"')
    for command in ("list", "list --all", "show smollm2", "pull smollm2"):
        assert main(command.split()) == 0
        assert re.search(rf" installed|{store}", capsys.readouterr().out), command
    (tmp_path / "node.toml").write_text(f'model_store = "{tmp_path}"')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "npu-node.json").touch()
    assert main(["rm", "broken"]) == 0
