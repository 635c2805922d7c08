"""The pictures of a request: whether its model takes them, their pixels, and their tags in its prompt."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from worker_node.core.errors import BadRequest, NodeError, UnsupportedParameter
from worker_node.core.types import Message, Picture, TokenIds
from worker_node.manager.manager import ModelManager
from worker_node.sandbox.pool import PreparationLimits, PreparationPool
from worker_node.settings import NodeSettings
from worker_node.tasks.generate import image_decoding
from worker_node.tasks.generate.messages import PicturePrompt, RawPicture
from worker_node.tasks.generate.model import MAX_PICTURE_BYTES, GenerationModel, GenerationRequest, PictureRules

MAX_PICTURES = 8
# What GenAI takes for the picture of a number, whatever the model's own mark is.
_TAG = "<ov_genai_image_{}>"
_TAGS = ("<ov_genai_image_", "<ov_genai_video_")
# Most of a process's memory is address space that its runtime reserves. 50 M pixels take 150 MB in RGB.
_LIMITS = PreparationLimits(processes=1, cpu_s=10.0, memory_bytes=3 * 2**29, queue=32)
_MODULES = ("worker_node.tasks.generate.image_decoding",)

# What became of a picture: the picture, the bytes of its file, and the code of the error that refused it, if any.
Note = Callable[[Picture, int, str | None], None]
# The content of a URL's image, for the field that holds it, of at most so many bytes, before a deadline.
Fetch = Callable[[str, str, int, float], Awaitable[bytes]]


class PictureDecoder:
    """The process that decodes pictures, started when the first one comes, until `close`.

    Those of remote URLs are fetched before by `fetch`, all of a request together at most `most_fetched` bytes. Without
    it they are refused.
    """

    def __init__(self, pool: PreparationPool | None = None) -> None:
        self._pool = pool or PreparationPool(_LIMITS, _MODULES)
        self.fetch: Fetch | None = None
        self.most_fetched = MAX_PICTURE_BYTES

    async def close(self) -> None:
        """End the process."""
        await self._pool.close()

    async def decode(
        self,
        pictures: Sequence[Picture],
        rules: PictureRules,
        deadline: float,
        note: Note,
    ) -> dict[str, RawPicture]:
        """The pixels of pictures by the field that holds them. `note` is told of each that was looked at.

        Raises BadRequest for a picture that is none, over a bound or not to be had, Overloaded, DeadlineExceeded,
        EngineUnavailable.
        """
        found = {}
        room = self.most_fetched
        for picture in pictures:
            try:
                encoded = picture.base64
                if picture.url is not None:
                    content = await self._fetched(picture.url, picture.where, room, deadline)
                    encoded, room = base64.b64encode(content).decode(), room - len(content)
                width, height, pixels = await self._pool.run(
                    image_decoding.decode,
                    encoded,
                    picture.where,
                    rules.max_pixels,
                    rules.shortest,
                    deadline=deadline,
                    param=picture.where,
                )
            except NodeError as error:
                note(picture, 0, error.code)
                raise
            found[picture.where] = RawPicture(width, height, pixels)
            note(picture, len(encoded) * 3 // 4 - encoded[-2:].count("="), None)
        return found

    async def _fetched(self, url: str, where: str, room: int, deadline: float) -> bytes:
        if self.fetch is None:
            raise BadRequest(f"{where}: this node fetches no remote URLs; send the image itself", param=where)
        return await self.fetch(url, where, min(MAX_PICTURE_BYTES, room), deadline)


def picture_decoder(_settings: NodeSettings) -> PictureDecoder:
    """The decoder of a node."""
    return PictureDecoder()


def pictures_of(messages: object) -> tuple[Picture, ...]:
    """The pictures of a conversation in their order; none where the prompt is a text or token ids."""
    if not isinstance(messages, tuple):
        return ()
    return tuple(picture for turn in messages if isinstance(turn, Message) for picture in turn.pictures)


def check_pictures(manager: ModelManager, model: GenerationModel, request: GenerationRequest) -> tuple[Picture, ...]:
    """The pictures of a request. Raises BadRequest for pictures that the model does not take, naming a model that does,
    for too many, and UnsupportedParameter for what a model with vision cannot do."""
    pictures = pictures_of(request.prompt)
    if model.pictures is not None:
        _check_vision(model, model.pictures, request)
    elif pictures:
        where = pictures[0].where
        raise BadRequest(f"{where}: {model.id} reads no images; {_instead(manager)}", param=where)
    if len(pictures) > MAX_PICTURES:
        where = pictures[MAX_PICTURES].where
        raise BadRequest(f"{where}: the request has {len(pictures)} images; the bound is {MAX_PICTURES}", param=where)
    return pictures


def with_tags(messages: Sequence[Message]) -> tuple[list[Message], list[Picture]]:
    """The messages with tags in place of their pictures, and the pictures in the order of their tags."""
    turns: list[Message] = []
    pictures: list[Picture] = []
    for message in messages:
        text, end = "", 0
        for picture in message.pictures:
            text += message.content[end : picture.at] + _TAG.format(len(pictures))
            end = picture.at
            pictures.append(picture)
        turns.append(replace(message, content=text + message.content[end:], pictures=()))
    return turns, pictures


def picture_prompt(
    text: str, pictures: Sequence[Picture], pixels: Mapping[str, RawPicture], rules: PictureRules
) -> PicturePrompt:
    """A text with tags, the pictures that they stand for, and how many tokens these are likely to have."""
    raw = [pixels[picture.where] for picture in pictures]
    return PicturePrompt(text, raw, sum(rules.tokens(picture.width, picture.height) for picture in raw))


def without_tags(text: str, count: int) -> str:
    """A text without the tags of so many pictures."""
    for number in range(count):
        text = text.replace(_TAG.format(number), "", 1)
    return text


def _check_vision(model: GenerationModel, rules: PictureRules, request: GenerationRequest) -> None:
    """Raise UnsupportedParameter for what the engine cannot do, BadRequest for the mark of a picture in a text."""
    refused = {
        "tools": request.tool_use is not None,
        "response_format": request.grammar is not None,
        "keep_last": request.keep_last is not None,
        "prompt": isinstance(request.prompt, TokenIds),
    }
    reasons = {"prompt": "takes texts, no token ids", "keep_last": "takes prompts whole"}
    for name in (name for name, asked in refused.items() if asked):
        reason = reasons.get(name, "gives free text only, no tool calls and no answers of a form")
        raise UnsupportedParameter(f"{name}: {model.id} is a vision model and {reason}", param=name)
    texts = [request.prompt] if isinstance(request.prompt, str) else []
    if isinstance(request.prompt, tuple):
        texts = [turn.content for turn in request.prompt]
    for mark in (*_TAGS, *rules.marks):
        if any(mark in text for text in texts):
            raise BadRequest(f"a text holds {mark}, which stands for an image here; take it out", param="messages")


def _instead(manager: ModelManager) -> str:
    found = [other.id for other in manager.models if isinstance(other, GenerationModel) and other.pictures is not None]
    if found:
        return f"use one of these: {', '.join(found)}"
    return "this node has no vision model (docs/vision.md says how to add one)"
