"""Sampling parameters: their ranges, and which parameter of which dialect is which field of `Sampling`.

A parameter means the same through every dialect because it is read here and nowhere else. A parameter that is absent or
null is left open: the model's own default counts, or Ollama's in its dialect (`OLLAMA_DEFAULTS`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from worker_node.core.errors import BadRequest
from worker_node.http.body import DialectBody
from worker_node.tasks.generate.messages import Sampling

MAX_STOP_SEQUENCES = 16
MAX_STOP_CHARACTERS = 256
_SEEDS = 2**63
# Below it only ties are sampled. Engines divide by the temperature in float32, which overflows below about 1e-37.
_LEAST_TEMPERATURE = 1e-6
# Engines want it above 0 in float32.
_LEAST_TOP_P = 1e-6
# Engines want it below 1 in float32, to which larger values are rounded.
_MOST_MIN_P = 1 - 1e-6

Length = Annotated[int, Field(ge=1, le=1_000_000)]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=1_000_000)]
ContextLength = Annotated[int, Field(ge=1, le=10_000_000)]
# Logits are divided by it: from here down, nothing but what was said before is left.
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=10)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class SamplingBody(DialectBody):
    """The parameters that OpenAI's and Ollama's bodies share: theirs, and what local servers add."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


# The field of `Sampling` that each parameter sets.
FIELDS: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "stop_sequences": "stop",  # Anthropic
    "stop_token_ids": "stop_token_ids",  # vLLM
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",  # vLLM
    "repeat_penalty": "repetition_penalty",  # llama.cpp, Ollama
    "ignore_eos": "ignore_eos",
    "min_tokens": "min_tokens",  # vLLM
    "max_new_tokens": "max_new_tokens",  # native
    "max_tokens": "max_new_tokens",  # OpenAI, Anthropic
    "max_completion_tokens": "max_new_tokens",  # OpenAI
    "max_output_tokens": "max_new_tokens",  # OpenAI's Responses
    "n_predict": "max_new_tokens",  # llama.cpp
    "num_predict": "max_new_tokens",  # Ollama
}
# What counts in Ollama's dialect where the request leaves a parameter open, whatever the model's own defaults are.
OLLAMA_DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}


def sent_as(field: str, given: Mapping[str, Any]) -> str:
    """The parameter of the request that means this field of `Sampling`; the field's own name where none was sent."""
    return next((name for name, one in FIELDS.items() if one == field and given.get(name) is not None), field)


def sampling(given: Mapping[str, Any], **more: Any) -> Sampling:
    """Return how to sample, from the parameters among `given`, the fields of a body.

    `more` are fields of `Sampling` that the dialect sets by itself. Raises BadRequest for a value out of range, and for
    two parameters that mean the same and differ.
    """
    fields: dict[str, Any] = {}
    for name, field in FIELDS.items():
        if given.get(name) is None:
            continue
        value = _value(field, name, given[name])
        if fields.setdefault(field, value) != value:
            raise BadRequest(f"{name} contradicts another parameter of the same meaning", param=name)
    if fields.get("top_p", 1) < _LEAST_TOP_P:
        # Nothing but the likeliest token is left, whatever the temperature.
        fields |= {"top_p": 1.0, "temperature": 0.0}
    # What the dialect sets by itself is as good as asked for.
    open_fields = tuple(name for name in Sampling.__struct_fields__ if name not in fields and name not in more)
    return Sampling(**fields, **more, open_fields=open_fields)


def _value(field: str, name: str, given: Any) -> Any:
    """The value of a field of `Sampling`, given by a parameter of that name."""
    value = given
    match field:
        case "temperature" if given < _LEAST_TEMPERATURE:
            value = 0.0
        case "top_k":
            # vLLM's and llama.cpp's -1 for all tokens is 0 here, as in Ollama.
            value = max(given, 0)
        case "min_p":
            value = min(given, _MOST_MIN_P)
        case "seed":
            # Ollama and llama.cpp: -1 is a seed of the node's choice; others are taken modulo the engine's range.
            value = None if given == -1 else given % _SEEDS
        case "stop":
            value = _stop_sequences(given, name)
        case "stop_token_ids":
            value = tuple(given)
        case "max_new_tokens" if given <= 0:
            if name == "n_predict" and given == 0:
                raise BadRequest(f"{name}: 0 asks for no token; send 1 or more, or -1 for no limit", param=name)
            # Ollama: 0 and -1 no limit, -2 until the context is full; here the context is the limit in any case.
            value = None
    return value


def _stop_sequences(given: str | list[str], name: str) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given)
    if len(stops) > MAX_STOP_SEQUENCES:
        raise BadRequest(f"{len(stops)} stop sequences; at most {MAX_STOP_SEQUENCES} are taken", param=name)
    if not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise BadRequest(f"a stop sequence has 1 to {MAX_STOP_CHARACTERS} characters", param=name)
    return stops
