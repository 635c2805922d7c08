"""The speech recognition engine: GenAI's Whisper pipeline on CPU, GPU or NPU, one window of audio at a time.

`generate` releases the GIL. Between two tokens it calls the streamer, which takes in commands and may end the window;
with times asked for it calls it only when a segment is complete.

On the NPU, NPUW takes a prompt of one token for the continuation of the last answer, and answers with the audio before.
Such prompts are those that detect a language, which are placed elsewhere, and those of English-only models that are
asked for times, which get a blank in front."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from worker_node.core.types import Busy, Device
from worker_node.devices.blobs import brief, describe_npu, npu_properties, require_npu
from worker_node.devices.npu import busy_meter
from worker_node.engines.options import options_in
from worker_node.engines.protocol import (
    DeviceBroken,
    EngineSpec,
    Failed,
    Inbox,
    Loaded,
    NativeCall,
    Outbox,
    SerialRunner,
)
from worker_node.tasks.transcribe.task import (
    POSITIONS,
    RATE,
    SAMPLE_BYTES,
    Span,
    TranscribeJob,
    TranscribeOptions,
    Transcript,
)

_FULL_SCALE = np.float32(32768.0)
# Shorter audio than this GenAI's feature extractor refuses; silence is added to it.
_SHORTEST = 1600
_BLANK_PROMPT = " "
# Half of the decoder's positions, less the token that announces a prompt. With longer ones GenAI has too few positions
# left for an answer, or none and fails in the middle of a transcription.
_PROMPT_TOKENS = 223


class TranscribeRunner(SerialRunner[TranscribeJob]):
    """A `Runner` over one `WhisperPipeline`."""

    jobs = TranscribeJob

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        self._spec = spec
        self._options = options_in(spec, TranscribeOptions)
        self._on_npu = spec.device is Device.NPU

    def load(self) -> Loaded:
        began = time.monotonic()
        options, emulated, core = self._options, self._spec.emulated, ov.Core()
        device = self._spec.device.value
        properties: dict[str, Any] = {}
        if options.precision:
            properties["INFERENCE_PRECISION_HINT"] = options.precision
        if self._on_npu:
            require_npu(core, options.plugin_config, emulated=emulated)
            name, driver = describe_npu(core, emulated=emulated)
            properties = npu_properties(
                emulated=emulated,
                cache_dir=options.cache_dir,
                plugin_config=options.plugin_config,
                **properties,
            )
        else:
            name, driver = str(core.get_property(device, "FULL_DEVICE_NAME")), None
            cache = {"CACHE_DIR": options.cache_dir} if options.cache_dir else {}
            properties |= cache | options.plugin_config

        # Other devices have no busy counter.
        self._meter = busy_meter(options.busy_counter, self._spec.energy_meter(), stand_in=options.stand_in)

        # The decoder that gives the times of words is another one: on the NPU its prefill takes 20 times as long.
        words = bool(options.word_timestamps)
        self._pipeline = genai.WhisperPipeline(self._spec.path, device, word_timestamps=words, **properties)
        self._meter.rest()
        return Loaded(time.monotonic() - began, name, genai.get_version(), driver)

    def _run(self, job: TranscribeJob, emit: Outbox, poll: Inbox) -> None:
        try:
            config = self._config(job)
        except RuntimeError as error:
            emit(Failed(job.id, "invalid_request", brief(error)))
            return

        started, late = time.monotonic(), False
        failure: BaseException | None = None

        def on_text(_text: str) -> genai.StreamingStatus:
            # An exception out of this callback would be printed and ignored.
            nonlocal failure, late
            try:
                poll()
            except BaseException as error:  # noqa: BLE001  (raised below, when the pipeline has returned)
                failure = error
            late = job.deadline <= time.monotonic()
            ended = failure is not None or self._cancelled or late
            return genai.StreamingStatus.CANCEL if ended else genai.StreamingStatus.RUNNING

        samples = np.frombuffer(job.samples, "<i2").astype(np.float32) / _FULL_SCALE
        if len(samples) < _SHORTEST:
            samples = np.pad(samples, (0, _SHORTEST - len(samples)))
        emit(NativeCall("run", POSITIONS + job.prompt_tokens, [job.id]))
        self._meter.begin()
        try:
            result = self._pipeline.generate(samples.tolist(), config, on_text)
        except RuntimeError as error:
            # The job was examined before, so this is the device or its driver, and every next job would meet it too.
            raise DeviceBroken(f"the {self._spec.device} failed in a transcription: {brief(error)}") from None

        busy = self._meter.end()
        if failure is not None:
            raise failure
        if self._cancelled:
            return
        if late:
            emit(Failed(job.id, "deadline_exceeded", "the deadline passed during transcription"))
            return
        emit(_transcript(job, result, started, busy))

    def _config(self, job: TranscribeJob) -> genai.WhisperGenerationConfig:
        """The settings of one window. Raises RuntimeError when the model does not know the language or the task."""
        config = self._pipeline.get_generation_config()
        if config.is_multilingual:
            if job.language is not None:
                config.language = f"<|{job.language}|>"
            config.task = "translate" if job.translate else "transcribe"
        config.return_timestamps, config.word_timestamps = job.segments, job.words
        prompt = self._fitting(job.prompt)
        if self._on_npu and not config.is_multilingual and job.segments and not prompt:
            prompt = _BLANK_PROMPT
        if prompt:
            config.initial_prompt = prompt
        if job.temperature > 0:
            config.do_sample, config.temperature = True, job.temperature
        config.validate()
        return config

    def _fitting(self, prompt: str) -> str:
        """The end of a prompt, as much as the decoder takes; OpenAI's API reads no more of it either."""
        tokenizer = self._pipeline.get_tokenizer()
        text, keep = prompt.strip(), _PROMPT_TOKENS
        while text:
            # GenAI puts the blank in front, too.
            ids = tokenizer.encode(f" {text}", add_special_tokens=False).input_ids.data[0]
            if len(ids) <= _PROMPT_TOKENS:
                return text
            # The cut may fall within a character, and what is left of that takes more tokens than before.
            text = tokenizer.decode(ids[-keep:].tolist()).lstrip("\ufffd").strip()
            keep -= 1
        return text


def _transcript(job: TranscribeJob, result: Any, started: float, busy: Busy) -> Transcript:
    seconds = len(job.samples) / (SAMPLE_BYTES * RATE)

    # A segment that the window's end cuts off has no end of its own.
    segments = tuple(
        Span(chunk.start_ts, chunk.end_ts if chunk.end_ts >= 0 else seconds, chunk.text)
        for chunk in result.chunks or ()
    )
    words = tuple(Span(word.start_ts, word.end_ts, word.word) for word in result.words or ())
    seconds = time.monotonic() - started
    return Transcript(
        job.id,
        result.texts[0],
        started,
        seconds,
        language=result.language or None,
        segments=segments,
        words=words,
        tokens=result.perf_metrics.get_num_generated_tokens(),
        busy=busy,
        measured_tokens=job.prompt_tokens,
        measured_s=seconds,
    )
