"""What a repository holds decides what happens to it; what cannot be used is rejected with the way out."""

import pytest

from worker_node.core.errors import SourceRejected
from worker_node.models.catalog import SourceFormat
from worker_node.models.sources import Listing, RemoteFile, select


def listing(*paths):
    return Listing("maker/model", "c0ffee", tuple(RemoteFile(path, 10) for path in paths))


def chosen(*paths, tag=None, form=None):
    selection = select(listing(*paths), tag, form)
    return selection.format, {file.path for file in selection.files}


def test_an_openvino_encoder_needs_a_tokenizer_of_its_own():
    files = ["openvino_model.xml", "openvino_model.bin", "config.json", "tokenizer.json"]
    assert chosen(*files) == (SourceFormat.OPENVINO, set(files))
    with pytest.raises(SourceRejected, match=r"lacks tokenizer\.json"):
        chosen(*files[:3])


@pytest.mark.parametrize(
    ("tag", "expected"),
    [(None, "m.Q4_K_M.gguf"), ("q8_0", "m.Q8_0.gguf"), ("Q4_0", "sub/m-q4_0.gguf"), ("m.Q8_0.gguf", "m.Q8_0.gguf")],
)
def test_a_gguf_file_is_chosen_by_quantization(tag, expected):
    paths = ["m.Q8_0.gguf", "m.Q4_K_M.gguf", "sub/m-q4_0.gguf", "mmproj-Q4_K_M.gguf", "README.md"]
    assert chosen(*paths, tag=tag) == (SourceFormat.GGUF, {expected})
    assert chosen("m.F16.gguf", "m.Q8_0.gguf")[1] == {"m.Q8_0.gguf"}, "8 bits are the second choice"
    assert chosen("odd-name.gguf")[1] == {"odd-name.gguf"}, "a single file needs none"


ENCODER = ["model.safetensors", "modules.json", "config.json", "tokenizer.json"]


@pytest.mark.parametrize(
    ("extra", "form"),
    [("gguf/x-f16.gguf", None), ("x.Q8_0.gguf", None), ("openvino_model.xml", SourceFormat.SAFETENSORS)],
)
def test_files_beside_an_encoder_are_not_taken_for_the_model(extra, form):
    assert chosen(*ENCODER, extra, form=form) == (SourceFormat.SAFETENSORS, set(ENCODER))


def test_the_form_of_the_catalog_and_a_tag_decide():
    assert chosen(*ENCODER, "x.Q8_0.gguf", form=SourceFormat.GGUF) == (SourceFormat.GGUF, {"x.Q8_0.gguf"})
    assert chosen(*ENCODER, "x.Q8_0.gguf", tag="Q8_0") == (SourceFormat.GGUF, {"x.Q8_0.gguf"})
    with pytest.raises(SourceRejected, match="form that cannot be converted"):
        chosen(*ENCODER, form=SourceFormat.OPENVINO)


def test_shards_are_taken_together_and_not_in_part():
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert chosen(*shards, *ENCODER[1:]) == (SourceFormat.SAFETENSORS, {*shards, *ENCODER[1:]})
    with pytest.raises(SourceRejected, match="cannot be converted"):
        chosen(shards[0], *ENCODER[1:])


@pytest.mark.parametrize(
    ("paths", "tag", "reason"),
    [
        (["m.Q2_K.gguf", "m.Q5_0.gguf"], None, r"neither Q4_K_M nor Q8_0; it has m\.Q2_K\.gguf, m\.Q5_0\.gguf"),
        (["m.IQ4_0.gguf"], "Q4_0", "has no Q4_0; it has m.IQ4_0.gguf"),
        (["m.Q8_0-00001-of-00002.gguf"], None, "split files"),
        (["openvino_model.xml"], "Q4_0", "holds no GGUF file"),
        (["openvino_model.xml", "openvino_detokenizer.xml"], None, r"lacks openvino_model\.bin"),
        (["openvino_language_model.xml", "openvino_vision_embeddings_model.xml"], None, "not a whole model"),
        (["openvino_encoder_model.xml"], None, "does not serve"),
        (["model.safetensors", "config.json"], None, "optimum-cli export openvino"),
        (["onnx_model.onnx"], None, "optimum-cli export openvino"),
        (["README.md"], None, "holds no model"),
    ],
)
def test_anything_else_is_rejected_with_the_reason(paths, tag, reason):
    with pytest.raises(SourceRejected, match=reason):
        chosen(*paths, tag=tag)
