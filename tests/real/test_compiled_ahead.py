"""`npu-node compile` and the blobs that it makes, on the emulated NPU: the same answers, and no use of foreign blobs.

On two of the model's layers: what is written and read does not depend on their number.
"""

import os
import re
import select
import shutil
import sys
import tomllib
from pathlib import Path

import msgspec
import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from tests.real.inference import ask
from tests.support.nodes import run_node_command, start_node
from worker_node.cli.main import main
from worker_node.core.types import Device
from worker_node.devices.blobs import RECORD_FILE, BlobRejected, read_record, write_record
from worker_node.devices.npu import stand_in_counter
from worker_node.encoders.jobs import RowJob, RowResult
from worker_node.encoders.static import StaticEncoder
from worker_node.engines.protocol import EngineSpec
from worker_node.tasks.generate.messages import GenerateJob, Sampling, Step
from worker_node.tasks.generate.stateful import StatefulRunner

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

FAR = 1e12
WRITER, EMBEDDER = "smollm2-135m-instruct", "all-minilm-l6-v2"
LENGTHS = {"max_prompt_len": 64, "min_response_len": 64, "prefill_chunk_size": 64}
PROMPT = np.arange(100, 120, dtype="<i4").tobytes()


@pytest.fixture(scope="module")
def blobs(quick_models, tmp_path_factory):
    """A directory with the blobs of the generation model, compiled by the command with the lengths of a node.toml."""
    root = tmp_path_factory.mktemp("ahead")
    config = root / "node.toml"
    config.write_text(
        f'[[models]]\nname = "{WRITER}"\nplacements = ["NPU", "CPU"]\nmax_prompt_len = 64\n'
        "min_response_len = 64\nprefill_chunk_size = 64\n"
    )
    environment = os.environ | quick_models | {"NPU_NODE_NPU_EMULATION": "1"}
    arguments = ["compile", WRITER, "--config", config, "--out", root / "blobs"]
    done = run_node_command(arguments, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    assert tomllib.loads(done.stdout.rpartition("set ")[2].partition(" for")[0]) == {"blobs": str(root / "blobs")}
    assert sorted(path.name for path in root.iterdir()) == ["blobs", "node.toml"], "nothing else is left"
    return root / "blobs"


class Engine:
    """A runner of an emulated NPU in this process, not yet loaded."""

    def __init__(self, runner, path, **options):
        self.counter = stand_in_counter()
        own = {"busy_counter": str(self.counter.__enter__()), "stand_in": True}
        self.runner = runner(EngineSpec("model", "a kind", str(path), Device.NPU, "", own | options, emulated=True))

    def loaded(self):
        loaded = self.runner.load()
        self.shapes = (loaded.compiled, loaded.imported)
        return self

    def run(self, job):
        events = []
        self.runner.submit(job)
        while self.runner.has_work or self.runner.stats().running:
            if not self.runner.has_work:
                assert select.select([self.runner.wake_fd], [], [], 30)[0], "the device never finished"
            self.runner.step(events.append, lambda: None)
        return events


@pytest.fixture(scope="module")
def writer(quick_models):
    return Path(quick_models["NPU_NODE_MODEL_STORE"]) / WRITER


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A graph with an encoder's inputs and output: the mean of random vectors of the tokens."""
    directory = tmp_path_factory.mktemp("encoder")
    ids, mask = (op.parameter([-1, -1], np.int64, name=name) for name in ("input_ids", "attention_mask"))
    for each in (ids, mask):
        each.output(0).set_names({each.get_friendly_name()})
    table = np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)
    rows = op.gather(op.constant(table), ids, op.constant(np.int64(0)))
    weights = op.unsqueeze(op.convert(mask, "f32"), op.constant(np.int64(2)))
    mean = op.reduce_mean(op.multiply(rows, weights), op.constant(np.int64(1)))
    mean.output(0).set_names({"embedding"})
    ov.save_model(ov.Model([op.result(mean)], [ids, mask], "encoder"), directory / "openvino_model.xml")
    return directory


def generated(engine):
    events = engine.run(GenerateJob(1, PROMPT, 8, FAR, Sampling(ignore_eos=True)))
    return [token for event in events if isinstance(event, Step) for delta in event.deltas for token in delta.tokens]


def embedded(engine):
    (outcome,) = [e for e in engine.run(RowJob(1, PROMPT, [20], FAR)) if isinstance(e, RowResult)]
    return np.frombuffer(outcome.data, "<f4")


def test_generation_from_blobs_is_that_of_the_compiled_model(writer, blobs):
    compiled = Engine(StatefulRunner, writer, **LENGTHS).loaded()
    imported = Engine(StatefulRunner, writer, **LENGTHS, blobs=str(blobs)).loaded()
    answer = generated(imported)
    assert len(answer) == 8
    assert answer == generated(compiled)
    assert (compiled.shapes, imported.shapes) == ((1, 0), (0, 1))
    for engine in (compiled, imported):
        engine.runner.close()


def test_vectors_from_blobs_are_those_of_the_compiled_model(encoder, tmp_path):
    options = {"npu_buckets": [16, 32], "npu_batch_size": 2}
    compiled = Engine(StaticEncoder, encoder, **options, export_blobs=str(tmp_path)).loaded()
    vector = embedded(compiled)
    compiled.runner.close()
    imported = Engine(StaticEncoder, encoder, **options, blobs=str(tmp_path)).loaded()
    assert np.array_equal(embedded(imported), vector)
    assert (compiled.shapes, imported.shapes) == ((2, 0), (0, 2))
    imported.runner.close()
    # Another of the shapes under the name of this one: OpenVINO would take it and fail at the first text.
    (tmp_path / "32-tokens.blob").write_bytes((tmp_path / "16-tokens.blob").read_bytes())
    write_record(tmp_path, "small", read_record(tmp_path).origin, ["16-tokens.blob", "32-tokens.blob"])
    with pytest.raises(BlobRejected, match=r"32-tokens\.blob takes inputs of the shapes"):
        Engine(StaticEncoder, encoder, **options, blobs=str(tmp_path)).loaded()


FORGERIES = {
    "cut": lambda content: content[: len(content) // 2],
    "garbage": lambda _: bytes(range(256)) * 4,
    "empty": lambda _: b"",
    "a header of very much of everything": lambda content: content[:64] + b"\xff" * 136 + content[200:],
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_hostile_blob_whose_record_fits_fails_to_load_with_its_name(writer, blobs, tmp_path, forge):
    (tmp_path / "generate.blob").write_bytes(forge((blobs / "generate.blob").read_bytes()))
    write_record(tmp_path, "small", read_record(blobs).origin, ["generate.blob"])
    options = LENGTHS | {"blobs": str(tmp_path)}
    with pytest.raises(BlobRejected, match=r"generate\.blob"):
        Engine(StatefulRunner, writer, **options).loaded()


async def test_a_node_serves_from_its_blobs_and_passes_over_a_device_whose_blobs_are_foreign(
    quick_models, blobs, tmp_path, http
):
    # More than 5 s: a node with two engines.
    foreign = tmp_path / "foreign"
    shutil.copytree(blobs, foreign)
    record = read_record(foreign)
    origin = record.origin | {"openvino": "2025.1.0"}
    (foreign / RECORD_FILE).write_bytes(msgspec.json.encode(msgspec.structs.replace(record, origin=origin)))
    config = tmp_path / "node.toml"
    config.write_text(f"""
[[models]]
name = "{WRITER}"
placements = ["NPU"]
max_prompt_len = 64
min_response_len = 64
prefill_chunk_size = 64
blobs = "{blobs}"

[[models]]
name = "{EMBEDDER}"
placements = ["NPU", "CPU"]
blobs = "{foreign}"
""")
    cache = tmp_path / "compiled"
    environment = {"NPU_NODE_NPU_EMULATION": "1", "NPU_NODE_COMPILE_CACHE": str(cache)} | quick_models
    with start_node("--config", str(config), ready=False, **environment) as node:
        node.wait_for(lambda body: all(model["state"] in {"ready", "degraded"} for model in body["models"]))
        _, answer = await ask(http, node, {"prompt": "Hello", "max_new_tokens": 2})
        assert (answer["device"], answer["emulated"]) == ("NPU", True)
        headers, _ = await ask(http, node, {"model": EMBEDDER, "input": "Hello"}, path="/v1/embeddings")
        assert (headers["X-NPU-Node-Device"], headers["X-NPU-Node-Route-Reason"]) == ("CPU", "device_unavailable")
        _, body = node.health()
        async with http.get(node.url + "/metrics") as reply:
            metrics = await reply.text()
    found = re.findall(r'npu_node_loaded_shapes_total\{device="NPU",model="(.*?)",origin="(\w+)"\} (\d+)', metrics)
    assert {(model, origin): int(count) for model, origin, count in found} == {
        (WRITER, "imported"): 1,
        (WRITER, "compiled"): 0,
        (EMBEDDER, "imported"): 0,
        (EMBEDDER, "compiled"): 0,
    }
    (reason,) = [
        engine["reason"]
        for model in body["models"]
        for engine in model["engines"]
        if engine["device"] == "NPU" and engine["state"] == "failed"
    ]
    assert str(foreign) in reason
    assert f"compiled for something else ({WRITER})" in reason
    assert "openvino was 2025.1.0" in reason
    assert not list(cache.glob(f"{WRITER}/*/*.blob")), "nothing was compiled"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((WRITER, "--device", "CPU", "--out", "x"), "invalid choice: 'CPU'"),
        (("no-such-model", "--out", "x"), "npu-node pull no-such-model"),
        ((WRITER, "--out", Path(__file__).parent), "holds other files"),
        ((WRITER, "--platform", "4000", "--out", "x"), "unset NPU_NODE_NPU_EMULATION"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_anything_is_loaded(
    quick_models, monkeypatch, capsys, tmp_path, arguments, reason
):
    for name, value in (quick_models | {"NPU_NODE_NPU_EMULATION": "1"}).items():
        monkeypatch.setenv(name, value)
    words = [str(tmp_path / "x" if each == "x" else each) for each in arguments]
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["compile", *words]))
    assert ended.value.code
    assert reason in capsys.readouterr().err


def test_another_machines_npu_needs_a_compiler_here(quick_models, tmp_path):
    """OpenVINO's wheel for Linux has none."""
    environment = {name: value for name, value in os.environ.items() if name != "NPU_NODE_NPU_EMULATION"}
    arguments = ["compile", WRITER, "--platform", "4000", "--out", tmp_path / "x"]
    done = run_node_command(arguments, env=environment | quick_models, timeout=100)
    assert done.returncode
    assert done.stderr.count("no NPU compiler on this machine") == 1
    assert not (tmp_path / "x").exists()
