"""The engine of vision-language models: GenAI's `VLMPipeline`, one generation at a time.

On the NPU GenAI runs the language model there, and vision and the embedding of texts on the CPU."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from worker_node.core.types import Device
from worker_node.devices.blobs import brief, describe_npu, npu_properties, require_npu
from worker_node.devices.npu import busy_meter
from worker_node.engines.options import options_in
from worker_node.engines.protocol import DeviceBroken, EngineSpec, Failed, Loaded
from worker_node.tasks.generate.messages import GenerateJob
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
            self._npu = options_in(spec, VisionNpuOptions)
            self._limit = self._npu.max_prompt_len

    def load(self) -> Loaded:
        began = time.monotonic()
        core, emulated, device = ov.Core(), self._spec.emulated, self._spec.device.value
        counter, stand_in = None, False
        if (npu := self._npu) is None:
            options = options_in(self._spec, VisionOptions)
            name, driver = str(core.get_property(device, "FULL_DEVICE_NAME")), None
            cache = {} if options.cache_dir is None else {"CACHE_DIR": options.cache_dir}
            # Without a paged cache, which one generation at a time has no use for.
            properties: dict[str, Any] = {"ATTENTION_BACKEND": "SDPA", **options.plugin_config, **cache}
        else:
            require_npu(core, npu.plugin_config, emulated=emulated)
            name, driver = describe_npu(core, emulated=emulated)
            counter, stand_in = npu.busy_counter, npu.stand_in
            language = npu_properties(
                emulated=emulated,
                cache_dir=npu.cache_dir,
                plugin_config=npu.plugin_config,
                MAX_PROMPT_LEN=npu.max_prompt_len,
                MIN_RESPONSE_LEN=npu.min_response_len,
            )
            properties = {"MODEL_PROPERTIES": {"language_model": language}}

        self._meter = busy_meter(counter, self._spec.energy_meter(), stand_in=stand_in)
        self._pipeline = genai.VLMPipeline(self._spec.path, device, **properties)
        self._defaults = self._pipeline.get_generation_config()
        self._meter.rest()
        return Loaded(time.monotonic() - began, name, genai.get_version(), driver)

    def _generate(self, job: GenerateJob, streamer: TokenStreamer) -> Any:
        prompt = job.vision_prompt
        if prompt is None:
            raise ValueError("a vision engine got a job of tokens")
        config = generation_config(job, self._defaults)
        # The edge rendered the template, with what the request set for it.
        config.apply_chat_template = False
        images = []
        for image in prompt.images:
            rows = np.frombuffer(image.pixels, np.uint8).reshape(1, image.height, image.width, 3)
            images.append(ov.Tensor(rows.copy()))
        return self._pipeline.generate(prompt.text, images=images, generation_config=config, streamer=streamer)

    def _failure(self, job: GenerateJob, error: RuntimeError) -> Failed:
        said = str(error)
        if any(mark in said for mark in _ABOUT_THE_PROMPT):
            return Failed(
                job.id, "invalid_request", f"the model does not take this prompt with its images: {brief(error)}"
            )
        raise DeviceBroken(f"the {self._spec.device} failed in a generation: {brief(error)}") from None

    def _prompt_tokens(self, result: Any) -> int | None:
        return int(result.perf_metrics.get_num_input_tokens())
