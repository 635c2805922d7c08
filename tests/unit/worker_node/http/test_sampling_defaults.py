"""What the engine is told where a request says nothing of sampling: the model's defaults, or its dialect's."""

import pytest

from tests.support.application import built_models
from tests.support.writing import WRITER, writing
from worker_node.settings import NodeSettings

TURNS = [{"role": "user", "content": "Hello"}]
MODELS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
# https://docs.ollama.com/modelfile, "Valid Parameters and Values"
OLLAMAS = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1}
ROUTES = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/inference": {"prompt": "Hello"},
    "/api/chat": {"messages": TURNS, "stream": False},
    "/api/generate": {"prompt": "Hello", "stream": False},
}


async def job_of(client, engine, path, **body):
    """The job that a request became, as the four fields that models have defaults for."""
    async with client.post(path, json={"model": WRITER, **ROUTES[path], **body}) as reply:
        assert reply.status == 200, await reply.text()
    job = engine.jobs[-1]
    return {name: getattr(job, name) for name in MODELS}


@pytest.mark.parametrize("path", ROUTES)
async def test_a_silent_request_has_the_models_defaults_and_ollamas_in_its_dialect(store, path):
    async with writing(store, sampling_defaults=MODELS) as (client, _, engine):
        assert await job_of(client, engine, path) == (OLLAMAS if path.startswith("/api/") else MODELS)
    async with writing(store, sampling_defaults={}) as (client, _, engine):
        assert await job_of(client, engine, path) == (OLLAMAS if path.startswith("/api/") else GREEDY)


@pytest.mark.parametrize("path", ROUTES)
async def test_greedy_is_greedy_in_every_dialect(store, path):
    async with writing(store, sampling_defaults=None) as (client, _, engine):
        assert await job_of(client, engine, path) == GREEDY


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": 1.5, "top_p": 0.5}, {"temperature": 1.5, "top_p": 0.5}),
        ({"top_p": 0}, {"temperature": 0, "top_p": 1}),
        ({"temperature": None}, {}),
    ],
)
async def test_what_a_request_says_counts_and_the_rest_is_filled_in(store, given, changed):
    async with writing(store, sampling_defaults=MODELS) as (client, _, engine):
        assert await job_of(client, engine, "/v1/completions", **given) == MODELS | changed
        assert await job_of(client, engine, "/api/generate", options=given) == OLLAMAS | changed


async def test_a_default_length_bounds_silent_requests_and_refuses_none(store):
    async with writing(store, sampling_defaults={"max_new_tokens": 20}, max_tokens_limit=50) as (client, _, engine):
        for body, length in (({}, 20), ({"max_tokens": 40}, 40), ({"min_tokens": 30}, 30)):
            await job_of(client, engine, "/v1/chat/completions", **body)
            assert engine.jobs[-1].max_new_tokens == length
    async with writing(store, sampling_defaults={"max_new_tokens": 100}, max_tokens_limit=50) as (client, _, engine):
        await job_of(client, engine, "/v1/chat/completions")
        assert engine.jobs[-1].max_new_tokens == 50


@pytest.mark.parametrize(
    ("of_the_node", "of_the_model", "expected"),
    [("model", {}, {}), ("greedy", {}, None), ("greedy", {"sampling_defaults": "model"}, {})],
)
def test_the_setting_of_a_model_goes_before_the_nodes(store, of_the_node, of_the_model, expected):
    settings = NodeSettings(sampling_defaults=of_the_node)
    (model,) = built_models(store, WRITER, settings=settings, **of_the_model)
    # The small model's file says nothing but its end tokens, so it is greedy by itself.
    assert model.sampling_defaults == (None if expected is None else {"temperature": 0.0})
