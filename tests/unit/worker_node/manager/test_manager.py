"""The manager: models by name, damaged ones in the store, and pulls."""

import asyncio
import math
from functools import partial
from types import SimpleNamespace

import pytest

from tests.support.services import manager_of
from worker_node.core.errors import BadRequest, DownloadFailed, ModelNotFound
from worker_node.core.types import ModelKind
from worker_node.manager.served import Names
from worker_node.manager.work import BoundedWork
from worker_node.models.catalog import Catalog
from worker_node.models.store import ModelStore
from worker_node.tasks.embed.service import EmbeddingModel
from worker_node.tasks.generate.building import GenerationModel
from worker_node.tasks.generate.prompting import generation_model

DAMAGES = {
    "not JSON": {"npu-node.json": b"{"},
    "not UTF-8": {"npu-node.json": b'{"id": "\xff\xfe"}'},
    "no manifest and no weights": {"openvino_model.xml": b"<net/>"},
    "a directory for a manifest": {"npu-node.json/x": b""},
}


@pytest.fixture
def store(tmp_path):
    return ModelStore(tmp_path)


@pytest.fixture
def manager(store):
    return manager_of(store=store)


@pytest.mark.parametrize("files", DAMAGES.values(), ids=DAMAGES)
async def test_a_damaged_model_is_not_listed_not_served_and_can_be_deleted(store, manager, files, caplog):
    for name, content in files.items():
        file = store.root / "broken" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    assert await manager.installed(math.inf) == []
    assert "broken" in caplog.text
    with pytest.raises(ModelNotFound, match="damaged"):
        await manager.resolve("broken", math.inf)
    await manager.delete("broken")
    assert not (store.root / "broken").exists()
    with pytest.raises(ModelNotFound):
        await manager.delete("broken")


async def test_a_failure_reaches_the_caller_and_closing_ends_what_runs():
    async def fail():
        raise DownloadFailed("no network")

    work = BoundedWork(8, "8 models are being pulled", 30.0, partial(DownloadFailed, "the node is shutting down"))
    with pytest.raises(DownloadFailed, match="no network"):
        await work.result(work.start(fail(), "fail"))
    waiting = asyncio.create_task(work.result(work.start(asyncio.Event().wait(), "hang")))
    await asyncio.sleep(0)
    await work.close()
    with pytest.raises(DownloadFailed, match="shutting down"):
        await waiting
    with pytest.raises(DownloadFailed, match="shutting down"):
        work.start(asyncio.Event().wait(), "late")


def generation(model_id, *aliases, sources=()):
    installed = SimpleNamespace(id=model_id, kind=ModelKind.GENERATION, aliases=sources)
    return GenerationModel(installed, None, aliases=aliases)


def embedding(model_id, *aliases):
    installed = SimpleNamespace(id=model_id, kind=ModelKind.EMBEDDING, aliases=())
    return EmbeddingModel(installed, None, "s", 3, aliases=aliases)


def names(*models):
    return Names(Catalog.load(), models)


def test_an_id_comes_before_an_alias_and_an_alias_before_the_catalog():
    served = names(generation("smollm2-135m-instruct"), generation("mine", "smollm2", "other"), generation("other"))
    assert served.find("smollm2").id == "mine"
    assert served.find("smollm2:135m").id == "smollm2-135m-instruct"
    assert served.find("other").id == "other"


def test_a_model_is_found_by_the_source_that_it_was_pulled_from_after_all_configured_names():
    pulled = generation("tiny", sources=("maker/tiny:q4_k_m", "other", "mine"))
    served = names(generation("other"), generation("third", "mine"), pulled)
    assert served.find("maker/tiny:Q4_K_M") is pulled
    assert (served.find("other").id, served.find("mine").id) == ("other", "third")
    assert served.aliases(pulled) == ["maker/tiny:q4_k_m"]
    served.serve(model for model in served.models if model is not pulled)
    with pytest.raises(ModelNotFound):
        served.find("maker/tiny:q4_k_m")


async def test_a_model_of_another_kind_than_the_request_needs_is_refused_by_name():
    manager = manager_of([generation("writer", "w"), embedding("texts", "t")])
    for name in (None, "w"):
        assert (await generation_model(manager, name, math.inf)).id == "writer"
    for name in (None, "t"):
        assert (await manager.model_of(ModelKind.EMBEDDING, EmbeddingModel, name, math.inf)).id == "texts"
    with pytest.raises(BadRequest, match="texts is for embed, not for generate; use one of these: writer"):
        await generation_model(manager, "t", math.inf)
    with pytest.raises(BadRequest, match="writer is for generate, not for embed; use one of these: texts"):
        await manager.model_of(ModelKind.EMBEDDING, EmbeddingModel, "w", math.inf)
    with pytest.raises(ModelNotFound, match="serves no embedding model"):
        await manager_of([generation("writer")]).model_of(ModelKind.EMBEDDING, EmbeddingModel, None, math.inf)
