"""What a model takes of pictures, from its configuration: estimates, by the type of model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker_node.models.directory import read_config
from worker_node.tasks.generate.serving.picture_rules import PictureRules

# Of models whose preprocessing is not known here: a large picture for the best of them, and a generous estimate.
_UNKNOWN_PIXELS, _UNKNOWN_TOKENS = 2048 * 2048, 1024
_MARKS: Mapping[str, tuple[str, ...]] = {
    "llava": ("<image>",),
    "llava-qwen2": ("<image>",),
    "llava_next": ("<image>",),
    "internvl_chat": ("<image>", "<IMG_CONTEXT>"),
    "minicpmv": ("(<image>./</image>)",),
    "gemma3": ("<start_of_image>", "<image_soft_token>"),
    "gemma4": ("<start_of_image>", "<image_soft_token>", "<|image|>"),
    "phi3_v": ("<|image_",),
    "phi4mm": ("<|image_",),
}
_QWEN_MARKS = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")


def picture_rules(directory: Path) -> PictureRules:
    """The rules of a vision model's directory. Raises ConfigurationError for a file that cannot be read."""
    config = read_config(directory / "config.json")
    preprocessor = read_config(directory / "preprocessor_config.json")
    kind = str(config.get("model_type", ""))
    if kind.startswith("qwen"):
        return _qwen(preprocessor)
    marks = _MARKS.get(kind, ("<image>",))
    if kind in {"llava", "llava-qwen2"}:
        side = _side(preprocessor, 384)
        patch = _number(config.get("vision_config"), "patch_size", 14)
        # GenAI puts a line break behind each picture.
        tokens = max(1, side // patch) ** 2 + 1
        return PictureRules(lambda _width, _height: tokens, 4 * side * side, side, marks)
    if kind == "internvl_chat":
        return _internvl(config, marks)
    if kind in {"gemma3", "gemma4"}:
        tokens = _number(config, "mm_tokens_per_image", 256)
        return PictureRules(lambda _width, _height: tokens, _UNKNOWN_PIXELS, None, marks)
    return PictureRules(lambda _width, _height: _UNKNOWN_TOKENS, _UNKNOWN_PIXELS, None, marks)


def _qwen(preprocessor: Mapping[str, Any]) -> PictureRules:
    """A token for each square of merged patches, after scaling between two bounds of pixels."""
    square = (_number(preprocessor, "patch_size", 14) * _number(preprocessor, "merge_size", 2)) ** 2
    least = _number(preprocessor, "min_pixels", 4 * square)
    most = min(_number(preprocessor, "max_pixels", 1280 * square), 16 * 2**20)

    def tokens(width: int, height: int) -> int:
        return math.ceil(min(max(width * height, least), most) * 1.1 / square) + 2

    return PictureRules(tokens, most, None, _QWEN_MARKS)


def _internvl(config: Mapping[str, Any], marks: tuple[str, ...]) -> PictureRules:
    """Up to `max_dynamic_patch` tiles and a thumbnail, each of the same size."""
    side = _number(config, "force_image_size", 448)
    patch = _number(config.get("vision_config"), "patch_size", 14)
    tile = max(1, side // patch // 2) ** 2
    tiles = _number(config, "max_dynamic_patch", 12)

    def tokens(width: int, height: int) -> int:
        # Tiles follow the shape of the picture; how many there are at most is all that is sure.
        return tile * (1 if width == height and width <= side else tiles + 1) + 2

    return PictureRules(tokens, tiles * side * side, None, marks)


def _side(preprocessor: Mapping[str, Any], default: int) -> int:
    """The side of the square that pictures are cut to."""
    for name in ("crop_size", "size"):
        match preprocessor.get(name):
            case int(side) if side > 0:
                return side
            case {"height": int(side)} | {"shortest_edge": int(side)} if side > 0:
                return side
    return default


def _number(part: Any, name: str, default: int) -> int:
    value = part.get(name) if isinstance(part, Mapping) else None
    return value if isinstance(value, int) and value > 0 else default
