"""`options`, `keep_alive` and `format` of Ollama's bodies."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from worker_node.api import parameters
from worker_node.api.body import DialectBody
from worker_node.api.leniency import Table
from worker_node.api.ollama.table import OPTIONS
from worker_node.api.parameters import RepetitionPenalty
from worker_node.core.errors import UnsupportedParameter
from worker_node.core.types import AnswerSchema, Sampling

_NO_PENALTY = {"repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}

Format = Literal["", "json"] | dict[str, Any]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class OllamaOptions(DialectBody):
    """Sampling options. Those on memory and threads, which this node uses in its own way, change no answer.

    Clients send Ollama's defaults along: a refused option at the value that asks for nothing is passed over.
    """

    rules: ClassVar[Table] = OPTIONS

    num_predict: Annotated[int, Field(ge=-2, le=1_000_000)] | None = None
    num_ctx: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    ignore_eos: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        nothing = {"penalize_newline"}
        if not fields.get("mirostat"):
            nothing |= {"mirostat_eta", "mirostat_tau"}
        penalised = any(fields.get(name) not in (None, value) for name, value in _NO_PENALTY.items())
        if not penalised:
            nothing.add("repeat_last_n")
        elif fields.get("penalize_newline") is False:
            raise UnsupportedParameter(
                "penalize_newline: this engine penalises all tokens alike", param="penalize_newline"
            )
        return {name: value for name, value in fields.items() if name not in nothing}

    def sampling(self) -> Sampling:
        """How to sample. Raises BadRequest."""
        given = self.model_dump()
        return parameters.sampling(parameters.OLLAMA, given, dialect_defaults=parameters.OLLAMA_DEFAULTS)


def schema_of(wanted: Format | None) -> AnswerSchema | None:
    """What the answer must match."""
    if not wanted:
        return None
    # Ollama passes over what it cannot enforce, and has no word for strict.
    return AnswerSchema({"type": "object"} if isinstance(wanted, str) else wanted, "format", strict=False)
