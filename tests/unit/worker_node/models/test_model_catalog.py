"""Every model is found under each of its names and pulled as it is published, and what the catalog says is sound."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.published import repository_of
from worker_node.bounded.service import REFERENCE_MODEL
from worker_node.core.types import ModelKind
from worker_node.models.catalog import Catalog, HubReference, PackageSource
from worker_node.models.npu_rules import devices_for
from worker_node.models.pull import check
from worker_node.models.store import ModelStore

CATALOG = Catalog.load()
NAMES = [(name, entry.id) for entry in CATALOG.entries for name in (entry.id, *entry.aliases)]


@given(st.sampled_from(NAMES), st.sampled_from(["", ":latest"]), st.data())
def test_a_model_is_found_by_each_name_in_any_case_and_with_the_tag(pair, tag, data):
    name, model_id = pair
    mangled = "".join(data.draw(st.sampled_from([c.lower(), c.upper()])) for c in name)
    assert CATALOG.find(f" {mangled}{tag} ").id == model_id


def test_the_reference_model_of_the_bounded_profile_is_for_npus():
    assert "NPU" in devices_for(None, CATALOG.find(REFERENCE_MODEL).quantization)
    assert "NPU" in devices_for(None, CATALOG.find("tinyllama").quantization)


def test_the_embedded_models_are_one_of_each_kind_and_come_verified_from_packages():
    embedded = [entry for entry in CATALOG.entries if entry.embedded]
    assert {entry.kind for entry in embedded} == set(ModelKind)
    assert {entry.id for entry in embedded} == {"smollm2-135m-instruct", "all-minilm-l6-v2"}
    for entry in embedded:
        assert isinstance(entry.source, PackageSource)
        assert all(re.fullmatch("[0-9a-f]{64}", file.sha256) for file in entry.source.files)


OF_HUBS = [entry for entry in CATALOG.entries if isinstance(entry.source, HubReference)]


def form(entry):
    """What entries that are published alike have in common."""
    owner = entry.source.repo.partition("/")[0]
    return owner, entry.format, entry.kind, entry.family, bool(entry.prompts), bool(entry.matryoshka)


FIRST = {form(entry): entry for entry in reversed(OF_HUBS)}


# Each is a conversion; the two GGUF files take seconds.
@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=entry.id, marks=[] if FIRST[form(entry)] is entry else [pytest.mark.long])
        for entry in OF_HUBS
    ],
)
def test_every_model_of_the_catalog_is_pulled_from_its_repository(hub, store_root, tmp_path, make_gguf, entry):
    hub.repositories[entry.source.repo] = repository_of(entry, tmp_path / "published", make_gguf)
    store = ModelStore()
    report = check(store.pull_spec(entry.id), store.root)
    assert report.format is entry.format
    assert not report.problems
    model = store.pull(entry.id)
    assert (model.id, model.kind, model.family) == (entry.id, entry.kind, entry.family)
    if entry.kind == "generation" and entry.format != "gguf":
        # The tiny tensors of the others have tiny contexts.
        assert model.context_limit == entry.context_limit
    if entry.prompts:
        assert dict(model.prompts) == entry.prompts
    fetched = {name for name, _ in hub.large_downloads()}
    assert fetched <= {file.rpartition("/")[2] for file in report.files}
    assert not any("/gguf/" in path or "/onnx/" in path or "/openvino/" in path for _, path, _ in hub.asked)
