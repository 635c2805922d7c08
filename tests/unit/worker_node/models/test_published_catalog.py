"""Every hub model of the catalog is pulled from a hub that has its repository as it is published."""

import pytest

from tests.support.published import repository_of
from worker_node.models.catalog import Catalog, HubSource
from worker_node.models.sources.check import check
from worker_node.models.store import ModelStore

# Each is a conversion; the two GGUF files take seconds.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_process")]

ENTRIES = [entry for entry in Catalog.load() if isinstance(entry.source, HubSource)]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
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


def test_every_hub_model_has_one_row_of_published_files():
    assert len(ENTRIES) == len({entry.source.repo for entry in ENTRIES})
