"""By which names a model is found, and which names cannot be given."""

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from worker_node.domain import ModelKind
from worker_node.errors import BadRequest, ModelNotFound
from worker_node.models.catalog import Catalog
from worker_node.serving.embedding_cache import EmbeddingCache
from worker_node.serving.registry import EmbeddingModel, GenerationModel, Registry
from worker_node.settings import ModelSettings, NodeSettings
from worker_node.telemetry import Telemetry


def generation(model_id, *aliases):
    return GenerationModel(SimpleNamespace(id=model_id, kind=ModelKind.GENERATION), (), None, aliases=aliases)


def embedding(model_id, *aliases):
    return EmbeddingModel(SimpleNamespace(id=model_id, kind=ModelKind.EMBEDDING), (), None, "s", 3, aliases=aliases)


def registry(*models):
    return Registry(models, Catalog.load(), Telemetry(), EmbeddingCache(0))


@pytest.mark.parametrize("name", ["mine", "MINE", "mine:latest", "GPT-4o-mini", "gpt-4o-mini:latest", None])
def test_a_model_is_found_by_its_id_and_its_aliases(name):
    served = registry(generation("mine", "gpt-4o-mini"), generation("other"))
    assert served.generation(name).id == "mine"


def test_an_id_comes_before_an_alias_and_an_alias_before_the_catalog():
    served = registry(generation("smollm2-135m-instruct"), generation("mine", "smollm2", "other"), generation("other"))
    assert served.find("smollm2").id == "mine"
    assert served.find("smollm2:135m").id == "smollm2-135m-instruct"
    assert served.find("other").id == "other"


def test_the_aliases_of_a_model_are_the_names_it_is_found_by():
    served = registry(generation("smollm2-135m-instruct"), generation("mine", "SmolLM2", "other"), generation("other"))
    told = {model.id: served.aliases(model) for model in served.models}
    assert told["mine"] == ["smollm2"]
    assert told["other"] == []
    assert "smollm2:135m" in told["smollm2-135m-instruct"]
    for model in served.models:
        assert all(served.find(alias) is model for alias in told[model.id])


def test_what_is_served_no_more_is_not_found_by_any_name():
    model = generation("mine", "gpt-4o-mini")
    served = registry(model, embedding("texts", "text-embedding-3-small"))
    served.drop(model)
    for name in ("mine", "gpt-4o-mini"):
        with pytest.raises(ModelNotFound):
            served.find(name)
    assert served.embedding("text-embedding-3-small").id == "texts"
    with pytest.raises(BadRequest):
        served.generation("text-embedding-3-small")


def test_an_alias_belongs_to_one_model():
    models = (ModelSettings(name="a", aliases=("x",)), ModelSettings(name="b", aliases=("X:latest",)))
    with pytest.raises(ValidationError, match="alias is given twice"):
        NodeSettings(models=models)
