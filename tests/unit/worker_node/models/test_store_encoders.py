"""Encoders come into the store from safetensors and from OpenVINO exports, with their references and their space."""

import json
import os
import re
import shutil

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op
from tokenizers import Tokenizer

from tests.support.cross_encoders import write_tiny
from tests.support.published import install
from tests.support.tiny_encoder import WORDS, embed
from worker_node.core.errors import BadRequest, ConfigurationError, ConversionFailed, ModelNotFound
from worker_node.core.types import ModelKind
from worker_node.models.catalog import Quantization
from worker_node.models.directory import CANARY_TEXTS
from worker_node.models.store import ModelStore

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_process")]


def test_an_encoder_is_installed_with_all_that_a_node_needs(store_root, make_bert):
    directory, _ = make_bert()
    store = ModelStore()
    model = install(store, directory, "Tiny")
    assert (model.id, model.kind, model.dimensions, model.context_limit) == ("tiny", ModelKind.EMBEDDING, 32, 48)
    assert store.get("TINY:latest") == model
    assert store.installed() == [model]
    assert model.canary.texts == CANARY_TEXTS
    for text, vector in zip(model.canary.texts, model.canary.vectors, strict=True):
        np.testing.assert_allclose(embed(model, text), vector, atol=1e-6)
    assert set(model.source_sha256) == {"model.safetensors", "config.json", "tokenizer.json", "modules.json"}
    assert {path.name for path in store_root.iterdir()} == {"tiny", ".locks"}


def test_the_space_is_another_when_weights_pooling_normalisation_or_tokenizer_are(store_root, make_bert):
    store = ModelStore()
    variants = {
        "same-a": {},
        "same-b": {},
        "weights": {"seed": 1},
        "pooling": {"pooling": "cls_token"},
        "raw": {"normalise": False},
    }
    spaces = {name: install(store, make_bert(name, **options)[0], name).space for name, options in variants.items()}
    directory, _ = make_bert("words")
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    spaces["words"] = install(store, directory, "words").space
    assert spaces["same-a"] == spaces["same-b"]
    assert len(set(spaces.values())) == 5
    assert all(len(space) >= 16 for space in spaces.values())


def test_the_space_of_an_installed_model_is_that_of_its_content_now(store_root, make_bert):
    store = ModelStore()
    made = install(store, make_bert()[0], "tiny")
    weights, tokenizer = made.path / "openvino_model.bin", made.path / "tokenizer.json"
    shutil.copyfile(weights, weights.with_suffix(".new"))
    weights.with_suffix(".new").replace(weights)
    assert store.get("tiny").space == made.space, "another file with the same content"
    kept = weights.read_bytes()
    spaces = {made.space}
    for file, old, new in ((weights, kept[-4:], b"\1\2\3\4"), (tokenizer, b'"lowercase":true', b'"lowercase":null')):
        content = file.read_bytes()
        file.write_bytes(new.join(content.rsplit(old, 1)))
        os.utime(file, (0, 0))
        spaces.add(store.get("tiny").space)
        file.write_bytes(content)
    assert len(spaces) == 3
    assert store.get("tiny").space == made.space


def export(directory, target, *, output="last_hidden_state", token_types=True, extra_input=None):
    """What optimum makes of an encoder: hidden states, and token types as a third input."""
    hidden = np.random.default_rng(0).standard_normal((len(WORDS), 32)).astype(np.float32)
    names = ["input_ids", "attention_mask", *["token_type_ids"] * token_types, *[extra_input] * bool(extra_input)]
    inputs = [op.parameter([-1, -1], np.int64, name=name) for name in names]
    node = op.gather(op.constant(hidden), inputs[0], op.constant(np.int64(0)))
    if token_types:
        node = op.add(node, op.unsqueeze(op.convert(inputs[2], "f32"), op.constant(np.int64(2))))
    if output == "sentence_embedding":
        node = op.reduce_mean(node, op.constant(np.int64(1)), keep_dims=False)
    for parameter in inputs:
        parameter.output(0).set_names({parameter.friendly_name})
    node.output(0).set_names({output})
    target.mkdir()
    ov.save_model(ov.Model([op.result(node)], inputs, "export"), target / "openvino_model.xml", compress_to_fp16=False)
    shutil.copytree(directory, target, ignore=lambda *_: ["model.safetensors"], dirs_exist_ok=True)
    return hidden


def test_an_export_with_hidden_states_gets_its_pooling_and_its_norm(store_root, make_bert, tmp_path):
    hidden = export(make_bert()[0], tmp_path / "export")
    model = install(ModelStore(), tmp_path / "export", kind=ModelKind.EMBEDDING)
    assert (model.id, model.context_limit, model.dimensions) == ("export", 48, 32)
    expected = hidden[Tokenizer.from_file(str(model.path / "tokenizer.json")).encode("the cats").ids].mean(0)
    np.testing.assert_allclose(embed(model, "the cats"), expected / np.linalg.norm(expected), atol=1e-5)
    names = {port.any_name for port in ov.Core().read_model(model.path / "openvino_model.xml").inputs}
    assert names == {"input_ids", "attention_mask"}


def test_an_export_with_a_finished_vector_is_taken_as_it_is(store_root, make_bert, tmp_path):
    hidden = export(make_bert()[0], tmp_path / "export", output="sentence_embedding", token_types=False)
    model = install(ModelStore(), tmp_path / "export", "finished")
    ids = Tokenizer.from_file(str(model.path / "tokenizer.json")).encode("cats").ids
    np.testing.assert_allclose(embed(model, "cats"), hidden[ids].mean(0), atol=1e-5)


def test_an_export_of_a_newer_openvino_is_refused_before_it_is_read(store_root, make_bert, tmp_path):
    export(make_bert()[0], tmp_path / "export")
    graph = tmp_path / "export" / "openvino_model.xml"
    graph.write_text(re.sub(r'(OpenVINO Runtime" value=")[^"]*', r"\g<1>2099.1.0-1-abc", graph.read_text()))
    with pytest.raises(ConversionFailed, match=r"was written by OpenVINO 2099\.1\.0, and this node runs"):
        install(ModelStore(), tmp_path / "export", "x")
    assert ModelStore().directories() == []


@pytest.mark.parametrize("ports", [{"output": "scores"}, {"extra_input": "beam_idx"}])
def test_an_export_of_another_kind_is_refused_with_its_ports(store_root, make_bert, tmp_path, ports):
    export(make_bert()[0], tmp_path / "export", **ports)
    with pytest.raises(ConversionFailed, match=next(iter(ports.values()))):
        install(ModelStore(), tmp_path / "export", "x")
    assert ModelStore().directories() == []


@pytest.mark.parametrize("form", ["published", "exported", "reranker"])
def test_a_token_beyond_the_embedding_matrix_is_refused(store_root, make_bert, tmp_path, form):
    """A fine-tuning that forgot to enlarge the matrix leaves it so."""
    directory, _ = make_bert()
    if form == "reranker":
        directory = tmp_path / form
        write_tiny(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens(["<new>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    if form == "exported":
        export(directory, tmp_path / form)
        directory = tmp_path / form
    with pytest.raises(ConversionFailed, match=rf"token '<new>' has the id {len(WORDS)}, and .* below {len(WORDS)}"):
        install(ModelStore(), directory, "x")


def test_what_cannot_be_made_of_an_encoder_is_refused(store_root, make_bert):
    store, (directory, _) = ModelStore(), make_bert()
    with pytest.raises(ConversionFailed, match="not for generation"):
        install(store, directory, "x", kind=ModelKind.GENERATION)
    with pytest.raises(ConversionFailed, match="built in f32, not int4_sym"):
        install(store, directory, "x", quantization=Quantization.INT4_SYM)
    with pytest.raises(BadRequest, match="choice"):
        store.pull_spec("all-minilm", quantization=Quantization.F16)
    for name, complaint in (("smollm2:135m", "cannot be"), ("minilm", "catalog"), ("../x", "cannot be")):
        with pytest.raises(BadRequest, match=complaint):
            install(store, directory, name)
    install(store, directory, "mine")
    with pytest.raises(ConversionFailed, match="exists"):
        install(store, make_bert("other")[0], "mine")


def test_a_removed_model_is_gone_and_what_is_not_installed_says_how_to_get_it(store_root, make_bert):
    store = ModelStore()
    install(store, make_bert()[0], "mine")
    store.remove("mine")
    assert store.installed() == []
    assert {path.name for path in store_root.iterdir()} == {".locks"}
    for lost in (store.get, store.remove):
        with pytest.raises(ModelNotFound):
            lost("mine")
    with pytest.raises(ModelNotFound, match="models here: none"):
        store.get("nothing")
    with pytest.raises(ModelNotFound, match="npu-node pull all-minilm-l6-v2"):
        store.get("all-minilm")


def test_a_directory_of_half_a_model_is_named(store_root):
    (store_root / "half").mkdir(parents=True)
    (store_root / "half/openvino_model.xml").write_text("<net/>")
    with pytest.raises(ConfigurationError, match=r"half.*openvino_tokenizer"):
        ModelStore().get("half")
