"""The commands of the bounded jobs as a black box: run, smoke, and a service that cannot start."""

import io
import json

import pytest

from tests.contract.sidecar import start_sidecar
from tests.contract.test_bounded_jobs import CANARY, KEYS
from worker_node.cli.main import main

pytestmark = [pytest.mark.real, pytest.mark.timeout(600), pytest.mark.usefixtures("store")]


@pytest.fixture
def command(monkeypatch, capfd, tmp_path):
    """Runs `npu-node …` with the emulated NPU, which it shares with nobody; gives its status and what it printed."""

    def run(*arguments, stdin="", **environment):
        own = {"NPU_NODE_NPU_EMULATION": "1", "OV_GENAI_NPU_LOCK": str(tmp_path / "lock")}
        with monkeypatch.context() as patch:
            for name, value in (own | environment).items():
                patch.setenv(name, value)
            patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
            status = main(arguments)
        return status, *capfd.readouterr()

    return run


def test_a_model_that_is_missing_is_503_and_says_so(tmp_path):
    with start_sidecar(tmp_path, OV_GENAI_NPU_MODEL=str(tmp_path / "nothing")) as sidecar:
        status, body = sidecar.health()
        assert (status, body["ok"], body["loaded"]) == (503, False, False)
        status, reply = sidecar.generate()
        assert (status, list(reply)) == (503, ["error"])
        assert "OV_GENAI_NPU_MODEL" in reply["error"]


def test_run_prints_json_of_its_form_and_the_proof_and_exits_0(command, quick_models):
    # More than 5 s: the model is loaded for the emulated NPU, and its answer is long enough to be closed.
    text = "Disk /dev/sda1 is 97 % full on host web-3."
    wanted = ("--job", "notification", "--input", "-", "--max-new-tokens", "64")
    status, out, err = command("run", *wanted, stdin=text, **quick_models)
    assert status == 0, err
    reply = json.loads(out)
    assert set(reply) - {"npu_busy_exclusive"} == KEYS
    assert reply["npu_busy_delta_us"] > 0
    assert text not in err
    value = reply["json"]
    assert value == json.loads(reply["text"])
    assert list(value) == ["severity", "category", "summary", "action_needed"]
    assert value["severity"] in {"info", "warning", "critical"}
    assert isinstance(value["action_needed"], bool)
    assert value["category"]
    assert value["summary"]


def test_run_fails_without_proof(command, tmp_path, quick_models):
    (tmp_path / "npu_busy_time_us").write_text("7\n")
    wanted = ("--job", "title", "--input", CANARY, "--max-new-tokens", "2")
    status, out, err = command("run", *wanted, NPU_NODE_NPU_SYSFS=str(tmp_path), **quick_models)
    assert (status, json.loads(out)["npu_busy_delta_us"]) == (1, 0)
    assert "did not move" in err
    assert CANARY not in err


def test_smoke_records_the_proof_without_the_prompt(command, tmp_path, quick_models):
    wanted = ("--prompt", f"Who is {CANARY}?", "--max-new-tokens", "3", "--json")
    status, out, err = command("smoke", *wanted, **quick_models)
    assert status == 0, err
    record = json.loads(out)
    assert (record["verdict"], record["emulated"]) == ("pass", True)
    assert record["prompt_characters"] == len(f"Who is {CANARY}?")
    assert record["max_new_tokens"] == 3
    assert record["npu_busy_delta_us"] == record["npu_busy_after_us"] - record["npu_busy_before_us"] > 0
    assert record["load_ms"] > 0
    assert record["generate_ms"] > 0
    assert record["openvino_genai"]
    assert CANARY not in out + err
    status, _, err = command("smoke", NPU_NODE_NPU_SYSFS=str(tmp_path))
    assert status == 1
    assert "busy counter cannot be read" in err
