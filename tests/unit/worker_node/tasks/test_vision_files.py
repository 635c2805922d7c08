"""Which directories are vision models, and what their configuration says of images."""

import json

import pytest

from worker_node.core.errors import ConfigurationError, ConversionFailed, SourceRejected
from worker_node.tasks.vision.building import FILES, image_rules

LLAVA = {"model_type": "llava", "text_config": {"max_position_embeddings": 4096}, "vision_config": {"patch_size": 14}}


def write(directory, config=LLAVA, preprocessor=None):
    for name in FILES.needed:
        (directory / name).write_bytes(b"")
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor or {}))
    return directory


def test_a_directory_in_openvino_form_is_served_where_it_is(tmp_path):
    write(tmp_path)
    assert FILES.recognises(tmp_path)
    model = FILES.open(tmp_path, "eyes")
    assert (model.id, model.kind, model.path, model.context_limit) == ("eyes", "vision", tmp_path, 4096)


def test_what_is_missing_or_has_no_pipeline_is_named(tmp_path):
    write(tmp_path, LLAVA | {"model_type": "idefics3"})
    with pytest.raises(ConfigurationError, match="type idefics3"):
        FILES.open(tmp_path, "eyes")
    with pytest.raises(ConversionFailed, match="type idefics3"):
        FILES.check(tmp_path)
    write(tmp_path, {"model_type": "llava"})
    with pytest.raises(ConfigurationError, match="max_position_embeddings"):
        FILES.open(tmp_path, "eyes")
    (tmp_path / "openvino_tokenizer.bin").unlink()
    with pytest.raises(ConfigurationError, match=r"openvino_tokenizer\.bin is missing"):
        FILES.open(tmp_path, "eyes")


def test_a_repository_is_fetched_whole_or_rejected():
    names = [*FILES.needed, "README.md", "chat_template.jinja"]
    assert set(FILES.of_repository("maker/model", (), names)) == {*FILES.needed, "chat_template.jinja"}
    assert FILES.of_repository("maker/model", (), ["openvino_model.xml"]) is None
    with pytest.raises(SourceRejected, match=r"preprocessor_config\.json"):
        FILES.of_repository("maker/model", (), [name for name in names if name != "preprocessor_config.json"])


@pytest.mark.parametrize(
    ("config", "preprocessor", "size", "tokens", "shortest"),
    [
        (LLAVA, {"crop_size": {"height": 336, "width": 336}}, (1000, 500), 577, 336),
        (LLAVA, {"size": {"shortest_edge": 336}}, (10, 10), 577, 336),
        ({"model_type": "gemma3", "mm_tokens_per_image": 256}, {}, (1000, 500), 256, None),
        ({"model_type": "internvl_chat", "force_image_size": 448}, {}, (448, 448), 258, None),
        ({"model_type": "internvl_chat", "max_dynamic_patch": 6}, {}, (1000, 500), 7 * 256 + 2, None),
        ({"model_type": "something_new"}, {}, (1000, 500), 1024, None),
    ],
)
def test_the_tokens_of_a_image_are_estimated_by_the_type_of_model(
    tmp_path, config, preprocessor, size, tokens, shortest
):
    rules = image_rules(write(tmp_path, config, preprocessor))
    assert (rules.tokens(*size), rules.shortest) == (tokens, shortest)


def test_qwens_tokens_grow_with_the_pixels_up_to_a_bound(tmp_path):
    rules = image_rules(write(tmp_path, {"model_type": "qwen2_vl"}, {"max_pixels": 784 * 100}))
    # A square of 28 x 28 pixels is a token.
    assert 25 <= rules.tokens(140, 140) <= 32
    assert 100 <= rules.tokens(10_000, 10_000) == rules.tokens(280, 280) <= 115
    assert "<|image_pad|>" in rules.marks
