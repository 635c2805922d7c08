"""What encoders declare beside their weights (prompts, sizes), and their int8 form."""

import json

import pytest

from worker_node.commands.show import _of_store, _vector_fidelity
from worker_node.errors import BadRequest, ConversionFailed
from worker_node.models.catalog import Catalog, Quantization
from worker_node.models.conversion.fidelity import PROBE_SENTENCES
from worker_node.models.conversion.job import ConversionJob
from worker_node.models.conversion.sentence_prompts import matryoshka_of, prompts_of
from worker_node.models.manifest import MANIFEST_FILE
from worker_node.models.store import ModelStore

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
    shown = _of_store("small")
    assert shown["fidelity"] == _vector_fidelity(
        {"mean_cosine": loss.mean_cosine, "min_cosine": loss.min_cosine, "texts": loss.texts}
    )
    assert (shown["prompts"], shown["matryoshka"]) == (["document", "query"], ["8", "16"])
    assert small.prompts == {"query": "the ", "document": ""}


def test_an_int8_form_of_the_catalogs_encoder_is_installed_beside_it():
    wish = ModelStore().wish("all-minilm", quantization=Quantization.INT8_SYM)
    assert wish.model_id == "all-minilm-l6-v2-int8_sym"
    with pytest.raises(BadRequest, match="choice"):
        ModelStore().wish("all-minilm", quantization=Quantization.INT4_SYM)
