"""Generation on the NPU (static shapes), and the base of engines that run one generation at a time."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino as ov
import openvino_genai as genai

from worker_node.core.types import Busy
from worker_node.devices.blobs import NPU, SMALL, ModelBlobs, brief, describe_npu, npu_properties, require_npu, unusable
from worker_node.devices.npu import BusyMeter, busy_meter
from worker_node.engines.options import options_in
from worker_node.engines.protocol import (
    TOKEN_DTYPE,
    DeviceBroken,
    EngineSpec,
    EngineStats,
    Failed,
    Inbox,
    Loaded,
    NativeCall,
    Outbox,
    SerialRunner,
)
from worker_node.tasks.generate.messages import GenerateJob, Step, TokenDelta
from worker_node.tasks.generate.prefixes import ChunkCache
from worker_node.tasks.generate.sampling import generation_config
from worker_node.tasks.generate.task import StatefulOptions


class TokenStreamer(genai.StreamerBase):  # type: ignore[misc]  # openvino_genai has no types
    """Calls `on_tokens` for new token ids; the generation is stopped when that returns False or raises.

    An exception out of `write` would make the pipeline unusable for good, so it is kept in `failure` for the caller to
    raise when `generate` has returned. `stopped` says whether this streamer ended the generation.
    """

    def __init__(self, on_tokens: Callable[[list[int]], bool]) -> None:
        super().__init__()
        self._on_tokens = on_tokens
        self.stopped = False
        self.failure: BaseException | None = None

    def write(self, token: int | list[int]) -> genai.StreamingStatus:
        if not self.stopped:
            try:
                self.stopped = not self._on_tokens(token if isinstance(token, list) else [token])
            except BaseException as error:  # noqa: BLE001  (raised by the engine when it is safe)
                self.failure, self.stopped = error, True
        return genai.StreamingStatus.CANCEL if self.stopped else genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Nothing: the end is what `generate` returns."""


class PipelineRunner(SerialRunner[GenerateJob]):
    """The base of generation engines that run one generation at a time, in one call of GenAI's.

    `generate` returns when the answer is complete; everything in between happens in the streamer, which GenAI calls for
    each token: it sends the token, takes in commands, and says whether to go on. The prefill cannot be interrupted.
    A derived class loads `_pipeline`, `_defaults` and `_meter`, and `_prefixes` where the pipeline has a prefix cache.
    `_limit` are the tokens of the longest prompt; None for any.
    """

    jobs = GenerateJob
    _defaults: genai.GenerationConfig
    _meter: BusyMeter
    _prefixes: ChunkCache | None = None
    _limit: int | None = None

    @abstractmethod
    def _generate(self, job: GenerateJob, streamer: TokenStreamer) -> Any:
        """Run one generation; the result has `finish_reasons`. Raises RuntimeError as GenAI does."""

    @abstractmethod
    def _failure(self, job: GenerateJob, error: RuntimeError) -> Failed:
        """What a failed generation means for its job alone. Raises DeviceBroken for a failure of the device."""

    def _prompt_tokens(self, _result: Any) -> int | None:
        """The exact size of the prompt, where the edge cannot know it."""
        return None

    def stats(self) -> EngineStats:
        stats, prefixes = super().stats(), self._prefixes
        if prefixes is None:
            return stats
        return msgspec.structs.replace(
            stats, prefix_asked_tokens=prefixes.asked_tokens, prefix_hit_tokens=prefixes.hit_tokens
        )

    def _run(self, job: GenerateJob, emit: Outbox, poll: Inbox) -> None:
        refusal = self._refusal(job)
        if refusal is not None:
            emit(refusal)
            return
        meter, started = self._meter, time.monotonic()
        first, cached = True, None
        if self._prefixes is not None:
            cached = self._prefixes.look_up(job.tokens, counted=not job.internal)

        def delta(tokens: list[int], busy: Busy, finish: str | None = None, size: int | None = None) -> TokenDelta:
            """The first one reports the start and the prefill. The edge may end the answer after any of them."""
            nonlocal first
            begins, first, at = first, False, time.monotonic()
            return TokenDelta(
                job.id,
                tokens,
                finish,
                started if begins else None,
                busy,
                at=at,
                prefilled=job.prompt_tokens - (cached or 0) if begins else 0,
                prefill_s=at - started if begins else 0.0,
                prompt_tokens=size,
                cached=cached,
            )

        def on_tokens(tokens: list[int]) -> bool:
            self._generated += len(tokens)
            emit(Step([delta(tokens, meter.so_far())]))
            poll()
            return not self._cancelled and job.ends > time.monotonic()

        streamer = TokenStreamer(on_tokens)
        emit(NativeCall("prefill", job.prompt_tokens, [job.id]))
        meter.begin()
        try:
            result = self._generate(job, streamer)
        except RuntimeError as error:
            failed = self._failure(job, error)
            meter.end()
            emit(failed)
            return
        # The prefill cannot be interrupted, so what was cancelled has been computed to its end, too.
        if self._prefixes is not None:
            self._prefixes.computed(job.tokens, cached or 0)
        busy = meter.end()
        if streamer.failure is not None:
            raise streamer.failure
        if self._cancelled:
            return
        finish = _finish(result.finish_reasons[0], stopped=streamer.stopped)
        if finish is None:
            emit(Failed(job.id, "deadline_exceeded", "the deadline passed during generation"))
            return
        emit(Step([delta([], busy, finish, self._prompt_tokens(result))]))

    def _refusal(self, job: GenerateJob) -> Failed | None:
        """Why GenAI would not take this job, or None. What it refuses itself must not look like a device failure."""
        limit = self._limit
        if limit is not None and job.prompt_tokens > limit:
            return Failed(
                job.id,
                "context_length_exceeded",
                f"the prompt has {job.prompt_tokens} tokens and this NPU engine takes {limit}",
            )
        if job.sampling.logprobs:
            return Failed(job.id, "unsupported_parameter", "this engine does not give logprobs; place it elsewhere")
        try:
            generation_config(job, self._defaults).validate()
        except (RuntimeError, TypeError, ValueError) as error:
            return Failed(job.id, "invalid_request", brief(error))
        return None


def _finish(reason: genai.GenerationFinishReason, *, stopped: bool) -> str | None:
    """GenAI's NONE means that the KV cache is full or that the streamer stopped it (None), which only we can tell."""
    if reason == genai.GenerationFinishReason.STOP:
        return "stop"
    if reason == genai.GenerationFinishReason.NONE and stopped:
        return None
    return "length"


# GenAI demands the suffix.
_BLOB = "generate.blob"
# What OpenVINO says after it has compiled for a device that is not there.
_NO_DEVICE = ("Failed to create infer request", "Level zero backend is not found", "Tensor was not initialized")


class StatefulRunner(PipelineRunner):
    """A `Runner` over one `LLMPipeline` on the NPU."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        self._spec = spec
        self._options = options = options_in(spec, StatefulOptions)
        self._limit = options.max_prompt_len
        if options.caches_prefixes:
            most, chunk = options.prefix_cache_max_num_blocks or 1, options.prefill_chunk_size or 1
            self._prefixes = ChunkCache(most, chunk, options.max_prompt_len)

    def load(self) -> Loaded:
        began = time.monotonic()
        options, emulated = self._options, self._spec.emulated
        core = ov.Core()
        require_npu(core, options.compiler_config, emulated=emulated)
        self._meter = busy_meter(options.busy_counter, self._spec.energy_meter(), stand_in=options.stand_in)
        blobs = ModelBlobs(
            self._spec.model_id,
            Path(self._spec.path),
            [_BLOB],
            options.compiled_in(),
            emulated,
            genai.get_version(),
            options.platform,
        )

        if options.platform is not None:
            return self._compiled_elsewhere(blobs, core, began)
        if options.blobs is not None:
            self._pipeline = self._imported(blobs, core, Path(options.blobs).expanduser())
        elif options.export_blobs is not None:
            self._pipeline = self._compiled(Path(options.export_blobs))
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

    def _compiled_elsewhere(self, blobs: ModelBlobs, core: ov.Core, began: float) -> Loaded:
        """Write the blobs for another machine's NPU. Raises RuntimeError where the compiler does."""
        target = Path(str(self._options.export_blobs))
        try:
            self._compiled(target)
        except RuntimeError as error:
            # The pipeline exports first, and fails when it wants to run what no device here can.
            if not any(text in str(error) for text in _NO_DEVICE):
                raise
            self._pipeline = None
        blobs.written(core, target)
        return Loaded(time.monotonic() - began, f"{NPU} {self._options.platform}", genai.get_version(), compiled=1)

    def _compiled(self, exported: Path | None = None) -> genai.LLMPipeline:
        options = self._options
        export = {"EXPORT_BLOB": "YES", "BLOB_PATH": str(exported / _BLOB), **SMALL} if exported is not None else {}
        properties = npu_properties(
            emulated=self._spec.emulated,
            cache_dir=options.cache_dir,
            plugin_config=options.compiler_config,
            **options.properties(),
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
