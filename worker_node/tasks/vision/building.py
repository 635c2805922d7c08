"""Which files are vision-language models, how those are planned and opened, what they take of images; their canary."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from contextlib import aclosing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from worker_node.core.errors import INSTALL_EXTRA, ConfigurationError, ConversionFailed
from worker_node.core.types import Device
from worker_node.engines.options import EngineOptions
from worker_node.engines.process import CANARY_TIMEOUT_S, Canary, CanaryFailed
from worker_node.engines.protocol import TOKEN_DTYPE, JobEngine
from worker_node.models.convert.job import ExportedFiles
from worker_node.models.directory import InstalledModel, read_config, sampling_defaults
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.serving.task import EnginePlan, ServedTask, Target
from worker_node.settings import ModelSettings, NodeSettings
from worker_node.tasks.generate.building import GenerationModel, prompt_length
from worker_node.tasks.generate.chat_tokenizer import ChatTokenizer
from worker_node.tasks.generate.images import ImageRules, image_prompt, with_tags
from worker_node.tasks.generate.messages import GenerateJob, RawImage, Sampling, TokenDelta
from worker_node.tasks.generate.request import Image, Message
from worker_node.tasks.vision.task import VISION, VisionNpuOptions

_LANGUAGE_FILE = "openvino_language_model.xml"
_VISION_FILE = "openvino_vision_embeddings_model.xml"
_GRAPHS = (
    _LANGUAGE_FILE,
    _VISION_FILE,
    "openvino_text_embeddings_model.xml",
    "openvino_tokenizer.xml",
    "openvino_detokenizer.xml",
)
# OpenVINO GenAI 2026.4 has no pipeline for them (docs/vision.md).
UNSUPPORTED = frozenset({"smolvlm", "idefics3", "lfm2_vl", "mllama", "mistral3", "paddleocr_vl"})


class _Files(ExportedFiles):
    kind = VISION
    graph = _LANGUAGE_FILE
    needed = (
        *(name for graph in _GRAPHS for name in (graph, graph.replace(".xml", ".bin"))),
        "config.json",
        "preprocessor_config.json",
    )

    def recognises(self, source: Path) -> bool:
        return (source / _LANGUAGE_FILE).is_file() and (source / _VISION_FILE).is_file()

    def published(self, _architectures: Collection[str], names: Collection[str]) -> bool:
        return _LANGUAGE_FILE in names and _VISION_FILE in names

    def check(self, directory: Path) -> None:
        if (kind := str(read_config(directory / "config.json").get("model_type"))) in UNSUPPORTED:
            raise ConversionFailed(f"OpenVINO GenAI has no pipeline for models of type {kind}; see docs/vision.md")


FILES = _Files()


_SIDE = 64
_QUESTION = "What is this?"
# Resident bytes for each byte of weights, as those of the generation engines.
_WEIGHTS = 2.5
_MAX_OUTSTANDING = 64


class _VisionChat(ServedTask[GenerationModel]):
    """Units at admission are requests; one runs at a time."""

    def plan(self, given: EngineOptions, target: Target) -> EnginePlan:
        plan = EnginePlan(
            options=given,
            admission=AdmissionLimits(_MAX_OUTSTANDING, sequences=1),
            prompt_limit=target.installed.context_limit,
            total_limit=target.installed.context_limit,
            memory=target.footprint(_WEIGHTS),
            lacks=frozenset({"n", "logprobs", "beam_search"}),
        )
        if not isinstance(given, VisionNpuOptions):
            return plan
        prompt = prompt_length(given.max_prompt_len, target)
        return replace(
            plan,
            options=replace(given, max_prompt_len=prompt),
            prompt_limit=prompt,
            total_limit=min(prompt + given.min_response_len, plan.total_limit),
            lengths=(prompt, given.min_response_len),
            parts={"language": Device.NPU, "vision": Device.CPU},
        )

    def open(self, installed: InstalledModel, wanted: ModelSettings, settings: NodeSettings) -> GenerationModel:  # noqa: ARG002
        if find_spec("PIL") is None:
            raise ConfigurationError(
                f"{installed.id}: Pillow, which decodes images, is missing: {INSTALL_EXTRA.format('vision')}"
            )
        greedy = settings.sampling_defaults == "greedy"
        return GenerationModel(
            installed,
            ChatTokenizer(installed.path, installed.context_limit),
            sampling_defaults=None if greedy else sampling_defaults(installed.path),
            images=image_rules(installed.path),
        )

    def canary(self, model: GenerationModel, wanted: ModelSettings, plan: EnginePlan) -> Canary | None:  # noqa: ARG002
        """The check that the engine answers a question about a grey image with a token.

        Models come without known answers here. Any answer shows that the graphs of vision and language fit each other
        on this device.
        """
        tokenizer, rules = model.tokenizer, model.images
        if rules is None:
            return None

        async def check(engine: JobEngine) -> None:
            image = Image("", 0, "canary")
            turns, images = with_tags([Message("user", _QUESTION, images=(image,))])
            text = tokenizer.render(turns)
            grey = RawImage(_SIDE, _SIDE, bytes([128]) * (_SIDE * _SIDE * 3))
            job = GenerateJob(
                id=0,
                tokens=np.asarray(tokenizer.encode_prompt(_QUESTION), TOKEN_DTYPE).tobytes(),
                max_new_tokens=1,
                deadline=time.monotonic() + CANARY_TIMEOUT_S,
                sampling=Sampling(ignore_eos=True),
                vision_prompt=image_prompt(text.removeprefix(tokenizer.opening()), images, {"canary": grey}, rules),
            )
            async with aclosing(engine.run(job, TokenDelta)) as deltas:
                answered = [token async for delta in deltas for token in delta.tokens]
            if not answered:
                raise CanaryFailed("it asks about an image, and the answer is empty")

        return check


VISION_CHAT = _VisionChat()


# What a model takes of images, from its configuration: estimates, by the type of model.

# Of models whose preprocessing is not known here: a large image for the best of them, and a generous estimate.
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


def image_rules(directory: Path) -> ImageRules:
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
        # GenAI puts a line break behind each image.
        tokens = max(1, side // patch) ** 2 + 1
        return ImageRules(lambda _width, _height: tokens, 4 * side * side, side, marks)

    if kind == "internvl_chat":
        return _internvl(config, marks)
    if kind in {"gemma3", "gemma4"}:
        tokens = _number(config, "mm_tokens_per_image", 256)
        return ImageRules(lambda _width, _height: tokens, _UNKNOWN_PIXELS, None, marks)
    return ImageRules(lambda _width, _height: _UNKNOWN_TOKENS, _UNKNOWN_PIXELS, None, marks)


def _qwen(preprocessor: Mapping[str, Any]) -> ImageRules:
    """A token for each square of merged patches, after scaling between two bounds of pixels."""
    square = (_number(preprocessor, "patch_size", 14) * _number(preprocessor, "merge_size", 2)) ** 2
    least = _number(preprocessor, "min_pixels", 4 * square)
    most = min(_number(preprocessor, "max_pixels", 1280 * square), 16 * 2**20)

    def tokens(width: int, height: int) -> int:
        return math.ceil(min(max(width * height, least), most) * 1.1 / square) + 2

    return ImageRules(tokens, most, None, _QWEN_MARKS)


def _internvl(config: Mapping[str, Any], marks: tuple[str, ...]) -> ImageRules:
    """Up to `max_dynamic_patch` tiles and a thumbnail, each of the same size."""
    side = _number(config, "force_image_size", 448)
    patch = _number(config.get("vision_config"), "patch_size", 14)
    tile = max(1, side // patch // 2) ** 2
    tiles = _number(config, "max_dynamic_patch", 12)

    def tokens(width: int, height: int) -> int:
        # Tiles follow the shape of the image; how many there are at most is all that is known.
        return tile * (1 if width == height and width <= side else tiles + 1) + 2

    return ImageRules(tokens, tiles * side * side, None, marks)


def _side(preprocessor: Mapping[str, Any], default: int) -> int:
    """The side of the square that images are cut to."""
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
