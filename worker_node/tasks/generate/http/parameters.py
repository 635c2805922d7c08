"""One table: which parameter of each dialect is which field of `Sampling`.

A parameter means the same through every dialect because it is read here and nowhere else. A parameter that is absent or
null is left open: the model's own default counts, or Ollama's in its dialect (`OLLAMA_DEFAULTS`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from worker_node.core.errors import BadRequest
from worker_node.http.body import DialectBody
from worker_node.tasks.generate.messages import Sampling

MAX_STOP_SEQUENCES = 16
MAX_STOP_CHARACTERS = 256
_SEEDS = 2**63
_FIELDS = Sampling.__struct_fields__
# Below it only ties are sampled. Engines divide by the temperature in float32, which overflows below about 1e-37.
_LEAST_TEMPERATURE = 1e-6
# Engines want it above 0 in float32.
_LEAST_TOP_P = 1e-6
# Engines want it below 1 in float32, to which larger values are rounded.
_MOST_MIN_P = 1 - 1e-6
# Logits are divided by it: from here down, nothing but what was said before is left.
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=10)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class SamplingBody(DialectBody):
    """The parameters that OpenAI's and Ollama's bodies share: theirs, and what local servers add."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """A field of `Sampling`, and how a dialect's value for it is read."""

    field: str
    read: Callable[[Any, str], Any]


def _as_it_is(value: Any, _name: str) -> Any:
    return value


def _temperature(value: float, _name: str) -> float:
    return 0.0 if value < _LEAST_TEMPERATURE else value


def _top_k(value: int, _name: str) -> int:
    # vLLM's and llama.cpp's word for all tokens; here it is 0, as in Ollama.
    return 0 if value == -1 else value


def _tuple(value: list[int], _name: str) -> tuple[int, ...]:
    return tuple(value)


def _seed(value: int, _name: str) -> int | None:
    # −1 is Ollama's and llama.cpp's word for a seed of the node's choice; others are taken modulo the engine's range.
    return None if value == -1 else value % _SEEDS


def _max_new_tokens(value: int, _name: str) -> int | None:
    # Ollama: 0 and −1 no limit, −2 until the context is full; here the context is the limit in any case.
    return None if value <= 0 else value


def _n_predict(value: int, name: str) -> int | None:
    if value == 0:
        raise BadRequest(f"{name}: 0 asks for no token; send 1 or more, or -1 for no limit", param=name)
    return _max_new_tokens(value, name)


def _min_p(value: float, _name: str) -> float:
    return min(value, _MOST_MIN_P)


def _stop(value: str | list[str], name: str) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(value)
    if len(stops) > MAX_STOP_SEQUENCES:
        raise BadRequest(f"{len(stops)} stop sequences; at most {MAX_STOP_SEQUENCES} are taken", param=name)
    if not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise BadRequest(f"a stop sequence has 1 to {MAX_STOP_CHARACTERS} characters", param=name)
    return stops


_SHARED = {
    "temperature": Parameter("temperature", _temperature),
    "top_p": Parameter("top_p", _as_it_is),
    "top_k": Parameter("top_k", _top_k),
    "min_p": Parameter("min_p", _min_p),
    "seed": Parameter("seed", _seed),
    "stop": Parameter("stop", _stop),
    "presence_penalty": Parameter("presence_penalty", _as_it_is),
    "frequency_penalty": Parameter("frequency_penalty", _as_it_is),
    "ignore_eos": Parameter("ignore_eos", _as_it_is),
}
OPENAI: Mapping[str, Parameter] = _SHARED | {
    "max_tokens": Parameter("max_new_tokens", _max_new_tokens),
    "max_completion_tokens": Parameter("max_new_tokens", _max_new_tokens),
    "max_output_tokens": Parameter("max_new_tokens", _max_new_tokens),
    "repetition_penalty": Parameter("repetition_penalty", _as_it_is),
    # vLLM's
    "min_tokens": Parameter("min_tokens", _as_it_is),
    "stop_token_ids": Parameter("stop_token_ids", _tuple),
    # llama.cpp's
    "n_predict": Parameter("max_new_tokens", _n_predict),
    "repeat_penalty": Parameter("repetition_penalty", _as_it_is),
}
OLLAMA: Mapping[str, Parameter] = _SHARED | {
    "num_predict": Parameter("max_new_tokens", _max_new_tokens),
    "repeat_penalty": Parameter("repetition_penalty", _as_it_is),
}
ANTHROPIC: Mapping[str, Parameter] = {
    **{name: _SHARED[name] for name in ("temperature", "top_p", "top_k")},
    "max_tokens": Parameter("max_new_tokens", _max_new_tokens),
    "stop_sequences": Parameter("stop", _stop),
}
# What counts in Ollama's dialect where the request leaves a parameter open, whatever the model's own defaults are.
OLLAMA_DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}
NATIVE: Mapping[str, Parameter] = _SHARED | {"max_new_tokens": Parameter("max_new_tokens", _max_new_tokens)}


def sent_as(field: str, table: Mapping[str, Parameter], given: Mapping[str, Any]) -> str:
    """The parameter of the request that means this field of `Sampling`; the field's own name where none was sent."""
    return next((name for name, one in table.items() if one.field == field and given.get(name) is not None), field)


def sampling(table: Mapping[str, Parameter], given: Mapping[str, Any], **more: Any) -> Sampling:
    """Return how to sample, from the parameters among `given` that the dialect's table names.

    `more` are fields of `Sampling` that the dialect sets by itself. Raises BadRequest for a value out of range, and for
    two parameters that mean the same and differ.
    """
    fields: dict[str, Any] = {}
    for name, parameter in table.items():
        value = given.get(name)
        if value is None:
            continue
        read = parameter.read(value, name)
        if fields.setdefault(parameter.field, read) != read:
            raise BadRequest(f"{name} contradicts another parameter of the same meaning", param=name)
    if fields.get("top_p", 1) < _LEAST_TOP_P:
        # Nothing but the likeliest token is left, whatever the temperature.
        fields |= {"top_p": 1.0, "temperature": 0.0}
    # What the dialect sets by itself is as good as asked for.
    open_fields = tuple(name for name in _FIELDS if name not in fields and name not in more)
    return Sampling(**fields, **more, open_fields=open_fields)
