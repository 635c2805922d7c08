"""Tools, the choice among them, and the form of the answer, as OpenAI's bodies write them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from worker_node.api.body import DialectBody
from worker_node.domain import AnswerSchema, Tool, ToolUse
from worker_node.errors import BadRequest

MAX_TOOLS = 128
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionTool(DialectBody):
    """A function that the model may ask to be called."""

    class Function(DialectBody):
        """Its name, what it does, and the JSON schema of its arguments."""

        name: ToolName
        description: str | None = None
        parameters: dict[str, Any] | None = None
        strict: bool | None = None

    type: Literal["function"]
    function: Function


class NamedChoice(DialectBody):
    """This function is to be called."""

    class Function(DialectBody):
        """Its name."""

        name: ToolName

    type: Literal["function"]
    function: Function


Choice = Literal["none", "auto", "required"] | NamedChoice


class TextFormat(DialectBody):
    """The answer is free text."""

    type: Literal["text"]


class JsonObjectFormat(DialectBody):
    """The answer is a JSON object."""

    type: Literal["json_object"]


class JsonSchema(DialectBody):
    """A schema, under the field name that OpenAI gives it."""

    name: ToolName
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(DialectBody):
    """The answer is JSON that is valid against the schema; it is always held to that, strict or not."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def schema_of(wanted: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> AnswerSchema | None:
    """What the answer must match."""
    if isinstance(wanted, JsonSchemaFormat):
        return AnswerSchema(wanted.json_schema.json_schema, "response_format.json_schema.schema")
    return AnswerSchema({"type": "object"}, "response_format") if isinstance(wanted, JsonObjectFormat) else None


def domain_tool(function: FunctionTool.Function) -> Tool:
    """The tool as the node has it; without a schema it takes no arguments."""
    return Tool(function.name, function.description or "", function.parameters or {"type": "object", "properties": {}})


def tool_use(tools: list[Tool], choice: str | None, named: str | None, *, single: bool) -> ToolUse | None:
    """The tools that the model is told of, and whether it must call one.

    `choice` is none, auto or required; `named` the one function that must be called.
    Raises BadRequest if it is not among the tools.
    """
    if len({tool.name for tool in tools}) != len(tools):
        raise BadRequest("two tools have the same name", param="tools")
    tools = [replace(tool, path=f"tools[{index}].function.parameters") for index, tool in enumerate(tools)]
    if named is not None:
        chosen = tuple(tool for tool in tools if tool.name == named)
        if not chosen:
            raise BadRequest(f"tool_choice: there is no tool {named!r} among the tools", param="tool_choice")
        return ToolUse(chosen, forced=True, single=True)
    if choice == "required" and not tools:
        raise BadRequest("tool_choice: required, but there are no tools", param="tool_choice")
    if choice == "none" or not tools:
        return None
    return ToolUse(tuple(tools), forced=choice == "required", single=single)
