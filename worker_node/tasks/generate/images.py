"""The images of a request: whether its model takes them, their pixels, and their tags in its prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from worker_node.core.errors import BadRequest, NodeError, PayloadTooLarge, UnsupportedParameter
from worker_node.manager.manager import ModelManager
from worker_node.sandbox.pool import PreparationLimits, PreparationPool
from worker_node.settings import NodeSettings
from worker_node.tasks.generate import image_decoding
from worker_node.tasks.generate.chat import Image, Message, TokenIds
from worker_node.tasks.generate.messages import ImagePrompt, RawImage
from worker_node.tasks.generate.model import (
    FORMATS,
    IMAGE_TYPES,
    MAX_IMAGE_BYTES,
    GenerationModel,
    GenerationRequest,
    ImageRules,
)

MAX_IMAGES = 8
# What GenAI takes for the image of a number, whatever the model's own mark is.
_TAG = "<ov_genai_image_{}>"
_TAGS = ("<ov_genai_image_", "<ov_genai_video_")
# Most of a process's memory is address space that its runtime reserves. 50 M pixels take 150 MB in RGB.
_LIMITS = PreparationLimits(processes=1, cpu_s=10.0, memory_bytes=3 * 2**29, queue=32)
_MODULES = ("worker_node.tasks.generate.image_decoding",)

# A data URL, which names its type and says base64.
_HEAD = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE)
_HEAD_LENGTH = 200
_REMOTE = ("http", "https")

# Records an image: the bytes of its file, and the code of the error that refused it, if any.
Note = Callable[[int, str | None], None]


class ImageDecoder:
    """The process that decodes images, started when the first one comes, until `close`."""

    def __init__(self, pool: PreparationPool | None = None) -> None:
        self._pool = pool or PreparationPool(_LIMITS, _MODULES)

    async def close(self) -> None:
        """End the process."""
        await self._pool.close()

    async def decode(
        self,
        images: Sequence[Image],
        rules: ImageRules,
        deadline: float,
        note: Note,
    ) -> dict[str, RawImage]:
        """The pixels of images by the field that holds them. `note` is called for each, decoded or refused.

        Raises BadRequest for a file that is not an image, or over a bound, Overloaded, DeadlineExceeded,
        EngineUnavailable.
        """
        found = {}
        for image in images:
            try:
                width, height, pixels = await self._pool.run(
                    image_decoding.decode,
                    image.base64,
                    image.where,
                    rules.max_pixels,
                    rules.shortest,
                    deadline=deadline,
                    param=image.where,
                )
            except NodeError as error:
                note(0, error.code)
                raise
            found[image.where] = RawImage(width, height, pixels)
            note(file_size(image.base64), None)
        return found


def image_decoder(_settings: NodeSettings) -> ImageDecoder:
    """The decoder of a node."""
    return ImageDecoder()


def image_of_url(url: str, at: int, where: str) -> Image:
    """The image of a data URL. Raises BadRequest for any other URL, PayloadTooLarge."""
    if url[:_HEAD_LENGTH].partition(":")[0].lower() in _REMOTE:
        raise BadRequest(
            f"{where}: the node fetches no URLs; send the image inline as a data URL: data:image/png;base64,…",
            param=where,
        )
    head = _HEAD.match(url[:_HEAD_LENGTH])
    if head is None:
        raise BadRequest(f"{where}: not a data URL of the form data:image/png;base64,…", param=where)
    if (kind := head["type"].lower()) not in IMAGE_TYPES:
        raise BadRequest(f"{where}: images are {FORMATS}, not {kind}", param=where)
    return image_of_base64(url[head.end() :], at, where)


def image_of_base64(base64: str, at: int, where: str) -> Image:
    """The image of a base64 text. Raises BadRequest if it is empty, PayloadTooLarge."""
    if not base64:
        raise BadRequest(f"{where}: the image is empty", param=where)
    if (size := file_size(base64)) > MAX_IMAGE_BYTES:
        raise PayloadTooLarge(
            f"{where}: the image has {size} bytes; the bound is {MAX_IMAGE_BYTES}. Send a smaller one", param=where
        )
    return Image(base64, at, where)


def file_size(base64: str) -> int:
    """The bytes that a base64 text stands for, without white space and padding."""
    return (len(base64) - sum(map(base64.count, " \t\r\n="))) * 3 // 4


def check_images(manager: ModelManager, model: GenerationModel, request: GenerationRequest) -> tuple[Image, ...]:
    """The images of a request. Raises BadRequest for images that the model does not take, naming a model that does,
    for too many, and UnsupportedParameter for what a model with vision cannot do."""
    images = request.images
    if model.images is not None:
        _check_vision(model, model.images, request)
    elif images:
        where = images[0].where
        raise BadRequest(f"{where}: {model.id} does not read images; {_instead(manager)}", param=where)
    if len(images) > MAX_IMAGES:
        where = images[MAX_IMAGES].where
        raise BadRequest(f"{where}: the request has {len(images)} images; the bound is {MAX_IMAGES}", param=where)
    return images


def with_tags(messages: Sequence[Message]) -> tuple[list[Message], list[Image]]:
    """The messages with tags in place of their images, and the images in the order of their tags."""
    turns: list[Message] = []
    images: list[Image] = []
    for message in messages:
        text, end = "", 0
        for image in message.images:
            text += message.content[end : image.at] + _TAG.format(len(images))
            end = image.at
            images.append(image)
        turns.append(replace(message, content=text + message.content[end:], images=()))
    return turns, images


def image_prompt(text: str, images: Sequence[Image], pixels: Mapping[str, RawImage], rules: ImageRules) -> ImagePrompt:
    """A text with tags, the images that they stand for, and how many tokens these are likely to have."""
    raw = [pixels[image.where] for image in images]
    return ImagePrompt(text, raw, sum(rules.tokens(image.width, image.height) for image in raw))


def without_tags(text: str, count: int) -> str:
    """A text without the tags of its `count` images."""
    for number in range(count):
        text = text.replace(_TAG.format(number), "", 1)
    return text


def _check_vision(model: GenerationModel, rules: ImageRules, request: GenerationRequest) -> None:
    """Raise UnsupportedParameter for what the engine cannot do, BadRequest for the mark of an image in a text."""
    refused = {
        "tools": request.tool_use is not None,
        getattr(request.grammar, "where", "response_format"): request.grammar is not None,
        "prompt": isinstance(request.prompt, TokenIds),
    }
    for name in (name for name, asked in refused.items() if asked):
        reason = "gives free text only, no tool calls and no answers of a form"
        if name == "prompt":
            reason = "takes text, not token ids"
        raise UnsupportedParameter(f"{name}: {model.id} is a vision model and {reason}", param=name)
    texts = [request.prompt] if isinstance(request.prompt, str) else []
    if isinstance(request.prompt, tuple):
        texts = [turn.content for turn in request.prompt]
    for mark in (*_TAGS, *rules.marks):
        if any(mark in text for text in texts):
            raise BadRequest(f"a text holds {mark}, which stands for an image here; take it out", param="messages")


def _instead(manager: ModelManager) -> str:
    found = [other.id for other in manager.models if isinstance(other, GenerationModel) and other.images is not None]
    if found:
        return f"use one of these: {', '.join(found)}"
    return "this node has no vision model (docs/vision.md says how to add one)"
