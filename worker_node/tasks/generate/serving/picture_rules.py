"""What a model takes of pictures: how large, at how many tokens each, and with which marks in its prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MAX_PICTURE_BYTES = 20_000_000
FORMATS = "PNG, JPEG, WebP or GIF"
PICTURE_TYPES = frozenset({"image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif"})


@dataclass(frozen=True, slots=True)
class PictureRules:
    """Pictures are scaled down before they go to the engine, as far as its preprocessor loses nothing by it.

    The shorter side then has at most `shortest` pixels (None: any), and a picture at most `max_pixels`. `tokens` is an
    estimate of the tokens for a width and a height. `marks` stand for pictures in the model's own prompts, so that they
    cannot be part of a text.
    """

    tokens: Callable[[int, int], int]
    max_pixels: int
    shortest: int | None = None
    marks: tuple[str, ...] = ()
