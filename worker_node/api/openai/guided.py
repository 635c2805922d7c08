"""Forms of the answer under the names that vLLM and llama.cpp's server give them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import orjson
from pydantic import Field

from worker_node.api.body import DialectBody
from worker_node.api.leniency import Table, Unsupported, hints
from worker_node.domain import AnswerSchema
from worker_node.errors import BadRequest
from worker_node.grammars.ebnf import literal

_NO_REGEX = "patterns are enforced within JSON strings only; send a JSON schema with type string and a pattern"
_NO_GRAMMAR = (
    "grammars of the caller's own are not compiled, as one mistake in it would end the engine; use a JSON schema"
)
_NO_TAGS = "tags of the caller's own cannot be enforced; offer tools, whose calls are"
_MAX_CHOICES = 256
_MAX_CHOICE = 1000

# The runtime's grammars hold no control characters but those of white space.
_PLAIN = r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]*$"
Choice = Annotated[str, Field(min_length=1, max_length=_MAX_CHOICE, pattern=_PLAIN)]
Choices = Annotated[list[Choice], Field(min_length=1)]
Schema = dict[str, Any] | str

REFUSED: Table = {
    "grammar": Unsupported(_NO_GRAMMAR),
    "guided_grammar": Unsupported(_NO_GRAMMAR),
    "guided_regex": Unsupported(_NO_REGEX),
    **hints("guided_decoding_backend", "guided_whitespace_pattern"),
}


class StructuredOutputs(DialectBody):
    """vLLM's newer name for the forms of an answer."""

    rules: ClassVar[Table] = {
        "grammar": Unsupported(_NO_GRAMMAR),
        "regex": Unsupported(_NO_REGEX),
        "structural_tag": Unsupported(_NO_TAGS),
        **hints("disable_additional_properties", "disable_any_whitespace", "disable_fallback", "whitespace_pattern"),
    }

    choice: Annotated[Choices, Field(max_length=_MAX_CHOICES)] | None = None
    choices: Annotated[Choices, Field(max_length=_MAX_CHOICES)] | None = None
    json_schema: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool | None = None


class GuidedFields(DialectBody):
    """What vLLM's and llama.cpp's servers take beside, or in place of, `response_format`."""

    guided_choice: Annotated[Choices, Field(max_length=_MAX_CHOICES)] | None = None
    guided_json: Schema | None = None
    json_schema: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None

    def held_to(self, wanted: AnswerSchema | None) -> AnswerSchema | str | None:
        """The form of the answer: a schema, a grammar, or None; `wanted` is what another field asks for.

        Raises BadRequest for more than one.
        """
        more = self.structured_outputs or StructuredOutputs()
        found = [wanted] if wanted is not None else []
        forms: list[tuple[str, Any]] = [
            ("guided_json", self.guided_json),
            ("json_schema", self.json_schema),
            ("structured_outputs.json", more.json_schema),
        ]
        schemas: list[AnswerSchema | str] = [_schema(value, where) for where, value in forms if value is not None]
        if more.json_object:
            schemas.append(AnswerSchema({"type": "object"}, "structured_outputs.json_object"))
        choices = [_choice(one) for one in (self.guided_choice, more.choice, more.choices) if one is not None]
        everything = [*found, *schemas, *choices]
        if len(everything) > 1:
            raise BadRequest("the answer can have one form only: leave the others out", param="structured_outputs")
        return everything[0] if everything else None


def _schema(given: Schema, where: str) -> AnswerSchema:
    if isinstance(given, str):
        try:
            given = orjson.loads(given)
        except orjson.JSONDecodeError:
            given = None  # type: ignore[assignment]
        if not isinstance(given, dict):
            raise BadRequest(f"{where}: the text is no JSON schema", param=where)
    return AnswerSchema(given, where, strict=False)


def _choice(texts: list[str]) -> str:
    """The grammar of exactly one of the texts."""
    return "root ::= " + " | ".join(map(literal, dict.fromkeys(texts))) + "\n"
