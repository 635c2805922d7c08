"""From a request to an engine's input: the prompt's tokens, the grammar, and the parser of the answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from msgspec import structs

from worker_node.core.errors import BadRequest, ContextLengthExceeded, NodeError, UnsupportedParameter
from worker_node.core.types import Feature, ModelKind
from worker_node.manager.manager import ModelManager
from worker_node.models.directory import PHI
from worker_node.serving.routing import Demand, reject_if_full
from worker_node.serving.run import Services
from worker_node.tasks.generate.answer import ReasoningFirst
from worker_node.tasks.generate.blocks import Parser
from worker_node.tasks.generate.building import GenerationModel
from worker_node.tasks.generate.chat_tokenizer import LargeTexts
from worker_node.tasks.generate.images import (
    MAX_IMAGES,
    TAGS,
    ImageDecoder,
    ImageRules,
    file_size,
    image_prompt,
    with_tags,
    without_tags,
)
from worker_node.tasks.generate.messages import ImagePrompt, RawImage, Sampling
from worker_node.tasks.generate.metrics import GenerationMetrics
from worker_node.tasks.generate.request import GenerationRequest, Image, Message, TokenIds, ToolUse
from worker_node.tasks.generate.schemas import SchemaCompiler, answer_form
from worker_node.tasks.generate.tool_calls import (
    HERMES,
    TOOL_FORMATS,
    BareCalls,
    CallsOrAnswer,
    ToolFormat,
    declaration,
    with_instructions,
)


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """The prompt as an engine takes it; one with vision takes the `vision_prompt`, whose text has the `tokens`.

    `parser` makes what separates tool calls and reasoning from the answer; None where all of it is text.
    """

    tokens: list[int]
    parser: Callable[[], Parser] | None = None
    vision_prompt: ImagePrompt | None = None

    @property
    def count(self) -> int:
        """Tokens of the prompt; of images an estimate."""
        return len(self.tokens) + (0 if self.vision_prompt is None else self.vision_prompt.image_tokens)


@dataclass(frozen=True, slots=True)
class PreparedGeneration:
    """A request with its model found and its prompt tokenized; it is neither routed nor run yet.

    The `request` has the sampling that it left open filled in. Parts of it are `ignored`, by their places; fields that
    ask for more than is available are `limited` to that.
    """

    request: GenerationRequest
    model: GenerationModel
    prompt: PreparedPrompt
    grammar: str | None
    demand: Demand
    ignored: Sequence[str] = ()
    limited: Mapping[str, int] = field(default_factory=dict)


def images_of(request: GenerationRequest) -> list[Image]:
    """The images of a conversation in their order; none where the prompt is a text or token ids."""
    turns = request.prompt if isinstance(request.prompt, tuple) else ()
    return [image for turn in turns for image in turn.images]


async def generation_model(
    manager: ModelManager, name: str | None, deadline: float, *, seeing: bool = False
) -> GenerationModel:
    """The model of that name, or the default; with images (`seeing`) one with vision. Raises as `model_of`."""
    if name is None and seeing:
        for model in manager.models:
            if isinstance(model, GenerationModel) and model.images is not None:
                return model
    return await manager.model_of(ModelKind.GENERATION, GenerationModel, name, deadline)


async def prepare_generation(
    services: Services, model: GenerationModel, request: GenerationRequest
) -> PreparedGeneration:
    """Decode images, compile the schema, tokenize the prompt. Raises BadRequest, Overloaded, DeadlineExceeded."""
    pixels = await _decode_images(services, model, request)
    grammar = request.grammar if isinstance(request.grammar, str) else None
    ignored: Sequence[str] = ()
    asks_for_form = request.grammar is not None or request.tool_use is not None
    if asks_for_form and (form := answer_form(model.installed.family, request)) is not None:
        grammar, ignored = await services.parts.of(SchemaCompiler).grammar(form, request.context.deadline)
    if grammar is not None and request.sampling.beams:
        raise UnsupportedParameter.at(
            "use_beam_search", "the form of an answer is not enforced; leave out tools and schemas, or this"
        )
    sampling, without_effect = checked_sampling(model, request)
    request = replace(request, sampling=sampling)
    prompt = await _Prompting(services, model, request, pixels).prompt()
    _check_amounts(model, request.sampling)
    count = prompt.count
    # Room that the request could not use is no reason to leave a placement.
    room = min(request.context.min_new_tokens, sampling.max_new_tokens or request.context.min_new_tokens)
    limited = _check_window(model, request, count + room)
    wanted: dict[Feature, bool] = {
        "n": sampling.choices > 1,
        "logprobs": sampling.logprobs,
        "beam_search": sampling.beams > 0,
    }
    demand = Demand(
        model.installed.id,
        model.placements,
        prompt_tokens=count,
        token_count=count,
        min_new_tokens=room,
        require=request.context.require_device,
        needs=frozenset(feature for feature, asked in wanted.items() if asked),
    )
    return PreparedGeneration(request, model, prompt, grammar, demand, (*ignored, *without_effect), limited)


async def count_prompt(services: Services, model: GenerationModel, request: GenerationRequest) -> int:
    """The tokens of a request's prompt; those of images are an estimate. Raises as `prepare_generation`."""
    try:
        pixels = await _decode_images(services, model, request)
        return (await _Prompting(services, model, request, pixels).prompt()).count
    except NodeError as error:
        request.name_field(error)
        raise


@dataclass(frozen=True, slots=True)
class _Prompting:
    """Makes the prompt of a request. `pixels` are those of its images, by the fields that hold them."""

    services: Services
    model: GenerationModel
    request: GenerationRequest
    pixels: Mapping[str, RawImage]

    async def prompt(self) -> PreparedPrompt:
        model, request = self.model, self.request
        if isinstance(request.prompt, tuple):
            turns = await self._newest(request.prompt) if request.drop_oldest else request.prompt
            prompt = await self._conversation(turns)
        elif isinstance(request.prompt, TokenIds):
            prompt = PreparedPrompt(model.tokenizer.check_ids(request.prompt.ids))
        else:
            texts = self.services.parts.of(LargeTexts)
            ids = await texts.encode(model.tokenizer, request.prompt, deadline=request.context.deadline)
            prompt = PreparedPrompt(
                ids, vision_prompt=None if model.images is None else ImagePrompt(request.prompt, [], 0)
            )
        if not prompt.tokens:
            raise BadRequest("the prompt is empty: there is nothing to continue", param="prompt")
        return prompt

    async def _conversation(self, messages: Sequence[Message]) -> PreparedPrompt:
        model, request, use = self.model, self.request, self.request.tool_use
        chat, deadline = model.tokenizer, request.context.deadline
        if request.rendering.think and not chat.can_think:
            raise UnsupportedParameter.at("think", f"{model.id} does not support thinking")
        calls = TOOL_FORMATS.get(model.installed.family, HERMES)
        if use is not None and not use.forced and request.grammar is not None:
            calls = calls.beside_json
        images: list[Image] = []
        if model.images is not None:
            messages, images = with_tags(messages)
        history, declarations = _with_tools(model, use, calls, messages)
        texts = self.services.parts.of(LargeTexts)
        rendering = replace(request.rendering, tools=declarations)
        text = await texts.render(chat, history, rendering, deadline=deadline)
        if use is not None and use.forced:
            # The answer begins where a call does, so that the model writes in the form that it was trained on.
            text += calls.opening
        plain = without_tags(text, len(images)) if images else text
        tokens = await texts.encode(chat, plain, special=False, deadline=deadline)
        vision_prompt = None
        if model.images is not None:
            # The engine's tokenizer adds what a text begins with, and the template has written it already.
            vision_prompt = image_prompt(text.removeprefix(chat.opening()), images, self.pixels, model.images)
        return PreparedPrompt(tokens, _parser(request, calls, text), vision_prompt)

    async def _newest(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The messages without the oldest turns that there is no room for; the instructions before them stay.

        A tool's result goes with the call that it belongs to. With no room for the last turn alone nothing is left out.
        """
        head = next((index for index, message in enumerate(messages) if message.role != "system"), 0)
        starts = [index for index in range(head, len(messages)) if messages[index].role != "tool"]
        # The longest prompt that leaves room for an answer.
        request, places = self.request, self.model.placements
        window = min(max(place.total_limit for place in places), request.context_limit or sys.maxsize)
        room = max(request.context.min_new_tokens, min(request.sampling.max_new_tokens or 1, window // 2))
        limit = max(1, min(max(place.prompt_limit for place in places), window - room))

        first, end = 0, len(starts)
        while first < end:
            middle = (first + end) // 2
            try:
                prompt = await self._conversation(messages[:head] + messages[starts[middle] :])
                fits = prompt.count <= limit
            except ContextLengthExceeded:
                fits = False
            first, end = (first, middle) if fits else (middle + 1, end)
        return messages if first == len(starts) else messages[:head] + messages[starts[first] :]


def _with_tools(
    model: GenerationModel, use: ToolUse | None, calls: ToolFormat, messages: Sequence[Message]
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """The messages for the template, and the tools for one that declares them; other tools are in the messages."""
    chat = model.tokenizer
    # A template declares tools in the format that its model was trained on.
    native = use is not None and chat.takes_tools and calls == TOOL_FORMATS.get(model.installed.family, HERMES)
    history = list(messages) if use is None or native else with_instructions(messages, use.tools, calls)
    if not chat.takes_tools or (use is not None and not native):
        history = [_calls_as_text(message, calls) for message in history]
    return history, [declaration(tool) for tool in use.tools] if use is not None and native else None


def _parser(request: GenerationRequest, calls: ToolFormat, rendered: str) -> Callable[[], Parser] | None:
    """What makes the parser of the answer to a rendered conversation; None where all of the answer is text."""
    use = request.tool_use
    names = frozenset(tool.name for tool in use.tools) if use is not None else frozenset()
    if use is not None and use.forced:
        # What follows the opening of a call is one call.
        return partial(BareCalls, names, single=True)
    if use is not None and request.grammar is not None:
        return lambda: CallsOrAnswer(calls.parser(names))
    answer = partial(calls.parser, names) if use is not None else None
    if not request.split_reasoning or request.grammar is not None:
        return answer
    return partial(ReasoningFirst, answer, begun=rendered.rstrip().endswith("<think>"))


def _calls_as_text(message: Message, wanted: ToolFormat) -> Message:
    """An earlier turn with its calls as text, for a template that has no place for calls."""
    if message.tool_calls:
        text = "\n".join(part for part in (message.content, wanted.written(message.tool_calls)) if part)
        return Message(message.role, text)
    return message


async def _decode_images(services: Services, model: GenerationModel, request: GenerationRequest) -> dict[str, RawImage]:
    """The pixels of the request's images by field; refuses the request before that if the queue is full."""
    images, rules = images_of(request), model.images
    try:
        _check_images(services.manager, model, request, images)
    except NodeError as error:
        for _ in images:
            services.telemetry.own(GenerationMetrics).count_image(model.id, 0, error.code)
        raise
    reject_if_full(model.placements, 1, request.context)
    pixels: dict[str, RawImage] = {}
    if rules is None:
        return pixels
    metrics = services.telemetry.own(GenerationMetrics)
    for image in images:
        try:
            decoder = services.parts.of(ImageDecoder)
            pixels[image.where] = await decoder.decode(image, rules, request.context.deadline)
        except NodeError as error:
            metrics.count_image(model.id, 0, error.code)
            raise
        metrics.count_image(model.id, file_size(image.base64), None)
    return pixels


def _check_images(
    manager: ModelManager, model: GenerationModel, request: GenerationRequest, images: Sequence[Image]
) -> None:
    """Raise BadRequest for images that the model does not take, naming a model that does, and for too many;
    UnsupportedParameter for what a model with vision cannot do."""
    if model.images is not None:
        _check_vision(model, model.images, request)
    elif images:
        found = [one.id for one in manager.models if isinstance(one, GenerationModel) and one.images is not None]
        instead = f"use one of these: {', '.join(found)}"
        if not found:
            instead = "this node has no vision model (docs/vision.md says how to add one)"
        where = images[0].where
        raise BadRequest.at(where, f"{model.id} does not read images; {instead}")
    if len(images) > MAX_IMAGES:
        where = images[MAX_IMAGES].where
        raise BadRequest.at(where, f"the request has {len(images)} images; the bound is {MAX_IMAGES}")


def checked_sampling(model: GenerationModel, request: GenerationRequest) -> tuple[Sampling, list[str]]:
    """How to sample, with the model's defaults; and the fields that have no effect.

    Where a form decides the end of the answer these are stop strings, stop tokens and `ignore_eos`: cut anywhere else,
    the answer would not have its form. Raises BadRequest for stop tokens outside of the model's vocabulary
    and for an impossible least length.
    """
    asked = request.sampling
    if asked.dialect_defaults and (model.installed.family == PHI or images_of(request)):
        # Ollama's penalty makes Phi-3 run on forever and spoils what is said of images (docs/npu-facts.md, 40).
        fitting = {name: value for name, value in asked.dialect_defaults.items() if name != "repetition_penalty"}
        asked = structs.replace(asked, dialect_defaults=fitting)
    sampling = completed(asked, model.sampling_defaults, model.max_tokens_limit)
    if sampling.stop_token_ids:
        model.tokenizer.check_ids(sampling.stop_token_ids, "stop_token_ids")
    has_form = request.grammar is not None or (request.tool_use is not None and request.tool_use.forced)
    ignored: list[str] = []
    if has_form:
        ignored += [name for name in ("stop", "stop_token_ids", "ignore_eos") if getattr(sampling, name)]
        sampling = structs.replace(sampling, stop=(), stop_token_ids=(), ignore_eos=False)
    if not sampling.min_tokens:
        return sampling, ignored
    if has_form:
        # Where the grammar allows nothing but the end, and the least length forbids it, there is no token left.
        raise UnsupportedParameter.at(
            "min_tokens", "a schema or a forced call decides where the answer ends; leave one of them out"
        )
    if sampling.max_new_tokens is not None and sampling.min_tokens > sampling.max_new_tokens:
        raise BadRequest.at(
            "min_tokens",
            f"{sampling.min_tokens} is more than the {sampling.max_new_tokens} tokens that the answer may have",
        )
    return sampling, ignored


def completed(sampling: Sampling, of_the_model: Mapping[str, Any] | None, limit: int) -> Sampling:
    """The sampling with its open fields filled in: by its dialect's defaults, else by those `of_the_model`.

    None of these leaves it greedy. A default length is at most `limit` tokens, and at least what the request demands.
    """
    if of_the_model is None:
        return sampling
    defaults = of_the_model if sampling.dialect_defaults is None else sampling.dialect_defaults
    filled = {field: value for field, value in defaults.items() if field in sampling.open_fields}
    if (length := filled.get("max_new_tokens")) is not None:
        filled["max_new_tokens"] = max(min(length, limit), sampling.min_tokens)
    return structs.replace(sampling, **filled, open_fields=())


def _check_amounts(model: GenerationModel, sampling: Sampling) -> None:
    wanted = sampling.max_new_tokens
    if wanted is not None and wanted > model.max_tokens_limit:
        raise BadRequest(
            f"{wanted} new tokens were asked for; {model.id} gives at most {model.max_tokens_limit} here",
            param="max_new_tokens",
        )
    if (most := max(sampling.choices, sampling.beams)) > model.best_of_limit:
        raise BadRequest(
            f"{most} answers were asked for (n or best_of); {model.id} generates at most {model.best_of_limit} for one "
            "request here (best_of_limit)",
            param="n",
        )


def _check_window(model: GenerationModel, request: GenerationRequest, tokens: int) -> dict[str, int]:
    """What the model has where the request's own limit is beyond it. Raises ContextLengthExceeded."""
    window = request.context_limit
    if window is None:
        return {}
    if tokens > window:
        raise ContextLengthExceeded(
            f"num_ctx {window}: the prompt and the least answer have {tokens} tokens", param="num_ctx"
        )
    widest = max(placement.total_limit for placement in model.placements)
    return {"num_ctx": widest} if window > widest else {}


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def _check_vision(model: GenerationModel, rules: ImageRules, request: GenerationRequest) -> None:
    """Raise UnsupportedParameter for what the engine cannot do, BadRequest for the mark of an image in a text."""
    reason = "gives free text only, no tool calls and no answers of a form"
    refused = {"tools": reason} if request.tool_use is not None else {}
    if request.grammar is not None:
        refused[getattr(request.grammar, "where", "response_format")] = reason
    if isinstance(request.prompt, TokenIds):
        refused["prompt"] = "takes text, not token ids"
    for name, reason in refused.items():
        raise UnsupportedParameter.at(name, f"{model.id} is a vision model and {reason}")
    if model.installed.family == PHI and images_of(request):
        # A penalty spoils what Phi-3 says about images.
        for name in _PENALTIES:
            if (value := getattr(request.sampling, name)) != getattr(Sampling(), name):
                raise UnsupportedParameter.at(
                    name,
                    f"{model.id} answers nonsense about images with a penalty, and {value} was given; leave it out",
                )
    texts = [request.prompt] if isinstance(request.prompt, str) else []
    if isinstance(request.prompt, tuple):
        texts = [turn.content for turn in request.prompt]
    for mark in (*TAGS, *rules.marks):
        if any(mark in text for text in texts):
            raise BadRequest(f"a text holds {mark}, which stands for an image here; take it out", param="messages")
