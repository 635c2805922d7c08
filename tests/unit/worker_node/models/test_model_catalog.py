"""Every model is found under each of its names, and what the catalog says is sound."""

import re

from hypothesis import given
from hypothesis import strategies as st

from worker_node.bounded.service import REFERENCE_MODEL
from worker_node.core.types import ModelKind
from worker_node.models.catalog import Catalog, PackageSource, devices_for

CATALOG = Catalog.load()
NAMES = [(name, entry.id) for entry in CATALOG for name in (entry.id, *entry.aliases)]


@given(st.sampled_from(NAMES), st.sampled_from(["", ":latest"]), st.data())
def test_a_model_is_found_by_each_name_in_any_case_and_with_the_tag(pair, tag, data):
    name, model_id = pair
    mangled = "".join(data.draw(st.sampled_from([c.lower(), c.upper()])) for c in name)
    assert CATALOG.resolve(f" {mangled}{tag} ").id == model_id


def test_the_reference_model_of_the_bounded_profile_is_for_npus():
    assert "NPU" in devices_for(None, CATALOG.resolve(REFERENCE_MODEL).quantization)
    assert "NPU" in devices_for(None, CATALOG.resolve("tinyllama").quantization)


def test_the_embedded_models_are_one_of_each_kind_and_come_verified_from_packages():
    embedded = CATALOG.embedded()
    assert {entry.kind for entry in embedded} == set(ModelKind)
    assert {entry.id for entry in embedded} == {"smollm2-135m-instruct", "all-minilm-l6-v2"}
    for entry in embedded:
        assert isinstance(entry.source, PackageSource)
        assert all(re.fullmatch("[0-9a-f]{64}", file.sha256) for file in entry.source.files)
