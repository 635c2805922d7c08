"""Images to pixels, in a preparation process: Pillow is imported there, and only when an image comes."""

from __future__ import annotations

import base64
import binascii
import io
import math
import struct
from typing import TYPE_CHECKING

from worker_node.core.errors import BadRequest

if TYPE_CHECKING:
    from PIL import Image


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
        encoded = base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest(f"{where}: not base64", param=where) from None
    from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415

    # The bound here is our own, and lower.
    Image.MAX_IMAGE_PIXELS = None
    try:
        with Image.open(io.BytesIO(encoded), formats=_FORMATS) as opened:
            _check_size(*opened.size, where)
            if opened.format == "JPEG":
                # Decodes at a half, a quarter or an eighth where that is enough.
                opened.draft("RGB", _scaled(*opened.size, max_pixels, shortest))
            upright = ImageOps.exif_transpose(opened)
            rgb = _rgb(upright)
    except UnidentifiedImageError:
        raise BadRequest(f"{where}: not an image that is PNG, JPEG, WebP or GIF", param=where) from None
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, IndexError, OverflowError) as error:
        raise BadRequest(f"{where}: the image is truncated or damaged ({type(error).__name__})", param=where) from None
    size = _scaled(*rgb.size, max_pixels, shortest)
    if size != rgb.size:
        rgb = rgb.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
    return rgb.width, rgb.height, rgb.tobytes()


def _check_size(width: int, height: int, where: str) -> None:
    if width * height > MAX_PIXELS:
        raise BadRequest(f"{where}: the image has {width} x {height} pixels; the bound is {MAX_PIXELS}", param=where)
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise BadRequest(
            f"{where}: the image has {width} x {height} pixels; the longer side may be {MAX_ASPECT} times the shorter",
            param=where,
        )


def _scaled(width: int, height: int, max_pixels: int, shortest: int | None) -> tuple[int, int]:
    """The size for the engine: as large as is of use to it, and not smaller than a patch."""
    factor = min(1.0, math.sqrt(max_pixels / (width * height)))
    if shortest is not None:
        factor = min(factor, shortest / min(width, height))
    factor = max(factor, MIN_SIDE / min(width, height))
    return max(MIN_SIDE, round(width * factor)), max(MIN_SIDE, round(height * factor))


def _rgb(image: Image.Image) -> Image.Image:
    """Transparent parts become white."""
    from PIL import Image  # noqa: PLC0415

    if image.mode.startswith("I"):
        # 16 bits a sample, which a conversion would cut at 255.
        return image.convert("I").point([value >> 8 for value in range(65536)], "L").convert("RGB")
    if image.mode in {"RGBA", "LA", "PA"} or "transparency" in image.info:
        with_alpha = image.convert("RGBA")
        white = Image.new("RGB", with_alpha.size, (255, 255, 255))
        white.paste(with_alpha, mask=with_alpha.getchannel("A"))
        return white
    return image.convert("RGB")
