"""From a request to an engine's input: the prompt's tokens, the grammar, and the parser of the answer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from worker_node.core.errors import BadRequest, ContextLengthExceeded, UnsupportedParameter
from worker_node.core.types import Message, Sampling, TokenIds, ToolUse
from worker_node.dialogue.formats import ToolFormat, declaration, tool_format, with_instructions
from worker_node.dialogue.reasoning import ReasoningFirst
from worker_node.dialogue.tools import Parser
from worker_node.tasks.generate.messages import PicturePrompt, RawPicture
from worker_node.tasks.generate.serving.large_texts import LargeTexts
from worker_node.tasks.generate.serving.model import GenerationModel
from worker_node.tasks.generate.serving.pictures import picture_prompt, with_tags, without_tags
from worker_node.tasks.generate.serving.requests import GenerationRequest
from worker_node.tasks.generate.serving.sampling_defaults import completed

_NOTHING_SEEN: Mapping[str, RawPicture] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Prepared:
    """`parser` separates tool calls and reasoning from the answer; None where all of it is text.

    `seen` is the prompt for an engine with vision; `tokens` are then those of its text.
    """

    tokens: list[int]
    grammar: str | None = None
    parser: Parser | None = None
    seen: PicturePrompt | None = None

    @property
    def count(self) -> int:
        """Tokens of the prompt; of pictures an estimate."""
        return len(self.tokens) + (0 if self.seen is None else self.seen.picture_tokens)


async def prepare(
    texts: LargeTexts,
    model: GenerationModel,
    request: GenerationRequest,
    grammar: str | None,
    pixels: Mapping[str, RawPicture] = _NOTHING_SEEN,
) -> Prepared:
    """Return the prompt as the model takes it, and the grammar that was compiled for its answer.

    `pixels` are those of the request's pictures, by the fields that hold them.

    Raises BadRequest, ContextLengthExceeded, UnsupportedParameter; for a large prompt what `LargeTexts` raises.
    """
    if isinstance(request.prompt, tuple):
        turns = request.prompt
        if request.drop_oldest:
            turns = await _newest(texts, model, request, turns, grammar, pixels)
        prepared = await _conversation(texts, model, request, turns, grammar, pixels)
    elif isinstance(request.prompt, TokenIds):
        ids = model.tokenizer.check_ids(request.prompt.ids)
        last = kept(model, request)
        prepared = Prepared(ids if last is None else ids[-last:], grammar)
    else:
        deadline, last = request.context.deadline, kept(model, request)
        ids = await texts.encode(model.tokenizer, request.prompt, deadline=deadline, last=last)
        seen = None if model.pictures is None else PicturePrompt(request.prompt, [], 0)
        prepared = Prepared(ids, grammar, seen=seen)
    if not prepared.tokens:
        raise BadRequest("the prompt is empty: there is nothing to continue", param="prompt")
    return prepared


async def _conversation(
    texts: LargeTexts,
    model: GenerationModel,
    request: GenerationRequest,
    messages: tuple[Message, ...],
    grammar: str | None,
    pixels: Mapping[str, RawPicture],
) -> Prepared:
    if model.pictures is not None:
        return await _with_pictures(texts, model, request, messages, pixels)
    chat, use = model.tokenizer, request.tool_use
    if request.think and not chat.can_think:
        raise UnsupportedParameter(f"think: {model.id} does not support thinking", param="think")
    calls = tool_format(model.installed.family)
    if use is not None and not use.forced and request.grammar is not None:
        calls = calls.beside_json
    history, declarations = _with_tools(model, use, calls, messages)
    last, deadline = kept(model, request), request.context.deadline
    text = await texts.render(
        chat,
        history,
        declarations,
        request.think,
        request.rendering,
        bounded=last is None,
        deadline=deadline,
    )
    if use is not None and use.forced:
        # The answer begins where a call does, so that the model writes in the form that it was trained on.
        text += calls.opening
    tokens = await texts.encode(chat, text, special=False, last=last, deadline=deadline)
    return Prepared(tokens, grammar, _parser(request, calls, text))


def _with_tools(
    model: GenerationModel, use: ToolUse | None, calls: ToolFormat, messages: tuple[Message, ...]
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """The messages for the template, and the tools for one that declares them; other tools are in the messages."""
    chat = model.tokenizer
    # A template declares tools in the format that its model was trained on.
    native = use is not None and chat.takes_tools and calls == tool_format(model.installed.family)
    history = list(messages) if use is None or native else with_instructions(messages, use.tools, calls)
    if not chat.takes_tools or (use is not None and not native):
        history = [_in_words(message, calls) for message in history]
    return history, [declaration(tool) for tool in use.tools] if use is not None and native else None


def _parser(request: GenerationRequest, calls: ToolFormat, rendered: str) -> Parser | None:
    """The parser of the answer to a rendered conversation; None where all of the answer is text."""
    use = request.tool_use
    if use is not None and use.forced:
        return calls.forced_parser(_names(use))
    if use is not None and request.grammar is not None:
        return calls.free_parser(_names(use))
    answer = calls.parser(_names(use)) if use is not None else None
    if not request.split_reasoning or request.grammar is not None:
        return answer
    return ReasoningFirst(answer, begun=rendered.rstrip().endswith("<think>"))


async def _with_pictures(
    texts: LargeTexts,
    model: GenerationModel,
    request: GenerationRequest,
    messages: tuple[Message, ...],
    pixels: Mapping[str, RawPicture],
) -> Prepared:
    """The prompt of a model that sees, which has neither tools nor grammars here."""
    chat, deadline = model.tokenizer, request.context.deadline
    rules = model.pictures
    if rules is None:
        raise RuntimeError("a model without vision got a request for one with it")
    if request.think and not chat.can_think:
        raise UnsupportedParameter(f"think: {model.id} does not support thinking", param="think")
    history, pictures = with_tags(messages)
    text = await texts.render(chat, history, None, request.think, request.rendering, deadline=deadline)
    tokens = await texts.encode(chat, without_tags(text, len(pictures)), special=False, deadline=deadline)
    # The engine's tokenizer adds what a text begins with, and the template has written it already.
    seen = picture_prompt(text.removeprefix(chat.opening()), pictures, pixels, rules)
    reader = ReasoningFirst(None, begun=text.rstrip().endswith("<think>")) if request.split_reasoning else None
    return Prepared(tokens, parser=reader, seen=seen)


async def _newest(
    texts: LargeTexts,
    model: GenerationModel,
    request: GenerationRequest,
    messages: tuple[Message, ...],
    grammar: str | None,
    pixels: Mapping[str, RawPicture],
) -> tuple[Message, ...]:
    """The messages without the oldest turns that there is no room for; the instructions before them stay.

    A tool's result goes with the call that it belongs to. With no room for the last turn alone nothing is left out.
    """
    head = next((index for index, message in enumerate(messages) if message.role != "system"), 0)
    starts = [index for index in range(head, len(messages)) if messages[index].role != "tool"]
    limit = kept(model, replace(request, keep_last=-1))

    async def fits(start: int) -> bool:
        try:
            prepared = await _conversation(texts, model, request, messages[:head] + messages[start:], grammar, pixels)
        except ContextLengthExceeded:
            return False
        return limit is None or prepared.count <= limit

    first, end = 0, len(starts)
    while first < end:
        middle = (first + end) // 2
        if await fits(starts[middle]):
            end = middle
        else:
            first = middle + 1
    return messages if first == len(starts) else messages[:head] + messages[starts[first] :]


def kept(model: GenerationModel, request: GenerationRequest) -> int | None:
    """How many of the prompt's last tokens count; None for all."""
    if request.keep_last is None or request.keep_last >= 0:
        return request.keep_last
    window = min(max(place.total_limit for place in model.placements), request.context_limit or sys.maxsize)
    room = max(request.context.min_new_tokens, min(request.sampling.max_new_tokens or 1, window // 2))
    return max(1, min(max(place.prompt_limit for place in model.placements), window - room))


def checked_sampling(model: GenerationModel, request: GenerationRequest) -> Sampling:
    """How to sample: with the model's defaults, and where a form decides the end of the answer, without other ends.

    Stop strings, stop tokens and `ignore_eos` have no effect then, and are noted as ignored: cut anywhere else, the
    answer would not have its form. Raises BadRequest for stop tokens that are none of the model's, and for a least
    length that cannot be had.
    """
    sampling = completed(request.sampling, model.sampling_defaults, model.max_tokens_limit)
    if sampling.stop_token_ids:
        model.tokenizer.check_ids(sampling.stop_token_ids, "stop_token_ids")
    has_form = request.grammar is not None or (request.tool_use is not None and request.tool_use.forced)
    if has_form:
        for name in ("stop", "stop_token_ids", "ignore_eos"):
            if getattr(sampling, name):
                request.context.note_ignored(name)
        sampling = replace(sampling, stop=(), stop_token_ids=(), ignore_eos=False)
    if not sampling.min_tokens:
        return sampling
    if has_form:
        # Where the grammar allows nothing but the end, and the least length forbids it, there is no token left.
        raise UnsupportedParameter(
            "min_tokens: a schema or a forced call decides where the answer ends; leave one of them out",
            param="min_tokens",
        )
    if sampling.max_new_tokens is not None and sampling.min_tokens > sampling.max_new_tokens:
        raise BadRequest(
            f"min_tokens: {sampling.min_tokens} is more than the {sampling.max_new_tokens} tokens that the answer may "
            "have",
            param="min_tokens",
        )
    return sampling


def _names(use: ToolUse) -> frozenset[str]:
    return frozenset(tool.name for tool in use.tools)


def _in_words(message: Message, wanted: ToolFormat) -> Message:
    """An earlier turn in words, for a template that does not know calls."""
    if message.tool_calls:
        text = "\n".join(part for part in (message.content, wanted.written(message.tool_calls)) if part)
        return Message(message.role, text)
    return message
