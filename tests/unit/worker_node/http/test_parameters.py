"""A parameter means the same through every dialect, and every field of Sampling can be had."""

import dataclasses

import numpy as np
import pytest
from pydantic import ValidationError

from worker_node.core.errors import BadRequest
from worker_node.core.types import Sampling
from worker_node.http import parameters
from worker_node.http.ollama import OllamaOptions
from worker_node.tasks.generate.http.fields import SamplingFields

# Each field of Sampling with a value, and what the dialects call it.
NAMES = [
    ("max_new_tokens", 7, {"OPENAI": "max_tokens", "OLLAMA": "num_predict", "NATIVE": "max_new_tokens"}),
    ("temperature", 0.5, "temperature"),
    ("top_p", 0.5, "top_p"),
    ("top_k", 5, "top_k"),
    ("min_p", 0.1, "min_p"),
    ("seed", 3, "seed"),
    ("stop", ["a", "b"], "stop"),
    ("ignore_eos", True, "ignore_eos"),
    ("presence_penalty", 0.5, "presence_penalty"),
    ("frequency_penalty", 0.5, "frequency_penalty"),
    ("repetition_penalty", 1.5, {"OPENAI": "repetition_penalty", "OLLAMA": "repeat_penalty"}),
    ("min_tokens", 4, {"OPENAI": "min_tokens"}),
    ("stop_token_ids", [7, 8], {"OPENAI": "stop_token_ids"}),
    ("include_stop", True, {"OPENAI": "include_stop_str_in_output"}),
    ("skip_special_tokens", False, {"OPENAI": "skip_special_tokens"}),
]
SET_BY_DIALECTS = {"logprobs", "choices", "open_fields", "dialect_defaults"}


@pytest.mark.parametrize(("field", "value", "names"), NAMES, ids=[row[0] for row in NAMES])
def test_a_parameter_means_the_same_in_every_dialect(field, value, names):
    names = dict.fromkeys(("OPENAI", "OLLAMA", "NATIVE"), names) if isinstance(names, str) else names
    read = {parameters.sampling(getattr(parameters, dialect), {name: value}) for dialect, name in names.items()}
    (sampling,) = read
    assert getattr(sampling, field) == (tuple(value) if isinstance(value, list) else value)


def test_every_field_has_a_name():
    assert {row[0] for row in NAMES} | SET_BY_DIALECTS >= {field.name for field in dataclasses.fields(Sampling)}


@pytest.mark.parametrize("table", [parameters.OPENAI, parameters.OLLAMA, parameters.NATIVE])
def test_a_value_of_another_kind_is_refused_by_its_name_even_where_no_body_has_typed_it(table):
    for name in table:
        for value in ({"5": 1}, [[]], object(), "\0" if name != "stop" else 5):
            with pytest.raises(BadRequest, match=f"^{name} should be "):
                parameters.sampling(table, {name: value})


@pytest.mark.parametrize("table", [parameters.OPENAI, parameters.OLLAMA, parameters.NATIVE])
def test_absent_and_null_are_the_nodes_default(table):
    assert parameters.sampling(table, {}) == parameters.sampling(table, dict.fromkeys(table)) == Sampling()


def test_the_words_for_no_limit_and_no_seed():
    assert parameters.sampling(parameters.OLLAMA, {"num_predict": -1, "seed": -1}) == Sampling()
    assert parameters.sampling(parameters.OPENAI, {"seed": -5}).seed == 2**63 - 5


def test_no_tokens_are_no_limit_for_ollama_and_refused_for_llama_cpp():
    assert parameters.sampling(parameters.OLLAMA, {"num_predict": 0}) == Sampling()
    assert parameters.sampling(parameters.OPENAI, {"n_predict": -1}) == Sampling()
    with pytest.raises(BadRequest, match="n_predict: 0 asks for no token"):
        parameters.sampling(parameters.OPENAI, {"n_predict": 0})


@pytest.mark.parametrize("table", [parameters.OPENAI, parameters.OLLAMA, parameters.NATIVE])
@pytest.mark.parametrize("min_p", [0.99999999, 1 - 2**-53])
def test_a_min_p_that_is_one_in_float32_stays_below_it(table, min_p):
    assert np.float32(0.99) < np.float32(parameters.sampling(table, {"min_p": min_p}).min_p) < np.float32(1)


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


def test_top_p_of_zero_is_greedy():
    assert parameters.sampling(parameters.OPENAI, {"top_p": 0, "temperature": 1.0}) == Sampling(temperature=0.0)


@pytest.mark.parametrize("temperature", [5e-324, 1e-44, 1e-39, 1e-37, 1e-8])
@pytest.mark.parametrize("table", [parameters.OPENAI, parameters.OLLAMA, parameters.NATIVE])
def test_a_temperature_by_which_an_engine_cannot_divide_is_greedy(table, temperature):
    assert parameters.sampling(table, {"temperature": temperature}) == Sampling(temperature=0.0)


def test_two_names_of_one_field_must_agree():
    assert parameters.sampling(parameters.OPENAI, {"max_tokens": 5, "max_completion_tokens": 5}).max_new_tokens == 5
    with pytest.raises(BadRequest):
        parameters.sampling(parameters.OPENAI, {"max_tokens": 5, "max_completion_tokens": 6})


@pytest.mark.parametrize("stop", ["", ["a", ""], ["x"] * 17, "x" * 257])
def test_stop_sequences_have_limits(stop):
    with pytest.raises(BadRequest):
        parameters.sampling(parameters.OPENAI, {"stop": stop})
