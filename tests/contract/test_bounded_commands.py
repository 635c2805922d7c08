"""The commands of the bounded jobs as a black box: run, smoke, and a service that cannot start."""

import json

import pytest

from tests.contract.sidecar import run_command, start_sidecar
from tests.contract.test_bounded_jobs import CANARY, KEYS

pytestmark = [pytest.mark.real, pytest.mark.timeout(600), pytest.mark.usefixtures("store")]


def test_a_model_that_is_missing_is_503_and_says_so(tmp_path):
    with start_sidecar(tmp_path, OV_GENAI_NPU_MODEL=str(tmp_path / "nothing")) as sidecar:
        status, body = sidecar.health()
        assert (status, body["ok"], body["loaded"]) == (503, False, False)
        status, reply = sidecar.generate()
        assert (status, list(reply)) == (503, ["error"])
        assert "OV_GENAI_NPU_MODEL" in reply["error"]


def test_run_prints_json_of_its_form_and_the_proof_and_exits_0(quick_models):
    # More than 5 s: the model is loaded for the emulated NPU, and its answer is long enough to be closed.
    text = "Disk /dev/sda1 is 97 % full on host web-3."
    wanted = ("--job", "notification", "--input", "-", "--max-new-tokens", "64")
    done = run_command("run", *wanted, stdin=text, **quick_models)
    assert done.returncode == 0, done.stderr
    reply = json.loads(done.stdout)
    assert set(reply) - {"npu_busy_exclusive"} == KEYS
    assert reply["npu_busy_delta_us"] > 0
    assert text not in done.stderr
    value = reply["json"]
    assert value == json.loads(reply["text"])
    assert list(value) == ["severity", "category", "summary", "action_needed"]
    assert value["severity"] in {"info", "warning", "critical"}
    assert isinstance(value["action_needed"], bool)
    assert value["category"]
    assert value["summary"]


def test_run_fails_without_proof(tmp_path, quick_models):
    (tmp_path / "npu_busy_time_us").write_text("7\n")
    still = run_command(
        "run",
        "--job",
        "title",
        "--input",
        CANARY,
        "--max-new-tokens",
        "2",
        NPU_NODE_NPU_SYSFS=str(tmp_path),
        **quick_models,
    )
    assert still.returncode == 1
    assert json.loads(still.stdout)["npu_busy_delta_us"] == 0
    assert "did not move" in still.stderr
    assert CANARY not in still.stderr


def test_smoke_records_the_proof_without_the_prompt(tmp_path, quick_models):
    done = run_command("smoke", "--prompt", f"Who is {CANARY}?", "--max-new-tokens", "3", "--json", **quick_models)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["verdict"], record["emulated"]) == ("pass", True)
    assert record["prompt_characters"] == len(f"Who is {CANARY}?")
    assert record["max_new_tokens"] == 3
    assert record["npu_busy_delta_us"] == record["npu_busy_after_us"] - record["npu_busy_before_us"] > 0
    assert record["load_ms"] > 0
    assert record["generate_ms"] > 0
    assert record["openvino_genai"]
    assert CANARY not in done.stdout + done.stderr
    unreadable = run_command("smoke", NPU_NODE_NPU_SYSFS=str(tmp_path))
    assert unreadable.returncode == 1
    assert "busy counter cannot be read" in unreadable.stderr
