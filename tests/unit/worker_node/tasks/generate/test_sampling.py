"""Every value that a dialect's schema admits is one that the engine takes."""

import math

import msgspec
import openvino_genai as genai
import pytest
from msgspec import structs

from worker_node.tasks.generate.http import parameters
from worker_node.tasks.generate.http.native import InferenceBody
from worker_node.tasks.generate.http.ollama import OllamaOptions
from worker_node.tasks.generate.http.parameters import SamplingFields
from worker_node.tasks.generate.http.responses import ResponsesBody
from worker_node.tasks.generate.messages import EDGE_ONLY, GenerateJob, Sampling
from worker_node.tasks.generate.sampling import generation_config

BODIES = (SamplingFields, ResponsesBody, OllamaOptions, InferenceBody)


def extremes(schema):
    kind = next(form for form in schema.get("anyOf", [schema]) if form.get("type") in {"integer", "number"})
    whole = kind["type"] == "integer"
    if "minimum" in kind:
        yield kind["minimum"]
    if "exclusiveMinimum" in kind:
        yield kind["exclusiveMinimum"] + 1 if whole else math.nextafter(kind["exclusiveMinimum"], math.inf)
    if "maximum" in kind:
        yield kind["maximum"]
    if "exclusiveMaximum" in kind:
        yield kind["exclusiveMaximum"] - 1 if whole else math.nextafter(kind["exclusiveMaximum"], -math.inf)


def admitted():
    for body in BODIES:
        for name, schema in body.model_json_schema()["properties"].items():
            kinds = {form.get("type") for form in schema.get("anyOf", [schema])}
            if name in parameters.FIELDS and kinds & {"integer", "number"}:
                for value in extremes(schema):
                    yield pytest.param(name, value, id=f"{body.__name__}-{name}-{value:.6g}")


def job_for(sampling):
    return GenerateJob(
        id=1,
        tokens=b"\0\0\0\0",
        max_new_tokens=sampling.max_new_tokens or 16,
        deadline=math.inf,
        sampling=structs.replace(sampling, **EDGE_ONLY),
    )


@pytest.mark.parametrize(("name", "value"), list(admitted()))
def test_the_engine_takes_the_least_and_the_greatest_value(name, value):
    given = {"temperature": 0.8, name: value}
    try:
        sampling = parameters.sampling(given)
    except parameters.BadRequest:
        return  # told to the caller before any engine is asked
    generation_config(job_for(sampling), genai.GenerationConfig()).validate()


def test_beams_are_searched_with_their_penalty_of_length():
    config = generation_config(job_for(Sampling(beams=4, length_penalty=0.5)), genai.GenerationConfig())
    config.validate()
    assert (config.num_beams, config.num_return_sequences, config.length_penalty) == (4, 4, 0.5)


@pytest.mark.parametrize("seed", [0, 7])
def test_every_seed_that_is_given_is_the_engines(seed):
    config = generation_config(job_for(Sampling(temperature=0.8, seed=seed)), genai.GenerationConfig())
    assert config.rng_seed == seed


def test_an_engine_is_sent_no_field_that_only_the_edge_process_uses():
    sampling = Sampling(
        max_new_tokens=9, stop=("end",), token_ids=True, choices=3, open_fields=("seed",), dialect_defaults={}
    )
    job = job_for(sampling)
    assert msgspec.json.decode(msgspec.json.encode(job.sampling)) == {}
    sampled = job_for(msgspec.structs.replace(sampling, seed=5, stop_token_ids=(7,)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampled), type=GenerateJob) == sampled
    assert msgspec.json.decode(msgspec.json.encode(sampled.sampling)) == {"seed": 5, "stop_token_ids": [7]}
