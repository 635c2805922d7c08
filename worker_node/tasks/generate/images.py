"""The images of a request: their pixels, decoded in a process of their own, and their tags in its prompt."""

from __future__ import annotations

import binascii
import io
import math
import re
import struct
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from worker_node.core.errors import BadRequest, PayloadTooLarge
from worker_node.sandbox.pool import PreparationLimits, PreparationPool
from worker_node.tasks.generate.messages import ImagePrompt, RawImage
from worker_node.tasks.generate.request import Image, Message

if TYPE_CHECKING:
    from PIL import Image as Picture

MAX_IMAGES = 8
MAX_IMAGE_BYTES = 20_000_000
FORMATS = "PNG, JPEG, WebP or GIF"
IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif"})
# What GenAI takes for the image of a number, whatever the model's own mark is.
_TAG = "<ov_genai_image_{}>"
TAGS = ("<ov_genai_image_", "<ov_genai_video_")
# Most of a process's memory is address space that its runtime reserves. 50 M pixels take 150 MB in RGB.
_LIMITS = PreparationLimits(processes=1, cpu_s=10.0, memory_bytes=3 * 2**29, queue=32)
_MODULES = ("worker_node.tasks.generate.images",)

# A data URL, which names its type and says base64.
_HEAD = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE)
_HEAD_LENGTH = 200
_REMOTE = ("http", "https")


@dataclass(frozen=True, slots=True)
class ImageRules:
    """Images are scaled down before they go to the engine, as far as its preprocessor loses nothing by it.

    The shorter side then has at most `shortest` pixels (None: any), and an image at most `max_pixels`. `tokens` is an
    estimate of the tokens for a width and a height. `marks` stand for images in the model's own prompts, so that they
    cannot be part of a text.
    """

    tokens: Callable[[int, int], int]
    max_pixels: int
    shortest: int | None = None
    marks: tuple[str, ...] = ()


class ImageDecoder(PreparationPool):
    """The process that decodes images, started when the first one comes, until `close`."""

    def __init__(self) -> None:
        super().__init__(_LIMITS, _MODULES)

    async def decode(self, image: Image, rules: ImageRules, deadline: float) -> RawImage:
        """The pixels of an image. Raises BadRequest, and as `PreparationPool.run`."""
        arguments = (image.base64, image.where, rules.max_pixels, rules.shortest)
        width, height, pixels = await self.run(decode, *arguments, deadline=deadline, param=image.where)
        return RawImage(width, height, pixels)


def image_of_url(url: str, at: int, where: str) -> Image:
    """The image of a data URL. Raises BadRequest for any other URL, PayloadTooLarge."""
    if url[:_HEAD_LENGTH].partition(":")[0].lower() in _REMOTE:
        raise BadRequest.at(
            where, "the node fetches no URLs; send the image inline as a data URL: data:image/png;base64,…"
        )
    head = _HEAD.match(url[:_HEAD_LENGTH])
    if head is None:
        raise BadRequest.at(where, "not a data URL of the form data:image/png;base64,…")
    if (kind := head["type"].lower()) not in IMAGE_TYPES:
        raise BadRequest.at(where, f"images are {FORMATS}, not {kind}")
    return image_of_base64(url[head.end() :], at, where)


def image_of_base64(base64: str, at: int, where: str) -> Image:
    """The image of a base64 text. Raises BadRequest if it is empty, PayloadTooLarge."""
    if not base64:
        raise BadRequest.at(where, "the image is empty")
    if (size := file_size(base64)) > MAX_IMAGE_BYTES:
        raise PayloadTooLarge.at(
            where, f"the image has {size} bytes; the bound is {MAX_IMAGE_BYTES}. Send a smaller one"
        )
    return Image(base64, at, where)


def file_size(base64: str) -> int:
    """The bytes that a base64 text stands for, without white space and padding."""
    return (len(base64) - sum(map(base64.count, " \t\r\n="))) * 3 // 4


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
    for number in range(count):
        text = text.replace(_TAG.format(number), "", 1)
    return text


# Decoding, in a preparation process: Pillow is imported there, and only when an image comes.

MAX_PIXELS = 50_000_000
# Patches of vision models have up to 32 pixels, and some preprocessors refuse what is longer than 200 times its width.
MIN_SIDE = 32
MAX_ASPECT = 100
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def decode(data: str, where: str, max_pixels: int, shortest: int | None) -> tuple[int, int, bytes]:
    """Width, height and RGB rows of an image file in base64; of an animation its first frame.

    Encoders break base64 into lines, or leave its padding out: white space counts for nothing, and padding is optional.

    The result has at most about `max_pixels`, and a shorter side of at most `shortest`. Raises BadRequest for what is
    no image, truncated, or over a bound, which is judged by the file's header.
    """
    try:
        bare = "".join(data.split()).rstrip("=")
        encoded = b64decode(bare + "=" * (-len(bare) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest.at(where, "not base64") from None
    from PIL import Image as Picture  # noqa: PLC0415
    from PIL import ImageOps, UnidentifiedImageError  # noqa: PLC0415

    # The bound here is our own, and lower.
    Picture.MAX_IMAGE_PIXELS = None
    try:
        with Picture.open(io.BytesIO(encoded), formats=_FORMATS) as opened:
            _check_size(*opened.size, where)
            if opened.format == "JPEG":
                # Decodes at a half, a quarter or an eighth where that is enough.
                opened.draft("RGB", _scaled(*opened.size, max_pixels, shortest))
            upright = ImageOps.exif_transpose(opened)
            rgb = _rgb(upright)
    except UnidentifiedImageError:
        raise BadRequest.at(where, "not an image that is PNG, JPEG, WebP or GIF") from None
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, IndexError, OverflowError) as error:
        raise BadRequest.at(where, f"the image is truncated or damaged ({type(error).__name__})") from None
    size = _scaled(*rgb.size, max_pixels, shortest)
    if size != rgb.size:
        rgb = rgb.resize(size, Picture.Resampling.BICUBIC, reducing_gap=3.0)
    return rgb.width, rgb.height, rgb.tobytes()


def _check_size(width: int, height: int, where: str) -> None:
    if width * height > MAX_PIXELS:
        raise BadRequest.at(where, f"the image has {width} x {height} pixels; the bound is {MAX_PIXELS}")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise BadRequest.at(
            where, f"the image has {width} x {height} pixels; the longer side may be {MAX_ASPECT} times the shorter"
        )


def _scaled(width: int, height: int, max_pixels: int, shortest: int | None) -> tuple[int, int]:
    """The size for the engine: as large as is of use to it, and not smaller than a patch."""
    factor = min(1.0, math.sqrt(max_pixels / (width * height)))
    if shortest is not None:
        factor = min(factor, shortest / min(width, height))
    factor = max(factor, MIN_SIDE / min(width, height))
    return max(MIN_SIDE, round(width * factor)), max(MIN_SIDE, round(height * factor))


def _rgb(image: Picture.Image) -> Picture.Image:
    """Transparent parts become white."""
    from PIL import Image as Picture  # noqa: PLC0415

    if image.mode.startswith("I"):
        # 16 bits a sample, which a conversion would cut at 255.
        return image.convert("I").point([value >> 8 for value in range(65536)], "L").convert("RGB")
    if image.mode in {"RGBA", "LA", "PA"} or "transparency" in image.info:
        with_alpha = image.convert("RGBA")
        white = Picture.new("RGB", with_alpha.size, (255, 255, 255))
        white.paste(with_alpha, mask=with_alpha.getchannel("A"))
        return white
    return image.convert("RGB")
