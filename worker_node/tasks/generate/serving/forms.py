"""The form that an answer is held to, from the tools and the schema of a request."""

from __future__ import annotations

from collections.abc import Sequence

from worker_node.core.types import AnswerSchema, GivenForm, Tool
from worker_node.dialogue.formats import tool_format
from worker_node.dialogue.tools import CLOSING, OPENING
from worker_node.structured_output.form import CallForm, Form, FormPart, GivenText
from worker_node.tasks.generate.serving.requests import GenerationRequest


def answer_form(family: str, request: GenerationRequest) -> Form | None:
    """A forced call, JSON that matches a schema, either of calls and that JSON, text with calls in it, or a text of a
    form that the caller gave; None where none counts.

    Calls are written as that family of models writes them.
    """
    wanted = request.grammar
    answer = FormPart(wanted.schema, wanted.where, wanted.strict) if isinstance(wanted, AnswerSchema) else None
    use = request.tool_use
    if isinstance(wanted, GivenForm) and not (use is not None and use.forced):
        return Form(text=GivenText(wanted.kind, wanted.source, wanted.where))
    if use is None or not isinstance(request.prompt, tuple):
        return None if answer is None else Form(answer)
    form = tool_format(family)
    if use.forced:
        return Form(calls=CallForm(_parts(use.tools), form.arguments))
    tags = (OPENING, CLOSING)
    if answer is None:
        if not _may_hold_calls(request):
            return None
        parts = {tool.name: FormPart(tool.parameters, tool.path, strict=False) for tool in use.tools}
        return Form(
            calls=CallForm(
                parts, form.arguments, tags if form.opening else None, form.listed, not use.single, optional=True
            )
        )
    form = form.beside_json
    return Form(answer, CallForm(_parts(use.tools), form.arguments, tags, form.listed, not use.single))


def _may_hold_calls(request: GenerationRequest) -> bool:
    """Whether calls in free text can be held: after one there may be nothing to write but the end."""
    return request.grammar is None and not request.sampling.min_tokens and not request.sampling.ignore_eos


def _parts(tools: Sequence[Tool]) -> dict[str, FormPart]:
    return {tool.name: FormPart(tool.parameters, tool.path, tool.strict) for tool in tools}
