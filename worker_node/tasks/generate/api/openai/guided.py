"""Forms of the answer under the names that vLLM and llama.cpp's server give them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import Field

from worker_node.api.body import DialectBody
from worker_node.api.leniency import Table, Unsupported, hints
from worker_node.domain import AnswerSchema, GivenForm
from worker_node.errors import BadRequest
from worker_node.structured_output.ebnf import one_text

_NO_LAZY = (
    "a grammar counts from the first token of the answer; offer tools, whose calls are enforced from where they begin"
)
_NO_TAGS = "tags of the caller's own cannot be enforced; offer tools, whose calls are"
_MAX_CHOICES = 256
_MAX_CHOICE = 1000

# The runtime's grammars hold no control characters but those of white space.
_PLAIN = r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]*$"
Choice = Annotated[str, Field(min_length=1, max_length=_MAX_CHOICE, pattern=_PLAIN)]
Choices = Annotated[list[Choice], Field(min_length=1)]
Schema = dict[str, Any] | str
Answer = AnswerSchema | GivenForm | str
_REGEX: Literal["regex"] = "regex"
_GRAMMAR: Literal["grammar"] = "grammar"

REFUSED: Table = {
    "grammar_triggers": Unsupported(_NO_LAZY),
    "grammar_lazy": Unsupported(_NO_LAZY),
    **hints("guided_decoding_backend", "guided_whitespace_pattern"),
}


class StructuredOutputs(DialectBody):
    """vLLM's newer name for the forms of an answer."""

    rules: ClassVar[Table] = {
        "structural_tag": Unsupported(_NO_TAGS),
        **hints("disable_additional_properties", "disable_any_whitespace", "disable_fallback", "whitespace_pattern"),
    }

    choice: Annotated[Choices, Field(max_length=_MAX_CHOICES)] | None = None
    choices: Annotated[Choices, Field(max_length=_MAX_CHOICES)] | None = None
    json_schema: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None


class GuidedFields(DialectBody):
    """What vLLM's and llama.cpp's servers take beside, or in place of, `response_format`."""

    guided_choice: Annotated[Choices, Field(max_length=_MAX_CHOICES)] | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None

    def held_to(self, wanted: AnswerSchema | None) -> Answer | None:
        """The form of the answer, or None; `wanted` is what another field asks for.

        Raises BadRequest for more than one.
        """
        more = self.structured_outputs or StructuredOutputs()
        found = [wanted] if wanted is not None else []
        forms: list[tuple[str, Any]] = [
            ("guided_json", self.guided_json),
            ("json_schema", self.json_schema),
            ("structured_outputs.json", more.json_schema),
        ]
        schemas = [_schema(value, where) for where, value in forms if value is not None]
        if more.json_object:
            schemas.append(AnswerSchema({"type": "object"}, "structured_outputs.json_object"))
        choices = [_choice(one) for one in (self.guided_choice, more.choice, more.choices) if one is not None]
        texts = [
            GivenForm(kind, source, where)
            for kind, where, source in (
                (_REGEX, "guided_regex", self.guided_regex),
                (_REGEX, "structured_outputs.regex", more.regex),
                (_GRAMMAR, "guided_grammar", self.guided_grammar),
                (_GRAMMAR, "grammar", self.grammar),
                (_GRAMMAR, "structured_outputs.grammar", more.grammar),
            )
            # llama.cpp's clients send an empty grammar for none.
            if source
        ]
        everything: list[Answer] = [*found, *schemas, *choices, *texts]
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
    return f"root ::= {one_text(texts)}\n"
