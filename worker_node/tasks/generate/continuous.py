"""The continuous-batching generation engine (CPU, GPU): paged KV cache, split-fuse prefill, prefix caching.

`ContinuousBatchingPipeline.step()` advances every running sequence by one token and holds the GIL for as long as it
takes; the engine process has nothing else to do meanwhile, so its loop is simply: commands, step, events.

GenAI computes prompts in the order in which it gets them. So it gets no more of them than fill its next steps; the
others wait in a queue that knows priorities, sizes and deadlines. A prompt of several steps is handed over in parts,
each with all that comes before it, which the prefix cache holds: what arrives meanwhile waits for the present part.

What has been begun is never taken out of the pipeline: GenAI puts a block of the KV cache under the hash of all its
tokens before they are computed. If a sequence is cancelled when a step ended in the middle of a block, later prompts
that begin alike are given that block, and their answers are wrong. So parts end with a block.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import openvino as ov
import openvino_genai as genai

from worker_node.devices.npu import OverlappingRuns, busy_meter
from worker_node.engines.options import options_in
from worker_node.engines.protocol import (
    TOKEN_DTYPE,
    EngineSpec,
    EngineStats,
    Event,
    Failed,
    Inbox,
    Loaded,
    NativeCall,
    Outbox,
)
from worker_node.scheduling.prompts import (
    BLOCK_TOKENS,
    JobQueue,
    PendingPrompt,
    PrefillMeter,
    batch_sequences,
    choose_prompts,
    computed_in_step,
    end_of_part,
)
from worker_node.tasks.generate.messages import GenerateJob, Sampling, Step, TokenDelta
from worker_node.tasks.generate.prefixes import PrefixHits
from worker_node.tasks.generate.sampling import generation_config
from worker_node.tasks.generate.task import ContinuousOptions

# Often enough that the counter of the energy does not begin again in between.
_STEPS_PER_READING = 256


class ContinuousRunner:
    """A `Runner` over one `ContinuousBatchingPipeline`."""

    jobs = GenerateJob

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._options = options_in(spec, ContinuousOptions)
        # Holds a job until its answer begins, in the pipeline or not.
        self._queue: JobQueue[GenerateJob] = JobQueue()
        # What is in the pipeline, in the order in which GenAI got it.
        self._running: dict[int, Running] = {}
        self._step_tokens = self._options.max_num_batched_tokens
        self._batch_limit = batch_sequences(self._options.max_num_seqs)
        self._prefills = PrefillMeter()
        kept = self._options.prefix_cache_tokens
        self._prefixes = PrefixHits(kept // BLOCK_TOKENS) if kept else PrefixHits()
        # Prompts whose callers have left, and which are computed to the end for the prefix cache.
        self._abandoned: dict[int, genai.GenerationHandle] = {}
        self._in_parts = self._options.enable_prefix_caching
        self._finds_prefixes = self._options.caches_prefixes
        # GenAI's own, because each part of a prompt is a request to it.
        self._handles = itertools.count()
        self._steps = 0
        self._stepped = 0
        self._meter = OverlappingRuns(busy_meter(None, spec.energy_meter(), stand_in=False))

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
        # GenAI reports its cache's use in per cent, as of its last step too; with nothing running all of it is free.
        return EngineStats(
            waiting=len(self._queue) + self._decoding() - running,
            running=running,
            runs=self._steps,
            rows=self._stepped,
            kv_cache_usage=metrics.cache_usage / 100 if self._running else 0.0,
            prefix_asked_tokens=self._prefixes.asked_tokens,
            prefix_hit_tokens=self._prefixes.hit_tokens,
        )

    def load(self) -> Loaded:
        began = time.monotonic()
        device = self._spec.device.value
        self._pipeline = open_pipeline(self._spec.path, device, self._options)
        self._defaults = self._pipeline.get_config()
        return Loaded(
            seconds=time.monotonic() - began,
            device_name=str(ov.Core().get_property(device, "FULL_DEVICE_NAME")),
            runtime=genai.get_version(),
        )

    def submit(self, job: GenerateJob) -> None:
        self._queue.add(job)

    def _arrange(self, emit: Outbox) -> None:
        """Put the prompts into the pipeline that the next steps are to compute, in their order."""
        decoding = [running.job for running in self._running.values() if running.started]
        chosen = choose_prompts(
            self._queue.ranked(self._step_tokens),
            self._step_tokens,
            places=max(0, self._options.max_num_seqs - self._decoding()),
            batch_places=self._batch_limit - sum(not job.interactive for job in decoding),
        )
        if not self._in_parts:
            for prompt in chosen:
                if prompt.job.id not in self._running:
                    self._hand_over(prompt, prompt.job.prompt_tokens, emit)
            return
        free = self._step_tokens - len(decoding) - sum(r.left for r in self._running.values() if not r.started)
        for prompt in chosen:
            if prompt.job.id in self._running:
                continue
            if prompt.begun is None and self._finds_prefixes:
                prompt.left = max(1, prompt.job.prompt_tokens - self._prefixes.common(prompt.job.tokens))
            fits = free >= min(prompt.left, BLOCK_TOKENS) or (free > 0 and len(self._running) == len(decoding))
            # A prompt that has been begun keeps its blocks of the KV cache by having a part in the pipeline.
            if fits or prompt.begun is not None:
                free -= self._hand_over(prompt, end_of_part(prompt, self._step_tokens, free), emit)

    def _hand_over(self, prompt: PendingPrompt[GenerateJob], end: int, emit: Outbox) -> int:
        """Give the pipeline the first `end` tokens of a prompt; return how many of them are to be computed."""
        job = prompt.job
        left = prompt.left - (job.prompt_tokens - end)
        if end < job.prompt_tokens:
            job = job.beginning(end)
        # GenAI compiles a grammar now. What goes wrong here would otherwise count as the last step's.
        kind, size = ("begin", left) if job.grammar is None else ("prepare", len(job.grammar))
        emit(NativeCall(kind, size, [job.id]))
        tokens = np.frombuffer(job.tokens, TOKEN_DTYPE).astype(np.int64)[None]
        try:
            config = generation_config(job, self._defaults, prompt_lookup=self._options.prompt_lookup)
            handle = self._pipeline.add_request(next(self._handles), ov.Tensor(tokens), config)
        except (RuntimeError, TypeError, ValueError) as error:
            self._queue.remove(job.id)
            # Only the first line: GenAI's messages go on with source positions, and may quote the configuration.
            emit(Failed(job.id, "invalid_request", str(error).strip().splitlines()[-1]))
            return 0
        if prompt.begun is None:
            self._meter.begin(job.id)
        if self._options.enable_prefix_caching and prompt.begun is None:
            hit = self._prefixes.look_up(prompt.job.tokens, counted=not prompt.job.internal)
            if self._finds_prefixes:
                prompt.reused = min(hit, prompt.job.prompt_tokens - 1)
            self._prefills.spared(prompt.job.prompt_tokens - prompt.left)
        self._running[job.id] = Running(prompt, handle, end, left)
        return left

    def cancel(self, job_id: int) -> None:
        self._queue.remove(job_id)
        self._meter.end(job_id)
        running = self._running.pop(job_id, None)
        if running is None:
            return
        if self._in_parts and running.prompt.begun is not None and not running.started:
            self._abandoned[job_id] = running.handle
        else:
            running.handle.cancel()

    def step(self, emit: Outbox, poll: Inbox) -> None:  # noqa: ARG002  (a step is short: the loop polls between)
        now = time.monotonic()
        for prompt in self._queue.expired(now):
            self.cancel(prompt.job.id)
            emit(Failed(prompt.job.id, "deadline_exceeded", "the deadline passed before the prompt was computed"))
        for job_id in [i for i, r in self._running.items() if (r.job.ends if r.started else r.job.deadline) <= now]:
            self.cancel(job_id)
            emit(Failed(job_id, "deadline_exceeded", "the deadline passed during generation"))
        if self._queue:
            self._arrange(emit)
        if self._pipeline.has_non_finished_requests():
            prompts = [running for running in self._running.values() if not running.started]
            if working := [*self._running, *self._abandoned]:
                # At most: as if the prefix cache held nothing of the prompts.
                most = sum(one.end if one.prompt.begun is None else one.left for one in prompts)
                emit(NativeCall("step", min(most, self._step_tokens) + len(self._running), working))
            self._compute(prompts)
        for job_id, handle in list(self._abandoned.items()):
            if handle.can_read() or handle.get_status() != genai.GenerationStatus.RUNNING:
                handle.cancel()
                del self._abandoned[job_id]
        deltas: list[TokenDelta] = []
        for job_id, running in list(self._running.items()):
            failure = self._read(job_id, running, deltas)
            if failure is not None:
                emit(failure)
        if deltas:
            emit(Step(deltas, announced=bool(self._running)))

    def _compute(self, prompts: Sequence[Running]) -> None:
        """One step of the pipeline, and the account of what it computed of prompts."""
        began = time.monotonic()
        self._pipeline.step()
        seconds = time.monotonic() - began
        self._steps += 1
        if self._running and self._steps % _STEPS_PER_READING == 0:
            self._meter.divide()
        self._stepped += len(self._running)
        if not prompts:
            return
        decoding = self._decoding()
        taken = computed_in_step([running.left for running in prompts], decoding, self._step_tokens)
        for running, tokens in zip(prompts, taken, strict=True):
            prompt = running.prompt
            running.left = max(1, running.left - tokens)
            if tokens:
                prompt.begun = began if prompt.begun is None else prompt.begun
                self._queue.computed(prompt, tokens)
        self._prefills.stepped(seconds, sum(taken), decoding)

    def _decoding(self) -> int:
        """How many answers are being generated; each beam is one."""
        return sum(running.job.sampling.beams or 1 for running in self._running.values() if running.started)

    def _read(self, job_id: int, running: Running, deltas: list[TokenDelta]) -> Event | None:
        status = running.handle.get_status()
        if status == genai.GenerationStatus.IGNORED:
            del self._running[job_id]
            self._queue.remove(job_id)
            self._meter.end(job_id)
            return Failed(job_id, "overloaded", "the KV cache is full; raise cache_size_gb or ask for less")
        if not (running.started or running.whole):
            if running.part_is_computed():
                del self._running[job_id]
            return None
        tokens, logprobs, finish = running.read()
        finished = status == genai.GenerationStatus.FINISHED
        if not tokens and not finished:
            # Beams are read when all are complete; their prompt is computed before.
            if running.job.sampling.beams and running.left == 1:
                running.started = True
                self._queue.remove(job_id)
            return None
        self._queue.generated(running.prompt, len(tokens))
        # From the first token on it is an answer, no longer a prompt.
        at = time.monotonic()
        begun = at if running.prompt.begun is None else running.prompt.begun
        started = None if running.answer else begun
        if not running.started:
            running.started = True
            self._prefixes.computed(running.job.tokens)
            self._queue.remove(job_id)
        running.answer += tokens
        if finished:
            # Nothing came after the last token.
            self._prefixes.computed(running.job.tokens + np.array(running.answer[:-1], TOKEN_DTYPE).tobytes())
            del self._running[job_id]
        busy = None
        if finished:
            busy = self._meter.end(job_id)
        elif finish is not None or running.job.edge_may_stop:
            busy = self._meter.so_far(job_id)
        prefilled, prefill_s = self._prefills.take()
        deltas.append(
            TokenDelta(
                job_id,
                tokens,
                (finish or "length") if finished else finish,
                started,
                busy,
                logprobs=logprobs or None,
                at=at,
                prefilled=prefilled,
                prefill_s=prefill_s,
                cached=running.prompt.reused,
            )
        )
        return None

    def close(self) -> None:
        for job_id in list(self._running):
            self.cancel(job_id)
        for handle in self._abandoned.values():
            handle.cancel()
        # The scheduler frees a cancelled sequence's blocks in its next step, and complains of a leak if there is none.
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        del self._pipeline


def open_pipeline(path: str, device: str, options: ContinuousOptions) -> genai.ContinuousBatchingPipeline:
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = options.max_num_batched_tokens
    scheduler.max_num_seqs = options.max_num_seqs
    scheduler.cache_size = options.cache_size_gb
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = options.enable_prefix_caching
    properties = options.properties()
    pipeline = genai.ContinuousBatchingPipeline(path, scheduler, device, properties)
    if options.enable_prefix_caching and not options.cache_size_gb and options.prefix_cache_tokens:
        _reserve(pipeline, options)
    return pipeline


def _reserve(pipeline: genai.ContinuousBatchingPipeline, options: ContinuousOptions) -> None:
    """Make a growing KV cache begin with blocks for `prefix_cache_tokens`: a prompt takes old blocks before it grows.

    GenAI gives its cache at first what the first requests may need, prompt and answer, even if they are cancelled
    before it computes anything. Nothing is written to the blocks, so the memory is taken when they are first used.
    """
    half = -(-(options.prefix_cache_tokens or 0) // 2)
    job = GenerateJob(0, b"", half, deadline=0.0, sampling=Sampling(ignore_eos=True))
    config = generation_config(job, pipeline.get_config(), prompt_lookup=options.prompt_lookup)
    pipeline.add_request(0, ov.Tensor(np.zeros((1, half), np.int64)), config).cancel()
    pipeline.step()


_FINISH = {
    genai.GenerationFinishReason.STOP: "stop",
    genai.GenerationFinishReason.LENGTH: "length",
}


@dataclass(slots=True)
class Running:
    """A job in the pipeline, with the first `end` tokens of its prompt, of which `left` are to come as far as is known.

    `started` once its prompt is computed and its answer has begun; `answer` are the token ids of it so far.
    """

    prompt: PendingPrompt[GenerateJob]
    handle: genai.GenerationHandle
    end: int
    left: int
    started: bool = False
    answer: list[int] = field(default_factory=list)

    @property
    def job(self) -> GenerateJob:
        return self.prompt.job

    @property
    def whole(self) -> bool:
        """Whether the pipeline has all of the prompt, so that the answer follows."""
        return self.end == self.job.prompt_tokens

    def read(self) -> tuple[list[int], list[float], str | None]:
        """The tokens of the answer that are ready, their log probabilities if asked for, and how it ended if it has."""
        tokens: list[int] = []
        logprobs: list[float] = []
        finish = None
        while self.handle.can_read():
            output, *others = self.handle.read().values()
            if self.job.sampling.beams:
                output = sorted([output, *others], key=lambda each: -each.score)[self.job.sampling.rank]
            tokens += output.generated_ids
            if self.job.sampling.logprobs:
                logprobs += output.generated_log_probs
            finish = _FINISH.get(output.finish_reason)
        return tokens, logprobs, finish

    def part_is_computed(self) -> bool:
        """Whether the part of the prompt is computed: the next can follow. Its token is not part of the answer."""
        while self.handle.can_read():
            self.handle.read()
        if self.handle.get_status() != genai.GenerationStatus.FINISHED:
            return False
        self.prompt.left = self.job.prompt_tokens - self.end
        return True
