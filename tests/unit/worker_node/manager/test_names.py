"""By which names a model is found, and which names cannot be given."""

import math
from types import SimpleNamespace

import pytest

from tests.support.services import manager_of
from worker_node.core.errors import BadRequest, ModelNotFound
from worker_node.core.types import ModelKind
from worker_node.manager.served import Names
from worker_node.models.catalog import Catalog
from worker_node.tasks.embed.service import EmbeddingModel, embedding_model
from worker_node.tasks.generate.model import GenerationModel, generation_model


def generation(model_id, *aliases, sources=()):
    installed = SimpleNamespace(id=model_id, kind=ModelKind.GENERATION, aliases=sources)
    return GenerationModel(installed, (), None, aliases=aliases)


def embedding(model_id, *aliases):
    installed = SimpleNamespace(id=model_id, kind=ModelKind.EMBEDDING, aliases=())
    return EmbeddingModel(installed, (), None, "s", 3, aliases=aliases)


def found(served, name):
    return served.default(ModelKind.GENERATION) if name is None else served.find(name)


def names(*models):
    return Names(Catalog.load(), models)


@pytest.mark.parametrize("name", ["mine", "MINE", "mine:latest", "GPT-4o-mini", "gpt-4o-mini:latest", None])
def test_a_model_is_found_by_its_id_and_its_aliases(name):
    served = names(generation("mine", "gpt-4o-mini"), generation("other"))
    assert found(served, name).id == "mine"


def test_an_id_comes_before_an_alias_and_an_alias_before_the_catalog():
    served = names(generation("smollm2-135m-instruct"), generation("mine", "smollm2", "other"), generation("other"))
    assert served.find("smollm2").id == "mine"
    assert served.find("smollm2:135m").id == "smollm2-135m-instruct"
    assert served.find("other").id == "other"


def test_the_aliases_of_a_model_are_the_names_it_is_found_by():
    served = names(generation("smollm2-135m-instruct"), generation("mine", "SmolLM2", "other"), generation("other"))
    told = {model.id: served.aliases(model) for model in served.models}
    assert told["mine"] == ["smollm2"]
    assert told["other"] == []
    assert "smollm2:135m" in told["smollm2-135m-instruct"]
    for model in served.models:
        assert all(served.find(alias) is model for alias in told[model.id])


def test_a_model_is_found_by_the_source_that_it_was_pulled_from_after_all_configured_names():
    pulled = generation("tiny", sources=("maker/tiny:q4_k_m", "other", "mine"))
    served = names(generation("other"), generation("third", "mine"), pulled)
    assert served.find("maker/tiny:Q4_K_M") is pulled
    assert (served.find("other").id, served.find("mine").id) == ("other", "third")
    assert served.aliases(pulled) == ["maker/tiny:q4_k_m"]
    served.drop(pulled)
    with pytest.raises(ModelNotFound):
        served.find("maker/tiny:q4_k_m")


def test_what_is_served_no_more_is_not_found_by_any_name():
    model = generation("mine", "gpt-4o-mini")
    served = names(model, embedding("texts", "text-embedding-3-small"))
    served.drop(model)
    for name in ("mine", "gpt-4o-mini"):
        with pytest.raises(ModelNotFound):
            served.find(name)
    assert served.find("text-embedding-3-small").id == "texts"


async def test_a_model_of_another_kind_than_the_request_needs_is_refused_by_name():
    manager = manager_of([generation("writer", "w"), embedding("texts", "t")])
    assert (
        (await generation_model(manager, None, math.inf)).id
        == (await generation_model(manager, "w", math.inf)).id
        == "writer"
    )
    assert (
        (await embedding_model(manager, None, math.inf)).id
        == (await embedding_model(manager, "t", math.inf)).id
        == "texts"
    )
    with pytest.raises(BadRequest, match="texts is for embed, not for generate; use one of these: writer"):
        await generation_model(manager, "t", math.inf)
    with pytest.raises(BadRequest, match="writer is for generate, not for embed; use one of these: texts"):
        await embedding_model(manager, "w", math.inf)
    with pytest.raises(ModelNotFound, match="serves no embedding model"):
        await embedding_model(manager_of([generation("writer")]), None, math.inf)
