"""The continuous-batching generation engine (CPU, GPU): paged KV cache, split-fuse prefill, prefix caching.

`ContinuousBatchingPipeline.step()` advances every running sequence by one token and holds the GIL for as long as it
takes; the engine process has nothing else to do meanwhile, so its loop is simply: commands, step, events.

GenAI serves requests in the order in which it gets them. So it gets no more of them than fill its next steps; the
others wait in a queue that knows priorities and deadlines. Batch prompts that GenAI has not finished are taken back
when an interactive request arrives, so that it is part of the next step.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import msgspec
import numpy as np
import openvino as ov
import openvino_genai as genai

from worker_node.engines.base import Inbox, Outbox
from worker_node.engines.generation_continuous_options import ContinuousOptions
from worker_node.engines.messages import (
    TOKEN_DTYPE,
    EmbedJob,
    EngineSpec,
    EngineStats,
    Event,
    Failed,
    GenerateJob,
    Job,
    Loaded,
    NativeCall,
    Step,
    TokenDelta,
)
from worker_node.engines.sampling import generation_config
from worker_node.scheduling.jobs import JobQueue, Pick
from worker_node.scheduling.shares import batch_sequences

# What is handed over ahead: prompts of two steps' tokens and at least two of them, so that a step which ends one prompt
# has another to be filled up with.
_STEPS_AHEAD = 2
_PROMPTS_AHEAD = 2

_FINISH = {
    genai.GenerationFinishReason.STOP: "stop",
    genai.GenerationFinishReason.LENGTH: "length",
}


@dataclass(slots=True)
class _Running:
    pick: Pick[GenerateJob]
    handle: genai.GenerationHandle
    handed_over: float
    started: bool = False
    generated: int = 0

    @property
    def job(self) -> GenerateJob:
        return self.pick.job


class ContinuousRunner:
    """A `Runner` over one `ContinuousBatchingPipeline`."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._options = msgspec.convert(spec.options, ContinuousOptions)
        self._queue: JobQueue[GenerateJob] = JobQueue()
        self._running: dict[int, _Running] = {}
        self._batch_limit = batch_sequences(self._options.max_num_seqs)
        self._taken_back: set[int] = set()
        # GenAI's own, because a job that was taken back is a new request to it.
        self._handles = itertools.count()
        self._steps = 0
        self._stepped = 0

    @property
    def has_work(self) -> bool:
        # A cancelled sequence keeps its blocks of the KV cache until the scheduler's next step, so there is one.
        return bool(len(self._queue) or self._running or self._pipeline.has_non_finished_requests())

    @property
    def wake_fd(self) -> int | None:
        return None

    def stats(self) -> EngineStats:
        metrics = self._pipeline.get_metrics()
        # GenAI counts as of its last step: requests that have ended since are no longer running.
        running = min(metrics.scheduled_requests, len(self._running))
        # GenAI tells its cache's use in per cent, and as of its last step too; with nothing running all of it is free.
        return EngineStats(
            waiting=len(self._queue) + len(self._running) - running,
            running=running,
            runs=self._steps,
            rows=self._stepped,
            kv_cache_usage=metrics.cache_usage / 100 if self._running else 0.0,
        )

    def load(self) -> Loaded:
        began = time.monotonic()
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = self._options.max_num_batched_tokens
        scheduler.max_num_seqs = self._options.max_num_seqs
        scheduler.cache_size = self._options.cache_size_gb
        scheduler.dynamic_split_fuse = self._options.dynamic_split_fuse
        scheduler.enable_prefix_caching = self._options.enable_prefix_caching
        device = self._spec.device.value
        properties = self._options.properties()
        self._pipeline = genai.ContinuousBatchingPipeline(self._spec.path, scheduler, device, properties)
        self._defaults = self._pipeline.get_config()
        return Loaded(
            seconds=time.monotonic() - began,
            device_name=str(ov.Core().get_property(device, "FULL_DEVICE_NAME")),
            runtime=genai.get_version(),
        )

    def submit(self, job: Job) -> None:
        if isinstance(job, EmbedJob):
            raise TypeError("a generation engine was sent an embedding")
        self._queue.add(job)

    def _hand_over(self, now: float, emit: Outbox) -> None:
        if self._queue.interactive_waiting:
            self._take_back_batch()
        ahead = [running.job.prompt_tokens for running in self._running.values() if not running.started]
        batch = sum(not running.job.interactive for running in self._running.values())
        while len(self._running) < self._options.max_num_seqs and (
            len(ahead) < _PROMPTS_AHEAD or sum(ahead) < _STEPS_AHEAD * self._options.max_num_batched_tokens
        ):
            pick = self._queue.next(batch=batch < self._batch_limit)
            if pick is None:
                return
            if pick.job.grammar is not None:
                emit(NativeCall("prepare", len(pick.job.grammar), [pick.job.id]))  # GenAI compiles it now
            failure = self._add(pick, now)
            if failure is None:
                ahead.append(pick.job.prompt_tokens)
                batch += not pick.job.interactive
            else:
                emit(failure)
                if pick.owed:
                    self._queue.credit.charge(-pick.job.prompt_tokens - pick.job.max_new_tokens)

    def _take_back_batch(self) -> None:
        """Take back the batch prompts that GenAI has not finished, but for those that batch work is owed.

        What was computed of them stays in the prefix cache; without one it is lost, so it happens once to a job.
        """
        for running in reversed(list(self._running.values())):
            job = running.job
            if running.started or job.interactive or running.pick.owed:
                continue
            if not self._options.enable_prefix_caching and job.id in self._taken_back:
                continue
            self._taken_back.add(job.id)
            del self._running[job.id]
            running.handle.cancel()
            self._queue.add(job, first=True)

    def _add(self, pick: Pick[GenerateJob], now: float) -> Failed | None:
        job = pick.job
        prompt = np.frombuffer(job.tokens, TOKEN_DTYPE).astype(np.int64)[None]
        try:
            config = generation_config(job, self._defaults)
            handle = self._pipeline.add_request(next(self._handles), ov.Tensor(prompt), config)
        except RuntimeError as error:
            # Only the first line: GenAI's messages go on with source positions, and may quote the configuration.
            return Failed(job.id, "invalid_request", str(error).strip().splitlines()[-1])
        self._running[job.id] = _Running(pick, handle, now)
        return None

    def cancel(self, job_id: int) -> None:
        if self._queue.remove(job_id):
            self._taken_back.discard(job_id)
            return
        running = self._running.get(job_id)
        if running is not None:
            running.handle.cancel()
            self._release(running)

    def _release(self, running: _Running) -> None:
        """A running job ends: batch work is owed again what it did not use of its share."""
        job = running.job
        del self._running[job.id]
        self._taken_back.discard(job.id)
        if running.pick.owed:
            self._queue.credit.charge(running.generated - job.max_new_tokens)

    def step(self, emit: Outbox, poll: Inbox) -> None:  # noqa: ARG002  (a step is short: the loop polls between)
        now = time.monotonic()
        for job in self._queue.expired(now):
            self._taken_back.discard(job.id)
            emit(Failed(job.id, "deadline_exceeded", "the deadline passed while the request was queued"))
        for job_id in [i for i, r in self._running.items() if r.job.deadline <= now]:
            self.cancel(job_id)
            emit(Failed(job_id, "deadline_exceeded", "the deadline passed during generation"))
        self._hand_over(now, emit)
        if self._pipeline.has_non_finished_requests():
            if self._running:
                emit(NativeCall("step", self._step_tokens(), list(self._running)))
            self._pipeline.step()
            self._steps += 1
            self._stepped += len(self._running)
        deltas: list[TokenDelta] = []
        for job_id, running in list(self._running.items()):
            failure = self._read(job_id, running, deltas)
            if failure is not None:
                emit(failure)
        if deltas:
            emit(Step(deltas))

    def _step_tokens(self) -> int:
        """How many tokens the next step computes, at most."""
        prompts = sum(running.job.prompt_tokens for running in self._running.values() if not running.started)
        if self._options.dynamic_split_fuse:
            prompts = min(prompts, self._options.max_num_batched_tokens)
        return prompts + len(self._running)

    def _read(self, job_id: int, running: _Running, deltas: list[TokenDelta]) -> Event | None:
        handle = running.handle
        tokens: list[int] = []
        logprobs: list[float] = []
        finish: str | None = None
        while handle.can_read():
            (output,) = handle.read().values()
            tokens += output.generated_ids
            if running.job.logprobs:
                logprobs += output.generated_log_probs
            finish = _FINISH.get(output.finish_reason)
        status = handle.get_status()
        if status == genai.GenerationStatus.IGNORED:
            self._release(running)
            return Failed(job_id, "overloaded", "the KV cache is full; raise cache_size_gb or ask for less")
        running.generated += len(tokens)
        if running.job.interactive:
            self._queue.served(len(tokens) + (0 if running.started or not tokens else running.job.prompt_tokens))
        if status == genai.GenerationStatus.FINISHED:
            self._release(running)
            finish = finish or "length"
        elif not tokens:
            return None
        started = None if running.started else running.handed_over
        running.started = True
        at = time.monotonic()
        deltas.append(TokenDelta(job_id, tokens, finish, started, logprobs=logprobs or None, at=at))
        return None

    def close(self) -> None:
        for job_id in list(self._running):
            self.cancel(job_id)
        # The scheduler frees a cancelled sequence's blocks in its next step, and complains of a leak if there is none.
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        del self._pipeline
