"""What encoders declare beside their weights (prompts, sizes), and their int8 form."""

import json

import pytest

from tests.faults.engines.test_engine_faults import until
from worker_node.cli.models import facts_of_store, vector_fidelity_text
from worker_node.core.errors import BadRequest, ConversionFailed
from worker_node.devices.npu import npu_source
from worker_node.devices.probe import DeviceInfo, Probe
from worker_node.engines.protocol import EngineState
from worker_node.models.catalog import Catalog, Quantization
from worker_node.models.convert.compression import PROBE_SENTENCES
from worker_node.models.convert.encoder import matryoshka_of, prompts_of
from worker_node.models.convert.job import ConversionJob
from worker_node.models.directory import MANIFEST_FILE, EmbeddingCanary, read_embedding_canary, write_embedding_canary
from worker_node.models.store import ModelStore
from worker_node.serving.build import Machine, build_model
from worker_node.settings import ModelSettings, NodeSettings

pytestmark = pytest.mark.slow

JOB = ConversionJob(
    source="", target="", scratch="", id="m", format="safetensors", licence="", origin="", source_sha256={}
)
CARD = ConversionJob(
    **{name: getattr(JOB, name) for name in ("source", "target", "scratch", "id", "format", "licence", "origin")},
    source_sha256={},
    prompts={"query": "card: ", "document": ""},
    matryoshka=(16,),
)


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({"query": "query: ", "passage": "passage: "}, {"query": "query: ", "document": "passage: "}),
        ({"search_query": "q ", "search_document": "d "}, {"query": "q ", "document": "d "}),
        ({"query": "Instruct: "}, {"query": "Instruct: ", "document": ""}),
        ({"query": "", "document": ""}, {}),
        ({"clustering": "cluster: "}, {}),
        (None, {}),
    ],
)
def test_prompts_are_those_of_the_files(tmp_path, declared, expected):
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": declared}))
    assert prompts_of(tmp_path, JOB) == expected


def test_the_catalog_has_the_prompts_and_sizes_of_models_whose_files_declare_none(tmp_path):
    assert prompts_of(tmp_path, CARD) == CARD.prompts
    assert matryoshka_of(tmp_path, CARD, 32) == (16,)
    entry = Catalog.load().resolve("e5-small")
    assert entry.prompts == {"query": "query: ", "document": "passage: "}
    assert 512 in Catalog.load().resolve("mxbai-embed-large").matryoshka


def test_a_model_whose_pooling_leaves_the_prompt_out_has_none_here(tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text('{"include_prompt": false}')
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q: "}}')
    assert prompts_of(tmp_path, JOB) == {}


def test_sizes_are_those_below_the_models_own_in_order(tmp_path):
    (tmp_path / "config.json").write_text('{"matryoshka_dimensions": [32, 24, 8, 64, 0]}')
    assert matryoshka_of(tmp_path, JOB, 32) == (8, 24)
    (tmp_path / "config.json").write_text('{"matryoshka_dimensions": "some"}')
    with pytest.raises(ConversionFailed, match=r"config\.json"):
        matryoshka_of(tmp_path, JOB, 32)


# More than 5 s on a busy core: two conversions.
@pytest.mark.slow
def test_an_int8_form_has_a_space_of_its_own_and_tells_its_loss(in_process, store_root, make_bert):
    store, (directory, _) = ModelStore(), make_bert(matryoshka_dimensions=[8, 16])
    (directory / "config_sentence_transformers.json").write_text('{"prompts": {"query": "the "}}')
    exact = store.convert(directory, "exact")
    small = store.convert(directory, "small", quantization=Quantization.INT8_SYM)
    assert (exact.quantization, small.quantization) == ("f32", "int8_sym")
    assert exact.space != small.space
    assert exact.vector_fidelity is None
    loss = small.vector_fidelity
    assert 0.97 < loss.min_cosine <= loss.mean_cosine < 1.0
    assert loss.texts == len(PROBE_SENTENCES)
    assert json.loads((small.path / MANIFEST_FILE).read_text())["vector_fidelity"]["min_cosine"] == loss.min_cosine
    assert small.files["openvino_model.bin"] < 0.5 * exact.files["openvino_model.bin"]
    shown = facts_of_store("small")
    assert shown["fidelity"] == vector_fidelity_text(
        {"mean_cosine": loss.mean_cosine, "min_cosine": loss.min_cosine, "texts": loss.texts}
    )
    assert (shown["prompts"], shown["matryoshka"]) == (["document", "query"], ["8", "16"])
    assert small.prompts == {"query": "the ", "document": ""}


@pytest.mark.slow
async def test_an_int8_form_is_examined_by_vectors_of_its_own_on_each_device(
    in_process, store_root, make_bert, tmp_path
):
    # More than 5 s on a busy core: a conversion, and three engine processes.
    store, (directory, _) = ModelStore(), make_bert()
    small = store.convert(directory, "small", quantization=Quantization.INT8_SYM)
    known = read_embedding_canary(small.path)
    probe, settings = Probe((DeviceInfo("CPU"),), "test"), NodeSettings(compile_cache=tmp_path / "compiled")

    async def ended_up(device, state):
        with npu_source(None, emulated=True) as npu:
            # A CPU's own precision (bf16, quantized activations) is too coarse for a random network.
            exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
            wanted = ModelSettings(name="small", placements=[{"device": device, "plugin_config": exact}])
            [place] = build_model(store.get("small"), wanted, Machine(settings, probe, npu)).placements
            place.engine.wake()
            try:
                return await until(place.engine, state)
            finally:
                await place.engine.stop()

    for device in ("CPU", "NPU"):
        status = await ended_up(device, EngineState.READY)
        assert (status.proof is not None, status.wrong) == (True, 0), device
    wrong = tuple((*row[1:], row[0]) for row in known.vectors)
    write_embedding_canary(small.path, EmbeddingCanary(known.texts, wrong))
    assert "to the known vectors" in (await ended_up("CPU", EngineState.QUARANTINED)).reason


def test_an_int8_form_of_the_catalogs_encoder_is_installed_beside_it():
    spec = ModelStore().pull_spec("all-minilm", quantization=Quantization.INT8_SYM)
    assert spec.model_id == "all-minilm-l6-v2-int8_sym"
    with pytest.raises(BadRequest, match="choice"):
        ModelStore().pull_spec("all-minilm", quantization=Quantization.INT4_SYM)
