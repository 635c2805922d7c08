"""Ollama's options: what asks for nothing is passed over, what would change the answer and cannot be had is refused."""

import json

import pytest
from pydantic import ValidationError

from worker_node.core.errors import UnsupportedParameter
from worker_node.http.leniency import Ignored, sift
from worker_node.http.ollama import OllamaOptions

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
    options = OllamaOptions.read(json.dumps(options).encode())
    sift(options, Ignored(), "ignore")
    return options


@pytest.mark.parametrize("given", [DEFAULTS, *({name: value} for name, value in DEFAULTS.items())], ids=str)
def test_defaults_ask_for_nothing(given):
    assert read(**given).sampling() == read().sampling()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mirostat", {"mirostat": 1}),
        ("tfs_z", {"tfs_z": 0.5}),
        ("typical_p", {"typical_p": 0.5}),
        ("repeat_last_n", {"repeat_last_n": 64, "repeat_penalty": 1.1}),
        ("repeat_last_n", {"repeat_last_n": 64, "frequency_penalty": 0.5}),
        ("penalize_newline", {"penalize_newline": False, "presence_penalty": 1}),
    ],
)
def test_what_would_change_the_answer_is_refused(name, options):
    with pytest.raises(UnsupportedParameter) as refused:
        read(**options)
    assert refused.value.param == name


def test_penalties_over_the_whole_context_are_what_there_is():
    options = {"repeat_penalty": 1.1, "repeat_last_n": -1, "penalize_newline": True}
    assert read(**options).sampling() == read(repeat_penalty=1.1).sampling()


@pytest.mark.parametrize("value", [[], {}, "high"])
def test_a_value_of_another_type_is_told(value):
    with pytest.raises(ValidationError):
        read(repeat_penalty=value)
