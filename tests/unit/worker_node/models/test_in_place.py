"""Directories that are served where they are: what is read and made of them; they themselves never change."""

import re
import shutil

import numpy as np
import openvino as ov
import pytest

from tests.support.published import install
from tests.support.tiny_encoder import embed
from tests.unit.worker_node.models.tiny_decoder import TinyDecoder
from worker_node.core.errors import ConfigurationError
from worker_node.core.types import ModelKind
from worker_node.models.store import ModelStore, open_directory

pytestmark = pytest.mark.slow


def state(directory):
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in [directory, *directory.rglob("*")]}


@pytest.fixture
def opened(tmp_path):
    """Opens a directory and checks that nothing in it has changed."""

    def open_it(directory, name="mine", **options):
        before = state(directory)
        try:
            return open_directory(directory, name, tmp_path / "prepared", **options)
        finally:
            assert state(directory) == before

    return open_it


def test_a_sentence_transformers_directory_is_served_as_the_store_would(in_process, store_root, make_bert, opened):
    directory, _ = make_bert()
    installed, found = install(ModelStore(), directory, "stored"), opened(directory)
    assert (found.id, found.kind, found.context_limit) == ("mine", ModelKind.EMBEDDING, 48)
    assert (found.space, found.canary) == (installed.space, installed.canary)
    assert found.source == f"directory {directory}"
    assert directory not in found.path.parents


def test_it_is_prepared_once_and_again_when_a_file_or_an_option_changes(in_process, make_bert, opened):
    directory, _ = make_bert()
    first = opened(directory)
    made = state(first.path)
    assert opened(directory).path == first.path
    assert state(first.path) == made
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    again = opened(directory)
    assert (again.context_limit, again.path == first.path, first.path.exists()) == (16, False, False)
    other = opened(directory, "other")
    assert again.path.exists()
    assert other.path != again.path


def test_pooling_counts_where_the_files_do_not_specify_it(in_process, make_bert, opened):
    """As a plain BertModel is published."""
    plain, _ = make_bert("plain")
    for name in ("modules.json", "sentence_bert_config.json"):
        (plain / name).unlink()
    shutil.rmtree(plain / "1_Pooling")
    (plain / "tokenizer_config.json").write_text('{"model_max_length": 32}')
    with pytest.raises(ConfigurationError, match=r'plain: no modules.json .* set pooling = "mean" or "cls"'):
        opened(plain)
    reference = opened(make_bert("published", pooling="cls_token")[0], "published")
    found = opened(plain, "found", pooling="cls")
    assert found.context_limit == 32
    np.testing.assert_allclose(embed(found, "the cats"), embed(reference, "the cats"), atol=1e-6)
    raw = embed(opened(plain, pooling="cls", normalize=False), "the cats")
    assert np.linalg.norm(raw) != pytest.approx(1, abs=1e-3)
    np.testing.assert_allclose(raw / np.linalg.norm(raw), embed(found, "the cats"), atol=1e-6)


@pytest.mark.parametrize("options", [{"pooling": "cls"}, {"normalize": False}])
def test_an_option_that_contradicts_the_files_is_refused(in_process, make_bert, opened, options):
    with pytest.raises(ConfigurationError, match=r"modules.json: vectors are mean, normalised by these files"):
        opened(make_bert()[0], **options)
    opened(make_bert("same")[0], pooling="mean", normalize=True)


def test_newer_names_of_poolings_are_known(in_process, make_bert, opened):
    directory, _ = make_bert()
    (directory / "1_Pooling/config.json").write_text('{"embedding_dimension": 32, "pooling_mode": "mean"}')
    assert opened(directory).space == opened(make_bert("older")[0], "older").space


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "modules.json", "1_Pooling/config.json", "model.safetensors"]
)
def test_a_broken_file_of_an_encoder_is_named(in_process, make_bert, opened, tmp_path, name):
    directory, _ = make_bert()
    (directory / name).write_bytes(b"\x00{broken")
    with pytest.raises(ConfigurationError, match=re.escape(str(directory / name))):
        opened(directory)
    assert not list((tmp_path / "prepared").glob("mine-*"))


def test_a_manifest_is_read_where_it_is(in_process, store_root, make_bert, opened):
    installed = install(ModelStore(), make_bert()[0], "stored")
    found = opened(installed.path, "renamed")
    assert (found.id, found.path, found.space) == ("renamed", installed.path, installed.space)
    with pytest.raises(ConfigurationError, match="has its own pooling"):
        opened(installed.path, pooling="cls")


def test_what_is_no_model_and_a_place_that_cannot_be_written_are_told(in_process, make_bert, opened, tmp_path):
    with pytest.raises(ConfigurationError, match="nowhere is not a directory"):
        open_directory(tmp_path / "nowhere", "mine", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=r"empty: holds neither openvino_model.xml nor model.safetensors"):
        opened(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"prepared cannot be written .* set compile_cache"):
        open_directory(make_bert()[0], "mine", tmp_path / "file/prepared")


@pytest.mark.parametrize("modules", [True, False], ids=["modules.json", "pooling in node.toml"])
def test_a_decoder_embeds_by_its_last_token_beside_longer_texts_too(in_process, opened, tmp_path, modules):
    decoder = TinyDecoder()
    directory = decoder.write(tmp_path / "decoder", modules=modules)
    model = opened(directory, **({} if modules else {"pooling": "last"}))
    assert (model.kind, model.family, model.context_limit, model.dimensions) == (ModelKind.EMBEDDING, "qwen3", 64, 8)
    graph = ov.compile_model(model.path / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    assert {port.any_name for port in graph.inputs} == {"input_ids", "attention_mask"}
    rows = [[2, 5, 9, 3], [2, 7, 3], [2, 3]]
    ids = np.array([row + [0] * (6 - len(row)) for row in rows], dtype=np.int64)
    mask = (ids > 0).astype(np.int64)
    vectors = graph({"input_ids": ids, "attention_mask": mask})["embedding"]
    np.testing.assert_allclose(vectors, [decoder.last(row) for row in rows], atol=1e-5)
