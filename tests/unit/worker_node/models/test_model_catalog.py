"""Every model is found under each of its names, and what the catalog says is sound."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.core.types import ModelKind
from worker_node.models.catalog import Catalog, HubSource, PackageSource, Quantization, SourceFormat
from worker_node.registry import tasks
from worker_node.tasks.transcribe.files import VOICE_MODEL

CATALOG = Catalog.load()
NAMES = [(name, entry.id) for entry in CATALOG for name in (entry.id, *entry.aliases)]


@given(st.sampled_from(NAMES), st.sampled_from(["", ":latest"]), st.data())
def test_a_model_is_found_by_each_name_in_any_case_and_with_the_tag(pair, tag, data):
    name, model_id = pair
    mangled = "".join(data.draw(st.sampled_from([c.lower(), c.upper()])) for c in name)
    assert CATALOG.resolve(f" {mangled}{tag} ").id == model_id


@pytest.mark.parametrize(
    ("name", "model_id"),
    [
        ("all-minilm", "all-minilm-l6-v2"),
        ("smollm2:135m", "smollm2-135m-instruct"),
        ("bge-small-en", "bge-small-en-v1.5"),
        ("llama-7b-openvino", "open-llama-7b-v2"),
        ("OpenVINO/Qwen2.5-1.5B-Instruct-int4-ov", "qwen2.5-1.5b-instruct"),
        ("tinyllama", "tinyllama-1.1b-chat"),
    ],
)
def test_the_names_that_users_and_tools_know_resolve(name, model_id):
    assert CATALOG.resolve(name).id == model_id


def test_the_embedded_models_are_one_of_each_kind_and_come_verified_from_packages():
    embedded = CATALOG.embedded()
    assert {entry.kind for entry in embedded} == set(ModelKind)
    assert {entry.id for entry in embedded} == {"smollm2-135m-instruct", "all-minilm-l6-v2"}
    for entry in embedded:
        assert isinstance(entry.source, PackageSource)
        assert all(re.fullmatch("[0-9a-f]{64}", file.sha256) for file in entry.source.files)


def test_embedding_models_say_their_dimensions_and_generation_models_their_canary():
    for entry in CATALOG:
        if entry.kind == ModelKind.EMBEDDING:
            assert entry.dimensions
            assert entry.quantization is Quantization.F32
        elif entry.kind == ModelKind.GENERATION:
            assert entry.canary is not None
            assert entry.canary.expected
        # Speech models use the network that finds speech; nobody asks for it.
        assert entry.kind in tasks() or entry.id == VOICE_MODEL
        if isinstance(entry.source, HubSource):
            assert (entry.format is SourceFormat.GGUF) is (entry.source.tag is not None)
