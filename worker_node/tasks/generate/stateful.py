"""The generation engine of the NPU: GenAI's stateful pipeline, one generation at a time, in static shapes.

`generate` releases the GIL and returns when the answer is complete; everything in between happens in the streamer,
which GenAI calls for each token: it sends the token, takes in commands, and says whether to go on. The prefill cannot
be interrupted.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np
import openvino as ov
import openvino_genai as genai

from worker_node.devices.busy import Busy
from worker_node.devices.npu_properties import NPU, brief, busy_meter, describe_npu, npu_properties, require_npu
from worker_node.engines.base import DeviceBroken, Inbox, Outbox
from worker_node.engines.messages import (
    TOKEN_DTYPE,
    EngineSpec,
    EngineStats,
    Failed,
    Loaded,
    NativeCall,
)
from worker_node.scheduling.jobs import JobQueue
from worker_node.tasks.generate.messages import GenerateJob, Step, TokenDelta
from worker_node.tasks.generate.sampling import generation_config
from worker_node.tasks.generate.stateful_options import StatefulOptions
from worker_node.tasks.generate.token_streamer import TokenStreamer


class StatefulRunner:
    """A `Runner` over one `LLMPipeline` on the NPU."""

    jobs = GenerateJob

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._options = msgspec.convert(spec.options, StatefulOptions)
        self._queue: JobQueue[GenerateJob] = JobQueue()
        self._current: GenerateJob | None = None
        self._cancelled = False
        self._generated = 0

    @property
    def has_work(self) -> bool:
        return len(self._queue) > 0

    @property
    def wake_fd(self) -> None:
        return None

    def stats(self) -> EngineStats:
        return EngineStats(waiting=len(self._queue), running=int(self._current is not None))

    def load(self) -> Loaded:
        began = time.monotonic()
        options, emulated = self._options, self._spec.emulated
        core = ov.Core()
        require_npu(core, emulated=emulated)
        self._meter = busy_meter(options.busy_counter, stand_in=options.stand_in)
        properties = npu_properties(
            emulated=emulated,
            cache_dir=options.cache_dir,
            plugin_config=options.plugin_config,
            MAX_PROMPT_LEN=options.max_prompt_len,
            MIN_RESPONSE_LEN=options.min_response_len,
            PREFILL_HINT=options.prefill_hint,
            GENERATE_HINT=options.generate_hint,
            NPUW_LLM_PREFILL_CHUNK_SIZE=options.prefill_chunk_size,
        )
        self._pipeline = genai.LLMPipeline(self._spec.path, NPU, **properties)
        self._defaults = self._pipeline.get_generation_config()
        self._meter.rest()
        name, driver = describe_npu(core, emulated=emulated)
        return Loaded(time.monotonic() - began, name, genai.get_version(), driver)

    def submit(self, job: GenerateJob) -> None:
        self._queue.add(job)

    def cancel(self, job_id: int) -> None:
        if self._current is not None and self._current.id == job_id:
            self._cancelled = True
        else:
            self._queue.remove(job_id)

    def step(self, emit: Outbox, poll: Inbox) -> None:
        now = time.monotonic()
        for late in self._queue.expired(now):
            emit(Failed(late.job.id, "deadline_exceeded", "the deadline passed while the request was queued"))
        pick = self._queue.next()
        if pick is None:
            return
        self._current, self._cancelled, self._generated = pick.job, False, 0
        try:
            self._generate(pick.job, emit, poll)
        finally:
            self._current = None
            self._queue.computed(pick, pick.job.prompt_tokens + self._generated)

    def _generate(self, job: GenerateJob, emit: Outbox, poll: Inbox) -> None:
        refusal = self._refusal(job)
        if refusal is not None:
            emit(refusal)
            return
        started: float | None = time.monotonic()

        def delta(tokens: list[int], finish: str | None, busy: Busy) -> TokenDelta:
            # An answer may end with any of them, as far as the edge is concerned, so each tells all that is known.
            at = time.monotonic()
            first = (job.prompt_tokens, at - started) if started is not None else (0, 0.0)
            return TokenDelta(
                job.id,
                tokens,
                finish,
                started,
                busy.us,
                busy_shared=busy.shared,
                at=at,
                prefilled=first[0],
                prefill_s=first[1],
            )

        def on_tokens(tokens: list[int]) -> bool:
            nonlocal started
            self._generated += len(tokens)
            emit(Step([delta(tokens, None, self._meter.so_far())]))
            started = None
            poll()
            return not self._cancelled and job.deadline > time.monotonic()

        streamer = TokenStreamer(on_tokens)
        ids = np.frombuffer(job.tokens, TOKEN_DTYPE).astype(np.int64)[None]
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        emit(NativeCall("prefill", ids.shape[1], [job.id]))
        self._meter.begin()
        try:
            result = self._pipeline.generate(inputs, generation_config(job, self._defaults), streamer)
        except RuntimeError as error:
            # The job was examined before, so this is the device or its driver, and every next job would meet it too.
            raise DeviceBroken(f"the NPU failed in a generation: {brief(error)}") from None
        busy = self._meter.end()
        if streamer.failure is not None:
            raise streamer.failure
        if self._cancelled:
            return
        finish = _finish(result.finish_reasons[0], stopped=streamer.stopped)
        if finish is None:
            emit(Failed(job.id, "deadline_exceeded", "the deadline passed during generation"))
            return
        emit(Step([delta([], finish, busy)]))

    def _refusal(self, job: GenerateJob) -> Failed | None:
        """Why GenAI would not take this job, or None. What it refuses itself must not look like a device failure."""
        if job.prompt_tokens > self._options.max_prompt_len:
            return Failed(
                job.id,
                "context_length_exceeded",
                f"the prompt has {job.prompt_tokens} tokens and this NPU engine takes {self._options.max_prompt_len}",
            )
        if job.logprobs:
            return Failed(job.id, "unsupported_parameter", "the NPU engine does not give logprobs; place it elsewhere")
        try:
            generation_config(job, self._defaults).validate()
        except RuntimeError as error:
            return Failed(job.id, "invalid_request", brief(error))
        return None

    def close(self) -> None:
        del self._pipeline


def _finish(reason: genai.GenerationFinishReason, *, stopped: bool) -> str | None:
    """GenAI's NONE means that the KV cache is full or that the streamer stopped it (None), which only we can tell."""
    if reason == genai.GenerationFinishReason.STOP:
        return "stop"
    if reason == genai.GenerationFinishReason.NONE and stopped:
        return None
    return "length"
