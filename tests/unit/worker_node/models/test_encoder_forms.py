"""What encoders declare beside their weights: prompts and sizes."""

import json

import msgspec
import pytest

from worker_node.core.errors import ConfigurationError
from worker_node.models.catalog import Catalog
from worker_node.models.convert.embedding import matryoshka_of, prompts_of
from worker_node.models.convert.job import ConversionJob

pytestmark = pytest.mark.slow

JOB = ConversionJob(
    source="", target="", scratch="", id="m", format="safetensors", licence="", origin="", source_sha256={}
)


def write_sizes(directory, sizes):
    config = {"max_position_embeddings": 64, "matryoshka_dimensions": sizes}
    (directory / "config.json").write_text(json.dumps(config))


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
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text('{"include_prompt": false}')
    assert prompts_of(tmp_path, JOB) == {}, "its pooling leaves the prompt out"


def test_the_catalog_has_the_prompts_and_sizes_of_models_whose_files_declare_none(tmp_path):
    entries = [Catalog.load().find(name) for name in ("e5-small", "mxbai-embed-large")]
    e5, mxbai = (msgspec.structs.replace(JOB, entry=entry) for entry in entries)
    assert prompts_of(tmp_path, e5) == {"query": "query: ", "document": "passage: "}
    write_sizes(tmp_path, None)
    assert 512 in matryoshka_of(tmp_path, mxbai, 1024)


def test_sizes_are_those_below_the_models_own_in_order(tmp_path):
    write_sizes(tmp_path, [32, 24, 8, 64, 0])
    assert matryoshka_of(tmp_path, JOB, 32) == (8, 24)
    write_sizes(tmp_path, "some")
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        matryoshka_of(tmp_path, JOB, 32)
