"""The generation engine of the NPU: GenAI's stateful pipeline, one generation at a time, in static shapes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino as ov
import openvino_genai as genai

from worker_node.devices.blobs import (
    NPU,
    SMALL,
    ModelBlobs,
    brief,
    busy_meter,
    describe_npu,
    npu_properties,
    require_npu,
    unusable,
)
from worker_node.engines.protocol import TOKEN_DTYPE, DeviceBroken, EngineSpec, Failed, Loaded
from worker_node.tasks.generate.messages import GenerateJob
from worker_node.tasks.generate.sampling import generation_config
from worker_node.tasks.generate.serial import SerialRunner
from worker_node.tasks.generate.stateful_options import StatefulOptions
from worker_node.tasks.generate.token_streamer import TokenStreamer

# GenAI demands the suffix.
_BLOB = "generate.blob"


class StatefulRunner(SerialRunner):
    """A `Runner` over one `LLMPipeline` on the NPU."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        self._spec = spec
        self._options = msgspec.convert(spec.options, StatefulOptions)

    def load(self) -> Loaded:
        began = time.monotonic()
        options, emulated = self._options, self._spec.emulated
        core = ov.Core()
        require_npu(core, emulated=emulated)
        self._meter = busy_meter(options.busy_counter, stand_in=options.stand_in)
        blobs = ModelBlobs(
            self._spec.model_id, Path(self._spec.path), [_BLOB], options.compiled_in(), emulated, genai.get_version()
        )
        if options.blobs is not None:
            self._pipeline = self._imported(blobs, core, Path(options.blobs).expanduser())
        elif options.export_blobs is not None:
            self._pipeline = self._compiled(
                EXPORT_BLOB="YES", BLOB_PATH=str(Path(options.export_blobs) / _BLOB), **SMALL
            )
            blobs.written(core, Path(options.export_blobs))
        else:
            self._pipeline = self._compiled()
        self._defaults = self._pipeline.get_generation_config()
        self._meter.rest()
        name, driver = describe_npu(core, emulated=emulated)
        imported = int(options.blobs is not None)
        return Loaded(
            time.monotonic() - began, name, genai.get_version(), driver, compiled=1 - imported, imported=imported
        )

    def _compiled(self, **export: Any) -> genai.LLMPipeline:
        options = self._options
        properties = npu_properties(
            emulated=self._spec.emulated,
            cache_dir=options.cache_dir,
            plugin_config=options.plugin_config,
            MAX_PROMPT_LEN=options.max_prompt_len,
            MIN_RESPONSE_LEN=options.min_response_len,
            PREFILL_HINT=options.prefill_hint,
            GENERATE_HINT=options.generate_hint,
            NPUW_LLM_PREFILL_CHUNK_SIZE=options.prefill_chunk_size,
        )
        return genai.LLMPipeline(self._spec.path, NPU, **properties, **export)

    def _imported(self, blobs: ModelBlobs, core: ov.Core, source: Path) -> genai.LLMPipeline:
        """Load what was compiled ahead of time; all else is compiled in. Raises BlobRejected."""
        properties = blobs.checked(core, source)
        try:
            return genai.LLMPipeline(self._spec.path, NPU, BLOB_PATH=str(source / _BLOB), **properties)
        # A damaged name in a blob fails in Python, with another error than OpenVINO's own.
        except (RuntimeError, ValueError, MemoryError) as error:
            raise unusable(source / _BLOB, error) from None

    def _generate(self, job: GenerateJob, streamer: TokenStreamer) -> Any:
        ids = np.frombuffer(job.tokens, TOKEN_DTYPE).astype(np.int64)[None]
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        return self._pipeline.generate(inputs, generation_config(job, self._defaults), streamer)

    def _failure(self, _job: GenerateJob, error: RuntimeError) -> Failed:
        # The job was examined before, so this is the device or its driver, and every next job would meet it too.
        raise DeviceBroken(f"the NPU failed in a generation: {brief(error)}") from None

    def _limit(self) -> int:
        return self._options.max_prompt_len
