"""From a request to what an engine is given: the prompt's tokens, the grammar, and who reads the answer."""

from __future__ import annotations

from dataclasses import dataclass

from worker_node.dialogue.formats import ToolFormat, declaration, tool_format, with_instructions
from worker_node.dialogue.reasoning import ReasoningFirst
from worker_node.dialogue.tools import Parser
from worker_node.domain import GenerationRequest, Message, TokenIds, ToolUse
from worker_node.errors import BadRequest, UnsupportedParameter
from worker_node.serving.registry import GenerationModel


@dataclass(frozen=True, slots=True)
class Prepared:
    """`parser` tells tool calls and reasoning from the answer; None where all is text."""

    tokens: list[int]
    grammar: str | None = None
    parser: Parser | None = None


def prepare(model: GenerationModel, request: GenerationRequest, grammar: str | None) -> Prepared:
    """Return the prompt as the model takes it, and the grammar that was compiled for its answer.

    Raises BadRequest, ContextLengthExceeded, UnsupportedParameter.
    """
    if isinstance(request.prompt, tuple):
        prepared = _conversation(model, request, request.prompt, grammar)
    elif isinstance(request.prompt, TokenIds):
        prepared = Prepared(model.tokenizer.check_ids(request.prompt.ids), grammar)
    else:
        prepared = Prepared(model.tokenizer.encode_prompt(request.prompt), grammar)
    if not prepared.tokens:
        raise BadRequest("the prompt is empty: there is nothing to continue", param="prompt")
    return prepared


def _conversation(
    model: GenerationModel, request: GenerationRequest, messages: tuple[Message, ...], grammar: str | None
) -> Prepared:
    chat = model.tokenizer
    use = request.tool_use
    if request.think and not chat.can_think:
        raise UnsupportedParameter(f"think: {model.id} does not support thinking", param="think")
    wanted = tool_format(model.installed.family)
    if use is not None and not use.forced and request.grammar is not None:
        wanted = wanted.beside_json
    # A template declares tools in the format that its model was trained on.
    native = use is not None and chat.takes_tools and wanted == tool_format(model.installed.family)
    history = list(messages) if use is None or native else with_instructions(messages, use.tools, wanted)
    if not chat.takes_tools or (use is not None and not native):
        history = [_in_words(message, wanted) for message in history]
    declarations = [declaration(tool) for tool in use.tools] if use is not None and native else None
    text = chat.render(history, declarations, request.think)
    if use is not None and use.forced:
        # The answer begins where a call does, so that the model writes in the form that it was trained on.
        text += wanted.opening
        return Prepared(chat.encode_rendered(text), grammar, wanted.forced_parser(_names(use)))
    if use is not None and grammar is not None:
        return Prepared(chat.encode_rendered(text), grammar, wanted.free_parser(_names(use)))
    answer = wanted.parser(_names(use)) if use is not None else None
    if not request.split_reasoning or grammar is not None:
        return Prepared(chat.encode_rendered(text), grammar, answer)
    begun = text.rstrip().endswith("<think>")
    return Prepared(chat.encode_rendered(text), grammar, ReasoningFirst(answer, begun=begun))


def _names(use: ToolUse) -> frozenset[str]:
    return frozenset(tool.name for tool in use.tools)


def _in_words(message: Message, wanted: ToolFormat) -> Message:
    """An earlier turn for a template that knows of no calls."""
    if message.tool_calls:
        text = "\n".join(part for part in (message.content, wanted.written(message.tool_calls)) if part)
        return Message(message.role, text)
    return message
