"""What the names that a user may pull stand for."""

from pathlib import Path

import pytest

from worker_node.core.errors import BadRequest, ModelNotFound
from worker_node.models.catalog import Catalog, CatalogEntry, HubReference
from worker_node.models.sources import LocalReference, alias_of, is_foreign, parse_reference

CATALOG = Catalog.load()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("/models/\0", "null"),
        # Windows holds such a file to be none, and looks for the home of any user beside that of its own.
        pytest.param("/" + "a" * 300, "too long", marks=pytest.mark.linux),
        pytest.param("~nobody-of-this-name/x", "home directory", marks=pytest.mark.linux),
    ],
)
def test_a_path_that_cannot_be_is_refused(name, why):
    with pytest.raises(BadRequest, match=f"(?i)cannot be a file of this machine: .*{why}"):
        parse_reference(name, CATALOG)


@pytest.mark.parametrize(
    "name", ["smollm2", "SmolLM2:135m", "all-minilm:latest", "HuggingFaceTB/SmolLM2-135M-Instruct"]
)
def test_names_of_the_catalog_come_first(name):
    assert isinstance(parse_reference(name, CATALOG), CatalogEntry)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("maker/model", HubReference("maker/model")),
        ("hf:maker/model", HubReference("maker/model")),
        ("hf:maker/model@v1.0", HubReference("maker/model", "v1.0")),
        ("hf.co/maker/model:Q4_K_M", HubReference("maker/model", "main", "Q4_K_M")),
        ("hf.co/maker/model:latest", HubReference("maker/model")),
        ("hf:maker/model@refs/pr/3:Q8_0", HubReference("maker/model", "refs/pr/3", "Q8_0")),
        ("https://huggingface.co/maker/model", HubReference("maker/model")),
        ("https://huggingface.co/maker/model/tree/dev", HubReference("maker/model", "dev")),
        ("hf:maker/model.gguf", HubReference("maker/model.gguf")),
        ("hf:HuggingFaceTB/SmolLM2-135M-Instruct", HubReference("HuggingFaceTB/SmolLM2-135M-Instruct")),
        ("./models/x", LocalReference(Path("./models/x"))),
        ("/models/x", LocalReference(Path("/models/x"))),
        ("x.gguf", LocalReference(Path("x.gguf"))),
        ("models/x.gguf", LocalReference(Path("models/x.gguf"))),
    ],
)
def test_other_sources_are_told_by_their_form(name, expected):
    assert parse_reference(name, CATALOG) == expected


def test_a_path_is_known_by_its_form_and_not_by_what_is_there(monkeypatch):
    monkeypatch.setattr("worker_node.models.sources.LocalReference", lambda _path: pytest.fail("it looked"))
    for name in ("/etc/shadow", "/root/none", "/" + "a" * 300, "~nobody/x", "./x", "x.gguf", "maker/model"):
        assert is_foreign(name), name
    for name in ("smollm", "ftp://maker/model.gguf", ""):
        assert not is_foreign(name), name


@pytest.mark.parametrize("name", ["gpt-5", "", "a/b/c", "maker/", "maker/mo del", "maker/..", "https://h/m.gguf"])
def test_anything_else_is_not_found_and_the_message_names_the_accepted_forms(name):
    with pytest.raises(ModelNotFound, match="ORG/REPO"):
        parse_reference(name, CATALOG)
    with pytest.raises(ModelNotFound, match="did you mean smollm2-135m-instruct"):
        parse_reference("smolm2", CATALOG)


@pytest.mark.parametrize(
    ("name", "model_id"),
    [
        ("OpenVINO/Qwen9-8B-int4-cw-ov", "qwen9-8b-int4-cw-ov"),
        ("maker/Model-GGUF:Q4_K_M", "model-gguf-q4_k_m"),
        ("/models/Some.Model.gguf", "some.model"),
        ("hf:maker/___", "model"),
    ],
)
def test_the_model_is_named_after_its_source(name, model_id):
    assert parse_reference(name, CATALOG).model_id == model_id


def test_every_spelling_of_a_source_is_the_same_model():
    spellings = ["maker/model:q4_k_m", "hf:Maker/Model:Q4_K_M", "hf.co/maker/model:Q4_K_M", "HF.co/maker/model:Q4_K_M"]
    assert {alias_of(name) for name in spellings} == {"maker/model:q4_k_m"}
    assert alias_of("maker/model@v2") != alias_of("maker/model")
    assert alias_of("Tiny:latest") == "tiny"
