"""Sampling parameters of every dialect, and their defaults."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from pydantic import ValidationError

from tests.support.application import application, built_models
from tests.support.task_models import IMAGE, SEER, placement, seer
from tests.support.writing import WRITER, WritingEngine, writing
from worker_node.core.errors import BadRequest
from worker_node.core.types import NOTHING
from worker_node.http.body import sift
from worker_node.http.context import Ignored
from worker_node.settings import NodeSettings
from worker_node.tasks.generate.http import parameters
from worker_node.tasks.generate.http.ollama import OllamaOptions
from worker_node.tasks.generate.http.parameters import SamplingFields
from worker_node.tasks.generate.messages import EDGE_ONLY, Sampling

# Each field of Sampling with a value, and what the dialects call it.
NAMES = [
    ("max_new_tokens", 7, ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "num_predict")),
    ("temperature", 0.5, ("temperature",)),
    ("top_p", 0.5, ("top_p",)),
    ("top_k", 5, ("top_k",)),
    ("min_p", 0.1, ("min_p",)),
    ("seed", 3, ("seed",)),
    ("stop", ["a", "b"], ("stop", "stop_sequences")),
    ("ignore_eos", True, ("ignore_eos",)),
    ("presence_penalty", 0.5, ("presence_penalty",)),
    ("frequency_penalty", 0.5, ("frequency_penalty",)),
    ("repetition_penalty", 1.5, ("repetition_penalty", "repeat_penalty")),
    ("min_tokens", 4, ("min_tokens",)),
    ("stop_token_ids", [7, 8], ("stop_token_ids",)),
]


@pytest.mark.parametrize(("field", "value", "names"), NAMES, ids=[row[0] for row in NAMES])
def test_a_parameter_means_the_same_under_each_of_its_names(field, value, names):
    (sampling,) = {parameters.sampling({name: value}) for name in names}
    assert getattr(sampling, field) == (tuple(value) if isinstance(value, list) else value)


def sampled(**given):
    return structs.replace(parameters.sampling(given), open_fields=())


def test_the_words_for_no_limit_and_no_seed():
    assert sampled(num_predict=-1, seed=-1) == Sampling()
    assert parameters.sampling({"seed": -5}).seed == 2**63 - 5


def test_no_tokens_are_no_limit_for_ollama_and_refused_for_llama_cpp():
    assert sampled(num_predict=0) == Sampling()
    assert sampled(n_predict=-1) == Sampling()
    with pytest.raises(BadRequest, match="n_predict: 0 asks for no token"):
        parameters.sampling({"n_predict": 0})


@pytest.mark.parametrize("min_p", [0.99999999, 1 - 2**-53])
def test_a_min_p_that_is_one_in_float32_stays_below_it(min_p):
    assert np.float32(0.99) < np.float32(parameters.sampling({"min_p": min_p}).min_p) < np.float32(1)


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e-30, 0.009, 10.1])
def test_a_repetition_penalty_is_neither_tiny_nor_huge(penalty):
    for body, name in (
        (SamplingFields, "repetition_penalty"),
        (SamplingFields, "repeat_penalty"),
        (OllamaOptions, "repeat_penalty"),
    ):
        fields = {"model": "m"} if body is SamplingFields else {}
        with pytest.raises(ValidationError, match=name):
            body.model_validate(fields | {name: penalty})
        assert getattr(body.model_validate(fields | {name: 0.01}), name) == 0.01


@pytest.mark.parametrize("temperature", [5e-324, 1e-44, 1e-39, 1e-37, 1e-8])
def test_a_temperature_by_which_an_engine_cannot_divide_is_greedy(temperature):
    assert sampled(temperature=temperature) == Sampling(temperature=0.0)


def test_two_names_of_one_field_must_agree():
    assert parameters.sampling({"max_tokens": 5, "max_completion_tokens": 5}).max_new_tokens == 5
    with pytest.raises(BadRequest):
        parameters.sampling({"max_tokens": 5, "max_completion_tokens": 6})


@pytest.mark.parametrize("stop", ["", ["a", ""], ["x"] * 17, "x" * 257])
def test_stop_sequences_have_limits(stop):
    with pytest.raises(BadRequest):
        parameters.sampling({"stop": stop})


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
    return {name: getattr(job.sampling, name) for name in MODELS}


@pytest.mark.parametrize("path", ROUTES)
async def test_a_silent_request_has_the_models_defaults_and_ollamas_in_its_dialect(store, path):
    async with writing(store, sampling_defaults=MODELS) as (client, _, engine):
        assert await job_of(client, engine, path) == (OLLAMAS if path.startswith("/api/") else MODELS)
    async with writing(store, sampling_defaults={}) as (client, _, engine):
        assert await job_of(client, engine, path) == (OLLAMAS if path.startswith("/api/") else GREEDY)
    async with writing(store, sampling_defaults=None) as (client, _, engine):
        assert await job_of(client, engine, path) == GREEDY, "the node is set to greedy"


async def test_ollamas_penalty_is_not_applied_to_phi_3_and_a_callers_is(store):
    installed = replace(store.get(WRITER), family="phi")
    async with writing(store, sampling_defaults=MODELS, installed=installed) as (client, _, engine):
        for path in ("/api/chat", "/api/generate"):
            assert await job_of(client, engine, path) == OLLAMAS | {"repetition_penalty": 1.0}
            given = await job_of(client, engine, path, options={"repeat_penalty": 1.3})
            assert given == OLLAMAS | {"repetition_penalty": 1.3}
        assert await job_of(client, engine, "/v1/completions") == MODELS


@pytest.mark.parametrize("family", ["qwen", "phi"])
async def test_ollamas_penalty_is_not_applied_to_images_and_phi_takes_none(store, family):
    engine = WritingEngine()
    model = seer(store, [placement(SEER, engine)], sampling_defaults=MODELS)
    model = replace(model, installed=replace(model.installed, family=family))
    engine.tokenizer = model.tokenizer
    image = IMAGE.partition(",")[2]
    body = {"model": SEER, "stream": False, "messages": [{"role": "user", "content": "?", "images": [image]}]}
    async with application([model]) as (client, _):
        for penalty, expected in ((None, 1.0), (1.2, 1.2)):
            options = {} if penalty is None else {"options": {"repeat_penalty": penalty}}
            async with client.post("/api/chat", json=body | options) as reply:
                if family == "phi" and penalty is not None:
                    assert reply.status == 400
                    assert "with a penalty, and 1.2 was given; leave it out" in await reply.text()
                    continue
                assert reply.status == 200, await reply.text()
            assert engine.jobs[-1].sampling.repetition_penalty == expected
        text = body | {"messages": TURNS, "options": {"repeat_penalty": 1.2}}
        async with client.post("/api/chat", json=text) as reply:
            assert reply.status == 200, "without an image a penalty is taken"


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


async def test_beams_are_searched_as_asked_and_not_as_the_model_samples(store):
    beams = {"model": WRITER, "prompt": "Hello", "use_beam_search": True, "best_of": 4, "length_penalty": 0.5}
    async with writing(store, sampling_defaults=MODELS) as (client, node, engine):
        for placement in node.manager.models[0].placements:
            object.__setattr__(placement, "lacks", NOTHING)
        async with client.post("/v1/completions", json=beams | {"n": 2}) as reply:
            assert len((await reply.json())["choices"]) == 2
        jobs = [job.sampling for job in engine.jobs]
        assert sorted((job.beams, job.rank, job.length_penalty) for job in jobs) == [(4, 0, 0.5), (4, 1, 0.5)]
        assert {(job.temperature, job.repetition_penalty) for job in jobs} == {(0.0, 1.0)}
        async with client.post("/v1/completions", json=beams | {"guided_choice": ["yes"]}) as reply:
            assert "the form of an answer is not enforced" in await reply.text()


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


# What Ollama itself would do without being asked.
DEFAULTS = {
    "mirostat": 0,
    "mirostat_eta": 0.1,
    "mirostat_tau": 5.0,
    "tfs_z": 1.0,
    "typical_p": 1.0,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "penalize_newline": True,
    "num_thread": 8,
}


def read(**options):
    options = OllamaOptions.model_validate(options)
    sift(options, Ignored(), "ignore")
    return parameters.sampling(vars(options))


@pytest.mark.parametrize("given", [DEFAULTS, *({name: value} for name, value in DEFAULTS.items())], ids=str)
def test_defaults_ask_for_nothing(given):
    assert structs.replace(read(**given), **EDGE_ONLY) == Sampling()
