"""What is in the store is described truly, and damage is named."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.core.errors import ConfigurationError
from worker_node.core.types import ModelKind
from worker_node.models.directory import (
    CANARY_FILE,
    MANIFEST_FILE,
    EmbeddingCanary,
    GenerationCanary,
    Manifest,
    read_canary,
    read_model,
    sizes,
    write_manifest,
)


def write_model(directory, **changes):
    directory.mkdir(exist_ok=True)
    (directory / "openvino_model.xml").write_text("<net/>")
    fields = {
        "version": 1,
        "id": "m",
        "kind": ModelKind.GENERATION,
        "family": "smollm",
        "context_limit": 128,
        "quantization": "int8_sym",
        "licence": "MIT",
        "source": "local",
        "source_sha256": {"a": "b"},
        "files": sizes(directory),
        "made_with": {"openvino": "1"},
        "canary": GenerationCanary("q", ("a",), 8),
        **changes,
    }
    write_manifest(directory, Manifest(**fields))
    return directory


@given(st.binary(max_size=200))
def test_a_damaged_manifest_fails_with_its_name(tmp_path_factory, junk):
    directory = tmp_path_factory.mktemp("m")
    (directory / MANIFEST_FILE).write_bytes(junk)
    with pytest.raises(ConfigurationError, match=MANIFEST_FILE):
        read_model(directory)
    (directory / CANARY_FILE).write_bytes(junk)
    with pytest.raises(ConfigurationError, match=CANARY_FILE):
        read_canary(directory, EmbeddingCanary)


def test_a_manifest_of_a_newer_version_and_a_canary_without_vectors_are_refused(tmp_path):
    (tmp_path / CANARY_FILE).write_text('{"texts":["a"],"vectors":[],"min_cosine":0.9}')
    with pytest.raises(ConfigurationError, match=CANARY_FILE):
        read_canary(tmp_path, EmbeddingCanary)
    with pytest.raises(ConfigurationError, match="version 2"):
        read_model(write_model(tmp_path / "m", version=2))


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("cut")])
def test_a_file_that_is_gone_or_cut_is_named(tmp_path, damage):
    directory = write_model(tmp_path / "m")
    damage(directory / "openvino_model.xml")
    with pytest.raises(ConfigurationError, match=r"openvino_model\.xml"):
        read_model(directory)
