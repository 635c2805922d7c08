"""The engine of vision-language models: GenAI's `VLMPipeline`, one generation at a time.

On the NPU GenAI runs the language model there, and vision and the embedding of texts on the CPU."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import openvino as ov
import openvino_genai as genai

from worker_node.core.types import Device
from worker_node.devices.blobs import NPU, brief, describe_npu, npu_properties, require_npu
from worker_node.devices.npu import busy_meter
from worker_node.engines.protocol import DeviceBroken, EngineSpec, Failed, Loaded
from worker_node.tasks.generate.messages import GenerateJob, RawImage
from worker_node.tasks.generate.sampling import generation_config
from worker_node.tasks.generate.stateful import PipelineRunner, TokenStreamer
from worker_node.tasks.vision.task import VisionNpuOptions, VisionOptions

# What GenAI says of a prompt that it does not take, before anything ran on a device.
_ABOUT_THE_PROMPT = (
    "vision tags",
    "image tags",
    "Missing image/video",
    "MAX_PROMPT_LEN",
    "prompt length",
    "longer than",
)


class VisionRunner(PipelineRunner):
    """A `Runner` over one `VLMPipeline`."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        self._spec = spec
        self._npu: VisionNpuOptions | None = None
        if spec.device is Device.NPU:
            self._npu = msgspec.convert(spec.options, VisionNpuOptions)

    def load(self) -> Loaded:
        began = time.monotonic()
        loaded = self._load_dynamic() if self._npu is None else self._load_on_npu(self._npu)
        self._defaults = self._pipeline.get_generation_config()
        if self._meter is not None:
            self._meter.rest()
        return Loaded(time.monotonic() - began, loaded[0], genai.get_version(), loaded[1])

    def _load_dynamic(self) -> tuple[str, None]:
        options, device = msgspec.convert(self._spec.options, VisionOptions), self._spec.device.value
        properties: dict[str, Any] = dict(options.plugin_config)
        if options.cache_dir is not None:
            properties["CACHE_DIR"] = options.cache_dir
        # Without a paged cache, which one generation at a time has no use for.
        self._pipeline = genai.VLMPipeline(self._spec.path, device, ATTENTION_BACKEND="SDPA", **properties)
        return str(ov.Core().get_property(device, "FULL_DEVICE_NAME")), None

    def _load_on_npu(self, options: VisionNpuOptions) -> tuple[str, str | None]:
        core, emulated = ov.Core(), self._spec.emulated
        require_npu(core, emulated=emulated)
        self._meter = busy_meter(options.busy_counter, stand_in=options.stand_in)
        language = npu_properties(
            emulated=emulated,
            cache_dir=options.cache_dir,
            plugin_config=options.plugin_config,
            MAX_PROMPT_LEN=options.max_prompt_len,
            MIN_RESPONSE_LEN=options.min_response_len,
        )
        self._pipeline = genai.VLMPipeline(self._spec.path, NPU, MODEL_PROPERTIES={"language_model": language})
        return describe_npu(core, emulated=emulated)

    def _generate(self, job: GenerateJob, streamer: TokenStreamer) -> Any:
        prompt = job.vision_prompt
        if prompt is None:
            raise ValueError("a vision engine got a job of tokens")
        config = generation_config(job, self._defaults)
        # The edge rendered the template, with what the request set for it.
        config.apply_chat_template = False
        images = [_tensor(image) for image in prompt.images]
        return self._pipeline.generate(prompt.text, images=images, generation_config=config, streamer=streamer)

    def _failure(self, job: GenerateJob, error: RuntimeError) -> Failed:
        said = str(error)
        if any(mark in said for mark in _ABOUT_THE_PROMPT):
            return Failed(
                job.id, "invalid_request", f"the model does not take this prompt with its images: {brief(error)}"
            )
        raise DeviceBroken(f"the {self._spec.device} failed in a generation: {brief(error)}") from None

    def _limit(self) -> int | None:
        return None if self._npu is None else self._npu.max_prompt_len

    def _prompt_tokens(self, result: Any) -> int | None:
        return int(result.perf_metrics.get_num_input_tokens())


def _tensor(image: RawImage) -> ov.Tensor:
    rows = np.frombuffer(image.pixels, np.uint8).reshape(1, image.height, image.width, 3)
    return ov.Tensor(rows.copy())
